"""Keep the sound episodes of a damaged data set, or accept one that another program changed."""

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from robo_rl.data import checksums, labels, layout, statistics
from robo_rl.data.checksums import Checksums, Staged, Verifier
from robo_rl.data.meta import (
    BrokenDataset,
    ChangedDataset,
    Meta,
    committed_files,
    load_meta,
    locked,
    verifier_of,
)
from robo_rl.data.reader import Dataset, load
from robo_rl.data.writer import trim
from robo_rl.types import Each, silently


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did; moved: where the damaged originals are."""

    kept: int
    dropped: int
    reason: str
    moved: tuple[Path, ...]


def repair(root: Path | str, each: Each = silently) -> Repaired:
    """Read everything, each picture too, and keep the episodes before the first damage.

    Nothing is deleted: the old meta folder is copied to `meta.broken`, files that leave the data set or lose
    their end get `.broken` behind their name. Statistics are made anew, checksums kept right; of a damaged
    file of last observations only those observations go. A sound data set is not touched. Raises
    BrokenDataset if not even the first episode is sound, UserError if the folder is being written or holds no
    data set.
    """
    root = Path(root)
    with locked(root):
        verifier, moved, lost = verifier_of(root), [], []

        def put_away(path: Path, copy: bool) -> None:
            away = _free(path.with_name(path.name + ".broken"))
            moved.append(away)
            if copy:
                shutil.copy2(path, away)
            else:
                os.replace(path, away)

        for path in sorted(
            {*verifier.listed(root / "meta/final"), *(root / "meta/final").glob("chunk-*/file-*.parquet")}
        ):
            if not verifier.is_sound(path):
                lost.append(f"{path}: its last observations are lost")
                if path.is_file():
                    put_away(path, False)
        data, reason = _sound_part(root, verifier, each)
        reason = "; ".join([reason, *lost] if reason else lost)
        meta = data.meta
        total = meta.info["total_episodes"]
        if not reason:
            return Repaired(total, 0, "", ())
        success = labels.read_success(meta)
        moved.append(_free(root / "meta.broken"))
        shutil.copytree(root / "meta", moved[-1])
        listed, anew = verifier.sums or Checksums(), {layout.STATS, layout.HISTOGRAMS}
        kept = {k: v for k, v in listed.files.items() if (root / k).is_file() and k not in anew}
        staged = Staged(root, replace(listed, files=kept))
        trim(meta, staged, put_away)
        # last, for it is the commit: killed before, the same damage is found again
        staged.text(
            root / layout.INFO, layout.info_to_json(meta.info, len(data), len(data.action), len(meta.tasks))
        )
        staged.commit()  # sound from here on
        for name in anew:
            (root / name).unlink(missing_ok=True)  # read_totals then takes those of the episodes
        meta = load_meta(root, trust=None)
        sums, totals = seal(meta), statistics.read_totals(meta)
        if "action" in totals:
            statistics.complete(meta, totals, {}, sums)
        else:  # nobody recorded those of the episodes
            statistics.renew(load_meta(root))
    if success is not None:
        labels.write_success(root, success)
    return Repaired(len(data), total - len(data), reason, tuple(moved))


def _sound_part(root: Path, verifier: Verifier, each: Each) -> tuple[Dataset, str]:
    """(the episodes before the first damage, what it is; "": none).

    Looked for first is what can be named exactly, which leaves more of a file than its checksum does.
    """
    keep, reason, explained = 0, "", set()
    while True:
        try:
            data = load(root, keep, trust=None)
            decode_all(data, each)
            check_sums(data.meta, verifier, explained)
            return data, reason
        except BrokenDataset as e:
            found = e
        except Exception:  # a parser may fail in any way on the bytes of a damaged file
            bad = (
                [root / name for name in verifier.sums.files if not verifier.is_sound(root / name)]
                if verifier.sums
                else []
            )
            if not bad:
                raise
            found = ChangedDataset(bad[0], root)
        reason = reason or f"{found.path}: {found.what}"
        explained.add(found.path)
        if found.path in (root / layout.STATS, root / layout.HISTOGRAMS):  # made anew
            continue
        if found.episode <= 0 or (keep and found.episode >= keep):
            raise found
        keep = found.episode


def check_sums(meta: Meta, verifier: Verifier, explained: Collection[Path]) -> None:
    """Raise BrokenDataset unless the files of a data set match their checksums, but for those of
    `explained`."""
    for path in committed_files(meta):
        if path not in explained and not verifier.is_sound(path):
            raise ChangedDataset(
                path,
                meta.root,
                next(
                    (
                        e
                        for e in range(len(meta.lengths))
                        if path
                        in (
                            meta.data_path(e),
                            meta.meta_path(e),
                            *(meta.video_path(view, e) for view in meta.video_file),
                        )
                    ),
                    -1,
                ),
            )


def accept(root: Path | str, tolerance: float | None = None, each: Each = silently) -> Dataset:
    """Take a data set as it is: read everything, each picture too, and write the checksums of all its files.

    tolerance: from now on timestamps may be off by so many seconds (None: 1e-4). Raises BrokenDataset for
    damage that is found without checksums, UserError if the folder is being written or holds no data set.
    """
    root = Path(root)
    tolerance = checksums.TOLERANCE if tolerance is None else tolerance
    with locked(root):
        data = load(root, tolerance=tolerance, trust=None)
        decode_all(data, each)
        seal(data.meta, tolerance)
    return load(root)


def decode_all(data: Dataset, each: Each = silently) -> None:
    """Raise BrokenDataset unless every picture of the data set decodes."""
    for view, e in each("look", [(v, e) for v in data.views for e in range(len(data))], "episode videos"):
        for _ in data.blocks(view, e):
            pass
        data.final_image(view, e)


def seal(meta, tolerance: float | None = None) -> Checksums:
    """Write the checksums of the files of a data set as they are; -> them."""
    sums, files = meta.verifier.sums, committed_files(meta)
    tolerance = tolerance if tolerance is not None else sums.tolerance if sums else checksums.TOLERANCE
    sums = Checksums(
        {p.relative_to(meta.root).as_posix(): (checksums.file_digest(p),) for p in files}, tolerance
    )
    checksums.write(meta.root, sums)
    return sums


def _free(path: Path) -> Path:
    """`path`, or the first of path2, path3 ... that is not taken."""
    out, n = path, 1
    while out.exists():
        n += 1
        out = path.with_name(f"{path.name}{n}")
    return out
