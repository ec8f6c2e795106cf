"""`robo_rl bench scale`: the scheduler under a virtual clock, held against a real run, then sized up on
paper.

The real ledger runs in `robo_rl.runtime.virtual`. Its stage times are measured alone on this machine, its
predictions of who waits and how stale the data are stand beside those of the real processes. What broker,
assembly and weights cost per fragment, batch and version is measured for a thousand workers and more, and
decides there who waits for whom. The sweep that follows is arithmetic on stated assumptions, not a
measurement.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from robo_rl.bench import broker as bench_broker
from robo_rl.bench.asynchronous import learner_for, steps_per_second
from robo_rl.bench.rows import Row, at_most
from robo_rl.experiment.config import on_policy_options
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.recipes import recipe
from robo_rl.files import cores
from robo_rl.rollout import Collector, new_columns
from robo_rl.runtime.virtual import constant, lognormal, simulate

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions
    from robo_rl.bench.rows import Report

# s per control step of one sim, steps per decision, decisions per episode
ENV_STEP, CHUNK, EPISODE = 0.020, 8, 25
SIGMA = 0.3  # spread of the time a fragment takes
SIMS, CPUS = 64, 16  # sims per inference GPU, CPU cores beside it
BATCH_COST, EACH_COST = 0.045, 0.0012  # s per batch of a VLA of 3 B parameters, s per sim in it
LEARN = 0.6  # GPU seconds per episode learnt from
FEW, UPDATE = 8, 2.0  # sims of each of many workers, s per update of all they make
SYNC = 1.0  # s to publish 6.6 GB of weights, 2 % of them changed
ASSUMED = (
    f"3 B VLA: {1e3 * ENV_STEP:.0f} ms per control step, {CHUNK} steps per decision, {EPISODE} decisions per "
    f"episode, {SIMS} sims and {CPUS} cores per inference GPU, inference {1e3 * BATCH_COST:.0f} ms + "
    f"{1e3 * EACH_COST:.1f} ms per sim, {LEARN} GPU s per episode learnt, {SYNC:.0f} s to publish"
)


def measure(args: "BenchOptions", report: "Report") -> None:
    """Validation on this machine, then the sweep."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if cores() < 2:
            report.skip("validation", "this machine has one core")
        else:
            validate(args, report)
    finally:
        torch.set_num_threads(threads)
    many_workers(args, report)
    for gpus, batch, staleness in (
        (8, 64, 0),
        (8, 64, 2),
        (64, 512, 0),
        (64, 512, 2),
        (512, 4096, 2),
        (512, 1024, 8),
        (4096, 16384, 2),
        (4096, 16384, 8),
        (4096, 1024, 32),
    ):
        report.add(sized(gpus, batch, staleness, args.quick))


def validate(args: "BenchOptions", report: "Report") -> None:
    """Waiting and staleness of a real run of pick_cube with two workers, and of the simulated one."""
    t = replace(recipe("mujoco", "", "pi_rl", "state", "full"), demos="0", workers=2, max_staleness=1)
    n = t.envs // 2
    env = make_env(replace(t, threads=1), n)
    learner = learner_for(t, env)
    collector = Collector(env, learner.policy, on_policy_options(t).gamma, 1)
    columns = new_columns(collector.layout(learner.policy), on_policy_options(t).decisions)
    decide, learn = [], []
    end = time.perf_counter() + args.slice / 2
    while time.perf_counter() < end or len(learn) < 3:
        for k in range(on_policy_options(t).decisions):
            begin = time.perf_counter()
            collector.decide(learner.policy, columns, k)
            decide.append(time.perf_counter() - begin)
        rollout = collector.collect(learner.policy, on_policy_options(t).decisions)
        rollout.version -= 1  # stale, as most of it will be
        begin = time.perf_counter()
        learner.update(rollout, 0.1, 0)
        learn.append(2 * (time.perf_counter() - begin))  # half a batch
    env.close()
    paper = simulate(
        2,
        n,
        on_policy_options(t).decisions,
        t.envs * on_policy_options(t).decisions,
        1,
        constant(float(np.mean(decide))),
        constant(float(np.mean(learn[1:]))),
        40,
        cores=2,
    )
    means: dict[str, list[float]] = {}
    rate, _, _ = steps_per_second(t, args.slice, means=means)
    real = {k: float(np.mean(v)) for k, v in means.items()}
    for what, ours, there in (
        ("workers wait", paper.worker_wait, real.get("workers/wait", 0.0)),
        ("learner waits", paper.learner_wait, real["util/learner_wait"]),
        ("staleness", paper.stale_mean, real["staleness/mean"]),
    ):
        report.add(
            Row(
                what=f"simulated: {what}",
                unit="of 1" if what != "staleness" else "versions",
                ours=ours,
                limit=there,
                limit_is="measured with processes",
                of_limit=ours / there if there else 1.0,
                bars=[at_most("difference", abs(ours - there), 0.1)],
            )
        )
    predicted = paper.rate * t.policy.execute
    report.add(
        Row(
            what="simulated: rate",
            unit="steps/s",
            ours=predicted,
            limit=rate,
            limit_is="measured with processes",
            of_limit=predicted / rate,
            note="stage times measured alone, so that what sharing memory costs is missing",
        )
    )


def many_workers(args: "BenchOptions", report: "Report") -> None:
    """Service times of broker, assembly and weights with thousands of workers, and a virtual run with
    them."""
    t = replace(recipe("mujoco", "", "pi_rl", "state", "full"), demos="0")
    env = make_env(replace(t, threads=1), FEW)
    learner = learner_for(t, env)
    collector = Collector(env, learner.policy, on_policy_options(t).gamma, 1)
    columns, decide = bench_broker.collected(collector, learner.policy, on_policy_options(t).decisions)
    layout = collector.layout(learner.policy)
    env.close()
    for workers in (1000,) if args.quick else (1000, 3000):
        s = bench_broker.measure(learner.policy, layout, columns, workers)
        who, each = f"{workers} workers", s.broker.lease + s.broker.seal
        report.add(
            Row(
                what=f"broker, {who}",
                unit="fragments/s",
                ours=1 / each,
                limit=1 / s.pipe,
                limit_is="the messages alone: two there, one back",
                of_limit=s.pipe / each,
                note=f"lease {1e6 * s.broker.lease:.0f} us, finished fragment {1e6 * s.broker.seal:.0f} us; "
                f"slots of {s.slot_bytes / 1e6:.0f} MB, {s.slot_bytes / s.batch_bytes:.1f} batches",
            )
        )
        report.add(
            Row(
                what=f"a batch for the learner, {who}",
                unit="ms",
                ours=1e3 * s.broker.take,
                limit=1e3 * s.copy,
                limit_is="one copy of it into warm memory",
                of_limit=s.copy / s.broker.take,
                note=f"{s.batch_bytes / 1e6:.0f} MB; {s.late:.3f} of the fragments copied while the learner "
                "waits",
            )
        )
        report.add(
            Row(
                what=f"weights, {who} of one host",
                unit="us",
                ours=1e6 * s.broker.publish,
                limit=1e6 * s.fetch,
                limit_is="one worker's copy of them",
                of_limit=s.fetch / s.broker.publish,
                note="published once, for any number of workers; over machines they spread by 4 per hop",
            )
        )
        batch = workers * FEW * on_policy_options(t).decisions
        for staleness in (0, 1):
            out = simulate(
                workers,
                FEW,
                on_policy_options(t).decisions,
                batch,
                staleness,
                lognormal(decide, SIGMA),
                constant(UPDATE),
                8,
                broker=s.broker,
            )
            report.add(
                Row(
                    what=f"simulated: learner waits for the broker, {who}, staleness {staleness}",
                    unit="of 1",
                    ours=out.broker_wait,
                    limit=0.05,
                    limit_is="a twentieth",
                    of_limit=0.05 / max(out.broker_wait, 1e-9),
                    bars=[at_most("learner waits for the broker", out.broker_wait, 0.05)]
                    if staleness
                    else [],
                    note=f"service times as measured, {1e3 * decide:.1f} ms per decision of {FEW} sims as "
                    f"measured, {UPDATE:.0f} s per update of {batch} decisions assumed; learner waits "
                    f"{out.learner_wait:.3f} in all, workers {out.worker_wait:.3f}",
                )
            )


def sized(gpus: int, batch: int, staleness: int, quick: bool) -> Row:
    """The best split of `gpus` between inference and learning for `batch` episodes an update."""
    chunk = max(SIMS / CPUS * ENV_STEP * CHUNK, BATCH_COST + EACH_COST * SIMS)  # two halves take turns
    best = None
    for share in (1 / 16, 1 / 8, 1 / 5, 1 / 3, 1 / 2):
        infer = max(1, round(gpus * share))
        learners = gpus - infer
        efficiency = 1 / (1 + 0.03 * np.log2(max(learners, 1)))  # of data parallelism
        sims = min(SIMS, batch)  # a fragment is an episode of each
        out = simulate(
            infer,
            sims,
            1,
            batch,
            staleness,
            lognormal(chunk * EPISODE, SIGMA),
            constant(LEARN * batch / (learners * efficiency) + SYNC),
            12 if quick else 40,
        )
        if best is None or out.rate > best[0].rate:
            best = (out, infer)
    out, infer = best
    ideal = gpus / (LEARN + chunk * EPISODE / SIMS)  # GPU seconds per episode, nobody ever waiting
    return Row(
        what=f"on paper: {gpus} GPUs, {batch} episodes an update, staleness {staleness}",
        unit="episodes/s",
        ours=out.rate,
        limit=ideal,
        limit_is="no GPU ever waits",
        of_limit=out.rate / ideal,
        note=f"{infer} of {gpus} GPUs infer; staleness {out.stale_mean:.1f} on average, p99 "
        f"{out.stale_p99:.0f}, {out.masked:.3f} too old; learner waits {out.learner_wait:.2f}, workers "
        f"{out.worker_wait:.2f}; {ASSUMED}",
    )
