"""Options of a data set that training reads."""

from dataclasses import dataclass
from typing import Literal

from robo_rl.errors import in_range


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set of --demos, where another robot or program wrote it."""

    cameras: str = ""
    """Cameras to look through, in order, with commas between; NAME=CAMERA renames one. Empty: all, or those
    of the env; none: no camera, the state alone."""
    every: int = 1
    """Supervision learns from the first frame of an episode and from one in so many of the others; 1: from
    all. Demonstrations that are recorded with more than 1 have no pictures: those that are learnt from are
    drawn, where their episodes are played again."""
    fit: Literal["", "pad", "pad_top_left", "crop", "stretch"] = ""
    """How pictures of another size are made square: pad keeps the whole picture, crop its middle, stretch
    changes its proportions. Empty: pad without an env; with one, pictures must have its size."""
    normaliser: Literal["mean_std", "quantiles", "min_max"] = "mean_std"
    """Statistics that states and actions are normalised by; quantiles: q01 and q99 become -1 and 1."""
    label: str = ""
    """success=all, success=none or success=FILE: which episodes succeeded, for a data set that does not say
    (robo_rl data label writes it into the data set)."""
    imitate: Literal["success", "all"] = "success"
    """Which episodes supervision imitates: those that succeeded (where the data set does not say which did,
    or of a task none did: all), or all. Methods that learn from reward learn from the others too."""
    held_out: float = 0.1
    """Without an env: share of the episodes, drawn by the seed, that judge the policy and are not learnt
    from."""
    cache_mb: int = 640
    """Memory for decoded pictures [MiB]. Those that do not fit are decoded again for every batch."""
    threads: int = 1
    """Threads that decode ahead of the learner; 0: none."""

    def __post_init__(self) -> None:
        in_range("data.held_out", self.held_out, 0, 0.9)
        in_range("data.every", self.every, 1, 10_000)
        in_range("data.cache_mb", self.cache_mb, 1, 1 << 24)
        in_range("data.threads", self.threads, 0, 256)
