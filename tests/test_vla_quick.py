"""Chunks as one launch are those of the plain policy: on a CPU without a graph, compiled or not."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vla_goldens import FAMILIES

from robo_rl.lora import adapted
from robo_rl.options import LoraOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import observations
from robo_rl.policies.context import Context
from robo_rl.policies.guided import plain_chunks
from robo_rl.policies.vla import quick
from robo_rl.policies.vla.blocks import attend
from robo_rl.policies.vla.quick import FEW, QuickChunks, fits

SPEC = ObsSpec(state=7, action=4, views=("front", "wrist"), image_size=32, language=True, text=64)


def made(kind: str, **options):
    return make_policy(PolicyOptions(kind=kind, horizon=6, execute=4, **options), SPEC, 0)


@pytest.mark.parametrize("rows", [1, 3, FEW + 2])
@pytest.mark.parametrize("kind", [*FAMILIES, "groot"])
def test_quick_chunks_are_the_plain_ones_but_for_rounding(kind, rows):
    policy, obs = made(kind), observations(SPEC, rows)
    chunks = QuickChunks(policy, most=16, compiled=False)
    assert chunks.sizes == [1, 4, 16]
    got = chunks(obs, torch.Generator().manual_seed(3))
    want = plain_chunks(policy, obs, torch.Generator().manual_seed(3))
    assert got.shape == want.shape and (got - want).abs().max() < 1e-4 * want.abs().max()
    with torch.no_grad():  # weights are read where they are
        for p in policy.head.parameters():
            p.mul_(1.1)
    moved = chunks(obs, torch.Generator().manual_seed(3))
    want = plain_chunks(policy, obs, torch.Generator().manual_seed(3))
    assert (moved - want).abs().max() < 1e-4 * want.abs().max() and (moved - got).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"recompute": True}], ids=str)
def test_adapters_and_other_options_are_acted_by_too(options):
    policy, obs = made("pi05", lora=LoraOptions(rank=4), **options), observations(SPEC, 2)
    with torch.no_grad():
        for layer in adapted(policy).values():
            layer.lora_B.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    got = QuickChunks(policy, most=4, compiled=False)(obs, torch.Generator().manual_seed(3))
    want = plain_chunks(policy, obs, torch.Generator().manual_seed(3))
    far = (got - want).norm() / want.norm()
    assert far < (0.02 if options.get("dtype") else 1e-4)
    without = plain_chunks(made("pi05", **options), obs, torch.Generator().manual_seed(3))
    assert (without - want).norm() > 0.05 * want.norm()


def test_more_observations_than_are_recorded_act_plainly():
    policy, obs = made("pi05"), observations(SPEC, 7)
    got = QuickChunks(policy, most=3, compiled=False)(obs, torch.Generator().manual_seed(3))
    assert torch.equal(got, plain_chunks(policy, obs, torch.Generator().manual_seed(3)))


def test_what_cannot_be_prepared_is_said_and_acts_plainly(monkeypatch):
    policy, obs, said = made("pi05"), observations(SPEC, 2), []
    monkeypatch.setattr(quick, "fits", lambda policy: True)

    def fails(self, obs, log):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(QuickChunks, "warm_up", fails)
    assert quick.chunks_of(policy, obs, 4, said.append) is None
    assert said == [
        f"without {what}: RuntimeError: no compiler" for what in ("compiled blocks", "one launch per chunk")
    ]


@pytest.mark.slow
def test_compiled_blocks_give_the_same_chunk_and_leave_the_policy_as_it_was():
    policy, obs = made("pi05"), observations(SPEC, 1)
    want = plain_chunks(policy, obs, torch.Generator().manual_seed(3))
    got = QuickChunks(policy, compiled=True)(obs, torch.Generator().manual_seed(3))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert all(block._compiled_call_impl is None for block in policy.modules())


def test_what_needs_more_than_one_launch_acts_plainly():
    assert not fits(made("pi05"))  # on a CPU
    assert not fits(make_policy(PolicyOptions(kind="flow"), ObsSpec(state=4, action=2), 0))


class Copies(TorchDispatchMode):
    """Counts operations that write a tensor anew without computing."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [1, 2, 8])
def test_attention_of_few_rows_is_attention_and_copies_nothing_of_one_key_head(kept):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 8, 16, generator=g)
    k, v = (torch.randn(2, 24, kept, 16, generator=g) for _ in range(2))
    mask = torch.rand(2, 1, 24, generator=g) > 0.3
    with Copies() as copies:
        got = quick.attend_few(q, k, v, mask)
    torch.testing.assert_close(got, attend(q, k, v, mask), atol=1e-5, rtol=1e-5)
    assert (copies.count == 0) == (kept == 1)


class PrefixCopies(TorchDispatchMode):
    """Counts the keys and values [n,P + L or more,M,d] that are put together."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.count = rows, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        joins = func in (torch.ops.aten.cat.default, torch.ops.aten.constant_pad_nd.default)
        self.count += joins and out.dim() == 4 and out.shape[1] >= self.rows
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_of_the_prefix_are_copied_once_a_chunk_and_not_once_a_step(dtype):
    policy = made("pi05")
    expert, g = policy.head.expert.to(dtype), torch.Generator().manual_seed(0)
    prefix, width = 21, expert.action_in.in_features
    shape = (2, prefix, 1, expert.head_dim)
    kv = tuple(
        (torch.randn(shape, generator=g).to(dtype), torch.randn(shape, generator=g).to(dtype))
        for _ in expert.layers
    )
    mask = torch.ones(2, prefix, dtype=torch.bool)
    context = Context(torch.zeros(2, 1), kv, mask, mask.sum(1), torch.zeros(2, 1))
    before = [x.clone() for pair in kv for x in pair]
    noise = torch.randn(2, 6 * width, generator=g)
    for steps in (2, 5):
        with torch.no_grad(), PrefixCopies(prefix + 6) as copies:
            times, plain = torch.linspace(1, 0.2, steps), [(1.0, -1 / steps)] * steps
            got = quick.pi_chain(expert, quick.pi_layer, context, noise, plain, times)
            assert copies.count == 2 * len(expert.layers)
            want = noise.view(2, 6, width)
            for (keep, step), time in zip(plain, times, strict=True):
                want = keep * want + step * expert(context, want, time.expand(2))
        far = (got - want.flatten(1)).norm() / want.norm()
        assert far < (0.02 if dtype == torch.bfloat16 else 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, (x for pair in kv for x in pair), strict=True))
