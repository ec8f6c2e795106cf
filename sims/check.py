"""One contract suite for every env: ours, adapters, world models, the robot. See `sims` for the contract.

`check_env(lambda n: sims.make("mujoco", "reach", n, max_steps=40))` raises AssertionError with one sentence
that says what the env does wrong, or returns the names of the parts that were checked.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from robo_rl.contract import ControlEnv
from robo_rl.types import ControlSpec, task_names
from sims.check_probe import (
    EnvProbe,
    as_numpy,
    assert_refused,
    assert_same,
    differ,
    equal,
    like_env,
    numpy_obs,
    reset_env,
    run_episode,
    run_steps,
    step_env,
)

MAX_STEPS = 200  # an episode longer than this makes the suite slow


def check_env(
    make: Callable[[int], ControlEnv],
    *,
    num_envs: int = 4,
    starts: bool = True,
    seed_lists: bool = True,
    random_starts: bool = True,
    cuts: bool = False,
    atol: float = 0.0,
    seed: int = 0,
) -> tuple[str, ...]:
    """Check `make(num_envs)` and `make(1)` against the contract; return the names of the parts checked.

    starts=False: the env cannot take `options["starts"]` and must say so with a UserError.
    seed_lists=False: one random stream serves all envs, so a seed is one number for the whole batch, gives
    the same episodes for the same number of envs only, and a list of seeds is refused with a UserError.
    random_starts=False: the task has one initial state, so different seeds need not differ.
    cuts=True: the env may truncate an episode before its limit (a world model that no longer knows); so may
    one with the attribute `truncates_early`, and one of several tasks, for each has a limit of its own.
    atol: tolerance where the contract says "the same" (0: bit-equal); with one, pictures may differ by 1 of
    255.
    """
    assert num_envs >= 3, f"check_env needs num_envs >= 3 to permute envs, got {num_envs}"
    env, rng = make(num_envs), np.random.default_rng(seed)
    cuts = cuts or getattr(env, "truncates_early", False) or len(task_names(env)) > 1
    p = EnvProbe(env, make(1), starts, seed_lists, random_starts, cuts, atol, rng)
    try:
        parts = (
            _spaces,
            _first_obs,
            _steps,
            _seeds,  # what follows plays episodes again by their seeds
            _starts,
            _bad_input,
            _reset_mask,
            _frozen,
            _snapshot,
            _expert,
            _render,
        )
        done = [part.__name__[1:] for part in parts if part(p) is not False]
    finally:
        for env in (p.env, p.one):
            env.close()
    for env in (p.env, p.one):
        env.close()  # closing twice is allowed
    return tuple(done)


def check_quickly(env: ControlEnv) -> None:
    """What costs little of the contract, on one env of any size: what it says of itself, its first
    observations, one step, a masked reset to starts. The env must be reset afterwards. AssertionError: one
    sentence."""
    check_spaces(env)
    n, mask = env.num_envs, np.zeros(env.num_envs, bool)
    mask[0] = True
    obs = env.reset(seed=0)
    assert isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict), (
        "reset must return (obs, info)"
    )
    _check_obs(env, obs[0], "reset")
    _check_step(env, env.step(like_env(env, np.zeros(env.action_space.shape, np.float32))))
    ways = [reset_env(env, options={"reset_mask": mask, "starts": np.full(n, 3)}) for _ in range(2)]
    assert np.array_equal(ways[0]["state"][0], ways[1]["state"][0]), (
        "the same start must give the same first observation"
    )


# ---------------------------------------------------------------- the contract, part by part


def _spaces(p: EnvProbe) -> None:
    assert p.one.num_envs == 1, f"make(1) must have num_envs 1, got {p.one.num_envs}"
    check_spaces(p.env)
    limit = p.env.spec.max_steps
    assert limit <= MAX_STEPS, f"check an env with 1 <= max_steps <= {MAX_STEPS}, got {limit}"


def check_spaces(env: ControlEnv) -> None:
    """What an env says of itself: mode, spaces, `spec`. AssertionError: one sentence."""
    assert isinstance(env, VectorEnv), (
        f"the env must be a gymnasium.vector.VectorEnv, got {type(env).__name__}"
    )
    n = env.num_envs
    mode = env.metadata.get("autoreset_mode")
    assert mode == AutoresetMode.DISABLED, (
        f"metadata['autoreset_mode'] must be AutoresetMode.DISABLED, got {mode}: an env that is over stays "
        "as it is until reset(options={'reset_mask': …})"
    )
    single, batched = env.single_observation_space, env.observation_space
    assert isinstance(single, spaces.Dict) and "state" in single.spaces, (
        "single_observation_space must be a Dict with 'state'"
    )
    for k, box in single.spaces.items():
        if k == "task":
            continue
        assert k == "state" or k.startswith("image/"), (
            f"observation keys are state, image/<view>, task; got {k!r}"
        )
        assert isinstance(box, spaces.Box), f"the space of {k!r} must be a Box, got {type(box).__name__}"
        want = np.float32 if k == "state" else np.uint8
        assert box.dtype == want, f"the space of {k!r} must be {np.dtype(want)}, got {box.dtype}"
        dims = 1 if k == "state" else 3
        assert len(box.shape) == dims, f"the space of {k!r} must have {dims} axes, got shape {box.shape}"
        assert batched[k].shape == (n, *box.shape), (
            f"observation_space[{k!r}] must have shape {(n, *box.shape)}, got {batched[k].shape}"
        )
    act = env.single_action_space
    assert isinstance(act, spaces.Box) and act.dtype == np.float32 and len(act.shape) == 1, (
        f"single_action_space must be a float32 Box of one axis, got {act}"
    )
    assert (act.low == -1).all() and (act.high == 1).all(), f"actions must be in [-1, 1], got {act}"
    assert env.action_space.shape == (n, *act.shape), (
        f"action_space must have shape {(n, *act.shape)}, got {env.action_space.shape}"
    )

    spec = env.spec
    assert isinstance(spec, ControlSpec), f"env.spec must be a ControlSpec, got {type(spec).__name__}"
    try:
        repr(env)
    except Exception as e:
        raise AssertionError(f"repr(env) must work, but raised {type(e).__name__}: {e}") from e
    assert len(spec.axes) == act.shape[0], (
        f"spec.axes has {len(spec.axes)} axes, but the action space has {act.shape[0]}"
    )
    assert len(set(spec.action_names)) == len(spec.axes), (
        f"spec.axes must have different names, got {spec.action_names}"
    )
    for axis in spec.axes:
        assert axis.low < axis.high, (
            f"axis {axis.name!r} must have low < high, got {axis.low} and {axis.high}"
        )
    assert spec.period > 0, f"spec.period must be > 0 s, got {spec.period}"
    assert spec.max_steps >= 1, f"spec.max_steps must be at least 1, got {spec.max_steps}"
    images = tuple(k.removeprefix("image/") for k in single.spaces if k.startswith("image/"))
    assert set(spec.views) == set(images), f"spec.views {spec.views} must be the image keys {images}"
    state = single["state"]
    assert isinstance(state, spaces.Box)
    size = state.shape[0]
    assert len(spec.state_names) in (0, size), (
        f"spec.state_names has {len(spec.state_names)} names for {size} state dimensions"
    )


def _first_obs(p: EnvProbe) -> None:
    for env in (p.env, p.one):
        out = env.reset(seed=0)
        assert isinstance(out, tuple) and len(out) == 2, "reset must return (obs, info)"
        assert isinstance(out[1], dict), "reset must return a dict as info"
        _check_obs(env, out[0], "reset")


def _check_obs(env: ControlEnv, obs, where: str) -> None:
    n = env.num_envs
    want = set(env.single_observation_space.spaces) | {"task"}
    assert set(obs) == want, (
        f"the observation of {where} must have the keys {sorted(want)}, got {sorted(obs)}"
    )
    for k, x in obs.items():
        a = as_numpy(x)
        if k == "task":
            assert a.shape == (n,) and a.dtype.kind == "U", (
                f"obs['task'] of {where} must be {n} strings, got {a.dtype} of shape {a.shape}"
            )
            continue
        box = env.single_observation_space[k]
        shape = (n, *(box.shape or ()))
        assert a.shape == shape, f"obs[{k!r}] of {where} must have shape {shape}, got {a.shape}"
        assert a.dtype == box.dtype, f"obs[{k!r}] of {where} must be {box.dtype}, got {a.dtype}"
        if k == "state":
            assert np.isfinite(a).all(), f"obs['state'] of {where} must be finite"


def _steps(p: EnvProbe) -> None:
    """Dtypes and shapes of a step; an observation handed out is never written to again."""
    env = p.env
    held = env.reset(seed=1)[0]
    before = numpy_obs(held)
    for a in p.actions(min(3, p.limit)):
        obs = _check_step(env, env.step(like_env(env, a)))
        for k, x in numpy_obs(held).items():
            assert np.array_equal(x, before[k]), f"a step wrote into obs[{k!r}] that was handed out before"
        held, before = obs, numpy_obs(obs)
    env.reset(seed=2)
    for k, x in numpy_obs(held).items():
        assert np.array_equal(x, before[k]), f"a reset wrote into obs[{k!r}] that was handed out before"


def _check_step(env: ControlEnv, out) -> dict:
    """Dtypes and shapes of what `step` returned -> its observation."""
    assert isinstance(out, tuple) and len(out) == 5, (
        "step must return (obs, rewards, terminated, truncated, info)"
    )
    obs, reward, terminated, truncated, info = out
    n = env.num_envs
    _check_obs(env, obs, "step")
    assert isinstance(info, dict) and "success" in info, "info of every step must have 'success'"
    flags = {"terminated": terminated, "truncated": truncated, "success": info["success"]}
    for name, x in (flags | {"rewards": reward}).items():
        want = np.float32 if name == "rewards" else bool
        a = as_numpy(x)
        assert a.shape == (n,) and a.dtype == want, (
            f"{name} must be {np.dtype(want)} of shape ({n},), got {a.dtype} of shape {a.shape}"
        )
    assert np.isfinite(as_numpy(reward)).all(), "rewards must be finite"
    return obs


def _bad_input(p: EnvProbe) -> None:
    env, n, acts = p.env, p.n, p.actions(p.span)
    dim = acts.shape[2]
    plain = run_episode(env, acts, seed=3)
    reset_env(env, seed=3)
    nan = np.zeros((n, dim), np.float32)
    nan[n // 2, 0] = np.nan
    assert_refused(lambda: env.step(like_env(env, nan)), "an action with NaN")
    nan[n // 2, 0] = np.inf
    assert_refused(lambda: env.step(like_env(env, nan)), "an infinite action")
    for shape in ((n, dim + 1), (n + 1, dim), (dim,)):
        wrong = like_env(env, np.zeros(shape, np.float32))
        assert_refused(lambda wrong=wrong: env.step(wrong), f"actions of shape {shape}, not {(n, dim)},")
    assert_refused(
        lambda: env.reset(options={"reset_mask": np.ones(n + 1, bool)}), "a reset_mask of wrong length"
    )
    assert_refused(lambda: env.reset(seed=list(range(n + 1))), f"{n + 1} seeds for {n} envs")
    if p.starts:
        assert_refused(
            lambda: env.reset(options={"starts": np.arange(n + 1)}), f"{n + 1} starts for {n} envs"
        )
    else:
        assert_refused(
            lambda: env.reset(options={"starts": np.arange(n)}), "starts, which this env cannot take,"
        )
    if not p.seed_lists:
        assert_refused(lambda: env.reset(seed=list(range(n))), "a list of seeds, which this env cannot take,")
    after = run_steps(env, acts)
    assert_same(p, after, {k: plain[k] for k in after}, "input that is refused must leave the env as it was")


def _seeds(p: EnvProbe) -> None:
    env, acts = p.env, p.actions(p.span)
    a = run_episode(env, acts, seed=7)
    second = run_episode(env, acts)
    assert_same(p, a, run_episode(env, acts, seed=7), "the same seed must give the same episode")
    assert_same(p, second, run_episode(env, acts), "the same seed must give the same second episode")
    if p.random_starts:
        assert differ(a, run_episode(env, acts, seed=8)), "another seed must give other episodes"
        assert differ(a, second), "the second episode after a seed must differ from the first"
    if not p.seed_lists:
        return
    one = run_episode(p.one, acts[:, :1], seed=7)
    assert_same(
        p, one, a, "the same seed must give env 0 the same episode for any number of envs", rows_b=slice(0, 1)
    )
    _permuted(p, acts, lambda ids: {"seed": [11 + int(i) for i in ids]}, "seed")


def _permuted(p: EnvProbe, acts: np.ndarray, reset: Callable, what: str) -> dict:
    """The episode of a seed (or start) is independent of the env index, the neighbours and the batch size."""
    order = np.roll(np.arange(p.n), 1)
    a = run_episode(p.env, acts, **reset(np.arange(p.n)))
    b = run_episode(p.env, acts[:, order], **reset(order))
    assert_same(p, b, a, f"the same {what} must give the same episode at any env index", rows_b=order)
    i = p.n - 1
    one = run_episode(p.one, acts[:, i : i + 1], **reset(np.array([i])))
    assert_same(
        p,
        one,
        a,
        f"the same {what} must give the same episode for any number of envs",
        rows_b=slice(i, i + 1),
    )
    return a


def _starts(p: EnvProbe) -> bool | None:
    if not p.starts:
        return False
    acts = p.actions(p.span)
    a = _permuted(p, acts, lambda ids: {"options": {"starts": 5 + np.asarray(ids)}}, "start")
    again = run_episode(p.env, acts, seed=99, options={"starts": 5 + np.arange(p.n)})
    assert_same(p, again, a, "a start must give the same episode whatever the seed")
    if p.random_starts:
        other = run_episode(p.env, acts, options={"starts": 50 + np.arange(p.n)})
        assert differ(a, other), "other starts must give other episodes"
    return None


def _reset_mask(p: EnvProbe) -> None:
    env, n, acts = p.env, p.n, p.actions(2 * p.span)
    k = p.span // 2
    plain = run_episode(env, acts[: p.span], seed=4)
    reset_env(env, seed=4)
    run_steps(env, acts[:k])
    held = {key: plain[key][k - 1 : k] if k else plain[f"first/{key}"] for key in ("state", "task")}
    mask = np.zeros(n, bool)
    mask[1] = True
    options = {"reset_mask": mask.copy()}
    obs = reset_env(env, options=options)
    assert [*options] == ["reset_mask"] and np.array_equal(options["reset_mask"], mask), (
        "reset must not change the options it is given"
    )
    rest = ~mask
    for key, x in held.items():
        assert equal(p, obs[key][rest], x[0, rest]), (
            f"reset_mask must leave obs[{key!r}] of the other envs as it was"
        )
    after = run_steps(env, acts[k : p.span])
    tail = {key: plain[key][k:] for key in after}
    assert_same(
        p,
        after,
        tail,
        "reset_mask must leave the episodes of the other envs as they were",
        rows_a=rest,
        rows_b=rest,
    )
    if p.random_starts and k:
        assert differ(*({key: x[:, 1] for key, x in rows.items()} for rows in (after, tail))), (
            "reset_mask must reset the env it names"
        )
    if p.starts:  # a start under a mask is the start without it
        full = run_episode(env, acts[: p.span], options={"starts": 5 + np.arange(n)})
        reset_env(env, seed=4)
        run_steps(env, acts[:k])
        got = reset_env(env, options={"starts": 5 + np.arange(n), "reset_mask": mask.copy()})
        assert equal(p, got["state"][1], full["first/state"][0, 1]), (
            "a start under a reset_mask must be that start"
        )
        assert equal(p, got["state"][rest], held["state"][0, rest]), (
            "starts must be ignored outside the reset_mask"
        )


def _frozen(p: EnvProbe) -> None:
    """Episodes end by `max_steps`, never by both flags, and stay frozen; the others go on undisturbed."""
    env, n, limit = p.env, p.n, p.limit
    acts = p.actions(limit + limit // 2 + 3)
    last = reset_env(env, seed=5) | {"terminated": np.zeros(n, bool), "truncated": np.zeros(n, bool)}
    age, over = np.zeros(n, int), np.zeros(n, bool)
    for t, a in enumerate(acts):
        if t == limit // 2 and limit > 1:  # env 0 starts again, so that the envs do not end together
            mask = np.arange(n) == 0
            last |= reset_env(env, options={"reset_mask": mask})
            age[0], over[0] = 0, False
        now = step_env(env, a)
        age += ~over
        _check_flags(now, age, limit, over, p.cuts)
        _check_frozen(p, last, now, over)
        over = now["terminated"] | now["truncated"]
        last = now
    assert over.all(), f"every episode must end within spec.max_steps={limit} steps"
    mask = np.arange(n) == n - 1
    obs = reset_env(env, options={"reset_mask": mask})
    assert equal(p, obs["state"][~mask], last["state"][~mask]), (
        "a masked reset must leave frozen envs as they were"
    )
    now = step_env(env, acts[0])
    _check_frozen(p, last, now, over & ~mask)
    if limit > 1 and now["truncated"][-1]:
        raise AssertionError("a reset must clear the flags and the step count of the env")


def _check_flags(now: dict, age: np.ndarray, limit: int, over: np.ndarray, cuts: bool) -> None:
    both = now["terminated"] & now["truncated"]
    assert not both.any(), f"terminated and truncated must not both be true (env {both.argmax()})"
    early = now["truncated"] & ~over & (age < limit)
    assert cuts or not early.any(), (
        f"env {early.argmax()} was truncated after {age[early.argmax()]} steps, but spec.max_steps is {limit}"
    )
    late = ~(now["terminated"] | now["truncated"]) & (age >= limit)
    assert not late.any(), f"env {late.argmax()} must be over after spec.max_steps={limit} steps"


def _check_frozen(p: EnvProbe, last: dict, now: dict, over: np.ndarray) -> None:
    for i in np.flatnonzero(over):
        for k in ("terminated", "truncated", "success"):
            assert now[k][i] == last[k][i], f"an env that is over must keep {k} until it is reset (env {i})"
        assert now["reward"][i] == 0, (
            f"an env that is over must give reward 0, got {now['reward'][i]} (env {i})"
        )
        for k in now:
            if k in ("state", "task") or k.startswith("image/"):
                assert equal(p, now[k][i], last[k][i]), f"an env that is over must keep obs[{k!r}] (env {i})"


def _snapshot(p: EnvProbe) -> bool | None:
    n = p.n
    env: Any = p.env  # these two methods are optional
    one: Any = p.one
    if not hasattr(env, "get_state"):
        return False
    k = p.span // 2
    acts = p.actions(p.limit + 2)
    at = reset_env(env, seed=6)["state"]
    for a in acts[:k]:
        at = step_env(env, a)["state"]
    state = env.get_state()
    assert isinstance(state, dict) and state, "get_state must return a dict of arrays"
    for name, x in state.items():
        assert np.ndim(x) >= 1 and len(x) == n, f"get_state()[{name!r}] must have one row per env ({n})"
    saved = {name: as_numpy(x) for name, x in state.items()}
    tail = run_steps(env, acts[k:])  # to the end of every episode
    over = env.get_state()
    following = run_episode(env, acts[: p.span])
    for name, x in state.items():
        assert np.array_equal(as_numpy(x), saved[name], equal_nan=saved[name].dtype.kind == "f"), (
            f"get_state()[{name!r}] must be a copy that later steps leave alone"
        )
    env.set_state(state)
    nothing = reset_env(env, options={"reset_mask": np.zeros(n, bool)})
    assert equal(p, nothing["state"], at), "a reset of no env must give the observation of the present states"
    assert_same(p, run_steps(env, acts[k:]), tail, "after set_state the episode must go on exactly as before")
    assert_same(
        p, run_episode(env, acts[: p.span]), following, "after set_state the next episode must be as before"
    )
    env.set_state(over)
    assert_same(
        p,
        run_steps(env, acts[:1]),
        {x: v[-1:] for x, v in tail.items()},
        "an env that was over must be over after set_state",
    )

    env.set_state(state)  # all but env 1 go back one step: env 1 is one step ahead of the others
    step_env(env, acts[k])
    env.set_state(state, mask=np.arange(n) != 1)
    ahead = acts[k:-1].copy()
    ahead[:, 1] = acts[k + 1 :, 1]
    got = run_steps(env, ahead)
    rest = np.flatnonzero(np.arange(n) != 1)
    assert_same(
        p,
        got,
        {x: v[:-1] for x, v in tail.items()},
        "set_state must restore the envs of its mask",
        rows_a=rest,
        rows_b=rest,
    )
    assert_same(
        p,
        got,
        {x: v[1:] for x, v in tail.items()},
        "set_state must leave the envs outside its mask",
        rows_a=[1],
        rows_b=[1],
    )

    env.set_state({name: x[[0] * n] for name, x in state.items()})
    forked = run_steps(env, np.repeat(acts[k:, :1], n, axis=1))
    for i in range(n):
        assert_same(
            p,
            forked,
            tail,
            "a state forked to every env must give each the same episode",
            rows_a=[i],
            rows_b=[0],
        )
    one.reset(seed=0)
    one.set_state({name: x[1:2] for name, x in state.items()})
    assert_same(
        p,
        run_steps(p.one, acts[k:, 1:2]),
        tail,
        "a state must go on the same in another env object",
        rows_b=[1],
    )
    return None


def _expert(p: EnvProbe) -> bool | None:
    env: Any = p.env  # an expert is optional
    if not hasattr(env, "expert_action"):
        return False
    acts = p.actions(p.span)
    plain = run_episode(env, acts, seed=9)
    reset_env(env, seed=9)
    rows = []
    for a in acts:
        x = env.expert_action()
        e = as_numpy(x)
        assert e.shape == a.shape and e.dtype == np.float32, (
            f"expert_action must be float32 of shape {a.shape}, got {e.dtype} of shape {e.shape}"
        )
        assert np.isfinite(e).all() and (np.abs(e) <= 1).all(), "expert_action must be finite and in [-1, 1]"
        assert equal(p, e, as_numpy(env.expert_action())), (
            "expert_action must depend on the present states only"
        )
        if hasattr(env, "subtask"):
            done = as_numpy(env.subtask())
            assert done.shape == (len(a),) and done.dtype == np.int64, (
                f"subtask must be int64 of shape ({len(a)},)"
            )
        rows.append(step_env(env, a))
    got = {k: np.stack([r[k] for r in rows]) for k in rows[0]}
    assert_same(p, got, {k: plain[k] for k in got}, "expert_action must not disturb the episode")
    return None


def _render(p: EnvProbe) -> bool | None:
    if p.env.render_mode != "rgb_array":
        return False
    acts = p.actions(2)
    plain = run_episode(p.env, acts, seed=10)
    reset_env(p.env, seed=10)
    frames = np.asarray(p.env.render())
    assert (
        frames.ndim == 4 and frames.shape[0] == p.n and frames.shape[3] == 3 and frames.dtype == np.uint8
    ), f"render must return uint8 [{p.n}, h, w, 3], got {frames.dtype} of shape {frames.shape}"
    got = run_steps(p.env, acts)
    assert_same(p, got, {k: plain[k] for k in got}, "render must not disturb the episode")
    return None
