"""`robo_rl data`: check, repair, merge, split, label, stats and view, on data sets that another program
wrote."""

import errno
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import browser
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robo_rl.cli import main
from robo_rl.data import layout, video
from robo_rl.data.assemble import appearing, parse_episodes, split
from robo_rl.data.lerobot import Episode, Features, Writer, load
from robo_rl.data.meta import BrokenDataset, load_meta
from robo_rl.errors import UserError, choose, plain_warning

pytestmark = pytest.mark.filterwarnings("ignore:data set .* without checksums")
SMALL = (24, 32)


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sets")
    made = {
        name: datasets.write(root / name, "so100", episodes=n, length=32, size=SMALL)
        for name, n in (("one", 4), ("two", 2))
    }
    return made | {
        "droid": datasets.write(root / "droid", "droid", episodes=2, length=20, size=SMALL, views=1)
    }


def run(capsys, *argv: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as e:
        main(["data", *map(str, argv)])
    said = capsys.readouterr()
    assert (e.value.code or 0) == code, said
    if code == 2:
        assert said.err.count("\n") == 1
    return said.err if code == 2 else said.out


def same_episode(a, e: int, b, k: int) -> None:
    one, other = a.episode(e), b.episode(k)
    assert (
        one.task == other.task
        and np.array_equal(one.state, other.state)
        and np.array_equal(one.action, other.action)
    )
    assert all(np.array_equal(one.images[v], other.images[v]) for v in one.images)


# ---- check


def test_check_says_what_a_data_set_is_and_what_nobody_said(sets, capsys):
    said = run(capsys, "check", sets["one"])
    for words in (
        "is sound",
        "so100",
        "4, 32 to 34 frames",
        "30 frames a second",
        "'pick the lego brick' (2)",
        "laptop 24x32",
        "units not stated",
        "not recorded",
        "shoulder_pan.pos",
        "robo_rl data label",
    ):
        assert words in said


def test_check_finds_a_still_axis_a_jump_and_statistics_that_are_not_of_all_frames(tmp_path, sets, capsys):
    folder = Path(shutil.copytree(sets["one"], tmp_path / "set"))
    path = layout.data_path(folder, 0, 0)
    table = pq.read_table(path, partitioning=None)
    x = np.stack(table["action"].to_numpy())
    x[:, 1], x[40, 2] = 5.0, 9000.0
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 6)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    said = run(capsys, "check", folder, "--no-pictures")
    assert (
        "'shoulder_lift.pos' never moves (always 5)" in said
        and "'elbow_flex.pos' jumps by" in said
        and "episode 1" in said
    )
    assert (
        "the quantiles of action in meta/stats.json are off" in said
        and f"robo_rl data stats {folder}" in said
    )
    run(capsys, "stats", folder)
    assert "quantiles" not in run(capsys, "check", folder, "--no-pictures")
    stats = json.loads((folder / layout.STATS).read_text())
    np.testing.assert_allclose(stats["action"]["q99"], np.quantile(x.astype(float), 0.99, axis=0))
    assert set(stats) == set(json.loads((folder / layout.INFO).read_text())["features"])


def test_check_reports_damage_in_one_line(tmp_path, sets, capsys):
    folder = Path(shutil.copytree(sets["one"], tmp_path / "set"))
    path = layout.video_path(folder, "phone", 0, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    path.write_bytes(data)
    said = run(capsys, "check", folder, code=2)
    assert "phone" in said and "repair" in said
    assert "accepted" in run(capsys, "repair", sets["droid"], "--accept")


# ---- merge and split


def test_merged_episodes_are_those_that_went_in_to_the_bit(tmp_path, sets, capsys):
    run(capsys, "merge", sets["one"], sets["two"], "--out", tmp_path / "all")
    a, b, both = load(sets["one"]), load(sets["two"]), load(tmp_path / "all")
    assert len(both) == 6
    for e in range(6):
        same_episode(*((a, e) if e < 4 else (b, e - 4)), both, e)
    stats = json.loads((tmp_path / "all" / layout.STATS).read_text())
    x = np.concatenate([a.action, b.action]).astype(float)
    np.testing.assert_allclose(stats["action"]["q01"], np.quantile(x, 0.01, axis=0))
    np.testing.assert_allclose(stats["action"]["std"], x.std(0), rtol=1e-6)
    rows = pq.read_table(layout.data_path(tmp_path / "all", 0, 1), partitioning=None)
    assert rows["episode_index"].to_pylist()[0] == 4 and rows["index"].to_pylist()[0] == len(a.action)


def test_episodes_that_are_merged_twice_are_counted_whatever_their_folders_are_called(
    tmp_path, sets, capsys, recwarn
):
    some, rest = tmp_path / "some", tmp_path / "rest"
    run(capsys, "split", sets["one"], "--out", some, "--episodes", "1,3", "--rest", rest)
    run(capsys, "merge", some, rest, "--out", tmp_path / "all")
    assert not [w for w in recwarn if "twice" in str(w.message)]
    run(capsys, "merge", tmp_path / "all", some, "--out", tmp_path / "more")
    (said,) = [str(w.message) for w in recwarn if "twice" in str(w.message)]
    assert said.startswith(f"2 of 2 episodes of {some} were there before")


def test_what_a_person_corrected_goes_together_with_episodes_of_nobody(tmp_path, capsys):
    f, rng = Features(fps=10, state=("s",), action=("a",)), np.random.default_rng(0)
    for name, phases in (("own", False), ("helped", True)):
        with Writer(tmp_path / name, replace(f, phases=phases)) as writer:
            writer.add(
                Episode(
                    state=rng.normal(size=(6, 1)).astype(np.float32),
                    action=rng.normal(size=(6, 1)).astype(np.float32),
                    reward=np.zeros(6, np.float32),
                    task="wipe",
                    phase=np.array([0, 0, 1, 2, 3, 3]) if phases else None,
                )
            )
    run(capsys, "merge", tmp_path / "own", tmp_path / "helped", "--out", tmp_path / "all")
    assert load(tmp_path / "all").phase.tolist() == [0] * 6 + [0, 0, 1, 2, 3, 3]
    rows = [
        pq.read_table(layout.episodes_path(tmp_path / "all", 0, k), partitioning=None).column_names
        for k in (0, 1)
    ]
    assert {*rows[0]} == {*rows[1]} and f"stats/{layout.PHASE}/mean" in rows[0]


def test_split_keeps_the_chosen_episodes_and_the_rest_and_they_merge_back(tmp_path, sets, capsys):
    said = run(
        capsys,
        "split",
        sets["one"],
        "--out",
        tmp_path / "some",
        "--episodes",
        "1,3:",
        "--rest",
        tmp_path / "others",
    )
    assert "2 episodes" in said
    a, some, others = load(sets["one"]), load(tmp_path / "some"), load(tmp_path / "others")
    for data, numbers in ((some, (1, 3)), (others, (0, 2))):
        for k, e in enumerate(numbers):
            same_episode(a, e, data, k)
    run(capsys, "merge", tmp_path / "some", tmp_path / "others", "--out", tmp_path / "again")
    again = load(tmp_path / "again")
    for k, e in enumerate((1, 3, 0, 2)):
        same_episode(a, e, again, k)


def test_a_split_whose_rest_cannot_be_written_leaves_neither(tmp_path, sets):
    looks = []

    def full(what, items, unit):
        looks.append(what)
        if (tmp_path / "out").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return items

    with pytest.raises(UserError, match=f"the disk is full: could not write {tmp_path / 'rest'};"):
        split(sets["one"], tmp_path / "out", "0:2", tmp_path / "rest", full)
    assert len(looks) > 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("inside", ["", "data/chunk-000"])
def test_a_folder_that_cannot_be_written_is_told_by_the_name_that_the_user_gave(tmp_path, inside):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=f"^no permission to write {out}; choose"), appearing(out) as temp:
        raise PermissionError(errno.EACCES, "Permission denied", str(temp / inside))
    with pytest.raises(PermissionError), appearing(out):  # of what is read
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "source" / "data"))


def test_labels_units_and_last_observations_go_along(tmp_path, capsys):
    rng = np.random.default_rng(0)
    f = Features(fps=10, state=("s",), action=("a",))
    for name in ("x", "y"):
        with Writer(tmp_path / name, f) as w:
            for i in range(3):
                w.add(
                    Episode(
                        state=rng.normal(size=(12, 1)),
                        action=rng.normal(size=(12, 1)),
                        final=np.array([i + 0.5]),
                        success=i == 1,
                    )
                )
        run(
            capsys,
            "label",
            tmp_path / name,
            "--units",
            "m delta",
            "--success",
            "none" if name == "y" else "all",
        )
    run(capsys, "split", tmp_path / "y", "--out", tmp_path / "z", "--episodes", "1:")
    run(capsys, "merge", tmp_path / "x", tmp_path / "z", "--out", tmp_path / "all")
    data = load(tmp_path / "all")
    assert data.success.tolist() == [True] * 3 + [False] * 2 and data.final[:, 0].tolist() == [
        0.5,
        1.5,
        2.5,
        1.5,
        2.5,
    ]
    assert "1 in m (delta)" in run(capsys, "check", tmp_path / "all")


def test_data_sets_that_differ_are_not_merged(tmp_path, sets, capsys):
    said = run(capsys, "merge", sets["one"], sets["droid"], "--out", tmp_path / "all", code=2)
    assert (
        "do not go together" in said and "fps 30 here, 15 there" in said and not (tmp_path / "all").exists()
    )
    other = Path(shutil.copytree(sets["two"], tmp_path / "set"))
    run(capsys, "label", other, "--units", "rad")
    assert "nobody stated" in run(capsys, "merge", sets["one"], other, "--out", tmp_path / "all", code=2)
    assert "exists" in run(capsys, "split", sets["one"], "--out", other, "--episodes", "0", code=2)
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_damage_of_a_part_is_told_by_its_own_name_with_what_keeps_the_others(tmp_path, sets, capsys):
    folder = Path(shutil.copytree(sets["one"], tmp_path / "set"))
    path = layout.data_path(folder, 0, 0)
    table = pq.read_table(path)
    action = np.stack(table["action"].to_numpy()).astype(np.float32)
    action[40] = np.nan  # of episode 1
    column = pa.FixedSizeListArray.from_arrays(pa.array(action.reshape(-1)), action.shape[1])
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    said = run(capsys, "merge", sets["two"], folder, "--out", tmp_path / "both", code=2)
    keep = f"robo_rl data split {folder} --out NEW --episodes 0:1,2:4"
    assert f"{path}: action is not finite in episode 1, frame 8." in said and keep in said
    run(capsys, "split", folder, "--out", tmp_path / "kept", "--episodes", "0:1,2:4")
    assert len(load(tmp_path / "kept")) == 3


def test_labels_that_not_all_parts_have_are_not_lost_without_a_word(tmp_path, sets, capsys):
    folder = Path(shutil.copytree(sets["one"], tmp_path / "set"))
    run(capsys, "label", folder, "--success", "all")
    with pytest.warns(
        UserWarning, match=f"nobody labelled the episodes of {sets['two']}, so .*both has none"
    ):
        run(capsys, "merge", folder, sets["two"], "--out", tmp_path / "both")


def test_a_video_that_ends_early_loses_its_last_episodes_alone_and_labels_stay(tmp_path, sets, capsys):
    folder = Path(shutil.copytree(sets["one"], tmp_path / "set"))
    run(capsys, "label", folder, "--success", "all")
    view = next(iter(load(folder).views))
    path, clip = (
        layout.video_path(folder, view, 0, 0),
        np.concatenate([load(folder).frames(view, e) for e in (0, 1, 2)]),
    )
    video.encode(path, [clip], 30)
    assert "Keep the 3 episodes before it" in run(capsys, "check", folder, code=2)
    assert "kept 3 episodes, dropped 1" in run(capsys, "repair", folder)
    assert load(folder).success.tolist() == [True] * 3


def test_radians_that_are_degrees_are_noticed(tmp_path, capsys):
    folder = datasets.write(tmp_path / "set", "so100", episodes=2, length=32, size=SMALL, views=0)
    run(capsys, "label", folder, "--units", "rad*5,1")
    assert "is said to be in rad and goes to 80: are these degrees?" in run(capsys, "check", folder)
    run(capsys, "label", folder, "--units", "deg*5,1")
    assert "are these degrees" not in run(capsys, "check", folder)


def test_ranges_of_episodes_are_read_as_in_python():
    assert parse_episodes("0:2,5,7:", 9).tolist() == [0, 1, 5, 7, 8]
    for text in ("9", "3:3", "-1", "a", "0:10"):
        with pytest.raises(ValueError, match="--episodes"):
            parse_episodes(text, 9)


# ---- view


def test_the_page_of_a_data_set_shows_videos_and_curves(tmp_path, sets, capsys):
    out = tmp_path / "page.html"
    run(capsys, "view", sets["one"], "--out", out, "--episodes", "0,2", "--width", "32")
    text = out.read_text()
    assert (
        text.count("<section") == 2 and text.count("data:video/mp4") == 4 and text.count("class=axis") == 12
    )
    assert text.index("<b>action</b> and <i>state</i>") < text.index("<section"), (
        "the curves are told apart before they are shown"
    )
    assert (
        "http" not in text.replace("http://www.w3.org", "")
        and "Shown are 2 of 4" in text
        and "nobody stated the units" in text
    )


@pytest.mark.slow
@pytest.mark.skipif(browser.BINARY is None, reason="no Chromium")
def test_the_cursor_of_the_page_shows_the_moment_under_the_pointer(tmp_path, sets, capsys):
    out = tmp_path / "page.html"
    run(capsys, "view", sets["one"], "--out", out, "--episodes", "1")
    x = load(sets["one"]).episode(1).action[:, 0]
    with browser.Browser(tmp_path / "chrome") as tab:
        tab.open(out.as_uri())
        tab.until("document.readyState === 'complete' && !!document.querySelector('.axis svg')")
        tab.js("""{const svg = document.querySelector('.axis svg'), box = svg.getBoundingClientRect();
            svg.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.right, clientY: box.top + 5}))}""")  # noqa: E501
        assert abs(float(tab.js("document.querySelector('.axis i').textContent")) - x[-1]) < 0.01 * abs(x[-1])
        assert tab.js("document.querySelector('output').textContent").startswith(f"{len(x) / 30:.2f}")


def test_a_folder_near_a_data_set_says_where_it_is(sets):
    root = sets["droid"]
    for wrong, words in (
        (root / "meta", f"There is one at {root}"),
        (root.parent, "is missing. There is one at"),
        (root / "meta" / "info.json", "is a file; a data set is a folder"),
    ):
        with pytest.raises(UserError) as e:
            load_meta(wrong)
        assert words in str(e.value)


def test_a_unit_in_full_is_told_the_unit_that_it_begins_with():
    with pytest.raises(UserError, match="unknown unit 'degrees'; did you mean 'deg'"):
        choose("unit", "degrees", ("rad/s", "deg/s", "rad", "deg"))


def test_a_warning_for_users_is_one_line_once_and_shows_no_code():
    text = plain_warning()
    given = UserWarning("data set x\nwithout checksums"), UserWarning, "robo_rl/data/reader.py", 306
    assert text(*given) == "warning: data set x without checksums\n"
    assert text(*given) == ""
    assert text(UserWarning("\033[33mWARN: old\033[0m"), *given[1:]) == "warning: WARN: old\n"
    assert "reader.py:306" in text(DeprecationWarning("old"), DeprecationWarning, "reader.py", 306)


# ---- what is left out


def shift(folder, episode: int, frame: int, seconds: float) -> None:
    """A gap in time before a frame of an episode, in a data set of one file."""
    path = layout.data_path(folder, 0, 0)
    table = pq.ParquetFile(path).read()
    time = table["timestamp"].to_numpy().copy()
    inside = table["frame_index"].to_numpy() >= frame
    time[(table["episode_index"].to_numpy() == episode) & inside] += np.float32(seconds)
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(time)), path)


def test_an_episode_with_a_gap_is_left_out_by_the_command_that_check_says(tmp_path, capsys):
    folder, out = datasets.write(tmp_path / "set", "so100", 5, 10, views=0), tmp_path / "out"
    shift(folder, 1, 4, 0.3)
    shift(folder, 3, 2, 0.2)
    with pytest.raises(BrokenDataset, match="episode 1") as e:
        load(folder)
    said = re.search(
        r"keep the others too: robo_rl data split (\S+) --out NEW --episodes (\S+);", str(e.value)
    )
    assert said and said[1] == str(folder)
    run(capsys, "split", said[1], "--out", out, "--episodes", said[2])
    whole = [10, 11, 12, 10, 11]
    assert load(out).meta.lengths.tolist() == [whole[i] for i in (0, 2, 4)]


def test_gaps_that_were_accepted_are_still_told(tmp_path, capsys):
    folder = datasets.write(tmp_path / "set", "so100", 3, 10, views=0)
    shift(folder, 1, 4, 0.3)
    run(capsys, "repair", folder, "--accept", "--tolerance", "0.31")
    assert "gaps of its timestamps were accepted, up to 0.31 s" in run(capsys, "check", folder)


def test_episodes_that_were_broken_off_are_left_out_by_the_command_that_check_says(tmp_path, capsys):
    folder, out = tmp_path / "set", tmp_path / "out"
    with Writer(folder, Features(20, ("x", "y"), ("x", "y"))) as w:
        for length in (20, 3, 20, 20):
            x = np.random.default_rng(length).random((length, 2), np.float32)
            w.add(Episode(state=x, action=x, task="t"))
    said = re.search(r"1 episode \(the first is 1, .* --episodes (\S+)", run(capsys, "check", folder))
    assert said
    run(capsys, "split", folder, "--out", out, "--episodes", said[1])
    assert load(out).meta.lengths.tolist() == [20, 20, 20]


def test_a_command_that_a_message_suggests_can_be_pasted_whatever_the_folder_is_called(tmp_path, capsys):
    odd = tmp_path / "it's my data"
    told = run(capsys, "check", odd, code=2)
    assert (
        shlex.split(told[told.index("robo_rl collect") :])[-1] == str(odd)
        and f"no data set at {odd}:" in told
    )
