"""What a failure is good for: cut it where it went wrong, and let somebody better, or the policy again, go on from there.

    scope     the prefix up to the last good state as it is, then a teacher to the end       SCOPE (arXiv 2602.24110)
    int       the teacher for a few steps at the first error, then the policy again           InT (arXiv 2601.14209)
    fission   a group of the policy's own attempts from just after the error                  Fission-GRPO (arXiv 2601.15625)

All three are pure functions of recorded episodes and of a simulator that can begin an episode's start again. What a policy did keeps its
log-prob and its advantage; what a teacher did has none: it enters supervised losses alone, never a ratio, and at most as a stated
share of what is learnt from. SCOPE's first wrong step comes from a process reward model over words; here a curve of progress or
predicted success takes its place. Derived from the abstracts, InT's and Fission-GRPO's also from their pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from robo_rl.advantages import group_advantage
from robo_rl.data.episode import Episode
from robo_rl.errors import UserError, in_range

Teacher = Callable[[dict, np.ndarray], np.ndarray]  # raw observation of all envs, bool[N] where it is asked -> actions [N,A]


def first_bad_step(value: np.ndarray, drop: float) -> int:
    """First step t from which on `value` [T] stays more than `drop` below the greatest before t; T where there is none.

    value: progress, or predicted success, of the state before each action. The last good state is that before step t - 1 was taken,
    whose action led to the fall: cut at max(t - 1, 0).
    """
    before = np.maximum.accumulate(value)
    low = value < before - drop
    last_good = np.flatnonzero(~low)
    return int(last_good[-1]) + 1 if len(last_good) else 0


def cut_of(value: np.ndarray, drop: float, chunk: int = 1) -> int:
    """Steps of the prefix that stays: up to the last good state, a whole number of chunks; all T where nothing went wrong."""
    bad = first_bad_step(value, drop)
    return len(value) if bad >= len(value) else max(bad - 1, 0) // chunk * chunk


@dataclass(frozen=True, slots=True)
class Recycled:
    """An episode of which a prefix is a recorded one's: `cut` steps of it, then what came after; `episode.source` says who acted."""

    episode: Episode
    cut: int

    @property
    def taught(self) -> np.ndarray:
        """bool [T]: steps that neither the prefix nor the policy made."""
        source = self.episode.source
        return np.array([s != "policy" for s in ([source] * len(self.episode) if isinstance(source, str) else source)])


def recycle(env, episodes: Sequence[Episode], cuts: Sequence[int], teacher: Teacher, policy: Teacher | None = None,
            steps: int = 0, name: str = "teacher") -> list[Recycled]:
    """Play the first `cuts[i]` actions of each episode again from its start, then let the teacher act, to the end or for `steps` steps.

    After `steps` > 0 the `policy` goes on (InT). Needs as many envs as episodes at least; every episode needs a start >= 0. Raises
    UserError where the simulator does not show the recorded states again (another version, another setting): the prefix is then no
    prefix of that episode.
    """
    n = len(episodes)
    if n > env.num_envs or not n:
        raise UserError(f"{n} episodes need as many envs, there are {env.num_envs}")
    if min(e.start for e in episodes) < 0:
        raise UserError("an episode without a start cannot be played again; record it with one")
    if steps and policy is None:
        raise UserError("after the teacher's steps somebody must go on: pass the policy")
    starts = np.zeros(env.num_envs, np.int64)
    starts[:n] = [e.start for e in episodes]
    obs, _ = env.reset(options={"reset_mask": np.ones(env.num_envs, bool), "starts": starts})
    at, over, t, rows = np.asarray(cuts), np.zeros(env.num_envs, bool), 0, []
    while not over[:n].all():
        replays = np.array([t < c for c in at] + [False] * (env.num_envs - n))
        taught = ~replays & ((t < np.append(at + steps, [0] * (env.num_envs - n))) if steps else True)
        action = np.zeros(env.action_space.shape, np.float32)
        for i in map(int, np.flatnonzero(replays & ~over)):
            if not np.array_equal(np.asarray(obs["state"][i], np.float32), episodes[i].state[t]):
                raise UserError(f"episode {i} is not the one that its actions make here: step {t} differs")
            action[i] = episodes[i].action[t]
        for who, mask in ((teacher, taught), (policy, ~replays & ~taught)):
            if who is not None and (mask & ~over).any():
                action[mask] = np.asarray(who(obs, mask), np.float32)[mask]
        state = np.array(obs["state"], np.float32)
        obs, reward, terminated, truncated, info = env.step(action)
        rows.append((state, action, np.array(reward), ~over, np.where(taught, name, "policy")))
        over, t = np.asarray(terminated | truncated), t + 1
    won, final, rule = np.asarray(info["success"]), np.asarray(obs["state"], np.float32), np.asarray(terminated)
    out = []
    for i, (old, cut) in enumerate(zip(episodes, cuts, strict=True)):
        mine = [r for r in rows if r[3][i]]
        out.append(Recycled(replace(
            old, state=np.stack([r[0][i] for r in mine]), action=np.stack([r[1][i] for r in mine]), images={}, final_images=None,
            reward=np.array([r[2][i] for r in mine]), source=[str(r[4][i]) for r in mine], success=bool(won[i]), phase=None,
            terminated=bool(rule[i]), final=final[i]), int(cut)))
    return out


def expert_teacher(env) -> Teacher:
    """The scripted expert of the env that is played in."""
    return lambda obs, mask: np.asarray(env.expert_action(), np.float32)


def lessons(recycled: Sequence[Recycled], horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What supervised learning takes from successes: (state [B,S], chunk [B,H,A], mask [B,H]) of every step that was taught.

    A chunk begins at a taught step and is masked from the first step on that was not.
    """
    state, chunk, mask = [], [], []
    for r in recycled:
        if not r.episode.success:
            continue
        action, taught = r.episode.action, r.taught
        for t in np.flatnonzero(taught).tolist():
            rows = action[t:t + horizon]
            good = np.cumprod(taught[t:t + horizon]).astype(np.float32)
            state.append(r.episode.state[t])
            chunk.append(np.concatenate([rows, np.repeat(rows[-1:], horizon - len(rows), 0)]))
            mask.append(np.concatenate([good, np.zeros(horizon - len(rows), np.float32)]))
    if not state:
        return np.zeros((0, 0), np.float32), np.zeros((0, horizon, 0), np.float32), np.zeros((0, horizon), np.float32)
    return np.stack(state), np.stack(chunk), np.stack(mask)


def capped(taught: int, own: int, share: float) -> int:
    """How many of `taught` samples may stand beside `own` of the policy so that they are at most `share` of all: n/(n + own) <= share."""
    in_range("share", share, 0, 1, open_high=True)
    return min(taught, int(np.floor(own * share / (1 - share) + 1e-9)))


def intervention_pays(won: np.ndarray, base: float) -> bool:
    """Whether continuations after an intervention, `won` bool [k], succeed more often than those without, `base` in [0, 1] (InT).

    Only such an intervention is taught: the prefix and it, not the suffix.
    """
    return bool(len(won)) and float(np.mean(won)) > base


@dataclass(frozen=True, slots=True)
class FissionGroup:
    """Attempts to recover from one error: the states [G] rows of the simulator to begin in, and the version that made the error."""

    row: int
    size: int
    version: int


class FissionQueue:
    """Errors that wait for attempts at recovery, newest first, dropped when `most_age` versions old: what is learnt stays on-policy.

    Once `trigger` errors wait, `take` gives the newest `trigger` of them, each as a group of `size` attempts.
    """

    def __init__(self, trigger: int = 8, size: int = 8, most_age: int = 4):
        in_range("trigger", trigger, 1, 10**6)
        in_range("size", size, 2, 10**5)
        self.trigger, self.size, self.most_age, self.waiting = trigger, size, most_age, []

    def add(self, row: int, version: int) -> None:
        """An error, as a row of stored states just after it."""
        self.waiting.append([int(row), int(version)])

    def take(self, version: int) -> list[FissionGroup]:
        """The groups that are due, [] while too few errors wait."""
        self.waiting = [w for w in self.waiting if version - w[1] <= self.most_age]
        if len(self.waiting) < self.trigger:
            return []
        due, self.waiting = self.waiting[-self.trigger:][::-1], self.waiting[:-self.trigger]
        return [FissionGroup(row, self.size, v) for row, v in due]

    def state_dict(self) -> dict:
        return {"waiting": [list(w) for w in self.waiting]}

    def load_state_dict(self, state: dict) -> None:
        self.waiting = [list(w) for w in state["waiting"]]


def fission_advantage(outcome, kind: str = "rloo"):
    """Advantage [Q,G] of attempts at recovery, relative to the others from the same error: GRPO's, of its own group.

    Attempts from an error are not compared to episodes from the start. As a gradient of success from the start their sum is weighted
    by how often the policy comes to those errors: `robo_rl.tree_credit` with a fork there has that weight; Fission-GRPO has none.
    """
    return group_advantage(outcome, kind)
