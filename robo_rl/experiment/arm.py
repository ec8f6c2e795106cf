"""The arm of a run: its scene and placement, the interface that a run's policy expects, its controllers, and
the arm as an env."""

from dataclasses import replace

import numpy as np

from controllers.bridge import PolicyInterface
from controllers.data_interface import DataInterface
from controllers.law import LawOptions, gravity_compensation
from controllers.live import LiveArm
from controllers.lockstep import LockstepArm
from controllers.manager import Controller
from controllers.model import arm_model
from controllers.pace import joints_at, law_at, limits_at
from controllers.robot import Robot, load_robot
from controllers.transport import NetworkConditions
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment.robot_names import check_arms_run
from robo_rl.experiment.scenes import scene_task, scene_xml

CONTROLLERS = ("cartesian", "joint")
ACTION_SCALE = (0.036, 0.18)  # of one command [m], [rad]: one whole action of ee_delta
RATE = 30.0  # rad/s: how fast stiff joints of an arm would swing without damping
LAG = 0.075  # s by which they lag behind their targets, as those of sims/mujoco do
TRAINING_SPEED = 1.5  # m/s, what the joints of sims/mujoco can do


def policy_interface(config, spec) -> PolicyInterface:
    """Observations and actions of a run (its config, its policy's ObsSpec). UserError: no arm has them."""
    check_arms_run(config)
    if "," in config.task:
        raise UserError(
            f"the run has several tasks, an arm does one at a time: choose it with --task, of {config.task}"
        )
    task = task_interface(config.task, config.control, spec.views, spec.image_size)
    if len(task.state_names) != spec.state:
        raise UserError(f"the run's policy sees {spec.state} numbers, its task has {len(task.state_names)}")
    return task


def observed_names(name: str, views: tuple[str, ...] = (), whole: bool = False) -> tuple[str, ...]:
    """The state that a policy of a task of sims/mujoco sees; whole: all of it even beside cameras."""
    from sims.mujoco.env import PROPRIOCEPTION, state_names_of
    from sims.mujoco.own import find_task

    # cameras tell the rest
    return state_names_of(find_task(name or "pick_cube"))[: PROPRIOCEPTION if views and not whole else None]


def task_interface(
    name: str, control: str = "", views: tuple[str, ...] = (), image_size: int = 0, whole: bool = False
) -> PolicyInterface:
    """Observations and actions of a task of sims/mujoco; whole: the whole state even beside cameras."""
    from sims.mujoco import model
    from sims.mujoco.env import CONTROLS, axes_of

    axes = axes_of(control or CONTROLS[0])
    return PolicyInterface(
        state_names=observed_names(name, views, whole),
        action_names=tuple(a.name for a in axes),
        scale=tuple(a.high for a in axes[:6]),
        period=model.DT * model.SUBSTEPS,
        views=views,
        image_size=image_size,
    )


def law_options(controller: str, speed: float):
    """Options of the control law of a controller, by its name."""
    if choose("controller", controller, CONTROLLERS) == "cartesian":
        return law_at(speed)
    from sims.mujoco.model import DAMPING, STIFFNESS

    return joints_at(STIFFNESS, DAMPING)


def stiff_law(robot: Robot) -> LawOptions:
    """Joints held as stiffly as those of sims/mujoco, for any arm: k = M_ii RATE^2 and d = LAG k, at its
    home."""
    if robot.name == "sim":
        return law_options("joint", 0.25)
    model = arm_model(robot)
    model.update(np.array(robot.home), np.zeros(model.n))
    k = np.diag(model.inertia()) * RATE**2
    return joints_at(tuple(k.tolist()), tuple((LAG * k).tolist()))


def make_controllers(robot: Robot, speed: float) -> dict[str, Controller]:
    """The simulated arm's controllers by their names on the wire."""
    stiff = with_stiff_joints(robot, "joint")
    out = {
        "cartesian_impedance_controller": Controller(options=law_options("cartesian", speed), robot=robot),
        "gravity_compensation": Controller(options=gravity_compensation(), robot=robot),
    }
    if robot.model:
        out["joint_impedance_controller"] = Controller(options=stiff_law(robot), robot=stiff, servo=True)
    if robot.name == "sim":
        out["joint_trajectory_controller"] = Controller(
            options=law_options("joint", speed),
            robot=stiff,
            servo=True,
            streamed=False,
            kind="joint_trajectory_controller/JointTrajectoryController",
        )
    return out


WIRE_NAMES = {"cartesian": "cartesian_impedance_controller", "joint": "joint_impedance_controller"}


def with_stiff_joints(robot: Robot, controller: str) -> Robot:
    """The robot with the torque rate of sims/mujoco, where --controller joint makes its joints as stiff as
    there."""
    return replace(robot, torque_rate=1e5) if controller == "joint" else robot


def make_lockstep_arm(
    robot: Robot,
    task: PolicyInterface | DataInterface,
    speed: float,
    scene_name: str = "pick_cube",
    conditions: NetworkConditions | None = None,
    dry_run: bool = False,
    controller: str = "joint",
    wrap_transport=lambda wire: wire,
) -> LockstepArm:
    """The governed arm with the bridge on one in-process transport. speed: limit of the tool [m/s]."""
    joints = controller == "joint"
    law = stiff_law(robot) if joints else law_options(controller, speed)
    return LockstepArm(
        with_stiff_joints(robot, controller),
        task,
        scene_xml(robot, scene_name),
        law,
        limits_at(speed, ACTION_SCALE, **robot.cell.limits()),
        arm_model(robot),
        conditions,
        dry_run,
        joints,
        wrap_transport,
        command="joint" if joints else "pose",
    )


def full_interface(config, policy_spec) -> PolicyInterface:
    """The interface of the arm as an env: that of the run's policy, and the poses of the objects, by which
    success is judged."""
    task = policy_interface(config, policy_spec)
    return task_interface(config.task, config.control, task.views, task.image_size, whole=True)


def make_live_env(config, policy_spec, transport, speed: float, controller: str):
    """(env, body): the arm of `robo_rl sim-arm` behind a transport, in real time, as an env of the project's
    contract."""
    task = full_interface(config, policy_spec)
    return live_env(config.task, task, transport, speed, controller, config.max_steps)


def live_env(
    name: str,
    task: PolicyInterface,
    transport,
    speed: float,
    controller: str,
    max_steps: int,
    leave=lambda: None,
):
    """(env, body) of a task; `leave()` runs when the env is closed."""
    from sims.arm import ArmEnv

    made, rule = load_robot("sim"), scene_task(name or "pick_cube", "--task")
    body = LiveArm(
        made,
        task,
        transport,
        arm_model(made),
        limits_at(speed, ACTION_SCALE, **made.cell.limits()),
        command="joint" if controller == "joint" else "pose",
    )

    def end() -> None:
        body.leave()
        leave()

    return ArmEnv(rule, [body], max_steps, end, task.views, task.image_size), body


def make_arm_env(
    config,
    policy_spec,
    num_envs: int,
    speed: float = TRAINING_SPEED,
    controller: str = "joint",
    robot: str = "sim",
):
    """The governed arm as an env of the project's contract, for a run of sims/mujoco."""
    return arm_env(
        config.task, full_interface(config, policy_spec), num_envs, speed, controller, robot, config.max_steps
    )


def arm_env(
    name: str,
    task: PolicyInterface,
    num_envs: int,
    speed: float,
    controller: str,
    robot: str = "sim",
    max_steps: int = 0,
):
    """N governed arms in lockstep, one after the other."""
    from sims.arm import ArmEnv

    name = name or "pick_cube"
    rule = scene_task(name, "--task")
    if num_envs > 64:
        raise UserError(f"arms run one after the other in real physics: at most 64 envs, got {num_envs}")
    made = load_robot(robot)
    bodies = [make_lockstep_arm(made, task, speed, name, controller=controller) for _ in range(num_envs)]
    if task.views:
        from controllers.transport import LoopbackTransport
        from robo_rl.experiment.cameras import SceneCameras

        for body in bodies:
            body.make_cameras = lambda bus: SceneCameras(
                LoopbackTransport(bus, "cameras"), name, task.views, task.image_size
            )

    def leave() -> None:
        for body in bodies:
            body.close()

    return ArmEnv(rule, bodies, max_steps, leave, task.views, task.image_size)


# after the colon of --sim dds:…
ENV_OPTIONS = {"controller": "joint", "speed": str(TRAINING_SPEED), "domain": "-1", "namespace": ""}


def make_robot(
    sim: str,
    task: str,
    num_envs: int,
    *,
    obs: str = "state",
    reward: str = "",
    control: str = "",
    max_steps: int = 0,
    randomise: str = "",
    render: bool = False,
    image_size: int = 64,
    **_,
):
    """`--sim arm` and `--sim dds`, each with `:speed=0.5,controller=cartesian`, dds with `domain=` and
    `namespace=` too.

    obs rgb: pictures of both cameras; dds takes them from the wire (`robo_rl sim-arm --cameras front wrist`).
    """
    from sims.mujoco.env import VIEWS

    kind, _, words = sim.partition(":")
    allowed = ENV_OPTIONS if kind == "dds" else {k: ENV_OPTIONS[k] for k in ("controller", "speed")}
    said = dict(allowed)
    for word in filter(None, words.split(",")):
        key, _, value = word.partition("=")
        said[choose(f"--sim {kind}: option", key, tuple(allowed))] = value
    try:
        speed, domain = float(said["speed"]), int(said.get("domain", -1))
    except ValueError:
        raise UserError(f"--sim {sim}: speed is a number of m/s and domain an integer") from None
    in_range(f"--sim {kind}: speed", speed, 0, 1.5, open_low=True)
    in_range(f"--sim {kind}: domain", domain, -1, 232)
    choose(f"--sim {kind}: controller", said["controller"], CONTROLLERS)
    for option, value, fits in (
        ("--obs", obs, ("state", "rgb")),
        ("--reward", reward, ("", "sparse")),
        ("--control", control, ("", "ee_delta")),
        ("--randomise", randomise, ("",)),
    ):
        if value not in fits:
            raise UserError(
                f"--sim {kind} takes {option} {' or '.join(filter(None, fits)) or 'not at all'}, got "
                f"{value!r}"
            )
    scene_task(task or "pick_cube", "--task")
    if render and kind == "dds":
        raise UserError(
            "--sim dds is an arm that does not wait for pictures: film it with robo_rl deploy --video"
        )
    if render:
        from sims.mujoco.gl import NO_GL, gl_backend

        if gl_backend() is None:
            raise UserError(NO_GL)
    made = task_interface(task, control, VIEWS if obs == "rgb" else (), image_size, whole=True)
    if kind == "arm":
        return arm_env(task, made, num_envs, speed, said["controller"], max_steps=max_steps)
    if num_envs != 1:
        raise UserError(f"--sim dds is one arm: --envs 1, got {num_envs}")
    from robo_rl.experiment.wire import connect

    wire = connect("robo_rl_env", domain, namespace=said["namespace"])
    try:
        env, body = live_env(
            task, made, wire, speed, said["controller"], max_steps=max_steps, leave=wire.close
        )
        body.take()
        body.leave()
        return env
    except UserError as e:
        wire.close()
        scene = f" --scene {task}" if task not in ("", "pick_cube") else ""
        cameras = f" --cameras {' '.join(VIEWS)} --image-size {image_size}" if obs == "rgb" else ""
        raise UserError(
            f"--sim {sim} finds no arm that is free ({e}): start one with robo_rl sim-arm --speed "
            f"{speed:g}{scene}{cameras}, or wait until nobody drives it"
        ) from None
