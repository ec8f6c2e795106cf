"""How the launch files start robo_rl: from ROS's own Python, or from a virtual environment into which nothing
of a sourced ROS leaks."""

import os
import shlex

# where ROS and its workspaces are
PREFIXES = ("AMENT_PREFIX_PATH", "COLCON_PREFIX_PATH", "CMAKE_PREFIX_PATH")
FILTERED = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "PKG_CONFIG_PATH")
DROPPED = (*PREFIXES, "ROS_DISTRO", "ROS_VERSION", "ROS_PYTHON_VERSION", "RMW_IMPLEMENTATION", "PYTHONHOME")
ARGUMENTS = (
    (
        "python",
        "",
        "Python of the virtual environment with robo_rl, where that is not ROS's; empty: the robo_rl on PATH",
    ),
    ("options", "", "more options of the command, as on the command line"),
)


def robo_rl_process(command, python, options, environment=os.environ):
    """Keyword arguments of ExecuteProcess for `robo_rl COMMAND …`. python: "" keeps the environment as it is,
    so that rclpy can be used; a path starts that Python without what ROS put into the environment. The ROS
    domain and its discovery settings stay."""
    more = shlex.split(options)
    if not python:
        return {"cmd": ["robo_rl", *command, *more]}
    return {"cmd": [python, "-m", "robo_rl", *command, *more], "env": without_ros(environment)}


def without_ros(environment):
    """The environment without ROS's variables, and without entries of paths that lie in ROS or in a
    workspace."""
    roots = tuple(
        os.path.join(p, "") for name in PREFIXES for p in environment.get(name, "").split(os.pathsep) if p
    )
    out = {k: v for k, v in environment.items() if k not in DROPPED}
    for name in FILTERED:
        kept = [
            p for p in out.get(name, "").split(os.pathsep) if p and not os.path.join(p, "").startswith(roots)
        ]
        if name in out:
            out[name] = os.pathsep.join(kept)
            if not kept:
                del out[name]
    return out
