"""`robo_rl wm judge DATASET…`: train a classifier of success, and say what a judge is worth on held-out steps."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class WmJudge:
    """Train a success classifier for `--judge OUT`, or with --check ask another judge about held-out recorded steps."""

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of LeRobot v3 data sets, of the same env."""
    out: str = ""
    """Folder of the classifier; empty: runs/judge-<task>."""
    check: str = ""
    """Train nothing; measure this judge instead: an http address, or the folder of a classifier."""
    false_alarms: float = 0.01
    """Share of held-out failing steps that the classifier may call a success."""
    updates: int = 1500
    seed: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        in_range("--false-alarms", self.false_alarms, 0, 1)
        in_range("--updates", self.updates, 1, 10**7)


def run(args: WmJudge) -> int:
    """Train or check, and print the confusion matrix of the held-out steps."""
    import json

    import torch

    from robo_rl.cli.wm import read
    from world_models import judge as judges
    from world_models import recorded
    torch.set_num_threads(1)
    if args.check == "head":
        raise UserError("the head is part of a model: robo_rl wm eval MODEL DATASET says what it is worth")
    data, began = read(args.data, images=True), time.monotonic()
    recorded.check(data, " ".join(args.data))
    where = args.check
    if where:
        judge = judges.make(where)
    else:
        where = args.out or f"runs/judge-{data.control.task}".replace(":", "-")
        if (Path(where) / "judge.json").exists():
            raise UserError(f"{where} already holds a judge; choose another --out")
        options = judges.ClassifierOptions(updates=args.updates, false_alarms=args.false_alarms)
        judge = judges.Classifier(data.state.shape[1], data.action.shape[1], tuple(sorted(data.images)), options, args.seed)
        judge.fit(data, args.seed)
        judge.save(where)
    found = judges.confusion(judge, data, seed=args.seed)
    if args.json:
        print(json.dumps({"judge": where, "seconds": time.monotonic() - began, "options": asdict(args)} | found, indent=1))
        return 0
    print(f"{where} on held-out steps of {' '.join(args.data)}\n"
          f"  {'':12}says success  says not\n"
          f"  succeeded   {found['true_positive']:>12}  {found['false_negative']:>8}\n"
          f"  did not     {found['false_positive']:>12}  {found['true_negative']:>8}\n"
          f"  disagreement {found['disagreement']:.3f} (mean of the two rates of error; 0.5 is a coin)")
    return 0
