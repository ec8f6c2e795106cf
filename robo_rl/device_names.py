"""Names of devices, checked before anything starts. torch is loaded for a GPU alone: it takes seconds, and
NumPy may act in its place on the CPU."""

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
