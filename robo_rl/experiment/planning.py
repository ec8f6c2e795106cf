"""`--plan-in MODEL` of `robo_rl eval` and `robo_rl deploy`: a run's policy that plans in a world model."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from robo_rl.errors import UserError, in_range
from robo_rl.experiment.model_units import CommandUnits, units_of_run

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


def told(who, options: PlanningOptions, sim: str) -> dict:
    """What an evaluation in the simulator `sim` says of the planner `who`; {} of others."""
    if not options.plan_in:
        return {}
    model = Path(options.plan_in).resolve()
    judged = sim.startswith("wm:") and Path(sim.removeprefix("wm:")).resolve() == model
    found = {"model": options.plan_in, "changed": who.changed / max(who.planned, 1)}
    return {"planned": found | ({"judged_by_itself": True} if judged else {})}


def load_planned_actor(
    options: PlanningOptions, known: tuple, instruction: str, seed: int, device: str = "cpu"
):
    """(who acts, the run's config, ObsSpec) for a deployment of a run, of which `known` is what
    `run_interface` gave, and whose policy computes on `device`. UserError: the run is over several tasks."""
    from robo_rl import checkpoint
    from robo_rl.experiment.policy_server import default_instruction, in_units

    where, folder, _, config, spec, columns = known
    if columns is not None:
        raise UserError(
            f"--plan-in plans for a run over one task, {where} is over several, whose state no world model "
            "predicts: leave out --plan-in, or train a run on this task alone"
        )
    told_in, units = units_of_run(where, config.sim, spec)
    told = instruction or (default_instruction(config, where) if spec.language else "")
    policy = checkpoint.load_policy(folder, device)[0]
    act = planned_actor(policy, options, told, seed)
    return in_units(act, units) if units else act, config, told_in


def planned_actor(policy, options: PlanningOptions, instruction: str, seed: int) -> "Actor":
    """A loaded policy that plans, warmed up: asked with one observation it gives the rows [E,A] that are
    executed before the next, in the units of the policy's data where it learnt in these."""
    import numpy as np

    from robo_rl.experiment.policy_server import Actor, in_units
    from robo_rl.policies import blank_obs
    from world_models.own_pictures import padded
    from world_models.own_units import ends_of

    plan = planned(policy, options, seed)
    world = plan.model.spec

    def ask(batch: list) -> list[np.ndarray]:
        obs = {k: np.stack([o[k] for o in batch]) for k in batch[0]} | {
            "task": np.array([instruction] * len(batch))
        }
        if policy.spec.fit:  # it takes pictures of any shape, the model its own
            obs |= {k: padded(v, world.image_size) for k, v in obs.items() if k.startswith("image/")}
        return list(plan(obs))

    def refuse(*_):
        raise UserError("--plan-in gives no rows that agree with others: use --chunking blend or naive")

    for _ in range(2):  # the first calls take longer than all others
        ask([blank_obs(policy.spec)])
    act = Actor(policy.options.execute, 0, ask, refuse, refuse)
    return in_units(act, CommandUnits(*ends_of(world.control.axes))) if policy.spec.units else act
