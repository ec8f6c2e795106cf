import json
import os
import re
import shutil
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest

from robo_rl.cli.report import ReportOptions, run
from robo_rl.errors import UserError
from robo_rl.files import write_json
from robo_rl.log import RunLog
from robo_rl.report.charts import Series, chart, stacked, thin, ticks
from robo_rl.report.data import difference, load, load_evaluation, whole_mp4
from robo_rl.report.page import page, tiles
from robo_rl.report.training import evaluation_series, per_episode, watched
from robo_rl.stats import bootstrap_mean, paired_difference, unpaired_difference, wilson

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TASKS = ("pick the red cube", "pick the <green> ball & lift", "pick the blue box", "pick the yellow cup")


def film(path, hue):
    """A one-second H.264 clip of a square that moves."""
    import av

    path.parent.mkdir(exist_ok=True)
    with av.open(str(path), "w") as box:
        stream = box.add_stream("h264", rate=20, options={"crf": "30"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for k in range(20):
            image = np.full((240, 320, 3), 40, np.uint8)
            image[140:180, 20 + 12 * k : 60 + 12 * k] = hue
            box.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        box.mux(stream.encode())


def evaluation(label, step, rate, rng, n=200, starts=None):
    luck = np.random.default_rng(7).normal(size=n)  # the same starts are hard for every policy
    success = 0.8 * luck + 0.6 * rng.normal(size=n) < NormalDist().inv_cdf(rate)
    return {
        "label": label,
        "step": step,
        "time": 1.0,
        "n": n,
        "success": success.astype(int),
        "starts": np.arange(n) if starts is None else starts,
        "task": [TASKS[i % 4] for i in range(n)],
        "return": success * 8 + rng.normal(0, 1, n),
        "length": rng.integers(20, 60, n),
    }


def make_run(folder, updates=120, videos=True):
    """A run folder like that of a training that worked."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    write_json(
        folder / "run.json",
        {
            "name": folder.name,
            "created": "2025-03-01T14:05:00+00:00",
            "version": "0.1.0",
            "git": "9645e12abcdef00",
            "seed": 3,
            "argv": ["robo_rl", "train", "--sim", "mujoco", "--task", "pick_by_name"],
            "versions": {"python": "3.11.9", "torch": "2.13.0", "mujoco": "4.0.0", "numpy": "2.4.6"},
            "config": {
                "sim": "mujoco",
                "task": "pick_by_name",
                "algo": "pi_rl",
                "obs": "state",
                "num_envs": 256,
                "chunk": 8,
                "policy": {"hidden": [256, 256, 256], "denoise_steps": 4, "noise": 0.1},
                "lr": 3e-4,
                "clip": 0.2,
                "gamma": 0.99,
                "gae_lambda": 0.95,
            },
        },
    )

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    with RunLog(folder, (), clock=clock) as log:
        for k in range(60):
            clock.now += 0.9
            log.log(
                k * 20,
                {"sft/loss": 1.2 * np.exp(-k / 12) + 0.02 + 0.02 * rng.random(), "time/update": 0.85},
                stage="sft",
            )
        for k in range(1, updates + 1):
            u = k / updates
            evaluating = 12.0 if k % 20 == 0 else 0.0
            clock.now += 3.4 + evaluating + 0.3 * rng.random()
            log.log(
                k * 10240,
                {
                    "train/success": 0.45 + 0.48 * (1 - np.exp(-3 * u)) + 0.04 * rng.normal(),
                    "train/return": 3 + 5 * (1 - np.exp(-3 * u)) + 0.3 * rng.normal(),
                    "train/kl": 0.01 + 0.006 * rng.random(),
                    "train/clip_fraction": 0.12 + 0.05 * rng.random(),
                    "train/ratio_max": 1.5 + rng.gamma(2, 0.5),
                    "train/log_ratio_p01": -0.3 - 0.06 * rng.random(),
                    "train/log_ratio_p99": 0.28 + 0.06 * rng.random(),
                    "train/explained_variance": 0.85 - 0.9 * np.exp(-8 * u),
                    "train/value_loss": 0.4 * np.exp(-2 * u) + 0.1,
                    "train/policy_loss": -0.01 + 0.004 * rng.normal(),
                    "train/entropy": -2.0 - 1.2 * u,
                    "train/noise": 0.1,
                    "train/grad_norm": 0.5 + 0.1 * rng.random(),
                    "time/sim": 1.2,
                    "time/policy": 0.8,
                    "time/update": 1.3,
                    "time/eval": evaluating,
                    "rate/steps_per_s": 10240 / (3.4 + 0.3 * rng.random()),
                },
            )
    (folder / "evals").mkdir()
    end = updates * 10240
    for label, step, rate in [
        ("sft", 0, 0.5),
        *[
            (f"step_{s:09d}", s, 0.5 + 0.46 * (1 - np.exp(-3.2 * s / end)))
            for s in range(end // 6, end, end // 6)
        ],
        ("final", end, 0.95),
        ("best", end * 5 // 6, 0.95),
    ]:
        write_json(folder / "evals" / f"{label}.json", evaluation(label, step, rate, rng))
    if videos:
        film(folder / "videos" / "sft.mp4", (200, 60, 60))
        film(folder / "videos" / "final.mp4", (60, 180, 90))
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "pick-seed3")


def build(folder, capsys, **options):
    assert run(ReportOptions(str(folder), **options)) == 0
    return (folder / "report.html").read_text(encoding="utf-8"), capsys.readouterr()


# ----------------------------------------------------------------------------------------------- the page


def test_the_page_needs_nothing_from_outside(good, capsys):
    html, out = build(good, capsys)
    assert not re.search(
        r"https?://|//cdn|@import|<link(?! rel=\"icon\" href=\"data:,\")|src=\"(?!data:)", html
    )
    assert html.count("data:video/mp4;base64,") == 2
    assert f"open {good / 'report.html'}" in out.out and "improved" in out.out


def test_the_page_names_an_instruction_that_falls_behind(tmp_path, capsys):
    folder = make_run(tmp_path / "run", updates=12, videos=False)
    assert "Behind the other instructions" not in build(folder, capsys)[0]
    final = json.loads((folder / "evals" / "final.json").read_text())
    final["success"] = [
        bool(s) and t != TASKS[0] for s, t in zip(final["success"], final["task"], strict=True)
    ]
    write_json(folder / "evals" / "final.json", final)
    html, _ = build(folder, capsys)
    assert f"<li>Behind the other instructions: {TASKS[0]} 0.000 [0.000, " in html
    assert "robo_rl correct.</li>" in html


def test_the_page_shows_the_numbers_of_the_evaluations(good, capsys):
    html, _ = build(good, capsys)
    sft, final = (json.loads((good / "evals" / f"{k}.json").read_text())["success"] for k in ("sft", "final"))
    d = paired_difference(final, sft)
    for text in (
        f"{100 * np.mean(sft):.1f}",
        f"{100 * np.mean(final):.1f}",
        f"{100 * d.value:+.1f} points",
        f"{100 * d.low:+.1f} … {100 * d.high:+.1f}",
        "paired over 200 shared starts",
        f"{100 * wilson(sum(final), 200).low:.1f} … {100 * wilson(sum(final), 200).high:.1f} %",
        "9645e12abcde",
        "pick_by_name",
        "denoise_steps",
        "robo_rl train --sim mujoco",
    ):
        assert text in html, text
    for title in (
        "Success over training",
        "Return",
        "KL",
        "Clip fraction",
        "Ratio tails",
        "Explained variance",
        "Value loss",
        "Policy loss",
        "Entropy",
        "Noise level",
        "Supervised loss",
        "Where the time goes",
        "Speed",
        "train/grad_norm",
    ):
        assert f"<b>{title}</b>" in html, title
    assert "Not logged" not in html


def test_names_from_the_run_cannot_break_the_page(good, capsys):
    html, _ = build(good, capsys)
    assert "pick the &lt;green&gt; ball &amp; lift" in html and "<green>" not in html


def test_the_same_run_gives_the_same_page(good, capsys):
    assert build(good, capsys)[0] == build(good, capsys)[0]


def test_a_run_with_workers_shows_who_worked_when(tmp_path):
    folder = tmp_path / "run"
    make_run(folder, updates=6, videos=False)
    assert "Who worked when" not in page(load(folder))
    with RunLog(folder, (), resume_step=10**9) as log:
        log.log(
            10**6,
            {
                "workers/sim": 0.8,
                "workers/wait": 0.1,
                "staleness/mean": 0.6,
                "staleness/max": 1.0,
                "util/learner_wait": 0.4,
            },
        )
        log.log(
            2 * 10**6,
            {
                "workers/sim": 0.8,
                "workers/wait": 0.1,
                "staleness/mean": 0.7,
                "staleness/max": 1.0,
                "util/learner_wait": 0.4,
            },
        )
    lines = [
        [["worker0", 1.0, 55.0], ["learner", 40.0, 60.0]],
        [["worker1", 45.0, 70.0], ["learner", 61.0, 80.0]],
    ]
    # torn by a kill
    (folder / "timeline.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n[["worker0", 7')
    html = page(load(folder))
    section = html[html.index("Who worked when") : html.index("<h2>Throughput")]
    assert section.count("<rect") == 4 and "worker0" in section and "worker1" in section
    assert section.index("learner</i>") < section.index("worker0</i>") and "Staleness" in section


def test_single_episodes_are_drawn_as_a_mean_of_the_last_twenty_and_a_person_s_minutes_are_told(tmp_path):
    rng = np.random.default_rng(0)
    won = rng.random(100) < np.linspace(0, 1, 100)
    folder = tmp_path / "live"
    folder.mkdir()
    write_json(folder / "run.json", {"name": "live", "config": {}})
    with RunLog(folder, ()) as log:
        for k, x in enumerate(won):  # one episode a row, none in every third
            log.log(
                40 * k,
                {"train/episodes": float(k % 3 > 0), "human/operator_minutes": 0.01 * k}
                | (
                    {"train/success": float(x), "human/step_share": 0.3, "human/unassisted_success": float(x)}
                    if k % 3
                    else {}
                ),
            )
    [series] = per_episode(load(folder), "train/success", "episodes")
    told = won[np.arange(100) % 3 > 0]
    assert series.name == "episodes, last 20"
    np.testing.assert_allclose(series.y, [told[k - 19 : k + 1].mean() for k in range(19, len(told))])
    html = page(load(folder))
    assert "A person helped for 1.0 minutes." in html and "Operator minutes" in html


def test_json_is_one_document_and_nothing_else(good, capsys):
    _, out = build(good, capsys, json=True)
    d = json.loads(out.out)
    assert out.err == "" and d["page"] == str(good / "report.html") and d["verdict"] == "improved"
    assert d["difference"]["paired"] and d["final"]["n"] == 200 and len(d["evaluations"]) == 8
    assert d["env_steps"] == 120 * 10240 and d["time_s"] == pytest.approx(
        60 * 0.9 + 120 * 3.55 + 72, rel=0.02
    )
    assert {t["task"] for t in d["tasks"]} == set(TASKS)


def test_out_chooses_the_place_of_the_page(good, tmp_path, capsys):
    assert run(ReportOptions(str(good), out=str(tmp_path / "deep" / "mine.html"))) == 0
    assert "Success over training" in (tmp_path / "deep" / "mine.html").read_text()
    assert str(tmp_path / "deep" / "mine.html") in capsys.readouterr().out


def test_every_series_drawn_is_the_one_logged(good):
    data = [
        json.loads(t) for t in re.findall(r'<script type="application/json">(.*?)</script>', page(load(good)))
    ]
    kl = next(s for d in data for s in d["series"] if s["name"] == "KL")
    lines = [json.loads(t) for t in (good / "metrics.jsonl").read_text().splitlines()]
    rl = [m for m in lines if m["stage"] == "rl"]
    assert kl["x"] == pytest.approx([m["step"] for m in rl], rel=1e-4)
    assert kl["y"] == pytest.approx([m["train/kl"] for m in rl], rel=1e-4)
    time = next(d for d in data if d.get("stacked"))
    assert np.sum([s["y"] for s in time["series"]], 0) == pytest.approx(1.0, abs=1e-3)


# ------------------------------------------------------------------------------------------- missing, damaged


def test_an_empty_run_says_what_is_missing(tmp_path, capsys):
    write_json(tmp_path / "run.json", {"name": "new"})
    html, _ = build(tmp_path, capsys)
    for text in (
        "not evaluated yet",
        "robo_rl eval",
        "No RL updates yet",
        "No videos in this run",
        "No SFT was logged",
        "No evaluation yet",
        "Time by stage was not logged",
        "not recorded",
    ):
        assert text in html, text
    assert run(ReportOptions(str(tmp_path), json=True)) == 0
    d = json.loads(capsys.readouterr().out)
    assert d["final"] is None and d["verdict"] == "unknown" and d["steps_per_s"] is None


def test_a_run_that_only_did_sft_has_a_page(tmp_path, capsys):
    write_json(tmp_path / "run.json", {"config": {"sim": "mujoco"}})
    with RunLog(tmp_path, ()) as log:
        for k in range(5):
            log.log(0, {"sft/loss": 1.0 / (k + 1)}, stage="sft")
    (tmp_path / "evals").mkdir()
    write_json(tmp_path / "evals" / "sft.json", {"label": "sft", "step": 0, "success": [1, 0, 1]})
    html, _ = build(tmp_path, capsys)
    assert "nothing to compare with" in html and "66.7" in html and "No RL updates yet" in html
    assert "does not say which task" in html


def test_damaged_evaluations_and_videos_are_named_and_left_out(good, tmp_path, capsys):
    folder = shutil.copytree(good, tmp_path / "r")
    (folder / "evals" / "step_000000001.json").write_text('{"label": "step_1", "success": [1, 0')
    write_json(folder / "evals" / "odd.json", {"label": "odd", "success": [1, 0], "starts": [1]})
    write_json(folder / "evals" / "none.json", {"label": "none", "success": []})
    whole = (folder / "videos" / "final.mp4").read_bytes()
    (folder / "videos" / "cut.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "videos" / "empty.mp4").write_bytes(b"")
    html, out = build(folder, capsys)
    for name in ("step_000000001.json", "odd.json", "none.json", "cut.mp4", "empty.mp4"):
        assert name in html and name in out.err, name
    assert html.count("data:video/mp4") == 2 and "+4" in out.out  # the rest is as before


def test_other_starts_are_compared_unpaired_and_the_page_says_so(good, tmp_path, capsys):
    folder = shutil.copytree(good, tmp_path / "r")
    rng = np.random.default_rng(5)
    write_json(
        folder / "evals" / "final.json", evaluation("final", 99, 0.9, rng, starts=np.arange(1000, 1200))
    )
    html, _ = build(folder, capsys)
    assert "two separate sets of starts" in html and "used different starts" in html
    r = load(folder)
    d = difference(r.start, r.end)
    assert d.change == unpaired_difference(int(r.end.success.sum()), 200, int(r.start.success.sum()), 200)


def test_in_a_world_model_episodes_from_one_recorded_frame_count_as_one(tmp_path, capsys):
    rng, evals, frames = np.random.default_rng(5), tmp_path / "evals", {"origin": np.arange(200) % 10}
    evals.mkdir()
    write_json(tmp_path / "run.json", {"config": {}})
    for label, step, rate in (("sft", 0, 0.2), ("final", 9, 0.7)):
        write_json(evals / f"{label}.json", evaluation(label, step, rate, rng, n=200) | frames)
    r = load(tmp_path)
    won, before = r.end.success, r.start.success
    assert r.end.rate == wilson(won.sum() * 10 / 200, 10)
    assert difference(r.start, r.end).change == paired_difference(won, before, groups=frames["origin"])
    write_json(evals / "final.json", evaluation("final", 9, 0.7, rng, starts=np.arange(900, 1100)) | frames)
    r = load(tmp_path)
    counts = (r.end.success.sum() / 20, 10, before.sum() / 20, 10)
    assert difference(r.start, r.end).change == unpaired_difference(*counts)
    html, out = build(tmp_path, capsys, json=True)
    assert "/200 from 10 recorded starts" in html and "the same recorded frame count as one" in html
    told = json.loads(out.out)
    assert told["final"]["recorded_starts"] == 10 and told["final"]["high"] == r.end.rate.high
    assert all(row["high"] - row["low"] > 0.35 for row in told["tasks"])


def test_evaluations_on_two_lists_of_starts_are_two_lines(tmp_path):
    """And the interval of a mean return, too, counts episodes from one recorded frame as one."""
    rng, evals, frames = np.random.default_rng(5), tmp_path / "evals", {"origin": np.arange(200) % 10}
    evals.mkdir()
    write_json(tmp_path / "run.json", {"config": {}})
    for label, step, which in (("sft", 0, 1), ("step_0", 0, 0), ("step_9", 9, 0), ("final", 9, 1)):
        write_json(evals / f"{label}.json", evaluation(label, step, 0.5, rng) | {"list": which} | frames)
    run = load(tmp_path)
    alone = bootstrap_mean(run.end.returns, groups=run.end.origins)
    chosen, told = evaluation_series(run.evals, lambda e: e.rate)
    assert chosen.x.tolist() == told.x.tolist() == [0, 9]
    assert f"95 % {alone.low:.3g} … {alone.high:.3g}" in tiles(run)
    assert "In a model both begin from the same recorded frames." in page(run)
    for label, step in (("step_0", 0), ("step_9", 9)):
        of_others = {"list": 0, "origin": np.arange(200) % 10 + 10}
        write_json(evals / f"{label}.json", evaluation(label, step, 0.5, rng) | of_others)
    assert "the same recorded frames." not in page(load(tmp_path))


def test_a_run_from_scratch_is_not_compared_with_itself(tmp_path, capsys):
    """With one evaluation in the run, on the starts that choose, and one on those that are reported, both are
    of the last policy."""
    rng, evals = np.random.default_rng(5), tmp_path / "evals"
    evals.mkdir()
    write_json(tmp_path / "run.json", {"config": {}})
    write_json(evals / "step_000000900.json", evaluation("step_000000900", 900, 0.9, rng))
    write_json(evals / "final.json", evaluation("final", 900, 0.9, rng) | {"list": 1})
    html, out = build(tmp_path, capsys)
    assert load(tmp_path).start is None and "nothing to compare with" in html
    assert "no clear change" not in html + out.out and "success 9" in out.out
    write_json(evals / "step_000000300.json", evaluation("step_000000300", 300, 0.2, rng))
    html, out = build(tmp_path, capsys)
    assert load(tmp_path).start.step == 300 and "improved" in html and "improved" in out.out


def test_a_number_that_was_never_logged_is_not_said_to_be_healthy(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "r")
    names = ("kl", "candidates/rank", "failures")
    ranges = [{"metric": m, "title": f"<{m}>", "healthy": "at most 1"} for m in names]
    write_json(folder / "health.json", {"ranges": ranges, "findings": []})
    html = watched(load(folder))
    assert "&lt;kl&gt;" in html and "&lt;failures&gt;" in html and "candidates" not in html


def test_a_short_evaluation_is_paired_on_the_starts_it_shares(good, tmp_path):
    rng = np.random.default_rng(5)
    write_json(tmp_path / "a.json", evaluation("final", 9, 0.9, rng, n=50))
    a, b = load_evaluation(tmp_path / "a.json"), load(good).start
    assert difference(b, a).paired and difference(b, a).n == 50


def test_a_metric_that_died_is_noted(tmp_path):
    write_json(tmp_path / "run.json", {})
    with RunLog(tmp_path, ()) as log:
        for k in range(20):
            log.log(k, {"train/kl": 0.1 if k < 9 else float("nan"), "train/success": 0.5})
    assert "train/kl has no finite value after step 8" in page(load(tmp_path))


def test_a_method_without_ratios_has_no_empty_chart_of_them(tmp_path):
    write_json(tmp_path / "run.json", {})
    with RunLog(tmp_path, ()) as log:
        for k in range(20):
            log.log(k, {"train/value_loss": 0.1, "train/success": 0.5})
    html = page(load(tmp_path))
    assert "<b>Ratio tails</b>" not in html and "Not logged by this run: ratio tails, KL" in html


def test_a_wrong_path_lists_the_runs_nearby(good):
    with pytest.raises(UserError, match="Runs nearby.*pick-seed3"):
        run(ReportOptions(str(good.parent / "pick-seed4")))
    with pytest.raises(UserError, match="Runs nearby.*pick-seed3"):
        run(ReportOptions(str(good.parent)))


def test_a_damaged_run_record_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("[1, 2")
    with pytest.raises(UserError, match="run.json is damaged"):
        run(ReportOptions(str(tmp_path)))


def test_an_mp4_is_whole_or_not(good, tmp_path):
    data = (good / "videos" / "sft.mp4").read_bytes()
    assert whole_mp4(good / "videos" / "sft.mp4")
    for k in (0, 5, 40, len(data) // 2, len(data) - 1):
        (tmp_path / "v.mp4").write_bytes(data[:k])
        assert not whole_mp4(tmp_path / "v.mp4"), k


# ------------------------------------------------------------------------------------------------- charts


def test_ticks_are_round_and_inside():
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-0.3, 1.25e6, 5)[-1] == 1.25e6
    for low, high in [(0.013, 0.0162), (-7e-5, 3e9), (99.1, 99.2)]:
        t = ticks(low, high, 5)
        assert 3 <= len(t) <= 11 and low <= t[0] + 1e-9 and t[-1] <= high * (1 + 1e-9)


def test_thinning_keeps_the_mean_and_every_peak():
    y = np.random.default_rng(0).normal(size=5000)
    y[1234], y[77] = 40.0, np.nan
    s = thin(Series("a", np.arange(5000.0), y), 100)
    assert len(s.x) == 100 and s.high.max() == 40.0 and s.low.min() == np.nanmin(y)
    assert s.y[50] == pytest.approx(y[2500:2550].mean())


@pytest.mark.parametrize(
    "y", [[3.0], [2.0, 2.0, 2.0], [0.0, 0.0], [np.nan, 1.0, np.nan, 2.0], [1e-9, 1e9], [-1e-300, 0]]
)
def test_awkward_series_still_draw(y):
    html = chart("t", "w", [Series("s", np.arange(len(y), dtype=float), np.array(y))], log=True, zero=True)
    assert "nan" not in html.lower().replace("nanum", "") and "<svg" in html


def test_stacked_bars_fill_their_column_from_the_bottom_up_without_overlap():
    html = stacked(
        "t", "w", [0, 1, 4], [("a", 1, np.array([0.25, 1.0])), ("b", 2, np.array([0.75, 0.0]))], x_name="s"
    )
    boxes = [
        [float(v) for v in m] for m in re.findall(r' x="(.*?)" y="(.*?)" width=".*?" height="(.*?)"', html)
    ]
    assert boxes == [[0, 75, 25], [25, 0, 100], [0, 0, 75]]


def test_nothing_logged_is_an_empty_state():
    assert "Not logged" in chart("t", "w", [Series("s", np.zeros(2), np.full(2, np.nan))])
    assert "Not logged" in chart("t", "w", [])


# ------------------------------------------------------------------------------------------------ browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the page with")
def test_the_page_opens_in_a_browser_without_errors_and_its_videos_decode(good, tmp_path, capsys):
    html, _ = build(good, capsys)
    probe = """<script>
      addEventListener("error", e => document.title = "ERROR " + e.message);
      addEventListener("load", () => setTimeout(() => {
        const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
        plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 5}));
        const report = {tip: plot.querySelector(".tip").textContent, wide: document.documentElement.scrollWidth,
          shown: innerWidth, videos: [...document.querySelectorAll("video")].map(v => [v.videoWidth, String(v.error)]),
          charts: document.querySelectorAll(".plot svg").length};
        document.body.setAttribute("data-probe", JSON.stringify(report));
      }, 400));</script></head>"""  # noqa: E501
    (tmp_path / "probe.html").write_text(html.replace("</head>", probe, 1))
    shot = tmp_path / "shot.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
        "--window-size=1280,2400",
    ]
    out = []
    for k, what in enumerate((["--dump-dom"], [f"--screenshot={shot}"])):
        out.append(
            subprocess.run(
                [
                    CHROMIUM,
                    *flags,
                    f"--user-data-dir={tmp_path / f'profile{k}'}",
                    *what,
                    (tmp_path / "probe.html").as_uri(),
                ],
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
                env={**os.environ, "HOME": str(tmp_path)},
            )
        )
    assert not re.findall(r"CONSOLE.*", out[0].stderr + out[1].stderr)
    assert "<title>ERROR" not in out[0].stdout
    seen = re.search(r'data-probe="([^"]*)"', out[0].stdout)
    assert seen, out[0].stderr[-2000:]
    report = json.loads(seen[1].replace("&quot;", '"'))
    assert report["videos"] == [[320, "null"], [320, "null"]]
    assert report["charts"] >= 12 and "environment steps" in report["tip"] and "evaluation" in report["tip"]
    assert report["wide"] <= report["shown"]
    from PIL import Image

    image = np.asarray(Image.open(shot).convert("L"))
    assert image.shape == (2400, 1280) and image.std() > 5


if __name__ == "__main__":  # python tests/test_report.py FOLDER makes a run to look at
    from pathlib import Path

    print(make_run(Path(sys.argv[1])))
