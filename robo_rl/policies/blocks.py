"""The repeated blocks of a policy's network, which are sharded, or computed again in the backward pass, one
by one."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(policy) -> dict[str, nn.Module]:
    """Modules that repeat and are called through `forward`, by path: the members of every list of them, but
    single layers, which code may use by their weights."""
    lists = [(name, m) for name, m in policy.named_modules() if isinstance(m, nn.ModuleList)]
    return {
        f"{name}.{i}": block
        for name, m in lists
        for i, block in enumerate(m)
        if not isinstance(block, nn.Linear) and any(True for _ in block.parameters())
    }


@contextmanager
def compiled_blocks(policy) -> Iterator[None]:
    """Within it the blocks are what torch.compile makes of them; one compilation serves all of a kind. What a
    block computes without gradients then differs by rounding from what it computes with them."""
    blocks = blocks_of(policy).values()
    for block in blocks:
        block.compile()
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def recompute(policy):
    """Let the blocks keep no activations: they are computed again in the backward pass, in place -> the
    policy.

    A block costs a second forward pass and keeps its inputs alone (Chen et al. 2016, arXiv 1604.06174).
    Gradients are the same bits.
    """
    for block in blocks_of(policy).values():
        # a class, not a wrapper: names of weights, copies and hooks stay as they are
        block.__class__ = recomputing(type(block))
    return policy


@functools.cache
def recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of blocks like `kind` whose forward keeps its inputs alone."""

    class Recomputing(kind):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]  # a class that is known at run time
        def forward(self, *args, **kwargs):
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    Recomputing.__name__ = Recomputing.__qualname__ = f"Recomputing{kind.__name__}"
    return Recomputing
