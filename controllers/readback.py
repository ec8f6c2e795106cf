"""What the arm's controller really has, before it moves: which one is active, and its gains beside those of
the robot's file."""

from typing import Any

from controllers.robot import Robot
from controllers.services import value_of
from controllers.transport import Transport

STIFFNESS = tuple(f"task.k_{kind}_{axis}" for kind in ("pos", "rot") for axis in "xyz")
CLIP = tuple(f"task.error_clip.{axis}" for axis in ("x", "y", "z", "rx", "ry", "rz"))
NEAR = 1e-6  # of a gain


def wanted_gains(robot: Robot) -> dict[str, float]:
    """Parameters of the controller by CRISP's names, as the robot's file has them."""
    out = {}
    for field, names in (("stiffness", STIFFNESS), ("error_clip", CLIP)):
        out |= dict(zip(names, (float(x) for x in robot.gains.get(field) or ()), strict=False))
    return out


def gain_faults(transport: Transport, robot: Robot, timeout: float = 5.0) -> list[str]:
    """Why the robot must not move, one line each; [] where its file names no controller. UserError: no
    service answers."""
    name = robot.cell.controller
    if not name:
        return []
    rows = transport.call(
        "controller_manager/list_controllers", "controller_manager_msgs/srv/ListControllers", {}, timeout
    )["controller"]
    holding = [
        r["name"]
        for r in rows
        if r["state"] == "active" and any(not c.startswith("gripper") for c in r["claimed_interfaces"])
    ]
    faults = []
    if holding != [name]:
        faults.append(
            f"active is {', '.join(holding) or 'no controller'}, the robot's file wants {name} alone"
        )
    wanted = wanted_gains(robot)
    if not wanted or name not in [r["name"] for r in rows]:
        return faults
    there: list[Any] = transport.call(
        f"{name}/get_parameters", "rcl_interfaces/srv/GetParameters", {"names": list(wanted)}, timeout
    )["values"]
    for (key, want), got in zip(wanted.items(), map(value_of, there), strict=True):
        if not isinstance(got, (int, float)) or abs(got - want) > NEAR * max(1.0, abs(want)):
            faults.append(f"{name} has {key} = {got}, the robot's file {want:g}")
    return faults
