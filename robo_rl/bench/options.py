"""`robo_rl bench sim|policy|train|sync|async|control|bridge|scale|wm`: ours, the limit and the peers side by
side.

Ours, the limit and the peers take turns in every repeat, so that other load on the machine meets all of them;
a ratio is the median of the ratios within a repeat. Ratios carry over to other machines, absolute figures do
not. Rows are printed as they come; `bench_rows` says what a row promises.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import IO, Literal

import tyro

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure our speed against a limit and the best peer, in one run."""

    what: tyro.conf.Positional[
        Literal["sim", "policy", "train", "sync", "async", "control", "bridge", "scale", "wm"]
    ]
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
    """A tenth of the time, fewer settings of the peers and no compilation, for a first look."""
    peers: bool = True
    """Measure the peers that are installed too (pip install 'robo_rl[bench,envpool]' for all of them)."""
    json: bool = False
    """Print one JSON document and nothing else to standard output; rows go to standard error as they come."""

    def __post_init__(self) -> None:
        in_range("--seconds", self.seconds, 0, 3600, open_low=True)
        in_range("--envs", self.envs, 0, 10**5)

    @property
    def slice(self) -> float:
        """Seconds for each row."""
        return self.seconds / 10 if self.quick else self.seconds


def run(args: Bench) -> int:
    """Measure; print each row when it is known, or JSON at the end."""
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # read when NumPy is imported: one robot gets one thread
    from robo_rl.bench.rows import Report
    before = machine()
    with quiet_stdout() as out:
        def say(text: str) -> None:
            print(text, file=sys.stderr if args.json else out, flush=True)
        report = Report(say)
        say(f"{before['cpu']}, {before['cores']} cores, load {before['load']:.1f}" +
            (": the machine is busy, trust the ratios only" if before["load"] > 0.5 else ""))
        if args.what == "sim":
            from robo_rl.bench.sim import measure
        elif args.what == "policy":
            from robo_rl.bench.policy import measure
        elif args.what == "sync":
            from robo_rl.bench.sync import measure
        elif args.what == "scale":
            from robo_rl.bench.scale import measure
        elif args.what == "wm":
            from robo_rl.bench.world_model import measure
        elif args.what == "async":
            from robo_rl.bench.asynchronous import measure
        elif args.what == "control":
            from robo_rl.bench.control import measure
        elif args.what == "bridge":
            from robo_rl.bench.bridge import measure
        else:
            from robo_rl.bench.train import measure
        measure(args, report)
        after = os.getloadavg()[0]
        say(f"load {after:.1f} after")
    document = {"bench": args.what, "options": asdict(args), "machine": before, "load_after": after,
                "rows": [asdict(r) for r in report.rows], "skipped": report.skipped}
    if args.json:
        print(json.dumps(document, indent=1))
    return 0


def machine() -> dict:
    """What the figures depend on; a load above 0 means that others were measured too."""
    from robo_rl.experiment.feeds import cores
    from robo_rl.provenance import versions
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    return {"cpu": model, "cores": cores(), "load": os.getloadavg()[0], "versions": versions()}


@contextmanager
def quiet_stdout() -> Iterator[IO[str]]:
    """Send what libraries and child processes print to standard output to standard error; yields the real
    one."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(saved, "w", closefd=False) as out, redirect_stdout(sys.stderr):
            yield out
    finally:
        os.dup2(saved, 1)
        os.close(saved)
