"""Data sets of LeRobot v2.0 and v2.1 are written anew as v3.0."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import robo_rl
from test_data import DATA, VIDEO, fill, same

from robo_rl.data import layout, upgrade
from robo_rl.data.lerobot import load
from robo_rl.errors import UserError

VIEW, N = (32, 48), 3


def old(
    root: Path, key: str = "observation.images.front", per_chunk: int = 1000, version: str = "v2.1"
) -> Path:
    """Episodes 0 .. N-1 of test_data as v2.1 has them: a file each, numbers of rows and tasks in JSONL."""
    tasks: list[str] = []
    (root / "meta").mkdir(parents=True)
    for e in range(N):
        one = root.parent / f"one{e}"
        fill(one, 1, VIEW, first=e)
        data, chunk = load(one), f"chunk-{e // per_chunk:03d}"
        task = data.tasks[0]
        tasks += [task] if task not in tasks else []
        table = pq.read_table(one / DATA, partitioning=None)
        table = table.set_column(
            table.column_names.index("task_index"), "task_index", [[tasks.index(task)] * len(table)]
        )
        (root / "data" / chunk).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / "data" / chunk / f"episode_{e:06d}.parquet")
        (root / "videos" / chunk / key).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(one / VIDEO, root / "videos" / chunk / key / f"episode_{e:06d}.mp4")
        with (root / "meta" / "episodes.jsonl").open("a") as f:
            f.write(json.dumps({"episode_index": e, "tasks": [task], "length": len(table)}) + "\n")
    info = json.loads((root.parent / "one0" / layout.INFO).read_text())
    info["features"] = {
        key if k == "observation.images.front" else k: ft for k, ft in info["features"].items()
    }
    info |= {
        "codebase_version": version,
        "total_episodes": N,
        "total_frames": 18,
        "total_videos": N,
        "total_chunks": 1,
        "chunks_size": per_chunk,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }
    (root / layout.INFO).write_text(json.dumps(info))
    (root / "meta" / "tasks.jsonl").write_text(
        "".join(json.dumps({"task_index": k, "task": t}) + "\n" for k, t in enumerate(tasks))
    )
    return root


def test_a_data_set_of_v2_is_the_same_in_v3(tmp_path):
    source = old(tmp_path / "old", per_chunk=2)
    with pytest.raises(UserError, match="robo_rl data upgrade"):
        load(source)
    done = robo_rl(tmp_path, "data", "upgrade", source, "--out", "new")
    assert done.code == 0 and "3 episodes, 18 frames" in done.out
    same(load(tmp_path / "new"), N, VIEW)
    fill(tmp_path / "ours", N, VIEW)
    made, ours = (json.loads((tmp_path / name / layout.STATS).read_text()) for name in ("new", "ours"))
    for name in ("min", "max", "mean", "std", "q01", "q99"):
        np.testing.assert_allclose(made["action"][name], ours["action"][name], rtol=1e-6)
    assert robo_rl(tmp_path, "data", "check", "new").code == 0


def put(root: Path, key: str, value) -> None:
    """The same value in all rows of a column of episode 1."""
    path = root / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    column = pa.array([value] * len(table), pa.int64() if value is None else None)
    pq.write_table(table.set_column(table.column_names.index(key), key, column), path)


def test_episodes_whose_columns_have_other_types_go_to_one_file(tmp_path):
    source = old(tmp_path / "old")
    path = source / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    wide = pa.array([[float(x) for x in row] for row in table["action"].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("action"), "action", wide), path)
    upgrade.upgrade(source, tmp_path / "new")
    same(load(tmp_path / "new"), N, VIEW)


def test_many_episodes_go_to_files_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(upgrade, "FILE_BYTES", 1)
    upgrade.upgrade(old(tmp_path / "old"), tmp_path / "new")
    assert len(list((tmp_path / "new" / "data").rglob("*.parquet"))) == N
    same(load(tmp_path / "new"), N, VIEW)


def test_a_camera_that_is_called_observation_image_is_read(tmp_path):
    upgrade.upgrade(old(tmp_path / "old", "observation.image", version="v2.0"), tmp_path / "new")
    data = load(tmp_path / "new")
    assert list(data.views) == ["observation.image"]
    assert data.frames("observation.image", 2).shape == (int(data.to[2] - data.from_[2]), *VIEW, 3)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda root: (root / "data/chunk-000/episode_000001.parquet").unlink(),
            "episode_000001.parquet: No such file",
        ),
        (
            lambda root: (root / "data/chunk-000/episode_000001.parquet").write_bytes(b"PAR1"),
            "episode_000001.parquet: it cannot be read",
        ),
        (
            lambda root: (root / "videos/chunk-000/observation.images.front/episode_000002.mp4").unlink(),
            "episode_000002.mp4: the file is",
        ),
        (lambda root: (root / "meta/tasks.jsonl").write_text(""), "rows of a task that there is not"),
        (
            lambda root: put(root, "next.reward", "much"),
            "episode_000001.parquet: column 'next.reward' holds s",
        ),
        (lambda root: put(root, "task_index", None), "episode_000001.parquet: column 'task_index' has empty"),
        (
            lambda root: put(root, "next.reward", float("nan")),
            "old: episode 1, data/chunk-000: reward is not",
        ),
        (
            lambda root: os.truncate(
                root / "videos/chunk-000/observation.images.front/episode_000001.mp4", 900
            ),
            "old: episode 1, videos/observation.images.front: the file is cut short",
        ),
        (
            lambda root: (root / "meta/episodes.jsonl").write_text('{"episode_index": 1}\n'),
            "do not run from 0",
        ),
        (lambda root: (root / "meta/episodes.jsonl").write_text("{\n"), "it cannot be read"),
        (
            lambda root: (root / layout.INFO).write_text(
                (root / layout.INFO).read_text().replace("v2.1", "v3.0")
            ),
            "it is v3 already",
        ),
        (
            lambda root: (root / layout.INFO).write_text(
                (root / layout.INFO).read_text().replace("observation.images.front", "../front")
            ),
            "camera name '../front'",
        ),
    ],
)
def test_what_is_missing_or_malformed_is_named_and_nothing_is_left(tmp_path, spoil, said):
    source = old(tmp_path / "old")
    spoil(source)
    done = robo_rl(tmp_path, "data", "upgrade", source, "--out", "new")
    assert said in done.mistake
    assert not [p for p in tmp_path.iterdir() if "new" in p.name]


def test_what_the_old_data_say_of_their_rows_and_is_wrong_is_told_in_one_line(tmp_path):
    source = old(tmp_path / "old")
    for path, had, has in (("episodes.jsonl", ": 6}", ": 9}"), ("info.json", 'frames": 18', 'frames": 20')):
        text = (source / "meta" / path).read_text()
        assert had in text
        (source / "meta" / path).write_text(text.replace(had, has))
    put(source, "timestamp", 5.0)
    done = robo_rl(tmp_path, "data", "upgrade", source, "--out", "new")
    assert done.code == 0 and "3 episodes, 18 frames" in done.out
    (line,) = [x for x in done.err.splitlines() if "does not say what its rows are" in x]
    for said in (
        "meta/info.json has 20 frames, there are 18",
        "meta/episodes.jsonl has 9 frames of episode 1, there are 6",
        "timestamps of episode 1 do not run from 0 in steps of",
    ):
        assert said in line


def test_timestamps_that_begin_late_or_have_a_gap_are_not_timely():
    time = (np.arange(500) / 30).astype(np.float32)
    assert upgrade.is_timely(time, 30) and upgrade.is_timely(time.astype(np.float64), 30)
    assert not upgrade.is_timely(time + 1, 30) and not upgrade.is_timely(np.delete(time, 7), 30)
    assert upgrade.is_timely(np.arange(4), 1) and not upgrade.is_timely(time, 15)


def test_a_folder_that_is_there_is_not_written_to(tmp_path):
    source = old(tmp_path / "old")
    with pytest.raises(UserError, match="exists; name a new folder"):
        upgrade.upgrade(source, source)
