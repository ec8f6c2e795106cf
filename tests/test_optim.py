"""The optimizer against torch's own, bit for bit."""

import copy

import pytest
import torch

from robo_rl.optim import AdamW

KW = [
    {"lr": 1e-3, "eps": 1e-5, "weight_decay": 1e-2},
    {"lr": 3e-4, "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 1e-2, "betas": (0.8, 0.95)},
]


def params() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=g).requires_grad_() for s in ((7, 33), (33,), (), (2, 3, 5), (129,))]


def gradients(params, step: int) -> None:
    """Those of step `step`; now and then some parameter has none."""
    g = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=g) * 10.0 ** (i - 2)
        p.grad = None if (step + i) % 7 == 0 else grad


def walk(opt, params, steps) -> None:
    for step in steps:
        gradients(params, step)
        opt.param_groups[0]["lr"] = 1e-3 * (1 - step / 300)
        opt.step()


def torchs(params, kw, fused: bool):
    """torch.optim.AdamW, whose decay is 0.01 unless named."""
    return torch.optim.AdamW(
        params, **({"weight_decay": 0.0} | kw), fused=fused, foreach=None if fused else True
    )


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kw", KW, ids=str)
def test_a_hundred_steps_are_torchs_to_the_bit(kw, fused):
    mine, theirs = params(), params()
    walk(AdamW(mine, **kw, fused=fused), mine, range(100))
    walk(torchs(theirs, kw, fused), theirs, range(100))
    assert same(mine, theirs) and not same(mine, params())


def test_without_the_fused_kernel_and_decay_it_is_torchs_plain_adam():
    mine, theirs = params(), params()
    walk(AdamW(mine, 1e-3, fused=False), mine, range(100))
    walk(torch.optim.Adam(theirs, 1e-3), theirs, range(100))
    assert same(mine, theirs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kw", KW[:1], ids=str)
def test_either_goes_on_from_the_state_of_the_other(kw, fused):
    mine, theirs = params(), params()
    a, b = AdamW(mine, **kw, fused=fused), torchs(theirs, kw, fused)
    walk(a, mine, range(20))
    walk(b, theirs, range(20))
    assert a.state_dict()["state"].keys() == b.state_dict()["state"].keys()
    assert {k: type(v) for k, v in a.state_dict()["param_groups"][0].items()} == {
        k: type(v) for k, v in torchs(params(), kw, fused).state_dict()["param_groups"][0].items()
    }
    there, back = (
        [p.detach().clone().requires_grad_() for p in mine],
        [p.detach().clone().requires_grad_() for p in theirs],
    )
    c, d = AdamW(there, lr=9.0, fused=fused), torchs(back, {"lr": 9.0}, fused)
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    d.load_state_dict(copy.deepcopy(a.state_dict()))
    for opt, ps in ((a, mine), (b, theirs), (c, there), (d, back)):
        walk(opt, ps, range(20, 60))
    assert same(mine, theirs) and same(mine, there) and same(mine, back)


def test_a_loaded_state_is_its_own():
    mine, other = params(), params()
    a, b = AdamW(mine, 1e-3), AdamW(other, 1e-3)
    walk(a, mine, range(5))
    b.load_state_dict(a.state_dict())
    before = copy.deepcopy(a.state_dict()["state"])
    walk(b, other, range(5, 9))
    assert all(same(before[i].values(), s.values()) for i, s in a.state_dict()["state"].items())


def test_a_parameter_without_gradient_stays_and_counts_no_step():
    mine = params()
    opt = AdamW(mine, 1e-3, weight_decay=0.1)
    mine[0].grad = torch.ones_like(mine[0])
    opt.step()
    assert (
        same(mine[1:], params()[1:])
        and list(opt.state) == [mine[0]]
        and float(opt.state[mine[0]]["step"]) == 1
    )
    opt.zero_grad()
    opt.step()
    assert float(opt.state[mine[0]]["step"]) == 1


@pytest.mark.parametrize(
    "others,words",
    [
        (lambda p: p[:-1], "of 4 parameters, the optimizer has 5"),
        (lambda p: p[::-1], r"shape \(129,\), the parameter \(7, 33\)"),
    ],
)
def test_the_state_of_other_parameters_is_refused(others, words):
    theirs = others(params())
    opt = torch.optim.AdamW(theirs, fused=True)
    walk(opt, theirs, range(1, 3))
    with pytest.raises(ValueError, match=words):
        AdamW(params(), 1e-3).load_state_dict(opt.state_dict())
