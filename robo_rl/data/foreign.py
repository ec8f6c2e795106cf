"""Episodes of another project's files as a data set: what such a file holds, what of it becomes state,
action and cameras, and the writing.

A reader (`foreign_hdf5`, `foreign_arrays`, `foreign_bag`) gives `ForeignData`: the arrays of every episode by
their keys, read when they are asked for, and what its format says by itself. Options say the rest.

    key                           rows         becomes
    actions                       [T, A]       action
    obs/robot0_eef_pos            [T, 3]       state: the chosen keys one behind the other, flat
    obs/agentview_image           [T, h, w, 3] a camera, uint8; floats of 0 .. 1 or 0 .. 255, [3, h, w] and
                                               compressed pictures too
    observations                  [T+1, S]     its last row is what was observed after the last action
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from robo_rl.data.assemble import appearing, need_new, parse_episodes
from robo_rl.data.episode import Episode, Features
from robo_rl.data.labels import Units, parse_success, parse_units, state_units, units_of
from robo_rl.data.meta import Meta, load_meta
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError, choose
from robo_rl.files import require_memory
from robo_rl.types import Each, silently

PICTURES = ("as_stored", "flip", "rotate180")
ENCODED = (-1,)  # the shape of a row that is a compressed picture
ALL, FIRST, LAST = slice(None), slice(0, 1), slice(-1, None)
PART = 64  # pictures that are read together, where they are made smaller


@dataclass(frozen=True, slots=True)
class ForeignEpisode:
    """An episode of a file. `columns`: the shape of a row by key, `ENCODED` for compressed pictures;
    read(key) -> [T, ...] or [T+1, ...]; `task`: its instruction, where the file says it; part(key, rows):
    some of the rows, where that is cheaper than all; `success`: None where the file does not say it;
    `scans`: whatever is read, it is read from the beginning on."""

    name: str
    steps: int
    columns: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    task: str = ""
    part: Callable[[str, slice], np.ndarray] | None = None
    success: bool | None = None
    scans: bool = False

    def rows(self, key: str, rows: slice) -> np.ndarray:
        return self.part(key, rows) if self.part is not None else self.read(key)[rows]


def part_of(
    held: Mapping[str, Any], name: str, first: int, last: int, columns: Mapping[str, tuple[int, ...]]
) -> ForeignEpisode:
    """The episode of rows `first` to `last` of arrays of many."""

    def part(key: str, rows: slice) -> np.ndarray:
        a, b, _ = rows.indices(last - first)
        return np.asarray(held[key][first + a : first + b])

    return ForeignEpisode(name, last - first, columns, lambda key: part(key, ALL), part=part)


def parts_until(
    held: Mapping[str, Any], name: str, ends: np.ndarray, columns: Mapping[str, tuple[int, ...]]
) -> list[ForeignEpisode]:
    """The episodes of arrays in which they stand one behind the other until the rows `ends` int64[n]."""
    return [
        part_of(held, f"{name}: episode {k}", int(a), int(b), columns)
        for k, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class ForeignData:
    """What files hold. Keys that the format itself names: `state`, `action`, `cameras` (view -> key), `after`
    (key -> key of the same, one step later), and, "" where there are none, `reward`, `terminal` and `success`
    (true in a step). `fps` 0 and `units` "": it does not say. `sparse`: a reward above 0 means success.
    `masks`: named lists of episodes' names. `counted`: what a row is. `notes`: of keys. `guess`: units, with
    1 where it does not say them."""

    format: str
    episodes: Sequence[ForeignEpisode]
    state: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    cameras: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    after: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    reward: str = ""
    terminal: str = ""
    sparse: bool = False
    fps: float = 0
    units: str = ""
    robot: str = ""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    success: str = ""
    masks: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    counted: str = "step"
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    guess: str = ""


@dataclass(frozen=True, slots=True)
class ImportChoice:
    """What a person says of files: keys of the state and of the action, views and their keys (empty: as the
    format says; cameras none: no pictures), control steps per second, instruction, units of the action's
    axes, which episodes (numbers, or a list of the files), which of them succeeded (all, none, reward, a
    key, a file), how pictures are turned, pixels of their longer side at most (0: as stored), the robot."""

    state: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    cameras: str = ""
    fps: float = 0.0
    instruction: str = ""
    units: str = ""
    episodes: str = ""
    success: str = ""
    pictures: str = "as_stored"
    max_side: int = 0
    robot: str = ""


@dataclass(frozen=True, slots=True)
class ImportedData:
    """The data set; whether it says which episodes succeeded; units of its actions, None: nobody said."""

    meta: Meta
    success: bool
    units: Units | None


def choose_keys(got: ForeignData, choice: ImportChoice) -> ForeignData:
    """`got` with the keys, rate, units and robot that `choice` names. UserError: a key that an episode does
    not have, or what neither of them says."""
    got = replace(
        got,
        state=choice.state or got.state,
        action=choice.action or got.action,
        cameras=_cameras(choice.cameras, got),
        fps=choice.fps or got.fps,
        units=choice.units or got.units,
        robot=choice.robot or got.robot,
        success=choice.success if choice.success in got.episodes[0].columns else got.success,
    )
    there = got.episodes[0].columns
    for kind, keys in (("state", got.state), ("action", got.action), ("cameras", got.cameras.values())):
        for key in keys:
            if list(keys).count(key) > 1:
                raise UserError(f"--{kind} names {key!r} twice")
            choose(f"key of --{kind}", key, there)
            shape = there[key]
            if kind == "cameras" and not is_picture(shape):
                raise UserError(f"--cameras: {key!r} has rows of {list(shape)}, no pictures")
            if kind != "cameras" and is_picture(shape):
                raise UserError(f"--{kind}: {key!r} are pictures; name them with --cameras NAME={key}")
    return got


def missing(got: ForeignData) -> list[str]:
    """Options that say what neither the files nor a person did."""
    out = [] if got.action else ["--action KEY"]
    out += [] if got.state or got.cameras else ["--state KEY,KEY"]
    return out + ([] if got.fps else ["--fps N"])


def _cameras(text: str, got: ForeignData) -> dict[str, str]:
    """`front=KEY,wrist=KEY`; "": as the format says; none."""
    if not text:
        return dict(got.cameras)
    out = {}
    for part in () if text == "none" else text.split(","):
        view, equals, key = part.partition("=")
        if not equals:
            known = [v for v, k in got.cameras.items() if part in (v, k)]
            view, key = (known[0], got.cameras[known[0]]) if known else (part.split("/")[-1], part)
        if view in out:
            raise UserError(f"--cameras names {view!r} twice")
        out[view] = key
    return out


def is_picture(shape: tuple[int, ...]) -> bool:
    return shape == ENCODED or len(shape) == 3 and (shape[2] in (1, 3) or shape[0] in (1, 3))


def describe(got: ForeignData) -> list[str]:
    """Lines of what is there and what becomes of it."""
    lengths = np.array([e.steps for e in got.episodes])
    rate = f", {got.fps:g} steps a second" if got.fps else ""
    out = [
        f"{got.format}: {len(lengths)} episode{'s' * (len(lengths) != 1)}, {lengths.sum():,} {got.counted}s ("
        f"{lengths.min()} to {lengths.max()}){rate}"
    ]
    becomes: dict[str, list[str]] = {}
    for word, keys in (
        *((f"camera {view}", (key,)) for view, key in got.cameras.items()),
        ("state", got.state),
        ("action", got.action),
        ("reward", (got.reward,)),
        ("end", (got.terminal,)),
        ("success", (got.success,)),
    ):
        for key in keys:
            becomes.setdefault(key, []).append(word)
    rows = [
        (
            key,
            "compressed picture" if shape == ENCODED else " x ".join(map(str, shape)) or "1",
            got.notes.get(key, ""),
            " and ".join(becomes.get(key, ())),
        )
        for key, shape in got.episodes[0].columns.items()
        if key not in got.after.values()
    ]
    wide = [max(len(row[k]) for row in rows) for k in range(3)]
    for *cells, to in rows:
        cells = [f"{cell:{n}}" for cell, n in zip(cells, wide, strict=True) if n]
        out.append("  ".join(["", *cells, f"-> {to}" if to else ""]).rstrip())
    tasks = list(dict.fromkeys(e.task for e in got.episodes if e.task))
    out += [f"instructions: {'; '.join(tasks[:5])}{'; …' * (len(tasks) > 5)}"] if tasks else []
    named = [f"{name} ({len(chosen_episodes(got, name))})" for name in got.masks]
    return out + ([f"lists for --episodes: {', '.join(named)}"] if named else [])


def chosen_episodes(got: ForeignData, text: str) -> np.ndarray:
    """int64[n] of --episodes: all, numbers and ranges, or a list of the files."""
    if text in got.masks:
        names = {*got.masks[text]}
        chosen = np.array([k for k, e in enumerate(got.episodes) if e.name in names], int)
        if not len(chosen):
            raise UserError(f"--episodes {text}: none of that list is in the files")
        return chosen
    if text[:1].isalpha():
        choose("list of --episodes", text, got.masks)
    count = len(got.episodes)
    return parse_episodes(text, count) if text else np.arange(count)


def write(got: ForeignData, choice: ImportChoice, out: Path, each: Each = silently) -> ImportedData:
    """The chosen episodes as the new data set `out`, whole or not at all. UserError: what nobody says, rows
    that do not go together."""
    need_new(out)
    if absent := missing(got):
        raise UserError(
            f"the files do not say everything: give {', '.join(absent)}; without --out data import shows "
            "what they hold"
        )
    choose("pictures", choice.pictures, PICTURES)
    chosen = chosen_episodes(got, choice.episodes)
    judged = _success(got, choice.success, chosen)
    knows_end = bool(got.terminal)
    absent = [name for name, known in (("reward", got.reward), ("truncated", knows_end)) if not known]
    if judged is None and not (_by_reward(got, choice) or _by_key(got, choice)):
        absent.append("success")
    with appearing(out, each) as folder:
        with naming(got.episodes[0]):
            features = replace(_features(got, choice), absent=tuple(absent))
        if got.units:
            parse_units(got.units, len(features.action))  # before hours of writing
        with Writer(folder, features) as writer:
            for i, k in enumerate(each("import", chosen.tolist(), "episodes")):
                with naming(got.episodes[k]):
                    episode = read_episode(got, got.episodes[k], choice)
                    won = bool(judged[i]) if judged is not None else episode.success
                    if bad := features.misfits(episode):
                        raise UserError(f"it does not go with the first episode: {'; '.join(bad)}")
                    writer.add(replace(episode, success=won))
                    del episode  # the next one may need its memory
        if got.units:
            state_units(folder, got.units)
    meta = load_meta(out)
    return ImportedData(meta, "success" not in absent, units_of(meta))


@contextmanager
def naming(recording: ForeignEpisode) -> Iterator[None]:
    """UserError with the episode's name in place of what its reading and writing raises."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as e:
        text = str(e)
        raise UserError(text if text.startswith(recording.name) else f"{recording.name}: {text}") from None


def _by_key(got: ForeignData, choice: ImportChoice) -> bool:
    return bool(got.success) and choice.success in ("", got.success)


def _by_reward(got: ForeignData, choice: ImportChoice) -> bool:
    if choice.success == "reward" and not got.reward:
        raise UserError("--success reward needs rewards, and the files have none")
    by_default = not choice.success and not got.success and got.sparse
    return bool(got.reward) and (choice.success == "reward" or by_default)


def _success(got: ForeignData, text: str, chosen: np.ndarray) -> np.ndarray | None:
    """bool[n] of the chosen episodes where a person, or a mark of each episode, says it."""
    told = [got.episodes[k].success for k in chosen]
    if not text and None not in told:
        return np.array(told, bool)
    if text in ("", "reward", got.success):
        return None
    if text not in ("all", "none") and not Path(text).is_file():
        raise UserError(f"--success must be all, none, reward, a key of the files or a file, got {text!r}")
    return parse_success(text, len(got.episodes))[chosen]


def _features(got: ForeignData, choice: ImportChoice) -> Features:
    """What all episodes share, of the first of them."""
    first = got.episodes[0]

    def names(keys: Sequence[str]) -> tuple[str, ...]:
        out: list[str] = []
        for key in keys:
            n = int(np.prod(first.columns[key], dtype=int))
            tail = key.rstrip("/").split("/")[-1]
            out += got.names.get(key) or ([tail] if n == 1 else [f"{tail}_{i}" for i in range(n)])
        return tuple(out if len(set(out)) == len(out) else [f"{keys[0]}_{i}" for i in range(len(out))])

    views = [
        (view, *read_pictures(first, key, choice, FIRST)[0].shape[:2]) for view, key in got.cameras.items()
    ]
    return Features(
        fps=got.fps,
        state=names(got.state) or ("nothing",),
        action=names(got.action),
        views=tuple(sorted(views)),
        robot=got.robot,
    )


def read_episode(got: ForeignData, recording: ForeignEpisode, choice: ImportChoice) -> Episode:
    """One of them as arrays. UserError: rows that do not go together."""
    first = got.episodes[0].columns
    for key in (*got.state, *got.action, *got.cameras.values()):
        if key not in recording.columns:
            raise UserError(f"it has no {key!r}, which the first episode has")
        if (row := recording.columns[key]) != first[key]:
            raise UserError(f"{key!r} has rows of {list(row)}, of {list(first[key])} in the first episode")
    T = recording.steps

    def numbers(key: str) -> np.ndarray:
        return with_last(recording, key, got.after, lambda k, rows: _flat(recording.rows(k, rows)))

    def pictures(key: str) -> np.ndarray:
        return with_last(recording, key, got.after, lambda k, rows: read_pictures(recording, k, choice, rows))

    paid = numbers(got.reward)[:T] if got.reward else None
    if _by_reward(got, choice) and paid is not None:
        success = bool(paid.max() > 0)
    else:
        success = _by_key(got, choice) and bool(np.any(recording.read(got.success)))
    states = [numbers(key) for key in got.state] or [np.zeros((T + 1, 1), np.float32)]
    images = {view: pictures(key) for view, key in got.cameras.items()}
    known = all(len(x) > T for x in (*states, *images.values()))
    return Episode(
        state=np.concatenate([x[:T] for x in states], 1),
        action=np.concatenate([numbers(key)[:T] for key in got.action], 1),
        images={view: x[:T] for view, x in images.items()},
        task=choice.instruction or recording.task,
        success=success,
        reward=None if paid is None else paid[:, 0],
        source="unknown",
        terminated=bool(got.terminal) and bool(np.any(recording.rows(got.terminal, slice(T - 1, None)))),
        final=np.concatenate([x[T] for x in states]) if known else None,
        final_images={view: x[T] for view, x in images.items()} if known and images else None,
    )


def with_last(
    recording: ForeignEpisode, key: str, after: Mapping[str, str], read: Callable[[str, slice], np.ndarray]
) -> np.ndarray:
    """[T+1, ...] where what was observed after the last action is known, as a last row of its own or as
    that of the key `after[key]`; else [T, ...]."""
    x, T, later = read(key, ALL), recording.steps, after.get(key, "")
    if len(x) not in (T, T + 1):
        raise UserError(f"{key!r} has {len(x)} rows for {T} actions")
    return np.concatenate([x, read(later, LAST)]) if len(x) == T and later in recording.columns else x


def _flat(x: np.ndarray) -> np.ndarray:
    """[T, ...] -> float32[T, n]"""
    if x.dtype.kind not in "biuf":
        raise UserError(f"rows of {x.dtype} are no numbers")
    return np.asarray(x, np.float32).reshape(len(x), -1)


def read_pictures(recording: ForeignEpisode, key: str, choice: ImportChoice, rows: slice = ALL) -> np.ndarray:
    """uint8[T, h, w, 3] of these rows"""
    if rows != ALL:
        return _pictures(recording, key, choice, rows)
    shape = recording.columns[key]
    by_parts = recording.part is not None and not recording.scans and choice.max_side > 0 and shape != ENCODED
    first = recording.rows(key, FIRST) if shape == ENCODED or by_parts else None
    size = math.prod(shape) if first is None or shape != ENCODED else _decoded(first[0]).size
    # those that come in parts are made smaller before the next part comes; floats all have one scale
    by_parts &= first is not None and first.dtype.kind != "f"
    if choice.max_side and (by_parts or shape == ENCODED):
        size = min(size, 3 * choice.max_side**2)
    require_memory(
        f"{recording.name}: {key}",
        2 * recording.steps * size,
        "make pictures smaller with --max-side 256, choose fewer cameras with --cameras, cut long "
        "recordings, or give the machine more memory",
    )
    if not by_parts:
        return _pictures(recording, key, choice, ALL)
    parts = (
        _pictures(recording, key, choice, slice(a, a + PART)) for a in range(0, recording.steps + 1, PART)
    )
    return np.concatenate([part for part in parts if len(part)])


def _pictures(recording: ForeignEpisode, key: str, choice: ImportChoice, rows: slice) -> np.ndarray:
    """`read_pictures` of rows that are read together."""
    shape, x = recording.columns[key], recording.rows(key, rows)
    if shape == ENCODED:
        x = _all_decoded(x, choice.max_side)
    elif shape[2] not in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    if x.dtype.kind == "f":
        x = np.clip(np.rint(x * (255 if x.size and x.max() <= 1 else 1)), 0, 255)
    if x.dtype.kind not in "fiu" or x.dtype.kind in "iu" and x.dtype.itemsize > 1:
        raise UserError(
            f"{key}: pictures of {x.dtype} (of depth?) are not read; choose others with --cameras"
        )
    x = np.broadcast_to(x, (*x.shape[:3], 3)).astype(np.uint8, copy=False)
    if choice.max_side and len(x) and max(x.shape[1:3]) > choice.max_side:
        x = np.stack([_smaller(picture, choice.max_side) for picture in x])
    turned = {"as_stored": x, "flip": x[:, ::-1], "rotate180": x[:, ::-1, ::-1]}
    return np.ascontiguousarray(turned[choice.pictures])


def _all_decoded(rows: np.ndarray, side: int) -> np.ndarray:
    """uint8[T, h, w, 3], no larger than `side` (0: as they are)."""
    if not len(rows):
        return np.zeros((0, 1, 1, 3), np.uint8)
    first = _decoded(rows[0])
    small = _smaller(first, side)
    out = np.empty((len(rows), *small.shape), np.uint8)
    for k, row in enumerate(rows):
        picture = _decoded(row)
        if picture.shape != first.shape:
            sizes = " and ".join(f"{h} x {w}" for h, w, _ in (first.shape, picture.shape))
            raise UserError(f"its pictures are of several sizes, {sizes}")
        out[k] = _smaller(picture, side)
    return out


def _smaller(picture: np.ndarray, side: int) -> np.ndarray:
    """uint8[h, w, 3] whose longer side has at most `side` pixels (0: any), of the same shape otherwise."""
    from PIL import Image

    scale = side / max(picture.shape[:2])
    if not side or scale >= 1:
        return picture
    h, w = (max(1, round(n * scale)) for n in picture.shape[:2])
    made = Image.fromarray(np.ascontiguousarray(picture)).resize((w, h), Image.Resampling.BILINEAR)
    return np.asarray(made)


def _decoded(row) -> np.ndarray:
    """uint8[h, w, 3] of the bytes of a JPEG or PNG, with zeros behind them."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(
            io.BytesIO(np.asarray(row).tobytes() if not isinstance(row, bytes) else row)
        ) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise UserError("its rows are no compressed pictures that are read (JPEG, PNG)") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:
        raise UserError(f"a compressed picture cannot be read ({e})") from None


def with_steps(format: str, episodes: Sequence[ForeignEpisode]) -> list[ForeignEpisode]:
    """Those that have an action; a warning of the others. UserError: none."""
    whole = [e for e in episodes if e.steps > 0]
    if not whole:
        raise UserError(f"{format}: no episode of these files has a step")
    if len(whole) < len(episodes):
        warnings.warn(f"{len(episodes) - len(whole)} episodes without a step are left out", stacklevel=2)
    return whole
