import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import free_bytes, lock, read_json, replacing, require_free, write_bytes, write_json
from robo_rl.log import Progress, RunLog, clock_text, open_run, read_metrics, si, wandb_mode


class Clock:
    """A clock the test turns."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def python(code, stdin=None, stderr=subprocess.PIPE, env=None):
    """A child process running `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=env,
    )


# --------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Config:
    lr: float
    out: Path


def test_json_is_strict_and_equal_objects_give_equal_bytes(tmp_path):
    obj = {
        "c": Config(3e-4, Path("a/b")),
        "n": np.int64(3),
        "x": np.array([1.0, np.nan]),
        "inf": float("inf"),
        "t": (1, "ü"),
        "flag": np.bool_(True),
    }
    write_json(tmp_path / "a.json", obj)
    write_json(tmp_path / "b.json", obj)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {
        "c": {"lr": 3e-4, "out": "a/b"},
        "n": 3,
        "x": [1.0, None],
        "inf": None,
        "t": [1, "ü"],
        "flag": True,
    }


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    write_bytes(tmp_path / "f", b"old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "f") as temp:
        temp.write_bytes(b"half")
        raise RuntimeError
    with pytest.raises(UserError, match="disk is full"), replacing(tmp_path / "f") as temp:
        temp.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [p.name for p in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_bytes() == b"old"


def test_a_really_full_disk_leaves_the_old_file(tmp_path):
    """The kernel refuses the write: a file-size limit stands in for the full disk."""
    write_bytes(tmp_path / "f", b"old")
    child = python(f"""
        import resource, signal, errno
        from robo_rl.files import write_bytes
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_bytes({str(tmp_path / "f")!r}, b"x" * 5000)
        except OSError as e:
            print(errno.errorcode[e.errno])
        """)
    assert child.communicate(timeout=30)[0].strip() == "EFBIG"
    assert [p.name for p in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_bytes() == b"old"


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_file_whole(tmp_path):
    path = tmp_path / "f"
    write_bytes(path, bytes([0]) * 3_000_000)
    child = python(f"""
        from robo_rl.files import lock, write_bytes
        with lock({str(tmp_path)!r}):
            print("go", flush=True)
            for k in range(1, 10**6):
                write_bytes({str(path)!r}, bytes([k % 256]) * 3_000_000)
        """)
    child.stdout.readline()
    time.sleep(0.25)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    data = path.read_bytes()
    assert len(data) == 3_000_000 and len(set(data)) == 1 and data[0] != 0
    (tmp_path / f".g.{child.pid}.tmp").write_bytes(b"what a killed writer leaves")
    (tmp_path / f".h.{os.getpid()}.tmp").write_bytes(b"of a writer still alive")
    with lock(tmp_path):
        assert sorted(p.name for p in tmp_path.glob(".*.tmp")) == [f".h.{os.getpid()}.tmp"]


def test_a_run_folder_has_one_writer_and_the_second_is_told_who(tmp_path):
    child = python(
        f"""
        import sys
        from robo_rl.files import lock
        with lock({str(tmp_path)!r}):
            print("held", flush=True)
            sys.stdin.read()
        """,
        stdin=subprocess.PIPE,
    )
    child.stdout.readline()
    with pytest.raises(UserError, match=rf"pid {child.pid}\) is writing"), lock(tmp_path):
        pass
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with lock(tmp_path), pytest.raises(UserError, match=str(os.getpid())), lock(tmp_path):
        pass
    with lock(tmp_path):  # free again
        pass


def test_a_forked_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    child = python(f"""
        import os, time
        from robo_rl.files import lock
        with lock({str(tmp_path)!r}):
            if not os.fork():
                print(os.getpid(), flush=True)  # forked, and what is done after a fork is done
            time.sleep(60)
        """)
    worker = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.wait()
    try:
        with lock(tmp_path):
            os.kill(worker, 0)  # still there
    finally:
        os.kill(worker, signal.SIGKILL)
        child.communicate()


def test_free_space_is_checked_where_the_folder_will_be(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.05)
    require_free(tmp_path, 1)
    with pytest.raises(UserError, match="another disk"):
        require_free(tmp_path / "new", 10**18)


def test_a_damaged_json_file_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"name": ')
    with pytest.raises(UserError, match="run.json is damaged"):
        read_json(tmp_path / "run.json")
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "gone.json")


# ------------------------------------------------------------------------------------------------- metrics


def test_metrics_come_back_as_columns(tmp_path):
    clock = Clock()
    with RunLog(tmp_path, (), clock=clock) as log:
        log.log(0, {"sft/loss": 0.5}, stage="sft")
        clock.now += 2.5
        log.log(4096, {"train/success": np.float32(0.25), "train/kl": float("nan"), "train/x": float("inf")})
    m = read_metrics(tmp_path)
    assert (
        m["step"].tolist() == [0, 4096]
        and m["stage"].tolist() == ["sft", "rl"]
        and m["time"].tolist() == [0, 2.5]
    )
    np.testing.assert_array_equal(m["sft/loss"], [0.5, np.nan])
    np.testing.assert_array_equal(m["train/success"], [np.nan, 0.25])
    assert np.isnan(m["train/kl"]).all() and np.isnan(m["train/x"]).all()
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_no_metrics_give_no_columns(tmp_path):
    assert read_metrics(tmp_path) == {}
    RunLog(tmp_path, ()).close()
    assert read_metrics(tmp_path) == {}


def test_a_run_killed_while_logging_keeps_every_whole_line(tmp_path):
    child = python(f"""
        from robo_rl.log import RunLog
        log = RunLog({str(tmp_path)!r}, ())
        for k in range(10**9):
            log.log(k, {{"a": k * 0.5}})
            if k == 2000:
                print("go", flush=True)
        """)
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    m = read_metrics(tmp_path)
    assert len(m["step"]) > 2000
    np.testing.assert_array_equal(m["step"], np.arange(len(m["step"])))
    np.testing.assert_array_equal(m["a"], m["step"] * 0.5)


@pytest.mark.parametrize("torn", [b'{"step": 3, "ti', b'{"step": 3, "ti\n', b"\x00\x00\x00\n"])
def test_a_torn_last_line_is_left_out_and_cut_on_resume(tmp_path, torn):
    with RunLog(tmp_path, ()) as log:
        log.log(1, {"a": 1.0})
        log.log(2, {"a": 2.0})
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(torn)
    assert read_metrics(tmp_path)["a"].tolist() == [1.0, 2.0]
    with RunLog(tmp_path, (), resume_step=2) as log:
        log.log(3, {"a": 3.0})
    assert read_metrics(tmp_path)["a"].tolist() == [1.0, 2.0, 3.0]


def test_damage_in_the_middle_is_refused_with_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)


def test_a_resume_drops_what_came_after_the_checkpoint_and_goes_on_with_the_time(tmp_path):
    clock = Clock()
    log = RunLog(tmp_path, (), clock=clock)
    for k in range(900):  # more updates of SFT than the RL step resumed from
        log.log(k, {"sft/loss": 1.0 / (k + 1)}, stage="sft")
    for k in range(0, 500, 100):
        clock.now += 10
        log.log(k, {"train/kl": 0.1})
    log.close()
    clock.now += 1000  # the machine was off
    with RunLog(tmp_path, (), resume_step=200, clock=clock) as log:
        clock.now += 5
        log.log(300, {"train/kl": 0.2})
    m = read_metrics(tmp_path)
    rl = m["stage"] == "rl"
    assert (~rl).sum() == 900 and m["step"][rl].tolist() == [0, 100, 200, 300]
    assert m["time"][rl].tolist() == [10, 20, 30, 35]
    RunLog(tmp_path, (), resume_step=10, resume_stage="sft").close()
    assert read_metrics(tmp_path)["step"].tolist() == list(range(11))
    RunLog(tmp_path, (), resume_step=-1, resume_stage="sft").close()
    assert read_metrics(tmp_path) == {}


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with RunLog(tmp_path, ()) as log:
        log.log(1, {"a": 1.0})
    with pytest.raises(UserError, match="resume"):
        RunLog(tmp_path, ())


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(UserError, match="tensorboard, wandb"):
        RunLog(tmp_path, ("tensorbord",))
    with RunLog(tmp_path, ()) as log:
        with pytest.raises(UserError, match="the log's own"):
            log.log(1, {"step": 2.0})
        with pytest.raises(UserError, match="sft"):
            log.log(1, {"a": 2.0}, stage="play")
    with pytest.raises(UserError, match="closed"):
        log.log(1, {"a": 2.0})


def tensorboard_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_metrics_once_even_after_a_resume(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(5, {"sft/loss": 0.5}, stage="sft")
        for k in (1, 2, 3, 4):
            log.log(k, {"train/kl": k / 4, "train/bad": float("nan")})
    with RunLog(tmp_path, resume_step=2) as log:
        log.log(3, {"train/kl": 8.0})
    seen = tensorboard_scalars(tmp_path / "tensorboard")
    assert seen == {"sft/loss": [(5, 0.5)], "train/kl": [(1, 0.25), (2, 0.5), (3, 8.0)]}


def test_wandb_absent_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match=r"pip install 'robo_rl\[wandb\]'"):
        RunLog(tmp_path, ("wandb",))


def test_wandb_is_online_with_a_key_of_the_environment_or_of_wandb_login(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password abc\n")
    assert wandb_mode() == "online"
    (tmp_path / "netrc").write_text("machine api.forge.coreweave.com\n  login user\n  password abc\n")
    assert wandb_mode() == "online"  # wandb 0.31
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_what_wandb_refuses_is_one_line(tmp_path, monkeypatch):
    def init(**options):
        raise ValueError("mode\n  Input should be 'online'")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    with pytest.raises(UserError, match=r"wandb cannot begin \(mode Input .*WANDB_MODE=offline"):
        RunLog(tmp_path, ("wandb",))


WANDB = """
class Settings:
    def __init__(self, **options): pass

class Run:
    def define_metric(self, *names, **options): pass
    def log(self, row):
        if row["env_step"] > 1:
            raise ConnectionResetError("Connection lost")
    def finish(self, exit_code): print("finished", exit_code)

def init(**options):
    print(options["name"], options["group"])
    return Run()
"""


def with_wandb(folder: Path, code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """What a Python process does that has a wandb which loses its connection after step 1."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "wandb.py").write_text(WANDB)
    paths = (folder / "site", Path(__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_wandb_that_fails_in_the_middle_is_told_once_and_ends_no_run(tmp_path):
    code = (
        "from robo_rl.log import RunLog\n"
        f"with RunLog({str(tmp_path / 'run')!r}, (), 'project') as log:\n"
        "    for step in range(4): log.log(step, {'a/b': 1.0})\n"
    )
    done = with_wandb(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb fails and gets no more of this run (ConnectionResetError") == 1
    assert read_metrics(tmp_path / "run")["step"].tolist() == [0, 1, 2, 3]


def test_wandb_has_the_name_of_the_run_folder_and_the_group_of_a_folder_of_runs(tmp_path):
    code = "from robo_rl.log import RunLog; RunLog({!r}, (), 'project').close()"
    assert with_wandb(tmp_path, code.format(str(tmp_path / "alone"))).stdout == "alone None\nfinished 0\n"
    (tmp_path / "seeds").mkdir()
    write_json(tmp_path / "seeds" / "runs.json", {})
    inside = code.format(str(tmp_path / "seeds" / "s0"))
    assert with_wandb(tmp_path, inside).stdout == "s0 seeds\nfinished 0\n"
    own = {"WANDB_NAME": "mine", "WANDB_RUN_GROUP": "ours"}
    assert with_wandb(tmp_path, inside, **own).stdout.startswith("mine ours\n")


def test_wandb_without_a_key_writes_offline_runs_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs robo_rl[wandb]")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write_json(tmp_path / "run.json", {"seed": 1})
    for step, resume in ((1, None), (2, 1)):
        with RunLog(tmp_path, (), wandb_project="tests", resume_step=resume) as log:
            log.log(step, {"train/kl": 0.5})
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {f.name for f in files} == {f"run-{(tmp_path / 'wandb_id').read_text()}.wandb"}


# --------------------------------------------------------------------------------------------- run folders


def test_a_wrong_run_folder_lists_the_runs_nearby_newest_first(tmp_path):
    tmp_path = tmp_path / "runs"  # beside it are no runs of other tests
    for age, name in enumerate(("c", "a", "b")):
        (tmp_path / name).mkdir(parents=True)
        write_json(tmp_path / name / "run.json", {})
        os.utime(tmp_path / name / "run.json", (1e9 - age, 1e9 - age))
    assert open_run(tmp_path / "a") == open_run(tmp_path / "a" / "run.json") == tmp_path / "a"
    with pytest.raises(UserError, match=r"does not exist.*/c,.*/a,.*/b$"):
        open_run(tmp_path / "d")
    with pytest.raises(UserError, match=r"no run.json.*/c,.*/a,.*/b$"):
        open_run(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        open_run(tmp_path / "a" / "gone")
    (tmp_path / "model-00001-of-00002.safetensors").touch()  # of a public model
    with pytest.raises(UserError, match=r"is no run; one begins with them: robo_rl train --policy .*/runs "):
        open_run(tmp_path)


# ------------------------------------------------------------------------------------------------ progress


def test_off_a_terminal_progress_is_plain_lines_every_few_seconds():
    out, clock = io.StringIO(), Clock()
    p = Progress(out, every=5.0, clock=clock)
    p.start("rl", 1000, "steps")
    for k in range(1, 21):
        clock.now += 1
        p.update(k * 10, success=0.5)
    clock.now += 30
    p.say("evaluated: 0.5")
    p.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[-3] == "[rl]  16 % · 160/1.00k steps · 10/s · ETA 1:24 · success 50.0 %"
    assert lines[-2] == "evaluated: 0.5"
    assert lines[-1] == "[rl]  20 % · 200/1.00k steps in 0:20 · 10/s · success 50.0 %"


def test_a_stage_that_has_not_moved_yet_says_no_rate():
    out = io.StringIO()
    with Progress(out) as p:
        p.start("rl", 1000, "steps")
        p.update(0, note="learns after each 512 steps")
    assert (
        out.getvalue().splitlines()[0]
        == "[rl]   0 % · 0/1.00k steps · –/s · ETA – · learns after each 512 steps"
    )


def test_a_stage_that_is_refused_before_it_moves_leaves_no_line():
    out = io.StringIO()
    with pytest.raises(UserError), Progress(out) as p:
        p.start("eval", 200, "episodes")
        raise UserError("no such task")
    assert out.getvalue() == ""


def test_a_stage_of_items_is_told_as_they_go_and_a_short_one_not_at_all():
    now, err = [0.0], io.StringIO()
    progress = Progress(err, every=5.0, patience=2.0, clock=lambda: now[0])
    for _ in progress.each("short", range(3), "episodes"):
        now[0] += 0.5
    assert list(progress.each("none", [], "episodes")) == []
    for _ in progress.each("long", range(4), "episodes"):
        now[0] += 3.0
    progress.close()
    assert [line.split(" · ")[:2] for line in err.getvalue().splitlines()] == [
        ["[long]  25 %", "1/4 episodes"],
        ["[long]  75 %", "3/4 episodes"],
        ["[long] 100 %", "4/4 episodes in 0:12"],
    ]


def test_the_rate_follows_a_change_of_speed_and_the_start_of_a_resume_does_not_count():
    clock = Clock()
    p = Progress(io.StringIO(), half_life=10.0, clock=clock)
    p.start("rl", 10**6, done=500_000)
    for speed, seconds in ((100, 60), (20, 60)):
        for _ in range(seconds):
            clock.now += 1
            p.update(p._done + speed)
        assert p.rate == pytest.approx(speed, rel=0.08 if speed == 20 else 1e-9)
    p.start("eval", 10)
    assert np.isnan(p.rate) and np.isnan(p.success)


def test_success_so_far_is_smoothed_and_ignores_what_is_not_known():
    p = Progress(io.StringIO())
    p.start("rl", 10)
    p.update(1, success=1.0)
    assert p.success == 1.0
    p.update(2, success=float("nan"))
    p.update(3, success=0.0)
    assert p.success == pytest.approx(0.9 / 1.9)


def test_a_note_stays_until_another_or_none_takes_its_place():
    p = Progress(io.StringIO())
    p.start("rl", 4)
    p.update(1, note="the critic learns first")
    p.update(2)
    assert p.text().endswith("the critic learns first")
    p.update(3, note="")
    assert "critic" not in p.text()


def test_the_last_return_stays_until_another_episode_ends():
    p = Progress(io.StringIO())
    p.start("rl", 4)
    p.update(1, note="12 updates", gain=3.0)
    p.update(2, gain=float("nan"))
    p.update(3)
    assert p.text().endswith("return 3 · 12 updates")
    p.start("rl", 4)
    assert "return" not in p.text()


def test_on_a_terminal_the_line_is_live_and_stdout_stays_clean():
    main, side = os.openpty()
    child = python(
        """
        import sys, warnings
        from robo_rl.log import Progress
        with Progress() as p:
            p.start("sft", 3, "updates")
            for k in (1, 2, 3):
                p.update(k, note=f"loss 0.{k}")
                print("result", k)
            p.start("rl", 10)
            p.update(4, success=0.75)
            p.say("evaluation [bold]0.75[/bold]")
            p.start("refused", 10)
        """,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "110"},
    )
    out, _ = child.communicate(timeout=30)
    os.close(side)
    seen = b""
    with os.fdopen(main, "rb", buffering=0) as f:
        try:
            while chunk := f.read(65536):
                seen += chunk
        except OSError:  # the end of a pseudo-terminal
            pass
    assert child.returncode == 0 and out == "result 1\nresult 2\nresult 3\n"
    text = seen.decode()
    assert "3/3 updates" in text and "success 75.0 %" in text and "evaluation [bold]0.75[/bold]" in text
    assert "result" not in text and "refused" not in text.rsplit("\x1b[2K")[-1]


def test_numbers_are_short():
    assert [si(x) for x in (0, 7, 99.94, 512, 999.6, 4096, 99_999, 1_254_000, 2e9)] == [
        "0",
        "7",
        "99.9",
        "512",
        "1.00k",
        "4.10k",
        "100k",
        "1.25M",
        "2.00G",
    ]
    assert [clock_text(x) for x in (0, 48, 725, 3729, float("nan"), float("inf"))] == [
        "0:00",
        "0:48",
        "12:05",
        "1:02:09",
        "–",
        "–",
    ]


def test_the_log_imports_neither_torch_nor_tensorboard():
    code = """
        import sys, robo_rl.log, robo_rl.stats
        print([m for m in ("torch", "tensorboard", "rich", "wandb") if m in sys.modules])
        """
    assert python(code).communicate(timeout=30) == ("[]\n", "")
