"""One goal of an action on any wire, as its sender sees it: send, look, cancel, result. Nothing here waits
for the goal's end."""

import uuid
from typing import Any

from controllers.action_messages import GoalStatuses, id_fields
from controllers.action_types import CANCEL
from controllers.actions import CANCELING, EXECUTING
from controllers.transport import Transport

ACCEPTED = 1


class ActionClient:
    """Of the action `name` of a type of `action_types`. status: of the goal sent last, 0 where the server
    knows none."""

    def __init__(self, transport: Transport, name: str, kind: str):
        self.transport, self.name, self.kind, self.id = transport, name, kind, bytes(16)
        self.told = transport.subscription(f"{name}/_action/status", GoalStatuses, "latched")

    def send(self, goal: dict[str, Any], timeout: float = 5.0) -> bool:
        """Whether the goal was accepted. UserError: nobody answers."""
        self.id = uuid.uuid4().bytes
        request = {"goal_id": id_fields(self.id), "goal": goal}
        return self.transport.call(
            f"{self.name}/_action/send_goal", f"{self.kind}_SendGoal", request, timeout
        )["accepted"]

    @property
    def status(self) -> int:
        got = self.told.latest()
        return 0 if got is None else next((s for goal, _, s in got.message.goals if goal == self.id), 0)

    @property
    def is_running(self) -> bool:
        return self.status in (0, ACCEPTED, EXECUTING, CANCELING)

    def cancel(self, timeout: float = 1.0) -> None:
        request = {"goal_info": {"goal_id": id_fields(self.id)}}
        self.transport.call(f"{self.name}/_action/cancel_goal", CANCEL, request, timeout)

    def result(self, timeout: float = 5.0) -> tuple[int, dict[str, Any]]:
        """(status, result) of a goal that is over. UserError: nobody answers in time."""
        got = self.transport.call(
            f"{self.name}/_action/get_result",
            f"{self.kind}_GetResult",
            {"goal_id": id_fields(self.id)},
            timeout,
        )
        return got["status"], got["result"]
