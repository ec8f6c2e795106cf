"""What a run keeps of the data set that it, or the world model that it acts in, learnt from without a
simulator, for `robo_rl deploy` and `serve`: RUN/dataset.json.

    {"robot": "so101", "rate": 30.0, "tasks": ["pick"], "sim": "", "scale": [],
     "action": {"names": [...], "unit": [...], "kind": [...]}, "state": {"names": [...], "low": [...], "high":
     [...]}}

`sim` and `scale` (the value of a command of 1, per axis) are of a data set that an env of ours recorded;
`command_low`, `command_high` (the actions that commands of -1 and 1 are) and `fit` (how pictures became
square) of a run in a world model of data in their own units.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from robo_rl import files
from robo_rl.errors import UserError

NAME = "dataset.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """rate [1/s]; action, unit, kind: of each column of the action; state: names, low, high: what they were
    within (): not known; pictures: the policy's cameras with their recorded size, front=480x640 (h x w)."""

    robot: str = ""
    rate: float = 0.0
    tasks: tuple[str, ...] = ()
    sim: str = ""
    scale: tuple[float, ...] = ()
    action: tuple[str, ...] = ()
    unit: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    command_low: tuple[float, ...] = ()
    command_high: tuple[float, ...] = ()
    fit: str = ""
    pictures: tuple[str, ...] = ()


def facts_of(data, cameras: str = "") -> DataFacts:
    """Of an open data set; cameras: as --data.cameras chooses them."""
    from robo_rl.data.frames import choose_views
    from robo_rl.data.labels import units_of

    meta, f = data.meta, data.features
    units = units_of(meta)
    spec = meta.spec
    return DataFacts(
        robot=f.robot,
        rate=float(f.fps),
        tasks=tuple(data.tasks),
        sim="" if spec is None else spec.sim,
        scale=() if spec is None else tuple(float(a.high) for a in spec.axes),
        action=tuple(f.action),
        unit=units.unit if units else (),
        kind=units.kind if units else (),
        state=tuple(f.state),
        low=tuple(data.state.min(0).astype(float).tolist()),
        high=tuple(data.state.max(0).astype(float).tolist()),
        pictures=tuple(
            f"{name}={h}x{w}"
            for name, source in choose_views(cameras, data.views).items()
            for view, h, w in f.views
            if view == source
        ),
    )


def write_facts(folder: Path, data, cameras: str = "") -> None:
    """RUN/dataset.json of the data set that a run learns from."""
    files.write_json(folder / NAME, asdict(facts_of(data, cameras)))


def read_facts(folder: Path, demos: str) -> DataFacts:
    """Of a run folder; of a run that kept none, those of its data set where that is still there; else empty.
    UserError: damaged."""
    path = folder / NAME
    if not path.is_file():
        if not (Path(demos) / "meta" / "info.json").is_file():
            return DataFacts()
        from robo_rl.data.reader import load

        return facts_of(load(demos))
    raw: dict[str, Any] = files.read_json(path)
    try:
        made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        facts = DataFacts(**made)
        good = all(isinstance(getattr(facts, k), str) for k in ("robot", "sim", "fit")) and isinstance(
            facts.rate, (int, float)
        )
        words = ("robot", "sim", "rate", "fit")
        good &= all(isinstance(getattr(facts, k), tuple) for k in made if k not in words)
    except TypeError:
        good = False
    if not good:
        raise UserError(
            f"{path} is damaged; take it away and leave the data set at {demos}, or state what it said "
            "(robo_rl deploy --help)"
        )
    return facts


def check_instruction(
    folder: Path, config, spec, instruction: str, warn: Callable[[str], None] = lambda line: None
) -> None:
    """Compare the `instruction` that a policy is to be told with those of the data set that the run in
    `folder` learnt from.

    UserError: it has a word that none of these has, and the policy learns words by themselves (one that
    reads text may know it). warn(line): it is another one, of words that it learnt. "", and a run that kept
    no instructions, are not looked at.
    """
    if not (spec.language and instruction and (folder / NAME).is_file()):
        return
    from robo_rl.policies.nets import tokenize

    tasks = [t for t in read_facts(folder, config.demos).tasks if t]
    learnt, asked = tokenize(tasks), tokenize([instruction])[0]
    if not tasks or (learnt == asked).all(1).any():
        return
    known = ", ".join(repr(t) for t in tasks[:6]) + (f" and {len(tasks) - 6} more" if len(tasks) > 6 else "")
    if not spec.text and (new := set(asked.tolist()) - set(learnt.ravel().tolist()) - {0}):
        words = ", ".join(repr(w) for w in instruction.split() if tokenize([w])[0, 0] in new)
        raise UserError(
            f"--instruction {instruction!r}: the run never learnt {words}; it learnt {known}. Give one of "
            "these, or train on episodes of it"
        )
    warn(f"the run never learnt the instruction {instruction!r}; it learnt {known}")
