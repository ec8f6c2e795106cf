"""robo_rl: flow and diffusion robot policies, taught by a few demonstrations and improved by online RL.

    config = robo_rl.recipe(task="reach", preset="quick")
    result = robo_rl.train(config)
    policy = robo_rl.load_policy(result.folder)
    print(robo_rl.evaluate(policy, episodes=100))

Importing this package is light: torch, MuJoCo and the simulators load where they are used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what `__getattr__` loads, for editors and type checkers
    from robo_rl.experiment.api import (
        collect,
        evaluate,
        import_data,
        load_dataset,
        load_policy,
        load_world_model,
        make_env,
        recipe,
        register_envs,
        resume,
        train,
    )
    from robo_rl.experiment.config import TrainConfig
    from robo_rl.experiment.reporting import Event
    from robo_rl.report.compare import compare

__version__ = "0.1.0"

_HOME = {
    "TrainConfig": "robo_rl.experiment.config",
    "Event": "robo_rl.experiment.reporting",
    "compare": "robo_rl.report.compare",
} | dict.fromkeys(
    (
        "make_env",
        "recipe",
        "train",
        "resume",
        "load_policy",
        "evaluate",
        "collect",
        "import_data",
        "load_dataset",
        "load_world_model",
        "register_envs",
    ),
    "robo_rl.experiment.api",
)
__all__ = [
    "Event",
    "TrainConfig",
    "collect",
    "compare",
    "evaluate",
    "import_data",
    "load_dataset",
    "load_policy",
    "load_world_model",
    "make_env",
    "recipe",
    "register_envs",
    "resume",
    "train",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'robo_rl' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
