"""With --workers 0 a run that is killed, at whatever point, ends as one that was not: every number of it, but
the clock's."""

import json
import random
import signal
import time

import numpy as np
import pytest
from commands import CLASSIFIER, TINY, TINY_REPLAY, Command, robo_rl

from robo_rl import checkpoint
from robo_rl.options import OFF_POLICY

REPLAY = (*TINY_REPLAY, "--steps", 640, "--eval-every", 192)
ROLLOUT = (*TINY, "--steps", 2048, "--eval-every", 512, "--envs", 8)
PERSON = (
    "--rl.operator",
    "scripted",
    "--rl.scripted-operator.notice-time",
    0.1,
    "--rl.scripted-operator.reaction-time",
    0.1,
)
RUNS = (
    {name: (*REPLAY, "--algo", name) for name in OFF_POLICY}
    | {name: (*ROLLOUT, "--algo", name) for name in ("ppo", "pi_rl", "dppo", "reinflow", "nft")}
    | {
        "a person": (*REPLAY, "--algo", "hil_serl", "--policy.gripper", "toggle", *PERSON),
        "a classifier": (*REPLAY, *CLASSIFIER),
        "synthetic": (
            *REPLAY,
            "--algo",
            "demo_sac",
            "--rl.synthetic",
            0.25,
            "--rl.synthetic-every",
            256,
            "--rl.synthetic-updates",
            5,
            "--rl.synthetic-rows",
            300,
        ),
        "latency": (*ROLLOUT, "--algo", "pi_rl", "--latency", 0.04, "--latency-jitter", 0.02),
        "bounded steps": (*ROLLOUT, "--algo", "pi_rl", "--rl.trust-kl", 0.002, "--rl.critic-ready", 0.2),
        "returns": (
            *ROLLOUT,
            "--algo",
            "pi_rl",
            "--rl.lr",
            0.3,
            "--rl.trust-kl",
            0,
            "--rl.critic-warmup",
            0,
            "--demos",
            20,
            "--bc.updates",
            500,
            "--policy.hidden",
            64,
            "--eval-episodes",
            40,
            "--bc.batch",
            256,
            "--bc.lr",
            0.001,
        ),
        "groups ahead": (
            *ROLLOUT,
            "--algo",
            "pi_rl",
            "--rl.advantage",
            "grpo",
            "--rl.group",
            4,
            "--max-staleness",
            2,
        ),
        "trees": (
            *ROLLOUT,
            "--algo",
            "pi_rl",
            "--rl.advantage",
            "tree",
            "--rl.group",
            8,
            "--rl.tree-where",
            "uncertain",
            "--rl.prune",
            0.5,
        ),
        "sizes of groups": (
            *ROLLOUT,
            "--algo",
            "pi_rl",
            "--rl.advantage",
            "grpo",
            "--rl.group",
            4,
            "--max-staleness",
            1,
            "--starts",
            "pool",
            "--start-pool",
            8,
            "--start-rows",
            4,
            "--rl.allocate",
            "gdro",
        ),
        "flat groups replaced": (
            *ROLLOUT,
            "--algo",
            "pi_rl",
            "--rl.advantage",
            "rloo",
            "--rl.group",
            4,
            "--rl.allocate",
            "refill",
        ),
        "rounds of groups": (
            *ROLLOUT,
            "--algo",
            "nft",
            "--rl.advantage",
            "dr_grpo",
            "--rl.group",
            4,
            "--rl.allocate",
            "ada",
        ),
        "a sampler": (*ROLLOUT, "--algo", "ppo", "--starts", "toys:failures"),
        "a pool of starts": (
            *ROLLOUT,
            "--algo",
            "ppo",
            "--starts",
            "v0",
            "--start-pool",
            32,
            "--start-rows",
            8,
        ),
        "a sampler of replay": (*REPLAY, "--algo", "demo_sac", "--starts", "toys:failures"),
        "several tasks": (
            *ROLLOUT,
            "--algo",
            "ppo",
            "--task",
            "reach,open_drawer",
            "--tasks",
            "rulereasoner",
        ),
        "along demonstrations": (*ROLLOUT, "--algo", "ppo", "--starts", "reverse"),
        "replay along demonstrations": (*REPLAY, "--algo", "demo_sac", "--starts", "reverse"),
        "a sampler of groups": (
            *ROLLOUT,
            "--algo",
            "pi_rl",
            "--rl.advantage",
            "grpo",
            "--rl.group",
            4,
            "--max-staleness",
            2,
            "--starts",
            "toys:failures",
        ),
    }
)
CLOCK = ("time", "rate/", "util/")


def rows(run) -> list[dict]:
    """Lines of metrics.jsonl without what a clock measured."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)} for line in lines]


def differences(a, b, where="") -> list[str]:
    """Where two trees of arrays and numbers differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [w for k in a.keys() | b.keys() for w in differences(a.get(k), b.get(k), f"{where}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [
            w for i, (x, y) in enumerate(zip(a, b, strict=False)) for w in differences(x, y, f"{where}/{i}")
        ]
    if isinstance(a, dict | list | tuple) or isinstance(b, dict | list | tuple):
        return [where]
    same = np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    return [] if same else [where]


def assert_same_runs(whole, other, checkpoints: int = 0) -> None:
    """Metrics, evaluations, checkpoints (from that one on) with all of their state, journals and recorded
    episodes."""
    assert rows(whole) == rows(other)
    assert [p.name for p in checkpoint.checkpoints(whole)] == [p.name for p in checkpoint.checkpoints(other)]
    for a, b in list(zip(checkpoint.checkpoints(whole), checkpoint.checkpoints(other), strict=False))[
        checkpoints:
    ]:
        assert not differences(checkpoint.load_train(a)[0], checkpoint.load_train(b)[0])
        assert (a / "policy.safetensors").read_bytes() == (b / "policy.safetensors").read_bytes()
    for path in sorted((whole / "evals").glob("*.json")):
        x, y = (json.loads((run / "evals" / path.name).read_text()) for run in (whole, other))
        assert not differences(*({k: v for k, v in e.items() if k != "time"} for e in (x, y))), path.name
    for path in sorted((whole / "replay").rglob("*.log")):
        assert path.read_bytes() == (other / path.relative_to(whole)).read_bytes(), path
    if (whole / "corrections" / "meta").exists():
        from robo_rl.data.reader import load

        x, y = (load(run / "corrections") for run in (whole, other))
        for name in ("state", "action", "reward", "from_", "to", "source", "phase"):
            assert np.array_equal(getattr(x, name), getattr(y, name)), name


def kill_at_random(folder, argv, kills: int, seed: int) -> list[int]:
    """`argv` killed `kills` times, each time resumed -> the numbers of metric lines after which it was; then
    to the end."""
    whole, run, rng = folder / "whole", folder / "killed", random.Random(seed)
    began = time.monotonic()
    assert (done := robo_rl(folder, "train", *argv, "--out", "whole")).code == 0, done
    pace = (time.monotonic() - began) / len(rows(whole))
    points = sorted(rng.sample(range(len(rows(whole)) - 3), kills))
    command = Command(folder, ("train", *argv, "--out", "killed"))
    for point in points:
        command.until(lambda point=point: (run / "run.json").exists() and len(rows(run)) >= point)
        time.sleep(rng.uniform(0, pace / 2))
        command.signal(signal.SIGKILL)
        command.wait()
        command = Command(folder, ("train", "--resume", "killed"))
    assert (end := command.wait()).code == 0, end
    return points


@pytest.mark.parametrize("name", ["hil_serl", "pi_rl", "along demonstrations", "a pool of starts"])
def test_a_run_killed_twice_ends_as_one_that_was_not(name, tmp_path):
    kill_at_random(tmp_path, RUNS[name], 2, 0)
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_five_random_points_ends_as_one_that_was_not(name, tmp_path):
    points = kill_at_random(tmp_path, RUNS[name], 5, 1)
    print(f"\n{name}: killed after {points} of {len(rows(tmp_path / 'whole'))} lines")
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")


POINTS = '''
import os
import signal
from pathlib import Path
from toys import PointReach


class Points(PointReach):
    """Step AT of its first life asks the run to stop; counts the steps of a life."""

    made, name = 0, "before"

    def step(self, actions):
        self.made += 1
        if self.name in ("first", "second"):
            Path(self.name).write_text(str(self.made))
            if self.made == int(os.environ["AT"]) and self.name == "first":
                os.kill(os.getpid(), signal.SIGINT)
        return super().step(actions)


def make(num_envs, task="", reward="", max_steps=0):
    env = Points(num_envs, 24, radius=0.4)
    if num_envs == 8:  # neither demonstrations nor evaluations
        env.name = "second" if Path("first").exists() else "first"
    return env
'''
POINT = [
    w for k, v in zip(TINY[::2], TINY[1::2], strict=False) if k not in ("--task", "--envs") for w in (k, v)
]
STOPPED = (*POINT, "--no-video", "--sim", "points:make", "--envs", 8, "--algo", "pi_rl")
GROUPED = ("--rl.advantage", "grpo", "--rl.group", 4)


@pytest.mark.parametrize(
    "more",
    [(), GROUPED, (*GROUPED, "--max-staleness", 2), ("--rl.advantage", "tree", "--rl.group", 8)],
    ids=["decisions", "groups", "groups ahead", "trees"],
)
def test_a_run_in_one_process_stops_within_a_rollout_and_goes_on_as_if_it_had_not(more, tmp_path):
    (tmp_path / "points.py").write_text(POINTS)
    argv = (*STOPPED, *more, "--steps", 1600, "--eval-every", 600)
    assert (done := robo_rl(tmp_path, "train", *argv, "--out", "whole", env={"AT": "0"})).code == 0, done
    (tmp_path / "first").unlink()
    stopped = robo_rl(tmp_path, "train", *argv, "--out", "stopped", env={"AT": "34"})
    assert stopped.code == 128 + signal.SIGINT and "press again to end at once" in stopped.err, stopped
    assert int((tmp_path / "first").read_text()) <= 40, "to the end of its chunk, of 8 steps"
    (worker,) = checkpoint.load_train(checkpoint.checkpoints(tmp_path / "stopped")[-1])[0]["feed"]["workers"]
    assert worker.get("lease") or worker.get("groups"), "within a rollout"
    again = robo_rl(tmp_path, "train", "--resume", "stopped", env={"AT": "0"})
    assert again.code == 0 and (tmp_path / "second").exists(), again
    assert_same_runs(tmp_path / "whole", tmp_path / "stopped", checkpoints=1)


@pytest.mark.slow
# the critic's stage comes after the warm-up, or first of all
@pytest.mark.parametrize("name", ["hil_serl", "calql"])
def test_a_run_asked_to_stop_before_its_critics_are_ready_ends_as_one_that_was_not(name, tmp_path):
    argv, run = (*RUNS[name], "--rl.pretrain", 600), tmp_path / "stopped"
    assert robo_rl(tmp_path, "train", *argv, "--out", "whole").code == 0
    command = Command(tmp_path, ("train", *argv, "--out", "stopped"))
    for rounds in (3, 7):
        command.until(lambda rounds=rounds: sum("critic/q" in row for row in rows(run)) >= rounds)
        command.signal(signal.SIGTERM)
        assert (result := command.wait()).code == 128 + signal.SIGTERM, result
        state = checkpoint.load_train(checkpoint.checkpoints(run)[-1])[0]
        assert rounds * 50 <= state["pretrained"] < 600 and not state["online"]
        command = Command(tmp_path, ("train", "--resume", "stopped"))
    assert (end := command.wait()).code == 0, end
    assert_same_runs(tmp_path / "whole", run, checkpoints=1)  # the first of them was saved anew by the stop
