"""Off-screen images of the envs of a `mujoco.batch.Batch`, on every core.

Software drivers (llvmpipe) spend their time in the driver, so each core gets a GL context of its own in a
thread of its own, with the driver's threads off, and takes the next env when it is done with its last.
Shadows, reflections and multisampling are off: with them an image costs 50 times as much. Round shapes of
small images have fewer facets (twice as fast, no difference to the eye). Poses are computed from the state
(qpos, mocap) of the batch at the call, so an image never lags behind the observation.
"""

import atexit
import copy
import functools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import mujoco
import numpy as np
from mujoco.batch import Batch

from robo_rl.errors import UserError, choose
from robo_rl.files import cores
from sims.mujoco.gl import NO_GL, gl_backend

MAX_THREADS = 8
# point looked at [m], distance [m], azimuth and elevation [degrees]
STUDIO = (0.4, 0.0, 0.25), 1.5, 118.0, -22.0
SMALL = 128  # pixels up to which round shapes are drawn with fewer facets
# model fields that change what is seen, copied per env where the batch has expanded them
SEEN = (
    "body_pos",
    "body_quat",
    "geom_pos",
    "geom_quat",
    "geom_size",
    "geom_rgba",
    "mat_rgba",
    "site_pos",
    "site_quat",
    "cam_pos",
    "cam_quat",
    "cam_fovy",
    "light_pos",
    "light_dir",
    "light_diffuse",
    "light_ambient",
    "light_specular",
)


class Renderer:
    """Images of `views` (camera names) at height x width [pixels] of the envs of `batch`.

    fine: for people rather than policies, with a sky and shadows (three times the cost); there is a view
    more, `studio`, which shows the whole workspace.
    """

    def __init__(
        self,
        batch: Batch,
        model: mujoco.MjModel,
        views: Sequence[str],
        height: int,
        width: int,
        threads: int = 0,
        fine: bool = False,
    ):
        self._painters: list[_Painter] = []
        cameras = [model.camera(i).name for i in range(model.ncam)] + ["studio"] * fine
        for v in views:
            choose("view", v, cameras)
        self._batch, self._views, self._shape = batch, tuple(views), (height, width, 3)
        count = min(threads or min(cores(), MAX_THREADS), batch.nsim)
        try:
            for _ in range(count):
                self._painters.append(_Painter(model, height, width, fine))
        except BaseException:
            self.close()
            raise

    def render(self, ids: "Sequence[int] | None" = None, view: "str | None" = None) -> dict[str, np.ndarray]:
        """uint8 [n, height, width, 3] per view (or of `view` alone) of the envs `ids` (default: all), in
        order."""
        if not self._painters:
            raise UserError("the renderer is closed")
        views = self._views if view is None else (choose("view", view, self._views),)
        ids = range(self._batch.nsim) if ids is None else list(np.asarray(ids).tolist())
        out = {v: np.empty((len(ids), *self._shape), np.uint8) for v in views}
        poses = _Poses.of(self._batch)
        todo = enumerate(ids)  # shared by the threads
        answers = [p.ask(_paint, todo, poses, out) for p in self._painters[: len(ids)]]
        for answer in answers:
            _result(answer)
        return out

    def rates(self, seconds: float = 1.0) -> dict[str, float]:
        """Images/s of `render` of every env and view, and of `mjr_render` + `mjr_readPixels` alone ("bare").

        Bare draws prepared scenes of the same envs and views, on as many threads; in turns, so that other
        load on the machine meets both.
        """
        n, spent, images = self._batch.nsim, {"render": 0.0, "bare": 0.0}, 0
        answers = [
            p.ask(_prepare, range(k, n, len(self._painters)), _Poses.of(self._batch), self._views)
            for k, p in enumerate(self._painters)
        ]
        scenes = [_result(a) for a in answers]
        self.render()
        while sum(spent.values()) < 2 * seconds:
            start = perf_counter()
            self.render()
            middle = perf_counter()
            answers = [p.ask(_draw_all, s) for p, s in zip(self._painters, scenes, strict=True)]
            for a in answers:
                _result(a)
            spent["render"] += middle - start
            spent["bare"] += perf_counter() - middle
            images += n * len(self._views)
        return {k: images / t for k, t in spent.items()}

    def close(self) -> None:
        """Free the GL contexts; closing twice is allowed."""
        painters, self._painters = self._painters, []
        for p in painters:
            p.close()

    def __del__(self):
        self.close()


def project(model: mujoco.MjModel, batch: Batch, view: str, i: int, points: np.ndarray) -> np.ndarray:
    """[K, 2]: where `points` [K, 3] [m] lie in a square picture of camera `view` of env i, 0 .. 1 from the
    top left.

    With (x, y, z) the point in the camera's frame (x right, y up, z backwards) and f = 1 / tan(fovy / 2):
    u = (1 + f x / -z) / 2, v = (1 - f y / -z) / 2. NaN behind the camera. Moved and turned cameras count as
    they are.
    """
    camera = model.camera(view).id
    data = mujoco.MjData(model)
    data.qpos[:] = batch.bind("qpos")[i]
    mujoco.mj_kinematics(model, data)
    own = {
        f: (model_field if (x := batch.expanded(f)) is None else x[i])[camera]
        for f, model_field in (
            ("cam_pos", model.cam_pos),
            ("cam_quat", model.cam_quat),
            ("cam_fovy", model.cam_fovy),
        )
    }
    turned, body = np.zeros(9), model.cam_bodyid[camera]
    mujoco.mju_quat2Mat(turned, np.ascontiguousarray(own["cam_quat"], np.float64))
    attitude = data.xmat[body].reshape(3, 3)
    seen = (points - (data.xpos[body] + attitude @ own["cam_pos"])) @ (attitude @ turned.reshape(3, 3))
    depth = np.where(seen[:, 2] < -1e-6, -seen[:, 2], np.nan)[:, None]
    return 0.5 + 0.5 / np.tan(np.radians(own["cam_fovy"]) / 2) * seen[:, :2] * [1, -1] / depth


class _Painter:
    """One thread with a GL context, and the MjData and scene that it draws."""

    def __init__(self, model: mujoco.MjModel, height: int, width: int, fine: bool):
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, model, height, width, fine), daemon=True
        )
        self._thread.start()
        self._end = functools.partial(_end, self._jobs, self._thread)
        atexit.register(self._end)  # GL contexts must be freed in their thread, before the driver is unloaded
        try:
            _result(self.ask(lambda canvas: None))
        except BaseException:
            self.close()
            raise

    def ask(self, job, *args) -> queue.SimpleQueue:
        """Run job(canvas, *args) in the thread; the answer arrives in the queue."""
        answer = queue.SimpleQueue()
        self._jobs.put((job, args, answer))
        return answer

    def close(self) -> None:
        atexit.unregister(self._end)
        self._end()


@dataclass(frozen=True, slots=True)
class _Poses:
    """What a batch says of the look of each env: live [N, ...] arrays."""

    qpos: np.ndarray
    mocap_pos: np.ndarray
    mocap_quat: np.ndarray
    fields: dict[str, np.ndarray]  # model fields with a value per env

    @staticmethod
    def of(batch: Batch) -> "_Poses":
        fields = {f: x for f in SEEN if (x := batch.expanded(f)) is not None}
        return _Poses(batch.bind("qpos"), batch.bind("mocap_pos"), batch.bind("mocap_quat"), fields)


def _paint(canvas: "_Canvas", todo, poses: _Poses, out: dict[str, np.ndarray]) -> None:
    """Draw the envs that `todo` yields as (row of out, env id)."""
    for row, i in todo:
        canvas.pose(poses, i)
        for view, images in out.items():
            canvas.look(view)
            images[row] = canvas.draw()[::-1]  # GL's rows go upwards


def _prepare(canvas: "_Canvas", ids, poses: _Poses, views: tuple[str, ...]) -> list[mujoco.MjvScene]:
    scenes = []
    for i in ids:
        canvas.pose(poses, i)
        for view in views:
            scenes.append(canvas.new_scene())
            canvas.look(view, scenes[-1])
    return scenes


def _draw_all(canvas: "_Canvas", scenes: list[mujoco.MjvScene]) -> None:
    for scene in scenes:
        canvas.draw(scene)


class _Canvas:
    """GL context, scene and pixel buffer of the thread that made it."""

    def __init__(self, model: mujoco.MjModel, height: int, width: int, fine: bool):
        self.model, self._fine = copy.copy(model), fine
        m = self.model
        m.vis.global_.offheight, m.vis.global_.offwidth = height, width
        m.vis.quality.offsamples, m.vis.quality.shadowsize = 0, 1024 if fine else 0
        if fine:
            m.light_castshadow[:] = 1
        if max(height, width) <= SMALL:
            m.vis.quality.numslices, m.vis.quality.numstacks, m.vis.quality.numquads = 16, 8, 2
        self.data = mujoco.MjData(m)
        self._scene = self.new_scene()
        self._option, self._perturb = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._cameras = {}
        for i in range(m.ncam):
            camera = mujoco.MjvCamera()
            camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, i
            self._cameras[m.camera(i).name] = camera
        if fine:
            self._cameras["studio"] = studio = mujoco.MjvCamera()
            studio.type = mujoco.mjtCamera.mjCAMERA_FREE
            studio.lookat[:], studio.distance, studio.azimuth, studio.elevation = STUDIO
        self._gl = _gl_context_class()(width, height)
        self._gl.make_current()
        self._context = mujoco.MjrContext(m, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._pixels = np.empty((height, width, 3), np.uint8)

    def new_scene(self) -> mujoco.MjvScene:
        scene = mujoco.MjvScene(self.model, maxgeom=self.model.ngeom + self.model.nsite + 64)
        scene.flags[int(mujoco.mjtRndFlag.mjRND_SHADOW)] = self._fine
        # policies learnt before a black background
        scene.flags[int(mujoco.mjtRndFlag.mjRND_SKYBOX)] = self._fine
        scene.flags[int(mujoco.mjtRndFlag.mjRND_REFLECTION)] = 0
        return scene

    def pose(self, poses: _Poses, i: int) -> None:
        """Put `data` where env i is."""
        m, d = self.model, self.data
        for f, x in poses.fields.items():
            getattr(m, f)[:] = x[i]
        d.qpos[:] = poses.qpos[i]
        if m.nmocap:
            d.mocap_pos[:], d.mocap_quat[:] = poses.mocap_pos[i], poses.mocap_quat[i]
        mujoco.mj_kinematics(m, d)
        mujoco.mj_comPos(m, d)
        mujoco.mj_camlight(m, d)

    def look(self, view: str, scene: "mujoco.MjvScene | None" = None) -> None:
        """Fill the scene with the poses in `data`, as seen from camera `view`."""
        mujoco.mjv_updateScene(
            self.model,
            self.data,
            self._option,
            self._perturb,
            self._cameras[view],
            mujoco.mjtCatBit.mjCAT_ALL,
            scene or self._scene,
        )

    def draw(self, scene: "mujoco.MjvScene | None" = None) -> np.ndarray:
        """Draw the scene; uint8 [height, width, 3], bottom row first, overwritten by the next call."""
        mujoco.mjr_render(self._rect, scene or self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, self._context)
        return self._pixels

    def free(self) -> None:
        self._context.free()
        self._gl.free()


def _serve(jobs: queue.SimpleQueue, model: mujoco.MjModel, height: int, width: int, fine: bool) -> None:
    canvas = error = None
    try:
        canvas = _Canvas(model, height, width, fine)
    except Exception as e:  # noqa: BLE001 carried to the caller's thread
        error = e
    while (job := jobs.get()) is not None:
        call, args, answer = job
        if error is not None:
            answer.put(error)
            continue
        try:
            answer.put(call(canvas, *args))
        except Exception as e:  # noqa: BLE001 carried to the caller's thread
            answer.put(e)
    if canvas is not None:
        canvas.free()


def _end(jobs: queue.SimpleQueue, thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()


def _result(answer: queue.SimpleQueue):
    out = answer.get()
    if isinstance(out, Exception):
        raise out
    return out


def _gl_context_class():
    """MuJoCo's context class of `gl_backend()`, whatever MUJOCO_GL was when mujoco was imported."""
    backend = gl_backend()
    if backend == "egl":
        from mujoco.egl import GLContext
    elif backend == "osmesa":
        from mujoco.osmesa import GLContext
    else:
        raise UserError(NO_GL)
    return GLContext
