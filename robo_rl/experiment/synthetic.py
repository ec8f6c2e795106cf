"""Synthetic experience beside an off-policy learner: replay learnt by a diffusion model, drawn as one more
source.

Single transitions (SynthER), or stretches of decisions pushed towards the present policy (policy-guided
diffusion), taken apart.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.run import Run, Stopped
from robo_rl.log import si
from robo_rl.options import OffPolicyOptions
from robo_rl.replay import Batch, Mixture

if TYPE_CHECKING:
    from robo_rl.policies import Policy

SOURCE = 3  # of a synthetic transition: nobody chose it, so nobody imitates it
Tick = Callable[[int, float], None]  # (update, loss)
LEAST = 256  # real transitions or stretches a generator needs
MOST = 100_000  # real transitions a generator is learnt from


class Synthetic:
    """A replay source of transitions that a generator made; owner of them and of when they are renewed.

    A transition is one decision: its action is the chunk of E steps. Chunks that a time limit cut short are
    left out, so every discount is gamma^E, or 0 where the generator says that it ended.
    """

    def __init__(
        self, options: OffPolicyOptions, execute: int, action: int, seed: int, say: Callable[[str], None]
    ):
        self.options, self.execute, self.action, self.seed, self.say = options, execute, action, seed, say
        self.made, self.next = 0, 0
        self.rows: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows.get("obs", ()))

    def renew(
        self, step: int, real: Mixture, policy: "Policy | None" = None, tick: Tick = lambda update, loss: None
    ) -> None:
        """Learn a generator from the real sources alone, in their shares, if it is time to, and sample this
        one anew. tick: told of every update of the generator, and may end it by what it raises."""
        have = sum(len(r) for r, _ in real.sources.values())
        if step < self.next or have < LEAST:
            return
        rng, seed = np.random.default_rng([self.seed, 37, self.made]), self.seed + self.made
        single, count = self.options.synthetic_kind == "synther", min(have, MOST)
        found = (
            self.upsampled(real.sample(count, rng), seed, tick)
            if single
            else self.guided(real, count, rng, seed, policy, tick)
        )
        if found is None:
            return
        t, rows = found
        self.rows = {
            "obs": t.obs,
            "action": t.action,
            "reward": t.reward,
            "next_obs": t.next_obs,
            "terminated": t.terminated,
        }
        self.made, self.next = self.made + 1, step + self.options.synthetic_every
        self.say(f"synthetic: {len(t)} transitions from {rows} real {'ones' if single else 'stretches'}")

    def upsampled(self, b: Batch, seed: int, tick: Tick):
        """SynthER's transitions of a batch of real ones, and how many of these taught it; None: too few."""
        from world_models.synther import SynthOptions, Transitions, Upsampler

        over = b.discounts == 0
        keep = (b.steps == self.execute) | over
        if keep.sum() < LEAST:
            return None
        t = Transitions(
            b.obs["state"][keep],
            b.actions[keep].reshape(keep.sum(), -1),
            b.rewards[keep],
            b.next_obs["state"][keep],
            over[keep],
        )
        generator = Upsampler(t, SynthOptions(updates=self.options.synthetic_updates), seed, tick)
        return generator.sample(self.options.synthetic_rows, seed), len(t)

    def guided(
        self,
        real: Mixture,
        count: int,
        rng: np.random.Generator,
        seed: int,
        policy: "Policy | None",
        tick: Tick,
    ):
        """Transitions of stretches pushed towards the policy's mean chunk, and how many real stretches taught
        it; None: too few."""
        import torch

        from robo_rl.rollout import to_policy
        from world_models.guided import Guided, GuideOptions
        from world_models.synther import SynthOptions, Transitions

        assert policy is not None
        o = self.options
        parts = [
            r.windows(k, o.synthetic_window, rng)
            for (r, _), k in zip(real.sources.values(), real.counts(count), strict=False)
            if k
        ]
        obs, action, reward, over = (
            np.concatenate([p[k] for p in parts]) for k in ("obs", "action", "reward", "over")
        )
        if len(obs) < LEAST:
            return None
        windows = np.concatenate([obs, action, reward[..., None], over[..., None]], 2).astype(np.float32)
        model = Guided(
            windows,
            obs.shape[2],
            action.shape[2],
            GuideOptions(window=o.synthetic_window, strength=o.synthetic_strength),
            SynthOptions(updates=o.synthetic_updates),
            seed,
            tick,
        )

        def mean(states: torch.Tensor) -> torch.Tensor:
            still = torch.Generator().manual_seed(seed)
            seen = to_policy({"state": states}, policy)
            return policy.act(seen, still, False).actions.flatten(1).to(states.device)

        made, size, batch = [], 0, min(2048, -(-o.synthetic_rows // (o.synthetic_window - 1)))
        while size < o.synthetic_rows:
            t = model.transitions(model.sample(batch, seed * 1_000_003 + len(made), mean))
            if not len(t):
                return None
            made.append(t)
            size += len(t)
        joined = (
            np.concatenate([getattr(t, k) for t in made])[: o.synthetic_rows]
            for k in ("obs", "action", "reward", "next_obs", "terminated")
        )
        return Transitions(*joined, source="synthetic"), len(obs)

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """`n` transitions, uniform with replacement."""
        if not len(self):
            raise UserError(
                "the synthetic source is empty: it is made from replay once that holds 256 transitions"
            )
        at = rng.integers(0, len(self), n)
        r = {k: v[at] for k, v in self.rows.items()}
        e, a = self.execute, self.action
        discounts = np.where(r["terminated"], np.float32(0), np.float32(self.options.gamma) ** e).astype(
            np.float32
        )
        return Batch(
            {"state": r["obs"]},
            r["action"].reshape(n, e, a),
            r["reward"],
            discounts,
            {"state": r["next_obs"]},
            np.full(n, e, np.int64),
            np.zeros((n, e), bool),
            np.full(n, SOURCE, np.uint8),
            np.full(n, -np.inf, np.float32),
            np.zeros((n, a), np.float32),
        )

    def state(self) -> dict:
        """Everything to go on exactly."""
        return {"made": self.made, "next": self.next, "rows": self.rows}

    def set_state(self, state: dict) -> None:
        self.made, self.next, self.rows = state["made"], state["next"], dict(state["rows"])


def made_anew(synthetic: Synthetic, run: Run, real: Mixture, policy: "Policy") -> bool:
    """Make the transitions of `synthetic` anew if it is time to, and tell how far that is. False: stopped."""
    updates = si(synthetic.options.synthetic_updates)

    def tick(update: int, loss: float) -> None:
        if run.stop.asked:
            raise Stopped
        run.report.advance(run.step, note=f"generator: {si(update)} of {updates} updates")

    try:
        synthetic.renew(run.step, real, policy, tick)
    except Stopped:
        return False
    return True
