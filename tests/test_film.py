"""Films of episodes: size, order, how long the first and the last picture stay, what is written on them."""

from itertools import pairwise

import av
import numpy as np
import pytest

import robo_rl
from robo_rl.evaluation import eval_starts
from robo_rl.film import AFTER, BEFORE, FPS, HEIGHT, WIDTH, film
from sims.mujoco.render import NO_GL, gl_backend

pytestmark = [pytest.mark.gl, pytest.mark.skipif(gl_backend() is None, reason=NO_GL)]


def one_that_stays(env):
    """A policy: the expert, but the first arm stands still."""
    def act(obs):
        actions = np.asarray(env.expert_action(), np.float32)
        actions[0] = 0
        return actions
    return act


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    env = robo_rl.make_env("mujoco", "reach", 3, render=True, max_steps=40)
    path = tmp_path_factory.mktemp("film") / "videos" / "final.mp4"
    film(env, one_that_stays(env), eval_starts(3, 1), 1, path)
    frames = np.stack([f.to_ndarray(format="rgb24") for f in av.open(str(path)).decode(video=0)])
    return frames, round(1 / env.spec.period) / -(-round(1 / env.spec.period) // FPS)


def colour(frame: np.ndarray) -> str:
    """What the bar at the foot of a frame says."""
    r, g, _ = frame[-8, -40].astype(int)
    return "success" if g > r + 40 else "no success" if r > g + 60 else ""


def test_a_film_shows_whole_frames_the_failure_first(filmed):
    frames, _ = filmed
    assert frames.shape[1:] == (HEIGHT, WIDTH, 3)
    marks = [colour(f) for f in frames]
    ends = [m for i, m in enumerate(marks) if m and (i + 1 == len(marks) or not marks[i + 1])]
    assert ends == ["no success", "success", "success"]


def test_the_first_picture_stays_half_a_second_and_the_last_a_second(filmed):
    frames, fps = filmed
    still = np.array([np.abs(a.astype(int) - b).mean() < 0.6 for a, b in pairwise(frames)])
    assert still[: round(fps * BEFORE) - 1].all()
    marks = [colour(f) for f in frames]
    runs = [len(r) for r in "".join("x" if m == "success" else " " for m in marks).split()]
    assert len(runs) == 2 and min(runs) >= round(fps * AFTER)


def test_the_studio_shows_light_and_shadow_and_the_pictures_of_policies_stay_as_they_were():
    env = robo_rl.make_env("mujoco", "reach", 2, obs="rgb")
    obs, _ = env.reset(seed=0)
    before = obs["image/front"].copy()
    wide = env.studio([1])
    assert wide.shape == (1, HEIGHT, WIDTH, 3)
    assert np.array_equal(env.film(("front",), 64)["front"], before)
    assert (before.reshape(-1, 3) == 0).all(1).any()  # the background of policies' pictures is black
    assert not (wide.reshape(-1, 3) == 0).all(1).any()
