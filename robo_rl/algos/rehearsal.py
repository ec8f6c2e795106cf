"""What the first policy could do is not forgotten: a divergence from it on its own successes, beside the loss
of a ratio method.

    loss + c mean f(u),  u = pi(a|s) / pi_first(a|s)       c = rl.rehearse, f = rl.rehearse_kind

(`losses.rehearsal`).
Before RL the first policy plays episodes, with the noise of RL; the decisions of those that succeeded are
kept, with the log-probs that they were made with. No second policy is needed. Forward KL, Jensen-Shannon and
alpha divergences cover the mass of the first policy where a KL to it would let go of its rarer ways. DPH-RL,
arXiv 2509.07430; code seamoke/DPH-RL (c 0.01 to 0.05 of forward_kl, 0.05 to 0.2 of js). Where we differ: the
paper keeps whole tasks that were mastered and lets RL have the others alone; starts are drawn anew here, so
that RL has all of them, and what is kept are the episodes that succeeded.
"""

import torch
from torch import Tensor

from robo_rl import losses
from robo_rl.algos.credit import density_scale, pick
from robo_rl.devices import device_of
from robo_rl.policies.context import PREFIX
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, Obs
from robo_rl.rollout import Rollout

ROWS = 256  # of a minibatch, at most


def kept_rows(r: Rollout, episodes: int) -> dict[str, Tensor]:
    """Decisions of the successes among the first `episodes` of a rollout of whole episodes: {obs/<name>,
    trace/<name>, logp} [B,...]."""
    assert r.success is not None
    live = r.mask & r.success & (torch.arange(r.mask.shape[1], device=r.mask.device) < episodes)
    trace = {k: v for k, v in r.trace.items() if k.split("/")[0] != PREFIX}
    return {
        name: v[live]
        for name, v in [
            *((f"obs/{k}", v) for k, v in r.obs.items()),
            *((f"trace/{k}", v) for k, v in trace.items()),
            ("logp", r.logp),
        ]
    }


class Rehearsal:
    """Samples of the first policy and the divergence on them; `crc`: of the file that holds them."""

    def __init__(self, columns: dict[str, Tensor], kind: str, crc: int = 0):
        self.kind, self.crc, self.logp = kind, crc, columns["logp"]
        self.obs, self.trace = (
            {k[len(p) :]: v for k, v in columns.items() if k.startswith(p)} for p in ("obs/", "trace/")
        )

    def __len__(self) -> int:
        return len(self.logp)

    def loss(self, policy: "ChainPolicy | GaussianPolicy", rows: int, generator: torch.Generator) -> Tensor:
        """Divergence on `rows` samples, drawn with replacement, ROWS at most."""
        chosen = torch.randint(len(self.logp), (min(rows, ROWS),), generator=generator)
        device = device_of(policy)

        def at(columns: Obs) -> Obs:
            return {k: v.to(device) for k, v in pick(columns, chosen).items()}

        scale = density_scale(policy)
        logp = policy.score(policy.encode(at(self.obs)), at(self.trace))[0].sum(-1)
        return losses.rehearsal(scale * logp, scale * self.logp[chosen].to(device).sum(-1), self.kind)
