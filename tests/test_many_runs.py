"""Several runs of one command (`robo_rl train --seeds --vary`): what is started, told, stopped and gone on
with."""

import json
import os
import re
import selectors
import signal
import sys
import time

import pytest
from commands import TINY, Command, robo_rl

from robo_rl.cli.train import parse
from robo_rl.errors import UserError
from robo_rl.experiment import many_runs
from robo_rl.files import write_json

# stands for `python -m robo_rl train …`: makes the run folder, says a line and its progress, ends as DO says
FAKE = """#!{python}
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out" if "--out" in sys.argv else "--resume") + 1])
do = json.loads(pathlib.Path("do.json").read_text()).get(out.name, "end")
if do == "refuse":
    print("robo_rl: no such task", file=sys.stderr)
    sys.exit(2)
out.mkdir(parents=True, exist_ok=True)
(out / "run.json").write_text("{{}}")
if do == "wait":
    signal.signal(signal.SIGINT, lambda *_: (print("saved"), sys.exit(130)))
print("begun with", *sys.argv[3:])
print("[rl]   5 % · 1/20 steps", file=sys.stderr, flush=True)
if do == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if do == "wait":
    time.sleep(100)
(out / "checkpoints" / "step_9").mkdir(parents=True)
(out / "checkpoints" / "step_9" / "meta.json").write_text('{{"finished": true}}')
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Start stand-ins of runs; fake(s1="die") says how one behaves."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(many_runs.sys, "executable", str(path))

    def behave(**do):
        write_json(tmp_path / "do.json", do)

    behave()
    return behave


def begin(*argv, count=3, at_once=0, vary=()):
    words, runs = [*argv, "--out", "r"], many_runs.planned(list(range(count)), vary)
    return many_runs.begin(words, parse([*words, "--task", "reach"]), runs, at_once)[1]


def test_seeds_are_numbers_and_ranges():
    assert many_runs.read_seeds("0,1,2") == [0, 1, 2] and many_runs.read_seeds("7, 2-4") == [7, 2, 3, 4]
    for text in ("", "a", "1,1", "4-2", "1.5", "-1", "0-2000", "0-2,2"):
        with pytest.raises(UserError, match="--seeds takes"):
            many_runs.read_seeds(text)


def test_a_command_without_options_varies_nothing():
    assert many_runs.values_of([], "--vary") == many_runs.varied([]) == []
    assert many_runs.values_of(["--vary", "a=1", "--vary=b=2,3"], "--vary") == ["a=1", "b=2,3"]


def test_options_of_their_own_are_left_out_of_what_the_runs_are_given():
    argv = ["--seeds", "0,1", "--task", "reach", "--out=x", "--seeds=3", "--at_once", "2", "--lr", "1"]
    assert many_runs.without(argv, many_runs.OWN) == ["--task", "reach", "--lr", "1"]


def test_as_many_runs_as_cores_each_in_one_process(monkeypatch):
    monkeypatch.setattr(many_runs, "cores", lambda: 6)
    config, two = parse(["--task", "reach"]), parse(["--task", "reach", "--workers", "2"])
    assert many_runs.side_by_side(config, 0) == (6, ["--workers", "0"])
    assert many_runs.side_by_side(config, 1) == (1, [])
    assert many_runs.side_by_side(two, 0) == (3, [])
    assert many_runs.side_by_side(parse(["--task", "reach", "--algo", "bc"]), 0) == (6, [])


def test_what_is_for_processes_beside_the_learner_keeps_them(monkeypatch):
    monkeypatch.setattr(many_runs, "cores", lambda: 6)
    for more in (["--backend", "ray"], ["--server"], ["--max-staleness", "1"]):
        config = parse(["--task", "reach", *more])
        assert many_runs.side_by_side(config, 0) == (1, []) and many_runs.side_by_side(config, 2) == (2, [])


def test_workers_of_a_configuration_file_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(many_runs, "cores", lambda: 6)
    (tmp_path / "c.toml").write_text('task = "reach"\nworkers = 3\n')
    assert many_runs.side_by_side(parse(["--config", str(tmp_path / "c.toml")]), 0) == (2, [])


def test_every_seed_gets_its_folder_its_log_and_the_options_of_all(fake, tmp_path, capfd):
    assert begin("--algo", "pi_rl", at_once=2) == 0
    said = capfd.readouterr().err
    for k in range(3):
        line = f"begun with train --algo pi_rl --workers 0 --seed {k} --out r/s{k}"
        assert f"s{k}: {line}\n" in said and line in (tmp_path / f"r/s{k}.log").read_text()
    assert "[rl]" not in said and "[rl]" in (tmp_path / "r/s0.log").read_text()
    with pytest.raises(UserError, match="already holds runs"):
        begin()


def test_values_of_options_make_a_run_for_each_combination_and_seed():
    vary = ["rl.lr=1e-4,3e-4", "--policy.residual=true,False"]
    runs = many_runs.planned([4, 7], vary)
    assert len(runs) == 8
    assert runs["lr=1e-4,residual=true,s4"] == ["--rl.lr", "1e-4", "--policy.residual", "--seed", "4"]
    assert runs["lr=3e-4,residual=False,s7"] == ["--rl.lr", "3e-4", "--policy.no-residual", "--seed", "7"]
    assert many_runs.planned([], ["init=a/b,c"]) == {"init=a-b": ["--init", "a/b"], "init=c": ["--init", "c"]}
    assert list(many_runs.planned([], ["rl.lr=1,2", "bc.lr=3"])) == ["rl.lr=1,bc.lr=3", "rl.lr=2,bc.lr=3"]
    assert many_runs.planned([], []) == {"": []}
    runs = many_runs.planned([], ["sim=gym:m:A-v0,r=0.1; gym:m:A-v0,r=0.2"])
    assert runs["sim=gym-m-A-v0,r=0.2"] == ["--sim", "gym:m:A-v0,r=0.2"] and len(runs) == 2
    assert max(map(len, many_runs.planned([0], ["init=" + "a" * 300, "demos=b,c"]))) < 100


def test_an_option_of_several_values_varies_by_lists():
    runs = many_runs.planned([1], ["rl.sizes=[64,64],[32 16]"])
    assert runs == {
        "sizes=64,64,s1": ["--rl.sizes", "64", "64", "--seed", "1"],
        "sizes=32-16,s1": ["--rl.sizes", "32", "16", "--seed", "1"],
    }
    assert many_runs.read_values("sim=gym:A,x=[1,2]; gym:B") == ("sim", ["gym:A,x=[1,2]", "gym:B"])
    config = parse(["--algo", "recap", *many_runs.as_typed("rl.force", "[human,expert]")])
    assert config.rl.force == ("human", "expert")


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        (["rl.lr"], "takes an option and its values"),
        (["rl.lr=1,1"], "each once"),
        (["rl.lr=1e-3,0.001"], "each once"),
        (["rl.lr=1,"], "takes an option and its values"),
        (["seed=1,2"], "seeds vary by --seeds"),
        (["rl.lr=1,2", "rl.lr=3"], "names an option once"),
        (["init=a/b,a-b"], "one folder"),
        (["rl.lr=" + ",".join(map(str, range(1001)))], "at most 1,000"),
    ],
)
def test_values_that_make_no_runs_are_refused(vary, words):
    with pytest.raises(UserError, match=words):
        many_runs.planned([], vary)


def test_what_the_first_run_refuses_is_refused_once_and_leaves_no_folder(fake, tmp_path, capfd):
    fake(s0="refuse", s1="refuse", s2="refuse")
    assert begin(at_once=3) == 2
    assert capfd.readouterr().err == "s0: robo_rl: no such task\n" and not (tmp_path / "r").exists()


def test_one_that_dies_lets_the_others_go_on_and_alone_is_gone_on_with(fake, tmp_path, capfd):
    fake(s1="die")
    assert begin(at_once=1) == 1
    said = capfd.readouterr().err
    assert "s1: killed by signal 9\n" in said and "failed, with its exit status: s1 (137); go on with" in said
    fake()
    assert many_runs.train_all(tmp_path / "r") == 0
    said = capfd.readouterr().err
    assert f"s1: begun with train --resume {tmp_path / 'r' / 's1'}" in said and "s0:" not in said


def test_a_signal_is_passed_on_and_what_waits_is_not_started(fake, tmp_path, capfd, monkeypatch):
    fake(s0="wait", s1="wait")
    started = many_runs.Runs.say

    def say(self, child, line):
        started(self, child, line)
        if b"begun" in line and child.name == "s1":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(many_runs.Runs, "say", say)
    assert begin(at_once=2) == 130
    said = capfd.readouterr().err
    assert "s0: saved" in said and "s1: saved" in said and "stopped; go on" in said
    assert not (tmp_path / "r" / "s2").exists()


def test_a_run_that_does_not_save_in_time_is_killed(fake, capfd, monkeypatch):
    fake(s0="wait")
    monkeypatch.setattr(many_runs, "STOPPING", 0.3)
    monkeypatch.setattr(many_runs.Runs, "say", lambda self, *_: self.came.append(signal.SIGCONT))
    assert begin(count=1, at_once=1) == 128 + signal.SIGCONT


def test_a_damaged_list_of_seeds_is_said(fake, tmp_path):
    (tmp_path / "r").mkdir()
    for wrong in ({"runs": [0]}, {"runs": {"s0": "--x"}, "at_once": 1}, {"runs": {}, "at_once": "x"}):
        write_json(tmp_path / "r" / "runs.json", wrong)
        with pytest.raises(UserError, match="runs.json is damaged"):
            many_runs.train_all(tmp_path / "r")


def test_a_run_that_begins_later_has_the_configuration_that_was_asked_for(fake, tmp_path):
    (tmp_path / "mine.toml").write_text("envs = 8\n")
    fake(s0="die", s1="die")
    assert begin("--config=mine.toml", count=2, at_once=1) == 1
    (tmp_path / "mine.toml").write_text("envs = 9\n")
    assert (tmp_path / "r" / "config.toml").read_text() == "envs = 8\n"
    assert "--config r/config.toml --seed 1 --out r/s1" in (tmp_path / "r" / "s1.log").read_text()


def test_a_full_disk_for_what_runs_say_lets_them_go_on(fake, tmp_path, capfd):
    (tmp_path / "r").mkdir()
    for k in range(2):
        (tmp_path / "r" / f"s{k}.log").symlink_to("/dev/full")
    assert begin(count=2, at_once=1) == 0
    assert capfd.readouterr().err.count("the disk is full: what runs say is missing in r/s0.log") == 1


def test_what_does_not_go_together_is_refused(tmp_path):
    for argv, words in (
        (["--seeds", "0,1", "--seed", "2"], "give one of them"),
        (["--at-once", "2"], "--at-once is of several runs"),
        (["--seeds", "0,1", "--twin"], "leave --seeds and --vary out"),
        (["--vary", "rl.lr=1e-4,1e9"], "rl.lr"),
        (["--vary", "task=reach,reech"], "--vary task=reech: unknown mujoco task"),
        (["--vary", "demos=2,nowhere", "--plan"], "no such folder"),
        (["--vary=eval-envs=1,2", "--eval_envs", "3"], "give one of them"),
        (["--vary", "video=true,false", "--no-video"], "give one of them"),
        (["--vary", "algo=pi_rl,pi_lr"], "pi_rl"),
        (["--vary", "rl.lr=1,2", "--resume", "r"], "--resume goes on with the options of the run"),
        (["--seeds", "0,1", "--resume", "r"], "--resume goes on with the options of the run"),
    ):
        assert words in robo_rl(tmp_path, "train", *argv).mistake


def test_options_of_a_method_that_varies_are_known_however_vary_is_typed():
    for vary in (["--vary=algo=demo_sac,rlpd"], ["--vary", "algo=demo_sac,rlpd"]):
        assert many_runs.varied(["--rl.warmup", "128", *vary]) == ["algo=demo_sac,rlpd"]


def test_a_plan_tells_what_runs_side_by_side_need(tmp_path):
    done = robo_rl(tmp_path, "train", *TINY, "--seeds", "0-4", "--at-once", "3", "--plan")
    one, all_ = done.out.splitlines()[-2:]
    assert done.code == 0 and one.startswith("fits") and all_.startswith("5 runs, 3 at once: ")
    peak = next(float(x.split()[1].replace(",", "")) for x in done.out.splitlines() if x.startswith("  peak"))
    assert all_ == f"5 runs, 3 at once: {3 * peak / 1e3:.1f} GB, fits"
    two = robo_rl(tmp_path, "train", *TINY, "--vary", "image-size=64,65", "--plan")
    assert two.code == 0 and re.search(r"^image-size=65: \d", two.out, re.M), two
    assert "the one that needs most, image-size=6" in two.out
    many = robo_rl(tmp_path, "train", *TINY, "--seeds", "0-999", "--at-once", "1000", "--plan")
    assert many.code == 1 and "does not fit" in many.out.splitlines()[-1]


def test_runs_of_seeds_are_those_of_single_commands_and_are_compared(tmp_path):
    done = robo_rl(tmp_path, "train", *TINY, "--seeds", "3,5", "--out", "r")
    assert done.code == 0 and "reach pi_rl  2" in done.out and "open r/compare.html" in done.out, done
    alone = robo_rl(tmp_path, "train", *TINY, "--seed", "5", "--out", "alone")
    assert alone.code == 0, alone
    one, two = (json.loads((tmp_path / p / "evals/final.json").read_text()) for p in ("r/s5", "alone"))
    assert {k: v for k, v in one.items() if k != "time"} == {k: v for k, v in two.items() if k != "time"}
    again = robo_rl(tmp_path, "train", "--resume", "r")
    assert again.code == 0 and "reach pi_rl  2" in again.out and not again.err, again


def test_runs_of_several_methods_and_values_are_compared_by_what_differs(tmp_path):
    words = [
        "train",
        *many_runs.without(TINY, ["--rl.epochs"]),
        "--vary",
        "algo=pi_rl,ppo",
        "--vary",
        "rl.epochs=1,2",
        "--seeds",
        "0",
        "--out",
        "r",
    ]
    done = robo_rl(tmp_path, *words)
    assert done.code == 0, done
    for name in ("algo=pi_rl rl.epochs=1", "algo=pi_rl rl.epochs=2", "algo=ppo rl.epochs=1"):
        assert re.search(rf"^{name} +1 ", done.out, re.M)
    assert (tmp_path / "r" / "algo=ppo,epochs=2,s0" / "evals" / "final.json").exists()


def test_runs_end_with_the_command_that_began_them(tmp_path):
    command = Command(tmp_path, ["train", *TINY, "--steps", "10000000", "--seeds", "0,1", "--out", "r"])
    folders = [tmp_path / "r" / f"s{k}" for k in range(2)]
    command.until(lambda: all((f / "run.json").exists() for f in folders))
    owners = [int((f / ".lock").read_text()) for f in folders]
    command.signal(signal.SIGKILL)
    end = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in owners) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in owners)


def test_progress_is_told_once_and_only_of_runs_that_made_some(tmp_path):
    runs, ends = many_runs.Runs(tmp_path, {"s2": []}, 2, []), []
    for name in ("s0", "s1"):
        read, write = os.pipe()
        ends += [read, write]
        log = open(tmp_path / name, "ab", buffering=0)  # noqa: SIM115
        child = many_runs.Child(name, None, log)
        runs.selector.register(read, selectors.EVENT_READ, child)
        runs.say(child, "[sft] 100 % · 9/9 updates".encode())
    assert runs.news() == "s0 [sft] 100 % · 9/9 updates | s1 [sft] 100 % · 9/9 updates | 1 wait"
    assert runs.news() == ""
    runs.say(runs.children[1], "[rl]   5 % · 1/20 steps".encode())
    assert runs.news() == "s1 [rl]   5 % · 1/20 steps | 1 wait"
    for child in runs.children:
        child.log.close()
    runs.selector.close()
    for end in ends:
        os.close(end)
