"""What `robo_rl bench` measures and for how long."""

from dataclasses import dataclass
from typing import Literal

import tyro

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure our speed against a limit and the best peer, in one run."""

    what: tyro.conf.Positional[
        Literal[
            "sim",
            "policy",
            "train",
            "sync",
            "async",
            "control",
            "bridge",
            "scale",
            "wm",
            "gpu",
            "serve",
            "vla",
        ]
    ]
    """sim: simulators and rendering; policy: sampling, re-scoring, one robot; train: RL end to end;
    sync: weights from the learner to the workers; async: workers beside the learner against taking turns;
    control: the arm's control law and its 1 kHz loop; bridge: DDS and how chunks join;
    scale: the scheduler on paper, up to thousands of GPUs;
    wm: a world model as an env against the simulator it stands for;
    gpu: a pi0.5 of full size on one GPU, in --minutes (--twin: the same code at tiny size on the CPU);
    serve: a policy server with 16 clients at once and one after the other;
    vla: an update of PPO with a frozen trunk from stored prefixes, against computing them again."""
    seconds: float = 10.0
    """Time for each row, about; peers and set-up come on top."""
    task: str = ""
    """Measure rows of this task alone, for example pick_cube or HalfCheetah-v5."""
    envs: int = 0
    """N of every row; 0: as in the README."""
    quick: bool = False
    """A tenth of the time, fewer settings of the peers and no compilation, for a first look."""
    peers: bool = True
    """Measure the peers that are installed too (pip install 'robo_rl[bench,envpool]' for all of them)."""
    json: bool = False
    """Print one JSON document and nothing else to standard output; rows go to standard error as they come."""
    save: bool = False
    """Write results/bench-<what>.json below the current folder: every figure with its n, its quartiles, the
    commit, the date, the machine, the command and the files it measures (`robo_rl results page` shows it)."""

    out: str = ""
    """Write the JSON document to this file after every row, so that what was measured outlives what comes
    next."""
    minutes: float = 9.0
    """gpu: for all of it."""
    twin: bool = False
    """gpu: at tiny size on the CPU, in seconds."""

    def __post_init__(self) -> None:
        in_range("--minutes", self.minutes, 0, 1440, open_low=True)
        if self.twin and self.what != "gpu":
            raise UserError(f"--twin is of robo_rl bench gpu, got bench {self.what}")
        in_range("--seconds", self.seconds, 0, 3600, open_low=True)
        in_range("--envs", self.envs, 0, 10**5)

    @property
    def slice(self) -> float:
        """Seconds for each row."""
        return self.seconds / 10 if self.quick else self.seconds
