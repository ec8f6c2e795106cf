"""What users look for in a repository: one version, one licence, one pin of each tool, lists that name what
is there."""

import ast
import hashlib
import re
import tomllib
from pathlib import Path

import robo_rl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# SHA-256 of the text at apache.org/licenses/LICENSE-2.0.txt
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_version_is_one():
    version = PROJECT["project"]["version"]
    assert version == robo_rl.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert version in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence_is_apache_2_to_the_letter():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    assert (
        PROJECT["project"]["license"] == "Apache-2.0"
        and "\nlicense: Apache-2.0\n" in (ROOT / "CITATION.cff").read_text()
    )


def test_a_tool_has_one_version_everywhere():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    for requirement in PROJECT["project"]["optional-dependencies"]["dev"]:
        name, version = requirement.split("==")
        assert pins[name] == version


def test_the_hooks_before_a_commit_fetch_nothing_and_run_what_the_extra_installs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (\S+)", hooks) == ["local"] and set(re.findall(r"language: (\S+)", hooks)) == {
        "system"
    }
    installed = {
        requirement.split("==")[0] for requirement in PROJECT["project"]["optional-dependencies"]["dev"]
    }
    assert set(re.findall(r"entry: \.venv/bin/(\S+)", hooks)) == installed


def test_what_is_not_type_checked_yet_is_there():
    """A file that is gone, or was moved, leaves the list: nothing is left out by an old name."""
    for path in PROJECT["tool"]["pyright"]["exclude"]:
        assert "*" in path or (ROOT / path).exists(), f"pyright's exclude names {path}, which does not exist"


def unquoted(source: str) -> list[str]:
    """The paths that a suggested command (robo_rl …) of `source` has as they are, without `quoted`."""
    of_path = re.compile(
        r"\brobo_rl [a-z][^;:?{]*\{((?:\w+\.)*(?:folder|path|root|run|out|where|demos|source))\}"
    )
    texts = (
        "".join(
            v.value if isinstance(v, ast.Constant) else f"{{{ast.unparse(v.value)}}}" for v in node.values
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr)
    )
    return [found for text in texts for found in of_path.findall(text)]


def test_paths_in_the_commands_that_messages_suggest_are_quoted_for_the_shell():
    assert unquoted('f"{a}: mend it: robo_rl data repair {meta.root} "') == ["meta.root"]
    assert unquoted('f"{path} is none; see robo_rl data check {quoted(path)}"') == []
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for package in ("robo_rl", "sims", "world_models", "controllers")
        for file in sorted((ROOT / package).rglob("*.py"))
        for name in unquoted(file.read_text())
    ]
    assert not found, "write {quoted(PATH)} of robo_rl.errors there: " + ", ".join(found)
