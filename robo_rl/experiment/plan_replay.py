"""The plan of a run whose method learns from replay (`robo_rl train --plan`): what the learner keeps beside
the policy is read from one that has made an update, replay is counted from the rows that it will have, and
times are measured at the run's own batch where that is quick."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.experiment.config import TrainConfig, replay_options
from robo_rl.experiment.parallel import workers
from robo_rl.experiment.plan_measure import (
    BACKWARD,
    ROWS,
    PlanPart,
    at_size,
    identity,
    kept_beside,
    simulator_seconds,
    size_of,
    timed,
)

PROBE = 4096  # rows of the store whose bytes are counted


def replay_parts(
    config: TrainConfig, env, policy, learner
) -> tuple[list[PlanPart], list[tuple[str, float]], tuple[int, float]]:
    """(memory of RL from replay, seconds of each part of a decision of all envs, updates of --rl.pretrain and
    their seconds)."""
    from robo_rl.experiment.replay import check_memory
    from robo_rl.policies.check import observations
    from robo_rl.replay_collector import row_bytes

    o = replay_options(config)
    own = {identity(x) for x in policy.state_dict().values()}
    update = one_update(policy, learner)
    step = o.actor_every  # critic updates, after the last of which the actor learns
    policy.zero_grad(set_to_none=True)  # of supervision
    update(ROWS[0], step)  # the first one compiles and allocates, and leaves gradients and moments
    saved = [activations(own, learner, lambda n=n: update(n, step)) for n in ROWS]
    slope = max(0.0, (saved[1] - saved[0]) / (ROWS[1] - ROWS[0]))
    held, moments = tensors_of(learner), moments_of(learner)
    beside = sum(size for k, size in sizes(held).items() if k not in own and k not in moments)
    gradients = sum(x.grad.nbytes for x in held.values() if x.is_leaf and x.grad is not None)
    piece = max((x.nbytes for x in held.values() if x.is_leaf and x.grad is not None), default=0)
    batch = 2 * o.batch * row_bytes(policy)  # with the next observations
    parts = [
        PlanPart("critics, averages, what else learns", beside),
        PlanPart("gradients", gradients),
        PlanPart("a gradient while it is added", 2 * piece, "update"),
        PlanPart("moments of Adam", sum(sizes(moments).values())),
        PlanPart("activations", int(BACKWARD * (saved[0] + slope * (o.batch - ROWS[0]))) + batch, "update"),
    ]
    weights = size_of(policy.state_dict().values())
    if config.device == "cpu":  # what an update freed is not given back before
        parts.append(PlanPart("copies for a checkpoint", weights, "update"))
        parts += stores(config, env, policy)
    else:
        check_memory(config, policy)
    if workers(config):
        parts.append(PlanPart("weights of the actor beside it", weights))
    seen = {k: v.to(config.device) for k, v in observations(policy.spec, min(config.envs, 64)).items()}
    acting = timed(lambda: policy.act(seen, torch.Generator().manual_seed(0), True))
    made = o.utd * config.envs
    seconds = [
        ("simulator", simulator_seconds(config, env, policy)),
        ("policy", acting * config.envs / min(config.envs, 64)),
        (f"learner, {made:g} updates", seconds_of(o.batch, lambda n: update(n, step)) / step * made),
    ]
    # before the actor learns, or of a method with an offline stage that stage
    actor = learner.offline_actor
    alone = step if actor else 1
    pretrain = seconds_of(o.batch, lambda n: update(n, alone, actor)) / alone if o.pretrain else 0.0
    return parts, seconds, (o.pretrain, o.pretrain * pretrain)


def one_update(policy, learner) -> Callable[..., None]:
    """`update(rows, count, actor)`: so many updates of a batch of so many rows; `actor`: of it too."""
    from robo_rl.algos.check import random_batch
    from robo_rl.replay_collector import blank_row

    rng, row = np.random.default_rng(0), blank_row(policy)

    def update(rows: int, count: int, actor: bool = True) -> None:
        seen = {k: np.repeat(v, rows, 0) for k, v in row.items()}
        made = replace(random_batch(policy, rows, rng), obs=seen, next_obs=seen)
        learner.update(lambda _: made, count, actor)

    return update


def activations(own: set[int], learner, work: Callable[[], None]) -> int:
    """Bytes that the backward pass of the largest step keeps: each storage once, those of the policy and of
    the learner not at all."""
    had = own | set(tensors_of(learner))
    most = 0

    def watched(step: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal most
            seen.clear()
            out = step(*args, **kwargs)
            most = max(most, sum(seen.values()))
            return out

        return run

    names = [name for name in ("critic_step", "actor_step") if hasattr(learner, name)]
    with kept_beside(had) as seen:
        for name in names:
            setattr(learner, name, watched(getattr(learner, name)))
        try:
            watched(work)() if not names else work()
        finally:
            for name in names:
                delattr(learner, name)
    return most


def seconds_of(rows: int, work: Callable[[int], None]) -> float:
    """Seconds of `work(rows)`: extrapolated from two small batches, and measured where that is quick."""
    small, large = (timed(lambda n=n: work(n)) for n in ROWS)
    return at_size(small, large, rows, lambda: work(rows))


def stores(config: TrainConfig, env, policy) -> list[PlanPart]:
    """Memory of replay when it is full, and of the demonstrations."""
    from robo_rl.data.meta import load_meta
    from robo_rl.experiment.replay import room
    from robo_rl.types import task_names

    each, limit = step_bytes(policy), env.spec.max_steps
    count = min(room(config), config.steps + config.steps // limit)
    demos = (
        int(config.demos) * len(task_names(env)) * limit
        if config.demos.isdecimal()
        else int(load_meta(config.demos).info["total_frames"])
    )
    return [
        PlanPart(f"replay of {count:,} steps", int(each * count)),
        PlanPart(f"demonstrations, {demos:,} steps", int(each * demos)),
    ]


def step_bytes(policy) -> float:
    """Bytes that a control step takes in a store of replay."""
    from robo_rl.replay import Replay
    from robo_rl.replay_collector import replay_rows

    def size(capacity: int) -> int:
        store = Replay(replay_rows(policy), policy.spec.action, policy.options.execute, 0.9, capacity, 1)
        arrays = [*store.obs.values(), *(x for x in vars(store).values() if isinstance(x, np.ndarray))]
        return sum(x.nbytes for x in arrays)

    return (size(2 * PROBE) - size(PROBE)) / PROBE


def sizes(tensors: dict[int, Tensor]) -> dict[int, int]:
    """Bytes of each storage."""
    return {k: x.untyped_storage().nbytes() for k, x in tensors.items()}


def tensors_of(learner) -> dict[int, Tensor]:
    """What a learner holds, its policy with it, by storage."""
    return {identity(x): x for part in parts_in(learner, set()) for x in _tensors(part)}


def moments_of(learner) -> dict[int, Tensor]:
    """What the optimizers of a learner keep of its parameters, by storage."""
    states = (part.state.values() for part in parts_in(learner, set()) if hasattr(part, "param_groups"))
    return {identity(x): x for state in states for moments in state for x in moments.values()}


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, torch.nn.Module):
        return [*part.parameters(), *part.buffers()]
    params = [p for group in part.param_groups for p in group["params"]]
    return params + [x for moments in part.state.values() for x in moments.values()]


def parts_in(x: Any, seen: set[int]) -> Iterator[Any]:
    """Tensors, modules and optimizers below `x`, in lists, dicts and objects."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor | torch.nn.Module) or hasattr(x, "param_groups"):
        yield x
    elif isinstance(x, dict):
        for v in x.values():
            yield from parts_in(v, seen)
    elif isinstance(x, list | tuple):
        for v in x:
            yield from parts_in(v, seen)
    elif hasattr(x, "__dict__") and not callable(x):
        yield from parts_in(vars(x), seen)
