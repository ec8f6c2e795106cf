"""Checkpoints: safetensors for tensors, JSON for the rest, no pickle; written whole or not at all.

A checkpoint is a folder with `policy.safetensors` (weights and normaliser statistics, all that acting needs),
`train.safetensors` (optimizers, critic, RNG and env state) and `meta.json` (policy description, counters, CRC-32 of the
other files). It is made under a temporary name, fsynced and renamed.
"""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from robo_rl.errors import UserError
from robo_rl.files import sync_folder, write_json
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.policy import describe

FORMAT = 1


def pack(tree, tensors: dict[str, torch.Tensor], path: str = ""):
    """Replace every tensor or array in a tree of dicts and lists by a reference; the tensors go to `tensors`."""
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree.detach().cpu().contiguous().clone()
        return {"__tensor__": path}
    if isinstance(tree, np.ndarray):
        if tree.dtype.kind in "US":
            return {"__text__": tree.tolist()}
        tensors[path] = torch.from_numpy(np.ascontiguousarray(tree)).clone()
        return {"__array__": path, "dtype": str(tree.dtype)}
    if isinstance(tree, dict):
        return {"__dict__": [[k, pack(v, tensors, f"{path}/{k}")] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"__list__": [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(tree)]}
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"cannot save {type(tree).__name__} at {path or 'the root'}")


def unpack(tree, tensors: dict[str, torch.Tensor]):
    """The inverse of `pack` (tuples come back as lists)."""
    if not isinstance(tree, dict):
        return tree
    if "__tensor__" in tree:
        return tensors[tree["__tensor__"]]
    if "__array__" in tree:
        return tensors[tree["__array__"]].numpy().astype(tree["dtype"], copy=False)
    if "__text__" in tree:
        return np.array(tree["__text__"])
    if "__list__" in tree:
        return [unpack(v, tensors) for v in tree["__list__"]]
    return {k: unpack(v, tensors) for k, v in tree["__dict__"]}


def save_checkpoint(path: Path, policy, train: dict, meta: dict) -> None:
    """Write the checkpoint folder `path`; an existing one is replaced only once the new one is durable."""
    tensors: dict[str, torch.Tensor] = {}
    tree = pack(train, tensors)
    blobs = {"policy.safetensors": save({k: v.detach().contiguous() for k, v in policy.state_dict().items()}),
             "train.safetensors": save(tensors)}
    temp = path.with_name(f".{path.name}.tmp{os.getpid()}")
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        for name, blob in blobs.items():
            with open(temp / name, "wb") as f:
                f.write(blob)
                f.flush()
                os.fsync(f.fileno())
        write_json(temp / "meta.json", meta | {"format": FORMAT, "policy": describe(policy), "train": tree,
                                               "crc": {k: zlib.crc32(v) for k, v in blobs.items()}})
        sync_folder(temp)
        old = path.with_name(f".{path.name}.old{os.getpid()}")
        if path.exists():
            os.rename(path, old)
        os.rename(temp, path)
        sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as e:
        shutil.rmtree(temp, ignore_errors=True)
        raise UserError(f"cannot save {path}: {e.strerror} (the last checkpoint is intact). "
                        "Free some disk space and resume with --resume auto") from e


def _read(path: Path, name: str, meta: dict) -> dict[str, torch.Tensor]:
    file = path / name
    try:
        blob = file.read_bytes()
        if zlib.crc32(blob) != meta["crc"][name]:
            raise UserError(f"{file} is damaged (its checksum differs from meta.json). "
                            f"Use another checkpoint of {path.parent}")
        return load(blob)
    except (OSError, SafetensorError, KeyError) as e:
        raise UserError(f"{file} cannot be read ({e}). Use another checkpoint of {path.parent}") from e


def read_meta(path: Path) -> dict:
    """meta.json of a checkpoint folder, checked."""
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is not a checkpoint: {path / 'meta.json'} cannot be read ({e})") from e
    if meta.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {meta.get('format')}, this robo_rl reads {FORMAT}")
    return meta


def load_policy(path: Path):
    """Rebuild the policy of a checkpoint -> (policy, meta)."""
    meta = read_meta(path)
    spec = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["policy"]["spec"].items()}
    policy = make_policy(PolicyOptions(**meta["policy"]["options"]), ObsSpec(**spec), 0)
    try:
        policy.load_state_dict(_read(path, "policy.safetensors", meta))
    except RuntimeError as e:
        raise UserError(f"{path}: the weights do not fit the policy it describes ({str(e).splitlines()[0]})") from e
    return policy.eval(), meta


def load_train(path: Path) -> tuple[dict, dict]:
    """Training state of a checkpoint -> (tree as it was saved, meta)."""
    meta = read_meta(path)
    return unpack(meta["train"], _read(path, "train.safetensors", meta)), meta


def check_fits(policy, spec: ObsSpec, where: str) -> None:
    """Raise UserError naming what differs between a checkpoint's policy and the env it should act in."""
    have = policy.spec
    for name, mine, theirs in (("state size", have.state, spec.state), ("action size", have.action, spec.action),
                               ("action axes", have.action_names, spec.action_names),
                               ("camera views", have.views, spec.views),
                               ("image size", have.image_size, spec.image_size)):
        if mine != theirs:
            raise UserError(f"{where}: the policy's {name} is {mine}, the env's is {theirs}. "
                            "Use the sim, task, control and obs it was trained with")


def checkpoints(run: Path) -> list[Path]:
    """Numbered checkpoints of a run, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step_*") if (p / "meta.json").exists())
