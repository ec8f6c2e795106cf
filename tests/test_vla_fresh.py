"""What a vision-language-action model knows before it has learnt anything."""

import pytest
import torch

from robo_rl.algos import bc
from robo_rl.options import BcOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import observations
from robo_rl.policies.nets import text_of, text_tokens
from robo_rl.policies.vla import tokeniser
from robo_rl.policies.vla.blocks import rotate
from robo_rl.policies.vla.fresh import smooth_filters
from robo_rl.policies.vla.make import make_model, vla_config

SPEC = ObsSpec(state=7, action=4, views=("front",), image_size=64, language=True, text=64)


def alike(a, b):
    return float(torch.nn.functional.cosine_similarity(a.detach(), b.detach(), dim=-1).mean())


def build(kind="pi05", **options):
    return make_policy(PolicyOptions(kind=kind, horizon=4, execute=4, **options), SPEC, 0)


@pytest.mark.parametrize("family", ["pi05", "smolvla"])
def test_patches_that_are_neighbours_begin_alike_and_distant_ones_do_not(family):
    place = make_model(vla_config(family, "tiny"), 0).trunk.vision.place.weight.unflatten(0, (8, 8))
    beside, below, far = (
        alike(place[:, :-1], place[:, 1:]),
        alike(place[:-1], place[1:]),
        alike(place[:4, :4], place[4:, 4:]),
    )
    assert min(beside, below) > 0.5 and abs(far) < 0.3 and 0.3 < place.std() < 0.7


def test_numbers_of_a_state_that_are_near_begin_alike():
    policy = build()
    numbers = tokeniser.own_numbers(policy.processor.words)
    words = policy.trunk.words.weight[numbers.start : numbers.stop]
    assert (
        len(numbers) == 256
        and alike(words[:-4], words[4:]) > 0.9
        and abs(alike(words[:-128], words[128:])) < 0.4
    )
    assert abs(float(words.std()) * words.shape[1] ** 0.5 - 1) < 0.2
    assert not tokeniser.own_numbers(tokeniser.load("words:300"))


def test_filters_of_patches_see_low_frequencies_first():
    filters = smooth_filters(torch.Size((64, 3, 8, 8)), torch.Generator().manual_seed(0))
    step = (filters[..., 1:] - filters[..., :-1]).square().mean() / filters.square().mean()
    assert torch.allclose(filters.flatten(1).norm(dim=1), torch.ones(64)) and step < 0.5  # of white noise: 2


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla"])
@torch.no_grad()
def test_entries_of_an_action_that_the_robot_has_not_are_neither_heard_nor_moved(kind):
    policy = build(kind)
    context, t = policy.encode(observations(SPEC, 2)), torch.tensor([0.3, 0.9])
    x = torch.randn(2, 4, policy.width, generator=torch.Generator().manual_seed(0))
    v, other = policy.velocity(context, x, t), x.clone()
    other[..., SPEC.action :] = 5
    assert (
        policy.width > SPEC.action and not v[..., SPEC.action :].any() and v[..., : SPEC.action].std() > 0.1
    )
    assert torch.equal(policy.velocity(context, other, t), v)


@torch.no_grad()
def test_a_fresh_expert_knows_how_large_the_noise_is():
    """RMS norms alone would leave the direction of a chunk's noise."""
    policy = build()
    inward, x = (
        policy.head.expert.action_in,
        torch.randn(64, policy.width, generator=torch.Generator().manual_seed(0)),
    )
    assert alike(inward(x), inward(3 * x)) < 0.95  # 1 without a bias


def test_a_fresh_model_sees_every_pixel_of_the_embedded_cameras():
    for kind in ("pi0", "pi05", "smolvla"):
        options = build(kind).processor.options
        assert options.image_size == 64 and (options.action_kind, options.state_kind == "quantiles") == (
            "mean_std",
            kind == "pi05",
        )


def attention(policy, obs):
    """[B,N,L,P]: of the trunk's first layer."""
    seen = {}
    block = policy.trunk.layers[0].self_attn
    hook = block.register_forward_hook(lambda module, args, out: seen.update(args=args, keys=out[1][0]))
    policy.encode(obs)
    hook.remove()
    h, turn, mask = seen["args"][:3]
    q = rotate(block.q_proj(h).unflatten(-1, (-1, block.head_dim)), turn)
    keys = seen["keys"].repeat_interleave(q.shape[2] // seen["keys"].shape[2], 2)
    scores = torch.einsum("blnd,bpnd->bnlp", q, keys) / block.head_dim**0.5
    return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)


@pytest.mark.parametrize(
    ("kind", "size", "before"),
    [
        ("pi0", "tiny", 0),
        ("pi05", "tiny", 2),
        ("pi05", "small", 2),
        ("smolvla", "tiny", 0),
        ("smolvla", "small", 0),
    ],
)
@torch.no_grad()
def test_pictures_of_a_fresh_model_attend_to_the_words_of_the_instruction_and_to_little_else(
    kind, size, before
):
    policy = build(kind, size=size)
    obs, pictures = observations(SPEC, 2), policy.config.view_tokens
    words = len(text_of(obs["tokens"])[0].split())
    first = pictures + before  # pi0.5 says "Task :" before it
    to_words = attention(policy, obs)[0, :, :pictures, first : first + words].sum(-1)
    assert words > 2 and to_words.mean() > 0.6 and to_words.min() > 0.05


@pytest.mark.parametrize(("kind", "always"), [("pi0", "\n"), ("pi05", "Task:, State: 7 255 -1;\nAction:")])
def test_words_of_an_instruction_are_all_that_a_prompt_does_not_say_anyway(kind, always):
    processor = build(kind).processor
    words, told = processor.words, tokeniser.told_words(processor.words, processor.options.template)
    assert set(words.encode("pick up the red cube")) <= set(told)
    assert not set(words.encode(always)) & set(told) and min(told) >= tokeniser.RESERVED


PLACES = ObsSpec(state=2, action=2, views=("front",), image_size=64, language=True, text=64)
COLOURS = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8)


def squares(size, generator):
    """Three squares of eight pixels in cells of their own; the action is where the one is that the
    instruction asks for."""
    cells = torch.rand(size, 16, generator=generator).argsort(1)[:, :3]
    corner = torch.stack([cells // 4, cells % 4], -1) * 16 + torch.randint(
        0, 9, (size, 3, 2), generator=generator
    )
    image, line = torch.full((size, 64, 64, 3), 128, dtype=torch.uint8), torch.arange(64)
    for k, colour in enumerate(COLOURS):
        rows, columns = ((line >= corner[:, k, :, None]) & (line < corner[:, k, :, None] + 8)).unbind(1)
        image = torch.where((rows[..., None] & columns[:, None])[..., None], colour, image)
    asked = torch.randint(3, (size,), generator=generator)
    texts = text_tokens(
        [f"pick up the {('red', 'green', 'blue')[k]} cube" for k in asked.tolist()], PLACES.text
    )
    place = corner[torch.arange(size), asked] / 28 - 1.0
    return (
        {"state": torch.zeros(size, 2), "tokens": torch.from_numpy(texts), "image/front": image},
        place[:, None].expand(-1, 2, -1),
        torch.ones(size, 2),
    )


@pytest.mark.slow
def test_a_fresh_model_learns_to_read_from_scenes_that_never_come_again():
    """Its loss on new scenes with another one's instruction tells. Weights that do not hear the instruction
    do not read by then."""
    policy = make_policy(PolicyOptions(kind="pi05", horizon=2, execute=2), PLACES, 0)
    policy.action_norm.fit(squares(1000, torch.Generator().manual_seed(1))[1].flatten(0, 1))
    options = BcOptions(updates=700, batch=32, noises=4, lr=1e-3, ema=0.9)
    bc.train(policy, squares, options, 0)
    assert bc.exchanged_loss(policy, squares, options, 1) > 1.3
