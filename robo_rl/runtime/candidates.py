"""Candidates of a group, played by a cheaper policy before those of them that are kept are played exactly:
what a worker keeps of them, and what a batch tells (`robo_rl.rollout_control.candidates`).

Nothing of a candidate but its outcome leaves the worker. A group of G members has M = R G candidates; member
m carries the outcomes of R, and says which candidate it is. Columns, the same at every decision:

    candidate/number     [G]     the candidate that the member is played again as
    candidate/success, candidate/returns, candidate/lengths   [G,R]     candidates m R .. m R + R - 1
"""

from dataclasses import dataclass

import numpy as np

from robo_rl.options import RolloutOptions
from robo_rl.policies import Policy
from robo_rl.policies.cheap import CheapPolicy
from robo_rl.rollout import Columns, Layout, Rollout
from robo_rl.rollout_control.candidates import extremes, rank_correlation
from robo_rl.starts import Ended

PREFIX = "candidate/"
NUMBER = PREFIX + "number"
OUTCOMES = {"success": bool, "returns": np.float64, "lengths": np.int64}


def candidate_layout(group: int, candidates: int) -> Layout:
    """Rows of the columns of a group."""
    return {NUMBER: ((group,), np.dtype(np.int64))} | {
        PREFIX + k: ((group, candidates // group), np.dtype(d)) for k, d in OUTCOMES.items()
    }


def make_cheap(options: RolloutOptions | None, policy: Policy) -> tuple[CheapPolicy | None, int]:
    """What plays the candidates of a group, and how many; None, 0: there are none."""
    if options is None or not options.candidates:
        return None, 0
    return CheapPolicy(policy, options.candidates_by, options.candidates_steps), options.candidates


@dataclass(slots=True)
class Candidates:
    """The candidates of one group, `begun` of which have had an env; `kept` [G]: those that are played again,
    once all are over."""

    success: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    over: np.ndarray
    begun: int = 0
    kept: np.ndarray | None = None

    @classmethod
    def of(cls, n: int) -> "Candidates":
        success, returns, lengths = (np.zeros(n, d) for d in OUTCOMES.values())
        return cls(success, returns, lengths, np.zeros(n, bool))

    def ended(self, which: np.ndarray, line: Columns, envs: np.ndarray) -> None:
        """The candidates `which` [k] ended in these envs of a collector's line, at its decision."""
        for name in OUTCOMES:
            getattr(self, name)[which] = line[name][0, envs]
        self.over[which] = True

    def choose(self, group: int) -> None:
        """All are over: choose those that are played again."""
        self.kept = extremes(self.returns, group)

    def write(self, columns: Columns) -> None:
        """Write the columns of a group that was chosen."""
        if self.kept is not None:
            columns[NUMBER][:] = self.kept
            for name in OUTCOMES:
                columns[PREFIX + name][:] = getattr(self, name).reshape(len(self.kept), -1)

    def state(self) -> list:
        return [getattr(self, k) for k in self.__slots__]

    @classmethod
    def again(cls, state: list) -> "Candidates":
        """Those that `state` tells of."""
        success, returns, lengths, over = (np.array(x) for x in state[:4])
        return cls(
            success, returns, lengths, over, state[4], None if state[5] is None else np.array(state[5])
        )


def tell_candidates(r: Rollout, parts: list[tuple[Columns, int]], group: int) -> None:
    """Count the candidates of a batch: its success, return and length are theirs, for those of the chosen say
    nothing of the policy's.

    Statistics: candidates/again, success of those played again; candidates/same, share of them that ended
    alike; candidates/mixed, share of starts whose candidates ended differently; candidates/rank, mean over
    these of the rank correlation of both returns; candidates/steps, share of all control steps.
    """
    first = {
        k: np.concatenate([c[k][0] for c, _ in parts])
        for k in parts[0][0]
        if k.startswith(PREFIX) or k in ("start", "task_id")
    }
    last = {k: np.concatenate([c[k][made - 1] for c, made in parts]) for k in ("success", "returns")}
    number = first[NUMBER].reshape(-1, group)
    of = {k: first[PREFIX + k].reshape(len(number), -1) for k in OUTCOMES}  # [groups, M]
    before = {k: np.take_along_axis(of[k], number, 1) for k in ("success", "returns")}
    after = {k: last[k].reshape(number.shape) for k in before}
    mixed = (of["returns"] != of["returns"][:, :1]).any(1)
    rank = [
        rank_correlation(a, b) for a, b in zip(before["returns"][mixed], after["returns"][mixed], strict=True)
    ]
    steps = float(of["lengths"].sum())
    r.stats |= {
        "episodes": float(of["success"].size),
        "success": float(of["success"].mean()),
        "return": float(of["returns"].mean()),
        "length": float(of["lengths"].mean()),
        "env_steps": r.stats["env_steps"] + steps,
        "candidates/again": float(after["success"].mean()),
        "candidates/mixed": float(mixed.mean()),
        "candidates/same": float((before["success"] == after["success"]).mean()),
        "candidates/steps": steps / (r.stats["env_steps"] + steps),
    } | ({"candidates/rank": float(np.mean(rank))} if rank else {})
    if r.ended is not None:
        again = of["success"].size // len(first["start"])
        starts, tasks = (np.repeat(first[k], again) for k in ("start", "task_id"))
        r.ended = Ended(starts, tasks, *(of[k].reshape(-1) for k in ("success", "returns", "lengths")))
