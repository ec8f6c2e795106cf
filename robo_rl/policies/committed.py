"""A flow policy that decides while its last chunk still runs: rollouts for training with latency.

A decision is asked for E rows after the one before. Inference takes d control periods, in which rows E .. E +
d - 1 of the running chunk run. Those are the first d rows of the new chunk, clean at every denoise step
(`Context.committed`); the policy draws the others. Of them run rows d .. E + d' - 1, d' being the d of the
decision that follows.

    log p = sum over rows d <= h < E + d' and axes a of log N(x_next[h,a]; mean[h,a], std[h,a]^2)

So what was committed is part of the observation, as for the critic (`seen`), and no part of the action: it
has no density, and no gradient. A policy that was taught with rows given cannot tell when within the d
periods its chunk came, for until then either chunk says the same; d stands for any shorter time too. The
first chunk of an episode follows none: the robot stands still for d periods, and the chunk runs from its row
0 on, to row E - d - 1 at first.

Source: training-time real-time chunking, arXiv 2512.05964, for supervised learning; that a committed prefix
belongs to the observation of a policy gradient follows from what ran.

Axes: B rows, H steps in the chunk, E executed before the next decision, A action, D = H A, F random steps, c
most rows given.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from robo_rl.noise import mix
from robo_rl.options import PolicyOptions
from robo_rl.policies.context import COUNT, GIVEN, PREFIX, Context
from robo_rl.policies.policy import ChainPolicy
from robo_rl.policies.protocol import Chunk, Obs
from robo_rl.sampling import LOG_2PI, Noise, gaussian_logp, randint, randn

# of a trace: int64 [B,2], the first row that the policy chose, and the one after the last that runs
ROWS = "rows"


class CommittedPolicy(ChainPolicy):
    """`ChainPolicy` of flows whose observations may have `GIVEN` and `COUNT`; without them it is that."""

    def encode(self, obs: Obs) -> Context:
        context = super().encode(obs)
        if PREFIX in obs or GIVEN not in obs:
            return context
        context, _ = self.commit(context, obs[COUNT])
        assert context.committed is not None
        there = context.committed[:, : self.options.commit, None] > 0
        low, high = (
            self.action_norm(torch.full((self.spec.action,), x, device=there.device)) for x in (-1.0, 1.0)
        )
        # commands end at +-1
        return replace(context, given=torch.where(there, obs[GIVEN].clamp(low, high), 0.0))

    def fixed(self, context: Context) -> tuple[Tensor, Tensor]:
        """Which entries of a chunk are given, bool [B,D], and their values float [B,D]."""
        assert context.committed is not None and context.given is not None
        where = context.committed.bool().repeat_interleave(self.width, 1)
        return where, torch.nn.functional.pad(
            context.given.flatten(1), (0, self.chunk - context.given[0].numel())
        )

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        """As `ChainPolicy.act`; the trace has `ROWS` too. The log-prob is that of `score`, to the last
        bit."""
        if GIVEN not in obs:
            return super().act(obs, generator, explore)
        context, steps = self.encode(obs), self.options.denoise_steps
        b, d = len(context), self.chunk
        where, goal = self.fixed(context)
        embedded, times = self.head.embed(context), self.head.steps(self.features)
        x, drawn, noise = randn(generator, b, d).to(goal.device), None, goal
        if explore and self.one:
            drawn = self.draws[randint(generator, len(self.draws), b).to(goal.device)]
            noise = randn(generator, b, d).to(goal.device)
        before, after = [], []
        for k in range(steps):
            before.append(torch.where(where, goal, x))
            out = self.head(embedded, before[k], times[k])
            x = self._mean(before[k], out, k, "quiet")
            if explore:
                noise = noise if self.one else randn(generator, b, d).to(goal.device)
                random = self._mean(before[k], out, k, "loud") + self._std(k, embedded, times[k]) * noise
                x = random if drawn is None else torch.where((drawn == k)[:, None], random, x)
            after.append(x)
        x = torch.where(where, goal, x)
        x0 = x.view(b, self.options.horizon, -1)
        if not explore:
            return Chunk(self.commands(x), x0, x0.new_empty(b, 0), {})
        index = torch.arange(steps, device=x.device).expand(b, -1) if drawn is None else drawn[:, None]
        row = torch.arange(b, device=x.device)[:, None]
        trace = {
            "x": torch.stack(before)[index, row],
            "x_next": torch.stack(after)[index, row],
            "k": index.contiguous(),
            ROWS: self.running(obs[COUNT], generator),
        }
        return Chunk(self.commands(x), x0, self.score(context, trace)[0], trace)

    def running(self, count: Tensor, generator: Noise) -> Tensor:
        """`ROWS` of chunks of which `count` [B] rows are given, or which wait; how many the next decision is
        given is drawn here."""
        o, wait = self.options, (-count).clamp(min=0)
        following = o.commit_least + randint(generator, o.commit - o.commit_least + 1, len(count)).to(
            count.device
        )
        return torch.stack([count.clamp(min=0), o.execute - wait + following], 1)

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As `ChainPolicy.score`, over the rows that the policy chose and that run."""
        if ROWS not in trace:
            return super().score(context, trace)
        (b, f, d), shape = trace["x"].shape, (-1, self.options.horizon, self.width)
        mean, std = self._steps(context, trace)
        step, rows = (
            torch.arange(self.options.horizon, device=mean.device),
            trace[ROWS].repeat_interleave(f, 0),
        )
        own = ((step >= rows[:, :1]) & (step < rows[:, 1:]))[..., None].expand(-1, -1, self.width)
        spread = std.expand_as(mean).reshape(shape)
        logp = gaussian_logp(trace["x_next"].reshape(b * f, d).view(shape), mean.view(shape), spread)
        logp = torch.where(own, logp, 0.0).sum((-2, -1)) * self._entries()[1]
        spread = spread[own & (spread > 0)]
        return logp.view(b, f), (torch.log(spread) + 0.5 * (LOG_2PI + 1)).mean() if len(
            spread
        ) else spread.new_zeros(())

    def moments(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As `ChainPolicy.moments`, of the first E rows that the policy chose."""
        if ROWS not in trace:
            return super().moments(context, trace)
        b, f, _ = trace["x"].shape
        mean, std = self._steps(context, trace)
        row = trace[ROWS][:, :1] + torch.arange(self.options.execute, device=mean.device)
        index = row[:, None, :, None].expand(-1, f, -1, self.width)
        mean, std = (
            x.reshape(b, f, -1, self.width).gather(2, index).flatten(2) for x in (mean, std.expand_as(mean))
        )
        return mean, std


# ---- from one decision to the next -------------------------------------------------------------------------


def first_waits(options: PolicyOptions, keys) -> np.ndarray:
    """Periods int64 [n] that robots stand still before the first chunk of an episode, each by its key, an
    integer, alone."""
    span = options.commit - options.commit_least + 1
    return np.array([options.commit_least + mix(3, int(key)) % span for key in keys], np.int64)


def first_rows(options: PolicyOptions, action: int, wait: np.ndarray) -> dict[str, np.ndarray]:
    """What observations say where no chunk runs: `GIVEN` float32 [n,c,A] zeros, and `COUNT` int64 [n], minus
    the `wait` [n] to come."""
    return {GIVEN: np.zeros((len(wait), options.commit, action), np.float32), COUNT: -wait}


def played(actions: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The actions [n,E,A] of E periods: where `COUNT` [n] says that the robot waits it stands still first."""
    waits, out = np.flatnonzero(count < 0), actions.copy()
    for i, wait in zip(waits, -count[waits], strict=True):
        out[i, :wait], out[i, wait:] = 0, actions[i, : actions.shape[1] - wait]
    return out


def rows_to_come(
    options: PolicyOptions, x0: np.ndarray, rows: np.ndarray, count: np.ndarray
) -> dict[str, np.ndarray]:
    """What the observations say after E periods with the chunks x0 [n,H,A], whose `ROWS` are rows [n,2] and
    `COUNT` count [n]."""
    first, steps = options.execute + np.minimum(count, 0), np.arange(options.commit)
    following = rows[:, 1] - first
    ahead = np.take_along_axis(x0, (first[:, None] + steps)[..., None], 1)
    return {GIVEN: np.where((steps < following[:, None])[..., None], ahead, np.float32(0)), COUNT: following}


def kept_rows(obs: dict[str, np.ndarray], mask: np.ndarray, wait: np.ndarray) -> dict[str, np.ndarray]:
    """What `obs` says of them in the envs of `mask` [n], and in the others that no chunk runs, for `wait` [n]
    periods."""
    return {
        GIVEN: np.where(mask[:, None, None], obs[GIVEN], np.float32(0)),
        COUNT: np.where(mask, obs[COUNT], -wait),
    }


def seen(context: Context) -> Tensor:
    """What a critic sees of a context: what it pools, and the rows that are given [B, C + c (A + 1)] where
    some may be."""
    if context.given is None or context.committed is None:
        return context.pooled
    return torch.cat(
        [context.pooled, context.given.flatten(1), context.committed[:, : context.given.shape[1]]], 1
    )


def seen_size(policy) -> int:
    """Numbers that a critic sees of a context of `policy`."""
    o = policy.options
    return policy.context_size + (o.commit * (policy.spec.action + 1) if o.commit_least else 0)
