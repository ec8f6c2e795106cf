"""What a run will need, told before it starts; and its twin at a tiny size."""

import re
from dataclasses import asdict, replace

import datasets
import pytest
import torch
from memory import peak_memory
from torch._subclasses.fake_tensor import FakeTensor

from robo_rl.cli import main
from robo_rl.cli.train import parse
from robo_rl.device_names import slow_bf16
from robo_rl.experiment import plan as plans
from robo_rl.experiment.config_file import flat
from robo_rl.experiment.dream import LEAST
from robo_rl.experiment.envs import probe_env
from robo_rl.experiment.parallel import batch, group_size
from robo_rl.experiment.plan import Plan, moments, resident
from robo_rl.experiment.plan_data import plan_of_data
from robo_rl.experiment.plan_measure import BACKWARD, PlanPart, extrapolated, identity, kept
from robo_rl.experiment.sft import rounds
from robo_rl.experiment.train import check
from robo_rl.experiment.twin import twin
from robo_rl.options import ALGOS, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.shapes import only_shapes

ARGV = [
    "--workers",
    "0",
    "--envs",
    "8",
    "--demos",
    "2",
    "--bc.updates",
    "2",
    "--eval-episodes",
    "4",
    "--threads",
    "1",
    "--no-video",
    "--rl.decisions",
    "4",
    "--rl.minibatch",
    "32",
    "--rl.epochs",
    "1",
    "--target",
    "0",
    "--demos-most",
    "0",
]

SMALL = [
    "--policy.size",
    "small",
    "--task",
    "pick_by_name",
    "--obs",
    "rgb",
    "--image-size",
    "64",
    "--rl.minibatch",
    "16",
    "--bc.batch",
    "16",
]


def test_activations_are_those_that_the_backward_pass_keeps_and_grow_with_the_rows():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    own = {identity(p) for p in net.parameters()}
    x = torch.ones(1, 64)

    def loss(n: int) -> torch.Tensor:
        return net(x.expand(n, -1).contiguous()).sum()

    for n in (10, 20):
        assert kept(own, loss, n)[0] == 4 * n * (64 + 64)  # the input and what tanh gave
    assert extrapolated(net, loss, 1000)[0] == int(BACKWARD * 4 * 1000 * 128)


@pytest.mark.parametrize("kind", ["pi05", "smolvla"])
def test_what_is_counted_from_shapes_is_what_the_same_policy_with_weights_keeps(kind):
    config = parse(["--policy", kind, "--task", "pick_by_name", "--obs", "rgb", "--image-size", "32"])
    spec = ObsSpec(state=9, action=7, views=("front",), image_size=32, language=True, text=config.policy.text)
    want = extrapolated(policy := make_policy(config.policy, spec, 0), plans.supervised_loss(policy), 32)[0]
    with only_shapes(large=512):
        policy = make_policy(config.policy, spec, 0)
        bytes_kept, seconds = extrapolated(policy, plans.supervised_loss(policy), 32, 1e9)
    assert bytes_kept == pytest.approx(want, rel=0.05) and seconds > 0
    assert sum(isinstance(p, FakeTensor) for p in policy.parameters()) > 10


@pytest.mark.slow
def test_the_plan_of_a_whole_model_makes_no_weights_and_says_what_it_estimates():
    argv = [
        "--policy",
        "smolvla",
        "--policy.size",
        "full",
        "--task",
        "pick_by_name",
        "--obs",
        "rgb",
        "--image-size",
        "64",
        "--rl.freeze-trunk",
        "--policy.keep-prefix",
        *ARGV,
    ]
    config = parse(argv)
    before = resident()
    plan = plans.make_plan(config)
    assert (
        resident() - before < 1e9 and plan.parts[1].what == "weights" and 1.2e9 < plan.parts[1].size < 2.2e9
    )
    assert plan.peak > 2 * plan.parts[1].size and "estimates from their operations" in plan.text()
    assert all(s > 0 for _, s in plan.seconds)


def test_moments_have_a_master_where_weights_are_in_bf16():
    assert moments([torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16)]) == 80 + 120


def test_the_peak_is_that_of_the_largest_phase_and_says_what_is_too_large():
    parts = (
        PlanPart("process", 100),
        PlanPart("weights", 10),
        PlanPart("a", 50, "x"),
        PlanPart("b", 30, "x"),
        PlanPart("c", 70, "y"),
    )
    plan = Plan(parts, (("learner", 1.5),), 85, "cpu")
    assert plan.peak == 190 and plan.missing == 5
    assert plan.text().splitlines()[-1].startswith("does not fit") and "the largest part is c" in plan.text()
    assert Plan(parts, (), 90, "cpu").text().splitlines()[-1].startswith("fits")


def test_a_plan_tells_the_time_of_supervision_its_head_and_the_rounds_that_may_follow():
    words = ["--task", "reach", "--obs", "rgb", "--image-size", "16", "--max-steps", "9", "--bc.updates", "4"]
    words += [
        "--demos",
        "4",
        "--demos-most",
        "9",
        "--bc.head",
        "5",
        "--bc.head-every",
        "4",
        "--bc.batch",
        "2",
    ]
    plan = plans.make_plan(parse([*ARGV, *words]))
    counts = [(s.what, s.count, s.most) for s in plan.supervision]
    # 4, 6 and 9 demonstrations, of whose 9 frames the first and two more are looked at once
    looked = "frames looked at, at most", 4 * 3, 9 * 3
    assert counts == [("updates", 4, 4), looked, ("updates of the head", 5, 15)]
    assert all(s.seconds > 0 for s in plan.supervision)
    text = replace(plan, supervision=(plans.SupervisedTime("updates of the head", 5, 15, 2.0),)).text()
    assert "2.0000 s x 5" in text and "30 s with 2 rounds more (--demos-most 9): 15 updates of the" in text
    alone = plans.make_plan(parse(ARGV))
    assert [s.most for s in alone.supervision] == [2] and "all, at most" not in alone.text()


@pytest.mark.parametrize(("more", "rows"), [([], 8 * 4), (["--rl.advantage", "grpo"], 0)])
def test_a_plan_tells_how_many_updates_rl_makes_at_most(more, rows):
    config = parse([*ARGV, "--steps", "100000", *more])
    made, groups = plans.make_plan(config), group_size(config)
    if groups:  # whole episodes of whole groups
        rows = batch(config) * (100 // config.policy.execute)
    assert made.count == -(-100_000 // (rows * config.policy.execute)) and made.unit == "update"
    assert f"RL, at most {made.count:,} of them" in made.text()


def test_rounds_of_supervision_are_those_of_demonstrations_or_of_updates():
    def made(*words: str) -> list[tuple]:
        return [tuple(r) for r in rounds(parse(["--bc.updates", "600", *words]))]

    asked = ("--demos", "20", "--demos-most", "100")
    assert made(*asked, "--bc.head", "0") == [(20, 600, 0), (60, 1800, 0), (100, 3000, 0)]
    assert made(*asked, "--obs", "rgb", "--bc.head", "7")[-2:] == [(68, 0, 7), (100, 0, 7)]
    assert made("--demos", "folder", "--bc.most", "2000") == [(0, 600, 0), (0, 1800, 0)]
    assert made("--demos", "20", "--bc.most", "2000") == [(20, 600, 0), (20, 1800, 0)]
    assert made("--demos", "20", "--bc.most", "1799") == [(20, 600, 0)]
    assert made("--demos", "0") == []
    assert rounds(replace(parse([*asked, "--bc.updates", "600"]), init="run")) == [(20, 600, 0)]


def test_a_plan_counts_what_adapters_leave_frozen_only_as_weights(capsys):
    def parts(*more: str) -> dict[str, int]:
        made = plans.make_plan(parse([*ARGV, "--policy.hidden", "256", *more]))
        assert {what for what, _ in made.seconds} == {"simulator", "policy", "learner"}
        return {p.what: p.size for p in made.parts if p.phase != "supervised"}

    full, thin = (
        parts(),
        parts("--policy.lora.rank", "2", "--policy.lora.targets", "head", "--policy.lora.full", "none"),
    )
    assert full["weights"] < thin["weights"] < 1.1 * full["weights"]
    critic = thin["critic"]
    assert thin["gradients"] - critic < 0.1 * (full["gradients"] - critic)
    policy = make_policy(PolicyOptions(hidden=256), ObsSpec(state=4, action=2), 0)
    assert full["weights"] > sum(p.nbytes for p in policy.parameters()) / 2


def test_a_plan_counts_rollouts_that_are_replayed_and_a_second_policy():
    def parts(*more: str) -> dict[str, int]:
        return {
            p.what: p.size for p in plans.make_plan(parse([*ARGV, *more])).parts if p.phase != "supervised"
        }

    plain, more = parts("--rl.replay", "0"), parts("--rl.replay", "0.5", "--rl.replay-age", "3")
    assert more["rollouts that are replayed"] == pytest.approx(3 * plain["rollouts"], rel=0.01)
    assert more["rows in the order of learning"] == pytest.approx(
        2 * plain["rows in the order of learning"], rel=0.01
    )
    assert (
        parts("--rl.advantage", "istar", "--rl.decisions", "0")["second policy, of istar"] > plain["weights"]
    )


@pytest.mark.parametrize(
    "argv",
    [[], ["--algo", "ppo"], ["--algo", "rlpd", "--rl.warmup", "64"], ["--rl.advantage", "grpo"]],
    ids=["pi_rl", "ppo", "rlpd", "groups"],
)
def test_a_twin_is_the_same_run_at_a_tiny_size(argv):
    config = parse(argv)
    small = twin(config)
    assert (small.sim, small.task, small.algo, small.obs, small.seed) == (
        config.sim,
        config.task,
        config.algo,
        config.obs,
        config.seed,
    )
    assert (small.policy.kind, small.policy.horizon, small.policy.predict) == (
        config.policy.kind,
        config.policy.horizon,
        config.policy.predict,
    )
    assert (
        type(small.rl) is type(config.rl)
        and small.policy.hidden <= 32
        and small.envs <= 16
        and small.device == "cpu"
    )
    assert 0 < small.steps <= 3000 and small.rl.gamma == config.rl.gamma
    given = parse([*argv, "--demos", "data/mine"])
    assert twin(given).bc.most == 0 and twin(given).bc.updates <= 20


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ("--algo rlpd --rl.synthetic 0.3", ("rl.synthetic_updates", "rl.synthetic_rows")),
        ("--algo hil_serl --rl.judge classifier", ("rl.judge_episodes",)),
        ("--rl.rehearse 0.1", ("rl.rehearse_episodes",)),
        ("--dream 0.5 --dream-model wm", ("dream_updates",)),
        ("--bc.own 400 --bc.head 24000 --obs rgb", ("bc.own", "bc.head")),
    ],
)
def test_what_a_twin_learns_and_plays_beside_rl_is_tiny_too(argv, sizes):
    small = flat(asdict(twin(parse(["--task", "reach", *argv.split()]))))
    assert all(small[name] <= 500 for name in sizes) and min(small[name] for name in sizes) <= 20


def test_a_twin_plays_until_it_dreams():
    """The longest episodes there are, of the env's own limit: the first model is learnt from so many."""
    plain, dreams, given = (
        twin(parse(["--task", "reach", *more.split()]))
        for more in ("", "--dream 0.5", "--dream 0.5 --dream-model wm")
    )
    env = probe_env(dreams)
    assert dreams.steps > LEAST * env.spec.max_steps and given.steps == plain.steps < 3000
    env.close()


@pytest.mark.parametrize("algo", [a for a in ALGOS if a != "recap"])
def test_the_twin_of_every_method_is_a_run_that_begins(algo):
    small = twin(parse(["--task", "reach", "--algo", algo]))
    env = probe_env(small)
    check(small, env)
    env.close()
    assert getattr(small.rl, "critic_hidden", 0) <= 32


def test_a_twin_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        main(
            [
                "train",
                "--twin",
                "--workers",
                "0",
                "--out",
                str(tmp_path / "t"),
                "--policy.lora.rank",
                "2",
                "--policy.lora.targets",
                "head",
                "--policy.dtype",
                "bf16",
            ]
        )
    assert not e.value.code and len(list((tmp_path / "t" / "checkpoints").glob("step_*"))) >= 2
    assert ("--policy.dtype bf16: this CPU" in capsys.readouterr().err) == bool(slow_bf16())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--algo", "recap"), "--plan counts pi_rl, .*, rlpd, .* and bc, got --algo recap"),
        (("--algo", "demo_sac", "--rl.synthetic", "0.2"), "does not count the model of --rl.synthetic"),
    ],
)
def test_what_no_plan_counts_is_told_in_a_line(argv, line, capsys):
    with pytest.raises(SystemExit) as e:
        main(["train", *argv, "--plan"])
    assert e.value.code == 2 and re.search(line, capsys.readouterr().err)


REPLAY = ["--workers", "0", "--envs", "4", "--threads", "1", "--demos", "3", "--task", "reach"]


def test_a_plan_of_a_method_of_replay_counts_what_its_learner_and_its_replay_take():
    config = parse(
        [*REPLAY, "--algo", "demo_sac", "--steps", "4000", "--rl.critic-hidden", "512", "--rl.warmup", "99"]
    )
    config = replace(config, policy=replace(config.policy, critic_hidden=512))
    made = plans.make_plan(config)
    size = {p.what: p.size for p in made.parts if p.phase != "supervised"}
    policy = make_policy(config.policy, ObsSpec(state=23, action=7), 0)
    critic = sum(p.nbytes for p in policy.judge.parameters())
    actor = sum(p.nbytes for p in policy.actor.parameters())
    # the averaged critics are the policy's; those that learn, and the average of the actor
    assert size["critics, averages, what else learns"] == pytest.approx(critic + actor, rel=0.1)
    assert size["gradients"] == pytest.approx(critic + actor, rel=0.1)
    assert size["moments of Adam"] == pytest.approx(2 * (critic + actor), rel=0.1)
    [rows] = [(k, v) for k, v in size.items() if k.startswith("replay of ")]
    steps = int(rows[0].split()[2].replace(",", ""))
    assert 4000 <= steps <= 4400 and rows[1] > steps * (23 + 7) * 4
    assert [what for what, _ in made.seconds] == ["simulator", "policy", "learner, 16 updates"]
    assert made.count == 250 and f"RL, at most {made.count} of them" in made.text()
    assert made.first[0] == 4000 and made.first[1] > 0 and "  --rl.pretrain, 4,000 updates" in made.text()
    beside = replace(made, beside=True)
    assert beside.all == max(made.seconds[0][1] + made.seconds[1][1], made.seconds[2][1]) < made.all


@pytest.mark.parametrize(
    "algo", ["rlpd", "demo_flow", "hil_serl", "expo", "pa_rl", "dsrl", "iql", "calql", "wsrl", "aloe"]
)
def test_every_method_of_replay_has_a_plan(algo):
    made = plans.make_plan(parse([*REPLAY, "--algo", algo, "--steps", "1000", "--rl.batch", "16"]))
    size = {p.what: p.size for p in made.parts if p.phase != "supervised"}
    assert made.missing <= 0 and all(s > 0 for _, s in made.seconds)
    for what in ("critics, averages, what else learns", "gradients", "moments of Adam", "activations"):
        assert size[what] > 0, what
    assert size["gradients"] < size["moments of Adam"]


def test_a_plan_of_too_few_steps_for_an_update_says_so_and_counts_no_critics():
    made = plans.make_plan(parse([*REPLAY, "--algo", "demo_sac", "--steps", "400", "--rl.warmup", "5000"]))
    told = "warning: RL will learn nothing: its updates begin after 5,000 steps (--rl.warmup), of --steps 400"
    assert told in made.text() and "--rl.pretrain, " not in made.text() and "RL, at most" not in made.text()
    assert made.text().splitlines()[-1].startswith("fits")


def test_a_plan_prints_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(["train", *ARGV, "--plan"])
    said = capsys.readouterr().out
    assert (
        not e.value.code and "moments of AdamW" in said and said.strip().splitlines()[-1].startswith("fits")
    )
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["train", *ARGV, "--algo", "bc", "--plan"])
    assert "supervised update" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        main(["train", *REPLAY, "--algo", "rlpd", "--steps", "1000", "--plan"])
    said = capsys.readouterr().out
    assert not e.value.code and "time per decision of all 4 envs" in said and "moments of Adam" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--policy.hidden", "3072", "--bc.batch", "64"],
        [
            "--obs",
            "rgb",
            "--task",
            "reach",
            "--policy.width",
            "192",
            "--policy.depth",
            "4",
            "--rl.decisions",
            "16",
            "--rl.minibatch",
            "256",
            "--bc.batch",
            "64",
            "--bc.noises",
            "1",
            "--rl.no-freeze-trunk",
        ],
        ["--policy", "pi05", *SMALL, "--rl.no-freeze-trunk"],
        ["--policy", "smolvla", *SMALL, "--policy.keep-prefix", "--rl.freeze-trunk"],
    ],
    ids=["wide", "pictures", "pi05", "smolvla, frozen"],
)
def test_the_peak_of_a_run_is_within_fifteen_percent_of_its_plan(more, tmp_path):
    argv = [*ARGV, "--envs", "16", "--steps", "512", "--starts", "uniform", "--rl.critic-warmup", "0", *more]
    _check_peak(argv, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--algo", "demo_sac", "--policy.hidden", "2048", "--rl.critic-hidden", "1024"]
        + ["--policy.critic-hidden", "1024"],
        ["--algo", "demo_flow", "--policy.hidden", "2048"],
        ["--algo", "demo_sac", "--obs", "rgb", "--rl.capacity", "60000", "--steps", "2000"],
    ],
    ids=["wide", "flow", "pictures"],
)
def test_the_peak_of_a_run_from_replay_is_within_fifteen_percent_of_its_plan(more, tmp_path):
    argv = [*REPLAY, "--steps", "1000", "--rl.warmup", "400", "--rl.pretrain", "20", "--rl.utd", "0.5"]
    quick = ["--bc.updates", "20", "--bc.most", "0", "--eval-episodes", "4", "--no-video", "--target", "0"]
    _check_peak([*argv, *quick, *more], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data set .* without checksums")
@pytest.mark.parametrize(
    "more",
    [["tiny", "--bc.updates", "20"], ["small", "--bc.updates", "3", "--bc.batch", "16"]],
    ids=["tiny, as it comes", "small"],
)
def test_the_peak_of_learning_from_videos_is_within_fifteen_percent_of_its_plan(more, tmp_path):
    folder = datasets.write(tmp_path / "aloha", "aloha", episodes=4, length=199)
    argv = ["--algo", "bc", "--demos", str(folder), "--policy", "smolvla", "--policy.size", *more]
    _check_peak(argv, tmp_path)


def _check_peak(argv: list[str], tmp_path) -> None:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        want = pool.apply(_peak_of_plan, (argv,))
    with context.Pool(1, maxtasksperchild=1) as pool:
        had = pool.apply(_peak_of_run, (argv, str(tmp_path / "r")))
    assert abs(want - had) <= 0.15 * had, f"{want / 1e6:.0f} MB planned, {had / 1e6:.0f} MB measured"


def _peak_of_plan(argv: list[str]) -> int:
    config = parse(argv)
    return (plan_of_data(config) if config.sim == "none" else plans.make_plan(config)).peak


def _peak_of_run(argv: list[str], out: str) -> int:
    from robo_rl.experiment.train import train

    train(replace(parse(argv), out=out), quiet=True)
    return peak_memory()
