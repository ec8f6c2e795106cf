"""Options of rounds of correction."""

from dataclasses import dataclass, field
from typing import ClassVar

import tyro

from robo_rl.data.episode import HELP
from robo_rl.errors import choose, in_range
from robo_rl.options import BcOptions, ScriptedOperatorOptions

PROTOCOLS = ("hg_dagger", "rac", "armada", "twin_rl")


@dataclass(frozen=True, kw_only=True)
class CorrectOptions:
    """Practise with help, learn from it, evaluate; several rounds."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Practice": (
            "protocol",
            "operator",
            "checkpoint",
            "rounds",
            "episodes",
            "human_steps",
            "robots",
            "operators",
            "max_steps",
            "rewind",
            "cut",
        ),
        "When the operator is called, and where practice begins": (
            "detector",
            "false_alarms",
            "calibration",
            "twin_starts",
            "twin_trials",
        ),
        "What is learnt from": ("learn_from_successes", "phases", "demo_share"),
        "The run": ("out", "seed", "eval_episodes", "threads", "video", "json"),
    }

    run: tyro.conf.Positional[str]
    """Run folder of the policy that practises."""
    protocol: str = "hg_dagger"
    """hg_dagger: an operator acts until policy and person agree; rac: recovery, then correction until the
    sub-task is done, which ends the episode;
    armada: a failure detector calls one of few operators, who rewind and correct; twin_rl: hg_dagger from
    those starts alone at which the policy fails in a twin, which is the run's own simulator.
    """
    operator: str = "scripted"
    """scripted; console: no practice, one round of learning from the corrections recorded in robo_rl console
    RUN; again after more of them, one more round."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    rounds: int = 3
    """Rounds of practice, refit and evaluation, from 1."""
    episodes: int = 24
    """Episodes of practice per round, from 1."""
    human_steps: int = 0
    """A round lasts until people have helped for so many control steps, however many episodes that takes; 0:
    for --episodes."""
    robots: int = 8
    """Simulated robots that practise at once, from 1."""
    operators: int = 1
    """Operators for all robots, from 1 (armada; elsewhere every robot has one)."""
    detector: str = "float"
    """What calls for help: float, or largest: the largest of the normalised scores of FLOAT, stuck and far,
    which needs twice the successes (armada)."""
    false_alarms: float = 0.1
    """Share of successful episodes, 0 to 0.5, in which the failure detector may request help (armada)."""
    calibration: int = 200
    """Episodes without help before each round that calibrate the failure detector (armada)."""
    twin_starts: int = 200
    """Starts that the policy tries in the twin before each round, 1 to 5000 (twin_rl)."""
    twin_trials: int = 4
    """Trials of each start, from 1; starts with less than half successes are practised, first those that
    succeed at times (twin_rl)."""
    cut: bool | None = None
    """End an episode once the person has corrected and handed back (RaC's second rule); None: only with
    rac."""
    rewind: bool = True
    """Rewind to before the failure (armada; simulators with snapshots)."""
    learn_from_successes: bool | None = None
    """Also learn from the policy's own steps in episodes that succeed without help; None: only with
    armada."""
    phases: tuple[str, ...] = HELP
    """Phases of an intervention to learn from; correction alone is the comparison that RaC makes."""
    demo_share: float = 0.5
    """Share of demonstrations in every batch, 0 to 1."""
    eval_episodes: int = 200
    """Episodes of each evaluation, from 1."""
    max_steps: int = 0
    """Episode limit of practice [control steps]; 0: three times the task's own, for help takes time."""
    seed: int = 0
    """Seed of the starts, the operators, and the policy's and the fit's sampling, 0 to 2000."""
    threads: int = 1
    """Threads of the simulator; 0: one per core."""
    out: str = ""
    """Folder of the result; empty: RUN-<protocol>-s<seed>. An unfinished one is continued."""
    video: bool = True
    """Film the first four episodes of practice of each round; written after the round."""
    json: bool = False
    """Print one JSON document and nothing else."""
    bc: BcOptions = field(default_factory=lambda: BcOptions(updates=4000, lr=5e-4, noises=4))
    scripted_operator: ScriptedOperatorOptions = field(default_factory=ScriptedOperatorOptions)

    def __post_init__(self) -> None:
        choose("protocol", self.protocol, PROTOCOLS)
        choose("operator", self.operator, ("scripted", "console"))
        choose("detector", self.detector, ("float", "largest"))
        for phase in self.phases:
            choose("phases", phase, HELP)
        for name, low, high in (
            ("rounds", 1, 1000),
            ("episodes", 1, 5_000),
            ("human_steps", 0, 10**9),
            ("robots", 1, 4096),
            ("operators", 1, 4096),
            ("false_alarms", 0, 0.5),
            ("demo_share", 0, 1),
            ("max_steps", 0, 10**7),
            ("eval_episodes", 1, 10**6),
            ("twin_starts", 1, 5000),
            ("twin_trials", 1, 1000),
            ("calibration", 1, 10**6),
            ("seed", 0, 2000),
            ("threads", 0, 4096),
        ):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
