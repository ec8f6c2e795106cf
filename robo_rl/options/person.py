"""Options of a scripted person."""

from dataclasses import dataclass

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class Person:
    """How a scripted person behaves (`robo_rl/human/operators.py`); times in seconds."""

    reaction: float = 0.4
    """Median time from deciding to acting; log-normal with sigma 0.3."""
    error: float = 0.1
    """Slips per second at the controls; for 0.25 s the person then moves the wrong way."""
    fatigue: float = 0.0
    """Share by which reaction time and error grow per minute already spent at the controls in this episode and before."""
    notice: float = 0.5
    """Time the policy's commands must stay wrong before the person decides to help."""
    gate: float = 0.45
    """RMS difference to the person's own command (over axes, 0 .. 2) that counts as wrong."""
    late: float = 0.4
    """Share of the episode's limit after which the person helps, whatever the policy does, and stays; 1: never."""
    agree: float = 0.5
    """Time policy and person must agree before the person hands back."""
    least: float = 0.5
    """Shortest help."""
    recovery: float = 0.0
    """Longest time the person backs out before correcting (RaC); 0: correct at once."""
    subtask: bool = False
    """Keep the controls until one more sub-task is done than when correcting began (rac), whether they agree or not."""
    finish: bool = False
    """Keep the controls to the end of the episode."""
    attend: float = 1.0
    """Share of the episodes that the person watches; in the others nobody comes."""
    leave: float = 0.0
    """Minutes at the controls, over all robots, after which the person has gone for good (correct: until the next round); 0: never."""

    def __post_init__(self) -> None:
        for name, high in (("reaction", 60), ("error", 100), ("fatigue", 100), ("notice", 60), ("gate", 2), ("late", 1),
                           ("agree", 60), ("least", 60), ("attend", 1), ("recovery", 60), ("leave", 1e6)):
            in_range(f"person.{name}", getattr(self, name), 0, high)
