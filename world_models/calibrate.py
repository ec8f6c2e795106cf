"""How far a model can be trusted: open-loop error on held-out episodes, the horizon and the uncertainty it is
good to.

Error of a predicted state: root mean square over the state's dimensions, each in units of its std in the
data. The threshold is the greatest uncertainty u such that, of the held-out predictions with uncertainty <=
u, at most one in ten is off by more than `tolerance`; the horizon the most steps to which the mean error
stays below that of a world that stands still (copy-last). `promised` gives the factors of
`world_models.conformal`, by which an uncertainty becomes a bound on the error. `set_shift` says which
probability of a latent model counts as a success.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from world_models import conformal
from world_models.model import Prediction, WorldModel
from world_models.recorded import Recorded
from world_models.trust import state_error
from world_models.windows import pick_starts

if TYPE_CHECKING:
    from world_models.latent import Latent

TOLERANCE = 0.75  # std
ALLOWED = 0.1  # share of predictions within the threshold that may be off by more
# steps that a model of codes is rolled out to say which probability is a success: along recorded actions it
# soon drifts where a policy would correct itself, and one that finds all successes after long is too low
TOLD_CODED = 4
PICTURED_AT_ONCE = 16  # windows of a model that draws pictures
LEAST = 3  # successes that the probability which counts as one is set on


def unheard(windows: int) -> None:
    """Nobody is told how far it is."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """W windows of held-out episodes, up to H steps: error, copy-last's error and uncertainty [W,H], nan past
    the end."""

    error: np.ndarray
    copied: np.ndarray
    uncertainty: np.ndarray


def open_loop(
    model: WorldModel,
    data: Recorded,
    horizon: int,
    most: int = 400,
    seed: int = 0,
    episodes: np.ndarray | None = None,
    each: Callable[[int], object] = unheard,
) -> OpenLoop:
    """Roll the model out along the recorded actions of held-out episodes (`episodes` of them; None: all),
    from their beginnings and, as far as `most` windows allow, from random steps at least 8 before the end.
    `each(n)` is called after n more windows."""
    held = np.flatnonzero(data.held) if episodes is None else episodes
    rng = np.random.default_rng([seed, 19])
    begin = [(e, data.first[e]) for e in held if data.lengths[e] > 1]
    while begin and len(begin) < most and data.lengths[held].max() > 8:
        e = rng.choice(held)
        if data.lengths[e] > 8:
            begin.append((e, data.first[e] + rng.integers(0, data.lengths[e] - 8)))
    episode, rows = np.array(begin[:most], np.int64).reshape(-1, 2).T
    predicted, truth, there, uncertainty = along_recorded(model, data, episode, rows, horizon, each)
    std = data.state.std(0).clip(min=1e-3)

    def rms(x: np.ndarray) -> np.ndarray:
        return np.where(there, np.sqrt((((x - truth) / std) ** 2).mean(-1)), np.nan)

    return OpenLoop(rms(predicted), rms(data.state[rows][:, None]), uncertainty)


def along_recorded(
    model: WorldModel,
    data: Recorded,
    episode: np.ndarray,
    rows: np.ndarray,
    horizon: int,
    each: Callable[[int], object] = unheard,
):
    """The model from rows [W] of episodes [W] along what was done: (predicted, true states [W,H,S], where
    they are known bool[W,H], uncertainty [W,H], nan elsewhere). `each(n)` is called after n more windows; of
    those with pictures a few are at work at once, for nothing here looks at what is drawn."""
    after, parts = data.after, []
    few = PICTURED_AT_ONCE if data.images else max(len(rows), 1)
    for some in np.split(np.arange(len(rows)), range(few, len(rows), few)):
        p, at, made = rolled(model, data, episode[some], rows[some], horizon)
        there = made & np.isfinite(after[at]).all(-1)
        unsure = np.where(there, p.uncertainty.numpy(), np.nan)
        parts.append((p.obs["state"].numpy(), after[at], there, unsure))
        each(len(some))
    return tuple(np.concatenate(x) for x in zip(*parts, strict=True))


def rolled(
    model: WorldModel, data: Recorded, episode: np.ndarray, rows: np.ndarray, horizon: int
) -> tuple[Prediction, np.ndarray, np.ndarray]:
    """The model from rows [W] of episodes [W] along what was done -> (what it predicts, the rows int64[W,H]
    of the steps, made bool[W,H]: they were; those past the end repeat the last)."""
    last = data.end[episode] - 1
    at = np.minimum(rows[:, None] + np.arange(horizon), last[:, None])
    obs = {"state": data.state[rows], "task": np.array(data.tasks)[data.task[episode]]}
    obs |= {f"image/{v}": x[rows] for v, x in data.images.items()}
    carry = in_motion(model.start(obs, rows.astype(np.int64)), data, rows)
    _, p = model.step(carry, torch.from_numpy(data.action[at]))
    return p, at, rows[:, None] + np.arange(horizon) <= last[:, None]


# ---- which probability is a success ------------------------------------------------------------------------


def set_shift(model: "Latent", data: Recorded, horizon: int) -> None:
    """Set the log-odds of success and end that mean 1/2, `model.shift`: of rollouts along held-out episodes
    as many succeed, and end, in it as did. Where fewer than LEAST held-out ones did, of rollouts along all;
    where fewer still, 0."""
    model.shift.zero_()
    found: list[float | None] = [None, None]
    for episodes in (np.flatnonzero(data.held), np.arange(len(data))):
        rows, episode = covering(data, episodes, horizon)
        if not len(rows) or None not in found:
            continue
        p, at, made = rolled(model, data, episode, rows, horizon)
        for event, (said, happened) in enumerate(((p.success, data.success), (p.terminal, data.terminated))):
            chance = np.where(made, said.double().numpy(), 0).max(1).clip(1e-9, 1 - 1e-9)
            won = happened[episode] & (at[:, -1] == data.end[episode] - 1)
            if found[event] is None:
                found[event] = middle_of(np.log(chance) - np.log1p(-chance), won)
    model.shift.copy_(torch.tensor([x or 0.0 for x in found]))


def covering(data: Recorded, episodes: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, episodes int64[W]) that rollouts of `steps` steps begin at so that they cover each of `episodes`
    twice, the second time half a rollout later."""
    rows = [np.arange(int(data.first[e]), int(data.end[e]) - 1, max(steps // 2, 1)) for e in episodes]
    which = np.repeat(episodes, [len(r) for r in rows])
    return np.concatenate([*rows, np.zeros(0, np.int64)]), which


def middle_of(said: np.ndarray, won: np.ndarray) -> float | None:
    """Between what is said [W] of as many as bool[W] won and what is said of the others; None where fewer
    than LEAST won, or all."""
    k = int(won.sum())
    high = np.sort(said)[::-1]
    return float(high[k - 1] + high[k]) / 2 if LEAST <= k < len(high) else None


# ---- bounds ------------------------------------------------------------------------------------------------


def spread(data: Recorded) -> tuple[float, ...]:
    """The std of every state dimension, 0 where it does not change: the unit of errors."""
    std = data.state.std(0)
    return tuple(float(x) for x in np.where(std > 1e-5, std, 0))


def joined(runs: Sequence[OpenLoop]) -> OpenLoop:
    """Runs of the same horizon as one."""
    return OpenLoop(
        *(np.concatenate([getattr(r, k) for r in runs]) for k in ("error", "copied", "uncertainty"))
    )


def promised(
    model: WorldModel, data: Recorded, horizon: int, per_episode: int = 8, seed: int = 0
) -> tuple[float, ...]:
    """The conformal factor of each of `horizon` steps on held-out episodes, in units of `spread`; infinite
    where too few last so long."""
    return factors_of([scores_on(model, data, horizon, np.flatnonzero(data.held), per_episode, seed)])


def factors_of(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[float, ...]:
    """The conformal factors of what `scores_on` gave for some episodes each."""
    score, there, episode = (np.concatenate(x) for x in zip(*parts, strict=True))
    return tuple(float(q) for q in conformal.factors(score, there, episode)) if len(episode) else ()


def scores_on(
    model: WorldModel,
    data: Recorded,
    horizon: int,
    episodes: np.ndarray,
    per_episode: int = 8,
    seed: int = 0,
    each: Callable[[int], object] = unheard,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(error / uncertainty [W,H], where it is known bool[W,H], episode int64[W]) of `per_episode` windows of
    each of `episodes`, as `wm eval` draws them (`windows.pick_starts`): half from its beginning, half from
    anywhere."""
    held = episodes[data.lengths[episodes] > 1]
    if not len(held):
        return np.zeros((0, horizon)), np.zeros((0, horizon), bool), held
    which, rows = pick_starts(
        data.first[held], data.end[held] - 1, min(per_episode * len(held), 4000), horizon, seed
    )
    predicted, truth, there, uncertainty = along_recorded(model, data, held[which], rows, horizon, each)
    error = state_error(predicted, np.where(there[..., None], truth, predicted), np.array(spread(data)))
    return conformal.scores_of(error, np.where(there, uncertainty, 1)), there, held[which]


def in_motion(carry: dict, data: Recorded, rows: np.ndarray) -> dict:
    """A window that begins inside an episode knows the state before it, where the model keeps one."""
    if "before" not in carry:
        return carry
    begins = np.isin(rows, data.first)
    return carry | {"before": torch.from_numpy(data.state[np.where(begins, rows, rows - 1)])}


def calibrate(run: OpenLoop, tolerance: float = TOLERANCE, allowed: float = ALLOWED) -> tuple[int, float]:
    """(horizon, threshold) of an open-loop run; (0, 0) if it is worse than copy-last from the first step
    on."""
    with np.errstate(invalid="ignore"):
        counts = (~np.isnan(run.error)).sum(0)
        mean, copied = np.nansum(run.error, 0) / counts.clip(1), np.nansum(run.copied, 0) / counts.clip(1)
    worse = np.flatnonzero((mean >= copied) | (counts < 5))
    horizon = int(worse[0]) if len(worse) else len(mean)
    seen = ~np.isnan(run.error)
    return horizon, threshold(run.uncertainty[seen], run.error[seen], tolerance, allowed) if horizon else 0.0


def threshold(uncertainty: np.ndarray, error: np.ndarray, tolerance: float, allowed: float) -> float:
    """Greatest u with share(error > tolerance | uncertainty <= u) <= allowed; 0 if there is none. Arrays
    [n]."""
    order = np.argsort(uncertainty, kind="stable")
    share = np.cumsum(error[order] > tolerance) / np.arange(1, len(order) + 1)
    good = np.flatnonzero(share <= allowed)
    return float(uncertainty[order[good[-1]]]) if len(good) else 0.0
