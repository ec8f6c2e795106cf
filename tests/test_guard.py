"""A whole training run whose processes are killed by hand: it goes on, and ends as it should."""

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from commands import TINY, TINY_REPLAY, Command, robo_rl

from robo_rl import checkpoint
from robo_rl.errors import LostDaemon, UserError
from robo_rl.journal import ADD, Journal
from robo_rl.replay import HUMAN, PAUSE
from robo_rl.runtime import snapshot
from robo_rl.signals import StopSignal

ROOT = Path(__file__).parent.parent

RUN = [w for w in TINY if w not in ("--workers", "0")]


def start(tmp_path, *more):
    code = "from robo_rl.cli import main; main()"
    argv = [
        sys.executable,
        "-c",
        code,
        "train",
        *RUN,
        "--steps",
        "12000",
        "--workers",
        "2",
        "--out",
        "run",
        *more,
    ]
    with open(tmp_path / "said", "w") as said:
        return subprocess.Popen(argv, cwd=tmp_path, stdout=said, stderr=said)


def until(condition, process, tmp_path, seconds=600):  # a bound on hanging, not on slowness
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "said").read_text()
        time.sleep(0.02)
    return found


def steps(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
        if path.exists()
        else []
    )
    return [r["step"] for r in rows if r["stage"] == "rl" and "staleness/max" in r]


def newest(tmp_path):
    """The last of `steps`, without reading the whole file over and over beside the run that is watched."""
    with open(tmp_path / "run" / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        lines = file.read().splitlines(True)[1:]
    return next(
        r["step"]
        for line in reversed(lines)
        if line.endswith(b"\n")
        for r in [json.loads(line)]
        if r["stage"] == "rl" and "staleness/max" in r
    )


def set_steps(tmp_path, steps, **more):
    """What a run that goes on reads as its --steps and other options."""
    path = tmp_path / "run" / "run.json"
    run = json.loads(path.read_text())
    run["config"] |= {"steps": steps, **more}
    path.write_text(json.dumps(run))


def workers(tmp_path):
    """Worker processes that are alive, as they signed in."""
    signed = map(snapshot.signed, (tmp_path / "run" / "flight").glob("worker*.pid"))
    return [process for process in signed if process is not None]


def test_a_run_whose_learner_and_workers_are_killed_goes_on_to_its_end(tmp_path):
    argv = ("train", *RUN, "--steps", 10_000_000, "--workers", 2, "--out", "run")
    command, run = Command(tmp_path, argv, guarded=True), tmp_path / "run"
    try:
        command.until(lambda: len(steps(tmp_path)) > 2 and len(checkpoint.checkpoints(run)) > 1)
        (learner,) = psutil.Process(command.process.pid).children()
        for victim in workers(tmp_path)[:1]:
            victim.kill()
        command.until(lambda: learner.is_running() and len(workers(tmp_path)) == 2)
        told = robo_rl(tmp_path, "workers", "run", "3")
        assert told.out.startswith("2 -> 3 workers"), told
        command.until(lambda: len(workers(tmp_path)) == 3)
        assert robo_rl(tmp_path, "workers", "run").out == "3 workers\n"
        end = newest(tmp_path) + 2000  # of what goes on: as long as the test needs
        set_steps(tmp_path, end)
        learner.kill()
        result = command.wait()
    finally:
        command.process.kill()
    said = result.out + result.err
    assert result.code == 0 and "done in" in said, result
    assert "the learner was ended by SIGKILL; going on from the last checkpoint" in said, result
    assert (run / "evals" / "final.json").exists() and not (run / "flight").exists()
    seen = steps(tmp_path)
    assert seen == sorted(seen) and end <= seen[-1] < end + 2000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills_of_workers_server_and_learner_at_random_lose_nothing(tmp_path):
    rng, recoveries, kills, learners, last = random.Random(5), [], 0, 0, []
    process = start(
        tmp_path, "--steps", "10000000", "--server", "--max-staleness", "2", "--eval-every", "20000"
    )
    run, count = tmp_path / "run", int(os.environ.get("KILLS", 200))

    def victims():
        """{name: process}: the learner every tenth time, else one or two of workers and server, not the same
        twice in a row: the others may have made what was learnt since, and one that dies six times without
        finishing anything ends the run."""
        if len(recoveries) % 10 == 9:
            return dict(zip(["learner"], psutil.Process(process.pid).children(), strict=False))
        signed = {
            p.stem: int(p.read_text().split()[0])
            for p in (run / "flight").glob("*.pid")
            if p.stem not in last
        }
        alive = {name: psutil.Process(pid) for name, pid in signed.items() if psutil.pid_exists(pid)}
        return {name: alive[name] for name in rng.sample(sorted(alive), min(len(alive), rng.choice((1, 2))))}

    try:
        until(lambda: len(steps(tmp_path)) > 3 and len(checkpoint.checkpoints(run)) > 1, process, tmp_path)
        while kills < count:
            time.sleep(rng.random() * 0.1)
            before, began, died = newest(tmp_path), time.monotonic(), []
            # one left just now, or signs in
            with contextlib.suppress(psutil.Error, FileNotFoundError, IndexError):
                for name, victim in victims().items():
                    victim.kill()
                    died.append(name)
            if not died:
                continue
            last, kills, learners = died, kills + len(died), learners + ("learner" in died)
            # more was learnt than ever before
            until(lambda before=before: newest(tmp_path) > before, process, tmp_path)
            recoveries.append(time.monotonic() - began)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    seen = steps(tmp_path)
    mean = sum(recoveries) / len(recoveries)
    print(
        f"\n{kills} kills, {learners} of them of the learner: more learnt than before after {mean:.2f} s on "
        f"average, {max(recoveries):.2f} s at most"
    )
    assert learners > count / 20
    # every batch once, none left out
    assert all(0 < b - a < 3 * (seen[1] - seen[0]) for a, b in itertools.pairwise(seen))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_of_actor_and_learner_beside_a_person_lose_no_correction(tmp_path):
    rng, count, learners = random.Random(6), int(os.environ.get("KILLS", 50)), 0
    argv = [
        sys.executable,
        "-c",
        "from robo_rl.cli import main; main()",
        "train",
        *TINY_REPLAY[:-3],
        "--no-video",
        "--workers",
        "1",
        "--algo",
        "hil_serl",
        "--steps",
        "10000000",
        "--eval-every",
        "10000000",
        "--rl.operator",
        "scripted",
        "--rl.scripted-operator.notice-time",
        "0.1",
        "--out",
        "run",
    ]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(argv, cwd=tmp_path, stdout=said, stderr=said)
    run, pid = tmp_path / "run", tmp_path / "run" / "flight" / "actor.pid"

    def made(name: str) -> tuple[int, int]:
        """(control steps, those a person chose) in the journal of a store; the last may be being written."""
        rows = [(n, body) for kind, n, body in Journal(run / "replay" / name, 10**9).read() if kind == ADD]
        human = sum(
            int(
                (np.frombuffer(body[-3 * n : -2 * n], np.uint8) == HUMAN)[
                    np.frombuffer(body[-2 * n : -n], np.uint8) > PAUSE
                ].sum()
            )
            for n, body in rows
        )
        return sum(n for n, _ in rows), human

    try:
        until(lambda: pid.exists() and made("online")[1] > 0, process, tmp_path)
        for _ in range(count):
            time.sleep(rng.random() * 0.3)
            learner, before = rng.random() < 0.2, (made("online"), made("corrections"))
            if learner:
                victims = psutil.Process(process.pid).children()
            else:
                victims = (
                    [psutil.Process(p) for p in [int(pid.read_text().split()[0])] if psutil.pid_exists(p)]
                    if pid.exists()
                    else []
                )
            for victim in victims[:1]:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
            learners += learner
            until(lambda before=before: made("online")[0] > before[0][0] + 16, process, tmp_path)
            after = made("online"), made("corrections")
            # nothing that was there is gone
            assert all(a[0] >= b[0] and a[1] >= b[1] for a, b in zip(after, before, strict=True))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    online, corrections = made("online"), made("corrections")
    print(
        f"\n{count} kills, {learners} of them of the learner: {online[0]} control steps, {online[1]} of them "
        "a person's"
    )
    # a kill between the two writes: one step of each env
    assert learners >= count // 20 and 0 <= online[1] - corrections[1] <= 4 * count
    assert online[1] > 50 and not psutil.pid_exists(
        int(pid.read_text().split()[0]) if pid.exists() else 2**22 + 1
    )


# to the guard alone, as `kill` does; to both, as a terminal does
@pytest.mark.parametrize("send", (os.kill, os.killpg))
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_what_the_guard_is_told_the_run_hears_once(send, number):
    code = """
import time
from robo_rl.experiment.supervise import guarded
from robo_rl.signals import StopSignal

def run(tell):
    with StopSignal() as stop:
        print("ready", flush=True)
        end = time.monotonic() + 20
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)  # saving
        raise SystemExit(stop.code)

raise SystemExit(guarded(run, None))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"ready\n"
    send(process.pid, number)
    assert process.wait(30) == 128 + number
    process.stdout.close()


def test_a_guard_that_is_told_before_it_listens_passes_it_on():
    code = """
import os, signal, time
from robo_rl.experiment.supervise import guarded
from robo_rl.signals import StopSignal

fork = os.fork

def late():  # a busy machine: the parent runs half a second after its child
    child = fork()
    if child:
        time.sleep(0.5)
    return child
os.fork = late

def run(tell):
    with StopSignal() as stop:
        os.kill(os.getppid(), signal.SIGTERM)
        end = time.monotonic() + 20
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        raise SystemExit(stop.code)

raise SystemExit(guarded(run, None))
"""
    assert (
        subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, timeout=60).returncode
        == 128 + signal.SIGTERM
    )


def test_the_guard_gives_up_on_a_learner_that_dies_again_and_again_without_a_new_checkpoint(tmp_path):
    code = """
import os, pathlib, signal, sys
from robo_rl.experiment import supervise as guard
guard.RESTARTS = 3
here = pathlib.Path(sys.argv[1])

def die(folder):
    lives = len(list(here.glob("life*")))
    (here / f"life{lives}").touch()
    if lives < 5:  # as many as get something done
        (here / "checkpoints" / f"step_{lives}").mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGKILL)

def first(tell):
    tell(here)
    die(here)

raise SystemExit(guard.guarded(first, die))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 128 + signal.SIGKILL and "go on with: robo_rl train --resume" in done.stderr, (
        done
    )
    assert len(list(tmp_path.glob("life*"))) == 5 + 3


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
@pytest.mark.parametrize("workers", [2, 0])
def test_a_run_of_two_learners_of_which_one_is_killed_goes_on_and_is_resumed_with_one(workers, tmp_path):
    process = start(tmp_path, "--learners", "2", "--steps", "10000000", "--workers", str(workers))
    try:
        until(
            lambda: len(steps(tmp_path)) > 2 and len(checkpoint.checkpoints(tmp_path / "run")) > 1,
            process,
            tmp_path,
        )
        os.kill(int((tmp_path / "run" / "ranks" / "learner1.pid").read_text().split()[0]), signal.SIGKILL)
        until(
            lambda: "going on from the last checkpoint" in (tmp_path / "said").read_text(), process, tmp_path
        )
        before = len(steps(tmp_path))
        until(lambda: len(steps(tmp_path)) > before + 2, process, tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, (tmp_path / "said").read_text()
    finally:
        process.kill()
    seen = steps(tmp_path)
    set_steps(tmp_path, seen[-1] + 2000, learners=1)
    assert robo_rl(tmp_path, "train", "--resume", "run").code == 0
    assert steps(tmp_path)[-1] >= seen[-1] + 2000


SIGNED = """
import sys, time
from pathlib import Path
from robo_rl.runtime import snapshot
from robo_rl.signals import StopSignal
with snapshot.at_work(Path(sys.argv[1]), "worker0"):
    print("signed in", flush=True)
    time.sleep(60)
"""


def test_the_workers_of_a_run_are_ended_from_its_own_folder_and_never_from_a_copy(tmp_path):
    """A copied run folder holds the pids of the original's workers, which are alive and at work for it."""
    flight = tmp_path / "run" / "flight"
    flight.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNED, str(flight)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout.readline() == "signed in\n"
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert snapshot.evict(tmp_path / "copy" / "flight") == 0 and process.poll() is None
        pid = flight / "worker0.pid"
        words = pid.read_text().split()
        # when it began is no date: those move when the system's clock is set
        assert words[1] == Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        # a pid that came again, another machine, another folder
        for i, other in ((1, "15"), (2, "another-boot"), (3, "1:1")):
            pid.write_text(" ".join(words[:i] + [other] + words[i + 1 :]))
            assert snapshot.evict(flight) == 0 and process.poll() is None
        pid.write_text(" ".join(words))
        (tmp_path / "run").rename(tmp_path / "moved")  # the same folder under another name
        assert snapshot.evict(tmp_path / "moved" / "flight") == 1 and not psutil.pid_exists(process.pid)
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.parametrize("code", [1, 7])
def test_a_learner_that_a_library_ends_goes_on_from_its_checkpoint_and_one_that_ends_by_itself_does_not(
    tmp_path, code
):
    script = """
import os, pathlib, sys
from robo_rl.experiment.supervise import guarded
here, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def first(tell):
    tell(here)
    os._exit(code)  # past every handler

def again(folder):
    assert folder == here.resolve()
    (here / "again").touch()
    raise SystemExit(code)

raise SystemExit(guarded(first, again))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code and (tmp_path / "again").exists()
    assert f"ended by a library with exit status {code}" in done.stderr and done.stderr.count("going on") == 1


@pytest.mark.parametrize("where", ["learner", "restarted learner"])
def test_an_interrupt_that_no_learner_handles_says_how_the_run_goes_on(tmp_path, where):
    script = """
import os, pathlib, signal, sys, time
from robo_rl.cli import main
from robo_rl.cli import train
from robo_rl.experiment import supervise
here, where = pathlib.Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def press():  # before it handles signals itself
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)

def first(tell):
    tell(here)
    if where == "learner":
        press()
    os.kill(os.getpid(), signal.SIGKILL)

train.run_guarded = lambda config: supervise.guarded(first, lambda folder: press())
sys.argv = ["robo_rl", "train"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), where],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 130
    said = done.stderr.splitlines()[-1]
    assert said == f"robo_rl: interrupted; go on with: robo_rl train --resume {tmp_path}", done


def test_a_learner_that_cannot_go_on_after_a_library_ended_it_says_how_to_later(tmp_path):
    script = """
import os, pathlib, sys
from robo_rl.experiment.supervise import guarded
here = pathlib.Path(sys.argv[1])

def first(tell):
    tell(here)
    os._exit(1)

def again(folder):
    print("robo_rl: cannot join", file=sys.stderr)
    raise SystemExit(2)

raise SystemExit(guarded(first, again))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"robo_rl: cannot join\nrobo_rl: then go on with: robo_rl train --resume {tmp_path.resolve()}\n"
    )


def test_a_learner_whose_simulator_is_killed_says_so_in_one_line_and_goes_on_from_its_checkpoint(tmp_path):
    script = """
import pathlib, sys
from robo_rl.errors import LostDaemon
from robo_rl.experiment.supervise import guarded
here = pathlib.Path(sys.argv[1])

def first(tell):
    tell(here)
    raise LostDaemon("worker 1 of 2 was killed.\\nIt last printed: x")

raise SystemExit(guarded(first, lambda folder: 0 if folder == here.resolve() else 3))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line] == [
        "robo_rl: worker 1 of 2 was killed. It last printed: x",
        "the learner was ended by the loss of that process; going on from the last checkpoint (restart 1)",
    ]


def test_a_worker_that_lost_its_simulator_has_an_error_and_one_with_a_mistake_that_alone():
    assert snapshot.last_words(LostDaemon("gone")) == ("error", "gone", "")  # its pool starts another
    assert snapshot.last_words(UserError("wrong")) == ("mistake", "wrong", "")  # which ends the run


class InterruptedStream(io.RawIOBase):
    """A stream, in the middle of whose first write a signal comes."""

    def __init__(self):
        self.written = b""

    def writable(self):
        return True

    def write(self, data):
        if not self.written:
            self.written = bytes(data)
            signal.raise_signal(signal.SIGINT)
        return len(data)


def test_a_signal_in_the_middle_of_a_line_stops_a_run_as_any_other(capfd):
    stream = InterruptedStream()
    stderr = io.TextIOWrapper(io.BufferedWriter(stream), line_buffering=True)
    with contextlib.redirect_stderr(stderr), StopSignal() as stop:
        print("a line", file=sys.stderr)
    assert stream.written == b"a line\n" and stop.asked == signal.SIGINT
    assert "a checkpoint is saved" in capfd.readouterr().err


READER_IS_GONE = """
import os, signal, sys
from robo_rl.signals import StopSignal
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print("more", file=sys.stderr, flush=True)
    print(stop.asked)
"""


def test_a_run_that_is_stopped_goes_on_to_save_where_nobody_reads_what_it_says():
    done = subprocess.run([sys.executable, "-c", READER_IS_GONE], capture_output=True, text=True)
    assert done.returncode == 0, done
