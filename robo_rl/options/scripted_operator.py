"""Options of a scripted operator."""

from dataclasses import dataclass

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class ScriptedOperatorOptions:
    """How a scripted operator behaves (`robo_rl/human/operators.py`)."""

    reaction_time: float = 0.4
    """Median time from deciding to acting [s]; log-normal with sigma 0.3."""
    slip_rate: float = 0.1
    """Slips at the controls [1/s]; for 0.25 s the person then moves the wrong way."""
    fatigue: float = 0.0
    """Share by which reaction time and error grow per minute [1/min] already spent at the controls, in this
    episode and before."""
    notice_time: float = 0.5
    """Time that the policy's commands must stay wrong [s] before the person decides to help."""
    disagreement: float = 0.45
    """RMS difference to the person's own command (over axes, 0 .. 2) that counts as wrong."""
    late_share: float = 0.4
    """Share of the episode's limit after which the person helps, whatever the policy does, and stays; 1:
    never."""
    agree_time: float = 0.5
    """Time that policy and person must agree [s] before the person hands back."""
    least_time: float = 0.5
    """Shortest help [s]."""
    recovery_time: float = 0.0
    """Longest time that the person backs out [s] before correcting (RaC); 0: correct at once."""
    stay_low: bool = False
    """Correct from where the failure is: the person does not raise the hand before the first sub-task is
    done, as the expert would."""
    until_subtask: bool = False
    """Keep the controls until one more sub-task is done than when correcting began (rac), whether they agree
    or not."""
    until_end: bool = False
    """Keep the controls to the end of the episode."""
    attended_share: float = 1.0
    """Share of the episodes that the person watches; in the others nobody comes."""
    leave_after: float = 0.0
    """Time at the controls [min], over all robots, after which the person has gone for good (correct: until
    the next round); 0: never."""

    def __post_init__(self) -> None:
        for name, high in (
            ("reaction_time", 60),
            ("slip_rate", 100),
            ("fatigue", 100),
            ("notice_time", 60),
            ("disagreement", 2),
            ("late_share", 1),
            ("agree_time", 60),
            ("least_time", 60),
            ("attended_share", 1),
            ("recovery_time", 60),
            ("leave_after", 1e6),
        ):
            in_range(f"scripted_operator.{name}", getattr(self, name), 0, high)
