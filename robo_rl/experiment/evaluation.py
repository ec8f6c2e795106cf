"""`robo_rl eval RUN`: the honest number. Fixed starts, paired noise, Wilson intervals, paired differences."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from robo_rl.errors import UserError, choose, in_range
from robo_rl.selection import CHOOSE, REPORT

ARMS = 8  # side by side with --on arm


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluate a checkpoint of a run; with --against, the paired difference to another run on the same starts."""

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    against: str = ""
    """Another run (or checkpoint folder) to compare with, on the same starts and noise."""
    episodes: int = 200
    seed: int = REPORT
    """Which list of starts: 0 is the one that the best checkpoint was chosen on, 1 the one that training reports on; every list is
    disjoint from training and from the others."""
    envs: int = 0
    """Envs in parallel; 0: as the run evaluated. Results are byte-identical for the same number."""
    threads: int = 0
    video: Annotated[str, tyro.conf.arg(metavar="PATH.mp4")] = ""
    """Also film the first four episodes."""
    sim: str = ""
    """Another simulator than the run's own, for example mujoco for a policy that was trained in a world model."""
    on: str = "sim"
    """sim: the run's own simulator; arm: the governed arm over the in-process wire, at 1 kHz in lockstep; dds: the arm of
    `robo_rl sim-arm --speed 1.5` over DDS, in real time."""
    controller: str = "joint"
    """With --on arm and dds: joint targets to joints as stiff as the simulator's; or cartesian: tool poses to Cartesian
    impedance (`robo_rl sim-arm --controller` must be the same)."""
    speed: float = 1.5
    """With --on arm and dds: of the tool [m/s], as in `robo_rl sim-arm`; 1.5 is what a policy of sims/mujoco learnt with,
    below 1.0 it runs in slow motion."""
    max_steps: int = 0
    """Actions of an episode; 0: as the run was trained."""
    domain: Annotated[int, tyro.conf.arg(metavar="ID")] = -1
    """With --on dds: the ROS domain; -1: ROS_DOMAIN_ID, else 0."""
    namespace: str = ""
    """With --on dds: prefix of all topics."""
    json: bool = False

    def __post_init__(self) -> None:
        choose("--on", self.on, ("sim", "arm", "dds"))
        choose("--controller", self.controller, ("joint", "cartesian"))
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--domain", self.domain, -1, 232)
        in_range("--episodes", self.episodes, 1, 10**6)
        in_range("--seed", self.seed, 0, 2000)
        in_range("--envs", self.envs, 0, 10**6)
        in_range("--max-steps", self.max_steps, 0, 10**6)
        in_range("--threads", self.threads, 0, 4096)


def pick_checkpoint(path: Path, name: str) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of a run and a checkpoint name, or of a checkpoint folder."""
    from robo_rl.log import open_run

    if (path / "meta.json").exists():
        return path.parent.parent, path
    run = open_run(path)
    from robo_rl import checkpoint  # torch comes with it: a name that is wrong is told before
    root = run / "checkpoints"
    found = checkpoint.checkpoints(run)
    if not found:
        raise UserError(f"{run} has no checkpoint yet")
    if name == "last":
        return run, found[-1]
    if name == "sft":
        return run, root / checkpoint.name(0)
    if name == "best":
        return run, checkpoint.best(run)
    if not (root / name / "meta.json").exists():
        raise UserError(f"{run} has no checkpoint {name!r}. Allowed: best, last, sft, "
                        f"{', '.join(p.name for p in found)}")
    return run, root / name


def evaluate_checkpoint(args: Eval, path: str, name: str) -> dict:
    """Evaluate one checkpoint as `args` says -> the result document (no times, so equal runs give equal bytes)."""
    import torch

    from robo_rl import checkpoint
    from robo_rl.evaluate import eval_starts, evaluate
    from robo_rl.experiment.train import make_env, obs_spec, run_config
    from robo_rl.log import Progress
    from robo_rl.stats import wilson

    run, folder = pick_checkpoint(Path(path), name)
    config = run_config(run)
    if args.threads:
        config = replace(config, threads=args.threads)
    if args.sim:
        config = replace(config, sim=args.sim, judge="")
    if args.max_steps:
        config = replace(config, max_steps=args.max_steps)
    torch.set_num_threads(config.torch_threads)
    policy, meta = checkpoint.load_policy(folder)
    if args.on != "sim" and args.video:
        raise UserError(f"--on {args.on} films nothing: leave --video out, or use robo_rl deploy --video")
    wire = body = None
    if args.on == "dds":
        from robo_rl.experiment.arm import make_live_env
        from robo_rl.experiment.wire import connect
        wire, count = connect("robo_rl_eval", args.domain, namespace=args.namespace), 1
        env, body = make_live_env(config, policy.spec, wire, args.speed, args.controller)
    elif args.on == "arm":
        from robo_rl.experiment.arm import make_arm_env
        count = args.envs or min(args.episodes, ARMS)
        env = make_arm_env(config, policy.spec, min(count, args.episodes), args.speed, args.controller)
    else:
        count = args.envs or config.eval_envs or (args.episodes if config.sim.startswith(("mujoco", "wm:")) else min(args.episodes, config.envs))
        env = make_env(config, min(count, args.episodes))
    checkpoint.check_fits(policy, obs_spec(env, policy.spec.language), str(folder))
    starts = eval_starts(args.episodes, args.seed)
    with Progress() as progress, real_time_if(wire is not None):
        progress.start("eval", len(starts), "episodes")
        result = evaluate(env, policy, starts, args.seed, tick=progress.update)
    env.close()
    if wire is not None:
        body.end()
        wire.close()
        lateness = sorted(body.lateness)
        result["live"] = {"late": body.late, "steps": body.steps, "stops": body.stops,
                          "act_after_s": {"median": lateness[len(lateness) // 2], "p99": lateness[int(0.99 * len(lateness))]}}
    rate, low, high = wilson(sum(result["success"]), len(starts))
    tasks = {}
    for task in sorted(set(result["task"])):
        mine = [s for s, t in zip(result["success"], result["task"]) if t == task]
        tasks[task] = dict(zip(("success", "low", "high"), wilson(sum(mine), len(mine)))) | {"n": len(mine)}
    chosen = checkpoint.checkpoints(run) and folder == checkpoint.best(run) and meta["best"]["step"] >= 0
    return {"run": run.name, "checkpoint": folder.name, "step": meta["step"], "sim": env.spec.id, "seed": args.seed,
            "chosen_on": CHOOSE if chosen else None, "n": len(starts), "envs": min(count, args.episodes), "success_rate": rate, "low": low, "high": high,
            "return_mean": sum(result["return"]) / len(starts), "tasks": tasks, "starts": starts.tolist(), **result}


def list_note(result: dict) -> str:
    """What the list of starts has to do with the choice of the checkpoint."""
    if result["chosen_on"] is None:
        return ""
    return ", the one that it was chosen on: too favourable" if result["chosen_on"] == result["seed"] else \
        f"; the checkpoint was chosen on list {result['chosen_on']}"


def real_time_if(live: bool):
    """Real-time priority and no garbage collection, for an arm that does not wait."""
    from contextlib import nullcontext
    if not live:
        return nullcontext()
    from controllers.loop import undisturbed
    return undisturbed()


def film(args: Eval) -> None:
    """Write --video: the first four episodes side by side."""
    from robo_rl import checkpoint
    from robo_rl.data.video import write_video
    from robo_rl.evaluate import eval_starts, evaluate
    from robo_rl.experiment.train import make_env, run_config

    run, folder = pick_checkpoint(Path(args.run), args.checkpoint)
    policy, _ = checkpoint.load_policy(folder)
    config = run_config(run)
    env = make_env(replace(config, sim=args.sim, judge="") if args.sim else config, 4, render=True)
    frames = evaluate(env, policy, eval_starts(4, args.seed), args.seed, 4)["video"]
    env.close()
    try:
        write_video(Path(args.video), frames, round(1 / env.spec.period))
    except OSError as e:
        raise UserError(f"--video: cannot write {args.video} ({e.strerror})") from e


def run(args: Eval) -> int:
    """Evaluate, write RUN/eval-<checkpoint>-<seed>-<n>.json and print a table or JSON."""
    from robo_rl import files
    from robo_rl.stats import paired_difference

    for name in (args.run, args.against) if args.against else (args.run,):
        pick_checkpoint(Path(name), args.checkpoint)  # a typo shows before the work
    result = evaluate_checkpoint(args, args.run, args.checkpoint)
    folder, _ = pick_checkpoint(Path(args.run), args.checkpoint)
    where = "" if args.on == "sim" else f"{args.on}-{'cartesian-' if args.controller == 'cartesian' else ''}"
    where += f"{args.sim.split(':')[0]}-" if args.sim else ""
    out = folder / f"eval-{where}{result['checkpoint']}-{args.seed}-{args.episodes}.json"
    files.write_json(out, result)
    document = {k: v for k, v in result.items() if k not in ("starts", "success", "return", "length", "task")}
    document["file"] = str(out)
    if args.against:
        other = evaluate_checkpoint(replace(args, envs=result["envs"]), args.against, args.checkpoint)
        if other["sim"] != result["sim"]:
            raise UserError(f"--against: {args.against} is of {other['sim']}, {args.run} of {result['sim']}; only runs "
                            "of one task meet the same starts")
        d, low, high = paired_difference(result["success"], other["success"])
        document["against"] = {"run": other["run"], "checkpoint": other["checkpoint"],
                               "success_rate": other["success_rate"], "difference": d, "low": low, "high": high}
    if args.video:
        film(args)
    if args.json:
        print(json.dumps(files.plain(document), indent=1))
        return 0
    print(f"{result['run']} · {result['checkpoint']} · {result['n']} starts (list {args.seed}{list_note(result)})")
    width = max(len(t) for t in result["tasks"])
    print(f"  {'task':<{width}}  success   95 % interval     n")
    for task, row in [*result["tasks"].items(), ("all", result)][: None if len(result["tasks"]) > 1 else 1]:
        rate = row.get("success_rate", row.get("success"))
        print(f"  {task:<{width}}  {rate:7.3f}   [{row['low']:.3f}, {row['high']:.3f}]  {row['n']:>4}")
    if live := result.get("live"):
        after = live["act_after_s"]
        print(f"  {live['late']} of {live['steps']} actions later than a period; after its beginning: median "
              f"{1e3 * after['median']:.1f} ms, p99 {1e3 * after['p99']:.1f} ms")
        for reason, count in Counter(live["stops"]).most_common():
            print(f"  held {count} times by the {reason}")
    if args.against:
        a = document["against"]
        print(f"  difference to {a['run']} ({a['success_rate']:.3f}), paired: "
              f"{a['difference']:+.3f}  95 % interval [{a['low']:+.3f}, {a['high']:+.3f}]")
    print(f"  written to {out}", file=sys.stderr)
    return 0
