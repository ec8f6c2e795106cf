"""The embedded simulator as a vector env: `mujoco.batch.Batch` steps the physics, NumPy does the rest.

One control step: actions -> targets (integrated, so that gravity and contact do not let them drift) -> joint
commands -> `Batch.step` over the envs still running -> observation, success and reward of the whole batch at
once. What is many small operations per env is compiled (`sims.mujoco.kernel`).
Envs that are over are not stepped, so they stay as they are.
"""

import time
from collections.abc import Callable
from functools import partial

import mujoco
import numpy as np
from gymnasium.vector import AutoresetMode
from mujoco.batch import Batch

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError, choose
from robo_rl.starts import StartStream, uniforms
from robo_rl.types import ActionAxis, ControlSpec
from sims.mujoco import kernel
from sims.mujoco import model as m
from sims.mujoco.experts import back_out, expert_of
from sims.mujoco.kinematics import Arm, contract, damped_step, turn
from sims.mujoco.model import JOINT, MOVE, TURN
from sims.mujoco.names import CONTROLS, VIEWS
from sims.mujoco.pictures import Pictures
from sims.mujoco.randomise import randomise_model
from sims.mujoco.tasks import TASKS, Scene, Start, Task

F = np.float32
HOME = np.array(m.HOME)
PROPRIOCEPTION = 30  # the first entries of the state: joints, commands, gripper, hand pose
RENDER_SIZE = 256  # pixels of `render()`, unless `env.render_size` says otherwise


def build_model(task: Task) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(m.scene_xml(task.xml, task.assets))


def axes_of(control: str) -> tuple[ActionAxis, ...]:
    """What the action's dimensions mean."""
    grip = ActionAxis("gripper", "m", 0.0, 2 * m.FINGER_OPEN, "absolute")
    if control == "joint_delta":
        return (
            *(ActionAxis(f"joint{i + 1}", "rad", -JOINT, JOINT, "delta", "joint") for i in range(7)),
            grip,
        )
    moves = tuple(ActionAxis(n, "m", -MOVE, MOVE, "delta", "base") for n in ("dx", "dy", "dz"))
    turns = tuple(ActionAxis(n, "rad", -TURN, TURN, "delta", "base") for n in ("rx", "ry", "rz"))
    return (*moves, *turns, grip)


def joint_actions(hand: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
    """Actions [N, 8] of the joints and the gripper that move the hand as its actions [N, 7] say."""
    twist = hand[:, :6].T * np.array([[MOVE]] * 3 + [[TURN]] * 3, F)
    joints = damped_step(jacobian, twist) / F(JOINT)
    return np.ascontiguousarray(np.concatenate([joints, hand[:, 6:].T]).T).clip(-1, 1)


def acted(env: "MujocoArmEnv", expert: Callable) -> np.ndarray:
    """Actions [N, A] in the env's own control of an expert, who moves the hand."""
    hand = expert(env)
    return hand if env.control == "ee_delta" else joint_actions(hand, env.arm.jacobian())


def put_objects(qpos: np.ndarray, ids: np.ndarray, addresses: np.ndarray, place: Start) -> None:
    """Write the positions and attitudes of a task's objects into the joint positions [N, nq] of the envs
    `ids`."""
    for k, a in enumerate(addresses):
        qpos[ids, a : a + 3] = place.centre[:, k]
        half = place.yaw[:, k] / 2
        qpos[ids, a + 3 : a + 7] = np.stack([np.cos(half), 0 * half, 0 * half, np.sin(half)], 1)


def scene_of(task: Task, model: mujoco.MjModel, q: np.ndarray, v: np.ndarray, arm: Arm) -> Scene:
    """The scene as views of the joint positions [nq, N] and velocities [nv, N] and of the arm."""
    n, joints = q.shape[1], [model.joint(o) for o in task.objects]
    at, moving = [int(j.qposadr[0]) for j in joints], [int(j.dofadr[0]) for j in joints]
    slide = q[-1] if task.uses_slide else np.zeros(n, F)
    return Scene(
        q[:7],
        v[:7],
        np.zeros(n, F),
        arm.tcp,
        arm.frame,
        [q[a : a + 3] for a in at],
        [q[a + 3 : a + 7] for a in at],
        [v[a : a + 3] for a in moving],
        np.zeros((3, n), F),
        slide,
        np.zeros(n, np.int64),
        [q[int(model.joint(j).qposadr[0])] for j in task.joints],
    )


def write_own_rows(task: Task, scene: Scene, rows: np.ndarray) -> None:
    """The last of the observation rows [S, N]: the task's joints, and what it observes itself."""
    first = len(rows) - len(task.joints) - len(task.observed)
    for k, position in enumerate(scene.joints):
        rows[first + k] = position
    if task.observe is not None:
        rows[first + len(scene.joints) :] = task.observe(scene)


def state_names_of(task: Task) -> tuple[str, ...]:
    names = [f"joint{i}" for i in range(1, 8)] + [f"joint{i}_velocity" for i in range(1, 8)]
    names += [f"joint{i}_command_error" for i in range(1, 8)] + ["gripper", "gripper_command"]
    names += ["ee_x", "ee_y", "ee_z", "ee_axis_x", "ee_axis_y", "ee_tilt_x", "ee_tilt_y"]
    for o in task.objects:
        names += [f"{o}_dx", f"{o}_dy", f"{o}_dz", f"{o}_z", f"{o}_cos4yaw", f"{o}_sin4yaw"]
    if task.uses_goal:
        names += ["goal_dx", "goal_dy", "goal_dz"]
    if task.uses_slide:
        names += ["drawer"]
    return (*names, *task.joints, *task.observed)


class MujocoArmEnv(ControlEnv):
    """N arms doing one task; see `sims` for the contract and `sims.mujoco.make_mujoco` for the arguments."""

    def __init__(
        self,
        task: Task,
        num_envs: int,
        rgb: bool,
        dense: bool,
        control: str,
        image_size: int,
        threads: int,
        max_steps: int,
        kinds: frozenset[str],
        latency: int,
        render: bool,
        views: tuple[str, ...] = VIEWS,
    ):
        n = self.num_envs = num_envs
        self.task, self.control, self.dense, self.rgb = task, control, dense, rgb
        self.kinds, self.latency, self.image_size = kinds, latency, image_size
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array" if render else None
        self.render_size = RENDER_SIZE
        self.model = build_model(task)
        self.batch = Batch(self.model, n, threads, persistent=False)
        # where the objects are is for the cameras to tell
        names = state_names_of(task)[: PROPRIOCEPTION if rgb else None]
        self.spec = ControlSpec(
            "mujoco",
            task.name,
            axes_of(control),
            m.DT * m.SUBSTEPS,
            max_steps or task.max_steps,
            names,
            views if rgb else (),
        )
        self.single_observation_space, self.observation_space = observation_spaces(
            len(names), n, self.spec.views, image_size
        )
        self.single_action_space, self.action_space = action_spaces(len(self.spec.axes), n)
        self.words = np.array(task.instructions)

        # the physics state, [N, ...] views of the batch
        b = self.batch
        b.reset(stage=0)
        self._blank = b.state[0].copy()
        self._qpos, self._qvel, self._ctrl = b.bind("qpos"), b.bind("qvel"), b.bind("ctrl")
        self._mocap_pos = b.bind("mocap_pos") if self.model.nmocap else np.zeros((n, 0, 3))
        self._adr = np.array([int(self.model.joint(o).qposadr[0]) for o in task.objects], np.int64)
        movable = task.objects + (("drawer",) if task.uses_slide else ())
        self._bodies = np.array([self.model.body(o).id for o in movable], np.int64)

        # what an episode has beyond the physics, one row (or column, batch last) per env
        self.stream = StartStream(n)
        self.starts = np.zeros(n, np.int64)
        self.steps = np.zeros(n, np.int64)
        self.ready = np.zeros(n, bool)
        self._begun = False  # all are ready
        self._none = np.zeros(n, bool)
        self.terminated, self.truncated, self.success = (np.zeros(n, bool) for _ in range(3))
        self.joints = np.zeros((7, n), F)  # joint targets
        self.target = np.zeros((3, n), F)  # hand target, position
        self.attitude = np.zeros((3, 5, n), F)  # and frame
        self.grip = np.ones(n, F)  # gripper command
        self.queue = np.zeros((latency, n, len(self.spec.axes)), F)  # commands on their way, oldest first

        # the scene: float32 buffers that every step refills
        self._q = np.zeros((self.model.nq, n), F)
        self._v = np.zeros((self.model.nv, n), F)
        self.arm = Arm(n)
        self._spin = np.zeros((7, n), np.complex64)  # exp(i q) of the joints
        self.scene = scene_of(task, self.model, self._q, self._v, self.arm)
        self.progress = np.zeros(n, F)
        self._rows = np.zeros((len(state_names_of(task)), n), F)
        self._seen = len(names)
        self.images = True  # False: steps leave the images as they are, until a step with True
        self._ahead = self._rows[14:21]  # joint targets less joints
        self._pictures = Pictures(self.batch, self.model, views, image_size)

    def __repr__(self) -> str:
        return f"MujocoArmEnv({self.task.name!r}, num_envs={self.num_envs}, control={self.control!r})"

    # ------------------------------------------------------------ the contract

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs, self.ready)
        ids, starts = self.stream.due(seed, mask, starts)
        if len(ids):
            self._begin(ids, starts)
        self._observe()
        self.target[:, ids], self.attitude[:, :, ids] = self.scene.tcp[:, ids], self.scene.frame[:, :, ids]
        if self.rgb:
            self._pictures.draw(mask, self.images)
        return self._obs(), {"success": self.success.copy()}

    def step(self, actions):
        if not self._begun:
            self._begun = bool(self.ready.all())
            if not self._begun:
                raise UserError("call reset() before step()")
        actions = read_actions(actions, self.num_envs, len(self.spec.axes))
        over = self.terminated | self.truncated
        some_over = np.count_nonzero(over)
        if self.latency:
            alive, oldest = ~over, self.queue[0].copy()
            self.queue[:-1, alive] = self.queue[1:, alive]
            self.queue[-1, alive] = actions[alive]
            actions = oldest
        self._command(actions, over)
        if some_over:
            self.batch.step(~over, nstep=m.SUBSTEPS)
        else:  # without a mask the batch makes no list of ids
            self.batch.step(nstep=m.SUBSTEPS)
        before = self.progress
        self._observe()
        won = self.task.success(self.scene)
        lost = self._none if self.task.failure is None else self.task.failure(self.scene)
        reward = np.empty(self.num_envs, F)
        kernel.settle(
            won,
            lost,
            over,
            self.steps,
            self.spec.max_steps,
            self.success,
            self.terminated,
            self.truncated,
            reward,
        )
        if self.dense:
            reward += (self.progress - before) * ~over
        if self.rgb:
            self._pictures.draw(~over, self.images)
        return (
            self._obs(),
            reward,
            self.terminated.copy(),
            self.truncated.copy(),
            {"success": self.success.copy()},
        )

    def _state_rows(self) -> dict[str, np.ndarray]:
        """Everything an episode depends on, one row per env; views."""
        return {
            "physics": self.batch.state,
            "starts": self.starts,
            "seeds": self.stream.seeds,
            "episodes": self.stream.episodes,
            "steps": self.steps,
            "asked": self.scene.asked,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "success": self.success,
            "joints": self.joints.T,
            "target": self.target.T,
            "grip": self.grip,
            "attitude": self.attitude.transpose(2, 0, 1),
            "queue": self.queue.swapaxes(0, 1),
        }

    def get_state(self) -> dict[str, np.ndarray]:
        """Copies of all rows."""
        return {k: v.copy() for k, v in self._state_rows().items()}

    def set_state(self, state: dict[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        """Put back rows of `get_state()` (of this or another env of the same task), only those of `mask`."""
        n = self.num_envs
        rows = self._state_rows()
        missing = [k for k in rows if k not in state]
        if missing:
            raise UserError(f"set_state needs {missing[0]!r}: pass what get_state() returned")
        mask = np.ones(n, bool) if mask is None else np.asarray(mask)
        if mask.shape != (n,) or mask.dtype != bool:
            raise UserError(f"mask must be bool of shape ({n},), got {mask.dtype} of shape {mask.shape}")
        for name, row in rows.items():
            new = np.asarray(state[name])
            if new.shape != row.shape:
                raise UserError(f"set_state: {name!r} must have shape {row.shape}, got {new.shape}")
            row[mask] = new[mask]
        self.ready |= mask
        self._randomise(np.flatnonzero(mask))
        self._observe()
        if self.rgb:
            self._pictures.draw(mask, self.images)

    @property
    def expert_action(self) -> Callable[[], np.ndarray]:
        """() -> float32 [N, A]: what the scripted expert does in the present states. AttributeError: the task
        has none."""
        return partial(acted, self, expert_of(self.task))

    @property
    def recovery_action(self) -> Callable[[], np.ndarray]:
        """() -> float32 [N, A]: how to leave a failed attempt, towards a state from which the next may
        begin."""
        expert_of(self.task)  # who closes the fingers meanwhile
        return partial(acted, self, back_out)

    def subtask(self) -> np.ndarray:
        """int64 [N]: how many of the task's sub-tasks are done."""
        return self.task.stage(self.scene).astype(np.int64)

    def render(self):
        """uint8 [N, h, h, 3], h = render_size, from the front camera; needs render=True."""
        if self.render_mode is None:
            raise UserError("render() needs an env made with render=True")
        return self.film(("front",), self.render_size)["front"]

    def studio(self, ids=None) -> np.ndarray:
        """uint8 [n, 480, 640, 3] of the envs `ids` (default: all): the whole workspace with light and shadow,
        for people."""
        return self._pictures.studio(ids)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Views that `film` takes."""
        return VIEWS

    def film(self, views, size: int, ids=None) -> dict[str, np.ndarray]:
        """uint8 [n, size, size, 3] per view of the envs `ids` (default: all), for people who watch."""
        if not self.ready.all():
            raise UserError("call reset() before a picture is drawn")
        return self._pictures.renderer(tuple(views), size).render(ids)

    def tool(self, i: int) -> np.ndarray:
        """[3] [m]: where the hand of env i is, in the base frame."""
        return self.scene.tcp[:, i].astype(np.float64)

    def project(self, view: str, i: int, points: np.ndarray) -> np.ndarray:
        """[K, 2]: where `points` [K, 3] [m] lie in the picture of `view` of env i, 0 .. 1 from its top left
        corner."""
        from sims.mujoco.render import project

        return project(self.model, self.batch, choose("view", view, VIEWS), i, points)

    def hand_target(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the hand is being sent: position [3, N] and frame [3, 5, N] (with joint control: where it
        is)."""
        if self.control == "ee_delta":
            return self.target, self.attitude
        ahead = contract("ikn,kn->in", self.arm.jacobian(), self._ahead)
        w = np.concatenate([ahead[3:], ahead[3:5]])
        return self.scene.tcp + ahead[:3], turn(self.scene.frame, w)

    # ------------------------------------------------------------ one step's parts

    def _command(self, actions: np.ndarray, over: np.ndarray) -> None:
        """Move the targets by actions [N, A] and write the actuators; envs that are `over` keep theirs."""
        s, n, by_hand = self.scene, self.num_envs, self.control == "ee_delta"
        joints, grip = np.empty((7, n), F), np.empty(n, F)
        target, attitude = (
            (np.empty((3, n), F), np.empty((3, 5, n), F)) if by_hand else (self.target, self.attitude)
        )
        kernel.command(
            actions,
            over,
            by_hand,
            self._q,
            s.tcp,
            s.frame,
            self.arm.axes,
            self.arm.anchors,
            self._rows,
            self.joints,
            self.grip,
            self.target,
            self.attitude,
            self._ctrl,
            joints,
            grip,
            target,
            attitude,
        )
        self.joints, self.grip, self.target, self.attitude = joints, grip, target, attitude

    def _observe(self) -> None:
        """Refill the scene, the observation rows and the progress from the physics state."""
        s, arm = self.scene, self.arm
        np.copyto(self._q, self._qpos.T, casting="same_kind")
        np.cos(s.q, out=self._spin.real)
        np.sin(s.q, out=self._spin.imag)
        kernel.observe(
            self._qvel,
            self._mocap_pos,
            self._q,
            self._v,
            s.goal,
            s.opening,
            self._spin,
            arm.axes,
            arm.anchors,
            s.frame,
            s.tcp,
            self._rows,
            self.joints,
            self.grip,
            self._adr,
            self.task.uses_goal,
            self.task.uses_slide,
        )
        write_own_rows(self.task, s, self._rows)
        if self.dense:
            self.progress = self.task.progress(s)

    def _obs(self) -> dict[str, np.ndarray]:
        out = {"state": self._rows[: self._seen].T.copy(), "task": self.words[self.scene.asked]}
        for view in self.spec.views:
            out[f"image/{view}"] = self._pictures.images[view].copy()
        return out

    def _begin(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Begin the episodes of `starts` in the envs `ids`."""
        u = uniforms(starts, 31)
        place = self.task.place(u[:, 7:])
        joints = HOME + self.task.jitter * (2 * u[:, :7] - 1)
        self.batch.state[ids] = self._blank
        self._qpos[ids, :7] = joints
        self._qpos[ids, 7:9] = m.FINGER_OPEN
        self._ctrl[ids, :7] = joints
        self._ctrl[ids, 7:] = m.FINGER_OPEN
        put_objects(self._qpos, ids, self._adr, place)
        if self.model.nmocap:
            self._mocap_pos[ids, 0] = place.goal
        self.scene.asked[ids] = place.asked
        self.starts[ids], self.steps[ids] = starts, 0
        self.terminated[ids] = self.truncated[ids] = self.success[ids] = False
        self.ready[ids] = True
        self.joints[:, ids] = joints.T
        self.grip[ids] = 1
        self.queue[:, ids] = 0
        self.queue[:, ids, -1] = 1
        self._randomise(ids)

    def _randomise(self, ids: np.ndarray) -> None:
        """The model of `ids` is that of their starts."""
        if self.kinds and len(ids):
            randomise_model(self.batch, self.model, self._bodies, self.kinds, ids, self.starts[ids])

    def close_extras(self, **kwargs):
        self._pictures.close()


def rates(
    task: str, num_envs: int, threads: int = 0, seconds: float = 1.0, control: str = CONTROLS[0]
) -> dict:
    """Control steps/s with random actions: `env` (this env, resets included) and `raw` (`Batch` alone).

    Raw replays the env's joint commands from the same states, so both do the same physics and their ratio is
    the cost of the Python around it. The two take turns every few steps and each step counts with its fastest
    pass, so that other load on the machine weighs little.
    """
    env = MujocoArmEnv(
        TASKS[choose("task", task, TASKS)],
        num_envs,
        False,
        False,
        choose("control", control, CONTROLS),
        64,
        threads,
        0,
        frozenset(),
        0,
        False,
    )
    bare = Batch(env.model, num_envs, threads, persistent=False)
    ctrl = bare.bind("ctrl")
    horizon, turn_of = env.spec.max_steps - 1, 7
    actions = np.random.default_rng(0).uniform(-1, 1, (horizon, *env.action_space.shape)).astype(F)
    env.reset(options={"starts": np.arange(num_envs)})
    begin, commands = env.get_state(), []
    for a in actions:
        env.step(a)
        commands.append(env._ctrl.copy())
    best = {"env": np.full(horizon + 1, np.inf), "raw": np.full(horizon + 1, np.inf)}

    def timed(name: str, k: int, call) -> None:
        began = time.perf_counter()
        call()
        best[name][k] = min(best[name][k], time.perf_counter() - began)

    def raw_step(command: np.ndarray) -> None:
        ctrl[:] = command
        bare.step(nstep=m.SUBSTEPS)

    until = time.perf_counter() + 2 * seconds
    while time.perf_counter() < until or not np.isfinite(best["env"]).all():
        bare.state[:] = begin["physics"]
        timed("env", horizon, lambda: env.reset(options={"starts": np.arange(num_envs)}))
        for first in range(0, horizon, turn_of):
            span = range(first, min(first + turn_of, horizon))
            for k in span:
                timed("env", k, lambda k=k: env.step(actions[k]))
            for k in span:
                timed("raw", k, lambda k=k: raw_step(commands[k]))
    return {name: horizon * num_envs / t[np.isfinite(t)].sum() for name, t in best.items()}
