"""V_0: a value model that predicts the success of a start from its first observation, trained beside the
policy."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.errors import in_range
from robo_rl.optim import AdamW
from robo_rl.rollout_control.predictors import standardised
from robo_rl.rollout_control.samplers import Arms, Floats, draws, largest


def contrast(p: Floats, n: int) -> Floats:
    """n (1 - p) [1 - (1 - p)^(n-1)]: the expected number of failures among n episodes that have a success to
    compare with.

    V_0, arXiv 2602.03584, its utility of n rollouts of one prompt.
    """
    return n * (1 - p) * (1 - (1 - p) ** (n - 1))


def v0_loss(logits: Tensor, outcome: Tensor) -> Tensor:
    """0.25 pairwise ranking + 0.75 cross-entropy of `logits` [M] to outcomes in [0, 1] [M].

    Ranking: mean of -log sigmoid(z_i - z_j) over the pairs with outcome_i > outcome_j; 0 without any. V_0,
    arXiv 2602.03584.
    """
    entropy = nn.functional.binary_cross_entropy_with_logits(logits, outcome)
    better = (outcome[:, None] > outcome[None]).float()
    ranking = (better * nn.functional.softplus(logits[None] - logits[:, None])).sum() / better.sum().clamp(
        min=1
    )
    return 0.25 * ranking + 0.75 * entropy


@dataclass(slots=True)
class V0:
    """A network on the first observations `features` [K,D], trained on the last `memory` episodes in every
    round; the n arms with the greatest `contrast` in `tries` episodes are played, but a share `explore` is
    drawn from all.

    Methods: `robo_rl.rollout_control.samplers`. Source: V_0, arXiv 2602.03584 (loss and utility); code
    Now-Join-Us/V0. Where we differ: a small network that is trained on takes the place of the frozen
    in-context head, and `explore` is ours: a network knows only what was played.
    """

    features: Floats
    seed: int = 0
    tries: int = 4
    explore: float = 0.25
    memory: int = 2048
    steps: int = 4
    batch: int = 128
    calls: int = 0
    updates: int = 0
    arms: Arms = field(default_factory=lambda: np.zeros(0, np.int64))
    outcomes: Floats = field(default_factory=lambda: np.zeros(0))
    p: Floats = field(init=False)
    x: Tensor = field(init=False)
    net: nn.Module = field(init=False)
    opt: AdamW = field(init=False)

    def __post_init__(self) -> None:
        in_range("explore", self.explore, 0, 1)
        in_range("tries", self.tries, 2, 10**6)
        self.x = torch.from_numpy(standardised(self.features)).float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.net = nn.Sequential(
                nn.Linear(self.x.shape[1], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
            )
        self.opt = AdamW(self.net.parameters(), lr=3e-3, weight_decay=1e-4)
        self.p = np.full(len(self.x), 0.5)

    def propose(self, n: int) -> Arms:
        rng, k = draws(self.seed, self.calls), len(self.x)
        self.calls += 1
        anywhere = rng.random(n) < self.explore
        out = rng.integers(0, k, n)
        out[~anywhere] = largest(contrast(self.p, self.tries), int((~anywhere).sum()), rng.random(k))
        return out

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        """Learn from outcomes `success` [n] of starts `arms` [n]: `steps` updates on draws of what is
        remembered."""
        self.arms = np.concatenate([self.arms, arms])[-self.memory :]
        self.outcomes = np.concatenate([self.outcomes, np.asarray(success, np.float64)])[-self.memory :]
        if not len(self.arms):
            return
        for _ in range(self.steps):
            rows = draws(self.seed + 1, self.updates).integers(0, len(self.arms), self.batch)
            self.updates += 1
            loss = v0_loss(
                self.net(self.x[self.arms[rows]]).squeeze(-1), torch.from_numpy(self.outcomes[rows]).float()
            )
            for w in self.net.parameters():
                w.grad = None
            loss.backward()
            self.opt.step()
        with torch.no_grad():
            self.p = self.net(self.x).squeeze(-1).sigmoid().double().numpy()

    def predict(self) -> Floats:
        return self.p.copy()

    def state_dict(self) -> dict:
        return {
            "calls": self.calls,
            "updates": self.updates,
            "arms": self.arms.copy(),
            "outcomes": self.outcomes.copy(),
            "p": self.p.copy(),
            "net": self.net.state_dict(),
            "opt": self.opt.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.calls, self.updates = state["calls"], state["updates"]
        self.arms, self.outcomes, self.p = (np.copy(state[k]) for k in ("arms", "outcomes", "p"))
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
