"""Options of RECAP."""

from dataclasses import dataclass

from robo_rl.errors import UserError, choose, in_range
from robo_rl.options.method import MethodOptions

SOURCES = ("policy", "expert", "human", "teacher", "unknown")  # who may have chosen a recorded action


@dataclass(frozen=True, kw_only=True)
class RecapOptions(MethodOptions):
    """RECAP: values of recorded episodes, and a policy that is told which actions were better
    (`robo_rl/algos/recap.py`)."""

    data: str = ""
    """Folders of more data sets beside --demos, with commas between: rollouts, failures too, and
    corrections."""
    rounds: int = 0
    """Rounds after the data that is there: each records --rl.episodes of the policy, then labels and learns
    from everything anew."""
    episodes: int = 100
    """Episodes that a round records."""
    updates: int = 2000
    """Optimizer steps of the policy on the labelled data, of each round; their batch and rate are those of
    --bc."""
    positive: float = 0.4
    """Share of the frames of a task whose advantage is called positive: those of the largest (epsilon of the
    paper), no more than it has in successes; 1: all."""
    lookahead: int = 0
    """N: control steps after which the advantage takes the value of what was come to; 0: the return of the
    whole episode."""
    force: tuple[str, ...] = ("human",)
    """Sources of actions that are called positive whatever their advantage: human (corrections), expert,
    teacher, policy, unknown."""
    drop: float = 0.3
    """Share of a batch that is not told the advantage, which guidance needs."""
    fail: float = 4.0
    """Cost of a failure, in longest episodes of the task (C_fail of the paper)."""
    bins: int = 201
    """Bins of the values from -1 to 0."""
    folds: int = 4
    """Value functions, each of which judges the episodes that it did not learn from; 1: one that learns from
    all, as in the paper."""
    value_updates: int = 1000
    """Optimizer steps of each value function."""
    value_batch: int = 256
    """Frames of such a step."""
    value_lr: float = 1e-3
    """Their learning rate (Adam)."""
    value_hidden: int = 128
    """Width of a value function, which reads what the supervised policy's trunk pools."""
    value_layers: int = 2
    """Hidden layers of a value function."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rounds", 0, 10**4),
            ("episodes", 1, 100_000),
            ("updates", 1, 10**8),
            ("lookahead", 0, 10**7),
            ("fail", 0, 1e6),
            ("bins", 2, 10**5),
            ("folds", 1, 100),
            ("value_updates", 1, 10**7),
            ("value_batch", 1, 10**6),
            ("value_hidden", 8, 8192),
            ("value_layers", 1, 32),
        ):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        for name in ("positive", "value_lr"):
            in_range(f"rl.{name}", getattr(self, name), 0, 1, open_low=True)
        in_range("rl.drop", self.drop, 0, 1, open_high=True)
        for name in self.force:
            choose("rl.force", name, SOURCES)
        if len(set(self.force)) < len(self.force):
            raise UserError(f"rl.force names a source twice: {', '.join(self.force)}")
