"""The plan of a run that learns from a data set without a simulator (`robo_rl train --sim none --plan`):
beside what the policy takes, the pictures that are kept, those of the batches that are decoded ahead, and
those of the held-out frames."""

import time
from dataclasses import replace

import numpy as np
import torch

from robo_rl.algos import bc
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.offline import FEW, ROWS, check, open_data, spec_of, split
from robo_rl.experiment.plan import Plan, large_policy, parts_of, resident, settle, supervised_times
from robo_rl.experiment.plan_measure import PlanPart
from robo_rl.experiment.sft import SupervisedRound
from robo_rl.experiment.supervised_frames import chosen
from robo_rl.options import RecapOptions
from robo_rl.policies.vla.processor import PIECE
from robo_rl.shapes import operations_per_second

TRIED = 4  # frames that are decoded to see what an open video takes
# bytes of a number of the pictures of one camera while they are made smaller: as they are, and divided by 255
FLOATS = 2 * 4


def plan_of_data(config: TrainConfig) -> Plan:
    """The plan of learning from the data set of --demos alone. UserError: as `train` would say."""
    from robo_rl.files import free_memory
    from robo_rl.policies import make_policy

    torch.set_num_threads(config.torch_threads)
    check(config)
    data = open_data(config)
    spec = spec_of(config, data)
    rows, held = split(config, data)
    policy, speed = large_policy(config, spec), 0.0
    if policy is None:
        settle(make_policy(config.policy, spec, config.seed), 4)
    store, decoding = opened(config, data, spec, rows)
    process, free = resident(), free_memory()
    if policy is not None:
        speed = operations_per_second(config.device)
    else:
        policy = make_policy(config.policy, spec, config.seed).to(config.device)
    more, _, learning, _ = parts_of(replace(config, device="cpu") if speed else config, None, policy, speed)
    every = config.bc.head_every or config.data.every
    looked = len(chosen(config, data, every)) * len(rows) // (len(rows) + len(held))
    outcomes = config.rl.updates if isinstance(config.rl, RecapOptions) and config.algo != "bc" else 0
    once = [SupervisedRound(0, config.bc.updates + outcomes, config.bc.head)]
    teaching = supervised_times(config, policy, once, max(learning, decoding), (looked, looked))
    host = [PlanPart(what, size) for what, size in pictures(config, store, rows, held, spec)]
    if config.device != "cpu":
        free = torch.cuda.mem_get_info(torch.device(config.device))[0]
        process, host = 0, []
    where = "process: interpreter, torch, data" if config.device == "cpu" else "process: counted on the host"
    seconds = (("learner", learning), (f"decoding, {config.data.threads} ahead", decoding))
    return Plan((PlanPart(where, process), *host, *more), seconds, free, config.device, speed, teaching)


def opened(config: TrainConfig, data, spec, rows: np.ndarray):
    """(the store of pictures with its videos open, seconds that a batch takes to decode where nothing of it
    is kept)."""
    from robo_rl.demos import frame_store

    store = frame_store(data, spec, config.data)
    if not store.views:
        return store, 0.0
    some = np.random.default_rng(config.seed).choice(rows, 2 * TRIED)
    store.get(some[:TRIED])
    begin = time.perf_counter()
    store.get(some[TRIED:])
    return store, (time.perf_counter() - begin) / TRIED * config.bc.batch / max(1, config.data.threads)


def pictures(config: TrainConfig, store, rows: np.ndarray, held: np.ndarray, spec) -> list[tuple[str, int]]:
    """(what, bytes) of the pictures that a run holds."""
    if not store.views:
        return []
    batch, every = config.bc.batch, len(store.data.action)
    largest = max(int(np.prod(shape)) for shape in store.shapes.values())
    judging = min(len(held), FEW if spec.text else ROWS)
    out = [("held-out frames", judging * store.row_bytes)]
    if store.fits:
        out.append(("pictures of all frames", every * store.row_bytes))
        out.append(("pictures of the frames learnt from", len(rows) * store.row_bytes))
    else:
        # distinct rows of so many draws, expected
        draws = batch * (config.bc.updates + bc.EXCHANGED * (len(store.data.tasks) > 1))
        asked = len(rows) * -np.expm1(-draws / len(rows))
        out.append(("pictures kept (--data.cache-mb)", int(min(store.slots, asked)) * store.row_bytes))
        # one is learnt from, one put together
        out.append(("batches decoded ahead", (config.data.threads + 3) * batch * store.row_bytes))
    if spec.text:
        out.append(("pictures made smaller", min(max(batch, judging), PIECE) * largest * FLOATS))
    return out
