"""A world model as a vector env under the contract of `sims.check`: batch reset to recorded frames, stepping,
forking.

An episode ends as the recorded ones did: terminated by success (or by the model's own end), truncated at its
time limit. It is also truncated where the model does not know: uncertainty above its calibrated threshold, or
a number that is not finite (the last finite observation stays). `info` of a step: success bool[N],
uncertainty float32[N], cut bool[N] (an episode that ended for lack of knowledge).

A start id decides the frame an episode begins from and all randomness in it. Ids from 2^31 on, which
evaluation uses, begin from held-out episodes, the others from those that were trained on. Where there are
enough held-out ones, the best checkpoint is chosen on one half of them and reported on the other.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError, quoted
from robo_rl.starts import CHOOSE, EVAL_START, REPORT, SPLIT, StartStream, hashed, list_of
from world_models import judge as judges
from world_models import model as worlds
from world_models.announced import AnnouncedSteps
from world_models.imagine import due, is_lost
from world_models.instructions import check_known
from world_models.judge_protocol import Clips
from world_models.model import Frames, WorldModel
from world_models.options import PICTURED
from world_models.own_units import as_commands, translate
from world_models.tasks import Difficulty
from world_models.windows import units_differ


def held_frames(frames: Frames, which: int = REPORT) -> np.ndarray:
    """int64[n]: first frames of held-out episodes, of all where none is held out, that the starts of list
    `which` begin from. From SPLIT of them on CHOOSE has every second one of each instruction, and the other
    lists have the others; the only one of an instruction is in both."""
    pool = np.flatnonzero(frames.first & frames.held)
    if not len(pool):
        return np.flatnonzero(frames.first)
    if len(pool) < SPLIT:
        return pool
    task = frames.task[pool]
    _, kind, count = np.unique(task, return_inverse=True, return_counts=True)
    turn = np.empty(len(pool), np.int64)  # of a frame among those of its instruction
    turn[np.argsort(kind, kind="stable")] = np.arange(len(pool)) - np.repeat(count.cumsum() - count, count)
    alone = count[kind] == 1
    return pool[(turn % 2 == int(which != CHOOSE)) | alone]


def frame_of(frames: Frames, starts: np.ndarray) -> np.ndarray:
    """int64[n]: the frame that each start id begins from, a first frame of an episode. Ids of evaluation take
    those of `held_frames` in turn, so that a list of starts has each as often as the others."""
    out, ours = np.zeros(len(starts), np.int64), starts < EVAL_START
    pool = np.flatnonzero(frames.first & ~frames.held)
    pool = pool if len(pool) else np.flatnonzero(frames.first)
    out[ours] = pool[(hashed(starts[ours], 2) % len(pool)).astype(np.int64)]
    chooses = list_of(starts) == CHOOSE
    for which, mine in ((CHOOSE, ~ours & chooses), (REPORT, ~ours & ~chooses)):
        if mine.any():
            pool = held_frames(frames, which)
            out[mine] = pool[(starts[mine] - EVAL_START) % len(pool)]
    return out


class WorldEnv(ControlEnv):
    """N episodes inside `model`; see the module. `judge` says whether a step succeeded (None: the model's own
    head);
    max_steps 0: the recorded limit, as far as the model is calibrated. With `difficulty` a start id decides
    an episode only as long as no other ends: it draws frames by what came of them."""

    def __init__(
        self,
        model: WorldModel,
        num_envs: int,
        judge: "judges.SuccessJudge | None" = None,
        max_steps: int = 0,
        render: bool = False,
        difficulty: Difficulty | None = None,
    ):
        n, spec = num_envs, model.spec
        if not spec.horizon:
            raise UserError(
                "this world model is not calibrated, or no better than a world that stands still: train it "
                "on more episodes: robo_rl wm train DATASET"
            )
        if max_steps > spec.horizon:
            raise UserError(
                f"--max-steps must be at most {spec.horizon}, the calibrated horizon of this world model, "
                f"got {max_steps}; for more train it longer, or on more and longer episodes"
            )
        self.model, self.num_envs, self.judge, self.difficulty = model, n, judge or judges.Head(), difficulty
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array" if render else None
        if render and not spec.control.views:
            raise UserError("this world model predicts states alone; there is nothing to render")
        control = spec.control
        self.spec = type(control)(
            **{k: getattr(control, k) for k in control.__slots__}
            | {"sim": f"wm:{control.sim}", "max_steps": spec.steps(max_steps)}
        )
        self.single_observation_space, self.observation_space = observation_spaces(
            spec.state, n, control.views, spec.image_size or 64
        )
        self.single_action_space, self.action_space = action_spaces(spec.action, n)
        self.words = np.array(spec.tasks)
        self.stream = StartStream(n)
        self.starts, self.steps, self.task, self.frame, self.born = (np.zeros(n, np.int64) for _ in range(5))
        self.terminated, self.truncated, self.success, self.ready = (np.zeros(n, bool) for _ in range(4))
        self.uncertainty = np.zeros(n, np.float32)
        self.carry: worlds.Carry = {}  # of a lane within what was announced: that before it
        self.seen = {k: np.zeros(s.shape or (), s.dtype) for k, s in self.observation_space.spaces.items()}
        self.clips = Clips(self.judge, self.seen)
        # False: where the model can step without drawing, pictures stay until a step with True
        self.images = True
        self.lazy, self.stale = (
            hasattr(model, "look") and isinstance(self.judge, judges.Head),
            np.zeros(n, bool),
        )
        listens = bool(control.views) and not self.lazy and not hasattr(model, "first")
        self.announced = AnnouncedSteps(n, spec.action, listens)

    def __repr__(self) -> str:
        return f"WorldEnv({self.spec.id!r}, num_envs={self.num_envs})"

    # ---- the contract

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs, self.ready)
        ids, starts = self.stream.due(seed, mask, starts)
        if len(ids):
            self._begin(ids, starts)
        return self._obs(), {"success": self.success.copy()}

    def _begin(self, ids: np.ndarray, starts: np.ndarray) -> None:
        # it makes its own first observations
        if first := getattr(self.model, "first", None):
            obs, task = first(starts)
        else:
            at = frame_of(self.model.frames, starts)
            if self.difficulty is not None:
                pool = np.flatnonzero(self.model.frames.first & ~self.model.frames.held)
                at = np.where(starts < EVAL_START, self.difficulty.pick(at, starts, pool), at)
            self.frame[ids], self.born[ids] = at, 0 if self.difficulty is None else self.difficulty.born[at]
            obs, task = {k: v[at] for k, v in self.model.frames.obs.items()}, self.model.frames.task[at]
        rows = torch.from_numpy(ids)
        for k, v in self.model.start(obs | {"task": self.words[task]}, starts).items():
            if k not in self.carry:
                self.carry[k] = v.new_zeros((self.num_envs, *v.shape[1:]))
            self.carry[k] = self.carry[k].index_copy(0, rows, v)
        self.seen = {k: _put(v, ids, obs[k]) for k, v in self.seen.items()}
        self.clips.begin(ids, {k: obs[k] for k in self.seen})
        self.announced.clear(np.isin(np.arange(self.num_envs), ids))
        self.task[ids], self.starts[ids], self.steps[ids] = task, starts, 0
        for flags in (self.terminated, self.truncated, self.success):
            flags[ids] = False
        self.uncertainty[ids], self.ready[ids], self.stale[ids] = 0, True, False

    def announce(self, actions: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Say which actions [N,E,A] the next steps will bring, of the envs in `lanes` bool[N] (None: of all).
        A model that makes several frames at once then makes them of all of these, as it does where it is
        calibrated and measured, and once, not at every step. Steps with other actions are made one by
        one."""
        if not self.ready.all() or not self.announced.listens:
            return
        lanes = np.ones(self.num_envs, bool) if lanes is None else lanes
        rows = [read_actions(a, self.num_envs, self.model.spec.action) for a in np.moveaxis(actions, 1, 0)]
        self._settle(lanes)
        self.announced.announce(np.stack(rows, 1), lanes)

    def _settle(self, lanes: np.ndarray) -> None:
        """Forget what was announced in `lanes` and not made: episodes that go on do so from what was."""
        alive = ~(self.terminated | self.truncated)
        self.carry = self.announced.settled(self.model, self.carry, lanes & alive)
        self.announced.clear(lanes)

    def _keep(self, carry: worlds.Carry, rows: np.ndarray) -> None:
        """Go on from `carry` in the lanes bool[N]."""
        if not rows.any():
            return
        keep = torch.from_numpy(rows)
        self.carry = {
            k: torch.where(keep.view(-1, *[1] * (v.dim() - 1)), v, self.carry[k]) for k, v in carry.items()
        }

    def step(self, actions):
        if not self.ready.all():
            raise UserError("call reset() before step()")
        actions = read_actions(actions, self.num_envs, self.model.spec.action)
        alive = ~(self.terminated | self.truncated)
        self._settle(self.announced.strays(actions))
        carry, ended, p = self.announced.step(
            self.model, self.carry, actions, {"draw": False} if self.lazy else {}
        )
        obs, before = {k: v[:, 0].numpy() for k, v in p.obs.items()}, self.seen
        reward, terminal, chance, unsure = (
            x[:, 0].numpy() for x in (p.reward, p.terminal, p.success, p.uncertainty)
        )
        sound = (
            np.isfinite(obs["state"]).all(1)
            & np.isfinite(reward)
            & np.isfinite(unsure)
            & np.isfinite(chance + terminal)
        )
        known = alive & sound
        self._keep(carry, known & ended)
        self.seen = {
            k: np.where(known.reshape(-1, *[1] * (v.ndim - 1)), obs[k], v).astype(v.dtype) if k in obs else v
            for k, v in self.seen.items()
        }
        self._look(known)
        self.clips.add(before, np.where(alive, self.steps, 0))
        self.steps += alive
        self.uncertainty = np.where(known, unsure, self.uncertainty).astype(np.float32)
        late = alive & (self.steps >= self.spec.max_steps)
        spec = self.model.spec
        last = late | (terminal > 0.5) | (self.uncertainty > spec.threshold)
        won = self._judge(known & due(self.judge, self.steps, last), before, actions, chance)
        self.success |= won
        self.terminated |= (won & spec.ends_on_success) | (known & is_lost(spec, terminal, chance))
        cut = alive & ~self.terminated & ((self.uncertainty > spec.threshold) | ~sound)
        self.truncated |= cut | (late & ~self.terminated)
        if self.difficulty is not None:
            ended = np.flatnonzero(
                alive & (self.terminated | self.truncated) & ~cut & (self.starts < EVAL_START)
            )
            self.difficulty.update(self.frame[ended], self.success[ended], self.born[ended])
        paid = won.astype(np.float32) if spec.sparse else np.where(known, reward, 0).astype(np.float32)
        return (
            self._obs(),
            paid,
            self.terminated.copy(),
            self.truncated.copy(),
            {"success": self.success.copy(), "uncertainty": self.uncertainty.copy(), "cut": cut},
        )

    def _look(self, moved: np.ndarray) -> None:
        """Pictures of the lanes that moved and of those whose pictures are old, where the step drew none."""
        if not self.lazy:
            return
        self.stale |= moved
        if self.images and self.stale.any():
            ids = np.flatnonzero(self.stale)
            model: Any = self.model  # that it has a `look` makes it lazy
            drawn = model.look({k: v[torch.from_numpy(ids)] for k, v in self.carry.items()})
            for k, v in drawn.items():
                self.seen[k][ids] = v.numpy()
            self.stale[:] = False

    def _judge(self, asked: np.ndarray, before: dict, actions: np.ndarray, chance: np.ndarray) -> np.ndarray:
        """bool[N]: which of the steps that the judge is asked about succeeded."""
        rows = np.flatnonzero(asked)
        won = np.zeros(self.num_envs, bool)
        if len(rows):
            won[rows] = (
                self.judge(
                    judges.Seen(
                        {k: v[rows] for k, v in before.items()},
                        {k: v[rows] for k, v in self.seen.items()},
                        self.words[self.task[rows]],
                        actions[rows],
                        chance[rows],
                        self.clips.of(rows, self.seen),
                    )
                )
                > 0.5
            )
        return won

    def _obs(self) -> dict[str, np.ndarray]:
        return {k: v.copy() for k, v in self.seen.items()} | {"task": self.words[self.task]}

    def translate(self, policy):
        """`own_units.translate` of the model: what `robo_rl.evaluation.evaluate` shows a policy, and makes of
        its actions."""
        return translate(policy, self.model.spec)

    def origins(self, starts: np.ndarray) -> np.ndarray | None:
        """int64[n]: the recorded frame that the episode of each start id begins from; None: each is of its
        own."""
        return None if hasattr(self.model, "first") else frame_of(self.model.frames, starts)

    def cuts(self) -> np.ndarray:
        """bool[N]: the episode ended because the model no longer knew."""
        doubt = self.uncertainty > self.model.spec.threshold
        return self.truncated & (doubt | (self.steps < self.spec.max_steps))

    def in_commands(self, data):
        """A data set whose actions are in the units of what the model learnt from, in its commands.
        UserError: they are in others, or it has an instruction that the model was never taught."""
        spec = self.model.spec
        check_known(spec.tasks, (data.task(e) for e in range(len(data))), str(data.meta.root))
        told = as_commands([data], spec.control.axes)[0] if spec.own else data
        if told is not data and (bad := units_differ(spec.control.axes, told.spec.axes)):
            remedy = "give demonstrations in the units of what the model learnt from"
            raise UserError(f"data set {data.meta.root}: {bad[0]}; {remedy}")
        return told

    # ---- fork, rewind, show

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything an episode depends on, one row per env; copies."""
        mine = {"seeds": self.stream.seeds, "episodes": self.stream.episodes} | {
            k: getattr(self, k) for k in FIELDS
        }
        return (
            {k: v.copy() for k, v in mine.items()}
            | {f"obs/{k}": v.copy() for k, v in self.seen.items()}
            | {f"clip/{k}": v.copy() for k, v in self.clips.kept.items()}
            | {f"carry/{k}": v.numpy().copy() for k, v in self.carry.items()}
            | {ANNOUNCED + k: v for k, v in self.announced.state().items()}
        )

    def set_state(self, state: dict[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        """Put back rows of `get_state()`, only those of `mask`."""
        n = self.num_envs
        mask = np.ones(n, bool) if mask is None else np.asarray(mask)
        if mask.shape != (n,) or mask.dtype != bool:
            raise UserError(f"mask must be bool of shape ({n},), got {mask.dtype} of shape {mask.shape}")
        state = {"born": np.zeros(n, np.int64)} | state  # states of before have none
        for k in ("seeds", "episodes", *FIELDS):
            if k not in state or np.shape(state[k]) != (n,):
                raise UserError(f"set_state needs {k!r} of shape ({n},): pass what get_state() returned")
        ids, rows = np.flatnonzero(mask), torch.from_numpy(np.flatnonzero(mask))
        self.stream.seeds[mask], self.stream.episodes[mask] = state["seeds"][mask], state["episodes"][mask]
        for k in FIELDS:
            getattr(self, k)[mask] = state[k][mask]
        self.seen = {k: _put(v, ids, state[f"obs/{k}"][ids]) for k, v in self.seen.items()}
        for k, v in self.clips.kept.items():
            v[mask] = state[f"clip/{k}"][mask]
        for name, v in state.items():
            if name.startswith("carry/"):
                k, new = name[6:], torch.from_numpy(np.array(v))
                old = self.carry.get(k, torch.zeros_like(new))
                self.carry[k] = old.index_copy(0, rows, new[rows])
        told = {k[len(ANNOUNCED) :]: v for k, v in state.items() if k.startswith(ANNOUNCED)}
        self.announced.set_state(told, mask)
        self.ready |= mask

    def outcomes(self) -> dict | None:
        """What is known of starts by the episodes that ended, beside every env's own state; None where
        nothing is kept."""
        return None if self.difficulty is None else self.difficulty.state_dict()

    def set_outcomes(self, state: dict) -> None:
        """Go on from `outcomes()`."""
        if self.difficulty is not None:
            self.difficulty.load_state_dict(state)

    def render(self):
        """uint8 [N,h,w,3]: the first view; needs render=True."""
        if self.render_mode is None:
            raise UserError("render() needs an env made with render=True")
        if not self.ready.all():
            raise UserError("call reset() before render()")
        return self.seen[f"image/{self.spec.views[0]}"].copy()


ANNOUNCED = "announced/"  # prefix in snapshots
FIELDS = (
    "starts",
    "steps",
    "task",
    "frame",
    "born",
    "terminated",
    "truncated",
    "success",
    "uncertainty",
    "stale",
)


def _put(x: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = x.copy()
    out[ids] = rows
    return out


def make_world(
    path: str,
    task: str,
    num_envs: int,
    *,
    judge: str = "",
    obs: str = "state",
    reward: str = "",
    control: str = "",
    image_size: int = 64,
    threads: int = 0,
    max_steps: int = 0,
    randomise: str = "",
    render: bool = False,
    device: str = "cpu",
    hard: float = 0.0,
) -> WorldEnv:
    """The env of `--sim wm:PATH`; what else a simulator can be told must be what was recorded, or "" (0
    pixels) for it. `hard`: share of the episodes, but those of evaluation, that begin where success is
    open."""
    if num_envs < 1:
        raise UserError(f"num_envs must be >= 1, got {num_envs}")
    model = worlds.load(path, device)
    spec = model.spec
    recorded = "rgb" if spec.control.views else "state"
    if task not in ("", spec.control.task):
        raise UserError(
            f"the world model {path} is of the task {spec.control.task}, not of {task}: in it acts what "
            f"learnt in it (robo_rl train --sim wm:{quoted(path)}) or, without a simulator, from "
            "recordings of its "
            f"task (--sim none); a model of {task} learns from recordings of {task} (robo_rl wm train)"
        )
    if obs and obs != recorded:
        kinds = "latent" if obs == "state" else f"{', '.join(PICTURED[:-1])} or {PICTURED[-1]}"
        raise UserError(
            f"the world model {path} predicts {recorded} observations, not --obs {obs}: what acts in it "
            f"has --obs {recorded}; policies of --obs {obs} act in models of --kind {kinds}"
        )
    if recorded == "rgb" and image_size and image_size != spec.image_size:
        raise UserError(
            f"the world model {path} predicts images of {spec.image_size} pixels, not --image-size "
            f"{image_size}: what acts in it has --image-size {spec.image_size}"
        )
    if reward and (reward == "sparse") != spec.sparse:
        raise UserError(
            f"the world model {path} learnt a {'sparse' if spec.sparse else 'dense'} reward, got --reward "
            f"{reward}"
        )
    if randomise or control:
        raise UserError(
            f"a world model has the dynamics and the control that were recorded; leave out "
            f"{'--randomise' if randomise else '--control'}"
        )
    difficulty = None
    if hard:
        from world_models.text_tasks import difficulty_of

        difficulty = difficulty_of(model, hard)
    who = judges.make(judge) if judge else None
    if (server := getattr(who, "server", None)) is not None:
        server.check()
    return WorldEnv(model, num_envs, who, max_steps, render, difficulty)
