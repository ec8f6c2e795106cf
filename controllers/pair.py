"""Two arms as one robot: their files, where their bases are, how near they may come to each other. Read from
one JSON file.

    {"about": "…", "arms": {"left": "left.json", "right": "right.json"},
     "bases": {"left": {"pos": [0, 0.4, 0], "quat": [1, 0, 0, 0]}, "right": {"pos": [0, -0.4, 0], "quat": [1,
     0, 0, 0]}}, "clearance": 0.05, "radius": 0.05, "rate": 50}

The arms' names are the prefixes of their topics (`left/joint_states`) and of their axes (`left_joint1`), in
the file's order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controllers.cell import check_pose
from controllers.robot import Robot, load_robot
from robo_rl.errors import UserError, choose, in_range
from robo_rl.files import read_json

FIELDS = ("about", "arms", "bases", "clearance", "radius", "rate", "without")
NEEDED = ("bases", "clearance")
GRIPPER = "gripper"  # the last axis of an arm, its opening: 0 closed .. 1 open


@dataclass(frozen=True, slots=True)
class BasePose:
    """Of an arm's base in the frame that both share: pos [m], quat (w, x, y, z)."""

    pos: tuple[float, ...]
    quat: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        check_pose("base", self.pos, self.quat)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPair:
    """Two arms. bases: {} where nobody said; clearance [m]: least distance between them, None where there is
    none."""

    name: str
    arms: dict[str, Robot]
    about: str = ""
    bases: dict[str, BasePose] = field(default_factory=dict)
    clearance: float | None = None
    radius: float = 0.0
    """Least radius of the capsules around the links [m]; of arms whose models have no shapes the radius."""
    rate: float = 50.0
    """Of the policy's actions [1/s]."""
    without: dict[str, str] = field(default_factory=dict)
    """clearance -> why there is none."""

    def __post_init__(self) -> None:
        if len(self.arms) != 2 or not all(n.isidentifier() for n in self.arms):
            raise UserError(
                f"pair {self.name}: arms are two, each with a name of letters, digits and _, got "
                f"{', '.join(self.arms)}"
            )
        if self.bases and set(self.bases) != set(self.arms):
            raise UserError(
                f"pair {self.name}: bases are those of {', '.join(self.arms)}, got {', '.join(self.bases)}"
            )
        if self.clearance is not None:
            in_range(f"pair {self.name}: clearance", self.clearance, 0, 1, open_low=True)
        in_range(f"pair {self.name}: radius", self.radius, 0, 1)
        in_range(f"pair {self.name}: rate", self.rate, 1, 1000)
        for name, why in self.without.items():
            choose(f"pair {self.name}: without", name, ("clearance",))
            if len(str(why).split()) < 2:
                raise UserError(
                    f"pair {self.name}: without {name} needs a sentence that says why, got {why!r}"
                )

    @property
    def axes(self) -> tuple[str, ...]:
        """Of state and action: each arm's joints and its gripper, in the file's order."""
        return tuple(
            f"{name}_{axis}" for name, robot in self.arms.items() for axis in (*robot.joints, GRIPPER)
        )

    def lacks(self) -> list[str]:
        """What is neither there nor explained."""
        there = {"bases": bool(self.bases), "clearance": self.clearance is not None}
        return [name for name in NEEDED if not there[name] and name not in self.without]

    def need_limits(self) -> None:
        """UserError: it lacks bases or a clearance, or an arm lacks limits of its own."""
        if lacks := self.lacks():
            raise UserError(
                f"pair {self.name} is not armed: its file says no {' and no '.join(lacks)}"
                + (", nor why there is none in `without`" if "clearance" in lacks else "")
                + " (docs: Two arms)"
            )
        for robot in self.arms.values():
            robot.need_limits()


def is_pair(path: str) -> bool:
    """Whether a robot's file is one of two arms."""
    return (
        Path(path).suffix == ".json"
        and Path(path).is_file()
        and "arms" in read_json(Path(path), limit=1 << 20)
    )


def load_pair(path: str) -> ArmPair:
    """From its JSON file; paths in it are relative to it. UserError names what is wrong."""
    where = Path(path)
    raw = read_json(where, limit=1 << 20, remedy="docs: Two arms")
    if unknown := set(raw) - set(FIELDS):
        raise UserError(
            f"{path}: unknown {', '.join(sorted(unknown))}; a pair of arms has {', '.join(FIELDS)}"
        )
    for key in ("arms", "bases", "without"):
        if not isinstance(raw.get(key, {}), dict):
            raise UserError(f"{path}: {key} is an object, got {raw[key]!r}")
    for key in ("clearance", "radius", "rate"):
        if isinstance(raw.get(key), bool) or not isinstance(raw.get(key, 0.0), (int, float, type(None))):
            raise UserError(f"{path}: {key} is a number, got {raw[key]!r}")
    if is_two := [
        str(file)
        for file in raw["arms"].values()
        if isinstance(file, str) and is_pair(str(where.parent / file))
    ]:
        raise UserError(f"{path}: {is_two[0]} is a pair itself; arms are files or presets of single arms")
    made: dict[str, Any] = {k: v for k, v in raw.items() if v is not None}
    made["arms"] = {
        name: load_robot(str(where.parent / file) if str(file).endswith(".json") else str(file))
        for name, file in raw["arms"].items()
    }
    made["bases"] = {name: read_base(path, name, base) for name, base in raw.get("bases", {}).items()}
    return ArmPair(name=where.stem, **made)


def read_base(path: str, name: str, raw: Any) -> BasePose:
    if not isinstance(raw, dict) or "pos" not in raw or set(raw) - {"pos", "quat"}:
        raise UserError(f"{path}: the base of {name} has pos and quat, got {raw!r}")
    return BasePose(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})
