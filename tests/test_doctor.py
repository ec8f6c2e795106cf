"""`robo_rl doctor`: one clean JSON document, and no probe can take the doctor with it."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from robo_rl.cli.doctor import DoctorOptions, run
from robo_rl.probes import PROBES, Probe, ProbeResult, examine

# ---- probes that misbehave; the doctor runs them in processes of their own


def good() -> list[ProbeResult]:
    print("noise on standard output")
    os.write(1, b"and from C\n")
    return [ProbeResult("good", "ok", "1.0")]


def absent() -> list[ProbeResult]:
    return [ProbeResult("absent", "missing", "not installed", "pip install absent")]


def bug() -> list[ProbeResult]:
    raise ImportError("libfoo.so.1: no such file")


def segfault() -> list[ProbeResult]:
    print("half a")
    ctypes.string_at(0)
    return []


def hang() -> list[ProbeResult]:
    time.sleep(600)
    return []


def leave() -> list[ProbeResult]:
    sys.exit(3)


def first_waits() -> list[ProbeResult]:
    return meet("first", "second")


def second_waits() -> list[ProbeResult]:
    return meet("second", "first")


def meet(mine: str, other: str) -> list[ProbeResult]:
    """Leave a mark and wait for the other's: neither ends unless both run at once."""
    folder = Path(os.environ["MEETING"])
    (folder / mine).touch()
    while not (folder / other).exists():
        time.sleep(0.01)
    return [ProbeResult(mine, "ok", "met")]


def probe(name: str, needed: bool = False) -> Probe:
    return Probe(f"test_doctor:{name}", (name,), f"pip install {name}", needed)


def test_a_probe_that_crashes_hangs_or_leaves_costs_one_row():
    names = ("good", "bug", "segfault", "leave", "absent")
    rows = examine(tuple(probe(n) for n in names), deadline=120)
    assert [r.what for r in rows] == list(names)
    rows += examine((probe("hang"),), deadline=1)
    facts = {r.what: r.fact for r in rows}
    assert facts["good"] == "1.0"
    assert facts["bug"] == "ImportError: libfoo.so.1: no such file"
    assert facts["segfault"] == "crashed (SIGSEGV)"
    assert facts["hang"] == "no answer in 1 s; is the machine busy?"
    assert facts["leave"] == "crashed (exit code 3)"
    assert {r.what: r.status for r in rows if r.status != "missing"} == {"good": "ok", "hang": "limited"}
    assert all(r.remedy == f"pip install {r.what}" for r in rows if r.status == "missing")


def test_json_is_one_document_also_when_probes_print_and_crash(capfd):
    code = run(
        DoctorOptions(json=True), (probe("good", True), probe("segfault"), probe("absent")), deadline=10
    )
    out, _ = capfd.readouterr()
    document = json.loads(out)
    assert code == 0 and document["healthy"]
    first = {"what": "good", "status": "ok", "fact": "1.0", "remedy": "", "needed": True}
    assert document["rows"][0] == first
    assert [r["status"] for r in document["rows"]] == ["ok", "missing", "missing"]


def test_a_needed_thing_that_is_missing_makes_the_exit_code_1_and_shows_its_remedy(capsys):
    assert run(DoctorOptions(), (probe("good"), probe("absent", needed=True)), deadline=10) == 1
    out = capsys.readouterr().out
    assert "pip install absent" in out and "does not work here yet" in out
    assert run(DoctorOptions(), (probe("good", needed=True), probe("absent")), deadline=10) == 0


def test_the_real_doctor_answers_in_time_with_a_remedy_for_all_that_could_be_installed():
    command = [sys.executable, "-m", "robo_rl", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    document = json.loads(done.stdout)
    rows = {r["what"]: r for r in document["rows"]}
    assert set(rows) == {what for p in PROBES for what in p.whats}
    assert done.returncode == (0 if document["healthy"] else 1)
    for r in rows.values():
        assert r["status"] in ("ok", "limited", "missing") and r["fact"]
        assert r["status"] == "ok" or r["remedy"] or r["what"] in ("CUDA", "Vulkan"), r
    for what in ("Python", "torch", "MuJoCo", "video", "data sets"):  # what this suite needs to run at all
        assert rows[what]["status"] == "ok", rows[what]


def test_probes_are_asked_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MEETING", str(tmp_path))
    assert [r.fact for r in examine((probe("first_waits"), probe("second_waits")), deadline=60)] == [
        "met",
        "met",
    ]


def test_a_process_that_asks_a_probe_starts_with_the_standard_library_alone():
    code = (
        "import sys, robo_rl.probes; print({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert not {"tyro", "rich", "numpy", "torch"} & eval(done.stdout), done.stdout
