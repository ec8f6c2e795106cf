"""Runs side by side (`robo_rl compare`): groups of seeds, intervals over seeds, the page."""

import json
import math
import shutil

import numpy as np
import pytest

import robo_rl
from robo_rl.cli import main
from robo_rl.errors import UserError
from robo_rl.files import write_json
from robo_rl.log import RunLog
from robo_rl.report.compare import (
    by_task,
    compared,
    curve,
    mean_curve,
    names_apart,
    notes_of,
    over,
    reached,
    read_groups,
)
from robo_rl.report.compare_page import COLOURS, lines, page, write
from robo_rl.report.data import load
from robo_rl.results import run_rows
from robo_rl.stats import (
    difference_over_seeds,
    mean_over_seeds,
    student_quantile,
    unpaired_difference,
    wilson,
)

LOOKS = ((0, 0.5), (1000, 0.7), (2000, 0.95))  # steps and success on the starts that choose


def make_run(folder, seed=0, rate=0.9, looks=LOOKS, final=True, **config):
    """The folder of a run that ends with `rate` of 100 starts."""
    options = {
        "sim": "mujoco",
        "task": "reach",
        "algo": "pi_rl",
        "seed": seed,
        "out": str(folder),
        "init": "",
    }
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"name": folder.name, "seed": seed, "config": {**options, **config}})
    now = iter(range(0, 1000, 10))
    with RunLog(folder, (), clock=lambda: next(now)) as log:
        for step, success in looks:
            log.log(step, {"eval/success": success}, "rl" if step else "sft")
    (folder / "evals").mkdir()
    for label, value, step in (("sft", looks[0][1], 0), ("final", rate, looks[-1][0]))[: 1 + final]:
        success = (np.arange(100) < round(100 * value)).astype(int)
        doc = {"label": label, "step": step, "success": success, "starts": np.arange(100), "list": 1}
        write_json(folder / "evals" / f"{label}.json", {**doc, "task": ["reach"] * 100})
    return folder


def test_quantiles_of_student_are_those_of_the_tables():
    for df, t in ((1, 12.70620), (2, 4.30265), (4.7, 2.62073), (10, 2.22814), (200, 1.97190)):
        assert student_quantile(df) == pytest.approx(t, abs=1e-5)
    with pytest.raises(UserError, match="above 0"):
        student_quantile(0)


def test_rows_of_runs_are_told_apart_by_what_they_differ_in(tmp_path):
    runs = [
        make_run(tmp_path / f"{algo}{envs}{seed}", seed, algo=algo, envs=envs)
        for algo, envs in (("ppo", 8), ("ppo", 16), ("nft", 8))
        for seed in (0, 1)
    ]
    assert list(names_apart(runs).values()) == ["envs=8", "envs=8", "envs=16", "envs=16", "envs=8", "envs=8"]
    assert set(names_apart(runs[:2]).values()) == {""}
    assert set(names_apart([*runs[:2], *runs[4:]]).values()) == {""}  # the method is in their rows


def test_intervals_over_seeds_are_students_and_welchs():
    mean = mean_over_seeds([0.9, 0.95, 0.93])
    assert mean == pytest.approx((0.926667, 0.864151, 0.989183), abs=1e-6)
    # scipy.stats.ttest_ind(…, equal_var=False).confidence_interval()
    change = difference_over_seeds([0.9, 0.95, 0.93], [0.8, 0.85, 0.9, 0.7])
    assert change == pytest.approx((0.114167, -0.015753, 0.244086), abs=1e-6)
    assert math.isnan(mean_over_seeds([0.9]).low) and math.isnan(difference_over_seeds([0.9], [0.8, 0.7]).low)
    assert mean_over_seeds([1.0, 1.0]) == difference_over_seeds([2.0, 2.0], [1.0, 1.0]) == (1.0, 1.0, 1.0)


def test_runs_that_differ_in_their_seed_alone_are_one_group_named_by_what_differs(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", seed, init=f"bc{seed}", workers=seed)
        make_run(tmp_path / f"b{seed}", seed, algo="ppo", rl={"lr": 0.1})
    groups = read_groups([tmp_path])
    assert [(g.name, g.seeds) for g in groups] == [("algo=pi_rl", [0, 1, 2]), ("algo=ppo", [0, 1, 2])]
    assert groups[0].options["rl.lr"] == "–" and groups[1].options["rl.lr"] == "0.1"


def test_two_runs_of_one_seed_that_begin_with_other_folders_are_two_groups(tmp_path):
    for name in ("x", "y"):
        make_run(tmp_path / name, init=f"bc-{name}")
    assert [g.name for g in read_groups([tmp_path])] == ["init=bc-x", "init=bc-y"]


def test_one_configuration_before_and_after_a_change_of_the_code_is_two_groups_named_by_their_folders(
    tmp_path,
):
    for folder in ("old", "new"):
        for seed in (0, 1):
            make_run(tmp_path / folder / f"s{seed}", seed)
    groups = read_groups([tmp_path / "old", tmp_path / "new"])
    assert [(g.name, g.seeds) for g in groups] == [("reach pi_rl old", [0, 1]), ("reach pi_rl new", [0, 1])]
    assert compared(groups[1], groups[0])[1].startswith("paired over 2 seeds")
    groups = read_groups([tmp_path / "old" / "s0", tmp_path / "new" / "s0"])
    assert [g.name for g in groups] == ["reach pi_rl old/s0", "reach pi_rl new/s0"]


def test_ends_are_compared_over_pairs_of_a_seed_else_between_seeds_and_of_one_seed_over_starts(tmp_path):
    for seed, (a, b, c) in enumerate(((0.5, 0.7, 0.9), (0.6, 0.81, 0.9), (0.7, 0.89, 0.8))):
        make_run(tmp_path / f"a{seed}", seed, a)
        make_run(tmp_path / f"b{seed}", seed, b, algo="ppo")
        make_run(tmp_path / f"c{seed}", seed + 5, c, algo="nft")
    first, paired, other = read_groups([tmp_path])
    change, how = compared(paired, first)
    assert change == pytest.approx(mean_over_seeds([0.2, 0.21, 0.19])) and how == "paired over 3 seeds"
    change, how = compared(other, first)
    assert change == pytest.approx(difference_over_seeds([0.9, 0.9, 0.8], [0.5, 0.6, 0.7]))
    assert how == "3 and 3 seeds"
    one, two = read_groups([tmp_path / "a0", tmp_path / "b0"])
    change, how = compared(two, one)
    assert change.value == pytest.approx(0.2) and change.low > 0 and how.endswith("over 100 shared starts")


def test_the_mean_of_a_group_ends_where_its_first_seed_ends(tmp_path):
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 1, looks=((0, 0.3), (1500, 0.6)))
    group = read_groups([tmp_path])[0]
    x, y = mean_curve([curve(r) for r in group.runs])
    assert x.tolist() == [0, 1000, 1500]
    assert y == pytest.approx(np.array([[0.5, 0.7, 0.825], [0.3, 0.5, 0.6]]))
    seconds, _ = mean_curve([curve(r) for r in group.runs], seconds=True)
    assert seconds.tolist() == [10, 20]
    assert reached(group.runs[0], 0.9) == (2000, 30) and reached(group.runs[1], 0.9) is None


def test_of_several_evaluations_at_one_step_the_last_counts(tmp_path):
    make_run(tmp_path / "a", looks=((0, 0.2), (0, 0.8), (900, 0.9)))
    make_run(tmp_path / "b", 1)
    assert curve(read_groups([tmp_path])[0].runs[0]).values.tolist() == [0.8, 0.9]


def test_the_command_prints_a_row_for_each_group_and_writes_the_page_beside_the_runs(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", seed, 0.9 + 0.02 * seed)
        make_run(tmp_path / f"b{seed}", seed, 0.5, task="<b>", final=seed == 0)
    with pytest.raises(SystemExit) as e:
        main(["compare", str(tmp_path)])
    out = capsys.readouterr()
    assert e.value.code == 0 and "note:" in out.err and "b1: no final evaluation" in out.err
    rows = out.out.splitlines()
    assert rows[0].endswith("steps to 90 %") and "2.00k, 2.00k" in rows[1]
    assert rows[-1] == f"open {tmp_path / 'compare.html'}"
    html = (tmp_path / "compare.html").read_text()
    assert "task=&lt;b&gt;" in html and "task=<b>" not in html and html.count("<svg") == 2
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path), "--json", "--out", str(tmp_path / "c.html")])
    doc = json.loads(capsys.readouterr().out)
    assert doc["groups"][0]["end"]["value"] == pytest.approx(0.91) and (tmp_path / "c.html").exists()
    assert doc["groups"] == robo_rl.compare([tmp_path])["groups"]


def test_tasks_in_which_all_seeds_end_alike_have_an_interval_over_starts_and_other_tasks_no_verdict(tmp_path):
    for seed in (0, 1):
        path = make_run(tmp_path / f"a{seed}", seed, 0.5) / "evals" / "final.json"
        write_json(path, json.loads(path.read_text()) | {"task": ["pick"] * 50 + ["push"] * 50})
        make_run(tmp_path / f"b{seed}", seed, 0.9, task="push_cube")
    first, other = read_groups([tmp_path])
    told = by_task(first)
    assert told["pick"] == pytest.approx(wilson(100, 100)) and told["push"].high > 0
    assert lines([first, other], 0.9)[-1].endswith("of other tasks")


def test_a_run_that_its_first_evaluation_ended_counts_in_the_mean_of_the_ends(tmp_path):
    make_run(tmp_path / "a", 0, 0.9)
    make_run(tmp_path / "b", 1, 1.0, looks=((0, 1.0),))  # --target was there before RL
    group = read_groups([tmp_path])[0]
    assert group.values("end") == [0.9, 1.0] and group.values("best") == [0.9, 1.0]


def test_success_of_several_tasks_is_told_of_each(tmp_path):
    for seed in (0, 1):
        path = make_run(tmp_path / f"a{seed}", seed, 0.5) / "evals" / "final.json"
        tasks = ["pick <it>"] * (40 + 10 * seed) + ["push"] * (60 - 10 * seed)  # of 100, the first 50 succeed
        write_json(path, json.loads(path.read_text()) | {"task": tasks})
    groups = read_groups([tmp_path])
    told = by_task(groups[0])
    # of both seeds all 40 and 50 succeed: the interval is over starts
    assert told["pick <it>"] == pytest.approx(wilson(90, 90)) and told["push"].value == pytest.approx(
        (10 / 60 + 0) / 2
    )
    assert told["push"].low == 0 < told["push"].high <= 1
    assert "pick &lt;it&gt;" in page(groups, 0.9)
    assert robo_rl.compare([tmp_path])["groups"][0]["tasks"]["push"]["low"] == 0


def test_supervised_runs_end_as_they_start(tmp_path):
    for name, rate in (("a", 0.5), ("b", 0.8)):
        for seed in (0, 1):
            looks = ((0, rate + 0.02 * seed),)
            make_run(tmp_path / f"{name}{seed}", seed, looks=looks, final=False, algo="bc", demos=name)
    first, other = read_groups([tmp_path])
    assert [g.name for g in (first, other)] == ["demos=a", "demos=b"]
    assert compared(other, first)[0].value == pytest.approx(0.3)
    assert "no final evaluation" not in page([first, other], 0.9)
    for path in tmp_path.glob("*/metrics.jsonl"):
        path.unlink()
    assert lines(read_groups([tmp_path]), 0.9)[1].endswith(" –, –")


def test_returns_are_compared_where_tasks_know_no_success(tmp_path):
    for seed in (0, 1):
        folder = make_run(tmp_path / f"a{seed}", seed)
        for path in (folder / "evals").glob("*.json"):
            doc = json.loads(path.read_text())
            write_json(path, doc | {"return": [100.0 + seed] * 100, "no_success": True})
    groups = read_groups([tmp_path])
    told = lines(groups, 0.9)
    assert "100.5" in told[1] and "steps to" not in told[0] and "%" not in told[1]
    assert write(groups, 0.9).exists() and "Return over steps" in page(groups, 0.9)


def make_own_data_run(folder, seed, error, demos="data/arm", algo="bc"):
    """The folder of a run that learnt from a data set alone."""
    folder.mkdir(parents=True)
    config = {"sim": "none", "task": "", "algo": algo, "seed": seed, "demos": demos, "bc": {"lr": error}}
    said = {"name": folder.name, "seed": seed, "created": "2026-11-30T00:00:00", "config": config}
    write_json(folder / "run.json", said)
    with RunLog(folder, ()) as log:
        for step in (10, 20):
            log.log(step, {"heldout/error": error + 1 / step}, "sft")
    axis = {"name": "elbow", "unit": "rad", "error": 2 * error, "error_of_mean": 2.0}
    told = {"update": 20, "error": error, "low": error - 0.1, "high": error + 0.1, "episodes": [3, 4]}
    write_json(folder / "heldout.json", told | {"axes": [axis]})
    return folder


def test_runs_without_an_env_are_compared_by_their_errors_and_less_is_better(tmp_path):
    for seed in (0, 1):
        make_own_data_run(tmp_path / f"a{seed}", seed, 0.5)
        make_own_data_run(tmp_path / f"b{seed}", seed, 0.3)
    groups = read_groups([tmp_path])
    told = lines(groups, 0.9)
    assert told[0].split("  ")[-1] == "error (1: the mean action's)" and "0.3 [" in told[2]
    assert told[-1].endswith("paired over 2 seeds: better") and "−0.2" in told[-1]
    html = page(groups, 0.9)
    assert "elbow <small>rad</small>" in html and "Error over updates" in html and "steps to" not in html
    numbers = robo_rl.compare([tmp_path])
    assert numbers["what"] == "error" and numbers["groups"][0]["runs"][0]["steps_to"] is None
    assert numbers["groups"][1]["end"]["value"] == pytest.approx(0.3)
    one = read_groups([tmp_path / "b0", tmp_path / "a0"])
    assert lines(one, 0.9)[-1].endswith("one seed each: unknown: more seeds")
    labelled = make_own_data_run(tmp_path / "labelled", 0, 0.2, algo="recap")
    assert not [note for note in notes_of(load(labelled)) if "no final evaluation" in note]
    make_own_data_run(tmp_path / "c0", 0, 0.1, demos="data/other")
    other = read_groups([tmp_path / "a0", tmp_path / "c0"])
    assert lines(other, 0.9)[-1].endswith("of other data")
    with pytest.raises(UserError, match="judged by error and by success"):
        read_groups([tmp_path / "a0", make_run(tmp_path / "played")])
    (tmp_path / "c0/heldout.json").unlink()
    with pytest.raises(
        UserError, match=r"no held-out episode has judged .*if --data\.held-out is 0 leave it"
    ):
        read_groups([tmp_path / "a0", tmp_path / "c0"])


def test_a_run_without_an_env_has_a_row_of_results(tmp_path):
    (row,) = run_rows(make_own_data_run(tmp_path / "a", 3, 0.5))
    assert (row.value, row.n, row.seeds, row.interval) == (0.5, 2, (3,), (0.4, 0.6))
    assert row.what == "bc, arm: error of actions on held-out episodes"


def test_what_cannot_be_compared_is_refused(tmp_path):
    run = make_run(tmp_path / "a")
    with pytest.raises(UserError, match="two runs with evaluations"):
        read_groups([run])
    with pytest.raises(UserError, match="given twice"):
        read_groups([run, str(run)])
    (make_run(tmp_path / "b", 1) / "evals" / "sft.json").unlink()
    (tmp_path / "b" / "evals" / "final.json").unlink()
    with pytest.raises(UserError, match="no evaluation yet; leave it out"):
        read_groups([run, tmp_path / "b"])
    with pytest.raises(UserError, match="no run folder"):
        read_groups([run, tmp_path / "b" / "evals"])


def test_of_a_folder_of_runs_those_without_an_evaluation_are_left_out_and_told(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"s{seed}", seed)
    for path in (tmp_path / "s1" / "evals").iterdir():
        path.unlink()
    told = []
    assert read_groups([tmp_path], told.append)[0].seeds == [0, 2]
    assert told == [f"{tmp_path / 's1'} has no evaluation yet: left out"]
    assert robo_rl.compare([tmp_path])["left_out"] == told


def test_groups_are_in_the_order_in_which_their_runs_were_asked_for(tmp_path):
    for name in ("algo=ppo,s0", "algo=ppo,s10", "algo=ppo,s9", "algo=demo_sac,s0"):
        make_run(tmp_path / name, int(name.rpartition("s")[2]), algo=name[5 : name.index(",")])
    write_json(tmp_path / "runs.json", {"runs": {"algo=ppo,s0": [], "algo=ppo,s9": []}})
    first, other = read_groups([tmp_path])
    assert (first.name, first.seeds, other.name) == ("algo=ppo", [0, 9, 10], "algo=demo_sac")
    write_json(tmp_path / "runs.json", {"runs": 3})
    assert read_groups([tmp_path])[0].name == "algo=demo_sac"


def test_a_run_that_has_only_begun_rl_does_not_end_as_it_starts(tmp_path):
    for name, final in (("a", True), ("b", False)):
        for seed in (0, 1):
            make_run(
                tmp_path / f"{name}{seed}", seed, looks=LOOKS if final else LOOKS[:1], final=final, algo=name
            )
    first, other = read_groups([tmp_path])
    assert first.values("end") == [0.9, 0.9] and all(map(math.isnan, other.values("end")))
    assert "it has no end yet" in page([first, other], 0.9) and math.isnan(compared(other, first)[0].value)


def test_a_difference_of_success_is_at_most_one(tmp_path):
    for name, rates in (("a", (0.1, 0.9)), ("b", (0.9, 0.2))):
        for seed, rate in enumerate(rates):
            make_run(tmp_path / f"{name}{seed}", seed, rate, algo=name)
    first, other = read_groups([tmp_path])
    assert compared(other, first)[0][1:] == (-1.0, 1.0)


def test_of_seeds_that_end_all_alike_the_interval_is_over_their_starts(tmp_path):
    for name, rate in (("a", 0.97), ("b", 0.98)):
        for seed in (0, 1):
            make_run(tmp_path / f"{name}{seed}", seed, rate, algo=name)
    groups = read_groups([tmp_path])
    assert over(groups[0], "end") == pytest.approx(wilson(194, 200))
    change, how = compared(groups[1], groups[0])
    assert change == pytest.approx(unpaired_difference(196, 200, 194, 200)) and "over starts" in how
    assert change.low < 0 < change.high


def test_a_run_that_does_not_say_its_options_is_refused(tmp_path):
    make_run(tmp_path / "a")
    for wrong in ({"config": [1], "seed": 0}, {"config": {"task": "reach"}, "seed": "x"}, {}):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        write_json(make_run(tmp_path / "b") / "run.json", wrong)
        with pytest.raises(UserError, match="does not say its options"):
            read_groups([tmp_path])


def test_one_folder_of_runs_is_taken_as_it_is(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"s{seed}", seed)
    assert robo_rl.compare(str(tmp_path)) == robo_rl.compare([tmp_path])
    with pytest.raises(UserError, match=r"reach must be in \[0, 1\]"):
        robo_rl.compare(tmp_path, reach=90)


def test_of_many_groups_each_has_a_colour_and_its_mean_alone(tmp_path):
    for k in range(12):
        for seed in (0, 1):
            make_run(tmp_path / f"{k:02d}s{seed}", seed, rl={"lr": k})
    groups = read_groups([tmp_path])
    html = page(groups, 0.9)
    assert len({COLOURS[k] for k in range(12)}) == 12 and 'class="band' not in html and "seed c" not in html
    assert all(f".c{k} {{" in html and html.count(f"--c{k}:") == 2 for k in COLOURS)
    assert 'class="band' in page(groups[:6], 0.9)
