"""A run whose numbers leave their healthy range says so: at once, once, in the run folder and in the
report."""

import copy
import importlib
import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from test_algos import METHODS, setup, step
from test_corrections import at_version_two

from robo_rl import health
from robo_rl.health import PATIENCE, Range, Watch, newest_findings, ranges, read
from robo_rl.options import NftOptions, PiRlOptions, PolicyOptions, PpoOptions, RolloutOptions

KL = Range("kl", "KL", high=0.2, alarm=2.0, meaning="too far")
ESS = Range("ess", "effective sample size", low=0.3, alarm=0.01, meaning="too few")


def looks(watch, name, values, first=1):
    return [watch.look(first + i, {name: v}) for i, v in enumerate(values)]


def test_a_number_inside_its_range_is_never_told(tmp_path):
    watch = Watch((KL, ESS), tmp_path)
    watch.begin(0)
    for i in range(50):
        assert watch.look(i, {"kl": 0.2, "ess": 0.3}) == []
    assert health.read(tmp_path)[1] == [] and [r["metric"] for r in health.read(tmp_path)[0]] == ["kl", "ess"]


def test_a_number_outside_is_told_after_three_updates_once_until_it_was_back_for_three(tmp_path):
    watch = Watch((KL,), tmp_path)
    told = looks(watch, "kl", [0.3, 0.3, 0.1, 0.3, 0.3, 0.5] + [0.4] * 40)
    assert [i for i, t in enumerate(told) if t] == [5]
    assert "KL is out of its healthy range (at most 0.2) from step 6: 0.5 at step 6; too far" in told[5][0]
    assert not any(looks(watch, "kl", [0.1, 0.1, 0.3, 0.1, 0.1, 0.1], first=47))
    (finding,) = health.read(tmp_path)[1]
    assert (finding.begin, finding.end, finding.worst, finding.at) == (6, 52, 0.5, 6)
    assert [bool(t) for t in looks(watch, "kl", [0.3] * 4, first=60)] == [False, False, True, False]
    assert [f.begin for f in health.read(tmp_path)[1]] == [6, 62]


@pytest.mark.parametrize(
    "r,value,at_once",
    [
        (KL, 2.0, True),
        (KL, 1.9, False),
        (KL, math.nan, True),
        (KL, -math.inf, False),
        (ESS, 0.01, True),
        (ESS, 0.2, False),
        (ESS, 1.0, False),
    ],
    ids=str,
)
def test_what_is_far_outside_or_no_number_is_told_at_the_first_update(r, value, at_once):
    assert bool(Watch((r,)).look(7, {r.metric: value})) == at_once


def test_the_worst_value_is_kept_whichever_side_is_unhealthy(tmp_path):
    watch = Watch((ESS,), tmp_path)
    looks(watch, "ess", [0.005, 0.2, 0.001, 0.1])
    assert health.read(tmp_path)[1][0].worst == 0.001 and health.read(tmp_path)[1][0].at == 3


def test_a_run_without_any_success_says_so_where_the_reward_is_sparse():
    def told(sparse, rates, episodes=40):
        watch = Watch(ranges(PpoOptions(), PolicyOptions(), 2, sparse))
        return [bool(watch.look(i, {"episodes": episodes, "success": r})) for i, r in enumerate(rates)]

    # 101 episodes at the third, three updates long
    assert told(True, [0.0] * 8) == [False] * 4 + [True] + [False] * 3
    assert not any(told(False, [0.0] * 8)) and not any(told(True, [0.0, 0.01] * 8))
    assert not any(told(True, [0.0] * 8, episodes=5))


def test_a_run_whose_own_reward_never_differs_says_so_and_one_that_has_learnt_does_not():
    def told(returns, sparse=False, step=0):
        watch = Watch(ranges(PpoOptions(), PolicyOptions(), 2, sparse))
        watch.begin(step)
        rows = ({"episodes": 40, "success": 0.0, "return": x} for x in returns)
        return [[x for x in watch.look(i, row) if "--demos" in x] for i, row in enumerate(rows)]

    # 101 episodes at the third, three updates long; a cost of time is one return too
    for value in (0.0, -0.4):
        assert [len(x) for x in told([value] * 8)] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert not any(told([0.0, 0.1] + [1.0] * 9)) and not any(told([1.0] * 8, step=2000))
    assert "show successes" not in str(told([0.0] * 8, sparse=True))


def test_a_loss_of_a_users_own_method_that_is_no_number_is_told_once():
    def told(**metrics):
        watch = Watch(ranges(RolloutOptions(decisions=4), PolicyOptions(), 2, False))
        return [watch.look(i, metrics) for i in range(5)]

    first, *rest = told(policy_loss=math.nan, grad_norm=math.inf, entropy=math.nan)
    assert "number of losses and norms that are not finite is out" in first[0] and ": 2 at step 0" in first[0]
    assert not any(rest) and not any(told(policy_loss=0.5, entropy=math.nan))
    assert not any("losses and norms" in x for x in told(policy_loss=math.nan, skipped_updates=1.0)[0])


def test_a_run_that_loses_the_success_it_had_says_so():
    watch = Watch(ranges(PpoOptions(), PolicyOptions(), 2, True))
    rates = [0.4, 0.45, 0.42, 0.4, 0.1, 0.1, 0.1, 0.05, 0.05]
    told = [watch.look(i, {"episodes": 50, "success": r}) for i, r in enumerate(rates)]
    assert [i for i, t in enumerate(told) if t] == [7] and "training undoes what was known" in told[7][0]


def test_the_range_of_kl_follows_the_reduction_of_the_log_prob():
    whole, mean = (
        ranges(PpoOptions(), PolicyOptions(execute=4, logp_reduction=r), 3, True)[0] for r in ("sum", "mean")
    )
    assert (
        whole.high == 1.0 and mean.high == pytest.approx(1.0 / 144) and mean.alarm == pytest.approx(5.0 / 144)
    )


def test_the_range_of_a_bounded_kl_ends_at_twice_its_target():
    kl = next(
        r
        for r in ranges(PiRlOptions(trust_kl=0.002), PolicyOptions(logp_reduction="mean"), 4, True)
        if r.metric == "kl"
    )
    assert kl.high == 0.004


def test_what_is_found_again_and_again_is_told_ever_more_seldom_with_its_count():
    watch = Watch((Range("refused", "refused minibatches", high=0.0, alarm=0.0),))
    told = looks(watch, "refused", [0.1, 0.0, 0.0, 0.0] * 9)
    assert [i for i, t in enumerate(told) if t] == [0, 4, 12, 28] and len(watch.findings) == 9
    assert [t.rpartition("; ")[2] for t in told[28]] == ["so far 8 times"]
    watch.ranges += (Range("kl", "KL", high=1.0, alarm=5.0),)
    watch.look(99, {"kl": 9.0})
    one, other = newest_findings(watch.findings)  # of the report: a sentence for each metric
    assert "step 33" in one and one.endswith("; 9 times in all") and other == watch.findings[-1].text


def test_of_findings_without_end_the_first_and_the_newest_stay_and_all_are_counted(tmp_path):
    watch = Watch((Range("refused", "refused minibatches", high=0.0, alarm=0.0),), tmp_path)
    told = looks(watch, "refused", [0.1, 0.0, 0.0, 0.0] * 64)
    assert told[-4][0].endswith("so far 64 times")
    assert [f.number for f in read(tmp_path)[1]] == [1, *range(46, 65)]
    assert newest_findings(watch.findings)[0].endswith("; 64 times in all")
    again = Watch(watch.ranges, tmp_path)
    again.begin(240)  # the 60th and those before it
    looks(again, "refused", [0.1, 0.0, 0.0, 0.0], first=241)
    assert [f.number for f in again.findings] == [1, *range(46, 62)]


def test_a_resumed_run_keeps_the_findings_of_before_its_checkpoint_and_makes_the_later_ones_again(tmp_path):
    watch = Watch((KL, ESS), tmp_path)
    watch.look(10, {"kl": 5.0})
    looks(watch, "kl", [0.0] * PATIENCE, first=30)  # ends at 32
    watch.look(40, {"ess": 0.001})
    again = Watch((KL, ESS), tmp_path)
    again.begin(31)
    assert [(f.metric, f.end) for f in again.findings] == [("kl", -1)]
    assert not again.look(33, {"kl": 5.0}) and again.look(40, {"ess": 0.001})


# ---- methods


def run(name, rounds, **options):
    """What is told of `rounds` updates of a method on the toy."""
    env, learner, collector, o = setup(name)
    learner.options = o = replace(o, critic_warmup=0, **options)
    for group in learner.actor_opt.param_groups:
        group["lr"] = o.lr
    watch = Watch(ranges(o, learner.policy.options, 2, False))
    rng = np.random.default_rng(0)
    return [t for i in range(rounds) for t in watch.look(i, step(env, learner, collector, o, rng)[0])]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_that_is_pushed_too_far_says_it_and_one_that_is_not_says_nothing(name):
    nft = name.startswith("nft")
    word = "squared distance" if nft else "KL|effective sample size|refused"
    wild = run(name, 5, lr=1.0 if nft else 0.1, max_grad_norm=1e3)
    assert any(re.match(word, t) for t in wild), wild
    assert run(name, 4, lr=1e-5) == []


def test_stale_data_of_weights_that_are_far_says_that_few_of_its_samples_count():
    learner, old = at_version_two("ppo")
    watch = Watch(ranges(learner.options, learner.policy.options, 2, False))
    assert watch.look(0, learner.update(copy.deepcopy(old), 0.0, version=2)) == []
    with torch.no_grad():
        learner.policy.log_std -= 0.7
    told = [
        t
        for i in range(PATIENCE)
        for t in watch.look(i, learner.update(copy.deepcopy(old), 0.0, version=3 + i))
    ]
    assert any(t.startswith("effective sample size of stale data") for t in told), told


def test_an_actor_that_scored_by_other_weights_is_found_out():
    env, learner, collector, o = setup("pi_rl noise")
    learner.options = o = replace(o, critic_warmup=0, lr=1e-5)
    rollout = collector.collect(learner.sampler, 4)
    learner.policy.noise.high.fill_(0.28)  # as if the bound had moved after acting
    told = Watch(ranges(o, learner.policy.options, 2, False)).look(0, learner.update(rollout, 0.0))
    assert any(t.startswith("first log ratio") for t in told)
    assert not any(
        r.metric == "first_log_ratio"
        for r in ranges(replace(o, proximal="ewma"), learner.policy.options, 2, False)
    )


@pytest.mark.parametrize("proximal", ["snapshot", "interpolate"])
def test_stale_data_under_an_anchor_that_is_not_the_present_weights_is_no_error_of_the_actor(proximal):
    learner, old = at_version_two("ppo", proximal=proximal)
    learner.options = replace(learner.options, critic_warmup=0)
    metrics = learner.update(copy.deepcopy(old), 0.0, version=2)
    assert metrics["first_log_ratio"] > 0.1  # as an alarm has it
    told = Watch(ranges(learner.options, learner.policy.options, 2, False)).look(0, metrics)
    assert not any(t.startswith("first log ratio") for t in told), told


def test_a_batch_that_was_refused_is_told_at_once():
    env, learner, collector, o = setup("ppo")
    learner.options = o = replace(o, critic_warmup=0)
    rollout = collector.collect(learner.sampler, 4)
    rollout.logp[0, 0] = math.inf
    told = Watch(ranges(o, learner.policy.options, 2, False)).look(0, learner.update(rollout, 0.0))
    assert any(t.startswith("refused minibatches") for t in told)


def test_the_options_of_every_on_policy_method_have_ranges():
    from robo_rl.options import OFF_POLICY, OFFLINE, RL_OPTIONS

    for algo in set(RL_OPTIONS) - set(OFF_POLICY) - set(OFFLINE):
        metrics = {r.metric for r in ranges(RL_OPTIONS[algo](), PolicyOptions(), 7, True)}
        assert {"failures", "skipped_updates"} <= metrics and ("drift" if algo == "nft" else "kl") in metrics
    assert importlib.util.find_spec("robo_rl.algos.nft") and "kl" not in {
        r.metric for r in ranges(NftOptions(), PolicyOptions(), 7, True)
    }


def test_what_helps_is_what_bounds_a_step():
    for target in (0.0, 0.004):
        found = ranges(PiRlOptions(trust_kl=target), PolicyOptions(), 7, True)
        told = next(r.meaning for r in found if r.metric == "returns")
        assert told.endswith("lower --rl.trust-kl" if target else "or set --rl.trust-kl")
    held = " ".join(r.meaning for r in ranges(NftOptions(), PolicyOptions(), 7, True))
    assert "trust-kl" not in held and "or raise --rl.kl-coef" in held  # nft refuses that option


def test_what_helps_a_users_own_method_is_an_option_that_it_has():
    @dataclass(frozen=True, kw_only=True)
    class Own(RolloutOptions):
        lr: float = 1e-3

    for options, has in ((RolloutOptions(), set()), (Own(), {"lr"})):
        meanings = {r.metric: r.meaning for r in ranges(options, PolicyOptions(), 7, True)}
        told = " ".join(m for metric, m in meanings.items() if metric in ("kl", "skipped_critic", "returns"))
        assert set(re.findall(r"--rl\.([\w-]+)", told)) == has
        assert meanings["kl"].endswith("lower --rl.lr" if has else "lower the learning rate")
        assert "lower the critic's learning rate" in meanings["explained_variance"]


# ---- the command


def test_a_run_says_it_on_the_terminal_records_it_and_shows_it_in_the_report(tmp_path):
    wild = robo_rl(
        tmp_path,
        "train",
        *TINY,
        "--rl.lr",
        "0.05",
        "--rl.trust-kl",
        "0",
        "--rl.max-grad-norm",
        "1000",
        "--out",
        "wild",
    )
    lines = [x for x in wild.err.splitlines() if x.startswith("warning: ")]
    assert wild.code == 0 and any("healthy range" in x and "--rl.lr" in x for x in lines), wild.err
    findings = json.loads((tmp_path / "wild" / "health.json").read_text())["findings"]
    metrics = [f["metric"] for f in findings]
    assert len(lines) == sum(metrics.count(m).bit_length() for m in {*metrics})
    for a, b in zip(findings, findings[1:], strict=False):  # said again only after it was back inside
        assert a["metric"] != b["metric"] or 0 <= a["end"] < b["begin"]
    report = robo_rl(tmp_path, "report", "wild", "--json")
    assert [f["metric"] for f in json.loads(report.out)["unhealthy"]] == [f["metric"] for f in findings]
    page = (tmp_path / "wild" / "report.html").read_text()
    assert "Healthy ranges" in page and findings[0]["meaning"].split(":")[0] in page

    calm = robo_rl(tmp_path, "train", *TINY, "--rl.lr", "0.00001", "--rl.trust-kl", "0", "--out", "calm")
    assert calm.code == 0 and "warning" not in calm.err
    assert json.loads((tmp_path / "calm" / "health.json").read_text())["findings"] == []
    assert 'unhealthy": []' in robo_rl(tmp_path, "report", "calm", "--json").out
    assert "Healthy ranges" in (tmp_path / "calm" / "report.html").read_text()
