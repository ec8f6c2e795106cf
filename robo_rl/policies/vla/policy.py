"""A vision-language-action model as a policy: pi0, pi0.5, SmolVLA, X-VLA or GR00T under the methods of the
small flows.

The chain is `ChainPolicy`'s, on x [B,D] with D = H W: W numbers of a step as the model has them, of which the
env has the first A. The other entries, and steps that are not executed, are part of what the expert reads, so
they follow the plain ODE from their own noise; exploration moves the executed entries of the env's axes
alone, and the log-prob is theirs. The chain, its trace and its log-prob are float32 whatever the weights are.
Of a model whose actions are relative to the state the chain has those, and so has the log-prob; the state
that was observed when the chunk began (`Context.origin`) is added to what it gives.

Instructions reach `encode` as text (`ObsSpec.text` bytes of it), where the processor makes the prompt:
pi0.5's tells the state too.
Flow-Noise: the std is a small network's of the pooled context and the time (pi_RL, arXiv 2510.25889, section
4.1).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, choose
from robo_rl.files import read_json, write_json
from robo_rl.options import FLOWS, PolicyOptions
from robo_rl.policies.context import ADVANTAGE, PREFIX, Context
from robo_rl.policies.guidance import Guidance
from robo_rl.policies.nets import NoiseNet, VelocityNet, text_of, time_features
from robo_rl.policies.policy import ChainPolicy, PolicyBase
from robo_rl.policies.protocol import Chunk, Obs, ObsSpec
from robo_rl.policies.vla import fresh, tokeniser
from robo_rl.policies.vla.blocks import even_rows
from robo_rl.policies.vla.groot import GrootConfig
from robo_rl.policies.vla.make import config_of, family_of, load_model, make_model, model_metadata, vla_config
from robo_rl.policies.vla.network import VlaConfig, VlaModel
from robo_rl.policies.vla.openvla import OpenVlaConfig
from robo_rl.policies.vla.pi import PiExpert, PiTrunk
from robo_rl.policies.vla.pi_fast import PiFastConfig
from robo_rl.policies.vla.processor import NAME, Processor, of_family
from robo_rl.policies.vla.processor_files import OPENPI, OPENVLA, PRE, from_folder, is_bare
from robo_rl.policies.vla.smolvla import SmolVlaExpert, SmolVlaTrunk
from robo_rl.policies.vla.xvla import XVlaConfig, clean_loss
from robo_rl.sampling import Noise

CONFIG = "vla.json"  # of a checkpoint of ours: the model's sizes
EARLIEST = 0.001  # times that a flow learns at lie between this and 1
EVEN = 16  # rows from which a product's bits do not depend on how many they are
PLAIN_PROMPT = 16  # words of an instruction where each is a token
# behind an instruction, to a policy that is told the advantage
SAID = {1: ". Advantage: positive", 0: "", -1: ". Advantage: negative"}


class ExpertHead(VelocityNet):
    """The expert as the network of a chain; what the steps share is the context itself."""

    def __init__(self, expert: nn.Module, width: int):
        super().__init__()
        self.expert, self.width = expert, width

    def embed(self, context: Context, repeats: int = 1) -> Context:
        return context.repeat(repeats)

    def features(self, times: Tensor) -> Tensor:
        return times

    def steps(self, features: Tensor) -> tuple[Tensor, ...]:
        return features.unbind()

    def time(self, t: Tensor) -> Tensor:
        return t

    def forward(self, embedded: Context, x: Tensor, time: Tensor) -> Tensor:
        """Products of fewer than 16 rows round differently (`blocks.even_rows`): a chunk alone has company of
        itself."""
        rows, x, t = len(x), x.unflatten(1, (-1, self.width)), time.to(torch.float32).expand(len(x))
        if rows * x.shape[1] < EVEN:
            index = torch.arange(-(-EVEN // x.shape[1]), device=x.device) % rows
            embedded, x, t = embedded.pick(index), x[index], t[index]
        return self.expert(embedded, x, t)[:rows].flatten(1)

    def at_steps(self, embedded: Context, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self(embedded, x, features[k]), features


class GuidedExpertHead(Guidance, ExpertHead):
    """The expert, with guidance."""


class ContextNoise(NoiseNet):
    """Learned std of a chain step from the pooled context and the time; no gradient reaches the trunk."""

    def __init__(self, context: int, chunk: int, low: float, high: float):
        super().__init__(context + 32, chunk, low, high)

    def forward(self, embedded: Context, time: Tensor) -> Tensor:
        t = time_features(time.to(torch.float32).expand(len(embedded)))
        return self.bounded(self.net(even_rows(torch.cat([embedded.pooled.detach(), t], 1)))[: len(t)])


class VlaBase(PolicyBase):
    """What policies have whose trunk sees and reads as a vision-language-action model's: its parts, its
    processor, its files.

    `options.kind` is the family; weights are those of `options.folder`, or of a seed at `options.size`.
    """

    takes_relative = False  # whether its actions may be relative to the state

    # ---- parts

    @property
    def obs_norm(self):
        """The processor's, of the state."""
        return self.processor.state_norm

    @property
    def action_norm(self):
        """The processor's, of actions."""
        return self.processor.action_norm

    def make_normalisers(self) -> None:
        """They are the processor's."""

    def make_trunk(self) -> tuple[nn.Module, int]:
        o, spec = self.options, self.spec
        if not spec.text:
            raise UserError(
                f"a policy of kind {o.kind} reads the instruction as text: its ObsSpec needs text > 0"
            )
        model, processor = _model(o), None
        if o.folder:
            processor = _processor_of(o, spec, model.config)
        self.config = model.config
        self.processor = processor or Processor(
            _fitting(of_family(o.kind), o, spec, model.config), _words(o, model.config)
        )
        if not o.folder:
            _begin(model, self.processor)
        self.width, self.expert, p = model.action_width, model.expert, self.processor.options
        # one length for every batch: what a row's numbers are does not depend on the others' prompts, and
        # stored contexts fit together
        more = getattr(model.config, "more_tokens", int(o.kind == "smolvla"))
        self.prefix_length = p.slots * model.config.view_tokens + p.prompt + more
        if self.processor.is_relative and not (self.takes_relative and spec.units):
            why = (
                f"{o.kind} learns absolute ones alone"
                if spec.units
                else "an env takes commands of -1 to 1, to which no state can be added; from data in their "
                "own units it learns by --algo bc"
            )
            raise UserError(f"{o.folder}: its actions are positions relative to the state, and {why}")
        return model.trunk, model.context_size + self.told_state

    @property
    def told_state(self) -> int:
        """Numbers of the normalised state that critics see beside the mean token, in which one token of the
        state is lost among pictures; models that write or fill in their actions pool theirs."""
        return self.spec.state if self.options.kind in FLOWS else 0

    # ---- the contract

    def encode(self, obs: Obs) -> Context:
        """Observation -> context: pictures and prompt through the trunk, once; with `guidance` a second time,
        untold."""
        if PREFIX in obs:
            return Context.of(obs).map(as_bf16)
        texts = text_of(obs["tokens"])
        if not self.options.advantage:
            return self._prefix(obs, texts)
        told = obs.get(ADVANTAGE)
        if told is not None:
            return self._prefix(
                obs, [text + SAID[int(x)] for text, x in zip(texts, told.tolist(), strict=True)]
            )
        context = self._prefix(obs, [text + SAID[1] for text in texts])
        return context if self.options.guidance == 1 else replace(context, plain=self._prefix(obs, texts))

    def check_prompts(self, instructions: Iterable[str]) -> None:
        """UserError for an instruction whose prompt is longer than the model takes."""
        more = SAID[1] if self.options.advantage else ""
        self.processor.check_prompts(text + more for text in instructions)

    def _prefix(self, obs: Obs, texts: list[str]) -> Context:
        """The context of pictures, state and these instructions."""
        tensors = {k: v for k, v in obs.items() if k not in ("tokens", ADVANTAGE)}
        tensors["state"] = tensors["state"].float()
        tensors["tokens"], tensors["token_mask"] = self.processor.prompts(texts, tensors["state"])
        x = self.processor.model_inputs(tensors)
        context = self.trunk(
            x.images, x.image_mask, x.tokens, x.token_mask, x.state, length=self.prefix_length
        )
        if self.told_state:
            context = replace(
                context, pooled=torch.cat([context.pooled, x.state[:, : self.told_state].float()], 1)
            )
        return (
            replace(context, origin=self.processor.origin(tensors["state"]))
            if self.processor.is_relative
            else context
        )

    def whole_chunk(self, x: Tensor, obs: Obs) -> Tensor:
        out = super().whole_chunk(x, obs)
        return (
            out + self.processor.origin(obs["state"].float())[:, None] if self.processor.is_relative else out
        )

    # ---- files of a checkpoint

    def save_files(self, folder: Path) -> None:
        """What `make_policy` needs beside options and weights, into the folder of a checkpoint."""
        self.processor.save(folder)
        write_json(folder / CONFIG, model_metadata(replace(self.config, horizon=self.options.horizon)))

    def keep_files(self, folder: Path) -> None:
        """`save_files` into the folder of a run, where its workers find them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_files(folder)
        self.options = replace(self.options, folder=str(folder.resolve()))


class VlaPolicy(VlaBase, ChainPolicy):
    """See the module."""

    noisy: Tensor
    low = ("trunk", "head")  # what `--policy.dtype` is of
    takes_relative = True

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        entries = torch.zeros(options.horizon, self.width, dtype=torch.bool)
        entries[: options.execute, : spec.action] = True
        self.noisy = entries.flatten()

    def make_head(self) -> tuple[VelocityNet, NoiseNet | None]:
        o, kind = self.options, GuidedExpertHead if self.options.advantage else ExpertHead
        if o.window:
            assert isinstance(self.expert, (PiExpert, SmolVlaExpert))
            self.expert.window = o.window
        head = kind(self.expert, self.width)
        del self.expert  # it is the head's
        learned = (
            ContextNoise(self.context_size, self.chunk, o.noise_min, o.noise_max)
            if o.noise == "learned"
            else None
        )
        return head, learned

    # ---- the contract

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        """With `keep_prefix` the trace holds the context too, numbers of 16 bits as int16, for NumPy has no
        bfloat16."""
        keeps = explore and self.options.keep_prefix
        if not (keeps or self.processor.is_relative):
            return super().act(obs, generator, explore)
        context = self.encode(obs)
        columns = context.columns()
        chunk = super().act(columns, generator, explore)
        if context.origin is not None:
            chunk.actions = chunk.actions + context.origin[:, None]
        if keeps:
            chunk.trace |= {
                k: x.view(torch.int16) if x.dtype == torch.bfloat16 else x for k, x in columns.items()
            }
        return chunk

    def imitation(
        self,
        context: Context,
        chunk: Tensor,
        mask: Tensor,
        generator: torch.Generator,
        head=None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """See `ChainPolicy`; of relative actions the error is that of what is left of them."""
        if context.origin is not None:
            chunk = chunk - context.origin[:, None]
        return super().imitation(context, chunk, mask, generator, head, weight)

    def commands(self, x: Tensor) -> Tensor:
        """Clean chunk [B,D] or [B,H,W] -> executed actions [B,E,A] in the env's -1..1 units."""
        x = x.view(len(x), self.options.horizon, self.width)[:, : self.options.execute, : self.spec.action]
        return self.action_norm.inverse(x)

    def clean_chunk(self, chunk: Tensor) -> Tensor:
        return nn.functional.pad(self.action_norm(chunk), (0, self.width - self.spec.action)).flatten(1)

    def draw_times(self, n: int, generator: torch.Generator) -> Tensor:
        """Times [n]: 0.999 Beta(1.5, 1) + 0.001 (openpi, LeRobot)."""
        return (1 - EARLIEST) * super().draw_times(n, generator) + EARLIEST


class XVlaPolicy(VlaPolicy):
    """X-VLA: it learns by the error of the clean chunk, at times spread evenly, and a gripper's entry is the
    logit of its opening.

    The chain is Euler's on v = (x - clean)/t; its last step gives the clean chunk, as X-VLA's own sampler
    does.
    """

    takes_relative = False

    @property
    def grippers(self) -> list[int]:
        """The robot's axes that are openings of 0 to 1."""
        assert isinstance(self.config, XVlaConfig)
        return [g for g in self.config.grippers if g < self.spec.action]

    def commands(self, x: Tensor) -> Tensor:
        """Clean chunk [B,D] or [B,H,W] -> executed actions [B,E,A] in the env's units."""
        return super().commands(self._opened(x.view(len(x), self.options.horizon, self.width)))

    def whole_chunk(self, x: Tensor, obs: Obs) -> Tensor:
        return super().whole_chunk(self._opened(x), obs)

    def _opened(self, x: Tensor) -> Tensor:
        """Chunks [B,H,W] with openings in the place of the grippers' logits."""
        if not self.grippers:
            return x
        return x.index_copy(2, torch.tensor(self.grippers, device=x.device), x[..., self.grippers].sigmoid())

    def imitation(
        self,
        context: Context,
        chunk: Tensor,
        mask: Tensor,
        generator: torch.Generator,
        head=None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """`xvla.clean_loss` of what is made of the noised chunk."""
        head = head or self.head
        assert isinstance(self.config, XVlaConfig)
        x0 = self.clean_chunk(chunk)
        eps, t = torch.randn(x0.shape, generator=generator).to(x0.device), self.draw_times(len(x0), generator)
        x = (1 - t[:, None]) * x0 + t[:, None] * eps
        clean = x - t[:, None] * head(head.embed(context), x, head.time(t))
        shape = (len(x), self.options.horizon, self.width)
        err = clean_loss(clean.view(shape), x0.view(shape), self.config.grippers, self.spec.action) * mask
        return (err if weight is None else err * weight[:, None]).sum() / mask.sum().clamp(min=1)

    def draw_times(self, n: int, generator: torch.Generator) -> Tensor:
        """Times [n], one in each n-th of 0.001 to 1, all moved by one draw."""
        t = (torch.rand(1, generator=generator) + torch.arange(n) / n) % 1
        return ((1 - EARLIEST) * t + EARLIEST).to(self.times.device)


def as_bf16(x: Tensor) -> Tensor:
    """bfloat16 that was stored as int16; anything else as it is."""
    return x.view(torch.bfloat16) if x.dtype == torch.int16 else x


def _model(o: PolicyOptions) -> VlaModel:
    """The network of the options: of a checkpoint of ours (whose weights come later), of a public folder, or
    of a size."""
    seed = int(torch.randint(2**31, ()))
    if not o.folder:
        config = vla_config(o.kind, o.size)
        if isinstance(config, OpenVlaConfig):
            config = replace(config, head=o.action_head)
        elif isinstance(config, XVlaConfig):
            # every axis is a number; an arm's grippers are openings in public weights alone
            config = replace(config, grippers=(), domain=0, state_width=max(config.state_width, 32))
        return make_model(config, seed)
    file = Path(o.folder) / CONFIG
    config = config_of(read_json(file)) if file.is_file() else None
    if (family := config.family if config else family_of(o.folder)) != o.kind:
        raise UserError(
            f"{o.folder} is of a {family}, and --policy says {o.kind}: leave --policy out, for --init takes "
            "over the policy of its run"
        )
    return make_model(config, seed) if config else load_model(o.folder, dtype=torch.float32)


def _begin(model: VlaModel, processor: Processor) -> None:
    """What weights of a seed begin with that the robot and the tokeniser decide (`fresh`)."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    numbers, o, expert = tokeniser.own_numbers(processor.words), processor.options, model.expert
    words = getattr(model.trunk, "words", None)
    if numbers and "{state}" in o.template and isinstance(words, nn.Embedding):
        fresh.order_numbers(words, numbers.start, len(numbers), generator)
    if isinstance(expert, PiExpert | SmolVlaExpert):
        fresh.order_actions(expert.action_in, expert.action_out, o.action, generator)
    if isinstance(trunk := model.trunk, PiTrunk | SmolVlaTrunk) and not trunk.layers[0].last:
        told = tokeniser.told_words(processor.words, o.template)
        fresh.hear_instruction(
            trunk.vision, trunk.projector, trunk.words, trunk.layers[0].self_attn, told, generator
        )


def _fitting(options: Any, o: PolicyOptions, spec: ObsSpec, config: VlaConfig) -> Any:
    """Options of a processor for this env: its cameras in their order, its widths, the pictures and words of
    the model."""
    if len(spec.views) > config.views:
        raise UserError(
            f"the env has {len(spec.views)} cameras ({', '.join(spec.views)}), {o.kind} takes {config.views} "
            "at most"
        )
    for name, have, most in (
        ("state", spec.state, config.state_width),
        ("action", spec.action, config.action_width),
    ):
        if have > most:
            see = "; with --obs rgb pictures show the rest" if name == "state" and not spec.views else ""
            raise UserError(f"the env's {name} has {have} numbers, this {o.kind} takes {most} at most{see}")
    prompt = options.prompt
    if isinstance(config, GrootConfig) and (o.words.startswith("words:") or not (o.words or o.folder)):
        options = replace(options, template="{task}")  # none of hashed words is a picture's place
    if not o.folder and not o.words:  # every word is a token: shorter than what sentence pieces need
        around = len(
            tokeniser.load("words:512").encode(options.template.format(task="", state="", pictures=""))
        )
        # -1 is two
        prompt = (
            PLAIN_PROMPT + (2 * spec.state + 8 if "{state}" in options.template else around) + 4 * o.advantage
        )
    if isinstance(config, XVlaConfig):
        prompt = min(prompt, config.prompt)
        options = options if o.folder else replace(options, state_kind="mean_std")
    if not o.folder and o.kind in ("pi05", "xvla"):  # as large as the noise that it is learnt from
        options = replace(options, action_kind="mean_std")
    return replace(
        options,
        views=placed(spec.views, options.views),
        slots=max(1, len(spec.views)),
        image_size=config.vision.image,
        vocabulary=config.vocab,
        prompt=o.prompt or prompt,
        state=spec.state,
        action=spec.action,
        width=max(config.action_width, config.state_width),
    )


def placed(views: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The cameras of an env in the order of a model that knows some: one that it knows by name takes its
    place there, the others take the places left, in their own order."""
    filled, others = _fill(views, known)
    return (*(view for view in filled if view is not None), *others)


def _fill(views: Sequence[str], known: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """(the camera in the place of each of `known`, None: none is left for it; those that have no place)"""
    others = [view for view in views if view not in known]
    filled = [view if view in views else others.pop(0) if others else None for view in known]
    return filled, others


def guessed(views: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Of the cameras of an env that `placed` puts by their order alone, the model's camera in whose place
    each stands."""
    filled, _ = _fill(views, known)
    return {view: name for view, name in zip(filled, known, strict=True) if view not in (None, name)}


def _words(o: PolicyOptions, config: VlaConfig) -> tokeniser.Tokeniser:
    """The tokeniser of the options, or hashed words for a model whose words are fresh."""
    if o.folder and not o.words:
        raise UserError(
            f"{o.folder} has weights and says nothing of what its model expects (no {NAME}, {PRE} or "
            f"{OPENPI}): give at least its tokeniser, --policy.words FILE"
        )
    kept = 0  # words that mean actions, and those behind them
    if isinstance(config, PiFastConfig):
        kept = config.actions + config.skip
    elif isinstance(config, OpenVlaConfig):
        kept = config.vocab - config.words + config.bins
    elif isinstance(config, GrootConfig):
        kept = config.vocab - config.picture_word
    return tokeniser.load(o.words or f"words:{config.vocab - kept}")


def _processor_of(o: PolicyOptions, spec: ObsSpec, config: VlaConfig) -> "Processor | None":
    """The processor in the folder, for this env: with its statistics where they are of as many numbers. None:
    the folder has none."""
    folder = Path(o.folder)
    if (folder / CONFIG).is_file() and not (folder / NAME).is_file():
        raise UserError(f"{folder} has no {NAME}; copy the whole checkpoint")
    if is_bare(folder) or not any(
        path for name in (NAME, PRE, "config.json", OPENVLA, f"**/{OPENPI}") for path in folder.glob(name)
    ):
        return None
    found = from_folder(folder, o.words, need_statistics=o.statistics == "folder")
    own = _fitting(found.options, o, spec, config)
    if (folder / NAME).is_file() and found.options != own:
        Processor(own, found.words).check_same(found, str(folder))
    other = [
        f"{name} of {have}, the env's has {want}"
        for name, have, want in (
            ("state", found.options.state, spec.state),
            ("action", found.options.action, spec.action),
        )
        if have != want
    ]
    if other and choose("policy.statistics", o.statistics, ("demos", "folder")) == "folder":
        raise UserError(
            f"{folder} has statistics of another robot ({'; '.join(other)} numbers); take them from this "
            "run's demonstrations with --policy.statistics demos"
        )
    made = Processor(own, found.words)
    made.guessed = guessed(spec.views, found.options.views)
    if not other:
        made.load_state_dict(found.state_dict())
    return made
