"""`--plan-in MODEL` of `robo_rl eval` and `robo_rl deploy`: a run's policy that plans in a world model."""

from typing import TYPE_CHECKING, Any, Protocol

from robo_rl.errors import UserError, in_range

if TYPE_CHECKING:
    from robo_rl.experiment.policy_server import Actor
    from world_models.plan import Planner

CANDIDATES = 16
NOT_PLANNED: dict[str, Any] = {
    "plan_in": "",
    "plan_candidates": CANDIDATES,
    "plan_rounds": 0,
    "plan_ahead": 0,
}


class PlanningOptions(Protocol):
    """The options that both commands have."""

    @property
    def plan_in(self) -> str: ...
    @property
    def plan_candidates(self) -> int: ...
    @property
    def plan_rounds(self) -> int: ...
    @property
    def plan_ahead(self) -> int: ...
    @property
    def seed(self) -> int: ...


def check(options: PlanningOptions) -> None:
    """Raise UserError for options out of range, or without a model."""
    in_range("--plan-candidates", options.plan_candidates, 2, 4096)
    in_range("--plan-rounds", options.plan_rounds, 0, 100)
    in_range("--plan-ahead", options.plan_ahead, 0, 4096)
    if not options.plan_in and any(getattr(options, k) != v for k, v in NOT_PLANNED.items()):
        raise UserError(
            "--plan-candidates, --plan-rounds and --plan-ahead go with --plan-in MODEL, a run of robo_rl wm "
            "train"
        )


def planned(policy, options: PlanningOptions) -> "Planner":
    """The planner over a policy that is loaded."""
    from robo_rl.experiment.world_model import planner
    from world_models.model import load
    from world_models.plan import PlanOptions

    count, rounds, ahead = options.plan_candidates, options.plan_rounds, options.plan_ahead or None
    how = PlanOptions(candidates=count, rounds=rounds, kept=min(4, count), ahead=ahead)
    return planner(load(options.plan_in), policy, how, options.seed)


def told(who, options: PlanningOptions) -> dict:
    """What an evaluation says of the planner `who`; {} of others."""
    if not options.plan_in:
        return {}
    return {"planned": {"model": options.plan_in, "changed": who.changed / max(who.planned, 1)}}


def planned_actor(policy, options: PlanningOptions, instruction: str) -> "Actor":
    """The same for a deployment, warmed up: asked with one observation it gives the rows [E,A] that are
    executed before the next."""
    import numpy as np

    from robo_rl.experiment.policy_server import Actor
    from robo_rl.policies import blank_obs

    plan = planned(policy, options)

    def ask(batch: list) -> list[np.ndarray]:
        obs = {k: np.stack([o[k] for o in batch]) for k in batch[0]} | {
            "task": np.array([instruction] * len(batch))
        }
        return list(plan(obs))

    def refuse(*_):
        raise UserError("--plan-in gives no rows that agree with others: use --chunking blend or naive")

    for _ in range(2):  # the first calls take longer than all others
        ask([blank_obs(policy.spec)])
    return Actor(policy.options.execute, 0, ask, refuse, refuse)
