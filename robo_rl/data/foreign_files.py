"""Which reader reads which file."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from robo_rl.data.foreign import ForeignData, ImportChoice, choose_keys
from robo_rl.data.foreign_arrays import is_zarr, read_npz, read_zarr
from robo_rl.data.foreign_bag import is_bag, read_bags
from robo_rl.data.foreign_hdf5 import SUFFIXES, by_number, read_hdf5
from robo_rl.data.foreign_rlds import is_rlds, read_rlds
from robo_rl.errors import UserError, quoted

READ = (
    "HDF5 (.hdf5, .h5), Zarr (a folder or .zarr.zip), .npz, RLDS (a folder with features.json), bags (a "
    "folder of rosbag2, .mcap, .db3, .bag)"
)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files, those of a folder in order of their numbers. UserError: one that is not there, or is of no
    format that is read."""
    out: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} is missing")
        if path.is_file() or kind_of(path):
            out.append(path)
            continue
        if (path / "meta" / "info.json").is_file():
            raise UserError(
                f"{path} is a LeRobot data set already: robo_rl data check {quoted(path)} (or data upgrade)"
            )
        inside = _inside(path) or (_inside(path / "data") if (path / "data").is_dir() else [])
        if not inside and any(path.glob("data/*/*.arrow")):
            raise UserError(f"{path}: Minari's Arrow files are not read; those of data_format='hdf5' are")
        if not inside:
            raise UserError(f"{path} holds no files that are read: {READ}")
        out += inside
    for path in out:
        if not kind_of(path):
            pickled = path.suffix in (".pkl", ".pickle", ".pt", ".pth")
            why = (
                "a pickle can run code and is not read; write its arrays with numpy.savez"
                if pickled
                else READ
            )
            raise UserError(f"{path}: {'' if pickled else 'these are read: '}{why}")
    return out


def _inside(folder: Path) -> list[Path]:
    return [folder / name for name in by_number([p.name for p in folder.iterdir() if kind_of(p)])]


def kind_of(path: Path) -> str:
    """hdf5, zarr, npz, rlds, bag, or "" """
    if is_rlds(path):
        return "rlds"
    if is_bag(path):
        return "bag"
    if is_zarr(path):
        return "zarr"
    if path.is_file() and path.suffix in SUFFIXES:
        return "hdf5"
    return "npz" if path.is_file() and path.suffix == ".npz" else ""


def read_files(paths: Sequence[Path], choice: ImportChoice, opened: ExitStack) -> ForeignData:
    """What files of one format hold, with the keys that `choice` names; open as long as `opened` is."""
    files = files_of(paths)
    kinds = {kind_of(path) for path in files}
    if len(kinds) > 1:
        raise UserError(
            f"files of several formats ({', '.join(sorted(kinds))}): import them apart, then data merge"
        )
    kind = kinds.pop()
    if kind == "bag":
        return read_bags(files, choice)
    if kind == "rlds":
        return choose_keys(read_rlds(files), choice)
    readers = {"hdf5": read_hdf5, "zarr": read_zarr, "npz": read_npz}
    return choose_keys(readers[kind](files, opened), choice)
