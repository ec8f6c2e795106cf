"""One sentence on how far a model can be trusted, and what to record next, from the document of `wm eval`."""

from robo_rl.files import read_json
from world_models.options import find

NO_USE = "Do not use this model: "
GOOD_RECALL, GOOD_PRECISION = 0.8, 0.8
GOOD_FOLLOWING = 0.8
GOOD_RANK = 0.7  # lower end of Spearman's interval


def verdict(doc: dict) -> str:
    """What the model may be used for, the first thing that speaks against more, and the recording that would
    help most."""
    if not doc["finite"]:
        return f"{NO_USE}it predicts numbers that are not finite; train it again with a smaller --fit.lr."
    if why := random_succeeds(doc):
        return (
            f"{NO_USE}{why}; record episodes of random motion that fail, or let it see what success depends "
            "on (cameras: --kind encoded)."
        )
    good = [int(h) for h, best in doc["baselines"]["best"].items() if best["better"]]
    if not good:
        names = dict.fromkeys(best["name"] for best in doc["baselines"]["best"].values())
        return (
            f"{NO_USE}at no horizon is it surely better than "
            f"{' or '.join(names) or 'standing still'}; record more episodes of the same kind, or train it "
            "longer."
        )
    use = f"Surely better than every simple predictor after {listed(good)} step{'s' if good != [1] else ''}"
    against, record = objections(doc)
    use += (
        f", and it ranks {doc['ranking']['policies']} policies as the {doc['ranking']['real']} does"
        if ranks_well(doc)
        else ""
    )
    if not against:
        return (
            f"{use}; nothing measured speaks against using it, and more episodes of the policies that it "
            "shall judge help most."
        )
    return f"{use}, but {against[0]}{more(against)}; record {record[0]} next."


def advised_against(model: str) -> str:
    """What to say of a model whose own page, of `wm eval`, is against any use of it; "": of all others."""
    page = find(model) / "eval" / "eval.json"
    said = read_json(page).get("verdict", "") if page.exists() else ""
    return f"wm eval on {model}: {said} robo_rl wm eval measures it again" if said.startswith(NO_USE) else ""


def ends_early(model: str) -> str:
    """What it means that episodes of a model end before recorded ones do; "": they do not."""
    spec = read_json(find(model) / "world.json").get("spec", {})
    horizon, recorded = spec.get("horizon", 0), spec.get("control", {}).get("max_steps", 0)
    if not 0 < horizon < recorded:
        return ""
    return (
        f"episodes in {model} end after {horizon} step{'s' * (horizon > 1)}, to which it is calibrated, "
        f"recorded ones after {recorded}: what takes longer fails in it. A model that is trained longer "
        "(--fit.…), or on more episodes, goes further"
    )


def knows_no_success(model: str) -> str:
    """What it means that none of the episodes a model learnt from succeeded; "": some did."""
    learnt = read_json(find(model) / "world.json").get("spec", {}).get("data", "")
    if not learnt.endswith(" 0 successful"):
        return ""
    return (
        f"{model} knows no success, for none of the episodes that it learnt from succeeded or was said to: "
        "nothing succeeds in it. Record successes, or say which episodes succeeded (robo_rl data label "
        "DATASET --success …), and train it anew; or train with --judge JUDGE"
    )


def ranks_well(doc: dict) -> bool:
    low = doc["ranking"]["spearman"]["low"] if "ranking" in doc else None
    return low is not None and low >= GOOD_RANK


def more(against: list[str]) -> str:
    return f" ({len(against) - 1} more below)" if len(against) > 1 else ""


def random_succeeds(doc: dict) -> str:
    """What `random_actions` found, where these succeed surely more often than the recordings; "" else."""
    r = doc.get("random")
    if not r or r["low"] <= r["recorded"]:
        return ""
    return (
        f"random actions succeed in {100 * r['model']:.0f} % of episodes in it, the recordings in "
        f"{100 * r['recorded']:.0f} %"
    )


def objections(doc: dict) -> tuple[list[str], list[str]]:
    """What speaks against trusting the model, worst first, and what to record against each."""
    found: list[tuple[str, str]] = []

    def add(said: str, record: str) -> None:
        found.append((said, record))

    if doc["all_learnt"]:
        add("it learnt from all these episodes", "episodes that it does not learn from (another --seed)")
    if why := random_succeeds(doc):
        add(why, "episodes of random motion that fail")
    alarm, unlike, s = doc.get("alarm", {}), doc.get("probe", {}).get("alarm", {}), doc["success"]
    overrated = [x for x in doc.get("probe", {}).get("searches", ()) if x.get("side") == "over"]
    if over := alarm.get("over"):
        add(f"it overrates {listed(over)}", f"episodes of {over[0]} with little noise")
    if overrated:
        search = max(overrated, key=lambda x: x["gap"]["value"])
        add(
            f"a search found a policy that succeeds in {100 * search['model']:.0f} % of episodes in it and "
            f"in {100 * search['real']:.0f} % for real",
            "failures: episodes of policies that it overrates",
        )
    if under := alarm.get("under"):
        add(f"it underrates {listed(under)}", f"episodes of {under[0]}, the successful ones above all")
    for side, words in (("over", "failures"), ("under", "successes")):
        if names := unlike.get(side):
            add(
                f"it {side}rates policies unlike the data ({listed(names)})",
                f"{words} of policies unlike the recorded ones",
            )
    if broken := doc["uncertainty"]["bound"]["broken"]:
        add(
            f"its bound on the error covers less than it promises after {listed(broken)} steps",
            "episodes like these ones, and learn from them too",
        )
    if s["tp"] + s["fn"] and s["recall"] < GOOD_RECALL:
        add(f"it misses {s['fn']} of {s['tp'] + s['fn']} successes", "more successful episodes")
    if s.get("known", True) and s["tp"] + s["fp"] and s["precision"] < GOOD_PRECISION:
        add(f"{s['fp']} of its {s['tp'] + s['fp']} successes are none", "failures that end near success")
    f = doc["following"]["correlation"]
    if f is not None and f < GOOD_FOLLOWING:
        add(
            f"it follows commands with a correlation of {f:.2f} only",
            "episodes with noise on the actions (--noise 0.6)",
        )
    if doc.get("ranking", {}).get("policies", 0) > 1 and not ranks_well(doc):
        add("its ranking of policies is not certain", "episodes of policies of every quality")
    if broken := doc.get("probe", {}).get("unlike", {}).get("bound", {}).get("broken"):
        add(
            f"off the data its bound fails after {listed(broken)} steps",
            "episodes of random policies (--policy random)",
        )
    return [a for a, _ in found], [r for _, r in found]


def listed(names: list) -> str:
    words = [str(n) for n in names]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
