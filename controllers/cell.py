"""The cell around an arm, a part of the robot's file: where it may be, how fast, how hard it may press, what
else is there.

A real arm is not armed until its file says a workspace box, a speed and a force limit, or says in `without`
why it has none.
"""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from robo_rl.errors import UserError, choose, in_range

NEEDED = ("box", "speed", "force")
COMMANDS = ("pose", "joint", "forward_position", "joint_trajectory")
TOPIC = re.compile(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)*", re.ASCII)
MOST = {"speed": (1.5, 6.0), "force": (1000.0, 333.0)}


def numbers(name: str, row: Any, count: int | None, low: float, high: float) -> None:
    """UserError: no row of `count` finite numbers in [low, high]."""
    good = (
        isinstance(row, (list, tuple))
        and (count is None or len(row) == count)
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) and low <= x <= high for x in row)
    )
    if not good:
        raise UserError(f"{name} needs {count or ''} numbers from {low:g} to {high:g}, got {row!r}")


def check_topic(what: str, name: Any) -> None:
    """UserError: no name of a topic."""
    if not isinstance(name, str) or not TOPIC.fullmatch(name):
        raise UserError(
            f"{what} needs a name of ROS 2, letters, digits and _ with single / between, none of / ~ and "
            f"digits first (--namespace goes before it); got {name!r}"
        )


def check_pose(what: str, pos: Any, quat: Any) -> None:
    """UserError: pos is no place within 100 m, or quat (w, x, y, z) no turn."""
    numbers(f"{what}: pos", pos, 3, -100, 100)
    numbers(f"{what}: quat", quat, 4, -1.01, 1.01)
    if abs(math.hypot(*quat) - 1) > 1e-2:
        raise UserError(f"{what}: quat must have length 1 within 0.01, got {list(quat)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What the tool carries besides the robot's own parts."""

    mass: float = 0.0  # [kg]
    centre: tuple[float, ...] = (0.0, 0.0, 0.0)  # [m], in the tool's frame
    inertia: tuple[float, ...] = (0.0, 0.0, 0.0)  # about its centre, along the tool's axes [kg m^2]

    def __post_init__(self) -> None:
        in_range("payload: mass", self.mass, 0, 100)
        numbers("payload: centre", self.centre, 3, -2, 2)
        numbers("payload: inertia", self.inertia, 3, 0, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCamera:
    """Where a camera is. pos [m], quat (w, x, y, z) in axes of `frame`: the base's, or the tool's for a
    camera in the hand."""

    frame: str
    pos: tuple[float, ...]
    quat: tuple[float, ...]
    topic: str = ""  # of its CompressedImage; "": <name>/image_raw/compressed

    def __post_init__(self) -> None:
        check_pose("camera", self.pos, self.quat)
        if self.topic != "":
            check_topic("camera: topic", self.topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Limits are the tool's, in the base frame; null where `without` says why there is none."""

    low: tuple[float | None, ...] | None = None
    """Workspace box [m]; a face may be null: open."""
    high: tuple[float | None, ...] | None = None
    tilt: float | None = None
    """Largest angle between the tool's axis z and down [rad]; null: any."""
    speed: tuple[float, ...] | None = None
    """Largest that --speed may ask for [m/s], and of turning [rad/s]."""
    force: tuple[float, ...] | None = None
    """External force [N] and moment [N m] at the tool that hold the arm, from the topic `external_wrench`."""
    without: dict[str, str] = field(default_factory=dict)
    """box, speed or force -> why this cell has no such limit."""
    command: str = ""
    """How it is commanded: pose, joint, forward_position or joint_trajectory; "": joint for the simulated
    arm, else pose."""
    controller: str = ""
    """Name of the controller that must be active, whose gains must be those of this file; "": not looked
    at."""
    homes: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Joint angles [rad] by name, besides the robot's own home."""
    payload: Payload = Payload()
    cameras: dict[str, CellCamera] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise UserError("cell: a box has low and high, each of 3 numbers or nulls")
        for name in ("low", "high"):
            row = getattr(self, name)
            if row is not None:
                if not isinstance(row, (list, tuple)) or len(row) != 3:
                    got = list(row) if isinstance(row, tuple) else row
                    raise UserError(f"cell: {name} has 3 numbers or nulls, got {got!r}")
                numbers(f"cell: {name}", [x for x in row if x is not None], None, -20, 20)  # m
        if self.tilt is not None:
            in_range("cell: tilt", self.tilt, 0, math.pi / 2, open_high=True)
        for name, most in MOST.items():
            row = getattr(self, name)
            if row is not None:
                numbers(f"cell: {name}", row, 2, 0, math.inf)
                for x, m in zip(row, most, strict=True):
                    in_range(f"cell: {name}", x, 0, m, open_low=True)
        for name, why in self.without.items():
            choose("cell: without", name, NEEDED)
            if len(str(why).split()) < 2:
                raise UserError(f"cell: without {name} needs a sentence that says why, got {why!r}")
        choose("cell: command", self.command, ("", *COMMANDS))

    def lacks(self) -> list[str]:
        """Which limits are neither there nor explained."""
        there = {
            "box": self.low is not None and any(x is not None for x in (*self.low, *(self.high or ()))),
            "speed": self.speed is not None,
            "force": self.force is not None,
        }
        return [name for name in NEEDED if not there[name] and name not in self.without]

    def limits(self) -> dict[str, Any]:
        """As fields of `Limits`, but the speed."""
        out: dict[str, Any] = {} if self.low is None else {"low": self.low, "high": self.high}
        if self.tilt is not None:
            out["tilt"] = self.tilt
        if self.force is not None:
            out["wrench"] = self.force
        return out


def read_cell(raw: Any) -> Cell:
    """From the JSON of a robot's file. UserError names what is wrong."""
    made = dict(table("cell", raw, Cell))
    for name, kind in (("payload", Payload), ("cameras", CellCamera)):
        if name not in made:
            continue
        if name == "payload":
            made[name] = kind(**tuples(table("payload", made[name], kind)))
        elif not isinstance(made[name], dict):
            raise UserError(f"cell: cameras is an object of cameras by name, got {made[name]!r}")
        else:
            made[name] = {
                view: kind(**tuples(table(f"camera {view}", one, kind))) for view, one in made[name].items()
            }
    for name in ("without", "homes"):
        if not isinstance(made.get(name, {}), dict):
            raise UserError(f"cell: {name} is an object, got {made[name]!r}")
    made["homes"] = tuples(made.get("homes", {}))
    for name, row in made["homes"].items():
        numbers(f"cell: home {name}", row, None, -math.inf, math.inf)
    for key in ("command", "controller"):
        if not isinstance(made.get(key, ""), str):
            raise UserError(f"cell: {key} is a text, got {made[key]!r}")
    return Cell(**tuples(made))


def table(name: str, raw: Any, kind: type) -> dict:
    """UserError: no object, or with keys that the class has not."""
    known = {f.name for f in fields(kind)}
    if not isinstance(raw, dict) or set(raw) - known:
        raise UserError(
            f"{name} is an object of {', '.join(sorted(known))}; got "
            f"{', '.join(sorted(set(raw) - known)) if isinstance(raw, dict) else repr(raw)}"
        )
    missing = [f.name for f in fields(kind) if f.name in ("frame", "pos", "quat") and f.name not in raw]
    if missing:
        raise UserError(f"{name} lacks {', '.join(missing)}")
    return raw


def tuples(row: dict) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
