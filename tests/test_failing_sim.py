"""A simulator of a user that raises now and then costs its open episodes, not the run; one that always does
ends it with its words."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import robo_rl
from streams import NORTH, TR, Feed, key, press, stick
from toys import PointReach

from robo_rl.data.reader import load
from robo_rl.experiment import evaluation
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.train import kept
from robo_rl.files import GO_ON
from robo_rl.human.intervention import CORRECTION
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector
from robo_rl.runtime.branches import make_control
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.worker import Worker
from robo_rl.starts import CHOOSE

ENV = '''
import os
import gymnasium as gym
import numpy as np

from robo_rl.starts import EVAL_START


class Fails(gym.Env):
    """A point that is to come to 0. The step FAILS of each env fails; below 0: one step of an evaluation."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self):
        self.made, self.fails = 0, int(os.environ["FAILS"])

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.judged = seed is not None and seed >= EVAL_START
        self.x, self.t = self.np_random.uniform(-1, 1, 2).astype(np.float32), 0
        return self.x.copy(), {}

    def step(self, action):
        self.made, self.t = self.made + 1, self.t + 1
        if self.made == self.fails or self.fails < 0 and self.judged and not os.path.exists("failed"):
            open("failed", "w").close()
            raise RuntimeError("the solver diverged")
        self.x = np.clip(self.x + 0.3 * action, -9, 9).astype(np.float32)
        near = bool(np.abs(self.x).max() < 0.3)
        return self.x.copy(), -float(np.abs(self.x).sum()), near, self.t >= 12, {"is_success": near}


gym.register("Fails-v0", Fails, max_episode_steps=12)
'''
RUN = ["train", "--sim", "gym:failing:Fails-v0", "--envs", 2, "--workers", 0, "--no-video", "--out", "run"]
SMALL = [
    "--policy.hidden",
    8,
    "--policy.layers",
    1,
    "--eval-episodes",
    2,
    "--steps",
    256,
    "--eval-every",
    256,
]
ON = [*RUN, *SMALL, "--algo", "ppo", "--rl.decisions", 16, "--rl.minibatch", 16]
GROUPS = [*ON, "--envs", 4, "--rl.advantage", "grpo", "--rl.whiten", "batch", "--rl.group", 2]
PERIODIC = [*GROUPS, "--periodic", 2, "--rl.epochs", 1]
SLOTS = [*GROUPS, "--max-staleness", 1]
OFF = [*RUN, *SMALL, "--algo", "rlpd", "--rl.warmup", 64, "--rl.utd", 1, "--policy.critic-hidden", 8]
RUNS = [ON, OFF, GROUPS, PERIODIC, SLOTS]
NAMES = ["on-policy", "from replay", "groups", "periodic", "episode slots"]


def run(place, command, fails):
    (place / "failing.py").write_text(ENV)
    done = robo_rl(place, *command, env={"FAILS": fails})
    log = place / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done, rows


@pytest.mark.parametrize("command", RUNS, ids=NAMES)
def test_a_run_in_one_process_goes_on_where_its_simulator_failed(tmp_path, command):
    done, rows = run(tmp_path, command, "53")  # of each life
    assert done.code == 0, done
    assert done.err.count("the simulator ended and is started anew") == 1, "said once"
    assert re.search(r"step of env \d failed: RuntimeError: the solver diverged", done.err)
    assert rows[-1]["step"] >= 240 and "nothing was learnt" not in done.err
    assert max(row.get("health/restarts", 0) for row in rows) >= 1, "counted"


@pytest.mark.parametrize("command", [ON, OFF], ids=["on-policy", "from replay"])
def test_a_simulator_that_fails_before_its_first_decision_ends_the_run_at_once(tmp_path, command):
    done, rows = run(tmp_path, command, "1")
    assert done.code == 2 and "step of env 0 failed: RuntimeError: the solver diverged" in done.err
    assert "started anew" not in done.err


@pytest.mark.parametrize("command", [ON, OFF], ids=["on-policy", "from replay"])
def test_one_that_fails_all_the_time_ends_the_run_with_its_words_and_the_run_is_kept(tmp_path, command):
    done, rows = run(tmp_path, [*command, "--steps", "100000"], "9")
    assert done.code == 2 and "6 times by the same error" in done.err
    assert "the solver diverged" in done.err and "robo_rl train --resume run" in done.err


POINTS = '''
from toys import PointReach


class Points(PointReach):
    """Its step `fails` fails."""

    made, fails = 0, 150

    def step(self, actions):
        self.made += 1
        if self.made == self.fails:
            raise RuntimeError("the solver diverged")
        return super().step(actions)


def make(num_envs, task="", reward="", max_steps=0):
    env = Points(num_envs, max_steps or 20)
    env.fails = 40 if max_steps else 150  # a person has longer episodes
    return env
'''
HELPED = [
    *["train", "--sim", "points:make", "--workers", 0, "--no-video", "--out", "run", *SMALL],
    *["--algo", "hil_serl", "--demos", 2, "--bc.updates", 5, "--rl.warmup", 32, "--rl.utd", 1],
]


def helped(place, *more):
    """A run with help whose simulator fails -> (its rows of RL, the data set of its corrections)."""
    (place / "points.py").write_text(POINTS)
    done = robo_rl(place, *HELPED, *more)
    assert done.code == 0, done
    assert done.err.count("the simulator ended and is started anew: RuntimeError: the solver diverged") == 1
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "health/restarts" in row], load(place / "run" / "corrections")


def test_a_run_with_a_scripted_person_goes_on_where_its_simulator_failed_and_so_does_the_person(tmp_path):
    quick = ["--rl.operator", "scripted", "--rl.scripted-operator.notice-time", 0.2]
    rows, corrections = helped(tmp_path, "--envs", 2, "--steps", 600, *quick)
    failed = next(i for i, row in enumerate(rows) if row["health/restarts"])
    minutes = [row["human/operator_minutes"] for row in rows]
    assert rows[-1]["step"] >= 600 and 0 < minutes[failed] < minutes[-1] and minutes == sorted(minutes)
    assisted = sum(round(row.get("human/assisted", 0) * row["train/episodes"]) for row in rows)
    assert len(corrections) == assisted > 0, "each episode with help that ended, once"


def test_a_person_keeps_the_device_where_the_simulator_failed(tmp_path):
    idle, help_ = [b""] * 6, [key(TR) + stick(1, -1), *[b""] * 4, press(NORTH), key(TR, 0)]
    held = [key(TR) + stick(1, -1), *[b""] * 25]  # while it fails
    feed = Feed(tmp_path / "pad", [*idle, *help_, *idle, *held, press(NORTH), key(TR, 0), *idle])
    person = ["--rl.operator", f"gamepad:{feed.path}", "--rl.operator-speed", 0]
    rows, corrections = helped(tmp_path, "--envs", 1, "--steps", 56, *person)
    feed.close()
    assert rows[-1]["health/restarts"] == 1 and rows[-1]["step"] >= 56
    assert len(corrections) == 2 and corrections.success.all()
    assert (corrections.phase == CORRECTION).sum() >= 4


def test_an_evaluation_begins_anew_where_the_simulator_failed(tmp_path):
    whole, rows = run(tmp_path, ON, "0")
    assert whole.code == 0, whole
    (tmp_path / "run").rename(tmp_path / "whole")
    done, again = run(tmp_path, ON, "-1")
    assert done.code == 0 and "the evaluation begins anew" in done.err
    evals = [
        {p.name: json.loads(p.read_text())["return"] for p in (tmp_path / name / "evals").iterdir()}
        for name in ("whole", "run")
    ]
    assert evals[0] == evals[1]


OWN = '''
from pathlib import Path
from toys import PointReach


class Points(PointReach):
    """The first step of 12 envs fails, once."""

    def step(self, actions):
        if self.num_envs == 12 and not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("the solver diverged")
        return super().step(actions)


def make(num_envs, task="", reward="", max_steps=0):
    return Points(num_envs, 24, radius=0.3)
'''


def test_a_round_of_own_successes_begins_anew_where_the_simulator_failed(tmp_path):
    (tmp_path / "points.py").write_text(OWN)
    run = ["train", "--sim", "points:make", "--envs", 16, "--workers", 0, "--no-video", "--algo", "pi_rl"]
    more = [*SMALL, "--steps", 2400, "--eval-every", 2400, "--demos", 2, "--bc.updates", 60, "--bc.own", 12]
    done = robo_rl(tmp_path, *run, *more, "--eval-episodes", 40, "--out", "run")
    assert done.code == 0 and (tmp_path / "failed").exists(), done
    again = "the simulator failed, and the round begins anew: RuntimeError: the solver diverged ("
    assert done.err.count(again) == 1


BROKEN = '''
from pathlib import Path
from toys import PointReach


class Points(PointReach):
    """Fails with as many envs as the file `broken` says; 0: with any number; below 0: at that step."""

    made = 0

    def step(self, actions):
        self.made += 1
        if Path("broken").exists() and int(Path("broken").read_text()) in (0, self.num_envs, -self.made):
            raise BrokenPipeError("the link\\nbroke")
        return super().step(actions)


def make(num_envs, task="", reward="", max_steps=0):
    return Points(num_envs, 24, radius=0.3)
'''
OWN_RUN = [
    *["train", "--sim", "points:make", "--envs", 16, "--workers", 0, "--no-video", *SMALL, "--out", "run"],
    *["--steps", 2400, "--eval-every", 2400, "--demos", 2, "--bc.updates", 60],
]
BROKE = r"BrokenPipeError: the link broke \(\S+points.py, line \d+\)"


@pytest.mark.parametrize(
    "envs, of", [("40", "evaluation"), ("12", "round")], ids=["evaluation", "own successes"]
)
def test_a_vector_env_that_always_fails_in_a_part_of_a_run_ends_it_in_a_line_and_the_run_is_kept(
    tmp_path, envs, of
):
    (tmp_path / "points.py").write_text(BROKEN)
    (tmp_path / "broken").write_text(envs)
    own = ["--algo", "pi_rl", "--bc.own", 12, "--eval-episodes", 40, "--eval-envs", 40]
    done = robo_rl(tmp_path, *OWN_RUN, *own)
    assert done.code == 2 and "Traceback" not in done.err, done
    assert len(re.findall(rf"the simulator failed, and the {of} begins anew: {BROKE}", done.err)) == 2
    kept = "the run is kept: robo_rl train --resume run goes on with it"
    assert re.search(rf"robo_rl: the simulator failed 3 times in a row: {BROKE}; {kept}\n", done.err)
    (tmp_path / "broken").unlink()
    assert robo_rl(tmp_path, "train", "--resume", "run").code == 0


def test_a_vector_env_that_fails_ends_every_command_in_a_line(tmp_path):
    (tmp_path / "points.py").write_text(BROKEN)
    done = robo_rl(tmp_path, *OWN_RUN, "--algo", "bc")
    assert done.code == 0, done
    (tmp_path / "broken").write_text("0")
    for command in (
        ["check", "--sim", "points:make"],
        ["eval", "run"],
        ["collect", "--sim", "points:make", "--episodes", 2, "--out", "data"],
        [*OWN_RUN, "--algo", "pi_rl", "--out", "other"],
    ):
        done = robo_rl(tmp_path, *command)
        assert done.code == 2 and "Traceback" not in done.err, done
        said = rf"robo_rl: --sim points:make: its first steps failed: {BROKE}\n"
        assert re.search(said, done.err), done
    (tmp_path / "broken").write_text("-6")
    done = robo_rl(tmp_path, "eval", "run", "--episodes", 3)
    assert done.code == 2 and re.search(
        rf"robo_rl: the simulator failed in Points.step: {BROKE}\n", done.err
    ), done


def test_a_run_that_fails_while_it_records_or_reads_demonstrations_says_how_it_goes_on(tmp_path):
    (tmp_path / "points.py").write_text(BROKEN)
    (tmp_path / "broken").write_text("2")
    argv = [*OWN_RUN, "--algo", "bc"]
    kept = "the run is kept: robo_rl train --resume run goes on with it"
    done = robo_rl(tmp_path, *argv)
    assert done.code == 2 and re.search(
        rf"robo_rl: the simulator failed in Points.step: {BROKE}; {kept}\n", done.err
    ), done
    (tmp_path / "broken").unlink()
    assert robo_rl(tmp_path, "train", "--resume", "run").code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (table,) = (tmp_path / "run" / "demos" / "data").rglob("*.parquet")
    table.write_bytes(b"damaged")
    done = robo_rl(tmp_path, "train", "--resume", "run")
    assert done.code == 2 and f"{table.name}: " in done.err and done.err.endswith(f"; {kept}\n"), done


def test_a_function_that_cannot_make_its_envs_is_told_in_a_line(tmp_path):
    (tmp_path / "points.py").write_text("def make(num_envs):\n    return {}['port']\n")
    done = robo_rl(tmp_path, "check", "--sim", "points:make")
    assert done.code == 2 and re.fullmatch(
        r"robo_rl: --sim points:make cannot be made: KeyError: 'port' \(\S+points.py, line 2\)\n", done.err
    ), done


class Diverges(PointReach):
    """Fails in its first life."""

    lives = 0

    def __init__(self):
        super().__init__(4)
        type(self).lives += 1
        self.fails = self.lives == 1

    def step(self, actions):
        if self.fails:
            raise RuntimeError("the solver diverged")
        return super().step(actions)

    def render(self):
        return np.zeros((self.num_envs, 8, 8, 3), np.uint8)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """(an evaluator whose simulator fails in its first life, what it said)."""
    said = []
    report = SimpleNamespace(say=lambda text, *more: said.append(text), start=lambda *a: None, advance=print)
    monkeypatch.setattr(evaluation, "make_env", lambda config, n, render=False: Diverges())
    monkeypatch.setattr(Diverges, "lives", 0)
    return evaluation.Evaluator(TrainConfig(eval_episodes=4), tmp_path, report), said


def policy():
    small = PolicyOptions(horizon=2, execute=2, hidden=8, layers=1)
    return make_policy(small, ObsSpec(state=4, action=2, action_names=("x", "y")), 0)


def test_the_choice_of_noise_begins_anew_where_the_simulator_failed(judged):
    evaluator, said = judged
    assert 0 <= evaluator.success_under_noise(policy(), CHOOSE, lambda n: None) <= 1
    assert Diverges.lives == 2 and "the evaluation begins anew: RuntimeError: the solver" in said[0]


def test_a_simulator_that_fails_costs_the_video_and_not_the_run(judged, monkeypatch):
    evaluator, said = judged
    evaluator.film("sft", policy())
    assert len(said) == 1 and said[0].startswith("no video: RuntimeError: the solver diverged (")

    def mistake(*args):
        raise RuntimeError("of ours")

    monkeypatch.setattr(evaluation, "film", mistake)
    with pytest.raises(RuntimeError, match="of ours"):
        evaluator.film("sft", policy())


class Fails(PointReach):
    """Its step number `fails` fails; 0: none does."""

    fails = 0

    def __init__(self, n):
        super().__init__(n, limit=24, radius=0.4)  # episodes of 1 to 12 decisions
        self.made = 0

    def step(self, actions):
        self.made += 1
        if self.made == self.fails:
            raise RuntimeError("the solver diverged")
        return super().step(actions)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_simulator_that_fails_often_in_a_batch_cuts_it_in_as_many_parts(staleness):
    """Each failure leaves a fragment of what was made before it, and there is room for all of them."""
    small = PolicyOptions(kind="gaussian", horizon=1, execute=1, hidden=8, layers=1)
    acts = make_policy(small, ObsSpec(state=4, action=2, action_names=("x", "y")), 0)

    def again(i, key):
        env = Fails(2)
        env.fails = 3 if key < 5 else 0  # the first five
        return Collector(env, acts, 0.99, key)

    def worker(i, refresh):
        return Worker(i, again(i, 0), acts, refresh, 16)

    feed = InProcessFeed(1, worker, 32, staleness, 16, 0, again=again)
    assert feed.next() is not None and feed.restarts == 5
    feed.ledger.check()


def feed_of(kind, fails=0, seed=0, uid=0):
    """A feed of groups of 4 in 8 envs, whose simulator fails once; `uid` of its first lease."""
    small = PolicyOptions(horizon=2, execute=2, hidden=32, layers=2)
    acts = make_policy(small, ObsSpec(state=4, action=2, action_names=("x", "y")), 0)
    trees = PiRlOptions(decisions=0, advantage="tree", group=4, tree_roots=2, tree_forks=1)

    def collector(env, key):
        return Collector(env, acts, 0.99, key)

    def make(i, refresh):
        env = Fails(8)
        env.fails = fails
        c = collector(env, seed)
        if kind == "trees":
            return EpisodeSlots(i, c, acts, refresh, 4, control=make_control(trees, c))
        return Worker(i, c, acts, refresh, 0, True, 4)

    batch = 16 if kind == "periodic" else 8
    feed = InProcessFeed(1, make, batch, 0, 12, 0, again=lambda i, key: collector(Fails(8), key))
    feed.ledger.next_uid = uid
    return feed


def batch_of(kind, feed):
    pieces = list(feed.stream()) if kind == "periodic" else [feed.next()]
    feed.publish()
    feed.commit()
    feed.ledger.check()
    return pieces


@pytest.mark.parametrize("kind", ["groups", "periodic", "trees"])
def test_groups_that_a_failure_cut_are_made_anew_whole_and_nothing_of_them_is_learnt_from(kind, capfd):
    feed = feed_of(kind, 3)  # before a group is whole
    leased = 2 if kind == "trees" else 1
    got = batch_of(kind, feed)
    assert feed.restarts == 1 and feed.note() == "1 restart" and feed.stats()["health/restarts"] == 1
    assert (
        capfd.readouterr().err.count("the simulator ended and is started anew: RuntimeError: the solver") == 1
    )
    clean = feed_of(kind, seed=leased, uid=leased)  # begins where the other began anew
    for a, b in zip(got, batch_of(kind, clean), strict=True):
        assert torch.equal(a.outcome, b.outcome) and torch.equal(a.x0, b.x0) and torch.equal(a.mask, b.mask)
        assert a.stats["episodes"] == b.stats["episodes"]


@pytest.mark.parametrize("kind", ["groups", "periodic", "trees"])
def test_whenever_a_simulator_fails_the_batches_after_it_are_of_whole_episodes(kind):
    for fails in (25, 31, 40, 52):
        feed = feed_of(kind, fails)
        pieces = [piece for _ in range(6) for piece in batch_of(kind, feed)]
        assert feed.restarts == 1
        for piece in pieces:
            played = piece.mask.any(0)
            assert piece.done.any(0)[played].all() and piece.mask.shape[1] == 8


class Blind(Fails):
    """One without snapshots."""

    @property
    def get_state(self):
        raise AttributeError("get_state")


def test_groups_that_a_stop_cut_in_a_simulator_without_snapshots_are_made_anew_whole(monkeypatch):
    monkeypatch.setitem(globals(), "Fails", Blind)
    feed, asked = feed_of("groups"), iter([False] * 3 + [True])
    assert feed.next(lambda: next(asked)) is None
    assert feed.workers[0].made == 3, "it stops at the next decision"
    again = feed_of("groups", seed=1)
    assert not again.load_state(feed.state())
    (a,), (b,) = batch_of("groups", again), batch_of("groups", feed_of("groups", seed=1))
    assert torch.equal(a.outcome, b.outcome) and torch.equal(a.x0, b.x0), "nothing of what was cut"


OWN_METHOD = """
from pathlib import Path

from robo_rl.algos import ppo
from robo_rl.options import PpoOptions as Options


class Mine:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def update(self, rollout, progress, version=None):
        if Path("late").exists() and not Path("run/run.json").exists():
            return self.inner.update(rollout, progress, version)
        raise KeyError("gain")


def make(policy, options, seed, demos=None):
    return Mine(ppo.make(policy, options, seed, demos))
"""


@pytest.mark.parametrize(
    ("when", "kept"),
    [("first", ""), ("late", "; the run is kept: robo_rl train --resume run goes on with it")],
)
def test_a_method_of_ones_own_that_raises_is_named_below_its_traceback_with_the_way_on(tmp_path, when, kept):
    (tmp_path / "mine.py").write_text(OWN_METHOD)
    (tmp_path / when).touch()
    small = ["--policy.kind", "gaussian", "--demos", 0, "--rl.decisions", 4, "--eval-episodes", 4]
    argv = ["--task", "reach", "--algo", "mine:make", *small, "--envs", 8, "--steps", 800, "--no-video"]
    done = robo_rl(tmp_path, "train", *argv, "--workers", 1, "--out", "run")
    assert done.code == 1 and "KeyError: 'gain'" in done.err, done
    said = done.err.splitlines()[-1]
    assert re.fullmatch(rf"robo_rl: raised by code of your own \(\S+mine.py, line 18\){kept}", said), done


def test_a_full_disk_has_one_way_on_in_a_run():
    assert kept(f"the disk is full: free some space{GO_ON}", Path("run")) == (
        "the disk is full: free some space; the run is kept: robo_rl train --resume run goes on with it"
    )
