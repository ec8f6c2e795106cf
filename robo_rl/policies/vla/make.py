"""A vision-language-action model: of a size with weights of a seed, or of a checkpoint in any layout that is
known."""

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, choose, in_range, quoted
from robo_rl.files import read_json
from robo_rl.policies.vla import groot_n17
from robo_rl.policies.vla.blocks import AdaRmsNorm, DecoderSize, RmsNorm, VisionSize, VisionTower
from robo_rl.policies.vla.fresh import order_pictures
from robo_rl.policies.vla.groot import (
    EMBODIMENTS,
    GROOT_SIZES,
    EmbodiedLinear,
    GrootConfig,
    GrootExpert,
    TimedBlock,
)
from robo_rl.policies.vla.groot_n17 import GROOT_N17_SIZES, GrootN17Config
from robo_rl.policies.vla.keys import FAMILIES, KeyMatch, adapters_beside, recognise, trunk_depth
from robo_rl.policies.vla.network import VlaConfig, VlaModel, network_of
from robo_rl.policies.vla.openvla import OPENVLA_SIZES, LayerScale, OpenVlaConfig
from robo_rl.policies.vla.pi import PI_SIZES, PiConfig
from robo_rl.policies.vla.pi_fast import PI_FAST_SIZES, PiFastConfig
from robo_rl.policies.vla.smolvla import SMOLVLA_SIZES, PatchMerger, SmolVlaConfig
from robo_rl.policies.vla.weights import Checkpoint, TensorInfo, metadata_json, open_checkpoint
from robo_rl.policies.vla.xvla import XVLA_SIZES, DavitSize, DomainLinear, XVlaConfig
from robo_rl.shapes import are_shapes

SIZES: dict[str, dict[str, VlaConfig]] = {
    **PI_SIZES,
    "smolvla": SMOLVLA_SIZES,
    "xvla": XVLA_SIZES,
    "groot": GROOT_SIZES,
    "groot_n17": GROOT_N17_SIZES,
    "pi0_fast": PI_FAST_SIZES,
    "openvla_oft": OPENVLA_SIZES,
}  # pyright: ignore[reportAssignmentType]
CONFIG = "vla.json"  # beside the weights of a policy that was trained here: the model's configuration
METADATA = "vla"  # of a safetensors file of ours: the model's configuration
# steps of LeRobot's preprocessor that know the embodiment
GROOT_INPUTS = ("groot_pack_inputs", "groot_n1_7_pack_inputs")
DRAWN = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm)
ENDS_A_BRANCH = ("o_proj", "down_proj", "out_proj", "fc2", "attention.out")


def vla_config(family: str, size: str) -> VlaConfig:
    """The configuration of a family (`keys.FAMILIES`) at a size: tiny, small or full. UserError naming those
    there are."""
    sizes = SIZES[choose("model", family, FAMILIES)]
    return sizes[choose("size", size, sizes)]


def empty_model(config: VlaConfig, dtype: torch.dtype = torch.float32) -> VlaModel:
    """The model on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return network_of(config).to(dtype)


_drawn = ContextVar("drawn", default=True)


@contextmanager
def weights_come_later() -> Iterator[None]:
    """Models that are made meanwhile have no weights yet: drawing billions takes minutes, and a checkpoint's
    replace them."""
    before = _drawn.set(False)
    try:
        yield
    finally:
        _drawn.reset(before)


def make_model(
    config: VlaConfig, seed: int, device: "torch.device | str" = "cpu", dtype: torch.dtype = torch.float32
) -> VlaModel:
    """A model whose weights are drawn from `seed` on `device` (the same on devices of one kind, whatever the
    dtype but for rounding)."""
    model = empty_model(config, dtype).to_empty(device=device)
    if _drawn.get():
        initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: VlaModel, seed: int) -> None:
    """Draw all weights: normal of one over the root of what a unit sums over; what ends a residual branch,
    less by the root of twice the layers; norms are 1, biases 0, and the gate of an adaptive norm is 1 (openpi
    starts it at 0, for a trunk that is trained). Patches of a vision transformer see low frequencies first
    and know their neighbours (`fresh`)."""
    depth = max(model.config.vision.depth, model.config.trunk.depth)
    for name, module in model.named_modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(module, DRAWN[:3]):
            assert weight is not None
            fan = module.embedding_dim if isinstance(module, nn.Embedding) else weight[0].numel()
            gain = (2 * depth) ** -0.5 if name.endswith(ENDS_A_BRANCH) else 1.0
            _draw(weight, gain * fan**-0.5, seed, name)
            if bias is not None:
                bias.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, RmsNorm):
            module.weight.fill_(1.0 - module.offset)
    for name, module in model.named_modules():
        if isinstance(module, AdaRmsNorm):
            _draw(module.dense.weight, 0.1 * module.dense.in_features**-0.5, seed, name)
            module.dense.bias[-module.dense.out_features // 3 :].fill_(1.0)
        elif isinstance(module, LayerScale):
            module.scale_factor.fill_(1.0)
        elif isinstance(module, PatchMerger):
            module.proj.weight.div_(math.sqrt(module.proj.out_features))
        elif isinstance(module, DomainLinear):
            _draw(module.fc.weight, module.inputs**-0.5, seed, name)
            module.bias.weight.zero_()
        elif isinstance(module, TimedBlock | GrootExpert):
            last = module.time if isinstance(module, TimedBlock) else module.last_time
            _draw(last.weight, 0.1 * last.in_features**-0.5, seed, f"{name}.time")
        elif isinstance(module, VisionTower):
            order_pictures(
                module.patch, module.place, _generator(seed, f"{name}.order", module.place.weight.device)
            )
        elif isinstance(module, EmbodiedLinear):
            _draw(module.W, module.W.shape[1] ** -0.5, seed, name)
            module.b.zero_()
        elif not isinstance(module, (*DRAWN, RmsNorm)):
            for leaf, p in module.named_parameters(recurse=False):
                _draw(p, p[0].numel() ** -0.5 if p.dim() > 1 else 0.0, seed, f"{name}.{leaf}")


def _draw(weight: Tensor, std: float, seed: int, name: str) -> None:
    g = _generator(seed, name, weight.device)
    weight.copy_(torch.randn(weight.shape, generator=g, device=weight.device).mul_(std))


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Of the numbers of one module, whatever others there are."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def config_of(entries: Mapping[str, Any]) -> VlaConfig:
    """The configuration that `asdict` made `entries` of; UserError where they are of none."""
    kind = {
        "smolvla": SmolVlaConfig,
        "xvla": XVlaConfig,
        "groot": GrootConfig,
        "groot_n17": GrootN17Config,
        "pi0_fast": PiFastConfig,
        "openvla_oft": OpenVlaConfig,
    }.get(str(entries.get("family")), PiConfig)
    try:
        entries, vision = _tuples(entries), _tuples(entries["vision"])
        decoders = ("trunk",) if kind in (PiFastConfig, OpenVlaConfig) else ("trunk", "expert")
        decoders = (*decoders, "mixer") if issubclass(kind, GrootConfig) else decoders
        parts: dict[str, Any] = {name: DecoderSize(**entries[name]) for name in decoders}
        parts["vision"] = (DavitSize if kind is XVlaConfig else VisionSize)(**vision)
        if kind is OpenVlaConfig:
            parts["second"] = VisionSize(**entries["second"])
        return kind(**{**entries, **parts})
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(
            f"the configuration of a model in a checkpoint is not read here ({e}); it has "
            f"{', '.join(f.name for f in fields(kind))}"
        ) from None


def _tuples(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}


def infer_config(read: KeyMatch, tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> VlaConfig:
    """The configuration that the shapes say. `settings`: LeRobot's config.json, which knows the horizon
    (`chunk_size`).

    Shapes do not tell how many heads share a width: that is taken from the published size of the same width.
    UserError: none has it.
    """
    at = {name: tensors[key].shape for name, key in read.found.items()}
    if read.family == "xvla":
        return _infer_xvla(at, settings)
    if read.family in ("groot", "groot_n17"):
        return _infer_groot(read.family, at, settings)
    if read.family == "pi0_fast":
        return _infer_pi_fast(at, settings)
    if read.family == "openvla_oft":
        return _infer_openvla(at, settings)
    known: dict[str, Any] = dict(SIZES[read.family])
    try:
        width, vocab = at["trunk.words.weight"][1], at["trunk.words.weight"][0]
        v_width, patch = at["trunk.vision.patch.weight"][0], at["trunk.vision.patch.weight"][-1]
        places, v_mlp = at["trunk.vision.place.weight"][0], at["trunk.vision.layers.0.mlp.fc1.weight"][0]
        q, k = (
            at["trunk.layers.0.self_attn.q_proj.weight"][0],
            at["trunk.layers.0.self_attn.k_proj.weight"][0],
        )
        mlp, e_mlp = (at[f"{side}.layers.0.mlp.gate_proj.weight"][0] for side in ("trunk", "expert"))
        e_width, a_width = at["expert.action_in.weight"]
        projected = at["trunk.projector.proj.weight"][1] if read.family == "smolvla" else 0
        state = (
            at["expert.state.weight"][1]
            if read.family == "pi0"
            else at["trunk.state.weight"][1]
            if projected
            else a_width
        )
    except KeyError as e:
        raise UserError(
            f"weights of {read.family} in layout {read.name} without {e.args[0]}: its sizes cannot be told"
        ) from None
    like = next((c for c in known.values() if (c.vision.width, c.trunk.width) == (v_width, width)), None)
    if like is None:
        raise UserError(
            f"{read.family} with a vision of {v_width} and a trunk of {width}: shapes do not tell the heads, "
            "and no size that is known has these "
            f"({', '.join(f'{n} {c.vision.width} and {c.trunk.width}' for n, c in known.items())})"
        )
    depth, v_depth = (
        trunk_depth(at),
        1 + max(int(n.split(".")[3]) for n in at if n.startswith("trunk.vision.layers.")),
    )
    head_dim = k if read.family != "smolvla" else like.trunk.head_dim
    heads = {"depth": depth, "heads": q // head_dim, "kv_heads": k // head_dim, "head_dim": head_dim}
    config = replace(
        like,
        vocab=vocab,
        action_width=a_width,
        state_width=state,
        horizon=int(settings.get("chunk_size", like.horizon)),
        vision=VisionSize(
            width=v_width,
            depth=v_depth,
            mlp=v_mlp,
            heads=like.vision.heads,
            patch=patch,
            image=math.isqrt(places) * patch,
        ),
        trunk=DecoderSize(width=width, mlp=mlp, **heads),
        expert=DecoderSize(width=e_width, mlp=e_mlp, **heads),
    )
    return (
        replace(config, merge=math.isqrt(projected // v_width))
        if isinstance(config, SmolVlaConfig)
        else config
    )


def _infer_xvla(at: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> XVlaConfig:
    """As `infer_config`; `action_mode` of the settings says which entries are grippers, `num_image_views` how
    many views there are."""
    try:
        text, head = at["trunk.norm.weight"][0], at["expert.norm.weight"][0]
        domains, action = at["expert.decoder.bias.weight"]
        like = next((c for c in XVLA_SIZES.values() if (c.trunk.width, c.expert.width) == (text, head)), None)
        if like is None:
            raise UserError(
                f"xvla with a text encoder of {text} and a transformer of {head}: shapes do not tell the "
                "heads"
            )
        state = at["expert.encoder.fc.weight"][1] // head - action - like.time_width
        mode = str(settings.get("action_mode", "ee6d"))
        return replace(
            like,
            vocab=at["trunk.words.weight"][0],
            domains=domains,
            action_width=action,
            state_width=state,
            domain=_domain(settings, like.domain, domains),
            picture_places=at["trunk.projector.rows.weight"][0],
            places=at["expert.places"][1],
            text_places=at["trunk.places.weight"][0] - 2,
            soft_prompts=at["expert.soft_prompts.weight"][1] // head,
            horizon=int(settings.get("chunk_size", like.horizon)),
            views=int(settings.get("num_image_views") or like.views),
            prompt=int(settings.get("tokenizer_max_length", like.prompt)),
            grippers={"ee6d": (9, 19), "joint": (6, 13)}.get(mode, ()),
        )
    except KeyError as e:
        raise UserError(f"weights of xvla without {e.args[0]}: its sizes cannot be told") from None


def _infer_groot(family: str, at: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> GrootConfig:
    """As `infer_config`; NVIDIA's settings know the horizon (`action_horizon`), of LeRobot's (`chunk_size`)
    the model's own is the most."""
    try:
        (vocab, width), (v_width, *_, patch) = at["trunk.words.weight"], at["trunk.vision.patch.weight"]
        _, state, hidden = at["expert.state_encoder.layer1.W"]
        embodiments, action, e_width = at["expert.action_encoder.W1.W"]
        sizes: Mapping[str, GrootConfig] = GROOT_SIZES if family == "groot" else GROOT_N17_SIZES
        like = next(
            (
                c
                for c in sizes.values()
                if (c.vision.width, c.trunk.width, c.expert.width) == (v_width, width, e_width)
            ),
            None,
        )
        if like is None:
            raise UserError(
                f"{family} with a vision of {v_width}, a trunk of {width} and an expert of {e_width}: shapes "
                "do not tell the heads"
            )
        side, vision = math.isqrt(at["trunk.vision.place.weight"][0]), replace(like.vision, patch=patch)
        if isinstance(like, GrootN17Config):  # places are interpolated: a picture may be of any size
            like, vision = replace(like, grid=side), replace(vision, depth=_count(at, "trunk.vision.blocks."))
        else:
            vision, more = (
                replace(vision, image=side * patch, depth=_count(at, "trunk.vision.layers.")),
                at["expert.future.weight"][0],
            )
            like = replace(like, future=more)
        return replace(
            like,
            vision=vision,
            vocab=vocab,
            hidden=hidden,
            embodiments=embodiments,
            action_width=action,
            state_width=state,
            embodiment=int(settings.get("embodiment", min(like.embodiment, embodiments - 1))),
            places=at["expert.places.weight"][0],
            horizon=int(
                settings.get(
                    "action_horizon", min(int(settings.get("chunk_size", like.horizon)), like.horizon)
                )
            ),
            trunk=replace(like.trunk, depth=_count(at, "trunk.decoder.")),
            mixer=replace(like.mixer, depth=_count(at, "trunk.mixer.")),
            expert=replace(like.expert, depth=_count(at, "expert.layers.")),
        )
    except KeyError as e:
        raise UserError(f"weights of {family} without {e.args[0]}: its sizes cannot be told") from None


def _domain(settings: Mapping[str, Any], usual: int, domains: int) -> int:
    """Which embodiment's weights are used, as the folder says or as usual. UserError: there are not as
    many."""
    said = int(settings.get("domain", min(usual, domains - 1)))
    in_range("domain_id of the folder's xvla_add_domain_id", said, 0, domains - 1)
    return said


def _infer_pi_fast(at: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> PiFastConfig:
    """As `infer_config`; LeRobot's settings say how many action tokens a chunk has at most, and how many
    words lie behind them."""
    try:
        (vocab, width), patch = at["trunk.words.weight"], at["trunk.vision.patch.weight"][-1]
        v_width, places = at["trunk.vision.patch.weight"][0], at["trunk.vision.place.weight"][0]
        q, k = (at[f"expert.layers.0.self_attn.{x}_proj.weight"][0] for x in "qk")
        mlp, v_mlp = (
            at["expert.layers.0.mlp.gate_proj.weight"][0],
            at["trunk.vision.layers.0.mlp.fc1.weight"][0],
        )
    except KeyError as e:
        raise UserError(f"weights of pi0_fast without {e.args[0]}: its sizes cannot be told") from None
    like = next(
        (c for c in PI_FAST_SIZES.values() if (c.vision.width, c.trunk.width) == (v_width, width)), None
    )
    if like is None:
        raise UserError(
            f"pi0_fast with a vision of {v_width} and a language model of {width}: shapes do not tell the "
            "heads"
        )
    depth, v_depth = _count(at, "expert.layers."), _count(at, "trunk.vision.layers.")
    return replace(
        like,
        vocab=vocab,
        horizon=int(settings.get("chunk_size", like.horizon)),
        tokens=int(settings.get("max_action_tokens", like.tokens)),
        skip=int(settings.get("fast_skip_tokens", like.skip)),
        vision=VisionSize(
            width=v_width,
            depth=v_depth,
            mlp=v_mlp,
            heads=like.vision.heads,
            patch=patch,
            image=math.isqrt(places) * patch,
        ),
        trunk=DecoderSize(width=width, depth=depth, mlp=mlp, heads=q // k, kv_heads=1, head_dim=k),
    )


def _infer_openvla(at: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> OpenVlaConfig:
    """As `infer_config`; an action head among the weights makes it an l1 model. `text_config` of the settings
    knows eps."""
    try:
        (vocab, width), head = (
            at["trunk.words.weight"],
            "l1" if "expert.action_head.fc2.weight" in at else "tokens",
        )
        v_width, s_width = (at[f"trunk.vision.{x}.pos_embed"][-1] for x in ("first", "second"))
        widths = (v_width, s_width, width)
        like = next(
            (c for c in OPENVLA_SIZES.values() if (c.vision.width, c.second.width, c.trunk.width) == widths),
            None,
        )
        if like is None:
            raise UserError(
                f"openvla_oft with visions of {v_width} and {s_width} and a language model of {width}: "
                "shapes do not tell the heads"
            )
        towers = [
            replace(
                size,
                depth=_count(at, f"trunk.vision.{x}.blocks."),
                image=math.isqrt(at[f"trunk.vision.{x}.pos_embed"][1]) * size.patch,
            )
            for x, size in (("first", like.vision), ("second", like.second))
        ]
        state, text = at.get("trunk.state.fc1.weight"), settings.get("text_config", {})
        action = at["expert.action_head.fc2.weight"][0] if head == "l1" else like.action_width
        return replace(
            like,
            vocab=vocab,
            words=vocab - int(settings.get("pad_to_multiple_of", like.vocab - like.words)),
            head=head,
            has_state=state is not None,
            state_width=state[1] if state else like.state_width,
            action_width=action,
            vision=towers[0],
            second=towers[1],
            hidden=at["expert.action_head.fc1.weight"][0] if head == "l1" else like.hidden,
            eps=float(text.get("rms_norm_eps", like.eps)),
            trunk=replace(like.trunk, depth=_count(at, "expert.layers.")),
        )
    except KeyError as e:
        raise UserError(f"weights of openvla_oft without {e.args[0]}: its sizes cannot be told") from None


def _count(names: Iterable[str], front: str) -> int:
    """Layers below `front`."""
    return 1 + max(
        (int(n.removeprefix(front).split(".")[0]) for n in names if n.startswith(front)), default=-1
    )


def family_of(path: "str | Path") -> str:
    """pi0, pi05, …, by the names of the weights of a file or folder alone. UserError: none is there, or it is
    none of these."""
    checkpoint = open_checkpoint(path)
    return known(checkpoint, recognise(checkpoint.tensors)).family


def known(checkpoint: Checkpoint, read: KeyMatch) -> KeyMatch:
    """`read`. UserError: no key of it is a model's."""
    if not read.found:
        raise UserError(
            f"{checkpoint.path} has {len(checkpoint.tensors)} tensors and no key of {', '.join(FAMILIES)}; "
            f"the first is {next(iter(checkpoint.tensors), 'none')!r}; give the weights of one of these"
        )
    return read


def settings_of(path: Path) -> dict[str, Any]:
    """The config.json beside the weights, {} where there is none; with the embodiment that the preprocessor
    names, of an X-VLA as "domain", of a GR00T as "embodiment"."""
    folder = path if path.is_dir() else path.parent
    file, steps = folder / "config.json", folder / "policy_preprocessor.json"
    settings = dict(read_json(file)) if file.is_file() else {}
    said = read_json(steps).get("steps", []) if steps.is_file() else []
    if not isinstance(said, list) or not all(isinstance(step, dict) for step in said):
        raise UserError(f"{steps} has no list of steps, as LeRobot writes it; copy it again")
    for step in said:
        if step.get("registry_name") == "xvla_add_domain_id":
            settings["domain"] = step.get("config", {}).get("domain_id", 0)
        elif (name := str(step.get("registry_name"))).startswith(GROOT_INPUTS):
            known, usual = (
                step.get("config", {}),
                EMBODIMENTS if name.startswith(GROOT_INPUTS[0]) else groot_n17.EMBODIMENTS,
            )
            settings["embodiment"] = known.get("embodiment_mapping", usual).get(
                known.get("embodiment_tag"), 0
            )
    return settings


def read_config(checkpoint: Checkpoint, read: KeyMatch) -> VlaConfig:
    """The configuration of a checkpoint: what its metadata or a vla.json says if it is ours, else what its
    shapes say."""
    said, file = metadata_json(checkpoint.metadata, METADATA), checkpoint.files[0].parent / CONFIG
    if not said and read.layout is None and file.is_file():
        said = read_json(file)
    if said:
        return config_of(said)
    known(checkpoint, read)
    settings = settings_of(checkpoint.path)
    try:
        return infer_config(read, checkpoint.tensors, settings)
    except UserError:
        strange, absent = _unlike(read)
        if not (told := _counted({"keys unexpected": strange, "kinds of weights missing": absent})):
            raise
        raise UserError(
            f"{checkpoint.path}: unknown layout of keys, or one shard of several (then name its folder); "
            f"nearest is {read.family} in layout {read.name}: {told}"
        ) from None


def _counted(names: Mapping[str, list[str]]) -> str:
    """How many of each kind, and the first of them; "" where there are none."""
    return "; ".join(
        f"{len(some)} {what} ({', '.join(some[:3])}{' …' if len(some) > 3 else ''})"
        for what, some in names.items()
        if some
    )


def _unlike(read: KeyMatch) -> tuple[list[str], list[str]]:
    """(keys that are no weight of the family, weights of it that are absent), whatever the number of
    layers."""

    def kind(name: str) -> str:
        return re.sub(r"\.\d+\.", ".N.", name)

    want = {kind(name) for name in empty_model(vla_config(read.family, "tiny")).state_dict()}
    strange = [*read.unknown, *(key for name, key in read.found.items() if kind(name) not in want)]
    return strange, sorted(want - {kind(name) for name in read.found})


def differences(
    config: VlaConfig, read: KeyMatch, tensors: Mapping[str, TensorInfo]
) -> tuple[list[str], list[str]]:
    """(our names that the checkpoint lacks, names whose shape is another) for a model of `config`."""
    want = {name: tuple(p.shape) for name, p in empty_model(config).state_dict().items()}
    missing = [name for name in want if name not in read.found]
    turned = read.layout.turned if read.layout else ()
    there = {
        name: tensors[key].shape[::-1] if name in turned else tensors[key].shape
        for name, key in read.found.items()
    }
    wrong = [
        f"{name} {list(there[name])} instead of {list(shape)}"
        for name, shape in want.items()
        if there.get(name, shape) != shape
    ]
    wrong += [name for name in read.found if name not in want]
    return missing, wrong


def check_match(path: Path, config: VlaConfig, read: KeyMatch, tensors: Mapping[str, TensorInfo]) -> None:
    """UserError, counting and naming some, unless every weight of the model is there in its shape and every
    key is known."""
    if read.has_adapters:
        raise UserError(adapters_beside(path))
    missing, wrong = differences(config, read, tensors)
    told = _counted({"missing": missing, "of another shape": wrong, "unexpected": list(read.unknown)})
    if told:
        raise UserError(
            f"{path}: unknown layout of keys; nearest is {read.family} in layout {read.name}: "
            f"{told}. Look closer with: robo_rl vla check {quoted(path)}"
        )


def load_model(
    path: "str | Path",
    device: "torch.device | str" = "cpu",
    dtype: torch.dtype | None = None,
    config: VlaConfig | None = None,
) -> VlaModel:
    """The model of a file or folder, each tensor read once, straight to `device`; dtype None: as stored.

    The layout is recognised, the configuration taken from the file unless given. UserError: a shard absent or
    truncated, an unknown layout (the nearest known, missing and unexpected keys counted), another shape.
    """
    checkpoint = open_checkpoint(path)
    read = recognise(checkpoint.tensors)
    config = config or read_config(checkpoint, read)
    check_match(checkpoint.path, config, read, checkpoint.tensors)
    model = empty_model(config)
    if are_shapes():
        return model.to(dtype or torch.float32).to_empty(device=device)
    names = {key: name for name, key in read.found.items()}
    turned = read.layout.turned if read.layout else ()
    for key, tensor in checkpoint.read(set(names), device):
        tensor = tensor.T.contiguous() if names[key] in turned else tensor
        # on a CPU it is the file's own pages
        _place(model, names[key], tensor.to(dtype or tensor.dtype, copy=tensor.device.type == "cpu"))
    return model


def _place(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(tensor))


def model_metadata(config: VlaConfig) -> dict[str, Any]:
    """What `config_of` reads."""
    return asdict(config)
