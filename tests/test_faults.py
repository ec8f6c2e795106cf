"""What a run survives: kill -9 anywhere, signals, a full disk, a second process, torn and damaged files."""

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import HANGS, TINY, Command, forked, robo_rl
from test_checkpoint import build

from robo_rl import checkpoint
from robo_rl.selection import Look

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


class At:
    """Sends this process a signal just before its k-th file operation on a path with `part` in it."""

    def __init__(self, k: int, part: str, number: int = signal.SIGKILL):
        self.k, self.part, self.number = k, part, number

    def __call__(self) -> None:
        seen = 0

        def hook(event: str, args: tuple) -> None:
            nonlocal seen
            if event in FILE_EVENTS and not isinstance(args[0], int) and self.part in os.fsdecode(args[0]):
                seen += 1
                if seen == self.k:
                    os.kill(os.getpid(), self.number)

        sys.addaudithook(hook)


def no_room(part: str):
    """A disk that is full for this process from the first file operation on a path with `part` in it."""

    def hook(event: str, args: tuple) -> None:
        if event in FILE_EVENTS and not isinstance(args[0], int) and part in os.fsdecode(args[0]):
            raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)


def numbers(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without clock times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(("time/", "rate/"))} for row in rows
    ]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit the same weights, optimizers, generators, env states, metrics and evaluations; times may
    differ."""
    names = [p.name for p in checkpoint.checkpoints(a)]
    assert names == [p.name for p in checkpoint.checkpoints(b)] and len(names) >= 3
    for name in names:
        for file in ("policy.safetensors", "train.safetensors", "meta.json"):
            assert (a / "checkpoints" / name / file).read_bytes() == (
                b / "checkpoints" / name / file
            ).read_bytes(), file
    assert numbers(a) == numbers(b)
    evals = [
        {
            p.name: {k: v for k, v in json.loads(p.read_text()).items() if k != "time"}
            for p in (run / "evals").iterdir()
        }
        for run in (a, b)
    ]
    assert evals[0] == evals[1] and "final.json" in evals[0]
    assert not list(b.glob("checkpoints/.*")) and not list(b.rglob(".*.tmp"))


def saves(run: Path) -> list[str]:
    """Folder names of the checkpoints that a finished run made after its evaluations in RL, in order."""
    return [
        checkpoint.name(s)
        for s in sorted({json.loads(p.read_text())["step"] for p in (run / "evals").iterdir()} - {0})
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    result = robo_rl(folder, "train", *TINY, "--out", "run")
    assert result.code == 0, result
    return folder / "run"


@pytest.fixture
def cut(whole, tmp_path) -> Path:
    """A copy of it as a kill before its last checkpoint would leave it."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(checkpoint.checkpoints(tmp_path / "run")[-1])
    return tmp_path / "run"


# ---- kill -9


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_bit_for_bit_like_one_that_was_not(whole, tmp_path):
    rng, run = np.random.default_rng(1), tmp_path / "run"
    for deaths in range(40):
        command = ["--resume", "run"] if (run / "run.json").exists() else [*TINY, "--out", "run"]
        # file operations, of saves and logs
        k = int(rng.integers(1, 40) if deaths < 2 else rng.integers(40, 130))
        result = robo_rl(tmp_path, "train", *command, first=At(k, "run/"))
        assert result.code in (-9, 0), result
        if result.code == 0:
            break
    assert result.code == 0 and deaths >= 4
    assert_same_run(whole, run)


def test_a_run_killed_between_its_last_save_and_its_tidying_is_tidied_when_it_is_resumed(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    extra = run / "checkpoints" / checkpoint.name(1)  # neither supervised, nor best, nor one of the last two
    shutil.copytree(run / "checkpoints" / checkpoint.name(0), extra)
    (run / "flight").mkdir()
    done = robo_rl(tmp_path, "train", "--resume", "run")
    assert done.code == 0 and "nothing to resume" in done.err
    assert_same_run(whole, run)
    assert not (run / "flight").exists()


def test_a_run_killed_in_the_middle_of_a_save_resumes_by_auto(whole, tmp_path):
    run = tmp_path / "runs" / "mine"
    name = saves(whole)[0]
    killed = robo_rl(tmp_path, "train", *TINY, "--out", run, first=At(3, f"checkpoints/.{name}"))
    assert killed.code == -9 and list(run.glob(f"checkpoints/.{name}.tmp*/policy.safetensors"))
    result = robo_rl(tmp_path, "train", "--resume", "auto")
    assert result.code == 0 and "run runs/mine" in result.err
    assert_same_run(whole, run)


def saver(folder: Path, step: int) -> "object":
    from robo_rl.experiment.config import TrainConfig
    from robo_rl.experiment.run import Run

    run = Run(
        TrainConfig(video=False), folder, None, SimpleNamespace(lines=0, tell=lambda *args, **more: None)
    )
    run.policy, run.step = build(step), step
    run.looks = [Look(10, 1, 2, 0.5)]
    return run


def save_and_die(folder: Path, step: int, k: int) -> int:
    """Save a checkpoint in a forked process that dies before its k-th file operation -> its exit status."""
    run = saver(folder, step)
    child = os.fork()
    if not child:
        At(k, str(folder))()
        run.save({"marker": "second"}, finished=False)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at_every_operation(root: Path, step: int) -> None:
    """A save at `step` killed before its first, second, … file operation, until it comes to its end."""
    (root / "first").mkdir()
    for s in (0, 10, 20, 30):
        saver(root / "first", s).save({"marker": "first"}, finished=False)
    seen = set()
    for k in range(1, 200):
        folder = root / str(k)
        shutil.copytree(root / "first", folder)
        code = save_and_die(folder, step, k)
        assert code in (0, -9)
        checkpoint.recover(folder)
        last = checkpoint.checkpoints(folder)[-1]
        policy, meta = checkpoint.load_policy(last)
        state, _ = checkpoint.load_train(last)
        seen.add((meta["step"], state["marker"]))
        assert meta["step"] in (30, step) and state["marker"] == (
            "second" if meta["step"] == 40 else state["marker"]
        )
        expected = build(meta["step"]).state_dict()
        assert all((v == expected[n]).all() for n, v in policy.state_dict().items())
        assert checkpoint.load_policy(checkpoint.best(folder))[1]["step"] == 10
        assert all(p.name.startswith("step_") for p in (folder / "checkpoints").iterdir())
        if code == 0:
            break
    assert code == 0 and k > 10 and seen == {(30, "first"), (step, "second")}


@pytest.mark.parametrize("step", [40, 30], ids=["a new one", "one more at the same step"])
def test_a_kill_before_any_file_operation_of_a_save_loses_nothing(step, tmp_path):
    child = forked(die_at_every_operation, tmp_path, step)  # what failed is on standard error
    child.join(HANGS)
    child.kill()
    assert child.exitcode == 0


# ---- signals


def test_ctrl_c_and_sigterm_save_and_say_how_to_go_on_exactly(whole, tmp_path):
    argv = ["train", *TINY, "--out", "run"]
    for number, code, name in ((signal.SIGINT, 130, saves(whole)[0]), (signal.SIGTERM, 143, saves(whole)[1])):
        # while it saves this one
        result = robo_rl(tmp_path, *argv, first=At(2, f"checkpoints/.{name}", number))
        assert result.code == code and "Traceback" not in result.err, result
        saved, _, hint = result.err.splitlines()[-1].partition("; go on with: robo_rl ")
        step = checkpoint.read_meta(checkpoint.checkpoints(tmp_path / "run")[-1])["step"]
        assert (
            saved == f"saved at step {step}"
            and hint == "train --resume run"
            and checkpoint.name(step) == name
        )
        argv = hint.split()
    assert robo_rl(tmp_path, *argv).code == 0
    assert_same_run(whole, tmp_path / "run")


def test_ctrl_c_in_the_supervised_stage_ends_at_once_and_a_second_one_without_a_word_of_python(tmp_path):
    long = ["train", *TINY, "--bc.updates", "1000000", "--out", "run"]
    command = Command(tmp_path, long)
    command.until(lambda: "[sft]" in command.said())
    command.signal(signal.SIGINT)
    result = command.wait()
    assert result.code == 130 and result.err.splitlines()[-1].endswith("robo_rl train --resume run"), result
    command = Command(tmp_path, ["train", "--resume", "run"])
    command.until(lambda: "[sft]" in command.said())
    command.signal(signal.SIGSTOP)  # both arrive together
    command.signal(signal.SIGINT)
    command.signal(signal.SIGTERM)
    command.signal(signal.SIGCONT)
    result = command.wait()
    assert result.code == 130 and "robo_rl: interrupted" in result.err and "Traceback" not in result.err, (
        result
    )


def test_a_second_process_on_a_run_folder_is_told_whose_it_is(tmp_path):
    command = Command(tmp_path, ["train", *TINY, "--bc.updates", "1000000", "--out", "run"])
    command.until(lambda: "[sft]" in command.said())
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    second = robo_rl(tmp_path, "train", "--resume", "run", timeout=30)
    assert f"pid {command.process.pid}" in second.mistake and f"kill {command.process.pid}" in second.mistake
    assert "already holds a run" in robo_rl(tmp_path, "train", *TINY, "--out", "run").mistake
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes()[: len(metrics)] == metrics
    command.signal(signal.SIGKILL)
    assert command.wait().code == -9
    finish = Command(tmp_path, ["train", "--resume", "run"])  # a killed owner leaves no lock
    finish.until(lambda: "[sft]" in finish.said())
    finish.signal(signal.SIGINT)
    assert finish.wait().code == 130


# ---- the disk


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 230 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=230m", "tmpfs", disk], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_fills_up_stops_the_run_with_one_line_and_its_last_checkpoint_intact(
    whole, small_disk, tmp_path
):
    run = small_disk / "run"
    first = At(2, f"checkpoints/.{saves(whole)[1]}", signal.SIGSTOP)
    command = Command(tmp_path, ["train", *TINY, "--out", run], first=first)
    command.until(lambda: "State:\tT" in Path(f"/proc/{command.process.pid}/status").read_text())
    filler = os.open(small_disk / "filler", os.O_CREAT | os.O_WRONLY)
    free = os.statvfs(small_disk)
    os.posix_fallocate(filler, 0, free.f_bavail * free.f_frsize)
    command.signal(signal.SIGCONT)
    result = command.wait()
    last = result.err.splitlines()[-1]
    assert result.code == 2 and "Traceback" not in result.err and result.err.count("robo_rl: ") == 1, result
    assert last.startswith("robo_rl: ") and "space" in last and "--resume" in last
    assert checkpoint.checkpoints(run)[-1].name == saves(whole)[0]
    for path in checkpoint.checkpoints(run):
        checkpoint.load_policy(path)
        checkpoint.load_train(path)
    os.ftruncate(filler, 0)
    os.close(filler)
    assert robo_rl(tmp_path, "train", "--resume", run).code == 0
    assert_same_run(whole, run)


def test_a_disk_that_is_full_wherever_something_is_written_is_one_line(tmp_path):
    argv = ["train", *TINY, "--out", "run"]
    result = Command(tmp_path, argv, first=functools.partial(no_room, "timeline.jsonl")).wait()
    assert result.code == 2 and "Traceback" not in result.err, result
    assert result.err.splitlines()[-1] == (
        "robo_rl: the disk is full: free some space, and go on with --resume where it was a run"
    )


def test_a_disk_too_small_for_a_run_is_refused_before_it_starts(small_disk, tmp_path):
    with open(small_disk / "filler", "wb") as f:
        os.posix_fallocate(f.fileno(), 0, 100_000_000)
    result = robo_rl(tmp_path, "train", *TINY, "--out", small_disk / "run")
    assert "MB free" in result.mistake and not (small_disk / "run").exists()


# ---- damaged files


def test_a_torn_last_line_of_the_metrics_and_evaluations_after_the_checkpoint_are_made_again(whole, cut):
    shutil.copy(cut / "evals" / "final.json", cut / "evals" / "step_000099999.json")
    with open(cut / "metrics.jsonl", "a") as f:
        f.write('{"step": 99999, "time": 1.0, "sta')
    result = robo_rl(cut.parent, "train", "--resume", "run")
    assert result.code == 0, result
    assert_same_run(whole, cut)


def test_a_damaged_line_in_the_metrics_is_named(cut):
    lines = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:20] + b"\n"
    (cut / "metrics.jsonl").write_bytes(b"".join(lines))
    result = robo_rl(cut.parent, "train", "--resume", "run")
    assert (
        result.code == 2
        and "metrics.jsonl, line 2 is damaged" in result.err
        and "Traceback" not in result.err
    )


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 4
    path.write_bytes(blob)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, truncate])
def test_a_damaged_checkpoint_is_named_and_doing_what_is_said_helps(harm, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    last = checkpoint.checkpoints(run)[-1]
    os.utime(run)
    harm(last / "policy.safetensors")
    for argv in (("eval", "run", "--checkpoint", "last", "--episodes", 2), ("train", "--resume", "run")):
        result = robo_rl(tmp_path, *argv)
        line = result.err.splitlines()[-1]
        assert (
            result.code == 2
            and "Traceback" not in result.err
            and f"{last.relative_to(tmp_path)}/policy" in line
        ), result
        remedy = line.split("use the one before: ")[1]
    assert remedy == f"rm -r {last.relative_to(tmp_path)}"
    shutil.rmtree(tmp_path / remedy.split()[-1])
    harm(checkpoint.checkpoints(run)[-1] / "train.safetensors")  # acting needs none of it, training does
    assert robo_rl(tmp_path, "eval", "run", "--checkpoint", "last", "--episodes", 2).code == 0
    result = robo_rl(tmp_path, "train", "--resume", "run")
    assert (
        result.code == 2
        and "train.safetensors" in result.err.splitlines()[-1]
        and "Traceback" not in result.err
    )


def test_a_damaged_run_json_is_named(cut):
    unknown = '{"config": {"algo": "pi_rl", "policy": {"kind": "flow", "nonsense": 1}}}'
    for text, said in (
        ("{", "run/run.json is damaged"),
        ("[]", "run/run.json is damaged"),
        (unknown, "run/run.json: this version has no --policy.nonsense"),
    ):
        (cut / "run.json").write_text(text)
        for argv in (("train", "--resume", "run"), ("eval", "run")):
            assert said in robo_rl(cut.parent, *argv).mistake


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--algo dppo",
        "--algo nft",
        "--algo reinflow",
        "--algo ppo",
        "--rl.advantage grpo",
        "--task Hopper-v5 --demos 0",
        "--rl.normalise-obs --rl.scale-reward --rl.anneal-lr --rl.bc-coef 0.1",
        "--control joint_delta --randomise mass,latency:2",
    ],
)
def test_every_method_resumes_exactly(options, tmp_path):
    argv = ["train", *TINY, *options.split(), "--out"]
    assert robo_rl(tmp_path, *argv, "whole").code == 0
    stopped = robo_rl(tmp_path, *argv, "run", first=At(12, "checkpoints/.step_", signal.SIGTERM))
    assert stopped.code == 143, stopped
    killed = robo_rl(tmp_path, "train", "--resume", "run", first=At(3, "checkpoints/.step_"))
    assert killed.code == -9, killed
    assert robo_rl(tmp_path, "train", "--resume", "run").code == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")
