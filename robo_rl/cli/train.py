"""`robo_rl train`: demonstrations, SFT, online RL, evaluation, checkpoints, videos, in one run folder that resumes."""

from dataclasses import replace
from pathlib import Path

from robo_rl.cli import parse_options
from robo_rl.errors import choose
from robo_rl.experiment.train import ALGOS, Train, begun, resume, run


def parse(argv: list[str]) -> Train:
    """Options over the preset that fits --sim, --task, --algo, --obs and --preset."""
    from robo_rl.experiment.recipes import preset

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
    return parse_options(Train, "train", argv, default=base)


def run_guarded(args: Train) -> int:
    """`run` in a process of its own that is started again from its checkpoint if a signal kills it."""
    from robo_rl.experiment import feeds
    from robo_rl.experiment.supervise import guarded
    if args.algo == "bc" or not args.resume and feeds.workers(args) == 0:
        return run(args)
    return guarded(lambda tell: run(args, tell), resume)
