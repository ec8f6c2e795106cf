"""PDE-Refiner beside a U-Net on the Kuramoto-Sivashinsky equation: time to correlation 0.8, and the error by
wave number.

    python launch/compare_refiner.py                                  # three seeds, minutes on one core
    python launch/compare_refiner.py --seeds 1 --updates 100 --keep found.jsonl

Learnt on the same trajectories with the same updates: the refiner (one network, K + 1 evaluations a step),
the same network as a plain one-step regression, and a U-Net with as many multiplications a step as the
refiner (its width times the root of K + 1). What is learnt and refined: `world_models/pde.py`. `--keep FILE`
holds every result; what it has is not run again.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from robo_rl.files import keep_row, kept_rows
from robo_rl.stats import bootstrap_mean
from world_models import pde

BANDS = {"1 to 4": (1, 5), "5 to 9": (5, 10), "10 to 15": (10, 16), "16 to 21": (16, 22)}  # wave numbers


def networks(args) -> dict[str, tuple[int, list[float]]]:
    """{name: (width, levels)}."""
    wide = 4 * round(args.width * (args.refine + 1) ** 0.5 / 4)
    return {
        "refiner": (args.width, pde.sigmas(args.refine, args.sigma)),
        "the same network, no refinement": (args.width, []),
        "a U-Net of equal cost a step": (wide, []),
    }


def one(name: str, seed: int, data: np.ndarray, args) -> dict:
    """Learn and roll out one network on trajectories [B,T,X]: the last `--test` of them are new to it."""
    width, levels = networks(args)[name]
    taught, new = data[: -args.test], data[-args.test :]
    std = float(taught.std())
    taught, new = taught / std, new / std
    scale = float((taught[:, 1:] - taught[:, :-1]).std())
    began = time.process_time()
    net = pde.learn(pde.UNet(width, len(levels), seed), taught, scale, levels, args.updates, seed=seed)
    took = time.process_time() - began
    rolled = pde.roll(net, new[:, 0], args.steps, scale, levels, seed)
    truth = new[:, 1 : args.steps + 1]
    now, after = (x.reshape(-1, new.shape[2])[::7] for x in (new[:, :-1], new[:, 1:]))
    first = pde.roll(net, now, 1, scale, levels, seed)[:, 0]
    return {
        "name": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in net.parameters()),
        "width": width,
        "cpu": round(took, 1),
        "times": pde.correlated_time(rolled, truth, args.dt).tolist(),
        "one_step": float(np.square(first - after).mean() ** 0.5),
        "waves": pde.error_by_wave(first, after).tolist(),
    }


def say(rows: list[dict]) -> None:
    """The table, and the paired difference in time to the first network."""
    for r in rows:
        mean = bootstrap_mean(np.array(r["times"]))
        bands = ", ".join(f"{n}: {np.mean(r['waves'][a:b]):.2g}" for n, (a, b) in BANDS.items())
        print(
            f"{r['name']}, seed {r['seed']} ({r['parameters']} parameters, {r['cpu']:.0f} s): time to "
            f"correlation 0.8 {mean.value:.1f} [{mean.low:.1f}, {mean.high:.1f}]; one-step error "
            f"{r['one_step']:.2g}; share of the amplitude, waves {bands}"
        )
    mine = [r for r in rows if r["name"] == "refiner"]
    for name in dict.fromkeys(r["name"] for r in rows if r not in mine):
        pairs = [(a, b) for a in mine for b in rows if b["name"] == name and a["seed"] == b["seed"]]
        if pairs:
            d = bootstrap_mean(
                np.concatenate([np.array(a["times"]) - np.array(b["times"]) for a, b in pairs])
            )
            print(
                f"refiner less {name}: {d.value:+.1f} [{d.low:+.1f}, {d.high:+.1f}] over {len(pairs)} seeds"
            )


def main(given: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--updates", type=int, default=3000)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--refine", type=int, default=3, help="K, refinements of a step")
    p.add_argument("--sigma", type=float, default=4.5e-4, help="noise of the last one")
    p.add_argument("--taught", type=int, default=128, help="trajectories that are learnt from")
    p.add_argument("--test", type=int, default=32, help="trajectories to measure on")
    p.add_argument("--steps", type=int, default=250, help="of a rollout, and of every trajectory")
    p.add_argument("--dt", type=float, default=0.8)
    p.add_argument(
        "--settle", type=float, default=150.0, help="time of the equation before a trajectory begins"
    )
    p.add_argument("--keep", type=Path)
    args = p.parse_args(given)
    torch.set_num_threads(1)
    kept = kept_rows(args.keep)
    want = {
        k: getattr(args, k)
        for k in ("updates", "width", "refine", "sigma", "taught", "test", "steps", "dt", "settle")
    }
    data, rows = None, []
    for seed in range(args.seeds):
        for name in networks(args):
            found = next(
                (r for r in kept if r["with"] == want and (r["name"], r["seed"]) == (name, seed)), None
            )
            if found is None:
                data = (
                    pde.solve(args.taught + args.test, args.steps + 1, args.dt, settle=args.settle)
                    if data is None
                    else data
                )
                found = one(name, seed, data, args) | {"with": want}
                keep_row(args.keep, found)
            rows.append(found)
    say(rows)


if __name__ == "__main__":
    main()
