"""How far a world model can be trusted, as a plain script: open-loop error against a world that stands still, obedience,
success, uncertainty. The whole of it, with policies and a page, is `robo_rl wm eval`.

    python launch/evaluate_world_model.py runs/wm data/reach --windows 100
"""

import argparse

import numpy as np

from robo_rl.data.reader import load as load_data
from world_models import trust
from world_models.imagine import open_loop
from world_models.model import load
from world_models.windows import check_dataset, read_windows, unseen


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("dataset")
    p.add_argument("--windows", type=int, default=100)
    p.add_argument("--horizon", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    model, data = load(args.model), load_data(args.dataset)
    check_dataset(model.spec, data.meta, args.dataset)
    fresh = unseen(model, data)
    w = read_windows(data, model.spec.control.views, np.flatnonzero(fresh if fresh.any() else ~fresh), args.windows,
                     args.horizon, args.seed)
    imagined = open_loop(model, w.start, w.actions, 16 if w.images else 256, args.seed)
    std = data.state.std(0)
    scale = np.where(std > 1e-5, std, 0)
    errors = {"state": (trust.state_error(imagined.state, w.state, scale),
                        trust.state_error(trust.hold_last(w.start["state"], args.horizon), w.state, scale))}
    for v in w.images:
        errors[v] = (trust.image_error(imagined.images[v], w.images[v]),
                     trust.image_error(trust.hold_last(w.start[f"image/{v}"], args.horizon), w.images[v]))
    for name, (mine, still) in errors.items():
        a, b = (trust.by_horizon(e, w.seen) for e in (mine, still))
        for h in a:
            print(f"{name:<8} {h:>3} steps   model {a[h].value:.4f} [{a[h].low:.4f}, {a[h].high:.4f}]   standing still {b[h].value:.4f}")
    won = trust.confusion(((imagined.success > 0.5) & w.made).any(1), w.success.any(1))
    print(f"success  {won.tp} told, {won.fp} false alarms, {won.fn} missed, {won.tn} rightly denied")
    error, doubt = errors["state"][0][w.seen], imagined.uncertainty[w.seen]
    print(f"doubt    rank correlation with the error {trust.spearman(doubt, error):.2f}")


if __name__ == "__main__":
    main()
