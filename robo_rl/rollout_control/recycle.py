"""What a failure is good for: play it again up to its last good state, and let somebody better go on from
there (SCOPE).

    cuts        of L steps: whole chunks nearest below k L / (m + 1), k = 1 .. m
    last good   the latest cut from which the teacher still succeeds, in the time that the episode has left
    lessons     the teacher's steps after it; the prefix is the policy's own and is not taught

A start played again with the same actions shows the same states; a failure that does not is given back. What
a teacher did has no log-prob: it enters a supervised loss, never a ratio. Source: SCOPE, arXiv 2602.24110,
derived from its abstract. Where we differ: its first wrong step is found by a process reward model over
words; here it is tried where the teacher can still make good.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError

# raw observation of all envs, bool[N] where it is asked -> actions [N,A]
Teacher = Callable[[dict, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed episode of the policy: its start, the commands [L,A] of its steps, its states [D,S] before
    each decision."""

    start: int
    action: np.ndarray
    state: np.ndarray


@dataclass(frozen=True, slots=True)
class Completed:
    """What became of a failure that was cut: the raw observations and actions [k,A] of the teacher, whether
    it succeeded, all steps that were played, and whether the prefix showed the recorded states."""

    obs: tuple[dict, ...]
    action: np.ndarray
    success: bool
    steps: int
    same: bool


def cuts_of(length: int, execute: int, cuts: int) -> list[int]:
    """At most `cuts` numbers of steps, in whole chunks of `execute`, that cut an episode of `length` steps
    into about equal parts."""
    return sorted({length * k // (cuts + 1) // execute * execute for k in range(1, cuts + 1)})


def complete(
    env, failures: Sequence[Failure], cuts: Sequence[int], teacher: Teacher, execute: int
) -> list[Completed]:
    """Play the first `cuts[i]` commands of each failure again from its start, then let the teacher act to the
    end."""
    n, size = len(failures), env.num_envs
    if not 0 < n <= size:
        raise UserError(f"{n} episodes need as many envs, there are {size}")
    starts, at = np.zeros(size, np.int64), np.zeros(size, np.int64)
    starts[:n], at[:n] = [f.start for f in failures], cuts
    obs, _ = env.reset(options={"reset_mask": np.ones(size, bool), "starts": starts})
    over, same, won = np.arange(size) >= n, np.ones(size, bool), np.zeros(size, bool)
    steps, rows, t = np.zeros(size, np.int64), list[tuple[dict, np.ndarray, np.ndarray]](), 0
    while not over.all():
        action = np.zeros(env.action_space.shape, np.float32)
        for i in map(int, np.flatnonzero((t <= at) & ~over)):
            if t % execute == 0:  # the state that the teacher goes on from too
                same[i] &= np.array_equal(
                    np.asarray(obs["state"][i], np.float32), failures[i].state[t // execute]
                )
            if t < at[i]:
                action[i] = failures[i].action[t]
        taught = (t >= at) & ~over
        if taught.any():
            action[taught] = np.asarray(teacher(obs, taught), np.float32)[taught]
            rows.append(({k: np.array(v) for k, v in obs.items() if k in ("state", "task")}, action, taught))
        obs, _, terminated, truncated, info = env.step(action)
        steps, won = steps + ~over, np.where(over, won, np.asarray(info["success"], bool))
        over, t = over | np.asarray(terminated | truncated), t + 1
    out = []
    for i in range(n):
        mine = [r for r in rows if r[2][i]]
        action = (
            np.stack([r[1][i] for r in mine])
            if mine
            else np.zeros((0, env.action_space.shape[1]), np.float32)
        )
        out.append(
            Completed(
                tuple({k: v[i] for k, v in r[0].items()} for r in mine),
                action,
                bool(won[i]),
                int(steps[i]),
                bool(same[i]),
            )
        )
    return out


def lessons(done: Completed, horizon: int) -> tuple[list[dict], np.ndarray, np.ndarray]:
    """(observations, chunks [k,H,A], mask [k,H]) of every step of the teacher; the mask is 0 past the end of
    the episode."""
    k = len(done.action)
    at = np.arange(k)[:, None] + np.arange(horizon)
    return list(done.obs), done.action[np.minimum(at, k - 1)], (at < k).astype(np.float32)


def expert_teacher(env) -> Teacher:
    """The scripted expert of the env that is played in."""
    return lambda obs, mask: np.asarray(env.expert_action(), np.float32)
