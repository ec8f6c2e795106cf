"""Along recorded episodes: errors by their definition, the curves of the page, which checkpoint is best."""

import json

import numpy as np
import pytest
import torch

from robo_rl import checkpoint
from robo_rl.cli import main
from robo_rl.data import labels
from robo_rl.data.lerobot import Episode, Features, Writer, load
from robo_rl.experiment import open_loop
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.experiment.train import train
from robo_rl.options import BcOptions, DataOptions, PolicyOptions
from robo_rl.policies import ObsSpec

NAMES = ("pan.pos", "tilt.pos")


def write(folder, episodes, actions, units="deg", task="turn"):
    """Episodes of (state, action), each [T, 2]."""
    with Writer(folder, Features(10, NAMES, actions)) as w:
        for state, action in episodes:
            w.add(Episode(np.asarray(state, np.float32), np.asarray(action, np.float32), task=task))
    labels.state_units(folder, units)
    return load(folder)


def test_errors_of_axes_are_means_over_the_actions_that_there_are(tmp_path):
    """Of five frames in chunks of two, the last one has one action; a gripper has no state of its own."""
    action = np.array([[0, 0], [1, 0], [2, 0], [3, 0], [4, 10]])
    data = write(tmp_path / "set", [(action + 1, action), (action, action)], ("pan.pos", "grip"), "deg,%")
    rows = np.concatenate([open_loop.chunk_starts(data, e, 2) for e in (0, 1)])
    assert rows.tolist() == [0, 2, 4, 5, 7, 9]
    made = np.zeros((6, 2, 2), np.float32)
    told = open_loop.axis_errors(data, rows, made)
    pan, grip = told["axes"]
    assert pan["error"] == pytest.approx(2.0) and grip["error"] == pytest.approx(2.0)
    assert pan["error_of_mean"] == pytest.approx(1.2) and grip["error_of_mean"] == pytest.approx(3.2)
    # measured at the first frame of a chunk: |1 - 0|, |1 - 1|, |3 - 2|, |3 - 3|, |5 - 4|; then 0, 1, 0, 1, 0
    assert pan["error_of_state"] == pytest.approx(0.5) and grip["error_of_state"] is None
    assert told["error"] == pytest.approx((2 / 1.2 + 2 / 3.2) / 2)
    assert told["error_of_state"] == pytest.approx(0.5 / 1.2)
    assert told["error_of_episode"] == pytest.approx([told["error"]] * 2) and told["frames"] == 6
    assert pan["low"] == pan["high"] == pytest.approx(2.0)  # both episodes have the same error


def test_a_curve_is_what_the_policy_would_do_from_each_chunks_beginning(tmp_path):
    state = np.arange(10).reshape(5, 2)
    data = write(tmp_path / "set", [(state, state + 1)], NAMES)

    class Ahead:
        """Adds one to the state with every step."""

        spec, options = ObsSpec(state=2, action=2), PolicyOptions(horizon=4, execute=2)

        def __call__(self, obs):
            return obs["state"][:, None] + np.arange(1, 3)[None, :, None]

    told = open_loop.along(Ahead(), data, DataOptions(), 0, 0, 100)
    assert told["recorded"] == (state + 1).tolist()
    assert told["predicted"] == [[1, 2], [2, 3], [5, 6], [6, 7], [9, 10]]
    assert (
        told["execute"] == 2 and told["rate"] == 10 and told["axes"][1] == {"name": "tilt.pos", "unit": "deg"}
    )
    assert len(open_loop.along(Ahead(), data, DataOptions(), 0, 0, 1)["recorded"]) == 2


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """A run whose episodes have nothing in common: what it learns of some makes it worse on the others."""
    root, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    still = [[np.tile(rng.normal(size=2), (6, 1)) for _ in range(2)] for _ in range(10)]
    write(root / "set", still, NAMES)
    config = TrainConfig(
        sim="none",
        algo="bc",
        demos=str(root / "set"),
        out=str(root / "run"),
        policy=PolicyOptions(horizon=4, execute=2, hidden=32),
        bc=BcOptions(updates=200, batch=32, ema=0.9),
        data=DataOptions(held_out=0.5),
    )
    train(config, quiet=True)
    return root / "run"


def test_the_best_checkpoint_has_the_least_error_on_held_out_episodes(memorised):
    rows = [json.loads(line) for line in (memorised / "metrics.jsonl").read_text().splitlines()]
    error = {r["step"]: r["heldout/error"] for r in rows if "heldout/error" in r}
    least = min(error, key=error.__getitem__)
    assert list(error) == [*range(20, 201, 20)] and least < 200
    _, best = pick_checkpoint(memorised, "best")
    _, last = pick_checkpoint(memorised, "last")
    assert best.name == checkpoint.name(least) and last.name == checkpoint.name(200)
    assert checkpoint.checkpoints(memorised) == [best, last]
    weights = [checkpoint.load_policy(path)[0].state_dict() for path in (best, last)]
    assert any(not torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    document = json.loads((memorised / "heldout.json").read_text())
    assert document["update"] == least and dict(document["looks"]) == pytest.approx(error)
    # nobody goes on from it, so it holds no optimizer
    train_state, meta = checkpoint.load_train(best)
    assert train_state == {} and "teaching" not in meta


def test_the_page_says_which_checkpoint_is_used_and_shows_what_it_would_do(memorised, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(memorised)])
    page = (memorised / "report.html").read_text()
    document = json.loads((memorised / "heldout.json").read_text())
    assert f"that of update {document['update']:,} is used" in page and "--checkpoint last" in page
    shown = json.loads((memorised / "heldout_episodes.json").read_text())
    assert "error of the actions on held-out episodes: 1" in capsys.readouterr().out
    assert [e["which"] for e in shown] == ["largest", "least", "median"]
    assert page.count("<summary>Episode") == 3 and page.count("dot marks c1") == 3 * 2 * 3
    assert f"{shown[0]['error']:.2f} of that of the mean action" in page


def said(capsys, *argv) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    captured = capsys.readouterr()
    return int(e.value.code or 0), captured.out, captured.err


def test_data_that_was_recorded_later_judges_a_run_without_a_simulator(
    memorised, tmp_path, capsys, monkeypatch
):
    rng = np.random.default_rng(1)
    still = [[np.tile(rng.normal(size=2), (6, 1)) for _ in range(2)] for _ in range(4)]
    new = write(tmp_path / "new", still, NAMES).meta.root
    code, out, _ = said(capsys, "eval", memorised, "--demos", new)
    assert code == 0 and "4 episodes, 12 chunks" in out and "pan.pos" in out and "over 4 episodes" in out
    path = memorised / f"eval-data-new-{pick_checkpoint(memorised, 'best')[1].name}.json"
    document = json.loads(path.read_text())
    policy = checkpoint.load_policy(pick_checkpoint(memorised, "best")[1])[0]
    rows = np.arange(0, 24, 2)
    made = open_loop.predict(policy, load(new), DataOptions(), rows, 0)
    assert document["axes"][0]["error"] == pytest.approx(
        np.abs(made - load(new).action[rows][:, None])[..., 0].mean()
    )
    assert document["low"] < document["error"] < document["high"] and not document["learnt_from"]
    _, out, _ = said(
        capsys, "eval", memorised, "--demos", new, "--checkpoint", "last", "--episodes", 2, "--json"
    )
    assert json.loads(out)["episodes"] == [0, 1] and json.loads(out)["step"] == 200
    looked, plain = [], checkpoint.checkpoints
    monkeypatch.setattr(checkpoint, "checkpoints", lambda run: looked.append(run) or plain(run))
    argv = ("eval", memorised, "--demos", new)
    said(capsys, *argv)
    assert looked == [memorised]  # its folder is read once
    code, out, _ = said(
        capsys, *argv, "--against", memorised / "checkpoints" / checkpoint.name(200), "--json"
    )
    other = json.loads(out)["against"]
    _, out, _ = said(capsys, *argv, "--checkpoint", "last", "--json")
    last = json.loads(out)
    assert other["error"] == last["error"] and other["checkpoint"] == checkpoint.name(200) and code == 0
    each = np.subtract(document["error_of_episode"], last["error_of_episode"])
    assert other["difference"] == pytest.approx(each.mean(), abs=1e-6)
    assert other["low"] < other["difference"] < other["high"]
    assert other["high"] - other["low"] < last["high"] - last["low"]  # paired
    _, out, _ = said(capsys, *argv, "--against", memorised)
    assert "paired by episode: 0  95 % interval [0, 0]; below 0: this run is nearer" in out
    code, _, wrong = said(capsys, *argv, "--against", tmp_path / "none")
    assert code == 2 and "none does not exist" in wrong
    said(capsys, "report", memorised)
    page = (memorised / "report.html").read_text()
    assert str(new) in page and f"{document['error']:.3g}" in page
    _, out, _ = said(capsys, "eval", memorised, "--demos", memorised.parent / "set")
    assert "those that the run learnt from" in out


def test_data_that_was_recorded_otherwise_is_refused_in_one_line(memorised, tmp_path, capsys):
    x = np.zeros((4, 2))
    write(tmp_path / "rad", [(x, x)], NAMES, "rad")
    write(tmp_path / "names", [(x, x)], ("pan.pos", "roll.pos"))
    for name, words in (("rad", "--units"), ("names", "roll.pos")):
        code, _, err = said(capsys, "eval", memorised, "--demos", tmp_path / name)
        assert code == 2 and words in err and "recorded alike" in err and err.count("\n") == 1
    small = 0.5 * np.pi / 180 * np.linspace(-1, 1, 8).reshape(4, 2)
    write(tmp_path / "small", [(small, small)], NAMES)
    code, _, err = said(capsys, "eval", memorised, "--demos", tmp_path / "small")
    assert code == 2 and "pos' goes from -0.00" in err and "other units" in err
    write(tmp_path / "task", [(x + 1, x)], NAMES, task="fold")
    code, out, _ = said(capsys, "eval", memorised, "--demos", tmp_path / "task")
    assert code == 0 and "the run never learnt the instruction 'fold'" in out
    code, _, err = said(capsys, "eval", memorised, "--demos", tmp_path / "rad", "--task", "x")
    assert code == 2 and "--task" in err


def test_a_run_from_a_data_set_begins_with_another_runs_weights(memorised, tmp_path, capsys):
    rng = np.random.default_rng(2)
    walks = [[rng.normal(size=(8, 2)) * 3 for _ in range(2)] for _ in range(4)]
    more = write(tmp_path / "more", walks, NAMES).meta.root
    argv = ("train", "--sim", "none", "--algo", "bc", "--init", memorised, "--out", tmp_path / "run")
    tiny = ("--bc.updates", 1, "--bc.batch", 4, "--bc.lr", "1e-7")
    code, _, err = said(capsys, *argv, "--demos", more, *tiny)
    assert code == 0, err
    had, has = (
        checkpoint.load_policy(pick_checkpoint(run, "best")[1])[0].state_dict()
        for run in (memorised, tmp_path / "run")
    )
    assert all(torch.allclose(had[k], has[k], atol=1e-5) for k in had)  # scales of the state and actions too
    other = write(tmp_path / "other", walks, ("pan.pos", "grip"), "deg,%").meta.root
    code, _, err = said(capsys, *argv[:-1], tmp_path / "no", "--demos", other, *tiny)
    assert code == 2 and "action axes are pan.pos, tilt.pos, the data set's pan.pos, grip. Use a data" in err
    assert not (tmp_path / "no").exists()
