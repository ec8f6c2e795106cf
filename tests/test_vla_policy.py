"""Vision-language-action models under the chain of the small flows: densities, noise, supervision,
checkpoints, methods."""

import copy
import importlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from commands import robo_rl as command
from torch.utils._python_dispatch import TorchDispatchMode
from vla_checks import (
    check_copied,
    check_first_ratio,
    check_parts,
    check_supervision,
    train_whole_and_in_parts,
)
from vla_goldens import FAMILIES, inputs, outputs, weights

import robo_rl
from robo_rl.algos import bc
from robo_rl.algos.check import check_method, rollouts
from robo_rl.algos.onpolicy import encoded_pictures
from robo_rl.checkpoint import load_policy, save_checkpoint
from robo_rl.cli.train import short_policy
from robo_rl.errors import UserError
from robo_rl.options import FLOWS, RL_OPTIONS, BcOptions, PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy, observations
from robo_rl.policies.context import Context
from robo_rl.policies.exploration import BAND, with_level
from robo_rl.policies.guided import committed_chunk, guided_chunk, plain_chunks
from robo_rl.policies.vla.examine import examine

SPEC = ObsSpec(state=7, action=4, views=("front", "wrist"), image_size=32, language=True, text=64)
H, E, A, W = 6, 4, 4, 32
NOISES = {
    "sde": {},
    "sde-all": {"noise_steps": "all"},
    "cps": {"noise": "cps"},
    "learned": {"noise": "learned"},
    "learned-all": {"noise": "learned", "noise_steps": "all"},
}
RL = {"decisions": 3, "minibatch": 4, "epochs": 2, "critic_warmup": 0}


def build(kind="pi05", spec=SPEC, seed=0, **options):
    return make_policy(
        PolicyOptions(kind=kind, **({"horizon": H, "execute": E, "hidden": 16, "layers": 1} | options)),
        spec,
        seed,
    )


def pick(obs, rows):
    return {k: v[rows] for k, v in obs.items()}


def draw(policy, rows=20, seed=1):
    obs = observations(policy.spec, rows)
    return obs, policy.act(obs, torch.Generator().manual_seed(seed), True)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_vla_keeps_the_contract_of_every_policy(kind):
    options = PolicyOptions(kind=kind, horizon=H, execute=E)
    assert "ratio" in check_policy(lambda seed: make_policy(options, SPEC, seed), options, SPEC, atol=0.0)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_the_first_ratio_is_one_to_the_last_bit_in_a_minibatch_of_any_size(kind, noise):
    policy = build(kind, **NOISES[noise])
    obs, chunk = draw(policy)
    check_first_ratio(policy, obs, chunk)


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_weights_of_16_bits_have_a_trace_of_32_and_the_same_exact_ratio(kind):
    policy = build(kind)
    policy.trunk.bfloat16()
    policy.head.bfloat16()
    obs, chunk = draw(policy)
    assert (
        all(x.dtype in (torch.float32, torch.int64) for x in chunk.trace.values())
        and chunk.logp.dtype == torch.float32
    )
    for rows in (1, 5, 20):
        logp, _ = policy.score(policy.encode(pick(obs, slice(rows))), pick(chunk.trace, slice(rows)))
        assert torch.equal(logp, chunk.logp[:rows]), rows


@pytest.mark.parametrize("noise", ["sde", "learned"])
@torch.no_grad()
def test_exploration_moves_the_executed_entries_of_the_envs_axes_and_the_rest_is_the_plain_ode(noise):
    policy = build(noise=noise)
    obs, chunk = draw(policy)
    x, after, k = chunk.trace["x"][:, 0], chunk.trace["x_next"][:, 0], chunk.trace["k"][:, 0]
    v, _ = policy.head.at_steps(policy.encode(obs), policy.features, x, k)
    plain, after = (z.view(20, H, W) for z in (x - v / policy.options.denoise_steps, after))
    moved = (plain - after).abs().amax(0) > 1e-3
    assert moved[:E, :A].all() and moved.sum() == E * A
    assert torch.allclose(plain[:, E:], after[:, E:], atol=1e-6) and torch.allclose(
        plain[:, :, A:], after[:, :, A:], atol=1e-6
    )


@torch.no_grad()
def test_a_level_of_noise_is_its_std_at_the_last_step_and_changes_nothing_else():
    policy = build(noise="learned", noise_steps="last")
    made = with_level(policy, 0.4)
    obs, chunk = draw(made)
    _, std = made.moments(made.encode(obs), chunk.trace)
    assert (
        (std >= 0.4 / BAND * 0.999).all()
        and (std <= 0.4 * BAND * 1.001).all()
        and policy.options.noise_max < 0.4
    )
    assert torch.equal(
        *(p.act(obs, torch.Generator().manual_seed(1), explore=False).actions for p in (policy, made))
    )


@pytest.mark.parametrize("kind", FLOWS)
@torch.no_grad()
def test_critics_see_the_state_beside_the_mean_token(kind):
    policy = build(kind)
    obs = observations(SPEC, 3)
    told = policy.encode(obs).pooled[:, -SPEC.state :]
    assert torch.equal(told, policy.processor.state_norm(obs["state"].float()))


@torch.no_grad()
def test_the_log_prob_is_the_gaussian_of_the_drawn_step_over_the_executed_entries():
    policy = build()
    obs, chunk = draw(policy)
    mean, std = policy.moments(policy.encode(obs), chunk.trace)
    executed = chunk.trace["x_next"][:, 0].view(20, H, W)[:, :E, :A].flatten(1)
    want = torch.distributions.Normal(mean[:, 0], std[:, 0]).log_prob(executed).sum(1)
    assert mean.shape == (20, 1, E * A) and torch.allclose(chunk.logp[:, 0], want, atol=1e-4)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_supervision_is_the_public_loss_over_the_axes_that_the_robot_has(kind):
    """The golden loss map's mean over 7 of 32 entries, by the noise and the times that the generator
    draws."""
    spec, io = ObsSpec(state=8, action=7, text=64, language=True), outputs(kind)
    policy = build(kind, spec, horizon=10, folder=str(weights(kind)), words="words:512")
    policy.draw_times = lambda n, generator: io["time"]
    context = policy.trunk(**inputs(kind))
    chunk, g = policy.action_norm.inverse(io["actions"][..., :7]), torch.Generator().manual_seed(0)
    drawn = torch.randn(len(chunk), 320, generator=torch.Generator().manual_seed(0)).view(io["noise"].shape)
    t = io["time"][:, None, None]
    v = policy.velocity(context, (1 - t) * io["actions"] + t * drawn, io["time"])
    want = (v - (drawn - io["actions"]))[..., :7].square().mean()
    assert torch.allclose(policy.imitation(context, chunk, torch.ones(len(chunk), 10), g), want, rtol=1e-5)
    at = t * io["noise"] + (1 - t) * io["actions"]
    assert torch.allclose(
        (policy.velocity(context, at, io["time"]) - (io["noise"] - io["actions"])).square(),
        io["loss_map"],
        atol=1e-4,
    )


def test_flow_times_are_beta_between_a_thousandth_and_one():
    t = build().draw_times(20_000, torch.Generator().manual_seed(0))
    assert float(t.min()) >= 0.001 and float(t.max()) <= 1
    assert abs(float(t.mean()) - (0.999 * 0.6 + 0.001)) < 0.005  # of Beta(1.5, 1): 3/5


def test_a_frozen_trunk_with_stored_contexts_has_the_gradients_of_recomputation():
    policy = build()
    policy.trunk.requires_grad_(False)
    obs, chunk = draw(policy)
    with torch.no_grad():
        stored = policy.encode(obs).columns()
    grads = []
    for context in (policy.encode(obs), Context.of({k: v.clone() for k, v in stored.items()})):
        policy.zero_grad()
        policy.score(context, chunk.trace)[0].sum().backward()
        grads.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    assert len(grads[0]) > 20 and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(p.grad is None for p in policy.trunk.parameters())


def test_a_rollout_of_a_frozen_trunk_is_encoded_once_and_learnt_from_alike():
    policy = build()
    (rollout,) = rollouts(policy, PiRlOptions(**RL), 1)
    made = []
    for frozen in (True, False):
        learner = importlib.import_module("robo_rl.algos.pi_rl").make(
            copy.deepcopy(policy), PiRlOptions(**RL, freeze_trunk=True), 0
        )
        if frozen:
            assert {"context", "context/k0", "context/v1", "context/mask"} <= encoded_pictures(
                learner.policy, rollout
            ).obs.keys()
        else:  # every pass reads the pictures
            learner.policy.trunk.requires_grad_(True)
        metrics = learner.update(rollout, 0.0, 0)
        assert metrics["first_log_ratio"] == 0.0
        made.append(learner.policy.state_dict())
    differ = {k.split(".")[0] for k in made[0] if not torch.equal(made[0][k], made[1][k])}
    assert not differ & {"trunk", "processor"}, "nothing that is not trained moves"
    assert all(torch.allclose(made[0][k], made[1][k], atol=1e-3) for k in made[0])
    assert any(
        not torch.equal(made[0][k], v) for k, v in policy.state_dict().items() if k.startswith("head.")
    )


@pytest.mark.parametrize("bits", [32, 16])
def test_contexts_that_are_kept_with_decisions_are_learnt_from_as_if_encoded_again(bits):
    made = []
    for keep in (True, False):
        policy = build("pi0", keep_prefix=keep)
        if bits == 16:
            policy.trunk.bfloat16()
            policy.head.bfloat16()
        learner = importlib.import_module("robo_rl.algos.pi_rl").make(
            policy, PiRlOptions(**RL, freeze_trunk=True), 0
        )
        (rollout,) = rollouts(policy, PiRlOptions(**RL), 1)
        assert ("context/k1" in rollout.trace) == keep
        rollout.obs["image/front"][:] = 255 if keep else rollout.obs["image/front"]  # nobody looks again
        assert learner.update(rollout, 0.0, 0)["first_log_ratio"] == 0.0
        made.append(policy.state_dict())
    assert all(torch.equal(made[0][k], made[1][k]) for k in made[0])


@pytest.mark.parametrize(
    ("algo", "options"),
    [("pi_rl", {}), ("reinflow", {"noise": "learned", "noise_steps": "all"}), ("nft", {})],
)
def test_methods_for_flows_train_a_vla_and_resume_bit_for_bit(algo, options):
    policy = build(horizon=4, **options)
    policy.trunk.requires_grad_(False)
    check_method(importlib.import_module(f"robo_rl.algos.{algo}").make, RL_OPTIONS[algo](**RL), policy)


def test_supervised_learning_brings_the_loss_down():
    check_supervision(build("pi05"), observations(SPEC, 8), torch.rand(8, H, A) * 2 - 1, 40)


def test_a_checkpoint_has_all_that_acting_needs_wherever_it_is_copied_to(tmp_path):
    policy = build("pi05", folder=str(weights("pi05")), words="words:512", horizon=4, execute=2)
    policy.obs_norm.fit(torch.randn(100, 7) * 3 + 1)
    policy.action_norm.fit(torch.rand(100, 4))
    again = check_copied(policy, observations(SPEC, 3), tmp_path)
    assert again.options.folder == str(tmp_path / "b") and not (tmp_path / "b" / "tokenizer.model").exists()
    assert "chunks of 4 steps" in dict(examine(tmp_path / "b").facts)["expert"]  # not of its folder's 7
    begun = {"folder": str(tmp_path / "b"), "horizon": 4, "execute": 2}  # as a run with --init makes it
    for kind, more, line in (
        ("pi0", {}, "is of a pi05, and --policy says pi0: leave --policy out"),
        (
            "pi05",
            {"prompt": 9},
            f"expects another processor: its prompt is {again.processor.options.prompt}, here 9",
        ),
    ):
        with pytest.raises(UserError, match=line):
            build(kind, **begun, **more)
    (tmp_path / "b" / "processor.json").unlink()
    with pytest.raises(UserError, match="no processor.json; copy the whole checkpoint"):
        load_policy(tmp_path / "b")


def test_a_served_chunk_is_the_envs_axes_and_agrees_with_what_is_left_of_the_one_before():
    policy = build("pi05")
    obs, g = observations(SPEC, 1), torch.Generator()
    plain = plain_chunks(policy, obs, g.manual_seed(0))[0]
    assert plain.shape == (H, A)
    goal = plain.numpy() + 0.5
    guided = guided_chunk(policy, obs, g.manual_seed(0), goal, np.array([1.0, 1.0, 1.0, 0, 0, 0]), [1.0] * 4)
    near, far = (
        (guided - torch.from_numpy(goal)).abs().mean(1),
        (plain - torch.from_numpy(goal)).abs().mean(1),
    )
    assert guided.shape == (H, A) and (near[:3] < 0.7 * far[:3]).all()


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla"])
def test_a_model_goes_on_from_rows_that_are_given_and_a_window_hides_them_from_later_ones(kind):
    """Without given rows it is the model that it was, to the last bit; given rows stay and change the others;
    in a stack of blocks a window is reached through each."""
    plain = build(kind, horizon=8, execute=4)
    taught, masked = (
        build(kind, horizon=8, execute=4, commit=3),
        build(kind, horizon=8, execute=4, commit=3, window=2),
    )
    obs, g, depth = observations(SPEC, 2), torch.Generator().manual_seed(0), 2
    context, x, t = taught.encode(obs), torch.randn(2, 8, taught.width, generator=g), torch.tensor([0.3, 0.8])

    def v(policy, count, x):
        given = context if count is None else policy.commit(context, torch.tensor([count] * 2))[0]
        with torch.no_grad():
            return policy.velocity(given, x, t)

    assert torch.equal(v(plain, None, x), v(taught, None, x)) and torch.allclose(
        v(taught, 0, x), v(taught, None, x), atol=1e-6
    )
    assert (v(taught, 2, x) - v(taught, 0, x)).abs().max() > 1e-4
    moved = x.clone()
    moved[:, 2] += 3.0
    change = (v(masked, 3, moved) - v(masked, 3, x)).abs().amax((0, 2)) > 1e-6
    assert change.nonzero().flatten().tolist() == list(range(2, min(8, 2 + depth + 1)))
    goal = np.random.default_rng(0).uniform(-0.5, 0.5, (8, SPEC.action)).astype(np.float32)
    for policy in (taught, masked):
        one = {k: w[:1] for k, w in obs.items()}
        rows = committed_chunk(policy, one, g.manual_seed(1), goal, 3)
        assert torch.allclose(rows[:3], torch.from_numpy(goal[:3]), atol=1e-5) and rows.shape == (
            8,
            SPEC.action,
        )
        loss = policy.bc_loss(obs, torch.zeros(2, 8, SPEC.action), torch.ones(2, 8), g)
        loss.backward()
        assert torch.isfinite(loss)


def test_the_words_of_an_instruction_reach_the_model():
    policy = build("pi0")
    obs = observations(SPEC, 2)
    obs = {k: v[:1].repeat_interleave(2, 0) if k != "tokens" else v for k, v in obs.items()}
    with torch.no_grad():
        a = policy.encode(obs).pooled
    assert not torch.allclose(a[0], a[1])


def test_a_kind_beside_a_folder_of_that_name_says_which_of_them_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pi05").mkdir()
    assert short_policy(["--policy", "pi05"]) == ["--policy.kind", "pi05"] and not capsys.readouterr().err
    shutil.copy(weights("pi05"), tmp_path / "pi05" / "model.safetensors")
    assert short_policy(["--policy", "pi05"]) == ["--policy.kind", "pi05"]
    assert "has fresh weights; those of the folder pi05 are --policy ./pi05" in capsys.readouterr().err


def test_a_policy_is_named_by_its_kind_or_by_a_folder(tmp_path):
    shutil.copy(weights("pi05"), tmp_path / "model.safetensors")
    assert short_policy(["--policy", "smolvla", "--seed", "1"]) == ["--policy.kind", "smolvla", "--seed", "1"]
    assert short_policy(["--policy=gauss:make"]) == ["--policy.kind", "gauss:make"]
    assert short_policy(["--policy", str(tmp_path)]) == [
        "--policy.kind",
        "pi05",
        "--policy.folder",
        str(tmp_path),
    ]
    with pytest.raises(UserError, match="--policy takes flow, .*pi05.* got 'nowhere'"):
        short_policy(["--policy", "nowhere"])
    with pytest.raises(UserError, match="hf download lerobot/pi05_base --local-dir pi05_base"):
        short_policy(["--policy", "lerobot/pi05_base"])
    for name in ("run.json", "vla.json"):  # a run, and the files of one that its workers read
        (tmp_path / name).write_text("{}")
        with pytest.raises(UserError, match="--init"):
            short_policy(["--policy", str(tmp_path)])
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("change", "options", "line"),
    [
        ({"views": ("a", "b", "c", "d")}, {}, "the env has 4 cameras .* takes 3 at most"),
        ({"state": 33}, {}, "the env's state has 33 numbers, this pi05 takes 32 at most"),
        ({"state": 33, "views": ()}, {}, "takes 32 at most; with --obs rgb pictures show the rest"),
        ({"action": 40}, {}, "the env's action has 40 numbers"),
        ({"text": 0}, {}, "reads the instruction as text"),
        ({}, {"folder": "WEIGHTS"}, "give at least its tokeniser"),
        (
            {},
            {"folder": "WEIGHTS", "words": "words:4096"},
            "words:4096 has 4096 tokens, the model has words for 512",
        ),
        (
            {},
            {"kind": "pi0", "folder": "WEIGHTS", "words": "words:512"},
            "is of a pi05, and --policy says pi0: leave",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(change, options, line):
    options = {k: str(weights("pi05")) if v == "WEIGHTS" else v for k, v in options.items()}
    spec = ObsSpec(
        **(
            {k: getattr(SPEC, k) for k in ("state", "action", "views", "image_size", "language", "text")}
            | change
        )
    )
    with pytest.raises(UserError, match=line):
        build(options.pop("kind", "pi05"), spec, **options)


def test_a_longer_instruction_and_a_longer_prompt_are_one_line():
    from robo_rl.policies import obs_tensors

    raw = {"state": np.zeros((1, 7), np.float32)} | {
        f"image/{v}": np.zeros((1, 32, 32, 3), np.uint8) for v in SPEC.views
    }
    policy = build("pi0", prompt=6)
    with pytest.raises(UserError, match="a prompt has 8 tokens, this policy takes 6 at most"):
        policy.encode(obs_tensors(raw | {"task": ["one two three four five six seven"]}, SPEC))
    with pytest.raises(UserError, match="an instruction has 99 bytes, policies read 64 at most"):
        obs_tensors(raw | {"task": ["x" * 99]}, SPEC)


@pytest.mark.parametrize("kind", ["pi0", "pi05", "xvla"])
def test_an_instruction_that_has_no_room_is_told_before_there_is_an_observation(kind):
    policy = build(kind, prompt=40)
    policy.check_prompts(["pick up the red cube"])
    with pytest.raises(UserError, match="this policy takes 40 at most.*--policy.prompt"):
        policy.check_prompts(["pick up the red cube", "pick " * 60])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--policy pi05 --policy.prompt 9", "a prompt has .* tokens, this policy takes 9 at most"),
        (
            "--policy . --policy.words words:512 --policy.size small",
            "--policy.size small is of fresh weights, and those of .* have their own",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_recorded(options, line, tmp_path):
    shutil.copy(weights("pi05"), tmp_path / "model.safetensors")
    where = ("--task", "pick_by_name", "--obs", "rgb", "--image-size", "32", "--algo", "bc", "--out", "run")
    assert re.search(line, command(tmp_path, "train", *options.split(), *where).mistake)
    assert not (tmp_path / "run").exists()


def test_cameras_that_a_folder_knows_by_name_keep_their_places():
    from robo_rl.policies.vla.policy import guessed, placed

    three = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    assert (
        guessed(("cam_high", "cam_right_wrist"), three) == {}
    )  # one of its cameras is not there, all are known
    assert guessed(("cam_right_wrist", "phone", "top", "side"), three) == {
        "phone": "cam_high",
        "top": three[1],
    }
    assert placed(("front", "wrist"), ("wrist", "front")) == ("wrist", "front")
    assert placed(("front", "wrist"), ("top", "wrist")) == ("front", "wrist")
    assert placed(("wrist", "front", "side"), ("top", "wrist")) == ("front", "wrist", "side")
    assert placed(("front", "wrist"), ("base_0_rgb", "left_wrist_0_rgb")) == ("front", "wrist")
    assert placed(("wrist",), ("top", "wrist")) == ("wrist",)
    assert placed((), ("top",)) == ()


def test_the_prompt_of_a_fresh_model_has_room_for_a_state_that_lies_below_its_range():
    policy, obs = build("pi05"), observations(SPEC, 2)
    policy.encode(obs | {"state": torch.full((2, SPEC.state), -9.0)})


def test_what_has_no_running_statistics_is_not_asked_for_them():
    with pytest.raises(UserError, match="normalise-obs keeps running statistics"):
        importlib.import_module("robo_rl.algos.pi_rl").make(build(), PiRlOptions(**RL, normalise_obs=True), 0)


# ---- whole runs


class Draws(TorchDispatchMode):
    """Counts random numbers that are drawn into memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(word in str(func) for word in ("rand", "normal_", "uniform_")) and out.device.type != "meta":
            self.count += out.numel()
        return out


def test_loading_a_checkpoint_draws_no_weights_that_it_then_replaces(tmp_path):
    options = PolicyOptions(kind="pi05", horizon=4, execute=4)
    spec = ObsSpec(state=4, action=2, views=("front",), image_size=28, language=True, text=32)
    with Draws() as fresh:
        policy = make_policy(options, spec, 3)
    save_checkpoint(tmp_path / "c", policy, {}, {})
    with Draws() as again:
        loaded, _ = load_policy(tmp_path / "c")
    assert fresh.count > 100_000 and again.count < 1000
    assert all(torch.equal(v, policy.state_dict()[k]) for k, v in loaded.state_dict().items())


RUN = {
    "sim": "mujoco",
    "task": "pick_by_name",
    "obs": "rgb",
    "image_size": 32,
    "envs": 4,
    "demos": "2",
    "demos_most": 0,
    "eval_episodes": 2,
    "eval_envs": 2,
    "video": False,
    "bc": {"updates": 2, "batch": 8, "ground": 2},
}


def told(run):
    """(stage, step, name) -> number of all that a run logged, without times; what is logged twice counts as
    it was last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["stage"], row["step"], name): x
        for row in rows
        for name, x in row.items()
        if name not in ("stage", "step", "time") and not name.startswith(("time/", "rate/"))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "kind", "more"),
    [
        ("pi_rl", "pi05", {}),
        ("nft", "smolvla", {}),
        ("pi_rl", "pi0", {"keep_prefix": True}),
        ("ppo", "pi0_fast", {"action_words": "train:64", "horizon": 4, "execute": 4}),
        ("ppo", "openvla_oft", {"action_head": "l1", "horizon": 4, "execute": 4}),
        ("pi_rl", "xvla", {}),
        ("pi_rl", "groot", {}),
        ("nft", "groot_n17", {"keep_prefix": True}),
    ],
)
def test_a_run_of_a_vla_resumes_bit_for_bit_is_evaluated_and_served(algo, kind, more, tmp_path):
    rl = {"decisions": 3, "minibatch": 6, "epochs": 1, "critic_warmup": 0}
    config = robo_rl.recipe(
        **RUN,
        algo=algo,
        workers=0,
        steps=400,
        eval_every=200,
        policy={"kind": kind, **more},
        rl=rl,
        out=str(tmp_path / "whole"),
    )

    train_whole_and_in_parts(config, tmp_path)
    once, again = told(tmp_path / "whole"), told(tmp_path / "parts")
    # says what differs first
    assert not {k: (x, again.get(k)) for k, x in once.items() if again.get(k) != x and x == x}
    check_parts(config, tmp_path)


@pytest.mark.slow
def test_workers_collect_with_a_model_from_a_folder(tmp_path):
    shutil.copy(weights("pi05"), tmp_path / "model.safetensors")
    options = [
        w for k, v in RUN.items() if k not in ("bc", "video", "sim") for w in (f"--{k.replace('_', '-')}", v)
    ]
    done = command(
        tmp_path,
        "train",
        "--policy",
        ".",
        "--policy.words",
        "words:512",
        "--algo",
        "reinflow",
        "--workers",
        "1",
        "--steps",
        "200",
        "--rl.decisions",
        "3",
        "--rl.minibatch",
        "12",
        "--rl.critic-warmup",
        "0",
        "--bc.updates",
        "2",
        "--bc.batch",
        "8",
        "--no-video",
        "--out",
        "run",
        *options,
    )
    assert done.code == 0, done.err
    assert command(tmp_path, "eval", "run", "--episodes", "2").code == 0


@pytest.mark.slow
def test_supervision_with_compiled_blocks_learns_alike_and_leaves_none_compiled():
    def learnt(compile):
        policy, obs = build(), observations(SPEC, 8)
        chunk, mask = torch.rand(8, H, A, generator=torch.Generator().manual_seed(1)), torch.ones(8, H)
        options = BcOptions(updates=4, batch=8, compile=compile)
        bc.train(policy, bc.demos_sampler(obs, chunk, mask), options, 0)
        assert all(m._compiled_call_impl is None for m in policy.modules())
        return policy.state_dict()

    here, there = learnt(False), learnt(True)
    assert all(torch.allclose(v, there[k], atol=1e-3) for k, v in here.items())
