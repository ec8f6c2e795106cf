"""`robo_rl correct RUN`: rounds of practice with people beside the robots, refitting on what they did, and
evaluation."""

import json

from robo_rl.experiment.correct import CorrectResult, correct
from robo_rl.experiment.correct_options import CorrectOptions


def run(options: CorrectOptions) -> int:
    """Run the rounds; RUN stays as it is."""
    result = correct(options)
    rows = table_rows(result)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows, result.report)
    return 0


def table_rows(result: CorrectResult) -> list[dict]:
    """One row per round; `report`, of the best one alone, is its success on starts that nothing was chosen
    on."""
    rounds, report = result.rounds, result.report
    minutes, first = 0.0, rounds[0]["eval"]["success"]
    rows = []
    for x in rounds:
        a = x["operator_stats"]
        minutes += a.get("operator_minutes", 0.0)
        rows.append(
            {
                "round": x["round"],
                **x["eval"],
                **{
                    k: a.get(k)
                    for k in (
                        "operator_minutes",
                        "interventions",
                        "interventions_per_hour",
                        "interventions_per_success",
                        "reaction_mean",
                        "human_share",
                        "utilisation",
                        "success_rate",
                        "unassisted_success_rate",
                    )
                },
                "gain_per_operator_minute": (x["eval"]["success"] - first) / minutes if minutes else None,
            }
            | ({"report": report} if x["round"] == report["round"] else {})
        )
    return rows


def print_table(rows: list[dict], report: dict) -> None:
    print(
        "round  success   95 % interval    operator min  interventions  per hour  per success  reaction s  "
        "human %  gain/min"
    )
    for x in rows:
        line = f"{x['round']:>5}  {x['success']:7.3f}   [{x['low']:.3f}, {x['high']:.3f}]"
        if x["operator_minutes"] is not None:
            line += (
                f"  {x['operator_minutes']:12.2f}  {x['interventions']:13d}  "
                f"{x['interventions_per_hour']:8.0f}  {x['interventions_per_success']:11.2f}  "
                f"{x['reaction_mean']:10.2f}  {100 * x['human_share']:7.1f}  "
                f"{x['gain_per_operator_minute'] or 0:8.3f}"
            )
        print(line)
    print(
        f"best: round {report['round']}, on starts that chose nothing (list {report['list']}): "
        f"{report['success']:.3f}  95 % interval [{report['low']:.3f}, {report['high']:.3f}]  n={report['n']}"
    )
    if report["round"] == 0 and len(rows) > 1:
        print(
            "no round was better than the policy that practised. Where it mostly succeeds, its own successes "
            "keep what it can: --learn-from-successes; else more help: --human-steps or --episodes"
        )
