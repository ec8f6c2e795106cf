"""Windows: recorded stretches to hold a model against, of episodes that it did not learn from.

Axes: `B` windows, `T` control steps of a window, `S` state, `A` action.
"""

from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError, quoted
from robo_rl.types import ActionAxis


@dataclass(frozen=True, slots=True)
class Windows:
    """Recorded stretches of T steps: `start` is what was seen before action 0, row t of the rest after action
    t.

    start {key: [B,...]} (and `before` float32[B,S], the state before it), actions float32[B,T,A], state
    float32[B,T,S], images {view: uint8[B,T,h,w,3]}, reward
    float32[B,T], terminal, success bool[B,T]; `seen` bool[B,T]: the observation after the step was recorded
    (past the last frame of an episode it is not), `made` bool[B,T]: the step was. Rows that were not made
    repeat the last. `episode` int64[B]: which of the data set's a window is from.
    """

    start: dict[str, np.ndarray]
    actions: np.ndarray
    state: np.ndarray
    images: dict[str, np.ndarray]
    reward: np.ndarray
    terminal: np.ndarray
    success: np.ndarray
    seen: np.ndarray
    made: np.ndarray
    episode: np.ndarray

    def __len__(self) -> int:
        return len(self.actions)


def units_differ(
    mine: tuple[ActionAxis, ...],
    theirs: tuple[ActionAxis, ...],
    here: str = "in the model",
    there: str = "in the data",
) -> list[str]:
    """Axes of the same names whose numbers mean something else, as words; of equal ends the units alone."""

    def ends(a: ActionAxis) -> str:
        return f"{a.low:g} .. {a.high:g} "

    def unit(a: ActionAxis) -> str:
        return f"{a.unit} ({a.kind})"

    return [
        f"action {x.name!r} is in {unit(x)} {here}, in {unit(y)} {there}"
        if (x.low, x.high) == (y.low, y.high)
        else f"action {x.name!r} means {ends(x)}{unit(x)} {here}, {ends(y)}{unit(y)} {there}"
        for x, y in zip(mine, theirs, strict=False)
        if (x.low, x.high, x.unit, x.kind) != (y.low, y.high, y.unit, y.kind)
    ]


def pick_starts(
    first: np.ndarray, last: np.ndarray, count: int, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(episode int64[B], first row int64[B]) of `count` windows over the episodes with rows first[e] ..
    last[e].

    One window in two begins with its episode; the others anywhere that leaves `steps` rows, or in its first
    half where that is later.
    """
    rng = np.random.default_rng([seed, 23])
    if not len(first):
        raise UserError(
            "no episodes to evaluate on: record some the model has not seen, with another --seed of robo_rl "
            "collect"
        )
    episode = rng.permutation(np.resize(rng.permutation(len(first)), count))
    room = np.maximum(last[episode] - first[episode] - steps, (last - first)[episode] // 2)
    offset = np.where(np.arange(count) % 2 == 0, 0, rng.integers(0, room + 1))
    return episode, first[episode] + offset


def check_dataset(spec, meta, where: str, axes: tuple[ActionAxis, ...] = ()) -> None:
    """Raise UserError naming what differs between what a model stands for and recorded episodes; `axes`: what
    their actions mean, where that was recorded. Cameras are known by name, in any order."""
    f, control = meta.features, spec.control
    have = {v: f"{h} x {w} pixels" for v, h, w in f.views}
    size = f"{spec.image_size} x {spec.image_size} pixels"
    for name, mine, theirs in (
        ("action axes are", ", ".join(control.action_names), ", ".join(f.action)),
        ("state size is", spec.state, len(f.state)),
        ("control rate [Hz] is", round(1 / control.period), round(f.fps)),
        *((f"camera {v} is", size, have.get(v, "absent")) for v in control.views),
    ):
        if mine != theirs:
            raise UserError(
                f"{where}: the model's {name} {mine}, the data set's {theirs}. Take recordings made as those "
                f"that the model learnt from, or learn another model: robo_rl wm train {quoted(where)}"
            )
    if axes and (bad := units_differ(control.axes, axes)):
        raise UserError(
            f"{where}: {bad[0]}. Take recordings with the control of what the model learnt from; units that "
            f"are stated wrong are stated anew: robo_rl data label {quoted(where)} --units …"
        )


def treated(model, first: np.ndarray) -> np.ndarray:
    """int8[E]: what the model did with the episode that began in each state float32[E,S]: learnt from it (0),
    held it out (1), never had it (-1); by the bytes of that state."""
    f = model.frames
    if "state" not in f.obs:
        return np.full(len(first), -1, np.int8)
    state, was = np.asarray(f.obs["state"], np.float32), {}
    for held in (True, False):  # of two alike, what was learnt from counts
        was |= {row.tobytes(): int(held) for row in state[f.first & (f.held == held)]}
    return np.array([was.get(row.tobytes(), -1) for row in first], np.int8)


def unseen(model, dataset) -> np.ndarray:
    """bool[episodes]: the model did not learn from it."""
    return treated(model, dataset.state[dataset.from_]) != 0


def foreign_to(model, dataset) -> np.ndarray:
    """bool[episodes]: the model neither learnt from it nor was calibrated on it."""
    return treated(model, dataset.state[dataset.from_]) < 0


def read_windows(dataset, views: tuple[str, ...], episodes: np.ndarray, count: int, steps: int, seed: int):
    """`count` windows of `steps` steps from the given episodes (indices)."""
    first, last = dataset.from_[episodes], dataset.to[episodes] - 1
    which, row = pick_starts(first, last, count, steps, seed)
    end = last[which][:, None]
    at = row[:, None] + np.arange(steps)
    final = at == end
    seen = (at <= end) & np.isfinite(after := dataset.after[np.minimum(at, end)]).all(-1)
    before = np.maximum(row - 1, first[which])
    images, start = (
        {},
        {
            "state": dataset.state[row],
            "before": dataset.state[before],
            "task": np.array([dataset.task(int(e)) for e in episodes[which]]),
        },
    )
    for view in views:
        clips = {}
        for e in np.unique(which):
            clip, last = dataset.frames(view, int(episodes[e])), dataset.final_image(view, int(episodes[e]))
            clips[e] = np.concatenate([clip, clip[-1:] if last is None else last[None]])
            if last is None:
                seen &= ~final | (which != e)[:, None]
        start[f"image/{view}"] = np.stack([clips[e][r - first[e]] for e, r in zip(which, row, strict=False)])
        images[view] = np.stack(
            [
                clips[e][np.minimum(a + 1 - first[e], len(clips[e]) - 1)]
                for e, a in zip(which, at, strict=False)
            ]
        )
    before_end = dataset.state[np.minimum(at, end)]
    return Windows(
        start,
        dataset.action[np.minimum(at, end)],
        np.where(np.isfinite(after), after, before_end),
        images,
        dataset.reward[np.minimum(at, end)],
        final & dataset.terminated[episodes[which]][:, None],
        final & dataset.success[episodes[which]][:, None],
        seen,
        at <= end,
        episodes[which],
    )
