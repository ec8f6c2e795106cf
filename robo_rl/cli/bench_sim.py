"""`robo_rl bench sim`: each simulator against its bare physics or drawing, and against Gymnasium's vector envs."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import gymnasium
import numpy as np

from robo_rl.cli.bench_rows import Bar, Report, at_least, in_turns, make_row
from robo_rl.errors import UserError

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

WALKERS = ("HalfCheetah-v5", "Hopper-v5")
SIZES = (64, 128)  # pixels
PEER_ENVS, PEER_ENVS_QUICK = (1, 2, 4, 8, 16, 32, 64), (1, 2, 16)
ROUNDS = 5


def measure(args: "Bench", report: Report) -> None:
    """All rows of `robo_rl bench sim`, or those of --task."""
    from sims.mujoco import LOCOMOTION, TASKS
    task = args.task
    if not task or task in TASKS and task not in LOCOMOTION:
        for control in ("ee_delta", "joint_delta"):
            for threads in (1, 2):
                arm(args, report, task or TASKS[0], control, threads)
        for size in SIZES:
            drawing(args, report, task or TASKS[0], size)
    for name in WALKERS:
        if task in ("", name):
            walker(args, report, name)
    if task in LOCOMOTION and task not in WALKERS:
        walker(args, report, task)
    if not task or task not in TASKS:
        maniskill(args, report, task or "PickCube-v1")


# ---- the embedded simulator --------------------------------------------------------------------------------------


def arm(args: "Bench", report: Report, task: str, control: str, threads: int) -> None:
    """State observations of the arm, N = 256, against `Batch` alone on the same physics."""
    from sims.mujoco.env import rates
    n = args.envs or 256
    with_peer = args.peers and control == "ee_delta" and threads == 2
    peers = Peers([arm_peer(task)] * 64, args, report) if with_peer else None
    rounds = []
    for _ in range(1 if args.quick else ROUNDS):
        r = rates(task, n, threads, args.slice / ROUNDS, control)
        rounds.append({"ours": 1 / r["env"], "bare Batch": 1 / r["raw"]} | (peers.turn() if peers else {}))
    bars = [lambda of_limit, over_peer: at_least("of limit", of_limit, 0.85)] if threads == 2 else []
    bars += [lambda of_limit, over_peer: at_least("over peer", over_peer, 2)] if peers else []
    report.add(make_row(
        f"mujoco {task}, N = {n}, {control}, {threads} thread{'s' * (threads > 1)}", "steps/s", columns(rounds),
        "bare Batch", peers.name if peers else "", all_of(bars),
        note="the peer's env does no more than mj_step and copying qpos and qvel" if peers else ""))
    if peers:
        peers.close()


def walker(args: "Bench", report: Report, task: str) -> None:
    """A Gymnasium task, N = 64, against `Batch` alone and Gymnasium's own vector envs; episodes that end are reset."""
    from sims.mujoco import rates
    n = args.envs or 64
    peers = Peers([lambda: gymnasium.make(task, disable_env_checker=True)] * 64, args, report) if args.peers else None
    rounds = []
    for _ in range(1 if args.quick else ROUNDS):
        r = rates(task, n, 2, args.slice / ROUNDS / 3)
        rounds.append({"ours": 1 / r["env"], "bare Batch": 1 / r["raw"]} | (peers.turn() if peers else {}))
    bars = [lambda of_limit, over_peer: at_least("of limit", of_limit, 0.85)]
    bars += [lambda of_limit, over_peer: at_least("over peer", over_peer, 2)] if peers else []
    report.add(make_row(f"mujoco {task}, N = {n}, 2 threads", "steps/s", columns(rounds), "bare Batch",
                        peers.name if peers else "", all_of(bars)))
    if peers:
        peers.close()


def drawing(args: "Bench", report: Report, task: str, size: int) -> None:
    """Two cameras per env through `Renderer`, against mjr_render and mjr_readPixels of prepared scenes alone."""
    import sims
    from sims.mujoco.render import Renderer
    n = min(args.envs or 32, 32)
    env = sims.make("mujoco", task, n)
    env.reset(seed=0)
    what = f"rgb of {task}, {size} x {size}, two cameras, N = {n}"
    try:
        renderer = Renderer(env.batch, env.model, ("front", "wrist"), size, size)
    except UserError as e:
        report.skip(what, str(e))
        return
    rounds = []
    for _ in range(1 if args.quick else ROUNDS):
        r = renderer.rates(args.slice / ROUNDS / 2)
        rounds.append({"ours": 1 / r["render"], "bare mjr": 1 / r["bare"]})
    renderer.close()
    env.close()
    report.add(make_row(what, "images/s", columns(rounds), "bare mjr",
                        bars=all_of([lambda of_limit, over_peer: at_least("of limit", of_limit, 0.8)])))


# ---- ManiSkill ---------------------------------------------------------------------------------------------------


def maniskill(args: "Bench", report: Report, task: str) -> None:
    """Two worker processes against two bare simulators, both control modes, state observations."""
    import sims
    what = f"maniskill {task}, 2 workers"
    if importlib.util.find_spec("mani_skill") is None:
        report.skip(what, "ManiSkill is not installed: pip install 'robo_rl[maniskill]'")
        return
    from sims.maniskill import raw_rate
    for control in ("joint_delta",) if args.quick else ("joint_delta", "ee_delta"):
        n = args.envs or 16
        env = sims.make("maniskill", task, n, control=control, threads=2)
        env.reset(seed=0)
        actions = np.random.default_rng(0).uniform(-1, 1, (64, *env.action_space.shape)).astype(np.float32)
        steps = iter(range(10**9))

        def step(env=env, actions=actions, steps=steps) -> None:
            _, _, terminated, truncated, _ = env.step(actions[next(steps) % len(actions)])
            if (terminated | truncated).all():  # resets are not counted in the bare rate: keep them rare
                env.reset(options={"reset_mask": terminated | truncated})
        rounds = []
        for _ in range(1 if args.quick else 2):  # a start of the bare simulators takes many seconds
            share = args.slice / 4
            ours = in_turns({"ours": (step, n)}, share)["ours"]
            rounds.append({"ours": float(np.median(ours)),
                           "two bare simulators": 1 / raw_rate(task, 2, share, control)})
        env.close()
        bars = [lambda of_limit, over_peer: at_least("of limit", of_limit, 0.85)]
        report.add(make_row(f"{what}, {control}, N = {n}", "steps/s", columns(rounds), "two bare simulators",
                            bars=all_of(bars)))


# ---- Gymnasium's vector envs -------------------------------------------------------------------------------------


class Peers:
    """The faster of the best SyncVectorEnv and the best AsyncVectorEnv over n = 1 .. 64: found first, then measured in
    turns with ours."""

    def __init__(self, makers: list[Callable[[], gymnasium.Env]], args: "Bench", report: Report):
        import mujoco
        mujoco.set_mju_user_warning(lambda text: None)  # one line of a deprecated XML attribute per env and process
        self.seconds = args.slice / ROUNDS
        found: dict[float, tuple[type, int]] = {}  # steps/s -> what makes them
        counts = [n for n in (PEER_ENVS_QUICK if args.quick else PEER_ENVS) if n <= len(makers)]
        for mode in (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv):
            for n in counts:
                env = mode(makers[:n])
                found[self._rate(env, min(1.0, self.seconds / 2))] = mode, n
                env.close()
            rate, (_, n) = max((x for x in found.items() if x[1][0] is mode), key=lambda x: x[0])
            report.say(f"  {mode.__name__}: best at n = {n}, {rate:,.0f} steps/s")
        mode, n = found[max(found)]
        self.name, self.env = f"{mode.__name__}, n = {n}", mode(makers[:n])

    def turn(self) -> dict[str, float]:
        """{name: seconds per step} of one slice."""
        return {self.name: 1 / self._rate(self.env, self.seconds)}

    @staticmethod
    def _rate(env, seconds: float) -> float:
        """Steps/s with random actions; ended episodes start anew by themselves."""
        actions = np.random.default_rng(0).uniform(-1, 1, (16, *env.action_space.shape)).astype(np.float32)
        env.reset(seed=0)
        steps = iter(range(10**9))
        times = in_turns({"peer": (lambda: env.step(actions[next(steps) % 16]), env.num_envs)}, seconds)
        return 1 / float(np.median(times["peer"]))

    def close(self) -> None:
        self.env.close()


def arm_peer(task: str) -> Callable[[], gymnasium.Env]:
    """The least that a Gymnasium env of the arm could do: one `mj_step`, qpos and qvel as observation, no reward."""
    def make() -> gymnasium.Env:
        import mujoco

        from sims.mujoco.env import HOME, build_model
        from sims.mujoco.model import FINGER_OPEN, SUBSTEPS
        from sims.mujoco.tasks import TASKS

        class BareArm(gymnasium.Env):
            def __init__(self):
                self.model = build_model(TASKS[task])
                self.data = mujoco.MjData(self.model)
                size = self.model.nq + self.model.nv
                self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
                self.action_space = gymnasium.spaces.Box(-1, 1, (self.model.nu,), np.float32)
                self.rest = np.concatenate([HOME, np.full(self.model.nu - len(HOME), FINGER_OPEN)])

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                mujoco.mj_resetData(self.model, self.data)
                self.data.qpos[:7] = HOME
                self.steps = 0
                return self._obs(), {}

            def step(self, action):
                self.data.ctrl[:] = self.rest + 0.05 * action
                mujoco.mj_step(self.model, self.data, nstep=SUBSTEPS)
                self.steps += 1
                return self._obs(), 0.0, False, self.steps >= TASKS[task].max_steps, {}

            def _obs(self):
                return np.concatenate([self.data.qpos, self.data.qvel], dtype=np.float32)
        return BareArm()
    return make


def columns(rounds: list[dict[str, float]]) -> dict[str, np.ndarray]:
    return {k: np.array([r[k] for r in rounds]) for k in rounds[0]}


def all_of(bars: list[Callable[[float, float], Bar]]) -> Callable[[float, float, float], list[Bar]]:
    return lambda ours, of_limit, over_peer: [bar(of_limit, over_peer) for bar in bars]
