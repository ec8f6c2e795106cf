"""`robo_rl data COMMAND`: look at a data set of any robot, mend it, merge and split, say what it does not say
by itself."""

import importlib
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from robo_rl.errors import UserError, choose, in_range, plural, quoted
from robo_rl.log import Progress
from robo_rl.types import Each


@dataclass(frozen=True, kw_only=True)
class CheckDataOptions:
    """Read all of a data set, every picture too, and say what it is and what will make trouble. Exit status 2
    for damage."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""
    pictures: bool = True
    """Decode every picture; --no-pictures looks at the files alone."""


@dataclass(frozen=True, kw_only=True)
class RepairDataOptions:
    """Keep the sound episodes of a damaged data set; originals stay beside it as *.broken. Add what a killed
    recording of an arm left. --accept takes it as it is."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""
    accept: bool = False
    """Instead: read it, and write the checksums of the files as they are now."""
    tolerance: float = 1e-4
    """With --accept: largest error of its timestamps [s]."""

    def __post_init__(self) -> None:
        in_range("--tolerance", self.tolerance, 0, 1e6)


@dataclass(frozen=True, kw_only=True)
class MergeDataOptions:
    """Put the episodes of several data sets of one robot into a new one. Videos are copied, not encoded
    again."""

    folders: tyro.conf.Positional[tuple[str, ...]]
    """Folders of the data sets, in order."""
    out: str
    """Folder of the new one."""


@dataclass(frozen=True, kw_only=True)
class SplitDataOptions:
    """Put some episodes of a data set into a new one, and the others into another. Videos are copied, not
    encoded again."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""
    out: str
    """Folder of the chosen episodes."""
    episodes: str
    """Which: numbers and ranges, as 0:40,45 (the end of a range is not in it)."""
    rest: str = ""
    """Folder of the others; empty: they are left out."""


@dataclass(frozen=True, kw_only=True)
class LabelDataOptions:
    """Write into a data set what nobody recorded: the units of its actions, which episodes succeeded."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""
    units: str = ""
    """Of the action axes: rad, deg, m, mm, rad/s, deg/s, m/s, N, N m, %, 1 or 'as recorded', each times how
    many axes and with its kind, absolute (the default), delta, rate or effort: 'deg*5,%', 'm delta*3,rad
    delta*3,1'. One stands for all axes."""
    success: str = ""
    """all, none, a file with the numbers of the episodes that succeeded (JSON: or a truth for each), judge:
    as --judge says, or recorded: labels are taken back, and what was recorded counts again."""
    judge: str = ""
    """Who looks at the end of every episode: http://HOST:PORT/PATH (openai:http://… for OpenAI's protocol,
    options behind #), or the folder of a classifier (robo_rl wm judge)."""

    def __post_init__(self) -> None:
        if self.judge and self.success != "judge":
            raise UserError(f"--judge goes with --success judge, got --success {self.success!r}")


@dataclass(frozen=True, kw_only=True)
class UpgradeDataOptions:
    """Write a LeRobot data set of v2.0 or v2.1 anew as v3.0. Videos are copied, not encoded again; quantiles
    are made of all frames."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""
    out: str
    """Folder of the new one."""


@dataclass(frozen=True, kw_only=True)
class ImportDataOptions:
    """Make a data set of files of another project. Without --out: show what they hold and what of it is
    taken. Read are HDF5 of robomimic, LIBERO, ACT, Minari and D4RL, Zarr of Diffusion Policy, .npz of
    OGBench, RLDS, rosbag2 and ROS 1 bags. Episodes that ManiSkill recorded (NAME.h5 beside NAME.json) are
    played again in the env of --sim maniskill, so that whatever the files observed does."""

    files: tyro.conf.Positional[tuple[str, ...]]
    """Files of one format, or folders of them."""
    out: str = ""
    """Folder of the new data set."""
    episodes: str = ""
    """Which, as 0:100,205, or a list of the files by its name, as robomimic's train; of ManiSkill's, of each
    file; empty: all."""
    state: str = ""
    """Keys of the state, as KEY,KEY; empty: as the format says."""
    action: str = ""
    """Keys of the action; of a bag, a key of the state too: what it is a step later."""
    cameras: str = ""
    """Cameras, as front=KEY,wrist=KEY, or none; empty: as the format says."""
    pictures: Literal["as_stored", "flip", "rotate180"] = "as_stored"
    """How pictures are turned: flip where the top is at the bottom, as in LIBERO's; rotate180 as checkpoints
    of OpenVLA and openpi see LIBERO, upright and mirrored."""
    max_side: int = 0
    """Pixels that the longer side of a picture has at most; larger ones are made smaller; 0: as stored."""
    fps: float = 0
    """Control steps per second, where the format does not say; of a bag, the rate at which it is sampled."""
    instruction: str = ""
    """What is done in all episodes; empty: as the files say."""
    units: str = ""
    """Of the action axes, as data label --units; empty: where the format says them."""
    success: str = ""
    """Episodes that succeeded: all, none, reward (above 0 in a step), a key that is true in a step, a file of
    their numbers; empty: as the files say, or not recorded."""
    robot: str = ""
    """Name of the robot; empty: as the files say."""
    task: str = ""
    """Of ManiSkill: task, as robo_rl train --task names it; empty: as the file says. One of your own is
    MODULE:ID."""
    obs: str = "state"
    """Of ManiSkill: state, or rgb: the cameras' pictures too."""
    reward: str = ""
    """Of ManiSkill: sparse, or dense where the task has it; empty: the task's own."""
    image_size: int = 64
    """Of ManiSkill: pixels of each side of a picture, 16 to 1024."""
    keep: Literal["success", "all"] = "success"
    """Of ManiSkill: which are kept of those that were played; failures too teach a success classifier."""

    def __post_init__(self) -> None:
        in_range("--image-size", self.image_size, 16, 1024)
        in_range("--fps", self.fps, 0, 10_000)
        in_range("--max-side", self.max_side, 0, 10_000)
        if not self.files:
            raise UserError("robo_rl data import FILE … names the files, or folders of them")
        choose("obs", self.obs, ("state", "rgb"))
        choose("reward", self.reward, ("", "sparse", "dense"))


# of episodes that are played again, and of those that are read as they are
PLAYED = ("task", "obs", "reward", "image_size", "keep")
AS_READ = (
    "state",
    "action",
    "cameras",
    "pictures",
    "max_side",
    "fps",
    "instruction",
    "units",
    "success",
    "robot",
)


@dataclass(frozen=True, kw_only=True)
class StatsDataOptions:
    """Make the statistics of a data set (meta/stats.json) anew from all frames: quantiles are exact, as
    normalisers need them."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""


@dataclass(frozen=True, kw_only=True)
class ViewDataOptions:
    """One self-contained HTML page of a data set: its episodes with videos and curves."""

    folder: tyro.conf.Positional[str]
    """Folder of the data set."""
    out: str = ""
    """File of the page; empty: beside the folder, its name with .html behind it."""
    episodes: str = ""
    """Which, as 0:5,12; empty: twelve, evenly spread."""
    width: int = 240
    """Of the videos in the page [pixels]."""

    def __post_init__(self) -> None:
        in_range("--width", self.width, 32, 1920)


SUBCOMMANDS = {
    "check": (CheckDataOptions, "read all of a data set and say what it is and what will make trouble"),
    "repair": (RepairDataOptions, "keep the sound episodes of a damaged data set, or accept one as it is"),
    "merge": (MergeDataOptions, "put the episodes of several data sets into a new one"),
    "split": (SplitDataOptions, "put some episodes into a new data set"),
    "label": (LabelDataOptions, "say what nobody recorded: units, success"),
    "upgrade": (UpgradeDataOptions, "write a LeRobot data set of v2.0 or v2.1 anew as v3.0"),
    "import": (
        ImportDataOptions,
        "make a data set of files of robomimic, LIBERO, ACT, Diffusion Policy, Minari, ManiSkill, of bags",
    ),
    "stats": (StatsDataOptions, "make the statistics anew from all frames"),
    "view": (ViewDataOptions, "a page with episodes, curves and videos"),
}


def run(args) -> int:
    """Run the subcommand whose options these are."""
    name = next(name for name, (options, _) in SUBCOMMANDS.items() if type(args) is options)
    jobs = {
        "check": check,
        "repair": repair,
        "merge": merge,
        "split": split,
        "label": label,
        "upgrade": upgrade,
        "import": import_episodes,
        "stats": stats,
        "view": view,
    }
    with Progress(patience=2) as progress:
        lines = jobs[name](args, progress.each)
    print("\n".join(lines))
    return 0


def check(args: CheckDataOptions, each: Each) -> list[str]:
    from robo_rl.data.check import check_data

    report = check_data(args.folder, args.pictures, each)
    wide = max(len(name) for name, *_ in report.axes)
    rows = [
        f"  {name:<{wide}}  {unit:<12}" + "".join(f"{x:>11.4g}" for x in numbers)
        for name, unit, *numbers in report.axes
    ]
    head = f"  {'action':<{wide}}  {'unit':<12}" + "".join(
        f"{s:>11}" for s in ("min", "q01", "median", "q99", "max")
    )
    found = [f"note: {line}" for line in report.findings] or ["nothing to look after"]
    return [
        f"{args.folder} is sound",
        *(f"  {what:<17}{value}" for what, value in report.facts),
        head,
        *rows,
        *found,
    ]


def repair(args: RepairDataOptions, each: Each) -> list[str]:
    from robo_rl.data import repair as repairs

    if args.accept:
        return [
            f"{args.folder}: {plural(len(repairs.accept(args.folder, args.tolerance, each)), 'episode')} "
            "accepted, checksums written"
        ]
    from robo_rl.experiment.arm_recording import recover, recovered

    added = recover(Path(args.folder))
    result = repairs.repair(args.folder, each)
    return [
        *([recovered(args.folder, added)] if added else []),
        f"{args.folder}: kept {plural(result.kept, 'episode')}, dropped {result.dropped}"
        + (f" ({result.reason})" if result.reason else "; it was sound"),
    ]


def dataset_size(meta) -> str:
    """Episodes and frames of a data set."""
    return f"{plural(len(meta.lengths), 'episode')}, {plural(int(meta.lengths.sum()), 'frame')}"


def merge(args: MergeDataOptions, each: Each) -> list[str]:
    from robo_rl.data.assemble import merge as merged

    meta = merged([Path(f) for f in args.folders], Path(args.out), each)
    return [f"{args.out}: {dataset_size(meta)}, {plural(len(meta.tasks), 'task')}"]


def split(args: SplitDataOptions, each: Each) -> list[str]:
    from robo_rl.data.assemble import split as parted

    made, others = parted(
        Path(args.folder), Path(args.out), args.episodes, Path(args.rest) if args.rest else None, each
    )
    return [f"{args.out}: {plural(len(made.lengths), 'episode')}"] + (
        [f"{args.rest}: {plural(len(others.lengths), 'episode')}"] if others is not None else []
    )


def label(args: LabelDataOptions, each: Each) -> list[str]:
    from robo_rl.data.labels import label_success, state_units, write_success
    from robo_rl.data.meta import load_meta

    if not (args.units or args.success):
        raise UserError("nothing to write: --units and --success say what (robo_rl data label --help)")
    out = []
    if args.units:
        out.append(f"{args.folder}: actions are {state_units(Path(args.folder), args.units)}")
    if args.success == "judge":
        from robo_rl.experiment.judge_episodes import label_by_judge

        told = label_by_judge(Path(args.folder), args.judge, each)
        before = "the labels that it had agree" if told.labelled else "what was recorded agrees"
        agrees = f"; {before} on {told.agrees}" if told.agrees is not None else ""
        divided = (
            f"; its answers are divided on {100 * told.divided:.0f} %" if told.divided is not None else ""
        )
        cost = f"; {plural(told.requests, 'request')}" if told.requests is not None else ""
        out.append(
            f"{args.folder}: {told.success.sum()} of {len(told.success)} episodes succeeded, as {args.judge} "
            f"says{agrees}{divided}{cost}"
        )
    elif args.success == "recorded":
        write_success(Path(args.folder), None)
        out.append(f"{args.folder}: success as it was recorded")
    elif args.success:
        success = label_success(Path(args.folder), args.success)
        out.append(f"{args.folder}: {success.sum()} of {len(success)} episodes succeeded")
    if args.success not in ("", "recorded") and "next.success" in load_meta(args.folder).info["features"]:
        out.append(
            f"what was recorded is still there: robo_rl data label {quoted(args.folder)} --success recorded"
        )
    return out


def upgrade(args: UpgradeDataOptions, each: Each) -> list[str]:
    from robo_rl.data.upgrade import upgrade as upgraded

    meta = upgraded(Path(args.folder), Path(args.out), each)
    return [f"{args.out}: {dataset_size(meta)}, v3.0; look at it: robo_rl data check {quoted(args.out)}"]


def import_episodes(args: ImportDataOptions, each: Each) -> list[str]:
    from robo_rl.data.foreign_hdf5 import is_maniskill

    played = all(map(is_maniskill, map(Path, args.files)))
    kind, strange = ("ManiSkill", AS_READ) if played else ("files that are read as they are", PLAYED)
    if given := [name for name in strange if getattr(args, name) != getattr(ImportDataOptions, name)]:
        raise UserError(f"--{given[0].replace('_', '-')} is not an option of {kind}")
    return _import_played(args, each) if played else _import_read(args, each)


def _import_read(args: ImportDataOptions, each: Each) -> list[str]:
    from robo_rl.data.assemble import need_new
    from robo_rl.data.foreign import ImportChoice, describe, missing, write
    from robo_rl.data.foreign_files import read_files
    from robo_rl.data.labels import how_to_state

    choice = ImportChoice(
        state=tuple(filter(None, args.state.split(","))),
        action=tuple(filter(None, args.action.split(","))),
        cameras=args.cameras,
        fps=args.fps,
        instruction=args.instruction,
        units=args.units,
        episodes=args.episodes,
        success=args.success,
        pictures=args.pictures,
        max_side=args.max_side,
        robot=args.robot,
    )
    if args.out:
        need_new(Path(args.out))
    with ExitStack() as opened:
        got = read_files([Path(f) for f in args.files], choice, opened)
        if not args.out:
            more = " ".join(["--out FOLDER", *missing(got)])
            return [*describe(got), f"import it: robo_rl data import {shlex.join(args.files)} {more}"]
        made = write(got, choice, Path(args.out), each)
    meta = made.meta
    success = "" if made.success else "; which of them succeeded is not recorded (--success)"
    if made.units:
        units = f"actions are {made.units}"
    elif got.guess:
        units = (
            "the units of some actions are not known; if those are numbers without a unit: robo_rl data "
            f"label {quoted(args.out)} --units '{got.guess}'"
        )
    else:
        units = f"nobody said the units of the actions; {how_to_state(meta)}"
    return [
        f"{args.out}: {dataset_size(meta)}{success}",
        units,
        f"look at it: robo_rl data view {quoted(args.out)}",
        f"learn from it: robo_rl train --sim none --algo bc --demos {quoted(args.out)}",
    ]


def _import_played(args: ImportDataOptions, each: Each) -> list[str]:
    from robo_rl.experiment.import_maniskill import import_maniskill

    if not args.out:
        raise UserError("--out names the folder of the new data set")
    got = import_maniskill(
        [Path(f) for f in args.files],
        Path(args.out),
        task=args.task,
        obs=args.obs,
        reward=args.reward,
        image_size=args.image_size,
        episodes=args.episodes,
        keep=args.keep,
        each=each,
    )
    train = f"robo_rl train --sim maniskill --task {shlex.quote(got.task)} --control {got.control}"
    longer = f" --max-steps {got.longest}" if got.longest > got.limit else ""
    view, along = f" --obs {args.obs}" if args.obs != "state" else "", got.played - got.repeated
    return [
        f"{args.out}: {got.kept} of {got.played} episodes kept; of {got.recorded} that the files say succeed "
        f"{got.again} did again, within {got.longest} control steps (the task's limit is {got.limit})",
        f"{got.repeated} were repeated by their actions from their seeds, {along} played along the recorded "
        "states",
        f"learn from it: {train}{view}{longer} --demos {quoted(args.out)}",
    ]


def stats(args: StatsDataOptions, each: Each) -> list[str]:
    from robo_rl.data import layout
    from robo_rl.data.statistics import renew_folder

    made = renew_folder(Path(args.folder), each)
    return [
        f"{args.folder}: statistics of {len(made)} features, of all frames, in "
        f"{Path(args.folder) / layout.STATS}"
    ]


def view(args: ViewDataOptions, each: Each) -> list[str]:
    page = importlib.import_module("robo_rl.report.dataset_page")
    folder = Path(args.folder)
    out = Path(args.out) if args.out else folder.resolve().parent / f"{folder.resolve().name}.html"
    size = page.write_page(folder, out, args.episodes, args.width, each)
    return [f"written to {out} ({size / 1e6:.1f} MB)"]
