"""Success of starts that were not played yet, from what is seen at them. K arms with features [K,D], the
first observations.

A sampler with the methods of `robo_rl.rollout_control.samplers`: difficulty-targeted selection, whose
predictor compares a start with reference starts that were just played. V_0, a network that learns from every
episode: `robo_rl.rollout_control.v0`.
"""

from dataclasses import dataclass, field

import numpy as np

from robo_rl.errors import in_range
from robo_rl.rollout_control.samplers import Arms, Floats, Measured, draws, largest, restore, state_of


def standardised(features: Floats) -> Floats:
    """Every column with mean 0 and deviation 1 (a constant one: 0), so that no unit rules the distance."""
    x = np.asarray(features, np.float64)
    spread = x.std(0)
    return (x - x.mean(0)) / np.where(spread > 1e-9, spread, 1.0) * (spread > 1e-9)


def attend(queries: Floats, references: Floats, success: Floats, sharpness: float = 1.0) -> Floats:
    """Mean success [M] of the references [R], weighted by softmax(sharpness q.r / sqrt(d)) over the
    references.

    queries[M,D], references[R,D], success[R]. Sun et al. 2025, arXiv 2506.05316.
    """
    scores = sharpness * queries @ references.T / np.sqrt(queries.shape[1])
    w = np.exp(scores - scores.max(1, keepdims=True))
    return w @ success / w.sum(1)


def fit_platt(p: Floats, target: Floats, steps: int = 50) -> tuple[float, float]:
    """(a, b) of the least cross-entropy of sigmoid(a logit(p) + b) to `target` [R], by Newton steps (Platt
    1999).

    A ridge of 1e-3 holds (a, b) near (1, 0) where the references cannot say: all of them solved, or all
    alike.
    """
    x = np.stack([_logit(p), np.ones(len(p))], 1)
    theta = prior = np.array([1.0, 0.0])
    for _ in range(steps):
        q = 1 / (1 + np.exp(-np.clip(x @ theta, -30, 30)))
        gradient = x.T @ (q - target) / len(p) + 1e-3 * (theta - prior)
        hessian = (x.T * (q * (1 - q))) @ x / len(p) + 1e-3 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        theta = theta - step * min(1.0, 2.0 / max(1e-9, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-10:
            break
    return float(theta[0]), float(theta[1])


def _logit(p: Floats) -> Floats:
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return np.log(p / (1 - p))


@dataclass(slots=True)
class Dots:
    """Difficulty-targeted selection: reference starts are played, the success of all others is predicted from
    theirs.

        d = 1 - sigmoid(a logit(attend) + b)           (a, b) fitted on the references themselves
        n arms without return with probability softmax(-|d - 0.5| / tau)

    `references` arms are measured with `tries` episodes each, anew every `serves` rounds.

    Source: Sun et al. 2025, arXiv 2506.05316; code ASTRAL-Group/data-efficient-llm-rl (256 references,
    tau 1e-3, a selection serves 2 steps). Where we differ: features are the first observations, not a trained
    embedding, and the calibration is Platt's on the references (one of the three that the code has).
    """

    features: Floats
    seed: int = 0
    references: int = 64
    tries: int = 4
    tau: float = 1e-3
    serves: int = 2
    sharpness: float = 4.0
    calls: int = 0
    rounds: int = field(init=False)  # since the references were measured
    p: Floats = field(init=False)
    measured: Measured = field(init=False)

    def __post_init__(self) -> None:
        in_range("references", self.references, 2, 10**6)
        in_range("tau", self.tau, 0, 1e3, open_low=True)
        self.features = standardised(self.features)
        self.p, self.measured = np.full(len(self.features), 0.5), Measured(len(self.features), self.tries)
        self.rounds = self.serves

    def propose(self, n: int) -> Arms:
        rng, k = draws(self.seed, self.calls), len(self.features)
        self.calls += 1
        if self.rounds >= self.serves:
            self.measured.begin(rng.choice(k, min(k, self.references), replace=False))
            self.rounds = 0
        first = rng.permutation(self.measured.missing())[:n]
        chance = -np.abs(self.p - 0.5) / self.tau + rng.gumbel(size=k)
        return np.concatenate([first, largest(chance, n - len(first), rng.random(k))])

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        self.measured.add(arms, success)
        self.rounds += not len(self.measured.missing())
        if self.rounds == 1:
            done = self.measured.done()
            self.p = self.predict_from(done, self.measured.rates(done))

    def predict_from(self, references: Arms, rates: Floats) -> Floats:
        """Success of every arm [K] from the rates [R] of the reference arms [R]."""
        raw = attend(self.features, self.features[references], rates, self.sharpness)
        a, b = fit_platt(raw[references], rates)
        return 1 / (1 + np.exp(-np.clip(a * _logit(raw) + b, -30, 30)))

    def predict(self) -> Floats:
        return self.p.copy()

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "rounds", "p")) | {"measured": self.measured.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "rounds", "p"), state)
        self.measured.load_state_dict(state["measured"])
