"""What clients of a policy server do becomes episodes to learn from (Polar, arXiv 2605.24220).

A robot's own stack asks for chunks and executes them; nobody ports it into an env. The server draws every
chunk with exploration and keeps what learning needs: observation, chunk, log-prob, trace, version of the
weights. The client says which episode a question is of, at which control step, and in the end how it went:

    question    episode (text; "" is the connection's own), step (control steps so far), start (an integer,
                where episodes can be repeated), request (text; who sends it again gets the same chunk)
    outcome     episode, outcome (a number) or success (a bool), steps (control steps in all)

Questions are one episode as long as their steps go on by 1 to E. A step that goes back, or too far, begins
another; what was before it, and whatever a client that leaves had open, is a truncated trace: whole and
valid, but of an unknown outcome, so nothing is learnt from it. What was not delivered is not recorded. G
episodes with an outcome (of one start, where clients name it) are a group of `robo_rl.runtime.share`.
"""

import contextlib
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robo_rl.errors import UserError
from robo_rl.files import lock, write_bytes
from robo_rl.policies import obs_tensors
from robo_rl.rollout import to_policy
from robo_rl.runtime.share import FILE, MOST_BYTES, SharedGroup, ShareFolder, entries, pack_group, parse_group

TEXT, STEPS = 64, 1 << 31  # letters of a name, control steps, at most
TRACE = re.compile(r"e(\d{8})-(done|open)\.trace")  # one episode: with an outcome, or truncated
KEPT = 256  # truncated traces that stay; starts whose group is not full yet
OPEN = 16  # episodes that one client has open


@dataclass(frozen=True, slots=True)
class Decision:
    """One chunk of the policy: what it saw (as its own observation), rows [E,A] to execute, the whole chunk
    [H,A] in the env's units, its log-prob [F] and trace {name: [F,...]}, and the version of its weights."""

    obs: dict[str, np.ndarray]
    rows: np.ndarray
    actions: np.ndarray
    logp: np.ndarray
    trace: dict[str, np.ndarray]
    version: int


@dataclass(slots=True)
class Session:
    """One episode that is open: its decisions, the control step of each, and who asked for it."""

    decisions: list[Decision] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    start: int = -1

    def again(self, step: "int | None", request: str) -> "Decision | None":
        """The decision of a question that is sent once more; None: it is a new one."""
        if not self.steps:
            return None
        if request:
            return self.decisions[self.requests.index(request)] if request in self.requests else None
        return self.decisions[-1] if step == self.steps[-1] else None


@dataclass(frozen=True, slots=True)
class SessionFields:
    """What a client says beside an observation. UserError: fields that are none."""

    episode: str
    step: "int | None"
    request: str
    start: int
    outcome: "float | None"
    steps: "int | None"

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "SessionFields":
        """Of a message; other fields are left alone."""

        def text(name: str) -> str:
            value = fields.get(name, "")
            value = str(value) if type(value) is int else value
            if not isinstance(value, str) or len(value) > TEXT:
                raise UserError(f"{name} is text of at most {TEXT} letters, or an integer")
            return value

        def whole(name: str) -> "int | None":
            value = fields.get(name)
            if value is not None and (type(value) is not int or not 0 <= value < STEPS):
                raise UserError(f"{name} is an integer of 0 to {STEPS - 1}")
            return value

        outcome, success = fields.get("outcome"), fields.get("success")
        if success is not None and type(success) is not bool:
            raise UserError("success is true or false")
        if outcome is not None and (
            isinstance(outcome, bool)
            or not isinstance(outcome, (int, float))
            or not math.isfinite(outcome)
            or abs(outcome) > 1e9
        ):
            raise UserError("outcome is a number")
        value = float(success) if outcome is None and success is not None else outcome
        start = whole("start")
        return cls(
            text("episode"),
            whole("step"),
            text("request"),
            -1 if start is None else start,
            None if value is None else float(value),
            whole("steps"),
        )


class ExploringActor:
    """Observations -> `Decision`s, by one call of a policy with its exploration.

    version: that of its weights; instruction: of observations that have none; newest() -> a newer policy and
    its version, or None.
    """

    def __init__(
        self,
        policy,
        seed: int,
        version: int,
        instruction: str = "",
        newest: "Callable[[], tuple[Any, int] | None]" = lambda: None,
    ):
        self.policy, self.version, self.instruction, self.newest = policy, version, instruction, newest
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch: Sequence[dict[str, Any]]) -> list[Decision]:
        if (newer := self.newest()) is not None:
            self.policy, self.version = newer
        policy = self.policy
        raw = {"task": np.array([self.instruction] * len(batch))} | {
            k: np.stack([o[k] for o in batch]) for k in batch[0]
        }
        obs = obs_tensors(raw, policy.spec)
        with torch.no_grad():
            chunk = policy.act(to_policy(obs, policy), self.generator, explore=True)
            actions = policy.action_norm.inverse(chunk.x0).cpu().numpy().astype(np.float32)
        seen = {k: v.numpy() for k, v in obs.items()}
        rows, logp = chunk.actions.cpu().numpy(), chunk.logp.cpu().numpy()
        trace = {k: v.cpu().numpy() for k, v in chunk.trace.items()}
        return [
            Decision(
                {k: v[i] for k, v in seen.items()},
                rows[i],
                actions[i],
                logp[i],
                {k: v[i] for k, v in trace.items()},
                self.version,
            )
            for i in range(len(batch))
        ]


def episode_of(s: Session, space: dict, actor: dict, outcome: float, executed_last: int) -> SharedGroup:
    """An episode as a group of one. The observation after its last decision is not known: that of the
    decision stands for it."""
    executed = [*np.diff(s.steps).tolist(), executed_last]
    columns = {"logp": [d.logp for d in s.decisions], "version": [np.int64(d.version) for d in s.decisions]}
    columns |= {f"trace/{k}": [d.trace[k] for d in s.decisions] for k in s.decisions[0].trace}
    obs = {k: [*(d.obs[k] for d in s.decisions), s.decisions[-1].obs[k]] for k in s.decisions[0].obs}
    return SharedGroup(
        space,
        space["task"],
        s.start,
        {k: np.stack(v)[:, None] for k, v in obs.items()},
        np.stack([d.actions for d in s.decisions])[:, None],
        np.array(executed, np.int64)[:, None],
        np.array([outcome], np.float32),
        {k: np.stack(v)[:, None] for k, v in columns.items()},
        actor,
    )


def joined(episodes: Sequence[SharedGroup]) -> SharedGroup:
    """One group of episodes of one space: the shorter ones stay where they ended."""
    t = max(len(e.executed) for e in episodes)

    def longer(x: np.ndarray, rows: int, stays: bool) -> np.ndarray:
        tail = np.repeat(x[-1:], rows - len(x), 0)
        return np.concatenate([x, tail if stays else np.zeros_like(tail)])

    first = episodes[0]
    return replace(
        first,
        obs={k: np.concatenate([longer(e.obs[k], t + 1, True) for e in episodes], 1) for k in first.obs},
        behaviour={
            k: np.concatenate([longer(e.behaviour[k], t, True) for e in episodes], 1) for k in first.behaviour
        },
        actions=np.concatenate([longer(e.actions, t, True) for e in episodes], 1),
        executed=np.concatenate([longer(e.executed, t, False) for e in episodes], 1),
        outcome=np.concatenate([e.outcome for e in episodes]),
    )


class SessionRecorder:
    """Decisions of clients in, groups in a folder out; one for all threads of a server. Its state is in the
    folder, which it owns until `close`: an episode that ended is in a file from then on, until its group is.

    space, actor: see `SharedGroup`; longest: decisions of an episode, at most. say(line): of what is
    finished. UserError: another server records there.
    """

    def __init__(
        self,
        folder: ShareFolder,
        space: dict[str, Any],
        actor: dict[str, Any],
        longest: int,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.folder, self.space, self.actor, self.longest, self.say = folder, space, actor, longest, say
        self.group, self.execute = int(space["rl.group"]), int(space["policy.execute"])
        self.open: dict[tuple[int, str], Session] = {}
        self.waiting: dict[int, list[tuple[Path, SharedGroup]]] = {}  # by start
        self.lock = threading.Lock()
        self.counts, self.told = {"episodes": 0, "truncated": 0, "groups": 0}, ""
        self.where = folder.root / folder.mine
        self.where.mkdir(parents=True, exist_ok=True)
        self.owned = contextlib.ExitStack()
        self.owned.enter_context(lock(self.where))
        groups, traces = (
            entries(self.where, FILE, 1 << 20, files=True),
            entries(self.where, TRACE, 1 << 20, files=True),
        )
        self.number = max([1 + int(name[1:9]) for name in (*groups[-1:], *traces[-1:])], default=0)
        for name in traces:
            if name.endswith("done.trace"):
                self._wait(self.where / name)

    # ---- from the server's side

    def before(self, who: int, fields: dict[str, Any]) -> "dict[str, Any] | np.ndarray | None":
        """Of a message of client `who`: what to answer it with, fields or rows that it was given before;
        None: ask the policy.
        UserError: fields that are none, or an outcome of an episode that there is not."""
        q = SessionFields.read(fields)
        with self.lock:
            s = self.open.get((who, q.episode))
            if q.outcome is not None:
                if s is None:
                    raise UserError(
                        f"there is no episode {ascii(q.episode)} that could have an outcome: it asked "
                        "nothing, or was cut"
                    )
                return self._end(who, q, s)
            known = s.again(q.step, q.request) if s is not None else None
            return None if known is None else known.rows

    def given(self, who: int, fields: dict[str, Any], decision: Decision) -> np.ndarray:
        """Client `who` gets this decision for its question -> the rows that it gets."""
        q = SessionFields.read(fields)
        with self.lock:
            s = self.open.get((who, q.episode))
            if s is not None and (known := s.again(q.step, q.request)) is not None:
                return known.rows  # the question had come twice before it was answered
            if s is not None and not self._goes_on(s, q.step):
                self._cut(who, q.episode)
                s = None
            if s is None:
                mine = [key for key in self.open if key[0] == who]
                if len(mine) >= OPEN:
                    self._cut(*mine[0])
                s = self.open[who, q.episode] = Session(start=q.start)
            s.steps.append(q.step if q.step is not None else s.steps[-1] + self.execute if s.steps else 0)
            s.decisions.append(decision)
            s.requests.append(q.request)
            return decision.rows

    def left(self, who: int) -> None:
        """Client `who` is gone: what it had open is cut."""
        with self.lock:
            for key in [key for key in self.open if key[0] == who]:
                self._cut(*key)

    def close(self) -> None:
        """The server ends: whatever is open is cut."""
        for who in {key[0] for key in self.open}:
            self.left(who)
        self.owned.close()

    # ---- episodes

    def _goes_on(self, s: Session, step: "int | None") -> bool:
        return len(s.steps) < self.longest and (step is None or 1 <= step - s.steps[-1] <= self.execute)

    def _cut(self, who: int, episode: str) -> None:
        """Keep an episode without an outcome as a truncated trace."""
        s = self.open.pop((who, episode))
        self.counts["truncated"] += 1
        try:
            self._write(episode_of(s, self.space, self.actor, 0.0, self.execute), "open")
        except UserError as e:
            self.say(f"a truncated trace is not kept: {e}")
        for name in [n for n in entries(self.where, TRACE, 1 << 20, files=True) if n.endswith("open.trace")][
            :-KEPT
        ]:
            (self.where / name).unlink(missing_ok=True)

    def _end(self, who: int, q: SessionFields, s: Session) -> dict[str, Any]:
        """An episode has an outcome; the last of a group makes the group."""
        del self.open[who, q.episode]
        last = self.execute if q.steps is None else q.steps - s.steps[-1]
        if not 1 <= last <= self.execute:
            self.open[who, q.episode] = s
            raise UserError(
                f"the episode asked last at step {s.steps[-1]}: steps is {s.steps[-1] + 1} to "
                f"{s.steps[-1] + self.execute}"
            )
        assert q.outcome is not None
        self.counts["episodes"] += 1
        start = self._wait(self._write(episode_of(s, self.space, self.actor, q.outcome, last), "done"))
        return {"recorded": len(s.decisions), "waiting": len(self.waiting.get(start, ()))}

    def _write(self, episode: SharedGroup, kind: str) -> Path:
        path = self.where / f"e{self.number:08d}-{kind}.trace"
        try:
            write_bytes(path, pack_group(episode, self.number))
        except OSError as e:
            raise UserError(f"cannot write {path} ({e.strerror})") from e
        self.number += 1
        return path

    def _wait(self, path: Path) -> int:
        """Count an episode with an outcome; where its group is full it is given, and its traces go -> its
        start. One that no group can have is kept as those without an outcome are."""
        try:
            episode = parse_group(path.read_bytes()[:MOST_BYTES], str(path))
            if (episode.space, episode.actor) != (self.space, self.actor):
                raise UserError(
                    f"{self.where} has episodes of another policy that was served before: no group of them "
                    "becomes full"
                )
        except UserError as e:
            if str(e) != self.told:
                self.told = str(e)
                self.say(self.told)
            path.rename(path.with_name(path.name.replace("done", "open")))
            return -1
        mine = self.waiting.setdefault(episode.start, [])
        mine.append((path, episode))
        if len(mine) >= self.group:
            group = joined([e for _, e in mine])
            # the same file again after a kill between this and the next
            self.folder.write(int(path.name[1:9]), [group])
            self.counts["groups"] += 1
            for old, _ in self.waiting.pop(episode.start):
                old.unlink(missing_ok=True)
            self.say(
                f"a group of {self.group} episodes is in {self.where}, their mean outcome is "
                f"{group.outcome.mean():.3g}"
            )
        elif len(self.waiting) > KEPT:
            for old, _ in self.waiting.pop(next(iter(self.waiting))):
                old.unlink(missing_ok=True)
        return episode.start
