"""Success rates with honest intervals: one proportion, two on the same starts, two on different starts.

Everything is a pure function of counts or 0/1 vectors. Intervals are two-sided at `level`; they describe the
spread over starts for the policy at hand, not the spread over training seeds.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from robo_rl.errors import UserError


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TaskRow:
    """Success on one task or instruction."""

    task: str
    n: int
    successes: int
    rate: Interval


def _z(level: float) -> float:
    """Two-sided standard normal quantile: P(|Z| <= z) = level."""
    if not 0.0 < level < 1.0:
        raise UserError(f"level must be in (0, 1), got {level!r}; 0.95 is usual")
    return NormalDist().inv_cdf(0.5 + level / 2)


def _binary(name: str, x: "Sequence[float] | np.ndarray") -> np.ndarray:
    """`x` as a bool vector [n]; raise unless every entry is 0 or 1."""
    a = np.asarray(x, dtype=np.float64)
    if a.ndim != 1 or not np.isin(a, (0.0, 1.0)).all():
        raise UserError(f"{name} must be a flat list of 0 and 1 (one per episode)")
    return a.astype(bool)


def wilson(successes: float, n: float, level: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate p = x/n.

        (p + z^2/2n  -+  z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

    Never leaves [0, 1] and is right where p is near 0 or 1, unlike p -+ z sqrt(p(1-p)/n). n = 0 gives
    (nan, 0, 1). Source: Wilson 1927, J. Am. Stat. Assoc. 22, 209; Newcombe 1998, Stat. Med. 17, 857, method
    3.
    """
    if n < 0 or not 0 <= successes <= n:
        raise UserError(f"successes must be in [0, n], got {successes} of {n}")
    z = _z(level)
    if n == 0:
        return Interval(nan, 0.0, 1.0)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale  # the ends are exact there; rounding is not
    high = 1.0 if successes == n else (centre + half) / scale
    return Interval(p, low, high)


def success_rate(
    success: "Sequence[float] | np.ndarray", groups: "Sequence | np.ndarray | None" = None
) -> Interval:
    """Mean of 0/1 `success` [n] with its 95 % Wilson interval; groups [n]: as in `counts`."""
    return wilson(*counts(success, groups))


def counts(
    success: "Sequence[float] | np.ndarray", groups: "Sequence | np.ndarray | None" = None
) -> tuple[float, int]:
    """(successes, n) that the interval of 0/1 `success` is of.

    groups [n]: values of one group are no news beside each other (windows of one episode, episodes that begin
    alike), so there are as many values as groups.
    """
    a = _binary("success", success)
    n = len(a) if groups is None else len(set(groups))
    return (int(a.sum()) * n / len(a) if n else 0, n)


def _square_and_add(p1: Interval, p2: Interval, phi: float) -> Interval:
    """Interval of p1 - p2 from the two Wilson intervals and the correlation `phi` of their errors:

    low  = d - sqrt((p1-l1)^2 - 2 phi (p1-l1)(u2-p2) + (u2-p2)^2)
    high = d + sqrt((u1-p1)^2 - 2 phi (u1-p1)(p2-l2) + (p2-l2)^2)
    """
    d = p1.value - p2.value
    a, b = p1.value - p1.low, p2.high - p2.value
    c, e = p1.high - p1.value, p2.value - p2.low
    low = d - sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))
    high = d + sqrt(max(c * c - 2 * phi * c * e + e * e, 0.0))
    return Interval(d, max(low, -1.0), min(high, 1.0))


def unpaired_difference(
    successes1: float, n1: int, successes2: float, n2: int, level: float = 0.95
) -> Interval:
    """x1/n1 - x2/n2 for two independent sets of starts: Newcombe's hybrid score interval.

    Source: Newcombe 1998, Stat. Med. 17, 873-890, method 10. n = 0 on either side gives (nan, -1, 1).
    """
    p1, p2 = wilson(successes1, n1, level), wilson(successes2, n2, level)
    return _square_and_add(p1, p2, 0.0) if n1 and n2 else Interval(nan, -1.0, 1.0)


def paired_difference(
    after: "Sequence[float] | np.ndarray",
    before: "Sequence[float] | np.ndarray",
    level: float = 0.95,
    groups: "Sequence | np.ndarray | None" = None,
) -> Interval:
    """Mean of `after` - `before`, two 0/1 vectors [n] on the same starts in the same order.

    With the counts e (both succeed), f (only after), g (only before), h (neither), the two Wilson intervals
    are joined with the continuity-corrected correlation

        phi = C / sqrt((e+f)(g+h)(e+g)(f+h)),   B = eh - fg,
        C = B - n/2 if B > n/2;  0 if 0 <= B <= n/2;  B if B < 0;   phi = 0 if a margin is empty.

    Source: Newcombe 1998, Stat. Med. 17, 2635-2650, method 10. n = 0 gives (nan, -1, 1). groups [n]: as in
    `counts`; e, f, g and h are scaled to the number of groups.
    """
    x, y = _binary("after", after), _binary("before", before)
    if len(x) != len(y):
        raise UserError(f"paired vectors must have one entry per start, got {len(x)} and {len(y)}")
    n = len(x)
    if n == 0:
        _z(level)
        return Interval(nan, -1.0, 1.0)
    each, n = (1, n) if groups is None else (len(set(groups)) / n, len(set(groups)))
    e, f = each * int((x & y).sum()), each * int((x & ~y).sum())
    g, h = each * int((~x & y).sum()), each * int((~x & ~y).sum())
    margins = (e + f) * (g + h) * (e + g) * (f + h)
    b = e * h - f * g
    c = b - n / 2 if b > n / 2 else min(b, 0)
    phi = c / sqrt(margins) if margins else 0.0
    return _square_and_add(wilson(e + f, n, level), wilson(e + g, n, level), phi)


def match(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Indices (i, j) with first[i] == second[j], in the order of `first`; the k-th repeat of a key in one
    meets the k-th repeat in the other."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for j, key in enumerate(second):
        places[key].append(j)
    seen: dict[Hashable, int] = defaultdict(int)
    pairs = []
    for i, key in enumerate(first):
        k = seen[key]
        seen[key] += 1
        if k < len(places[key]):
            pairs.append((i, places[key][k]))
    ij = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return ij[:, 0], ij[:, 1]


def bootstrap_mean(
    x: "Sequence[float] | np.ndarray",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    groups: "Sequence | np.ndarray | None" = None,
) -> Interval:
    """Mean of `x` [n] with the percentile bootstrap interval: quantiles (1 -+ level)/2 of the means of
    `resamples` draws of n values with replacement. The same seed gives the same interval.

    groups int[n]: values of one group are no news beside each other (windows of one episode), so whole groups
    are drawn, as many as there are (cluster bootstrap, Davison and Hinkley 1997, 3.8).
    It is narrow below about 20 values (by sqrt((n-1)/n) and for want of the t quantile).
    One value, or none, has no interval: the ends are nan. Source: Efron and Tibshirani 1993, ch. 13.
    """
    a = np.asarray(x, dtype=np.float64)
    if a.ndim != 1:
        raise UserError(f"bootstrap_mean takes a flat list of numbers, got shape {a.shape}")
    _z(level)
    if resamples < 100:
        raise UserError(f"resamples must be >= 100, got {resamples}")
    n = len(a)
    mean = float(a.mean()) if n else nan
    if n < 2 or not isfinite(mean):
        return Interval(mean, nan, nan)
    count = np.ones(n)
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
        a, count, n = np.bincount(group, a), np.bincount(group), int(group.max()) + 1
        if n < 2:
            return Interval(mean, nan, nan)
    rng = np.random.default_rng(seed)
    rows = max(1, min(resamples, 4_000_000 // n))  # at most 32 MB of indices at a time
    drawn = (rng.integers(n, size=(min(rows, resamples - i), n)) for i in range(0, resamples, rows))
    means = np.concatenate([a[at].sum(1) / count[at].sum(1) for at in drawn])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))


def per_task(
    tasks: Sequence[str],
    success: "Sequence[float] | np.ndarray",
    level: float = 0.95,
    groups: "Sequence | np.ndarray | None" = None,
) -> list[TaskRow]:
    """One row per distinct task, sorted by name, each with its Wilson interval; groups [n]: as in
    `counts`."""
    s = _binary("success", success)
    if len(tasks) != len(s):
        raise UserError(f"one task per episode is needed, got {len(tasks)} tasks for {len(s)} episodes")
    names, which = np.unique(np.asarray(tasks, dtype=str), return_inverse=True)
    rows = []
    for k, task in enumerate(names):
        mine = which == k
        own = counts(s[mine], None if groups is None else np.asarray(groups)[mine])
        rows.append(TaskRow(str(task), int(mine.sum()), int(s[mine].sum()), wilson(*own, level)))
    return rows


def student_quantile(df: float, level: float = 0.95) -> float:
    """The t with P(|T| <= t) = level of Student's distribution with `df` > 0 degrees of freedom, to 1e-6.

    With T = sqrt(df) tan(u) the density is in proportion to cos(u)^(df - 1) on (-pi/2, pi/2).
    """
    _z(level)
    if not df > 0:
        raise UserError(f"degrees of freedom must be above 0, got {df}")
    # below 1 the density has a pole at pi/2, which a grid in the fourth root of the distance to it resolves
    u = np.pi / 2 * (1 - np.linspace(1, 0, 40_001)[:-1] ** 4)
    density = np.cos(u) ** (df - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(u))])
    return float(sqrt(df) * np.tan(np.interp(level * mass[-1], mass, u)))


def mean_over_seeds(x: "Sequence[float] | np.ndarray", level: float = 0.95) -> Interval:
    """Mean of one number per training seed `x` [n] with Student's interval mean -+ t_{n-1} s / sqrt(n): what
    another seed may give. One seed, or none, has no interval: the ends are nan. Source: Student 1908."""
    a = np.asarray(x, dtype=np.float64)
    if len(a) < 2 or not np.isfinite(a).all():
        return Interval(float(a.mean()) if len(a) else nan, nan, nan)
    half = student_quantile(len(a) - 1, level) * float(a.std(ddof=1)) / sqrt(len(a))
    return Interval(float(a.mean()), float(a.mean()) - half, float(a.mean()) + half)


def difference_over_seeds(
    after: "Sequence[float] | np.ndarray", before: "Sequence[float] | np.ndarray", level: float = 0.95
) -> Interval:
    """mean(after) - mean(before) of two independent groups of seeds [n], [m]: Welch's interval; its ends are
    nan where a group has one seed.

        half = t_v sqrt(A + B),   A = s1^2 / n,   B = s2^2 / m
        v = (A + B)^2 / (A^2 / (n - 1) + B^2 / (m - 1))

    Groups of the same seeds have a difference for each: give these to `mean_over_seeds`. Source: Welch 1947.
    """
    x, y = (np.asarray(v, dtype=np.float64) for v in (after, before))
    change = float(x.mean() - y.mean()) if len(x) and len(y) else nan
    if min(len(x), len(y)) < 2 or not isfinite(change):
        return Interval(change, nan, nan)
    a, b = (float(v.var(ddof=1)) / len(v) for v in (x, y))
    if a + b == 0:
        return Interval(change, change, change)
    df = (a + b) ** 2 / (a * a / (len(x) - 1) + b * b / (len(y) - 1))
    half = student_quantile(df, level) * sqrt(a + b)
    return Interval(change, change - half, change + half)
