"""Acting: a policy and a vector env in, decisions with everything learning needs out.

Axes: T decisions, N envs, E executed steps, F log-prob factors. An env that ends inside a chunk stays frozen to the
end of it; the observation it froze in is the true successor and is kept in `final_obs`.
"""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from robo_rl.policies import Policy, obs_tensors
from robo_rl.policies.policy import Obs


@dataclass(slots=True)
class Rollout:
    """The unit that is shipped and trained on.

    rewards[T,N] are discounted inside the chunk, `discounts` = gamma^(steps really executed) and 0 where terminated,
    `done` = terminated or truncated, `mask` False where the env was already over (whole-episode rollouts only).
    `final_obs` holds the successor observations of `done.nonzero()` in that order, `last_obs` those after decision T.
    """

    obs: Obs  # [T,N,...]
    trace: dict[str, Tensor]  # [T,N,F,...]
    x0: Tensor  # [T,N,H,A] clean chunk, normalised
    logp: Tensor  # [T,N,F]
    rewards: Tensor
    discounts: Tensor
    done: Tensor
    executed: Tensor  # int [T,N] control steps of the chunk that ran
    mask: Tensor
    version: Tensor  # int [T,N] weights that acted
    outcome: Tensor  # [N] undiscounted return of the episode (whole-episode rollouts), else so far
    final_obs: Obs
    last_obs: Obs
    stats: dict[str, float]
    source: str = "policy"


@dataclass(slots=True)
class Timer:
    """Seconds per stage since the last `take`."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def skip(self) -> None:
        self._last = time.perf_counter()

    def add(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        out, self.seconds = self.seconds, {}
        return out


def run_chunk(env, actions: np.ndarray, gamma: float):
    """Execute `actions[N,E,A]` -> (obs, reward[N] discounted, raw reward sum, terminated, truncated, success, steps[N]).

    `steps` counts the control steps an env really took. Images are made for the last step alone.
    """
    n, e, _ = actions.shape
    reward, raw, scale = np.zeros(n, np.float64), np.zeros(n, np.float64), 1.0
    steps = np.zeros(n, np.int64)
    over = np.zeros(n, bool)
    for j in range(e):
        if e > 1 and hasattr(env, "images"):
            env.images = j == e - 1 or bool(over.all())
        obs, r, terminated, truncated, info = env.step(actions[:, j])
        steps += ~over
        r = np.asarray(r)
        reward += scale * r
        raw += r
        scale *= gamma
        over = np.asarray(terminated | truncated)
        if over.all() and j < e - 1 and not (hasattr(env, "images") and not env.images):
            break
    return (obs, reward.astype(np.float32), raw, np.asarray(terminated), np.asarray(truncated),
            np.asarray(info["success"]), steps)


@contextmanager
def one_thread():
    """Torch on one thread. Products of a state policy are too small to share, and between them idle threads spin on the
    cores that the simulator wants."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stack(rows: list[Obs]) -> Obs:
    return {k: torch.stack([r[k] for r in rows]) for k in rows[0]}


def _owned(obs: Obs) -> Obs:
    return {k: v.clone() for k, v in obs.items()}


class Collector:
    """Keeps a vector env going between rollouts; the only owner of episode statistics."""

    def __init__(self, env, policy: Policy, gamma: float, seed: int):
        self.env, self.gamma = env, gamma
        self.spec, self.execute = policy.spec, policy.options.execute
        self.timer = Timer()
        self.n = env.num_envs
        raw, _ = env.reset(seed=seed)
        self.obs = _owned(obs_tensors(raw, self.spec))
        self.returns, self.lengths = np.zeros(self.n), np.zeros(self.n, np.int64)

    def collect(self, policy: Policy, decisions: int, generator: torch.Generator, version: int = 0,
                explore: bool = True) -> Rollout:
        """T decisions in every env; envs that end start anew at once."""
        with nullcontext() if self.spec.views else one_thread():
            return self._run(policy, decisions, generator, version, explore, whole=False)

    def episodes(self, policy: Policy, starts: np.ndarray, generator: torch.Generator, version: int = 0,
                 explore: bool = True) -> Rollout:
        """One whole episode per env from `starts[N]`; decisions after its end are masked out."""
        raw, _ = self.env.reset(options={"reset_mask": np.ones(self.n, bool), "starts": starts})
        self.obs = _owned(obs_tensors(raw, self.spec))
        self.returns[:], self.lengths[:] = 0, 0
        with nullcontext() if self.spec.views else one_thread():
            return self._run(policy, -(-self.env.spec.max_steps // self.execute), generator, version, explore, whole=True)

    def _run(self, policy: Policy, decisions: int, generator, version: int, explore: bool, whole: bool) -> Rollout:
        rows: dict[str, list] = {k: [] for k in ("obs", "trace", "x0", "logp", "rewards", "discounts", "done",
                                                 "executed", "mask")}
        final, ends = [], []
        alive = np.ones(self.n, bool)
        self.timer.skip()
        for _ in range(decisions):
            chunk = policy.act(self.obs, generator, explore)
            actions = chunk.actions.numpy()
            self.timer.add("policy")
            raw, reward, gain, terminated, truncated, success, steps = run_chunk(self.env, actions, self.gamma)
            self.timer.add("sim")
            done = (terminated | truncated) & alive
            self.returns += gain * alive
            self.lengths += steps * alive
            for key, value in (("obs", self.obs), ("trace", chunk.trace), ("x0", chunk.x0), ("logp", chunk.logp),
                               ("rewards", reward * alive),
                               ("discounts", np.where(terminated, 0, self.gamma**steps).astype(np.float32)),
                               ("done", done), ("executed", steps), ("mask", alive.copy())):
                rows[key].append(value)
            self.obs = _owned(obs_tensors(raw, self.spec))
            if done.any():
                ids = done.nonzero()[0]
                final.append({k: v[torch.from_numpy(ids)] for k, v in self.obs.items()})
                ends += list(zip(success[ids].tolist(), self.returns[ids].tolist(), self.lengths[ids].tolist()))
                if not whole:
                    self.returns[ids], self.lengths[ids] = 0, 0
                if whole:
                    alive &= ~done
                    if not alive.any():
                        break
                else:
                    raw, _ = self.env.reset(options={"reset_mask": done})
                    self.obs = _owned(obs_tensors(raw, self.spec))
                self.timer.add("sim")
        steps_total = int(sum((e * m).sum() for e, m in zip(rows["executed"], rows["mask"])))
        stats = {"episodes": float(len(ends)), "env_steps": float(steps_total)}
        if ends:
            success, returns, lengths = np.array(ends, np.float64).T
            stats |= {"success": float(success.mean()), "return": float(returns.mean()),
                      "length": float(lengths.mean())}
        tensor = {k: torch.from_numpy(np.stack(rows[k])) for k in ("rewards", "discounts", "done", "executed", "mask")}
        final_obs = {k: torch.cat([f[k] for f in final]) for k in self.obs} if final else \
            {k: v[:0] for k, v in self.obs.items()}
        return Rollout(
            obs=_stack(rows["obs"]), trace=_stack(rows["trace"]), x0=torch.stack(rows["x0"]),
            logp=torch.stack(rows["logp"]), rewards=tensor["rewards"].float(), discounts=tensor["discounts"],
            done=tensor["done"], executed=tensor["executed"], mask=tensor["mask"],
            version=torch.full((len(rows["done"]), self.n), version),
            outcome=torch.from_numpy(self.returns.astype(np.float32)), final_obs=final_obs, last_obs=self.obs,
            stats=stats)

    def state(self) -> dict:
        """Everything needed to go on exactly, or {} where the env cannot be snapshotted."""
        if not hasattr(self.env, "get_state"):
            return {}
        return {"env": self.env.get_state(), "obs": dict(self.obs), "returns": self.returns.copy(),
                "lengths": self.lengths.copy()}

    def set_state(self, state: dict) -> None:
        self.env.set_state(state["env"])
        self.obs = _owned({k: torch.as_tensor(v) for k, v in state["obs"].items()})
        self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
