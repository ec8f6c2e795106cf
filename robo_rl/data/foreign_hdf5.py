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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data.foreign import ENCODED, ForeignData, ForeignEpisode, with_steps
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


def kind_of(file: Any) -> str:
    """Which of them a file is, by its keys."""
    if "data" in file and any(key.startswith("demo_") for key in file["data"]):
        return "robomimic"
    if "action" in file and "observations" in file and "qpos" in file["observations"]:
        return "ACT"
    if any(re.fullmatch(r"episode_\d+", key) and "actions" in file[key] for key in file):
        return "Minari"
    if {"observations", "actions"} <= {*file} and any(key in file for key in ("terminals", "timeouts")):
        return "D4RL"
    return "HDF5"


def arrays(group: Any) -> dict[str, Any]:
    """The arrays with rows below a group, by their paths in it."""
    found: dict[str, Any] = {}

    def keep(name: str, item: Any) -> None:
        if hasattr(item, "shape") and item.shape:
            found[name] = item

    group.visititems(keep)
    return found


def row_shape(item: Any) -> tuple[int, ...]:
    """Shape of a row; `ENCODED` for bytes of any length."""
    return tuple(item.shape[1:]) if item.dtype.kind in "biuf" else ENCODED


def rows_of(item: Any) -> np.ndarray:
    """All rows; bytes of any length as a list of them."""
    if item.dtype.kind in "biuf":
        return item[()]
    out = np.empty(len(item), object)
    out[:] = [np.asarray(row, np.uint8) if not isinstance(row, bytes) else row for row in item[()]]
    return out


def recording(
    name: str, group: Any, steps: int, task: str = "", encoded: Sequence[str] = ()
) -> ForeignEpisode:
    """An episode that is a group; arrays of other lengths are none of its columns."""
    found = {key: x for key, x in arrays(group).items() if len(x) in (steps, steps + 1)}
    columns = {key: ENCODED if key in encoded else row_shape(x) for key, x in found.items()}
    return ForeignEpisode(name, steps, columns, lambda key: rows_of(found[key]), task)


def by_number(keys: Sequence[str]) -> list[str]:
    """demo_2 before demo_10."""
    return sorted(keys, key=lambda key: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", key)])


def said(attributes: Any, name: str) -> dict:
    """A JSON attribute; {} where there is none."""
    text = attributes.get(name, "")
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return parse_json(text, f"attribute {name}") if isinstance(text, str) and text else {}


def robomimic(files: list) -> ForeignData:
    episodes, kwargs, sparse = [], {}, True
    for path, file in files:
        data = file["data"]
        kwargs = said(data.attrs, "env_args").get("env_kwargs") or {}
        sparse &= not kwargs.get("reward_shaping", False)
        task = said(data.attrs, "problem_info").get("language_instruction", "")
        task = " ".join(task) if isinstance(task, list) else str(task)
        for key in by_number([k for k in data if k.startswith("demo_") and "actions" in data[k]]):
            steps = len(data[key]["actions"])
            episodes.append(recording(f"{path}: {key}", data[key], steps, task))
    episodes = with_steps("robomimic", episodes)
    columns = episodes[0].columns
    low = [key for key, shape in columns.items() if key.startswith("obs/") and len(shape) <= 1]
    state = next(
        (kept for rule in (ROBOMIMIC, LIBERO) if (kept := [k for k in low if rule.fullmatch(k)])), low
    )
    pictures = [key for key, shape in columns.items() if key.startswith("obs/") and len(shape) == 3]
    cameras = {k.removeprefix("obs/").removesuffix("_image").removesuffix("_rgb"): k for k in pictures}
    control = kwargs.get("controller_configs") or {}
    steered = str(control.get("type", "")).startswith("OSC") and control.get("control_delta", True)
    axes = columns["actions"][0] if columns["actions"] else 1
    return ForeignData(
        "robomimic",
        episodes,
        tuple(state),
        ("actions",),
        {view: key for view, key in cameras.items() if "depth" not in view},
        {key: key.replace("obs/", "next_obs/", 1) for key in columns if key.startswith("obs/")},
        reward="rewards" if "rewards" in columns else "",
        terminal="dones" if "dones" in columns else "",
        sparse=sparse,
        fps=float(kwargs.get("control_freq") or 0),
        units=f"1 delta*{axes - 1},1" if steered and axes % 7 == 0 and axes == 7 else "",
        robot=_robot(kwargs.get("robots")),
    )


def _robot(names: Any) -> str:
    return "+".join(map(str, names)) if isinstance(names, list) else str(names or "")


def act(files: list) -> ForeignData:
    episodes = []
    for path, file in files:
        compressed = [
            f"observations/images/{key}"
            for key, x in file["observations"].get("images", {}).items()
            if len(x.shape) < 4
        ]
        episodes.append(recording(str(path), file, len(file["action"]), encoded=compressed))
    columns = episodes[0].columns
    images = {key.split("/")[-1]: key for key in columns if key.startswith("observations/images/")}
    return ForeignData(
        "ACT",
        with_steps("ACT", episodes),
        ("observations/qpos",),
        ("action",),
        images,
        fps=50,
        robot="aloha" if columns["action"] == (14,) else "",
    )


def minari(files: list) -> ForeignData:
    episodes = [
        recording(f"{path}: {key}", file[key], len(file[key]["actions"]))
        for path, file in files
        for key in by_number([k for k in file if re.fullmatch(r"episode_\d+", k)])
        if "actions" in file[key]
    ]
    episodes = with_steps("Minari", episodes)
    columns = episodes[0].columns
    seen = [k for k in columns if k == "observations" or k.startswith("observations/")]
    return ForeignData(
        "Minari",
        episodes,
        tuple(k for k in seen if len(columns[k]) <= 1 and columns[k] != ENCODED),
        ("actions",),
        {k.split("/")[-1]: k for k in seen if len(columns[k]) == 3},
        reward="rewards" if "rewards" in columns else "",
        terminal="terminations" if "terminations" in columns else "",
    )


def d4rl(files: list) -> ForeignData:
    episodes: list[ForeignEpisode] = []
    for path, file in files:
        held = {key: x for key, x in file.items() if hasattr(x, "shape") and len(x.shape) >= 1}
        episodes += cut(str(path), held, len(file["actions"]))
    return flat_recordings("D4RL", episodes)


def cut(name: str, held: Mapping[str, Any], rows: int) -> list[ForeignEpisode]:
    """Episodes of arrays in which they stand one behind the other, by `terminals` and `timeouts`. A row is a
    step: what was observed after the last action is in `next_observations`, where that is there."""
    held = {key: x for key, x in held.items() if len(x) == rows and x.dtype.kind in "biuf"}
    over = np.zeros(rows, bool)
    for key in ("terminals", "timeouts"):
        over |= np.asarray(held[key][()] if key in held else over).reshape(rows, -1)[:, 0].astype(bool)
    ends = np.flatnonzero(over) + 1
    ends = np.append(ends, rows) if not len(ends) or ends[-1] < rows else ends
    columns = {key: tuple(x.shape[1:]) for key, x in held.items()}

    def reader(a: int, b: int) -> Callable[[str], np.ndarray]:
        return lambda key: np.asarray(held[key][a:b])

    starts = [0, *ends[:-1]]
    return [
        ForeignEpisode(f"{name}: episode {k}", int(b - a), columns, reader(int(a), int(b)))
        for k, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]


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
