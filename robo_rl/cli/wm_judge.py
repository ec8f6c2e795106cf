"""`robo_rl wm judge DATASET…`: train a classifier of success, and say what a judge is worth on held-out
steps."""

import json

from robo_rl.errors import plural
from world_models.options import JudgeConfig


def run(args: JudgeConfig) -> int:
    """Train or check, and print the confusion matrix of the held-out steps."""
    from world_models.judge import measure_judge

    found = measure_judge(args)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    print(
        f"{found['judge']} on held-out steps of {' '.join(args.data)}\n"
        f"  {'':12}says success  says not\n"
        f"  succeeded   {found['true_positive']:>12}  {found['false_negative']:>8}\n"
        f"  did not     {found['false_positive']:>12}  {found['true_negative']:>8}\n"
        f"  disagreement {found['disagreement']:.3f} (mean of the two rates of error; 0.5 is a coin)"
    )
    for task, a in found["tasks"].items():
        print(
            f"  agrees with the truth on {100 * a['value']:.0f} % [{100 * a['low']:.0f}, "
            f"{100 * a['high']:.0f}] of {a['n']} steps: {task}"
        )
    if "credit" in found:
        yes, no = (found["credit"][k] for k in ("succeeded", "did_not"))
        print(
            f"  partial credit {yes['value']:.2f} [{yes['low']:.2f}, {yes['high']:.2f}] of successes, "
            f"{no['value']:.2f} [{no['low']:.2f}, {no['high']:.2f}] of others; divided answers on "
            f"{100 * found['divided']:.0f} % of clips"
        )
    if "requests" in found:
        print(f"  it took {plural(found['requests'], 'request')}")
    return 0
