"""The servos of an arm, a part of the robot's file: on which port, which id is which joint, and where a
joint's zero is.

A calibration of LeRobot (a JSON object by joint, with id, homing_offset, range_min and range_max) can stand
for the servos: a joint's zero is the middle of its range.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from robo_rl.errors import UserError, in_range
from robo_rl.files import read_json

STEPS = 4096  # of one turn
BAUDS = (1_000_000, 500_000, 115_200, 57_600, 38_400, 19_200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Servo:
    """A joint's servo. zero: steps at 0 rad; offset: its Homing_Offset register when that was calibrated,
    None: not compared; reach: steps from the middle of the calibrated range to the end that LeRobot calls
    100 %, 0: not calibrated."""

    id: int
    sign: int = 1
    zero: int = STEPS // 2
    offset: int | None = None
    reach: int = 0

    def __post_init__(self) -> None:
        in_range("driver: servo id", self.id, 0, 253)
        in_range(f"driver: zero of servo {self.id}", self.zero, -STEPS, 2 * STEPS)
        if self.sign not in (-1, 1):
            raise UserError(f"driver: sign of servo {self.id} is 1 or -1, got {self.sign}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GripperServo:
    """closed, opened: steps at both ends."""

    id: int
    closed: int
    opened: int
    offset: int | None = None

    def __post_init__(self) -> None:
        in_range("driver: gripper id", self.id, 0, 253)
        for name in ("closed", "opened"):
            in_range(f"driver: gripper {name}", getattr(self, name), 0, STEPS - 1)
        if self.closed == self.opened:
            raise UserError("driver: the gripper's closed and opened steps must differ")

    def opening(self, steps: int) -> float:
        """0 closed .. 1 open."""
        return min(max((steps - self.closed) / (self.opened - self.closed), 0.0), 1.0)

    def steps(self, opening: float) -> int:
        return round(self.closed + min(max(opening, 0.0), 1.0) * (self.opened - self.closed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """How a robot's servos are reached. servos: in the order of the joints."""

    kind: str = "feetech"
    port: str = "/dev/ttyACM0"
    baud: int = 1_000_000
    servos: tuple[Servo, ...] = ()
    gripper: GripperServo | None = None

    def __post_init__(self) -> None:
        if self.kind != "feetech":
            raise UserError(f"driver: kind is feetech, got {self.kind!r}")
        if not isinstance(self.port, str):
            raise UserError(f"driver: port is a text, got {self.port!r}")
        if self.baud not in BAUDS:
            raise UserError(f"driver: baud must be one of {', '.join(map(str, BAUDS))}, got {self.baud!r}")
        ids = [s.id for s in self.servos] + ([self.gripper.id] if self.gripper else [])
        if len(set(ids)) < len(ids):
            raise UserError(f"driver: each servo has its own id, got {ids}")


def read_driver(raw: Any, joints: tuple[str, ...], folder: Path) -> Driver | None:
    """From the JSON of a robot's file; None: it has none. folder: of the file. UserError names what is
    wrong."""
    if raw is None:
        return None
    made = dict(_table("driver", raw, Driver, "calibration"))
    calibration = made.pop("calibration", None)
    if (calibration is None) == ("servos" not in made):
        raise UserError("driver: give servos, or a calibration file of LeRobot, one of both")
    if calibration is not None:
        made |= read_calibration(folder / str(calibration), joints)
    else:
        if not isinstance(made["servos"], list):
            raise UserError(f"driver: servos is a list, got {made['servos']!r}")
        made["servos"] = tuple(_made("driver: a servo", one, Servo) for one in made["servos"])
        if made.get("gripper") is not None:
            made["gripper"] = _made("driver: gripper", made["gripper"], GripperServo)
    driver = Driver(**made)
    if len(driver.servos) != len(joints):
        raise UserError(f"driver: {len(joints)} joints need as many servos, got {len(driver.servos)}")
    return driver


def read_calibration(path: Path, joints: tuple[str, ...]) -> dict[str, Any]:
    """servos and gripper of a calibration of LeRobot. UserError: it lacks a joint, or makes no sense."""
    raw = read_json(path, limit=1 << 20, remedy="lerobot-calibrate writes it")
    rows = {}
    for name in (*joints, *(["gripper"] if "gripper" in raw else [])):
        row = raw.get(name)
        numbers = (
            [row.get(k) for k in ("id", "homing_offset", "range_min", "range_max")]
            if isinstance(row, dict)
            else [None]
        )
        if any(not isinstance(x, int) or isinstance(x, bool) for x in numbers):
            raise UserError(f"{path}: {name} needs whole numbers id, homing_offset, range_min and range_max")
        if numbers[2] == numbers[3]:
            raise UserError(f"{path}: range_min and range_max of {name} are equal; lerobot-calibrate again")
        rows[name] = [*numbers, -1 if row.get("drive_mode") else 1]
    out: dict[str, Any] = {
        "servos": tuple(
            Servo(id=id, zero=round((low + high) / 2), offset=offset, reach=round(way * (high - low) / 2))
            for id, offset, low, high, way in (rows[j] for j in joints)
        )
    }
    if "gripper" in rows:
        id, offset, low, high, _ = rows["gripper"]
        out["gripper"] = GripperServo(id=id, closed=low, opened=high, offset=offset)
    return out


def _made(name: str, raw: Any, kind: type) -> Any:
    table = _table(name, raw, kind)
    if any(not isinstance(x, int) or isinstance(x, bool) for x in table.values() if x is not None):
        raise UserError(f"{name} has whole numbers, got {raw!r}")
    needed = {"id", "closed", "opened"} if kind is GripperServo else {"id"}
    if missing := needed - set(table):
        raise UserError(f"{name} lacks {', '.join(sorted(missing))}")
    return kind(**table)


def _table(name: str, raw: Any, kind: type, *more: str) -> dict[str, Any]:
    """UserError: no object, or with keys that the class has not."""
    known = {*(f.name for f in fields(kind)), *more}
    if not isinstance(raw, dict) or set(raw) - known:
        raise UserError(
            f"{name} is an object of {', '.join(sorted(known))}; got "
            f"{', '.join(sorted(set(raw) - known)) if isinstance(raw, dict) else repr(raw)}"
        )
    return raw
