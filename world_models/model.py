"""The protocol of a world model: what it is (`WorldSpec`), what it predicts (`Prediction`), and its folder on
disk.

    carry = model.start(obs, keys)                        from N observations; keys int64[N] decide all its
                                                          randomness
    carry, p = model.step(carry, actions[N,E,A])          E control steps: observations, reward, end, success,
                                                          uncertainty
    model.look(carry), step(carry, actions, draw=False)   optional: pictures of lanes, and a step that draws
                                                          none

A carry is a dict of tensors [N, ...]: rows may be copied, permuted, forked and restored. The same
observation, key and actions give the same prediction whatever the other rows are (up to the rounding of a
batched product).

Folder: `world.json` (format, kind, spec, options, CRC-32 of the other files), `weights.safetensors`,
`frames.safetensors` (the recorded observations that episodes may begin from). Written whole, the JSON last.
"""

import functools
import importlib
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from robo_rl import files
from robo_rl.errors import UserError, choose
from robo_rl.types import ActionAxis, ControlSpec
from world_models.options import KINDS, LONGEST, find

FORMAT = 1
Carry = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """What a model stands for, and how far it can be trusted."""

    kind: str  # of `world_models.options.KINDS`
    control: ControlSpec  # of the env that was recorded: axes, period [s], max_steps, state names, views
    state: int  # S
    image_size: int = 0  # pixels; 0 without views
    # (h, w) of every view as it was recorded, where it was padded to a square or made of another size
    pictures: tuple[tuple[int, int], ...] = ()
    own: bool = False  # the recorded actions were in the robot's own units, which the axes tell
    tasks: tuple[str, ...] = ("",)  # instructions that were recorded
    sparse: bool = False  # the recorded reward is 1 on the step that succeeds and 0 elsewhere
    ends_on_success: bool = True  # every recorded success ended its episode
    horizon: int = 0  # control steps to which it was calibrated on held-out episodes; 0: not calibrated
    measured: int = 0  # control steps to which its error was measured there; 0: not told
    threshold: float = math.inf  # uncertainty beyond which an episode is cut
    # by control step: nine in ten new episodes err by less than this factor times the uncertainty
    bounds: tuple[float, ...] = ()
    # std of each state dimension in the data it learnt from (0: it never changes), the errors' unit
    scale: tuple[float, ...] = ()
    data: str = ""  # what it learnt from, as words
    gate: bool = False  # the uncertainty is that of a learnt gate (`world_models.gate`)

    def __post_init__(self) -> None:
        choose("kind of world model", self.kind, KINDS)

    @property
    def action(self) -> int:
        """A."""
        return len(self.control.axes)

    @property
    def resized(self) -> bool:
        """Whether the recorded pictures were square, and made of another size."""
        return bool(self.pictures) and all(h == w for h, w in self.pictures)

    def steps(self, limit: int = 0) -> int:
        """Control steps that an episode in the model lasts at most: `limit` (0: that of a recorded episode),
        as far as the model is calibrated."""
        limit = limit or self.control.max_steps
        return min(limit, self.horizon or limit)

    @property
    def longest(self) -> int:
        """Control steps to which its error was measured, which `wm eval` measures it to as well."""
        return self.measured or min(self.control.max_steps, LONGEST)

    def calibrated(
        self, horizon: int, threshold: float, bounds: tuple[float, ...] | None = None, measured: int = 0
    ) -> "WorldSpec":
        """`bounds` None, `measured` 0: those there are."""
        return replace(
            self,
            horizon=horizon,
            threshold=threshold,
            bounds=self.bounds if bounds is None else bounds,
            measured=measured or self.measured,
        )


@dataclass(frozen=True, slots=True)
class Frames:
    """F recorded observations that episodes may begin from: obs {state float32[F,S], image/<view>
    uint8[F,h,w,3]}, task int64[F] into the spec's tasks, first bool[F] (an episode began there), held bool[F]
    (kept from training)."""

    obs: Mapping[str, np.ndarray]
    task: np.ndarray
    first: np.ndarray
    held: np.ndarray

    def __len__(self) -> int:
        return len(self.task)


@dataclass(frozen=True, slots=True)
class Prediction:
    """E control steps of N episodes, nothing frozen at their end: that is the env's.

    obs {state float32[N,E,S], image/<view> uint8[N,E,h,w,3]}: after each step; reward [N,E]; terminal and
    success [N,E]: probabilities that the step ends the episode by its task's own rule, and that it succeeds;
    uncertainty [N,E] >= 0: since `start`, so it does not shrink along an episode.
    """

    obs: dict[str, Tensor]
    reward: Tensor
    terminal: Tensor
    success: Tensor
    uncertainty: Tensor


class WorldModel(Protocol):
    """What envs, judges and evaluation need. `options` is the frozen dataclass it was built with."""

    spec: WorldSpec
    frames: Frames
    options: Any

    def start(self, obs: Mapping[str, np.ndarray], keys: np.ndarray) -> Carry: ...
    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor], /) -> object: ...


def place_of(model: Any) -> torch.device:
    """Where a model computes."""
    return next(model.parameters()).device


def on(device: torch.device, tensors: Carry) -> Carry:
    """Tensors by name on `device`."""
    return {k: v.to(device) for k, v in tensors.items()}


def at_home(step: Callable[..., tuple[Carry, Prediction]]) -> Callable[..., tuple[Carry, Prediction]]:
    """`WorldModel.step` of a model that computes elsewhere than its caller: carry and actions go to where its
    weights are, and what comes back lies where the carry lay."""

    @functools.wraps(step)
    def there(model: Any, carry: Carry, actions: Tensor, *rest: Any, **more: Any) -> tuple[Carry, Prediction]:
        home, away = carry["t"].device, place_of(model)
        carry, p = step(model, on(away, carry), actions.to(away), *rest, **more)
        if home == away:
            return carry, p
        rows = {k: getattr(p, k).to(home) for k in ("reward", "terminal", "success", "uncertainty")}
        return on(home, carry), Prediction(on(home, p.obs), **rows)

    return there


def products(dtype: str, device: torch.device) -> torch.autocast:
    """A context in which matrix products and convolutions are in bf16 if `dtype` says so; sums and norms stay
    fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def pictures_of(obs: Mapping[str, np.ndarray], spec: WorldSpec) -> dict[str, np.ndarray]:
    """{view: uint8[N,h,w,3]} of a model's cameras in an observation; UserError for one that is missing or of
    another size."""
    views, size = spec.control.views, spec.image_size
    have = [k.removeprefix("image/") for k in obs if k.startswith("image/")]
    if lost := [v for v in views if v not in have]:
        raise UserError(
            f"the world model has the cameras {', '.join(views)}; an observation lacks {', '.join(lost)}, it "
            f"has {', '.join(have) or 'none'}: give it obs['image/{lost[0]}']"
        )
    found = {v: np.asarray(obs[f"image/{v}"]) for v in views}
    for v, x in found.items():
        if x.shape[1:] != (size, size, 3) or x.dtype != np.uint8:
            raise UserError(
                f"the world model's frames are uint8 of {size} x {size} x 3, camera {v} gave {x.dtype} of "
                f"{' x '.join(map(str, x.shape[1:]))}"
            )
    return found


# ---- on disk -----------------------------------------------------------------------------------------------


def save(model: WorldModel, folder: "str | Path") -> None:
    """Write a model's folder; one that is there is replaced, `world.json` last."""
    folder = Path(folder)
    files.private_folder(folder)
    f = model.frames
    frames = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in f.obs.items()}
    frames |= {
        f"frame/{k}": torch.from_numpy(np.ascontiguousarray(getattr(f, k))) for k in ("task", "first", "held")
    }
    blobs = {
        "weights.safetensors": tensor_bytes(
            {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
        ),
        "frames.safetensors": tensor_bytes(frames),
    }
    for name, blob in blobs.items():
        files.write_bytes(folder / name, blob)
    threshold = model.spec.threshold if math.isfinite(model.spec.threshold) else None
    files.write_json(
        folder / "world.json",
        {
            "format": FORMAT,
            "kind": model.spec.kind,
            "spec": asdict(model.spec)
            | {
                "threshold": threshold,
                "bounds": [b if math.isfinite(b) else None for b in model.spec.bounds],
            },
            "options": asdict(model.options),
            "crc": {k: zlib.crc32(v) for k, v in blobs.items()},
        },
    )


def load(folder: "str | Path", device: str = "cpu") -> WorldModel:
    """Rebuild the model of a folder, to compute on `device`; UserError for one that is missing, damaged or of
    another version."""
    folder = find(folder)
    doc = files.read_json(folder / "world.json")
    try:
        have, kind, saved = doc["format"], doc["kind"], dict(doc["spec"])
        if have != FORMAT:
            raise UserError(
                f"{folder} holds a world model of format {have}, this robo_rl reads {FORMAT}; train it "
                "again: robo_rl wm train DATASET"
            )
        saved["control"] = _control(saved["control"])
        saved["tasks"] = tuple(saved["tasks"])
        saved["threshold"] = math.inf if saved["threshold"] is None else saved["threshold"]
        saved["bounds"] = tuple(math.inf if b is None else b for b in saved.get("bounds", ()))
        saved["scale"] = tuple(saved.get("scale", ()))
        saved["pictures"] = tuple((int(h), int(w)) for h, w in saved.get("pictures", ()))
        spec = WorldSpec(**saved)
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(
            f"{folder / 'world.json'} is damaged or of another version of robo_rl ({e!r}); train the model "
            "again: robo_rl wm train DATASET"
        ) from e
    weights, frames = (
        _read(folder, name, doc["crc"]) for name in ("weights.safetensors", "frames.safetensors")
    )
    try:
        model = importlib.import_module(KINDS[kind]).build(spec, doc["options"])
        model.load_state_dict(weights)
        model.to(device)
        f = {k: frames.pop(f"frame/{k}").numpy() for k in ("task", "first", "held")}
    except (RuntimeError, TypeError, KeyError) as e:
        raise UserError(
            f"{folder} was made by another version of robo_rl: its weights do not fit "
            f"({str(e).splitlines()[0]}); train the model again: robo_rl wm train DATASET"
        ) from e
    model.frames = Frames({k: v.numpy() for k, v in frames.items()}, **f)
    return model


def _control(saved: dict) -> ControlSpec:
    names = {k: tuple(saved[k]) for k in ("state_names", "views")}
    return ControlSpec(**dict[str, Any](saved | names, axes=tuple(ActionAxis(**a) for a in saved["axes"])))


def _read(folder: Path, name: str, crc: dict) -> dict[str, Tensor]:
    try:
        blob = (folder / name).read_bytes()
        if zlib.crc32(blob) != crc[name]:
            raise UserError(
                f"{folder / name} is damaged (its checksum differs); restore it from a copy or train the "
                "model again: robo_rl wm train DATASET"
            )
        return read_tensors(blob)
    except (OSError, SafetensorError, KeyError) as e:
        raise UserError(
            f"{folder / name} cannot be read ({e}); restore it from a copy or train the model again: "
            "robo_rl wm train DATASET"
        ) from e
