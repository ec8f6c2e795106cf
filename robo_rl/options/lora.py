"""Options of low-rank adapters, and the one formula that both torch and NumPy merge them by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robo_rl.errors import in_range

A, B = ".lora_A.weight", ".lora_B.weight"  # ends of an adapter's names, as peft has them


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): of the weights W of chosen layers only a
    product of two thin matrices is learnt, W + (alpha/rank) B A, from what --init or supervised learning gave
    on."""

    rank: int = 0
    """r: rows of A; 0: no adapters, every weight is learnt."""
    alpha: float = 0.0
    """Scale of the adapters, times the rank; 0: the rank itself, a scale of 1."""
    targets: tuple[str, ...] = ("trunk",)
    """Linear layers that get one: names of modules, whole or their ends (q_proj), or patterns (trunk.*.qkv);
    of a module that is not linear, the linear layers below it."""
    full: tuple[str, ...] = ("rest",)
    """Modules or parameters that learn in full beside the adapters; rest: all outside the trunk; none."""

    def __post_init__(self) -> None:
        in_range("policy.lora.rank", self.rank, 0, 4096)
        in_range("policy.lora.alpha", self.alpha, 0, 1e6)
        for name in ("targets", "full"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def scale(self) -> float:
        """alpha/rank."""
        return (self.alpha or self.rank) / self.rank

    def merged(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Weights by name without adapters, each W + scale B A; of torch or of NumPy."""
        out = {k: v for k, v in weights.items() if not k.endswith((A, B))}
        for name in weights:
            if name.endswith(A):
                layer = name.removesuffix(A)
                out[f"{layer}.weight"] = out[f"{layer}.weight"] + self.scale * (
                    weights[layer + B] @ weights[name]
                )
        return out
