"""Data sets laid out otherwise than our first file of each kind: several folders, files of a part of them,
columns of other programs."""

import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_data import DATA, EPISODES, VIDEO, episode, features, picture, psnr, same, set_info, spec
from test_data_integrity import VIEW, aged, record, rewrite, whole

from robo_rl.data import checksums, video
from robo_rl.data.lerobot import BrokenDataset, Writer, accept, load
from robo_rl.data.reader import judged

pytestmark = pytest.mark.filterwarnings("ignore:.*without checksums")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Three episodes without pictures, in one file."""
    root = tmp_path_factory.mktemp("bare") / "d"
    record(root, 3, None, flush_every=3)
    return root


@pytest.fixture
def root(bare, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(bare, tmp_path / "d")
    (tmp_path / "d" / checksums.NAME).unlink()
    return tmp_path / "d"


def column(root, key):
    return pq.read_table(root / DATA)[key]


# ---- files


def test_a_folder_holds_so_many_files_and_the_next_goes_on(tmp_path):
    root = tmp_path / "d"
    record(root, 1)
    set_info(root, chunks_size=2)
    accept(root)
    for i in range(1, 4):  # a file of each kind every time
        record(root, 1, first=i, file_mb=0)
    for kind in ("data", "meta/episodes", "videos/observation.images.front", "meta/final"):
        assert [p.parent.name[-1] + p.stem[-1] for p in sorted((root / kind).rglob("file-*"))] == [
            "00",
            "01",
            "10",
            "11",
        ], kind
    data = load(root)
    same(data, 4, VIEW)
    assert data.meta.meta_file.tolist() == data.meta.data_file.tolist() == [0, 1, 2, 3]
    left = root / "data/chunk-003/file-000.parquet"
    left.parent.mkdir()
    left.write_bytes(b"of a flush that was cut short")
    with Writer(root, features(VIEW), spec()):
        assert not left.exists()


def test_the_first_episodes_are_read_whatever_the_files_behind_them_are(tmp_path):
    root = tmp_path / "d"
    record(root, 2, None)
    record(root, 2, None, first=2, file_mb=0)
    for name in (DATA, EPISODES):
        (root / name.replace("file-000", "file-001")).write_bytes(b"damaged")
    same(load(root, 2), 2)
    with pytest.raises(BrokenDataset, match="file-001"):
        load(root, 3)


def test_a_data_set_that_says_it_is_empty_begins_anew(root):
    set_info(root, total_episodes=0, total_frames=0)
    with Writer(root, features(None), spec()) as w:
        assert len(w) == 0 and not (root / DATA).exists() and not (root / EPISODES).exists()
        w.add(whole(0, view=None))
    same(load(root), 1)


def test_a_video_of_other_settings_is_left_and_the_next_one_begun(tmp_path):
    with Writer(tmp_path, features(VIEW), flush_every=1) as w:
        w.add(whole(0))
        video.encode(tmp_path / VIDEO, [picture(len(episode(0)), *VIEW, 0)], 2 * w.features.fps)
        w.add(whole(1))
    data = load(tmp_path, trust=None)
    assert data.meta.video_file["front"].tolist() == [0, 1] and data.meta.video_start["front"].tolist() == [
        0,
        0,
    ]
    assert psnr(data.frames("front", 1), episode(1, view=VIEW).images["front"]) > 33


# ---- columns


def test_wider_numbers_are_read_as_ours(root):
    data = load(root)
    wide = {
        key: pa.FixedSizeListArray.from_arrays(pa.array(x.astype(np.float64).reshape(-1)), x.shape[1])
        for key, x in (("observation.state", data.state), ("action", data.action))
    }
    rewrite(root / DATA, **wide, **{"next.reward": pa.array(data.reward.astype(np.float64))})
    again = load(root)
    for name in ("state", "action", "reward"):
        x = getattr(again, name)
        assert x.dtype == np.float32 and x.flags.c_contiguous and np.array_equal(x, getattr(data, name))


def test_a_flag_may_be_a_list_of_one(root):
    success = load(root).success
    flags = column(root, "next.success").combine_chunks()
    rewrite(root / DATA, **{"next.success": pa.FixedSizeListArray.from_arrays(flags, 1)})
    assert np.array_equal(load(root).success, success) and success.tolist() == [True, False, False]


@pytest.mark.parametrize("number", [-1, 2])
def test_a_task_that_is_not_listed_is_named(root, number):
    tasks = column(root, "task_index").to_numpy().copy()
    assert set(tasks) == {0, 1}
    tasks[-1] = number
    rewrite(root / DATA, task_index=pa.array(tasks))
    with pytest.raises(BrokenDataset, match="it has 2 tasks, the frames use number"):
        load(root)


def test_frames_that_do_not_name_their_instruction_are_told_to_have_the_first(root):
    info = json.loads((root / "meta/info.json").read_text())["features"]
    set_info(root, features={key: ft for key, ft in info.items() if key != "task_index"})
    with pytest.warns(UserWarning, match="which of the 2 instructions is theirs"):
        data = load(root)
    assert not data.task_index.any() and len(data.tasks) == 2


def test_a_last_state_that_is_known_in_part_is_not_known(root):
    aged_root = root.parent / "aged"
    shutil.copytree(root, aged_root)
    accept(aged_root)
    aged(aged_root)
    finals = np.load(aged_root / "meta/final_states.npy")
    finals[1, 2] = np.nan
    np.save(aged_root / "meta/final_states.npy", finals)
    data = load(aged_root)
    assert [data.episode(e).final is not None for e in range(3)] == [True, False, True]


def test_success_that_was_not_recorded_is_judged_and_pays_at_the_end(root):
    gone = ["next.reward", "next.done", "next.truncated", "next.success"]
    assert load(root).is_judged
    pq.write_table(pq.read_table(root / DATA).drop_columns(gone), root / DATA)
    info = json.loads((root / "meta/info.json").read_text())["features"]
    set_info(root, features={key: ft for key, ft in info.items() if key not in gone})
    data = load(root)
    assert not data.is_judged and not data.success.any() and not data.reward.any()
    said = judged(data, np.array([False, True, True]))
    assert said.is_judged and said.reward.sum() == 2 and said.terminated.tolist() == [False, True, True]
    assert said.reward[said.to - 1].tolist() == [0, 1, 1]


def test_pictures_in_columns_are_found_in_every_file(tmp_path):
    root = tmp_path / "d"
    record(root, 2, None)
    record(root, 2, None, first=2, file_mb=0)
    clips = [picture(len(episode(i)), *VIEW, i) for i in range(4)]
    for number in (0, 1):
        path = root / DATA.replace("file-000", f"file-00{number}")
        cells = [{"bytes": png(x), "path": None} for clip in clips[2 * number : 2 * number + 2] for x in clip]
        pq.write_table(pq.read_table(path).append_column("observation.images.front", pa.array(cells)), path)
    info = json.loads((root / "meta/info.json").read_text())["features"]
    set_info(
        root,
        features=info
        | {
            "observation.images.front": {
                "dtype": "image",
                "shape": [*VIEW, 3],
                "names": ["height", "width", "channels"],
            }
        },
    )
    data = load(root, trust=None)
    for i, clip in enumerate(clips):
        assert np.array_equal(data.frames("front", i), clip)


def png(x: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(x).save(out, "png")
    return out.getvalue()
