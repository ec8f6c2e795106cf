"""Between an observation in its own units and the inputs of a vision-language-action model, and back for its
actions.

A processor knows which cameras a model looks at and in which order, how pictures become its squares, the
template and the tokeniser of its prompt, the statistics of every axis of state and action, and whether
actions are relative to the state. It is plain JSON (`describe`), the buffers of two normalisers and a
tokeniser's file; `save` and `load` keep it beside a checkpoint. Foreign folders (LeRobot, openpi) are read by
`processor_files`.

Axes: B rows, V views of the model, P tokens, S and A state and action of the robot, W width of the model
(32), H steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from robo_rl.errors import UserError, choose, in_range
from robo_rl.files import read_json, write_bytes, write_json
from robo_rl.normalise import KINDS, AxisNormaliser
from robo_rl.policies.images import Fit, check_fit, fit
from robo_rl.policies.vla import tokeniser as tokenisers
from robo_rl.policies.vla.tokeniser import Tokeniser, check_words

# "state" and "action" -> mean std min max q01 q99 -> numbers of every axis
Statistics = Mapping[str, Mapping[str, Any]]
NAME, NUMBERS = "processor.json", "processor.safetensors"
STATE_TEXT = np.linspace(-1, 1, 257)[:-1]  # left ends of the 256 bins of a state in a prompt (openpi)
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{pictures}['{task}']<|im_end|>\n<|im_start|>assistant\n"
)
SHORT_CHAT = "<|im_start|>user\n{pictures}{task}<|im_end|>\n"
TEMPLATES = (
    "{task}\n",
    "Task: {task}, State: {state};\nAction: ",
    "Task: {task}, State: {state};\n",
    "In: What action should the robot take to {task}?\nOut:",
)


@dataclass(frozen=True, kw_only=True)
class ProcessorOptions:
    """What a model expects, beside the statistics and the tokeniser."""

    family: str = "pi0"
    """pi0, pi05, pi0_fast, smolvla, xvla, groot, groot_n17 or openvla_oft: where the other defaults come from
    (`of_family`)."""
    views: tuple[str, ...] = ()
    """Cameras of the observation in the order of the model's views; those that the model has beyond them are
    masked."""
    slots: int = 3
    """V: views of the model."""
    image_size: int = 224
    """Side of the model's pictures [pixels]."""
    fit: Fit = "pad"
    """How a picture of another size becomes one: pad, pad_top_left, crop or stretch."""
    template: str = TEMPLATES[0]
    """Of the prompt: {task}, {state} where the state is told in words, {pictures} where pictures have their
    places among the words."""
    lower: bool = False
    """Whether the instruction is put in small letters."""
    prompt: int = 48
    """P: most tokens of a prompt."""
    vocabulary: int = 0
    """Rows of the model's word embedding; 0: not checked."""
    state: int = 1
    """S."""
    action: int = 1
    """A."""
    width: int = 32
    """W: numbers of state and action as the model takes them, padded with 0."""
    state_kind: str = "mean_std"
    """Normaliser of the state: mean_std, quantiles (q01 to q99 become -1 to 1), min_max or identity."""
    action_kind: str = "mean_std"
    """Normaliser of the actions."""
    padded_state_text: bool = False
    """Whether the state in the prompt has W numbers (LeRobot) and not S (openpi)."""
    delta: tuple[bool, ...] = ()
    """Per action axis: whether the model's action is relative to the state of the same number; empty: none
    is."""
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    """Unit of every action axis; empty: not stated."""
    tokeniser: str = ""
    """Its file, or words:N; `digest` tells it from others."""
    digest: str = ""

    def __post_init__(self) -> None:
        choose("processor family", self.family, FAMILIES)
        check_fit("processor fit", self.fit)
        for name, low, high in (
            ("slots", 1, 16),
            ("image_size", 1, 4096),
            ("prompt", 1, 4096),
            ("width", 1, 4096),
            ("state", 1, self.width),
            ("action", 1, self.width),
            ("vocabulary", 0, 1 << 24),
        ):
            in_range(f"processor {name}", getattr(self, name), low, high)
        for name in ("state_kind", "action_kind"):
            choose(f"processor {name}", getattr(self, name), KINDS)
        if len(self.views) > self.slots:
            raise UserError(
                f"the model takes {self.slots} views, but {len(self.views)} cameras are named: "
                f"{', '.join(self.views)}; choose {self.slots} of them"
            )
        if len(self.delta) > min(self.action, self.state):
            raise UserError(
                f"{len(self.delta)} action axes cannot be relative to the state: it has {self.state} "
                f"numbers, the action {self.action}"
            )


# pictures that are made smaller at once: as numbers of 32 bits they take four times their bytes, twice
PIECE = 8
FAMILIES: dict[str, dict[str, Any]] = {  # of the public checkpoints
    "pi0": {},
    "pi05": {"template": TEMPLATES[1], "prompt": 200, "state_kind": "quantiles", "action_kind": "quantiles"},
    "pi0_fast": {
        "template": TEMPLATES[2],
        "prompt": 200,
        "state_kind": "quantiles",
        "action_kind": "quantiles",
    },
    "openvla_oft": {
        "template": TEMPLATES[3],
        "lower": True,
        "prompt": 64,
        "fit": "stretch",
        "state_kind": "quantiles",
        "action_kind": "quantiles",
    },
    "xvla": {
        "template": "{task}",
        "prompt": 64,
        "fit": "stretch",
        "state_kind": "identity",
        "action_kind": "identity",
    },
    "smolvla": {"image_size": 512, "fit": "pad_top_left"},
    "groot": {
        "template": CHAT,
        "prompt": 128,
        "fit": "stretch",
        "width": 64,
        "state_kind": "min_max",
        "action_kind": "min_max",
    },
    "groot_n17": {
        "template": SHORT_CHAT,
        "lower": True,
        "prompt": 96,
        "image_size": 256,
        "fit": "stretch",
        "width": 132,
        "state_kind": "min_max",
        "action_kind": "min_max",
    },
}
# of {pictures}
PICTURES = {
    "groot": "<image {n}><img><IMG_CONTEXT></img>",
    "groot_n17": "<|vision_start|><|image_pad|><|vision_end|>",
}


def of_family(family: str, **changes: Any) -> ProcessorOptions:
    """The options of a family's public checkpoints, with `changes`."""
    return ProcessorOptions(
        family=family, **{**FAMILIES[choose("processor family", family, FAMILIES)], **changes}
    )


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """images float32 [B,V,3,h,w] in -1..1, image_mask bool [B,V], tokens int64 [B,P'], token_mask bool [B,P']
    (P' <= P: the longest of the batch), state float32 [B,W], normalised and padded."""

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor


class Processor(nn.Module):
    """See the module. `state_norm` and `action_norm` hold its statistics: they move with `.to` and are its
    `state_dict`."""

    relative: Tensor

    def __init__(self, options: ProcessorOptions, words: Tokeniser):
        super().__init__()
        self.guessed: dict[str, str] = {}  # cameras that stand in the place of one of another name
        if options.digest and options.digest != words.digest:
            raise UserError(
                f"wrong tokeniser: the policy was trained with {options.tokeniser} of SHA-256 "
                f"{options.digest[:12]}…, this one ({words.name}) has {words.digest[:12]}…; copy the "
                "policy's own"
            )
        check_words(words, options.vocabulary)
        self.options, self.words = replace(options, tokeniser=words.name, digest=words.digest), words
        # their places in a prompt
        self.pictures = "".join(
            PICTURES.get(options.family, "").format(n=i + 1) for i in range(len(options.views))
        )
        self.state_norm = AxisNormaliser(options.state, options.state_kind)
        self.action_norm = AxisNormaliser(options.action, options.action_kind)
        relative = torch.zeros(options.action)
        relative[: len(options.delta)] = torch.tensor(options.delta, dtype=torch.float32)
        self.register_buffer("relative", relative, persistent=False)
        self.is_relative = bool(relative.any())

    def take(
        self,
        statistics: Statistics,
        eps: float | None = None,
        plus: bool = False,
        where: str = "the statistics",
    ) -> None:
        """Use these statistics from now on; UserError for those that are absent or of another width."""
        for key, norm, n in (
            ("state", self.state_norm, self.options.state),
            ("action", self.action_norm, self.options.action),
        ):
            if norm.kind == "identity":
                continue
            norm.take(*pair_of(statistics, key, norm.kind, n, where), eps, plus)

    # ---- observations

    def observation(self, obs: Mapping[str, Any], task: "Sequence[str] | str | None" = None) -> ModelInputs:
        """An observation as an env gives it: state [B,S], image/<view> uint8 [B,h,w,3], task: B instructions
        (or `task`)."""
        return self.model_inputs(self.tensors(obs, task))

    def tensors(self, obs: Mapping[str, Any], task: "Sequence[str] | str | None" = None) -> dict[str, Tensor]:
        """What of an observation is kept for learning: state, tokens [B,P] with token_mask, and pictures as
        they came, uint8.

        Tokens are full length, so that batches can be joined. UserError: another width, a camera that is not
        there or whose pictures are none, a prompt longer than P.
        """
        state = torch.as_tensor(obs["state"]).float()
        if state.ndim != 2 or state.shape[1] != self.options.state:
            raise UserError(
                f"the observation has a state of {list(state.shape[1:])} numbers, this policy was trained on "
                f"{self.options.state}{self._named(self.options.state_names)}"
            )
        texts = task if task is not None else obs["task"]
        texts = [texts] * len(state) if isinstance(texts, str) else [str(t) for t in texts]
        out = {"state": state}
        out["tokens"], out["token_mask"] = self.prompts(texts, state)
        for view in self.options.views:
            image = obs.get(f"image/{view}")
            if image is None:
                there = [k.removeprefix("image/") for k in obs if k.startswith("image/")]
                raise UserError(
                    f"this policy looks through the cameras {', '.join(self.options.views)}; the observation "
                    f"lacks {view!r} and has {', '.join(there) or 'none'}"
                )
            image = torch.as_tensor(image)
            if (
                image.dtype != torch.uint8
                or image.ndim != 4
                or image.shape[3] != 3
                or len(image) != len(state)
            ):
                raise UserError(
                    f"camera {view!r} must give uint8 [{len(state)}, h, w, 3], got {str(image.dtype)[6:]} "
                    f"{list(image.shape)}"
                )
            out[f"image/{view}"] = image
        return out

    def model_inputs(self, tensors: Mapping[str, Tensor]) -> ModelInputs:
        """The model's inputs from `tensors`, on the device where those are."""
        o, state = self.options, tensors["state"]
        images = state.new_full((len(state), o.slots, 3, o.image_size, o.image_size), -1.0)
        mask = torch.zeros(len(state), o.slots, dtype=torch.bool, device=state.device)
        for i, view in enumerate(o.views):
            for made, seen in zip(
                images[:, i].split(PIECE), tensors[f"image/{view}"].split(PIECE), strict=True
            ):
                made.copy_(self.picture(seen))
            mask[:, i] = True
        token_mask = tensors["token_mask"]
        longest = max(1, int(token_mask.sum(1).max()))
        state = pad(self.state_norm(state), (0, o.width - o.state))
        return ModelInputs(images, mask, tensors["tokens"][:, :longest], token_mask[:, :longest], state)

    def picture(self, image: Tensor) -> Tensor:
        """uint8 [B,h,w,3] -> float32 [B,3,size,size] in -1..1 (padding: -1)."""
        return fit(image.permute(0, 3, 1, 2).float() / 255, self.options.image_size, self.options.fit) * 2 - 1

    def prompts(self, tasks: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B,P] and which of them are there, bool [B,P]; on the state's device."""
        o, told = self.options, "{state}" in self.options.template
        bins = np.empty((len(state), 0), np.int64)
        if told:
            normal = self.state_norm(state).cpu().numpy()
            normal = np.pad(normal, ((0, 0), (0, o.width - o.state))) if o.padded_state_text else normal
            bins = np.digitize(normal, STATE_TEXT) - 1
        out, there = np.zeros((len(state), o.prompt), np.int64), np.zeros((len(state), o.prompt), bool)
        for i, task in enumerate(tasks):
            ids = self._prompt(task, bins[i])
            out[i, : len(ids)], there[i, : len(ids)] = ids, True
        return torch.from_numpy(out).to(state.device), torch.from_numpy(there).to(state.device)

    def check_prompts(self, tasks: Iterable[str]) -> None:
        """UserError for an instruction whose prompt has more than P tokens where the state, as far as it is
        told, stands in the middle of its range."""
        o = self.options
        told = 0 if "{state}" not in o.template else o.width if o.padded_state_text else o.state
        for task in tasks:
            self._prompt(task, np.full(told, len(STATE_TEXT) // 2))

    def _prompt(self, task: str, bins: np.ndarray) -> Sequence[int]:
        """The tokens of an instruction's prompt, `bins` the state as it is told; UserError: more than P."""
        o = self.options
        task = task.strip().replace("_", " ").replace("\n", " ")
        task = task.lower() if o.lower else task
        text = o.template.format(task=task, pictures=self.pictures, state=" ".join(map(str, bins)))
        ids = self.words.encode(text)
        if len(ids) > o.prompt:
            raise UserError(
                f"a prompt has {len(ids)} tokens, this policy takes {o.prompt} at most: {text[:60]!r}…; "
                "shorten the instruction, or allow more (--policy.prompt)"
            )
        return ids

    # ---- actions

    def origin(self, state: Tensor) -> Tensor:
        """[B,A]: the state [B,S] that relative actions begin at, 0 for axes that are not relative."""
        n = len(self.options.delta)
        return pad(state[:, :n], (0, self.options.action - n)) * self.relative

    @staticmethod
    def _named(names: Sequence[str]) -> str:
        return f" ({', '.join(names)})" if names else ""

    # ---- files

    def describe(self) -> dict:
        """The options as plain JSON; with the buffers of the normalisers and the tokeniser it is all of a
        processor."""
        return asdict(self.options)

    def save(self, folder: Path) -> None:
        """processor.json, processor.safetensors and the tokeniser's file into a checkpoint's folder."""
        from safetensors.torch import save

        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / NAME, self.describe())
        write_bytes(
            folder / NUMBERS, save({k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()})
        )
        self.words.save(folder)

    @classmethod
    def load(cls, folder: Path, words: "Tokeniser | None" = None) -> "Processor":
        """The inverse of `save`; UserError naming the file that is absent or not what was saved."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = folder / NAME
        if not path.is_file():
            raise UserError(f"{folder} has no {NAME}; copy the whole checkpoint")
        options = options_of(read_json(path), path)
        name = options.tokeniser
        made = cls(options, words or tokenisers.load(name if name.startswith("words:") else folder / name))
        try:
            made.load_state_dict(load((folder / NUMBERS).read_bytes()))
        except (OSError, SafetensorError, RuntimeError) as e:
            raise UserError(
                f"{folder / NUMBERS} does not fit {NAME} ({str(e).splitlines()[-1].strip()}); copy the whole "
                "checkpoint"
            ) from None
        return made

    def check_same(self, other: "Processor", where: str) -> None:
        """Raise UserError naming what differs: a policy's inputs must mean the same wherever it acts."""
        for name, mine in self.describe().items():
            if (theirs := other.describe()[name]) != mine:
                raise UserError(
                    f"{where} expects another processor: its {name.replace('_', ' ')} is {theirs!r}, here "
                    f"{mine!r}"
                )
        for name, mine in self.state_dict().items():
            if not torch.equal(mine.cpu(), other.state_dict()[name].cpu()):
                raise UserError(
                    f"{where} was trained with other statistics ({name} differs); use its own processor"
                )


def options_of(document: Any, path: Path) -> ProcessorOptions:
    """The options in a `describe`d document; UserError if it is none."""
    try:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}
        return ProcessorOptions(**fields)
    except (TypeError, AttributeError) as e:
        raise UserError(f"{path} is damaged or of another version of robo_rl ({e})") from None


def pair_of(statistics: Statistics, key: str, kind: str, n: int, where: str) -> tuple[Tensor, Tensor]:
    """The two statistics [n] of a normaliser; UserError for those that are absent, of another width or not
    finite."""
    own = statistics.get(key, {})
    first, second = KINDS[kind]
    if absent := [s for s in (first, second) if own.get(s) is None]:
        have = [s for s in ("mean", "std", "min", "max", "q01", "q99") if own.get(s) is not None]
        raise UserError(
            f"{where}: {' and '.join(absent)} of the {key} are absent (there: "
            f"{', '.join(have) or 'nothing'}), but its normaliser is {kind}; a run takes them from its "
            "demonstrations (--policy.statistics demos, the default), data sets get theirs by robo_rl data "
            "stats FOLDER"
        )
    out = []
    for s in (first, second):
        x = torch.as_tensor(np.asarray(own[s], np.float64).reshape(-1))
        if len(x) != n:
            raise UserError(f"{where}: {s} of the {key} has {len(x)} numbers, the policy's {key} has {n}")
        if not bool(torch.isfinite(x).all()):
            raise UserError(
                f"{where}: {s} of the {key} is not finite; make the statistics again with robo_rl data stats "
                "FOLDER"
            )
        out.append(x)
    return out[0], out[1]
