"""Options of a scripted person."""

from dataclasses import dataclass

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class Person:
    """How a scripted person behaves (`robo_rl/human/operators.py`)."""

    reaction: float = 0.4
    """Median time from deciding to acting [s]; log-normal with sigma 0.3."""
    error: float = 0.1
    """Slips at the controls [1/s]; for 0.25 s the person then moves the wrong way."""
    fatigue: float = 0.0
    """Share by which reaction time and error grow per minute [1/min] already spent at the controls, in this episode and before."""
    notice: float = 0.5
    """Time that the policy's commands must stay wrong [s] before the person decides to help."""
    gate: float = 0.45
    """RMS difference to the person's own command (over axes, 0 .. 2) that counts as wrong."""
    late: float = 0.4
    """Share of the episode's limit after which the person helps, whatever the policy does, and stays; 1: never."""
    agree: float = 0.5
    """Time that policy and person must agree [s] before the person hands back."""
    least: float = 0.5
    """Shortest help [s]."""
    recovery: float = 0.0
    """Longest time that the person backs out [s] before correcting (RaC); 0: correct at once."""
    subtask: bool = False
    """Keep the controls until one more sub-task is done than when correcting began (rac), whether they agree or not."""
    finish: bool = False
    """Keep the controls to the end of the episode."""
    attend: float = 1.0
    """Share of the episodes that the person watches; in the others nobody comes."""
    leave: float = 0.0
    """Time at the controls [min], over all robots, after which the person has gone for good (correct: until the next round); 0: never."""

    def __post_init__(self) -> None:
        for name, high in (("reaction", 60), ("error", 100), ("fatigue", 100), ("notice", 60), ("gate", 2), ("late", 1),
                           ("agree", 60), ("least", 60), ("attend", 1), ("recovery", 60), ("leave", 1e6)):
            in_range(f"person.{name}", getattr(self, name), 0, high)
