"""Keep the sound episodes of a damaged data set."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from robo_rl.data import layout
from robo_rl.data.reader import BrokenDataset, load, load_meta
from robo_rl.data.writer import read_totals, trim
from robo_rl.files import lock, write_bytes


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did; moved: where the damaged originals are."""

    kept: int
    dropped: int
    reason: str
    moved: tuple[Path, ...]


def repair(root: Path | str) -> Repaired:
    """Read everything, each picture too, and keep the episodes before the first damage.

    Nothing is deleted: the old meta folder is copied to `meta.broken`, files that leave the data set or lose
    their end get `.broken` behind their name. A sound data set is not touched. Raises BrokenDataset if not
    even the first episode is sound, UserError if the folder is being written or holds no data set.
    """
    root = Path(root)
    if not (root / layout.INFO).is_file():
        load_meta(root)  # raises: no data set here
    with lock(root):
        keep, reason = 0, ""
        while True:
            try:
                data = load(root, keep)
                for e in range(len(data)):
                    for view in data.views:
                        data.frames(view, e)
                break
            except BrokenDataset as e:
                if e.episode <= 0 or (keep and e.episode >= keep):
                    raise
                keep, reason = e.episode, reason or f"{e.path}: {e.what}"
        total = data.meta.info["total_episodes"]
        if not reason:
            return Repaired(total, 0, "", ())
        moved = [_free(root / "meta.broken")]
        shutil.copytree(root / "meta", moved[0])
        meta = data.meta
        text = layout.info_to_json(meta.info, len(data), len(data.action), len(meta.tasks))
        write_bytes(root / layout.INFO, text.encode())  # sound from here on

        def put_away(path: Path, copy: bool) -> None:
            away = _free(path.with_name(path.name + ".broken"))
            moved.append(away)
            if copy:
                shutil.copy2(path, away)
            else:
                os.replace(path, away)

        trim(meta, put_away)
        if totals := read_totals(meta):
            write_bytes(root / layout.STATS, layout.stats_to_json(totals).encode())
        return Repaired(len(data), total - len(data), reason, tuple(moved))


def _free(path: Path) -> Path:
    """`path`, or the first of path2, path3 ... that is not taken."""
    out, n = path, 1
    while out.exists():
        n += 1
        out = path.with_name(f"{path.name}{n}")
    return out
