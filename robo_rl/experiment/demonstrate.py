"""A person's demonstrations: one robot of any env, driven by a device or from the console's page, episode
after episode.

The robot stands still until somebody drives. An episode ends when the env says so or the person marks it;
what they drove is recorded, not the pauses between. Frames are journaled before they count, so `kill -9`
costs no episode.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from robo_rl.data.episode import Episode
from robo_rl.demos import DEMO_START
from robo_rl.experiment.operators import device_operator, open_person
from robo_rl.human.console.recorder import CorrectionRecorder
from robo_rl.human.devices import DeviceOperator
from robo_rl.human.fleet import RobotFleet
from robo_rl.human.intervention import PAUSE, InterventionEnv
from robo_rl.human.leader_arm import tool_of
from robo_rl.human.pace import Pace

TIME_LIMITS = 40  # times the task's own limit that a person has for an episode


class StandStill:
    """The policy of a robot that nobody drives: it decides nothing, for it never acts (the operator's phase
    is then pause)."""

    def __init__(self, spec):
        from robo_rl.policies import ObsSpec

        self.options = SimpleNamespace(execute=1)
        self.spec = ObsSpec(state=max(1, len(spec.state_names)), action=len(spec.axes))

    def act(self, obs, generator, explore: bool = False):
        return SimpleNamespace(actions=torch.zeros(len(obs["state"]), 1, self.spec.action))


def demonstration(episode: Episode, keep: str) -> Episode | None:
    """What of an episode is recorded as a demonstration: the frames that the person drove; None: nothing."""
    human = np.array([word == "human" for word in episode.source])
    if not human.any() or (keep == "success" and not episode.success):
        return None
    assert episode.reward is not None  # of every Episode
    reward = episode.reward[human]
    if episode.success and not reward.any():  # the person's word is worth what the env's would be
        reward[-1] = 1
    return replace(
        episode,
        state=episode.state[human],
        action=episode.action[human],
        reward=reward,
        source="human",
        phase=None,
        images={view: x[human] for view, x in episode.images.items()},
    )


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """Episodes that were kept, successes among them, how many there were, and how many the data set now
    has."""

    kept: int
    successes: int
    tried: int
    total: int


class DeviceSession:
    """One robot of `env` with `operator` beside it; starts: of the episodes."""

    def __init__(self, env, operator: DeviceOperator, recorder: CorrectionRecorder, starts):
        self.recorder, self.operator = recorder, operator
        self.fleet = RobotFleet(
            InterventionEnv(env, operator, blend=0, freeze=hasattr(env, "get_state")),
            StandStill(env.spec),
            starts,
            on_episode=recorder.end_episode,
        )
        self.fleet.on_discard = recorder.drop_episode
        operator.tool = lambda: tool_of(self.fleet.obs["state"][0], env.spec.state_names)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Step until the person stops, or there is nothing to go on for."""
        while goes_on() and not self.operator.is_stopped and self.fleet.is_running:
            self.fleet.step()
            self.recorder.record_frames(self.fleet.episodes)
            self.recorder.maintain(self.fleet.episodes)


def demonstrate(options, env, folder: Path, limit: int, say: Callable[[str], None]) -> Demonstrated:
    """Let the person of `options` (a `CollectOptions`) drive robot 0 of `env` until so many episodes are
    recorded in `folder`, or they stop. limit: control steps of the task's own episodes; say: receives lines,
    such as the console's address.

    UserError: the device is not there, or was lost.
    """
    successes, tried = [], []

    def made(episode: Episode) -> Episode | None:
        found = demonstration(episode, options.keep)
        tried.append(1)
        if found is not None:
            successes.append(found.success)
            say(
                f"episode {len(successes)} of {options.episodes}: "
                f"{'success' if found.success else 'failure'}, {len(found) * env.spec.period:.1f} s"
            )
        return found

    spec = replace(env.spec, max_steps=limit)
    recorder = CorrectionRecorder(folder, folder.with_name(folder.name + ".journal"), spec, 1, made=made)
    tried.clear()
    if recorder.recovered:
        say(f"{recorder.recovered} episodes of a session that was killed are in the data set now")
    already = len(successes)
    try:
        if options.operator == "console":
            drive_from_console(options, env, limit, recorder, lambda: recorder.kept < options.episodes, say)
        else:
            drive_by_device(options, env, recorder, lambda: recorder.kept < options.episodes, say)
    finally:
        recorder.close()
        if not recorder.error:
            recorder.journal.path.unlink(missing_ok=True)
    return Demonstrated(recorder.kept, sum(successes[already:]), len(tried), recorder.writer.episodes)


def drive_by_device(options, env, recorder: CorrectionRecorder, goes_on: Callable[[], bool], say) -> None:
    """The person holds a device of this machine."""
    pace = Pace(env.spec.period / options.speed if options.speed else 0.0)
    operator = device_operator(options.operator, env.spec, env.num_envs, rest=0.0, alone=PAUSE, pace=pace)
    first = DEMO_START + options.seed % 6000 * 100_000 + len(recorder.writer)
    say(f"{options.operator} drives {env.spec.id}; keys and buttons: docs/howto/teleoperate.md")
    try:
        DeviceSession(env, operator, recorder, iter(range(first, first + 100_000))).run(goes_on)
    finally:
        operator.device.close()


def drive_from_console(
    options, env, limit: int, recorder: CorrectionRecorder, goes_on: Callable[[], bool], say
) -> None:
    """The person is at the console's page, with a device beside it if asked."""
    from robo_rl.experiment.console import serve_session
    from robo_rl.human.console.options import ConsoleOptions
    from robo_rl.human.console.session import ConsoleSession

    shown = ConsoleOptions(
        run="", robots=1, port=options.port, host=options.host, speed=options.speed or 1.0, seed=options.seed
    )
    device = open_person(options.device, env.spec) if options.device else None
    session = ConsoleSession(env, StandStill(env.spec), recorder, shown, limit, device, alone=PAUSE)
    serve_session(session, shown, goes_on, say)
