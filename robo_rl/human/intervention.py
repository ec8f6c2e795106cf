"""`InterventionEnv`: an env of the contract in which an operator may take over from the policy at every step.

The *driver* of a step is the policy, the brake (pause) or a person. Where the driver changes, the command is
continuous. With k = 1, 2 ... steps since the change, u_k the new driver's command and a the last one
executed before it,

    executed_k = clip(u_k + (1 - k/B) (a - u_1))   for k < B,   u_k afterwards,

in the box -1..1, so that no step changes the command by more than its driver does plus |a - u_1| / B. B = 1
does not blend. A blended command is not learned from: until k = B a person's phase is recorded as pause.
`held` in info: a person is at the controls.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorWrapper

from robo_rl.contract import ControlEnv
from robo_rl.data.episode import PHASES
from robo_rl.errors import UserError, in_range
from robo_rl.types import ControlSpec

POLICY, PAUSE, RECOVERY, CORRECTION = range(4)
DRIVER = np.array([0, 1, 2, 2], np.uint8)  # of a phase: policy, brake, person
BLEND = 0.15  # s
OWN = "intervene/"  # prefix of this wrapper's rows in get_state


@dataclass(frozen=True, slots=True)
class OperatorView:
    """What an operator observes of N robots before a step, beside the env itself."""

    proposed: np.ndarray  # float32[N,A] the policy's last actions
    executed: np.ndarray  # float32[N,A] the actions that ran last
    over: np.ndarray  # bool[N] the episode is over
    steps: np.ndarray  # int64[N] control steps of the episode so far


NO_MARK, SUCCESS, FAILURE, DISCARD = range(4)  # what a person says of an episode; each but the first ends it
MARKS = {"success": SUCCESS, "failure": FAILURE, "discard": DISCARD}


@dataclass(frozen=True, slots=True)
class Intervention:
    """What an operator does in the next step: `actions` float32[N,A] run where `phase` uint8[N] is recovery
    or correction.

    marks uint8[N]: what they say of the episode, which then ends with this step (None: nothing). attended
    bool[N]: robots that they attend to, from the moment they do until they hand back (None: those that they
    drive).
    """

    actions: np.ndarray
    phase: np.ndarray
    marks: np.ndarray | None = None
    attended: np.ndarray | None = None


class Operator(Protocol):
    """Decides before every step who acts: one person or several, or a program."""

    def begin(self, mask: np.ndarray, obs: dict) -> None:
        """Episodes of the robots in `mask` begin with `obs`."""

    def intervene(self, view: OperatorView) -> Intervention:
        """The intervention of the next step; called once before it."""
        ...

    def get_state(self) -> dict[str, np.ndarray]:
        """Rows [N, ...] to go on from, copies; {} where there is nothing to go back to."""
        ...

    def set_state(self, state: dict[str, np.ndarray], mask: np.ndarray) -> None: ...


@runtime_checkable
class EnvOperator(Protocol):
    """An operator who looks at the env itself."""

    env: Any


class NoOperator:
    """An operator who never intervenes: `InterventionEnv(env, NoOperator())` is `env`."""

    def begin(self, mask, obs):
        pass

    def intervene(self, view: OperatorView) -> Intervention:
        return Intervention(np.zeros_like(view.proposed), np.zeros(len(view.over), np.uint8))

    def get_state(self):
        return {}

    def set_state(self, state, mask):
        pass


def hold_action(spec: ControlSpec, last: np.ndarray) -> np.ndarray:
    """float32[N,A] that keeps the robot where it is: 0 on delta, rate and effort axes, the last command on
    absolute ones.
    """
    absolute = np.array([a.kind == "absolute" for a in spec.axes])
    # the command that means 0
    rest = np.array([np.clip(-(a.high + a.low) / (a.high - a.low), -1, 1) for a in spec.axes])
    return np.where(absolute, last, rest).astype(np.float32)


class InterventionEnv(VectorWrapper):
    """`env` with `operator` beside its policy.

    `step` info carries also `executed` float32[N,A], the action that ran, in -1..1; `source` uint8[N], 0 only
    where `env` got exactly the action given to `step` (which it clips), else 1; `phase` uint8[N], index into
    PHASES. An env that is over has source and
    phase 0. `held` bool[N]: a person drives; `attended` bool[N]: a person attends, from then to the
    hand-back; `mark` uint8[N]: what they said of the episode. A mark ends it: success and failure terminate,
    a success with a reward of at least 1, discard truncates. `sources()` tells who acts in the *next* step,
    so that a chunk can be cut where the driver changes. blend: seconds a change of driver takes. freeze: time
    stands still for a robot that has come to rest in a pause (the env must have snapshots), so that waiting
    for a person uses up no steps. limit: control steps of an episode that nobody attends, after which it is
    cut as by a time limit: a person has the time that they need, up to the limit of `env` (0: that alone).
    Starts, seeds, masks, snapshots and the expert are those of `env`.
    UserError: an intervention of wrong shape or phase.
    """

    env: Any  # a ControlEnv; snapshots and pictures are optional
    spec: ControlSpec
    single_action_space: spaces.Box

    def __init__(
        self, env: ControlEnv, operator: Operator, blend: float = BLEND, freeze: bool = False, limit: int = 0
    ):
        in_range("blend", blend, 0, 10)
        super().__init__(env)
        if freeze and not hasattr(env, "get_state"):
            raise UserError(f"freeze needs an env with snapshots, {env.spec.id} has none: leave it out")
        self.operator, self.freeze, self.limit = operator, freeze, limit
        self.reports_success = True  # the person does
        # after_step(obs, over bool[N]: episodes that ended in this step, info), of operators that look at
        # what became of it
        self._after_step = getattr(operator, "after_step", None)
        self._obs: dict[str, Any] = {}  # the last one
        n, a = env.num_envs, env.single_action_space.shape[0]
        self.blend_steps = max(1, round(blend / env.spec.period))
        self._rows = {
            "proposed": np.zeros((n, a), np.float32),
            "executed": np.zeros((n, a), np.float32),
            "offset": np.zeros((n, a), np.float32),
            "driver": np.zeros(n, np.uint8),
            "over": np.zeros(n, bool),
            "since": np.full(n, self.blend_steps),
            "steps": np.zeros(n, np.int64),
        } | ({"unattended": np.zeros(n, np.int64)} if limit else {})
        self._intervention: Intervention | None = None

    def __getattr__(self, name: str):
        if name in ("env", "_rows"):  # not yet there
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def images(self) -> bool:
        return self.env.images

    @images.setter
    def images(self, value: bool) -> None:
        self.env.images = value

    # ------------------------------------------------------------ the contract

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        mask = (options or {}).get("reset_mask")
        mask = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        r = self._rows
        for name in r:
            r[name][mask] = 0
        r["since"][mask] = self.blend_steps
        self._intervention, self._obs = None, obs
        self.operator.begin(mask.copy(), obs)
        return obs, info

    def step(self, actions):
        r = self._rows
        given = actions.detach().cpu().numpy() if hasattr(actions, "detach") else np.asarray(actions)
        if (
            given.shape != r["proposed"].shape
            or given.dtype.kind not in "fiu"
            or not np.isfinite(given).all()
        ):
            self.env.step(actions)  # says what is wrong
            raise UserError(f"actions must be finite and of shape {r['proposed'].shape}")
        given = given.astype(np.float32, copy=False)
        driver, turned, since = self._next()
        intervention = self._ask()
        target = np.where(driver[:, None] == 2, intervention.actions, given)
        target = np.where(driver[:, None] == 1, hold_action(self.env.spec, r["executed"]), target)
        offset = np.where(turned[:, None], r["executed"] - target.clip(-1, 1), r["offset"])
        weight = np.where(since >= self.blend_steps, 0, 1 - since / self.blend_steps).astype(np.float32)
        executed = np.where(
            weight[:, None] > 0, (target.clip(-1, 1) + weight[:, None] * offset).clip(-1, 1), target
        )
        alive = ~r["over"]
        source = ((driver != 0) | (weight > 0)) & alive
        still = (driver == 1) & (weight == 0) & alive & self.freeze
        if intervention.marks is not None:
            still &= intervention.marks == NO_MARK
        before = self.env.get_state() if still.any() else None
        obs, reward, terminated, truncated, info = self.env.step(
            actions if not source.any() else executed if given is actions else _like(actions, executed)
        )
        if still.any():
            self.env.set_state(before, still)
            obs = {k: _kept(v, self._obs[k], still) for k, v in obs.items()}
            reward, terminated, truncated = (
                _kept(x, np.zeros_like(x), still) for x in (reward, terminated, truncated)
            )
            info = {**info, "success": _kept(info["success"], np.zeros_like(info["success"]), still)}
        held = (driver == 2) & alive
        attended = held if intervention.attended is None else held | intervention.attended & alive
        if self.limit:
            r["unattended"] += alive & ~attended & ~still
            late = alive & ~attended & (r["unattended"] >= self.limit)
            truncated = _bools(truncated) | late & ~_bools(terminated)
        if intervention.marks is not None and (marks := np.where(alive, intervention.marks, NO_MARK)).any():
            reward, terminated, truncated, info = marked_step(marks, reward, terminated, truncated, info)
        self._obs = obs
        ran = executed.clip(-1, 1).astype(np.float32)
        r["proposed"][:], r["executed"][:], r["offset"] = given, ran, offset
        r["driver"], r["since"] = driver, since
        r["steps"] += alive & ~still
        r["over"] = _bools(terminated) | _bools(truncated)
        self._intervention = None
        phase = np.where(
            alive, np.where(weight > 0, np.minimum(intervention.phase, PAUSE), intervention.phase), 0
        ).astype(np.uint8)
        info = {
            "mark": np.zeros(len(alive), np.uint8),
            **info,
            "executed": ran,
            "source": source.astype(np.uint8),
            "phase": phase,
            "held": held,
            "attended": attended,
        }
        if self._after_step is not None:
            self._after_step(obs, alive & r["over"], info)
        return obs, reward, terminated, truncated, info

    def renew(self, env: ControlEnv) -> None:
        """Go on in `env`, which is like the one before, after its simulator failed; the operator stays. A
        reset of all robots comes next."""
        self.env = env
        if isinstance(self.operator, EnvOperator):
            self.operator.env = env

    @property
    def get_state(self):
        """() -> rows [N, ...] of env, wrapper and operator; there only where the env has snapshots."""
        self.env.get_state  # noqa: B018 (raises AttributeError)
        return self._get_state

    def _get_state(self) -> dict[str, np.ndarray]:
        own = {OWN + k: v.copy() for k, v in self._rows.items()}
        return self.env.get_state() | own | {f"operator/{k}": v for k, v in self.operator.get_state().items()}

    def set_state(self, state: dict[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        theirs = {k: v for k, v in state.items() if not k.startswith((OWN, "operator/"))}
        self.env.set_state(theirs, mask)
        mask = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        for k, v in self._rows.items():
            v[mask] = np.asarray(state[OWN + k])[mask]
        self.operator.set_state({k[9:]: v for k, v in state.items() if k.startswith("operator/")}, mask)
        self._intervention = None

    def rewind(self, state: dict[str, np.ndarray], obs: dict, mask: np.ndarray) -> None:
        """Put the robots of `mask` back where `state` and `obs` were, at rest; who holds them does not
        change."""
        self.env.set_state({k: v for k, v in state.items() if not k.startswith((OWN, "operator/"))}, mask)
        r = self._rows
        for k in ("steps", "over", "executed"):
            r[k][mask] = np.asarray(state[OWN + k])[mask]
        r["executed"][mask] = hold_action(self.env.spec, r["executed"])[mask]
        r["since"][mask] = self.blend_steps
        self._obs = {k: _kept(v, obs[k], mask) for k, v in self._obs.items()}
        self._intervention = None

    @property
    def observation(self) -> dict[str, Any]:
        """The newest one."""
        return self._obs

    @property
    def steps(self) -> np.ndarray:
        """int64[N]: control steps of the episodes so far."""
        return self._rows["steps"].copy()

    # ------------------------------------------------------------ who acts next

    def sources(self) -> np.ndarray:
        """uint8[N]: the `source` of the next step, known before it."""
        driver, _, since = self._next()
        return (((driver != 0) | (since < self.blend_steps)) & ~self._rows["over"]).astype(np.uint8)

    def _next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(driver, it just changed, steps since it did counting this one) of the next step, each [N]."""
        r = self._rows
        driver = np.where(r["over"], 0, DRIVER[self._ask().phase]).astype(np.uint8)
        # before the first step there is nothing to be continuous with
        turned = (driver != r["driver"]) & (r["steps"] > 0)
        return driver, turned, np.where(turned, 1, np.minimum(r["since"] + 1, self.blend_steps))

    def _ask(self) -> Intervention:
        if self._intervention is None:
            r = self._rows
            view = OperatorView(
                r["proposed"].copy(), r["executed"].copy(), r["over"].copy(), r["steps"].copy()
            )
            self._intervention = check_intervention(self.operator.intervene(view), *r["proposed"].shape)
        return self._intervention


def marked_step(marks: np.ndarray, reward, terminated, truncated, info: dict) -> tuple:
    """What a step returned, as the person's marks uint8[N] have it."""
    said, won = marks != NO_MARK, marks == SUCCESS
    reward = np.where(won, np.maximum(np.asarray(reward), 1), np.asarray(reward)).astype(np.float32)
    terminated = np.where(said, marks != DISCARD, _bools(terminated))
    truncated = np.where(said, marks == DISCARD, _bools(truncated))
    return (
        reward,
        terminated,
        truncated,
        {**info, "success": np.where(said, won, _bools(info["success"])), "mark": marks.astype(np.uint8)},
    )


def _like(given, executed: np.ndarray):
    """`executed` as the env takes actions: NumPy, or torch on its device."""
    if not hasattr(given, "detach"):
        return executed
    import torch

    return torch.as_tensor(executed, device=given.device)


def _kept(new: np.ndarray, old: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`new` with the rows of `mask` from `old`."""
    out = np.array(new)
    out[mask] = np.asarray(old)[mask]
    return out


def _bools(x) -> np.ndarray:
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def check_intervention(intervention: Intervention, n: int, a: int) -> Intervention:
    """`intervene` as float32[N,A] in [-1, 1] and uint8[N]; where a number is not finite the robot pauses."""
    actions, phase = np.asarray(intervention.actions, np.float32), np.asarray(intervention.phase)
    if actions.shape != (n, a) or phase.shape != (n,):
        raise UserError(
            f"an operator must give actions ({n}, {a}) and phases ({n},), got {actions.shape} and "
            f"{phase.shape}"
        )
    if phase.min(initial=0) < 0 or phase.max(initial=0) >= len(PHASES):
        raise UserError(f"phase must be 0 .. {len(PHASES) - 1} ({', '.join(PHASES)}), got {phase.max()}")
    broken = ~np.asarray(np.isfinite(actions).all(1))
    phase = np.where(broken & (phase > PAUSE), PAUSE, phase).astype(np.uint8)
    return Intervention(
        np.where(broken[:, None], 0, actions).clip(-1, 1), phase, intervention.marks, intervention.attended
    )
