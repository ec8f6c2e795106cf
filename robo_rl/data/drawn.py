"""Pictures of a few frames of each recorded episode, drawn where the episode is played again.

A scripted expert plays thousands of control steps a second, a picture costs as much as twenty of them. What
a policy of pictures has to tell apart lies in how the scenes differ, and neighbouring frames of one scene
hardly do: many episodes with few pictures each teach more than few with all. So the data set has states and
actions alone, and its frames that are learnt from are drawn when they are needed."""

from collections.abc import Callable, Iterator

import numpy as np

from robo_rl.data.reader import Dataset
from robo_rl.errors import UserError

GROUP = 32  # episodes that are played together and have the same frames drawn


def chosen_frames(data: Dataset, every: int, seed: int) -> np.ndarray:
    """Rows int64[K], rising: the first frame of every episode, and of those after it one in `every`,
    counted from a place that is drawn for each group of episodes; so all phases of a task are seen alike,
    and its beginning surely."""
    phase = np.random.default_rng([seed, 23]).integers(1, every + 1, -(-len(data) // GROUP))
    t = np.arange(len(data.action)) - data.from_[data.episode_index]
    return np.flatnonzero((t == 0) | (t % every == phase[data.episode_index // GROUP] % every))


def draw_frames(
    env, data: Dataset, rows: np.ndarray, tick: Callable[[int], None] = lambda episodes: None
) -> dict[str, np.ndarray]:
    """{view: uint8[K, h, w, 3]} of the rising `rows` int64[K], as `draw_groups` draws them; `tick` is told
    how many episodes are done."""
    out = blank(env, len(rows))
    for here, pictures in draw_groups(env, data, rows):
        for v, x in pictures.items():
            out[v][here] = x
        tick(int(data.episode_index[rows[here[-1]]]) + 1)
    return out


def blank(env, count: int) -> dict[str, np.ndarray]:
    """Room for `count` pictures of each of the env's cameras."""
    shapes = {v: env.single_observation_space[f"image/{v}"].shape for v in env.spec.views}
    return {v: np.empty((count, *shape), np.uint8) for v, shape in shapes.items()}


def draw_groups(env, data: Dataset, rows: np.ndarray) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """(places int64[k] among the rising `rows` int64[K], {view: uint8[k, h, w, 3]}) of as many episodes at a
    time as `env` has envs: what its cameras see there, as they would while the episode is played with all its
    pictures. UserError: an episode names no start, or does not play again as it was recorded."""
    views, n = env.spec.views, env.num_envs
    episode, lengths = data.episode_index[rows], data.to - data.from_
    time = rows - data.from_[episode]
    for first in range(0, len(data), n):
        ids = np.minimum(first + np.arange(n), len(data) - 1)  # idle envs play the last one again
        if (data.start[ids] < 0).any():
            raise UserError(
                f"data set {data.meta.root}: episode {ids[data.start[ids] < 0][0]} names no start, so its "
                "pictures cannot be drawn"
            )
        here = np.flatnonzero((episode >= first) & (episode < first + n))
        if not len(here):
            continue
        out = blank(env, len(here))
        wanted = set(time[here].tolist())
        env.images = 0 in wanted
        obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": data.start[ids]})
        for t in range(int(time[here].max()) + 1):
            due = time[here] == t
            env_ids = episode[here[due]] - first
            if not np.array_equal(obs["state"][env_ids], data.state[rows[here[due]]]):
                raise UserError(
                    f"data set {data.meta.root}: played again, its episodes differ at frame {t}: pictures "
                    f"can be drawn of what {env.spec.id} recorded, with the same options and without noise"
                )
            for v in views:
                out[v][due] = obs[f"image/{v}"][env_ids]
            env.images = t + 1 in wanted
            obs = env.step(data.action[data.from_[ids] + np.minimum(t, lengths[ids] - 1)])[0]
        yield here, out
