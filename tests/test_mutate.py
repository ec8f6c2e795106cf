"""The mutation run's own arithmetic; the run itself is part of `.ci/nightly`."""

import ast

import mutate
import pytest


@pytest.mark.parametrize("file", mutate.TARGETS)
def test_every_mutant_is_a_program_that_differs(file):
    source = (mutate.ROOT / file).read_bytes()
    found = mutate.mutants_of(file, source)
    assert len(found) > 20
    plain = ast.dump(ast.parse(source))
    for mutant in found[::7]:
        changed = source[: mutant.begin] + mutant.after.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != plain, mutant.label()


def test_the_tests_named_for_a_file_exist():
    for names in mutate.TARGETS.values():
        for name in names:
            assert (mutate.ROOT / "tests" / f"{name}.py").exists(), name


def test_every_fault_called_equivalent_still_exists_and_has_a_reason():
    made = {
        m.key for file in mutate.TARGETS for m in mutate.mutants_of(file, (mutate.ROOT / file).read_bytes())
    }
    known = mutate.equivalent()
    assert set(known) <= made
    assert all(reason.strip() for reason in known.values())


def test_a_fault_that_no_test_can_notice_survives_and_one_that_a_test_notices_does_not(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    assert mutate.run_tests(tmp_path, ("test_x",), 60) == "passed"
    (tmp_path / "tests" / "test_x.py").write_text("def test_it():\n    assert 1 + 1 == 3\n")
    assert mutate.run_tests(tmp_path, ("test_x",), 60) == "failed"
    (tmp_path / "tests" / "test_x.py").write_text("def test_it():\n    while True:\n        pass\n")
    assert mutate.run_tests(tmp_path, ("test_x",), 1.5) == "timed out"
