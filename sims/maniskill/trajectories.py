"""Episodes in ManiSkill's own format, played again in the env that a run trains in: `trajectory.h5` beside
`trajectory.json`, of RecordEpisode, of `mani_skill.trajectory.replay_trajectory` and of its published
demonstrations.

Every observation mode of a file does, none too: what was observed is made anew. The actions are repeated from
the seed. Where that leads elsewhere (a GPU simulated it, or the seed is not known) each action is taken in
the recorded env_states before it instead: nothing drifts, but contacts begin from nothing in every step, and
is_grasped may be seen a step late.
Actions become -1 .. 1 of the same control mode. An episode ends where the env ends it, at its first success.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import read_json
from robo_rl.plugins import split_arguments
from sims.maniskill.tasks import OURS, split_task

# arguments of gymnasium.make that say how it is drawn: obs and image_size say that here
DRAWN = (
    "sensor_configs",
    "human_render_camera_configs",
    "viewer_camera_configs",
    "enable_shadow",
    "parallel_in_single_scene",
)
SAME = 1e-4  # of a state of the simulator: a seed gave the start that was recorded


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of episodes: `task` as `--task` names it, with the arguments that it was recorded with;
    `source`: who acted, "" where it does not say; `listed`: what its JSON says of each episode."""

    path: Path
    task: str
    control: str
    source: str
    listed: tuple[dict, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """An episode as it was played again: arrays of T steps, the observation after the last, what ended it;
    `start` is -1 where it was played along the recorded states; `recorded`: whether the file says that it
    succeeds, None where it says nothing."""

    state: np.ndarray  # float32[T+1, S]
    images: dict[str, np.ndarray]  # uint8[T+1, h, w, 3] of each view
    action: np.ndarray  # float32[T, A]
    reward: np.ndarray  # float32[T]
    success: bool
    terminated: bool
    start: int
    recorded: bool | None


def read_recording(path: Path, task: str = "") -> Recording:
    """What the JSON beside the file `path` says; `task`: in place of the task that it names. UserError: one
    of them is missing or malformed."""
    about = path.with_suffix(".json")
    for file in (path, about):
        if not file.is_file():
            raise UserError(f"{file} is missing: ManiSkill writes two files, NAME.h5 and NAME.json")
    said = read_json(about)
    try:
        info, listed = said["env_info"], tuple(said["episodes"])
        controls = sorted({str(e["control_mode"]) for e in listed})
        id, given = str(info["env_id"]), dict(info["env_kwargs"])
        numbers = [int(e["episode_id"]) for e in listed]
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{about} is not what ManiSkill's RecordEpisode writes ({e!r})") from None
    if not numbers:
        raise UserError(f"{about} lists no episodes")
    if len(controls) != 1:
        raise UserError(f"{about}: its episodes have several control modes ({', '.join(controls)})")
    if not task:
        kept = {k: v for k, v in given.items() if k not in OURS and k not in DRAWN}
        task = ",".join([id, *(f"{k}={_written(v)}" for k, v in kept.items())])
    split_task(task)
    return Recording(path, task, controls[0], str(said.get("source_type", "")), listed)


def open_env(recording: Recording, obs: str, reward: str, image_size: int, steps: int):
    """An env that plays episodes of at most `steps` again."""
    from sims.maniskill import _config, _require
    from sims.maniskill.gpu import ManiSkillGpuEnv

    _require()
    return ManiSkillGpuEnv(
        _config(recording.task, 1, obs, reward, recording.control, image_size, steps, False), "cpu"
    )


def open_file(path: Path):
    """The HDF5 file; UserError where it is none."""
    if importlib.util.find_spec("h5py") is None:
        raise MissingDependency("files of ManiSkill need h5py: pip install 'robo_rl[maniskill]'")
    import h5py

    try:
        return h5py.File(path, "r")
    except OSError as e:
        raise UserError(f"{path} is no HDF5 file: {e}") from None


def lengths(recording: Recording, file, chosen: np.ndarray) -> list[int]:
    """Steps of the chosen episodes; UserError where the file has not what the JSON lists."""
    out = []
    for k in chosen:
        name = f"traj_{recording.listed[k]['episode_id']}"
        if name not in file or "actions" not in file[name]:
            raise UserError(f"{recording.path} has no actions of {name}, which its JSON lists")
        out.append(len(file[name]["actions"]))
    return out


def play(env, recording: Recording, file, number: int) -> Played:
    """Episode `number` of the recording, in an env of `open_env`."""
    import torch

    said = recording.listed[number]
    group = file[f"traj_{said['episode_id']}"]
    seed = seed_of(said)
    actions = np.asarray(group["actions"], np.float32)
    states = _read(group["env_states"]) if len(group.get("env_states", ())) else None
    if states is None and seed is None:
        raise UserError(f"{recording.path}: traj_{said['episode_id']} has neither env_states nor a seed")
    if actions.ndim != 2 or actions.shape[1] != len(env.spec.axes):
        raise UserError(
            f"{recording.path}: actions of {list(actions.shape)} do not fit {recording.control} of "
            f"{recording.task}, which has {len(env.spec.axes)} numbers"
        )
    middle, half = env.middle.numpy(), env.half.numpy()
    ours = np.clip((actions - middle) / half, -1, 1).astype(np.float32)
    flags = np.asarray(group["success"]) if "success" in group else None
    recorded = said.get("success") if flags is None else bool(flags.any())
    with torch.no_grad():
        rows = None if seed is None else _act(env, seed, ours, states)
        start = -1 if seed is None else seed
        if states is not None and (rows is None or not (rows.drift < SAME or (recorded and rows.success))):
            rows, start = _act(env, seed or 0, ours, states, forced=True), -1
    if rows is None:
        raise AssertionError("neither a seed nor states")
    seen, rewards = rows.seen, rows.rewards
    arrays = {k: np.stack([o[k][0].numpy() for o in seen]) for k in seen[0] if k != "task"}
    return Played(
        state=arrays.pop("state").astype(np.float32),
        images={k.removeprefix("image/"): x for k, x in arrays.items()},
        action=ours[: len(rewards)],
        reward=np.array(rewards, np.float32),
        success=rows.success,
        terminated=rows.terminated,
        start=start,
        recorded=recorded,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """What was seen before and after each action, and how far that was from the recorded states at most."""

    seen: list[dict]
    rewards: list[float]
    terminated: bool
    success: bool
    drift: float


def _act(env, seed: int, actions: np.ndarray, states: Any, forced: bool = False) -> "_Rows | None":
    """The actions from the seed; forced: each in the recorded state before it. None: the seed gives another
    start than was recorded."""
    import torch

    from sims.maniskill import lean

    raw = env.env
    if raw.reconfiguration_freq == 0:
        lean.renew_scene(raw)  # a rebuilt scene remembers no contacts
    obs, _ = env.reset(options={"starts": np.array([seed])})
    if forced:
        raw.set_state_dict(_at(states, 0))
        env.held = None
        obs = env.seen()
    elif states is not None and _far(raw.get_state_dict(), _at(states, 0)) > SAME:
        return None
    seen, rewards, drift, terminated, success = [obs], [], 0.0, False, False
    for t, action in enumerate(actions):
        obs, reward, ended, cut, info = env.step(torch.from_numpy(action[None]))
        seen.append(obs)
        rewards.append(float(reward[0]))
        if states is not None:
            drift = max(drift, _far(raw.get_state_dict(), _at(states, t + 1)))
        terminated, success = bool(ended[0]), bool(info["success"][0])
        if terminated or bool(cut[0]):
            break
        if forced:
            raw.set_state_dict(_at(states, t + 1))
    return _Rows(seen, rewards, terminated, success, drift)


def seed_of(said: dict) -> int | None:
    """The seed that an episode began with; None where the JSON has none."""
    seed = (said.get("reset_kwargs") or {}).get("seed", said.get("episode_seed"))
    seed = seed[0] if isinstance(seed, list) and len(seed) == 1 else seed
    return int(seed) if isinstance(seed, int) and 0 <= seed < 2**32 else None


def _read(states: Any) -> Any:
    """Nested groups of arrays [T, D] as dicts of NumPy arrays."""
    if hasattr(states, "items"):
        return {k: _read(v) for k, v in states.items()}
    return np.asarray(states, np.float32)


def _at(states: Any, t: int) -> Any:
    """The state of step t, each part a tensor [1, D]."""
    import torch

    if isinstance(states, dict):
        return {k: _at(v, t) for k, v in states.items()}
    return torch.from_numpy(states[t : t + 1].copy())


def _far(a: Any, b: Any) -> float:
    """Largest difference between two nested states; infinite where one has other parts."""
    if isinstance(a, dict) or isinstance(b, dict):
        if not (isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys()):
            return np.inf
        return max((_far(a[k], b[k]) for k in a), default=0.0)
    return float((a - b).abs().max()) if a.shape == b.shape else np.inf


def _written(value: Any) -> str:
    """A value of an argument, as `plugins.split_arguments` reads it."""
    if isinstance(value, str) and split_arguments(f"x,y={value}")[1] == {"y": value}:
        return value
    return repr(value).replace(" ", "")
