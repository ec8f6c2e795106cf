"""Our tasks as ids of Gymnasium: `gymnasium.make_vec("robo_rl/pick_cube-v0", num_envs=4)` after `import
sims.gymnasium_ids`.

Importing this module registers them, as Gymnasium's names of the form `module:id` expect:
`gymnasium.make_vec("sims.gymnasium_ids:robo_rl/pick_cube-v0")`. Nothing else imports it but
`robo_rl.register_envs()`. (Gymnasium loads no plugins by entry points any more: an id is there once a module
has registered it.) Options of `sims.make` are keyword arguments: `gymnasium.make_vec("robo_rl/reach-v0",
num_envs=4, reward="dense", obs="rgb")`.
"""

import gymnasium as gym
from gymnasium.vector import VectorEnv

from sims.mujoco.names import LOCOMOTION, TASKS

NAMESPACE, VERSION = "robo_rl", "v0"


class GymnasiumVectorEnv(VectorEnv):
    """An env of our contract under a name of Gymnasium, which puts a `spec` of its own on every env that it
    makes.

    `control` is ours (`robo_rl.types.ControlSpec`), `env` the env itself; whatever else is asked for is the
    env's.
    """

    def __init__(self, env: VectorEnv):
        self.env, self.control = env, env.spec
        self.num_envs, self.metadata, self.render_mode = env.num_envs, env.metadata, env.render_mode
        self.observation_space, self.single_observation_space = (
            env.observation_space,
            env.single_observation_space,
        )
        self.action_space, self.single_action_space = env.action_space, env.single_action_space

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        return self.env.step(actions)

    def render(self):
        return self.env.render()

    def close_extras(self, **kwargs):
        self.env.close()

    def __getattr__(self, name: str):
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


def make(
    task: str, num_envs: int = 1, render_mode: str | None = None, max_episode_steps: int = 0, **options
) -> GymnasiumVectorEnv:
    """The embedded simulator's env of `task`, with Gymnasium's own names for two of its options."""
    from sims.mujoco import make_mujoco

    render = render_mode == "rgb_array"
    return GymnasiumVectorEnv(
        make_mujoco(task, num_envs=num_envs, render=render, max_steps=max_episode_steps, **options)
    )


def register_envs() -> tuple[str, ...]:
    """Register every task of the embedded simulator -> the ids. Those of Gymnasium's own walkers keep their
    names: robo_rl/Hopper-v5."""
    ids = tuple(
        f"{NAMESPACE}/{task}" if task in LOCOMOTION else f"{NAMESPACE}/{task}-{VERSION}" for task in TASKS
    )
    for name, task in zip(ids, TASKS, strict=True):
        if name not in gym.registry:
            gym.register(name, vector_entry_point="sims.gymnasium_ids:make", kwargs={"task": task})
    return ids


register_envs()
