"""A robot as an env of the contract: each of N bodies does what it does, tasks of sims/mujoco say what that
is worth.

A body is anything that follows `Body`: the governed arm over a transport in robo_rl's command line. Bodies
are run one after the other, in lockstep; the starts are those of sims/mujoco, so results compare with it
start by start.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError
from robo_rl.starts import StartStream, uniforms
from robo_rl.types import ControlSpec
from sims.mujoco import model as m
from sims.mujoco.env import HOME, PROPRIOCEPTION, axes_of, state_names_of
from sims.mujoco.experts import back_out, expert_of
from sims.mujoco.kinematics import Arm
from sims.mujoco.scene_view import SceneView
from sims.mujoco.tasks import Scene, Start, Task

F = np.float32
Pose = tuple[np.ndarray, np.ndarray]  # pos [3] [m], quat [4] (w, x, y, z), in the base frame


class Scenery(Protocol):
    """What a task's rule looks at."""

    def tool(self) -> np.ndarray:
        """[3] [m]"""
        ...

    def opening(self) -> float: ...

    def object(self, name: str) -> np.ndarray:
        """[3] [m]"""
        ...


class Body(Scenery, Protocol):
    """One robot in its scene."""

    def begin(self, joints: np.ndarray, objects: dict[str, Pose]) -> None:
        """Stand still at joint angles [7] with the gripper open and the objects placed."""

    def act(self, action: np.ndarray) -> None:
        """Do an action [7], for as long as it takes."""

    def rest(self) -> None:
        """The episode is over: nothing more comes until the next begins."""

    def state(self) -> np.ndarray:
        """float32 [S], in the order of `state_names_of(task)`."""
        ...

    def pictures(self) -> dict[str, np.ndarray]:
        """`image/<view>` uint8 [h, w, 3] of every camera, as things are now."""
        ...


def bodies_of(task: Task) -> tuple[str, ...]:
    """Whose poses a robot's topics tell: those of the task's objects and of its mark."""
    return (*task.objects, *((m.GOAL,) if task.uses_goal else ()))


def poses_of(task: Task, place: Start, k: int) -> dict[str, Pose]:
    """Poses of a task's objects, and of its mark, at the k-th of some starts."""
    half = place.yaw[k] / 2
    out = {
        name: (place.centre[k, j], np.array([np.cos(half[j]), 0, 0, np.sin(half[j])]))
        for j, name in enumerate(task.objects)
    }
    return out | ({m.GOAL: (place.goal[k], np.array([1.0, 0, 0, 0]))} if task.uses_goal else {})


def told_scene(task: Task, body: Scenery, asked: int = 0) -> Scene:
    """What the robot's topics tell, as the task's rules see it: nothing of velocities."""
    column = [np.array(body.object(name), F)[:, None] for name in task.objects]
    none = np.zeros((7, 1), F)
    return Scene(
        none,
        none,
        np.array([body.opening()], F),
        np.array(body.tool(), F)[:, None],
        none,
        column,
        [],
        [none[:3]] * len(column),
        np.array(body.object(m.GOAL), F)[:, None] if task.uses_goal else none[:3],
        none[0],
        np.full(1, asked, np.int64),
    )


def succeeded(task: Task, body: Scenery, asked: int = 0) -> bool:
    """The task's own rule, from what the robot's topics tell; asked: which instruction was given."""
    return bool(task.success(told_scene(task, body, asked))[0])


class View:
    """The bodies as an expert sees them: a scene made of the observations."""

    def __init__(self, env: "ArmEnv"):
        n, s = env.num_envs, env.states.T
        column = dict(zip(state_names_of(env.task), s, strict=True))
        now, sent = Arm(n), Arm(n)
        now.forward(s[:7])
        sent.forward(s[:7] + s[14:21])  # joint targets
        self.num_envs, self.task, self.starts, self.sent = n, env.task, env.starts, sent
        pos = [np.array([b.object(name) for b in env.bodies], F).T for name in env.task.objects]
        half = [np.arctan2(column[f"{o}_sin4yaw"], column[f"{o}_cos4yaw"]) / F(8) for o in env.task.objects]
        none = np.zeros((3, n), F)
        self.scene = Scene(
            s[:7],
            s[7:14],
            column["gripper"],
            now.tcp,
            now.frame,
            pos,
            [np.stack([np.cos(h), 0 * h, 0 * h, np.sin(h)]) for h in half],
            [none] * len(pos),
            np.array([b.object(m.GOAL) for b in env.bodies], F).T if env.task.uses_goal else none,
            np.zeros(n, F),
            env.asked,
        )

    def hand_target(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the hand is being sent: position [3, N] and frame [3, 5, N]."""
        return self.sent.tcp, self.sent.frame


class ArmEnv(ControlEnv):
    """N bodies doing one task with ee_delta actions; `leave()` runs when the env is closed.

    views: cameras to observe by, of image_size x image_size pixels, beside proprioception; (): the whole
    state.
    """

    def __init__(
        self,
        task: Task,
        bodies: Sequence[Body],
        max_steps: int = 0,
        leave: Callable[[], None] = lambda: None,
        views: tuple[str, ...] = (),
        image_size: int = 64,
    ):
        n = self.num_envs = len(bodies)
        self.task, self.bodies, self.leave = task, bodies, leave
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        names = state_names_of(task)
        self._seen = PROPRIOCEPTION if views else len(names)
        self.spec = ControlSpec(
            "arm",
            task.name,
            axes_of("ee_delta"),
            m.DT * m.SUBSTEPS,
            max_steps or task.max_steps,
            names[: self._seen],
            views,
        )
        self.single_observation_space, self.observation_space = observation_spaces(
            self._seen, n, views, image_size
        )
        self.single_action_space, self.action_space = action_spaces(len(self.spec.axes), n)
        self.stream = StartStream(n)
        self.starts, self.steps, self.asked = (np.zeros(n, np.int64) for _ in range(3))
        self.states = np.zeros((n, len(names)), F)
        self.images = True  # False: steps leave the images as they are, until a step with True
        self._images = {v: np.zeros((n, image_size, image_size, 3), np.uint8) for v in views}
        self._stale = np.zeros(n, bool)
        self._scene: SceneView | None = None
        self.ready, self.terminated, self.truncated, self.success = (np.zeros(n, bool) for _ in range(4))

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs, self.ready)
        ids, starts = self.stream.due(seed, mask, starts)
        if len(ids):
            self.starts[ids] = starts
            u = uniforms(self.starts[ids], 31)
            place = self.task.place(u[:, 7:])
            self.asked[ids] = place.asked
            for k, i in enumerate(ids):
                joints = HOME + self.task.jitter * (2 * u[k, :7] - 1)
                self.bodies[i].begin(joints, poses_of(self.task, place, k))
                self.states[i] = self.bodies[i].state()
            self.steps[ids] = 0
            self.terminated[ids] = self.truncated[ids] = self.success[ids] = False
            self.ready[ids] = True
        self._look(ids)
        return self._obs(), {"success": self.success.copy()}

    def step(self, actions):
        if not self.ready.all():
            raise UserError("call reset() before step()")
        a = read_actions(actions, self.num_envs, len(self.spec.axes))
        alive = ~(self.terminated | self.truncated)
        reward = np.zeros(self.num_envs, F)
        for i in np.flatnonzero(alive).tolist():
            self.bodies[i].act(a[i])
            self.states[i] = self.bodies[i].state()
            seen = told_scene(self.task, self.bodies[i], self.asked[i])
            reward[i] = self.success[i] = self.terminated[i] = self.task.success(seen)[0]
            if self.task.failure and not self.success[i]:
                self.terminated[i] = self.task.failure(seen)[0]
        self.steps += alive
        self.truncated |= alive & ~self.terminated & (self.steps >= self.spec.max_steps)
        for i in np.flatnonzero(alive & (self.terminated | self.truncated)).tolist():
            self.bodies[i].rest()
        self._look(np.flatnonzero(alive))
        return (
            self._obs(),
            reward,
            self.terminated.copy(),
            self.truncated.copy(),
            {"success": self.success.copy()},
        )

    def expert_action(self) -> np.ndarray:
        """float32 [N, 7]: what the scripted expert does, who sees no more than the observations tell."""
        return expert_of(self.task)(View(self))

    def recovery_action(self) -> np.ndarray:
        """float32 [N, 7]: how to leave a failed attempt."""
        return back_out(View(self))

    def subtask(self) -> np.ndarray:
        """int64 [N]: how many of the task's sub-tasks are done."""
        return self.task.stage(View(self).scene).astype(np.int64)

    def studio(self, ids: Sequence[int]) -> np.ndarray:
        """uint8 [n, 480, 640, 3] of the arms `ids`: the whole workspace with light and shadow, drawn from
        what their topics told."""
        if self._scene is None:
            self._scene = SceneView(self.task, self.num_envs)
        for i in ids:
            self._scene.show_state(i, self.states[i])
        return self._scene.pictures(ids)["studio"]

    def close_extras(self, **kwargs) -> None:
        if self._scene is not None:
            self._scene.close()
        self.leave()

    def _look(self, ids: np.ndarray) -> None:
        """Take pictures of the arms `ids` and of those whose pictures are old; the others keep theirs."""
        self._stale[ids] = True
        if not self.images or not self._images:
            return
        for i in np.flatnonzero(self._stale).tolist():
            for key, pixels in self.bodies[i].pictures().items():
                self._images[key.removeprefix("image/")][i] = pixels
        self._stale[:] = False

    def _obs(self) -> dict:
        images = {f"image/{v}": x.copy() for v, x in self._images.items()}
        return {
            "state": self.states[:, : self._seen].copy(),
            "task": np.array(self.task.instructions)[self.asked],
        } | images
