"""What a model imagines: along recorded actions (open loop) and under a policy (closed loop).

Axes: `B` windows (`world_models.windows`), `T` control steps of a window, `N` episodes, `E` steps of a chunk,
`S` state, `A` action.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from robo_rl.errors import UserError
from world_models.judge_protocol import Clips, Head, Seen, SuccessJudge
from world_models.model import WorldModel, WorldSpec

CHUNK = 8  # control steps given to a model at once
HEADS = ("reward", "terminal", "success", "uncertainty")


@dataclass(frozen=True, slots=True)
class Imagined:
    """A model along the actions of some windows: state [B,T,S], images {view: uint8[B,T,h,w,3]}, reward,
    terminal, success, uncertainty float32[B,T]."""

    state: np.ndarray
    images: dict[str, np.ndarray]
    reward: np.ndarray
    terminal: np.ndarray
    success: np.ndarray
    uncertainty: np.ndarray


def open_loop(
    model: WorldModel,
    start: Mapping[str, np.ndarray],
    actions: np.ndarray,
    batch: int = 256,
    seed: int = 0,
    tick: Callable[[int], None] = lambda done: None,
) -> Imagined:
    """Roll the model along `actions` [B,T,A] from observations `start` {key: [B,...]}, never showing it what
    came. tick(n) hears how many windows are done."""
    parts: list[dict[str, np.ndarray]] = []
    views = [k for k in start if k.startswith("image/")]
    for b in range(0, len(actions), batch):
        rows = slice(b, min(b + batch, len(actions)))
        carry = model.start({k: v[rows] for k, v in start.items()}, seed + np.arange(rows.start, rows.stop))
        if "before" in carry and "before" in start:  # a window inside an episode is in motion
            carry["before"] = torch.from_numpy(np.ascontiguousarray(start["before"][rows]))
        steps, count = [], actions.shape[1]
        for t in range(0, count, CHUNK):
            carry, p = model.step(carry, torch.from_numpy(np.ascontiguousarray(actions[rows, t : t + CHUNK])))
            steps.append({k: p.obs[k] for k in ("state", *views)} | {k: getattr(p, k) for k in HEADS})
            tick(rows.start + (rows.stop - rows.start) * min(t + CHUNK, count) // count)
        parts.append({k: torch.cat([s[k] for s in steps], 1).cpu().numpy() for k in steps[0]})
    whole = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    return Imagined(whole["state"], {v[6:]: whole[v] for v in views}, *(whole[k] for k in HEADS))


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """Episodes of a policy in a model: success bool[N], length int64[N], gain float32[N] (sum of its
    rewards, as an env of the model pays them), uncertainty float32[N] at the end, cut bool[N]: it passed the
    model's threshold before it ended, where an env would have ended it without success."""

    success: np.ndarray
    length: np.ndarray
    gain: np.ndarray
    uncertainty: np.ndarray
    cut: np.ndarray


def play(
    model: WorldModel,
    act: Callable[[dict], np.ndarray],
    obs: Mapping[str, np.ndarray],
    max_steps: int = 0,
    seed: "int | np.ndarray" = 0,
    judge: SuccessJudge | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> PlayedEpisodes:
    """Let `act(obs) -> actions [N,E,A]` act in the model from the observations `obs`, to the end of every
    episode, as long as one in an env lasts (`WorldSpec.steps`). seed: of the model's draws, or those of every
    episode [N].

    A step that `judge` (None: the model's own head) gives more than 1/2 wins its episode; one that `is_lost`
    ends it. Nothing is cut for its uncertainty (that would count against the policy): it is noted.
    A step with NaN ends its episode as lost. tick(n) hears how much is done, in episodes.
    """
    n, limit = len(obs["state"]), model.spec.steps(max_steps)
    obs, judge = dict(obs), judge or Head()
    clips = Clips(judge, obs)
    # pictures of a chunk's last step alone, where nobody but the policy looks
    look = getattr(model, "look", None) if isinstance(judge, Head) else None
    carry = model.start(obs, seed if isinstance(seed, np.ndarray) else seed + np.arange(n))
    over, won, cut = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
    length, gain, doubt = np.zeros(n, np.int64), np.zeros(n, np.float32), np.zeros(n, np.float32)
    made = 0
    while made < limit and not over.all():
        actions = np.asarray(act(obs), np.float32).clip(-1, 1)
        if actions.shape[2] != model.spec.action:
            raise UserError(
                f"the policy commands {actions.shape[2]} axes, the world model has {model.spec.action}: "
                f"{', '.join(model.spec.control.action_names)}"
            )
        commands = torch.from_numpy(np.ascontiguousarray(actions))
        carry, p = model.step(carry, commands, **({"draw": False} if look else {}))
        reward, terminal, success, uncertainty = (getattr(p, k).cpu().numpy() for k in HEADS)
        after = {k: v.cpu().numpy() for k, v in p.obs.items()}
        for t in range(min(actions.shape[1], limit - made)):
            live, made = ~over, made + 1
            length += live
            lost = live & ~np.isfinite(uncertainty[:, t] + reward[:, t])
            doubt = np.where(live, uncertainty[:, t], doubt)
            now = {k: v[:, t] for k, v in after.items()}
            granted = asked(
                judge,
                clips,
                np.flatnonzero(live & ~lost & due(judge, made, (made == limit) | (terminal[:, t] > 0.5))),
                obs,
                now,
                actions[:, t],
                success[:, t],
                made,
            )
            gain += granted if model.spec.sparse else np.where(live & ~lost, reward[:, t], 0)
            won |= granted
            cut |= live & ~granted & ~(uncertainty[:, t] <= model.spec.threshold)
            over |= lost | (live & is_lost(model.spec, terminal[:, t], success[:, t])) | granted
            obs |= now
        if look:
            obs |= {k: v.cpu().numpy() for k, v in look(carry).items()}
        tick(n * made // limit)
    tick(n)
    return PlayedEpisodes(won, length, gain, doubt, cut)


def is_lost(spec: WorldSpec, terminal: np.ndarray, success: np.ndarray) -> np.ndarray:
    """bool[N]: the step ends its episode by the task's own rule without a success. Where every recorded
    success is an end, the success's share of `terminal` is no loss."""
    return terminal - success > 0.5 if spec.ends_on_success else terminal > 0.5


def due(judge: SuccessJudge, steps: "int | np.ndarray", last: np.ndarray) -> np.ndarray:
    """bool[N]: the judge is asked about a step: every `judge.every` steps, and where the episode may end."""
    return last | (steps % judge.every == 0)


def asked(
    judge: SuccessJudge,
    clips: Clips,
    rows: np.ndarray,
    before: dict,
    after: dict,
    actions: np.ndarray,
    chance: np.ndarray,
    made: int,
) -> np.ndarray:
    """bool[N]: which of `rows` the judge grants success after step `made`."""
    clips.add(before, np.full(len(chance), made - 1))
    out = np.zeros(len(chance), bool)
    if len(rows):
        tasks = np.asarray(before.get("task", np.full(len(chance), "")))
        out[rows] = (
            judge(
                Seen(
                    {k: v[rows] for k, v in before.items() if k != "task"},
                    {k: v[rows] for k, v in after.items()},
                    tasks[rows],
                    actions[rows],
                    chance[rows],
                    clips.of(rows, after),
                )
            )
            > 0.5
        )
    return out
