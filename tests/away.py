"""An accelerator that is not there: tensors that say they are on the device `meta`, compute on the CPU, and
that NumPy cannot read.

As on a real one, an operation on a tensor from there and one from here is refused (but for numbers, index
tensors and copies), what reads a value waits for the device, and that is counted. `with Away() as device:`;
what is made on torch.device("meta") or moved there meanwhile is such a tensor.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

AWAY = torch.device("meta")
MAY_MIX = ("aten.copy_", "aten.index.", "aten.index_put", "aten._index_put", "aten._to_copy")
PRODUCTS = ("aten.addmm", "aten.mm", "aten.bmm")
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal")


class AwayTensor(torch.Tensor):
    """A tensor over there; `here` is its value."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=AWAY,
            requires_grad=False,
        )

    def __init__(self, here: torch.Tensor):
        self.here = here

    def __repr__(self):
        return f"away({self.here!r})"

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert a tensor of an accelerator to numpy; use Tensor.cpu() first")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def tolist(self):
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def dispatch(func, args, kwargs):
    """`func` on the values; refused where tensors of both sides meet."""
    flat, _ = tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, AwayTensor)]
    here = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, AwayTensor) and x.dim()]
    name = str(func)
    if there and here and not name.startswith(MAY_MIX):
        raise RuntimeError(f"{name}: tensors on different devices, meta and cpu")
    if name.startswith(READS) and there:
        Away.waits += 1
    Away.products += bool(there) and name.startswith(PRODUCTS)
    device = kwargs.get("device")
    plain = tree_map(lambda x: x.here if isinstance(x, AwayTensor) else x, (args, kwargs))
    values, named = plain
    if device is not None:
        named = named | {"device": torch.device("cpu")}
    out = func(*values, **named)
    if not func._schema.returns:  # of lists of tensors, in place
        return None
    if func._schema.is_mutable and name.split(".")[1].endswith("_"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    away = torch.device(device).type == "meta" if device is not None else bool(there)
    known = {id(x.here): x for x in there}
    return tree_map(
        lambda x: known.get(id(x)) or AwayTensor(x) if away and isinstance(x, torch.Tensor) else x, out
    )


class Away(TorchDispatchMode):
    """While it is on, the device `meta` computes. waits: values read from there, products: matrix products
    there, since it was turned on."""

    waits = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (device is not None and torch.device(device).type == "meta") or any(
            isinstance(x, AwayTensor) for x in tree_flatten((args, kwargs))[0]
        ):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)

    def __enter__(self):
        super().__enter__()
        Away.waits = Away.products = 0
        return AWAY


def bring(x):
    """Values of tensors that are there."""
    return tree_map(lambda t: t.here if isinstance(t, AwayTensor) else t, x)
