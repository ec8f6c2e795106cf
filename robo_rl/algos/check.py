"""One contract suite for every method, ours and the user's own: on-policy ones
(`robo_rl.algos.onpolicy.Learner`) and those that learn from replay
(`robo_rl.algos.offpolicy.OffPolicyLearner`).

`check_method(make, options, policy)` raises AssertionError with one sentence that says what the method does
wrong, or returns the names of the parts that were checked. It learns from random numbers; `policy` is left as
it was.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch

from robo_rl.algos.offpolicy import OffPolicyLearner, tensors
from robo_rl.algos.onpolicy import Demos
from robo_rl.checkpoint import pack, reread
from robo_rl.options import MethodOptions, OffPolicyOptions, OnPolicyOptions, RolloutOptions
from robo_rl.policies.check import observations
from robo_rl.policies.policy import words_of
from robo_rl.replay import EXPERT, POLICY, Batch
from robo_rl.rollout import Collector, Rollout

METHODS = ("update", "after_collect", "state_dict", "load_state_dict")
REPLAY_METHODS = ("update", "begin_online", "state_dict", "load_state_dict")
DECISIONS = 6  # of a rollout, at most


class RandomEnv:
    """N envs of random observations and rewards that a policy with the spec `spec` fits; every episode takes
    `limit` steps."""

    def __init__(self, spec, num_envs: int, limit: int, seed: int):
        self.spec, self.num_envs, self.limit, self.rng, self.steps = (
            spec,
            num_envs,
            limit,
            np.random.default_rng(seed),
            0,
        )

    def _obs(self) -> dict:
        n, s, h = self.num_envs, self.spec, self.spec.image_size
        return {
            "state": self.rng.standard_normal((n, s.state)).astype(np.float32),
            "task": np.array(["do it"] * n),
        } | {f"image/{v}": self.rng.integers(0, 256, (n, h, h, 3), np.uint8) for v in s.views}

    def reset(self, *, seed=None, options=None):
        """Every env begins again, for they all end together."""
        self.steps = 0
        return self._obs(), {}

    def step(self, actions):
        self.steps += 1
        n, over = self.num_envs, self.steps >= self.limit
        won = self.rng.random(n) < 0.5
        return (
            self._obs(),
            (won & over).astype(np.float32),
            won & over,
            ~won & over,
            {"success": won & over},
        )


def rollouts(policy, options: RolloutOptions, count: int, seed: int = 0) -> list[Rollout]:
    """Rollouts of the present policy in random envs; with a group advantage two groups of whole episodes."""
    n = 4 if options.advantage == "gae" else 2 * options.group
    t = min(options.decisions or DECISIONS, DECISIONS)
    env = RandomEnv(policy.spec, n, t * policy.options.execute, seed)
    collector = Collector(env, policy, options.gamma, seed)
    return [collector.collect(policy, t) for _ in range(count)]


def random_batch(policy, size: int, rng: np.random.Generator) -> Batch:
    """`size` transitions of random numbers, as replay gives them for this policy."""
    spec, e = policy.spec, policy.options.execute

    def observed() -> dict[str, np.ndarray]:
        if spec.views:
            return {"context": rng.standard_normal((size, policy.context_size)).astype(np.float32)}
        return {"state": rng.standard_normal((size, spec.state)).astype(np.float32)} | (
            {"tokens": np.repeat(words_of(["do it"], spec), size, 0)} if spec.language else {}
        )

    over = rng.random(size) < 0.2
    reward = (over & (rng.random(size) < 0.5)).astype(np.float32)
    return Batch(
        observed(),
        rng.uniform(-1, 1, (size, e, spec.action)).astype(np.float32),
        reward,
        np.where(over, 0, 0.95).astype(np.float32),
        observed(),
        np.full(size, e),
        np.ones((size, e), bool),
        rng.choice(np.array([POLICY, EXPERT], np.uint8), size),
        reward,
        np.zeros((size, spec.action), np.float32),
    )


def with_demos(make: Callable, options: MethodOptions, policy) -> Callable:
    """`make`, called as a run calls it: with demonstrations, random ones, where the options keep supervision
    beside RL."""
    if isinstance(options, OnPolicyOptions) and options.bc_coef:
        return functools.partial(make, demos=random_demos(policy))
    return make


def random_demos(policy) -> Demos:
    """A sampler of random demonstrations."""

    def sample(size: int, generator: torch.Generator):
        shape = (size, policy.options.horizon, policy.spec.action)
        chunks = 2 * torch.rand(shape, generator=generator) - 1
        return observations(policy.spec, size), chunks, torch.ones(shape[:2])

    return sample


def check_method(make: Callable, options: MethodOptions, policy, seed: int = 0) -> tuple[str, ...]:
    """Check the learner `make(policy, options, seed)` -> the names of the parts checked."""
    policy = copy.deepcopy(policy).train()
    make, names = with_demos(make, options, policy), policy.state_dict().keys()
    learner = make(policy, options, seed)
    if isinstance(options, OffPolicyOptions):
        learn = _check_replay(learner, options, policy)
    else:
        assert isinstance(options, RolloutOptions)
        learn = _check_rollouts(learner, options, policy)
    for name, x in policy.state_dict().items():
        assert name in names, (
            f"a method must not add weights to the policy, as {name}: workers and load_policy make it "
            "without them; keep them in the learner, and in its state_dict"
        )
        assert bool(torch.isfinite(x).all()), f"an update must leave the weights finite, {name} is not"
    _resume(make, options, learner, policy, learn, seed)
    return "members", "metrics", "resume"


def _check_rollouts(learner, options: RolloutOptions, policy) -> Callable:
    """Check members and metrics -> `learn(learner)`, one more update."""
    _members(learner, policy, METHODS, "onpolicy.Learner")
    assert hasattr(getattr(learner, "sampler", None), "act"), (
        "learner.sampler must be the policy that acts: usually learner.policy"
    )
    _takes(learner.update, "update(rollout, progress, version)", 0, 0.0, 0)
    first, second = rollouts(policy, options, 2)
    before = _tensors(first)
    _metrics(learner.update(first, 0.0, 0))
    for name, x in _tensors(first).items():
        assert torch.equal(x, before[name]), (
            f"update must not change the rollout that it is given, {name.lstrip('0123456789/')} differs: "
            "change a copy (x - y, not x.sub_(y))"
        )
    learner.after_collect(first)

    def learn(x) -> None:
        x.update(second, 0.5, 1)
        x.after_collect(second)

    return learn


def _steps(learner: OffPolicyLearner, policy) -> None:
    """The metrics of its steps, where the loop is that of OffPolicyLearner."""
    if type(learner).update is not OffPolicyLearner.update:
        return
    rows = tensors(policy, random_batch(policy, learner.options.batch, np.random.default_rng(2)))
    for step in (learner.critic_step, learner.actor_step):
        metrics = step(rows)
        assert isinstance(metrics, dict), (
            f"{step.__name__} must return a dict of metrics, got {type(metrics).__name__}"
        )
        for name, x in metrics.items():
            number = isinstance(x, (int, float)) or isinstance(x, torch.Tensor) and x.numel() == 1
            assert isinstance(name, str) and number, (
                f"the metrics of {step.__name__} must be numbers or tensors of one number, got {name!r}: "
                f"{tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__}"
            )
            assert not getattr(x, "requires_grad", False), (
                f"the metrics of {step.__name__} must not carry gradients: give {name!r}.detach()"
            )


def _tensors(rollout: Rollout) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a rollout, by name."""
    out: dict[str, torch.Tensor] = {}
    pack({f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name != "ended"}, out)
    return out


def _check_replay(learner, options: OffPolicyOptions, policy) -> Callable:
    """Check members and metrics -> `learn(learner)`, more updates of critic and actor."""
    assert isinstance(learner, OffPolicyLearner), (
        f"the learner must derive from robo_rl.algos.offpolicy.OffPolicyLearner, got {type(learner).__name__}"
    )
    _members(learner, policy, REPLAY_METHODS, "offpolicy.OffPolicyLearner")
    for name in learner.owns:
        assert hasattr(getattr(learner, name, None), "state_dict"), (
            f"owns names parts of the learner that have a state_dict, {name!r} is none"
        )
    _steps(learner, policy)
    assert isinstance(getattr(learner, "offline_actor", None), bool), (
        "learner.offline_actor must say whether the actor learns from the demonstrations before anything is "
        "collected"
    )
    _takes(learner.update, "update(sample, count, actor)", 0, 1, actor=True)

    def learn(x, seed: int = 1, actor: bool = True):
        rng = np.random.default_rng(seed)
        return x.update(lambda n: random_batch(policy, n, rng), 2 * options.actor_every, actor=actor)

    _metrics(learn(learner, 0, learner.offline_actor))
    learner.begin_online()
    _metrics(learn(learner))
    return learn


def _members(learner, policy, methods: tuple[str, ...], contract: str) -> None:
    for name in methods:
        assert callable(getattr(learner, name, None)), (
            f"the learner lacks the method {name!r} (robo_rl.algos.{contract})"
        )
    assert getattr(learner, "policy", None) is policy, (
        "learner.policy must be the policy that it was made with"
    )


def _takes(method: Callable, what: str, *positional, **named) -> None:
    try:
        inspect.signature(method).bind(*positional, **named)
    except TypeError as e:
        raise AssertionError(f"the learner must have the method {what}: {e}") from None


def _metrics(metrics) -> None:
    assert isinstance(metrics, dict), f"update must return a dict of metrics, got {type(metrics).__name__}"
    for name, value in metrics.items():
        assert isinstance(name, str) and isinstance(value, (int, float)), (
            f"the metrics of update must be numbers by name, got {name!r}: {type(value).__name__}"
        )


def _resume(make, options: MethodOptions, learner, policy, learn: Callable, seed: int) -> None:
    """A learner whose state was saved and loaded must learn on bit for bit as the one that was not."""
    state = learner.state_dict()
    assert isinstance(state, dict), f"state_dict must return a dict, got {type(state).__name__}"
    try:
        saved = reread(state, "the state of a learner")
    except (TypeError, AttributeError) as e:
        raise AssertionError(
            f"state_dict must be a dict of tensors, arrays, numbers, strings, dicts and lists: {e}"
        ) from None
    other = copy.deepcopy(policy)
    again = make(other, options, seed)
    other.load_state_dict(policy.state_dict())
    again.load_state_dict(saved)
    for _ in range(2):  # what an update leaves outside the policy shows in the next one
        learn(learner)
        learn(again)
    acting = getattr(learner, "sampler", policy), getattr(again, "sampler", other)
    for one, two in ((policy, other), acting):
        weights = two.state_dict()
        for name, x in one.state_dict().items():
            assert torch.equal(x, weights[name]), (
                f"a learner that loads the state_dict of another must learn as that does, {name} differs: a "
                "run would not resume exactly"
            )
