"""What a run with `--policy.lora.rank N` has learnt: its adapter alone in a folder, or merged into the
weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from robo_rl.errors import UserError

MERGED = "merged"  # folder below checkpoints/


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Save what a run with --policy.lora.rank N has learnt, its adapter, in a folder of its own, in peft's
    layout; or merge it."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The policy": ("checkpoint", "adapter"),
        "What is written": ("out", "merge"),
    }

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    adapter: str = ""
    """Folder of a saved adapter to put on the checkpoint's weights, which have none."""
    out: str = ""
    """Folder for the adapter alone; empty: RUN/adapter."""
    merge: bool = False
    """Write RUN/checkpoints/merged in its place: a checkpoint without adapters, for every command as
    --checkpoint merged."""


def save(options: AdapterOptions) -> tuple[Path, int, int]:
    """Write the adapter, or the merged checkpoint -> (folder, bytes of the tensors in it, bytes of the whole
    policy's)."""
    from robo_rl import checkpoint, lora
    from robo_rl.experiment.folder import pick_checkpoint

    run, folder = pick_checkpoint(Path(options.run), options.checkpoint)
    policy, meta = checkpoint.load_policy(folder)
    if options.adapter:
        lora.load_adapter(policy, Path(options.adapter))
    if not lora.adapted(policy):
        raise UserError(
            f"{folder} has no adapters: train with --policy.lora.rank N, or name one with --adapter FOLDER"
        )
    whole = sum(v.nbytes for k, v in policy.state_dict().items() if not k.endswith((lora.A, lora.B)))
    if not options.merge:
        out = Path(options.out) if options.out else run / "adapter"
        return out, lora.save_adapter(policy, out, str(folder)), whole
    out = run / "checkpoints" / MERGED
    kept = {k: v for k, v in meta.items() if k not in ("format", "policy", "train", "crc", "seal")}
    checkpoint.save_checkpoint(out, lora.merge(policy), {}, kept | {"finished": True})
    return out, whole, whole
