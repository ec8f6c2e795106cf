"""Honest evaluation: a fixed list of starts, the same noise for every checkpoint, deterministic chains."""

import warnings
from collections.abc import Callable

import numpy as np
import torch

from robo_rl.errors import UserError
from robo_rl.policies import Policy, obs_tensors
from robo_rl.rollout import run_chunk, to_policy
from robo_rl.types import has_success


def decide(policy, obs: dict, generator: torch.Generator, explore: bool = False) -> np.ndarray:
    """Actions [N, E, A] of a policy, with exploration noise if `explore`; of a plain function of the
    observation too, which may give [N, A]."""
    if hasattr(policy, "act"):
        chunk = policy.act(to_policy(obs_tensors(obs, policy.spec), policy), generator, explore=explore)
        actions = chunk.actions.cpu().numpy()
    else:
        given, n = policy(obs), len(next(iter(obs.values())))
        try:
            actions = np.asarray(
                given.detach().cpu() if isinstance(given, torch.Tensor) else given, np.float32
            )
        except (TypeError, ValueError):
            raise UserError(
                f"a policy gives actions [N, A], or chunks of them [N, E, A]; this one gave {type(given)}, "
                "which is no array of numbers (a pair of actions and something else is none: give the first)"
            ) from None
        if actions.ndim not in (2, 3) or len(actions) != n or not actions.size:
            raise UserError(
                f"a policy gives actions [N, A], or chunks of them [N, E, A], of N = {n} observations; this "
                f"one gave an array of shape {list(actions.shape)}"
            )
    if not np.isfinite(actions).all():
        raise UserError(
            "the policy gave actions that are not finite; look for weights or observations that are not"
        )
    return actions[:, None] if actions.ndim == 2 else actions


ALIKE = (
    "the {} starts of the evaluation begin with one and the same observation: where neither the policy nor "
    "the env draws anything, that is one episode, and the interval is too narrow"
)


def _same(x):
    return x


def _beginnings(obs: dict) -> list[bytes]:
    """The observation of each env as bytes, to tell which are equal."""
    shown = [np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x) for x in obs.values()]
    return [b"".join(x[i].tobytes() for x in shown) for i in range(len(shown[0]))]


def evaluate(
    env,
    policy: "Policy | Callable[[dict], np.ndarray]",
    starts: np.ndarray,
    seed: int = 0,
    tick: Callable[[int], None] = lambda done: None,
    explore: bool = False,
) -> dict:
    """Run one episode per start (in batches of env.num_envs), without exploration noise unless `explore`.

    Returns lists, one entry per start: success, return (undiscounted), length [steps], task, and of a world
    model origin, the recorded frame that the episode began from, and cut, whether it ended because the model
    no longer knew; and no_success, True, where the task knows no success. The chain's initial noise depends
    on (seed, batch, decision) alone, so two checkpoints meet the same noise at the same start. An env of
    `one_stream` takes no starts: its batch is seeded by the first of them, so the same number of envs meets
    the same episodes. A function with a method `reset` hears when episodes begin. An env with a method
    `translate` says what it shows a policy, and what that one's actions are as its commands
    (`world_models.own_units.translate`).
    """
    n = env.num_envs
    observe, command = env.translate(policy) if hasattr(env, "translate") else (_same, _same)
    out: dict[str, list] = {"success": [], "return": [], "length": [], "task": []}
    with_images = hasattr(env, "images")
    if (origin := getattr(env, "origins", lambda ids: None)(starts)) is not None:
        out["origin"] = origin.tolist()
    if hasattr(env, "cuts"):
        out["cut"] = []
    begun: set[bytes] = set()
    for batch, first in enumerate(range(0, len(starts), n)):
        ids = starts[first : first + n]
        padded = np.concatenate([ids, np.repeat(ids[-1:], n - len(ids))])
        raw, _ = (
            env.reset(seed=int(ids[0]) & 0x7FFFFFFF)
            if getattr(env, "one_stream", False)
            else env.reset(options={"reset_mask": np.ones(n, bool), "starts": padded})
        )
        generator = torch.Generator().manual_seed(seed * 7919 + batch)
        if (begin := getattr(policy, "reset", None)) is not None:
            begin()
        over, success = np.zeros(n, bool), np.zeros(n, bool)
        total, length = np.zeros(n), np.zeros(n, np.int64)
        task = [str(t) for t in raw["task"]]
        if len(begun) < 2:  # pictures of all starts would take memory, and two that differ tell enough
            begun |= set(_beginnings(raw)[: len(ids)])
        while not over.all():
            actions = command(decide(policy, observe(raw), generator, explore))
            raw, _, gain, terminated, truncated, ok, steps = run_chunk(env, actions, 1.0)
            total += gain
            length += steps * ~over
            over, success = terminated | truncated, success | ok
            if with_images:
                env.images = True
        k = len(ids)
        out["success"] += success[:k].astype(int).tolist()
        out["return"] += [round(float(v), 6) for v in total[:k]]
        out["length"] += length[:k].tolist()
        out["task"] += task[:k]
        if "cut" in out:
            out["cut"] += env.cuts()[:k].astype(int).tolist()
        tick(first + k)
    if len(begun) == 1 < len(starts):
        warnings.warn(ALIKE.format(len(starts)), stacklevel=2)
    return out if has_success(env) else out | {"no_success": True}
