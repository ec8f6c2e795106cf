"""Both arms of a pair in one MuJoCo scene: the models of their files at their bases, a floor if one had it,
and nothing else."""

import mujoco
import numpy as np

from controllers.arm import Disturbance, SceneShare, simulated_spec
from controllers.pair import ArmPair
from robo_rl.errors import UserError

OPTIONS = ("integrator", "cone", "iterations", "ls_iterations", "solver", "tolerance", "impratio", "gravity")


def pair_scene(pair: ArmPair, dt: float, disturbance: Disturbance) -> dict[str, SceneShare]:
    """Each arm's part of the scene, by its name; whose physics options are the first arm's. UserError: no
    bases, no models."""
    if not pair.bases:
        raise UserError(
            f"pair {pair.name}: nobody said where the arms stand: give `bases` in its file (docs: Two arms)"
        )
    scene, floor = mujoco.MjSpec(), False
    for k, (name, robot) in enumerate(pair.arms.items()):
        if not robot.model:
            raise UserError(
                f"pair {pair.name}: robot {robot.name} ships no model: name its MJCF or URDF as `model` in "
                "its file"
            )
        spec, base = simulated_spec(robot.model, robot, dt, disturbance), pair.bases[name]
        for option in OPTIONS if k == 0 else ():
            setattr(scene.option, option, getattr(spec.option, option))
        for option in OPTIONS:
            setattr(spec.option, option, getattr(scene.option, option))
        for geom in list(spec.worldbody.geoms):
            if geom.type == mujoco.mjtGeom.mjGEOM_PLANE:  # there is one floor
                spec.delete(geom)
                floor = True
        scene.option.timestep = spec.option.timestep = dt
        scene.attach(spec, prefix=f"{name}/", frame=scene.worldbody.add_frame(pos=base.pos, quat=base.quat))
    if floor:
        low = min(base.pos[2] for base in pair.bases.values())
        scene.worldbody.add_geom(
            name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE, size=(2.0, 2.0, 0.05), pos=(0.0, 0.0, low)
        )
    try:
        mj = scene.compile()
    except ValueError as e:
        raise UserError(
            f"pair {pair.name}: the scene cannot be simulated: {' '.join(str(e).split())}"
        ) from None
    data, out = mujoco.MjData(mj), {}
    for name, base in pair.bases.items():
        turn = np.zeros(9)
        mujoco.mju_quat2Mat(turn, np.array(base.quat) / np.linalg.norm(base.quat))
        out[name] = SceneShare(mj, data, f"{name}/", turn.reshape(3, 3))
    return {name: out[name] for name in pair.arms}
