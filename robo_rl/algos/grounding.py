"""Grounding: before it learns to act, a trunk learns to tell from a scene and its instruction where the
episode leads.

    loss = mean_i |z_i - r(trunk(first observation of episode i))|^2,   z_i: the mean of the actions of
    episode i, normalised

r attends with a few queries to the keys and values that the trunk gives an action expert, and is thrown
away afterwards. What an instruction means shows in where the arm goes, and in the first moments of its way
there alone: later its own motion tells the rest, so that supervision of all frames says little of which
thing was meant. One observation per episode has nothing else to go by. The mean action is a few numbers
that all follow from what was asked. Of 30 numbers of the last state, most of them noise, a tiny trunk
learns it in several times as many updates, or not at all.
How long that takes differs several times between models, and in the end scenes are learnt by heart. So a
tenth of the episodes is held out: the trunk ends as it was best on these.
An auxiliary task on the same data (UNREAL, Jaderberg et al. 2017, arXiv 1611.05397), here in a stage of its
own."""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor, nn

from robo_rl.algos import bc
from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.onpolicy import Demos
from robo_rl.options import BcOptions
from robo_rl.policies.context import Context

QUERIES, HIDDEN = 4, 128
LOOK, BATCHES = 100, 8  # updates between two looks at what is held out, and batches of a look
UNTOLD = 0.5  # of what episodes do, left unexplained: the trunk does not yet tell what is meant
BY_HEART = 0.02  # of it on what is learnt from: nothing is left to learn there
PATIENCE, LESS = 1500, 0.97  # updates that must bring the loss to so much of itself, once less is left


class Reader(nn.Module):
    """Numbers [B,out] from the last keys and values of a context: `QUERIES` learnt queries of width
    `width`, and an MLP."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, width))
        self.net = nn.Sequential(nn.Linear(QUERIES * width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, out))

    def forward(self, context: Context) -> Tensor:
        assert context.mask is not None
        keys, values = (x.flatten(2).float() for x in context.kv[-1])
        scores = (self.queries @ keys.transpose(1, 2) * keys.shape[2] ** -0.5).masked_fill(
            ~context.mask[:, None], -torch.inf
        )
        return self.net((scores.softmax(-1) @ values).flatten(1))


def mean_actions(action: Tensor, episode: Tensor, told: Tensor) -> Tensor:
    """Normalised actions [F,A] of episodes int64[F] -> of each frame the mean of those of its episode that
    are `told` bool[F], [F,A]: over all episodes of mean 0, and of mean square 1 over all axes, which keep
    their proportions: one that hardly differs between episodes counts little."""
    count = episode.bincount(told.to(action.dtype))[:, None]
    mean = torch.zeros(len(count), action.shape[1], dtype=action.dtype)
    mean.index_add_(0, episode[told], action[told]).div_(count)
    mean = mean - mean.mean(0)
    return (mean / mean.square().mean().sqrt().clamp(min=1e-6))[episode]


class HeldOutLoss:
    """The averages of `params` under which the loss `left` on what is held out was least, looked at every
    `LOOK` updates."""

    def __init__(self, params: Sequence[Tensor], left: Callable[[], float]):
        self.params, self.left = params, left
        self.least, self.best = inf, [p.detach().clone() for p in params]
        self.mark, self.at = inf, 0  # the loss from which it must fall, and the update that it was found at

    @torch.no_grad()
    def enough(self, update: int, loss: float, average: AveragedWeights) -> bool:
        """Look where it is time to -> whether less than `UNTOLD` is left and no longer falls; before, it
        often stands still for many hundred updates. Or whether what is learnt from, by its `loss`, is known
        by heart."""
        known = loss < BY_HEART
        if update % LOOK == 0 or known:
            with average.shown():
                left = self.left()
            if left < LESS * self.mark:
                self.mark, self.at = left, update
            if left < self.least:
                self.least = left
                for kept, mean in zip(self.best, average.mean, strict=True):
                    kept.copy_(mean)
        return known or self.least < UNTOLD and update - self.at >= PATIENCE

    @torch.no_grad()
    def take(self) -> float:
        """Give `params` the best averages -> their loss."""
        for p, kept in zip(self.params, self.best, strict=True):
            p.copy_(kept)
        return self.least


def ground(
    policy,
    sample: Demos,
    options: BcOptions,
    seed: int,
    tick: Callable[[int, float], None] = lambda update, loss: None,
    held: Demos | None = None,
) -> float:
    """Fit the trunk of `policy` in place to `sample`, of (obs, `mean_actions` [B,1,A], ones [B,1]) -> the
    loss.

    It takes at most `options.updates`, fewer where `sample` is known by heart. With `held`, such samples of
    other episodes, fewer also where their loss no longer falls; the trunk ends as it was best on them, and
    the loss is theirs."""
    obs, target, _ = sample(1, torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        keys = policy.encode(obs).kv[-1][0]
        reader = Reader(keys.flatten(2).shape[2], target.shape[2]).to(keys.device)

    def loss_of(sample: Demos, generator: torch.Generator) -> Tensor:
        obs, target, _ = sample(options.batch, generator)
        return (reader(policy.encode(obs)) - target[:, 0]).square().mean()

    def held_loss() -> float:
        assert held is not None
        generator = torch.Generator().manual_seed(seed)  # the same batches at every look
        return sum(float(loss_of(held, generator)) for _ in range(BATCHES)) / BATCHES

    params = [*(p for p in policy.trunk.parameters() if p.requires_grad), *reader.parameters()]
    others = HeldOutLoss(params, held_loss) if held and options.updates >= LOOK else None
    loss = bc.fit(
        params,
        lambda generator: loss_of(sample, generator),
        options,
        seed,
        lambda update, loss: tick(update, others.least if others and others.at else loss),
        others.enough if others else lambda update, loss, average: loss < BY_HEART,
    )
    return others.take() if others else loss
