"""A tree of arrays in one file, whole or not at all; it survives the death of any process (not a power cut: no fsync)."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors import torch as st

from robo_rl.checkpoint import pack, unpack


def save(path: Path, tree: dict) -> None:
    """Replace `path` by `tree`."""
    tensors: dict = {}
    text = json.dumps(pack(tree, tensors))
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temp.write_bytes(st.save(tensors, {"tree": text}))
    os.replace(temp, path)


def load(path: Path) -> dict:
    """The tree at `path`; {} where there is none or it is damaged."""
    try:
        blob = path.read_bytes()
        size = int.from_bytes(blob[:8], "little")
        tree = json.loads(json.loads(blob[8:8 + size])["__metadata__"]["tree"])
        return unpack(tree, st.load(blob))
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
