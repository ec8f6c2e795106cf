"""A whole process group that is stopped for a while and continued: nobody was silent, so nobody is started
again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from robo_rl.runtime.snapshot import AwakeClock

HERE = Path(__file__).parent
HANG, STOP = 4.0, 6.0  # seconds of silence that are allowed, and for which the group is stopped

WORKERS = f"""
import pathlib, sys, time
from test_runtime import make_learner, processes, train
if __name__ == "__main__":
    learner = make_learner(epochs=1)
    feed = processes(pathlib.Path(sys.argv[1]), learner, 2, 1, hang={HANG})
    end = time.monotonic() + 60
    while not pathlib.Path(sys.argv[1], "enough").exists() and time.monotonic() < end:
        train(learner, feed, 1)
        print(feed.version, feed.pool.restarts, "", flush=True)
    feed.close()
"""

ACTOR = f"""
import pathlib, sys, time
from test_actor import beside
if __name__ == "__main__":
    actor, *_ = beside(pathlib.Path(sys.argv[1]), hang={HANG})
    end = time.monotonic() + 60
    while not pathlib.Path(sys.argv[1], "enough").exists() and time.monotonic() < end:
        actor.collect(actor.policy, lambda: False)
        print(actor.steps, actor.restarts, actor.last.replace(" ", "_").replace("\\n", "|"), flush=True)
    actor.end()
"""


def said(process) -> int:
    """How far it is; nobody was started again."""
    line = process.stdout.readline().split()
    assert line, process.stderr.read()[-2000:]
    assert line[1] == "0", line
    return int(line[0])


@pytest.mark.slow
@pytest.mark.parametrize("script", [pytest.param(WORKERS, id="workers"), pytest.param(ACTOR, id="actor")])
def test_a_process_group_that_is_stopped_for_longer_than_hang_goes_on_without_a_restart(tmp_path, script):
    (tmp_path / "run.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"},
    )
    try:
        said(process)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(STOP)
        os.killpg(process.pid, signal.SIGCONT)
        until, before = time.monotonic() + 3, said(process)
        while said(process) < before + 3 or time.monotonic() < until:
            pass
        (tmp_path / "enough").touch()
        assert process.wait(60) == 0, process.stderr.read()[-2000:]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_gap_counts_as_no_more_than_the_longest():
    times = iter([10.0, 10.5, 71.0, 71.2])
    clock = AwakeClock(1.0, lambda: next(times))
    assert [clock.now() for _ in range(3)] == pytest.approx([0.5, 1.5, 1.7])
