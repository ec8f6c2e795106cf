"""`robo_rl wm train DATASET…`, `robo_rl wm eval MODEL DATASET` and the like: learn a world model, and find out how far to trust it."""

import os
import time
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path

import tyro

from robo_rl.errors import UserError, choose, in_range
from world_models.learning import calibrated, load_fit, read, save_fit, world_spec
from world_models.options import FitOptions, LatentOptions

SUBCOMMANDS = {"train": "learn a model of recorded episodes", "eval": "say how far a model can be trusted",
               "tune": "make what a video model imagines smoother to act (EVA)",
               "judge": "train a classifier of success, or say what a judge is worth"}


PICTURED = {"encoded": "WmTrainEncoded", "video": "WmTrainVideo"}  # kinds with cameras: options in robo_rl.cli.wm_<kind>


@dataclass(frozen=True, kw_only=True)
class WmTrain:
    """Learn a world model from recorded episodes; `--sim wm:OUT` then takes it as a simulator."""

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of LeRobot v3 data sets, of the same env."""
    kind: str = "latent"
    """latent: states; encoded: camera frames as codes, drawn where somebody looks; video: camera frames as a flow (options of these:
    robo_rl wm train --kind video --help)."""
    out: str = ""
    """Run folder; empty: runs/wm-<task>-s<seed>-<time>."""
    resume: str = ""
    """Go on with the run in this folder; every other option then comes from it."""
    seed: int = 0
    horizon: int = 64
    """Control steps to which the error of the state (video: the arm's; encoded: the codes' too) is measured on held-out episodes."""
    tolerance: float = 0.75
    """Error [std of the data] that the calibrated threshold of the uncertainty keeps nine in ten predictions below."""
    torch_threads: int = 1
    net: LatentOptions = field(default_factory=LatentOptions)
    fit: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        choose("--kind", self.kind, ("latent", *PICTURED))
        for name, low, high in (("seed", 0, 2**31 - 1), ("horizon", 2, 10**4), ("torch_threads", 1, 4096)):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        in_range("--tolerance", self.tolerance, 0, 100, open_low=True)


def parse(argv: list[str]):
    """The options of the subcommand argv[0]."""
    import importlib

    from robo_rl.cli import parse_options
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: robo_rl wm COMMAND [options]   (robo_rl wm COMMAND --help lists them)\n")
        print("\n".join(f"  {name:<9}{text}" for name, text in SUBCOMMANDS.items()))
        raise SystemExit(0)
    name = choose("wm command", argv[0], SUBCOMMANDS)
    if name == "eval":
        return parse_options(importlib.import_module("robo_rl.cli.wm_eval").WmEval, "wm eval", argv[1:])
    if name == "tune":
        return parse_options(importlib.import_module("robo_rl.cli.wm_tune").WmTune, "wm tune", argv[1:])
    if name == "judge":
        return parse_options(importlib.import_module("robo_rl.cli.wm_judge").WmJudge, "wm judge", argv[1:])
    kind = [b for a, b in pairwise(argv) if a == "--kind"] + [a.removeprefix("--kind=") for a in argv if a.startswith("--kind=")]
    if kind and kind[0] in PICTURED:
        cls = PICTURED[kind[0]]
        return parse_options(getattr(importlib.import_module(f"robo_rl.cli.wm_{kind[0]}"), cls), "wm train", argv[1:])
    return parse_options(WmTrain, "wm train", argv[1:])


def run(args) -> int:
    """Run the subcommand whose options these are."""
    import sys
    if type(args) is WmTrain:
        return train(args, learn)
    return sys.modules[type(args).__module__].run(args)


# ---- training ----------------------------------------------------------------------------------------------------

def folder_of(args, data) -> Path:
    """The run folder, new."""
    task = data.control.task.replace(":", "-").replace("/", "-")
    folder = Path(args.out or f"runs/wm-{task}-s{args.seed}-{time.strftime('%m%d-%H%M%S')}")
    if (folder / "run.json").exists():
        raise UserError(f"{folder} already holds a run; go on with it: robo_rl wm train --resume {folder}, or choose "
                        "another --out")
    return folder


def config(folder: Path, cls: type):
    """The options of a run folder, an instance of `cls`."""
    from robo_rl import files
    saved = files.read_json(folder / "run.json")
    known = {f.name: f for f in fields(cls)}
    try:
        saved = {k: v for k, v in saved["config"].items() if k in known}
        return rebuilt(cls, saved | {"data": tuple(saved["data"])})
    except (TypeError, KeyError, AttributeError, UserError) as e:
        what = "robo_rl wm train" + (f" --kind {cls.kind}" if cls is not WmTrain else "")
        raise UserError(f"{folder / 'run.json'} is no run of {what}, or of another version ({e!r})") from e


def rebuilt(cls: type, saved: dict):
    """The dataclass `cls` of its fields as JSON has them, dataclasses within it too."""
    inner = {f.name: rebuilt(f.default_factory, saved[f.name]) for f in fields(cls) if isinstance(saved.get(f.name), dict)}
    return cls(**saved | inner)


def train(args, learn, images: bool = False) -> int:
    """Learn, calibrate on held-out episodes, write OUT/model: `learn(args, folder, data)` in its locked folder."""
    from robo_rl import files
    from robo_rl.provenance import git_hash, versions

    os.environ.setdefault("OMP_NUM_THREADS", str(args.torch_threads))
    resume = args.resume
    if resume:
        if not (Path(resume) / "run.json").exists():
            raise UserError(f"--resume: {resume} has no run.json; give the folder of a run of robo_rl wm train")
        folder = Path(resume)
        args = replace(config(folder, type(args)), resume=resume)
    import torch

    from world_models import recorded
    torch.set_num_threads(args.torch_threads)
    data = read(args.data, images)
    recorded.check(data, " ".join(args.data))
    if images and not data.images:
        raise UserError(f"data set {' '.join(args.data)} has no cameras; record them with robo_rl collect --obs rgb, or train "
                        "--kind latent")
    if not resume:
        folder = folder_of(args, data)
    with files.lock(folder):
        if not resume:
            files.write_json(folder / "run.json", {
                "name": folder.name, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "version": versions().get("robo_rl", ""), "git": git_hash(), "seed": args.seed, "config": asdict(args),
                "versions": versions()})
        return learn(args, folder, data)


def learn(args: WmTrain, folder: Path, data) -> int:
    """The run itself, in its locked folder."""
    from robo_rl import files
    from robo_rl.log import Progress, RunLog
    from robo_rl.provenance import Stop
    from world_models import model as worlds
    from world_models.fit import Fitter
    from world_models.latent import Latent

    model = Latent(world_spec(data, args.kind, " ".join(args.data)), args.net, args.seed)
    fitter = Fitter(model, data, args.fit, args.seed)
    saved = folder / "fit.safetensors"
    if saved.exists():
        load_fit(fitter, saved, len(data.action))
    began, kept = time.monotonic(), time.monotonic()
    with Progress() as progress, Stop() as stop, RunLog(
            folder, resume_step=fitter.update if saved.exists() else -1, resume_stage="sft") as log:
        progress.say(f"run {folder}: {model.spec.data}")
        progress.start("wm", args.fit.updates, "updates", done=fitter.update)

        def tick(update: int, parts: dict[str, float]) -> bool:
            nonlocal kept
            progress.update(update, note=f"state {parts['state']:.4f} success {parts['success']:.5f}")
            if update % 50 == 0 or update == args.fit.updates:
                log.log(update, {"sft/loss": parts["state"]} | {f"wm/{k}": v for k, v in parts.items()}, stage="sft")
            if time.monotonic() - kept > 20 or stop.asked:
                save_fit(fitter, saved, len(data.action))
                kept = time.monotonic()
            return not stop.asked
        if not fitter.fit(tick):
            progress.close()
            progress.say(f"saved at update {fitter.update}; go on with: robo_rl wm train --resume {folder}")
            return stop.code
        save_fit(fitter, saved, len(data.action))
        model, report = calibrated(fitter.result(), data, args.horizon, args.tolerance)
        model.frames = data.frames()
        worlds.save(model, folder / "model")
        took = time.monotonic() - began
        files.write_json(folder / "calibration.json", report | {"seconds": took})
        log.log(args.fit.updates, {f"wm/error_{h}": report["error"][h - 1] for h in (1, 8, 16, 32, 64)
                                   if h <= len(report["error"])}, stage="sft")
        progress.close()
        progress.say(verdict(model.spec, report, folder, took))
    return 0


def verdict(spec, report: dict, folder: Path, took: float) -> str:
    rows = [f"  after {h:>3} steps  {report['error'][h - 1]:.3f}   standing still {report['copied'][h - 1]:.3f}"
            for h in (1, 4, 8, 16, 32, 64) if h <= len(report["error"])]
    share = f"{100 * report['within']:.0f} % of held-out predictions lie within"
    return "\n".join([f"open-loop error on held-out episodes [std of the data], {took:.0f} s of training:", *rows,
                      f"calibrated to {spec.horizon} steps and uncertainty {spec.threshold:.3f} ({share})",
                      f"train in it: robo_rl train --sim wm:{folder} --demos DATASET"])
