"""Methods by their names: ours in robo_rl/algos, and the user's own, `module:function`."""

import importlib
from collections.abc import Callable, Iterable

from robo_rl.errors import UserError
from robo_rl.experiment.config import WHAT, TrainConfig
from robo_rl.options import PolicyOptions
from robo_rl.plugins import check_call, is_object, load_object


def find_method(algo: str) -> Callable:
    """`make(policy, options, seed, demos=None)` of a method -> a learner."""
    if not is_object(algo):
        return importlib.import_module(f"robo_rl.algos.{algo}").make
    make = load_object(algo, WHAT)
    check_call(make, algo, WHAT, ("policy", "options", "seed"), ("demos",))
    return make


def check_method(config: TrainConfig, policy) -> None:
    """UserError for a method that does not take the policy; one of the user's own is put through
    `robo_rl.algos.check`."""
    make = find_method(config.algo)
    if not is_object(config.algo):
        make(policy, config.rl, 0)
        return
    from robo_rl.algos.check import check_method as check

    try:
        check(make, config.rl, policy)
    except AssertionError as e:
        raise UserError(f"{WHAT} {config.algo}: {e}") from None


def check_learnt(config: TrainConfig, policy) -> None:
    """UserError: an update of a method of the user's own, or of a policy of theirs, left weights that are not
    finite. Ours take no such step."""
    if not (is_object(config.algo) or is_object(config.policy.kind)):
        return
    for name, x in policy.named_parameters():
        if not bool(x.isfinite().all()):
            raise UserError(
                f"{WHAT} {config.algo}: an update left the weights {name} of the policy not finite: take no "
                "step along a loss or a gradient that is not (robo_rl.algos.credit.descend takes none), or "
                "lower --rl.lr"
            )


def check_told(algo: str, advantage: bool) -> None:
    """UserError: a policy that is told the advantage, and another method than those that tell it."""
    if advantage and algo not in ("recap", "bc"):
        raise UserError(
            f"a policy that is told the advantage learns by --algo recap or bc, not {algo}; with "
            "--policy.no-advantage and without --init a policy begins anew"
        )


def check_model(config: TrainConfig, policy, instructions: Iterable[str]) -> None:
    """UserError for a vision-language-action model that was asked for in another size than its weights have,
    or whose prompt has no room for one of the instructions."""
    if config.policy.folder and config.policy.size != PolicyOptions.size:
        raise UserError(
            f"--policy.size {config.policy.size} is of fresh weights, and those of {config.policy.folder} "
            "have their own; leave one of the two out"
        )
    if hasattr(policy, "check_prompts"):
        policy.check_prompts(instructions)
