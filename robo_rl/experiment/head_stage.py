"""The second half of supervision from pictures: the action head alone, on what a trunk that stays as it is
makes of the demonstrations.

To look at a picture costs as much as a hundred steps of the head. The trunk learns to see from some of them;
how precisely to act the head learns from many more frames and steps. What the trunk pools of each frame is
computed once for all of these (`--bc.head`).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.algos import bc
from robo_rl.algos.augment import changed
from robo_rl.data import drawn
from robo_rl.data.reader import Dataset, chunks
from robo_rl.demos import frame_store
from robo_rl.devices import device_of, sampled_on
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.open_loop import observation
from robo_rl.experiment.run import Run, Stopped, supervised_tick
from robo_rl.experiment.supervised_frames import SupervisedFrames, chosen
from robo_rl.options import BcOptions
from robo_rl.policies import obs_tensors
from robo_rl.policies.context import PREFIX
from robo_rl.policies.guidance import supervised
from robo_rl.selection import best_look

PIECE = 64  # observations that are encoded together
ROWS = 256  # different frames of a step, at least: without pictures they cost what draws of noise do


def teach_head(
    run: Run,
    frames: SupervisedFrames,
    among: np.ndarray,
    made: int,
    weight: "Callable[[Tensor], Tensor] | None" = None,
    beside: Sequence[Dataset] = (),
) -> int:
    """Teach all of `run.policy` but its trunk in --bc.head updates, on those frames that are in `among`
    bool[F], reported as those after the first `made` ones -> how many these were.

    weight: as `demos.demo_sampler` has it. beside: data sets with pictures of which every frame counts as
    much. `run.pooled` has the frames that the trunk, as it is, has looked at before, and then those of now
    too. Raises Stopped when a signal comes.
    """
    config, policy, data = run.config, run.policy, frames.data
    options = config.bc
    if not options.head:
        return 0
    rows = chosen(config, data, options.head_every or config.data.every)
    rows = rows[among[rows]]
    policy.eval()
    known, pooled = run.pooled or (rows[:0], torch.empty(0, policy.context_size))
    if not np.array_equal(known, rows[: len(known)]):  # some were held out; what is recorded comes after
        known, pooled = rows[:0], pooled[:0]
    pooled = torch.cat([pooled, encoded(run, data, rows[len(known) :])])
    run.pooled = rows, pooled
    parts, where = [learnt_rows(run, data, rows, pooled)], torch.from_numpy(rows)
    for more in beside:
        every = np.arange(len(more.action))
        parts.append(learnt_rows(run, more, every, encoded(run, more, every)))
    state, pooled, chunk, mask = (torch.cat(x) for x in zip(*parts, strict=True))
    assert not (beside and weight)
    sample = bc.demos_sampler(
        {"state": state, PREFIX: pooled}, chunk, mask, weight and (lambda at: weight(where[at]))
    )
    sample = sampled_on(device_of(policy), sample)
    size, noises = head_batch(options)
    learns = [p for name, p in policy.named_parameters() if p.requires_grad and not name.startswith("trunk.")]
    policy.train()
    bc.fit(
        learns,
        lambda g: policy.bc_loss(*sample(size, g), g, noises),
        replace(options, updates=options.head),
        config.seed + 14,
        supervised_tick(run, "head", options.head, made),
    )
    policy.freeze_base()
    policy.eval()
    return options.head


def teach_head_if_better(run: Run, *args: Any) -> int:
    """`teach_head` of the same arguments, and looks before and after. Where success on the starts that choose
    fell, `run.policy` is that of before: what the head fits to a hair it knows only where the demonstrations
    go."""
    if not run.config.bc.head:
        return 0
    before = copy.deepcopy(run.policy)
    run.look()
    made = teach_head(run, *args)
    run.look()
    first, second = run.looks
    better = best_look([second, first]) is second
    run.report.say(
        f"the head learnt on: success {first.worst:.3f} -> {second.worst:.3f}"
        + ("" if better else ", so the policy of before goes on")
    )
    run.looks = [second] if better else []
    run.policy = run.policy if better else before
    return made


def head_batch(options: BcOptions) -> tuple[int, int]:
    """(frames of an update of the head, draws of noise for each)."""
    size = max(options.batch, ROWS)
    return size, max(1, options.batch * options.noises // size)


def learnt_rows(
    run: Run, data: Dataset, rows: np.ndarray, pooled: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(state [K,S], `pooled` [K,C], chunks [K,H,A], mask [K,H]) of the frames `rows` int64[K]."""
    _, chunk, pad = (
        torch.from_numpy(np.ascontiguousarray(x[rows])) for x in chunks(data, run.policy.options.horizon)
    )
    return torch.from_numpy(data.state[rows]), pooled, chunk, (~pad).float()


@torch.no_grad()
def encoded(run: Run, data: Dataset, rows: np.ndarray) -> Tensor:
    """What the trunk of `run.policy` pools of the frames `rows` int64[K]: [K,C], on the CPU. They are
    changed as --bc.shift and its like say, drawn once for each."""
    config, policy, options = run.config, run.policy, run.config.bc
    device, generator = device_of(policy), torch.Generator().manual_seed(config.seed + 15)
    out = torch.empty(len(rows), policy.context_size)
    done = 0
    if not len(rows):
        return out
    run.report.start("look", len(rows), "frames")
    for places, pictures in seen(run, data, rows):
        at = rows[places]
        obs = obs_tensors(observation(data, at, pictures), policy.spec)
        obs = changed(obs, options.shift, options.colour, options.forget, generator)
        there = {k: v.to(device) for k, v in obs.items()}
        out[torch.from_numpy(places)] = policy.encode(supervised(there, policy)).pooled.cpu()
        done += len(places)
        run.report.advance(done)
        if run.stop.asked:
            raise Stopped
    return out


def seen(run: Run, data: Dataset, rows: np.ndarray) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """(places among the rising `rows`, what each camera saw there), a few at a time and all of them: from the
    data set, or where it has no pictures drawn as its episodes are played again."""
    config = run.config
    if data.views:
        # each is wanted once
        store = frame_store(data, run.policy.spec, replace(config.data, cache_mb=1))
        pieces = pieces_of(np.arange(len(rows)))
        for places, (_, pictures) in zip(pieces, store.ahead(rows[p] for p in pieces), strict=True):
            yield places, pictures
        return
    with closing(make_env(config, min(len(data), drawn.GROUP))) as env:
        for here, pictures in drawn.draw_groups(env, data, rows):
            for part in pieces_of(np.arange(len(here))):
                yield here[part], {view: x[part] for view, x in pictures.items()}


def pieces_of(places: np.ndarray) -> list[np.ndarray]:
    return np.split(places, range(PIECE, len(places), PIECE))
