"""The state of an unfinished fit, as one file."""

import json
from pathlib import Path

from robo_rl.errors import UserError


def save_fit(fitter, path: Path, frames: int) -> None:
    """One file, whole or not at all."""
    from safetensors.torch import save

    from robo_rl import files
    from robo_rl.checkpoint import pack

    tensors: dict = {}
    tree = pack(fitter.state_dict(), tensors)
    files.write_bytes(path, save(tensors, {"tree": json.dumps(tree), "frames": str(frames)}))


def load_fit(fitter, path: Path, frames: int) -> None:
    """Go on from `save_fit`; UserError if the data grew or shrank since, or the file is damaged."""
    from safetensors import SafetensorError, safe_open

    from robo_rl import files
    from robo_rl.checkpoint import unpack

    try:
        with safe_open(path, "pt") as f:
            meta = f.metadata()
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (no mapping)
        if int(meta["frames"]) != frames:
            was = meta["frames"]
            raise UserError(f"the data has {frames} frames, it had {was} when this run began; begin another")
        fitter.load_state_dict(unpack(files.parse_json(meta["tree"], str(path), limit=files.FILE), tensors))
    except (SafetensorError, KeyError, TypeError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(
            f"{path} is damaged or of another version ({e}); delete it to start the fit anew"
        ) from e
