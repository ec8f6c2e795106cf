"""`robo_rl collect`: demonstrations of the scripted expert, or whatever a policy does, as a LeRobot v3 data set."""

from dataclasses import dataclass
from pathlib import Path

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Record successful expert episodes, or with --policy all episodes; an existing data set is extended."""

    out: str = ""
    """Folder of the data set; empty: data/<sim>-<task>."""
    sim: str = "mujoco"
    task: str = ""
    episodes: int = 50
    """Episodes to add (without --policy: successful ones)."""
    policy: str = ""
    """Who acts, all outcomes kept and the executed actions recorded, as a world model needs: expert, random, a run or
    checkpoint folder, or several of them with commas between, which share the episodes."""
    obs: str = "state"
    seed: int = 0
    """First start; another seed records other episodes."""
    noise: float = 0.0
    """Std of noise on executed actions while the clean ones are recorded (DART); with --policy the most an episode
    may draw, and the noisy actions are recorded."""
    control: str = ""
    randomise: str = ""
    image_size: int = 64
    max_steps: int = 0
    envs: int = 32
    threads: int = 0
    repair: str = ""
    """Instead: keep the sound episodes of this damaged data set; originals stay beside it as *.broken."""
    accept: str = ""
    """Instead: take this data set as it is, after another program changed or wrote it, and write its checksums."""
    tolerance: float = 1e-4
    """With --accept: seconds by which its timestamps may be off."""

    def __post_init__(self) -> None:
        in_range("--episodes", self.episodes, 1, 10**7)
        in_range("--noise", self.noise, 0, 1)
        in_range("--envs", self.envs, 1, 10**5)
        in_range("--seed", self.seed, 0, 2000)
        in_range("--threads", self.threads, 0, 4096)
        in_range("--max-steps", self.max_steps, 0, 10**7)
        in_range("--image-size", self.image_size, 16, 1024)
        in_range("--tolerance", self.tolerance, 0, 1e6)


def run(args: Collect) -> int:
    """Record, repair or accept."""
    from robo_rl.experiment import envs
    if not (args.repair or args.accept):
        envs.check_names(args.sim, args.task, obs=args.obs, control=args.control, randomise=args.randomise)
    from robo_rl.data.repair import accept, repair
    from robo_rl.data.writer import Writer
    from robo_rl.demos import check_expert, record
    from robo_rl.log import Progress

    if args.repair:
        done = repair(args.repair)
        print(f"{args.repair}: kept {done.kept} episodes, dropped {done.dropped}"
              + (f" ({done.reason})" if done.reason else "; it was sound"))
        return 0
    if args.accept:
        data = accept(args.accept, args.tolerance)
        print(f"{args.accept}: {len(data)} episodes accepted as they are, checksums written")
        return 0
    env = envs.make(args.sim, args.task, min(args.envs, args.episodes), obs=args.obs, control=args.control,
                    image_size=args.image_size, threads=args.threads, max_steps=args.max_steps,
                    randomise=args.randomise)
    actors = [(name, *actor(name, env, args.seed)) for name in args.policy.split(",")] if args.policy else []
    if not actors:
        check_expert(env)
    if args.obs == "rgb":
        env.reset(seed=0)  # draws, or says why it cannot
    folder = Path(args.out or f"data/{args.sim}-{env.spec.task}".replace(":", "-"))
    with Progress() as progress, Writer(folder, spec=env.spec) as writer:
        before = len(writer)
        if before and not args.out:
            raise UserError(f"{folder} exists with {before} episodes; name it with --out to extend it")
        progress.start("demo", args.episodes, "episodes")
        if actors:
            won = plays(env, args, actors, writer.add, progress.update)
            env.close()
            print(f"{folder}: {args.episodes} episodes added ({won} of them successful), {before + args.episodes} in all")
            return 0
        tried = record(env, args.episodes, args.seed, writer.add, args.noise,
                       lambda kept, tried: progress.update(kept, kept / tried))
    env.close()
    print(f"{folder}: {args.episodes} episodes added (expert succeeded in {args.episodes} of {tried}), "
          f"{before + args.episodes} in all")
    return 0


def actor(name: str, env, seed: int):
    """(source label, actor) of one name in --policy."""
    from robo_rl import checkpoint
    from robo_rl.experiment.evaluation import pick_checkpoint
    from robo_rl.experiment.train import obs_spec
    from robo_rl.recording import expert_actor, policy_actor, random_actor

    if name == "expert":
        return "expert", expert_actor(env)
    if name == "random":
        return "unknown", random_actor(env, seed)
    if not Path(name).exists():
        raise UserError(f"--policy {name!r} is neither expert nor random nor the folder of a run or checkpoint")
    _, folder = pick_checkpoint(Path(name), "best")
    policy, _ = checkpoint.load_policy(folder)
    checkpoint.check_fits(policy, obs_spec(env, policy.spec.language), str(folder))
    return "policy", policy_actor(policy, seed)


def plays(env, args: Collect, actors: list, add, tick) -> int:
    """Let each actor play its share of the episodes -> how many succeeded."""
    from robo_rl.recording import Recorder, play

    done, won = 0, 0
    for i, (_, source, act) in enumerate(actors):
        share = args.episodes * (i + 1) // len(actors) - done
        recorder = Recorder(env, add, source, args.noise, args.seed + i)
        won += play(recorder, act, share, args.seed + 200 * i, lambda k, first=done: tick(first + k))
        done += share
    return won
