"""World models of several instructions: what they are conditioned on, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_world_models import LIMIT, of_episodes
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.recording import Recorder, expert_actor, play, random_actor
from world_models import instructions
from world_models import model as worlds
from world_models.calibrate import calibrate, open_loop
from world_models.env import WorldEnv
from world_models.evaluate import measure
from world_models.fit import FitOptions, Fitter
from world_models.judge import Classifier, ClassifierOptions
from world_models.judge_protocol import Seen
from world_models.latent import Latent, LatentOptions
from world_models.learning import train, world_spec
from world_models.options import WorldEvalConfig, WorldModelConfig
from world_models.recorded import check_fits

WORDS = ("go to the goal", "stay away from the goal")


class TwoTasks(PointReach):
    """Reach the goal, or leave it: an episode of the second instruction succeeds where the point is farther
    from the goal than 1.2."""

    def __init__(self, n):
        super().__init__(n, LIMIT, WORDS)

    def step(self, actions):
        live = ~self.over.any(0)
        self.pos[live] += 0.2 * np.clip(actions[live], -1, 1)
        self.t[live] += 1
        away = np.linalg.norm(self.goal - self.pos, axis=1)
        won = np.where(self.word == 1, away > 1.2, away < 0.3)
        self.over[0] |= live & won
        self.over[1] |= live & ~won & (self.t >= self.limit)
        return (
            self._obs(),
            (live & won).astype(np.float32),
            self.over[0].copy(),
            self.over[1].copy(),
            {"success": self.over[0].copy()},
        )


@pytest.fixture(scope="module")
def data():
    env, kept = TwoTasks(20), []
    recorder = Recorder(env, kept.append, "policy", 0.8, 0)
    play(recorder, expert_actor(env), 100, 0)
    play(recorder, random_actor(env, 0), 100, 1)
    return of_episodes(kept, env.spec)


@pytest.fixture(scope="module")
def learnt(data):
    model = Latent(world_spec(data, "latent", "toy"), LatentOptions(hidden=32, layers=2, members=2), 0)
    fitter = Fitter(model, data, FitOptions(updates=300, batch=96, unroll=2, lr=5e-3, ema=0.98), 0)
    fitter.fit()
    model = fitter.result()
    model.frames = data.frames()
    model.spec = model.spec.calibrated(LIMIT, calibrate(open_loop(model, data, LIMIT - 1))[1])
    return model


def test_of_instructions_that_take_turns_each_has_held_out_episodes_whatever_their_order(data):
    turns = replace(data, task=np.arange(len(data)) % 2)
    assert np.bincount(turns.task[turns.held]).tolist() == [10, 10] and turns.held.sum() == len(data) // 10
    np.testing.assert_array_equal(turns.in_terms_of(WORDS[::-1]).held, turns.held)
    alone = replace(data, task=np.zeros(len(data), np.int64))
    np.testing.assert_array_equal(np.flatnonzero(alone.held), np.arange(9, len(data), 10))


def test_instructions_are_the_words_that_tell_them_apart():
    x = instructions.features(("pick up the red cube", "pick up the blue cube", "push the blue cube"))
    assert (
        len(np.unique(x, axis=0)) == 3 and np.square(x[1] - x[2]).sum() > np.square(x[1] - x[0]).sum() - 1e-6
    )
    assert instructions.features(("one",)).shape == (1, 0)
    assert len(np.unique(instructions.features(("a b a c a", "a c a b a")), axis=0)) == 2, (
        "the same words and pairs"
    )
    many = instructions.features([f"put number {i} on {j}" for i in range(20) for j in range(10)])
    assert many.shape == (200, instructions.MOST) and len(np.unique(many.round(5), axis=0)) == 200


def test_success_in_the_model_depends_on_the_instruction(learnt):
    """One step to the right brings the point to 0.15 of its goal, or from 1.1 to 1.3 away from it."""
    state = np.array([[0, 0, 0.35, 0], [0, 0, -1.1, 0]], np.float32)
    obs = {"state": np.repeat(state, 2, 0), "task": np.array(WORDS * 2)}
    p = learnt.step(learnt.start(obs, np.arange(4)), torch.tensor([1.0, 0.0]).expand(4, 1, 2))[1]
    near_go, near_stay, far_go, far_stay = p.success[:, 0].tolist()
    assert near_go > 10 * near_stay and far_stay > 10 * far_go


def test_the_env_tells_the_model_which_instruction_an_episode_has(learnt):
    env = WorldEnv(learnt, 40)
    obs, _ = env.reset(seed=0)
    assert set(obs["task"]) == set(WORDS)
    assert [learnt.spec.tasks[i] for i in env.carry["task"]] == obs["task"].tolist()


def test_a_model_of_instructions_survives_its_folder_and_one_of_before_reads_no_text(learnt, tmp_path):
    import json

    worlds.save(learnt, tmp_path)
    again = worlds.load(tmp_path)
    obs = {"state": learnt.frames.obs["state"][:4], "task": np.array(WORDS * 2)}
    a, b = (m.step(m.start(obs, np.arange(4)), torch.ones(4, 2, 2))[1] for m in (learnt, again))
    assert torch.equal(a.success, b.success)
    one = Latent(replace(learnt.spec, tasks=WORDS[:1]), LatentOptions(hidden=32, layers=2, members=2), 0)
    one.frames = replace(learnt.frames, task=learnt.frames.task * 0)
    worlds.save(one, tmp_path / "old")
    doc = json.loads((tmp_path / "old/world.json").read_text())
    del doc["options"]["text"]
    doc["spec"]["tasks"] = list(WORDS)
    (tmp_path / "old/world.json").write_text(json.dumps(doc))
    old = worlds.load(tmp_path / "old")
    assert not old.options.text and old.words.shape == (1, 0)


def test_one_instruction_gives_the_model_of_before_bit_by_bit(learnt):
    spec = replace(learnt.spec, tasks=WORDS[:1])
    a, b = (Latent(spec, LatentOptions(hidden=8, text=text), 3).state_dict() for text in (True, False))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and "words" not in a


def test_an_instruction_never_seen_or_not_given_is_one_line(learnt, data):
    obs = {"state": data.state[:2]}
    with pytest.raises(UserError, match="was never taught 'fly'; it knows '"):
        learnt.start(obs | {"task": np.array(["fly", WORDS[0]])}, np.arange(2))
    with pytest.raises(
        UserError, match=r"knows 2 instructions; an observation must say which: obs\['task'\]"
    ):
        learnt.start(obs, np.arange(2))
    with pytest.raises(UserError, match="'fly' was never taught to the model"):
        check_fits(learnt.spec, replace(data, tasks=("fly", WORDS[1])), "here")


def test_several_instructions_and_a_model_without_text_are_refused(data, tmp_path, learnt):
    from robo_rl.data.episode import Episode
    from robo_rl.data.reader import load
    from robo_rl.data.writer import Writer

    with Writer(tmp_path / "d", spec=data.control) as writer:
        for a, b, t in zip(data.first[:30], data.end[:30], data.task[:30], strict=True):
            writer.add(Episode(data.state[a:b], data.action[a:b], reward=data.reward[a:b], task=WORDS[t]))
    config = WorldModelConfig(
        data=(str(tmp_path / "d"),), out=str(tmp_path / "r"), net=LatentOptions(text=False)
    )
    with pytest.raises(UserError, match="has 2 instructions .* without text would average over them"):
        train(config)
    dataset, asked = (
        load(tmp_path / "d"),
        WorldEvalConfig(model="m", dataset="d", windows=8, horizon=4, inverse=5),
    )
    old = Latent(replace(learnt.spec), LatentOptions(hidden=8, text=False), 0)
    old.frames = learnt.frames
    with pytest.raises(UserError, match="without text would average"):
        measure(old, dataset, asked)
    other = Latent(replace(learnt.spec, tasks=("go to the goal", "fly")), LatentOptions(hidden=8), 0)
    other.frames = learnt.frames
    with pytest.raises(
        UserError,
        match="has the instruction 'stay away from the goal', which the world model was never taught",
    ):
        measure(other, dataset, asked)


def test_recordings_are_renumbered_in_the_models_terms(data):
    turned = data.in_terms_of((WORDS[1], WORDS[0]))
    assert turned.tasks == WORDS[::-1] and (turned.task == 1 - data.in_terms_of(WORDS).task).all()
    assert data.in_terms_of(("fly", *WORDS)).tasks == ("fly", *WORDS)


def test_a_classifier_judges_by_the_instruction(data, tmp_path):
    from world_models.judge import load_classifier

    judge = Classifier(
        4, 2, (), ClassifierOptions(updates=200, batch=64, false_alarms=0.05), tasks=data.tasks
    )
    judge.fit(data)
    judge.save(tmp_path)
    state = np.array([[0, 0, 0.1, 0.05]] * 2, np.float32)
    seen = Seen({}, {"state": state}, np.array(WORDS), np.zeros((2, 2)), np.zeros(2))
    for it in (judge, load_classifier(tmp_path)):
        go, stay = it(seen)
        assert go > 0.5 > stay
    with pytest.raises(UserError, match="the judge was never taught 'fly'"):
        judge(replace(seen, task=np.array(["fly"] * 2)))


def test_data_sets_whose_actions_mean_different_things_teach_no_model_together(tmp_path):
    from robo_rl.data.writer import Writer
    from world_models.reading import read

    for name, scale in (("a", 1.0), ("b", 2.0)):
        env = PointReach(4, LIMIT)
        axes = tuple(replace(a, high=scale * a.high, low=scale * a.low) for a in env.spec.axes)
        with Writer(tmp_path / name, spec=replace(env.spec, axes=axes)) as writer:
            play(Recorder(env, writer.add, "policy", 0.0, 0), expert_actor(env), 4, 0)
    read([tmp_path / "a", tmp_path / "a"])
    with pytest.raises(
        UserError,
        match=r"b differs from .*a in what its actions mean: action .* there, .* here; train on sets of one "
        r"env",
    ):
        read([tmp_path / "a", tmp_path / "b"])
