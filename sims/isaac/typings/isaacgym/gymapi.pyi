"""`isaacgym.gymapi`. Positions [m], quaternions are xyzw. Tensors are descriptors: wrap them with gymtorch.

Sizes: `actors`, `dofs` and `bodies` count over all envs. A `set_*` is applied by the next `simulate`; a
`refresh_*` fills the acquired tensor from the simulator.
"""

from typing import Any

SIM_PHYSX: int
SIM_FLEX: int
UP_AXIS_Y: int
UP_AXIS_Z: int
IMAGE_COLOR: int
IMAGE_DEPTH: int
DOF_MODE_NONE: int
DOF_MODE_POS: int
DOF_MODE_VEL: int
DOF_MODE_EFFORT: int

class Vec3:
    x: float
    y: float
    z: float
    def __init__(self, x: float = 0, y: float = 0, z: float = 0) -> None: ...

class Quat:
    x: float
    y: float
    z: float
    w: float
    def __init__(self, x: float = 0, y: float = 0, z: float = 0, w: float = 1) -> None: ...

class Transform:
    p: Vec3
    r: Quat
    def __init__(self, p: Vec3 | None = None, r: Quat | None = None) -> None: ...

class PlaneParams:
    normal: Vec3
    distance: float
    static_friction: float
    dynamic_friction: float
    restitution: float

class CameraProperties:
    width: int
    height: int
    horizontal_fov: float
    enable_tensors: bool

class SimParams:
    dt: float
    substeps: int
    up_axis: int
    gravity: Vec3
    use_gpu_pipeline: bool
    num_client_threads: int
    physx: Any
    flex: Any

class Sim: ...
class Env: ...
class Tensor: ...

class Gym:
    def create_sim(
        self, compute_device: int, graphics_device: int, engine: int, params: SimParams
    ) -> Sim: ...
    def prepare_sim(self, sim: Sim) -> bool: ...
    def simulate(self, sim: Sim) -> None: ...
    def fetch_results(self, sim: Sim, wait: bool) -> None: ...
    def step_graphics(self, sim: Sim) -> None: ...
    def add_ground(self, sim: Sim, params: PlaneParams) -> None: ...
    def create_env(self, sim: Sim, lower: Vec3, upper: Vec3, per_row: int) -> Env: ...
    def acquire_actor_root_state_tensor(
        self, sim: Sim
    ) -> Tensor: ...  # [actors, 13]: pos, quat, lin vel, ang vel
    def acquire_dof_state_tensor(self, sim: Sim) -> Tensor: ...  # [dofs, 2]: position, velocity
    def acquire_rigid_body_state_tensor(self, sim: Sim) -> Tensor: ...  # [bodies, 13]
    def acquire_net_contact_force_tensor(self, sim: Sim) -> Tensor: ...  # [bodies, 3] [N]
    def acquire_dof_force_tensor(self, sim: Sim) -> Tensor: ...
    def acquire_jacobian_tensor(self, sim: Sim, name: str) -> Tensor: ...
    def acquire_mass_matrix_tensor(self, sim: Sim, name: str) -> Tensor: ...
    def refresh_actor_root_state_tensor(self, sim: Sim) -> bool: ...
    def refresh_dof_state_tensor(self, sim: Sim) -> bool: ...
    def refresh_rigid_body_state_tensor(self, sim: Sim) -> bool: ...
    def refresh_net_contact_force_tensor(self, sim: Sim) -> bool: ...
    def refresh_dof_force_tensor(self, sim: Sim) -> bool: ...
    def refresh_jacobian_tensors(self, sim: Sim) -> bool: ...
    def refresh_mass_matrix_tensors(self, sim: Sim) -> bool: ...
    def set_actor_root_state_tensor_indexed(
        self, sim: Sim, states: Tensor, ids: Tensor, count: int
    ) -> bool: ...
    def set_dof_state_tensor_indexed(self, sim: Sim, states: Tensor, ids: Tensor, count: int) -> bool: ...
    def set_dof_position_target_tensor(self, sim: Sim, targets: Tensor) -> bool: ...
    def set_dof_actuation_force_tensor(self, sim: Sim, forces: Tensor) -> bool: ...
    def get_camera_image_gpu_tensor(self, sim: Sim, env: Env, camera: int, image: int) -> Tensor: ...

def acquire_gym() -> Gym: ...
