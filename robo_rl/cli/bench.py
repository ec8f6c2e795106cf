"""`robo_rl bench sim|policy|train|sync|async|control|bridge|scale|wm|gpu|serve`: ours, the limit and the
peers side by side."""

import json
import os
import sys

from robo_rl.bench.options import BenchOptions


def run(args: BenchOptions) -> int:
    """Measure; print each row when it is known, or JSON at the end."""
    # read when NumPy is imported: one robot gets one thread
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from robo_rl.bench.run import run_bench, save
    from robo_rl.log import quiet_stdout

    with quiet_stdout() as out:

        def say(text: str) -> None:
            print(text, file=sys.stderr if args.json else out, flush=True)

        document = run_bench(args, say)
        if args.save:
            say(f"written: {save(document)}")
    if args.json:
        print(json.dumps(document, indent=1))
    return 0
