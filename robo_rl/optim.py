"""AdamW without what torch.optim loads: its first step imports the compiler, two seconds of a processor.

    m <- b1 m + (1 - b1) g,    v <- b2 v + (1 - b2) g^2
    p <- p - lr wd p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Source: Loshchilov and Hutter 2019, algorithm 2. The kernels are torch's own and so is every bit of the
result; the state has the layout of `torch.optim.AdamW`, and either reads what the other wrote.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LIKE_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}  # what a group of torch.optim.AdamW also names, always so here
kernels: Any = torch  # those for many tensors have private names


class AdamW:
    """One group of parameters on one device. `fused`: one kernel for all, as torch's fused=True; else the
    arithmetic of its foreach=True and of its plain loop, which differs in the last bits. With weight_decay 0
    it is Adam.

    `param_groups[0]["lr"]` may be set between steps. A parameter without gradient keeps its value and its
    step count. Of a parameter in bf16 or fp16 the state has a copy in float32, "master", which is what steps:
    in bf16 a step of 1e-3 of a weight is lost.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool = True,
    ):
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._all: list[list[Tensor]] | None = None  # moments of all parameters, once they are there
        params = list(params)
        # a Python number would be made a tensor per parameter
        self._one = torch.ones((), device=params[0].device if params else None)
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": params,
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "foreach": None if fused else True,
                "fused": fused,
            }
            | LIKE_TORCH
        ]

    def zero_grad(self) -> None:
        """Every gradient is None."""
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step along the gradients that are there."""
        group, params = self.param_groups[0], self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        if any(g is None for g in grads):
            params = [p for p in params if p.grad is not None]
            grads = [p.grad for p in params]
            if not params:
                return
            moments = self._moments(params)
        else:
            moments = self._all = self._all or self._moments(params)
        kernels._foreach_add_(moments[2], self._one, alpha=1)
        m, v, steps, masters = moments
        low = [p for p, x in zip(params, masters, strict=True) if p is not x]
        grads = (
            [g if g.dtype == x.dtype else g.to(x.dtype) for g, x in zip(grads, masters, strict=True)]
            if low
            else grads
        )
        (_fused if group["fused"] else _foreach)(masters, grads, m, v, steps, group)
        if low:
            kernels._foreach_copy_(low, [x for p, x in zip(params, masters, strict=True) if p is not x])

    def _moments(self, params: list[Tensor]) -> list[list[Tensor]]:
        """m, v, step counts and what steps (the parameter, or its master) of `params`, a list each."""
        states = [self.state[p] or self._begin(p) for p in params]
        return [
            *([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step")),
            [s.get("master", p) for s, p in zip(states, params, strict=True)],
        ]

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        low = p.dtype in (torch.bfloat16, torch.float16)
        x = p.detach().float() if low else p
        self.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(x),
            "exp_avg_sq": torch.zeros_like(x),
        }
        if low:
            self.state[p]["master"] = x
        return self.state[p]

    @torch.no_grad()
    def follow(self) -> None:
        """Parameters in bf16 or fp16 were set by somebody else: what steps begins from them."""
        for p, state in self.state.items():
            if "master" in state:
                state["master"].copy_(p)

    def state_dict(self) -> dict:
        """As `torch.optim.AdamW.state_dict`: parameters by number, tensors by reference."""
        group = self.param_groups[0]
        numbers = {p: i for i, p in enumerate(group["params"])}
        return {
            "state": {numbers[p]: s for p, s in self.state.items()},
            "param_groups": [group | {"params": list(numbers.values())}],
        }

    def load_state_dict(self, state: dict) -> None:
        """Copy the moments, counts and options of `state`; how a step is computed (`fused`) stays this
        optimizer's.

        Raises ValueError where it is of other parameters."""
        group, (saved,) = self.param_groups[0], state["param_groups"]
        params = group["params"]
        if len(saved["params"]) != len(params):
            raise ValueError(
                f"the state is of {len(saved['params'])} parameters, the optimizer has {len(params)}"
            )
        group |= {name: saved[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.state.clear()
        self._all = None
        for i, had in state["state"].items():
            if had["exp_avg"].shape != params[i].shape:
                raise ValueError(
                    f"the state of parameter {i} has shape {tuple(had['exp_avg'].shape)}, the parameter "
                    f"{tuple(params[i].shape)}"
                )
            own = self._begin(params[i])
            for name, x in own.items():
                if name in had:  # a master begins with its parameter where there was none
                    x.copy_(torch.as_tensor(had[name]))


Optimizer = AdamW | torch.optim.Optimizer  # torch's own for sharded parameters


def _fused(params, grads, m, v, steps, group: dict) -> None:
    """The update as one kernel."""
    kernels._fused_adamw_(
        params,
        grads,
        m,
        v,
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _foreach(params, grads, m, v, steps, group: dict) -> None:
    """The update in the order of operations of torch's foreach and plain implementations, which are the same
    on the CPU."""
    lr, (b1, b2) = group["lr"], group["betas"]
    if group["weight_decay"]:
        kernels._foreach_mul_(params, 1 - lr * group["weight_decay"])
    kernels._foreach_lerp_(m, grads, 1 - b1)
    kernels._foreach_mul_(v, b2)
    kernels._foreach_addcmul_(v, grads, grads, 1 - b2)
    counts = [step.item() for step in steps]
    spread = kernels._foreach_sqrt(v)
    kernels._foreach_div_(spread, [(1 - b2**t) ** 0.5 for t in counts])
    kernels._foreach_add_(spread, group["eps"])
    kernels._foreach_addcdiv_(params, m, spread, [-lr / (1 - b1**t) for t in counts])
