"""Recording a scripted expert or a policy that shows how, and turning recorded episodes into what supervised
learning samples from."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorWrapper
from torch import Tensor

from robo_rl.algos.bc import demos_sampler
from robo_rl.algos.onpolicy import Demos
from robo_rl.data.episode import Episode
from robo_rl.errors import UserError, no_expert
from robo_rl.normalise import KINDS, AxisNormaliser
from robo_rl.options import DataOptions
from robo_rl.policies import ObsSpec, obs_tensors
from robo_rl.policies.images import fit_bytes
from robo_rl.policies.policy import words_of
from robo_rl.policies.protocol import Obs
from robo_rl.rollout import announce
from robo_rl.types import ControlSpec, has_success, task_names, to_commands

DEMO_START = 1_500_000_000
BEYOND = 0.01  # of an axis's range, and of its recorded numbers


@dataclass(frozen=True, slots=True)
class Lead:
    """Who acts before the expert does: `act` of an observation of N envs -> actions [N, E, A]; in each
    episode for a number of control steps drawn from 0 .. `longest`. `kept`: what it did is recorded too, as
    the policy's, so that the episode can be played again from its start."""

    act: Callable[[dict], np.ndarray]
    longest: int
    kept: bool = False


class NoiseAhead:
    """Gaussian noise of steps, which may be drawn before they are made: the same numbers of `rng` either
    way."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self._drawn = rng, []

    def ahead(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Draw that of the next E steps, float64 of shape [E, …]."""
        self._drawn = list(self.rng.standard_normal(shape))
        return list(self._drawn)

    def next(self, shape: tuple[int, ...]) -> np.ndarray:
        """That of the next step."""
        return self._drawn.pop(0) if self._drawn else self.rng.standard_normal(shape)


class PolicyExpert(VectorWrapper):
    """An env whose expert is `act` (an observation of N envs -> actions [N, E, A]): it decides after a reset
    and every E control steps."""

    env: Any  # with the optional parts of the contract
    expert_source = "teacher"

    def __init__(self, env, act: Callable[[dict], np.ndarray]):
        super().__init__(env)
        self._act, self._chunk, self._at = act, np.zeros((env.num_envs, 0, 0), np.float32), 0

    def __getattr__(self, name: str):
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, *, seed=None, options=None):
        self._obs, info = self.env.reset(seed=seed, options=options)
        self._at = self._chunk.shape[1]
        return self._obs, info

    def step(self, actions):
        self._obs, *rest = self.env.step(actions)
        self._at += 1
        return self._obs, *rest

    def expert_action(self) -> np.ndarray:
        if self._at >= self._chunk.shape[1]:
            self._chunk, self._at = np.clip(self._act(self._obs), -1, 1).astype(np.float32), 0
        return self._chunk[:, self._at]

    def decided(self) -> np.ndarray | None:
        """The chunk [N, E, A] whose first step is due, None within one."""
        return None if self._at else self._chunk


def record(
    env,
    episodes: int,
    seed: int,
    add: Callable[[Episode], None],
    noise: float = 0.0,
    tick: Callable[[int, int], None] = lambda kept, tried: None,
    first: int = 0,
    lead: Lead | None = None,
    pictures: bool = True,
) -> int:
    """Give `episodes` successful expert episodes of each task of the env to `add`, in start order -> episodes
    tried.

    noise: std of Gaussian noise on the executed action; the recorded action is the clean one (DART, Laskey
    2017).
    lead: episodes begin where it has led to, and name no start: the expert shows how to go on from states
    that a policy comes to (after DAgger, Ross et al. 2011; what is recorded is the expert's alone, unless
    the lead is `kept`).
    pictures: False leaves those of the env's cameras out, and draws none.
    Starts are DEMO_START + (seed mod 6000) * 100000 + i, i from `first`, below those of evaluation; of M
    tasks each has every M-th. Raises UserError if the env has no expert or it fails too often.
    """
    check_expert(env)
    rng = np.random.default_rng([seed, 7, first] if first else [seed, 7])
    n, names, kept, tried, views = env.num_envs, task_names(env), 0, 0, env.spec.views if pictures else ()
    if not pictures:
        env.images = False
    for k, name in enumerate(names):
        before, wanted = (kept, tried), kept + episodes
        begin = DEMO_START + seed % 6000 * 100_000 + first
        begin += (k - begin) % len(names)
        while kept < wanted:
            starts = begin + len(names) * (tried - before[1] + np.arange(n))
            for episode in expert_episodes(env, starts, noise, rng, lead, views):
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
                remedy = (
                    f"allow more than {env.spec.max_steps} steps (--max-steps) or choose another --control"
                    if expert_source(env) == "expert"
                    else "train it on"
                )
                if not has_success(env):
                    remedy = (
                        "the simulator says nothing of success, and only episodes that succeed are "
                        "demonstrations: let it say so (success in the info of every step, or of the last), "
                        "or train without (--demos 0); robo_rl collect --policy RUN records every episode"
                    )
                raise UserError(
                    f"the {expert_source(env)} succeeds in {found} of {of} episodes of {name}; {remedy}"
                )
    return tried


def expert_episodes(
    env, starts: np.ndarray, noise: float, rng: np.random.Generator, lead: Lead | None, views: Sequence[str]
) -> Iterator[Episode | None]:
    """Of each of the starts [N] what the expert did from where it took over and the cameras `views` saw, None
    where that was no success or `lead` came to the end."""
    n, kept = env.num_envs, lead is not None and lead.kept
    if lead is not None:
        env.images = True
    obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": starts})
    tasks = [str(t) for t in obs["task"]]
    rows: list[tuple] = []
    over, won, length, begin = (
        np.zeros(n, bool),
        np.zeros(n, bool),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
    )
    chunk, drawn = np.zeros((n, 1, 0)), NoiseAhead(rng)

    def noisy(actions: np.ndarray, wobble: np.ndarray) -> np.ndarray:
        return np.clip(actions + noise * wobble, -1, 1).astype(np.float32)

    if lead is not None:
        begin = rng.integers(0, lead.longest + 1, n)
    while not over.all():
        clean = np.asarray(env.expert_action(), np.float32)
        if hasattr(env, "decided") and (coming := env.decided()) is not None:
            steps = np.moveaxis(coming, 1, 0)
            told = [*map(noisy, steps, drawn.ahead(steps.shape))] if noise else list(steps)
            announce(env, np.stack(told, 1))
        act = noisy(clean, drawn.next(clean.shape)) if noise else clean
        led = begin > len(rows)
        if lead is not None and led.any():
            at = len(rows) % chunk.shape[1]
            if at == 0:
                chunk = lead.act(obs)
            act = np.where(led[:, None], np.clip(chunk[:, at], -1, 1), act)
        seen = {v: np.array(obs[f"image/{v}"]) for v in views}
        state = np.array(obs["state"])
        if lead is not None:  # pictures are for its next decision, and what is recorded
            due = (len(rows) + 1) % chunk.shape[1] == 0 and (begin > len(rows) + 1).any()
            env.images = bool(views) or bool(due)
        obs, reward, terminated, truncated, info = env.step(act)
        rows.append((state, np.where(led[:, None], act, clean) if kept else clean, np.array(reward), seen))
        length += ~over
        over, won = np.asarray(terminated | truncated), np.asarray(info["success"]).copy()
    shown = expert_source(env)
    for i in range(n):
        first = 0 if kept else int(begin[i])
        mine, ahead = rows[first : length[i]], int(begin[i]) - first
        yield (
            Episode(
                state=np.stack([r[0][i] for r in mine]),
                action=np.stack([r[1][i] for r in mine]),
                reward=np.array([r[2][i] for r in mine]),
                task=tasks[i],
                success=True,
                terminated=True,
                images={v: np.stack([r[3][v][i] for r in mine]) for v in views},
                source=["policy"] * ahead + [shown] * (len(mine) - ahead) if ahead else shown,
                start=int(starts[i]) if first == 0 else -1,
                final=np.array(obs["state"][i]),
                final_images={v: np.array(obs[f"image/{v}"][i]) for v in views},
            )
            if won[i] and len(mine) > ahead
            else None
        )


def expert_source(env) -> str:
    """Who the expert of an env is, as a data set says it: expert, the scripted one, or teacher, a policy."""
    return getattr(env, "expert_source", "expert")


def check_expert(env) -> None:
    """Raise UserError if the env has no scripted expert."""
    if not hasattr(env, "expert_action"):
        raise no_expert(f"{env.spec.sim}:{env.spec.task}", getattr(env, "expert_remedy", ""))


def load_demos(folder: "str | Path", env, label: str = ""):
    """A data set (`robo_rl.data.reader.Dataset`) with the commands of `env` for actions: a world model's env
    knows what recordings in the units of its data mean (`WorldEnv.in_commands`), and to an env whose actions
    have no names they are numbers of its Box (`in_box`). UserError: axes of the same names mean something
    else there (joint targets here, steps of joints there)."""
    from robo_rl.data.reader import load
    from robo_rl.data.writer import Writer

    data = load(folder, label=label)
    if hasattr(env, "in_commands"):
        return env.in_commands(data)
    if data.spec is None:
        told = getattr(env, "describes_task", False)
        return in_box(data, env.spec, told) if is_of_box(data.meta, env.spec) else data
    if data.spec.action_names != env.spec.action_names:
        return data
    if bad := Writer.spec_differences(env.spec, data.spec):
        raise UserError(f"data set {folder}: {bad[0]}. Take the --control that it was recorded with")
    return data


def is_of_box(meta, spec: ControlSpec) -> bool:
    """Whether the actions of a data set (`reader.Meta`) that others recorded are numbers of the env's Box: as
    many as the axes of `spec`, which has no names of its own for them."""
    named = tuple(f"action{i}" for i in range(len(spec.axes)))
    return (
        meta.spec is None
        and spec.action_names == named != meta.features.action
        and len(meta.features.action) == len(named)
    )


def in_box(data, spec: ControlSpec, told: bool):
    """The data set with commands of -1 to 1 for actions between the ends of the axes of `spec`, in their
    order; a warning says so. Unless the env is `told` to describe its task, the task's name takes the place
    of the instructions, as it does in the env's observations; of several another warning says that.
    UserError: more than BEYOND of the numbers of an axis lie outside these."""
    low, high = (np.array([getattr(a, end) for a in spec.axes], np.float64) for end in ("low", "high"))
    commands = to_commands(data.action, low, high)
    outside = (np.abs(commands) > 1 + BEYOND).mean(0)
    if outside.max() > BEYOND:
        i = int(outside.argmax())
        x = data.action[:, i]
        raise UserError(
            f"data set {data.meta.root}: action {data.features.action[i]!r} goes from {x.min():.3g} to "
            f"{x.max():.3g}, the action {i} of the env from {low[i]:.3g} to {high[i]:.3g}: these are other "
            "units, or another order; record it in the env's own"
        )
    within = ", ".join(f"{a:.6g} to {b:.6g}" for a, b in zip(low, high, strict=True))
    warnings.warn(
        f"data set {data.meta.root}: its actions ({', '.join(data.features.action)}) are taken for those of "
        f"the env, in this order and in its units ({within})",
        stacklevel=2,
    )
    meta = replace(data.meta, spec=spec, features=replace(data.features, action=spec.action_names))
    new = replace(data, action=np.clip(commands, -1, 1), meta=meta)
    if told:
        return new
    if len(data.tasks) > 1:
        warnings.warn(
            f"data set {data.meta.root}: its {len(data.tasks)} instructions are learnt as one, "
            f"{spec.task!r}: the env does not say which it wants; with an attribute task_description it does",
            stacklevel=2,
        )
    return as_task(new, spec.task)


def as_task(data, task: str):
    """The data set with one instruction, whatever it says."""
    meta = replace(data.meta, tasks=[task])
    return replace(data, meta=meta, task_index=np.zeros_like(data.task_index))


def check_fits(meta, spec: ObsSpec, data: DataOptions | None = None) -> None:
    """Raise UserError naming what of a data set (`reader.Meta`) does not fit the env's or the policy's
    `spec`."""
    from robo_rl.data.frames import choose_views

    where, f, data = f"data set {meta.root}", meta.features, data or DataOptions()
    sizes = {view: (h, w) for view, h, w in f.views}
    if data.cameras:
        sizes = {name: sizes[source] for name, source in choose_views(data.cameras, sizes).items()}
    if missing := set(spec.views) - set(sizes):
        raise UserError(
            f"{where} lacks the camera {', '.join(sorted(missing))} (it has {', '.join(sizes) or 'none'}); "
            "record it with --obs rgb, or say which is which: --data.cameras NAME=CAMERA,…"
        )
    if len(f.state) != spec.state or len(f.action) != spec.action:
        raise UserError(
            f"{where} has {len(f.state)} state and {len(f.action)} action numbers, the env has "
            f"{spec.state} and {spec.action}; "
            + (
                "it is in units of its own: learn from it without a simulator, --sim none --algo bc"
                if meta.spec is None
                else "record it with the same sim, task and control"
            )
        )
    if spec.action_names and f.action != spec.action_names:
        raise UserError(
            f"{where} has the action axes {', '.join(f.action)}, the env has "
            f"{', '.join(spec.action_names)}; record it with the same control"
        )
    for view in spec.views:
        if not (spec.fit or data.fit) and sizes[view] != (spec.image_size, spec.image_size):
            raise UserError(
                f"{where}: camera {view} is {sizes[view][0]} x {sizes[view][1]}, the env's is "
                f"{spec.image_size} x {spec.image_size}; set --image-size, or --data.fit pad to resize"
            )


def demo_sampler(
    dataset,
    spec: ObsSpec,
    horizon: int,
    data: DataOptions | None = None,
    tensors: "Callable[[dict[str, Any]], Obs] | None" = None,
    rows: np.ndarray | None = None,
    weight: "Callable[[Tensor], Tensor] | None" = None,
    drawn: Mapping[str, np.ndarray] | None = None,
    target: Tensor | None = None,
    decoded: "Callable[[int], None]" = lambda rows: None,
    more: Mapping[str, Tensor] | None = None,
) -> Demos:
    """Sampler of (obs, chunk[B,H,A], mask[B,H]) over all frames, or those of `rows`; UserError naming what
    does not fit.

    tensors: what a policy keeps of a raw observation (state, task, image/<view> uint8 as recorded); None:
    `obs_tensors`, with pictures as large as `spec` says. Pictures that do not fit the cache are decoded when
    their batch comes (`data.frames`).
    weight: frames int64 [B] -> what each counts, by which its mask is multiplied.
    drawn: the pictures of `rows`, in place of the data set's. target [F,H,X]: what is told of a frame in
    place of its chunk. decoded: hears how many frames are decoded, where all are before the first batch.
    more: what else is observed in every frame [F, ...]."""
    from robo_rl.data.reader import chunks

    data, recorded = data or DataOptions(), spec if drawn is None else replace(spec, views=())
    check_fits(dataset.meta, recorded, data)
    state, chunk, pad = (torch.from_numpy(np.ascontiguousarray(x)) for x in chunks(dataset, horizon))
    mask = (~pad).float()
    if target is not None:
        chunk, mask = target, torch.ones(target.shape[:2])
    store = frame_store(dataset, recorded, data, as_recorded=tensors is not None)
    where = torch.arange(len(chunk)) if rows is None else torch.from_numpy(np.asarray(rows))
    if store.fits and tensors is None:
        obs = {"state": state[where]}
        if spec.language:
            obs["tokens"] = torch.from_numpy(words_of(dataset.tasks, spec))[
                torch.from_numpy(dataset.task_index)[where]
            ]
        for view, pictures in store.all(decoded).items():
            obs[f"image/{view}"] = torch.from_numpy(pictures if rows is None else pictures[where])
        obs |= {f"image/{view}": torch.from_numpy(pictures) for view, pictures in (drawn or {}).items()}
        obs |= {key: x[where] for key, x in (more or {}).items()}
        return demos_sampler(
            obs, chunk[where], mask[where], None if weight is None else lambda chosen: weight(where[chosen])
        )
    kept, tasks = (
        partial(obs_tensors, spec=spec) if tensors is None else tensors,
        np.array(dataset.tasks, object),
    )

    def batch(at: np.ndarray, pictures: Mapping[str, np.ndarray]):
        raw = {"state": state[at].numpy(), "task": tasks[dataset.task_index[at]].tolist()}
        told = mask[at] if weight is None else mask[at] * weight(torch.from_numpy(at))[:, None]
        obs = kept(raw | {f"image/{view}": x for view, x in pictures.items()})
        return obs | {key: x[torch.from_numpy(at)] for key, x in (more or {}).items()}, chunk[at], told

    return _Stream(store, where.numpy(), batch)


def frame_store(dataset, spec: ObsSpec, data: DataOptions, as_recorded: bool = False):
    """The pictures that a policy of `spec` learns from: as large as it says, or as recorded where its
    processor changes them."""
    from robo_rl.data.frames import FrameStore, choose_views

    views = {v: source for v, source in choose_views(data.cameras, dataset.views).items() if v in spec.views}
    square = partial(_fitted, size=spec.image_size, how=spec.fit or data.fit or "pad")
    return FrameStore(
        dataset, views, None if as_recorded or spec.text else square, data.cache_mb << 20, data.threads
    )


def _fitted(images: np.ndarray, size: int, how) -> np.ndarray:
    return fit_bytes(torch.from_numpy(images), size, how).numpy()


class _Stream:
    """Batches drawn uniformly from `rows`, whose pictures are decoded ahead. Rows come from a generator of
    its own, seeded by the first draw from the caller's, so that they do not depend on how far ahead threads
    are."""

    def __init__(self, store, rows: np.ndarray, batch: Callable):
        self.store, self.rows, self.batch = store, rows, batch
        # by size of a batch: the batches, and [the seed, how many were taken]
        self.streams: dict[int, Iterator] = {}
        self.taken: dict[int, list[int]] = {}

    def __call__(self, size: int, generator: torch.Generator):
        if size not in self.streams:
            self._begin(size, int(torch.randint(0, 2**62, (), generator=generator)))
        self.taken[size][1] += 1
        return self.batch(*next(self.streams[size]))

    def _begin(self, size: int, seed: int, taken: int = 0) -> None:
        draws = self._draws(size, torch.Generator().manual_seed(seed))
        for _ in range(taken):
            next(draws)
        self.streams[size], self.taken[size] = self.store.ahead(draws), [seed, taken]

    def state_dict(self) -> dict[int, list[int]]:
        return {size: list(where) for size, where in self.taken.items()}

    def load_state_dict(self, state: dict[int, list[int]]) -> None:
        for size, (seed, taken) in state.items():
            self._begin(size, seed, taken)

    def _draws(self, size: int, own: torch.Generator) -> Iterator[np.ndarray]:
        while True:
            yield self.rows[torch.randint(0, len(self.rows), (size,), generator=own).numpy()]


STILL = 1e-6  # of its mean, at least 0.001: an axis that spreads no farther never moves


def fit_normalisers(policy, dataset, kind: str = "mean_std", rows: np.ndarray | None = None) -> None:
    """Statistics of the demonstrations into the policy: they travel in its checkpoint.

    Commands of -1 to 1 have a least std; in units of its own an axis has whatever range it has. There a state
    that never moves passes through, and an action that never moves stays what it was: an error of the policy
    would count in whole rad or m. kind: mean_std, or quantiles, min_max, whose ends become -1 and 1.
    """
    state, action = (x if rows is None else x[rows] for x in (dataset.state, dataset.action))
    processor: Any = getattr(policy, "processor", None)
    moved: dict[str, np.ndarray] = {}
    if processor is not None and processor.is_relative:
        moved = axis_statistics(dataset, processor.options.delta, policy.options.horizon, rows)["action"]
    own_kind = isinstance(policy.obs_norm, AxisNormaliser)  # of a vision-language-action model
    if dataset.spec is not None and (own_kind or kind == "mean_std"):
        policy.obs_norm.fit(torch.from_numpy(state))
        policy.action_norm.fit(torch.from_numpy(action), floor=0.05)
        return
    for norm, x in ((policy.obs_norm, state), (policy.action_norm, action)):
        acts = norm is policy.action_norm
        own = moved or _statistics(x.astype(np.float64)) if acts else _statistics(x.astype(np.float64))
        least = STILL * np.maximum(np.abs(own["mean"]), 1e-3)
        if isinstance(norm, AxisNormaliser):
            if pair := KINDS[norm.kind]:
                first, second = own[pair[0]], own[pair[1]]
                if acts:
                    second = np.maximum(second, least + (first if norm.offset else 0.0))
                norm.take(torch.from_numpy(first), torch.from_numpy(second))
            continue
        centre, spread = own["mean"], own["std"]
        if kind != "mean_std":
            low, high = (own[s] for s in KINDS[kind])
            centre, spread = (low + high) / 2, (high - low) / 2
        still = spread <= STILL * np.maximum(np.abs(centre), 1e-3)
        norm.take(
            torch.from_numpy(centre),
            torch.from_numpy(np.where(still, least if acts else 1.0, spread)),
            len(x),
        )


def axis_statistics(
    dataset, delta: Sequence[bool] = (), horizon: int = 1, rows: np.ndarray | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """Statistics of "state" [S] and "action" [A] over all frames, or `rows`: mean std min max q01 q99,
    exactly.

    delta: action axes that are taken relative to the state of the same number, over `horizon` steps from
    every frame (as openpi and LeRobot take them); the others are taken frame by frame.
    """
    from robo_rl.data.reader import chunks

    every = np.arange(len(dataset.action)) if rows is None else rows
    action = _statistics(dataset.action[every].astype(np.float64))
    if any(delta):
        state, chunk, pad = chunks(dataset, horizon)
        for i in np.flatnonzero(delta):
            moved = (chunk[every, :, i].astype(np.float64) - state[every, i, None])[~pad[every]]
            for s, x in _statistics(moved[:, None]).items():
                action[s][i] = x[0]
    return {"state": _statistics(dataset.state[every].astype(np.float64)), "action": action}


def _statistics(x: np.ndarray) -> dict[str, np.ndarray]:
    """[k] each, of [n,k]."""
    low, high = np.quantile(x, [0.01, 0.99], axis=0)
    return {"mean": x.mean(0), "std": x.std(0), "min": x.min(0), "max": x.max(0), "q01": low, "q99": high}
