"""`robo_rl bench`."""

from robo_rl.bench.options import Bench, run  # noqa: F401 (what `robo_rl.cli.main` calls)
