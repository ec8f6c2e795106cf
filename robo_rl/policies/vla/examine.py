"""What a checkpoint is and what it lacks, from headers and small files alone: no weight is read."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.policies.vla import tokeniser as tokenisers
from robo_rl.policies.vla.keys import OURS, KeyMatch, adapters_beside, recognise
from robo_rl.policies.vla.make import differences, empty_model, read_config
from robo_rl.policies.vla.network import VlaConfig
from robo_rl.policies.vla.openvla import OpenVlaConfig
from robo_rl.policies.vla.pi_fast import PiFastConfig
from robo_rl.policies.vla.processor import NAME, Processor
from robo_rl.policies.vla.processor_files import CONFIG, from_folder
from robo_rl.policies.vla.weights import NAMES, Checkpoint, open_checkpoint

SHOWN = 3  # keys of a kind that are named
FEW = 0.9  # of a model's words: published tokenisers have nearly all of them


@dataclass
class Examination:
    """What was found, line by line, and what keeps it from being used."""

    path: Path
    facts: list[tuple[str, str]] = field(default_factory=list)
    """(what, value)."""
    missing: list[str] = field(default_factory=list)
    """Sentences; empty: it can be trained and deployed."""

    def say(self, what: str, value: str) -> None:
        """Add a fact."""
        self.facts.append((what, value))


def examine(path: "str | Path") -> Examination:
    """Look at a file or folder. UserError: it is no whole checkpoint, or its sizes cannot be told."""
    checkpoint = open_checkpoint(path)
    read = recognise(checkpoint.tensors)
    config = read_config(checkpoint, read)
    out = Examination(checkpoint.path)
    _say_weights(out, checkpoint, read, config)
    _say_sizes(out, config)
    _say_processor(out, checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent, config)
    return out


def _say_weights(out: Examination, checkpoint: Checkpoint, read: KeyMatch, config: VlaConfig) -> None:
    stored = sum(t.bytes for t in checkpoint.tensors.values())
    layout = "robo_rl" if read.name == OURS else read.name
    words = (
        f", words as {read.found['trunk.words.weight']}"
        if read.layout and "trunk.words.weight" in read.found
        else ""
    )
    out.say("model", f"{read.family}, keys in layout {layout}{words}")
    out.say(
        "files",
        f"{len(checkpoint.files)} of {_size(stored)}, {len(checkpoint.tensors)} tensors: "
        + ", ".join(
            f"{n} {NAMES[d]}" for d, n in Counter(t.dtype for t in checkpoint.tensors.values()).most_common()
        ),
    )
    if read.spare or read.tied:
        spare = [*read.spare, *filter(None, [read.tied])]
        size = sum(checkpoint.tensors[k].bytes for k in spare)
        out.say("not needed", f"{len(spare)} tensors of {_size(size)} ({_some(spare)})")
    if read.has_adapters:
        out.missing.append(adapters_beside(checkpoint.path))
        return
    missing, wrong = differences(config, read, checkpoint.tensors)
    for names, what in (
        (missing, "missing"),
        (wrong, "of another shape"),
        (list(read.unknown), "unexpected"),
    ):
        if names:
            out.missing.append(f"{len(names)} weights {what}: {_some(names)}")


def _say_sizes(out: Examination, config: VlaConfig) -> None:
    count = sum(p.numel() for p in empty_model(config).parameters())
    out.say("parameters", f"{count / 1e6:,.1f} M ({_size(2 * count)} in bf16, {_size(4 * count)} in fp32)")
    v, t = config.vision, config.trunk
    out.say(
        "images",
        f"{v.image} x {v.image} pixels, up to {config.views} views, {config.view_tokens} tokens each",
    )
    out.say(
        "trunk",
        f"{t.depth} layers of {t.width}, {t.heads} heads over {t.kv_heads} of {t.head_dim}; {config.vocab} "
        "words",
    )
    if isinstance(config, PiFastConfig):
        out.say(
            "actions",
            f"tokens of the same layers, {config.tokens} at most; their tokeniser is apart "
            "(--policy.action-words)",
        )
        return
    if isinstance(config, OpenVlaConfig):
        how = f"{config.bins} bins a number" if config.head == "tokens" else "numbers of an l1 head"
        state = "a token" if config.has_state else "not read"
        out.say(
            "actions", f"{config.action_width} numbers a step in one pass, as {how}; the state is {state}"
        )
        return
    e = config.expert
    out.say(
        "expert",
        f"{e.depth} layers of {e.width}; chunks of {config.horizon} steps, {config.action_width} numbers a "
        "step",
    )


def _say_processor(out: Examination, folder: Path, config: VlaConfig) -> None:
    """Cameras, prompt, statistics and tokeniser of the folder; what of them is absent."""
    made = None
    for need in (True, False):  # without statistics the folder says the rest
        try:
            made = _processor(folder, config, need)
            break
        except UserError as e:
            if str(e) not in out.missing:
                out.missing.append(str(e))
    if made is not None:
        o = made.options
        empty = f" and {o.slots - len(o.views)} empty" if o.slots > len(o.views) else ""
        out.say(
            "cameras",
            f"{', '.join(o.views) or 'none named'}{empty}; pictures made {o.image_size} wide by {o.fit}",
        )
        out.say("prompt", f"{o.template!r}, at most {o.prompt} tokens")
        relative = f", {sum(o.delta)} axes relative to the state" if any(o.delta) else ""
        out.say(
            "robot",
            f"state of {o.state}, normalised by {o.state_kind}; action of {o.action}, by "
            f"{o.action_kind}{relative}",
        )
        if len(o.views) > config.views:
            out.missing.append(
                f"the folder names {len(o.views)} cameras, {config.family} takes {config.views} at most"
            )
        if o.image_size != config.vision.image:
            out.missing.append(
                f"the processor makes pictures of {o.image_size} pixels, the model takes "
                f"{config.vision.image}"
            )
    try:
        if not (folder / NAME).is_file():
            words = tokenisers.load(folder)
            few = f" for {config.vocab} words: is it the one that the model was trained with?"
            out.say(
                "tokeniser",
                f"{words.name}, {words.size} tokens{few if words.size < FEW * config.vocab else ''}",
            )
            tokenisers.check_words(words, config.vocab)
    except UserError as e:
        out.missing.append(str(e))


def _processor(folder: Path, config: VlaConfig, need_statistics: bool) -> Processor:
    """The folder's processor, with words of any kind where the tokeniser is a file of its own."""
    if (folder / NAME).is_file():
        return from_folder(folder)
    stand_in = f"words:{config.vocab}"
    if (folder / CONFIG).is_file():
        return from_folder(folder, stand_in, need_statistics)
    return from_folder(folder, stand_in, family=config.family)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "")
