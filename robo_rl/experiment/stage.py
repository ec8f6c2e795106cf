"""What the actor of a run that learns from replay acts in: the env, the person beside it, the judge, the
keeper of episodes with help."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from robo_rl.experiment.config import TrainConfig, by_person, on_the_wire, replay_options
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.robot_names import twin
from robo_rl.human.intervention import InterventionEnv

PORT = "--rl.operator-port"
TIME_LIMITS = 40  # times the task's own limit that an episode may last in which a person helps


def check_operator(config: TrainConfig, env) -> None:
    """UserError: there is no such operator, or this env cannot be helped by it."""
    from robo_rl.experiment.operators import check_person, open_person

    o = replay_options(config)
    kind = check_person("--rl.operator", o.operator, ("none", "scripted"))
    if kind == "scripted":
        from robo_rl.human.operators import ScriptedOperator

        ScriptedOperator(env, o.scripted_operator)
    elif kind == "console":
        from robo_rl.experiment.console import check_port, need_websockets

        need_websockets()
        check_port("127.0.0.1", o.operator_port, PORT)
    elif kind != "none":
        open_person(o.operator, env.spec).close()


def judge_of(config: TrainConfig, folder: Path, lanes: int):
    """The success classifier of a run, once it is trained; None: the env says what a success is."""
    from safetensors.torch import load

    from robo_rl.rewards import Judge, SuccessClassifier

    if replay_options(config).judge == "env":
        return None
    weights = load((folder / "judge.safetensors").read_bytes())
    model = SuccessClassifier(weights["net.0.weight"].shape[1])
    model.load_state_dict(weights)
    return Judge(model.eval(), lanes)


def stage(config: TrainConfig, folder: Path, env=None, judged: bool = True):
    """What the actor acts in: `env` or one of its own, with the operator beside it if asked, the judge, the
    keeper of episodes with help.

    judged False: without the judge, before there is one.
    """
    from robo_rl.data.writer import Writer
    from robo_rl.runtime.actor import Stage

    o, own, limit = replay_options(config), env is None, 0
    if by_person(config):
        env, own, limit = person_env(config, env)
    elif env is None:
        env = make_env(config, config.envs)
    judge = judge_of(config, folder, env.num_envs) if judged else None
    if o.operator == "none":
        return Stage(env, judge, None, env.close if own else lambda: None)
    made, leave = with_operator(config, env, limit)
    writer = Writer(folder / "corrections", spec=replace(made.spec, max_steps=limit or made.spec.max_steps))

    def keep(episode) -> None:
        """Durable in corrections/ at once."""
        writer.add(episode)
        writer.flush()

    def close() -> None:
        writer.close()
        leave()
        if own:
            made.close()

    return Stage(made, judge, keep, close, len(writer))


def renewed(config: TrainConfig, folder: Path, old):
    """The stage `old` with an env that is made anew; who helps, and the keeper of episodes, stay."""
    env = person_env(config)[0] if by_person(config) else make_env(config, config.envs)
    if isinstance(old.env, InterventionEnv):
        old.env.renew(env)
        env = old.env
    return replace(old, env=env, judge=judge_of(config, folder, env.num_envs))


def person_env(config: TrainConfig, env=None) -> tuple[Any, bool, int]:
    """(an env that a person has time in, whether it is not `env`, control steps of an episode that nobody
    attends).

    An arm on the wire has one commander: `env` stays where it is one, with its own limit.
    """
    if env is not None and on_the_wire(config):
        return env, False, 0
    probe = make_env(replace(config, sim=twin(config.sim)), 1)
    limit = probe.spec.max_steps
    probe.close()
    render = replay_options(config).operator == "console" and config.obs != "rgb"  # the page needs pictures
    return make_env(replace(config, max_steps=TIME_LIMITS * limit), config.envs, render=render), True, limit


def with_operator(config: TrainConfig, env, limit: int = 0):
    """(`env` with the operator of the run beside it, a function that ends their device or page). limit: see
    `InterventionEnv`."""
    o = replay_options(config)
    if o.operator == "scripted":
        from robo_rl.human.operators import ScriptedOperator

        return InterventionEnv(env, ScriptedOperator(env, o.scripted_operator, config.seed + 2)), lambda: None
    if o.operator == "console":
        return with_console(config, env, limit)
    from robo_rl.experiment.operators import device_operator
    from robo_rl.human.leader_arm import tool_of
    from robo_rl.human.pace import Pace

    pace = Pace(env.spec.period / o.operator_speed if o.operator_speed else 0.0)
    operator = device_operator(o.operator, env.spec, env.num_envs, pace=pace)
    made = InterventionEnv(env, operator, limit=limit)
    operator.tool = lambda: tool_of(made.observation["state"][0], env.spec.state_names)
    return made, lambda: operator.device.close()


def with_console(config: TrainConfig, env, limit: int = 0):
    """`with_operator` of people at the console's page, whose address is printed."""
    import functools

    from robo_rl.experiment.console import open_page, renew_by_signal
    from robo_rl.human.console.options import ConsoleOptions
    from robo_rl.human.console.training import TrainingConsole

    o = replay_options(config)
    options = ConsoleOptions(
        run="", robots=env.num_envs, port=o.operator_port, speed=o.operator_speed or 10.0
    )
    console = TrainingConsole(replace(env.spec, max_steps=limit or env.spec.max_steps), env.num_envs, options)
    made = InterventionEnv(env, console, limit=limit)
    console.watch(made)
    say = functools.partial(print, flush=True)
    server = open_page(console, options, say, PORT)
    renew_by_signal(server, say)
    return made, server.stop
