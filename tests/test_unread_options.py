"""An option that a method does not read is refused, and what all on-policy methods have in common nft reads
too."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from robo_rl.algos.check import rollouts
from robo_rl.errors import UnreadOption, UserError
from robo_rl.experiment.config import TrainConfig, from_file, load_config
from robo_rl.experiment.methods import find_method
from robo_rl.experiment.recipes import recipe
from robo_rl.options import RL_OPTIONS, NftOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy

SPEC = ObsSpec(state=4, action=3, action_names=("x", "y", "gripper"))
GONE = 'take it out of "config" in that file: an option that is not there has its default'
UNREAD = [
    ("nft", "clip_low", 0.1),
    ("nft", "dual_clip", 0.0),
    ("nft", "target_kl", 0.1),
    ("nft", "trust_kl", 0.01),
    ("nft", "entropy_coef", 0.1),
    ("nft", "explore", 0.3),
    ("nft", "correction", "tis"),
    ("nft", "whiten", "minibatch"),
    ("dppo", "clip_high", 0.1),
    ("dppo", "entropy_coef", 0.1),
    ("pi_rl", "entropy_coef", 0.1),
    ("expo", "bc_coef", 1.0),
    ("pa_rl", "bc_coef", 1.0),
    ("dsrl", "bc_coef", 1.0),
    ("demo_flow", "bc_coef", 1.0),
    ("iql", "bc_coef", 1.0),
    ("aloe", "bc_coef", 1.0),
    ("hil_serl", "grasp_penalty", 0.1),
]


def parts(algo, **options):
    config = recipe("mujoco", "pick_cube", algo, "state", "quick")
    policy = {"hidden": 16} | ({"noise": "sde", "noise_steps": "one"} if algo in ("pi_rl", "nft") else {})
    return make_policy(replace(config.policy, **policy), SPEC, 0), replace(config.rl, **options)


@pytest.mark.parametrize(("algo", "name", "value"), UNREAD)
def test_an_option_that_a_method_does_not_read_is_refused_by_name(algo, name, value):
    policy, options = parts(algo, **({"explore": 0} if algo == "nft" else {}))
    find_method(algo)(policy, options, 0)
    with pytest.raises(UserError, match=f"leave .*--rl.{name.replace('_', '-')} out"):
        find_method(algo)(policy, replace(options, **{name: value}), 0)


def test_a_scale_by_the_sample_size_of_weights_needs_weights():
    policy, options = parts("ppo", ess_lr=True, replay=0.0)
    find_method("ppo")(policy, options, 0)
    with pytest.raises(UserError, match="--rl.ess-lr"):
        find_method("ppo")(policy, replace(options, correction="none"), 0)


def test_a_learned_std_has_an_entropy_to_reward():
    policy = make_policy(PolicyOptions(noise="learned", noise_steps="all", hidden=16), SPEC, 0)
    find_method("pi_rl")(policy, replace(parts("pi_rl")[1], entropy_coef=0.1), 0)


def nft(**options):
    policy = make_policy(PolicyOptions(hidden=16, horizon=4, execute=4), SPEC, 0)
    o = NftOptions(**{"minibatch": 16, "epochs": 1, "decisions": 6, "critic_warmup": 0} | options)
    return find_method("nft")(policy, o, 0), rollouts(policy, o, 1)[0]


def test_nft_anneals_its_learning_rates():
    for wanted, rate in ((True, 0.25), (False, 1.0)):
        learner, rollout = nft(anneal_lr=wanted, lr=1e-3, critic_lr=2e-3)
        learner.update(rollout, 0.75)
        assert learner.actor_opt.param_groups[0]["lr"] == pytest.approx(rate * 1e-3)
        assert learner.credit.opt.param_groups[0]["lr"] == pytest.approx(rate * 2e-3)


def test_nfts_critic_is_told_what_a_time_limit_is():
    """The last decisions of episodes that a time limit ended: their return is the reward alone."""
    told = {}
    for timeout in ("bootstrap", "failure"):
        learner, rollout = nft(timeout=timeout, lam=1.0)
        with torch.no_grad():  # a critic that promises 5 everywhere
            learner.credit.critic.net[-1].weight.zero_()
            learner.credit.critic.net[-1].bias.fill_(5.0)
        seen, assign = [], learner.credit.assign
        learner.credit.assign = lambda *args, seen=seen, assign=assign: seen.append(assign(*args)) or seen[0]
        learner.update(rollout, 0.0)
        cut = (rollout.done & (rollout.discounts > 0)).flatten()
        assert cut.any()
        told[timeout] = seen[0][1][cut] - rollout.rewards.flatten()[cut]
    assert (told["failure"] == 0).all() and (told["bootstrap"] > 4).all()


def test_the_running_statistics_of_nft_are_those_of_its_three_velocities():
    learner, rollout = nft(normalise_obs=True)
    learner.update(rollout, 0.0)
    learner.after_collect(rollout)
    seen = rollout.obs["state"].flatten(0, 1)
    for policy in (learner.policy, learner.old, learner.reference):
        assert torch.allclose(policy.obs_norm.mean, seen.mean(0), atol=1e-6)
        assert float(policy.obs_norm.count) == len(seen)


def test_states_of_an_env_that_is_over_are_not_in_the_running_statistics():
    policy = make_policy(PolicyOptions(kind="gaussian", hidden=16, horizon=2, execute=2), SPEC, 0)
    options = PpoOptions(normalise_obs=True, advantage="grpo", group=2, decisions=0)
    rollout = rollouts(policy, options, 1)[0]
    rollout.mask[3:] = False
    rollout.obs["state"][:3], rollout.obs["state"][3:] = 1.0, 100.0
    learner = find_method("ppo")(policy, options, 0)
    learner.after_collect(rollout)
    assert (policy.obs_norm.mean == 1).all() and float(policy.obs_norm.count) == rollout.mask.sum()
    rollout.mask[:] = False
    learner.after_collect(rollout)
    assert (policy.obs_norm.mean == 1).all()


def test_a_rollout_of_which_nothing_is_learnt_leaves_the_scale_of_rewards_alone():
    policy = make_policy(PolicyOptions(kind="gaussian", hidden=16, horizon=2, execute=2), SPEC, 0)
    options = PpoOptions(scale_reward=True, critic_warmup=0, minibatch=16)
    whole, empty = rollouts(policy, options, 2)
    empty.mask[:] = False
    learner = find_method("ppo")(policy, options, 0)
    assert learner.update(empty, 0.0)["skipped"] == 1
    learner.update(whole, 0.0)
    before = learner.credit.scale.clone()
    assert before.isfinite().all() and before[0] == whole.mask.sum()
    learner.update(empty, 0.0)
    assert torch.equal(learner.credit.scale, before)


@pytest.mark.parametrize("kind", ["gaussian", "flow"])
def test_the_entropy_is_of_the_entries_that_run(kind):
    """Rows of a chunk that are never executed have no density, so no entropy is rewarded either."""
    noise = {} if kind == "gaussian" else {"noise": "learned", "noise_steps": "all"}
    policy = make_policy(PolicyOptions(kind=kind, horizon=4, execute=2, hidden=16, **noise), SPEC, 0)
    obs = {"state": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    entropy = policy.score(policy.encode(obs), chunk.trace)[1]
    entropy.backward()
    grad = policy.log_std.grad if kind == "gaussian" else policy.noise.net[-1].bias.grad
    rows = grad.view(4, 3).abs().sum(1)
    assert (rows[:2] > 0).all() and (rows[2:] == 0).all()
    if kind == "gaussian":
        std = policy.log_std.detach().exp()
        assert entropy.item() == pytest.approx(float((std.log() + 1.4189385).mean()), rel=1e-5)
        with torch.no_grad():
            policy.log_std[6:] += 1.0
        assert policy.noise_scale == pytest.approx(float(std[:6].mean()))


def test_every_recipe_of_every_method_is_taken_by_it():
    """No recipe sets an option that its method refuses."""
    for sim, task in (("mujoco", "pick_cube"), ("maniskill", "PickCube-v1"), ("gym:Pendulum-v1", "")):
        for algo in RL_OPTIONS:
            for reward in ("sparse", "dense"):
                config = recipe(sim, task, algo, "state", "full", reward)
                policy = make_policy(replace(config.policy, hidden=16), SPEC, 0)
                find_method(algo)(policy, config.rl, 0)


@pytest.mark.parametrize(
    ("part", "name", "says"),
    [
        ("rl", "gone_option", "this version has no --rl.gone-option"),
        ("bc", "gone", "this version has no --bc.gone"),
        ("rl", "trust_kl", "rl.trust_kl must be in [0, 1000], got -1"),
    ],
)
def test_a_run_of_another_version_says_which_option_is_refused_and_how_to_leave_it_out(
    tmp_path, part, name, says
):
    path, config = tmp_path / "run.json", asdict(TrainConfig())
    path.write_text(json.dumps({"config": config | {part: config[part] | {name: -1}}}))
    with pytest.raises(UserError) as e:
        load_config(tmp_path)
    assert str(e.value) == f"{path}: {says} ({GONE})"
    config[part].pop(name, None)
    path.write_text(json.dumps({"config": config}))
    assert load_config(tmp_path) == TrainConfig()


def test_a_resumed_run_whose_method_does_not_read_an_option_says_where_it_stands(tmp_path):
    with (
        pytest.raises(UserError, match="leave --rl.clip-low out") as e,
        from_file(tmp_path / "run.json", UnreadOption),
    ):
        NftOptions(clip_low=0.1).refuse(("clip_low",), "nft has no ratio")
    assert str(e.value).startswith(f"{tmp_path}/run.json: ") and GONE in str(e.value)
