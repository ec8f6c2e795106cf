"""Every env by its name on the command line: the simulators, and learned ones as `wm:PATH`."""

from robo_rl.errors import UserError
from robo_rl.experiment.robot_names import ROBOTS, twin


def check_names(name: str, task: str = "", **options) -> None:
    """Raise UserError for a simulator, task, observation, reward, control or randomisation that does not exist; before torch is
    loaded, which takes seconds."""
    import sims
    if not name.startswith("wm:"):
        sims.check_names(twin(name), task, **options)


def make(name: str, task: str = "", num_envs: int = 1, *, judge: str = "", **options):
    """`sims.make`, or the world model in the folder after `wm:`; `judge` (of a world model alone) says who decides on
    success, see `world_models.judge.make`."""
    if name.startswith("wm:"):
        from world_models.env import make_world
        return make_world(name[3:], task, num_envs, judge=judge, **options)
    if judge:
        raise UserError(f"--judge is for a world model (--sim wm:PATH), got --sim {name}")
    if name.split(":")[0] in ROBOTS:
        from robo_rl.experiment.arm import make_robot
        return make_robot(name, task, num_envs, **options)
    import sims
    return sims.make(name, task, num_envs, **options)
