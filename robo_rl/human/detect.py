"""Which robot is failing: FLOAT (optimal transport between a rollout and expert demonstrations) and cheap
alarms beside it.

FLOAT (ARMADA, arXiv 2510.02298). With phi the policy's embeddings of the rollout so far [P,F] and of the same
elapsed time of each demonstration [Q,F], C_ij = 1 - cos(phi_i, phi'_j), the index is the least over
demonstrations of <T, C>, T the entropic optimal transport between uniform marginals. Plain transport ignores
the order of time (a reversed rollout would cost 0), so T is 0 outside the band |i/P - j/Q| <= w. Here the
demonstrations are those whose lower bound

    <T, C> >= max( sum_i a_i min_j C_ij ,  sum_j b_j min_i C_ij )

is below the least value found: the minimum stays exact and few of them need the iteration.

Alarm. A score s(t) (any of them) raises one where it exceeds mu(t) + q sigma(t). mu and sigma are those of
one half of the successful calibration rollouts at elapsed time t, q the ceil((n+1)(1-alpha))-th smallest of
max_t (s - mu)/sigma over the n of the other half. A rollout that still runs when a share 1 - beta of all
successes was over is an alarm too: its time bin has no threshold to be below. At most a share alpha + beta of
successful rollouts ever raises one (split conformal prediction, Vovk et al. 2005; Papadopoulos 2008),
whatever the distribution; both are half of the rate asked for. Times are counted in checks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError, in_range
from robo_rl.human.lost import auroc_once_lost

BAND = 0.25
EPS = 0.02
FLOOR = 1e-6


# ------------------------------------------------------------ optimal transport


def cosine_cost(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """1 - cos [..., P, Q] of rows x [..., P, F] and y [..., Q, F]; a zero row is at distance 1 of
    everything."""
    x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)
    y = y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-9)
    return np.clip(1 - x @ np.swapaxes(y, -1, -2), 0, 2)


def band_mask(p: int, q: np.ndarray, width: int, w: float = BAND) -> np.ndarray:
    """bool[M,P,width]: |i/P - j/Q_m| <= w for j < Q_m, on bin centres; at least wide enough that a transport
    exists."""
    i, j = (np.arange(p) + 0.5) / p, (np.arange(width) + 0.5) / q[:, None]
    reach = np.maximum(w, 1.0 / np.minimum(p, q))[:, None, None]
    return (np.abs(i[None, :, None] - j[:, None, :]) <= reach) & (np.arange(width) < q[:, None])[:, None, :]


def sinkhorn(
    cost: np.ndarray,
    mask: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    eps: float = EPS,
    tol: float = 1e-3,
    most: int = 100,
) -> tuple[np.ndarray, np.ndarray]:
    """Transport plans [M,P,Q] inside `mask`, and their costs <T, C> [M], between marginals a [M,P] and b
    [M,Q].

    T = diag(u) K diag(v), K = exp(-C/eps) on the mask (Cuturi 2013), iterated until the row marginals are
    within `tol` in L1.
    """
    low = np.where(mask, cost, np.inf).min(-1, keepdims=True)
    # rows scaled to a largest entry of 1; u absorbs it
    kernel = np.where(mask, np.exp(-(cost - low) / eps), 0.0)
    flipped = np.ascontiguousarray(np.swapaxes(kernel, -1, -2))
    v = np.ones_like(b)
    for k in range(most):
        rows = (kernel @ v[..., None])[..., 0]
        u = a / np.maximum(rows, 1e-300)
        v = b / np.maximum((flipped @ u[..., None])[..., 0], 1e-300)
        if k % 10 == 9 and np.abs(u * (kernel @ v[..., None])[..., 0] - a).sum(-1).max() < tol:
            break
    plan = u[..., None] * kernel * v[..., None, :]
    return plan, (plan * cost).sum((-1, -2))


# ------------------------------------------------------------ FLOAT


@dataclass(frozen=True, slots=True)
class DemoEmbeddings:
    """Expert demonstrations as embeddings: points [M,Q,F] (centred, padded), lengths int[M], centre [F]."""

    points: np.ndarray
    lengths: np.ndarray
    centre: np.ndarray


def demo_embeddings(demos: Sequence[np.ndarray]) -> DemoEmbeddings:
    """`demos` [Q_m,F] each, at the rate of the checks; their mean is subtracted, so that cosines tell states
    apart."""
    if not demos:
        raise UserError("FLOAT needs at least one demonstration to compare with")
    centre = np.concatenate(demos).mean(0)
    lengths = np.array([len(d) for d in demos])
    points = np.zeros((len(demos), lengths.max(), len(centre)), np.float32)
    for m, d in enumerate(demos):
        points[m, : len(d)] = d - centre
    return DemoEmbeddings(points, lengths, centre)


@dataclass(frozen=True, slots=True)
class Match:
    """FLOAT's index of a rollout so far, the demonstration it is nearest to and what each point's transport
    costs [P]."""

    index: float
    demo: int
    matched: np.ndarray


def float_index(
    rollout: np.ndarray, ref: DemoEmbeddings, w: float = BAND, eps: float = EPS, at_once: int = 4
) -> Match:
    """FLOAT's index of the embeddings [P,F] of a rollout so far."""
    p = len(rollout)
    q = np.minimum(ref.lengths, p)  # the same elapsed time of each demonstration
    width = int(q.max())
    cost = cosine_cost((rollout - ref.centre).astype(np.float32)[None], ref.points[:, :width]).astype(
        np.float64
    )
    mask = band_mask(p, q, width, w)
    inside = np.where(mask, cost, np.inf)
    columns = np.where(np.arange(width) < q[:, None], inside.min(1), 0.0)
    bound = np.maximum(inside.min(2).mean(1), columns.sum(1) / q)
    best = Match(math.inf, -1, np.zeros(p))
    order = np.argsort(bound, kind="stable")
    for k in range(0, len(order), at_once):
        some = order[k : k + at_once]
        some = some[bound[some] < best.index]
        if not len(some):
            break
        b = np.where(np.arange(width) < q[some, None], 1 / q[some, None], 0.0)
        plan, value = sinkhorn(cost[some], mask[some], np.full((len(some), p), 1 / p), b, eps)
        m = int(np.argmin(value))
        if value[m] < best.index:
            best = Match(float(value[m]), int(some[m]), (plan[m] * cost[some[m]]).sum(1) * p)
    return best


def rewind_point(matched: np.ndarray, limit: np.ndarray, least: int = 1) -> int:
    """The latest point, at least `least` checks before the last, whose transport is within the `limit` of its
    time; else 0.
    """
    last = len(matched) - 1 - least
    at = np.minimum(np.arange(len(matched)), len(limit) - 1)
    fine = np.flatnonzero(matched[: max(0, last + 1)] <= limit[at][: max(0, last + 1)])
    return int(fine[-1]) if len(fine) else 0


# ------------------------------------------------------------ thresholds


@dataclass(frozen=True, slots=True)
class Threshold:
    """mu[t], sigma[t] of successful rollouts (beyond the last time they keep the last one's), q, and the last
    check at which a success may still be running.
    """

    mu: np.ndarray
    sigma: np.ndarray
    q: float
    last: int

    def at(self, t: np.ndarray | int) -> np.ndarray:
        """Threshold at check t; -inf after `last`."""
        k = np.minimum(t, len(self.mu) - 1)
        return np.where(np.asarray(t) > self.last, -np.inf, self.mu[k] + self.q * self.sigma[k])


def least_rollouts(alpha: float) -> int:
    """Successful rollouts that a false-alarm rate of `alpha` needs: two halves, the second with n >= 2/alpha
    - 1."""
    return 2 * math.ceil(2 / alpha - 1)


def calibrate(scores: Sequence[np.ndarray], alpha: float = 0.05, outlast: bool = True) -> Threshold:
    """Threshold from the scores [T_e] of successful rollouts, such that at most a share `alpha` of such
    rollouts alarms.

    outlast=False: the score alone, without the alarm for outlasting the successes. Raises UserError if there
    are too few of them for that rate.
    """
    in_range("the false-alarm rate", alpha, 0, 0.5, open_low=True)
    need = least_rollouts(alpha)
    if len(scores) < need:
        raise UserError(
            f"a false-alarm rate of {alpha:g} needs {need} successful rollouts to calibrate on, there are "
            f"{len(scores)}: collect more, or allow more false alarms"
        )
    shape, held = scores[::2], scores[1::2]
    mu, sigma = by_time(shape)
    worst = sorted(float(normalised(s, mu, sigma).max()) for s in held if len(s))
    if not outlast:
        return Threshold(mu, sigma, _conformal(worst, alpha), 1 << 30)
    lengths = sorted(len(s) for s in scores)
    return Threshold(mu, sigma, _conformal(worst, alpha / 2), int(_conformal(lengths, alpha / 2)) - 1)


def by_time(scores: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(mean, std) [t] of scores [T_e] at each check that enough of the rollouts reached."""
    table = np.full((len(scores), max(len(s) for s in scores)), np.nan)
    for row, s in zip(table, scores, strict=True):
        row[: len(s)] = s
    count = (~np.isnan(table)).sum(0)
    # later times have too few rollouts to speak of
    enough = max(1, int((count >= min(5, len(scores))).sum()))
    mu, sigma = np.nanmean(table[:, :enough], 0), np.nanstd(table[:, :enough], 0)
    return mu, np.maximum(sigma, max(FLOOR, 0.1 * float(sigma.mean())))


def normalised(scores: np.ndarray, mu: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """(s - mu) / sigma [T] of scores [T] by `by_time`, whose last time stands for those after it."""
    k = np.minimum(np.arange(len(scores)), len(mu) - 1)
    return (scores - mu[k]) / sigma[k]


def largest(*scores: np.ndarray) -> np.ndarray:
    """The largest [T] of several normalised scores [T] of a rollout: one of them is enough for an alarm."""
    return np.max(scores, 0)


def _conformal(ordered: list, alpha: float) -> float:
    """The ceil((n+1)(1-alpha))-th smallest of n."""
    return ordered[min(math.ceil((len(ordered) + 1) * (1 - alpha)), len(ordered)) - 1]


def first_alarm(scores: np.ndarray, threshold: Threshold) -> int:
    """The first check whose score is above the threshold; -1 if none."""
    above = np.flatnonzero(np.asarray(scores) > threshold.at(np.arange(len(scores))))
    return int(above[0]) if len(above) else -1


# ------------------------------------------------------------ cheap alarms, as scores: larger is worse


def stuck_score(points: np.ndarray, window: int = 5) -> np.ndarray:
    """-(distance moved in embedding space over the last `window` checks) [T]; 0 distance is the worst there
    is."""
    back = points[np.maximum(np.arange(len(points)) - window, 0)]
    moved = np.linalg.norm(points - back, axis=1)
    moved[:window] = np.inf if len(moved) > window else moved[:window]
    return -np.where(np.isfinite(moved), moved, moved[np.isfinite(moved)].max(initial=0.0))


def limit_score(actions: np.ndarray, window: int = 5, near: float = 0.98) -> np.ndarray:
    """Share of commands at their limit over the last `window` checks [T], from actions [T,A]."""
    at = (np.abs(actions) >= near).mean(1)
    total = np.cumsum(np.concatenate([[0.0], at]))
    t = np.arange(len(at))
    first = np.maximum(t + 1 - window, 0)
    return (total[t + 1] - total[first]) / (t + 1 - first)


def drop_score(values: np.ndarray) -> np.ndarray:
    """How far a critic's value lies below its best so far [T]."""
    return np.maximum.accumulate(values) - values


def spread_score(samples: np.ndarray) -> np.ndarray:
    """Uncertainty: RMS spread [T] of several sampled chunks [T,K,D] of the policy at the same observation."""
    return np.sqrt(samples.var(1).mean(1))


def far_score(points: np.ndarray, demos: Sequence[np.ndarray]) -> np.ndarray:
    """Distance [T] of embeddings [T,F] to the nearest one of any demonstration [Q,F], at whatever time."""
    every = np.concatenate(list(demos))
    square = (points**2).sum(1)[:, None] - 2 * points @ every.T + (every**2).sum(1)
    return np.sqrt(np.maximum(square.min(1), 0.0))


def late_score(length: int) -> np.ndarray:
    """Elapsed time alone [T]: what any detector must beat."""
    return np.arange(length, dtype=float)


def auroc_while_running(scores: Sequence[np.ndarray], failed: Sequence[bool]) -> float:
    """Share of pairs of a failure and a success, both still running at the same check, in which the failure
    has the larger score (a tie counts half): what a score knows beside the time, for elapsed time has 0.5.
    NaN without such a pair."""
    return auroc_once_lost(scores, [0 if f else None for f in failed])


# ------------------------------------------------------------ with a policy


def embed(policy, obs: dict, at_once: int = 4096) -> np.ndarray:
    """The policy's embeddings float32[B,F] of observations [B,...] as an env gives them."""
    import torch

    from robo_rl.policies import obs_tensors

    with torch.no_grad():
        return np.concatenate(
            [
                policy.encode(
                    obs_tensors({key: v[k : k + at_once] for key, v in obs.items()}, policy.spec)
                ).pooled.numpy()
                for k in range(0, len(obs["state"]), at_once)
            ]
        )


def embed_episodes(env, policy, starts: Sequence[int], seed: int = 0) -> list[tuple[np.ndarray, bool]]:
    """One episode per start, without help -> (embeddings [T,F] before each decision, success)."""
    import torch

    from robo_rl.policies import obs_tensors
    from robo_rl.rollout import run_chunk

    n, out, generator = env.num_envs, [], torch.Generator().manual_seed(seed)
    for k in range(0, len(starts), n):
        some = np.resize(np.asarray(starts[k : k + n], np.int64), n)
        raw, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": some})
        rows, over, won, length = [], np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, int)
        while not over.all():
            rows.append(embed(policy, raw))
            length += ~over
            with torch.no_grad():
                actions = policy.act(obs_tensors(raw, policy.spec), generator, explore=False).actions.numpy()
            raw, _, _, terminated, truncated, ok, _ = run_chunk(env, actions, 1.0)
            over, won = np.asarray(terminated | truncated), won | ok
        out += [
            (np.stack([r[i] for r in rows[: length[i]]]), bool(won[i]))
            for i in range(min(n, len(starts) - k))
        ]
    return out


# ------------------------------------------------------------ live


class FailureMonitor:
    """FLOAT on N running robots: `see` their embeddings at every check, `alarms` says who fails and where to
    go back to.

    threshold: of the index; limit[t]: of what one point's transport may cost, for the rewind point.
    """

    def __init__(self, ref: DemoEmbeddings, threshold: Threshold, limit: np.ndarray, num_envs: int):
        self.ref, self.threshold, self.limit = ref, threshold, limit
        self.points: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self.match: list[Match | None] = [None] * num_envs

    def begin(self, i: int, keep: int = 0) -> None:
        """Robot `i` starts anew, or goes back to its first `keep` checks."""
        del self.points[i][keep:]
        self.match[i] = None

    def check(self, i: int, point: np.ndarray) -> float:
        """One check of robot `i` at embedding [F] -> index over threshold (an alarm where > 1)."""
        self.points[i].append(point)
        self.match[i] = match = float_index(np.stack(self.points[i]), self.ref)
        limit = float(self.threshold.at(len(self.points[i]) - 1))
        return math.inf if limit == -math.inf else match.index / max(limit, FLOOR)

    def rewind_to(self, i: int) -> int:
        """The check to go back to."""
        match = self.match[i]
        return 0 if match is None else rewind_point(match.matched, self.limit)
