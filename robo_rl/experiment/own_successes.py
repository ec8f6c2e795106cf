"""`--bc.own`: before RL a policy learns from its own successes, which it had with exploration noise, beside
the demonstrations.

    until success on the starts that choose is enough, or no longer rises:
        play --bc.own episodes with exploration noise;  keep those that succeeded
        teach a fresh policy on the demonstrations and on all that was kept;
        with --bc.head its head alone, which learns on

Imitation of what was rewarded (reward-weighted regression: Peters and Schaal 2007, with the weight 0 or 1;
expert iteration: Anthony et al. 2017, arXiv 1705.08439; ReST: Gulcehre et al. 2023, arXiv 2308.08998). It
needs no likelihood and no critic, and a success under noise shows how to act in states around those of the
demonstrations. It cannot go beyond what noise finds, so RL follows.
"""

import copy
import functools
import shutil
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from robo_rl.algos.onpolicy import Demos
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.head_stage import teach_head
from robo_rl.experiment.new_policy import policy_of_demos
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.experiment.run import Run, Stopped
from robo_rl.experiment.sft import RISE, demo_folder, imitate
from robo_rl.experiment.supervised_frames import SupervisedFrames, load_frames
from robo_rl.lora import attach
from robo_rl.options import PolicyOptions
from robo_rl.policies.exploration import explores_by_level, level_of, with_level
from robo_rl.runtime.worker_pool import tried_again

# success from which RL alone gains as much from the same steps: a flow that imitates noise samples it too
WEAK = 0.6
SHARE = 0.25  # of --steps that rounds may take
# both, where the noise is no more than FAINT: little of it is imitated, and RL under it gains slowly
PRECISE, LARGER, FAINT = 0.9, 0.5, 0.25
ROUNDS = 4
LEAST = 8  # successes of a round that are worth learning from
MORE = 2  # factor on --bc.updates, for there are several times as many rows
SEED = 3000  # episodes begin where demonstrations of so much higher a seed would
FOLDER = "own"


def begins(config: TrainConfig, run: Run) -> bool:
    """Whether a run learns from its own successes first: asked for, with demonstrations of its own, and
    success in between."""
    return bool(
        config.bc.own
        and run.looks
        and run.looks[0].successes
        and run.looks[-1].worst < limits(run.policy.options)[0]
        and not (
            config.init
            or config.demos == "0"
            or config.dream
            or config.latency
            or config.sim.split(":")[0] in ROBOTS
        )
    )


def limits(options: PolicyOptions) -> tuple[float, float]:
    """(success from which a policy of these options, which explores as it does, leaves the rest to RL; share
    of --steps that its rounds may take)."""
    faint = explores_by_level(options) and round(level_of(options), 6) <= FAINT
    return (PRECISE, LARGER) if faint else (WEAK, SHARE)


def learn_from_successes(run: Run, state: dict[str, Any]) -> None:
    """Rounds of `run.policy` on its own successes, as steps of RL; each ends with a look and a checkpoint.
    `state`: {"own": [rounds made, whether they are over]} of the checkpoint that the run goes on from, {} at
    its beginning.

    The last policy is the best of the starts that choose. Raises `run.Stopped` when a signal comes; the run
    then goes on from the round before.
    """
    config = run.config
    made, over = state.get("own", (0, False))
    longest = config.bc.own * run.env.spec.max_steps  # control steps of a round
    enough, share = limits(run.policy.options)
    while made < ROUNDS and not over and run.step + longest <= share * config.steps:
        before, kept = run.looks[-1].worst, run.policy
        won, steps = tried_again(
            functools.partial(play_round, run, made),
            lambda words: run.report.say(
                f"the simulator failed, and the round begins anew: {words}", "warning"
            ),
        )
        if won < LEAST:
            run.report.say(
                f"{won} successes of its own among {config.bc.own} episodes: too few to learn from"
            )
            run.step, over = run.step + steps, True
        else:
            teach_round(run, made)
            run.step += steps
            run.policy.eval()
            after = run.look()
            made, over = made + 1, after >= enough or after < before + RISE
            run.report.say(
                f"learnt from {won} successes of its own among {config.bc.own} episodes ({steps:,} control "
                f"steps): success {before:.3f} -> {after:.3f}"
                + ("" if after >= before else ", so the policy of before goes on")
            )
            if after < before:
                run.policy = kept
                run.looks.pop()
                run.look()
        run.save({"own": [made, over]}, False)


def play_round(run: Run, k: int) -> tuple[int, int]:
    """Play --bc.own episodes of round k with exploration noise; the successes lie in RUN/own/round_k as a
    data set -> (successes, control steps). Raises `run.Stopped` when a signal comes."""
    from robo_rl.data.writer import Writer
    from robo_rl.recording import Recorder, play, policy_actor

    config, folder, steps = run.config, run.folder / FOLDER / f"round_{k}", 0
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped in it
    run.report.start("own", config.bc.own, "episodes")

    def tick(done: int) -> None:
        if run.stop.asked:
            raise Stopped
        run.report.advance(done)

    with (
        closing(make_env(config, min(config.envs, config.bc.own))) as env,
        Writer(folder, spec=env.spec) as writer,
    ):

        def add(episode) -> None:
            nonlocal steps
            steps += len(episode.action)
            if episode.success:
                writer.add(episode)

        won = play(
            Recorder(env, add),
            policy_actor(run.policy, config.seed + k),
            config.bc.own,
            config.seed + SEED + k,
            tick,
        )
    return won, steps


def teach_round(run: Run, k: int) -> None:
    """Teach a fresh policy on the demonstrations and the successes of rounds 0 to k, with the exploration
    noise of the one before. With --bc.head a copy of that one, of which the head learns on: to look at all
    pictures anew costs most."""
    from robo_rl.data.reader import load
    from robo_rl.demos import demo_sampler, load_demos
    from robo_rl.options import DataOptions

    config, folder, noisy = run.config, demo_folder(run), run.policy
    assert folder is not None  # `begins` has seen to it
    own = [load(run.folder / FOLDER / f"round_{i}") for i in range(k + 1)]
    if config.bc.head:
        run.policy, demos = copy.deepcopy(noisy), load_demos(folder, run.env, config.data.label)
        every = np.ones(len(demos.action), bool)
        run.updates += teach_head(run, SupervisedFrames(demos), every, run.updates, beside=own)
        return
    frames = load_frames(run, folder)
    demos = frames.data
    run.policy = policy_of_demos(run, demos, noisy.options.activation)
    spec = run.policy.spec
    parts = [
        (frames.sampler(config, spec), len(demos.action if frames.rows is None else frames.rows)),
        *((demo_sampler(data, spec, config.policy.horizon, DataOptions()), len(data.action)) for data in own),
    ]
    updates = max(run.taught, MORE * config.bc.updates)
    imitate(run, mixed(parts), updates, run.updates, reads=len(demos.tasks) > 1)
    run.updates += updates
    attach(run.policy, config.policy.lora, config.seed)
    if explores_by_level(noisy.options) and noisy.options != run.policy.options:  # --rl.explore chose a level
        run.policy = with_level(run.policy, level_of(noisy.options))


def mixed(parts: Sequence[tuple[Demos, int]]) -> Demos:
    """Sampler over several, each with its number of rows: every row alike."""
    ends = torch.tensor([n for _, n in parts]).cumsum(0)

    def sample(size: int, generator: torch.Generator):
        which = torch.searchsorted(
            ends, torch.randint(int(ends[-1]), (size,), generator=generator), right=True
        )
        drawn = [
            part(n, generator)
            for (part, _), n in zip(parts, which.bincount(minlength=len(parts)).tolist(), strict=True)
            if n
        ]
        obs = {k: torch.cat([batch[0][k] for batch in drawn]) for k in drawn[0][0]}
        return obs, torch.cat([batch[1] for batch in drawn]), torch.cat([batch[2] for batch in drawn])

    return sample
