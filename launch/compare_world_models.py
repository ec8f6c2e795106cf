"""A `latent` world model beside MBPO's ensemble and ridge regression, of equal size and data, and its gate
beside its threshold.

    python launch/compare_world_models.py                               # four tasks, two seeds
    python launch/compare_world_models.py --tasks reach --seeds 1 --updates 200 --keep found.jsonl

For every task and seed it records episodes (the expert and random actions, with noise), learns a `latent`
model and an ensemble of MBPO with as many parameters from the same episodes, with as many updates of as many
rows, and rolls all of them out along new episodes. Printed: errors after 1 to 64 steps in std of the data,
the ratio of the model's to each, the difference paired by window with its 95 % interval; and what a gate
learnt on other episodes would trust (`world_models/gate.py`) beside the threshold of the model. `--keep FILE`
holds every result; what it has is not run again.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import robo_rl
from robo_rl.cli.wm_eval import gate_lines, off_share
from robo_rl.files import keep_row, kept_rows, parse_json
from world_models import baselines, gate_report, mbpo, trust
from world_models.calibrate import TOLERANCE
from world_models.evaluate import compare_errors
from world_models.imagine import open_loop
from world_models.learning import calibrated, train
from world_models.options import FitOptions, LatentOptions, WorldModelConfig
from world_models.reading import read
from world_models.windows import read_windows

NAMES = ("MBPO's ensemble", "ridge", "standing still")


def ensemble_of(model, data, options: FitOptions, seed: int) -> mbpo.Mbpo:
    """MBPO's ensemble of the size of the model's, learnt from the same episodes."""
    episode = np.repeat(np.arange(len(data)), data.lengths)
    known = np.isfinite(data.after).all(1)
    before = np.where(
        np.isin(np.arange(len(data.state)), data.first)[:, None], data.state, np.roll(data.state, 1, 0)
    )
    t = baselines.RecordedSteps(data.state, before, data.action, data.after, episode).of(known)
    held = data.held[t.episode]
    u = baselines.units_of(t.of(~held))
    width = mbpo.width_of_size(
        sum(p.numel() for p in model.net.parameters()), t.state.shape[1], t.action.shape[1]
    )
    other = mbpo.Mbpo(t.state.shape[1], t.action.shape[1], width, u, seed)
    return mbpo.learn(
        other, u.features(t.state, t.before, t.action), (t.after - t.state) / u.moved, held, options, seed
    )


def one(task: str, seed: int, args) -> dict:
    """Record, learn and roll out -> errors by horizon of all, and the gate's document."""
    with TemporaryDirectory() as folder:
        at = Path(folder)
        for name, episodes, start in (("old", args.episodes, seed), ("new", args.new, 500 + seed)):
            robo_rl.collect(
                at / name,
                task=task,
                episodes=episodes,
                policy="expert,random",
                noise=0.6,
                seed=start,
                envs=16,
            )
        fit = FitOptions(updates=args.updates)
        began = time.process_time()
        train(
            WorldModelConfig(
                data=(str(at / "old"),),
                out=str(at / "wm"),
                seed=seed,
                net=LatentOptions(hidden=args.hidden),
                fit=fit,
            )
        )
        mine = time.process_time() - began
        model, data, new = (
            robo_rl.load_world_model(at / "wm"),
            read([str(at / "old")]),
            robo_rl.load_dataset(at / "new"),
        )
        began = time.process_time()
        ensemble = ensemble_of(model, data, fit, seed)
        took = time.process_time() - began
        return {
            "task": task,
            "seed": seed,
            "episodes": args.episodes,
            "new": args.new,
            "updates": args.updates,
            "hidden": args.hidden,
            "windows": args.windows,
            "cpu": [round(mine, 1), round(took, 1)],
        } | measured(model, ensemble, data, new, args)


def measured(model, ensemble: mbpo.Mbpo, data, new, args) -> dict:
    """The errors along windows of new episodes."""
    w = read_windows(new, (), np.arange(len(new)), args.windows, 64, 0)
    start, before, actions, scale = w.start["state"], w.start["before"], w.actions, np.array(model.spec.scale)
    p, u = open_loop(model, w.start, actions), ensemble.u
    reference = baselines.transitions_of(new, np.arange(len(new)))
    train_rows = np.flatnonzero(~np.repeat(data.held, data.lengths) & np.isfinite(data.after).all(1))
    previous = np.where(np.isin(train_rows, data.first), train_rows, train_rows - 1)
    taught = baselines.RecordedSteps(
        data.state[train_rows],
        data.state[previous],
        data.action[train_rows],
        data.after[train_rows],
        -1 - np.repeat(np.arange(len(data)), data.lengths)[train_rows],
    )
    steps, units, settings = baselines.fit(taught)
    states = {
        NAMES[0]: baselines.roll(ensemble.step, start, before, actions, u.low, u.high),
        NAMES[1]: baselines.roll(steps["ridge"], start, before, actions, units.low, units.high),
        NAMES[2]: trust.hold_last(start, actions.shape[1]),
        "memory": baselines.roll(steps["neighbours"], start, before, actions, units.low, units.high),
    }
    error = trust.state_error(p.state, w.state, scale)
    out: dict = {
        "parameters": [sum(x.numel() for x in m.net.parameters()) for m in (model, ensemble)],
        "settings": settings,
        "rows": {},
    }
    others = {name: trust.state_error(x, w.state, scale) for name, x in states.items()}
    for name in NAMES:
        own, other, less = compare_errors(error, others[name], w)
        out["rows"][name] = {"model": own, "error": other, "less": less["difference"], "apart": less["apart"]}
    half = trust.by_horizon(error - 0.5 * others[NAMES[0]], w.seen, w.episode)
    out["less_half"] = {h: i._asdict() for h, i in half.items()}
    both = baselines.RecordedSteps(
        *(
            np.concatenate([getattr(taught, k), getattr(reference, k)])
            for k in ("state", "before", "action", "after", "episode")
        )
    )
    return out | {
        "gate": gate_report.compare(w, p.state, p.uncertainty, error, others["memory"], both),
        "shipped": {"threshold": trusted(model, w, error), "gate": trusted(with_gate(model, data), w, error)},
    }


def with_gate(model, data):
    """The same dynamics with the gate of `robo_rl wm train --gate`."""
    return calibrated(model, data, 64, TOLERANCE, gate=True)[0]


def trusted(model, w, error: np.ndarray) -> dict:
    """What the threshold that came with a model trusts of new episodes: the share of steps, and how many of
    these are off."""
    u = open_loop(model, w.start, w.actions).uncertainty
    kept = (u <= model.spec.threshold) & w.seen
    off = error > TOLERANCE
    return gate_report.kept_row(kept, off) | {
        "kept": float(kept[w.seen].mean()),
        "auroc": trust.auroc(u[w.seen], off[w.seen]),
    }


def say(r: dict) -> None:
    """One task and seed as text."""
    mine, theirs = r["parameters"]
    print(
        f"{r['task']}, seed {r['seed']}: {mine} parameters beside {theirs}, CPU {r['cpu'][0]:.0f} s beside "
        f"{r['cpu'][1]:.0f} s"
    )
    for name, row in r["rows"].items():
        print(f"  less the error of {name}")
        for h, i in row["less"].items():
            own, other = row["model"][h]["value"], row["error"][h]["value"]
            print(
                f"    {h:>3} steps  {own:.3f} / {other:.3f} = {own / other:.2f}   {i['value']:+.3f} "
                f"[{i['low']:+.3f}, {i['high']:+.3f}]"
            )
    print("\n".join(gate_lines(r["gate"])))
    for name, k in r["shipped"].items():
        print(
            f"  the {name} that comes with the model trusts {100 * k['kept']:.0f} % of new steps, "
            f"{off_share(k['off'])}"
        )


def main(given: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--tasks", nargs="+", default=["reach", "push_cube", "open_drawer", "stack_cube"])
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--episodes", type=int, default=300, help="that are learnt from")
    p.add_argument("--new", type=int, default=100, help="episodes to measure on")
    p.add_argument("--windows", type=int, default=300)
    p.add_argument("--updates", type=int, default=2000)
    p.add_argument("--hidden", type=int, default=80, help="width of the latent model's five networks")
    p.add_argument("--keep", type=Path)
    args = p.parse_args(given)
    rows = kept_rows(args.keep)
    for seed in range(args.seeds):
        for task in args.tasks:
            want = {
                "task": task,
                "seed": seed,
                **{k: getattr(args, k) for k in ("episodes", "new", "updates", "hidden", "windows")},
            }
            found = next((r for r in rows if {k: r[k] for k in want} == want), None)
            if found is None:
                found = parse_json(json.dumps(one(task, seed, args)), "the comparison", (list, dict))
                keep_row(args.keep, found)
            say(found)


if __name__ == "__main__":
    main()
