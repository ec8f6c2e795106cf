"""Data sets on disk: LeRobot's layout, atomic growth, damage reports, sampling, videos."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import robo_rl as command

from robo_rl.data import video
from robo_rl.data.lerobot import (
    BrokenDataset,
    Episode,
    Features,
    Writer,
    accept,
    chunks,
    load,
    repair,
    write_video,
)
from robo_rl.errors import UserError
from robo_rl.types import ActionAxis, ControlSpec

DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"


def picture(T: int, h: int, w: int, seed: int) -> np.ndarray:
    """A moving colour gradient, uint8[T, h, w, 3]."""
    t, y, x = np.mgrid[:T, :h, :w]
    waves = [np.sin(x / 9 + t / 3 + seed), np.cos(y / 11 - t / 5), np.sin((x + y) / 17 + seed)]
    return (127 + 100 * np.stack(waves, -1)).astype(np.uint8)


def episode(i: int, T: int = 0, view: tuple[int, int] | None = None) -> Episode:
    rng = np.random.default_rng(i)
    T = T or 5 + i % 4
    return Episode(
        state=rng.normal(size=(T, 6)),
        action=rng.uniform(-1, 1, (T, 3)),
        reward=rng.normal(size=T),
        task=f"pick the {('red', 'blue')[i % 2]} cube",
        success=i % 3 == 0,
        start=1000 + i,
        terminated=i % 3 == 0,
        source=["policy"] * (T - 2) + ["human"] * 2,
        images={"front": picture(T, *view, i)} if view else {},
    )


def features(view: tuple[int, int] | None = None) -> Features:
    return Features.of(episode(0, view=view), fps=20)


FEATURES = features()


def fill(
    root: Path,
    n: int,
    view: tuple[int, int] | None = None,
    first: int = 0,
    flush_every: int = 2,
    file_mb: int = 8,
):
    with Writer(root, features(view), flush_every=flush_every, file_mb=file_mb) as w:
        for i in range(first, first + n):
            w.add(episode(i, view=view))


def same(data, n: int, view: tuple[int, int] | None = None) -> None:
    """`data` holds episodes 0 .. n-1, exactly (pictures: nearly)."""
    assert len(data) == n
    for i in range(n):
        a, b = data.episode(i), episode(i, view=view)
        for name in ("state", "action", "reward"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        for name in ("task", "success", "start", "terminated"):
            assert getattr(a, name) == getattr(b, name)
        assert list(a.source) == list(b.source)
        if view:
            assert psnr(a.images["front"], b.images["front"]) > 33


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9))


def spec(low: float = -0.1) -> ControlSpec:
    axes = tuple(ActionAxis(n, "m", low, -low, "delta", "base") for n in "xyz")
    return ControlSpec("mujoco", "pick_cube", axes, period=0.05, max_steps=100)


# ---- round trip and layout


@pytest.mark.parametrize("view", [None, (48, 64), (33, 47)])
def test_episodes_come_back_as_they_were_written(tmp_path, view):
    fill(tmp_path / "d", 7, view)
    data = load(tmp_path / "d")
    same(data, 7, view)
    assert data.tasks == ["pick the red cube", "pick the blue cube"]
    assert data.done.sum() == 7 and data.done[data.to - 1].all()
    assert [len(load(tmp_path / "d", episodes=k)) for k in (1, 3)] == [1, 3]
    if view:
        assert data.images("front").shape == (len(data.action), *view, 3)


def test_the_files_are_what_lerobot_writes(tmp_path):
    fill(tmp_path / "d", 3, (48, 64))
    root = tmp_path / "d"
    info = json.loads((root / "meta/info.json").read_text())
    frames = sum(len(episode(i)) for i in range(3))
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20 and isinstance(info["fps"], int)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, frames, 2)
    assert info["splits"] == {"train": "0:3"} and info["chunks_size"] == 1000
    assert info["data_path"].format(chunk_index=0, file_index=0) == DATA
    front = "observation.images.front"
    assert info["video_path"].format(video_key=front, chunk_index=0, file_index=0) == VIDEO
    names = ["action_0", "action_1", "action_2"]
    action = info["features"]["action"]
    assert {k: v for k, v in action.items() if k != "robo_rl"} == {
        "dtype": "float32",
        "shape": [3],
        "names": names,
    }
    camera = info["features"][front]
    assert camera["dtype"] == "video" and camera["shape"] == [48, 64, 3]
    assert camera["info"]["video.codec"] == video.codec_name()
    assert camera["info"]["video.pix_fmt"] == "yuv420p"

    schema = pq.read_schema(root / DATA)
    types = {name: str(schema.field(name).type) for name in schema.names}
    assert types == {
        "observation.state": "fixed_size_list<element: float>[6]",
        "action": "fixed_size_list<element: float>[3]",
        "next.reward": "float",
        "next.done": "bool",
        "next.truncated": "bool",
        "next.success": "bool",
        "complementary_info.source": "int64",
        "complementary_info.start": "int64",
        "timestamp": "float",
        "frame_index": "int64",
        "episode_index": "int64",
        "index": "int64",
        "task_index": "int64",
    }
    assert set(types) | {front} == set(info["features"])
    table = pq.read_table(root / DATA)
    assert table["index"].to_pylist() == list(range(frames))
    assert table["frame_index"].to_pylist() == [k for i in range(3) for k in range(len(episode(i)))]
    np.testing.assert_allclose(table["timestamp"], np.array(table["frame_index"]) / 20, rtol=1e-6)

    meta = pq.read_table(root / EPISODES)
    plain = {n: str(meta.schema.field(n).type) for n in meta.column_names if not n.startswith("stats/")}
    key = f"videos/{front}"
    assert plain == {
        "episode_index": "int64",
        "tasks": "list<element: string>",
        "length": "int64",
        "data/chunk_index": "int64",
        "data/file_index": "int64",
        "dataset_from_index": "int64",
        "dataset_to_index": "int64",
        f"{key}/chunk_index": "int64",
        f"{key}/file_index": "int64",
        f"{key}/from_timestamp": "double",
        f"{key}/to_timestamp": "double",
        "meta/episodes/chunk_index": "int64",
        "meta/episodes/file_index": "int64",
    }
    assert meta["tasks"].to_pylist()[1] == ["pick the blue cube"]
    np.testing.assert_allclose(meta[f"{key}/to_timestamp"], np.cumsum(meta["length"]) / 20)
    names = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
    stats = {n for n in meta.column_names if n.startswith("stats/")}
    assert stats == {f"stats/{k}/{s}" for k in info["features"] for s in names}
    assert str(meta.schema.field("stats/next.done/min").type) == "list<element: bool>"
    assert np.shape(meta[f"stats/{front}/mean"].to_pylist()) == (3, 3, 1, 1)

    tasks = pq.read_table(root / "meta/tasks.parquet")
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["__index_level_0__"]
    assert tasks["task_index"].to_pylist() == [0, 1]


def test_statistics_are_those_of_all_frames_also_after_a_resume(tmp_path):
    fill(tmp_path / "d", 5, (16, 16))
    fill(tmp_path / "d", 4, (16, 16), first=5, flush_every=1)
    stats, data = json.loads((tmp_path / "d/meta/stats.json").read_text()), load(tmp_path / "d")
    columns = {"observation.state": data.state, "action": data.action, "next.reward": data.reward[:, None]}
    for key, x in columns.items():
        for name, value in (("min", x.min(0)), ("max", x.max(0)), ("mean", x.mean(0)), ("std", x.std(0))):
            np.testing.assert_allclose(stats[key][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{key} {name}")
        assert stats[key]["count"] == [len(x)]
    pixels = np.concatenate([episode(i, view=(16, 16)).images["front"] for i in range(9)]) / 255
    mean = np.ravel(stats["observation.images.front"]["mean"])
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), rtol=1e-6)
    one = pq.read_table(tmp_path / "d" / EPISODES).to_pylist()[2]
    q90 = np.quantile(episode(2).action, 0.9, axis=0)
    np.testing.assert_allclose(one["stats/action/q90"], q90, rtol=1e-5)


def test_the_control_spec_travels_with_the_data(tmp_path):
    with Writer(tmp_path / "d", spec=spec()) as w:
        w.add(episode(0))
    data = load(tmp_path / "d")
    assert data.spec == spec() and data.features.action == ("x", "y", "z") and data.features.fps == 20


def test_a_data_set_that_says_nothing_of_its_control_reads_without(tmp_path):
    """As LeRobot's own are: no control specification, and nobody knows who acted."""
    fill(tmp_path / "d", 2)
    info = json.loads((tmp_path / "d" / "meta/info.json").read_text())["features"]
    del info["action"]["robo_rl"]
    set_info(tmp_path / "d", features=info)
    data = load(tmp_path / "d", trust=None)
    assert data.spec is None and data.sources == ("unknown",) and len(data) == 2


def test_the_state_after_the_last_action_travels_where_it_is_known(tmp_path):
    known = replace(episode(0), final=np.arange(6.0))
    with Writer(tmp_path / "new", FEATURES) as w:
        w.add(known)
        w.add(episode(1))
    data = load(tmp_path / "new")
    assert (data.final[0] == np.arange(6)).all() and np.isnan(data.final[1]).all()
    assert (data.episode(0).final == known.final).all() and data.episode(1).final is None
    with pytest.raises(UserError, match="final must be 6 finite numbers"):
        replace(known, final=np.zeros(5))


def test_final_states_follow_their_episodes_through_continuations(tmp_path):
    fill(tmp_path, 2)
    assert not (tmp_path / "meta/final").exists() and np.isnan(load(tmp_path).final).all()
    # of an old data set
    np.save(tmp_path / "meta/final_states.npy", np.stack([np.full(6, np.nan), np.arange(6.0)]))
    with Writer(tmp_path, FEATURES) as w:
        w.add(replace(episode(2), final=np.arange(6.0) + 1))
    fill(tmp_path, 1, first=3)
    with pytest.warns(UserWarning, match="1 of 7 files of data set .* without checksums"):
        data = load(tmp_path)
    same(data, 4)
    assert np.isfinite(data.final).all(1).tolist() == [False, True, True, False]
    assert data.final[1:3, 0].tolist() == [0, 1]
    (tmp_path / "meta/final_states.npy").write_bytes(b"x")
    with pytest.raises(BrokenDataset, match=r"final_states\.npy"):
        load(tmp_path)


def test_files_are_split_by_size(tmp_path):
    with Writer(tmp_path / "d", FEATURES, file_mb=1, flush_every=1) as w:
        for i in range(4):
            w.add(episode(i, T=40_000))
    files = sorted((tmp_path / "d/data/chunk-000").iterdir())
    assert [f.name for f in files] == [f"file-{i:03d}.parquet" for i in range(4)]
    data = load(tmp_path / "d")
    np.testing.assert_array_equal(data.state[data.from_[3] :], episode(3, T=40_000).state)


def test_importing_the_data_layer_loads_neither_pyarrow_nor_av_nor_torch():
    code = "import sys, robo_rl.data.lerobot; print({'av', 'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# ---- growth


def test_sessions_of_an_episode_each_go_on_in_the_same_small_files(tmp_path):
    """Statistics are of all frames: with files of their own the hundredth session closed in seconds."""
    for i in range(4):
        with Writer(tmp_path, FEATURES) as w:
            w.add(replace(episode(i), final=np.arange(6.0)))
    tables = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("file-*.parquet"))
    assert tables == [f"{of}/chunk-000/file-000.parquet" for of in ("data", "meta/episodes", "meta/final")]
    same(load(tmp_path), 4)
    assert (load(tmp_path).final == np.arange(6)).all()


def test_a_session_leaves_a_last_file_of_other_columns_as_it_is(tmp_path):
    fill(tmp_path, 2)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.select(table.column_names[::-1]), path)
    (tmp_path / "meta/checksums.json").unlink()
    assert command(tmp_path, "data", "repair", ".", "--accept").code == 0
    before = path.read_bytes()
    fill(tmp_path, 1, first=2)
    assert path.read_bytes() == before and path.with_name("file-001.parquet").exists()
    same(load(tmp_path), 3)


def test_a_writer_killed_before_any_rename_leaves_the_last_flush_and_can_be_continued(tmp_path):
    """Snapshots of the folder before every rename are all the states that a kill can leave behind."""
    root, snapshots, on = tmp_path / "d", [], [True]

    def spy(event: str, args: tuple) -> None:
        if on[0] and event == "os.rename" and str(args[1]).startswith(str(root)):
            snapshots.append((tmp_path / f"s{len(snapshots)}", w.episodes))
            shutil.copytree(root, snapshots[-1][0])

    sys.addaudithook(spy)
    try:
        with Writer(root, features((16, 16)), flush_every=2) as w:
            for i in range(4):
                w.add(episode(i, view=(16, 16)))
    finally:
        on[0] = False
    assert len(snapshots) >= 10
    for folder, committed in snapshots:
        if committed:
            same(load(folder), committed, (16, 16))
        else:
            with pytest.raises(UserError, match="no data set"):
                load(folder)
        fill(folder, 4 - committed, (16, 16), first=committed)
        same(load(folder), 4, (16, 16))
        tables = [pq.read_table(f) for f in sorted(folder.glob("data/*/*.parquet"))]  # all that LeRobot sees
        assert pa.concat_tables(tables)["index"].to_pylist() == list(range(len(load(folder).action)))
        assert not list(folder.rglob("*.tmp"))


WRITER = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from test_data import FEATURES, Writer, episode
with Writer({root!r}, FEATURES, flush_every=1) as w:
    for i in range(len(w), 10_000):
        w.add(episode(i))
        print(w.episodes, flush=True)
"""


def test_kill_9_keeps_what_was_flushed_and_frees_the_folder(tmp_path):
    root, code = tmp_path / "d", WRITER.format(tests=str(Path(__file__).parent), root=str(tmp_path / "d"))
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        told = [int(child.stdout.readline()) for _ in range(7)]
        with pytest.raises(UserError, match="another process"):
            Writer(root, FEATURES)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        told += [int(x) for x in child.stdout]
        data = load(root)
        assert told[-1] <= len(data) <= told[-1] + 1
        same(data, len(data))
    assert len(data) > 7  # the second one went on


def test_a_reader_sees_only_whole_episodes_while_the_set_grows(tmp_path):
    root, view = tmp_path / "d", (16, 16)
    fill(root, 2, view)
    old, errors, sizes, stop = load(root), [], [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                data = load(root)
                sizes.append(len(data))
                e = len(data) - 1
                np.testing.assert_array_equal(data.episode(e).state, episode(e).state)
            except (UserError, AssertionError, OSError, ValueError) as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    fill(root, 12, view, first=2, flush_every=1)
    stop.set()
    reader.join()
    assert not errors, str(errors[0])
    assert len(set(sizes)) > 1
    same(old, 2, view)  # meta data read before still fit the files


def test_a_data_set_made_otherwise_is_refused_by_naming_the_difference(tmp_path):
    fill(tmp_path / "d", 2)
    for wanted, word in (
        (Features(20, FEATURES.state[:5], FEATURES.action), "state has 5 numbers here, 6 there"),
        (Features(10, FEATURES.state, FEATURES.action), "fps 10 here, 20 there"),
        (Features(20, FEATURES.state, ("dx", "dy", "dz")), "action number 0 is 'dx' here, 'action_0' there"),
        (Features(20, FEATURES.state, FEATURES.action, (("front", 8, 8),)), "'front' is 8x8 here, absent"),
    ):
        with pytest.raises(UserError, match=word):
            Writer(tmp_path / "d", wanted)
    same(load(tmp_path / "d"), 2)
    with Writer(tmp_path / "e", spec=spec()) as w:
        w.add(episode(0))
        with pytest.raises(UserError, match="camera 'front' is 8x8 here, absent there"):
            w.add(episode(1, view=(8, 8)))
    with pytest.raises(UserError, match="action 'x' means -0.2 .. 0.2 m"):
        Writer(tmp_path / "e", spec=spec(low=-0.2))


def test_a_full_disk_leaves_the_old_set_and_the_buffer(tmp_path):
    root, soft = tmp_path / "d", resource.getrlimit(resource.RLIMIT_FSIZE)
    fill(root, 3)
    w = Writer(root, FEATURES)
    w.add(episode(3, T=3000))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, soft[1]))  # as if the disk ended there
        with pytest.raises(UserError, match="3 episodes saved before are intact"):
            w.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    same(load(root), 3)
    assert not list(root.rglob("*.tmp"))
    w.close()  # space again: the buffered episode is written after all
    assert len(load(root)) == 4


def test_a_folder_with_other_things_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds other things .thesis.tex."):
        Writer(tmp_path, FEATURES)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"state": np.full((4, 6), np.nan)}, "state is not finite in frame 0"),
        ({"action": np.zeros((5, 3))}, "state must be"),
        ({"reward": np.zeros(3)}, "reward must be"),
        ({"source": "robot"}, "Allowed: "),
        ({"images": {"front": np.zeros((4, 8, 8, 3))}}, "uint8"),
        ({"source": ["human"]}, "4 words"),
    ],
)
def test_a_bad_episode_is_refused(change, word):
    with pytest.raises(UserError, match=word):
        Episode(**{"state": np.zeros((4, 6)), "action": np.zeros((4, 3)), **change})


# ---- damage


def cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


def make_nan(root: Path) -> None:
    table = pq.read_table(root / DATA)
    state = np.stack(table["observation.state"].to_numpy()).copy()
    state[table["episode_index"].to_pylist().index(2), 1] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(state.reshape(-1)), 6)
    pq.write_table(table.set_column(0, "observation.state", column), root / DATA)


def set_info(root: Path, **change) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def set_shape(root: Path, key: str, shape) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    assert key in features
    features[key]["shape"] = shape
    set_info(root, features=features)


@pytest.mark.parametrize(
    ("damage", "names", "sound"),
    [
        (lambda r: cut(r / DATA, 0.5), DATA, 0),
        (lambda r: (r / DATA).unlink(), DATA, 0),
        (lambda r: pq.write_table(pq.read_table(r / DATA).slice(0, 19), r / DATA), DATA, 3),
        (lambda r: pq.write_table(pq.read_table(r / DATA).drop_columns("action"), r / DATA), DATA, 0),
        (make_nan, DATA, 2),
        (lambda r: cut(r / VIDEO, 0.9), VIDEO, 0),
        (lambda r: (r / VIDEO).write_bytes(b"x" * 9999), VIDEO, 0),
        (lambda r: (r / VIDEO).unlink(), VIDEO, 0),
        (lambda r: cut(r / EPISODES, 0.9), EPISODES, 0),
        (lambda r: (r / EPISODES).unlink(), "meta/episodes", 0),
        (lambda r: (r / "meta/tasks.parquet").unlink(), "meta/tasks.parquet", 0),
        (lambda r: cut(r / "meta/info.json", 0.5), "meta/info.json", 0),
        (lambda r: set_info(r, total_episodes=9), "meta/episodes", 5),
        (lambda r: set_info(r, features={"action": 3}), "meta/info.json", 0),
        (lambda r: set_info(r, features=[]), "meta/info.json", 0),
        (lambda r: set_info(r, chunks_size=0), "meta/info.json", 0),
        (lambda r: set_info(r, chunks_size="1000"), "meta/info.json", 0),
        (lambda r: set_info(r, total_episodes=-1), "meta/info.json", 0),
        (lambda r: set_info(r, total_frames=None), "meta/info.json", 0),
        (lambda r: set_info(r, fps=0), "meta/info.json", 0),
        (lambda r: set_info(r, fps=True), "meta/info.json", 0),
        (lambda r: set_shape(r, "action", [10**12]), "meta/info.json", 0),
        (lambda r: set_shape(r, "action", [-3]), "meta/info.json", 0),
        (lambda r: set_shape(r, "observation.state", 6), "meta/info.json", 0),
        (lambda r: set_shape(r, "observation.images.front", [16]), "meta/info.json", 0),
        (lambda r: set_shape(r, "observation.images.front", [10**6, 10**6, 3]), "meta/info.json", 0),
        (lambda r: (r / "meta/info.json").write_text("[" * 60_000), "meta/info.json", 0),
        (lambda r: (r / "meta/info.json").write_text("[]"), "meta/info.json", 0),
    ],
)
def test_damage_is_reported_with_the_file_and_what_to_do(tmp_path, damage, names, sound):
    root = tmp_path / "d"
    fill(root, 5, (16, 16), flush_every=5)
    (root / "meta/checksums.json").unlink()  # which would refuse them all alike
    damage(root)
    with pytest.raises(BrokenDataset) as e:
        load(root)
    assert str(root / names) in str(e.value)
    if sound:
        assert f"robo_rl data repair {root}" in str(e.value)
        assert e.value.episode == sound
    else:
        assert "Restore" in str(e.value)
        assert e.value.episode == (-1 if names in ("meta/info.json", "meta/tasks.parquet") else 0)


def test_another_version_and_no_data_set_are_named(tmp_path):
    fill(tmp_path / "d", 1)
    (tmp_path / "d/meta/checksums.json").unlink()
    set_info(tmp_path / "d", codebase_version="v2.1")
    with pytest.raises(UserError, match=r"version v2.1, need v3.x. Write it anew"):
        load(tmp_path / "d")
    with pytest.raises(UserError, match="no data set at"):
        load(tmp_path / "nothing")


def test_pictures_that_do_not_decode_are_found_when_read_and_dropped_by_repair(tmp_path):
    root = tmp_path / "d"
    fill(root, 6, (32, 32), flush_every=6)
    packets = []
    import av

    with av.open(str(root / VIDEO)) as c:
        packets = [(p.pos, p.size) for p in c.demux(video=0) if p.size]
    at = sum(len(episode(i)) for i in range(4))
    raw = bytearray((root / VIDEO).read_bytes())
    for pos, size in packets[at : at + 3]:
        raw[pos : pos + size] = b"\xff" * size
    (root / VIDEO).write_bytes(raw)
    with pytest.raises(BrokenDataset, match=r"file-000.mp4: it is not what was written"):
        load(root).frames("front", 0)
    data = load(root, trust=None)
    data.frames("front", 3)
    with pytest.raises(BrokenDataset, match=r"file-000.mp4: episode 4: .*Keep the 4 episodes"):
        data.frames("front", 4)
    assert repair(root).kept == 4
    same(load(root), 4, (32, 32))


def test_repair_keeps_the_sound_episodes_and_puts_the_rest_aside(tmp_path):
    root, view = tmp_path / "d", (16, 16)
    for i in range(3):  # three files of each kind
        fill(root, 2, view, first=2 * i, file_mb=0)
    assert repair(root).dropped == 0 and not list(root.rglob("*broken*"))
    cut(root / DATA.replace("000.parquet", "002.parquet"), 0.5)
    done = repair(root)
    assert (done.kept, done.dropped) == (4, 2) and "file-002.parquet" in done.reason
    assert sorted(p.name for p in done.moved) == [
        "file-002.mp4.broken",
        "file-002.parquet.broken",
        "file-002.parquet.broken",
        "meta.broken",
    ]
    same(load(root), 4, view)
    stats = json.loads((root / "meta/stats.json").read_text())
    np.testing.assert_allclose(stats["action"]["mean"], load(root).action.mean(0), rtol=1e-5)
    fill(root, 2, view, first=4)  # and the set goes on
    same(load(root), 6, view)


def test_repair_cuts_a_file_in_the_middle_and_refuses_when_nothing_is_left(tmp_path):
    root = tmp_path / "d"
    fill(root, 5, flush_every=5)
    make_nan(root)
    assert repair(root).kept == 2
    same(load(root), 2)
    assert pq.read_metadata(root / DATA).num_rows == len(load(root).action)
    cut(root / DATA, 0.5)
    with pytest.raises(BrokenDataset, match="Restore the folder"):
        repair(root)


# ---- sampling


@pytest.mark.parametrize("horizon", [1, 3, 50])
def test_a_chunk_never_leaves_its_episode(tmp_path, horizon):
    fill(tmp_path / "d", 4)
    data = load(tmp_path / "d")
    state, chunk, pad = chunks(data, horizon)
    row = 0
    for e in range(4):
        actions = episode(e).action
        for t in range(len(actions)):
            steps = np.arange(t, t + horizon)
            np.testing.assert_array_equal(chunk[row], actions[np.minimum(steps, len(actions) - 1)])
            np.testing.assert_array_equal(pad[row], steps >= len(actions))
            np.testing.assert_array_equal(state[row], episode(e).state[t])
            row += 1
    assert row == len(chunk)
    with pytest.raises(UserError, match="horizon"):
        chunks(data, 0)


# ---- video


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1", "mpeg4"])
def test_every_codec_joins_seeks_and_keeps_colours(tmp_path, codec):
    import av

    try:
        av.Codec(codec, "w")
    except av.codec.codec.UnknownCodecError:
        pytest.skip(f"this PyAV has no {codec}")
    clips = [picture(12, 63, 50, i) for i in range(3)]
    a, b, c = (tmp_path / f"{x}.mp4" for x in "abc")
    assert video.encode(a, clips[:2], 12.5, codec=codec) == 24
    video.encode(b, clips[2:], 12.5, codec=codec)
    assert video.joinable(a, b)
    video.join(a, b, c)
    video.check_whole(c, 36)
    for i in (2, 0, 1):
        got = video.decode(c, 12 * i, 12, 12.5, (63, 50))
        assert psnr(got, clips[i]) > 33
        assert abs((got.astype(float) - clips[i]).mean()) < 1
    with pytest.raises(video.BrokenVideo, match="36 frames, 37"):
        video.check_whole(c, 37)


def test_write_video_makes_a_file_that_browsers_play(tmp_path):
    import av

    path = tmp_path / "new" / "v.mp4"
    write_video(path, picture(10, 41, 30, 0), 20)
    with av.open(str(path)) as c:
        s = c.streams.video[0]
        assert (s.codec.canonical_name, s.pix_fmt, s.frames) == (video.codec_name(), "yuv420p", 10)
        assert s.average_rate == 20 and (s.height, s.width) == (42, 30)
    raw = path.read_bytes()
    assert raw.index(b"moov") < raw.index(b"mdat")  # playable before it is loaded to its end
    with pytest.raises(UserError, match="uint8"):
        write_video(path, np.zeros((3, 8, 8), np.uint8), 20)
    with pytest.raises(UserError, match="fps"):
        write_video(path, picture(2, 8, 8, 0), 0)
    assert path.read_bytes() == raw


# ---- LeRobot itself. It cannot share an interpreter with torch 2.13, so it is asked in one of its own:
# ROBO_RL_LEROBOT_PYTHON=/path/to/python-with-lerobot-0.4.4 pytest tests/test_data.py -m slow -k lerobot

LEROBOT = os.environ.get("ROBO_RL_LEROBOT_PYTHON", "")
SCRIPT = """
import sys, numpy as np, torch
if torch.version.cuda is None:  # a torchvision built for CUDA imports all the same
    lib = torch.library.Library("torchvision", "DEF")
    lib.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    lib.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from lerobot.datasets.lerobot_dataset import LeRobotDataset
what, root, npz = sys.argv[1:]
if what == "read":
    ds = LeRobotDataset("us/test", root=root, delta_timestamps={"action": [0, 0.05, 0.1]})
    items = [ds[i] for i in range(len(ds))]
    keys = [k for k in items[0] if k != "task"]
    stats = {f"stats/{k}": np.asarray(v["mean"]) for k, v in ds.meta.stats.items()}
    columns = {k: np.stack([x[k] for x in items]) for k in keys}
    np.savez(npz, task=[x["task"] for x in items], **columns, **stats)
elif what == "edit":
    from lerobot.datasets.dataset_tools import add_features, delete_episodes, merge_datasets, split_dataset
    a, b = (LeRobotDataset("us/" + name, root=f"{root}/{name}") for name in "ab")
    delete_episodes(a, [1], f"{root}/deleted", "us/deleted")
    extra = np.zeros((len(a), 1), np.float32)
    add_features(a, {"more": (extra, {"dtype": "float32", "shape": (1,), "names": None})}, f"{root}/added", "us/added")
    merge_datasets([a, b], "us/merged", f"{root}/merged")
    split_dataset(a, {"train": [0, 1], "rest": [2, 3]}, root)
else:
    data = np.load(npz)
    kind = {"write": "video", "images": "image"}.get(what)
    if kind:
        features = {"observation.state": {"dtype": "float32", "shape": (6,), "names": list("abcdef")},
                    "action": {"dtype": "float32", "shape": (3,), "names": list("xyz")},
                    "observation.images.front": {"dtype": kind, "shape": (48, 64, 3),
                                                 "names": ["height", "width", "channels"]}}
        ds = LeRobotDataset.create("us/test", 20, features, root=root)
    else:
        ds = LeRobotDataset("us/test", root=root)
        ds.episode_buffer = ds.create_episode_buffer()
    keys = [k for k in ds.features if k in data]
    for e in np.unique(data["episode"]):
        for i in np.flatnonzero(data["episode"] == e):
            ds.add_frame({k: data[k][i] for k in keys} | {"task": f"task {e}"})
        ds.save_episode()
    ds.finalize()
"""  # noqa: E501
needs_lerobot = pytest.mark.skipif(not LEROBOT, reason="ROBO_RL_LEROBOT_PYTHON is not set")


def lerobot(what: str, root: Path, npz: Path) -> None:
    done = subprocess.run(
        [LEROBOT, "-c", SCRIPT, what, str(root), str(npz)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def lerobot_frames(tmp_path: Path, n: int) -> Path:
    """What add_frame wants, of our first `n` episodes."""
    frames = [episode(i, view=(48, 64)) for i in range(n)]
    scalars = {
        "next.reward": np.float32,
        "next.done": bool,
        "next.truncated": bool,
        "next.success": bool,
        "complementary_info.source": np.int64,
        "complementary_info.start": np.int64,
    }
    total = sum(map(len, frames))
    np.savez(
        tmp_path / "in.npz",
        **{
            "episode": np.repeat(np.arange(n), [len(e) for e in frames]),
            "observation.state": np.concatenate([e.state for e in frames]),
            "action": np.concatenate([e.action for e in frames]),
            "observation.images.front": np.concatenate([e.images["front"] for e in frames]),
            **{k: np.zeros((total, 1), dtype) for k, dtype in scalars.items()},
        },
    )
    return tmp_path / "in.npz"


@needs_lerobot
@pytest.mark.slow
def test_lerobot_reads_what_we_write_and_can_extend_it(tmp_path):
    root, view = tmp_path / "d", (48, 64)
    fill(root, 4, view)
    fill(root, 3, view, first=4)
    ours = load(root)
    lerobot("read", root, tmp_path / "out.npz")
    theirs = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(theirs["observation.state"], ours.state)
    np.testing.assert_array_equal(theirs["action"], chunks(ours, 3)[1])
    np.testing.assert_array_equal(theirs["action_is_pad"], chunks(ours, 3)[2])
    np.testing.assert_array_equal(theirs["next.reward"], ours.reward)
    np.testing.assert_array_equal(theirs["next.done"], ours.done)
    np.testing.assert_array_equal(theirs["complementary_info.source"], ours.source)
    assert list(theirs["task"]) == [ours.tasks[i] for i in ours.task_index]
    np.testing.assert_allclose(theirs["stats/action"], ours.action.mean(0), rtol=1e-5)
    pictures = theirs["observation.images.front"].transpose(0, 2, 3, 1) * 255
    assert psnr(pictures, ours.images("front")) > 33  # its colour conversion rounds otherwise than ours

    lerobot("append", root, lerobot_frames(tmp_path, 2))
    with pytest.raises(BrokenDataset, match="robo_rl data repair .* --accept"):
        load(root)
    data = accept(root)
    assert len(data) == 9 and data.tasks[2:] == ["task 0", "task 1"]
    np.testing.assert_array_equal(data.episode(8).state, episode(1).state)
    assert psnr(data.frames("front", 8), episode(1, view=view).images["front"]) > 28
    fill(root, 1, view, first=7)  # and we go on after it
    assert len(load(root)) == 10
    lerobot("read", root, tmp_path / "out.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["observation.state"], load(root).state)


@needs_lerobot
@pytest.mark.slow
def test_the_control_specification_survives_lerobots_own_editing_tools(tmp_path):
    for name, first in (("a", 0), ("b", 4)):
        with Writer(tmp_path / name, spec=spec()) as w:
            for i in range(first, first + 4):
                w.add(replace(episode(i), final=np.arange(6.0)))
    lerobot("edit", tmp_path, tmp_path / "unused.npz")
    for name, episodes in (
        ("deleted", [0, 2, 3]),
        ("added", range(4)),
        ("merged", range(8)),
        ("train", range(2)),
    ):
        with pytest.warns(UserWarning, match="without checksums"):
            data = load(tmp_path / name)
        assert data.spec == spec() and data.sources[0] == "policy", name
        for k, i in enumerate(episodes):
            np.testing.assert_array_equal(data.episode(k).state, episode(i).state)
            assert data.episode(k).final is None  # lost, and not taken from another episode
        accept(tmp_path / name)


@needs_lerobot
@pytest.mark.slow
@pytest.mark.parametrize("what", ["write", "images"])
def test_we_read_what_lerobot_writes(tmp_path, what):
    lerobot(what, tmp_path / "d", lerobot_frames(tmp_path, 5))
    data = load(tmp_path / "d")
    assert len(data) == 5 and data.task(3) == "task 3" and data.features.action == ("x", "y", "z")
    for i in range(5):
        mine, theirs = data.episode(i), episode(i, view=(48, 64))
        np.testing.assert_array_equal(mine.state, theirs.state)
        np.testing.assert_array_equal(mine.action, theirs.action)
        assert psnr(mine.images["front"], theirs.images["front"]) > 28
        assert mine.source[0] == "unknown" and not mine.success
    with pytest.raises(UserError, match="column 'next.reward' is float32 here, absent there"):
        Writer(tmp_path / "d")
    assert repair(tmp_path / "d").dropped == 0


def phased(phase, length=6):
    rng = np.random.default_rng(0)
    return Episode(
        rng.normal(size=(length, 4)),
        rng.uniform(-1, 1, (length, 2)),
        phase=phase,
        source=["human" if p else "policy" for p in (phase if phase is not None else [0] * length)],
    )


def test_the_phase_of_every_step_is_recorded_beside_its_source(tmp_path):
    features = Features.of(phased([0, 0, 1, 2, 3, 3]), fps=20)
    with Writer(tmp_path / "d", features) as w:
        w.add(phased([0, 0, 1, 2, 3, 3]))
        w.add(phased(None))
    data = load(tmp_path / "d")
    assert data.phase.tolist() == [0, 0, 1, 2, 3, 3] + [0] * 6 and data.features.phases
    assert (
        data.episode(0).phase.tolist() == [0, 0, 1, 2, 3, 3] and data.episode(0).source[2:] == ["human"] * 4
    )
    with Writer(tmp_path / "d") as w:
        w.add(phased([3] * 6))
    assert load(tmp_path / "d").phase[-6:].tolist() == [3] * 6


def test_a_data_set_without_the_intervention_flag_reads_as_all_policy_and_refuses_phases(tmp_path):
    with Writer(tmp_path / "d", Features.of(phased(None), fps=20)) as w:
        w.add(phased(None))
    data = load(tmp_path / "d")
    assert not data.features.phases and data.phase.tolist() == [0] * 6 and data.episode(0).phase is None
    with Writer(tmp_path / "d") as w, pytest.raises(UserError, match="phases are recorded here"):
        w.add(phased([0, 0, 1, 2, 3, 3]))


@pytest.mark.parametrize("phase", [[0, 1], [0, 1, 2, 3, 4, 0], [-1, 0, 0, 0, 0, 0]])
def test_a_phase_that_does_not_exist_is_refused(phase):
    with pytest.raises(UserError, match=r"phase must be 6 numbers in 0 .. 3 \(policy, pause"):
        Episode(np.zeros((6, 4)), np.zeros((6, 2)), phase=phase)


def test_features_of_an_episode_alone_need_a_rate():
    episode = Episode(state=np.zeros((2, 3)), action=np.zeros((2, 1)))
    with pytest.raises(UserError, match="fps=... or spec=env.spec"):
        Features.of(episode)
    assert Features.of(episode, fps=20).fps == 20
