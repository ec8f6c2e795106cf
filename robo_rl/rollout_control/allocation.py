"""How many episodes: pure functions of what was seen. Q tasks or starts (arms), n episodes each, G group.

What an allocation is for: a group gives a gradient only where it is mixed, with probability 1 - p^n -
(1-p)^n.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robo_rl.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


# ---- DAPO: groups that are flat are replaced ---------------------------------------------------------------


def flat_groups(outcome: Floats, valid: "Bools | None" = None) -> Bools:
    """Which groups of `outcome` [Q,G] say nothing: all their `valid` members are equal."""
    valid = np.ones(outcome.shape, bool) if valid is None else valid
    return np.where(valid, outcome, -np.inf).max(1) <= np.where(valid, outcome, np.inf).min(1)


# ---- Reinforce-Ada: rounds until a task has what it needs --------------------------------------------------


def ada_finished(successes: Ints, episodes: Ints, n: int, rule: str) -> Bools:
    """Which tasks [Q] need no further round. `positive`: at least one success; `balance`: at least n/2
    successes and n/2 failures. Reinforce-Ada, arXiv 2510.04996."""
    if rule == "positive":
        return successes >= 1
    if rule == "balance":
        return (successes >= n / 2) & (episodes - successes >= n / 2)
    raise UserError(f"the rule of Reinforce-Ada must be positive or balance, got {rule!r}")


@dataclass(frozen=True, slots=True)
class AdaRounds:
    """The rounds of one start: `n` episodes each, until `rule` says that it is finished or `most` were
    played."""

    rule: str
    n: int
    most: int

    def more(self, outcome: Floats) -> int:
        """Further episodes after those with `outcome` [M]; 0: none."""
        won, made = np.array([(outcome > 0.5).sum()]), np.array([len(outcome)])
        return 0 if ada_finished(won, made, self.n, self.rule)[0] else min(self.n, self.most - len(outcome))


# ---- XRPO --------------------------------------------------------------------------------------------------


def t_quantile(dof: Floats) -> Floats:
    """0.975 quantile of Student's t with `dof` [Q] >= 1 degrees of freedom: exact for 1 and 2, by Hill's
    expansion above (Abramowitz and Stegun 26.7.5, error below 0.5 % for 3 and more)."""
    z, v = 1.959963984540054, np.asarray(dof, np.float64)
    terms = (
        (z**3 + z) / 4 / v
        + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / v**4
    )
    return np.where(v < 1.5, 12.706204736432095, np.where(v < 2.5, 4.302652729911275, z + terms))


def xrpo_priority(std: Floats, n: Ints, total: int, lam: float = 1.0) -> Floats:
    """Pi = Delta(n) + lam sqrt(log T / n): the value [Q] of one more episode of tasks with `n` >= 2 episodes
    of deviation `std`.

    Delta = h(n) - h(n+1), what the half width h(n) = t_{n-1} std / sqrt(n) of the mean's 95 % interval loses;
    T episodes in all. XRPO, arXiv 2510.06672.
    """

    def half(m: Ints) -> Floats:
        return t_quantile(np.asarray(m - 1, np.float64)) * std / np.sqrt(m)

    return half(n) - half(n + 1) + lam * np.sqrt(np.log(total) / n)


def xrpo_allocate(std: Floats, n: Ints, budget: int, lam: float = 1.0, most: int = 0) -> Ints:
    """Where `budget` more episodes go [Q], one after another to the greatest priority; the deviations stay as
    they are. No task gets beyond `most` episodes in all (0: any number)."""
    more = np.zeros(len(n), np.int64)
    for _ in range(budget):
        priority = xrpo_priority(std, n + more, int((n + more).sum()), lam)
        more[np.where(n + more < most, priority, -np.inf).argmax() if most else priority.argmax()] += 1
    return more


# ---- DARS --------------------------------------------------------------------------------------------------


def dars_extra(rate: Floats, n: int, kind: str = "equal", normalised: bool = False, most: int = 0) -> Ints:
    """Further episodes [Q] of tasks with success `rate` [Q] in their first n; none where rate >= 1/2.

        S = 2 a (1 - a)   (with GRPO's deviation, `normalised`: 2 sqrt(a (1 - a))),   a = max(rate, 0.5/n),
                          peak = n S(1/2)
        equal:    (peak - n S) / S                every task gets the peak's sum of |A|
        hardness: (2 (1 - a) peak - n S) / S      the harder, the more

    Rounded to the nearest, at most `most` - n (0: 32 for equal, 64 for hardness). DARS, arXiv 2508.13755;
    code yangzhch6/DARS.
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


# ---- DUET --------------------------------------------------------------------------------------------------


def duet(value: Floats, length: Floats, budget: float, low: float = 1.0, most: float = 32.0) -> Floats:
    """Episodes n [Q], real: n = clip(value / sqrt(lam length), low, most) with sum n length = `budget` steps,
    where the bounds allow it.

    `value` [Q] > 0: deviation of what an episode of the start adds to the gradient; `length` [Q]: its
    expected steps. Without the bounds it is the least of sum value^2 / n under that budget. One price of a
    step, lam, is found by bisection of its log in [-20, 20]. DUET, arXiv 2605.08441; code Haoyu-Hu/DUET (10
    halvings).
    """

    def number(log_lam: float) -> Floats:
        return np.clip(value / np.sqrt(np.exp(log_lam) * length), low, most)

    dear, cheap = 20.0, -20.0
    for _ in range(60):
        middle = (dear + cheap) / 2
        dear, cheap = (dear, middle) if number(middle) @ length > budget else (middle, cheap)
    return number(dear)


# ---- TRACE -------------------------------------------------------------------------------------------------


def mixed(n: "Ints | int", p: "Floats | float") -> Floats:
    """M(n, p) = 1 - p^n - (1-p)^n: the probability that n episodes of success p do not all end alike."""
    p = np.asarray(p, np.float64)
    return 1 - p**n - (1 - p) ** n


def trace_allocate(p: Floats, cost: Floats, n: Ints, budget: float, most: int) -> Ints:
    """How many episodes more [Q] than `n` >= 1 [Q] starts with success `p` [Q] get, one after another to the
    greatest gain per step, [M(n+1, p) - M(n, p)] / cost, while `budget` steps last.

    `cost` [Q]: steps of an episode. No start gets beyond `most`, and one with p in {0, 1} gets none. M is
    concave in n from 1 on, so with equal costs no other plan has a greater sum of M. TRACE, arXiv 2606.11119;
    the rule is derived from its abstract.
    """
    more, left = np.zeros(len(n), np.int64), budget
    while True:
        gain = (mixed(n + more + 1, p) - mixed(n + more, p)) / cost
        gain = np.where((n + more < most) & (cost <= left + 1e-9), gain, -np.inf)
        best = int(gain.argmax())
        if not gain[best] > 1e-12:
            return more
        more[best] += 1
        left -= float(cost[best])


# ---- BroRL -------------------------------------------------------------------------------------------------


def broad_group(rates: Floats, group: int, broad: int, window: int = 10, slope: float = 0.002) -> int:
    """Members of the next groups: `broad` where success no longer rises, else `group`.

    `rates` [t]: success of the rounds so far; a plateau is a least-squares slope below `slope` per round over
    the last `window`, away from 1. The switch is ours; BroRL's N is 512 instead of 16.
    """
    if len(rates) < window or rates[-window:].mean() > 1 - slope * window:
        return group
    t = np.arange(window) - (window - 1) / 2
    return broad if float(t @ rates[-window:] / (t @ t)) < slope else group
