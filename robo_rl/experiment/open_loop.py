"""Open-loop evaluation: what a policy would do along recorded episodes, beside what was recorded.

At frames of an episode the policy sees what was recorded there, and the actions that it would execute are
compared with those recorded. They move nothing, so this does not say whether the policy succeeds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robo_rl.errors import UserError, quoted
from robo_rl.options import DataOptions

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset
    from robo_rl.experiment.data_facts import DataFacts

PIECE = 32  # observations that are decided on together


def observation(data: "Dataset", rows: np.ndarray, pictures: dict[str, np.ndarray]) -> dict[str, Any]:
    """What an env would show at the frames `rows` int64[B]."""
    tasks = [data.tasks[k] for k in data.task_index[rows]]
    return {"state": data.state[rows], "task": tasks, **{f"image/{v}": x for v, x in pictures.items()}}


def chunk_starts(data: "Dataset", episode: int, execute: int) -> np.ndarray:
    """int64[B]: the frames of an episode at which a policy that executes so many actions would decide."""
    return np.arange(data.from_[episode], data.to[episode], execute)


def predict(
    policy,
    data: "Dataset",
    options: DataOptions,
    rows: np.ndarray,
    seed: int,
    tick: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """The actions [B,E,A] that a policy would execute from the frames `rows` int64[B] on."""
    import torch

    from robo_rl.demos import frame_store
    from robo_rl.evaluation import decide

    store, generator = frame_store(data, policy.spec, options), torch.Generator().manual_seed(seed)
    pieces, made, done = [rows[i : i + PIECE] for i in range(0, len(rows), PIECE)], [], 0
    with torch.no_grad():
        for at, pictures in store.ahead(pieces):
            made.append(decide(policy, observation(data, at, pictures), generator))
            done += len(at)
            tick(done)
    return np.concatenate(made)


def measured(data: "Dataset") -> dict[int, int]:
    """{axis of the action: number of the state that it commands}, of absolute positions that share a name."""
    from robo_rl.data.labels import need_units

    state = data.features.state
    return {
        i: state.index(name)
        for i, (name, kind) in enumerate(zip(data.features.action, need_units(data.meta).kind, strict=True))
        if kind == "absolute" and name in state
    }


def axis_errors(data: "Dataset", rows: np.ndarray, made: np.ndarray) -> dict[str, Any]:
    """How far the actions `made` [B,E,A] from the frames `rows` on are from those recorded, in the units of
    the data: mean absolute errors, with 95 % intervals over episodes.

    Of every axis beside that of always giving the mean action, and that of staying where it is: giving the
    state that was measured; None where the action is no absolute position that the state has too. `error`
    (`error_of_episode`: of each) and `error_of_state`: means over the axes that move, as shares of the error
    of the mean action; nan where none is known.
    """
    from robo_rl.data.labels import need_units
    from robo_rl.demos import STILL
    from robo_rl.stats import bootstrap_mean

    episode = data.episode_index[rows]
    at = rows[:, None] + np.arange(made.shape[1])
    inside = at < data.to[episode][:, None]  # bool[B,E]
    true, mean = data.action[np.minimum(at, len(data.action) - 1)], data.action.mean(0)
    there = np.full((len(rows), len(mean)), np.nan, np.float32)
    for action, state in measured(data).items():
        there[:, action] = data.state[rows, state]
    error, still, stays = (np.abs(x - true)[inside] for x in (made, mean, there[:, None]))  # [M,A]
    whose = np.repeat(episode, inside.sum(1))
    constant, staying = still.mean(0), stays.mean(0)
    moves = constant > STILL * np.maximum(np.abs(mean), 1e-3)  # the others have no error to compare with
    known = moves & np.isfinite(staying)
    share = (error[:, moves] / constant[moves]).mean(1) if moves.any() else np.full(len(error), np.nan)

    def told(x: np.ndarray) -> dict[str, float]:
        return dict(zip(("error", "low", "high"), map(float, bootstrap_mean(x, groups=whose)), strict=True))

    episodes, units = np.unique(episode), need_units(data.meta).unit
    return {
        "episodes": episodes.tolist(),
        "error_of_episode": [float(share[whose == e].mean()) for e in episodes],
        "frames": len(rows),
        **told(share),
        "error_of_state": float((staying[known] / constant[known]).mean()) if known.any() else np.nan,
        "axes": [
            {"name": name, "unit": unit, **told(error[:, i])}
            | {"error_of_mean": float(constant[i]) if moves[i] else 0.0}
            | {"error_of_state": float(staying[i]) if np.isfinite(staying[i]) else None}
            for i, (name, unit) in enumerate(zip(data.features.action, units, strict=True))
        ],
    }


def in_words(told: dict[str, Any]) -> str:
    """`axis_errors` in a line."""
    moving = [a for a in told["axes"] if a["error_of_mean"]]
    stays = told["error_of_state"]
    line = f"mean error of an action {told['error']:.2f} of that of the mean action"
    line += f" (staying where it is would have {stays:.2f})" if np.isfinite(stays) else ""
    if moving:
        worst = max(moving, key=lambda a: a["error"] / a["error_of_mean"])
        unit = "" if worst["unit"] == "1" else f" {worst['unit']}"
        line += f"; in proportion largest at {worst['name']}: {worst['error']:.3g}{unit}"
    return line


def along(
    policy, data: "Dataset", options: DataOptions, episode: int, seed: int, most: int
) -> dict[str, Any]:
    """The actions recorded in an episode and those that a policy would execute, [T,A] each, in at most `most`
    chunks; the first action of every chunk of `execute` is decided on what was recorded there."""
    from robo_rl.data.labels import need_units

    rows = chunk_starts(data, episode, policy.options.execute)[:most]
    made = predict(policy, data, options, rows, seed)
    frames = slice(rows[0], min(rows[-1] + made.shape[1], data.to[episode]))
    recorded = data.action[frames]
    predicted = made.reshape(-1, made.shape[2])[: len(recorded)]
    return {
        "episode": int(episode),
        "task": data.task(episode),
        "frames": int(data.to[episode] - data.from_[episode]),
        "rate": float(data.features.fps),
        "execute": made.shape[1],
        "axes": [
            {"name": name, "unit": unit}
            for name, unit in zip(data.features.action, need_units(data.meta).unit, strict=True)
        ],
        "recorded": short(recorded),
        "predicted": short(predicted),
    }


def short(x: np.ndarray) -> list[list[float]]:
    """Five digits of every number."""
    return [[float(f"{v:.5g}") for v in row] for row in x]


def evaluate_recorded(
    path: "str | Path",
    demos: "str | Path",
    checkpoint: str = "best",
    episodes: int = 0,
    device: str = "cpu",
    begin: Callable[[int], None] = lambda chunks: None,
    tick: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """`axis_errors` of a run's checkpoint along the first `episodes` (0: all) of a data set that was recorded
    as the run's own was -> the result document. `begin` hears how many chunks there are, `tick` how many are
    done. UserError: it was recorded otherwise."""
    import torch

    from robo_rl import checkpoint as checkpoints
    from robo_rl.data.labels import units_of
    from robo_rl.data.reader import load
    from robo_rl.demos import as_task, check_fits
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.data_facts import facts_of, read_facts
    from robo_rl.experiment.folder import pick_checkpoint
    from robo_rl.experiment.model_units import units_of_run

    run, at = pick_checkpoint(Path(path), checkpoint)
    config = load_config(run)
    data = load(demos)
    known = read_facts(run, config.demos)
    if known.unit and units_of(data.meta) is None:  # recorded alike, they are the run's
        stated = {"units": {"unit": known.unit, "kind": known.kind}}
        data.meta.info["features"]["action"]["robo_rl"] = stated
    check_alike(known, facts_of(data), demos)
    torch.set_num_threads(config.torch_threads)
    policy, meta = checkpoints.load_policy(at, device)
    spec, units = units_of_run(run, config.sim, policy.spec)
    check_fits(data.meta, spec, config.data)
    count = min(episodes or len(data), len(data))
    rows = np.concatenate([chunk_starts(data, e, policy.options.execute) for e in range(count)])
    begin(len(rows))
    # an env that says its task by one name alone
    shown = as_task(data, known.tasks[0]) if units is not None and len(known.tasks) == 1 else data
    made = predict(policy, shown, config.data, rows, config.seed, tick)
    if units is not None:
        made = units.actions(made)
    return {
        "run": run.name,
        "checkpoint": at.name,
        "step": meta["step"],
        "demos": str(demos),
        "learnt_from": Path(config.demos).resolve() == Path(demos).resolve(),
        "not_learnt": sorted({shown.task(e) for e in range(count)} - set(known.tasks)) if known.tasks else [],
        **axis_errors(data, rows, made),
    }


OTHER = 30.0  # times as large a state: degrees and radians differ by 57
RESTS = 1e-3  # a state that spreads no farther rests


def check_alike(known: "DataFacts", there: "DataFacts", demos: "str | Path") -> None:
    """Raise UserError where a data set has other columns, units or another rate than the one that a run
    learnt from, or a state OTHER times as large or as small; what is not known of this is not compared."""
    for name, mine, theirs in (
        ("columns of the action are", known.action, there.action),
        ("columns of the state are", known.state, there.state),
        ("units of the action are", known.unit, there.unit),
        ("kinds of the action are", known.kind, there.kind),
        ("actions a second are", (f"{known.rate:g}",) * bool(known.rate), (f"{there.rate:g}",)),
    ):
        if mine and mine != theirs:
            raise UserError(
                f"data set {demos}: its {name} {', '.join(theirs) or 'not stated'}; those of the data that "
                f"the run learnt from {', '.join(mine)}. Give one that was recorded alike"
                + (
                    f", or correct what it says: robo_rl data label {quoted(demos)} --units …"
                    if "unit" in name
                    else ""
                )
            )
    mine, theirs = (np.maximum(np.abs(f.low), np.abs(f.high)) for f in (known, there))
    moves = np.subtract(there.high, there.low) > RESTS
    if len(mine) == len(theirs) and (moves := moves & (mine > RESTS)).any():
        times = np.where(moves, theirs / np.maximum(mine, RESTS), np.nan)
        if not 1 / OTHER < np.nanmedian(times) < OTHER:
            i = int(np.nanargmin(np.abs(times - np.nanmedian(times))))
            raise UserError(
                f"data set {demos}: its state {there.state[i]!r} goes from {there.low[i]:.3g} to "
                f"{there.high[i]:.3g}, in the data that the run learnt from {known.low[i]:.3g} to "
                f"{known.high[i]:.3g}, and most columns are as far off: these are other units. Give one that "
                "was recorded alike"
            )
