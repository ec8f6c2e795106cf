"""`--plan-in MODEL` of `robo_rl eval` and `robo_rl deploy`: a run's policy that plans in a world model."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from robo_rl.errors import UserError, in_range
from robo_rl.experiment.model_units import units_of_run

if TYPE_CHECKING:
    from robo_rl.experiment.policy_server import Actor
    from world_models.plan import Planner

CANDIDATES = 16


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """The options that both commands have."""

    plan_in: Annotated[str, tyro.conf.arg(metavar="MODEL")] = ""
    """Run of robo_rl wm train: of several chunks of the policy the one that leads to success in this model is
    executed. A real arm goes on meanwhile."""
    plan_candidates: int = CANDIDATES
    """With --plan-in: chunks that are tried at each decision, 2 to 4096."""
    plan_rounds: int = 0
    """With --plan-in: rounds of the cross-entropy method from them on, to 100; 0: the best of them."""
    plan_ahead: int = 0
    """With --plan-in: control steps of the policy after a chunk by which it is judged, to 4096; 0: to the
    length of a recorded episode."""


NOT_PLANNED: dict[str, Any] = {field.name: field.default for field in fields(PlanningOptions)}


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


def planned(policy, options: PlanningOptions, seed: int) -> "Planner":
    """The planner over a policy that is loaded."""
    from robo_rl.experiment.world_model import planner
    from world_models.model import load
    from world_models.plan import PlanOptions

    count, rounds, ahead = options.plan_candidates, options.plan_rounds, options.plan_ahead or None
    how = PlanOptions(candidates=count, rounds=rounds, kept=min(4, count), ahead=ahead)
    return planner(load(options.plan_in), policy, how, seed)


def told(who, options: PlanningOptions) -> dict:
    """What an evaluation says of the planner `who`; {} of others."""
    if not options.plan_in:
        return {}
    return {"planned": {"model": options.plan_in, "changed": who.changed / max(who.planned, 1)}}


def load_planned_actor(
    options: PlanningOptions, run: str, name: str, task: str, instruction: str, seed: int, device: str = "cpu"
):
    """(who acts, the run's config, ObsSpec) for a deployment of checkpoint `name` of a run, whose policy
    computes on `device`. UserError: it commands units of its own data."""
    from robo_rl import checkpoint
    from robo_rl.experiment.policy_server import default_instruction, in_units, run_interface

    where, folder, _, config, spec, columns = run_interface(run, name, task)
    if columns is not None or spec.units:
        raise UserError(
            "--plan-in plans for a run over one task that commands what the world model's env takes, from -1 "
            "to 1"
        )
    told_in, units = units_of_run(where, config.sim, spec)
    told = instruction or (default_instruction(config, where) if spec.language else "")
    policy = checkpoint.load_policy(folder, device)[0]
    act = planned_actor(policy, options, told, seed)
    return in_units(act, units) if units else act, config, told_in


def planned_actor(policy, options: PlanningOptions, instruction: str, seed: int) -> "Actor":
    """A loaded policy that plans, warmed up: asked with one observation it gives the rows [E,A] that are
    executed before the next."""
    import numpy as np

    from robo_rl.experiment.policy_server import Actor
    from robo_rl.policies import blank_obs

    plan = planned(policy, options, seed)

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
