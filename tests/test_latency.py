"""Chunks in simulated real time, and chunks that are drawn to agree with what is left of the last."""

import numpy as np
import pytest
import torch

import sims
from controllers.chunking import Prefix
from controllers.schedule import guidance_gain, guided_velocity
from robo_rl.algos import bc
from robo_rl.checkpoint import save_checkpoint
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.evaluation import EvalConfig
from robo_rl.experiment.latency import evaluate_late, increments_of
from robo_rl.experiment.policy_server import Actor, actor_of, in_numpy
from robo_rl.experiment.recipes import begun
from robo_rl.options import BcOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.guided import committed_chunk, guided_chunk, plain_chunks
from robo_rl.policies.numpy_actor import NumpyActor
from robo_rl.policies.vla.blocks import lambda_mask, rotation, row_places, row_times, time_embedding

SPEC = ObsSpec(state=6, action=3, action_names=("a", "b", "c"))


def made(tmp_path, **options):
    policy = make_policy(
        PolicyOptions(**({"kind": "flow", "hidden": 32, "layers": 2, "horizon": 6, "execute": 3} | options)),
        SPEC,
        0,
    )
    with torch.no_grad():
        policy.head.out.weight.mul_(8.0)  # else an untrained chunk does not depend on its noise
        policy.action_norm.mean.copy_(torch.tensor([0.1, 0.0, -0.2]))
        policy.action_norm.std.copy_(torch.tensor([0.5, 0.4, 0.3]))
    save_checkpoint(tmp_path / "ckpt", policy, {}, {"step": 0, "best": {"step": -1}})
    return policy, NumpyActor.load(tmp_path / "ckpt")


@pytest.mark.parametrize("activation", ["relu", "silu", "tanh"])
@pytest.mark.parametrize("predict", ["velocity", "action"])
@pytest.mark.parametrize("residual", [False, True])
def test_numpy_and_torch_guide_a_chunk_alike_and_towards_the_prefix(tmp_path, activation, predict, residual):
    policy, actor = made(
        tmp_path, activation=activation, predict=predict, residual=residual, layers=3, denoise_steps=4
    )
    obs, rng = np.linspace(-1, 1, 6).astype(np.float32), np.random.default_rng(1)
    goal, weights = rng.uniform(-0.5, 0.5, (6, 3)), np.array([1, 1, 0.6, 0.2, 0, 0])
    gains = [guidance_gain(1 - k / 4) for k in range(4)]
    noise = torch.randn(1, 18, generator=torch.Generator().manual_seed(3))[0].numpy()
    tensors = {"state": torch.from_numpy(obs)[None]}
    ours = actor.act(obs, noise, rows=6, prefix=(goal, weights, gains))
    theirs = guided_chunk(policy, tensors, torch.Generator().manual_seed(3), goal, weights, gains).numpy()
    assert np.allclose(ours, theirs, atol=2e-4)
    plain = actor.act(obs, noise, rows=6)
    assert np.allclose(
        plain, plain_chunks(policy, tensors, torch.Generator().manual_seed(3))[0].numpy(), atol=1e-4
    )
    assert np.array_equal(plain[:3], actor.act(obs, noise))
    if predict == "velocity":
        assert np.abs(ours - goal)[:2].mean() < 0.7 * np.abs(plain - goal)[:2].mean()
    free = actor.act(obs, noise, rows=6, prefix=(goal, np.zeros(6), gains))
    assert np.allclose(free, plain, atol=1e-6)


def test_guidance_is_the_pure_functions_velocity_with_the_policys_own_vjp(tmp_path):
    policy, actor = made(tmp_path, denoise_steps=1)
    obs, goal, weights = np.zeros(6, np.float32), np.full((6, 3), 0.2), np.ones(6)
    noise = torch.randn(18, generator=torch.Generator().manual_seed(0)).numpy()
    norm = policy.action_norm
    y = ((goal - norm.mean.numpy()) / norm.std.numpy()).astype(np.float64)
    x = torch.from_numpy(noise)[None].requires_grad_()
    v = policy.velocity(policy.encode({"state": torch.zeros(1, 6)}), x.view(1, 6, 3), torch.ones(1)).flatten()
    # dv/dx
    jac = torch.stack([torch.autograd.grad(v[i], x, retain_graph=True)[0][0] for i in range(18)]).numpy()
    wanted = guided_velocity(
        v.detach().numpy().reshape(6, 3),
        noise.reshape(6, 3),
        1.0,
        y,
        weights,
        vjp=lambda p: (p.ravel() @ (np.eye(18) - jac)).reshape(6, 3),
    )
    got = actor.act(obs, noise, rows=6, prefix=(goal, weights, [guidance_gain(1.0)]))
    assert np.allclose((got - norm.mean.numpy()) / norm.std.numpy(), noise.reshape(6, 3) - wanted, atol=1e-3)


@pytest.mark.parametrize("predict", ["velocity", "action"])
def test_a_taught_policy_keeps_the_rows_that_are_given_and_numpy_and_torch_go_on_alike(tmp_path, predict):
    policy, actor = made(tmp_path, predict=predict, commit=4)
    obs, goal = (
        np.linspace(-1, 1, 6).astype(np.float32),
        np.random.default_rng(1).uniform(-0.5, 0.5, (6, 3)).astype(np.float32),
    )
    noise = torch.randn(1, 18, generator=torch.Generator().manual_seed(3))[0].numpy()
    tensors, plain = {"state": torch.from_numpy(obs)[None]}, actor.act(obs, noise, rows=6)
    for count in (0, 1, 4):
        ours = actor.act(obs, noise, rows=6, committed=(goal, count))
        theirs = committed_chunk(policy, tensors, torch.Generator().manual_seed(3), goal, count).numpy()
        assert np.allclose(ours, theirs, atol=1e-4) and np.allclose(ours[:count], goal[:count], atol=1e-6)
        assert (np.abs(ours - plain)[count:].max() > 0.01) == (count > 0)
    assert np.array_equal(plain, actor.act(obs, noise, rows=6))  # nothing of it stays
    for wrong, says in (
        ((goal, 5), "at most 4 rows given"),
        ((goal[:5], 2), "a prefix has 6 rows of 3 numbers"),
    ):
        with pytest.raises(UserError, match=says):
            actor.act(obs, noise, committed=wrong)
        with pytest.raises(UserError, match=says):
            committed_chunk(policy, tensors, torch.Generator(), *wrong)


@pytest.mark.parametrize("window", [0, 3])
def test_supervision_teaches_to_go_on_from_given_rows(window):
    """Chunks of two kinds, all up or all down, that the observation does not tell apart: the given row
    does."""
    policy = make_policy(
        PolicyOptions(
            kind="flow",
            hidden=64,
            layers=2,
            horizon=6,
            execute=3,
            commit=2,
            predict="action",
            window=window,
            weigh_errors=window > 0,
        ),
        SPEC,
        0,
    )
    g = torch.Generator().manual_seed(0)

    def sample(size, generator):
        sign = torch.randint(0, 2, (size, 1, 1), generator=generator) * 2.0 - 1
        return {"state": torch.zeros(size, 6)}, 0.5 * sign.expand(size, 6, 3), torch.ones(size, 6)

    bc.train(policy, sample, BcOptions(updates=500, batch=64, lr=4e-3, ema=0.9), 0)
    obs = {"state": torch.zeros(1, 6)}
    for sign in (-1, 1):
        for seed in range(6):
            rows = committed_chunk(
                policy, obs, g.manual_seed(seed), np.full((6, 3), 0.5 * sign, np.float32), 1
            )
            assert torch.allclose(rows, torch.full((6, 3), 0.5 * sign), atol=0.2)
    free = {int(plain_chunks(policy, obs, g.manual_seed(seed))[0].mean().sign()) for seed in range(12)}
    assert free == {-1, 1}


def test_a_policy_that_was_not_taught_refuses_given_rows(tmp_path):
    made(tmp_path)
    with pytest.raises(UserError, match="--chunking trained needs a policy that was taught"):
        Actor(3, 0, None, None, None).choose("trained")
    with pytest.raises(UserError, match="policy.commit goes with policy.kind flow"):
        PolicyOptions(kind="gaussian", commit=2)
    with pytest.raises(UserError, match="policy.commit"):
        PolicyOptions(horizon=4, execute=4, commit=4)


def test_inference_that_takes_more_rows_than_were_taught_is_said_once(capsys):
    asked = []
    actor = Actor(3, 2, None, None, lambda obs, rows, count: asked.append(count))
    for delay in (1, 3, 3):
        actor.choose("trained")({}, Prefix(np.zeros((6, 3)), delay, 5))
    assert asked == [1, 2, 2] and capsys.readouterr().err.count("at most 2 of them given") == 1


def test_only_flows_are_guided_and_only_by_chunks_of_their_shape(tmp_path):
    policy, actor = made(tmp_path)
    with pytest.raises(UserError, match="a prefix has 6 rows of 3 numbers"):
        actor.act(
            np.zeros(6, np.float32),
            rng=np.random.default_rng(0),
            prefix=(np.zeros((5, 3)), np.zeros(5), [0.0] * 4),
        )
    with pytest.raises(UserError, match="a prefix has 6 rows of 3 numbers"):
        guided_chunk(
            policy, {"state": torch.zeros(1, 6)}, torch.Generator(), np.zeros((6, 2)), np.zeros(6), [0.0] * 4
        )
    for kind in ("gaussian", "diffusion", "guided", "steered"):  # the last two act as critics have it
        options = PolicyOptions(kind=kind, hidden=16, layers=2, horizon=6, execute=3, critic_hidden=16)
        act = actor_of(make_policy(options, SPEC, 0), 0)
        with pytest.raises(UserError, match="guides flow policies alone"):
            act.choose("rtc")
        with pytest.raises(UserError, match="guides flow policies alone"):  # a client may ask all the same
            act({"state": np.zeros(6, np.float32)}, Prefix(np.zeros((6, 3)), 1, 5))


# ---- asynchronous execution behind a mask (Xiaomi-Robotics-0) ----------------------------------------------


def windowed(window, **options):
    return make_policy(
        PolicyOptions(
            **(
                {
                    "kind": "flow",
                    "hidden": 32,
                    "layers": 1,
                    "horizon": 8,
                    "execute": 4,
                    "commit": 3,
                    "window": window,
                }
                | options
            )
        ),
        SPEC,
        0,
    )


def test_the_mask_is_a_sink_and_a_band():
    assert lambda_mask(4, 2).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert lambda_mask(3, 2, sink=True).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    assert lambda_mask(5, 9).equal(torch.ones(5, 5).tril().bool())


def test_rows_that_are_not_given_stand_ten_places_further_back_and_given_ones_are_at_time_zero():
    given, t = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0] * 4]), torch.tensor([0.5, 0.7])
    assert row_places(torch.tensor([5, 2]), given, 4, 2).tolist() == [[5, 6, 17, 18], [12, 13, 14, 15]]
    assert row_places(torch.tensor([5]), given[:1], 4, 0).tolist() == [[5, 6, 7, 8]]
    times = row_times(t, given, 4, 8)
    assert torch.equal(times[0, :2], time_embedding(torch.zeros(2), 8)) and torch.equal(
        times[0, 2], time_embedding(t, 8)[0]
    )
    assert torch.equal(row_times(t, None, 4, 8)[:, 3], time_embedding(t, 8)) and torch.equal(
        times[1], row_times(t, None, 4, 8)[1]
    )
    policy = windowed(3)
    context, _ = policy.commit(policy.encode({"state": torch.zeros(2, 6)}), torch.tensor([0, 2]))
    places = torch.tensor([[0, *range(11, 19)], [0, 1, 2, *range(13, 19)]])
    assert torch.equal(policy.head.embed(context).turn, rotation(places, policy.head.head_dim))


def test_a_row_behind_the_window_does_not_see_the_rows_that_are_given_and_all_see_the_observation():
    policy = windowed(3)
    context, x = policy.encode({"state": torch.randn(1, 6)}), torch.randn(1, 8, 3)
    given, _ = policy.commit(context, torch.tensor([2]))

    def v(context, x):
        return policy.head(
            policy.head.embed(context), x.flatten(1), policy.head.time(torch.tensor([0.5]))
        ).view(8, 3)

    plain = v(given, x)
    for row in range(8):
        moved = x.clone()
        moved[0, row] += 1.0
        assert (v(given, moved) - plain).abs().amax(1).gt(1e-6).tolist() == [
            row <= h < row + 3 for h in range(8)
        ]
    other = policy.commit(policy.encode({"state": torch.randn(1, 6)}), torch.tensor([2]))[0]
    assert (v(other, x) - plain).abs().amax(1).gt(1e-4).all()


@pytest.mark.parametrize("window", [2, 8])
def test_supervision_with_a_window_and_no_row_given_is_plain_flow_matching(window):
    policy, plain = windowed(window), windowed(window, commit=0)
    plain.load_state_dict(policy.state_dict())
    obs, chunk, mask = {"state": torch.randn(5, 6)}, torch.randn(5, 8, 3), torch.ones(5, 8)
    none = policy.commit(policy.encode(obs), torch.zeros(5, dtype=torch.long))[0]
    g = torch.Generator()
    x, t = torch.randn(5, 24), torch.rand(5)
    with torch.no_grad():
        out = policy.head(policy.head.embed(none), x, policy.head.time(t))
        assert torch.equal(out, plain.velocity(plain.encode(obs), x.view(5, 8, 3), t).flatten(1))
        assert torch.isfinite(policy.bc_loss(obs, chunk, mask, g.manual_seed(0)))
        few = policy.act(obs, g.manual_seed(1), explore=False).x0
        assert torch.equal(few, plain.act(obs, g.manual_seed(1), explore=False).x0)


def test_supervision_counts_entries_by_their_error():
    policy = windowed(2, weigh_errors=True)
    same = windowed(2)
    same.load_state_dict(policy.state_dict())
    rows = {"state": torch.randn(5, 6)}, torch.randn(5, 8, 3), torch.ones(5, 8)
    assert policy.bc_loss(*rows, torch.Generator().manual_seed(0)) > same.bc_loss(
        *rows, torch.Generator().manual_seed(0)
    )


def test_a_window_is_for_flows_of_rows_and_runs_on_torch(tmp_path):
    for options, says in (
        ({"kind": "gaussian"}, "policy.window goes with policy.kind flow, pi0"),
        ({"hidden": 33}, "even policy.hidden"),
        ({"noise": "learned"}, "policy.noise sde or cps"),
        ({"window": 9}, "policy.window"),
        ({"kind": "pi0", "commit": 2, "commit_least": 1}, "go with policy.kind flow, got pi0"),
        ({"kind": "xvla", "window": 0, "weigh_errors": True}, "policy.weigh_errors goes with flow"),
    ):
        with pytest.raises(UserError, match=says):
            PolicyOptions(**({"window": 2, "horizon": 8, "execute": 4} | options))
    save_checkpoint(tmp_path / "ckpt", windowed(2), {}, {"step": 0, "best": {"step": -1}})
    learned = TrainConfig(task="reach", policy=PolicyOptions(noise="learned"))
    begins = begun(learned, tmp_path / "ckpt").policy  # RL whose recipe learns its noise
    assert (begins.window, begins.noise) == (2, "sde")
    with pytest.raises(UserError, match="no policy of --policy.window"):
        NumpyActor.load(tmp_path / "ckpt")
    spec = ObsSpec(state=6, action=3)
    assert not in_numpy({"kind": "flow", "window": 2}, spec) and in_numpy({"kind": "flow", "window": 0}, spec)


# ---- in simulated time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0.0, 0.2])
def test_a_chunk_comes_late_by_its_latency_and_what_was_missed_is_made_up(latency):
    env = sims.make("mujoco", "reach", num_envs=2)
    asked, axes = [], len(env.spec.axes)
    assert increments_of(env.spec)[:6].all() and not increments_of(env.spec)[6]

    def decide(obs, prefix=None):
        asked.append((obs["state"].copy(), prefix))
        rows = np.zeros((40, axes))
        rows[:, 0], rows[:, 6] = 0.2, 1.0
        if prefix is not None:
            rows[: prefix.end] = prefix.rows[: prefix.end]
        return rows

    out = evaluate_late(env, decide, 20, np.array([5, 6]), latency=latency, chunking="rtc")
    late = round(latency / env.spec.period)
    assert out["starved"] == [late] * 2 and len(out["success"]) == 2 and asked[0][1] is None
    prefixes = [p for _, p in asked if p is not None]
    assert prefixes and all(isinstance(p, Prefix) for p in prefixes) and prefixes[-1].delay == late
    assert np.allclose(prefixes[-1].rows[: prefixes[-1].end, 0], 0.2, atol=1e-6) or late
    # made up at whole actions, 1.0, then 0.2; chunks agree
    assert max(out["seam"]) < (0.81 if latency else 1e-6)
    env.close()


def test_each_env_of_a_task_with_several_instructions_has_its_own():
    env = sims.make("mujoco", "pick_by_name", num_envs=2)
    obs, _ = env.reset(seed=0)
    spec = ObsSpec(state=obs["state"].shape[1], action=len(env.spec.axes), language=True)
    policy = make_policy(
        PolicyOptions(hidden=16, layers=1, horizon=4, execute=2, denoise_steps=1), spec, seed=0
    )
    act, seen = actor_of(policy, 0).choose("naive"), set()

    def decide(obs, prefix=None):
        seen.add(str(obs["task"]))
        return act(obs)

    out = evaluate_late(env, decide, 2, np.arange(8), latency=0.0, chunking="naive")
    assert seen == set(out["task"]) and len(seen) > 1
    state = obs["state"][0]
    red, green = (
        actor_of(policy, 0).choose("naive")({"state": state, "task": f"pick up the {colour} cube"})
        for colour in ("red", "green")
    )
    assert np.abs(red - green).max() > 1e-5
    env.close()


def test_options_that_make_no_sense_are_named():
    for wrong, says in (
        ({"latency": 0.2}, "--latency needs --chunking"),
        ({"chunking": "rtx"}, "rtx"),
        ({"latency": -1.0}, "--latency"),
        ({"chunking": "rtc", "on": "dds"}, "simulated time"),
    ):
        with pytest.raises(UserError, match=says):
            EvalConfig(**wrong)
