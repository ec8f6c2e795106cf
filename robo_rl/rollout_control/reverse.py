"""Reverse curriculum: starts along the demonstrations, first near success and then earlier, until success
from the task's own is common.

    left_k   = control steps from stored state k to the demonstration's success
    bin      = b = (left_k - 1) // width, of B
    p_b      = success of episodes that began in bin b, evidence of earlier updates times DECAY
    frontier = the first bin that is not solved: it moves back while p_b >= ENOUGH there, and forth to a bin
               with p_b < LOST
    weights  = max(p_b (1 - p_b), FLOOR) over the bins up to the frontier and AHEAD beyond it, shared alike by
               their states
    own      = 1 if p_own >= COMMON, else clip(max(p_own / COMMON, frontier / B), LEAST, MOST)
               share of the task's own starts, p_own = success of those: what is left once demonstrations are
               solved from their beginning is every other start
    supervision = 1 - (own - LEAST) / (1 - LEAST): share of the supervised loss beside RL

A policy that solves the end of a task is shown what comes before it. Where an episode begins decides nothing
about what is right there, so the policy that is learnt is one for the task; only how often states are seen
differs.

Sources: Florensa et al. 2017 (arXiv 1707.05300), reverse curriculum; Salimans and Chen 2018 (arXiv
1812.03381), starts along a demonstration moved back when success there is common. Where we differ: bins of
many demonstrations, weights by p (1 - p) behind the frontier (SFL, arXiv 2408.15099), and a share of own
starts that follows their success.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robo_rl.starts import EVERY_START, StartTable, StoredStates, task_of

ENOUGH, LOST = 0.6, 0.3  # success from which a bin counts as solved, and below which it no longer does
COMMON = 0.5  # success from the task's own starts at which every start is one of them
LEAST, MOST = 0.15, 0.9  # bounds of their share before
FLOOR = 0.05  # least weight of a bin
AHEAD = 2  # bins beyond the frontier that are tried
DECAY = 0.7  # of evidence, per update
EVIDENCE = 8  # episodes of which a bin's success is read


@dataclass(frozen=True, slots=True)
class DemoStates:
    """States along demonstrations: `stored` [K], and how many control steps before the end of its own each
    lies, int64 [K]."""

    stored: StoredStates
    left: np.ndarray


def demo_states(env, data, stride: int, tasks: Sequence[int] = ()) -> tuple["DemoStates | None", int]:
    """Play the actions of a data set (`data.reader.load`) again from the starts it names, in an env with
    `get_state` -> (the states before every `stride`-th action of the episodes that succeed again, None: there
    are none; number of these episodes).

    Of an env of several tasks those of `tasks` alone, unless it is empty.
    """
    episodes = [e for e in range(len(data)) if data.start[e] >= 0 and data.success[e]]
    if tasks and len(names := getattr(env, "task_names", ())) > 1:
        episodes = [e for e in episodes if task_of(data.start[e], len(names)) in tasks]
    rows: list[dict[str, np.ndarray]] = []
    left: list[int] = []
    kept, n = 0, env.num_envs
    for first in range(0, len(episodes), n):
        group = episodes[first : first + n]
        ids = np.resize(np.array(group), n)  # idle envs play one of them again
        lengths = data.to[ids] - data.from_[ids]
        env.reset(options={"starts": data.start[ids]})
        seen, success = [], np.zeros(n, bool)
        for t in range(int(lengths.max())):
            if t % stride == 0:
                seen.append((t, env.get_state()))
            action = data.action[np.minimum(data.from_[ids] + t, data.to[ids] - 1)]
            success = np.asarray(env.step(action)[4]["success"])
        for i in range(len(group)):
            if success[i]:
                kept += 1
                for t, state in seen:
                    if t < lengths[i]:
                        rows.append({k: v[i] for k, v in state.items()})
                        left.append(int(lengths[i]) - t)
    if not kept:
        return None, 0
    return DemoStates(
        StoredStates({k: np.stack([r[k] for r in rows]) for k in rows[0]}), np.array(left, np.int64)
    ), kept


class Reverse:
    """The sampler; `left` [K] as of `DemoStates`, `width` [control steps] of a bin. The first `skip` rounds
    of episodes from the task's own starts are not counted: successes end first, so that they would be all
    there is.

    In a run over several tasks the demonstrations are of `tasks` (empty: of all), of which alone own success
    is told, and stored states get at most the `share` of these tasks."""

    def __init__(
        self, left: np.ndarray, width: int, skip: int = 0, tasks: tuple[int, ...] = (), share: float = 1.0
    ):
        self.tasks, self.share = np.array(tasks, np.int64), share
        self.width, self.bin = width, (np.asarray(left) - 1) // width
        self.ids = -1 - np.arange(len(left))
        self.bins = int(self.bin.max()) + 1
        self.size = np.bincount(self.bin, minlength=self.bins)  # states in each
        self.wins, self.tries = np.zeros(self.bins), np.zeros(self.bins)
        self.own = np.zeros(2)  # successes, episodes
        self.frontier, self.skip = 0, skip

    def observe(self, starts, tasks, success, returns, lengths) -> None:
        """Count the episodes of each bin and of the task's own starts, and move the frontier."""
        self.wins, self.tries, self.own = self.wins * DECAY, self.tries * DECAY, self.own * DECAY
        stored = starts < 0
        at = self.bin[-1 - starts[stored]]
        self.tries += np.bincount(at, minlength=self.bins)
        self.wins += np.bincount(at, success[stored], minlength=self.bins)
        if self.skip > 0:
            self.skip -= 1
        else:
            own = ~stored & (np.isin(tasks, self.tasks) if len(self.tasks) else True)
            self.own += [float(success[own].sum()), float(own.sum())]
        known, p = self.tries >= EVIDENCE, self.success
        lost = np.flatnonzero((known & (p < LOST))[: self.frontier])
        if len(lost):
            self.frontier = int(lost[0])
        while self.frontier < self.bins and (
            known[self.frontier] and p[self.frontier] >= ENOUGH or not self.size[self.frontier]
        ):
            self.frontier += 1

    @property
    def success(self) -> np.ndarray:
        """Success of each bin [B]; 0.5 without evidence."""
        return (self.wins + 0.5) / (self.tries + 1)

    @property
    def own_success(self) -> float:
        """Success from the task's own starts; 0 without evidence."""
        return float(self.own[0] / max(self.own[1], EVIDENCE))

    @property
    def own_share(self) -> float:
        """Share of the task's own starts."""
        if self.own_success >= COMMON:
            return 1.0
        return float(np.clip(max(self.own_success / COMMON, self.frontier / self.bins), LEAST, MOST))

    def supervision(self) -> float:
        """Share of the supervised loss that is kept beside RL."""
        return (1 - self.own_share) / (1 - LEAST)

    def propose(self, generator: np.random.Generator) -> StartTable:
        """Stored states up to a little beyond the frontier, and the task's own starts."""
        own = self.own_share
        if own == 1:
            return EVERY_START
        p = self.success
        weight = np.maximum(p * (1 - p), FLOOR) * (np.arange(self.bins) <= self.frontier + AHEAD)
        return StartTable(
            self.ids, (weight / np.maximum(self.size, 1))[self.bin], own + (1 - own) * (1 - self.share)
        )

    def metrics(self) -> dict[str, float]:
        """frontier [control steps before success], success there, success and share of the task's own
        starts."""
        at = min(self.frontier, self.bins - 1)
        return {
            "frontier": float(self.frontier * self.width),
            "frontier_success": float(self.success[at]),
            "own_success": self.own_success,
            "supervision": self.supervision(),
        }

    def state_dict(self) -> dict:
        return {
            "wins": self.wins.copy(),
            "tries": self.tries.copy(),
            "own": self.own.copy(),
            "frontier": self.frontier,
            "skip": self.skip,
        }

    def load_state_dict(self, state: dict) -> None:
        self.wins, self.tries, self.own = (np.array(state[k]) for k in ("wins", "tries", "own"))
        self.frontier, self.skip = state["frontier"], state["skip"]
