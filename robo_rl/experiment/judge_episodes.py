"""Which recorded episodes succeeded, as a judge of success says: a classifier (robo_rl wm judge), or a model
behind HTTP.

A judge is asked about the last step of every episode: what was observed after its last action, or where that
was not recorded the last frame; a judge of K frames sees those that led there. More than one half counts
(`world_models.judge`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robo_rl.errors import UserError
from robo_rl.types import Each, silently

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset

AT_ONCE = 32  # episodes whose pictures are in memory


@dataclass(frozen=True, slots=True)
class Judged:
    """success bool[E]; agrees: with how many of them the data set itself agrees, None where it says nothing;
    divided: share of the episodes on which the judge's answers were divided, None for one that answers
    once."""

    success: np.ndarray
    agrees: int | None
    divided: float | None


def label_by_judge(root: Path, who: str, each: Each = silently) -> Judged:
    """Ask the judge `who` (an http address, openai: before one, the folder of a classifier) about every
    episode of a data set, and write what it says into it. UserError: there is no such judge, it does not
    answer, or it cannot look at this data; nothing is written then."""
    from robo_rl.data.labels import write_success
    from robo_rl.data.reader import load
    from world_models.judge import make
    from world_models.judge_http import ChatJudge

    if who in ("", "head"):
        raise UserError(
            "--success judge needs --judge: an http address (openai:http://… for OpenAI's protocol), or the "
            "folder of a classifier (robo_rl wm judge)"
        )
    judge: Any = make(who)
    data = load(root)
    check_judge(judge, data, who)
    at_once = 1 if isinstance(judge, ChatJudge) else AT_ONCE  # that one asks about each by itself
    parts = np.split(np.arange(len(data)), range(at_once, len(data), at_once))
    chances = [judge(end_of(data, part, judge)) for part in each("judge", parts, "questions")]
    success = np.concatenate(chances) > 0.5
    write_success(root, success)
    judged = getattr(judge, "judged", 0)
    return Judged(
        success,
        int((success == data.success).sum()) if data.is_judged else None,
        judge.divided / judged if judged else None,
    )


def check_judge(judge, data: "Dataset", who: str) -> None:
    """Raise UserError for a classifier that learnt from another robot, cameras or instructions than those of
    the data set."""
    from world_models.judge import Classifier

    if not isinstance(judge, Classifier):
        return
    sizes = (len(data.features.state), len(data.features.action))
    if judge.sizes != sizes:
        raise UserError(
            f"the judge {who} learnt from {judge.sizes[0]} state and {judge.sizes[1]} action numbers, "
            f"{data.meta.root} has {sizes[0]} and {sizes[1]}; train one on such data: robo_rl wm judge "
            "DATASET"
        )
    if missing := set(judge.views) - set(data.views):
        raise UserError(
            f"the judge {who} looks through {', '.join(sorted(missing))}, {data.meta.root} has "
            f"{', '.join(data.views) or 'no camera'}"
        )


def end_of(data: "Dataset", episodes: np.ndarray, judge):
    """The last steps of `episodes`, as a judge sees them."""
    from world_models.judge_protocol import Seen, clip_rows

    frames, skip = getattr(judge, "frames", 1), getattr(judge, "skip", 1)
    last = data.to[episodes] - 1
    before: dict[str, np.ndarray] = {"state": data.state[last]}
    after: dict[str, np.ndarray] = {
        "state": np.where(
            np.isfinite(data.final[episodes]).all(1, keepdims=True), data.final[episodes], data.state[last]
        )
    }
    clip: dict[str, np.ndarray] = {}
    rows = clip_rows(last, data.from_[episodes], max(2, frames), skip)[:, :-1] - data.from_[episodes][:, None]
    for view in getattr(judge, "views", data.views):
        seen = [seen_at(data, view, int(e), at) for e, at in zip(episodes, rows, strict=True)]
        ends = [
            final if (final := data.final_image(view, int(e))) is not None else x[-1]
            for e, x in zip(episodes, seen, strict=True)
        ]
        before[f"image/{view}"], after[f"image/{view}"] = np.stack([x[-1] for x in seen]), np.stack(ends)
        if frames > 1:
            clip[f"image/{view}"] = np.stack(
                [np.concatenate([x[:-1], end[None]]) for x, end in zip(seen, ends, strict=True)]
            )
    tasks = np.array([data.task(int(e)) for e in episodes])
    return Seen(before, after, tasks, data.action[last], np.zeros(len(episodes), np.float32), clip)


def seen_at(data: "Dataset", view: str, episode: int, at: np.ndarray) -> np.ndarray:
    """uint8 [K+1,h,w,3]: frames `at` [K] of an episode, which is decoded in pieces, then its last one."""
    wanted = np.append(at, data.to[episode] - data.from_[episode] - 1)
    out = np.empty((len(wanted), *data.views[view], 3), np.uint8)
    for first, block in data.blocks(view, episode):
        here = (wanted >= first) & (wanted < first + len(block))
        out[here] = block[wanted[here] - first]
    return out
