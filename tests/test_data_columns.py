"""Columns and statistics that another program wrote wrongly are refused by name, whoever reads them; while a
data set grows nobody writes into it from what it was before."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import DATA, EPISODES, episode, fill, picture, set_info
from test_data_layouts import png

from robo_rl.cli import main
from robo_rl.data import checksums, labels, layout, statistics
from robo_rl.data.assemble import merge, parse_episodes, split
from robo_rl.data.check import check_data
from robo_rl.data.lerobot import Writer, load, repair
from robo_rl.data.meta import BrokenDataset, load_meta
from robo_rl.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:data set .* without checksums")
VIEW = (24, 32)
FROM = "videos/observation.images.front/from_timestamp"


@pytest.fixture
def bare(tmp_path) -> Path:
    """Two episodes of 5 and 6 frames with a camera, and no checksums that would tell of a column."""
    root = tmp_path / "bare"
    fill(root, 2, VIEW)
    (root / checksums.NAME).unlink()
    return root


def put_column(path: Path, key: str, values) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(key), key, pa.array(values)), path)


@pytest.mark.parametrize(
    ("file", "key", "value", "what"),
    [
        (DATA, "next.reward", "much", "holds string, not numbers"),
        (DATA, "next.success", "False", "holds string, not numbers"),  # text that is true to Python
        (DATA, "task_index", 0.5, "not whole"),
        (DATA, "task_index", -1, "the frames use number -1"),
        (DATA, "task_index", None, "empty cells"),
        (EPISODES, "length", None, "empty cells"),
        (EPISODES, FROM, "now", "holds string, not numbers"),
        (EPISODES, FROM, 1e300, "times that no video has"),
        (EPISODES, FROM, float("nan"), "times that no video has"),
    ],
)
def test_a_column_of_something_else_is_named(tmp_path, bare, file, key, value, what):
    rows = pq.read_metadata(bare / file).num_rows
    put_column(bare / file, key, pa.array([value] * rows, pa.int64() if value is None else None))
    jobs = (
        lambda: load(bare),
        lambda: check_data(bare),
        lambda: statistics.renew_folder(bare),
        lambda: split(bare, tmp_path / "a", "0"),
        lambda: merge([bare, bare], tmp_path / "b"),
    )
    for job in jobs:
        with pytest.raises(BrokenDataset, match=what):
            job()
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_rows_of_different_width_are_named_by_merge(tmp_path, bare):
    rows = pq.read_metadata(bare / DATA).num_rows
    put_column(bare / DATA, "action", [[1.0] * (2 + k % 2) for k in range(rows)])
    with pytest.raises(BrokenDataset, match="differ in length"):
        merge([bare, bare], tmp_path / "all")


@pytest.mark.parametrize("numbers", [[0, 1 << 20], [0, -1], [0, 0], [0, 0.5]])
def test_numbers_of_instructions_are_those_of_a_list(bare, numbers):
    pq.write_table(pa.table({"task_index": pa.array(numbers), "task": ["a", "b"]}), bare / layout.TASKS)
    with pytest.raises(BrokenDataset, match=r"tasks.parquet: task_index must be different whole numbers"):
        load(bare)


def test_an_instruction_without_a_text_is_named(bare):
    table = pa.table({"task_index": [0, 1], "task": pa.array(["a", None])})
    pq.write_table(table, bare / layout.TASKS)
    with pytest.raises(BrokenDataset, match="the text of task 1 is missing"):
        load(bare)


def test_a_cut_of_time_is_read_where_nobody_recorded_the_end(tmp_path):
    root = tmp_path / "d"
    fill(root, 2)
    (root / checksums.NAME).unlink()
    pq.write_table(pq.read_table(root / DATA).drop_columns(["next.done"]), root / DATA)
    features = json.loads((root / layout.INFO).read_text())["features"]
    del features["next.done"]
    set_info(root, features=features)
    assert load(root).terminated.tolist() == [episode(i).terminated for i in range(2)]


def test_a_source_without_a_name_is_unknown(bare):
    rows = pq.read_metadata(bare / DATA).num_rows
    put_column(bare / DATA, "complementary_info.source", [77] * rows)
    assert set(load(bare).episode(0).source) == {"unknown"}


@pytest.mark.parametrize("wrong", ["x", None, [1], [float("nan")] * 3, {}])
def test_statistics_that_are_none_are_found_by_check(bare, wrong):
    path = bare / layout.STATS
    told = json.loads(path.read_text())
    action = 3 if wrong == {} else told["action"] | {"q01": wrong}
    path.write_text(json.dumps(told | {"action": action}))
    assert any("robo_rl data stats" in line for line in check_data(bare).findings)
    statistics.renew_folder(bare)
    assert not any("robo_rl data stats" in line for line in check_data(bare).findings)


def test_statistics_are_not_made_of_damaged_frames(tmp_path, capsys):
    fill(tmp_path / "d", 3)
    path = tmp_path / "d" / DATA
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = (tmp_path / "d" / layout.STATS).read_bytes()
    for job in (
        ["stats", str(tmp_path / "d")],
        ["merge", str(tmp_path / "d"), str(tmp_path / "d"), "--out", str(tmp_path / "all")],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["data", *job])
        said = capsys.readouterr().err
        assert f"{path}: it is not what was written" in said and said.count("\n") == 1
    assert (tmp_path / "d" / layout.STATS).read_bytes() == before


def test_statistics_have_pictures_that_are_kept_in_columns(tmp_path):
    root = tmp_path / "d"
    fill(root, 2)
    (root / checksums.NAME).unlink()
    clips = [picture(len(episode(i)), *VIEW, i) for i in range(2)]
    cells = [{"bytes": png(x), "path": None} for clip in clips for x in clip]
    pq.write_table(
        pq.read_table(root / DATA).append_column("observation.images.front", pa.array(cells)), root / DATA
    )
    ft = {"dtype": "image", "shape": [*VIEW, 3], "names": ["height", "width", "channels"]}
    features = json.loads((root / layout.INFO).read_text())["features"]
    set_info(root, features=features | {"observation.images.front": ft})
    statistics.renew_folder(root)
    split(root, tmp_path / "one", "0:2")
    pixels = np.concatenate(clips).reshape(-1, 3) / 255
    for folder in (root, tmp_path / "one"):
        told = json.loads((folder / layout.STATS).read_text())["observation.images.front"]
        np.testing.assert_allclose(np.ravel(told["mean"]), pixels.mean(0))
        np.testing.assert_allclose(np.ravel(told["q99"]), np.quantile(pixels, 0.99, axis=0))


def test_nobody_writes_into_a_data_set_that_is_being_recorded(tmp_path):
    root = tmp_path / "d"
    fill(root, 2)
    with Writer(root):
        for job in (
            lambda: statistics.renew_folder(root),
            lambda: labels.state_units(root, "rad"),
            lambda: labels.label_success(root, "all"),
        ):
            with pytest.raises(UserError, match="another process"):
                job()


def test_labels_of_fewer_episodes_than_there_are_now_are_refused(tmp_path):
    root = tmp_path / "d"
    fill(root, 2)
    with pytest.raises(UserError, match="has 2 episodes now, the labels are of 1"):
        labels.write_success(root, np.array([True]))
    assert not (root / layout.LABELS).exists() and len(load_meta(root).lengths) == 2


@pytest.mark.parametrize("text", ["", ",", "1,", ",1", "0:2,"])
def test_an_episode_without_a_number_is_not_the_first_one(text):
    with pytest.raises(UserError, match="--episodes must be numbers and ranges"):
        parse_episodes(text, 3)


def test_the_two_parts_of_a_data_set_go_to_two_folders(tmp_path):
    fill(tmp_path / "d", 2)
    shutil.copytree(tmp_path / "d", tmp_path / "x" / "other")
    with pytest.raises(UserError, match="give two folders"):
        split(tmp_path / "d", tmp_path / "new", "0", tmp_path / "x" / ".." / "new")
    assert not (tmp_path / "new").exists()


def test_a_repair_that_is_killed_anywhere_can_be_run_again(tmp_path):
    """Snapshots before every rename and removal are all the states that a kill can leave behind."""
    root, snapshots, on = tmp_path / "d", [], [True]
    fill(root, 3)
    table = pq.read_table(root / DATA)
    action = np.stack(table["action"].to_numpy()).copy()
    action[-1] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(action.reshape(-1)), 3)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), root / DATA)

    def spy(event: str, args: tuple) -> None:
        if on[0] and event in ("os.rename", "os.remove") and str(args[0]).startswith(str(root)):
            snapshots.append(tmp_path / f"s{len(snapshots)}")
            shutil.copytree(root, snapshots[-1])

    sys.addaudithook(spy)
    try:
        assert repair(root).kept == 2
    finally:
        on[0] = False
    assert len(snapshots) > 6
    for folder in snapshots:
        repair(folder)
        assert len(load(folder)) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: told["action"].update(mean=[1.0]),
        lambda told: told["action"].pop("std"),
        lambda told: told.pop("observation.state"),
    ],
)
def test_a_recording_goes_on_though_its_statistics_lack_something(bare, spoil):
    path = bare / layout.STATS
    told = json.loads(path.read_text())
    spoil(told)
    path.write_text(json.dumps(told))
    fill(bare, 1, VIEW, first=2)
    data, told = load(bare), json.loads(path.read_text())
    assert len(data) == 3 and set(told) == set(data.meta.info["features"])
    np.testing.assert_allclose(told["action"]["mean"], data.action.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(told["action"]["std"], data.action.std(0), rtol=1e-4)
