"""Gymnasium's HalfCheetah-v5, Hopper-v5, Walker2d-v5 and Ant-v5 on `mujoco.batch.Batch`, equal to
Gymnasium's.

From the same qpos and qvel the same actions give the same observations, rewards and terminations as
Gymnasium's own env, bit for bit in float64 (returned as float32). The models are Gymnasium's XML files;
starts follow Gymnasium's distributions, but come from a start id (`robo_rl.starts`) in place of a generator.
One difference: actions outside [-1, 1] are clipped before the control cost, as most PPO codes do around
Gymnasium.

Ant's observation has the contact forces of `mj_rnePostConstraint` after the step, which Batch does not
compute and whose inputs (contacts) it does not keep: Ant's envs step on Python threads over the same state
rows.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import gymnasium
import mujoco
import numpy as np
from gymnasium.vector import AutoresetMode
from mujoco.batch import Batch

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError, choose
from robo_rl.starts import StartStream, uniforms
from robo_rl.types import ActionAxis, ControlSpec

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
RENDER_SIZE = 256  # pixels of `render()`


@dataclass(frozen=True, slots=True)
class Walker:
    """What Gymnasium's class of one task fixes; ranges are (low, high) and exclusive unless `closed`."""

    xml: str
    frame_skip: int  # physics steps per control step
    hidden: int  # leading qpos (world position) left out of the observation
    noise: float  # reset: qpos uniform in +-noise; qvel normal * noise, or uniform
    normal_qvel: bool
    ctrl_cost: float
    instruction: str
    z: tuple[float, float] = (-np.inf, np.inf)  # healthy height [m]
    angle: tuple[float, float] = (-np.inf, np.inf)  # healthy torso pitch [rad]
    state_limit: float = np.inf  # healthy magnitude of the state beyond x and z
    alive: float = 0.0  # reward per healthy step
    clip_qvel: float = np.inf
    contact_cost: float = 0.0  # > 0: contact forces are observed and paid for
    ends: bool = True  # terminates when unhealthy


WALKERS = {
    "HalfCheetah-v5": Walker("half_cheetah.xml", 5, 1, 0.1, True, 0.1, "run forward", ends=False),
    "Hopper-v5": Walker(
        "hopper.xml",
        4,
        1,
        5e-3,
        False,
        1e-3,
        "hop forward",
        z=(0.7, np.inf),
        angle=(-0.2, 0.2),
        state_limit=100.0,
        alive=1.0,
        clip_qvel=10.0,
    ),
    "Walker2d-v5": Walker(
        "walker2d_v5.xml",
        4,
        1,
        5e-3,
        False,
        1e-3,
        "walk forward",
        z=(0.8, 2.0),
        angle=(-1.0, 1.0),
        alive=1.0,
        clip_qvel=10.0,
    ),
    "Ant-v5": Walker(
        "ant.xml", 5, 2, 0.1, True, 0.5, "walk forward", z=(0.2, 1.0), alive=1.0, contact_cost=5e-4
    ),
}
LOCOMOTION = tuple(WALKERS)
MAX_STEPS = 1000


def make_locomotion(
    task: str,
    *,
    num_envs: int = 1,
    obs: str = "state",
    reward: str = "",
    control: str = "",
    image_size: int = 64,
    threads: int = 0,
    max_steps: int = 0,
    randomise: str = "",
    render: bool = False,
    device: str = "cpu",
) -> "LocomotionEnv":
    """The vector env of one of LOCOMOTION; the options are those of `sims.make`."""
    check_options(task, obs, reward, control, randomise, max_steps, threads)
    if device != "cpu":
        raise UserError(f"{task} runs on device 'cpu' only, got {device!r}; --sim mujoco_warp runs on a GPU")
    return LocomotionEnv(task, num_envs, threads=threads, max_steps=max_steps or MAX_STEPS, render=render)


def check_options(
    task: str, obs: str, reward: str, control: str, randomise: str, max_steps: int, threads: int
) -> None:
    """Raise UserError for options of `sims.make` that these tasks do not have."""
    choose("task", task, LOCOMOTION)
    if obs != "state":
        raise UserError(
            f"{task} has obs 'state' only, got {obs!r}; use an arm task (reach, pick_cube ...) for rgb"
        )
    if reward not in ("", "dense"):
        raise UserError(f"{task} has reward 'dense' only (Gymnasium's own), got {reward!r}")
    choose("control", control or "effort", ("effort",))
    if randomise:
        raise UserError(f"{task} has no randomise options, got {randomise!r}")
    if max_steps < 0 or threads < 0:
        raise UserError(f"max_steps and threads must be >= 0, got {max_steps} and {threads}")


def load_model(task: str) -> mujoco.MjModel:
    """Gymnasium's model of `task`."""
    handler = mujoco.get_mju_user_warning()
    # half_cheetah.xml's deprecated attribute, into MUJOCO_LOG.TXT
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        return mujoco.MjModel.from_xml_path(str(_ASSETS / WALKERS[task].xml))
    finally:
        mujoco.set_mju_user_warning(handler)


class LocomotionEnv(ControlEnv):
    """N envs of one task; see `sims` for the contract and `make_locomotion` for the options."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}
    reports_success = False

    def __init__(
        self, task: str, num_envs: int, *, threads: int = 0, max_steps: int = MAX_STEPS, render: bool = False
    ):
        self.walker = w = WALKERS[task]
        self.model = m = load_model(task)
        self.num_envs = num_envs
        self.render_mode = "rgb_array" if render else None
        self.batch = Batch(m, num_envs, threads)
        self._physics = _ContactStepper(self.batch) if w.contact_cost else self.batch
        self._qpos, self._qvel, self._ctrl = (self.batch.bind(f) for f in ("qpos", "qvel", "ctrl"))
        # a row of the reset state; qpos and qvel are written over it
        self._blank = np.zeros(self.batch.nstate)
        mujoco.mj_getState(m, mujoco.MjData(m), self._blank, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._dt = m.opt.timestep * w.frame_skip

        names = state_names(task, m)
        self.single_observation_space, self.observation_space = observation_spaces(len(names), num_envs)
        self.single_action_space, self.action_space = action_spaces(m.nu, num_envs)
        self.spec = ControlSpec("mujoco", task, effort_axes(m), self._dt, max_steps, names)
        self._task = np.full(num_envs, w.instruction)
        self._stream = StartStream(num_envs)
        self._steps = np.zeros(num_envs, np.int64)
        self._terminated, self._truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self._no_success = np.zeros(num_envs, bool)
        self._x = self._physics.x if w.contact_cost else self._qpos[:, 0]  # what forward reward looks at [m]
        self._forces = self._physics.forces if w.contact_cost else None
        self._renderer = self._studio = None

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs)
        ids, starts = self._stream.due(seed, mask, starts)
        qpos, qvel = start_state(self.spec.task, self.model, starts)
        self.set_qpos_qvel(qpos, qvel, ids)
        return self._obs(), {"success": self._no_success.copy()}

    def set_qpos_qvel(self, qpos: np.ndarray, qvel: np.ndarray, ids: np.ndarray) -> None:
        """Start the episodes of the envs `ids` at qpos [n, nq] and qvel [n, nv]."""
        self.batch.state[ids] = self._blank
        self._qpos[ids] = qpos
        self._qvel[ids] = qvel
        if self._forces is not None:
            self._x[ids] = qpos[:, 0]
            self._forces[ids] = 0.0
        self._steps[ids] = 0
        self._terminated[ids] = self._truncated[ids] = False

    def step(self, actions):
        # After physics every cache is cold and a NumPy call costs 5 to 30 us: few calls, none for what cannot
        # be.
        a = read_actions(actions, self.num_envs, self.model.nu)
        x = self._x.copy()
        over = self._terminated | self._truncated
        live = None if not over.any() else np.flatnonzero(~over)
        self._ctrl[:] = a
        if live is None or len(live):
            self._physics.step(live, nstep=self.walker.frame_skip)
        if live is None:
            self._steps += 1
        else:
            self._steps[live] += 1
        reward = self._reward(a, x)
        if live is not None:
            reward[over] = 0.0
        if self._steps.max() >= self.spec.max_steps:
            self._truncated |= (self._steps >= self.spec.max_steps) & ~self._terminated
        return (
            self._obs(),
            reward,
            self._terminated.copy(),
            self._truncated.copy(),
            {"success": self._no_success.copy()},
        )

    def _reward(self, a: np.ndarray, x_before: np.ndarray) -> np.ndarray:
        """Rewards float32 [N] in Gymnasium's order of operations; marks the unhealthy as terminated."""
        w = self.walker
        reward = self._x - x_before
        reward /= self._dt
        if w.ends:
            healthy = self._healthy()
            reward += healthy * w.alive
            self._terminated |= ~healthy
        cost = w.ctrl_cost * np.add.reduce(np.square(a), axis=1)
        if self._forces is not None:
            cost = cost + w.contact_cost * np.add.reduce(np.square(self._forces), axis=1)
        reward -= cost
        return reward.astype(np.float32)

    def _healthy(self) -> np.ndarray:
        w, q, v = self.walker, self._qpos, self._qvel
        if self._forces is not None:  # Ant: height, closed range
            return np.isfinite(q).all(1) & np.isfinite(v).all(1) & (q[:, 2] >= w.z[0]) & (q[:, 2] <= w.z[1])
        z, angle = q[:, 1], q[:, 2]
        ok = (z > w.z[0]) & (z < w.z[1]) & (angle > w.angle[0]) & (angle < w.angle[1])
        if w.state_limit < np.inf:
            ok &= (np.abs(q[:, 2:]) < w.state_limit).all(1) & (np.abs(v) < w.state_limit).all(1)
        return ok

    def _obs(self) -> dict[str, np.ndarray]:
        w, nq = self.walker, self.model.nq - self.walker.hidden
        out = np.empty((self.num_envs, len(self.spec.state_names)), np.float32)
        out[:, :nq] = self._qpos[:, w.hidden :]
        v = out[:, nq : nq + self.model.nv]
        v[:] = self._qvel
        if w.clip_qvel < np.inf:
            np.clip(v, -w.clip_qvel, w.clip_qvel, out=v)
        if self._forces is not None:
            out[:, nq + self.model.nv :] = self._forces[:, 6:]
        return {"state": out, "task": self._task.copy()}

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything that decides the future, one row per env."""
        return {k: x.copy() for k, x in self._rows().items()}

    def set_state(self, state: dict[str, np.ndarray], mask: "np.ndarray | None" = None) -> None:
        """Restore the envs of `mask` (default: all) from `get_state()`."""
        ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        for k, x in self._rows().items():
            x[ids] = state[k][ids]

    def _rows(self) -> dict[str, np.ndarray]:
        rows = {
            "physics": self.batch.state,
            "steps": self._steps,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "seeds": self._stream.seeds,
            "episodes": self._stream.episodes,
        }
        return rows if self._forces is None else rows | {"x": self._x, "forces": self._forces}

    def render(self) -> np.ndarray:
        """uint8 [N, 256, 256, 3] of the camera that follows the robot."""
        if self.render_mode is None:
            raise UserError("make the env with render=True to call render()")
        if self._renderer is None:
            from sims.mujoco.render import Renderer

            self._renderer = Renderer(self.batch, self.model, ("track",), RENDER_SIZE, RENDER_SIZE)
        return self._renderer.render()["track"]

    def studio(self, ids=None) -> np.ndarray:
        """uint8 [n, 480, 640, 3] of the envs `ids` (default: all) from the camera that follows the robot,
        with light and shadow."""
        if self._studio is None:
            from sims.mujoco.render import Renderer

            self._studio = Renderer(self.batch, self.model, ("track",), 480, 640, fine=True)
        return self._studio.render(ids)["track"]

    def close_extras(self) -> None:
        for renderer in (self._renderer, self._studio):
            if renderer is not None:
                renderer.close()
        if self._forces is not None:
            self._physics.close()


class _ContactStepper:
    """`Batch.step` plus Gymnasium's `mj_rnePostConstraint`, over the state rows of a Batch.

    Each thread loads a row into its MjData, steps it and saves it back, as Batch does; MuJoCo releases the
    interpreter lock, so threads run in parallel. `x` [N] is the torso's x as Gymnasium reads it [m]: that of
    the last forward pass, which lags qpos; `forces` [N, nbody * 6] are the external body forces clipped to
    +-1.
    """

    def __init__(self, batch: Batch):
        n = batch.nsim
        self._model, self._state = batch.model, batch.state
        self._data = [mujoco.MjData(batch.model) for _ in range(min(batch.nthread, n))]
        self._pool = ThreadPoolExecutor(len(self._data) - 1) if len(self._data) > 1 else None
        self.x = np.zeros(n)
        self.forces = np.zeros((n, batch.model.nbody * 6))

    def step(self, ids: "np.ndarray | None", nstep: int) -> None:
        """Advance the envs `ids` (None: all) by nstep physics steps."""
        todo = iter(range(len(self.x)) if ids is None else ids.tolist())  # shared: each thread takes the next
        jobs = [self._pool.submit(self._work, d, todo, nstep) for d in self._data[1:]] if self._pool else []
        self._work(self._data[0], todo, nstep)
        for job in jobs:
            job.result()
        np.clip(self.forces, -1.0, 1.0, out=self.forces)

    def _work(self, d: mujoco.MjData, todo, nstep: int) -> None:
        m, spec = self._model, int(mujoco.mjtState.mjSTATE_INTEGRATION)
        load, step, post, save = (
            mujoco.mj_setState,
            mujoco.mj_step,
            mujoco.mj_rnePostConstraint,
            mujoco.mj_getState,
        )
        torso, forces = d.xpos[1], d.cfrc_ext.reshape(-1)
        for i in todo:
            row = self._state[i]
            load(m, d, row, spec)
            step(m, d, nstep=nstep)
            post(m, d)
            save(m, d, row, spec)
            self.x[i] = torso[0]
            self.forces[i] = forces

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def start_state(task: str, model: mujoco.MjModel, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(qpos [n, nq], qvel [n, nv]) of `starts` [n]: the model's rest pose and Gymnasium's noise."""
    w, nq, nv = WALKERS[task], model.nq, model.nv
    u = uniforms(starts, nq + 2 * nv)
    qpos = model.qpos0 + w.noise * (2 * u[:, :nq] - 1)
    if w.normal_qvel:  # Box-Muller; 1 - u is in (0, 1]
        r = np.sqrt(-2 * np.log(1 - u[:, nq : nq + nv]))
        return qpos, w.noise * r * np.cos(2 * np.pi * u[:, nq + nv :])
    return qpos, w.noise * (2 * u[:, nq : nq + nv] - 1)


def effort_axes(model: mujoco.MjModel) -> tuple[ActionAxis, ...]:
    """What each action means: the torque of a joint."""
    return tuple(
        ActionAxis(
            model.joint(model.actuator_trnid[i, 0]).name,
            "N m",
            -model.actuator_gear[i, 0],
            model.actuator_gear[i, 0],
            "effort",
            "joint",
        )
        for i in range(model.nu)
    )


def state_names(task: str, model: mujoco.MjModel) -> tuple[str, ...]:
    """One name per dimension of the observation: positions, velocities, then contact forces."""
    w, pos, vel = WALKERS[task], [], []
    for j in range(model.njnt):
        name = model.joint(j).name
        if model.jnt_type[j] == int(mujoco.mjtJoint.mjJNT_FREE):
            pos += [f"{name}_{c}" for c in ("x", "y", "z", "qw", "qx", "qy", "qz")]
            vel += [f"{name}_{c}" for c in ("vx", "vy", "vz", "wx", "wy", "wz")]
        else:
            pos.append(name)
            vel.append(f"{name}_vel")
    force = []
    if w.contact_cost:
        force = [
            f"{model.body(b).name or f'body{b}'}_{c}"
            for b in range(1, model.nbody)
            for c in ("tx", "ty", "tz", "fx", "fy", "fz")
        ]
    return (*pos[w.hidden :], *vel, *force)


# ---------------------------------------------------------------- measurement


def rates(task: str, num_envs: int, threads: int = 0, seconds: float = 1.0) -> dict[str, float]:
    """Control steps/s: `env` (with masked resets), `step` (without), `raw` (Batch alone on the same states).

    A run with random actions is recorded first: the state rows before every step, and where episodes ended.
    The three loops then do the same physics, so their ratio is the cost of the env around it. One after the
    other in short slices, so that other load on the machine meets all three.
    """
    env = make_locomotion(task, num_envs=num_envs, threads=threads)
    rng, horizon = np.random.default_rng(0), 64
    actions = rng.uniform(-1, 1, (horizon, num_envs, env.model.nu)).astype(np.float32)
    env.reset(seed=0)
    for a in actions:  # away from the starts
        _, _, te, tr, _ = env.step(a)
        if (te | tr).any():
            env.reset(options={"reset_mask": te | tr})
    begin = env.get_state()
    rows = []
    for a in actions:
        rows.append(env.batch.state.copy())
        _, _, te, tr, _ = env.step(a)
        if (te | tr).any():
            env.reset(options={"reset_mask": te | tr})

    def raw():
        for row, a in zip(rows, actions, strict=True):
            env.batch.state[:] = row
            env._ctrl[:] = a
            env.batch.step(nstep=env.walker.frame_skip)

    def stepping():
        for row, a in zip(rows, actions, strict=True):
            env.batch.state[:] = row
            env._terminated[:] = env._truncated[:] = False
            env.step(a)

    def whole():
        for a in actions:
            _, _, te, tr, _ = env.step(a)
            if (te | tr).any():
                env.reset(options={"reset_mask": te | tr})

    spent = {"raw": 0.0, "step": 0.0, "env": 0.0}
    rounds = 0
    while sum(spent.values()) < 3 * seconds:
        for name, loop in (("raw", raw), ("step", stepping), ("env", whole)):
            env.set_state(begin)
            t = perf_counter()
            loop()
            spent[name] += perf_counter() - t
        rounds += 1
    env.close()
    return {k: rounds * horizon * num_envs / t for k, t in spent.items()}
