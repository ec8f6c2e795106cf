"""Which groups a run plays next, and of how many episodes each (`--rl.allocate`): sizes that add up to the
budget of a round.

    arms    starts of a pool, or tasks, each with the successes and failures seen; older rounds count less
    p       = (won + mean) / (won + lost + 1)       predicted success of an arm; of a start that is no arm:
            the run's mean
    L       = likewise, its expected control steps
    plan    budget / group starts, drawn as ever, with sizes n between 2 and `most`, sum n = budget exactly

Sizes follow from rounds before, never from the outcomes they are for. So, given the sizes, the estimate of
each start is as unbiased as with one size. Every episode counts alike in the loss: a start with more of them
weighs more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robo_rl.rollout_control.allocation import (
    AdaRounds,
    broad_group,
    dars_extra,
    duet,
    flat_groups,
    trace_allocate,
    xrpo_allocate,
)
from robo_rl.rollout_control.rollout_gdro import RolloutGdro
from robo_rl.rollout_control.samplers import restore, state_of
from robo_rl.starts import Ended, StartSource, draw_starts, hashed, task_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORGET = 0.5  # of what is known of an arm, in every round that plays it (MoPPS)
BINS = 5  # of predicted success
WINDOW = 10  # rounds whose success tells a plateau
LEAST = 2  # episodes of a group: of one alone nothing can be told
# lam of XRPO: with 1 its bonus for rarely played starts outweighs what an episode narrows, and all sizes are
# alike
BONUS = 0.1
ARMS = ("won", "lost")  # of an arm, beside its `steps`, which are not in states of before them
SURE = 0.05  # least deviation of an outcome that DUET reckons with: what never varied yet may
# a planner's state beside its arms
KEPT = ("total", "rates", "drawn", "starts", "sizes", "at", "replaced", "given", "told")


def spend(weight: Floats, budget: int, low: int, most: int) -> Ints:
    """Integers n [Q] in low..most, in proportion to `weight` [Q] > 0 as far as these bounds allow, with sum n
    = `budget` exactly.

    The real solution is clip(c weight, low, most) with one c, found by bisection; what rounding down leaves
    goes to the greatest remainders. AssertionError: Q low > budget or Q most < budget.
    """
    assert len(weight) * low <= budget <= len(weight) * most, (len(weight), low, most, budget)
    under, over = 0.0, most / float(weight.min())
    for _ in range(100):
        middle = (under + over) / 2
        under, over = (
            (middle, over) if np.clip(middle * weight, low, most).sum() <= budget else (under, middle)
        )
    if np.clip(over * weight, low, most).sum() <= budget:
        under = over
    exact = np.clip(under * weight, low, most)
    n = np.floor(exact + 1e-9).astype(np.int64)
    n[np.argsort(n - exact, kind="stable")[: budget - int(n.sum())]] += 1
    return n


def pool_arms(ids: Ints) -> Callable[[Ints], Ints]:
    """Start [n] -> its place in the pool `ids` [K], -1: not of the pool."""
    order = np.argsort(ids)

    def arm_of(starts: Ints) -> Ints:
        at = order[np.minimum(np.searchsorted(ids, starts, sorter=order), len(ids) - 1)]
        return np.where(ids[at] == starts, at, -1)

    return arm_of


def task_arms(tasks: int) -> Callable[[Ints], Ints]:
    """Start [n] -> its task, -1: a stored state."""
    return lambda starts: np.where(starts < 0, -1, task_of(np.maximum(starts, 0), tasks))


def no_arms(starts: Ints) -> Ints:
    """No start comes again."""
    return np.full(len(starts), -1, np.int64)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What those who collect know of a plan: the mean size of a group, the greatest, and the rounds of
    Reinforce-Ada, if any."""

    group: int
    most: int
    rounds: AdaRounds | None = None


def shape_of(allocate: str, group: int, most: int, rule: str) -> GroupShape:
    """The shape of the groups of `--rl.allocate`: sizes around `group`, at most `most` times as many."""
    widest = {"refill": group, "gdro": 3 * group}.get(allocate, most * group)
    return GroupShape(group, widest, AdaRounds(rule, group, widest) if allocate == "ada" else None)


class GroupPlanner:
    """`allocate` is the option's name; `source` has the table of starts in force; `arm_of` maps starts to one
    of `arms` arms.

    `normalised`: the advantage is divided by a deviation (DARS). `wanted` groups of `shape.group` are in a
    batch, and `refill` replaces at most `spare` times as many that are flat.
    """

    def __init__(
        self,
        allocate: str,
        shape: GroupShape,
        source: StartSource,
        seed: int,
        wanted: int,
        arms: int = 0,
        arm_of: Callable[[Ints], Ints] = no_arms,
        normalised: bool = False,
        spare: int = 0,
    ):
        self.allocate, self.shape, self.source, self.seed, self.wanted = allocate, shape, source, seed, wanted
        self.arm_of, self.normalised, self.spare = arm_of, normalised, spare
        self.won, self.lost, self.total = np.zeros(arms), np.zeros(arms), np.full(2, 0.5)
        # control steps of what was counted, and of the mean episode
        self.steps, self.length = np.zeros(arms), 1.0
        self.rates, self.drawn, self.at, self.replaced = np.zeros(0), 0, 0, 0
        self.starts, self.sizes = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.given = np.zeros((0, 2))  # size and predicted success of the groups since `metrics`
        self.told = np.zeros(2)  # groups that were replaced, and all that ended, since then
        self.gdro = RolloutGdro(BINS, shape.group, LEAST, seed=seed) if allocate == "gdro" else None

    # ---- planning

    def next(self, budget: int) -> tuple[int, int]:
        """(start, episodes) of the next group; where the plan is used up, of a new one over `budget`
        episodes."""
        if self.at == len(self.sizes):
            self.plan(budget)
        i, self.at = self.at, self.at + 1
        start, size = int(self.starts[i]), int(self.sizes[i])
        self.given = np.concatenate([self.given, [[size, self.rate(self.starts[i : i + 1])[0]]]])
        return start, size

    def plan(self, budget: int) -> None:
        """Draw the next starts and decide on the sizes of their groups, `budget` episodes in all."""
        size = (
            broad_group(self.rates, self.shape.group, self.shape.most, WINDOW)
            if self.allocate == "broad"
            else self.shape.group
        )
        q = -(-budget // size) if self.allocate == "broad" else max(1, budget // size)
        self.starts = draw_starts(self.source.newest(), hashed(self.seed, 31, self.drawn, np.arange(q)))
        self.sizes, self.at, self.drawn = self.sizes_of(self.starts, budget), 0, self.drawn + 1

    def sizes_of(self, starts: Ints, budget: int) -> Ints:
        """Episodes [Q] of each of `starts`."""
        group, q = self.shape.group, len(starts)
        most = max(self.shape.most, -(-budget // q))  # a replacement of less than two groups is one
        low, p = min(LEAST, budget // q), self.rate(starts)
        if self.allocate == "dars":
            return spend(
                group + dars_extra(p, group, "equal", self.normalised, most).astype(np.float64),
                budget,
                low,
                most,
            )
        if self.allocate == "xrpo":
            base = np.full(q, min(max(LEAST, group // 2), budget // q))
            return base + xrpo_allocate(
                np.sqrt(p * (1 - p)), np.maximum(base, 2), budget - int(base.sum()), BONUS, most
            )
        if self.allocate == "duet":
            n = duet(
                np.maximum(np.sqrt(p * (1 - p)), SURE), self.steps_of(starts), budget * self.length, low, most
            )
            return spend(n, budget, low, most)
        if self.allocate == "trace":
            n, cost = np.full(q, low), self.steps_of(starts)
            n = n + trace_allocate(p, cost, n, max(0.0, budget * self.length - float(n @ cost)), most)
            return spend(n.astype(np.float64), budget, low, most)
        if self.gdro is not None:
            bins = self.bins(p)
            n = self.gdro.propose(np.bincount(bins, minlength=BINS))
            return spend(n[bins].astype(np.float64), budget, low, most)
        return spend(np.ones(q), budget, low, most)

    def rate(self, starts: Ints) -> Floats:
        """Predicted success [n] of starts."""
        mean, arm = self.total[0] / self.total.sum(), self.arm_of(starts)
        if not len(self.won):
            return np.full(len(starts), mean)
        return np.where(arm < 0, mean, ((self.won + mean) / (self.won + self.lost + 1))[arm])

    def steps_of(self, starts: Ints) -> Floats:
        """Expected control steps [n] of an episode of starts."""
        arm = self.arm_of(starts)
        if not len(self.won):
            return np.full(len(starts), self.length)
        return np.where(arm < 0, self.length, ((self.steps + self.length) / (self.won + self.lost + 1))[arm])

    @staticmethod
    def bins(p: Floats) -> Ints:
        """Which fifth of [0, 1] each p lies in."""
        return np.minimum((p * BINS).astype(np.int64), BINS - 1)

    # ---- what was seen

    def keeps(self, outcome: Floats) -> bool:
        """Whether a finished group of `outcome` [G] is learnt from; False: another one is played in its place
        (DAPO)."""
        self.told[1] += 1
        if (
            self.allocate != "refill"
            or self.replaced >= self.spare * self.wanted
            or not flat_groups(outcome[None])[0]
        ):
            return True
        self.replaced += 1
        self.told[0] += 1
        return False

    def batch_taken(self) -> None:
        """A batch is complete: the next one has its own replacements."""
        self.replaced = 0

    def observe(self, ended: Ended) -> None:
        """What became of the episodes of a round."""
        if not len(ended):
            return
        won = ended.success.astype(np.float64)
        self.rates = np.append(self.rates, won.mean())[-WINDOW:]
        self.total = FORGET * self.total + [won.sum(), len(won) - won.sum()]
        if self.gdro is not None:
            self._judge(ended)
        self.length = float(ended.lengths.mean())
        arm = self.arm_of(ended.starts)
        known = arm >= 0
        n, good, steps = (
            np.bincount(arm[known], w, len(self.won)) for w in (None, won[known], ended.lengths[known])
        )
        self.won = np.where(n > 0, FORGET * self.won + good, self.won)
        self.lost = np.where(n > 0, FORGET * self.lost + n - good, self.lost)
        self.steps = np.where(n > 0, FORGET * self.steps + steps, self.steps)

    def _judge(self, ended: Ended) -> None:
        """Tell the bandit what the sizes of the last plan were worth: the mean of |A| in the groups of each
        bin."""
        assert self.gdro is not None
        starts, which = np.unique(ended.starts, return_inverse=True)
        sizes = dict(zip(self.starts.tolist(), self.sizes.tolist(), strict=True))
        planned = np.array([sizes.get(s, 0) for s in starts.tolist()])
        won, n = np.bincount(which, ended.success), np.bincount(which)
        p = won / n
        bins, worth = self.bins(self.rate(starts)), 2 * p * (1 - p)  # mean |r - p| of a group
        groups = np.bincount(bins, planned > 0, BINS).astype(np.int64)
        if not groups.any():  # all are of plans before, as stale data may be
            return
        mean = [np.bincount(bins, x * (planned > 0), BINS) / np.maximum(groups, 1) for x in (planned, worth)]
        low, arms = self.gdro.low, self.gdro.log_weights.shape[1]
        self.gdro.observe(np.clip(np.rint(mean[0]), low, low + arms - 1).astype(np.int64), mean[1], groups)

    def metrics(self) -> dict[str, float]:
        """Of the groups handed out since the last call: number, sizes, shares of their episodes by predicted
        success in fifths; the share of those that ended which was replaced."""
        size, p = self.given.T if len(self.given) else np.zeros((2, 0))
        shares = np.bincount(self.bins(p), size, BINS) / max(1.0, size.sum())
        out = {f"played_{i}": float(shares[i]) for i in range(BINS)} | {
            "replaced": float(self.told[0] / max(1.0, self.told[1])),
            "number": float(len(size)),
        }
        if len(size):
            out |= {
                "size_min": float(size.min()),
                "size_mean": float(size.mean()),
                "size_max": float(size.max()),
            }
        self.given, self.told = np.zeros((0, 2)), np.zeros(2)
        return out

    def state_dict(self) -> dict:
        return state_of(self, (*ARMS, "steps", "length", *KEPT)) | (
            {"gdro": self.gdro.state_dict()} if self.gdro is not None else {}
        )

    def load_state_dict(self, state: dict) -> None:
        restore(self, ARMS, state)
        if "steps" in state:
            restore(self, ("steps", "length"), state)
        for name in KEPT:
            setattr(
                self,
                name,
                np.array(state[name]) if isinstance(getattr(self, name), np.ndarray) else state[name],
            )
        if self.gdro is not None:
            self.gdro.load_state_dict(state["gdro"])
