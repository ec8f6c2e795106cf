"""The honest number: fixed starts, paired noise, Wilson intervals; of the policy that a run is making, and of
its checkpoints."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from robo_rl.device_names import check_device
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment import planning
from robo_rl.experiment.by_task import by_instruction, by_task, told_of
from robo_rl.experiment.config import TrainConfig, load_config
from robo_rl.experiment.envs import NONE, ON_DEVICE, make, make_env, obs_spec, task_count
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.experiment.foreign import foreign_policy
from robo_rl.experiment.reporting import Reporter
from robo_rl.experiment.robot_names import twin
from robo_rl.options.foreign import check_foreign_alone
from robo_rl.starts import CHOOSE, REPORT
from robo_rl.types import task_names

if TYPE_CHECKING:
    import numpy as np

ARMS = 8  # side by side with on="arm"
FILMED = 4  # episodes of a video


@dataclass(frozen=True, kw_only=True)
class EvalConfig(planning.PlanningOptions):
    """How a checkpoint of a run is evaluated."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is evaluated": (
            "checkpoint",
            "task",
            "policy",
            "lerobot_python",
            "lerobot_cameras",
            "execute",
            "demos",
            "episodes",
            "seed",
            "against",
            "max_steps",
        ),
        "Planning in a world model": ("plan_in", "plan_candidates", "plan_rounds", "plan_ahead"),
        "Where": ("sim", "envs", "threads", "device", "on"),
        "Simulated real time (--on sim, arm)": ("chunking", "latency", "latency_jitter"),
        "On an arm (--on arm, dds)": ("controller", "speed", "domain", "namespace"),
        "What is written": ("video", "save", "json"),
    }

    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    task: str = ""
    """Of a run over several tasks this one alone; empty: all of them. Of a run without a simulator the task
    of --sim."""
    episodes: int = 200
    """Starts of each task, each of which is one episode; with --demos the most that are looked at."""
    seed: int = REPORT
    """Which list of starts: 0 is the one that the best checkpoint was chosen on, 1 the one that training
    reports on; every list is disjoint from training and from the others."""
    envs: int = 0
    """Envs in parallel; 0: as the run evaluated. Results are byte-identical for the same number."""
    threads: int = 0
    """Simulation threads; 0: the run's own."""
    device: str = "cpu"
    """cpu, cuda or cuda:N: where the policy computes."""
    policy: str = ""
    """Who acts in place of the checkpoint, on the same starts: ws://HOST:PORT of a policy server on openpi's
    wire (ROBO_RL_TOKEN has its token, if it asks for one), or lerobot:FOLDER, a policy that LeRobot saved."""
    execute: int = 0
    """With --policy: rows of its chunks that are executed; 0: as many as the run's policy."""
    lerobot_python: str = ""
    """With --policy lerobot:FOLDER: the Python of an environment that has LeRobot; empty:
    ROBO_RL_LEROBOT_PYTHON."""
    lerobot_cameras: str = ""
    """With --policy lerobot:FOLDER: which of its cameras is which of ours, NAME=CAMERA with commas between,
    where names differ."""
    sim: str = ""
    """Another simulator than the run's own, for example mujoco for a policy that was trained in a world
    model."""
    on: str = "sim"
    """sim: the run's own simulator; arm: the governed arm over the in-process wire, at 1 kHz in lockstep;
    dds: the arm of `robo_rl sim-arm --speed 1.5` over DDS, in real time."""
    controller: str = "joint"
    """With --on arm and dds: joint targets to joints as stiff as the simulator's; or cartesian: tool poses to
    Cartesian impedance (`robo_rl sim-arm --controller` must be the same)."""
    speed: float = 1.5
    """With --on arm and dds: of the tool [m/s], as in `robo_rl sim-arm`; 1.5 is what a policy of sims/mujoco
    learnt with, below 1.0 it runs in slow motion."""
    chunking: str = ""
    """The robot goes on while inference takes its time, and where chunks meet: naive takes the new one as it
    is, blend spreads the step, rtc draws the new one to agree with what of the old one will have run (flow
    policies), trained likewise by a policy taught with --policy.commit; "": as in training, trained where
    that was with --latency, else the robot waits."""
    latency: float | None = None
    """With --chunking: seconds that each inference takes, 0 to 10; None: as the run was trained. 0 without
    --chunking: the robot waits."""
    latency_jitter: float | None = None
    """With --chunking: up to so many seconds more, at random; None: as the run was trained, unless --latency
    is given."""
    max_steps: int = 0
    """Actions of an episode; 0: as the run was trained."""
    domain: int = -1
    """With --on dds: the ROS domain; -1: ROS_DOMAIN_ID, else 0."""
    namespace: str = ""
    """With --on dds: prefix of all topics."""

    def __post_init__(self) -> None:
        choose("--on", self.on, ("sim", "arm", "dds"))
        choose("--controller", self.controller, ("joint", "cartesian"))
        choose("--chunking", self.chunking, ("", "naive", "blend", "rtc", "trained"))
        in_range("--latency", self.latency or 0.0, 0, 10)
        in_range("--latency-jitter", self.latency_jitter or 0.0, 0, 10)
        if not self.chunking and (self.latency or self.latency_jitter):
            raise UserError(
                "--latency needs --chunking naive, blend, rtc or trained: else the robot waits for the policy"
            )
        if self.chunking and self.on == "dds":
            raise UserError(
                "--chunking is for simulated time; on an arm in real time: robo_rl deploy --chunking"
            )
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--domain", self.domain, -1, 232)
        in_range("--episodes", self.episodes, 1, 10**6)
        in_range("--seed", self.seed, 0, 2000)
        in_range("--envs", self.envs, 0, 10**6)
        in_range("--max-steps", self.max_steps, 0, 10**6)
        in_range("--threads", self.threads, 0, 4096)
        in_range("--execute", self.execute, 0, 1024)
        check_foreign_alone(self)
        if self.policy and (self.on != "sim" or self.chunking):
            raise UserError("--policy acts in the run's simulator: it goes without --on and --chunking")
        planning.check(self)
        check_device(self.device)
        if self.device != "cpu" and self.policy:
            raise UserError(f"--device is of the run's policy, and --policy {self.policy} acts elsewhere")
        if self.plan_in and (self.policy or self.chunking):
            raise UserError(
                "--plan-in tries chunks of the run's own policy while the robot waits: it goes without "
                "--policy and --chunking"
            )


AnyEvalConfig = TypeVar("AnyEvalConfig", bound=EvalConfig)


class Evaluator:
    """Evaluates policies of one run in an env of its own: evals/<label>.json, a row of metrics, videos."""

    def __init__(self, config: TrainConfig, folder: Path, report: Reporter):
        self.config, self.folder, self.report = config, folder, report
        self.env: Any = None
        self.told = False

    def evaluate(self, label: str, policy, which: int, now: int, step: int) -> dict:
        """Evaluate `policy`, which is of `step`, on the starts of list `which`, at step `now` of the run; the
        labels sft and final are filmed too. -> what `robo_rl.evaluation.evaluate` gives, with n and the
        interval."""
        from robo_rl import files
        from robo_rl.evaluation import evaluate
        from robo_rl.starts import eval_starts
        from robo_rl.stats import bootstrap_mean, success_rate

        config, began, count = self.config, time.perf_counter(), task_count(self.config)
        starts = eval_starts(config.eval_episodes * count, which)
        policy.eval()
        if config.latency:
            from robo_rl.experiment.latency import evaluate_late
            from robo_rl.experiment.policy_server import actor_of

            act = actor_of(policy, which).choose("trained")

            def play(env: Any) -> dict:
                return evaluate_late(
                    env,
                    act,
                    act.execute,
                    starts,
                    latency=config.latency,
                    jitter=config.latency_jitter,
                    chunking="trained",
                    seed=which,
                )
        else:

            def play(env: Any) -> dict:
                return evaluate(env, policy, starts, which)

        result = self.played(play)
        rate, low, high = success_rate(result["success"], result.get("origin"))
        gain, judged = sum(result["return"]) / len(starts), "no_success" not in result
        if count > 1:
            result["tasks"] = by_task(result["success"], starts, task_names(self.env))
        elif judged and (of_each := by_instruction(result)):
            result["instructions"] = of_each
        result |= {
            "label": label,
            "step": step,
            "time": self.report.elapsed,
            "n": len(starts),
            "list": which,
            "starts": starts.tolist(),
            "wilson": [low, high],
        }
        (self.folder / "evals").mkdir(exist_ok=True)
        files.write_json(self.folder / "evals" / f"{label}.json", result)
        frames = f" from {len(set(result['origin']))} recorded starts" if "origin" in result else ""
        group = "eval" if which == CHOOSE else "best" if label == "best" else "report"
        rates = {"success": rate, "low": low, "high": high} if judged else {}
        row = {f"{group}/{name}": value for name, value in (rates | {"return": gain}).items()}
        row |= {f"{group}/success/{task}": one["success"] for task, one in result.get("tasks", {}).items()}
        self.report.log(now, row | {"time/eval": time.perf_counter() - began}, stage="rl" if now else "sft")
        paid = f"{gain:.2f}" if abs(gain) < 1e9 else f"{gain:.4g}"
        told = f"{interval_words('success', rate, low, high, 3)}  n={len(starts)}{frames}  return {paid}"
        if not judged:
            told = f"{interval_words('return', *bootstrap_mean(result['return']))}  n={len(starts)}{frames}"
        self.report.say(
            f"{label:>14}  {told}  at {self.report.elapsed:.0f} s  "
            f"(starts of list {which}, {'reported' if which == REPORT else 'which choose'})"
        )
        for line in told_of(result, hint=label in ("sft", "final")):
            self.report.say(line)
        if not judged and not self.told:
            self.told = True
            self.report.say(NO_SUCCESS.format(self.env.spec.id) + other_flags(self.env))
        self.report.tell("evaluation", step, rates | {"return": gain, "n": len(starts)}, label)
        if config.video and label in ("sft", "final"):
            self.film(label, policy)
        return result

    def played(self, play: Callable[[Any], dict]) -> dict:
        """What `play(env)` gives; from its first start on again, in an env that is made anew, where the
        simulator failed."""
        from robo_rl.runtime.worker_pool import tried_again

        def failed(words: str) -> None:
            self.report.say(f"the simulator failed, and the evaluation begins anew: {words}", "warning")
            with contextlib.suppress(Exception):
                self.env.close()
            self.env = None

        return tried_again(lambda: play(self.make_env()), failed)

    def make_env(self) -> Any:
        """The env of all evaluations of a run, made at the first of them."""
        if self.env is None:
            # of a robot its simulated twin: robo_rl eval RUN asks the robot
            config = replace(self.config, sim=twin(self.config.sim))
            episodes = config.eval_episodes * task_count(config)
            self.env = make_env(config, env_count(config, episodes, config.eval_envs))
        return self.env

    def success_under_noise(self, policy, which: int, tick: Callable[[int], None]) -> float:
        """Success of `policy` with its exploration noise, on the starts of list `which`; tick(n) is told how
        many episodes ended."""
        from robo_rl.evaluation import evaluate
        from robo_rl.starts import eval_starts

        policy.eval()
        starts = eval_starts(self.config.eval_episodes * task_count(self.config), which)
        result = self.played(lambda env: evaluate(env, policy, starts, which, tick, explore=True))
        return sum(result["success"]) / len(starts)

    def film(self, label: str, policy) -> None:
        """Video of four evaluation episodes; says why when it cannot."""
        from robo_rl.film import filmed_steps
        from robo_rl.runtime.worker_pool import env_words, raised_by_env

        try:
            env = make_env(replace(self.config, sim=twin(self.config.sim)), FILMED, render=True)
            self.report.start("video", most := filmed_steps(env.spec))
            film(env, policy, self.folder / "videos" / f"{label}.mp4", REPORT, self.report.advance)
            self.report.advance(most)  # episodes may end before
        except Exception as e:  # noqa: BLE001 (of a user's simulator: nothing is learnt from a video)
            if not isinstance(e, UserError) and not raised_by_env(e):
                raise
            self.report.say(f"no video: {env_words(e)}")


def chosen_starts(options: EvalConfig, tasks: tuple[str, ...]) -> "np.ndarray":
    """The starts of an evaluation: --episodes of each task, or of --task alone. UserError: the run has no
    such task."""
    from robo_rl.starts import eval_starts, task_of

    starts = eval_starts(options.episodes * len(tasks), options.seed)
    if not options.task:
        return starts
    return starts[task_of(starts, len(tasks)) == tasks.index(choose("task of this run", options.task, tasks))]


def episode_count(config: TrainConfig, options: EvalConfig) -> int:
    """Episodes of an evaluation of a run: of each of its tasks, or of --task alone. UserError: where it
    cannot be evaluated so."""
    count = task_count(config)
    if count > 1 and options.on != "sim":
        raise UserError(
            f"--on {options.on} plays runs of one task, this one has {config.task}: robo_rl deploy RUN "
            "--task NAME plays one of them on an arm"
        )
    if options.task and not config.task:
        raise UserError(
            f"--task {options.task} is of a simulator, and this run has none: name it too (--sim mujoco), or "
            "leave --task out"
        )
    if options.task:
        choose("task of this run", options.task, config.task.split(",") if count > 1 else [config.task])
    return options.episodes * (1 if options.task else count)


def env_count(config: TrainConfig, episodes: int, asked: int) -> int:
    """Envs of an evaluation: as many as asked for, or one per episode where they are cheap, else as many as
    trained; at most one per episode."""
    return min(
        asked or (episodes if config.sim.startswith(("mujoco", "wm:")) else min(episodes, config.envs)),
        episodes,
    )


def film(env, policy, path: Path, which: int, tick: Callable[[int], None] = lambda step: None) -> None:
    """Write the first episodes of list `which` in `env`, made with render=True, as a video, and close it.
    UserError: nothing draws this env."""
    from robo_rl.film import film as write_film
    from robo_rl.starts import eval_starts

    write_film(env, policy, eval_starts(env.num_envs, which), which, path, tick)
    env.close()


def film_checkpoint(run: "str | Path", options: EvalConfig, path: Path) -> None:
    """Write the first episodes of an evaluation of these options as a video. UserError: an arm over DDS, or
    nothing draws it."""
    from robo_rl import checkpoint

    if options.on == "dds":
        raise UserError(
            "--on dds is an arm that does not wait for pictures: film it with robo_rl deploy --video"
        )
    folder, at = pick_checkpoint(Path(run), options.checkpoint)
    config = changed(load_config(folder), options)
    if options.on == "arm":
        config = replace(
            config,
            sim=f"arm:speed={options.speed:g},controller={options.controller}",
            reward="",
            randomise="",
        )
    policy, _ = checkpoint.load_policy(at, options.device)
    config = with_pictures(config, policy.spec)
    in_model = options.sim.startswith("wm:")
    film(
        env_of_model(config, options, FILMED, True) if in_model else make_env(config, FILMED, render=True),
        planning.planned(policy, options, options.seed) if options.plan_in else policy,
        path,
        options.seed,
    )


# ---- checkpoints of a run folder ---------------------------------------------------------------------------


def evaluate_checkpoint(
    path: "str | Path", options: EvalConfig, tick: Callable[[int, int], None] = lambda done, total: None
) -> dict:
    """Evaluate a checkpoint of the run (or checkpoint folder) `path` -> the result document: rates with
    Wilson intervals, by task too, and a list entry per start (no times, so equal runs give equal bytes).
    `tick(done, total)` hears of episodes."""
    import torch

    from robo_rl import checkpoint
    from robo_rl.evaluation import evaluate
    from robo_rl.stats import bootstrap_mean, success_rate

    run, folder = pick_checkpoint(Path(path), options.checkpoint)
    config = changed(load_config(run), options)
    options = as_trained(options, config)
    assert options.latency is not None and options.latency_jitter is not None
    torch.set_num_threads(config.torch_threads)
    policy, meta = checkpoint.load_policy(folder, options.device)
    config = with_pictures(config, policy.spec)
    env, close = evaluation_env(config, policy.spec, options)
    if not hasattr(env, "translate"):  # a world model says itself what does not fit
        checkpoint.check_fits(policy, obs_spec(env, policy.spec.language), str(folder))
    names = task_names(env)
    starts, count = chosen_starts(options, names), env.num_envs
    with real_time_if(options.on == "dds"):
        if options.chunking:
            from robo_rl.experiment.latency import evaluate_late
            from robo_rl.experiment.policy_server import load_actor

            act, _, _ = load_actor(
                str(path), options.checkpoint, options.seed, policy=policy, told=True, device=options.device
            )
            result = evaluate_late(
                env,
                act.choose(options.chunking),
                act.execute,
                starts,
                latency=options.latency,
                jitter=options.latency_jitter,
                chunking=options.chunking,
                seed=options.seed,
                tick=lambda done: tick(done, len(starts)),
            )
        else:
            with acting(policy, options) as who:
                result = evaluate(env, who, starts, options.seed, tick=lambda done: tick(done, len(starts)))
            result |= planning.told(who, options, config.sim)
    result |= close() | ({"policy": options.policy} if options.policy else {})
    rate, low, high = success_rate(result["success"], result.get("origin"))
    tasks = by_task(result["success"], starts, names) if len(names) > 1 else by_instruction(result, least=1)
    if "no_success" in result:
        rate = low = high = None
        tasks = dict.fromkeys(tasks, {"n": len(starts)})
    _, *gains = bootstrap_mean(result["return"], groups=result.get("origin"))
    chosen = meta["best"]["step"] >= 0 and load_config(run).sim != NONE
    chosen = chosen and checkpoint.checkpoints(run) and folder == checkpoint.best(run)
    return {
        "run": run.name,
        "checkpoint": folder.name,
        "step": meta["step"],
        "sim": env.spec.id,
        "seed": options.seed,
        "chosen_on": CHOOSE if chosen else None,
        "n": len(starts),
        "envs": count,
        "max_steps": env.spec.max_steps,
        "success_rate": rate,
        "low": low,
        "high": high,
        "return_mean": sum(result["return"]) / len(starts),
        "return_low": gains[0],
        "return_high": gains[1],
        "tasks": tasks,
        "starts": starts.tolist(),
        **result,
    }


SILENT = "{} gives no success (is_success or success in the info of a step)"
NO_SUCCESS = SILENT + ": its return is told in its place"


def other_flags(env) -> str:
    """What the info of an env that gives no success says in its place, for people."""
    flags = ", ".join(map(repr, getattr(env, "info_flags", ())))
    return (
        f". Its info has {flags}: is one of them success, end the name of the sim with ,success=NAME"
        if flags
        else ""
    )


def interval_words(what: str, value: float, low: float, high: float, digits: int = 2) -> str:
    """A measured value with its interval, for people."""
    return f"{what} {value:.{digits}f}  95 % interval [{low:.{digits}f}, {high:.{digits}f}]"


def acting(policy, options: EvalConfig):
    """The context that gives who acts: the run's policy, that one planning in a model, or the one of --policy
    in its place."""
    from contextlib import closing, nullcontext

    if options.plan_in:
        return nullcontext(planning.planned(policy, options, options.seed))
    if not options.policy:
        return nullcontext(policy)
    return closing(
        foreign_policy(
            options.policy,
            policy.spec,
            options.execute or policy.options.execute,
            options.seed,
            options.lerobot_python,
            options.lerobot_cameras,
        )
    )


def changed(config: TrainConfig, options: EvalConfig) -> TrainConfig:
    """The run's configuration with what the evaluation asks for otherwise."""
    if options.threads:
        config = replace(config, threads=options.threads)
    if options.sim:
        from sims import own_task

        other = options.task if config.sim == NONE and not options.sim.startswith("wm:") else config.task
        config = replace(config, sim=options.sim, judge="", task=own_task(options.sim, other))
    if options.max_steps:
        config = replace(config, max_steps=options.max_steps)
    if config.device != "cpu":
        from robo_rl.device_names import is_usable

        if not is_usable(config.device):  # a run that was brought from a machine with a GPU
            config = replace(config, device=options.device)
    return config


def with_pictures(config: TrainConfig, spec) -> TrainConfig:
    """The configuration with the cameras that a policy of this spec sees, which a run without a simulator has
    from its data set."""
    if not spec.views or config.obs == "rgb" or config.sim == NONE:
        return config
    cameras = ",".join(spec.views) if config.sim.startswith("mujoco") else ""
    return replace(config, obs="rgb", cameras=cameras)


def moved_here(config: TrainConfig, options: EvalConfig) -> str:
    """What to say where the run's simulator steps on another device than in the run; "" where it does not."""
    here = changed(config, options)
    if here.sim not in ON_DEVICE or here.sim != config.sim or here.device == config.device:
        return ""
    return f"{config.sim} ran on {config.device}, which is not here: it steps on {here.device}, slower"


def as_trained(options: AnyEvalConfig, config: TrainConfig) -> AnyEvalConfig:
    """The options with the run's own latency where they say none; over DDS, and with the policy of a server,
    time is what it is."""
    latency, jitter = options.latency, options.latency_jitter
    if config.latency and latency is None and options.on != "dds" and not options.policy:
        return replace(
            options,
            chunking=options.chunking or "trained",
            latency=config.latency,
            latency_jitter=config.latency_jitter if jitter is None else jitter,
        )
    return replace(options, latency=latency or 0.0, latency_jitter=jitter or 0.0)


def env_of_model(config: TrainConfig, options: EvalConfig, num_envs: int, render: bool = False):
    """An env of the model `options.sim`, as it was learnt: what the run's policy sees and commands is
    compared with the model itself, not the options of the run, which may have had no env."""
    model = {"obs": "", "image_size": 0, "max_steps": options.max_steps, "render": render}
    return make(options.sim, config.task, num_envs, **model)


def evaluation_env(config: TrainConfig, spec, options: EvalConfig):
    """(env to evaluate in, `close() -> dict`: closes it and gives what a live arm measured)."""
    wanted = episode_count(config, options)
    if options.sim.startswith("wm:"):
        if options.chunking and spec.units:
            raise UserError(
                "--chunking plays policies of commands; this one learnt in units of its own data: leave it "
                "out"
            )
        env = env_of_model(config, options, env_count(config, wanted, options.envs or config.eval_envs))
    elif options.on == "sim":
        env = make_env(config, env_count(config, wanted, options.envs or config.eval_envs))
    elif options.on == "arm":
        from robo_rl.experiment.arm import make_arm_env

        env = make_arm_env(
            config, spec, min(options.envs or ARMS, options.episodes), options.speed, options.controller
        )
    else:
        from robo_rl.experiment.arm import make_live_env
        from robo_rl.experiment.wire import connect

        wire = connect("robo_rl_eval", options.domain, namespace=options.namespace)
        env, body = make_live_env(config, spec, wire, options.speed, options.controller)

    def close() -> dict:
        env.close()
        if options.on != "dds":
            return {}
        body.end()
        wire.close()
        late = sorted(body.lateness)
        return {
            "live": {
                "late": body.late,
                "steps": body.steps,
                "stops": body.stops,
                "act_after_s": {"median": late[len(late) // 2], "p99": late[int(0.99 * len(late))]},
            }
        }

    return env, close


def real_time_if(live: bool):
    """Real-time priority and no garbage collection, for an arm that does not wait."""
    from contextlib import nullcontext

    if not live:
        return nullcontext()
    from controllers.loop import undisturbed

    return undisturbed()
