"""`--rl.allocate`: sizes meet their budget, estimates of groups of different sizes have no bias, feeds play
what is planned."""

import json

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from feeds import jobs_of, rows_of
from test_episode_slots import E, N, build, train_under_kills
from test_runtime import SPEC, train, weights

from robo_rl.algos import pi_rl
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.options.method import ALLOCATIONS
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector
from robo_rl.rollout_control import StartControl, Uniform, allocation
from robo_rl.rollout_control.group_plan import GroupPlanner, pool_arms, shape_of, spend, task_arms
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.planned import PlannedGroups, group_layout
from robo_rl.runtime.process_pool import ProcessPool
from robo_rl.runtime.start_file import publish_states, publish_table
from robo_rl.runtime.worker_pool import WorkerPoolFeed
from robo_rl.starts import Ended, StartTable, task_of

G, B, POOL = 4, 16, np.arange(100, 112)
NAMES = [name for name in ALLOCATIONS if name != "fixed"]


class Pool:
    """A source of starts: those of POOL alike, and any start now and then."""

    stored = None

    def newest(self):
        return StartTable(POOL, np.ones(len(POOL)), 0.2)


def planner(name, group=G, wanted=B // G, most=4, **kw):
    return GroupPlanner(
        name,
        shape_of(name, group, most, "balance"),
        Pool(),
        0,
        wanted,
        len(POOL),
        pool_arms(POOL),
        spare=most - 1,
        **kw,
    )


def seen(starts, success):
    n = len(starts)
    return Ended(
        np.asarray(starts),
        np.zeros(n, np.int64),
        np.asarray(success, bool),
        np.asarray(success, float),
        np.ones(n, np.int64),
    )


def taught(p, rounds=3, seed=0):
    """A planner that has seen the pool: the later a start, the more it succeeds."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        starts = rng.choice(POOL, 400)
        p.observe(seen(starts, rng.random(400) < (starts - POOL[0]) / len(POOL)))
    return p


# ---- sizes


def test_a_budget_is_spent_exactly_within_its_bounds_and_nearly_in_proportion():
    rng = np.random.default_rng(0)
    for _ in range(300):
        q, low, most = int(rng.integers(1, 20)), int(rng.integers(0, 3)), int(rng.integers(3, 40))
        weight, budget = rng.random(q) + 1e-3, int(rng.integers(q * low, q * most + 1))
        n = spend(weight, budget, low, most)
        assert n.sum() == budget and n.min() >= low and n.max() <= most
        free = (n > low) & (n < most)
        if free.sum() > 1:
            c = n[free] / weight[free]
            assert (np.abs(n[free] - np.median(c) * weight[free]) <= 2 + weight[free] * np.ptp(c)).all()
        assert (np.diff(n[np.argsort(weight)]) >= -1).all()  # never less for more weight, but for rounding
    assert spend(np.array([1.0, 2.0, 1.0]), 16, 2, 16).tolist() == [4, 8, 4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4, 5, 7, 16, 23, 256])
def test_every_round_has_exactly_its_episodes(name, budget):
    p = taught(planner(name))
    for _ in range(5):
        sizes = [p.next(budget)[1]]
        while p.at < len(p.sizes):
            sizes.append(p.next(budget)[1])
        assert sum(sizes) == budget and min(sizes) >= 2 and max(sizes) <= max(p.shape.most, 2 * G - 1)


def test_nothing_known_gives_every_start_alike():
    for name in NAMES:
        assert (planner(name).sizes_of(POOL[:4], 16) == G).all(), name


def test_dars_gives_starts_below_one_half_the_same_sum_of_advantages_and_the_easy_ones_no_more_than_before():
    p = planner("dars", group=64, most=8)
    p.won, p.lost, p.total = 1000.0 * (POOL - 99) / 12, 1000.0 * (111 - POOL) / 12, np.array([1.0, 1.0])
    rate, n = p.rate(POOL), p.sizes_of(POOL, 64 * len(POOL))
    told = n * 2 * rate * (1 - rate)
    assert (
        np.ptp(told[rate < 0.5]) / told.max() < 0.05
        and len(set(n[rate >= 0.5].tolist())) <= 2
        and n[0] > 2 * n[-1]
    )


def test_xrpo_plays_uncertain_starts_most():
    p = taught(planner("xrpo", group=8))
    n, rate = p.sizes_of(POOL, 8 * len(POOL)), p.rate(POOL)
    order = np.argsort(rate * (1 - rate))
    assert n[order[-3:]].mean() > n[order[:3]].mean() and n.min() >= 4


@pytest.mark.parametrize("name", ["duet", "trace"])
def test_of_starts_that_succeed_alike_the_long_ones_get_fewer_episodes(name):
    p = planner(name, group=8)
    long = POOL >= 108
    for _ in range(4):
        starts = np.repeat(POOL, 20)
        p.observe(
            Ended(
                starts,
                np.zeros(240, np.int64),
                (np.arange(240) % 2 == 0) & (starts >= 104),
                np.zeros(240),
                np.where(starts >= 108, 40, 10),
            )
        )
    n = p.sizes_of(POOL, 8 * len(POOL))
    assert n.sum() == 96 and n[long].max() < n[(POOL >= 104) & ~long].min()
    # so far: duet gives the least to what hardly varies, trace the most, for others are mixed already
    hopeless = n[POOL < 104]
    assert hopeless.max() < n[long].min() if name == "duet" else hopeless.min() > n[POOL >= 104].max()


def test_a_planner_of_before_lengths_were_counted_is_read():
    state = taught(planner("dars")).state_dict()
    del state["steps"], state["length"]
    p = planner("duet")
    p.load_state_dict(state)
    assert p.sizes_of(POOL[:4], 16).sum() == 16


def test_the_bandit_of_gdro_is_told_what_the_sizes_of_each_bin_were_worth():
    p = planner("gdro", group=8)
    # half of the pool never succeeds, half now and then
    p.won, p.lost = np.where(POOL < 106, 0.0, 500.0), np.full(len(POOL), 500.0)
    p.plan(8 * 12)
    bins = p.bins(p.rate(p.starts))
    sizes = [set(p.sizes[bins == b].tolist()) for b in (0, 2)]
    # one size a bin, but for what rounding leaves
    assert p.sizes.sum() == 96 and all(len(s) <= 2 for s in sizes)
    starts = np.repeat(p.starts, p.sizes)
    p.observe(seen(starts, np.repeat(bins == 2, p.sizes) & (np.arange(96) % 2 == 0)))
    moved = p.gdro.log_weights != p.gdro.log_weights[:, -1:]
    assert moved[2].any() and not moved[[0, 3, 4]].any()  # a bin that never succeeds has no preference


def test_broad_groups_are_large_where_success_does_not_rise():
    p = planner("broad", most=8)
    for i in range(12):
        p.observe(seen(np.arange(1000), np.arange(1000) < 300 + 40 * i))
    assert p.next(256)[1] == G
    for _ in range(12):
        p.observe(seen(np.arange(1000), np.arange(1000) < 500))
    p.plan(256)
    assert (p.sizes == 32).all() and len(p.sizes) == 8


def test_an_arm_is_a_start_of_the_pool_or_a_task():
    ids = np.array([7, 3, 9])
    assert pool_arms(ids)(np.array([9, 3, 8, 7, 100, -1])).tolist() == [2, 1, -1, 0, -1, -1]
    starts = np.array([0, 1, 2, 3, 2**31 - 1])
    assert (task_arms(3)(starts) == task_of(starts, 3)).all() and task_arms(3)(np.array([-1])).tolist() == [
        -1
    ]


def test_a_planner_that_was_saved_plans_what_it_would_have_planned():
    for name in NAMES:
        a, b = taught(planner(name)), planner(name)
        first = [a.next(23) for _ in range(3)]
        assert len({g for _, g in first}) >= 1
        b.load_state_dict(a.state_dict())
        assert [a.next(16) for _ in range(20)] == [
            b.next(16) for _ in range(20)
        ] and a.metrics() == b.metrics(), name


# ---- feeds


def make_learner(**kw):
    policy = make_policy(PolicyOptions(horizon=E, execute=E, hidden=32, layers=2), SPEC, 0)
    return pi_rl.make(
        policy,
        PiRlOptions(
            **{"decisions": 0, "advantage": "dr_grpo", "group": G, "epochs": 1, "minibatch": 64} | kw
        ),
        0,
    )


def local(learner, workers=1, staleness=0, lanes=B, source=None):
    o, source = learner.options, source or Pool()
    shape = shape_of(o.allocate, G, o.allocate_most, o.ada_rule)
    planned = PlannedGroups(
        GroupPlanner(
            o.allocate, shape, source, 0, B // G, len(POOL), pool_arms(POOL), spare=o.allocate_most - 1
        )
    )

    def make(i, refresh):
        c = Collector(build(lanes // workers), learner.policy, 0.99, 0, i, source)
        return EpisodeSlots(i, c, learner.policy, refresh, shape.most, shape=shape)

    return InProcessFeed(workers, make, B, staleness, 12, 0, planned)


def rollouts(learner, feed, updates):
    """The rollout of each update, after it."""
    for i in range(updates):
        rollout = feed.next()
        learner.update(rollout, i / 100, feed.version)
        feed.planned.observe([rollout.ended])
        feed.publish()
        feed.ledger.check()
        yield rollout


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_has_the_groups_that_were_planned_and_all_of_a_group_begin_alike(name):
    learner = make_learner(allocate=name)
    feed = local(learner)
    taught(feed.planned.planner)
    unequal = False
    for r in rollouts(learner, feed, 5):
        ids, sizes = r.group[0].unique(return_counts=True)
        assert (r.group == r.group[0]).all() and (ids > 0).all()
        for g in ids:
            assert len(r.start[0, r.group[0] == g].unique()) == 1
            first = r.obs["state"][0, r.group[0] == g]
            assert (first == first[0]).all()
        assert r.done.sum() == r.mask.shape[1]  # every episode is whole
        if name == "ada":
            assert len(ids) == B // G and (sizes % G == 0).all()
        else:
            assert sizes.sum() == B
        unequal |= len(sizes.unique()) > 1
    assert unequal == (name not in ("refill", "broad"))


def test_refill_learns_from_mixed_groups_alone_and_counts_what_it_played():
    learner = make_learner(allocate="refill", allocate_most=100)
    feed, plain = local(learner), 0
    kept, keeps = [], feed.planned.planner.keeps

    def remember(outcome):
        kept.append((outcome, keeps(outcome)))
        return kept[-1][1]

    feed.planned.planner.keeps = remember
    for r in rollouts(learner, feed, 5):
        assert not allocation.flat_groups(r.outcome.view(-1, G).numpy()).any() and r.outcome.numel() == B
        assert r.stats["episodes"] == len(r.ended) == G * len(kept) > B
        outcome = np.stack([x for x, _ in kept])
        # DAPO, arXiv 2503.14476, section 3.2: those that are mixed, until enough are there
        good = ~allocation.flat_groups(outcome)
        assert [k for _, k in kept] == (good & (np.cumsum(good) <= B // G)).tolist() and good.sum() == B // G
        assert r.stats["env_steps"] > float((r.executed * r.mask).sum()) and r.stats[
            "success"
        ] == pytest.approx(outcome.mean())
        plain += len(kept)
        kept.clear()
    assert feed.ledger.refused == 0 and plain > 25


def test_refill_ends_where_all_groups_are_flat():
    learner = make_learner(allocate="refill", allocate_most=3)
    feed = local(learner)
    for w in feed.workers:
        w.collector.env.radius = -1.0  # no episode succeeds
    (r,) = rollouts(learner, feed, 1)
    assert (
        r.stats["episodes"] == 3 * B
        and r.outcome.numel() == B
        and feed.planned.metrics()["replaced"] == pytest.approx(2 / 3)
    )


def test_reinforce_ada_plays_a_start_until_it_has_both_outcomes_or_enough():
    learner = make_learner(allocate="ada", allocate_most=4)
    for r in rollouts(learner, local(learner), 4):
        for g in r.group[0].unique():
            outcome = r.outcome[r.group[0] == g].numpy()
            rounds = [
                allocation.AdaRounds("balance", G, 4 * G).more(outcome[:m])
                for m in range(G, len(outcome) + 1, G)
            ]
            assert rounds[-1] == 0 and all(rounds[:-1])
        adv, _, _, rows, _ = learner.credit.assign(r, learner.policy)
        trained = (adv.view(r.mask.shape) != 0).any(0)
        for g in r.group[0].unique():
            mine = r.group[0] == g
            picked = trained & mine
            assert picked.sum() in (0, G)
            assert torch.allclose(
                adv.view(r.mask.shape)[0, picked], (r.outcome - r.outcome[mine].mean())[picked], atol=1e-6
            )


@pytest.mark.parametrize("name,workers,staleness", [("dars", 1, 0), ("ada", 2, 2), ("refill", 2, 2)])
def test_a_run_repeats_exactly_and_goes_on_exactly_from_what_was_saved(name, workers, staleness):
    from robo_rl.checkpoint import pack, unpack

    ends = []
    for cut in (False, False, True):
        learner = make_learner(allocate=name)
        feed = local(learner, workers, staleness, lanes=6)
        list(rollouts(learner, feed, 3))
        if cut:
            tensors = {}
            saved = unpack(
                pack(
                    {
                        "learner": learner.state_dict(),
                        "feed": feed.state(),
                        "groups": feed.planned.state_dict(),
                    },
                    tensors,
                ),
                tensors,
            )
            policy, learner = learner.policy.state_dict(), make_learner(allocate=name)
            learner.policy.load_state_dict(policy)
            learner.load_state_dict(saved["learner"])
            feed = local(learner, workers, staleness, lanes=6)
            feed.planned.load_state_dict(saved["groups"])
            assert feed.load_state(saved["feed"])
        list(rollouts(learner, feed, 3))
        ends.append(weights(learner))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("name", ["ada", "refill"])
def test_killed_workers_lose_no_group_of_any_size_and_hand_none_over_twice(name, tmp_path):
    learner, control = make_learner(allocate=name), StartControl(Uniform(), 0)
    shape = shape_of(name, G, 4, "balance")
    publish_states(tmp_path, None)
    publish_table(tmp_path, control.table)
    more = {"episode_slots": True, "starts": True, "shape": shape}
    jobs = jobs_of(tmp_path, learner.policy, build, [N // 2] * 2, 2, shape.most, **more)
    rows = rows_of(learner.policy, build(shape.most), starts=control) | group_layout(shape.most)
    planned = PlannedGroups(GroupPlanner(name, shape, control, 0, 8 // G, spare=3))
    feed = WorkerPoolFeed(
        tmp_path, ProcessPool(jobs, learner.policy), [G] * 2, [rows] * 2, 8, 12, 2, group=G, planned=planned
    )
    if name == "ada":
        assert all(s["episodes"] >= 8 for s in train_under_kills(learner, feed, 8))
    else:  # groups that were replaced are in no batch
        try:
            assert sum(s["episodes"] for s in train(learner, feed, 5)) > 40
        finally:
            feed.close()


# ---- the command

GROUPS = ("--rl.advantage", "rloo", "--rl.group", "4", "--rl.decisions", "0")


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--rl.allocate", "dars", *GROUPS], "--starts pool"),
        (["--rl.allocate", "dars"], "goes with rl.advantage grpo or dr_grpo or rloo, got gae"),
        (["--rl.allocate", "ada", *GROUPS], "goes with rl.advantage dr_grpo, got rloo"),
        (
            [
                "--rl.allocate",
                "refill",
                *GROUPS,
                "--periodic",
                "2",
                "--max-staleness",
                "0",
                "--rl.epochs",
                "1",
            ],
            "goes without --server",
        ),
        (["--rl.allocate", "dras", *GROUPS], "dars"),
        (["--rl.allocate", "refill", *GROUPS, "--rl.allocate-most", "1"], "rl.allocate_most"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(argv, says, tmp_path):
    assert says in robo_rl(tmp_path, "train", "--task", "reach", *argv).mistake


def test_a_run_says_where_its_episodes_went(tmp_path):
    tiny = [
        x for pair in zip(TINY[::2], TINY[1::2], strict=False) if pair[0] != "--rl.decisions" for x in pair
    ]
    pool = ("--starts", "pool", "--start-pool", "16", "--start-rows", "8", "--rl.allocate", "dars")
    assert robo_rl(tmp_path, "train", *tiny, "--no-video", *GROUPS, *pool, "--out", "run").code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "groups/number" in r]
    assert rows and all(r["groups/size_mean"] * r["groups/number"] == pytest.approx(16) for r in rows)
    assert sum(rows[-1][f"groups/played_{i}"] for i in range(5)) == pytest.approx(1)
    from robo_rl.report.data import load
    from robo_rl.report.page import page

    assert "Episodes of a start" in page(load(tmp_path / "run"))
