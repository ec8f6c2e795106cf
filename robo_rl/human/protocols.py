"""Assign failed robots to few operators.

ARMADA (arXiv 2510.02298): N robots run under their policy; a robot that a failure detector reports stands
still until an operator is free; the operator rewinds it to before the failure, corrects to the end of the
episode, and is free again. TwinRL (arXiv 2602.09023): real episodes and help are spent on start states whose
success rate in a twin is low.
"""

import numpy as np

from robo_rl.human.intervention import PAUSE, POLICY, Intervention, OperatorView

UNASSIGNED = -1


def assign(waiting: np.ndarray, assigned_to: np.ndarray, operators: int) -> np.ndarray:
    """Assign operators to waiting robots: longest wait first, lower number on a tie -> held_by int[N] (NOBODY
    or an operator).

    waiting[N]: since when [any clock], nan where the robot does not wait. A robot is held by one operator, an
    operator holds one robot; holds that exist stay.
    """
    out = assigned_to.copy()
    free = [k for k in range(operators) if k not in set(out[out != UNASSIGNED].tolist())]
    queue = [
        i for i in np.argsort(waiting, kind="stable") if np.isfinite(waiting[i]) and out[i] == UNASSIGNED
    ]
    for i, k in zip(queue, free, strict=False):
        out[i] = k
    return out


def target_starts(success: np.ndarray, trials: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """TwinRL: the cells to spend real episodes on, int[K] of K cells with success/trials < threshold; those
    that succeed at times first (there is something to learn from), higher rates first; then those that never
    did. Cells without a trial are left out.
    """
    rate = success / np.maximum(trials, 1)
    low = np.flatnonzero((trials > 0) & (rate < threshold))
    return low[np.lexsort((low, -rate[low]))]


class OperatorAssignment:
    """ARMADA's operators, scripted: `persons` (a ScriptedOperator with one person per robot) help only robots
    that help was requested for, at most `operators` at a time. Robots that wait stand still.

    `rewind(i)` is called once a person has come to robot i, before they correct.
    """

    def __init__(self, persons, operators: int, rewind=lambda i: None):
        n = persons.env.num_envs
        self.persons, self.operators, self.rewind = persons, operators, rewind
        self.waiting, self.assigned_to = np.full(n, np.nan), np.full(n, UNASSIGNED)
        self.has_arrived = np.zeros(n, bool)
        self.now = 0
        self.waited_steps = 0.0  # control steps that robots waited for an operator, summed
        persons.wanted[:] = False

    @property
    def stats(self) -> dict:
        return self.persons.stats

    def request_help(self, i: int) -> None:
        """Queue robot `i` for an operator."""
        if np.isnan(self.waiting[i]) and self.assigned_to[i] == UNASSIGNED:
            self.waiting[i] = self.now

    def awaits_operator(self) -> np.ndarray:
        """bool[N]: robots that wait for an operator or have one."""
        return np.isfinite(self.waiting) | (self.assigned_to != UNASSIGNED)

    def begin(self, mask, obs):
        self.persons.begin(mask, obs)
        self.waiting[mask], self.assigned_to[mask], self.has_arrived[mask] = np.nan, UNASSIGNED, False

    def intervene(self, view: OperatorView) -> Intervention:
        self.now += 1
        self.waiting[view.over] = np.nan
        before = self.assigned_to
        self.assigned_to = assign(self.waiting, before, self.operators)
        new = self.assigned_to != before
        self.persons.request_help(new)
        self.waiting[new] = np.nan
        said = self.persons.intervene(view)
        arrived = (said.phase != POLICY) & ~self.has_arrived & (self.assigned_to != UNASSIGNED)
        for i in np.flatnonzero(arrived):
            self.rewind(int(i))
        self.has_arrived |= arrived
        done = self.has_arrived & (said.phase == POLICY)
        self.assigned_to[done], self.has_arrived[done] = UNASSIGNED, False
        idle = self.awaits_operator() & (said.phase == POLICY) & ~view.over
        self.waited_steps += idle.sum()
        # the first step after a rewind is a pause: the command is for the old place
        rewound = arrived & ~view.over
        return Intervention(
            said.actions,
            np.where(idle | rewound, PAUSE, said.phase).astype(np.uint8),
            said.marks,
            said.attended,
        )

    def get_state(self):
        return self.persons.get_state()

    def set_state(self, state, mask):
        self.persons.set_state(state, mask)
