"""The pictures of an observation: drawn again where something changed, kept where nothing did."""

from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch


class Pictures:
    """What the cameras `views` of N arms see, uint8 [N, size, size, 3] each; renderers are made when they are
    asked for."""

    def __init__(self, batch: Batch, model: mujoco.MjModel, views: tuple[str, ...], size: int):
        self.batch, self.model, self.views, self.size = batch, model, views, size
        self.images: dict[str, np.ndarray] = {}  # made at the first look
        self._stale = np.zeros(batch.nsim, bool)
        self._renderers: dict[object, Any] = {}

    def draw(self, mask: np.ndarray, now: bool) -> None:
        """Render the envs of `mask` and those whose picture is old; the others keep theirs. Not `now`: they
        become old."""
        n = len(mask)
        if not self.images:
            self.images = {v: np.zeros((n, self.size, self.size, 3), np.uint8) for v in self.views}
        self._stale |= mask
        if not now:
            return
        ids = np.flatnonzero(self._stale)
        self._stale[:] = False
        if len(ids):
            fresh = self.renderer(self.views, self.size).render(None if len(ids) == n else ids)
            for view, pixels in fresh.items():
                self.images[view][ids] = pixels

    def renderer(self, views: tuple[str, ...], size: int):
        key = (views, size)
        if key not in self._renderers:
            from sims.mujoco.render import Renderer

            self._renderers[key] = Renderer(self.batch, self.model, views, size, size)
        return self._renderers[key]

    def studio(self, ids) -> np.ndarray:
        """uint8 [n, 480, 640, 3] of the envs `ids`: the whole workspace with light and shadow, for people."""
        if "studio" not in self._renderers:
            from sims.mujoco.render import Renderer

            self._renderers["studio"] = Renderer(self.batch, self.model, ("studio",), 480, 640, fine=True)
        return self._renderers["studio"].render(ids)["studio"]

    def close(self) -> None:
        for r in self._renderers.values():
            if hasattr(r, "close"):
                r.close()
        self._renderers.clear()
