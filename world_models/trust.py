"""How far a world model can be trusted, as pure statistics of what it predicted and what really happened.

Axes: `B` windows (episodes), `T` control steps, `S` state, `A` action, `P` policies, `N` starts. Nothing here
runs a model: the caller gives the numbers. Intervals are two-sided at `level` and describe the spread over
episodes or starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from robo_rl.errors import UserError
from robo_rl.stats import Interval, bootstrap_mean, paired_difference, unpaired_difference, wilson
from robo_rl.types import ActionAxis, to_commands

HORIZONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FINE = 0.25  # cycles per pixel: half of what a picture can show


# ---- open-loop error ---------------------------------------------------------------------------------------


def state_error(predicted: np.ndarray, true: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Root mean square over the state of (predicted - true)/scale: [B,T,S], [B,T,S], [S] -> [B,T].

    A dimension with scale 0 (it never changes in the data) is left out.
    """
    used = scale > 0
    if not used.any():
        raise UserError("no state dimension changes in this data: there is nothing to predict")
    return np.sqrt(np.square((predicted - true)[..., used] / scale[used]).mean(-1))


def image_error(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Root mean square over pixels of frames uint8 [B,T,h,w,3], in units of the full range (0..1) ->
    [B,T]."""
    out = [
        np.square(p.astype(np.float32) - t.astype(np.float32)).mean((-3, -2, -1))
        for p, t in zip(predicted, true, strict=True)  # one by one: as numbers all are four times as large
    ]
    return np.sqrt(np.stack(out)) / 255


def fine_detail(predicted: np.ndarray, true: np.ndarray, seen: np.ndarray) -> dict[int, dict[str, float]]:
    """How sharp frames uint8 [B,T,h,w,3] are, where seen [B,T]: of the brightness that varies faster than
    FINE cycles per pixel, its energy in the predicted frames and the energy of their error, both as shares of
    that in the true frames, by horizon.

    Exact frames have energy 1 and error 0, soft ones energy and error below 1, sharp ones in a wrong place 1
    and up to 2.
    """
    fast = np.hypot(*np.meshgrid(*(np.fft.fftfreq(n) for n in true.shape[2:4]), indexing="ij")) >= FINE
    out = {}
    for h in (h for h in HORIZONS if h <= true.shape[1] and seen[:, h - 1].any()):
        p, t = (
            np.fft.fft2(x[seen[:, h - 1], h - 1].astype(np.float32).mean(-1))[:, fast]
            for x in (predicted, true)
        )
        whole = float(np.square(np.abs(t)).sum())
        if whole > 0:
            out[h] = {
                "energy": float(np.square(np.abs(p)).sum()) / whole,
                "error": float(np.square(np.abs(p - t)).sum()) / whole,
            }
    return out


def hold_last(start: np.ndarray, steps: int) -> np.ndarray:
    """The baseline that nothing moves: start [B,...] -> [B,T,...]."""
    return np.repeat(start[:, None], steps, 1)


def by_horizon(
    error: np.ndarray,
    valid: np.ndarray,
    episode: np.ndarray,
    horizons: Sequence[int] = HORIZONS,
    level: float = 0.95,
) -> dict[int, Interval]:
    """Mean error at each horizon (its T index + 1) over the windows that last so long, with its bootstrap
    interval over episodes int[B]; over windows where all are of one episode.

    error, valid [B,T]; a horizon that fewer than two windows reach is left out.
    """
    out = {}
    for h in horizons:
        if h <= error.shape[1] and valid[:, h - 1].sum() > 1:
            rows = valid[:, h - 1]
            several = len(np.unique(episode[rows])) > 1
            groups = episode[rows] if several else None
            out[h] = bootstrap_mean(error[rows, h - 1], level, groups=groups)
    return out


def apart(better: dict[int, Interval], worse: dict[int, Interval]) -> dict[int, bool]:
    """At each shared horizon: does the interval of `better` lie wholly below that of `worse`?"""
    return {h: better[h].high < worse[h].low for h in better if h in worse}


# ---- does the arm go where it is commanded -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OtherCommands:
    """The commands of other windows [B,T,A], as they are given from where a window starts.

    An absolute position that the state has by the axis' name is given relative to where the axis is: `at`
    [B,A] is the command that holds it there, `is_position` [A]. One in a unit of its own that the state lacks
    stays as it was recorded, for from elsewhere it means another motion: `exchanged` [A] are the others.
    """

    at: np.ndarray
    is_position: np.ndarray
    exchanged: np.ndarray

    @classmethod
    def of(cls, axes: Sequence[ActionAxis], state_names: Sequence[str], state: np.ndarray) -> "OtherCommands":
        """Of windows that start in `state` [B,S]."""
        at, names = np.zeros((len(state), len(axes)), np.float32), list(state_names)
        known, lost = np.zeros(len(axes), bool), np.zeros(len(axes), bool)
        for i, axis in enumerate(axes):
            known[i] = axis.kind == "absolute" and axis.name in names
            lost[i] = axis.kind == "absolute" and axis.unit != "1" and not known[i]
            if known[i]:
                x = state[:, names.index(axis.name)]
                at[:, i] = to_commands(x, np.array(axis.low), np.array(axis.high))
        return cls(at, known, ~lost)

    def commands(self, recorded: np.ndarray, order: np.ndarray) -> np.ndarray:
        """The commands [B,T,A] of the windows `order` [B], within -1 .. 1 where they are moved."""
        at = self.at[:, None]
        moved = np.where(self.is_position, (recorded[order] - at[order] + at).clip(-1, 1), recorded[order])
        return np.where(self.exchanged, moved, recorded).astype(np.float32)

    def cause(self, commands: np.ndarray) -> np.ndarray:
        """What of `commands` [B,T,A] moves the arm, [B,exchanged]: the last position less where it is, and
        the sum of all others."""
        cause = np.where(self.is_position, commands[:, -1] - self.at, commands.sum(1))
        return cause[:, self.exchanged]


@dataclass(frozen=True, slots=True)
class Response:
    """Linear response of real motion to commands: moved [S] ~ bias + commands [A] @ weight, with its R^2
    [S]."""

    weight: np.ndarray
    bias: np.ndarray
    r2: np.ndarray


def respond(commands: np.ndarray, moved: np.ndarray, ridge: float = 1e-6) -> Response:
    """Least squares of `moved` [B,S] (state after minus before) on `commands` [B,A]
    (`OtherCommands.cause`)."""
    c0, m0 = commands.mean(0), moved.mean(0)
    c, m = commands - c0, moved - m0
    weight = np.linalg.solve(c.T @ c + ridge * len(c) * np.eye(c.shape[1]), c.T @ m)
    rest = np.square(m - c @ weight).sum(0)
    total = np.square(m).sum(0)
    return Response(weight, m0 - c0 @ weight, 1 - rest / np.where(total > 0, total, np.inf))


def following(
    response: Response, commands: np.ndarray, moved: np.ndarray, least: float = 0.5
) -> tuple[float, float]:
    """(correlation, gain) of the model's motion `moved` [B,S] with the motion that `commands` [B,A] really
    cause.

    Give it commands the recorded episodes did NOT take (shuffled ones): a model that replays what usually
    happens then scores 0, one that obeys scores 1 with gain 1. Only dimensions that commands explain in
    reality (R^2 >= least) count; nan, nan if there is none. Gain is the least-squares slope of motion on
    expected motion.
    """
    used = response.r2 >= least
    if not used.any():
        return nan, nan
    expected = (commands @ response.weight)[:, used]
    spread = expected.std(0)
    x = (expected - expected.mean(0)) / np.where(spread > 0, spread, 1)
    y = (moved[:, used] - moved[:, used].mean(0)) / np.where(spread > 0, spread, 1)
    correlation = (x * y).mean(0) / np.where(y.std(0) > 0, y.std(0), np.inf)
    return float(correlation.mean()), float((x * y).mean(0).mean())


# ---- reward, success ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Confusion:
    """Counts of a yes/no prediction against the truth."""

    tp: int
    fp: int
    fn: int
    tn: int

    @property
    def n(self) -> int:
        return self.tp + self.fp + self.fn + self.tn

    @property
    def accuracy(self) -> Interval:
        return wilson(self.tp + self.tn, self.n)

    @property
    def precision(self) -> Interval:
        return wilson(self.tp, self.tp + self.fp)

    @property
    def recall(self) -> Interval:
        return wilson(self.tp, self.tp + self.fn)


def confusion(predicted: np.ndarray, true: np.ndarray) -> Confusion:
    """Count two bool arrays of one shape."""
    p, t = np.asarray(predicted, bool), np.asarray(true, bool)
    if p.shape != t.shape:
        raise UserError(f"prediction and truth must have one shape, got {p.shape} and {t.shape}")
    return Confusion(int((p & t).sum()), int((p & ~t).sum()), int((~p & t).sum()), int((~p & ~t).sum()))


# ---- ranking policies --------------------------------------------------------------------------------------


def ranks(x: np.ndarray) -> np.ndarray:
    """1-based ranks [n]; equal values share the mean of theirs."""
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return ((2 * last - count + 1) / 2)[which]


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Linear correlation; nan if either is constant."""
    a, b = x - x.mean(), y - y.mean()
    scale = np.sqrt(np.square(a).sum() * np.square(b).sum())
    return float((a * b).sum() / scale) if scale > 0 else nan


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation: Pearson's of the mean ranks (right with ties); nan if either is
    constant."""
    return pearson(ranks(np.asarray(x, float)), ranks(np.asarray(y, float)))


def worst_regret(model: np.ndarray, real: np.ndarray) -> float:
    """Most real success lost by trusting the model's order: max of real_j - real_i over pairs it puts i >= j.

    model, real [P]. A pair the model ties counts, as either may be chosen.
    """
    m, r = np.asarray(model, float), np.asarray(real, float)
    prefers = m[:, None] >= m[None]
    return float(np.where(prefers, r[None] - r[:, None], 0).max(initial=0))


def choice_regret(model: np.ndarray, real: np.ndarray) -> float:
    """Real success lost by choosing the model's best policy (of tied ones the worst)."""
    m, r = np.asarray(model, float), np.asarray(real, float)
    return float(r.max() - r[m == m.max()].min())


def mean_max_rank_violation(model: np.ndarray, real: np.ndarray) -> float:
    """MMRV = mean_i max_j |real_i - real_j| over pairs that model and reality order differently.

    Source: SIMPLER (arXiv 2405.05941) eq. 1.
    """
    m, r = np.asarray(model, float), np.asarray(real, float)
    wrong = (m[:, None] < m[None]) != (r[:, None] < r[None])
    return float((wrong * np.abs(r[:, None] - r[None])).max(1).mean())


def spearman_interval(
    model: np.ndarray, real: np.ndarray, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Spearman of the rows' means of 0/1 `model`, `real` [P,N] with the bootstrap interval over the shared N
    starts."""
    rng = np.random.default_rng(seed)
    n, out = model.shape[1], []
    for _ in range(resamples):
        pick = rng.integers(n, size=n)
        out.append(spearman(model[:, pick].mean(1), real[:, pick].mean(1)))
    return _percentiles(spearman(model.mean(1), real.mean(1)), np.array(out), level)


def spearman_to_counts(
    model: np.ndarray,
    successes: np.ndarray,
    episodes: np.ndarray,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Spearman of the means of 0/1 `model` [P,N] with real rates successes/episodes [P] of other starts;
    interval: the N starts of the model drawn again, and the real counts as binomials with the rate (successes
    + 1/2)/(episodes + 1)."""
    rng, n, out = np.random.default_rng(seed), model.shape[1], []
    rate = (successes + 0.5) / (episodes + 1)
    for _ in range(resamples):
        drawn = rng.binomial(episodes, rate) / episodes
        out.append(spearman(model[:, rng.integers(n, size=n)].mean(1), drawn))
    return _percentiles(spearman(model.mean(1), successes / episodes), np.array(out), level)


def _percentiles(value: float, drawn: np.ndarray, level: float) -> Interval:
    """Of what is finite among `drawn`; nan where that is less than half."""
    kept = drawn[np.isfinite(drawn)]
    if len(kept) < len(drawn) / 2:
        return Interval(value, nan, nan)
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


# ---- model success against real success --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """Model success minus real success of one policy; `alarm`: surely beyond the tolerance, `side`: over or
    under (empty: neither)."""

    name: str
    model: float
    real: float
    gap: Interval
    alarm: bool
    side: str


def judge_gap(name: str, model: float, real: float, gap: Interval, tolerance: float) -> Gap:
    """The alarm fires where the interval of the gap lies above `tolerance` (the policy exploits the model) or
    below its negative (the model underrates it, and would have it thrown away)."""
    side = "over" if gap.low > tolerance else "under" if gap.high < -tolerance else ""
    return Gap(name, model, real, gap, bool(side), side)


def check_tolerance(tolerance: float) -> None:
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance must be in [0, 1), got {tolerance!r}")


def gaps(
    names: Sequence[str], model: np.ndarray, real: np.ndarray, tolerance: float = 0.15, level: float = 0.95
) -> list[Gap]:
    """One `Gap` per policy from 0/1 outcomes `model`, `real` [P,N] on the same starts.

    The intervals are widened for P looks (Bonferroni), so a model without bias rings in at most 1 - level of
    the evaluations.
    """
    check_tolerance(tolerance)
    each = 1 - (1 - level) / max(len(names), 1)
    return [
        judge_gap(n, float(np.mean(m)), float(np.mean(r)), paired_difference(m, r, each), tolerance)
        for n, m, r in zip(names, model, real, strict=True)
    ]


def gaps_to_counts(
    names: Sequence[str],
    model: np.ndarray,
    successes: np.ndarray,
    episodes: np.ndarray,
    tolerance: float = 0.15,
    level: float = 0.95,
) -> list[Gap]:
    """The same against counts of a robot: 0/1 outcomes `model` [P,N], successes and episodes int[P] on other
    starts."""
    check_tolerance(tolerance)
    each = 1 - (1 - level) / max(len(names), 1)
    return [
        judge_gap(
            n,
            float(np.mean(m)),
            k / e,
            unpaired_difference(int(np.sum(m)), len(m), int(k), int(e), each),
            tolerance,
        )
        for n, m, k, e in zip(names, model, successes, episodes, strict=True)
    ]


# ---- uncertainty -------------------------------------------------------------------------------------------


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """P(score of a positive > score of a negative), ties counted half (Mann-Whitney); nan without both
    classes."""
    s, y = np.asarray(score, float).ravel(), np.asarray(positive, bool).ravel()
    a, b = int(y.sum()), int((~y).sum())
    if not a or not b:
        return nan
    return float((ranks(s)[y].sum() - a * (a + 1) / 2) / (a * b))


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin of a reliability diagram."""

    predicted: float
    actual: float
    n: int


def reliability(predicted: np.ndarray, actual: np.ndarray, bins: int = 10) -> list[Bin]:
    """Mean prediction against mean outcome in `bins` bins of equal count, in the order of the prediction."""
    p, a = np.asarray(predicted, float).ravel(), np.asarray(actual, float).ravel()
    order = np.argsort(p, kind="stable")
    return [
        Bin(float(p[i].mean()), float(a[i].mean()), len(i)) for i in np.array_split(order, bins) if len(i)
    ]


def calibration_error(table: Sequence[Bin]) -> float:
    """Expected calibration error: sum of n |predicted - actual| / sum of n."""
    total = sum(b.n for b in table)
    return sum(b.n * abs(b.predicted - b.actual) for b in table) / total if total else nan
