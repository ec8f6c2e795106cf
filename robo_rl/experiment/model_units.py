"""A run whose commands of -1 to 1 are actions in the units of recordings: in a world model of a robot's own
data, or in an env whose demonstrations were recorded in the units of its Box.

    action = low + (command + 1) / 2 (high - low)        low .. high: what -1 and 1 are, kept in the run's
                                                         dataset.json
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl import files
from robo_rl.experiment.data_facts import NAME, DataFacts, facts_of, read_facts
from robo_rl.types import to_commands


@dataclass(frozen=True, slots=True, eq=False)
class CommandUnits:
    """What commands of -1 and 1 are: low, high [A], in the units of the facts."""

    low: np.ndarray
    high: np.ndarray

    def actions(self, commands: np.ndarray) -> np.ndarray:
        """Commands [..., A], cut to -1 .. 1 as the model does -> actions float32 in the robot's units."""
        share = (np.clip(commands, -1, 1) + 1) / 2
        return (self.low + share * (self.high - self.low)).astype(np.float32)

    def commands(self, actions: np.ndarray) -> np.ndarray:
        """Back, float32."""
        return to_commands(actions, self.low, self.high)

    def batches(self, act: "Callable[[Any], list[np.ndarray]]") -> "Callable[[Any], list[np.ndarray]]":
        """`act`, observations -> rows of each, in the robot's units."""
        return lambda batch: [self.actions(rows) for rows in act(batch)]


def keep_facts(folder: Path, env: Any, demos: str) -> None:
    """RUN/dataset.json of a run in the world model `env`, where that learnt from data in their own units.
    demos: a data set of the same robot says in addition what its states were within; "" or a number: none."""
    spec = env.model.spec
    if not spec.own:
        return
    control = spec.control
    facts = DataFacts(
        robot=control.sim,
        rate=1 / control.period,
        tasks=tuple(t for t in spec.tasks if t),
        action=tuple(control.action_names),
        unit=tuple(a.unit for a in control.axes),
        kind=tuple(a.kind for a in control.axes),
        state=tuple(control.state_names),
        command_low=tuple(a.low for a in control.axes),
        command_high=tuple(a.high for a in control.axes),
        fit="pad" if spec.pictures else "",
    )
    if (Path(demos) / "meta" / "info.json").is_file():
        from robo_rl.data.reader import load

        seen = facts_of(load(demos))
        if seen.state == facts.state:
            facts = replace(facts, low=seen.low, high=seen.high)
    files.write_json(folder / NAME, asdict(facts))


def keep_box_facts(folder: Path, env: Any, demos: str) -> None:
    """RUN/dataset.json of a run that learns from a data set in the units of the Box of `env`; demos: as of
    `keep_facts`."""
    if not (Path(demos) / "meta" / "info.json").is_file():
        return
    from robo_rl.data.meta import load_meta
    from robo_rl.data.reader import load
    from robo_rl.demos import is_of_box

    control = env.spec
    if not is_of_box(load_meta(demos), control):  # its frames take long to read
        return
    facts, n = facts_of(load(demos)), len(control.axes)
    if not getattr(env, "describes_task", False):
        facts = replace(facts, tasks=(control.task,))
    if not facts.unit:
        facts = replace(facts, unit=("as recorded",) * n, kind=("absolute",) * n)
    low, high = (tuple(getattr(a, end) for a in control.axes) for end in ("low", "high"))
    files.write_json(folder / NAME, asdict(replace(facts, command_low=low, command_high=high)))


def units_of_run(folder: Path, sim: str, spec: Any) -> tuple[Any, CommandUnits | None]:
    """(ObsSpec of what a run's policy does on the robot, its units) of a run folder in the simulator `sim`;
    of any run whose commands have no units its own ObsSpec and None."""
    facts = DataFacts() if sim == "none" else read_facts(folder, "")
    if not facts.command_low:
        return spec, None
    known = CommandUnits(np.array(facts.command_low), np.array(facts.command_high))
    return replace(spec, units=facts.unit, action_names=facts.action, fit=facts.fit or spec.fit), known
