"""How far a world model can be trusted, as pure statistics of what it predicted and what really happened.

Axes: `B` windows (episodes), `T` control steps, `S` state, `A` action, `P` policies, `N` starts. Nothing here runs a
model: the caller gives the numbers. Intervals are two-sided at `level` and describe the spread over episodes or starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from statistics import NormalDist

import numpy as np

from robo_rl.errors import UserError
from robo_rl.stats import Interval, bootstrap_mean, paired_difference, wilson

HORIZONS = (1, 2, 4, 8, 16, 32, 64)


# ---- open-loop error ---------------------------------------------------------------------------------------------

def state_error(predicted: np.ndarray, true: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Root mean square over the state of (predicted - true)/scale: [B,T,S], [B,T,S], [S] -> [B,T].

    A dimension with scale 0 (it never changes in the data) is left out.
    """
    used = scale > 0
    if not used.any():
        raise UserError("no state dimension changes in this data: there is nothing to predict")
    return np.sqrt(np.square((predicted - true)[..., used] / scale[used]).mean(-1))


def image_error(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Root mean square over pixels of frames uint8 [B,T,h,w,3], in units of the full range (0..1) -> [B,T]."""
    d = predicted.astype(np.float32) - true.astype(np.float32)
    return np.sqrt(np.square(d).mean((-3, -2, -1))) / 255


def hold_last(start: np.ndarray, steps: int) -> np.ndarray:
    """The baseline that nothing moves: start [B,...] -> [B,T,...]."""
    return np.repeat(start[:, None], steps, 1)


def by_horizon(error: np.ndarray, valid: np.ndarray, horizons: Sequence[int] = HORIZONS,
               level: float = 0.95) -> dict[int, Interval]:
    """Mean error at each horizon (its T index + 1) over the windows that last so long, with its bootstrap interval.

    error, valid [B,T]; a horizon that fewer than two windows reach is left out.
    """
    out = {}
    for h in horizons:
        if h <= error.shape[1] and valid[:, h - 1].sum() > 1:
            out[h] = bootstrap_mean(error[valid[:, h - 1], h - 1], level)
    return out


def apart(better: dict[int, Interval], worse: dict[int, Interval]) -> dict[int, bool]:
    """At each shared horizon: does the interval of `better` lie wholly below that of `worse`?"""
    return {h: better[h].high < worse[h].low for h in better if h in worse}


# ---- does the arm go where it is commanded -----------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Response:
    """Linear response of real motion to commands: moved [S] ~ bias + commands [A] @ weight, with its R^2 [S]."""

    weight: np.ndarray
    bias: np.ndarray
    r2: np.ndarray


def respond(commands: np.ndarray, moved: np.ndarray, ridge: float = 1e-6) -> Response:
    """Least squares of `moved` [B,S] (state after minus before) on `commands` [B,A] (actions summed over the chunk)."""
    c0, m0 = commands.mean(0), moved.mean(0)
    c, m = commands - c0, moved - m0
    weight = np.linalg.solve(c.T @ c + ridge * len(c) * np.eye(c.shape[1]), c.T @ m)
    rest = np.square(m - c @ weight).sum(0)
    total = np.square(m).sum(0)
    return Response(weight, m0 - c0 @ weight, 1 - rest / np.where(total > 0, total, np.inf))


def following(response: Response, commands: np.ndarray, moved: np.ndarray, least: float = 0.5) -> tuple[float, float]:
    """(correlation, gain) of the model's motion `moved` [B,S] with the motion that `commands` [B,A] really cause.

    Give it commands the recorded episodes did NOT take (shuffled ones): a model that replays what usually
    happens then scores 0, one that obeys scores 1 with gain 1. Only dimensions that commands explain in reality
    (R^2 >= least) count; nan, nan if there is none. Gain is the least-squares slope of motion on expected motion.
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


# ---- reward, success ---------------------------------------------------------------------------------------------

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


# ---- ranking policies --------------------------------------------------------------------------------------------

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
    """Spearman's rank correlation: Pearson's of the mean ranks (right with ties); nan if either is constant."""
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


def spearman_interval(model: np.ndarray, real: np.ndarray, level: float = 0.95, resamples: int = 1000,
                      seed: int = 0) -> Interval:
    """Spearman of the rows' means of 0/1 `model`, `real` [P,N] with the bootstrap interval over the shared N starts."""
    rng = np.random.default_rng(seed)
    n, out = model.shape[1], []
    for _ in range(resamples):
        pick = rng.integers(n, size=n)
        out.append(spearman(model[:, pick].mean(1), real[:, pick].mean(1)))
    value, kept = spearman(model.mean(1), real.mean(1)), np.array(out)[np.isfinite(out)]
    if len(kept) < resamples / 2:
        return Interval(value, nan, nan)
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


# ---- exploitation ------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Gap:
    """Model success minus real success of one policy on shared starts; `alarm`: it is surely above the tolerance."""

    name: str
    model: float
    real: float
    gap: Interval
    alarm: bool


def exploitation(names: Sequence[str], model: np.ndarray, real: np.ndarray, tolerance: float = 0.15,
                 level: float = 0.95) -> list[Gap]:
    """One `Gap` per policy from 0/1 outcomes `model`, `real` [P,N] on the same starts.

    The alarm of a policy fires where the interval of its gap lies above `tolerance`. The intervals are widened for
    P looks (Bonferroni), so a model without bias rings in at most 1 - level of the evaluations.
    """
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance must be in [0, 1), got {tolerance!r}")
    each = 1 - (1 - level) / max(len(names), 1)
    out = []
    for name, m, r in zip(names, model, real, strict=True):
        gap = paired_difference(m, r, each)
        out.append(Gap(name, float(np.mean(m)), float(np.mean(r)), gap, bool(gap.low > tolerance)))
    return out


# ---- uncertainty -------------------------------------------------------------------------------------------------

def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """P(score of a positive > score of a negative), ties counted half (Mann-Whitney); nan without both classes."""
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
    return [Bin(float(p[i].mean()), float(a[i].mean()), len(i)) for i in np.array_split(order, bins) if len(i)]


def calibration_error(table: Sequence[Bin]) -> float:
    """Expected calibration error: sum of n |predicted - actual| / sum of n."""
    total = sum(b.n for b in table)
    return sum(b.n * abs(b.predicted - b.actual) for b in table) / total if total else nan


def upper_bound(uncertainty: np.ndarray, error: np.ndarray, coverage: float = 0.9) -> float:
    """Conformal factor q such that error <= q * uncertainty in `coverage` of the calibration pairs.

    q is the ceil((n+1) coverage)-th smallest of error/uncertainty; infinity if n is too small for it.
    Source: split conformal prediction, Papadopoulos 2002; Lei et al. 2018, alg. 2.
    """
    ratio = np.sort(np.asarray(error, float).ravel() / np.maximum(np.asarray(uncertainty, float).ravel(), 1e-12))
    k = int(np.ceil((len(ratio) + 1) * coverage))
    return float(ratio[k - 1]) if 1 <= k <= len(ratio) else float("inf")


def minimum_starts(gap: float, tolerance: float, policies: int = 1, level: float = 0.95) -> int:
    """About how many starts let an alarm at `tolerance` see a true gap of `gap` (worst variance, 50 % power)."""
    if gap <= tolerance:
        raise UserError(f"a gap of {gap:g} never passes a tolerance of {tolerance:g}")
    z = NormalDist().inv_cdf(1 - (1 - level) / (2 * policies))
    return int(np.ceil((z / (gap - tolerance)) ** 2 * 0.5))
