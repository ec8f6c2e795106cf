"""What all online methods have in common."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

from robo_rl.errors import UnreadOption, UserError, choose, in_range
from robo_rl.plugins import OWN, is_object

ANY_SIZE = ("grpo", "dr_grpo", "rloo")  # advantages of groups of different sizes
ALLOCATIONS: dict[str, tuple[str, ...]] = {  # rl.allocate -> the advantages it goes with; (): any
    "fixed": (),
    "refill": (*ANY_SIZE, "mc_grpo", "opob"),
    "ada": ("dr_grpo",),
    **dict.fromkeys(("xrpo", "dars", "broad", "gdro", "duet", "trace"), ANY_SIZE),
}
CHEAPER = ("steps", "bf16", "int8")  # what plays candidates
REWARDS = ("success", "speed", "smooth", "return")  # of robo_rl/algos/episode_rewards.py
MEASURES = ("steps", "change")
BY_ARM = ("xrpo", "dars", "gdro", "duet", "trace")  # decide by the success of a start of a pool, or of a task


def named_numbers(option: str, text: str, known: tuple[str, ...]) -> dict[str, float]:
    """ "a=1,b=0.5" -> {a: 1.0, b: 0.5}; names are of `known` or "module:function". UserError: it is something
    else."""
    out: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            name = ""
        if not name or not isfinite(value):
            raise UserError(f"{option} must be NAME=NUMBER,…, got {part!r}")
        out[name if is_object(name) else choose(f"name in {option}", name, (*known, OWN))] = value
    return out


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of an online RL method."""

    def refuse(self, names: Iterable[str], why: str) -> None:
        """UserError where one of the options `names`, which the method does not read, is not at its
        default."""
        given = [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]
        if given:
            what = ", ".join(f"--rl.{name.replace('_', '-')}" for name in given)
            raise UnreadOption(f"{why}: leave {what} out")


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(MethodOptions):
    """What the loop of the on-policy methods must know of any of them (`robo_rl/experiment/onpolicy.py`)."""

    decisions: int = 32
    """T: decisions per env and rollout (0: whole episodes, as group advantages need)."""
    gamma: float = 0.99
    """Per decision-step discount: of one control step; a chunk is discounted by gamma^E."""
    advantage: Literal[
        "gae", "grpo", "dr_grpo", "rloo", "mc_grpo", "gdpo", "opob", "poise", "istar", "tree"
    ] = "gae"
    """GAE on a critic, or relative to the group of a start; mc_grpo: to its median, in groups of odd size;
    gdpo: of each of --rl.rewards by itself, then added; opob: over the baseline of least variance (VCPO),
    which weighs an episode by how likely it is now and by its decisions; poise: over what the contexts of the
    group's other episodes predict; istar: to the group, and of decisions by rewards that are learnt from
    which episodes were better; tree: episodes of a group share beginnings, as simulators fork."""
    rewards: str = "success=1,speed=0.5,smooth=0.5"
    """With gdpo: rewards and their weights. success; speed, gamma^steps of a success; smooth, 1 less half of
    the mean change of a success's commands; return; or module:function of your own."""
    flawed: str = ""
    """A success is flawed where a measure is above its bound: steps=100 (control steps), change=0.3 (mean
    change of the commands from step to step, in [0, 2]), module:function=number of your own. Its reward is 1
    less flaw_penalty, a clean one's 1, a failure's -1 (FAPO). Empty: none is."""
    flaw_penalty: float = 1.0
    """With flawed; 0: flawed successes are clean ones, 2: they are failures."""
    group: int = 8
    """G: episodes per start with a group advantage, at most with tree."""
    allocate: Literal["fixed", "refill", "ada", "xrpo", "dars", "broad", "gdro", "duet", "trace"] = "fixed"
    """How many episodes a start gets (robo_rl/rollout_control/group_plan.py). fixed: --rl.group; refill
    (DAPO): a flat group is replaced by another; ada (Reinforce-Ada): rounds until a start has shown both
    outcomes; xrpo, dars, gdro, duet, trace: by the success so far, duet and trace by the length too, of its
    pool or task, which --starts pool and its like, or several tasks, make known; broad (BroRL): large groups
    where success no longer rises."""
    allocate_most: int = 4
    """Most episodes of a start, in multiples of --rl.group; refill: most groups played for each that is
    learnt from."""
    ada_rule: Literal["balance", "positive"] = "balance"
    """ada goes on until half of --rl.group succeeded and as many failed, or until one succeeded."""
    candidates: int = 0
    """Episodes of each start that a cheaper policy plays first, a multiple of --rl.group; those of least and
    of greatest return, --rl.group in all, are then played again with the same noise by the policy itself, and
    these alone are learnt from (Sol-RL). 0: none."""
    candidates_by: Literal["steps", "bf16", "int8"] = "steps"
    """What makes that policy cheaper: candidates_steps denoise steps; or linear layers in bf16, or in int8
    (on CPUs with VNNI and on GPUs faster from layers of some hundred units on)."""
    candidates_steps: int = 2
    """With steps: denoise steps of a candidate's chunk, fewer than --policy.denoise-steps."""
    tree_roots: int = 4
    """Episodes of a tree that begin at the start."""
    tree_width: int = 2
    """Children of a fork."""
    tree_forks: int = 1
    """Forks along an episode; 0: none, and all of a group are roots."""
    tree_where: Literal["even", "uncertain"] = "even"
    """Forks at depths that cut the mean episode into equal parts, or where a head that learns along the way
    is unsure of success."""
    tree_prior: float = 2.0
    """Weight of the baseline before a fork against one child's value in the baseline after it."""
    prune: float = 0.0
    """With tree: mean share of episodes that go on past the point where the others are stopped; 0: none
    is."""
    prune_at: float = 0.4
    """That point, as a share of the mean episode."""
    prune_rule: Literal["certain", "arrol"] = "certain"
    """Stop where success or failure is certain, or ARRoL's rule, which stops likely successes."""
    bc_coef: float = 0.0
    """Weight of the supervised loss on the demonstrations, added to every update."""

    def __post_init__(self) -> None:
        in_range("rl.decisions", self.decisions, int(self.advantage == "gae"), 10**6)
        in_range("rl.group", self.group, 2, 10**5)
        if self.advantage == "mc_grpo" and self.group % 2 == 0:
            raise UserError(
                f"rl.advantage mc_grpo has a median for baseline: rl.group must be odd, got {self.group}; "
                f"use {self.group - 1 if self.group > 2 else 3} or {self.group + 1 if self.group > 2 else 5}"
            )
        in_range("rl.allocate_most", self.allocate_most, 2, 10**4)
        choose("rl.ada_rule", self.ada_rule, ("balance", "positive"))
        kinds = ALLOCATIONS[choose("rl.allocate", self.allocate, tuple(ALLOCATIONS))]
        if kinds and self.advantage not in kinds:
            raise UserError(
                f"rl.allocate {self.allocate} goes with rl.advantage {' or '.join(kinds)}, got "
                f"{self.advantage}"
            )
        in_range("rl.candidates", self.candidates, 0, 10**5)
        choose("rl.candidates_by", self.candidates_by, CHEAPER)
        in_range("rl.candidates_steps", self.candidates_steps, 1, 1000)
        if self.candidates and (self.advantage not in ANY_SIZE or self.allocate != "fixed"):
            raise UserError(
                f"rl.candidates goes with rl.advantage {' or '.join(ANY_SIZE)} and rl.allocate fixed, got "
                f"{self.advantage} and {self.allocate}"
            )
        if self.candidates % self.group or self.candidates == self.group:
            raise UserError(
                f"rl.candidates must be a multiple of rl.group {self.group}, twice as many or more, got "
                f"{self.candidates}"
            )
        if not any(named_numbers("rl.rewards", self.rewards, REWARDS).values()):
            raise UserError(
                "rl.rewards must name a reward with a weight that is not 0, for example success=1,speed=0.5"
            )
        named_numbers("rl.flawed", self.flawed, MEASURES)
        in_range("rl.flaw_penalty", self.flaw_penalty, 0, 2)
        if self.flawed and (self.advantage in ("gae", "gdpo", "tree") or self.allocate != "fixed"):
            raise UserError(
                "rl.flawed changes the outcome that a group is compared by: it goes with rl.advantage grpo, "
                f"dr_grpo, rloo, mc_grpo, opob, poise or istar, and without rl.allocate, got {self.advantage}"
            )
        in_range("rl.bc_coef", self.bc_coef, 0, 1e6)
        in_range("rl.gamma", self.gamma, 0, 1, open_low=True)
        for name, low, high in (
            ("tree_width", 2, 100),
            ("tree_forks", 0, 1000),
            ("tree_prior", 0, 1e6),
            ("prune", 0, 1),
            ("prune_at", 0, 1),
        ):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        in_range(
            "rl.tree_roots (<= group)", self.tree_roots, 1, 10**5 if self.advantage != "tree" else self.group
        )
        if self.prune and self.advantage != "tree":
            raise UserError(
                "rl.prune goes with rl.advantage tree, whose estimate it leaves without bias (tree_forks 0 "
                f"for no forks), got {self.advantage}"
            )
