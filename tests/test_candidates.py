"""Candidates that a cheaper policy plays (`--rl.candidates`, Sol-RL): what is kept is played again exactly,
and alone learnt from."""

import itertools
import json

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from feeds import jobs_of, rows_of
from test_episode_slots import E, N, build, gone_on, train_under_kills
from test_runtime import SPEC, weights

from robo_rl.algos import pi_rl
from robo_rl.errors import UserError
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.policies import make_policy
from robo_rl.policies.cheap import CheapPolicy
from robo_rl.policies.policy import ObsSpec
from robo_rl.rollout import Collector
from robo_rl.rollout_control.candidates import extremes, rank_correlation
from robo_rl.runtime.candidates import candidate_layout
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.process_pool import ProcessPool
from robo_rl.runtime.worker_pool import WorkerPoolFeed
from robo_rl.starts import StartTable

G, M, B = 4, 12, 8  # members of a group, its candidates, episodes of a batch
OPTIONS = PolicyOptions(horizon=E, execute=E, hidden=32, layers=2)


class Source:
    stored = None

    def newest(self):
        return StartTable(np.zeros(0, np.int64), np.zeros(0), 1.0)


class Same:
    """A "cheaper" policy that is the policy itself, or with sign -1 its opposite; `acted` counts its rows."""

    def __init__(self, policy, sign=1):
        self.policy, self.sign, self.acted = policy, sign, 0

    def renew(self):
        pass

    def act(self, obs, generator, explore):
        self.acted += len(obs["state"])
        chunk = self.policy.act(obs, generator, explore)
        chunk.actions = chunk.actions * self.sign
        return chunk


def make_learner(policy=OPTIONS, **kw):
    options = {
        "decisions": 0,
        "advantage": "dr_grpo",
        "group": G,
        "epochs": 1,
        "minibatch": 64,
        "candidates": M,
        "candidates_steps": 2,
    }
    return pi_rl.make(make_policy(policy, SPEC, 0), PiRlOptions(**options | kw), 0)


def local(learner, cheap=None, workers=1, staleness=0, lanes=N):
    def make(i, refresh):
        c = Collector(build(lanes // workers), learner.policy, 0.99, 0, i, Source())
        o = learner.options
        return EpisodeSlots(
            i,
            c,
            learner.policy,
            refresh,
            G,
            candidates=M,
            cheap=cheap or CheapPolicy(learner.policy, o.candidates_by, o.candidates_steps),
        )

    return InProcessFeed(workers, make, B, staleness, 12, 0)


def rollouts(learner, feed, updates):
    """(rollout, its groups' columns) of each update, before it; then its metrics."""
    for i in range(updates):
        take, kept = feed.ledger.take, []

        def remember(take=take, kept=kept):
            chosen = take()
            kept.extend(
                {k: v.copy() for k, v in feed.columns[f.slot].items()} | {"rows": f.rows}
                for f in chosen or ()
            )
            return chosen

        feed.ledger.take = remember
        rollout = feed.next()
        feed.ledger.take = take
        yield rollout, kept
        learner.update(rollout, i / 100, feed.version)
        feed.publish()
        feed.ledger.check()


# ---- the choice


def test_the_least_and_the_greatest_are_kept_and_equals_by_number_alone():
    assert extremes(np.array([3.0, 0, 5, 1, 4, 2]), 4).tolist() == [1, 2, 3, 4]
    assert extremes(np.array([0.0, 0, 1, 0, 0, 0]), 4).tolist() == [0, 1, 2, 5]
    assert extremes(np.zeros(6), 3).tolist() == [0, 4, 5]


def test_rank_correlation_is_spearmans():
    a = np.array([1.0, 2, 3, 4, 5])
    assert rank_correlation(a, a**3) == pytest.approx(1) and rank_correlation(a, -a) == pytest.approx(-1)
    # 1 - 6 sum d^2 / (n (n^2 - 1))
    assert rank_correlation(a, np.array([2.0, 1, 4, 3, 5])) == pytest.approx(0.8)
    x, y = np.array([0.0, 0, 1, 1]), np.array([0.0, 1, 1, 1])
    assert (
        rank_correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
        and rank_correlation(x, np.ones(4)) == 0
    )


def expected(p, outcome, m, g):
    """E[1/G sum (R - mean R) grad log pi] over every draw of m of the actions [a] with softmax probabilities
    p, the extremes kept."""
    total = np.zeros(len(p))
    for drawn in itertools.product(range(len(p)), repeat=m):
        a = np.array(drawn)[extremes(outcome[list(drawn)], g)]
        r = outcome[a]
        total += np.prod(p[list(drawn)]) * ((r - r.mean()) @ (np.eye(len(p))[a] - p)) / g
    return total


def test_the_expectation_has_the_direction_of_the_policy_gradient_for_binary_outcomes_alone():
    p = np.array([0.5, 0.2, 0.2, 0.1])

    def cosine(outcome, m, g):
        got, true = expected(p, outcome, m, g), p * (outcome - p @ outcome)
        return got @ true / np.linalg.norm(got) / np.linalg.norm(true)

    for m, g in ((4, 2), (5, 2), (6, 4), (4, 4)):
        assert cosine(np.array([1.0, 0, 1, 0]), m, g) == pytest.approx(1, abs=1e-12)
    assert cosine(np.array([1.0, 0, 0.6, 0.1]), 6, 2) < 0.999


def test_with_both_halves_full_a_start_weighs_as_the_gradient_of_its_log_odds_over_four():
    p, outcome = np.array([0.3, 0.3, 0.4]), np.array([1.0, 0, 0])
    got, success = expected(p, outcome, 8, 2), 0.3
    some = 1 - success**8 - (1 - success) ** 8  # both outcomes are among the candidates
    assert np.allclose(got, some * p * (outcome - success) / (success * (1 - success)) / 4, atol=1e-12)


# ---- the two stages


def test_at_one_fidelity_what_is_played_again_is_what_was_played():
    learner = make_learner()
    same = Same(learner.policy)
    feed, mixed = local(learner, same), 0
    for r, groups in rollouts(learner, feed, 4):
        for c in groups:
            before = {k: c[f"candidate/{k}"][0].reshape(-1) for k in ("success", "returns", "lengths")}
            number = c["candidate/number"][0]
            assert number.tolist() == extremes(before["returns"], G).tolist()
            for k in before:
                assert c[k][c["rows"] - 1].tolist() == before[k][number].tolist()
            mixed += len(set(before["returns"])) > 1
        assert r.stats["candidates/same"] == 1 and r.stats.get("candidates/rank", 1) == pytest.approx(1)
    assert mixed > 2 and same.acted > 0


def test_nothing_of_a_candidate_is_learnt_from_and_the_first_ratio_is_one():
    learner = make_learner()
    feed, disagreed = local(learner, Same(learner.policy, -1)), 0
    for r, groups in rollouts(learner, feed, 4):
        assert r.mask.shape[1] == B and r.done.sum() == B  # the exact episodes, each whole
        t, n = r.mask.shape
        rows = r.mask.flatten()
        context = learner.policy.encode({k: v.flatten(0, 1)[rows] for k, v in r.obs.items()})
        logp = learner.policy.score(context, {k: v.flatten(0, 1)[rows] for k, v in r.trace.items()})[0]
        assert torch.allclose(logp, r.logp.flatten(0, 1)[rows], atol=1e-4)
        for c in groups:  # the same start, and of what is learnt from the outcome of the exact episode
            assert len(np.unique(c["start"][0])) == 1 and (c["obs/state"][0] == c["obs/state"][0, :1]).all()
        outcome = np.concatenate([c["returns"][c["rows"] - 1] for c in groups])
        assert np.array_equal(r.outcome.numpy(), outcome.astype(np.float32))
        disagreed += (
            outcome
            != np.concatenate(
                [c["candidate/returns"][0].reshape(-1)[c["candidate/number"][0]] for c in groups]
            )
        ).sum()
        metrics = learner.credit.assign(r, learner.policy)[4]
        assert "flat_groups" in metrics
    assert disagreed > 0  # who played candidates is another policy


def test_success_is_that_of_the_candidates_and_every_step_counts():
    learner = make_learner()
    for r, groups in rollouts(learner, local(learner), 3):
        won = np.stack([c["candidate/success"][0] for c in groups])
        steps = sum(int(c["candidate/lengths"][0].sum()) for c in groups)
        exact = float((r.executed * r.mask).sum())
        assert r.stats["episodes"] == won.size == B // G * M and r.stats["success"] == pytest.approx(
            won.mean()
        )
        assert r.stats["env_steps"] == steps + exact and r.stats["candidates/steps"] == pytest.approx(
            steps / (steps + exact)
        )
        assert (
            len(r.ended) == won.size and r.ended.success.sum() == won.sum() and r.ended.lengths.sum() == steps
        )
        assert set(r.ended.starts.tolist()) == {int(s) for c in groups for s in c["start"][0]}
        assert r.stats["candidates/again"] == pytest.approx(float(r.success.float().mean()))


def test_more_candidates_leave_fewer_groups_flat():
    flat = {}
    for m in (0, M):
        learner = make_learner(candidates=m)
        feed = (
            local(learner, Same(learner.policy))
            if m
            else InProcessFeed(
                1,
                lambda i, refresh, learner=learner: EpisodeSlots(
                    i, Collector(build(N), learner.policy, 0.99, 0, i), learner.policy, refresh, G
                ),
                B,
                0,
                12,
                0,
            )
        )
        outcomes = []
        for _ in range(8):
            outcomes.append(feed.next().outcome.view(-1, G))
            feed.publish()
        x = torch.cat(outcomes)
        flat[m] = float((x == x[:, :1]).all(1).float().mean())
    assert flat[M] < flat[0]


@pytest.mark.parametrize("workers, staleness", [(1, 0), (2, 2)])
def test_a_run_repeats_exactly_and_goes_on_exactly_from_what_was_saved(workers, staleness):
    ends = []
    for cut in (False, False, True):
        learner = make_learner()
        feed = local(learner, None, workers, staleness, 10)
        list(rollouts(learner, feed, 3))
        if cut:
            learner, feed = gone_on(
                learner, feed, make_learner, lambda learner: local(learner, None, workers, staleness, 10)
            )
        list(rollouts(learner, feed, 3))
        ends.append(weights(learner))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_killed_workers_lose_no_group_and_hand_none_over_twice(tmp_path):
    learner = make_learner()
    jobs = jobs_of(
        tmp_path, learner.policy, build, [N // 2] * 2, 2, G, episode_slots=True, choose=learner.options
    )
    rows = rows_of(learner.policy, build(G)) | candidate_layout(G, M)
    feed = WorkerPoolFeed(tmp_path, ProcessPool(jobs, learner.policy), [G] * 2, [rows] * 2, B, 12, 2, group=G)
    assert all(s["episodes"] >= B // G * M for s in train_under_kills(learner, feed, 8))


# ---- the cheaper policy

SEEN = {"state": torch.linspace(-1, 1, 20).view(5, 4)}


def act(policy, seed=0):
    return policy.act(SEEN, torch.Generator().manual_seed(seed), True).actions


def test_fewer_steps_are_those_of_a_policy_made_with_fewer():
    policy = make_policy(OPTIONS, SPEC, 0)
    few = make_policy(PolicyOptions(horizon=E, execute=E, hidden=32, layers=2, denoise_steps=2), SPEC, 1)
    few.load_state_dict(policy.state_dict())
    few.draws = torch.tensor([0, 0, 1, 1])  # noise of steps 0 and 1 of four is that of step 0 of two
    cheap, before = CheapPolicy(policy, "steps", 2), act(policy)
    assert torch.equal(act(cheap), act(few)) and not torch.equal(act(cheap), before)
    assert torch.equal(act(policy), before) and policy.options.denoise_steps == 4


@pytest.mark.parametrize("by, off", [("bf16", 0.01), ("int8", 0.05)])
def test_low_precision_is_near_shares_every_other_tensor_and_follows_the_weights(by, off):
    policy = make_policy(OPTIONS, SPEC, 0)
    cheap, before = CheapPolicy(policy, by), act(policy)
    own = dict(cheap.copy.named_parameters())
    assert all(own[name] is p for name, p in policy.named_parameters())
    assert 0 < (act(cheap) - before).abs().max() < off
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    stale = act(cheap)
    cheap.renew()
    moved = act(policy)
    assert (act(cheap) - moved).abs().max() < 0.2 * (stale - moved).abs().max()


def test_an_int8_product_is_that_of_the_rounded_numbers():
    from robo_rl.policies.cheap import Int8Linear, quantised

    layer = torch.nn.Linear(48, 16)
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    exact = layer(x).detach()
    layer.__class__ = Int8Linear
    layer.take(layer._parameters["weight"].detach())
    q, s = quantised(x.view(15, 48))
    by_hand = (q * s) @ layer.weight.t() + layer.bias
    with torch.no_grad():
        assert (
            torch.allclose(layer(x).view(15, 16), by_hand, atol=1e-6)
            and (layer(x) - exact).abs().max() < 0.03
        )
    assert (x.view(15, 48) - q * s).abs().max() <= 0.5001 * s.max() and q.abs().max() == 127


def test_adapters_are_part_of_what_is_rounded():
    from robo_rl.options import LoraOptions

    policy = make_policy(
        PolicyOptions(horizon=E, execute=E, hidden=32, layers=2, lora=LoraOptions(rank=2, targets=("head",))),
        SPEC,
        0,
    )
    cheap, base = CheapPolicy(policy, "int8"), act(policy)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.add_(0.2)
    cheap.renew()
    moved = act(policy)
    assert (act(cheap) - moved).abs().max() < 0.3 * (moved - base).abs().max()


@pytest.mark.parametrize("by", ["steps", "bf16", "int8"])
def test_a_vision_language_action_model_plays_candidates(by):
    spec = ObsSpec(state=4, action=2, views=("front",), image_size=32, language=True, text=64)
    policy = make_policy(
        PolicyOptions(kind="pi05", size="tiny", horizon=4, execute=2, denoise_steps=4), spec, 0
    ).eval()
    obs = {
        "state": torch.zeros(2, 4),
        "tokens": torch.zeros(2, 64, dtype=torch.uint8),
        "image/front": torch.randint(
            0, 255, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        ),
    }

    def acts(p):
        return p.act(obs, torch.Generator().manual_seed(0), True).actions

    exact, cheap = acts(policy), acts(CheapPolicy(policy, by, 2))
    assert (
        cheap.shape == exact.shape
        and 0 < (cheap - exact).abs().max() < 0.5
        and torch.equal(acts(policy), exact)
    )


def test_what_cannot_be_cheaper_is_said():
    with pytest.raises(UserError, match="goes with policies that are flows, got policy.kind gaussian"):
        CheapPolicy(make_policy(PolicyOptions(kind="gaussian"), SPEC, 0), "steps", 2)
    with pytest.raises(UserError, match="at least 2 with policy.noise sde"):
        CheapPolicy(make_policy(OPTIONS, SPEC, 0), "steps", 1)
    with pytest.raises(UserError, match="below policy.denoise_steps 4, got 4"):
        CheapPolicy(make_policy(OPTIONS, SPEC, 0), "steps", 4)
    with pytest.raises(UserError, match="must divide policy.denoise_steps 4"):
        CheapPolicy(make_policy(PolicyOptions(predict="action"), SPEC, 0), "steps", 3)


# ---- the command

GROUPS = ("--rl.advantage", "rloo", "--rl.group", "4", "--rl.decisions", "0")


@pytest.mark.parametrize(
    "argv, says",
    [
        (
            ["--rl.candidates", "16"],
            "goes with rl.advantage grpo or dr_grpo or rloo and rl.allocate fixed, got gae and fixed",
        ),
        (["--rl.candidates", "10", *GROUPS], "a multiple of rl.group 4"),
        (["--rl.candidates", "4", *GROUPS], "a multiple of rl.group 4, twice as many or more"),
        (["--rl.candidates", "16", *GROUPS, "--rl.candidates-by", "fp8"], "fp8"),
        (["--rl.candidates", "16", *GROUPS, "--rl.candidates-steps", "9"], "below policy.denoise_steps"),
        (
            ["--rl.candidates", "16", *GROUPS, "--server", "--workers", "1"],
            "--rl.candidates goes without --server",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(argv, says, tmp_path):
    assert says in robo_rl(tmp_path, "train", "--task", "reach", *argv).mistake


@pytest.mark.parametrize("by", ["steps", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_run_with_candidates_says_how_they_and_what_was_played_again_did(by, tmp_path):
    result = robo_rl(
        tmp_path, "train", *TINY, *GROUPS, "--rl.candidates", "8", "--rl.candidates-by", by, "--out", "run"
    )
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "candidates/again" in r]
    assert rows and all(
        0 < r["candidates/steps"] < 1 and r["train/first_log_ratio"] < 1e-3
        for r in rows
        if "train/first_log_ratio" in r
    )
    assert all(r["train/episodes"] % 8 == 0 for r in rows)
