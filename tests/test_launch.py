"""The launch files, run against stand-ins for ROS's packages that only record; the ROS package; the graph
without ROS."""

import json
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
from commands import Command, robo_rl

from controllers.robot import load_robot
from robo_rl.cli import COMMANDS, parse_options
from robo_rl.errors import UserError
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.process_graph import read_spec
from robo_rl.experiment.sim_arm import SimArmOptions

LAUNCH = Path(__file__).parent.parent / "launch"
FILES = sorted(p.name for p in LAUNCH.glob("*.launch.py"))
ROBOTS = ("fr3", "panda", "ur5e", "iiwa", "kinova_gen3")


class Made:
    """One constructor call of ROS's launch packages."""

    def __init__(self, *args, **kw):
        self.args, self.kw = args, kw

    def perform(self, context):
        return context[self.args[0]]


def stand_ins() -> dict[str, types.ModuleType]:
    """launch and launch_ros as modules whose classes record their calls. Only names that ROS 2 Jazzy has are
    here."""
    names = {
        "launch": ("LaunchDescription",),
        "launch.actions": (
            "DeclareLaunchArgument",
            "EmitEvent",
            "ExecuteProcess",
            "IncludeLaunchDescription",
            "OpaqueFunction",
            "RegisterEventHandler",
        ),
        "launch.event_handlers": ("OnProcessExit",),
        "launch.events": ("Shutdown",),
        "launch.substitutions": ("LaunchConfiguration",),
        "launch.launch_description_sources": ("PythonLaunchDescriptionSource",),
        "launch_ros": (),
        "launch_ros.actions": ("Node",),
        "launch_ros.substitutions": ("FindPackageShare",),
    }
    out = {}
    for module, classes in names.items():
        out[module] = types.ModuleType(module)
        for name in classes:
            setattr(out[module], name, type(name, (Made,), {}))
    return out


def executed(monkeypatch, name: str, **given: str) -> list[Made]:
    """The actions that a launch file comes to with these arguments, those of the files it includes too."""
    for module, stand_in in stand_ins().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    [entities] = runpy.run_path(str(LAUNCH / name))["generate_launch_description"]().args
    declared = {
        e.args[0]: e.kw.get("default_value") for e in entities if type(e).__name__ == "DeclareLaunchArgument"
    }
    unknown = set(given) - set(declared)
    assert not unknown, f"{name} declares no {unknown}"
    context = declared | given
    assert None not in context.values(), f"{name} needs {[k for k, v in context.items() if v is None]}"
    actions = []
    for entity in entities:
        if type(entity).__name__ == "OpaqueFunction":
            for action in entity.kw["function"](context):
                actions.append(action)
                source = (
                    action.args[0].args[0] if type(action).__name__ == "IncludeLaunchDescription" else None
                )
                if isinstance(source, str):
                    assert Path(source).is_file(), source
                    actions += executed(monkeypatch, Path(source).name, **dict(action.kw["launch_arguments"]))
    return actions


def commands(actions: list[Made]) -> list[object]:
    """The robo_rl commands among them, parsed as the command line would: every option must exist."""
    out = []
    for a in actions:
        if type(a).__name__ == "ExecuteProcess":
            command, *rest = a.kw["cmd"][3 if a.kw["cmd"][1] == "-m" else 1 :]
            assert (
                a.kw["cmd"][:3] in (["robo_rl", command, *rest][:3], ["/venv/bin/python", "-m", "robo_rl"])
                and command in COMMANDS
            )
            out.append(
                parse_options({"sim-arm": SimArmOptions, "deploy": DeployOptions}[command], command, rest)
            )
    return out


def test_the_launch_files_are_there():
    assert FILES == ["policy_bridge.launch.py", "real_arm.launch.py", "sim_arm.launch.py"]


def test_the_simulated_arm_is_launched_and_ends_all_with_it(monkeypatch):
    actions = executed(monkeypatch, "sim_arm.launch.py", speed="0.5", namespace="left")
    [arm] = commands(actions)
    assert (arm.robot, arm.scene, arm.speed, arm.namespace) == ("sim", "pick_cube", 0.5, "left")
    [watch] = [a for a in actions if type(a).__name__ == "RegisterEventHandler"]
    assert watch.args[0].kw["target_action"] is actions[0]


def test_the_bridge_is_dry_unless_it_is_told_otherwise(monkeypatch):
    [dry] = commands(executed(monkeypatch, "policy_bridge.launch.py", policy="runs/a"))
    [wet] = commands(
        executed(monkeypatch, "policy_bridge.launch.py", policy="runs/a", dry_run="false", served="host:1")
    )
    assert dry.run == "runs/a" and dry.dry_run and not wet.dry_run and wet.policy == "host:1"
    for wrong in ("yes", "False", ""):
        with pytest.raises(ValueError, match="dry_run must be true or false"):
            executed(monkeypatch, "policy_bridge.launch.py", policy="runs/a", dry_run=wrong)


def test_the_real_arm_is_simulated_and_dry_by_default(monkeypatch):
    arm, bridge = commands(executed(monkeypatch, "real_arm.launch.py", policy="runs/a"))
    assert isinstance(arm, SimArmOptions) and bridge.dry_run and bridge.robot == "sim"
    assert len(commands(executed(monkeypatch, "real_arm.launch.py"))) == 1


@pytest.mark.parametrize("robot", ROBOTS)
def test_on_hardware_the_driver_comes_up_and_the_controller_is_inactive(monkeypatch, robot):
    actions = executed(
        monkeypatch, "real_arm.launch.py", robot=robot, sim="false", robot_ip="10.0.0.2", policy="runs/a"
    )
    [bridge] = commands(actions)
    assert bridge.robot == robot and bridge.dry_run
    driver = next(a for a in actions if type(a).__name__ == "IncludeLaunchDescription")
    assert driver.args[0].args[0][2].endswith(".launch.py")
    spawners = [a for a in actions if type(a).__name__ == "Node"]
    config = LAUNCH / "config" / f"{robot}.yaml"
    text, preset = config.read_text(), load_robot(robot)
    for node in spawners:
        arguments = node.kw["arguments"]
        assert (
            arguments[arguments.index("--param-file") + 1] == str(config) and f"\n{arguments[0]}:\n" in text
        )
        assert (arguments[0] == "pose_broadcaster") != ("--inactive" in arguments)
    joints = ", ".join(preset.joints)
    assert text.count(f"joints: [{joints}]") == 3 and text.count(f"base_frame: {preset.base_frame}\n") == 3
    assert text.count(f"end_effector_frame: {preset.site}\n") == 3
    assert text.count(f"use_gravity_compensation: {str(preset.gravity).lower()}") == 2
    # unset, it is -1 in CRISP and drives the arm
    assert text.count("nullspace: {") == text.count(", damping: ") == 2
    assert f"k_pos_x: {preset.gains['stiffness'][0]:.1f}" in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"robot": "fr4"}, "unknown robot 'fr4'. Allowed: fr3, panda"),
        ({"sim": "maybe"}, "sim must be true or false"),
        ({"sim": "false"}, "robot_ip:=ADDRESS is needed"),
    ],
)
def test_wrong_launch_arguments_are_said(monkeypatch, given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        executed(monkeypatch, "real_arm.launch.py", **given)


SOURCED = {
    "PATH": "/opt/ros/humble/bin:/home/me/ws/install/arm/bin:/usr/bin",
    "PYTHONPATH": "/opt/ros/humble/lib/python3.10/site-packages",
    "LD_LIBRARY_PATH": "/opt/ros/humble/lib:/usr/local/cuda/lib",
    "AMENT_PREFIX_PATH": "/home/me/ws/install/arm:/opt/ros/humble",
    "ROS_DISTRO": "humble",
    "RMW_IMPLEMENTATION": "rmw_fastrtps_cpp",
    "ROS_DOMAIN_ID": "7",
    "ROS_LOCALHOST_ONLY": "1",
    "HOME": "/home/me",
}


@pytest.mark.parametrize("name", FILES)
def test_a_virtual_environment_is_started_without_what_ros_put_into_the_environment(monkeypatch, name):
    for key in ("PYTHONPATH", "LD_LIBRARY_PATH", "ROS_DISTRO"):
        monkeypatch.delenv(key, raising=False)
    for key, value in SOURCED.items():
        monkeypatch.setenv(key, value)
    given = {"policy": "runs/a"} if name != "sim_arm.launch.py" else {}
    started = [
        a
        for a in executed(monkeypatch, name, python="/venv/bin/python", **given)
        if type(a).__name__ == "ExecuteProcess"
    ]
    assert len(started) == (2 if name == "real_arm.launch.py" else 1)
    for process in started:
        env = process.kw["env"]
        assert process.kw["cmd"][:3] == ["/venv/bin/python", "-m", "robo_rl"]
        assert not {"PYTHONPATH", "AMENT_PREFIX_PATH", "ROS_DISTRO", "RMW_IMPLEMENTATION"} & set(env)
        assert env["PATH"] == "/usr/bin" and env["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib"
        assert (env["ROS_DOMAIN_ID"], env["ROS_LOCALHOST_ONLY"], env["HOME"]) == ("7", "1", "/home/me")
    plain = [a for a in executed(monkeypatch, name, **given) if type(a).__name__ == "ExecuteProcess"]
    assert all("env" not in a.kw and a.kw["cmd"][0] == "robo_rl" for a in plain)


def test_every_other_option_of_the_command_can_be_given(monkeypatch):
    [arm] = commands(
        executed(
            monkeypatch,
            "sim_arm.launch.py",
            options="--wrench 30 --controller cartesian",
            python="/venv/bin/python",
        )
    )
    assert (arm.wrench, arm.controller) == (30.0, "cartesian")
    arm, bridge = commands(
        executed(
            monkeypatch,
            "real_arm.launch.py",
            policy="runs/a",
            arm_options="--wrench 20",
            bridge_options="--lease 5 --name 'left arm'",
            python="/venv/bin/python",
        )
    )
    assert (arm.wrench, bridge.lease, bridge.name) == (20.0, 5.0, "left arm")


def test_the_ros_package_is_complete(monkeypatch):
    package = LAUNCH / "ros" / "robo_rl_bringup"
    made = {}
    monkeypatch.chdir(package)
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **kw: made.update(kw))
    runpy.run_path("setup.py")
    packed = {Path(f).name for _, files in made["data_files"] for f in files}
    assert {
        *FILES,
        "robo_rl_process.py",
        "package.xml",
        "robo_rl_bringup",
        *(f"{r}.yaml" for r in ROBOTS),
    } <= packed
    assert all((package / f).exists() for _, files in made["data_files"] for f in files)
    assert (
        f"<name>{made['name']}</name>" in Path("package.xml").read_text()
        and "ament_python" in Path("package.xml").read_text()
    )
    assert not (LAUNCH / "__init__.py").exists()


# ---- the graph without ROS ---------------------------------------------------------------------------------


def test_the_spec_names_commands_and_options_that_exist():
    for path in LAUNCH.glob("*.json"):
        parts = read_spec(path, ("run=runs/a",))
        for part in parts:
            assert part.command[0] == "robo_rl"
            parse_options(
                {"sim-arm": SimArmOptions, "deploy": DeployOptions}[part.command[1]],
                part.command[1],
                list(part.command[2:]),
            )
        assert sum(p.ends for p in parts) == 1


def spec(folder: Path, *processes: dict, **args: str) -> Path:
    path = folder / "spec.json"
    path.write_text(json.dumps({"args": args, "processes": processes}))
    return path


PY = [sys.executable, "-u", "-c"]


def test_up_starts_in_order_and_ends_with_the_one_that_ends(tmp_path):
    waits = "import time; time.sleep(0.3); print('here'); time.sleep(60)"
    path = spec(
        tmp_path,
        {"name": "a", "command": [*PY, waits], "ready": "here"},
        {"name": "b", "command": [*PY, "print('{word}'); raise SystemExit(3)"], "after": ["a"], "ends": True},
        word="hello",
    )
    done = robo_rl(tmp_path, "up", path, "--set", "word=cya", "--set", "word=bye")
    assert done.code == 3 and done.out.splitlines()[:2] == ["[a] here", "[b] bye"], done


def test_up_takes_all_down_when_one_is_lost_or_never_ready(tmp_path):
    lost = spec(
        tmp_path,
        {"name": "a", "command": [*PY, "import time; time.sleep(60)"]},
        {"name": "b", "command": [*PY, "raise SystemExit(7)"]},
    )
    done = robo_rl(tmp_path, "up", lost)
    assert done.code == 7 and "b ended with status 7; the rest is taken down" in done.err
    slow = spec(
        tmp_path,
        {"name": "a", "command": [*PY, "import time; time.sleep(60)"], "ready": "x"},
        {"name": "b", "command": [*PY, ""], "after": ["a"]},
    )
    done = robo_rl(tmp_path, "up", slow, "--wait", "0.3")
    assert done.code == 1 and "a was not ready within 0.3 s" in done.err


def test_up_is_interrupted_cleanly(tmp_path):
    child = f"import time, pathlib; pathlib.Path({str(tmp_path / 'on')!r}).touch(); time.sleep(60)"
    up = Command(tmp_path, ["up", spec(tmp_path, {"name": "a", "command": [*PY, child]})])
    up.until(lambda: (tmp_path / "on").exists())
    up.signal(2)
    assert up.wait(20).code == 130


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("{", (), "no JSON"),
        ("[]", (), "a spec is"),
        ('{"processes": []}', (), "it has no processes"),
        ('{"processes": [{"name": "a"}]}', (), "process a needs name and command"),
        ('{"processes": [{"name": "a", "command": []}]}', (), "empty command"),
        ('{"processes": [{"name": "a", "command": "ls"}]}', (), "command must be list"),
        ('{"processes": [{"name": "a", "command": ["{x}"]}]}', (), "{x} is no argument of the spec"),
        (
            '{"args": {"x": ""}, "processes": [{"name": "a", "command": ["{x}"]}]}',
            (),
            "needs x: add --set x=VALUE",
        ),
        ('{"args": {"x": ""}, "processes": [{"name": "a", "command": ["{x}"]}]}', ("y=1",), "Allowed: x"),
        (
            '{"processes": [{"name": "a", "command": ["ls"], "after": ["b"]}]}',
            (),
            "after names b, which is not above it",
        ),
        (
            '{"processes": [{"name": "a", "command": ["l"]}, {"name": "a", "command": ["l"]}]}',
            (),
            "named twice",
        ),
    ],
)
def test_a_wrong_spec_is_one_clear_line(tmp_path, text, settings, says):
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(says)) as e:
        read_spec(path, settings)
    assert "\n" not in str(e.value)


def test_the_real_graph_is_shown(tmp_path):
    done = robo_rl(tmp_path, "up", LAUNCH / "pick_cube.json", "--set", "run=runs/a", "--show")
    assert (
        done.code == 0
        and done.out.startswith("arm: robo_rl sim-arm")
        and "bridge: robo_rl deploy runs/a" in done.out
    )
    assert "needs run: add --set run=VALUE" in robo_rl(tmp_path, "up", LAUNCH / "pick_cube.json").mistake
