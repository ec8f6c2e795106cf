"""A household told in words: sentences that hold, commands of a verb and a noun, exact rules. `--sim
sims.words:make`.

    the robot is at the shelf . the hand is empty . the drawer is closed . the cup is on the shelf . the cup
    is dirty .
    wanted is the cup . wanted at the drawer . wanted clean .                 go to sink / take cup / wash cup
                                                            / open drawer / put cup

A robot of commands in words stands for the upper half of a hierarchy, whose lower half executes "take cup".
The text is the observation: `spec.state_names` are the S sentences, and a state is 1 where its sentence holds
and 0 elsewhere. An action has a score for every word of `spec.action_names`: what is said is the verb and the
noun with the greatest scores. A command that cannot be done changes nothing.

Rules. Take, put and wash need the object at hand (wash: at the sink); what is in a closed drawer or cabinet
cannot be reached; the hand holds one thing; the drawer opens at once, the cabinet with the key in the hand.
Success, which ends an episode: the wanted object lies at the wanted place, and is clean where that is wanted.
"""

import numpy as np
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import UserError
from robo_rl.starts import StartStream, uniforms
from robo_rl.types import ActionAxis, ControlSpec

VERBS = ("go to", "take", "put", "open", "wash")
PLACES = ("table", "shelf", "sink", "drawer", "cabinet")
THINGS = ("key", "cup", "apple", "plate", "sponge")
SINK, DRAWER, CABINET, KEY = 2, 3, 4, 0
HAND = len(PLACES)  # where a thing is that the hand holds
WHERE = {p: f"{'in' if p in ('sink', 'drawer', 'cabinet') else 'on'} the {p}" for p in PLACES}
SENTENCES = (
    *(f"the robot is at the {p}" for p in PLACES),
    "the hand is empty",
    *(f"the hand holds the {t}" for t in THINGS),
    "the drawer is closed",
    "the drawer is open",
    "the cabinet is locked",
    "the cabinet is open",
    *(f"the {t} is {WHERE[p]}" for t in THINGS for p in PLACES),
    *(f"the {t} is {how}" for t in THINGS[1:] for how in ("dirty", "clean")),
    *(f"wanted is the {t}" for t in THINGS[1:]),
    *(f"wanted at the {p}" for p in PLACES),
    "wanted clean",
)
AT = {s: i for i, s in enumerate(SENTENCES)}
TASK = "do what is wanted"
LIMIT = 20  # commands


class Household(ControlEnv):
    """N rooms; the start alone decides what is where and what is wanted. Rows of `world` int64 [N,W]: robot,
    drawer open, cabinet open, where each thing is, which are clean, wanted thing, place and cleanness."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs: int, max_steps: int = LIMIT):
        self.num_envs = num_envs
        axes = tuple(
            ActionAxis(w, "1", -1.0, 1.0, "absolute", kind)
            for kind, words in (("verb", VERBS), ("noun", (*PLACES, *THINGS)))
            for w in words
        )
        self.spec = ControlSpec("words", "household", axes, 1.0, max_steps, SENTENCES)
        self.single_observation_space, self.observation_space = observation_spaces(len(SENTENCES), num_envs)
        self.single_action_space, self.action_space = action_spaces(len(axes), num_envs)
        self.stream = StartStream(num_envs)
        t = len(THINGS)
        self.world = np.zeros((num_envs, 3 + 2 * t + 3), np.int64)
        w = self.world
        self.robot, self.open, self.place, self.clean, self.wanted = (
            w[:, 0],
            w[:, 1:3],
            w[:, 3 : 3 + t],
            w[:, 3 + t : 3 + 2 * t],
            w[:, -3:],
        )
        self.steps = np.zeros(num_envs, np.int64)
        self.terminated, self.truncated, self.ready = (np.zeros(num_envs, bool) for _ in range(3))

    # ---- the contract

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs, self.ready)
        ids, starts = self.stream.due(seed, mask, starts)
        if len(ids):
            self._begin(ids, uniforms(starts, 16, stream=5))
        return self._obs(), {"success": self.terminated.copy()}

    def _begin(self, ids: np.ndarray, u: np.ndarray) -> None:
        def pick(column: int, of: int) -> np.ndarray:
            return (u[:, column] * of).astype(np.int64)

        n, t = len(ids), len(THINGS)
        self.robot[ids] = pick(0, 3)
        self.open[ids] = u[:, 1:3] < np.array([0.3, 0.5])
        # the key is not locked in
        self.place[ids] = np.stack([pick(3 + i, len(PLACES) - (i == KEY)) for i in range(t)], 1)
        self.clean[ids] = (u[:, 8 : 8 + t] < 0.5) | (np.arange(t) == KEY)
        thing, clean = 1 + pick(13, t - 1), u[:, 14] < 0.4
        had = self.place[ids][np.arange(n), thing]
        other = (had + 1 + pick(15, len(PLACES) - 1)) % len(PLACES)
        self.wanted[ids] = np.stack([thing, other, clean], 1)
        self.steps[ids], self.terminated[ids], self.truncated[ids], self.ready[ids] = 0, False, False, True

    def step(self, actions):
        if not self.ready.all():
            raise UserError("call reset() before step()")
        verbs, nouns = spoken(read_actions(actions, self.num_envs, self.single_action_space.shape[0]))
        alive = ~(self.terminated | self.truncated)
        for i in np.flatnonzero(alive):
            self._obey(int(i), int(verbs[i]), int(nouns[i]))
        self.steps += alive
        self.terminated |= alive & self._done()
        self.truncated |= alive & ~self.terminated & (self.steps >= self.spec.max_steps)
        return (
            self._obs(),
            (alive & self.terminated).astype(np.float32),
            self.terminated.copy(),
            self.truncated.copy(),
            {"success": self.terminated.copy()},
        )

    def _obey(self, i: int, verb: int, noun: int) -> None:
        here, thing = self.robot[i], noun - len(PLACES)
        reached = here not in (DRAWER, CABINET) or self.open[i, here - DRAWER]
        held = int(np.argmax(self.place[i] == HAND)) if (self.place[i] == HAND).any() else -1
        if verb == 0 and thing < 0:
            self.robot[i] = noun
        elif verb == 1 and thing >= 0 and held < 0 and self.place[i, thing] == here and reached:
            self.place[i, thing] = HAND
        elif verb == 2 and thing >= 0 and thing == held and reached:
            self.place[i, thing] = here
        elif verb == 3 and noun == here and noun in (DRAWER, CABINET):
            self.open[i, noun - DRAWER] |= noun == DRAWER or held == KEY
        elif verb == 4 and thing > 0 and thing == held and here == SINK:
            self.clean[i, thing] = 1

    def _done(self) -> np.ndarray:
        rows, (thing, place, clean) = np.arange(self.num_envs), self.wanted.T
        return (self.place[rows, thing] == place) & (self.clean[rows, thing] >= clean)

    def _obs(self) -> dict[str, np.ndarray]:
        n, t = self.num_envs, len(THINGS)
        state, rows = np.zeros((n, len(SENTENCES)), np.float32), np.arange(n)
        state[rows, self.robot] = 1
        held = self.place == HAND
        state[:, 5], state[:, 6 : 6 + t] = ~held.any(1), held
        for k in range(2):
            state[rows, 11 + 2 * k + self.open[:, k]] = 1
        for i in range(t):
            lies = ~held[:, i]
            state[rows[lies], 15 + len(PLACES) * i + self.place[lies, i]] = 1
        first = 15 + len(PLACES) * t
        for i in range(1, t):
            state[rows, first + 2 * (i - 1) + self.clean[:, i]] = 1
        first += 2 * (t - 1)
        state[rows, first - 1 + self.wanted[:, 0]] = 1
        state[rows, first + t - 1 + self.wanted[:, 1]] = 1
        state[:, -1] = self.wanted[:, 2]
        return {"state": state, "task": np.full(n, TASK)}

    # ---- fork and rewind, the expert

    def get_state(self) -> dict[str, np.ndarray]:
        return {k: v.copy() for k, v in self._rows().items()}

    def set_state(self, state: dict[str, np.ndarray], mask: "np.ndarray | None" = None) -> None:
        mask = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != bool:
            raise UserError(
                f"mask must be bool of shape ({self.num_envs},), got {mask.dtype} of shape {mask.shape}"
            )
        for name, row in self._rows().items():
            if name not in state or np.shape(state[name]) != row.shape:
                raise UserError(
                    f"set_state needs {name!r} of shape {row.shape}: pass what get_state() returned"
                )
        for name, row in self._rows().items():
            row[mask] = state[name][mask]
        self.ready |= mask

    def _rows(self) -> dict[str, np.ndarray]:
        return {
            "world": self.world,
            "steps": self.steps,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "seeds": self.stream.seeds,
            "episodes": self.stream.episodes,
        }

    def expert_action(self) -> np.ndarray:
        """float32[N,A]: the words of the next command of a shortest way, or one nearly so."""
        return said([self._plan(i) for i in range(self.num_envs)])

    def _plan(self, i: int) -> tuple[str, str]:
        place, here = self.place[i], int(self.robot[i])
        thing, goal, clean = (int(x) for x in self.wanted[i])
        held = int(np.argmax(place == HAND)) if (place == HAND).any() else -1
        locked = not self.open[i, 1]

        def reach(p: int, then: tuple[str, str]) -> tuple[str, str]:
            if here != p:
                return "go to", PLACES[p]
            return then if p not in (DRAWER, CABINET) or self.open[i, p - DRAWER] else ("open", PLACES[p])

        def fetch(x: int) -> tuple[str, str]:
            if held >= 0 and held != x:
                return reach(0 if here == CABINET and locked else here, ("put", THINGS[held]))
            return reach(int(place[x]), ("take", THINGS[x]))

        if locked and CABINET in (goal, place[thing]):
            return reach(CABINET, ("open", PLACES[CABINET])) if held == KEY else fetch(KEY)
        if held != thing:
            return fetch(thing)
        return (
            reach(SINK, ("wash", THINGS[thing]))
            if clean and not self.clean[i, thing]
            else reach(goal, ("put", THINGS[thing]))
        )


def spoken(actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(verb, noun) int64[N] of scores [N,A]: indices into VERBS and into PLACES + THINGS."""
    return actions[:, : len(VERBS)].argmax(1), actions[:, len(VERBS) :].argmax(1)


def said(commands: list[tuple[str, str]]) -> np.ndarray:
    """float32[n,A]: the scores of commands (verb, noun), 1 for their words and -1 for the others."""
    out, nouns = (
        -np.ones((len(commands), len(VERBS) + len(PLACES) + len(THINGS)), np.float32),
        (*PLACES, *THINGS),
    )
    for row, (verb, noun) in zip(out, commands, strict=True):
        row[VERBS.index(verb)] = row[len(VERBS) + nouns.index(noun)] = 1
    return out


def make(task: str = "", num_envs: int = 1, max_steps: int = 0, reward: str = "") -> Household:
    """The env of `--sim sims.words:make`; its reward is sparse."""
    if task not in ("", "household"):
        raise UserError(f"--task of sims.words:make is household, got {task}")
    if reward not in ("", "sparse"):
        raise UserError(f"--reward of sims.words:make is sparse, got {reward}")
    return Household(num_envs, max_steps or LIMIT)
