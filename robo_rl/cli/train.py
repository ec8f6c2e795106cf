"""`robo_rl train`: demonstrations, SFT, online RL, evaluation, checkpoints, videos, in one run folder that resumes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from robo_rl.cli import parse_options
from robo_rl.errors import choose
from robo_rl.experiment.config import ALGOS, TrainConfig
from robo_rl.experiment.folder import newest_run


def parse(argv: list[str]) -> TrainConfig:
    """Options over the recipe that fits --sim, --task, --algo, --obs and --preset."""
    from robo_rl.experiment.recipes import begun, preset

    def peek(name: str, default: str) -> str:
        for i, arg in enumerate(argv):
            if arg == f"--{name}" and i + 1 < len(argv):
                return argv[i + 1]
            if arg.startswith(f"--{name}="):
                return arg.split("=", 1)[1]
        return default
    base = preset(peek("sim", "mujoco"), peek("task", ""), choose("algo", peek("algo", "pi_rl"), ALGOS),
                  peek("obs", "state"), peek("preset", "full"), peek("reward", ""))
    if init := peek("init", ""):
        base = begun(base, Path(init))
    if peek("steps", ""):
        base = replace(base, target=0.0)  # all of them, unless a target is named too
    return parse_options(TrainConfig, "train", argv, default=base)


def run(args: TrainConfig, began: Callable[[Path], None] = lambda folder: None) -> int:
    """Train from the start, or go on with a run; `began` hears of the folder once there is something to go on with."""
    from robo_rl.experiment import train
    if not args.resume:
        return train.train(args, began=began)[1]
    folder = newest_run(Path("runs")) if args.resume == "auto" else Path(args.resume)
    if (folder / "run.json").exists():
        began(folder)
    return train.resume(folder)[1]


def run_guarded(args: TrainConfig) -> int:
    """`run` in a process of its own that is started again from its checkpoint if a signal kills it."""
    from robo_rl.experiment import parallel, train
    from robo_rl.experiment.supervise import guarded
    if args.algo == "bc" or not args.resume and parallel.workers(args) == 0:
        return run(args)
    return guarded(lambda tell: run(args, tell), lambda folder: train.resume(folder)[1])
