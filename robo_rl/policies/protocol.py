"""What a policy is: what it sees, the chunk that it gives, and the protocol that algorithms and rollouts
need."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from robo_rl.normalise import Normaliser
from robo_rl.options import PolicyOptions
from robo_rl.policies.context import Context
from robo_rl.sampling import Noise

Obs = dict[str, Tensor]  # state float32[B,S]; tokens int64[B,L]; image/<view> uint8[B,h,w,3]


@dataclass(frozen=True, kw_only=True)
class ObsSpec:
    """What the policy sees and commands; saved in the checkpoint and checked against the env."""

    state: int
    action: int
    views: tuple[str, ...] = ()
    image_size: int = 0
    language: bool = False
    # bytes of an instruction that is handed on as text, for a tokeniser of the policy's own; 0: its words are
    # hashed
    text: int = 0
    action_names: tuple[str, ...] = ()
    fit: str = ""
    """How pictures of another size become square (`policies.images`); empty: they have `image_size`."""
    units: tuple[str, ...] = ()
    """Unit of every action axis of a policy that learnt from data in their own units; empty: commands of -1
    to 1."""

    @property
    def raw_pictures(self) -> bool:
        """Whether the policy is shown pictures as they were recorded, of any size: a model that reads text
        makes them square by its own rule."""
        return bool(self.fit and self.text)

    def cut(self, actions):
        """Actions (array or tensor) as envs of the contract cut them, to -1 .. 1; those in units of their own
        stay."""
        return actions if self.units else actions.clip(-1, 1)


@dataclass(slots=True)
class Chunk:
    """`actions[B,E,A]` for the env, the clean chunk `x0[B,H,A]` in normalised units, `logp[B,F]` and the
    trace (`x[B,F,D]`, `x_next[B,F,D]`, `k int64[B,F]`); logp and trace are empty when not exploring."""

    actions: Tensor
    x0: Tensor
    logp: Tensor
    trace: dict[str, Tensor]


class Policy(Protocol):
    """What algorithms and rollouts need; every policy is also an nn.Module (`PolicyBase` has all but the last
    four).

    The contract, which `policies.check` tests: `score(encode(obs), trace)` under the weights that acted is
    the log-prob of `act`; noise comes from `generator` alone; a `state_dict` is all that a copy needs.
    """

    options: PolicyOptions
    spec: ObsSpec
    obs_norm: Normaliser  # fitted to the demonstrations' states
    action_norm: Normaliser  # and actions
    # observation -> context: what `encode` learns, or what stays as it is where that is frozen
    trunk: nn.Module
    context_size: int  # C, the width of `Context.pooled`, which critics of the learner's own see

    def encode(self, obs: Obs) -> Context:
        """Observations, or the columns that a context was stored in (`Context.columns`), as a context of B
        rows."""
        ...

    def commands(self, x: Tensor) -> Tensor:
        """Clean chunk [B,D] or [B,H,A], normalised -> actions [B,E,A] for the env."""
        ...

    def freeze_base(self) -> None:
        """Called once, after supervised learning."""

    factors: int  # F: log-probs of a chunk

    @property
    def noise_scale(self) -> float:
        """How much it explores, for the log."""
        ...

    def act(self, obs: Obs, generator: Noise, explore: bool) -> Chunk:
        """A chunk for each row; not exploring: as it is evaluated, logp [B,0] and no trace."""
        ...

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(logp [B,F], entropy per action entry, a scalar) of traces under the present weights."""
        ...

    def bc_loss(
        self, obs: Obs, chunk: Tensor, mask: Tensor, generator: torch.Generator, noises: int = 1
    ) -> Tensor:
        """Supervised loss, a scalar, on actions `chunk` [B,H,A] in the env's units where `mask` [B,H] is
        1."""
        ...

    # of nn.Module

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...

    def train(self, mode: bool = True) -> Self: ...

    def eval(self) -> Self: ...

    def to(self, device: Any) -> Self: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def requires_grad_(self, requires_grad: bool = True) -> Self: ...
