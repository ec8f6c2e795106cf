"""`robo_rl wm train DATASET…`, `robo_rl wm eval MODEL DATASET` and the like: learn a world model, and find
out how far to trust it."""

import importlib
import os
import sys
from pathlib import Path

from robo_rl.errors import quoted
from world_models.options import (
    EncodedConfig,
    JudgeConfig,
    TuneConfig,
    VideoConfig,
    WorldEvalConfig,
    WorldModelConfig,
    kind_of_model,
    kind_of_run,
    threads,
)
from world_models.text_options import TextConfig
from world_models.wan_options import DiffusersConfig

SUBCOMMANDS = {
    "train": (WorldModelConfig, "learn a model of recorded episodes"),
    "eval": (WorldEvalConfig, "say how far a model can be trusted"),
    "tune": (TuneConfig, "make what a video model imagines smoother to act (EVA)"),
    "judge": (JudgeConfig, "train a classifier of success, or say what a judge is worth"),
}
OPTIONS = {
    c.kind: c for c in (WorldModelConfig, EncodedConfig, VideoConfig, DiffusersConfig, TextConfig)
}  # --kind

HARDLY = 0.9  # of the error of standing still: a model above it is said to have learnt little
CUT = 0.05  # share of held-out predictions within the threshold, below which a model is of no use as an env


def parse(argv: list[str]):
    """The options of the subcommand argv[0]; those of train are the kind's."""
    from robo_rl.cli import choose_subcommand, given, parse_options, resumes_alone

    name = choose_subcommand("wm", SUBCOMMANDS, argv)
    config = SUBCOMMANDS[name][0]
    if name != "train":
        return parse_options(config, f"wm {name}", argv[1:])
    resumes_alone(argv, "other options need a model that is learnt anew", "--kind")
    kind, resumed = given(argv, "--kind"), given(argv, "--resume")
    if resumed and not kind:  # every option comes from the run, the kind too
        kind = kind_of_run(resumed)
    if not kind and (init := given(argv, "--init")):
        kind = kind_of_model(init)
    return parse_options(OPTIONS.get(kind or "", config), "wm train", argv[1:])


def run(args) -> int:
    """Run the subcommand whose options these are."""
    if isinstance(args, WorldModelConfig):
        return train(args)
    name = next(name for name, (config, _) in SUBCOMMANDS.items() if type(args) is config)
    return importlib.import_module(f"robo_rl.cli.wm_{name}").run(args)


def train(args: WorldModelConfig) -> int:
    """Learn, and say what was learnt."""
    # read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(args.kind, args.torch_threads)))
    from world_models import learning

    learned = learning.train(args)
    if learned.report is None:
        print(
            f"saved at update {learned.update}; go on with: robo_rl wm train --resume "
            f"{quoted(learned.folder)}",
            file=sys.stderr,
        )
    else:
        print(verdict(learned.spec, learned.report, learned.folder, learned.seconds), file=sys.stderr)
    return learned.code


def verdict(spec, report: dict, folder: Path, took: float) -> str:
    rows = [
        f"  after {h:>3} steps  {report['error'][h - 1]:.3f}   standing still {report['copied'][h - 1]:.3f}"
        for h in (1, 4, 8, 16, 32, 64)
        if h <= len(report["error"])
    ]
    if not spec.horizon:
        return "\n".join(
            [
                f"open-loop error on held-out episodes [std of the data], {took:.0f} s of training:",
                *rows,
                "no better than a world in which nothing moves, so nothing acts in it: train it longer "
                "(--fit.…), or record more episodes",
            ]
        )
    share = f"{100 * report['within']:.0f} % of held-out predictions lie within"
    at = min(8, spec.horizon, len(report["error"]))
    of_still = report["error"][at - 1] / max(report["copied"][at - 1], 1e-12)
    steps = "step" if at == 1 else "steps"
    hardly = (
        f"it has hardly learnt: after {at} {steps} its error is {of_still:.2f} of that of a world in which "
        "nothing moves; train it longer (--fit.…), or record more episodes"
    )
    return "\n".join(
        [
            f"open-loop error on held-out episodes [std of the data], {took:.0f} s of training:",
            *rows,
            *([hardly] if of_still > HARDLY else []),
            f"calibrated to {spec.horizon} steps and uncertainty {spec.threshold:.3f} ({share})",
            *(
                [f"its episodes end after {spec.steps()} steps, recorded ones after {spec.control.max_steps}"]
                if spec.steps() < spec.control.max_steps
                else []
            ),
            *(
                ["nearly every episode in it is cut at once: train it longer, or record more episodes"]
                if report["within"] < CUT
                else []
            ),
            f"how far to trust it: robo_rl wm eval {quoted(folder)} DATASET",
            f"policies that learnt from such data act in it: robo_rl eval RUN --sim wm:{quoted(folder)}"
            if spec.own
            else f"train in it: robo_rl train --sim wm:{quoted(folder)}{pictured(spec)} --demos DATASET",
        ]
    )


def pictured(spec) -> str:
    """The options of `robo_rl train` without which a run does not see what the model draws."""
    if not spec.control.views:
        return ""
    return " --obs rgb" + (f" --image-size {spec.image_size}" if spec.image_size != 64 else "")
