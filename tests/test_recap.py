"""RECAP: returns, values, advantages and indicators by their definitions; guidance at its ends; the stage as
a user runs it."""

import copy
import json
import math
import shutil
import signal
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl

from robo_rl import checkpoint
from robo_rl.algos import bc, recap
from robo_rl.algos.recap import (
    Episodes,
    advantages,
    cut_at,
    expected_value,
    indicators,
    returns_to_go,
    value_bin,
    value_loss,
)
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.config import load_config
from robo_rl.experiment.evaluation import with_pictures
from robo_rl.experiment.train import train
from robo_rl.options import BcOptions, PolicyOptions, RecapOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy, observations
from robo_rl.policies.context import ADVANTAGE, Context
from robo_rl.policies.guided import plain_chunks
from robo_rl.policies.numpy_actor import NumpyActor

SPEC = ObsSpec(state=5, action=3)
SMALL = {"horizon": 4, "execute": 2, "hidden": 16, "layers": 2}
VLA = ObsSpec(state=5, action=3, views=("front",), image_size=32, language=True, text=64)
KINDS = {
    "velocity": ({}, SPEC),
    "action": ({"predict": "action"}, SPEC),
    "diffusion": ({"kind": "diffusion", "finetune_steps": 4}, SPEC),
    "pi05": ({"kind": "pi05"}, VLA),
    "smolvla": ({"kind": "smolvla"}, VLA),
}


def episodes(*length, success=None, task=None, forced=()):
    to = np.cumsum(length)
    marks = np.zeros(to[-1], bool)
    marks[list(forced)] = True
    return Episodes(
        to - np.array(length),
        to,
        np.array(success or [True] * len(to)),
        np.array(task or [0] * len(to)),
        marks,
        np.arange(len(to)),
    )


def build(kind="velocity", seed=0, **options):
    own, spec = KINDS[kind]
    return make_policy(PolicyOptions(**({"advantage": True} | SMALL | own | options)), spec, seed)


def told(obs, value):
    return obs | {ADVANTAGE: torch.full((len(obs["state"]),), float(value))}


# ---- labels


def test_the_return_is_minus_the_steps_left_and_the_cost_of_a_failure_over_the_longest_episode():
    e = episodes(3, 2, 4, success=[True, False, True], task=[0, 0, 1])
    got = returns_to_go(e, fail=2.0)  # longest of task 0: 3, of task 1: 4; over 1 + 2
    want = [-2 / 9, -1 / 9, 0, -(1 / 3 + 2) / 3, -2 / 3, -3 / 12, -2 / 12, -1 / 12, 0]
    np.testing.assert_allclose(got, want, atol=1e-7)
    assert returns_to_go(episodes(5, 5, success=[True, False]), 1.0).min() >= -1


def test_a_value_belongs_to_the_nearest_of_the_bins_from_minus_one_to_zero():
    got = value_bin(torch.tensor([-1.0, -0.76, -0.74, -0.5, -0.1, 0.0, 0.2, -3.0]), 3)  # centres -1, -0.5, 0
    assert got.tolist() == [0, 0, 1, 1, 2, 2, 2, 0]


def test_the_loss_of_values_is_minus_the_log_of_the_probability_of_the_bin_of_the_return():
    logits, returns = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([-0.5, 0.0])
    by_hand = [math.log(math.e + math.exp(2) + math.exp(0.5)) - 2.0, math.log(3)]
    assert value_loss(logits, returns).tolist() == pytest.approx(by_hand)
    e = [math.exp(x) for x in (1.0, 2.0, 0.5)]
    assert expected_value(logits).tolist() == pytest.approx([(-e[0] - 0.5 * e[1]) / sum(e), -0.5])


@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_advantage_is_its_definition_the_sum_of_n_rewards_and_the_value_after_them(n):
    e, rng = episodes(6, 9, 2, success=[True, False, True]), np.random.default_rng(0)
    returns, values = returns_to_go(e, 1.5), rng.uniform(-1, 0, 17).astype(np.float32)
    got = advantages(returns, values, e, n)
    for a, b in zip(e.from_, e.to, strict=True):
        reward = np.append(returns[a : b - 1] - returns[a + 1 : b], returns[b - 1])
        for t in range(b - a):
            after = values[a + t + n] if a + t + n < b else 0.0
            assert got[a + t] == pytest.approx(reward[t : t + n].sum() + after - values[a + t], abs=1e-6)
    whole = advantages(returns, values, e, 0)
    # beyond the end of every episode
    np.testing.assert_array_equal(whole, advantages(returns, values, e, 100))
    np.testing.assert_allclose(whole, returns - values)


def test_the_asked_share_of_every_task_is_positive_and_what_a_person_did_in_any_case():
    e = episodes(10, 10, task=[0, 1], forced=(0, 1))
    adv = np.concatenate([np.arange(10), 100 + np.arange(10)]).astype(np.float32)
    got, epsilon = indicators(adv, e, 0.3)
    assert np.flatnonzero(got).tolist() == [0, 1, 7, 8, 9, 17, 18, 19] and epsilon[1] == pytest.approx(
        epsilon[0] + 100
    )
    assert indicators(adv, e, 1.0)[0].all()


def test_no_more_actions_are_positive_than_a_task_has_in_successes():
    e = episodes(10, 30, 20, success=[True, False, False], task=[0, 0, 1])
    adv = np.concatenate([np.full(10, 0.5), np.linspace(-0.1, 0.1, 30), np.linspace(-1, 1, 20)])
    assert np.flatnonzero(indicators(adv.astype(np.float32), e, 0.4)[0]).tolist() == list(range(10))


def test_what_a_person_had_to_end_counts_as_a_failure_and_what_follows_as_the_outcome():
    e = cut_at(episodes(4, 6, success=[True, True], forced=(6, 7)), np.isin(np.arange(10), [6, 9]))
    assert (e.from_.tolist(), e.to.tolist()) == ([0, 4, 6, 9], [4, 6, 9, 10])
    assert e.success.tolist() == [True, False, False, True] and e.recording.tolist() == [0, 1, 1, 1]
    assert cut_at(e, np.zeros(10, bool)).success.tolist() == e.success.tolist()


def test_values_of_an_episode_come_from_a_function_that_did_not_learn_from_it():
    features, returns = torch.eye(8).repeat_interleave(20, 0), torch.linspace(-1, 0, 8).repeat_interleave(20)
    fold, o = (
        torch.arange(8).repeat_interleave(20) % 2,
        RecapOptions(folds=2, value_updates=200, value_batch=64),
    )
    apart = recap.ValueFunctions(8, o, 0)
    apart.fit(features, returns, fold)
    alone = recap.ValueFunctions(8, RecapOptions(folds=1, value_updates=200, value_batch=64), 0)
    alone.fit(features, returns, torch.zeros(160, dtype=torch.long))
    error = [
        float((v - returns).abs().mean())
        for v in (apart.values(features, fold), alone.values(features, 0 * fold))
    ]
    # each episode is a point of its own: nothing else tells its return
    assert error[1] < 0.02 < 0.1 < error[0]


def test_a_share_of_a_batch_is_not_told_the_advantage():
    obs = {"state": torch.zeros(50, 1), ADVANTAGE: torch.ones(50)}
    sample = recap.untold(bc.demos_sampler(obs, torch.zeros(50, 1, 1), torch.ones(50, 1)), 0.3)
    drawn = sample(4000, torch.Generator().manual_seed(0))[0][ADVANTAGE]
    assert set(drawn.tolist()) == {0.0, 1.0} and float((drawn == 0).float().mean()) == pytest.approx(
        0.3, abs=0.03
    )


# ---- the policy


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_guidance_of_one_is_the_policy_that_is_told_and_of_nought_the_one_that_is_not(kind):
    policy = build(kind)
    obs = observations(policy.spec, 3)

    def act(beta, obs):
        other = build(kind, guidance=beta)
        other.load_state_dict(policy.state_dict())
        return other.act(obs, torch.Generator().manual_seed(1), False).actions

    good, nothing = act(1.0, told(obs, 1)), act(1.0, told(obs, 0))
    assert torch.equal(act(1.0, obs), good) and not torch.allclose(good, nothing, atol=1e-5)
    torch.testing.assert_close(act(0.0, obs), nothing, rtol=0, atol=2e-6)
    torch.testing.assert_close(act(1.0 + 1e-9, obs), good, rtol=0, atol=2e-5)  # two passes that add up to one


@pytest.mark.parametrize("kind", ["velocity", "pi05"])
@torch.no_grad()
def test_the_guided_velocity_is_the_untold_one_and_beta_times_what_telling_adds(kind):
    policy = build(kind, guidance=2.5)
    obs, g = observations(policy.spec, 4), torch.Generator().manual_seed(2)
    x, t = (
        torch.randn(4, policy.options.horizon, policy.width, generator=g),
        torch.tensor([0.2, 0.5, 0.8, 1.0]),
    )
    v, good, nothing = (policy.velocity(policy.encode(o), x, t) for o in (obs, told(obs, 1), told(obs, 0)))
    torch.testing.assert_close(v, nothing + 2.5 * (good - nothing), atol=1e-5, rtol=1e-5)
    assert plain_chunks(policy, obs, g).shape == (len(obs["state"]), 4, 3)


@pytest.mark.parametrize("kind", ["velocity", "pi05"])
def test_a_guided_policy_keeps_the_contract_of_every_policy(kind):
    own, spec = KINDS[kind]
    options = PolicyOptions(**({"advantage": True, "guidance": 2.0} | SMALL | own))
    assert "ratio" in check_policy(lambda seed: make_policy(options, spec, seed), options, spec, atol=1e-5)


@torch.no_grad()
def test_a_context_keeps_its_untold_rows_in_columns_and_through_every_change():
    context = build("pi05", guidance=2.0).encode(observations(VLA, 4))
    again = Context.of(Context.cat([context.pick(slice(2)), context.pick(slice(2, 4))]).columns())
    assert again.plain is not None and context.plain is not None and len(again.repeat(2).plain) == 8
    assert torch.equal(again.plain.pooled, context.plain.pooled) and torch.equal(
        again.plain.kv[1][0], context.plain.kv[1][0]
    )
    assert torch.equal(again.pooled, context.pooled) and not torch.equal(again.pooled, again.plain.pooled)


@pytest.mark.parametrize("kind", ["velocity", "pi05"])
@torch.no_grad()
def test_supervision_that_says_nothing_of_an_advantage_teaches_the_untold_policy(kind):
    policy, mask = build(kind), torch.ones(4, 4)
    obs, chunk = observations(policy.spec, 4), torch.rand(4, 4, 3) * 2 - 1
    loss = [
        float(policy.bc_loss(o, chunk, mask, torch.Generator().manual_seed(0)))
        for o in (obs, told(obs, 0), told(obs, 1))
    ]
    assert loss[0] == loss[1] != loss[2]


def test_a_vla_reads_the_advantage_as_text_of_its_prompt():
    policy = build("pi05")
    obs = observations(VLA, 1)
    prompts = []
    policy.processor.prompts = lambda texts, state, of=policy.processor.prompts: (
        prompts.extend(texts),
        of(texts, state),
    )[1]
    for value in (1, 0, -1):
        policy.encode(told(obs, value))
    assert (
        prompts[0] == prompts[1] + ". Advantage: positive"
        and prompts[2] == prompts[1] + ". Advantage: negative"
    )


@torch.no_grad()
def test_the_numpy_actor_acts_as_if_told_and_refuses_two_passes():
    policy = build(predict="action")
    policy.obs_norm.fit(torch.randn(50, 5) * 2 + 1)
    weights = {k: v.numpy() for k, v in policy.state_dict().items()}
    actor, state = NumpyActor(weights, asdict(policy.options), asdict(SPEC)), torch.randn(1, 5)
    noise = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    want = policy.act({"state": state}, torch.Generator().manual_seed(3), False).actions[0]
    np.testing.assert_allclose(actor.act(state[0].numpy(), noise[0].numpy()), want.numpy(), atol=1e-5)
    with pytest.raises(UserError, match="guided by beta 2 takes two"):
        NumpyActor(weights, asdict(build(guidance=2.0).options), asdict(SPEC))


@pytest.mark.parametrize(
    "columns", [5, 6]
)  # of a policy that was told nothing, and of one told a number alone
@torch.no_grad()
def test_weights_that_were_told_less_are_taken_and_act_as_they_did(columns):
    policy, obs = build(predict="action"), observations(SPEC, 3)
    weights, entry = policy.state_dict(), "head.from_context.weight"
    weights[entry][:, columns:] = 0
    want = policy.act(obs, torch.Generator().manual_seed(1), False).actions
    short = weights | {entry: weights[entry][:, :columns]}
    other = build(predict="action")
    other.load_state_dict(short)
    assert torch.equal(other.act(obs, torch.Generator().manual_seed(1), False).actions, want)
    if columns == 6:
        actor = NumpyActor({k: v.numpy() for k, v in short.items()}, asdict(policy.options), asdict(SPEC))
        noise = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
        got = actor.act(obs["state"][0].numpy(), noise[0].numpy())
        np.testing.assert_allclose(got, want[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("options", [{"kind": "gaussian"}, {"kind": "squashed"}, {"noise": "learned"}])
def test_policies_that_cannot_be_told_an_advantage_are_refused(options):
    with pytest.raises(UserError, match="policy.advantage goes with"):
        PolicyOptions(advantage=True, **options)


# ---- learning


def test_from_random_actions_of_which_half_were_right_the_policy_learns_the_right_ones():
    """An episode is one step; it succeeds where the sign of the action is that of the state. Imitation of all
    keeps half."""
    rng, spec = np.random.default_rng(0), ObsSpec(state=1, action=1)
    state, action = (rng.choice([-1.0, 1.0], (400, 1)).astype(np.float32) for _ in range(2))
    e = Episodes(
        np.arange(400),
        np.arange(400) + 1,
        (state == action)[:, 0],
        np.zeros(400, int),
        np.zeros(400, bool),
        np.arange(400),
    )
    o = RecapOptions(positive=0.5, folds=2, value_updates=50, value_batch=64)
    good, metrics = recap.label(torch.from_numpy(state), e, o, 0)
    assert (good == e.success).all() and metrics["positive_of_failures"] == 0
    obs = {
        "state": torch.from_numpy(state),
        ADVANTAGE: torch.from_numpy(np.where(good, 1.0, -1.0).astype(np.float32)),
    }
    base = make_policy(PolicyOptions(advantage=True, horizon=1, execute=1, hidden=32, layers=2), spec, 0)
    sample = recap.untold(
        bc.demos_sampler(obs, torch.from_numpy(action)[:, None], torch.ones(400, 1)), o.drop
    )
    bc.train(base, sample, BcOptions(updates=300, batch=128, ema=0.9), 0)
    right = {}
    for beta in (0.0, 1.0, 2.0):
        policy = copy.deepcopy(base)
        policy.options, policy.head.beta = replace(base.options, guidance=beta), beta
        acted = policy.act(
            {"state": torch.from_numpy(state)}, torch.Generator().manual_seed(0), False
        ).actions[:, 0]
        right[beta] = float((acted.sign() == torch.from_numpy(state)).float().mean())
    assert 0.3 < right[0.0] < 0.7 and right[1.0] > 0.9 and right[2.0] > 0.9, right


# ---- the command

FAST = ("--rl.updates", 20, "--rl.value-updates", 20, "--rl.episodes", 6, "--rl.folds", 2)
BASE = [
    a
    for i, a in enumerate(TINY)
    if not (str(a).startswith("--rl.") or (i and str(TINY[i - 1]).startswith("--rl.")))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recap")
    for done in (
        robo_rl(folder, "train", "--algo", "bc", *BASE, "--out", "runs/bc"),
        robo_rl(
            folder,
            "collect",
            "--task",
            "reach",
            "--policy",
            "runs/bc",
            "--episodes",
            6,
            "--out",
            "data/mixed",
        ),
    ):
        assert done.code == 0, done.err
    return folder


def test_a_run_learns_from_mixed_episodes_then_records_more_and_goes_on_where_it_was_killed(data):
    args = (
        "train",
        "--algo",
        "recap",
        "--init",
        "runs/bc",
        "--rl.data",
        "data/mixed",
        *FAST,
        "--rl.rounds",
        1,
        "--task",
        "reach",
        "--envs",
        4,
        "--eval-episodes",
        4,
        "--no-video",
        "--policy.guidance",
        "1.5",
    )
    done = robo_rl(data, *args, "--out", "runs/whole")
    assert done.code == 0, done.err
    rounds = json.loads((data / "runs/whole/recap.json").read_text())
    assert [r["round"] for r in rounds] == [0, 1] and rounds[1]["steps"] > rounds[0]["steps"] == len(
        load(data / "data/mixed").action
    )
    assert len(load(data / "runs/whole/rollouts/round_1")) == 6 and "values explain" in done.err
    assert json.loads((data / "runs/whole/run.json").read_text())["config"]["policy"]["advantage"]
    assert robo_rl(data, "report", "runs/whole").code == 0
    page = (data / "runs/whole/report.html").read_text()
    assert "<th class=n>Round</th>" in page and "Returns explained" in page
    again = robo_rl(data, "eval", "runs/whole", "--episodes", "4", "--json")
    assert again.code == 0, again.err
    first, last = sorted((data / "runs/whole/checkpoints").iterdir())[-2:]
    weights = (last / "policy.safetensors").read_bytes()
    shutil.rmtree(last)  # as if killed in round 1, after it had recorded
    assert robo_rl(data, "train", "--resume", "runs/whole").code == 0
    assert (
        (last / "policy.safetensors").read_bytes() == weights != (first / "policy.safetensors").read_bytes()
    )
    for algo in ("nft", "pi_rl"):
        other = robo_rl(data, "train", "--algo", algo, "--init", "runs/whole", "--task", "reach")
        assert other.code == 2 and f"learns by --algo recap or bc, not {algo}" in other.err


def test_a_vla_learns_from_labelled_pictures(tmp_path):
    done = robo_rl(
        tmp_path,
        "train",
        "--policy",
        "pi05",
        "--task",
        "reach",
        "--obs",
        "rgb",
        "--image-size",
        32,
        "--algo",
        "recap",
        "--demos",
        3,
        "--envs",
        3,
        "--bc.updates",
        1,
        "--bc.batch",
        4,
        "--bc.noises",
        1,
        "--rl.updates",
        2,
        "--rl.folds",
        3,
        "--rl.value-updates",
        2,
        "--eval-episodes",
        2,
        "--eval-envs",
        2,
        "--no-video",
        "--out",
        "vla",
    )
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "vla/recap.json").read_text())[0]["positive_of_successes"] == pytest.approx(
        0.4, abs=0.05
    )


OWN = ("--sim", "none", "--demos", "data/own", "--bc.updates", 20, *FAST, "--policy.width", 16)


@pytest.fixture(scope="module")
def own(data):
    """A data set of six episodes without an env, of which four succeeded."""
    shutil.copytree(data / "data/mixed", data / "data/own")
    (data / "won.json").write_text("[0, 1, 3, 4]")
    assert robo_rl(data, "data", "label", "data/own", "--success", "won.json").code == 0
    return data


def test_without_an_env_it_learns_from_what_succeeded_and_failed_and_goes_on_where_it_was_killed(own):
    done = robo_rl(own, "train", "--algo", "recap", *OWN, "--out", "runs/own")
    assert done.code == 0, done.err
    assert "6 episodes, " in done.err and "round" not in done.err and "held out: 1 of 6 episodes" in done.err
    assert "[sft] 100 % · 20/20 updates" in done.err and "[recap] 100 % · 20/20 updates" in done.err
    told = json.loads((own / "runs/own/heldout.json").read_text())
    assert {*told["episodes"]} < {0, 1, 3, 4}  # a success judges
    assert told["update"] == 40  # of both stages
    rows = [json.loads(line) for line in (own / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert [row["step"] for row in rows if "recap/loss" in row] == [40]
    (last,) = (own / "runs/own/checkpoints").iterdir()
    weights = (last / "policy.safetensors").read_bytes()
    assert robo_rl(own, "train", "--algo", "recap", *OWN, "--out", "runs/again").code == 0
    (same,) = (own / "runs/again/checkpoints").iterdir()
    assert (same / "policy.safetensors").read_bytes() == weights
    assert (
        robo_rl(own, "report", "runs/own").code
        == robo_rl(own, "eval", "runs/own", "--demos", "data/own").code
        == 0
    )
    page = (own / "runs/own/report.html").read_text()
    assert "the last 20 of them told the advantage" in page and "Returns explained" in page
    plan = robo_rl(own, "train", "--algo", "recap", *OWN, "--plan")
    assert plan.code == 0 and "the supervised policy" in plan.out and "x 40" in plan.out


def test_a_run_without_an_env_plays_the_task_of_a_simulator_that_is_named_with_the_cameras_of_its_data(own):
    eval_ = ("eval", "runs/own", "--episodes", 2, "--max-steps", 8)
    done = robo_rl(own, *eval_, "--sim", "mujoco", "--task", "reach")
    assert done.code == 0 and "2 starts" in done.out, done.err
    done = robo_rl(own, *eval_, "--sim", "mujoco", "--task", "nope")
    assert done.code == 2 and "unknown mujoco task 'nope'. Allowed: pick_cube, reach" in done.err
    done = robo_rl(own, *eval_, "--task", "reach")
    assert done.code == 2 and "--task reach is of a simulator, and this run has none: name it" in done.err
    config = replace(load_config(own / "runs/own"), sim="mujoco")
    seen = with_pictures(config, ObsSpec(state=5, action=3, views=("wrist", "front"), image_size=32))
    assert (seen.obs, seen.cameras) == ("rgb", "wrist,front") and with_pictures(config, SPEC) is config


@pytest.mark.parametrize(("whole", "labels"), [("own", 1), ("whole", 2)])
def test_what_was_stopped_while_it_learnt_from_labels_goes_on_where_it_was(own, monkeypatch, whole, labels):
    """`own` has no env, `whole` one. The labels of what goes on come from the checkpoint."""
    monkeypatch.chdir(own)
    begun = set()

    def stop(event):
        if event.stage in ("label", "recap"):
            begun.add(event.stage)
            if event.stage == "recap" and event.kind == "stage":
                signal.raise_signal(signal.SIGINT)

    config = replace(load_config(own / f"runs/{whole}"), out=f"runs/{whole}_half")
    assert train(config, stop, quiet=True)[1] == 130 and begun == {"label", "recap"}
    half = checkpoint.checkpoints(own / f"runs/{whole}_half")[-1]
    state, meta = checkpoint.load_train(half)
    assert state["rounds"] == 0 and state["fit"]["update"] == 1 and not meta["finished"]
    assert meta["step"] == (21 if whole == "own" else len(state["told"]))
    done = robo_rl(own, "train", "--resume", f"runs/{whole}_half")
    assert done.code == 0 and done.err.count("[label] 100 %") == labels - 1, done.err
    first, second = (checkpoint.checkpoints(own / f"runs/{name}")[-1] for name in (whole, f"{whole}_half"))
    assert first.name == second.name
    assert (first / "policy.safetensors").read_bytes() == (second / "policy.safetensors").read_bytes()


def test_a_run_that_ends_while_it_is_judged_goes_on_from_there(own, monkeypatch):
    monkeypatch.chdir(own)
    config = replace(load_config(own / "runs/own"), out="runs/cut")

    def cut(event):
        if event.stage == "held out":
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(config, cut, quiet=True)
    assert not (own / "runs/cut/heldout.json").exists()
    assert robo_rl(own, "train", "--resume", "runs/cut").code == 0
    whole, again = (json.loads((own / f"runs/{name}/heldout.json").read_text()) for name in ("own", "cut"))
    assert again["error"] == whole["error"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--rl.rounds", "1"], "record them on the robot (robo_rl deploy RUN --record FOLDER)"),
        (["--rl.data", "data/mixed"], "robo_rl data merge puts --demos and --rl.data into one"),
        (["--data.label", "success=all"], "6 of its 6 episodes succeeded"),
        (["--workers", "2"], "--algo recap records and learns in one process"),
        (["--policy.no-advantage"], "recap needs a policy that is told the advantage: --policy.advantage"),
        (["--algo", "iql"], "--algo bc and recap learn from a data set alone, --algo iql acts in an env"),
    ],
)
def test_bad_input_without_an_env_is_one_line(own, argv, line):
    done = robo_rl(own, "train", "--algo", "recap", "--sim", "none", "--demos", "data/own", *argv)
    assert done.code == 2 and line in done.err and len(done.err.strip().splitlines()) == 1, done.err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--demos", "0"],
            "--algo recap learns from episodes: --demos N or PATH, --rl.data FOLDER, or --rl.rounds N",
        ),
        (["--rl.data", "nowhere"], "--rl.data: nowhere is no data set"),
        (["--rl.data", "data/mixed", "--task", "pick_cube"], "record it with the same sim, task and control"),
        (["--workers", "2"], "--algo recap records and learns in one process"),
        (["--rl.force", "robot"], "unknown rl.force 'robot'. Allowed: policy, expert, "),
        (["--rl.positive", "0"], "rl.positive must be in (0, 1], got 0"),
        (["--policy.no-advantage"], "recap needs a policy that is told the advantage: --policy.advantage"),
        (["--policy.kind", "gaussian"], "policy.advantage goes with flow, diffusion"),
    ],
)
def test_bad_input_is_one_line(data, argv, line):
    task = [] if "--task" in argv else ["--task", "reach"]
    done = robo_rl(data, "train", "--algo", "recap", *task, *argv)
    assert done.code == 2 and line in done.err and len(done.err.strip().splitlines()) == 1, done.err
