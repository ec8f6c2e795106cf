"""HDF5 files of robomimic and LIBERO, of ACT, of Minari and D4RL as `ForeignData`; any other HDF5 file is one
episode whose keys a person names.

    robomimic  data/demo_0/{actions, rewards, dones, obs/KEY, next_obs/KEY}; attribute env_args of data, JSON
    LIBERO     the same, and problem_info with the instruction
    ACT        a file each: action, observations/{qpos, qvel, images/NAME}, compressed or not; 50 a second
    Minari     episode_0/{observations, actions, rewards, terminations, truncations}: T+1 observations
    D4RL       observations, actions, rewards, terminals, timeouts of all episodes one behind the other

Formats: https://robomimic.github.io/docs/datasets/overview.html, https://github.com/tonyzhaozh/act,
https://minari.farama.org, https://github.com/Farama-Foundation/D4RL.
"""

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data.foreign import (
    ALL,
    ENCODED,
    ForeignData,
    ForeignEpisode,
    is_picture,
    parts_until,
    with_steps,
)
from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import parse_json

SUFFIXES = (".hdf5", ".h5")
# what robomimic's and LIBERO's own low-dimensional configurations observe; of the first that is there, all
ROBOMIMIC = re.compile(r"obs/(robot\d_eef_pos|robot\d_eef_quat|robot\d_gripper_qpos|object)")
LIBERO = re.compile(r"obs/(ee_states|gripper_states)")


def open_hdf5(path: Path, opened: ExitStack) -> Any:
    """The file, until `opened` is closed."""
    if importlib.util.find_spec("h5py") is None:
        raise MissingDependency("HDF5 files need h5py: pip install 'robo_rl[formats]'")
    import h5py

    try:
        return opened.enter_context(h5py.File(path, "r"))
    except OSError as e:
        raise UserError(f"{path} is no HDF5 file: {e}") from None


def is_maniskill(path: Path) -> bool:
    """Whether it is a trajectory file of ManiSkill: NAME.json beside it, or groups traj_0, …"""
    if path.suffix not in SUFFIXES or not path.is_file() or importlib.util.find_spec("h5py") is None:
        return path.suffix == ".h5"  # its own messages say what is missing
    if path.with_suffix(".json").is_file():
        return True
    with ExitStack() as opened:
        return any(re.fullmatch(r"traj_\d+", key) for key in open_hdf5(path, opened))


def read_hdf5(paths: Sequence[Path], opened: ExitStack) -> ForeignData:
    """All episodes of files of one format."""
    allow_files(len(paths) + 128)
    files = [(path, open_hdf5(path, opened)) for path in paths]
    kinds = [kind_of(file) for _, file in files]
    if len(set(kinds)) > 1:
        other = next(k for k, kind in enumerate(kinds) if kind != kinds[0])
        raise UserError(f"{paths[0]} is of {kinds[0]}, {paths[other]} of {kinds[other]}: import them apart")
    read: dict[str, Callable[[list], ForeignData]] = {
        "robomimic": robomimic,
        "ACT": act,
        "Minari": minari,
        "D4RL": d4rl,
        "HDF5": plain,
    }
    return read[kinds[0]](files)


def allow_files(count: int) -> None:
    """Raise this process's own limit of open files where the system lets it."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft not in (resource.RLIM_INFINITY, -1) and most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def kind_of(file: Any) -> str:
    """Which of them a file is, by its keys."""
    if any(key.startswith("demo_") for key in keys_of(file.get("data"))):
        return "robomimic"
    if has_rows(file.get("action")) and "qpos" in keys_of(file.get("observations")):
        return "ACT"
    if any(re.fullmatch(r"episode_\d+", key) and "actions" in keys_of(file.get(key)) for key in file):
        return "Minari"
    if has_rows(file.get("actions")) and any(key in file for key in ("terminals", "timeouts")):
        return "D4RL"
    return "HDF5"


def keys_of(item: Any) -> list[str]:
    """Of a group; an array has none."""
    return list(item.keys()) if hasattr(item, "keys") else []


def has_rows(item: Any) -> bool:
    """Whether it is an array of numbers, or of bytes of any length."""
    return bool(getattr(item, "shape", ())) and (item.dtype.kind in "biufS" or item.dtype.hasobject)


def arrays(group: Any) -> dict[str, Any]:
    """The arrays with rows below a group, by their paths in it, behind links too."""
    found: dict[str, Any] = {}
    for key in keys_of(group):
        item = group.get(key)  # None behind a link to nothing
        if has_rows(item):
            found[key] = item
        else:
            found |= {f"{key}/{name}": x for name, x in arrays(item).items()}
    return found


def row_shape(item: Any) -> tuple[int, ...]:
    """Shape of a row; `ENCODED` for bytes of any length."""
    return tuple(item.shape[1:]) if item.dtype.kind in "biuf" else ENCODED


def rows_of(item: Any, rows: slice = ALL) -> np.ndarray:
    """Rows; bytes of any length as a list of them."""
    first, last, _ = rows.indices(len(item))
    if item.dtype.kind in "biuf":
        return item[first:last]
    out = np.empty(last - first, object)
    out[:] = [row if isinstance(row, bytes) else np.asarray(row, np.uint8) for row in item[first:last]]
    return out


@dataclass(frozen=True, slots=True)
class Columns(Mapping[str, tuple[int, ...]]):
    """Shape of a row by key, of the arrays of a group that have `steps` rows or one more. Each is looked at
    when it is asked for: files of thousands of demonstrations have a hundred thousand."""

    group: Any
    steps: int
    encoded: frozenset[str]

    def __getitem__(self, key: str) -> tuple[int, ...]:
        item: Any = self.group.get(key) if key else None
        if not has_rows(item) or len(item) not in (self.steps, self.steps + 1):
            raise KeyError(key)
        return ENCODED if key in self.encoded else row_shape(item)

    def __iter__(self) -> Iterator[str]:
        return (key for key in arrays(self.group) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def recording(
    name: str,
    group: Any,
    steps: int,
    task: str = "",
    *,
    encoded: Sequence[str] = (),
    success: bool | None = None,
) -> ForeignEpisode:
    """An episode that is a group; arrays of other lengths are none of its columns."""
    return ForeignEpisode(
        name,
        steps,
        Columns(group, steps, frozenset(encoded)),
        lambda key: rows_of(group[key]),
        task,
        lambda key, rows: rows_of(group[key], rows),
        success,
    )


def by_number(keys: Sequence[str]) -> list[str]:
    """demo_2 before demo_10."""
    return sorted(keys, key=lambda key: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", key)])


def said(item: Any, name: str) -> dict:
    """A JSON attribute of a group; {} where there is none."""
    text = item.attrs.get(name, "")
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    where = f"{item.file.filename}: attribute {name} of {item.name}"
    return parse_json(text, where) if isinstance(text, str) and text else {}


def robomimic(files: list) -> ForeignData:
    episodes, masks, kwargs, sparse = [], {}, {}, True
    for path, file in files:
        data = file["data"]
        kwargs = said(data, "env_args").get("env_kwargs") or {}
        problem = said(data, "problem_info")
        # LIBERO's files have 0 and 1 at the last step, whatever its env was asked for
        sparse &= bool(problem) or not kwargs.get("reward_shaping", False)
        task = problem.get("language_instruction", "")
        task = (" ".join(task) if isinstance(task, list) else str(task)).strip('" ')
        demos = by_number([k for k in data if k.startswith("demo_") and "actions" in keys_of(data.get(k))])
        masks = _masks(path, file, masks)
        for key in demos:
            demo = data[key]
            told = task or str(said(demo, "ep_meta").get("lang", ""))  # RoboCasa has one of each episode
            won = bool(demo.attrs["success"]) if "success" in demo.attrs else None  # Isaac Lab
            episodes.append(recording(f"{path}: {key}", demo, _rows(demo, "actions"), told, success=won))
    episodes = with_steps("robomimic", episodes)
    columns = episodes[0].columns
    if not any(key.startswith("obs/") for key in columns):
        warnings.warn(
            "these demonstrations have no observations; robomimic's dataset_states_to_obs.py makes them of "
            "the states of the simulator",
            stacklevel=2,
        )
    low = [k for k, x in columns.items() if k.startswith("obs/") and len(x) <= 1 and x != ENCODED]
    state = next(
        (kept for rule in (ROBOMIMIC, LIBERO) if (kept := [k for k in low if rule.fullmatch(k)])), low
    )
    pictures = [
        key
        for key, shape in columns.items()
        if key.startswith("obs/") and is_picture(shape) and not re.search("depth|segmentation", key)
    ]
    cameras = {k.removeprefix("obs/").removesuffix("_image").removesuffix("_rgb"): k for k in pictures}
    told = files[0][1]["data"].attrs.get("macros_image_convention", "")
    turned = (told.decode() if isinstance(told, bytes) else told) == "opengl"
    return ForeignData(
        "robomimic",
        episodes,
        tuple(state),
        ("actions",) if "actions" in columns else (),
        cameras,
        {key: key.replace("obs/", "next_obs/", 1) for key in columns if key.startswith("obs/")},
        reward="rewards" if "rewards" in columns else "",
        terminal="dones" if "dones" in columns else "",
        sparse=sparse,
        fps=float(kwargs.get("control_freq") or 0),
        units=steered_units(kwargs.get("controller_configs"), episodes[0]),
        robot=_robot(kwargs.get("robots")),
        masks=masks,
        notes=dict.fromkeys(cameras.values(), "upside down: --pictures flip") if turned else {},
    )


def _rows(group: Any, key: str) -> int:
    """Steps of an action that is an array, or a group of them."""
    item = group.get(key)
    lengths = [len(item)] if has_rows(item) else [len(x) for x in arrays(item).values()]
    return min(lengths, default=0)


def _masks(path: Path, file: Any, masks: dict) -> dict[str, tuple[str, ...]]:
    """Names of episodes by the lists of the file (mask/train, …), behind those of other files."""
    out = dict(masks)
    for name, item in arrays(file.get("mask")).items():
        if item.dtype.kind in "SO":
            keys = [x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in item[()]]
            out[name] = (*out.get(name, ()), *(f"{path}: {key}" for key in keys))
    return out


def steered_units(configs: Any, first: ForeignEpisode) -> str:
    """Units of the commands of robosuite's OSC_POSE: steps of -1 to 1, or poses; "" of other controllers.

    configs: {type, control_delta} of robosuite 1.4, of all arms or a list of one each;
    {body_parts: {[arms:] {right: {type, input_type}}}} of 1.5.
    """
    arms = _controllers(configs)
    shape = first.columns.get("actions", ())
    if not arms or len(shape) != 1 or shape[0] % 7 or any(arm.get("type") != "OSC_POSE" for arm in arms):
        return ""
    deltas = {
        arm["input_type"] == "delta" if "input_type" in arm else bool(arm.get("control_delta", True))
        for arm in arms
    }
    # Diffusion Policy writes poses into files whose env_args say steps
    if deltas == {True} and np.abs(first.read("actions")).max() > 1 + 1e-6:
        return ""
    said = {True: "1 delta*6,1", False: "m*3,rad*3,1"}
    return ",".join([said[deltas.pop()]] * (shape[0] // 7)) if len(deltas) == 1 else ""


def _controllers(configs: Any) -> list[dict]:
    """Of every arm."""
    if isinstance(configs, list):
        return [arm for each in configs for arm in _controllers(each)]
    if not isinstance(configs, dict):
        return []
    parts = configs.get("body_parts") or configs.get("body_parts_controller_configs")
    if not isinstance(parts, dict):
        return [configs]
    parts = parts.get("arms") or {side: parts[side] for side in ("right", "left") if side in parts}
    return [arm for arm in parts.values() if isinstance(arm, dict)]


def _robot(names: Any) -> str:
    return "+".join(map(str, names)) if isinstance(names, list) else str(names or "")


def act(files: list) -> ForeignData:
    episodes = []
    for path, file in files:
        stored = arrays(file["observations"].get("images"))
        compressed = [f"observations/images/{key}" for key, x in stored.items() if len(x.shape) < 4]
        episodes.append(recording(str(path), file, len(file["action"]), encoded=compressed))
    episodes = with_steps("ACT", episodes)
    columns = episodes[0].columns
    images = {key.split("/")[-1]: key for key in columns if key.startswith("observations/images/")}
    aloha = columns["action"] == (14,)
    driven = aloha and columns.get("base_action") == (2,)  # Mobile ALOHA learns both
    return ForeignData(
        "ACT",
        episodes,
        ("observations/qpos",),
        ("action", "base_action") if driven else ("action",),
        images,
        fps=50,
        units="rad*6,1,rad*6,1,m/s rate,rad/s rate" if driven else "",
        robot="aloha" if aloha else "",
    )


def minari(files: list) -> ForeignData:
    episodes = [
        recording(f"{path}: {key}", file[key], _rows(file[key], "actions"))
        for path, file in files
        for key in by_number([k for k in file if re.fullmatch(r"episode_\d+", k)])
        if "actions" in keys_of(file.get(key))
    ]
    episodes = with_steps("Minari", episodes)
    columns = episodes[0].columns
    seen = [k for k in columns if k == "observations" or k.startswith("observations/")]
    return ForeignData(
        "Minari",
        episodes,
        tuple(k for k in seen if len(columns[k]) <= 1 and columns[k] != ENCODED),
        tuple(k for k in columns if k == "actions" or k.startswith("actions/")),
        {k.split("/")[-1]: k for k in seen if len(columns[k]) == 3 and is_picture(columns[k])},
        reward="rewards" if "rewards" in columns else "",
        terminal="terminations" if "terminations" in columns else "",
        success="infos/success" if "infos/success" in columns else "",
    )


def d4rl(files: list) -> ForeignData:
    episodes: list[ForeignEpisode] = []
    for path, file in files:
        episodes += cut(str(path), arrays(file), len(file["actions"]))
    return flat_recordings("D4RL", episodes)


def cut(name: str, held: Mapping[str, Any], rows: int) -> list[ForeignEpisode]:
    """Episodes of arrays in which they stand one behind the other, by `terminals` and `timeouts`. A row is a
    step: what was observed after the last action is in `next_observations`, where that is there."""
    held = {key: x for key, x in held.items() if x.shape and x.dtype.kind in "biuf"}
    if short := [
        key
        for key in ("observations", "terminals", "timeouts")
        if len(held.get(key, held["actions"])) != rows
    ]:
        raise UserError(f"{name}: {short[0]} has {len(held[short[0]])} rows for {rows} actions")
    held = {key: x for key, x in held.items() if len(x) == rows}
    over = np.zeros(rows, bool)
    for key in ("terminals", "timeouts"):
        over |= (
            np.asarray(held[key][()] if key in held else over)
            .reshape(rows, -1 if rows else 1)[:, 0]
            .astype(bool)
        )
    ends = np.flatnonzero(over) + 1
    ends = np.append(ends, rows) if not len(ends) or ends[-1] < rows else ends
    columns = {key: tuple(x.shape[1:]) for key, x in held.items()}
    return parts_until(held, name, ends, columns)


def flat_recordings(format: str, episodes: list[ForeignEpisode]) -> ForeignData:
    """Of D4RL's keys."""
    episodes = with_steps(format, episodes)
    columns = episodes[0].columns
    pictures = len(columns.get("observations", ())) == 3
    return ForeignData(
        format,
        episodes,
        () if pictures else tuple(k for k in ("observations",) if k in columns),
        ("actions",) if "actions" in columns else (),
        {"front": "observations"} if pictures else {},
        {"observations": "next_observations"},
        reward="rewards" if "rewards" in columns else "",
        # alone they say where an episode ends (OGBench), not that its task ended it
        terminal="terminals" if {"terminals", "timeouts"} <= {*columns} else "",
    )


def plain(files: list) -> ForeignData:
    """A file is an episode, as long as most of its arrays."""
    episodes = []
    for path, file in files:
        found = arrays(file)
        if not found:
            raise UserError(f"{path} holds no arrays")
        lengths, counts = np.unique([len(x) for x in found.values()], return_counts=True)
        steps = int(lengths[np.argmax(counts)])
        columns = {key: row_shape(x) for key, x in found.items() if len(x) in (steps, steps + 1)}
        encoded = [k for k, shape in columns.items() if len(shape) == 1 and "image" in k and shape[0] > 4096]
        episodes.append(recording(str(path), file, steps, encoded=encoded))
    return ForeignData("HDF5", with_steps("HDF5", episodes))
