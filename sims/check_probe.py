"""What the contract suite (`sims.check`) does with an env: reset, step and run it with arrays as NumPy, and
compare."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from robo_rl.contract import ControlEnv
from robo_rl.errors import UserError


@dataclass(frozen=True)
class EnvProbe:
    env: ControlEnv  # N envs
    one: ControlEnv  # the same task with one env
    starts: bool
    seed_lists: bool
    random_starts: bool
    cuts: bool
    atol: float
    rng: np.random.Generator

    @property
    def n(self) -> int:
        return self.env.num_envs

    @property
    def limit(self) -> int:
        return self.env.spec.max_steps

    @property
    def span(self) -> int:
        """Steps of a short comparison: inside an episode where possible."""
        return max(1, min(10, self.limit - 1))

    def actions(self, steps: int) -> np.ndarray:
        """Random actions [steps, N, A]."""
        dim = self.env.single_action_space.shape[0]
        return self.rng.uniform(-1, 1, (steps, self.n, dim)).astype(np.float32)


def as_numpy(x) -> np.ndarray:
    """A copy as NumPy, of NumPy or of torch on any device."""
    return np.array(x.detach().cpu() if hasattr(x, "detach") else x)


def numpy_obs(obs) -> dict[str, np.ndarray]:
    return {k: as_numpy(v) for k, v in obs.items()}


def reset_env(env: ControlEnv, **kw) -> dict[str, np.ndarray]:
    out = env.reset(**kw)
    assert isinstance(out, tuple) and len(out) == 2, "reset must return (obs, info)"
    return numpy_obs(out[0])


def step_env(env: ControlEnv, actions: np.ndarray) -> dict[str, np.ndarray]:
    """One step as flat arrays: the observation's, and reward, terminated, truncated, success."""
    out = env.step(like_env(env, actions))
    assert isinstance(out, tuple) and len(out) == 5, (
        "step must return (obs, rewards, terminated, truncated, info)"
    )
    obs, reward, terminated, truncated, info = out
    assert "success" in info, "info of every step must have 'success'"
    rest = {"reward": reward, "terminated": terminated, "truncated": truncated, "success": info["success"]}
    return numpy_obs(obs) | {k: as_numpy(v) for k, v in rest.items()}


def like_env(env: ControlEnv, actions: np.ndarray):
    """Actions as NumPy, or as torch on the env's device when the env says it has one (`env.device`)."""
    device = getattr(env, "device", None)
    if device is None:
        return actions
    import torch

    return torch.as_tensor(actions, device=device)


def run_steps(env: ControlEnv, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Steps with actions [T, N, A], stacked to [T, N, ...] per key; none where T is 0."""
    rows = [step_env(env, a) for a in actions]
    return {k: np.stack([r[k] for r in rows]) for k in (rows[0] if rows else ())}


def run_episode(env: ControlEnv, actions: np.ndarray, **reset) -> dict[str, np.ndarray]:
    """Reset and run: the arrays of `run_steps` and the first observation under "first/<key>"."""
    first = {f"first/{k}": v[None] for k, v in reset_env(env, **reset).items()}
    return first | run_steps(env, actions)


def equal(p: EnvProbe, a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if p.atol and a.dtype.kind == "f":
        return np.allclose(a, b, rtol=0, atol=p.atol)
    if p.atol and a.dtype == np.uint8:
        return bool((np.maximum(a, b) - np.minimum(a, b) <= 1).all())
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def assert_same(
    p: EnvProbe, a: dict, b: dict, sentence: str, rows_a: Any = slice(None), rows_b: Any = slice(None)
) -> None:
    """Every array [T, N, ...] of `a` at env rows_a equals that of `b` at rows_b."""
    for k in a:
        x, y = a[k][:, rows_a], b[k][:, rows_b]
        assert equal(p, x, y), f"{sentence} ({k} differs{_amount(x, y)})"


def _amount(x: np.ndarray, y: np.ndarray) -> str:
    """By how much numbers differ, for people."""
    return f" by up to {abs(x - y).max():.2g}" if x.shape == y.shape and x.dtype.kind == "f" else ""


def differ(a: dict, b: dict) -> bool:
    """Whether some observation differs."""
    return any(not np.array_equal(a[k], b[k]) for k in a if k.endswith("state") or "image/" in k)


def assert_refused(call: Callable, sentence: str) -> None:
    try:
        call()
    except UserError:
        return
    except Exception as e:
        raise AssertionError(f"{sentence} must raise UserError, but raised {type(e).__name__}: {e}") from e
    raise AssertionError(f"{sentence} must raise UserError, but was accepted")
