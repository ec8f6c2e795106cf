"""What a world model must beat: simple predictors learnt from the same kind of recorded transitions, rolled
out as the model is.

    constant velocity    s_t = s_0 + t (s_0 - s_before)
    ridge regression     s' = s + [1, s, s - s_before, a] W,   rolled out
    nearest neighbours   s' = s + mean of the k nearest recorded changes in (s, s - s_before, a),
                         or ridge + mean of their residuals

Penalty, k, metric and "with or without ridge" are those with the least rolled-out error on a part of the
reference episodes: the baselines are as strong as this data makes them. States stay within the range of the
data, as the model's do. Predictions of a window come from transitions of other episodes.

Axes: `F` transitions, `B` windows, `T` control steps of a window, `S` state, `A` action.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from world_models.conformal import folds_of

PENALTIES = (1e-6, 1e-4, 1e-2, 1e-1)  # of standardised features, per transition
NEIGHBOURS = (1, 8, 32)
MOST = 20_000  # transitions that neighbours are looked for among
TRIED = 48  # windows that the settings are chosen on
AHEAD = 16  # control steps of them
LEAST = 64  # transitions below which nothing is learnt

# (state, state before, action) [B,.] -> state after [B,S]
Step = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """F recorded steps: state, the state before it, the one after it [F,S], action [F,A], the episode of each
    int64[F]."""

    state: np.ndarray
    before: np.ndarray
    action: np.ndarray
    after: np.ndarray
    episode: np.ndarray

    def of(self, rows: np.ndarray) -> "RecordedSteps":
        return RecordedSteps(
            self.state[rows], self.before[rows], self.action[rows], self.after[rows], self.episode[rows]
        )


def transitions_of(dataset, episodes: np.ndarray) -> RecordedSteps:
    """The recorded steps of `episodes` (indices) of a data set whose states before and after are known."""
    rows = np.concatenate(
        [np.arange(dataset.from_[e], dataset.to[e]) for e in episodes] or [np.zeros(0, np.int64)]
    )
    episode = np.repeat(episodes, (dataset.to - dataset.from_)[episodes])
    after = dataset.after[rows]
    begins = np.isin(rows, dataset.from_)
    before = np.where(begins[:, None], dataset.state[rows], dataset.state[np.maximum(rows - 1, 0)])
    known = np.isfinite(after).all(1)
    return RecordedSteps(dataset.state[rows], before, dataset.action[rows], after, episode).of(known)


def roll(
    step: Step, start: np.ndarray, before: np.ndarray, actions: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """States float32[B,T,S] of a one-step predictor along actions [B,T,A]."""
    out, s, b = [], start.astype(np.float64), before.astype(np.float64)
    for a in actions.swapaxes(0, 1):
        s, b = np.clip(step(s, b, a), low, high), s
        out.append(s)
    return np.stack(out, 1).astype(np.float32)


def constant_velocity(start: np.ndarray, before: np.ndarray, steps: int) -> np.ndarray:
    """float32[B,T,S]: the change of the last step goes on."""
    return start[:, None] + np.arange(1, steps + 1, dtype=np.float32)[:, None] * (start - before)[:, None]


@dataclass(frozen=True, slots=True)
class StepUnits:
    """Means and spreads that make features comparable, and the range of the states with a quarter beyond it
    on both sides."""

    mean: np.ndarray
    std: np.ndarray
    moved: np.ndarray  # spread of one step's change
    low: np.ndarray
    high: np.ndarray

    def features(self, s: np.ndarray, b: np.ndarray, a: np.ndarray) -> np.ndarray:
        return np.concatenate([(s - self.mean) / self.std, (s - b) / self.moved, a], 1)


def units_of(t: RecordedSteps) -> StepUnits:
    low, high = t.state.min(0), t.state.max(0)
    room = 0.25 * (high - low) + 1e-3
    std = t.state.std(0).clip(min=1e-3)
    return StepUnits(
        t.state.mean(0), std, np.maximum((t.after - t.state).std(0), 0.02 * std), low - room, high + room
    )


def ridge_step(t: RecordedSteps, u: StepUnits, penalty: float) -> Step:
    """Least squares of one step's change with a penalty on standardised weights."""

    def design(s: np.ndarray, b: np.ndarray, a: np.ndarray) -> np.ndarray:
        x = u.features(s, b, a)
        return np.concatenate([x, np.ones((len(x), 1))], 1)

    x = design(t.state, t.before, t.action).astype(np.float64)
    penalties = penalty * len(x) * np.eye(x.shape[1])
    penalties[-1, -1] = 0
    weight = np.linalg.solve(
        x.T @ x + penalties + 1e-9 * np.eye(len(penalties)), x.T @ ((t.after - t.state) / u.moved)
    )
    return lambda s, b, a: s + (design(s, b, a) @ weight) * u.moved


def neighbour_step(t: RecordedSteps, u: StepUnits, k: int, base: Step | None) -> Step:
    """The mean change of the k nearest transitions; with `base` what it predicts plus the mean of its errors
    there."""
    x = u.features(t.state, t.before, t.action).astype(np.float32)
    square = np.square(x).sum(1)
    change = (t.after - (t.state if base is None else base(t.state, t.before, t.action))).astype(np.float32)

    def step(s: np.ndarray, b: np.ndarray, a: np.ndarray) -> np.ndarray:
        y = u.features(s, b, a).astype(np.float32)
        away = square - 2 * y @ x.T  # squared distances less |y|^2
        near = np.argpartition(away, min(k, len(x)) - 1, axis=1)[:, :k]
        return (s if base is None else base(s, b, a)) + change[near].mean(1)

    return step


def fit(t: RecordedSteps, seed: int = 0) -> tuple[dict[str, Step], StepUnits, dict[str, str]]:
    """({name: predictor}, their units, {name: the setting that was chosen}) of reference transitions.

    Settings are chosen by the mean error of AHEAD-step rollouts on one episode in five, then the predictor is
    learnt from all.
    """
    u = units_of(t)
    tried = folds_of(t.episode, 5, seed) == 0
    if tried.all():
        tried = np.arange(len(t.episode)) % 5 == 0  # a single episode
    rng = np.random.default_rng([seed, 43])
    inner, whole = (
        t.of(some(np.flatnonzero(~tried), MOST, rng)),
        t.of(some(np.arange(len(t.episode)), MOST, rng)),
    )
    windows = try_windows(t, np.flatnonzero(tried), rng)

    def error(step: Step) -> float:
        start, before, actions, after, seen = windows
        d = (roll(step, start, before, actions, u.low, u.high) - after) / u.std
        return float(np.sqrt(np.square(d).mean(-1))[seen].mean())

    ridges = {f"penalty {p:g}": ridge_step(t.of(~tried), u, p) for p in PENALTIES}
    best = min(ridges, key=lambda n: error(ridges[n]))
    made = ridge_step(t, u, PENALTIES[list(ridges).index(best)])
    settings = {
        f"k {k}{', of the errors of ridge' if b else ''}": (k, b) for k in NEIGHBOURS for b in (False, True)
    }
    near = {n: neighbour_step(inner, u, k, ridges[best] if b else None) for n, (k, b) in settings.items()}
    chosen = min(near, key=lambda n: error(near[n]))
    k, on_ridge = settings[chosen]
    return (
        {"ridge": made, "neighbours": neighbour_step(whole, u, k, made if on_ridge else None)},
        u,
        {"ridge": best, "neighbours": chosen},
    )


def some(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    return rows if len(rows) <= most else np.sort(rng.permutation(rows)[:most])


def try_windows(t: RecordedSteps, rows: np.ndarray, rng: np.random.Generator):
    """(start, before [B,S], actions [B,T,A], after [B,T,S], seen bool[B,T]) of windows that begin in some of
    `rows`."""
    begin = rng.permutation(rows)[:TRIED]
    at = begin[:, None] + np.arange(AHEAD)
    inside = at < len(t.episode)
    at = np.minimum(at, len(t.episode) - 1)
    seen = inside & (t.episode[at] == t.episode[begin][:, None])
    return t.state[begin], t.before[begin], t.action[at], t.after[at], seen


def predict(reference: RecordedSteps, w, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """({name: states float32[B,T,S]} of each baseline along windows, {name: its setting}).

    The windows' episodes are halved; those of one half are predicted from all other episodes of the
    reference.
    """
    start, before, actions = w.start["state"], w.start["before"], w.actions
    out = {"constant velocity": constant_velocity(start, before, actions.shape[1])}
    settings: dict[str, str] = {}
    half = folds_of(w.episode, 2, seed)
    for k in np.unique(half):
        rows = half == k
        use = ~np.isin(reference.episode, w.episode[rows])
        if use.sum() < LEAST:
            return {"constant velocity": out["constant velocity"]}, {}
        steps, u, found = fit(reference.of(use), seed)
        settings = settings or found
        for name, step in steps.items():
            states = roll(step, start[rows], before[rows], actions[rows], u.low, u.high)
            out.setdefault(name, np.zeros((*actions.shape[:2], start.shape[1]), np.float32))[rows] = states
    return out, settings
