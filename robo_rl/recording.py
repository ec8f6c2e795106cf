"""Recording whatever acts in an env, failures too: the executed actions, as a world model has to see them."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from robo_rl.contract import ControlEnv
from robo_rl.data.episode import Episode
from robo_rl.demos import DEMO_START, NoiseAhead, check_expert
from robo_rl.errors import UserError
from robo_rl.evaluation import decide
from robo_rl.noise import mix, seed_noise
from robo_rl.policies import Policy
from robo_rl.rollout import announce, as_array

Actor = Callable[[Mapping[str, np.ndarray], int], np.ndarray]  # obs, decision -> actions [N,E,A]


class Recorder(ControlEnv):
    """An env that passes everything on to `env` and gives each episode that ends to `add`.

    noise: every episode draws a level in [0, noise], and Gaussian noise of this std goes onto its actions;
    what is recorded is what was executed. An episode that `set_state` put the env into the middle of is not
    recorded.
    """

    def __init__(
        self, env, add: Callable[[Episode], None], source: str = "policy", noise: float = 0.0, seed: int = 0
    ):
        self.env, self.add, self.source, self.noise = env, add, source, noise
        self.num_envs, self.spec, self.metadata, self.render_mode = (
            env.num_envs,
            env.spec,
            env.metadata,
            env.render_mode,
        )
        self.single_observation_space, self.observation_space = (
            env.single_observation_space,
            env.observation_space,
        )
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        n, steps, state = self.num_envs, env.spec.max_steps, env.single_observation_space["state"].shape[0]
        self._drawn = NoiseAhead(np.random.default_rng([seed, 11]))
        # steps so far; whether recorded from its beginning
        self._t, self.whole = np.zeros(n, np.int64), np.zeros(n, bool)
        self._level, self._starts = np.zeros(n, np.float32), np.full(n, -1)
        self._rows = {
            "state": np.zeros((n, steps, state), np.float32),
            "reward": np.zeros((n, steps), np.float32),
            "action": np.zeros((n, steps, len(env.spec.axes)), np.float32),
        }
        for view in env.spec.views:
            box = env.single_observation_space[f"image/{view}"]
            self._rows[f"image/{view}"] = np.zeros((n, steps, *box.shape), np.uint8)
        if hasattr(env, "get_state"):
            self.get_state = env.get_state
            self.set_state = self._set_state
        if hasattr(env, "announce"):
            self.announce = self._announce
        if hasattr(env, "expert_action"):
            self.expert_action = env.expert_action

    def __repr__(self) -> str:
        return f"Recorder({self.env!r})"

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        options = options or {}
        mask = np.asarray(options.get("reset_mask", np.ones(self.num_envs, bool)))
        starts = options.get("starts")
        self._t[mask], self.whole[mask] = 0, True
        self._level[mask] = self.noise * self._drawn.rng.random(int(mask.sum()))
        self._starts[mask] = -1 if starts is None else np.asarray(starts)[mask]
        self._obs = obs
        return obs, info

    def step(self, actions):
        executed = np.clip(np.asarray(actions, np.float32), -1, 1)
        if self.noise:
            executed = self._noisy(executed, self._drawn.next(executed.shape))
        ids = np.flatnonzero(self.whole)
        at = self._t[ids]
        for k, rows in self._rows.items():
            if k not in ("action", "reward"):
                rows[ids, at] = as_array(self._obs[k])[ids]
        self._obs, reward, terminated, truncated, info = self.env.step(executed)
        self._rows["action"][ids, at], self._rows["reward"][ids, at] = executed[ids], as_array(reward)[ids]
        self._t[ids] += 1
        over = as_array(terminated | truncated) & self.whole
        for i in np.flatnonzero(over):
            t = self._t[i]
            self.add(
                Episode(
                    **{k: self._rows[k][i, :t].copy() for k in ("state", "action", "reward")},
                    task=str(self._obs["task"][i]),
                    images={v: self._rows[f"image/{v}"][i, :t].copy() for v in self.spec.views},
                    success=bool(info["success"][i]),
                    source=self.source,
                    start=int(self._starts[i]),
                    terminated=bool(terminated[i]),
                    final=np.array(as_array(self._obs["state"][i])),
                    final_images={v: np.array(as_array(self._obs[f"image/{v}"][i])) for v in self.spec.views},
                )
            )
        self.whole &= ~over
        return self._obs, reward, terminated, truncated, info

    def _noisy(self, actions: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        return np.clip(actions + self._level[:, None] * drawn.astype(np.float32), -1, 1)

    def _announce(self, actions: np.ndarray, lanes=None) -> None:
        """What the next steps bring, with their noise, which is drawn now."""
        rows = np.moveaxis(np.clip(np.asarray(actions, np.float32), -1, 1), 1, 0)
        if self.noise:
            rows = map(self._noisy, rows, self._drawn.ahead(rows.shape))
        self.env.announce(np.stack(list(rows), 1), lanes)

    def _set_state(self, state, mask=None) -> None:
        self.env.set_state(state, mask)
        self.whole[np.ones(self.num_envs, bool) if mask is None else mask] = False

    def render(self):
        return self.env.render()

    def close_extras(self, **kwargs):
        self.env.close()


def expert_actor(env) -> Actor:
    """The scripted expert, one step at a time."""
    check_expert(env)
    return lambda obs, decision: np.asarray(env.expert_action(), np.float32)[:, None]


def random_actor(env, seed: int, hold: int = 4) -> Actor:
    """Uniform actions, each held for `hold` steps: white noise would go nowhere."""
    rng, shape = np.random.default_rng([seed, 13]), env.action_space.shape
    return lambda obs, decision: np.repeat(rng.uniform(-1, 1, shape).astype(np.float32)[:, None], hold, 1)


def policy_actor(policy: Policy, seed: int) -> Actor:
    """A policy with its exploration noise."""
    generator = torch.Generator()

    def act(obs, decision: int) -> np.ndarray:
        seed_noise(generator, mix(seed, 17, decision))
        return decide(policy, obs, generator, explore=True)

    return act


def play(
    env: Recorder, actor: Actor, episodes: int, seed: int, tick: Callable[[int], None] = lambda done: None
) -> int:
    """Let `actor` play `episodes` episodes from starts that neither training nor evaluation uses -> how many
    succeeded.

    Starts are those of demonstrations (`demos.record`): DEMO_START + (seed mod 6000) * 100000 + i.
    """
    n, done, won, decision = env.num_envs, 0, 0, 0
    if episodes > 100_000:
        raise UserError(
            f"one seed has 100000 starts, asked for {episodes} episodes; record more with another --seed"
        )
    while done < episodes:
        here = min(n, episodes - done)
        starts = DEMO_START + seed % 6000 * 100_000 + done + np.arange(n)
        obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": starts})
        env.whole[here:] = False  # the last batch is smaller
        over = np.zeros(n, bool)
        while not over.all():
            chunk = actor(obs, decision)
            decision += 1
            announce(env, chunk)
            for j in range(chunk.shape[1]):
                obs, _, terminated, truncated, info = env.step(chunk[:, j])
                over = as_array(terminated | truncated)
                if over.all():
                    break
        done += here
        won += int(as_array(info["success"])[:here].sum())
        tick(done)
    return won
