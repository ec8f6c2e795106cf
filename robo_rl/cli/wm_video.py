"""`robo_rl wm train DATASET --kind video`: learn a model of camera frames."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from robo_rl.cli.wm import WmTrain
from world_models.options import VideoFitOptions


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
class WmTrainVideo(WmTrain):
    """Learn a model of camera frames from recorded episodes (robo_rl collect --obs rgb)."""

    kind: str = "video"
    net: VideoNet = field(default_factory=VideoNet)
    fit: VideoFitOptions = field(default_factory=VideoFitOptions)


def run(args: WmTrainVideo) -> int:
    """Learn, calibrate on held-out episodes, write OUT/model."""
    from robo_rl.cli import wm
    return wm.train(args, learn, images=True)


def learn(args: WmTrainVideo, folder: Path, data) -> int:
    """The run itself, in its locked folder."""
    from robo_rl.cli import wm
    from world_models.video import Video, VideoOptions
    from world_models.video_fit import VideoFitter

    model = Video(wm.world_spec(data, args.kind, " ".join(args.data)), VideoOptions(**asdict(args.net)), args.seed)
    fitter = VideoFitter(model, data, args.fit, args.seed)

    def finish():
        made = fitter.result()
        arm, report = wm.calibrated(made.proprio, data, args.horizon, args.tolerance)
        made.spec = made.proprio.spec = arm.spec
        return made, report
    return in_parts(args, folder, data, fitter, args.fit.arm + args.fit.updates, lambda: fitter.arm.update + fitter.update, finish)


def in_parts(args, folder: Path, data, fitter, total: int, done, finish) -> int:
    """Fit what is learnt in two parts: `done()` updates of `total` are made; `finish()` -> (calibrated model, its numbers)."""
    from robo_rl import files
    from robo_rl.cli import wm
    from robo_rl.log import Progress, RunLog
    from robo_rl.provenance import Stop
    from world_models import model as worlds

    saved = folder / "fit.safetensors"
    if saved.exists():
        wm.load_fit(fitter, saved, len(data.action))
    began = kept = time.monotonic()
    with Progress() as progress, Stop() as stop, RunLog(
            folder, resume_step=done() if saved.exists() else -1, resume_stage="sft") as log:
        progress.say(f"run {folder}: {fitter.model.spec.data}")
        progress.start("wm", total, "updates", done=done())

        def tick(update: int, parts: dict[str, float]) -> bool:
            nonlocal kept
            progress.update(update, note=" ".join(f"{k} {parts[k]:.4f}" for k in ("frames", "state", "success")
                                                  if math.isfinite(parts[k])))
            if update % 25 == 0 or update == total:
                log.log(update, {f"wm/{k}": v for k, v in parts.items() if math.isfinite(v)}, stage="sft")
            if time.monotonic() - kept > 30 or stop.asked:
                wm.save_fit(fitter, saved, len(data.action))
                kept = time.monotonic()
            return not stop.asked
        if not fitter.fit(tick):
            progress.close()
            progress.say(f"saved at update {done()}; go on with: robo_rl wm train --kind {args.kind} --resume {folder}")
            return stop.code
        wm.save_fit(fitter, saved, len(data.action))
        model, report = finish()
        model.frames = data.frames()
        worlds.save(model, folder / "model")
        files.write_json(folder / "calibration.json", report | {"seconds": time.monotonic() - began})
        progress.close()
        progress.say(wm.verdict(model.spec, report, folder, time.monotonic() - began))
    return 0
