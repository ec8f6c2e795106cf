"""What is given to --sim or --task and is the name of something of another simulator."""

import difflib
import importlib.machinery
import re
import sys

from robo_rl.errors import UserError
from sims.maniskill.tasks import NEEDS_DOWNLOAD, TASKS
from sims.mujoco.names import LOCOMOTION


def check_elsewhere(option: str, text: str) -> None:
    """UserError: what is given to --sim or --task, and is unknown there, is an id of Gymnasium, or a task of
    ours or of ManiSkill; it says how that is named."""
    before, _, id = text.split(",")[0].rpartition(":")
    ways = [f"--sim mujoco --task {id}"] if id in LOCOMOTION else []
    ways += [f"--sim maniskill --task {id}"] if id in (*TASKS, *NEEDS_DOWNLOAD) else []
    if re.fullmatch(r"([\w.-]+/)?[\w.-]+-v\d+", id):
        import gymnasium

        near = difflib.get_close_matches(id, gymnasium.registry, n=1, cutoff=0.8 if option == "sim" else 1.0)
        if near and not ways and not has_module(before) or id in gymnasium.registry:
            ways.append(f"--sim gym:{near[0]}")
        elif has_module(before):
            ways.append(f"--sim gym:{before}:{id}")
    if ways:
        raise UserError(f"unknown {option} {text!r}; did you mean {' or '.join(ways)}?")


def has_module(name: str) -> bool:
    """Whether there is a module of this dotted name, in the current folder or among the packages."""
    try:
        there = importlib.machinery.PathFinder.find_spec(name, ["", *sys.path])
        return name.isidentifier() and there is not None
    except (ImportError, ValueError):
        return False
