"""`robo_rl train`: demonstrations, SFT, online RL, evaluation, checkpoints, videos, in one run folder that
resumes."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import tyro

from robo_rl.cli import given, parse_options, resumes_alone
from robo_rl.errors import UserError, in_range
from robo_rl.experiment import many_runs
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.folder import check_folders, newest_run
from robo_rl.log import RUNS
from robo_rl.options.policy import POLICIES, VLAS
from robo_rl.plugins import is_object


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    __doc__ = TrainConfig.__doc__

    config: str = ""
    """TOML or JSON file of options, as --print-config prints them or a run's run.json has them; the command
    line overrides it."""
    print_config: bool = False
    """Print the merged options as TOML, each with its origin (default, recipe, file, command line), and do
    nothing else."""
    plan: bool = False
    """Print the memory and the time of each part of the run, and whether it fits on this machine, and do
    nothing else."""
    twin: bool = False
    """Run the same configuration at a tiny size: small networks, few envs, demonstrations and steps, on the
    CPU; about a minute."""
    seeds: str = ""
    """Train once with each of these seeds, such as 0,1,2 or 0-4, into a folder of runs, and compare them at
    the end (robo_rl compare); with --workers 0 where several run side by side. --resume FOLDER goes on."""
    vary: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Train once with each of these values of an option, such as --vary rl.lr=1e-4,3e-4, and so on as --seeds
    does; several times: with every combination, and of each with every seed."""
    at_once: int = 0
    """Runs of --seeds and --vary that are side by side; 0: as many as there are cores, one on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("at-once", self.at_once, 0, 1000)


def parse(argv: list[str]) -> TrainConfig:
    """Options over --config, over the recipe that fits --sim, --task, --algo, --obs, --preset, --reward and a
    data set of --demos."""
    from robo_rl.experiment import config_file, recipes

    def peek(name: str, default: str) -> str:
        found = given(argv, f"--{name}")
        return str(document.get(name, default)) if found is None else found

    typed = argv
    if varied := many_runs.varied(argv):  # options are those of the first run
        argv = [*argv, *next(iter(many_runs.planned([], varied).values()))]
    argv = short_policy(argv)
    resumes_alone(typed, "to train the run's policy on with other options, begin a new run: --init RUN")
    document: dict = {}
    if file := peek("config", ""):
        document = config_file.read_config(Path(file))
    sim = peek("sim", "")
    if not sim:
        from robo_rl.experiment.offline import has_own_units

        alone = peek("algo", "") == "bc" and not peek("task", "") and has_own_units(Path(peek("demos", "")))
        sim = "none" if alone else "mujoco"
    kind, folder, init = peek("policy.kind", ""), peek("policy.folder", ""), peek("init", "")
    chosen = recipes.RecipeChoice(
        sim,
        peek("task", ""),
        peek("algo", "pi_rl"),
        peek("obs", "state"),
        peek("preset", "full"),
        peek("reward", ""),
        peek("demos", ""),
        init,
        "" if init else recipes.model_words(kind, folder),
    )
    made = recipes.steps(chosen)
    base = made[-1][1]
    if document:
        base = config_file.merged(
            recipes.exact(base, config_file.flat(document).keys() - {"steps"}), document, f"--config {file}"
        )
        made.append(("file", base))
    base = recipes.exact(base, {arg.partition("=")[0].removeprefix("--") for arg in argv})
    made.append(("command line", base))
    base = recipes.of_kind(base, kind, folder)
    made.append(("--policy", base))
    names = [f.name for f in fields(TrainConfig)]
    args = parse_options(Train, "train", argv, default=Train(**{k: getattr(base, k) for k in names}))
    config = TrainConfig(**{k: getattr(args, k) for k in names})
    if args.print_config:
        reasons = {f"recipe {row.name}": row.why for row in recipes.rows(chosen)}
        print(
            config_file.as_toml(config, config_file.origins([*made, ("command line", config)]), reasons),
            end="",
        )
        raise SystemExit(0)
    several = many_runs.planned(
        [] if given(typed, "--seeds") is None else many_runs.read_seeds(args.seeds), args.vary
    )
    one = list(several) == [""]
    if args.seeds and given(typed, "--seed") is not None:
        raise UserError("--seeds names the seeds of several runs, --seed that of one: give one of them")
    if args.twin and not one:
        raise UserError("--twin tries one run at a tiny size: leave --seeds and --vary out")
    if args.at_once and one:
        raise UserError("--at-once is of several runs: give --seeds or --vary, such as --seeds 0,1,2")
    if args.plan:
        configs = settings(typed, args.vary)
        for each in configs.values():
            check_folders(each)
        raise SystemExit(tell_plan(configs, len(several), args.at_once))
    if args.twin:
        from robo_rl.experiment.twin import twin

        return twin(config)
    if not one:
        many_runs.check_all(settings(typed, args.vary))
        raise SystemExit(told(*many_runs.begin(typed, config, several, args.at_once)))
    if args.resume and (Path(args.resume) / RUNS).is_file():
        raise SystemExit(told(Path(args.resume), many_runs.train_all(Path(args.resume))))
    return config


def settings(argv: list[str], vary: tuple[str, ...]) -> dict[str, TrainConfig]:
    """The configuration of each combination of values, by its name: a mistake is told before any run
    begins."""
    alone = [a for a in many_runs.without(argv, many_runs.OWN) if a != "--plan"]
    return {name: parse([*alone, *own]) for name, own in many_runs.planned([], vary).items()}


def tell_plan(configs: dict[str, TrainConfig], runs: int, at_once: int) -> int:
    """Print the plan of a run, of several settings of the one that needs most, and what several side by side
    need -> the exit status: 1 where that does not fit."""
    from robo_rl.experiment.plan import make_plan
    from robo_rl.experiment.plan_data import plan_of_data

    n, more = many_runs.side_by_side(next(iter(configs.values())), at_once)
    plans = {}
    for name, config in configs.items():
        one = replace(config, workers=0) if runs > 1 and more else config
        plans[name] = plan_of_data(one) if one.sim == "none" else make_plan(one)
    name = max(plans, key=lambda k: plans[k].peak)
    plan = plans[name]
    if len(plans) > 1:
        print("\n".join(f"{k}: {p.peak / 1e9:.1f} GB" for k, p in plans.items()), end="\n\n")
        print(f"the one that needs most, {name}:")
    print(plan.text())
    n = min(n, runs)
    if n < 2:
        return int(plan.missing > 0)
    missing = plan.missing + (n - 1) * plan.peak
    fits = "fits" if missing <= 0 else f"does not fit: {missing / 1e9:.1f} GB too many; --at-once N has fewer"
    print(f"{runs} runs, {n} at once: {n * plan.peak / 1e9:.1f} GB, {fits}")
    return int(missing > 0)


def told(folder: Path, code: int) -> int:
    """Compare the runs of a folder, where none was stopped and two have been evaluated -> the exit status."""
    from robo_rl.report.compare import read_groups
    from robo_rl.report.compare_page import lines, write
    from robo_rl.results import COMMON

    judged = {path.parents[1] for path in folder.glob("*/evals/*.json")}
    judged |= {path.parent for path in folder.glob("*/heldout.json")}
    if code < 128 and len(judged) > 1:
        try:
            groups = read_groups([folder], lambda words: print(words, file=sys.stderr))
        except UserError as e:
            print(f"not compared: {e}", file=sys.stderr)
            return code
        print("\n".join([*lines(groups, COMMON), f"open {write(groups, COMMON, str(folder))}"]))
    return code


def short_policy(argv: list[str]) -> list[str]:
    """`--policy pi05`, `--policy module:function` and `--policy FOLDER` (of a vision-language-action model)
    as options of --policy.…"""
    out: list[str] = []
    rest = iter(argv)
    for arg in rest:
        name, sign, value = arg.partition("=")
        if name != "--policy":
            out.append(arg)
            continue
        value = value if sign else next(rest, "")
        if value in POLICIES or is_object(value) and not Path(value).exists():
            out += ["--policy.kind", value]
            if value in VLAS and list(Path(value).glob("*.safetensors")):
                print(
                    f"warning: --policy {value} has fresh weights; those of the folder {value} are --policy "
                    f"./{value}",
                    file=sys.stderr,
                )
            continue
        if not value or not Path(value).exists():
            from robo_rl.policies.vla.weights import fetch

            raise UserError(
                f"--policy takes {', '.join(POLICIES)}, module:function, or the folder of a "
                f"vision-language-action model, got {value!r}{fetch(value)}"
            )
        folder = Path(value).parent if Path(value).is_file() else Path(value)
        if any((folder / name).is_file() for name in ("run.json", "meta.json", "vla.json")):
            raise UserError(
                f"--policy {value} is a run of robo_rl or a part of one; begin with its policy by --init RUN"
            )
        from robo_rl.policies.vla.make import family_of

        out += ["--policy.kind", family_of(value), "--policy.folder", str(Path(value).resolve())]
    return out


def run(config: TrainConfig, began: Callable[[Path], None] = lambda folder: None) -> int:
    """Train from the start, or go on with a run; `began` hears of the folder once there is something to go on
    with."""
    from robo_rl.experiment import train

    if not config.resume:
        return train.train(config, began=began)[1]
    folder = newest_run(Path("runs")) if config.resume == "auto" else Path(config.resume)
    if (folder / "run.json").exists():
        began(folder)
    return train.resume(folder)[1]


def run_guarded(config: TrainConfig) -> int:
    """`run` in a process of its own that is started again from its checkpoint if a signal kills it."""
    from robo_rl.experiment import parallel, train
    from robo_rl.experiment.supervise import guarded

    alone = parallel.workers(config) == 0 and config.learners == 1
    if config.algo == "bc" or not config.resume and alone:
        return run(config)
    return guarded(lambda tell: run(config, tell), lambda folder: train.resume(folder)[1])
