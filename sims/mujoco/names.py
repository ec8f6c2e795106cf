"""Names of the embedded simulator: its tasks, what an action means, what may be randomised; loads nothing
heavy."""

from robo_rl.errors import UserError, choose
from robo_rl.plugins import OWN, is_object, load_object

LOCOMOTION = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5")
SHORT = {"halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5", "walker2d": "Walker2d-v5", "ant": "Ant-v5"}
CONTROLS = ("ee_delta", "joint_delta")
VIEWS = ("front", "wrist")  # the cameras of an env with pictures
RANDOMISE = ("mass", "friction", "camera", "latency:<steps>")
TASKS = (
    "pick_cube",
    "reach",
    "push_cube",
    "stack_cube",
    "peg_insert",
    "open_drawer",
    "pick_by_name",
    "stack_place",
    "reach_around",
    "pick_either",
    *LOCOMOTION,
)


def find_locomotion(task: str) -> str:
    """The task of LOCOMOTION that "Ant-v5", "ant" or "" (Ant-v5) names. UserError: none."""
    return SHORT.get(task) or choose("mujoco_warp task", task or "Ant-v5", (*LOCOMOTION, *SHORT))


def parse_randomise(text: str) -> tuple[frozenset[str], int]:
    """("mass", ...) and the latency in control steps of "mass,friction,camera,latency:2"."""
    kinds, latency = set(), 0
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, colon, value = item.partition(":")
        if name == "latency":
            if not (colon and value.isdecimal() and int(value) <= 50):
                raise UserError(
                    f"randomise latency needs a number of control steps in 0 .. 50, for example "
                    f"latency:2, got {item!r}"
                )
            latency = int(value)
        else:
            choose("randomise", item, RANDOMISE)
            kinds.add(item)
    return frozenset(kinds), latency


def split_tasks(text: str) -> list[str]:
    """The names of "pick_cube,push_cube", several tasks of one env. UserError: one is there twice, or has
    other actions than an arm."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not is_object(name):
            choose("mujoco task", name, (*TASKS, OWN))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--task {text}: {twice[0]} is there twice")
    if walks := [name for name in names if name in LOCOMOTION]:
        raise UserError(
            f"--task {text}: {walks[0]} moves other joints than an arm, and tasks of one run share their "
            "actions; leave it out or train it in a run of its own"
        )
    return names


def check_names(task: str, control: str = "", randomise: str = "") -> None:
    """Raise UserError for names that `make_mujoco` does not know; loads nothing heavy."""
    if "," in task:
        for name in split_tasks(task):
            check_names(name, control, randomise)
    elif is_object(task):
        load_object(task, "--task")
    elif choose("mujoco task", task or TASKS[0], (*TASKS, OWN)) in LOCOMOTION:
        return
    choose("control", control or CONTROLS[0], CONTROLS)
    parse_randomise(randomise)
