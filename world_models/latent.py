"""State dynamics as an ensemble of M gated residual networks, all members in one batched product per layer.

    delta = net(s, s - s_before, a, w)
    s' = s + scale * delta, per dimension, in the data's own units
    reward, success, end = heads(f(s' / std), f(s' / scale), s' - s, a, w),  f(x) = (x, x^2)
    loss = mean_k |s^_k - s_k|^2 / (scale^2 k) + reward + success + end, along k = 1 .. unroll own steps;
           beside it |one step from s_(k-1) - s_k|^2 / scale^2, or the rollout would cost the first steps

w are the words of the instruction (`world_models.instructions`), nothing where the data have one alone.
The heads see the state twice, for a goal is a small place: in units of the data's std, and, near zero, in
units of one step's change (offsets to a goal are such numbers); with the squares "near" is a plane.
The difference to the state before stands for the velocities a state leaves out (it is 0 where an episode
begins). A lane follows one member, drawn from its key, or the members' mean. Uncertainty is the members'
disagreement on the followed state, in units of the state's std, summed along the episode; with a gate
(`world_models.gate`) the error that is expected from that disagreement and the distance to what was recorded.

A success is one step among many, and where it is near none of them is more likely than not to be the one. So
calibration (`calibrate.set_shift`) moves the log-odds that mean 1/2: along held-out episodes as many
successes, and as many ends, are then told as were recorded.

Refinement after PDE-Refiner (Lippe et al. 2023, eq. 5-8), of each member's change of one step, y_0 = delta:

    for k = 1 .. K:   y_k = y_(k-1) - sigma_k net_r(s, s - s_before, a, y_(k-1), k)
                      sigma_k = sigma_min^(k/K)

Departures: the first prediction is the ensemble's and the refiner an ensemble of its own (the paper has one
network for both), so that K = 0 is the one-step model bit by bit; and what a refinement takes off is no noise
that was added to y before, but the error that y has: every y_k is learnt along the rollout of y_K, where it
leads back to the data. (With the paper's noise the result is a sample of what may come, its error larger than
the mean's at every horizon: measured.)

Sources: PETS (Chua et al. 2018) and MBPO (Janner et al. 2019) for ensembles as simulators; gated layers
(SwiGLU) after Shazeer 2020 (arXiv 2002.05202, eq. 5 and 6).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.starts import hashed
from world_models import instructions
from world_models.gate import Gate
from world_models.model import Carry, Frames, Prediction, WorldSpec, at_home
from world_models.options import LatentOptions

HEADS = 3  # reward, success, end


class MlpEnsemble(nn.Module):
    """M perceptrons with residual hidden layers: x [M,B,in] (or [B,in], the same for all) -> [M,B,out]."""

    def __init__(
        self, members: int, inputs: int, hidden: int, layers: int, outputs: int, generator: torch.Generator
    ):
        super().__init__()
        sizes = [inputs] + [hidden] * layers + [outputs]
        self.weights = nn.ParameterList(
            [torch.randn(members, a, b, generator=generator) / a**0.5 for a, b in pairwise(sizes)]
        )
        self.biases = nn.ParameterList([torch.zeros(members, 1, b) for b in sizes[1:]])
        with torch.no_grad():
            self.weights[-1].mul_(0.01)  # it begins by predicting no change

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weights, self.biases
        if x.dim() == 2:
            x = x.expand(len(w[0]), *x.shape)
        x = F.silu(torch.baddbmm(b[0], x, w[0]))
        for i in range(1, len(w) - 1):
            x = x + F.silu(torch.baddbmm(b[i], x, w[i]))
        return torch.baddbmm(b[-1], x, w[-1])


class GatedEnsemble(nn.Module):
    """As `MlpEnsemble`, the layers after the first gated: h + (silu(u G) * u V) W with u = norm(h).

    The normalisation is without weights. Of equal size it predicts arms better than plain layers do
    (docs/results/world_models.md).
    """

    def __init__(
        self, members: int, inputs: int, hidden: int, layers: int, outputs: int, generator: torch.Generator
    ):
        super().__init__()

        def drawn(a: int, b: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(members, a, b, generator=generator) / a**0.5)

        def zeros(b: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(members, 1, b))

        layers = max(layers, 2)
        self.first, self.first_bias = drawn(inputs, hidden), zeros(hidden)
        self.gates = nn.ParameterList([drawn(hidden, 2 * hidden) for _ in range(layers - 1)])
        self.gate_biases = nn.ParameterList([zeros(2 * hidden) for _ in range(layers - 1)])
        self.back = nn.ParameterList([drawn(hidden, hidden) for _ in range(layers - 1)])
        self.last, self.last_bias = drawn(hidden, outputs), zeros(outputs)
        with torch.no_grad():
            self.last.mul_(0.01)  # it begins by predicting no change

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x.expand(len(self.first), *x.shape)
        h = torch.baddbmm(self.first_bias, x, self.first)
        for gate, bias, back in zip(self.gates, self.gate_biases, self.back, strict=True):
            opened, value = torch.baddbmm(bias, F.layer_norm(h, h.shape[-1:]), gate).chunk(2, -1)
            h = torch.baddbmm(h, F.silu(opened) * value, back)
        return torch.baddbmm(self.last_bias, h, self.last)


class Latent(nn.Module):
    """The model; see the module. Statistics of the data are buffers and travel with the weights."""

    frames: Frames
    mean: Tensor  # of the states
    std: Tensor
    scale: Tensor  # of their changes in a step
    low: Tensor
    high: Tensor
    gain: Tensor
    balance: Tensor
    shift: Tensor
    words: Tensor  # [tasks,W] of the spec's instructions

    def __init__(self, spec: WorldSpec, options: LatentOptions, seed: int = 0):
        super().__init__()
        self.spec, self.options = spec, options
        s, a, o = spec.state, spec.action, options
        generator = torch.Generator().manual_seed(seed)
        words = torch.from_numpy(instructions.features(spec.tasks if o.text else spec.tasks[:1]))
        a += words.shape[1]
        ensemble = GatedEnsemble if o.gated else MlpEnsemble
        self.net = ensemble(o.members, 2 * s + a, o.hidden, o.layers, s, generator)
        self.heads = MlpEnsemble(o.members, 5 * s + a, o.head_width, 2, HEADS, generator)
        self.refiner = (
            ensemble(o.members, 3 * s + a + o.refine, o.hidden, o.layers, s, generator) if o.refine else None
        )
        self.gate = Gate(2 * s + a) if spec.gate else None
        for name, value in (("mean", 0.0), ("std", 1.0), ("scale", 1.0), ("low", -np.inf), ("high", np.inf)):
            self.register_buffer(name, torch.full((s,), value))
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("gain", torch.ones(()))  # std of the reward
        self.register_buffer("balance", torch.ones(HEADS - 1))  # weight of a rare success and end in the loss
        self.register_buffer("shift", torch.zeros(HEADS - 1))  # log-odds of success and end that mean 1/2
        self.register_load_state_dict_pre_hook(_without_shift)

    @torch.no_grad()
    def fit(self, state: Tensor, delta: Tensor, reward: Tensor, events: Tensor) -> None:
        """Statistics of the data: state [F,S], one-step changes [G,S], reward [F], success and end of the
        step [F,2]."""
        self.mean.copy_(state.mean(0))
        self.std.copy_(state.std(0).clamp(min=1e-3))
        self.scale.copy_(torch.maximum(delta.std(0), 0.02 * self.std))
        self.gain.copy_(reward.std().clamp(min=1e-3))
        self.low.fill_(np.inf)
        self.high.fill_(-np.inf)
        self.widen(state, events)

    @torch.no_grad()
    def widen(self, state: Tensor, events: Tensor) -> None:
        """Let rollouts go as far as the states [F,S] too, and events [F,2] say how rare they are."""
        low, high = state.amin(0), state.amax(0)
        # a rollout may leave the data a little, not without end
        self.low.copy_(self.low.minimum(low - 0.25 * (high - low) - 1e-3))
        self.high.copy_(self.high.maximum(high + 0.25 * (high - low) + 1e-3))
        share = events.mean(0)
        self.balance.copy_(torch.where(share > 0, (1 - share) / share.clamp(min=1e-6), 1).clamp(1, 30))

    def commanded(self, a: Tensor, task: Tensor | None) -> Tensor:
        """Actions [...,A] with the words of instructions int64[...] beside them: [...,A+W]; `task` is not
        looked at where W is 0."""
        return torch.cat([a, self.words[task]], -1) if self.words.shape[1] and task is not None else a

    def inputs(self, s: Tensor, before: Tensor, a: Tensor) -> Tensor:
        """Of the ensemble; `a` as `commanded` gives it."""
        return torch.cat([(s - self.mean) / self.std, ((s - before) / self.scale).clamp(-10, 10), a], -1)

    def outcome(self, after: Tensor, s: Tensor, a: Tensor) -> Tensor:
        """Of steps s -> after by actions [B,.] or [M,B,.]: reward / gain, logits of success and end (as
        weighted in the loss), [M,B,3]."""
        far, near = ((after - self.mean) / self.std).clamp(-5, 5), (after / self.scale).clamp(-5, 5)
        moved = ((after - s) / self.scale).clamp(-10, 10)
        return self.heads(torch.cat([far, far.square(), near, near.square(), moved, a], -1))

    def clip(self, s: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(s, self.high), self.low)

    # ---- the protocol

    def start(self, obs: Mapping[str, "np.ndarray | Tensor"], keys: np.ndarray) -> Carry:
        """Carry of lanes that begin at rest in obs["state"] [N,S]; a model of several instructions needs
        obs["task"] str[N]."""
        keys = np.asarray(keys, np.int64)
        state = torch.as_tensor(np.asarray(obs["state"]), dtype=torch.float32).clone()
        member = (hashed(keys, 3) % np.uint64(self.options.members)).astype(np.int64)
        task = np.zeros(len(keys), np.int64)
        if self.words.shape[1]:
            task = instructions.places(
                self.spec.tasks, np.asarray(obs["task"]) if "task" in obs else None, "the world model"
            )
        doubt = {} if self.gate is None else {"far": torch.zeros(len(keys)), "doubt": torch.zeros(len(keys))}
        return {
            "state": state,
            "before": state.clone(),
            "task": torch.from_numpy(task),
            "spread": torch.zeros(len(keys)),
            **doubt,
            "member": torch.from_numpy(member),
            "key": torch.from_numpy(keys.copy()),
            "t": torch.zeros(len(keys), dtype=torch.int64),
        }

    @at_home
    @torch.no_grad()
    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        s, before, spread, t = carry["state"], carry["before"], carry["spread"], carry["t"]
        far, doubt = carry.get("far", spread), carry.get("doubt", spread)
        lanes, weight, rows = torch.arange(len(s), device=s.device), self.scale / self.std, []
        for a in (self.commanded(a, carry.get("task")) for a in actions.to(torch.float32).unbind(1)):
            inputs = self.inputs(s, before, a)
            deltas = self.refined(inputs, self.net(inputs))[-1]
            mean = deltas.mean(0)
            delta = mean if self.options.follow == "mean" else deltas[carry["member"], lanes]
            grown = ((deltas - mean) * weight).square().mean((0, 2)).sqrt()  # of one member: 0
            spread = spread + grown
            if self.gate is not None:
                near = self.gate.distance(inputs)
                far = far + near
                q = self.gate.quantities(spread, grown, near, far, (t + 1).float())
                doubt = torch.maximum(doubt, self.gate.law(q))
            s, before, t = self.clip(s + delta * self.scale), s, t + 1
            rows.append((s, before, a, spread if self.gate is None else doubt))
        after, now, commands, spreads = zip(*rows, strict=True)
        heads = self.outcome(*(torch.cat(x) for x in (after, now, commands)))
        heads = heads.unflatten(1, (len(rows), len(lanes))).transpose(1, 2)
        # learnt with that weight: taken off again
        success, terminal = self.shifted((heads[..., 1:] - self.balance.log()).sigmoid().mean(0)).unbind(-1)
        state, spreads = (torch.stack(x, 1) for x in (after, spreads))
        reward = heads[..., 0].mean(0) * self.gain
        carry = (
            carry
            | {"state": s, "before": before, "spread": spread, "t": t}
            | ({} if self.gate is None else {"far": far, "doubt": doubt})
        )
        return carry, Prediction({"state": state}, reward, terminal, success, spreads)

    def shifted(self, p: Tensor) -> Tensor:
        """Probabilities [...,2] of success and end, told so that 1/2 means log-odds of `shift`."""
        return p / (p + (1 - p) * self.shift.exp())

    def sigmas(self) -> list[float]:
        """sigma_1 .. sigma_K; the last is sigma_min."""
        k = self.options.refine
        return [self.options.sigma ** (i / k) for i in range(1, k + 1)]

    def refined(self, inputs: Tensor, y: Tensor) -> list[Tensor]:
        """Changes [M,B,S] of the members after 0 .. K refinements."""
        out = [y]
        for k, sigma in enumerate(self.sigmas() if self.refiner is not None else []):
            assert self.refiner is not None
            z = out[-1]
            step = torch.full(z.shape[:-1], k, device=z.device)
            level = F.one_hot(step, self.options.refine).to(z.dtype)
            out.append(z - sigma * self.refiner(torch.cat([inputs.expand(*z.shape[:-1], -1), z, level], -1)))
        return out


def together(carry: Carry, beside: Mapping[str, str]) -> Carry:
    """A carry with the numbers that stand apart in it beside its states again: `beside` names those of
    each."""
    out = {k: v for k, v in carry.items() if k not in beside.values()}
    return out | {k: torch.cat([carry[k], carry[name]], 1) for k, name in beside.items()}


def apart(carry: Carry, beside: Mapping[str, str], size: int) -> Carry:
    """The inverse of `together`: states have `size` numbers."""
    out = dict(carry)
    for k, name in beside.items():
        out[k], out[name] = (x.contiguous() for x in carry[k].tensor_split([size], 1))
    return out


def build(spec: WorldSpec, options: dict) -> Latent:
    """The untrained model of a folder's JSON."""
    return Latent(spec, latent_options(options))


def latent_options(saved: Mapping[str, Any]) -> LatentOptions:
    """Of a folder's JSON; models of before read no text, their layers were not gated, and their heads were
    half as wide as their layers."""
    return LatentOptions(
        **{
            "text": False,
            "gated": False,
            "head_width": max(saved.get("hidden", LatentOptions().hidden) // 2, 8),
            **saved,
        }
    )


def _without_shift(model: nn.Module, state: dict, prefix: str, *rest: Any) -> None:
    """Weights of before have none."""
    state.setdefault(prefix + "shift", torch.zeros(HEADS - 1))
