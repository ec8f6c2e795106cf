"""Large tensors as shapes alone: a model of billions of weights is made and run in little memory, to count
what it keeps and computes.

Only what is large has no numbers (`torch`'s FakeTensor, on the device that it would be on, so that the same
kernels are chosen). Small tensors stay real: masks, seeds and tables decide how the code goes on.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

LARGE = 1 << 16  # numbers of a tensor, from which it is a shape
BOTH_PASSES = 3  # of the operations of the forward pass
SIDE = 768  # of the matrices whose product says how fast this machine computes

_active = ContextVar("active", default=False)
MAKERS = ("empty", "empty_strided", "zeros", "ones", "full", "randn", "rand", "randint", "normal")


@cache
def fake_mode() -> FakeTensorMode:
    """One for the process: tensors of two do not go together."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class ShapesMode(TorchDispatchMode):
    """Makes new tensors of more than `large` numbers without them; whatever is computed from such has none
    either."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.fake, self.large = fake_mode(), large

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, name = kwargs.get("device"), func.overloadpacket.__name__
        on_meta = device is not None and torch.device(device).type == "meta"
        if (
            name == "empty_like"
            and device is not None
            and not on_meta
            and args[0].is_meta
            and args[0].numel() > self.large
        ):
            with self.fake:  # `Module.to_empty`
                return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device)
        if name in MAKERS and not on_meta:
            size = next((x for x in args if isinstance(x, (list, tuple))), ())
            if size and all(isinstance(x, int) for x in size) and torch.Size(size).numel() > self.large:
                with self.fake:
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def only_shapes(large: int = LARGE) -> Iterator[None]:
    """New tensors of more than `large` numbers have none meanwhile, and files of weights are not read."""
    before = _active.set(True)
    try:
        with ShapesMode(large):
            yield
    finally:
        _active.reset(before)


def are_shapes() -> bool:
    """Whether `only_shapes` is on."""
    return _active.get()


def operations(work: Callable[[], object]) -> int:
    """Of products of matrices and convolutions, multiplied and added."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def operations_per_second(device: str) -> float:
    """How many this machine does in a product of matrices [1/s], the best of three."""
    a = torch.ones(SIDE, SIDE, device=device)
    best = 1e30
    for _ in range(3):
        begin = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - begin)
    return 2 * SIDE**3 / best
