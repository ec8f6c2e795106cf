"""Planning in a world model at deployment: of N chunks that a policy proposes the best one, or what the
cross-entropy method makes of them.

    score of a chunk = max_t P(success at t) - [doubt > threshold],   t along the chunk and then `ahead` steps
                                                            of the policy itself

The first chunk is judged by where the policy itself gets from there: where `ahead` does not reach as far as
success may lie, the chunks of an episode's beginning are all alike. A candidate in doubt is not rolled out
further; nor is any of an env in which one succeeds so surely that none can be better by `margin`.
CEM begins with the proposals, keeps the best, and draws new chunks about their mean; its result must be
better than the policy's own first proposal in the model by `margin`, or that one is executed.

Sources: best of N by rollouts of the base policy (Bertsekas, rollout algorithms); CEM: de Boer et al. 2005;
both in learned models: PETS (Chua et al. 2018).

Axes: `N` envs, `K` candidates, `E` steps of a chunk, `A` action.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from robo_rl.errors import in_range
from world_models.model import WorldModel

# observation of N envs -> actions [N,E,A], drawn anew at every call
Propose = Callable[[Mapping[str, np.ndarray]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How a chunk is planned."""

    candidates: int = 16
    """K: chunks that are tried."""
    ahead: int | None = None
    """Control steps of the policy itself after the chunk; None: to the length of an episode in the model."""
    rounds: int = 0
    """Of CEM; 0: the best of the proposals."""
    kept: int = 4
    """Candidates that each round's mean and spread are taken of."""
    margin: float = 0.02
    """By which a chunk's score must be above that of the policy's own first proposal."""

    def __post_init__(self) -> None:
        for name, low, high in (("candidates", 2, 4096), ("rounds", 0, 100), ("margin", 0, 1)):
            in_range(f"plan.{name}", getattr(self, name), low, high)
        in_range("plan.ahead", self.ahead or 0, 0, 4096)
        in_range("plan.kept", self.kept, 2, self.candidates)


class Planner:
    """A policy that plans: called with an observation of N envs it gives actions [N,E,A].
    `robo_rl.experiment.world_model.planner` makes one of a policy of robo_rl. `propose` is the policy below
    it (a sample at
    every call), `plain` its own choice, the first candidate. Owns the generator of CEM's draws and the count
    `changed` of chunks that are not the policy's own, of `planned`."""

    def __init__(
        self, model: WorldModel, propose: Propose, plain: Propose, options: PlanOptions, seed: int = 0
    ):
        self.model, self.propose, self.plain, self.options = model, propose, plain, options
        self.rng = np.random.default_rng([seed, 67])
        self.changed, self.planned = 0, 0

    def __call__(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        o, n = self.options, len(obs["state"])
        first = np.asarray(self.plain(obs), np.float32)
        many = {k: np.repeat(np.asarray(v), o.candidates - 1, 0) for k, v in obs.items()}
        drawn = np.asarray(self.propose(many), np.float32).reshape(n, o.candidates - 1, *first.shape[1:])
        chunks = np.concatenate([first[:, None], drawn], 1).clip(-1, 1)  # [N,K,E,A]
        scores = self.score(obs, chunks)
        own = scores[:, :1].copy()
        for _ in range(o.rounds):
            chunks, scores = self.redraw(obs, chunks, scores)
        best = scores.argmax(1)
        better = scores.max(1) > own[:, 0] + o.margin
        self.changed += int(better.sum())
        self.planned += n
        return np.where(better[:, None, None], chunks[np.arange(n), best], first)

    def redraw(
        self, obs: Mapping[str, np.ndarray], chunks: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One round of CEM: the best so far stays, the others are drawn about the mean of the `kept` best."""
        order = np.argsort(-scores, 1, kind="stable")[:, : self.options.kept]
        elite = np.take_along_axis(chunks, order[:, :, None, None], 1)
        mean, std = elite.mean(1, keepdims=True), elite.std(1, keepdims=True) + 0.02
        new = (mean + std * self.rng.standard_normal(chunks.shape)).clip(-1, 1).astype(np.float32)
        new[:, 0] = elite[:, 0]
        return new, self.score(obs, new)

    @torch.inference_mode()
    def score(self, obs: Mapping[str, np.ndarray], chunks: np.ndarray) -> np.ndarray:
        """float64[N,K] of chunks [N,K,E,A]."""
        n, k = chunks.shape[:2]
        lanes = {key: np.repeat(np.asarray(v), k, 0) for key, v in obs.items()}
        live, actions = np.arange(n * k), chunks.reshape(n * k, *chunks.shape[2:])
        carry, best, doubt = self.model.start(lanes, live % k), np.zeros(n * k), np.zeros(n * k, bool)
        ahead, made, look = self.options.ahead, 0, getattr(self.model, "look", None)
        steps = self.model.spec.steps() if ahead is None else chunks.shape[2] + ahead
        while True:
            commands = torch.from_numpy(np.ascontiguousarray(actions, np.float32))
            carry, p = self.model.step(carry, commands, **({"draw": False} if look else {}))
            sure = p.uncertainty[:, -1].numpy() <= self.model.spec.threshold  # NaN is not
            doubt[live] = ~sure
            found = np.nan_to_num(p.success.numpy()).max(1)
            best[live] = np.where(sure, np.maximum(best[live], found), best[live])
            made += actions.shape[1]
            settled = best.reshape(n, k).max(1) >= 1 - self.options.margin
            go_on = sure & ~settled[live // k]
            if made >= steps or not go_on.any():
                return (best - doubt * 1e-3).reshape(n, k)
            rows, live = torch.from_numpy(np.flatnonzero(go_on)), live[go_on]
            carry = {key: v[rows] for key, v in carry.items()}
            lanes = {key: v[go_on] for key, v in lanes.items()}
            shown = {key: v[rows, -1] for key, v in p.obs.items()} | (look(carry) if look else {})
            lanes |= {key: v.numpy() for key, v in shown.items()}
            actions = np.asarray(self.plain(lanes), np.float32).clip(-1, 1)
