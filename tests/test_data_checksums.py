"""Checksums of a data set's files: the list, who compares with it, and files that take their places
together."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from robo_rl.data import checksums
from robo_rl.data.checksums import (
    ABSENT,
    NAME,
    TOLERANCE,
    Checksums,
    Staged,
    Verifier,
    file_digest,
    from_text,
    put_text,
    settled,
    to_text,
)

A, B = b"first", b"second, longer"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def folder(root: Path, **files: bytes) -> Path:
    """A folder meta/ of files and their right list of checksums."""
    (root / "meta").mkdir(exist_ok=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    checksums.write(root, Checksums({name: (sha(data),) for name, data in files.items()}))
    return root


# ---- the list


def test_the_list_comes_back_as_it_was_written_whatever_the_order():
    sums = Checksums({"b": ("1", "2"), "a": ("3",)}, 0.25)
    text = to_text(sums)
    assert from_text(text) == sums and text == to_text(Checksums({"a": ("3",), "b": ("1", "2")}, 0.25))
    body = json.loads(text)
    assert list(body) == ["sha256", "files", "tolerance_s"] and list(body["files"]) == ["a", "b"]
    assert body["sha256"] == sha(
        json.dumps({k: body[k] for k in ("files", "tolerance_s")}, sort_keys=True).encode()
    )
    assert text.startswith('{\n "sha256"') and text.endswith("}\n")
    assert (
        Checksums() == Checksums({}, 1e-4)
        and TOLERANCE == 1e-4
        and ABSENT == ""
        and NAME == "meta/checksums.json"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"sha256": 1, "files": {}}', "[" * 60_000])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError):
        from_text(text)


@pytest.mark.parametrize("change", [{"tolerance_s": 0.5}, {"files": {}}, {"sha256": "0"}])
def test_a_list_that_was_changed_is_refused(change):
    with pytest.raises(ValueError, match="its own SHA-256 is wrong"):
        from_text(json.dumps(json.loads(to_text(Checksums({"a": ("1",)}))) | change))


def test_a_list_may_be_longer_than_a_message():
    text = to_text(Checksums({f"videos/chunk-000/file-{i:06d}.mp4": (sha(b""),) for i in range(3000)}))
    assert len(text) > 300_000 and len(from_text(text).files) == 3000
    with pytest.raises(ValueError, match="268435457 bytes, at most 268435456 are read"):
        from_text(bytes((1 << 28) + 1))


def test_the_digest_of_a_file_is_its_sha256_and_of_none_it_is_absent(tmp_path):
    (tmp_path / "x").write_bytes(A)
    assert file_digest(tmp_path / "x") == sha(A) and file_digest(tmp_path / "y") == ABSENT


# ---- the verifier


def test_what_is_listed_is_compared_and_what_is_trusted_or_not_listed_is_not(tmp_path):
    root = folder(tmp_path, x=A, y=A, z=A)
    (root / "new").write_bytes(B)
    verifier = Verifier(root, trust=(root / "y",))
    for name in "xyz":
        assert verifier.is_sound(root / name) and verifier.read(root / name) == (A, True)
        (root / name).write_bytes(B)
    assert verifier.read(root / "x") == (B, False) and not verifier.is_sound(root / "x")
    assert verifier.read(root / "y") == (B, True) and verifier.is_sound(root / "y")
    assert verifier.read(root / "new") == (B, True) and verifier.is_sound(root / "new")
    assert all(Verifier(root, None).read(root / name) == (B, True) for name in "xyz") and Verifier(
        root, None
    ).is_sound(root / "x")


def test_without_a_list_nothing_is_compared_and_a_damaged_one_is_refused_unless_all_is_trusted(tmp_path):
    (tmp_path / "x").write_bytes(A)
    verifier = Verifier(tmp_path)
    assert (
        verifier.sums is None
        and verifier.read(tmp_path / "x") == (A, True)
        and verifier.is_sound(tmp_path / "x")
    )
    assert verifier.is_sound(tmp_path / "nothing") and verifier.listed(tmp_path) == []
    folder(tmp_path, x=B)
    (tmp_path / NAME).write_text("{}")
    with pytest.raises(ValueError):
        Verifier(tmp_path)
    assert Verifier(tmp_path, None).read(tmp_path / "x") == (B, True)


def test_a_missing_file_is_unsound_only_if_it_has_to_be_there(tmp_path):
    files = {"meta/a": (sha(A),), "meta/b": (sha(A), ABSENT), "c": (ABSENT, sha(A)), "d/e/f": ("1",)}
    checksums.write(folder(tmp_path), Checksums(files))
    verifier = Verifier(tmp_path)
    assert [verifier.is_sound(tmp_path / n) for n in ("meta/a", "meta/b", "c", "other")] == [
        False,
        True,
        True,
        True,
    ]
    assert verifier.listed(tmp_path / "meta") == [tmp_path / "meta/a"] and verifier.listed(
        tmp_path / "d"
    ) == [tmp_path / "d/e/f"]
    assert (
        sorted(verifier.listed(tmp_path)) == [tmp_path / "d/e/f", tmp_path / "meta/a"]
        and Verifier(tmp_path, None).listed(tmp_path) == []
    )
    with pytest.raises(FileNotFoundError):
        verifier.read(tmp_path / "meta/a")


def test_each_of_two_digests_is_right(tmp_path):
    folder(tmp_path)
    checksums.write(tmp_path, Checksums({"x": (sha(A), sha(B))}))
    verifier = Verifier(tmp_path)
    for data, right in ((A, True), (B, True), (b"third", False)):
        (tmp_path / "x").write_bytes(data)
        assert verifier.read(tmp_path / "x") == (data, right) and verifier.is_sound(tmp_path / "x") is right


def test_files_that_grew_with_their_list_since_it_was_read_are_sound(tmp_path):
    verifiers = [Verifier(folder(tmp_path, x=A, y=A)) for _ in range(2)]
    folder(tmp_path, x=B, y=B)
    assert verifiers[0].read(tmp_path / "x") == (B, True) and verifiers[1].is_sound(tmp_path / "x")
    for verifier in verifiers:
        assert verifier.sums.files["y"] == (sha(B),) and verifier.read(tmp_path / "y") == (B, True)
    (tmp_path / "x").write_bytes(A)
    for verifier in verifiers:
        assert verifier.read(tmp_path / "x") == (A, False) and not verifier.is_sound(tmp_path / "x")


def test_a_file_found_sound_is_read_again_only_if_it_changed(tmp_path):
    root = folder(tmp_path, x=A)
    verifier, path = Verifier(root), root / "x"
    assert verifier.is_sound(path)
    stat = os.stat(path)
    with open(path, "r+b") as f:
        f.write(b"F")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert verifier.is_sound(path) and not Verifier(root).is_sound(path)  # nothing tells that it changed
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert not verifier.is_sound(path)


# ---- staged files


def test_staged_files_take_their_places_together_and_the_list_knows_both_until_then(tmp_path):
    root = folder(tmp_path, x=A, bare=A, kept=A)
    sums = Checksums({"x": ("older", sha(A)), "kept": (sha(A),), "gone": (sha(A), ABSENT)}, 0.5)
    staged, order = Staged(root, sums), []
    assert not staged.used and staged.sums is sums
    for name in ("x", "deep/er/new", "bare", "last"):
        temp = staged.path(root / name)
        assert (
            temp == staged.path(root / name) and temp.parent == (root / name).parent and temp.parent.is_dir()
        )
        assert temp.name == f".{Path(name).name}.{os.getpid()}.tmp" and staged.used
        staged.text(root / name, f"new {name}")
        assert temp.read_text() == f"new {name}"
        order.append(name)
    assert (root / "x").read_bytes() == A and not (root / "last").exists()
    staged.commit()
    assert [(root / name).read_text() for name in order] == [
        f"new {name}" for name in order
    ] and not staged.used
    want = {
        "x": (sha(A), sha(b"new x")),
        "kept": (sha(A),),
        "deep/er/new": (ABSENT, sha(b"new deep/er/new")),
        "bare": (sha(A), sha(b"new bare")),
        "last": (ABSENT, sha(b"new last")),
    }
    assert staged.sums == Checksums(want, 0.5) == from_text((root / NAME).read_text())
    assert settled(root, staged.sums) == Checksums({k: v[-1:] for k, v in want.items()}, 0.5)
    assert not list(root.rglob("*.tmp"))


def test_what_is_dropped_or_abandoned_leaves_nothing(tmp_path):
    root = folder(tmp_path, x=A)
    staged = Staged(root, Checksums())
    staged.text(root / "x", "new")
    staged.text(root / "y", "new")
    staged.path(root / "never written")
    staged.drop(root / "never written")
    staged.drop(root / "x")
    assert [p.name for p in root.glob(".*.tmp")] == [f".y.{os.getpid()}.tmp"] and staged.used
    staged.path(root / "never written")
    staged.abandon()
    assert not list(root.glob(".*.tmp")) and not staged.used and (root / "x").read_bytes() == A
    staged.abandon()


def test_after_a_flush_that_was_cut_short_each_file_keeps_the_digest_that_it_has(tmp_path):
    root = folder(tmp_path, old=A, new=B, other=b"third", one=b"third")
    sums = Checksums(
        {
            "old": (sha(A), sha(B)),
            "new": (sha(A), sha(B)),
            "other": (sha(A), sha(B)),
            "one": (sha(A),),
            "never": (ABSENT, sha(A)),
            "empty": (ABSENT,),
            "lost": (sha(A), sha(B)),
        },
        0.5,
    )
    assert settled(root, sums) == Checksums(
        {
            "old": (sha(A),),
            "new": (sha(B),),
            "other": (sha(A), sha(B)),
            "one": (sha(A),),
            "lost": (sha(A), sha(B)),
        },
        0.5,
    )


def test_a_text_is_put_with_its_checksum_where_files_have_them_and_alone_where_they_have_none(tmp_path):
    put_text(tmp_path, None, tmp_path / "x", "alone")
    assert (tmp_path / "x").read_text() == "alone" and not (tmp_path / NAME).exists()
    root = folder(tmp_path, x=A, kept=B)
    put_text(root, from_text((root / NAME).read_text()), root / "x", "new")
    assert (root / "x").read_text() == "new"
    assert from_text((root / NAME).read_text()) == Checksums({"x": (sha(b"new"),), "kept": (sha(B),)})


def test_every_file_is_durable_before_it_gets_its_name_and_every_folder_before_the_last_file_does(tmp_path):
    root, events = folder(tmp_path, x=A), []
    staged = Staged(root, Checksums({"x": (sha(A),)}))
    for name in ("x", "deep/y", "other/last"):
        staged.text(root / name, "new")
    fsync, replace = os.fsync, os.replace
    os.fsync = lambda fd: events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd)
    os.replace = lambda a, b: events.append(("name", str(b))) or replace(a, b)
    temps = [str(staged.path(root / name)) for name in ("x", "deep/y", "other/last")]
    try:
        staged.commit()
    finally:
        os.fsync, os.replace = fsync, replace
    listed = events.index(("name", str(root / NAME)))
    assert events[:3] == [("sync", temp) for temp in temps] and listed > 3
    first, second, last = (events.index(("name", str(root / name))) for name in ("x", "deep/y", "other/last"))
    assert listed < first < second < last
    assert {path for kind, path in events[second:last] if kind == "sync"} == {str(root), str(root / "deep")}
    assert ("sync", str(root / "other")) in events[last:]
