"""The names that robots have as envs, for those who must know them before anything heavy is loaded."""

from robo_rl.errors import UserError

ROBOTS = ("arm", "dds")  # the governed arm as an env: in lockstep in this process, or behind DDS in real time


def twin(name: str) -> str:
    """The simulator of a robot, where its checkpoints are judged and nothing waits; any other env is its
    own."""
    return "mujoco" if name.split(":")[0] in ROBOTS else name


def check_arms_run(config) -> None:
    """UserError: the run of this config was not trained on an arm."""
    from sims.mujoco.names import LOCOMOTION

    if twin(config.sim) != "mujoco":
        raise UserError(
            f"the run was trained in {config.sim}; only runs of --sim mujoco, arm or dds say what their "
            "state is made of"
        )
    if config.task in LOCOMOTION:
        raise UserError(f"the run's task {config.task} is no arm's")
