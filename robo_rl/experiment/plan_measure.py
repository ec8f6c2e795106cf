"""What a plan measures: bytes that a backward pass keeps, and seconds, of small batches."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import workers
from robo_rl.shapes import BOTH_PASSES, operations

ROWS = (4, 12)  # rows of the two batches that are tried
# of what is kept: the backward pass has gradients of activations beside them, and the heap holes (1.19 to 1.6
# measured on trunks of pictures)
BACKWARD = 1.3
QUICK = 2.0  # s of a batch of full size that is still waited for


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One line of a plan. phase: "" for all of the run, or the phase that holds it."""

    what: str
    size: int  # bytes
    phase: str = ""


def simulator_seconds(config: TrainConfig, env, policy) -> float:
    """Of one decision of all envs."""
    actions = torch.zeros(env.num_envs, policy.spec.action).numpy()
    env.reset(seed=0)
    return timed(lambda: env.step(actions)) / env.num_envs * config.envs * policy.options.execute


def simulators_outside(config: TrainConfig, env) -> tuple[list[PlanPart], int]:
    """(memory of the envs of a run that another Python steps, [] where there are none; bytes that those of
    `env` have now). Rollouts and evaluations have their own; each process pays once for its
    libraries."""
    from robo_rl.experiment.evaluation import env_count

    base, each = env.taken_outside() if hasattr(env, "taken_outside") else (0, 0)
    if not base or config.device != "cpu":
        return [], 0
    counts = {"evaluations": (1, env_count(config, config.eval_episodes, config.eval_envs))}
    if config.algo != "bc":
        counts["rollouts"] = (max(1, workers(config)), config.envs)
    parts = [
        PlanPart(f"{n} envs of {what}, outside", processes * base + n * each)
        for what, (processes, n) in counts.items()
    ]
    return parts, base + env.num_envs * each


def extrapolated(policy, loss: Callable[[int], Tensor], rows: int, speed: float = 0.0) -> tuple[int, float]:
    """(bytes kept for the backward pass, seconds of both passes) of a batch of so many rows, from two of few.
    speed: operations a second, of a policy of shapes, of which one batch is enough: nothing of weight is the
    same for all rows; 0: it is measured."""
    own = {identity(x) for x in policy.state_dict().values()}
    if speed:
        size, seconds = kept(own, loss, ROWS[1], speed)
        return int(BACKWARD * size / ROWS[1] * rows), seconds / ROWS[1] * rows
    (small, first), (large, second) = (kept(own, loss, n) for n in ROWS)
    step = (rows - ROWS[0]) / (ROWS[1] - ROWS[0])
    seconds = at_size(first, second, rows, lambda: loss(rows).backward())
    return int(BACKWARD * (small + max(0, large - small) * step)), seconds


def at_size(first: float, second: float, rows: int, work: Callable[[], object]) -> float:
    """Seconds of `work`, a batch of so many rows, from those of two small ones: measured where that is
    quick."""
    guess = max(second, first + (second - first) * (rows - ROWS[0]) / (ROWS[1] - ROWS[0]))
    return timed(work) if guess < QUICK else guess


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(x.nbytes for x in tensors)


def identity(x: Tensor) -> int:
    """Of its storage, also where that has no memory."""
    return x.untyped_storage()._cdata


def kept(own: set[int], loss: Callable[[int], Tensor], rows: int, speed: float = 0.0) -> tuple[int, float]:
    """(bytes of activations, seconds): each storage that the backward pass keeps counts once, those of the
    policy not at all."""
    if speed:
        alive: list[Tensor] = []  # what is kept, while it is counted
        with kept_beside(own) as seen:
            done = operations(lambda: alive.append(loss(rows)))
        return sum(seen.values()), BOTH_PASSES * done / speed
    loss(rows).backward()  # the first one compiles and allocates
    begin = time.perf_counter()
    with kept_beside(own) as seen:
        loss(rows).backward()
    return sum(seen.values()), time.perf_counter() - begin


@contextmanager
def kept_beside(own: set[int]) -> Iterator[dict[int, int]]:
    """Gives {storage: bytes} of what is kept within for a backward pass, without the storages of `own`."""
    seen: dict[int, int] = {}

    def pack(x: Any) -> Any:
        if identity(x) not in own:
            seen[identity(x)] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield seen


def timed(work: Callable[[], object], speed: float = 0.0) -> float:
    """Seconds of the second of two calls; speed: operations a second, of a policy of shapes."""
    if speed:
        return operations(work) / speed
    work()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
