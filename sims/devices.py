"""Where a simulator of tensors computes."""

from robo_rl.errors import UserError


def check_device(device: str) -> None:
    """UserError: `device` is neither cpu nor cuda, or torch cannot use it here."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or kind == "cpu" and index or index and not index.isdigit():
        raise UserError(f"unknown device {device!r}. Allowed: cpu, cuda, cuda:<index>")
    if kind == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"device {device!r} needs an NVIDIA GPU and a CUDA build of torch; torch {torch.__version__} "
            "sees none here. Use device='cpu'"
        )
    if int(index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device!r} does not exist. Allowed: "
            + ", ".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
        )
