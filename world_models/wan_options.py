"""Options of world models of the kind `diffusers` (`world_models.wan`); frozen dataclasses without torch."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from robo_rl.errors import UserError, in_range
from robo_rl.options.lora import LoraOptions
from world_models.options import LatentOptions, WorldModelConfig


@dataclass(frozen=True, kw_only=True)
class DiffusersOptions:
    """What a `diffusers` model is: Wan's autoencoder and video transformer (`world_models.wan`); a model's
    folder carries it."""

    after: ClassVar[bool] = True  # the heads see the frame after a step

    folder: str = ""
    """Local folder with vae/ and transformer/ of a text-to-video Wan 2.1; empty: fresh weights of the sizes
    below."""
    chunk: int = 8
    """C: frames made at once, a multiple of 4."""
    history: int = 2
    """H: latent frames of the past that the next ones are made from, 1 + 4 (H-1) frames, beside the episode's
    first."""
    steps: int = 8
    """K: steps of the flow."""
    noise_level: float = 0.0
    """Share of the noise that is drawn anew in each of them (Flow-CPS); 0: in the first alone."""
    context_noise: float = 0.2
    """Greatest time of the flow that the past is put at in learning."""
    latent: int = 8
    """Fresh weights: channels of a latent."""
    vae_width: int = 16
    """Fresh weights: channels of the autoencoder at full resolution."""
    width: int = 128
    """Fresh weights: width of the transformer."""
    heads: int = 4
    """Fresh weights: its attention heads."""
    depth: int = 4
    """Fresh weights: its blocks."""
    head_width: int = 64
    """Channels of the heads of reward, success and end."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the transformer's products, as of a `video` model's; its autoencoder's stay fp32."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    """Adapters of the transformer (its name is trunk); rank 0: it learns in full."""
    proprio: LatentOptions = field(default_factory=lambda: LatentOptions(hidden=128, head_width=64))
    """The network of the arm's state."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("chunk", 4, 64),
            ("history", 1, 32),
            ("steps", 1, 1000),
            ("noise_level", 0, 1),
            ("context_noise", 0, 1),
            ("latent", 1, 256),
            ("vae_width", 4, 512),
            ("width", 16, 8192),
            ("heads", 1, 128),
            ("depth", 1, 128),
            ("head_width", 8, 2048),
        ):
            in_range(f"net.{name.replace('_', '-')}", getattr(self, name), low, high)
        if self.chunk % 4:
            raise UserError(
                f"net.chunk must be a multiple of 4, the frames of a latent one, got {self.chunk}"
            )
        if self.lora.rank and not self.folder:
            raise UserError(
                f"net.lora.rank {self.lora.rank} needs net.folder: beside fresh weights, which would stay as "
                "they are, adapters learn nothing; take rank 0"
            )
        if self.width % self.heads or self.width // self.heads % 2 or self.width // self.heads < 6:
            raise UserError(
                f"net.width must be an even number of 6 or more for each of net.heads ({self.heads}), got "
                f"{self.width}"
            )

    @property
    def past(self) -> int:
        """Frames of the history."""
        return 1 + 4 * (self.history - 1)


@dataclass(frozen=True, kw_only=True)
class DiffusersFitOptions:
    """How a `diffusers` model is learnt (`world_models.wan_fit`)."""

    arm: int = 10_000
    """Updates of the arm's state first: where it is wrong by a centimetre, so is what it touches."""
    vae: int = 1500
    """Updates of the autoencoder, with fresh weights alone."""
    updates: int = 3000
    """Updates of the transformer, after that."""
    batch: int = 8
    """Recorded chunks of an update."""
    lr: float = 3e-4
    """Learning rate of all but the arm."""
    own: float = 0.25
    """Share of the batch whose history is the model's own frames, in the second half of training."""
    heads: int = 800
    """Updates of the heads, after that."""
    imagined: int = 192
    """Rollouts that they learn from."""
    ema: float = 0.995
    """Decay per update of the average of the weights that becomes the model."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("arm", 1, 10**8),
            ("vae", 0, 10**8),
            ("updates", 1, 10**8),
            ("batch", 1, 10**5),
            ("heads", 1, 10**8),
            ("imagined", 2, 10**5),
        ):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)
        in_range("fit.own", self.own, 0, 1)
        in_range("fit.ema", self.ema, 0, 1, open_high=True)


@dataclass(frozen=True, kw_only=True)
class DiffusersConfig(WorldModelConfig):
    """Learn Wan's video transformer, of diffusers, on recorded camera frames and actions (robo_rl collect
    --obs rgb)."""

    kind: str = "diffusers"
    net: DiffusersOptions = field(default_factory=DiffusersOptions)
    fit: DiffusersFitOptions = field(default_factory=DiffusersFitOptions)
