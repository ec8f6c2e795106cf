"""Every env by its name on the command line: the simulators, and learned ones as `wm:PATH`."""

from robo_rl.errors import UserError


def make(name: str, task: str = "", num_envs: int = 1, *, judge: str = "", **options):
    """`sims.make`, or the world model in the folder after `wm:`; `judge` (of a world model alone) says who decides on
    success, see `world_models.judge.make`."""
    if name.startswith("wm:"):
        from world_models.env import make_world
        return make_world(name[3:], task, num_envs, judge=judge, **options)
    if judge:
        raise UserError(f"--judge is for a world model (--sim wm:PATH), got --sim {name}")
    import sims
    return sims.make(name, task, num_envs, **options)
