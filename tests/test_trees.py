"""Groups that are trees: what the episode slots play, fork and stop is what the credit's equations speak
of."""

import numpy as np
import pytest
import torch
from feeds import jobs_of, rows_of
from test_episode_slots import gone_on, train_under_kills
from test_runtime import SPEC, train, weights
from toys import PointReach

from robo_rl.advantages import group_advantage
from robo_rl.algos import pi_rl
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import check
from robo_rl.noise import mix
from robo_rl.options import PiRlOptions, PolicyOptions, PpoOptions
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector
from robo_rl.rollout_control import trees
from robo_rl.rollout_control.prune import LOW, Calibration, SuccessHead, survival
from robo_rl.rollout_control.trees import TreeControl
from robo_rl.runtime.branches import make_control, tree_layout
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.process_pool import ProcessPool
from robo_rl.runtime.worker_pool import WorkerPoolFeed
from robo_rl.tree_credit import Branches, credit, leaf_weights

G, N, E, LIMIT = 8, 16, 2, 24


def build(n):
    return PointReach(n, limit=LIMIT, radius=0.4)


def options(**kw):
    return PiRlOptions(
        **{
            "decisions": 0,
            "advantage": "tree",
            "group": G,
            "tree_roots": 2,
            "tree_forks": 2,
            "epochs": 1,
            "minibatch": 64,
        }
        | kw
    )


def make_learner(**kw):
    policy = make_policy(PolicyOptions(horizon=E, execute=E, hidden=32, layers=2), SPEC, 0)
    return pi_rl.make(policy, options(**kw), 0)


def local(learner, workers=1, staleness=0, batch=16, lanes=N, warmup=trees.WARMUP):
    def make(i, refresh):
        c = Collector(build(lanes // workers), learner.policy, 0.99, 0, i)
        return EpisodeSlots(
            i, c, learner.policy, refresh, G, control=TreeControl(learner.options, LIMIT // E, 4, i, warmup)
        )

    return InProcessFeed(workers, make, batch, staleness, LIMIT // E, 0)


def groups(learner, feed, updates):
    """(uid, worker, rows, columns) of every group of some updates."""
    out, take = [], feed.ledger.take

    def remember():
        chosen = take()
        out.extend(
            (f.uid, f.worker, f.rows, {k: v.copy() for k, v in feed.columns[f.slot].items()})
            for f in chosen or ()
        )
        return chosen

    feed.ledger.take = remember
    train(learner, feed, updates)
    return out


def branches(c):
    """The tree of one group's columns."""
    made = (c["tree/weight"] > 0).sum(0)
    ended = c["done"].any(0)
    last = np.maximum(made - 1, 0)
    return Branches(
        c["tree/parent"][0],
        c["tree/row"][0],
        made,
        ended,
        c["returns"][last, np.arange(G)],
        c["tree/keep"],
        c["tree/guess"],
    )


def path(c, m):
    """[(member, row)] of the decisions from the start to the last of branch m."""
    rows = [(m, t) for t in range(int((c["tree/weight"][:, m] > 0).sum()))]
    while c["tree/parent"][0, m] >= 0:
        m, row = int(c["tree/parent"][0, m]), int(c["tree/row"][0, m])
        rows = [(m, t) for t in range(row)] + rows
    return rows


@pytest.mark.parametrize("workers,staleness", [(1, 0), (2, 2)])
def test_every_branch_is_what_the_actions_along_its_path_do_from_its_groups_start(workers, staleness):
    learner = make_learner()
    forked = 0
    for uid, worker, rows, c in groups(learner, local(learner, workers, staleness), 4):
        tree = branches({k: v[:rows] for k, v in c.items()})
        forked += int((tree.parent[tree.made > 0] >= 0).sum())
        assert (tree.parent[:2] == -1).all() and tree.ended[tree.made > 0].all()
        for m in np.flatnonzero(tree.made):
            env, total = build(1), 0.0
            obs, _ = env.reset(options={"starts": np.array([mix(0, 5, worker, uid, 0) >> 32])})
            for j, t in path({k: v[:rows] for k, v in c.items()}, m):
                assert np.array_equal(c["obs/state"][t, j], obs["state"][0])
                action = learner.policy.commands(torch.from_numpy(c["x0"][t, j : j + 1]).flatten(1)).numpy()
                for e in range(E):
                    obs, reward, *_ = env.step(action[:, e])
                    total += float(reward[0])
            last = int(tree.made[m]) - 1
            assert (
                np.array_equal(c["final/state"][last, m], obs["state"][0]) and c["returns"][last, m] == total
            )
            assert c["lengths"][last, m] == env.t[0]
    assert forked > 10


def test_the_weights_that_are_written_are_those_of_the_equations_and_success_is_their_mean():
    learner = make_learner(prune=0.5, prune_at=0.2)
    control = Always(learner.options)
    feed = InProcessFeed(
        1,
        lambda i, refresh: EpisodeSlots(
            i, Collector(build(N), learner.policy, 0.99, 0, i), learner.policy, refresh, G, control=control
        ),
        16,
        0,
        LIMIT // E,
        0,
    )
    stopped, won, told = 0, [], []
    for _ in range(4):
        batch = []
        rollout = feed.next()
        for i in range(0, rollout.mask.shape[1], G):
            c = {
                "mask": rollout.mask,
                "done": rollout.done,
                **{f"tree/{k}": v for k, v in rollout.tree.items()},
            }
            c = {k: v.numpy()[:, i : i + G] for k, v in c.items()}
            tree = branches(
                c | {"returns": np.repeat(rollout.outcome.numpy()[None, i : i + G], len(c["mask"]), 0)}
            )
            weight = credit(tree)[1]
            assert np.allclose(weight[c["mask"]], c["tree/weight"][c["mask"]])
            stopped += int((~tree.ended & (tree.made > 0)).sum())
            batch.append((leaf_weights(tree, weight), tree.outcome))
        w, x = (np.concatenate(z) for z in zip(*batch, strict=True))
        won.append((w * x).sum() / w.sum())
        told.append(rollout.stats["return"])
        learner.update(rollout, 0.0, feed.version)
        feed.publish()
    assert stopped > 3 and np.allclose(won, told)


class Always(TreeControl):
    """Forks after the first decision and gates after the second, whatever it knows."""

    def __init__(self, rl):
        super().__init__(rl, LIMIT // E, 4, 0)

    def look(self, state, depth, since):
        n = len(depth)
        keep = np.where(depth == 2, 0.6, 1.0)
        return trees.Branching(keep, np.full(n, 0.3), np.where(depth == 1, 2, 1))


def test_a_learner_without_forks_takes_the_steps_that_rloo_takes():
    ends = []
    for name in ("tree", "rloo"):
        learner = make_learner(tree_forks=0, advantage=name)
        control = (
            make_control(learner.options, Collector(build(N), learner.policy, 0.99, 0))
            if name == "tree"
            else None
        )
        feed = InProcessFeed(
            1,
            lambda i, refresh, p=learner.policy, c=control: EpisodeSlots(
                i, Collector(build(N), p, 0.99, 0, i), p, refresh, G, control=c
            ),
            16,
            0,
            LIMIT // E,
            0,
        )
        train(learner, feed, 3)
        ends.append(weights(learner))
    assert torch.allclose(ends[0], ends[1], atol=1e-6)  # one adds up in 64 bits


def test_the_learners_advantage_is_the_weighted_one_over_the_mean_weight():
    learner = make_learner()
    feed = local(learner)
    rollout = feed.next()
    adv, _, _, rows, metrics = learner.credit.assign(rollout, learner.policy)
    weight = rollout.tree["weight"].float()
    c = {f"tree/{k}": v.numpy()[:, :G] for k, v in rollout.tree.items()} | {
        "mask": rollout.mask.numpy()[:, :G],
        "done": rollout.done.numpy()[:, :G],
    }
    tree = branches(c | {"returns": np.repeat(rollout.outcome.numpy()[None, :G], len(c["mask"]), 0)})
    a, w = credit(tree, learner.options.tree_prior)
    assert np.allclose(
        adv.view(rollout.mask.shape)[:, :G], a * w / weight[rollout.mask].mean().item(), atol=1e-5
    )
    assert (adv[rows] != 0).all() and metrics["branches"] > 2
    outcome = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    assert torch.allclose(
        torch.from_numpy(
            credit(
                Branches(
                    np.full(4, -1),
                    np.zeros(4, int),
                    np.ones(4, int),
                    np.ones(4, bool),
                    outcome[0].numpy(),
                    np.ones((1, 4)),
                    np.zeros((1, 4)),
                )
            )[0]
        ).float(),
        group_advantage(outcome, "rloo"),
    )


@pytest.mark.parametrize("extra", [{}, {"prune": 0.6, "tree_where": "uncertain"}], ids=["even", "uncertain"])
def test_a_run_repeats_exactly_and_goes_on_exactly_from_what_was_saved(extra):
    ends, waiting = [], 0
    for cut in (False, False, True):
        learner = make_learner(**extra)
        feed = local(learner, 2, 2, lanes=6, warmup=8)
        train(learner, feed, 4)
        if cut:
            waiting = sum(len(g.tree.waiting) for w in feed.workers for g in w.groups.values())
            learner, feed = gone_on(
                learner,
                feed,
                lambda: make_learner(**extra),
                lambda learner: local(learner, 2, 2, lanes=6, warmup=8),
            )
        train(learner, feed, 4)
        ends.append(weights(learner))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert waiting or extra  # snapshots that waited for an env went through the checkpoint


def test_killed_workers_lose_no_tree_and_hand_none_over_twice(tmp_path):
    learner = make_learner()
    jobs = jobs_of(
        tmp_path, learner.policy, build, [N // 2] * 2, 2, G, episode_slots=True, tree=learner.options
    )
    rows = rows_of(learner.policy, build(G)) | tree_layout(G)
    feed = WorkerPoolFeed(
        tmp_path, ProcessPool(jobs, learner.policy), [G] * 2, [rows] * 2, 16, LIMIT // E, 2, group=G
    )
    assert all(s["episodes"] >= 4 for s in train_under_kills(learner, feed, 8))


def test_a_sim_without_snapshots_and_runs_that_cannot_fork_are_refused():
    class Blind(PointReach):
        def __getattribute__(self, name):
            if name in ("get_state", "set_state"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    learner = make_learner()
    with pytest.raises(UserError, match="get_state"):
        make_control(learner.options, Collector(Blind(4), learner.policy, 0.99, 0))
    assert make_control(options(tree_forks=0), Collector(Blind(4), learner.policy, 0.99, 0)).roots == G
    with pytest.raises(UserError, match="tree_roots"):
        options(tree_roots=9)
    with pytest.raises(UserError, match="rl.prune goes with"):
        PpoOptions(decisions=0, advantage="rloo", prune=0.5)
    for kw in ({"server": True}, {"periodic": 1}, {"learners": 2}, {"dream": 0.5}):
        with pytest.raises(UserError, match="advantage tree goes without"):
            check(TrainConfig(algo="pi_rl", rl=options(), envs=16, workers=1, **kw))


# ---- rules and gates ---------------------------------------------------------------------------------------


def test_even_depths_cut_an_episode_into_equal_parts():
    assert (
        trees.even_depths(1, 12) == [6]
        and trees.even_depths(2, 12) == [4, 8]
        and trees.even_depths(3, 2) == [1, 2]
    )
    assert trees.even_depths(0, 9) == []


@pytest.mark.parametrize("rule", ["arrol", "certain"])
def test_the_mean_survival_is_what_was_asked_for_and_lies_within_its_bounds(rule):
    q = np.random.default_rng(0).beta(0.7, 0.7, 400)
    for keep in (0.3, 0.5, 0.7):
        p = survival(q, q, keep, rule)
        assert (
            p.mean() == pytest.approx(keep, abs=1e-3)
            and p.min() >= LOW
            and p.max() <= (0.9 if rule == "arrol" else 1)
        )
    order = np.argsort(q)
    if rule == "arrol":  # likely successes go first
        assert (np.diff(survival(q, q, 0.5, rule)[order]) <= 1e-12).all()
        assert survival(np.array([0.5]), np.full(9, 0.5), 0.5, rule)[0] == pytest.approx(0.5)
    else:  # both ends alike
        assert np.allclose(survival(q, q, 0.5, rule), survival(1 - q, q, 0.5, rule))
        assert survival(np.array([0.5]), q, 0.5, rule) > survival(np.array([0.05]), q, 0.5, rule)


def test_of_two_rules_with_one_mean_the_one_that_stops_what_is_certain_adds_less_variance():
    q = np.random.default_rng(1).beta(0.5, 0.5, 2000)
    added = {}
    for rule in ("arrol", "certain"):
        p = survival(q, q, 0.5, rule)
        # variance of guess + passed (R - guess)/p, less that of R
        added[rule] = float((q * (1 - q) * (1 / p - 1)).mean())
    assert added["certain"] < 0.6 * added["arrol"]


def test_calibration_moves_a_wrong_prediction_to_what_happened_and_leaves_an_unseen_one():
    cal, rng = Calibration(16, 1.0), np.random.default_rng(0)
    assert np.allclose(cal(np.array([0.2, 0.9])), [0.2, 0.9])
    for _ in range(50):
        raw = rng.random(40)
        cal.observe(raw, rng.random(40) < raw**2)  # too hopeful
    raw = np.linspace(0.03, 0.97, 16)
    assert np.abs(cal(raw) - raw**2).max() < 0.12 and np.abs(raw - raw**2).max() > 0.2


def test_the_head_learns_who_will_succeed_and_repeats_bit_for_bit_from_its_state():
    rng, heads = np.random.default_rng(0), [SuccessHead(4, 3), SuccessHead(4, 3)]
    for i in range(200):
        state = rng.normal(size=(5, 4))
        state[:, 0] = rng.normal()
        for head in heads:
            head.observe(state, np.linspace(0, 0.8, 5), bool(state[0, 0] > 0), 1.0)
            head.learn(4)
        if i == 100:
            copy = SuccessHead(4, 3)
            copy.load_control_state(heads[1].control_state())
            heads[1] = copy
    test = np.zeros((2, 4))
    test[:, 0] = 1.5, -1.5
    p = [head.raw(test, np.full(2, 0.5)) for head in heads]
    assert p[0][0] > 0.9 and p[0][1] < 0.1 and np.array_equal(p[0], p[1])


def test_nothing_is_stopped_before_the_head_has_seen_enough():
    control = TreeControl(options(prune=0.3, prune_at=0.25), 12, 4, 0)
    state, depth = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), np.full(6, 3)
    assert (control.look(state, depth, depth).keep == 1).all()
    for i in range(trees.WARMUP):
        control.over(state[:3], 9, i % 2 == 0, float(i % 2 == 0), 1.0)
    seen = control.look(state, depth, depth)
    assert control.length == pytest.approx(12) and (seen.keep < 1).all() and (seen.guess > 0).all()
    assert (control.look(state, depth + 1, depth).keep == 1).all()
