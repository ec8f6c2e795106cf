"""The completion script, run by bash and zsh on words as a person types them."""

import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from robo_rl.cli import COMMANDS, main
from robo_rl.cli.completion import ENDS, script


def completed(code: str, *words: str) -> list[str]:
    """What bash offers for the last of `words` after reading the script `code`."""
    done = subprocess.run(
        [
            "bash",
            "-c",
            code + 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _robo_rl; printf "%s\\n" "${COMPREPLY[@]}"',
            "bash",
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def code():
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["completion", "bash"])
    return printed.getvalue()


SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


def typed_in(shell: str, script_file, keys: str) -> str:
    """What stands on the line of an interactive `shell` that has read the script, after a person typed
    `keys`."""
    pid, terminal = pty.fork()
    if not pid:
        os.execvpe(
            shell,
            SHELLS[shell],
            os.environ | {"TERM": "dumb", "PS1": "$ ", "EDITOR": "emacs", "COLUMNS": "200"},
        )
    screen = ""

    def until(mark: str) -> None:
        nonlocal screen
        end = time.monotonic() + 60
        while mark not in screen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                screen += os.read(terminal, 65536).decode(errors="replace")
        assert mark in screen, screen

    try:
        os.write(terminal, f"source {script_file}; echo REA''DY\n".encode())
        until("READY")
        os.write(terminal, f"{keys}\x01echo '<\x05>'\n".encode())  # to the beginning and the end of the line
        until(">\r\n")
        return screen[screen.rindex("<") + 1 : screen.rindex(">\r\n")].strip()
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", SHELLS)
def test_an_interactive_shell_completes_a_line_as_it_is_typed(shell, tmp_path, capsys):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    with pytest.raises(SystemExit):
        main(["completion", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "my-run").mkdir()
    for keys, line in {
        "robo_rl tra\t--alg\tpi_\t": "robo_rl train --algo pi_rl",
        "robo_rl wm tu\t": "robo_rl wm tune",
        "robo_rl train --algo=pi_\t--task=rea\t": "robo_rl train --algo=pi_rl --task=reach",
        f"robo_rl eval {tmp_path}/my\t": f"robo_rl eval {tmp_path}/my-run",
        f"robo_rl eval --video={tmp_path}/my\t": f"robo_rl eval --video={tmp_path}/my-run",
    }.items():
        assert typed_in(shell, tmp_path / "script", keys).removesuffix("/") == line


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", ["train"]),
        ("train --alg", ["--algo"]),
        ("train --algo pi_", ["pi_rl"]),
        ("train --policy.kind fl", ["flow"]),
        ("wm t", ["train", "tune"]),
        ("vla co", ["convert", "compare"]),
        ("vla compare --dtype b", ["bf16"]),
        ("data me", ["merge"]),
        ("data split --re", ["--rest"]),
        ("wm train --fit.un", ["--fit.unroll"]),
        ("wm judge --che", ["--check"]),
        ("bench po", ["policy"]),
        ("robot ho", ["home"]),
        ("results add --to", ["--topic"]),
        ("completion z", ["zsh"]),
        ("sim-arm --lockst", ["--lockstep"]),
        ("train --task push", ["push_cube"]),
        ("train --algo = pi_", ["pi_rl"]),
    ],
)
def test_bash_completes_commands_options_and_values(typed, offered, code):
    assert completed(code, "robo_rl", *typed.split()) == offered


def test_every_command_completes_its_help(code):
    for command in set(COMMANDS) - {"wm", "data", "results", "vla", "robot"}:
        assert completed(code, "robo_rl", command, "--hel") == ["--help"], command


def test_where_any_text_goes_files_are_offered(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run").mkdir()
    assert completed(code, "robo_rl", "eval", "my") == ["my-run"]


def test_the_script_is_valid_for_the_shells_that_are_here(capsys):
    for shell in ("bash", "zsh"):
        with pytest.raises(SystemExit):
            main(["completion", shell])
        text = capsys.readouterr().out
        assert text.endswith(ENDS[shell])
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


def test_an_argument_of_a_few_words_is_not_offered_as_the_value_of_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = script({"go": {"": ["left", "right"], "--fast": []}})
    assert completed(made, "robo_rl", "go", "l") == ["left"]
    assert completed(made, "robo_rl", "go", "--fast", "l") == []
