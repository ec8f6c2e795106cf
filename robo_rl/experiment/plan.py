"""What a training run will need, before anything starts: memory and time of each part, and whether it fits
(`robo_rl train --plan`).

Weights, gradients, moments and rollouts are counted from the shapes that the run will have. Activations and
times are measured on two small batches of the same policy and extrapolated, for they are linear in the rows;
times of what is quick on a batch of full size.
A vision-language-action model of more than LARGE bytes is made of shapes alone (`robo_rl.shapes`): its
activations are counted, its times estimated from its operations. Phases of a run follow one another: the peak
is that of the largest. What is counted is one process, the learner's, and envs that another Python steps;
workers are told beside it.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robo_rl.experiment.config import TrainConfig, replay_options, rollout_options
from robo_rl.experiment.parallel import batch, group_size, workers
from robo_rl.experiment.plan_measure import (
    ROWS,
    PlanPart,
    extrapolated,
    simulator_seconds,
    simulators_outside,
    size_of,
    timed,
)
from robo_rl.experiment.plan_replay import replay_parts
from robo_rl.options import FROM_REPLAY, RL_OPTIONS, OffPolicyOptions, OnPolicyOptions, RecapOptions
from robo_rl.shapes import only_shapes, operations_per_second

LARGE = 1e9  # bytes of weights


@dataclass(frozen=True, slots=True)
class SupervisedTime:
    """A part of supervision: how often it is done in the first round and, at most, in all; `seconds` of each
    time."""

    what: str
    count: int
    most: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory [bytes] and time [s per update] of a run."""

    parts: tuple[PlanPart, ...]
    seconds: tuple[tuple[str, float], ...]
    free: int  # bytes that may still be taken
    device: str
    speed: float = 0.0  # operations a second, from which the times are estimated; 0: they are measured
    supervision: tuple[SupervisedTime, ...] = ()
    more: str = ""  # how many rounds of supervision may follow its first, and by which option
    unit: str = "update"  # what the seconds are of
    count: int = 0  # how many of them RL makes at most; 0: not told
    first: tuple[int, float] = (0, 0.0)  # updates of --rl.pretrain, and all their seconds
    warning: str = ""  # why nothing will come of the run
    beside: bool = False  # the learner, the last of `seconds`, works while the others do

    @property
    def peak(self) -> int:
        """Bytes of the learner's process at its largest, and of envs that another Python steps."""
        phases = {p.phase for p in self.parts if not p.phase.startswith("update, only")} - {""}
        always = sum(p.size for p in self.parts if not p.phase)
        return always + max((sum(p.size for p in self.parts if p.phase == x) for x in phases), default=0)

    @property
    def missing(self) -> int:
        """Bytes by which the peak is above what is free; what the process has already counts as had."""
        return self.peak - self.parts[0].size - self.free

    @property
    def all(self) -> float:
        """Seconds of one `unit`."""
        seconds = [s for _, s in self.seconds]
        return max(sum(seconds[:-1]), seconds[-1]) if self.beside else sum(seconds)

    def text(self) -> str:
        """The plan as a table, with its verdict in the last line."""
        rows = [f"  {p.what:<34}{p.size / 1e6:>12,.1f} MB  {p.phase}".rstrip() for p in self.parts]
        rows += [f"  {'peak':<34}{self.peak / 1e6:>12,.1f} MB", "", f"time per {self.unit}"]
        rows += [f"  {what:<34}{s:>12.3f} s" for what, s in self.seconds]
        rows.append(f"  {'all' + ', side by side' * self.beside:<34}{self.all:>12.3f} s")
        if self.first[0]:
            rows.append(f"  {f'--rl.pretrain, {self.first[0]:,} updates':<34}{self.first[1]:>12.0f} s")
        if self.count:
            rows.append(f"  {f'RL, at most {self.count:,} of them':<34}{self.count * self.all:>12.0f} s")
        rows.append("")
        rows += self.supervision_rows()
        if self.speed:
            rows += [
                "no weights were made: activations are counted from shapes, the times of policy and learner "
                f"are estimates from their operations, at {self.speed / 1e9:.0f} GFLOP/s that a product of "
                "matrices has here",
                "",
            ]
        largest = max(self.parts[1:], key=lambda p: p.size)
        verdict = (
            f"fits: {self.free / 1e9:.1f} GB are free"
            if self.missing <= 0
            else f"does not fit: {self.missing / 1e9:.1f} GB too many; the largest part is {largest.what}"
        )
        warning = [f"warning: {self.warning}"] if self.warning else []
        return "\n".join([f"memory on {self.device}", *rows, *warning, verdict])

    def supervision_rows(self) -> list[str]:
        """The table of supervision, [] where there is none."""
        if not self.supervision:
            return []
        rows = ["time of supervision, beside recording and evaluations"]
        rows += [f"  {s.what:<34}{s.seconds:>12.4f} s x {s.count:,}" for s in self.supervision]
        rows.append(f"  {'all':<34}{sum(s.count * s.seconds for s in self.supervision):>12.0f} s")
        if self.more:
            most = sum(s.most * s.seconds for s in self.supervision)
            grown = (f"{s.most:,} {s.what.split(',')[0]}" for s in self.supervision if s.most > s.count)
            rows.append(f"  {'all, at most':<34}{most:>12.0f} s with {self.more}: {', '.join(grown)}")
        return [*rows, ""]


def resident() -> int:
    """Bytes of memory that this process has now, without what glibc keeps of that which was freed: it is
    given out again."""
    import resource

    from robo_rl.files import give_back_freed

    give_back_freed()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make_plan(config: TrainConfig) -> Plan:
    """The plan of a run in a simulator. UserError: options that do not fit, as `train` would say."""
    from robo_rl.errors import UserError
    from robo_rl.experiment.envs import obs_spec, probe_env
    from robo_rl.experiment.latency import with_latency
    from robo_rl.experiment.sft import instructions
    from robo_rl.experiment.train import check
    from robo_rl.files import free_memory
    from robo_rl.policies import make_policy

    replay = isinstance(config.rl, OffPolicyOptions)
    if config.algo != "bc" and not replay and not isinstance(config.rl, OnPolicyOptions):
        known = (OnPolicyOptions, OffPolicyOptions)
        names = (name for name, options in RL_OPTIONS.items() if issubclass(options, known))
        raise UserError(f"--plan counts {', '.join(names)} and bc, got --algo {config.algo}")
    if replay and replay_options(config).synthetic:
        raise UserError("--plan does not count the model of --rl.synthetic: leave that out")
    torch.set_num_threads(config.torch_threads)
    env = probe_env(config)
    config = with_latency(config, env)
    check(config, env, only_shapes if is_whole(config) else contextlib.nullcontext)
    spec = obs_spec(env, len(instructions(env)) > 1, config.policy.text)
    load_what_a_run_needs(env)
    if (large := large_policy(config, spec)) is not None:
        if replay:
            raise UserError(
                f"--plan of --algo {config.algo} measures an update, and does so of models of less than "
                f"{LARGE / 1e9:.0f} GB: choose a smaller --policy.size, or --algo pi_rl or bc, whose updates "
                "are counted from shapes"
            )
        return counted_plan(config, env, large)
    # kernels, threads and buffers that any run has
    settle(make_policy(config.policy, spec, config.seed), ROWS[0])
    parts = [PlanPart("process: interpreter, torch, sim", resident())]
    outside, held = simulators_outside(config, env)
    free, policy = free_memory() + held, make_policy(config.policy, spec, config.seed).to(config.device)
    more, seconds, update, first = parts_of(config, env, policy)
    teaching = supervision_of(config, env, policy, update)
    env.close()
    if config.device != "cpu":
        free = torch.cuda.mem_get_info(torch.device(config.device))[0]
        parts[0] = PlanPart("process: counted on the host", 0)
    every = (*parts, *more, *outside)
    plan = Plan(every, tuple(seconds), free, config.device, 0.0, *teaching, first=first)
    return counted(config, env, plan)


def counted(config: TrainConfig, env, plan: Plan) -> Plan:
    """The plan with how often RL does what its seconds are of: an update or, where the method learns from
    replay, a decision of all envs; of those that end before the first update the warning alone."""
    from robo_rl.experiment.replay import never_learns

    if config.algo == "bc":
        return plan
    replay = isinstance(config.rl, OffPolicyOptions)
    each = (config.envs if replay else rollout_rows(config, env)[0]) * config.policy.execute
    if not replay:
        return replace(plan, count=-(-config.steps // each))
    plan = replace(plan, unit=f"decision of all {config.envs} envs", beside=workers(config) > 0)
    if warning := never_learns(config):
        return replace(plan, warning=warning, first=(0, 0.0))
    return replace(plan, count=-(-config.steps // each))


def is_whole(config: TrainConfig) -> bool:
    """Whether the policy is a vision-language-action model that may be large."""
    from robo_rl.options import VLAS

    return config.policy.kind in VLAS and (config.policy.size == "full" or bool(config.policy.folder))


def large_policy(config: TrainConfig, spec):
    """The policy of a run, made of shapes, where it is a whole vision-language-action model of more than
    LARGE bytes; else None."""
    from robo_rl.policies import make_policy

    if not is_whole(config):
        return None
    with only_shapes():
        policy = make_policy(config.policy, spec, config.seed)
    return policy if size_of(policy.state_dict().values()) > LARGE else None


def counted_plan(config: TrainConfig, env, policy) -> Plan:
    """The plan of a run whose policy is made of shapes."""
    from robo_rl.files import free_memory

    speed = operations_per_second(config.device)
    outside, held = simulators_outside(config, env)
    process, free = resident(), free_memory() + held
    if config.device != "cpu":
        process, free = 0, torch.cuda.mem_get_info(torch.device(config.device))[0]
    more, seconds, update, _ = parts_of(replace(config, device="cpu"), env, policy, speed)
    teaching = supervision_of(config, env, policy, update)
    env.close()
    where = "process: interpreter, torch, sim" if config.device == "cpu" else "process: counted on the host"
    every = (PlanPart(where, process), *more, *outside)
    plan = Plan(every, tuple(seconds), free, config.device, speed, *teaching)
    return counted(config, env, plan)


def parts_of(
    config: TrainConfig, env, policy, speed: float = 0.0
) -> tuple[list[PlanPart], list[tuple[str, float]], float, tuple[int, float]]:
    """(what the run has beside its process, seconds of each part of an update, seconds of a supervised one,
    updates of --rl.pretrain and their seconds). speed: operations a second, of a policy of shapes."""
    from robo_rl.algos.check import with_demos
    from robo_rl.experiment.methods import find_method
    from robo_rl.experiment.sft import rounds

    counting = only_shapes if speed else contextlib.nullcontext
    parts: list[PlanPart] = []
    weights, learns = (
        size_of(policy.state_dict().values()),
        [p for p in policy.parameters() if p.requires_grad],
    )
    parts.append(PlanPart("weights", weights))
    seconds: list[tuple[str, float]] = []
    supervised = 0.0
    if rounds(config) or config.algo == "bc":
        with counting():
            more, supervised = supervised_parts(config, policy, learns, speed)
        parts += more
        seconds = [("supervised update", supervised)]
    if isinstance(config.rl, RecapOptions) and config.algo != "bc":
        parts.append(PlanPart("the supervised policy", weights))
    elif config.algo != "bc":
        # a critic is small; what it leaves frozen is so from now on
        learner = with_demos(find_method(config.algo), config.rl, policy)(policy, config.rl, config.seed)
        if isinstance(config.rl, OffPolicyOptions):
            more, seconds, first = replay_parts(config, env, policy, learner)
            return parts + more, seconds, supervised, first
        with counting():
            more, seconds = rl_parts(config, env, policy, learner, weights, speed)
        parts += more
    return parts, seconds, supervised, (0, 0.0)


def supervision_of(config: TrainConfig, env, policy, update: float) -> tuple[tuple[SupervisedTime, ...], str]:
    """(times of supervision, which rounds may follow its first), `update` [s] of one of its updates. How many
    frames demonstrations will have is not known before: as many as an episode may have."""
    from robo_rl.data.meta import load_meta
    from robo_rl.experiment.sft import asks, rounds
    from robo_rl.types import task_names

    if not (planned := rounds(config)):
        return (), ""
    every = max(1, config.bc.head_every or config.data.every)
    recorded = planned[0].demos > 0
    if recorded:
        each = len(task_names(env)) * (1 + (env.spec.max_steps - 1) // every)
        first = planned[0].demos * each
        actions = torch.zeros(env.num_envs, policy.spec.action).numpy()
        drawing = timed(lambda: env.step(actions)) / env.num_envs if config.bc.head else 0.0
    else:
        first = int(load_meta(config.demos).info["total_frames"]) // every
        drawing = 0.0
    # of other demonstrations each round, or of the same ones again
    most = first * planned[-1].demos // planned[0].demos if asks(config) else first * len(planned)
    option = f"--demos-most {config.demos_most}" if asks(config) else f"--bc.most {config.bc.most}"
    more = f"{len(planned) - 1} rounds more ({option})" if len(planned) > 1 else ""
    return supervised_times(config, policy, planned, update, (first, most), drawing), more


def supervised_times(
    config: TrainConfig, policy, planned: list, update: float, frames: tuple[int, int], drawing: float = 0.0
) -> tuple[SupervisedTime, ...]:
    """Times of the `sft.SupervisedRound`s `planned`. update, drawing [s]: of a supervised update, of the
    picture of a frame; frames: that the trunk looks at for the head, in the first round and in all."""
    from robo_rl.experiment.head_stage import PIECE, head_batch
    from robo_rl.experiment.new_policy import COMPARED, SHORT, compares
    from robo_rl.policies.check import observations

    times = [SupervisedTime("updates", planned[0].updates, sum(r.updates for r in planned), update)]
    if compares(config):
        tried = SHORT * len(COMPARED)
        times.append(SupervisedTime("updates of two policies that are compared", tried, tried, update))
    if config.bc.head:
        obs = {k: v.to(config.device) for k, v in observations(policy.spec, PIECE).items()}
        with torch.no_grad():
            looking = drawing + timed(lambda: policy.encode(obs)) / PIECE
        rows, noises = head_batch(config.bc)
        loss = supervised_loss(policy, noises, pooled=True)
        learning = timed(lambda: loss(rows).backward())
        times += [
            SupervisedTime("frames looked at, at most", *frames, looking),
            SupervisedTime("updates of the head", planned[0].head, sum(r.head for r in planned), learning),
        ]
    return tuple(times)


def averaged(params: list) -> int:
    """Bytes of the average of parameters, which has float32 of those in bf16."""
    return sum(p.numel() * max(4, p.element_size()) for p in params)


def moments(params: list) -> int:
    """Bytes that AdamW keeps of parameters: two in float32, and a master of those in bf16."""
    return sum(
        p.numel() * (12 if p.dtype in (torch.bfloat16, torch.float16) else 2 * p.element_size())
        for p in params
    )


def supervised_parts(
    config: TrainConfig, policy, learns: list, speed: float = 0.0
) -> tuple[list[PlanPart], float]:
    """Memory of the supervised stage, and seconds of one of its updates."""
    loss = supervised_loss(policy, config.bc.noises)
    saved, seconds = extrapolated(policy, loss, config.bc.batch, speed)
    parts = [
        PlanPart("average of the weights", averaged(learns), "supervised"),
        PlanPart("gradients", size_of(learns), "supervised"),
        PlanPart("moments of AdamW", moments(learns), "supervised"),
        PlanPart("activations", saved, "supervised"),
    ]
    return parts, seconds


def supervised_loss(policy, noises: int = 1, pooled: bool = False) -> Callable[[int], Tensor]:
    """The supervised loss of so many demonstrated chunks; pooled: the trunk has looked at them before."""
    from robo_rl.devices import device_of
    from robo_rl.policies.check import observations
    from robo_rl.policies.context import PREFIX

    device = device_of(policy)

    def loss(rows: int) -> Tensor:
        mask = torch.ones(rows, policy.options.horizon, device=device)
        obs = {k: v.to(device) for k, v in observations(policy.spec, rows).items()}
        if pooled:
            seen = torch.zeros(rows, policy.context_size, device=device)
            obs = {"state": obs["state"], PREFIX: seen}
        return policy.bc_loss(
            obs,
            mask[..., None].expand(-1, -1, policy.spec.action),
            mask,
            torch.Generator().manual_seed(0),
            noises,
        )

    return loss


def rl_parts(
    config: TrainConfig, env, policy, learner, weights: int, speed: float = 0.0
) -> tuple[list[PlanPart], list[tuple[str, float]]]:
    """Memory of RL, and seconds of each part of an update."""
    from robo_rl.policies.check import observations
    from robo_rl.rollout import OBS, TRACE, layout

    rl = config.rl
    assert isinstance(rl, OnPolicyOptions)
    critic = list(learner.credit.params)
    learns = [p for p in policy.parameters() if p.requires_grad] + critic
    rows, decisions = rollout_rows(config, env)
    one, few = (
        {k: v.to(config.device) for k, v in (observations(policy.spec, n) | rows_given(policy, n)).items()}
        for n in ROWS
    )
    made: list[Any] = []

    def act(obs: dict = one) -> None:
        made.append(policy.act(obs, torch.Generator().manual_seed(0), True))

    acting = timed(act, speed) / ROWS[0] if speed else timed(lambda: act(few)) / ROWS[1]
    if not speed:
        act()
    chunk = made[-1]
    columns = layout(policy, one, chunk=chunk)
    each = {
        k: dtype.itemsize * int(torch.Size(shape).numel()) / ROWS[0] for k, (shape, dtype) in columns.items()
    }
    rollout = sum(v * (1 + k.startswith(OBS) / decisions) for k, v in each.items()) * rows
    seen = sum(v for k, v in each.items() if k.startswith(OBS))
    # 12: advantage, return and value
    learnt = sum(v for k, v in each.items() if k.startswith(TRACE)) + each["logp"] + 12
    trace = {k: v[:1] for k, v in chunk.trace.items()}

    def loss(n: int) -> Tensor:
        obs = {k: v[:1].expand(n, *v.shape[1:]) for k, v in one.items()}
        return policy.score(policy.encode(obs), {k: v.expand(n, *v.shape[1:]) for k, v in trace.items()})[
            0
        ].sum()

    size = min(rl.minibatch, rows)
    saved, learning = extrapolated(policy, loss, size, speed)
    frozen = not any(p.requires_grad for p in policy.trunk.parameters())
    replayed = int(rollout * rl.replay_age) if rl.replay else 0
    rows = int(rows / (1 - rl.replay))
    parts = [
        PlanPart("critic", size_of(critic)),
        PlanPart("gradients", size_of(learns)),
        PlanPart("moments of AdamW", moments(learns)),
        PlanPart("rollouts", int(rollout)),
        PlanPart("rows in the order of learning", int((learnt + seen * frozen) * rows), "update"),
        PlanPart("activations", saved + int(seen * size), "update"),
    ]
    if rl.advantage == "istar":
        parts.append(PlanPart("second policy, of istar", weights + size_of(learns) + moments(learns)))
    average = averaged(learns[: -len(critic)]) if rl.average else 0
    if average:
        parts.append(PlanPart("average of the weights that RL moves", average))
    if replayed:
        parts.append(PlanPart("rollouts that are replayed", replayed))
    if frozen and policy.spec.views:
        context = policy.encode(one)
        kept = context.columns().values() if hasattr(context, "columns") else [context]
        parts.append(
            PlanPart(
                "contexts of a frozen trunk",
                int(size_of(kept) / ROWS[0] * rows * (2 + 1 / decisions)),
                "update",
            )
        )
    if rl.bc_coef or rl.recycle or config.starts in ("auto", "reverse"):
        more, _ = extrapolated(policy, supervised_loss(policy), size, speed)
        beside = (
            "update"
            if rl.bc_coef or rl.recycle or config.starts == "reverse"
            else "update, only where supervision leaves no success"
        )
        parts.append(PlanPart("supervision beside RL", more, beside))
    parts.append(PlanPart("copies for a checkpoint", int(rollout) + replayed, "checkpoint"))
    if n := workers(config):
        parts.append(PlanPart(f"weights in {n} workers", 2 * n * weights))
    share = max(1, n)
    return parts, [
        ("simulator", simulator_seconds(config, env, policy) * decisions / share),
        ("policy", acting * min(config.envs, rows) * decisions / share),
        ("learner", learning * -(-rows // size) * rl.epochs),
    ]


def rollout_rows(config: TrainConfig, env) -> tuple[int, int]:
    """(decisions of a rollout, of which so many follow one another in an env)."""
    group, o = group_size(config), rollout_options(config)
    decisions = -(-env.spec.max_steps // config.policy.execute) if group else o.decisions
    return (batch(config) if group else config.envs) * decisions, decisions


def rows_given(policy, n: int) -> dict[str, Tensor]:
    """What n observations have beside what the env gives, where the policy decides while its last chunk
    runs."""
    from robo_rl.policies.committed import first_rows

    given = (
        first_rows(policy.options, policy.spec.action, torch.ones(n, dtype=torch.int64).numpy())
        if policy.options.commit_least
        else {}
    )
    return {k: torch.from_numpy(v) for k, v in given.items()}


def load_what_a_run_needs(env) -> None:
    """Draw once, and write and read a table as demonstrations are: libraries are a fifth of a small run's
    memory."""
    import pyarrow
    from pyarrow import parquet

    env.reset(seed=0)
    if env.spec.views:
        importlib.import_module("av")
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"action": [[0.0] * 8] * 64}), sink)
    parquet.read_table(pyarrow.BufferReader(sink.getvalue()))


def settle(policy, rows: int) -> None:
    """Act, and learn once, so that what torch allocates for itself is there."""
    from robo_rl.policies.check import observations

    chunk = policy.act(observations(policy.spec, rows), torch.Generator().manual_seed(0), True)
    if policy.options.acts in FROM_REPLAY:
        supervised_loss(policy)(rows).backward()
    else:
        policy.score(policy.encode(observations(policy.spec, rows)), chunk.trace)[0].sum().backward()
