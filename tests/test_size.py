"""Nothing is so long that it cannot be read at once: functions, classes and files outside tests."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION, CLASS, FILE = 100, 350, 600  # lines
TABLES = {"robo_rl/experiment/recipe_table.py"}  # rows of a table, not code
# Longer still, and to be split: "file" or "file: class or function".
OPEN: set[str] = set()


def too_long(path: Path, name: str) -> set[str]:
    """What of a source file is over its limit."""
    text = path.read_text(encoding="utf-8")
    out = {name} if len(text.splitlines()) > FILE and name not in TABLES else set()
    for node in ast.walk(ast.parse(text)):
        limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
        if (
            isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno - node.lineno >= limit
        ):
            out.add(f"{name}: {node.name}")
    return out


def test_functions_classes_and_files_have_a_length_that_can_be_read():
    found = set().union(
        *(
            too_long(p, str(p.relative_to(ROOT)))
            for package in ("robo_rl", "sims", "world_models", "controllers", "launch")
            for p in (ROOT / package).rglob("*.py")
        )
    )
    assert not found - OPEN, "split these: " + ", ".join(sorted(found - OPEN))
    assert not OPEN - found, "no longer too long, take them from OPEN: " + ", ".join(sorted(OPEN - found))


def test_what_is_one_line_too_long_is_found(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    pass\n" * (FUNCTION - 1))
    assert not too_long(path, "x")
    path.write_text("def f():\n" + "    pass\n" * FUNCTION)
    assert too_long(path, "x") == {"x: f"}
    path.write_text("class C:\n" + "    x = 0\n" * CLASS)
    assert too_long(path, "x") == {"x: C"}
    path.write_text("\n" * (FILE + 1))
    assert too_long(path, "x") == {"x"}
