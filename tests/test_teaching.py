"""Supervision that is stopped or killed goes on where it was: every number of it, but the clock's."""

import json
import os
import signal
import warnings
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch

from robo_rl import checkpoint
from robo_rl.cli import main
from robo_rl.data import labels
from robo_rl.data.lerobot import Episode, Features, Writer
from robo_rl.experiment import teaching
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.folder import half_taught, pick_checkpoint
from robo_rl.experiment.train import resume, train
from robo_rl.options import BcOptions, DataOptions, PolicyOptions

UPDATES = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = datasets.write(tmp_path_factory.mktemp("set"), "so100", 6, 12, (48, 64))
    labels.state_units(folder, "deg*5,%")
    return folder


def make_config(data, out, kind="flow", cache_mb=64) -> TrainConfig:
    policy = PolicyOptions(kind=kind, horizon=8, hidden=16, width=16, depth=1)
    return TrainConfig(
        sim="none",
        algo="bc",
        demos=str(data),
        out=str(out),
        image_size=64,
        policy=policy,
        bc=BcOptions(updates=UPDATES, batch=4, shift=0.1),
        data=DataOptions(cache_mb=cache_mb),
    )


def result_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    policy, meta = checkpoint.load_policy(checkpoint.checkpoints(folder)[-1])
    return policy.state_dict(), [{k: v for k, v in r.items() if "time" not in k} for r in rows], meta


def same(a, b) -> bool:
    alike = all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1] == b[1]
    return alike and a[2]["looks"] == b[2]["looks"]


# pictures that are kept, or decoded ahead of the learner; a policy that keeps another one frozen
@pytest.mark.parametrize(("kind", "cache_mb"), [("flow", 64), ("flow", 1), ("diffusion", 64), ("smolvla", 1)])
def test_a_run_from_a_data_set_that_a_signal_stopped_ends_as_one_that_was_not(data, tmp_path, kind, cache_mb):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert 78 * 2 * 64 * 64 * 3 > 1 << 20  # frames of two cameras: they do not fit the smaller cache
    train(make_config(data, whole, kind, cache_mb), quiet=True)

    def stop(event):
        if (event.kind, event.stage, event.step) == ("progress", "sft", 5):
            os.kill(os.getpid(), signal.SIGTERM)

    _, code = train(make_config(data, parts, kind, cache_mb), stop, quiet=True)
    assert code == 128 + signal.SIGTERM
    policy, meta = checkpoint.load_policy(checkpoint.checkpoints(parts)[-1])
    assert meta["taught"] == [5, 5] and not meta["finished"]
    begun = []
    assert resume(parts, lambda e: begun.append((e.stage, e.step)), quiet=True)[1] == 0
    assert ("sft", 5) in begun and ("sft", 4) not in begun
    assert same(result_of(whole), result_of(parts))
    assert result_of(parts)[2]["taught"][1] == UPDATES


class Killed(Exception):
    pass


def test_a_run_from_a_data_set_that_was_killed_goes_on_from_what_it_kept_on_the_way(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr(teaching, "LEAST", 0.0)
    monkeypatch.setattr(teaching, "RARE", 0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(make_config(data, whole), quiet=True)

    def kill(event):
        if (event.kind, event.stage, event.step) == ("progress", "sft", 8):
            raise Killed

    with pytest.raises(Killed):
        train(make_config(data, parts), kill, quiet=True)
    assert checkpoint.read_meta(checkpoint.checkpoints(parts)[-1])["taught"] == [7, 7]
    resume(parts, quiet=True)
    assert same(result_of(whole), result_of(parts))


def test_what_is_kept_while_supervision_goes_on_is_the_policy_that_it_would_end_with(data, tmp_path):
    """So it can be evaluated and deployed meanwhile."""
    short = make_config(data, tmp_path / "short", cache_mb=64)
    train(replace(short, bc=replace(short.bc, updates=1)), quiet=True)
    parts = tmp_path / "parts"

    def stop(event):
        if (event.kind, event.stage, event.step) == ("progress", "sft", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    train(make_config(data, parts), stop, quiet=True)
    a, b = result_of(tmp_path / "short")[0], result_of(parts)[0]
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert f"1 of 12 supervised updates; robo_rl train --resume {parts}" in half_taught(
        *pick_checkpoint(parts, "best")
    )
    assert half_taught(*pick_checkpoint(tmp_path / "short", "best")) == ""


ROUNDS = TrainConfig(
    task="reach",
    algo="bc",
    demos="2",
    demos_most=5,
    envs=2,
    eval_episodes=2,
    video=False,
    policy=PolicyOptions(hidden=16, layers=1, width=16, depth=1),
    bc=BcOptions(updates=3, batch=8),
)


def test_supervision_in_a_simulator_goes_on_too(tmp_path):
    config = replace(ROUNDS, demos_most=0, bc=BcOptions(updates=UPDATES, batch=8))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(replace(config, out=str(whole)), quiet=True)

    def stop(event):
        if (event.kind, event.stage, event.step) == ("progress", "sft", 5):
            os.kill(os.getpid(), signal.SIGTERM)

    train(replace(config, out=str(parts)), stop, quiet=True)
    said = []
    more = replace(config, init=str(parts), out=str(tmp_path / "more"), bc=replace(config.bc, updates=0))
    train(more, lambda e: said.append(e.text) if e.kind == "warning" else None, quiet=True)
    assert [text for text in said if "has learnt for 5 of 12 supervised updates" in text]
    begun = []
    resume(parts, lambda e: begun.append((e.stage, e.step)), quiet=True)
    assert ("sft", 5) in begun and ("sft", 4) not in begun
    assert same(result_of(whole), result_of(parts))


HEAD = replace(ROUNDS, obs="rgb", image_size=32, bc=replace(ROUNDS.bc, head=4, head_every=8))


@pytest.mark.parametrize(
    ("config", "stage", "at"),
    [
        (ROUNDS, "demo", 1),  # while the expert is asked for more
        (HEAD, "look", 1),
        (replace(ROUNDS, demos="20", demos_most=0, bc=replace(ROUNDS.bc, most=30)), "sft", 7),
    ],
)
def test_a_run_killed_in_the_second_round_of_supervision_does_not_make_the_first_again(
    tmp_path, config, stage, at
):
    whole, parts, told = tmp_path / "whole", tmp_path / "parts", []
    if config.bc.most:  # a data set
        train(
            replace(config, out=str(tmp_path / "data"), bc=replace(config.bc, updates=0, most=0)), quiet=True
        )
        config = replace(config, demos=str(tmp_path / "data/demos"))

    def tell(event):
        if event.kind == "evaluation" or event.kind == "stage":
            told.append(event.stage if event.kind == "stage" else "looked")

    train(replace(config, out=str(whole)), tell, quiet=True)
    second = told[told.index("looked") + 1 :]
    told.clear()

    def kill(event):
        tell(event)
        if (event.kind, event.stage) == ("progress", stage) and event.step >= at and "looked" in told:
            raise Killed

    with pytest.raises(Killed):
        train(replace(config, out=str(parts)), kill, quiet=True)
    assert checkpoint.read_meta(checkpoint.checkpoints(parts)[-1])["rounds"] == 1
    said = half_taught(*pick_checkpoint(parts, "last"))
    assert "between two rounds of supervision, after 1 and" in said and f"--resume {parts}" in said
    told.clear()
    resume(parts, tell, quiet=True)
    assert told == second and "sft" in second or "head" in second
    assert same(result_of(whole), result_of(parts))
    assert half_taught(*pick_checkpoint(parts, "last")) == ""
    names = [sorted(p.name for p in (run / "evals").iterdir()) for run in (whole, parts)]
    assert names[0] == names[1]


def stages_of(config) -> list[str]:
    told = []
    train(config, lambda e: told.append(e.stage) if e.kind == "stage" else None, quiet=True)
    return told


def test_every_wait_of_a_run_from_a_data_set_has_a_line(data, tmp_path):
    """Pictures that are decoded before the first update, and whether the policy reads, take long."""
    assert stages_of(make_config(data, tmp_path / "run")) == ["decode", "sft", "reads", "held out"]


def test_a_trunk_learns_what_instructions_mean_from_a_data_set_too(data, tmp_path):
    config = make_config(data, tmp_path / "run", "smolvla", 1)
    config = replace(config, bc=replace(config.bc, ground=2, updates=2))
    assert stages_of(config) == ["ground", "sft", "reads", "held out"]


def test_an_axis_that_never_moves_and_a_policy_of_the_state_alone_cost_no_word(tmp_path):
    names, folder = ("pan.pos", "still.pos"), tmp_path / "set"
    with Writer(folder, Features(20, names, names)) as w:
        for e in range(4):
            x = np.random.default_rng(e).random((12, 2), np.float32)
            x[:, 1] = 10
            w.add(Episode(state=x, action=x, task=("up", "down")[e % 2]))
    labels.state_units(folder, "deg")
    config = make_config(folder, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stages_of(replace(config, bc=replace(config.bc, shift=0))) == ["sft", "reads", "held out"]
    pan, still = json.loads((tmp_path / "run" / "heldout.json").read_text())["axes"]
    assert pan["error_of_mean"] > 0 and still["error_of_mean"] == still["error_of_state"] == 0


def test_a_run_from_a_data_set_is_not_evaluated_in_another_robots_simulator(data, tmp_path, capsys):
    train(make_config(data, tmp_path / "run"), quiet=True)
    with pytest.raises(SystemExit) as e:
        main(["eval", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert e.value.code == 2 and "robo_rl report" in said and "mujoco" not in said
