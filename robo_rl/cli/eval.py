"""`robo_rl eval`."""

from robo_rl.experiment.evaluation import Eval, run  # noqa: F401 (what `robo_rl.cli.main` calls)
