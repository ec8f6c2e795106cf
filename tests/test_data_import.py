"""`robo_rl data import`: files of other projects, made here in their formats, as data sets."""

import io
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import robo_rl
from robo_rl.cli import main
from robo_rl.data import foreign
from robo_rl.data import foreign_hdf5 as hdf5
from robo_rl.data.foreign import ImportChoice, write
from robo_rl.data.lerobot import load
from robo_rl.data.meta import load_meta
from robo_rl.errors import UserError

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


OSC = {"type": "OSC_POSE", "control_delta": True}
PART = {"type": "OSC_POSE", "input_type": "delta"}


@pytest.mark.parametrize(
    ("controllers", "axes", "said"),
    [
        ([OSC, OSC], 14, "12 in 1 (delta), 2 in 1 (absolute)"),  # two arms of robosuite 1.4
        ({"type": "BASIC", "body_parts": {"right": PART}}, 7, "6 in 1 (delta)"),
        ({"type": "BASIC", "body_parts": {"arms": {"right": PART, "left": PART}}}, 14, "12 in 1 (delta)"),
        (OSC | {"control_delta": False}, 7, "3 in m (absolute), 3 in rad (absolute)"),
        ({"type": "JOINT_VELOCITY"}, 7, "nobody said the units"),
        ("OSC_POSE", 7, "nobody said the units"),
    ],
)
def test_units_of_robosuites_controllers(tmp_path, capsys, controllers, axes, said):
    env = {"env_kwargs": {"control_freq": 20, "robots": ["Panda"], "controller_configs": controllers}}
    with h5py.File(tmp_path / "low.hdf5", "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps(env)
        file["data/demo_0/actions"] = np.full((4, axes), 0.5)
        file["data/demo_0/obs/object"] = np.zeros((4, 3))
    assert said in imported(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "low")


def test_poses_in_a_file_that_says_steps_have_no_units(tmp_path, capsys):
    robomimic_file(tmp_path / "abs.hdf5")
    with h5py.File(tmp_path / "abs.hdf5", "a") as file:
        file["data/demo_0/actions"][:, 3] = 3.1
    said = imported(capsys, tmp_path / "abs.hdf5", "--out", tmp_path / "abs", "--cameras", "none")
    assert "nobody said the units" in said


def test_lists_of_a_file_choose_episodes(tmp_path, capsys):
    robomimic_file(tmp_path / "low.hdf5", lengths=(5, 6, 7, 4))
    with h5py.File(tmp_path / "low.hdf5", "a") as file:
        file["mask/train"], file["mask/valid"] = [b"demo_2", b"demo_0"], [b"demo_1"]
        file["data/demo_2/dones"][:] = [0, 0, 0, 1, 0, 0, 0]
    assert "lists for --episodes: train (2), valid (1)" in imported(capsys, tmp_path / "low.hdf5")
    out = tmp_path / "out"
    imported(capsys, tmp_path / "low.hdf5", "--out", out, "--episodes", "train", "--cameras", "none")
    data = load(out)
    said = refused(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "no", "--episodes", "trian")
    assert "unknown list of --episodes" in said and "train" in said
    said = refused(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "no", "--success", "rewrds")
    assert "a key of the files or a file" in said
    assert (data.to - data.from_).tolist() == [5, 7]
    assert data.terminated.tolist() == [True, False]  # the second went on after its success


def test_libero_asks_for_shaped_rewards_and_has_none(tmp_path, capsys):
    robomimic_file(tmp_path / "demo.hdf5", libero=True)
    with h5py.File(tmp_path / "demo.hdf5", "a") as file:
        env = json.loads(file["data"].attrs["env_args"])
        env["env_kwargs"]["reward_shaping"] = True
        file["data"].attrs["env_args"] = json.dumps(env)
        file["data"].attrs["macros_image_convention"] = "opengl"
    assert "upside down: --pictures flip  -> camera agentview" in imported(capsys, tmp_path / "demo.hdf5")
    imported(capsys, tmp_path / "demo.hdf5", "--out", tmp_path / "out", "--cameras", "none")
    assert load(tmp_path / "out").success.tolist() == [True, True, False]


def test_what_each_demonstration_says_of_itself_is_kept(tmp_path, capsys):
    robomimic_file(tmp_path / "low.hdf5")
    with h5py.File(tmp_path / "low.hdf5", "a") as file:
        for k, demo in enumerate(file["data"].values()):
            demo["obs/agentview_segmentation"] = np.zeros((len(demo["actions"]), 16, 16, 1), np.int32)
            demo.attrs["success"], demo.attrs["ep_meta"] = k == 2, json.dumps({"lang": f"task {k}"})
    imported(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "out")
    data = load(tmp_path / "out")
    assert data.features.views == (("agentview", 16, 16),)
    assert data.success.tolist() == [False, False, True] and data.tasks == ["task 0", "task 1", "task 2"]


def test_mobile_aloha_drives(tmp_path, capsys):
    with h5py.File(tmp_path / "episode_0.hdf5", "w") as file:
        file["action"], file["base_action"] = np.zeros((4, 14)), np.ones((4, 2))
        file["observations/qpos"], file["compress_len"] = np.zeros((4, 14)), np.zeros((3, 4))
    said = imported(capsys, tmp_path / "episode_0.hdf5", "--out", tmp_path / "out")
    assert "1 in m/s (rate), 1 in rad/s (rate)" in said
    assert load(tmp_path / "out").action[0].tolist() == [0] * 14 + [1, 1]


def test_minari_may_have_actions_of_several_parts_and_say_success(tmp_path, capsys):
    (tmp_path / "v0" / "data").mkdir(parents=True)
    with h5py.File(tmp_path / "v0" / "data" / "main_data.hdf5", "w") as file:
        for k in (0, 1):
            group = file.create_group(f"episode_{k}")
            group["observations"], group["actions/arm"] = np.zeros((4, 2)), np.zeros((3, 2))
            group["actions/grip"], group["infos/success"] = np.ones(3), np.array([0, k, 0, 0], bool)
    imported(capsys, tmp_path / "v0", "--out", tmp_path / "out", "--fps", "10", "--units", "1")
    data = load(tmp_path / "out")
    assert data.success.tolist() == [False, True] and data.action[0].tolist() == [0, 0, 1]


def test_keys_that_only_look_like_a_format_are_an_episode_of_a_file(tmp_path, capsys):
    for key, other in (
        ("data", "a"),
        ("observations", "action"),
        ("episode_0", "a"),
        ("actions", "terminals"),
    ):
        with h5py.File(tmp_path / f"{key}.hdf5", "w") as file:
            file[key], file[other] = 3.0 if key == "actions" else np.zeros((5, 3)), np.zeros((5, 2))
            file["linked"], file["nowhere"] = h5py.SoftLink(f"/{other}"), h5py.SoftLink("/x")
            file["complex"] = np.zeros((5, 2), complex)
        said = imported(capsys, tmp_path / f"{key}.hdf5")
        assert said.startswith("HDF5: 1 episode") and "linked" in said
        assert "nowhere" not in said and "complex" not in said


def test_infos_of_d4rl_are_keys_and_rows_must_fit(tmp_path, capsys):
    with h5py.File(tmp_path / "walker.hdf5", "w") as file:
        for key, x in flat_arrays().items():
            file[key] = x
        file["infos/qpos"] = np.arange(27.0).reshape(9, 3)
    out, keys = tmp_path / "out", ("--state", "infos/qpos", "--fps", "20", "--success", "terminals")
    imported(capsys, tmp_path / "walker.hdf5", "--out", out, *keys)
    data = load(out)
    assert data.episode(1).state[0].tolist() == [9, 10, 11] and data.success.tolist() == [False, True, False]
    np.savez(tmp_path / "short.npz", **(flat_arrays() | {"observations": np.zeros((8, 2))}))
    assert "observations has 8 rows for 9 actions" in refused(capsys, tmp_path / "short.npz")


def test_of_what_comes_after_a_single_row_is_read(tmp_path):
    robomimic_file(tmp_path / "low.hdf5")
    sizes: dict[str, list[int]] = {}
    with ExitStack() as opened:
        got = hdf5.read_hdf5([tmp_path / "low.hdf5"], opened)
        episode = got.episodes[1]

        def part(key: str, rows: slice) -> np.ndarray:
            assert episode.part is not None
            x = episode.part(key, rows)
            sizes.setdefault(key, []).append(len(x))
            return x

        counted = replace(got, episodes=[replace(episode, part=part)], fps=10)
        write(counted, ImportChoice(units="1"), tmp_path / "out")
    assert sizes["next_obs/agentview_image"] == [1] and sizes["obs/agentview_image"] == [1, 12]


def test_an_episode_that_differs_from_the_first_is_told_by_its_name(tmp_path, capsys):
    robomimic_file(tmp_path / "low.hdf5")
    with h5py.File(tmp_path / "low.hdf5", "a") as file:
        del file["data/demo_1/obs/object"]
        file["data/demo_1/obs/object"] = np.zeros((12, 4))
    said = refused(capsys, tmp_path / "low.hdf5", "--out", tmp_path / "out")
    assert "demo_1: 'obs/object' has rows of [4], of [10] in the first episode" in said
    assert not list(tmp_path.glob("*out*"))


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


def test_arrays_that_do_not_say_where_episodes_end_are_one_with_a_warning(tmp_path, capsys):
    arrays = {k: x for k, x in flat_arrays().items() if k not in ("terminals", "timeouts")}
    np.savez(tmp_path / "walker.npz", **arrays)
    with pytest.warns(
        UserWarning, match=r"walker\.npz has neither terminals nor timeouts, so its 9 rows are"
    ):
        assert len(robo_rl.import_data(tmp_path / "out", tmp_path / "walker.npz", fps=20)) == 1


def test_arrays_in_memory_become_the_data_set_that_their_file_becomes(tmp_path):
    np.savez(tmp_path / "walker.npz", **flat_arrays())
    of_file, of_memory = (
        robo_rl.import_data(tmp_path / name, given, fps=20, units="1")
        for name, given in (("a", tmp_path / "walker.npz"), ("b", flat_arrays()))
    )
    for name in ("state", "action", "reward", "terminated", "to", "final"):
        assert np.array_equal(getattr(of_file, name), getattr(of_memory, name), equal_nan=True), name


def test_a_list_of_episodes_in_memory_has_lengths_pictures_instructions_and_success_of_its_own(tmp_path):
    rng = np.random.default_rng(0)
    episodes = [
        {
            "observations": rng.normal(size=(T + 1, 3)),
            "actions": rng.normal(size=(T, 2)),
            "top": rng.integers(0, 255, (T + 1, 16, 16, 3), np.uint8),
            "task": f"task {T}",
            "success": T == 5,
        }
        for T in (4, 5)
    ]
    data = robo_rl.import_data(tmp_path / "out", episodes, fps=10, cameras="top")
    assert data.success.tolist() == [False, True] and list(data.tasks) == ["task 4", "task 5"]
    assert np.allclose(data.state, np.concatenate([e["observations"][:-1] for e in episodes]))
    assert np.allclose(data.final, [e["observations"][-1] for e in episodes]) and [*data.views] == ["top"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"obs": np.zeros((3, 2))}, "the arrays must be a dict of arrays, actions .* it has obs"),
        ([{"actions": np.zeros((3, 2))}, 5], "episode 1 must be a dict of arrays"),
        ({"actions": 5}, r"actions must be \[T, A\]"),
        ([{"actions": np.zeros((3, 2)), "observations": np.zeros((5, 2))}], "has 5 rows for 3 actions"),
        ([{"actions": [[1.0], [1.0, 2.0]]}], "episode 0: setting an array element"),
        (np.zeros((3, 2)), "takes files, a dict of arrays, or a list .* got a ndarray"),
        ([], "no episode"),
    ],
)
def test_what_is_no_arrays_of_episodes_is_one_line(tmp_path, given, line):
    with pytest.raises(UserError, match=line):
        robo_rl.import_data(tmp_path / "out", given, fps=10)
    assert not (tmp_path / "out").exists()


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


def test_a_folder_of_more_files_than_may_be_open_is_read(tmp_path, capsys):
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    for k in range(40):
        with h5py.File(tmp_path / f"episode_{k}.hdf5", "w") as file:
            file["action"], file["observations/qpos"] = np.zeros((3, 14)), np.zeros((3, 14))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 20, hard))
    try:
        assert "ACT: 40 episodes" in imported(capsys, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    (tmp_path / "empty.npz").touch()
    assert "is no file of arrays" in refused(capsys, tmp_path / "empty.npz")
    np.savez(tmp_path / "none.npz", **{key: x[:0] for key, x in flat_arrays().items()})
    assert "no episode of these files has a step" in refused(capsys, tmp_path / "none.npz")
    (tmp_path / "v0" / "data" / "0").mkdir(parents=True)
    (tmp_path / "v0" / "data" / "0" / "part-0.arrow").touch()
    assert "Minari's Arrow files are not read" in refused(capsys, tmp_path / "v0")
    np.savez(tmp_path / "f.npz", observations=np.zeros((3, 2)))
    assert "has no actions" in refused(capsys, tmp_path / "f.npz")
    np.savez(tmp_path / "g.npz", **flat_arrays())
    assert "several formats" in refused(capsys, tmp_path / "g.npz", tmp_path / "d.mcap")
    twice = "--state", "observations,observations"
    assert "names 'observations' twice" in refused(capsys, tmp_path / "g.npz", *twice)
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


def test_from_python(tmp_path):
    np.savez(tmp_path / "walker.npz", **flat_arrays())
    data = robo_rl.import_data(
        tmp_path / "out", tmp_path / "walker.npz", fps=20, state="observations", units="1"
    )
    assert len(data) == 3 and data.state.shape == (9, 2) and data.features.fps == 20
    with pytest.raises(UserError, match="--fps N"):
        robo_rl.import_data(tmp_path / "more", [tmp_path / "walker.npz"])


def test_larger_pictures_are_made_smaller_part_by_part(tmp_path, capsys):
    from PIL import Image

    T = 2 * foreign.PART + 5
    bright = np.repeat(np.arange(T + 1, dtype=np.uint8)[:, None, None, None], 24, 1)
    raw = np.broadcast_to(bright, (T + 1, 24, 32, 3)).copy()
    buffers = [io.BytesIO() for _ in range(T)]
    for picture, buffer in zip(raw, buffers, strict=False):
        Image.fromarray(picture).save(buffer, "PNG")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["action"], file["q"], file["raw"] = np.zeros((T, 2)), np.zeros((T + 1, 3)), raw
        file["float"], file["t"], file["u"] = raw / 255, np.zeros(T), np.zeros(T)
        jpegs = file.create_dataset("png", (T,), h5py.vlen_dtype(np.uint8))
        for k, buffer in enumerate(buffers):
            jpegs[k] = np.frombuffer(buffer.getvalue(), np.uint8)
    keys = "--state", "q", "--action", "action", "--fps", 10, "--cameras", "a=raw,b=float,c=png"
    imported(capsys, tmp_path / "a.hdf5", *keys, "--max-side", 16, "--out", tmp_path / "out")
    data = load(tmp_path / "out")
    assert data.views == dict.fromkeys("abc", (12, 16)) and len(data.action) == T
    for view in "abc":
        assert np.abs(data.frames(view, 0).mean((1, 2, 3)) - np.arange(T)).max() < 3
    imported(capsys, tmp_path / "a.hdf5", *keys, "--max-side", 64, "--out", tmp_path / "whole")
    assert load(tmp_path / "whole").views == dict.fromkeys("abc", (24, 32))


@pytest.mark.parametrize(("scans", "asked"), [(False, 5), (True, 1)])
def test_what_is_read_from_its_beginning_on_is_read_once(scans, asked):
    pictures, seen = np.zeros((3 * foreign.PART, 8, 8, 3), np.uint8), []

    def part(key, rows):
        seen.append(rows)
        return pictures[rows]

    columns = {"rgb": (8, 8, 3)}
    episode = foreign.ForeignEpisode(
        "bag", len(pictures), columns, lambda key: pictures, part=part, scans=scans
    )
    made = foreign.read_pictures(episode, "rgb", ImportChoice(max_side=4))
    assert made.shape == (len(pictures), 4, 4, 3) and len(seen) == asked
