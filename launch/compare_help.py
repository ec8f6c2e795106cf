"""What a person's help is worth where failures cannot be undone and nobody looks at the clock: rounds of
correction of one weak policy, with an operator whose corrections are recoveries by themselves (the expert),
with one who stays low, and with one who stays low and backs out first (RaC).

    python launch/compare_help.py RUN [--episodes 96] [--save]           # RUN: of robo_rl train --task
                                                            launch.ledge:PushOnLedge --algo bc

Every way has as many episodes of practice, updates and evaluations. The person comes where the policy's
commands stay wrong, never because it is late.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from robo_rl.experiment.correct import correct
from robo_rl.experiment.correct_options import CorrectOptions
from robo_rl.options import BcOptions, ScriptedOperatorOptions

FREE = ScriptedOperatorOptions(late_share=1.0)
LOW = replace(FREE, stay_low=True)
WAYS = {  # name -> protocol, the person
    "nobody helps": ("hg_dagger", replace(FREE, attended_share=0.0)),
    "corrections that back out by themselves (hg_dagger)": ("hg_dagger", FREE),
    "corrections from where the failure is (hg_dagger, stay_low)": ("hg_dagger", LOW),
    "backing out, then corrections (rac, stay_low)": ("rac", LOW),
}
COUNTS = {
    "operator_minutes": "operator minutes",
    "interventions": "interventions",
    "success_rate": "success in practice, with help",
}


@dataclass(frozen=True)
class Args:
    run: tyro.conf.Positional[str]
    episodes: int = 96
    """Episodes of practice in a round, from 1."""
    rounds: int = 1
    updates: int = 1000
    """Updates of the refit after a round."""
    ways: tuple[int, ...] = tuple(range(len(WAYS)))
    """Numbers of the ways, from 0: nobody, hg_dagger, hg_dagger with stay_low, rac with stay_low."""
    out: str = ""
    """Folder of the results; empty: beside RUN."""
    save: bool = False
    """Write rows into results/human.json."""
    label: str = ""
    """How the rows name the run: the command that made it."""


def practise(args: Args, number: int, seed: int) -> list[dict]:
    """The rounds of one way."""
    protocol, person = list(WAYS.values())[number]
    return correct(
        CorrectOptions(
            run=args.run,
            protocol=protocol,
            rounds=args.rounds,
            episodes=args.episodes,
            seed=seed,
            video=False,
            scripted_operator=person,
            bc=BcOptions(updates=args.updates, lr=5e-4, noises=4),
            out=f"{args.out or args.run}-help-{number}",
        )
    ).rounds


def save(args: Args, task: str, name: str, seed: int, rounds: list[dict]) -> None:
    """Rows of one way in results/human.json."""
    from robo_rl.provenance import git_hash, machine_name
    from robo_rl.results import ResultRow, add_rows

    what = f"{task}, {args.rounds} x {args.episodes} episodes of practice, {name}"
    after = rounds[-1]["eval"]
    common = {
        "seeds": (seed,),
        "commit": git_hash(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_name(),
        "files": (
            "robo_rl/human",
            "robo_rl/experiment/correct.py",
            "launch/compare_help.py",
            "launch/ledge.py",
            "robo_rl/algos/bc.py",
        ),
        "command": f"python launch/compare_help.py {args.label or args.run} --episodes {args.episodes} "
        f"--rounds {args.rounds} --updates {args.updates} --save",
    }
    rows = [
        ResultRow(
            what=f"{what}: success afterwards, without help",
            value=after["success"],
            unit="of 1",
            n=after["n"],
            interval=(after["low"], after["high"]),
            note=f"before: {rounds[0]['eval']['success']:.3f}",
            **common,
        )
    ]
    for r in rounds[1:]:
        rows += [
            ResultRow(
                what=f"{what}: round {r['round']}, {word}",
                value=round(r["operator_stats"][key], 3),
                n=args.episodes,
                **common,
            )
            for key, word in COUNTS.items()
        ]
    add_rows("results/human.json", "A person in the loop", rows)


def main(args: Args) -> None:
    from robo_rl.experiment.config import load_config

    config = load_config(Path(args.run))
    for number in args.ways:
        name = list(WAYS)[number]
        rounds = practise(args, number, config.seed)
        stats, after = rounds[-1]["operator_stats"], rounds[-1]["eval"]
        print(
            f"{name}: {rounds[0]['eval']['success']:.3f} -> {after['success']:.3f} [{after['low']:.3f}, "
            f"{after['high']:.3f}]  " + "  ".join(f"{word} {stats[key]:.2f}" for key, word in COUNTS.items()),
            flush=True,
        )
        if args.save:
            save(args, config.task, name, config.seed, rounds)


if __name__ == "__main__":
    main(tyro.cli(Args))
