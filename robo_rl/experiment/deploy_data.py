"""What a run without a simulator (`--sim none`) sees and commands on one arm: from its data set, the robot's
file and the options."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from controllers.bridge import AXES, PolicyInterface
from controllers.data_columns import REMEDY, action_columns, meanings, state_columns
from controllers.data_interface import DataInterface, check_command
from controllers.robot import Robot
from robo_rl.errors import UserError
from robo_rl.experiment.data_facts import DataFacts, read_facts


def words(text: str) -> tuple[str, ...]:
    return tuple(w.strip() for w in text.split(",")) if text else ()


def gripper_numbers(options) -> tuple[float, ...]:
    """(closed, open) of --gripper. UserError: it is no two numbers."""
    try:
        row = tuple(float(x) for x in words(options.gripper))
        if len(row) not in (0, 2) or len(set(row)) != len(row) or not np.isfinite(row).all():
            raise ValueError
    except ValueError:
        raise UserError(
            f"--gripper is its number closed and its number open, as 0,45, got {options.gripper!r}"
        ) from None
    return row


def stated_units(text: str, count: int, option: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(units, kinds) of `count` columns, () where nothing was stated. UserError: they do not fit."""
    if not text:
        return (), ()
    from robo_rl.data.labels import parse_units

    try:
        made = parse_units(text, count)
    except UserError as e:
        raise UserError(str(e).replace("--units", option)) from None
    return made.unit, made.kind


def data_interface(
    options,
    folder: Path,
    config,
    spec,
    robot: Robot,
    speed: tuple[float, float],
    warn: Callable[[str], None] = lambda line: None,
) -> DataInterface | PolicyInterface:
    """Of a run folder (its config, its policy's ObsSpec) on a robot. What was given as an option goes before
    what the data set says, and that before the robot's file. speed: limit of the tool [m/s], [rad/s].
    UserError: a fact is missing, or does not fit the robot."""
    facts, file = read_facts(folder, config.demos), robot.data
    if not spec.units:
        return simulators_interface(facts, config, spec)
    rate = options.rate or facts.rate or file.rate
    if options.rate and facts.rate and not 0.9 < options.rate / facts.rate < 1.1:
        warn(
            f"--rate {options.rate:g} plays what was recorded at {facts.rate:g} actions a second "
            f"{options.rate / facts.rate:.3g} times as fast"
        )
    if not rate:
        raise UserError(
            "nobody said how many actions a second the run's policy gives: state it with --rate, or in "
            f"{REMEDY}"
        )
    gripper = gripper_numbers(options) or file.gripper
    names = spec.action_names or facts.action or tuple(f"action_{k}" for k in range(spec.action))
    unit, kind = stated_units(options.units, spec.action, "--units")
    if not unit:
        unit, kind = spec.units, facts.kind
        if not kind or "as recorded" in unit:
            unit, kind = stated_units(file.units, spec.action, "units")
        if not unit:
            missing = (
                "of which unit the actions are"
                if "as recorded" in spec.units
                else "whether the actions are absolute, delta or rate"
            )
            raise UserError(
                f"nobody said {missing}: state it with --units, as 'rad*{spec.action - 1},%', or in {REMEDY}"
            )
    what = meanings(names, words(options.columns) or file.columns, robot.joints, "action", "--columns")
    action = action_columns(names, what, unit, kind, gripper, robot.joints, rate, robot.percent)
    seen = facts.state or (
        names if spec.state == spec.action else tuple(f"state_{k}" for k in range(spec.state))
    )
    stated = words(options.state_columns) or file.state_columns or (what if seen == names else ())
    if len(seen) != spec.state:
        raise UserError(f"the run's policy sees {spec.state} numbers, its data set's state has {len(seen)}")
    meant = meanings(seen, stated, robot.joints, "state", "--state-columns")
    own, _ = stated_units(options.state_units or file.state_units, spec.state, "--state-units")
    made = DataInterface(
        robot=robot,
        action=action,
        state=state_columns(seen, meant, own, action, unit, gripper, robot.percent),
        row=1 / rate,
        reach=speed,
        views=spec.views,
        image_size=spec.image_size,
        fit=fitted(spec),
        low=facts.low,
        high=facts.high,
    )
    check_command(options.command, made)
    return made


def simulators_interface(facts: DataFacts, config, spec) -> PolicyInterface:
    """Of a run whose data set an env of ours recorded: commands of -1 to 1. UserError: of no arm's, or nobody
    knows."""
    if not facts.scale:
        raise UserError(
            "the run's actions are commands of -1 to 1, and what they mean stood in its data set, which is "
            f"not at {config.demos}; put it back there"
        )
    if spec.action_names != AXES:
        raise UserError(
            f"the run's data are of {facts.sim}, whose actions ({', '.join(spec.action_names[:4])}, …) no "
            f"arm takes; it takes {', '.join(AXES)}"
        )
    return PolicyInterface(
        state_names=facts.state,
        action_names=spec.action_names,
        scale=facts.scale[:6],
        period=1 / facts.rate,
        views=spec.views,
        image_size=spec.image_size,
    )


def fitted(spec):
    """What makes a camera's picture the policy's, wherever it decides."""
    if spec.views and not spec.raw_pictures:
        import torch

        from robo_rl.policies.images import fit_bytes

        def fit(image: np.ndarray) -> np.ndarray:
            return fit_bytes(torch.from_numpy(np.array(image))[None], spec.image_size, spec.fit or "crop")[
                0
            ].numpy()

        return fit
    return np.asarray


def command_of(options, robot: Robot, task) -> str:
    """How the arm is commanded. UserError: in a way that the policy does not do."""
    if isinstance(task, DataInterface):
        command = (
            options.command
            or robot.cell.command
            or ("pose" if task.moves_tool and robot.name != "sim" else "joint")
        )
        check_command(command, task)
        return command
    return options.command or robot.cell.command or ("joint" if robot.name == "sim" else "pose")


def whole_periods(task: DataInterface, tick: float) -> DataInterface:
    """Its control period as a whole number of a simulated arm's ticks [s]."""
    return replace(task, row=task.slow * max(1, round(task.period / tick)) * tick)


def announce(task, bridge, log, warn) -> None:
    """Say what a policy of a data set commands and sees, and where the arm is unlike anything in the data.
    After `bridge.begin`. UserError: degrees and radians are confused."""
    if isinstance(task, DataInterface):
        log(task.summary())
        seen = bridge.observation()
        for line in task.strange(seen):
            warn(line)
        task.check_angles(seen)


def check_views(task) -> None:
    """UserError: the simulated arm in this process lacks a camera."""
    from sims.mujoco.env import VIEWS

    drawn = VIEWS if task.robot.name == "sim" else ()
    if lacks := [v for v in task.views if v not in drawn]:
        raise UserError(
            f"the simulated {task.robot.name} has no camera {', '.join(lacks)}"
            + (f", only {', '.join(drawn)}" if drawn else "")
            + ": run the policy where the cameras are, over DDS"
        )


def own_units(task: DataInterface) -> str:
    """Units of its actions, as `data label` takes them."""
    return ",".join(f"{c.unit} {c.kind}" for c in task.action)


def own_features(task: DataInterface, size: int):
    """Features of the data set in which a deployment is recorded, as the policy's own data."""
    from robo_rl.data.episode import Features

    return Features(
        fps=round(1 / task.row, 6),
        state=tuple(c.name for c in task.state),
        action=tuple(c.name for c in task.action),
        views=tuple((v, size, size) for v in sorted(task.views)),
        robot=task.robot.name,
    )
