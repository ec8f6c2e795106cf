"""`robo_rl bench sim|policy|train|sync|async|control|bridge|scale|wm|gpu|serve`: ours, the limit and the
peers side by side."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO

from robo_rl.bench.options import BenchOptions


def run(args: BenchOptions) -> int:
    """Measure; print each row when it is known, or JSON at the end."""
    # read when NumPy is imported: one robot gets one thread
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from robo_rl.bench.run import run_bench, save

    with quiet_stdout() as out:

        def say(text: str) -> None:
            print(text, file=sys.stderr if args.json else out, flush=True)

        document = run_bench(args, say)
        if args.save:
            say(f"written: {save(document)}")
    if args.json:
        print(json.dumps(document, indent=1))
    return 0


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
