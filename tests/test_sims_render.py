"""Off-screen images of a batch: they show the present state of each env, on any number of threads."""

import os
import subprocess
import sys

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from robo_rl.errors import UserError
from sims.mujoco import gl
from sims.mujoco.gl import NO_GL, gl_backend
from sims.mujoco.render import Renderer

pytestmark = [pytest.mark.gl, pytest.mark.skipif(gl_backend() is None, reason=NO_GL)]

XML = """
<mujoco>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <geom type="plane" size="3 3 .1" pos="0 0 -1" rgba="0 0 .5 1"/>
    <camera name="front" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/>
    <camera name="above" pos="0 0 3"/>
    <body mocap="true" pos="-.6 0 -.6"><geom type="sphere" size=".15" rgba="0 1 0 1"/></body>
    <body><joint name="x" type="slide" axis="1 0 0"/><joint name="z" type="slide" axis="0 0 1"/>
      <geom name="box" type="box" size=".2 .2 .2" rgba="1 0 0 1"/></body>
  </worldbody>
</mujoco>"""


@pytest.fixture
def batch():
    return Batch(mujoco.MjModel.from_xml_string(XML), 5, 1)


@pytest.fixture
def make(batch):
    made = []

    def build(views=("front", "above"), size=32, threads=2):
        made.append(Renderer(batch, batch.model, views, size, size, threads))
        return made[-1]

    yield build
    for r in made:
        r.close()


def centre(image: np.ndarray, channel: int) -> np.ndarray:
    """(row, column) of the middle of the pixels where one colour is bright and the others are dark."""
    rest = np.delete(image, channel, axis=2).max(2)
    return np.argwhere((image[..., channel] > 150) & (rest < 100)).mean(0)


def test_an_image_shows_each_env_where_it_is_now(batch, make):
    batch.qpos[:, 0] = np.linspace(-0.6, 0.6, 5)
    batch.qpos[:, 1] = np.linspace(0.6, -0.6, 5)
    out = make().render()
    assert (
        set(out) == {"front", "above"}
        and out["front"].shape == (5, 32, 32, 3)
        and out["front"].dtype == np.uint8
    )
    rows, cols = np.array([centre(i, 0) for i in out["front"]]).T
    assert (np.diff(rows) > 1).all(), "a lower box is drawn lower: row 0 is the top"
    assert (np.diff(cols) > 1).all(), "a box to the right is drawn to the right"


def test_a_mocap_body_moves_in_the_image(batch, make):
    batch.mocap_pos[1, 0] = [0.6, 0, -0.6]
    front = make().render()["front"]
    assert centre(front[0], 1)[1] < 12 and centre(front[1], 1)[1] > 20


def test_a_part_of_the_envs_and_views_is_that_part_of_all(batch, make):
    batch.qpos[:] = np.random.default_rng(0).uniform(-0.5, 0.5, (5, 2))
    r = make()
    full, part = r.render(), r.render(ids=[3, 1], view="above")
    assert set(part) == {"above"}
    np.testing.assert_array_equal(part["above"], full["above"][[3, 1]])
    assert r.render(ids=[])["front"].shape == (0, 32, 32, 3)


def test_the_number_of_threads_changes_no_pixel(batch, make):
    batch.qpos[:] = np.random.default_rng(0).uniform(-0.5, 0.5, (5, 2))
    a, b = make(threads=1).render(), make(threads=3).render()
    for v in a:
        np.testing.assert_array_equal(a[v], b[v])


def test_two_renderers_do_not_disturb_each_other(make):
    small, large = make(size=32), make(size=200)
    before = small.render()["front"]
    assert large.render()["front"].shape == (5, 200, 200, 3)
    np.testing.assert_array_equal(small.render()["front"], before)
    large.close()
    np.testing.assert_array_equal(small.render()["front"], before)


def test_colours_and_cameras_that_differ_per_env_are_seen(batch, make):
    r = make()
    plain = r.render()["front"]
    batch.expand("geom_rgba")[2, batch.model.geom("box").id] = [0, 1, 1, 1]
    batch.expand("cam_pos")[3, batch.model.camera("front").id, 0] = 0.5
    now = r.render()["front"]
    np.testing.assert_array_equal(now[[0, 1, 4]], plain[[0, 1, 4]])
    assert now[2, 16, 16].tolist() == [0, 255, 255]
    assert centre(now[3], 0)[1] < centre(plain[3], 0)[1] - 2


@pytest.mark.parametrize("randomise", ["", "camera"])
def test_a_point_is_projected_to_where_the_picture_shows_it(randomise):
    import sims

    env = sims.make("mujoco", "pick_cube", 3, randomise=randomise, render=True)
    env.reset(seed=5)
    size, seen = 400, 0
    pictures = env.film(env.cameras, size, [2, 0])
    for k, i in enumerate((2, 0)):
        cube = env.scene.pos[0][:, i].astype(float)
        for view in env.cameras:
            x = pictures[view][k].astype(int)
            red = np.argwhere((x[..., 0] > 100) & (x[..., 1] < 60) & (x[..., 2] < 60))
            ((u, v),) = env.project(view, i, cube[None])
            if len(red) and 0.1 < u < 0.9 and 0.1 < v < 0.9:
                assert np.abs(red.mean(0) + 0.5 - size * np.array([v, u])).max() < 8, (view, i)
                seen += 1
    assert seen >= 3
    away = env.project("wrist", 0, env.tool(0)[None] + [0, 0, 1.0])
    assert np.isnan(away).all()  # behind the camera
    env.close()


def test_an_unknown_view_is_refused_with_the_views_there_are(batch):
    with pytest.raises(UserError, match="unknown view 'frnt'; did you mean 'front'"):
        Renderer(batch, batch.model, ("frnt",), 32, 32)


def test_a_closed_renderer_says_so(make):
    r = make()
    r.close()
    r.close()
    with pytest.raises(UserError, match="closed"):
        r.render()


def test_without_gl_the_error_says_what_to_install(batch, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "off")
    gl_backend.cache_clear()
    try:
        assert gl_backend() is None
        with pytest.raises(UserError, match="apt-get install libegl1 libgl1-mesa-dri"):
            Renderer(batch, batch.model, ("front",), 32, 32)
    finally:
        monkeypatch.undo()
        gl_backend.cache_clear()


def test_a_render_costs_little_more_than_the_bare_draw_calls(make):
    renderer, seen = make(size=64, threads=1), []
    for _ in range(5):  # other load on the machine blurs one measurement
        r = renderer.rates(0.2)
        seen.append(r["render"] / r["bare"])
        if seen[-1] > 0.6:
            return
    raise AssertionError(
        f"render / bare draw calls is 0.8 or more on a quiet machine, got {np.round(seen, 2)}"
    )


SCRIPT = """
import mujoco  # before the renderer, with MUJOCO_GL as the caller has it
from mujoco.batch import Batch
from sims.mujoco.gl import NO_GL, gl_backend
from sims.mujoco.render import Renderer
batch = Batch(mujoco.MjModel.from_xml_string({xml!r}), 2, 1)
image = Renderer(batch, batch.model, ("front",), 32, 32).render()["front"][0]
print(gl_backend(), image[16, 16].tolist())
"""


@pytest.mark.parametrize("backend", ["", "egl", "osmesa"])
def test_a_fresh_process_draws_and_ends_cleanly_without_close(backend):
    env = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    probe = {"egl": gl._egl_works, "osmesa": gl._osmesa_works}.get(backend)
    if probe and not probe():
        pytest.skip(f"no {backend} on this machine")
    if backend:
        env["MUJOCO_GL"] = backend
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(xml=XML)],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip().endswith("[255, 0, 0]") and out.stdout.startswith(backend), out.stdout
    assert not out.stderr, out.stderr


OF_MUJOCO = """
import gymnasium as gym
import mujoco
import numpy as np


class Drawn(gym.Env):
    metadata = {{"render_modes": ["rgb_array"]}}
    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.model = mujoco.MjModel.from_xml_string({xml!r})
        self.data = mujoco.MjData(self.model)

    def reset(self, *, seed=None, options=None):
        mujoco.mj_forward(self.model, self.data)
        return self.data.time * np.ones(1, np.float32), {{}}

    def render(self):
        with mujoco.Renderer(self.model, 32, 32) as renderer:
            renderer.update_scene(self.data, camera="front")
            return renderer.render()
"""
DRAW = """
import sims
env = sims.make("gym:of_mujoco:Drawn", render=True)
env.reset(seed=0)
print(env.render().max() > 0)
"""


def test_an_env_of_the_users_that_draws_with_mujoco_does_so_without_a_display(tmp_path):
    (tmp_path / "of_mujoco.py").write_text(OF_MUJOCO.format(xml=XML))
    screens = ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY", "PYOPENGL_PLATFORM")
    env = {k: v for k, v in os.environ.items() if k not in screens}
    out = subprocess.run(
        [sys.executable, "-c", DRAW],
        check=False,
        cwd=tmp_path,
        env=env | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.stdout.strip() == "True", out.stderr[-2000:]
