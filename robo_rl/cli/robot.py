"""`robo_rl robot check|home|teleop|calibrate|drive|keys`: first day, homing, a person's hand, cameras, serial
servos, keys."""

import math
import sys

from robo_rl.errors import UserError
from robo_rl.experiment.calibrate import CalibrateOptions, calibrate
from robo_rl.experiment.robot_check import Question, RobotOptions, check_robot, read_answer
from robo_rl.experiment.robot_drive import DriveOptions, drive_robot
from robo_rl.experiment.robot_home import HomeOptions, home_robot
from robo_rl.experiment.robot_keys import KeysOptions, make_keys
from robo_rl.experiment.teleop import TeleopOptions, teleop
from robo_rl.signals import asked_to_stop

__all__ = [
    "CalibrateOptions",
    "DriveOptions",
    "HomeOptions",
    "KeysOptions",
    "RobotOptions",
    "TeleopOptions",
    "run",
]

SUBCOMMANDS = {
    "check": (RobotOptions, "check a robot's file, and walk through the checklist of its first day"),
    "home": (HomeOptions, "bring an arm to a home pose of its file, governed"),
    "teleop": (
        TeleopOptions,
        "drive an arm with a gamepad, SpaceMouse, keyboard, leader arm or browser, governed, and record it",
    ),
    "calibrate": (
        CalibrateOptions,
        "where a camera is, from poses of tool and target, written into the robot's file",
    ),
    "drive": (DriveOptions, "put an arm of serial servos (SO-101) on the network"),
    "keys": (KeysOptions, "make keys that encrypt an arm's network and keep strangers out of it"),
}


def run(
    options: "RobotOptions | HomeOptions | TeleopOptions | CalibrateOptions | DriveOptions | KeysOptions",
) -> int:
    """check: 0 where everything was checked and answered well, 1 where something is open or says no. home: 0
    where the arm is there.
    teleop: 1 where a governor ended it."""
    if isinstance(options, RobotOptions):
        return 0 if check_robot(options, ask, lambda line: print(line, flush=True)) else 1
    if isinstance(options, DriveOptions):
        drive_robot(
            options,
            lambda line: print(line, flush=True),
            lambda line: print(f"robo_rl: {line}", file=sys.stderr),
        )
        return 0
    if isinstance(options, KeysOptions):
        made = make_keys(options)
        for folder in made:
            print(
                f"{folder}: for --security of the node "
                f"{folder.name}{', which reads alone' if folder.name in options.watch else ''}"
            )
        print(
            f"{options.folder}/private signs new nodes: keep it off the robot"
            if made
            else "all these nodes have keys: nothing was changed"
        )
        return 0
    if isinstance(options, CalibrateOptions):
        got = calibrate(options)
        print(
            f"{options.camera} at {got.pos.round(4).tolist()} m, {got.quat.round(4).tolist()} (w, x, y, z), "
            f"known to {1000 * got.pos_bound:.1f} mm and {math.degrees(got.angle_bound):.2f} degrees (95 %); "
            f"residuals of a pose {1000 * got.pos_rms:.1f} mm, {math.degrees(got.angle_rms):.2f} degrees; "
            f"{got.poses} poses; {options.out or options.file}"
        )
        return 0
    if isinstance(options, TeleopOptions):
        result = teleop(
            options,
            lambda line: print(line, flush=True),
            lambda line: print(f"robo_rl: {line}", file=sys.stderr),
        )
        if result.held:
            print(f"robo_rl: {result.state}: {result.reason}", file=sys.stderr)
        return 1 if result.held else 0
    with asked_to_stop() as stop:
        home_robot(
            options,
            lambda line: print(line, flush=True),
            lambda line: print(f"robo_rl: {line}", file=sys.stderr),
            stop,
        )
    return 0


def ask(question: Question) -> str:
    """Until the answer is one; the end of the input leaves the rest open. Each question has its line, also
    where no terminal shows what was typed."""
    while True:
        try:
            said = input(f"[{question.part}] {question.text} ({question.unit or 'y/n'}, Enter: later) ")
        except EOFError:
            print()
            return ""
        if not sys.stdin.isatty():
            print(said)
        try:
            read_answer(question, said)
            return said
        except UserError as e:
            print(e)
