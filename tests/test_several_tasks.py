"""Several tasks in one run: the env, who mixes them, demonstrations, evaluation, and whole commands."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import TINY, robo_rl

import sims
from robo_rl.demos import record
from robo_rl.errors import UserError
from robo_rl.experiment import policy_server, tasks
from robo_rl.experiment.by_task import by_instruction, by_task, told_of
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.evaluation import EvalConfig, chosen_starts
from robo_rl.rollout_control import Uniform
from robo_rl.rollout_control.mixtures import RuleReasoner
from robo_rl.rollout_control.reverse import Reverse
from robo_rl.rollout_control.tasks import LEAST, FixedMixture, TaskSampler
from robo_rl.selection import Look, best_look, lower_bounds, stop_reason
from robo_rl.starts import EVERY_START, Ended, StartTable, draw_starts, hashed, own_starts, starts_of, task_of
from sims.check import check_env

NAMES = ("reach", "stack_cube", "open_drawer")
LIST = ",".join(NAMES)


def make(n, names=NAMES, **options):
    return sims.make("mujoco", ",".join(names), n, threads=1, **options)


# ---- the env


def test_an_env_of_several_tasks_keeps_the_contract_snapshots_across_tasks_included():
    done = check_env(lambda n: make(n, ("reach", "open_drawer"), max_steps=6))
    assert {"starts", "frozen", "snapshot", "expert", "reset_mask"} <= set(done)


def test_the_suite_takes_tasks_with_limits_of_their_own():
    assert make(1, ("reach", "push_cube")).spec.max_steps > make(1, ("reach", "reach_around")).spec.max_steps
    assert "frozen" in check_env(lambda n: make(n, ("reach", "push_cube")), num_envs=3)


def test_a_start_gives_the_episode_that_it_gives_in_the_env_of_its_task_alone_and_zeros_elsewhere():
    starts = np.array([301, 302, 303, 304, 305, 306])
    env, rng = make(6), np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (8, 6, 7)).astype(np.float32)
    seen = [env.reset(options={"starts": starts})[0]] + [env.step(a)[0] for a in actions]
    assert env.task_ids.tolist() == (starts % 3).tolist()
    for k, name in enumerate(NAMES):
        rows, columns = np.flatnonzero(starts % 3 == k), np.flatnonzero(env.observed[k])
        alone = sims.make("mujoco", name, 6, threads=1)
        assert {env.spec.state_names[c] for c in columns} == set(alone.spec.state_names)
        order = [env.spec.state_names.index(n) for n in alone.spec.state_names]
        theirs = [alone.reset(options={"starts": starts})[0]] + [alone.step(a)[0] for a in actions]
        for mine, other in zip(seen, theirs, strict=True):
            assert (mine["state"][rows][:, order] == other["state"][rows]).all()
            assert (mine["task"][rows] == other["task"][rows]).all()
            assert not mine["state"][rows][:, ~env.observed[k]].any()


def test_an_env_may_play_another_task_in_its_next_episode():
    env = make(3, max_steps=4)
    env.reset(options={"starts": np.array([0, 1, 2])})
    for _ in range(4):
        env.step(np.zeros((3, 7), np.float32))
    obs, _ = env.reset(options={"reset_mask": np.array([False, True, False]), "starts": np.array([0, 3, 0])})
    assert env.task_ids.tolist() == [0, 0, 2] and obs["task"][1] == "reach the green mark"
    _, _, terminated, truncated, _ = env.step(np.zeros((3, 7), np.float32))
    assert (terminated | truncated).tolist() == [True, False, True]


def test_an_episode_that_was_left_for_one_of_another_task_is_played_no_further():
    env = make(3)
    env.reset(options={"starts": np.array([0, 1, 2])})
    env.step(np.zeros((3, 7), np.float32))
    env.reset(options={"reset_mask": np.array([False, True, False]), "starts": np.array([0, 3, 0])})
    for _ in range(2):
        env.step(np.zeros((3, 7), np.float32))
    assert [part.steps.tolist() for part in env.parts] == [[3, 2, 0], [0, 1, 0], [0, 0, 3]]


def test_every_expert_acts_for_its_own_task():
    env = make(6, ("reach", "push_cube"))
    env.reset(options={"starts": np.arange(6)})
    won = np.zeros(6, bool)
    for _ in range(120):
        won = env.step(env.expert_action())[4]["success"]
    assert won.all()


@pytest.mark.parametrize(
    ("sim", "task", "says"),
    [
        ("mujoco", "reach,climb", "climb"),
        ("mujoco", "reach,reach", "twice"),
        ("mujoco", "reach,Ant-v5", "actions"),
        ("maniskill", "PickCube-v1,PushCube-v1", "only --sim mujoco plays several tasks"),
        ("gym:Pendulum-v1", "a,b", "only --sim mujoco"),
        ("arm", "reach,pick_cube", "only --sim mujoco"),
        ("wm:x", "a,b", "only --sim mujoco"),
    ],
)
def test_a_list_of_tasks_that_cannot_be_is_refused_in_one_line(sim, task, says, tmp_path):
    assert says in robo_rl(tmp_path, "train", "--sim", sim, "--task", task).mistake
    assert not (tmp_path / "runs").exists()


# ---- which task comes next


def test_tasks_come_as_often_as_their_weights_say_in_starts_of_training():
    keys = hashed(5, np.arange(30_000))
    starts = draw_starts(StartTable(np.zeros(0, np.int64), np.zeros(0), 1.0, np.array([1.0, 0.0, 3.0])), keys)
    assert starts.min() >= 0 and starts.max() < 2**31
    share = np.bincount(task_of(starts, 3), minlength=3) / len(starts)
    assert share[1] == 0 and abs(share[0] - 0.25) < 0.01
    assert len(set(starts.tolist())) > 29_900  # each is still one of all
    last = np.array([2**31 - 1, 2**31 - 2, 0])
    assert starts_of(last, np.array([2, 2, 2]), 3).max() < 2**31
    assert (draw_starts(EVERY_START, keys) == own_starts(keys)).all()  # without weights nothing changes


@pytest.mark.parametrize("weights", [[-1.0, 1.0], [0.0, 0.0], [np.nan, 1.0]])
def test_weights_of_tasks_that_cannot_be_drawn_from_are_refused(weights):
    with pytest.raises(ValueError, match="weights of tasks"):
        StartTable(np.zeros(0, np.int64), np.zeros(0), 1.0, np.array(weights))


def rounds(sampler, rates, count=40, each=50):
    """`count` rounds in which task k succeeds with rates[k]."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        sampler.propose(rng)
        which = np.repeat(np.arange(len(rates)), each)
        sampler.observe(
            np.arange(len(which)),
            which,
            rng.random(len(which)) < np.repeat(rates, each),
            np.zeros(len(which)),
            np.ones(len(which)),
        )


def test_rule_reasoner_gives_most_to_the_task_that_lacks_most_and_every_task_keeps_a_share():
    sampler = TaskSampler(NAMES, RuleReasoner(3, 0), Uniform())
    rounds(sampler, [1.0, 0.1, 0.6])
    told = sampler.metrics()
    assert (
        told["weight/stack_cube"] > 1.3 * told["weight/open_drawer"] > 1.3 * told["weight/reach"] > LEAST / 3
    )
    assert told["expected/stack_cube"] == pytest.approx(0.1, abs=0.1)
    other = TaskSampler(NAMES, RuleReasoner(3, 0), Uniform())
    other.load_state_dict(sampler.state_dict())
    a, b = (s.propose(np.random.default_rng(1)) for s in (sampler, other))
    assert (a.tasks == b.tasks).all()


def test_fixed_weights_are_kept_to_but_for_the_least_share():
    sampler = TaskSampler(NAMES, FixedMixture([6, 3, 1]), Uniform())
    rounds(sampler, [0.5, 0.5, 1.0], count=20)
    assert sampler.propose(np.random.default_rng(0)).tasks == pytest.approx(
        (1 - LEAST) * np.array([0.6, 0.3, 0.1]) + LEAST / 3
    )
    assert sampler.arms.predict()[2] > 0.99


def test_starts_along_demonstrations_of_one_task_listen_to_that_task_alone_and_take_no_more_than_its_share():
    sampler = Reverse(np.arange(1, 33), 8, 0, (1,), 1 / 3)
    starts, which = np.arange(60), np.arange(60) % 3
    sampler.observe(starts, which, which != 1, np.zeros(60), np.ones(60))  # the others are solved
    assert sampler.own_success == 0
    assert 2 / 3 < sampler.propose(np.random.default_rng(0)).uniform < 0.8
    for _ in range(20):
        sampler.observe(starts, which, which == 1, np.zeros(60), np.ones(60))
    assert sampler.propose(np.random.default_rng(0)).uniform == 1


def test_modomodo_takes_the_mixture_that_finished_runs_predict_to_be_the_best(tmp_path):
    runs = []
    for i, w in enumerate(([0.9, 0.1], [0.7, 0.3], [0.5, 0.5], [0.3, 0.7], [0.1, 0.9])):
        run = tmp_path / f"run{i}"
        (run / "evals").mkdir(parents=True)
        config = {
            "task": "reach,push_cube",
            "tasks": f"{w[0]},{w[1]}",
            "algo": "ppo",
            "policy": {},
            "bc": {},
            "rl": {},
        }
        (run / "run.json").write_text(json.dumps({"config": config}))
        score = 0.9 - (w[0] - 0.7) ** 2
        (run / "evals" / "final.json").write_text(
            json.dumps({"tasks": {"reach": {"success": score}, "push_cube": {"success": score}}})
        )
        runs.append(run)
    assert tasks.fitted_mixture(runs, "reach,push_cube")[0] == pytest.approx(0.7, abs=0.05)
    with pytest.raises(UserError, match="it takes runs over reach,pick_cube"):
        tasks.fitted_mixture(runs, "reach,pick_cube")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "reach", "tasks": "rulereasoner"}, "this run has one"),
        ({"tasks": "0.5,0.5"}, "2 weights for 3 tasks"),
        ({"tasks": "fairly"}, "rulereasoner"),
        ({"tasks": "modomodo:nowhere"}, "no finished run"),
        ({"dream": 0.5}, "--dream"),
        ({"tasks": "rulereasoner", "backend": "ray"}, "--backend ray"),
        ({"tasks": "0,0,0"}, "one of them above"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        tasks.check(replace(TrainConfig(task=LIST), **options))


def test_what_is_told_of_each_task_are_its_success_and_its_share_of_the_steps():
    ended = Ended(
        np.arange(4),
        np.array([0, 0, 2, 2]),
        np.array([True, False, True, True]),
        np.zeros(4),
        np.array([10, 10, 30, 50]),
    )
    told = tasks.task_metrics(NAMES, [None, ended])
    assert (
        told["tasks/share/reach"] == 0.2
        and told["tasks/share/stack_cube"] == 0
        and told["tasks/share/open_drawer"] == 0.8
    )
    assert (
        told["tasks/success/reach"] == 0.5
        and told["tasks/success/open_drawer"] == 1
        and "tasks/success/stack_cube" not in told
    )
    assert not tasks.task_metrics(("reach",), [ended])


# ---- demonstrations, evaluation, when to stop


def test_demonstrations_are_as_many_of_each_task_each_from_a_start_of_it():
    episodes = []
    tried = record(make(4), 3, 0, episodes.append)
    assert [e.task for e in episodes] == [
        t
        for t in ("reach the green mark", "stack the red cube on the green cube", "open the drawer")
        for _ in range(3)
    ]
    assert [e.start % 3 for e in episodes] == [0] * 3 + [1] * 3 + [2] * 3 and len(
        {e.start for e in episodes}
    ) == 9 <= tried


def test_an_instruction_that_falls_behind_is_told_and_what_to_do_about_it():
    won = {"pick red": [0] * 28, "pick blue": [1] * 30 + [0], "pick green": [1] * 20 + [0] * 20}
    result: dict = {
        "task": [t for t, s in won.items() for _ in s],
        "success": [x for s in won.values() for x in s],
    }
    result["instructions"] = by_instruction(result)
    assert {t: row["n"] for t, row in result["instructions"].items()} == {t: len(s) for t, s in won.items()}
    line, hint = told_of(result, hint=True)
    assert line.strip().split("   ") == ["pick red 0.000 [0.000, 0.121]", "pick green 0.500 [0.352, 0.648]"]
    assert hint.startswith(
        "RL tries actions near those of the policy, and may find no success of 'pick red'. Show"
    )
    assert told_of(result, hint=False) == [line]
    alike = {"task": ["a", "b"] * 20, "success": [1, 0, 0, 1] * 10}
    assert told_of({"instructions": by_instruction(alike)}, hint=True) == []
    assert by_instruction({"task": ["a"] * 4, "success": [1] * 4}) == {}
    many = {f"{i:02}": {"success": 0.0, "low": 0.0, "high": 0.1, "n": 40} for i in range(6)}
    line, hint = told_of(
        {"instructions": many | {"all": {"success": 1.0, "low": 0.9, "high": 1.0, "n": 40}}}, hint=True
    )
    assert line.endswith("03 0.000 [0.000, 0.100]   and 2 more") and "'00', '01', '02', '03'." in hint


def test_each_task_is_evaluated_on_as_many_starts_and_one_alone_on_the_same():
    all_, one = (
        chosen_starts(EvalConfig(episodes=5), NAMES),
        chosen_starts(EvalConfig(episodes=5, task="stack_cube"), NAMES),
    )
    assert len(all_) == 15 and np.array_equal(one, all_[task_of(all_, 3) == 1]) and len(one) == 5
    told = by_task([int(k == 1) for k in task_of(all_, 3)], all_, NAMES)
    assert {name: row["success"] for name, row in told.items()} == {
        "reach": 0,
        "stack_cube": 1,
        "open_drawer": 0,
    }
    assert all(row["n"] == 5 for row in told.values())
    with pytest.raises(UserError, match="push_cube"):
        chosen_starts(EvalConfig(task="push_cube"), NAMES)


def test_the_goal_is_reached_where_the_worst_task_has_it():
    good = Look(100, 398, 400, 1.0, [[200, 200], [198, 200]])
    uneven = Look(100, 380, 400, 1.0, [[200, 200], [180, 200]])
    assert stop_reason([good], 0.9, 0) and "worst task" in stop_reason([good], 0.9, 0)
    assert not stop_reason([uneven], 0.9, 0) and stop_reason([uneven._replace(tasks=())], 0.9, 0)
    # each of two may miss half as often
    assert lower_bounds([good])[0] < lower_bounds([Look(0, 198, 200, 1.0)])[0]
    assert (
        best_look(
            [
                Look(0, 390, 400, 1.0, [[200, 200], [190, 200]]),
                Look(1, 388, 400, 1.0, [[194, 200], [194, 200]]),
            ]
        ).step
        == 1
    )


# ---- whole commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    argv = [
        *TINY,
        "--task",
        LIST,
        "--algo",
        "ppo",
        "--steps",
        1500,
        "--tasks",
        "rulereasoner",
        "--starts",
        "uniform",
        "--seed",
        3,
    ]
    done = robo_rl(folder, "train", *argv, "--out", "run")
    assert done.code == 0, done
    return folder / "run"


def test_a_run_over_several_tasks_tells_success_and_share_of_each_and_its_report_shows_them(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(
        any(f"{group}/success/{name}" in r for r in rows) for name in NAMES for group in ("eval", "report")
    )
    shares = [sum(r[f"tasks/share/{name}"] for name in NAMES) for r in rows if "tasks/share/reach" in r]
    assert shares and shares == pytest.approx([1.0] * len(shares))
    assert any("starts/weight/stack_cube" in r for r in rows)
    final = json.loads((run / "evals" / "final.json").read_text())
    assert (
        final["n"] == 24
        and {row["n"] for row in final["tasks"].values()} == {8}
        and list(final["tasks"]) == list(NAMES)
    )
    assert robo_rl(run.parent, "report", "run").code == 0
    page = (run / "report.html").read_text()
    assert "Rollouts by task" in page and "Success by task" in page


def test_one_task_of_a_run_is_evaluated_alone_and_another_is_refused_in_one_line(run):
    done = robo_rl(run.parent, "eval", "run", "--task", "open_drawer", "--episodes", 6, "--json")
    told = json.loads(done.out)
    assert told["n"] == 6 and list(told["tasks"]) == ["open_drawer"]
    assert list(
        json.loads(robo_rl(run.parent, "eval", "run", "--episodes", 3, "--json").out)["tasks"]
    ) == list(NAMES)
    assert "open_drawer" in robo_rl(run.parent, "eval", "run", "--task", "push_cube").mistake
    assert "plays runs of one task" in robo_rl(run.parent, "eval", "run", "--on", "arm").mistake
    assert "--task" in robo_rl(run.parent, "deploy", "run", "--transport", "inprocess").mistake


def test_a_policy_of_several_tasks_acts_on_the_state_and_the_instruction_of_the_one_it_is_served_for(run):
    act, config, spec = policy_server.load_actor(str(run), "last", 0, task="open_drawer")
    whole, _, union = policy_server.load_actor(str(run), "last", 0, instruction="open the drawer")
    env = make(3)
    state = env.reset(options={"starts": np.array([2, 5, 8])})[0]["state"][0]
    names = sims.make("mujoco", "open_drawer", 1).spec.state_names
    own = state[[env.spec.state_names.index(n) for n in names]]
    assert config.task == "open_drawer" and spec.state == len(names) < union.state == len(state)
    assert np.array_equal(act({"state": own}), whole({"state": state}))
    with pytest.raises(UserError, match="choose one with --task"):
        policy_server.load_actor(str(run), "last", 0)
