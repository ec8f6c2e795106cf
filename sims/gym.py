"""Any Gymnasium env with continuous actions as a contract env: `sims.make("gym:Pendulum-v1", ...)`.

One Gymnasium env per row, stepped one after the other. A start is the seed of Gymnasium's own
`reset(seed=...)`, so it is as exact as the env's own seeding. Observations are flattened (a Dict in the order
of its keys), with obs "rgb" pictures among them are views (`sims.gym_obs`), actions in [-1, 1] are stretched
to the env's Box, and success is `info["is_success"]` or `info["success"]` where the env reports it, from that
step until the reset. The reward is the env's own; with reward "sparse" the step that first reports success
pays 1, all others 0, and it ends the episode. An env whose class, or a wrapper, has `expert_action()`, which
returns an action of its Box, has an expert. The instruction is its `task_description` after a reset, else the
id. There is no `get_state`: Gymnasium has no common way to take one.
"""

import contextlib
import difflib
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from robo_rl import plugins
from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import MissingDependency, UserError
from robo_rl.plugins import load_module, split_arguments
from robo_rl.starts import StartStream
from robo_rl.types import ActionAxis, ControlSpec
from sims import gym_worker
from sims.elsewhere import has_module
from sims.gym_obs import GymObservation
from sims.gym_remote import RemoteEnvs
from sims.mujoco.gl import set_mujoco_gl

NO_SPARSE = (
    "{}, so it has no sparse reward: take what it pays (--reward dense); what a policy does there is "
    "recorded by robo_rl collect --policy RUN"
)
SLOW = 1.0  # step of all envs [s]
MAX_STEPS = 1000  # where the env has no limit of its own
ELSEWHERE = ", or, where another Python has it, end the name of the sim with ,python=PATH"
SUCCESS = ("is_success", "success")  # what the info of a step calls success, the first that is there
OURS = {"render_mode": "--video", "max_episode_steps": "--max-steps"}  # arguments of gymnasium.make, set here
OLDER = r"values to unpack|is not iterable|unexpected keyword argument '(seed|options)'"
INTERFACE = (
    "reset(seed=…, options=…) must return (obs, info), and step (obs, reward, terminated, truncated, info): "
    "envs of Gym before 0.26 differ"
)


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
    """The vector env of "[MODULE:]ID[,argument=value…]": a registered id, or an env class, or a function that
    makes one, of the module; the arguments are those of `gymnasium.make`, `python`: another Python that steps
    the envs (`gym_remote`), and `success`: what the info of a step calls success. The options are those of
    `sims.make`, of which most do not apply."""
    name = f"gym:{id}"
    own_only(name, "state", control, randomise, device)
    if max_steps < 0:
        raise UserError(f"max_steps must be >= 0, got {max_steps}")
    if not id:
        raise UserError("gym: needs an id after the colon, for example gym:Pendulum-v1")
    known, arguments = split_arguments(id)
    for key in OURS.keys() & arguments:
        raise UserError(f"{name}: {key} is set by {OURS[key]}")
    told_by = (str(arguments.pop("success")),) if "success" in arguments else SUCCESS
    if python := str(arguments.pop("python", "")):
        remote = RemoteEnvs(name, python, known, num_envs, max_steps, MAX_STEPS, render, told_by, arguments)
        try:
            seen = GymObservation(name, remote.envs[0].observation_space, obs, image_size)
            local = re.sub(",python=[^,]*", "", id)
            return GymEnv(local, remote.envs, remote.limit, seen, reward, told_by, remote)
        except BaseException:
            remote.close()
            raise
    spec = find_spec(known)
    limit = max_steps or spec.max_episode_steps or MAX_STEPS
    if render:  # an env of one's own need not know the word
        with said(f"{name} cannot be made"):
            if not gym_worker.draws(spec.entry_point):
                raise UserError(f"{name}: {gym_worker.NO_PICTURES}")
        arguments["render_mode"] = "rgb_array"
    try:
        with said(f"{name} cannot be made"):
            settings = dict(arguments, max_episode_steps=limit, disable_env_checker=True)
            envs = gym_worker.made(lambda: gym.make(spec, **settings), num_envs)
    except gym.error.DependencyNotInstalled as e:
        raise MissingDependency(f"{name}: {e}") from None
    except UserError as e:
        if isinstance(e.__cause__, TypeError):
            raise UserError(f"{e}; arguments of gymnasium.make follow the id: gym:ID,radius=0.3") from e
        raise
    seen = GymObservation(name, envs[0].observation_space, obs, image_size)
    return GymEnv(id, envs, limit, seen, reward, told_by)


def find_spec(id: str) -> EnvSpec:
    """What Gymnasium has registered as "[MODULE:]ID", or a spec of the class or function ID of the module. An
    unknown "NAME/ID" is looked for in a module NAME, as packages do: gym_pusht/PushT-v0."""
    module, colon, rest = id.rpartition(":")
    namespace, slash, _ = rest.rpartition("/")
    if slash and not colon and rest not in gym.registry and has_module(namespace):
        module = namespace
    found = None
    try:
        if module:  # Gymnasium's "module:Id": importing the module registers the id
            before = set(gym.registry)
            set_mujoco_gl()
            found = load_module(module, f"gym:{id}", "--sim", ELSEWHERE)
        if callable(made_by := getattr(found, rest, None)) and rest not in gym.registry:
            if isinstance(made_by, type) and issubclass(made_by, VectorEnv):
                raise vector_env(id, module)
            return EnvSpec(rest, entry_point=cast("Callable[..., gym.Env]", made_by))
        if (spec := gym.spec(rest)).entry_point is None:
            raise vector_env(id, module)
        return spec
    except gym.error.Error:
        if found is None:
            near = difflib.get_close_matches(rest, gym.registry, n=5, cutoff=0.3)
            raise UserError(
                f"unknown gym id {id!r}. Nearest: {', '.join(near) or 'none'}; an env of your own or of "
                "another package is named gym:MODULE:ID, after the module that registers it or has its class"
            ) from None
        own = [n for n, v in vars(found).items() if isinstance(v, type) and issubclass(v, gym.Env)]
        own = [i for i, s in gym.registry.items() if i not in before or _is_of(s, module)] + own
        near = difflib.get_close_matches(rest, own, n=5, cutoff=0.0)
        raise UserError(
            f"unknown gym id {id!r}: {module} registers no {rest!r} and has no class of it. "
            + (f"Nearest: {', '.join(f'gym:{module}:{n}' for n in near)}" if near else "It has no env at all")
        ) from None


def vector_env(id: str, module: str) -> UserError:
    """What is said of an id or class of many envs in one."""
    return UserError(
        f"gym:{id} is a vector env: make it in a function, and say --sim {module or 'MODULE'}:NAME"
    )


def _is_of(spec: EnvSpec, module: str) -> bool:
    made_by = spec.entry_point
    return spec.namespace == module or (
        made_by if isinstance(made_by, str) else getattr(made_by, "__module__", "")
    ).startswith(module)


@contextlib.contextmanager
def said(what: str | Callable[[], str]) -> Iterator[None]:
    """`plugins.said` of what the code of an env raises, and what Gymnasium asks of it where it looks like an
    env of the older Gym."""
    try:
        with plugins.said(what, passed=(gym.error.DependencyNotInstalled,)):
            yield
    except UserError as e:
        if re.search(OLDER, str(e)):
            raise UserError(f"{e}. {INTERFACE}") from e
        raise


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
        remedy = "; a gymnasium.ActionWrapper can make them of a Box" if name.startswith("gym:") else ""
        raise UserError(
            f"{name} has {type(space).__name__} actions; only continuous (Box) actions are supported{remedy}"
        )
    low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise UserError(
            f"{name} has unbounded actions ({space}); only actions with finite limits are supported: give "
            "the Box the limits within which the env acts on them"
        )
    return low, high


class GymEnv(ControlEnv):
    """N Gymnasium envs of one id; see `sims` for the contract and `make_gym` for the options."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}

    truncates_early = True  # an env may end an episode by itself, before the limit of steps
    expert_remedy = "give the env a method expert_action(), which returns an action of its action_space"

    def __init__(
        self,
        id: str,
        envs: Sequence[gym.Env],
        max_steps: int,
        seen: GymObservation,
        reward: str = "",
        told_by: tuple[str, ...] = SUCCESS,
        remote: RemoteEnvs | None = None,
    ):
        first, self._remote, self._told_by = envs[0], remote, told_by
        self._low, self._high = own_actions(f"gym:{id}", first.action_space)
        self.num_envs, self._envs, self._name, self._seen = len(envs), envs, f"gym:{id}", seen
        self.render_mode = first.render_mode
        n = self.num_envs
        views = tuple(seen.views)
        self.single_observation_space, self.observation_space = observation_spaces(
            seen.size, n, views, seen.image_size
        )
        self.single_action_space, self.action_space = action_spaces(len(self._low), n)
        axes = tuple(
            ActionAxis(f"action{i}", "1", float(lo), float(hi), "absolute")
            for i, (lo, hi) in enumerate(zip(self._low, self._high, strict=True))
        )
        self.spec = ControlSpec("gym", id, axes, _period(first), max_steps, seen.names, views)
        self._task = np.full(n, id)
        self._stream = StartStream(n)
        self._state = np.zeros((n, seen.size), np.float32)
        self._pictures = {
            f"image/{v}": np.zeros((n, seen.image_size, seen.image_size, 3), np.uint8) for v in views
        }
        self._terminated, self._truncated, self._success = (np.zeros(n, bool) for _ in range(3))
        self.reports_success: bool | None = None  # None: no step said so, and no episode ended, so far
        self.info_flags: tuple[str, ...] = ()  # what is true or false in the info of an env that does not
        self._sparse, self._calls = reward == "sparse", 0
        self._room = gym_worker.Room(n)  # pictures are often set up by the first reset
        self.describes_task = first.has_wrapper_attr("task_description")
        if first.has_wrapper_attr("expert_action"):
            self.expert_action = self._expert_action

    def reset(self, *, seed=None, options=None):
        self._require_open()
        mask, starts = read_reset(seed, options, self.num_envs)
        ids, starts = self._stream.due(seed, mask, starts)
        i, seen = 0, []
        with said(lambda: f"{self._name}: reset of env {i} failed"):
            if self._remote is not None and len(ids):
                self._remote.ahead("reset", np.asarray(ids), np.asarray(starts, np.int64))
            for i, start in zip(ids, starts, strict=True):
                x, _ = self._envs[i].reset(seed=int(start))
                seen.append(x)
                self._room.look(i)
            if self.describes_task:
                told = self._task.tolist()
                for i in ids:
                    told[i] = str(self._envs[i].get_wrapper_attr("task_description"))
                self._task = np.array(told)
        for flag in (self._terminated, self._truncated, self._success):
            flag[ids] = False
        self._read(np.asarray(ids), seen)
        return self._obs(), {"success": self._success.copy()}

    def step(self, actions):
        self._require_open()
        a = read_actions(actions, self.num_envs, len(self._low))
        box = self._envs[0].action_space
        a = (self._low + 0.5 * (a + 1.0) * (self._high - self._low)).astype(box.dtype)
        a = a.reshape(self.num_envs, *(box.shape or ()))
        reward = np.zeros(self.num_envs, np.float32)
        live = np.flatnonzero(~(self._terminated | self._truncated))
        i, seen, info, begin = 0, [], {}, time.perf_counter()
        with said(lambda: f"{self._name}: step of env {i} failed"):  # one for all: it costs as much as a step
            if self._remote is not None and len(live):
                self._remote.ahead("step", live, a[live])
            for i in live.tolist():
                x, paid, terminated, truncated, info = self._envs[i].step(a[i])
                reward[i] = paid if isinstance(paid, float) else np.asarray(paid).item()
                self._terminated[i] = terminated
                self._truncated[i] = truncated
                for name in self._told_by:
                    if name in info:
                        self._success[i] |= bool(info[name])
                        self.reports_success = True
                        break
                seen.append(x)
        self._truncated &= ~self._terminated
        self._tell_slow(len(live), time.perf_counter() - begin)
        self._read(live, seen)
        if not np.isfinite(reward).all() and (bad := ~self._terminated & ~np.isfinite(reward)).any():
            i = int(bad.argmax())
            raise UserError(
                f"{self._name}: the reward of env {i} is {reward[i]}, not finite; correct the env, or end "
                "the episode"
            )
        if self.reports_success is None and (self._terminated | self._truncated)[live].any():
            self.reports_success = False  # some say it at the end alone
            flags = (k for k, v in info.items() if np.asarray(v).dtype == bool)
            self.info_flags = tuple(str(k) for k in flags if k != "TimeLimit.truncated")
            if self._told_by != SUCCESS:
                raise UserError(
                    f"{self._name}: success={self._told_by[0]}: the info of no step of an episode has it; "
                    f"what is true or false in the last one: {', '.join(self.info_flags) or 'nothing'}"
                )
        if self._sparse:
            if self.reports_success is False:
                raise UserError(
                    NO_SPARSE.format(
                        f"{self._name} says nothing of success (is_success or success in the info of every "
                        "step, or of the last)"
                    )
                )
            reward = np.zeros(self.num_envs, np.float32)
            reward[live] = self._success[live]
            self._terminated |= self._success
            self._truncated &= ~self._terminated
        return (
            self._obs(),
            reward,
            self._terminated.copy(),
            self._truncated.copy(),
            {"success": self._success.copy()},
        )

    def taken_outside(self) -> tuple[int, int]:
        """(bytes of the process of another Python without its envs, bytes that each of them takes); (0, 0) of
        envs in this process."""
        if self._remote is None:
            return 0, 0
        before, each = self._remote.ask("taken")
        return int(before), int(each)

    def _tell_slow(self, count: int, seconds: float) -> None:
        """Say once, of the second step, that `count` envs one after the other took very long."""
        self._calls += 1
        if self._calls == 2 and seconds > SLOW:
            warnings.warn(
                f"{self._name}: a step of {count} envs, one after the other, took {seconds:.1f} s; with "
                "--workers N --envs N they are stepped by N processes, beside each other",
                stacklevel=2,
            )

    def _expert_action(self) -> np.ndarray:
        """float32 [N, A] in [-1, 1]: what the `expert_action()` of each env says, 0 of one that is over."""
        out, i = np.zeros((self.num_envs, len(self._low))), 0
        with said(lambda: f"{self._name}: expert_action of env {i} failed"):
            for i in np.flatnonzero(~(self._terminated | self._truncated)).tolist():
                told = np.asarray(self._envs[i].get_wrapper_attr("expert_action")(), np.float64).reshape(-1)
                if told.shape != self._low.shape or not np.isfinite(told).all():
                    raise ValueError(f"it must return {len(self._low)} finite numbers, got {told}")
                out[i] = 2 * (told - self._low) / (self._high - self._low) - 1
        return out.clip(-1, 1).astype(np.float32)

    def _read(self, ids: np.ndarray, seen: list[Any]) -> None:
        """Take over the observations `seen` of the envs `ids`; UserError where one is not of the observation
        space, or, in an episode that goes on, not finite."""
        if not seen:
            return
        self._state[ids] = rows = self._seen.states(ids, seen)
        bad = ~np.isfinite(rows).all(1) & ~self._terminated[ids]
        if bad.any():
            i, row = ids[bad][0], rows[bad][0]
            k = int(np.flatnonzero(~np.isfinite(row))[0])
            name = self.spec.state_names[k] if self.spec.state_names else f"number {k}"
            raise UserError(
                f"{self._name}: the observation of env {i} is not finite ({name} is {row[k]}); correct the "
                "env, or end the episode"
            )
        for key, pictures in self._seen.pictures(ids, seen):
            self._pictures[key][ids] = pictures

    def _obs(self) -> dict[str, np.ndarray]:
        pictures = {k: v.copy() for k, v in self._pictures.items()}
        return {"state": self._state.copy(), **pictures, "task": self._task.copy()}

    def render(self) -> np.ndarray:
        """uint8 [N, h, w, 3] as each env draws itself; pictures of several cameras side by side."""
        if self.render_mode is None:
            raise UserError("make the env with render=True to call render()")
        try:
            with said(f"{self._name} cannot draw"):
                pictures = np.stack([np.asarray(e.render()) for e in self._envs])
        except gym.error.DependencyNotInstalled as e:
            raise MissingDependency(f"gym:{self.spec.task} cannot draw: {e}") from None
        if pictures.ndim == 5:
            pictures = np.concatenate(list(pictures.swapaxes(0, 1)), axis=2)
        if pictures.ndim != 4 or pictures.shape[3] != 3 or pictures.dtype != np.uint8:
            raise UserError(
                f"{self._name} cannot draw: render() must give a picture uint8 [h, w, 3], got "
                f"{pictures.dtype} {list(pictures.shape[1:])}"
            )
        return pictures

    def _require_open(self) -> None:
        if self.closed:
            raise UserError(f"{self._name}: this env is closed; make another")

    def close_extras(self) -> None:
        for e in self._envs:
            e.close()


def _period(env: gym.Env) -> float:
    """Control period [s]: of the rate of control, where the env or a wrapper tells one [1/s] (its `dt` may be
    a step of physics then), else its `dt`, else one frame of its video, else 1."""
    for name in ("control_freq", "control_hz"):
        rate = gym_worker.attribute(env, name)
        if isinstance(rate, (int, float)) and rate > 0:
            return 1.0 / rate
    dt = gym_worker.attribute(env, "dt")
    if isinstance(dt, (int, float)) and dt > 0:
        return float(dt)
    fps = env.metadata.get("render_fps") or 1
    return 1.0 / fps
