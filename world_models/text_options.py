"""Options of world models of the kind `text` (`world_models.text`); frozen dataclasses without torch."""

from dataclasses import dataclass, field

from robo_rl.errors import UserError, in_range
from world_models.options import WorldModelConfig


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What a `text` model is; a model's folder carries it."""

    width: int = 32
    """Channels of the transformer."""
    depth: int = 2
    """Its blocks."""
    heads: int = 2
    """Attention heads of each."""
    reason: bool = True
    """It writes the sentences that decide before it writes what changes."""
    retrieve: int = 2
    """Most similar recorded steps that it is shown; 0: none."""

    def __post_init__(self) -> None:
        for name, low, high in (("width", 8, 4096), ("depth", 1, 64), ("heads", 1, 64), ("retrieve", 0, 16)):
            in_range(f"net.{name}", getattr(self, name), low, high)
        if self.width % self.heads:
            raise UserError(f"net.width must be a multiple of net.heads ({self.heads}), got {self.width}")


@dataclass(frozen=True, kw_only=True)
class TextFitOptions:
    """How a `text` model is learnt (`world_models.text_fit`)."""

    updates: int = 1600
    """Optimizer steps."""
    batch: int = 32
    """Recorded steps of each."""
    lr: float = 4e-3
    """Learning rate (AdamW)."""
    weight_decay: float = 0.01
    """Of AdamW."""
    tasks: float = 0.1
    """Share of a batch that teaches it to write what is wanted in a room."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("updates", 1, 10**8),
            ("batch", 2, 10**6),
            ("weight_decay", 0, 1),
            ("tasks", 0, 0.9),
        ):
            in_range(f"fit.{name}", getattr(self, name), low, high)
        in_range("fit.lr", self.lr, 0, 1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class TextConfig(WorldModelConfig):
    """Learn an experience model of a task in words (DreamGym) from recorded episodes, for example of --sim
    sims.words:make."""

    kind: str = "text"
    net: TextOptions = field(default_factory=TextOptions)
    fit: TextFitOptions = field(default_factory=TextFitOptions)
