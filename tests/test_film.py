"""Films of episodes, of collected, deployed and predicted ones: size, order, how long the first and the last
picture stay, what is written on them."""

from itertools import groupby, pairwise
from types import SimpleNamespace

import av
import numpy as np
import pytest

import robo_rl
from robo_rl.errors import UserError
from robo_rl.film import AFTER, BEFORE, FPS, HEIGHT, PAIR_HEIGHT, WIDTH, FilmedEnv, Take, film, write_film
from robo_rl.report.world_model_film import TITLES, side_by_side
from robo_rl.starts import eval_starts
from sims.mujoco.gl import NO_GL, gl_backend
from sims.mujoco.tasks import TASKS

pytestmark = [pytest.mark.gl, pytest.mark.skipif(gl_backend() is None, reason=NO_GL)]


def one_that_stays(env):
    """A policy: the expert, but the first arm stands still."""

    def act(obs):
        actions = np.asarray(env.expert_action(), np.float32)
        actions[0] = 0
        return actions

    return act


def frames_of(path) -> np.ndarray:
    return np.stack([f.to_ndarray(format="rgb24") for f in av.open(str(path)).decode(video=0)])


def results_of(frames: np.ndarray, column: int = -40) -> list[str]:
    """The marks in the order in which they appear; "" between episodes."""
    return [mark for mark, _ in groupby(colour(f, column) for f in frames)]


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    env = robo_rl.make_env("mujoco", "reach", 3, render=True, max_steps=40)
    path = tmp_path_factory.mktemp("film") / "videos" / "final.mp4"
    film(env, one_that_stays(env), eval_starts(3, 1), 1, path)
    frames = frames_of(path)
    return frames, round(1 / env.spec.period) / -(-round(1 / env.spec.period) // FPS)


def colour(frame: np.ndarray, column: int = -40) -> str:
    """What the bar at the foot of a frame says."""
    r, g, _ = frame[-8, column].astype(int)
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


def test_a_collected_data_set_is_the_same_with_a_film_which_shows_failures_too(tmp_path):
    options = {"task": "reach", "episodes": 6, "envs": 3, "policy": "expert,random", "max_steps": 30}
    robo_rl.collect(tmp_path / "plain", **options)
    robo_rl.collect(tmp_path / "filmed", video=str(tmp_path / "a.mp4"), **options)
    plain, filmed = (robo_rl.load_dataset(tmp_path / name) for name in ("plain", "filmed"))
    assert np.array_equal(plain.state, filmed.state) and np.array_equal(plain.action, filmed.action)
    frames = frames_of(tmp_path / "a.mp4")
    assert frames.shape[1:] == (HEIGHT, WIDTH, 3)
    assert results_of(frames) == ["", "no success", "", "no success", "", "success", "", "success"]
    with pytest.raises(UserError, match="--video writes an mp4, got a.avi"):
        robo_rl.collect(tmp_path / "third", video="a.avi", **options)


def test_no_more_episodes_are_filmed_than_asked_for_and_each_from_its_beginning():
    env = FilmedEnv(robo_rl.make_env("mujoco", "reach", 2, render=True, max_steps=6), 3)
    still = np.zeros(env.action_space.shape, np.float32)
    for _ in range(3):
        env.reset(options={"starts": np.arange(2)})
        for _ in range(7):
            env.step(still)
    assert [[step for step, _ in take.pictures] for take in env.takes] == [[0, 4, 6]] * 3
    assert env.unwrapped is env.env and env.task.name == "reach" and not hasattr(env, "sources")


@pytest.mark.parametrize("task", TASKS)
def test_a_state_is_drawn_as_the_simulator_draws_itself(task):
    from sims.mujoco.scene_view import SceneView

    env = robo_rl.make_env("mujoco", task, 2, render=True)
    obs, _ = env.reset(seed=3)
    for _ in range(30):
        obs = env.step(env.expert_action())[0]
    view = SceneView(env.task, 2)
    for i in range(2):
        view.show_state(i, obs["state"][i])
    drawn, real = view.pictures()["studio"].astype(int), env.studio()
    # of the pixels: tilted objects are drawn upright
    assert (np.abs(drawn - real).max(-1) > 30).mean() < 0.003
    view.show_state(0, obs["state"][1])
    assert (np.abs(view.pictures([0])["studio"].astype(int) - real[0]).max(-1) > 30).mean() > 0.003


def windows(lengths, success, image: bool):
    """Recorded windows of these lengths that a model predicts to be bright where they are dark."""
    n, steps = len(lengths), max(lengths)
    made = np.arange(steps) < np.array(lengths)[:, None]
    won = np.zeros((n, steps), bool)
    won[np.arange(n), np.array(lengths) - 1] = success
    pictures = {"front": np.full((n, steps, 16, 16, 3), 60, np.uint8)} if image else {}
    start = {"task": np.array(["pick up the cube"] * n), "state": np.zeros((n, 36), np.float32)} | (
        {"image/front": np.full((n, 16, 16, 3), 60, np.uint8)} if image else {}
    )
    w = SimpleNamespace(
        start=start,
        images=pictures,
        made=made,
        seen=made,
        success=won,
        state=np.zeros((n, steps, 36), np.float32),
    )
    p = SimpleNamespace(
        images={v: x + 140 for v, x in pictures.items()}, success=np.zeros((n, steps)), state=w.state
    )
    return w, p


def test_a_model_is_filmed_beside_what_was_recorded_failures_first(tmp_path):
    w, p = windows([20, 18, 20], [True, False, True], image=True)
    p.success[0, 9:] = 0.9
    control = SimpleNamespace(sim="mujoco", task="pick_cube", period=0.05, state_names=())
    model = SimpleNamespace(spec=SimpleNamespace(control=control))
    [(title, path)] = side_by_side(tmp_path, {"windows": w, "predicted": p, "model": model})
    frames = frames_of(path)
    assert title == "camera front" and frames.shape[1:] == (PAIR_HEIGHT, 2 * WIDTH, 3)
    assert TITLES == ("recorded", "model")
    assert (
        abs(frames[30, 360, 320].astype(int) - 60).max() < 8
        and abs(frames[30, 360, 960].astype(int) - 200).max() < 8
    )
    assert results_of(frames, 40) == ["", "no success", "", "success", "", "success"]  # of the recording
    assert results_of(frames) == ["", "no success", "", "success", "", "no success"]  # of the model
    fps = 10  # at half speed
    held = round(BEFORE * fps) + round(AFTER * fps)
    assert len(frames) == (20 - 1 + held) * 2 + (18 - 1 + held)
    said = [colour(f) == "success" for f in frames]
    assert sum(said) == 20 - 10 + round(AFTER * fps)  # from the step of which the model says so


def test_a_success_of_the_last_action_is_shown_where_nobody_recorded_what_came_of_it(tmp_path):
    w, p = windows([20], [True], image=True)
    w.seen = w.made & (np.arange(20) < 19)  # as in data of LeRobot
    control = SimpleNamespace(sim="so100", task="recorded", period=0.05, state_names=())
    arrays = {"windows": w, "predicted": p, "model": SimpleNamespace(spec=SimpleNamespace(control=control))}
    [(_, path)] = side_by_side(tmp_path, arrays)
    frames = frames_of(path)
    assert results_of(frames, 40) == ["", "success"] and results_of(frames) == ["", "no success"]


def test_predicted_states_are_drawn_in_the_simulators_scene_and_others_are_not(tmp_path):
    from sims.mujoco.env import state_names_of

    env = robo_rl.make_env("mujoco", "pick_cube", 1, render=True)
    state = env.reset(seed=0)[0]["state"][0]
    w, p = windows([16], [False], image=False)
    w.start["state"][:], w.state[:] = state, state
    p.state = w.state.copy()
    p.state[..., 0] += 0.5  # the model turns the arm
    control = SimpleNamespace(
        sim="mujoco", task="pick_cube", period=0.04, state_names=state_names_of(TASKS["pick_cube"])
    )
    arrays = {"windows": w, "predicted": p, "model": SimpleNamespace(spec=SimpleNamespace(control=control))}
    [(_, path)] = side_by_side(tmp_path, arrays)
    left, right = np.split(frames_of(path)[:, 150:600].astype(int), 2, 2)  # between titles and marks
    assert np.abs(left[0] - right[0]).mean() < 1 < 2 < np.abs(left[-1] - right[-1]).mean()
    control.state_names = control.state_names[:30]
    assert side_by_side(tmp_path, arrays) == []


def test_a_take_that_nobody_judges_bears_no_mark_and_small_pictures_fill_the_frame(tmp_path):
    take = Take("dry run", judged=False)
    for step in range(3):
        take.add(step, np.full((32, 32, 3), 128, np.uint8))
    assert write_film(tmp_path / "a.mp4", [take, Take("empty")], 10) == 5 + 1 + 10
    frames = frames_of(tmp_path / "a.mp4")
    assert results_of(frames) == [""] and (np.abs(frames[:, 60:-40, 90:-90].astype(int) - 128) < 8).all()
