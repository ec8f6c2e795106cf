"""What other projects call a command: said where such a name is typed (options: `robo_rl.other_names`)."""

import re

from robo_rl.other_names import NAMES

COMMANDS = {  # their command without lerobot-: ours
    "teleop": "robot teleop",
    "teleoperate": "robot teleop",
    "record": "collect --operator gamepad; of a real arm robo_rl robot teleop",
    "record_demos": "collect --operator spacemouse; of a real arm robo_rl robot teleop",
    "actor": "train --algo hil_serl: actor and learner are one command",
    "learner": "train --algo hil_serl: actor and learner are one command",
    "train_reward_classifier": "train --algo hil_serl --rl.judge classifier",
    "calibrate": "robot check --servos; of cameras robo_rl robot calibrate",
    "replay": "deploy RUN --dry-run; recorded episodes are looked at with robo_rl data view",
    "annotate": "data label",
    "export": "vla convert",
    "play": "eval RUN",
    "evaluate": "eval RUN",
    "find_port": "robot drive",
}


def our_command(typed: str) -> str:
    """What is typed here for a command of another project; "": it is not known."""
    return COMMANDS.get(typed.lower().removeprefix("lerobot-").replace("-", "_"), "")


def ours(command: str, argv: list[str], options: list[str]) -> str:
    """What of `argv` has another name here, as a sentence; "" where nothing of it is known. An option typed
    without its group (--gamma) is told with it; `options`: those of the command."""
    for typed in [word.partition("=")[0] for word in argv if word.startswith("--")]:
        name = re.sub(r"\W", "_", typed[2:].lower())
        grouped = [o for o in options if "." in o and o.rpartition(".")[2].replace("-", "_") == name]
        told = NAMES.get(name) or NAMES.get(typed.rpartition(".")[2].lower().replace("-", "_"), "")
        told = told if command == "train" else ""
        if typed not in options and (told or grouped):
            return f"there is no option {typed}; here it is {told or ' or '.join(grouped)}"
    return ""


def of_other_methods(argv: list[str], options: list[str]) -> str:
    """Which methods have an option --rl.… of `argv` that is not among `options`, as a sentence; "": none."""
    from dataclasses import fields

    from robo_rl.options import RL_OPTIONS

    for typed in [word.partition("=")[0] for word in argv if word.startswith("--rl.")]:
        name = typed.removeprefix("--rl.").replace("-", "_")
        others = [a for a, kind in RL_OPTIONS.items() if name in {f.name for f in fields(kind)}]
        if typed not in options and others:
            return f"this method has no option {typed}; --algo {', '.join(others)} have it"
    return ""
