"""Any envpool id with continuous actions as a contract env: `sims.make("envpool:MetaWorld/Reach-v3", ...)`.

envpool steps its envs on C++ threads; state observations only (its renderer needs a display and can end the
process without one). It resets by itself on the step after an end, so an env that is over gets no more
actions, and `reset(env_id)` starts it again. Its seeds are fixed when a pool is made, so a reset by seed or
start makes a new pool for the envs it names (milliseconds to a tenth of a second for each env, by task),
exact and independent of index and batch size; a plain reset goes on in the envs' own random streams. Success
is true from the step on which the env reports it until the reset; with reward "sparse" that step pays 1, all
others 0, and it ends the episode. A goal that an id hides from the observation unless asked (Meta-World) is
shown. envpool does not report its control period; `spec.period` says 1 s.
"""

import ctypes
import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import MissingDependency, UserError, choose
from robo_rl.files import cores
from robo_rl.plugins import said, split_arguments
from robo_rl.starts import StartStream, hashed
from robo_rl.types import ActionAxis, ControlSpec
from sims.gym import NO_SPARSE, own_actions, own_only

MAX_STEPS = 1000  # where the env has no limit of its own
SUCCESS = ("info:success", "info:is_success")  # how ids name it
# options of ids that hide the goal of the episode: no policy finds what it cannot see
OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_episode_steps")  # set here
SHOWN = {"partially_observable": False}


def make_envpool(
    id: str,
    *,
    num_envs: int = 1,
    obs: str = "state",
    reward: str = "",
    control: str = "",
    image_size: int = 64,
    threads: int = 0,
    max_steps: int = 0,
    randomise: str = "",
    render: bool = False,
    device: str = "cpu",
) -> "EnvpoolEnv":
    """The vector env of "ID[,argument=value…]", an envpool id and arguments of its `make`; the options are
    those of `sims.make`, of which most do not apply."""
    name = f"envpool:{id}"
    own_only(name, obs, control, randomise, device)
    if render:
        raise UserError(f"{name} cannot render: envpool is state-only here")
    if max_steps < 0 or threads < 0:
        raise UserError(f"max_steps and threads must be >= 0, got {max_steps} and {threads}")
    if importlib.util.find_spec("envpool") is None:
        raise MissingDependency(f"{name} needs envpool (about 740 MB): pip install 'robo_rl[envpool]'")
    if not id:
        raise UserError("envpool: needs an id after the colon, for example envpool:MetaWorld/Reach-v3")
    known, arguments = split_arguments(id)
    ids = library().list_all_envs()
    if known not in ids:
        near = difflib.get_close_matches(known, ids, n=5, cutoff=0.3)
        raise UserError(f"unknown envpool id {id!r}. Nearest: {', '.join(near) or 'none'}")
    return EnvpoolEnv(id, num_envs, threads, max_steps, reward, arguments)


def library() -> Any:
    """envpool itself: `import` of its name means this file to a type checker where it is not installed."""
    return importlib.import_module("envpool")


class EnvpoolEnv(ControlEnv):
    """N envs of one envpool id; see `sims` for the contract and `make_envpool` for the options."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(
        self,
        id: str,
        num_envs: int,
        threads: int,
        max_steps: int,
        reward: str = "",
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ):
        known, name = split_arguments(id)[0], f"envpool:{id}"
        has = library().make_spec(known, num_envs=1).config._fields
        for key in arguments:
            choose(f"{known} argument", key, (f for f in has if f not in OURS))
        with said(f"{name} cannot be made"):
            spec = library().make_spec(known, num_envs=1, **arguments)
        self._low, self._high = own_actions(f"envpool:{id}", spec.gymnasium_action_space)
        space = spec.gymnasium_observation_space
        shapes = [s.shape or () for s in _leaves(space)]
        if any(len(s) > 2 for s in shapes) or getattr(spec.config, "max_num_players", 1) > 1:
            raise UserError(f"envpool:{id} has image or multi-player observations; only state is supported")
        limit = max_steps or getattr(spec.config, "max_episode_steps", 0) or MAX_STEPS
        options = {"max_episode_steps": limit} | SHOWN | dict(arguments)
        self._options = {k: v for k, v in options.items() if k in has}
        if (
            reward == "dense" and "reward_type" in has and "reward_type" not in arguments
        ):  # of ids whose own is sparse
            self._options["reward_type"] = "dense"
        self.reports_success, self._sparse = (
            any(k in spec.state_array_spec for k in SUCCESS),
            reward == "sparse",
        )
        if self._sparse and not self.reports_success:
            raise UserError(NO_SPARSE.format(f"envpool:{id} says nothing of success"))
        self._id, self._threads = known, threads or cores()
        self._action_shape, self._space = spec.gymnasium_action_space.shape, space

        n, size = num_envs, sum(int(np.prod(s)) for s in shapes)
        self.num_envs, self.render_mode = n, None
        self.single_observation_space, self.observation_space = observation_spaces(size, n)
        self.single_action_space, self.action_space = action_spaces(len(self._low), n)
        axes = tuple(
            ActionAxis(f"action{i}", "1", float(lo), float(hi), "absolute")
            for i, (lo, hi) in enumerate(zip(self._low, self._high, strict=True))
        )
        self.spec = ControlSpec("envpool", id, axes, 1.0, limit)
        self._task = np.full(n, id)
        self._stream = StartStream(n)
        self._pools: dict[int, Any] = {}
        self._members: dict[int, np.ndarray] = {}  # env by id in the pool, those that left it included
        self._pool = np.full(n, -1)  # key of the pool that env i lives in, -1 before the first reset
        self._local = np.zeros(n, np.int32)  # and its id there
        self._made = 0
        self._state = np.zeros((n, size), np.float32)
        self._steps = np.zeros(n, np.int64)
        self._terminated, self._truncated, self._success = (np.zeros(n, bool) for _ in range(3))

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs)
        if seed is not None:
            self._stream.seed(seed, mask)
        fresh = mask if seed is not None or starts is not None else mask & (self._pool < 0)
        if fresh.any():
            ids = np.flatnonzero(fresh)
            self._make(ids, self._stream.draw(ids) if starts is None else _seed(starts[ids]))
        for key, ids in self._by_pool(mask):
            obs, info = self._pools[key].reset(self._local[ids])
            self._state[self._members[key][info["env_id"]]] = self._flat(obs)
        self._steps[mask] = 0
        for flag in (self._terminated, self._truncated, self._success):
            flag[mask] = False
        return self._obs(), {"success": self._success.copy()}

    def step(self, actions):
        a = read_actions(actions, self.num_envs, len(self._low))
        if (self._pool < 0).any():
            raise UserError("reset every env before the first step")
        live = ~(self._terminated | self._truncated)
        a = self._low + 0.5 * (a + 1.0) * (self._high - self._low)
        reward = np.zeros(self.num_envs, np.float32)
        self._steps += live
        for key, ids in self._by_pool(live):
            obs, r, terminated, truncated, info = self._pools[key].step(
                a[ids].reshape(-1, *self._action_shape), self._local[ids]
            )
            ids = self._members[key][info["env_id"]]
            self._state[ids], reward[ids] = self._flat(obs), r
            self._terminated[ids], self._truncated[ids] = terminated, truncated  # never both
            success = info.get("success", info.get("is_success"))
            if success is not None:
                self._success[ids] |= np.asarray(success).reshape(len(ids)) > 0.5
        if self._sparse:
            reward = (live & self._success).astype(np.float32)
            self._terminated |= self._success
            self._truncated &= ~self._terminated
        self._truncated |= live & ~self._terminated & (self._steps >= self.spec.max_steps)
        return (
            self._obs(),
            reward,
            self._terminated.copy(),
            self._truncated.copy(),
            {"success": self._success.copy()},
        )

    def _make(self, ids: np.ndarray, seeds: np.ndarray) -> None:
        """Move the envs `ids` to a new pool, seeded one by one; pools nobody lives in are dropped before, and
        their memory given back."""
        self._pool[ids] = -1
        for key in set(self._pools) - set(self._pool.tolist()):
            del self._pools[key], self._members[key]
        trim()
        pool = library().make(
            self._id,
            "gymnasium",
            num_envs=len(ids),
            env_seed=seeds.tolist(),
            num_threads=min(self._threads, len(ids)),
            **self._options,
        )
        self._made += 1
        self._pools[self._made], self._members[self._made] = pool, ids
        self._pool[ids], self._local[ids] = self._made, np.arange(len(ids))

    def _by_pool(self, mask: np.ndarray):
        """Yield (pool key, env ids) of the envs of `mask`."""
        for key in self._pools:
            ids = np.flatnonzero(mask & (self._pool == key))
            if len(ids):
                yield key, ids

    def _flat(self, obs) -> np.ndarray:
        """[n, S] of an observation array or a dict of them, in the order of the space."""
        parts = list(_values(self._space, obs))
        return np.concatenate([np.asarray(p).reshape(len(p), -1) for p in parts], axis=1)

    def _obs(self) -> dict[str, np.ndarray]:
        return {"state": self._state.copy(), "task": self._task.copy()}

    def close_extras(self) -> None:
        self._pools.clear()


def trim() -> None:
    """Have the C library give freed memory back to the system: of pools made again and again it keeps as much
    as two of them held."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        give_back(0)


def _seed(starts: np.ndarray) -> np.ndarray:
    """int64 [n] below 2^31, as envpool wants its seeds: the start itself, or a hash of a larger one."""
    return np.where(starts < 2**31, starts, (hashed(starts) >> np.uint64(33)).astype(np.int64))


def _leaves(space) -> list[spaces.Space]:
    """The Boxes of a (nested) Dict space in order; Discrete leaves have shape ()."""
    if isinstance(space, (spaces.Dict, dict)):
        return [
            leaf
            for s in (space.spaces if isinstance(space, spaces.Dict) else space).values()
            for leaf in _leaves(s)
        ]
    return [space]


def _values(space, obs):
    """Yield the arrays of `obs` in the order of `_leaves(space)`."""
    if isinstance(space, (spaces.Dict, dict)):
        for k, s in (space.spaces if isinstance(space, spaces.Dict) else space).items():
            yield from _values(s, obs[k])
    else:
        while isinstance(obs, dict):  # envpool leaves a single key in place in some tasks
            (obs,) = obs.values()
        yield obs
