"""Put a simulator, a task, a policy or a method, ours or the user's own, through its contract suite."""

import contextlib
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment import envs, recipes
from robo_rl.experiment.methods import find_method
from robo_rl.options import FROM_REPLAY
from robo_rl.plugins import error_words, is_object

STEPS = 100  # of an episode in the suite of envs, where the env's own limit is longer than that takes
SEEDED = (
    "; draw all that is random from self.np_random, which super().reset(seed=seed) seeds; where a package "
    "draws from another generator, such as np.random, seed that in the reset of a wrapper of yours"
)
KEPT = (
    "; if the difference is small, the simulator keeps something of the episode before: it trains so, and an "
    "evaluation repeats nearly, not exactly"
)
ONE_START = (
    "; an env that always begins alike has one episode to evaluate: look for an argument that draws its "
    "start (gym:ID,NAME=VALUE)"
)
SLOW = 0.01  # a step of an env [s] with which the suite of such episodes takes minutes


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Check what is named against its contract: an env (--sim, --task), a policy (--policy), a method
    (--algo)."""

    sim: str = ""
    """As in robo_rl train --sim."""
    task: str = ""
    """As in robo_rl train --task."""
    obs: str = "state"
    """state, or rgb: with cameras."""
    policy: str = ""
    """As in robo_rl train --policy.kind; with --algo: the policy that it learns."""
    algo: str = ""
    """As in robo_rl train --algo."""


def check(options: CheckOptions) -> dict[str, tuple[str, ...]]:
    """Names of the parts that were checked of each thing that is named. UserError: one sentence that says
    what is wrong."""
    if not any((options.sim, options.task, options.policy, options.algo)):
        raise UserError(
            "name what to check: --sim, --task, --policy or --algo, one of ours or module:object of your own"
        )
    done = {}
    sim = options.sim or "mujoco"
    if options.sim or options.task:
        done[" ".join(filter(None, (sim, options.task)))] = _checked(
            f"--sim {sim}", lambda: _env(options, sim)
        )
    if options.policy:
        done[options.policy] = _checked(f"--policy.kind {options.policy}", lambda: _policy(options))
    if options.algo:
        done[options.algo] = _checked(f"--algo {options.algo}", lambda: _method(options))
    return done


def _checked(what: str, run) -> tuple[str, ...]:
    """What `run` checks of `what`."""
    try:
        return run()
    except AssertionError as e:
        fault = str(e) or error_words(e)
        remedy = seeding(fault) if what.startswith("--sim gym:") else ""
        raise UserError(f"{what}: {fault}{remedy}") from None


def seeding(fault: str) -> str:
    """What helps a Gymnasium env whose check says `fault`, where that is about seeds."""
    if "seed" not in fault:
        return ""
    return SEEDED + KEPT * ("by up to" in fault) + ONE_START * ("another seed" in fault)


def _env(options: CheckOptions, sim: str) -> tuple[str, ...]:
    envs.check_names(sim, options.task, obs=options.obs)
    from sims.check import MAX_STEPS, check_env

    world = sim.startswith("wm:")
    asked: dict[str, Any] = {"obs": options.obs} | ({"image_size": 0} if world else {})  # 0: as recorded
    first = envs.make(sim, options.task, 1, **asked)
    limit, seconds = first.spec.max_steps, step_seconds(first)
    first.close()
    most = MAX_STEPS if seconds < SLOW else max(3, round(STEPS * SLOW / seconds))
    short: dict[str, Any] = {"max_steps": min(most, STEPS)} if limit > most else {}
    if short and seconds >= SLOW:
        warnings.warn(
            f"a step of an env takes {seconds:.2g} s: episodes are checked to step {short['max_steps']} "
            "alone; train it with --workers N --envs N, which step beside each other",
            stacklevel=1,
        )
    made: list[Any] = []

    def make(n: int):
        made.append(envs.make(sim, options.task, n, **asked, **short))
        return made[-1]

    # a world model may end an episode, and its sums depend on the number of envs
    done = check_env(make, cuts=world, atol=1e-4 if world else 0.0)
    silent = [env for env in made if getattr(env, "reports_success", True) is False]
    if silent and not any(getattr(env, "reports_success", True) for env in made):
        from robo_rl.experiment.evaluation import NO_SUCCESS, other_flags

        warnings.warn(NO_SUCCESS.format(silent[0].spec.id) + other_flags(silent[0]), stacklevel=1)
    return done


def step_seconds(env) -> float:
    """How long a step of one env takes [s]: the shorter of two; 0 where it fails, which the suite says
    better."""
    times = []
    with contextlib.suppress(Exception):
        actions = np.zeros(env.action_space.shape, np.float32)
        env.reset(seed=0)
        for _ in range(2):
            begin = time.perf_counter()
            env.step(actions)
            times.append(time.perf_counter() - begin)
    return min(times, default=0.0)


def _head(options: CheckOptions, algo: str):
    """(options of the policy, what it sees)."""
    from robo_rl.policies import ObsSpec

    head = recipes.recipe("mujoco", "reach", algo, options.obs, "quick").policy
    kind = options.policy or head.kind
    spec = ObsSpec(
        state=12,
        action=7,
        views=("front",) if options.obs == "rgb" else (),
        image_size=32 if options.obs == "rgb" else 0,
        language=options.obs == "rgb",
    )
    return replace(
        head,
        kind=kind,
        horizon=4,
        execute=2,
        hidden=32,
        **({"finetune_steps": 2} if kind == "diffusion" else {}),
    ), spec


def _policy(options: CheckOptions) -> tuple[str, ...]:
    if options.policy in FROM_REPLAY:
        raise UserError(
            f"--policy {options.policy} acts for methods that learn from replay: it has no log-probs to check"
        )
    head, spec = _head(options, "pi_rl")
    from robo_rl.policies import make_policy
    from robo_rl.policies.check import CLOSE, check_policy

    return check_policy(
        lambda seed: make_policy(head, spec, seed),
        head,
        spec,
        atol=0.0 if is_object(options.policy) else CLOSE,
    )


def _method(options: CheckOptions) -> tuple[str, ...]:
    config = recipes.recipe("mujoco", "reach", options.algo, options.obs, "quick")
    if options.algo == "bc":
        raise UserError("--algo bc is no method of RL, the suite of methods is for those")
    head, spec = _head(options, options.algo)
    from robo_rl.algos.check import check_method
    from robo_rl.policies import make_policy

    return check_method(find_method(options.algo), config.rl, make_policy(head, spec, 0))
