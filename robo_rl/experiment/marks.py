"""What the success classifier of a run is trained from: data sets of episodes that somebody marked, or
episodes marked for it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig, replay_options
from robo_rl.experiment.stage import by_person, with_operator
from robo_rl.rewards import Marked, marks_of

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


def marks_of_data(folders: list[str], policy, hold: int) -> Marked:
    """The marks of these data sets. UserError: one does not fit the policy, or no failure or no success is
    among them."""
    from robo_rl.data.reader import load
    from robo_rl.demos import check_fits
    from robo_rl.replay_collector import seen_key

    states, lengths, success, period = [], [], [], 0.0
    for folder in folders:
        if not (Path(folder) / "meta" / "info.json").exists():
            raise UserError(
                f"--rl.judge-marks: {folder} is no data set; record one with robo_rl collect --operator … "
                "--keep all, or mark episodes in robo_rl console RUN (RUN/marks)"
            )
        data = load(folder)
        check_fits(data.meta, policy.spec)
        key = seen_key(policy)
        rows, (last, known) = seen_frames(policy, data)[key], seen_last(policy, data)
        for e in range(len(data)):
            own = rows[data.from_[e] : data.to[e]]
            states.append(
                np.concatenate([own, last[key][e : e + 1]]) if known[e] and last is not None else own
            )
        success.append(np.array(data.success, bool))
        period = 1 / data.features.fps
    won, lengths = np.concatenate(success), np.array([len(x) for x in states])
    if won.all() or not won.any():
        raise UserError(
            f"a success classifier needs episodes of both kinds, got {int(won.sum())} successes and "
            f"{int((~won).sum())} failures; record failures too (robo_rl collect --keep all)"
        )
    return marks_of(np.concatenate(states), lengths, won, max(2, hold), round(LATE / period))


def collect_marks(config: TrainConfig, env, policy, folder: Path, say: Callable[[str], None]) -> None:
    """Let the policy act with the person beside it until --rl.judge-episodes episodes are marked, or ended,
    in the data set `folder`."""
    from robo_rl.data.writer import Writer
    from robo_rl.human.fleet import RobotFleet

    o = replay_options(config)
    own = o.operator == "console"
    if own:
        from robo_rl.experiment.envs import make_env

        env = make_env(config, config.envs, render=config.obs != "rgb")
    made, leave = with_operator(config, env)
    try:
        with Writer(folder, spec=env.spec) as writer:
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
