"""`robo_rl data import`: files of other projects, made here in their formats, as data sets."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robo_rl.cli import main
from robo_rl.data import foreign_bag as bags
from robo_rl.data.foreign import ForeignData
from robo_rl.data.lerobot import load
from robo_rl.data.meta import load_meta

h5py = pytest.importorskip("h5py", reason="needs robo_rl[formats]")
RNG = np.random.default_rng(0)


def imported(capsys, *args) -> str:
    """What the command prints; it ends well."""
    code = run("data", "import", *args)
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def run(*args) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, args)))
    return stopped.value.code


def refused(capsys, *args) -> str:
    assert run("data", "import", *args) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Traceback" not in error
    return error


def robomimic_file(path: Path, lengths=(5, 12, 3), libero=False) -> dict:
    """-> {demo: {key: array}}, of as many demos as `lengths`, the last of which fails."""
    held = {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        env = {"env_name": "Lift", "env_kwargs": {"control_freq": 20, "robots": ["Panda"]}}
        env["env_kwargs"]["controller_configs"] = {"type": "OSC_POSE", "control_delta": True}
        data.attrs["env_args"] = json.dumps(env)
        if libero:
            data.attrs["problem_info"] = json.dumps({"language_instruction": ["open the", "drawer"]})
        for k, n in enumerate(lengths):
            demo = data.create_group(f"demo_{k}")
            obs = {"robot0_eef_pos": RNG.normal(size=(n, 3)), "object": RNG.normal(size=(n, 10))}
            obs |= {"robot0_joint_pos_cos": RNG.normal(size=(n, 7))}
            if libero:
                obs = {"ee_states": RNG.normal(size=(n, 6)), "gripper_states": RNG.normal(size=(n, 2))}
            obs["agentview_rgb" if libero else "agentview_image"] = RNG.integers(
                0, 255, (n, 16, 16, 3), np.uint8
            )
            after = {key: np.roll(x, -1, 0) for key, x in obs.items()}
            reward = np.zeros(n)
            reward[-1] = k < len(lengths) - 1
            columns = {"actions": RNG.uniform(-1, 1, (n, 7)), "rewards": reward, "dones": reward.astype(int)}
            columns |= {f"obs/{key}": x for key, x in obs.items()}
            columns |= {f"next_obs/{key}": x for key, x in after.items()}
            for key, x in columns.items():
                demo[key] = x
            held[k] = columns
    return held


def test_a_file_of_robomimic_says_by_itself_what_becomes_of_it(tmp_path, capsys):
    held = robomimic_file(tmp_path / "low.hdf5", lengths=(5,) * 11 + (3,))
    said = imported(capsys, tmp_path / "low.hdf5")
    assert "robomimic: 12 episodes, 58 steps (3 to 5), 20 steps a second" in said
    assert "obs/robot0_eef_pos" in said and "-> state" in said and "-> camera agentview" in said
    said = imported(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "low")
    assert "6 in 1 (delta), 1 in 1 (absolute)" in said and "not recorded" not in said
    data = load(tmp_path / "low")
    assert data.features.fps == 20 and len(data) == 12
    assert data.success.tolist() == [True] * 11 + [False]
    assert data.terminated.tolist() == [True] * 11 + [False]
    for k in (2, 10):  # demo_2 before demo_10
        want = np.concatenate([held[k]["obs/object"], held[k]["obs/robot0_eef_pos"]], 1)
        episode = data.episode(k)
        assert np.allclose(episode.state, want) and np.allclose(episode.action, held[k]["actions"])
        assert np.allclose(episode.reward, held[k]["rewards"])
        assert np.allclose(episode.final[:10], held[k]["next_obs/object"][-1])
    assert data.features.state[0] == "object_0" and data.features.views == (("agentview", 16, 16),)


def test_libero_has_its_instruction_and_its_pictures_are_turned(tmp_path, capsys):
    held = robomimic_file(tmp_path / "libero_demo.hdf5", libero=True)
    imported(capsys, tmp_path / "libero_demo.hdf5", "--out", tmp_path / "out", "--pictures", "rotate180")
    data = load(tmp_path / "out")
    assert data.tasks == ["open the drawer"] and data.state.shape[1] == 8
    want = held[1]["obs/agentview_rgb"][:, ::-1, ::-1].astype(float)
    got = data.frames("agentview", 1).astype(float)
    plain = held[1]["obs/agentview_rgb"].astype(float)
    assert np.abs(got - want).mean() < 0.7 * np.abs(got - plain).mean()  # noise, through a video


def test_act_files_of_a_folder_are_an_episode_each_compressed_or_not(tmp_path, capsys):
    from PIL import Image

    folder = tmp_path / "aloha"
    folder.mkdir()
    frame = np.full((4, 12, 16, 3), 0, np.uint8)
    frame[:, :, 8:] = 200
    for k in range(11):
        with h5py.File(folder / f"episode_{k}.hdf5", "w") as file:
            file.attrs["sim"] = False
            file["action"] = np.full((4, 14), k, np.float32)
            file["observations/qpos"] = np.full((4, 14), k + 0.5)
            file["observations/qvel"] = np.zeros((4, 14))
            file["observations/images/cam_high"] = frame
            rows = []
            for picture in frame:
                buffer = io.BytesIO()
                Image.fromarray(picture).save(buffer, "JPEG")
                rows.append(np.frombuffer(buffer.getvalue(), np.uint8))
            padded = np.zeros((4, max(map(len, rows)) + 5), np.uint8)
            for row, x in zip(padded, rows, strict=True):
                row[: len(x)] = x
            file["observations/images/cam_low"] = padded
    said = imported(capsys, folder, "--out", tmp_path / "out", "--instruction", "insert the peg")
    assert "which of them succeeded is not recorded" in said and "12 in rad (absolute), 2 in 1" in said
    data = load(tmp_path / "out")
    assert not data.is_judged and data.features.fps == 50 and data.tasks == ["insert the peg"]
    assert data.episode(10).action[0, 0] == 10 and data.episode(2).state[0, 0] == 2.5
    for view in ("cam_high", "cam_low"):
        picture = data.frames(view, 3)[0]
        assert picture[:, :6].mean() < 40 and picture[:, 10:].mean() > 160


def test_minari_has_an_observation_more_than_actions(tmp_path, capsys):
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        for k in (0, 1):
            group = file.create_group(f"episode_{k}")
            group["observations/observation"] = np.arange(6 * 2, dtype=float).reshape(6, 2) + 100 * k
            group["observations/goal"] = np.ones((6, 3))
            group["actions"] = np.zeros((5, 2))
            group["rewards"] = np.arange(5.0)
            group["terminations"] = np.array([0, 0, 0, 0, k], bool)
            group["truncations"] = np.array([0, 0, 0, 0, 1 - k], bool)
    assert "--fps N" in imported(capsys, tmp_path / "main_data.hdf5")
    assert "--fps N" in refused(capsys, tmp_path / "main_data.hdf5", "--out", tmp_path / "out")
    keys = "--state", "observations/observation"
    imported(capsys, tmp_path / "main_data.hdf5", "--out", tmp_path / "out", "--fps", "10", *keys)
    data = load(tmp_path / "out")
    assert data.terminated.tolist() == [False, True] and not data.is_judged
    assert data.episode(1).final.tolist() == [110, 111] and data.episode(0).reward.tolist() == [0, 1, 2, 3, 4]


def flat_arrays() -> dict:
    ends = np.array([0, 0, 1, 0, 0, 0, 1, 0, 0])
    return {
        "observations": np.arange(18.0).reshape(9, 2),
        "next_observations": np.arange(18.0).reshape(9, 2) + 2,
        "actions": np.linspace(-1, 1, 9)[:, None],
        "rewards": (np.arange(9) == 6).astype(float),
        "terminals": ends * (np.arange(9) > 3),
        "timeouts": ends * (np.arange(9) < 3),
    }


def test_arrays_one_behind_the_other_are_cut_at_ends_and_time_limits(tmp_path, capsys):
    np.savez(tmp_path / "walker.npz", **flat_arrays())
    with h5py.File(tmp_path / "walker.hdf5", "w") as file:
        for key, x in flat_arrays().items():
            file[key] = x
        file["metadata/policy"] = 1
    for name in ("walker.npz", "walker.hdf5"):
        out = tmp_path / name.replace(".", "_")
        imported(capsys, tmp_path / name, "--out", out, "--fps", "20", "--success", "reward", "--units", "1")
        data = load(out)
        assert (data.to - data.from_).tolist() == [3, 4, 2]
        assert data.terminated.tolist() == [False, True, False] and data.success.tolist() == [
            False,
            True,
            False,
        ]
        assert data.episode(1).final.tolist() == [14, 15]


def test_terminals_alone_do_not_say_that_the_task_ended(tmp_path, capsys):
    arrays = flat_arrays()
    np.savez(tmp_path / "cube.npz", **{k: arrays[k] for k in ("observations", "actions", "terminals")})
    imported(capsys, tmp_path / "cube.npz", "--out", tmp_path / "out", "--fps", "20")
    data = load(tmp_path / "out")
    assert len(data) == 2 and not data.terminated.any() and "next.truncated" not in data.meta.info["features"]


def test_a_replay_buffer_of_diffusion_policy(tmp_path, capsys):
    zarr = pytest.importorskip("zarr")
    pictures = np.zeros((7, 8, 8, 3), np.float32)
    pictures[..., 0] = 250
    for path in (tmp_path / "pusht.zarr", tmp_path / "pusht.zarr.zip"):
        store = zarr.storage.ZipStore(path, mode="w") if path.suffix == ".zip" else path
        root = zarr.open_group(store, mode="w", zarr_format=2)
        for key, x in {
            "data/action": np.arange(14.0).reshape(7, 2),
            "data/state": np.arange(35.0).reshape(7, 5),
            "data/keypoint": np.arange(126.0).reshape(7, 9, 2),
            "data/img": pictures,
            "meta/episode_ends": np.array([3, 7]),
        }.items():
            made = root.create_array(key, shape=x.shape, dtype=x.dtype, chunks=x.shape)
            made[:] = x
        if path.suffix == ".zip":
            store.close()
        out = tmp_path / path.name.replace(".", "_")
        said = imported(capsys, path, "--out", out, "--fps", "10", "--state", "keypoint,state")
        assert "nobody said the units" in said
        data = load(out)
        assert (data.to - data.from_).tolist() == [3, 4] and data.state.shape[1] == 23
        assert data.episode(1).state[0, 18] == 15 and data.episode(1).action[0].tolist() == [6, 7]
        red, green, blue = data.frames("img", 0)[0].reshape(-1, 3).mean(0)
        assert red > 230 and green < 40 and blue < 40


def test_any_other_hdf5_file_is_an_episode_whose_keys_a_person_names(tmp_path, capsys):
    for k in range(2):
        with h5py.File(tmp_path / f"run{k}.h5", "w") as file:
            file["robot/q"], file["cmd"], file["info"] = np.ones((6, 3)) * k, np.zeros((6, 2)), np.zeros(2)
    paths = [tmp_path / "run0.h5", tmp_path / "run1.h5"]
    said = imported(capsys, *paths)
    assert "robot/q" in said and "info" not in said and "--action KEY --state KEY,KEY --fps N" in said
    assert "robot/q" in refused(capsys, *paths, "--action", "command")
    imported(
        capsys, *paths, "--out", tmp_path / "out", "--state", "robot/q", "--action", "cmd", "--fps", "5",
        "--success", "all", "--units", "rad",
    )  # fmt: skip
    data = load(tmp_path / "out")
    assert data.success.all() and data.features.state == ("q_0", "q_1", "q_2")


def bag_file(path: Path, kind: str = "mcap") -> None:
    """Two seconds: joints at 100 a second (in another order in every second message), a command at 20, 10 ms
    late, whose number is the time, pictures of two kinds at 10, brighter from one to the next."""
    from PIL import Image
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    T = store.types
    stamp = T["builtin_interfaces/msg/Time"](sec=0, nanosec=0)
    header = T["std_msgs/msg/Header"](stamp=stamp, frame_id="")
    messages = []
    for k in range(200):
        names, q = ["a", "b"], [k / 100, 10 + k / 100]
        if k % 2:
            names, q = names[::-1], q[::-1]
        joints = T["sensor_msgs/msg/JointState"](
            header=header, name=names, position=np.array(q), velocity=np.zeros(2), effort=np.zeros(0)
        )
        messages.append((k * 10_000_000, "/joint_states", joints))
    layout = T["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
    for k in range(40):
        told = T["std_msgs/msg/Float64MultiArray"](layout=layout, data=np.array([k / 20, 0.0]))
        messages.append((k * 50_000_000 + 10_000_000, "/command", told))
    for k in range(20):
        bright = np.full((6, 8, 3), 10 * k, np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(bright).save(buffer, "PNG")
        small = T["sensor_msgs/msg/CompressedImage"](
            header=header, format="png", data=np.frombuffer(buffer.getvalue(), np.uint8)
        )
        messages.append((k * 100_000_000, "/wrist/image_raw/compressed", small))
        blue = np.zeros((6, 9, 3), np.uint8)
        blue[:, :8, 0] = 10 * k  # of bgr, with three bytes behind each row
        raw = T["sensor_msgs/msg/Image"](
            header=header, height=6, width=8, encoding="bgr8", is_bigendian=0, step=27, data=blue.reshape(-1)
        )
        messages.append((k * 100_000_000, "/front/image_raw", raw))
    plugin = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}[kind]
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        kinds = {topic: message.__msgtype__ for _, topic, message in messages}
        connections = {t: writer.add_connection(t, name, typestore=store) for t, name in kinds.items()}
        for time, topic, message in sorted(messages, key=lambda m: m[0]):
            writer.write(connections[topic], time, store.serialize_cdr(message, message.__msgtype__))


@pytest.mark.parametrize("kind", ["mcap", "sqlite3"])
def test_a_bag_is_sampled_at_its_rate_and_an_action_is_what_was_told_next(tmp_path, capsys, kind):
    pytest.importorskip("rosbags")
    bag_file(tmp_path / "bag", kind)
    said = imported(capsys, tmp_path / "bag")
    assert "/joint_states" in said and "-> state" in said and "-> camera front" in said
    assert "--action KEY" in said and "--fps N" in said
    imported(
        capsys, tmp_path / "bag", "--out", tmp_path / "out", "--action", "/command", "--fps", "20", "--units",
        "rad", "--instruction", "wave",
    )  # fmt: skip
    data = load(tmp_path / "out")
    assert data.features.state == ("a", "b") and not data.is_judged
    episode = data.episode(0)
    # the first command came at 10 ms, and the last picture at 1.9 s
    t = 0.01 + np.arange(len(episode)) / 20
    assert t[-1] <= 1.9 < t[-1] + 0.05
    assert np.allclose(episode.state[:, 0], np.floor(t * 100 + 1e-6) / 100)
    assert np.allclose(episode.state[:, 1] - episode.state[:, 0], 10)
    assert np.allclose(episode.action[:, 0], np.arange(len(episode)) / 20)
    told = np.floor(t * 10 + 1e-6) * 10
    assert np.abs(data.frames("wrist", 0).mean((1, 2, 3)) - told).max() < 6
    blue = data.frames("front", 0)
    assert np.abs(blue[..., 2].mean((1, 2)) - told).max() < 8 and blue[..., 0].mean() < 12


def test_a_topic_that_falls_silent_is_told(tmp_path):
    pytest.importorskip("rosbags")
    bag_file(tmp_path / "bag")
    topics = bags.topics_of(tmp_path / "bag")
    times = topics["/command"].times
    topics["/command"] = replace(topics["/command"], times=np.concatenate([times[:5], times[30:]]))
    got = ForeignData("rosbag", [], ("/joint_states",), ("/command",), fps=20)
    with pytest.warns(UserWarning, match=r"/command is silent for 1\.3 s"):
        bags.sampled(tmp_path / "bag", topics, {"/joint_states": (2,), "/command": (2,)}, got, {})


def test_what_cannot_be_read_is_refused_in_a_line(tmp_path, capsys):
    (tmp_path / "a.pkl").write_bytes(b"cos\nsystem\n")
    assert "a pickle can run code" in refused(capsys, tmp_path / "a.pkl")
    (tmp_path / "b.hdf5").write_bytes(b"nothing")
    assert "is no HDF5 file" in refused(capsys, tmp_path / "b.hdf5")
    (tmp_path / "c.npz").write_bytes(b"nothing")
    assert "is no file of arrays" in refused(capsys, tmp_path / "c.npz")
    (tmp_path / "d.mcap").write_bytes(b"nothing")
    assert "cannot be read as a bag" in refused(capsys, tmp_path / "d.mcap")
    (tmp_path / "e.txt").write_text("x")
    assert "these are read" in refused(capsys, tmp_path / "e.txt")
    assert "is missing" in refused(capsys, tmp_path / "absent.hdf5")
    np.savez(tmp_path / "f.npz", observations=np.zeros((3, 2)))
    assert "has no actions" in refused(capsys, tmp_path / "f.npz")
    np.savez(tmp_path / "g.npz", **flat_arrays())
    assert "several formats" in refused(capsys, tmp_path / "g.npz", tmp_path / "d.mcap")
    assert "not an option of files that are read" in refused(capsys, tmp_path / "g.npz", "--obs", "rgb")
    bad = flat_arrays()
    bad["observations"][1, 0] = np.nan
    np.savez(tmp_path / "h.npz", **bad)
    out = tmp_path / "out"
    said = refused(capsys, tmp_path / "h.npz", "--out", out, "--fps", "20")
    assert "episode 0" in said and "not finite" in said and not out.exists()
    assert not list(tmp_path.glob(".out*"))


def test_what_is_imported_is_checked_and_learnt_from_as_it_is(tmp_path, capsys):
    robomimic_file(tmp_path / "low.hdf5", lengths=(20, 20, 20, 20))
    imported(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "low", "--cameras", "none")
    assert load_meta(tmp_path / "low").video_file == {}
    assert run("data", "check", tmp_path / "low") == 0
    small = ["--bc.updates", 3, "--policy.width", 16, "--policy.depth", 1, "--eval-episodes", 1]
    bc = ["--sim", "none", "--algo", "bc", "--demos", tmp_path / "low", "--out", tmp_path / "run"]
    assert run("train", *bc, *small) == 0
