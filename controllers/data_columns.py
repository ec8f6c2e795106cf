"""What the columns of a data set of one arm mean: which joint, the gripper or the tool each number is of, and
in which unit.

    action    <joint> (absolute, delta or rate), gripper (absolute), dx dy dz [rx ry rz] (delta or rate of the
              tool in the base frame, a rotation as a vector), - (a column that is not commanded)
    state     <joint>, <joint>_velocity, gripper, x y z roll pitch yaw (of the tool in the base frame, about
              fixed axes), - (told as 0)

Names of data sets are read with LeRobot's endings (`.pos`, `.vel`). What a name does not tell is stated:
`--columns`, or `data` in the robot's file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from controllers.cell import numbers
from robo_rl.errors import UserError, in_range

GRIPPER, UNUSED = "gripper", "-"
MOVES = ("dx", "dy", "dz", "rx", "ry", "rz")
TOOL = ("x", "y", "z", "roll", "pitch", "yaw")
SPEED = "_velocity"
KINDS = ("absolute", "delta", "rate")
ANGLES = {"rad": 1.0, "deg": math.pi / 180}
LENGTHS = {"m": 1.0, "mm": 0.001}
OPENINGS = {"1": (0.0, 1.0), "%": (0.0, 100.0)}  # closed, open
SAME = (
    {"gripper_position": GRIPPER, "gripper_opening": GRIPPER}
    | {f"{a}_{m[-1]}": m for m in MOVES[:3] for a in ("d", "delta")}
    | {f"{a}{w}": m for m, w in zip(MOVES[3:], TOOL[3:], strict=True) for a in ("d", "delta_")}
    | {f"delta_{m}": m for m in MOVES[3:]}
    | {f"{a}_{t}": t for t in TOOL for a in ("ee", "tool")}
)
CALIBRATED = (
    "is in % of the joint's calibrated range: name the file that lerobot-calibrate wrote as `calibration` of "
    "`driver` in the robot's file (docs: An arm of serial servos)"
)
REMEDY = "`data` in the robot's file (docs: Data of your own arm)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotData:
    """How data sets are recorded on a robot, where they do not say it themselves; empty: nobody stated it."""

    rate: float = 0.0
    """Actions a second."""
    columns: tuple[str, ...] = ()
    """What each number of the action is, in order."""
    state_columns: tuple[str, ...] = ()
    """What each number of the state is; (): as the action's, by their names."""
    units: str = ""
    """Of the action, as robo_rl data label takes them."""
    state_units: str = ""
    gripper: tuple[float, ...] = ()
    """The gripper's number closed, then open."""

    def __post_init__(self) -> None:
        if self.rate:
            in_range("data: rate", self.rate, 1, 1000)
        if self.gripper:
            numbers("data: gripper", self.gripper, 2, -1e6, 1e6)
            if self.gripper[0] == self.gripper[1]:
                raise UserError(
                    f"data: gripper has a number closed and another open, got {list(self.gripper)}"
                )


def read_data(raw: Any) -> RobotData:
    """From the JSON of a robot's file. UserError names what is wrong."""
    known = {f.name for f in fields(RobotData)}
    if not isinstance(raw, dict) or set(raw) - known:
        raise UserError(
            f"data is an object of {', '.join(sorted(known))}; got "
            f"{', '.join(sorted(set(raw) - known)) if isinstance(raw, dict) else repr(raw)}"
        )
    made = dict(raw)
    for name in ("columns", "state_columns"):
        row = made.get(name, [])
        if not isinstance(row, list) or not all(isinstance(x, str) for x in row):
            raise UserError(f"data: {name} is a list of names, got {row!r}")
        made[name] = tuple(row)
    for name in ("units", "state_units"):
        if not isinstance(made.get(name, ""), str):
            raise UserError(f"data: {name} is a text, got {made[name]!r}")
    if isinstance(made.get("rate", 0.0), bool) or not isinstance(made.get("rate", 0.0), (int, float)):
        raise UserError(f"data: rate is a number, got {made['rate']!r}")
    if "gripper" in made:
        numbers("data: gripper", made["gripper"], 2, -1e6, 1e6)
        made["gripper"] = tuple(made["gripper"])
    return RobotData(**made)


@dataclass(frozen=True, slots=True)
class Column:
    """One number. what: of the words above; number = offset + factor * (rad, rad/s, m or the opening of 0 to
    1); kind, unit: of an action, in the words of `robo_rl data label`."""

    name: str
    what: str
    factor: float = 1.0
    offset: float = 0.0
    kind: str = "absolute"
    unit: str = ""


def meanings(
    names: tuple[str, ...], stated: tuple[str, ...], joints: tuple[str, ...], of: str, option: str
) -> tuple[str, ...]:
    """What each column is, of `action` or `state`. UserError: its name does not tell, or what was stated is
    not of this robot."""
    moved = TOOL if of == "state" else MOVES
    speeds = {f"{j}{SPEED}": j for j in joints} if of == "state" else {}
    words = {*joints, *speeds, *moved, GRIPPER, UNUSED}
    if stated:
        if len(stated) != len(names):
            raise UserError(
                f"{option} names {len(stated)} columns, the run's {of} has {len(names)}: {', '.join(names)}"
            )
        if wrong := [w for w in stated if w not in words]:
            raise UserError(
                f"{option}: unknown {', '.join(wrong)}; a column of the {of} is one of "
                f"{', '.join([*joints, *speeds])}, {GRIPPER}, {', '.join(moved)}, {UNUSED}"
            )
        return stated
    found = {name: meaning(name, words, of) for name in names}
    if lost := [name for name, what in found.items() if what is None]:
        raise UserError(
            f"nobody said what {', '.join(lost[:5])}{', …' if len(lost) > 5 else ''} of the run's {of} "
            f"{'is' if len(lost) == 1 else 'are'}: state all {len(names)} columns in order, as {option} "
            f"{','.join((*joints, GRIPPER)[: len(names)])}, or in {REMEDY}"
        )
    return tuple(what for what in found.values() if what is not None)


def meaning(name: str, words: set[str], of: str) -> str | None:
    """The word for a column of this name; None: it is none."""
    base = name.removesuffix(".pos")
    for ending in (".vel", ".velocity", "_vel"):
        if of == "state" and name.endswith(ending):
            base = name.removesuffix(ending) + SPEED
    if of == "action" and base in TOOL:
        base = MOVES[TOOL.index(base)]
    base = SAME.get(base, base)
    return base if base in words - {UNUSED} else None


def opening(name: str, unit: str, gripper: tuple[float, ...]) -> tuple[float, float]:
    """The gripper's numbers closed and open. UserError: nobody said."""
    if not gripper and unit not in OPENINGS:
        raise UserError(
            f"{name} is in {unit!r}, an opening in 1 (0 closed to 1 open) or %: state its numbers closed and "
            f"open, as --gripper 0,45, or in {REMEDY}"
        )
    closed, wide = gripper or OPENINGS[unit]
    return closed, wide


def size_of(name: str, word: str, base: str, percent: Mapping[str, float]) -> float | None:
    """rad or m of 1 in the unit `base` of a column that is `word`; None: it is no unit of such a column.
    percent: rad of 1 % of a joint's calibrated range. UserError: nobody said that."""
    if base == "%" and word.removesuffix(SPEED) not in (*MOVES, *TOOL):
        if (size := percent.get(word.removesuffix(SPEED))) is None:
            raise UserError(f"{name} {CALIBRATED}")
        return size
    return (LENGTHS if word in (*MOVES[:3], *TOOL[:3]) else ANGLES).get(base)


def action_columns(
    names: tuple[str, ...],
    words: tuple[str, ...],
    unit: tuple[str, ...],
    kind: tuple[str, ...],
    gripper: tuple[float, ...],
    joints: tuple[str, ...],
    rate: float,
    percent: Mapping[str, float],
) -> tuple[Column, ...]:
    """The columns of an action, `rate` of them a second. percent: see `size_of`. UserError: they do not
    command the arm whole, or in no way that is known."""
    used = [w for w in words if w != UNUSED]
    if twice := sorted({w for w in used if used.count(w) > 1}):
        raise UserError(f"the run's action commands {', '.join(twice)} twice")
    moves, turned = [w for w in used if w in MOVES], [w for w in used if w in joints]
    missing = [w for w in (MOVES[:3] if moves else joints) if w not in used]
    if moves and turned or missing:
        raise UserError(
            f"the run's action commands {', '.join(moves + turned) or 'no joint'}"
            + (f" and no {', '.join(missing)}" if missing else "")
            + ": an arm takes all of its joints, or moves of its tool"
        )
    out = []
    for name, word, u, k in zip(names, words, unit, kind, strict=True):
        scale, base = 1.0, u.removesuffix("/s")
        if word == UNUSED:
            out.append(Column(name, word, unit=u))
            continue
        allowed = ("absolute",) if word == GRIPPER else ("delta", "rate") if word in MOVES else KINDS
        if k == "absolute" and base != u:
            k = "rate"  # deg/s says it
        if k not in allowed:
            raise UserError(
                f"{name} is {k}: {word} is commanded by {' or '.join(allowed)} numbers; if the data set says "
                f"it wrongly, state it with --units, as 'rad delta', or in {REMEDY}"
            )
        if word == GRIPPER:
            closed, wide = opening(name, u, gripper)
            out.append(Column(name, word, wide - closed, closed, unit=u))
            continue
        if (size := size_of(name, word, base, percent)) is None:
            known = LENGTHS if word in MOVES[:3] else ANGLES
            raise UserError(
                f"{name} is in {u!r}, and is commanded in {' or '.join(known)}: state it with --units, or in "
                f"{REMEDY}"
            )
        if k == "rate":
            scale = rate  # a row is what is moved in its period
        out.append(Column(name, word, scale / size, kind=k, unit=u))
    return tuple(out)


def state_columns(
    names: tuple[str, ...],
    words: tuple[str, ...],
    unit: tuple[str, ...],
    actions: tuple[Column, ...],
    action_units: tuple[str, ...],
    gripper: tuple[float, ...],
    percent: Mapping[str, float],
) -> tuple[Column, ...]:
    """The columns of a state. unit: stated, or (): those of the action, where it has angles, lengths and a
    gripper. percent: see `size_of`. UserError: nobody said."""
    own = {
        c.name: u
        for c, u in zip(actions, action_units, strict=True)
        if c.kind == "absolute" and c.what != UNUSED
    }
    seen = {
        tuple(known): {u.removesuffix("/s") for u in action_units} & set(known) for known in (ANGLES, LENGTHS)
    }
    out = []
    for k, (name, word) in enumerate(zip(names, words, strict=True)):
        if word == UNUSED:
            out.append(Column(name, word, 0.0))
            continue
        known = LENGTHS if word in TOOL[:3] else ANGLES
        there = unit[k] if unit else own.get(name, "")
        if not there and word == GRIPPER:
            there = next((u for c, u in zip(actions, action_units, strict=True) if c.what == GRIPPER), "")
        elif not there and len(alike := seen[tuple(known)]) == 1:
            there = next(iter(alike))
        if word == GRIPPER:
            closed, wide = opening(name, there, gripper)
            out.append(Column(name, word, wide - closed, closed))
            continue
        if (size := size_of(name, word, there.removesuffix("/s"), percent)) is None:
            raise UserError(
                f"nobody said the unit of {name} in the run's "
                f"state{f' ({there!r} is none of it)' if there else ''}: state those of all {len(names)} "
                f"columns, as --state-units '{next(iter(known))}', or in {REMEDY}"
            )
        out.append(Column(name, word, 1 / size))
    return tuple(out)
