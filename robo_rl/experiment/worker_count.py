"""How many worker processes collect for a run, changed while it goes on."""

from dataclasses import dataclass
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.files import cores


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """Workers of a run: how many there were, how many there will be, and cores of this machine."""

    before: int
    after: int
    cores: int


def set_worker_count(folder: Path, count: int = 0) -> WorkerCount:
    """Let workers join or leave the run in `folder`, which reads the number several times a second; 0: change
    nothing.

    UserError: no workers collect for it now, or it promises the same result for the same seed
    (--max-staleness 0).
    """
    from robo_rl import files
    from robo_rl.experiment import parallel
    from robo_rl.experiment.config import load_config

    if not (folder / "run.json").exists():
        raise UserError(f"{folder} is no run folder; give one that robo_rl train made")
    from robo_rl.runtime.worker_pool import WORKER_COUNT_FILE, requested_workers  # torch comes with it

    options, flight = load_config(folder), folder / "flight"
    if not (flight / "slots.bin").exists():
        raise UserError(
            f"no workers collect for {folder} now: it was begun with --workers 0, has not come to online RL, "
            "or is finished"
        )
    before = requested_workers(flight) or parallel.workers(options)
    if count:
        if not parallel.staleness(options):
            raise UserError(
                "with --max-staleness 0 each worker has a fixed share of every batch, so that the same seed "
                "gives the same run; workers can join and leave a run with --max-staleness of at least 1"
            )
        files.write_json(flight / WORKER_COUNT_FILE, {"workers": count})
    return WorkerCount(before, count or before, cores())
