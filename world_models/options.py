"""Options of world models: what their networks are, how they are learnt, tuned, judged and measured; frozen
dataclasses without torch (so `--help` is instant)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from robo_rl import files
from robo_rl.errors import UserError, choose, in_range, quoted
from robo_rl.files import cores

PICTURED = ("encoded", "video", "diffusers")  # kinds with cameras
CONTINUED = ("latent", "video")  # kinds that --init goes on with
LONGEST = 300  # control steps of --horizon 0 at most: pictures of all of them are in memory
MOST_THREADS = 8  # without being asked for more
KINDS = {  # of models: the module whose build(spec, options) makes one; `robo_rl.cli.wm` has their options
    "latent": "world_models.latent",
    "text": "world_models.text",
    "encoded": "world_models.encoded",
    "video": "world_models.video",
    "diffusers": "world_models.wan",
}


def threads(kind: str, asked: int) -> int:
    """Threads of torch for a model of this kind; more than one gain a small network of states nothing."""
    if asked or kind not in PICTURED:
        return asked or 1
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) else min(cores(), MOST_THREADS)


def kind_of_run(folder: "str | Path") -> str:
    """The kind of model that the run in `folder` learns; "" where there is no run of `robo_rl wm train`."""
    try:
        config = files.read_json(Path(folder) / "run.json")["config"]
        kind = config["kind"] if {"net", "fit", "horizon"} <= set(config) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return kind if kind in KINDS else ""


def kind_of_model(folder: "str | Path") -> str:
    """The kind of the model in `folder`; "" where there is none."""
    try:
        kind = files.read_json(find(folder) / "world.json")["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return kind if kind in KINDS else ""


def find(folder: "str | Path") -> Path:
    """The folder with world.json: itself, or `model` in a run of `robo_rl wm train`."""
    for at in (Path(folder), Path(folder) / "model"):
        if (at / "world.json").is_file():
            return at
    for run in (Path(folder), Path(folder).parent):
        if kind_of_run(run):
            raise UserError(
                f"{run} holds a world model that is not learnt to its end; go on with: robo_rl wm train "
                f"--resume {quoted(run)}"
            )
    raise UserError(
        f"{folder} holds no world model (no world.json, nor model/world.json); make one: "
        "robo_rl wm train DATASET"
    )


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """What a `latent` network is; a model's folder carries it."""

    members: int = 5
    """M: networks in the ensemble; their disagreement is the uncertainty."""
    hidden: int = 160
    """Width of each."""
    layers: int = 3
    """Hidden layers of each. Gated ones (all but the first, and one at least) are three products each."""
    head_width: int = 80
    """Width of the networks of reward, success and end."""
    gated: bool = True
    """Gated layers with normalisation (SwiGLU); off: plain ones."""
    follow: Literal["member", "mean"] = "mean"
    """What an episode's next state is: that of one member, drawn per episode, or the mean of all."""
    refine: int = 0
    """K: refinement steps after each prediction (PDE-Refiner); 0: none."""
    sigma: float = 0.05
    """sigma_min: scale of the last refinement step, in units of one step's change."""
    text: bool = True
    """Conditioned on the instruction, where the data have several."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("members", 1, 64),
            ("hidden", 8, 4096),
            ("layers", 1, 16),
            ("head_width", 8, 4096),
            ("refine", 0, 16),
        ):
            in_range(f"net.{name}", getattr(self, name), low, high)
        in_range("net.sigma", self.sigma, 0, 1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a `latent` model is learnt (`world_models.fit`)."""

    updates: int = 4000
    """Optimizer steps."""
    batch: int = 256
    """Windows per member and update; the members' windows differ."""
    lr: float = 1e-3
    """Learning rate (AdamW)."""
    weight_decay: float = 1e-5
    """Of AdamW."""
    unroll: int = 8
    """Steps of its own rollout that a window of the second half of training is; the first half predicts one
    step."""
    ema: float = 0.995
    """Decay per update of the average of the weights that becomes the model."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("updates", 1, 10**8),
            ("batch", 1, 10**6),
            ("unroll", 1, 256),
            ("weight_decay", 0, 1),
        ):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)
        in_range("fit.ema", self.ema, 0, 1, open_high=True)


@dataclass(frozen=True, kw_only=True)
class EncodedOptions:
    """What the networks of an `encoded` model are; a model's folder carries it."""

    codes: int = 32
    """Z: numbers that stand for the pictures of all cameras."""
    width: int = 48
    """Channels of the autoencoder at a quarter of the resolution; twice that below."""
    noise: float = 0.1
    """Std of the noise on the codes (which have unit variance) while decoding is learnt."""
    points: bool = True
    """Beside the codes stands where in each picture each of 16 colours is, which is not learnt."""
    dynamics: LatentOptions = field(default_factory=LatentOptions)

    def __post_init__(self) -> None:
        for name, low, high in (("codes", 1, 4096), ("width", 8, 2048), ("noise", 0, 10)):
            in_range(f"net.{name}", getattr(self, name), low, high)


def encoded_net(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved `EncodedOptions` as they are read today: models and unfinished fits of before have no points."""
    return {"points": False, **saved}


@dataclass(frozen=True, kw_only=True)
class EncodedFitOptions:
    """How an `encoded` model is learnt (`world_models.encoded_fit`)."""

    pictures: int = 2000
    """Updates of the autoencoder first."""
    batch: int = 32
    """Frames of each of them."""
    lr: float = 1e-3
    """Of the autoencoder."""
    dynamics: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        for name, low, high in (("pictures", 1, 10**8), ("batch", 2, 10**5)):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """What the networks of a `video` model are; a model's folder carries it."""

    chunk: int = 8
    """C: frames made at once."""
    width: int = 64
    """Channels at a quarter of the resolution; twice that at an eighth."""
    blocks: int = 2
    """Residual blocks at each resolution."""
    points: bool = True
    """The ensemble tells where in each picture 16 colours are, beside the arm's state (those that do not
    flicker), and frames are drawn by it."""
    dense: int = 512
    """Units of a dense net of the whole coarse picture, which relates the views to each other; 0: none."""
    history: int = 2
    """Frames just before that the next ones are made from."""
    memory: int = 2
    """Frames of longer ago beside them."""
    stride: int = 16
    """Steps between two of these."""
    steps: int = 4
    """K: Euler steps of the flow; 1: the mean frame, without noise."""
    refine: int = 0
    """R: refinements after it (PDE-Refiner)."""
    sigma: float = 0.05
    """Noise of the last refinement, as a share."""
    after: bool = True
    """The heads see the frame and state after the step they tell of (off: those before it)."""
    head_width: int = 64
    """Channels of the heads of reward, success and end."""
    context_noise: float = 0.1
    """Most noise [pixels in -1 .. 1] on the frames before, in learning; its level is told."""
    told: bool = True
    """Frames too are conditioned on the instruction, where the data have several."""
    warp: bool = True
    """The last frame is moved before it is painted over."""
    doubt: bool = True
    """A network expects the error of each frame, which is part of the uncertainty."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the frames' products: bf16 is faster where the device has instructions for it; auto: bf16
    there, else fp32. A model is used as it was learnt."""
    proprio: LatentOptions = field(default_factory=lambda: LatentOptions(head_width=40))
    """The network of the arm's state."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("chunk", 1, 64),
            ("width", 8, 2048),
            ("blocks", 1, 16),
            ("steps", 1, 1000),
            ("refine", 0, 64),
            ("history", 1, 64),
            ("memory", 0, 64),
            ("stride", 1, 10**4),
            ("dense", 0, 2**16),
            ("head_width", 8, 2048),
        ):
            in_range(f"net.{name}", getattr(self, name), low, high)
        in_range("net.sigma", self.sigma, 0, 1, open_low=True, open_high=True)
        in_range("net.context-noise", self.context_noise, 0, 1)
        if self.memory and self.stride < self.chunk:
            raise UserError(f"net.stride must be at least net.chunk ({self.chunk}), got {self.stride}")

    @property
    def shown(self) -> int:
        """F: frames that the next ones are made from."""
        return self.history + self.memory


def video_net(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved `VideoOptions` as they are read today: what models and unfinished fits of before do not name they
    do not have."""
    return {
        "after": False,
        "history": 1,
        "memory": 0,
        "context_noise": 0.0,
        "told": False,
        "doubt": False,
        "warp": False,
        "head_width": 32,
        "dtype": "fp32",
        "dense": 0,
        "points": False,
        **saved,
    }


@dataclass(frozen=True, kw_only=True)
class VideoFitOptions:
    """How a `video` model is learnt (`world_models.video_fit`)."""

    arm: int = 10_000
    """Updates of the arm's state first: where it is wrong by a centimetre, so is what it touches."""
    updates: int = 3000
    """Updates of the frames' flow, after that."""
    batch: int = 12
    """Recorded chunks of an update."""
    lr: float = 1e-3
    """Learning rate of the flow."""
    plain: float = 0.2
    """Share of the batch at t = 1, from which the mean frame is learnt; the rest is at uniform times."""
    own: float = 0.25
    """Share of the batch whose frames before are the model's own, in the second half of training."""
    heads: int = 800
    """Updates of the heads, after that: on recorded frames and on those of the model's own rollouts."""
    imagined: int = 192
    """Rollouts of two chunks that they learn from."""
    ema: float = 0.995
    """Decay per update of the average of the weights that becomes the model."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("arm", 1, 10**8),
            ("updates", 1, 10**8),
            ("batch", 1, 10**5),
            ("heads", 1, 10**8),
            ("imagined", 2, 10**5),
        ):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)
        for name in ("plain", "own"):
            in_range(f"fit.{name}", getattr(self, name), 0, 1)
        in_range("fit.ema", self.ema, 0, 1, open_high=True)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a `video` model is tuned with EVA (`world_models.video_tune`)."""

    weight: float = 0.5
    """Of what the score lacks to its goal, as a share of 10, beside the model's own loss on recorded chunks;
    0: training goes on without EVA."""
    goal: Literal["recorded", "most"] = "recorded"
    """recorded: the score of the recordings themselves, decoded the same way; most: 10, motion without any
    jerk."""
    updates: int = 80
    """Optimizer steps."""
    batch: int = 12
    """Recorded chunks of the model's own loss, and as many imagined ones, per update."""
    lr: float = 2e-4
    """Learning rate."""
    inverse: int = 800
    """Updates of each of the two inverse-dynamics models: one to tune with, one to measure with."""

    def __post_init__(self) -> None:
        in_range("fit.weight", self.weight, 0, 1e6)
        choose("fit.goal", self.goal, ("recorded", "most"))
        for name, low, high in (("updates", 0, 10**8), ("batch", 1, 10**5), ("inverse", 1, 10**8)):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)


# ---- what is done with a model -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorldModelConfig:
    """Learn a world model from recorded episodes; `--sim wm:OUT` then takes it as a simulator."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is learnt": ("kind", "init", "cameras", "image_size", "seed", "device", "torch_threads"),
        "How far it is trusted": ("horizon", "tolerance", "gate"),
        "The run": ("out", "resume"),
    }

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of LeRobot v3 data sets, of the same env."""
    kind: str = "latent"
    """latent: states; encoded: camera frames as codes, drawn where somebody looks; video: camera frames as a
    flow; diffusers: as latents of Wan's autoencoder, by its video transformer; text: sentences, for tasks
    told in words (options of these: robo_rl wm train --kind video --help)."""
    out: str = ""
    """Run folder; empty: runs/wm-<task>-s<seed>-<time>."""
    resume: str = ""
    """Go on with the run in this folder; every other option then comes from it."""
    init: str = ""
    """With latent and video: begin with the weights, the networks and the units of this model (its folder, or
    the run that made it), to learn from its episodes and newer ones in fewer updates."""
    cameras: str = ""
    """Of kinds with cameras: those to learn, with commas between (front,wrist); empty: all. A policy of
    pictures acts in the model with these alone."""
    image_size: int = 0
    """Of kinds with cameras: pixels of a side of the square that pictures become, the shorter side padded; 0:
    as they were recorded where they are square, else 64."""
    seed: int = 0
    """Of the initial weights, the batches and the held-out episodes."""
    horizon: int = 0
    """Control steps, from 2, to which the error of the state (video: the arm's; encoded: the codes' too) is
    measured on held-out episodes, and which an episode in the model lasts at most; 0: as a recorded one, at
    most 300."""
    tolerance: float = 0.75
    """Error [std of the data] that the calibrated threshold of the uncertainty keeps nine in ten predictions
    below."""
    gate: bool = False
    """With latent: the uncertainty is the error that a law learnt on held-out episodes expects of the
    ensemble's disagreement, the steps made and the distance to the nearest recorded step."""
    device: str = "cpu"
    """Where it learns: cpu, cuda or cuda:N; of a model of words the CPU alone."""
    torch_threads: int = 0
    """Threads of torch; 0: of kinds with pictures as many as there are cores, at most 8, or what
    OMP_NUM_THREADS says; of the others 1."""
    net: LatentOptions = field(default_factory=LatentOptions)
    fit: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        choose("--kind", self.kind, KINDS)
        if self.kind != type(self).kind:
            raise UserError(
                f"--kind {self.kind} has options of its own: {self.kind.capitalize()}Config, not "
                f"{type(self).__name__}"
            )
        if self.image_size and self.kind not in PICTURED:
            raise UserError(f"--image-size goes with --kind {', '.join(PICTURED)}, got --kind {self.kind}")
        if self.cameras and self.kind not in PICTURED:
            raise UserError(f"--cameras goes with --kind {', '.join(PICTURED)}, got --kind {self.kind}")
        in_range("--image-size", self.image_size or 8, 8, 1024)
        in_range("--horizon", self.horizon or 2, 2, 10**4)
        in_range("--seed", self.seed, 0, 2**31 - 1)
        in_range("--torch-threads", self.torch_threads, 0, 4096)
        in_range("--tolerance", self.tolerance, 0, 100, open_low=True)
        if self.kind == "text" and self.device != "cpu":
            raise UserError(f"--kind text learns on the CPU: leave --device {self.device} out")
        if self.gate and self.kind != "latent":
            raise UserError(f"--gate goes with --kind latent, got --kind {self.kind}")
        if self.init and self.kind not in CONTINUED:
            raise UserError(f"--init goes with --kind {' and '.join(CONTINUED)}, got --kind {self.kind}")


@dataclass(frozen=True, kw_only=True)
class EncodedConfig(WorldModelConfig):
    """Learn the dynamics of encoded camera frames from recorded episodes (robo_rl collect --obs rgb): faster
    than video, less sharp."""

    kind: str = "encoded"
    net: EncodedOptions = field(default_factory=EncodedOptions)
    fit: EncodedFitOptions = field(default_factory=EncodedFitOptions)


@dataclass(frozen=True, kw_only=True)
class VideoConfig(WorldModelConfig):
    """Learn a model of camera frames from recorded episodes (robo_rl collect --obs rgb)."""

    kind: str = "video"
    net: VideoOptions = field(default_factory=VideoOptions)
    fit: VideoFitOptions = field(default_factory=VideoFitOptions)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Fine-tune a video model with EVA; OUT/model is the tuned one, OUT/tune.json says what it did."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is measured": ("check", "windows"),
        "The run": ("out", "seed", "torch_threads", "json"),
    }

    model: tyro.conf.Positional[str]
    """Folder of a video model, or the run of robo_rl wm train --kind video that made it."""
    dataset: tyro.conf.Positional[str]
    """Recorded episodes (LeRobot v3) to tune on, one in ten held out; those the model learnt from will do."""
    out: str = ""
    """Run folder; empty: <MODEL>-eva."""
    check: str = ""
    """Measure on these recorded episodes; empty: on the held-out ones of DATASET."""
    windows: int = 64
    """Recorded stretches to measure on."""
    seed: int = 0
    """Of batches and noise."""
    torch_threads: int = 0
    """Threads of torch; 0: as many as there are cores, at most 8, or what OMP_NUM_THREADS says."""
    json: bool = False
    """Print one JSON document instead of a table."""
    fit: TuneOptions = field(default_factory=TuneOptions)

    def __post_init__(self) -> None:
        in_range("--windows", self.windows, 4, 10**4)
        in_range("--seed", self.seed, 0, 2**31 - 1)
        in_range("--torch-threads", self.torch_threads, 0, 4096)


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Train a success classifier for `--judge OUT`, or with --check ask another judge about held-out recorded
    steps."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is learnt": ("false_alarms", "updates", "seed"),
        "What is measured": ("check",),
        "The run": ("out", "json"),
    }

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of LeRobot v3 data sets, of the same env."""
    out: str = ""
    """Folder of the classifier; empty: runs/judge-<task>."""
    check: str = ""
    """Train nothing; measure this judge instead: an http address, or the folder of a classifier."""
    false_alarms: float = 0.01
    """Share of held-out failing steps that the classifier may call a success."""
    updates: int = 1500
    """Optimizer steps."""
    seed: int = 0
    """Of the initial weights and the held-out episodes."""
    json: bool = False
    """Print one JSON document instead of a table."""

    def __post_init__(self) -> None:
        in_range("--false-alarms", self.false_alarms, 0, 1)
        in_range("--updates", self.updates, 1, 10**7)


@dataclass(frozen=True, kw_only=True)
class WorldEvalConfig:
    """Measure how far a world model can be trusted: errors beside simple predictors, bounds, success, ranking
    of policies, a probe."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is measured": ("windows", "horizon", "episodes", "inverse", "seed", "device"),
        "Comparisons": ("policies", "sim", "real", "probe", "against", "tolerance"),
        "What is written": ("video", "out", "json"),
    }

    model: tyro.conf.Positional[str]
    """Folder of the model, or the run of robo_rl wm train that made it."""
    dataset: tyro.conf.Positional[str]
    """Recorded episodes (LeRobot v3) with the same arm, cameras and rate; those it learnt from are left
    out."""
    policies: tuple[str, ...] = ()
    """Runs (each of their checkpoints is a policy) or checkpoint folders, ranked in the model and in the
    simulator."""
    sim: str = ""
    """The simulator for --policies and --probe, where the recordings do not tell how it is made: an env of
    your own (gym:ID, module:function). Empty: that of the first of --policies that acted in one, else as
    recorded."""
    real: str = ""
    """Rank against this table instead of the simulator: CSV or JSON with policy (RUN/STEP, or RUN),
    successes, episodes."""
    probe: int | None = None
    """Affine policies unlike the data that the model is asked about, beside one that a search finds to
    exploit it; 0: none (the default for models with cameras, where it takes long), else 8."""
    against: str = ""
    """Another model, on the same windows: is this one better at every horizon?"""
    windows: int = 200
    """Recorded stretches to predict (with images at most 64, fewer where these are longer than 64 steps)."""
    horizon: int = 0
    """Control steps of each; 0: those to which the model was measured in training."""
    episodes: int = 100
    """Starts per policy, the same in the model and in the simulator."""
    tolerance: float = 0.15
    """Difference of model success and real success, to either side, that is no alarm."""
    inverse: int = 800
    """Updates of the inverse-dynamics model that decodes imagined motion (EVA)."""
    seed: int = 0
    """Of windows and starts."""
    device: str = "cpu"
    """Where the models compute: cpu, cuda or cuda:N."""
    video: bool = True
    """Write videos of model and recording side by side."""
    out: str = ""
    """Folder of what is written; empty: MODEL/eval."""
    json: bool = False
    """Print one JSON document instead of a table."""

    def __post_init__(self) -> None:
        in_range("--windows", self.windows, 4, 10**5)
        in_range("--horizon", self.horizon, 0, 4096)
        in_range("--episodes", self.episodes, 2, 10**5)
        in_range("--tolerance", self.tolerance, 0, 1, open_high=True)
        in_range("--inverse", self.inverse, 1, 10**6)
        in_range("--probe", self.probe or 0, 0, 1000)
        if self.real and not self.policies:
            raise UserError("--real ranks policies: name their runs with --policies")
        if self.real and self.sim:
            raise UserError("--real takes the place of a simulator: leave --sim out")
        in_range("--seed", self.seed, 0, 2000)
