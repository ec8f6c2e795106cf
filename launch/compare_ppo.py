"""Ours against Stable-Baselines3's PPO: HalfCheetah-v5, same network, batch sizes, epochs and steps, several
seeds.

    python launch/compare_ppo.py --steps 500000 --seeds 5

Both train with observation and reward normalisation; both are then evaluated without noise on 20 whole
episodes of Gymnasium's own reward. One core each, side by side. Needs `pip install 'robo_rl[bench]'`.
"""

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from robo_rl.files import read_json

TASK = "HalfCheetah-v5"


def ours(seed: int, steps: int, out: "multiprocessing.Queue") -> None:
    """Train by the command line and read the run's own final evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.monotonic()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "robo_rl",
                "train",
                "--task",
                TASK,
                "--algo",
                "ppo",
                "--steps",
                str(steps),
                "--seed",
                str(seed),
                "--threads",
                "1",
                "--out",
                str(run),
                "--no-video",
                "--eval-every",
                str(10 * steps),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=3600,
        )
        took = time.monotonic() - began
        returns = read_json(run / "evals" / "final.json")["return"]
    out.put(("ours", seed, sum(returns) / len(returns), took))


def sb3(seed: int, steps: int, out: "multiprocessing.Queue") -> None:
    """The same job in Stable-Baselines3."""
    import gymnasium as gym
    import mujoco
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(1)
    mujoco.set_mju_user_warning(lambda text: None)  # one line of a deprecated XML attribute per env
    env = VecNormalize(DummyVecEnv([lambda: gym.make(TASK)] * 64), gamma=0.99)
    began = time.monotonic()
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=512,
        n_epochs=5,
        learning_rate=lambda left: 1e-3 * left,
        policy_kwargs={"net_arch": [256, 256], "log_std_init": -0.51},
        seed=seed,
        device="cpu",
    )
    model.learn(steps)
    took = time.monotonic() - began
    env.training = False
    test, returns = gym.vector.SyncVectorEnv([lambda: gym.make(TASK)] * 20), 0.0
    obs, _ = test.reset(seed=1000)
    for _ in range(1000):
        obs, reward, *_ = test.step(model.predict(env.normalize_obs(obs), deterministic=True)[0])
        returns += reward
    out.put(("sb3", seed, float(returns.mean()), took))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--steps", type=int, default=500_000)
    p.add_argument("--seeds", type=int, default=5)
    args = p.parse_args()
    queue: multiprocessing.Queue = multiprocessing.get_context("spawn").Queue()
    results: dict[str, list[float]] = {"ours": [], "sb3": []}
    for seed in range(args.seeds):
        pair = [
            multiprocessing.get_context("spawn").Process(target=f, args=(seed, args.steps, queue))
            for f in (ours, sb3)
        ]
        for process in pair:
            process.start()
        for _ in pair:
            name, seed, value, took = queue.get(timeout=3600)
            results[name].append(value)
            print(f"seed {seed}  {name:<5} return {value:8.1f}   {took:6.1f} s", flush=True)
        for process in pair:
            process.join(60)
    for name, values in results.items():
        print(
            f"{name:<5} mean {sum(values) / len(values):8.1f}   "
            f"{' '.join(f'{v:.0f}' for v in sorted(values))}"
        )


if __name__ == "__main__":
    main()
