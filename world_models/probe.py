"""Policies unlike any data, to ask a model what it was not taught: affine ones, random or near the recorded
actions, and a search among them for one that the model overrates.

    a = clip(W (s - mean)/std + b, -1, 1)
    W = 0 .. 2 times the spread of the cloned W beside it, or W_ij ~ N(0, gain^2/S)

A search is the cross-entropy method (de Boer et al. 2005) on (W, b), begun at the clone of the recorded
successes or at nothing, for success in the model where the model does not itself doubt (uncertainty below its
threshold). What it finds is then tried for real: success in the model alone is what a policy trained in it
would find too.

Axes: `P` policies, `N` starts, `S` state, `A` action.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from robo_rl.types import Each, silently
from world_models.imagine import PlayedEpisodes, play

RIDGE = 1e-3  # of standardised states, per row
POPULATION, KEPT, ROUNDS = 24, 6, 6  # of the search
BLIND = 2  # searches from nothing
STARTS = 16  # of every policy that it tries


@dataclass(frozen=True, slots=True)
class Affine:
    """A policy of the state: weight float64[A,S+1] on ((s - mean)/std, 1). Called with an observation it
    gives actions [N,1,A]."""

    weight: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def __call__(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        return acted(self.weight[None].repeat(len(obs["state"]), 0), self.mean, self.std, obs["state"])


def acted(weights: np.ndarray, mean: np.ndarray, std: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Actions float32[N,1,A] of a weight [A,S+1] for each state [N,S]."""
    z = np.concatenate([((state - mean) / std).clip(-5, 5), np.ones((len(state), 1))], 1)
    return np.einsum("nas,ns->na", weights, z).clip(-1, 1).astype(np.float32)[:, None]


def clone(state: np.ndarray, action: np.ndarray) -> Affine:
    """The affine policy nearest to what was done: least squares of actions [F,A] on states [F,S]."""
    mean, std = state.mean(0), state.std(0)
    std = np.where(std > 1e-5, std, np.inf)  # what never changes tells nothing
    x = np.concatenate([((state - mean) / std).clip(-5, 5), np.ones((len(state), 1))], 1).astype(np.float64)
    weight = np.linalg.solve(x.T @ x + RIDGE * len(x) * np.eye(x.shape[1]), x.T @ action.astype(np.float64)).T
    return Affine(weight, mean, std)


def cloned_successes(dataset) -> Affine:
    """The clone of the successful episodes of a data set, of all of them where none succeeded."""
    won = np.flatnonzero(dataset.success) if dataset.success.any() else np.arange(len(dataset))
    rows = np.concatenate([np.arange(dataset.from_[e], dataset.to[e]) for e in won])
    return clone(dataset.state[rows], dataset.action[rows])


def policies(base: Affine, count: int, seed: int) -> list[tuple[str, Affine]]:
    """(name, policy) of `count`: every other one `base` with more and more noise on its weights, the others
    random."""
    rng, (actions, inputs), out = np.random.default_rng([seed, 47]), base.weight.shape, []
    spread = base.weight[:, :-1].std()
    for i in range(count):
        noise = rng.standard_normal((actions, inputs))
        if i % 2:
            gain = rng.uniform(0.3, 2.0)
            out.append((f"random {i // 2 + 1}", Affine(noise * gain / np.sqrt(inputs), base.mean, base.std)))
        else:
            scale = 2 * (i // 2) / max((count - 1) // 2, 1)
            out.append(
                (
                    f"clone + {scale:.2g} noise",
                    Affine(base.weight + scale * spread * noise, base.mean, base.std),
                )
            )
    return out


def search(
    model,
    base: Affine,
    obs: Mapping[str, np.ndarray],
    max_steps: int,
    seed: int,
    begin: np.ndarray | None = None,
    each: Each = silently,
) -> tuple[Affine, float]:
    """(the policy that a search ends with, its success in the model on the starts `obs` {key: [N,...]},
    undoubted). It begins at `base`, or at the weight `begin`, where the spread is 1."""
    rng, n = np.random.default_rng([seed, 53]), min(STARTS, len(obs["state"]))
    obs = {k: v[:n] for k, v in obs.items()}
    many = {k: np.concatenate([v] * POPULATION) for k, v in obs.items()}
    mean = base.weight if begin is None else begin
    std = np.full(mean.shape, 0.5 * base.weight.std() + 0.05 if begin is None else 1.0)
    best, most = Affine(mean, base.mean, base.std), -np.inf
    for _ in each("search", range(ROUNDS), "rounds"):
        tried = mean + std * rng.standard_normal((POPULATION, *mean.shape))
        tried[0] = best.weight
        lanes = tried.repeat(n, 0)
        got = play(
            model, lambda o, lanes=lanes: acted(lanes, base.mean, base.std, o["state"]), many, max_steps, seed
        )
        value = worth(got).reshape(POPULATION, n).mean(1)
        order = np.argsort(-value, kind="stable")[:KEPT]
        mean, std = tried[order].mean(0), tried[order].std(0) + 0.02
        if value[order[0]] > most:
            best, most = Affine(tried[order[0]], base.mean, base.std), float(value[order[0]])
    undoubted = play(model, best, obs, max_steps, seed)
    return best, float((undoubted.success & ~undoubted.cut).mean())


def searches(
    model, base: Affine, obs: Mapping[str, np.ndarray], max_steps: int, seed: int, each: Each = silently
) -> list[tuple[str, Affine, float]]:
    """(name, policy, its undoubted success in the model) of a search from the clone, which succeeds as the
    recorded policies do, and of BLIND from nothing, which succeed by whatever the model grants."""
    blind = [
        (
            f"search {k + 1} from nothing",
            *search(model, base, obs, max_steps, seed + 7 * k, np.zeros(base.weight.shape), each),
        )
        for k in range(BLIND)
    ]
    return [("search from the clone", *search(model, base, obs, max_steps, seed, each=each)), *blind]


def worth(got: PlayedEpisodes) -> np.ndarray:
    """What the search looks for [N]: success that the model does not doubt, then reward."""
    return (got.success & ~got.cut) + 0.1 * np.tanh(np.where(got.cut, 0, got.gain))
