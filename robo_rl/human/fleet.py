"""N robots under a policy with operators beside it: one control step at a time, chunks cut where the driver
changes, episodes recorded.

`RobotFleet` is used by `robo_rl correct` (as fast as the simulator goes) and by the console (at the control
period).
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from robo_rl.data.episode import Episode
from robo_rl.evaluation import decide
from robo_rl.human.intervention import CORRECTION, DISCARD, PAUSE, POLICY, InterventionEnv
from robo_rl.rollout import announce

HUMAN = ("policy", "human")  # source codes of Intervene as words of an Episode


@dataclass(slots=True)
class OperatorStats:
    """Costs and results of a period of practice. Steps are control steps; times in seconds of robot time.

    A person's time counts from their attention (a scripted one's decision to help, a take-over in the
    console, the dead-man button of a device) to the hand-back, pauses between included. An intervention
    begins with a person's first command and lasts, pauses and changes between recovery and correction
    included, until the policy acts again or the episode ends.
    """

    period: float
    steps: int = 0
    human_steps: int = 0
    attended_steps: int = 0  # from the attention of a person to their hand-back
    pause_steps: int = 0
    episodes: int = 0
    successes: int = 0
    unassisted_successes: int = 0  # successes without any help
    interventions: int = 0
    recoveries: int = 0
    help_requests: int = 0  # alarms and decisions to help
    reaction: float = 0.0  # summed over interventions
    operators: int = 0
    robots: int = 0

    def summary(self) -> dict[str, float]:
        """The metrics of the progress line, the JSON and the report; their names are those of rounds.json."""
        minutes = self.attended_steps * self.period / 60
        hours = max(self.steps * self.period / 3600, 1e-9)
        wall = self.steps * self.period / max(1, self.robots) / 60  # N robots work side by side
        return asdict(self) | {
            "operator_minutes": minutes,
            "interventions_per_hour": self.interventions / hours,
            "reaction_mean": self.reaction / self.interventions if self.interventions else 0.0,
            "human_share": self.human_steps / self.steps if self.steps else 0.0,
            "success_rate": self.successes / self.episodes if self.episodes else 0.0,
            "unassisted_success_rate": self.unassisted_successes / self.episodes if self.episodes else 0.0,
            "interventions_per_success": self.interventions / max(1, self.successes),
            "utilisation": min(1.0, minutes / max(wall * self.operators, 1e-9)) if self.operators else 0.0,
        }


@dataclass(slots=True)
class EpisodeBuffer:
    """The frames of one robot's episode so far, without pauses: a robot may wait for a person for hours."""

    start: int = -1
    task: str = ""
    frames: list[tuple] = field(default_factory=list)  # state, executed, reward, source, phase, images
    # and with `rewindable` the observation and snapshot before each
    obs: list[dict] = field(default_factory=list)
    snapshots: list[dict] = field(default_factory=list)


class RobotFleet:
    """The robots of `env` under `policy`; owns the episodes that they are in. Each start of `starts` is one
    episode; a robot without a start idles.

    on_episode(episode, robot): receives every finished episode. rewindable: keep
    snapshots, so that `rewind` works. cut: an episode ends once a person has corrected and handed back (RaC's
    second rule). Chunks are sampled without exploration noise from `seed`. `before_decision(mask)`, if set,
    is called before the policy decides for the robots of mask bool[N]; `on_discard(robot)` for an episode
    that a person discarded.
    """

    def __init__(
        self,
        env: InterventionEnv,
        policy,
        starts: Iterable[int],
        seed: int = 0,
        on_episode: Callable[[Episode, int], None] = lambda episode, robot: None,
        rewindable: bool = False,
        cut: bool = False,
    ):
        self.cut = cut
        self.env, self.policy, self.on_episode, self.rewindable = env, policy, on_episode, rewindable
        self.starts, n = iter(starts), env.num_envs
        self.before_decision: Callable[[np.ndarray], None] | None = None
        self.on_discard: Callable[[int], None] = lambda i: None
        self.generator = torch.Generator().manual_seed(seed)
        self.views = list(env.spec.views)
        self.episodes = [EpisodeBuffer() for _ in range(n)]
        self.has_start = np.zeros(n, bool)
        self.execute = policy.options.execute
        self.cursor = np.full(n, self.execute)
        self.chunk = np.zeros((n, self.execute, env.single_action_space.shape[0]), np.float32)
        self.source, self.phase = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
        self.executed = np.zeros_like(self.chunk[:, 0])
        self.was_corrected = np.zeros(n, bool)  # somebody has corrected in this episode
        self.is_helped = np.zeros(n, bool)  # an intervention is going on
        self.stats = OperatorStats(env.spec.period, robots=n)
        self.obs, _ = env.reset(
            options={"reset_mask": np.ones(n, bool), "starts": self._starts(np.ones(n, bool))}
        )
        self._clear(np.ones(n, bool))

    def _starts(self, mask: np.ndarray) -> np.ndarray:
        ids = np.zeros(len(mask), np.int64)
        for i in np.flatnonzero(mask):
            start = next(self.starts, None)
            self.has_start[i] = start is not None
            ids[i] = 0 if start is None else start
            self.episodes[i] = EpisodeBuffer(start=-1 if start is None else int(start))
        return ids

    def _clear(self, mask: np.ndarray) -> None:
        for i in np.flatnonzero(mask):
            self.episodes[i].task = str(self.obs["task"][i])
        self.cursor[mask] = self.execute
        self.phase[mask] = self.source[mask] = 0
        self.was_corrected[mask] = self.is_helped[mask] = False

    @property
    def is_running(self) -> bool:
        """Whether a robot is in an episode."""
        return bool(self.has_start.any())

    def plan(self) -> np.ndarray:
        """float32[N,A]: the policy's next actions; it decides for robots at the end of their chunk and for
        those under a person."""
        self.cursor[self.env.sources() != 0] = self.execute  # a chunk ends where the driver changes
        need = self.cursor >= self.execute
        if need.any():
            if self.before_decision is not None:
                self.before_decision(need & self.has_start)
            rows = {k: v[need] for k, v in self.obs.items()}
            with torch.no_grad():
                self.chunk[need] = decide(self.policy, rows, self.generator)
            self.cursor[need] = 0
            announce(self.env, self.chunk, need)
        return self.chunk[np.arange(len(need)), np.minimum(self.cursor, self.execute - 1)]

    def step(self) -> np.ndarray:
        """One control step of every robot -> bool[N], the robots whose episode ended in it."""
        actions, before, tapes = self.plan(), self.obs, self.episodes
        snapshot = self.env.get_state() if self.rewindable else None
        self.obs, reward, terminated, truncated, info = self.env.step(actions)
        self.source, phase, self.executed = info["source"], info["phase"], info["executed"]
        act, a = self.executed, self.stats
        ended = (np.asarray(terminated) | np.asarray(truncated)) & self.has_start
        for i in np.flatnonzero(self.has_start & (phase != PAUSE)):
            images = {v: before[f"image/{v}"][i].copy() for v in self.views}
            buffer = tapes[i]
            buffer.frames.append(
                (
                    before["state"][i].copy(),
                    act[i].copy(),
                    float(reward[i]),
                    int(self.source[i]),
                    int(phase[i]),
                    images,
                )
            )
            if snapshot is not None:
                buffer.snapshots.append({k: v[i].copy() for k, v in snapshot.items()})
                buffer.obs.append(
                    {k: v[i].copy() if hasattr(v[i], "copy") else v[i] for k, v in before.items()}
                )
        self.is_helped &= phase != POLICY
        came = self.has_start & (phase > PAUSE) & ~self.is_helped
        self.is_helped |= came
        a.steps += int(self.has_start.sum())
        a.human_steps += int((self.has_start & info["held"]).sum())
        a.attended_steps += int((self.has_start & info["attended"]).sum())
        a.pause_steps += int((self.has_start & (phase == PAUSE) & ~info["held"]).sum())
        a.interventions += int(came.sum())
        a.recoveries += int((came & (phase == 2)).sum())
        self.phase = phase
        self.cursor += 1
        self.cursor[self.source != 0] = self.execute
        if self.cut:
            self.was_corrected |= self.has_start & (phase == CORRECTION)
            ended |= self.was_corrected & (phase == POLICY)
        self.succeeded = np.asarray(info["success"]) & ended
        for i in np.flatnonzero(ended & (info["mark"] != DISCARD)):
            self.end_episode(int(i), bool(info["success"][i]), bool(terminated[i]))
        for i in np.flatnonzero(ended & (info["mark"] == DISCARD)):
            self.on_discard(int(i))
        if ended.any():
            self.begin_episodes(ended)
        return ended

    def end_episode(self, i: int, success: bool, terminated: bool) -> Episode | None:
        """End the episode of robot `i`: count it, give it to `on_episode` and return it; None: it has no
        frames."""
        buffer, a = self.episodes[i], self.stats
        episode = episode_of(buffer, self.views, success, terminated, self.observation_of(i))
        a.episodes += 1
        a.successes += success
        if episode is not None:
            a.unassisted_successes += success and not (np.asarray(episode.phase) > PAUSE).any()
            self.on_episode(episode, i)
        return episode

    def observation_of(self, i: int) -> dict[str, np.ndarray]:
        """The state and pictures of robot `i` now."""
        return {k: np.array(self.obs[k][i]) for k in ("state", *(f"image/{v}" for v in self.views))}

    def begin_episodes(self, mask: np.ndarray) -> None:
        """Begin the next episode of the robots of `mask`; one without a start idles in an episode that is not
        recorded."""
        self.obs, _ = self.env.reset(options={"reset_mask": mask.copy(), "starts": self._starts(mask)})
        self._clear(mask)

    def frame_before(self, i: int, steps: int) -> int:
        """The frame of robot `i`'s episode from which on it has moved for so many control steps."""
        return max(0, len(self.episodes[i].frames) - steps)

    def rewind(self, i: int, to: int) -> int:
        """Put robot `i` back to how it was before frame `to` of its episode (0: its start) -> frames taken
        back."""
        buffer = self.episodes[i]
        if not 0 <= to < len(buffer.snapshots):
            return 0
        n, mask = self.env.num_envs, np.arange(self.env.num_envs) == i
        state = {k: np.repeat(np.asarray(v)[None], n, 0) for k, v in buffer.snapshots[to].items()}
        obs = {k: _rows(v, n) for k, v in buffer.obs[to].items()}
        self.env.rewind(state, obs, mask)
        self.obs = {
            k: np.where(mask.reshape(-1, *[1] * (np.ndim(v) - 1)), obs[k], v) for k, v in self.obs.items()
        }
        back = len(buffer.frames) - to
        for rows in (buffer.frames, buffer.obs, buffer.snapshots):
            del rows[to:]
        self.cursor[i] = self.execute
        return back


def _rows(x, n: int) -> np.ndarray:
    return np.array([x] * n) if isinstance(x, str) else np.repeat(np.asarray(x)[None], n, 0)


def episode_of(
    episode: EpisodeBuffer, views: list[str], success: bool, terminated: bool, last: dict[str, np.ndarray]
) -> Episode | None:
    """The frames as an Episode that ends with the observation `last`; None if there are none."""
    if not episode.frames:
        return None
    state, action, reward, source, phase, images = zip(*episode.frames, strict=True)
    return Episode(
        state=np.stack(state),
        action=np.stack(action),
        reward=np.array(reward),
        task=episode.task,
        success=success,
        terminated=terminated,
        images={v: np.stack([x[v] for x in images]) for v in views},
        source=[HUMAN[s] for s in source],
        phase=np.array(phase),
        start=episode.start,
        final=last["state"],
        final_images={v: last[f"image/{v}"] for v in views},
    )
