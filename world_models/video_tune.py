"""Fine-tuning a `video` model with EVA: the frames it imagines shall decode to motion that the arm can
follow.

    y = sample(last frame, arm, actions)                    all K Euler steps and R refinements of
                                                            `world_models.video`
    a = inverse(frames)                                     frozen, learnt from recorded frames alone
    loss = loss of `video_fit` on recorded chunks + weight max(0, goal - score(a)) / 10               score:
                                                            `world_models.eva`

The goal is the mean score of the recorded frames of the same chunks, decoded by the same model: imagined
motion shall be as smooth as the recordings, not smoother than what was commanded. With `goal` "most" it is
10, the score of motion without any jerk.

The first term holds the model near the data; at weight 0 this is training it further, to the bit. The
gradient of the second goes through the sampler and the inverse model into the frames' network alone: the
arm's state is the ensemble's and stays as it was, and so do the heads.

What it can take away is jerk that sampling adds (K > 1); the mean frame of K = 1 is smooth already. An
inverse model can be pleased by pixels that mean nothing, so a second one (another seed and width), never
tuned against, measures. Recorded commands may break the limits themselves (noise does); there a smooth
picture is a wrong one, which pixel errors, and the decoded against the given commands, tell.

Axes: `B` chunks, `C` frames of a chunk, `T` steps, `V` views, `A` action; frames as patches [V 48, g, g], g =
size/4.

Departures: the paper aligns a diffusion generator by RL on the score; K is small here, so its gradient is
taken. Its inverse model decodes joints in rad, ours the commands of the data. Rounding to bytes is left out
of the gradient (not of what is measured). Limits are those of the action axes, the score's scale is
`eva.reference`.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl import files
from robo_rl.data.reader import load as load_data
from robo_rl.errors import UserError
from robo_rl.log import Progress
from robo_rl.provenance import run_facts
from robo_rl.stats import bootstrap_mean
from world_models import eva, recorded, trust
from world_models import model as worlds
from world_models.imagine import open_loop
from world_models.options import TuneConfig, TuneOptions, VideoFitOptions, threads
from world_models.own_units import as_model_has_them
from world_models.reading import read
from world_models.recorded import Recorded
from world_models.video import PATCH, Video, patches_of
from world_models.video_fit import VideoFitter
from world_models.windows import Windows, check_dataset, read_windows, unseen

FRESH = 10**6  # added to a seed: random numbers of the inverse model that measures
STEPS = 16  # control steps of a measured window


# ---- inverse dynamics of frames ----------------------------------------------------------------------------


class FrameInverse(nn.Module):
    """What was commanded between the frames of a clip [B,T+1,V 48,g,g]: actions in [-1, 1], [B,T,A].

    Every change of frame is looked at alone, then up to four before and after it: an arm follows its commands
    late.
    """

    spread: Tensor

    def __init__(self, views: int, grid: int, action: int, width: int = 32):
        super().__init__()
        size, w = -(-grid // 4), 2 * width
        self.register_buffer("spread", torch.ones(()))  # std of the change of a pixel in a step
        self.look = nn.Sequential(
            nn.Conv2d(96 * views, width, 1),
            nn.SiLU(),
            nn.Conv2d(width, w, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(w, w, 3, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(w * size * size, 2 * w),
            nn.SiLU(),
        )
        self.along = nn.Sequential(
            nn.Conv1d(2 * w, 2 * w, 5, padding=2), nn.SiLU(), nn.Conv1d(2 * w, action, 5, padding=2)
        )

    def forward(self, clip: Tensor) -> Tensor:
        before, change = clip[:, :-1], clip.diff(dim=1) / self.spread
        seen = self.look(torch.cat([before, change], 2).flatten(0, 1)).unflatten(0, change.shape[:2])
        return self.along(seen.transpose(1, 2)).transpose(1, 2).clamp(-1.2, 1.2)


def fit_inverse(
    data: Recorded,
    updates: int,
    seed: int = 0,
    width: int = 32,
    steps: int = 8,
    batch: int = 8,
    lr: float = 1e-3,
    tick: Callable[[int], object] = lambda update: None,
) -> tuple[FrameInverse, dict[str, float]]:
    """Learn from clips of the training episodes -> (frozen model, errors on the held-out ones: rmse, r2, held
    steps)."""
    known = data.known
    data, _ = data.extended()
    views, action = data.control.views, torch.from_numpy(data.action)
    mine, other = (
        np.concatenate(
            [
                np.arange(a, b - steps, 1 if not h else steps)
                for a, b, h in zip(data.first, data.end - ~known, data.held, strict=True)
                if h == want
            ]
            or [np.zeros(0, np.int64)]
        )
        for want in (False, True)
    )
    if len(mine) < 64 or not len(other):
        raise UserError(
            f"an inverse-dynamics model of frames needs more than {steps} steps in 64 places and in a "
            f"held-out episode, got {len(mine)} and {len(other)}; record more: robo_rl collect --obs rgb"
        )

    def clip(rows: np.ndarray) -> Tensor:
        at = rows[:, None] + np.arange(steps + 1)
        return patches_of({v: data.images[v][at] for v in views}, views)

    def given(rows: np.ndarray) -> Tensor:
        return action[rows[:, None] + np.arange(steps)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FrameInverse(
            len(views), next(iter(data.images.values())).shape[1] // PATCH, action.shape[1], width
        )
    rng = np.random.default_rng([seed, 41])
    model.spread.copy_(clip(rng.choice(mine, 32)).diff(dim=1).std().clamp(min=1e-3))
    opt = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, lr, max(updates, 2))
    for n in range(updates):
        rows = rng.choice(mine, batch)
        loss = (model(clip(rows)) - given(rows)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        tick(n + 1)
    model.requires_grad_(False).eval()
    parts = np.array_split(other, -(-len(other) // 32))
    error = torch.cat([(model(clip(rows)) - given(rows)).square().flatten(0, 1) for rows in parts]).mean(0)
    spread = given(other).flatten(0, 1).var(0, unbiased=False)
    used = spread > 1e-6
    r2 = float((1 - error[used] / spread[used]).mean()) if used.any() else 0.0
    return model, {"rmse": float(error.mean().sqrt()), "r2": r2, "held": steps * len(other)}


# ---- tuning ------------------------------------------------------------------------------------------------


def imagined(
    model: Video,
    last: Tensor,
    state: Tensor,
    before: Tensor,
    actions: Tensor,
    generator: torch.Generator,
    task: Tensor | None = None,
) -> Tensor:
    """A chunk and the frame before it [B,C+1,V 48,g,g], differentiable: from frame, state and the one before
    it, by actions [B,C,A] under instructions int64[B] (None: the first)."""
    task = torch.zeros(len(state), dtype=torch.int64) if task is None else task
    words = np.array(model.spec.tasks)[task.numpy()]
    arm = model.proprio.start({"state": state, "task": words}, np.zeros(len(state), np.int64)) | {
        "before": before
    }
    states = model.proprio.step(arm, actions)[1].obs["state"]
    shape = (len(last), last.shape[1] * model.options.chunk, *last.shape[2:])
    y = model.sample(
        model.before(model.begin(last)),
        state,
        states,
        model.told(actions, task),
        lambda k: torch.randn(shape, generator=generator),
    )
    frames = (last[:, None] + model.changes(y, state, states)).clamp(-1, 1)
    return torch.cat([last[:, None], frames], 1)


class Reward:
    """The second term of the loss; owns its random numbers, so that the first term draws those it always
    drew."""

    def __init__(
        self, fitter: VideoFitter, inverse: FrameInverse, weight: float, seed: int, goal: str = "recorded"
    ):
        self.fitter, self.inverse, self.weight, self.goal = fitter, inverse, weight, goal
        self.control = fitter.model.spec.control
        self.limits = eva.limits_of(self.control)
        self.penalties = eva.reference(self.limits, self.control.period)
        self.generator = torch.Generator().manual_seed(seed)
        self.begins = torch.from_numpy(np.repeat(fitter.data.first, fitter.data.lengths))

    def clip(self, rows: Tensor) -> Tensor:
        """Imagined chunks from recorded frames, rows [B], by the actions recorded there."""
        f = self.fitter
        before = f.state[torch.maximum(rows - 1, self.begins[rows])]
        actions = f.action[rows[:, None] + torch.arange(f.model.options.chunk)]
        return imagined(
            f.model,
            f.patches(rows[:, None])[:, 0],
            f.state[rows],
            before,
            actions,
            self.generator,
            f.task[rows],
        )

    def recorded(self, rows: Tensor) -> Tensor:
        """What was recorded there, frames [B,C+1,V 48,g,g]."""
        return self.fitter.patches(rows[:, None] + torch.arange(self.fitter.model.options.chunk + 1))

    def score(self, clip: Tensor) -> Tensor:
        """The mean score of what frames decode to."""
        at = eva.positions(self.inverse(clip), self.control)
        return eva.score(at, self.control.period, self.limits, self.penalties).mean()

    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        f = self.fitter
        rows = f.rows[torch.randint(0, len(f.rows), (f.options.batch,), generator=self.generator)]
        score = self.score(self.clip(rows))
        goal = self.score(self.recorded(rows)).detach() if self.goal == "recorded" else torch.full((), 10.0)
        return self.weight * (goal - score).relu() / 10, {"eva": score.detach(), "goal": goal}


def tune(
    model: Video,
    data: Recorded,
    inverse: FrameInverse,
    options: TuneOptions,
    seed: int = 0,
    tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True,
) -> "Video | None":
    """A tuned copy of the model (at 0 updates a plain copy), or None if `tick(updates made, running means)`
    said False."""
    if model.options.chunk < 4:
        raise UserError(
            f"EVA judges motion over 4 steps or more, this model makes {model.options.chunk} frames at once; "
            "train one with --net.chunk 8"
        )
    model = copy.deepcopy(model)
    if not options.updates:
        return model
    fitter = VideoFitter(
        model,
        data,
        VideoFitOptions(arm=1, updates=options.updates, batch=options.batch, lr=options.lr),
        seed,
        fresh=False,
        frames_only=True,
    )
    if options.weight:
        fitter.more = Reward(fitter, inverse, options.weight, seed + 1, options.goal)
    if not fitter.fit(lambda n, parts: tick(n - 1, parts)):
        return None
    tuned = fitter.result()
    if not all(bool(p.isfinite().all()) for p in tuned.parameters()):
        raise UserError(
            "the tuned weights are not finite; start again with a smaller --fit.lr or --fit.weight"
        )
    return tuned


# ---- what it did -------------------------------------------------------------------------------------------


def judged(actions: Tensor, given: np.ndarray, control) -> dict[str, np.ndarray]:
    """Of actions [B,T,A]: EVA score, share of steps and dimensions beyond each limit, RMS against those
    given; [B] each.

    "arm": beyond speed or acceleration on the axes that move it, leaving out those that are set at once (a
    gripper)."""
    limits = eva.limits_of(control)
    at = eva.positions(actions, control)
    moves = [i for i, a in enumerate(control.axes) if a.kind in ("delta", "rate")] or list(
        range(len(control.axes))
    )
    arm = eva.MotionLimits(
        **{k: tuple(getattr(limits, k)[i] for i in moves) for k in ("speed", "acceleration", "weight")}
    )
    dt = control.period
    out = {
        "score": eva.score(at, dt, limits, eva.reference(limits, dt)),
        **eva.beyond(at, dt, limits),
        "any": eva.violations(at, dt, limits),
        "arm": eva.violations(at[..., moves], dt, arm),
        "arm_jerk": eva.beyond(at[..., moves], dt, arm)["jerk"],
        "command_error": (actions.clamp(-1, 1) - torch.from_numpy(given)).square().mean((1, 2)).sqrt(),
    }
    return {k: v.numpy() for k, v in out.items()}


def measure(
    model: Video, w: Windows, inverses: dict[str, FrameInverse], scale: np.ndarray, seed: int = 0
) -> dict[str, np.ndarray]:
    """Along the windows (whole ones alone): errors [B,T] of state and cameras, and of every inverse model
    "<name>/score", … of the frames that the model imagined [B]."""
    views, control = model.spec.control.views, model.spec.control
    p = open_loop(model, w.start, w.actions, 16, seed)
    out = {"state": trust.state_error(p.state, w.state, scale)}
    out |= {f"image/{v}": trust.image_error(p.images[v], w.images[v]) for v in views}
    for name, inverse in inverses.items():
        out |= {
            f"{name}/{k}": v
            for k, v in judged(decoded(inverse, w, p.images, views), w.actions, control).items()
        }
    return out


def references(w: Windows, inverses: dict[str, FrameInverse], control) -> dict[str, float]:
    """The same means of recorded frames decoded, "<inverse>/…", and of the commands themselves,
    "commands/…"."""
    out = {"commands": judged(torch.from_numpy(w.actions), w.actions, control)}
    out |= {
        name: judged(decoded(i, w, w.images, control.views), w.actions, control)
        for name, i in inverses.items()
    }
    return {f"{name}/{k}": float(v.mean()) for name, rows in out.items() for k, v in rows.items()}


def decoded(
    inverse: FrameInverse, w: Windows, images: dict[str, np.ndarray], views: tuple[str, ...]
) -> Tensor:
    """Frames {view: uint8[B,T,h,w,3]} after the windows' first one, decoded [B,T,A]."""
    clips = {v: np.concatenate([w.start[f"image/{v}"][:, None], images[v]], 1) for v in views}
    return torch.cat(
        [
            inverse(patches_of({v: x[i : i + 16] for v, x in clips.items()}, views))
            for i in range(0, len(w), 16)
        ]
    )


# ---- all of it ---------------------------------------------------------------------------------------------


def tune_model(config: TuneConfig, progress: "Progress | None" = None) -> "tuple[Path, dict]":
    """Learn two inverse models, tune, measure before and after, write OUT/model, OUT/tune.json and
    OUT/run.json.

    Returns (OUT, the document of tune.json). Nothing is written before the end: what stops it costs all.
    """
    torch.set_num_threads(threads("video", config.torch_threads))
    model = worlds.load(config.model)
    if model.spec.kind != "video":
        raise UserError(
            f"{config.model} is a model of --kind {model.spec.kind}; EVA tunes the frames of a video "
            "model: robo_rl wm train DATASET --kind video"
        )
    assert isinstance(model, Video)
    run_of = worlds.find(config.model)
    folder = Path(config.out or f"{run_of.parent if run_of.name == 'model' else run_of}-eva")
    if (folder / "run.json").exists() or (folder / "model").exists():
        raise UserError(f"{folder} already holds a run; choose another --out")
    data, began = read((config.dataset,), images=True, model=model.spec), time.monotonic()
    recorded.check(data, config.dataset)
    recorded.check_fits(model.spec, data, config.dataset)
    windows, scale = check_windows(config, model, data, STEPS)
    with files.lock(folder), progress or Progress() as progress:
        progress.say(f"run {folder}: two inverse-dynamics models of {len(data.action)} frames first")
        inverses, errors, n = {}, {}, config.fit.inverse
        progress.start("inverse", 2 * n, "updates")
        for i, (name, seed, width) in enumerate(
            (("tuned_with", config.seed, 32), ("other", config.seed + FRESH, 48))
        ):
            inverses[name], errors[name] = fit_inverse(
                data, n, seed, width, tick=lambda k, i=i: progress.update(i * n + k)
            )
        before = measure(model, windows, inverses, scale, config.seed)
        progress.start("eva", config.fit.updates, "updates")

        def tick(update: int, parts: dict[str, float]) -> bool:
            progress.update(
                update,
                note=f"frames {parts['frames']:.4f}"
                + (f" score {parts['eva']:.3f} of {parts['goal']:.3f}" if "eva" in parts else ""),
            )
            return True

        tuned = tune(model, data, inverses["tuned_with"], config.fit, config.seed, tick)
        assert tuned is not None
        progress.close()
        after = measure(tuned, windows, inverses, scale, config.seed)
        doc = {
            "model": config.model,
            "data": config.dataset,
            "check": config.check,
            "windows": len(windows),
            "steps": STEPS,
            "options": asdict(config.fit),
            "inverse": errors,
            "change": change_of(before, after),
            "recorded": references(windows, inverses, model.spec.control),
            "seconds": time.monotonic() - began,
        }
        tuned.spec = replace(model.spec, data=f"{model.spec.data}; tuned with EVA on {config.dataset}")
        tuned.proprio.spec = replace(tuned.spec, state=tuned.proprio.spec.state)
        tuned.frames = model.frames
        worlds.save(tuned, folder / "model")
        files.write_json(folder / "tune.json", doc)
        files.write_json(folder / "run.json", run_facts(folder, config))
    return folder, doc


def check_windows(config: TuneConfig, model, data, steps: int):
    """(whole windows of `steps` steps of episodes that neither the model nor the tuning saw, std of the
    states)."""
    where = config.check or config.dataset
    dataset = as_model_has_them(load_data(where), model.spec)
    check_dataset(model.spec, dataset.meta, where)
    used = {data.state[i].tobytes() for i in data.first[~data.held]}
    fresh = unseen(model, dataset) & np.array([dataset.state[i].tobytes() not in used for i in dataset.from_])
    fresh &= (dataset.to - dataset.from_) > steps
    if not fresh.any():
        raise UserError(
            f"{where} has no episode of more than {steps} steps that the model did not learn from; record "
            "some with another --seed of robo_rl collect --obs rgb and name them with --check"
        )
    scale = dataset.state.std(0)
    return read_windows(
        dataset, model.spec.control.views, np.flatnonzero(fresh), config.windows, steps, config.seed
    ), np.where(scale > 1e-5, scale, 0)


def change_of(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict:
    """Means over windows and the paired bootstrap interval of after - before; errors by horizon."""

    def row(a: np.ndarray, b: np.ndarray) -> dict:
        return {
            "before": float(a.mean()),
            "after": float(b.mean()),
            "change": bootstrap_mean(b - a)._asdict(),
        }

    return {
        k: row(a, after[k])
        if a.ndim == 1
        else {f"{h} steps": row(a[:, h - 1], after[k][:, h - 1]) for h in (1, 2, 4, 8, 16) if h <= a.shape[1]}
        | {"mean": row(a.mean(1), after[k].mean(1))}
        for k, a in before.items()
    }
