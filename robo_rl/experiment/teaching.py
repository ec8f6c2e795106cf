"""Supervision that was stopped or killed goes on where it was, to the bit: a checkpoint of it now and then.

Its policy is the one that supervision would give if it ended there (the averaged weights), so that it can be
evaluated, served and deployed while it learns. What goes on learning is beside it.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robo_rl.selection import best_look

if TYPE_CHECKING:
    from robo_rl.algos.bc import Fit
    from robo_rl.experiment.run import Run

LEAST = 60.0  # s from one checkpoint to the next, and at least so many times what the last one took
RARE = 20


class Teaching:
    """`updates` supervised updates of `run.policy`, the first that it ever has. parts: what else has a state
    that they move (a sampler, weights of frames), by name."""

    def __init__(self, run: "Run", updates: int, parts: Mapping[str, Any]):
        self.run, self.updates = run, updates
        self.parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        self.fit: Fit | None = None
        self.due = time.monotonic() + LEAST
        self.kept = -1  # updates that are in a checkpoint

    def begin(self, fit: "Fit") -> None:
        """Go on from the checkpoint that the run begins with, if there is one: `fit` and weights are what
        they were then."""
        from robo_rl import checkpoint

        self.fit, self.run.average = fit, fit.average
        begun, self.run.begun = self.run.begun, None
        if begun is None:
            return
        state = checkpoint.load_train(begun)[0]
        checkpoint.load_weights(begun, self.run.policy)
        fit.average.resume(state["learns"])
        fit.load_state_dict(state["fit"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.kept = fit.update
        self.run.report.advance(fit.update)

    def after_update(self) -> None:
        """Keep what is learnt where it is time, at the end of work that was long enough to be kept, and where
        it is the best so far of what was looked at."""
        assert self.fit is not None
        looks = self.run.looks
        is_best = bool(looks) and best_look(looks).step == self.fit.update
        if is_best or time.monotonic() >= self.due or self.fit.update == self.updates and self.kept >= 0:
            self.keep()

    def keep(self) -> None:
        """Write the checkpoint."""
        if self.fit is None or self.kept == self.fit.update:
            return
        began = time.monotonic()
        state = {name: part.state_dict() for name, part in self.parts.items()}
        self.write(state | {"fit": self.fit.state_dict()}, self.fit.update)
        self.kept = self.fit.update
        now = time.monotonic()
        self.due = now + max(LEAST, RARE * (now - began))

    def write(self, state: dict[str, Any], made: int) -> None:
        """The checkpoint itself, after so many updates."""
        self.run.taught = self.run.updates = made
        self.run.save(state, finished=False, teaching=self.updates)
        self.run.taught = self.run.updates = 0

    def end(self) -> None:
        """The policy has its averaged weights for good."""
        self.run.average = None


def begun_in(saved: list[Path]) -> "Path | None":
    """The last of a run's checkpoints, where it was made while supervision went on."""
    from robo_rl import checkpoint

    return saved[-1] if saved and {"teaching", "rounds"} & {*checkpoint.read_meta(saved[-1])} else None


def keep_rounds(run: "Run", made: int, **state: Any) -> None:
    """Write a checkpoint between two rounds of supervision, of which so many are made. state: what the next
    ones need beside the policy, its looks and what its trunk pooled."""
    run.save(state | {"pooled": run.pooled}, finished=False, rounds=made)


def rounds_of(begun: "Path | None") -> int:
    """How many rounds of supervision a checkpoint has; 0 where it was made within the first."""
    from robo_rl import checkpoint

    return checkpoint.read_meta(begun).get("rounds", 0) if begun else 0


def load_rounds(run: "Run") -> tuple[int, dict[str, Any]]:
    """Go on from the checkpoint that the run begins with, if it was made between rounds -> how many of these
    are made, and the `state` of `keep_rounds`; (0, {}): none."""
    from robo_rl import checkpoint
    from robo_rl.experiment.folder import taught_of
    from robo_rl.experiment.run import looks_of

    begun, made = run.begun, rounds_of(run.begun)
    if begun is None or not made:
        return 0, {}
    run.policy, meta = checkpoint.load_policy(begun, run.config.device)
    state = checkpoint.load_train(begun)[0]
    run.looks, (run.taught, run.updates) = looks_of(meta, run.config.eval_episodes), taught_of(meta)
    run.pooled, run.begun = state.pop("pooled"), None
    return made, state
