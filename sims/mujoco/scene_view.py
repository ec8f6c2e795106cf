"""A task's scene drawn from where things are said to be, without physics: of an arm behind a wire, of
recorded and imagined states."""

from collections.abc import Mapping, Sequence

import numpy as np
from mujoco.batch import Batch

from sims.mujoco import model as m
from sims.mujoco.env import build_model, state_names_of
from sims.mujoco.render import Renderer
from sims.mujoco.tasks import Task

BELOW = (0.0, 0.0, -1.0)  # m, in the ground: where objects lie of which nothing is known


class SceneView:
    """n scenes of a task and cameras on them. `show` and `show_state` put things into place, `pictures`
    draws.

    fine: for people, with light and shadow, and with the view `studio` of the whole workspace; else as
    policies see them.
    """

    def __init__(
        self,
        task: Task,
        n: int = 1,
        views: Sequence[str] = ("studio",),
        height: int = 480,
        width: int = 640,
        *,
        fine: bool = True,
        threads: int = 0,
    ):
        self.task, self.model = task, build_model(task)
        self.batch = Batch(self.model, n, 1, persistent=False)
        self.batch.reset(stage=0)
        self.qpos = self.batch.bind("qpos")
        self.goal = self.batch.bind("mocap_pos") if self.model.nmocap else None
        self.renderer = Renderer(
            self.batch, self.model, tuple(views), height, width, threads=threads, fine=fine
        )
        self._columns = {name: k for k, name in enumerate(state_names_of(task))}

    def show(self, i: int, joints: np.ndarray, opening: float, objects: Mapping[str, tuple]) -> None:
        """Scene i: joint angles [7], gripper 0 closed .. 1 open, (position [3], quaternion wxyz [4]) by
        object, and of the task's mark by the name goal."""
        self.qpos[i, :7] = joints
        self.qpos[i, 7:9] = m.FINGER_OPEN * opening
        for name in self.task.objects:
            at = self._address(name)
            pos, quat = objects.get(name, (BELOW, (1, 0, 0, 0)))
            self.qpos[i, at : at + 3], self.qpos[i, at + 3 : at + 7] = pos, quat
        if self.goal is not None and m.GOAL in objects:
            self.goal[i, 0] = objects[m.GOAL][0]

    def show_state(self, i: int, state: np.ndarray) -> None:
        """Scene i as an observed state [S] of the task tells it (`state_names_of`); objects stand upright,
        for no more is known."""
        at = {name: float(state[k]) for name, k in self._columns.items()}
        hand = np.array([at[f"ee_{c}"] for c in "xyz"])
        objects = {}
        for name in self.task.objects:
            half = np.arctan2(at[f"{name}_sin4yaw"], at[f"{name}_cos4yaw"]) / 8
            objects[name] = hand + [at[f"{name}_d{c}"] for c in "xyz"], (np.cos(half), 0, 0, np.sin(half))
        self.show(i, state[:7], at["gripper"], objects)
        if self.goal is not None and self.task.uses_goal:
            # the goal is told from the first object
            first = objects[self.task.objects[0]][0] if objects else hand
            self.goal[i, 0] = first + [at[f"goal_d{c}"] for c in "xyz"]
        if self.task.uses_slide:
            self.qpos[i, -1] = at["drawer"]
            if self.goal is not None:
                self.goal[i, 0, 0] += at["drawer"]  # told as the handle, which moves with the drawer
        for name in self.task.joints:
            self.qpos[i, self._address(name)] = at[name]

    def pictures(self, ids: "Sequence[int] | None" = None) -> dict[str, np.ndarray]:
        """uint8 [n, height, width, 3] by view, of the scenes `ids` (default: all)."""
        return self.renderer.render(ids)

    def close(self) -> None:
        self.renderer.close()

    def _address(self, joint: str) -> int:
        return int(self.model.joint(joint).qposadr[0])
