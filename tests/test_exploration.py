"""As much noise as the first policy bears, and the policy's own successes before RL."""

import json
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TINY, Command, last_weights, robo_rl

from robo_rl import checkpoint
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment import recipes
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import make_env, obs_spec
from robo_rl.experiment.exploration import choose_noise
from robo_rl.experiment.folder import taught_of
from robo_rl.experiment.own_successes import LARGER, PRECISE, SHARE, WEAK, limits, mixed, play_round
from robo_rl.experiment.run import Stopped
from robo_rl.options import BcOptions, PiRlOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.exploration import BAND, level_of, with_level
from robo_rl.selection import Look

SPEC = ObsSpec(state=5, action=3, views=(), image_size=0, language=False)
KINDS = {
    "gaussian": PolicyOptions(kind="gaussian", hidden=16),
    "flow": PolicyOptions(noise="learned", noise_steps="last", hidden=16),
    "diffusion": PolicyOptions(
        kind="diffusion", predict="action", denoise_steps=4, finetune_steps=1, std_scale=0.0, hidden=16
    ),
}


def policy_of(kind: str):
    return make_policy(KINDS[kind], SPEC, 0).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_level_is_the_std_around_what_the_policy_does_without_noise(kind):
    policy = policy_of(kind)
    obs, generator = {"state": torch.randn(1, 5).expand(4000, 5)}, torch.Generator().manual_seed(0)
    for level in (0.15, 0.6):
        made = with_level(policy, level)
        chunk = made.act(obs, generator)
        std, band = made.moments(made.encode(obs), chunk.trace)[1], BAND if kind == "flow" else 1.0
        assert (std >= level / band * 0.999).all() and (std <= level * band * 1.001).all()
        same = [p.act(obs, torch.Generator().manual_seed(1), explore=False).actions for p in (policy, made)]
        assert torch.equal(*same)
        assert level_of(made.options) == pytest.approx(level)


def test_a_policy_without_a_level_of_noise_is_refused_by_name():
    with pytest.raises(UserError, match="diffusion"):
        # a diffusion of few steps fine-tunes them all
        with_level(make_policy(PolicyOptions(kind="diffusion", hidden=16), SPEC, 0), 0.3)


@dataclass
class Noisy:
    """An evaluator in which success falls by `slope` times the noise; what is said is kept."""

    slope: float
    said: list[str] = field(default_factory=list)

    def success_under_noise(self, policy, which: int, tick) -> float:
        tick(100)
        return max(0.0, 0.9 - self.slope * policy.noise_scale)

    def start(self, *words) -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def say(self, text: str, kind: str = "message") -> None:
        self.said.append(text)


@dataclass
class FirstLook:
    """The part of a run that chooses its noise."""

    policy: object
    evaluator: Noisy
    successes: int = 90
    share: float = 0.5

    def __post_init__(self):
        self.config, self.report = (
            TrainConfig(algo="pi_rl", rl=PiRlOptions(explore=self.share)),
            self.evaluator,
        )
        self.looks = [Look(0, self.successes, 100, 0.0)]


@pytest.mark.parametrize(("slope", "want"), [(0.0, 0.5), (0.2, 0.35), (0.3, 0.25), (0.5, 0.15), (9.0, 0.15)])
def test_the_most_noise_is_taken_that_leaves_the_share_of_the_odds_of_success_that_is_asked_for(slope, want):
    run = FirstLook(policy_of("gaussian"), Noisy(slope))  # 0.9, so odds of 91 to 11; half of that is 0.81
    choose_noise(run)
    assert float(run.policy.noise_scale) == pytest.approx(want) and f"noise {want:g}" in run.report.said[-1]


def test_without_success_and_without_a_share_the_noise_stays_as_it_is():
    for run in (
        FirstLook(policy_of("flow"), Noisy(0.0), successes=0),
        FirstLook(policy_of("flow"), Noisy(0.0), share=0.0),
    ):
        before = run.policy
        choose_noise(run)
        assert run.policy is before and not run.report.said


def test_a_run_that_ends_with_its_first_look_chooses_no_noise():
    run = FirstLook(policy_of("gaussian"), Noisy(0.0), successes=100)
    choose_noise(run)
    assert not run.report.said, "of a hundred episodes none failed"
    run.config = replace(run.config, target=0.0)
    choose_noise(run)
    assert "noise 0.15" in run.report.said[-1], "all steps are made"


def test_a_policy_that_is_told_its_latency_keeps_its_noise_and_the_run_says_so():
    run = FirstLook(policy_of("flow"), Noisy(0.0))
    before, run.config = run.policy, replace(run.config, latency=0.1)
    choose_noise(run)
    assert run.policy is before and "with --latency explores as it is" in run.report.said[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_bears_little_noise_learns_from_its_successes_until_more_succeeds(kind):
    policy = policy_of(kind)
    known = {level: limits(with_level(policy, level).options) for level in (0.5, 0.35, 0.25, 0.15)}
    usual, faint = (WEAK, SHARE), (PRECISE, LARGER)
    assert known == {0.5: usual, 0.35: usual, 0.25: faint, 0.15: faint}
    assert limits(PolicyOptions(kind="diffusion")) == usual  # it has no level


@dataclass
class Stopping:
    """The part of a run that plays a round, with a signal that came."""

    folder: Path
    asked: int = signal.SIGINT

    def __post_init__(self):
        self.config = TrainConfig(
            algo="ppo", rl=PpoOptions(), task="reach", envs=2, bc=BcOptions(own=4000), threads=1
        )
        env = make_env(self.config, 1)
        self.policy = make_policy(PolicyOptions(kind="gaussian", hidden=16), obs_spec(env, False, ""), 0)
        env.close()
        self.report, self.stop = self, self

    def start(self, *words) -> None:
        pass

    def advance(self, done: int) -> None:
        raise AssertionError("it goes on")


def test_a_signal_ends_a_round_after_the_episodes_that_are_being_played(tmp_path):
    with pytest.raises(Stopped):
        play_round(Stopping(tmp_path), 0)


@pytest.mark.parametrize("algo", ["rlpd", "recap"])
def test_methods_that_do_not_learn_from_fresh_rollouts_refuse_own_successes(tmp_path, algo):
    assert (
        "--bc.own"
        in robo_rl(
            tmp_path, "train", "--task", "reach", "--algo", algo, "--bc.own", "100", "--threads", "1"
        ).mistake
    )


def test_noise_that_a_user_names_is_not_chosen_for_them():
    base = recipes.recipe("mujoco", "pick_cube", "pi_rl", "state", "full")
    assert base.rl.explore > 0
    assert (
        recipes.exact(base, {"policy.noise-max"}).rl.explore
        == recipes.exact(base, {"policy.noise_min"}).rl.explore
        == 0
    )
    assert recipes.exact(base, {"seed"}).rl.explore == base.rl.explore


@pytest.mark.parametrize("named", ["rl.advantage", "rl.allocate", "learners", "periodic", "dream", "share"])
def test_the_recipe_plays_nothing_again_where_rollouts_are_made_in_another_way(named):
    base = recipes.recipe("mujoco", "pick_cube", "pi_rl", "state", "full")
    assert base.rl.replay > 0 == recipes.exact(base, {named}).rl.replay


def test_a_checkpoint_with_one_count_of_supervised_updates_is_read_too():
    assert (
        taught_of({"taught": [600, 900]}) == (600, 900)
        and taught_of({"taught": 600}) == (600, 600)
        and taught_of({}) == (0, 0)
    )


def test_a_mixture_draws_every_row_of_its_parts_alike():
    def part(first: int, n: int):
        def sample(size: int, generator: torch.Generator):
            rows = first + torch.randint(0, n, (size,), generator=generator)
            return {"state": rows[:, None].float()}, rows[:, None, None].float(), torch.ones(size, 1)

        return sample, n

    sample = mixed([part(0, 3), part(3, 1), part(4, 6)])
    obs, chunk, mask = sample(20_000, torch.Generator().manual_seed(0))
    assert len(obs["state"]) == len(chunk) == len(mask) == 20_000
    counts = np.bincount(obs["state"][:, 0].int().numpy(), minlength=10)
    assert abs(counts - 2000).max() < 5 * 2000**0.5 and torch.equal(obs["state"], chunk[:, 0])


@pytest.mark.slow
def test_a_run_learns_from_its_own_successes_counts_their_steps_and_goes_on_bit_for_bit_after_a_kill(
    tmp_path,
):
    argv = (
        "train",
        *TINY,
        "--policy.no-residual",  # supervision must leave failures
        "--policy.activation",
        "relu",
        "--demos",
        "20",
        "--bc.updates",
        "500",
        "--bc.batch",
        "128",
        "--policy.hidden",
        "128",
        "--bc.own",
        "48",
        "--eval-episodes",
        "40",
        "--steps",
        "12000",
        "--rl.explore",
        "0.5",
    )
    assert (end := robo_rl(tmp_path, *argv, "--out", "whole")).code == 0, end
    assert "exploration noise" in end.err and "learnt from" in end.err
    rounds = sorted((tmp_path / "whole/own").iterdir())
    data = [load(path) for path in rounds]
    assert all(np.asarray(x.success).all() and 0 < len(x) <= 48 for x in data)
    evals = sorted((tmp_path / "whole/evals").glob("step_*.json"))
    steps = [json.loads(path.read_text())["step"] for path in evals]
    # the first look after a round counts at least its successes
    assert steps[0] == 0 and steps[1] >= len(data[0].action)
    logged = map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines())
    made = [row["step"] for row in logged if "sft/loss" in row]
    assert len(made) > 3 and made == sorted(set(made))  # a curve of the supervised loss never goes back
    command = Command(tmp_path, (*argv, "--out", "killed"))
    command.until(lambda: (tmp_path / "killed/own/round_0/meta/info.json").exists())
    command.signal(signal.SIGKILL)
    command.wait()
    assert (end := robo_rl(tmp_path, "train", "--resume", "killed")).code == 0, end
    assert last_weights(tmp_path / "whole") == last_weights(tmp_path / "killed")
    begins = [
        checkpoint.read_meta(checkpoint.checkpoints(tmp_path / name)[-1])["rl_from"]
        for name in ("whole", "killed")
    ]
    assert begins[0] == begins[1] in steps[1:]  # what RL is measured against
    shutil.rmtree(tmp_path / "killed")
