"""The contract of a sampler of starts (`robo_rl.rollout_control.Sampler`), checked before a run begins."""

import inspect
from collections.abc import Callable

import numpy as np

from robo_rl.checkpoint import reread
from robo_rl.starts import StartTable

METHODS = {
    "propose": ("generator",),
    "observe": ("starts", "tasks", "success", "returns", "lengths"),
    "metrics": (),
    "state_dict": (),
    "load_state_dict": ("state",),
}


def check_sampler(make: Callable, tasks: int = 1) -> None:
    """Check the sampler `make(seed=…, tasks=…)`. AssertionError: a sentence that says what it does wrong."""
    sampler = make(seed=0, tasks=tasks)
    for name, names in METHODS.items():
        what = f"the sampler must have the method {name}({', '.join(names)})"
        assert callable(getattr(sampler, name, None)), f"{what}, {type(sampler).__name__} has none"
        try:
            inspect.signature(getattr(sampler, name)).bind(*names)
        except TypeError as e:
            raise AssertionError(f"{what}: {e}") from None
    _table(sampler)
    won = np.array([True, False, True])
    sampler.observe(np.arange(3), np.zeros(3, np.int64), won, won.astype(np.float64), np.full(3, 20))
    metrics = sampler.metrics()
    assert isinstance(metrics, dict), f"metrics must return a dict of numbers, got {type(metrics).__name__}"
    for name, value in metrics.items():
        assert isinstance(name, str) and isinstance(value, (int, float, np.number)), (
            f"metrics must return numbers by name, got {name!r}: {type(value).__name__}"
        )
    state = sampler.state_dict()
    assert isinstance(state, dict), f"state_dict must return a dict, got {type(state).__name__}"
    try:
        saved = reread(state, "the state of a sampler")
    except TypeError as e:
        raise AssertionError(
            f"state_dict must be a dict of arrays, numbers, strings, dicts and lists: {e}"
        ) from None
    again = make(seed=0, tasks=tasks)
    again.load_state_dict(saved)
    one, two = _table(sampler), _table(again)
    assert all(np.array_equal(getattr(one, k), getattr(two, k)) for k in ("ids", "weights", "tasks")), (
        "a sampler that loads the state_dict of another must propose the same table: a run would not resume "
        "exactly"
    )


def _table(sampler) -> StartTable:
    table = sampler.propose(np.random.default_rng(1))
    assert isinstance(table, StartTable), (
        f"propose must return a robo_rl.starts.StartTable, got {type(table).__name__}"
    )
    return table
