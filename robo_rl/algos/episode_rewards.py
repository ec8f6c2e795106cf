"""What an episode is judged by beside its return: several rewards (GDPO), and successes that are flawed
(FAPO).

    measures: steps   control steps of the episode
              change  mean |a_{t+1} - a_t| of its commands, which lie in [-1, 1]
    rewards:  success, speed = success gamma^steps, smooth = success (1 - change / 2), all in [0, 1]
              return, as it is
    flawed:   a success of which a measure is above its bound

Speed and smoothness count in successes alone, as GDPO's conditioned rewards: else standing still would be the
smoothest way to fail. A measure or a reward of the user's own is `module:function` of (rollout, policy) that
gives a tensor [N].
"""

import torch
from torch import Tensor

from robo_rl.advantages import flawed_reward
from robo_rl.errors import UserError
from robo_rl.options import VLAS, RolloutOptions
from robo_rl.options.method import MEASURES, REWARDS, named_numbers
from robo_rl.plugins import check_call, is_object, load_object
from robo_rl.rollout import Rollout


def steps(r: Rollout, policy) -> Tensor:
    """Control steps of each episode [N]."""
    assert r.lengths is not None
    return r.lengths.float()


def change(r: Rollout, policy) -> Tensor:
    """Mean absolute difference of successive commands of each episode [N]; 0 of a single one."""
    t, n = r.mask.shape
    chunk = policy.action_norm.inverse(r.x0[:, :, : policy.options.execute]).clamp(-1, 1)  # [T,N,E,A]
    ran = (torch.arange(chunk.shape[2], device=chunk.device) < r.executed[..., None]) & r.mask[..., None]
    commands, ran = (
        chunk.permute(1, 0, 2, 3).reshape(n, -1, chunk.shape[3]),
        ran.permute(1, 0, 2).reshape(n, -1),
    )
    both = ran[:, 1:] & ran[:, :-1]
    moved = commands.diff(dim=1).abs().mean(-1)
    return torch.where(both, moved, 0.0).sum(1) / both.sum(1).clamp(min=1)


def success(r: Rollout) -> Tensor:
    """1 where the episode succeeded, else 0 [N]."""
    assert r.success is not None
    return r.success.float()


class EpisodeRewards:
    """The rewards and bounds that `options` name, checked against the policy that they are measured of."""

    def __init__(self, options: RolloutOptions, policy):
        self.gamma, self.penalty = options.gamma, options.flaw_penalty
        self.weights = (
            named_numbers("rl.rewards", options.rewards, REWARDS) if options.advantage == "gdpo" else {}
        )
        self.bounds = named_numbers("rl.flawed", options.flawed, MEASURES)
        self.own = {}
        for option, name in [("--rl.rewards", x) for x in self.weights] + [
            ("--rl.flawed", x) for x in self.bounds
        ]:
            if is_object(name):
                self.own[name] = load_object(name, option)
                check_call(self.own[name], name, option, ("rollout", "policy"))
        small = (
            hasattr(policy, "action_norm")
            and policy.options.kind not in VLAS
            and not policy.options.commit_least
        )
        if {"smooth", "change"} & {*self.weights, *self.bounds} and not small:
            raise UserError(
                "smooth and change are measured of the commands of a small policy without --latency: leave "
                "them out of --rl.rewards and --rl.flawed, or name a function of your own"
            )

    def measure(self, name: str, r: Rollout, policy) -> Tensor:
        """A measure or a reward [N] by its name."""
        if name in self.own:
            own, n = self.own[name](r, policy), r.mask.shape[1]
            if not isinstance(own, Tensor) or own.shape != (n,) or not own.isfinite().all():
                got = (
                    f"{own.dtype} of shape {tuple(own.shape)}"
                    if isinstance(own, Tensor)
                    else type(own).__name__
                )
                raise UserError(
                    f"{name} must give a tensor [N] of finite numbers, one for each of the {n} episodes, got "
                    f"{got}"
                )
            return own.float().to(r.outcome.device)
        if name in ("steps", "change"):
            return steps(r, policy) if name == "steps" else change(r, policy)
        if name == "return":
            return r.outcome
        good = success(r)
        return (
            good
            if name == "success"
            else good * self.gamma ** steps(r, policy)
            if name == "speed"
            else good * (1 - change(r, policy) / 2)
        )

    def rewards(self, r: Rollout, policy) -> tuple[Tensor, Tensor, dict[str, float]]:
        """(rewards [N,R], their weights [R], the mean of each for the log)."""
        columns = {name: self.measure(name, r, policy) for name in self.weights}
        told = {f"reward_{name.split(':')[-1]}": float(x[r.fresh].mean()) for name, x in columns.items()}
        return (
            torch.stack([*columns.values()], 1),
            torch.tensor([*self.weights.values()]).to(r.outcome.device),
            told,
        )

    def outcome(self, r: Rollout, policy) -> tuple[Tensor, dict[str, float]]:
        """The outcome [N] that a group is compared by: the return, or FAPO's reward where successes may be
        flawed."""
        if not self.bounds:
            return r.outcome, {}
        good = success(r)
        flawed = torch.stack(
            [self.measure(name, r, policy) > bound for name, bound in self.bounds.items()]
        ).any(0) & (good > 0)
        share = float(flawed[r.fresh].sum() / good[r.fresh].sum().clamp(min=1))
        return flawed_reward(good, flawed, self.penalty), {"flawed": share}
