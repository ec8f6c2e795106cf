"""Select the frames of recorded episodes that a policy learns from, and mask chunks at the end of their
segment.

A frame is selected if a person (or the scripted expert) chose its action, or if the policy did in an episode
that succeeded without help and `own` is set (ARMADA). The last segment of a failed episode is not: what a
person tried in vain is not imitated. A segment is a run of frames of one episode, phase and source. A chunk
that begins in one segment is masked from the next segment on, so that no chunk crosses from policy to person
(RaC).
"""

from collections.abc import Sequence

import numpy as np
import torch

from robo_rl.algos.bc import demos_sampler
from robo_rl.algos.onpolicy import Demos
from robo_rl.data.episode import HELP, PHASES
from robo_rl.data.reader import Dataset
from robo_rl.demos import check_fits
from robo_rl.errors import UserError
from robo_rl.policies import ObsSpec
from robo_rl.policies.policy import words_of
from robo_rl.policies.protocol import Obs

TRAINED_SOURCES = ("expert", "human", "teacher")


def trainable_frames(dataset: Dataset, own: bool = False, phases: Sequence[str] = HELP) -> np.ndarray:
    """bool[F]: the frames of `dataset` that a policy learns from; of a person's frames those in `phases`."""
    codes = [i for i, name in enumerate(dataset.sources) if name in TRAINED_SOURCES or name == "unknown"]
    by_person = np.isin(dataset.source, codes)
    if dataset.features.phases:
        wanted = [PHASES.index(p) for p in phases]
        person = [i for i, name in enumerate(dataset.sources) if name == "human"]
        by_person &= ~np.isin(dataset.source, person) | np.isin(dataset.phase, wanted) & ~failed_segments(
            dataset
        )
    if own:
        alone = dataset.success & ~np.logical_or.reduceat(by_person, dataset.from_)
        by_person |= np.repeat(alone, dataset.to - dataset.from_)
    return by_person


def failed_segments(dataset: Dataset) -> np.ndarray:
    """bool[F]: the frames of the segment that an episode without success ended in."""
    last = dataset.to - 1
    failed = np.zeros(len(dataset.action), bool)
    failed[last[~np.asarray(dataset.success)]] = True
    return failed[segment_ends(dataset) - 1]


def segment_ends(dataset: Dataset) -> np.ndarray:
    """int64[F]: the first frame after the segment that each frame is in."""
    last = np.ones(len(dataset.action), bool)
    last[:-1] = (
        (dataset.phase[1:] != dataset.phase[:-1])
        | (dataset.source[1:] != dataset.source[:-1])
        | (dataset.episode_index[1:] != dataset.episode_index[:-1])
    )
    ends = np.flatnonzero(last) + 1
    return ends[np.searchsorted(ends, np.arange(len(last)), side="right")]


def segment_chunks(dataset: Dataset, horizon: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks [R,H,A] of actions from the frames `rows` (bool[F]) on, and mask bool[R,H], False beyond the
    segment's end.
    """
    at, ends = np.flatnonzero(rows), segment_ends(dataset)
    ahead = at[:, None] + np.arange(horizon)
    end = ends[at][:, None]
    return dataset.action[np.minimum(ahead, end - 1)], ahead < end


def segment_sampler(
    parts: Sequence[Dataset],
    spec: ObsSpec,
    horizon: int,
    own: bool = False,
    shares: Sequence[float] | None = None,
    phases: Sequence[str] = HELP,
) -> Demos:
    """Sampler of (obs, chunk[B,H,A], mask[B,H]) over the selected frames of several data sets.

    shares: share of every batch by data set (None: by number of frames); one without such frames leaves its
    share to the rest. phases: of a person's help, those to learn from. Raises UserError if none has any.
    """
    samplers, sizes, kept = [], [], []
    for k, dataset in enumerate(parts):
        check_fits(dataset.meta, spec)
        rows = trainable_frames(dataset, own, phases)
        if not rows.any():
            continue
        samplers.append(demos_sampler(*frame_tensors(dataset, spec, horizon, rows)))
        sizes.append(int(rows.sum()))
        kept.append(k)
    if not samplers:
        where = ", ".join(str(d.meta.root) for d in parts) or "no data set"
        raise UserError(
            f"nothing to learn from in {where}: no frame was chosen by a person or an expert. Record "
            "corrections (robo_rl correct, robo_rl console) or add demonstrations"
        )
    weight = np.array([sizes[i] if shares is None else shares[k] for i, k in enumerate(kept)], float)
    weight /= weight.sum()

    def sample(size: int, generator: torch.Generator):
        counts = np.floor(weight * size).astype(int)
        counts[int(np.argmax(weight))] += size - counts.sum()
        drawn = [s(int(n), generator) for s, n in zip(samplers, counts, strict=True) if n]
        obs = {k: torch.cat([d[0][k] for d in drawn]) for k in drawn[0][0]}
        return obs, torch.cat([d[1] for d in drawn]), torch.cat([d[2] for d in drawn])

    return sample


def frame_tensors(
    dataset: Dataset, spec: ObsSpec, horizon: int, rows: np.ndarray
) -> tuple[Obs, torch.Tensor, torch.Tensor]:
    """Observations, chunks [R,H,A] and mask [R,H] of the frames `rows` (bool[F]), masked at the end of their
    segments."""
    chunk, mask = segment_chunks(dataset, horizon, rows)
    obs = {"state": torch.from_numpy(np.ascontiguousarray(dataset.state[rows]))}
    if spec.language:
        obs["tokens"] = torch.from_numpy(words_of(dataset.tasks, spec))[
            torch.from_numpy(dataset.task_index[rows])
        ]
    for view in spec.views:
        obs[f"image/{view}"] = torch.from_numpy(dataset.images(view)[rows])
    return obs, torch.from_numpy(chunk), torch.from_numpy(mask).float()
