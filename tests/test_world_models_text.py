"""A text model: what it reads and writes, its memory, tasks that it writes; on a toy whose every step was
recorded, the toy itself."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import launch_script

from robo_rl.errors import UserError
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector
from robo_rl.types import ActionAxis, ControlSpec
from sims import words
from sims.check import check_env
from world_models import model as worlds
from world_models.env import WorldEnv
from world_models.learning import world_spec
from world_models.recorded import Recorded
from world_models.tasks import Difficulty
from world_models.text import TextModel, lists
from world_models.text_fit import TextFitter, check_text_data, gathered
from world_models.text_options import TextFitOptions, TextOptions
from world_models.text_tasks import EVERY, GeneratedTasks, difficulty_of

PLACES = ("hall", "yard", "attic")
NAMES = (
    *(f"the robot is at the {p}" for p in PLACES),
    *(f"wanted at the {p}" for p in PLACES),
    "the door is open",
)
AXES = tuple(
    ActionAxis(w, "1", -1.0, 1.0, "absolute", f)
    for w, f in [("go to", "verb"), ("wait", "verb"), *((p, "noun") for p in PLACES)]
)
TINY = TextOptions(width=16, depth=1, heads=2)


def command(verb: int, noun: int) -> np.ndarray:
    out = -np.ones(5, np.float32)
    out[[verb, 2 + noun]] = 1
    return out


def text(at: int, wanted: int) -> np.ndarray:
    out = np.zeros(7, np.float32)
    out[[at, 3 + wanted, 6]] = 1
    return out


def a_policy(env: WorldEnv):
    options = PolicyOptions(kind="gaussian", horizon=1, execute=1, hidden=8, layers=1)
    return make_policy(options, ObsSpec(state=7, action=5, language=True), 0)


def toy(times: int = 2) -> Recorded:
    """Every step of a robot that goes between three places, as episodes of two: a step that leads nowhere,
    then another."""
    states, actions, final, won = [], [], [], []
    for at, wanted, verb, noun in itertools.product(range(3), range(3), range(2), range(3)):
        to = noun if verb == 0 else at
        if at == wanted:
            continue
        states += [text(at, wanted)] * 2
        actions += [command(1, noun), command(verb, noun)]
        final.append(text(to, wanted))
        won.append(to == wanted)
    n, won = len(final) * times, np.array(won * times)
    reward = np.zeros(2 * n, np.float32)
    reward[1::2] = won
    control = ControlSpec("toy", "toy", AXES, 1.0, 10, NAMES)
    return Recorded(
        np.array(states * times),
        np.array(actions * times),
        reward,
        2 * np.arange(n),
        2 * np.arange(n) + 2,
        won,
        won.copy(),
        np.zeros(n, np.int64),
        ("go",),
        control,
        {},
        np.array(final * times),
    )


def fresh(data: Recorded, options: TextOptions = TINY, updates: int = 1) -> TextFitter:
    return TextFitter(
        TextModel(world_spec(data, "text", "toy"), options, 0),
        data,
        TextFitOptions(updates=updates, batch=32, lr=1e-2),
        0,
    )


def household() -> TextModel:
    """An untrained model of the household, without memory."""
    env = words.make(num_envs=2)
    data = replace(toy(), control=env.spec, state=np.zeros((8, len(words.SENTENCES)), np.float32))
    return TextModel(world_spec(data, "text", "nothing"), TextOptions(width=16, depth=1, retrieve=0), 0)


@pytest.fixture(scope="module")
def learnt():
    """(model, data): a text model of the toy, learnt to its end."""
    data = toy()
    fitter = fresh(data, updates=300)
    fitter.fit()
    model = fitter.result()
    model.frames = data.frames()
    model.spec = model.spec.calibrated(10, 5.0)
    return model, data


# ---- reading and writing


def test_the_sentences_that_decide_are_found_by_what_they_mention():
    model = household()
    env = words.make(num_envs=1)
    env.reset(seed=0)
    env.robot[:], env.open[:], env.place[:], env.clean[:], env.wanted[:] = (
        3,
        0,
        [[1, 0, 3, 1, 1]],
        [[1, 0, 0, 0, 0]],
        [[1, 2, 0]],
    )
    state = torch.from_numpy(env._obs()["state"] > 0.5)
    found = model.deciding(state, model.command(torch.from_numpy(words.said([("take", "apple")]))))
    assert {s for s, x in zip(words.SENTENCES, found[0], strict=True) if x} == {
        # what no command names
        "the robot is at the drawer",
        "the hand is empty",
        "wanted is the cup",
        "wanted at the sink",
        "the apple is in the drawer",
        "the apple is dirty",
        "the cup is on the table",
        "the cup is dirty",
        "the drawer is closed",
    }


def test_places_are_filled_in_order_and_what_is_written_has_no_gaps():
    got = lists(torch.tensor([[True, False, True], [False, False, False]]), 5, 9)
    assert got.tolist() == [[0, 2], [9, 9]]
    assert gathered([got, torch.tensor([[7], [8]])], 9).tolist() == [[0, 2, 7], [8, 9, 9]]


@pytest.mark.parametrize("options", [TINY, replace(TINY, reason=False), replace(TINY, retrieve=0)])
def test_a_text_is_read_and_written_as_the_page_says(options):
    fitter = fresh(toy(), options)
    m = fitter.model
    read, roles, write = fitter.batch(4)
    assert read.shape[1] == len(roles) == 3 + 1 + 2 * options.retrieve and read.shape[0] == 4
    for row in write:
        row = row[row != m.none].tolist()
        assert row[-1] in (m.on, m.done) and (m.then in row) == options.reason
        if options.reason:  # every sentence that decides, then the changes
            assert (
                set(row[: row.index(m.then)]) <= set(range(7)) and m.then not in row[row.index(m.then) + 1 :]
            )


def test_a_recorded_step_is_not_shown_to_itself_nor_to_its_episode():
    fitter = fresh(toy())
    assert fitter.near is not None
    assert not (fitter.episode[fitter.near] == fitter.episode[:, None]).any()
    at = fitter.near[:, 0]  # everything was recorded twice: the copy is found
    found = (fitter.state[at] == fitter.state).all(1) & (fitter.command[at] == fitter.command).all(1)
    assert found.float().mean() > 0.8  # of one in ten the copy is held out


def test_words_written_one_by_one_have_the_probabilities_of_the_whole(learnt):
    """The cache against a pass over everything."""
    model, data = learnt
    fitter = TextFitter(model, data, TextFitOptions(), 0)
    read, roles, write = fitter.batch(6)
    with torch.no_grad():
        whole = model.net(read, roles, torch.cat([torch.full((6, 1), model.so), write[:, :-1]], 1))
        table = model.net.table()
        cache, there = model.net.read(read, roles, table)
        for at in range(3):
            logits = model.net.write(
                torch.full((6,), model.so) if at == 0 else write[:, at - 1], at, cache, there, table
            )
            assert torch.allclose(logits, whole[:, at], atol=1e-4)


# ---- as a world


def test_a_model_that_learnt_every_step_of_a_world_is_that_world(learnt):
    model, data = learnt
    _, p = model.step(
        model.start({"state": data.state}, np.arange(len(data.state))), torch.from_numpy(data.action)[:, None]
    )
    assert np.array_equal(p.obs["state"][:, 0].numpy(), data.after)
    assert np.array_equal(p.success[:, 0].numpy() > 0.5, data.reward > 0.5) and bool(
        (p.uncertainty < 1).all()
    )


def test_an_env_of_a_text_model_keeps_the_contract_and_pays_for_success(learnt):
    model, _ = learnt
    check_env(lambda n: WorldEnv(model, n), cuts=True)
    env = WorldEnv(model, 4)
    obs, _ = env.reset(seed=0)
    obs, reward, terminated, _, info = env.step(
        np.stack([command(0, int(np.argmax(s[3:6]))) for s in obs["state"]])
    )
    assert reward.tolist() == [1] * 4 and terminated.all() and info["success"].all()
    assert model.text(obs["state"][0]).startswith("the robot is at the ")


def test_a_saved_model_remembers_what_it_was_shown(learnt, tmp_path):
    model, data = learnt
    worlds.save(model, tmp_path)
    again = worlds.load(tmp_path)
    assert isinstance(again, TextModel)
    start = {"state": data.state}
    for a, b in zip(
        (
            m.step(m.start(start, np.arange(len(data.state))), torch.from_numpy(data.action)[:, None])[1]
            for m in (model,)
        ),
        (
            m.step(m.start(start, np.arange(len(data.state))), torch.from_numpy(data.action)[:, None])[1]
            for m in (again,)
        ),
        strict=True,
    ):
        assert torch.equal(a.obs["state"], b.obs["state"]) and torch.equal(a.uncertainty, b.uncertainty)
    assert torch.equal(again.alike, model.alike) and torch.equal(again.fixed, model.fixed)


def test_a_fit_goes_on_exactly_where_it_was_left():
    data = toy()
    whole, first = fresh(data, updates=6), fresh(data, updates=6)
    whole.fit()
    first.fit(lambda update, parts: update < 3)
    second = fresh(data, updates=6)
    second.load_state_dict(first.state_dict())
    second.fit()
    for a, b in zip(whole.result().parameters(), second.result().parameters(), strict=True):
        assert torch.equal(a, b)


# ---- tasks


def test_what_is_wanted_is_what_no_step_changes_and_only_that_is_written(learnt):
    model, data = learnt
    # that the door is open is so in every episode
    assert model.fixed.tolist() == [False] * 3 + [True] * 3 + [False]
    rooms = torch.from_numpy(data.state[:40] > 0.5)
    new = model.write_wanted(rooms, torch.Generator().manual_seed(0))
    assert torch.equal(new[:, ~model.fixed], rooms[:, ~model.fixed])
    assert bool((new[:, model.fixed].sum(1) == 1).float().mean() > 0.9)  # one wish, as in the recordings
    assert bool((new[:, model.fixed] != rooms[:, model.fixed]).any())


def test_new_tasks_come_from_open_ones_and_take_the_place_of_decided_ones(learnt):
    model, data = learnt
    model.frames = data.frames()
    d = difficulty_of(model, 0.5)
    assert (
        isinstance(d, GeneratedTasks)
        and difficulty_of(model, 0.0) is None
        and len(model.frames) == len(data) + d.slots
    )
    model.frames = data.frames()
    d = GeneratedTasks(model, 1.0, slots=16, lot=8)
    assert len(d.there()) == 0
    pool = np.flatnonzero(model.frames.first & ~model.frames.held)
    for _ in range(EVERY):
        d.update(pool[:1], np.array([True]))
    assert len(d.there()) == 8 and d.written == 8  # a lot after so many episodes
    assert set(d.pick(pool[:1].repeat(200), np.arange(200), pool)) & set(d.there())
    d.write()
    assert len(d.there()) == 16
    decided = d.there()[:8]
    for _ in range(40):
        Difficulty.update(d, decided, np.ones(8, bool))
    before = model.frames.obs["state"].copy()
    d.write()
    assert not d.tries[decided].any() and d.written == 16  # the eight that are always solved
    assert np.array_equal(np.delete(before, decided, 0), np.delete(model.frames.obs["state"], decided, 0))
    model.frames = data.frames()


def test_new_tasks_are_made_of_tasks_that_were_tried_and_are_open(learnt):
    model, data = learnt
    model.frames = data.frames()
    d = GeneratedTasks(model, 1.0, slots=16, lot=16)
    pool = np.flatnonzero(model.frames.first & ~model.frames.held)
    Difficulty.update(d, pool[[3, 3]], np.array([True, False]))
    d.write()
    state, fixed = model.frames.obs["state"], model.fixed.numpy()
    assert (state[d.there()[8:]][:, fixed] == state[pool[3], fixed]).all()  # its wish, in recorded rooms
    model.frames = data.frames()


def test_written_tasks_go_on_with_a_checkpoint_and_an_episode_of_a_task_that_is_gone_counts_for_no_other(
    learnt,
):
    model, data = learnt

    def lanes() -> WorldEnv:
        model.frames = data.frames()
        return WorldEnv(model, 4, difficulty=GeneratedTasks(model, 1.0, slots=16, lot=8))

    env = lanes()
    env.reset(seed=3)
    for _ in range(3):
        env.difficulty.write()
    env.difficulty.tries[5], env.difficulty.ended = 2, 7
    collector = Collector(env, a_policy(env), 0.9, 0)
    saved, new = collector.state(), model.frames.obs["state"][env.difficulty.there()].copy()
    env.difficulty.write()
    after = model.frames.obs["state"].copy()
    env = lanes()
    Collector(env, a_policy(env), 0.9, 0).set_state(saved)
    d = env.difficulty
    assert (
        len(new) == 16
        and np.array_equal(model.frames.obs["state"][d.there()], new)
        and (d.tries[5], d.ended) == (2, 7)
    )
    d.write()
    assert np.array_equal(model.frames.obs["state"], after)  # the generators too

    gone = d.there()[d.born[d.there()] > 1][:1]
    d.tries[gone] = 0
    Difficulty.update(d, gone, np.ones(1, bool), d.born[gone] - 1)
    assert not d.tries[gone].any()
    Difficulty.update(d, gone, np.ones(1, bool), d.born[gone])
    assert d.tries[gone].all()
    model.frames = data.frames()


def test_episodes_of_evaluation_do_not_say_which_tasks_are_open(learnt):
    model, data = learnt
    model.frames = data.frames()
    difficulty = Difficulty(len(model.frames), 0.5)
    env = WorldEnv(model, 4, difficulty=difficulty)
    for first, counted in ((1 << 31, 0), (0, 4)):
        obs, _ = env.reset(options={"starts": first + np.arange(4)})
        env.step(np.stack([command(0, int(np.argmax(s[3:6]))) for s in obs["state"]]))
        assert difficulty.tries.sum() == counted


# ---- what it refuses


def test_the_largest_share_of_tasks_leaves_a_recorded_step_in_a_small_batch():
    data, seen = toy(), []
    model = TextModel(world_spec(data, "text", "toy"), TINY, 0)
    TextFitter(model, data, TextFitOptions(updates=2, batch=2, tasks=0.9), 0).fit(
        lambda update, parts: seen.append(parts["text"]) or True
    )
    assert np.isfinite(seen).all() and all(p.isfinite().all() for p in model.parameters())


def test_data_that_are_no_text_are_refused():
    data = toy()
    check_text_data(data, "d")
    for bad, say in (
        (replace(data, state=data.state + 0.5), "other than 0 and 1"),
        (replace(data, reward=data.reward + 1), "only reward"),
        (replace(data, terminated=np.ones(len(data), bool)), "only reward"),
    ):
        with pytest.raises(UserError, match=say):
            check_text_data(bad, "d")
    many = data.state.copy()
    many[1] = 1 - many[0]  # a step turns all seven sentences over
    with pytest.raises(UserError, match="changes 7 sentences, and a text model writes at most 5"):
        check_text_data(replace(data, state=many), "d")
    with pytest.raises(UserError, match="a sentence of its own"):
        fresh(replace(data, control=replace(data.control, state_names=())))
    with pytest.raises(UserError, match="multiple of net.heads"):
        TextOptions(width=20, heads=3)


def test_the_script_keeps_what_it_found_and_names_each_condition(tmp_path, capsys):
    main = launch_script("compare_experience").main
    given = [
        "--seeds",
        "1",
        "--episodes",
        "6",
        "--demos",
        "4",
        "--clone",
        "3",
        "--starts",
        "10",
        "--envs",
        "8",
        "--out",
        str(tmp_path),
        "--only",
        "weak,in the household for as many commands as recorded",
    ]
    main(given)
    said, kept = capsys.readouterr().out, (tmp_path / "rows.jsonl").read_text()
    assert "weak: 0." in said and "as recorded: 0." in said and "less weak" in said
    main(given)
    assert (tmp_path / "rows.jsonl").read_text() == kept, "what is kept is not run again"
