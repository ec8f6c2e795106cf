"""The household in words: the contract, its rules by hand, its expert."""

import numpy as np
import pytest

from robo_rl.errors import UserError
from sims import words
from sims.check import check_env


def test_it_keeps_the_contract():
    assert {"snapshot", "expert", "starts"} <= set(check_env(lambda n: words.make(num_envs=n)))


def holds(obs: dict, sentence: str) -> bool:
    return bool(obs["state"][0, words.AT[sentence]])


def tell(env: words.Household, *commands: tuple[str, str]) -> dict:
    obs = {}
    for command in commands:
        obs, *_ = env.step(words.said([command]))
    return obs


def room() -> words.Household:
    """One room: robot and cup at the table, all shut, the key on the shelf, a clean cup wanted in the
    cabinet."""
    env = words.make(num_envs=1)
    env.reset(seed=0)
    env.robot[:], env.open[:], env.place[:], env.clean[:] = 0, 0, [[1, 0, 3, 1, 1]], [[1, 0, 0, 0, 0]]
    env.wanted[:] = [[1, words.CABINET, 1]]
    return env


def test_a_text_says_everything_that_is_so_and_nothing_else():
    env = room()
    obs = env._obs()
    said = [s for s, x in zip(words.SENTENCES, obs["state"][0], strict=True) if x]
    assert said == [
        "the robot is at the table",
        "the hand is empty",
        "the drawer is closed",
        "the cabinet is locked",
        "the key is on the shelf",
        "the cup is on the table",
        "the apple is in the drawer",
        "the plate is on the shelf",
        "the sponge is on the shelf",
        "the cup is dirty",
        "the apple is dirty",
        "the plate is dirty",
        "the sponge is dirty",
        "wanted is the cup",
        "wanted at the cabinet",
        "wanted clean",
    ]


def test_commands_do_what_their_rules_say_and_others_nothing():
    env = room()
    before = env._obs()["state"]
    for command in (
        ("take", "plate"),
        ("put", "cup"),
        ("open", "cabinet"),
        ("wash", "cup"),
        ("go to", "cup"),
        ("take", "table"),
    ):
        assert np.array_equal(tell(env, command)["state"], before), command
    obs = tell(env, ("take", "cup"))
    assert (
        holds(obs, "the hand holds the cup")
        and not holds(obs, "the hand is empty")
        and not holds(obs, "the cup is on the table")
    )
    obs = tell(env, ("go to", "drawer"), ("put", "cup"))
    assert holds(obs, "the hand holds the cup")  # the drawer is closed
    obs = tell(
        env, ("open", "drawer"), ("put", "cup"), ("take", "apple"), ("go to", "cabinet"), ("open", "cabinet")
    )
    # an apple is no key
    assert holds(obs, "the cup is in the drawer") and holds(obs, "the cabinet is locked")


def test_success_is_the_clean_thing_in_its_place():
    env = room()
    tell(
        env,
        ("go to", "shelf"),
        ("take", "key"),
        ("go to", "cabinet"),
        ("open", "cabinet"),
        ("put", "key"),
        ("go to", "table"),
        ("take", "cup"),
        ("go to", "cabinet"),
    )
    obs, reward, terminated, _, info = env.step(words.said([("put", "cup")]))
    assert holds(obs, "the cup is in the cabinet") and not info["success"][0]  # it is dirty
    tell(env, ("take", "cup"), ("go to", "sink"), ("wash", "cup"), ("go to", "cabinet"))
    obs, reward, terminated, _, info = env.step(words.said([("put", "cup")]))
    assert info["success"][0] and terminated[0] and reward[0] == 1


def test_the_expert_solves_every_room_within_the_limit():
    env = words.make(num_envs=400)
    env.reset(seed=3)
    for _ in range(words.LIMIT):
        _, _, _, _, info = env.step(env.expert_action())
    assert info["success"].all()


def test_what_it_has_not_is_refused_in_a_sentence():
    for task, reward in (("kitchen", ""), ("", "dense")):
        with pytest.raises(UserError, match=r"sims\.words:make"):
            words.make(task, reward=reward)
