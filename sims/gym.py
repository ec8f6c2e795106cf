"""Any Gymnasium id with continuous actions as a contract env: `sims.make("gym:Pendulum-v1", ...)`.

One Gymnasium env per row, stepped one after the other. A start is the seed of Gymnasium's own
`reset(seed=...)`, so it is as exact as the env's own seeding. Observations are flattened (a Dict in the order
of its keys), actions in [-1, 1] are stretched to the env's Box, and success is `info["is_success"]` or
`info["success"]` where the env reports it, from that step until the reset. The reward is the env's own; with
reward "sparse" the step that first reports success pays 1, all others 0, and it ends the episode. There is no
`get_state`: Gymnasium has no common way to take one.
"""

import contextlib
import difflib
import traceback
from collections.abc import Iterator
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import MissingDependency, UserError
from robo_rl.plugins import load_module
from robo_rl.starts import StartStream
from robo_rl.types import ActionAxis, ControlSpec

NO_SPARSE = (
    "{}, so it has no sparse reward: leave reward out; what a policy does there is recorded by "
    "robo_rl collect --policy RUN"
)
MAX_STEPS = 1000  # where the env has no limit of its own


def make_gym(
    id: str,
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
) -> "GymEnv":
    """The vector env of a Gymnasium id; the options are those of `sims.make`, of which most do not apply."""
    own_only(f"gym:{id}", obs, control, randomise, device)
    if max_steps < 0:
        raise UserError(f"max_steps must be >= 0, got {max_steps}")
    if not id:
        raise UserError("gym: needs an id after the colon, for example gym:Pendulum-v1")
    module, colon, _ = id.partition(":")
    try:
        if colon:  # Gymnasium's "module:Id": importing the module registers the id
            load_module(module, f"gym:{id}", "--sim")
        limit = max_steps or gym.spec(id.split(":")[-1]).max_episode_steps or MAX_STEPS
    except ModuleNotFoundError as e:
        raise UserError(
            f"gym:{id} needs the module {e.name!r}, which is not installed; install it with pip"
        ) from None
    except gym.error.Error:
        near = difflib.get_close_matches(id, gym.registry, n=5, cutoff=0.3)
        own = (
            "" if colon else "; an env of your own is named gym:MODULE:ID, after the module that registers it"
        )
        raise UserError(f"unknown gym id {id!r}. Nearest: {', '.join(near) or 'none'}{own}") from None
    if render and "rgb_array" not in render_modes(id):
        raise UserError(
            f"gym:{id} draws no pictures: 'rgb_array' is not among the render_modes of its metadata"
        )
    envs = []
    try:
        # an env of one's own need not know the word
        pictures = {"render_mode": "rgb_array"} if render else {}
        with said(f"gym:{id} cannot be made"):
            envs.extend(
                gym.make(id, max_episode_steps=limit, disable_env_checker=True, **pictures)
                for _ in range(num_envs)
            )
    except gym.error.DependencyNotInstalled as e:
        raise MissingDependency(f"gym:{id}: {e}") from None
    return GymEnv(id, envs, limit, reward)


def render_modes(id: str) -> list[str]:
    """What the class of a registered id says that it can draw; of a function that makes envs nothing is
    known: rgb_array."""
    with said(f"gym:{id} cannot be made"):
        made_by = gym.spec(id.split(":")[-1]).entry_point
        made_by = load_env_creator(made_by) if isinstance(made_by, str) else made_by
    return (
        getattr(made_by, "metadata", {}).get("render_modes", [])
        if isinstance(made_by, type)
        else ["rgb_array"]
    )


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """Say what the code of an env raises as one UserError: `what`, the exception, and the line of the env
    that raised it."""
    try:
        yield
    except (UserError, MissingDependency, gym.error.DependencyNotInstalled):
        raise
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise UserError(
            f"{what}: {type(e).__name__}: {' '.join(str(e).split())[:300]} ({at.filename}, line {at.lineno})"
        ) from e


def own_only(name: str, obs: str, control: str, randomise: str, device: str) -> None:
    """UserError for options of `sims.make` that an env taken as it is does not have."""
    if obs != "state":
        raise UserError(f"{name} has obs 'state' only, got {obs!r}")
    if control:
        raise UserError(f"{name} has its own control only (leave control out), got {control!r}")
    if randomise:
        raise UserError(f"{name} has no randomise options, got {randomise!r}")
    if device != "cpu":
        raise UserError(f"{name} runs on device 'cpu' only, got {device!r}")


def own_actions(name: str, space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) float64 [A] of a bounded Box of any shape, flattened; UserError for anything else."""
    if not isinstance(space, spaces.Box):
        raise UserError(
            f"{name} has {type(space).__name__} actions; only continuous (Box) actions are supported"
        )
    low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise UserError(
            f"{name} has unbounded actions ({space}); only actions with finite limits are supported"
        )
    return low, high


class GymEnv(ControlEnv):
    """N Gymnasium envs of one id; see `sims` for the contract and `make_gym` for the options."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, id: str, envs: list[gym.Env], max_steps: int, reward: str = ""):
        first = envs[0]
        space = self._space = first.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"its observation": space}
        for key, part in parts.items():
            if isinstance(part, spaces.Box) and len(part.shape) > 2:
                raise UserError(
                    f"gym:{id} observes images ({key}: {part}); only state observations are supported: leave "
                    "it out, or make a vector env with image/<view> (docs/tutorials/own_simulator.md)"
                )
        if not space.is_np_flattenable:
            raise UserError(f"gym:{id} has observations of varying size ({space}), which are not supported")
        self._low, self._high = own_actions(f"gym:{id}", first.action_space)
        self.num_envs, self._envs, self._name = len(envs), envs, f"gym:{id}"
        self.render_mode = first.render_mode
        n, size = self.num_envs, spaces.flatdim(space)
        self.single_observation_space, self.observation_space = observation_spaces(size, n)
        self.single_action_space, self.action_space = action_spaces(len(self._low), n)
        axes = tuple(
            ActionAxis(f"action{i}", "1", float(lo), float(hi), "absolute")
            for i, (lo, hi) in enumerate(zip(self._low, self._high, strict=True))
        )
        self.spec = ControlSpec("gym", id, axes, _period(first), max_steps, _names(space, size))
        self._task = np.full(n, id)
        self._stream = StartStream(n)
        self._state = np.zeros((n, size), np.float32)
        self._terminated, self._truncated, self._success = (np.zeros(n, bool) for _ in range(3))
        self.reports_success = False  # whether a step said so so far
        self._sparse = reward == "sparse"

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs)
        ids, starts = self._stream.due(seed, mask, starts)
        for i, start in zip(ids, starts, strict=True):
            with said(f"{self._name}: reset of env {i} failed"):
                x, _ = self._envs[i].reset(seed=int(start))
            self._state[i] = self._flat(x, i)
        for flag in (self._terminated, self._truncated, self._success):
            flag[ids] = False
        return self._obs(), {"success": self._success.copy()}

    def step(self, actions):
        a = read_actions(actions, self.num_envs, len(self._low))
        box = self._envs[0].action_space
        a = (self._low + 0.5 * (a + 1.0) * (self._high - self._low)).astype(box.dtype)
        reward = np.zeros(self.num_envs, np.float32)
        for i in np.flatnonzero(~(self._terminated | self._truncated)):
            with said(f"{self._name}: step of env {i} failed"):
                x, reward[i], terminated, truncated, info = self._envs[i].step(a[i].reshape(box.shape))
                self._terminated[i] = terminated
                self._truncated[i] = truncated and not terminated
                self._success[i] |= bool(info.get("is_success", info.get("success", False)))
                self.reports_success |= "is_success" in info or "success" in info
            self._state[i] = self._flat(x, int(i), over=terminated)
            if self._sparse:
                if not self.reports_success and (terminated or truncated):  # some say it at the end alone
                    raise UserError(
                        NO_SPARSE.format(
                            f"{self._name} says nothing of success (is_success or success in the info of "
                            "every step, or of the last)"
                        )
                    )
                reward[i] = self._success[i]
                self._terminated[i] |= self._success[i]
                self._truncated[i] &= not self._terminated[i]
            if not terminated and not np.isfinite(reward[i]):
                raise UserError(
                    f"{self._name}: the reward of env {i} is {reward[i]}, not finite; correct the env, or "
                    "end the episode"
                )
        return (
            self._obs(),
            reward,
            self._terminated.copy(),
            self._truncated.copy(),
            {"success": self._success.copy()},
        )

    def _flat(self, x, i: int, over: bool = False) -> np.ndarray:
        """The observation `x` of env i as float32 [S]; UserError where it is not of the observation space,
        or, in an episode that goes on, not finite."""
        with said(
            f"{self._name}: the observation of env {i} does not fit its observation_space {self._space}"
        ):
            row = np.asarray(spaces.flatten(self._space, x)).astype(np.float32)
        if row.shape != self._state[i].shape:
            raise UserError(
                f"{self._name}: the observation of env {i} has {row.size} numbers, its observation_space "
                f"{self._space} has {self._state.shape[1]}; correct the env"
            )
        if not over and not np.isfinite(row).all():
            k = int(np.flatnonzero(~np.isfinite(row))[0])
            name = self.spec.state_names[k] if self.spec.state_names else f"number {k}"
            raise UserError(
                f"{self._name}: the observation of env {i} is not finite ({name} is {row[k]}); correct the "
                "env, or end the episode"
            )
        return row

    def _obs(self) -> dict[str, np.ndarray]:
        return {"state": self._state.copy(), "task": self._task.copy()}

    def render(self) -> np.ndarray:
        """uint8 [N, h, w, 3] as each env draws itself."""
        if self.render_mode is None:
            raise UserError("make the env with render=True to call render()")
        try:
            return np.stack([np.asarray(e.render()) for e in self._envs])
        except gym.error.DependencyNotInstalled as e:
            raise MissingDependency(f"gym:{self.spec.task} cannot draw: {e}") from None

    def close_extras(self) -> None:
        for e in self._envs:
            e.close()


def _period(env: gym.Env) -> float:
    """Control period [s]: the env's `dt`, else one frame of its video, else 1."""
    dt = getattr(env.unwrapped, "dt", None)
    if isinstance(dt, (int, float)) and dt > 0:
        return float(dt)
    fps = env.metadata.get("render_fps") or 1
    return 1.0 / fps


def _names(space: spaces.Space, size: int) -> tuple[str, ...]:
    """Names of a flattened Dict's dimensions; () for a plain Box."""
    if not isinstance(space, spaces.Dict):
        return ()
    names = tuple(f"{k}{i}" for k, s in space.spaces.items() for i in range(spaces.flatdim(s)))
    return names if len(names) == size else ()
