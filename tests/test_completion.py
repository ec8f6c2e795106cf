"""The completion script, run by bash on words as a person types them."""

import shutil
import subprocess

import pytest

from robo_rl.cli import COMMANDS, main
from robo_rl.cli.completion import script


def completed(code: str, *words: str) -> list[str]:
    """What bash offers for the last of `words` after reading the script `code`."""
    done = subprocess.run(["bash", "-c", code + 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _robo_rl; printf "%s\\n" "${COMPREPLY[@]}"',
                           "bash", *words], capture_output=True, text=True, timeout=60, check=True)
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


@pytest.mark.parametrize(("typed", "offered"), [
    ("tr", ["train"]), ("train --alg", ["--algo"]), ("train --algo pi_", ["pi_rl"]), ("train --policy.kind fl", ["flow"]),
    ("wm t", ["train", "tune"]), ("wm train --fit.un", ["--fit.unroll"]), ("wm judge --che", ["--check"]), ("bench po", ["policy"]),
    ("results add --to", ["--topic"]),
    ("completion z", ["zsh"]), ("sim-arm --lockst", ["--lockstep"])])
def test_bash_completes_commands_options_and_values(typed, offered, code):
    assert completed(code, "robo_rl", *typed.split()) == offered


def test_every_command_completes_its_help(code):
    for command in set(COMMANDS) - {"wm", "results"}:
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
        assert "complete -o filenames -F _robo_rl robo_rl" in text and ("bashcompinit" in text) == (shell == "zsh")
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


def test_an_argument_of_a_few_words_is_not_offered_as_the_value_of_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = script({"go": {"": ["left", "right"], "--fast": []}})
    assert completed(made, "robo_rl", "go", "l") == ["left"]
    assert completed(made, "robo_rl", "go", "--fast", "l") == []
