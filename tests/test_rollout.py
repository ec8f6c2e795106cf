import numpy as np
import torch
from toys import PointReach

from robo_rl.evaluation import evaluate
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy, obs_tensors
from robo_rl.rollout import Collector, run_chunk
from robo_rl.starts import eval_starts

GAMMA = 0.9


def setup(n=16, execute=4, seed=0, **kw):
    env = PointReach(n, **kw)
    policy = make_policy(
        PolicyOptions(horizon=4, execute=execute, hidden=32, layers=2), ObsSpec(state=4, action=2), 0
    )
    return env, policy, Collector(env, policy, GAMMA, seed)


def test_a_chunk_discounts_inside_and_stops_counting_where_the_env_is_over():
    env = PointReach(2, limit=50)
    env.reset(seed=0)
    env.pos[:], env.goal[:] = 0, [[0.45, 0.0], [5.0, 5.0]]
    actions = np.tile(np.array([1.0, 0.0], np.float32), (2, 4, 1))
    obs, reward, raw, terminated, truncated, success, steps = run_chunk(env, actions, GAMMA)
    assert terminated.tolist() == [True, False] and not truncated.any() and success.tolist() == [True, False]
    assert steps.tolist() == [2, 4] and np.allclose(reward, [GAMMA, 0]) and raw.tolist() == [1, 0]


def test_discounts_are_gamma_to_the_steps_taken_and_zero_only_where_terminated():
    env, policy, collector = setup(limit=6)
    r = collector.collect(policy, 12)
    over = r.done
    ended = r.discounts == 0
    assert (ended <= over).all() and over.sum() > ended.sum() > 0  # some time limits, some successes
    power = torch.full_like(r.discounts, GAMMA) ** r.executed
    assert torch.allclose(r.discounts[~ended], power[~ended])
    assert ((r.rewards > 0) == ended).all()


def test_the_final_observation_is_the_one_the_episode_ended_in():
    env, policy, collector = setup(limit=6)
    r = collector.collect(policy, 8)
    where = r.done.nonzero()
    assert len(r.final_obs["state"]) == len(where) > 0
    for row, (t, n) in zip(r.final_obs["state"], where, strict=False):
        nxt = r.obs["state"][t + 1, n] if t + 1 < 8 else r.last_obs["state"][n]
        assert not torch.equal(row, nxt)  # the next observation is the new episode's
        if r.discounts[t, n] == 0:
            assert float(row[2:].norm()) < 0.1  # terminated: it is at the goal


def test_successor_observations_follow_each_other_where_nothing_ended():
    env, policy, collector = setup(limit=60)
    a = collector.collect(policy, 5)
    b = collector.collect(policy, 5)
    assert torch.equal(a.last_obs["state"], b.obs["state"][0])


def test_the_same_seed_gives_the_same_rollout():
    runs = []
    for _ in range(2):
        _, policy, collector = setup()
        runs.append(collector.collect(policy, 6))
    assert torch.equal(runs[0].rewards, runs[1].rewards) and torch.equal(runs[0].logp, runs[1].logp)
    assert torch.equal(runs[0].obs["state"], runs[1].obs["state"])


def test_a_collector_restored_from_its_state_goes_on_identically():
    _, policy, first = setup()
    first.collect(policy, 3)
    state = first.state()
    a = first.collect(policy, 4)
    _, _, second = setup()
    second.collect(policy, 2)
    second.set_state(state)
    b = second.collect(policy, 4)
    assert torch.equal(a.obs["state"], b.obs["state"]) and torch.equal(a.rewards, b.rewards)
    assert a.stats == b.stats


def test_whole_episodes_mask_what_follows_their_end_and_members_share_their_start():
    env, policy, collector = setup(n=8, limit=12)
    starts = np.repeat([5, 9], 4)
    r = collector.episodes(policy, starts)
    assert torch.equal(r.obs["state"][0, :4], r.obs["state"][0, :1].expand(4, -1))
    assert (r.mask.int().diff(dim=0) <= 0).all()
    assert (r.done & r.mask).sum() == 8
    assert torch.equal((r.rewards > 0).any(0), r.outcome > 0)
    assert r.stats["episodes"] == 8


def test_evaluation_is_the_same_twice_and_counts_each_start_once():
    env, policy, _ = setup(n=6)
    a, b = (evaluate(env, policy, eval_starts(10)) for _ in range(2))
    assert a == b and len(a["success"]) == 10
    shorter = evaluate(env, policy, eval_starts(6))
    assert shorter["success"] == a["success"][:6]


def test_a_good_policy_is_seen_as_good():
    class Expert:
        spec, options = ObsSpec(state=4, action=2), PolicyOptions(horizon=1, execute=1)

        def act(self, obs, generator, explore):
            from robo_rl.policies import Chunk

            a = (obs["state"][:, None, 2:] / 0.2 * 0.7).clamp(-1, 1)
            return Chunk(a, a, a[:, :0, 0], {})

    result = evaluate(PointReach(10), Expert(), eval_starts(20))
    assert sum(result["success"]) == 20 and set(result["task"]) == {"reach the goal"}


def test_only_policies_that_listen_get_tokens():
    obs = {"state": np.zeros((2, 4), np.float32), "task": np.array(["a b", "c"])}
    assert "tokens" not in obs_tensors(obs, ObsSpec(state=4, action=2))
    assert obs_tensors(obs, ObsSpec(state=4, action=2, language=True))["tokens"].shape[0] == 2
