"""JSON from anywhere: what is no plain document of bounded size is refused in one line; private files and
folders."""

import errno
import json
import os
import random
import stat
import string
from pathlib import Path

import numpy as np
import pytest

from robo_rl.errors import UserError
from robo_rl.files import (
    DEEP,
    GO_ON,
    keep_row,
    kept_rows,
    lock,
    parse_json,
    private_file,
    private_folder,
    read_json,
    replacing,
    write_json,
)

BAD = {
    "deep arrays": b"[" * 60_000,
    "deep objects": b'{"a":' * 60_000,
    "deep and closed": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep after a string full of quotes": b'{"a": "' + b'\\"' * 1000 + b'", "b": ' + b"[" * 60_000,
    "deep after a lone backslash": b"\\" + b"[" * 60_000,
    "said twice": b'{"a": 1, "a": 2}',
    "not a number": b'{"a": NaN}',
    "infinite": b'{"a": -Infinity}',
    "infinite by its exponent": b'{"a": 1e400}',
    "five thousand digits": b'{"a": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"a": "\\ud800"}',
    "half a surrogate pair as a key": b'{"\\uDFFF": 1}',
    "no UTF-8": b'{"a": "\xff"}',
    "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "a control character": b'{"a": "\x01"}',
    "too long": b'{"a": "' + b"x" * (1 << 16) + b'"}',
    "torn": b'{"a": [1, 2',
    "nothing": b"",
    "two documents": b"{} {}",
    "another type": b"[1]",
    "a bare word": b"null",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_json_that_is_no_plain_document_is_one_line(tmp_path, data):
    with pytest.raises(UserError, match="^the message .*; send another$") as e:
        parse_json(data, "the message", remedy="send another")
    assert len(str(e.value)) < 300 and "\n" not in str(e.value)
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"^{path} .*restore it from a copy"):
        read_json(path, limit=1 << 16)


def test_text_is_refused_as_bytes_are():
    for text in ("[" * 60_000, '{"a": "\ud800"}', '{"a": 1, "a": 2}'):
        with pytest.raises(UserError):
            parse_json(text, "the message")


def test_what_python_writes_comes_back_as_it_was():
    words = random.Random(0)

    def tree(level: int):
        kind = words.randrange(7) if level < 12 else words.randrange(5)
        text = "".join(
            words.choices(string.printable + '"\\[]{}üé語🤖\ud83e\udd16'[:-2], k=words.randrange(12))
        )
        return [
            None,
            words.random() * 10.0 ** words.randrange(-300, 300),
            words.getrandbits(127) - 2**126,
            text,
            True,
            [tree(level + 1) for _ in range(words.randrange(4))] if kind == 5 else 0,
            {f"{text}{k}": tree(level + 1) for k in range(words.randrange(4))} if kind == 6 else 0,
        ][kind]

    for _ in range(300):
        x = {"x": tree(0)}
        for ascii_only in (True, False):
            assert parse_json(json.dumps(x, ensure_ascii=ascii_only), "x") == x
    generator = np.random.default_rng(1).bit_generator.state  # integers of 128 bits
    assert parse_json(json.dumps(generator), "x") == generator
    assert np.isnan(parse_json('{"a": NaN}', "x", nan=True)["a"])
    assert parse_json("[1, 2]", "x", (list, dict)) == [1, 2]


def test_brackets_in_strings_are_no_depth_and_the_limit_is_exact():
    text = '{"a": "' + "[" * 1000 + '\\\\\\"{[", "b": "\\\\"}'
    assert parse_json(text, "x") == json.loads(text)
    parse_json("[" * DEEP + "]" * DEEP, "x", list)
    with pytest.raises(UserError, match=f"brackets {DEEP + 1} deep, at most {DEEP}"):
        parse_json("[" * (DEEP + 1) + "]" * (DEEP + 1), "x", list)


def test_what_is_no_file_is_one_line_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, says in (
        ("pipe", "no regular file"),
        ("folder", "Is a directory|no regular file"),
        ("none", "does not exist"),
    ):
        with pytest.raises(UserError, match=says):
            read_json(tmp_path / name)


def test_folders_and_files_that_are_made_for_one_user_are_closed_to_others(tmp_path):
    def mode(path):
        return stat.S_IMODE(path.stat().st_mode)

    old = os.umask(0)
    try:
        assert mode(private_folder(tmp_path / "a" / "b")) == 0o700
        (tmp_path / "theirs").mkdir(mode=0o750)
        assert mode(private_folder(tmp_path / "theirs")) == 0o750  # whoever made it may share it
        (tmp_path / "file").write_text("x")
        os.close(private_file(tmp_path / "file"))
        assert mode(tmp_path / "file") == 0o600 and (tmp_path / "file").read_text() == "x"
        with lock(tmp_path / "run"):
            assert mode(tmp_path / "run") == 0o700 and mode(tmp_path / "run" / ".lock") == 0o600
            write_json(tmp_path / "run" / "a.json", {})
    finally:
        os.umask(old)
    with pytest.raises(UserError, match="is a file where a folder should be"):
        private_folder(tmp_path / "file")


def test_text_that_is_no_unicode_is_refused_where_it_comes_in(tmp_path):
    from commands import robo_rl

    from robo_rl.data.episode import Episode
    from robo_rl.human.correction_journal import CorrectionJournal

    half = "pick \udcff"
    says = "must be Unicode text.*half of a surrogate pair"
    with pytest.raises(UserError, match=f"episode: task {says}"):
        Episode(np.zeros((1, 2)), np.zeros((1, 2)), task=half)
    with pytest.raises(UserError, match=says):
        write_json(tmp_path / "a.json", {"task": half})
    journal = CorrectionJournal(tmp_path / "journal")
    with pytest.raises(UserError, match=f"task {says}"):
        journal.frame("a", 0, half, np.zeros(2), np.zeros(2), 0.0, 0, 0, {})
    assert len(journal) == 0 and (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    journal.close()
    for argv in (["train", "--task", half], ["collect", "--out", half], [half]):
        assert "an option of the command line must be Unicode text" in robo_rl(tmp_path, *argv).mistake
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal"]


def leave_memory() -> None:
    """Let this process take 1.6 GB more than it has."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (3 << 29),) * 2)


def test_what_the_memory_does_not_hold_is_one_line(tmp_path):
    from commands import robo_rl

    import sims
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from robo_rl.files import free_memory, require_memory

    require_memory("nothing", 0, "")
    with pytest.raises(
        UserError,
        match=r"1000000 envs needs about 31.* GB of memory and .* are free; use fewer envs or smaller",
    ):
        sims.make("mujoco", "pick_cube", num_envs=10**6, obs="rgb", image_size=512)
    assert 0 < free_memory() < 1 << 50
    done = robo_rl(
        tmp_path,
        "train",
        "--task",
        "reach",
        "--envs",
        "1000000",
        "--workers",
        "0",
        "--out",
        "a",
        first=leave_memory,
    )
    assert "1000000 envs needs about 5.0 GB" in done.mistake
    done = robo_rl(
        tmp_path,
        "train",
        "--task",
        "reach",
        "--envs",
        "2",
        "--workers",
        "0",
        "--policy.hidden",
        "8192",
        "--policy.layers",
        "32",
        "--demos",
        "0",
        "--out",
        "b",
        "--threads",
        "1",
        first=leave_memory,
    )
    assert done.code == 2 and "robo_rl: out of memory" in done.err and "Traceback" not in done.err, done
    for text, says in (
        ("<mujoco><nonsense/></mujoco>", "the model cannot be read"),
        ("<mujoco/>", "there is none to choose from"),
        ('<mujoco><worldbody><body><joint name="fr3_joint1"/></body></worldbody></mujoco>', "unknown joint"),
    ):
        with pytest.raises(UserError, match=says):
            arm_model(load_robot("fr3"), text)


def test_rows_of_a_file_are_there_again_and_a_broken_line_is_told(tmp_path):
    at = tmp_path / "found.jsonl"
    assert kept_rows(None) == kept_rows(at) == []
    for row in ({"seed": 0}, {"seed": 1}):
        keep_row(at, row)
        keep_row(None, row)
    assert kept_rows(at) == [{"seed": 0}, {"seed": 1}]
    at.write_text('{"seed": 0}\n{"seed"')
    with pytest.raises(UserError, match="found.jsonl"):
        kept_rows(at)


def test_a_folder_where_a_file_is_to_be_written_is_named_and_stays(tmp_path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(
        UserError, match=r"page.html is a folder where a file should be; give the name of a file$"
    ):
        write_json(tmp_path / "page.html", {})
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_disk_that_is_read_only_is_told_though_nothing_can_be_taken_away_there_either(tmp_path):
    told = "no permission to write .*page.html; choose a folder of your own"
    with pytest.raises(UserError, match=told), replacing(tmp_path / "page.html") as temp:
        temp.mkdir()  # no file that could be taken away
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_folder_that_this_user_may_not_write_is_told_with_the_remedy():
    with pytest.raises(UserError, match="^no permission to write /sys/run; choose a folder of your own$"):
        private_folder("/sys/run")  # where the kernel alone makes folders
    with pytest.raises(UserError, match="^no permission to write /sys; "), lock("/sys"):
        pass


def test_a_full_disk_is_told_with_a_way_on_that_every_command_has(tmp_path):
    told = f"the disk is full: .*{GO_ON}$"
    with pytest.raises(UserError, match=told), replacing(tmp_path / "fit.safetensors"):
        raise OSError(errno.ENOSPC, "No space left on device")
