"""What on-policy methods use again: groups of rollouts, batches of the policy before, demonstrations, verdicts. And when to stop that.

    RolloutReplay   half of a batch fresh, half from a queue, with the log-probs of who acted     DOTS+RR (arXiv 2506.05316)
    remix_*         the clip centred on the policy before, two KLs, and an end to all of it       ReMix (arXiv 2507.06892)
    pear_*          the supervised stage weighted towards what the policy will do                 PEAR (arXiv 2602.01058)
    spark_*         every finished rollout and its verdict also teach the policy to judge         SPARK (arXiv 2509.22624)
    EssGuard        an alarm and a smaller bound on staleness once samples stop counting          ours

Log-probs are float32 sums per decision. Weights carry no gradient.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robo_rl.errors import in_range
from robo_rl.losses import MAX_LOG_RATIO
from robo_rl.noise import mix

# ---- rollout replay --------------------------------------------------------------------------------------------------

class RolloutReplay:
    """A first-in-first-out queue of groups; a batch is a share of fresh groups and the rest drawn evenly from the queue.

    A group is whatever the caller makes of one: it is returned as it was given, so its log-probs and versions are bit for bit those of
    who acted, and a correction of stale data is the learner's affair. Draw i follows from (seed, i) alone.
    """

    def __init__(self, capacity: int = 512, fresh: float = 0.5, most_age: int = 16, seed: int = 0):
        in_range("fresh", fresh, 0, 1, open_low=True)
        in_range("capacity", capacity, 1, 10**7)
        self.groups: deque = deque(maxlen=capacity)
        self.fresh, self.most_age, self.seed, self.draws = fresh, most_age, seed, 0

    def fresh_of(self, batch: int) -> int:
        """Fresh groups in a batch of `batch`; the rest is what the queue has, so at first a batch is smaller."""
        return max(1, round(self.fresh * batch))

    def compose(self, fresh: Sequence, version: int, batch: int) -> list:
        """`fresh` groups (all of them), then distinct old ones up to `batch`, none older than `most_age`; the fresh ones join the queue."""
        old = [g for g, v in self.groups if version - v <= self.most_age]
        wanted = min(max(0, batch - len(fresh)), len(old))
        rng = np.random.default_rng(mix(self.seed, 31, self.draws))
        chosen = [old[i] for i in rng.permutation(len(old))[:wanted]]
        self.draws += 1
        self.groups.extend((g, version) for g in fresh)
        return [*fresh, *chosen]

    def state_dict(self) -> dict:
        return {"groups": [[g, v] for g, v in self.groups], "draws": self.draws}

    def load_state_dict(self, state: dict) -> None:
        self.groups.clear()
        self.groups.extend((g, v) for g, v in state["groups"])
        self.draws = state["draws"]


# ---- ReMix -----------------------------------------------------------------------------------------------------------

def remix_loss(logp: Tensor, logp_behave: Tensor, logp_before: Tensor, adv: Tensor, clip: float = 0.2) -> Tensor:
    """-mean min(r A, clip(r, c - e, c + e) A), r = pi/pi_{k-i}, c = pi_k/pi_{k-i} (ReMix, mix-PPG); all arguments [B].

    logp_behave: of pi_{k-i}, who acted; logp_before: of pi_k, the policy at the beginning of the update. For i = 0 c is 1 and this is
    PPO's loss. For A < 0 and c < e the lower end of the band is below 0 and binds never, as in the paper.
    """
    r = (logp - logp_behave).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    centre = (logp_before - logp_behave).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    held = torch.maximum(torch.minimum(r, centre + clip), centre - clip)
    return -torch.minimum(r * adv, held * adv).mean()


def remix_share(step: int) -> float:
    """lam of lam KL(pi || base) + (1 - lam) KL(pi || pi_{k-1}): max(1 - 0.1 ceil(max(step - 50, 0)/10), 0.5)."""
    return max(1 - 0.1 * -(-max(step - 50, 0) // 10), 0.5)


def remix_kl(kl_base: Tensor, kl_before: Tensor, step: int) -> Tensor:
    """ReMix's convex combination of two KLs [..] at an optimizer step."""
    lam = remix_share(step)
    return lam * kl_base + (1 - lam) * kl_before


@dataclass(slots=True)
class ReMix:
    """When old batches are mixed in, and the one time at which the base policy becomes the present one (reincarnation).

    Until step `until` a batch is of policy k - i, i in 1..window, with probability p, and is learnt from `utd` times; from then on all is
    on-policy, once each.
    """

    p: float = 0.4
    window: int = 2
    utd: int = 2
    until: int = 50
    seed: int = 0
    reincarnated: bool = False

    def lag(self, step: int) -> int:
        """i of the batch of `step`: 0 is the present policy's."""
        if step >= self.until:
            return 0
        u = mix(self.seed, 41, step) / 2**63
        return 1 + int(u / self.p * self.window) if u < self.p else 0

    def updates(self, step: int) -> int:
        """Times that a batch is learnt from."""
        return self.utd if step < self.until else 1

    def reincarnate(self, step: int) -> bool:
        """Whether the base policy becomes the present one before this step: once."""
        now = step >= self.until and not self.reincarnated
        self.reincarnated |= now
        return now


# ---- PEAR ------------------------------------------------------------------------------------------------------------

def pear_weights(logp: Tensor, logp_demo: Tensor, mask: Tensor, kind: str = "suffix", gamma: float = 0.999, low: float = -0.08,
                 high: float = 0.3, bounds: tuple[float, float] = (0.1, 10.0)) -> Tensor:
    """Weights [T,N] of demonstrated decisions under the policy `logp` [T,N] and whoever showed them, `logp_demo` [T,N].

        d_t = clip(logp - logp_demo, low, high)
        sequence: exp(sum_t d_t) for all of an episode          suffix: gamma^(T-t) exp(sum_{j>t} d_j)

    T is the last decision in `mask` [T,N] of each episode; weights lie in `bounds`, 0 outside the mask. A chunk is a block.
    """
    if kind not in ("suffix", "sequence"):
        raise ValueError(f"kind must be suffix or sequence, got {kind!r}")
    d = torch.where(mask, (logp - logp_demo).detach().float().clamp(low, high), 0.0)
    total = d.sum(0)
    if kind == "sequence":
        w = total.exp().expand_as(d)
    else:
        left = mask.flip(0).cumsum(0).flip(0) - 1  # decisions that follow
        w = gamma**left.clamp(min=0) * (total - d.cumsum(0)).exp()
    return torch.where(mask, w.clamp(*bounds), 0.0)


def pear_loss(loss: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """sum(G_t loss_t)/(decisions in mask): of equal policies and gamma 1 the plain supervised loss."""
    return (weights.detach() * torch.where(mask, loss, 0.0)).sum() / mask.sum().clamp(min=1)


# ---- SPARK -----------------------------------------------------------------------------------------------------------

def spark_pairs(success: Tensor, group: Tensor) -> Tensor:
    """All pairs (won, lost) of the same group, int64 [P,2], from `success` bool[N] and `group` int[N]."""
    won, lost = success.nonzero().squeeze(1), (~success).nonzero().squeeze(1)
    pairs = torch.cartesian_prod(won, lost).view(-1, 2)
    return pairs[group[pairs[:, 0]] == group[pairs[:, 1]]]


def spark_loss(judgement: Tensor, success: Tensor, group: Tensor, pairwise: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Judging as a by-product of rollouts: cross-entropy of `judgement` [N] (logits) with the verdicts, and Bradley-Terry on pairs.

        -mean[y log s(z) + (1 - y) log(1 - s(z))]  -  pairwise mean over (won, lost) of log s(z_won - z_lost)

    SPARK recycles rollouts and their correctness to train the policy itself as a reward model, in words (its third kind, reflection on a
    wrong answer, has no counterpart here). A robot's policy judges by a head on its own features.
    """
    y = success.to(judgement.dtype)
    point = torch.nn.functional.binary_cross_entropy_with_logits(judgement, y)
    pairs = spark_pairs(success, group)
    ahead = judgement[pairs[:, 0]] - judgement[pairs[:, 1]]
    rank = -torch.nn.functional.logsigmoid(ahead).mean() if len(pairs) else judgement.sum() * 0
    return point + pairwise * rank, {"judge_point": point.detach(), "judge_rank": rank.detach(),
                                     "judge_pairs": torch.tensor(len(pairs))}


# ---- when to stop ----------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class EssGuard:
    """Steps the bound on staleness down by one once the effective sample size per sample stays below `least` for `patience` updates.

    Never below `floor`; after a step it counts anew. An update without stale data has nothing to say and ends the count.
    """

    least: float = 0.1
    patience: int = 10
    floor: int = 1
    low: int = 0  # updates in a row

    def observe(self, ess_frac: float | None, staleness: int) -> int:
        """The bound that holds from now on; `ess_frac` of the last update's weights, None where none was stale."""
        self.low = self.low + 1 if ess_frac is not None and not ess_frac >= self.least else 0
        if self.low < self.patience:
            return staleness
        self.low = 0
        return max(self.floor, staleness - 1) if staleness > self.floor else staleness

    def state_dict(self) -> dict:
        return {"low": self.low}

    def load_state_dict(self, state: dict) -> None:
        self.low = int(state["low"])
