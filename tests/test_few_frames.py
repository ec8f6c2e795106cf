"""Pictures of a few frames of each demonstration, and a trunk that learns first what instructions mean."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import robo_rl

from robo_rl.algos import grounding
from robo_rl.algos.grounding import ground, mean_actions
from robo_rl.data.drawn import GROUP, chosen_frames, draw_frames
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.demos import demo_sampler, record
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import obs_spec
from robo_rl.experiment.supervised_frames import load_frames
from robo_rl.options import BcOptions, DataOptions, PolicyOptions
from robo_rl.policies import make_policy, obs_tensors
from sims import make


def small(n, task="reach", **options):
    return make("mujoco", task, n, obs="rgb", image_size=32, **options)


def recorded(folder, episodes=5, pictures=True, **options):
    """A data set of the expert on `reach`, and its episodes as they were given to the writer."""
    env, given = small(4), []
    with Writer(folder, spec=env.spec) as w:
        record(
            env,
            episodes,
            0,
            lambda episode: (given.append(episode), w.add(episode)),
            pictures=pictures,
            **options,
        )
    env.close()
    return load(folder), given


def test_pictures_that_are_drawn_later_are_those_of_the_whole_recording_bit_for_bit(tmp_path):
    whole, given = recorded(tmp_path / "whole")
    data, bare = recorded(tmp_path / "bare", pictures=False)
    assert not data.views and not bare[0].images and set(whole.views) == {"front", "wrist"}
    assert np.array_equal(data.state, whole.state) and np.array_equal(data.action, whole.action)
    rows = chosen_frames(data, 4, seed=3)
    drawn = draw_frames(small(3), data, rows)
    for view in ("front", "wrist"):
        seen = np.concatenate([episode.images[view] for episode in given])
        assert np.array_equal(drawn[view], seen[rows]) and seen.std() > 0
    last = data.episode_index[rows] == len(data) - 1  # none of the episodes that are played before
    assert np.array_equal(draw_frames(small(2), data, rows[last])["front"], drawn["front"][last])


def test_the_first_frame_of_every_episode_is_chosen_and_of_the_others_one_in_so_many(tmp_path):
    data, _ = recorded(tmp_path / "data", episodes=GROUP + 8, pictures=False)
    rows = chosen_frames(data, 4, seed=0)
    assert set(data.from_) <= set(rows) and (np.diff(rows) > 0).all()
    later = np.setdiff1d(rows, data.from_)
    for e in range(len(data)):
        mine = later[data.episode_index[later] == e]
        assert (np.diff(mine) == 4).all() and mine[0] - data.from_[e] <= 4
    assert abs(len(later) / (len(data.action) - len(data)) - 0.25) < 0.1
    assert np.array_equal(chosen_frames(data, 1, seed=0), np.arange(len(data.action)))


def test_an_episode_that_does_not_play_again_as_it_was_recorded_is_refused(tmp_path):
    noisy, _ = recorded(tmp_path / "noisy", pictures=False, noise=0.3)
    with pytest.raises(UserError, match="played again, its episodes differ"):
        draw_frames(small(2), noisy, chosen_frames(noisy, 2, 0))


def test_cameras_that_are_asked_for_are_all_that_an_env_has_and_show_the_same():
    one, both, starts = small(2, cameras="wrist"), small(2), {"starts": np.arange(2)}
    seen, every = one.reset(options=starts)[0], both.reset(options=starts)[0]
    assert one.spec.views == ("wrist",) and "image/front" not in seen
    assert np.array_equal(seen["image/wrist"], every["image/wrist"]) and seen["image/wrist"].std() > 0
    for wrong, options in (("front,front", {}), ("top", {}), ("front", {"obs": "state"})):
        with pytest.raises(UserError, match=r"camera"):
            make("mujoco", "reach", 1, **({"obs": "rgb"} | options), cameras=wrong)
    with pytest.raises(UserError, match="only --sim mujoco"):
        make("gym:Pendulum-v1", cameras="front")


RUN = (
    "train",
    "--task",
    "pick_by_name",
    "--obs",
    "rgb",
    "--image-size",
    "32",
    "--policy",
    "pi05",
    "--cameras",
    "front",
    "--algo",
    "bc",
    "--demos",
    "6",
    "--data.every",
    "8",
    "--bc.batch",
    "4",
    "--bc.noises",
    "1",
    "--bc.updates",
    "2",
    "--eval-episodes",
    "2",
    "--envs",
    "2",
    "--eval-envs",
    "2",
    "--no-video",
)


def test_a_run_learns_from_few_frames_of_its_demonstrations_and_first_what_instructions_mean(tmp_path):
    done = robo_rl(tmp_path, *RUN, "--bc.ground", "3", "--out", "run")
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert done.code == 0, done.err
    assert [row["sft/ground"] for row in log if "sft/ground" in row] and any("sft/loss" in row for row in log)
    data = load(tmp_path / "run" / "demos")
    assert len(data) == 6 and not data.views
    without = robo_rl(tmp_path, *RUN, "--bc.ground", "0", "--out", "without")
    assert without.code == 0 and "sft/ground" not in (tmp_path / "without" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_fewer_pictures_are_drawn_where_they_would_not_fit_the_memory_that_is_allowed(tmp_path):
    done = robo_rl(tmp_path, *RUN, "--image-size", "128", "--data.cache-mb", "1", "--out", "run")
    assert done.code == 0 and "would not fit --data.cache-mb 1" in done.err
    refused = robo_rl(tmp_path, *RUN, "--image-size", "512", "--data.cache-mb", "1", "--out", "none")
    assert refused.code == 2 and "the first pictures of 6 demonstrations take 4 MiB" in refused.err


def test_stages_of_one_run_ask_for_the_same_pictures_and_draw_them_once(tmp_path):
    recorded(tmp_path / "data", 3, pictures=False)
    said = []
    report = SimpleNamespace(start=lambda *a: said.append(a), advance=lambda done: said.append(done))
    config = TrainConfig(task="reach", obs="rgb", image_size=32, data=DataOptions(every=4))
    run = SimpleNamespace(config=config, env=small(2), report=report, frames=None)
    first = load_frames(run, tmp_path / "data")
    assert load_frames(run, tmp_path / "data") is first and said == [("draw", 3, "episodes"), 3]
    run.config = replace(config, data=DataOptions(every=2))
    other = load_frames(run, tmp_path / "data")
    assert len(other.drawn["front"]) == len(other.rows) > len(first.rows)


def test_what_is_told_of_an_episode_is_the_mean_of_its_actions_among_those_of_all():
    action = torch.tensor([[0.0, 5.0], [2.0, 5.0], [-1.0, 5.0], [4.0, 5.0], [9.0, 5.2]])
    episode, every = torch.tensor([0, 0, 1, 1, 1]), torch.ones(5, dtype=torch.bool)
    told = mean_actions(action, episode, every)  # means 1 and 4, 5 and 5.2 / 3 + 10 / 3
    assert torch.equal(told[0], told[1]) and torch.equal(told[2], told[4])
    assert torch.allclose(told[0], -told[2]) and abs(float(told[2, 0]) - 2**0.5) < 1e-2
    assert torch.allclose(told[2, 1] / told[2, 0], torch.tensor(0.2 / 3 / 3), atol=1e-4)
    led = torch.tensor([[0.0, 5.0], [2.0, 5.0], [-7.0, 8.0], [3.0, 5.0], [5.0, 5.4 / 3 + 10 / 3]])
    mine = mean_actions(led, episode, torch.tensor([True, True, False, True, True]))  # not what led there
    assert torch.allclose(mine[2], mine[4]) and torch.allclose(mine[4, 0], told[4, 0], atol=1e-3)


def test_grounding_moves_the_trunk_alone_and_is_the_same_for_a_seed(tmp_path):
    env = small(4, "pick_by_name", cameras="front")
    with Writer(tmp_path / "data", spec=env.spec) as w:
        record(env, 6, 0, w.add)
    data, spec = load(tmp_path / "data"), obs_spec(env, True, 64)
    every = torch.ones(len(data.action), dtype=torch.bool)
    target = mean_actions(torch.from_numpy(data.action), torch.from_numpy(data.episode_index), every)[:, None]
    policies = [make_policy(PolicyOptions(kind="smolvla", horizon=4, execute=4), spec, 0) for _ in range(3)]
    for policy in policies[:2]:
        sample = demo_sampler(data, spec, 4, rows=data.from_, target=target)
        obs, told, mask = sample(5, torch.Generator().manual_seed(0))
        assert told.shape == (5, 1, spec.action) and mask.all() and len(obs["state"]) == 5
        ground(policy, sample, BcOptions(updates=3, batch=4), 0)
    parts = [dict(policy.named_parameters()) for policy in policies]
    for name, p in parts[0].items():
        assert torch.equal(p, parts[1][name])
        assert name.startswith("trunk.") or torch.equal(p, parts[2][name])
    assert any(not torch.equal(p, parts[2][name]) for name, p in parts[0].items())


def test_grounding_ends_as_it_was_best_on_episodes_that_are_held_out(monkeypatch):
    monkeypatch.setattr(grounding, "LOOK", 2)
    monkeypatch.setattr(grounding, "PATIENCE", 4)
    env = small(4, "pick_by_name", cameras="front")
    obs, spec = env.reset(seed=0)[0], obs_spec(env, True, 64)
    seen = obs_tensors(obs, spec)

    def sampler(target: float):
        def sample(size: int, generator: torch.Generator):
            rows = torch.randint(0, 4, (size,), generator=generator)
            told = torch.full((size, 1, spec.action), target)
            return {k: v[rows] for k, v in seen.items()}, told, torch.ones(size, 1)

        return sample

    def learnt(updates: int, untold: float = 1e9, held=None):
        monkeypatch.setattr(grounding, "UNTOLD", untold)
        policy, ticks = make_policy(PolicyOptions(kind="smolvla", horizon=4, execute=4), spec, 0), []
        options = BcOptions(updates=updates, batch=4)
        left = ground(policy, sampler(5.0), options, 0, lambda update, _: ticks.append(update), held)
        return policy.state_dict(), ticks[-1], left

    def same(a: dict, b: dict) -> bool:
        return all(torch.equal(v, b[k]) for k, v in a.items())

    alone, end, _ = learnt(6)
    better, end_of_better, least = learnt(6, held=sampler(5.0))
    assert end == end_of_better == 6 and same(alone, better)
    # what it learns makes these worse from the first look on, which is the best that they have
    worse, end, first = learnt(40, held=sampler(-5.0))
    assert end == 6 and not same(alone, worse) and 0 < first != least > 0
    assert learnt(12, untold=0.0, held=sampler(-5.0))[1] == 12  # it goes on while most is left
    monkeypatch.setattr(grounding, "BY_HEART", 1e9)
    assert learnt(40, held=sampler(-5.0))[1] == 1 == learnt(40)[1]  # nothing to learn from the others
