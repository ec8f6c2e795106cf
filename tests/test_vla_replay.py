"""Vision-language-action models under methods that learn from replay: their policies, what replay keeps of
them, whole runs."""

import copy
import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from vla_checks import check_parts, train_whole_and_in_parts

import robo_rl
from robo_rl.errors import UserError
from robo_rl.experiment.replay import check, check_memory
from robo_rl.lora import attach
from robo_rl.options import OFF_POLICY, LoraOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import observations
from robo_rl.policies.context import Context
from robo_rl.policies.guided import plain_chunks
from robo_rl.policies.offpolicy import GuidedPolicy, squash
from robo_rl.replay import EXPERT, Replay
from robo_rl.replay_collector import replay_observation, replay_rows

E, A = 3, 4
SPEC = ObsSpec(state=7, action=A, views=("front", "wrist"), image_size=32, language=True, text=64)
NET = {"critics": 2, "critic_hidden": 16, "critic_layers": 1}
SMALL = {"horizon": E, "execute": E, "denoise_steps": 2, "hidden": 16, "layers": 1, **NET}
ACTING = {
    "expo": {"actor": "guided", "edit_scale": 0.2, "candidates": 2},
    "pa_rl": {"actor": "guided", "local_steps": 1, "candidates": 3, "keep": 2},
    "dsrl": {"actor": "steered", "steer_row": True},
    "demo_flow": {"actor": "guided", "candidates": 1},
    "hil_serl": {"actor": "squashed", "teacher": True},
    "aloe": {},
    "iql": {},
}


def build(kind="pi05", algo="expo", seed=0, **options):
    made = make_policy(PolicyOptions(kind=kind, **SMALL | ACTING[algo] | options), SPEC, seed)
    made.obs_norm.fit(torch.randn(50, 7, generator=torch.Generator().manual_seed(3)))
    made.action_norm.fit(0.2 + 0.3 * torch.randn(50, A, generator=torch.Generator().manual_seed(4)))
    return made.eval()


def learner(policy, algo, seed=0):
    return importlib.import_module(f"robo_rl.algos.{algo}").make(
        policy, OFF_POLICY[algo](batch=4, **NET), seed
    )


def raw(rows, seed=0):
    seen = observations(SPEC, rows, seed)
    out = {k: v.numpy() for k, v in seen.items() if k != "tokens"}
    return out | {"task": np.array(["pick up the cube", "open the drawer"] * rows)[:rows]}


def filled(policy, steps=24):
    """Two envs, episodes of eight steps that end in turns by success and by time."""
    store, rng, lanes = Replay(replay_rows(policy), A, E, 0.9, 400, 2), np.random.default_rng(0), np.arange(2)
    for t in range(steps):
        over = t % 8 == 7
        store.add(
            lanes,
            replay_observation(policy, raw(2, t)),
            rng.uniform(-1, 1, (2, A)),
            np.full(2, float(over)),
            np.full(2, over and t % 16 == 7),
            EXPERT if t % 16 < 8 else 0,
        )
        if over:
            store.close(lanes, replay_observation(policy, raw(2, 100 + t)))
    return store


def weights(policy):
    return {k: v.clone() for k, v in policy.state_dict().items()}


@pytest.mark.parametrize(
    ("algo", "kind"),
    [
        ("expo", "pi05"),
        ("pa_rl", "smolvla"),
        ("dsrl", "pi0"),
        ("dsrl", "xvla"),
        ("demo_flow", "pi05"),
        ("demo_flow", "xvla"),
        ("hil_serl", "pi0"),
        ("aloe", "pi05"),
        ("iql", "smolvla"),
        ("expo", "xvla"),
        ("hil_serl", "xvla"),
        ("pa_rl", "groot"),
        ("hil_serl", "groot_n17"),
    ],
)
def test_a_method_of_replay_trains_what_acts_on_the_trunk_and_resumes_bit_for_bit(algo, kind):
    policy = build(kind, algo)
    store = filled(policy)

    def draw(seed):
        rng = np.random.default_rng(seed)
        return lambda n: store.sample(n, rng)

    first = learner(policy, algo)
    before = weights(policy)
    first.update(draw(0), 2)
    first.begin_online()
    again = learner(build(kind, algo, seed=1), algo, seed=1)
    again.policy.load_state_dict(policy.state_dict())
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    assert first.update(draw(1), 2) == again.update(draw(1), 2)
    after, theirs = weights(policy), weights(again.policy)
    assert all(torch.equal(v, theirs[k]) for k, v in after.items())
    moved = {k.split(".")[0] for k, v in before.items() if not torch.equal(v, after[k])}
    assert moved & {"hil_serl": {"actor"}, "dsrl": {"steer"}}.get(algo, {"head"}) and not moved & {
        "trunk",
        "processor",
    }
    obs = observations(SPEC, 2, 9)
    chunks = [x.policy.act(obs, torch.Generator().manual_seed(1), False) for x in (first, again)]
    assert torch.equal(chunks[0].actions, chunks[1].actions) and chunks[0].actions.shape == (2, E, A)


def test_with_adapters_on_the_expert_nothing_else_learns():
    policy = attach(build("pi05", "aloe"), LoraOptions(rank=2, targets=("head",), full=("none",)), 0)
    store, rng, before = filled(policy, 16), np.random.default_rng(0), weights(policy)
    learner(policy, "aloe").update(lambda n: store.sample(n, rng), 4)
    moved = {k for k, v in policy.state_dict().items() if not torch.equal(v, before[k])}
    assert moved and all("lora_" in k for k in moved)


@pytest.mark.parametrize(("kind", "bits"), [("pi05", 32), ("smolvla", 32), ("pi0", 16)])
def test_a_stored_prefix_is_learnt_from_as_one_that_is_made_again(kind, bits):
    made, sizes = [], []
    for keep in (False, True):
        policy = build(kind, "aloe", keep_prefix=keep, dtype="fp32" if bits == 32 else "bf16")
        store = filled(policy, 16)
        sizes.append(sum(v[0].nbytes for v in store.obs.values()))
        assert ("context/k1" in store.obs) == keep and ("image/front" in store.obs) != keep
        rng = np.random.default_rng(0)
        learner(policy, "aloe").update(lambda n, store=store, rng=rng: store.sample(n, rng), 2)
        made.append(weights(policy))
    assert all(
        torch.allclose(made[0][k].float(), v.float(), atol=1e-5 if bits == 32 else 0.02)
        for k, v in made[1].items()
    )
    assert sizes[0] == 2 * 32 * 32 * 3 + 7 * 4 + 64


class SameFlow(GuidedPolicy):
    """A small policy that has another one's samples."""

    samples: torch.Tensor

    def flow(self, context, m, generator, head=None):
        return self.samples[:, :m]


@torch.no_grad()
def test_the_actions_that_pa_rl_optimises_are_those_of_the_small_policy_on_the_same_q():
    policy = build("pi05", "pa_rl", local_rate=0.5, local_steps=3)
    context = policy.encode(observations(SPEC, 5))
    samples = policy.flow(context, 3, torch.Generator().manual_seed(2))
    small = SameFlow(
        replace(policy.options, kind="guided", actor="own"), ObsSpec(state=policy.context_size, action=A)
    )
    small.judge.load_state_dict(policy.judge.state_dict())
    small.samples = samples
    with torch.enable_grad():
        mine = policy.candidates(context, torch.Generator().manual_seed(2))
        theirs = small.candidates(Context(context.pooled), torch.Generator())
    assert torch.equal(mine, theirs) and not torch.equal(mine, samples[:, :2])
    noise = torch.randn(5, 3 * policy.chunk, generator=torch.Generator().manual_seed(2)).view(15, -1)
    x = noise
    for k in range(2):
        x = (
            x
            - policy.velocity(context.repeat(3), x.view(15, E, -1), torch.full((15,), 1 - k / 2)).flatten(1)
            / 2
        )
    assert torch.allclose(policy.commands(x).clamp(-1, 1).view(5, 3, E * A), samples, atol=1e-5)


@torch.no_grad()
def test_the_gaussian_on_a_trunk_acts_with_the_density_that_its_actor_has_of_the_action():
    policy, obs = build("pi0", "hil_serl"), observations(SPEC, 6)
    chunk = policy.act(obs, torch.Generator().manual_seed(0), True)
    mean, log_std = policy.actor(policy.encode(obs).pooled)
    u = torch.atanh(chunk.actions.flatten(1).double()).float()
    assert torch.allclose(squash(u, mean, log_std)[1], chunk.logp[:, 0], atol=1e-3)
    assert not hasattr(policy, "head") and not hasattr(policy, "expert"), "nothing is kept of the expert"


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("pi05", "expo"),
        lambda: build("smolvla", "dsrl"),
        lambda: build("smolvla", "hil_serl"),
        lambda: build("xvla", "pa_rl"),
        lambda: make_policy(
            PolicyOptions(kind="squashed", horizon=E, execute=E), ObsSpec(state=7, action=A), 0
        ),
    ],
)
@torch.no_grad()
def test_what_such_a_policy_serves_is_what_it_does(make):
    policy = make()
    policy.action_norm.fit(0.2 + 0.3 * torch.randn(50, A, generator=torch.Generator().manual_seed(4)))
    obs = observations(policy.spec, 3)
    done = policy.act(obs, torch.Generator().manual_seed(0), False).actions
    assert torch.allclose(plain_chunks(policy, obs, torch.Generator().manual_seed(0)), done, atol=1e-5)


RUN = {
    "sim": "mujoco",
    "task": "pick_by_name",
    "obs": "rgb",
    "image_size": 32,
    "envs": 2,
    "demos": "2",
    "demos_most": 0,
    "eval_episodes": 2,
    "eval_envs": 2,
    "video": False,
    "bc": {"updates": 2, "batch": 8, "noises": 1},
}
RL = {"batch": 8, "warmup": 40, "pretrain": 2, "utd": 0.2}


def config(algo, kind="pi05", policy=None, rl=None, **more):
    return robo_rl.recipe(
        **{**RUN, **more}, algo=algo, workers=0, policy={"kind": kind, **(policy or {})}, rl=RL | (rl or {})
    )


def test_the_recipe_of_a_method_says_what_acts_on_a_trunk():
    assert config("dsrl").policy.steer_row
    assert not robo_rl.recipe(task="reach", algo="dsrl", preset="quick").policy.steer_row
    assert {algo: config(algo).policy.acts for algo in ACTING} == {
        "expo": "guided",
        "pa_rl": "guided",
        "dsrl": "steered",
        "demo_flow": "guided",
        "hil_serl": "squashed",
        "aloe": "flow",
        "iql": "flow",
    }


@pytest.mark.parametrize(
    ("algo", "kind", "more", "line"),
    [
        (
            "expo",
            "pi0_fast",
            {},
            "expo needs --policy.kind guided or pi0, pi05, smolvla, .* with --policy.actor guided, got "
            "pi0_fast",
        ),
        (
            "hil_serl",
            "openvla_oft",
            {},
            "hil_serl needs --policy.kind squashed or pi0, .* --policy.actor squashed, got openvla_oft",
        ),
        ("aloe", "pi05", {"actor": "guided"}, "aloe needs --policy.actor own, got guided"),
        ("expo", "pi05", {"dtype": "bf16"}, "16 bits round away: --policy.dtype fp32"),
    ],
)
def test_a_method_refuses_what_does_not_act_as_it_needs(algo, kind, more, line):
    policy = make_policy(PolicyOptions(kind=kind, **SMALL | ACTING[algo] | more), SPEC, 0)
    with pytest.raises(UserError, match=line):
        learner(policy, algo)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"rl": {"judge": "classifier"}},
            "--rl.judge classifier looks at what the trunk makes .* --policy.keep-prefix alone",
        ),
        ({"rl": {"synthetic": 0.5}}, "instructions in text leave it out"),
    ],
)
def test_options_that_do_not_go_with_it_are_one_line(more, line):
    with pytest.raises(UserError, match=line):
        check(config("hil_serl", **more), None)


def test_replay_that_will_not_fit_into_memory_is_refused_with_what_makes_it_smaller():
    small, kept = build("pi05", "aloe"), build("pi05", "aloe", keep_prefix=True)
    many = config("aloe", steps=10**10, rl={"capacity": 10**9})
    check_memory(config("aloe", steps=100), kept)
    with pytest.raises(
        UserError,
        match=r"replay of 1,000,000,000 control steps takes 6,?236.0 GB \(6 kB each\).*a smaller "
        r"--image-size",
    ):
        check_memory(many, small)
    with pytest.raises(UserError, match="leave --policy.keep-prefix out"):
        check_memory(many, kept)


# ---- whole runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "kind", "more"),
    [
        ("expo", "pi05", {}),
        ("pa_rl", "smolvla", {"keep_prefix": True}),
        ("dsrl", "smolvla", {}),
        ("demo_flow", "smolvla", {}),
        ("hil_serl", "pi0", {}),
        ("aloe", "xvla", {}),
        ("iql", "pi05", {"keep_prefix": True}),
    ],
)
def test_a_run_on_a_trunk_resumes_bit_for_bit_is_evaluated_and_served(algo, kind, more, tmp_path):
    made = replace(config(algo, kind, more), steps=160, eval_every=80, out=str(tmp_path / "whole"))
    train_whole_and_in_parts(made, tmp_path)
    check_parts(made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["expo", "hil_serl"])
def test_a_supervised_model_goes_on_under_a_method_of_replay_and_back_with_an_actor_beside_it(algo, tmp_path):
    taught = robo_rl.recipe(
        **RUN, algo="bc", policy={"kind": "pi05", "horizon": 4, "execute": 4}, out=str(tmp_path / "bc")
    )
    robo_rl.train(taught, quiet=True)
    begun = robo_rl.recipe(
        **RUN | {"bc": {}},
        algo=algo,
        init=str(tmp_path / "bc"),
        workers=1,
        steps=120,
        eval_every=120,
        rl=RL,
        out=str(tmp_path / "rl"),
    )
    robo_rl.train(begun, quiet=True)
    from robo_rl.checkpoint import checkpoints, load_policy

    first, last = (load_policy(checkpoints(tmp_path / name)[-1])[0] for name in ("bc", "rl"))
    assert last.options.acts == ("guided" if algo == "expo" else "squashed")
    trunk = first.state_dict()
    assert all(
        torch.equal(v, trunk[k])
        for k, v in last.state_dict().items()
        if k.startswith(("trunk.", "processor."))
    )
    if algo == "expo":
        back = robo_rl.recipe(
            **RUN | {"bc": {}},
            algo="pi_rl",
            init=str(tmp_path / "rl"),
            workers=0,
            steps=64,
            eval_every=64,
            rl={"decisions": 2, "minibatch": 4, "epochs": 1},
            out=str(tmp_path / "back"),
        )
        robo_rl.train(back, quiet=True)
        assert load_policy(checkpoints(tmp_path / "back")[-1])[0].options.acts == "flow"
