"""Contexts: rows repeated, picked, joined and stored are the rows that were put in."""

from dataclasses import fields

import pytest
import torch

from robo_rl.policies.context import Context


def context(rows: int = 3, length: int = 4, seed: int = 0) -> Context:
    g = torch.Generator().manual_seed(seed)
    kv = tuple(
        (torch.randn(rows, length, 1, 2, generator=g), torch.randn(rows, length, 1, 2, generator=g))
        for _ in range(2)
    )
    mask = torch.arange(length)[None] < torch.tensor([length, *[2] * (rows - 1)])[:, None]
    return Context(
        torch.randn(rows, 5, generator=g), kv, mask, mask.sum(1), torch.randn(rows, 6, generator=g)
    )


def same(a: Context, b: Context) -> None:
    x, y = a.columns(), b.columns()
    assert x.keys() == y.keys()
    for name in x:
        assert torch.equal(x[name], y[name]) and x[name].dtype == y[name].dtype, name


def test_a_repeated_row_stands_beside_itself_in_every_field():
    c = context()
    same(c.repeat(2), c.pick(torch.tensor([0, 0, 1, 1, 2, 2])))
    assert len(c.repeat(2)) == 6 and c.repeat(1) is c
    assert torch.equal(c.repeat(2).kv[1][1][3], c.kv[1][1][1])


def test_the_parts_of_a_context_joined_are_the_context():
    c = context()
    same(Context.cat([c.pick(slice(0, 1)), c.pick(slice(1, 3))]), c)
    same(Context.cat([c.pick(torch.tensor([True, False, False])), c.pick(torch.tensor([1, 2]))]), c)
    pooled = Context(pooled=torch.ones(2, 3))
    same(Context.cat([pooled, pooled]), Context(pooled=torch.ones(4, 3)))


def test_shorter_prefixes_are_padded_with_tokens_that_are_not_there():
    a, b = context(length=4), context(length=2, seed=1)
    c = Context.cat([a, b])
    assert c.mask.shape == (6, 4) and torch.equal(c.mask[3:, :2], b.mask) and not c.mask[3:, 2:].any()
    assert torch.equal(c.kv[0][0][3:, :2], b.kv[0][0]) and not c.kv[0][0][3:, 2:].any()
    assert torch.equal(c.kv[1][1][:3], a.kv[1][1]) and torch.equal(c.length, torch.cat([a.length, b.length]))


def test_contexts_of_different_policies_are_not_joined():
    with pytest.raises(ValueError, match="same fields and layers"):
        Context.cat([context(), Context(pooled=torch.ones(1, 5))])
    with pytest.raises(ValueError, match="same fields and layers"):
        Context.cat(
            [context(), Context(**{f.name: getattr(context(), f.name) for f in fields(Context)} | {"kv": ()})]
        )


def test_a_context_comes_back_from_its_columns_among_others():
    c = context()
    same(Context.of({"state": torch.ones(3, 2)} | c.columns()), c)
    assert Context(pooled=c.pooled).columns() == {"context": c.pooled}, (
        "a small policy's context is one column"
    )


def test_another_precision_is_for_numbers_that_are_not_counts():
    c = context().to("cpu", torch.bfloat16)
    assert c.pooled.dtype == c.kv[0][0].dtype == c.state.dtype == torch.bfloat16
    assert c.mask.dtype == torch.bool and c.length.dtype == torch.int64
    x = torch.ones(1, 1, requires_grad=True)
    assert not Context(pooled=x * 2).detach().pooled.requires_grad
