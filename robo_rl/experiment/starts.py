"""Who decides in a run which start comes next: the env itself (--starts uniform), or a sampler of robo_rl/rollout_control."""

from collections.abc import Callable

from robo_rl.errors import UserError
from robo_rl.experiment import start_pool
from robo_rl.experiment.config import POOL_STARTS, TrainConfig
from robo_rl.experiment.run import Run
from robo_rl.plugins import check_call, is_object, load_object
from robo_rl.rollout_control import StartControl

WHAT = "--starts"


def find_sampler(name: str) -> Callable:
    """`make(seed, tasks)` -> a sampler, of the user's own `module:function`."""
    make = load_object(name, WHAT)
    check_call(make, name, WHAT, (), ("seed", "tasks"))
    return make


def check(config: TrainConfig) -> None:
    """Raise UserError for a sampler that there is not, or that a run cannot use."""
    if config.starts in ("auto", "uniform"):
        return
    start_pool.check(config)
    if is_object(config.starts):
        find_sampler(config.starts)
    if config.backend == "ray":
        raise UserError("--starts: the table of starts goes by files of this machine, not to workers of --backend ray; use --starts "
                        "uniform or --backend processes")


def make_control(run: Run, saved: "dict | None") -> "StartControl | None":
    """The control of the run's starts, as it was where `saved`, its state in a checkpoint, is given; None: the env draws them."""
    config = run.config
    if config.starts in ("auto", "uniform"):
        return None
    control = StartControl(start_pool.make_sampler(config) if config.starts in POOL_STARTS else
                           find_sampler(config.starts)(seed=config.seed, tasks=1), config.seed)
    if saved:
        control.load_state_dict(saved)
    return control
