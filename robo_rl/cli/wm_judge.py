"""`robo_rl wm judge DATASET…`: train a classifier of success, and say what a judge is worth on held-out steps."""

import json

from world_models.options import JudgeConfig


def run(args: JudgeConfig) -> int:
    """Train or check, and print the confusion matrix of the held-out steps."""
    from world_models.judge import measure_judge
    found = measure_judge(args)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['judge']} on held-out steps of {' '.join(args.data)}\n"
          f"  {'':12}says success  says not\n"
          f"  succeeded   {found['true_positive']:>12}  {found['false_negative']:>8}\n"
          f"  did not     {found['false_positive']:>12}  {found['true_negative']:>8}\n"
          f"  disagreement {found['disagreement']:.3f} (mean of the two rates of error; 0.5 is a coin)")
    return 0
