"""`robo_rl cameras`."""

from robo_rl.experiment.cameras import Cameras, run  # noqa: F401 (what `robo_rl.cli.main` calls)
