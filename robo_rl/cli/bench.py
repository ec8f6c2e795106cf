"""`robo_rl bench sim|policy|train|sync|async|control|bridge|scale|wm`: ours, the limit and a peer side by side in one run.

Ours, the limit and the peer take turns in short slices, so that other load on the machine meets all of them; a ratio
is the median of the ratios of neighbouring slices. Ratios carry over to other machines, absolute figures do not.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Literal

import tyro

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure our speed against the physical limit and a peer, in one run."""

    what: tyro.conf.Positional[Literal["sim", "policy", "train", "sync", "async", "control", "bridge", "scale", "wm"]]
    """sim: simulators and rendering; policy: sampling, re-scoring, one robot; train: RL end to end;
    sync: weights from the learner to the workers; async: workers beside the learner against taking turns;
    control: the arm's control law and its 1 kHz loop; bridge: DDS and how chunks join;
    scale: the scheduler on paper, up to thousands of GPUs;
    wm: a world model as an env against the simulator it stands for."""
    seconds: float = 10.0
    """Time for each row, about; peers and set-up come on top."""
    task: str = ""
    """Measure rows of this task alone, for example pick_cube or HalfCheetah-v5."""
    envs: int = 0
    """N of every row; 0: as in the README."""
    quick: bool = False
    """A tenth of the time and fewer peer settings, for a first look."""
    peers: bool = True
    """Measure the peers that are installed too (pip install 'robo_rl[bench]' for Stable-Baselines3)."""
    json: bool = False
    """Print one JSON document and nothing else to standard output."""

    def __post_init__(self) -> None:
        in_range("--seconds", self.seconds, 0, 3600, open_low=True)
        in_range("--envs", self.envs, 0, 10**5)

    @property
    def slice(self) -> float:
        """Seconds for each row."""
        return self.seconds / 10 if self.quick else self.seconds


def run(args: Bench) -> int:
    """Measure and print a table, or JSON."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported: one robot gets one thread
    from robo_rl.cli.bench_rows import Report, table
    report = Report(lambda text: print(text, file=sys.stderr, flush=True))
    with quiet_stdout():
        if args.what == "sim":
            from robo_rl.cli.bench_sim import measure
        elif args.what == "policy":
            from robo_rl.cli.bench_policy import measure
        elif args.what == "sync":
            from robo_rl.cli.bench_sync import measure
        elif args.what == "scale":
            from robo_rl.cli.bench_scale import measure
        elif args.what == "wm":
            from robo_rl.cli.bench_wm import measure
        elif args.what == "async":
            from robo_rl.cli.bench_async import measure
        elif args.what == "control":
            from robo_rl.cli.bench_control import measure
        elif args.what == "bridge":
            from robo_rl.cli.bench_bridge import measure
        else:
            from robo_rl.cli.bench_train import measure
        before = machine()
        measure(args, report)
    document = {"bench": args.what, "options": asdict(args), "machine": before, "load_after": os.getloadavg()[0],
                "rows": [asdict(r) for r in report.rows], "skipped": report.skipped}
    print(json.dumps(document, indent=1) if args.json else table(document))
    return 0


def machine() -> dict:
    """What the figures depend on; a load above 0 means that others were measured too."""
    from robo_rl.cli.command import versions
    from robo_rl.cli.feeds import cores
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    return {"cpu": model, "cores": cores(), "load": os.getloadavg()[0], "versions": versions()}


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send everything that libraries and child processes print to standard output to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
