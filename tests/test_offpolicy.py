"""Methods that learn from replay: critics and densities by definition, methods equal in their degenerate
cases."""

import copy
import importlib
import math

import numpy as np
import pytest
import torch
from torch import nn
from toys import PointReach

from robo_rl.algos import aloe, calql, demo_flow, demo_sac, dsrl, expo, hil_serl, iql, pa_rl, rlpd, wsrl
from robo_rl.algos.offpolicy import CriticLearner, cql_penalty, polyak, td_loss, td_target, tensors
from robo_rl.demos import record
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.options import (
    AloeOptions,
    CalQlOptions,
    DemoFlowOptions,
    DemoSacOptions,
    DsrlOptions,
    ExpoOptions,
    HilSerlOptions,
    IqlOptions,
    PaRlOptions,
    PolicyOptions,
    RlpdOptions,
    WsrlOptions,
)
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.context import Context
from robo_rl.policies.offpolicy import (
    Ensemble,
    climb,
    flow_samples,
    gripper_label,
    gripper_options,
    gumbel,
    squash,
)
from robo_rl.replay import EXPERT, Mixture, Replay
from robo_rl.replay_collector import ReplayCollector
from robo_rl.starts import eval_starts

E, A, S = 2, 2, 4
SPEC = ObsSpec(state=S, action=A)
GRIP = ObsSpec(state=S, action=A, action_names=("x", "gripper"))
NET = {"critics": 3, "critic_hidden": 16, "critic_layers": 2}
SMALL = {"horizon": E, "execute": E, "hidden": 16, "layers": 2}
RL = dict(batch=32, **NET)
METHODS = {
    "rlpd": ({"kind": "squashed"}, RlpdOptions(**RL, actor_every=2)),
    "demo_sac": ({"kind": "squashed"}, DemoSacOptions(**RL)),
    "hil_serl": ({"kind": "squashed", "gripper": "toggle"}, HilSerlOptions(**RL)),
    "calql": ({"kind": "squashed"}, CalQlOptions(**RL)),
    "wsrl": ({"kind": "squashed"}, WsrlOptions(**RL, demo_share=0.0)),
    "expo": (dict(kind="guided", edit_scale=0.2, candidates=3, **NET), ExpoOptions(**RL)),
    "pa_rl": (
        dict(kind="guided", local_steps=2, candidates=4, keep=2, **NET),
        PaRlOptions(**RL, cql_alpha=0.1),
    ),
    "dsrl": (dict(kind="steered", init_std=1.0, **NET), DsrlOptions(**RL, average=0.1)),
    "demo_flow": (dict(kind="guided", candidates=1, **NET), DemoFlowOptions(**RL, average=0.1)),
    "iql": ({}, IqlOptions(**RL)),
    "aloe": ({}, AloeOptions(**RL)),
}


def build(name: str, spec: ObsSpec = SPEC, policy: "dict | None" = None, options=None, seed: int = 0):
    policy_options, rl = METHODS[name]
    made = make_policy(PolicyOptions(**SMALL | policy_options | (policy or {})), spec, seed)
    return importlib.import_module(f"robo_rl.algos.{name}").make(made, options or rl, seed)


def filled(n: int = 300, seed: int = 0, execute: int = E) -> Replay:
    """Random steps; every tenth ends its episode, in turns by its own rule and by time."""
    rng = np.random.default_rng(seed)
    r = Replay({"state": ((S,), np.float32)}, A, execute, 0.9, 4 * n, 1)
    lane = np.zeros(1, np.int64)
    for t in range(n):
        over = t % 10 == 9
        r.add(
            lane,
            {"state": rng.standard_normal((1, S))},
            rng.uniform(-1, 1, (1, A)),
            np.array([float(over)]),
            np.array([over and t % 20 == 9]),
            EXPERT if t % 20 < 10 else 0,
        )
        if over:
            r.close(lane, {"state": rng.standard_normal((1, S))})
    return r


def batch(learner, n: int = 32, seed: int = 0, execute: int = E):
    return tensors(learner.policy, filled(execute=execute).sample(n, np.random.default_rng(seed)))


# ---- critics, densities, the gripper


@pytest.mark.parametrize("norm", [True, False])
def test_an_ensemble_is_as_many_separate_networks(norm):
    q = Ensemble(5, 3, 8, 2, 4, norm)
    context, actions = torch.randn(7, 5), torch.randn(7, 6, 3)
    with torch.no_grad():
        for p in [*q.gains, *q.shifts, *q.biases, q.out_bias]:
            p.add_(0.1 * torch.randn_like(p))
    some = torch.tensor([3, 1])
    assert torch.allclose(q(context, actions[:, 0], some), q(context, actions[:, 0])[some], atol=1e-6)
    assert torch.allclose(q.many(context, actions, some), q.many(context, actions)[some], atol=1e-6)
    for i in range(4):
        layers: list[nn.Module] = []
        for k, (a, b) in enumerate([(8, 8), (8, 8)]):
            linear = nn.Linear(a, b)
            linear.weight.data, linear.bias.data = q.weights[k][i].t().detach(), q.biases[k][i, 0].detach()
            layers.append(linear)
            if norm:
                ln = nn.LayerNorm(b)
                ln.weight.data, ln.bias.data = q.gains[k][i, 0].detach(), q.shifts[k][i, 0].detach()
                layers.append(ln)
            layers.append(nn.ReLU())
        out = nn.Linear(8, 1)
        out.weight.data, out.bias.data = q.out[i].t().detach(), q.out_bias[i, 0].detach()
        net = nn.Sequential(*layers, out)
        alone = net(torch.cat([context, actions[:, 0]], 1)).squeeze(1)
        torch.testing.assert_close(q(context, actions[:, 0])[i], alone)
    many = q.many(context, actions)
    for m in range(6):
        torch.testing.assert_close(many[..., m], q(context, actions[:, m]))


def test_the_squashed_density_integrates_to_one_and_is_torchs():
    mean, log_std = torch.tensor([[0.4]]), torch.tensor([[-0.3]])
    u = torch.linspace(-9, 9, 20001)[:, None]
    a, logp = squash(u, mean, log_std)
    area = torch.trapezoid(logp.double().exp(), a[:, 0].double())
    assert abs(float(area) - 1) < 1e-3
    theirs = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.transforms.TanhTransform()
    )
    inside = u.abs()[:, 0] < 4
    torch.testing.assert_close(logp[inside], theirs.log_prob(a[inside])[:, 0], atol=1e-3, rtol=1e-3)


def test_an_edit_scaled_by_beta_has_its_density_divided_by_beta_to_the_d():
    mean, log_std, beta = torch.tensor([[0.2]]), torch.tensor([[-0.5]]), 0.25
    a, logp = squash(torch.linspace(-9, 9, 20001)[:, None], mean, log_std)
    density = (logp - math.log(beta)).double().exp()  # of beta * a
    assert abs(float(torch.trapezoid(density, (beta * a)[:, 0].double())) - 1) < 1e-3


@pytest.mark.parametrize("execute", [1, 2, 5])
def test_every_gripper_sequence_that_changes_once_at_most_has_one_option(execute):
    options = gripper_options(execute)
    assert len({tuple(o.tolist()) for o in options}) == len(options) == 2 * execute
    assert gripper_label(options).tolist() == list(range(2 * execute))
    many = gripper_label(torch.tensor([[1.0, -1.0, 1.0]]))  # up to its first change
    assert gripper_options(3)[many].tolist() == [[1.0, -1.0, -1.0]]


def test_changes_of_the_gripper_count_the_step_before_if_there_was_one():
    commands = torch.tensor([[1.0, 1.0, -1.0]] * 3)
    assert hil_serl.changes(commands, torch.tensor([1.0, -1.0, 0.0])).tolist() == [1, 2, 1]


def test_the_target_ends_where_the_episode_terminated_and_stays_in_what_returns_can_be():
    learner = build("rlpd")
    rows = batch(learner, 3)
    rows.rewards, rows.discounts = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.0, 0.81, 0.9])
    rows.bound, v = torch.tensor([1.0, 0.6, -math.inf]), torch.tensor([7.0, 0.5, 3.0])
    torch.testing.assert_close(td_target(rows, v, RlpdOptions()), torch.tensor([1.0, 0.405, 3.2]))
    torch.testing.assert_close(
        td_target(rows, v, RlpdOptions(max_target=1.0)), torch.tensor([1.0, 0.405, 1.0])
    )
    torch.testing.assert_close(
        td_target(rows, v, RlpdOptions(max_target=1.0, floor=True)), torch.tensor([1.0, 0.6, 1.0])
    )
    assert float(td_loss(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 2.0]))) == 2.0


def test_the_target_takes_the_least_of_a_random_subset():
    policy = make_policy(PolicyOptions(**SMALL), SPEC, 0)
    learner = CriticLearner(policy, A, RlpdOptions(**RL | {"critics": 6}, subset=2), 0)
    g = torch.Generator().manual_seed(3)
    context, action = torch.randn(9, S), torch.randn(9, A)
    got = learner.least(context, action, g)
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(3))[:2]
    assert torch.equal(got, learner.target(context, action)[rows].min(0).values)
    assert len({tuple(sorted(learner.subset(g).tolist())) for _ in range(60)}) == 15  # every pair turns up


def test_polyak_moves_the_share_tau():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    want = 0.9 * a.weight + 0.1 * b.weight
    polyak(a, b, 0.1)
    torch.testing.assert_close(a.weight, want)


def test_calql_without_a_bound_is_cql_and_with_one_pushes_no_lower():
    q, box, data, logp = torch.randn(2, 5, 3), torch.randn(2, 5, 3), torch.randn(2, 5), torch.randn(5, 3)
    none = torch.full((5,), -math.inf)
    terms = torch.cat([q / 0.5 - logp, box / 0.5 + 4 * math.log(2)], -1)
    plain = (0.5 * (torch.logsumexp(terms, -1) - math.log(6)) - data).mean()
    torch.testing.assert_close(cql_penalty(q, logp, box, data, none, 4, 0.5), plain)
    q.requires_grad_(True)
    (slope,) = torch.autograd.grad(cql_penalty(q, logp, box, data, torch.full((5,), 50.0), 4, 0.5), q)
    assert not slope.any()  # what lies below the return of the data is left alone


def test_calqls_soft_maximum_is_over_the_box_whatever_the_policy_that_samples_it():
    """T log of the integral of exp(Q / T) over [-1, 1]^2, Q = -|a|^2 / 2: the sum of a grid, from policies
    near and far."""

    def value(a):
        return -0.5 * a.square().sum(-1)

    t, m, line = 0.2, 20_000, torch.linspace(-1, 1, 801)
    cell = float(line[1] - line[0]) ** 2
    want = t * torch.log((value(torch.cartesian_prod(line, line)) / t).exp().sum() * cell)
    generator = torch.Generator().manual_seed(0)
    for mean, std in ((0.0, 0.3), (0.5, 0.5)):
        u = mean + std * torch.randn(m, 2, generator=generator)
        actions, logp = squash(u, torch.full((2,), mean), torch.full((2,), std).log())
        box = torch.rand(m, 2, generator=generator) * 2 - 1
        got = cql_penalty(
            value(actions)[None, None],
            logp[None],
            value(box)[None, None],
            torch.zeros(1, 1),
            torch.full((1,), -math.inf),
            2,
            t,
        )
        assert abs(float(got - want)) < 0.01, (mean, std)


def test_calql_pushes_down_what_the_policy_does_and_not_the_whole_box():
    """A chunk of 16 entries, a policy as narrow as the preset's, and critics that think 0.5 more of what it
    does than of anything else: the gradient is on the policy's actions (at T = 1 it is 1e-8 of that on
    uniform ones), unless the data's return was more."""
    d, b, m = 16, 64, 8
    head = torch.zeros(b, d), torch.full((b, d), math.log(0.1))
    u = head[0][:, None] + 0.1 * torch.randn(b, m, d, generator=torch.Generator().manual_seed(0))
    _, logp = squash(u, head[0][:, None], head[1][:, None])
    q = torch.full((1, b, m), 0.7, requires_grad=True)
    box = torch.full((1, b, m), 0.2, requires_grad=True)

    def shares(bound, t):
        loss = cql_penalty(q, logp, box, torch.zeros(1, b), torch.full((b,), bound), d, t)
        mine, others = torch.autograd.grad(loss, (q, box))
        return float(mine.sum()), float(others.sum())

    mine, others = shares(-math.inf, CalQlOptions().cql_temperature)
    assert mine > 0.99 and others < 0.01
    assert shares(-math.inf, 1.0)[0] < 1e-5  # what it was
    assert shares(0.6, CalQlOptions().cql_temperature)[0] > 0.99  # above what is known to be reachable: down
    # below it: left alone
    assert shares(0.8, CalQlOptions().cql_temperature) == (0, pytest.approx(0, abs=1e-6))


# ---- methods in their degenerate cases


def test_rlpd_without_demonstrations_layer_norm_and_ensemble_is_sac():
    """Two critics, both in the minimum, entropy in the target: y and both losses as Haarnoja et al. write
    them."""
    options = RlpdOptions(
        batch=32,
        critics=2,
        subset=2,
        critic_hidden=16,
        layer_norm=False,
        entropy_backup=True,
        alpha=0.2,
        max_grad_norm=1e6,
    )
    learner = build("rlpd", options=options)
    rows, g = batch(learner), learner.generator.get_state()
    policy, q1 = copy.deepcopy(learner.policy), copy.deepcopy(learner.critics.critic)
    target = copy.deepcopy(learner.critics.target)
    step = learner.critic_step(rows)
    noise = torch.Generator()
    noise.set_state(g)
    with torch.no_grad():
        mean, log_std = policy.actor(rows.next_context.pooled)
        u = mean + log_std.exp() * torch.randn(mean.shape, generator=noise)
        a, logp = torch.tanh(u), torch.distributions.Normal(mean, log_std.exp()).log_prob(u).sum(1)
        logp = logp - torch.log(1 - a.square() + 1e-12).sum(1)
        y = rows.rewards + rows.discounts * (target(rows.next_context.pooled, a).min(0).values - 0.2 * logp)
    loss = ((q1(rows.context.pooled, rows.flat) - y) ** 2).mean()
    torch.testing.assert_close(step["critic_loss"], loss.detach(), atol=1e-5, rtol=1e-5)
    assert not any(p.requires_grad for p in learner.critics.target.parameters())
    before = [p.detach().clone() for p in learner.critics.params]
    learner.actor_step(rows)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.critics.params, strict=False))
    assert all(p.requires_grad for p in learner.critics.params)


def test_rlpd_is_the_papers_update_twenty_of_ten_critics_and_one_of_the_actor():
    """Against separate networks, torch's Adam and the equations of the paper: least of two critics drawn
    anew, layer norm, the mean of all ten for the actor, entropy -> -D/2 by the temperature."""
    options = RlpdOptions(batch=32, critic_hidden=16)
    assert (options.critics, options.subset, options.utd, options.actor_every, options.demo_share) == (
        10,
        2,
        20,
        20,
        0.5,
    )
    learner = build("rlpd", options=options)
    actor, log_alpha = copy.deepcopy(learner.policy.actor), torch.zeros((), requires_grad=True)
    ours = learner.critics.critic
    nets = [separate(ours, i) for i in range(10)]
    slow = copy.deepcopy(nets)
    params = [p for net in nets for p in net.parameters()]
    opts = (
        torch.optim.Adam(params, 3e-4),
        torch.optim.Adam(actor.parameters(), 3e-4),
        torch.optim.Adam([log_alpha], 3e-4),
    )
    noise = torch.Generator()
    noise.set_state(learner.generator.get_state())
    store, d = filled(), E * A

    def drawn(x):
        mean, log_std = actor(x)
        u = mean + log_std.exp() * torch.randn(mean.shape, generator=noise)
        gauss = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
        return torch.tanh(u), (gauss - 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))).sum(1)

    rng = np.random.default_rng(3)
    batches = [store.sample(32, rng) for _ in range(40)]
    for i, b in enumerate(batches):
        rows = tensors(learner.policy, b)
        with torch.no_grad():
            a, logp = drawn(rows.next_context.pooled)
            x = torch.cat([rows.next_context.pooled, a], 1)
            two = torch.randperm(10, generator=noise)[:2].tolist()
            v = torch.minimum(*(slow[j](x)[:, 0] for j in two)) - log_alpha.exp() * logp
            y = rows.rewards + rows.discounts * v
        x = torch.cat([rows.context.pooled, rows.flat], 1)
        opts[0].zero_grad()
        (torch.stack([(net(x)[:, 0] - y).square().mean() for net in nets]).mean()).backward()
        opts[0].step()
        with torch.no_grad():
            for p, q in zip(params, [p for net in slow for p in net.parameters()], strict=True):
                q.lerp_(p, 0.005)
        if (i + 1) % 20 == 0:
            a, logp = drawn(rows.context.pooled)
            q = torch.stack([net(torch.cat([rows.context.pooled, a], 1))[:, 0] for net in nets]).mean(0)
            opts[1].zero_grad()
            (log_alpha.exp().detach() * logp - q).mean().backward()
            opts[1].step()
            opts[2].zero_grad()
            (-log_alpha.exp() * (logp.detach().mean() - d / 2)).backward()
            opts[2].step()
    feed = iter(batches)
    learner.update(lambda n: next(feed), 40)
    for p, q in zip(learner.policy.actor.parameters(), actor.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-3)
    alpha = float(log_alpha.detach().exp())
    assert float(learner.alpha.value) == pytest.approx(alpha, rel=1e-5) and alpha != 1
    for i in range(10):
        for p, q in zip(separate(learner.critics.target, i).parameters(), slow[i].parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-3)


def separate(q: Ensemble, i: int) -> nn.Sequential:
    """Critic i of an ensemble with layer norm as a network of its own."""
    layers: list[nn.Module] = []
    for k, w in enumerate(q.weights):
        linear = nn.Linear(w.shape[1], w.shape[2])
        linear.weight.data, linear.bias.data = w[i].t().detach().clone(), q.biases[k][i, 0].detach().clone()
        norm = nn.LayerNorm(w.shape[2])
        norm.weight.data, norm.bias.data = (
            q.gains[k][i, 0].detach().clone(),
            q.shifts[k][i, 0].detach().clone(),
        )
        layers += [linear, norm, nn.ReLU()]
    out = nn.Linear(q.out.shape[1], 1)
    out.weight.data, out.bias.data = q.out[i].t().detach().clone(), q.out_bias[i, 0].detach().clone()
    return nn.Sequential(*layers, out)


def test_rlpd_refuses_what_the_paper_does_not_have_and_names_the_method_that_has_it():
    for options in ({"bc_coef": 1.0}, {"max_target": 1.0}, {"floor": True}):
        with pytest.raises(UserError, match="demo_sac"):
            build("rlpd", options=RlpdOptions(**RL, **options))
    with pytest.raises(UserError, match="demo_sac"):
        build("rlpd", policy=dict(teacher=True, **NET))


@pytest.mark.parametrize("name", ["demo_sac", "hil_serl"])
def test_with_a_teacher_the_better_of_two_acts_and_makes_the_target(name):
    """a' = argmax over the teacher's and the actor's action of the least critic (IBRL, eq. 3 and 4)."""
    options = (DemoSacOptions if name == "demo_sac" else HilSerlOptions)(**RL | {"critics": 2}, subset=2)
    learner = build(name, GRIP, METHODS[name][0] | dict(teacher=True, **NET | {"critics": 2}), options)
    policy, rows = learner.policy, batch(learner)
    assert torch.equal(policy.teacher[0].net[0].weight, policy.actor.net[0].weight)
    with torch.no_grad():
        policy.actor.net[-1].bias.add_(1.0)  # it has learnt something else
    own = policy.commands_of(torch.tanh(policy.actor(rows.context.pooled)[0]), rows.context)
    old = policy.commands_of(
        torch.tanh(policy.teacher[0](rows.context.pooled)[0]), rows.context, policy.teacher[-1]
    )
    q = torch.stack([policy.judge(rows.context.pooled, a.flatten(1)).min(0).values for a in (own, old)])
    assert 0 < (q[0] >= q[1]).sum() < len(own)  # both turn up
    want = torch.where((q[0] >= q[1])[:, None, None], own, old)
    assert torch.equal(policy.act(rows.obs, learner.generator, explore=False).actions, want)

    g, target = learner.generator.get_state(), copy.deepcopy(policy.judge)
    actor = copy.deepcopy(policy)
    step = learner.critic_step(rows)
    noise = torch.Generator()
    noise.set_state(g)
    with torch.no_grad():
        seen = rows.next_context
        own = actor.commands_of(actor.actor.sample(seen.pooled, noise)[0], seen)
        old = actor.commands_of(torch.tanh(actor.teacher[0](seen.pooled)[0]), seen, actor.teacher[-1])
        v = torch.maximum(*(target(seen.pooled, a.flatten(1)).min(0).values for a in (own, old)))
    torch.testing.assert_close(step["q_target"], (rows.rewards + rows.discounts * v).mean())
    before = copy.deepcopy(policy.teacher.state_dict())
    learner.actor_step(rows)
    assert all(torch.equal(v, before[k]) for k, v in policy.teacher.state_dict().items())
    again = make_policy(policy.options, policy.spec, 5)
    again.load_state_dict(policy.state_dict())
    assert again.taught and all(torch.equal(v, before[k]) for k, v in again.teacher.state_dict().items())


def test_an_actor_may_begin_slowly_and_goes_on_at_its_pace_after_a_checkpoint():
    a, b = (build("demo_sac", options=DemoSacOptions(**RL, lr=1e-3, ramp=4)) for _ in range(2))
    rows, paces = batch(a), []
    for i in range(6):
        a.actor_step(rows)
        paces.append(a.actor_opt.param_groups[0]["lr"])
        if i == 1:
            b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert paces == [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3]
    b.actor_step(rows)
    assert b.actor_opt.param_groups[0]["lr"] == 7.5e-4


@pytest.mark.parametrize("name", ["demo_sac", "hil_serl", "calql"])
def test_the_average_follows_each_update_of_the_actor_and_what_learns_does_not_heed_it(name):
    kind = {"demo_sac": DemoSacOptions, "hil_serl": HilSerlOptions, "calql": CalQlOptions}[name]
    a, plain = (build(name, options=kind(**RL, average=share)) for share in (0.25, 0.0))
    assert plain.average is None and a.average is not None
    rows, mean = batch(a), [p.detach().clone() for p in a.actor_params]
    for _ in range(3):
        a.actor_step(rows)
        plain.actor_step(rows)
        mean = [0.75 * m + 0.25 * p.detach() for m, p in zip(mean, a.actor_params, strict=True)]
    for want, got in zip(mean, a.average.mean, strict=True):
        torch.testing.assert_close(got, want)
    assert all(torch.equal(x, y) for x, y in zip(a.actor_params, plain.actor_params, strict=True))
    assert any(not torch.equal(x, y) for x, y in zip(a.actor_params, a.average.mean, strict=True))


@pytest.mark.parametrize(
    ("imitate", "led_to", "held"),
    [("taught", 1.0, False), ("success", 1.0, True), ("success", 0.0, False), ("success", -math.inf, False)],
)
def test_an_actor_is_held_near_its_own_chunks_only_if_asked_and_if_they_led_to_a_success(
    imitate, led_to, held
):
    def loss(change: float, source: int) -> float:
        learner = build("demo_sac", options=DemoSacOptions(**RL, bc_coef=3.0, imitate=imitate))
        rows = batch(learner)
        mine = rows.source == source
        assert mine.any() and not mine.all()
        rows.bound[rows.source == 0] = led_to
        rows.actions[mine] *= change
        return float(learner.actor_step(rows)["actor_loss"])

    assert (loss(1.0, 0) != loss(0.5, 0)) == held
    assert loss(1.0, EXPERT) != loss(0.5, EXPERT)


def test_before_a_learner_takes_it_up_a_policy_with_a_teacher_acts_alone():
    plain = make_policy(PolicyOptions(**SMALL, kind="squashed"), SPEC, 0)
    policy = make_policy(PolicyOptions(**SMALL, kind="squashed", teacher=True, **NET), SPEC, 0)
    policy.actor.load_state_dict(plain.actor.state_dict())
    obs = {"state": torch.randn(5, S)}
    for explore in (False, True):
        got = [p.act(obs, torch.Generator().manual_seed(1), explore).actions for p in (plain, policy)]
        assert torch.equal(*got)


def test_hil_serl_without_a_gripper_is_demo_sac():
    a, b = (
        build("demo_sac"),
        build("hil_serl", policy={"gripper": "continuous"}, options=HilSerlOptions(**RL)),
    )
    for i in range(4):
        rows = batch(a, seed=i)
        for learner in (a, b):
            learner.critic_step(rows)
            learner.actor_step(rows)
    assert all(torch.equal(p, q) for p, q in zip(a.policy.parameters(), b.policy.parameters(), strict=True))


def test_the_gripper_learns_by_double_dqn_with_the_cost_of_changing():
    learner = build("hil_serl", GRIP, options=HilSerlOptions(**RL, grasp_penalty=0.3))
    rows = batch(learner)
    policy, target = copy.deepcopy(learner.policy), copy.deepcopy(learner.grasp_target)
    with torch.no_grad():
        target[-1].bias.add_(torch.randn(2 * E))
        learner.grasp_target.load_state_dict(target.state_dict())
        commands = rows.actions[..., 1]
        best = policy.grasp(rows.next_context.pooled).argmax(1)
        y = rows.rewards + rows.discounts * target(rows.next_context.pooled)[torch.arange(32), best]
        y = y - 0.3 * hil_serl.changes(commands, rows.before[:, 1])
        want = (
            (policy.grasp(rows.context.pooled)[torch.arange(32), gripper_label(commands)] - y).square().mean()
        )
    torch.testing.assert_close(learner.grasp_step(rows)["grasp_loss"], want)


def test_a_policy_with_a_discrete_gripper_commands_a_sequence_and_moves_freely():
    policy = build("hil_serl", GRIP).policy
    actions = policy.act({"state": torch.randn(50, S)}, torch.Generator().manual_seed(0), True).actions
    assert (
        set(actions[..., 1].unique().tolist()) <= {-1.0, 1.0} and actions[..., 0].unique().numel() == 50 * E
    )
    assert actions.shape == (50, E, A)


def test_expo_with_one_sample_and_no_edit_judges_the_flow():
    learner = build("expo", policy={"edit_scale": 0.0, "candidates": 1})
    rows, state = batch(learner), learner.generator.get_state()
    subset = learner.critics.subset(learner.generator)
    target, q = copy.deepcopy(learner.critics.target), copy.deepcopy(learner.critics.critic)
    a = flow_samples(learner.policy, rows.next_context, 1, learner.generator, learner.head)[:, 0]
    y = rows.rewards + rows.discounts * target(rows.next_context.pooled, a)[subset].min(0).values
    learner.generator.set_state(state)
    torch.testing.assert_close(
        learner.critic_step(rows)["critic_loss"], td_loss(q(rows.context.pooled, rows.flat), y).detach()
    )


def test_expo_with_edits_of_no_reach_is_best_of_n():
    learner = build("expo", policy={"edit_scale": 1e-9, "candidates": 5})
    context, g = Context(torch.randn(20, S)), torch.Generator().manual_seed(0)
    chosen, value = learner.policy.choose(context, g)
    plain = flow_samples(learner.policy, context, 5, torch.Generator().manual_seed(0))
    q = learner.policy.judge.many(context.pooled, plain).mean(0)
    torch.testing.assert_close(value, q.max(1).values)
    torch.testing.assert_close(chosen, plain[torch.arange(20), q.argmax(1)], atol=1e-6, rtol=0)


def test_the_first_sample_of_a_narrow_spread_is_the_same_whatever_the_noise_and_the_rest_lie_around_it():
    policy, context = build("expo", policy={"spread": 0.1}).policy, Context(torch.randn(9, S))
    one, two = (policy.flow(context, 3, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(one[:, 0], two[:, 0]) and not torch.equal(one[:, 1], two[:, 1])
    wide = flow_samples(policy, context, 3, torch.Generator().manual_seed(0))
    assert ((one[:, 1] - one[:, 0]).norm(dim=1) < 0.5 * (wide[:, 1] - one[:, 0]).norm(dim=1)).all()


def test_the_warm_up_plays_what_critics_will_choose_among_and_is_judged_as_the_plain_flow():
    policy, obs = build("expo", policy={"spread": 0.5}).policy, {"state": torch.randn(300, S)}
    found = policy.proposals(policy.encode(obs), torch.Generator().manual_seed(3))
    played = policy.act(obs, torch.Generator().manual_seed(3), True).actions.flatten(1)
    hit = (found - played[:, None]).abs().amax(-1) == 0
    assert hit.any(1).all() and hit.any(0).all()
    still = policy.act(obs, torch.Generator().manual_seed(3), False).actions.flatten(1)
    assert torch.equal(still, found[:, 0])


def test_the_choice_does_not_depend_on_the_order_of_candidates():
    judge, context, found = Ensemble(S, 4, 16, 2, 3), torch.randn(9, S), torch.randn(9, 7, 4)
    order = torch.randperm(7)
    a, b = judge.many(context, found).mean(0), judge.many(context, found[:, order]).mean(0)
    assert torch.equal(found[torch.arange(9), a.argmax(1)], found[:, order][torch.arange(9), b.argmax(1)])


def test_expos_edits_leave_flow_and_critics_alone_and_its_acting_flow_follows_slowly():
    learner = build("expo")
    rows = batch(learner)
    loss, _ = learner.edit_loss(rows)
    loss.backward()
    assert all(
        p.grad is None
        for p in [*learner.head_params, *learner.critics.params, *learner.policy.head.parameters()]
    )
    assert any(p.grad is not None and p.grad.any() for p in learner.edit_params)
    before, fast = learner.policy.head.out.weight.clone(), learner.head.out.weight.clone()
    learner.actor_step(rows)
    assert not torch.equal(learner.head.out.weight, fast)
    torch.testing.assert_close(learner.policy.head.out.weight, before.lerp(learner.head.out.weight, 0.001))


class Bowl(nn.Module):
    """Q = -|a - goal|^2 for every critic."""

    def __init__(self, goal: torch.Tensor):
        super().__init__()
        self.goal = nn.Parameter(goal)

    def many(self, context, actions):
        return -(actions - self.goal).square().sum(-1)[None]


def test_optimised_actions_begin_at_the_nearest_candidate_move_to_the_best_and_stay_in_the_box():
    bowl, found = Bowl(torch.tensor([0.5, 2.0])), torch.rand(6, 9, 2) * 2 - 1
    near = found[torch.arange(6), bowl.many(None, found)[0].argmax(1)]
    none = climb(bowl, torch.zeros(6, 1), found, 3, 0, 0.1)
    assert torch.equal(none[:, 0], near) and none.shape == (6, 3, 2)
    moved = climb(bowl, torch.zeros(6, 1), found, 3, 40, 0.1)
    assert moved.abs().max() <= 1 and bowl.goal.grad is None
    torch.testing.assert_close(moved, torch.tensor([0.5, 1.0]).expand_as(moved), atol=1e-3, rtol=0)
    # steps that overshoot: the best point on the way stays
    far = climb(bowl, torch.zeros(6, 1), found, 3, 5, 50.0)
    assert (bowl.many(None, far)[0] >= bowl.many(None, none)[0] - 1e-6).all()


def test_pa_rl_with_one_sample_and_no_steps_is_the_flow_with_td_under_it():
    learner = build("pa_rl", policy={"candidates": 1, "local_steps": 0, "keep": 1}, options=PaRlOptions(**RL))
    context = Context(torch.randn(11, S))
    a, _ = learner.policy.choose(context, torch.Generator().manual_seed(1))
    assert torch.equal(a, flow_samples(learner.policy, context, 1, torch.Generator().manual_seed(1))[:, 0])


def test_pa_rl_imitates_draws_of_the_softmax_of_values():
    q = torch.tensor([[0.0, 1.0, -1.0]]).expand(20_000, 3)
    drawn = (q + gumbel(q, torch.Generator().manual_seed(0))).argmax(1)
    share = torch.bincount(drawn) / len(drawn)
    torch.testing.assert_close(share, torch.softmax(q[0], 0), atol=0.015, rtol=0)


def test_pa_rl_imitates_what_is_known_to_have_led_to_more_than_any_candidate_promises():
    learner = build("pa_rl", policy={"softness": 0.01}, options=PaRlOptions(**RL, floor=True))
    rows = batch(learner)
    rows.bound = torch.where(torch.arange(32) < 16, torch.tensor(9.0), torch.tensor(-torch.inf))
    target, whole = learner.optimised(rows)
    mine = (target == rows.flat).all(1)
    assert mine[:16].all() and not mine[16:].all()
    assert torch.equal(whole[:16], rows.own[:16].float())


def test_nothing_of_pa_rls_critic_changes_when_the_flow_learns():
    learner = build("pa_rl")
    rows = batch(learner)
    before = [p.clone() for p in [*learner.critics.params, *learner.policy.judge.parameters()]]
    learner.actor_step(rows)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, [*learner.critics.params, *learner.policy.judge.parameters()], strict=False)
    )


def ode(policy, context, x):
    """Euler's steps of a flow policy from the noise x [B,D], as the page of the conventions has them."""
    k = policy.options.denoise_steps
    for i in range(k):
        t = torch.tensor(1 - i / k, dtype=x.dtype)
        [time] = policy.head.steps(policy.head.features(t[None]))
        x = x - policy.head(policy.head.embed(context), x, time) / k
    return policy.commands(x).clamp(-1, 1).flatten(1)


def test_a_steered_policy_is_the_plain_flow_until_rl_begins_and_then_the_flow_of_the_noise_that_is_chosen():
    policy, obs = build("dsrl").policy, {"state": torch.randn(9, S)}
    context = policy.encode(obs)
    played = policy.act(obs, torch.Generator().manual_seed(3), True).actions.flatten(1)
    plain = flow_samples(policy, context, 1, torch.Generator().manual_seed(3))[:, 0]
    torch.testing.assert_close(played, plain, atol=1e-5, rtol=0)
    policy.steered.fill_(True)
    nn.init.constant_(policy.steer.net[-1].bias[: policy.noise_size], 0.3)
    policy.steer.net[-1].bias.data[policy.noise_size :] = -5  # hardly random
    policy.steer.net[-1].weight.data.zero_()
    chosen = torch.full((9, policy.noise_size), 1.5 * math.tanh(0.3))
    done = policy.act(obs, torch.Generator().manual_seed(3), False).actions.flatten(1)
    torch.testing.assert_close(done, ode(policy, context, chosen), atol=0.03, rtol=0)


def test_one_row_of_noise_begins_every_step_of_a_chunk():
    policy = build("dsrl", policy={"steer_row": True, "steer_reach": 2.0}).policy
    assert policy.noise_size == A and policy.plain_noise(7, torch.Generator()).shape == (7, A)
    noise, context = torch.randn(5, A), Context(torch.randn(5, S))
    x = policy.begin(noise).view(5, E, A)
    assert (x == 2 * noise[:, None]).all()
    torch.testing.assert_close(policy.follow(context, noise), ode(policy, context, x.flatten(1)))
    assert policy.act({"state": torch.randn(5, S)}, torch.Generator(), True).actions.shape == (5, E, A)


@pytest.mark.parametrize("backup", [False, True])
def test_dsrls_critics_learn_what_the_flow_of_the_next_noise_is_worth(backup):
    """Algorithm 1: the target is at the end of the flow that begins at the next state's noise."""
    learner = build("dsrl", options=DsrlOptions(**RL, entropy_backup=backup, alpha=0.1, subset=3))
    rows, state = batch(learner), learner.generator.get_state()
    target, q = copy.deepcopy(learner.critics.target), copy.deepcopy(learner.critics.critic)
    noise, logp = learner.policy.steer.sample(rows.next_context.pooled, learner.generator)
    a = ode(learner.policy, rows.next_context, 1.5 * noise)
    v = target(rows.next_context.pooled, a).min(0).values - (0.1 * logp if backup else 0)
    learner.generator.set_state(state)
    torch.testing.assert_close(
        learner.critic_step(rows)["critic_loss"],
        td_loss(q(rows.context.pooled, rows.flat), rows.rewards + rows.discounts * v).detach(),
    )


def test_a_critic_of_noise_is_taught_what_the_critic_of_actions_says_of_the_flow():
    learner = build("dsrl")
    rows, state = batch(learner), learner.generator.get_state()
    noise = torch.randn(32, learner.policy.noise_size, generator=learner.generator) / 1.5
    a = ode(learner.policy, rows.context, 1.5 * noise)
    goal = learner.critics.critic(rows.context.pooled, a)
    want = (learner.noise(rows.context.pooled, noise) - goal).square().mean().detach()
    learner.generator.set_state(state)
    torch.testing.assert_close(learner.distil(rows)["noise_loss"], want)
    for p in learner.critics.params:
        assert p.grad is None, "the critic of actions is the teacher"


def test_the_slope_through_the_flow_is_that_of_the_critic_of_actions_by_the_chain_rule():
    learner = build("dsrl", options=DsrlOptions(**RL, slope="flow"))
    assert not hasattr(learner, "noise")
    rows, policy, critic = batch(learner), learner.policy, copy.deepcopy(learner.critics.critic).double()
    learner.actor_step(rows)
    policy.double()
    context = Context(rows.context.pooled.double())
    noise = torch.randn(32, policy.noise_size, dtype=torch.double).requires_grad_()
    [slope] = torch.autograd.grad(critic(context.pooled, policy.follow(context, noise)).mean(0).sum(), noise)
    step = 1e-6 * torch.randn_like(noise)
    with torch.no_grad():
        up, down = (critic(context.pooled, policy.follow(context, noise + s * step)).mean(0) for s in (1, -1))
    near = torch.isclose((slope * step).sum(1), (up - down) / 2, rtol=1e-4, atol=1e-12)
    assert near.float().mean() > 0.9 and slope.abs().sum() > 0  # but for kinks of ReLU and the box


def test_dsrl_says_so_where_noise_changes_nothing_and_there_is_nothing_to_choose():
    learner, store = build("dsrl"), filled()

    def told():
        return learner.doubt(lambda n: store.sample(n, np.random.default_rng(0)))

    assert told() == "", "a fresh flow makes of every noise another chunk"
    follow = learner.policy.follow  # a flow that one way was demonstrated to
    learner.policy.follow = lambda context, noise: torch.tanh(context.pooled) + 1e-4 * follow(context, noise)
    assert "dsrl has little to choose from" in told() and "(--algo demo_sac)" in told()


@pytest.mark.parametrize("slope", ["distilled", "flow"])
def test_dsrl_leaves_the_flow_and_all_else_that_supervision_taught_as_it_is(slope):
    learner = build("dsrl", options=DsrlOptions(**RL, slope=slope))
    learner.begin_online()
    before = {k: v.clone() for k, v in learner.policy.state_dict().items()}
    learner.update(lambda n: filled().sample(n, np.random.default_rng(0)), 4)
    moved = {k.split(".")[0] for k, v in learner.policy.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {"steer"}
    assert all(p.requires_grad and p.grad is None for p in learner.policy.head.parameters())


def test_the_paper_preset_of_dsrl_is_the_authors_robomimic_run():
    from robo_rl.experiment.recipes import recipe

    c = recipe("mujoco", "pick_cube", "dsrl", "state", "paper")
    assert (c.envs, c.policy.horizon, c.policy.execute, c.policy.steer_reach) == (4, 4, 4, 1.5)
    assert (c.policy.critic_hidden, c.policy.critic_layers, c.policy.denoise_steps) == (2048, 3, 8)
    r = c.rl
    assert (r.critics, r.subset, r.critic_hidden, r.critic_layers, r.layer_norm) == (2, 2, 2048, 3, True)
    assert (r.batch, r.lr, r.critic_lr, r.tau) == (256, 3e-4, 3e-4, 0.005)
    assert r.utd * c.envs == 20 and (r.actor_every, r.distil_every) == (1, 2)
    assert (r.alpha, r.target_entropy, r.entropy_backup, r.demo_share) == (1.0, 0.0, True, 0.0)
    assert math.isclose(r.gamma**4, 0.99, abs_tol=1e-4) and r.warmup == 1501 * 4 * 4
    assert (r.max_target, r.floor, r.pretrain, r.average) == (0.0, False, 0, 0.0)


def test_the_critics_of_demo_flow_learn_what_one_sample_of_the_flow_is_worth():
    learner = build("demo_flow", policy={"candidates": 5}, options=DemoFlowOptions(**RL, subset=2))
    rows, state = batch(learner), learner.generator.get_state()
    target, q = copy.deepcopy(learner.critics.target), copy.deepcopy(learner.critics.critic)
    noise = torch.randn(32, learner.policy.chunk, generator=learner.generator)
    a, subset = ode(learner.policy, rows.next_context, noise), learner.critics.subset(learner.generator)
    y = rows.rewards + rows.discounts * target(rows.next_context.pooled, a)[subset].min(0).values
    learner.generator.set_state(state)
    torch.testing.assert_close(
        learner.critic_step(rows)["critic_loss"], td_loss(q(rows.context.pooled, rows.flat), y).detach()
    )


def test_the_slope_of_demo_flow_is_that_of_the_critics_mean_through_every_step_of_the_flow():
    """Against central differences in the weights of the flow's last layer."""
    learner = build("demo_flow")
    rows, state = batch(learner), learner.generator.get_state()
    value = learner.value(rows)
    [slope] = torch.autograd.grad(value, learner.policy.head.out.weight)
    assert all(p.grad is None for p in learner.critics.params), "the critics do not learn from it"
    noise = torch.randn(32, learner.policy.chunk, generator=learner.generator.set_state(state)).double()
    policy, critic = copy.deepcopy(learner.policy).double(), copy.deepcopy(learner.critics.critic).double()
    context = Context(rows.context.pooled.double())

    @torch.no_grad()
    def q() -> torch.Tensor:
        return critic(context.pooled, ode(policy, context, noise)).mean(0)

    size = q().abs().mean().item()  # nothing is learnt of it
    assert value.item() == pytest.approx(q().mean().item() / size, rel=1e-4)
    step, ends = 1e-6 * torch.randn_like(policy.head.out.weight), []
    for sign in (1, -2):
        policy.head.out.weight.data.add_(sign * step)
        ends.append(q().mean().item())
    assert (slope * step).sum().item() == pytest.approx((ends[0] - ends[1]) / 2 / size, rel=1e-3)


def test_demo_flow_whose_critic_weighs_nothing_is_the_imitation_of_expo():
    """Their flows make the same step, to the bit, on what is demonstrated and what succeeded."""
    ours = build("demo_flow", options=DemoFlowOptions(**RL, eta=0.0))
    theirs = build("expo", policy={"edit_scale": 0.0}, options=ExpoOptions(**RL, slow=0.1))
    for learner in (ours, theirs):
        learner.actor_step(batch(learner))
    assert all(torch.equal(a, b) for a, b in zip(ours.head_params, theirs.head_params, strict=True))


def test_demo_flow_keeps_an_average_of_its_flow_and_explores_around_what_it_does():
    learner = build("demo_flow", policy={"explore_std": 0.05})
    policy, obs = learner.policy, {"state": torch.randn(500, S)}
    before = policy.head.out.weight.clone()
    learner.actor_step(batch(learner))
    after = policy.head.out.weight.clone()
    assert not torch.equal(after, before)
    with learner.average.shown():
        torch.testing.assert_close(policy.head.out.weight, before.lerp(after, 0.1))
    learner.begin_online()
    still = policy.act(obs, torch.Generator().manual_seed(1), False).actions
    tried = policy.act(obs, torch.Generator().manual_seed(1), True).actions
    inside = still.abs() < 0.8  # the box cuts nothing
    assert (tried - still)[inside].std().item() == pytest.approx(0.05, rel=0.1) and tried.abs().max() <= 1


def test_what_failed_is_imitated_only_where_all_is():
    one, two = (
        build("demo_flow", options=DemoFlowOptions(**RL, eta=0.0, imitate=how)) for how in ("success", "all")
    )
    for learner in (one, two):
        rows = batch(learner)
        rows.source.zero_()  # the policy's own
        rows.bound.fill_(-math.inf)  # and no return followed
        learner.actor_step(rows)
    fresh = build("demo_flow").head_params
    assert all(torch.equal(a, b) for a, b in zip(one.head_params, fresh, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(two.head_params, fresh, strict=True))


def test_the_expectile_of_one_half_is_the_mean_and_higher_ones_lean_to_the_best():
    u = torch.randn(1000)
    torch.testing.assert_close(iql.expectile_loss(u, 0.5), 0.5 * u.square().mean())
    x = torch.linspace(-3, 3, 6001)
    sample = torch.tensor([0.0, 1.0])
    best = [
        float(x[torch.stack([iql.expectile_loss(sample - v, tau) for v in x]).argmin()]) for tau in (0.5, 0.9)
    ]
    assert abs(best[0] - 0.5) < 1e-3 and abs(best[1] - 0.9) < 1e-3


@pytest.mark.parametrize("name", ["aloe", "iql"])
def test_without_advantages_weighted_flow_matching_is_flow_matching(name):
    learner = build(name, options=IqlOptions(**RL, beta=0.0) if name == "iql" else None)
    if name == "aloe":  # critics that know nothing
        with torch.no_grad():
            for p in learner.critics.target.parameters():
                p.zero_()
    rows, state = batch(learner), learner.generator.get_state()
    weighted = learner.actor_step(rows)["flow_loss"]
    other = build(name)
    other.generator.set_state(state)
    if name == "aloe":
        flow_samples(other.policy, rows.context, 4, other.generator)  # draws what V drew
    plain = other.policy.bc_loss(rows.obs, rows.actions, rows.own.float(), other.generator)
    torch.testing.assert_close(weighted, plain.detach())


def test_weights_are_capped_and_carry_no_gradient():
    adv = torch.tensor([-1.0, 0.0, 100.0], requires_grad=True)
    weight = iql.advantage_weight(adv, 2.0, 10.0)
    assert not weight.requires_grad
    torch.testing.assert_close(weight, torch.tensor([math.exp(-2), 1.0, 10.0]))


def test_weights_of_the_positive_part_are_those_of_drawing_rows_by_it():
    """A-LoL: rows are drawn with probability A+ / sum A+, so the mean of w l over all rows is the mean of l
    over draws."""
    adv, loss = torch.tensor([2.0, -1.0, 0.0, 6.0], requires_grad=True), torch.tensor([1.0, 5.0, 7.0, 3.0])
    weight = iql.positive_weight(adv, 100.0)
    assert not weight.requires_grad and weight.tolist() == [1.0, 0.0, 0.0, 3.0]
    assert float((weight * loss).mean()) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert (
        iql.positive_weight(adv, 2.0).tolist() == [1.0, 0.0, 0.0, 2.0]
        and not iql.positive_weight(-adv.abs(), 2.0).any()
    )
    learner = build("iql", options=IqlOptions(**RL, weighting="positive"))
    rows = batch(learner)
    told = learner.actor_step(rows)
    a = (learner.judged(rows) - learner.value(rows.context.pooled)).detach()
    assert float(told["weight"]) == pytest.approx(float(iql.positive_weight(a, 100.0).mean()), abs=1e-5)
    with pytest.raises(UserError, match="weighting"):
        IqlOptions(weighting="all")


def test_what_was_not_the_start_s_own_is_not_imitated():
    learner = build("aloe")
    rows = batch(learner)
    rows.own[:, 1] = False
    g = torch.Generator().manual_seed(5)
    a = learner.policy.imitation(rows.context, rows.actions, rows.own.float(), g)
    rows.actions[:, 1] = 0.77
    b = learner.policy.imitation(
        rows.context, rows.actions, rows.own.float(), torch.Generator().manual_seed(5)
    )
    # the noised chunk is an input too; with no weight on it nothing is left
    head = learner.policy.head.from_x.weight
    with torch.no_grad():
        head[:, A:] = 0
    c, d = (
        learner.policy.imitation(rows.context, x, rows.own.float(), torch.Generator().manual_seed(5))
        for x in (rows.actions, torch.cat([rows.actions[:, :1], -rows.actions[:, 1:]], 1))
    )
    assert torch.equal(c, d) and not torch.equal(a, b)


def test_wsrl_with_nothing_offline_is_sac_on_what_it_collected():
    a, b = build("demo_sac", options=DemoSacOptions(**RL, demo_share=0.0, target_entropy=1.0)), build("wsrl")
    b.begin_online()
    for i in range(3):
        rows = batch(a, seed=i)
        for learner in (a, b):
            learner.critic_step(rows)
            learner.actor_step(rows)
    assert all(torch.equal(p, q) for p, q in zip(a.policy.parameters(), b.policy.parameters(), strict=True))


def test_wsrl_switches_once_with_targets_as_the_critics_are_and_fresh_optimizers():
    learner = build("wsrl")
    learner.update(lambda n: filled().sample(n, np.random.default_rng(0)), 6)
    assert learner.critics.opt.state and learner.conservative
    learner.begin_online()
    assert not learner.critics.opt.state and not learner.conservative
    assert all(
        torch.equal(p, q)
        for p, q in zip(learner.critics.params, learner.critics.target.parameters(), strict=True)
    )
    learner.update(lambda n: filled().sample(n, np.random.default_rng(0)), 2)
    again = build("wsrl")
    again.load_state_dict(learner.state_dict())
    again.begin_online()
    assert again.critics.opt.state  # a run that resumes does not switch a second time


def test_aloes_critic_values_the_present_policy_and_not_who_made_the_data():
    """A chain of three: positive actions go on, the others end it with nothing; the last step pays 1. The
    data goes on nine times of ten, the policy every second time: Q(s_0, on) = 0.9^2 / 4 by dynamic
    programming, the data's return 0.66."""
    rng, gamma = np.random.default_rng(0), 0.9
    r = Replay({"state": ((3,), np.float32)}, 1, 1, gamma, 9000, 1)
    lane = np.zeros(1, np.int64)
    for _ in range(900):
        for s in range(3):
            on = rng.random() < 0.9
            r.add(
                lane,
                {"state": np.eye(3)[[s]]},
                np.array([[1.0 if on else -1.0]]) * rng.uniform(0.2, 1),
                np.array([float(on and s == 2)]),
                np.array([not on or s == 2]),
            )
            if not on or s == 2:
                r.close(lane, {"state": np.eye(3)[[s]]})
                break
    policy = make_policy(
        PolicyOptions(horizon=1, execute=1, hidden=8, layers=1), ObsSpec(state=3, action=1), 0
    )
    with torch.no_grad():  # no drift: the flow keeps its noise, half of it positive
        policy.head.out.weight.zero_()
    learner = aloe.make(
        policy,
        AloeOptions(batch=128, critics=2, subset=2, critic_hidden=32, critic_lr=3e-3, gamma=gamma, tau=0.02),
        0,
    )
    draws = np.random.default_rng(1)
    for i in range(700):
        if i == 500:
            learner.critics.opt.param_groups[0]["lr"] = 3e-4
        learner.critic_step(tensors(policy, r.sample(128, draws)))
    on = torch.full((3, 1), 0.6)
    q = learner.critics.critic(torch.eye(3), on).mean(0).tolist()
    assert abs(q[2] - 1) < 0.08 and abs(q[1] - 0.45) < 0.08 and abs(q[0] - 0.2025) < 0.08, q


# ---- laws that all of them obey


@pytest.mark.parametrize("name", METHODS)
def test_a_learner_resumed_makes_the_same_next_updates(name):
    spec = GRIP if name == "hil_serl" else SPEC
    store = filled()

    def draw(seed):
        rng = np.random.default_rng(seed)
        return lambda n: store.sample(n, rng)

    a = build(name, spec)
    a.update(draw(0), 4)
    a.begin_online()
    b = build(name, spec, seed=1)
    b.policy.load_state_dict(a.policy.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    ma, mb = a.update(draw(1), 4), b.update(draw(1), 4)
    assert ma == mb
    assert all(
        torch.equal(x, y)
        for x, y in zip(a.policy.state_dict().values(), b.policy.state_dict().values(), strict=True)
    )
    for learner in (a, b):
        learner.policy.eval()
    obs = {"state": torch.randn(5, S, generator=torch.Generator().manual_seed(0))}
    acts = [x.policy.act(obs, torch.Generator().manual_seed(1), False).actions for x in (a, b)]
    assert torch.equal(*acts) and acts[0].shape == (5, E, A)
    assert acts[0].abs().max() <= 1 or a.policy.options.kind == "flow"  # the env clips a plain flow


@pytest.mark.parametrize("name", METHODS)
def test_metrics_are_finite_and_the_actor_waits_in_the_offline_stage_unless_it_has_one(name):
    learner = build(name, GRIP if name == "hil_serl" else SPEC)
    store, rng = filled(), np.random.default_rng(0)
    actor = {
        k: v.clone() for k, v in learner.policy.state_dict().items() if "judge" not in k and "grasp" not in k
    }
    first = learner.update(lambda n: store.sample(n, rng), 4, actor=False)
    assert all(torch.equal(v, learner.policy.state_dict()[k]) for k, v in actor.items())
    both = learner.update(lambda n: store.sample(n, rng), 4)
    assert all(map(math.isfinite, [*first.values(), *both.values()])) and set(first) < set(both)


def test_every_batch_of_an_update_has_the_shares_asked_for():
    learner, demos, online = build("rlpd"), filled(40), filled(900)
    seen = []

    class Watch(Mixture):
        def sample(self, n, rng):
            seen.append(self.counts(n))
            return super().sample(n, rng)

    mixture, rng = Watch({"demonstrations": (demos, 0.5), "online": (online, 0.5)}), np.random.default_rng(0)
    learner.update(lambda n: mixture.sample(n, rng), 5)
    assert seen == [[16, 16]] * 5


def test_methods_refuse_policies_they_cannot_train():
    squashed, flow = (make_policy(PolicyOptions(**SMALL, kind=k), SPEC, 0) for k in ("squashed", "flow"))
    guided = make_policy(PolicyOptions(**SMALL, kind="guided", edit_scale=0.1, local_steps=1), SPEC, 0)
    climbs = make_policy(PolicyOptions(**SMALL, kind="guided", local_steps=1), SPEC, 0)
    for module, policy, options, word in (
        (rlpd, flow, RlpdOptions(), "squashed"),
        (demo_sac, flow, DemoSacOptions(), "squashed"),
        (hil_serl, flow, HilSerlOptions(), "squashed"),
        (calql, flow, CalQlOptions(), "squashed"),
        (wsrl, squashed, WsrlOptions(), "demo-share"),
        (expo, flow, ExpoOptions(), "guided"),
        (expo, guided, ExpoOptions(), "local-steps"),
        (pa_rl, guided, PaRlOptions(), "edit-scale"),
        (dsrl, flow, DsrlOptions(), "steered"),
        (demo_flow, flow, DemoFlowOptions(), "guided"),
        (demo_flow, guided, DemoFlowOptions(), "edit-scale must be 0"),
        (demo_flow, climbs, DemoFlowOptions(), "local-steps must be 0"),
        (iql, squashed, IqlOptions(), "flow"),
        (expo, guided, ExpoOptions(critics=3), "critics"),
        (aloe, squashed, AloeOptions(), "flow"),
    ):
        with pytest.raises(UserError, match=word):
            module.make(policy, options, 0)


# ---- learning

TOY = {
    "batch": 128,
    "critics": 3,
    "critic_hidden": 64,
    "gamma": 0.95,
    "max_target": 1.0,
    "floor": True,
    "warmup": 600,
    "critic_lr": 1e-3,
    "lr": 3e-4,
    "tau": 0.01,
}
HEADS = {"horizon": 2, "execute": 2, "hidden": 64, "layers": 2}
GUIDED = {"kind": "guided", "critics": 3, "critic_hidden": 64}
LEARNS = {
    "demo_sac": ({"kind": "squashed", "init_std": 0.5}, DemoSacOptions(**TOY)),
    "hil_serl": ({"kind": "squashed", "init_std": 0.5}, HilSerlOptions(**TOY)),
    "calql": ({"kind": "squashed", "init_std": 0.5}, CalQlOptions(**TOY)),
    "wsrl": ({"kind": "squashed", "init_std": 0.5}, WsrlOptions(**TOY, demo_share=0.0)),
    "expo": (dict(**GUIDED, edit_scale=0.3, candidates=4), ExpoOptions(**TOY, slow=0.01)),
    "pa_rl": (dict(**GUIDED, local_steps=5, local_rate=0.05, candidates=8, keep=4), PaRlOptions(**TOY)),
    "dsrl": ({"kind": "steered", "init_std": 1.0, "critic_hidden": 64}, DsrlOptions(**TOY)),
    "demo_flow": (dict(**GUIDED, candidates=1, explore_std=0.1), DemoFlowOptions(**TOY, eta=0.3)),
    "iql": ({}, IqlOptions(**TOY)),
    "aloe": ({}, AloeOptions(**TOY)),
}


def improve(
    name: str, seed: int, updates: int = 1200, envs: int = 16, limit: int = 12
) -> tuple[float, float]:
    """Six demonstrations, a weak supervised policy, then replay: success before and after on 200 starts."""
    from robo_rl.algos.offpolicy import OffPolicyLearner

    head, o = LEARNS[name]
    env, rows = PointReach(envs, limit), {"state": ((4,), np.float32)}
    policy = make_policy(PolicyOptions(**HEADS | head), SPEC, seed)
    demos, online = (Replay(rows, 2, 2, o.gamma, 60_000, envs) for _ in range(2))
    states, actions = [], []

    def keep(episode):
        lane, n = np.zeros(1, np.int64), len(episode.action)
        for t in range(n):
            demos.add(
                lane,
                {"state": episode.state[t : t + 1]},
                episode.action[t : t + 1],
                episode.reward[t : t + 1],
                np.array([t == n - 1]),
                EXPERT,
            )
        demos.close(lane, {"state": episode.state[-1:]})
        states.append(episode.state)
        actions.append(episode.action)

    record(PointReach(8, 20), 6, 0, keep)
    policy.obs_norm.fit(torch.from_numpy(np.concatenate(states)))
    policy.action_norm.fit(torch.from_numpy(np.concatenate(actions)), floor=0.05)
    opt, rng = torch.optim.Adam(policy.parameters(), 1e-3), np.random.default_rng(seed)
    for _ in range(60):
        b = tensors(policy, demos.sample(64, rng))
        opt.zero_grad()
        policy.bc_loss(
            b.obs, b.actions, b.own.float(), torch.Generator().manual_seed(int(rng.integers(1 << 30)))
        ).backward()
        opt.step()
    before = np.mean(evaluate(PointReach(200, limit), policy, eval_starts(200))["success"])
    learner: OffPolicyLearner = importlib.import_module(f"robo_rl.algos.{name}").make(policy, o, seed)
    learner.update(lambda n: demos.sample(n, rng), 200, actor=learner.offline_actor)
    learner.begin_online()
    collector = ReplayCollector(env, policy, online, demos, seed)
    collector.run(policy, -(-o.warmup // envs))
    mixture = Mixture({"demos": (demos, o.demo_share), "online": (online, 1 - o.demo_share)})
    made = 4 * envs // HEADS["execute"]  # UTD 1: as many updates as decisions
    for _ in range(-(-updates // made)):
        collector.run(policy, 4)
        learner.update(lambda n: mixture.sample(n, rng), made)
    after = np.mean(evaluate(PointReach(200, limit), policy, eval_starts(200))["success"])
    return before, after


UPDATES = {"wsrl": 2500}  # without demonstrations online, it first loses and then regains what it had


@pytest.mark.learning
@pytest.mark.timeout(1800)  # a busy machine
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", LEARNS)
def test_every_method_improves_a_weak_policy(name, seed):
    before, after = improve(name, seed, UPDATES.get(name, 1200))
    print(f"\n{name} seed {seed}: {before:.3f} -> {after:.3f}")
    assert after >= min(before + 0.2, 0.95), (before, after)
