"""One contract suite for every env: ours, adapters, world models, the robot. See `sims` for the contract.

`check_env(lambda n: sims.make("mujoco", "reach", n, max_steps=40))` raises AssertionError with one sentence
that says what the env does wrong, or returns the names of the parts that were checked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from robo_rl.errors import UserError
from robo_rl.types import ControlSpec

MAX_STEPS = 200  # an episode longer than this makes the suite slow


def check_env(
    make: Callable[[int], VectorEnv],
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
    seed_lists=False: one random stream serves all envs, so a seed is one number for the whole batch, gives the same
    episodes for the same number of envs only, and a list of seeds is refused with a UserError.
    random_starts=False: the task has one initial state, so different seeds need not differ.
    cuts=True: the env may truncate an episode before its limit (a world model that no longer knows).
    atol: tolerance where the contract says "the same" (0: bit-equal); with one, pictures may differ by 1 of 255.
    """
    assert num_envs >= 3, f"check_env needs num_envs >= 3 to permute envs, got {num_envs}"
    p = _Probe(make(num_envs), make(1), starts, seed_lists, random_starts, cuts, atol, np.random.default_rng(seed))
    try:
        done = []
        for part in (_spaces, _first_obs, _steps, _bad_input, _seeds, _starts, _reset_mask, _frozen,
                     _snapshot, _expert, _render):
            if part(p) is not False:
                done.append(part.__name__[1:])
    finally:
        for env in (p.env, p.one):
            env.close()
    for env in (p.env, p.one):
        env.close()  # closing twice is allowed
    return tuple(done)


@dataclass(frozen=True)
class _Probe:
    env: VectorEnv  # N envs
    one: VectorEnv  # the same task with one env
    starts: bool
    seed_lists: bool
    random_starts: bool
    cuts: bool
    atol: float
    rng: np.random.Generator

    @property
    def n(self) -> int:
        return self.env.num_envs

    @property
    def limit(self) -> int:
        return self.env.spec.max_steps

    @property
    def span(self) -> int:
        """Steps of a short comparison: inside an episode where possible."""
        return max(1, min(10, self.limit - 1))

    def actions(self, steps: int) -> np.ndarray:
        """Random actions [steps, N, A]."""
        dim = self.env.single_action_space.shape[0]
        return self.rng.uniform(-1, 1, (steps, self.n, dim)).astype(np.float32)


# ---------------------------------------------------------------- small tools


def _np(x) -> np.ndarray:
    """A copy as NumPy, of NumPy or of torch on any device."""
    return np.array(x.detach().cpu() if hasattr(x, "detach") else x)


def _obs(obs) -> dict[str, np.ndarray]:
    return {k: _np(v) for k, v in obs.items()}


def _reset(env: VectorEnv, **kw) -> dict[str, np.ndarray]:
    out = env.reset(**kw)
    assert isinstance(out, tuple) and len(out) == 2, "reset must return (obs, info)"
    return _obs(out[0])


def _step(env: VectorEnv, actions: np.ndarray) -> dict[str, np.ndarray]:
    """One step as flat arrays: the observation's, and reward, terminated, truncated, success."""
    out = env.step(_like(env, actions))
    assert isinstance(out, tuple) and len(out) == 5, "step must return (obs, rewards, terminated, truncated, info)"
    obs, reward, terminated, truncated, info = out
    assert "success" in info, "info of every step must have 'success'"
    rest = {"reward": reward, "terminated": terminated, "truncated": truncated, "success": info["success"]}
    return _obs(obs) | {k: _np(v) for k, v in rest.items()}


def _like(env: VectorEnv, actions: np.ndarray):
    """Actions as NumPy, or as torch on the env's device when the env says it has one (`env.device`)."""
    device = getattr(env, "device", None)
    if device is None:
        return actions
    import torch
    return torch.as_tensor(actions, device=device)


def _run(env: VectorEnv, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Steps with actions [T, N, A], stacked to [T, N, ...] per key."""
    rows = [_step(env, a) for a in actions]
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}


def _episode(env: VectorEnv, actions: np.ndarray, **reset) -> dict[str, np.ndarray]:
    """Reset and run: the arrays of `_run` and the first observation under "first/<key>"."""
    first = {f"first/{k}": v[None] for k, v in _reset(env, **reset).items()}
    return first | _run(env, actions)


def _equal(p: _Probe, a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if p.atol and a.dtype.kind == "f":
        return np.allclose(a, b, rtol=0, atol=p.atol)
    if p.atol and a.dtype == np.uint8:
        return bool((np.maximum(a, b) - np.minimum(a, b) <= 1).all())
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _assert_same(p: _Probe, a: dict, b: dict, sentence: str, rows_a=slice(None), rows_b=slice(None)) -> None:
    """Every array [T, N, ...] of `a` at env rows_a equals that of `b` at rows_b."""
    for k in a:
        assert _equal(p, a[k][:, rows_a], b[k][:, rows_b]), f"{sentence} ({k} differs)"


def _differ(a: dict, b: dict) -> bool:
    """Whether some observation differs."""
    return any(not np.array_equal(a[k], b[k]) for k in a if k.endswith("state") or "image/" in k)


def _raises(call: Callable, sentence: str) -> None:
    try:
        call()
    except UserError:
        return
    except Exception as e:
        raise AssertionError(f"{sentence} must raise UserError, but raised {type(e).__name__}: {e}") from e
    raise AssertionError(f"{sentence} must raise UserError, but was accepted")


# ---------------------------------------------------------------- the contract, part by part


def _spaces(p: _Probe) -> None:
    env, n = p.env, p.n
    assert isinstance(env, VectorEnv), f"the env must be a gymnasium.vector.VectorEnv, got {type(env).__name__}"
    assert p.one.num_envs == 1, f"make(1) must have num_envs 1, got {p.one.num_envs}"
    mode = env.metadata.get("autoreset_mode")
    assert mode == AutoresetMode.DISABLED, f"metadata['autoreset_mode'] must be AutoresetMode.DISABLED, got {mode}"
    single, batched = env.single_observation_space, env.observation_space
    assert isinstance(single, spaces.Dict) and "state" in single.spaces, (
        "single_observation_space must be a Dict with 'state'")
    for k, box in single.spaces.items():
        if k == "task":
            continue
        assert k == "state" or k.startswith("image/"), f"observation keys are state, image/<view>, task; got {k!r}"
        assert isinstance(box, spaces.Box), f"the space of {k!r} must be a Box, got {type(box).__name__}"
        want = np.float32 if k == "state" else np.uint8
        assert box.dtype == want, f"the space of {k!r} must be {np.dtype(want)}, got {box.dtype}"
        dims = 1 if k == "state" else 3
        assert len(box.shape) == dims, f"the space of {k!r} must have {dims} axes, got shape {box.shape}"
        assert batched[k].shape == (n, *box.shape), (
            f"observation_space[{k!r}] must have shape {(n, *box.shape)}, got {batched[k].shape}")
    act = env.single_action_space
    assert isinstance(act, spaces.Box) and act.dtype == np.float32 and len(act.shape) == 1, (
        f"single_action_space must be a float32 Box of one axis, got {act}")
    assert (act.low == -1).all() and (act.high == 1).all(), f"actions must be in [-1, 1], got {act}"
    assert env.action_space.shape == (n, *act.shape), (
        f"action_space must have shape {(n, *act.shape)}, got {env.action_space.shape}")

    spec = env.spec
    assert isinstance(spec, ControlSpec), f"env.spec must be a ControlSpec, got {type(spec).__name__}"
    try:
        repr(env)
    except Exception as e:
        raise AssertionError(f"repr(env) must work, but raised {type(e).__name__}: {e}") from e
    assert len(spec.axes) == act.shape[0], (
        f"spec.axes has {len(spec.axes)} axes, but the action space has {act.shape[0]}")
    assert len(set(spec.action_names)) == len(spec.axes), f"spec.axes must have different names, got {spec.action_names}"
    for axis in spec.axes:
        assert axis.low < axis.high, f"axis {axis.name!r} must have low < high, got {axis.low} and {axis.high}"
    assert spec.period > 0, f"spec.period must be > 0 s, got {spec.period}"
    assert 1 <= spec.max_steps <= MAX_STEPS, (
        f"check an env with 1 <= max_steps <= {MAX_STEPS}, got {spec.max_steps}")
    images = tuple(k.removeprefix("image/") for k in single.spaces if k.startswith("image/"))
    assert set(spec.views) == set(images), f"spec.views {spec.views} must be the image keys {images}"
    size = single["state"].shape[0]
    assert len(spec.state_names) in (0, size), (
        f"spec.state_names has {len(spec.state_names)} names for {size} state dimensions")


def _first_obs(p: _Probe) -> None:
    for env in (p.env, p.one):
        out = env.reset(seed=0)
        assert isinstance(out, tuple) and len(out) == 2, "reset must return (obs, info)"
        assert isinstance(out[1], dict), "reset must return a dict as info"
        _check_obs(env, out[0], "reset")


def _check_obs(env: VectorEnv, obs, where: str) -> None:
    n = env.num_envs
    want = set(env.single_observation_space.spaces) | {"task"}
    assert set(obs) == want, f"the observation of {where} must have the keys {sorted(want)}, got {sorted(obs)}"
    for k, x in obs.items():
        a = _np(x)
        if k == "task":
            assert a.shape == (n,) and a.dtype.kind == "U", (
                f"obs['task'] of {where} must be {n} strings, got {a.dtype} of shape {a.shape}")
            continue
        box = env.single_observation_space[k]
        assert a.shape == (n, *box.shape), f"obs[{k!r}] of {where} must have shape {(n, *box.shape)}, got {a.shape}"
        assert a.dtype == box.dtype, f"obs[{k!r}] of {where} must be {box.dtype}, got {a.dtype}"
        if k == "state":
            assert np.isfinite(a).all(), f"obs['state'] of {where} must be finite"


def _steps(p: _Probe) -> None:
    """Dtypes and shapes of a step; an observation handed out is never written to again."""
    env, n = p.env, p.n
    held = env.reset(seed=1)[0]
    before = _obs(held)
    for a in p.actions(min(3, p.limit)):
        obs, reward, terminated, truncated, info = env.step(_like(env, a))
        _check_obs(env, obs, "step")
        assert isinstance(info, dict) and "success" in info, "info of every step must have 'success'"
        flags = {"terminated": terminated, "truncated": truncated, "success": info["success"]}
        for name, x in (flags | {"rewards": reward}).items():
            want = np.float32 if name == "rewards" else bool
            a = _np(x)
            assert a.shape == (n,) and a.dtype == want, (
                f"{name} must be {np.dtype(want)} of shape ({n},), got {a.dtype} of shape {a.shape}")
        assert np.isfinite(_np(reward)).all(), "rewards must be finite"
        for k, x in _obs(held).items():
            assert np.array_equal(x, before[k]), f"a step wrote into obs[{k!r}] that was handed out before"
        held, before = obs, _obs(obs)
    env.reset(seed=2)
    for k, x in _obs(held).items():
        assert np.array_equal(x, before[k]), f"a reset wrote into obs[{k!r}] that was handed out before"


def _bad_input(p: _Probe) -> None:
    env, n, acts = p.env, p.n, p.actions(p.span)
    dim = acts.shape[2]
    plain = _episode(env, acts, seed=3)
    _reset(env, seed=3)
    nan = np.zeros((n, dim), np.float32)
    nan[n // 2, 0] = np.nan
    _raises(lambda: env.step(_like(env, nan)), "an action with NaN")
    nan[n // 2, 0] = np.inf
    _raises(lambda: env.step(_like(env, nan)), "an infinite action")
    for shape in ((n, dim + 1), (n + 1, dim), (dim,)):
        wrong = _like(env, np.zeros(shape, np.float32))
        _raises(lambda wrong=wrong: env.step(wrong), f"actions of shape {shape}, not {(n, dim)},")
    _raises(lambda: env.reset(options={"reset_mask": np.ones(n + 1, bool)}), "a reset_mask of wrong length")
    _raises(lambda: env.reset(seed=list(range(n + 1))), f"{n + 1} seeds for {n} envs")
    if p.starts:
        _raises(lambda: env.reset(options={"starts": np.arange(n + 1)}), f"{n + 1} starts for {n} envs")
    else:
        _raises(lambda: env.reset(options={"starts": np.arange(n)}), "starts, which this env cannot take,")
    if not p.seed_lists:
        _raises(lambda: env.reset(seed=list(range(n))), "a list of seeds, which this env cannot take,")
    after = _run(env, acts)
    _assert_same(p, after, {k: plain[k] for k in after}, "input that is refused must leave the env as it was")


def _seeds(p: _Probe) -> None:
    env, acts = p.env, p.actions(p.span)
    a = _episode(env, acts, seed=7)
    second = _episode(env, acts)
    _assert_same(p, a, _episode(env, acts, seed=7), "the same seed must give the same episode")
    _assert_same(p, second, _episode(env, acts), "the same seed must give the same second episode")
    if p.random_starts:
        assert _differ(a, _episode(env, acts, seed=8)), "another seed must give other episodes"
        assert _differ(a, second), "the second episode after a seed must differ from the first"
    if not p.seed_lists:
        return
    one = _episode(p.one, acts[:, :1], seed=7)
    _assert_same(p, one, a, "the same seed must give env 0 the same episode for any number of envs", rows_b=slice(0, 1))
    _permuted(p, acts, lambda ids: {"seed": [11 + int(i) for i in ids]}, "seed")


def _permuted(p: _Probe, acts: np.ndarray, reset: Callable, what: str) -> dict:
    """The episode of a seed (or start) is independent of the env index, the neighbours and the batch size."""
    order = np.roll(np.arange(p.n), 1)
    a = _episode(p.env, acts, **reset(np.arange(p.n)))
    b = _episode(p.env, acts[:, order], **reset(order))
    _assert_same(p, b, a, f"the same {what} must give the same episode at any env index", rows_b=order)
    i = p.n - 1
    one = _episode(p.one, acts[:, i : i + 1], **reset(np.array([i])))
    _assert_same(p, one, a, f"the same {what} must give the same episode for any number of envs",
                 rows_b=slice(i, i + 1))
    return a


def _starts(p: _Probe) -> bool | None:
    if not p.starts:
        return False
    acts = p.actions(p.span)
    a = _permuted(p, acts, lambda ids: {"options": {"starts": 5 + np.asarray(ids)}}, "start")
    again = _episode(p.env, acts, seed=99, options={"starts": 5 + np.arange(p.n)})
    _assert_same(p, again, a, "a start must give the same episode whatever the seed")
    if p.random_starts:
        other = _episode(p.env, acts, options={"starts": 50 + np.arange(p.n)})
        assert _differ(a, other), "other starts must give other episodes"
    return None


def _reset_mask(p: _Probe) -> None:
    env, n, acts = p.env, p.n, p.actions(2 * p.span)
    k = p.span // 2
    plain = _episode(env, acts[: p.span], seed=4)
    _reset(env, seed=4)
    _run(env, acts[:k])
    held = {key: plain[key][k - 1 : k] if k else plain[f"first/{key}"] for key in ("state", "task")}
    mask = np.zeros(n, bool)
    mask[1] = True
    options = {"reset_mask": mask.copy()}
    obs = _reset(env, options=options)
    assert np.array_equal(options.get("reset_mask"), mask), "reset must not change the options it is given"
    rest = ~mask
    for key, x in held.items():
        assert _equal(p, obs[key][rest], x[0, rest]), f"reset_mask must leave obs[{key!r}] of the other envs as it was"
    after = _run(env, acts[k : p.span])
    tail = {key: plain[key][k:] for key in after}
    _assert_same(p, after, tail, "reset_mask must leave the episodes of the other envs as they were",
                 rows_a=rest, rows_b=rest)
    if p.random_starts and k:
        assert _differ({"state": after["state"][:, 1]}, {"state": tail["state"][:, 1]}), (
            "reset_mask must reset the env it names")
    if p.starts:  # a start under a mask is the start without it
        full = _episode(env, acts[: p.span], options={"starts": 5 + np.arange(n)})
        _reset(env, seed=4)
        _run(env, acts[:k])
        got = _reset(env, options={"starts": 5 + np.arange(n), "reset_mask": mask.copy()})
        assert _equal(p, got["state"][1], full["first/state"][0, 1]), "a start under a reset_mask must be that start"
        assert _equal(p, got["state"][rest], held["state"][0, rest]), "starts must be ignored outside the reset_mask"


def _frozen(p: _Probe) -> None:
    """Episodes end by `max_steps`, never by both flags, and stay frozen; the others go on undisturbed."""
    env, n, limit = p.env, p.n, p.limit
    acts = p.actions(limit + limit // 2 + 3)
    last = _reset(env, seed=5) | {"terminated": np.zeros(n, bool), "truncated": np.zeros(n, bool)}
    age, over = np.zeros(n, int), np.zeros(n, bool)
    for t, a in enumerate(acts):
        if t == limit // 2 and limit > 1:  # env 0 starts again, so that the envs do not end together
            mask = np.arange(n) == 0
            last |= _reset(env, options={"reset_mask": mask})
            age[0], over[0] = 0, False
        now = _step(env, a)
        age += ~over
        _check_flags(now, age, limit, over, p.cuts)
        _check_frozen(p, last, now, over)
        over = now["terminated"] | now["truncated"]
        last = now
    assert over.all(), f"every episode must end within spec.max_steps={limit} steps"
    mask = np.arange(n) == n - 1
    obs = _reset(env, options={"reset_mask": mask})
    assert _equal(p, obs["state"][~mask], last["state"][~mask]), "a masked reset must leave frozen envs as they were"
    now = _step(env, acts[0])
    _check_frozen(p, last, now, over & ~mask)
    if limit > 1 and now["truncated"][-1]:
        raise AssertionError("a reset must clear the flags and the step count of the env")


def _check_flags(now: dict, age: np.ndarray, limit: int, over: np.ndarray, cuts: bool) -> None:
    both = now["terminated"] & now["truncated"]
    assert not both.any(), f"terminated and truncated must not both be true (env {both.argmax()})"
    early = now["truncated"] & ~over & (age < limit)
    assert cuts or not early.any(), (
        f"env {early.argmax()} was truncated after {age[early.argmax()]} steps, but spec.max_steps is {limit}")
    late = ~(now["terminated"] | now["truncated"]) & (age >= limit)
    assert not late.any(), f"env {late.argmax()} must be over after spec.max_steps={limit} steps"


def _check_frozen(p: _Probe, last: dict, now: dict, over: np.ndarray) -> None:
    for i in np.flatnonzero(over):
        for k in ("terminated", "truncated", "success"):
            assert now[k][i] == last[k][i], f"an env that is over must keep {k} until it is reset (env {i})"
        assert now["reward"][i] == 0, f"an env that is over must give reward 0, got {now['reward'][i]} (env {i})"
        for k in now:
            if k in ("state", "task") or k.startswith("image/"):
                assert _equal(p, now[k][i], last[k][i]), f"an env that is over must keep obs[{k!r}] (env {i})"


def _snapshot(p: _Probe) -> bool | None:
    env, n = p.env, p.n
    if not hasattr(env, "get_state"):
        return False
    k = p.span // 2
    acts = p.actions(p.limit + 2)
    _reset(env, seed=6)
    for a in acts[:k]:
        _step(env, a)
    state = env.get_state()
    assert isinstance(state, dict) and state, "get_state must return a dict of arrays"
    for name, x in state.items():
        assert np.ndim(x) >= 1 and len(x) == n, f"get_state()[{name!r}] must have one row per env ({n})"
    saved = {name: _np(x) for name, x in state.items()}
    tail = _run(env, acts[k:])  # to the end of every episode
    over = env.get_state()
    following = _episode(env, acts[: p.span])
    for name, x in state.items():
        assert np.array_equal(_np(x), saved[name], equal_nan=saved[name].dtype.kind == "f"), (
            f"get_state()[{name!r}] must be a copy that later steps leave alone")
    env.set_state(state)
    _assert_same(p, _run(env, acts[k:]), tail, "after set_state the episode must go on exactly as before")
    _assert_same(p, _episode(env, acts[: p.span]), following, "after set_state the next episode must be as before")
    env.set_state(over)
    _assert_same(p, _run(env, acts[:1]), {x: v[-1:] for x, v in tail.items()},
                 "an env that was over must be over after set_state")

    env.set_state(state)  # all but env 1 go back one step: env 1 is one step ahead of the others
    _step(env, acts[k])
    env.set_state(state, mask=np.arange(n) != 1)
    ahead = acts[k:-1].copy()
    ahead[:, 1] = acts[k + 1 :, 1]
    got = _run(env, ahead)
    rest = np.flatnonzero(np.arange(n) != 1)
    _assert_same(p, got, {x: v[:-1] for x, v in tail.items()}, "set_state must restore the envs of its mask",
                 rows_a=rest, rows_b=rest)
    _assert_same(p, got, {x: v[1:] for x, v in tail.items()}, "set_state must leave the envs outside its mask",
                 rows_a=[1], rows_b=[1])

    env.set_state({name: x[[0] * n] for name, x in state.items()})
    forked = _run(env, np.repeat(acts[k:, :1], n, axis=1))
    for i in range(n):
        _assert_same(p, forked, tail, "a state forked to every env must give each the same episode",
                     rows_a=[i], rows_b=[0])
    p.one.reset(seed=0)
    p.one.set_state({name: x[1:2] for name, x in state.items()})
    _assert_same(p, _run(p.one, acts[k:, 1:2]), tail, "a state must go on the same in another env object",
                 rows_b=[1])
    return None


def _expert(p: _Probe) -> bool | None:
    env = p.env
    if not hasattr(env, "expert_action"):
        return False
    acts = p.actions(p.span)
    plain = _episode(env, acts, seed=9)
    _reset(env, seed=9)
    rows = []
    for a in acts:
        x = env.expert_action()
        e = _np(x)
        assert e.shape == a.shape and e.dtype == np.float32, (
            f"expert_action must be float32 of shape {a.shape}, got {e.dtype} of shape {e.shape}")
        assert np.isfinite(e).all() and (np.abs(e) <= 1).all(), "expert_action must be finite and in [-1, 1]"
        assert _equal(p, e, _np(env.expert_action())), "expert_action must depend on the present states only"
        if hasattr(env, "subtask"):
            done = _np(env.subtask())
            assert done.shape == (len(a),) and done.dtype == np.int64, f"subtask must be int64 of shape ({len(a)},)"
        rows.append(_step(env, a))
    got = {k: np.stack([r[k] for r in rows]) for k in rows[0]}
    _assert_same(p, got, {k: plain[k] for k in got}, "expert_action must not disturb the episode")
    return None


def _render(p: _Probe) -> bool | None:
    if p.env.render_mode != "rgb_array":
        return False
    acts = p.actions(2)
    plain = _episode(p.env, acts, seed=10)
    _reset(p.env, seed=10)
    frames = np.asarray(p.env.render())
    assert frames.ndim == 4 and frames.shape[0] == p.n and frames.shape[3] == 3 and frames.dtype == np.uint8, (
        f"render must return uint8 [{p.n}, h, w, 3], got {frames.dtype} of shape {frames.shape}")
    got = _run(p.env, acts)
    _assert_same(p, got, {k: plain[k] for k in got}, "render must not disturb the episode")
    return None
