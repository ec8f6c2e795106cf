"""Recorded episodes as arrays, the held-out part of them, and the checks a model asks of its data. NumPy
alone."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from robo_rl.errors import UserError, quoted
from robo_rl.types import ActionAxis, ControlSpec
from world_models.instructions import listed
from world_models.model import Frames, WorldSpec
from world_models.windows import units_differ

LEAST_EPISODES, LEAST_FRAMES = 10, 200
HELD = 10  # one episode in so many is held out
STATISTICS = 2048  # rows that statistics of pictures are taken of


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """Pictures uint8[R,h,w,3] by row: of `frames` [F,h,w,3], or of those after the last action, `last`
    [E,h,w,3], where `at` int64[R] is -1 - e. What is asked for is put together then: a copy of all would take
    their memory again."""

    frames: np.ndarray
    last: np.ndarray
    at: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.at), *self.frames.shape[1:]

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        at = self.at[rows]
        out, after = self.frames[at.clip(0)], at < 0
        out[after] = self.last[-1 - at[after]]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """E episodes of F frames in all: what was observed, the action then executed and its reward.

    state float32[F,S], action float32[F,A], reward float32[F]; episode e owns rows first[e] .. end[e]-1;
    success and terminated bool[E]; task int64[E] into `tasks`; images {view: uint8[F,h,w,3]}. What was
    observed after an episode's last action: final float32[E,S], nan where it was not recorded, and
    final_images {view: uint8[E,h,w,3]} where pictured bool[E] (None: nowhere). shapes: (h, w) of each view
    before it was padded to a square; () where none was.
    own: the actions were recorded in the robot's own units, and are commands now.
    before: int8[E], what a model that is gone on with did with each episode: it learnt from it (0), held it
    out (1), did not have it (-1).
    """

    state: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    first: np.ndarray
    end: np.ndarray
    success: np.ndarray
    terminated: np.ndarray
    task: np.ndarray
    tasks: tuple[str, ...]
    control: ControlSpec
    images: Mapping[str, np.ndarray | PictureRows]
    final: np.ndarray
    final_images: Mapping[str, np.ndarray] = field(default_factory=dict)
    pictured: np.ndarray | None = None
    shapes: tuple[tuple[int, int], ...] = ()
    own: bool = False
    before: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.first)

    @property
    def lengths(self) -> np.ndarray:
        return self.end - self.first

    @property
    def after(self) -> np.ndarray:
        """float32[F,S]: the state after every action, nan where it is not recorded."""
        out = np.roll(self.state, -1, 0)
        out[self.end - 1] = self.final
        return out

    @property
    def events(self) -> np.ndarray:
        """float32[F,2]: whether the step succeeded, and whether it ended its episode by the task's own
        rule."""
        out = np.zeros((len(self.state), 2), np.float32)
        out[self.end[self.success] - 1, 0] = 1
        out[self.end[self.terminated] - 1, 1] = 1
        return out

    @property
    def known(self) -> np.ndarray:
        """bool[E]: everything that was observed after the last action is recorded."""
        pictured = np.zeros(len(self), bool) if self.pictured is None else self.pictured
        return np.isfinite(self.final).all(1) & (pictured | (not self.images))

    def extended(self) -> "tuple[Recorded, np.ndarray]":
        """(the recording with one more row per episode, for what was observed after its last action; int64[F]
        the rows that are steps). Row r + 1 of its states and pictures is what came of step r, also of the
        last one: where that was not recorded (`known`), what was observed before it stands there. Actions and
        rewards of such rows are 0.
        """
        steps = np.arange(len(self.state)) + np.repeat(np.arange(len(self)), self.lengths)
        last, known = self.end + np.arange(len(self)), self.known

        def longer(x: np.ndarray, at_end: np.ndarray | float) -> np.ndarray:
            out = np.zeros((len(x) + len(self), *x.shape[1:]), x.dtype)
            out[steps], out[last] = x, at_end
            return out

        at = longer(np.arange(len(self.state)), np.where(known, -1 - np.arange(len(self)), self.end - 1))
        images = {}
        for v, x in self.images.items():
            assert isinstance(x, np.ndarray), "it is extended already"
            images[v] = PictureRows(x, self.final_images.get(v, x[:0]), at)
        return replace(
            self,
            state=longer(self.state, np.where(known[:, None], self.final, self.state[self.end - 1])),
            action=longer(self.action, 0),
            reward=longer(self.reward, 0),
            images=images,
            first=self.first + np.arange(len(self)),
            end=last + 1,
        ), steps

    @property
    def held(self) -> np.ndarray:
        """bool[E]: every tenth episode, whatever is recorded after it. Episodes are counted instruction by
        instruction: instructions that take turns would else be held out of one of them alone. What the model
        `before` learnt from or held out stays that."""
        order = np.argsort(np.array(self.tasks)[self.task], kind="stable")
        held = np.isin(np.arange(len(self)), order[HELD - 1 :: HELD])
        return held if self.before is None else np.where(self.before < 0, held, self.before == 1)

    def spaced(self) -> np.ndarray:
        """Rows that are learnt from, evenly spaced, STATISTICS at most."""
        mine = np.flatnonzero(~np.repeat(self.held, self.lengths))
        return mine[np.linspace(0, len(mine) - 1, min(STATISTICS, len(mine))).astype(int)]

    def with_numbers(self, of: Callable[[Mapping[str, np.ndarray | PictureRows]], np.ndarray]) -> "Recorded":
        """The same with numbers beside the states: `of` tells them [N,Z] of pictures {view: [N,h,w,3]}. Where
        the picture after the last action was not kept, they are those of the one before it."""
        told = of(self.images)
        last = told[self.end - 1]
        if self.known.any():
            last = np.where(self.known[:, None], of(self.final_images), last)
        return replace(
            self, state=np.concatenate([self.state, told], 1), final=np.concatenate([self.final, last], 1)
        )

    def in_terms_of(self, tasks: tuple[str, ...]) -> "Recorded":
        """The same, its instructions numbered as `tasks` are and those that are not among them after
        these."""
        every = tuple(dict.fromkeys((*tasks, *(self.tasks[i] for i in np.unique(self.task)))))
        return replace(
            self, tasks=every, task=np.array([every.index(self.tasks[i]) for i in self.task], np.int64)
        )

    @property
    def sparse(self) -> bool:
        """Whether the reward is 1 on the step that succeeds and 0 elsewhere."""
        want = np.zeros_like(self.reward)
        want[self.end[self.success] - 1] = 1
        return bool(np.array_equal(self.reward, want))

    def frames(self) -> Frames:
        """The first observation of every episode."""
        obs = {"state": self.state[self.first]} | {
            f"image/{v}": x[self.first] for v, x in self.images.items()
        }
        return Frames(obs, self.task.astype(np.int64), np.ones(len(self), bool), self.held)


def control_of(features, robot: str, longest: int) -> ControlSpec:
    """A ControlSpec for data without one (LeRobot's own): axes without units, episodes as long as the
    longest."""
    sim, _, task = (robot or "robot").partition(":")
    axes = tuple(ActionAxis(n, "1", -1.0, 1.0, "absolute") for n in features.action)
    return ControlSpec(
        sim,
        task or "recorded",
        axes,
        1 / features.fps,
        longest,
        tuple(features.state),
        tuple(v for v, _, _ in features.views),
    )


def check(data: Recorded, *folders: str) -> None:
    """Raise UserError for data, of these folders, that no model can be learnt from."""
    n, f, where = len(data), len(data.action), " ".join(folders)
    typed = " ".join(map(quoted, folders))
    if n < LEAST_EPISODES or f < LEAST_FRAMES:
        remedy = (
            f"Record more, and give them beside these: robo_rl wm train {typed} MORE"
            if data.own
            else f"Add some: robo_rl collect --policy expert,random --out {typed}"
        )
        raise UserError(
            f"data set {where} has {n} episode{'s' * (n != 1)} and {f} frames; a world model needs at least "
            f"{LEAST_EPISODES} episodes and {LEAST_FRAMES} frames. {remedy}"
        )
    if not data.state.shape[1]:
        raise UserError(f"data set {where} has no state; record it with robo_rl collect")
    big = np.abs(data.action).max()
    if big > 1 + 1e-4:
        raise UserError(
            f"data set {where} has actions up to {big:.3g}, and it says that they are commands of -1 to 1; "
            "record it anew"
        )


def one_outcome(data: Recorded) -> str:
    """What a model does not learn of success from episodes that all ended alike; "": they did not."""
    if not data.success.any():
        return (
            "no episode succeeded, so success means nothing in the model. Record some that do, or say which "
            "did (robo_rl data label DATASET --success …)"
        )
    if data.success.all():
        return (
            "every episode succeeded, so the model learns of no failure and grants success too easily. "
            "Record a weak policy and random actions too (robo_rl collect --policy RUN,random)"
        )
    return ""


def differences(spec: WorldSpec, data: Recorded) -> list[str]:
    """What of the data differs from what the model was made for, as words; [] if it fits."""
    a, b, out = spec.control, data.control, []
    if a.action_names != b.action_names:
        out.append(
            f"action axes {', '.join(a.action_names)} in the model, {', '.join(b.action_names)} in the data"
        )
    else:
        out += units_differ(a.axes, b.axes)
    if not math.isclose(a.period, b.period, rel_tol=1e-3):
        out.append(f"{1 / a.period:g} steps per second in the model, {1 / b.period:g} in the data")
    if spec.state != data.state.shape[1]:
        out.append(f"{spec.state} state numbers in the model, {data.state.shape[1]} in the data")
    if set(a.views) - set(data.images):
        out.append(
            f"cameras {', '.join(a.views)} in the model, {', '.join(data.images) or 'none'} in the data"
        )
    if spec.tasks != ("",) and (new := sorted({data.tasks[i] for i in data.task} - set(spec.tasks))):
        out.append(
            f"the instruction {new[0]!r} was never taught to the model, which knows {listed(spec.tasks)}"
        )
    sizes = {x.shape[1:3] for x in data.images.values()} - {(spec.image_size, spec.image_size)}
    if a.views and sizes:
        h, w = min(sizes)
        out.append(f"images of {spec.image_size} pixels in the model, {h} x {w} in the data")
    return out


def check_fits(spec: WorldSpec, data: Recorded, where: str) -> None:
    """Raise UserError naming what of the data does not fit the model."""
    if bad := differences(spec, data):
        raise UserError(
            f"data set {where} does not fit the world model: {'; '.join(bad)}. Take recordings made as those "
            f"that it learnt from, or learn another model: robo_rl wm train {quoted(where)}"
        )
