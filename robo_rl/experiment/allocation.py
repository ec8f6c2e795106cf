"""`--rl.allocate`: whether a run's episodes are shared out among its starts, and the planner; which runs may
have candidates."""

from typing import TYPE_CHECKING

from robo_rl.errors import UserError
from robo_rl.experiment.config import POOL_STARTS, TrainConfig, rollout_options
from robo_rl.experiment.envs import task_count
from robo_rl.experiment.parallel import allocates, batch, chooses, group_size
from robo_rl.options.method import BY_ARM
from robo_rl.rollout_control import StartControl

if TYPE_CHECKING:
    from robo_rl.runtime.planned import PlannedGroups  # torch comes with it


def check(config: TrainConfig) -> None:
    """Raise UserError for an allocation, or candidates, that a run cannot have."""
    if not (allocates(config) or chooses(config)):
        return
    name = rollout_options(config).allocate
    what = "--rl.candidates" if chooses(config) else f"--rl.allocate {name}"
    if config.server or config.backend == "ray" or config.periodic or config.dream or config.learners > 1:
        raise UserError(f"{what} goes without --server, --backend ray, --periodic, --dream and --learners")
    if chooses(config) and config.policy.commit_least:
        raise UserError(
            "--rl.candidates goes without --latency: what a chunk commits to is no part of the noise that is "
            "played again"
        )
    if chooses(config) and rollout_options(config).candidates_by == "steps":
        from robo_rl.policies.cheap import check_steps

        check_steps(config.policy, rollout_options(config).candidates_steps)
    if name in BY_ARM and config.starts not in POOL_STARTS and task_count(config) == 1:
        raise UserError(
            f"--rl.allocate {name} decides by the success of starts that come again: it needs --starts pool "
            f"(or {', '.join(n for n in POOL_STARTS if n != 'pool')}) or several tasks (--task "
            "pick_cube,push_cube); without, use refill, ada or broad"
        )


def make_planned(
    config: TrainConfig, control: "StartControl | None", saved: "dict | None" = None
) -> "PlannedGroups | None":
    """The planner of a run, as it was where `saved`, its state in a checkpoint, is given; None: every group
    has --rl.group episodes."""
    if not allocates(config):
        return None
    from robo_rl.rollout_control.group_plan import GroupPlanner, no_arms, pool_arms, shape_of, task_arms
    from robo_rl.rollout_control.pool import PoolSampler
    from robo_rl.runtime.planned import PlannedGroups

    assert control is not None  # `starts.make_control` sees to it
    o, count = rollout_options(config), task_count(config)
    sampler = getattr(control.sampler, "inner", control.sampler)
    arms, arm_of = (
        (len(sampler.ids), pool_arms(sampler.ids))
        if isinstance(sampler, PoolSampler)
        else (count, task_arms(count))
        if count > 1
        else (0, no_arms)
    )
    planner = GroupPlanner(
        o.allocate,
        shape_of(o.allocate, o.group, o.allocate_most, o.ada_rule),
        control,
        config.seed,
        batch(config) // group_size(config),
        arms,
        arm_of,
        o.advantage == "grpo",
        o.allocate_most - 1,
    )
    planned = PlannedGroups(planner)
    if saved:
        planned.load_state_dict(saved)
    return planned
