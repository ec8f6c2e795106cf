"""What tests ask of a vision-language-action policy of any family."""

import copy
import importlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import robo_rl
from robo_rl.algos import bc
from robo_rl.algos.check import rollouts
from robo_rl.checkpoint import load_policy, save_checkpoint
from robo_rl.experiment.evaluation import EvalConfig, evaluate_checkpoint
from robo_rl.experiment.policy_server import load_actor
from robo_rl.options import BcOptions


def check_first_ratio(policy, obs, chunk) -> None:
    """Decisions of 20 rows, scored in minibatches of any size, are as likely as when they were taken."""
    for rows in (1, 2, 3, 5, 7, 20):
        some = torch.randperm(20, generator=torch.Generator().manual_seed(rows))[:rows]
        logp, _ = policy.score(
            policy.encode({k: v[some] for k, v in obs.items()}), {k: v[some] for k, v in chunk.trace.items()}
        )
        assert torch.equal(logp, chunk.logp[some]), rows


def check_supervision(policy, obs, chunk, updates: int) -> None:
    """Supervised learning of chunks brings the loss down."""
    mask = torch.ones(chunk.shape[:2])

    def loss() -> float:
        return float(policy.bc_loss(obs, chunk, mask, torch.Generator().manual_seed(0), 4).detach())

    before, options = loss(), BcOptions(updates=updates, batch=8, noises=2, lr=2e-3, ema=0.5)
    bc.train(policy, bc.demos_sampler(obs, chunk, mask), options, 0)
    assert loss() < 0.7 * before


def moved_by_ppo(policy, options) -> set[str]:
    """The parts of a policy that an update of PPO changes."""
    (rollout,) = rollouts(policy, options, 1)
    learner = importlib.import_module("robo_rl.algos.ppo").make(copy.deepcopy(policy), options, 0)
    assert learner.update(rollout, 0.0, 0)["first_log_ratio"] == 0.0
    was = policy.state_dict()
    return {k.split(".")[0] for k, v in learner.policy.state_dict().items() if not torch.equal(v, was[k])}


def check_copied(policy, obs, place: Path):
    """A checkpoint that was moved to `place`/b acts as `policy` does -> its policy."""
    save_checkpoint(place / "a", policy, {}, {"step": 0})
    shutil.move(place / "a", place / "b")
    again, _ = load_policy(place / "b")
    for explore in (True, False):
        a, b = (p.act(obs, torch.Generator().manual_seed(0), explore) for p in (policy, again))
        assert torch.equal(a.actions, b.actions) and torch.equal(a.logp, b.logp)
    return again


def train_whole_and_in_parts(config, place: Path) -> None:
    """The run in `place`/whole, and one that is stopped at a checkpoint and resumed, in `place`/parts."""

    def stop(event):
        if event.kind == "checkpoint" and event.step:
            raise KeyError("enough")

    robo_rl.train(config, quiet=True)
    with pytest.raises(KeyError, match="enough"):
        robo_rl.train(replace(config, out=str(place / "parts")), stop, quiet=True)
    robo_rl.resume(place / "parts", quiet=True)


def check_parts(config, place: Path) -> None:
    """Both runs end with the same weights; where one is moved to, it is evaluated and served."""
    whole, parts = (sorted((place / name / "checkpoints").iterdir())[-1] for name in ("whole", "parts"))
    assert whole.name == parts.name != "step_000000000000"
    assert (whole / "policy.safetensors").read_bytes() == (parts / "policy.safetensors").read_bytes()
    shutil.move(place / "parts", place / "moved")
    assert evaluate_checkpoint(place / "moved", EvalConfig(episodes=2))["n"] == 2
    act, _, spec = load_actor(str(place / "moved"), "last", 0, "pick up the red cube")
    rows = act(
        {"state": np.zeros(spec.state, np.float32)}
        | {f"image/{v}": np.zeros((32, 32, 3), np.uint8) for v in spec.views}
    )
    assert rows.shape == (config.policy.horizon, spec.action) and np.isfinite(rows).all()
