"""`--rl.explore`: how much a run explores follows how much noise its first policy bears."""

from robo_rl.experiment.run import Run
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.exploration import explores_by_level, with_level
from robo_rl.selection import stop_reason
from robo_rl.starts import CHOOSE

LEVELS = (0.5, 0.35, 0.25, 0.15)  # std [normalised action units]


def choose_noise(run: Run) -> None:
    """Give the policy that RL begins with the most noise of `LEVELS` under which it keeps the share
    --rl.explore of its odds of success, else the least; said in a line. The starts are those that choose.
    Where there is no success the noise stays as it is, and where the looks end the run before it explores.

    Odds, not success: a policy that fails in two of a hundred episodes has nothing to learn from failures
    that noise alone makes."""
    config, rl, options = run.config, run.config.rl, run.policy.options
    if not isinstance(rl, OnPolicyOptions) or not rl.explore or config.algo == "bc" or not config.steps:
        return
    if not run.looks or not run.looks[-1].successes or stop_reason(run.looks, config.target, config.patience):
        return
    if config.latency or not explores_by_level(options):
        why = "with --latency" if config.latency else f"of kind {options.kind} with {options.noise} noise"
        run.report.say(f"--rl.explore: a policy {why} explores as it is")
        return
    before, n, tried, chosen = run.looks[-1].rate, run.looks[-1].n, [], LEVELS[-1]
    for level in LEVELS[:-1]:  # the least is taken whatever it costs
        run.report.start("noise", n, "episodes")
        success = run.evaluator.success_under_noise(with_level(run.policy, level), CHOOSE, run.report.advance)
        tried.append(f"{success:.3f} under {level:g}")
        if odds(success, n) >= rl.explore * odds(before, n):
            chosen = level
            break
    run.policy = with_level(run.policy, chosen)
    run.report.say(
        f"exploration noise {chosen:g} [normalised action units]: success {before:.3f} without, "
        f"{', '.join(tried)} (--rl.explore)"
    )


def odds(success: float, episodes: int) -> float:
    """Of success: (successes + 1) to (failures + 1), finite where no episode failed."""
    return (success * episodes + 1) / ((1 - success) * episodes + 1)
