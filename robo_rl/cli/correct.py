"""`robo_rl correct`."""

from robo_rl.experiment.correct import Correct, run  # noqa: F401 (what `robo_rl.cli.main` calls)
