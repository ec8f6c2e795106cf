"""Rollouts of simulators whose tensors live on a device: observations, actions and rewards never come to the
host.

What `robo_rl.rollout.Collector` does with arrays, for envs that give torch tensors (Isaac, ManiSkill's GPU
backend). The host waits for the device once per decision, to know which envs begin anew, not once per step.
Axes as in `robo_rl.rollout`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.noise import mix, seed_noise
from robo_rl.policies import Policy, obs_tensors
from robo_rl.policies.policy import Obs
from robo_rl.rollout import Rollout, Timer
from robo_rl.runtime.feed import never


def on_device(env) -> bool:
    """Whether an env gives torch tensors."""
    return getattr(env, "device", None) is not None


class DeviceCollector:
    """Keeps a vector env of tensors going; the only owner of its episode statistics, which are on the device
    too."""

    def __init__(self, env, policy: Policy, gamma: float, seed: int):
        self.env, self.gamma, self.seed = env, gamma, seed
        self.spec, self.execute, self.device = policy.spec, policy.options.execute, device_of(policy)
        self.n, self.decision, self.timer, self.generator = env.num_envs, 0, Timer(), torch.Generator()
        self.obs = self._read(env.reset(seed=seed)[0])
        self.returns, self.lengths, self.gains = (
            torch.zeros(self.n, dtype=d, device=self.device)
            for d in (torch.float64, torch.int64, torch.float32)
        )
        self.alive = torch.ones(self.n, dtype=torch.bool, device=self.device)

    def _read(self, raw: dict) -> Obs:
        return {k: v.to(self.device) for k, v in obs_tensors(raw, self.spec).items()}

    def begin(self, starts: np.ndarray) -> None:
        """Start one episode per env from `starts[N]`."""
        self.obs = self._read(
            self.env.reset(options={"reset_mask": np.ones(self.n, bool), "starts": starts})[0]
        )
        for x in (self.returns, self.lengths, self.gains):
            x.zero_()
        self.alive.fill_(True)

    def run_chunk(self, actions: Tensor) -> tuple[dict, dict[str, Tensor]]:
        """Execute `actions[N,E,A]` -> the observation after it, and what `robo_rl.rollout.run_chunk` gives
        beside it, as columns [N].

        Every step is made: an env that is over stays as it is, and to ask whether all are over would wait for
        the device.
        """
        out, e = {}, actions.shape[1]
        over = torch.zeros(self.n, dtype=torch.bool, device=self.device)
        reward, steps = (
            torch.zeros(self.n, dtype=torch.float64, device=self.device),
            torch.zeros_like(self.lengths),
        )
        raw_sum, raw = torch.zeros_like(reward), {}
        for j in range(e):
            if e > 1 and hasattr(self.env, "images"):
                self.env.images = j == e - 1
            raw, r, terminated, truncated, info = self.env.step(actions[:, j])
            r, terminated, truncated = (x.to(self.device) for x in (r, terminated, truncated))
            steps += ~over
            reward += self.gamma**j * r
            raw_sum += r
            over = terminated | truncated
            out = {"terminated": terminated, "over": over, "success": info["success"].to(self.device)}
        return raw, out | {"reward": reward.float(), "raw": raw_sum, "steps": steps}

    def decide(self, policy: Policy, version: int, explore: bool, whole: bool) -> tuple[dict[str, Any], bool]:
        """One decision in every env -> its row of columns, and whether an episode ended; `whole` leaves an
        env that is over as it is."""
        seed_noise(self.generator, mix(self.seed, 0, self.decision))
        self.timer.skip()
        seen, chunk = self.obs, policy.act(self.obs, self.generator, explore)
        self.timer.add("policy")
        raw, c = self.run_chunk(chunk.actions)
        alive = self.alive
        done = c["over"] & alive
        self.returns += c["raw"] * alive
        self.lengths += c["steps"] * alive
        self.gains = self.gains * self.gamma**self.execute + c["reward"] * alive
        row = {
            "obs": seen,
            "trace": chunk.trace,
            "x0": chunk.x0,
            "logp": chunk.logp,
            "rewards": c["reward"] * alive,
            "done": done,
            "mask": alive.clone(),
            "discounts": torch.where(c["terminated"], 0.0, (self.gamma ** c["steps"]).float()),
            "executed": c["steps"],
            "success": c["success"],
            "returns": self.returns.clone(),
            "lengths": self.lengths.clone(),
            "gains": self.gains.clone(),
            "version": torch.full_like(c["steps"], version),
            "final": {},
        }
        self.gains = torch.where(done, 0.0, self.gains)
        self.obs = self._read(raw)
        ended = bool(done.any())  # the one wait of a decision
        if ended:
            row["final"] = {k: v[done] for k, v in self.obs.items()}
            if whole:
                self.alive = alive & ~done
            else:
                self.returns, self.lengths = self.returns * ~done, self.lengths * ~done
                self.obs = self._read(self.env.reset(options={"reset_mask": done.cpu().numpy()})[0])
        self.decision += 1
        self.timer.add("sim")
        return row, ended

    def collect(self, policy: Policy, decisions: int, version: int = 0, explore: bool = True) -> Rollout:
        """T decisions in every env; envs that end start anew at once."""
        return self._rollout([self.decide(policy, version, explore, False)[0] for _ in range(decisions)])

    def episodes(self, policy: Policy, starts: np.ndarray, version: int = 0, explore: bool = True) -> Rollout:
        """One whole episode per env from `starts[N]`; decisions after its end are masked out."""
        self.begin(starts)
        rows, left = [], True
        while left and len(rows) < -(-self.env.spec.max_steps // self.execute):
            row, ended = self.decide(policy, version, explore, True)
            rows.append(row)
            left = not ended or bool(self.alive.any())
        self.alive = torch.ones_like(self.alive)
        return self._rollout(rows)

    def _rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        c: dict[str, Any] = {
            k: torch.stack([r[k] for r in rows]) for k, v in rows[0].items() if isinstance(v, Tensor)
        }
        groups = {g: {k: torch.stack([r[g][k] for r in rows]) for k in rows[0][g]} for g in ("obs", "trace")}
        finals = [r["final"] for r in rows if r["final"]]
        final = {k: torch.cat([f[k] for f in finals]) if finals else v[:0] for k, v in self.obs.items()}
        over = c["done"]
        counts = torch.stack([over.sum(), (c["executed"] * c["mask"]).sum()]).tolist()
        stats = {"episodes": float(counts[0]), "env_steps": float(counts[1])}
        if counts[0]:
            means = torch.stack(
                [c[k][over].double().mean() for k in ("success", "returns", "lengths")]
            ).tolist()
            stats |= dict(zip(("success", "return", "length"), means, strict=True))
        return Rollout(
            obs=groups["obs"],
            trace=groups["trace"],
            x0=c["x0"],
            logp=c["logp"],
            rewards=c["rewards"],
            discounts=c["discounts"],
            done=over,
            executed=c["executed"],
            mask=c["mask"],
            version=c["version"],
            gains=c["gains"],
            outcome=c["returns"][-1].float(),
            final_obs=final,
            last_obs=dict(self.obs),
            stats=stats,
            success=(c["success"] & over).any(0),
            lengths=c["lengths"][-1],
        )


class DeviceFeed:
    """A synchronous feed of one `DeviceCollector`: collect, update, collect. The sim has no snapshots, so
    what is in flight is lost with the process; a run goes on with new episodes."""

    ledger = None  # nothing is in flight while the learner learns

    def __init__(self, collector: DeviceCollector, policy: Policy, decisions: int, group: int, explore: bool):
        self.collector, self.policy, self.decisions, self.group, self.explore = (
            collector,
            policy,
            decisions,
            group,
            explore,
        )
        self.version = 0
        if group and collector.n % group:
            raise UserError(f"--envs must be a multiple of --rl.group {group}, got {collector.n}")

    def next(self, stop: Callable[[], bool] = never) -> Rollout:
        """The next batch, which is not kept in part: `stop` is not asked."""
        c = self.collector
        if not self.group:
            return c.collect(self.policy, self.decisions, self.version, self.explore)
        starts = [mix(c.seed, 5, 0, c.decision, i) >> 32 for i in range(c.n // self.group)]
        return c.episodes(self.policy, np.repeat(starts, self.group), self.version, self.explore)

    def gathered(self) -> int:
        """Not known before the batch is whole."""
        return 0

    def publish(self) -> None:
        """The learner has made an update."""
        self.version += 1

    def commit(self) -> None:
        """Nothing is kept beside a checkpoint."""

    def crowded(self) -> bool:
        """Whether something waits for a checkpoint: never, here."""
        return False

    def stats(self) -> dict[str, float]:
        """Seconds per stage since the last call."""
        return {f"time/{k}": v for k, v in self.collector.timer.take().items()}

    def spans(self) -> list[tuple[str, int, int]]:
        """One process has no timeline."""
        return []

    def note(self) -> str:
        """A few words for the progress line."""
        return ""

    def state(self) -> dict:
        """Which decision comes next: its noise is that of no other."""
        return {"version": self.version, "decision": self.collector.decision}

    def load_state(self, state: dict) -> bool:
        """Go on with other episodes -> False: not exactly."""
        self.version, self.collector.decision = state["version"], state["decision"]
        return False

    def close(self) -> None:
        """Close the envs."""
        self.collector.env.close()
