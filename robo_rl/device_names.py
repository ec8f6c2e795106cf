"""Names of devices and precisions, checked before anything starts. torch is loaded where it must be asked: it
takes seconds, and NumPy may act in its place on the CPU."""

import warnings
from dataclasses import replace
from typing import Any

from robo_rl.errors import UserError


def check_device(name: str, option: str = "--device") -> None:
    """UserError: there is no device of that name, or torch cannot use it here."""
    kind, colon, index = name.partition(":")
    numbered = index == "0" if kind == "cpu" else index.isdecimal()
    if kind not in ("cpu", "cuda") or colon and not numbered:
        raise UserError(f"{option} must be cpu, cuda or cuda:N, got {name!r}")
    if kind == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UserError(
            f"{option} {name} needs an NVIDIA GPU and a CUDA build of torch; torch {torch.__version__} sees "
            f"none here (robo_rl doctor says why); use {option} cpu"
        )
    if int(index or 0) >= count:
        raise UserError(
            f"{option} {name} does not exist. Allowed: {', '.join(f'cuda:{i}' for i in range(count))}"
        )


def is_usable(name: str) -> bool:
    """Whether torch can use the device of that name here."""
    try:
        check_device(name)
    except UserError:
        return False
    return True


def slow_bf16() -> str:
    """Why bf16 is slow on this machine's CPU, "" where it has instructions for it."""
    import torch

    has = torch.backends.cpu.get_cpu_capability() != "DEFAULT" and any(
        getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile")
    )
    return "" if has else "this CPU has no instructions for bf16: it is computed slower than fp32 here"


def fast_bf16(device: str) -> bool:
    """Whether products in bf16 are faster than in fp32 on `device`, which exists."""
    if device.startswith("cpu"):
        return not slow_bf16()
    import torch

    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def with_dtype(options: Any, device: str) -> Any:
    """A dataclass of options of networks, what its `dtype` auto stands for on `device` said; one without it
    stays as it is."""
    asked = getattr(options, "dtype", "fp32")
    if asked == "bf16" and device.startswith("cpu") and (why := slow_bf16()):
        warnings.warn(f"--net.dtype bf16: {why}", stacklevel=3)
    return options if asked != "auto" else replace(options, dtype="bf16" if fast_bf16(device) else "fp32")
