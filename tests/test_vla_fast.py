"""pi0-FAST: its action tokeniser, its network against LeRobot's, and its policy under supervision, PPO and
groups."""

import importlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.fft import dct
from vla_checks import check_copied, check_first_ratio, moved_by_ppo
from vla_goldens import golden_file, weights

from robo_rl.algos import bc
from robo_rl.algos.check import check_method
from robo_rl.errors import UserError
from robo_rl.options import BcOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy, observations
from robo_rl.policies.vla import fast
from robo_rl.policies.vla.compare import compare, record
from robo_rl.policies.vla.convert import convert
from robo_rl.policies.vla.examine import examine
from robo_rl.policies.vla.keys import OURS, recognise
from robo_rl.policies.vla.make import load_model
from robo_rl.policies.vla.pi_fast import write

SPEC = ObsSpec(state=7, action=2, views=("front", "wrist"), image_size=32, language=True, text=64)
H, E, A = 4, 2, 2
RL = {"decisions": 3, "minibatch": 4, "epochs": 2, "critic_warmup": 0}
PREFIX = ("images", "image_mask", "tokens", "token_mask", "state")


def build(spec=SPEC, seed=0, **options):
    return make_policy(
        PolicyOptions(
            **({"kind": "pi0_fast", "horizon": H, "execute": E, "hidden": 16, "layers": 1} | options)
        ),
        spec,
        seed,
    )


def draw(policy, rows=20, seed=1):
    obs = observations(policy.spec, rows)
    return obs, policy.act(obs, torch.Generator().manual_seed(seed), True)


def waves(rows=300, steps=8, axes=3, seed=0):
    phase = np.random.default_rng(seed).uniform(0, 3, (rows, 1, axes))
    return np.sin(phase + np.linspace(0, 1, steps)[:, None])


# ---- action tokens


def test_action_tokens_are_the_rounded_cosine_transform_over_time():
    x = waves(2)
    want = np.rint(10 * dct(x, axis=1, norm="ortho")).astype(int)
    t = fast.load("dct:63")
    assert [np.array(row) - 63 for row in t.encode(x)][1].tolist() == want[
        1
    ].ravel().tolist() and t.size == 127
    assert np.abs(t.decode(t.encode(x), 8, 3) - x).max() <= 0.5 / 10 * np.sqrt(8)


def test_a_trained_tokeniser_needs_fewer_tokens_and_gives_the_same_chunks(tmp_path):
    plain, trained = fast.load("dct:63"), fast.train([waves()], 128)
    few, many = trained.encode(waves(20, seed=1)), plain.encode(waves(20, seed=1))
    assert sum(map(len, few)) < 0.7 * sum(map(len, many)) and trained.size <= 128
    low, high = trained.low, trained.high
    inside = np.clip(np.array(many) - 63, low, high) + 63
    np.testing.assert_array_equal(trained.decode(few, 8, 3), plain.decode(inside.tolist(), 8, 3))
    trained.save(tmp_path / "own")
    again = fast.load(tmp_path / "own")
    assert (
        again.encode(waves(5, seed=2)) == trained.encode(waves(5, seed=2)) and again.digest == trained.digest
    )


def test_a_tokeniser_of_bytes_as_the_public_one_is_read(tmp_path):
    """physical-intelligence/fast: byte-level pairs, config of scale and min_token, characters of two bytes
    beyond 127."""
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    texts = [
        "".join(map(chr, row))
        for row in (np.rint(10 * dct(waves(), axis=1, norm="ortho")).astype(int) + 120).reshape(300, -1)
    ]
    made._tokenizer.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    (tmp_path / "tokenizer.json").write_text(made._tokenizer.to_str())
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"scale": 10, "min_token": -120, "vocab_size": 400})
    )
    t, plain, x = fast.load(tmp_path), fast.load("dct:120"), waves(10, seed=3)
    assert max(max(row) for row in texts) > "\x7f"
    np.testing.assert_array_equal(t.decode(t.encode(x), 8, 3), plain.decode(plain.encode(x), 8, 3))
    whole = t.encode(x)[0]
    for ids in ([], whole[:3], whole + whole, [399, 0, 128, 399], [10**6]):
        assert t.decode([ids], 8, 3).shape == (1, 8, 3) and np.isfinite(t.decode([ids], 8, 3)).all()


@pytest.mark.parametrize(
    ("where", "config", "line"),
    [
        ("dct:0", None, "dct:N needs N in"),
        ("dct:x", None, "dct:N needs N in"),
        ("nowhere", None, "no processor_config.json"),
        ("", {"scale": 10}, "needs min_token"),
        ("", {"scale": 0, "min_token": 1}, "scale > 0"),
        ("", {"scale": 1, "min_token": 1}, "LFS pointer"),
    ],
)
def test_what_is_no_action_tokeniser_is_one_line(where, config, line, tmp_path):
    if config:
        (tmp_path / "processor_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_text("version https://git-lfs")
        where = str(tmp_path)
    with pytest.raises(UserError, match=line):
        fast.load(where)


def test_more_coefficients_than_tokens_are_refused():
    with pytest.raises(UserError, match="more than 8 tokens"):
        fast.train([waves()], 8)


# ---- the network


@pytest.fixture(scope="module")
def golden():
    return load_model(weights("pi0_fast")), load_file(golden_file("pi0_fast"))


@torch.no_grad()
def test_losses_and_logits_equal_those_of_lerobot(golden):
    rows = {r.name: r for r in compare(weights("pi0_fast"), golden_file("pi0_fast"))}
    assert {"logits", "token_losses", "loss"} == rows.keys() and max(r.largest for r in rows.values()) < 1e-5
    half = {r.name: r for r in compare(weights("pi0_fast"), golden_file("pi0_fast"), dtype=torch.bfloat16)}
    assert max(r.relative for r in half.values()) < 0.02


@torch.no_grad()
def test_masked_cameras_and_padding_are_dropped_and_change_nothing(golden):
    model, io = golden
    full, packed = (model.prefix(*(io[k] for k in PREFIX), drop=d) for d in (False, True))
    assert packed.mask.shape[1] < full.mask.shape[1] and (full.pooled - packed.pooled).abs().max() < 1e-5
    a, b = (model.token_losses(c, io["action_tokens"], io["action_mask"]) for c in (full, packed))
    assert (a - b).abs().max() < 1e-5
    assert packed.pooled.shape[1] == model.context_size


@torch.no_grad()
def test_what_is_written_token_by_token_is_the_likeliest_of_one_pass_and_stops_at_its_end(golden):
    model, io = golden
    context, begin, allowed = (
        model.prefix(*(io[k] for k in PREFIX)),
        torch.tensor([2, 9]),
        torch.arange(100, 180),
    )
    draws = torch.rand(3, 12, generator=torch.Generator().manual_seed(0))
    for u in (None, draws):
        index = write(model.trunk, model.expert, context, begin, allowed, 12, u)
        words = torch.cat([begin.expand(3, -1), allowed[index[:, :-1].clamp(min=0)]], 1)
        p = model.logits(context, words, allowed)[:, 1:].softmax(-1)
        want = p.argmax(-1) if u is None else (p.cumsum(-1) < u[..., None]).sum(-1)
        there = index >= 0
        assert torch.equal(index[there], want[there]) and there[:, 0].all()
        assert all(
            (row == 79).sum() <= 1 and (row[(row == 79).nonzero().flatten()[:1] + 1 :] == -1).all()
            for row in index
            if 79 in row
        )


def test_every_weight_gets_a_gradient(golden):
    model, io = golden
    model.token_losses(
        model.prefix(*(io[k] for k in PREFIX)), io["action_tokens"], io["action_mask"]
    ).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    model.zero_grad()


def test_its_keys_are_recognised_beside_those_of_pi0_and_go_to_ours_and_back(tmp_path):
    assert (
        recognise(load_file(weights("pi0_fast"))).family == "pi0_fast"
        and recognise(load_file(weights("pi0"))).family == "pi0"
    )
    tensors = load_file(weights("pi0_fast"))
    old = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    tensors["model.paligemma_with_expert.paligemma.lm_head.weight"] = tensors.pop(old)
    save_file(tensors, tmp_path / "head.safetensors", metadata={"format": "pt"})
    for first in (weights("pi0_fast"), tmp_path / "head.safetensors"):
        ours, back = tmp_path / f"ours-{first.name}", tmp_path / f"back-{first.name}"
        convert(first, ours, OURS)
        convert(ours, back, "lerobot")
        assert {k: x.numpy().tobytes() for k, x in load_file(back).items()} == {
            k: x.numpy().tobytes() for k, x in load_file(first).items()
        }
        assert recognise(load_file(ours)).family == "pi0_fast" and all(
            r.largest == 0 for r in compare(ours, first)
        )


def test_it_is_examined_and_recorded(tmp_path):
    told = dict(examine(weights("pi0_fast")).facts)
    assert told["model"].startswith("pi0_fast, keys in layout lerobot") and "action-words" in told["actions"]
    tensors, _ = record(weights("pi0_fast"), None)
    save_file(tensors, tmp_path / "golden.safetensors")
    assert all(r.largest == 0 for r in compare(weights("pi0_fast"), tmp_path / "golden.safetensors"))
    with pytest.raises(UserError, match="lacks noise, time"):
        compare(weights("pi0"), tmp_path / "golden.safetensors")


# ---- the policy


def test_it_keeps_the_contract_of_every_policy():
    options = PolicyOptions(kind="pi0_fast", horizon=H, execute=E)
    assert "ratio" in check_policy(lambda seed: make_policy(options, SPEC, seed), options, SPEC, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_first_ratio_is_one_to_the_last_bit_in_a_minibatch_of_any_size(dtype):
    policy = build()
    policy.trunk.to(dtype)
    policy.head.to(dtype)
    obs, chunk = draw(policy)
    assert chunk.logp.dtype == torch.float32 and chunk.logp.shape == (20, H * A + 1)
    check_first_ratio(policy, obs, chunk)


@torch.no_grad()
def test_samples_have_the_frequencies_that_their_log_probs_say():
    policy = build(ObsSpec(state=2, action=2, language=True, text=64), action_words="dct:1", action_tokens=1)
    obs = {k: v[:1].expand(1000, *v.shape[1:]) for k, v in observations(policy.spec, 1).items()}
    policy.trunk.words.weight.mul_(0.5)  # less sure
    chunk = policy.act(obs, torch.Generator().manual_seed(0), True)
    p, seen = chunk.logp[:, 0].exp(), chunk.trace["tokens"][:, 0]
    for token in seen.unique():
        share = (seen == token).float().mean()
        assert abs(share - p[seen == token][0]) < 4 * (share / 1000) ** 0.5
    assert len(seen.unique()) == 4  # three coefficients and the end


@torch.no_grad()
def test_behind_its_end_a_chunk_has_no_tokens_and_no_density():
    policy = build(ObsSpec(state=2, action=2, language=True, text=64), action_words="dct:1", action_tokens=8)
    policy.trunk.words.weight.mul_(0.3)
    chunk = policy.act(observations(policy.spec, 16), torch.Generator().manual_seed(0), True)
    behind = (chunk.trace["tokens"] == 3).cumsum(1) - (chunk.trace["tokens"] == 3).long() > 0
    assert behind.any() and torch.equal(behind, chunk.trace["tokens"] < 0)
    assert (chunk.logp[behind] == 0).all() and (chunk.logp[~behind] < 0).all()


@pytest.mark.parametrize("ratio", ["chunk", "token"])
@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_ppo_and_groups_train_it_and_resume_bit_for_bit(ratio, advantage):
    options = PpoOptions(
        **RL, ratio=ratio, advantage=advantage, **({"group": 2} if advantage == "grpo" else {})
    )
    policy = build(action_tokens=4)
    policy.trunk.requires_grad_(False)
    check_method(importlib.import_module("robo_rl.algos.ppo").make, options, policy)


def test_a_frozen_trunk_is_encoded_once_and_the_language_model_learns():
    assert moved_by_ppo(build(), PpoOptions(**RL, freeze_trunk=True)) == {"head"}


def test_supervision_makes_it_write_the_demonstrated_chunks_with_a_tokeniser_of_them():
    policy = build(action_words="train:40")
    chunk = torch.from_numpy(waves(8, H, A)).float() * 0.9
    policy.action_norm.fit(chunk.flatten(0, 1))
    policy.fit_actions(chunk.repeat(10, 1, 1).numpy())
    assert policy.fast.size <= 40 and int((policy.tokens_of(chunk) >= 0).sum(1).float().mean()) < H * A
    obs, mask = observations(SPEC, 8), torch.ones(8, H)
    obs["state"] = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)) * 3
    policy.obs_norm.fit(obs["state"])

    before = float(policy.bc_loss(obs, chunk, mask, torch.Generator()).detach())
    bc.train(policy, bc.demos_sampler(obs, chunk, mask), BcOptions(updates=120, batch=8, lr=3e-3, ema=0.5), 0)
    assert float(policy.bc_loss(obs, chunk, mask, torch.Generator()).detach()) < 0.2 * before
    error = (policy.act(obs, torch.Generator(), explore=False).actions - chunk[:, :E]).abs().mean()
    assert error < 0.1


def test_steps_that_are_not_there_do_not_teach():
    policy, obs = build(), observations(SPEC, 2)
    chunk, mask = torch.rand(2, H, A), torch.tensor([[1.0] * H, [0.0] * H])
    half = policy.bc_loss(obs, chunk, mask, torch.Generator())
    one = policy.bc_loss({k: v[:1] for k, v in obs.items()}, chunk[:1], mask[:1], torch.Generator())
    assert torch.allclose(half, one, atol=1e-5)


def test_a_checkpoint_carries_its_action_tokens_wherever_it_is_copied_to(tmp_path):
    policy = build(action_words="train:60")
    policy.action_norm.fit(torch.from_numpy(waves(40, H, A)).float().flatten(0, 1))
    policy.fit_actions(waves(40, H, A))
    again = check_copied(policy, observations(SPEC, 3), tmp_path)
    assert again.fast.digest == policy.fast.digest and again.fast.size == policy.fast.size > 3
    convert(tmp_path / "b", tmp_path / "public.safetensors", "lerobot")
    assert set(load_file(tmp_path / "public.safetensors")) == set(load_file(weights("pi0_fast")))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"action_words": "nowhere"}, "no action tokeniser"),
        ({"action_words": "train:x"}, "needs a number of tokens"),
        ({"action_words": "train:900"}, r"must be in \[2, 256\]"),
        ({"action_words": "dct:300"}, "has 601 tokens, this model has room for 495"),
        ({"folder": "WEIGHTS", "words": "words:240"}, "does not say what its action tokens mean"),
        ({"logp_reduction": "mean"}, "has the log-prob of every token"),
        ({"action_tokens": -1}, "policy.action_tokens must be in"),
    ],
)
def test_what_does_not_fit_is_one_line(options, line):
    with pytest.raises(UserError, match=line):
        build(**{k: str(weights("pi0_fast")) if v == "WEIGHTS" else v for k, v in options.items()})


def test_methods_that_do_not_fit_say_so():
    def make(algo, options, policy):
        return importlib.import_module(f"robo_rl.algos.{algo}").make(policy, options, 0)

    with pytest.raises(UserError, match="rl.ratio token is for policies that write tokens"):
        make("ppo", PpoOptions(ratio="token"), make_policy(PolicyOptions(kind="gaussian"), SPEC, 0))
    with pytest.raises(UserError, match="pi_rl needs"):
        make("pi_rl", PpoOptions(), build())
