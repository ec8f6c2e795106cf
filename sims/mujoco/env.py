"""The embedded simulator as a vector env: `mujoco.batch.Batch` steps the physics, NumPy does the rest.

One control step: actions -> targets (integrated, so that gravity and contact do not let them drift) -> joint
commands -> `Batch.step` over the envs still running -> observation, success and reward of the whole batch at once.
What is many small operations per env is compiled (`sims.mujoco.kernel`).
Envs that are over are not stepped, so they stay as they are.
"""

import time

import mujoco
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from mujoco.batch import Batch

from robo_rl.contract import action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError, choose
from robo_rl.starts import StartStream, uniforms
from robo_rl.types import ActionAxis, ControlSpec
from sims.mujoco import kernel
from sims.mujoco import model as m
from sims.mujoco.experts import EXPERTS, back_out
from sims.mujoco.kinematics import Arm, contract, damped_step, turn
from sims.mujoco.model import JOINT, MOVE, TURN
from sims.mujoco.names import CONTROLS
from sims.mujoco.tasks import TASKS, Scene, Task

F = np.float32
VIEWS = ("front", "wrist")
JITTER = 0.08  # start: joints within +- this of HOME [rad]
HOME = np.array(m.HOME)
PROPRIOCEPTION = 30  # the first entries of the state: joints, commands, gripper, hand pose
SPREAD = 0.3  # randomised masses and frictions lie within +- this share of their own
CAMERA_SHIFT = np.array([0.03, 0.005])  # randomised camera positions: +- this, by camera (front, wrist) [m]
CAMERA_TURN = 0.06  # and attitude: +- about this [rad]
RENDER_SIZE = 256  # pixels of `render()`, unless `env.render_size` says otherwise


def build_model(task: Task) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(m.scene_xml(task.xml))


def axes_of(control: str) -> tuple[ActionAxis, ...]:
    """What the action's dimensions mean."""
    grip = ActionAxis("gripper", "m", 0.0, 2 * m.FINGER_OPEN, "absolute")
    if control == "joint_delta":
        return (*(ActionAxis(f"joint{i + 1}", "rad", -JOINT, JOINT, "delta", "joint") for i in range(7)), grip)
    moves = tuple(ActionAxis(n, "m", -MOVE, MOVE, "delta", "base") for n in ("dx", "dy", "dz"))
    turns = tuple(ActionAxis(n, "rad", -TURN, TURN, "delta", "base") for n in ("rx", "ry", "rz"))
    return (*moves, *turns, grip)


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
    return tuple(names)


class MujocoArmEnv(VectorEnv):
    """N arms doing one task; see `sims` for the contract and `sims.mujoco.make_mujoco` for the arguments."""

    def __init__(self, task: Task, num_envs: int, rgb: bool, dense: bool, control: str, image_size: int,
                 threads: int, max_steps: int, kinds: frozenset[str], latency: int, render: bool):
        n = self.num_envs = num_envs
        self.task, self.control, self.dense, self.rgb = task, control, dense, rgb
        self.kinds, self.latency, self.image_size = kinds, latency, image_size
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array" if render else None
        self.render_size = RENDER_SIZE
        self.model = build_model(task)
        self.batch = Batch(self.model, n, threads, persistent=False)
        names = state_names_of(task)
        if rgb:  # where the objects are is for the cameras to tell
            names = names[:PROPRIOCEPTION]
        self.spec = ControlSpec("mujoco", task.name, axes_of(control), m.DT * m.SUBSTEPS, max_steps or task.max_steps,
                                names, VIEWS if rgb else ())
        self.single_observation_space, self.observation_space = observation_spaces(
            len(names), n, self.spec.views, image_size)
        self.single_action_space, self.action_space = action_spaces(len(self.spec.axes), n)
        self.words = np.array(task.instructions)

        # the physics state, [N, ...] views of the batch
        b = self.batch
        b.reset(stage=0)
        self._blank = b.state[0].copy()
        self._qpos, self._qvel, self._ctrl = b.bind("qpos"), b.bind("qvel"), b.bind("ctrl")
        self._mocap_pos = b.bind("mocap_pos") if self.model.nmocap else np.zeros((n, 0, 3))
        self._mocap = self._mocap_pos if self.model.nmocap else None
        adr = [int(self.model.joint(o).qposadr[0]) for o in task.objects]
        vadr = [int(self.model.joint(o).dofadr[0]) for o in task.objects]
        self._adr = np.array(adr, np.int64)
        movable = task.objects + (("drawer",) if task.uses_slide else ())
        self._bodies = np.array([self.model.body(o).id for o in movable], np.int64)

        # what an episode has beyond the physics, one row (or column, batch last) per env
        self.stream = StartStream(n)
        self.starts = np.zeros(n, np.int64)
        self.steps = np.zeros(n, np.int64)
        self.ready = np.zeros(n, bool)
        self._begun = False  # all are ready
        self._none = np.zeros(n, bool)
        self.terminated, self.truncated = np.zeros(n, bool), np.zeros(n, bool)
        self.success = np.zeros(n, bool)
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
        goal = np.zeros((3, n), F)
        slide = self._q[-1] if task.uses_slide else np.zeros(n, F)
        self.scene = Scene(self._q[:7], self._v[:7], np.zeros(n, F), self.arm.tcp, self.arm.frame,
                           [self._q[a:a + 3] for a in adr], [self._q[a + 3:a + 7] for a in adr],
                           [self._v[a:a + 3] for a in vadr], goal, slide, np.zeros(n, np.int64))
        self.progress = np.zeros(n, F)
        self._rows = np.zeros((len(state_names_of(task)), n), F)
        self._seen = len(names)
        self.images = True  # False: steps leave the images as they are, until a step with True
        self._stale = np.zeros(n, bool)
        self._ahead = self._rows[14:21]  # joint targets less joints
        self._images: dict[str, np.ndarray] | None = None
        self._renderers: dict[tuple, object] = {}

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
        self._draw(mask)
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
        kernel.settle(won, lost, over, self.steps, self.spec.max_steps, self.success, self.terminated, self.truncated, reward)
        if self.dense:
            reward += (self.progress - before) * ~over
        if self.rgb:
            self._draw(~over)
        return (self._obs(), reward, self.terminated.copy(), self.truncated.copy(), {"success": self.success.copy()})

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything an episode depends on, one row per env; copies."""
        return {
            "physics": self.batch.state.copy(), "starts": self.starts.copy(), "seeds": self.stream.seeds.copy(),
            "episodes": self.stream.episodes.copy(), "steps": self.steps.copy(), "asked": self.scene.asked.copy(),
            "terminated": self.terminated.copy(), "truncated": self.truncated.copy(), "success": self.success.copy(),
            "joints": self.joints.T.copy(), "target": self.target.T.copy(), "grip": self.grip.copy(),
            "attitude": self.attitude.transpose(2, 0, 1).copy(), "queue": self.queue.swapaxes(0, 1).copy()}

    def set_state(self, state: dict[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        """Put back rows of `get_state()` (of this or another env of the same task), only those of `mask`."""
        n = self.num_envs
        missing = [k for k in self.get_state() if k not in state]
        if missing:
            raise UserError(f"set_state needs {missing[0]!r}: pass what get_state() returned")
        mask = np.ones(n, bool) if mask is None else np.asarray(mask)
        if mask.shape != (n,) or mask.dtype != bool:
            raise UserError(f"mask must be bool of shape ({n},), got {mask.dtype} of shape {mask.shape}")
        rows = (self.batch.state, self.starts, self.stream.seeds, self.stream.episodes, self.steps, self.scene.asked,
                self.terminated, self.truncated, self.success, self.joints.T, self.target.T, self.grip,
                self.attitude.transpose(2, 0, 1), self.queue.swapaxes(0, 1))
        for (name, now), row in zip(self.get_state().items(), rows, strict=True):
            new = np.asarray(state[name])
            if new.shape != now.shape:
                raise UserError(f"set_state: {name!r} must have shape {now.shape}, got {new.shape}")
            row[mask] = new[mask]
        self.ready |= mask
        self._randomise(np.flatnonzero(mask))
        self._observe()
        self._draw(mask)

    def expert_action(self) -> np.ndarray:
        """float32 [N, A]: what the scripted expert does in the present states."""
        return self._as_commands(EXPERTS[self.task.name](self))

    def recovery_action(self) -> np.ndarray:
        """float32 [N, A]: how to leave a failed attempt, towards a state from which the next may begin."""
        return self._as_commands(back_out(self))

    def subtask(self) -> np.ndarray:
        """int64 [N]: how many of the task's sub-tasks are done."""
        return self.task.stage(self.scene).astype(np.int64)

    def _as_commands(self, hand: np.ndarray) -> np.ndarray:
        """Actions [N, 7] of the hand in the env's own control."""
        if self.control == "ee_delta":
            return hand
        twist = hand[:, :6].T * np.array([[MOVE]] * 3 + [[TURN]] * 3, F)
        joints = damped_step(self.arm.jacobian(), twist) / F(JOINT)
        return np.ascontiguousarray(np.concatenate([joints, hand[:, 6:].T]).T).clip(-1, 1)

    def render(self):
        """uint8 [N, h, h, 3], h = render_size, from the front camera; needs render=True."""
        if self.render_mode is None:
            raise UserError("render() needs an env made with render=True")
        if not self.ready.all():
            raise UserError("call reset() before render()")
        return self._renderer(("front",), self.render_size).render()["front"]

    @property
    def cameras(self) -> tuple[str, ...]:
        """Views that `film` takes."""
        return VIEWS

    def film(self, views, size: int, ids=None) -> dict[str, np.ndarray]:
        """uint8 [n, size, size, 3] per view of the envs `ids` (default: all), for people who watch."""
        if not self.ready.all():
            raise UserError("call reset() before film()")
        return self._renderer(tuple(views), size).render(ids)

    def tool(self, i: int) -> np.ndarray:
        """[3] [m]: where the hand of env i is, in the base frame."""
        return self.scene.tcp[:, i].astype(np.float64)

    def project(self, view: str, i: int, points: np.ndarray) -> np.ndarray:
        """[K, 2]: where `points` [K, 3] [m] lie in the picture of `view` of env i, 0 .. 1 from its top left corner."""
        from sims.mujoco.render import project
        return project(self.model, self.batch, choose("view", view, VIEWS), i, points)

    def hand_target(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the hand is being sent: position [3, N] and frame [3, 5, N] (with joint control: where it is)."""
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
        target, attitude = (np.empty((3, n), F), np.empty((3, 5, n), F)) if by_hand else (self.target, self.attitude)
        kernel.command(actions, over, by_hand, self._q, s.tcp, s.frame, self.arm.axes, self.arm.anchors, self._rows, self.joints,
                       self.grip, self.target, self.attitude, self._ctrl, joints, grip, target, attitude)
        self.joints, self.grip, self.target, self.attitude = joints, grip, target, attitude

    def _observe(self) -> None:
        """Refill the scene, the observation rows and the progress from the physics state."""
        s, arm = self.scene, self.arm
        np.copyto(self._q, self._qpos.T, casting="same_kind")
        np.cos(s.q, out=self._spin.real)
        np.sin(s.q, out=self._spin.imag)
        kernel.observe(self._qvel, self._mocap_pos, self._q, self._v, s.goal, s.opening, self._spin, arm.axes, arm.anchors, s.frame,
                       s.tcp, self._rows, self.joints, self.grip, self._adr, self.task.uses_goal, self.task.uses_slide)
        if self.dense:
            self.progress = self.task.progress(s)

    def _obs(self) -> dict[str, np.ndarray]:
        out = {"state": self._rows[:self._seen].T.copy(), "task": self.words[self.scene.asked]}
        for view in self.spec.views:
            out[f"image/{view}"] = self._images[view].copy()
        return out

    def _draw(self, mask: np.ndarray) -> None:
        """Render the envs of `mask` and those whose image is old; the others keep theirs."""
        if not self.rgb:
            return
        self._stale |= mask
        if not self.images:
            return
        if self._images is None:
            shape = (self.num_envs, self.image_size, self.image_size, 3)
            self._images = {v: np.zeros(shape, np.uint8) for v in VIEWS}
        ids = np.flatnonzero(self._stale)
        self._stale[:] = False
        if len(ids):
            fresh = self._renderer(VIEWS, self.image_size).render(None if len(ids) == self.num_envs else ids)
            for view, pixels in fresh.items():
                self._images[view][ids] = pixels

    def _renderer(self, views: tuple[str, ...], size: int):
        key = (views, size)
        if key not in self._renderers:
            from sims.mujoco.render import Renderer
            self._renderers[key] = Renderer(self.batch, self.model, views, size, size)
        return self._renderers[key]

    def _begin(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Begin the episodes of `starts` in the envs `ids`."""
        u = uniforms(starts, 31)
        place = self.task.place(u[:, 7:])
        joints = HOME + JITTER * (2 * u[:, :7] - 1)
        self.batch.state[ids] = self._blank
        self._qpos[ids, :7] = joints
        self._qpos[ids, 7:9] = m.FINGER_OPEN
        self._ctrl[ids, :7] = joints
        self._ctrl[ids, 7:] = m.FINGER_OPEN
        for k, a in enumerate(self._adr):
            self._qpos[ids, a:a + 3] = place.centre[:, k]
            half = place.yaw[:, k] / 2
            self._qpos[ids, a + 3:a + 7] = np.stack([np.cos(half), 0 * half, 0 * half, np.sin(half)], 1)
        if self._mocap is not None:
            self._mocap[ids, 0] = place.goal
        self.scene.asked[ids] = place.asked
        self.starts[ids] = starts
        self.steps[ids] = 0
        self.terminated[ids] = self.truncated[ids] = self.success[ids] = False
        self.ready[ids] = True
        self.joints[:, ids] = joints.T
        self.grip[ids] = 1
        self.queue[:, ids] = 0
        self.queue[:, ids, -1] = 1
        self._randomise(ids)

    def _randomise(self, ids: np.ndarray) -> None:
        """Set the model fields of `ids` from their start ids; other numbers than those that place the objects."""
        if not self.kinds or not len(ids):
            return
        b, mj, n = self.batch, self.model, len(ids)
        moving, cams = len(self._bodies), mj.ncam
        u = 2 * uniforms(self.starts[ids], moving + 1 + 7 * cams, stream=1) - 1
        if "mass" in self.kinds:
            factor = 1 + SPREAD * u[:, :moving, None]
            rows, bodies = ids[:, None], self._bodies[None]
            b.expand("body_mass")[rows, bodies] = mj.body_mass[self._bodies] * factor[..., 0]
            b.expand("body_inertia")[rows, bodies] = mj.body_inertia[self._bodies] * factor
            b.set_const(ids)
        if "friction" in self.kinds:
            b.expand("geom_friction")[ids, :, 0] = mj.geom_friction[:, 0] * (1 + SPREAD * u[:, moving, None])
        if "camera" in self.kinds:
            v = u[:, moving + 1:].reshape(n, cams, 7)
            b.expand("cam_pos")[ids] = mj.cam_pos + CAMERA_SHIFT[:, None] * v[..., :3]
            quat = mj.cam_quat + CAMERA_TURN / 2 * v[..., 3:]  # a small turn about a random axis
            b.expand("cam_quat")[ids] = quat / np.linalg.norm(quat, axis=-1, keepdims=True)

    def close_extras(self, **kwargs):
        for r in self._renderers.values():
            if hasattr(r, "close"):
                r.close()
        self._renderers.clear()


def rates(task: str, num_envs: int, threads: int = 0, seconds: float = 1.0, control: str = CONTROLS[0]) -> dict:
    """Control steps/s with random actions: `env` (this env, resets included) and `raw` (`Batch` alone).

    Raw replays the env's joint commands from the same states, so both do the same physics and their ratio is the
    cost of the Python around it. The two take turns every few steps and each step counts with its fastest pass,
    so that other load on the machine weighs little.
    """
    env = MujocoArmEnv(TASKS[choose("task", task, TASKS)], num_envs, False, False, choose("control", control, CONTROLS),
                       64, threads, 0, frozenset(), 0, False)
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
