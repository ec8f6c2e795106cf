"""`robo_rl deploy RUN --robot sim`: a run's policy on an arm, governed, with everything counted."""

import sys

from robo_rl.experiment.deploy import deploy
from robo_rl.experiment.deploy_options import DeployOptions


def run(options: DeployOptions) -> int:
    """0: the deployment ran to its end; 1: a governor ended it."""
    from controllers.pair import is_pair

    run_on = deploy
    if is_pair(options.robot):
        from robo_rl.experiment.deploy_pair import deploy_pair as run_on
    result = run_on(options, lambda line: print(line, flush=True), _warn, _tell)
    if result.held:
        _warn(f"{result.state}: {result.reason}")
    return 1 if result.held else 0


def _warn(line: str) -> None:
    print(f"robo_rl: {line}", file=sys.stderr)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
