"""`--starts vade` and its like: a sampler of `robo_rl.rollout_control.pool` over a pool of the task's
starts."""

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import POOL_STARTS, TrainConfig
from robo_rl.experiment.envs import make_env

ENVS = 64  # that show the first observations


def check(config: TrainConfig) -> None:
    """Raise UserError for a pool that a run cannot have."""
    if config.starts not in POOL_STARTS:
        return
    from robo_rl.rollout_control.pool import FROM_OBSERVATIONS

    if config.start_rows > config.start_pool:
        raise UserError(
            f"--start-rows is a number of starts of the pool: at most --start-pool {config.start_pool}, got "
            f"{config.start_rows}"
        )
    if config.starts in FROM_OBSERVATIONS and config.obs != "state":
        raise UserError(
            f"--starts {config.starts} predicts success from state observations; with --obs {config.obs} use "
            f"{', '.join(n for n in POOL_STARTS if n not in FROM_OBSERVATIONS)}"
        )


def make_sampler(config: TrainConfig):
    """The sampler of the run's pool; it is made of --starts, --start-* and --seed alone, so a resumed run
    makes the same one."""
    from robo_rl.rollout_control.pool import ARM_SAMPLERS, FROM_OBSERVATIONS, PoolSampler, pool_ids

    ids = pool_ids(config.start_pool, config.seed)
    seen = first_observations(config, ids) if config.starts in FROM_OBSERVATIONS else np.zeros((len(ids), 0))
    return PoolSampler(
        ids, ARM_SAMPLERS[config.starts](len(ids), config.seed, seen), config.start_rows, config.start_uniform
    )


def first_observations(config: TrainConfig, ids: np.ndarray) -> np.ndarray:
    """The state [K,S] that an episode from each of the starts `ids` [K] begins with; no step is made."""
    env, out = make_env(config, min(ENVS, len(ids))), []
    for i in range(0, len(ids), env.num_envs):
        obs, _ = env.reset(options={"starts": np.resize(ids[i : i + env.num_envs], env.num_envs)})
        out.append(np.asarray(obs["state"], np.float64).copy())
    env.close()
    return np.concatenate(out)[: len(ids)]
