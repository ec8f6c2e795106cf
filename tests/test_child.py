"""What is waited for of a child process has a deadline."""

import subprocess
import sys
import time

from robo_rl.child import end, line_with


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
