"""GR00T N1.5 and N1.7 of our own equal LeRobot's, in NVIDIA's and LeRobot's keys, and are policies like any
other."""

import copy
import importlib
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vla_processor import processor
from test_vla_weights import refused
from vla_checks import check_copied, check_first_ratio, check_supervision
from vla_goldens import STEPS, golden_file, inputs, outputs, weights

from robo_rl.algos.check import check_method, rollouts
from robo_rl.errors import UserError
from robo_rl.files import write_json
from robo_rl.options import RL_OPTIONS, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy, observations
from robo_rl.policies.context import Context
from robo_rl.policies.vla import processor_files
from robo_rl.policies.vla.compare import compare, record
from robo_rl.policies.vla.convert import convert
from robo_rl.policies.vla.examine import examine
from robo_rl.policies.vla.groot import in_order, packed, ticks
from robo_rl.policies.vla.keys import LAYOUTS, OURS, recognise
from robo_rl.policies.vla.make import config_of, empty_model, load_model, make_model, settings_of, vla_config
from robo_rl.policies.vla.processor import of_family
from robo_rl.policies.vla.weights import SINGLE

KINDS = ("groot", "groot_n17")
SPEC = ObsSpec(state=7, action=4, views=("front", "wrist"), image_size=32, language=True, text=64)
H, E = 8, 4
RL = {"decisions": 3, "minibatch": 4, "epochs": 2, "critic_warmup": 0}


def build(kind="groot", spec=SPEC, seed=0, **options):
    return make_policy(
        PolicyOptions(**({"kind": kind, "horizon": H, "execute": E, "hidden": 16, "layers": 1} | options)),
        spec,
        seed,
    )


@pytest.fixture(scope="module", params=KINDS)
def golden(request):
    """(family, its model in float32)"""
    return request.param, load_model(weights(request.param))


# ---- the model


@torch.no_grad()
def test_features_loss_and_sample_equal_those_of_lerobot(golden):
    """The golden rows were made one by one: in a batch, LeRobot's would attend to the padding of the shorter
    ones."""
    family, model = golden
    io = outputs(family)
    context = model.prefix(**inputs(family))
    there = context.mask[..., None]
    assert ((context.kv[0][0] - io["features"]) * there).abs().max() < 1e-5
    losses = model.loss_map(context, io["actions"], io["noise"], io["time"])
    assert abs(losses[..., :7].mean() - io["loss"]) < 1e-5
    # the golden rows of n17 are rounded themselves: in double precision ours are 1.03e-5 from them
    exact = double(load_model(weights(family)), family, io)
    assert error(losses.double().sqrt(), exact.sqrt()) < 5e-6 and error(
        exact.sqrt(), io["loss_map"].sqrt()
    ) < (1e-5 if family == "groot" else 1.1e-5)
    # 3e-6 to 1.1e-5, by the processor
    assert error(model.sample(context, io["noise"], STEPS), io["sample"]) < 2e-5


def double(model, family: str, io: dict) -> torch.Tensor:
    """The loss map of the golden inputs in double precision."""
    model = model.double()
    seen = {k: x.double() if x.is_floating_point() else x for k, x in inputs(family).items()}
    actions, noise, time = (io[k].double() for k in ("actions", "noise", "time"))
    return model.loss_map(model.prefix(**seen), actions, noise, time)


def error(x: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, of values above 1 relative to them; of the loss map, squared errors of up to 12,
    that of the errors themselves, which processors round differently."""
    return float(((x - want).abs() / want.abs().clamp(min=1)).max())


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_in_bf16_loss_and_sample_are_within_two_percent(family):
    model, io = load_model(weights(family), dtype=torch.bfloat16), outputs(family)
    context = model.prefix(**inputs(family))
    losses = model.loss_map(context, io["actions"], io["noise"], io["time"])
    made = {"sample": model.sample(context, io["noise"], STEPS), "loss_map": losses}
    for name, x in made.items():
        assert x.dtype == torch.float32 and (x - io[name]).norm() / io[name].norm() < 0.02, name


@torch.no_grad()
def test_views_and_words_that_are_not_there_cost_nothing_and_change_nothing(golden):
    family, model = golden
    obs, io = dict(inputs(family)), outputs(family)
    full, packed = model.prefix(**obs, drop=False), model.prefix(**obs)
    assert packed.mask.shape[1] == packed.length.max() < full.mask.shape[1] and torch.equal(
        full.length, packed.length
    )
    assert (full.pooled - packed.pooled).abs().max() < 1e-5
    want = model.velocity(packed, io["noise"], io["time"])
    assert (model.velocity(full, io["noise"], io["time"]) - want).abs().max() < 1e-5
    seen = []
    hook = model.trunk.vision.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    obs["images"] = torch.where(obs["image_mask"][:, :, None, None, None], obs["images"], 7.0)
    obs["tokens"] = torch.where(obs["token_mask"], obs["tokens"], model.config.picture_word)
    again = model.prefix(**obs)
    hook.remove()
    assert seen == [int(obs["image_mask"].sum())] and torch.equal(
        again.kv[0][0][again.mask], packed.kv[0][0][packed.mask]
    )
    rows = [model.prefix(**{k: x[i : i + 1] for k, x in obs.items()}) for i in range(3)]
    assert (model.velocity(Context.cat(rows), io["noise"], io["time"]) - want).abs().max() < 1e-5
    longer = model.prefix(**obs, length=int(packed.length.max()) + 3)
    assert (model.velocity(longer, io["noise"], io["time"]) - want).abs().max() < 1e-5


def test_pictures_come_in_the_places_of_their_words_and_before_all_words_without_one():
    pictures = torch.arange(12.0).view(2, 3, 2, 1)  # three views of two tokens
    words = torch.arange(100.0, 108.0).view(2, 4, 1)
    marks = torch.tensor([[False, True, False, True], [True, False, False, True]])
    there = torch.tensor([[True] * 4, [True, True, True, False]])  # the second row's second mark is padding
    x, mask, seen = in_order(pictures, torch.ones(2, 3, dtype=torch.bool), words, marks, there)
    assert [[int(v) for v, m in zip(a[:, 0], b, strict=True) if m] for a, b in zip(x, mask, strict=True)] == [
        [4, 5, 100, 0, 1, 102, 2, 3],
        [8, 9, 10, 11, 6, 7, 105, 106],
    ]
    assert torch.equal(seen & mask, (x[..., 0] < 100) & mask)
    mask[:, 0] = False
    *_, sees = packed(x, mask, seen, drop=False, length=None)
    assert sees.any(2).all() and not sees.triu(1).any() and torch.equal(sees[0, -1, :-1], mask[0, :-1])


def test_the_network_is_told_whole_thousandths_of_the_time_from_noise():
    k = torch.arange(10)
    assert ticks(1 - k / 10).tolist() == (100 * k).tolist() and ticks(
        torch.tensor([0.001, 0.0])
    ).tolist() == [999, 999]


def test_every_weight_gets_a_gradient(golden):
    family, model = golden
    io = outputs(family)
    model.loss_map(model.prefix(**inputs(family)), io["actions"], io["noise"], io["time"]).mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    model.zero_grad()
    assert all(n.endswith("to_k.bias") for n in without), without  # a bias of keys moves all scores alike


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_a_model_of_a_seed_listens_to_all_it_is_given(family):
    model, io = make_model(vla_config(family, "tiny"), 0), outputs(family)
    obs = inputs(family)
    v = model.velocity(model.prefix(**obs), io["noise"], io["time"])
    assert v.isfinite().all() and 0.3 < v.std() < 3
    for name in ("images", "tokens", "state"):
        assert (
            model.velocity(model.prefix(**{**obs, name: obs[name].flip(0)}), io["noise"], io["time"]) - v
        ).abs().max() > 0.01, name
    assert (model.velocity(model.prefix(**obs), io["noise"], 1 - io["time"]) - v).abs().max() > 0.01
    other = make_model(replace(model.config, embodiment=2), 0)
    assert (other.velocity(other.prefix(**obs), io["noise"], io["time"]) - v).abs().max() > 0.01


def test_what_a_configuration_or_a_chunk_cannot_be_is_refused(golden):
    family, model = golden
    with pytest.raises(UserError, match=rf"embodiment of {family} must be in \[0, 2\], got 3"):
        replace(model.config, embodiment=3)
    with pytest.raises(ValueError, match="a chunk of 300 steps, places for 256"):
        model.velocity(model.prefix(**inputs(family)), torch.zeros(3, 300, 32), torch.ones(3))
    with pytest.raises(ValueError, match="layers of a GR00T's expert come in pairs, got 3"):
        replace(model.config, expert=replace(model.config.expert, depth=3))
    with pytest.raises(ValueError, match="merge must divide the 8 patches of a side, got 3"):
        replace(vla_config("groot_n17", "tiny"), merge=3)


# ---- files


def folder(place, family: str, layout: str = "gr00t", config=None):
    """NVIDIA's keys, or with LeRobot's front, and config.json."""
    place.mkdir(parents=True, exist_ok=True)
    front = "" if layout == "gr00t" else "_groot_model."
    save_file(
        {front + k: x for k, x in load_file(weights(family)).items()},
        place / SINGLE,
        metadata={"format": "pt"},
    )
    write_json(
        place / "config.json",
        config or {"model_type": "gr00t_n1_5" if family == "groot" else "Gr00tN1d7", "action_horizon": 6},
    )
    return place


@pytest.mark.parametrize("family", KINDS)
def test_keys_of_nvidia_and_of_lerobot_load_strictly_and_go_to_ours_and_back_bit_for_bit(family, tmp_path):
    for layout, other in (("gr00t", "lerobot"), ("lerobot", "gr00t")):
        first = folder(tmp_path / layout, family, layout) / SINGLE
        tensors = load_file(first)
        tied = next(k for k in tensors if k.endswith("embed_tokens.weight"))
        spare = tied.replace(
            "model.embed_tokens" if family == "groot" else "model.language_model.embed_tokens", "lm_head"
        )
        # both, as files of NVIDIA have them
        save_file({**tensors, spare: tensors[tied].clone()}, first, metadata={"format": "pt"})
        read = recognise(load_file(first))
        assert (read.family, read.name, read.unknown) == (family, layout, ()) and read.tied == spare
        ours, back = tmp_path / f"{layout}-ours.safetensors", tmp_path / f"{layout}-back.safetensors"
        convert(first, ours, OURS)
        convert(ours, back, layout)
        assert back.read_bytes() == first.read_bytes()
        convert(first, tmp_path / f"{layout}-other.safetensors", other)
        assert recognise(load_file(tmp_path / f"{layout}-other.safetensors")).name == other
        a, b = load_model(weights(family)).state_dict(), load_model(ours).state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(("family", "millions"), [("groot", 2398), ("groot_n17", 3144)])
def test_the_full_size_is_told_from_shapes_alone(family, millions, tmp_path):
    """The file is a hole of gigabytes, of which only the header is read. Published: 2.7 B with a second table
    of words, and 3 B."""
    config, shape = vla_config(family, "full"), next(x for x in LAYOUTS if x.family == family)
    header, end = {}, 0
    for name, p in empty_model(config, torch.bfloat16).state_dict().items():
        header[shape.theirs(name)] = {
            "dtype": "BF16",
            "shape": list(p.shape),
            "data_offsets": [end, end + 2 * p.numel()],
        }
        end += 2 * p.numel()
    assert round(end / 2e6) == millions
    text = json.dumps(header).encode()
    with open(tmp_path / SINGLE, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + end)
    write_json(tmp_path / "config.json", {"model_type": "gr00t_n1_5", "action_horizon": 12})
    facts = dict(examine(tmp_path).facts)
    assert facts["model"].startswith(f"{family}, keys in layout {shape.name}")
    assert f"chunks of 12 steps, {config.action_width} numbers" in facts["expert"]
    side = config.vision.image
    assert facts["images"].startswith(f"{side} x {side} pixels, up to 4 views, {config.view_tokens} tokens")
    assert config_of(json.loads(json.dumps(asdict(config)))) == config


def test_weights_that_lack_something_or_have_another_width_are_one_line(tmp_path):
    tensors = load_file(weights("groot"))
    save_file({k: x for k, x in tensors.items() if "future_tokens" not in k}, tmp_path / "less.safetensors")
    refused(
        lambda: load_model(tmp_path / "less.safetensors"),
        "nearest is groot in layout gr00t: 1 kinds of weights missing (expert.future.weight)",
    )
    key = "backbone.eagle_model.vision_model.vision_model.embeddings.patch_embedding.weight"
    save_file({**tensors, key: torch.zeros(40, 3, 14, 14)}, tmp_path / "wide.safetensors")
    refused(
        lambda: load_model(tmp_path / "wide.safetensors"),
        "groot with a vision of 40, a trunk of 64 and an expert of 48",
    )
    save_file({**tensors, "action_head.more": torch.zeros(1)}, tmp_path / "more.safetensors")
    refused(
        lambda: load_model(tmp_path / "more.safetensors"),
        "nearest is groot in layout gr00t",
        "1 unexpected (action_head.more)",
    )


def test_compare_tells_its_outputs_and_layers(golden, tmp_path):
    family, model = golden
    rows = {r.name: r.largest for r in compare(weights(family), golden_file(family))}
    largest = {name: max(1.0, float(outputs(family)[name].abs().max())) for name in rows}
    assert set(rows) == {"loss_map", "loss", "sample"} and all(
        rows[name] < 2e-5 * largest[name] for name in rows
    )
    tensors, metadata = record(weights(family), golden_file(family))
    save_file(tensors, tmp_path / "golden.safetensors", metadata)
    rows = compare(weights(family), tmp_path / "golden.safetensors")
    c = model.config
    assert len(rows) == c.vision.depth + c.trunk.depth + c.mixer.depth + c.expert.depth + 3 and all(
        r.largest == 0 for r in rows
    )


def lerobot_folder(place, family: str):
    """A folder of LeRobot: its preprocessor normalises by itself, and knows the embodiment."""
    name = "groot_pack_inputs_v3" if family == "groot" else "groot_n1_7_pack_inputs_v1"
    folder(
        place,
        family,
        "lerobot",
        {
            "type": "groot",
            "chunk_size": 50,
            "max_state_dim": 32,
            "max_action_dim": 32,
            "image_size": [64, 64],
            **({} if family == "groot" else {"model_version": "n1.7"}),
            "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
            "input_features": {
                "observation.state": {"type": "STATE", "shape": [7]},
                "observation.images.front": {"type": "VISUAL", "shape": [3, 64, 64]},
                "observation.images.wrist": {"type": "VISUAL", "shape": [3, 64, 64]},
            },
            "output_features": {"action": {"type": "ACTION", "shape": [4]}},
        },
    )
    write_json(
        place / "policy_preprocessor.json",
        {
            "steps": [
                {
                    "registry_name": name,
                    "state_file": "stats.safetensors",
                    "config": {
                        "embodiment_tag": "so100",
                        "embodiment_mapping": {"so100": 2, "gr1": 0},
                        "normalize_min_max": True,
                    },
                }
            ]
        },
    )
    save_file(
        {
            "observation.state.min": -torch.ones(7),
            "observation.state.max": torch.ones(7),
            "action.min": -torch.ones(4),
            "action.max": 3 * torch.ones(4),
        },
        place / "stats.safetensors",
    )
    return place


@pytest.mark.parametrize("family", KINDS)
def test_a_folder_of_lerobot_says_its_embodiment_cameras_and_statistics(family, tmp_path):
    place = lerobot_folder(tmp_path / "policy", family)
    model = load_model(place)
    assert (model.config.embodiment, model.config.horizon) == (2, 8) and settings_of(weights(family)) == {}
    made = processor_files.from_folder(place, "words:500")
    o = made.options
    assert (o.family, o.views, o.state, o.action, o.state_kind, o.fit) == (
        family,
        ("front", "wrist"),
        7,
        4,
        "min_max",
        "stretch",
    )
    assert torch.allclose(made.action_norm(torch.full((1, 4), 3.0)), torch.ones(1, 4))
    policy = build(family, folder=str(place), words="words:500", statistics="folder")
    assert torch.allclose(policy.action_norm(torch.full((1, 4), -1.0)), -torch.ones(1, 4))
    step = json.loads((place / "policy_preprocessor.json").read_text())
    step["steps"][0]["config"]["modality_config"] = {"action": {"action_configs": [{"rep": "RELATIVE"}]}}
    write_json(place / "policy_preprocessor.json", step)
    refused(
        lambda: processor_files.from_folder(place, "words:500"),
        "relative to the state by groups of axes, which is not read here",
    )


def test_a_bare_folder_of_nvidia_takes_its_statistics_from_demonstrations_and_needs_its_tokeniser(tmp_path):
    place = folder(tmp_path / "bare", "groot")
    assert load_model(place).horizon == 6
    policy = build(folder=str(place), words="words:500")
    assert policy.processor.options.template == "{task}" and policy.options.folder
    with pytest.raises(UserError, match="give at least its tokeniser"):
        build(folder=str(place))
    with pytest.raises(UserError, match="is of a groot, and --policy says groot_n17"):
        build("groot_n17", folder=str(place), words="words:500")


def test_the_prompt_of_published_weights_has_a_place_for_every_picture(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    pieces = Tokenizer(models.WordLevel({"?": 0, "cube": 1}, unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.add_special_tokens([AddedToken(t, special=True) for t in ("<IMG_CONTEXT>", "<|image_pad|>")])
    pieces.save(str(tmp_path / "tokenizer.json"))
    for family, mark, text in (("groot", 2, "Red cube!"), ("groot_n17", 3, "red cube")):
        made = processor(
            of_family(family, views=("a", "b"), state=2, action=2, image_size=8),
            tmp_path,
            {k: {"min": -np.ones(2), "max": np.ones(2)} for k in ("state", "action")},
        )
        seen = []
        encode = made.words.encode
        made.words.encode = lambda t, keep=seen, do=encode: keep.append(t) or do(t)  # type: ignore[method-assign]
        tokens, there = made.prompts(["Red cube!"], torch.zeros(1, 2))
        assert int((tokens == mark).sum()) == 2 and int(there.sum()) > 8
        assert text.lower() in seen[0].lower() and seen[0].startswith("<|im_start|>")


# ---- the policy


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_the_contract_of_every_policy(kind):
    options = PolicyOptions(kind=kind, horizon=H, execute=E)
    assert "ratio" in check_policy(lambda seed: make_policy(options, SPEC, seed), options, SPEC, atol=0.0)


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_first_ratio_is_one_to_the_last_bit_in_a_minibatch_of_any_size(kind, bits):
    policy, obs = build(kind), observations(SPEC, 20)
    if bits == 16:
        policy.trunk.bfloat16()
        policy.head.bfloat16()
    chunk = policy.act(obs, torch.Generator().manual_seed(1), True)
    check_first_ratio(policy, obs, chunk)


@torch.no_grad()
def test_without_a_camera_it_acts_on_words_and_state():
    spec = ObsSpec(state=3, action=2, image_size=32, language=True, text=32)
    for kind in KINDS:
        policy, obs = build(kind, spec), observations(spec, 2)
        assert policy.act(obs, torch.Generator().manual_seed(0), True).actions.isfinite().all()
        # nobody attends to nothing
        assert all(mask.any(1).all() for mask in policy.head.expert._masks(policy.encode(obs)))
        # no word of an instruction is a picture's place
        assert policy.processor.words.size <= policy.config.picture_word


@pytest.mark.parametrize(("kind", "algo"), [("groot", "reinflow"), ("groot_n17", "pi_rl")])
def test_methods_for_flows_train_it_and_resume_bit_for_bit(kind, algo):
    policy = build(kind, **({"noise": "learned", "noise_steps": "all"} if algo == "reinflow" else {}))
    policy.trunk.requires_grad_(False)
    check_method(importlib.import_module(f"robo_rl.algos.{algo}").make, RL_OPTIONS[algo](**RL), policy)


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_that_are_kept_with_decisions_are_learnt_from_as_if_encoded_again(kind):
    made = []
    for keep in (True, False):
        policy = build(kind, keep_prefix=keep)
        options = RL_OPTIONS["pi_rl"](**RL, freeze_trunk=True)
        learner = importlib.import_module("robo_rl.algos.pi_rl").make(policy, options, 0)
        (rollout,) = rollouts(policy, options, 1)
        assert ("context/k0" in rollout.trace) == keep
        assert learner.update(copy.deepcopy(rollout), 0.0, 0)["first_log_ratio"] == 0.0
        made.append(policy.state_dict())
    assert all(torch.equal(made[0][k], made[1][k]) for k in made[0])


def test_supervision_brings_the_loss_down():
    check_supervision(build(), observations(SPEC, 8), torch.rand(8, H, 4) * 2 - 1, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_all_that_acting_needs_and_goes_to_public_keys(kind, tmp_path):
    policy = build(kind, folder=str(weights(kind)), words="words:500")
    check_copied(policy, observations(SPEC, 2), tmp_path)
    convert(tmp_path / "b", tmp_path / "public.safetensors", "gr00t")
    got, want = load_file(tmp_path / "public.safetensors"), load_file(weights(kind))
    assert want.keys() <= got.keys() and recognise(got).unknown == ()
    # what nothing reads, and a policy does not keep
    zeros = {k for k in got if k not in want or not torch.equal(got[k], want[k])}
    assert zeros and all(
        ("vision_model.head." if kind == "groot" else "language_model.norm.") in k and not got[k].any()
        for k in zeros
    )
