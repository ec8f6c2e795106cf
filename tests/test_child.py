"""What is waited for of a child process has a deadline."""

import os
import subprocess
import sys
import time
from multiprocessing import forkserver

from commands import robo_rl

from robo_rl.child import end, line_with, set_openmp


def start(code):
    return subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True)


def test_the_line_that_was_waited_for_is_returned_and_a_child_that_talks_on_is_never_blocked_by_its_pipe():
    child = start(
        "print('loading')\nprint('serves on 127.0.0.1:1')\nfor i in range(20000): print('chatter ' * 4)"
    )
    assert line_with(child, " on ", 60) == "serves on 127.0.0.1:1\n"
    assert child.wait(60) == 0


def test_a_child_that_ends_or_says_nothing_in_time_gives_no_line():
    child = start("print('no')")
    assert line_with(child, " on ", 60) == ""
    child.wait(60)
    child = start("import time; time.sleep(1000)")
    began = time.monotonic()
    assert line_with(child, " on ", 0.1) == "" and time.monotonic() - began < 60
    assert end(child) == -15


def test_a_child_that_ignores_sigterm_is_killed():
    child = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(1000)"
    )
    assert line_with(child, "ready", 60)
    assert end(child, 0.1) == -9


def test_ctrl_c_while_the_server_of_workers_imports_is_the_learners_alone(tmp_path):
    """A terminal tells the whole group, and importing torch takes seconds: each start printed a stack."""
    (tmp_path / "interrupts.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "starts.py").write_text(
        "from robo_rl.runtime.process_pool import context, start_process, warm\n"
        "if __name__ == '__main__':\n"
        "    warm(('interrupts',))\n"
        "    process = context().Process(target=print, args=('begun',))\n"
        "    start_process(process)\n"
        "    process.join()\n"
    )
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "starts.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout == "begun\n" and "KeyboardInterrupt" not in done.stderr, done.stderr


def test_a_script_that_is_interrupted_or_given_wrong_input_says_one_line():
    for error, code, said in (
        ("KeyboardInterrupt", 130, "-c: interrupted\n"),
        ("UserError('no  such run')", 2, "-c: no such run\n"),
    ):
        script = (
            f"from robo_rl.errors import UserError, as_script\ndef main(): raise {error}\nas_script(main)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
        assert (done.returncode, done.stderr) == (code, said)


def test_threads_of_openmp_sleep_where_they_wait_unless_the_user_says_otherwise(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is taken back also where it was not set
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    set_openmp()
    assert "GOMP_SPINCOUNT" not in os.environ and "OMP_NUM_THREADS" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    set_openmp(2)
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["OMP_NUM_THREADS"]) == ("1000", "2")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    set_openmp(3)
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["OMP_NUM_THREADS"]) == ("7", "2")


def test_commands_of_tests_start_warm_although_a_worker_pool_was_there_before(tmp_path):
    """commands._child asserts that it is warm; multiprocessing's own server preloads for its first user."""
    forkserver.ensure_running()
    assert robo_rl(tmp_path, "--version").code == 0
