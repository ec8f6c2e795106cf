import numpy as np
import pytest
import torch

from robo_rl.errors import UserError
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.context import Context
from robo_rl.policies.nets import ChunkHead, StateTrunk, time_features, tokenize
from robo_rl.sampling import chunk_logp

KINDS = {
    "flow-sde": {},
    "flow-cps": {"noise": "cps"},
    "flow-sde-all": {"noise_steps": "all"},
    "flow-noise": {"noise": "learned", "noise_steps": "all"},
    "flow-noise-one": {"noise": "learned"},
    "diffusion": {"kind": "diffusion", "denoise_steps": 5, "finetune_steps": 2},
    "diffusion-all": {"kind": "diffusion", "denoise_steps": 5, "finetune_steps": 5},
    "gaussian": {"kind": "gaussian"},
    "diffusion-floor": {
        "kind": "diffusion",
        "denoise_steps": 5,
        "finetune_steps": 2,
        "std_scale": 0.0,
        "std_floor": 0.2,
    },
    "mean-logp": {"logp_reduction": "mean"},
    "flow-last": {"noise_steps": "last"},
    "flow-noise-last": {"noise": "learned", "noise_steps": "last", "predict": "action"},
    "flow-action": {"predict": "action"},
    "flow-action-all": {"predict": "action", "noise": "learned", "noise_steps": "all"},
    "flow-residual": {"residual": True, "predict": "action", "noise": "learned", "layers": 3},
    "gaussian-residual": {"kind": "gaussian", "residual": True, "layers": 3},
    "diffusion-residual": {"kind": "diffusion", "denoise_steps": 5, "finetune_steps": 2, "residual": True},
    "diffusion-action": {"kind": "diffusion", "denoise_steps": 5, "finetune_steps": 2, "predict": "action"},
}


def build(kind="flow-sde", spec=None, **kw):
    options = PolicyOptions(**({"horizon": 6, "execute": 4, "hidden": 32, "layers": 2} | KINDS[kind] | kw))
    return make_policy(options, spec or ObsSpec(state=5, action=3), 0)


def draw(policy, n=64, seed=0):
    obs = {"state": torch.randn(n, policy.spec.state, generator=torch.Generator().manual_seed(9))}
    return obs, policy.act(obs, torch.Generator().manual_seed(seed), True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_give_the_stored_log_prob(kind):
    policy = build(kind)
    obs, chunk = draw(policy)
    logp, _ = policy.score(policy.encode(obs), chunk.trace)
    assert chunk.actions.shape == (64, 4, 3) and logp.shape == (64, policy.factors)
    assert float((logp - chunk.logp).abs().max()) < 1e-5


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_gaussians_log_prob_is_chunk_logp_over_the_executed_entries(reduction):
    policy = build("gaussian", logp_reduction=reduction)
    with torch.no_grad():
        policy.log_std.add_(0.3 * torch.randn_like(policy.log_std))
        x, mean = torch.randn(7, 18), torch.randn(7, 18)
        want = chunk_logp(
            x.view(7, 6, 3),
            mean.view(7, 6, 3),
            policy.log_std.exp().expand(7, 18).view(7, 6, 3),
            4,
            reduction,
        )
        assert torch.allclose(policy._density(x, mean), want, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_prob_gradient_is_the_finite_difference(kind):
    policy = build(kind).double()
    obs, chunk = draw(build(kind))
    trace = {k: v.double() if v.is_floating_point() else v for k, v in chunk.trace.items()}
    obs = {"state": obs["state"].double()}
    total = lambda: policy.score(policy.encode(obs), trace)[0].sum()  # noqa: E731
    param = policy.net[-1].bias if kind.startswith("gaussian") else policy.head.out.bias
    total().backward()
    for i in (0, 5):
        with torch.no_grad():
            param[i] += 1e-6
            up = float(total())
            param[i] -= 2e-6
            down = float(total())
            param[i] += 1e-6
        assert abs((up - down) / 2e-6 - float(param.grad[i])) < 1e-3 * max(1, abs(float(param.grad[i])))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_beyond_the_executed_ones_do_not_move_the_log_prob(kind):
    policy = build(kind)
    obs, chunk = draw(policy)
    before, _ = policy.score(policy.encode(obs), chunk.trace)
    other = {k: v.clone() for k, v in chunk.trace.items()}
    other["x_next"][..., 4 * 3 :] += 1.0
    after, _ = policy.score(policy.encode(obs), other)
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_chunk_and_another_seed_another(kind):
    policy = build(kind)
    assert torch.equal(draw(policy, seed=1)[1].actions, draw(policy, seed=1)[1].actions)
    assert not torch.equal(draw(policy, seed=1)[1].actions, draw(policy, seed=2)[1].actions)


def test_no_noise_level_makes_exploring_the_plain_ode():
    policy = build(noise_level=0.0, noise_steps="all")
    obs = {"state": torch.randn(8, 5)}
    explored = policy.act(obs, torch.Generator().manual_seed(3), True)
    plain = policy.act(obs, torch.Generator().manual_seed(3), False)
    assert torch.equal(explored.x0, plain.x0) and not explored.logp.any()


@pytest.mark.parametrize("noise_steps", ["one", "all"])
@pytest.mark.parametrize("level", [0.2, 1.0])
def test_cps_draws_only_steps_that_have_noise_and_its_entropy_is_finite(noise_steps, level):
    """Its std is t' sin(pi a/2): 0 at the last step, where t' = 0."""
    policy = build("flow-cps", noise_steps=noise_steps, noise_level=level)
    obs, chunk = draw(policy, n=400)
    if noise_steps == "one":
        assert sorted(chunk.trace["k"].unique().tolist()) == [0, 1, 2]
    logp, entropy = policy.score(policy.encode(obs), chunk.trace)
    mean_log_std = np.log([(1 - (k + 1) / 4) * np.sin(np.pi * level / 2) for k in range(3)])
    counts = np.bincount(chunk.trace["k"].flatten(), minlength=4)[:3]
    want = (mean_log_std * counts).sum() / counts.sum() + 0.5 * np.log(2 * np.pi * np.e)
    assert float(entropy) == pytest.approx(want, rel=1e-4)
    rows = []
    for i in range(8):  # every decision moves the weights
        policy.zero_grad()
        policy.score(
            policy.encode({"state": obs["state"][i : i + 1]}),
            {k: v[i : i + 1] for k, v in chunk.trace.items()},
        )[0].sum().backward()
        rows.append(float(policy.head.out.weight.grad.abs().max()))
    assert min(rows) > 0


@pytest.mark.parametrize(("noise", "step"), [("sde", 3), ("learned", 3), ("cps", 2)])
def test_noise_of_the_last_step_alone_is_at_the_last_step_that_has_noise(noise, step):
    policy = build(noise=noise, noise_steps="last", predict="action")
    obs, chunk = draw(policy)
    assert chunk.trace["k"].unique().tolist() == [step] and chunk.logp.shape == (64, 1)
    assert torch.allclose(policy.score(policy.encode(obs), chunk.trace)[0], chunk.logp, atol=1e-4)


def test_exploration_by_the_last_step_is_the_evaluated_chunk_and_noise_of_its_std():
    policy = build(noise="learned", noise_steps="last", predict="action", noise_min=0.2, noise_max=0.2)
    obs, loud = draw(policy, 4000)
    quiet = policy.act(obs, torch.Generator().manual_seed(0), False)
    off = loud.x0 - quiet.x0
    assert abs(float(off.std()) - 0.2) < 0.01 and abs(float(off.mean())) < 0.01


def test_a_chain_without_noise_has_no_entropy_and_no_gradient():
    policy = build(noise_level=0.0)
    obs, chunk = draw(policy)
    logp, entropy = policy.score(policy.encode(obs), chunk.trace)
    assert (
        float(entropy) == 0 and not logp.any() and sorted(chunk.trace["k"].unique().tolist()) == [0, 1, 2, 3]
    )


@pytest.mark.parametrize("predict", ["velocity", "action"])
def test_the_plain_chain_is_euler_integration_of_the_velocity(predict):
    policy = build(predict=predict)
    obs = {"state": torch.randn(8, 5)}
    x = torch.randn(8, 18, generator=torch.Generator().manual_seed(3)).view(8, 6, 3)
    with torch.no_grad():
        for k in range(4):
            x = x - 0.25 * policy.velocity(policy.encode(obs), x, torch.full((8,), 1 - k / 4))
    assert torch.allclose(policy.act(obs, torch.Generator().manual_seed(3), False).x0, x, atol=1e-5)


def test_the_split_first_layer_is_one_matrix_on_the_concatenation():
    head = ChunkHead(4, 6, 16, 1, "relu")
    context, x, t = torch.randn(9, 4), torch.randn(9, 6), torch.rand(9)
    whole = torch.cat([head.from_context.weight, head.from_x.weight], 1)
    hidden = torch.relu(
        torch.cat([context, x], 1) @ whole.T + head.from_context.bias + head.from_time(time_features(t))
    )
    assert torch.allclose(head(head.embed(Context(context)), x, head.time(t)), head.out(hidden), atol=1e-5)


def test_flow_noise_in_one_step_with_constant_std_is_a_gaussian_policy():
    """K=1: the chain is one Gaussian step around the ODE mean, so its log-prob is that Gaussian's."""
    policy = build("flow-noise", denoise_steps=1, noise_min=0.3, noise_max=0.3)
    obs, chunk = draw(policy)
    start = chunk.trace["x"][:, 0]
    with torch.no_grad():
        embedded = policy.head.embed(policy.encode(obs))
        mean = start - policy.head(embedded, start, policy.head.time(torch.ones(64)))
    x = chunk.trace["x_next"][:, 0]
    std = torch.full((64, 1, 1), 0.3)
    expected = chunk_logp(x.view(64, 6, 3), mean.view(64, 6, 3), std, 4, "sum")
    assert torch.allclose(chunk.logp[:, 0], expected, atol=1e-3)


def test_the_learned_std_stays_within_its_bounds():
    policy = build("flow-noise")
    with torch.no_grad():
        for p in policy.noise.parameters():
            p.mul_(50)
    embedded = torch.randn(200, 32) * 10
    std = policy.noise(embedded, torch.randn(32))
    assert float(std.min()) >= 0.08 - 1e-6 and float(std.max()) <= 0.16 + 1e-6 and float(std.std()) > 0.01


@pytest.mark.parametrize("kind", ["diffusion", "diffusion-all"])
def test_without_exploration_a_diffusion_chain_is_the_mean_of_the_steps_that_rl_trains(kind):
    policy = build(kind)
    policy.freeze_base()
    obs = {"state": torch.randn(8, 5)}
    context = policy.encode(obs)
    x = torch.randn(8, 18, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for k in range(5):
            head = policy.base if k < policy.first else policy.head
            x = policy._mean(x, head(head.embed(context), x, head.time(policy.times[k])), k, "loud")
    plain = policy.act(obs, torch.Generator().manual_seed(3), False)
    assert torch.allclose(plain.x0, x.view(8, 6, 3), atol=1e-5) and not policy.quiet_s.any()


def test_the_std_of_a_random_denoise_step_is_a_share_of_ddpms_with_a_floor():
    own = build("diffusion", std_floor=1e-9).loud_s
    for scale, floor in ((1.0, 0.1), (0.5, 0.1), (0.0, 0.2)):
        assert torch.allclose(
            build("diffusion", std_scale=scale, std_floor=floor).loud_s, (scale * own).clamp(min=floor)
        )


def test_without_ddpms_own_noise_exploration_stays_near_the_evaluated_chain():
    obs = {"state": torch.randn(8, 5)}

    def distance(**noise):
        policy = build("diffusion", **noise)
        loud, quiet = (
            policy.act(obs, torch.Generator().manual_seed(3), explore).x0 for explore in (True, False)
        )
        return float((loud - quiet).abs().max())

    assert distance(std_scale=0.0, std_floor=1e-6) < 1e-4
    assert distance(std_scale=1.0, std_floor=1e-6) > 0.1


def test_dppos_early_steps_run_on_the_frozen_base():
    policy = build("diffusion")
    policy.freeze_base()
    with torch.no_grad():
        for p in policy.head.parameters():
            p.add_(0.1 * torch.randn_like(p))
    obs, chunk = draw(policy)
    logp, _ = policy.score(policy.encode(obs), chunk.trace)
    logp.sum().backward()
    assert float((logp - chunk.logp).abs().max()) < 1e-4
    assert all(p.grad is None for p in policy.base.parameters())
    assert any(p.grad is not None for p in policy.head.parameters())


def test_flow_matching_learns_a_distribution_that_euler_steps_reproduce():
    torch.manual_seed(0)
    policy = build(hidden=64, spec=ObsSpec(state=1, action=1), horizon=1, execute=1, denoise_steps=20)
    opt = torch.optim.Adam(policy.parameters(), 2e-3)
    g = torch.Generator().manual_seed(0)
    for _ in range(600):
        sign = torch.randint(0, 2, (512, 1, 1), generator=g) * 2.0 - 1
        chunk = sign * 0.8 + 0.05 * torch.randn(512, 1, 1, generator=g)
        loss = policy.bc_loss({"state": torch.zeros(512, 1)}, chunk, torch.ones(512, 1), g)
        opt.zero_grad()
        loss.backward()
        opt.step()
    x = policy.act({"state": torch.zeros(2000, 1)}, g, False).actions.flatten()
    assert abs(float((x > 0).float().mean()) - 0.5) < 0.06
    assert abs(float(x.abs().mean()) - 0.8) < 0.08 and float((x.abs() < 0.4).float().mean()) < 0.08


def taught(predict, chunk_of, updates, kind="flow-sde", horizon=8, size=7):
    """A policy after `updates` steps on chunks `chunk_of(state [B,3], generator)`, and the generator."""
    torch.manual_seed(0)
    policy = build(
        kind,
        ObsSpec(state=3, action=size),
        hidden=128,
        layers=3,
        horizon=horizon,
        execute=horizon,
        predict=predict,
    )
    opt, g = torch.optim.Adam(policy.head.parameters(), 1e-3), torch.Generator().manual_seed(0)
    for _ in range(updates):
        state = torch.randn(256, 3, generator=g)
        loss = policy.bc_loss({"state": state}, chunk_of(state, g), torch.ones(256, horizon), g)
        opt.zero_grad()
        loss.backward()
        opt.step()
    policy.freeze_base()
    return policy, g


@pytest.mark.parametrize("kind", ["flow-sde", "diffusion"])
def test_a_network_that_predicts_actions_samples_closely_long_before_one_that_must_copy_noise(kind):
    way = torch.randn(3, 56, generator=torch.Generator().manual_seed(5)) / 3**0.5

    def chunk_of(state, g):
        return torch.tanh(state @ way).view(-1, 8, 7)

    error = {}
    for predict in ("velocity", "action"):
        policy, g = taught(predict, chunk_of, 150, kind)
        state = torch.randn(500, 3, generator=g)
        error[predict] = float(
            (policy.act({"state": state}, g, False).actions - chunk_of(state, g)).square().mean().sqrt()
        )
    assert error["action"] < 0.2 and error["velocity"] > 2 * error["action"], error


def test_a_network_that_predicts_actions_samples_both_modes_and_nothing_between():
    def chunk_of(state, g):
        return (torch.randint(0, 2, (len(state), 1, 1), generator=g) * 1.6 - 0.8).expand(-1, 4, 2)

    policy, g = taught("action", chunk_of, 600, horizon=4, size=2)
    x = policy.act({"state": torch.randn(2000, 3, generator=g)}, g, False).actions.mean((1, 2))
    assert 0.35 < float((x > 0).float().mean()) < 0.65 and float((x.abs() < 0.5).float().mean()) < 0.1


@pytest.mark.parametrize("kind", ["flow-sde", "diffusion", "flow-action"])
def test_several_noises_per_chunk_are_as_many_rows_with_one_each(kind):
    policy = build(kind=kind)
    rng = torch.Generator().manual_seed(0)
    spec, h = policy.spec, policy.options.horizon
    rows = [
        torch.randn(6, spec.state, generator=rng),
        torch.randn(6, h, spec.action, generator=rng).clamp(-1, 1),
        torch.ones(6, h),
    ]
    rows[2][0, 2:] = 0

    def loss(state, chunk, mask, **noises):
        return policy.bc_loss({"state": state}, chunk, mask, torch.Generator().manual_seed(3), **noises)

    assert torch.equal(loss(*rows, noises=5), loss(*(x.repeat_interleave(5, 0) for x in rows)))
    assert torch.equal(loss(*rows, noises=1), loss(*rows))


def test_the_vision_language_policy_hears_the_instruction_and_sees_the_image():
    spec = ObsSpec(state=5, action=3, views=("front",), image_size=32, language=True)
    policy = build(spec=spec, width=32, depth=1)
    obs = {
        "state": torch.zeros(2, 5),
        "tokens": torch.from_numpy(tokenize(["pick the red cube", "pick the blue cube"])),
        "image/front": torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
    }
    a = policy.encode(obs).pooled
    assert not torch.allclose(a[0], a[1])
    obs["image/front"] = obs["image/front"].clone()
    obs["image/front"][0] = 200
    assert not torch.allclose(policy.encode(obs).pooled[0], a[0])
    chunk = policy.act(obs, torch.Generator().manual_seed(0), True)
    logp, _ = policy.score(policy.encode(obs), chunk.trace)
    assert float((logp - chunk.logp).abs().max()) < 1e-4


def test_padding_words_do_not_change_what_is_heard():
    spec = ObsSpec(state=5, action=3, views=("front",), image_size=32, language=True)
    policy = build(spec=spec, width=32, depth=1)
    image = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    both = torch.from_numpy(tokenize(["reach", "pick the very small red cube now please"]))
    alone = policy.encode({"state": torch.zeros(1, 5), "tokens": both[:1], "image/front": image[:1]})
    mixed = policy.encode({"state": torch.zeros(2, 5), "tokens": both, "image/front": image})
    assert torch.allclose(alone.pooled[0], mixed.pooled[0], atol=1e-5)


def test_words_are_hashed_alike_everywhere_and_case_does_not_count():
    a = tokenize(np.array(["Pick the cube"]))
    assert a[0, 0] == tokenize(["pick"])[0, 0] and not a[0, 3:].any()


def test_bad_policy_options_say_what_is_allowed():
    for kw, text in (
        ({"execute": 9}, "execute"),
        ({"denoise_steps": 0}, "denoise_steps"),
        ({"noise_min": 0.0}, "noise_min"),
        ({"kind": "diffusion", "denoise_steps": 7}, "divide"),
        ({"noise_level": 9.0}, "noise_level"),
        ({"noise": "cps", "noise_level": 1.5}, r"noise_level \(of noise cps\) must be in \[0, 1\]"),
    ):
        with pytest.raises(UserError, match=text):
            PolicyOptions(**kw)


def test_an_instruction_scales_the_entries_of_a_state_beside_the_state_itself():
    trunk, state = StateTrunk(5, True), torch.randn(2, 5)
    tokens = torch.from_numpy(tokenize(["pick the red cube", "pick the blue cube"]))
    context = trunk(state, tokens, {})
    words = trunk.words.weight[tokens].sum(1)  # padding embeds as zero
    factor = words @ trunk.gate.weight.T + trunk.gate.bias
    assert context.shape[1] == trunk.size and torch.equal(context[:, :5], state)
    assert torch.allclose(context[:, 5:10], state * factor, atol=1e-5) and torch.allclose(
        context[:, 10:], words / 4, atol=1e-6
    )
    assert float((factor[0] - factor[1]).abs().min()) > 1e-3
