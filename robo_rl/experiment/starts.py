"""Who decides in a run which start comes next: the env itself (--starts uniform), or a sampler of
robo_rl/rollout_control."""

from collections.abc import Callable, Collection
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.experiment import start_pool, tasks
from robo_rl.experiment.config import POOL_STARTS, TrainConfig
from robo_rl.experiment.envs import make_env, task_count
from robo_rl.experiment.parallel import allocates
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.experiment.run import Run
from robo_rl.experiment.sft import demo_folder
from robo_rl.plugins import check_call, is_object, load_object
from robo_rl.rollout_control import StartControl, Uniform
from robo_rl.rollout_control.reverse import Reverse, demo_states
from robo_rl.rollout_control.tasks import TaskSampler
from robo_rl.stats import wilson
from robo_rl.types import task_names

WHAT = "--starts"
LEFT = 0.02  # lower bound of success below which supervision left nothing
STRIDE = 4  # control steps between stored states of a demonstration
REPLAY_ROUND = 4  # decisions between tables of the methods of replay
BESIDE = 0.5  # weight of the supervised loss beside RL while there is no success


def find_sampler(name: str) -> Callable:
    """`make(seed, tasks)` -> a sampler, of a name `module:function`: of robo_rl.rollout_control.samplers, or
    the user's own."""
    make = load_object(name, WHAT)
    check_call(make, name, WHAT, (), ("seed", "tasks"))
    return make


def check(config: TrainConfig) -> None:
    """Raise UserError for a sampler that there is not, or that a run cannot use."""
    tasks.check(config)
    if config.starts in ("auto", "uniform", "reverse"):
        return
    start_pool.check(config)
    if is_object(config.starts):
        from robo_rl.rollout_control.check import check_sampler

        try:
            check_sampler(find_sampler(config.starts), task_count(config))
        except AssertionError as e:
            raise UserError(f"{WHAT} {config.starts}: {e}") from None
    if config.backend == "ray":
        raise UserError(
            "--starts: the table of starts goes by files of this machine, not to workers of --backend ray; "
            "use --starts uniform or --backend processes"
        )


def hopeless_tasks(run: Run) -> list[int]:
    """The tasks in which the supervised policy that RL begins with has hardly any success: the lower bound of
    its first evaluation there is below `LEFT`."""
    first = run.looks[0] if run.looks and run.looks[0].step == 0 and run.knows_success else None
    return [] if first is None else [k for k, (won, n) in enumerate(first.parts) if wilson(won, n).low < LEFT]


def make_control(run: Run, saved: "dict | None") -> "StartControl | None":
    """The control of the run's starts, as it was where `saved`, its state in a checkpoint, is given; None:
    the env draws them."""
    config, names = run.config, task_names(run.env)
    control = starts_control(run)
    if len(names) > 1 and config.backend != "ray":
        sampler = TaskSampler(
            names, tasks.make_arms(config, len(names)), control.sampler if control is not None else Uniform()
        )
        control = StartControl(sampler, config.seed, None if control is None else control.stored)
    if control is None and (allocates(config) or getattr(config.rl, "recycle", 0)):
        control = StartControl(Uniform(), config.seed)
    if saved and control is not None:
        control.load_state_dict(saved)
    return control


def starts_control(run: Run) -> "StartControl | None":
    """The control that --starts asks for, as new; None: every start alike."""
    config = run.config
    if config.starts == "uniform" or config.starts == "auto" and not hopeless_tasks(run):
        return None
    if config.starts in ("auto", "reverse"):
        return reverse_control(run)
    if config.starts in POOL_STARTS:
        return StartControl(start_pool.make_sampler(config), config.seed)
    return StartControl(
        find_sampler(config.starts)(seed=config.seed, tasks=len(task_names(run.env))), config.seed
    )


def reverse_control(run: Run) -> "StartControl | None":
    """The reverse curriculum along the run's demonstrations, said in a line; None, with the reason, where
    they cannot be played again."""
    from robo_rl.demos import load_demos

    config, folder = run.config, demo_folder(run)
    why = obstacle(run, folder)
    states, kept, names = None, 0, task_names(run.env)
    which = hopeless_tasks(run) or list(range(len(names)))
    if not why and folder is not None:
        data = load_demos(folder, run.env)
        env = make_env(config, min(len(data), config.envs, 32))
        states, kept = demo_states(env, data, STRIDE, which)
        env.close()
        why = "" if states else "none of its demonstrations succeeds again from the start it names"
    where = f" in {', '.join(names[k] for k in which)}" if len(names) > 1 else ""
    first = (
        "--starts reverse"
        if config.starts == "reverse"
        else f"supervision left {left_by(run, which):.3f} success to learn from{where}"
    )
    remedy = "more demonstrations (--demos 100), longer supervision (--bc.updates 5000)"
    remedy += "" if config.reward == "dense" else " or --reward dense"
    if why or states is None:
        run.report.say(
            f"{first}, and rollouts cannot begin along demonstrations: {why}. What helps: {remedy}", "warning"
        )
        return None
    run.report.say(
        f"{first}: rollouts begin in {len(states.left)} states along {kept} demonstrations, nearest to "
        "success first, and in the task's own starts, more of them as they succeed; supervision stays "
        f"beside RL until then. What else helps: {remedy}"
    )
    sampler = Reverse(
        states.left,
        config.policy.execute,
        early_rounds(run),
        tuple(which) if len(names) > 1 else (),
        len(which) / len(names),
    )
    return StartControl(sampler, config.seed, states.stored)


def left_by(run: Run, which: Collection[int]) -> float:
    """The most success of the supervised policy in the tasks `which`; 0 where it was not looked at."""
    return (
        max((won / n for k, (won, n) in enumerate(run.looks[0].parts) if k in which), default=0.0)
        if run.looks
        else 0.0
    )


def early_rounds(run: Run) -> int:
    """Rounds of rollouts of envs that begin together, before an episode can have run into its time limit:
    successes end first."""
    config = run.config
    # of every env in a round
    steps = config.policy.execute * max(1, getattr(config.rl, "decisions", REPLAY_ROUND))
    return -(-run.env.spec.max_steps // steps)


def obstacle(run: Run, folder: "Path | None") -> str:
    """Why rollouts cannot begin along the demonstrations in `folder`; "": they can."""
    config = run.config
    if folder is None:
        return "there are none (--demos 0)"
    if config.sim.split(":")[0] in ROBOTS:
        return "an arm cannot be put into their states"
    if not hasattr(run.env, "get_state"):
        return f"{run.env.spec.id} has no snapshots"
    if config.backend == "ray":
        return "the table of starts goes by files of this machine, not to --backend ray"
    if getattr(config.rl, "operator", "none") != "none":
        return "an operator's attention cannot be put into the middle of an episode"
    return ""


def supervision(control: "StartControl | None") -> "float | None":
    """Share of the supervised loss to keep beside RL, where the starts' control asks for one."""
    sampler = None if control is None else getattr(control.sampler, "inner", control.sampler)
    return sampler.supervision() if isinstance(sampler, Reverse) else None
