"""RECAP: learning from mixed episodes by advantage-conditioned imitation (Physical Intelligence 2025, arXiv
2511.14759).

    r_t = -1, at the last step 0 after a success and -C_fail after a failure          section V-C, eq. 5
    R_t = sum of r from t on, over the task's longest episode and C_fail: in [-1, 0]
    V:  cross-entropy of p(V | o_t) over B bins with the bin of R_t                    section IV-A, eq. 1
    A_t = R_t - R_{t+N} + V(o_{t+N}) - V(o_t), or R_t - V(o_t) beyond the end          section III
    I_t = A_t > epsilon of the task, or a person chose a_t                             section IV-B, eq. 3
    flow matching on (o_t, I_t, a_t); a share of the rows is not told I_t              eq. 3, by dropout
    acting: v = v(o) + beta (v(o, I = 1) - v(o))            eq. 2, classifier-free guidance

The last line is the policy's (`policies.guidance.Guidance`): `--policy.guidance` is beta, and 1 is the
conditional policy alone.

Where we differ: values of an episode come from a function that did not learn from it (`folds`), for with few
episodes a value function knows the return of each; it is a small network on what the supervised policy's
trunk pools, not a language model of its own. The indicator, 1, -1 or 0 (not told), is in a small policy's
context by itself and times what the trunk pools; a vision-language-action model reads it as text of its
prompt, as in the paper. epsilon is a quantile over all frames of a task, and no more actions are positive
than it has in successes. Where a person took over, what was before counts as a failure. Each round begins
with the supervised policy, not the last one.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from robo_rl.algos.credit import descend, make_adam
from robo_rl.algos.onpolicy import Demos
from robo_rl.errors import UserError
from robo_rl.options import RecapOptions
from robo_rl.policies.context import ADVANTAGE
from robo_rl.policies.nets import mlp


@dataclass(frozen=True, slots=True)
class Episodes:
    """What the labels of E episodes of F frames in all depend on; rows from_[e] .. to[e] - 1 are episode
    e. An episode that a person took over is several: see `cut_at`."""

    from_: np.ndarray
    """int64[E]"""
    to: np.ndarray
    """int64[E]"""
    success: np.ndarray
    """bool[E]"""
    task: np.ndarray
    """int64[E]"""
    forced: np.ndarray
    """bool[F]: actions that are positive whatever their advantage."""
    recording: np.ndarray
    """int64[E]: the recorded episode that an episode is of."""


def cut_at(episodes: Episodes, begins: np.ndarray) -> Episodes:
    """The episodes, cut where a person takes over, bool[F]: what went before had to be ended, so it counts as
    a failure, and the outcome is that of what follows."""
    first = np.zeros(len(begins), bool)
    first[episodes.from_] = True
    from_ = np.flatnonzero(first | begins)
    of = np.searchsorted(episodes.from_, from_, side="right") - 1
    to = np.append(from_[1:], episodes.to[-1])
    return replace(
        episodes,
        from_=from_,
        to=to,
        success=episodes.success[of] & (to == episodes.to[of]),
        task=episodes.task[of],
        recording=episodes.recording[of],
    )


def returns_to_go(episodes: Episodes, fail: float) -> np.ndarray:
    """Return of every frame, float32[F] in [-1, 0]: minus the steps that are left, and minus `fail` longest
    episodes after a failure, over 1 + fail longest episodes of the task."""
    length, out = episodes.to - episodes.from_, np.empty(episodes.to[-1], np.float32)
    for task in np.unique(episodes.task):
        longest = length[episodes.task == task].max()
        for e in np.flatnonzero(episodes.task == task):
            left = np.arange(length[e])[::-1] / longest
            out[episodes.from_[e] : episodes.to[e]] = -(left + fail * (not episodes.success[e])) / (1 + fail)
    return out


def value_bin(returns: Tensor, bins: int) -> Tensor:
    """The bin int64[...] of values in [-1, 0] whose centre, one of `bins` from -1 to 0, is nearest."""
    return ((returns + 1) * (bins - 1)).round().long().clamp(0, bins - 1)


def value_loss(logits: Tensor, returns: Tensor) -> Tensor:
    """Cross-entropy [B] of distributions over bins, logits [B,bins], with the bins of returns [B] (eq. 1)."""
    return cross_entropy(logits, value_bin(returns, logits.shape[-1]), reduction="none")


def expected_value(logits: Tensor) -> Tensor:
    """Mean [...] of a distribution over bins, logits [...,bins]."""
    return logits.softmax(-1) @ torch.linspace(-1, 0, logits.shape[-1])


def advantages(returns: np.ndarray, values: np.ndarray, episodes: Episodes, lookahead: int) -> np.ndarray:
    """N-step advantage float32[F]; lookahead 0: of the whole episode."""
    out = returns - values
    for a, b in zip(episodes.from_, episodes.to, strict=True):
        if 0 < lookahead < b - a:
            out[a : b - lookahead] += (values - returns)[a + lookahead : b]
    return out


def indicators(adv: np.ndarray, episodes: Episodes, positive: float) -> tuple[np.ndarray, dict[int, float]]:
    """(bool[F]: which actions are called positive, {task: epsilon}): those above the task's quantile 1 -
    `positive`, but no more than it has in successes, and forced ones."""
    length = episodes.to - episodes.from_
    task, won = np.repeat(episodes.task, length), np.repeat(episodes.success, length)
    share = {int(k): min(positive, float(won[task == k].mean())) for k in np.unique(task)}
    epsilon = {k: float(np.quantile(adv[task == k], 1 - share[k])) for k in share}
    above = np.array([epsilon[k] for k in sorted(epsilon)])[np.searchsorted(sorted(epsilon), task)]
    return (adv > above) | episodes.forced | (positive == 1), epsilon


class ValueFunctions:
    """Distributional value functions on pooled contexts, one for each fold of the episodes; a fold's own is
    the one that judges it."""

    def __init__(self, features: int, options: RecapOptions, seed: int):
        self.options, self.generator = options, torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = [features] + [options.value_hidden] * options.value_layers + [options.bins]
            self.nets = [mlp(sizes, "silu") for _ in range(options.folds)]

    def fit(self, features: Tensor, returns: Tensor, fold: Tensor) -> dict[str, float]:
        """Learn from features [F,C] and returns [F] of the other folds int64[F] -> mean cross-entropy [nats]
        of what was learnt from, and of what was held out."""
        learnt, held = [], []
        self.mean, self.std = features.mean(0), features.std(0).clamp(min=1e-3)
        x = self.scaled(features)
        for k, net in enumerate(self.nets):
            own = fold == k
            rows = (~own if len(self.nets) > 1 else own).nonzero().squeeze(1)
            self._fit(net, x, returns, rows)
            with torch.no_grad():
                loss = value_loss(net(x), returns)
            learnt.append(float(loss[rows].mean()))
            held.append(float(loss[own].mean()))
        return {"value_loss": float(np.mean(learnt)), "value_loss_held_out": float(np.mean(held))}

    def _fit(self, net: torch.nn.Module, x: Tensor, returns: Tensor, rows: Tensor) -> None:
        o, params = self.options, list(net.parameters())
        opt = make_adam(params, o.value_lr)
        for _ in range(o.value_updates):
            batch = rows[torch.randint(0, len(rows), (o.value_batch,), generator=self.generator)]
            descend(value_loss(net(x[batch]), returns[batch]).mean(), params, opt, 1.0)

    def scaled(self, features: Tensor) -> Tensor:
        """Features of mean 0 and std 1 over what was learnt from."""
        return (features - self.mean) / self.std

    @torch.no_grad()
    def values(self, features: Tensor, fold: Tensor) -> Tensor:
        """Value [F] of features [F,C], each by the function of its fold."""
        out, x = features.new_empty(len(features)), self.scaled(features)
        for k, net in enumerate(self.nets):
            own = fold == k
            out[own] = expected_value(net(x[own]))
        return out


def label(
    features: Tensor, episodes: Episodes, options: RecapOptions, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """(bool[F]: which actions are positive, metrics) of frames whose pooled contexts are `features` [F,C];
    the values are learnt anew."""
    count = int(episodes.recording[-1]) + 1
    folds = min(options.folds, count)
    drawn = np.random.default_rng([seed, 17]).permutation(count) % folds
    fold = torch.from_numpy(np.repeat(drawn[episodes.recording], episodes.to - episodes.from_))
    returns = returns_to_go(episodes, options.fail)
    critic = ValueFunctions(features.shape[1], replace(options, folds=folds), seed)
    metrics = critic.fit(features, torch.from_numpy(returns), fold)
    values = critic.values(features, fold).numpy()
    adv = advantages(returns, values, episodes, options.lookahead)
    told, epsilon = indicators(adv, episodes, options.positive)
    left = float(np.square(returns - values).mean()) / max(float(returns.var()), 1e-12)
    won = np.repeat(episodes.success, episodes.to - episodes.from_)
    metrics |= {
        "value_explained": 1 - left,
        "positive": float(told.mean()),
        "forced": float(episodes.forced.mean()),
        "positive_of_successes": float(told[won].mean()) if won.any() else 0.0,
        "positive_of_failures": float(told[~won].mean()) if not won.all() else 0.0,
        "epsilon": float(np.mean(list(epsilon.values()))),
    }
    return told, metrics


def untold(sample: Demos, drop: float) -> Demos:
    """`sample`, whose observations tell the advantage (1 or -1), with 0 in a share `drop` of the rows."""

    def dropped(size: int, generator: torch.Generator):
        obs, chunk, mask = sample(size, generator)
        keep = torch.rand(size, generator=generator) >= drop
        return obs | {ADVANTAGE: obs[ADVANTAGE] * keep.to(obs[ADVANTAGE].device)}, chunk, mask

    return dropped


def make(policy, options: RecapOptions, seed: int, demos: "Demos | None" = None) -> RecapOptions:
    """The options, if the policy can be told an advantage. UserError otherwise."""
    if not policy.options.advantage:
        raise UserError("recap needs a policy that is told the advantage: --policy.advantage")
    return options
