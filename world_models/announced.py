"""The actions to come of which an env of a world model was told, lane by lane, and what the model made of
them.

A model of frames makes those of several actions at once, as it is calibrated and measured; made one by one
the frames differ. So whoever decides on a chunk announces it. The model is asked at the first step of the
chunk; a lane whose steps bring other actions goes on from what was really done, one by one.

Axes: `N` lanes, `E` steps announced, `A` action.
"""

import numpy as np
import torch
from torch import Tensor

from world_models.model import Carry, Prediction, WorldModel

ROOM = 32  # steps that a snapshot has room for, so that those of all times have one shape; grows where needed
PARTS = ("reward", "terminal", "success", "uncertainty")
FIELDS = ("planned", "length", "done")  # of a snapshot


class AnnouncedSteps:
    """The next actions planned[N,E,A] of every lane, `length` of which are known (0: none) and `done` of
    which were made. `listens` False: nothing will ever be announced, and snapshots have no place for it."""

    def __init__(self, lanes: int, action: int, listens: bool):
        self.listens = listens
        self.planned = np.zeros((lanes, ROOM if listens else 1, action), np.float32)
        self.length, self.done = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self.known = np.zeros(lanes, bool)  # the model has been asked
        self.made: dict[str, Tensor] = {}  # [N,E,...] what it said
        self.after: Carry = {}  # [N,...] its carry after all of them

    def announce(self, actions: np.ndarray, lanes: np.ndarray) -> None:
        """`actions` [N,E,A] come next in `lanes` bool[N], which are at the end of those announced before."""
        self._widen(actions.shape[1])
        self.planned[lanes, : actions.shape[1]] = actions[lanes]
        self.length[lanes], self.done[lanes], self.known[lanes] = actions.shape[1], 0, False

    def _widen(self, steps: int) -> None:
        if (more := steps - self.planned.shape[1]) > 0:
            self.planned = np.pad(self.planned, ((0, 0), (0, more), (0, 0)))

    def strays(self, actions: np.ndarray) -> np.ndarray:
        """bool[N]: actions [N,A] are not what was announced, or nothing was."""
        at = np.minimum(self.done, self.planned.shape[1] - 1)
        other = (self.planned[np.arange(len(at)), at] != actions).any(1)
        return (self.done >= self.length) | other

    def clear(self, lanes: np.ndarray) -> None:
        """Forget what was announced in `lanes` bool[N]."""
        self.length[lanes] = self.done[lanes] = 0

    def settled(self, model: WorldModel, carry: Carry, lanes: np.ndarray) -> Carry:
        """`carry` after the steps that were made in `lanes` bool[N], where the rest is forgotten."""
        for k in np.unique(self.done[lanes & (self.done > 0)]).tolist():
            rows = np.flatnonzero(lanes & (self.done == k))
            after, _ = model.step(rows_of(carry, rows), torch.from_numpy(self.planned[rows, :k]))
            carry = {name: placed(carry[name], v, rows) for name, v in after.items()}
        self.clear(lanes)
        return carry

    def step(
        self, model: WorldModel, carry: Carry, actions: np.ndarray, draw: dict
    ) -> tuple[Carry, np.ndarray, Prediction]:
        """One step by `actions` [N,A] of lanes that follow what was announced, or have none -> (the carry of
        lanes at the end of it, which these are bool[N], what comes of the step [N,1,...])."""
        lone = self.length == 0
        self.planned[lone, 0], self.length[lone], self.known[lone] = actions[lone], 1, False
        for e in np.unique(self.length[~self.known]).tolist():
            self._ask(model, carry, np.flatnonzero(~self.known & (self.length == e)), e, draw)
        self.known[:] = True
        lanes, at = torch.arange(len(actions)), torch.from_numpy(self.done)
        now = {k: v[lanes, at][:, None] for k, v in self.made.items()}
        self.done += 1
        ended = self.done == self.length
        self.clear(ended)
        obs = {k[4:]: v for k, v in now.items() if k.startswith("obs/")}
        return self.after, ended, Prediction(obs, *(now[k] for k in PARTS))

    def _ask(self, model: WorldModel, carry: Carry, rows: np.ndarray, e: int, draw: dict) -> None:
        n = len(self.length)
        after, p = model.step(rows_of(carry, rows), torch.from_numpy(self.planned[rows, :e]), **draw)
        made = {f"obs/{k}": v for k, v in p.obs.items()} | {k: getattr(p, k) for k in PARTS}
        if len(rows) == n:
            self.made, self.after = made, after
            return
        carried = {k: self.after.get(k, v.new_zeros((n, *v.shape[1:]))) for k, v in after.items()}
        self.after = {k: placed(carried[k], v, rows) for k, v in after.items()}
        for k, v in made.items():
            room = max(e, self.made[k].shape[1] if k in self.made else 0)
            old, self.made[k] = self.made.get(k), v.new_zeros((n, room, *v.shape[2:]))
            if old is not None:
                self.made[k][:, : old.shape[1]] = old
            self.made[k][torch.from_numpy(rows), :e] = v

    # ---- snapshots: what the model said is asked again

    def state(self) -> dict[str, np.ndarray]:
        """Rows [N,...] to go on from; copies."""
        return {k: getattr(self, k).copy() for k in FIELDS} if self.listens else {}

    def set_state(self, state: dict[str, np.ndarray], lanes: np.ndarray) -> None:
        """Put back rows of `state()` in `lanes` bool[N]."""
        self.clear(lanes)
        if state:
            self._widen(state["planned"].shape[1])
            self.planned[lanes, : state["planned"].shape[1]] = state["planned"][lanes]
            self.length[lanes], self.done[lanes] = state["length"][lanes], state["done"][lanes]
            self.known[lanes] = False


def rows_of(carry: Carry, rows: np.ndarray) -> Carry:
    """The carry of some lanes, or itself where these are all."""
    if len(rows) == len(next(iter(carry.values()))):
        return carry
    return {k: v[torch.from_numpy(rows)] for k, v in carry.items()}


def placed(old: Tensor, new: Tensor, rows: np.ndarray) -> Tensor:
    """`old` [N,...] with `new` [n,...] in `rows`."""
    return old.index_copy(0, torch.from_numpy(rows), new)
