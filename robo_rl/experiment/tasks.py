"""A run over several tasks (`--task pick_cube,push_cube`): who mixes them (`--tasks`), and what is told of
each."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment.config import TASK_MIXES, TrainConfig, load_config
from robo_rl.experiment.envs import task_count
from robo_rl.plugins import OWN, check_call, is_object, load_object
from robo_rl.rollout_control.tasks import TASK_SAMPLERS, FixedMixture
from robo_rl.starts import Ended

WHAT = "--tasks"
RUNS = "modomodo:"  # what stands before the runs that a mixture is fitted to


def check(config: TrainConfig) -> None:
    """Raise UserError for a mixture that there is not, or that a run cannot have."""
    count = task_count(config)
    if count == 1:
        if config.tasks != "uniform":
            raise UserError(
                f"--tasks {config.tasks} mixes several tasks, this run has one: --task pick_cube,push_cube"
            )
        return
    if config.dream:
        raise UserError("--dream learns a world model of one task: leave it out of a run over several")
    if config.backend == "ray" and config.tasks != "uniform":
        raise UserError(
            "--tasks: the table of starts goes by files of this machine, not to workers of --backend ray; "
            "use --tasks uniform or --backend processes"
        )
    make_arms(config, count)


def make_arms(config: TrainConfig, count: int):
    """The sampler of the run's `count` tasks."""
    name = config.tasks
    if name == "uniform":
        return FixedMixture([1.0] * count)
    if name in TASK_SAMPLERS:
        return TASK_SAMPLERS[name](count, config.seed)
    if name.startswith(RUNS):
        return FixedMixture(
            fitted_mixture([Path(p) for p in name.removeprefix(RUNS).split(",")], config.task)
        )
    if is_object(name):
        make = load_object(name, WHAT)
        check_call(make, name, WHAT, (), ("seed", "tasks"))
        return make(seed=config.seed, tasks=count)
    weights = read_weights(name)
    if weights is None:
        choose("tasks", name, (*TASK_MIXES, "0.5,0.3,0.2", f"{RUNS}RUN,RUN,…", OWN))
        raise AssertionError
    if len(weights) != count:
        raise UserError(f"--tasks {name} has {len(weights)} weights for {count} tasks ({config.task})")
    return FixedMixture(weights)


def read_weights(text: str) -> list[float] | None:
    """The numbers of "0.5,0.3,0.2"; None: it is something else."""
    try:
        weights = [float(x) for x in text.split(",")]
    except ValueError:
        return None
    for w in weights:
        in_range("weight of --tasks", w, 0, 1e6)
    return weights


def fitted_mixture(runs: Sequence[Path], tasks: str) -> list[float]:
    """MoDoMoDo: the mixture that finished runs over the same tasks, each with weights of its own, predict to
    be the best.

    The score of a run is the mean of its tasks' final success. UserError: a run of other tasks, one that is
    not finished, one whose mixture followed its success.
    """
    from robo_rl import files
    from robo_rl.rollout_control.mixtures import best_mixture, fit_mixtures

    mixtures, scores = [], []
    for run in runs:
        if not (run / "run.json").exists() or not (run / "evals" / "final.json").exists():
            raise UserError(f"--tasks {RUNS}…: {run} is no finished run")
        config = load_config(run)
        weights = [1.0] * task_count(config) if config.tasks == "uniform" else read_weights(config.tasks)
        if config.task != tasks or weights is None:
            raise UserError(
                f"--tasks {RUNS}…: {run} has --task {config.task} --tasks {config.tasks}; it takes runs over "
                f"{tasks} with weights of their own, such as --tasks 0.5,0.3,0.2"
            )
        mixtures.append(np.array(weights) / np.sum(weights))
        scores.append(
            float(
                np.mean(
                    [
                        one["success"]
                        for one in files.read_json(run / "evals" / "final.json")["tasks"].values()
                    ]
                )
            )
        )
    return best_mixture(fit_mixtures(np.array(mixtures), np.array(scores)), len(mixtures[0])).tolist()


def task_metrics(names: Sequence[str], parts: "Iterable[Ended | None]") -> dict[str, float]:
    """Of the episodes that ended: share of control steps and success by task; {} where one task is played or
    none ended."""
    ended = Ended.joined([part for part in parts if part is not None])
    if len(names) < 2 or not len(ended):
        return {}
    steps = np.bincount(ended.tasks, ended.lengths, len(names))
    count, won = (np.bincount(ended.tasks, w, len(names)) for w in (None, ended.success.astype(float)))
    out = {f"tasks/share/{name}": float(steps[k] / steps.sum()) for k, name in enumerate(names)}
    return out | {
        f"tasks/success/{name}": float(won[k] / count[k]) for k, name in enumerate(names) if count[k]
    }
