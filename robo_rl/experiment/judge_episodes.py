"""Which recorded episodes succeeded, as a judge of success says: a classifier (robo_rl wm judge), or a model
behind HTTP.

A judge is asked about the last step of every episode: what was observed after its last action, or where that
was not recorded the last frame; a judge of K frames sees those that led there. More than one half counts
(`world_models.judge`).
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robo_rl.errors import UserError, plural
from robo_rl.files import read_json, write_json
from robo_rl.types import Each, silently

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset

ANSWERS = "meta/answers.json"  # of a judge that has not seen all episodes yet
AT_ONCE = 32  # episodes whose pictures are in memory


@dataclass(frozen=True, slots=True)
class Judged:
    """success bool[E]; agrees: with how many of them agrees what the data set said before, None where it said
    nothing; labelled: that were labels, perhaps of this judge, and not what was recorded; divided: share of
    the episodes on which the judge's answers were divided, None for one that answers once; requests: sent to
    a judge behind HTTP this time, None of others."""

    success: np.ndarray
    agrees: int | None
    labelled: bool
    divided: float | None
    requests: int | None


def label_by_judge(root: Path, who: str, each: Each = silently) -> Judged:
    """Ask the judge `who` (an http address, openai: before one, the folder of a classifier) about every
    episode of a data set, and write what it says into it. UserError: there is no such judge, it does not
    answer, or it cannot look at this data; no label is written then, and the answers of a model behind HTTP
    are kept for the next time."""
    from robo_rl.data.labels import read_success, write_success
    from robo_rl.data.reader import load
    from world_models.judge import make, requests_of
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
    kept = root / ANSWERS
    take_answers(judge, who, kept)
    chances = []
    for part in each("judge", parts, "questions"):
        chances.append(judge(end_of(data, part, judge)))
        keep_answers(judge, who, kept)
    success = np.concatenate(chances) > 0.5
    labelled = read_success(data.meta) is not None
    write_success(root, success)
    kept.unlink(missing_ok=True)
    judged = getattr(judge, "judged", 0)
    return Judged(
        success,
        int((success == data.success).sum()) if data.is_judged else None,
        labelled,
        judge.divided / judged if judged else None,
        requests_of(judge),
    )


def take_answers(judge, who: str, path: Path) -> None:
    """Give a judge behind HTTP the answers that `keep_answers` kept of it, if it was told the same
    criteria."""
    from world_models.judge_http import ChatJudge

    document = read_json(path) if path.exists() else {}
    if not hasattr(judge, "answers") or (document.get("judge"), document.get("criteria", {})) != (
        who,
        criteria_of(judge),
    ):
        return
    answers = {bytes.fromhex(k): tuple(v) for k, v in document["answers"].items()}
    judge.answers.kept = answers
    if isinstance(judge, ChatJudge):
        judge.count(share for share, _ in answers.values())
    warnings.warn(
        f"{plural(len(answers), 'answer')} of the judge are kept from an attempt that did not end; to ask "
        f"all again, delete {path}",
        stacklevel=2,
    )


def keep_answers(judge, who: str, path: Path) -> None:
    """Write what a judge behind HTTP has answered, so that a labelling that is cut short goes on."""
    if hasattr(judge, "answers"):
        kept = {k.hex(): v for k, v in judge.answers.kept.items()}
        write_json(path, {"judge": who, "criteria": criteria_of(judge), "answers": kept})


def criteria_of(judge) -> dict[str, list[str]]:
    """{instruction: criteria} that a judge is told; {} of one that is told none."""
    return getattr(judge, "wanted", {})


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
