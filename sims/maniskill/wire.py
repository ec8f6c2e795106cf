"""What the vector env and its worker processes share: memory, one-byte commands, errors. Imports NumPy only.

Memory is one anonymous file (`memfd`) that both sides map: nothing to clean up after a `kill -9`. Commands
and answers go over one socket pair per worker, so that the end of either side is an end-of-file on the other,
never a hang.
"""

import mmap
import os
import socket
import struct

import numpy as np

# Commands, env to worker; each is answered once. Rows with `mask` are meant.
STEP = b"s"  # act with history[i, steps[i]]
RESET = b"r"  # to starts[i]
REPLAY = b"p"  # to starts[i], then history[i, :steps[i]]
EXPERT = b"e"  # fill expert[:], every row
RENDER = b"v"  # fill frames[:], every row
MAP = b"m"  # the memory has its size now
# bench: step ManiSkill's env and its physics alone, answer with the control steps per second of each
RAW = b"w"

# answers: done (payload optional), the user's mistake, our crash (traceback)
OK, USER, FAULT = b"k", b"u", b"x"
_HEAD = struct.Struct("<cI")


def arrays(info: dict, num_envs: int) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Name -> dtype and shape of the shared arrays; info: what a worker told of its first env."""
    n, a, size = num_envs, len(info["axes"]), info["image_size"]
    out = {
        "mask": (np.uint8, (n,)),
        "starts": (np.int64, (n,)),
        "steps": (np.int64, (n,)),
        "history": (np.float32, (n, info["max_steps"], a)),  # every action of the present episode
        "state": (np.float32, (n, len(info["state_names"]))),
        "reward": (np.float32, (n,)),
        "success": (np.uint8, (n,)),
        "fail": (np.uint8, (n,)),
        "expert": (np.float32, (n, a)),
    }
    for view in info["views"]:
        out[f"image/{view}"] = (np.uint8, (n, size, size, 3))
    if info["frame"]:
        out["frames"] = (np.uint8, (n, *info["frame"], 3))
    return {k: (np.dtype(d), s) for k, (d, s) in out.items()}


def map_memory(fd: int, layout: dict, create: bool = False) -> dict[str, np.ndarray]:
    """The arrays of `layout` over the file `fd`, zero at first; create: give the file its size."""
    offsets, end = {}, 0
    for name, (dtype, shape) in layout.items():
        offsets[name] = end
        end += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64
    if create:
        os.ftruncate(fd, max(end, 64))
    buffer = mmap.mmap(fd, max(end, 64))
    return {
        name: np.frombuffer(buffer, dtype, int(np.prod(shape)), offsets[name]).reshape(shape)
        for name, (dtype, shape) in layout.items()
    }


def answer(sock: socket.socket, status: bytes, payload: bytes = b"") -> None:
    sock.sendall(_HEAD.pack(status, len(payload)) + payload)


def read_answer(sock: socket.socket) -> tuple[bytes, bytes]:
    """(status, payload); EOFError when the other side is gone."""
    status, size = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return status, _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    out = b""
    while len(out) < size:
        try:
            part = sock.recv(size - len(out))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        out += part
    return out
