"""Collect into replay: every control step of every env, with the action that ran and who chose it.

Each env has a chunk of its own: the policy decides anew when it is used up, when the episode was reset, and
after every step that an operator decided, so that the chunk is cut where the driver changes and the next one
begins where the correction ended.

An env that is wrapped for interventions says in `info` what ran: `executed` float32[N,A] in -1..1, `source`
uint8[N] (0 policy, 1 human) and `phase` uint8[N] (0 policy, 1 pause, 2 recovery, 3 correction). Human steps,
those of recovery and correction, go to both stores: online as all steps do, and to the corrections with what
followed, so that their chunks are whole. Steps of an intervention in which the episode failed are dropped
from the corrections: they are not imitated.
"""

from collections.abc import Callable

import numpy as np
import torch

from robo_rl.data.episode import Episode
from robo_rl.errors import UserError
from robo_rl.noise import mix, seed_noise
from robo_rl.policies import Policy, blank_obs, obs_tensors
from robo_rl.replay import HUMAN, PAUSE, ReplayWriter
from robo_rl.rewards import Judge, Marked
from robo_rl.rollout import Timer, announce, one_thread, to_policy
from robo_rl.starts import ENDED, Ended, StartChooser, StartSource

# arrays of a ReplayCollector that its state has
NAMES = ("chunk", "at", "returns", "lengths", "human", "follow", "task")
SUMS = (
    "episodes",
    "success",
    "return",
    "length",
    "human_steps",
    "helped",
    "alone",
    "judge/false",
    "judge/missed",
)


def episode_means(sums: dict[str, float], judged: bool = False, helped: bool = False) -> dict[str, float]:
    """Means over the episodes of a ReplayCollector's sums; judged, helped: whether there is a judge, an
    operator."""
    n = sums["episodes"]
    out = {"episodes": float(n)}
    if n:
        out |= {"success": sums["success"] / n, "return": sums["return"] / n, "length": sums["length"] / n}
        if judged:
            out |= {k: sums[k] / n for k in ("judge/false", "judge/missed")}
        if helped or sums["helped"]:
            out |= {
                "human/step_share": sums["human_steps"] / max(1, sums["length"]),
                "human/assisted": sums["helped"] / n,
                "human/unassisted_success": sums["alone"] / n,
            }
    return out


def keeps_context(policy: Policy) -> bool:
    """Whether replay stores what the trunk makes of an observation: of pictures a small one's pooled vector,
    a tenth of them; of a vision-language-action model its prefix, many times as much as the observation, only
    if asked (`keep_prefix`)."""
    return policy.options.keep_prefix if policy.spec.text else bool(policy.spec.views)


def replay_observation(policy: Policy, raw: dict) -> dict[str, np.ndarray]:
    """What replay stores of an env's observation: its tensors, or the context that the trunk makes of it
    (`keeps_context`), numbers of 16 bits as int16."""
    obs = obs_tensors(raw, policy.spec)
    if not keeps_context(policy):
        return {k: np.array(v) for k, v in obs.items()}
    with torch.no_grad():
        columns = policy.encode(to_policy(obs, policy)).columns()
    return {
        k: (v.view(torch.int16) if v.dtype == torch.bfloat16 else v).cpu().numpy() for k, v in columns.items()
    }


def blank_row(policy: Policy) -> dict[str, np.ndarray]:
    """`replay_observation` of one env that shows nothing."""
    return replay_observation(policy, blank_obs(policy.spec, 1) | {"task": np.array(["do"])})


def replay_rows(policy: Policy) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each entry of `replay_observation`, of one env."""
    return {k: (v.shape[1:], v.dtype) for k, v in blank_row(policy).items()}


def row_bytes(policy: Policy) -> int:
    """Bytes of what replay stores of an observation."""
    return sum(v.nbytes for v in blank_row(policy).values())


def seen_key(policy: Policy) -> str:
    """The entry of those that a classifier of success looks at."""
    return "context" if keeps_context(policy) else "state"


class ReplayCollector:
    """Steps a vector env; owns its chunks and its episode statistics.

    It adds every step to `online` and human steps to `corrections`. A `judge`, if given, decides on success
    in the env's place: its verdict is the reward and ends the episode. `record` receives every finished
    episode with an intervention but for the first `recorded`, which a resumed run has recorded already. The
    noise of a decision depends on (seed, control step) alone. `starts` says where episodes begin; None: the
    env draws its own starts.
    """

    def __init__(
        self,
        env,
        policy: Policy,
        online: ReplayWriter,
        corrections: ReplayWriter | None,
        seed: int,
        judge: Judge | None = None,
        record: "Callable[[Episode], None] | None" = None,
        recorded: int = 0,
        starts: StartSource | None = None,
    ):
        if torch.device(getattr(env, "device", None) or "cpu").type != "cpu":
            raise UserError(
                f"methods from replay collect on the host, --sim {env.spec.sim} computes on {env.device}; "
                "use --device cpu, or --algo ppo and its like"
            )
        self.env, self.online, self.corrections, self.seed, self.judge = env, online, corrections, seed, judge
        # episodes recorded before, and made since the run began
        self.record, self.recorded, self.made = record, recorded, 0
        self.recordings: list[list[tuple]] = [[] for _ in range(env.num_envs)]
        self.pictures = tuple(f"image/{v}" for v in policy.spec.views)
        self.key = seen_key(policy)  # what a judge looks at
        self.spec, self.execute, self.n = policy.spec, policy.options.execute, env.num_envs
        self.timer, self.generator = Timer(), torch.Generator()
        self.trunk = policy  # what encodes pictures, which nothing here trains
        raw, _ = env.reset(seed=seed)
        self.chooser = None if starts is None else StartChooser(env, starts, seed)
        self.ended: list[Ended] = []
        if self.chooser is not None:
            raw = self.chooser.next(np.ones(env.num_envs, bool))
        self.obs, self.task, self.frame = self._read(raw), np.array(raw["task"]), self._frame(raw)
        n, a = self.n, policy.spec.action
        self.lanes = np.arange(n)
        self.chunk = np.zeros((n, self.execute, a), np.float32)
        self.at = np.full(n, self.execute)  # next step of the chunk; E: plan anew
        self.returns, self.lengths = np.zeros(n), np.zeros(n, np.int64)
        self.attended = np.zeros(n, bool)  # a person attends to the robot, in the last step
        self.human = np.zeros(n, np.int64)  # human steps of the present episode
        # steps, the present one too, that the last human one's chunk reaches
        self.follow = np.zeros(n, np.int64)
        self.steps, self.help_steps = 0, 0
        self.stats = self._zero()

    @staticmethod
    def _zero() -> dict[str, float]:
        return dict.fromkeys(SUMS, 0)

    def _read(self, raw: dict) -> dict[str, np.ndarray]:
        return replay_observation(self.trunk, raw)

    def _frame(self, raw: dict) -> tuple[np.ndarray, ...]:
        """State and pictures as a data set keeps them, while episodes are recorded."""
        return () if self.record is None else tuple(np.array(raw[k]) for k in ("state", *self.pictures))

    def run(self, policy: Policy, steps: int, explore: bool = True) -> None:
        """`steps` control steps of every env."""
        with one_thread():
            for _ in range(steps):
                self.step(policy, explore)

    def step(self, policy: Policy, explore: bool = True) -> None:
        """One control step of every env."""
        self.timer.skip()
        need = self.at >= self.execute
        if need.any():
            seed_noise(self.generator, mix(self.seed, self.steps))
            now = {k: torch.from_numpy(v[need]) for k, v in self.obs.items()}
            chunk = policy.act(to_policy(now, policy), self.generator, explore)
            self.chunk[need] = chunk.actions.cpu().numpy()
            self.at[need] = 0
            announce(self.env, self.chunk, need)
        self.timer.add("policy")
        wanted = self.chunk[self.lanes, self.at]
        raw, reward, terminated, truncated, info = self.env.step(wanted)
        executed = np.clip(np.asarray(info.get("executed", wanted), np.float32), -1, 1)
        source = np.asarray(info.get("source", np.zeros(self.n)), np.uint8)
        phase = np.asarray(info.get("phase", np.zeros(self.n)), np.uint8)
        after, success = self._read(raw), np.asarray(info["success"])
        reward, terminated, truncated = (
            np.asarray(reward, np.float32),
            np.array(terminated),
            np.array(truncated),
        )
        if self.judge is not None:
            claimed = self.judge(after[self.key], terminated)
            if (mark := info.get("mark")) is not None:  # the person knows better
                claimed = np.where(mark > 0, success, claimed)
            self.stats["judge/false"] += int((claimed & ~success).sum())
            self.stats["judge/missed"] += int((~claimed & success & terminated).sum())
            over = terminated | truncated
            reward, terminated = claimed.astype(np.float32), claimed | terminated & ~success
            truncated = over & ~terminated  # a success that was not seen bootstraps, like a time limit
        self.online.add(self.lanes, self.obs, executed, reward, terminated, source, phase)
        held = np.asarray(info.get("held", (source == HUMAN) & (phase > PAUSE)))
        self.attended = np.asarray(info.get("attended", held))
        self._correct(
            executed,
            reward,
            terminated,
            truncated,
            source,
            phase,
            after,
            success if self.judge is None else claimed,
        )
        if self.record is not None:
            for i in range(self.n):
                self.recordings[i].append(
                    (*(x[i] for x in self.frame), executed[i], reward[i], source[i], phase[i])
                )
        self.at = np.where(source == HUMAN, self.execute, self.at + 1)
        self.steps += self.n
        self.returns += reward
        self.lengths += 1
        self.human += held
        self.help_steps += int(self.attended.sum())
        done = terminated | truncated
        self.obs, self.frame = after, self._frame(raw)
        if done.any():
            self._finish(done, terminated, success)
        self.timer.add("sim")

    def _correct(self, executed, reward, terminated, truncated, source, phase, after, won) -> None:
        """Add human steps, and as many after them as their chunks reach, to the corrections; drop those in
        which the episode failed, which are no demonstration (the online store has them). Pauses of a person
        who still attends are part of what they do, and nothing to begin a chunk with."""
        if self.corrections is None:
            return
        mine = (source == HUMAN) & (phase > PAUSE)
        pauses = self.attended & (source == HUMAN) & (self.follow > 0)
        self.follow = np.where(mine | pauses, self.execute, np.maximum(self.follow - 1, 0))
        rows = (self.follow > 0).nonzero()[0]
        if not len(rows):
            return
        self.corrections.add(
            rows,
            {k: v[rows] for k, v in self.obs.items()},
            executed[rows],
            reward[rows],
            terminated[rows],
            source[rows],
            phase[rows],
            mine[rows],
        )
        ended = terminated | truncated
        if len(lost := rows[(ended & ~won & (mine | pauses))[rows]]):
            self.corrections.drop(lost)
        over = rows[(ended | (self.follow == 1))[rows]]
        if len(over):
            self.corrections.close(over, {k: v[over] for k, v in after.items()})
            self.follow[over] = 0

    def _finish(self, done: np.ndarray, terminated: np.ndarray, success: np.ndarray) -> None:
        rows = done.nonzero()[0]
        if self.record is not None:
            self._record(rows, terminated, success)
        self.online.close(rows, {k: v[rows] for k, v in self.obs.items()})
        s, helped = self.stats, self.human[rows] > 0
        s["episodes"] += len(rows)
        s["success"] += int(success[rows].sum())
        s["alone"] += int((success[rows] & ~helped).sum())
        s["helped"] += int(helped.sum())
        s["return"] += float(self.returns[rows].sum())
        s["length"] += int(self.lengths[rows].sum())
        s["human_steps"] += int(self.human[rows].sum())
        if self.chooser is not None:
            self.ended.append(
                Ended(
                    self.chooser.starts[rows],
                    self.chooser.tasks[rows],
                    success[rows],
                    self.returns[rows],
                    self.lengths[rows],
                )
            )
        self.returns[rows], self.lengths[rows], self.human[rows] = 0, 0, 0
        self.at[rows] = self.execute
        if self.judge is not None:
            self.judge.reset(done)
        raw = (
            self.env.reset(options={"reset_mask": done})[0]
            if self.chooser is None
            else self.chooser.next(done)
        )
        self.obs, self.task, self.frame = self._read(raw), np.array(raw["task"]), self._frame(raw)

    def _record(self, rows: np.ndarray, terminated: np.ndarray, success: np.ndarray) -> None:
        for i in rows.tolist():
            tape, self.recordings[i] = self.recordings[i], []
            if self.human[i]:
                self.made += 1
                if self.made <= self.recorded:
                    continue
                assert self.record is not None  # else there is no tape
                state, *pictures, action, reward, source, phase = map(np.array, zip(*tape, strict=False))
                self.record(
                    Episode(
                        state=state,
                        action=action,
                        reward=reward,
                        task=str(self.task[i]),
                        images=dict(zip(self.spec.views, pictures, strict=True)),
                        source=["human" if x == HUMAN else "policy" for x in source],
                        phase=phase,
                        success=bool(success[i]),
                        terminated=bool(terminated[i]),
                        final=self.frame[0][i],
                        final_images=dict(zip(self.spec.views, (x[i] for x in self.frame[1:]), strict=True)),
                    )
                )

    def take(self) -> dict[str, float]:
        """Sums over the episodes that ended since the last call (`episode_means` of them are for people)."""
        s, self.stats = self.stats, self._zero()
        return s

    def take_ended(self) -> Ended:
        """The episodes that ended since the last call; none are kept where the env draws its own starts."""
        out, self.ended = Ended.joined(self.ended), []
        return out

    def state(self) -> dict:
        """Everything needed to go on exactly, or {} where the env cannot be snapshotted.

        Of episodes in flight that are recorded with pictures, what was seen before is left out: they are
        recorded from here on.
        """
        if not hasattr(self.env, "get_state"):
            return {}
        tapes = (
            []
            if self.record is None or self.pictures
            else [[np.array(x) for x in zip(*tape, strict=False)] for tape in self.recordings]
        )
        return {
            "env": self.env.get_state(),
            "obs": {k: v.copy() for k, v in self.obs.items()},
            "steps": self.steps,
            "help_steps": self.help_steps,
            "stats": dict(self.stats),
            "frame": [x.copy() for x in self.frame],
            "tapes": tapes,
            "made": self.made,
            "judge": None if self.judge is None else self.judge.row.copy(),
            **self._starts_state(),
        } | {k: getattr(self, k).copy() for k in NAMES}

    def _starts_state(self) -> dict:
        if self.chooser is None:
            return {}
        ended = Ended.joined(self.ended)
        return {"starts": self.chooser.state(), "ended": [getattr(ended, f) for f in ENDED]}

    def take_over(self, old: "ReplayCollector") -> None:
        """Go on counting where `old` stopped, whose simulator failed; the open episodes are cut by now."""
        self.steps, self.help_steps, self.made = old.steps, old.help_steps, old.made
        self.stats, self.ended = old.stats, old.ended

    def set_state(self, state: dict) -> None:
        self.env.set_state(state["env"])
        if self.chooser is not None:
            self.chooser.set_state(state["starts"])
            self.ended = [Ended(*(np.array(x) for x in state["ended"]))]
        self.obs = {k: np.array(v) for k, v in state["obs"].items()}
        self.recordings = [list(zip(*tape, strict=False)) for tape in state["tapes"]] or [
            [] for _ in range(self.n)
        ]
        self.frame = tuple(np.array(x) for x in state["frame"])
        for name in NAMES:
            setattr(self, name, np.array(state[name]))
        if self.judge is not None:
            self.judge.row = np.array(state["judge"])
        self.steps, self.help_steps, self.made = state["steps"], state["help_steps"], state["made"]
        self.stats = dict(state["stats"])


def marked_episodes(env, policy: Policy, episodes: int, seed: int) -> Marked:
    """Run at least `episodes` episodes and label every state by the env's own success, as a person would by
    looking."""
    raw, _ = env.reset(seed=seed)
    n, spec = env.num_envs, policy.spec
    lane, ended = np.arange(n), 0
    chunk, at = np.empty(0), policy.options.execute
    states, won, names, over = [], [], [], np.zeros(n, bool)
    generator = torch.Generator().manual_seed(seed)
    with one_thread():
        while ended < episodes:
            if at >= policy.options.execute:
                obs = to_policy(obs_tensors(raw, spec), policy)
                chunk, at = policy.act(obs, generator, True).actions.cpu().numpy(), 0
                announce(env, chunk)
            raw, _, terminated, truncated, info = env.step(chunk[:, at])
            at += 1
            states.append(replay_observation(policy, raw)[seen_key(policy)])
            won.append(np.array(info["success"]))
            names.append(lane.copy())
            over = np.asarray(terminated | truncated)
            if over.any():
                ended += int(over.sum())
                lane[over] = lane.max() + 1 + np.arange(int(over.sum()))
                raw, _ = env.reset(options={"reset_mask": over})
                at = policy.options.execute
    whole = np.stack(names).T.ravel()  # env by env, so that each episode is in order of time
    state, success = np.stack(states).swapaxes(0, 1).reshape(len(whole), -1), np.stack(won).T.ravel()
    finished = ~np.isin(whole, lane[~over])
    return Marked(state[finished], success[finished], np.unique(whole[finished], return_inverse=True)[1])
