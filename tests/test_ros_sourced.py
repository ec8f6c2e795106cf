"""A sourced ROS with another Python: rclpy is tried, and DDS taken with one line where it does not load."""

import os
import sys

import pytest
from test_controllers_arm import DOMAIN

from robo_rl.errors import MissingDependency, UserError
from robo_rl.experiment.wire import connect, ros_transport

BROKEN = {  # what a package of another Python does when it is imported
    "extension": "from rclpy._rclpy_pybind11 import Context\n",
    "syntax": "match x:\n  case\n",
    "library": "raise OSError('libyaml.so: no such file')",
    "runtime": "raise RuntimeError('The C extension was built for\\nPython 3.10')",
}


@pytest.fixture
def sourced(monkeypatch, tmp_path):
    """source(text): as after `source /opt/ros/humble/setup.bash` where rclpy is this text; None: ROS without
    rclpy."""

    def source(text):
        for name in [n for n in sys.modules if n.split(".")[0] == "rclpy" or n == "controllers.ros"]:
            monkeypatch.delitem(sys.modules, name)
        packages = tmp_path / "lib" / "python3.10" / "site-packages"
        packages.mkdir(parents=True)
        if text is not None:
            (packages / "rclpy").mkdir()
            (packages / "rclpy" / "__init__.py").write_text(text)
        monkeypatch.setenv("ROS_DISTRO", "humble")
        monkeypatch.setenv("PYTHONPATH", str(packages))
        monkeypatch.setenv("ROBO_RL_TRANSPORT", "")
        monkeypatch.syspath_prepend(str(packages))

    yield source
    sys.modules.pop("controllers.ros", None)
    for name in [n for n in sys.modules if n.split(".")[0] == "rclpy"]:
        del sys.modules[name]


@pytest.mark.parametrize("text", [*BROKEN.values(), None], ids=[*BROKEN, "absent"])
def test_dds_is_taken_with_one_line_where_rclpy_does_not_load(sourced, text):
    sourced(text)
    said = []
    assert ros_transport(said.append) is None
    [line] = said
    assert (
        line.startswith("ROS humble is sourced, but its rclpy does not load in Python 3.")
        and "\n" not in line
    )
    assert line.endswith("DDS without ROS is used")


def test_the_node_that_is_opened_then_speaks_dds_and_the_line_goes_to_stderr(sourced, capsys):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    sourced(BROKEN["extension"])
    try:
        node = connect("sourced", DOMAIN)
    except UserError as e:
        pytest.skip(f"no loopback for DDS here: {e}")
    node.close()
    assert type(node).__name__ == "DdsTransport" and "_rclpy_pybind11" in capsys.readouterr().err


def test_who_asks_for_one_transport_gets_it_or_is_told(sourced, monkeypatch):
    sourced(BROKEN["library"])
    said = []
    monkeypatch.setenv("ROBO_RL_TRANSPORT", "dds")
    assert ros_transport(said.append) is None and not said
    monkeypatch.setenv("ROBO_RL_TRANSPORT", "rclpy")
    with pytest.raises(
        MissingDependency, match=r"rclpy does not load in this Python \(libyaml.so: no such file\): source"
    ):
        ros_transport(said.append)
    monkeypatch.setenv("ROBO_RL_TRANSPORT", "zenoh")
    with pytest.raises(UserError, match="unknown ROBO_RL_TRANSPORT 'zenoh'"):
        ros_transport(said.append)
    monkeypatch.delenv("ROS_DISTRO")
    monkeypatch.setenv("ROBO_RL_TRANSPORT", "")
    assert ros_transport(said.append) is None and not said and "ROS_DISTRO" not in os.environ
