"""Options of world models and of how they are learnt, as frozen dataclasses without torch (so `--help` is instant)."""

from dataclasses import dataclass, field
from typing import Literal

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """What a `latent` network is; a model's folder carries it."""

    members: int = 5
    """M: networks in the ensemble; their disagreement is the uncertainty."""
    hidden: int = 256
    layers: int = 3
    """Hidden layers of each."""
    follow: Literal["member", "mean"] = "mean"
    """What an episode's next state is: that of one member, drawn per episode, or the mean of all."""
    refine: int = 0
    """K: refinement steps after each prediction (PDE-Refiner); 0: none."""
    sigma: float = 0.05
    """sigma_min: scale of the last refinement step, in units of one step's change."""

    def __post_init__(self) -> None:
        for name, low, high in (("members", 1, 64), ("hidden", 8, 4096), ("layers", 1, 16), ("refine", 0, 16)):
            in_range(f"net.{name}", getattr(self, name), low, high)
        in_range("net.sigma", self.sigma, 0, 1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a `latent` model is learnt (`world_models.fit`)."""

    updates: int = 4000
    batch: int = 256
    """Windows per member and update; the members' windows differ."""
    lr: float = 1e-3
    weight_decay: float = 1e-5
    unroll: int = 8
    """Steps of its own rollout that a window of the second half of training is; the first half predicts one step."""
    ema: float = 0.995

    def __post_init__(self) -> None:
        for name, low, high in (("updates", 1, 10**8), ("batch", 1, 10**6), ("unroll", 1, 256), ("weight_decay", 0, 1)):
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
    dynamics: LatentOptions = field(default_factory=LatentOptions)

    def __post_init__(self) -> None:
        for name, low, high in (("codes", 1, 4096), ("width", 8, 2048), ("noise", 0, 10)):
            in_range(f"net.{name}", getattr(self, name), low, high)


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
class VideoFitOptions:
    """How a `video` model is learnt (`world_models.video_fit`)."""

    arm: int = 1500
    """Updates of the arm's state first."""
    updates: int = 1500
    batch: int = 12
    lr: float = 1e-3
    plain: float = 0.4
    """Share of the batch at t = 1, from which the mean frame is learnt; the rest is at uniform times."""
    ema: float = 0.995

    def __post_init__(self) -> None:
        for name, low, high in (("arm", 1, 10**8), ("updates", 1, 10**8), ("batch", 1, 10**5)):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)
        in_range("fit.plain", self.plain, 0, 1)
        in_range("fit.ema", self.ema, 0, 1, open_high=True)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a `video` model is tuned with EVA (`world_models.video_tune`)."""

    weight: float = 0.5
    """Of 1 - score/10 beside the model's own loss on recorded chunks; 0: training goes on without EVA."""
    updates: int = 80
    batch: int = 12
    """Recorded chunks of the model's own loss, and as many imagined ones, per update."""
    lr: float = 2e-4
    inverse: int = 800
    """Updates of each of the two inverse-dynamics models: one to tune with, one to measure with."""

    def __post_init__(self) -> None:
        in_range("fit.weight", self.weight, 0, 1e6)
        for name, low, high in (("updates", 0, 10**8), ("batch", 1, 10**5), ("inverse", 1, 10**8)):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)
