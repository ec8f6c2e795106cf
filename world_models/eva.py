"""EVA: is what a world model imagines something the arm could do? An inverse-dynamics model decodes the
imagined motion into actions; penalties on their velocity, acceleration, jerk and limits make one score, 10 at
best.

    v = da/dt, acc = dv/dt, jerk = dacc/dt
    P = w_jerk Huber(jerk) + w_acc Huber(acc) + w_vlim relu(|v| - v_max)^2 + w_alim relu(|acc| - a_max)^2
    score = 10 (1 + P/scale)^(-1/2)

Axes: `B` clips, `T` control steps, `A` decoded dimensions, `S` state. Units: positions `a` in rad or m, dt
[s].
Source: EVA; formulas as in RLinf's action_smoothness reward, whose constants are for joints in rad at 30 Hz.
Here each dimension may have limits of its own, and a clip shorter than 4 steps scores 0 (it has no jerk to
judge). A motionless clip is as smooth as can be: use the score beside the task's success, never alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, in_range
from robo_rl.normalise import Normaliser
from robo_rl.types import ControlSpec

LEAST = 64  # recorded steps that an inverse-dynamics model is learnt from


@dataclass(frozen=True, kw_only=True)
class MotionLimits:
    """What the arm can do, per decoded dimension: `speed` [A] and `acceleration` [A], `weight` [A] (made to
    mean 1)."""

    speed: tuple[float, ...]
    acceleration: tuple[float, ...]
    weight: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.speed) == len(self.acceleration) == len(self.weight) or not self.speed:
            raise UserError(
                f"limits need one speed, acceleration and weight per dimension, got {len(self.speed)}, "
                f"{len(self.acceleration)} and {len(self.weight)}"
            )
        for name in ("speed", "acceleration", "weight"):
            for v in getattr(self, name):
                in_range(f"limits.{name}", v, 0, 1e9, open_low=True)


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Weights of P and the scale of the score."""

    jerk: float = 0.5
    acceleration: float = 0.25
    speed_limit: float = 2.0
    acceleration_limit: float = 1.0
    scale: float = 2000.0

    def __post_init__(self) -> None:
        for name in ("jerk", "acceleration", "speed_limit", "acceleration_limit"):
            in_range(f"penalties.{name}", getattr(self, name), 0, 1e9)
        in_range("penalties.scale", self.scale, 0, 1e12, open_low=True)


def limits_of(control: ControlSpec, headroom: float = 1.0, ramp: float = 0.1) -> MotionLimits:
    """Limits of what a delta or rate action commands: the speed of a full command, reached within `ramp` [s].

    An axis of another kind (a gripper's absolute opening) may cross its range in half a second and weighs a
    fifth.
    """
    speed = tuple(
        headroom
        * (
            max(abs(a.low), abs(a.high)) / (control.period if a.kind == "delta" else 1.0)
            if a.kind in ("delta", "rate")
            else (a.high - a.low) / 0.5
        )
        for a in control.axes
    )
    return MotionLimits(
        speed=speed,
        acceleration=tuple(v / ramp for v in speed),
        weight=tuple(1.0 if a.kind in ("delta", "rate") else 0.2 for a in control.axes),
    )


def positions(actions: Tensor, control: ControlSpec) -> Tensor:
    """Commands in [-1, 1], [B,T,A], as the positions they lead to, from 0, [B,T,A], in each axis' unit.

    A delta adds to the position, a rate adds rate times period, an absolute command is the position.
    """
    low, high = (
        torch.tensor([getattr(a, k) for a in control.axes], dtype=actions.dtype) for k in ("low", "high")
    )
    command = low + (actions.clamp(-1, 1) + 1) / 2 * (high - low)
    step = torch.tensor(
        [control.period if a.kind == "rate" else 1.0 for a in control.axes], dtype=actions.dtype
    )
    adds = torch.tensor([a.kind in ("delta", "rate") for a in control.axes])
    return torch.where(adds, (command * step).cumsum(1), command)


def reference(limits: MotionLimits, dt: float, penalties: Penalties = Penalties()) -> Penalties:
    """`penalties` with the scale at which a motion that turns from rest to full acceleration and back at
    every step, on every dimension, scores 10/sqrt(2): for arms whose limits are far from those of the
    paper's.

    There jerk = a_max/dt and acc = a_max, whose Huber penalties with delta at half of each are 3/8 of their
    squares.
    """
    a_max, w = (torch.tensor(x, dtype=torch.float64) for x in (limits.acceleration, limits.weight))
    square = float((a_max.square() * w / w.mean()).mean())
    return replace(
        penalties, scale=max(0.375 * square * (penalties.jerk / dt**2 + penalties.acceleration), 1e-9)
    )


def differences(a: Tensor, dt: float) -> tuple[Tensor, Tensor, Tensor]:
    """Velocity [B,T-1,A], acceleration [B,T-2,A] and jerk [B,T-3,A] of positions [B,T,A] at step dt [s]."""
    v = a.diff(dim=1) / dt
    acc = v.diff(dim=1) / dt
    return v, acc, acc.diff(dim=1) / dt


def huber(x: Tensor, delta: Tensor) -> Tensor:
    """x^2/2 within delta, delta (|x| - delta/2) beyond."""
    size = x.abs()
    return torch.where(size <= delta, 0.5 * x.square(), delta * (size - 0.5 * delta))


def penalty_terms(a: Tensor, dt: float, limits: MotionLimits) -> dict[str, Tensor]:
    """Each penalty of positions [B,T,A] -> [B]: mean over time, weighted mean over dimensions."""
    v, acc, jerk = differences(a, dt)
    v_max, a_max, w = (
        torch.tensor(x, dtype=a.dtype) for x in (limits.speed, limits.acceleration, limits.weight)
    )
    w = w / w.mean()

    def mean(x: Tensor) -> Tensor:
        return (x.mean(1) * w).mean(-1)

    return {
        "jerk": mean(huber(jerk, 0.5 * a_max / dt)),
        "acceleration": mean(huber(acc, 0.5 * a_max)),
        "speed_limit": mean((v.abs() - v_max).relu().square()),
        "acceleration_limit": mean((acc.abs() - a_max).relu().square()),
    }


def score(a: Tensor, dt: float, limits: MotionLimits, penalties: Penalties = Penalties()) -> Tensor:
    """Executability of positions [B,T,A] -> [B], in (0, 10]; 0 for fewer than 4 steps. Differentiable."""
    if not dt > 0:
        raise UserError(f"dt must be > 0 seconds, got {dt!r}")
    if a.shape[-1] != len(limits.speed):
        raise UserError(f"limits are for {len(limits.speed)} dimensions, the motion has {a.shape[-1]}")
    if a.shape[1] < 4:
        return a.new_zeros(len(a))
    p = sum(getattr(penalties, k) * x for k, x in penalty_terms(a, dt, limits).items())
    return 10 * (1 + p / penalties.scale) ** -0.5


def violations(a: Tensor, dt: float, limits: MotionLimits) -> Tensor:
    """Share of steps and dimensions of positions [B,T,A] beyond the speed or acceleration limit -> [B]."""
    v, acc, _ = differences(a, dt)
    v_max, a_max = (torch.tensor(x, dtype=a.dtype) for x in (limits.speed, limits.acceleration))
    just = 1 + 1e-4  # full commands held are at the limit, not beyond it
    return ((v.abs()[:, 1:] > just * v_max) | (acc.abs() > just * a_max)).to(a.dtype).mean((1, 2))


def beyond(a: Tensor, dt: float, limits: MotionLimits) -> dict[str, Tensor]:
    """Share of steps and dimensions of positions [B,T,A] beyond each limit -> [B]; of jerk: more than from
    rest to full acceleration within one step, a_max/dt."""
    v_max, a_max = (torch.tensor(x, dtype=a.dtype) for x in (limits.speed, limits.acceleration))
    just = 1 + 1e-4
    return {
        k: (x.abs() > just * most).to(a.dtype).mean((1, 2))
        for k, x, most in zip(
            ("speed", "acceleration", "jerk"), differences(a, dt), (v_max, a_max, a_max / dt), strict=True
        )
    }


# ---- inverse dynamics --------------------------------------------------------------------------------------


class InverseDynamics(nn.Module):
    """What was commanded between two observations: (x [B,D], x' [B,D]) -> actions in [-1, 1] [B,A].

    x is the state, or the state and two small grey pictures (`features`). Trained on real data alone, then
    frozen.
    """

    def __init__(self, size: int, action: int, hidden: int = 256):
        super().__init__()
        self.norm, self.change = Normaliser(size), Normaliser(size)
        self.net = nn.Sequential(
            nn.Linear(2 * size, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, action),
        )

    def forward(self, x: Tensor, after: Tensor) -> Tensor:
        return self.net(torch.cat([self.norm(x), self.change(after - x)], -1)).clamp(-1.2, 1.2)


def fit_inverse(
    x: np.ndarray,
    after: np.ndarray,
    actions: np.ndarray,
    updates: int = 1500,
    batch: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
    held: float = 0.1,
    tick: Callable[[int], None] = lambda done: None,
) -> tuple[InverseDynamics, dict[str, float]]:
    """Train on real transitions x, after [M,D], actions [M,A] -> (frozen model, errors on the last `held` of
    them).

    Errors: rmse, and r2 = 1 - squared error / variance over all dimensions that vary.
    """
    if len(x) < LEAST:
        raise UserError(f"an inverse-dynamics model needs at least {LEAST} recorded steps, got {len(x)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = InverseDynamics(x.shape[1], actions.shape[1])
    xs, ys, a = (torch.from_numpy(np.ascontiguousarray(v, dtype=np.float32)) for v in (x, after, actions))
    cut = max(1, int(len(x) * (1 - held)))
    model.norm.fit(xs[:cut], 1e-4)
    model.change.fit((ys - xs)[:cut], 1e-5)
    opt = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, lr, max(updates, 2))
    generator = torch.Generator().manual_seed(seed)
    for done in range(updates):
        i = torch.randint(0, cut, (batch,), generator=generator)
        loss = (model(xs[i], ys[i]) - a[i]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        tick(done + 1)
    model.requires_grad_(False).eval()
    error = (model(xs[cut:], ys[cut:]) - a[cut:]).square().mean(0)
    spread = a[cut:].var(0, unbiased=False)
    used = spread > 1e-6
    return model, {
        "rmse": float(error.mean().sqrt()),
        "r2": float((1 - error[used] / spread[used]).mean()),
        "held": len(x) - cut,
    }


def decode(model: InverseDynamics, clip: Tensor) -> Tensor:
    """Observations [B,T+1,D] -> the actions between them [B,T,A]."""
    return model(clip[:, :-1], clip[:, 1:])
