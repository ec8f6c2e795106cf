"""A policy that learnt from a data set without a simulator, on one arm: its columns, units and rate, and what
nobody said."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import robo_rl
from pairs import aloha_arm

from controllers.chunking import Prefix
from controllers.data_columns import RobotData, read_data
from controllers.data_interface import DataInterface
from controllers.policy_client import InProcessPolicy
from controllers.robot import load_robot
from controllers.serving import misfit
from robo_rl.data.episode import Episode, Features
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.experiment.data_facts import DataFacts, check_instruction, read_facts
from robo_rl.experiment.deploy import deploy_in_process
from robo_rl.experiment.deploy_data import data_interface, fitted
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.deploy_recorder import DeployRecorder
from robo_rl.experiment.model_units import CommandUnits
from robo_rl.experiment.policy_server import Actor, default_instruction, in_units
from robo_rl.experiment.scenes import start_placement
from robo_rl.policies import ObsSpec

SIM = load_robot("sim")
JOINTS = tuple(f"{j}.pos" for j in SIM.joints)
HOME = np.degrees(start_placement(SIM, "pick_cube", 0)[0])  # of --start 0
ARM_UNITS = ("deg",) * 7 + ("%",)


def interface(
    folder,
    names=(*JOINTS, "gripper.pos"),
    units=ARM_UNITS,
    kinds=("absolute",) * 8,
    rate=15.0,
    state=None,
    robot=SIM,
    facts=True,
    stated="",
    **options,
):
    """What `deploy` makes of a run with these facts."""
    state = names if state is None else state
    if facts:
        known = DataFacts(rate=rate, action=names, unit=units, kind=kinds, state=state)
        (folder / "dataset.json").write_text(json.dumps({k: getattr(known, k) for k in DataFacts.__slots__}))
    spec = SimpleNamespace(
        units=units,
        action=len(names),
        state=len(state),
        action_names=names,
        views=(),
        image_size=0,
        fit="",
        text=0,
    )
    given = DeployOptions(run="run", units=stated, **options)
    return data_interface(given, folder, SimpleNamespace(demos="nowhere"), spec, robot, (0.5, 2.0))


def drive(task, act, seconds=1.0, robot=SIM, speed=0.5):
    """The bridge of the simulated arm after a policy drove it; act(state) gives rows."""
    options = DeployOptions(run="run", transport="inprocess", seconds=seconds, speed=speed)
    recorder = DeployRecorder("", robot, task, log=lambda line: None)
    from controllers.model import arm_model

    policy = InProcessPolicy(lambda obs, prefix=None: np.asarray(act(obs["state"])))
    bridge, _ = deploy_in_process(
        options, robot, task, arm_model(robot), SimpleNamespace(execute=8), policy, recorder, print, print
    )
    assert not bridge.lost and bridge.governor.state == "ACTIVE", bridge.governor.reason
    return bridge


def test_absolute_angles_in_degrees_at_15_hz_bring_the_joints_there_in_control_periods_of_the_governor(
    tmp_path,
):
    task = interface(tmp_path)
    assert task.slow == 4 and task.period == pytest.approx(1 / 60)
    goal, seen = np.append(HOME + [5, -4, 3, 6, -5, 4, 8], 30.0), []

    def act(state):
        seen.append(state)
        return np.tile(goal, (8, 1))

    bridge = drive(task, act, 1.5)
    np.testing.assert_allclose(seen[0], np.append(HOME, 100.0), atol=1.0)
    np.testing.assert_allclose(np.degrees(bridge.model.q), goal[:7], atol=1.0)
    assert bridge.gripper_command.grip == pytest.approx(2 * 0.3 - 1)
    assert 80 <= bridge.commands <= 92 and bridge.schedule.counts["executed"] in (22, 23)
    assert bridge.task.observe(bridge.observation_buffer, bridge.model, None, 4)[7] == pytest.approx(
        30, abs=8
    )


def test_columns_in_another_order_with_speeds_and_a_gripper_of_its_own_numbers_mean_the_same(tmp_path):
    names = ("grip", *(f"m{k}" for k in range(7, 0, -1)))
    state = (*names[1:], "grip", "spare")
    columns = ("gripper", *reversed(SIM.joints))
    task = interface(
        tmp_path,
        names,
        ("deg", *("deg",) * 7),
        state=state,
        columns=",".join(columns),
        gripper="45,5",
        state_columns=",".join([*columns[1:], "gripper", "joint1_velocity"]),
    )
    goal, seen = HOME + [4, -4, 3, 3, -3, 4, 5], []

    def act(state):
        seen.append(state)
        return np.tile(np.append(33.0, goal[::-1]), (8, 1))

    bridge = drive(task, act, 1.2)
    np.testing.assert_allclose(seen[0], [*HOME[::-1], 5.0, 0.0], atol=1.0)
    np.testing.assert_allclose(np.degrees(bridge.model.q), goal, atol=1.0)
    assert (bridge.gripper_command.grip + 1) / 2 == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("units", "kind", "row"),
    [
        (("deg",) * 8, "delta", 0.4),
        (("deg/s",) * 8, "rate", 6.0),
        (("rad/s",) * 8, "absolute", math.radians(6)),
    ],
)
def test_increments_and_speeds_of_joints_add_up_and_are_cut_where_no_joint_is_so_fast(
    tmp_path, units, kind, row
):
    units = (*units[:7], "%")
    task = interface(tmp_path, units=units, kinds=(kind,) * 7 + ("absolute",))
    rows = np.append(np.full(7, row), 50.0)
    bridge = drive(task, lambda state: np.tile(rows, (8, 1)), 1.0)
    moved = np.degrees(bridge.model.q) - HOME
    np.testing.assert_allclose(moved, 6.0, atol=1.0)  # 6 degrees a second, with 0.08 s of lag
    assert bridge.cut == 0
    fast = drive(task, lambda state: np.tile(np.append(np.full(7, 100 * row), 50.0), (8, 1)), 0.3)
    assert fast.cut > 0 and "beyond the axes' ranges" in fast.report()


def test_moves_of_the_tool_move_it_in_the_base_frame_and_leave_what_no_column_moves(tmp_path):
    task = interface(
        tmp_path, ("delta_x", "delta_y", "delta_z"), ("mm",) * 3, ("delta",) * 3, state=("x", "y", "z")
    )
    seen = []

    def act(state):
        seen.append(state)
        return np.tile([2.0, -4.0, 3.0], (8, 1))

    bridge = drive(task, act, 1.0)
    assert len(task.state) == 3 and seen[0].tolist() == pytest.approx([1000 * x for x in seen[0] / 1000])
    moved = 1000 * np.array(bridge.model.pos) - seen[0]
    np.testing.assert_allclose(moved, np.array([2.0, -4.0, 3.0]) * 14, atol=9)  # 15 rows, less the lag
    assert bridge.gripper is None  # no column says anything about it


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ({"facts": False}, "how many actions a second the run's policy gives: state it with --rate"),
        ({"facts": False, "rate": 0.0}, "--rate"),
        ({"names": tuple(f"motor_{k}" for k in range(8))}, "nobody said what motor_0, motor_1"),
        (
            {"names": tuple(f"motor_{k}" for k in range(8)), "columns": "joint1"},
            "--columns names 1 columns, the run's action has 8",
        ),
        ({"columns": ",".join(["elbow"] * 8)}, "unknown elbow"),
        ({"columns": ",".join([*SIM.joints[:6], "-", "gripper"])}, "and no joint7"),
        ({"columns": ",".join(["joint1"] * 8)}, "commands joint1 twice"),
        ({"kinds": ()}, "whether the actions are absolute, delta or rate"),
        ({"units": ("as recorded",) * 8}, "of which unit the actions are: state it with --units"),
        ({"kinds": ("effort",) * 8}, "joint1.pos is effort"),
        ({"units": ("m",) * 7 + ("1",)}, "joint1.pos is in 'm', and is commanded in rad or deg"),
        ({"units": ("deg",) * 8}, "gripper.pos is in 'deg', an opening in 1"),
        ({"gripper": "3,3"}, "--gripper is its number closed and its number open"),
        ({"state": ("force",)}, "nobody said what force of the run's state is"),
        (
            {"names": ("dx", "dy", "dz"), "units": ("m",) * 3, "kinds": ("absolute",) * 3, "state": ("x",)},
            "dx is absolute",
        ),
        (
            {"names": ("dx", "dy", "dz"), "units": ("m",) * 3, "kinds": ("delta",) * 3, "state": ("joint1",)},
            "--state-units",
        ),
        ({"command": "pose"}, "commands joints, and robot sim is commanded by poses"),
    ],
)
def test_what_nobody_said_is_one_line_with_the_remedy(tmp_path, make, says):
    with pytest.raises(UserError) as e:
        interface(tmp_path, **make)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_the_robots_file_says_what_the_run_does_not_and_an_option_goes_before_both(tmp_path):
    (tmp_path / "my.json").write_text(
        json.dumps(
            json.loads((Path(SIM.model).parent / "sim.json").read_text())
            | {
                "model": SIM.model,
                "data": {
                    "rate": 12.5,
                    "columns": [*SIM.joints, "gripper"],
                    "units": "deg*7,1",
                    "gripper": [1, 0],
                },
            }
        )
    )
    robot = load_robot(str(tmp_path / "my.json"))
    names = tuple(f"m{k}" for k in range(8))
    task = interface(tmp_path, names, ("as recorded",) * 8, facts=False, robot=robot)
    assert (
        task.row == 0.08
        and task.action[0].factor == pytest.approx(180 / math.pi)
        and task.action[7].offset == 1
    )
    assert (
        interface(tmp_path, names, ("as recorded",) * 8, facts=False, robot=robot, rate=0, stated="rad*7,1")
        .action[0]
        .factor
        == 1.0
    )
    for raw, says in (
        ({"rates": 1}, "data is an object of"),
        ({"rate": 2000}, "data: rate"),
        ({"rate": "x"}, "data: rate is a number"),
        ({"columns": "joint1"}, "data: columns is a list"),
        ({"gripper": [1, 1]}, "a number closed and another open"),
        ({"gripper": [1]}, "data: gripper needs 2 numbers"),
        ({"units": 1}, "data: units is a text"),
    ):
        with pytest.raises(UserError, match=says):
            read_data(raw)
    assert read_data({}) == RobotData()


def test_a_start_that_is_unlike_the_data_is_told_by_its_column(tmp_path):
    task = replace(interface(tmp_path), low=(-10.0,) * 8, high=(10.0,) * 8)
    lines = task.strange(np.append(np.full(7, 12.0), 100.0).astype(np.float32))
    assert len(lines) == 1 and lines[0].startswith("gripper.pos is 100, in the run's data -10 to 10")


@pytest.mark.parametrize(("unit", "times"), [("rad", 180 / math.pi), ("deg", math.pi / 180)])
def test_degrees_that_are_taken_for_radians_move_nothing(tmp_path, unit, times):
    home = np.radians(HOME) if unit == "rad" else HOME
    task = interface(tmp_path, JOINTS, (unit,) * 7, ("absolute",) * 7)

    def within(x):  # an interface whose data were there
        return replace(task, low=tuple(x - 0.01 * np.abs(x)), high=tuple(x + 0.01 * np.abs(x)))

    within(home).check_angles(home.astype(np.float32))
    within(home).check_angles((home + (0.9 if unit == "rad" else 50)).astype(np.float32))  # elsewhere
    with pytest.raises(UserError, match="degrees and radians are confused; say which they are with --units"):
        within(times * home).check_angles(home.astype(np.float32))
    if unit == "rad":
        assert np.abs(task.shares(home[None])).max() <= 1
        with pytest.raises(
            UserError, match="the policy asks for joint2.pos at .*, which goes from .*--units"
        ):
            task.shares(np.full((3, 7), [0, -90.0, 0, 0, 0, 0, 0]))


def test_an_instruction_that_a_run_never_learnt_is_refused_and_one_of_known_words_is_told(tmp_path):
    (tmp_path / "dataset.json").write_text(json.dumps({"tasks": ["pick the red cube", "push the blue cube"]}))
    words, text = SimpleNamespace(language=True, text=0), SimpleNamespace(language=True, text=48)
    config, said = SimpleNamespace(demos="nowhere"), []
    for spec, told in ((words, ""), (words, "Pick  the red CUBE"), (text, "push the blue cube")):
        check_instruction(tmp_path, config, spec, told, said.append)
    assert not said
    with pytest.raises(UserError, match="never learnt 'fold', 'shirt'; it learnt 'pick the red cube', 'push"):
        check_instruction(tmp_path, config, words, "fold the shirt", said.append)
    check_instruction(tmp_path, config, words, "push the red cube", said.append)
    check_instruction(tmp_path, config, text, "fold the shirt", said.append)
    assert [line.split("'")[1] for line in said] == ["push the red cube", "fold the shirt"]
    check_instruction(tmp_path, config, SimpleNamespace(language=False, text=0), "fold", said.append)
    check_instruction(tmp_path / "kept no facts", config, words, "fold", said.append)
    assert len(said) == 2


def test_another_rate_than_the_datas_is_said(tmp_path):
    said = []
    interface(tmp_path, rate=15.0)
    spec = SimpleNamespace(units=ARM_UNITS, action=8, state=8, action_names=(*JOINTS, "gripper.pos"),
                           views=(), image_size=0, fit="", text=0)  # fmt: skip
    for rate in (15, 60):
        given = DeployOptions(run="run", rate=rate)
        where = SimpleNamespace(demos="nowhere")
        data_interface(given, tmp_path, where, spec, SIM, (0.5, 2.0), warn=said.append)
    assert said == ["--rate 60 plays what was recorded at 15 actions a second 4 times as fast"]


@pytest.mark.filterwarnings("error")
def test_pictures_are_made_square_as_in_training_and_go_whole_to_a_policy_that_does_it_itself():
    wide = np.full((20, 40, 3), 200, np.uint8)
    wide.setflags(write=False)  # as a decoder gives it
    spec = ObsSpec(state=4, action=2, views=("front",), image_size=16, fit="pad")
    made = fitted(spec)(wide)
    assert made.shape == (16, 16, 3) and made[0].max() == 0 and made[8].min() == 200
    whole = replace(spec, text=48, language=True)
    assert fitted(whole)(wide).shape == (20, 40, 3)
    obs = {"state": np.zeros(4, np.float32), "image/front": wide}  # and a server takes them so
    assert misfit(obs, whole) == "" and "16 x 16 x 3" in misfit(obs, spec)
    assert "h x w x 3 numbers of a picture" in misfit(obs | {"image/front": wide[..., :1]}, whole)
    assert fitted(replace(whole, fit=""))(wide).shape == (16, 16, 3)  # it learnt from an env's pictures


def my_arm(folder: Path, episodes: int = 3) -> Path:
    """A data set of a made-up arm of six joints in degrees and a gripper in percent, 15 frames a second, and
    the arm's file."""
    path = aloha_arm(folder)
    robot = load_robot(str(folder / path))
    names = tuple(f"{j}.pos" for j in robot.joints) + ("gripper.pos",)
    t = np.arange(40)[:, None] / 15
    rng = np.random.default_rng(0)
    with Writer(
        folder / "data/mine", Features(fps=15.0, state=names, action=names, robot="my_arm")
    ) as writer:
        for _ in range(episodes):
            phase = rng.uniform(0, 6, 7)
            wave = np.append(np.degrees(robot.home), 50.0) + np.append(np.full(6, 3.0), 30.0) * np.sin(
                t + phase
            )
            writer.add(Episode(wave[:-1], wave[1:], task="wave", source="human"))
    return (folder / path).rename(folder / "my_arm.json")


def test_a_run_without_a_simulator_is_deployed_on_an_arm_of_the_users_own_from_its_folder_alone(tmp_path):
    robot = my_arm(tmp_path)
    page = (Path(__file__).parent.parent / "docs/howto/own_arm.md").read_text()
    lines = [
        shlex.split(line, comments=True)[1:]
        for line in re.search(r"```bash\n(.*?)```", page, re.S)[1].splitlines()
    ]
    shutil.copytree(tmp_path / "data/mine", tmp_path / "data/later")  # nobody stated its units
    more = {
        "train": [
            "--bc.updates",
            "30",
            "--bc.batch",
            "16",
            "--bc.noises",
            "2",
            "--policy.hidden",
            "32",
            "--data.held-out",
            "0",
        ],
        "data": [],
        "report": [],
        "eval": [],
        "deploy": ["--seconds", "0.1", "--transport", "inprocess"],
    }
    for argv in lines:
        done = robo_rl(
            tmp_path,
            *[a for a in argv if a not in ("--seconds", "2", "--transport", "inprocess")],
            *more[argv[0]],
        )
        assert done.code == 0, done
    (tmp_path / "runs/mine").rename(tmp_path / "run")
    facts = read_facts(tmp_path / "run", "nowhere")
    assert (facts.rate, facts.kind, facts.tasks) == (15.0, ("absolute",) * 7, ("wave",))
    assert (
        default_instruction(SimpleNamespace(sim="none", task="", demos="nowhere"), tmp_path / "run") == "wave"
    )
    (tmp_path / "data/mine").rename(tmp_path / "elsewhere")  # the run is enough
    argv = ["deploy", "run", "--robot", robot, "--transport", "inprocess"]
    done = robo_rl(tmp_path, *argv, "--seconds", "0.6", "--record", "again")
    assert (
        done.code == 0
        and "6 joints (absolute) and the gripper (gripper.pos: 0 closed, 100 open), 14.71 actions" in done.out
    ), done
    assert "contracts violated: none" in done.out and "success" not in done.out, done
    again = load(tmp_path / "again")
    assert again.features.action == facts.action and 8 <= len(again.action) <= 10
    assert np.abs(again.state[:, :6] - again.action[:, :6]).max() < 40
    assert "commands joints, and robot" in robo_rl(tmp_path, *argv, "--command", "pose").mistake
    assert isinstance(
        interface(tmp_path / "run", facts.action, facts.unit, facts.kind, robot=load_robot(str(robot))),
        DataInterface,
    )


def test_a_policy_of_a_world_model_of_the_users_own_data_drives_the_arm_in_its_units(tmp_path):
    robot = my_arm(tmp_path, 12)
    data = "data/mine"
    for argv in (
        ["data", "label", data, "--units", "deg*6,%"],
        ["wm", "train", data, "--out", "wm", "--horizon", "8", "--tolerance", "50", "--fit.updates", "40"]
        + ["--fit.batch", "16", "--net.members", "2", "--net.hidden", "16", "--net.layers", "1"],
        ["train", "--sim", "wm:wm", "--algo", "bc", "--demos", data, "--out", "run", "--bc.updates", "150"]
        + ["--policy.hidden", "32", "--eval-episodes", "2", "--no-video"],
    ):
        done = robo_rl(tmp_path, *argv)
        assert done.code == 0, done
    learnt, facts = load(tmp_path / data), read_facts(tmp_path / "run", "nowhere")
    assert (facts.rate, facts.unit, facts.kind) == (15.0, (*["deg"] * 6, "%"), ("absolute",) * 7)
    np.testing.assert_allclose(facts.low, learnt.state.min(0))
    (tmp_path / data).rename(tmp_path / "elsewhere")
    (tmp_path / "wm").rename(tmp_path / "model")  # the run is enough
    for more in ([], ["--chunking", "rtc"], ["--policy", "process"]):
        argv = ["deploy", "run", "--robot", robot, "--transport", "inprocess", "--seconds", "0.6", *more]
        done = robo_rl(tmp_path, *argv, "--record", f"again{len(more)}{more[-1:]}")
        assert done.code == 0 and "6 joints (absolute) and the gripper" in done.out, done
        again = load(tmp_path / f"again{len(more)}{more[-1:]}")
        low, high = learnt.action.min(0), learnt.action.max(0)
        assert ((again.action >= low - 1e-3) & (again.action <= high + 1e-3)).all()
        assert again.features.action == learnt.features.action and np.abs(again.action[:, :6]).max() > 2


def test_commands_of_a_model_and_actions_of_its_robot_are_one_another():
    units = CommandUnits(np.array([-90.0, 0.0]), np.array([90.0, 100.0]))
    rows = np.array([[-1.0, 0.0], [0.5, 1.0], [3.0, -1.0]], np.float32)
    np.testing.assert_allclose(units.actions(rows), [[-90, 50], [45, 100], [90, 0]])
    np.testing.assert_allclose(units.commands(units.actions(rows)), rows.clip(-1, 1), atol=1e-6)
    asked = []

    def follow(obs, given, count):
        asked.append(given)
        return given

    act = in_units(
        Actor(2, 1, lambda batch: [rows] * len(batch), lambda obs, prefix: prefix.rows, follow), units
    )
    np.testing.assert_allclose(act({})[1], [45, 100])
    given = np.array([[45.0, 100.0], [0.0, 50.0]], np.float32)
    np.testing.assert_allclose(act({}, Prefix(given, 1, 2)), given, atol=1e-4)  # taught to follow
    np.testing.assert_allclose(asked[0], [[0.5, 1.0], [0.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(act.choose("rtc")({}, Prefix(given, 1, 2)), given, atol=1e-4)


def test_nothing_is_imported_in_the_control_loop_of_a_policy_of_a_data_set():
    """An import there held the bridge up for 0.3 s in its first period, and the arm's governor held the
    arm."""
    code = """
import sys
from types import SimpleNamespace
from robo_rl.experiment.deploy_recorder import DeployRecorder
recorder = DeployRecorder("", None, None)
bridge = SimpleNamespace(observation_buffer=SimpleNamespace(bodies={}), commands=1)
recorder.watch(bridge, SimpleNamespace(subscription=lambda *a: SimpleNamespace(latest=lambda: None)))
before = set(sys.modules)
recorder.after_tick(0.0)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_serve_names_the_data_set_of_a_run_without_a_simulator_and_the_task_of_another():
    from robo_rl.cli.serve import learnt_on

    for sim, task, said in (("none", "", "data/so"), ("mujoco", "reach", "reach"), ("wm:m", "", "wm:m")):
        assert learnt_on(SimpleNamespace(sim=sim, task=task, demos="data/so")) == said
