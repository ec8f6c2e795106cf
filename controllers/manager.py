"""The controllers of a simulated arm as ros2_control's services show them: listed, switched, with parameters.

One controller at a time holds the arm; a switch is bumpless, and refused while an armed arm moves. While
somebody holds the lease, a switch, a parameter and the scene are the holder's to change.
Names of services, states and parameters are those of controller_manager and of CRISP's Cartesian controller.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from controllers.governor import DISARMED, STOPPED
from controllers.hardware import Hardware
from controllers.law import Law, LawOptions
from controllers.node import ORDERS, ArmNode
from controllers.robot import Robot
from controllers.services import STRICT, Parameters
from controllers.trajectory_controller import NAME, GripperController, TrajectoryController
from controllers.transport import Text
from robo_rl.errors import UserError

BROADCASTERS = {
    "joint_state_broadcaster": "joint_state_broadcaster/JointStateBroadcaster",
    "pose_broadcaster": "crisp_controllers/PoseBroadcaster",
    "twist_broadcaster": "crisp_controllers/TwistBroadcaster",
}
TRANSITIONS = {  # verb -> states before, state after ("": gone)
    "load": ((None,), "unconfigured"),
    "configure": (("unconfigured", "inactive"), "inactive"),
    "cleanup": (("inactive",), "unconfigured"),
    "unload": (("unconfigured", "inactive"), ""),
}
AXES = ("pos_x", "pos_y", "pos_z", "rot_x", "rot_y", "rot_z")
CLIPS = ("x", "y", "z", "rx", "ry", "rz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """One law under its name. robot: with the torque rate that this law may have."""

    options: LawOptions
    robot: Robot
    servo: bool = False
    kind: str = "crisp_controllers/CartesianController"
    streamed: bool = True
    """Whether it follows target_pose and target_joint; else goals alone."""


class Manager:
    """Services of an arm's node: controller_manager/*, <controller>/*_parameters, sim_arm/*_parameters,
    safety/*."""

    def __init__(
        self,
        node: ArmNode,
        controllers: dict[str, Controller],
        active: str,
        place: Callable[[tuple[float, ...]], None] | None = None,
        start: Callable[[int], None] | None = None,
        description: str = "",
    ):
        """description: URDF, "" for none. place(numbers): put the arm and the scene's bodies there; start(k):
        at start k of the scene."""
        self.node, self.controllers, self.active = node, controllers, active
        self.place, self.start, self.number = place, start, 0
        self.states = dict.fromkeys(controllers, "inactive")  # of those that are loaded
        wire = node.transport
        if node.governor is not None:
            if NAME in controllers:
                node.before_governor.append(TrajectoryController(node, lambda: self.active == NAME).tick)
            if node.arm.opening is not None:
                node.before_governor.append(GripperController(node).tick)
        wire.service(
            "controller_manager/list_controllers", "controller_manager_msgs/srv/ListControllers", self.listed
        )
        Hardware(node, f"{node.arm.robot.name}_hardware", self.claimed)
        wire.service(
            "controller_manager/switch_controller",
            "controller_manager_msgs/srv/SwitchController",
            self.switch,
        )
        for verb in TRANSITIONS:
            wire.service(
                f"controller_manager/{verb}_controller",
                f"controller_manager_msgs/srv/{verb.title()}Controller",
                lambda request, verb=verb: {"ok": self.transition(verb, request["name"])},
            )
        for name in controllers:
            writable = tuple(k for k in self.values(name) if k.startswith("task.") or k == "damping_ratio")
            Parameters(
                lambda name=name: self.values(name), lambda k, v, name=name: self.change(name, k, v), writable
            ).serve(wire, name)
        if description:  # as a robot_state_publisher has it: on its topic, and as its parameter
            wire.publisher("robot_description", Text, "latched").publish(Text(description))
            Parameters(lambda: {"robot_description": description}, lambda k, v: None, ()).serve(
                wire, "robot_state_publisher"
            )
        if place is not None:
            Parameters(self.scene, self.put, ("start", "placement")).serve(wire, "sim_arm")
        if node.governor is not None:
            for order in ORDERS:
                wire.service(
                    f"safety/{order}", "std_srvs/srv/Trigger", lambda _, order=order: self.order(order)
                )
            wire.service("estop", "std_srvs/srv/SetBool", self.estop)

    # ---- controllers ---------------------------------------------------------------------------------------

    def claimed(self) -> list[str]:
        """Command interfaces of the controller that holds the arm."""
        return [f"{j}/effort" for j in self.node.arm.robot.joints]

    def listed(self, _: dict) -> dict:
        joints = self.node.arm.robot.joints
        rate = round(1 / self.node.arm.dt)
        rows = [
            {
                "name": n,
                "type": c.kind,
                "state": "active" if n == self.active else self.states[n],
                "update_rate": rate,
                "claimed_interfaces": self.claimed() if n == self.active else [],
                "required_command_interfaces": [f"{j}/effort" for j in joints],
                "required_state_interfaces": [f"{j}/{k}" for j in joints for k in ("position", "velocity")],
            }
            for n, c in self.controllers.items()
            if n in self.states
        ]
        return {
            "controller": rows
            + [
                {"name": n, "type": k, "state": "active", "update_rate": rate}
                for n, k in BROADCASTERS.items()
            ]
        }

    def transition(self, verb: str, name: str) -> bool:
        """load, configure, cleanup, unload, as controller_manager has them: whether it was done. What holds
        the arm stays."""
        before, after = TRANSITIONS[verb]
        try:
            self.node.check_change()
            if name not in self.controllers:
                raise UserError(f"no controller {name}. Allowed: {', '.join(self.controllers)}")
            if name == self.active:
                raise UserError(f"{name} holds the arm: switch to another first")
            if self.states.get(name) not in before:
                raise UserError(f"{name} is {self.states.get(name, 'not loaded')}")
        except UserError as e:
            self.node.refuse(f"{verb} {name}", str(e))
            return False
        self.states.pop(name, None)
        if after:
            self.states[name] = after
        return True

    def switch(self, request: dict) -> dict:
        try:
            self._switch(
                request["activate_controllers"], request["deactivate_controllers"], request["strictness"]
            )
        except UserError as e:
            return {"ok": False, "message": str(e)}
        return {"ok": True, "message": f"{self.active} is active"}

    def _switch(self, on: list[str], off: list[str], strictness: int) -> None:
        unknown = [n for n in [*on, *off] if n not in self.controllers and n not in BROADCASTERS]
        if unknown and (strictness == STRICT or len(unknown) == len([*on, *off])):
            raise UserError(f"no controller {', '.join(unknown)}. Allowed: {', '.join(self.controllers)}")
        if stay := [n for n in off if n in BROADCASTERS]:
            raise UserError(f"{', '.join(stay)} stays active: the arm's state is never silent")
        self.node.check_change()
        wanted = [n for n in on if n in self.controllers]
        if len(wanted) > 1:
            raise UserError(f"{', '.join(wanted)} command the same joints: activate one")
        if not wanted:
            if self.active in off:
                raise UserError(f"{self.active} holds the arm: name the controller that takes over")
            return
        if wanted[0] == self.active:
            return
        if self.states.get(wanted[0]) != "inactive":
            raise UserError(
                f"{wanted[0]} is {self.states.get(wanted[0], 'not loaded')}: load and configure it first"
            )
        if self.node.governor is not None:
            self.node.governor.rebase(self.node.transport.now())
        new = self.controllers[wanted[0]]
        self.node.arm.use(Law(new.options, new.robot), new.servo)
        self.active = wanted[0]
        if self.node.governed is not None:
            self.node.governed.streamed = new.streamed

    # ---- parameters ----------------------------------------------------------------------------------------

    def values(self, name: str) -> dict:
        o = self.controllers[name].options
        out: dict = {f"task.k_{a}": k for a, k in zip(AXES, o.stiffness, strict=True)}
        if o.error_clip is not None:
            out |= {f"task.error_clip.{a}": float(c) for a, c in zip(CLIPS, o.error_clip, strict=True)}
        return {k: float(v) for k, v in out.items()} | {
            "damping_ratio": o.damping_ratio,
            "filter_time": o.filter_time,
            "target_speed": o.target_speed,
            "torque_fraction": o.torque_fraction,
            "nullspace.projector_type": o.nullspace,
            "joints": ",".join(self.node.arm.robot.joints),
        }

    def change(self, name: str, key: str, value: float) -> None:
        """Set one parameter of a controller; the one that runs ramps to it."""
        self.node.check_change()
        c = self.controllers[name]
        o = c.options
        if key == "damping_ratio":
            o = replace(o, damping_ratio=value)
        elif key.startswith("task.error_clip."):
            k = CLIPS.index(key.rsplit(".", 1)[1])
            assert o.error_clip is not None  # else `values` offers none
            o = replace(o, error_clip=(*o.error_clip[:k], value, *o.error_clip[k + 1 :]))
        else:
            k = AXES.index(key.removeprefix("task.k_"))
            o = replace(o, stiffness=(*o.stiffness[:k], value, *o.stiffness[k + 1 :]))
        if name == self.active:
            self.node.arm.law.set_options(o)
        self.controllers[name] = replace(c, options=o)

    def scene(self) -> dict:
        arm = self.node.arm
        return {
            "start": self.number,
            "placement": tuple(
                float(x)
                for x in placement(
                    arm.model.q, {n: (arm.data.body(n).xpos, arm.data.body(n).xquat) for n in arm.objects()}
                )
            ),
        }

    def put(self, key: str, value: Any) -> None:
        """Put the scene at a start (an int) or a placement (a row of numbers): a person's or an evaluation's
        doing, never while the arm is commanded."""
        self.node.check_change()
        governor = self.node.governor
        if governor is not None and governor.state != DISARMED:
            first = "reset it (--reset), after a look at why" if governor.state == STOPPED else "disarm it"
            raise UserError(f"the arm is {governor.state}: {first}, then place it")
        if key == "start":
            if self.start is None:
                raise UserError("this scene has no numbered starts: write `placement`")
            self.start(value)
            self.number = value
        else:
            assert self.place is not None  # else nobody can write it
            self.place(value)
        if governor is not None:
            governor.moved(self.node.transport.now())

    # ---- safety --------------------------------------------------------------------------------------------

    def order(self, order: str) -> dict:
        governor = self.node.governor
        assert governor is not None  # else there is no such service
        try:
            self.node.asked(order, self.node.transport.caller)
        except UserError as e:
            self.node.refuse(f"safety/{order}", str(e))
            return {"success": False, "message": f"{governor.state}: {e}"}
        return {"success": True, "message": governor.state}

    def estop(self, request: dict) -> dict:
        """True says stop until a False; then `claim` and `safety/reset` are a person's next steps."""
        governor = self.node.governor
        assert governor is not None
        self.node.estop_service(request["data"])
        return {"success": bool(request["data"]), "message": governor.state}


def placement(joints, objects: dict) -> list[float]:
    """Joint angles, then of each body in the order of names its pos and quat, as one row."""
    return [*map(float, joints), *(float(x) for n in sorted(objects) for part in objects[n] for x in part)]


def placed(row: "tuple[float, ...]", joints: int, objects: list[str]) -> tuple[list[float], dict]:
    """(joint angles, bodies' poses) of such a row. UserError where its length or its numbers are wrong."""
    if len(row) != joints + 7 * len(objects):
        raise UserError(
            f"a placement has {joints} joints and 7 numbers for each of "
            f"{', '.join(sorted(objects)) or 'no bodies'}, got {len(row)} numbers"
        )
    rest = row[joints:]
    return list(row[:joints]), {
        n: (rest[7 * k : 7 * k + 3], rest[7 * k + 3 : 7 * k + 7]) for k, n in enumerate(sorted(objects))
    }
