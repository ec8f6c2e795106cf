"""Which start or task to play next: small states over K arms.

An arm is whatever can be asked for again: a start of a pool, a place along a demonstration, a task. Every
sampler has

    propose(n)                     -> the next n arms [n] int64, distinct while there are n different ones
    observe(arms, success, age=0)  one round: outcomes [m] in [0, 1] of episodes on `arms` [m]; `age` [m]
                                   counts the versions of the weights since each was played, and its evidence
                                   is discounted by the sampler's own decay
    predict()                      -> probability of success of each arm [K]
    state_dict(), load_state_dict(state)   everything that decides what is proposed next

A sampler has no generator: call c of a sampler draws from (seed, c) alone, so a resumed run proposes the same
arms.
What the methods have in common: an episode teaches most where success is uncertain, for the variance of a
binary outcome, and with it the expected squared group advantage, is p (1 - p).
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from robo_rl.errors import in_range

Floats = NDArray[np.float64]
Arms = NDArray[np.int64]


def learnability(p: Floats) -> Floats:
    """p (1 - p): SFL's score of an arm, the variance of its outcome (Rutherford et al. 2024, arXiv
    2408.15099)."""
    return p * (1 - p)


def counts(arms: Arms, success: Floats, weight: "Floats | float", k: int) -> tuple[Floats, Floats]:
    """Weighted successes and episodes of each of k arms -> (s[k], n[k])."""
    w = np.broadcast_to(np.asarray(weight, np.float64), np.shape(arms))
    return np.bincount(arms, w * success, k).astype(np.float64), np.bincount(arms, w, k).astype(np.float64)


def largest(score: Floats, n: int, noise: Floats) -> Arms:
    """The n arms with the greatest score; equal ones in the order of `noise` [K]. Of fewer than n arms all,
    then anew."""
    order = np.lexsort((noise, -score))
    return np.resize(order, n).astype(np.int64)


def draws(seed: int, call: int) -> np.random.Generator:
    """The generator of one call: of (seed, call) alone."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, call], np.uint64)))


def state_of(sampler: object, names: tuple[str, ...]) -> dict:
    """The named attributes; arrays are copied."""
    return {name: np.copy(v) if isinstance(v := getattr(sampler, name), np.ndarray) else v for name in names}


def restore(sampler: object, names: tuple[str, ...], state: dict) -> None:
    """Set the named attributes from `state_of`; an array must have the shape of the one it replaces."""
    for name in names:
        old, new = getattr(sampler, name), state[name]
        if isinstance(old, np.ndarray) and name not in ("buffer", "queue") and np.shape(new) != old.shape:
            raise ValueError(
                f"the saved sampler has {name} of shape {np.shape(new)}, this one has {old.shape}: "
                "the number of starts must not change"
            )
        setattr(sampler, name, np.copy(new) if isinstance(old, np.ndarray) else new)


@dataclass(slots=True)
class RoundRobin:
    """Uniform over arms: every one equally often, in permutations of all, one after another."""

    k: int
    seed: int = 0
    calls: int = 0
    queue: Arms = field(default_factory=lambda: np.zeros(0, np.int64))
    success: Floats = field(init=False)
    episodes: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.success, self.episodes = np.zeros(self.k), np.zeros(self.k)

    def propose(self, n: int) -> Arms:
        while len(self.queue) < n:
            self.queue = np.concatenate([self.queue, draws(self.seed, self.calls).permutation(self.k)])
            self.calls += 1
        out, self.queue = self.queue[:n], self.queue[n:]
        return out

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        s, n = counts(arms, success, 1.0, self.k)
        self.success += s
        self.episodes += n

    def predict(self) -> Floats:
        return (self.success + 1) / (self.episodes + 2)

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "queue", "success", "episodes"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "queue", "success", "episodes"), state)


def information_gain(p: Floats) -> Floats:
    """VADE's score p (1 - p)^2, largest at p = 1/3: uncertain, and rather hard than easy."""
    return p * (1 - p) ** 2


@dataclass(slots=True)
class Vade:
    """A Beta posterior for each arm, drawn from, scored by `information_gain`, the best n taken.

        p ~ Beta(a + 1, b + 1),   I = p (1 - p)^2
        played:       a <- l1 a + s,   b <- l1 b + (n - s)
        not played:   a <- l2 a,       b <- l2 b           its mean a/(a+b) stays, its spread grows

    Source: VADE, arXiv 2511.18902, whose figure gives l1 = 0.2 and l2 = 0.999.
    """

    k: int
    seed: int = 0
    l1: float = 0.2
    l2: float = 0.999
    calls: int = 0
    a: Floats = field(init=False)
    b: Floats = field(init=False)

    def __post_init__(self) -> None:
        in_range("l1", self.l1, 0, 1)
        in_range("l2", self.l2, 0, 1)
        self.a, self.b = np.zeros(self.k), np.zeros(self.k)

    def propose(self, n: int) -> Arms:
        rng = draws(self.seed, self.calls)
        self.calls += 1
        return largest(information_gain(rng.beta(self.a + 1, self.b + 1)), n, rng.random(self.k))

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        s, n = counts(arms, success, self.l1 ** np.asarray(age, np.float64), self.k)
        keep = np.where(n > 0, self.l1, self.l2)
        self.a, self.b = keep * self.a + s, keep * self.b + n - s

    def predict(self) -> Floats:
        return (self.a + 1) / (self.a + self.b + 2)

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "a", "b"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "a", "b"), state)


@dataclass(slots=True)
class Mopps:
    """A discounted Beta posterior for each arm; of a random pool the arms whose draw is nearest to `target`.

        a <- lam a + (1 - lam) a0 + s,     b <- lam b + (1 - lam) b0 + n - s       of arms that were played
        p ~ Beta(a, b);   of `pool` n arms drawn without return the n with the least |p - target|

    lam = 1 is exact conjugacy; lam = 0 keeps the prior and the last outcomes. The pool is what keeps the
    choice broad.
    Source: MoPPS, arXiv 2507.04632; code thu-rllab/MoPPS (prior Beta(1, 1), pool 8, target 0.5).
    """

    k: int
    seed: int = 0
    lam: float = 0.5
    pool: int = 8
    target: float = 0.5
    prior: tuple[float, float] = (1.0, 1.0)
    calls: int = 0
    a: Floats = field(init=False)
    b: Floats = field(init=False)

    def __post_init__(self) -> None:
        in_range("lam", self.lam, 0, 1)
        in_range("pool", self.pool, 1, 10**6)
        in_range("target", self.target, 0, 1)
        self.a, self.b = np.full(self.k, self.prior[0]), np.full(self.k, self.prior[1])

    def propose(self, n: int) -> Arms:
        rng = draws(self.seed, self.calls)
        self.calls += 1
        p, noise = rng.beta(self.a, self.b), rng.random(self.k)
        candidates = rng.choice(self.k, min(self.k, self.pool * n), replace=False)
        score = np.full(self.k, -np.inf)
        score[candidates] = -np.abs(p[candidates] - self.target)
        return np.resize(largest(score, min(n, len(candidates)), noise), n)

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        s, n = counts(arms, success, self.lam ** np.asarray(age, np.float64), self.k)
        a0, b0 = self.prior
        self.a = np.where(n > 0, self.lam * self.a + (1 - self.lam) * a0 + s, self.a)
        self.b = np.where(n > 0, self.lam * self.b + (1 - self.lam) * b0 + n - s, self.b)

    def predict(self) -> Floats:
        return self.a / (self.a + self.b)

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "a", "b"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "a", "b"), state)


FAIL, PARTIAL, SOLVED = range(3)


@dataclass(slots=True)
class Dps:
    """A hidden Markov model of learning for each arm: all episodes of a round fail, some succeed, all
    succeed.

        P = A / (column sums of A)           expected transitions, column = from, row = to
        predicted = P belief                 the n arms with the greatest predicted[partial] are played
        played:      belief' = one-hot of the class seen,  A <- lam A + (1 - lam) A0 + xi,
                     xi = belief' belief^T * P, divided by its sum
        not played:  belief' = predicted,                  A <- lam A + (1 - lam) A0

    A round of one episode is never partial, so every arm must be played at least twice a round (`repeats`).
    Source: DPS, arXiv 2603.10887; code maoyixiu/DPS (Dirichlet prior 1). The default of lam is ours.
    """

    k: int
    seed: int = 0
    lam: float = 0.9
    calls: int = 0
    belief: Floats = field(init=False)  # [K,3]
    a: Floats = field(init=False)  # [K,3,3] counts of transitions: to, from

    def __post_init__(self) -> None:
        in_range("lam", self.lam, 0, 1)
        self.belief, self.a = np.full((self.k, 3), 1 / 3), np.ones((self.k, 3, 3))

    def transitions(self) -> Floats:
        """P[K, to, from]; its columns sum to 1."""
        return self.a / self.a.sum(1, keepdims=True)

    def predicted(self) -> Floats:
        """Belief before the next round [K,3]."""
        return (self.transitions() @ self.belief[:, :, None])[:, :, 0]

    def propose(self, n: int) -> Arms:
        rng = draws(self.seed, self.calls)
        self.calls += 1
        return largest(self.predicted()[:, PARTIAL], n, rng.random(self.k))

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        """`success` [m] is 0 or 1; a round with age counts as lam^age transitions."""
        s, n = counts(arms, success, 1.0, self.k)
        fresh = counts(arms, np.ones(len(arms)), self.lam ** np.asarray(age, np.float64), self.k)[1]
        seen = n > 0
        kind = np.where(s <= 0, FAIL, np.where(s >= n, SOLVED, PARTIAL))
        p, now = self.transitions(), self.predicted()
        now[seen] = np.eye(3)[kind[seen]]
        xi = now[:, :, None] * self.belief[:, None, :] * p
        xi *= (np.divide(fresh, n, out=np.zeros(self.k), where=seen) / xi.sum((1, 2)))[:, None, None]
        self.a = self.lam * self.a + (1 - self.lam) + xi
        self.belief = now

    def predict(self) -> Floats:
        return self.predicted() @ np.array([0.0, 0.5, 1.0])

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "belief", "a"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "belief", "a"), state)


@dataclass(slots=True)
class Measured:
    """Arms that are played `tries` times each to be measured. Plays that were proposed and not seen yet are
    proposed again."""

    k: int
    tries: int
    success: Floats = field(init=False)
    episodes: Floats = field(init=False)  # -1: not to be measured

    def __post_init__(self) -> None:
        self.success, self.episodes = np.zeros(self.k), np.full(self.k, -1.0)

    def begin(self, arms: Arms) -> None:
        """Measure `arms`, forgetting what was measured before."""
        self.success, self.episodes = np.zeros(self.k), np.full(self.k, -1.0)
        self.episodes[arms] = 0

    def missing(self) -> Arms:
        """The plays that are still to be seen, an arm as often as it lacks."""
        lacks = np.where(self.episodes >= 0, self.tries - self.episodes, 0).astype(np.int64)
        return np.repeat(np.arange(self.k), lacks)

    def add(self, arms: Arms, success: Floats) -> None:
        """Outcomes of arms that are being measured, until each has its `tries`; later ones are not
        counted."""
        for arm, s in zip(arms, success, strict=True):
            if 0 <= self.episodes[arm] < self.tries:
                self.success[arm] += s
                self.episodes[arm] += 1

    def done(self) -> Arms:
        """The arms that have all their tries."""
        return np.flatnonzero(self.episodes >= self.tries)

    def rates(self, arms: Arms) -> Floats:
        return self.success[arms] / np.maximum(self.episodes[arms], 1)

    def state_dict(self) -> dict:
        return state_of(self, ("success", "episodes"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("success", "episodes"), state)


@dataclass(slots=True)
class Sfl:
    """Sampling for learnability: measure random arms, keep the most learnable, play them in a share of the
    episodes.

    Every `period` rounds `candidates` random arms are played `tries` times each; the `keep` with the greatest
    p (1 - p) + 0.001 p make the buffer. Arms that always fail or always succeed never enter it. From then on
    a share `rho` of the arms is drawn from the buffer, the rest from all.

    Source: Rutherford et al. 2024, arXiv 2408.15099, algorithm 1; tie-break and rho = 0.5 as in Kinetix,
    FLAIROx/Kinetix `experiments/sfl.py`. Where we differ: the episodes that measure are trained on too.
    """

    k: int
    seed: int = 0
    candidates: int = 256
    tries: int = 4
    keep: int = 64
    period: int = 16
    rho: float = 0.5
    calls: int = 0
    rounds: int = field(init=False)  # since a measurement was complete
    buffer: Arms = field(default_factory=lambda: np.zeros(0, np.int64))
    measured: Measured = field(init=False)
    success: Floats = field(init=False)
    episodes: Floats = field(init=False)

    def __post_init__(self) -> None:
        in_range("rho", self.rho, 0, 1)
        in_range("tries", self.tries, 2, 10**4)
        in_range("keep", self.keep, 1, 10**9)
        in_range("period", self.period, 1, 10**9)
        self.measured, self.rounds = Measured(self.k, self.tries), self.period
        self.success, self.episodes = np.zeros(self.k), np.zeros(self.k)

    def propose(self, n: int) -> Arms:
        rng = draws(self.seed, self.calls)
        self.calls += 1
        if self.rounds >= self.period:
            self.measured.begin(rng.choice(self.k, min(self.k, self.candidates), replace=False))
            self.rounds = 0
        first = rng.permutation(self.measured.missing())[:n]
        rest = n - len(first)
        learnable = rng.random(rest) < self.rho if len(self.buffer) else np.zeros(rest, bool)
        more = rng.integers(0, self.k, rest)
        if learnable.any():
            more[learnable] = rng.choice(self.buffer, int(learnable.sum()))
        return np.concatenate([first, more])

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        s, n = counts(arms, success, 1.0, self.k)
        self.success, self.episodes = 0.5 * self.success + s, 0.5 * self.episodes + n
        self.measured.add(arms, success)
        self.rounds += not len(self.measured.missing())
        if self.rounds == 1:
            self.fill()

    def fill(self) -> None:
        """The most learnable of the measured arms make the buffer; the old one stays where nothing is
        learnable."""
        done = self.measured.done()
        p = self.measured.rates(done)
        learnable = learnability(p) > 0
        if learnable.any():
            order = np.argsort(-(learnability(p) + 0.001 * p)[learnable], kind="stable")
            self.buffer = done[learnable][order[: self.keep]]

    def predict(self) -> Floats:
        return (self.success + 1) / (self.episodes + 2)

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "rounds", "buffer", "success", "episodes")) | {
            "measured": self.measured.state_dict()
        }

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "rounds", "buffer", "success", "episodes"), state)
        self.measured.load_state_dict(state["measured"])
