"""`robo_rl wm tune MODEL DATASET --out RUN`: fine-tune a video model so that what it imagines decodes to
motion that the arm can follow (EVA)."""

import json
from pathlib import Path

from robo_rl.errors import quoted
from world_models.options import TuneConfig

READS = 0.3  # R2 on held-out frames from which an inverse model tells anything


def run(args: TuneConfig) -> int:
    """Tune, and print what it changed."""
    from robo_rl.files import plain
    from world_models.video_tune import tune_model

    folder, doc = tune_model(args)
    print(json.dumps(plain(doc), indent=1) if args.json else table(doc, folder))
    return 0


def table(doc: dict, folder: Path) -> str:
    """The numbers as text."""
    lines = [
        f"{doc['windows']} held-out windows of {doc['steps']} steps, before -> after, change [95 % of "
        "windows drawn again]"
    ]

    def row(name: str, r: dict, digits: int) -> str:
        c = r["change"]
        return (
            f"  {name:<34}{r['before']:8.{digits}f} -> {r['after']:.{digits}f}   {c['value']:+.{digits}f} "
            f"[{c['low']:+.{digits}f}, {c['high']:+.{digits}f}]"
        )

    change = doc["change"]
    for name, words in (
        ("other", "an inverse model it never saw"),
        ("tuned_with", "the inverse model it was tuned with"),
    ):
        e, r = doc["inverse"][name], doc["recorded"]
        lines.append(
            f"decoded by {words} (R2 {e['r2']:.2f} on held-out frames); of recorded frames and of the "
            "commands themselves:"
        )
        if e["r2"] < READS:
            lines.append(
                "  it hardly reads motion in frames, so these numbers say nothing: more updates of it "
                "(--fit.inverse), or more episodes"
            )
        for k, label in (
            ("score", "EVA score"),
            ("any", "beyond speed or acceleration"),
            ("arm", "  of the arm's axes alone"),
            ("arm_jerk", "  beyond jerk, of the arm's axes"),
            ("command_error", "RMS against the commands"),
        ):
            more = f"   ({r[f'{name}/{k}']:.3f}, {r[f'commands/{k}']:.3f})"
            lines.append(row(label, change[f"{name}/{k}"], 3) + more)
    for k, rows in change.items():
        if k == "state" or k.startswith("image/"):
            lines += [row(f"error of {k}, {h}", r, 4) for h, r in rows.items()]
    return "\n".join([*lines, f"use it: robo_rl wm eval {quoted(folder)} DATASET"])
