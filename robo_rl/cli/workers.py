"""`robo_rl workers`: how many worker processes collect for a run, changed while it goes on."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Let workers join or leave a run that goes on: who leaves hands over what it is at, who joins brings envs of its own.

    Without a number, says how many there are. A resumed run begins with as many as it was last told.
    """

    run: tyro.conf.Positional[str]
    """Run folder."""
    count: tyro.conf.Positional[int] = 0
    """Workers from now on."""

    def __post_init__(self) -> None:
        in_range("the number of workers", self.count, 0, 4096)


def run(args: Workers) -> int:
    """Write down how many there should be; the run looks several times a second."""
    from robo_rl import files
    from robo_rl.experiment import feeds
    from robo_rl.experiment.train import run_config
    folder = Path(args.run)
    if not (folder / "run.json").exists():
        raise UserError(f"{folder} is no run folder; give one that robo_rl train made")
    from robo_rl.runtime.crewed import WANTED, wanted  # torch comes with it
    options, flight = run_config(folder), folder / "flight"
    if not (flight / "slots.bin").exists():
        raise UserError(f"no workers collect for {folder} now: it was begun with --workers 0, has not come to online RL, "
                        "or is finished")
    before = wanted(flight) or feeds.workers(options)
    if not args.count:
        print(f"{before} worker{'s' * (before > 1)}")
        return 0
    if not feeds.staleness(options):
        raise UserError("with --max-staleness 0 each worker has a fixed share of every batch, so that the same seed gives "
                        "the same run; workers can join and leave a run with --max-staleness of at least 1")
    files.write_json(flight / WANTED, {"workers": args.count})
    print(f"{before} -> {args.count} worker{'s' * (args.count > 1)}" + (
        f" on {feeds.cores()} cores: sims that compute will share them" if args.count > feeds.cores() else ""))
    return 0
