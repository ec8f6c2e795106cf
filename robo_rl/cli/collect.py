"""`robo_rl collect`: demonstrations of the scripted expert as a LeRobot v3 data set."""

from dataclasses import dataclass

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Record successful expert episodes; an existing data set is extended."""

    out: str = ""
    """Folder of the data set; empty: data/<sim>-<task>."""
    sim: str = "mujoco"
    task: str = ""
    episodes: int = 50
    """Successful episodes to add."""
    obs: str = "state"
    seed: int = 0
    """First start; another seed records other episodes."""
    noise: float = 0.0
    """Std of noise on executed actions while the clean ones are recorded (DART)."""
    control: str = ""
    randomise: str = ""
    image_size: int = 64
    max_steps: int = 0
    envs: int = 32
    threads: int = 0
    repair: str = ""
    """Instead: keep the sound episodes of this damaged data set; originals stay beside it as *.broken."""

    def __post_init__(self) -> None:
        in_range("--episodes", self.episodes, 1, 10**7)
        in_range("--noise", self.noise, 0, 1)
        in_range("--envs", self.envs, 1, 10**5)
        in_range("--seed", self.seed, 0, 2000)
        in_range("--threads", self.threads, 0, 4096)
        in_range("--max-steps", self.max_steps, 0, 10**7)
        in_range("--image-size", self.image_size, 16, 1024)


def run(args: Collect) -> int:
    """Record, or repair."""
    from pathlib import Path

    import sims
    from robo_rl.data.repair import repair
    from robo_rl.data.writer import Writer
    from robo_rl.demos import check_expert, record
    from robo_rl.log import Progress

    if args.repair:
        done = repair(args.repair)
        print(f"{args.repair}: kept {done.kept} episodes, dropped {done.dropped}"
              + (f" ({done.reason})" if done.reason else "; it was sound"))
        return 0
    env = sims.make(args.sim, args.task, min(args.envs, args.episodes), obs=args.obs, control=args.control,
                    image_size=args.image_size, threads=args.threads, max_steps=args.max_steps,
                    randomise=args.randomise)
    check_expert(env)
    if args.obs == "rgb":
        env.reset(seed=0)  # draws, or says why it cannot
    folder = Path(args.out or f"data/{args.sim}-{env.spec.task}".replace(":", "-"))
    with Progress() as progress, Writer(folder, spec=env.spec) as writer:
        before = len(writer)
        if before and not args.out:
            raise UserError(f"{folder} exists with {before} episodes; name it with --out to extend it")
        progress.start("demo", args.episodes, "episodes")
        tried = record(env, args.episodes, args.seed, writer.add, args.noise,
                       lambda kept, tried: progress.update(kept, kept / tried))
    env.close()
    print(f"{folder}: {args.episodes} episodes added (expert succeeded in {args.episodes} of {tried}), "
          f"{before + args.episodes} in all")
    return 0
