"""Where to fork: which branches of a tree go on as how many, and which are stopped. The credit is `robo_rl.tree_credit`'s.

Rules, pure functions of what is known when a decision is made, so that the estimate has no bias:

    even        at depths evenly spaced over the mean episode so far               BranchGRPO (arXiv 2509.06040), fixed split depths
    uncertain   once q (1 - q) of predicted success is `WORTH` or more             TRACE (2606.11119) in its limit
    mixed       chance that n continuations end differently, 1 - p^n - (1-p)^n     TRACE
    echo_*      entropy and confidence of the decision, and the clip they ask for  ECHO (2602.02150), constants of its code
    similar     branches that a look ahead cannot tell apart; one of each stays    LATR (2510.24302)

`TreeControl` is the small state that runs `even` or `uncertain` and the gates of `robo_rl.rollout_control.prune`.
"""

import math
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError
from robo_rl.options import RolloutOptions
from robo_rl.rollout_control.prune import RECENT, Calibration, SuccessHead, survival

WORTH = 0.1  # q (1 - q) where a fork pays: success between 0.11 and 0.89
GAP = 2  # decisions between a branch's beginning and its next fork of rule `uncertain`
WARMUP = 128  # episodes the head has seen before anything depends on it
UPDATES = 4  # of the head for each tree that is whole


# ---- rules -----------------------------------------------------------------------------------------------------------

def mixed(n: "np.ndarray | int", p: "np.ndarray | float") -> "np.ndarray | float":
    """Chance that n continuations of success probability p do not all end alike: 1 - p^n - (1-p)^n (TRACE)."""
    return 1 - p**n - (1 - p) ** n


def allocate(p: np.ndarray, cost: np.ndarray, budget: float) -> np.ndarray:
    """Continuations n [A] of anchors with success p [A], each worth `cost` [A], by the greatest gain of `mixed` per cost.

    Greedy on M(n + 1) - M(n), two continuations at once at first, since one alone is never mixed; the cost of all stays within
    `budget`. Anchors with p in {0, 1} get nothing. TRACE (arXiv 2606.11119); its own allocation is not public, this is derived.
    """
    n, left = np.zeros(len(p), np.int64), float(budget)
    while True:
        step = np.where(n == 0, 2, 1)
        gain = np.asarray(mixed(n + step, p)) - np.where(n == 0, 0.0, mixed(np.maximum(n, 1), p))
        rate = np.where(step * cost <= left, gain / (step * cost), -np.inf)
        best = int(np.argmax(rate))
        if not rate[best] > 1e-12:
            return n
        n[best] += step[best]
        left -= float(step[best] * cost[best])


def even_depths(forks: int, mean_length: float) -> list[int]:
    """Depths [decisions] of `forks` forks that cut an episode of `mean_length` decisions into equal parts, each >= 1."""
    return sorted({max(1, round(mean_length * (i + 1) / (forks + 1))) for i in range(forks)})


def echo_width(entropy: float, confidence: float, high: float = 3.5, calm: float = 1.2, most: int = 4) -> int:
    """ECHO's branches: round(1 + 2 (H - 1)/(high - 1) - (conf - calm)/calm), in 1..most."""
    return int(np.clip(math.floor(1 + 2 * (entropy - 1) / (high - 1) - (confidence - calm) / calm + 0.5), 1, most))


def echo_forks(entropies: np.ndarray, confidences: np.ndarray, high: float = 3.5, calm: float = 1.2, rise: float = 0.2,
               first: int = 4) -> bool:
    """Whether ECHO forks after decisions with these entropies and confidences, all so far, oldest first.

    Depth >= first, H >= high, mean confidence of the last 4 <= calm, and H at least `rise` above the mean of the 4 before.
    Entropies must be brought to the scale of these constants: `high` is the paper's for words, not for actions.
    """
    if len(entropies) < max(first, 5):
        return False
    return bool(entropies[-1] >= high and confidences[-4:].mean() <= calm and entropies[-1] - entropies[-5:-1].mean() >= rise)


def echo_clip(tail_confidence: float) -> float:
    """ECHO's clip range eps = 0.05 + 0.15 sigmoid(4 (1 - confidence of the last 16 decisions))."""
    return 0.05 + 0.15 / (1 + math.exp(-4 * (1 - tail_confidence)))


def similar(paths: np.ndarray, closest: float) -> np.ndarray:
    """int [k]: which class each of k branches is in after a look ahead; paths [k,T,D], the same steps of each.

    Two are alike if their mean distance over the steps is below `closest`, in order of number, each against the first of a class.
    LATR's edit distance of words in the space a robot moves in.
    """
    first, out = [], np.zeros(len(paths), np.int64)
    for i, path in enumerate(paths):
        near = [c for c, j in enumerate(first) if np.linalg.norm(path - paths[j], axis=-1).mean() < closest]
        out[i] = near[0] if near else len(first)
        if not near:
            first.append(i)
    return out


def drop_similar(classes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Factors [k] on the weights of branches of one fork: of each class one, drawn evenly, stays and weighs for all of it.

    The greatest of `uniforms` [k] in [0, 1) stays. E[factor] = 1 for each branch, so a weighted mean over branches keeps its
    expectation, where LATR keeps the first and drops the others' weight.
    """
    out = np.zeros(len(classes))
    for c in np.unique(classes):
        members = np.flatnonzero(classes == c)
        out[members[np.argmax(uniforms[members])]] = len(members)
    return out


def tree_share(step: int, shares: "dict[int, float] | None" = None) -> float:
    """LATR's share of tree rollouts at a training step, the rest being plain: {0: 1, 100: 0.75, 200: 0.5, 300: 0.25}."""
    shares = {0: 1.0, 100: 0.75, 200: 0.5, 300: 0.25} if shares is None else shares
    return shares[max(k for k in shares if k <= step)]


# ---- state -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Branching:
    """Of n branches after a decision: keep and guess of the gate [n] (keep 1: none), and the children wanted [n] (1: no fork)."""

    keep: np.ndarray
    guess: np.ndarray
    children: np.ndarray


class TreeControl:
    """Decides after every decision which branches are stopped and which fork. Its state goes into the checkpoint.

    What it knows is of the past: mean length and return of episodes that ended, and a head that learnt from them, on which nothing
    depends before it has seen `warmup` of them.
    """

    def __init__(self, options: RolloutOptions, longest: int, state: int, seed: int, warmup: int = WARMUP):
        self.options, self.longest, self.warmup = options, longest, warmup
        self.roots = options.tree_roots if options.tree_forks else options.group
        self.length, self.ended = float(longest), 0  # running mean of decisions of an episode
        self.returns = np.array([[0.0, 0.0], [1.0, 0.0]])  # mean return and number of failures, of successes
        self.head = SuccessHead(state, seed) if options.prune or options.tree_where == "uncertain" else None
        self.calibration, self.recent = Calibration(), np.zeros(0)

    def look(self, state: np.ndarray, depth: np.ndarray, since: np.ndarray) -> Branching:
        """Branches in states [n,S] after `depth` [n] decisions since the start, `since` [n] of them since the last fork."""
        n, o = len(depth), self.options
        keep, guess, children = np.ones(n), np.zeros(n), np.ones(n, np.int64)
        ready = self.head is not None and self.head.episodes >= self.warmup
        at = np.full(n, max(1, round(o.prune_at * self.length)))
        gated = (depth == at) if o.prune and ready else np.zeros(n, bool)
        q = self.calibration(self.head.raw(state, depth / self.longest)) if self.head is not None and ready else np.full(n, 0.5)
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
        """A branch ended: its states [t,S], the decisions before its first, and 1 over the chance that it passed its gates."""
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
        return {"length": self.length, "ended": self.ended, "returns": self.returns.copy(), "recent": self.recent.copy(),
                "won": self.calibration.won.copy(), "seen": self.calibration.seen.copy(),
                "head": self.head.control_state() if self.head is not None else None}

    def set_state(self, state: dict) -> None:
        self.length, self.ended = state["length"], state["ended"]
        self.returns, self.recent = np.array(state["returns"]), np.array(state["recent"])
        self.calibration.won, self.calibration.seen = np.array(state["won"]), np.array(state["seen"])
        if self.head is not None:
            self.head.load_control_state(state["head"])


def check_snapshots(env) -> None:
    """Raise UserError where the simulator cannot be forked."""
    if not hasattr(env, "get_state"):
        raise UserError("--rl.advantage tree forks simulators, and this one has no get_state and set_state; use --rl.advantage rloo")
