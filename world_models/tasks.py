"""Which recorded frames to begin episodes from: those whose outcome the present policy leaves open.

    value of a frame = p (1 - p),   p = (wins + 1) / (tries + 2)

For 0/1 outcomes this is the variance of a group's rewards, DreamGym's task value (arXiv 2511.03773), and the
learnability of SFL. A stated share of the starts is drawn by it, the rest as without it: a share of 0 changes
nothing.
"""

import numpy as np

from robo_rl.errors import in_range
from robo_rl.starts import uniforms

MEMORY = 0.98  # what an outcome counts for after each further one at its frame


class Difficulty:
    """Outcomes per frame, and starts drawn by them. Owns `wins` and `tries` [F], and `born` int64[F]: how
    many tasks the frame has had."""

    def __init__(self, frames: int, share: float):
        in_range("share of starts drawn by difficulty", share, 0, 1)
        self.share, self.wins, self.tries = share, np.zeros(frames), np.zeros(frames)
        self.born = np.zeros(frames, np.int64)

    def value(self) -> np.ndarray:
        """p (1 - p) of every frame [F]; the greatest, 1/4, where nothing is known yet."""
        p = (self.wins + 1) / (self.tries + 2)
        return p * (1 - p)

    def pick(self, frames: np.ndarray, starts: np.ndarray, pool: np.ndarray) -> np.ndarray:
        """int64[n]: `frames` [n] as they were chosen, or, for `share` of the starts [n], one of `pool` drawn
        by value."""
        u = uniforms(starts, 2, stream=9)
        sums = np.cumsum(self.value()[pool])
        drawn = pool[np.searchsorted(sums, u[:, 1] * sums[-1], side="right").clip(max=len(pool) - 1)]
        return np.where(u[:, 0] < self.share, drawn, frames)

    def update(self, frames: np.ndarray, success: np.ndarray, born: np.ndarray | None = None) -> None:
        """Episodes from `frames` [n] ended with `success` bool[n]; `born` [n]: as it was when they began
        (None: as it is). One whose frame has another task by now says nothing of that."""
        same = np.ones(len(frames), bool) if born is None else self.born[frames] == born
        for i, won in zip(frames[same], success[same], strict=True):
            self.wins[i] = MEMORY * self.wins[i] + won
            self.tries[i] = MEMORY * self.tries[i] + 1

    def grow(self, frames: int) -> None:
        """There are now `frames` of them, the first ones as before."""
        more = max(0, frames - len(self.wins))
        self.wins, self.tries, self.born = (
            np.concatenate([x, np.zeros(more, x.dtype)])[:frames] for x in (self.wins, self.tries, self.born)
        )

    def state_dict(self) -> dict:
        """What a run that is resumed goes on with; copies."""
        return {"wins": self.wins.copy(), "tries": self.tries.copy(), "born": self.born.copy()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict()` of as many frames."""
        self.wins, self.tries, self.born = (np.array(state[k]) for k in ("wins", "tries", "born"))
