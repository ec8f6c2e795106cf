"""`robo_rl report`."""

from robo_rl.report.page import Report, run  # noqa: F401 (what `robo_rl.cli.main` calls)
