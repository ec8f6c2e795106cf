"""ros2 launch policy_bridge.launch.py policy:=RUN [robot:=sim dry_run:=false ...]: a policy on an arm. Dry by
default."""

import runpy
from pathlib import Path

from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    ExecuteProcess,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.substitutions import LaunchConfiguration

from launch import LaunchDescription

STARTED = runpy.run_path(str(Path(__file__).parent / "robo_rl_process.py"))
ARGUMENTS = (
    *STARTED["ARGUMENTS"],
    ("policy", None, "run folder"),
    ("robot", "sim", "preset or JSON file"),
    ("dry_run", "true", "true commands nothing: poses go to preview/target_pose"),
    ("speed", "0.25", "limit of the tool [m/s]"),
    ("seconds", "30", "how long [s]"),
    ("served", "", "HOST:PORT of robo_rl serve, where the policy runs elsewhere"),
    ("token", "", "file with the token that robo_rl serve names; empty: serve.token in the run folder"),
    ("model", "", "MJCF or URDF of a robot whose preset ships none"),
    ("namespace", "", "prefix of all topics"),
)


def setup(context):
    """The bridge, once: it is not started again by itself, because arming is a person's."""
    given = {name: LaunchConfiguration(name).perform(context) for name, _, _ in ARGUMENTS}
    if given["dry_run"] not in ("true", "false"):
        raise ValueError(f"dry_run must be true or false, got {given['dry_run']!r}")
    command = ["deploy", given["policy"]]
    command += ["--dry-run"] if given["dry_run"] == "true" else []
    command += ["--policy", given["served"]] if given["served"] else []
    command += ["--token", given["token"]] if given["served"] and given["token"] else []
    for name in ("robot", "speed", "seconds", "model", "namespace"):
        command += [f"--{name}", given[name]] if given[name] else []
    process = STARTED["robo_rl_process"](command, given["python"], given["options"])
    bridge = ExecuteProcess(**process, output="screen", name="policy_bridge", respawn=False)
    return [
        bridge,
        RegisterEventHandler(OnProcessExit(target_action=bridge, on_exit=[EmitEvent(event=Shutdown())])),
    ]


def generate_launch_description():
    declared = [
        DeclareLaunchArgument(n, description=t)
        if d is None
        else DeclareLaunchArgument(n, default_value=d, description=t)
        for n, d, t in ARGUMENTS
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=setup)])
