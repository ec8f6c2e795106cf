"""Tasks that a `text` model writes where the present policy's success is open (DreamGym, arXiv 2511.03773).

    value of a task = p (1 - p)   (`world_models.tasks`)       seeds ~ value;   new task = what the model
                                  writes in a seed's room,
                                                                              or the seed's wish in the room
                                                                              of a recorded start

A share of the episodes begins in recorded or written tasks drawn by value, the rest in recorded ones alike. A
new task counts as undecided until it was tried; one that is always or never solved is drawn no more, and the
next ones take its place. So nonsense removes itself.
"""

import numpy as np
import torch

from world_models.model import Frames
from world_models.tasks import Difficulty
from world_models.text import TextModel

EVERY = 64  # episodes that end between two lots of new tasks


class GeneratedTasks(Difficulty):
    """`slots` tasks that `model` writes, as more of its frames behind the recorded ones; owns their outcomes
    and its generator."""

    def __init__(self, model: TextModel, share: float, slots: int = 256, lot: int = 16, seed: int = 0):
        f = model.frames
        self.model, self.recorded, self.lot, self.ended, self.written = model, len(f), min(lot, slots), 0, 0
        self.generator, self.rng = torch.Generator().manual_seed(seed), np.random.default_rng([seed, 89])
        self.room = np.flatnonzero(f.first & ~f.held)
        more = np.resize(self.room, slots)
        none = np.zeros(slots, bool)
        model.frames = Frames(
            {k: np.concatenate([v, v[more]]) for k, v in f.obs.items()},
            np.concatenate([f.task, f.task[more]]),
            np.concatenate([f.first, none]),
            np.concatenate([f.held, none]),
        )
        super().__init__(len(f) + slots, share)

    @property
    def slots(self) -> int:
        return len(self.wins) - self.recorded

    def there(self) -> np.ndarray:
        """Frames of the written tasks."""
        return self.recorded + np.arange(min(self.written, self.slots))

    def pick(self, frames: np.ndarray, starts: np.ndarray, pool: np.ndarray) -> np.ndarray:
        return super().pick(frames, starts, np.concatenate([pool, self.there()]))

    def update(self, frames: np.ndarray, success: np.ndarray, born: np.ndarray | None = None) -> None:
        super().update(frames, success, born)
        self.ended += len(frames)
        if self.ended >= EVERY and self.slots:
            self.ended = 0
            self.write()

    def write(self) -> None:
        """A lot of new tasks, in place of the written ones that tell least; half of the lot of either
        kind."""
        tried = np.concatenate([self.room, self.there()])
        value = self.value()[tried] * (self.tries[tried] > 0) + 1e-9
        seeds = tried[self.rng.choice(len(tried), self.lot, p=value / value.sum())]
        state = torch.from_numpy(self.model.frames.obs["state"][seeds] > 0.5)
        half, rooms = (
            self.lot // 2,
            torch.from_numpy(self.model.frames.obs["state"][self.rng.choice(self.room, self.lot)] > 0.5),
        )
        new = torch.cat(
            [
                self.model.write_wanted(state[:half], self.generator),
                torch.where(self.model.fixed, state[half:], rooms[half:]),
            ]
        )
        free = np.arange(self.written, min(self.written + self.lot, self.slots))
        known = self.there() - self.recorded
        worst = known[np.argsort(self.value()[self.recorded :][known], kind="stable")][: self.lot - len(free)]
        at = self.recorded + np.concatenate([free, worst])
        self.model.frames.obs["state"][at] = new.numpy()[: len(at)]
        self.wins[at], self.tries[at] = 0, 0
        self.born[at] += 1
        self.written += len(free)

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "tasks": self.model.frames.obs["state"][self.there()],
            "written": self.written,
            "ended": self.ended,
            "generator": self.generator.get_state().numpy().copy(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.written, self.ended = state["written"], state["ended"]
        self.model.frames.obs["state"][self.there()] = state["tasks"]
        self.generator.set_state(torch.from_numpy(np.array(state["generator"])))
        self.rng.bit_generator.state = state["rng"]


def difficulty_of(model, share: float) -> "Difficulty | None":
    """How `share` of the episodes in a model begin where success is open: None for 0; with tasks of its own
    where it can write them."""
    if not share:
        return None
    return (
        GeneratedTasks(model, share) if isinstance(model, TextModel) else Difficulty(len(model.frames), share)
    )
