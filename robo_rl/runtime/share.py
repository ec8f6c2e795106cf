"""Groups of episodes that runs give each other over a folder (SAPO, arXiv 2509.08721).

    FOLDER/<run>/u<update>-<number>.group      one group: a frame of `robo_rl.journal` (its CRC-32) around a
                                               safetensors body

A group is what G episodes of one task saw, did and achieved: no weights. Runs come and go; each writes below
a folder of its own, where it keeps its newest groups, and reads those of the others. Files appear whole, by a
rename. What others wrote is believed in nothing: names, sizes, shapes, types and numbers are looked at, and
what is no group is counted and never read again.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from robo_rl.errors import UserError
from robo_rl.files import parse_json, read_bytes, write_bytes
from robo_rl.journal import ADD, SIZE, frame, frame_at
from robo_rl.noise import mix

FORMAT = 1
MOST_BYTES = 64 << 20  # of a file
MOST_RUNS, MOST_FILES = 256, 4096  # that are looked at in a folder, in a run's folder
SCANNED = 16  # names that are read of a folder for each of these, at most
LARGEST = 10.0  # of an action, in units of the env's commands of -1 .. 1
RUN, FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}"), re.compile(r"u(\d{8})-(\d{3})\.group")
OBS, BEHAVIOUR = "obs/", "behaviour/"  # prefixes of arrays


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """G whole episodes of at most T decisions.

    space: what must be equal for a run to learn from it, plain JSON; start: the episodes' (-1: not known, or
    one each). obs {name: [T+1,G,...]}, the last row of an episode is what its last decision led to, and
    stays; actions float32 [T,G,H,A] in units of the env's commands, as the policy drew them; executed int64
    [T,G] control steps, 0 where the episode was over.
    outcome float32 [G]: undiscounted return.
    behaviour: where it is known, of who acted: `logp` float32 [T,G,F], `version` int64 [T,G] and
    `trace/<name>` [T,G,...]; actor: what a policy must have in common with it for these to mean the same.
    """

    space: dict[str, Any]
    task: str
    start: int
    obs: dict[str, np.ndarray]
    actions: np.ndarray
    executed: np.ndarray
    outcome: np.ndarray
    behaviour: dict[str, np.ndarray] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Whether all its episodes achieved the same: relative to each other none is worth anything."""
        return bool((self.outcome == self.outcome[0]).all())


# ---- one group as bytes ------------------------------------------------------------------------------------


def pack_group(g: SharedGroup, update: int) -> bytes:
    """The file of a group. UserError: it is larger than `MOST_BYTES`."""
    meta = json.dumps(
        {"format": FORMAT, "space": g.space, "task": g.task, "start": g.start, "actor": g.actor},
        allow_nan=False,
    )
    arrays = {
        "meta": np.frombuffer(meta.encode(), np.uint8),
        "actions": g.actions,
        "executed": g.executed,
        "outcome": g.outcome,
    }
    arrays |= {OBS + k: v for k, v in g.obs.items()} | {BEHAVIOUR + k: v for k, v in g.behaviour.items()}
    body = save({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    if len(body) + SIZE > MOST_BYTES:
        raise UserError(
            f"a group of {len(g.outcome)} episodes is {len(body) / 1e6:.0f} MB, and at most "
            f"{MOST_BYTES >> 20} MiB are shared"
        )
    return frame(ADD, len(g.outcome), update, body)


def parse_group(data: bytes, what: str) -> SharedGroup:
    """The group of a file's bytes. UserError(f"{what} …"): it is none; whatever it holds, it costs its size
    in memory."""
    found = frame_at(data, 0)
    if found is None or len(found[3]) + SIZE != len(data):
        raise UserError(f"{what} is damaged or no group of episodes")
    try:
        arrays = load(found[3])
    except (SafetensorError, KeyError, ValueError, TypeError) as e:
        raise UserError(f"{what} holds no arrays ({type(e).__name__})") from None
    meta = parse_json(arrays.pop("meta", np.zeros(0, np.uint8)).tobytes(), what)
    if (
        meta.get("format") != FORMAT
        or not isinstance(meta.get("space"), dict)
        or not isinstance(meta.get("task"), str)
        or type(meta.get("start")) is not int
        or not isinstance(meta.get("actor", {}), dict)
    ):
        raise UserError(f"{what} is of another version of robo_rl")
    obs, behaviour = (
        {k[len(p) :]: arrays.pop(k) for k in list(arrays) if k.startswith(p)} for p in (OBS, BEHAVIOUR)
    )
    if set(arrays) != {"actions", "executed", "outcome"}:
        raise UserError(f"{what} holds other arrays than a group of episodes")
    g = SharedGroup(
        meta["space"],
        meta["task"],
        meta["start"],
        obs,
        **arrays,
        behaviour=behaviour,
        actor=meta.get("actor", {}),
    )
    if why := fault(g):
        raise UserError(f"{what}: {why}")
    return g


def fault(g: SharedGroup) -> str:
    """Why a group is none that can be learnt from; "" where it can."""
    if g.actions.ndim != 4 or 0 in g.actions.shape or g.actions.dtype != np.float32:
        return "actions are float32 [T,G,H,A]"
    (t, n), h = g.actions.shape[:2], g.actions.shape[2]
    for name, x, shape, kind in (
        ("executed", g.executed, (t, n), np.int64),
        ("outcome", g.outcome, (n,), np.float32),
    ):
        if x.shape != shape or x.dtype != kind:
            return f"{name} is {np.dtype(kind)} {list(shape)}"
    if not g.obs or any(x.shape[:2] != (t + 1, n) for x in g.obs.values()):
        return f"observations are [{t + 1},{n},...]"
    if any(x.shape[:2] != (t, n) for x in g.behaviour.values()):
        return f"what is known of who acted is [{t},{n},...]"
    if any(
        x.dtype.kind == "f" and not np.isfinite(x).all()
        for x in (g.actions, g.outcome, *g.obs.values(), *g.behaviour.values())
    ):
        return "numbers that are not finite"
    if np.abs(g.actions).max() > LARGEST:
        return f"an action beyond {LARGEST:g} of the command's range"
    made = g.executed > 0
    if g.executed.min() < 0 or g.executed.max() > h or not made[0].all() or (made[1:] & ~made[:-1]).any():
        return f"executed steps are 1 to {h} until an episode is over, 0 from then on"
    return ""


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """What of two spaces differs first, in words; "": nothing."""
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            return (
                f"their {ascii(name)[1:-1][:40]} is {ascii(theirs.get(name))[:80]}, here "
                f"{ascii(ours.get(name))[:80]}"
            )
    return ""


# ---- the folder --------------------------------------------------------------------------------------------


class ShareFolder:
    """The folder of runs that share: `mine` is this run's part of it, in which its newest `keep` groups
    stay."""

    def __init__(self, root: "str | Path", mine: str, keep: int):
        self.root, self.mine, self.keep = Path(root), mine, keep

    def write(self, update: int, groups: Sequence[SharedGroup]) -> int:
        """Give groups -> how many bytes. An update that is made again, after a kill, writes the same
        files."""
        folder = self.root / self.mine
        folder.mkdir(parents=True, exist_ok=True)  # readable to whom the folder is
        size = 0
        for k, g in enumerate(groups):
            data = pack_group(g, update)
            write_bytes(folder / f"u{update:08d}-{k:03d}.group", data)
            size += len(data)
        for name in sorted(n for n in entries(folder, FILE, 1 << 20, files=True))[: -self.keep]:
            (folder / name).unlink(missing_ok=True)
        return size

    def forget_after(self, update: int) -> None:
        """Withdraw groups of updates from `update` on, which a killed run makes again, and what it had half
        written."""
        for half in (self.root / self.mine).glob(".*.tmp"):
            half.unlink(missing_ok=True)
        for name in entries(self.root / self.mine, FILE, 1 << 20, files=True):
            if int(name[1:9]) >= update:
                (self.root / self.mine / name).unlink(missing_ok=True)

    def foreign(self) -> list[str]:
        """`<run>/<file>` of every group of the others that is there now, sorted."""
        runs = [r for r in entries(self.root, RUN, MOST_RUNS, files=False) if r != self.mine]
        return [f"{r}/{name}" for r in runs for name in entries(self.root / r, FILE, MOST_FILES, files=True)]

    def read(self, name: str) -> "SharedGroup | None":
        """A group of the others; None: it has gone. UserError: it is none."""
        try:
            data = read_bytes(self.root / name, MOST_BYTES)
        except UserError:
            if not os.path.lexists(self.root / name):
                return None  # its run made room
            raise
        return parse_group(data, name)


def entries(folder: Path, pattern: re.Pattern, most: int, files: bool) -> list[str]:
    """Names in a folder that fit, at most the last `most`, sorted; no links. [] where there is no such
    folder."""
    try:
        with os.scandir(folder) as it:
            found = [
                e.name
                for e in islice(it, SCANNED * most)
                if pattern.fullmatch(e.name) and (e.is_file if files else e.is_dir)(follow_symlinks=False)
            ]
    except OSError:
        return []
    return sorted(found)[-most:]


def draws(names: Sequence[str], taken: set[str], seed: int, update: int) -> Iterator[str]:
    """The names that were not taken, in a uniformly random order that (seed, update, names) decide."""
    fresh = [n for n in names if n not in taken]
    for i in np.random.default_rng(mix(seed, 61, update)).permutation(len(fresh)):
        yield fresh[int(i)]
