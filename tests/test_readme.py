"""Every command and Python example that the README and docs/ show is run here, with budgets cut to seconds.

`.ci/run` runs the README's test command itself and builds the site. The HEAVY commands of docs/, and those
that need what they make, are left to `.ci/nightly`, which runs all of them in order. A block below a line
`*Not run by the tests…: REASON.*` is skipped; the reader sees the reason too.
"""

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, TINY_REPLAY, robo_rl

from robo_rl.options import OFF_POLICY

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = [
    p
    for p in sorted((ROOT / "docs").rglob("*.md"), key=lambda p: ("tutorials" not in p.parts, p))
    if not p.name.startswith("own_")
]  # tests/test_own.py runs these
SKIPPED = r"(\*Not run by the tests[^:\n]*: [^\n]+\*\n\n)?"
FOUND = [
    found
    for page in [README, *(p.read_text() for p in DOCS)]
    for found in re.findall(SKIPPED + r"```bash\n(.*?)```", page, re.S)
]
BLOCKS = [block for skipped, block in FOUND if not skipped]
LINES = [
    line.split("#")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.split("#")[0].strip()
]
PARTS = [part.strip() for line in LINES for part in line.split("&&")]
SHOWN = [tuple(shlex.split(p)[1:]) for p in PARTS if p.startswith((".venv/bin/robo_rl ", "robo_rl "))]
COMMANDS = [list(c) for c in dict.fromkeys(SHOWN)]  # a page may repeat what another shows
HEAVY = (
    "--kind video",
    "--kind encoded",
    "--kind text",
    "--gate",
    "--policies",
    "--obs rgb --preset",
    "--learners",
    "--server",
    "--max-staleness 0",
    "--rl.correction tis",
    "--rl.candidates",
    "--plan-rounds",
)


def with_marks(commands: list[list[str]]) -> list:
    """Parameters of a test of `commands`: those of docs/ alone that are heavy, or take the --out of such a
    one, are slow."""
    params, made = [], set()
    for argv in commands:
        said = " ".join(argv)
        needs = {a.removeprefix("wm:") for a in argv} & made
        slow = said not in README and (bool(needs) or any(words in said for words in HEAVY))
        if slow and "--out" in argv:
            made.add(argv[argv.index("--out") + 1])
        params.append(pytest.param(argv, marks=[pytest.mark.slow] * slow, id=said))
    return params


def budget(argv: list[str]) -> list[str]:
    """The command with a budget of seconds; what it names (sim, task, method) stays."""
    tiny_options = TINY_REPLAY if set(OFF_POLICY) & set(argv) else TINY

    def tiny(*skip: str) -> list[str]:
        pairs = [tiny_options[i : i + 2] for i in range(0, len(tiny_options) - 1, 2)]
        pairs = [(n, "1200" if n == "--steps" and v == "2500" else v) for n, v in pairs]  # a few updates
        return [w for name, value in pairs if name not in (*skip, *argv) for w in (name, value)]

    if "dds" in argv or "arm" in argv:
        pytest.skip("tests/test_robot_env.py learns and collects on the arm")
    if argv[0] == "train" and "--resume" not in argv:
        skip = ["--task"] if {"--sim", "--task", "--demos"} & set(argv) else []
        if "bc" in argv:
            skip += [n for n in TINY if n.startswith("--rl.")]
        if any(a.startswith("gym:") or a.endswith("-v5") for a in argv):
            skip, argv = [*skip, "--demos"], [*argv, "--max-steps", "100"]
        if "--init" in argv:
            skip += ["--demos", "--bc.updates", "--policy.hidden"]
        if "--rl.synthetic" in argv:
            argv = [*argv, "--rl.synthetic-updates", "20", "--rl.synthetic-rows", "200"]
        if "rgb" in argv:  # an update costs a hundred times that of a state policy
            small = (
                "--image-size 32 --policy.width 32 --policy.depth 1 --bc.updates 3 --steps 1000 --no-video"
            )
            head = [] if set(OFF_POLICY) & set(argv) else ["--bc.head", "3"]
            return [*argv, *tiny(*skip, "--bc.updates", "--steps"), *small.split(), *head]
        return [*argv, *tiny(*skip), "--torch-threads", "1", "--no-video"]
    if argv[0] == "collect" and "rgb" in argv:
        at = argv.index("--episodes")
        return [*argv[:at], "--episodes", "16", *argv[at + 2 :], "--envs", "16", "--threads", "1"]
    if argv[:2] == ["wm", "train"] and {"video", "--init"} & set(argv):
        net = [] if "--init" in argv else ["--net.width", "16", "--net.steps", "2"]
        short = "--fit.updates 3 --fit.arm 5 --fit.batch 2 --fit.heads 2 --fit.imagined 2 --horizon 8"
        return [*argv, *short.split(), *net]
    if argv[:2] == ["wm", "train"] and "encoded" in argv:
        return [
            *argv,
            "--fit.pictures",
            "3",
            "--fit.batch",
            "2",
            "--fit.dynamics.updates",
            "5",
            "--net.width",
            "16",
        ]
    # as long as it takes to be better than a world that stands still
    if argv[:2] == ["wm", "train"] and "text" in argv:
        return [*argv, "--fit.updates", "300", "--fit.batch", "32", "--net.width", "32"]
    if argv[:2] == ["wm", "tune"]:
        return [*argv, "--fit.updates", "2", "--fit.batch", "2", "--fit.inverse", "5", "--windows", "4"]
    if argv[:2] == ["wm", "eval"]:
        probed = ["1", "--no-video"] if "--policies" in argv else ["0"]  # the film: of the others
        small = ["--windows", "8", "--horizon", "16", "--episodes", "4", "--inverse", "5", "--probe"]
        return [*argv, *small, *probed]
    if argv[0] == "collect" and "--policy" in argv:
        at = argv.index("--episodes")
        return [*argv[:at], "--episodes", "40", *argv[at + 2 :], "--threads", "1"]
    if argv[:2] == ["wm", "train"]:
        return [*argv, "--fit.updates", "40", "--fit.batch", "32", "--net.hidden", "32", "--net.members", "2"]
    if argv[:2] == ["wm", "judge"]:
        return [*argv, "--updates", "30"]
    if argv[0] == "collect":
        return [*argv, "--episodes", "3"] if "--episodes" not in argv else argv
    if argv[0] == "eval":
        return [*argv, "--episodes", "8"]
    if argv[0] == "console":
        return [*argv, "--seconds", "2", "--port", "0"]
    if argv[0] == "correct":
        argv = [a for a in argv if a not in ("--rounds", "3")]
        twin = ["--twin-starts", "16", "--twin-trials", "2"] if "twin_rl" in argv else []
        return [
            *argv,
            *twin,
            "--rounds",
            "1",
            "--episodes",
            "3",
            "--calibration",
            "8",
            "--bc.updates",
            "5",
            "--eval-episodes",
            "4",
            "--no-video",
        ]
    if argv[0] == "bench":
        return [*argv, "--quick", "--seconds", "0.05"]
    return argv


def test_the_readme_shows_the_two_commands_and_they_use_the_pins():
    main, tests = (
        re.search(rf"<!-- {n} -->\n```bash\n(.*?)\n```", README, re.S)[1] for n in ("main", "tests")
    )
    assert "\n" not in main and "-c constraints.txt" in main and "robo_rl train" in main
    assert "\n" not in tests and "-c constraints.txt" in tests and "pytest" in tests


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder in which the README's main command was run, small."""
    folder = tmp_path_factory.mktemp("readme")
    first = next(c for c in COMMANDS if c[0] == "train" and "runs/first" in c)
    result = robo_rl(folder, *budget(first))
    assert result.code == 0, result.err
    return folder


def teach(folder: Path, demos: Path) -> None:
    """Corrections of a person in the data set that the console writes to."""
    from robo_rl.data.reader import load
    from robo_rl.data.writer import Writer

    demos = load(demos)
    with Writer(folder, spec=demos.spec) as w:
        e = demos.episode(0)
        w.add(replace(e, source="human", phase=[3] * len(e)))


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.pages
@pytest.mark.parametrize("argv", with_marks(COMMANDS))
def test_every_command_of_the_readme_runs(argv, workplace):
    if "maniskill" in argv:
        pytest.importorskip("mani_skill", reason="needs robo_rl[maniskill]")
    if argv[0] == "train" and "runs/first" in argv and not {"--resume", "--init"} & set(argv):
        return  # the fixture ran it
    if argv[0] == "workers":
        pytest.skip("tests/test_guard.py runs it beside a run")
    if argv[0] == "bench":
        pytest.skip("tests/test_bench.py runs the benches")
    if argv[0] in ("results", "completion"):
        pytest.skip(f"tests/test_{argv[0]}.py runs it")
    if argv[0] in ("sim-arm", "deploy", "up", "serve") or "--on" in argv:
        pytest.skip("tests/test_deploy.py and tests/test_launch.py run these")
    if argv[0] == "console":
        pytest.importorskip("websockets", reason="needs robo_rl[console]")
    if "console" in argv[1:]:  # correct RUN --operator console
        teach(workplace / argv[1] / "corrections", workplace / "runs/first/demos")
    result = robo_rl(workplace, *budget(argv), timeout=240)
    assert result.code == 0 or (argv[0] == "doctor" and result.code == 1), result.err


# ---- Python examples

SMALL = {
    "policy": {"hidden": 32},
    "bc": {"updates": 30, "batch": 32},
    "demos": "2",
    "video": False,
    "workers": 0,
    "threads": 1,
    "envs": 16,
    "steps": 1000,
    "eval_every": 500,
    "eval_episodes": 8,
    "rl": {"decisions": 4, "minibatch": 64, "epochs": 2},
}
LESS = {"recipe": SMALL, "evaluate": {"episodes": 8}, "collect": {"episodes": 4}}
FIT = "fit=options.FitOptions(updates=40, batch=32), net=options.LatentOptions(hidden=32, members=2)"
MORE = {"WorldModelConfig": FIT, "WorldEvalConfig": "windows=8, horizon=16, episodes=4, inverse=5"}
EXAMPLES = {
    str(p.relative_to(ROOT)): blocks
    for p in [ROOT / "README.md", *DOCS]
    if (
        blocks := [
            b
            for skipped, b in re.findall(SKIPPED + r"```python\n(.*?)```", p.read_text(), re.S)
            if not skipped
        ]
    )
}
NOTEBOOKS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.ipynb"))


class Smaller(ast.NodeTransformer):
    """The calls of an example with budgets of seconds; everything else stays."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in LESS:
            written = {k.arg: k.value for k in node.keywords}
            less = {k: v for k, v in LESS[name].items() if name == "recipe" or k in written}
            if name == "recipe" and isinstance(written.get("rl"), ast.Dict):
                less["rl"] = less["rl"] | ast.literal_eval(written["rl"])
            keep = [k for k in node.keywords if k.arg not in less]
            node.keywords = keep + [
                ast.keyword(k, ast.parse(repr(v), mode="eval").body) for k, v in less.items()
            ]
        elif name in MORE:
            node.keywords += ast.parse(f"f({MORE[name]})", mode="eval").body.keywords
        return node


def run_small(code: str, names: dict, where: str) -> None:
    exec(compile(ast.fix_missing_locations(Smaller().visit(ast.parse(code))), where, "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", EXAMPLES)
def test_every_python_example_runs(page, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    names = {"__name__": "__main__"}
    for block in EXAMPLES[page]:
        run_small(block, names, page)


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_cells_of_a_notebook_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Shown:
        times = 0

        def update(self, figure):
            Shown.times += 1

    names = {"__name__": "__main__", "display": lambda *a, **k: Shown()}  # IPython's
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        assert not cell.get("outputs"), "a notebook is committed without outputs"
        if cell["cell_type"] == "code":
            run_small("".join(cell["source"]), names, path)
    assert Shown.times > 1, "the plot followed training"


@pytest.mark.pages
def test_every_metric_of_the_runs_above_is_explained(workplace):
    page = (ROOT / "docs/reference/metrics.md").read_text()
    known = {*re.findall(r"`([a-z]+/[\w*]+(?:/<task>)?)`", page)}
    told = {
        re.sub(r"^(\w+/\w+)/\w+$", r"\1/<task>", k)
        for p in workplace.rglob("metrics.jsonl")
        for line in p.read_text().splitlines()
        for k in json.loads(line)
        if "/" in k
    }
    assert told
    assert not {
        k
        for k in told
        if k not in known and f"{k.split('/')[0]}/*" not in known and not k.startswith("staleness/hist_")
    }
