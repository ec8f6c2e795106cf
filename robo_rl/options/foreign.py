"""Options of policies that act in the place of a run's and are none of ours: a server on openpi's wire, or a
folder that LeRobot saved."""

from dataclasses import dataclass
from typing import Any

from robo_rl.errors import UserError

LEROBOT = "lerobot:"
FOREIGN = ("ws://", "wss://", LEROBOT)  # what the name of such a policy begins with


@dataclass(frozen=True, slots=True)
class ActOptions:
    """How a policy acts: rows of a chunk that are executed."""

    execute: int


def check_foreign_alone(options: Any) -> None:
    """`check_foreign`, and UserError where --policy names no foreign policy."""
    if options.policy and not options.policy.startswith(FOREIGN):
        raise UserError(
            f"--policy is the ws://HOST:PORT of a server or lerobot:FOLDER, got {options.policy!r}"
        )
    check_foreign(options)


def check_foreign(options: Any) -> None:
    """UserError: an option of a foreign policy stands without one. options: has --policy, --lerobot-python,
    --lerobot-cameras and --execute."""
    for name in ("lerobot_python", "lerobot_cameras"):
        if getattr(options, name) and not options.policy.startswith(LEROBOT):
            raise UserError(f"--{name.replace('_', '-')} goes with --policy lerobot:FOLDER")
    if options.execute and not options.policy.startswith(FOREIGN):
        raise UserError("--execute goes with --policy ws://HOST:PORT or lerobot:FOLDER")
