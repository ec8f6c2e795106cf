"""Record a data set: demonstrations of the scripted expert or of a person, or whatever other actors do, as
LeRobot v3."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from robo_rl.errors import UserError, in_range, plural
from robo_rl.experiment.operators import PERSONS
from robo_rl.types import has_success, task_names


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Record successful episodes of the scripted expert, of a trained policy or of a person (--operator), or
    with --policy all episodes; an existing data set is extended."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is recorded": ("out", "sim", "task", "episodes", "policy", "obs", "seed", "noise", "video"),
        "A person": ("operator", "keep", "speed", "device", "port", "host"),
        "The environment": ("reward", "control", "randomise", "image_size", "max_steps", "envs", "threads"),
        "Data sets that are there already": ("repair", "accept", "tolerance"),
    }

    out: str = ""
    """Folder of the data set; empty: data/<sim>-<task>."""
    sim: str = "mujoco"
    """Simulator, as in robo_rl train --sim."""
    task: str = ""
    """Task of the simulator; "": its first; mujoco: or several, with commas between."""
    episodes: int = 50
    """Episodes to add, from 1 (without --policy: successful ones, of each of the tasks)."""
    policy: str = ""
    """Who acts, all outcomes kept and the executed actions recorded, as a world model needs: expert, random,
    a run or checkpoint folder, or several of them with commas between, which share the episodes."""
    operator: str = "scripted"
    """Who demonstrates: scripted; the folder of a run or checkpoint, whose policy acts as it is evaluated; or
    a person, one robot at a time: console (the page), gamepad, spacemouse, keyboard, each with :FILE where it
    is not the first, and ,mapping=FILE.json; leader:NAMESPACE, an arm on the wire. What a person drove is
    recorded, without pauses."""
    keep: Literal["success", "all"] = "success"
    """Which episodes of a person are recorded; failures too teach a success classifier."""
    speed: float = 1.0
    """Pace of the simulation beside a person, up to 10; 1: real time; 0: as fast as it goes."""
    device: str = ""
    """With --operator console: what the person holds in their hand at this machine, as --operator has it."""
    port: int = 8765
    """TCP port of the page, 0 to 65535; 0: any free one."""
    host: str = "127.0.0.1"
    """Address that the page listens on; anything but loopback lets other machines in (they still need a
    token)."""
    obs: str = "state"
    """state, or rgb: the cameras' pictures too."""
    seed: int = 0
    """Seed of the starts, 0 to 2000; another seed records other episodes."""
    noise: float = 0.0
    """Standard deviation, 0 to 1, of noise on executed actions while the clean ones are recorded (DART); with
    --policy the most an episode may draw, and the noisy actions are recorded. A world model learns contact
    from little: 0.15."""
    reward: str = ""
    """sparse, or dense where the task has it; "": the task's own, and of demonstrations in gym: and envpool:
    sparse, which ends them with success."""
    control: str = ""
    """Action space, as in robo_rl train --control; "": the task's default."""
    randomise: str = ""
    """Domain randomisation, as in robo_rl train --randomise; "": none."""
    image_size: int = 64
    """Pixels of each side of a picture, 16 to 1024."""
    max_steps: int = 0
    """Episode limit [control steps]; 0: the task's own."""
    envs: int = 32
    """Envs that run at once, from 1; beside a person there is one."""
    threads: int = 0
    """Threads of the simulator; 0: one per core."""
    video: Annotated[str, tyro.conf.arg(metavar="PATH.mp4")] = ""
    """Also film the first four episodes, kept or not, those that fail first; with several in --policy some of
    each."""
    repair: str = ""
    """Instead: keep the sound episodes of this damaged data set; originals stay beside it as *.broken."""
    accept: str = ""
    """Instead: take this data set as it is, after another program changed or wrote it, and write its
    checksums."""
    tolerance: float = 1e-4
    """With --accept: largest error of its timestamps [s]."""

    def __post_init__(self) -> None:
        in_range("--episodes", self.episodes, 1, 10**7)
        in_range("--noise", self.noise, 0, 1)
        in_range("--envs", self.envs, 1, 10**5)
        in_range("--seed", self.seed, 0, 2000)
        in_range("--threads", self.threads, 0, 4096)
        in_range("--max-steps", self.max_steps, 0, 10**7)
        in_range("--image-size", self.image_size, 16, 1024)
        in_range("--tolerance", self.tolerance, 0, 1e6)
        in_range("--speed", self.speed, 0, 10)
        in_range("--port", self.port, 0, 65535)
        check_operator(self)

    @property
    def by_policy(self) -> bool:
        return self.operator.partition(":")[0] not in ("scripted", *PERSONS) and Path(self.operator).is_dir()

    @property
    def by_person(self) -> bool:
        return self.operator != "scripted" and not self.by_policy


def check_operator(options: CollectOptions) -> None:
    """UserError: no such operator, or options that do not go with it."""
    from robo_rl.experiment.operators import check_person

    if options.by_policy and options.policy:
        raise UserError(
            "--policy records whatever acts and --operator who demonstrates: leave one of them out"
        )
    name = options.operator.partition(":")[0]
    if "/" in name and not options.by_policy:
        raise UserError(f"--operator {options.operator}: there is no such folder of a run")
    kind = "policy" if options.by_policy else check_person("--operator", options.operator, ("scripted",))
    if options.device:
        if kind != "console":
            raise UserError(f"--device is for --operator console; with --operator {kind} name it there")
        if check_person("--device", options.device) == "console":
            raise UserError("--device is what the person holds in their hand, got console")
    if kind not in ("scripted", "policy"):
        for name, off in (
            ("--policy", options.policy == ""),
            ("--noise", options.noise == 0),
            ("--video", not options.video),
        ):
            if not off:
                raise UserError(
                    f"{name} is for episodes without a person; leave it out with --operator {kind}"
                )


@dataclass(frozen=True, slots=True)
class Collected:
    """What `collect` added to the data set in `folder`: episodes of `tried` (None: all were kept), successes
    among them;
    total: episodes that the data set now has."""

    folder: Path
    episodes: int
    successes: int
    tried: int | None
    total: int


def collect(options: CollectOptions) -> Collected:
    """Record episodes and append them to the data set. UserError: nothing can act, or the data set is another
    task's."""
    from robo_rl.experiment import envs

    envs.check_env_options(options)
    if not (options.by_person or options.by_policy or options.policy):
        envs.check_shown(options.sim, options.task)
    from robo_rl.child import HANG
    from robo_rl.data.writer import Writer
    from robo_rl.demos import check_expert, record
    from robo_rl.experiment.step_watch import StepWatch
    from robo_rl.film import FilmedEnv, check_path, write_film
    from robo_rl.log import Progress

    if options.by_person:
        return collect_by_person(options)
    check_path(options.video)
    # demonstrations end with success; envpool: has no expert, so a policy shows them there
    shown = options.sim.startswith("gym:") or options.by_policy and options.sim.startswith("envpool:")
    reward = options.reward or ("sparse" if shown and not options.policy else "")
    env = envs.make(
        options.sim,
        options.task,
        min(options.envs, options.episodes),
        obs=options.obs,
        reward=reward,
        control=options.control,
        image_size=options.image_size,
        threads=options.threads,
        max_steps=options.max_steps,
        randomise=options.randomise,
        render=bool(options.video),
    )
    actors = (
        [(name, *load_actor(name, env, options.seed)) for name in options.policy.split(",")]
        if options.policy
        else []
    )
    if options.by_policy:
        env = policy_expert(options.operator, env, options.seed)
    if not actors:
        check_expert(env)
    if options.obs == "rgb":
        env.reset(seed=0)  # draws, or says why it cannot
    folder = Path(options.out or f"data/{options.sim}-{env.spec.task}".replace(":", "-"))
    watch = nullcontext() if options.by_person else StepWatch(HANG)
    with Progress() as progress, watch, Writer(folder, spec=env.spec) as writer:
        before = len(writer)
        if before and not options.out:
            raise UserError(
                f"{folder} exists with {plural(before, 'episode')}; name it with --out to extend it"
            )
        count = options.episodes * (1 if actors else len(task_names(env)))
        progress.start("demo", count, "episodes")
        filmed = FilmedEnv(env) if options.video else None
        if actors:
            successes, tried = (
                record_actors(filmed or env, options, actors, writer.add, progress.update),
                None,
            )
        else:
            successes, tried = (
                count,
                record(
                    filmed or env,
                    options.episodes,
                    options.seed,
                    writer.add,
                    options.noise,
                    lambda kept, tried: progress.update(kept, kept / tried),
                ),
            )
    if filmed is not None:
        write_film(options.video, filmed.takes, filmed.fps)
    if not has_success(env):
        from robo_rl.experiment.evaluation import SILENT, other_flags

        what = "in the data set all its episodes are failures"
        warnings.warn(f"{SILENT.format(env.spec.id)}: {what}{other_flags(env)}", stacklevel=1)
    env.close()
    return Collected(folder, count, successes, tried, before + count)


def collect_by_person(options: CollectOptions) -> Collected:
    """Record what a person drives."""
    import torch

    from robo_rl.data.meta import load_meta
    from robo_rl.experiment import envs
    from robo_rl.experiment.demonstrate import TIME_LIMITS, demonstrate

    torch.set_num_threads(1)
    console = options.operator == "console"
    made = {
        "obs": options.obs,
        "reward": options.reward,
        "control": options.control,
        "image_size": options.image_size,
        "threads": options.threads or 1,
        "randomise": options.randomise,
    }
    probe = envs.make(options.sim, options.task, 1, max_steps=options.max_steps, **made)
    task, limit = probe.spec.task, probe.spec.max_steps
    probe.close()
    folder = Path(options.out or f"data/{options.sim}-{task}".replace(":", "-"))
    before = len(load_meta(folder).lengths) if (folder / "meta" / "info.json").exists() else 0
    if before and not options.out:
        raise UserError(f"{folder} exists with {plural(before, 'episode')}; name it with --out to extend it")
    env = envs.make(
        options.sim,
        options.task,
        1,
        max_steps=limit * TIME_LIMITS,
        render=console and options.obs != "rgb",
        **made,
    )
    try:
        got = demonstrate(options, env, folder, limit, lambda line: print(line, flush=True))
    finally:
        env.close()
    return Collected(folder, got.kept, got.successes, got.tried, got.total)


def load_actor(name: str, env, seed: int):
    """(source label of its steps, actor) of one name in --policy."""
    from robo_rl.recording import expert_actor, policy_actor, random_actor

    if name == "expert":
        return "expert", expert_actor(env)
    if name == "random":
        return "unknown", random_actor(env, seed)
    if not Path(name).exists():
        raise UserError(
            f"--policy {name!r} is neither expert nor random nor the folder of a run or checkpoint"
        )
    return "policy", policy_actor(best_policy(name, env), seed)


def best_policy(name: str, env):
    """The best policy of the run or checkpoint folder `name`; UserError where it does not fit the env."""
    from robo_rl import checkpoint
    from robo_rl.experiment.envs import obs_spec
    from robo_rl.experiment.folder import pick_checkpoint

    _, folder = pick_checkpoint(Path(name), "best")
    policy, _ = checkpoint.load_policy(folder)
    checkpoint.check_fits(policy, obs_spec(env, policy.spec.language), str(folder))
    return policy.eval()


def policy_expert(name: str, env, seed: int) -> Any:
    """The env with the best policy of a run or checkpoint folder as its expert, without exploration noise."""
    import torch

    from robo_rl.demos import PolicyExpert
    from robo_rl.evaluation import decide

    policy, generator = best_policy(name, env), torch.Generator().manual_seed(seed)
    return PolicyExpert(env, lambda obs: decide(policy, obs, generator))


def record_actors(
    env, options: CollectOptions, actors: list, add: Callable, on_episode: Callable[[int], None]
) -> int:
    """Record each actor's share of the episodes -> how many succeeded; add(episode) stores one, on_episode
    counts them."""
    from robo_rl.film import COUNT
    from robo_rl.recording import Recorder, play

    done, successes = 0, 0
    for i, (name, source, act) in enumerate(actors):
        if options.video:
            env.film_next(-(-COUNT // len(actors)), Path(name).name)
        share = options.episodes * (i + 1) // len(actors) - done
        recorder = Recorder(env, add, source, options.noise, options.seed + i)
        successes += play(
            recorder, act, share, options.seed + 200 * i, lambda k, first=done: on_episode(first + k)
        )
        done += share
    return successes
