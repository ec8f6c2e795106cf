"""Data sets whose pictures are not square, as models of frames take them: padded to a square, and made smaller as they are decoded."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from robo_rl.data.reader import Dataset

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
        """uint8 [n,h,w,3] -> uint8 [n,size,size,3]: the longer side becomes `size`, the shorter one is padded on both sides."""
        h, w = pictures.shape[1:3]
        h, w = max(1, h * self.size // max(h, w)), max(1, w * self.size // max(h, w))
        small = interpolate(torch.from_numpy(pictures).permute(0, 3, 1, 2).float(), (h, w), mode="bilinear", antialias=True)
        out = np.zeros((len(pictures), self.size, self.size, 3), np.uint8)
        top, left = (self.size - h) // 2, (self.size - w) // 2
        out[:, top:top + h, left:left + w] = small.round().clamp(0, 255).permute(0, 2, 3, 1).numpy()
        return out


def as_squares(dataset: Any, size: int = 0) -> Any:
    """The data set (`robo_rl.data.reader.Dataset`) itself where its pictures are square, else padded to `size` (of a model; 0: SIZE)."""
    f = dataset.features
    if all(h == w for _, h, w in f.views):
        return dataset
    size = size or SIZE
    meta = replace(dataset.meta, features=replace(f, views=tuple((v, size, size) for v, _, _ in f.views)))
    parts: dict[str, Any] = {x.name: getattr(dataset, x.name) for x in fields(Dataset)}
    return SquareDataset(**parts | {"meta": meta}, whole=dataset, size=size)
