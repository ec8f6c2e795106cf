"""The checklist of a robot's first day as a walk: what its file says is checked, what only a person can see
is asked and written down."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from robo_rl.errors import UserError, choose
from robo_rl.files import read_json, write_json

YES, NO, LATER = ("y", "yes"), ("n", "no"), ("", "later")


@dataclass(frozen=True, slots=True)
class Question:
    """key: in the file of answers; kind: yes, or a number with its unit and the largest that passes."""

    key: str
    part: str
    text: str
    unit: str = ""
    most: float = math.inf


BEFORE, NETWORK, LIMITS, DRY, FIRST = "Before power", "Network", "Limits", "Dry run", "First motion"
QUESTIONS = (
    Question(
        "estop_tested",
        BEFORE,
        "The hardware e-stop was tested today and is in the hand of a person who does nothing else",
    ),
    Question(
        "cell_clear",
        BEFORE,
        "The cell is clear, the workspace marked; tool, cables and camera mounts cannot reach the base",
    ),
    Question("vendor_speed", BEFORE, "The vendor's speed-limited mode is on, or there is none"),
    Question(
        "payload_set",
        BEFORE,
        "The payload in the vendor's software is the file's; the released arm neither sags nor drifts",
    ),
    Question(
        "realtime_kernel",
        BEFORE,
        "The computer of the torque loop has a PREEMPT_RT kernel, or the vendor's controller closes it",
    ),
    Question(
        "latency_us", BEFORE, "Largest latency that cyclictest -p 90 -m shows in ten minutes", "us", 100.0
    ),
    Question(
        "one_middleware", NETWORK, "Both ends use Cyclone DDS and a ROS_DOMAIN_ID that nobody else uses"
    ),
    Question(
        "one_publisher",
        NETWORK,
        "ros2 topic info says that nobody else publishes target_pose or target_joint",
    ),
    Question(
        "sheet_compared",
        LIMITS,
        "Joint names, order, limits, speeds and torques of the file are those of this robot's data sheet",
    ),
    Question(
        "frames_checked", LIMITS, "Base frame, tool frame and the tool's axes of the file are the robot's"
    ),
    Question("box_marked", LIMITS, "The workspace box of the file lies within what is marked"),
    Question("gains_read", LIMITS, "The gains that were read back from the controller are those of the file"),
    Question("floats", LIMITS, "Under gravity compensation alone the arm floats and does not drift"),
    Question(
        "dry_directions",
        DRY,
        "In a dry run the poses on preview/target_pose go where they should, and turn the right way",
    ),
    Question(
        "dry_episodes", DRY, "Ten dry episodes passed with no violated contract that nobody understands"
    ),
    Question("switch_still", FIRST, "When the controller was activated the arm did not move"),
    Question("stop_topic_mm", FIRST, "Way to rest after the e-stop topic at 0.05 m/s", "mm", 40.0),
    Question("stop_ctrl_c_mm", FIRST, "Way to rest after Ctrl-C of the bridge at 0.05 m/s", "mm", 40.0),
    Question("stop_hardware_mm", FIRST, "Way to rest after the hardware e-stop at 0.05 m/s", "mm", 40.0),
)


PAIR_QUESTIONS = (
    Question(
        "bases_measured",
        LIMITS,
        "The bases' poses of the pair's file were measured on the cell, not taken from a drawing",
    ),
    Question(
        "clearance_seen",
        DRY,
        "With both arms at rest the distance between them is the one that a ruler shows, within 20 mm",
    ),
    Question("stops_both", FIRST, "The e-stop topic of each arm stops both"),
)


@dataclass(frozen=True, kw_only=True)
class RobotOptions:
    """Check a robot's file, and walk through the checklist of its first day. Exit code 1 while anything is
    open or says no."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The robot": ("file", "model", "servos"),
        "The answers": ("answers", "out"),
    }

    file: tyro.conf.Positional[str]
    """Preset or JSON file, also of two arms."""
    model: str = ""
    """MJCF or URDF of a robot whose file names none: its joints and tool are then looked for in it."""
    servos: bool = False
    """Look at the serial servos of the file's `driver` too: nothing is written to them."""
    answers: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """JSON file with the answers, as --out writes them or {key: true, key: 12.5}; nothing is asked. "": they
    are asked here."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """JSON file that gets the checks, questions and answers; "": <robot>_check.json."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the record. good: None while it is open."""

    key: str
    part: str
    text: str
    answer: bool | float | str | None
    good: bool | None


def check_file(robot, model: str) -> list[CheckResult]:
    """What can be seen without a robot: limits of the cell, gains, model, sources of the numbers."""
    import numpy as np

    from controllers.law import LawOptions
    from controllers.model import arm_model, inertia_fault, range_fault

    out = []

    def say(key: str, text: str, fault: str) -> None:
        out.append(CheckResult(key, "The file", text, fault or True, not fault))

    lacks = robot.cell.lacks()
    say(
        "limits",
        "A box, a speed and a force limit, or why there is none",
        f"no {', '.join(lacks)}" if lacks else "",
    )
    for name, why in robot.cell.without.items():
        say(f"without_{name}", f"No limit of {name}, because: {why}", "")
    try:
        for name in robot.gains:
            choose("gain", name, [f.name for f in fields(LawOptions)])
        gains: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in robot.gains.items()}
        stiffness = LawOptions(**gains).stiffness
        say("gains", "The gains are within their bounds", "")
    except (UserError, TypeError) as e:
        stiffness = None
        say("gains", "The gains are within their bounds", str(e))
    unknown = [f for f in ("lower", "upper", "velocity", "torque") if f not in robot.sources]
    say(
        "sources",
        "Limits, speeds and torques have a source",
        f"none for {', '.join(unknown)}" if unknown else "",
    )
    memory = sorted(f for f, where in robot.sources.items() if "memory" in where or "assumption" in where)
    say("memory", "No source is a memory or an assumption", f"{', '.join(memory)}" if memory else "")
    for of, row in (("action", robot.data.columns), ("state", robot.data.state_columns)):
        if row:
            say(f"{of}_columns", f"The columns of its data are known ({of})", column_fault(robot, of, row))
    try:
        made = arm_model(robot, model)
        say("model", "The model has the joints and the tool", "")
        say("ranges", "The joints' limits lie within the model's", range_fault(made, robot))
        say("home", "The home pose lies in the box", home_fault(robot, made))
        if stiffness is not None:
            made.update(np.array(robot.home), np.zeros(made.n))
            say(
                "inertia",
                "The model's joints have the inertia that its gains need",
                inertia_fault(made, stiffness),
            )
    except UserError as e:
        say("model", "The model has the joints and the tool", str(e))
    return out


def check_pair(pair, model: str) -> list[CheckResult]:
    """`check_file` of each arm, and what a pair needs besides."""
    import numpy as np

    from controllers.model import arm_model
    from robo_rl.experiment.sim_pair import separation_of

    if model:
        raise UserError("--model is for one arm: name each arm's MJCF or URDF as `model` in its own file")
    out = [
        CheckResult(f"{name}_{f.key}", f.part, f"{name}: {f.text}", f.answer, f.good)
        for name, robot in pair.arms.items()
        for f in check_file(robot, "")
    ]

    def say(key: str, text: str, fault: str) -> None:
        out.append(CheckResult(key, "The file", text, fault or True, not fault))

    lacks = pair.lacks()
    say("bases", "The bases of both arms in one frame", "no bases" if "bases" in lacks else "")
    say(
        "clearance",
        "A clearance between the arms, or why there is none",
        "no clearance" if "clearance" in lacks else "",
    )
    for name, why in pair.without.items():
        say(f"without_{name}", f"No {name}, because: {why}", "")
    if pair.bases and pair.clearance is not None:
        try:
            models = {name: arm_model(robot) for name, robot in pair.arms.items()}
            for made, robot in zip(models.values(), pair.arms.values(), strict=True):
                made.update(np.array(robot.home), np.zeros(made.n))
            apart = separation_of(pair, models, 0.0)
            assert apart is not None  # there is a clearance
            fault = apart.fault([1.0, 1.0])
            say("homes_apart", "At their homes the arms are apart by the clearance", fault)
        except UserError as e:
            say("homes_apart", "At their homes the arms are apart by the clearance", str(e))
    return out


def check_servos(robot) -> list[CheckResult]:
    """What the servos on the port say: there, of the right kind and mode, calibrated as the file says, within
    the joints' range."""
    from controllers.servo_arm import ServoArm
    from controllers.transport import Bus, LoopbackTransport
    from robo_rl.experiment.robot_drive import open_servos

    bus = open_servos(robot)
    try:
        found = ServoArm(robot, bus, LoopbackTransport(Bus(lambda: 0.0), "check")).check()
    finally:
        bus.port.close()
    return [CheckResult(key, "The file", text, fault or True, not fault) for key, text, fault in found]


def column_fault(robot, of: str, row: tuple[str, ...]) -> str:
    """Which columns of the robot's data mean nothing; "": none."""
    from controllers.data_columns import meanings

    try:
        meanings(row, row, robot.joints, of, f"`data` of robot {robot.name}")
    except UserError as e:
        return str(e)
    return ""


def home_fault(robot, model) -> str:
    """Which of the robot's homes is outside its cell's box; "": none."""
    from controllers.limits import Limits, box

    limits = Limits(**robot.cell.limits())
    for name, q in ({"home": robot.home} | robot.cell.homes).items():
        model.place(q)
        at = tuple(model.pos)
        if math.dist(box(at, limits), at) > 1e-9:
            return f"{name} has the tool at {[round(x, 3) for x in at]} m"
    return ""


def read_answer(question: Question, said: object) -> tuple[bool | float | None, bool | None]:
    """(the answer, whether it is good; None: open). UserError: it is none."""
    if isinstance(said, str):
        said = said.strip().lower()
        if said in LATER:
            return None, None
        if not question.unit:
            said = said in YES if said in (*YES, *NO) else said
        else:
            try:
                said = float(said)
            except ValueError:
                raise UserError(
                    f"{question.key}: a number of {question.unit}, or nothing to leave it open"
                ) from None
    if said is None:
        return None, None
    if question.unit and isinstance(said, (int, float)) and not isinstance(said, bool) and said >= 0:
        return float(said), said <= question.most
    if not question.unit and isinstance(said, bool):
        return said, said
    raise UserError(
        f"{question.key}: {'a number of ' + question.unit if question.unit else 'yes or no'}, got {said!r}"
    )


def read_answers(path: str) -> dict[str, object]:
    """{key: answer} of a file that somebody wrote, or that a walk before left. UserError: unknown keys."""
    raw = read_json(Path(path), limit=1 << 20, remedy="the keys are those that robo_rl robot check asks")
    if isinstance(raw.get("findings"), list):
        raw = {
            f["key"]: f["answer"]
            for f in raw["findings"]
            if isinstance(f, dict) and f.get("part") != "The file"
        }
    for key in raw:
        choose("answer", key, tuple(q.key for q in (*QUESTIONS, *PAIR_QUESTIONS)))
    return raw


def walk(
    answer: Callable[[Question], object], questions: tuple[Question, ...] = QUESTIONS
) -> list[CheckResult]:
    """Ask everything; answer(question) gives what was said."""
    out = []
    for q in questions:
        said, good = read_answer(q, answer(q))
        out.append(CheckResult(q.key, q.part, q.text, said, good))
    return out


def check_robot(options: RobotOptions, ask: Callable[[Question], object], say: Callable[[str], None]) -> bool:
    """Check, ask, write the record -> whether nothing is open and nothing says no. ask: for a person; say:
    one line each."""
    from controllers.pair import is_pair, load_pair
    from controllers.robot import load_robot

    questions = QUESTIONS
    if is_pair(options.file):
        if options.servos:
            raise UserError("--servos is for one arm: check each arm's own file")
        robot, questions = load_pair(options.file), (*QUESTIONS, *PAIR_QUESTIONS)
        seen = check_pair(robot, options.model)
    else:
        robot = load_robot(options.file)
        seen = check_file(robot, options.model) + (check_servos(robot) if options.servos else [])
    for f in seen:
        say(f"{'ok  ' if f.good else 'NO  '} {f.text}" + ("" if f.good else f": {f.answer}"))
    given = read_answers(options.answers) if options.answers else None
    findings = seen + walk(ask if given is None else lambda q: given.get(q.key), questions)
    for f in findings[len(seen) :]:
        if not f.good:
            say(
                f"{'open' if f.good is None else 'NO  '} {f.part}: {f.text}"
                + ("" if f.answer is None else f": {f.answer}")
            )
    good = all(f.good for f in findings)
    path = Path(options.out or f"{robot.name}_check.json")
    write_json(
        path,
        {
            "robot": robot.name,
            "file": options.file,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "passed": good,
            "findings": [
                {"key": f.key, "part": f.part, "text": f.text, "answer": f.answer, "good": f.good}
                for f in findings
            ],
        },
    )
    counts = [sum(f.good is g for f in findings) for g in (True, False, None)]
    say(f"{counts[0]} ok, {counts[1]} no, {counts[2]} open; written to {path}")
    return good
