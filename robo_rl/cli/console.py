"""`robo_rl console`."""

from robo_rl.human.console.session import Console, run  # noqa: F401 (what `robo_rl.cli.main` calls)
