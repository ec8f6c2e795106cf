"""Who may import whom, read from the sources; and what is not loaded before it is needed."""

import ast
import functools
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Inside robo_rl each line imports only from the lines above it (and a package from itself).
LAYERS = (
    "types errors geometry",
    "plugins",
    "old_names other_names",
    "files compiled device_names options contract starts stats advantages corrections losses optim "
    "sampling noise normalise tree_credit colours",
    "lora shapes",
    "policies data rewards log journal selection health provenance signals child stored",
    "checkpoint rollout replay results",
    "devices",
    "evaluation algos replay_collector",
    "demos film rollout_control",
    "human recording",
    "runtime",
    "experiment",
    "bench report probes",
    "cli __init__",
    "__main__",
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}
# no file, no clock, no process
PURE = {*LAYERS[0].split(), *LAYERS[2].split(), *LAYERS[3].split()} - {"files", "compiled"}
SIDE_BY_SIDE = {
    "sims": {
        "types",
        "errors",
        "plugins",
        "files",
        "compiled",
        "device_names",
        "geometry",
        "contract",
        "starts",
    },
    "controllers": {"geometry", "errors", "files", "compiled"},
    "world_models": {"types", "files", "lora", "data", "log", "checkpoint", "provenance", "signals", *PURE},
}  # what of robo_rl the packages beside it may import
HEAVY = [
    "torch",
    "mujoco",
    "gymnasium",
    "pyarrow",
    "av",
    "tensorboard",
    "matplotlib",
    "mani_skill",
    "sapien",
    "envpool",
    "wandb",
    "transformers",
    "jax",
    "numba",
]


@dataclass(frozen=True)
class Names:
    """Of a source file: dotted names that it imports anywhere (of `from a import b` it is a.b), the pairs
    (a, b) of these, names that it defines or imports anywhere, and its classes."""

    imported: frozenset[str]
    taken: frozenset[tuple[str, str]]
    defined: frozenset[str]
    classes: tuple[str, ...]


def names_of(source: str, where: object = "") -> Names:
    tree, imported, taken, defined = ast.parse(source), set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(a.asname or a.name).split(".")[0] for a in node.names}
        if isinstance(node, ast.Import):
            imported |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{where}: imports are absolute here"
            taken |= {(node.module, a.name) for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return Names(
        imported=frozenset(imported | {".".join(pair) for pair in taken}),
        taken=frozenset(taken),
        defined=frozenset(defined),
        classes=tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
    )


@functools.cache  # every file is read by several tests
def names_in(path: Path) -> Names:
    return names_of(path.read_text(encoding="utf-8"), path)


def imports(path: Path) -> frozenset[str]:
    return names_in(path).imported


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def part(dotted: str) -> str:
    """The layer's name of robo_rl.<part>.…; "" for the package itself."""
    second = (dotted.split(".") + [""])[1]
    return second if second in LEVEL else ""


def layer_of(path: Path) -> str:
    inside = path.relative_to(ROOT / "robo_rl")
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def test_every_module_of_robo_rl_has_a_layer_and_every_layer_its_modules():
    assert {layer_of(p) for p in sources("robo_rl")} == {*LEVEL}


@pytest.mark.parametrize("path", sources("robo_rl"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_the_layers_above_its_own(path):
    mine = layer_of(path)
    theirs = {part(name) for name in imports(path) if name.split(".")[0] == "robo_rl"} - {mine, ""}
    wrong = [name for name in theirs if LEVEL[name] >= LEVEL.get(mine, 0)]
    assert not wrong, f"{mine} must not import {', '.join(wrong)}"


def test_only_the_command_line_knows_the_packages_beside_robo_rl():
    beside = {"sims", "controllers", "world_models", "tests", "launch"}
    for path in sources("robo_rl"):
        found = {name.split(".")[0] for name in imports(path)} & beside
        assert not found or LEVEL[layer_of(path)] >= LEVEL["experiment"], f"{path} imports {found}"


@pytest.mark.parametrize("package", SIDE_BY_SIDE)
def test_packages_beside_robo_rl_import_only_its_first_layers(package):
    for path in sources(package):
        names = imports(path)
        wrong = [n for n in names if n.split(".")[0] == "robo_rl" and part(n) not in SIDE_BY_SIDE[package]]
        assert not wrong, f"{path} imports {', '.join(wrong)}"
        others = {n.split(".")[0] for n in names} & (
            {"sims", "controllers", "world_models", "tests"} - {package}
        )
        assert not others, f"{path} imports {others}"
        if package == "controllers":
            assert not any(n.split(".")[0] == "torch" for n in names), f"{path} runs on the robot: no torch"


def test_the_pure_layer_touches_no_file_clock_or_process():
    impure = {
        "os",
        "pathlib",
        "time",
        "subprocess",
        "socket",
        "shutil",
        "threading",
        "multiprocessing",
        "random",
        "io",
    }
    for path in sources("robo_rl"):
        if layer_of(path) in PURE:
            assert not {n.split(".")[0] for n in imports(path)} & impure, path


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph() -> dict[str, set[str]]:
    """Module -> the modules of this repository that it imports, at the top or in a function."""
    paths = {module_of(p): p for package in ("robo_rl", *SIDE_BY_SIDE) for p in sources(package)}
    return {
        name: {n if n in paths else n.rpartition(".")[0] for n in imports(path)} & {*paths} - {name}
        for name, path in paths.items()
    }


def circles(of: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which leads to every other of its set (strongly connected, more than one)."""

    def reached(begin: str) -> set[str]:
        seen, open_ = set(), [begin]
        while open_:
            for name in of[open_.pop()] - seen:
                seen.add(name)
                open_.append(name)
        return seen

    leads = {name: reached(name) for name in of}
    found = {frozenset(b for b in leads[a] if a in leads[b]) for a in of if a in leads[a]}
    return [set(c) for c in found]


def test_circles_are_found_at_any_length():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"a"}}) == [{"b", "c", "d"}]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_two_files_import_each_other_not_even_inside_a_function_or_by_way_of_others():
    found = circles(graph())
    assert not found, f"files that import each other: {[sorted(c) for c in found]}"


def test_no_two_classes_share_a_name():
    where: dict[str, list[str]] = {}
    for path in (p for package in ("robo_rl", *SIDE_BY_SIDE) for p in sources(package)):
        for name in names_in(path).classes:
            where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_simulators_are_loaded_only_where_they_are_made():
    """Nothing imports a simulator's own package when `sims` is imported, nor torch."""
    top = set()
    for node in ast.parse((ROOT / "sims" / "__init__.py").read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            top.add(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
    assert top <= {"robo_rl.errors", "robo_rl.plugins"}


def loaded(*commands: list[str]) -> dict:
    """Import robo_rl in a fresh interpreter, then run commands -> {"modules": how many the import loads,
    "heavy": modules of HEAVY that are there after it and after each command}."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"""
import contextlib, io, json, sys
before = len(sys.modules)
import robo_rl
modules = len(sys.modules) - before
heavy = [[m for m in {HEAVY} if m in sys.modules]]
for argv in {commands}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        from robo_rl.cli import main
        main(argv)
    heavy.append([m for m in {HEAVY} if m in sys.modules])
print(json.dumps({{"heavy": heavy, "modules": modules}}))""",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_importing_robo_rl_loads_nothing_heavy_and_few_modules():
    got = loaded()
    assert got["heavy"] == [[]]
    assert got["modules"] < 20  # which is why it is quick


def test_help_loads_nothing_heavy():
    from robo_rl.cli import COMMANDS

    there = [c for c in COMMANDS if (ROOT / "robo_rl" / "cli" / f"{c}.py").exists()]
    assert {"train", "eval", "collect", "doctor", "report"} <= {*there}
    commands = [["--help"], *([c, "--help"] for c in there)]
    for argv, heavy in zip(commands, loaded(*commands)["heavy"][1:], strict=True):
        assert not heavy, f"robo_rl {' '.join(argv)} loads {heavy}"


def test_a_wrong_name_is_told_before_torch_or_a_simulator_is_loaded():
    """torch takes seconds; a name is looked at before it."""
    wrong = [
        "train --sim mujco",
        "train --task pick_cub",
        "train --sim maniskill --task PickCub",
        "train --sim maniskill --task PegInsertionSide-v1",
        "collect --sim maniskill --task PegInsertionSide-v1,robot_uids=panda",
        "train --algo pirl",
        "train --obs rbg",
        "train --preset quik",
        "train --control ee_delt",
        "train --reward dens",
        "train --randomise mas",
        "eval run --device gpu",
        "serve run --device gpu",
        "deploy run --device gpu",
        "deploy run --policy nowhere",
        "deploy run --robot pand",
        "train --resume nowhere",
        "train --init nowhere",
        "train --demos nowhere",
        "train --plan --demos nowhere",
        "train --algo bc --sim none --demos nowhere",
        "train --bc.pear nowhere",
        "train --sim wm:nowhere",
        "collect --task pick_cub",
        "collect --sim mujco",
        "eval nowhere",
        "report nowhere",
        "correct nowhere",
        "serve nowhere",
        "deploy nowhere",
        "workers nowhere 2",
        "bench simm",
        "wm trin",
        "vla chek",
        "vla check nowhere",
        "vla convert nowhere there",
    ]
    for argv, heavy in zip(wrong, loaded(*(w.split() for w in wrong))["heavy"][1:], strict=True):
        assert not heavy, f"robo_rl {argv} loads {heavy}"


def test_every_package_and_its_files_are_in_the_wheel():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for name in ("robo_rl", *SIDE_BY_SIDE)
        for p in (ROOT / name).rglob("__init__.py")
    }
    assert set(config["packages"]) == there
    for name in ("robo_rl", *SIDE_BY_SIDE):
        packed = {
            f for pattern in config.get("package-data", {}).get(name, []) for f in (ROOT / name).glob(pattern)
        }
        data = {
            f
            for f in (ROOT / name).rglob("*")
            if f.is_file() and f.parent.name != "__pycache__" and f.suffix != ".py"
        }
        assert not data - packed, f"not in the wheel: {data - packed}"


def test_every_package_says_that_it_has_types():
    for name in ("robo_rl", *SIDE_BY_SIDE):
        assert (ROOT / name / "py.typed").exists(), name


def test_every_file_of_launch_is_in_the_wheel_at_its_own_place():
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    packed = {
        Path(folder) / f.name: f
        for folder, patterns in folders.items()
        for pattern in patterns
        for f in ROOT.glob(pattern)
    }
    there = [f for f in (ROOT / "launch").rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert {Path("share/robo_rl") / f.relative_to(ROOT): f for f in there} == packed


def test_tests_and_launch_are_no_packages():
    """ROS 2 has a package called launch; an __init__.py here would shadow it."""
    assert not (ROOT / "launch" / "__init__.py").exists() and not (ROOT / "tests" / "__init__.py").exists()


def fresh(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_the_first_update_of_any_method_loads_no_compiler():
    """The first step of an optimizer of torch.optim imports torch._dynamo, which takes as long as torch
    itself."""
    print(
        fresh("""
import sys, torch
from robo_rl.algos.bc import train
from robo_rl.algos.credit import Credit, descend
from robo_rl.algos.offpolicy import CriticLearner, Temperature, td_loss
from robo_rl.options import BcOptions, OffPolicyOptions, PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
policy = make_policy(PolicyOptions(horizon=2, execute=2, hidden=8, layers=1), ObsSpec(state=3, action=2), 0)
credit = Credit(policy, PiRlOptions(), 0)
credit.step(torch.ones(4, 3), torch.ones(4), torch.ones(4))
learner = CriticLearner(policy, 4, OffPolicyOptions(), 0)
descend(td_loss(learner.critic(torch.ones(5, 3), torch.ones(5, 4)), torch.ones(5)), learner.params, learner.opt, 1.0)
Temperature(0.1, 1e-3, -1.0).step(torch.ones(4))
train(policy, lambda n, g: ({'state': torch.ones(n, 3)}, torch.ones(n, 2, 2), torch.ones(n, 2)), BcOptions(updates=1), 0)
loaded = sorted(m for m in sys.modules if m.split('.')[:2] in (['torch', '_dynamo'], ['torch', '_inductor']))
assert not loaded, loaded
""")  # noqa: E501
    )


def test_a_vision_language_action_model_is_made_and_acts_without_a_compiler():
    """torch's draw of an embedding on the meta device imports torch._dynamo; every command and worker makes a
    model."""
    fresh("""
import sys, torch
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import observations
from robo_rl.policies.vla.keys import FAMILIES
from robo_rl.policies.vla.make import make_model, vla_config
for family in FAMILIES:
    make_model(vla_config(family, 'tiny'), 0)
    assert 'torch._dynamo' not in sys.modules, family
spec = ObsSpec(state=7, action=4, views=('front',), image_size=32, language=True, text=64)
policy = make_policy(PolicyOptions(kind='pi05', horizon=4, execute=4), spec, 0)
policy.act(observations(spec, 2), torch.Generator().manual_seed(0), True)
assert 'torch._dynamo' not in sys.modules
""")


@pytest.mark.parametrize("task", ["pick_cube", "HalfCheetah-v5"])
def test_what_workers_are_forked_with_has_no_thread_and_no_context_of_a_gpu(task):
    print(
        fresh(f"""
import importlib, sys, threading, sims
for name in sims.preload("mujoco", {task!r}):
    importlib.import_module(name)
others = [t for t in threading.enumerate() if t is not threading.main_thread()]
for t in others:
    t.join(60)  # a timer that was cancelled
assert threading.active_count() == 1 and not {{"torch.cuda", "mujoco", "glfw"}} & {{*sys.modules}}
""")
    )


def missing_names(files: dict[str, Names]) -> list[str]:
    """What files import from each other (also inside functions, which no test may run) and is not there."""
    ours = {module.split(".")[0] for module in files}
    return [
        f"{module} imports {source}.{name}"
        for module, names in files.items()
        for source, name in sorted(names.taken)
        if source.split(".")[0] in ours
        and f"{source}.{name}" not in files
        and (source not in files or not {name, "__getattr__"} & files[source].defined)
    ]


def test_every_name_that_is_imported_from_our_own_files_is_there():
    paths = [path for package in ("robo_rl", *SIDE_BY_SIDE) for path in sources(package)]
    assert not missing_names({module_of(path): names_in(path) for path in paths})
    wrong = {"a": names_of("x = 1"), "b": names_of("def f():\n    from a import x, y")}
    assert missing_names(wrong) == ["b imports a.y"]
