"""Learning a world model in a run folder: recorded episodes, the fit of each kind, calibration, what a stop
leaves."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robo_rl.errors import UserError, quoted
from world_models.continued import continued, init_of, known_to
from world_models.options import (
    LONGEST,
    PICTURED,
    EncodedConfig,
    VideoConfig,
    WorldModelConfig,
    encoded_net,
    kind_of_run,
    threads,
    video_net,
)
from world_models.reading import read
from world_models.saved_fit import load_fit, save_fit

if TYPE_CHECKING:
    from robo_rl.log import Progress
    from world_models.encoded_fit import EncodedFitter
    from world_models.fit import Fitter
    from world_models.latent import Latent
    from world_models.model import WorldSpec
    from world_models.recorded import Recorded
    from world_models.text_fit import TextFitter
    from world_models.text_options import TextConfig
    from world_models.video import Video
    from world_models.video_fit import VideoFitter
    from world_models.wan_fit import WanFitter
    from world_models.wan_options import DiffusersConfig

SAVE_EVERY = 20.0  # s between two saved states of an unfinished fit


# ---- the run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What `train` did: the run folder, updates made of all, and the calibrated model's spec and numbers;
    these are None, and `code` is the exit status, where a signal stopped it first (`train` with resume=folder
    goes on)."""

    folder: Path
    kind: str
    update: int
    code: int = 0
    spec: "WorldSpec | None" = None
    report: "dict | None" = None
    seconds: float = 0.0


def finite_row(parts: dict[str, float]) -> dict[str, float]:
    """What is learnt in two parts has no loss of the other one."""
    return {f"wm/{k}": v for k, v in parts.items() if math.isfinite(v)}


def finite_note(parts: dict[str, float]) -> str:
    names = ("pictures", "frames", "state", "success", "text")
    return " ".join(f"{k} {parts[k]:.4f}" for k in names if math.isfinite(parts.get(k, math.nan)))


@dataclass(frozen=True, kw_only=True)
class FitJob:
    """How one kind of model is learnt: `finish(progress)` -> (calibrated model, the numbers of its
    calibration)."""

    fitter: "Fitter | EncodedFitter | VideoFitter | WanFitter | TextFitter"
    updates: int  # of all parts
    done: Callable[[], int]  # of them
    finish: "Callable[[Progress], tuple]"
    every: int = 25  # updates between two lines of metrics
    row: Callable[[dict], dict] = finite_row  # losses -> metrics
    note: Callable[[dict], str] = finite_note  # losses -> words beside the progress
    says: Callable[[int], str] = lambda update: ""  # a line after so many updates, "": none


def train(config: WorldModelConfig, progress: "Progress | None" = None) -> Learned:
    """Learn a model of `config.data`, calibrate it on held-out episodes, write OUT/model.

    The class of `config` says the kind (WorldModelConfig: latent, EncodedConfig, VideoConfig,
    DiffusersConfig, TextConfig). With `config.resume` a run goes on, and every other option is that run's.
    The first Ctrl-C or SIGTERM saves the fit and ends it.
    UserError: data that no model can be learnt from, a folder that holds a run, a run of another kind.
    """
    from robo_rl import files
    from robo_rl.provenance import run_facts

    if config.resume:
        if not (Path(config.resume) / "run.json").exists():
            raise UserError(
                f"--resume: {config.resume} has no run.json; give the folder of a run of robo_rl wm train"
            )
        if not kind_of_run(config.resume):
            raise UserError(
                f"--resume: {config.resume} is no run of robo_rl wm train; those of robo_rl train go on with "
                "robo_rl train --resume"
            )
        config = replace(saved_config(Path(config.resume), type(config)), resume=config.resume)
    elif config.out:
        check_new(Path(config.out))  # before the pictures are read, which takes long
    import torch

    from robo_rl.device_names import check_device, with_dtype
    from world_models import recorded
    from world_models.instructions import check_text

    check_device(config.device)
    config = replace(config, torch_threads=threads(config.kind, config.torch_threads))
    torch.set_num_threads(config.torch_threads)
    images, model = config.kind in PICTURED, None
    if config.init:
        config, model = init_of(config)
    config = replace(config, net=with_dtype(config.net, config.device))  # a run's folder says which
    data = read(config.data, images, config.image_size, model and model.spec, config.cameras)
    recorded.check(data, *config.data)
    if why := recorded.one_outcome(data):
        warnings.warn(f"data set {' '.join(config.data)}: {why}", stacklevel=2)
    check_text(config.net, (data.tasks[i] for i in data.task), " ".join(config.data))
    if config.gate:
        from world_models.gate_fit import check_gate

        check_gate(data)
    if images and not data.images:
        raise UserError(
            f"data set {' '.join(config.data)} has no cameras; record them with robo_rl collect --obs rgb, "
            "or train --kind latent"
        )
    config = replace(config, horizon=config.horizon or max(2, min(data.control.max_steps, LONGEST)))
    if folder := getattr(config.net, "folder", ""):  # it is read again, from wherever
        net: Any = config.net
        config = replace(config, net=replace(net, folder=str(Path(folder).absolute())))
    begins_with: tuple = ()
    if model is not None:
        data = known_to(model, data, config.init)
        spec = world_spec(data, config.kind, f"{' '.join(config.data)}, after {config.init}")
        begins_with = (continued(model, data, spec),)
    folder = Path(config.resume) if config.resume else new_folder(config, data)
    jobs: dict[str, Callable[..., FitJob]] = {
        "latent": latent_job,
        "encoded": encoded_job,
        "video": video_job,
        "diffusers": diffusers_job,
        "text": text_job,
    }
    job = jobs[config.kind](config, data, *begins_with)  # what cannot be learnt is refused: no folder yet
    with files.lock(folder):
        if not config.resume:
            files.write_json(folder / "run.json", run_facts(folder, config))
        return fit_in(folder, config.kind, data, job, progress)


def fit_in(
    folder: Path, kind: str, data: "Recorded", job: FitJob, progress: "Progress | None" = None
) -> Learned:
    """The fit itself, in its locked folder, from where a stop left it."""
    from robo_rl import files
    from robo_rl.log import Progress, RunLog
    from robo_rl.signals import StopSignal
    from world_models import model as worlds

    fitter, saved = job.fitter, folder / "fit.safetensors"
    if saved.exists():
        load_fit(fitter, saved, len(data.action))
    began = kept = time.monotonic()
    with (
        progress or Progress() as progress,
        StopSignal() as stop,
        RunLog(folder, resume_step=job.done() if saved.exists() else -1, resume_stage="sft") as log,
    ):
        progress.say(f"run {folder}: {fitter.model.spec.data}")
        progress.start("wm", job.updates, "updates", done=job.done())
        early = job.done() + job.every  # what is killed soon, again and again, gets on too

        def tick(update: int, parts: dict[str, float]) -> bool:
            nonlocal kept
            progress.update(update, note=job.note(parts))
            if line := job.says(update):
                progress.say(line)
            if update % job.every == 0 or update == job.updates:
                log.log(update, job.row(parts), stage="sft")
            if update == early or time.monotonic() - kept > SAVE_EVERY or stop.asked:
                save_fit(fitter, saved, len(data.action))
                kept = time.monotonic()
            return not stop.asked

        if not fitter.fit(tick):
            return Learned(
                folder=folder, kind=kind, update=job.done(), code=stop.code, seconds=time.monotonic() - began
            )
        save_fit(fitter, saved, len(data.action))
        model, report = job.finish(progress)
        model.frames = data.frames()
        worlds.save(model, folder / "model")
        took = time.monotonic() - began
        files.write_json(folder / "calibration.json", report | {"seconds": took})
        if kind == "latent":
            log.log(
                job.updates,
                {
                    f"wm/error_{h}": report["error"][h - 1]
                    for h in (1, 8, 16, 32, 64)
                    if h <= len(report["error"])
                },
                stage="sft",
            )
    return Learned(folder=folder, kind=kind, update=job.done(), spec=model.spec, report=report, seconds=took)


def new_folder(config: WorldModelConfig, data: "Recorded") -> Path:
    """The run folder, which holds no run yet."""
    task = data.control.task.replace(":", "-").replace("/", "-")
    folder = Path(config.out or f"runs/wm-{task}-s{config.seed}-{time.strftime('%m%d-%H%M%S')}")
    check_new(folder)
    return folder


def check_new(folder: Path) -> None:
    """Raise UserError for a folder that holds a run."""
    if (folder / "run.json").exists():
        raise UserError(
            f"{folder} already holds a run; go on with it: robo_rl wm train --resume {quoted(folder)}, or "
            "choose another --out"
        )


def saved_config(folder: Path, cls: type[WorldModelConfig] = WorldModelConfig) -> WorldModelConfig:
    """The options of a run folder, an instance of `cls`."""
    from robo_rl import files

    if (kind := kind_of_run(folder)) and kind != cls.kind:
        raise UserError(
            f"{folder} is a run of --kind {kind}, got --kind {cls.kind}; leave it out: robo_rl wm train "
            f"--resume {quoted(folder)}"
        )
    saved = files.read_json(folder / "run.json")
    known = {f.name: f for f in fields(cls)}
    try:
        saved = {k: v for k, v in saved["config"].items() if k in known}
        if cls.kind == "encoded":
            saved["net"] = encoded_net(saved["net"])
        if cls.kind == "video":
            saved["net"] = video_net(saved["net"])
        return rebuilt(cls, saved | {"data": tuple(saved["data"])})
    except (TypeError, KeyError, AttributeError, UserError) as e:
        what = "robo_rl wm train" + (f" --kind {cls.kind}" if cls is not WorldModelConfig else "")
        raise UserError(f"{folder / 'run.json'} is no run of {what}, or of another version ({e!r})") from e


def rebuilt(cls: Any, saved: dict):
    """The dataclass `cls` of its fields as JSON has them, dataclasses within it too."""
    inner = {
        f.name: rebuilt(type(f.default_factory()), saved[f.name])
        for f in fields(cls)
        if isinstance(saved.get(f.name), dict) and callable(f.default_factory)
    }
    return cls(**saved | inner)


# ---- the kinds ---------------------------------------------------------------------------------------------


def latent_job(config: WorldModelConfig, data: "Recorded", init: "Latent | None" = None) -> FitJob:
    """The fit of a `latent` model on states; `init`: it begins as this one."""
    from world_models.fit import Fitter
    from world_models.latent import Latent

    model = init or Latent(world_spec(data, config.kind, " ".join(config.data)), config.net, config.seed)
    fitter = Fitter(model, data, config.fit, config.seed, fresh=init is None, device=config.device)
    return FitJob(
        fitter=fitter,
        updates=config.fit.updates,
        done=lambda: fitter.update,
        every=50,
        finish=lambda progress: calibrated(
            fitter.result().cpu(), data, config.horizon, config.tolerance, gate=config.gate, progress=progress
        ),
        row=lambda parts: {"sft/loss": parts["state"]} | {f"wm/{k}": v for k, v in parts.items()},
        note=lambda parts: f"state {parts['state']:.4f} success {parts['success']:.5f}",
    )


def encoded_job(config: EncodedConfig, data: "Recorded") -> FitJob:
    """The fit of an `encoded` model, on features of pictures that an encoder gives."""
    from world_models.calibrate import TOLD_CODED
    from world_models.encoded import Encoded
    from world_models.encoded_fit import EncodedFitter

    fitter = EncodedFitter(
        Encoded(world_spec(data, config.kind, " ".join(config.data)), config.net, config.seed),
        data,
        config.fit,
        config.seed,
        config.device,
    )

    def finish(progress: "Progress") -> tuple:
        made = fitter.result().cpu()
        inner, report = calibrated(
            made.dynamics, fitter.coded, config.horizon, config.tolerance, told=TOLD_CODED, progress=progress
        )
        spec = inner.spec
        made.spec = made.spec.calibrated(spec.horizon, spec.threshold, measured=spec.measured)
        return made, report

    return FitJob(
        fitter=fitter,
        updates=config.fit.pictures + config.fit.dynamics.updates,
        says=lambda n: f"encoding {len(data.action):,} frames" if n == config.fit.pictures else "",
        done=lambda: fitter.update + (fitter.dynamics.update if fitter.dynamics else 0),
        finish=finish,
    )


def video_job(config: VideoConfig, data: "Recorded", init: "Video | None" = None) -> FitJob:
    """The fit of a `video` model on pictures; `init`: it begins as this one."""
    from world_models.video import Video
    from world_models.video_fit import VideoFitter

    model = init or Video(world_spec(data, config.kind, " ".join(config.data)), config.net, config.seed)
    fitter = VideoFitter(model, data, config.fit, config.seed, init is None, config.device)

    def finish(progress: "Progress") -> tuple:
        made, far = fitter.result(), (config.horizon, config.tolerance)
        if config.net.doubt:  # its frames are part of the uncertainty: fewer windows, for they are drawn
            return calibrated(made, data, *far, most=64, per_episode=2, progress=progress)
        arm, report = calibrated(made.proprio, fitter.recorded, *far, progress=progress)
        made.spec = replace(arm.spec, state=made.spec.state)
        return made, report

    return FitJob(
        fitter=fitter,
        updates=config.fit.arm + config.fit.updates + config.fit.heads,
        done=lambda: fitter.made,
        finish=finish,
    )


def diffusers_job(config: "DiffusersConfig", data: "Recorded") -> FitJob:
    """The fit of a video transformer of diffusers on latents of its autoencoder."""
    from world_models.wan import WanVideo
    from world_models.wan_fit import WanFitter

    model = WanVideo(world_spec(data, config.kind, " ".join(config.data)), config.net, config.seed)
    fitter = WanFitter(model, data, config.fit, config.seed, config.device)
    updates = config.fit.arm + fitter.vae_updates + config.fit.updates + config.fit.heads
    return FitJob(
        fitter=fitter,
        updates=updates,
        done=lambda: fitter.made,
        finish=lambda progress: calibrated(
            fitter.result(), data, config.horizon, config.tolerance, most=32, per_episode=2, progress=progress
        ),
    )


def text_job(config: "TextConfig", data: "Recorded") -> FitJob:
    """The fit of a `text` model on words."""
    from world_models.text import TextModel
    from world_models.text_fit import TextFitter, check_text_data

    check_text_data(data, " ".join(config.data))
    model = TextModel(world_spec(data, config.kind, " ".join(config.data)), config.net, config.seed)
    fitter = TextFitter(model, data, config.fit, config.seed)
    return FitJob(
        fitter=fitter,
        updates=config.fit.updates,
        done=lambda: fitter.update,
        finish=lambda progress: calibrated(
            fitter.result(), data, config.horizon, config.tolerance, progress=progress
        ),
    )


# ---- how far it holds --------------------------------------------------------------------------------------


def world_spec(data, kind: str, where: str):
    """What a model of this data stands for."""
    from world_models.calibrate import spread
    from world_models.model import WorldSpec

    size = next(iter(data.images.values())).shape[1] if data.images else 0
    return WorldSpec(
        kind=kind,
        control=data.control,
        state=data.state.shape[1],
        image_size=size,
        pictures=data.shapes,
        own=data.own,
        tasks=data.tasks,
        scale=spread(data),
        sparse=data.sparse,
        ends_on_success=bool(data.terminated[data.success].all()),
        data=f"{where}: {len(data)} episodes, {len(data.action)} frames, {int(data.success.sum())} "
        "successful",
    )


def calibrated(
    model,
    data,
    horizon: int,
    tolerance: float,
    most: int = 400,
    per_episode: int = 8,
    gate: bool = False,
    told: int = 0,
    progress: "Progress | None" = None,
):
    """(the model with its horizon and threshold, the numbers behind them), from `most` windows, and
    `per_episode` for the bounds; which probability is a success from rollouts of `told` steps (0: `horizon`).

    `gate`: a latent model's uncertainty is a gate learnt on the held-out episodes. Two gates, learnt on half
    of them each, calibrate it on the other half.
    """
    from robo_rl.log import begun
    from world_models.calibrate import calibrate, factors_of, joined, open_loop, scores_on, set_shift
    from world_models.latent import Latent

    episodes, longest = np.flatnonzero(data.held), min(horizon, int(data.lengths.max()))
    asked = [(model, episodes)]  # who is calibrated on which episodes
    if gate:
        from world_models.gate_fit import check_gate, gated

        check_gate(data)
        halves = episodes[::2], episodes[1::2]
        asked = [(gated(model, data, mine, horizon), other) for mine, other in (halves, halves[::-1])]
        model = gated(model, data, episodes, horizon)
    tick, done = begun(progress, "held out", most + per_episode * len(episodes), "windows"), 0

    def each(windows: int) -> None:
        nonlocal done
        tick(done := done + windows)

    far = min(horizon, int(data.lengths.max()) - 1)
    run = joined([open_loop(m, data, far, most // len(asked), episodes=e, each=each) for m, e in asked])
    steps, threshold = calibrate(run, tolerance)
    if data.control.max_steps - steps <= 1 and steps >= data.lengths.max() - 1:
        steps = max(steps, min(data.control.max_steps, horizon))  # no longer episode exists
    bounds = factors_of([scores_on(m, data, longest, e, per_episode, each=each) for m, e in asked])
    if isinstance(model, Latent):
        set_shift(model, data, min(told or longest, longest))
    model.spec = model.spec.calibrated(steps, threshold, bounds, longest)
    with np.errstate(invalid="ignore"):
        n = (~np.isnan(run.error)).sum(0)
        reached = int(np.flatnonzero(n).max(initial=-1)) + 1  # held-out episodes may all be shorter
        n = n[:reached].clip(1)
        means = {
            k: np.nansum(getattr(run, k)[:, :reached], 0) / n for k in ("error", "copied", "uncertainty")
        }
    seen = ~np.isnan(run.error)
    report: dict = {k: v.tolist() for k, v in means.items()} | {
        "windows": n.tolist(),
        "horizon": steps,
        "threshold": threshold,
        "tolerance": tolerance,
        "bounds": bounds,
        "within": float((run.uncertainty[seen] <= threshold).mean()),
    }
    if isinstance(model, Latent):
        report["shift"] = model.shift.tolist()
    return model, report
