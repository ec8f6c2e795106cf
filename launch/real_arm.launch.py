"""ros2 launch real_arm.launch.py robot:=fr3 sim:=false robot_ip:=... [controller:=... policy:=RUN
dry_run:=false].

Simulated and dry by default. On hardware: the vendor's driver, the compliant controller of CRISP loaded but
inactive (a person activates it), and the bridge where a policy is given. None of it has been run on hardware.
"""

from pathlib import Path

from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

from launch import LaunchDescription

HERE = Path(__file__).parent
VENDOR = {  # robot -> package and file of its driver, and the arguments that carry its address
    "fr3": ("franka_bringup", "launch/franka.launch.py", {"robot_type": "fr3", "robot_ip": "{ip}"}),
    "panda": ("franka_bringup", "launch/franka.launch.py", {"robot_type": "fer", "robot_ip": "{ip}"}),
    "ur5e": ("ur_robot_driver", "launch/ur_control.launch.py", {"ur_type": "ur5e", "robot_ip": "{ip}"}),
    "iiwa": (
        "lbr_bringup",
        "launch/hardware.launch.py",
        {"model": "iiwa7", "ctrl": "joint_state_broadcaster"},
    ),
    "kinova_gen3": ("kortex_bringup", "launch/gen3.launch.py", {"robot_ip": "{ip}", "dof": "7"}),
}
ARGUMENTS = (
    ("robot", "fr3", "fr3, panda, ur5e, iiwa or kinova_gen3"),
    ("robot_ip", "", "address of the robot"),
    ("sim", "true", "true: the simulated arm instead"),
    ("controller", "cartesian_impedance_controller", "CRISP controller to load, inactive"),
    ("policy", "", "run folder; empty: no bridge"),
    ("dry_run", "true", "true commands nothing"),
    ("speed", "0.25", "limit of the tool [m/s]"),
    ("model", "", "MJCF or URDF of the robot, for the bridge"),
    ("namespace", "", "prefix of all topics"),
    (
        "python",
        "",
        "Python of the virtual environment with robo_rl, where that is not ROS's; empty: the robo_rl on PATH",
    ),
    ("arm_options", "", "more options of robo_rl sim-arm"),
    ("bridge_options", "", "more options of robo_rl deploy"),
)


def included(name, arguments):
    source = PythonLaunchDescriptionSource(str(HERE / name))
    return IncludeLaunchDescription(source, launch_arguments=list(arguments.items()))


def setup(context):
    """Driver, controller and bridge, or the simulated arm and bridge."""
    given = {name: LaunchConfiguration(name).perform(context) for name, _, _ in ARGUMENTS}
    robot, simulated = given["robot"], given["sim"]
    if robot not in VENDOR:
        raise ValueError(f"unknown robot {robot!r}. Allowed: {', '.join(VENDOR)}")
    if simulated not in ("true", "false"):
        raise ValueError(f"sim must be true or false, got {simulated!r}")
    common = {"speed": given["speed"], "namespace": given["namespace"], "python": given["python"]}
    actions = []
    if simulated == "true":
        actions.append(
            included("sim_arm.launch.py", {"robot": "sim", "options": given["arm_options"]} | common)
        )
    else:
        if not given["robot_ip"] and any("{ip}" in v for v in VENDOR[robot][2].values()):
            raise ValueError(f"robot_ip:=ADDRESS is needed to reach the {robot}")
        package, file, arguments = VENDOR[robot]
        source = PythonLaunchDescriptionSource([FindPackageShare(package), "/", file])
        actions.append(
            IncludeLaunchDescription(
                source, launch_arguments=[(k, v.format(ip=given["robot_ip"])) for k, v in arguments.items()]
            )
        )
        actions.append(
            Node(
                package="controller_manager",
                executable="spawner",
                namespace=given["namespace"],
                arguments=[
                    given["controller"],
                    "--inactive",
                    "--param-file",
                    str(HERE / "config" / f"{robot}.yaml"),
                ],
                output="screen",
            )
        )
        actions.append(
            Node(
                package="controller_manager",
                executable="spawner",
                namespace=given["namespace"],
                arguments=["pose_broadcaster", "--param-file", str(HERE / "config" / f"{robot}.yaml")],
                output="screen",
            )
        )
    if given["policy"]:
        actions.append(
            included(
                "policy_bridge.launch.py",
                {
                    "policy": given["policy"],
                    "robot": "sim" if simulated == "true" else robot,
                    "dry_run": given["dry_run"],
                    "model": given["model"],
                    "options": given["bridge_options"],
                }
                | common,
            )
        )
    return actions


def generate_launch_description():
    return LaunchDescription(
        [
            *(DeclareLaunchArgument(n, default_value=d, description=t) for n, d, t in ARGUMENTS),
            OpaqueFunction(function=setup),
        ]
    )
