"""Methods that learn from replay on an accelerator, tested without one: see tests/away.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from away import Away, AwayTensor, bring
from test_offpolicy import METHODS, SPEC
from test_offpolicy import SMALL as SIZES
from test_vla_replay import build as build_vla
from test_vla_replay import filled, raw
from test_vla_replay import learner as vla_learner
from torch import Tensor
from torch.utils._pytree import tree_map
from toys import PointReach

from robo_rl.experiment.methods import find_method
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.replay import Replay
from robo_rl.replay_collector import ReplayCollector, marked_episodes, replay_observation, replay_rows
from robo_rl.runtime.actor import acting_on, renew

SMALL: dict[str, Any] = {**SIZES}
SEEN = ObsSpec(state=4, action=2, views=("front",), image_size=32, language=True)


def values(policy) -> dict[str, Tensor]:
    return {k: bring(v.detach()).clone() for k, v in policy.state_dict().items()}


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta")  # they are values all the same
@pytest.mark.parametrize("algo", METHODS)
def test_a_run_of_a_method_from_replay_on_a_device_is_that_of_the_cpu_bit_for_bit(algo):
    """Collecting, learning, the switch to online, and going on from a checkpoint."""
    policy_options, o = METHODS[algo]

    def learnt(device):
        policy = make_policy(PolicyOptions(**SMALL | policy_options), SPEC, 0).to(device)
        learner = find_method(algo)(policy, replace(o, batch=16), 0)
        store, rng = Replay(replay_rows(policy), 2, 2, 0.9, 400, 4), np.random.default_rng(0)
        collector, told = ReplayCollector(PointReach(4, 8), policy, store, None, 0), []
        for turn in range(3):
            collector.run(policy, 8)
            told.append(learner.update(lambda n: store.sample(n, rng), 2))
            if turn == 0:
                learner.begin_online()
            if turn == 1:  # as a checkpoint is read: on the CPU
                learner.load_state_dict(
                    tree_map(lambda x: bring(x) if isinstance(x, Tensor) else x, learner.state_dict())
                )
        return values(policy), store.action.copy(), told

    here, action, told = learnt(torch.device("cpu"))
    with Away() as device:
        there, away_action, away_told = learnt(device)
        assert Away.products
    assert all(torch.equal(here[k], v) for k, v in there.items())
    assert np.array_equal(action, away_action) and told == away_told
    fresh = make_policy(PolicyOptions(**SMALL | policy_options), SPEC, 0).state_dict()
    assert any(not torch.equal(fresh[k], v) for k, v in there.items())


@pytest.mark.parametrize("options", [{"kind": "squashed"}, {"kind": "guided", "candidates": 3}])
def test_what_replay_keeps_of_pictures_comes_from_the_device_that_encodes_them(options):
    policy = make_policy(PolicyOptions(**SMALL | {"width": 32} | options), SEEN, 0)
    seen = {
        "state": np.ones((3, 4), np.float32),
        "task": np.array(["red", "green", "red"]),
        "image/front": np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), np.uint8),
    }
    want = replay_observation(policy, seen)
    with Away() as device:
        got = replay_observation(policy.to(device), seen)
    assert want.keys() == got.keys()
    for k, v in want.items():
        assert isinstance(got[k], np.ndarray) and got[k].dtype == v.dtype
        np.testing.assert_allclose(got[k], v, atol=1e-4)  # another attention kernel


@pytest.mark.parametrize(
    ("algo", "kind", "options"),
    [
        ("hil_serl", "pi05", {"keep_prefix": True, "dtype": "bf16"}),
        ("pa_rl", "pi0", {}),
        ("dsrl", "smolvla", {}),
        ("demo_flow", "smolvla", {}),
    ],
)
def test_what_acts_on_the_trunk_of_a_vision_language_action_model_learns_on_a_device(algo, kind, options):
    policy = build_vla(kind, algo, **options)
    with Away() as device:
        policy.to(device)
        store, rng = filled(policy), np.random.default_rng(0)
        before, learner = values(policy), vla_learner(policy, algo)
        learner.begin_online()
        told = learner.update(lambda n: store.sample(n, rng), 2)
        chunk = policy.act(
            {k: torch.from_numpy(v).to(device) for k, v in replay_observation(policy, raw(2)).items()},
            torch.Generator().manual_seed(0),
            True,
        )
        assert isinstance(chunk.actions, AwayTensor)
    after = values(policy)
    assert np.isfinite(list(told.values())).all()
    moved = {k.split(".")[0] for k, v in before.items() if not torch.equal(v, after[k])}
    assert moved and not moved & {"trunk", "processor"}


def test_episodes_are_marked_by_a_policy_on_a_device():
    policy = make_policy(PolicyOptions(kind="squashed", **SMALL), SPEC, 0)
    want = marked_episodes(PointReach(3, 8), policy, 4, 0)
    with Away() as device:
        got = marked_episodes(PointReach(3, 8), policy.to(device), 4, 0)
    assert np.array_equal(want.state, got.state) and np.array_equal(want.success, got.success)


def test_an_actor_of_its_own_acts_on_the_device_with_the_newest_weights():
    read = make_policy(PolicyOptions(kind="squashed", **SMALL), SPEC, 0)
    assert acting_on("cpu", read) is read
    renew(read, read)
    with Away() as device:
        policy = acting_on(str(device), read)
        read.load_state_dict(make_policy(PolicyOptions(kind="squashed", **SMALL), SPEC, 1).state_dict())
        assert not all(torch.equal(v, read.state_dict()[k]) for k, v in values(policy).items())
        renew(policy, read)
        assert all(torch.equal(v, read.state_dict()[k]) for k, v in values(policy).items())
        assert all(isinstance(p.data, AwayTensor) for p in policy.parameters())
