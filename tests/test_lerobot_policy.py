"""LeRobot's policies in our envs: the worker, what goes over its socket, mistakes, and LeRobot itself where
it is installed."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import test_vla_processor
import torch
from test_openpi import write_run

from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.console import open_session
from robo_rl.experiment.deploy import deploy
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.evaluation import EvalConfig, evaluate_checkpoint
from robo_rl.experiment.lerobot_policy import (
    VARIABLE,
    LeRobotClient,
    LeRobotPolicy,
    find_python,
    for_console,
    parse_cameras,
)
from robo_rl.experiment.lerobot_worker import FrameSocket, LeRobotModel, answer_questions
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.policies import ObsSpec

word_files = test_vla_processor.files  # a fixture
SPEC = ObsSpec(state=3, action=2, views=("front", "wrist"), image_size=8, language=True)
ABOUT = {"type": "act", "state": 3, "action": 2, "views": ["front", "wrist"], "horizon": 5, "history": False}
REAL = os.environ.get(VARIABLE, "")
FAKE = {  # of LeRobot, what the worker asks for: a policy whose actions are sums of what it sees
    "lerobot/__init__.py": "",
    "lerobot/configs/__init__.py": "",
    "lerobot/policies/__init__.py": "",
    "lerobot/configs/policies.py": """
import json, types
class Feature:
    def __init__(self, shape): self.shape = shape
class PreTrainedConfig:
    @classmethod
    def from_pretrained(cls, folder):
        print("this is printed on stdout")
        made = types.SimpleNamespace(**json.load(open(folder + "/config.json")))
        made.input_features = {k: Feature(v) for k, v in made.input_features.items()}
        made.output_features = {"action": Feature([made.actions])}
        return made
""",
    "lerobot/policies/factory.py": """
import os, sys, torch
class Policy(torch.nn.Module):
    @classmethod
    def from_pretrained(cls, folder, config):
        made = cls()
        made.config, made.count = config, 0
        return made
    def reset(self): self.count = 0
    def seen(self, batch):
        words = torch.tensor([float(len(t)) for t in batch["task"]])
        pictures = batch.get("observation.images.front", torch.zeros(1, 1, 1, 1)).sum((1, 2, 3)) * 255
        return batch["observation.state"].sum(1) + pictures + words
    def predict_action_chunk(self, batch, noise=None):
        self.count += 1
        if self.count == getattr(self.config, "dies", 0):
            print("out of memory", file=sys.stderr)
            os._exit(3)
        rows = torch.arange(float(self.config.chunk_size))
        out = (self.seen(batch)[:, None] + rows)[..., None].expand(-1, -1, self.config.actions)
        return getattr(self.config, "gain", 1) * (out + (torch.rand(1) if noise is None else noise[..., :self.config.actions]))
    def select_action(self, batch):
        self.count += 1
        return (self.seen(batch) + 100 * self.count)[:, None].expand(-1, self.config.actions)
def get_policy_class(kind):
    if kind == "gone":
        raise ValueError("Policy type 'gone' is not available.")
    return Policy
def make_pre_post_processors(config, pretrained_path, preprocessor_overrides):
    assert preprocessor_overrides == {"device_processor": {"device": "cpu"}}
    def after(x):
        assert x.ndim == 2
        return x * 2
    return (lambda batch: batch), after
""",  # noqa: E501
}


def policy_folder(path: Path, **changes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "type": "act",
        "n_obs_steps": 1,
        "chunk_size": 5,
        "actions": 2,
        "input_features": {
            "observation.state": [3],
            "observation.images.front": [3, 8, 8],
            "observation.images.wrist": [3, 8, 8],
            "observation.images.empty_camera_0": [3, 8, 8],
        },
    } | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A stand-in for LeRobot; a Python that has it."""
    for name, text in FAKE.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield str(python)
    for name in [m for m in sys.modules if m.split(".")[0] == "lerobot"]:
        del sys.modules[name]


def observation(n=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "state": rng.normal(size=(n, 3)).astype(np.float32),
        "task": np.array(["push", "pull it", "push"])[:n],
    } | {f"image/{v}": rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8) for v in SPEC.views}


def expected(obs):
    """What the stand-in's policy makes of an observation, before its rows and noise."""
    words = np.array([len(str(t)) for t in obs["task"]], np.float32)
    return obs["state"].sum(1) + obs["image/front"].astype(np.float32).sum((1, 2, 3)) + words


class BesideIt(LeRobotPolicy):
    """A policy whose worker is a thread that serves `model`."""

    def __init__(self, model, tmp_path, **changes):
        self.model = model
        super().__init__(
            str(policy_folder(tmp_path / "policy")), "python", **{"spec": SPEC, "execute": 4} | changes
        )

    def _start(self):
        ours, theirs = socket.socketpair()
        (self.place / "stderr").write_text("last words\n")

        def work():
            with theirs, contextlib.suppress(OSError):
                answer_questions(FrameSocket(theirs), self.model)

        threading.Thread(target=work, daemon=True).start()
        return FrameSocket(ours)


class Says:
    """A model that answers what it is told to."""

    def __init__(self, answer=None, **about):
        self.answer, self.about, self.begun, self.seeds = answer, ABOUT | about, 0, []

    def reset(self):
        self.begun += 1

    def act(self, arrays, tasks, seed):
        self.seeds.append(seed)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if self.answer is not None else np.zeros((len(tasks), 5, 2), np.float32)


def test_a_policy_in_another_python_sees_names_and_words_and_its_chunks_come_back_exactly(fake, tmp_path):
    obs, noise = observation(), np.random.default_rng(1).normal(size=(3, 5, 4)).astype(np.float32)
    with contextlib.closing(LeRobotPolicy(str(policy_folder(tmp_path / "p")), fake, SPEC, 4)) as policy:
        assert policy.about["views"] == ["front", "wrist"] and policy.about["horizon"] == 5
        want = 2 * (expected(obs)[:, None, None] + np.arange(5, dtype=np.float32)[:, None] + noise[..., :2])
        np.testing.assert_allclose(policy.chunks(obs, noise), want, rtol=1e-5)
        assert policy(obs).shape == (3, 4, 2) and not np.array_equal(policy(obs), policy(obs)), (
            "each decision has noise of its own"
        )
        place = policy.place
    assert policy.process.poll() is not None and not place.exists()


def test_the_models_side_by_itself_takes_what_the_socket_carries(fake, tmp_path):
    model, obs = LeRobotModel(str(policy_folder(tmp_path / "p", n_obs_steps=2))), observation()
    assert model.about["history"] and model.about["horizon"] == 1
    arrays = {k: v for k, v in obs.items() if k != "task"}
    for count in (1, 2):
        got = model.act(arrays, list(map(str, obs["task"])), 0)
        np.testing.assert_allclose(got[:, 0, 0], 2 * (expected(obs) + 100 * count), rtol=1e-5)
    model.reset()
    np.testing.assert_allclose(
        model.act(arrays, list(map(str, obs["task"])), 0)[:, 0, 1], 2 * (expected(obs) + 100), rtol=1e-5
    )


def test_what_is_not_there_or_does_not_load_is_one_line(fake, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match="name its Python by --lerobot-python"):
        find_python("")
    with pytest.raises(UserError, match="there is no such program"):
        find_python("/no/python")
    with pytest.raises(UserError, match="no policy folder of LeRobot"):
        LeRobotPolicy(str(tmp_path), fake, SPEC, 4)
    with pytest.raises(
        UserError, match="policy .* in python: ValueError: Policy type 'gone' is not available"
    ):
        BesideIt(Says(error="ValueError: Policy type 'gone' is not available."), tmp_path)
    with pytest.raises(ValueError, match="Policy type 'gone' is not available"):
        LeRobotModel(str(policy_folder(tmp_path / "gone", type="gone")))
    ends = tmp_path / "ends"
    ends.write_text("#!/bin/sh\necho no module robo >&2\nexit 3\n")
    ends.chmod(0o755)
    with pytest.raises(UserError, match=r"ended \(no module robo\)"):
        LeRobotPolicy(str(policy_folder(tmp_path / "p")), str(ends), SPEC, 4)


@pytest.mark.parametrize(
    ("about", "changes", "line"),
    [
        ({"state": 4}, {}, "takes a state of 4 numbers and gives 2, the env has 3 and 2"),
        (
            {"views": ["top"]},
            {},
            "looks through top, the env has front, wrist; say which is which: --lerobot-cameras",
        ),
        ({"views": ["top"]}, {"cameras": {"top": "left"}}, r"looks through top \(our left\)"),
        ({"horizon": 3}, {}, "gives chunks of 3 steps, the run executes 4: --execute 3"),
        (
            {"horizon": 1, "history": True},
            {},
            "looks back, so it decides every step, the run executes 4: --execute 1",
        ),
    ],
)
def test_a_policy_of_another_robot_is_one_line(about, changes, line, tmp_path):
    with pytest.raises(UserError, match=line):
        BesideIt(Says(**about), tmp_path, **changes)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (np.full((3, 5, 2), np.nan, np.float32), "actions that are not finite"),
        (np.zeros((3, 2), np.float32), r"gives no actions \[3, H, 2\], got \(3, 2\)"),
        (np.zeros((3, 2, 2), np.float32), "gives chunks of 2 steps, the run executes 4: --execute 2"),
        (RuntimeError("out of\nmemory"), r"RuntimeError: out of\?memory"),
    ],
)
def test_what_a_policy_answers_is_looked_at(answer, line, tmp_path):
    with contextlib.closing(BesideIt(Says(answer), tmp_path)) as policy, pytest.raises(UserError, match=line):
        policy(observation())


def test_a_worker_that_is_gone_is_one_line_with_its_last_words(tmp_path):
    with contextlib.closing(BesideIt(Says(), tmp_path)) as policy:
        policy.wire.wire.shutdown(socket.SHUT_RDWR)
        with pytest.raises(UserError, match=r"ended \(last words\)"):
            policy(observation())


def test_cameras_go_by_other_names_if_asked(tmp_path):
    class Looks(Says):
        def act(self, arrays, tasks, seed):
            self.got = dict(arrays)
            return super().act(arrays, tasks, seed)

    model, obs = Looks(views=["top"]), observation()
    assert (
        parse_cameras("top=wrist,side=front") == {"top": "wrist", "side": "front"} and parse_cameras("") == {}
    )
    with pytest.raises(UserError, match="--lerobot-cameras names"):
        parse_cameras("top")
    with contextlib.closing(BesideIt(model, tmp_path, cameras={"top": "wrist"})) as policy:
        policy(obs)
    assert np.array_equal(model.got["image/top"], obs["image/wrist"]) and set(model.got) == {
        "state",
        "image/top",
    }


def test_it_acts_in_the_place_of_a_runs_policy_and_hears_when_episodes_begin(tmp_path):
    from toys import PointReach

    spec = ObsSpec(state=4, action=2)
    model = Says(state=4, views=[])
    with contextlib.closing(BesideIt(model, tmp_path, spec=spec, seed=3)) as policy:
        found = evaluate(PointReach(2, 6), policy, np.arange(4) + 2**31, 3)
    assert model.begun == 2 and len(found["success"]) == 4 and model.seeds[0] == 3 * 1_000_003 + 1
    assert len(set(model.seeds)) == len(model.seeds)


@pytest.mark.slow
def test_eval_takes_it_by_its_folder(fake, tmp_path):
    run = write_run(tmp_path / "run", state=36)
    folder = policy_folder(
        tmp_path / "p", actions=7, chunk_size=8, input_features={"observation.state": [36]}
    )
    options = EvalConfig(
        checkpoint="last", episodes=2, envs=2, max_steps=8, policy=f"lerobot:{folder}", lerobot_python=fake
    )
    found = evaluate_checkpoint(run, options)
    assert found["policy"] == f"lerobot:{folder}" and len(found["success"]) == 2


# ---- on an arm, and under people's eyes

BLIND = {"actions": 7, "chunk_size": 8, "input_features": {"observation.state": [36]}}


def one_observation():
    return {k: v[0] for k, v in observation(1).items() if k != "task"}


def test_an_arm_asks_and_goes_on_and_the_chunk_comes_with_its_time(tmp_path):
    class Waits(Says):
        go = threading.Event()

        def act(self, arrays, tasks, seed):
            assert self.go.wait(20) and arrays["state"].shape == (1, 3) and tasks == ["push"]
            return super().act(arrays, tasks, seed) + np.arange(5, dtype=np.float32)[:, None]

    model = Waits()
    model.go.set()
    with contextlib.closing(LeRobotClient(BesideIt(model, tmp_path), "push", patience=0.0)) as client:
        model.go.clear()
        client.ask(one_observation(), 4.5)
        assert client.poll(4.6) is None
        model.go.set()
        while (got := client.poll(4.7)) is None:
            pass
        assert model.begun == 1 and not client.blocks  # it was warmed up, and then the episode began
        assert got[1] == 4.5 and got[0].shape == (5, 2) and got[0][4, 0] == 4 and client.poll(4.8) is None
        client.patience = 20.0
        client.ask(one_observation(), 5.0)
        assert client.poll(5.0)[1] == 5.0, "an answer within its patience is there at once"


def test_an_arms_policy_that_says_nothing_or_ends_or_refuses_is_one_line(tmp_path):
    class Sleeps(Says):
        asked = 0

        def act(self, arrays, tasks, seed):
            self.asked += 1
            if self.asked > 1:
                threading.Event().wait(30)
            return super().act(arrays, tasks, seed)

    now = [0.0]
    client = LeRobotClient(
        BesideIt(Sleeps(), tmp_path / "a"), "push", patience=0.0, deadline=3.0, clock=lambda: now[0]
    )
    client.ask(one_observation(), 0.0)
    now[0] = 2.9
    assert client.poll(0.1) is None
    now[0] = 3.1
    with pytest.raises(UserError, match="says nothing for 3 s"):
        client.poll(0.2)
    client.close()
    with contextlib.closing(LeRobotClient(BesideIt(Says(), tmp_path / "b"), "push", patience=5.0)) as client:
        client.policy.wire.wire.shutdown(socket.SHUT_RDWR)
        with pytest.raises(UserError, match=r"ended \(last words\)"):
            client.ask(one_observation(), 0.0)
    model = Says()
    with contextlib.closing(LeRobotClient(BesideIt(model, tmp_path / "c"), "push", patience=5.0)) as client:
        model.answer = np.full((1, 5, 2), np.nan, np.float32)
        with pytest.raises(UserError, match="actions that are not finite"):
            client.ask(one_observation(), 0.0)
        with pytest.raises(UserError, match="takes no rows to agree with"):
            client.ask(one_observation(), 0.0, prefix=object())


def test_deploy_takes_it_by_its_folder_and_holds_the_arm_when_it_ends(fake, tmp_path):
    run, said = write_run(tmp_path / "run", state=36), []
    folder = policy_folder(tmp_path / "p", **BLIND, gain=0.0, dies=3)
    options = DeployOptions(
        run=str(run),
        transport="inprocess",
        speed=1.5,
        seconds=4.0,
        policy=f"lerobot:{folder}",
        lerobot_python=fake,
        execute=5,
    )
    with pytest.raises(UserError, match=r"ended \(out of memory\); the arm was braked and holds"):
        deploy(options, said.append, said.append)
    assert re.match(r"[12] chunks", said[0]), said  # one was to warm up


def test_console_takes_it_by_its_folder_and_its_end_is_one_line(fake, tmp_path):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    run, folder = write_run(tmp_path / "run", state=36), policy_folder(tmp_path / "p", **BLIND, gain=0.001)
    session, _ = open_session(
        ConsoleOptions(run=str(run), robots=2, policy=f"lerobot:{folder}", lerobot_python=fake, execute=5)
    )
    try:
        policy = session.fleet.policy
        seen = session.fleet.obs["state"].sum(1) + np.array([len(str(t)) for t in session.fleet.obs["task"]])
        assert session.fleet.execute == 5 and policy.answer < 60
        rows = session.fleet.plan()
        assert rows.shape == (2, 7) and np.allclose(
            rows[:, 0] - rows[0, 0], 0.002 * (seen - seen[0]), atol=1e-4
        )
        assert (rows[:, 0] >= 0.002 * seen - 1e-4).all() and (rows[:, 0] <= 0.002 * (seen + 1) + 1e-4).all()
        policy.process.kill()
        policy.process.wait()
        session.fleet.cursor[:] = 5
        with pytest.raises(UserError, match="ended"):
            session.tick()
    finally:
        session.close()
    assert not policy.place.exists()


def test_a_policy_that_looks_back_is_none_for_the_console(fake, tmp_path):
    class Back(Says):
        def __init__(self):
            super().__init__(horizon=1, history=True)

    with pytest.raises(UserError, match="looks back, and the console's robots begin their episodes apart"):
        for_console(BesideIt(Back(), tmp_path, execute=1))


@pytest.mark.parametrize(
    ("make", "mistake", "line"),
    [
        (DeployOptions, {"lerobot_python": "python"}, "--lerobot-python goes with --policy lerobot:FOLDER"),
        (DeployOptions, {"execute": 3, "policy": "process"}, "--execute goes with --policy ws://HOST"),
        (
            DeployOptions,
            {"policy": "lerobot:p", "chunking": "rtc"},
            "--chunking rtc asks for rows that agree with others",
        ),
        (
            ConsoleOptions,
            {"policy": "process"},
            "--policy is the ws://HOST:PORT of a server or lerobot:FOLDER",
        ),
        (ConsoleOptions, {"lerobot_cameras": "a=b"}, "--lerobot-cameras goes with --policy lerobot:FOLDER"),
    ],
)
def test_options_of_an_arm_and_of_the_console_that_say_nothing_are_one_line(make, mistake, line):
    with pytest.raises(UserError, match=line):
        make(run="x", **mistake)


# ---- LeRobot itself

MAKE = r"""
import sys, torch
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
out = Path(sys.argv[1])
words = ["<unk>", "<pad>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<image>"]
words += ["\n", *"abcdefghijklmnopqrstuvwxyz "]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
special = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
           "end_of_utterance_token": "<end_of_utterance>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=special)
vision = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4, patch_size=8, image_size=64)
text = dict(model_type="llama", hidden_size=64, num_hidden_layers=4, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=512)
SmolVLMConfig(vision_config=vision, text_config=text, scale_factor=2, image_token_id=5, pad_token_id=1).save_pretrained(out / "vlm")
SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(out / "vlm")
feature = lambda kind, *shape: PolicyFeature(type=FeatureType[kind], shape=shape)
config = SmolVLAConfig(
    input_features={"observation.state": feature("STATE", 5), "observation.images.front": feature("VISUAL", 3, 32, 32),
                    "observation.images.wrist": feature("VISUAL", 3, 32, 32)},
    output_features={"action": feature("ACTION", 3)}, device="cpu", vlm_model_name=str(out / "vlm"), num_vlm_layers=4, num_steps=4,
    chunk_size=6, n_action_steps=6, resize_imgs_with_padding=(64, 64), load_vlm_weights=False)
torch.manual_seed(0)
policy = SmolVLAPolicy(config).float()
stats = {"observation.state": {"mean": torch.arange(5.) / 4, "std": 1 + torch.arange(5.)},
         "action": {"mean": torch.tensor([0.1, -0.2, 0.3]), "std": torch.tensor([0.5, 1.0, 2.0])}}
before, after = make_smolvla_pre_post_processors(config, stats)
for part in (policy, before, after):
    part.save_pretrained(out / "policy")
import transformers
print(transformers.__version__)
"""  # noqa: E501


def place_as_transformers_4(policy):
    """transformers 4 gives patch k of a row the place k - 1 (the first keeps its own): k / n (1 - 1e-6) lies
    below the k-th of n bounds."""
    table = next(p for name, p in policy.trunk.vision.named_parameters() if name.startswith("place"))
    side = int(len(table.view(-1, table.shape[-1])) ** 0.5)
    at = (torch.arange(side) - 1).clamp(min=0)
    with torch.no_grad():
        table.copy_(table.view(-1, table.shape[-1])[(at[:, None] * side + at).flatten()].view_as(table))


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL, reason=f"{VARIABLE} is not set: it names the Python of an environment with LeRobot"
)
@pytest.mark.timeout(1800)
def test_a_tiny_smolvla_that_lerobot_saved_does_the_same_in_its_own_environment_and_in_ours(tmp_path):
    from robo_rl.options import PolicyOptions
    from robo_rl.policies import make_policy, obs_tensors

    alone = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [REAL, "-c", MAKE, str(tmp_path)], capture_output=True, text=True, env=alone, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "policy"
    spec = ObsSpec(state=5, action=3, views=("front", "wrist"), image_size=32, language=True, text=256)
    ours = make_policy(
        PolicyOptions(kind="smolvla", folder=str(folder), words=str(tmp_path / "vlm"), horizon=6, execute=6),
        spec,
        0,
    ).eval()
    rng, n = np.random.default_rng(0), 4
    obs = {
        "state": rng.normal(size=(n, 5)).astype(np.float32) * 2,
        "task": np.array(["pick up the cube", "push", "open it", "push"]),
    } | {f"image/{v}": rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for v in spec.views}
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(n, ours.chunk, generator=torch.Generator().manual_seed(1)).view(n, 6, -1).numpy()
    if done.stdout.split()[-1].startswith("4."):
        place_as_transformers_4(ours)
    with contextlib.closing(LeRobotPolicy(str(folder), REAL, spec, 6)) as policy:
        theirs = policy.chunks(obs, noise)
        assert policy(obs).shape == (n, 6, 3) and policy.about["type"] == "smolvla"
    mine = ours.act(obs_tensors(obs, spec), generator, explore=False).actions.numpy()
    print("largest difference", np.abs(mine - theirs).max(), "of actions of", np.abs(theirs).mean())
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL, reason=f"{VARIABLE} is not set: it names the Python of an environment with LeRobot"
)
@pytest.mark.timeout(1800)
def test_a_smolvla_that_was_trained_here_does_the_same_in_lerobot_from_the_folder_that_is_made_for_it(
    tmp_path,
):
    import test_vla_lerobot_folder as made

    from robo_rl.policies import obs_tensors
    from robo_rl.policies.vla.convert import convert

    ours, obs, n = made.trained(tmp_path / "c", "smolvla"), made.observation(), 3
    convert(tmp_path / "c", tmp_path / "out", "lerobot", made.TASKS)
    which = "import importlib.metadata as m; print(m.version('transformers'))"
    version = subprocess.run([REAL, "-c", which], capture_output=True, text=True, check=True)
    if version.stdout.startswith("4."):
        place_as_transformers_4(ours)
    noise = torch.randn(n, ours.chunk, generator=torch.Generator().manual_seed(1)).view(n, 6, -1).numpy()
    with contextlib.closing(LeRobotPolicy(str(tmp_path / "out"), REAL, made.SPEC, 4)) as policy:
        theirs = policy.chunks(obs, noise)
        assert policy.about == {
            "type": "smolvla",
            "state": 5,
            "action": 3,
            "views": ["front", "wrist"],
            "horizon": 6,
            "history": False,
        }
    mine = ours.act(
        obs_tensors(obs, made.SPEC), torch.Generator().manual_seed(1), explore=False
    ).actions.numpy()
    print("largest difference", np.abs(mine - theirs[:, :4]).max(), "of actions of", np.abs(theirs).mean())
    np.testing.assert_allclose(mine, theirs[:, :4], atol=1e-5)


PROCESS = r"""
import sys, torch, numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
folder, given, out = sys.argv[1:]
config = PreTrainedConfig.from_pretrained(folder)
before, after = make_pre_post_processors(config, pretrained_path=folder)
x = np.load(given)
batch = {k: torch.from_numpy(x[k]) for k in x.files if k.startswith("observation")}
made = before(batch | {"task": [str(t) for t in x["task"]]})
np.savez(out, tokens=made["observation.language.tokens"], mask=made["observation.language.attention_mask"], state=made["observation.state"],
         actions=after(torch.from_numpy(x["raw"])), chunk=config.chunk_size, execute=config.n_action_steps)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL, reason=f"{VARIABLE} is not set: it names the Python of an environment with LeRobot"
)
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("pi0", ""),
        ("pi05", ""),
        ("smolvla", ""),
        ("pi0", "tokenizer.model"),
        ("pi05", "tokenizer.model"),
        ("smolvla", "a/tokenizer.json"),
    ],
)
@pytest.mark.timeout(1800)
def test_lerobots_processors_from_the_folder_that_is_made_give_what_ours_give(
    family, words, tmp_path, word_files
):
    import test_vla_lerobot_folder as made

    from robo_rl.policies.vla.convert import convert

    ours, obs = (
        made.trained(tmp_path / "c", family, word_files / words if words else "words:512"),
        made.observation(),
    )
    convert(tmp_path / "c", tmp_path / "out", "lerobot", made.TASKS)
    raw = np.random.default_rng(3).normal(size=(3, 3)).astype(np.float32)
    np.savez(tmp_path / "given.npz", raw=raw, task=obs["task"], **{"observation.state": obs["state"]})
    done = subprocess.run(
        [REAL, "-c", PROCESS, str(tmp_path / "out"), str(tmp_path / "given.npz"), str(tmp_path / "got.npz")],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = np.load(tmp_path / "got.npz")
    assert (int(got["chunk"]), int(got["execute"])) == (6, 4)
    x = ours.processor.observation(obs)
    for i in range(3):
        assert got["tokens"][i][got["mask"][i]].tolist() == x.tokens[i][x.token_mask[i]].tolist()
    np.testing.assert_allclose(got["state"], x.state[:, :5], atol=1e-6)
    np.testing.assert_allclose(got["actions"], ours.action_norm.inverse(torch.from_numpy(raw)), atol=1e-6)


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        ({"lerobot_python": "python"}, "--lerobot-python goes with --policy lerobot:FOLDER"),
        ({"policy": "model"}, "ws://HOST:PORT of a server or lerobot:FOLDER, got 'model'"),
        ({"policy": "lerobot:p", "on": "arm"}, "goes without --on"),
    ],
)
def test_options_that_say_nothing_are_one_line(mistake, line):
    with pytest.raises(UserError, match=line):
        EvalConfig(**mistake)
