"""RL while inference takes time: what is given to a chunk, what of it counts, and that time is kept."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import TINY
from test_runtime import SPEC, N, T, build, local, processes, train, weights
from toys import PointReach

from robo_rl import checkpoint
from robo_rl.algos import nft, pi_rl, reinflow
from robo_rl.checkpoint import pack, unpack
from robo_rl.cli import main
from robo_rl.cli.train import parse
from robo_rl.errors import UserError
from robo_rl.experiment.evaluation import EvalConfig, as_trained, evaluate_checkpoint
from robo_rl.experiment.latency import periods, with_latency
from robo_rl.experiment.train import resume
from robo_rl.experiment.train import train as train_run
from robo_rl.options import NftOptions, PiRlOptions, PolicyOptions, ReinFlowOptions
from robo_rl.policies import make_policy
from robo_rl.policies.committed import ROWS, seen
from robo_rl.policies.context import COUNT, GIVEN, PREFIX, Context
from robo_rl.policies.guided import committed_chunk
from robo_rl.rollout import Collector, new_columns
from robo_rl.runtime.rollout_buffer import Lease
from robo_rl.runtime.worker import Worker

H, E, LEAST, MOST, A = 9, 4, 1, 3, 2
LATE = PolicyOptions(horizon=H, execute=E, commit=MOST, commit_least=LEAST, hidden=32, layers=2)
KINDS = {
    "sde": {},
    "window": {"window": 2},
    "cps": {"noise": "cps"},
    "every step": {"noise_steps": "all"},
    "mean": {"logp_reduction": "mean"},
    "learned": {"noise": "learned", "noise_steps": "all", "noise_max": 0.3},
    "default": {
        "noise": "learned",
        "noise_steps": "last",
        "predict": "action",
        "noise_min": 0.2,
        "noise_max": 0.3,
    },
}


def late_policy(**options):
    policy = make_policy(replace(LATE, **options), SPEC, 0)
    with torch.no_grad():
        policy.head.out.weight.mul_(8.0)  # else an untrained chunk hardly depends on what is given
        policy.head.out.bias.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(0))
        policy.action_norm.mean.copy_(torch.tensor([0.2, -0.1]))
        policy.action_norm.std.copy_(torch.tensor([0.5, 0.6]))
    return policy


def late_obs(n=64, least=-MOST, seed=0):
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(least, MOST + 1, (n,), generator=g)
    given = 0.5 * torch.randn(n, MOST, A, generator=g) * (torch.arange(MOST) < count[:, None])[..., None]
    return {"state": torch.randn(n, 4, generator=g), GIVEN: given, COUNT: count}


def late_learner(group=0, **kw):
    options = {"decisions": T, "epochs": 2, "minibatch": 64, "critic_warmup": 0} | kw
    if group:
        options |= {"decisions": 0, "advantage": "grpo", "group": group}
    return pi_rl.make(late_policy(), PiRlOptions(**options), 0)


# ---- what runs ---------------------------------------------------------------------------------------------


class SlowRobot:
    """One robot, period by period: it asks every E rows, goes on with the rows that it has, and takes the
    answer when it comes."""

    def __init__(self, late):
        self.late, self.row, self.chunk, self.coming, self.waits = late, 0, None, None, 0

    def ask(self, chunk, count):
        """chunk [H,A]; count: rows of the running one that run meanwhile, at most, or minus the periods
        before there is one."""
        if count < 0:
            self.chunk, self.row = None, 0
        self.coming, self.waits = chunk, -count if count < 0 else int(self.late.integers(0, count + 1))
        self.ran = 0  # rows since it asked

    def act(self):
        if self.coming is not None and self.waits == 0:
            self.chunk, self.row, self.coming = self.coming, self.ran, None
        self.waits -= 1
        if self.chunk is None:
            return np.zeros(A)
        action = self.chunk[self.row]
        self.row, self.ran = self.row + 1, self.ran + 1
        return action


def test_rollouts_play_what_a_robot_plays_that_goes_on_while_it_waits_for_each_answer():
    """Whenever within the given rows the answer comes: the period-by-period robot sees and earns what the
    rollout says."""
    policy, env, late = late_policy(), PointReach(3, limit=30, radius=0.3), np.random.default_rng(0)
    r = Collector(PointReach(3, limit=30, radius=0.3), policy, 0.9, 5).collect(policy, 24)
    commands = policy.action_norm.inverse(r.x0).numpy()
    obs, _ = env.reset(seed=5)
    robots, first = [SlowRobot(late) for _ in range(3)], np.ones(3, bool)
    episodes, early = 0, 0
    for t in range(24):
        assert np.array_equal(obs["state"], r.obs["state"][t])
        given = r.obs[COUNT][t].numpy()
        assert (given[first] < 0).all() and (given[~first] > 0).all() and set(np.abs(given)) <= {1, 2, 3}
        for i, robot in enumerate(robots):
            robot.ask(commands[t, i], given[i])
            early += robot.waits < given[i]
        reward, over = np.zeros(3), np.zeros(3, bool)
        for j in range(E):
            obs, gain, terminated, truncated, _ = env.step(
                np.stack([robot.act() for robot in robots]).astype(np.float32)
            )
            reward, over = reward + 0.9**j * gain, terminated | truncated
        assert np.allclose(reward, r.rewards[t]) and np.array_equal(over, r.done[t])
        first = over
        if over.any():
            episodes += int(over.sum())
            obs, _ = env.reset(options={"reset_mask": over})
    assert episodes > 3 and early > 10


def test_given_rows_are_those_of_the_chunk_before_and_how_many_differs_from_decision_to_decision():
    policy = late_policy()
    r = Collector(PointReach(16, limit=40), policy, 0.9, 1).collect(policy, 20)
    bounds = [policy.action_norm(torch.full((A,), x)) for x in (-1.0, 1.0)]
    seen_counts = set()
    for t in range(1, 20):
        count, going = r.obs[COUNT][t], ~r.done[t - 1]
        ran = E + r.obs[COUNT][t - 1].clamp(max=0)  # rows of the chunk before, in E periods
        assert (
            torch.equal(r.trace[ROWS][t - 1][:, 1] - ran, count.abs())
            and (count[going] > 0).all()
            and (count[~going] < 0).all()
        )
        assert torch.equal(r.trace[ROWS][t][:, 0], count.clamp(min=0)) and not r.obs[GIVEN][t][~going].any()
        for n in going.nonzero().squeeze(1).tolist():
            c, first = int(count[n]), int(ran[n])
            seen_counts.add((c, first))
            rows = r.x0[t - 1, n, first : first + c]
            assert torch.equal(r.obs[GIVEN][t, n, :c], rows) and not r.obs[GIVEN][t, n, c:].any()
            assert torch.equal(r.x0[t, n, :c], rows.clamp(*bounds))  # as the env cuts commands at +-1
    assert seen_counts == {(c, first) for c in (1, 2, 3) for first in (1, 2, 3, 4)}


def test_whole_episodes_begin_with_a_wait_that_their_start_decides():
    policy = late_policy()
    collector = Collector(PointReach(16, limit=20), policy, 0.9, 1)
    collector.collect(policy, 3)
    assert (collector.obs[COUNT] > 0).any()
    before, mask = collector.obs[COUNT].copy(), np.arange(16) < 4
    collector.begin(np.arange(16), mask)
    assert (
        (collector.obs[COUNT][:4] < 0).all()
        and not collector.obs[GIVEN][:4].any()
        and (collector.obs[COUNT][4:] == before[4:]).all()
    )
    starts = np.repeat(np.arange(8), 2)
    r = collector.episodes(policy, starts)
    first = r.obs[COUNT][0].view(8, 2)
    assert (
        set(first.flatten().tolist()) == {-1, -2, -3}
        and torch.equal(first[:, 0], first[:, 1])
        and (r.obs[COUNT][1] > 0).all()
    )


def test_without_given_rows_a_chunk_is_the_plain_one_and_with_them_that_of_deployment():
    policy, obs = late_policy(), late_obs(1)
    free = obs | {COUNT: torch.zeros(1, dtype=torch.long), GIVEN: torch.zeros(1, MOST, A)}
    g = torch.Generator()
    plain = policy.act({"state": obs["state"]}, g.manual_seed(0), explore=False)
    late = policy.act(free, g.manual_seed(0), explore=False)
    assert torch.allclose(plain.x0, late.x0, atol=1e-6) and late.logp.shape == (1, 0) and not late.trace
    for count in (1, 3):
        goal = torch.tensor([[0.5, -0.4]]).expand(MOST, A) * (torch.arange(MOST) < count)[:, None]
        asked = {"state": obs["state"], GIVEN: goal[None], COUNT: torch.tensor([count])}
        x0 = policy.act(asked, g.manual_seed(3), explore=False).x0
        rows = policy.action_norm.inverse(torch.nn.functional.pad(goal, (0, 0, 0, H - MOST))).numpy()
        deployed = committed_chunk(policy, {"state": obs["state"]}, g.manual_seed(3), rows, count)
        assert torch.allclose(policy.action_norm.inverse(x0)[0], deployed, atol=1e-5)
        assert not torch.allclose(x0[:, count:], plain.x0[:, count:], atol=0.05)


# ---- what counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_exactly_one_under_the_weights_that_acted_however_many_rows_were_given(kind):
    policy = late_policy(**KINDS[kind])
    r = Collector(PointReach(32, limit=20), policy, 0.9, 2).collect(policy, 8)
    assert set(r.obs[COUNT].unique().tolist()) == {-3, -2, -1, 1, 2, 3}
    for t in range(8):
        obs, trace = ({k: v[t] for k, v in group.items()} for group in (r.obs, r.trace))
        logp, _ = policy.score(policy.encode(obs), trace)
        assert torch.equal(logp, r.logp[t]) and torch.isfinite(logp).all()
        again = policy.score(Context.of(policy.encode(obs).columns()), trace)[0]  # as learning keeps it
        assert torch.equal(again, logp)


@pytest.mark.parametrize(
    ("make", "options", "kind"),
    [
        (pi_rl.make, PiRlOptions, "sde"),
        (pi_rl.make, PiRlOptions, "default"),
        (reinflow.make, ReinFlowOptions, "learned"),
    ],
)
def test_learning_begins_at_a_ratio_of_one_with_jitter_and_moves_the_policy(make, options, kind):
    learner = make(
        late_policy(**KINDS[kind]),
        options(decisions=12, epochs=2, minibatch=128, critic_warmup=0, trust_kl=0.002),
        0,
    )
    collector = Collector(PointReach(32, limit=20), learner.policy, 0.9, 2)
    for _ in range(2):
        before = torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        metrics = learner.update(collector.collect(learner.policy, 12), 0.5)
        assert metrics["first_log_ratio"] < 2e-5
        assert not torch.equal(before, torch.cat([p.detach().flatten() for p in learner.policy.parameters()]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_prob_is_the_sum_over_rows_that_the_policy_chose_and_that_run(kind):
    policy, obs = late_policy(**KINDS[kind]), late_obs()
    chunk = policy.act(obs, torch.Generator().manual_seed(1))
    context, f = policy.encode(obs), chunk.logp.shape[1]
    with torch.no_grad():
        mean, std = policy._steps(context, chunk.trace)
    shape = (len(context), f, H, A)
    mean, std, x = mean.view(shape), std.expand_as(mean).reshape(shape), chunk.trace["x_next"].view(shape)
    for i in range(len(context)):
        first, end = chunk.trace[ROWS][i].tolist()
        assert first == obs[COUNT][i].clamp(min=0) and LEAST <= end - E - obs[COUNT][i].clamp(max=0) <= MOST
        for j in range(f):
            own = [
                torch.distributions.Normal(mean[i, j, h], std[i, j, h]).log_prob(x[i, j, h]).sum()
                if (std[i, j, h] > 0).all()
                else torch.zeros(())
                for h in range(first, end)
            ]
            wanted = torch.stack(own).sum() / (E * A if kind == "mean" else 1)
            assert torch.allclose(chunk.logp[i, j], wanted, atol=1e-4), (i, j)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "window"])  # whose last layer is one for all rows
def test_an_entry_that_was_committed_or_never_runs_has_no_gradient(kind):
    policy, obs = late_policy(**KINDS[kind]), late_obs(least=2)
    trace = policy.act(obs, torch.Generator().manual_seed(1)).trace
    logp, entropy = policy.score(policy.encode(obs), trace)
    (
        logp.exp().clamp(max=10) * torch.randn(logp.shape, generator=torch.Generator().manual_seed(2)) + logp
    ).sum().backward()
    layers = [policy.head.out] + ([policy.noise.net[-1]] if policy.noise is not None else [])
    if policy.noise is not None:
        entropy = policy.score(policy.encode(obs), trace)[1]
        entropy.backward()
    for layer in layers:  # its row i gives entry i of the chunk
        rows = layer.weight.grad.view(H, A, -1).abs().sum((1, 2))
        assert not rows[:2].any() and not rows[E + MOST :].any()
        assert (rows[MOST : E + LEAST] > 0).all()


def test_what_moves_the_trust_region_is_the_rows_that_the_policy_chose():
    policy, obs = late_policy(**KINDS["default"]), late_obs(least=2)
    trace = policy.act(obs, torch.Generator().manual_seed(1)).trace
    with torch.no_grad():
        mean, std = policy.moments(policy.encode(obs), trace)
        whole, _ = policy._steps(policy.encode(obs), trace)
    assert mean.shape == std.shape == (64, 1, E * A)
    for i, count in enumerate(obs[COUNT].clamp(min=0).tolist()):
        assert torch.equal(mean[i, 0], whole[i, count * A : (count + E) * A])


def test_the_critic_sees_the_rows_that_will_run():
    learner, obs = late_learner(), late_obs(least=1)
    value = learner.credit.values(learner.policy, obs)
    other = learner.credit.values(learner.policy, obs | {GIVEN: obs[GIVEN] + 0.3})
    fewer = learner.credit.values(learner.policy, obs | {COUNT: obs[COUNT] - 1})
    assert (value != other).all() and (value != fewer).all()
    context = learner.policy.encode(obs)
    assert seen(context).shape == (64, 4 + MOST * (A + 1)) and torch.equal(
        seen(context)[:, :4], context.pooled
    )
    assert torch.equal(seen(context.pick(slice(2, 5))), seen(context)[2:5])
    assert torch.equal(
        seen(Context.cat([context, context.pick(slice(0, 2))])), torch.cat([seen(context), seen(context)[:2]])
    )
    assert seen(Context.of(context.columns())).equal(seen(context)) and PREFIX in context.columns()


# ---- that it repeats ---------------------------------------------------------------------------------------


def test_a_collector_restored_from_its_state_goes_on_with_the_rows_that_were_given():
    policy = late_policy()
    first, second = (Collector(PointReach(16, limit=20), policy, 0.9, seed) for seed in (0, 0))
    first.collect(policy, 3)
    state = first.state()
    a = first.collect(policy, 4)
    second.collect(policy, 1)
    second.set_state(state)
    b = second.collect(policy, 4)
    assert (
        all(torch.equal(a.obs[k], b.obs[k]) for k in a.obs)
        and torch.equal(a.logp, b.logp)
        and torch.equal(a.x0, b.x0)
    )


@pytest.mark.parametrize(("group", "staleness"), [(0, 0), (4, 2)])
def test_a_resumed_run_with_latency_is_bit_identical(group, staleness):
    whole = late_learner(group)
    feed = local(whole, 2, staleness, group=group)
    train(whole, feed, 2)
    tensors = {}
    tree = pack(
        {"learner": whole.state_dict(), "feed": feed.state(), "policy": whole.policy.state_dict()}, tensors
    )
    tensors = {k: v.clone() for k, v in tensors.items()}
    train(whole, feed, 2)
    again = late_learner(group)
    saved = unpack(tree, tensors)
    again.policy.load_state_dict(saved["policy"])
    again.load_state_dict(saved["learner"])
    feed = local(again, 2, staleness, group=group)
    feed.load_state(saved["feed"])
    train(again, feed, 2)
    assert torch.equal(weights(again), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("served", [False, True])
def test_worker_processes_and_one_process_give_the_same_run_with_latency(tmp_path, served):
    ends = []
    for beside in (False, True):
        learner = late_learner()
        feed = processes(tmp_path, learner, served=served) if beside else local(learner)
        try:
            train(learner, feed, 4)
        finally:
            feed.close()
        ends.append(weights(learner))
    assert torch.equal(*ends)


def test_a_worker_that_takes_over_drives_the_env_to_where_the_other_one_was():
    policy, ends = late_policy(), []
    state = columns = None
    for takes_over in (False, True):
        worker = Worker(0, Collector(build(N), policy, 0.9, 0), policy, lambda: 0, 0)
        if not takes_over:
            state, columns = worker.collector.state(), new_columns(worker.collector.layout(policy), T)
        worker.begin(Lease(0, 0, T, 3 if takes_over else 0, 0), columns, state if takes_over else None)
        while not worker.decide():
            pass
        ends.append({k: v.copy() for k, v in columns.items() if not k.startswith("final/")})
    assert all(np.array_equal(ends[0][k], ends[1][k]) for k in ends[0])


# ---- as a user runs it -------------------------------------------------------------------------------------

LATENCY = ("--latency", "0.04", "--latency-jitter", "0.02")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--latency-jitter 0.1", "--latency-jitter goes with --latency above 0"),
        (
            "--latency 0.2 --latency-jitter 0.1",
            "--latency 0.2 --latency-jitter 0.1 is 10 to 15 control periods of 20 ms: it needs "
            "--policy.execute of at least 15 and --policy.horizon of at least --policy.execute + 15, got 4 "
            "and 8",
        ),
        (
            "--latency 0.08 --policy.execute 5",
            "is 4 control periods of 20 ms: it needs --policy.execute of at least 4 and --policy.horizon "
            "of at least --policy.execute + 4, got 5 and 8",
        ),
        ("--latency 0.04 --algo ppo", "--latency goes with --algo pi_rl, reinflow or bc, got ppo"),
        ("--latency 0.04 --algo hil_serl", "--latency goes with --algo pi_rl, reinflow or bc, got hil_serl"),
        ("--latency 0.04 --task reach,push_cube", "--latency goes with one task, got --task reach,push_cube"),
        ("--latency 0.04 --dream 0.5", "--latency goes without --dream"),
        ("--latency 0.04 --share there", "--latency goes without --share"),
        ("--latency 0.04 --learners 2", "--latency goes with --learners 1"),
        ("--latency 11", "--latency must be "),
        ("--policy.commit-least 2", "policy.commit_least (<= commit) must be "),
    ],
)
def test_what_does_not_go_with_a_latency_is_named_in_one_line(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(["train", "--task", "reach", "--workers", "0", *argv.split()])
    said = capsys.readouterr().err
    assert e.value.code == 2 and says in said.splitlines()[-1] and "Traceback" not in said, said
    assert not (tmp_path / "runs").exists()


def test_a_latency_is_rows_of_a_chunk_and_goes_when_it_is_not_asked_for(tmp_path):
    env = PointReach(1)  # periods of 0.1 s
    assert [periods(x, 0.02) for x in (0.02, 0.04, 0.041, 0.2, 0.30000000000000004)] == [1, 2, 3, 10, 15]
    config = parse(["--task", "reach", "--latency", "0.2", "--latency-jitter", "0.15"])
    made = with_latency(config, env)
    assert (made.policy.commit_least, made.policy.commit) == (2, 4)
    assert with_latency(replace(made, latency=0.0, latency_jitter=0.0), env).policy.commit_least == 0
    with pytest.raises(UserError, match="nft has no log-prob"):
        nft.make(late_policy(), NftOptions(), 0)


@pytest.fixture(scope="module")
def late_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late") / "a"
    config = replace(
        parse([*TINY, *LATENCY, "--steps", "1500", "--bc.updates", "200", "--demos", "10"]), out=str(folder)
    )
    assert train_run(config, quiet=True)[1] == 0
    return folder


def test_a_run_with_latency_is_evaluated_with_it_and_evaluation_repeats_what_training_wrote(late_run):
    then = json.loads((late_run / "evals" / "final.json").read_text())
    # the robot waits for the first chunk alone
    assert set(then["starved"]) <= {2, 3} and max(then["seam"]) > 0
    now = evaluate_checkpoint(late_run, EvalConfig(checkpoint="last", episodes=8))
    for key in ("starts", "success", "return", "length", "seam", "starved"):
        assert now[key] == then[key], key
    assert "seam" not in evaluate_checkpoint(late_run, EvalConfig(checkpoint="last", episodes=2, latency=0.0))
    config = replace(parse([]), latency=0.2, latency_jitter=0.1)
    for given, wanted in (
        ({}, ("trained", 0.2, 0.1)),
        ({"chunking": "naive"}, ("naive", 0.2, 0.1)),
        ({"latency": 0.0}, ("", 0.0, 0.0)),
        ({"chunking": "rtc", "latency": 0.3}, ("rtc", 0.3, 0.0)),
        ({"on": "dds"}, ("", 0.0, 0.0)),
    ):
        got = as_trained(EvalConfig(**given), config)
        assert (got.chunking, got.latency, got.latency_jitter) == wanted
        assert as_trained(got, config) == got  # once it is said it stays


def test_a_run_with_latency_that_was_stopped_ends_as_one_that_was_not(late_run, tmp_path):
    other, half = tmp_path / "b", checkpoint.checkpoints(late_run)
    shutil.copytree(late_run, other)
    assert len(half) >= 2
    shutil.rmtree(other / "checkpoints" / half[-1].name)
    resume(other, quiet=True)
    last = [checkpoint.checkpoints(run)[-1] for run in (late_run, other)]
    assert last[0].name == last[1].name
    assert (last[0] / "policy.safetensors").read_bytes() == (last[1] / "policy.safetensors").read_bytes()


def test_a_policy_that_was_never_given_rows_begins_a_run_with_latency(late_run, tmp_path):
    config = parse(
        [
            "--task",
            "reach",
            "--algo",
            "bc",
            "--demos",
            "2",
            "--bc.updates",
            "5",
            "--policy.hidden",
            "32",
            "--no-video",
            "--eval-episodes",
            "2",
            "--workers",
            "0",
        ]
    )
    plain = replace(config, out=str(tmp_path / "plain"))
    train_run(plain, quiet=True)
    argv = [
        *TINY,
        *LATENCY,
        "--init",
        str(tmp_path / "plain"),
        "--demos",
        "0",
        "--bc.updates",
        "0",
        "--policy.execute",
        "4",
        "--steps",
        "200",
        "--out",
        str(tmp_path / "late"),
    ]
    config = parse(argv)
    folder, code = train_run(config, quiet=True)
    assert code == 0 and len(json.loads((folder / "evals" / "final.json").read_text())["seam"]) == 8
    again = parse(
        [
            *TINY,
            "--init",
            str(late_run),
            "--demos",
            "0",
            "--bc.updates",
            "0",
            "--steps",
            "200",
            "--out",
            str(tmp_path / "c"),
        ]
    )
    assert again.policy.commit == 3 and again.policy.commit_least == 0  # without --latency it learns without
