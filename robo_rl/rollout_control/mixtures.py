"""How often each part of the starts is played: weights of tasks, or of bins of difficulty. B bins or tasks, K
arms.

The samplers have the methods of `robo_rl.rollout_control.samplers`; MoDoMoDo's surrogate is two pure
functions.
"""

from dataclasses import dataclass, field

import numpy as np

from robo_rl.errors import UserError, in_range
from robo_rl.rollout_control.samplers import Arms, Floats, counts, draws, restore, state_of


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return e / e.sum()


def rebinned(rate: Floats, bins: Arms, edges: Floats, hysteresis: float) -> Arms:
    """The bin of each success rate [K]: bin i is [edges[i-1], edges[i]); an arm leaves its bin in `bins` [K]
    only when its rate is `hysteresis` beyond the edge that it crosses."""
    new = np.searchsorted(edges, rate, side="right")
    up, down = new > bins, new < bins
    above = np.searchsorted(edges, rate - hysteresis, side="right")
    below = np.searchsorted(edges, rate + hysteresis, side="left")
    return np.where(up, np.maximum(above, bins), np.where(down, np.minimum(below, bins), bins))


@dataclass(slots=True)
class PromptGdro:
    """Group DRO over bins of difficulty: the bins with the greatest mean loss are played most.

        S_b <- (1 - beta) S_b + beta (mean loss of the round's episodes in bin b)     a mean: frequent bins
                                                            gain nothing by it
        omega_b = exp(eta clip(S_b, +-cap)),   q = (1 - gamma) omega / sum omega + gamma / B

    An arm's bin is that of its success over its last `window` episodes (`rebinned`). A bin is drawn from q,
    then an arm of it evenly; an empty bin's share goes to the others. The loss of an episode is 1 - success.
    `weights()` are the paper's weights of advantages, min(omega, 15), for starts that are drawn evenly
    instead: use one of the two.

    Source: Prompt-GDRO, arXiv 2601.19280; code kishanpb/verl-gdro (beta 0.12, eta 0.65, gamma 0.01,
    hysteresis 0.03). Where we differ: the window is an exponential average of the same mean age, and the loss
    is of the outcome, not the surrogate's.
    """

    k: int
    seed: int = 0
    edges: tuple[float, ...] = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
    beta: float = 0.12
    eta: float = 0.65
    gamma: float = 0.01
    cap: float = 10.0
    window: int = 50
    hysteresis: float = 0.03
    calls: int = 0
    bins: Arms = field(init=False)
    scores: Floats = field(init=False)
    rate: Floats = field(init=False)
    seen: Floats = field(init=False)

    def __post_init__(self) -> None:
        for name in ("beta", "gamma"):
            in_range(name, getattr(self, name), 0, 1)
        in_range("window", self.window, 1, 10**6)
        if list(self.edges) != sorted(set(self.edges)) or not self.edges:
            raise UserError(f"edges of bins must rise, got {self.edges}")
        self.scores = np.zeros(len(self.edges) + 1)
        self.rate, self.seen = np.full(self.k, 0.5), np.zeros(self.k)
        self.bins = np.searchsorted(self.edges, self.rate, side="right").astype(np.int64)

    def omega(self) -> Floats:
        """Unnormalised weights of the bins [B]."""
        return np.exp(self.eta * np.clip(self.scores, -self.cap, self.cap))

    def q(self) -> Floats:
        """Probability of each bin [B], at least gamma/B."""
        w = self.omega()
        return (1 - self.gamma) * w / w.sum() + self.gamma / len(w)

    def weights(self) -> Floats:
        """Weight of each arm's advantages [K] where starts are drawn evenly."""
        return np.minimum(self.omega(), 15.0)[self.bins]

    def propose(self, n: int) -> Arms:
        rng = draws(self.seed, self.calls)
        self.calls += 1
        held = np.bincount(self.bins, minlength=len(self.scores))
        q = np.where(held > 0, self.q(), 0.0)
        p = (q / q.sum() / np.maximum(held, 1))[self.bins]
        return rng.choice(self.k, n, p=p / p.sum(), replace=n > self.k).astype(np.int64)

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        if not len(arms):
            return
        lost, made = counts(self.bins[arms], 1 - np.asarray(success, np.float64), 1.0, len(self.scores))
        played = made > 0
        self.scores[played] += self.beta * (lost[played] / made[played] - self.scores[played])
        s, n = counts(arms, success, 1.0, self.k)
        self.seen += n
        there = n > 0
        memory = np.minimum(self.seen, self.window)[there]
        keep = np.clip(1 - n[there] / memory, 0, 1)
        self.rate[there] = keep * self.rate[there] + (1 - keep) * s[there] / n[there]
        self.bins = rebinned(self.rate, self.bins, np.asarray(self.edges), self.hysteresis)

    def predict(self) -> Floats:
        return self.rate.copy()

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "bins", "scores", "rate", "seen"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "bins", "scores", "rate", "seen"), state)


@dataclass(slots=True)
class RuleReasoner:
    """Tasks in proportion to what they lack of a target success: the sampler of a run over several tasks.
    Arms are tasks.

        r_i <- (r_i + mean success of task i in this round) / 2
        v_i = max(0, target - r_i),     w = softmax((v + 0.1) / 0.8)          every `period` rounds

    Source: RuleReasoner, arXiv 2506.08672; code bigai-nlco/RuleReasoner. A task that a round did not play
    keeps its r.
    """

    k: int
    seed: int = 0
    target: float = 1.0
    period: int = 8
    calls: int = 0
    rounds: int = 0
    rate: Floats = field(init=False)
    known: Floats = field(init=False)
    weights: Floats = field(init=False)

    def __post_init__(self) -> None:
        in_range("target", self.target, 0, 1)
        in_range("period", self.period, 1, 10**6)
        self.rate, self.known = np.zeros(self.k), np.zeros(self.k)
        self.weights = np.full(self.k, 1 / self.k)

    def propose(self, n: int) -> Arms:
        rng = draws(self.seed, self.calls)
        self.calls += 1
        return rng.choice(self.k, n, p=self.weights).astype(np.int64)

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        s, n = counts(arms, success, 1.0, self.k)
        there = n > 0
        now = s[there] / n[there]
        self.rate[there] = np.where(self.known[there] > 0, (self.rate[there] + now) / 2, now)
        self.known += n
        self.rounds += 1
        if self.rounds % self.period == 0:
            self.weights = softmax((np.maximum(0.0, self.target - self.rate) + 0.1) / 0.8)

    def predict(self) -> Floats:
        return self.rate.copy()

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "rounds", "rate", "known", "weights"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "rounds", "rate", "known", "weights"), state)


# ---- MoDoMoDo: the result of a run as a quadratic function of its mixture ----------------------------------


def quadratic_terms(mixtures: Floats) -> Floats:
    """[M,D] -> [M, D + D(D+1)/2]: w_i, then w_i w_j for i <= j. No constant: on the simplex it is the sum of
    the w_i."""
    i, j = np.triu_indices(mixtures.shape[1])
    return np.concatenate([mixtures, mixtures[:, i] * mixtures[:, j]], 1)


def fit_mixtures(mixtures: Floats, scores: Floats, ridge: float = 1e-3) -> Floats:
    """Coefficients of MoDoMoDo's surrogate: the scores [M] of finished runs as a quadratic function of their
    mixtures [M,D].

    Least squares with `ridge` times the squared norm of the coefficients. Source: MoDoMoDo, arXiv 2505.24871
    (its model-based mixtures: a multivariate quadratic function); the ridge is ours.
    """
    x = quadratic_terms(np.asarray(mixtures, np.float64))
    return np.asarray(
        np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ np.asarray(scores, np.float64)),
        np.float64,
    )


def best_mixture(coefficients: Floats, tasks: int, steps: int = 2000) -> Floats:
    """The mixture [D] on the simplex with the greatest predicted score.

    Frank-Wolfe with exact line search from the centre and from every corner, the best of all: each step goes
    towards the corner of the greatest slope, so that it stays on the simplex.
    """
    i, j = np.triu_indices(tasks)
    linear, a = coefficients[:tasks], np.zeros((tasks, tasks))
    np.add.at(a, (i, j), coefficients[tasks:] / 2)
    np.add.at(a, (j, i), coefficients[tasks:] / 2)

    def score(w: Floats) -> float:
        return float(linear @ w + w @ a @ w)

    best = np.full(tasks, 1 / tasks)
    for start in [best, *np.eye(tasks)]:
        w = start.copy()
        for _ in range(steps):
            slope = linear + 2 * a @ w
            d = np.eye(tasks)[slope.argmax()] - w
            first, second = float(slope @ d), float(d @ a @ d)
            if first < 1e-10:
                break
            w = w + (1.0 if second >= 0 else min(1.0, -first / (2 * second))) * d
        best = max(best, w, key=score)
    return best
