"""The names that robots have as envs, for those who must know them before anything heavy is loaded."""

ROBOTS = ("arm", "dds")  # the governed arm as an env: in lockstep in this process, or behind DDS in real time


def twin(name: str) -> str:
    """The simulator of a robot, where its checkpoints are judged and nothing waits; any other env is its
    own."""
    return "mujoco" if name.split(":")[0] in ROBOTS else name
