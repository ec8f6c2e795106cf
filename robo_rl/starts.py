"""Counter-based random starts: a start is an int64 id, and the id alone decides the episode.

No generator state exists, so snapshots are two integers per env, resets are vectorised, and the same start
gives the same episode in any env index, batch size or process. Hash: SplitMix64 (Steele et al. 2014).
"""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hashed(*keys: "np.ndarray | int") -> np.ndarray:
    """uint64 hash of integer keys, broadcast against each other."""
    with np.errstate(over="ignore"):
        h = np.uint64(0)
        for k in np.broadcast_arrays(*[np.asarray(k) for k in keys]):
            h = _mix(h + k.astype(np.int64).view(np.uint64) + _GAMMA)
        return h


def uniforms(starts: np.ndarray, dims: int, stream: int = 0) -> np.ndarray:
    """`[n, dims]` float64 uniforms in [0, 1): row i depends on starts[i] and `stream` alone."""
    h = hashed(np.asarray(starts)[:, None], stream, np.arange(dims)[None])
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


class StartStream:
    """Which start each env takes next: start = hash(seed_i, episode_i) mod 2^31. State: two int64 arrays."""

    def __init__(self, num_envs: int):
        self.seeds = np.arange(num_envs, dtype=np.int64)
        self.episodes = np.zeros(num_envs, dtype=np.int64)

    def seed(self, seed: "int | list[int] | np.ndarray", mask: np.ndarray) -> None:
        """int: env i is seeded by hash(seed, i); a list gives every env its own. Counters of `mask` restart."""
        n = len(self.seeds)
        new = hashed(int(seed), np.arange(n)).view(np.int64) if np.ndim(seed) == 0 else np.asarray(seed, np.int64)
        if len(new) != n:
            raise ValueError(f"seed must be an int or {n} ints, got {len(new)}")
        self.seeds = np.where(mask, new, self.seeds)
        self.episodes = np.where(mask, 0, self.episodes)

    def due(self, seed, mask: np.ndarray, starts: "np.ndarray | None") -> tuple[np.ndarray, np.ndarray]:
        """A reset request as `contract.read_reset` gives it -> (ids [n] of the envs in `mask`, their starts [n])."""
        if seed is not None:
            self.seed(seed, mask)
        ids = np.flatnonzero(mask)
        return ids, self.draw(ids) if starts is None else starts[ids]

    def draw(self, ids: np.ndarray) -> np.ndarray:
        """Next start [len(ids)] int64 of the envs `ids`, in 0 .. 2^31-1."""
        out = hashed(self.seeds[ids], self.episodes[ids]) >> np.uint64(33)
        self.episodes[ids] += 1
        return out.astype(np.int64)
