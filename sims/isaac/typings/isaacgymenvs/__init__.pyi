"""Stub of IsaacGymEnvs: how a task is made."""

from .tasks.base.vec_task import VecTask

def make(
    seed: int,
    task: str,
    num_envs: int,
    sim_device: str,
    rl_device: str,
    graphics_device_id: int = -1,
    headless: bool = False,
    multi_gpu: bool = False,
    virtual_screen_capture: bool = False,
    force_render: bool = True,
    cfg: object = None,
) -> VecTask: ...
