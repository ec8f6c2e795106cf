"""Checkpoints: safetensors for tensors, JSON for the rest, no pickle; written whole or not at all.

A checkpoint is a folder with `policy.safetensors` (weights and normaliser statistics, all that acting needs),
`train.safetensors` (optimizers, critic, RNG and env state) and `meta.json` (policy description, counters,
CRC-32 of the other files and of itself); of a vision-language-action model also its sizes, processor and
tokeniser; of a learner of several processes a file of each, with its rows of what is split (`ShardedState`).
It is made under a temporary name, fsynced and renamed.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from robo_rl.errors import UserError, quoted
from robo_rl.files import FILE, parse_json, plain, read_json, sync_folder, write_bytes, write_json
from robo_rl.options import VLAS, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.policy import describe
from robo_rl.stored import StoredTensor, file_crc, resolved, stored_tensors, write_tensors

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor [n, ...] of a state that several processes hold: rows of each, which are in its file under
    `name`."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    files: tuple[str, ...]


class ShardedState(dict):
    """A state with `ShardedTensor`s in it. write(folder): every process writes its own file there, fsynced ->
    {its name: its CRC-32}."""

    def __init__(self, tree: dict, write: Callable[[Path], dict[str, int]]):
        super().__init__(tree)
        self.write = write


def pack(tree, tensors: dict[str, torch.Tensor], path: str = "", copies: bool = True):
    """Replace every tensor or array in a tree of dicts and lists by a reference; the tensors go to `tensors`,
    as copies or as they are."""

    def put(tensor: torch.Tensor) -> str:
        name = f"{len(tensors):04d}{path}"
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format) if copies else tensor
        return name

    if isinstance(tree, torch.Tensor):
        return {"__tensor__": put(tree.detach().cpu() if copies else tree.detach())}
    if isinstance(tree, np.ndarray):
        if tree.dtype.kind == "U":
            return {"__text__": tree.ravel().tolist(), "shape": list(tree.shape), "dtype": str(tree.dtype)}
        try:
            return {"__array__": put(torch.from_numpy(np.array(tree, order="C"))), "dtype": str(tree.dtype)}
        except TypeError:
            raise TypeError(f"cannot save an array of {tree.dtype} at {path or 'the root'}") from None
    if isinstance(tree, ShardedTensor):
        return {
            "__shards__": tree.name,
            "shape": list(tree.shape),
            "pieces": [*map(list, zip(tree.files, tree.rows, strict=True))],
        }
    if isinstance(tree, StoredTensor):  # to another process of this machine
        return {
            "__stored__": [[str(file), name, rows] for file, name, rows in tree.pieces],
            "shape": list(tree.shape),
        }
    if isinstance(tree, dict):
        for k in tree:
            if not isinstance(k, (str, int, float, type(None))):
                raise TypeError(f"cannot save the key {k!r} of a dict at {path or 'the root'}")
        return {"__dict__": [[k, pack(v, tensors, f"{path}/{k}", copies)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"__list__": [pack(v, tensors, f"{path}/{i}", copies) for i, v in enumerate(tree)]}
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"__float__": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"cannot save {type(tree).__name__} at {path or 'the root'}")


def unpack(
    tree: Any, tensors: "dict[str, torch.Tensor] | dict[str, StoredTensor]", folder: Path = Path()
) -> Any:
    """The inverse of `pack` (tuples come back as lists). folder: where the files of shards are, which come
    back as `StoredTensor`s."""
    if not isinstance(tree, dict):
        return tree
    if "__tensor__" in tree:
        return tensors[tree["__tensor__"]]
    if "__array__" in tree:
        return resolved(tensors[tree["__array__"]]).numpy().astype(tree["dtype"], copy=False)
    if "__shards__" in tree:
        return StoredTensor(
            tuple(tree["shape"]),
            tuple((folder / file, tree["__shards__"], rows) for file, rows in tree["pieces"]),
        )
    if "__stored__" in tree:
        return StoredTensor(
            tuple(tree["shape"]), tuple((Path(file), name, rows) for file, name, rows in tree["__stored__"])
        )
    if "__text__" in tree:
        return np.array(tree["__text__"], tree["dtype"]).reshape(tree["shape"])
    if "__float__" in tree:
        return float(tree["__float__"])
    if "__list__" in tree:
        return [unpack(v, tensors, folder) for v in tree["__list__"]]
    return {k: unpack(v, tensors, folder) for k, v in tree["__dict__"]}


def reread(state: dict, what: str) -> dict:
    """A state as it comes back from a checkpoint, in memory of its own. TypeError, AttributeError: it cannot
    be saved."""
    tensors: dict[str, torch.Tensor] = {}
    tree = parse_json(json.dumps(pack(state, tensors)), what, limit=FILE, nan=True)
    return unpack(tree, {k: v.clone() for k, v in tensors.items()})


def _seal(meta: dict) -> int:
    """CRC-32 of a meta.json's content."""
    return zlib.crc32(json.dumps({k: v for k, v in meta.items() if k != "seal"}, sort_keys=True).encode())


def save_checkpoint(path: Path, policy, train: dict, meta: dict) -> None:
    """Write the checkpoint folder `path`; an existing one is replaced only once the new one is durable."""
    tensors: dict[str, torch.Tensor] = {}
    tree, crc = pack(train, tensors, copies=False), {}
    files = {"policy.safetensors": policy.state_dict(), "train.safetensors": tensors}
    temp, old = (path.with_name(f".{path.name}.{kind}{os.getpid()}") for kind in ("tmp", "old"))
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        if hasattr(policy, "save_files"):
            policy.save_files(temp)
        for name, held in files.items():
            crc[name] = write_tensors(temp / name, held)
        for state in train.values():
            if isinstance(state, ShardedState):
                crc |= state.write(temp)
        meta = plain(meta | {"format": FORMAT, "policy": describe(policy), "train": tree, "crc": crc})
        # the last: without it a folder is no checkpoint
        write_json(temp / "meta.json", meta | {"seal": _seal(meta)})
        sync_folder(temp)
        if path.exists():
            os.rename(path, old)
        os.rename(temp, path)
        sync_folder(path.parent)
    except (OSError, UserError) as e:
        why = (
            e.strerror
            if isinstance(e, OSError)
            else e.__cause__.strerror
            if isinstance(e.__cause__, OSError)
            else e
        )
        raise UserError(
            f"cannot save {path}: {why} (the last checkpoint is intact). Free some disk space and go on "
            f"with: robo_rl train --resume {quoted(path.parent.parent)}"
        ) from e
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def drop_train(path: Path) -> None:
    """Leave of a checkpoint what acts: nobody goes on from it."""
    meta, blob = read_meta(path), save({})
    meta |= {"train": pack({}, {}), "crc": meta["crc"] | {"train.safetensors": zlib.crc32(blob)}}
    meta.pop("teaching", None)
    write_bytes(path / "train.safetensors", blob)
    write_json(path / "meta.json", meta | {"seal": _seal(meta)})


def recover(run: Path) -> None:
    """Tidy what a killed process left in a run's checkpoints; call it under the run's lock.

    Half-written folders go, and one that was moved aside for a successor that never came goes back.
    """
    for old in (run / "checkpoints").glob(".step_*.old*"):
        path = old.with_name(old.name[1:].split(".")[0])
        if (path / "meta.json").exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)
    # of deleting one
    half = [p for p in (run / "checkpoints").glob("step_*") if not (p / "meta.json").exists()]
    for path in [*half, *(run / "checkpoints").glob(".step_*.tmp*")]:
        shutil.rmtree(path)


def _read(path: Path, name: str, meta: dict) -> dict[str, torch.Tensor]:
    file = path / name
    try:
        blob = file.read_bytes()
        if zlib.crc32(blob) != meta["crc"][name]:
            raise UserError(f"{file} is damaged (its checksum differs from meta.json). {_remedy(path)}")
        return load(blob)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} cannot be read ({e}). {_remedy(path)}") from e


def _mapped(path: Path, name: str, meta: dict) -> dict[str, torch.Tensor]:
    """As `_read`, but the tensors are the file's own pages, to be copied from: a model of billions has room
    once."""
    file = path / name
    try:
        if file_crc(file) != meta["crc"][name]:
            raise UserError(f"{file} is damaged (its checksum differs from meta.json). {_remedy(path)}")
        with safe_open(file, framework="pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - no dictionary
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} cannot be read ({e}). {_remedy(path)}") from e


def _remedy(path: Path) -> str:
    return f"Restore it from a copy, or delete the checkpoint to use the one before: rm -r {path}"


def read_meta(path: Path) -> dict:
    """meta.json of a checkpoint folder, checked."""
    file = path / "meta.json"
    try:
        meta = read_json(file)
        have = meta["format"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{path} is no sound checkpoint: {file} cannot be read ({e!r}). {_remedy(path)}"
        ) from e
    if have != FORMAT:
        raise UserError(f"{path} has checkpoint format {have}, this robo_rl reads {FORMAT}")
    if meta.get("seal") != _seal(meta):
        raise UserError(f"{file} is damaged (its checksum differs). {_remedy(path)}")
    return meta


def load_policy(path: Path, device: "torch.device | str" = "cpu"):
    """Rebuild the policy of a checkpoint on `device` -> (policy, meta). Weights go there from the file."""
    meta = read_meta(path)
    spec: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in meta["policy"]["spec"].items()
    }
    try:
        options = PolicyOptions(**meta["policy"]["options"])
        if options.kind in VLAS:  # sizes and processor are the checkpoint's own, wherever it was copied to
            from robo_rl.policies.vla.make import weights_come_later

            options = replace(options, folder=str(path))
            with weights_come_later():
                policy = make_policy(options, ObsSpec(**spec), 0)
        else:
            policy = make_policy(options, ObsSpec(**spec), 0)
        policy.to(device).load_state_dict(_mapped(path, "policy.safetensors", meta))
    except (RuntimeError, TypeError) as e:
        kind = meta["policy"]["options"].get("kind", "")
        raise UserError(
            f"{path} was made by another version of {kind if ':' in kind else 'robo_rl'}: its weights do not "
            f"fit ({' '.join(str(e).split())[:300]})"
        ) from e
    return policy.eval(), meta


def load_weights(path: Path, policy) -> None:
    """Put the weights of a checkpoint into a policy of the same options."""
    policy.load_state_dict(_mapped(path, "policy.safetensors", read_meta(path)))


def load_train(path: Path, stored: tuple[str, ...] = ()) -> tuple[dict, dict]:
    """Training state of a checkpoint -> (tree as it was saved, meta). Of the entries named in `stored` the
    tensors stay in their files (`StoredTensor`); the files of shards are put together, whoever wrote them."""
    meta = read_meta(path)
    shards = [name for name in meta["crc"] if name not in ("policy.safetensors", "train.safetensors")]
    for name in (*shards, *("train.safetensors",) * bool(stored)):
        try:
            sound = file_crc(path / name) == meta["crc"][name]
        except OSError as e:
            raise UserError(f"{path / name} cannot be read ({e}). {_remedy(path)}") from e
        if not sound:
            raise UserError(
                f"{path / name} is damaged (its checksum differs from meta.json). {_remedy(path)}"
            )
    tensors = stored_tensors(path / "train.safetensors") if stored else _read(path, "train.safetensors", meta)
    tree = unpack(meta["train"], tensors, path)
    return {k: v if k in stored else resolved(v) for k, v in tree.items()}, meta


def check_fits(policy, spec: ObsSpec, where: str, what: str = "env") -> None:
    """Raise UserError naming what differs between a checkpoint's policy and the env it should act in, or the
    data set that it should learn from (`what`)."""
    have = policy.spec
    for name, mine, theirs in (
        ("camera views are", ", ".join(have.views) or "none", ", ".join(spec.views) or "none"),
        ("image size is", have.image_size, spec.image_size),
        ("state size is", have.state, spec.state),
        ("action size is", have.action, spec.action),
        ("action axes are", ", ".join(have.action_names), ", ".join(spec.action_names)),
        ("action units are", ", ".join(have.units) or "-1 to 1", ", ".join(spec.units) or "-1 to 1"),
    ):
        if mine != theirs and not (name == "image size is" and have.fit):
            told = f"--image-size {mine}, " if name == "image size is" and mine else ""
            remedy = f"Use {told}the sim, task, control and obs it was trained with"
            if what != "env":
                remedy = f"Use {told}a data set with the columns, cameras and units that it learnt from"
            raise UserError(f"{where}: the policy's {name} {mine}, the {what}'s {theirs}. {remedy}")


def name(step: int) -> str:
    """Folder name of the checkpoint at `step`."""
    return f"step_{step:012d}"


def best(run: Path, newest: Path | None = None) -> Path:
    """The checkpoint with the best evaluation so far, as the newest one knows (None: it is looked for); that
    itself if none was evaluated."""
    last = newest or checkpoints(run)[-1]
    step = read_meta(last)["best"]["step"]
    return last if step < 0 else run / "checkpoints" / name(step)


def checkpoints(run: Path) -> list[Path]:
    """Numbered checkpoints of a run, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step_*") if (p / "meta.json").exists())
