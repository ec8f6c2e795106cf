"""The console's robots: one thread steps them at the control period and draws them, another serves the page
(`server`).

Between the two stand the `ConsoleState` (which operator commands what, under one lock) and the newest
pictures. Frames in which a person acts are journaled before they count (`recorder`).
"""

import time

import numpy as np

from robo_rl.errors import UserError
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.recorder import CorrectionRecorder
from robo_rl.human.console.robots import ConsoleRobots
from robo_rl.human.console.stuck import StuckDetector
from robo_rl.human.console.terminal import TerminalRequests
from robo_rl.human.fleet import RobotFleet, episode_of
from robo_rl.human.intervention import POLICY, InterventionEnv

CONSOLE_START = 1_100_000_000  # starts of the console's episodes
TIME_LIMITS = 40  # episodes end after this many times the task's own limit
BLEND = 0.06  # s of wall clock


class ConsoleSession(ConsoleRobots):
    """Robots in `env` under `policy`, with operators (see `ConsoleRobots`); the thread that calls `run` owns
    it."""

    def __init__(
        self,
        env,
        policy,
        recorder: CorrectionRecorder,
        options: ConsoleOptions,
        limit: int,
        device=None,
        alone: int = POLICY,
    ):
        super().__init__(env.spec, env.num_envs, options, limit, device, alone)
        self.recorder = recorder
        self.env = InterventionEnv(
            env, self.state, blend=BLEND * options.speed, freeze=hasattr(env, "get_state")
        )
        first = CONSOLE_START + options.seed * 100_000 + int(time.time()) % 50_000 * 1_000
        self.fleet = RobotFleet(
            self.env,
            policy,
            iter(range(first, first + 10**9)),
            seed=options.seed,
            on_episode=recorder.end_episode,
            rewindable=self.env.freeze,
        )
        self.fleet.stats.operators = len(options.operators.split(","))
        std = getattr(getattr(policy, "obs_norm", None), "std", None)
        self.stuck = StuckDetector(self.n, limit, self.spec.period, 1.0 if std is None else std.numpy())
        self.hold_numbers = [0] * self.n  # in the step before
        self.rewinds: list[tuple[int, float]] = []  # (robot, seconds) that operators asked for
        self.stats = self.fleet.stats.summary()
        self.watch(self.env)
        self.look()

    def look(self) -> None:
        """Take what pages show from the fleet."""
        self.obs, self.phase, self.executed, self.steps = (
            self.fleet.obs,
            self.fleet.phase,
            self.fleet.executed,
            self.env.steps,
        )
        self.tasks = [episode.task for episode in self.fleet.episodes]
        self.kept, self.unsaved = self.recorder.kept, self.recorder.unsaved

    def run(
        self, requests: TerminalRequests, seconds: float = 0.0, renew=lambda: None, goes_on=lambda: True
    ) -> None:
        """Step at the pace until asked to stop or done; `renew()` runs when somebody asks for new
        addresses."""
        began = due = time.monotonic()
        while (
            goes_on()
            and not requests.stop
            and not self.is_stopped
            and not (seconds and time.monotonic() - began > seconds)
        ):
            due = max(due + self.pace, time.monotonic() - 5 * self.pace)
            self.tick()
            self.recorder.maintain(self.fleet.episodes)
            if requests.wants_new_addresses():
                renew()
            time.sleep(max(0.0, due - time.monotonic()))

    def tick(self) -> None:
        """Rewind robots, step all of them, record, request help, draw."""
        with self.lock:
            rewinds, self.rewinds = self.rewinds, []
        for i, seconds in rewinds:
            self.rewind(i, seconds)
        began = time.monotonic()
        with self.lock:
            self.read_device()
            numbers = [hold.number if hold else 0 for hold in self.state.holds]
            self.fleet.is_helped[
                [n == 0 or n != m for n, m in zip(numbers, self.hold_numbers, strict=True)]
            ] = False
            self.hold_numbers = numbers  # another hold is another intervention
            self.env.sources()  # what people want now, under the lock; the step itself needs none
        ended = self.fleet.step()
        with self.lock:
            for i in ended.nonzero()[0]:
                success = bool(self.fleet.succeeded[i])
                self.end_episode(int(i), "it succeeded" if success else "its time was over", success)
        self.end_labelled_episodes()
        with self.lock:
            self.request_help()
        self.recorder.record_frames(self.fleet.episodes)
        with self.lock:
            if not self.recorder.error:
                self.stats = self.fleet.stats.summary()
            self.look()
        self.rate = 0.95 * self.rate + 0.05 / max(self.pace, time.monotonic() - began)
        self.draw_in_time()

    def close(self) -> None:
        """Record unfinished episodes with help as they are, and close the files and the env."""
        for i, episode in enumerate(self.fleet.episodes):
            if any(r[3] for r in episode.frames):
                episode = episode_of(episode, self.fleet.views, False, False, self.fleet.observation_of(i))
                if episode is not None:
                    self.recorder.end_episode(episode, i)
        try:
            self.recorder.close()
        finally:
            self.env.close()
            getattr(self.fleet.policy, "close", lambda: None)()  # one that acts in a process of its own

    def request_rewind(self, i: int, seconds: float) -> None:
        """Rewind robot i before the next step. UserError: the simulator has no snapshots."""
        if not self.env.freeze:
            raise UserError("this simulator cannot go back")
        self.rewinds.append((i, seconds))

    def trouble(self) -> str:
        return self.recorder.error or self.picture_error

    def rewind(self, i: int, seconds: float) -> None:
        """Put robot i back by `seconds` in which it moved."""
        if self.fleet.rewind(i, self.fleet.frame_before(i, round(seconds / self.spec.period))):
            self.recorder.drop_episode(i)

    def end_episode(self, i: int, how: str, success: bool | None) -> None:
        """Count robot i's finished episode, but not a discarded one (None); under the lock."""
        if success is not None:
            self.results[i, 0 if success else 1] += 1
        self.state.end_episode(i, how)
        self.stuck.begin_episode(i)

    def end_labelled_episodes(self) -> None:
        """End the episodes that an operator labelled, and those whose request for help nobody answered."""
        n = self.n
        with self.lock:
            unanswered = self.state.unanswered()
            over = [
                (i, self.state.labels[i])
                for i in range(n)
                if self.state.labels[i] is not None or i in unanswered
            ]
        done = np.zeros(n, bool)
        for i, label in over:
            success = label is not None and bool(label.success)
            discarded = label is not None and label.success is None
            if discarded:
                self.recorder.drop_episode(i)
            else:
                episode = self.fleet.end_episode(i, success, success)  # writes; not under the lock
                if label is not None and episode is not None:
                    self.recorder.save_mark(episode)
            how = (
                f"{label.operator} {'discarded it' if discarded else f'marked it a {label.word}'}"
                if label
                else "nobody came"
            )
            with self.lock:
                self.end_episode(i, how, None if discarded else success)
            done[i] = True
        if done.any():
            self.fleet.begin_episodes(done)

    def request_help(self) -> None:
        """Request help where a robot under its policy is over its time or stands still; under the lock."""
        steps = self.env.steps
        for i in range(self.n if self.state.alone == POLICY else 0):
            if self.state.holds[i] is not None or self.state.paused[i] or self.state.help_reason[i]:
                self.stuck.pause(i)
                continue
            for why in self.stuck.check(i, int(steps[i]), self.fleet.obs["state"][i]):
                self.state.request_help(i, why)
