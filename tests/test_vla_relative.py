"""Vision-language-action models whose actions are relative to the state: what they do, learn and refuse."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from test_own_data import run_command

from robo_rl import checkpoint
from robo_rl.data import labels
from robo_rl.data.lerobot import load
from robo_rl.demos import axis_statistics
from robo_rl.errors import UserError
from robo_rl.experiment import offline
from robo_rl.experiment.config import TrainConfig
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import observations
from robo_rl.policies.context import Context
from robo_rl.policies.guided import guided_chunk, plain_chunks

pytestmark = pytest.mark.filterwarnings("ignore:data set .* without checksums")
H, E, A = 4, 2, 3
SPEC = ObsSpec(
    state=5, action=A, views=("front",), image_size=32, language=True, text=64, units=("rad", "rad", "1")
)
DELTA = [True, True, False]


def folder_of(kind: str, spec: ObsSpec, path: Path, delta: list[bool]) -> Path:
    """A model's folder, without weights, whose actions are relative to the state where `delta` says so."""
    make_policy(PolicyOptions(kind=kind, horizon=H, execute=E), spec, 0).save_files(path)
    (path / "processor.json").write_text(
        json.dumps(json.loads((path / "processor.json").read_text()) | {"delta": delta})
    )
    return path


def build(tmp_path, kind="pi05", delta=(), spec=SPEC, **options):
    name = f"{kind}-{sum(delta)}"
    folder = (
        tmp_path / name if (tmp_path / name).exists() else folder_of(kind, SPEC, tmp_path / name, list(delta))
    )
    made = make_policy(PolicyOptions(kind=kind, horizon=H, execute=E, folder=str(folder), **options), spec, 0)
    made.obs_norm.fit(torch.randn(50, 5, generator=torch.Generator().manual_seed(3)))
    made.action_norm.fit(0.2 + 0.3 * torch.randn(50, A, generator=torch.Generator().manual_seed(4)))
    return made.eval()


def offset(obs):
    return torch.cat([obs["state"][:, :2], torch.zeros(len(obs["state"]), 1)], 1)[:, None]


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla"])
@torch.no_grad()
def test_it_does_what_the_same_weights_do_beside_the_state_with_the_same_density_of_its_own_variables(
    kind, tmp_path
):
    relative, absolute = build(tmp_path, kind, DELTA), build(tmp_path, kind)
    obs = observations(SPEC, 6)
    for explore in (True, False):
        a, b = (p.act(obs, torch.Generator().manual_seed(1), explore) for p in (relative, absolute))
        assert torch.equal(a.actions, b.actions + offset(obs)) and torch.equal(a.logp, b.logp)
        assert all(torch.equal(a.trace[k], b.trace[k]) for k in b.trace) and torch.equal(a.x0, b.x0)
        if explore:
            assert torch.equal(relative.score(relative.encode(obs), a.trace)[0], a.logp)
    assert torch.allclose(plain_chunks(relative, obs, torch.Generator().manual_seed(1))[:, :E], a.actions)


@torch.no_grad()
def test_supervision_is_that_of_the_actions_less_the_state_also_from_stored_contexts(tmp_path):
    relative, absolute = build(tmp_path, delta=DELTA), build(tmp_path)
    obs, chunk, mask = observations(SPEC, 6), torch.randn(6, H, A), torch.ones(6, H)
    want = absolute.bc_loss(obs, chunk - offset(obs), mask, torch.Generator().manual_seed(0), 2)
    assert torch.equal(relative.bc_loss(obs, chunk, mask, torch.Generator().manual_seed(0), 2), want)
    stored = relative.encode(obs).columns()
    assert (
        torch.equal(Context.of(stored).origin, offset(obs)[:, 0])
        and "context/origin" not in absolute.encode(obs).columns()
    )
    kept = relative.act(stored, torch.Generator().manual_seed(1), False).actions
    assert torch.equal(kept, relative.act(obs, torch.Generator().manual_seed(1), False).actions)


def test_a_chunk_that_agrees_with_the_one_before_it_agrees_in_the_robots_units(tmp_path):
    relative, absolute = build(tmp_path, delta=DELTA), build(tmp_path)
    obs = observations(SPEC, 1)
    goal, weights = (
        torch.randn(H, A, generator=torch.Generator().manual_seed(5)),
        torch.tensor([1.0, 1, 0, 0]).numpy(),
    )

    def made(policy, actions):
        return guided_chunk(
            policy, obs, torch.Generator().manual_seed(2), actions.numpy(), weights, [1.0] * 4
        )

    assert torch.allclose(
        made(relative, goal + offset(obs)[0]), made(absolute, goal) + offset(obs)[0], atol=1e-5
    )


def test_it_comes_back_from_its_checkpoint(tmp_path):
    policy, obs = build(tmp_path, delta=DELTA), observations(SPEC, 2)
    checkpoint.save_checkpoint(tmp_path / "c", policy, {}, {"step": 0})
    again, _ = checkpoint.load_policy(tmp_path / "c")
    acts = [p.act(obs, torch.Generator().manual_seed(0), False).actions for p in (policy, again)]
    assert torch.equal(*acts) and again.processor.is_relative


@pytest.mark.parametrize(
    ("kind", "units", "line"),
    [
        (
            "pi05",
            (),
            "relative to the state, and an env takes commands of -1 to 1, to which no state can be added",
        ),
        ("xvla", SPEC.units, "xvla learns absolute ones alone"),
        ("openvla_oft", SPEC.units, "openvla_oft learns absolute ones alone"),
    ],
)
def test_where_no_state_can_be_added_it_is_refused(kind, units, line, tmp_path):
    with pytest.raises(UserError, match=line):
        build(tmp_path, kind, DELTA, replace(SPEC, units=units))


def test_a_data_set_of_positions_teaches_it_with_statistics_of_what_moved_and_one_of_increments_is_refused(
    tmp_path, capsys
):
    data = load(datasets.write(tmp_path / "set", "aloha", episodes=3, length=14, size=(24, 32), views=1))
    spec = offline.spec_of(TrainConfig(demos=str(data.meta.root), policy=PolicyOptions(kind="smolvla")), data)
    delta = ([True] * 6 + [False]) * 2
    folder = folder_of("smolvla", spec, tmp_path / "model", delta)
    argv = (
        "train",
        "--algo",
        "bc",
        "--demos",
        str(data.meta.root),
        "--policy.kind",
        "smolvla",
        "--policy.folder",
        str(folder),
        "--policy.horizon",
        str(H),
        "--policy.execute",
        str(E),
        "--bc.updates",
        "2",
        "--bc.batch",
        "2",
        "--bc.noises",
        "1",
        "--data.held-out",
        "0",
    )
    assert run_command(*argv, "--out", str(tmp_path / "run")) == 0
    policy, _ = checkpoint.load_policy(checkpoint.checkpoints(tmp_path / "run")[-1])
    own = axis_statistics(data, delta, H)["action"]
    torch.testing.assert_close(policy.action_norm.shift, torch.from_numpy(own["mean"]).float())
    assert own["std"][0] < 0.5 * data.action[:, 0].std(), "a chunk moves less than an episode"
    labels.state_units(data.meta.root, "rad delta")
    capsys.readouterr()
    assert run_command(*argv, "--out", str(tmp_path / "other")) == 2
    assert "of the data set" in (said := capsys.readouterr().err) and "left_waist (delta)" in said, said
