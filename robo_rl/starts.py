"""Counter-based random starts: a start is an int64 id, and the id alone decides the episode.

No generator state exists, so snapshots are two integers per env, resets are vectorised, and the same start
gives the same episode in any env index, batch size or process. Hash: SplitMix64 (Steele et al. 2014).

A learner may decide which starts come next: it publishes a `StartTable`, and whoever collects draws from it
with the same hash, so that a draw depends on (seed, env, number of the episode, table) alone.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

EVAL_START = 1 << 31  # training starts are hashes below 2^31: evaluation starts are never trained on
LIST = 1_000_003  # ids that a list of evaluation starts has
CHOOSE = 0
"""The list of starts (`eval_starts`) that picks the best checkpoint and ends training."""
REPORT = 1
"""The list of starts that a result is reported on; nothing is decided by it."""
SPLIT = 40
"""Recorded frames that a world model keeps from training, from which on every second one is for CHOOSE, the
others are for all other lists: halves of fewer would say too little."""


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hashed(*keys: "np.ndarray | int") -> np.ndarray:
    """uint64 hash of integer keys, broadcast against each other."""
    with np.errstate(over="ignore"):
        h: Any = np.uint64(0)
        for k in np.broadcast_arrays(*[np.asarray(k) for k in keys]):
            h = _mix(h + k.astype(np.int64).view(np.uint64) + _GAMMA)
        return h


def uniforms(starts: np.ndarray, dims: int, stream: int = 0) -> np.ndarray:
    """`[n, dims]` float64 uniforms in [0, 1): row i depends on starts[i] and `stream` alone."""
    h = hashed(np.asarray(starts)[:, None], stream, np.arange(dims)[None])
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


def eval_starts(n: int, seed: int = 0) -> np.ndarray:
    """The `n` evaluation starts of list `seed`, int64; lists of different length share their prefix."""
    return EVAL_START + seed * LIST + np.arange(n, dtype=np.int64)


def list_of(starts: np.ndarray) -> np.ndarray:
    """int64[n]: the list that each evaluation start is of."""
    return (starts - EVAL_START) // LIST


class StartStream:
    """Which start each env takes next: start = hash(seed_i, episode_i) mod 2^31. State: two int64 arrays."""

    def __init__(self, num_envs: int):
        self.seeds = np.arange(num_envs, dtype=np.int64)
        self.episodes = np.zeros(num_envs, dtype=np.int64)

    def seed(self, seed: "int | list[int] | np.ndarray", mask: np.ndarray) -> None:
        """int: env i is seeded by hash(seed, i); a list gives every env its own. Counters of `mask`
        restart."""
        n = len(self.seeds)
        new = (
            hashed(int(np.asarray(seed)), np.arange(n)).view(np.int64)
            if np.ndim(seed) == 0
            else np.asarray(seed, np.int64)
        )
        if len(new) != n:
            raise ValueError(f"seed must be an int or {n} ints, got {len(new)}")
        self.seeds = np.where(mask, new, self.seeds)
        self.episodes = np.where(mask, 0, self.episodes)

    def due(self, seed, mask: np.ndarray, starts: "np.ndarray | None") -> tuple[np.ndarray, np.ndarray]:
        """A reset request as `contract.read_reset` gives it -> (ids [n] of the envs in `mask`, their starts
        [n])."""
        if seed is not None:
            self.seed(seed, mask)
        ids = np.flatnonzero(mask)
        return ids, self.draw(ids) if starts is None else starts[ids]

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """uint64 hash [len(ids)] of the next episodes of the envs `ids`; their counters go on."""
        out = hashed(self.seeds[ids], self.episodes[ids])
        self.episodes[ids] += 1
        return out

    def draw(self, ids: np.ndarray) -> np.ndarray:
        """Next start [len(ids)] int64 of the envs `ids`, in 0 .. 2^31-1."""
        return own_starts(self.keys(ids))


def own_starts(keys: np.ndarray) -> np.ndarray:
    """Starts int64 [n] in 0 .. 2^31-1 of the hashes `keys` uint64 [n]."""
    return (keys >> np.uint64(33)).astype(np.int64)


MOST_ROWS = 1 << 16  # of a table


def task_of(starts: np.ndarray, tasks: int) -> np.ndarray:
    """Which of an env's `tasks` the episodes of `starts` [n] are of, int64 [n]: one after the other."""
    return np.asarray(starts, np.int64) % tasks


def starts_of(starts: np.ndarray, which: np.ndarray, tasks: int) -> np.ndarray:
    """The starts [n] next to `starts` [n], both in 0 .. 2^31-1, whose episodes are of the task `which` [n] of
    `tasks`."""
    return starts % (2**31 - tasks) // tasks * tasks + which


@dataclass(frozen=True, slots=True)
class StartTable:
    """Which starts come next: with probability `uniform` any of the task's own, else row r with probability
    weights[r] / sum.

    ids int64 [R]: a start of the task (>= 0), or the stored state k of the simulator, written -1 - k. weights
    float64 [R] >= 0. tasks float64 [M] >= 0: in an env of M tasks, any start is one of task k with
    probability tasks[k] / sum; empty: all alike.
    ValueError: other shapes, no weight above 0 where rows are drawn from, more than 65,536 rows.
    """

    ids: np.ndarray
    weights: np.ndarray
    uniform: float = 0.0
    tasks: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        ids, weights = np.asarray(self.ids, np.int64), np.asarray(self.weights, np.float64)
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "weights", weights)
        if ids.ndim != 1 or ids.shape != weights.shape or len(ids) > MOST_ROWS:
            raise ValueError(
                f"a table of starts has ids [R] and weights [R], R <= {MOST_ROWS}, got {ids.shape} and "
                f"{weights.shape}"
            )
        if not 0 <= self.uniform <= 1:
            raise ValueError(f"the share of uniform draws must be in [0, 1], got {self.uniform}")
        if self.uniform < 1 and not (
            np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0
        ):
            raise ValueError(
                "weights of starts must be finite and >= 0, one of them above 0; or draw all uniformly: "
                "uniform=1"
            )
        tasks = np.asarray(self.tasks, np.float64)
        object.__setattr__(self, "tasks", tasks)
        if (
            tasks.ndim != 1
            or len(tasks)
            and not (np.isfinite(tasks).all() and (tasks >= 0).all() and tasks.sum() > 0)
        ):
            raise ValueError(f"weights of tasks must be finite and >= 0, one of them above 0, got {tasks}")

    def columns(self) -> dict[str, Any]:
        """All of it by name, for a file; `StartTable(**columns)` is the same table."""
        return {"ids": self.ids, "weights": self.weights, "uniform": self.uniform, "tasks": self.tasks}


EVERY_START = StartTable(np.zeros(0, np.int64), np.zeros(0), 1.0)


def draw_starts(table: StartTable, keys: np.ndarray) -> np.ndarray:
    """Starts int64 [n] drawn from the table, each by the hash in `keys` uint64 [n] alone; a uniform draw is
    `own_starts(keys)`, or with weights of tasks its neighbour of the task that is drawn."""
    out = own_starts(keys)
    u = uniforms(keys.view(np.int64), 3, 1) if table.uniform < 1 or len(table.tasks) else np.zeros(0)
    if len(table.tasks):
        share = np.cumsum(table.tasks)
        which = np.minimum(np.searchsorted(share, u[:, 2] * share[-1], "right"), len(share) - 1)
        out = starts_of(out, which, len(share))
    if table.uniform < 1:
        upto = np.cumsum(table.weights)
        rows = np.minimum(np.searchsorted(upto, u[:, 1] * upto[-1], "right"), len(upto) - 1)
        out = np.where(u[:, 0] < table.uniform, out, table.ids[rows])
    return out


@dataclass(frozen=True, slots=True)
class StoredStates:
    """States of the simulator that episodes may begin in: rows [K, ...] of `env.get_state()`."""

    rows: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def spread(self, starts: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        """Rows [N, ...] for `env.set_state(rows, mask)`: those of the stored states -1 - starts[N] where mask
        [N]."""
        out = {}
        for name, rows in self.rows.items():
            out[name] = np.zeros((len(mask), *rows.shape[1:]), rows.dtype)
            out[name][mask] = rows[-1 - starts[mask]]
        return out


class StartSource(Protocol):
    """Where whoever collects finds the table in force and the stored states that its rows may name."""

    stored: "StoredStates | None"

    def newest(self) -> StartTable: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """Episodes that ended, one row each: start int64 (-1 - k: stored state k), task int64, success bool,
    undiscounted return float64, length int64 [control steps]."""

    starts: np.ndarray
    tasks: np.ndarray
    success: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def joined(cls, parts: "list[Ended]") -> "Ended":
        """The episodes of all parts, in their order."""
        columns = [[getattr(p, f) for p in parts] for f in ENDED]
        return cls(
            *(
                np.concatenate([np.zeros(0, kind), *column])
                for kind, column in zip(ENDED.values(), columns, strict=True)
            )
        )


# fields, dtypes
ENDED = {"starts": np.int64, "tasks": np.int64, "success": bool, "returns": np.float64, "lengths": np.int64}


class StartChooser:
    """Begins the episodes of one env where the table in force says. State: the start and task of every env,
    and a `StartStream`."""

    def __init__(self, env, source: StartSource, seed: int):
        self.env, self.source, self.stream = env, source, StartStream(env.num_envs)
        self.stream.seed(seed, np.ones(env.num_envs, bool))
        self.starts, self.tasks = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs, np.int64)

    def next(self, mask: np.ndarray, known: "np.ndarray | None" = None) -> dict:
        """Begin an episode in the envs of `mask`, which were reset before -> the raw observation of all.

        `known` int64 [N]: from these starts, for an episode that is made again; their draws are counted all
        the same.
        """
        ids = np.flatnonzero(mask)
        starts = self.starts.copy()
        starts[ids] = draw_starts(self.source.newest(), self.stream.keys(ids))
        return self.begin(starts if known is None else known, mask)

    def begin(self, starts: np.ndarray, mask: np.ndarray) -> dict:
        """Begin the episodes of `starts` int64 [N] in the envs of `mask` -> the raw observation of all."""
        back = mask & (starts < 0)
        if back.any():
            assert self.source.stored is not None, "a table names stored states and there are none"
            self.env.set_state(self.source.stored.spread(starts, back), back)
        raw, _ = self.env.reset(options={"reset_mask": mask & ~back, "starts": np.maximum(starts, 0)})
        self.starts[mask] = starts[mask]
        self.tasks = np.array(getattr(self.env, "task_ids", self.tasks), np.int64)
        return raw

    def draw(self, key: int, n: int) -> np.ndarray:
        """Starts [n] of the `key` alone, for groups of episodes that begin alike."""
        return draw_starts(self.source.newest(), hashed(np.asarray(key >> 1), np.arange(n)))

    def state(self) -> dict:
        return {
            "seeds": self.stream.seeds.copy(),
            "episodes": self.stream.episodes.copy(),
            "starts": self.starts.copy(),
            "tasks": self.tasks.copy(),
        }

    def set_state(self, state: dict) -> None:
        self.stream.seeds, self.stream.episodes = np.array(state["seeds"]), np.array(state["episodes"])
        self.starts, self.tasks = np.array(state["starts"]), np.array(state["tasks"])
