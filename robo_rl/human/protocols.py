"""Failed robots and few people: who helps whom. Pure, so that the console, ARMADA's rounds and tests share it.

ARMADA (arXiv 2510.02298): N robots run by themselves; one that a detector calls waits, holding still, until an
operator is free; the operator goes back to before the failure, corrects to the end, and is free again. TwinRL (arXiv
2602.09023): start states whose success rate in a twin is low are where real episodes and help are spent.
"""

import numpy as np

from robo_rl.human.intervention import PAUSE, POLICY, Intervention, OperatorView

UNASSIGNED = -1


def assign(waiting: np.ndarray, held_by: np.ndarray, operators: int) -> np.ndarray:
    """Operators for waiting robots: longest wait first, lower number on a tie -> held_by int[N] (NOBODY or an
    operator).

    waiting[N]: since when [any clock], nan where the robot does not wait. A robot is held by one operator, an operator
    holds one robot; holds that exist stay.
    """
    out = held_by.copy()
    free = [k for k in range(operators) if k not in set(out[out != UNASSIGNED].tolist())]
    queue = [i for i in np.argsort(waiting, kind="stable") if np.isfinite(waiting[i]) and out[i] == UNASSIGNED]
    for i, k in zip(queue, free, strict=False):
        out[i] = k
    return out


def target_starts(success: np.ndarray, trials: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """TwinRL: the cells worth real episodes, int[K] of K cells with success/trials < threshold; those that succeed at
    times first (there is something to learn from), higher rates first; then those that never did. Cells without a
    trial are left out.
    """
    rate = success / np.maximum(trials, 1)
    low = np.flatnonzero((trials > 0) & (rate < threshold))
    return low[np.lexsort((low, -rate[low]))]


class OperatorAssignment:
    """ARMADA's operators, scripted: `persons` (a Scripted with one person per robot) help only robots that were called
    for, at most `operators` at a time. Robots that wait hold still.

    call(i, back): robot i failed; `rewind(i)` is asked once a person has come, before they correct.
    """

    def __init__(self, persons, operators: int, rewind=lambda i: None):
        n = persons.env.num_envs
        self.persons, self.operators, self.rewind = persons, operators, rewind
        self.waiting, self.held_by = np.full(n, np.nan), np.full(n, UNASSIGNED)
        self.came = np.zeros(n, bool)
        self.now = 0
        self.waited = 0.0  # steps robots waited for a person, summed
        persons.wanted[:] = False

    @property
    def stats(self) -> dict:
        return self.persons.stats

    def call(self, i: int) -> None:
        """Robot `i` needs help."""
        if np.isnan(self.waiting[i]) and self.held_by[i] == UNASSIGNED:
            self.waiting[i] = self.now

    def called(self) -> np.ndarray:
        """bool[N]: robots that wait for help or have it."""
        return np.isfinite(self.waiting) | (self.held_by != UNASSIGNED)

    def begin(self, mask, obs):
        self.persons.begin(mask, obs)
        self.waiting[mask], self.held_by[mask], self.came[mask] = np.nan, UNASSIGNED, False

    def intervene(self, view: OperatorView) -> Intervention:
        self.now += 1
        self.waiting[view.over] = np.nan
        before = self.held_by
        self.held_by = assign(self.waiting, before, self.operators)
        new = self.held_by != before
        self.persons.call(new)
        self.waiting[new] = np.nan
        said = self.persons.intervene(view)
        arrived = (said.phase != POLICY) & ~self.came & (self.held_by != UNASSIGNED)
        for i in np.flatnonzero(arrived):
            self.rewind(int(i))
        self.came |= arrived
        done = self.came & (said.phase == POLICY)
        self.held_by[done], self.came[done] = UNASSIGNED, False
        idle = self.called() & (said.phase == POLICY) & ~view.over
        self.waited += idle.sum()
        rewound = arrived & ~view.over  # the first step after going back is the pause's: commands are for the old place
        return Intervention(said.actions, np.where(idle | rewound, PAUSE, said.phase).astype(np.uint8))

    def get_state(self):
        return self.persons.get_state()

    def set_state(self, state, mask):
        self.persons.set_state(state, mask)
