"""colcon build --packages-select robo_rl_bringup; then ros2 launch robo_rl_bringup sim_arm.launch.py"""

from glob import glob

from setuptools import setup

NAME = "robo_rl_bringup"
setup(
    name=NAME,
    version="0.1.0",
    packages=[NAME],
    zip_safe=True,
    install_requires=["setuptools"],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}", [*glob("../../*.launch.py"), "../../robo_rl_process.py"]),
        (f"share/{NAME}/config", glob("../../config/*.yaml")),
    ],
)
