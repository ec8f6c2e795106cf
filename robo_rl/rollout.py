"""Acting: a policy and a vector env in, decisions with everything learning needs out.

Axes: T decisions, N envs, E executed steps, F log-prob factors. An env that ends inside a chunk stays frozen
to the end of it; the observation it froze in is the true successor and is kept apart from the next episode's
first one.

A `Collector` writes every decision straight into a row of *columns* (NumPy arrays, time first): a plain
allocation, or a slot that other processes map. `rollout_of` turns the columns of one collector or of many
into one `Rollout`.
"""

import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.noise import mix, seed_noise
from robo_rl.policies import Chunk, Policy, obs_tensors
from robo_rl.policies.committed import ROWS, first_rows, first_waits, kept_rows, played, rows_to_come
from robo_rl.policies.context import COUNT
from robo_rl.policies.policy import Obs
from robo_rl.starts import Ended, StartChooser, StartSource

Columns = dict[str, np.ndarray]
Layout = dict[str, tuple[tuple[int, ...], np.dtype]]  # column -> shape of one decision's row, dtype
OBS, FINAL, TRACE, TREE = "obs/", "final/", "trace/", "tree/"  # prefixes of columns
# columns that stay as they were at the last decision
REPEATED = ("returns", "lengths", "success", "version", "start", "task_id", "group")


@dataclass(slots=True)
class Rollout:
    """The unit that is shipped and trained on.

    rewards[T,N] are discounted inside the chunk, `discounts` = gamma^(steps really executed) and 0 where
    terminated, `done` = terminated, truncated or cut where a person took over or let go, `mask` False where
    the env was already over, the decision was not made or a person acted.
    `final_obs` holds the successor observations of `done.nonzero()` in that order, `last_obs` those after
    decision T.
    """

    obs: Obs  # [T,N,...]
    trace: dict[str, Tensor]  # [T,N,F,...]
    x0: Tensor  # [T,N,H,A] clean chunk, normalised
    logp: Tensor  # [T,N,F]
    rewards: Tensor
    discounts: Tensor
    done: Tensor
    executed: Tensor  # int [T,N] control steps of the chunk that ran
    mask: Tensor
    version: Tensor  # int [T,N] weights that acted
    gains: Tensor  # [T,N] discounted return so far, gamma^E per decision (for reward scaling)
    outcome: Tensor  # [N] undiscounted return of the episode (whole-episode rollouts), else so far
    final_obs: Obs
    last_obs: Obs
    stats: dict[str, float]
    source: str = "policy"
    # int [T,N] start of the episode (robo_rl.starts), where a sampler chooses starts
    start: Tensor | None = None
    ended: Ended | None = None  # the episodes that ended, there too
    # [T,N] each, where episodes fork (robo_rl.runtime.branches)
    tree: dict[str, Tensor] = field(default_factory=dict)
    # int [T,N] group of the episode, where the sizes of groups are decided (robo_rl.runtime.planned)
    group: Tensor | None = None
    # bool [N] of the episode that ended; lengths int [N]: its control steps (whole episodes)
    success: Tensor | None = None
    lengths: Tensor | None = None
    cut: Tensor | None = None  # bool [T,N] of `done` what a person ended, where one may take over
    replayed: int = 0  # so many of the last columns were learnt from before (robo_rl.algos.rollout_replay)

    @property
    def fresh(self) -> slice:
        """The columns that were not learnt from before."""
        return slice(0, self.mask.shape[1] - self.replayed)


@dataclass(slots=True)
class Timer:
    """Seconds per stage since the last `take`."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def skip(self) -> None:
        self._last = time.perf_counter()

    def add(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        out, self.seconds = self.seconds, {}
        return out


def announce(env, actions: np.ndarray, lanes: np.ndarray | None = None) -> None:
    """Tell an env that can hear it which actions [N,E,A] come next in `lanes` bool[N] (None: in all)."""
    if actions.shape[1] > 1 and hasattr(env, "announce"):
        env.announce(actions, lanes)


def run_chunk(env, actions: np.ndarray, gamma: float):
    """Execute `actions[N,E,A]` -> (obs, reward[N] discounted, raw reward sum, terminated, truncated, success,
    steps[N]).

    `steps` counts the control steps an env really took. An env with a method `announce` hears of the chunk
    first. Images are made for the last step alone. Where a
    person may take over (`env.sources()`), the chunk ends before the first step in which somebody else acts
    than in its first one.
    """
    n, e, _ = actions.shape
    sources = env.sources if hasattr(env, "sources") else None
    first = sources() if sources else None
    reward, raw, scale = np.zeros(n, np.float64), np.zeros(n, np.float64), 1.0
    steps = np.zeros(n, np.int64)
    over = np.zeros(n, bool)
    announce(env, actions)
    for j in range(e):
        if j and sources and ((sources() != first) & ~over).any():
            break
        if e > 1 and not sources and hasattr(env, "images"):
            env.images = j == e - 1 or bool(over.all())
        obs, r, terminated, truncated, info = env.step(actions[:, j])
        steps += ~over
        r = as_array(r)
        reward += scale * r
        raw += r
        scale *= gamma
        over = as_array(terminated | truncated)
        if over.all() and j < e - 1 and (sources or not (hasattr(env, "images") and not env.images)):
            break
    return (
        obs,
        reward.astype(np.float32),
        raw,
        as_array(terminated),
        as_array(truncated),
        as_array(info["success"]),
        steps,
    )


@contextmanager
def torch_threads(count: int):
    """Torch on so many threads, and on as many as before at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def one_thread():
    """Torch on one thread. Products of a state policy are too small to share, and between them idle threads
    spin on the cores that the simulator wants."""
    return torch_threads(1)


def as_array(x) -> np.ndarray:
    """The numbers of an array, or of a tensor on any device, on the host."""
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def _dtype(x: Any) -> np.dtype:
    """NumPy's, also of a tensor that has no numbers."""
    return as_array(torch.empty(0, dtype=x.dtype) if isinstance(x, Tensor) else x).dtype


def to_policy(obs: Obs, policy: Policy) -> Obs:
    """Observations where the policy's weights are; as they are for one that has none, such as a script."""
    norm = getattr(policy, "action_norm", None)
    if norm is None:
        return obs
    there = norm.device
    # on the way back to the host a copy is waited for
    return {k: v.to(there, non_blocking=there.type != "cpu") for k, v in obs.items()}


# ---- columns -----------------------------------------------------------------------------------------------


def layout(policy: Policy, obs: Obs, explore: bool = True, chunk: Chunk | None = None) -> Layout:
    """The row of one decision of `policy` on observations [n,...], from acting once, or from the chunk that
    it then gave."""
    chunk = (
        policy.act(to_policy(obs, policy), torch.Generator().manual_seed(0), explore)
        if chunk is None
        else chunk
    )
    n = len(chunk.x0)
    rows = {OBS + k: v for k, v in obs.items()} | {FINAL + k: v for k, v in obs.items()}
    rows |= {TRACE + k: v for k, v in chunk.trace.items()} | {"x0": chunk.x0, "logp": chunk.logp}
    out = {k: (tuple(v.shape), _dtype(v)) for k, v in rows.items()}
    plain = {
        "rewards": np.float32,
        "discounts": np.float32,
        "done": bool,
        "mask": bool,
        "executed": np.int64,
        "success": bool,
        "returns": np.float64,
        "lengths": np.int64,
        "gains": np.float32,
        "version": np.int64,
    }
    return out | {k: ((n,), np.dtype(d)) for k, d in plain.items()}


def column_shape(name: str, row: tuple[int, ...], decisions: int) -> tuple[int, ...]:
    """Observations have one row more than decisions: the one after the last."""
    return (decisions + name.startswith(OBS), *row)


def new_columns(rows: Layout, decisions: int) -> Columns:
    """Unfilled columns for `decisions` decisions."""
    return {k: np.empty(column_shape(k, row, decisions), dtype) for k, (row, dtype) in rows.items()}


def _trimmed(c: Columns, made: int, t: int, n: int) -> Columns:
    """Columns with `made` decisions as ones with `t`: what was not made is masked out and earns an advantage
    of 0,

    for it stays in the last observation with reward 0 and discount 1.
    """
    if made == t:
        return {k: v[: t + k.startswith(OBS)] for k, v in c.items()}
    out = {}
    for k, v in c.items():
        extra = t - made
        if k.startswith(OBS):
            out[k] = np.concatenate([v[: made + 1], np.broadcast_to(v[made], (extra, *v.shape[1:]))])
        elif k in REPEATED:
            out[k] = np.concatenate([v[:made], np.broadcast_to(v[made - 1], (extra, *v.shape[1:]))])
        else:
            fill = 1 if k == "discounts" else 0
            out[k] = np.concatenate([v[:made], np.full((extra, *v.shape[1:]), fill, v.dtype)])
    return out


def rollout_of(parts: Sequence[tuple[Columns, int]]) -> Rollout:
    """Columns with the number of decisions made in each -> one rollout, env axes side by side.

    One whole part is not copied: the rollout then lives as long as its columns are left alone.
    """
    t = max(made for _, made in parts)
    pieces = [_trimmed(c, made, t, c["done"].shape[1]) for c, made in parts]

    def joined(name: str) -> np.ndarray:
        return pieces[0][name] if len(pieces) == 1 else np.concatenate([p[name] for p in pieces], 1)

    c = {k: joined(k) for k in pieces[0]}
    tensor = {k: torch.from_numpy(v) for k, v in c.items() if not k.startswith(FINAL)}
    ended = c["done"]
    over = ended & ~c["cut"] if "cut" in c else ended
    stats = {"episodes": float(over.sum()), "env_steps": float((c["executed"] * c["mask"]).sum())}
    if over.any():
        share = c[TREE + "weight"][over] if TREE + "weight" in c else None
        stats |= {
            name: float(np.average(c[column][over], weights=share))
            for name, column in (("success", "success"), ("return", "returns"), ("length", "lengths"))
        }
        if "start" in c and (stored := (c["start"][over] < 0).mean()):
            stats["stored"] = float(stored)

    ended_episodes = (
        Ended(*(c[k][over] for k in ("start", "task_id", "success", "returns", "lengths")))
        if "start" in c
        else None
    )

    def group(prefix: str, rows) -> dict[str, Tensor]:
        return {
            k[len(prefix) :]: rows(v)
            for k, v in (tensor if prefix != FINAL else c).items()
            if k.startswith(prefix)
        }

    return Rollout(
        obs=group(OBS, lambda v: v[:t]),
        last_obs=group(OBS, lambda v: v[t]),
        trace=group(TRACE, lambda v: v),
        final_obs=group(FINAL, lambda v: torch.from_numpy(v[ended])),
        x0=tensor["x0"],
        logp=tensor["logp"],
        rewards=tensor["rewards"],
        discounts=tensor["discounts"],
        done=tensor["done"],
        executed=tensor["executed"],
        mask=tensor["mask"],
        version=tensor["version"],
        gains=tensor["gains"],
        outcome=tensor["returns"][-1].float(),
        stats=stats,
        start=tensor.get("start"),
        ended=ended_episodes,
        tree=group(TREE, lambda v: v),
        group=tensor.get("group"),
        cut=tensor.get("cut"),
        success=torch.from_numpy((c["success"] & over).any(0)),
        lengths=tensor["lengths"][-1],
    )


def think(
    policy: Policy, parts: "Sequence[tuple[Columns, int]]", generator, version: int = 0, explore: bool = True
) -> list[np.ndarray]:
    """Decide on the observations in row t of each part, in one batch, and write the decisions there ->
    actions [n,E,A].

    `generator` draws for all rows, or is a list with one (generator, rows) per part.
    """
    obs = {
        k[len(OBS) :]: torch.from_numpy(
            parts[0][0][k][parts[0][1]] if len(parts) == 1 else np.concatenate([c[k][t] for c, t in parts])
        )
        for k in parts[0][0]
        if k.startswith(OBS)
    }
    chunk = policy.act(to_policy(obs, policy), generator, explore)
    rows = {TRACE + k: as_array(v) for k, v in chunk.trace.items()} | {
        "x0": as_array(chunk.x0),
        "logp": as_array(chunk.logp),
    }
    actions, at, out = as_array(chunk.actions), 0, []
    for c, t in parts:
        n = c["done"].shape[1]
        for k, v in rows.items():
            c[k][t] = v[at : at + n]
        c["version"][t] = version
        out.append(actions[at : at + n])
        at += n
    return out


# ---- collecting --------------------------------------------------------------------------------------------


class Collector:
    """Keeps a vector env going; the only owner of its episode statistics.

    The noise of decision i of lane l is drawn from (seed, l, i) alone: whoever makes it again makes the same
    one. `starts` says where episodes begin; None: the env draws its own starts.
    """

    def __init__(
        self, env, policy: Policy, gamma: float, seed: int, lane: int = 0, starts: StartSource | None = None
    ):
        self.env, self.gamma, self.seed, self.lane = env, gamma, seed, lane
        self.spec, self.execute, self.options = policy.spec, policy.options.execute, policy.options
        self.late = self.options.commit_least > 0  # the policy decides while its last chunk runs
        self.timer, self.generator = Timer(), torch.Generator()
        self.n, self.decision = env.num_envs, 0
        own = seed if lane == 0 else mix(seed, lane) >> 32
        raw, _ = env.reset(seed=own)
        self.chooser = None if starts is None else StartChooser(env, starts, own)
        if self.chooser is not None:
            raw = self.chooser.next(np.ones(self.n, bool))
        waits = first_waits(self.options, [mix(own, i) for i in range(self.n)]) if self.late else np.zeros(0)
        self.obs = self._read(raw, first_rows(self.options, self.spec.action, waits))
        self.returns, self.lengths = np.zeros(self.n), np.zeros(self.n, np.int64)
        self.alive, self.gains = np.ones(self.n, bool), np.zeros(self.n, np.float32)
        self._layouts: dict[bool, Layout] = {}
        self.watched = hasattr(env, "sources")  # a person may take over
        self.sources: Any = env.sources if self.watched else None

    def _read(self, raw: dict, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`given`: what a policy that decides while its last chunk runs is told of that."""
        obs = {k: as_array(v) for k, v in obs_tensors(raw, self.spec).items()}
        return obs | given if self.late else obs

    def layout(self, policy: Policy, explore: bool = True) -> Layout:
        """Rows of this collector's columns."""
        if explore not in self._layouts:
            self._layouts[explore] = layout(
                policy, {k: torch.from_numpy(v) for k, v in self.obs.items()}, explore
            )
            if self.watched:
                self._layouts[explore] |= {"cut": ((self.n,), np.dtype(bool))}
            if self.chooser is not None:
                self._layouts[explore] |= {k: ((self.n,), np.dtype(np.int64)) for k in ("start", "task_id")}
        return self._layouts[explore]

    def begin(self, starts: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Start one episode per env (of those in `mask`) from `starts[N]`."""
        mask = np.ones(self.n, bool) if mask is None else mask
        raw = (
            self.env.reset(options={"reset_mask": mask, "starts": starts})[0]
            if self.chooser is None
            else self.chooser.begin(starts, mask)
        )
        self.obs = self._read(
            raw, kept_rows(self.obs, ~mask, first_waits(self.options, starts)) if self.late else {}
        )
        self.returns[mask], self.lengths[mask], self.gains[mask] = 0, 0, 0
        self.alive = self.alive | mask

    def decide(
        self,
        policy: Policy,
        columns: Columns,
        t: int,
        version: int = 0,
        explore: bool = True,
        whole: bool = False,
    ) -> None:
        """One decision in every env, into row t of the columns; `whole` leaves an env that is over as it
        is."""
        seed_noise(self.generator, self.observe(columns, t))
        (actions,) = think(policy, [(columns, t)], self.generator, version, explore)
        self.timer.add("policy")
        self.act(actions, columns, t, whole)

    def observe(self, columns: Columns, t: int) -> int:
        """Write the observation of decision t -> the key of its noise."""
        for k, v in self.obs.items():
            columns[OBS + k][t] = v
        if self.chooser is not None:
            columns["start"][t], columns["task_id"][t] = self.chooser.starts, self.chooser.tasks
        self.timer.skip()
        return mix(self.seed, self.lane, self.decision)

    def act(
        self,
        actions: np.ndarray,
        columns: Columns,
        t: int,
        whole: bool = False,
        known: np.ndarray | None = None,
    ) -> None:
        """Execute `actions[N,E,A]` and write what came of it into row t; `known` [N]: starts of the episodes
        that begin after it."""
        helped = self.sources() if self.watched else None
        actions = played(actions, columns[OBS + COUNT][t]) if self.late else actions
        raw, reward, gain, terminated, truncated, success, steps = run_chunk(self.env, actions, self.gamma)
        alive = self.alive
        done = (terminated | truncated) & alive
        self.returns += gain * alive
        self.lengths += steps * alive
        self.gains = self.gains * np.float32(self.gamma**self.execute) + reward * alive
        c = columns
        c["rewards"][t], c["done"][t], c["mask"][t] = reward * alive, done, alive
        c["discounts"][t], c["executed"][t] = np.where(terminated, 0, self.gamma**steps), steps
        c["success"][t], c["returns"][t], c["lengths"][t] = success, self.returns, self.lengths
        c["gains"][t] = self.gains
        # not times 0: a number that is not finite ends with its episode
        self.gains = np.where(done, np.float32(0), self.gains)
        self.obs = self._read(
            raw,
            rows_to_come(self.options, c["x0"][t], c[TRACE + ROWS][t], c[OBS + COUNT][t])
            if self.late
            else {},
        )
        if self.watched:  # what a person did is not the policy's to learn from, nor what came of it
            c["mask"][t] &= helped == 0
            c["cut"][t] = alive & ~done & (self.sources() != helped)
            c["done"][t] |= c["cut"][t]
        ended = c["done"][t]
        if ended.any():
            for k, v in self.obs.items():
                c[FINAL + k][t][ended] = v[ended]
        if done.any():
            if whole:
                self.alive = alive & ~done
            else:
                self.returns[done], self.lengths[done] = 0, 0
                raw = (
                    self.env.reset(options={"reset_mask": done})[0]
                    if self.chooser is None
                    else self.chooser.next(done, known)
                )
                self.obs = self._read(raw, kept_rows(self.obs, ~done, self.obs[COUNT]) if self.late else {})
        for k, v in self.obs.items():
            c[OBS + k][t + 1] = v
        self.decision += 1
        self.timer.add("sim")

    def threads(self):
        """The context to act in."""
        return nullcontext() if self.spec.views else one_thread()

    def collect(self, policy: Policy, decisions: int, version: int = 0, explore: bool = True) -> Rollout:
        """T decisions in every env; envs that end start anew at once."""
        columns = new_columns(self.layout(policy, explore), decisions)
        with self.threads():
            for t in range(decisions):
                self.decide(policy, columns, t, version, explore)
        return rollout_of([(columns, decisions)])

    def episodes(self, policy: Policy, starts: np.ndarray, version: int = 0, explore: bool = True) -> Rollout:
        """One whole episode per env from `starts[N]`; decisions after its end are masked out."""
        self.begin(starts)
        columns, made = new_columns(self.layout(policy, explore), self.longest()), 0
        with self.threads():
            while made < self.longest() and self.alive.any():
                self.decide(policy, columns, made, version, explore, whole=True)
                made += 1
        self.alive[:] = True
        return rollout_of([({k: v[: made + k.startswith(OBS)] for k, v in columns.items()}, made)])

    def longest(self) -> int:
        """Decisions of the longest episode."""
        return -(-self.env.spec.max_steps // self.execute)

    def state(self) -> dict:
        """Everything needed to go on exactly, or {} where the env cannot be snapshotted."""
        if not hasattr(self.env, "get_state"):
            return {}
        return {
            "env": self.env.get_state(),
            "obs": {k: v.copy() for k, v in self.obs.items()},
            "returns": self.returns.copy(),
            "lengths": self.lengths.copy(),
            "alive": self.alive.copy(),
            "gains": self.gains.copy(),
            "decision": self.decision,
            "seed": self.seed,
            "lane": self.lane,
            "starts": None if self.chooser is None else self.chooser.state(),
            "outcomes": self.env.outcomes() if hasattr(self.env, "outcomes") else None,
        }

    def set_state(self, state: dict) -> None:
        self.env.set_state(state["env"])
        if state.get("outcomes") is not None:
            self.env.set_outcomes(state["outcomes"])
        self.obs = {k: np.array(v) for k, v in state["obs"].items()}
        self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
        self.alive, self.gains = np.array(state["alive"]), np.array(state["gains"])
        self.decision, self.seed, self.lane = state["decision"], state["seed"], state["lane"]
        if self.chooser is not None:
            self.chooser.set_state(state["starts"])
