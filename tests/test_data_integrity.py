"""A data set is what was written: single bits, timestamps, widths, statistics, the observation after the last
action."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import DATA, EPISODES, FEATURES, VIDEO, episode, features, picture, psnr, same, set_info, spec

from robo_rl.data import checksums, statistics, video
from robo_rl.data.lerobot import BrokenDataset, Features, Writer, accept, load, repair
from robo_rl.errors import UserError

VIEW = (16, 16)


def whole(i: int, T: int = 0, view: tuple[int, int] | None = VIEW):
    """Episode i with what was observed after its last action."""
    e = episode(i, T, view)
    last = {"front": picture(len(e) + 1, *view, i)[-1]} if view else None
    return replace(e, final=np.arange(6.0) + i, final_images=last)


def record(
    root: Path,
    n: int,
    view: tuple[int, int] | None = VIEW,
    first: int = 0,
    flush_every: int = 2,
    file_mb: int = 8,
) -> None:
    with Writer(root, features(view), spec(), flush_every=flush_every, file_mb=file_mb) as w:
        for i in range(first, first + n):
            w.add(whole(i, view=view))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("small") / "d"
    record(root, 3)
    return root


def read_all(root: Path) -> list[np.ndarray]:
    """Everything that a data set says."""
    data = load(root)
    out = [data.state, data.action, data.reward, data.success, data.source, data.start, data.final]
    for view in data.views:
        out += [data.images(view), *data.final_images(view)]
    return [*out, np.array(data.tasks), np.array(repr((data.features, data.spec)))]


def rewrite(path: Path, **columns) -> None:
    """Put other columns into a parquet file, by another program: without page checksums."""
    table = pq.read_table(path)
    for key, column in columns.items():
        table = table.set_column(table.column_names.index(key), key, column)
    pq.write_table(table, path)


def aged(root: Path) -> None:
    """The data set as it was recorded before checksums, last pictures and the specification in info.json."""
    finals = load(root).final
    shutil.rmtree(root / "meta/final")
    (root / checksums.NAME).unlink()
    info = json.loads((root / "meta/info.json").read_text())
    ours = info["features"]["action"].pop("robo_rl")
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/robo_rl.json").write_text(json.dumps(ours))
    np.save(root / "meta/final_states.npy", finals)


# ---- checksums


def flips(root: Path, count: int, seed: int) -> tuple[int, int]:
    """Flip single bits of a data set's files, one at a time -> (refused, harmless)."""
    rng, said = np.random.default_rng(seed), read_all(root)
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != ".lock")
    refused = 0
    for k in range(count):
        path = files[k % len(files)]
        raw = path.read_bytes()
        bad, at = bytearray(raw), int(rng.integers(len(raw)))
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            now = read_all(root)
        except UserError as e:
            refused += 1
            assert (
                str(root) in str(e)
                and "\n" not in str(e)
                and any(w in str(e) for w in ("estore", "epair", "accept"))
            )
            assert path.name in str(e) or path.name == "info.json", f"byte {at} of {path}: {e}"
        else:  # harmless: white space of the list of checksums
            assert path.name == "checksums.json" and all(map(np.array_equal, said, now)), (
                f"byte {at} of {path}"
            )
            assert checksums.from_text(raw.decode()) == checksums.from_text(bad.decode())
        path.write_bytes(raw)
    assert all(map(np.array_equal, said, read_all(root)))
    return refused, count - refused


def test_a_single_flipped_bit_is_refused_whatever_file_it_is_in(tmp_path, small):
    shutil.copytree(small, tmp_path / "d")
    refused, harmless = flips(tmp_path / "d", 63, seed=0)
    assert refused >= 55


@pytest.mark.slow
def test_300_flipped_bits_are_refused(tmp_path, small):
    shutil.copytree(small, tmp_path / "d")
    assert flips(tmp_path / "d", 300, seed=1)[0] >= 280


def test_what_another_program_edited_is_refused_until_it_is_accepted(tmp_path):
    root = tmp_path / "d"
    record(root, 3)
    set_info(root, robot_type="another")
    with pytest.raises(
        BrokenDataset, match=rf"info.json: it is not what was written.*robo_rl data repair {root} --accept$"
    ):
        load(root)
    with pytest.raises(BrokenDataset, match="info.json"):
        Writer(root)
    assert accept(root).features.robot == "another"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(root)
    record(root, 1, first=3)
    assert len(load(root)) == 4


def test_damage_is_not_accepted(tmp_path):
    root = tmp_path / "d"
    record(root, 3)
    raw = bytearray((root / DATA).read_bytes())
    raw[raw.index(load(root).state[0, :2].tobytes())] ^= 1  # in a page, which has a checksum of its own
    (root / DATA).write_bytes(raw)
    with pytest.raises(BrokenDataset, match="file-000.parquet: it cannot be read"):
        accept(root)


def test_an_old_data_set_reads_with_a_warning_continues_and_can_be_given_checksums(tmp_path):
    root = tmp_path / "d"
    record(root, 3, view=None)
    aged(root)
    with pytest.warns(
        UserWarning, match=rf"data set {root} without checksums.*robo_rl data repair {root} --accept"
    ):
        data = load(root)
    assert data.spec == spec() and data.sources[1] == "expert" and (data.final[:, 0] == [0, 1, 2]).all()
    record(root, 2, view=None, first=3)
    with pytest.warns(UserWarning, match="files of data set"):
        data = load(root)
    same(data, 5)
    assert data.spec == spec() and data.final[:, 0].tolist() == [0, 1, 2, 3, 4]
    accept(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(root)) == 5


def test_a_lost_or_damaged_list_of_checksums_is_named_with_what_to_do(tmp_path):
    root = tmp_path / "d"
    record(root, 2, view=None)
    text = (root / checksums.NAME).read_text()
    (root / checksums.NAME).write_text(text.replace('"tolerance_s": 0.0001', '"tolerance_s": 0.1001'))
    with pytest.raises(
        BrokenDataset, match=r"checksums.json: its own SHA-256 is wrong.*robo_rl data repair .* --accept"
    ):
        load(root)
    with pytest.raises(BrokenDataset, match="checksums.json"):
        repair(root)
    assert len(accept(root)) == 2


def test_repair_makes_statistics_and_checksums_anew(tmp_path):
    root = tmp_path / "d"
    record(root, 4)
    good = (root / "meta/stats.json").read_text()
    (root / "meta/stats.json").write_text(good.replace("0", "1", 1))
    with pytest.raises(BrokenDataset, match=r"stats.json: it is not what was written.*robo_rl data repair"):
        load(root)
    done = repair(root)
    assert (done.kept, done.dropped) == (4, 0) and "stats.json" in done.reason
    same(load(root), 4, VIEW)
    new = json.loads((root / "meta/stats.json").read_text())
    for key, per in json.loads(good).items():
        for s, x in per.items():
            np.testing.assert_allclose(
                new[key][s], x, rtol=1e-6, atol=2e-2 if "image" in key else 1e-9, err_msg=f"{key} {s}"
            )


def test_repair_keeps_the_files_before_one_whose_bits_flipped(tmp_path):
    root = tmp_path / "d"
    for first in (0, 2):
        record(root, 2, first=first)
    path = root / VIDEO.replace("000.mp4", "001.mp4")
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    path.write_bytes(raw)
    done = repair(root)
    assert (done.kept, done.dropped) == (2, 2) and "file-001.mp4" in done.reason
    same(load(root), 2, VIEW)
    assert load(root).final_images("front")[1].tolist() == [True, True]
    record(root, 2, first=2)
    same(load(root), 4, VIEW)


def test_a_table_that_cannot_be_read_is_named_by_the_writer_that_is_to_go_on(tmp_path):
    record(tmp_path / "d", 2)
    (path,) = (tmp_path / "d" / "data").rglob("*.parquet")
    path.write_bytes(b"damaged")
    with pytest.raises(BrokenDataset, match=r"file-000.parquet: it cannot be read"):
        record(tmp_path / "d", 2, first=2)


def test_repair_gives_up_damaged_last_observations_and_keeps_the_episodes(tmp_path):
    root = tmp_path / "d"
    for first in (0, 2):
        record(root, 2, first=first, file_mb=0)
    path = root / "meta/final/chunk-000/file-001.parquet"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BrokenDataset, match=r"meta/final/chunk-000/file-001.parquet: .*data repair"):
        load(root)
    done = repair(root)
    assert (done.kept, done.dropped) == (4, 0) and "last observations are lost" in done.reason
    data = load(root)
    same(data, 4, VIEW)
    assert np.isfinite(data.final).all(1).tolist() == [True, True, False, False]
    path.with_name("file-000.parquet").unlink()
    with pytest.raises(BrokenDataset, match=r"file-000.parquet: the file is missing"):
        load(root)


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from test_data import features
from test_data_integrity import VIEW, spec, whole
from robo_rl.data.lerobot import Writer
with Writer({root!r}, features(VIEW), spec(), flush_every=1) as w:
    for i in range(len(w), 10_000):
        print("begins", flush=True)
        w.add(whole(i))
        print(w.episodes, flush=True)
"""


def killed(root: Path, steps: int, delay: float) -> int:
    """Run a writer, kill -9 it `delay` seconds after its episode number `steps` began -> episodes that it
    said were saved."""
    code = WRITER.format(tests=str(Path(__file__).parent), root=str(root))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    said = [child.stdout.readline().strip() for _ in range(2 * steps + 1)]
    time.sleep(delay)
    os.kill(child.pid, signal.SIGKILL)
    said += [line.strip() for line in child.stdout]
    child.wait()
    return max((int(x) for x in said if x.isdigit()), default=0)


@pytest.mark.slow
def test_kill_9_anywhere_loses_at_most_the_episode_in_progress(tmp_path):
    rng, root = np.random.default_rng(0), tmp_path / "d"
    for _ in range(25):
        saved = killed(root, int(rng.integers(1, 4)), float(rng.uniform(0, 0.03)))
        now = len(load(root)) if (root / "meta/info.json").exists() else 0
        assert saved <= now <= saved + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # all files have their checksums
            same(load(root), now, VIEW)
        assert np.isfinite(load(root).final).all()
        assert repair(root).reason == ""
    assert now > 25


def test_a_writer_killed_at_any_rename_leaves_files_that_match_their_checksums(tmp_path):
    """Snapshots of the folder before every rename are all the states that a kill can leave behind."""
    root, snapshots, on = tmp_path / "d", [], [True]

    def spy(event: str, args: tuple) -> None:
        if on[0] and event == "os.rename" and str(args[1]).startswith(str(root)):
            snapshots.append(
                (tmp_path / f"s{len(snapshots)}", w.episodes, Path(args[1]).relative_to(root).as_posix())
            )
            shutil.copytree(root, snapshots[-1][0])

    sys.addaudithook(spy)
    try:
        with Writer(root, features(VIEW), spec(), flush_every=1) as w:
            for i in range(3):
                w.add(whole(i))
    finally:
        on[0] = False
    order = [name for _, n, name in snapshots if n == 2]
    assert order == [
        checksums.NAME,
        VIDEO,
        DATA,
        "meta/final/chunk-000/file-000.parquet",
        "meta/stats.json",
        "meta/image_histograms.json",
        EPISODES,
        "meta/info.json",
    ]
    for folder, committed, _ in snapshots[-16:]:
        same(load(folder), committed, VIEW)
        if folder.name[-1] in "0369" and committed == 2:
            with Writer(folder) as again:  # another episode than the one that was lost
                again.add(whole(7))
            data = load(folder)
            assert data.final[:, 0].tolist() == [0, 1, 7] and len(data.state) == sum(
                len(whole(i)) for i in (0, 1, 7)
            )
            assert data.final_images("front")[1].all()
    for path in root.rglob("*"):
        if path.is_file() and path.name != ".lock" and path != root / checksums.NAME:
            listed = checksums.from_text((root / checksums.NAME).read_text()).files
            assert listed[path.relative_to(root).as_posix()] == (checksums.file_digest(path),)


def test_what_is_synced_before_it_gets_its_name(tmp_path):
    """Each file and, before the commit, each folder: a power cut keeps the order of the renames."""
    events, fsync, replace_ = [], os.fsync, os.replace
    os.fsync = lambda fd: events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd)
    os.replace = lambda a, b: events.append(("name", str(a), str(b))) or replace_(a, b)
    try:
        record(tmp_path / "d", 1)
    finally:
        os.fsync, os.replace = fsync, replace_
    named = [i for i, e in enumerate(events) if e[0] == "name"]
    for i in named:
        assert ("sync", events[i][1]) in events[:i]
    commit = next(i for i in named if events[i][2].endswith("info.json"))
    first = next(i for i in named if not events[i][2].endswith("checksums.json"))
    listed = max(i for i in named if i < first)
    assert ("sync", str(tmp_path / "d/meta")) in events[listed:first]
    for i in named:
        if first <= i < commit:
            assert ("sync", str(Path(events[i][2]).parent)) in events[i:commit]
    assert ("sync", str(tmp_path / "d/meta")) in events[commit:]


# ---- the observation after the last action


@pytest.mark.parametrize("view", [None, (16, 16), (33, 47)])
def test_what_was_observed_after_the_last_action_comes_back(tmp_path, view):
    root = tmp_path / "d"
    record(root, 5, view)
    data = load(root)
    same(data, 5, view)
    for i in range(5):
        mine, theirs = data.episode(i), whole(i, view=view)
        np.testing.assert_array_equal(mine.final, theirs.final)
        if view:
            assert psnr(mine.final_images["front"], theirs.final_images["front"]) > 33
    assert np.isfinite(data.after).all()
    np.testing.assert_array_equal(data.after[data.to - 1], data.final)
    np.testing.assert_array_equal(np.delete(data.after, data.to - 1, 0), np.delete(data.state, data.from_, 0))


def test_where_the_last_picture_was_not_recorded_it_is_said(tmp_path):
    with Writer(tmp_path, features(VIEW)) as w:
        w.add(replace(whole(0), final_images=None))
        w.add(episode(1, view=VIEW))
        w.add(whole(2))
    data = load(tmp_path)
    images, known = data.final_images("front")
    assert known.tolist() == [False, False, True] and not images[:2].any() and images[2].any()
    assert np.isfinite(data.final).all(1).tolist() == [True, False, True]
    assert data.episode(0).final is not None and data.episode(0).final_images is None
    assert data.meta.final_at.tolist() == [[0, 0], [-1, -1], [0, 1]]


@pytest.mark.parametrize(
    "change",
    [
        {"final_images": {}},
        {"final_images": {"front": np.zeros((8, 8, 3), np.uint8)}},
        {"final": None},
        {"final_images": {"front": np.zeros((16, 16, 3))}},
    ],
)
def test_last_pictures_that_do_not_fit_the_others_are_refused(change):
    with pytest.raises(UserError, match="final_images must be uint8 pictures of"):
        replace(whole(0), **change)


def test_the_last_picture_is_compressed_as_the_others_are(tmp_path):
    """A judge must not be able to tell it from them: its error has the size of that of frames at its
    place."""
    rng = np.random.default_rng(0)
    with Writer(tmp_path, features((32, 32))) as w:
        for i in range(12):
            noisy = picture(9 + i % 2, 32, 32, i) // 2 + rng.integers(
                0, 100, (9 + i % 2, 32, 32, 3), dtype=np.uint8
            )
            base = episode(i, len(noisy) - 1)
            w.add(
                replace(
                    base, images={"front": noisy[:-1]}, final=np.zeros(6), final_images={"front": noisy[-1]}
                )
            )
    rng, data, last, others = np.random.default_rng(0), load(tmp_path), [], []
    for i in range(12):
        noisy = picture(9 + i % 2, 32, 32, i) // 2 + rng.integers(
            0, 100, (9 + i % 2, 32, 32, 3), dtype=np.uint8
        )
        got = data.frames("front", i)
        last.append(psnr(data.final_image("front", i), noisy[-1]))
        # frames of its parity
        others += [psnr(a, b) for a, b in zip(got[len(got) % 2 :: 2], noisy[len(got) % 2 :: 2], strict=False)]
    assert abs(np.mean(last) - np.mean(others)) < 0.5


def test_lerobot_sees_neither_rows_nor_frames_of_the_last_observation(tmp_path):
    root = tmp_path / "d"
    record(root, 4)
    frames = sum(len(episode(i)) for i in range(4))
    assert pq.read_metadata(root / DATA).num_rows == frames
    import av

    with av.open(str(root / VIDEO)) as c:
        assert c.streams.video[0].frames == frames
    assert sorted(p.name for p in (root / "meta/episodes").rglob("*.parquet")) == ["file-000.parquet"]


def test_last_observations_of_other_episodes_are_refused(tmp_path):
    root = tmp_path / "d"
    record(root, 3, view=None)
    rewrite(root / "meta/final/chunk-000/file-000.parquet", length=pa.array([5, 9, 7]))
    with pytest.raises(BrokenDataset, match="it tells of other episodes"):
        load(root, trust=None)


# ---- timestamps, widths, the control specification


def shifted(root: Path, episode: int, frame: int, seconds: float) -> None:
    table = pq.read_table(root / DATA)
    time = table["timestamp"].to_numpy().copy()
    time[(np.array(table["episode_index"]) == episode) & (np.array(table["frame_index"]) >= frame)] += seconds
    rewrite(root / DATA, timestamp=pa.array(time))
    (root / checksums.NAME).unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore:.*without checksums")
def test_a_gap_in_the_timestamps_is_named_and_a_tolerance_can_be_set(tmp_path):
    root = tmp_path / "d"
    record(root, 4, view=None)
    shifted(root, 2, 3, 0.4)
    with pytest.raises(
        BrokenDataset,
        match=r"episode 2: 0.45 s from frame 2 to frame 3, expected 0.05 s, tolerance 0.0001 s. "
        r"Keep the 2 episodes.*--accept --tolerance 0.4",
    ):
        load(root)
    assert len(load(root, tolerance=0.401)) == 4
    with pytest.raises(BrokenDataset, match="episode 2"):
        load(root, tolerance=0.399)
    with pytest.raises(BrokenDataset, match="episode 2"):
        accept(root)
    accept(root, tolerance=0.41)
    assert len(load(root)) == 4  # the tolerance goes with the data set
    record(root, 1, view=None, first=4)
    assert len(load(root)) == 5
    with pytest.raises(BrokenDataset, match="episode 2"):
        load(root, tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:.*without checksums")
@pytest.mark.parametrize(
    ("seconds", "fine"), [(5e-5, True), (-5e-5, True), (1.5e-4, False), (-1.5e-4, False), (np.nan, False)]
)
def test_the_tolerance_of_timestamps_is_a_tenth_of_a_millisecond(tmp_path, seconds, fine):
    record(tmp_path, 3, view=None)
    shifted(tmp_path, 1, 2, seconds)
    if fine:
        load(tmp_path)
    else:
        with pytest.raises(BrokenDataset, match="episode 1: .* from frame 1 to frame 2"):
            load(tmp_path)


@pytest.mark.filterwarnings("ignore:.*without checksums")
def test_a_timestamp_may_be_off_by_what_its_column_cannot_tell_apart_and_no_more(tmp_path):
    """At 4 Hz steps are exact in float64: one unit in the last place is allowed at tolerance 0, two are
    not."""
    for units, fine in ((1, True), (2, False)):
        root = tmp_path / str(units)
        with Writer(root, replace(features(None), fps=4), flush_every=1) as w:
            w.add(replace(episode(0, 3), final=None))
        table = pq.read_table(root / DATA)
        time = np.array([0.0, 0.25 + units * np.spacing(0.25), 0.5])
        rewrite(root / DATA, timestamp=pa.array(time))
        (root / checksums.NAME).unlink()
        assert table.num_rows == 3
        if fine:
            load(root, tolerance=0.0)
        else:
            with pytest.raises(BrokenDataset, match="episode 0"):
                load(root, tolerance=0.0)


def test_an_episode_of_one_frame_is_read(tmp_path):
    with Writer(tmp_path, features(None), spec()) as w:
        e = whole(0, 4, None)
        first = {
            k: getattr(e, k)[:1] for k in ("state", "action", "reward", "phase") if getattr(e, k) is not None
        }
        w.add(replace(e, **first, source="expert"))
        w.add(whole(1, 4, None))
    assert (load(tmp_path).to - load(tmp_path).from_).tolist() == [1, 4]


@pytest.mark.filterwarnings("ignore:.*without checksums")
def test_a_video_that_lacks_its_last_frame_is_refused_without_checksums_too(tmp_path):
    record(tmp_path, 3)
    aged(tmp_path)
    (path,) = tmp_path.glob("videos/**/*.mp4")
    frames = load(tmp_path).images("front")
    for cut, fine in ((0, True), (1, False)):
        video.encode(path, [frames[: len(frames) - cut]], 20)
        if fine:
            load(tmp_path)
        else:
            with pytest.raises(BrokenDataset, match="front.*frames"):
                load(tmp_path)


def test_a_long_episode_keeps_its_time_within_what_its_column_can_tell(tmp_path):
    """Float32 seconds after an hour are 0.24 ms apart: that is no gap."""
    with Writer(tmp_path, Features(10, FEATURES.state[:1], FEATURES.action[:1])) as w:
        w.add(replace(episode(0, 40_000), state=np.zeros((40_000, 1)), action=np.zeros((40_000, 1))))
    assert len(load(tmp_path).action) == 40_000


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"observation.state": [5]}, "column 'observation.state' has 6 numbers a row, meta/info.json says 5"),
        ({"action": [2]}, "column 'action' has 3 numbers a row, meta/info.json says 2"),
        ({"next.reward": [2]}, "column 'next.reward' has 1 number a row, meta/info.json says 2"),
        ({"observation.images.front": [16, 18, 3]}, "its frames are 16x16, meta/info.json says 16x18"),
        ({"observation.images.front": [14, 16, 3]}, "its frames are 16x16, meta/info.json says 14x16"),
    ],
)
def test_widths_that_disagree_with_the_meta_data_are_named(tmp_path, small, features, words):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    info = json.loads((root / "meta/info.json").read_text())
    for key, shape in features.items():
        info["features"][key]["shape"] = shape
    (root / "meta/info.json").write_text(json.dumps(info))
    shutil.rmtree(root / "meta/final")
    with pytest.raises(BrokenDataset, match=words):
        load(root, trust=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunks_size": 0}, "chunks_size must be a whole number >= 1, got 0"),
        ({"chunks_size": 2.5}, "chunks_size must be a whole number >= 1, got 2.5"),
        ({"total_episodes": -1}, "total_episodes must be a whole number >= 0, got -1"),
        ({"total_frames": "many"}, "total_frames must be a whole number >= 0, got 'many'"),
        ({"fps": 0}, "fps must be in"),
        ({"features": {"action": {"dtype": "float32", "shape": [-3], "names": None}}}, "shape of 'action'"),
    ],
)
def test_counts_that_cannot_be_are_one_line(tmp_path, small, change, words):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    set_info(root, **change)
    with pytest.raises(BrokenDataset, match=words) as e:
        load(root, trust=None)
    assert "meta/info.json" in str(e.value) and "\n" not in str(e.value)


def test_the_control_specification_survives_a_new_info_json_with_the_old_features(tmp_path, small):
    """What LeRobot's tools write (delete_episodes, split, merge, add_features): info.json anew, `features` as
    they were, no file that they do not know."""
    root = tmp_path / "d"
    shutil.copytree(small, root)
    old = json.loads((root / "meta/info.json").read_text())
    kept = (
        "codebase_version",
        "robot_type",
        "total_episodes",
        "total_frames",
        "total_tasks",
        "chunks_size",
        "fps",
        "data_path",
        "video_path",
        "features",
    )
    (root / "meta/info.json").write_text(json.dumps({k: old[k] for k in kept} | {"splits": {}}))
    for name in (checksums.NAME, "meta/image_histograms.json"):
        (root / name).unlink()
    shutil.rmtree(root / "meta/final")
    with pytest.warns(UserWarning, match="without checksums"):
        data = load(root)
    assert data.spec == spec() and data.sources == load(small).sources
    same(data, 3, VIEW)
    assert json.loads(json.dumps(asdict(data.spec))) == old["features"]["action"]["robo_rl"]["spec"]


# ---- statistics


def quantiles(x: np.ndarray) -> dict[str, np.ndarray]:
    return {q: np.quantile(x.astype(np.float64), level, axis=0) for q, level in statistics.QUANTILES.items()}


def test_quantiles_are_those_of_all_frames(tmp_path):
    """Episodes of very different numbers: the means of their quantiles are far off."""
    rng = np.random.default_rng(0)
    for first in range(0, 6, 3):
        with Writer(tmp_path, FEATURES, flush_every=2) as w:
            for i in range(first, first + 3):
                e = episode(i, T=20 + 50 * i)
                w.add(
                    replace(
                        e, state=rng.normal(3 * i, 1 + i, e.state.shape), reward=rng.exponential(size=len(e))
                    )
                )
    data, stats = load(tmp_path), json.loads((tmp_path / "meta/stats.json").read_text())
    columns = {
        "observation.state": data.state,
        "action": data.action,
        "next.reward": data.reward[:, None],
        "next.done": data.done[:, None],
        "index": np.arange(len(data.action))[:, None],
    }
    for key, x in columns.items():
        for q, want in quantiles(x).items():
            np.testing.assert_array_equal(stats[key][q], want, err_msg=f"{key} {q}")
    means = np.mean(
        [np.quantile(data.state[a:b], 0.9, axis=0) for a, b in zip(data.from_, data.to, strict=True)], 0
    )
    assert np.abs(means - stats["observation.state"]["q90"]).max() > 1


def test_quantiles_of_pictures_are_those_of_the_pixels_that_were_looked_at(tmp_path):
    with Writer(tmp_path, features(VIEW), flush_every=2) as w:
        for i in range(5):
            w.add(replace(whole(i), images={"front": whole(i).images["front"] // (i + 1)}))
    pixels = np.concatenate([whole(i).images["front"] // (i + 1) for i in range(5)]).reshape(-1, 3) / 255
    stats = json.loads((tmp_path / "meta/stats.json").read_text())["observation.images.front"]
    for q, want in quantiles(pixels).items():
        np.testing.assert_allclose(np.ravel(stats[q]), want, atol=1e-12)


def test_between_flushes_there_are_no_quantiles_rather_than_wrong_ones(tmp_path):
    w = Writer(tmp_path, features(VIEW), flush_every=1)
    w.add(whole(0))
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    assert all("mean" in per and not set(per) & set(statistics.QUANTILES) for per in stats.values())
    load(tmp_path)
    w.close()
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    assert all(set(statistics.QUANTILES) < set(per) for per in stats.values())


def test_histograms_of_another_count_of_frames_are_made_anew(tmp_path):
    record(tmp_path, 2)
    (tmp_path / "meta/image_histograms.json").write_text(
        '{"front": ' + json.dumps(np.ones((3, 256), int).tolist()) + "}"
    )
    accept(tmp_path)
    record(tmp_path, 2, first=2)
    data, stats = (
        load(tmp_path),
        json.loads((tmp_path / "meta/stats.json").read_text())["observation.images.front"],
    )
    for q, want in quantiles(data.images("front").reshape(-1, 3) / 255).items():
        np.testing.assert_allclose(np.ravel(stats[q]), want, atol=1e-12)


# ---- what a failed rename and a growing data set leave


@pytest.mark.parametrize("which", range(7))
def test_a_flush_that_fails_between_its_renames_is_made_up_for_by_the_next(tmp_path, which):
    root, replace_, calls = tmp_path / "d", os.replace, []
    w = Writer(root, features(VIEW), spec(), flush_every=10)
    w.add(whole(0))
    w.flush()
    w.add(whole(1))

    def fail(a, b):
        if Path(b).name != "checksums.json":
            calls.append(b)
            if len(calls) == which + 1:
                raise OSError(5, "Input/output error")
        replace_(a, b)

    os.replace = fail
    try:
        with pytest.raises(UserError, match="1 episodes saved before are intact"):
            w.flush()
    finally:
        os.replace = replace_
    same(load(root), 1, VIEW)
    assert not list(root.rglob("*.tmp"))
    w.add(whole(2))
    w.close()
    same(load(root), 3, VIEW)
    assert load(root).final_images("front")[1].all()
    assert repair(root).reason == ""


def test_a_file_that_grew_after_the_checksums_were_read_is_sound(tmp_path):
    record(tmp_path, 1)
    old, path = checksums.Verifier(tmp_path), tmp_path / VIDEO
    data = load(tmp_path)
    with Writer(tmp_path, features(VIEW), spec(), flush_every=1) as w:
        for i in range(1, 4):
            w.add(whole(i))
    shutil.copy(tmp_path / "videos/observation.images.front/chunk-000/file-001.mp4", path.with_name("copy"))
    assert old.is_sound(tmp_path / "meta/stats.json") and old.read(tmp_path / "meta/info.json")[1]
    assert old.is_sound(path) and len(data.frames("front", 0)) == len(whole(0))
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert not old.is_sound(path) and not old.read(path)[1]
    path.unlink()
    assert not old.is_sound(path)
    assert old.is_sound(path.with_name("copy"))  # of which nothing is known


# ---- a writer that opens what is there


def test_files_of_a_writer_killed_before_its_first_commit_are_put_aside_and_nothing_else(tmp_path):
    root = tmp_path / "d"
    (root / "data/chunk-000").mkdir(parents=True)
    for name in ("file-000.parquet", "file-001.mp4", "file-notes.txt"):
        (root / "data/chunk-000" / name).write_bytes(b"left")
    record(root, 1, view=None)
    left = sorted(p.name for p in (root / "data/chunk-000").iterdir())
    assert left == ["file-000.parquet", "file-000.parquet.orphan", "file-001.mp4.orphan", "file-notes.txt"]
    same(load(root), 1, None)


def test_a_writer_that_is_refused_lets_go_of_the_folder(tmp_path, small):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    with pytest.raises(UserError, match="was made otherwise") as refused:
        Writer(root, features(None), spec())
    assert refused.value  # it is held, and with it the writer that did not come to be
    with Writer(root, features(VIEW), spec()) as w:
        assert len(w) == 3


@pytest.mark.parametrize("episodes", [0, 2])
def test_files_behind_the_last_that_is_named_go_whatever_their_number(tmp_path, episodes):
    root = tmp_path / "d"
    record(root, episodes, view=None)
    behind = [
        root / "data/chunk-000" / f"file-{k:03d}.parquet" for k in (0 if not episodes else 1, 5, 100, 101)
    ]
    behind[0].parent.mkdir(parents=True, exist_ok=True)
    for path in behind:
        path.write_bytes(b"of a flush that was cut short")
    with Writer(root, features(None), spec()) as w:
        assert len(w) == episodes and not any(path.exists() for path in behind)
    assert episodes == 0 or len(load(root)) == episodes


def test_opening_a_data_set_leaves_out_checksums_of_files_that_are_gone(tmp_path, small):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    sums = checksums.from_text((root / checksums.NAME).read_text())
    checksums.write(root, replace(sums, files=sums.files | {"data/chunk-000/file-007.parquet": ("0" * 64,)}))
    assert (root / checksums.NAME).read_text() != checksums.to_text(sums)
    with Writer(root, features(VIEW), spec()) as w:
        assert len(w) == 3
    assert (root / checksums.NAME).read_text() == checksums.to_text(sums)


def test_a_specification_that_info_json_lacks_is_written_when_the_data_set_goes_on(tmp_path, small):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    aged(root)
    with Writer(root, features(VIEW), spec()) as w:
        w.add(whole(3))
    there = json.loads((root / "meta/info.json").read_text())["features"]["action"]
    assert (
        there["robo_rl"]["spec"]
        == json.loads((small / "meta/info.json").read_text())["features"]["action"]["robo_rl"]["spec"]
    )


def test_an_episode_that_does_not_begin_where_the_last_one_ended_is_named(tmp_path, small):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    [path] = sorted((root / "meta/episodes").rglob("*.parquet"))[:1]
    starts = pq.read_table(path)["dataset_from_index"].to_numpy().copy()
    starts[1] += 1
    rewrite(path, dataset_from_index=pa.chunked_array([starts]))
    with pytest.raises(BrokenDataset, match="lengths add up to"):
        load(root, trust=None)


def test_a_data_set_without_starts_has_none_and_one_wrong_index_is_named_by_its_episode(tmp_path, small):
    root = tmp_path / "d"
    shutil.copytree(small, root)
    [path] = sorted((root / "data").rglob("*.parquet"))[:1]
    index = pq.read_table(path)["index"].to_numpy().copy()
    index[-1] += 5
    rewrite(path, index=pa.chunked_array([index]))
    with pytest.raises(
        BrokenDataset, match=f"row {len(index) - 1} is frame {index[-1]}, expected {len(index) - 1}"
    ):
        load(root, trust=None)
    index[-1] -= 5
    rewrite(path, index=pa.chunked_array([index]))
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["complementary_info.start"]), path)
    info = json.loads((root / "meta/info.json").read_text())
    del info["features"]["complementary_info.start"]
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / checksums.NAME).unlink()
    with pytest.warns(UserWarning, match="without checksums") as said:
        data = load(root)
    # the warning names the line that loaded it
    assert (data.start == -1).all() and said[0].filename == __file__
