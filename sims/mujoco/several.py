"""Several tasks of the arm as one vector env: the start of an episode says which task it is of.

    task of start s = s mod M            M tasks, in the order of `env.task_names`; the rest is as in an env
                                         of that task alone
    state           = the union of the tasks' states by name, in the order of the tasks; what a task does not
                    have is 0
                      (`env.observed` [M, S] says which entries each task has)

There is one `MujocoArmEnv` of N envs for each task. Env i of the one that it plays goes on, in the others it
is over, so that it is neither stepped nor drawn; the cost of an env is that of one task and a little for each
other one.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError
from robo_rl.starts import StartStream, task_of
from robo_rl.types import ControlSpec
from sims.mujoco.env import MujocoArmEnv

F = np.float32


def union_of(layouts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The names of the state of several tasks, from those of each."""
    return tuple(dict.fromkeys(name for layout in layouts for name in layout))


class SeveralTasksEnv(ControlEnv):
    """N arms, each of which plays one of several tasks at a time; see `sims` for the contract.

    make(task): the env of N arms of one task. `task_names`; `task_ids` int64 [N]: which one each env plays.
    """

    def __init__(self, tasks: Sequence[str], make: Callable[[str], MujocoArmEnv]):
        self.task_names = tuple(tasks)
        self.parts = [make(task) for task in tasks]
        first, n = self.parts[0], self.parts[0].num_envs
        self.num_envs, self.metadata = (
            n,
            {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]},
        )
        self.render_mode, self.render_size = first.render_mode, first.render_size
        names = union_of(part.spec.state_names for part in self.parts)
        self.columns = [
            np.array([names.index(name) for name in part.spec.state_names]) for part in self.parts
        ]
        self.observed = np.stack([np.isin(np.arange(len(names)), columns) for columns in self.columns])
        self.spec = ControlSpec(
            "mujoco",
            ",".join(self.task_names),
            first.spec.axes,
            first.spec.period,
            max(part.spec.max_steps for part in self.parts),
            names,
            first.spec.views,
        )
        self.single_observation_space, self.observation_space = observation_spaces(
            len(names), n, self.spec.views, first.image_size
        )
        self.single_action_space, self.action_space = action_spaces(len(self.spec.axes), n)
        self.stream = StartStream(n)
        self.task_ids, self.ready = np.zeros(n, np.int64), np.zeros(n, bool)
        self._rows: list[np.ndarray] = [np.zeros(0, np.int64)] * len(self.parts)  # envs of each task
        for part in self.parts:
            part.reset(options={"starts": np.zeros(n, np.int64)})
            part.truncated[:] = True

    def __repr__(self) -> str:
        return f"SeveralTasksEnv({self.spec.task!r}, num_envs={self.num_envs})"

    # ------------------------------------------------------------ the contract

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs, self.ready)
        ids, starts = self.stream.due(seed, mask, starts)
        whole, which = np.zeros(self.num_envs, np.int64), task_of(starts, len(self.task_names))
        whole[ids] = starts
        self._assign(ids, which)
        seen = [
            part.reset(options={"reset_mask": self._mask(ids[which == k]), "starts": whole})
            for k, part in enumerate(self.parts)
        ]
        self.ready[ids] = True
        return self._joined([obs for obs, _ in seen]), {
            "success": self._picked([info["success"] for _, info in seen])
        }

    def step(self, actions):
        if not self.ready.all():
            raise UserError("call reset() before step()")
        actions = read_actions(actions, self.num_envs, len(self.spec.axes))
        out = [part.step(actions) for part in self.parts]
        obs, reward, terminated, truncated, info = zip(*out, strict=True)
        return (
            self._joined(obs),
            self._picked(reward),
            self._picked(terminated),
            self._picked(truncated),
            {"success": self._picked([i["success"] for i in info])},
        )

    def get_state(self) -> dict[str, np.ndarray]:
        """Copies of the rows [N, ...] of the task that each env plays, as wide as the widest task's, and
        `task_ids`."""
        states = [part.get_state() for part in self.parts]
        out = {"task_ids": self.task_ids.copy()}
        for name, first in states[0].items():
            shape = np.max([s[name].shape[1:] for s in states], 0).astype(int) if first.ndim > 1 else ()
            out[name] = np.zeros((self.num_envs, *shape), first.dtype)
            for rows, state in zip(self._rows, states, strict=True):
                out[name][(rows, *(slice(size) for size in state[name].shape[1:]))] = state[name][rows]
        return out | {"seeds": self.stream.seeds.copy(), "episodes": self.stream.episodes.copy()}

    def set_state(self, state: dict[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        """Put back rows of `get_state()` (of this or another env of the same tasks), only those of `mask`."""
        n = self.num_envs
        mask = np.ones(n, bool) if mask is None else np.asarray(mask)
        if mask.shape != (n,) or mask.dtype != bool:
            raise UserError(f"mask must be bool of shape ({n},), got {mask.dtype} of shape {mask.shape}")
        if missing := [k for k in ("task_ids", "seeds", "episodes") if k not in state]:
            raise UserError(f"set_state needs {missing[0]!r}: pass what get_state() returned")
        ids, which = np.flatnonzero(mask), np.asarray(state["task_ids"], np.int64)
        self._assign(ids, which[ids])
        for k, part in enumerate(self.parts):
            mine = self._mask(ids[which[ids] == k])
            if mine.any():
                like = part.get_state()
                part.set_state(
                    {
                        name: state[name][(slice(None), *(slice(size) for size in row.shape[1:]))]
                        if name in state
                        else row
                        for name, row in like.items()
                    },
                    mine,
                )
        self.stream.seeds[ids], self.stream.episodes[ids] = state["seeds"][ids], state["episodes"][ids]
        self.ready[ids] = True

    @property
    def images(self) -> bool:
        """False: steps leave the images as they are, until a step with True."""
        return self.parts[0].images

    @images.setter
    def images(self, on: bool) -> None:
        for part in self.parts:
            part.images = on

    @property
    def expert_action(self) -> Callable[[], np.ndarray]:
        """() -> float32 [N, A]: what the experts of the tasks do in the present states. AttributeError: a
        task has none."""
        experts = [part.expert_action for part in self.parts]
        return lambda: self._picked([expert() for expert in experts])

    @property
    def recovery_action(self) -> Callable[[], np.ndarray]:
        """() -> float32 [N, A]: how to leave a failed attempt, towards a state from which the next may
        begin."""
        ways = [part.recovery_action for part in self.parts]
        return lambda: self._picked([way() for way in ways])

    def subtask(self) -> np.ndarray:
        """int64 [N]: how many of its task's sub-tasks each env has done."""
        return self._picked([part.subtask() for part in self.parts])

    def render(self):
        """uint8 [N, h, h, 3], h = render_size, from the front camera; needs render=True."""
        for part in self.parts:
            part.render_size = self.render_size
        return self._drawn(
            lambda part, ids: (
                part.film(("front",), self.render_size, ids)["front"] if part.render_mode else part.render()
            )
        )

    def studio(self, ids=None) -> np.ndarray:
        """uint8 [n, 480, 640, 3] of the envs `ids` (default: all): the whole workspace with light and shadow,
        for people."""
        return self._drawn(lambda part, mine: part.studio(mine), ids)

    def close_extras(self, **kwargs):
        for part in self.parts:
            part.close()

    # ------------------------------------------------------------ parts

    def _mask(self, ids: np.ndarray) -> np.ndarray:
        mask = np.zeros(self.num_envs, bool)
        mask[ids] = True
        return mask

    def _assign(self, ids: np.ndarray, which: np.ndarray) -> None:
        """From now on the envs `ids` play the tasks `which`; in the others they are over."""
        self.task_ids[ids] = which
        self._rows = [np.flatnonzero(self.task_ids == k) for k in range(len(self.parts))]
        for part, rows in zip(self.parts, self._rows, strict=True):
            left = np.ones(self.num_envs, bool)
            left[rows] = False
            part.truncated |= left & ~part.terminated

    def _picked(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Of one array [N, ...] per task the rows of the task that each env plays."""
        out = values[0].copy()
        for rows, value in zip(self._rows[1:], values[1:], strict=True):
            out[rows] = value[rows]
        return out

    def _joined(self, seen: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """One observation of all tasks'."""
        state = np.zeros((self.num_envs, len(self.spec.state_names)), F)
        for rows, columns, obs in zip(self._rows, self.columns, seen, strict=True):
            state[np.ix_(rows, columns)] = obs["state"][rows]
        words = np.empty(self.num_envs, np.result_type(*[obs["task"].dtype for obs in seen]))
        for rows, obs in zip(self._rows, seen, strict=True):
            words[rows] = obs["task"][rows]
        pictures = {f"image/{v}": self._picked([obs[f"image/{v}"] for obs in seen]) for v in self.spec.views}
        return {"state": state, "task": words} | pictures

    def _drawn(self, draw: Callable[[MujocoArmEnv, np.ndarray], np.ndarray], ids=None) -> np.ndarray:
        """Pictures of the envs `ids` (default: all), each by the part that it plays in."""
        ids = np.arange(self.num_envs) if ids is None else np.asarray(ids)
        pictures: list = [None] * len(ids)
        for k, part in enumerate(self.parts):
            at = np.flatnonzero(self.task_ids[ids] == k)
            for i, picture in zip(at, draw(part, ids[at]) if len(at) else (), strict=True):
                pictures[i] = picture
        return np.stack(pictures)
