"""Mutation run over the core files: does some test fail when a line is wrong?

Each mutant is one small fault (an operator, a constant, a condition, a dropped statement) in one file of a
copy of the tree. The tests named for that file run in a process forked from one that has already imported
torch. A
mutant that no test notices survives; survivors are printed as `file:line  before -> after`.

    python tests/mutate.py                                  # a random sample of each file
    python tests/mutate.py --files robo_rl/losses.py --per-file 0     # every mutant of one file

Exit code 1 if fewer than `--least` of all mutants are killed. Faults that change nothing that can be observed
are listed with the reason in `tests/mutants_equivalent.tsv`: file, line as it is, line with the fault,
reason, tab-separated.
"""

import argparse
import ast
import contextlib
import copy
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.tsv")
# file -> the tests that must notice a fault in it, the quickest first
TARGETS: dict[str, tuple[str, ...]] = {
    "robo_rl/sampling.py": ("test_definitions", "test_sampling", "test_trust"),
    "robo_rl/losses.py": (
        "test_definitions",
        "test_credit",
        "test_ragged_groups",
        "test_rollout_control_estimators",
    ),
    "robo_rl/advantages.py": (
        "test_definitions",
        "test_credit",
        "test_ragged_groups",
        "test_rollout_control_estimators",
    ),
    "robo_rl/corrections.py": ("test_definitions", "test_corrections_functions"),
    "robo_rl/runtime/ledger.py": ("test_ledger",),
    "robo_rl/replay.py": ("test_replay_plain", "test_replay"),
    "controllers/contracts.py": (
        "test_controllers_governor_limits",
        "test_controllers_governor",
        "test_controllers_compliance",
    ),
    "controllers/limits.py": ("test_controllers_governor_limits", "test_controllers_governor"),
    "controllers/governor.py": (
        "test_controllers_compliance",
        "test_controllers_governor_limits",
        "test_controllers_governor",
    ),
    "controllers/setpoint.py": (
        "test_controllers_governor_limits",
        "test_controllers_servo",
        "test_controllers_governor",
    ),
    "controllers/compliance.py": ("test_controllers_compliance",),
    "controllers/law.py": ("test_controllers_options", "test_controllers_tick", "test_controllers_law"),
    "controllers/tick.py": ("test_controllers_tick", "test_controllers_options"),
    "controllers/linear.py": ("test_controllers_tick", "test_controllers_options"),
    "controllers/memory.py": ("test_controllers_tick", "test_controllers_options"),
    "controllers/servo.py": ("test_controllers_servo", "test_controllers_cell", "test_controllers_motion"),
    "controllers/supervisor.py": ("test_controllers_supervisor",),
    "robo_rl/data/writer.py": ("test_data_layouts", "test_data", "test_data_integrity"),
    "robo_rl/data/meta.py": ("test_data_layouts", "test_data", "test_data_integrity"),
    "robo_rl/data/reader.py": ("test_data_layouts", "test_data", "test_data_integrity"),
    "robo_rl/data/checksums.py": ("test_data_checksums",),
}
# Run as plain Python: compiling takes longer than all of their tests.
UNCOMPILED = ("controllers/tick.py", "controllers/linear.py")
COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
    "floor": "ceil",
    "ceil": "floor",
    "amin": "amax",
    "amax": "amin",
}


@dataclass(frozen=True)
class Mutant:
    """Bytes [begin, end) of `file` become `after`."""

    file: str
    line: int
    begin: int
    end: int
    text: str  # the source lines that it lies in, as one
    changed: str  # those with the fault
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the fault while lines move."""
        return self.file, self.text, self.changed

    def label(self) -> str:
        return f"{self.file}:{self.line}  {' '.join(self.before.split())}  ->  {self.after}"


def changes(node: ast.AST) -> list[ast.AST]:
    """The faulty versions of one node."""

    def with_(**fields) -> ast.AST:
        new = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        return [with_(ops=[COMPARE[type(node.ops[0])](), *node.ops[1:]])]
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return [with_(op=ARITHMETIC[type(node.op)]())]
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        return [with_(op=ARITHMETIC[type(node.op)]())]
    if isinstance(node, ast.BoolOp):
        return [with_(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        return [copy.deepcopy(node.operand)]
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return [with_(value=not node.value)]
        if isinstance(node.value, (int, float)):
            return [with_(value=node.value + 1)]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in NAMES:
            func = copy.deepcopy(node.func)
            setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", NAMES[name])
            return [with_(func=func)]
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))]
    droppable = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    if droppable or stored or isinstance(node, (ast.Continue, ast.Break)):
        return [ast.Pass()]
    return []


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a source. Texts, annotations, decorators, defaults of `raise` and docstrings are left
    alone."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    out = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # zip's: our own check, no behaviour
            return
        for new in changes(node):
            at = node.test if isinstance(node, (ast.If, ast.IfExp, ast.While)) else node
            begin, end = offset(at.lineno, at.col_offset), offset(at.end_lineno, at.end_col_offset)
            text = ast.unparse(ast.fix_missing_locations(new))
            text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else text
            first, last = starts[at.lineno - 1], starts[at.end_lineno]
            line, changed = source[first:last], source[first:begin] + text.encode() + source[end:last]
            line, changed = (" ".join(x.decode().split()) for x in (line, changed))
            out.append(Mutant(file, at.lineno, begin, end, line, changed, source[begin:end].decode(), text))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(tree)
    return out


def equivalent(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Key of each fault that nobody can observe -> the reason."""
    if not path.exists():
        return {}
    rows = (line.split("\t") for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {(file, text, changed): reason for file, text, changed, reason in rows}


def run_tests(tree: Path, tests: tuple[str, ...], limit: float, compiled: bool = True) -> str:
    """Run tests in a forked process: 'passed', 'failed' or 'timed out' after `limit` seconds."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(tree)
        with open(tree / "log", "wb", 0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path[:0] = [str(tree / "tests"), str(tree)]
        os.environ["PYTHONPATH"] = str(tree)
        if not compiled:
            os.environ["NUMBA_DISABLE_JIT"] = "1"
        import pytest

        code = 1
        try:
            code = pytest.main(
                [
                    "-x",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "--assert=plain",
                    "--rootdir",
                    str(tree),
                    *(f"tests/{name}.py" for name in tests),
                ]
            )
        finally:
            os._exit(int(code))
    end = time.monotonic() + limit
    status, said = None, ""
    while not said:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            said = "passed" if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 else "failed"
        elif time.monotonic() > end:
            said = "timed out"
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and whatever the tests started
    if said == "timed out":
        os.waitpid(pid, 0)
    return said


def work(tree: Path, mutants: list[Mutant], limits: dict[str, float], pipe) -> None:
    """Try each mutant in this tree."""
    for mutant in mutants:
        path = tree / mutant.file
        source = path.read_bytes()
        path.write_bytes(source[: mutant.begin] + mutant.after.encode() + source[mutant.end :])
        try:
            pipe.send(
                (
                    mutant,
                    run_tests(tree, TARGETS[mutant.file], limits[mutant.file], mutant.file not in UNCOMPILED),
                )
            )
        finally:
            path.write_bytes(source)
    pipe.send(None)


def copy_tree(to: Path) -> Path:
    """The tracked files, without byte code (two mutants of one size within a second would share it)."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def sample(files: list[str], per_file: int, seed: int) -> list[Mutant]:
    known, out = equivalent(), []
    for file in files:
        found = [m for m in mutants_of(file, (ROOT / file).read_bytes()) if m.key not in known]
        rng = random.Random(f"{seed} {file}")
        out += (
            found
            if per_file == 0
            else sorted(rng.sample(found, min(per_file, len(found))), key=lambda m: m.begin)
        )
    return out


def preload() -> None:
    """What the tests import and is not of the project, once for all forks."""
    import gymnasium  # noqa: F401
    import hypothesis  # noqa: F401
    import mujoco  # noqa: F401
    import numpy  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", nargs="*", default=list(TARGETS), choices=list(TARGETS), metavar="FILE")
    parser.add_argument("--per-file", type=int, default=30, help="mutants drawn per file; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--least", type=float, default=0.95, help="share of mutants that must be killed")
    parser.add_argument("--out", type=Path, help="JSON with every survivor")
    args = parser.parse_args()
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    preload()
    mutants, began = sample(args.files, args.per_file, args.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="robo_rl_mutants_") as folder:
        os.environ["NUMBA_CACHE_DIR"] = f"{folder}/numba"
        trees = [copy_tree(Path(folder) / str(i)) for i in range(args.jobs)]
        limits = {}
        for file in args.files:
            since = time.monotonic()
            said = run_tests(trees[0], TARGETS[file], 1800, file not in UNCOMPILED)
            if said != "passed":
                print((trees[0] / "log").read_text()[-3000:])
                print(f"mutate: the tests of {file} {said} without any fault: {', '.join(TARGETS[file])}")
                return 2
            limits[file] = 3 * (time.monotonic() - since) + 30
            print(f"{file}: tests take {time.monotonic() - since:.0f} s", flush=True)
        survivors = try_all(mutants, trees, limits, began)
    rows = {}
    for file in args.files:
        n, alive = sum(m.file == file for m in mutants), sum(m.file == file for m in survivors)
        rows[file] = {"mutants": n, "killed": n - alive}
        print(f"{file:32} {n - alive} of {n} killed")
    share = 1 - len(survivors) / max(1, len(mutants))
    print(f"killed {len(mutants) - len(survivors)} of {len(mutants)} ({share:.1%}), wanted {args.least:.0%}")
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "share": share,
                    "seed": args.seed,
                    "per_file": args.per_file,
                    "files": rows,
                    "survivors": [asdict(m) for m in survivors],
                },
                indent=1,
            )
            + "\n"
        )
    return int(share < args.least)


def try_all(mutants: list[Mutant], trees: list[Path], limits: dict[str, float], began: float) -> list[Mutant]:
    """All mutants, one process per tree -> those that survived."""
    pipes, survivors, done = [], [], 0
    for i, tree in enumerate(trees):
        ours, theirs = multiprocessing.Pipe(False)
        if os.fork() == 0:
            try:
                work(tree, mutants[i :: len(trees)], limits, theirs)
            finally:
                os._exit(0)
        theirs.close()
        pipes.append(ours)
    while pipes:
        for pipe in multiprocessing.connection.wait(pipes):
            try:
                result = pipe.recv()
            except EOFError:
                result = None
            if result is None:
                pipes.remove(pipe)
                continue
            done += 1
            if result[1] == "passed":
                survivors.append(result[0])
                print(f"SURVIVED {result[0].label()}", flush=True)
            if done % 20 == 0:
                seconds = time.monotonic() - began
                print(f"{done} of {len(mutants)}, {len(survivors)} survived, {seconds:.0f} s", flush=True)
    assert done == len(mutants), "a process that tried mutants died"
    return survivors


if __name__ == "__main__":
    sys.exit(main())
