"""A vision-language-action model that writes its actions as tokens, as a policy: pi0-FAST under supervision,
PPO and groups.

    log p(chunk | obs) = sum over tokens of log softmax(logits)_token

over the action tokens and the one that ends them, and no other word, so that every sample is a chunk. The
words that begin the actions ("Action: ") are given, not sampled. A chunk has a log-prob per token (`factors`,
those behind its end are 0): methods make the ratio of their sum, or of each (`rl.ratio`). Tokens are sampled
one by one on kept keys and values; their log-prob is then that of one pass over all of them, which `score`
repeats, so that the first ratio is exactly 1.

The density is of the whole chunk of H steps, of which E are executed: FAST's tokens are frequencies and
belong to no step. Evaluation takes the likeliest token. The critic sees the mean picture token, the mean word
and the state.
Axes: B rows, T tokens of a chunk at most, H steps, A action, n action tokens and the end.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, in_range
from robo_rl.options import PolicyOptions
from robo_rl.policies.context import Context
from robo_rl.policies.protocol import Chunk, Obs, ObsSpec
from robo_rl.policies.vla import fast
from robo_rl.policies.vla.pi_fast import EmbeddedPrefix, PiFastConfig, TokenWriter, logits, write
from robo_rl.policies.vla.policy import EVEN, VlaBase
from robo_rl.sampling import Noise, randn

WORDS = "action_words"  # folder of the action tokeniser in a checkpoint
DEFAULT = "dct:100"  # without a tokeniser: coefficients of -100 .. 100
BEFORE, END = "Action: ", "|"


class WriterHead(nn.Module):
    """The language model of a policy, under the name that the other models have their expert under."""

    def __init__(self, expert: nn.Module):
        super().__init__()
        assert isinstance(expert, TokenWriter)
        self.expert = expert


class TokenPolicy(VlaBase):
    """See the module."""

    trunk: EmbeddedPrefix
    begin: Tensor
    allowed: Tensor
    low = ("trunk", "head")  # what `--policy.dtype` is of
    noise_scale = 1.0  # temperature of the softmax

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        self.head = WriterHead(self.expert)
        del self.expert  # it is the head's
        self.width, self.chunk = spec.action, options.horizon * spec.action
        self.factors = options.action_tokens or min(self.sizes.tokens, self.chunk + 1)
        self.fast = self._action_words()
        plain = len(self.processor.words.encode(""))
        self.end = self.processor.words.encode(END)[plain]
        begin = [self.sizes.begin, *self.processor.words.encode(BEFORE)[plain:]]
        self.register_buffer("begin", torch.tensor(begin), persistent=False)
        self._allow()

    @property
    def sizes(self) -> PiFastConfig:
        """The model's configuration."""
        assert isinstance(self.config, PiFastConfig)
        return self.config

    def _action_words(self) -> fast.FastTokeniser:
        """Of the checkpoint, of the options, or the plain ones; what is to be trained begins with those."""
        o, kept = self.options, Path(self.options.folder) / WORDS
        if o.folder and (kept / fast.CONFIG).is_file():
            return fast.load(kept)
        if o.action_words.startswith("train:"):
            self._size_to_train()
            return fast.load(DEFAULT)
        if o.folder and not o.action_words and not (Path(o.folder) / "vla.json").is_file():
            raise UserError(
                f"{o.folder} does not say what its action tokens mean: give the folder of its FAST "
                "tokeniser, --policy.action-words FOLDER"
            )
        return fast.load(o.action_words or DEFAULT)

    def _size_to_train(self) -> int:
        text, most = self.options.action_words.removeprefix("train:"), self.sizes.actions
        if not text.isdecimal():
            raise UserError(
                f"--policy.action-words train:N needs a number of tokens, got {self.options.action_words!r}"
            )
        in_range("policy.action_words train:N", int(text), 2, most)
        return int(text)

    def _allow(self) -> None:
        """Words of the action tokens, then the end's. UserError: the tokeniser has more tokens than the
        model."""
        c, size = self.sizes, self.fast.size
        if size >= c.vocab - c.skip:
            raise UserError(
                f"the action tokeniser {self.fast.name} has {size} tokens, this model has room for "
                f"{c.vocab - c.skip - 1}"
            )
        words = torch.cat([c.vocab - 1 - c.skip - torch.arange(size), torch.tensor([self.end])])
        self.register_buffer("allowed", words.to(self.begin.device), persistent=False)

    @torch.no_grad()
    def fit_actions(self, chunks: np.ndarray) -> None:
        """Learn the byte pairs of `train:N` from chunks [M,H,A] in the env's units; other tokenisers stay as
        they are."""
        if self.options.action_words.startswith("train:"):
            normal = (
                self.action_norm(torch.as_tensor(chunks, dtype=torch.float32).to(self.action_norm.device))
                .cpu()
                .numpy()
            )
            self.fast = fast.train([normal], self._size_to_train())
            self._allow()

    # ---- the contract

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        context = self.encode(obs)
        b, t, h, a = len(context), self.factors, self.options.horizon, self.spec.action
        draws = torch.special.ndtr(randn(generator, b, t).to(self.begin.device)) if explore else None
        tokens = write(self.trunk, self.head.expert, context, self.begin, self.allowed, t, draws)
        x0 = torch.from_numpy(self.fast.decode([row[row >= 0].tolist() for row in tokens.cpu()], h, a)).to(
            self.begin.device
        )
        if not explore:
            return Chunk(self.commands(x0), x0, x0.new_empty(b, 0), {})
        return Chunk(self.commands(x0), x0, self._logp(context, tokens)[0], {"tokens": tokens})

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Context of B rows, trace tokens [B,T] -> logp [B,T] and the mean entropy per token, a scalar."""
        return self._logp(context, trace["tokens"])

    def bc_loss(
        self, obs: Obs, chunk: Tensor, mask: Tensor, generator: torch.Generator, noises: int = 1
    ) -> Tensor:
        """Cross-entropy per token of demonstrated chunks [B,H,A] in the env's units; one counts by its share
        of steps that are there, mask [B,H]. Tokens beyond T are left out. Nothing is drawn."""
        tokens = self.tokens_of(chunk)
        logp, _ = self._logp(self.encode(obs), tokens)
        weight = mask.mean(1, keepdim=True) * (tokens >= 0)
        return -(logp * weight).sum() / weight.sum().clamp(min=1)

    def commands(self, x: Tensor) -> Tensor:
        """Clean chunk [B,D] or [B,H,A] -> executed actions [B,E,A] in the env's units."""
        x = x.view(len(x), self.options.horizon, self.spec.action)[:, : self.options.execute]
        return self.action_norm.inverse(x)

    def tokens_of(self, chunk: Tensor) -> Tensor:
        """Chunks [B,H,A] in the env's units -> indices into `allowed` int64 [B,T], the end last, -1 behind
        it."""
        out = np.full((len(chunk), self.factors), -1, np.int64)
        for row, ids in zip(
            out, self.fast.encode(self.action_norm(chunk).detach().cpu().numpy()), strict=True
        ):
            ids = [*ids, len(self.allowed) - 1][: len(row)]
            row[: len(ids)] = ids
        return torch.from_numpy(out).to(chunk.device)

    def _logp(self, context: Context, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """logp [B,T] of tokens [B,T], 0 behind their end, and the mean entropy per token.

        The pass has at least 16 tokens a row: products of fewer rows round differently, and a row's bits must
        not depend on the batch.
        """
        there, index = tokens >= 0, tokens.clamp(min=0)
        words = torch.cat([self.begin.expand(len(tokens), -1), self.allowed[index[:, :-1]]], 1)
        words = nn.functional.pad(words, (0, max(0, EVEN - words.shape[1])))
        first = len(self.begin) - 1
        likely = logits(self.trunk, self.head.expert, context, words, self.allowed)[
            :, first : first + tokens.shape[1]
        ].log_softmax(-1)
        entropy = -(likely.exp() * likely).sum(-1)
        logp = likely.gather(2, index[..., None]).squeeze(2)
        return logp * there, (entropy * there).sum() / there.sum().clamp(min=1)

    # ---- files of a checkpoint

    def save_files(self, folder: Path) -> None:
        """As the base's, and the action tokeniser."""
        super().save_files(folder)
        if self.fast.files:
            self.fast.save(folder / WORDS)
