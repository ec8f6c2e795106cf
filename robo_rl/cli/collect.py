"""`robo_rl collect`."""

from robo_rl.experiment.collect import Collect, run  # noqa: F401 (what `robo_rl.cli.main` calls)
