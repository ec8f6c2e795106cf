"""Recording a scripted expert, and turning recorded episodes into what supervised learning samples from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from robo_rl.algos.bc import demos_sampler
from robo_rl.algos.onpolicy import Demos
from robo_rl.data.episode import Episode
from robo_rl.errors import UserError
from robo_rl.policies import ObsSpec
from robo_rl.policies.nets import tokenize

DEMO_START = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Lead:
    """Who acts before the expert does: `act` of an observation of N envs -> actions [N, E, A]; in each episode for a number of
    control steps drawn from 0 .. `longest`."""

    act: Callable[[dict], np.ndarray]
    longest: int


def record(env, episodes: int, seed: int, add: Callable[[Episode], None], noise: float = 0.0,
           tick: Callable[[int, int], None] = lambda kept, tried: None, first: int = 0, lead: Lead | None = None) -> int:
    """Give `episodes` successful expert episodes of each task of the env to `add`, in start order -> episodes tried.

    noise: std of Gaussian noise on the executed action; the recorded action is the clean one (DART, Laskey 2017).
    lead: episodes begin where it has led to, and name no start: the expert shows how to go on from states that a policy comes to
    (after DAgger, Ross et al. 2011; what is recorded is the expert's alone).
    Starts are DEMO_START + (seed mod 6000) * 100000 + i, i from `first`, below those of evaluation; of M tasks each has every M-th.
    Raises UserError if the env has no expert or it fails too often.
    """
    check_expert(env)
    rng = np.random.default_rng([seed, 7, first] if first else [seed, 7])
    n, names, kept, tried = env.num_envs, getattr(env, "task_names", (env.spec.task,)), 0, 0
    for k, name in enumerate(names):
        before, wanted = (kept, tried), kept + episodes
        begin = DEMO_START + seed % 6000 * 100_000 + first
        begin += (k - begin) % len(names)
        while kept < wanted:
            starts = begin + len(names) * (tried - before[1] + np.arange(n))
            for episode in expert_episodes(env, starts, noise, rng, lead):
                tried += 1
                if episode is None:
                    continue
                add(episode)
                kept += 1
                tick(kept, tried)
                if kept == wanted:
                    break
            found, of = kept - before[0], tried - before[1]
            if of >= 20 * n and found < 0.05 * of:
                raise UserError(f"the expert succeeds in {found} of {of} episodes of {name} "
                                f"({env.spec.axes[0].name} control); choose another control mode")
    return tried


def expert_episodes(env, starts: np.ndarray, noise: float, rng: np.random.Generator,
                    lead: Lead | None) -> Iterator[Episode | None]:
    """Of each of the starts [N] what the expert did from where it took over, None where that was no success or `lead` came to
    the end."""
    n, views = env.num_envs, list(env.spec.views)
    obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": starts})
    tasks = [str(t) for t in obs["task"]]
    rows: list[tuple] = []
    over, won, length, begin = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, np.int64), np.zeros(n, np.int64)
    chunk = np.zeros((n, 1, 0))
    if lead is not None:
        begin = rng.integers(0, lead.longest + 1, n)
    while not over.all():
        clean = np.asarray(env.expert_action(), np.float32)
        act = np.clip(clean + noise * rng.standard_normal(clean.shape), -1, 1).astype(np.float32) if noise else clean
        if lead is not None and (led := begin > len(rows)).any():
            at = len(rows) % chunk.shape[1]
            if at == 0:
                chunk = lead.act(obs)
            act = np.where(led[:, None], np.clip(chunk[:, at], -1, 1), act)
        seen = {v: np.array(obs[f"image/{v}"]) for v in views}
        state = np.array(obs["state"])
        obs, reward, terminated, truncated, info = env.step(act)
        rows.append((state, clean, np.array(reward), seen))
        length += ~over
        over, won = np.asarray(terminated | truncated), np.asarray(info["success"]).copy()
    for i in range(n):
        mine = rows[begin[i]:length[i]]
        yield Episode(state=np.stack([r[0][i] for r in mine]), action=np.stack([r[1][i] for r in mine]),
                      reward=np.array([r[2][i] for r in mine]), task=tasks[i], success=True, terminated=True,
                      images={v: np.stack([r[3][v][i] for r in mine]) for v in views},
                      source="expert", start=int(starts[i]) if begin[i] == 0 else -1, final=np.array(obs["state"][i]),
                      final_images={v: np.array(obs[f"image/{v}"][i]) for v in views}) if won[i] and mine else None


def check_expert(env) -> None:
    """Raise UserError if the env has no scripted expert."""
    if not hasattr(env, "expert_action"):
        raise UserError(f"{env.spec.sim}:{env.spec.task} has no scripted expert; record demonstrations elsewhere and "
                        "pass their folder with --demos PATH, or train from scratch with --demos 0")


def check_fits(meta, spec: ObsSpec) -> None:
    """Raise UserError naming what of a data set (`reader.Meta`) does not fit the env's `spec`."""
    where, f = f"data set {meta.root}", meta.features
    sizes = {view: (h, w) for view, h, w in f.views}
    if missing := set(spec.views) - set(sizes):
        raise UserError(f"{where} lacks the camera {', '.join(sorted(missing))}; record it with --obs rgb")
    if len(f.state) != spec.state or len(f.action) != spec.action:
        raise UserError(f"{where} has {len(f.state)} state and {len(f.action)} action numbers, the env has "
                        f"{spec.state} and {spec.action}; record it with the same sim, task and control")
    if spec.action_names and f.action != spec.action_names:
        raise UserError(f"{where} has the action axes {', '.join(f.action)}, the env has "
                        f"{', '.join(spec.action_names)}; record it with the same control")
    for view in spec.views:
        if sizes[view] != (spec.image_size, spec.image_size):
            raise UserError(f"{where}: camera {view} is {sizes[view][0]} x {sizes[view][1]}, the env's is "
                            f"{spec.image_size} x {spec.image_size}; set --image-size")


def demo_sampler(dataset, spec: ObsSpec, horizon: int, episodes: "np.ndarray | None" = None) -> Demos:
    """Sampler of (obs, chunk[B,H,A], mask[B,H]) over all frames, or those of the `episodes` bool[E]; raises UserError naming what does
    not fit."""
    from robo_rl.data.reader import chunks

    check_fits(dataset.meta, spec)
    state, chunk, pad = chunks(dataset, horizon)
    obs = {"state": torch.from_numpy(np.ascontiguousarray(state))}
    if spec.language:
        obs["tokens"] = torch.from_numpy(tokenize(dataset.tasks))[torch.from_numpy(dataset.task_index)]
    for view in spec.views:
        obs[f"image/{view}"] = torch.from_numpy(dataset.images(view))
    chunk, mask = torch.from_numpy(np.ascontiguousarray(chunk)), torch.from_numpy(~pad).float()
    if episodes is not None and not episodes.all():
        rows = torch.from_numpy(np.flatnonzero(episodes[dataset.episode_index]))
        obs, chunk, mask = {k: v[rows] for k, v in obs.items()}, chunk[rows], mask[rows]
    return demos_sampler(obs, chunk, mask)


def fit_normalisers(policy, dataset) -> None:
    """Statistics of the demonstrations into the policy: they travel in its checkpoint."""
    policy.obs_norm.fit(torch.from_numpy(dataset.state))
    policy.action_norm.fit(torch.from_numpy(dataset.action), floor=0.05)
