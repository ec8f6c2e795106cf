"""The frames of a data set that supervision learns from, and their pictures."""

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.run import Run

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset


@dataclass(frozen=True, eq=False)
class SupervisedFrames:
    """What supervision learns from: the frames `rows` int64[K] of a data set (None: all), and their pictures
    {view: uint8[K,h,w,3]} where it has none."""

    data: "Dataset"
    rows: np.ndarray | None = None
    drawn: dict[str, np.ndarray] | None = None

    @property
    def episodes(self) -> np.ndarray:
        """int64[N], rising: those that they are of."""
        return (
            np.arange(len(self.data)) if self.rows is None else np.unique(self.data.episode_index[self.rows])
        )

    def sampler(self, config: TrainConfig, spec, among: np.ndarray | None = None, **more):
        """`demos.demo_sampler` over those that are in `among` bool[F], with its other arguments `more`."""
        from robo_rl.demos import demo_sampler

        rows, drawn = self.rows, self.drawn
        if among is not None and not among.all():
            kept = among if rows is None else among[rows]
            rows = np.flatnonzero(kept) if rows is None else rows[kept]
            drawn = None if drawn is None else {view: x[kept] for view, x in drawn.items()}
        return demo_sampler(
            self.data, spec, config.policy.horizon, config.data, rows=rows, drawn=drawn, **more
        )


def by_policy(data: "Dataset") -> np.ndarray:
    """bool[F]: the frames whose action a policy chose."""
    return data.source == (data.sources.index("policy") if "policy" in data.sources else -1)


def worth_imitating(config: TrainConfig, data: "Dataset") -> np.ndarray:
    """bool[E]: the episodes that --data.imitate says. A policy that is told how good an action is learns
    from all."""
    if config.data.imitate == "all" or config.policy.advantage or not data.is_judged:
        return np.ones(len(data), bool)
    task = data.task_index[data.from_]
    shown = np.bincount(task, data.success, len(data.tasks)) > 0
    return data.success | ~shown[task]


def demonstrated(config: TrainConfig, data: "Dataset") -> np.ndarray:
    """bool[F]: the frames that are demonstrations, of episodes worth it. Where the run recorded them itself
    these are of what the expert did and not of the policy that led it there."""
    return worth_imitating(config, data)[data.episode_index] & ~(by_policy(data) & config.demos.isdecimal())


def say_imitated(config: TrainConfig, data: "Dataset", say) -> None:
    """Tell how many episodes are left out."""
    if not (kept := worth_imitating(config, data)).all():
        say(
            f"supervision leaves out {(~kept).sum()} of {len(data)} episodes, which failed (--data.imitate "
            "all: none)"
        )


def chosen(config: TrainConfig, data: "Dataset", every: int) -> np.ndarray:
    """Rows int64[K] of the frames to learn from: one in `every`, of the demonstrated ones."""
    from robo_rl.data import drawn

    rows = drawn.chosen_frames(data, every, config.seed)
    return rows[demonstrated(config, data)[rows]]


def load_frames(run: Run, folder: Path) -> SupervisedFrames:
    """The frames of the data set in `folder` that --data.every says; their pictures are drawn where it has
    none: of fewer, where they would not fit --data.cache-mb. The run keeps what was drawn: stages of one run
    ask for the same. UserError: they cannot be drawn."""
    from robo_rl.data import drawn
    from robo_rl.demos import load_demos

    config, data = run.config, load_demos(folder, run.env, run.config.data.label)
    every, views = config.data.every, run.env.spec.views
    if every == 1:
        kept = worth_imitating(config, data)[data.episode_index]
        return SupervisedFrames(data, None if kept.all() else np.flatnonzero(kept))
    rows = chosen(config, data, every)
    if not views or data.views:
        return SupervisedFrames(data, rows)
    size = sum(math.prod(run.env.single_observation_space[f"image/{v}"].shape) for v in views)
    most = (config.data.cache_mb << 20) // size
    if len(data) > most:
        raise UserError(
            f"the first pictures of {len(data):,} demonstrations take {len(data) * size >> 20:,} MiB, "
            f"--data.cache-mb allows {config.data.cache_mb:,}: record fewer (--demos), or allow more"
        )
    while len(rows) > most:
        every *= 2
        rows = chosen(config, data, every)
    if every > config.data.every:
        run.report.say(
            f"--data.every {every}: pictures of more frames would not fit --data.cache-mb "
            f"{config.data.cache_mb}"
        )
    kept = run.frames
    if kept is not None and kept.data.meta.root == data.meta.root and np.array_equal(kept.rows, rows):
        return kept
    run.report.start("draw", len(data), "episodes")
    with closing(make_env(config, min(len(data), drawn.GROUP))) as env:
        pictures = drawn.draw_frames(env, data, rows, run.report.advance)
    run.frames = SupervisedFrames(data, rows, pictures)
    return run.frames
