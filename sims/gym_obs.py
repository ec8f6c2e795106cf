"""What a Gymnasium env shows, as the contract has it: its numbers as one state, its pictures as views.

A part of the observation with three axes is a picture: uint8, or real numbers from 0 to 1, of shape [h, w, c]
or [c, h, w] with c = 3 or 1 (grey). Everything else is numbers of the state, in the order of the keys. A view
has the name of its keys, joined by "_", and is made square.
"""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from robo_rl.errors import UserError
from robo_rl.plugins import said

Keys = tuple[Any, ...]  # where a part is, in Dicts and Tuples of each other


class GymObservation:
    """Reads observations of one space. `size`: numbers of the state; `names`: theirs, () where the env names
    none; `views`: where each picture is, by name, none with obs "state"."""

    def __init__(self, name: str, space: spaces.Space, obs: str, image_size: int):
        self._name, self.image_size = name, image_size
        parts = dict(leaves(space))
        pictures = {keys: part for keys, part in parts.items() if len(part.shape or ()) > 2}
        for keys, part in pictures.items():
            check_picture(name, keys, part)
        self._parts = {keys: part for keys, part in parts.items() if keys not in pictures}
        for part in self._parts.values():
            if not part.is_np_flattenable:
                raise UserError(f"{name} has observations of varying size ({part}), which are not supported")
        shown = ", ".join(map(view_name, pictures))
        if obs == "rgb" and not pictures:
            raise UserError(
                f"{name} has no pictures among its observations, so obs 'state' only; "
                "gymnasium.wrappers.AddRenderObservation adds what the env draws"
            )
        if obs == "state" and not self._parts:
            raise UserError(f"{name} observes pictures alone ({shown}): they need --obs rgb")
        if obs == "state" and pictures:
            warnings.warn(f"{name}: obs state leaves its pictures out ({shown}); rgb has them", stacklevel=2)
        self.views = {view_name(keys): keys for keys in pictures} if obs == "rgb" else {}
        sizes = {keys: spaces.flatdim(part) for keys, part in self._parts.items()}
        self._size = sum(sizes.values())
        self.size = self._size or 1  # of an env of pictures alone: a zero
        self.names = tuple(f"{'.'.join(map(str, k))}{i}" for k, n in sizes.items() for i in range(n) if k)
        self._is_box = list(self._parts) == [()] and isinstance(space, spaces.Box)
        self._space = str(space)  # which takes long to write

    def states(self, ids: np.ndarray, seen: list[Any]) -> np.ndarray:
        """The states float32 [n, S] in the observations `seen` of the envs `ids`; UserError where one is of
        another size."""
        rows, k = np.zeros((len(seen), self.size), np.float32), 0
        if not self._parts:
            return rows
        with said(lambda: self._misfit(ids[k])):
            for k, x in enumerate(seen):
                if self._is_box:
                    row = np.asarray(x).reshape(-1)
                else:
                    row = np.concatenate([_numbers(p, part_of(x, keys)) for keys, p in self._parts.items()])
                if row.size != self._size:
                    raise UserError(
                        f"{self._name}: the observation of env {ids[k]} has {row.size} numbers, its "
                        f"observation_space {self._space} has {self._size}; correct the env"
                    )
                rows[k] = row
        return rows

    def pictures(self, ids: np.ndarray, seen: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
        """("image/<view>", uint8 [n, size, size, 3]) of each view in the observations of the envs `ids`."""
        for view, keys in self.views.items():
            yield f"image/{view}", self._view(keys, ids, seen)

    def _view(self, keys: Keys, ids: np.ndarray, seen: list[Any]) -> np.ndarray:
        made, k = np.zeros((len(seen), self.image_size, self.image_size, 3), np.uint8), 0
        with said(lambda: self._misfit(ids[k])):
            for k, x in enumerate(seen):
                made[k] = square(part_of(x, keys), self.image_size)
        return made

    def _misfit(self, i: int) -> str:
        return f"{self._name}: the observation of env {i} does not fit its observation_space {self._space}"


def leaves(space: spaces.Space, keys: Keys = ()) -> Iterator[tuple[Keys, spaces.Space]]:
    """The parts of nested Dicts and Tuples, in order, and where each is."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from leaves(part, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        for k, part in enumerate(space.spaces):
            yield from leaves(part, (*keys, k))
    else:
        yield keys, space


def part_of(x: Any, keys: Keys) -> Any:
    """The part of an observation that is at `keys`."""
    for key in keys:
        x = x[key]
    return x


def _numbers(part: spaces.Space, x: Any) -> np.ndarray:
    return np.asarray(x).reshape(-1) if isinstance(part, spaces.Box) else np.asarray(spaces.flatten(part, x))


def view_name(keys: Keys) -> str:
    """The view of the picture at `keys`: "pixels" of an observation that is one picture."""
    return re.sub(r"\W+", "_", "_".join(map(str, keys))) or "pixels"


def is_picture(part: spaces.Space) -> bool:
    """Whether values of `part` are pictures: uint8, or real in [0, 1], with channels last or first."""
    if not isinstance(part, spaces.Box) or len(part.shape) != 3:
        return False
    if part.shape[2] not in (1, 3) and part.shape[0] not in (1, 3):
        return False
    return part.dtype == np.uint8 or bool(part.low.min() >= 0 and part.high.max() <= 1)


def check_picture(name: str, keys: Keys, part: spaces.Space) -> None:
    """UserError unless values of `part` are pictures."""
    if not is_picture(part):
        raise UserError(
            f"{name} observes {'.'.join(map(str, keys)) or 'an array'} as {part}, neither numbers of a state "
            "nor a picture (uint8 or real in [0, 1], of shape [h, w, 3], [3, h, w] or with one channel); "
            "wrap the env: gymnasium.wrappers.TransformObservation, FlattenObservation"
        )


def square(picture: Any, size: int) -> np.ndarray:
    """uint8 [size, size, 3] of a picture, stretched, each pixel a weighted mean of those that it covers."""
    x = np.asarray(picture)
    if x.ndim != 3:
        raise ValueError(f"a picture has three axes, got shape {x.shape}")
    if x.dtype != np.uint8:
        x = np.rint(255 * x.clip(0, 1)).astype(np.uint8)
    if x.shape[2] not in (1, 3):
        x = x.transpose(1, 2, 0)
    if x.shape[2] == 1:
        x = np.repeat(x, 3, axis=2)
    if x.shape[:2] == (size, size):
        return x
    from PIL import Image

    return np.asarray(
        Image.fromarray(np.ascontiguousarray(x)).resize((size, size), Image.Resampling.BILINEAR)
    )
