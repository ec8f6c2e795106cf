"""The server of one ROS 2 action on any wire: goals are accepted or refused, followed, cancelled, and
answered when they end.

    accepted -> EXECUTING -> SUCCEEDED, ABORTED          EXECUTING --cancel--> CANCELING -> CANCELED, ABORTED

One goal is followed at a time. A goal that another takes the place of is aborted. Ended goals keep their
result for KEPT seconds, and there are never more than MOST of them. Who may send a goal is for `accept` to
say; anybody may cancel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controllers.action_messages import GoalStatuses, id_fields, seconds_of, time_fields
from controllers.action_types import CANCEL
from controllers.services import PendingReply
from controllers.transport import Transport
from robo_rl.errors import UserError

EXECUTING, CANCELING, SUCCEEDED, CANCELED, ABORTED = 2, 3, 4, 5, 6  # of action_msgs/msg/GoalStatus
UNKNOWN = 0
NONE, REJECTED, UNKNOWN_GOAL, TERMINATED = 0, 1, 2, 3  # of action_msgs/srv/CancelGoal
KEPT = 60.0  # s that a goal's result can be asked for
MOST = 16  # goals that are remembered
WAITING = 4  # callers that wait for the result of one goal


@dataclass(slots=True)
class AcceptedGoal:
    """One accepted goal. id: 16 bytes; at: when it was accepted, ended: or over [s], monotonic; stamp [s]:
    for messages."""

    id: bytes
    at: float
    stamp: float
    source: str
    status: int = EXECUTING
    result: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0
    waiting: list[PendingReply] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.status in (SUCCEEDED, CANCELED, ABORTED)


class ActionServer:
    """Serves the action `name` of a type of `action_types`.

    accept(fields of the goal, who sent it): UserError refuses it; refuse(name, why): is told so. `goal`: what
    is followed; its owner calls `finish`, and looks for CANCELING."""

    def __init__(
        self,
        transport: Transport,
        name: str,
        kind: str,
        feedback: type,
        accept: Callable[[dict, str], None],
        refuse: Callable[[str, str], None],
        replaced: dict[str, Any],
    ):
        """feedback: the message; replaced: result of a goal that another takes the place of."""
        self.transport, self.name, self.accept, self.refuse, self.replaced = (
            transport,
            name,
            accept,
            refuse,
            replaced,
        )
        self.goals: dict[bytes, AcceptedGoal] = {}
        self.goal: AcceptedGoal | None = None
        self.feedback = transport.publisher(f"{name}/_action/feedback", feedback)
        self.status = transport.publisher(f"{name}/_action/status", GoalStatuses, "latched")
        transport.service(f"{name}/_action/send_goal", f"{kind}_SendGoal", self.send_goal)
        transport.service(f"{name}/_action/cancel_goal", CANCEL, self.cancel_goal)
        transport.service(f"{name}/_action/get_result", f"{kind}_GetResult", self.get_result)

    def send_goal(self, request: dict) -> dict:
        id = bytes(request["goal_id"]["uuid"])
        try:
            if id in self.goals:
                raise UserError("a goal of this id was accepted before")
            self.accept(request["goal"], self.transport.caller)
        except UserError as e:
            self.refuse(self.name, str(e))
            return {"accepted": False}
        if self.goal is not None:
            self.finish(ABORTED, self.replaced)
        self.goal = self.goals[id] = AcceptedGoal(
            id, self.transport.now(), self.transport.stamp(), self.transport.caller
        )
        self._forget()
        self._tell()
        return {"accepted": True, "stamp": time_fields(self.goal.stamp)}

    def cancel_goal(self, request: dict) -> dict:
        """By id, by the time up to which goals were accepted, by either, or all: as rcl_action has it."""
        id, stamp = bytes(request["goal_info"]["goal_id"]["uuid"]), seconds_of(request["goal_info"]["stamp"])
        if any(id) and not stamp:
            if id not in self.goals:
                return {"return_code": UNKNOWN_GOAL}
            if self.goals[id].is_over:
                return {"return_code": TERMINATED}
        goal = self.goal
        if goal is None or not (goal.id == id or goal.stamp <= stamp or not any(id) and not stamp):
            return {"return_code": NONE if not any(id) else REJECTED}
        goal.status = CANCELING
        self._tell()
        return {
            "return_code": NONE,
            "goals_canceling": [{"goal_id": id_fields(goal.id), "stamp": time_fields(goal.stamp)}],
        }

    def get_result(self, request: dict) -> "dict | PendingReply":
        goal = self.goals.get(bytes(request["goal_id"]["uuid"]))
        if goal is None:
            return {"status": UNKNOWN}
        if goal.is_over:
            return {"status": goal.status, "result": goal.result}
        if len(goal.waiting) == WAITING:
            goal.waiting.pop(0).reply = {"status": UNKNOWN}
        goal.waiting.append(PendingReply())
        return goal.waiting[-1]

    def finish(self, status: int, result: dict[str, Any]) -> None:
        """The goal that is followed is over: SUCCEEDED, CANCELED or ABORTED."""
        goal = self.goal
        assert goal is not None
        goal.status, goal.result, goal.ended, self.goal = status, result, self.transport.now(), None
        for later in goal.waiting:
            later.reply = {"status": status, "result": result}
        goal.waiting.clear()
        self._forget()
        self._tell()

    def _forget(self) -> None:
        """Goals that ended long ago, and the oldest of too many."""
        now = self.transport.now()
        over = [g for g in self.goals.values() if g.is_over]
        for k, goal in enumerate(over):
            if now - goal.ended > KEPT or k < len(self.goals) - MOST:
                del self.goals[goal.id]

    def _tell(self) -> None:
        self.status.publish(GoalStatuses(tuple((g.id, g.stamp, g.status) for g in self.goals.values())))
