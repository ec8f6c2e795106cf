"""An experience model of a task in words, after DreamGym (arXiv 2511.03773): what a command leads to, written
by a small transformer.

    read:   the sentences that hold . the command . K recorded steps like this one: what held there alone,
            command, what changed, outcome
    write:  the sentences that decide (reasoning) . then . the sentences that cease or begin to hold . done |
            on

A state is 1 where the sentence of that name (`spec.control.state_names`) holds; a command is the word with
the greatest score in every group of action axes (`ActionAxis.frame`: verb, noun). The next state is the
present one with what was written turned over; reward and success are the outcome `done`. Uncertainty: minus
the log-probability of everything written since the episode's start.

Reasoning. The sentences that decide are found by mention: those of what no command names (robot, hand,
wanted), then twice those whose subject the command or a sentence found so far names. The recorded steps are
labelled so; writing them is learnt. Retrieval. The memory holds every recorded step that was learnt from.
Likeness is the cosine of what decides, 0.3 state, 2 command. Tasks. The same transformer reads a room and
writes what could be wanted there: sentences that no recorded step changed.

Where it differs from the paper: a transformer of some 0.1 M parameters learnt from nothing, not a language
model; it writes whole sentences of those that were recorded; reasons are found by a rule, not by a teacher; a
text has all of the state, so no history is read.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import UserError
from world_models.model import Carry, Frames, Prediction, WorldSpec
from world_models.text_net import PrefixTransformer
from world_models.text_options import TextOptions

MARKS = ("<none>", "<so>", "<then>", "<on>", "<done>", "<task>")
# most sentences that are written before "then", shown of a recorded step, and written after it
REASONS, DIFFERENCES, CHANGES = 16, 4, 5
FORGIVEN = 0.3  # weight of sentences that do not decide, in likeness


def lists(mask: Tensor, most: int, none: int) -> Tensor:
    """int64[...,m]: where mask bool[...,S] is true, in order, filled up with `none`; m <= most, as many as
    are needed."""
    s = mask.shape[-1]
    at = (
        torch.where(mask, torch.arange(s), s)
        .sort(-1)
        .values[..., : min(most, max(1, int(mask.sum(-1).max()) if mask.numel() else 1))]
    )
    return torch.where(at == s, none, at)


class TextModel(nn.Module):
    """The model; see the module. What was recorded is in buffers: `seen` bool[M,S], `said` int64[M,G], `led`
    int64[M,·], `won` bool[M]."""

    frames: Frames
    seen: Tensor
    said: Tensor
    led: Tensor
    won: Tensor
    alike: Tensor  # [M,·] their unit vectors
    # bool[S]: sentences that no recorded step changed and not every episode has, what is wanted
    fixed: Tensor
    agent: Tensor
    subject: Tensor
    mentions: Tensor
    roles: Tensor

    def __init__(self, spec: WorldSpec, options: TextOptions, seed: int = 0):
        super().__init__()
        self.spec, self.options = spec, options
        names, words = spec.control.state_names, spec.control.action_names
        if len(names) != spec.state or len(set(names)) < len(names):
            raise UserError(
                "a text model needs a sentence of its own as the name of every entry of the state "
                "(spec.state_names), as --sim sims.words:make has; for other states train --kind latent"
            )
        frames = [a.frame for a in spec.control.axes]
        self.groups = [[i for i, f in enumerate(frames) if f == g] for g in dict.fromkeys(frames)]
        self.none, self.so, self.then, self.on, self.done, self.task = (
            len(names) + len(words) + i for i in range(len(MARKS))
        )
        o, g = options, len(self.groups)
        self.net = PrefixTransformer(
            (*names, *words, *MARKS),
            self.none,
            2 + 2 * o.retrieve,
            REASONS + CHANGES + 3,
            o.width,
            o.depth,
            o.heads,
            seed,
        )
        self.mention(names, words)
        for name, empty in (
            ("seen", torch.zeros(0, spec.state, dtype=torch.bool)),
            ("said", torch.zeros(0, g, dtype=torch.int64)),
            ("led", torch.zeros(0, CHANGES, dtype=torch.int64)),
            ("won", torch.zeros(0, dtype=torch.bool)),
        ):
            self.register_buffer(name, empty)
        self.register_buffer("fixed", torch.zeros(spec.state, dtype=torch.bool))
        self.register_buffer("alike", torch.zeros(0, 1), persistent=False)

    def mention(self, names: tuple[str, ...], words: tuple[str, ...]) -> None:
        """Which sentence is about the robot itself, which command word is its subject, and which it
        mentions."""
        subjects = [next(w for w in n.split() if w != "the") for n in names]
        self.register_buffer("agent", torch.tensor([s not in words for s in subjects]), persistent=False)
        self.register_buffer(
            "subject", torch.tensor([[s == w for w in words] for s in subjects]).float(), persistent=False
        )
        self.register_buffer(
            "mentions",
            torch.tensor([[w in n.split() for w in words] for n in names]).float(),
            persistent=False,
        )

    def deciding(self, state: Tensor, command: Tensor) -> Tensor:
        """bool[B,S]: the sentences of state bool[B,S] that decide what command int64[B,G] leads to."""
        found, named = state & self.agent, F.one_hot(command, self.mentions.shape[1]).sum(-2).float()
        for _ in range(2):
            about = (named + found.float() @ self.mentions > 0).float() @ self.subject.T > 0
            found = found | (state & about)
        return found

    def command(self, actions: Tensor) -> Tensor:
        """int64[...,G]: the words of actions [...,A], as indices of axes."""
        return torch.stack([torch.tensor(g)[actions[..., g].argmax(-1)] for g in self.groups], -1)

    def read_as(self, command: Tensor) -> Tensor:
        """The tokens of a command."""
        return command + self.spec.state

    # ---- memory

    def vector(self, state: Tensor, command: Tensor) -> Tensor:
        """Unit vectors [B,·] whose products are likeness."""
        words = F.one_hot(command, self.spec.action).flatten(-2).float()
        return F.normalize(
            torch.cat([self.deciding(state, command).float(), FORGIVEN * state.float(), 2 * words], -1),
            dim=-1,
        )

    def remember(self, state: Tensor, command: Tensor, changes: Tensor, won: Tensor) -> None:
        """Hold these recorded steps in memory, and no others."""
        self.seen, self.said, self.led, self.won = state, command, lists(changes, CHANGES, self.none), won
        self.alike = self.vector(state, command)

    def like(self, state: Tensor, command: Tensor, but: "Tensor | None" = None) -> Tensor:
        """int64[B,K]: the recorded steps most like these; `but` bool[B,M]: not among those."""
        likeness = self.vector(state, command) @ self.alike.T
        return (
            (likeness if but is None else likeness.masked_fill(but, -1))
            .topk(min(self.options.retrieve, len(self.alike)), 1)
            .indices
        )

    def shown(self, state: Tensor, command: Tensor, near: "Tensor | None") -> tuple[Tensor, Tensor]:
        """(tokens read int64[B,P,W], the roles of their places int64[P]) for states bool[B,S], commands and
        the recorded steps `near`: a place for each sentence that holds, one for the command, two for each
        recorded step (command and differences; changes, outcome)."""
        held = lists(state, state.shape[1], self.none)[..., None]
        places, roles = [held, self.read_as(command)[:, None]], [0] * held.shape[1] + [1]
        for k, at in enumerate(near.unbind(1) if near is not None else []):
            unlike = lists(self.seen[at] & ~state, DIFFERENCES, self.none)
            outcome = torch.where(self.won[at], self.done, self.on)[:, None]
            places += [
                torch.cat([self.read_as(self.said[at]), unlike], 1)[:, None],
                torch.cat([self.led[at], outcome], 1)[:, None],
            ]
            roles += [2 + 2 * k, 3 + 2 * k]
        most = max(p.shape[2] for p in places)
        return torch.cat(
            [F.pad(p, (0, most - p.shape[2]), value=self.none) for p in places], 1
        ), torch.tensor(roles)

    # ---- writing

    @torch.no_grad()
    def write(
        self,
        read: Tensor,
        roles: Tensor,
        reason: bool,
        allowed: Tensor,
        generator: "torch.Generator | None" = None,
        state: "Tensor | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(sentences written after the reasons bool[B,S], probability of `done`, surprise [B]), the likeliest
        tokens or, with a generator, drawn ones; sentences that are not `allowed` bool[S] are not written
        after the reasons."""
        n, s, table = len(read), self.spec.state, self.net.table()
        cache, there = self.net.read(read, roles, table)
        token, rows = torch.full((n,), self.so), torch.arange(n)
        thinking, over = torch.full((n,), reason), torch.zeros(n, dtype=torch.bool)
        turned, chance, surprise = torch.zeros(n, s, dtype=torch.bool), torch.zeros(n), torch.zeros(n)
        for at in range(self.net.length):
            logits = self.net.write(token, at, cache, there, table)
            may = torch.zeros(n, logits.shape[1], dtype=torch.bool)
            if at < self.net.length - 1:  # the last is the outcome
                may[:, :s] = (
                    (allowed & ~turned) | thinking[:, None]
                    if at < REASONS
                    else allowed & ~turned & ~thinking[:, None]
                )
            may[:, self.then], may[:, self.on], may[:, self.done] = thinking, ~thinking, ~thinking
            logp = logits.masked_fill(~may, -1e9).log_softmax(1)
            token = (
                logp.argmax(1)
                if generator is None
                else torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
            )
            surprise = torch.where(over, surprise, surprise - logp[rows, token])
            ends = ~over & ((token == self.on) | (token == self.done))
            two = torch.stack([logp[:, self.on], logp[:, self.done]]).softmax(0)[1]
            chance = torch.where(ends, two, chance)
            turns = ~over & ~thinking & (token < s)
            turned[rows[turns], token[turns]] = True
            thinking, over = thinking & (token != self.then), over | ends
            if over.all():
                break
        return turned, chance, surprise

    @torch.no_grad()
    def write_wanted(self, rooms: Tensor, generator: torch.Generator) -> Tensor:
        """bool[B,S]: rooms bool[B,S] with what the model writes that could be wanted there, drawn by its
        probability."""
        rooms = rooms & ~self.fixed
        wanted, _, _ = self.write(*self.asked(rooms), False, self.fixed, generator)
        return rooms | wanted

    def asked(self, rooms: Tensor) -> tuple[Tensor, Tensor]:
        """What is read to write what is wanted in rooms bool[B,S]."""
        at = lists(rooms, rooms.shape[1], self.none)
        return torch.cat([at, torch.full((len(at), 1), self.task)], 1)[..., None], torch.tensor(
            [0] * at.shape[1] + [1]
        )

    # ---- the protocol

    def start(self, obs: Mapping[str, "np.ndarray | Tensor"], keys: np.ndarray) -> Carry:
        """Carry of episodes that begin in obs["state"] [N,S], numbers that are 0 or 1."""
        state = torch.as_tensor(np.asarray(obs["state"]), dtype=torch.float32).round().clamp(0, 1)
        return {
            "state": state,
            "surprise": torch.zeros(len(state)),
            "key": torch.from_numpy(np.array(keys, np.int64)),
        }

    @torch.no_grad()
    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        state, surprise, rows = carry["state"] > 0.5, carry["surprise"], []
        every = torch.ones(self.spec.state, dtype=torch.bool)
        for command in self.command(actions.to(torch.float32)).unbind(1):
            near = self.like(state, command) if self.options.retrieve else None
            turned, done, more = self.write(*self.shown(state, command, near), self.options.reason, every)
            state, surprise = state ^ turned, surprise + more
            rows.append((state.float(), (done > 0.5).float(), done, surprise))
        states, reward, done, surprises = (torch.stack(x, 1) for x in zip(*rows, strict=True))
        return carry | {"state": state.float(), "surprise": surprise}, Prediction(
            {"state": states}, reward, done, done, surprises
        )

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """The memory is as long as that of `state`."""
        for name in ("seen", "said", "led", "won"):
            setattr(self, name, torch.zeros_like(state[name]))
        found = super().load_state_dict(state, strict, assign)
        self.alike = self.vector(self.seen, self.said)
        return found

    def text(self, state: "np.ndarray | Tensor") -> str:
        """The sentences of one state [S]."""
        return " . ".join(
            s for s, x in zip(self.spec.control.state_names, np.asarray(state), strict=True) if x > 0.5
        )


def build(spec: WorldSpec, options: dict) -> TextModel:
    """The untrained model of a folder's JSON."""
    return TextModel(spec, TextOptions(**options))
