"""Low-rank adapters on the linear layers of any policy, in peft's names; torch alone.

    y = W x + b + (alpha/rank) B A x,    A [r, in] drawn, B [out, r] = 0 at the start

A layer stays the object that it was and its W keeps its name: `<path>.weight` is frozen,
`<path>.lora_A.weight` and `<path>.lora_B.weight` learn. `layer.weight` reads W + (alpha/rank) B A, so code
that multiplies by it, in place of calling the layer, has the adapter too. At the start every product is the
same bits as without.

An adapter is saved alone as peft saves one: adapter_model.safetensors with the prefix `base_model.model.`,
layers that learn in full under their own names, and adapter_config.json. Source: Hu et al. 2021, arXiv
2106.09685, section 4.1; file layout: peft's documentation of checkpoints.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.functional import linear

from robo_rl.errors import UserError
from robo_rl.files import read_json, write_bytes, write_json
from robo_rl.options.lora import A, B, LoraOptions

PREFIX = "base_model.model."  # of every name in an adapter's file
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
REST, NONE = "rest", "none"
SHOWN = 12  # layers that a message names


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; made of an `nn.Linear` by `attach`, and one again after `merge`."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # the parameter stays in `_parameters`
        """W + scale B A [out,in], in the dtype of W."""
        w, a, b = self.base, self.lora_A.weight, self.lora_B.weight
        return (w + self.scale * (b @ a)).to(w.dtype)

    @property
    def base(self) -> Tensor:
        """W [out,in], frozen."""
        w = self._parameters["weight"]
        assert w is not None
        return w

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """[...,in] -> [...,out]; two thin products, never the whole B A."""
        own = self.lora_B(self.lora_A(input.to(self.lora_A.weight.dtype)))
        return linear(input, self.base, self.bias) + (self.scale * own).to(input.dtype)


def attach(policy, options: LoraOptions, seed: int):
    """Give the policy's chosen layers adapters, in place, and freeze what does not learn -> the policy.

    `seed` draws A. UserError: it has adapters already, or a name fits no layer.
    """
    if not options.rank:
        return policy
    if adapted(policy):
        raise UserError("the policy has adapters already; merge them first (robo_rl lora RUN --merge)")
    layers = chosen(policy, options)
    learns = {
        name: p.requires_grad and in_full(policy, options, name) for name, p in policy.named_parameters()
    }
    generator = torch.Generator().manual_seed(seed)
    for plain in layers.values():
        layer: Any = plain
        device, dtype = layer.weight.device, torch.promote_types(layer.weight.dtype, torch.float32)
        down, up = (
            nn.Linear(i, o, bias=False, device="meta")
            for i, o in ((layer.in_features, options.rank), (options.rank, layer.out_features))
        )
        a = torch.empty(down.weight.shape, dtype=dtype)
        nn.init.kaiming_uniform_(a, math.sqrt(5), generator=generator)
        down.weight, up.weight = (
            nn.Parameter(a.to(device)),
            nn.Parameter(torch.zeros(up.weight.shape, dtype=dtype, device=device)),
        )
        # in place: whoever holds the layer, a list or a hook, holds the adapted one
        layer.__class__ = LoraLinear
        layer.lora_A, layer.lora_B, layer.scale = down, up, options.scale
    for name, p in policy.named_parameters():
        p.requires_grad_(
            name.endswith((A, B))
            or learns[name]
            and name.removesuffix(".weight").removesuffix(".bias") not in layers
        )
    policy.options = replace(policy.options, lora=options)
    return policy


def merge(policy):
    """Put W + scale B A in the place of every adapted W, in place -> the policy, to act with or to save; what
    was frozen stays so."""
    for adapter in adapted(policy).values():
        layer: Any = adapter
        weight = nn.Parameter(layer.weight.detach().clone())
        del layer.lora_A, layer.lora_B, layer.scale
        layer.__class__ = nn.Linear
        layer.weight = weight
    policy.options = replace(policy.options, lora=LoraOptions())
    return policy


def adapted(policy) -> dict[str, LoraLinear]:
    """Layers with an adapter, by path."""
    return {name: m for name, m in policy.named_modules() if isinstance(m, LoraLinear)}


def moving(policy, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What of a policy's state changes while it learns: everything, or with adapters these, the buffers and
    what learns in full.

    `tensors`: its state_dict, if the caller has it. By name alone, so that learner and workers agree."""
    tensors = dict(policy.state_dict() if tensors is None else tensors)
    return {k: v for k, v in tensors.items() if k not in frozen_names(policy)}


def frozen_names(policy) -> set[str]:
    """Names of the parameters that adapters keep as they are; none without adapters."""
    layers = adapted(policy)
    if not layers:
        return set()
    return {
        name
        for name, _ in policy.named_parameters()
        if not name.endswith((A, B))
        and (name.rpartition(".")[0] in layers or not in_full(policy, policy.options.lora, name))
    }


# ---- which layers ------------------------------------------------------------------------------------------


def chosen(policy, options: LoraOptions) -> dict[str, nn.Linear]:
    """The linear layers that get an adapter, by path. UserError: a target fits none."""
    every = {name: m for name, m in policy.named_modules() if isinstance(m, nn.Linear)}
    for target in options.targets:
        if not any(fits(name, target) for name in every):
            raise UserError(
                f"--policy.lora.targets {target}: there is no linear layer of that name; the policy's "
                f"{_where(list(every))}" + ("; several have spaces between them" if "," in target else "")
            )
    return {name: m for name, m in every.items() if any(fits(name, t) for t in options.targets)}


def _where(layers: list[str]) -> str:
    """The names of layers; of many the modules that they lie in, and how they end."""
    if len(layers) <= SHOWN:
        return f"are {', '.join(layers)}"
    parts = [name.split(".") for name in layers]
    modules = dict.fromkeys(".".join(p[:n]) for p in parts for n in (1, 2) if n < len(p))
    ends = dict.fromkeys(p[-1] for p in parts)
    return f"lie below {', '.join(modules)} and end with {', '.join(ends)}"


def fits(name: str, target: str) -> bool:
    """Whether a path is `target`, ends with it, lies below it, or fits it as a pattern."""
    return (
        name == target
        or name.endswith(f".{target}")
        or name.startswith(f"{target}.")
        or fnmatchcase(name, target)
        or fnmatchcase(name, f"{target}.*")
    )


def in_full(policy, options: LoraOptions, name: str) -> bool:
    """Whether the parameter of that path learns in full, as long as its layer has no adapter."""
    return any(
        not name.startswith("trunk.") if full == REST else full != NONE and fits(name, full)
        for full in options.full
    )


# ---- files -------------------------------------------------------------------------------------------------


def save_adapter(policy, folder: Path, base: str = "") -> int:
    """Write what the policy has learnt, without the frozen weights -> bytes of its tensors. `base`: where
    those are."""
    o, tensors = policy.options.lora, moving(policy)
    if not adapted(policy):
        raise UserError("the policy has no adapters: train it with --policy.lora.rank N")
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / FILE, save({PREFIX + k: v.detach().cpu().contiguous() for k, v in tensors.items()}))
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "r": o.rank,
            "lora_alpha": o.alpha or o.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
            "target_modules": list(adapted(policy)),
            "modules_to_save": list(o.full),
            "task_type": None,
            "base_model_name_or_path": base or None,
        },
    )
    return sum(v.nbytes for v in tensors.values())


def load_adapter(policy, folder: Path):
    """Put a saved adapter on a policy that has none, in place -> the policy. How the run explored is left out
    where the policy has no noise of its own. UserError: it is of other layers, or damaged."""
    config: dict[str, Any] = read_json(folder / CONFIG)
    try:
        options = LoraOptions(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            targets=config["target_modules"],
            full=config.get("modules_to_save") or (NONE,),
        )
        if (
            config["peft_type"] != "LORA"
            or config.get("use_rslora")
            or config.get("use_dora")
            or not options.rank
        ):
            raise UserError(f"{folder / CONFIG}: only plain LoRA adapters are read")
        tensors = {k.removeprefix(PREFIX): v for k, v in load((folder / FILE).read_bytes()).items()}
    except (OSError, KeyError, TypeError, SafetensorError) as e:
        raise UserError(f"{folder} holds no adapter that can be read ({type(e).__name__}: {e})") from None
    if getattr(policy, "noise", None) is None:
        tensors = {k: v for k, v in tensors.items() if not k.startswith("noise.")}
    attach(policy, options, 0)
    want = {k: v.shape for k, v in policy.state_dict().items()}
    if unknown := [k for k, v in tensors.items() if want.get(k) != v.shape]:
        raise UserError(f"{folder}: {len(unknown)} tensors do not fit the policy, the first is {unknown[0]}")
    if missing := [k for k in want if k.endswith((A, B)) and k not in tensors]:
        raise UserError(f"{folder}: the adapter lacks {len(missing)} tensors, the first is {missing[0]}")
    policy.load_state_dict(tensors, strict=False)
    return policy
