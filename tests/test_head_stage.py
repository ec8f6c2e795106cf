"""The action head that learns on, on what a trunk that stays as it is makes of pictures."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import robo_rl
from test_few_frames import recorded, small

from robo_rl import checkpoint
from robo_rl.algos import bc
from robo_rl.data.drawn import draw_frames
from robo_rl.data.reader import load
from robo_rl.experiment.config import TrainConfig, load_config
from robo_rl.experiment.envs import obs_spec
from robo_rl.experiment.head_stage import encoded, teach_head, teach_head_if_better
from robo_rl.experiment.new_policy import fresh_policy
from robo_rl.experiment.own_successes import teach_round
from robo_rl.experiment.run import Stopped
from robo_rl.experiment.supervised_frames import SupervisedFrames, chosen
from robo_rl.options import BcOptions, DataOptions, PolicyOptions
from robo_rl.policies import obs_tensors
from robo_rl.selection import Look


class Report:
    """What a run reports, kept."""

    def __init__(self):
        self.stages, self.rows = [], []

    def start(self, stage, total, unit):
        self.stages.append((stage, total, unit))

    def advance(self, done, note=None):
        self.done = done

    def log(self, step, metrics, stage):
        self.rows.append((step, metrics["sft/loss"]))


def run_of(data, **bc_options):
    config = TrainConfig(
        task="reach",
        obs="rgb",
        image_size=32,
        envs=4,
        policy=PolicyOptions(predict="action", keypoints="white", width=32, hidden=64),
        bc=BcOptions(**{"updates": 4, "batch": 8, "head": 120, "head_every": 2, "noises": 64} | bc_options),
        data=DataOptions(every=4),
    )
    policy = fresh_policy(config, obs_spec(small(1), False), data)
    return SimpleNamespace(
        config=config,
        policy=policy,
        report=Report(),
        stop=SimpleNamespace(asked=False),
        updates=0,
        pooled=None,
    )


def everything(data):
    return np.ones(len(data.action), bool)


def test_the_trunk_stays_the_head_learns_and_a_seed_gives_the_same(tmp_path):
    whole, _ = recorded(tmp_path / "whole")
    bare, _ = recorded(tmp_path / "bare", pictures=False)
    begun, ended = run_of(whole).policy.state_dict(), []
    for data in (whole, bare, bare):
        run = run_of(data)
        assert teach_head(run, SupervisedFrames(data), everything(data), 4) == 120
        stages = [stage for stage, *_ in run.report.stages]
        assert stages == ["look", "head"] and [step for step, _ in run.report.rows] == [104, 124]
        ended.append(run.policy.state_dict())
    for name, value in ended[1].items():
        assert torch.equal(value, ended[2][name]), name
        for learnt in ended:  # of videos, and of pictures as they were
            assert torch.equal(learnt[name], begun[name]) == (not name.startswith("head.")), name


def test_what_the_head_learns_on_is_what_the_policy_sees_and_its_loss_falls(tmp_path):
    data, _ = recorded(tmp_path / "data", pictures=False)
    run = run_of(data)
    rows = np.arange(0, len(data.action), 3)
    front, wrist = (
        np.concatenate([e.images[v] for e in recorded(tmp_path / "w")[1]]) for v in ("front", "wrist")
    )
    obs = {"state": data.state[rows], "task": [data.tasks[0]] * len(rows)}
    obs |= {"image/front": front[rows], "image/wrist": wrist[rows]}
    with torch.no_grad():
        expected = run.policy.encode(obs_tensors(obs, run.policy.spec)).pooled
    assert torch.allclose(encoded(run, data, rows), expected, atol=1e-5)

    def loss():
        seen = obs_tensors(obs, run.policy.spec)
        chunk = torch.from_numpy(data.action[rows])[:, None].repeat(1, run.policy.options.horizon, 1)
        sample = bc.demos_sampler(seen, chunk, torch.ones(chunk.shape[:2]))
        return bc.mean_loss(run.policy, sample, run.config.bc, 0, 4)

    before = loss()
    teach_head(run, SupervisedFrames(data), everything(data), 0)
    assert loss() < 0.7 * before


@pytest.mark.slow
def test_frames_that_are_left_out_teach_nothing_and_weights_count(tmp_path):
    data, _ = recorded(tmp_path / "data", pictures=False)
    first = data.episode_index == 0
    alone, spoiled, weighed = run_of(data), run_of(data), run_of(data)
    teach_head(alone, SupervisedFrames(data), first, 0)
    data.action[~first & np.roll(~first, 8)] = 1.0  # not in the chunks of those that are learnt from
    teach_head(spoiled, SupervisedFrames(data), first, 0)
    teach_head(weighed, SupervisedFrames(data), first, 0, lambda rows: (rows % 2).float())
    for (name, a), b, c in zip(
        alone.policy.state_dict().items(),
        spoiled.policy.state_dict().values(),
        weighed.policy.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (not name.startswith("head.")) or "base" in name, name


@pytest.mark.slow
def test_every_frame_of_data_sets_beside_the_demonstrations_counts_as_much_as_theirs(tmp_path):
    data, _ = recorded(tmp_path / "data", 6, pictures=False)
    beside, _ = recorded(tmp_path / "beside", 3)
    spoiled, _ = recorded(tmp_path / "spoiled", 3)
    spoiled.action[:] = 1.0
    alone, more, told = run_of(data), run_of(data), run_of(data)
    teach_head(alone, SupervisedFrames(data), everything(data), 0)
    assert teach_head(more, SupervisedFrames(data), everything(data), 0, beside=[beside]) == 120
    assert [n for stage, n, _ in more.report.stages if stage == "look"] == [
        len(chosen(more.config, data, 2)),
        len(beside.action),
    ]
    teach_head(told, SupervisedFrames(data), everything(data), 0, beside=[beside, spoiled])
    rows = np.arange(len(data.action))
    raw = {"state": data.state, "task": [data.tasks[0]] * len(rows)}
    pictures = draw_frames(small(2), data, rows)
    raw |= {f"image/{view}": x for view, x in pictures.items()}

    def mean_action(run) -> float:
        seen = obs_tensors(raw, run.policy.spec)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return run.policy.act(seen, generator, explore=False).actions.mean().item()

    assert mean_action(told) > mean_action(more) + 0.1  # what was spoiled is learnt too
    for (name, a), b, c in zip(
        alone.policy.state_dict().items(),
        more.policy.state_dict().values(),
        told.policy.state_dict().values(),
        strict=True,
    ):
        if not name.startswith("head."):
            assert torch.equal(a, b) and torch.equal(a, c), name


def test_a_stop_is_heeded_while_pictures_are_looked_at_and_while_the_head_learns(tmp_path):
    data, _ = recorded(tmp_path / "data", pictures=False)
    run = run_of(data)
    run.stop.asked = True
    with pytest.raises(Stopped):
        encoded(run, data, np.arange(4))
    run.stop.asked = False
    run.report.log = lambda *a, **k: setattr(run.stop, "asked", True)
    with pytest.raises(Stopped):
        teach_head(run, SupervisedFrames(data), everything(data), 0)
    assert run.report.done == 100  # the update after it


RUN = ("train", "--algo", "bc", "--bc.updates", "2", "--bc.batch", "4", "--bc.head", "3", "--no-video")
REACH = ("--task", "reach", "--demos", "4", "--envs", "2", "--eval-envs", "2", "--eval-episodes", "2")
RGB = ("--obs", "rgb", "--image-size", "32")


def losses(folder) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "sft/loss" in row or "heldout/error" in row]


def test_a_run_says_what_it_does_and_without_pictures_it_is_refused(tmp_path):
    done = robo_rl(tmp_path, *RUN, *REACH, *RGB, "--data.every", "8", "--bc.head-every", "2", "--out", "run")
    assert done.code == 0, done.err
    assert "[look]" in done.err and "[head]" in done.err
    assert [row["step"] for row in losses(tmp_path / "run")] == [2, 5]
    refused = robo_rl(tmp_path, *RUN, *REACH)
    assert refused.code == 2 and "--bc.head teaches the action head on what the trunk makes of" in refused.err
    refused = robo_rl(tmp_path, *RUN, *REACH, *RGB, "--policy", "pi05")
    assert refused.code == 2 and "that of pi05 gives keys and values of every layer" in refused.err


def test_a_data_set_of_any_robot_teaches_the_head_too(tmp_path):
    recorded(tmp_path / "data", 4)
    done = robo_rl(tmp_path, *RUN, *RGB[2:], "--sim", "none", "--demos", "data", "--out", "run")
    assert done.code == 0, done.err
    rows = losses(tmp_path / "run")
    assert rows[-1]["step"] == 5 == max(row["step"] for row in rows if "sft/loss" in row)
    assert "heldout/error" in rows[-1]


def test_more_demonstrations_that_are_asked_for_are_played_again_and_the_head_learns_from_the_experts_part(
    tmp_path,
):
    more = ("--data.every", "8", "--bc.head-every", "2", "--demos-most", "7", "--out", "run")
    done = robo_rl(tmp_path, *RUN, *REACH, *RGB, *more)
    assert done.code == 0, done.err
    assert "2 more asked of the expert, from states that the policy comes to, and 3 updates of" in done.err
    assert [row["step"] for row in losses(tmp_path / "run")] == [2, 5, 8, 11]  # 4, 6 and 7 demonstrations
    data = load(tmp_path / "run" / "demos")
    led = data.source == data.sources.index("policy")
    assert len(data) == 7 and (data.start >= 0).all() and not led[: data.to[3]].any() and led.any()
    for e in range(4, 7):
        mine = led[data.from_[e] : data.to[e]]
        assert (np.diff(mine.astype(int)) <= 0).all() and not mine[-1]  # the policy, then the expert
    rows = chosen(load_config(tmp_path / "run"), data, 2)
    assert not led[rows].any() and (data.episode_index[rows] >= 4).any()
    pictures = draw_frames(small(3), data, rows)  # as they were: an episode that differs is refused
    assert len(pictures["front"]) == len(rows)


def test_a_policy_that_is_taught_anew_knows_the_scales_of_the_experts_part_alone(tmp_path):
    more = ("--bc.head", "0", "--data.every", "8", "--demos-most", "7", "--out", "run")
    done = robo_rl(tmp_path, *RUN, *REACH, *RGB, *more)
    assert done.code == 0, done.err
    data, config = load(tmp_path / "run" / "demos"), load_config(tmp_path / "run")
    mine = data.source != data.sources.index("policy")
    taught = checkpoint.load_policy(checkpoint.checkpoints(tmp_path / "run")[-1])[0]
    for rows, same in ((np.flatnonzero(mine), True), (None, False)):
        fresh = fresh_policy(config, taught.spec, data, rows)
        for norm in ("obs_norm", "action_norm"):
            a, b = (getattr(p, norm).state_dict() for p in (taught, fresh))
            assert all(torch.equal(a[k], b[k]) for k in a) == same, norm


def test_the_head_learns_on_from_the_policys_own_successes_and_the_policy_of_before_is_kept(tmp_path):
    data, _ = recorded(tmp_path / "data")
    recorded(tmp_path / "run" / "own" / "round_0", 3)
    run = run_of(data)
    run.config = replace(run.config, demos=str(tmp_path / "data"))
    run.folder, run.env = tmp_path / "run", small(1)
    kept, before = run.policy, {k: v.clone() for k, v in run.policy.state_dict().items()}
    teach_round(run, 0)
    assert run.updates == 120 and run.policy is not kept
    looked = [n for stage, n, _ in run.report.stages if stage == "look"]
    own = load(tmp_path / "run" / "own" / "round_0")
    assert looked == [len(chosen(run.config, data, 2)), len(own.action)]
    for name, value in run.policy.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("head.")), name
        assert torch.equal(kept.state_dict()[name], before[name]), name
    run.policy = kept  # it was better: another round
    teach_round(run, 0)
    looked = [n for stage, n, _ in run.report.stages if stage == "look"]
    assert looked[2:] == [len(own.action)]  # demonstrations are looked at once


def test_where_nobody_is_asked_for_more_the_policy_of_before_goes_on_if_the_head_made_it_worse(tmp_path):
    data, _ = recorded(tmp_path / "data")
    for rates, said in (
        ((0.5, 0.4), ", so the policy of before goes on"),
        ((0.4, 0.4), ""),
        ((0.3, 0.4), ""),
    ):
        run, told, rest = run_of(data), [], iter(rates)
        run.looks, run.report.say = [], told.append

        def look(run=run, rest=rest):
            run.looks.append(Look(0, round(100 * next(rest)), 100, 0.0))

        run.look, kept = look, copy.deepcopy(run.policy.state_dict())
        assert teach_head_if_better(run, SupervisedFrames(data), everything(data), 0) == 120
        assert told == [f"the head learnt on: success {rates[0]:.3f} -> {rates[1]:.3f}{said}"]
        same = [torch.equal(v, kept[k]) for k, v in run.policy.state_dict().items() if k.startswith("head.")]
        assert all(same) if said else not any(same)
        assert [x.rate for x in run.looks] == ([] if said else [0.4])  # none of one that was given up


def test_a_run_of_recorded_demonstrations_looks_before_and_after_its_head_learns_on(tmp_path):
    recorded(tmp_path / "data", 4)
    run = ("train", "--algo", "bc", "--bc.updates", "2", "--bc.batch", "4", "--bc.head", "3", "--no-video")
    size = ("--envs", "2", "--eval-envs", "2", "--eval-episodes", "2", "--task", "reach")
    done = robo_rl(tmp_path, *run, *size, *RGB, "--demos", "data", "--out", "run")
    assert done.code == 0, done.err
    assert done.err.count("starts of list 0, which choose") >= 2
    assert "the head learnt on: success 0.000 -> 0.000" in done.err
