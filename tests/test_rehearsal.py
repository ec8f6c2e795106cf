"""What the first policy did well is rehearsed: its own successes, with their log-probs, from a file that a
resumed run reads again."""

import json
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import TINY, kill_after_a_checkpoint, last_weights, robo_rl
from test_algos import METHODS
from test_corrections import collector_of, make
from toys import PointReach

from robo_rl.algos.rehearsal import Rehearsal, kept_rows
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.rehearsal import FILE, check, play
from robo_rl.experiment.run import Stopped
from robo_rl.losses import rehearsal
from robo_rl.options import NftOptions, PpoOptions
from robo_rl.rollout import Collector

KINDS = ("forward_kl", "js", "alpha")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def episodes(learner, n=16):
    return Collector(PointReach(n, limit=12, radius=0.6), learner.policy, 0.95, 0).episodes(
        learner.policy, np.arange(n)
    )


def test_the_rows_are_the_decisions_of_the_first_successes_as_they_were_made():
    r = episodes(make("ppo"))
    assert r.success.any() and not r.success.all()
    rows = kept_rows(r, 10)
    want = [(t, i) for t in range(len(r.mask)) for i in range(10) if r.success[i] and r.mask[t, i]]
    assert torch.equal(rows["logp"], torch.stack([r.logp[t, i] for t, i in want]))
    assert torch.equal(rows["obs/state"], torch.stack([r.obs["state"][t, i] for t, i in want]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [m for m in METHODS if not m.startswith("nft")])
def test_a_policy_that_has_not_moved_has_nothing_to_pay_and_one_that_has_is_drawn_back(name, kind):
    learner = make(name)
    r = episodes(learner)
    r.success[:] = True
    samples = Rehearsal(kept_rows(r, 16), kind)
    first = samples.loss(learner.policy, 64, torch.Generator().manual_seed(0))
    assert first.abs() < 1e-4
    with torch.no_grad():
        for p in learner.actor_params:
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    moved = samples.loss(learner.policy, 64, torch.Generator().manual_seed(0))
    assert moved > first or kind == "forward_kl"  # a mean over few samples may be below 0
    moved.backward()
    with torch.no_grad():
        for p in learner.actor_params:
            if p.grad is not None:
                p.sub_(1e-6 * p.grad)
    assert samples.loss(learner.policy, 64, torch.Generator().manual_seed(0)) < moved


def test_the_divergence_is_of_densities_also_where_the_log_prob_is_a_mean_over_entries():
    learner = make("ppo")
    r = episodes(learner)
    r.success[:] = True
    rows = kept_rows(r, 16)
    whole = Rehearsal(rows, "js")
    entries = learner.policy.options.execute * 2
    mean = Rehearsal(rows | {"logp": rows["logp"] / entries}, "js")
    with torch.no_grad():
        learner.actor_params[0].mul_(1.1)
    want = whole.loss(learner.policy, 64, torch.Generator().manual_seed(0))
    learner.policy.options = replace(learner.policy.options, logp_reduction="mean")
    got = mean.loss(learner.policy, 64, torch.Generator().manual_seed(0))
    assert want > 1e-3 and torch.allclose(got, want, rtol=1e-3)


def test_forward_kl_pulls_however_far_the_policy_is():
    logp = torch.tensor([-90.0], requires_grad=True)
    rehearsal(logp, torch.zeros(1)).backward()
    assert logp.grad == -1


def test_an_update_adds_the_weighted_divergence_and_without_successes_nothing():
    learner, other = make("ppo", rehearse=0.5), make("ppo")
    samples = Rehearsal(kept_rows(episodes(make("ppo", seed=4)), 16), "forward_kl")
    empty = Rehearsal({k: v[:0] for k, v in kept_rows(episodes(other), 16).items()}, "forward_kl")
    collector = collector_of(learner)
    r = collector.collect(learner.policy, 4)
    context = other.policy.encode({"state": r.obs["state"].flatten(0, 1)})
    row = {"x_next": r.trace["x_next"].flatten(0, 1), "logp_old": r.logp.flatten(0, 1), "adv": torch.ones(64)}
    plain = other.actor_loss(context, row, other.rules(0.5))[0]
    learner.rehearsal = empty
    assert torch.equal(learner.actor_loss(context, row, learner.rules(0.5))[0], plain)
    learner.rehearsal = samples
    loss, told, _ = learner.actor_loss(context, row, learner.rules(0.5))
    assert torch.allclose(loss, plain + 0.5 * told["rehearsal"]) and told["rehearsal"] != 0


@pytest.mark.parametrize(
    ("options", "run", "words"),
    [({}, {"algo": "toys:make"}, "got --algo toys:make"), ({}, {"learners": 2}, "without --learners")],
    ids=str,
)
def test_a_run_that_cannot_rehearse_is_told_why(options, run, words):
    rl = PpoOptions(rehearse=0.1, **options)
    config = replace(
        TrainConfig(task="reach", algo="ppo", rl=rl, **{k: v for k, v in run.items() if k != "algo"})
    )
    if "algo" in run:
        object.__setattr__(config, "algo", run["algo"])
    with pytest.raises(UserError, match=words):
        check(config, PointReach(1))
    for bad in ({"rehearse": -1.0}, {"rehearse_kind": "kl"}, {"rehearse_episodes": 0}):
        with pytest.raises(UserError, match=next(iter(bad))):
            PpoOptions(**bad)
    with pytest.raises(UserError, match="likelihood"):
        NftOptions(rehearse=0.1)


def test_a_signal_ends_the_episodes_that_would_be_rehearsed_and_no_step_is_counted(tmp_path):
    """The run goes on from the supervised policy's checkpoint, where none of them were played."""
    told = []
    run = SimpleNamespace(
        env=PointReach(4, limit=12, radius=0.6),
        policy=make("ppo").policy,
        config=SimpleNamespace(seed=0),
        step=0,
        stop=SimpleNamespace(asked=0),
        report=SimpleNamespace(say=lambda *words: told.append(words)),
    )
    play(run, PpoOptions(rehearse=0.1, rehearse_episodes=8))
    assert run.step > 0 and len(told) == 1
    run.step, run.stop.asked = 0, signal.SIGINT
    with pytest.raises(Stopped):
        play(run, PpoOptions(rehearse=0.1, rehearse_episodes=8))
    assert run.step == 0


@pytest.mark.slow
def test_a_killed_run_rehearses_the_same_and_ends_bit_for_bit_as_the_whole_one_and_a_damaged_file_is_one_line(
    tmp_path,
):
    argv = (
        "train",
        *TINY,
        "--algo",
        "ppo",
        "--policy.kind",
        "gaussian",
        "--rl.rehearse",
        "0.1",
        "--rl.rehearse-episodes",
        "20",
        "--demos",
        "10",
        "--bc.updates",
        "800",
        "--bc.batch",
        "128",
        "--policy.hidden",
        "128",
    )
    assert (end := robo_rl(tmp_path, *argv, "--out", "whole")).code == 0, end
    assert "rehearses" in end.err
    rows = [json.loads(x) for x in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert any("train/rehearsal" in row for row in rows)
    kill_after_a_checkpoint(tmp_path, *argv)
    shutil.copytree(tmp_path / "killed", tmp_path / "damaged")
    assert (end := robo_rl(tmp_path, "train", "--resume", "killed")).code == 0, end
    assert last_weights(tmp_path / "whole") == last_weights(tmp_path / "killed")
    assert (tmp_path / "whole" / FILE).read_bytes() == (tmp_path / "killed" / FILE).read_bytes()
    (tmp_path / "damaged" / FILE).write_bytes(b"x" * 100)
    assert (end := robo_rl(tmp_path, "train", "--resume", "damaged")).code == 2 and "is damaged" in end.err
