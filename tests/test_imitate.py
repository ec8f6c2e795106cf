"""Which episodes of a data set supervision imitates: those that succeeded (--data.imitate)."""

from dataclasses import replace

import numpy as np
import pytest
from commands import robo_rl

from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.demos import record
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.new_policy import FEW, HOLD, held_out
from robo_rl.experiment.offline import split
from robo_rl.experiment.supervised_frames import (
    SupervisedFrames,
    demonstrated,
    load_frames,
    say_imitated,
    worth_imitating,
)
from robo_rl.options import DataOptions, PolicyOptions
from robo_rl.replay import EXPERT, POLICY
from sims import make

LOST = (1, 2, 5)  # episodes of the data set that are said to have failed


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Eight episodes of the expert on `reach`; those in `LOST` are marked as failures, and act at random."""
    folder, env, rng = (
        tmp_path_factory.mktemp("mixed") / "data",
        make("mujoco", "reach", 4),
        np.random.default_rng(0),
    )
    with Writer(folder, spec=env.spec) as w:

        def keep(episode):
            if len(w) in LOST:
                wild = rng.uniform(-1, 1, episode.action.shape).astype(np.float32)
                none = np.zeros_like(episode.reward)
                episode = replace(episode, action=wild, reward=none, success=False, terminated=False)
            w.add(episode)

        record(env, 8, 0, keep)
    env.close()
    return folder


def test_those_that_succeeded_are_worth_it_and_all_where_nobody_says_which_did(mixed):
    data, config = load(mixed), TrainConfig(demos=str(mixed))
    want = ~np.isin(np.arange(8), LOST)
    assert np.array_equal(data.success, want) and np.array_equal(worth_imitating(config, data), want)
    assert np.array_equal(demonstrated(config, data), want[data.episode_index])
    every = replace(config, data=DataOptions(imitate="all"))
    told = replace(config, policy=PolicyOptions(advantage=True))
    for c, d in (
        (every, data),
        (told, data),
        (config, replace(data, is_judged=False)),
        (config, replace(data, success=np.zeros(8, bool))),
    ):
        assert worth_imitating(c, d).all()
    said = []
    say_imitated(every, data, said.append)
    assert not said
    say_imitated(config, data, said.append)
    assert said == ["supervision leaves out 3 of 8 episodes, which failed (--data.imitate all: none)"]


def test_a_task_of_which_no_episode_succeeded_is_imitated_all_the_same(mixed):
    data = load(mixed)
    two = replace(data, task_index=(data.episode_index >= 5).astype(np.int64))
    two = replace(two, meta=replace(data.meta, tasks=["reach", "press"]), success=np.arange(8) < 2)
    worth = worth_imitating(TrainConfig(demos=str(mixed)), two)
    assert worth.tolist() == [True, True, False, False, False, True, True, True]


def test_frames_and_held_out_episodes_are_of_those_that_succeeded(mixed):
    class Run:
        config, env = TrainConfig(demos=str(mixed)), make("mujoco", "reach", 1)

    frames = load_frames(Run, mixed)
    assert frames.episodes.tolist() == [0, 3, 4, 6, 7]
    assert frames.rows is not None and np.isin(frames.data.episode_index[frames.rows], frames.episodes).all()
    everything = SupervisedFrames(frames.data)
    assert not held_out(frames).any() and everything.episodes.tolist() == list(range(8))
    rows, held = split(replace(Run.config, data=DataOptions(held_out=0.3)), frames.data)
    episodes = [set(frames.data.episode_index[x].tolist()) for x in (rows, held)]
    assert episodes[0] | episodes[1] == {0, 3, 4, 6, 7} and not episodes[0] & episodes[1] and episodes[1]
    Run.env.close()


def test_every_tenth_of_those_that_are_learnt_from_is_held_out(mixed):
    data = load(mixed)
    lengths = np.full(40, 3)
    ends = lengths.cumsum()
    many = replace(data, success=np.arange(40) % 4 > 0, from_=ends - 3, to=ends)
    rows = np.flatnonzero(many.success[many.episode_index])
    frames = SupervisedFrames(many, rows)
    out = np.unique(many.episode_index[held_out(frames)])
    assert len(frames.episodes) == 30 >= FEW and out.tolist() == frames.episodes[HOLD - 1 :: HOLD].tolist()
    assert many.success[out].all()
    assert np.unique(many.episode_index[held_out(SupervisedFrames(many))]).tolist() == [9, 19, 29, 39]


def test_a_run_leaves_failures_out_and_says_so_with_a_simulator_and_without(mixed, tmp_path):
    small = ("--bc.updates", 3, "--bc.batch", 8, "--policy.hidden", 16, "--no-video", "--workers", 0)
    line = "supervision leaves out 3 of 8 episodes, which failed"
    for where in (("--task", "reach", "--eval-episodes", 2, "--eval-envs", 2), ("--sim", "none")):
        made = ("train", *where, "--algo", "bc", "--demos", mixed, *small)
        told, silent = (
            robo_rl(tmp_path, *made, "--data.imitate", how, "--out", f"{where[1]}-{how}")
            for how in ("success", "all")
        )
        assert told.code == silent.code == 0, (told, silent)
        assert line in told.out + told.err and line not in silent.out + silent.err


def test_replay_keeps_failures_as_a_policys_so_that_critics_learn_from_them_and_nothing_imitates_them(
    mixed, tmp_path, monkeypatch
):
    import robo_rl as package
    from robo_rl.experiment.replay import ReplayStage

    seen = []
    stores = ReplayStage.stores

    def watched(self, state):
        stores(self, state)
        seen.append(np.unique(self.demos.source[: len(load(mixed).action)], return_counts=True))

    monkeypatch.setattr(ReplayStage, "stores", watched)
    for how in ("success", "all"):
        config = package.recipe(
            task="reach",
            algo="demo_sac",
            preset="quick",
            demos=str(mixed),
            workers=0,
            envs=2,
            steps=64,
            eval_episodes=2,
            eval_envs=2,
            video=False,
            bc={"updates": 2},
            data={"imitate": how},
            rl={"warmup": 32, "pretrain": 2, "batch": 8},
            out=str(tmp_path / how),
        )
        package.train(config, quiet=True)
    (kinds, counts), (every, _) = seen
    data = load(mixed)
    lost = int(np.isin(data.episode_index, LOST).sum())
    assert every.tolist() == [EXPERT] and sorted(kinds.tolist()) == sorted([POLICY, EXPERT])
    assert dict(zip(kinds.tolist(), counts.tolist(), strict=True))[POLICY] == lost + len(
        LOST
    )  # each has a row for its end
