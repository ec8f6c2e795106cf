"""Gymnasium envs in a process of another Python, for `gym:ID,python=PATH`.

    PATH gym_worker.py FD CONFIG      FD: of a connected socket; CONFIG: JSON of the arguments of `Envs`

That Python needs NumPy, Gymnasium and the env, and is 3.8 or newer; of robo_rl it reads this file alone.
Messages both ways: 8 bytes, the lengths of a JSON tree and of what follows (little endian), the tree, the
arrays that it names. No pickle. A node of the tree is [kind, value]: "s" null, text, a number or true; "l" a
list; "t" a tuple; "d" a list of [key, node]; "a" [type, shape] of the next array. First the worker says what
its envs are (`describe`), or {"error"}; then every question, a list that begins with the name of a function
of `Envs`, has one answer.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import socket
import struct
import sys
import traceback
from typing import Any

import numpy as np

# ruff: noqa: B905  (zip has no `strict` before Python 3.10)
LIMIT = 1 << 30  # bytes of a message
DEPTH = 32  # lists in lists of a tree
KINDS = "biuf"  # of NumPy's types
FACTS = ("dt", "control_freq", "control_hz")
NO_PICTURES = "it draws no pictures: 'rgb_array' is not among the render_modes of its metadata"
FEW = 8  # envs, whose mean tells what one takes
ORPHAN = 5.0  # s between looks at whether who started us is there


# ---- messages ----------------------------------------------------------------------------------------------


def pack(value):
    """One message of None, text, numbers, arrays, and lists, tuples and dicts of such."""
    arrays = []
    tree = json.dumps(_node(value, arrays)).encode()
    body = b"".join(arrays)
    return struct.pack("<II", len(tree), len(body)) + tree + body


def _node(value, arrays):
    if value is None or isinstance(value, (str, bool, int, float)):
        return ["s", value]
    if isinstance(value, dict):
        return ["d", [[str(k), _node(v, arrays)] for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["t" if isinstance(value, tuple) else "l", [_node(v, arrays) for v in value]]
    x = np.asarray(value)
    if x.dtype.kind not in KINDS:
        raise TypeError(f"an array of {x.dtype} cannot be sent")
    arrays.append(np.ascontiguousarray(x).tobytes())
    return ["a", [x.dtype.newbyteorder("<").str, list(x.shape)]]


def unpack(tree: bytes, body: bytes, parse=json.loads) -> Any:
    """The value of a message's tree and arrays; `parse` reads JSON. ValueError: it is none."""
    rest = [0]
    try:
        value = _value(parse(tree.decode()), body, rest, 0)
    except (TypeError, OverflowError, RecursionError) as e:
        raise ValueError(str(e)) from None
    if rest[0] != len(body):
        raise ValueError(f"{len(body) - rest[0]} bytes are left over")
    return value


def _value(node, body, rest, depth):
    if not isinstance(node, list) or len(node) != 2 or depth > DEPTH:
        raise ValueError("a node of the message is malformed")
    kind, value = node
    if kind == "s" and (value is None or isinstance(value, (str, bool, int, float))):
        return value
    if kind in ("l", "t") and isinstance(value, list):
        made = [_value(v, body, rest, depth + 1) for v in value]
        return tuple(made) if kind == "t" else made
    if kind == "d" and isinstance(value, list):
        return {str(k): _value(v, body, rest, depth + 1) for k, v in value}
    if kind == "a" and isinstance(value, list) and len(value) == 2:
        dtype, shape = np.dtype(str(value[0])), [int(n) for n in value[1]]
        if dtype.kind in KINDS and all(n >= 0 for n in shape):
            size = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if size <= len(body) - rest[0]:
                at, rest[0] = rest[0], rest[0] + size
                return np.frombuffer(body[at : rest[0]], dtype).reshape(shape).copy()
    raise ValueError("a node of the message is malformed")


def receive(wire: socket.socket, patience, parse=json.loads) -> Any:
    """The next message; None: the other side has gone. `patience()` is called whenever the socket's timeout
    passes without a byte; `parse` reads JSON. ValueError: what came is no message."""
    head = _exactly(wire, 8, patience)
    if head is None:
        return None
    sizes = struct.unpack("<II", head)
    if sum(sizes) > LIMIT:
        raise ValueError(f"a message of {sum(sizes)} bytes")
    tree = _exactly(wire, sizes[0], patience)
    body = _exactly(wire, sizes[1], patience)
    return None if tree is None or body is None else unpack(tree, body, parse)


def _exactly(wire, count, patience):
    out = bytearray()
    while len(out) < count:
        try:
            piece = wire.recv(min(count - len(out), 1 << 18))
        except socket.timeout:  # noqa: UP041  (no TimeoutError before Python 3.10)
            patience()
            continue
        except OSError:
            return None
        if not piece:
            return None
        out += piece
    return bytes(out)


# ---- envs --------------------------------------------------------------------------------------------------


class Room:
    """Whether the machine's memory holds what `count` envs take, from what the second and later ones took so
    far: the first pays also for what they share. Looked at after each env, once for each."""

    def __init__(self, count):
        self.count, self.seen, self.first = count, 0, 0

    def look(self, i):
        """After env `i`, in order. MemoryError: the rest will not fit."""
        if i != self.seen:
            return
        self.seen += 1
        now, free = memory()
        if i == 0:
            self.first = now
            return
        each = (now - self.first) / i
        rest = self.count - self.seen
        if i < FEW and now - self.first < free / 4:  # what a second env takes may be taken once
            return
        if each * rest > free:
            text = "each env takes %.0f MB, and %d of %d would fit: take fewer (--envs N)"
            raise MemoryError(text % (each / 1e6, self.seen + int(free / each), self.count))


def memory():
    """(bytes of this process, bytes that are free); (0, 0) where the system does not tell."""
    try:
        with open("/proc/self/statm") as f:
            pages = int(f.read().split()[1])
        with open("/proc/meminfo") as f:
            free = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable")) << 10
    except (OSError, ValueError, StopIteration):
        return 0, 0
    with contextlib.suppress(OSError, ValueError):  # without a limit of the control group
        group = []
        for name in ("max", "current"):
            with open("/sys/fs/cgroup/memory." + name) as f:
                group.append(int(f.read()))
        free = min(free, group[0] - group[1])
    return pages * os.sysconf("SC_PAGESIZE"), free


def made(make, count):
    """`count` envs. MemoryError: they would not fit."""
    envs, room = [], Room(count)
    try:
        for i in range(count):
            envs.append(make())
            room.look(i)
    except BaseException:
        for env in envs:
            with contextlib.suppress(Exception):
                env.close()
        raise
    return envs


class Envs:
    """`count` envs of "[MODULE:]ID", and what may be asked of them; `ids` are numbers of envs. limit: of
    steps; 0 for the env's own, else `most`. told_by: what of an info is handed out as true or false though it
    need not be a bool."""

    def __init__(self, id, count, limit, most, render, told_by, arguments):
        import gymnasium as gym

        self.before, self.told_by = memory()[0], told_by
        made_by = found(gym, id)
        if isinstance(made_by, str):
            known(gym, id, made_by)
        if render:
            if not draws(gym.spec(made_by).entry_point if isinstance(made_by, str) else made_by):
                raise ValueError(NO_PICTURES)
            arguments = dict(arguments, render_mode="rgb_array")
        if isinstance(made_by, str):
            self.limit = limit or gym.spec(made_by).max_episode_steps or most
            settings = dict(arguments, max_episode_steps=self.limit)
            self.envs = made(lambda: gym.make(made_by, disable_env_checker=True, **settings), count)
        else:
            self.limit = limit or most
            self.envs = made(lambda: gym.wrappers.TimeLimit(made_by(**arguments), self.limit), count)
        self.room = Room(count)  # until the first reset has shown what it takes

    def describe(self):
        """What the first env is."""
        env = self.envs[0]
        told = {k: attribute(env, k) for k in FACTS}
        facts = {k: float(v) for k, v in told.items() if isinstance(v, (int, float))}
        return {
            "observation": described(env.observation_space),
            "action": described(env.action_space),
            "limit": self.limit,
            "facts": facts,
            "fps": float(getattr(env, "metadata", {}).get("render_fps") or 0),
            "render_modes": [str(m) for m in getattr(env, "metadata", {}).get("render_modes", ())],
            "task": self.task(env) is not None,
            "expert": attribute(env, "expert_action") is not None,
        }

    def task(self, env):
        text = attribute(env, "task_description")
        return None if text is None else str(text)

    def reset(self, ids, seeds):
        """[(observation, task_description)] of each."""
        return [self._of(i, lambda e, i=i, s=s: self._reset(e, i, int(s))) for i, s in zip(ids, seeds)]

    def _reset(self, env, i, seed):
        seen, _ = env.reset(seed=seed)
        self.room.look(i)
        return seen, self.task(env)

    def step(self, ids, actions):
        """[(observation, reward, terminated, truncated, flags of the info)] of each."""
        return [self._of(i, lambda e, a=a: self._step(e, a)) for i, a in zip(ids, actions)]

    def _step(self, env, action):
        seen, reward, terminated, truncated, info = env.step(action)
        flags = {str(k): bool(v) for k, v in info.items() if np.asarray(v).dtype == bool and np.ndim(v) == 0}
        for k in self.told_by:
            if k in info:
                flags[k] = bool(info[k])
        return seen, float(reward), bool(terminated), bool(truncated), flags

    def render(self, ids):
        """[uint8 [h, w, 3]] of each."""
        return [self._of(i, lambda e: np.asarray(e.render())) for i in ids]

    def expert(self, ids):
        """[action] of each."""
        return [self._of(i, lambda e: np.asarray(attribute(e, "expert_action")(), np.float64)) for i in ids]

    def taken(self):
        """[bytes of this process without its envs, bytes that each of them takes] now."""
        return [self.before, max(0, memory()[0] - self.before) // len(self.envs)]

    def _of(self, i, ask):
        try:
            return ask(self.envs[i])
        except Exception as e:
            return {"error": in_a_line(e)}


def found(gym, id: str) -> Any:
    """The registered id, or the class or function, that "[MODULE:]ID" names."""
    module, _, rest = id.rpartition(":")
    namespace = rest.rpartition("/")[0]
    if not module and namespace.isidentifier() and importlib.util.find_spec(namespace):
        module = namespace
    there = importlib.import_module(module) if module else None
    known = getattr(gym.envs.registration, "registry", {})
    made_by = getattr(there, rest, None)
    return made_by if callable(made_by) and rest not in known else rest


def known(gym, id, made_by):
    """LookupError: nothing is registered as `made_by`, which "[MODULE:]ID" names."""
    try:
        gym.spec(made_by)
    except gym.error.Error:
        own = [n for n, v in vars(sys.modules.get(id.rpartition(":")[0], gym)).items() if isinstance(v, type)]
        near = difflib.get_close_matches(made_by, [*gym.envs.registration.registry, *own], n=3, cutoff=0.5)
        text = "unknown id %r. Nearest: %s; an env of a package or of your own is named gym:MODULE:ID, after "
        text += "the module that registers it or has its class"
        raise LookupError(text % (id, ", ".join(near) or "none")) from None


def draws(made_by):
    """Whether a class says that it can draw; a function that makes envs, and a class of wrappers, whose
    metadata are those of the env that is wrapped, say nothing, nor does a class that takes a `render_mode`
    and has the metadata of `gymnasium.Env`: its instances may have others. made_by: "module:name", or what it
    names."""
    if isinstance(made_by, str):
        module, _, name = made_by.partition(":")
        made_by = getattr(importlib.import_module(module), name)
    metadata = getattr(made_by, "metadata", {})
    if not isinstance(made_by, type) or not isinstance(metadata, dict):
        return True
    if not any("metadata" in vars(c) for c in made_by.__mro__ if c.__module__ != "gymnasium.core"):
        return "render_mode" in inspect.signature(made_by).parameters
    return "rgb_array" in metadata.get("render_modes", ())


def attribute(env: Any, name: str) -> Any:
    """Of an env or a wrapper of it, the outermost first."""
    while env is not None:
        if name in dir(env):
            return getattr(env, name)
        env = env.__dict__.get("env")
    return None


def described(space):
    """A space as a tree."""
    kind = type(space).__name__
    if kind == "Box":
        return {"kind": kind, "low": space.low, "high": space.high, "dtype": np.dtype(space.dtype).str}
    if kind == "Dict":
        return {"kind": kind, "of": [[k, described(s)] for k, s in space.spaces.items()]}
    if kind == "Tuple":
        return {"kind": kind, "of": [described(s) for s in space.spaces]}
    if kind == "Discrete":
        return {"kind": kind, "n": int(space.n), "start": int(getattr(space, "start", 0))}
    if kind == "MultiDiscrete":
        return {"kind": kind, "n": np.asarray(space.nvec)}
    if kind == "MultiBinary":
        return {"kind": kind, "n": np.asarray(space.n)}
    return {"kind": kind}


def in_a_line(e):
    """An exception and the line that raised it; of what this file raises its words."""
    at = traceback.extract_tb(e.__traceback__)[-1]
    if at.filename == __file__:
        return str(e)
    words = " ".join(str(e).split())[:300] or at.line  # of an assert without a message: what it asserts
    return f"{type(e).__name__}: {words} ({at.filename}, line {at.lineno})"


def main(argv):
    """Make the envs and answer; what they print goes to stderr."""
    wire, parent = socket.socket(fileno=int(argv[0])), os.getppid()
    wire.settimeout(ORPHAN)
    os.dup2(2, 1)

    def patience():
        if os.getppid() != parent:
            sys.exit(1)

    try:
        envs = Envs(**json.loads(argv[1]))
        wire.settimeout(None)
        wire.sendall(pack(envs.describe()))
    except Exception as e:
        traceback.print_exc()
        wire.sendall(pack({"error": in_a_line(e)}))
        return 1
    while True:
        wire.settimeout(ORPHAN)
        asked = receive(wire, patience)
        if asked is None:
            return 0
        what, rest = asked[0], asked[1:]
        if what not in ("reset", "step", "render", "expert", "taken"):
            return 1
        wire.settimeout(None)
        wire.sendall(pack(getattr(envs, what)(*rest)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
