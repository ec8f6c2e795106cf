"""What a data set does not say by itself, stated by a person: the unit of every action axis, and which
episodes succeeded.

Units stand in meta/info.json (features/action/robo_rl), which LeRobot's tools keep. Labels of episodes are in
meta/labels.json, which they drop: rightly, as they number the episodes anew.

    {"frames": 1234, "success": [true, false, ...]}       frames: of the data set that the labels are of;
                                                          null: labels were taken back
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data import layout
from robo_rl.data.checksums import put_text
from robo_rl.data.meta import Meta, load_meta, locked
from robo_rl.errors import UserError, choose, quoted
from robo_rl.files import FILE, parse_json, read_json

UNITS = ("rad", "deg", "m", "mm", "rad/s", "deg/s", "m/s", "N", "N m", "%", "1", "as recorded")
ACTION_KINDS = ("absolute", "delta", "rate", "effort")


@dataclass(frozen=True, slots=True)
class Units:
    """Of every action axis. `as recorded`: nobody knows; the numbers go back to the robot that they came
    from."""

    unit: tuple[str, ...]
    kind: tuple[str, ...]

    def __str__(self) -> str:
        pairs = list(zip(self.unit, self.kind, strict=True))
        return ", ".join(f"{pairs.count(pair)} in {pair[0]} ({pair[1]})" for pair in dict.fromkeys(pairs))


def parse_units(text: str, axes: int) -> Units:
    """`rad`, `deg*5,%`, `rad*6,1,rad*6,1`, each with an optional kind: `m delta*3,rad delta*3,1`; one unit
    stands for all axes."""
    unit: list[str] = []
    kind: list[str] = []
    for part in text.split(","):
        name, _, times = part.strip().partition("*")
        words = name.strip().rsplit(" ", 1)
        how = words.pop() if len(words) == 2 and words[1] in ACTION_KINDS else "absolute"
        if times and not times.isdecimal():
            raise UserError(f"--units: {part.strip()!r} must be a unit and how often, as rad*6")
        n = int(times or (axes if "," not in text else 1))
        unit += [choose("unit", " ".join(words), UNITS)] * n
        kind += [how] * n
    if len(unit) != axes:
        raise UserError(
            f"--units {text!r} has {len(unit)} units, the action has {axes} axes; write as rad*{axes}, or "
            "one unit for all"
        )
    return Units(tuple(unit), tuple(kind))


def units_of(meta: Meta) -> Units | None:
    """The units of a data set: stated, or of its ControlSpec (a command of -1 to 1 is a number), or of a
    robot that has one convention alone; None: nobody said."""
    n = len(meta.features.action)
    stated = (meta.info["features"]["action"].get("robo_rl") or {}).get("units")
    if stated is not None:
        try:
            made = Units(tuple(map(str, stated["unit"])), tuple(map(str, stated["kind"])))
        except (TypeError, KeyError, AttributeError):
            made = Units((), ())
        if len(made.unit) != n or len(made.kind) != n:
            raise UserError(
                f"{meta.root / layout.INFO}: the units of the action are malformed; state them again: "
                f"robo_rl data label {quoted(meta.root)} --units …"
            )
        return made
    if meta.spec is not None:
        return Units(
            ("1",) * n,
            tuple(axis.kind for axis in meta.spec.axes) if len(meta.spec.axes) == n else ("absolute",) * n,
        )
    known = KNOWN.get(meta.features.robot.lower())
    return known(n) if known is not None else None


def _aloha(n: int) -> Units:
    """Two arms of six joints and a gripper each (opening, 0 to 1)."""
    arm = ("rad",) * 6 + ("1",)
    return Units((arm * (n // 7))[:n] if n % 7 == 0 else ("rad",) * n, ("absolute",) * n)


# robots whose data sets have one convention alone
KNOWN = {"aloha": _aloha, "aloha_sim": _aloha, "bimanual_viperx": _aloha}


def how_to_state(meta: Meta) -> str:
    """The command that states the units of a data set's actions."""
    n = len(meta.features.action)
    degrees = f"deg, as deg*{n - 1},%" if n > 1 else "deg"
    return (
        f"state them: robo_rl data label {quoted(meta.root)} --units rad (or {degrees}; 1 for commands "
        "of no unit; % where LeRobot recorded joints from -100 to 100, as it does unless "
        "use_degrees is set; 'as recorded' where nobody knows)"
    )


def need_units(meta: Meta) -> Units:
    """`units_of`, or a UserError that says how to state them."""
    units = units_of(meta)
    if units is None:
        n, robot = len(meta.features.action), meta.features.robot
        raise UserError(
            f"data set {meta.root}{f' of robot {robot}' if robot else ''}: nobody stated the units of its "
            f"{n} action axes ({', '.join(meta.features.action[:3])}{', …' if n > 3 else ''}); "
            f"{how_to_state(meta)}"
        )
    return units


def state_units(root: Path, text: str) -> Units:
    """Write the units of every action axis into a data set."""
    with locked(root):
        meta = load_meta(root)
        units = parse_units(text, len(meta.features.action))
        ours = meta.info["features"]["action"].get("robo_rl") or layout.spec_to_dict(meta.spec)
        meta.info["features"]["action"]["robo_rl"] = ours | {
            "units": {"unit": list(units.unit), "kind": list(units.kind)}
        }
        put_text(
            root,
            meta.verifier.sums,
            root / layout.INFO,
            json.dumps(meta.info, indent=4, ensure_ascii=False) + "\n",
        )
    return units


# ---- success


def parse_success(text: str, episodes: int) -> np.ndarray:
    """bool[E] of `all`, `none`, or a file: JSON (a list of truths or of the numbers of episodes that
    succeeded) or lines of numbers."""
    if text in ("all", "none"):
        return np.full(episodes, text == "all")
    path = Path(text)
    if text == "judge":
        raise UserError(
            "a judge looks at every episode once: robo_rl data label FOLDER --success judge --judge WHO "
            "writes what it says into the data set; then leave success=judge out"
        )
    if not path.is_file():
        raise UserError(
            "success must be all, none, a file that names the episodes that succeeded, or judge (robo_rl "
            f"data label alone), got {text!r}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        rows: Any = (
            parse_json(text, "it", (dict, list), limit=FILE)
            if path.suffix == ".json"
            else [int(line) for line in text.split()]
        )
        rows = rows["success"] if isinstance(rows, dict) else rows
        if len(rows) == episodes and all(isinstance(x, bool) for x in rows):
            return np.array(rows, bool)
        numbers = [int(x) for x in rows if not isinstance(x, bool)]
        if len(numbers) != len(rows):
            raise ValueError(f"{len(rows)} truths for {episodes} episodes")
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as e:
        raise UserError(
            f"{path}: {e}; write the numbers of the episodes that succeeded, or a truth for each of "
            f"{episodes}"
        ) from None
    if wrong := [x for x in numbers if not 0 <= x < episodes]:
        raise UserError(f"{path}: there is no episode {wrong[0]}; the data set has 0 to {episodes - 1}")
    if len(set(numbers)) < len(numbers):
        raise UserError(
            f"{path}: an episode is named twice; write the numbers of the episodes that succeeded, or in "
            f"JSON true or false for each of {episodes}"
        )
    out = np.zeros(episodes, bool)
    out[numbers] = True
    return out


def parse_label(text: str, episodes: int) -> np.ndarray:
    """bool[E] of an option `success=all|none|FILE`."""
    what, equals, value = text.partition("=")
    if what != "success" or not equals:
        raise UserError(f"--label must be success=all, success=none or success=FILE, got {text!r}")
    return parse_success(value, episodes)


def label_success(root: Path, text: str) -> np.ndarray:
    """Write which episodes of a data set succeeded -> bool[E]."""
    success = parse_success(text, len(load_meta(root).lengths))
    write_success(root, success)
    return success


def write_success(root: Path, success: np.ndarray | None) -> None:
    """Write success bool[E] into a data set of E episodes; None: labels are taken back, what was recorded
    counts again."""
    told = None if success is None else success.tolist()
    with locked(root):
        meta = load_meta(root)
        if told is not None and len(told) != len(meta.lengths):
            raise UserError(
                f"{root} has {len(meta.lengths)} episodes now, the labels are of {len(told)}; label it again"
            )
        put_text(
            root,
            meta.verifier.sums,
            root / layout.LABELS,
            json.dumps({"frames": int(meta.lengths.sum()), "success": told}) + "\n",
        )


def read_success(meta: Meta) -> np.ndarray | None:
    """bool[E] as labelled; None: nobody did. Labels that are not what was written, and those of a data set
    that has changed since, are refused."""
    path = meta.root / layout.LABELS
    again = f"label the episodes again: robo_rl data label {quoted(meta.root)} --success …"
    if not meta.verifier.is_sound(path):
        what = "not what was written (its checksum differs)" if path.is_file() else "missing"
        raise UserError(
            f"{path}: it is {what}; {again}; if it was changed on purpose: robo_rl data repair "
            f"{quoted(meta.root)} --accept"
        )
    if not path.is_file():
        return None
    document = read_json(path)
    if isinstance(document, dict) and document.get("success", ()) is None:
        return None
    try:
        success, frames = [bool(x) for x in document["success"]], int(document["frames"])
    except (TypeError, KeyError, ValueError) as e:
        raise UserError(f"{path} is damaged ({e!r}); {again}") from None
    total = int(meta.info["total_frames"])
    if frames != total or len(success) != meta.info["total_episodes"]:
        raise UserError(
            f"{path} is of a data set of {len(success)} episodes and {frames} frames, this one has "
            f"{meta.info['total_episodes']} and {total}; {again}"
        )
    return np.array(success[: len(meta.lengths)], bool)
