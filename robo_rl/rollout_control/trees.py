"""Where to fork: which branches of a tree go on as how many, and which are stopped. The credit is
`robo_rl.tree_credit`'s.

Rules, pure functions of what is known when a decision is made, so that the estimate has no bias:

    even        at depths evenly spaced over the mean episode so far
                (BranchGRPO, arXiv 2509.06040, fixed split depths)
    uncertain   once q (1 - q) of predicted success is `WORTH` or more (TRACE, 2606.11119, in its limit)

`TreeControl` is the small state that runs `even` or `uncertain` and the gates of
`robo_rl.rollout_control.prune`.
"""

from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError
from robo_rl.options import RolloutOptions
from robo_rl.rollout_control.prune import RECENT, Calibration, SuccessHead, survival

WORTH = 0.1  # q (1 - q) where a fork pays: success between 0.11 and 0.89
GAP = 2  # decisions between a branch's beginning and its next fork of rule `uncertain`
WARMUP = 128  # episodes the head has seen before anything depends on it
UPDATES = 4  # of the head for each tree that is whole


# ---- rules -------------------------------------------------------------------------------------------------


def even_depths(forks: int, mean_length: float) -> list[int]:
    """Depths [decisions] of `forks` forks that cut an episode of `mean_length` decisions into equal parts,
    each >= 1."""
    return sorted({max(1, round(mean_length * (i + 1) / (forks + 1))) for i in range(forks)})


# ---- state -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branching:
    """Of n branches after a decision: keep and guess of the gate [n] (keep 1: none), and the children wanted
    [n] (1: no fork)."""

    keep: np.ndarray
    guess: np.ndarray
    children: np.ndarray


class TreeControl:
    """Decides after every decision which branches are stopped and which fork. Its state goes into the
    checkpoint.

    What it knows is of the past: mean length and return of episodes that ended, and a head that learnt from
    them, on which nothing depends before it has seen `warmup` of them.
    """

    def __init__(self, options: RolloutOptions, longest: int, state: int, seed: int, warmup: int = WARMUP):
        self.options, self.longest, self.warmup = options, longest, warmup
        self.roots = options.tree_roots if options.tree_forks else options.group
        self.length, self.ended = float(longest), 0  # running mean of decisions of an episode
        self.returns = np.array([[0.0, 0.0], [1.0, 0.0]])  # mean return and number of failures, of successes
        self.head = SuccessHead(state, seed) if options.prune or options.tree_where == "uncertain" else None
        self.calibration, self.recent = Calibration(), np.zeros(0)

    def look(self, state: np.ndarray, depth: np.ndarray, since: np.ndarray) -> Branching:
        """Branches in states [n,S] after `depth` [n] decisions since the start, `since` [n] of them since the
        last fork."""
        n, o = len(depth), self.options
        keep, guess, children = np.ones(n), np.zeros(n), np.ones(n, np.int64)
        ready = self.head is not None and self.head.episodes >= self.warmup
        at = np.full(n, max(1, round(o.prune_at * self.length)))
        gated = (depth == at) if o.prune and ready else np.zeros(n, bool)
        q = (
            self.calibration(self.head.raw(state, depth / self.longest))
            if self.head is not None and ready
            else np.full(n, 0.5)
        )
        if gated.any():
            self.recent = np.concatenate([self.recent, q[gated]])[-RECENT:]
            keep[gated] = survival(q[gated], self.recent, o.prune, o.prune_rule)
            guess[gated] = q[gated] * self.returns[1, 0] + (1 - q[gated]) * self.returns[0, 0]
        if o.tree_forks and o.tree_where == "even":
            children[np.isin(depth, even_depths(o.tree_forks, self.length))] = o.tree_width
        elif o.tree_forks and ready:
            children[(q * (1 - q) >= WORTH) & (since >= GAP)] = o.tree_width
        return Branching(keep, guess, children)

    def over(self, states: np.ndarray, depth: int, success: bool, outcome: float, odds: float) -> None:
        """A branch ended: its states [t,S], the decisions before its first, and 1 over the chance that it
        passed its gates."""
        length = depth + len(states)
        self.ended += 1
        self.length += (length - self.length) / min(self.ended + 1, 256)
        mean = self.returns[int(success)]
        mean[1] += 1
        mean[0] += (outcome - mean[0]) / min(mean[1], 256)
        if self.head is not None:
            share = (depth + np.arange(len(states))) / self.longest
            if self.head.episodes >= self.warmup:
                self.calibration.observe(self.head.raw(states, share), np.full(len(states), success))
            self.head.observe(states, share, success, odds)

    def whole(self) -> None:
        """A tree is whole: the head learns."""
        if self.head is not None:
            self.head.learn(UPDATES)

    def state(self) -> dict:
        return {
            "length": self.length,
            "ended": self.ended,
            "returns": self.returns.copy(),
            "recent": self.recent.copy(),
            "won": self.calibration.won.copy(),
            "seen": self.calibration.seen.copy(),
            "head": self.head.control_state() if self.head is not None else None,
        }

    def set_state(self, state: dict) -> None:
        self.length, self.ended = state["length"], state["ended"]
        self.returns, self.recent = np.array(state["returns"]), np.array(state["recent"])
        self.calibration.won, self.calibration.seen = np.array(state["won"]), np.array(state["seen"])
        if self.head is not None:
            self.head.load_control_state(state["head"])


def check_snapshots(env) -> None:
    """Raise UserError where the simulator cannot be forked."""
    if not hasattr(env, "get_state"):
        raise UserError(
            "--rl.advantage tree forks simulators, and this one has no get_state and set_state; use "
            "--rl.advantage rloo"
        )
