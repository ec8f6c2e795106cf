"""ros2 launch sim_arm.launch.py [robot:=sim scene:=pick_cube speed:=0.25 namespace:=...]: the simulated arm
on the graph."""

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
    ("robot", "sim", "preset or JSON file"),
    ("scene", "pick_cube", "task whose objects stand there, or none"),
    ("speed", "0.25", "limit of the tool [m/s]"),
    ("namespace", "", "prefix of all topics"),
)


def setup(context):
    """The process with what was asked for, and the end of all with it."""
    given = {name: LaunchConfiguration(name).perform(context) for name, _, _ in ARGUMENTS}
    command = ["sim-arm", "--quiet"]
    for name in ("robot", "scene", "speed", "namespace"):
        command += [f"--{name}", given[name]] if given[name] else []
    process = STARTED["robo_rl_process"](command, given["python"], given["options"])
    arm = ExecuteProcess(**process, output="screen", name="sim_arm")
    return [
        arm,
        RegisterEventHandler(OnProcessExit(target_action=arm, on_exit=[EmitEvent(event=Shutdown())])),
    ]


def generate_launch_description():
    return LaunchDescription(
        [
            *(DeclareLaunchArgument(n, default_value=d, description=t) for n, d, t in ARGUMENTS),
            OpaqueFunction(function=setup),
        ]
    )
