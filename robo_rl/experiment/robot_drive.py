"""An arm of serial servos as a node: joint states out, joint positions in, as with a vendor's
forward_position_controller."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import tyro

from robo_rl.errors import UserError, in_range, quoted
from robo_rl.experiment.ros_options import RosOptions
from robo_rl.signals import asked_to_stop


@dataclass(frozen=True, kw_only=True)
class DriveOptions(RosOptions):
    """Put an arm of serial servos (an SO-101) on the network: its file has a `driver`. Torque goes on with
    the first command and stays on when this ends; --release takes it off."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The robot": ("file", "port", "release"),
        "Time": ("seconds", "rate"),
        "ROS 2": ("namespace", "domain", "interface", "security"),
    }

    file: tyro.conf.Positional[str]
    """Preset or JSON file."""
    port: str = ""
    """Serial port; "": the file's."""
    release: bool = False
    """Take the torque off and end: hold the arm, it falls."""
    seconds: float = math.inf
    """Time limit [s]; inf: until Ctrl-C."""
    rate: float = 100.0
    """How often the servos are read [1/s], 10 to 200."""

    def __post_init__(self) -> None:
        in_range("--seconds", self.seconds, 0, math.inf, open_low=True)
        in_range("--rate", self.rate, 10, 200)
        super().__post_init__()


def open_servos(robot, port: str = ""):
    """The bus of a robot's servos. UserError: its file has no driver, or the port cannot be opened."""
    from controllers.feetech import SerialPort, ServoBus

    if robot.driver is None:
        raise UserError(
            f"robot {robot.name} has no `driver` in its file: it is not driven from here "
            "(controllers/presets/so101.json has one)"
        )
    return ServoBus(SerialPort(port or robot.driver.port, robot.driver.baud))


def drive_robot(options: DriveOptions, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Run the driver until its time is over or the user asks for the end. UserError: a servo is not there, or
    the port is gone."""
    from controllers.loop import real_time
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from controllers.servo_arm import ServoArm
    from controllers.transport import Bus, LoopbackTransport
    from robo_rl.experiment.wire import connect

    robot = load_robot(options.file)
    bus = open_servos(robot, options.port)
    try:
        if options.release:
            ServoArm(robot, bus, LoopbackTransport(Bus(lambda: 0.0), "release")).release()
            log(f"{robot.name}: torque is off")
            return
        wire = connect(
            "robo_rl_servos", options.domain, options.interface, options.namespace, security=options.security
        )
        arm = ServoArm(robot, bus, wire, 1 / options.rate, arm_model(robot) if robot.model else None)
        try:
            with asked_to_stop() as stop:
                faults = [f"{text}: {fault}" for _, text, fault in arm.check() if fault]
                if faults:
                    raise UserError("; ".join(faults))
                log(
                    f"{robot.name} is on the network at {options.rate:g} Hz; torque goes on with the first "
                    "command"
                )
                timing = real_time(arm.step, 1 / options.rate, options.seconds, going=lambda: not stop)
                log(timing.text())
        finally:
            for what, count in [*arm.problems.most_common(), *bus.faults.most_common()]:
                if count:
                    warn(f"{count} times: {what}")
            if arm.has_torque:
                warn(
                    f"{robot.name} holds where it is, with torque on; robo_rl robot drive "
                    f"{quoted(options.file)} --release takes it off"
                )
            wire.close()
    finally:
        bus.port.close()
