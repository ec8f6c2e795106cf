"""`--rl.recycle`: failures of every update are played again, cut at their last good state and completed by a
teacher (SCOPE)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.demos import check_expert
from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.evaluation import decide
from robo_rl.experiment.collect import best_policy
from robo_rl.experiment.config import TrainConfig, on_policy_options
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.experiment.run import Run
from robo_rl.noise import mix
from robo_rl.options import OnPolicyOptions
from robo_rl.plugins import is_object
from robo_rl.policies import obs_tensors
from robo_rl.rollout import Rollout
from robo_rl.rollout_control.recycle import Failure, Teacher, complete, cuts_of, expert_teacher, lessons
from robo_rl.runtime.device import on_device

CUTS = 3  # of a failure that are tried
KEPT = 8192  # lessons, the newest
ROWS = 256  # of a minibatch, at most


def recycles(config: TrainConfig) -> bool:
    """Whether failures are played again."""
    return config.algo != "bc" and isinstance(config.rl, OnPolicyOptions) and config.rl.recycle > 0


def check(config: TrainConfig, env) -> None:
    """Raise UserError for a run whose failures cannot be played again."""
    if not recycles(config):
        return
    o = on_policy_options(config)
    if is_object(config.algo):
        raise UserError(f"--rl.recycle goes with pi_rl, ppo, dppo and reinflow, got --algo {config.algo}")
    if (
        config.learners > 1
        or config.periodic
        or config.backend == "ray"
        or config.dream
        or config.latency
        or config.policy.commit_least
        or config.sim.split(":")[0] in ROBOTS
        or on_device(env)
        or hasattr(env, "sources")
        or config.obs != "state"
    ):
        raise UserError(
            "--rl.recycle plays episodes again in a simulator of this process, from state: it goes without "
            "--obs rgb, --latency, --learners, --periodic, --dream, --backend ray, arms, a person in "
            "training and simulators on a device"
        )
    if o.recycle_teacher == "expert":
        check_expert(env)
    else:
        best_policy(o.recycle_teacher, env)


def policy_teacher(policy) -> Teacher:
    """The first action of the policy's chunk, without noise, decided anew at every step."""
    return lambda obs, mask: decide(policy, obs, torch.Generator().manual_seed(0))[:, 0]


class Recycler:
    """Owns an env and the lessons that were learnt in it: called as a sampler of (obs, chunk [B,H,A], mask
    [B,H])."""

    def __init__(self, config: TrainConfig, spec, say=lambda *words: None, env=None):
        o, self.config, self.spec, self.say = on_policy_options(config), config, spec, say
        self.env = make_env(config, o.recycle * CUTS) if env is None else env
        self.most, self.device = o.recycle, config.device
        name = o.recycle_teacher
        self.teacher = (
            expert_teacher(self.env) if name == "expert" else policy_teacher(best_policy(name, self.env))
        )
        self.rows: dict[str, Tensor] = {}
        self.looks, self.refused = 0, 0
        self.last: dict[str, float] = {}

    def look(self, r: Rollout, policy) -> int:
        """Play some failures of a rollout of whole episodes again, and keep what the teacher showed ->
        control steps."""
        failures = self.failures(r, policy)
        self.looks += 1
        chunk = policy.options.execute
        plan = [(f, cut) for f in failures for cut in cuts_of(len(f.action), chunk, CUTS)]
        done = (
            complete(self.env, [f for f, _ in plan], [c for _, c in plan], self.teacher, chunk)
            if plan
            else []
        )
        best: dict[int, int] = {}  # of each failure the latest cut that the teacher made good
        for i, ((f, _), c) in enumerate(zip(plan, done, strict=True)):
            if c.same and c.success and len(c.action):
                best[id(f)] = i
        for i in best.values():
            self.keep(*lessons(done[i], policy.options.horizon))
        refused = sum(not c.same for c in done)
        if refused and not self.refused:
            self.say(
                "a failed episode shows other states when it is played again (--rl.recycle): such episodes "
                "are left out; does the simulator depend on more than start and actions?",
                "warning",
            )
        self.refused += refused
        steps, shares = (
            sum(c.steps for c in done),
            [plan[i][1] / len(plan[i][0].action) for i in best.values()],
        )
        self.last = {
            "failures": float(len(failures)),
            "completed": float(len(best)),
            "steps": float(steps),
            "lessons": float(len(self)),
            "refused": float(refused),
        } | ({"cut": float(np.mean(shares))} if shares else {})
        return steps

    def failures(self, r: Rollout, policy) -> list[Failure]:
        """Some of the episodes that failed, drawn evenly, of those that can be played again."""
        assert r.start is not None and r.success is not None and r.lengths is not None
        chunk = policy.options.execute
        lost = r.done.any(0) & ~r.success & (r.start[0] >= 0) & (r.lengths >= 2 * chunk)
        which = lost.nonzero().squeeze(1).numpy()
        order = np.random.default_rng(mix(self.config.seed, 89, self.looks)).permutation(len(which))[
            : self.most
        ]
        out = []
        for n in np.sort(which[order]).tolist():
            made = int(r.mask[:, n].sum())
            commands = policy.commands(r.x0[:made, n].flatten(1).to(device_of(policy))).cpu().numpy()
            length = int(r.lengths[n])
            out.append(
                Failure(
                    int(r.start[0, n]),
                    commands.reshape(-1, commands.shape[2])[:length].copy(),
                    r.obs["state"][:made, n].numpy().copy(),
                )
            )
        return out

    def keep(self, obs: list[dict], chunk: np.ndarray, mask: np.ndarray) -> None:
        """Take lessons up; the oldest go."""
        seen = obs_tensors({k: np.stack([o[k] for o in obs]) for k in obs[0]}, self.spec)
        new = {f"obs/{k}": torch.as_tensor(v).clone() for k, v in seen.items()} | {
            "chunk": torch.from_numpy(chunk.astype(np.float32)),
            "mask": torch.from_numpy(mask),
        }
        self.rows = {k: torch.cat([self.rows[k], v])[-KEPT:] if self.rows else v for k, v in new.items()}

    def __len__(self) -> int:
        return len(self.rows.get("mask", ()))

    def __call__(self, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        chosen = torch.randint(len(self), (min(size, ROWS),), generator=generator)
        rows = {k: v[chosen].to(self.device) for k, v in self.rows.items()}
        return {k[4:]: v for k, v in rows.items() if k.startswith("obs/")}, rows["chunk"], rows["mask"]

    def metrics(self) -> dict[str, float]:
        return {f"recycle/{k}": v for k, v in self.last.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": dict(self.rows), "looks": self.looks, "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.looks, self.refused = dict(state["rows"]), state["looks"], state["refused"]

    def close(self) -> None:
        self.env.close()


def make_recycler(run: Run, saved: "dict[str, Any] | None") -> "Recycler | None":
    """The recycler of a run, as it was where `saved` is given; None: failures are not played again."""
    if not recycles(run.config):
        return None
    recycler = Recycler(run.config, run.policy.spec, run.report.say)
    if saved is not None:
        recycler.load_state_dict(saved)
    return recycler
