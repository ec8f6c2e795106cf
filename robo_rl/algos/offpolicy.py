"""What methods that learn from replay share: a critic ensemble with chunk TD, and the loop around it.

    y    = sum_{k<n} gamma^k r_k + gamma^n (1 - terminated) v(s')     n: the steps of the chunk that ran
    loss = mean_i (Q_i(s, a) - y)^2                                   every critic against the same y

`v` is the method's own (a sample of the actor, the best of many, the data's), taken over `subset` random
critics of the Polyak average (REDQ, Chen et al. 2021, eq. 4). A time limit is no terminal: it bootstraps from
the state it cut.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robo_rl.algos import credit
from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.credit import descend
from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.optim import AdamW, Optimizer, kernels
from robo_rl.options import FLOWS, VLAS, OffPolicyOptions
from robo_rl.policies.context import Context
from robo_rl.policies.offpolicy import Ensemble
from robo_rl.policies.policy import Obs
from robo_rl.replay import POLICY, Batch

Sample = Callable[[int], Batch]  # transitions wanted -> a batch with the guaranteed shares


def make_adam(params: Sequence[Tensor], lr: float) -> Optimizer:
    """Adam as the papers of these methods have it: eps 1e-8 (SAC, RLPD, IQL, Cal-QL, EXPO)."""
    return credit.make_adam(params, lr, eps=1e-8)


@dataclass(slots=True)
class Rows:
    """A Batch as tensors, with the contexts its observations encode to. actions[B,E,A], own[B,E], the rest
    [B]."""

    obs: Obs
    context: Context
    next_context: Context
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    own: Tensor
    bound: Tensor
    before: Tensor
    source: Tensor

    @property
    def flat(self) -> Tensor:
        """Actions [B,E*A]."""
        return self.actions.flatten(1)

    @property
    def worthy(self) -> Tensor:
        """bool[B]: demonstrated, corrected, or the policy's own with a return above 0 after it: a success
        where rewards are sparse."""
        return (self.source > POLICY) | (self.bound > 0)

    def imitated(self, imitate: str) -> Tensor:
        """float[B,E]: the steps that a flow imitates, of what is `worthy` ("success") or of all."""
        return (self.own & self.worthy[:, None] if imitate == "success" else self.own).float()


@torch.no_grad()
def tensors(policy, batch: Batch) -> Rows:
    """Batch -> Rows where the policy's weights are; its trunk is not trained by these methods."""
    device = device_of(policy)

    def there(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device)

    obs = {k: there(v) for k, v in batch.obs.items()}
    return Rows(
        obs,
        policy.encode(obs),
        policy.encode({k: there(v) for k, v in batch.next_obs.items()}),
        there(batch.actions),
        there(batch.rewards),
        there(batch.discounts),
        there(batch.own),
        there(batch.bound),
        there(batch.before),
        there(batch.source),
    )


def td_target(rows: Rows, values: Tensor, options: OffPolicyOptions) -> Tensor:
    """y = r + discount * v [B]; with `max_target` > 0 clamped to the range [0, max_target] that returns are
    known to have; with `floor` no lower than the discounted return that did follow in an episode that
    terminated (He et al. 2017, eq. 6)."""
    y = rows.rewards + rows.discounts * values
    y = y.clamp(0, options.max_target) if options.max_target else y
    return torch.maximum(y, rows.bound) if options.floor else y


def td_loss(q: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of critics q [Q,B] against one target y [B], mean over both."""
    return (q - y).square().mean()


@contextmanager
def frozen(params: Sequence[Tensor]):
    """Inside, no gradient is made for `params`; one flows through them. Those that learn do so afterwards."""
    learn = [p for p in params if p.requires_grad]
    for p in learn:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in learn:
            p.requires_grad_(True)


def polyak(slow: torch.nn.Module, fast: torch.nn.Module, tau: float) -> None:
    """slow <- (1 - tau) slow + tau fast."""
    with torch.no_grad():
        kernels._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), tau)


def cql_penalty(
    q_policy: Tensor,
    logp: Tensor | None,
    q_random: Tensor,
    q_data: Tensor,
    bound: Tensor,
    d: int,
    temperature: float,
) -> Tensor:
    """Cal-QL's regulariser (Nakamoto et al. 2023, eq. 5 with CQL(H)'s importance weights, Kumar et al. 2020,
    appendix F):

        T log mean_i exp(Q_i / T) / q(a_i)  -  Q(s, a_data),     an estimate of T log integral exp(Q / T) da

    over M actions of the policy, drawn from q = exp(`logp` [B,M]), of which Q_i counts at least the return
    `bound` [B] that followed (-inf: no bound: plain CQL), and M' uniform ones in the box of `d` entries, q =
    2^-d. q_policy [Q,B,M], q_random [Q,B,M'], q_data [Q,B]. `logp` None: the density is not known, all
    actions weigh the same (T log mean exp(Q_i / T)).
    """
    calibrated = torch.maximum(q_policy, bound[:, None]) / temperature
    random = q_random / temperature
    if logp is not None:
        calibrated, random = calibrated - logp, random + d * math.log(2)
    every = torch.cat([calibrated, random], -1)
    return (temperature * (torch.logsumexp(every, -1) - math.log(every.shape[-1])) - q_data).mean()


def fresh_critics(policy, action: int, options: OffPolicyOptions, seed: int) -> Ensemble:
    """Critics of a policy's contexts and `action` numbers, of weights drawn from `seed` alone, where its own
    are."""
    o = options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Ensemble(
            policy.context_size, action, o.critic_hidden, o.critic_layers, o.critics, o.layer_norm
        )
    return made.to(device_of(policy))


class CriticLearner:
    """Owns the critics of a policy's contexts and `action` numbers, where its weights are, their Polyak
    average and their optimizer. `target`: an Ensemble that is the average."""

    def __init__(
        self, policy, action: int, options: OffPolicyOptions, seed: int, target: Ensemble | None = None
    ):
        o = self.options = options
        self.critic = fresh_critics(policy, action, o, seed + 1)
        self.target = target if target is not None else copy.deepcopy(self.critic)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        self.params = list(self.critic.parameters())
        self.opt = make_adam(self.params, o.critic_lr)

    def subset(self, generator: torch.Generator) -> Tensor:
        """Which critics the target takes the least of."""
        drawn = torch.randperm(self.options.critics, generator=generator)[: self.options.subset]
        return drawn.to(self.params[0].device)

    def least(self, context: Tensor, actions: Tensor, generator: torch.Generator) -> Tensor:
        """For pooled contexts [B,C]: min over a random subset of the averaged critics, [B]."""
        with torch.no_grad():
            return self.target(context, actions, self.subset(generator)).min(0).values

    def step(
        self, rows: Rows, y: Tensor, penalty: "Callable[[Tensor], Tensor] | None" = None
    ) -> dict[str, Tensor]:
        """One step towards y [B]; `penalty(q_data[Q,B])` is added to the loss."""
        q = self.critic(rows.context.pooled, rows.flat)
        loss = td_loss(q, y)
        total = loss if penalty is None else loss + penalty(q)
        norm = descend(total, self.params, self.opt, self.options.max_grad_norm)
        polyak(self.target, self.critic, self.options.tau)
        out = {
            "critic_loss": loss.detach(),
            "q": q.detach().mean(),
            "q_target": y.mean(),
            "critic_norm": norm,
        }
        if penalty is not None:
            out["penalty"] = (total - loss).detach()
        return out

    def state_dict(self) -> dict:
        return {
            "critic": self.critic.state_dict(),
            "target": self.target.state_dict(),
            "opt": self.opt.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.critic.load_state_dict(state["critic"])
        self.target.load_state_dict(state["target"])
        self.opt.load_state_dict(state["opt"])


class OffPolicyLearner:
    """The loop. A method gives `critic_step(rows)` and `actor_step(rows)`, each -> metrics, and what it
    owns."""

    def __init__(self, policy, options: OffPolicyOptions, seed: int):
        self.policy, self.options = policy, options
        self.generator = torch.Generator().manual_seed(seed + 2)
        self.updates = 0

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        raise NotImplementedError

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        raise NotImplementedError

    def update(self, sample: Sample, count: int, actor: bool = True) -> dict[str, float]:
        """`count` critic updates, an actor update after every `actor_every` of them -> mean metrics."""
        o, sums, times = self.options, {}, {}
        for _ in range(count):
            rows = tensors(self.policy, sample(o.batch))
            step = self.critic_step(rows)
            self.updates += 1
            if actor and self.updates % o.actor_every == 0:
                step |= self.actor_step(rows)
            for key, value in step.items():
                sums[key] = sums.get(key, 0) + value
                times[key] = times.get(key, 0) + 1
        return {k: float(v) / times[k] for k, v in sums.items()}

    offline_actor = False  # whether the actor learns in the offline stage too
    average: AveragedWeights | None = None  # of the actor, where it is that which is evaluated and kept
    owns: tuple[str, ...] = ()  # attributes with a state_dict of their own, which a checkpoint carries

    def begin_online(self) -> None:
        """The critic is ready to be listened to: the offline stage is over."""

    def doubt(self, sample: Sample) -> str:
        """Why little may come of it, in a sentence, as a batch tells before the actor learns; "": nothing
        says so."""
        return ""

    def state_dict(self) -> dict:
        return {"generator": self.generator.get_state(), "updates": self.updates} | {
            name: getattr(self, name).state_dict() for name in self.owns
        }

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]
        for name in self.owns:
            getattr(self, name).load_state_dict(state[name])


def check_judge(name: str, policy, options) -> None:
    """Raise UserError unless the critics that the policy carries, if it does, are those of `options`."""
    p = policy.options
    here, there = (
        (p.critics, p.critic_hidden, p.critic_layers),
        (options.critics, options.critic_hidden, options.critic_layers),
    )
    if policy.judge is not None and (here != there or not options.layer_norm):
        raise UserError(
            f"{name}: the policy carries its critics: --policy.critics, critic-hidden and critic-layers must "
            f"equal those of --rl and --rl.layer-norm stay on, got {here} and {there}"
        )


def on_trunk(options, actor: str) -> str:
    """Words for who gave a vision-language-action model to a method whose policy is to be `actor` on its
    trunk."""
    return f" or {', '.join(FLOWS)} with --policy.actor {actor}" if options.kind in VLAS else ""


class Temperature:
    """alpha > 0, moved so that the entropy -E log pi meets `target` (Haarnoja et al. 2018b, eq. 18)."""

    def __init__(self, alpha: float, lr: float, target: float, device: "torch.device | str" = "cpu"):
        self.log = torch.tensor(max(alpha, 1e-8)).log().to(device).requires_grad_(True)
        self.target, self.lr = target, lr
        self.opt = AdamW([self.log], max(lr, 1e-12), fused=False)

    @property
    def value(self) -> Tensor:
        return self.log.detach().exp()

    def step(self, logp: Tensor) -> None:
        """logp [B] of fresh actions, detached."""
        if not self.lr:
            return
        self.opt.zero_grad()
        (-self.log.exp() * (logp.detach().mean() + self.target)).backward()
        self.opt.step()

    def state_dict(self) -> dict:
        return {"log": self.log.detach().clone(), "opt": self.opt.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        with torch.no_grad():
            self.log.copy_(state["log"])
        self.opt.load_state_dict(state["opt"])
