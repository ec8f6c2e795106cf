"""The contract suite accepts an env that keeps the contract and names the fault of one that does not."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from robo_rl.contract import action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError
from robo_rl.starts import StartStream, uniforms
from robo_rl.types import ActionAxis, ControlSpec
from sims.check import check_env

KEYS = ("pos", "age", "start", "terminated", "truncated", "success", "last")


class Point(VectorEnv):
    """A point in the plane that is pushed; over when it leaves the unit disc or after 12 steps."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}
    render_mode = "rgb_array"

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.single_observation_space, self.observation_space = observation_spaces(2, num_envs, ("top",), 16)
        self.single_action_space, self.action_space = action_spaces(2, num_envs)
        axes = tuple(ActionAxis(n, "m", -0.1, 0.1, "delta") for n in "xy")
        self.spec = ControlSpec("toy", "point", axes, 0.1, 12, ("x", "y"), ("top",))
        self.stream = StartStream(num_envs)
        self.pos, self.last = np.zeros((num_envs, 2)), np.zeros(num_envs)
        self.age, self.start = np.zeros(num_envs, int), np.zeros(num_envs, int)
        self.terminated, self.truncated, self.success = (np.zeros(num_envs, bool) for _ in range(3))

    def _obs(self):
        image = np.zeros((self.num_envs, 16, 16, 3), np.uint8)
        image[..., 0] = (np.clip(self.pos[:, 0], -1, 1) * 100 + 100).astype(np.uint8)[:, None, None]
        return {
            "state": self.pos.astype(np.float32),
            "image/top": image,
            "task": np.array([f"go to {s % 3}" for s in self.start]),
        }

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs)
        if seed is not None:
            self.stream.seed(seed, mask)
        ids = np.flatnonzero(mask)
        self.start[ids] = self.stream.draw(ids) if starts is None else starts[ids]
        self.pos[ids] = uniforms(self.start[ids], 2) * 0.4 - 0.2
        self.age[ids] = 0
        for flag in (self.terminated, self.truncated, self.success):
            flag[ids] = False
        return self._obs(), {}

    def step(self, actions):
        a = read_actions(actions, self.num_envs, 2)
        live = ~(self.terminated | self.truncated)
        self.pos = self.pos + 0.1 * a * live[:, None]
        self.age = self.age + live
        self.success = np.where(live, self.pos[:, 0] > 0.1, self.success)
        self.terminated = self.terminated | (live & (np.linalg.norm(self.pos, axis=1) > 0.3))
        self.truncated = self.truncated | (live & (self.age >= self.spec.max_steps) & ~self.terminated)
        reward = np.where(live, 1.0, 0.0).astype(np.float32)
        return (
            self._obs(),
            reward,
            self.terminated.copy(),
            self.truncated.copy(),
            {"success": self.success.copy()},
        )

    def get_state(self):
        return {k: getattr(self, k).copy() for k in KEYS} | {
            "seeds": self.stream.seeds.copy(),
            "episodes": self.stream.episodes.copy(),
        }

    def set_state(self, state, mask=None):
        mask = np.ones(self.num_envs, bool) if mask is None else mask
        for k in KEYS:
            getattr(self, k)[mask] = state[k][mask]
        self.stream.seeds[mask], self.stream.episodes[mask] = state["seeds"][mask], state["episodes"][mask]

    def expert_action(self):
        return np.clip(-self.pos, -1, 1).astype(np.float32)

    def render(self):
        return self._obs()["image/top"]


def test_an_env_that_keeps_the_contract_passes_every_part():
    parts = check_env(Point)
    assert parts == (
        "spaces",
        "first_obs",
        "steps",
        "seeds",
        "starts",
        "bad_input",
        "reset_mask",
        "frozen",
        "snapshot",
        "expert",
        "render",
    )


class _Plain(Point):
    """Without the optional parts."""

    render_mode = None
    get_state = property()
    set_state = property()
    expert_action = property()


def test_optional_parts_may_be_absent():
    assert "snapshot" not in check_env(_Plain) and "expert" not in check_env(_Plain)


class _OneStep(_Plain):
    def __init__(self, num_envs: int):
        super().__init__(num_envs)
        self.spec = replace(self.spec, max_steps=1)


def test_an_episode_may_be_a_single_step():
    assert "reset_mask" in check_env(_OneStep)


class _NoStarts(_Plain):
    def reset(self, *, seed=None, options=None):
        if options and "starts" in options:
            raise UserError("this env cannot take starts")
        return super().reset(seed=seed, options=options)


def test_an_env_without_starts_must_refuse_them():
    assert "starts" not in check_env(_NoStarts, starts=False)
    with pytest.raises(AssertionError, match="starts, which this env cannot take, must raise UserError"):
        check_env(_Plain, starts=False)


class _OneStream(_NoStarts):
    def reset(self, *, seed=None, options=None):
        if np.ndim(seed):
            raise UserError("one seed for all envs")
        return super().reset(seed=seed if seed is None else seed + 100 * self.num_envs, options=options)


def test_an_env_with_one_random_stream_must_refuse_a_list_of_seeds():
    assert "seeds" in check_env(_OneStream, starts=False, seed_lists=False)
    with pytest.raises(
        AssertionError, match="a list of seeds, which this env cannot take, must raise UserError"
    ):
        check_env(_Plain, seed_lists=False)


# Every class below breaks one sentence of the contract.


class Autoresets(Point):
    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class WideActions(Point):
    def __init__(self, n):
        super().__init__(n)
        self.single_action_space, self.action_space = action_spaces(3, n)


class OneAxisShort(Point):
    def __init__(self, n):
        super().__init__(n)
        self.spec = ControlSpec("toy", "point", self.spec.axes[:1], 0.1, 12)


class TooLong(Point):
    def __init__(self, n):
        super().__init__(n)
        self.spec = ControlSpec("toy", "point", self.spec.axes, 0.1, 5000, (), ("top",))


class DoubleState(Point):
    def _obs(self):
        return super()._obs() | {"state": self.pos.copy()}


class NoTask(Point):
    def _obs(self):
        return {k: v for k, v in super()._obs().items() if k != "task"}


class TaskIsAList(Point):
    def _obs(self):
        return super()._obs() | {"task": np.array([b"go"] * self.num_envs)}


class DoubleReward(Point):
    def step(self, a):
        obs, r, te, tr, info = super().step(a)
        return obs, r.astype(float), te, tr, info


class NoSuccess(Point):
    def step(self, a):
        return *super().step(a)[:4], {}


class ReusesItsBuffer(Point):
    buffer = None

    def _obs(self):
        out = super()._obs()
        self.buffer = out["state"] if self.buffer is None else self.buffer
        self.buffer[:] = out["state"]
        return out | {"state": self.buffer}


class TakesNaN(Point):
    def step(self, a):
        if np.shape(a) == (self.num_envs, 2):
            a = np.nan_to_num(a)
        return super().step(a)


class TakesAnyShape(Point):
    def step(self, a):
        return super().step(
            np.asarray(a).ravel()[: 2 * self.num_envs].reshape(-1, 2) if np.size(a) > 2 * self.num_envs else a
        )


class WrongError(Point):
    def step(self, a):
        if np.shape(a) != (self.num_envs, 2):
            raise KeyError("shape")
        return super().step(a)


class StepsBeforeItRefuses(Point):
    def step(self, a):
        if np.shape(a) == (self.num_envs, 2) and not np.isfinite(a).all():
            self.pos += 0.01
        return super().step(a)


class ForgetsTheSeed(Point):
    rng = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        out = super().reset(seed=seed, options=options)
        self.pos += self.rng.normal(0, 0.01, self.pos.shape)
        return self._obs(), out[1]


class SameEpisodeForever(Point):
    def reset(self, *, seed=None, options=None):
        mask, _ = read_reset(seed, options, self.num_envs)
        return super().reset(options={"reset_mask": mask, "starts": np.full(self.num_envs, 3)})


class SeedsByIndex(Point):
    def reset(self, *, seed=None, options=None):
        if seed is not None and np.ndim(seed):
            seed = [s + i for i, s in enumerate(seed)]
        return super().reset(seed=seed, options=options)


class SeedsByBatch(Point):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed if seed is None else np.asarray(seed) + self.num_envs, options=options)


class StartsByIndex(Point):
    def reset(self, *, seed=None, options=None):
        if options and options.get("starts") is not None and len(options["starts"]) == self.num_envs:
            options = options | {"starts": options["starts"] + np.arange(self.num_envs)}
        return super().reset(seed=seed, options=options)


class IgnoresStarts(Point):
    def reset(self, *, seed=None, options=None):
        read_reset(seed, options, self.num_envs)
        options = {k: v for k, v in (options or {}).items() if k != "starts"}
        return super().reset(seed=0 if seed is None else seed, options=options)


class ResetsAll(Point):
    def reset(self, *, seed=None, options=None):
        read_reset(seed, options, self.num_envs)
        return super().reset(
            seed=seed, options={k: v for k, v in (options or {}).items() if k != "reset_mask"}
        )


class ResetsNone(Point):
    def reset(self, *, seed=None, options=None):
        mask, _ = read_reset(seed, options, self.num_envs)
        return super().reset(seed=seed, options=options) if mask.all() else (self._obs(), {})


class EatsTheMask(Point):
    def reset(self, *, seed=None, options=None):
        out = super().reset(seed=seed, options=options)
        (options or {}).pop("reset_mask", None)
        return out


class MovesWhenOver(Point):
    def step(self, a):
        over = self.terminated | self.truncated
        out = super().step(a)
        self.pos[over] += 0.01
        return self._obs(), *out[1:]


class PaysWhenOver(Point):
    def step(self, a):
        obs, r, te, tr, info = super().step(a)
        return obs, np.ones_like(r), te, tr, info


class FlagsOnce(Point):
    def step(self, a):
        over = self.terminated | self.truncated
        obs, r, te, tr, info = super().step(a)
        return obs, r, te & ~over, tr & ~over, info


class BothFlags(Point):
    def step(self, a):
        obs, r, te, tr, info = super().step(a)
        return obs, r, te, tr | te, info


class NeverEnds(Point):
    def step(self, a):
        obs, r, te, tr, info = super().step(a)
        self.truncated[:] = False
        return obs, r, te, np.zeros_like(tr), info


class EndsEarly(Point):
    def step(self, a):
        self.age += self.age == 5
        return super().step(a)


class ForgetsSuccess(Point):
    def step(self, a):
        over = self.terminated | self.truncated
        *out, info = super().step(a)
        return *out, {"success": info["success"] & ~over}


class SharesItsState(Point):
    def get_state(self):
        return super().get_state() | {"pos": self.pos}

    def step(self, a):
        held = self.pos
        out = super().step(a)
        held[:] = self.pos
        self.pos = held
        return out


class ForgetsTheAge(Point):
    def set_state(self, state, mask=None):
        super().set_state(state | {"age": 0 * state["age"]}, mask)


class ForgetsTheStream(Point):
    def set_state(self, state, mask=None):
        super().set_state(state | {"episodes": state["episodes"] + 1}, mask)


class ForgetsTheEnd(Point):
    def set_state(self, state, mask=None):
        super().set_state(state | {"terminated": state["terminated"] & False}, mask)


class RestoresAll(Point):
    def set_state(self, state, mask=None):
        super().set_state(state)


class RestoresNone(Point):
    def set_state(self, state, mask=None):
        super().set_state(state, None if mask is None else mask & False)


class RestoresByIndex(Point):
    def set_state(self, state, mask=None):
        shift = (
            0 if self.num_envs == 1 or (state["pos"] != state["pos"][0]).any() else np.arange(self.num_envs)
        )
        super().set_state(state | {"start": state["start"] + shift}, mask)


class RestoresOnlyItself(Point):
    def get_state(self):
        self.kept = self.pos.copy()
        return super().get_state() | {"pos": np.zeros_like(self.pos), "true": self.pos.copy()}

    def set_state(self, state, mask=None):
        super().set_state(state | {"pos": state["true"] if hasattr(self, "kept") else state["pos"]}, mask)


class WildExpert(Point):
    def expert_action(self):
        return 3 * np.ones((self.num_envs, 2), np.float32)


class ExpertActs(Point):
    def expert_action(self):
        a = super().expert_action()
        self.age += self.age < 3
        return a


class ExpertCounts(Point):
    calls = 0

    def expert_action(self):
        self.calls += 1
        return super().expert_action() * 0 + np.float32(self.calls % 7 / 7)


class FlatRender(Point):
    def render(self):
        return super().render()[0]


class RenderMoves(Point):
    def render(self):
        self.pos += 0.01
        return super().render()


class NoRepr(Point):
    def __repr__(self):
        raise AttributeError("id")


class ClosesOnce(Point):
    def close(self, **kw):
        assert not self.closed, "closing twice is allowed"
        super().close()


BROKEN = {
    Autoresets: "AutoresetMode.DISABLED",
    WideActions: "spec.axes has 2 axes, but the action space has 3",
    OneAxisShort: "spec.axes has 1 axes",
    TooLong: "1 <= max_steps <= 200, got 5000",
    DoubleState: r"obs\['state'\] of reset must be float32, got float64",
    NoTask: "must have the keys",
    TaskIsAList: "must be 4 strings",
    DoubleReward: "rewards must be float32",
    NoSuccess: "must have 'success'",
    ReusesItsBuffer: "handed out before",
    TakesNaN: "an action with NaN must raise UserError, but was accepted",
    TakesAnyShape: "actions of shape .* must raise UserError, but was accepted",
    WrongError: "must raise UserError, but raised KeyError",
    StepsBeforeItRefuses: "refused must leave the env as it was",
    ForgetsTheSeed: "refused must leave|same seed must give the same episode",
    SameEpisodeForever: "another seed must give other episodes",
    SeedsByIndex: "same seed must give the same episode at any env index",
    SeedsByBatch: "for any number of envs",
    StartsByIndex: "same start must give the same episode at any env index",
    IgnoresStarts: "start",
    ResetsAll: "reset_mask must leave",
    ResetsNone: "reset_mask must reset the env it names",
    EatsTheMask: "must not change the options",
    MovesWhenOver: "over must keep obs",
    PaysWhenOver: "over must give reward 0",
    FlagsOnce: "over must keep t",
    BothFlags: "must not both be true",
    NeverEnds: "over after spec.max_steps=12",
    EndsEarly: "truncated after 11 steps",
    ForgetsSuccess: "over must keep success",
    SharesItsState: "must be a copy",
    ForgetsTheAge: "after set_state",
    ForgetsTheStream: "the next episode must be as before",
    ForgetsTheEnd: "after set_state|over after set_state",
    RestoresAll: "set_state must leave the envs outside its mask",
    RestoresNone: "set_state must restore the envs of its mask",
    RestoresByIndex: "forked to every env",
    RestoresOnlyItself: "the same in another env object",
    WildExpert: "finite and in",
    ExpertActs: "expert_action must not disturb",
    ExpertCounts: "depend on the present states only",
    FlatRender: "render must return uint8",
    RenderMoves: "render must not disturb",
    ClosesOnce: "closing twice",
    NoRepr: "repr",
}


@pytest.mark.parametrize("env", BROKEN, ids=lambda e: e.__name__)
def test_the_suite_names_the_fault_of(env):
    with pytest.raises(AssertionError, match=BROKEN[env]):
        check_env(env)


class Rounds(_Plain):
    """Off by rounding between two resets, as a GPU simulator is."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        Rounds.resets += 1
        return self._obs(), {}

    def _obs(self):
        obs = super()._obs()
        return obs | {
            "state": obs["state"] + np.float32(1e-6 * (self.resets % 2)),
            "image/top": 0 * obs["image/top"],
        }


def test_atol_admits_rounding_and_no_more():
    assert "seeds" in check_env(Rounds, atol=1e-5)
    with pytest.raises(AssertionError, match="state differs"):
        check_env(Rounds)
    with pytest.raises(AssertionError, match="state differs"):
        check_env(Rounds, atol=1e-7)


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"reset_masks": None}, "unknown reset option 'reset_masks'"),
        ({"reset_mask": np.ones(3)}, "reset_mask must be bool"),
        ({"starts": [1, 2]}, "starts must be 3 integers"),
        ({"starts": [0.5, 1, 2]}, "starts must be 3 integers"),
        ({"starts": [-1, 1, 2]}, "starts must be >= 0"),
    ],
)
def test_a_malformed_reset_request_says_what_is_wrong(options, fault):
    with pytest.raises(UserError, match=fault):
        read_reset(None, options, 3)


def test_starts_outside_the_mask_are_free():
    mask, starts = read_reset(None, {"starts": [4, -1, -1], "reset_mask": np.array([True, False, False])}, 3)
    assert mask.tolist() == [True, False, False] and starts[0] == 4


def test_actions_are_clipped_and_the_env_with_a_nan_is_named():
    assert read_actions([[2, -3]], 1, 2).tolist() == [[1, -1]]
    with pytest.raises(UserError, match="env 1"):
        read_actions([[0, 0], [0, np.nan]], 2, 2)
