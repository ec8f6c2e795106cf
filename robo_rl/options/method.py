"""What all online methods have in common."""

from dataclasses import dataclass
from typing import Literal

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of an online RL method."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(MethodOptions):
    """What the loop of the on-policy methods must know of any of them (`robo_rl/experiment/onpolicy.py`)."""

    decisions: int = 32
    """T: decisions per env and rollout (0: whole episodes, as group advantages need)."""
    gamma: float = 0.99
    """Per decision-step discount: of one control step; a chunk is discounted by gamma^E."""
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "opob"] = "gae"
    """GAE on a critic, or relative to the group of a start; opob: over the baseline of least variance (VCPO), which weighs
    an episode by how likely it is now and by its decisions."""
    group: int = 8
    """G: episodes per start with a group advantage."""
    bc_coef: float = 0.0
    """Weight of the supervised loss on the demonstrations, added to every update."""

    def __post_init__(self) -> None:
        in_range("rl.decisions", self.decisions, int(self.advantage == "gae"), 10**6)
        in_range("rl.group", self.group, 2, 10**5)
        in_range("rl.bc_coef", self.bc_coef, 0, 1e6)
        in_range("rl.gamma", self.gamma, 0, 1, open_low=True)
