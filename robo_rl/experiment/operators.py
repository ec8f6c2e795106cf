"""Who acts where a person may: the words of `--operator`, checked and opened."""

from typing import TYPE_CHECKING

from robo_rl.errors import UserError, choose
from robo_rl.human.device_mapping import KINDS, load_mapping, parse_device

if TYPE_CHECKING:
    from robo_rl.human.devices import DeviceOperator

PERSONS = ("console", *KINDS)
SPEED = 0.5  # of full commands, at a device's full deflection


def check_person(option: str, text: str, others: tuple[str, ...] = ()) -> str:
    """The kind of `text`, as an option of this name has it: one of `others`, console, or a device's.
    UserError: it is none."""
    kind = choose(option, text.partition(":")[0], (*others, *PERSONS))
    if kind in KINDS:
        _, _, mapping = parse_device(text)
        if mapping:
            load_mapping(mapping, kind)
    elif text != kind:
        raise UserError(f"{option} {kind} takes nothing after it, got {text!r}")
    return kind


def open_person(text: str, spec):
    """The device of such a text, for robots of this ControlSpec. UserError: it cannot be opened."""
    from robo_rl.experiment.console import open_leader_arm
    from robo_rl.human.devices import open_device

    return open_device(text, lambda namespace: open_leader_arm(namespace, spec))


def device_operator(text: str, spec, num_envs: int, **more) -> "DeviceOperator":
    """The person with that device beside robot 0, who gets the device again where it is plugged in anew."""
    from robo_rl.human.devices import DeviceOperator

    return DeviceOperator(
        open_person(text, spec), spec, num_envs, speed=SPEED, reopen=lambda: open_person(text, spec), **more
    )
