"""Data sets whose pictures are not square, or larger than a model of frames is to have them: padded to a
square, and made smaller as they are decoded. And those of which a model has some cameras alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from robo_rl.data.reader import Dataset
from robo_rl.errors import UserError

SIZE = 64  # pixels of a side, where no model says it


@dataclass(frozen=True, eq=False)
class SquareDataset(Dataset):
    """`whole`, its pictures padded to `size` x `size`."""

    whole: Dataset | None = None
    size: int = SIZE

    def blocks(self, view: str, episode: int, size: int = 64) -> Iterator[tuple[int, np.ndarray]]:
        assert self.whole is not None
        for first, block in self.whole.blocks(view, episode, size):
            yield first, self._fitted(block)

    def final_image(self, view: str, episode: int) -> np.ndarray | None:
        assert self.whole is not None
        last = self.whole.final_image(view, episode)
        return None if last is None else self._fitted(last[None])[0]

    def _fitted(self, pictures: np.ndarray) -> np.ndarray:
        return padded(pictures, self.size)


def padded(pictures: np.ndarray, size: int) -> np.ndarray:
    """uint8 [n,h,w,3] -> uint8 [n,size,size,3]: the longer side becomes `size`, the shorter one is padded on
    both sides."""
    rows, columns = inside(size, *pictures.shape[1:3])
    small = interpolate(
        torch.from_numpy(pictures).permute(0, 3, 1, 2).float(),
        (rows.stop - rows.start, columns.stop - columns.start),
        mode="bilinear",
        antialias=True,
    )
    out = np.zeros((len(pictures), size, size, 3), np.uint8)
    out[:, rows, columns] = small.round().clamp(0, 255).permute(0, 2, 3, 1).numpy()
    return out


def inside(size: int, h: int, w: int) -> tuple[slice, slice]:
    """Rows and columns of a square of `size` pixels that pictures of h x w fill."""
    high, wide = max(1, h * size // max(h, w)), max(1, w * size // max(h, w))
    top, left = (size - high) // 2, (size - wide) // 2
    return slice(top, top + high), slice(left, left + wide)


def unpadded(pictures: np.ndarray, h: int, w: int) -> np.ndarray:
    """uint8 [n,size,size,3] without what was padded, when pictures of h x w became squares."""
    rows, columns = inside(pictures.shape[1], h, w)
    return pictures[:, rows, columns]


def as_squares(dataset: Any, size: int = 0, resize: bool = False) -> Any:
    """The data set (`robo_rl.data.reader.Dataset`) itself where its pictures are square, else padded to
    `size` (of a model; 0: SIZE). resize: square ones are made of that size too."""
    f = dataset.features
    if all(h == w and (h == size or not resize) for _, h, w in f.views):
        return dataset
    size = size or SIZE
    meta = replace(dataset.meta, features=replace(f, views=tuple((v, size, size) for v, _, _ in f.views)))
    parts: dict[str, Any] = {x.name: getattr(dataset, x.name) for x in fields(Dataset)}
    return SquareDataset(**parts | {"meta": meta}, whole=dataset, size=size)


def names_in(cameras: str) -> tuple[str, ...]:
    """Of names with commas between."""
    return tuple(name.strip() for name in cameras.split(","))


def chosen(cameras: str, there: Sequence[str], where: str) -> tuple[str, ...]:
    """Names of cameras with commas between -> those names; "": all that are `there`. UserError for one that
    is not, or is named twice."""
    if not cameras:
        return tuple(there)
    names = names_in(cameras)
    if bad := next((n for n in names if n not in there), None):
        raise UserError(
            f"--cameras: data set {where} has no camera {bad!r}; it has: {', '.join(there) or 'none'}"
        )
    if len(set(names)) < len(names):
        raise UserError(f"--cameras {cameras} names a camera twice; name each once")
    return names


def seen_by(dataset: Dataset, views: Sequence[str]) -> Dataset:
    """The data set with its cameras `views` alone, in that order."""
    m = dataset.meta
    features = replace(m.features, views=tuple((v, *dataset.views[v]) for v in views))
    spec = m.spec and replace(m.spec, views=tuple(views))
    return replace(dataset, meta=replace(m, features=features, spec=spec))
