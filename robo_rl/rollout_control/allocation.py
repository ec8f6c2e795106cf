"""How many episodes, and how long: pure functions of what was seen. Q tasks or starts (arms), n episodes each, G group.

What an allocation is for: a group gives a gradient only where it is mixed, with probability `mixed(n, p)`.
"""

import heapq
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from robo_rl.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def mixed(n: "Floats | int", p: "Floats | float") -> "Floats | float":
    """M(n, p) = 1 - p^n - (1-p)^n: the probability that n episodes of success p are neither all good nor all bad."""
    return 1 - np.power(p, n) - np.power(1 - np.asarray(p, np.float64), n)


# ---- DAPO: groups that are flat are replaced ----------------------------------------------------------------------------


def flat_groups(outcome: Floats, valid: "Bools | None" = None) -> Bools:
    """Which groups of `outcome` [Q,G] say nothing: all their `valid` members are equal."""
    valid = np.ones(outcome.shape, bool) if valid is None else valid
    return np.where(valid, outcome, -np.inf).max(1) <= np.where(valid, outcome, np.inf).min(1)


def refill(outcome: Floats, wanted: int, made: int, most: int) -> tuple[Bools, int]:
    """DAPO's dynamic sampling -> (the groups that are kept [Q], how many more to plan).

    Groups [Q,G] are kept while they are mixed, until `wanted` are there; as many more are planned as are missing, but no more
    than `most` in all, of which `made` were. Yu et al. 2025, arXiv 2503.14476, section 3.2, eq. 11.
    """
    good = ~flat_groups(outcome)
    keep = good & (np.cumsum(good) <= wanted)
    return keep, min(wanted - int(keep.sum()), max(0, most - made))


# ---- Reinforce-Ada: rounds until a task has what it needs ---------------------------------------------------------------


def ada_finished(successes: Ints, episodes: Ints, n: int, rule: str) -> Bools:
    """Which tasks [Q] need no further round. `positive`: at least one success; `balance`: at least n/2 successes and n/2
    failures. Reinforce-Ada, arXiv 2510.04996."""
    if rule == "positive":
        return successes >= 1
    if rule == "balance":
        return (successes >= n / 2) & (episodes - successes >= n / 2)
    raise UserError(f"the rule of Reinforce-Ada must be positive or balance, got {rule!r}")


def ada_pick(outcome: Floats, n: int, rng: np.random.Generator) -> Ints:
    """n of a pool of outcomes [M], half successes and half failures as far as there are any, each half at random."""
    good, bad = (rng.permutation(np.flatnonzero(x)) for x in (outcome > 0.5, outcome <= 0.5))
    from_good = min(len(good), max(n // 2, n - len(bad)))
    return np.sort(np.concatenate([good[:from_good], bad[:n - from_good]])).astype(np.int64)


def ada_advantage(outcome: Floats, picked: Ints) -> Floats:
    """Advantage of the picked members: outcome less the mean of the *whole pool* [M], without a deviation.

    The mean of the picked ones would be near 1/2 by construction. The rule that stops a pool looks at outcomes, so the pool's
    mean is not unbiased either: it lowers the bias, it does not remove it. Of many pools: `robo_rl.advantages.pool_advantage`.
    """
    return outcome[picked] - outcome.mean()


@dataclass(frozen=True, slots=True)
class AdaRounds:
    """The rounds of one start: `n` episodes each, until `rule` says that it is finished or `most` were played."""

    rule: str
    n: int
    most: int

    def more(self, outcome: Floats) -> int:
        """Further episodes after those with `outcome` [M]; 0: none."""
        won, made = np.array([(outcome > 0.5).sum()]), np.array([len(outcome)])
        return 0 if ada_finished(won, made, self.n, self.rule)[0] else min(self.n, self.most - len(outcome))


# ---- XRPO -----------------------------------------------------------------------------------------------------------


def t_quantile(dof: Floats) -> Floats:
    """0.975 quantile of Student's t with `dof` [Q] >= 1 degrees of freedom: exact for 1 and 2, by Hill's expansion above
    (Abramowitz and Stegun 26.7.5, error below 0.5 % for 3 and more)."""
    z, v = 1.959963984540054, np.asarray(dof, np.float64)
    terms = (z**3 + z) / 4 / v + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2 + \
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3 + \
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / v**4
    return np.where(v < 1.5, 12.706204736432095, np.where(v < 2.5, 4.302652729911275, z + terms))


def xrpo_priority(std: Floats, n: Ints, total: int, lam: float = 1.0) -> Floats:
    """Pi = Delta(n) + lam sqrt(log T / n): the value [Q] of one more episode of tasks with `n` >= 2 episodes of deviation `std`.

    Delta = h(n) - h(n+1), what the half width h(n) = t_{n-1} std / sqrt(n) of the mean's 95 % interval loses; T episodes in
    all. XRPO, arXiv 2510.06672.
    """
    def half(m: Ints) -> Floats:
        return t_quantile(np.asarray(m - 1, np.float64)) * std / np.sqrt(m)
    return half(n) - half(n + 1) + lam * np.sqrt(np.log(total) / n)


def xrpo_allocate(std: Floats, n: Ints, budget: int, lam: float = 1.0, most: int = 0) -> Ints:
    """Where `budget` more episodes go [Q], one after another to the greatest priority; the deviations stay as they are. No task gets
    beyond `most` episodes in all (0: any number)."""
    more = np.zeros(len(n), np.int64)
    for _ in range(budget):
        priority = xrpo_priority(std, n + more, int((n + more).sum()), lam)
        more[np.where(n + more < most, priority, -np.inf).argmax() if most else priority.argmax()] += 1
    return more


# ---- DARS -----------------------------------------------------------------------------------------------------------


def dars_extra(rate: Floats, n: int, kind: str = "equal", normalised: bool = False, most: int = 0) -> Ints:
    """Further episodes [Q] of tasks with success `rate` [Q] in their first n; none where rate >= 1/2.

        S = 2 a (1 - a)   (with GRPO's deviation, `normalised`: 2 sqrt(a (1 - a))),   a = max(rate, 0.5/n),   peak = n S(1/2)
        equal:    (peak - n S) / S                every task gets the peak's sum of |A|
        hardness: (2 (1 - a) peak - n S) / S      the harder, the more

    Rounded to the nearest, at most `most` - n (0: 32 for equal, 64 for hardness). DARS, arXiv 2508.13755; code
    yangzhch6/DARS.
    """
    if kind not in ("equal", "hardness"):
        raise UserError(f"the kind of DARS must be equal or hardness, got {kind!r}")
    a = np.clip(np.asarray(rate, np.float64), 0.5 / n, 0.5)
    s = 2 * np.sqrt(a * (1 - a)) if normalised else 2 * a * (1 - a)
    peak = n * (1.0 if normalised else 0.5)
    goal = peak if kind == "equal" else 2 * (1 - a) * peak
    most = most or (32 if kind == "equal" else 64)
    extra = np.clip(np.rint((goal - n * s) / s), 0, max(0, most - n))
    return np.where(np.asarray(rate) >= 0.5, 0, extra).astype(np.int64)


# ---- DUET -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Duet:
    """Episodes `n` [Q] of each task, their longest length `longest` [Q], and the price `lam` of a step."""

    n: Ints
    longest: Floats
    lam: float


def duet(value: Floats, length: Floats, budget: float, n_range: tuple[int, int] = (1, 32),
         length_range: tuple[float, float] = (1.0, 4096.0), iterations: int = 60) -> Duet:
    """How many and how long, of one price: n = value / sqrt(lam length), longest = value sqrt(length / lam).

    `value` [Q]: deviation of A sum log p within the task; `length` [Q]: expected length; `budget`: steps in all. n and longest
    are clipped to their ranges, lam is found by bisection of log lam in [-20, 20] so that sum n length = budget, and what
    rounding leaves goes to the greatest remainders: the spend is within one episode of the budget where the ranges allow.
    DUET, arXiv 2605.08441; code Haoyu-Hu/DUET (10 iterations, lengths 32 to 4096 tokens).
    """
    value, length = np.maximum(value, 1e-12), np.asarray(length, np.float64)

    def number(log_lam: float) -> Floats:
        return np.clip(value / np.sqrt(np.exp(log_lam) * length), *n_range)
    low, high = -20.0, 20.0
    for _ in range(iterations):
        middle = (low + high) / 2
        low, high = (middle, high) if number(middle) @ length > budget else (low, middle)
    exact = number(high)
    n = np.floor(exact).astype(np.int64)
    for q in np.argsort(-(exact - n), kind="stable"):
        if exact[q] > n[q] and (n @ length) + length[q] <= budget:
            n[q] += 1
    return Duet(n, np.clip(value * np.sqrt(length / np.exp(high)), *length_range), float(np.exp(high)))


def survivor_weights(stopped: Bools, kept: Bools, keep: float) -> Floats:
    """Weights [N] of episodes where those that a rule would stop went on with probability `keep` (DUET: 0.05), else were stopped.

    1 where the rule did not fire, 1/keep where it fired and the episode went on, 0 where it was stopped; divided by their mean
    (self-normalised: SNIPS, Swaminathan and Joachims 2015). keep = 1: all 1, as without a rule.
    """
    if not 0 < keep <= 1:
        raise UserError(f"keep must be in (0, 1], got {keep!r}")
    w = np.where(stopped, np.where(kept, 1 / keep, 0.0), 1.0)
    return w / w.mean() if w.any() else w


# ---- TRACE ----------------------------------------------------------------------------------------------------------


def trace_allocate(p: Floats, cost: Floats, budget: float, least: int = 0) -> Ints:
    """Continuations n [Q] of anchors (starts, or snapshots within episodes) with success `p` [Q], at `cost` [Q] steps each.

    Greedy on the marginal gain [M(n+1, p) - M(n, p)] / cost of `mixed`, from `least` on, until the budget buys nothing more.
    M is concave in n from n = 1 on and M(1) = 0, so the first two continuations are bought together. An anchor with p = 0 or
    p = 1 gets nothing beyond `least`. TRACE, arXiv 2606.11119; the rule is derived from its abstract.
    """
    p, cost = np.asarray(p, np.float64), np.asarray(cost, np.float64)
    n = np.full(len(p), least, np.int64)
    left = budget - float(n @ cost)

    def offer(q: int) -> tuple[float, int, int]:
        step = 2 if n[q] == 0 else 1
        gain = float(mixed(int(n[q]) + step, float(p[q])) - (mixed(int(n[q]), float(p[q])) if n[q] else 0.0))
        return -gain / (step * cost[q]), q, step
    heap = [offer(q) for q in range(len(p))]
    heapq.heapify(heap)
    while heap:
        worth, q, step = heapq.heappop(heap)
        if -worth <= 1e-12 or step * cost[q] > left + 1e-9:
            continue  # a cheaper anchor may still fit
        n[q] += step
        left -= step * cost[q]
        heapq.heappush(heap, offer(q))
    return n


# ---- BroRL ----------------------------------------------------------------------------------------------------------


def unsampled_mass(p: Floats, n: int) -> float:
    """Expected sum of p^2 over the outcomes that n samples of `p` [K] miss: sum p^2 (1-p)^n.

    The part of the change of correct mass that can be negative scales with it and vanishes with n. BroRL, arXiv 2510.01180.
    """
    return float((p**2 * (1 - p) ** n).sum())


@dataclass(slots=True)
class GroupMoments:
    """Mean and deviation of a group that is too large to keep: Welford's recurrence over `add`ed outcomes."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, outcome: Floats) -> None:
        """Merge outcomes [m] (Chan et al. 1983)."""
        m = len(outcome)
        if not m:
            return
        mean = float(outcome.mean())
        delta, total = mean - self.mean, self.n + m
        self.m2 += float(((outcome - mean) ** 2).sum()) + delta**2 * self.n * m / total
        self.mean += delta * m / total
        self.n = total

    @property
    def std(self) -> float:
        """Unbiased; 0 of fewer than two."""
        return sqrt(self.m2 / (self.n - 1)) if self.n > 1 else 0.0


def broad_group(rates: Floats, group: int, broad: int, window: int = 10, slope: float = 0.002) -> int:
    """Members of the next groups: `broad` where success no longer rises, else `group`.

    `rates` [t]: success of the rounds so far; a plateau is a least-squares slope below `slope` per round over the last
    `window`, away from 1. The switch is ours; BroRL's N is 512 instead of 16.
    """
    if len(rates) < window or rates[-window:].mean() > 1 - slope * window:
        return group
    t = np.arange(window) - (window - 1) / 2
    return broad if float(t @ rates[-window:] / (t @ t)) < slope else group
