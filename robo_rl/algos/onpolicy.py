"""The loop every ratio method shares: re-score the trace, clip, step. The methods differ in `Rules` alone.

    adv, returns = credit(rollout)                     GAE on the critic, or group advantage of whole episodes
    for epoch, for minibatch:
        logp = policy.score(encode(obs), trace)        [B,F]; the same weights give the stored logp exactly
        loss = ppo(logp, logp_old, adv) + critic + rules.extra + bc_coef * supervised

Data of older weights is corrected by `robo_rl.algos.stale`: logp_old is then the anchor's, and samples have
weights.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from robo_rl import losses
from robo_rl.advantages import whiten
from robo_rl.algos.credit import (
    Credit,
    columns_seen,
    density_scale,
    descend,
    flat,
    make_adam,
    pick,
    step_along,
)
from robo_rl.algos.rehearsal import Rehearsal
from robo_rl.algos.rollout_replay import RolloutReplay
from robo_rl.algos.stale import Corrector
from robo_rl.algos.step_rewards import StepRewards
from robo_rl.algos.trust import TrustRegion, near_success
from robo_rl.algos.update_metrics import average, effective, of_fresh, value_metrics
from robo_rl.devices import device_of, moved
from robo_rl.errors import UserError
from robo_rl.optim import Optimizer
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.context import PREFIX, Context
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, Obs
from robo_rl.rollout import Rollout, one_thread

# batch size -> obs, chunk[B,H,A], mask[B,H]
Demos = Callable[[int, torch.Generator], tuple[Obs, Tensor, Tensor]]


class Learner(Protocol):
    """What learns: one rollout in, metrics out, with everything it owns in `state_dict`.

    `version` names the learner's weights before the update, as `rollout.version` names those that acted;
    None: the same.
    """

    policy: "ChainPolicy | GaussianPolicy"

    @property
    def sampler(self) -> "ChainPolicy | GaussianPolicy": ...
    def update(self, rollout: Rollout, progress: float, version: int | None = None) -> dict[str, float]: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...


@dataclass(frozen=True)
class Rules:
    """What makes a method: joint ratio of the whole chain or one per factor, its clips and weights [F]."""

    joint: bool = True
    clip_low: "Tensor | float" = 0.2
    clip_high: "Tensor | float" = 0.2
    weight: Tensor | None = None  # multiplies the advantage of each factor
    # context, the learner's generator -> loss
    extra: "Callable[[Context, torch.Generator], Tensor] | None" = None


class OnPolicyLearner:
    """Owns critic, optimizers, reward scale and its generator; `rules(progress)` says which method it is.

    `settle(progress)` moves what of the policy follows a schedule. It runs at the end of an update, so that
    whatever a log-prob depends on is part of the version that is published next and stays as it is until that
    version is replaced.
    """

    def __init__(
        self,
        policy: "ChainPolicy | GaussianPolicy",
        options: OnPolicyOptions,
        rules: Callable[[float], Rules],
        seed: int,
        demos: Demos | None = None,
        settle: Callable[[float], None] = lambda progress: None,
    ):
        self.policy, self.options, self.rules, self.demos, self.settle = policy, options, rules, demos, settle
        check_statistics(policy, options)
        if options.freeze_trunk:
            policy.trunk.requires_grad_(False)
        self.step_rewards = StepRewards(policy, options) if options.advantage == "istar" else None
        self.credit = Credit(policy, options, seed, self.step_rewards)
        self.actor_params = [p for p in policy.parameters() if p.requires_grad]
        self.actor_opt = make_adam(self.actor_params, options.lr)
        self.trust = (
            TrustRegion(self.actor_params, self.actor_opt, options.lr, options.trust_kl)
            if options.trust_kl
            else None
        )
        self.generator = torch.Generator().manual_seed(seed + 2)
        self.corrector = Corrector(options)
        self.replay = RolloutReplay(
            options.replay,
            options.replay_age,
            1 if options.advantage == "gae" else options.group,
            seed,
            options.advantage != "gdpo" and not options.flawed,
            options.replay_stop,
        )
        self.iteration = 0
        self.step_scale = 1.0  # of the size of updates; smaller after a return to an earlier checkpoint
        self.rehearsal: Rehearsal | None = None  # of the options' rehearse; who runs the learner gives it
        self.lessons: Demos | None = None  # of the options' recycle; who runs the learner gives it
        self.supervision = 1.0  # share of bc_coef that is in force, which who runs the learner may lower
        # of a rank among several (runtime.sharded)
        self.share, self.total_norm, self.mean = slice(None), None, float

    @property
    def sampler(self):
        """The policy that acts: the one that learns."""
        return self.policy

    # ---- one update ----------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, progress: float, version: int | None = None) -> dict[str, float]:
        """Several epochs over one rollout; progress in [0, 1] drives schedules.

        `version` is that of the present weights; chunks that others acted are corrected (None: all are of the
        present).
        """
        o, policy = self.options, self.policy
        rollout = encoded_pictures(
            policy, moved(self.replay.compose(discounted(rollout, o), self.iteration), device_of(policy))
        )
        self.corrector.keep(policy, version)
        rules = self.rules(progress)
        anneal(o, progress, self.actor_opt, self.credit.opt)
        with threads_for(policy, rollout):
            corrected = self.corrector.correct(rollout, policy, version, rules.joint)
            adv, returns, values, rows, metrics = self.credit.assign(rollout, policy, corrected.log_rho)
        metrics |= corrected.metrics
        if len(rows) == 0:
            self.iteration += 1
            self.settle(progress)
            return metrics | {"skipped": 1.0} | self.learn_lessons()
        with threads_for(policy, rollout):
            obs = encoded_once(policy, flat(rollout.obs))
        fixed = PREFIX in obs
        # permuted with the other columns; keys and values are picked, which moves them once
        pooled = fixed and len(obs) == 1
        acted = {"logp_old": rollout.logp.flatten(0, 1), "adv": adv}
        actor_columns = flat(rollout.trace) | acted | corrected.columns
        critic_columns = {"returns": returns, "values": values} | (columns_seen(obs) if fixed else {})
        orders = shuffled(rows, o.epochs, self.generator)
        logs, value_losses, tails = list[dict[str, Tensor]](), list[Tensor](), list[Tensor]()
        gae = o.advantage == "gae"
        actor_on, trust = self.credit.is_ready(o, self.iteration, metrics), self.trust
        if actor_on and trust:
            trust.begin(
                policy,
                obs,
                flat(rollout.trace),
                rows,
                o.epochs * steps_of(len(rows), o.minibatch),
                self.mean,
                corrected.lr_scale,
                self.step_scale * undecided(rollout.stats),
            )

        def actor() -> None:
            for epoch, order in enumerate(orders):
                tails.clear()
                for batch, row in minibatches(
                    actor_columns | (obs if pooled else {}),
                    order,
                    o.minibatch,
                    self.share,
                    o.whiten == "minibatch",
                ):
                    context = policy.encode(row if pooled else pick(obs, batch))
                    step, log_ratio = self.actor_step(context, row, rules)
                    if trust:
                        trust.stepped()
                    tails.append(of_fresh(log_ratio, batch, rollout))
                    if not logs:
                        metrics["first_log_ratio"] = float(tails[0].abs().max())
                    logs.append(step)
                    if gae and not fixed:
                        value_losses.append(self.credit.step(context, returns[batch], values[batch]))
                    if o.target_kl and self.mean(step["kl"]) > o.target_kl:
                        metrics["epochs"] = epoch + 1.0
                        return

        def critic(most: float = float("inf"), parts: int = 1) -> None:
            for order in orders:
                for batch, row in minibatches(critic_columns, order, -(-o.minibatch // parts), self.share):
                    if len(value_losses) >= most:
                        return
                    with torch.no_grad():
                        context = policy.encode(row if fixed else pick(obs, batch))
                    value_losses.append(self.credit.step(context, row["returns"], row["values"]))

        metrics["epochs"] = float(o.epochs)
        with scaled_lr(self.actor_opt, 1.0 if trust else corrected.lr_scale * self.step_scale):
            if not actor_on:
                critic(parts=ALONE)
            elif not (gae and fixed):
                actor()
            elif o.target_kl:
                actor()
                critic(most=len(logs))
            else:
                beside(actor, critic)
        self.iteration += 1
        self.settle(progress)
        with threads_for(policy, rollout):
            metrics |= value_metrics(value_losses) if value_losses else {}
            if logs:
                metrics |= self.told(logs, tails) | {
                    "ess": effective(tails, rules.joint, density_scale(policy))
                }
        if logs and "active" in logs[0]:
            self.corrector.updated(float(logs[0]["active"]))
        return metrics

    def learn_lessons(self) -> dict[str, float]:
        """What a teacher did, alone, where RL has nothing to learn from: a step for each epoch -> metrics."""
        o, told = self.options, {}
        for _ in range(o.epochs if o.recycle and self.lessons else 0):
            assert self.lessons is not None
            loss = self.policy.bc_loss(*self.lessons(o.minibatch, self.generator), self.generator)
            with scaled_lr(self.actor_opt, ramped(self.actor_opt, o.ramp) * self.step_scale):
                descend(
                    o.recycle_coef * loss, self.actor_params, self.actor_opt, o.max_grad_norm, self.total_norm
                )
            told["recycle_loss"] = float(loss.detach())
        return told

    def told(self, logs: list[dict[str, Tensor]], tails: list[Tensor]) -> dict[str, float]:
        """Metrics of the actor's steps; a trust region's `kl` is the true one of the update, and theirs is
        `kl_sample`."""
        metrics = average(logs, tails)
        return metrics | ({"kl_sample": metrics["kl"]} | self.trust.end() if self.trust else {})

    def accumulate(self, pieces: Iterable[Rollout], progress: float) -> dict[str, float]:
        """One step on a batch of fresh groups that comes in pieces: the gradient of each is added up as it
        comes, under weights that do not change, and divided by the rows of all at the end.

        The same gradient as `update` with one epoch and one minibatch has, up to the order of summation, for
        a group's advantage needs no other group. Periodic asynchrony, arXiv 2511.18871.
        """
        o, policy, rules, trust = self.options, self.policy, self.rules(progress), self.trust
        anneal(o, progress, self.actor_opt, self.credit.opt)
        for p in self.actor_params:
            p.grad = None
        rows_in_all, logs, tails, told, sound = 0, [], [], [], True
        for rollout in pieces:
            rollout = encoded_pictures(policy, moved(rollout, device_of(policy)))
            adv, _, _, rows, metrics = self.credit.assign(rollout, policy)
            told.append(metrics)
            columns = flat(rollout.trace) | {"logp_old": rollout.logp.flatten(0, 1), "adv": adv}
            # of the first piece: none of the others has to be kept
            if trust and len(rows) and not rows_in_all:
                trust.begin(
                    policy,
                    flat(rollout.obs),
                    flat(rollout.trace),
                    rows,
                    1,
                    size=self.step_scale * undecided(rollout.stats),
                )
            for batch in rows.split(o.minibatch) if len(rows) else ():
                loss, step, log_ratio = self.actor_loss(
                    policy.encode(pick(flat(rollout.obs), batch)), pick(columns, batch), rules
                )
                (loss * len(batch)).backward()
                sound = sound and math.isfinite(loss.item())
                logs.append(step)
                tails.append(log_ratio)
                rows_in_all += len(batch)
        self.iteration += 1
        metrics = {k: sum(m[k] for m in told) / len(told) for k in told[0]}
        if not rows_in_all:
            self.settle(progress)
            return metrics | {"skipped": 1.0}
        for p in self.actor_params:
            if p.grad is not None:
                p.grad /= rows_in_all
        with scaled_lr(self.actor_opt, ramped(self.actor_opt, o.ramp) * (1.0 if trust else self.step_scale)):
            norm = step_along(self.actor_params, self.actor_opt, o.max_grad_norm, sound=sound)
        if trust:
            trust.stepped()
        self.settle(progress)
        metrics["first_log_ratio"] = float(torch.cat(tails).sum(-1).abs().max())
        return metrics | self.told([step | {"grad_norm": norm} for step in logs], tails) | {"epochs": 1.0}

    def actor_step(
        self, context: Context, row: dict[str, Tensor], rules: Rules
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One step on a minibatch -> metrics and the log ratios [B,F] before the step; arguments as
        `actor_loss`."""
        loss, step, log_ratio = self.actor_loss(context, row, rules)
        ramp = self.options.ramp
        with scaled_lr(self.actor_opt, ramped(self.actor_opt, ramp)) if ramp else nullcontext():
            step["grad_norm"] = descend(
                loss, self.actor_params, self.actor_opt, self.options.max_grad_norm, self.total_norm
            )
        return step, log_ratio

    def actor_loss(
        self, context: Context, row: dict[str, Tensor], rules: Rules
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss of a minibatch: its context, and in `row` its trace, `logp_old` [B,F] and `adv` [B], if
        corrected also `weight` [B] or [B,F], or `alpha` [B]; with metrics and the log ratios [B,F]."""
        o, policy = self.options, self.policy
        new, entropy = policy.score(context, row)
        old, weight, told = row["logp_old"], row.get("weight"), {}
        if "alpha" in row:
            old, weight, told = self.corrector.between(new.detach(), row, rules.joint)
        loss, step = surrogate(new, old, row["adv"], rules, o.dual_clip, weight, o.correction == "remix")
        step |= told
        step["policy_loss"], step["entropy"] = loss.detach(), entropy.detach()
        log_ratio = new.detach() - old
        if o.entropy_coef:
            loss = loss - o.entropy_coef * entropy
        if rules.extra is not None:
            loss = loss + rules.extra(context, self.generator)
        if o.bc_coef and self.supervision and self.demos is not None:
            loss = loss + o.bc_coef * self.supervision * policy.bc_loss(
                *self.demos(len(context), self.generator), self.generator
            )
        if o.recycle and self.lessons:
            taught = policy.bc_loss(*self.lessons(len(context), self.generator), self.generator)
            loss, step["recycle_loss"] = loss + o.recycle_coef * taught, taught.detach()
        if o.rehearse and self.rehearsal:
            forgotten = self.rehearsal.loss(policy, len(context), self.generator)
            loss, step["rehearsal"] = loss + o.rehearse * forgotten, forgotten.detach()
        return loss, step, log_ratio

    def after_collect(self, rollout: Rollout) -> None:
        """Move running observation statistics; only between rollouts."""
        with threads_for(self.policy, rollout):
            move_statistics(self.policy, self.options, rollout)

    def state_dict(self) -> dict:
        return (
            {
                "credit": self.credit.state_dict(),
                "actor_opt": self.actor_opt.state_dict(),
                "generator": self.generator.get_state(),
                "iteration": self.iteration,
                "step_scale": self.step_scale,
                "corrector": self.corrector.state_dict(),
                "trust": self.trust.state_dict() if self.trust else {},
            }
            | ({"replay": self.replay.state_dict()} if self.options.replay else {})
            | ({"step_rewards": self.step_rewards.state_dict()} if self.step_rewards else {})
        )

    def load_state_dict(self, state: dict) -> None:
        self.credit.load_state_dict(state["credit"])
        self.actor_opt.load_state_dict(state["actor_opt"])
        self.generator.set_state(state["generator"])
        self.iteration, self.step_scale = state["iteration"], state.get("step_scale", 1.0)
        if "corrector" in state:  # not in checkpoints of before it
            self.corrector.load_state_dict(state["corrector"])
        if self.trust and state.get("trust"):
            self.trust.load_state_dict(state["trust"])
        if self.step_rewards:
            self.step_rewards.load_state_dict(state["step_rewards"])
        if self.options.replay:
            self.replay.load_state_dict(state["replay"])


@torch.no_grad()
def encoded_once(policy, obs: Obs, size: int = 512) -> Obs:
    """Observations [B,...] as the columns of their context where nothing is learnt between the two, or as
    they are."""
    if PREFIX in obs or any(p.requires_grad for p in policy.trunk.parameters()):
        return obs
    parts = torch.arange(len(obs["state"]), device=obs["state"].device).split(size)
    return Context.cat([policy.encode(pick(obs, part)) for part in parts]).columns()


def encoded_pictures(policy, r: Rollout) -> Rollout:
    """A rollout of pictures whose encoder is frozen, with contexts in their place: every later use encodes
    nothing.

    Contexts that were kept with the decisions (`--policy.keep-prefix`) are taken as they are.
    """
    kept = {k: v for k, v in r.trace.items() if k.split("/")[0] == PREFIX}
    trace = {k: v for k, v in r.trace.items() if k not in kept}
    if kept and any(p.requires_grad for p in policy.trunk.parameters()):
        kept = {}
    dense = flat(kept) if kept else encoded_once(policy, flat(r.obs)) if policy.spec.views else {}
    if PREFIX not in dense:
        return replace(r, trace=trace) if len(trace) < len(r.trace) else r
    obs = {k: v.unflatten(0, r.mask.shape) for k, v in dense.items()}
    last, final = (
        encoded_once(policy, o) if len(o["state"]) else {k: v[:0] for k, v in dense.items()}
        for o in (r.last_obs, r.final_obs)
    )
    return replace(r, obs=obs, trace=trace, last_obs=last, final_obs=final)


# times as many steps, each on as much less, that the critic makes of a rollout from which the policy does not
# learn yet
ALONE = 4
SMALL = 4096  # decisions of a rollout that one thread reads in some milliseconds


def undecided(stats: dict[str, float]) -> float:
    """`trust.near_success` that a run's `Outcomes` told of a rollout with these statistics; without, of the
    episodes that ended in it: 1 where none did, or none says success."""
    if "undecided" in stats:
        return stats["undecided"]
    n = stats.get("episodes", 0.0)
    return near_success(stats["success"] * n, n) if n and "success" in stats else 1.0


def discounted(rollout: Rollout, options: OnPolicyOptions) -> Rollout:
    """The rollout with the discounts that --rl.timeout and --rl.anneal-gamma ask for."""
    discounts, fade = rollout.discounts, undecided(rollout.stats)
    if options.anneal_gamma:
        discounts = discounts**fade
    if options.timeout != "bootstrap":
        over = rollout.done if rollout.cut is None else rollout.done & ~rollout.cut
        discounts = discounts.where(~over, discounts * (fade if options.timeout == "anneal" else 0.0))
    return replace(rollout, discounts=discounts)


def check_statistics(policy, options: OnPolicyOptions) -> None:
    """UserError: running statistics are asked of a policy that has none."""
    if options.normalise_obs and not hasattr(policy.obs_norm, "update"):
        raise UserError(
            f"--rl.normalise-obs keeps running statistics, which --policy.kind {policy.options.kind} has "
            "none of"
        )


def move_statistics(policy, options: OnPolicyOptions, rollout: Rollout) -> None:
    """With --rl.normalise-obs: the states of the decisions that were made join the running statistics."""
    if options.normalise_obs and rollout.mask.any():
        policy.obs_norm.update(rollout.obs["state"][rollout.mask].to(device_of(policy)))


def anneal(options: OnPolicyOptions, progress: float, actor: Optimizer, critic: Optimizer) -> None:
    """Set the learning rates that follow a schedule."""
    if options.anneal_lr:
        actor.param_groups[0]["lr"] = options.lr * (1 - progress)
        critic.param_groups[0]["lr"] = options.critic_lr * (1 - progress)


@contextmanager
def scaled_lr(opt: Optimizer, scale: float):
    """The learning rate times `scale`, until the end of the block, however it ends."""
    before = [group["lr"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = group["lr"] * scale
    try:
        yield
    finally:
        for group, lr in zip(opt.param_groups, before, strict=False):
            group["lr"] = lr


def ramped(opt: Optimizer, ramp: int) -> float:
    """Factor on the learning rate of the next step: (steps taken + 1)/ramp, at most 1; 1 without a ramp.

    In Adam's first steps m/sqrt(v) is the sign of the gradient, so every weight moves by the whole learning
    rate.
    """
    if not ramp:
        return 1.0
    taken = next((float(s["step"]) for s in opt.state.values()), 0.0)
    return min(1.0, (taken + 1) / ramp)


def minibatches(
    columns: dict[str, Tensor], order: Tensor, size: int, share: slice = slice(None), anew: bool = False
):
    """(row indices, rows of every column) of each minibatch of `order`; a small remainder would step on
    noise.

    Columns are permuted once, so that a minibatch is a view. `share`: the rows of each that are this rank's,
    as many as every other's: a remainder that does not divide evenly loses its last rows. `anew`: "adv" is
    whitened in each minibatch.
    """
    shuffled, world = pick(columns, order), share.step or 1
    if anew:
        shuffled["adv"] = torch.cat([whiten(x) if len(x) > 1 else x for x in shuffled["adv"].split(size)])
    for i in range(0, len(order), size):
        batch = order[i : i + size]
        if len(batch) >= min(size, len(order)) // 2:
            end = i + len(batch) // world * world
            yield order[i:end][share], {k: v[i:end][share] for k, v in shuffled.items()}


def shuffled(rows: Tensor, epochs: int, generator: torch.Generator) -> list[Tensor]:
    """An order of `rows` [M] for each epoch."""
    return [rows[torch.randperm(len(rows), generator=generator).to(rows.device)] for _ in range(epochs)]


def steps_of(rows: int, size: int) -> int:
    """Minibatches that `minibatches` makes of so many rows."""
    rest = rows % size
    return max(1, rows // size + (rows > size and rest >= size // 2 and rest > 0))


def threads_for(policy, rollout: Rollout):
    """The context to read a whole rollout in: one thread where it is small. Between two small operations a
    second thread spins on the core that the simulator, or the other of two jobs, wants next."""
    return one_thread() if not policy.spec.views and rollout.mask.numel() <= SMALL else nullcontext()


def beside(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run two independent jobs: side by side where torch may use two threads or more, else in turn.

    Two jobs on one thread each beat two threads on every small product, and a job's arithmetic is that of one
    thread.
    """
    threads = torch.get_num_threads()
    if threads < 2:
        first()
        second()
        return
    torch.set_num_threads(threads // 2)
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(second)
            first()
            other.result()
    finally:
        torch.set_num_threads(threads)


def surrogate(
    logp: Tensor,
    logp_old: Tensor,
    adv: Tensor,
    rules: Rules,
    dual_clip: float,
    weight: Tensor | None = None,
    around: bool = False,
):
    """logp[B,F], adv[B] -> loss: one ratio for the joint density, or one per factor with weight and clip [F].

    `weight` w of the samples: [B], or [B,F] where each factor has a ratio of its own. `around`: w rho, the
    ratio to who acted, is clipped to [w - clip_low, w + clip_high] (ReMix)."""
    if not rules.joint and weight is not None and weight.dim() == 1:
        weight = weight[:, None].expand_as(logp)
    low, high = (x if weight is None or not around else x / weight for x in (rules.clip_low, rules.clip_high))
    if rules.joint:
        return losses.ppo(logp.sum(-1), logp_old.sum(-1), adv, low, high, dual_clip, weight)
    weighted = adv[:, None] if rules.weight is None else adv[:, None] * rules.weight
    return losses.ppo(logp, logp_old, weighted.expand_as(logp), low, high, dual_clip, weight)
