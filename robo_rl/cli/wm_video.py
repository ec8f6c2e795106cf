"""`robo_rl wm train DATASET --kind video`: learn a model of camera frames."""

import math
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import tyro

from robo_rl.errors import UserError, choose, in_range


@dataclass(frozen=True, kw_only=True)
class VideoNet:
    """The network, see `world_models.video.VideoOptions`."""

    chunk: int = 8
    """C: frames made at once."""
    width: int = 64
    blocks: int = 2
    steps: int = 1
    """K: Euler steps of the flow; 1: the mean frame, without noise."""
    refine: int = 0
    """R: refinements after it (PDE-Refiner)."""
    sigma: float = 0.05


@dataclass(frozen=True, kw_only=True)
class VideoLearn:
    """How it is learnt, see `world_models.video_fit.VideoFitOptions`."""

    arm: int = 1500
    """Updates of the arm's state first."""
    updates: int = 1500
    batch: int = 12
    lr: float = 1e-3
    plain: float = 0.4
    """Share of every batch from which the mean frame is learnt."""
    ema: float = 0.995


@dataclass(frozen=True, kw_only=True)
class WmTrainVideo:
    """Learn a model of camera frames from recorded episodes (robo_rl collect --obs rgb)."""

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of LeRobot v3 data sets, of the same env."""
    kind: str = "video"
    out: str = ""
    """Run folder; empty: runs/wm-<task>-s<seed>-<time>."""
    resume: str = ""
    """Go on with the run in this folder; every other option then comes from it."""
    seed: int = 0
    horizon: int = 64
    """Control steps to which the arm's error is measured on held-out episodes (one in ten)."""
    tolerance: float = 0.3
    """Error of the arm's state [std of the data] that the threshold of the uncertainty keeps nine in ten predictions below."""
    torch_threads: int = 1
    net: VideoNet = field(default_factory=VideoNet)
    fit: VideoLearn = field(default_factory=VideoLearn)

    def __post_init__(self) -> None:
        choose("--kind", self.kind, ("video",))
        for name, low, high in (("seed", 0, 2**31 - 1), ("horizon", 2, 10**4), ("torch_threads", 1, 4096)):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        in_range("--tolerance", self.tolerance, 0, 100, open_low=True)


def config(folder: Path) -> WmTrainVideo:
    """The options of a run folder."""
    from robo_rl import files
    saved = files.read_json(folder / "run.json")
    try:
        saved = {k: v for k, v in saved["config"].items() if k in {f.name for f in fields(WmTrainVideo)}}
        return WmTrainVideo(**saved | {"net": VideoNet(**saved["net"]), "fit": VideoLearn(**saved["fit"]), "data": tuple(saved["data"])})
    except (TypeError, KeyError, AttributeError, UserError) as e:
        raise UserError(f"{folder / 'run.json'} is no run of robo_rl wm train --kind video, or of another version ({e!r})") from e


def run(args: WmTrainVideo) -> int:
    """Learn, calibrate on held-out episodes, write OUT/model."""
    import torch

    from robo_rl import files
    from robo_rl.cli import wm
    from robo_rl.cli.train import git_hash, versions
    from world_models import recorded
    resume = args.resume
    if resume:
        if not (Path(resume) / "run.json").exists():
            raise UserError(f"--resume: {resume} has no run.json; give the folder of a run of robo_rl wm train")
        folder = Path(resume)
        args = replace(config(folder), resume=resume)
    torch.set_num_threads(args.torch_threads)
    data = wm.read(args.data, images=True)
    recorded.check(data, " ".join(args.data))
    if not data.images:
        raise UserError(f"data set {' '.join(args.data)} has no cameras; record them with robo_rl collect --obs rgb, or train "
                        "--kind latent")
    if not resume:
        folder = wm.folder_of(args, data)
    with files.lock(folder):
        if not resume:
            files.write_json(folder / "run.json", {
                "name": folder.name, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "version": versions().get("robo_rl", ""),
                "git": git_hash(), "seed": args.seed, "config": asdict(args), "versions": versions()})
        return learn(args, folder, data)


def learn(args: WmTrainVideo, folder: Path, data) -> int:
    """The run itself, in its locked folder."""
    from robo_rl import files
    from robo_rl.cli import wm
    from robo_rl.cli.train import Stop
    from robo_rl.log import Progress, RunLog
    from world_models import model as worlds
    from world_models.video import Video, VideoOptions
    from world_models.video_fit import VideoFitOptions, VideoFitter

    model = Video(wm.world_spec(data, args.kind, " ".join(args.data)), VideoOptions(**asdict(args.net)), args.seed)
    fitter = VideoFitter(model, data, VideoFitOptions(**asdict(args.fit)), args.seed)
    saved, total = folder / "fit.safetensors", args.fit.arm + args.fit.updates
    if saved.exists():
        wm.load_fit(fitter, saved, len(data.action))
    done = fitter.arm.update + fitter.update
    began = kept = time.monotonic()
    with Progress() as progress, Stop() as stop, RunLog(
            folder, resume_step=done if saved.exists() else -1, resume_stage="sft") as log:
        progress.say(f"run {folder}: {model.spec.data}")
        progress.start("wm", total, "updates", done=done)

        def tick(update: int, parts: dict[str, float]) -> bool:
            nonlocal kept
            progress.update(update, note=f"frames {parts['frames']:.4f} success {parts['success']:.4f}")
            if update % 25 == 0 or update == total:
                log.log(update, {f"wm/{k}": v for k, v in parts.items() if math.isfinite(v)}, stage="sft")
            if time.monotonic() - kept > 30 or stop.asked:
                wm.save_fit(fitter, saved, len(data.action))
                kept = time.monotonic()
            return not stop.asked
        if not fitter.fit(tick):
            progress.close()
            progress.say(f"saved at update {fitter.arm.update + fitter.update}; go on with: robo_rl wm train --kind video "
                         f"--resume {folder}")
            return stop.code
        wm.save_fit(fitter, saved, len(data.action))
        arm, report = wm.calibrated(fitter.result().proprio, data, args.horizon, args.tolerance)
        model = fitter.result()
        model.spec = model.proprio.spec = arm.spec
        model.frames = data.frames()
        worlds.save(model, folder / "model")
        files.write_json(folder / "calibration.json", report | {"seconds": time.monotonic() - began})
        progress.close()
        progress.say(wm.verdict(model.spec, report, folder, time.monotonic() - began))
    return 0
