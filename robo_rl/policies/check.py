"""One contract suite for every policy: ours and the user's own. See `robo_rl.policies.policy.Policy` for the
contract.

`check_policy(lambda seed: make_policy(options, spec, seed), options, spec)` raises AssertionError with one
sentence that says what the policy does wrong, or returns the names of the parts that were checked. It takes
some ten forward passes.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from robo_rl.options import PolicyOptions
from robo_rl.policies.context import Context
from robo_rl.policies.policy import Chunk, Obs, ObsSpec, Policy, words_of

B = 5  # rows of the batches it is checked with
METHODS = ("encode", "act", "score", "bc_loss", "commands", "freeze_base")
VALUES = ("options", "spec", "factors", "noise_scale", "obs_norm", "action_norm", "trunk", "context_size")
FAR = 5.0  # median of actions in other units than an env's; diffusion begins with 3
CLOSE = 1e-4  # of log-probs in batches of another size, whose products may be summed in another order


def check_policy(
    make: Callable[[int], Policy], options: PolicyOptions, spec: ObsSpec, *, atol: float = 0.0
) -> tuple[str, ...]:
    """Check the policies that `make(seed)` gives -> the names of the parts checked.

    atol: how far `score` may be from the log-prob that `act` gave under the same weights (0: bit-equal, a
    ratio of exactly 1).
    """
    policy = make(0)
    parts = (_members, _weights, _acting, _evaluated, _ratio, _rows, _copy, _supervision)
    for part in parts:
        part(policy, make, options, spec, atol)
    return tuple(p.__name__[1:] for p in parts)


def observations(spec: ObsSpec, rows: int = B, seed: int = 0) -> Obs:
    """Random observations that fit `spec`."""
    g = torch.Generator().manual_seed(seed)
    out = {"state": torch.randn(rows, spec.state, generator=g)}
    if spec.language:
        out["tokens"] = torch.from_numpy(
            words_of(["pick up the cube", "open the drawer"] * rows, spec)[:rows]
        )
    for view in spec.views:
        out[f"image/{view}"] = torch.randint(
            0, 256, (rows, spec.image_size, spec.image_size, 3), generator=g, dtype=torch.uint8
        )
    return out


def _act(policy: Policy, obs: Obs, explore: bool = True, seed: int = 1) -> Chunk:
    return policy.act(obs, torch.Generator().manual_seed(seed), explore)


def _same(a: Tensor, b: Tensor, sentence: str, atol: float = 0.0) -> None:
    assert a.shape == b.shape, f"{sentence}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
    far = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    assert far <= atol, f"{sentence}: they differ by {far:.3g}"  # nan is not


def _shape(what: str, x, shape: tuple[int, ...]) -> None:
    assert isinstance(x, Tensor) and tuple(x.shape) == shape, (
        f"{what} must be a tensor of shape {shape}, got "
        f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
    )
    assert x.dtype.is_floating_point and bool(torch.isfinite(x).all()), f"{what} must be finite floats"


def _members(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    assert isinstance(policy, nn.Module), f"a policy must be a torch.nn.Module, got {type(policy).__name__}"
    for name in (*METHODS, *VALUES):
        assert hasattr(policy, name), (
            f"the policy lacks {name!r} (robo_rl.policies.policy.Policy lists what it must have)"
        )
    for method, what, count in (
        (policy.act, "act(obs, generator, explore)", 3),
        (policy.score, "score(context, trace)", 2),
        (policy.bc_loss, "bc_loss(obs, chunk, mask, generator, noises)", 5),
    ):
        try:
            inspect.signature(method).bind(*range(count))
        except TypeError as e:
            raise AssertionError(f"the policy must have the method {what}: {e}") from None
    assert policy.options == options and policy.spec == spec, (
        "policy.options and policy.spec must be those that it was made of"
    )
    assert isinstance(policy.factors, int) and policy.factors >= 1, (
        f"factors must be an int of at least 1, got {policy.factors!r}"
    )
    assert isinstance(policy.context_size, int), (
        f"context_size must be the width of encode's pooled vector, got {policy.context_size!r}"
    )
    try:
        float(policy.noise_scale)
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"noise_scale must be a number, got {policy.noise_scale!r}") from None


def _weights(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    again, other = make(0).state_dict(), make(1).state_dict()
    assert any(p.requires_grad for p in policy.parameters()), "the policy has no parameter to learn"
    for name, x in policy.state_dict().items():
        _same(x, again[name], f"the same seed must give the same weights ({name})")
    assert set(again) == set(other), "the names of the weights must not depend on the seed"


def _acting(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    obs, before = observations(spec), torch.get_rng_state()
    chunk, again = _act(policy, obs), _act(policy, obs)
    assert torch.equal(before, torch.get_rng_state()), (
        "act must draw from its generator alone, not from torch's global one, as dropout does"
    )
    assert isinstance(chunk, Chunk), (
        f"act must return a robo_rl.policies.policy.Chunk, got {type(chunk).__name__}"
    )
    _shape("actions of act", chunk.actions, (B, options.execute, spec.action))
    _shape("x0 of act", chunk.x0, (B, options.horizon, getattr(policy, "width", spec.action)))
    _shape("logp of act", chunk.logp, (B, policy.factors))
    assert isinstance(chunk.trace, dict) and chunk.trace, (
        "trace of act must be a dict of tensors, what score needs beside the context"
    )
    for name, x in chunk.trace.items():
        assert isinstance(x, Tensor) and len(x) == B, (
            f"trace[{name!r}] must be a tensor with one row per observation"
        )
        assert not x.requires_grad, (
            f"trace[{name!r}] must not carry gradients: act runs under torch.no_grad()"
        )
    assert not chunk.actions.requires_grad and not chunk.logp.requires_grad, (
        "act must run under torch.no_grad()"
    )
    _same(
        chunk.actions,
        again.actions,
        "the same generator must give the same actions (a policy keeps nothing from call to call: what it is "
        "to remember, the observation must have)",
    )
    assert not torch.equal(chunk.actions, _act(policy, obs, seed=2).actions), (
        "exploring must depend on the generator"
    )


def _evaluated(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    obs = observations(spec)
    chunk = _act(policy, obs, explore=False)
    _shape("actions of act(explore=False)", chunk.actions, (B, options.execute, spec.action))
    half = float(chunk.actions.abs().median())
    assert half <= FAR or spec.units, (
        f"actions of act must be in [-1, 1], as envs take them: half of them are beyond {half:.3g}, and envs "
        "cut them (are they in the robot's units?)"
    )
    assert tuple(chunk.logp.shape) == (B, 0) and not chunk.trace, (
        "act(explore=False) must give logp of shape [B,0] and no trace"
    )
    _same(
        chunk.actions,
        _act(policy, obs, explore=False).actions,
        "the same generator must give the same evaluated actions",
    )
    _same(chunk.actions, policy.commands(chunk.x0), "commands(x0) must be the actions of act")


def _ratio(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    obs = observations(spec)
    chunk = _act(policy, obs)
    context = policy.encode(obs)
    assert isinstance(context, Context), (
        f"encode must return a robo_rl.policies.context.Context, got {type(context).__name__}"
    )
    assert tuple(context.pooled.shape) == (B, policy.context_size), (
        f"pooled of encode must be [B, context_size], {(B, policy.context_size)}, got "
        f"{tuple(context.pooled.shape)}"
    )
    assert context.pooled.dtype != torch.float64, (
        "pooled of encode must be float32, as critics are, got float64: leave the weights in torch's default "
        "type"
    )
    columns = context.columns()
    try:
        again = policy.encode(columns).columns()
    except KeyError:  # it looked for the observation
        again = {}
    assert columns.keys() == again.keys() and all(again[k] is v for k, v in columns.items()), (
        "encode of a context's columns must be that context: `if 'context' in obs: return Context.of(obs)`"
    )
    scored = policy.score(context, chunk.trace)
    assert isinstance(scored, tuple) and len(scored) == 2, "score must return (logp [B,F], entropy)"
    logp, entropy = scored
    assert isinstance(entropy, Tensor) and entropy.dim() == 0, (
        "the entropy that score gives must be a scalar tensor"
    )
    _same(
        chunk.logp,
        logp.detach(),
        "the same weights must give the same log-prob, a ratio of exactly 1: let act and score call one "
        "function; act's logp and score's",
        atol,
    )
    assert logp.requires_grad, "score must be differentiable in the weights"
    logp.sum().backward()
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    assert grads and all(bool(torch.isfinite(g).all()) for g in grads), "the gradient of score must be finite"
    policy.zero_grad(set_to_none=True)


@torch.no_grad()
def _rows(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    obs = observations(spec)
    trace = _act(policy, obs).trace
    whole = policy.score(policy.encode(obs), trace)[0]
    part = policy.score(
        policy.encode({k: v[2:4] for k, v in obs.items()}), {k: v[2:4] for k, v in trace.items()}
    )[0]
    scale = float(whole.abs().max()) + 1
    _same(
        whole[2:4],
        part,
        "the log-prob of a row must not depend on the other rows of the batch",
        CLOSE * scale,
    )


@torch.no_grad()
def _copy(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    obs, other = observations(spec), make(1)
    policy.obs_norm.fit(torch.randn(50, spec.state, generator=torch.Generator().manual_seed(3)) * 2 + 1)
    other.load_state_dict(policy.state_dict())
    for explore in (True, False):
        _same(
            _act(policy, obs, explore).actions,
            _act(other, obs, explore).actions,
            "a policy that loads the state_dict of another must act as that does",
        )


def _supervision(policy: Policy, make, options: PolicyOptions, spec: ObsSpec, atol: float) -> None:
    chunk = torch.rand(B, options.horizon, spec.action, generator=torch.Generator().manual_seed(4)) * 2 - 1
    loss = policy.bc_loss(
        observations(spec), chunk, torch.ones(B, options.horizon), torch.Generator().manual_seed(5)
    )
    assert isinstance(loss, Tensor) and loss.dim() == 0 and bool(torch.isfinite(loss)), (
        "bc_loss must be a finite scalar tensor"
    )
    assert loss.requires_grad, "bc_loss must be differentiable in the weights"
