"""Which checkpoint is the best, when training may stop, and on which starts each of the two is decided.

Everything that decides looks at one list of starts, everything that is reported at another. The best of
several evaluations on a list is on average better there than the policy is: of eleven equal checkpoints with
200 episodes each, the winner's own 95 % interval holds the truth in 83 % of runs, its interval on a fresh
list in 95 %.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from robo_rl.starts import SPLIT

MISS = 0.025
"""Most probable error of the statement that training stopped at or above its target."""


class Look(NamedTuple):
    """One evaluation on the starts of CHOOSE: `successes` of `n` episodes, mean return `gain`; of a run over
    several tasks also `tasks`, (successes, n) of each; in a world model `starts`, how many recorded frames
    the episodes began from (0: each from a start of its own)."""

    step: int
    successes: int
    n: int
    gain: float
    tasks: Sequence[Sequence[int]] = ()
    starts: int = 0

    @property
    def rate(self) -> float:
        return self.successes / self.n

    @property
    def parts(self) -> list[tuple[float, int]]:
        """(successes, n) of each task, as intervals count them: episodes from one recorded frame as one."""
        n = self.starts or self.n
        return [(successes, n) for successes, n in self.tasks] or [(self.successes * n / self.n, n)]

    @property
    def worst(self) -> float:
        """Success of the task with the least."""
        return min(successes / n for successes, n in self.parts)


def best_look(looks: Iterable[Look]) -> Look:
    """The look with the most success in its worst task, then in all, then the most return; the earliest of
    equals."""
    return max(looks, key=lambda x: (x.worst, x.rate, x.gain, -x.step))


def lower_bounds(looks: Sequence[Look]) -> list[float]:
    """Lower bound of each look's success rate, of M tasks the least of theirs; with probability 1 - MISS all
    of them hold together.

    A run looks often, so look k = 1, 2, … may miss with probability MISS / (k (k + 1)), and each of its tasks
    with an M-th of it; these add up to MISS whatever the number of looks and however they depend on each
    other (Bonferroni's inequality). Each is Wilson's at that level (`robo_rl.stats.wilson`).
    """
    from robo_rl.stats import wilson  # NumPy comes with it, and --help needs none

    return [
        min(wilson(s, n, 1 - 2 * MISS / (k * (k + 1) * len(x.parts))).low for s, n in x.parts)
        for k, x in enumerate(looks, 1)
    ]


def too_few(looks: Sequence[Look], target: float) -> str:
    """Why the newest look, in which no episode failed, cannot end training: it had too few episodes to show
    `target`; "" otherwise."""
    if not target or not looks or looks[-1].worst < 1 or (low := lower_bounds(looks)[-1]) >= target:
        return ""
    k, n, starts = len(looks), min(n for _, n in looks[-1].parts), looks[-1].starts
    z2 = n / low - n  # of n successes in n episodes Wilson's lower bound is n / (n + z^2)
    enough = 0 if target == 1 else math.ceil(z2 * target / (1 - target))
    held = enough if enough < SPLIT else 2 * enough
    remedy = (
        f"recorded starts would have (of {held} held-out episodes of the model)"
        if starts
        else "episodes would have (--eval-episodes)"
    )
    least = f"; {enough} {remedy}" if enough else ""
    of = f"from {n} recorded starts" if starts else f"of {n}"
    return (
        f"no episode {of} failed, which after {k} look{'s' * (k > 1)} shows success of {low:.3f} at least: "
        f"too little to end training at --target {target:g}{least}"
    )


def stop_reason(looks: Sequence[Look], target: float, patience: int) -> str:
    """Why training may stop after these looks, in the order they were made; "" if it goes on.

    It stops when a look lies with its lower bound (of all looks together, `lower_bounds`) at or above
    `target`, and so do the `patience` looks after it, none of which has more success than every look before;
    or when in a look at or above `target` no episode failed. Of several tasks the worst counts.
    """
    if not target:
        return ""
    still, best, since, low = -1, -1.0, 0, 0.0
    for look, low in zip(looks, lower_bounds(looks), strict=True):
        if low < target:
            still = -1
        else:
            still = still + 1 if look.worst <= best and still >= 0 else 0
        if look.worst > best:
            best, since = look.worst, look.step
    perfect = still >= 0 and looks[-1].worst >= 1
    if still < patience and not perfect:
        return ""
    rose = (
        " and no episode failed"
        if perfect
        else f" and success has not risen since step {since}"
        if patience
        else ""
    )
    where = " in the worst task" if len(looks[-1].parts) > 1 else ""
    return (
        f"stopped at step {looks[-1].step}: the lower bound of success{where}, {low:.3f} after {len(looks)} "
        f"looks, is at or above --target {target:g}{rose}; --steps N makes all of N steps"
    )
