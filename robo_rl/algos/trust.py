"""A bound on how far an update moves the policy: its displacement is held by the KL divergence that was
measured.

    k = mean over probe rows, factors and executed entries of KL(N(mean_0, std_0) || N(mean, std)) / target
    after step m of M,
      k <= 1:  lr <- lr clip(sqrt(((1 - k) / (M - m)) / (k / m)), 4/5, 5/4)        what is left, spent evenly
      k > 1:   theta <- theta_0 + s (theta - theta_0),  lr <- lr max(s, 1/4),  s = sqrt((m / M) / k)
    the next update begins with the geometric mean of this one's rates, times min(2, 1/sqrt(k))

The target is --rl.trust-kl times near_success(p)^2, p the success of about the last 256 episodes of the run's
rollouts.

theta_0 and its means are those at the start of the update. A step of a chain is a Gaussian given the x before
it, so its KL is known, not estimated; a joint density has the sum over its entries, and of its factors. The
mean over both does not grow with the length of the chunk, the axes of the arm or the denoise steps. Trust
regions by measured KL: Schulman et al. 2015 (arXiv 1502.05477), eq. 14; a learning rate that follows it:
Schulman et al. 2017, section 4, and rsl_rl's adaptive schedule, which changes the rate after the fact and
takes no step back.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from robo_rl.algos.credit import density_scale, pick
from robo_rl.corrections import k3
from robo_rl.optim import Optimizer, kernels
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, Obs
from robo_rl.sampling import gaussian_kl

PROBES = 512  # rows that KL is measured on
# factors on the learning rate: least after a cut, most after a step, most after an update
CUT, PACE, RAISE = 0.25, 1.25, 2.0
# episodes of which a run knows its success, and how many a look before RL counts for
RECENT, BEFORE = 256, 32
RANGE = 1e-3, 1e3  # of the learning rate, over the one that was chosen


def near_success(successes: float, episodes: float) -> float:
    """Factor on an update's displacement: 4 p (1 - p) above p = 1/2, and 1 below; p = (successes +
    1)/(episodes + 2).

    Whitened advantages have a std of 1 however rarely a policy fails: what few failures say is scaled up,
    with its noise. The squared ratio of their signal to its noise goes with p (1 - p). Where most episodes
    fail there is less to lose, and the whole step is made.
    """
    p = max(0.5, (successes + 1) / (episodes + 2))
    return 4 * p * (1 - p)


class Outcomes:
    """Success of about the last `RECENT` episodes of a run's rollouts -> the `near_success` that its updates
    go by.

    One rollout ends too few episodes to tell, and those of envs that began together end together, successes
    first: of the rollouts before the first episode can have failed by its time limit, `early` of them,
    nothing is counted. Until then success is `before`, that of the last look (None: unknown). Where episodes
    began in stored states their success is no measure of what is left to learn.
    """

    def __init__(self, before: "float | None", early: int):
        self.early = early
        self.won, self.ended = (0.0, 0.0) if before is None else (before * BEFORE, float(BEFORE))

    def observe(self, stats: dict[str, float]) -> float:
        """Count the episodes of a rollout with these statistics -> `near_success` of all that count."""
        n = stats.get("episodes", 0.0) if "success" in stats else 0.0
        if stats.get("stored"):
            return 1.0
        if self.early > 0:
            self.early -= 1
        elif n:
            kept = max(0.0, 1 - n / RECENT)
            self.won, self.ended = self.won * kept + stats["success"] * n, self.ended * kept + n
        return near_success(self.won, self.ended)

    def state_dict(self) -> dict:
        return {"won": self.won, "ended": self.ended, "early": self.early}

    def load_state_dict(self, state: dict) -> None:
        self.won, self.ended, self.early = state["won"], state["ended"], state["early"]


class TrustRegion:
    """Owns the learning rate of `opt`, whose parameters are `params`, while `target` [nats per entry] is
    above 0."""

    def __init__(self, params: Sequence[Tensor], opt: Optimizer, lr: float, target: float):
        self.params, self.opt, self.chosen, self.target = params, opt, lr, target
        self.lr, self.goal, self.spent, self.cuts, self.mean = lr, target, 0.0, 0, float

    def begin(
        self,
        policy: "ChainPolicy | GaussianPolicy",
        obs: Obs,
        trace: dict[str, Tensor],
        rows: Tensor,
        steps: int,
        mean: Callable[["Tensor | float"], float] = float,
        lr_scale: float = 1.0,
        size: float = 1.0,
    ) -> None:
        """An update of `steps` steps begins: keep the weights, and the moments of some `rows` of obs and
        trace [B,...].

        `mean`: over the ranks of a sharded learner; `lr_scale`: of this update alone; `size`: of its
        displacement, 1 at the target."""
        some = rows[torch.linspace(0, len(rows) - 1, min(PROBES, len(rows))).long()]
        self.policy, self.obs, self.trace, self.mean = policy, pick(obs, some), pick(trace, some), mean
        self.start = [x.detach().clone() for _, x in self.stepping()]
        self.before = self.scored()
        self.made, self.steps, self.cuts, self.spent, self.lr_scale = 0, steps, 0, 0.0, lr_scale
        self.goal = self.target * size**2
        self.rates: list[float] = []
        self.scale_lr(1.0)

    @torch.no_grad()
    def scored(self) -> tuple[Tensor, ...]:
        """Of the probes under the present weights: mean and std [P,F,n], or log-probs [P,F] of a policy
        without `moments`."""
        reshard = getattr(self.policy, "reshard", None)
        # FSDP keeps whole weights after a pass without gradient, whatever its shards become
        if callable(reshard):
            reshard()
        context = self.policy.encode(self.obs)
        if hasattr(self.policy, "moments"):
            return self.policy.moments(context, self.trace)
        return self.policy.score(context, self.trace)[:1]

    def measure(self) -> float:
        """KL per entry from the start of the update to the present weights, over the target."""
        before, now = self.before, self.scored()
        if len(now) == 2:
            kl = gaussian_kl(before[0], before[1], now[0], now[1]).mean()
        else:  # Schulman's k3 of the density
            entries = self.policy.options.execute * self.policy.spec.action
            kl = k3(density_scale(self.policy) * (now[0] - before[0])).mean() / entries
        return max(1e-9, self.mean(kl) / self.goal)  # rounding leaves no zero

    def stepped(self) -> None:
        """A step was made: measure, and set the pace of those that follow; from beyond the target go back
        towards the start."""
        self.made += 1
        self.rates.append(math.log(self.lr))
        self.spent, share = self.measure(), self.made / self.steps
        if self.spent <= 1:
            if self.made < self.steps:
                pace = math.sqrt((1 - self.spent) / (1 - share) / (self.spent / share))
                self.scale_lr(min(PACE, max(1 / PACE, pace)))
            return
        self.cuts += 1
        self.scale_lr(max(CUT, math.sqrt(share / self.spent)))
        for _ in range(20):  # far from the start KL is not quadratic
            self.shrink(math.sqrt(share / self.spent))
            self.spent = self.measure()
            if self.spent <= 1:
                return

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """The displacement of the update times `factor`."""
        own = self.stepping()
        # where a copy in float32 steps it is made in the first update
        start = [a.to(x.dtype) for a, (_, x) in zip(self.start, own, strict=True)]
        kernels._foreach_lerp_([x for _, x in own], start, 1 - factor)
        for p, x in own:
            if p is not x:
                p.copy_(x)

    def stepping(self) -> list[tuple[Tensor, Tensor]]:
        """Of each parameter this process's part, and what steps: itself, or of one in 16 bits its copy in
        float32 (`robo_rl.optim.AdamW`), which would else undo what is taken back."""
        own = [(p, local(p)) for p in self.params]
        return [(x, self.opt.state[p].get("master", x) if p in self.opt.state else x) for p, x in own]

    def scale_lr(self, factor: float) -> None:
        low, high = (r * self.chosen for r in RANGE)
        self.lr = min(high, max(low, self.lr * factor))
        self.opt.param_groups[0]["lr"] = self.lr * self.lr_scale

    def end(self) -> dict[str, float]:
        """The update is over -> metrics."""
        used = math.exp(sum(self.rates) / len(self.rates))
        self.lr = used * min(RAISE, max(1.0, self.spent**-0.5))
        del self.policy, self.obs, self.trace, self.start, self.before
        return {"kl": self.spent * self.goal, "kl_target": self.goal, "lr": used, "kl_cuts": float(self.cuts)}

    def state_dict(self) -> dict:
        return {"lr": self.lr}

    def load_state_dict(self, state: dict) -> None:
        self.lr = state["lr"]


def local(p: Any) -> Tensor:
    """This process's part of a sharded parameter, or all of one that is whole."""
    return p.to_local() if hasattr(p, "to_local") else p
