"""A cheaper copy of a policy, for rollouts that choose what is played again exactly (`--rl.candidates`,
Sol-RL).

    steps   fewer denoise steps K of the same networks (a flow alone); where one step has noise, that which
            covers the policy's
    bf16    y = W x + b with W, x and b in bfloat16
    int8    y = s_w s_x W_q x_q + b,  W_q = round(W / s_w), x_q = round(x / s_x),  s = max |.| / 127 of a row
            of W, and of each x

The copy shares every tensor with the policy, but for what low precision puts in the place of the weights of
linear layers; those are made anew by `renew` when the policy's weights have moved. What it does is no sample
of the policy, so nothing of it may be learnt from. int8 is the dynamic quantisation of torch's own (one scale
per output of a layer, one per row of its input), in plain products.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from robo_rl.errors import UserError, choose
from robo_rl.options import PolicyOptions
from robo_rl.options.method import CHEAPER
from robo_rl.policies.policy import ChainPolicy
from robo_rl.policies.protocol import Chunk, Obs, Policy
from robo_rl.sampling import Noise

int_product: Any = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]  # the only product of int8 into int32 that torch has
EVEN = 8  # int8 products of a GPU: sizes of layers, and of rows from LEAST on, are multiples of it
LEAST = 24


class Bf16Linear(nn.Linear):
    """A linear layer in bfloat16, whatever goes in."""

    low: Tensor

    def take(self, weight: Tensor) -> None:
        """Have `weight` [out,in] from now on."""
        self.low = weight.to(torch.bfloat16)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # of code that multiplies by it, as a LoraLinear's
        return self.low.float()

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        return linear(input.to(torch.bfloat16), self.low, bias).to(input.dtype)


class Int8Linear(nn.Linear):
    """A linear layer whose product is of 8-bit integers, with a scale per output and per row of the input."""

    low: Tensor  # int8 [out,in]
    scale: Tensor  # float [out]

    def take(self, weight: Tensor) -> None:
        """Have `weight` [out,in] from now on."""
        self.low, scale = quantised(weight)
        self.scale = scale.squeeze(1)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # of code that multiplies by it, as a LoraLinear's
        return self.low * self.scale[:, None]

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """[...,in] -> [...,out]."""
        rows = input.reshape(-1, input.shape[-1])
        x, scale = quantised(rows)
        more = max(LEAST, -(-len(x) // EVEN) * EVEN) - len(x)
        y = int_product(pad(x, (0, 0, 0, more)) if more else x, self.low.t())[: len(x)]
        y = y * self.scale * scale
        return (y if self.bias is None else y + self.bias).to(input.dtype).view(*input.shape[:-1], -1)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n,k] -> int8 [n,k] and their scales [n,1] in float32: x is about their product."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round_().to(torch.int8), scale


class CheapPolicy:
    """Acts in place of `policy` at less cost. UserError: the policy cannot be made cheaper `by` that."""

    def __init__(self, policy: Policy, by: str, steps: int = 0):
        choose("rl.candidates_by", by, CHEAPER)
        shared = {
            id(x): x
            for m in policy.modules()
            for x in (*m._parameters.values(), *m._buffers.values())
            if x is not None
        }
        self.copy = copy.deepcopy(policy, shared)
        self.layers: list[tuple[nn.Linear, Bf16Linear | Int8Linear]] = []  # of the policy, and of the copy
        if by == "steps":
            check_steps(policy.options, steps)
            assert isinstance(self.copy, ChainPolicy)
            self.copy.options = replace(policy.options, denoise_steps=steps)
            self.copy.make_tables()
            assert isinstance(policy, ChainPolicy)
            if self.copy.one:  # noise enters where it does in the policy's chain
                self.copy.draws = policy.draws.cpu() * steps // policy.options.denoise_steps
            self.copy.to(policy.action_norm.device)
            return
        model: Any = policy
        of_copy: Any = self.copy.modules()
        for (name, layer), low in zip(model.named_modules(), of_copy, strict=True):
            if (
                isinstance(layer, nn.Linear)
                and not name.endswith((".lora_A", ".lora_B"))
                and (by == "bf16" or not (layer.in_features % EVEN or layer.out_features % EVEN))
            ):
                low.__class__ = Bf16Linear if by == "bf16" else Int8Linear
                self.layers.append((layer, low))
        if not self.layers:
            raise UserError(
                f"rl.candidates_by {by}: the policy has no linear layer that could be {by}; use steps"
            )
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Take up the policy's present weights."""
        for layer, low in self.layers:
            low.take(layer.weight)

    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        """As the policy's; of the chunk the actions alone mean anything."""
        return self.copy.act(obs, generator, explore)


def check_steps(o: PolicyOptions, steps: int) -> None:
    """Raise UserError for a policy that cannot act in so many denoise steps."""
    if not o.is_flow:
        raise UserError(
            f"rl.candidates_by steps goes with policies that are flows, got policy.kind {o.kind}; use bf16 "
            "or int8"
        )
    if not 0 < steps < o.denoise_steps:
        raise UserError(
            f"rl.candidates_steps must be below policy.denoise_steps {o.denoise_steps}, got {steps}"
        )
    if steps == 1 and o.noise != "learned":
        raise UserError(
            f"rl.candidates_steps must be at least 2 with policy.noise {o.noise}: one step of it has no noise"
        )
    if o.predict == "action" and o.denoise_steps % steps:
        raise UserError(
            f"rl.candidates_steps must divide policy.denoise_steps {o.denoise_steps} with policy.predict "
            f"action, whose network knows the times of its chain alone, got {steps}"
        )
