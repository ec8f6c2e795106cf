"""What the success classifier of a run is trained from: data sets of episodes that somebody marked, or
episodes marked for it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig, by_person, replay_options
from robo_rl.experiment.stage import person_env, with_operator
from robo_rl.rewards import HELD_OUT, Marked, marks_of

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset

MARK_START = 1_050_000_000  # starts of the episodes that a person marks
LATE = 0.4  # s that a person's mark comes after the success


def seen_frames(policy, data, size: int = 256) -> dict[str, np.ndarray]:
    """What replay keeps of each frame of a data set, as `robo_rl.replay_collector.replay_observation` has it
    of an env's."""
    from robo_rl.replay_collector import replay_observation

    tasks = np.array(data.tasks)[data.task_index]
    pictures = {v: data.images(v) for v in policy.spec.views}
    pieces = [
        replay_observation(
            policy,
            {"state": data.state[i : i + size], "task": tasks[i : i + size]}
            | {f"image/{v}": x[i : i + size] for v, x in pictures.items()},
        )
        for i in range(0, len(data.state), size)
    ]
    return {k: np.concatenate([p[k] for p in pieces]) for k in pieces[0]}


def seen_last(policy, data) -> tuple[dict[str, np.ndarray] | None, np.ndarray]:
    """(what replay keeps of what was observed after the last actions, one row per episode; bool[E]: where it
    was recorded)."""
    from robo_rl.replay_collector import replay_observation

    known = np.isfinite(data.final).all(1)
    pictures = {v: data.final_images(v) for v in policy.spec.views}
    for _, recorded in pictures.values():
        known &= recorded
    if not known.any():
        return None, known
    obs = {"state": np.nan_to_num(data.final), "task": np.array([data.task(e) for e in range(len(data))])}
    return replay_observation(policy, obs | {f"image/{v}": x for v, (x, _) in pictures.items()}), known


def marked_states(config: TrainConfig, env, policy, folder: Path, say: Callable[[str], None]) -> Marked:
    """The marks of `--rl.judge classifier`: of --rl.judge-marks; of the person of --rl.operator, who marks
    episodes of `policy` now, kept in `folder`/marks; or of `env` itself."""
    from robo_rl.replay_collector import marked_episodes

    o = replay_options(config)
    if o.judge_marks:
        return marks_of_data(o.judge_marks.split(","), policy, o.judge_hold)
    if by_person(config):
        collect_marks(config, env, policy, folder / "marks", say)
        return marks_of_data([str(folder / "marks")], policy, o.judge_hold)
    return marked_episodes(env, policy, o.judge_episodes, config.seed + 3)


def check_marks(config: TrainConfig, policy) -> None:
    """UserError where the success classifier of the run cannot be trained, before anything else is done."""
    o = replay_options(config)
    if o.judge == "env":
        if o.judge_marks:
            raise UserError(
                "--rl.judge-marks trains the classifier of --rl.judge classifier: add that, or leave the "
                "marks out"
            )
        return
    count = o.judge_episodes
    if o.judge_marks:
        count = sum(len(data) for data in marked_data(o.judge_marks.split(","), policy))
    need = math.ceil(1 / o.judge_rate - 1e-9) - 1
    if round(HELD_OUT * count) < need:
        raise UserError(
            f"--rl.judge-rate {o.judge_rate:g} is guarded on {need} held-out episodes, half of all: it takes "
            f"{math.ceil(need / HELD_OUT)} marked ones, got {count}; mark more, or allow a higher rate"
        )


def marked_data(folders: list[str], policy) -> list["Dataset"]:
    """These data sets. UserError: one does not fit the policy, or no failure or no success is among them."""
    from robo_rl.data.reader import load
    from robo_rl.demos import check_fits

    out = []
    for folder in folders:
        if not (Path(folder) / "meta" / "info.json").exists():
            raise UserError(
                f"--rl.judge-marks: {folder} is no data set; record one with robo_rl collect --operator … "
                "--keep all, or mark episodes in robo_rl console RUN (RUN/marks)"
            )
        out.append(load(folder))
        check_fits(out[-1].meta, policy.spec)
    won = sum(int(np.sum(data.success)) for data in out)
    lost = sum(map(len, out)) - won
    if not won or not lost:
        raise UserError(
            f"a success classifier needs episodes of both kinds, got {won} successes and {lost} failures; "
            "record failures too (robo_rl collect --keep all)"
        )
    return out


def marks_of_data(folders: list[str], policy, hold: int) -> Marked:
    """The marks of these data sets. UserError: see `marked_data`."""
    from robo_rl.replay_collector import seen_key

    states, success, key = [], [], seen_key(policy)
    parts = marked_data(folders, policy)
    for data in parts:
        rows, (last, known) = seen_frames(policy, data)[key], seen_last(policy, data)
        for e in range(len(data)):
            own = rows[data.from_[e] : data.to[e]]
            states.append(
                np.concatenate([own, last[key][e : e + 1]]) if known[e] and last is not None else own
            )
        success.append(np.array(data.success, bool))
    won, lengths = np.concatenate(success), np.array([len(x) for x in states])
    hidden = round(LATE * parts[-1].features.fps)
    return marks_of(np.concatenate(states), lengths, won, max(2, hold), hidden)


def collect_marks(config: TrainConfig, env, policy, folder: Path, say: Callable[[str], None]) -> None:
    """Let the policy act with the person beside it until --rl.judge-episodes episodes are marked, or ended,
    in the data set `folder`."""
    from robo_rl.data.writer import Writer
    from robo_rl.human.fleet import RobotFleet

    o = replay_options(config)
    env, own, limit = person_env(config, env)
    made, leave = with_operator(config, env, limit)
    try:
        with Writer(folder, spec=replace(env.spec, max_steps=limit or env.spec.max_steps)) as writer:
            say(
                f"mark {o.judge_episodes - len(writer)} episodes: success or failure, with the button or on "
                f"the page; {folder} keeps them"
            )
            first = MARK_START + config.seed % 400 * 100_000 + len(writer)

            def keep(episode, robot: int) -> None:
                writer.add(episode)
                writer.flush()
                say(
                    f"episode {len(writer)} of {o.judge_episodes}: "
                    f"{'success' if episode.success else 'failure'}"
                )

            fleet = RobotFleet(
                made, policy, iter(range(first, first + 100_000)), seed=config.seed, on_episode=keep
            )
            while len(writer) < o.judge_episodes:
                fleet.step()
    finally:
        leave()
        if own:
            made.close()
