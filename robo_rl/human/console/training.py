"""The console beside a run that learns: people at the page take over, pause and mark the robots that
collect."""

import numpy as np

from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.robots import ConsoleRobots
from robo_rl.human.fleet import OperatorStats
from robo_rl.human.intervention import DISCARD, FAILURE, POLICY, SUCCESS, Intervention, OperatorView
from robo_rl.human.pace import Pace

MARK = {True: SUCCESS, False: FAILURE, None: DISCARD}
HOW = ("", "marked a success", "marked a failure", "discarded")


class TrainingConsole(ConsoleRobots):
    """The Operator of an `InterventionEnv` of `num_robots` robots; the thread that steps that env owns it.
    See `ConsoleRobots`."""

    def __init__(self, spec, num_robots: int, options: ConsoleOptions):
        super().__init__(spec, num_robots, options, spec.max_steps)
        self.operator_stats = OperatorStats(
            spec.period, robots=num_robots, operators=len(options.operators.split(","))
        )
        self.stats = self.operator_stats.summary()
        self.real_time = Pace(self.pace)
        self.obs, self.tasks = {}, [""] * num_robots
        self.phase, self.steps = np.zeros(num_robots, np.uint8), np.zeros(num_robots, np.int64)
        self.executed = np.zeros((num_robots, len(spec.axes)), np.float32)
        self.is_helped = np.zeros(num_robots, bool)
        self.outcome = [""] * num_robots  # how the episode of each robot ended, "" while it goes on

    def begin(self, mask, obs):
        with self.lock:
            for i in np.flatnonzero(mask):
                if self.state.episode[i]:
                    self.state.end_episode(int(i), self.outcome[i] or "the run began another")
                self.outcome[i], self.tasks[i] = "", str(obs["task"][i])
            self.state.begin(mask, obs)
            self.obs, self.is_helped[mask] = obs, False

    def is_called(self) -> bool:
        """Whether somebody holds a robot, which is to move as they command."""
        return any(hold is not None for hold in self.state.holds)

    def intervene(self, view: OperatorView) -> Intervention:
        self.real_time.wait()
        with self.lock:
            self.read_device()
            self.executed, self.steps = view.executed, view.steps
            said, marks = self.state.intervene(view), np.zeros(self.n, np.uint8)
            for i, label in enumerate(self.state.labels):
                if label is not None:
                    marks[i], self.state.labels[i] = MARK[label.success], None
        return Intervention(said.actions, said.phase, marks, said.attended)

    def after_step(self, obs: dict, over: np.ndarray, info: dict) -> None:
        """Count and show what the step made."""
        a = self.operator_stats
        with self.lock:
            self.obs, self.phase, self.executed = obs, info["phase"], info["executed"]
            came = info["held"] & ~self.is_helped
            self.is_helped = (self.is_helped | came) & (self.phase != POLICY)
            a.steps += self.n
            a.human_steps += int(info["held"].sum())
            a.attended_steps += int(info["attended"].sum())
            a.interventions += int(came.sum())
            for i in np.flatnonzero(over):
                mark, won = int(info["mark"][i]), bool(info["success"][i])
                self.outcome[i] = HOW[mark] or ("it succeeded" if won else "it ended without success")
                self.results[i] += 0 if mark == DISCARD else (int(won), int(not won))
            self.stats = a.summary()
        if self.cameras is not None:
            self.draw_in_time()

    def get_state(self):
        return {}

    def set_state(self, state, mask):
        pass
