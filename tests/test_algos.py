import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import PointReach

import robo_rl
from robo_rl import checkpoint
from robo_rl.algos import bc, dppo, nft, reinflow
from robo_rl.algos.onpolicy import Rules, minibatches, surrogate
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.demos import demo_sampler, fit_normalisers, record
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.envs import make_env, obs_spec
from robo_rl.options import (
    BcOptions,
    DppoOptions,
    NftOptions,
    PiRlOptions,
    PolicyOptions,
    PpoOptions,
    ReinFlowOptions,
)
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.context import Context
from robo_rl.policies.exploration import explores
from robo_rl.rollout import Collector
from robo_rl.starts import eval_starts

SMALL = {"hidden": 64, "layers": 2, "horizon": 4, "execute": 4}
COMMON = {
    "decisions": 12,
    "epochs": 4,
    "minibatch": 256,
    "lr": 1e-3,
    "critic_lr": 3e-3,
    "critic_warmup": 1,
    "gamma": 0.95,
}
METHODS = {
    "ppo": (PolicyOptions(kind="gaussian", **SMALL), PpoOptions(**COMMON)),
    "pi_rl sde": (PolicyOptions(**SMALL), PiRlOptions(**COMMON)),
    "pi_rl sde grpo": (PolicyOptions(**SMALL), PiRlOptions(**COMMON | {"advantage": "grpo"})),
    "pi_rl noise": (
        PolicyOptions(noise="learned", noise_steps="all", noise_max=0.3, **SMALL),
        PiRlOptions(**COMMON | {"entropy_coef": 0.005}),
    ),
    "pi_rl noise grpo": (
        PolicyOptions(noise="learned", noise_steps="all", noise_max=0.3, **SMALL),
        PiRlOptions(**COMMON | {"advantage": "grpo"}),
    ),
    "dppo": (
        PolicyOptions(kind="diffusion", denoise_steps=5, finetune_steps=5, logp_reduction="mean", **SMALL),
        DppoOptions(**COMMON | {"clip_base": 0.05, "clip_coef": 0.2, "epochs": 8}),
    ),
    "reinflow": (
        PolicyOptions(noise="learned", noise_steps="all", noise_max=0.3, **SMALL),
        ReinFlowOptions(**COMMON),
    ),
    "nft": (PolicyOptions(**SMALL), NftOptions(**COMMON | {"lr": 2e-4, "epochs": 2, "adv_max": 3.0})),
    "nft noise": (
        PolicyOptions(predict="action", noise="learned", noise_steps="last", noise_max=0.3, **SMALL),
        NftOptions(**COMMON | {"lr": 4e-4, "adv_max": 2.0, "negative_weight": 0.9}),
    ),
}


def setup(name, seed=0, n=32):
    policy_options, options = METHODS[name]
    env = PointReach(n, limit=12)
    policy = make_policy(policy_options, ObsSpec(state=4, action=2), seed)
    learner = importlib.import_module(f"robo_rl.algos.{name.split()[0]}").make(policy, options, seed)
    return env, learner, Collector(env, policy, options.gamma, seed), options


def step(env, learner, collector, options, rng, progress=0.5):
    explore = explores(type(learner).__module__.split(".")[-1], learner.policy.options)
    if options.advantage == "gae":
        r = collector.collect(learner.sampler, options.decisions, explore=explore)
    else:
        starts = np.repeat(rng.integers(0, 2**31, env.num_envs // options.group), options.group)
        r = collector.episodes(learner.sampler, starts, explore=explore)
    return learner.update(r, progress), r


@pytest.mark.parametrize("name", [m for m in METHODS if not m.startswith("nft")])
def test_the_ratio_is_one_at_the_first_minibatch(name):
    env, learner, collector, options = setup(name)
    rng = np.random.default_rng(0)
    for _ in range(3):
        metrics, _ = step(env, learner, collector, options, rng)
        assert metrics.get("first_log_ratio", 0.0) < 2e-5
    assert learner.iteration == 3


@pytest.mark.parametrize("name", METHODS)
def test_a_learner_restored_from_a_checkpoint_makes_the_identical_next_updates(name, tmp_path):
    def run(folder):
        env, learner, collector, options = setup(name)
        rng = np.random.default_rng(0)
        for i in range(4):
            if folder and i == 2:
                state = {"learner": learner.state_dict(), "collector": collector.state()}
                checkpoint.save_checkpoint(folder / "c", learner.policy, state, {"step": i})
                env, learner, collector, _ = setup(name, seed=5)
                policy, _ = checkpoint.load_policy(folder / "c")
                learner.policy.load_state_dict(policy.state_dict())
                state, meta = checkpoint.load_train(folder / "c")
                learner.load_state_dict(state["learner"])
                collector.set_state(state["collector"])
                assert meta["step"] == 2
            step(env, learner, collector, options, rng)
        return learner

    whole, resumed = run(None), run(tmp_path)
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole.credit.critic.parameters(), resumed.credit.critic.parameters(), strict=True):
        assert torch.equal(a, b)


class Seen(PointReach):
    """The same with a camera that sees the point and the goal."""

    def _obs(self):
        image = np.zeros((self.num_envs, 16, 16, 3), np.uint8)
        for channel, at in enumerate((self.pos, self.goal)):
            cell = np.clip((at + 1.5) / 3 * 16, 0, 15).astype(int)
            image[np.arange(self.num_envs), cell[:, 1], cell[:, 0], channel] = 255
        return super()._obs() | {"image/front": image}


@pytest.mark.parametrize("name", ["ppo", "pi_rl sde", "pi_rl noise grpo", "dppo", "reinflow", "nft"])
def test_a_frozen_trunk_stays_and_encoding_pictures_once_changes_nothing(name, monkeypatch):
    def run(once):
        if not once:
            for module in ("onpolicy", "nft"):
                monkeypatch.setattr(
                    f"robo_rl.algos.{module}.encoded_pictures", lambda policy, rollout: rollout
                )
                monkeypatch.setattr(f"robo_rl.algos.{module}.encoded_once", lambda policy, obs: obs)
        policy_options, options = METHODS[name]
        options = replace(options, freeze_trunk=True, normalise_obs=False)
        # near enough that every draw of noise has successes and failures
        env = Seen(16, limit=12, radius=0.3)
        spec = ObsSpec(state=4, action=2, views=("front",), image_size=16, language=True)
        policy = make_policy(replace(policy_options, width=32, depth=1), spec, 0)
        learner = importlib.import_module(f"robo_rl.algos.{name.split()[0]}").make(policy, options, 0)
        before = {k: v.clone() for k, v in policy.state_dict().items()}
        collector, rng = Collector(env, policy, options.gamma, 0), np.random.default_rng(1)
        r = None
        for i in range(3):
            r = step(env, learner, collector, options, rng)[1] if i < 2 else r
            # once more, and staler every time
            ratio = learner.update(r, 0.5, version=i).get("first_log_ratio", 0.0)
            assert np.isfinite(ratio)
        after = policy.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("trunk."))
        assert any(not torch.equal(before[k], after[k]) for k in before)
        return list(policy.parameters()) + list(learner.credit.critic.parameters())

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_one_factor_per_chain_makes_dppo_plain_ppo():
    logp, old, adv = torch.randn(32, 1), torch.randn(32, 1), torch.randn(32)
    chain = dppo.rules(DppoOptions(clip_base=0.2, clip_coef=0.2, gamma_denoise=0.5), 1)
    a, _ = surrogate(logp, old, adv, chain, 0.0)
    b, _ = surrogate(logp, old, adv, Rules(True, 0.2, 0.2), 0.0)
    assert torch.isclose(a, b)


def test_dppo_without_denoise_discount_and_clip_schedule_weighs_all_steps_alike():
    rules = dppo.rules(DppoOptions(clip_base=0.1, clip_coef=0.1, gamma_denoise=1.0), 4)
    assert rules.weight.tolist() == [1, 1, 1, 1] and torch.allclose(rules.clip_low, torch.full((4,), 0.1))
    late = dppo.rules(DppoOptions(gamma_denoise=0.5), 3).weight
    assert late.tolist() == [0.25, 0.5, 1.0]  # the noisiest step is discounted most


def test_flat_groups_are_dropped_and_leave_the_weights_alone():
    env, learner, collector, options = setup("pi_rl sde grpo")
    env.limit = 1  # nobody arrives: every group is flat
    before = [p.clone() for p in learner.policy.parameters()]
    metrics, _ = step(env, learner, collector, options, np.random.default_rng(0))
    assert metrics["skipped"] == 1.0 and metrics["flat_groups"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_advantages_whitened_per_minibatch_have_mean_0_and_std_1_in_each_and_ranks_share_them():
    columns, order = {"adv": torch.randn(40) * 3 + 1, "x": torch.arange(40.0)}, torch.randperm(40)
    whole = list(minibatches(columns, order, 16, anew=True))
    for rows, row in whole[:2]:
        assert abs(float(row["adv"].mean())) < 1e-6 and abs(float(row["adv"].std()) - 1) < 1e-5
        assert torch.equal(row["x"], rows.float())
    parts = [list(minibatches(columns, order, 16, slice(rank, None, 2), True)) for rank in range(2)]
    for k, (_, row) in enumerate(whole):
        both = torch.stack([p[k][1]["adv"] for p in parts], 1).flatten()
        assert torch.equal(both, row["adv"])
    with pytest.raises(UserError, match="whiten minibatch goes with .* set rl.whiten batch"):
        PpoOptions(whiten="minibatch", advantage="grpo")


class Recorder:
    """An optimizer that calls `before()` in front of each step."""

    def __init__(self, opt, before):
        self.opt, self.before = opt, before
        self.param_groups, self.state = opt.param_groups, opt.state

    def step(self):
        self.before()
        self.opt.step()


@pytest.mark.parametrize("name", ["ppo", "dppo", "nft"])
def test_the_actors_learning_rate_grows_over_its_first_steps_and_goes_on_growing_after_a_resume(name):
    def run(resume):
        env, learner, collector, o = setup(name)
        rng, rates = np.random.default_rng(0), []
        for i in range(3):
            if resume and i == 1:
                state, weights = learner.state_dict(), learner.policy.state_dict()
                learner = setup(name, seed=4)[1]
                learner.policy.load_state_dict(weights)
                learner.load_state_dict(state)
            learner.options = replace(o, epochs=1, minibatch=96, critic_warmup=0, ramp=6)
            opt = learner.actor_opt
            learner.actor_opt = Recorder(opt, lambda opt=opt: rates.append(opt.param_groups[0]["lr"] / o.lr))
            step(env, learner, collector, learner.options, rng)
            learner.actor_opt = opt
            assert opt.param_groups[0]["lr"] == o.lr
        return rates

    rates = run(False)
    assert rates[:7] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1]) and rates[-1] == 1
    assert run(True)[:8] == pytest.approx(run(False)[:8])


def test_the_critic_warms_up_alone():
    env, learner, collector, options = setup("pi_rl sde")
    actor = [p.clone() for p in learner.policy.parameters()]
    critic = [p.clone() for p in learner.credit.critic.parameters()]
    step(env, learner, collector, options, None)
    assert all(torch.equal(a, b) for a, b in zip(actor, learner.policy.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(critic, learner.credit.critic.parameters(), strict=True))


@pytest.mark.parametrize("change", [1e3, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", ["ppo", "pi_rl noise", "dppo"])
def test_a_batch_with_a_ratio_that_cannot_be_is_refused_whole_and_counted(name, change):
    env, learner, collector, _ = setup(name, n=8)
    options = replace(learner.options, epochs=1, minibatch=96, critic_warmup=0, entropy_coef=0.1)
    learner.options = options
    r = collector.collect(learner.sampler, 12)
    r.logp[3, 5] += change
    before = {k: v.clone() for k, v in learner.policy.state_dict().items()}
    metrics = learner.update(r, 0.0)
    assert metrics["refused"] == 1 and metrics["skipped_updates"] == 1
    after = learner.policy.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k != "noise.high")
    assert not learner.actor_opt.state  # no moment has heard of it
    r.logp[3, 5] = collector.collect(learner.sampler, 1).logp[0, 0]
    r = collector.collect(learner.sampler, 12)
    metrics = learner.update(r, 0.0)
    assert metrics["refused"] == 0 and metrics["skipped_updates"] == 0 and learner.actor_opt.state


def test_one_bad_ratio_among_pieces_refuses_the_step_that_adds_them_up():
    env, learner, collector, options = setup("pi_rl sde grpo")
    starts = np.repeat(np.arange(4), 8)
    pieces = [collector.episodes(learner.sampler, starts) for _ in range(2)]
    for r in pieces:
        r.outcome[::2] = 1.0
    pieces[0].logp[0, 0] -= 1e4
    before = [p.clone() for p in learner.policy.parameters()]
    metrics = learner.accumulate(pieces, 0.5)
    assert metrics["refused"] > 0 and metrics["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_a_critic_that_promises_more_than_success_does_not_raise_returns_above_it():
    env, learner, collector, options = setup("ppo", n=8)
    r, credit, limited = (
        collector.collect(learner.sampler, 12),
        learner.credit,
        replace(options, max_return=1.0),
    )
    credit.critic.forward = lambda context: torch.full((len(context),), 3.0)  # as where nothing was learnt
    assert credit.assign(r, learner.policy)[1].max() > 2
    credit.options = limited
    returns = credit.assign(r, learner.policy)[1]
    assert returns.min() >= 0 and 0.8 < returns.max() <= 1
    with pytest.raises(UserError, match="units of the reward"):
        replace(limited, scale_reward=True)


def test_critic_steps_and_steps_of_nft_along_no_number_are_counted():
    env, learner, collector, options = setup("pi_rl sde", n=8)
    r = collector.collect(learner.sampler, 12)
    r.rewards[:] = float("nan")
    before = [p.clone() for p in learner.credit.params]
    assert learner.update(r, 0.0)["skipped_critic"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.credit.params, strict=False))
    env, learner, collector, options = setup("nft", n=8)
    learner.options = replace(options, critic_warmup=0)
    r = collector.collect(learner.sampler, 12, explore=False)
    assert learner.update(r, 0.0)["skipped_updates"] == 0
    r.x0[0, 0] = float("nan")
    assert learner.update(r, 0.0)["skipped_updates"] > 0


def test_reinflows_noise_bound_holds_then_falls():
    assert reinflow.noise_bound(0.2, 0.3, 0.35, 0.7) == 0.2
    assert abs(reinflow.noise_bound(0.2, 1.0, 0.35, 0.7) - 0.14) < 1e-9
    env, learner, collector, options = setup("reinflow")
    step(env, learner, collector, options, None, progress=1.0)
    assert abs(float(learner.policy.noise.high) - 0.3 * 0.7) < 1e-6


def test_reinflows_distance_to_the_old_policy_starts_at_zero_and_grows():
    policy_options, _ = METHODS["reinflow"]
    policy = make_policy(policy_options, ObsSpec(state=4, action=2), 0)
    learner = reinflow.make(policy, ReinFlowOptions(**COMMON | {"w2_coef": 1.0}), 0)
    extra, rng = learner.rules(0.0).extra, torch.Generator().manual_seed(0)
    assert float(extra(Context(torch.randn(16, 4)), rng).detach()) == 0.0
    with torch.no_grad():
        policy.head.out.bias += 0.1
    assert float(extra(Context(torch.randn(16, 4)), rng).detach()) > 0.01


def test_nft_samples_with_its_slow_copy_and_moves_it():
    env, learner, collector, options = setup("nft")
    assert learner.sampler is not learner.policy
    for _ in range(3):
        step(env, learner, collector, options, None)
    start = make_policy(METHODS["nft"][0], ObsSpec(state=4, action=2), 0)
    assert not torch.equal(learner.old.head.out.weight, start.head.out.weight)
    assert torch.equal(learner.reference.head.out.weight, start.head.out.weight)


class Rightwards(PointReach):
    """The same whose reward is the first axis of the action."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.asarray(action)[:, 0].astype(np.float32), *rest


def test_noise_that_was_good_moves_what_nft_does_without_noise():
    policy_options, options = METHODS["nft noise"]
    env = Rightwards(64, limit=12)
    policy = make_policy(policy_options, ObsSpec(state=4, action=2), 0)
    learner = nft.make(policy, options, 0)
    collector = Collector(env, policy, options.gamma, 0)
    obs = {"state": torch.from_numpy(env.reset(seed=0)[0]["state"])}

    def plain() -> torch.Tensor:
        return learner.sampler.act(obs, torch.Generator().manual_seed(0), explore=False).actions

    before = plain()
    for _ in range(6):
        learner.update(collector.collect(learner.sampler, options.decisions), 0.5)
    right, other = (plain() - before).mean((0, 1))
    assert right > 0.02 and right > 3 * abs(other), (right, other)


def test_methods_refuse_policies_they_cannot_train():
    gaussian = make_policy(METHODS["ppo"][0], ObsSpec(state=4, action=2), 0)
    flow = make_policy(METHODS["pi_rl sde"][0], ObsSpec(state=4, action=2), 0)
    for name, policy, word in (
        ("pi_rl", gaussian, "flow"),
        ("ppo", flow, "gaussian"),
        ("dppo", flow, "diffusion"),
        ("nft", gaussian, "flow"),
        ("reinflow", flow, "learned"),
    ):
        with pytest.raises(UserError, match=word):
            importlib.import_module(f"robo_rl.algos.{name}").make(policy, METHODS["ppo"][1], 0)
    for noise in ("sde", "cps"):  # one step of either is deterministic, and so are all without noise
        for kw, word in (
            ({"denoise_steps": 1}, "denoise_steps >= 2.*learned"),
            ({"noise_level": 0.0}, "noise_level"),
        ):
            policy = make_policy(PolicyOptions(noise=noise, **SMALL, **kw), ObsSpec(state=4, action=2), 0)
            with pytest.raises(UserError, match=word):
                importlib.import_module("robo_rl.algos.pi_rl").make(policy, PiRlOptions(), 0)


def demonstrations(tmp_path, n=10, noise=0.0):
    env = PointReach(8)
    with Writer(tmp_path / "d", spec=env.spec) as w:
        tried = record(env, n, 0, w.add, noise)
    assert tried >= n
    return load(tmp_path / "d")


def test_behaviour_cloning_of_the_expert_reaches_the_goal(tmp_path):
    data = demonstrations(tmp_path, 40, noise=0.2)
    policy = make_policy(METHODS["pi_rl sde"][0], ObsSpec(state=4, action=2), 0)
    fit_normalisers(policy, data)
    losses = []
    bc.train(
        policy,
        demo_sampler(data, policy.spec, 4),
        BcOptions(updates=400),
        0,
        lambda u, loss: losses.append(loss),
    )
    result = evaluate(PointReach(50), policy, eval_starts(50))
    assert losses[-1] < 0.6 * losses[0] and sum(result["success"]) >= 40


def test_demonstrations_that_do_not_fit_the_env_are_refused_by_name(tmp_path):
    data = demonstrations(tmp_path)
    with pytest.raises(UserError, match="4 state and 2 action numbers, the env has 7 and 2"):
        demo_sampler(data, ObsSpec(state=7, action=2), 4)
    with pytest.raises(UserError, match="lacks the camera front"):
        demo_sampler(data, ObsSpec(state=4, action=2, views=("front",), image_size=32), 4)
    with pytest.raises(UserError, match="action axes x, y, the env has u, v"):
        demo_sampler(data, ObsSpec(state=4, action=2, action_names=("u", "v")), 4)


@pytest.mark.learning
@pytest.mark.timeout(1800)  # a busy machine
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_from_demonstrations_that_go_two_ways_a_flow_succeeds_where_a_gaussian_runs_into_the_post(
    seed, tmp_path
):
    config = robo_rl.recipe(task="reach_around", algo="bc", threads=1)
    env = make_env(config, 100)
    with Writer(tmp_path / "demos", spec=env.spec) as w:
        record(env, 180, seed, w.add)
    success = {}
    for kind in ("flow", "gaussian"):
        options = replace(config.policy, kind=kind)
        data = load(tmp_path / "demos")
        policy = make_policy(options, obs_spec(env, False), seed)
        fit_normalisers(policy, data)
        bc.train(
            policy, demo_sampler(data, policy.spec, options.horizon), replace(config.bc, updates=1800), seed
        )
        success[kind] = np.mean(evaluate(env, policy, eval_starts(200))["success"])
    print(f"\nseed {seed}: {success}")
    assert success["flow"] >= 0.6 and success["gaussian"] < 0.3, success


@pytest.mark.learning
@pytest.mark.timeout(1800)  # a busy machine
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_improves_a_weak_supervised_policy(name, seed, tmp_path):
    """Six demonstrations and a few supervised updates first, then online RL on the sparse reward."""
    data = demonstrations(tmp_path, 6)
    policy_options, options = METHODS[name]
    env = PointReach(64, limit=12)
    policy = make_policy(policy_options, ObsSpec(state=4, action=2), seed)
    fit_normalisers(policy, data)
    bc.train(policy, demo_sampler(data, policy.spec, 4), BcOptions(updates=150), seed)
    learner = importlib.import_module(f"robo_rl.algos.{name.split()[0]}").make(policy, options, seed)
    collector = Collector(env, policy, options.gamma, seed)
    rng = np.random.default_rng(seed)
    before = np.mean(evaluate(PointReach(200, 12), learner.policy, eval_starts(200))["success"])
    rounds = 120 if name.startswith("nft") else 60 if options.advantage == "gae" else 500
    for i in range(rounds):
        step(env, learner, collector, options, rng, i / rounds)
    after = np.mean(evaluate(PointReach(200, 12), learner.policy, eval_starts(200))["success"])
    print(f"\n{name} seed {seed}: {before:.3f} -> {after:.3f}")
    assert after >= min(before + 0.2, 0.95), (before, after)
