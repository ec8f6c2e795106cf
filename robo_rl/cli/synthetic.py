"""SynthER beside an off-policy learner: replay's own transitions learnt by a diffusion model, drawn as one more source."""

from collections.abc import Callable

import numpy as np

from robo_rl.errors import UserError
from robo_rl.options import OffPolicyOptions
from robo_rl.replay import Batch

SOURCE = 3  # of a synthetic transition: nobody chose it, so nobody imitates it
MOST = 100_000  # real transitions a generator is learnt from


class Synthetic:
    """A replay source of transitions that a generator made; owner of them and of when they are renewed.

    A transition is one decision: its action is the chunk of E steps. Chunks that a time limit cut short are left out, so
    every discount is gamma^E, or 0 where the generator says that it ended.
    """

    def __init__(self, options: OffPolicyOptions, execute: int, action: int, seed: int, say: Callable[[str], None]):
        self.options, self.execute, self.action, self.seed, self.say = options, execute, action, seed, say
        self.made, self.next = 0, 0
        self.rows: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows.get("obs", ()))

    def renew(self, step: int, draw: Callable[[int, np.random.Generator], Batch], have: int) -> None:
        """Learn a generator from `draw(n, rng)`, real transitions alone, if it is time to, and sample the source anew."""
        if step < self.next or have < 256:
            return
        from world_models.synther import SynthOptions, Transitions, Upsampler
        o = self.options
        rng = np.random.default_rng([self.seed, 37, self.made])
        b = draw(min(have, MOST), rng)
        over = b.discounts == 0
        keep = (b.steps == self.execute) | over
        if keep.sum() < 256:
            return
        real = Transitions(b.obs["state"][keep], b.actions[keep].reshape(keep.sum(), -1), b.rewards[keep], b.next_obs["state"][keep], over[keep])
        generator = Upsampler(real, SynthOptions(updates=o.synthetic_updates), self.seed + self.made)
        t = generator.sample(o.synthetic_rows, self.seed + self.made)
        self.rows = {"obs": t.obs, "action": t.action, "reward": t.reward, "next_obs": t.next_obs, "terminated": t.terminated}
        self.made, self.next = self.made + 1, step + o.synthetic_every
        self.say(f"synthetic: {len(t)} transitions from {int(keep.sum())} real ones")

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """`n` transitions, uniform with replacement."""
        if not len(self):
            raise UserError("the synthetic source is empty: it is made from replay once that holds 256 transitions")
        at = rng.integers(0, len(self), n)
        r = {k: v[at] for k, v in self.rows.items()}
        e, a = self.execute, self.action
        discounts = np.where(r["terminated"], np.float32(0), np.float32(self.options.gamma) ** e).astype(np.float32)
        return Batch({"state": r["obs"]}, r["action"].reshape(n, e, a), r["reward"], discounts, {"state": r["next_obs"]},
                     np.full(n, e, np.int64), np.zeros((n, e), bool), np.full(n, SOURCE, np.uint8),
                     np.full(n, -np.inf, np.float32), np.zeros((n, a), np.float32))

    def state(self) -> dict:
        """Everything to go on exactly."""
        return {"made": self.made, "next": self.next, "rows": self.rows}

    def set_state(self, state: dict) -> None:
        self.made, self.next, self.rows = state["made"], state["next"], dict(state["rows"])
