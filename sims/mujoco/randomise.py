"""Masses, frictions and cameras that differ from episode to episode, as the start says."""

import mujoco
import numpy as np
from mujoco.batch import Batch

from robo_rl.starts import uniforms

SPREAD = 0.3  # randomised masses and frictions lie within +- this share of their own
CAMERA_SHIFT = np.array([0.03, 0.005])  # randomised camera positions: +- this, by camera (front, wrist) [m]
CAMERA_TURN = 0.06  # and attitude: +- about this [rad]


def randomise_model(
    batch: Batch,
    model: mujoco.MjModel,
    bodies: np.ndarray,
    kinds: frozenset[str],
    ids: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Set the model fields of the envs `ids` from their start ids; other numbers than those that place the
    objects.

    bodies: those whose mass may differ; kinds: of mass, friction, camera.
    """
    n, moving, cams = len(ids), len(bodies), model.ncam
    u = 2 * uniforms(starts, moving + 1 + 7 * cams, stream=1) - 1
    if "mass" in kinds:
        factor = 1 + SPREAD * u[:, :moving, None]
        rows, columns = ids[:, None], bodies[None]
        batch.expand("body_mass")[rows, columns] = model.body_mass[bodies] * factor[..., 0]
        batch.expand("body_inertia")[rows, columns] = model.body_inertia[bodies] * factor
        batch.set_const(ids)
    if "friction" in kinds:
        batch.expand("geom_friction")[ids, :, 0] = model.geom_friction[:, 0] * (
            1 + SPREAD * u[:, moving, None]
        )
    if "camera" in kinds:
        v = u[:, moving + 1 :].reshape(n, cams, 7)
        batch.expand("cam_pos")[ids] = model.cam_pos + CAMERA_SHIFT[:, None] * v[..., :3]
        quat = model.cam_quat + CAMERA_TURN / 2 * v[..., 3:]  # a small turn about a random axis
        batch.expand("cam_quat")[ids] = quat / np.linalg.norm(quat, axis=-1, keepdims=True)
