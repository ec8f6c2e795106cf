"""Defaults per simulator, task, method and preset: the measured ones. Anything can be overridden on the command line."""

from dataclasses import replace

from robo_rl.cli.train import RL_OPTIONS, Train
from robo_rl.errors import choose
from robo_rl.options import PiRlOptions, PolicyOptions, PpoOptions

LOCOMOTION = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5")


def preset(sim: str, task: str, algo: str, obs: str, name: str) -> Train:
    """The defaults `robo_rl train` starts from for this combination."""
    choose("preset", name, ("quick", "full"))
    t = Train(sim=sim, task=task, algo=algo, obs=obs, preset=name, rl=RL_OPTIONS.get(algo, PiRlOptions)())
    if algo == "ppo":
        t = replace(t, policy=PolicyOptions(kind="gaussian", activation="tanh", layers=2, horizon=1, execute=1))
    if algo == "dppo":
        t = replace(t, policy=PolicyOptions(kind="diffusion", denoise_steps=10, logp_reduction="mean"))
    if algo == "reinflow":
        t = replace(t, policy=PolicyOptions(noise="learned", noise_steps="all"))
    if task in LOCOMOTION or sim.startswith(("gym:", "envpool:")):
        t = replace(t, demos="0", envs=64, steps=1_000_000, reward="dense")
        if algo == "ppo":
            t = replace(t, rl=PpoOptions(decisions=32, minibatch=512, epochs=5, lr=1e-3, critic_lr=1e-3, dual_clip=0.0,
                                          critic_warmup=0, normalise_obs=True, scale_reward=True, anneal_lr=True,
                                          max_grad_norm=0.5))
        elif algo == "pi_rl":
            t = replace(t, envs=40, policy=replace(t.policy, horizon=4, execute=4),
                        rl=PiRlOptions(decisions=32, minibatch=1280, normalise_obs=True, scale_reward=True,
                                          critic_warmup=0))
    return t

