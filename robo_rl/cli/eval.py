"""`robo_rl eval RUN`: success of a checkpoint on fixed starts with its interval, or the paired difference to
another."""

import json
import re
import shlex
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from robo_rl.errors import UserError, plural
from robo_rl.experiment.config import TrainConfig, load_config
from robo_rl.experiment.evaluation import (
    NO_SUCCESS,
    EvalConfig,
    as_trained,
    changed,
    episode_count,
    evaluate_checkpoint,
    film_checkpoint,
    interval_words,
    moved_here,
)
from robo_rl.experiment.folder import half_taught, pick_checkpoint
from robo_rl.experiment.planning import NOT_PLANNED


@dataclass(frozen=True, kw_only=True)
class Eval(EvalConfig):
    """Evaluate a checkpoint of a run; with --against, the paired difference to another run on the same
    starts."""

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    demos: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """A data set that was recorded as the run's own was: how near the policy's actions are to those recorded,
    without a simulator."""
    against: str = ""
    """Another run, of which --checkpoint is taken, or a checkpoint folder, to compare with on the same starts
    and noise, or with --demos on the same recorded episodes."""
    video: Annotated[str, tyro.conf.arg(metavar="PATH.mp4")] = ""
    """Also film the first four episodes, those that fail first."""
    save: bool = False
    """Add the success rate to results/eval.json below the current folder, with its commit, date, machine and
    command."""
    json: bool = False
    """Print one JSON document instead of a table."""


def run(args: Eval) -> int:
    """Evaluate, write RUN/eval-<checkpoint>-<seed>-<n>.json and print a table or JSON."""
    from robo_rl import files

    folder, checkpoint = pick_checkpoint(Path(args.run), args.checkpoint)
    if said := half_taught(folder, checkpoint):
        print(said, file=sys.stderr)
    if args.demos:
        from robo_rl.cli import eval_demos

        need_default(args, "run", "demos", "against", "checkpoint", "episodes", "device", "json")
        return eval_demos.run(
            checkpoint, args.demos, args.episodes, args.device, args.json, other_checkpoint(args)
        )
    own = load_config(folder)
    if args.against:  # a typo, a damaged run or another task shows before the work
        check_against(args, own)
    command = command_of(args)
    args = as_trained(replace(args, run=str(checkpoint)), own)  # picked once, whatever a run adds meanwhile
    if args.on == "dds" and args.video:
        raise UserError(
            "--on dds is an arm that does not wait for pictures: film it with robo_rl deploy --video"
        )
    acts_in = changed(own, args)
    warn_of_models(acts_in.sim if args.on == "sim" else "", args.plan_in, acts_in.judge)
    if args.video:
        from robo_rl.film import check_path

        check_path(args.video)
    if said := moved_here(own, args):
        print(said, file=sys.stderr)
    result = watched(args.run, args)
    out = result_file(args, result)
    files.write_json(out, result)
    document = {
        k: v
        for k, v in result.items()
        if k not in ("starts", "success", "return", "length", "task", "origin", "cut", "seam", "starved")
    }
    document["file"] = str(out)
    if args.against:
        document["against"] = against(args, result)
    if args.video:
        record_video(args)
    if args.save:
        document["saved"] = str(save(args, result, command))
    if args.json:
        print(json.dumps(files.plain(document), indent=1))
    else:
        print(table(result, document.get("against")))
        print(
            "\n".join(f"  written to {path}" for path in (out, args.video, document.get("saved")) if path),
            file=sys.stderr,
        )
    return 0


def warn_of_models(sim: str, plan_in: str, judge: str = "") -> None:
    """Say of each world model that takes part if `wm eval` advised against it or it knows no success, and of
    that which is acted in, judged by `judge`, if its episodes end early. UserError: one is not there."""
    inside = sim[3:] if sim.startswith("wm:") else ""
    for model in filter(None, {inside, plan_in}):
        from world_models.verdict import advised_against, ends_early, knows_no_success

        judged = model == inside and judge not in ("", "head")
        for said in (advised_against(model), "" if judged else knows_no_success(model)):
            if said:
                print(f"warning: {said}", file=sys.stderr)
        if model == inside and (said := ends_early(model)):
            print(f"note: {said}", file=sys.stderr)


def need_default(args: Eval, *read: str) -> None:
    """UserError: an option was given that --demos does not read."""
    for f in fields(args):
        if f.name not in read and getattr(args, f.name) != f.default:
            option = f.name.replace("_", "-")
            raise UserError(
                f"--demos compares with recorded episodes, which --{option} does not change: leave it out"
            )


def save(args: Eval, result: dict, command: str) -> Path:
    """Add the row of this evaluation, by this command, to results/eval.json."""
    from datetime import UTC, datetime

    from robo_rl.files import read_json
    from robo_rl.provenance import git_hash, machine_name
    from robo_rl.results import add_rows, evaluation_row

    run, _ = pick_checkpoint(Path(args.run), args.checkpoint)
    said = read_json(run / "run.json")
    row = evaluation_row(
        result,
        command,
        load_config(run).algo,
        git_hash(),
        datetime.now(UTC).date().isoformat(),
        machine_name(),
        said.get("git", ""),
    )
    return add_rows("results/eval.json", "Evaluations", [row])


def command_of(args: Eval) -> str:
    """The command line of this evaluation, without what only prints or writes."""
    words = ["robo_rl", "eval", args.run]
    for f in fields(args):
        value = getattr(args, f.name)
        if f.name not in ("run", "json", "save", "video", "against") and value != f.default:
            words += [f"--{f.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def watched(path: str, options: EvalConfig) -> dict:
    """`evaluate_checkpoint` with a progress line."""
    from robo_rl.experiment.step_watch import StepWatch
    from robo_rl.log import Progress, quiet_stdout

    config = changed(load_config(pick_checkpoint(Path(path), options.checkpoint)[0]), options)
    watch = nullcontext() if options.on == "dds" else StepWatch(config.hang)
    # what an env of the user's prints is no part of the result
    quiet = quiet_stdout() if sys.stdout else nullcontext()
    with Progress() as progress, watch, quiet:
        progress.start("eval", episode_count(config, options), "episodes")
        return evaluate_checkpoint(path, options, lambda done, total: progress.update(done))


def result_file(args: Eval, result: dict) -> Path:
    """Where the result document of this evaluation belongs in the run folder."""
    where = "" if args.on == "sim" else f"{args.on}-{'cartesian-' if args.controller == 'cartesian' else ''}"
    where += f"{re.sub('[^A-Za-z0-9_.]+', '-', args.sim).strip('-')}-" if args.sim else ""
    where += f"{args.task.replace(':', '-')}-" if args.task else ""
    where += (
        f"{args.chunking}-{1e3 * (args.latency or 0):g}-{1e3 * (args.latency_jitter or 0):g}-"
        if args.chunking
        else ""
    )
    where += "server-" if args.policy else "planned-" if args.plan_in else ""
    folder, _ = pick_checkpoint(Path(args.run), args.checkpoint)
    return folder / f"eval-{where}{result['checkpoint']}-{args.seed}-{args.episodes}.json"


def other_checkpoint(args: Eval) -> "Path | None":
    """The checkpoint folder of --against."""
    return pick_checkpoint(Path(args.against), args.checkpoint)[1] if args.against else None


def check_against(args: Eval, own: TrainConfig) -> None:
    """UserError: the run --against meets other starts than this one, whose config is `own`."""
    other = load_config(pick_checkpoint(Path(args.against), args.checkpoint)[0])
    same_starts(args, *(place_of(changed(c, args)) for c in (own, other)))


def place_of(config: TrainConfig) -> str:
    """Simulator and task; a world model knows its own."""
    return config.sim if config.sim.startswith("wm:") else f"{config.sim} {config.task}".strip()


def same_starts(args: Eval, own: str, other: str) -> None:
    """UserError unless both runs are of one simulator and task."""
    if own != other:
        raise UserError(
            f"--against: {args.against} is of {other}, {args.run} of {own}; only runs of one task meet the "
            "same starts"
        )


def against(args: Eval, result: dict) -> dict:
    """The paired difference to the run --against."""
    import numpy as np

    from robo_rl.stats import bootstrap_mean, paired_difference

    other = watched(args.against, replace(args, envs=result["envs"], policy="", **NOT_PLANNED))
    same_starts(args, result["sim"], other["sim"])
    if result.get("no_success"):
        gains = (np.asarray(x["return"]) for x in (result, other))
        d, low, high = bootstrap_mean(np.subtract(*gains))
    else:
        d, low, high = paired_difference(result["success"], other["success"], groups=result.get("origin"))
    return {
        "run": other["run"],
        "checkpoint": other["checkpoint"],
        "success_rate": other["success_rate"],
        "return_mean": other["return_mean"],
        "difference": d,
        "low": low,
        "high": high,
    }


def record_video(args: Eval) -> None:
    """Write --video."""
    try:
        film_checkpoint(args.run, args, Path(args.video))
    except OSError as e:
        raise UserError(f"--video: cannot write {args.video} ({e.strerror})") from e


def table(result: dict, other: dict | None) -> str:
    """The result for people."""
    who = result.get("policy", result["checkpoint"])
    frames = (
        f", from {len(set(result['origin']))} recorded starts, to {result['max_steps']} steps"
        if "origin" in result
        else ""
    )
    starts = plural(result["n"], "start")
    lines = [f"{result['run']} · {who} · {starts}{frames} (list {result['seed']}{list_note(result)})"]
    lines += return_rows(result) if result.get("no_success") else success_rows(result)
    if cut := sum(result.get("cut", ())):
        lines.append(f"  {100 * cut / result['n']:.0f} % of them failed because the model no longer knew")
    if plan := result.get("planned"):
        share = f"{100 * plan['changed']:.0f} % of the chunks"
        lines.append(f"  planned in {plan['model']}: {share} are not the policy's own first")
        if plan.get("judged_by_itself"):
            lines.append(
                "  that model judged it too, so the success confirms itself: a simulator (--sim) or a robot "
                "tells whether planning helps"
            )
    if live := result.get("live"):
        after = live["act_after_s"]
        lines.append(
            f"  {live['late']} of {live['steps']} actions later than a period; after its beginning: median "
            f"{1e3 * after['median']:.1f} ms, p99 {1e3 * after['p99']:.1f} ms"
        )
        lines += [
            f"  held {count} times by the {reason}" for reason, count in Counter(live["stops"]).most_common()
        ]
    if other:
        digits, rate = (2, other["return_mean"]) if result.get("no_success") else (3, other["success_rate"])
        d, low, high = (f"{other[k]:+.{digits}f}" for k in ("difference", "low", "high"))
        whom = f"{other['run']} · {other['checkpoint']}"
        lines.append(
            f"  difference to {whom} ({rate:.{digits}f}), paired: {d}  95 % interval [{low}, {high}]"
        )
    return "\n".join(lines)


def success_rows(result: dict) -> list[str]:
    """Success of each task, and of all where there are several."""
    tasks, width = result["tasks"], max(len(t) for t in result["tasks"])
    rows = [f"  {'task':<{width}}  success   95 % interval     n"]
    for task, row in [*tasks.items(), ("all", result)][: None if len(tasks) > 1 else 1]:
        rate = row.get("success_rate", row.get("success"))
        rows.append(f"  {task:<{width}}  {rate:7.3f}   [{row['low']:.3f}, {row['high']:.3f}]  {row['n']:>4}")
    return rows


def return_rows(result: dict) -> list[str]:
    """The mean return of a task that knows no success."""
    words = interval_words("mean return", *(result[f"return_{k}"] for k in ("mean", "low", "high")))
    return [f"  {words}  n={result['n']}", f"  {NO_SUCCESS.format(result['sim'])}"]


def list_note(result: dict) -> str:
    """What the list of starts has to do with the choice of the checkpoint."""
    if result["chosen_on"] is None:
        return ""
    return (
        ", the one that it was chosen on: too favourable"
        if result["chosen_on"] == result["seed"]
        else f"; the checkpoint was chosen on list {result['chosen_on']}"
    )
