"""When to stop: episodes whose end is known are not played to it, and the estimate keeps its expectation.

    q     = calibrated prediction of success at the detection point
    arrol   p = clip(keep + shift + lam (ref - q), low, high)    ARRoL (arXiv 2603.24840): balanced groups
    certain p = clip(c sqrt(q (1 - q)), low, 1)                  ours: stops what cannot surprise

`shift` and c are such that the mean of p over recent predictions is `keep`. A survivor's return counts as
guess + (R - guess)/p and a stopped one's as its guess (`robo_rl.tree_credit`), which ARRoL leaves out: with
it stopping is roulette, without bias. Of all rules with one mean, p in proportion to the deviation of what is
still to come, sqrt(q (1 - q)) of a binary outcome, adds least variance.
"""

import math

import numpy as np
import torch
from torch import nn

from robo_rl.errors import choose
from robo_rl.noise import mix, seed_noise
from robo_rl.normalise import Normaliser
from robo_rl.optim import AdamW

RULES = ("arrol", "certain")
LOW, HIGH = 0.1, 0.9  # ARRoL's bounds of p
BINS, RECENT, ROWS = 128, 512, 8192


def bisect(mean, keep: float, low: float, high: float, rounds: int = 60) -> float:
    """x in [low, high] at which the increasing `mean(x)` is `keep`, or the nearer end."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < keep else (low, middle)
    return (low + high) / 2


def survival(
    q: np.ndarray, recent: np.ndarray, keep: float, rule: str = "arrol", lam: float = 0.5, ref: float = 0.5
) -> np.ndarray:
    """Probability of going on of predictions q [n], the mean of which over the predictions `recent` [m] is
    `keep`.

    p is at least LOW, and with arrol at most HIGH. A `keep` outside of what the bounds allow gives the
    nearest bound.
    """
    choose("rule", rule, RULES)
    if rule == "arrol":

        def p(x, shift):
            return np.clip(keep + shift + lam * (ref - x), LOW, HIGH)

        shift = bisect(lambda s: p(recent, s).mean(), keep, -2.0, 2.0)
        return p(q, shift)

    def certain(x, c):
        return np.clip(c * np.sqrt(x * (1 - x)), LOW, 1.0)

    return certain(q, bisect(lambda c: certain(recent, c).mean(), keep, 0.0, 1e4))


class Calibration:
    """Success in bins of a prediction, with Laplace's one success and one failure spread over the bin (ARRoL:
    128 bins).

    An observation counts `decay` less with every later one.
    """

    def __init__(self, bins: int = BINS, decay: float = 0.999):
        self.won, self.seen, self.decay = np.zeros(bins), np.zeros(bins), decay

    def _bin(self, raw: np.ndarray) -> np.ndarray:
        return np.clip((np.asarray(raw) * len(self.seen)).astype(np.int64), 0, len(self.seen) - 1)

    def __call__(self, raw: np.ndarray) -> np.ndarray:
        """Predictions [n] -> (won + 2 raw)/(seen + 2) of their bins: with nothing seen the prediction
        itself."""
        b = self._bin(raw)
        return (self.won[b] + 2 * np.asarray(raw)) / (self.seen[b] + 2)

    def observe(self, raw: np.ndarray, success: np.ndarray) -> None:
        """What became of episodes that were predicted to be `raw` [n]."""
        fade = self.decay ** len(raw)
        self.won *= fade
        self.seen *= fade
        np.add.at(self.won, self._bin(raw), np.asarray(success, np.float64))
        np.add.at(self.seen, self._bin(raw), 1.0)


class SuccessHead(nn.Module):
    """p(success | state, share of the longest episode that is over): a small network on episodes that have
    ended.

    It learns from what was played to its end, weighted as the tree has it, and sees no episode before that;
    all of its state is in `control_state`. Every draw follows from (seed, episodes seen).
    """

    def __init__(self, state: int, seed: int, hidden: int = 64):
        super().__init__()
        self.norm, self.seed = Normaliser(state), seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(seed, 21) >> 32)
            self.net = nn.Sequential(
                nn.Linear(state + 1, hidden),
                nn.Tanh(),
                nn.Linear(hidden, hidden),
                nn.Tanh(),
                nn.Linear(hidden, 1),
            )
        self.opt = AdamW(list(self.net.parameters()), lr=1e-3, fused=True)
        self.rows = torch.zeros(ROWS, state + 1)
        self.target, self.weight = torch.zeros(ROWS), torch.zeros(ROWS)
        self.written = self.episodes = 0
        self.generator = torch.Generator()

    @torch.no_grad()
    def raw(self, state: np.ndarray, share: np.ndarray) -> np.ndarray:
        """States [n,S] and shares [n] -> predictions [n], not calibrated."""
        x = torch.cat(
            [
                self.norm(torch.as_tensor(state, dtype=torch.float32)),
                torch.as_tensor(share, dtype=torch.float32)[:, None],
            ],
            1,
        )
        return torch.sigmoid(self.net(x))[:, 0].double().numpy()

    def observe(self, state: np.ndarray, share: np.ndarray, success: float, weight: float) -> None:
        """Keep the states [t,S] of one branch that reached its end, and the weight of that."""
        x = torch.cat(
            [
                torch.as_tensor(state, dtype=torch.float32),
                torch.as_tensor(share, dtype=torch.float32)[:, None],
            ],
            1,
        )
        at = (self.written + torch.arange(len(x))) % ROWS
        self.rows[at], self.target[at], self.weight[at] = x, float(success), float(weight)
        self.written += len(x)
        self.episodes += 1

    def learn(self, updates: int, batch: int = 256) -> float:
        """Some steps on what is kept -> mean loss; nan without rows."""
        n, total = min(self.written, ROWS), 0.0
        if not n:
            return math.nan
        seed_noise(self.generator, mix(self.seed, 22, self.episodes))
        self.norm.fit(self.rows[:n, :-1])
        for _ in range(updates):
            at = torch.randint(n, (min(batch, n),), generator=self.generator)
            x = torch.cat([self.norm(self.rows[at, :-1]), self.rows[at, -1:]], 1)
            loss = nn.functional.binary_cross_entropy_with_logits(
                self.net(x)[:, 0], self.target[at], self.weight[at]
            )
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += float(loss.detach())
        return total / max(updates, 1)

    def control_state(self) -> dict:
        n = min(self.written, ROWS)
        return {
            "net": self.state_dict(),
            "opt": self.opt.state_dict(),
            "rows": self.rows[:n].clone(),
            "target": self.target[:n].clone(),
            "weight": self.weight[:n].clone(),
            "written": self.written,
            "episodes": self.episodes,
        }

    def load_control_state(self, state: dict) -> None:
        self.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        n = len(state["rows"])
        self.rows[:n], self.target[:n], self.weight[:n] = state["rows"], state["target"], state["weight"]
        self.written, self.episodes = state["written"], state["episodes"]
