"""A vision-language-action model that gives all actions in one pass, as a policy: OpenVLA-OFT under
supervision, PPO and groups.

    tokens:  log p = log softmax(logits of the bins)_bin            of every executed number by itself
             (`factors` = E A)
    l1:      log p = sum of -|x - mean| / b - log(2 b)              over the executed numbers, b learned
             (`factors` = 1)

The l1 head has no density of its own. A Laplace distribution around it has the L1 loss as its negative
log-likelihood, so RL begins where supervision ended; its spread is of the policy, and evaluation takes the
mean (of bins: the likeliest).
Axes: B rows, H steps, E executed, W numbers of a step of the model, of which the env has the first A.
"""

import math

import torch
from torch import Tensor, nn

from robo_rl.options import PolicyOptions
from robo_rl.policies.context import Context
from robo_rl.policies.protocol import Chunk, Obs, ObsSpec
from robo_rl.policies.vla.openvla import Filler, OpenVlaConfig, OpenVlaTrunk, filled
from robo_rl.policies.vla.policy import VlaBase
from robo_rl.sampling import Noise, randn


class FillerHead(nn.Module):
    """The language model of a policy, under the name that the other models have their expert under."""

    def __init__(self, expert: nn.Module):
        super().__init__()
        assert isinstance(expert, Filler)
        self.expert = expert


class OneStepPolicy(VlaBase):
    """See the module."""

    trunk: OpenVlaTrunk
    centres: Tensor
    low = ("trunk", "head")  # what `--policy.dtype` is of

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        self.head = FillerHead(self.expert)
        del self.expert  # it is the head's
        assert isinstance(self.config, OpenVlaConfig)
        self.bins = self.config.bins if self.config.head == "tokens" else 0
        self.factors = options.execute * spec.action if self.bins else 1
        if self.bins:
            edges = torch.linspace(-1, 1, self.bins, dtype=torch.float64)
            # the last bin is the end itself
            centres = torch.cat([(edges[:-1] + edges[1:]) / 2, (edges[-2:-1] + edges[-1:]) / 2])
            self.register_buffer("centres", centres.float(), persistent=False)
        else:
            self.log_scale = nn.Parameter(
                torch.full((options.horizon, self.width), math.log(options.init_std / math.sqrt(2)))
            )

    @property
    def noise_scale(self) -> float:
        """Temperature of the softmax, or the mean std of the Laplace (normalised action units)."""
        return 1.0 if self.bins else float(self.log_scale.detach().exp().mean()) * math.sqrt(2)

    # ---- the contract

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        out = self._out(self.encode(obs))
        shape = (len(out), self.options.horizon, self.width)
        if not explore:
            x = self.centres[out.argmax(-1)] if self.bins else out
            return Chunk(self.commands(x), x, x.new_empty(len(x), 0), {})
        # uniform
        draws = torch.special.ndtr(randn(generator, len(out), self.chunk).to(out.device)).view(shape)
        if self.bins:
            index = (out.softmax(-1).cumsum(-1) < draws[..., None]).sum(-1).clamp(max=self.bins - 1)
            x = self.centres[index]
            return Chunk(self.commands(x), x, self._bin_logp(out, index)[0], {"tokens": index})
        side = draws.clamp(1e-6, 1 - 1e-6) - 0.5
        x = torch.where(
            self._executed(), out - self.log_scale.exp() * side.sign() * torch.log1p(-2 * side.abs()), out
        )
        return Chunk(self.commands(x), x, self._laplace_logp(out, x)[0], {"x_next": x.flatten(1)[:, None]})

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Context of B rows, trace -> logp [B,F] and the mean entropy per executed number, a scalar."""
        out = self._out(context)
        if self.bins:
            return self._bin_logp(out, trace["tokens"])
        return self._laplace_logp(out, trace["x_next"].view(out.shape))

    def bc_loss(
        self, obs: Obs, chunk: Tensor, mask: Tensor, generator: torch.Generator, noises: int = 1
    ) -> Tensor:
        """Cross-entropy of the bins, or the absolute error, of demonstrated chunks [B,H,A] in the env's units
        where mask [B,H] is 1; the scale is left to RL. Nothing is drawn."""
        out, want = self._out(self.encode(obs))[:, :, : self.spec.action], self.action_norm(chunk)
        if self.bins:
            index = (
                torch.bucketize(
                    want.clamp(-1, 1), torch.linspace(-1, 1, self.bins, device=want.device), right=True
                )
                - 1
            )
            err = nn.functional.cross_entropy(out.flatten(0, 2), index.flatten(), reduction="none").view(
                want.shape
            )
        else:
            err = (out - want).abs()
        return (err.mean(-1) * mask).sum() / mask.sum().clamp(min=1)

    def commands(self, x: Tensor) -> Tensor:
        """Clean chunk [B,D] or [B,H,W] -> executed actions [B,E,A] in the env's units."""
        x = x.view(len(x), self.options.horizon, self.width)[:, : self.options.execute, : self.spec.action]
        return self.action_norm.inverse(x)

    def _out(self, context: Context) -> Tensor:
        """Logits [B,H,W,256], or means [B,H,W]."""
        return filled(self.trunk, self.head.expert, context, self.options.horizon)

    def _executed(self) -> Tensor:
        """bool [H,W]: the numbers that the env executes."""
        o, device = self.options, self.log_scale.device
        return (torch.arange(o.horizon, device=device) < o.execute)[:, None] & (
            torch.arange(self.width, device=device) < self.spec.action
        )

    def _bin_logp(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        e, a = self.options.execute, self.spec.action
        likely = logits[:, :e, :a].log_softmax(-1)
        logp = likely.gather(3, index[:, :e, :a, None]).flatten(1)
        return logp, -(likely.exp() * likely).sum(-1).mean()

    def _laplace_logp(self, mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        e, a = self.options.execute, self.spec.action
        log_b = self.log_scale[:e, :a]
        logp = -(x - mean)[:, :e, :a].abs() * torch.exp(-log_b) - log_b - math.log(2)
        return logp.sum((1, 2))[:, None], (1 + math.log(2) + log_b).mean()
