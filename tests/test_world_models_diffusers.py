"""The `diffusers` kind: tiny Wan models with fresh weights, built, taught, sampled and saved, and read from a
folder of diffusers."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_world_models_video import CONTROL, SPEC, observations, squares

import robo_rl
from robo_rl.errors import UserError
from robo_rl.options.lora import LoraOptions
from world_models import model as worlds
from world_models.options import LatentOptions
from world_models.wan_options import DiffusersConfig, DiffusersFitOptions, DiffusersOptions

pytest.importorskip("diffusers", reason="needs diffusers: pip install -c constraints.txt '.[diffusers]'")
from world_models.wan import WanVideo, fingerprint, parts_of, patches, pictures  # noqa: E402
from world_models.wan_fit import WanFitter  # noqa: E402

WAN = replace(SPEC, kind="diffusers")
TINY = {
    "chunk": 4,
    "steps": 2,
    "latent": 4,
    "vae_width": 4,
    "width": 24,
    "heads": 2,
    "depth": 1,
    "head_width": 8,
    "proprio": LatentOptions(members=2, hidden=16, layers=1),
}


def options(**more) -> DiffusersOptions:
    return DiffusersOptions(**(TINY | more))


def test_adapters_beside_fresh_weights_are_refused():
    with pytest.raises(UserError, match="net.lora.rank 4 needs net.folder: .* take rank 0"):
        options(lora=LoraOptions(rank=4))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = WanVideo(replace(WAN, tasks=("go left", "go right")), options())
    for p in [*made.tokens.parameters(), *made.trunk.parameters()]:
        p.data += 0.05 * torch.randn(p.shape)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `save_pretrained` of a published model writes, tiny."""
    at = tmp_path_factory.mktemp("wan")
    torch.manual_seed(7)
    for part, name in zip(parts_of(options()), ("vae", "transformer"), strict=True):
        part.save_pretrained(at / name)
    return at


def words(n=3, which=0):
    return {"task": np.full(n, ("go left", "go right")[which])}


def stepped(model, obs, actions, keys=(5, 6, 7)):
    return model.step(model.start(obs, np.array(keys)), actions)


def test_pictures_and_patches_are_each_other_s_inverse():
    x = torch.randn(2, 5, 96, 4, 4)
    assert pictures(x).shape == (2, 3, 5, 16, 32) and torch.equal(patches(pictures(x), 2), x)


def test_the_latents_of_what_was_do_not_depend_on_what_comes(model):
    clip = torch.rand(1, 9, 48, 4, 4) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(model.encode(clip)[:, :, :2], model.encode(clip[:, :5]), atol=1e-5)


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_with_the_exact_velocity_the_sampler_ends_at_the_truth(model, level):
    """v = (x - z)/t whatever the noise: (2) must end at z, with noise in every step too."""
    exact, truth = copy.copy(model), torch.randn(2, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    exact.options = options(steps=4, noise_level=level)
    times = []

    def velocity(x, t, tokens):
        times.append(t)
        return torch.cat([x[:, :, :3], (x[:, :, 3:] - truth) / t[0, -1]], 2)

    object.__setattr__(exact, "velocity", velocity)
    got = exact.sample(torch.zeros(2, 4, 3, 4, 4), torch.zeros(2, 4, 24), lambda k: torch.randn(truth.shape))
    assert torch.allclose(got, truth, atol=1e-5)
    assert [float(t[0, -1]) for t in times] == [1, 0.75, 0.5, 0.25] and not any(t[:, :3].any() for t in times)


def test_frames_depend_on_past_first_frame_actions_and_instruction_and_on_the_key_alone_else(model):
    obs, actions = observations() | words(), torch.full((3, 4, 2), 0.3)
    carry = model.start(obs, np.array([5, 6, 7]))
    base = model.step(carry, actions)[1]
    assert base.obs["image/top"].shape == (3, 4, 16, 16, 3) and base.obs["image/top"].dtype == torch.uint8
    assert torch.equal(base.obs["image/top"], model.step(carry, actions)[1].obs["image/top"])
    others = [model.step(carry | {k: carry[k].flip(-1)}, actions)[1] for k in ("past", "first")]
    others += [model.step(carry, -actions)[1], stepped(model, obs, actions, (8, 9, 10))[1]]
    others += [stepped(model, obs | words(which=1), actions)[1]]
    for p in others:
        assert not torch.equal(p.obs["image/top"], base.obs["image/top"])
    alone = stepped(model, {k: v[1:2] for k, v in obs.items()}, actions[1:2], (6,))[1].obs["image/top"]
    assert int((alone.int() - base.obs["image/top"][1:2].int()).abs().max()) <= 1
    assert (base.uncertainty > 0).all()


def test_part_of_a_chunk_moves_the_past_by_as_many_frames(model):
    carry = model.start(observations() | words(), np.arange(3))
    after, p = model.step(carry, torch.zeros(3, 2, 2))
    assert p.reward.shape == (3, 2) and torch.equal(after["first"], carry["first"])
    assert torch.equal(after["past"][:, :3], carry["past"][:, 2:])


def fitter_of(model, device="cpu", **more):
    return WanFitter(
        model,
        squares(12),
        DiffusersFitOptions(
            **({"arm": 2, "vae": 2, "updates": 4, "batch": 4, "heads": 2, "imagined": 2, "own": 0.5} | more)
        ),
        0,
        device,
    )


def test_a_fit_that_is_stopped_in_any_part_goes_on_exactly_and_its_model_survives_its_folder(tmp_path):
    whole = fitter_of(WanVideo(WAN, options()))
    seen: list[int] = []
    assert whole.fit(lambda n, parts: not seen.append(n)) and seen == list(range(1, 11))
    want = whole.result().state_dict()
    for stop in (3, 7):
        first = fitter_of(WanVideo(WAN, options()))
        assert not first.fit(lambda n, parts, stop=stop: n != stop)
        again = fitter_of(WanVideo(WAN, options()))
        again.load_state_dict(copy.deepcopy(first.state_dict()))
        assert again.fit()
        assert all(
            torch.equal(a, b)
            for a, b in zip(again.result().state_dict().values(), want.values(), strict=True)
        ), stop
    model = whole.result()
    assert any(
        not torch.equal(v, WanVideo(WAN, options()).state_dict()[k])
        for k, v in want.items()
        if k.startswith("trunk.")
    )
    model.frames = squares(12).frames()
    worlds.save(model, tmp_path / "m")
    again = worlds.load(tmp_path / "m")
    a, b = (stepped(m, observations(), torch.ones(3, 4, 2))[1] for m in (model, again))
    assert torch.equal(a.obs["image/top"], b.obs["image/top"]) and again.options == model.options


def test_a_folder_s_model_learns_in_adapters_and_keeps_no_copy_of_what_the_folder_has(folder, tmp_path):
    made = WanVideo(WAN, options(folder=str(folder), lora=LoraOptions(rank=2, targets=("*.attn1",))))
    base, state = (
        made.trunk.blocks[0].attn1.to_q.base.clone(),
        {k: v.clone() for k, v in made.vae.state_dict().items()},
    )
    fitter = fitter_of(made, vae=50)
    assert fitter.vae_updates == 0 and fitter.fit() and fitter.made == 8
    learnt = fitter.result()
    assert torch.equal(learnt.trunk.blocks[0].attn1.to_q.base, base)
    assert all(torch.equal(v, state[k]) for k, v in learnt.vae.state_dict().items())
    assert learnt.trunk.blocks[0].attn1.to_q.lora_B.weight.any()
    learnt.frames = squares(12).frames()
    worlds.save(learnt, tmp_path / "m")
    kept = set(learnt.state_dict())
    assert not any(k.startswith("vae.") for k in kept) and {k for k in kept if k.startswith("trunk.")} == {
        f"trunk.blocks.0.attn1.{n}.lora_{ab}.weight"
        for n in ("to_q", "to_k", "to_v", "to_out.0")
        for ab in "AB"
    }
    again = worlds.load(tmp_path / "m")
    a, b = (stepped(m, observations(), torch.ones(3, 4, 2))[1].obs["image/top"] for m in (learnt, again))
    assert torch.equal(a, b)
    for part, name in zip(parts_of(options()), ("vae", "transformer"), strict=True):  # of another seed
        part.save_pretrained(folder.parent / "other" / name)
    doc = json.loads((tmp_path / "m" / "world.json").read_text())
    doc["options"]["folder"] = str(folder.parent / "other")
    (tmp_path / "m" / "world.json").write_text(json.dumps(doc))
    with pytest.raises(UserError, match="holds other weights than this model was learnt on"):
        worlds.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        (
            "transformer",
            {"_class_name": "CogVideoXTransformer3DModel"},
            "holds CogVideoXTransformer3DModel as transformer; this kind is of .* leave it out for fresh",
        ),
        ("vae", {"_class_name": "AutoencoderKL"}, "holds AutoencoderKL as vae"),
        (
            "transformer",
            {"in_channels": 36},
            "the transformer maps 36 channels to 4, the autoencoder has 4; give a text-to-video model",
        ),
        ("vae", {"temperal_downsample": [True, False]}, "an autoencoder that makes 4 frames one"),
        ("vae", None, "has no vae/config.json; give a folder"),
    ],
)
def test_a_folder_of_another_architecture_is_refused_in_one_line(folder, tmp_path, part, change, says):
    for name in ("vae", "transformer"):
        (tmp_path / name).mkdir()
        doc = json.loads((folder / name / "config.json").read_text())
        if name != part or change is not None:
            (tmp_path / name / "config.json").write_text(
                json.dumps(doc | (change if name == part and change else {}))
            )
    with pytest.raises(UserError, match=says) as e:
        WanVideo(WAN, options(folder=str(tmp_path)))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 2}, r"the weights of transformer lack blocks\.1"),
        ({"num_layers": 0}, r"the weights of transformer also hold blocks\.0"),
        ({"attention_head_dim": "ten"}, "transformer cannot be read"),
    ],
)
def test_weights_that_are_not_those_of_their_config_are_refused(folder, tmp_path, change, says, capfd):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    at = tmp_path / "transformer" / "config.json"
    assert json.loads(at.read_text())["num_layers"] == 1
    at.write_text(json.dumps(json.loads(at.read_text()) | change))
    with pytest.raises(UserError, match=says):
        WanVideo(WAN, options(folder=str(tmp_path)))
    assert capfd.readouterr() == ("", "")


def test_a_folder_with_weights_of_torch_is_told_from_another_too(folder, tmp_path):
    for part in ("vae", "transformer"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "diffusion_pytorch_model.bin").write_bytes(part.encode())
    before = fingerprint(str(tmp_path))
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"another")
    assert before != fingerprint(str(tmp_path)) != fingerprint(str(folder))


def test_a_model_finds_its_folder_from_everywhere_and_says_where_it_is_looked_for(
    folder, tmp_path, monkeypatch
):
    from world_models import learning

    monkeypatch.chdir(folder.parent)
    pictures = robo_rl.collect(
        tmp_path / "data", task="reach", episodes=12, obs="rgb", image_size=16, max_steps=30
    )
    tiny = DiffusersFitOptions(arm=2, updates=1, batch=2, heads=1, imagined=2)
    config = DiffusersConfig(
        data=(str(pictures.folder),),
        out=str(tmp_path / "run"),
        horizon=4,
        fit=tiny,
        net=options(steps=1, folder=folder.name),
    )
    learning.train(config)
    monkeypatch.chdir(tmp_path)
    model = worlds.load("run")
    assert model.options.folder == str(folder)
    worlds.save(model, "moved")
    doc = json.loads((tmp_path / "moved" / "world.json").read_text())
    doc["options"]["folder"] = "nowhere"
    (tmp_path / "moved" / "world.json").write_text(json.dumps(doc))
    with pytest.raises(UserError, match=f"adapts the weights of {tmp_path}/nowhere, which are not there"):
        worlds.load("moved")


def test_cameras_and_sizes_that_do_not_fit_are_named():
    with pytest.raises(UserError, match="multiple of 8 pixels, the data has none of 16"):
        WanVideo(replace(WAN, control=replace(CONTROL, views=())), options())
    with pytest.raises(UserError, match="multiple of 8 pixels, the data has top of 20"):
        WanVideo(replace(WAN, image_size=20), options())
    for wrong in ({"chunk": 6}, {"width": 25}, {"history": 0}):
        with pytest.raises(UserError, match=f"net.{next(iter(wrong))} must be"):
            options(**wrong)
    assert DiffusersConfig().kind == "diffusers"


@pytest.mark.slow
def test_as_an_env_it_keeps_the_contract():
    from sims.check import check_env
    from world_models.env import WorldEnv

    data, model = squares(12), WanVideo(WAN, options(steps=1))
    model.frames, model.spec = data.frames(), WAN.calibrated(8, 1e6)
    check_env(lambda n: WorldEnv(model, n), num_envs=3, cuts=True, atol=1e-4)


def test_it_is_learnt_in_a_run_folder_as_the_command_does_and_is_then_an_env(tmp_path):
    from world_models.env import make_world
    from world_models.learning import diffusers_job, fit_in

    data, config = (
        squares(24, steps=10),
        DiffusersConfig(
            data=("d",),
            horizon=4,
            net=options(steps=1),
            fit=DiffusersFitOptions(arm=30, vae=2, updates=2, batch=2, heads=2, imagined=2),
        ),
    )
    learned = fit_in(tmp_path, "diffusers", data, diffusers_job(config, data))
    assert (
        learned.update == 36
        and learned.spec is not None
        and learned.spec.kind == "diffusers"
        and learned.report is not None
    )
    if learned.spec.horizon:
        assert make_world(str(tmp_path), "", 2, obs="rgb", image_size=16).reset(seed=0)[0][
            "image/top"
        ].shape == (2, 16, 16, 3)
