"""A user's own simulator: `sims.make("my_pkg.sims:make_pour", ...)` calls `make_pour(task, num_envs,
**options)`, with more arguments after commas:
"my_pkg.sims:make_pour,glass=tall".

It gives a `gymnasium.vector.VectorEnv` of the contract, which is looked at once per process
(`sims.check.check_quickly`). It is told the options that its signature takes; one that was asked for and that
it does not take is refused.
"""

import inspect

import gymnasium as gym
from gymnasium.vector import VectorEnv

from robo_rl.errors import UserError
from robo_rl.plugins import OURS, check_call, error_words, load_object, said, split_arguments
from sims.mujoco.gl import set_mujoco_gl

WHAT = "--sim"
DEFAULTS = {
    "task": "",
    "obs": "state",
    "reward": "",
    "control": "",
    "image_size": 64,
    "max_steps": 0,
    "randomise": "",
    "render": False,
    "device": "cpu",
}  # what nobody asked for
HINTS = ("threads", "image_size")  # of use to who takes them


def make_own(name: str, task: str, num_envs: int, **options):
    """The vector env that the function `name` makes; the options are those of `sims.make`."""
    make, arguments = find_sim(name), split_arguments(name)[1]
    options = {"task": task} | options
    given = taken(name, make, {k: v for k, v in options.items() if k not in arguments}) | arguments
    with said(f"{WHAT} {name} cannot be made"):
        env = make(num_envs=num_envs, **given)
    _look((name, *sorted((k, str(v)) for k, v in given.items())), env)
    return env


def find_sim(name: str):
    """The function `name`, which takes `num_envs` and the arguments after its name."""
    made_by, arguments = split_arguments(name)
    set_mujoco_gl()
    make = load_object(made_by, WHAT)
    if _is_single(make):
        raise UserError(
            f"{WHAT} {made_by} is an env of one robot, of which Gymnasium's adapter runs many: say {WHAT} "
            f"gym:{name}"
        )
    check_call(make, made_by, WHAT, (), ("num_envs", *arguments))
    return make


def _is_single(thing: object) -> bool:
    """Whether it is a class of envs of one robot."""
    return inspect.isclass(thing) and issubclass(thing, gym.Env)


def _parameters(make) -> dict:
    try:
        return dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return {}


def takes_task(name: str) -> bool:
    """Whether the function `name` has a parameter `task`, or takes whatever it is given."""
    parameters = _parameters(find_sim(name))
    return "task" in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def taken(name: str, make, options: dict) -> dict:
    """Of `options` those that `make` takes; UserError for another one that was asked for."""
    parameters = _parameters(make)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return options
    refused = [k for k, v in options.items() if k not in parameters and k not in HINTS and v != DEFAULTS[k]]
    if refused:
        raise UserError(
            f"{WHAT} {name} takes no {refused[0]} (got {options[refused[0]]!r}); it takes "
            f"{', '.join(p for p in parameters)}"
        )
    return {k: v for k, v in options.items() if k in parameters}


_seen: set[tuple] = set()  # what was looked at in this process


def _look(key: tuple, env) -> None:
    if key in _seen:
        return
    from sims.check import check_quickly

    try:
        with said(f"{WHAT} {key[0]}: its first steps failed", passed=(AssertionError,)):
            check_quickly(env)
    except AssertionError as e:
        words = str(e) or error_words(e)
        raise UserError(
            f"{WHAT} {key[0]}: {words} (robo_rl check --sim {key[0]} runs the whole suite)"
        ) from None
    _seen.add(key)


def own_error(e: Exception) -> str:
    """What the code of a user's own vector env raised, in a line; "" where none of its methods was running,
    and of what is told otherwise."""
    at = None if isinstance(e, UserError | MemoryError) else e.__traceback__
    while at is not None:
        frame, at = at.tb_frame, at.tb_next
        env = type(frame.f_locals.get("self"))
        if issubclass(env, VectorEnv) and env.__module__.split(".")[0] not in OURS:
            return f"the simulator failed in {env.__name__}.{frame.f_code.co_name}: {error_words(e)}"
    return ""
