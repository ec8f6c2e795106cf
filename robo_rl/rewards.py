"""Was it a success? A classifier of marked states, and the guard that bounds its false alarms.

    score of an episode = max_t min_{j < hold} p(success | s_{t-j})            `hold` states in a row agree
    threshold = the ceil((n + 1)(1 - rate))-th smallest score of n failures that were held out

Then a failure like those is called a success with probability at most `rate` (split conformal prediction,
Vovk et al. 2005; it is exact for exchangeable episodes and says nothing of others). The rate is per episode:
a bound per state would let nearly every long failure through. Training: binary cross-entropy, half of every
batch successes (HIL-SERL).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, in_range
from robo_rl.normalise import Normaliser
from robo_rl.optim import AdamW


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """States somebody marked: state float32[M,S], success bool[M], episode int64[M], each episode in order of
    time."""

    state: np.ndarray
    success: np.ndarray
    episode: np.ndarray

    def __post_init__(self) -> None:
        m = len(self.state)
        if self.state.ndim != 2 or self.success.shape != (m,) or self.episode.shape != (m,):
            raise UserError(
                f"marks must be state [M,S], success [M] and episode [M], got {self.state.shape}, "
                f"{self.success.shape} and {self.episode.shape}"
            )
        if not np.isfinite(self.state).all():
            raise UserError("a marked state is not finite; drop its episode")
        seen = {}
        for s, ok in zip(map(bytes, np.ascontiguousarray(self.state)), self.success.tolist(), strict=False):
            if seen.setdefault(s, ok) != ok:
                raise UserError("one and the same state is marked a success and a failure; mend the marks")

    def rows(self, keep: np.ndarray) -> "Marked":
        """The marks of the episodes for which keep[episode] holds."""
        at = keep[self.episode]
        return Marked(self.state[at], self.success[at], self.episode[at])


def marks_of(
    state: np.ndarray, lengths: np.ndarray, success: np.ndarray, last: int = 2, hidden: int = 8
) -> Marked:
    """Marks of whole episodes that somebody called a success or a failure at their end.

    state float32[M,S]: what was observed, episode after episode, of `lengths` int[E] rows each; success
    bool[E]. The `last` states of a success look like one; of the `hidden` before them nobody knows, for a
    person marks late; all others are none. A state that is both (the robot stood still before the mark)
    counts as a success.
    """
    ends = np.cumsum(lengths)
    from_end = np.repeat(ends, lengths) - np.arange(len(state))  # 1: the last of its episode
    won = np.repeat(success, lengths)
    good = won & (from_end <= last)
    known = ~won | good | (from_end > last + hidden)
    seen = {bytes(s) for s in np.ascontiguousarray(state[good])}
    known &= good | np.array([bytes(s) not in seen for s in np.ascontiguousarray(state)])
    return Marked(state[known], good[known], np.repeat(np.arange(len(lengths)), lengths)[known])


class SuccessClassifier(nn.Module):
    """p(success | state), with the threshold and hold of its guard as buffers, so that they travel with the
    weights."""

    threshold: Tensor
    hold: Tensor

    def __init__(self, state: int, hidden: int = 64):
        super().__init__()
        self.norm = Normaliser(state)
        self.net = nn.Sequential(
            nn.Linear(state, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        self.register_buffer("threshold", torch.tensor(0.5))
        self.register_buffer("hold", torch.tensor(1))

    def forward(self, state: Tensor) -> Tensor:
        """Logits [B] of states [B,S]."""
        return self.net(self.norm(state)).squeeze(-1)

    @torch.no_grad()
    def probability(self, state: np.ndarray) -> np.ndarray:
        """float32[B]."""
        return torch.sigmoid(self(torch.from_numpy(np.ascontiguousarray(state, np.float32)))).numpy()


def fit(
    marks: Marked, seed: int = 0, updates: int = 400, batch: int = 128, lr: float = 1e-3
) -> SuccessClassifier:
    """Balanced binary cross-entropy. Raises UserError unless both kinds are there."""
    good, bad = marks.success.nonzero()[0], (~marks.success).nonzero()[0]
    if not len(good) or not len(bad):
        raise UserError(
            f"a success classifier needs marks of both kinds, got {len(good)} successes and {len(bad)} "
            "failures (states); where the env or the policy gives one kind alone, --rl.judge-marks gives "
            "episodes that people marked, or --rl.operator somebody who marks them"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SuccessClassifier(marks.state.shape[1])
    state, rng = torch.from_numpy(marks.state), np.random.default_rng(seed)
    model.norm.fit(state)
    opt = AdamW(model.parameters(), lr, weight_decay=1e-3, fused=False)
    half = batch // 2
    label = torch.cat([torch.ones(half), torch.zeros(batch - half)])
    for _ in range(updates):
        rows = np.concatenate([rng.choice(good, half), rng.choice(bad, batch - half)])
        loss = nn.functional.binary_cross_entropy_with_logits(model(state[rows]), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model.eval()


def episode_scores(p: np.ndarray, episode: np.ndarray, hold: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [M] in order of time -> (episodes there are, the score of each); shorter than `hold`:
    0."""
    names, scores = np.unique(episode), []
    for e in names:
        mine = p[episode == e]
        runs = (
            np.lib.stride_tricks.sliding_window_view(mine, hold).min(1) if len(mine) >= hold else np.zeros(1)
        )
        scores.append(runs.max())
    return names, np.array(scores, np.float64)


def guard(failures: np.ndarray, rate: float) -> float:
    """The threshold that a failure's score exceeds with probability at most `rate`, from scores of n held-out
    failures.

    Raises UserError if n is too small to promise that: it takes ceil(1/rate) - 1 of them."""
    in_range("rate", rate, 0, 1, open_low=True, open_high=True)
    n = len(failures)
    rank = int(np.ceil((n + 1) * (1 - rate) - 1e-9))
    if rank > n:
        raise UserError(
            f"a false-alarm rate of {rate:g} needs at least {int(np.ceil(1 / rate - 1e-9)) - 1} held-out "
            f"failures, got {n}; mark more or allow a higher rate"
        )
    return float(np.sort(failures)[rank - 1])


HELD_OUT = 0.5  # share of the marked episodes that the guard is set on


def train(
    marks: Marked, rate: float, hold: int = 2, seed: int = 0, share: float = HELD_OUT
) -> tuple[SuccessClassifier, dict]:
    """Fit on some episodes, set the guard on the others (`share` of them) -> (classifier, what was measured).

    An episode's states before its first success count as a failure of their own. Reported: the threshold, how
    many held-out failures set it, and the share of held-out successes that pass it (recall)."""
    in_range("hold", hold, 1, 1000)
    episodes = np.unique(marks.episode)
    out = np.random.default_rng([seed, 5]).permutation(episodes)[: round(share * len(episodes))]
    held = np.zeros(int(marks.episode.max()) + 1, bool)
    held[out] = True
    model, test = fit(marks.rows(~held), seed), marks.rows(held)
    p = model.probability(test.state)
    before = np.ones(len(p), bool)  # states before the first success of their episode
    for e in out:
        at = (test.episode == e).nonzero()[0]
        won = test.success[at]
        if won.any():
            before[at[int(won.argmax()) :]] = False
    _, failures = episode_scores(p[before], test.episode[before], hold)
    threshold = guard(failures, rate)
    won = np.unique(test.episode[test.success])
    caught = [p[(test.episode == e) & test.success].max() > threshold for e in won]
    model.threshold.fill_(threshold)
    model.hold.fill_(hold)
    return model, {
        "threshold": threshold,
        "failures": len(failures),
        "successes": len(won),
        "false_alarms": float((failures > threshold).mean()),
        "recall": float(np.mean(caught)) if caught else 0.0,
    }


class Judge:
    """The classifier at work on N envs: a success once `hold` states in a row are above the threshold.

    Where the env itself has stopped, its last state stands for those that would have followed.
    """

    def __init__(self, model: SuccessClassifier, n: int):
        self.model, self.hold, self.threshold = model, int(model.hold), float(model.threshold)
        self.row = np.zeros(n, np.int64)  # states in a row

    def __call__(self, state: np.ndarray, stopped: np.ndarray) -> np.ndarray:
        """State [N,S] after a step, whether the env stopped there by itself -> bool[N]."""
        self.row = np.where(self.model.probability(state) > self.threshold, self.row + 1, 0)
        return (self.row >= self.hold) | (stopped & (self.row > 0))

    def reset(self, mask: np.ndarray) -> None:
        """Those episodes are over."""
        self.row[mask] = 0
