"""What one episode is, and what all episodes of a data set share. NumPy only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from robo_rl.errors import UserError, choose, utf8
from robo_rl.types import ControlSpec

SOURCES = ("policy", "expert", "human", "teacher", "unknown")  # who chose an action; stored as index
# of an episode in which a person may take over; stored as index
PHASES = ("policy", "pause", "recovery", "correction")
HELP = PHASES[2:]  # those in which the person acts


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """T frames, each what was observed and the action then taken.

    state float32[T, S], action float32[T, A] in [-1, 1], images {view: uint8[T, h, w, 3]},
    reward float32[T] (None: zeros), source one of SOURCES for all frames or T of them, start the id of the
    initial state (-1 unknown), phase one of PHASES' indices per frame (None: not recorded, read as policy).
    terminated: it ended by the task's own rule, not cut by time or operator.
    final float32[S] and final_images {view: uint8[h, w, 3]} are what was observed after the last action
    (None: not recorded; pictures only together with the state).
    Raises UserError for other shapes, NaN or infinity.
    """

    state: np.ndarray
    action: np.ndarray
    images: Mapping[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    task: str = ""
    success: bool = False
    reward: np.ndarray | None = None
    source: str | Sequence[str] = "expert"
    start: int = -1
    terminated: bool = False
    phase: np.ndarray | None = None
    final: np.ndarray | None = None
    final_images: Mapping[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "state", np.asarray(self.state, np.float32))
        put(self, "action", np.asarray(self.action, np.float32))
        T = len(self.action) if self.action.ndim else 0
        put(self, "reward", np.asarray(np.zeros(T) if self.reward is None else self.reward, np.float32))
        put(self, "images", {view: np.asarray(x) for view, x in self.images.items()})
        for name, x, shape in (("state", self.state, "[T, S]"), ("action", self.action, "[T, A]")):
            if x.ndim != 2 or len(x) != T or 0 in x.shape:
                raise UserError(f"episode: {name} must be {shape} with T = {T} >= 1, got {list(x.shape)}")
        assert self.reward is not None  # since the line above
        if self.reward.shape != (T,):
            raise UserError(f"episode: reward must be [T] with T = {T}, got {list(self.reward.shape)}")
        for name in ("state", "action", "reward"):
            x = getattr(self, name)
            if not np.isfinite(x).all():
                row = int(np.argmin(np.isfinite(x).reshape(T, -1).all(1)))
                raise UserError(f"episode: {name} is not finite in frame {row}; drop the episode or mend it")
        for view, x in self.images.items():
            if x.dtype != np.uint8 or x.ndim != 4 or x.shape[0] != T or x.shape[3] != 3 or 0 in x.shape:
                raise UserError(
                    f"episode: images[{view!r}] must be uint8 [T, h, w, 3] with T = {T}, "
                    f"got {x.dtype} {list(x.shape)}"
                )
        if self.phase is not None:
            put(self, "phase", np.asarray(self.phase, np.int64))
            if self.phase.shape != (T,) or self.phase.min() < 0 or self.phase.max() >= len(PHASES):
                raise UserError(
                    f"episode: phase must be {T} numbers in 0 .. {len(PHASES) - 1} ({', '.join(PHASES)})"
                )
        if self.final is not None:
            put(self, "final", np.asarray(self.final, np.float32))
            if self.final.shape != self.state.shape[1:] or not np.isfinite(self.final).all():
                raise UserError(
                    f"episode: final must be {self.state.shape[1]} finite numbers, "
                    f"got {list(self.final.shape)}"
                )
        if self.final_images is not None:
            put(self, "final_images", {view: np.asarray(x) for view, x in self.final_images.items()})
            want = {view: x.shape[1:] for view, x in self.images.items()}
            have = {view: x.shape for view, x in self.final_images.items() if x.dtype == np.uint8}
            if self.final is None or have != want:
                raise UserError(
                    f"episode: final_images must be uint8 pictures of {want or 'no camera'}, beside final, "
                    f"got {have or 'none'}"
                )
        utf8("episode: task", self.task)
        words = {self.source} if isinstance(self.source, str) else set(self.source)
        if not isinstance(self.source, str) and len(self.source) != T:
            raise UserError(f"episode: source must be one word or {T} words, got {len(self.source)}")
        for word in words:
            choose("source", word, SOURCES)

    def __len__(self) -> int:
        return len(self.action)

    @property
    def source_codes(self) -> np.ndarray:
        """int64[T], indices into SOURCES."""
        if isinstance(self.source, str):
            return np.full(len(self), SOURCES.index(self.source), np.int64)
        return np.array([SOURCES.index(word) for word in self.source], np.int64)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.action.nbytes + sum(x.nbytes for x in self.images.values())


@dataclass(frozen=True, slots=True)
class Features:
    """What all episodes of a data set share: rate [1/s], names of numbers, cameras (name, height, width)."""

    fps: float
    state: tuple[str, ...]
    action: tuple[str, ...]
    views: tuple[tuple[str, int, int], ...] = ()
    robot: str = ""
    phases: bool = False  # whether the phase of every frame is recorded
    absent: tuple[str, ...] = ()  # columns of what nobody recorded, of reward, success, truncated

    def __post_init__(self) -> None:
        if not 0 < self.fps <= 10_000:
            raise UserError(f"fps must be in (0, 10000], got {self.fps!r}")
        for name, _, _ in self.views:
            if not name or set(name) & set("/\\{} "):
                raise UserError(f"camera name {name!r} must not be empty or hold a space, slash or brace")

    @classmethod
    def of(cls, episode: Episode, spec: ControlSpec | None = None, fps: float = 0) -> "Features":
        """The features that `episode` has; names and rate from the env's `spec` where it is given."""
        S, A = episode.state.shape[1], episode.action.shape[1]
        if spec is None and not fps:
            raise UserError("features need fps=... or spec=env.spec: an episode alone does not tell its rate")
        if spec is not None and len(spec.axes) != A:
            raise UserError(
                f"actions have {A} numbers, the env's spec has {len(spec.axes)}: "
                f"{', '.join(spec.action_names)}"
            )
        return cls(
            fps=fps or (round(1 / spec.period, 6) if spec is not None else 0),
            state=(
                tuple(spec.state_names)
                if spec is not None and len(spec.state_names) == S
                else tuple(f"state_{i}" for i in range(S))
            ),
            action=spec.action_names if spec is not None else tuple(f"action_{i}" for i in range(A)),
            views=tuple((view, *x.shape[1:3]) for view, x in sorted(episode.images.items())),
            robot=f"{spec.sim}:{spec.task}" if spec is not None else "",
            phases=episode.phase is not None,
        )

    def misfits(self, episode: Episode) -> list[str]:
        """Sizes in which `episode` differs, as words; [] if it fits."""
        here = Features.of(episode, fps=self.fps)
        names = {
            kind: getattr(self, kind)
            for kind in ("state", "action")
            if len(getattr(here, kind)) == len(getattr(self, kind))
        }
        return replace(here, **names).differences(self)

    def differences(self, other: "Features") -> list[str]:
        """What differs, as words: `fps 20 here, 10 there`. `robot` is a label and may differ."""
        out = []
        if abs(self.fps - other.fps) > 1e-6:
            out.append(f"fps {self.fps:g} here, {other.fps:g} there")
        for kind, here, there in (("state", self.state, other.state), ("action", self.action, other.action)):
            if len(here) != len(there):
                out.append(f"{kind} has {len(here)} numbers here, {len(there)} there")
            elif here != there:
                i = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
                out.append(f"{kind} number {i} is {here[i]!r} here, {there[i]!r} there")
        if self.phases and not other.phases:
            out.append("phases are recorded here, not there")
        here, there = ({v: (h, w) for v, h, w in f.views} for f in (self, other))
        for view in sorted(set(here) | set(there)):
            if here.get(view) != there.get(view):
                size = [f"{x[view][0]}x{x[view][1]}" if view in x else "absent" for x in (here, there)]
                out.append(f"camera {view!r} is {size[0]} here, {size[1]} there")
        return out
