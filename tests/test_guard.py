"""A whole training run whose processes are killed by hand: it goes on, and ends as it should."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from commands import TINY, robo_rl

from robo_rl import checkpoint

RUN = [w for w in TINY if w not in ("--workers", "0")]


def start(tmp_path, *more):
    code = "from robo_rl.cli import main; main()"
    argv = [sys.executable, "-c", code, "train", *RUN, "--steps", "12000", "--workers", "2", "--out", "run", *more]
    with open(tmp_path / "said", "w") as said:
        return subprocess.Popen(argv, cwd=tmp_path, stdout=said, stderr=said)


def until(condition, process, tmp_path, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "said").read_text()
        time.sleep(0.02)
    return found


def steps(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []
    return [r["step"] for r in rows if r["stage"] == "rl" and "stal/max" in r]


def workers(process):
    """Worker processes: those that map the slots."""
    out = []
    for p in psutil.Process(process.pid).children(recursive=True):
        try:
            if any("slots.bin" in m.path for m in p.memory_maps()) and "forkserver" in " ".join(p.cmdline()):
                out.append(p)
        except psutil.Error:
            continue
    return out


def test_a_run_whose_learner_and_workers_are_killed_goes_on_to_its_end(tmp_path):
    process = start(tmp_path, "--steps", "40000")
    try:
        until(lambda: len(steps(tmp_path)) > 2 and len(checkpoint.checkpoints(tmp_path / "run")) > 1, process, tmp_path)
        learner, = psutil.Process(process.pid).children()
        for victim in workers(process)[:1]:
            victim.kill()
        until(lambda: learner.is_running() and len(workers(process)) == 2, process, tmp_path)
        told = robo_rl(tmp_path, "workers", "run", "3")
        assert told.out.startswith("2 -> 3 workers"), told
        until(lambda: len(workers(process)) == 3, process, tmp_path)
        assert robo_rl(tmp_path, "workers", "run").out == "3 workers\n"
        learner.kill()
        assert process.wait(180) == 0, (tmp_path / "said").read_text()
    finally:
        process.kill()
    said = (tmp_path / "said").read_text()
    assert "the learner was ended by SIGKILL; going on from the last checkpoint" in said and "done in" in said
    assert (tmp_path / "run" / "evals" / "final.json").exists() and not (tmp_path / "run" / "flight").exists()
    seen = steps(tmp_path)
    assert seen == sorted(seen) and seen[-1] >= 40000


@pytest.mark.parametrize("send", (os.kill, os.killpg))  # to the guard alone, as `kill` does; to both, as a terminal does
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_what_the_guard_is_told_the_run_hears_once(send, number):
    code = """
import time
from robo_rl.cli.guard import guarded
from robo_rl.cli.train import Stop

def run(tell):
    with Stop() as stop:
        print("ready", flush=True)
        end = time.monotonic() + 20
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)  # saving
        raise SystemExit(stop.code)

raise SystemExit(guarded(run, None))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    assert process.stdout.readline() == b"ready\n"
    send(process.pid, number)
    assert process.wait(30) == 128 + number
    process.stdout.close()


@pytest.mark.slow
def test_if_the_guard_dies_the_run_saves_itself_and_leaves_no_process(tmp_path):
    process = start(tmp_path, "--steps", "10000000")
    until(lambda: len(steps(tmp_path)) > 2, process, tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    meta = checkpoint.read_meta(checkpoint.checkpoints(tmp_path / "run")[-1])
    assert meta["step"] > 0 and not meta["finished"]


@pytest.mark.slow
def test_a_run_of_two_learners_of_which_one_is_killed_goes_on_and_is_resumed_with_one(tmp_path):
    process = start(tmp_path, "--learners", "2", "--steps", "10000000")
    try:
        until(lambda: len(steps(tmp_path)) > 2 and len(checkpoint.checkpoints(tmp_path / "run")) > 1, process, tmp_path)
        os.kill(int((tmp_path / "run" / "ranks" / "learner1.pid").read_text().split()[0]), signal.SIGKILL)
        until(lambda: "going on from the last checkpoint" in (tmp_path / "said").read_text(), process, tmp_path)
        before = len(steps(tmp_path))
        until(lambda: len(steps(tmp_path)) > before + 2, process, tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, (tmp_path / "said").read_text()
    finally:
        process.kill()
    seen, path = steps(tmp_path), tmp_path / "run" / "run.json"
    run = json.loads(path.read_text())
    run["config"] |= {"learners": 1, "steps": seen[-1] + 2000}
    path.write_text(json.dumps(run))
    assert robo_rl(tmp_path, "train", "--resume", "run").code == 0
    assert steps(tmp_path)[-1] >= seen[-1] + 2000
