"""Robots: names, limits, gains and topic names, read from the JSON files in controllers/presets or a user's
own."""

import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from controllers.cell import Cell, check_topic, read_cell
from controllers.data_columns import RobotData, read_data
from controllers.servo_file import STEPS, Driver, read_driver
from robo_rl.errors import UserError, choose, in_range
from robo_rl.files import read_json

PRESETS = Path(__file__).parent / "presets"
MOST_ANGLE, MOST_SPEED = 32.0, 45.0  # rad: five turns; rad/s: seven turns a second
MOST_TORQUE, MOST_TORQUE_RATE = 1e4, 1e5  # N m; N m/s: of an arm's file
MANY = 5  # files that are named at most
EXAMPLE = f"{PRESETS / 'sim.json'} is an example"
NO_MODEL = "name its MJCF or URDF as `model` in a copy of its file, or with --model where a command has it"
NEEDED = {
    "joints": "names in the arm's order",
    "site": "the tool in the model",
    "base_frame": "frame_id of its poses",
    "gravity": "whether the law carries the arm's weight: false where the firmware does",
    "lower": "joint limits [rad]",
    "upper": "joint limits [rad]",
    "velocity": "[rad/s]",
    "torque": "[N m]",
    "torque_rate": "[N m/s]",
    "home": "[rad]",
}
OPTIONAL = {
    "about": "",
    "model": "",
    "gains": {},
    "friction": None,
    "topics": {},
    "sources": {},
    "cell": {},
    "driver": None,
    "data": {},
}
TOPICS = {"gripper": "gripper_position_controller/commands"} | {
    name: name
    for name in (
        "joint_states",
        "current_pose",
        "current_twist",
        "target_pose",
        "target_joint",
        "target_wrench",
        "target_stiffness",
        "estop",
        "external_wrench",
    )
}  # crisp_controllers' names, which a file changes
POSITIONS = {
    "forward_position": "forward_position_controller/commands",
    # of arms that have such a controller
    "joint_trajectory": "joint_trajectory_controller/joint_trajectory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Robot:
    """One arm of n joints. Every tuple has n entries in the order of `joints`."""

    name: str
    about: str
    model: str  # MJCF or URDF path, "" where the user brings it
    joints: tuple[str, ...]
    site: str  # MJCF site or body, or URDF link: the tool
    base_frame: str  # frame_id of poses on the wire
    gravity: bool  # the law must carry the arm's weight (False: the firmware does)
    lower: tuple[float, ...]  # [rad], -inf where a joint turns without end
    upper: tuple[float, ...]
    velocity: tuple[float, ...]  # [rad/s]
    torque: tuple[float, ...]  # [N m]
    torque_rate: float  # [N m/s]
    home: tuple[float, ...]  # [rad]
    gains: dict[str, Any]  # fields of `LawOptions`
    # phi1 [N m], phi2 [s/rad], phi3 [rad/s] of the law's friction term
    friction: dict[str, list[float]] | None
    topics: dict[str, str]
    sources: dict[str, str] = field(default_factory=dict)  # field -> where its numbers were read
    cell: Cell = Cell()
    driver: Driver | None = None
    """Its servos, where `robo_rl robot drive` is to put it on the network."""
    data: RobotData = RobotData()

    def __post_init__(self) -> None:
        n = len(self.joints)
        if n == 0 or len(set(self.joints)) < n:
            raise UserError(f"robot {self.name}: joints must be named, each once, got {list(self.joints)}")
        rows = {f: getattr(self, f) for f in ("lower", "upper", "velocity", "torque", "home")} | (
            self.friction or {}
        )
        for name, row in rows.items():
            if len(row) != n or any(not isinstance(x, (int, float)) or math.isnan(x) for x in row):
                raise UserError(
                    f"robot {self.name}: {name} needs {n} numbers, one per joint, got {list(row)}"
                )
        for joint, low, high, at in zip(self.joints, self.lower, self.upper, self.home, strict=True):
            if not low < high or not low <= at <= high:
                raise UserError(
                    f"robot {self.name}: {joint} needs lower < upper and home between them, got "
                    f"{low:g}, {high:g}, {at:g}"
                )
        for name, row, most, unit in (
            ("lower", self.lower, MOST_ANGLE, "rad"),
            ("upper", self.upper, MOST_ANGLE, "rad"),
            ("home", self.home, MOST_ANGLE, "rad"),
            ("velocity", self.velocity, MOST_SPEED, "rad/s"),
        ):
            if (x := max((abs(x) for x in row if not math.isinf(x)), default=0.0)) > most:
                raise UserError(
                    f"robot {self.name}: {name} is in {unit}, and {x:g} {unit} is no arm's: in degrees? "
                    f"{x:g} degrees are {math.radians(x):.4g} {unit[:3]}"
                )
        if min(*self.velocity, *self.torque, self.torque_rate) <= 0:
            raise UserError(f"robot {self.name}: velocity, torque and torque_rate must be above 0")
        for home, row in self.cell.homes.items():
            if len(row) != n or not all(
                a <= x <= b for a, x, b in zip(self.lower, row, self.upper, strict=True)
            ):
                raise UserError(
                    f"robot {self.name}: home {home} needs {n} angles within the joints' limits, got "
                    f"{list(row)}"
                )
        for view, camera in self.cell.cameras.items():
            choose(f"robot {self.name}: frame of camera {view}", camera.frame, (self.base_frame, self.site))

    @property
    def percent(self) -> dict[str, float]:
        """{joint: rad of 1 % of its calibrated range}, as LeRobot counts from its middle, -100 to 100; of the
        joints that a calibration in the file is of."""
        servos = self.driver.servos if self.driver else ()
        return {
            joint: s.sign * s.reach * 2 * math.pi / STEPS / 100
            for joint, s in zip(self.joints, servos, strict=False)
            if s.reach
        }

    def need_limits(self) -> None:
        """UserError: its cell lacks a box, a speed or a force limit, and says not why."""
        if lacks := self.cell.lacks():
            raise UserError(
                f"robot {self.name} is not armed: its file says no {', '.join(lacks)} in `cell`, nor why "
                "there is none in `cell.without`; copy the preset to a JSON file of yours and fill it in "
                "(docs: Robot day)"
            )


def load_robot(name: str) -> Robot:
    """A preset by name, or a JSON file of the same shape by path; a `model` in it is relative to the file."""
    path = Path(name)
    if path.suffix != ".json":
        path = PRESETS / f"{choose('robot', name, presets())}.json"
    elif not path.exists():
        raise UserError(no_file(path))
    raw = read_json(path, limit=1 << 20, remedy=EXAMPLE)
    if "arms" in raw:
        raise UserError(
            f"{path} is a pair of arms, and this drives one arm: give the file of one, with its --namespace "
            "(docs: Two arms)"
        )
    if lacks := [f"{name} ({what})" for name, what in NEEDED.items() if name not in raw]:
        raise UserError(f"{path} lacks {', '.join(lacks)}; {EXAMPLE}")
    for name in raw:
        choose(f"{path}: field", name, [*NEEDED, *OPTIONAL])
    raw = {name: dict(value) if isinstance(value, dict) else value for name, value in OPTIONAL.items()} | raw
    check_kinds(raw, path)
    in_range(f"{path}: torque [N m]", max(raw["torque"], default=1.0), 0, MOST_TORQUE, open_low=True)
    in_range(f"{path}: torque_rate [N m/s]", raw["torque_rate"], 0, MOST_TORQUE_RATE, open_low=True)
    raw["topics"] = read_topics(raw["topics"], raw["cell"], path)
    for bound, sign in (("lower", -math.inf), ("upper", math.inf)):
        raw[bound] = [sign if x is None else x for x in raw[bound]]
    if raw["model"]:
        raw["model"] = str(path.parent / raw["model"])
    cell = read_cell(raw.pop("cell", {}))
    driver = read_driver(raw.pop("driver", None), tuple(raw["joints"]), path.parent)
    data = read_data(raw.pop("data", {}))
    read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return Robot(name=path.stem, cell=cell, driver=driver, data=data, **read)


def no_file(path: Path) -> str:
    """What to say where a robot's file is not there: the ones that are, and how to make one."""
    beside = sorted(p.name for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=MANY, cutoff=0.0)
    there = (
        f"in {path.parent} there is {', '.join(near)}" if near else f"in {path.parent} there is no JSON file"
    )
    return (
        f"there is no robot file {path}; {there}. A preset needs no file ({', '.join(presets())}); one of "
        f"your own begins as a copy of {PRESETS / 'sim.json'}, and robo_rl robot check FILE checks it"
    )


def check_kinds(raw: dict[str, Any], path: Path) -> None:
    """UserError: a field of the file is of another kind than it has to be. ("gravity": "false" would be
    true.)"""

    def is_number(x: Any) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x)

    def is_row(x: Any) -> bool:
        return isinstance(x, list) and all(map(is_number, x))

    bounded = {
        name: [0.0 if x is None else x for x in raw[name]]
        for name in ("lower", "upper")
        if isinstance(raw[name], list)
    }
    friction = raw["friction"]
    for names, what, fits in (
        (("about", "model", "site", "base_frame"), "a text", lambda x: isinstance(x, str)),
        (
            ("joints",),
            "a list of names",
            lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
        ),
        (("gravity",), "true or false", lambda x: isinstance(x, bool)),
        (("torque_rate",), "a number", is_number),
        (("velocity", "torque", "home"), "a list of numbers", is_row),
        (("lower", "upper"), "a list of numbers or nulls", is_row),
        (("gains", "sources"), "an object", lambda x: isinstance(x, dict)),
    ):
        for name in names:
            if not fits(bounded.get(name, raw[name])):
                raise UserError(f"{path}: {name} is {what}, got {raw[name]!r}")
    if friction is not None and not (
        isinstance(friction, dict)
        and set(friction) == {"phi1", "phi2", "phi3"}
        and all(map(is_row, friction.values()))
    ):
        raise UserError(
            f"{path}: friction is null, or an object of phi1 [N m], phi2 [s/rad] and phi3 [rad/s] with a "
            f"number for each joint, got {friction!r}"
        )


def read_topics(named: Any, cell: Any, path: Path) -> dict[str, str]:
    """The robot's topics: those that the file names, and for the others crisp_controllers' names; of joint
    positions those alone that the file names, or whose command it does."""
    if not isinstance(named, dict) or not all(isinstance(x, str) and x for x in named.values()):
        raise UserError(
            f'{path}: topics are names of topics, {{"joint_states": "arm/joint_states"}}, got {named!r}'
        )
    for name, topic in named.items():
        choose(f"{path}: topic", name, [*TOPICS, *POSITIONS])
        check_topic(f"{path}: topic {name}", topic)
    command = cell.get("command") if isinstance(cell, dict) else None
    return TOPICS | {name: topic for name, topic in POSITIONS.items() if name == command} | named


def presets() -> list[str]:
    """Names of the robots in the package."""
    return sorted(p.stem for p in PRESETS.glob("*.json"))


def by_name(
    joints: tuple[str, ...],
    names: "list[str] | tuple[str, ...]",
    values: "list[float] | np.ndarray",
    what: str = "position",
) -> np.ndarray:
    """values of a message, which are in the order of its `names`, in the order of `joints` [n].

    Extra joints (a gripper's) are left out. UserError where one is missing, named twice or without a value.
    """
    if len(values) != len(names):
        raise UserError(f"{what} has {len(values)} values for {len(names)} joint names")
    at = {name: i for i, name in enumerate(names)}
    if len(at) < len(names):
        raise UserError(f"a joint is named twice in {list(names)}")
    missing = [j for j in joints if j not in at]
    if missing:
        raise UserError(
            f"{what} lacks the joints {', '.join(missing)}; named are {', '.join(names) or 'none'}"
        )
    return np.array([values[at[j]] for j in joints], float)
