"""Demonstrations that begin where a policy leads, and supervision that asks for as many as it needs."""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from toys import PointReach

import robo_rl as package
import sims
from robo_rl import checkpoint
from robo_rl.algos import bc
from robo_rl.cli.train import parse
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.demos import Lead, demo_sampler, record
from robo_rl.errors import UserError
from robo_rl.experiment import new_policy, sft
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import obs_spec
from robo_rl.experiment.sft import is_enough
from robo_rl.experiment.supervised_frames import SupervisedFrames
from robo_rl.options import BcOptions
from robo_rl.selection import Look

RIGHT = np.array([1.0, 0.0], np.float32)


def led_right(env, episodes, longest, **options):
    """Demonstrations of the expert where something that always moves right, two steps a decision, has acted
    before."""
    found = []
    lead = Lead(lambda obs: np.tile(RIGHT, (env.num_envs, 2, 1)), longest)
    record(env, episodes, 0, found.append, lead=lead, **options)
    return found


def test_an_expert_is_recorded_from_where_it_takes_over_and_nothing_of_who_led():
    for episode in led_right(PointReach(4, limit=40, radius=0.05), 12, 5):
        expert = np.clip(episode.state[:, 2:] / 0.2 * 0.7, -1, 1)
        assert np.allclose(episode.action, expert, atol=1e-5) and episode.success


def test_episodes_that_were_led_begin_off_their_start_and_name_none():
    env = PointReach(4, limit=40, radius=0.05)
    plain = []
    record(env, 12, 0, plain.append)
    known = {tuple(e.state[0]): e.start for e in plain}
    steps = set()
    for episode in led_right(env, 12, 5):
        if episode.start >= 0:
            assert known.get(tuple(episode.state[0]), episode.start) == episode.start
            steps.add(0)
            continue
        goal = episode.state[0, :2] + episode.state[0, 2:]
        origins = [
            np.array(at[:2]) for at in known if np.allclose(np.array(at[:2]) + at[2:], goal, atol=1e-5)
        ]
        moved = [(episode.state[0, :2] - origin) / 0.2 for origin in origins]
        assert all(
            abs(up) < 1e-4 and abs(right - round(float(right))) < 1e-4 and 0 < right < 5.1
            for right, up in moved
        )
        steps |= {round(float(m[0])) for m in moved}
    assert len(steps) > 2


def test_demonstrations_that_are_asked_for_later_have_starts_of_their_own():
    env, first, later = PointReach(4, limit=40), [], []
    record(env, 6, 0, first.append)
    record(env, 6, 0, later.append, first=600)
    assert not {e.start for e in first} & {e.start for e in later} and all(
        e.start >= 0 for e in first + later
    )


def test_demonstrations_are_enough_where_the_interval_of_every_task_says_so():
    assert (
        not is_enough(Look(0, 180, 200, 0.9))
        and is_enough(Look(0, 190, 200, 0.95))
        and is_enough(Look(0, 4, 4, 1.0))
    )
    assert not is_enough(Look(0, 370, 400, 0.925, ((200, 200), (170, 200))))


def test_more_demonstrations_are_asked_for_until_success_or_the_most_is_reached_and_each_time_is_said(
    tmp_path,
):
    done = robo_rl(tmp_path, "train", *TINY, "--steps", 0, "--demos-most", 9, "--out", "run")
    lines = [line for line in done.err.splitlines() if line.startswith("supervised ")]
    assert done.code == 0 and [line.partition(" with ")[2].split(" demonstrations")[0] for line in lines] == [
        "2",
        "6",
        "9",
    ]
    assert (
        "4 more asked of the expert" in lines[0]
        and "90 updates on all 6" in lines[0]
        and "--demos-most" in lines[2]
    )
    data = load(tmp_path / "run" / "demos")
    assert len(data) == 9 and (data.start[:2] >= 0).all() and (data.start[2:] < 0).any()
    before = (tmp_path / "run" / "evals" / "sft.json").read_text()
    assert before.count('"success"') == 1
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if it had been stopped before its first
    again = robo_rl(tmp_path, "train", "--resume", "run")
    assert again.code == 0 and len(load(tmp_path / "run" / "demos")) == 9
    assert _successes(tmp_path / "run") == _successes_of(before)


@pytest.mark.parametrize("recorded", [False, True])
def test_demonstrations_are_learnt_in_more_updates_while_they_help_and_a_tenth_says_whether_they_do(
    tmp_path, recorded
):
    demos: object = 20
    if not recorded:
        demos = package.collect(tmp_path / "data", task="reach", episodes=20, envs=10).folder.name
    more = ("--steps", 0, "--demos", demos, "--bc.updates", 90, "--bc.most", 280, "--out", "run")
    done = robo_rl(tmp_path, "train", *TINY, *more)
    lines = [line for line in done.err.splitlines() if line.startswith("supervised ")]
    assert done.code == 0 and "with 90 updates, loss on held-out episodes" in lines[0], done.err
    assert lines[0].endswith(": 270 updates (--bc.most 280)")
    assert "more demonstrations than " + ("20 (--demos; " if recorded else "those in data") in lines[-1]
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log if "sft/loss" in row][-1] == 90 + 270


def test_layers_of_tanh_or_of_relu_are_taken_as_held_out_demonstrations_tell(tmp_path):
    more = ("--steps", 0, "--demos", 20, "--bc.updates", 600, "--bc.compare", "--out", "run")
    done = robo_rl(tmp_path, "train", *TINY, *more)
    said = re.search(r"episodes ([\d.]+) with tanh, ([\d.]+) with relu: --policy.activation (\w+)", done.err)
    assert done.code == 0 and said, done.err
    losses = dict(zip(("tanh", "relu"), map(float, said.groups()[:2]), strict=True))
    assert losses[said[3]] == min(losses.values()) < max(losses.values())
    _, meta = checkpoint.load_policy(checkpoint.checkpoints(tmp_path / "run")[-1])
    assert meta["policy"]["options"]["activation"] == said[3]


def test_the_worse_of_two_activations_is_not_taken(monkeypatch):
    env, run, made = PointReach(5, limit=40), SimpleNamespace(compared=(0, "")), []
    with TemporaryDirectory() as folder:
        with Writer(Path(folder), spec=env.spec) as w:
            record(env, 20, 0, w.add)
        data = load(Path(folder))
    run.config = package.recipe(demos="20", bc={"compare": True})
    run.env, run.stop = env, SimpleNamespace(asked=False)
    run.report = SimpleNamespace(start=lambda *a: None, advance=lambda *a, **k: None, say=made.append)
    monkeypatch.setattr(new_policy, "SHORT", 3)
    for worse, better in (("tanh", "relu"), ("relu", "tanh")):
        told = {worse: 0.2, better: 0.1}
        monkeypatch.setattr(bc, "mean_loss", lambda policy, *a, told=told: told[policy.options.activation])
        run.compared = (0, "")
        assert new_policy.better_activation(run, SupervisedFrames(data)) == better and better in made[-1]
        assert new_policy.better_activation(run, SupervisedFrames(data)) == better  # found once
    assert len(made) == 2
    run.config = package.recipe(demos="20", policy={"activation": "silu"})  # which a user names, is that
    assert new_policy.better_activation(run, SupervisedFrames(data)) == "silu"
    named = ([], ["--bc.updates", "1"], ["--demos", "0"], ["--policy.activation", "tanh"])
    assert [new_policy.compares(parse(words)) for words in named] == [True, False, False, False]


@dataclass
class Taught:
    """What `repeat_until_enough` reads of a run; its rounds are told: (loss on held-out episodes, successes
    of 100)."""

    told: list[tuple[float, int]]
    config: TrainConfig = field(
        default_factory=lambda: TrainConfig(demos="20", bc=BcOptions(updates=600, most=16_200))
    )
    said: list[str] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    made: int = 0
    policy: int = 0  # the round that taught it
    pooled: None = None
    taught: int = 0
    begun: None = None

    def teach(self, folder, updates, hold_out):
        """In place of `sft.teach`."""
        assert hold_out
        loss, won = self.told[self.made]
        self.made += 1
        self.policy, self.taught, self.looks = self.made, updates, [Look(0, won, 100, 0.0)]
        return loss

    def look(self) -> float:
        self.looks = [Look(0, self.told[self.policy - 1][1], 100, 0.0)]
        return self.looks[-1].worst

    @property
    def report(self):
        return self

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("told", "made", "kept"),
    [
        ([(0.2, 50), (0.1, 80), (0.05, 97)], 3, 3),  # enough, with its interval
        ([(0.2, 90), (0.1, 92), (0.05, 93), (0.04, 94)], 4, 4),  # not with its interval
        ([(0.2, 50), (0.21, 51)], 2, 2),  # neither falls the loss nor rises success by 0.03
        ([(0.2, 50), (0.19, 40), (0.195, 45)], 3, 1),  # the loss falls once, success does not
        ([(0.2, 50), (0.25, 53), (0.3, 53)], 3, 3),  # success rises once
        ([(float("nan"), 50)], 1, 1),  # nothing is held out
    ],
)
def test_more_updates_are_made_while_they_help_and_the_policy_with_the_most_success_is_kept(
    monkeypatch, told, made, kept
):
    run, judged = Taught(told), []
    monkeypatch.setattr(sft, "teach", Taught.teach)
    monkeypatch.setattr(sft, "keep_rounds", lambda run, made, **state: None)
    monkeypatch.setattr(sft, "evaluate_supervised", lambda run: judged.append(run.policy))
    sft.repeat_until_enough(run, None)
    assert run.made == made and judged == [run.policy] == [kept]
    assert run.taught == (600, 1800, 5400, 16_200)[kept - 1] and run.looks[-1].successes == told[kept - 1][1]


def test_of_few_demonstrations_none_is_held_out_and_they_are_learnt_once(tmp_path):
    more = ("--steps", 0, "--demos", 19, "--bc.updates", 1, "--bc.most", 9, "--out", "run")
    done = robo_rl(tmp_path, "train", *TINY, *more)
    assert done.code == 0 and "held-out" not in done.err and "than 19 (--demos; " in done.err, done.err
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log if "sft/loss" in row][-1] == 1


class Told:
    """Its loss is the distance of the action from `weight` times what it is told."""

    def __init__(self, weight):
        self.weight = weight

    def bc_loss(self, obs, chunk, mask, generator, noises=1):
        err = (
            chunk[..., 0]
            - self.weight * obs["tokens"][:, :1]
            + torch.randn(chunk.shape[:2], generator=generator)
        ).square()
        return (err * mask).sum() / mask.sum().clamp(min=1)


def told(names, words=True):
    """Rows whose action is the number that they are told."""

    def sample(size, generator):
        tokens = torch.tensor(names)[torch.randint(len(names), (size,), generator=generator)][:, None]
        return (
            {"tokens": tokens} if words else {},
            tokens[..., None].expand(-1, 4, 1).float(),
            torch.ones(size, 4),
        )

    return sample


def test_the_loss_with_another_rows_instruction_tells_a_policy_that_reads_from_one_that_does_not():
    options = BcOptions(batch=32)
    assert bc.exchanged_loss(Told(0.0), told([1, 3]), options, 0) == 1
    reads = bc.exchanged_loss(Told(1.0), told([1, 3]), options, 0)
    assert abs(reads - 5) < 0.5  # its error is noise of 1, and of the exchanged rows 2² more
    assert np.isnan(bc.exchanged_loss(Told(1.0), told([1, 1]), options, 0))
    assert np.isnan(bc.exchanged_loss(Told(1.0), told([1, 3], words=False), options, 0))


def test_supervision_says_where_a_policy_does_not_read_what_it_is_told(tmp_path):
    done = robo_rl(
        tmp_path, "train", *TINY, "--task", "pick_by_name", "--steps", 0, "--bc.updates", 2, "--out", "run"
    )
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reads = [row["sft/reads"] for row in log if "sft/reads" in row]
    assert (
        done.code == 0
        and len(reads) == 1
        and abs(reads[0] - 1) < 0.05
        and "it does not read what it is told" in done.err
    )
    one = robo_rl(tmp_path, "train", *TINY, "--steps", 0, "--bc.updates", 2, "--out", "one")
    assert (
        one.code == 0
        and "does not read" not in one.err
        and "sft/reads" not in (tmp_path / "one" / "metrics.jsonl").read_text()
    )


def test_the_episodes_that_are_held_out_are_not_drawn(tmp_path):
    env = PointReach(5, limit=40)
    with Writer(tmp_path / "data", spec=env.spec) as w:
        record(env, 10, 0, w.add)
    data, out = load(tmp_path / "data"), np.arange(10) % 10 == 9
    for chosen in (out, ~out):
        sample = demo_sampler(data, obs_spec(env, False), 4, rows=np.flatnonzero(chosen[data.episode_index]))
        obs, _, _ = sample(400, torch.Generator().manual_seed(0))
        drawn = {tuple(row) for row in obs["state"].numpy().tolist()}
        assert drawn <= {tuple(row) for row in data.state[chosen[data.episode_index]].tolist()}


def test_no_more_than_the_demonstrations_that_a_user_names_are_recorded():
    assert parse([]).demos_most > 20 and parse(["--demos", "20"]).demos_most == 0
    assert parse(["--demos=20", "--demos-most", "60"]).demos_most == 60
    assert (
        package.recipe(demos="20").demos_most == 0
        and package.recipe(demos="20", demos_most=60).demos_most == 60
    )
    assert (
        parse([]).bc.most > 600
        and parse(["--bc.updates", "700"]).bc.most == 0 == package.recipe(bc={"updates": 700}).bc.most
    )
    assert package.recipe(sim="arm").demos_most == 0 and package.recipe(obs="rgb").demos_most > 3000
    named = package.recipe(obs="rgb", demos="20")
    assert named.demos_most == named.bc.head_every == package.recipe(sim="arm", obs="rgb").bc.head == 0
    assert named.bc.head == package.recipe(obs="rgb").bc.head > 0 and named.data.every == 1
    assert package.recipe(obs="rgb", demos="20", bc={"head": 9}).bc.head == 9


def test_a_file_that_names_the_demonstrations_names_the_most_too(tmp_path):
    (tmp_path / "c.toml").write_text('demos = "20"\n')
    assert parse(["--config", str(tmp_path / "c.toml")]).demos_most == 0


def _successes_of(text: str) -> list:
    document = json.loads(text)
    return [document["success"], document["return"]]


def _successes(run) -> list:
    return _successes_of((run / "evals" / "sft.json").read_text())


def test_episodes_that_are_too_short_for_the_expert_name_their_limit():
    env = sims.make("mujoco", "push_cube", 2, max_steps=2)
    with pytest.raises(UserError, match=r"succeeds in 0 of 40 .* more than 2 steps \(--max-steps\)"):
        record(env, 1, 0, lambda episode: None)
