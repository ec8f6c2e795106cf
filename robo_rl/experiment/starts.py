"""Who decides in a run which start comes next: the env itself (--starts uniform), or a sampler of robo_rl/rollout_control."""

import importlib
from collections.abc import Callable

from robo_rl.errors import UserError, choose
from robo_rl.experiment.config import STARTS, TrainConfig
from robo_rl.experiment.run import Run
from robo_rl.plugins import OWN, check_call, is_object, load_object
from robo_rl.rollout_control import StartControl

WHAT = "--starts"


def find_sampler(name: str) -> Callable:
    """`make(seed, tasks)` -> a sampler, of a name: ours in robo_rl/rollout_control, or the user's own `module:function`."""
    if not is_object(name):
        return importlib.import_module(f"robo_rl.rollout_control.{choose('starts', name, (*STARTS, OWN))}").make
    make = load_object(name, WHAT)
    check_call(make, name, WHAT, (), ("seed", "tasks"))
    return make


def check(config: TrainConfig) -> None:
    """Raise UserError for a sampler that there is not, or that a run cannot use."""
    if config.starts in ("auto", "uniform"):
        return
    find_sampler(config.starts)
    if config.backend == "ray":
        raise UserError("--starts: the table of starts goes by files of this machine, not to workers of --backend ray; use --starts "
                        "uniform or --backend processes")


def make_control(run: Run, saved: "dict | None") -> "StartControl | None":
    """The control of the run's starts, as it was where `saved`, its state in a checkpoint, is given; None: the env draws them."""
    config = run.config
    if config.starts in ("auto", "uniform"):
        return None
    control = StartControl(find_sampler(config.starts)(seed=config.seed, tasks=1), config.seed)
    if saved:
        control.load_state_dict(saved)
    return control
