"""`robo_rl data import` of RLDS. tests/data/rlds was written by tensorflow_datasets 4.9.10, TensorFlow 2.21:
episode k has 4 + k steps of state k + t / 10, action t / 10, count (-t, 300 t, k), pictures of brightness
20 k (JPEG) and 10 t (PNG), reward 1 in the last step, is_terminal there where k is even."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from test_data_import import imported, refused

from robo_rl.data import foreign_rlds as rlds
from robo_rl.data.lerobot import load

pytest.importorskip("google_crc32c", reason="needs robo_rl[formats]")
DEMO = Path(__file__).parent / "data" / "rlds" / "demo"


def test_what_tensorflow_datasets_wrote_is_read_without_it(tmp_path, capsys):
    said = imported(capsys, DEMO)
    assert "RLDS: 7 episodes, 49 steps (4 to 10)" in said and "depth" not in said and "do thing 0" in said
    keys = "observation/state,observation/matrix,observation/count"
    imported(capsys, DEMO, "--fps", 5, "--success", "reward", "--state", keys, "--out", tmp_path / "out")
    data = load(tmp_path / "out")
    assert len(data) == 7 and data.success.all() and {*data.tasks} == {"do thing 0", "do thing 1"}
    for e in range(7):
        episode = data.episode(e)
        k, t = len(episode) - 4, np.arange(len(episode))[:, None]
        assert episode.task == f"do thing {k % 2}" and data.terminated[e] == (k % 2 == 0)
        want = np.hstack([*[k + t / 10] * 8, *[t] * 4, -t, 300 * t, k + 0 * t])
        assert np.allclose(episode.state, want) and np.allclose(episode.action, t / 10)
        assert episode.reward.tolist() == [0] * (len(episode) - 1) + [1]
        assert np.abs(data.frames("image", e).mean((1, 2, 3)) - 20 * k).max() < 4
        assert np.abs(data.frames("wrist_image", e).mean((1, 2, 3)) - 10 * t[:, 0]).max() < 4


def test_one_file_of_records_alone(tmp_path, capsys):
    assert "5 episodes" in imported(capsys, DEMO / "1.0.0" / "demo-train.tfrecord-00000-of-00001")


def test_packed_integers_are_those_that_were_written():
    numbers = np.array([0, 1, 127, 128, 300, 2**31, 2**62, -1, -300, -(2**63)])
    data = bytearray()
    for n in numbers.tolist():
        n &= 2**64 - 1
        while n > 127:
            data.append(n & 127 | 128)
            n >>= 7
        data.append(n)
    assert rlds.varints(memoryview(bytes(data))).tolist() == numbers.tolist()
    assert rlds.varint(memoryview(bytes(data)), 3) == (128, 5)
    with pytest.raises(ValueError, match="cut"):
        rlds.varints(memoryview(b"\x01\x80"))


@pytest.mark.parametrize("place", ["head", "data", "end"])
def test_damage_is_told_where_it_is(tmp_path, capsys, place):
    shutil.copytree(DEMO, tmp_path / "demo")
    file = tmp_path / "demo" / "1.0.0" / "demo-val.tfrecord-00000-of-00001"
    data = bytearray(file.read_bytes())
    if place == "end":
        data = data[:-7]
    else:
        data[3 if place == "head" else 200] ^= 255
    file.write_bytes(data)
    said = refused(capsys, tmp_path / "demo", "--fps", 5, "--out", tmp_path / "out")
    assert "demo-val" in said and "damaged" in said and not (tmp_path / "out").exists()
    (tmp_path / "demo" / "1.0.0" / "features.json").write_text('{"featuresDict": {"features": {}}}')
    assert "does not describe episodes with steps" in refused(capsys, tmp_path / "demo")
