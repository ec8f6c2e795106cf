"""Which input of a device does what: axes of the twist with sign and scale, buttons, dead zone, dead-man
button. Read from a JSON file.

Inputs have the kernel's names (linux/input-event-codes.h): ABS_X, BTN_SOUTH, KEY_W. A SpaceMouse read by
hidraw has ABS_X .. ABS_RZ and BTN_0, BTN_1, …; a terminal's keys are KEY_A and so on.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from robo_rl.errors import UserError, choose, in_range
from robo_rl.files import read_json

KINDS = ("gamepad", "spacemouse", "keyboard", "leader")
TWIST = ("x", "y", "z", "rx", "ry", "rz")
WORDS = ("grip", "open", "close", "success", "failure", "discard", "stop")  # what a button can say
SAID = WORDS[3:]  # to the program; the others are the gripper's
EV_KEY, EV_REL, EV_ABS = 1, 2, 3
_ROWS = {  # first code of names that follow one another
    (
        EV_ABS,
        0x00,
    ): "ABS_X ABS_Y ABS_Z ABS_RX ABS_RY ABS_RZ ABS_THROTTLE ABS_RUDDER ABS_WHEEL ABS_GAS ABS_BRAKE",
    (EV_ABS, 0x10): "ABS_HAT0X ABS_HAT0Y ABS_HAT1X ABS_HAT1Y",
    (EV_KEY, 1): "KEY_ESC KEY_1 KEY_2 KEY_3 KEY_4 KEY_5 KEY_6 KEY_7 KEY_8 KEY_9 KEY_0 KEY_MINUS KEY_EQUAL "
    "KEY_BACKSPACE KEY_TAB KEY_Q KEY_W KEY_E KEY_R KEY_T KEY_Y KEY_U KEY_I KEY_O KEY_P KEY_LEFTBRACE "
    "KEY_RIGHTBRACE KEY_ENTER KEY_LEFTCTRL KEY_A KEY_S KEY_D KEY_F KEY_G KEY_H KEY_J KEY_K KEY_L "
    "KEY_SEMICOLON KEY_APOSTROPHE KEY_GRAVE KEY_LEFTSHIFT KEY_BACKSLASH KEY_Z KEY_X KEY_C KEY_V KEY_B "
    "KEY_N KEY_M KEY_COMMA KEY_DOT KEY_SLASH KEY_RIGHTSHIFT KEY_KPASTERISK KEY_LEFTALT KEY_SPACE",
    (
        EV_KEY,
        102,
    ): "KEY_HOME KEY_UP KEY_PAGEUP KEY_LEFT KEY_RIGHT KEY_END KEY_DOWN KEY_PAGEDOWN KEY_INSERT KEY_DELETE",
    (EV_KEY, 0x100): "BTN_0 BTN_1 BTN_2 BTN_3 BTN_4 BTN_5 BTN_6 BTN_7 BTN_8 BTN_9",
    (
        EV_KEY,
        0x130,
    ): "BTN_SOUTH BTN_EAST BTN_C BTN_NORTH BTN_WEST BTN_Z BTN_TL BTN_TR BTN_TL2 BTN_TR2 BTN_SELECT BTN_START "
    "BTN_MODE BTN_THUMBL BTN_THUMBR",
    (EV_KEY, 0x220): "BTN_DPAD_UP BTN_DPAD_DOWN BTN_DPAD_LEFT BTN_DPAD_RIGHT",
}
NAMES = {
    (kind, first + i): name for (kind, first), row in _ROWS.items() for i, name in enumerate(row.split())
}
INPUTS = tuple(NAMES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMapping:
    """UserError names what is wrong with an entry."""

    axes: dict[str, tuple[str, float]]
    """Input -> (x y z rx ry rz of the twist, factor from -1 to 1). Inputs on the same axis add up."""
    buttons: dict[str, str] = field(default_factory=dict)
    """Input -> grip (opens and closes in turn), open, close, success, failure, discard or stop."""
    dead_man: str = ""
    """Input without which nothing moves, held all the time; "": an axis off its rest is enough."""
    dead_zone: float = 0.08
    """Share of the full deflection, 0 to 0.9, that counts as none."""
    scale: float = 1.0
    """Factor on the whole twist, above 0, up to 1."""

    def __post_init__(self) -> None:
        if not self.axes:
            raise UserError('a device mapping needs axes, for example {"ABS_Y": ["x", -1]}')
        for name, to in self.axes.items():
            choose("mapping: axes", name, INPUTS)
            if (
                not isinstance(to, tuple)
                or len(to) != 2
                or not isinstance(to[1], (int, float))
                or isinstance(to[1], bool)
            ):
                raise UserError(
                    f'mapping: axes: {name} needs [axis, factor], for example ["x", -1], got {to!r}'
                )
            choose(f"mapping: axes: {name}", to[0], TWIST)
            in_range(f"mapping: axes: {name}: factor", to[1], -1, 1)
        for name, word in self.buttons.items():
            choose("mapping: buttons", name, INPUTS)
            choose(f"mapping: buttons: {name}", word, WORDS)
        if self.dead_man:
            choose("mapping: dead_man", self.dead_man, INPUTS)
        for name in self.buttons:
            if name in self.axes or name == self.dead_man:
                raise UserError(f"mapping: {name} is a button and something else: one input does one thing")
        in_range("mapping: dead_zone", self.dead_zone, 0, 0.9)
        in_range("mapping: scale", self.scale, 0, 1, open_low=True)


KEY_AXES = {
    "W": ("x", 1.0),
    "S": ("x", -1.0),
    "A": ("y", 1.0),
    "D": ("y", -1.0),
    "Q": ("z", 1.0),
    "E": ("z", -1.0),
    "I": ("rx", 1.0),
    "K": ("rx", -1.0),
    "J": ("ry", 1.0),
    "L": ("ry", -1.0),
    "U": ("rz", 1.0),
    "O": ("rz", -1.0),
}
# whose pads' drivers say BTN_NORTH of the button that is there: Sony, Nintendo; others say it of the one
# labelled X, which is west on an Xbox pad
BY_PLACE = (0x054C, 0x057E)
DEFAULTS = {
    "gamepad": DeviceMapping(
        axes={
            "ABS_Y": ("x", -1.0),
            "ABS_X": ("y", -1.0),
            "ABS_RY": ("z", -1.0),
            "ABS_RX": ("rz", -1.0),
            "ABS_HAT0X": ("rx", 1.0),
            "ABS_HAT0Y": ("ry", -1.0),
        },
        buttons={
            "BTN_SOUTH": "grip",
            "BTN_NORTH": "success",
            "BTN_WEST": "failure",
            "BTN_SELECT": "discard",
            "BTN_START": "stop",
        },
        dead_man="BTN_TR",
    ),
    "spacemouse": DeviceMapping(
        axes={
            "ABS_Y": ("x", -1.0),
            "ABS_X": ("y", -1.0),
            "ABS_Z": ("z", -1.0),
            "ABS_RY": ("rx", -1.0),
            "ABS_RX": ("ry", -1.0),
            "ABS_RZ": ("rz", -1.0),
        },
        buttons={"BTN_0": "grip", "BTN_1": "success", "BTN_2": "failure", "BTN_3": "discard"},
    ),
    "keyboard": DeviceMapping(
        axes={f"KEY_{k}": to for k, to in KEY_AXES.items()},
        dead_zone=0.0,
        buttons={
            "KEY_G": "grip",
            "KEY_Y": "success",
            "KEY_N": "failure",
            "KEY_X": "discard",
            "KEY_ESC": "stop",
        },
    ),
}


def load_mapping(path: str | Path, kind: str) -> DeviceMapping:
    """The mapping of a JSON file: fields of `DeviceMapping`; those that it lacks are the default's of this
    kind of device."""
    raw: dict[str, Any] = read_json(
        Path(path), limit=1 << 16, remedy="docs: Teleoperate and record has an example"
    )
    known = [f.name for f in fields(DeviceMapping)]
    for name in raw:
        choose(f"{path}: field", name, known)
    for name in ("axes", "buttons"):
        if not isinstance(raw.get(name, {}), dict):
            raise UserError(f"{path}: {name} is an object of inputs, got {raw[name]!r}")
    if "axes" in raw:
        raw["axes"] = {name: tuple(to) if isinstance(to, list) else to for name, to in raw["axes"].items()}
    default = DEFAULTS[kind]
    try:
        return DeviceMapping(**{name: raw.get(name, getattr(default, name)) for name in known})
    except UserError as e:
        raise UserError(f"{path}: {e}") from None


def for_vendor(mapping: DeviceMapping, vendor: int) -> DeviceMapping:
    """A gamepad's mapping whose default buttons are where this vendor's driver says them (0: not known)."""
    if not vendor or vendor in BY_PLACE or mapping.buttons != DEFAULTS["gamepad"].buttons:
        return mapping
    other = {"BTN_NORTH": "BTN_WEST", "BTN_WEST": "BTN_NORTH"}
    return replace(mapping, buttons={other.get(name, name): word for name, word in mapping.buttons.items()})


def parse_device(text: str) -> tuple[str, str, str]:
    """(kind, path or namespace, mapping file) of a device's text; "" where it says none."""
    kind, colon, rest = text.partition(":")
    choose("device", kind, KINDS)
    path = mapping = ""
    for word in filter(None, rest.split(",")) if colon else ():
        key, equals, value = word.partition("=")
        if equals and key == "mapping":
            mapping = value
        elif path:
            raise UserError(
                f"a device is kind:file,mapping=FILE, for example gamepad:/dev/input/event5, got {text!r}"
            )
        else:
            path = word
    if kind == "leader" and mapping:
        raise UserError("a leader arm has no mapping: it says where its tool is")
    return kind, path, mapping
