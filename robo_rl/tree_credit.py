"""Credit on trees of rollouts: a policy gradient without bias from episodes that share their beginnings.

A tree is the group of one start. Its G *branches* are columns of a rollout, numbered in the order in which
they begin. Branch m begins where decision `row[m]` of branch `parent[m]` does, from a snapshot of the
simulator there; a root (parent -1) begins at the start. Where branches fork, the one that was there goes on
as one of the k children. Behind a decision there may be a *gate*: the branch goes on with probability `keep`,
else it is stopped and counts as `guess`, what was expected of it before the draw.

    v_t = outcome of the episode                       where decision t ends it
        = v_{t+1}                                      else
        = mean of v over the k children                where a fork follows
        = guess + passed (v - guess)/keep              where a gate follows decision t (before a fork there)
    w_{t+1} = w_t / (k keep)                           1 at a root; a stopped branch has no w_{t+1}
    b       = mean of v over the other children of the fork (of the other roots) where the branch's present
            segment began
    adv_t   = v_t - b                                  = k/(k-1) (v_t - mean of v over all k), no gate in
            between

Unbiased: E[sum_m sum_t w_t adv_t grad log pi(a_t | s_t)] = n grad E[outcome], n roots. Whatever forks, stops
and is played next may depend on all that was simulated before it, for splitting and roulette leave E[w v] of
what follows as it is; b depends on no action of its own segment. What is biased: child less parent value
without the factor k/(k-1), and dividing by a deviation. Without forks and gates adv is RLOO's. Derived; in
the frame of BranchGRPO (arXiv 2509.06040, node value = mean of what descends from it), tree rollouts of ECHO
(2602.02150), LATR (2510.24302) and IB-TPO (2605.28109), splitting and roulette of Kahn & Harris 1951.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Branches:
    """One tree of G branches of up to T decisions.

    parent, row int[G]: where a branch begins, parent -1 for a root; made int[G]: its own decisions, 0 for an
    unused column;
    ended bool[G]: its last decision ended the episode (else a gate stopped it); outcome [G]: return of that
    episode from the start;
    keep, guess [T,G]: the gate behind each decision, keep 1 where there is none.
    """

    parent: np.ndarray
    row: np.ndarray
    made: np.ndarray
    ended: np.ndarray
    outcome: np.ndarray
    keep: np.ndarray
    guess: np.ndarray

    def forks(self) -> dict[tuple[int, int], list[int]]:
        """(branch, its decision) -> the branches that begin there beside the one that goes on; roots at (-1,
        0)."""
        out: dict[tuple[int, int], list[int]] = {}
        for m in np.flatnonzero(self.made > 0).tolist():
            p = int(self.parent[m])
            if p >= m:
                raise ValueError(
                    f"branch {m} begins on branch {p}: branches are numbered in the order in which they begin"
                )
            out.setdefault((p, int(self.row[m]) if p >= 0 else 0), []).append(m)
        return out


def values(tree: Branches) -> np.ndarray:
    """v [T,G]: the estimate of the return to be had once decision t of branch m was made; 0 where none
    was."""
    forks, v = tree.forks(), np.zeros(tree.keep.shape)
    for m in np.flatnonzero(tree.made > 0)[::-1].tolist():  # children have greater numbers than parents
        last = int(tree.made[m]) - 1
        for t in range(last, -1, -1):
            keep, guess = float(tree.keep[t, m]), float(tree.guess[t, m])
            if t == last and not tree.ended[m]:
                v[t, m] = guess  # stopped: guess + 0 (v - guess)/keep
                continue
            x = float(tree.outcome[m]) if t == last else v[t + 1, m]
            if t < last and (m, t + 1) in forks:
                siblings = forks[m, t + 1]
                x = (x + sum(v[0, j] for j in siblings)) / (1 + len(siblings))
            v[t, m] = x if t == last or keep == 1 else guess + (x - guess) / keep
    return v


def credit(tree: Branches, prior: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(adv [T,G], weight [T,G]) of a tree, both 0 where no decision was made; equations above.

    prior: the baseline of a segment is (sum of v over its k-1 siblings + prior * the baseline of the segment
    before it)/(k-1+prior), which is as unbiased, and steadier where forks have few children. Of a lone root
    without siblings it is 0.
    """
    v, forks = values(tree), tree.forks()
    adv, weight = np.zeros_like(v), np.zeros_like(v)
    roots = forks.get((-1, 0), [])
    base: dict[tuple[int, int], float] = {}  # (branch, first decision of a segment) -> its baseline
    total = sum(v[0, m] for m in roots)
    for m in roots:
        base[m, 0] = (total - v[0, m]) / (len(roots) - 1) if len(roots) > 1 else 0.0
        weight[0, m] = 1.0
    for m in np.flatnonzero(tree.made > 0).tolist():
        b = base[m, 0]
        for t in range(int(tree.made[m])):
            if t:
                weight[t, m] = weight[t - 1, m] / tree.keep[t - 1, m]
            if t and (m, t) in forks:
                family = [(m, t), *((j, 0) for j in forks[m, t])]
                weight[t, m] /= len(family)
                total, before = sum(v[u, j] for j, u in family), b
                for j, u in family:
                    base[j, u] = (total - v[u, j] + prior * before) / (len(family) - 1 + prior)
                    weight[u, j] = weight[t, m]
                b = base[m, t]
            adv[t, m] = v[t, m] - b
    return adv, weight


def leaf_weights(tree: Branches, weight: np.ndarray) -> np.ndarray:
    """[G] weight of each episode that ended, 0 of others: the mean of anything over episodes is sum(w
    x)/sum(w)."""
    last = np.maximum(tree.made - 1, 0)
    return np.where((tree.made > 0) & tree.ended, weight[last, np.arange(len(last))], 0.0)
