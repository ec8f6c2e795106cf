"""Classifier-free guidance of a chain towards good actions (RECAP, arXiv 2511.14759, eq. 2; Ho and Salimans
2022, arXiv 2207.12598).

    v = v(o) + beta (v(o, good) - v(o))

is the velocity whose density is pi(a | o) (pi(a | o, good) / pi(a | o))^beta to first order; beta 1 is the
conditional policy, 0 the other. The network of a chain is one class with and without it, and so are its
weights.
"""

from typing import Any, NamedTuple

from torch import Tensor, cat, zeros
from torch.nn.functional import pad

from robo_rl.policies.context import ADVANTAGE, Context
from robo_rl.policies.nets import ChunkHead, VelocityNet
from robo_rl.policies.protocol import Obs


class Pair(NamedTuple):
    """What `embed` made of a context, and of the same rows untold."""

    told: Any
    plain: Any


class Guidance(VelocityNet):
    """Beside a network of chains: where a context has its plain rows, both are asked."""

    def embed(self, context: Context, repeats: int = 1) -> Any:
        told = super().embed(context, repeats)
        return told if context.plain is None else Pair(told, super().embed(context.plain, repeats))

    def forward(self, embedded: Any, x: Tensor, time: Any) -> Tensor:
        if not isinstance(embedded, Pair):
            return super().forward(embedded, x, time)
        return self.guided(super().forward(embedded.told, x, time), super().forward(embedded.plain, x, time))

    def at_steps(self, embedded: Any, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(embedded, Pair):
            return super().at_steps(embedded, features, x, k)
        told, times = super().at_steps(embedded.told, features, x, k)
        return self.guided(told, super().at_steps(embedded.plain, features, x, k)[0]), times

    def guided(self, told: Tensor, plain: Tensor) -> Tensor:
        """The velocity of both."""
        return plain + self.beta * (told - plain)


class GuidedChunkHead(Guidance, ChunkHead):
    """The head of a small policy, with guidance. Weights that were told nothing, or one number alone, are
    taken: the rest is 0."""

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if (weight := state_dict.get(entry := prefix + "from_context.weight")) is not None:
            more = self.from_context.in_features - weight.shape[1]
            state_dict[entry] = pad(weight, (0, max(0, more)))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def told_context(pooled: Tensor, told: "Tensor | None", beta: float) -> Context:
    """A small policy's context with the advantage [B]: as one more number, and times what was pooled, for a
    number alone would hardly part what is done in one place. None, where the policy acts: as if told that
    what follows is good, and unless beta is 1 beside it the same rows untold."""

    def with_number(number: Tensor) -> Tensor:
        number = number.to(pooled.dtype)[:, None]
        return cat([pooled, number, number * pooled], 1)

    if told is not None:
        return Context(with_number(told))
    good = pooled.new_ones(len(pooled))
    return Context(with_number(good), plain=None if beta == 1 else Context(with_number(0 * good)))


def supervised(obs: Obs, policy) -> Obs:
    """Observations as supervised learning shows them: a policy of `advantage` is told that of `obs`, or where
    there is none nothing."""
    if not policy.options.advantage or ADVANTAGE in obs:
        return obs
    return obs | {ADVANTAGE: zeros(len(obs["state"]), device=obs["state"].device)}
