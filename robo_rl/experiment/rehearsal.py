"""`--rl.rehearse`: the episodes of the policy that RL begins with, kept in RUN/rehearsal.safetensors."""

import zlib
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from robo_rl import files
from robo_rl.algos.rehearsal import Rehearsal, kept_rows
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig, on_policy_options
from robo_rl.experiment.run import Run, Stopped
from robo_rl.noise import mix
from robo_rl.options import OnPolicyOptions
from robo_rl.plugins import is_object
from robo_rl.rollout import Collector
from robo_rl.runtime.device import on_device

FILE = "rehearsal.safetensors"


def check(config: TrainConfig, env) -> None:
    """Raise UserError for a run that cannot rehearse."""
    if not isinstance(config.rl, OnPolicyOptions) or not config.rl.rehearse:
        return
    if config.algo == "bc" or is_object(config.algo):
        raise UserError(f"--rl.rehearse goes with pi_rl, ppo, dppo and reinflow, got --algo {config.algo}")
    if config.learners > 1 or on_device(env) or hasattr(env, "sources"):
        raise UserError(
            "--rl.rehearse goes without --learners, a person in training and simulators that compute on a "
            "device"
        )


def make_rehearsal(run: Run, saved: "dict[str, Any] | None") -> "Rehearsal | None":
    """What is rehearsed in a run: played now, or read again where `saved`, its state in a checkpoint, is
    given; None: nothing."""
    if not isinstance(run.config.rl, OnPolicyOptions) or not run.config.rl.rehearse:
        return None
    o, path = on_policy_options(run.config), run.folder / FILE
    if saved is None:
        data = save(play(run, o))
        files.write_bytes(path, data)
    else:
        data = files.read_bytes(path)
        if zlib.crc32(data) != saved["crc"]:
            raise UserError(
                f"{path} is damaged (its checksum differs from the checkpoint's); restore it from a copy or "
                "start a new run"
            )
    try:
        columns = load(data)
    except SafetensorError as e:
        raise UserError(f"{path} is damaged ({e}); restore it from a copy or start a new run") from e
    return Rehearsal(columns, o.rehearse_kind, zlib.crc32(data))


@torch.no_grad()
def play(run: Run, o: OnPolicyOptions) -> dict[str, torch.Tensor]:
    """Episodes of the present policy -> the rows of its successes; its control steps count as the run's.
    Raises `run.Stopped` when a signal comes."""
    collector = Collector(run.env, run.policy, o.gamma, run.config.seed + 3)
    n, parts, won, steps, left = collector.n, list[dict[str, torch.Tensor]](), 0, 0, o.rehearse_episodes
    while left > 0:
        if run.stop.asked:
            raise Stopped
        starts = np.array([mix(run.config.seed, 83, o.rehearse_episodes - left + i) >> 32 for i in range(n)])
        r = collector.episodes(run.policy, starts)
        assert r.success is not None
        parts.append(kept_rows(r, left))
        won += int(r.success[:left].sum())
        steps += int(r.stats["env_steps"])
        left -= n
    run.step += steps
    rows = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    first = f"{o.rehearse_episodes} episodes of the policy that RL begins with"
    if won:
        run.report.say(f"rehearses {len(rows['logp'])} decisions of the {won} successes among {first}")
    else:
        run.report.say(f"no success among {first}: --rl.rehearse has nothing to rehearse", "warning")
    return rows
