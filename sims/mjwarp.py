"""Gymnasium's locomotion tasks on MuJoCo Warp: N envs on a GPU, whose observations, rewards and flags are
tensors there.

Models, starts, observations, rewards and ends are those of `sims.mujoco.locomotion`. The frame_skip physics
steps of a control step are one graph, a CUDA graph on a GPU, launched on torch's stream. The CPU runs the
same code, for tests: slower than `sims.mujoco` by far. The first env of a task builds its kernels, which
takes a minute; they are kept on disk.

What differs from the CPU env:
* The edges of MuJoCo's friction pyramids lie along a capsule that touches the floor. Those of Warp do so
  where it lies flatter than 60 degrees, and along the world's axes where it is steeper: friction on Ant's
  legs is another, by up to the square root of 2 in some directions.
* Physics is in float32, with another order of the contacts. On a GPU this order changes from run to run, so
  two runs of a seed differ by rounding; on the CPU they are equal.
* The solver stops at a tolerance of 1e-6, MuJoCo's at 1e-8.
* An env whose physics is no longer finite keeps the state before it and terminates, in HalfCheetah too.
* On a GPU actions are not looked at before a step, which would wait for the device: the next `reset` raises
  UserError if some were not finite. Such actions were taken as 0.
"""

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import mujoco
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from mujoco.batch import Batch
from torch import Tensor

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_device_actions, read_reset
from robo_rl.device_names import check_device
from robo_rl.errors import MissingDependency, UserError
from robo_rl.starts import StartStream
from robo_rl.types import ControlSpec
from sims.mujoco.locomotion import (
    MAX_STEPS,
    RENDER_SIZE,
    WALKERS,
    check_options,
    effort_axes,
    load_model,
    start_state,
    state_names,
)
from sims.mujoco.names import find_locomotion

if TYPE_CHECKING:
    from sims.mujoco.render import Renderer

POINTS = 2  # contacts of a pair of the geoms here, at most: plane, spheres, capsules


def make_mujoco_warp(
    task: str = "",
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
) -> "MujocoWarpEnv":
    """N envs of a task of LOCOMOTION ("": Ant-v5; short: ant) on `device`; the options are those of
    `sims.make`."""
    task = find_locomotion(task)
    check_options(task, obs, reward, control, randomise, max_steps, threads)
    check_device(device, "device")
    if missing := [name for name in ("mujoco_warp", "warp") if importlib.util.find_spec(name) is None]:
        raise MissingDependency(
            f"the mujoco_warp sim needs MuJoCo Warp ({missing[0]} is missing): pip install 'robo_rl[warp]'"
        )
    return MujocoWarpEnv(
        task, num_envs, torch.device(device), max_steps=max_steps or MAX_STEPS, render=render
    )


class WarpPhysics:
    """N worlds of `model` on `device`; `step` advances all by frame_skip physics steps.

    The tensors share Warp's memory: qpos [N, nq], qvel [N, nv], warm [N, nv] (where the solver begins), ctrl
    [N, nu], x [N] (of the torso in the last forward pass [m]), forces [N, nbody * 6] (of contacts on bodies,
    computed where `contact_forces`), overflow [N] (not 0: contacts were left out for want of room).
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        frame_skip: int,
        contact_forces: bool,
        device: torch.device,
    ):
        import warp as wp

        wp.config.log_level = wp.LOG_ERROR  # or it says hello, and that the CPU is no GPU
        import mujoco_warp as mjw

        wp.init()
        if device.type == "cuda" and not wp.is_cuda_available():
            built, driver = wp.get_cuda_toolkit_version(), wp.get_cuda_driver_version()
            raise UserError(
                f"device {device}: this build of Warp {wp.__version__} needs an NVIDIA driver for CUDA "
                f"{built[0] if built else 12} or newer, found {'.'.join(map(str, driver or ())) or 'none'}; "
                "install one, or Warp's wheel for the driver's CUDA (github.com/NVIDIA/warp/releases)"
            )
        self._wp, self._mjw = wp, mjw
        self._skip, self._contact_forces, self._device = frame_skip, contact_forces, device
        self._where = wp.device_from_torch(device)
        contacts, rows = most_contacts(model)
        with wp.ScopedDevice(self._where):
            self._model = mjw.put_model(model)
            self._model.opt.warn_overflow = 0  # read from `overflow`
            self._model.opt.graph_conditional = device.type == "cpu" or wp.is_conditional_graph_supported()
            self._data = d = mjw.make_data(model, nworld=num_envs, nconmax=contacts, njmax=rows)
        self.qpos, self.qvel, self.warm, self.ctrl = (
            wp.to_torch(x) for x in (d.qpos, d.qvel, d.qacc_warmstart, d.ctrl)
        )
        self.x = wp.to_torch(d.xpos)[:, 1, 0]
        self.forces = wp.to_torch(d.cfrc_ext).view(num_envs, -1)
        self.overflow = wp.to_torch(d.overflow)
        self._streams: dict[int, Any] = {}  # torch's, as Warp has them
        self.graph = self._capture()

    def launch(self) -> None:
        """The kernels of a step, one by one; on a GPU in the order of Warp's stream, not torch's."""
        with self._wp.ScopedDevice(self._where):
            for _ in range(self._skip):
                self._mjw.step(self._model, self._data)
            if self._contact_forces:
                self._mjw.rne_postconstraint(self._model, self._data)

    def _capture(self) -> Any:
        """The kernels of a step as a graph, on a stream of Warp's: torch's default stream cannot capture."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.launch()  # loads every kernel, which a capture must not
        self._wp.synchronize_device(self._where)
        with self._wp.ScopedCapture(self._where) as capture:
            self.launch()
        self._wp.synchronize_device(self._where)
        return capture.graph

    def step(self) -> None:
        """frame_skip physics steps of all worlds, on a GPU in the order of torch's stream."""
        stream = None
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            if (stream := self._streams.get(current.cuda_stream)) is None:
                stream = self._streams[current.cuda_stream] = self._wp.stream_from_torch(current)
        self._wp.capture_launch(self.graph, stream=stream)


def most_contacts(model: mujoco.MjModel) -> tuple[int, int]:
    """(contacts, constraint rows) that one world of `model` can have at most: pairs of geoms that may touch,
    with pyramidal cones, and both ends of each joint."""
    n, parent, weld = model.ngeom, model.body_parentid, model.body_weldid
    contacts, rows = 0, 2 * int(model.jnt_limited.sum()) + int((model.dof_frictionloss > 0).sum())
    for i in range(n):
        for j in range(i + 1, n):
            a, b = weld[model.geom_bodyid[i]], weld[model.geom_bodyid[j]]
            kin = a and b and (a == weld[parent[b]] or b == weld[parent[a]])
            seen = (model.geom_contype[i] & model.geom_conaffinity[j]) | (
                model.geom_contype[j] & model.geom_conaffinity[i]
            )
            if seen and a != b and not kin:
                contacts += POINTS
                rows += POINTS * max(1, 2 * (max(model.geom_condim[[i, j]]) - 1))
    return int(contacts), int(rows)


class MujocoWarpEnv(ControlEnv):
    """N envs of one task; see `sims` for the contract and `make_mujoco_warp` for the options."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}
    reports_success = False

    def __init__(
        self,
        task: str,
        num_envs: int,
        device: torch.device,
        *,
        max_steps: int = MAX_STEPS,
        render: bool = False,
    ):
        self.walker, self.num_envs = WALKERS[task], num_envs
        self.model = m = load_model(task)
        w = self.walker
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.render_mode = "rgb_array" if render else None
        self.physics = WarpPhysics(m, num_envs, w.frame_skip, w.contact_cost > 0, self.device)
        self.checks_actions = self.device.type == "cpu"  # before each step, and not at the next reset
        names = state_names(task, m)
        self.single_observation_space, self.observation_space = observation_spaces(len(names), num_envs)
        self.single_action_space, self.action_space = action_spaces(m.nu, num_envs)
        self._dt = m.opt.timestep * w.frame_skip
        self.spec = ControlSpec("mujoco_warp", task, effort_axes(m), self._dt, max_steps, names)
        self._task = np.full(num_envs, w.instruction)
        self._stream = StartStream(num_envs)
        off = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._terminated, self._truncated, self._no_success = off.clone(), off.clone(), off.clone()
        self._refused = torch.zeros((), dtype=torch.bool, device=self.device)  # an action was not finite
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._x = torch.zeros(num_envs, device=self.device)  # what forward reward looks at [m]
        self._forces = torch.zeros_like(self.physics.forces)  # within +-1
        self._begun = False
        self._pictures: dict[bool, tuple[Batch, Renderer]] = {}  # by whether they are for people
        self._warned = False

    def reset(self, *, seed=None, options=None):
        options = {k: v.cpu().numpy() if isinstance(v, Tensor) else v for k, v in (options or {}).items()}
        mask, starts = read_reset(seed, options, self.num_envs, np.full(self.num_envs, self._begun))
        self._look_back()
        ids, starts = self._stream.due(seed, mask, starts)
        if len(ids):
            self.set_qpos_qvel(*start_state(self.spec.task, self.model, starts), ids)
        self._begun = True
        return self._obs(), {"success": self._no_success.clone()}

    def set_qpos_qvel(self, qpos: np.ndarray, qvel: np.ndarray, ids: np.ndarray) -> None:
        """Start the episodes of the envs `ids` at qpos [n, nq] and qvel [n, nv]."""
        p = self.physics
        rows, q, v = (
            torch.from_numpy(x).to(self.device)
            for x in (ids, qpos.astype(np.float32), qvel.astype(np.float32))
        )
        p.qpos[rows], p.qvel[rows] = q, v
        # nothing else of a world lasts: there are no activations, and what a step needs it computes anew
        p.warm[rows] = 0.0
        self._x[rows], self._forces[rows] = q[:, 0], 0.0
        self._steps[rows] = 0
        self._terminated[rows] = self._truncated[rows] = False

    def _look_back(self) -> None:
        """Tell what went wrong in the steps since the last reset: the device is asked once."""
        refused, full = torch.stack([self._refused, (self.physics.overflow != 0).any()]).tolist()
        if full and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.spec.task}: envs had more contacts than there is room for, and some were left out",
                stacklevel=3,
            )
        if refused:
            self._refused.fill_(False)
            raise UserError("actions must be finite, got NaN or infinity in a step since the last reset")

    def step(self, actions):
        if not self._begun:
            raise UserError("call reset() before step()")
        p, a = self.physics, self._actions(actions)
        live = ~(self._terminated | self._truncated)
        held = p.qpos, p.qvel, p.warm
        before, x_before = [x.clone() for x in held], self._x
        p.ctrl.copy_(a)
        p.step()
        forces = p.forces.clamp(-1.0, 1.0)
        sums = p.x + sum(x.sum(1) for x in held)
        finite = (sums + forces.sum(1) if self.walker.contact_cost else sums).isfinite()
        good = live & finite
        for x, old in zip(held, before, strict=True):
            x.copy_(torch.where(good[:, None], x, old))
        # new ones, and no view of Warp's memory
        self._x = torch.where(good, p.x if self.walker.contact_cost else p.qpos[:, 0], self._x)
        self._forces = torch.where(good[:, None], forces, self._forces)
        self._steps += live
        reward = self._reward(a, x_before, live, finite)
        self._truncated |= (self._steps >= self.spec.max_steps) & ~self._terminated
        info = {"success": self._no_success.clone()}
        return self._obs(), reward, self._terminated.clone(), self._truncated.clone(), info

    def _reward(self, a: Tensor, x_before: Tensor, live: Tensor, finite: Tensor) -> Tensor:
        """Rewards float32 [N], 0 where not `live`; marks the unhealthy as terminated."""
        w = self.walker
        reward = (self._x - x_before) / self._dt - w.ctrl_cost * a.square().sum(1)
        healthy = finite
        if w.ends:
            healthy = finite & self._healthy()
            reward += healthy * w.alive
        if w.contact_cost:
            reward -= w.contact_cost * self._forces.square().sum(1)
        self._terminated |= live & ~healthy
        return torch.where(live, reward, 0.0)

    def _healthy(self) -> Tensor:
        w, q, v = self.walker, self.physics.qpos, self.physics.qvel
        if w.contact_cost:  # Ant: height, closed range
            return (q[:, 2] >= w.z[0]) & (q[:, 2] <= w.z[1])
        z, angle = q[:, 1], q[:, 2]
        ok = (z > w.z[0]) & (z < w.z[1]) & (angle > w.angle[0]) & (angle < w.angle[1])
        if w.state_limit < np.inf:
            ok &= (q[:, 2:].abs() < w.state_limit).all(1) & (v.abs() < w.state_limit).all(1)
        return ok

    def _actions(self, actions) -> Tensor:
        """float32 [N, A] on the device, clipped to [-1, 1]; UserError for another shape, and on the CPU for a
        NaN or an infinity."""
        a = read_device_actions(actions, self.action_space.shape, self.device)
        finite = a.isfinite()
        if self.checks_actions:
            if not finite.all():
                raise UserError("actions must be finite, got NaN or infinity")
        else:
            self._refused |= ~finite.all()
            a = torch.where(finite, a, 0.0)
        return a.clamp(-1.0, 1.0)

    def _obs(self) -> dict:
        w, p = self.walker, self.physics
        qvel = p.qvel.clamp(-w.clip_qvel, w.clip_qvel) if w.clip_qvel < np.inf else p.qvel
        parts = [p.qpos[:, w.hidden :], qvel, *([self._forces[:, 6:]] if w.contact_cost else [])]
        return {"state": torch.cat(parts, 1), "task": self._task.copy()}

    def get_state(self) -> dict[str, "Tensor | np.ndarray"]:
        """Everything that decides the future, one row per env."""
        p = self.physics
        rows = {"qpos": p.qpos, "qvel": p.qvel, "warm": p.warm, "x": self._x, "forces": self._forces}
        flags = {"steps": self._steps, "terminated": self._terminated, "truncated": self._truncated}
        return {k: x.clone() for k, x in (rows | flags).items()} | {
            "seeds": self._stream.seeds.copy(),
            "episodes": self._stream.episodes.copy(),
        }

    def set_state(self, state: dict[str, Any], mask: "np.ndarray | None" = None) -> None:
        """Restore the envs of `mask` (default: all) from `get_state()`."""
        ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        rows, p = torch.from_numpy(ids).to(self.device), self.physics
        self._x, self._forces = self._x.clone(), self._forces.clone()
        for name, x in (
            ("qpos", p.qpos),
            ("qvel", p.qvel),
            ("warm", p.warm),
            ("x", self._x),
            ("forces", self._forces),
            ("steps", self._steps),
            ("terminated", self._terminated),
            ("truncated", self._truncated),
        ):
            x[rows] = state[name].to(self.device)[rows]
        self._stream.seeds[ids], self._stream.episodes[ids] = state["seeds"][ids], state["episodes"][ids]
        self._begun = True

    def render(self) -> np.ndarray:
        """uint8 [N, 256, 256, 3] of the camera that follows the robot."""
        if self.render_mode is None:
            raise UserError("make the env with render=True to call render()")
        return self._draw(False, None)

    def studio(self, ids=None) -> np.ndarray:
        """uint8 [n, 480, 640, 3] of the envs `ids` (default: all) from the camera that follows the robot,
        with light and shadow."""
        return self._draw(True, ids)

    def _draw(self, fine: bool, ids) -> np.ndarray:
        """Pictures that the host draws of positions that it is sent."""
        if fine not in self._pictures:
            from sims.mujoco.render import Renderer

            batch, (h, w) = Batch(self.model, self.num_envs), (480, 640) if fine else (RENDER_SIZE,) * 2
            self._pictures[fine] = batch, Renderer(batch, self.model, ("track",), h, w, fine=fine)
        batch, renderer = self._pictures[fine]
        batch.bind("qpos")[:] = self.physics.qpos.cpu().numpy()
        return renderer.render(ids)["track"]

    def close_extras(self) -> None:
        for _, renderer in self._pictures.values():
            renderer.close()
