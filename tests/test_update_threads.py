"""The update of a rollout: actor and critic side by side, with the arithmetic of one after the other."""

import pytest
import torch
from toys import PointReach

from robo_rl.algos import onpolicy, ppo
from robo_rl.options import PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector


@pytest.fixture(autouse=True)
def one_thread_before_and_after():
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def learner_and_rollout(language=False, **kw):
    env = PointReach(16, limit=12)
    policy = make_policy(
        PolicyOptions(kind="gaussian", hidden=32, layers=2, horizon=4, execute=4),
        ObsSpec(state=4, action=2, language=language),
        0,
    )
    options = PpoOptions(**({"decisions": 12, "epochs": 3, "minibatch": 64, "critic_warmup": 0} | kw))
    rollout = Collector(env, policy, options.gamma, 0).collect(policy, 12)
    return ppo.make(policy, options, 0), rollout


def weights(learner):
    return torch.cat(
        [p.detach().flatten() for m in (learner.policy, learner.credit.critic) for p in m.parameters()]
    )


@pytest.mark.parametrize("kw", [{}, {"critic_warmup": 5}, {"language": True}, {"target_kl": 1e-4}], ids=str)
def test_two_threads_make_the_update_of_one(kw):
    results = []
    for threads in (1, 2):
        learner, rollout = learner_and_rollout(**kw)
        torch.set_num_threads(threads)
        metrics = [learner.update(rollout, 0.1) for _ in range(2)]
        torch.set_num_threads(1)
        results.append((weights(learner), metrics))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_a_stop_by_kl_ends_the_critics_steps_with_the_actors():
    learner, rollout = learner_and_rollout(target_kl=1e-9, epochs=6)
    steps = []
    step = learner.credit.step
    learner.credit.step = lambda *a: steps.append(1) or step(*a)
    metrics = learner.update(rollout, 0.1)
    assert metrics["epochs"] == 1.0 and 1 <= len(steps) <= 3


def test_a_small_remainder_takes_no_step():
    columns, order = {"x": torch.arange(20)}, torch.randperm(20)
    sizes = [len(b) for b, row in onpolicy.minibatches(columns, order, 8) if torch.equal(row["x"], b)]
    assert sizes == [8, 8, 4]
    assert [len(b) for b, _ in onpolicy.minibatches(columns, order[:19], 8)] == [8, 8]
    assert [len(b) for b, _ in onpolicy.minibatches(columns, order[:3], 8)] == [3]


def test_an_error_in_either_job_is_raised_and_the_threads_are_as_before():
    def fails():
        raise RuntimeError("lost")

    torch.set_num_threads(2)
    for jobs in ((fails, lambda: None), (lambda: None, fails)):
        with pytest.raises(RuntimeError, match="lost"):
            onpolicy.beside(*jobs)
        assert torch.get_num_threads() == 2
