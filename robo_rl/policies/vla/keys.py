"""Names of weights: ours, and those of the public checkpoints of each family.

A public layout is a list of prefixes, one of ours beside one of theirs; below a prefix the names are the
same. What no model needs (output heads, the last trunk layer after its keys and values, normaliser statistics
of older LeRobot files) is told apart from what is unknown. Layouts of pi0 and pi0.5: LeRobot >= 0.4
(`lerobot`), openpi's PyTorch files (`openpi`, the same without `model.`), and both with the names of
transformers <= 4.51 (`lerobot-old`, `openpi-old`). Of SmolVLA: LeRobot (`lerobot`). Of X-VLA: LeRobot 0.6
(`lerobot`) and before (`lerobot-old`). Of GR00T: NVIDIA's files (`gr00t`) and LeRobot, 0.4 of N1.5, 0.6 of
N1.7 (`lerobot`). Of pi0-FAST: LeRobot 0.6
(`lerobot`); openpi has it in JAX alone. Of OpenVLA-OFT: its own (`openvla`); head and state projector, which
its training leaves in files of their own, below `action_head.` and `proprio_projector.`, as the modules are
called there.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from robo_rl.errors import choose, quoted

OURS = "robo_rl"
# before the name of a tensor that no model reads and ours carries along, so that a checkpoint goes back as it
# came
KEPT = "kept."
TRAINED_EXPERT = "head.expert."  # before the expert's names in a policy that was trained here
HEAD = f"{KEPT}head"  # the output head of a file that has it beside the word embedding
FAMILIES = ("pi0", "pi05", "pi0_fast", "smolvla", "xvla", "groot", "groot_n17", "openvla_oft")


@dataclass(frozen=True)
class KeyLayout:
    """A public naming of one family's weights."""

    family: str
    name: str
    front: str
    """Before every key of the model itself: `model.` or nothing."""
    prefixes: tuple[tuple[str, str], ...]
    """(ours, theirs)."""
    words: tuple[str, str]
    """The word embedding, and the output head that is tied to it: a file may have one or both."""
    unused: str
    """Pattern of public names that no model of ours reads."""
    inside: tuple[tuple[str, str], ...] = ()
    """(ours, theirs) of parts of names below `within`; the first that is there is replaced."""
    turned: tuple[str, ...] = ()
    """Our names of matrices that are stored transposed."""
    stacks: tuple[str, ...] = ()
    """Our names before the number of a block, where the last block is one that nothing reads."""
    within: tuple[str, ...] = ("trunk.vision.",)
    """Our names before those that `inside` is of."""

    def ours(self, key: str) -> str | None:
        """Our name of a public key, None where we have none."""
        key = plain(key)
        if key in self.words:
            return WORDS
        name = next((a + key[len(b) :] for a, b in self.prefixes if key.startswith(b)), None)
        if name and name.startswith(self.within):
            a, b = next(((a, b) for a, b in self.inside if b in name), ("", ""))
            name = name.replace(b, a, 1) if b else name
        return name

    def theirs(self, name: str) -> str:
        """The public key of our name."""
        if name == WORDS:
            return self.words[0]
        if name.startswith(self.within):
            a, b = next(((a, b) for a, b in self.inside if a in name), ("", ""))
            name = name.replace(a, b, 1) if a else name
        return next(b + name[len(a) :] for a, b in self.prefixes if name.startswith(a))


WORDS = "trunk.words.weight"
NORMS = r"(un)?normalize_\w+\."  # statistics in the weights, as LeRobot < 0.4 wrote them

_HEADS = (("expert.action_in.", "action_in_proj."), ("expert.action_out.", "action_out_proj."))
_TIME = {"pi0": "action_time_mlp_", "pi05": "time_mlp_", "smolvla": "action_time_mlp_"}
_SIGLIP = (
    ("patch.", "embeddings.patch_embedding."),
    ("place.", "embeddings.position_embedding."),
    ("layers.", "encoder.layers."),
    ("norm.", "post_layernorm."),
)


def _pi(family: str, name: str, front: str, old: bool) -> KeyLayout:
    both, gemma = f"{front}paligemma_with_expert.", f"{front}paligemma_with_expert.gemma_expert."
    vlm = f"{both}paligemma." if old else f"{both}paligemma.model."
    text = f"{vlm}language_model.model." if old else f"{vlm}language_model."
    head = f"{vlm}language_model.lm_head.weight" if old else f"{both}paligemma.lm_head.weight"
    prefixes = [
        *((f"trunk.vision.{a}", f"{vlm}vision_tower.vision_model.{b}") for a, b in _SIGLIP),
        ("trunk.projector.", f"{vlm}multi_modal_projector.linear."),
        ("trunk.layers.", f"{text}layers."),
        ("trunk.norm.", f"{text}norm."),
        ("expert.layers.", f"{gemma}model.layers."),
        ("expert.norm.", f"{gemma}model.norm."),
        *((a, front + b) for a, b in _HEADS),
        *((f"expert.time_{x}.", f"{front}{_TIME[family]}{x}.") for x in ("in", "out")),
    ]
    if family == "pi0":
        prefixes.append(("expert.state.", f"{front}state_proj."))
    unused = rf"{re.escape(gemma)}(lm_head|model\.embed_tokens)\.|.*\.embeddings\.position_ids$|{NORMS}"
    return KeyLayout(family, name, front, tuple(prefixes), (f"{text}embed_tokens.weight", head), unused)


def _pi_fast() -> KeyLayout:
    both = "model.paligemma_with_expert."
    vlm = f"{both}paligemma.model."
    prefixes = (
        *((f"trunk.vision.{a}", f"{vlm}vision_tower.vision_model.{b}") for a, b in _SIGLIP),
        ("trunk.projector.", f"{vlm}multi_modal_projector.linear."),
        ("expert.layers.", f"{vlm}language_model.layers."),
        ("expert.norm.", f"{vlm}language_model.norm."),
    )
    words = (f"{vlm}language_model.embed_tokens.weight", f"{both}paligemma.lm_head.weight")
    return KeyLayout(
        "pi0_fast", "lerobot", "model.", prefixes, words, rf".*\.embeddings\.position_ids$|{NORMS}"
    )


def _smolvla() -> KeyLayout:
    both = "model.vlm_with_expert."
    vlm = f"{both}vlm.model."
    prefixes = [
        *((f"trunk.vision.{a}", f"{vlm}vision_model.{b}") for a, b in _SIGLIP),
        ("trunk.projector.proj.", f"{vlm}connector.modality_projection.proj."),
        ("trunk.layers.", f"{vlm}text_model.layers."),
        ("trunk.norm.", f"{vlm}text_model.norm."),
        ("trunk.state.", "model.state_proj."),
        ("expert.layers.", f"{both}lm_expert.layers."),
        ("expert.norm.", f"{both}lm_expert.norm."),
        *((a, f"model.{b}") for a, b in _HEADS),
        *((f"expert.time_{x}.", f"model.{_TIME['smolvla']}{x}.") for x in ("in", "out")),
    ]
    unused = rf"{re.escape(both)}lm_expert\.embed_tokens\.|.*\.embeddings\.position_ids$|{NORMS}"
    words = (f"{vlm}text_model.embed_tokens.weight", f"{both}vlm.lm_head.weight")
    return KeyLayout("smolvla", "lerobot", "model.", tuple(prefixes), words, unused)


_DAVIT = (
    ("spatial_block.attention.", "spatial_block.window_attn."),
    ("channel_block.attention.", "channel_block.channel_attn."),
)
_DAVIT_OLD = (
    ("spatial_block.norm1.", "spatial_block.window_attn.norm."),
    ("channel_block.norm1.", "channel_block.channel_attn.norm."),
    ("spatial_block.attention.", "spatial_block.window_attn.fn."),
    ("channel_block.attention.", "channel_block.channel_attn.fn."),
    (".norm2.", ".ffn.norm."),
    (".ffn.", ".ffn.fn.net."),
    (".conv1.", ".conv1.fn.dw."),
    (".conv2.", ".conv2.fn.dw."),
    (".conv.", ".proj."),
)


def _xvla(name: str, old: bool) -> KeyLayout:
    vlm, head = "model.vlm.", "model.transformer."
    text, picture = (
        (f"{vlm}language_model.model.", vlm)
        if old
        else (f"{vlm}language_model.", f"{vlm}multi_modal_projector.")
    )
    places = f"{picture}image_pos_embed." if old else f"{picture}image_position_embed."
    prefixes = (
        ("trunk.vision.", f"{vlm}vision_tower."),
        ("trunk.projector.rows.", f"{places}row_embeddings."),
        ("trunk.projector.columns.", f"{places}column_embeddings."),
        ("trunk.projector.norm.", f"{picture}image_proj_norm."),
        ("trunk.projector.weight", f"{picture}image_projection" + ("" if old else ".weight")),
        # a table of which the first row is used, and known
        ("trunk.projector.time.", f"{picture}visual_temporal_embed."),
        ("trunk.places.", f"{text}encoder.embed_positions."),
        ("trunk.norm.", f"{text}encoder.layernorm_embedding."),
        ("trunk.encoder.", f"{text}encoder.layers."),
        ("expert.encoder.", f"{head}action_encoder."),
        ("expert.decoder.", f"{head}action_decoder."),
        ("expert.seen.", f"{head}vlm_proj."),
        ("expert.others.", f"{head}aux_visual_proj."),
        ("expert.places", f"{head}pos_emb"),
        ("expert.soft_prompts.", f"{head}soft_prompt_hub."),
        ("expert.layers.", f"{head}blocks."),
        ("expert.norm.", f"{head}norm."),
    )
    unused = rf"{re.escape(vlm)}.*(pos_idx_to_embed|final_logits_bias)$|{re.escape(text)}decoder\.|.*lm_head\.|{NORMS}"  # noqa: E501
    return KeyLayout(
        "xvla",
        name,
        "model.",
        prefixes,
        (f"{text}shared.weight", f"{text}encoder.embed_tokens.weight"),
        unused,
        _DAVIT_OLD if old else _DAVIT,
        () if old else ("trunk.projector.weight",),
    )


_GROOT = (
    ("trunk.seen_norm.", "vlln."),
    ("trunk.mixer.", "vl_self_attention.transformer_blocks."),
    ("expert.layers.", "model.transformer_blocks."),
    ("expert.time_in.", "model.timestep_encoder.timestep_embedder.linear_1."),
    ("expert.time_out.", "model.timestep_encoder.timestep_embedder.linear_2."),
    ("expert.last_time.", "model.proj_out_1."),
    ("expert.out.", "model.proj_out_2."),
    ("expert.future.", "future_tokens."),
    ("expert.places.", "position_embedding."),
    *((f"expert.{x}.", f"{x}.") for x in ("state_encoder", "action_encoder", "action_decoder")),
)
_DIFFUSERS = (
    (".attention.out.", ".attn1.to_out.0."),
    (".attention.", ".attn1."),
    (".ff.fc1.", ".ff.net.0.proj."),
    (".ff.fc2.", ".ff.net.2."),
    (".time.", ".norm1.linear."),
)


def _groot(name: str, front: str) -> KeyLayout:
    eagle = f"{front}backbone.eagle_model."
    text = f"{eagle}language_model."
    prefixes = (
        *((f"trunk.vision.{a}", f"{eagle}vision_model.vision_model.{b}") for a, b in _SIGLIP),
        ("trunk.projector.", f"{eagle}mlp1.0."),
        ("trunk.decoder.", f"{text}model.layers."),
        ("trunk.norm.", f"{text}model.norm."),
        *((a, f"{front}action_head.{b}") for a, b in _GROOT),
    )
    unused = rf"{re.escape(eagle)}vision_model\.vision_model\.head\.|.*\.embeddings\.position_ids$|.*rotary_emb\.inv_freq$"  # noqa: E501
    return KeyLayout(
        "groot",
        name,
        front,
        prefixes,
        (f"{text}model.embed_tokens.weight", f"{text}lm_head.weight"),
        unused,
        _DIFFUSERS,
        within=("trunk.mixer.", "expert.layers."),
    )


def _groot_n17(name: str, front: str) -> KeyLayout:
    qwen = f"{front}backbone.model.model."
    text = f"{qwen}language_model."
    parts = (
        ("patch.", "patch_embed.proj."),
        ("place.", "pos_embed."),
        ("blocks.", "blocks."),
        ("merger.", "merger."),
        ("deep_mergers.", "deepstack_merger_list."),
    )
    prefixes = (
        *((f"trunk.vision.{a}", f"{qwen}visual.{b}") for a, b in parts),
        ("trunk.decoder.", f"{text}layers."),
        *((a, f"{front}action_head.{b}") for a, b in _GROOT),
    )
    words, unused = f"{text}embed_tokens.weight", rf"{re.escape(text)}norm\.|.*rotary_(pos_)?emb\.inv_freq$"
    return KeyLayout(
        "groot_n17",
        name,
        front,
        prefixes,
        (words, f"{front}backbone.model.lm_head.weight"),
        unused,
        (*_DIFFUSERS, (".fc1.", ".linear_fc1."), (".fc2.", ".linear_fc2.")),
        within=("trunk.mixer.", "expert.layers.", "trunk.vision."),
    )


def _openvla() -> KeyLayout:
    eyes = (("first", "vision_backbone.featurizer."), ("second", "vision_backbone.fused_featurizer."))
    prefixes = (
        *(
            (f"trunk.vision.{x}.{a}", y + b)
            for x, y in eyes
            for a, b in (
                ("patch.", "patch_embed.proj."),
                *((n, n) for n in ("blocks.", "pos_embed", "cls_token", "reg_token")),
            )
        ),
        ("trunk.projector.", "projector."),
        ("trunk.state.", "proprio_projector."),
        ("expert.layers.", "language_model.model.layers."),
        ("expert.norm.", "language_model.model.norm."),
        ("expert.lm_head.", "language_model.lm_head."),
        ("expert.action_head.", "action_head.model."),
    )
    unused = rf"vision_backbone\.(fused_)?featurizer\.(norm|attn_pool)\.|.*rotary_emb\.inv_freq$|{NORMS}"
    return KeyLayout(
        "openvla_oft",
        "openvla",
        "",
        prefixes,
        ("language_model.model.embed_tokens.weight", ""),
        unused,
        stacks=("trunk.vision.first.blocks.", "trunk.vision.second.blocks."),
    )


LAYOUTS = (
    *(
        _pi(family, name, front, old)
        for family in ("pi05", "pi0")
        for name, front, old in (
            ("lerobot", "model.", False),
            ("openpi", "", False),
            ("lerobot-old", "model.", True),
            ("openpi-old", "", True),
        )
    ),
    _pi_fast(),
    _smolvla(),
    _xvla("lerobot", False),
    _xvla("lerobot-old", True),
    _groot("gr00t", ""),
    _groot("lerobot", "_groot_model."),
    _groot_n17("gr00t", ""),
    _groot_n17("lerobot", "_groot_model."),
    _openvla(),
)


def plain(key: str) -> str:
    """A key without what torch.compile puts into it."""
    return key.replace("_orig_mod.", "")


def carried(key: str, read: "KeyMatch") -> str:
    """What ours calls a key of the file that no model reads."""
    if key == read.tied:
        return HEAD
    if read.layout is None:
        return key
    key = plain(key)
    return KEPT + (read.layout.ours(key) or key.removeprefix(read.layout.front))


def spelled(name: str, to: KeyLayout) -> str:
    """What a public layout calls a `carried` tensor."""
    name = name.removeprefix(KEPT)
    if KEPT + name == HEAD:
        return to.words[1]
    if name.startswith(("trunk.", "expert.")):
        return to.theirs(name)
    return name if re.match(NORMS, name) else to.front + name


def layouts_of(family: str) -> list[str]:
    """Names of the layouts of a family, ours first."""
    return [OURS, *(x.name for x in LAYOUTS if x.family == family)]


def layout(family: str, name: str) -> KeyLayout:
    """The public layout of that name; UserError naming those that the family has."""
    choose(f"layout of {family}", name, [n for n in layouts_of(family) if n != OURS])
    return next(x for x in LAYOUTS if (x.family, x.name) == (family, name))


@dataclass(frozen=True)
class KeyMatch:
    """How the keys of a file read in one layout."""

    layout: KeyLayout | None
    """None: ours."""
    family: str
    found: dict[str, str]
    """Our name -> the key in the file."""
    spare: tuple[str, ...]
    """Keys that no model needs."""
    unknown: tuple[str, ...]
    """Keys that this layout does not know."""
    tied: str = field(default="")
    """The key of a second copy of the word embedding, which the file's model shares with the first."""

    @property
    def name(self) -> str:
        """Of the layout."""
        return self.layout.name if self.layout else OURS

    @property
    def has_adapters(self) -> bool:
        """Whether there are LoRA's products beside the weights."""
        return any(".lora_A." in name for name in self.found)


def adapters_beside(path: Path) -> str:
    """What to do with them."""
    return f"{path} has adapters beside its weights: merge them with robo_rl lora {quoted(path)} --merge"


def after_the_last(names: Iterable[str], depth: int) -> set[str]:
    """Of our names, those of the last trunk layer that nothing reads: all but its first norm, keys and
    values."""
    last = rf"trunk\.layers\.{depth - 1}\.(?!input_layernorm\.|self_attn\.[kv]_proj\.)"
    return {n for n in names if re.match(last, n)}


def trunk_depth(names: Iterable[str]) -> int:
    """Layers of the trunk among our names."""
    return 1 + max((int(m[1]) for n in names if (m := re.match(r"trunk\.layers\.(\d+)\.", n))), default=-1)


def match(keys: Iterable[str], shape: KeyLayout) -> KeyMatch:
    """Read `keys` in a public layout."""
    found: dict[str, str] = {}
    spare, unknown, tied = [], [], ""
    for key in sorted(keys, key=lambda k: (plain(k) == shape.words[1], k)):
        name = shape.ours(key)
        if re.match(shape.unused, plain(key)):
            spare.append(key)
        elif name == WORDS and WORDS in found:
            tied = key
        elif name is not None:
            found[name] = key
        else:
            unknown.append(key)
    spare += [found.pop(name) for name in after_the_last(found, trunk_depth(found))]
    for stack in shape.stacks:
        last = max(
            (int(n.removeprefix(stack).split(".")[0]) for n in found if n.startswith(stack)), default=-1
        )
        spare += [found.pop(n) for n in list(found) if n.startswith(f"{stack}{last}.")]
    # words have no use beside it
    if "expert.action_head.fc2.weight" in found and "expert.lm_head.weight" in found:
        spare.append(found.pop("expert.lm_head.weight"))
    return KeyMatch(shape, shape.family, found, tuple(sorted(spare)), tuple(sorted(unknown)), tied)


def match_ours(keys: Iterable[str]) -> KeyMatch:
    """Read `keys` as ours; in a policy that was trained here the expert is its head, and it has other parts
    beside the model."""
    keys = list(keys)
    trained = any(k.startswith(TRAINED_EXPERT) for k in keys)
    found = {
        k.removeprefix("head.") if k.startswith(TRAINED_EXPERT) else k: k
        for k in keys
        if k.startswith(("trunk.", TRAINED_EXPERT if trained else "expert."))
    }
    rest = [k for k in keys if k not in found.values()]
    spare = [k for k in rest if trained or k.startswith(KEPT)]
    adaptive, merged = any(".dense." in k for k in found), "trunk.projector.proj.weight" in found
    if "trunk.vision.second.pos_embed" in found:
        return KeyMatch(None, "openvla_oft", found, tuple(spare), tuple(k for k in rest if k not in spare))
    if "expert.action_encoder.W1.W" in found:
        family = "groot_n17" if "trunk.vision.merger.fc1.weight" in found else "groot"
        return KeyMatch(None, family, found, tuple(spare), tuple(k for k in rest if k not in spare))
    writes = "expert.action_in.weight" not in found and "expert.norm.weight" in found
    family = (
        "xvla"
        if "expert.places" in found
        else "smolvla"
        if merged
        else "pi05"
        if adaptive
        else "pi0_fast"
        if writes
        else "pi0"
    )
    return KeyMatch(None, family, found, tuple(spare), tuple(k for k in rest if k not in spare))


def recognise(keys: Iterable[str]) -> KeyMatch:
    """The layout in which most of `keys` are known; pi0 and pi0.5 differ by their time layers and adaptive
    norms, pi0-FAST has no expert beside its language model."""
    keys = list(keys)

    def known(m: KeyMatch) -> tuple[int, int]:
        adaptive, acts = any(".dense." in n for n in m.found), any(n.startswith("expert.") for n in m.found)
        return len(m.found) + len(m.spare) + (m.tied != ""), int(acts and adaptive == (m.family == "pi05"))

    return max((match_ours(keys), *(match(keys, x) for x in LAYOUTS)), key=known)
