"""People who record demonstrations: a device that is a fed stream, and the console's page."""

import asyncio
import re

import numpy as np
import pytest
from commands import Command
from consoles import Page, connect, drive
from streams import NORTH, SELECT, SOUTH, START, TR, WEST, Feed, key, press, stick

from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.collect import CollectOptions, collect

GO, REST, OFF = key(TR) + stick(1, -1), [b""] * 3, key(TR, 0) + stick(1, 0)


def session(*marks):
    """Episodes of four driven steps, each ended by a mark; then stop."""
    steps = [b"", b""]
    for mark in marks:
        steps += [GO, *REST, press(mark), OFF, b""]
    return [*steps, press(START)]


def record(tmp_path, steps, **more):
    feed = Feed(tmp_path / f"pad{len(list(tmp_path.iterdir()))}", steps)
    try:
        return collect(
            CollectOptions(
                operator=f"gamepad:{feed.path}", speed=0, out=str(tmp_path / "data"), threads=1, **more
            )
        )
    finally:
        feed.close()


@pytest.mark.parametrize(
    "sim, task",
    [
        ("mujoco", "reach"),
        ("gym:Pendulum-v1", ""),
        pytest.param("envpool:Pendulum-v1", "", marks=pytest.mark.slow),
        pytest.param("arm", "pick_cube", marks=pytest.mark.slow),
    ],
)
def test_a_person_with_a_gamepad_records_what_they_drove_in_any_env(tmp_path, sim, task):
    if sim.startswith("envpool"):
        pytest.importorskip("envpool", reason="needs robo_rl[envpool]")
    got = record(tmp_path, session(NORTH, WEST, SELECT, NORTH), sim=sim, task=task, episodes=5)
    # of the discarded one nothing is known
    assert (got.episodes, got.successes, got.tried, got.total) == (2, 2, 3, 2)
    data = load(tmp_path / "data")
    assert data.success.all() and not data.features.phases
    for e in range(2):
        episode = data.episode(e)
        # at half speed
        assert (
            set(episode.source) == {"human"} and len(episode) == 5 and np.allclose(episode.action[:, 0], 0.5)
        )
        assert episode.start == data.episode(0).start + 3 * e
    assert not list(tmp_path.glob("*.journal"))


def test_failures_are_kept_if_asked_and_a_data_set_goes_on(tmp_path):
    steps = session(NORTH, WEST)
    assert record(tmp_path, steps, sim="gym:Pendulum-v1", keep="all", episodes=2).successes == 1
    assert record(tmp_path, steps, sim="gym:Pendulum-v1", keep="all", episodes=1).total == 3
    data = load(tmp_path / "data")
    assert (
        data.success.tolist() == [True, False, True] and len({data.episode(e).start for e in range(3)}) == 3
    )


def test_the_gripper_is_recorded_as_it_was_commanded(tmp_path):
    steps = [b"", key(TR), press(SOUTH), b"", press(NORTH), press(START)]
    record(tmp_path, steps, task="reach", episodes=1)
    assert load(tmp_path / "data").action[:, -1].tolist() == [1, -1, -1, -1]


def test_demonstrations_of_a_person_train_a_policy(tmp_path):
    record(tmp_path, session(NORTH, NORTH), task="reach", episodes=2)
    from robo_rl.demos import demo_sampler
    from robo_rl.experiment.envs import make, obs_spec

    env = make("mujoco", "reach", 1, threads=1)
    import torch

    obs, chunk, mask = demo_sampler(load(tmp_path / "data"), obs_spec(env, False), 4)(
        8, torch.Generator().manual_seed(0)
    )
    env.close()
    assert chunk.shape == (8, 4, 7) and mask[:, 0].all() and len(obs["state"]) == 8


@pytest.mark.parametrize(
    "more, words",
    [
        ({"operator": "joystick"}, "Allowed: .*gamepad"),
        ({"operator": "gamepad", "noise": 0.1}, "--noise is for episodes without a person"),
        ({"operator": "console:x"}, "takes nothing after it"),
        ({"device": "gamepad"}, "--device is for --operator console"),
        ({"operator": "console", "device": "console"}, "got console"),
        ({"operator": "gamepad:/dev/input/event0,mapping=/x"}, "/x"),
    ],
)
def test_an_operator_that_cannot_be_is_one_clear_line(more, words):
    with pytest.raises(UserError, match=words):
        CollectOptions(**more)


def test_a_person_at_the_page_records_an_episode_and_discards_another(tmp_path):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    command = Command(
        tmp_path,
        [
            "collect",
            "--operator",
            "console",
            "--port",
            "0",
            "--task",
            "reach",
            "--episodes",
            "1",
            "--out",
            "data",
            "--threads",
            "1",
        ],
        env={"PYTHONUNBUFFERED": "1"},
    )
    command.until(lambda: command.out.exists() and "http://" in command.out.read_text(), 120)
    address = re.search(r"http\S+", command.out.read_text())[0]

    async def teach():
        async with connect(address) as ws:
            page = Page(ws)
            await page.hear(lambda p: p.state and p.pictures)
            assert page.state["robots"][0]["phase"] == "pause"  # nobody drives: it stands still
            for success in (None, True):
                number = (await page.ask(t="take", robot=0))["number"]
                driving = asyncio.create_task(drive(page, number, 10_000))
                await page.hear(
                    lambda p: (
                        p.state["robots"][0]["phase"] == "correction" and p.state["robots"][0]["time"] > 0.1
                    )
                )
                driving.cancel()
                said = await page.ask(
                    t="mark", robot=0, episode=page.state["robots"][0]["episode"], success=success
                )
                assert ("discarded" in said["text"]) == (success is None)
                if success is None:
                    await page.hear(lambda p: p.state["robots"][0]["last"].endswith("discarded it"))

    asyncio.run(teach())
    done = command.wait(60)
    assert done.code == 0 and "1 of 1 episodes added" in done.out, done
    [episode] = [load(tmp_path / "data").episode(0)]
    assert (
        episode.success
        and set(episode.source) == {"human"}
        and np.allclose(episode.action[:, :6], 0.2)
        and episode.reward[-1] == 1
    )
