"""`robo_rl check`: put a simulator, a task, a policy or a method of your own through its contract suite."""

from robo_rl.experiment.check import CheckOptions, check

__all__ = ["CheckOptions", "run"]


def run(options: CheckOptions) -> int:
    """Check and say what was checked."""
    for name, parts in check(options).items():
        print(f"{name} keeps its contract: {', '.join(parts)}")
    return 0
