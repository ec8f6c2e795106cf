"""Zarr archives of Diffusion Policy, .npz files of OGBench or D4RL, and arrays in memory as `ForeignData`.

    Diffusion Policy   data/{action, state, img, KEY}, meta/episode_ends (rows at which episodes end)
    .npz               observations, actions, terminals[, rewards, next_observations, timeouts]

A Zarr archive is a folder or a .zip of one. Formats: https://github.com/real-stanford/diffusion_policy
(replay_buffer.py), https://github.com/seohongpark/ogbench.
"""

import importlib.util
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data.foreign import ForeignData, ForeignEpisode, is_picture, parts_until, with_steps
from robo_rl.data.foreign_hdf5 import cut, flat_recordings
from robo_rl.errors import MissingDependency, UserError, plural
from robo_rl.files import require_memory


def is_zarr(path: Path) -> bool:
    if path.is_dir():
        return (path / ".zgroup").is_file() or (path / "zarr.json").is_file()
    return path.suffixes[-2:] == [".zarr", ".zip"]


def read_zarr(paths: Sequence[Path], opened: ExitStack) -> ForeignData:
    """All episodes of replay buffers of Diffusion Policy."""
    if importlib.util.find_spec("zarr") is None:
        raise MissingDependency("Zarr archives need zarr: pip install 'robo_rl[formats]'")
    episodes: list[ForeignEpisode] = []
    for path in paths:
        root = _open(path, opened)
        try:
            ends = np.asarray(root["meta/episode_ends"][:], np.int64)
            held = dict(root["data"].arrays())
        except (KeyError, ValueError, TypeError, AttributeError, OSError, RuntimeError) as e:
            if "imagecodecs" in str(e):
                raise MissingDependency(
                    f"pictures of {path} need imagecodecs: pip install imagecodecs"
                ) from None
            raise UserError(
                f"{path} is no replay buffer of Diffusion Policy, with data/ and meta/episode_ends ({e})"
            ) from None
        rows = int(ends[-1]) if len(ends) else 0
        short = [key for key, x in held.items() if x.shape[0] < rows]
        if short or (np.diff(ends, prepend=0) < 0).any():
            raise UserError(f"{path}: meta/episode_ends do not fit {short[0] if short else 'themselves'}")
        columns = {key: tuple(map(int, x.shape[1:])) for key, x in held.items()}
        episodes += parts_until(held, str(path), ends, columns)
    episodes = with_steps("Diffusion Policy", episodes)
    columns = episodes[0].columns
    pictures = [key for key, shape in columns.items() if is_picture(shape)]
    low = [key for key, shape in columns.items() if key not in pictures and key != "action"]
    return ForeignData(
        "Diffusion Policy",
        episodes,
        ("state",) if "state" in low else tuple(low),
        ("action",) if "action" in columns else (),
        {key.removesuffix("_image").removesuffix("_rgb"): key for key in pictures},
    )


def _open(path: Path, opened: ExitStack) -> Any:
    import zarr
    from zarr.storage import ZipStore

    if importlib.util.find_spec("imagecodecs") is not None:  # UMI's pictures
        importlib.import_module("imagecodecs.numcodecs").register_codecs(verbose=False)
    try:
        if path.is_file():
            store = opened.enter_context(ZipStore(path, mode="r"))
            return zarr.open_group(store, mode="r")
        return zarr.open_group(path, mode="r")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        raise UserError(f"{path} is no Zarr archive: {e}") from None


def read_npz(paths: Sequence[Path], opened: ExitStack) -> ForeignData:
    """All episodes of .npz files that have D4RL's keys."""
    episodes: list[ForeignEpisode] = []
    for path in paths:
        try:
            file = opened.enter_context(np.load(path, allow_pickle=False))
            require_memory(
                str(path),
                sum(member.file_size for member in file.zip.infolist()),
                "arrays of .npz are read whole; give the machine more memory",
            )
            held = {key: file[key] for key in file.files}
        except (OSError, EOFError, ValueError, AttributeError, zlib.error, zipfile.BadZipFile) as e:
            raise UserError(f"{path} is no file of arrays: {e}") from None
        if "actions" not in held or held["actions"].ndim < 1:
            raise UserError(
                f"{path} has no actions, it has {', '.join(sorted(held)[:8])}; observations, actions and "
                "terminals are read"
            )
        tell_uncut(str(path), held)
        episodes += cut(str(path), held, len(held["actions"]))
    return flat_recordings("D4RL", episodes)


def tell_uncut(name: str, held: Mapping[str, Any]) -> None:
    """A warning of arrays that do not say where episodes end."""
    if not {"terminals", "timeouts"} & {*held}:
        warnings.warn(
            f"{name} has neither terminals nor timeouts, so its {plural(len(held['actions']), 'row')} are "
            "one episode",
            stacklevel=2,
        )


def read_arrays(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> ForeignData:
    """Arrays in memory with D4RL's keys: those of all episodes one behind the other, or a mapping for each
    episode, where `task` may be its instruction, `success` whether it succeeded, and an array may have a row
    more than there are actions. UserError: no actions, or something else than arrays."""
    together = isinstance(given, Mapping)
    episodes: list[ForeignEpisode] = []
    for k, said in enumerate([given] if together else given):
        name = "the arrays" if together else f"episode {k}"
        if not isinstance(said, Mapping) or "actions" not in said:
            has = f"has {', '.join(map(str, said))}" if isinstance(said, Mapping) else f"is {type(said)}"
            raise UserError(f"{name} must be a dict of arrays, actions [T, A] among them; it {has}")
        try:
            held = {key: np.asarray(x) for key, x in said.items()}
        except (
            ValueError,
            TypeError,
            RuntimeError,
        ) as e:  # rows of several lengths, a tensor with a gradient
            raise UserError(f"{name}: {e}") from None
        if not held["actions"].ndim:
            raise UserError(f"{name}: actions must be [T, A], got {held['actions']}")
        if together:
            tell_uncut(name, held)
            episodes += cut(name, held, len(held["actions"]))
        else:
            episodes.append(_episode(name, held))
    return flat_recordings("arrays", episodes)


def _episode(name: str, held: Mapping[str, np.ndarray]) -> ForeignEpisode:
    """The arrays of one episode."""
    steps = len(held["actions"])
    told = held.get("success", np.zeros(1))
    return ForeignEpisode(
        name,
        steps,
        {key: x.shape[1:] for key, x in held.items() if x.shape},
        lambda key: held[key],
        str(held.get("task", "")),
        success=bool(told) if not told.shape else None,
    )
