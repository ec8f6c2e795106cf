"""`robo_rl vla check|convert|compare`: what a checkpoint of a vision-language-action model is, in which keys,
and how far from another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from robo_rl.errors import UserError, in_range, quoted


@dataclass(frozen=True, kw_only=True)
class CheckVlaOptions:
    """Say which model a checkpoint is, its keys, sizes, statistics, prompt and cameras, and what is missing.

    Headers and small files are read, no weight is. The exit code is 1 where something is missing."""

    file: tyro.conf.Positional[str]
    """A .safetensors file, or a folder with model.safetensors or an index of shards."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Write a checkpoint in another layout of keys; values are copied as they are, and the way back gives the
    same tensors."""

    source: tyro.conf.Positional[str]
    """A .safetensors file or a folder."""
    out: tyro.conf.Positional[str]
    """A .safetensors file, or a folder that gets model.safetensors and the small files beside the source."""
    to: str = "robo_rl"
    """Layout: robo_rl (ours), lerobot, openpi, lerobot-old or openpi-old (names of transformers up to 4.51).
    A folder of pi0, pi0.5 or SmolVLA that was trained here becomes one that LeRobot's evaluation loads:
    config, processors, statistics."""
    instructions: str = ""
    """With --to lerobot, of a policy of hashed words (words:N): the instructions that it will be given there,
    commas between."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Differences of a checkpoint from a golden file of inputs and outputs, or from another checkpoint, layer
    by layer."""

    file: tyro.conf.Positional[str]
    """A .safetensors file or a folder."""
    golden: str = ""
    """A golden file, or another checkpoint in any layout."""
    record: str = ""
    """Write a golden file: the inputs of the other (or random ones) and what every layer of this model makes
    of them."""
    seed: int = 0
    """Of random inputs to record."""
    tolerance: float = 0.0
    """Largest difference that is accepted; with more the exit code is 1 (0: differences are told alone)."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1 …"""
    dtype: Literal["stored", "fp32", "bf16", "fp16"] = "stored"
    """Of the weights as they are used."""

    def __post_init__(self):
        in_range("--tolerance", self.tolerance, 0, 1e6)
        in_range("--seed", self.seed, 0, 2**31)


SUBCOMMANDS = {
    "check": (CheckVlaOptions, "say what a checkpoint is and what is missing"),
    "convert": (ConvertOptions, "write a checkpoint in another layout of keys"),
    "compare": (CompareOptions, "differences from a golden file or another checkpoint"),
}


def run(args: "CheckVlaOptions | ConvertOptions | CompareOptions") -> int:
    """Run the subcommand whose options these are."""
    path = Path(args.source if isinstance(args, ConvertOptions) else args.file)
    if isinstance(args, CompareOptions) and not (args.golden or args.record):
        raise UserError("give --golden FILE to compare with, or --record FILE to write one")
    if not path.exists():  # told before torch is loaded
        raise UserError(f"{path} does not exist; give a .safetensors file, or a folder with one")
    refuse_small(path)
    if isinstance(args, CheckVlaOptions):
        return check(args)
    return convert(args) if isinstance(args, ConvertOptions) else compare(args)


def refuse_small(path: Path) -> None:
    """UserError: `path` is a run of ours, its checkpoint or the weights in one, and its policy is no
    vision-language-action model."""
    from robo_rl.files import read_json
    from robo_rl.options import VLAS

    folder = path.parent if path.is_file() else path
    if (folder / "meta.json").is_file():
        run, said = folder.parent.parent, read_json(folder / "meta.json").get("policy", {}).get("options", {})
    elif (folder / "run.json").is_file():
        run, said = folder, read_json(folder / "run.json").get("config", {}).get("policy", {})
    else:
        return
    if (kind := said.get("kind", "")) and kind not in VLAS:
        raise UserError(
            f"{path} is of a robo_rl run whose policy is of --policy.kind {kind}, no vision-language-action "
            f"model ({', '.join(VLAS)}). With this run go robo_rl eval {quoted(run)}, robo_rl deploy "
            f"{quoted(run)}, robo_rl serve {quoted(run)}, and robo_rl train --init {quoted(run)}, which "
            "begins with its policy"
        )


def check(args: CheckVlaOptions) -> int:
    """Print what was found; 1 where something is missing."""
    from robo_rl.policies.vla.examine import examine

    found = examine(args.file)
    print(
        "\n".join(
            [
                f"{found.path}",
                *(f"  {what:<11}{value}" for what, value in found.facts),
                *(f"  missing    {text}" for text in found.missing),
            ]
        )
    )
    return int(bool(found.missing))


def convert(args: ConvertOptions) -> int:
    """Convert, and say what was written."""
    from robo_rl.policies.vla.convert import convert as write
    from robo_rl.policies.vla.policy import SAID

    told = [text.strip() for text in args.instructions.split(",") if text.strip()]
    done = write(args.source, args.out, args.to, told, SAID[1])
    zeros = f", {done.zeros} of them zeros that no model reads" if done.zeros else ""
    print(
        f"{done.family} from layout {done.came} to {done.to}: {done.tensors} tensors{zeros}, written to "
        f"{done.path}"
    )
    if done.copied:
        print(f"copied beside it: {', '.join(done.copied)}")
    if done.made:
        print(f"made beside it: {', '.join(done.made)}")
    for note in done.notes:
        print(f"note: {note}")
    return 0


def compare(args: CompareOptions) -> int:
    """Compare, record, or both; 1 where a difference is above the tolerance."""
    from robo_rl.device_names import check_device
    from robo_rl.policies.vla.compare import compare as differences_of
    from robo_rl.policies.vla.compare import record
    from robo_rl.policies.vla.weights import TORCH

    check_device(args.device)
    dtype, code = TORCH.get(args.dtype), 0
    if args.golden:
        rows = differences_of(args.file, args.golden, args.device, dtype)
        width = max(len(row.name) for row in rows)
        print(f"{'':<{width}}  largest    relative")
        print(
            "\n".join(
                f"{row.name:<{width}}  {row.largest:<9.3g}  {row.relative:<9.3g}{row.note}".rstrip()
                for row in rows
            )
        )
        worst = max(rows, key=lambda row: row.largest)
        print(f"largest difference: {worst.largest:.3g} in {worst.name}")
        code = int(bool(args.tolerance) and not worst.largest <= args.tolerance)
    if args.record:
        from safetensors.torch import save

        from robo_rl.files import write_bytes

        tensors, metadata = record(args.file, args.golden or None, args.device, dtype, args.seed)
        write_bytes(args.record, save(tensors, metadata))
        print(f"{len(tensors)} tensors written to {args.record}")
    return code
