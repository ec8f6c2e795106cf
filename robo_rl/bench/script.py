"""Online RL as a script has it, for `robo_rl bench train` to hold us against: one file, plain modules, one
loop.

In the manner of CleanRL's PPO: act for T decisions, GAE, epochs of shuffled minibatches, one Adam for policy
and value, on envpool where it is installed and else on Gymnasium's SyncVectorEnv. It leaves out what a script
leaves out: statistics, normalisation, true bootstraps at time limits, staleness, checkpoints.
"""

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.bench.plain import PlainChain
from robo_rl.bench.rows import lacking, versioned
from robo_rl.experiment.config import TrainConfig, on_policy_options
from robo_rl.policies.nets import mlp


class Gaussian(nn.Module):
    """PPO's Gaussian policy: `act` and `score` as `PlainChain` has them."""

    def __init__(self, state: int, chunk: int, hidden: int, layers: int, activation: str):
        super().__init__()
        self.net, self.log_std = (
            mlp([state, *[hidden] * layers, chunk], activation),
            nn.Parameter(torch.zeros(chunk)),
        )

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        d = torch.distributions.Normal(self.net(state), self.log_std.exp())
        x = d.mean + d.stddev * torch.randn(d.mean.shape, generator=generator)
        return x, x, d.log_prob(x).sum(-1, keepdim=True)

    def score(self, state: Tensor, x: Tensor) -> Tensor:
        return (
            torch.distributions.Normal(self.net(state), self.log_std.exp()).log_prob(x).sum(-1, keepdim=True)
        )


class Script:
    """`iterate()` is a rollout and its update; `updates` counts gradient steps."""

    def __init__(self, t: TrainConfig, policy, threads: int, torch_threads: int):
        self.t, self.torch_threads, self.updates, n = t, torch_threads, 0, t.envs
        if lacking("envpool", "envpool", "envpool"):
            env = gymnasium.vector.SyncVectorEnv(
                [lambda: gymnasium.make(t.task, disable_env_checker=True)] * n
            )
            where = f"{versioned('gymnasium')} SyncVectorEnv"
        else:
            import envpool

            env, where = (
                envpool.make(t.task, env_type="gymnasium", num_envs=n, num_threads=min(threads, n), seed=0),
                versioned("envpool"),
            )
        count = f"{torch_threads} thread{'s' * (torch_threads > 1)} of torch"
        self.name = f"a plain script, {versioned('torch')} and {where}, {count}"
        self.env, self.spec, o = env, policy.spec, t.policy
        self.actor = (
            Gaussian(self.spec.state, policy.chunk, o.hidden, o.layers, o.activation)
            if o.kind == "gaussian"
            else PlainChain(policy)
        )
        self.critic = mlp([self.spec.state, *[o.hidden] * o.layers, 1], o.activation)
        self.params = [p for n, p in self.actor.named_parameters() if not n.startswith("base")] + [
            *self.critic.parameters()
        ]
        self.opt, self.generator = (
            torch.optim.Adam(self.params, on_policy_options(t).lr),
            torch.Generator().manual_seed(0),
        )
        self.joint = o.kind != "diffusion"
        self.state = torch.as_tensor(env.reset()[0], dtype=torch.float32)
        assert self.state.shape == (n, self.spec.state), "the script sees something else"

    def iterate(self) -> None:
        torch.set_num_threads(self.torch_threads)
        o, e, kept = on_policy_options(self.t), self.t.policy.execute, []
        for _ in range(o.decisions):
            state = self.state
            with torch.no_grad():
                chunk, *trace, logp = self.actor.act(state, self.generator)
                value = self.critic(state)[:, 0]
            reward, done = np.zeros(len(state), np.float32), np.zeros(len(state), bool)
            for action in np.clip(chunk.view(len(state), e, -1).numpy(), -1, 1).swapaxes(0, 1):
                obs, r, terminated, truncated, _ = self.env.step(action.astype(self.env.action_space.dtype))
                reward += r * ~done
                done |= terminated | truncated
            self.state = torch.as_tensor(obs, dtype=torch.float32)
            kept.append((state, logp, value, torch.from_numpy(reward), torch.from_numpy(done), *trace))
        state, logp, value, reward, done, *trace = (torch.stack(x) for x in zip(*kept, strict=True))
        with torch.no_grad():
            adv, last, after, gamma = torch.zeros_like(value), 0.0, self.critic(self.state)[:, 0], o.gamma**e
            for k in range(o.decisions - 1, -1, -1):
                going = (~done[k]).float()
                delta = reward[k] + gamma * after * going - value[k]
                adv[k] = last = delta + gamma * o.lam * going * last
                after = value[k]
        self.learn(*(x.flatten(0, 1) for x in (state, logp, adv, adv + value, *trace)))

    def learn(self, state: Tensor, logp_old: Tensor, adv: Tensor, returns: Tensor, *trace: Tensor) -> None:
        o = on_policy_options(self.t)
        for _ in range(o.epochs):
            for rows in torch.randperm(len(state), generator=self.generator).split(o.minibatch):
                a = adv[rows]
                a = (a - a.mean()) / (a.std() + 1e-8)
                log_ratio = self.actor.score(state[rows], *(x[rows] for x in trace)) - logp_old[rows]
                ratio = (log_ratio.sum(1, keepdim=True) if self.joint else log_ratio).exp()
                loss = -torch.min(ratio * a[:, None], ratio.clamp(0.8, 1.2) * a[:, None]).mean()
                loss = loss + 0.5 * (self.critic(state[rows])[:, 0] - returns[rows]).square().mean()
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.params, o.max_grad_norm)
                self.opt.step()
                self.updates += 1

    def close(self) -> None:
        self.env.close()


def scripts(t: TrainConfig, policy, threads: int, quick: bool, counts: tuple[int, ...]) -> list[Script]:
    """The script with every number of torch threads."""
    return [Script(t, policy, threads, k) for k in (counts[:1] if quick else counts)]
