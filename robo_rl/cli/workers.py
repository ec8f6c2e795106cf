"""`robo_rl workers`: how many worker processes collect for a run, changed while it goes on."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class WorkersOptions:
    """Let workers join or leave a run that goes on: a worker that leaves hands over its episodes, one that
    joins brings envs of its own.

    Without a number, prints how many there are. A resumed run begins with the last number given.
    """

    run: tyro.conf.Positional[str]
    """Run folder."""
    count: tyro.conf.Positional[int] = 0
    """Workers from now on, 1 to 4096; 0: print how many there are."""

    def __post_init__(self) -> None:
        in_range("the number of workers", self.count, 0, 4096)


def run(options: WorkersOptions) -> int:
    """Print the number of workers, or change it."""
    from robo_rl.experiment.worker_count import set_worker_count

    workers = set_worker_count(Path(options.run), options.count)
    if not options.count:
        print(f"{workers.before} worker{'s' * (workers.before > 1)}")
        return 0
    print(
        f"{workers.before} -> {workers.after} worker{'s' * (workers.after > 1)}"
        + (
            f" on {workers.cores} cores: sims that compute will share them"
            if workers.after > workers.cores
            else ""
        )
    )
    return 0
