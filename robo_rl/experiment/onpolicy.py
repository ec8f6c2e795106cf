"""The loop of the on-policy methods: take a batch, learn from it, publish the weights; evaluate and save on
the way."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from robo_rl.algos.trust import Outcomes
from robo_rl.experiment import allocation, feeds, own_successes
from robo_rl.experiment.config import TrainConfig, rollout_options
from robo_rl.experiment.methods import check_learnt, find_method
from robo_rl.experiment.parallel import batch, group_size, workers
from robo_rl.experiment.recipes import shown_return
from robo_rl.experiment.recycle import Recycler, make_recycler
from robo_rl.experiment.rehearsal import make_rehearsal
from robo_rl.experiment.run import Cadence, Run, Stopped
from robo_rl.experiment.sft import demo_folder
from robo_rl.experiment.staleness_guard import StalenessGuard
from robo_rl.experiment.starts import BESIDE, early_rounds, make_control, supervision
from robo_rl.experiment.supervised_frames import load_frames
from robo_rl.experiment.tasks import task_metrics
from robo_rl.files import cores
from robo_rl.log import si
from robo_rl.options import OnPolicyOptions
from robo_rl.rollout_control import StartControl
from robo_rl.types import task_names

if TYPE_CHECKING:
    from robo_rl.algos.rehearsal import Rehearsal
    from robo_rl.experiment.share import ExperienceSharing
    from robo_rl.runtime.planned import PlannedGroups

SAVE_EVERY = 20.0  # s
GATHERING, TOLD = 5.0, 1.0  # s without an update before the progress line tells what is gathered, and between
RETURNS = 4  # most that a run that fell below the policy RL began with goes back to its best checkpoint
SMALLER = 0.5  # factor on the size of its steps from then on: a quarter of their KL


def make_learner(run: Run, beside: float = 0.0):
    """The learner of the chosen method, with the demonstrations where it keeps supervision beside RL: with
    the weight `beside`, unless --rl.bc-coef says another."""
    config, demos = run.config, None
    rl = rollout_options(config)
    if isinstance(rl, OnPolicyOptions) and (config.dream or config.sim.startswith("wm:")):
        rl = replace(rl, timeout="bootstrap")
    if config.learners > 1:
        from robo_rl.runtime.sharded import ShardedLearner

        assert isinstance(rl, OnPolicyOptions)
        return ShardedLearner(config.algo, run.policy, rl, config.seed, config.learners, run.folder / "ranks")
    rl = rl if rl.bc_coef else replace(rl, bc_coef=beside)
    if rl.bc_coef:
        from robo_rl.devices import device_of, sampled_on

        folder = demo_folder(run)
        assert folder is not None  # `train.check_method` has seen to it
        demos = sampled_on(device_of(run.policy), load_frames(run, folder).sampler(config, run.policy.spec))
    return find_method(config.algo)(run.policy, rl, config.seed, demos=demos)


def split(config: TrainConfig) -> tuple[str, ...]:
    """What of a checkpoint stays in its files, for each rank of a learner of several to read its own part."""
    return ("learner",) if config.learners > 1 else ()


def supervise(learner, control: StartControl | None) -> None:
    """Keep the share of the supervised loss beside RL that the starts' control asks for; shards have no such
    loss."""
    from robo_rl.algos.onpolicy import OnPolicyLearner

    if (share := supervision(control)) is not None and isinstance(learner, OnPolicyLearner):
        learner.supervision = share


def give(learner, rehearsal: "Rehearsal | None", lessons: "Recycler | None") -> None:
    """What a learner has beside rollouts; shards and methods of the user's own have none of it."""
    from robo_rl.algos.onpolicy import OnPolicyLearner

    if isinstance(learner, OnPolicyLearner):
        learner.rehearsal, learner.lessons = rehearsal, lessons


def rl_stage(run: Run, checkpoint_folder: Path | None) -> int:
    """Online RL until --steps, from the supervised policy or a checkpoint -> the exit status."""
    from robo_rl import checkpoint
    from robo_rl.files import give_back_freed

    config = run.config
    run.policy.train()
    state = (
        checkpoint.load_train(checkpoint_folder, split(config))[0] if checkpoint_folder is not None else {}
    )
    if "learner" not in state and own_successes.begins(config, run):
        try:
            own_successes.learn_from_successes(run, state)
        except Stopped:
            return run.end_stopped()
        run.policy.train()
    if "learner" not in state:
        state, run.rl_from = {}, run.looks[-1].step if run.looks else 0
    average_weights(run, state.get("learns"))
    saved, control = state.get("feed"), make_control(run, state.get("starts"))
    planned = allocation.make_planned(config, control, state.get("groups"))
    learner = make_learner(run, 0.0 if supervision(control) is None else BESIDE)
    run.frames = run.pooled = None  # no later stage asks for them
    run.policy.zero_grad(set_to_none=True)  # what supervision needed
    give_back_freed()
    supervise(learner, control)
    try:
        rehearsal = make_rehearsal(run, state["rehearsal"] if state and "rehearsal" in state else None)
    except Stopped:
        return run.end_stopped()
    recycler = make_recycler(run, state.get("recycler"))
    give(learner, rehearsal, recycler)
    if state:
        learner.load_state_dict(state["learner"])
    guard = StalenessGuard(run.report.say)
    guard.load_state_dict(state.get("guard"))
    sharing = None
    if config.share:
        from robo_rl.experiment.share import make_sharing

        sharing = make_sharing(run, run.env.spec, state.get("share"))
    close = getattr(learner, "close", lambda: None)
    if config.dream:
        from robo_rl.experiment import dream

        feed, exact = dream.make_feed(config, run.folder, run.env, learner, saved, run.report.say, control)
    else:
        feed, exact = feeds.make_feed(
            config, run.folder, run.env, learner, saved, control=control, planned=planned
        )
    n = workers(config)
    if n > cores():
        run.report.say(
            f"{n} workers on {cores()} cores: sims that compute will share them and gain nothing; "
            f"--workers {cores()} is enough unless they mostly wait"
        )
    if not exact:
        run.report.say("this sim has no snapshots: episodes in flight start anew")
    try:
        guard.begin(feed)
        return improve(
            run, learner, feed, guard, make_outcomes(run, state.get("outcomes")), control, planned, sharing
        )
    finally:
        feed.close()
        close()
        if recycler is not None:
            recycler.close()


def average_weights(run: Run, learns: "list | None") -> None:
    """With --rl.average: keep the average of the weights that RL moves. `learns`: of a checkpoint, whose
    policy is the average, the weights that went on learning."""
    from robo_rl.algos.averaged_weights import AveragedWeights

    rl = run.config.rl
    if not getattr(rl, "average", 0.0):
        return
    fixed = {id(p) for p in run.policy.trunk.parameters()} if getattr(rl, "freeze_trunk", False) else set()
    run.average = AveragedWeights(
        [p for p in run.policy.parameters() if p.requires_grad and id(p) not in fixed]
    )
    if learns is not None:
        run.average.resume(learns)


def newest_weight(least: float, stats: dict[str, float]) -> float:
    """Weight of an update in the average: 1 while half or more of the episodes of its rollout fail, for much
    is still to be learnt; `near_success(p)^2` beyond, as the update's own size, and no less than `least`."""
    from robo_rl.algos.onpolicy import undecided

    return max(least, undecided(stats) ** 2)


def make_outcomes(run: Run, saved: "dict | None") -> Outcomes:
    """The run's count of successes, as it was where `saved`, its state in a checkpoint, is given."""
    whole = (group_size(run.config) or 1) > 1  # rollouts of whole episodes
    outcomes = Outcomes(run.looks[-1].rate if run.looks else None, 0 if whole else early_rounds(run))
    if saved:
        outcomes.load_state_dict(saved)
    return outcomes


class Gathering:
    """The progress line while a batch is gathered, which a slow simulator takes minutes for."""

    def __init__(self, run: Run, feed):
        self.run, self.feed, self.told = run, feed, time.monotonic() + GATHERING - TOLD

    def asked(self) -> bool:
        """Whether a signal asks for the end. Feeds ask this while they wait."""
        if time.monotonic() - self.told >= TOLD:
            self.told = time.monotonic()
            self.tell()
        return bool(self.run.stop.asked)

    def tell(self) -> None:
        config, made, count = self.run.config, self.feed.gathered(), batch(self.run.config)
        if group_size(config):  # episodes, of a length that is not known before
            self.run.report.advance(self.run.step, note=f"{made} of {count} episodes gathered")
        elif made:
            steps, whole = made * config.policy.execute, count * config.policy.execute
            self.run.report.advance(self.run.step + steps, note=f"{si(steps)} of {si(whole)} gathered")


def learn(
    run: Run, learner, feed, outcomes: Outcomes, sharing: "ExperienceSharing | None" = None
) -> tuple[dict[str, float], dict[str, float], float, list] | None:
    """Take a batch and learn from it -> (its statistics, the update's metrics, seconds waited for it, its
    episodes that ended); None: a signal came before it was whole."""
    from robo_rl.runtime.feed import merge_batch_stats

    config, rollouts, waited, recycler = run.config, [], 0.0, getattr(learner, "lessons", None)

    def arriving(take: Callable):
        nonlocal waited
        while True:
            begin = time.perf_counter()
            piece = take()
            waited += time.perf_counter() - begin
            if piece is None:
                return
            rollouts.append(piece)
            run.step += int(piece.stats["env_steps"])
            run.drop_unknown_success(piece.stats)
            piece.stats["undecided"] = outcomes.observe(piece.stats)
            yield piece

    if config.periodic:
        pieces = feed.stream(Gathering(run, feed).asked)
        metrics = learner.accumulate(arriving(lambda: next(pieces, None)), min(1.0, run.step / config.steps))
    else:
        rollout = next(arriving(lambda: feed.next(Gathering(run, feed).asked)), None)
        if rollout is None:
            return None
        mixed = rollout if sharing is None else sharing.mix(rollout, learner.policy, feed.version)
        metrics = learner.update(mixed, min(1.0, run.step / config.steps), feed.version)
    check_learnt(config, learner.policy)
    for rollout in rollouts:
        learner.after_collect(rollout)
        if recycler is not None:
            run.step += recycler.look(rollout, learner.policy)
    return merge_batch_stats([r.stats for r in rollouts]), metrics, waited, [r.ended for r in rollouts]


def go_back(run: Run, learner) -> bool:
    """After a look: where success fell below that of the policy that RL began with, put policy and learner
    back to the best checkpoint, with smaller steps -> whether it did."""
    from robo_rl import checkpoint
    from robo_rl.optim import AdamW

    why = run.fallen()
    state = {} if why is None or len(run.returns) >= RETURNS else learner.state_dict()
    if why is None or "step_scale" not in state:  # a learner of the user's own need not know it
        return False
    best = run.take_best(why, "goes on, with steps of half the size, from")
    saved, _ = checkpoint.load_train(run.folder / "checkpoints" / checkpoint.name(best), split(run.config))
    at_best = (
        saved["learner"]
        if "learner" in saved
        else find_method(run.config.algo)(
            copy.deepcopy(run.policy), run.config.rl, run.config.seed
        ).state_dict()
    )
    learner.load_state_dict(at_best | {"step_scale": state["step_scale"] * SMALLER})
    opt = getattr(learner, "actor_opt", None)
    if run.average and isinstance(opt, AdamW):
        opt.follow()  # the policy is the average, not what learnt when it was the best
    return True


def critic_alone(metrics: Mapping[str, float]) -> bool:
    """Whether the update of these metrics was of the critic alone, which explains too little yet."""
    return "value_loss" in metrics and "policy_loss" not in metrics


def tell_begin(run: Run) -> None:
    """Begin the progress line, which moves with every update, and say after how many episodes or steps: a
    slow simulator takes minutes for them."""
    config, count = run.config, batch(run.config)
    run.report.start("rl", config.steps, "steps", done=run.step)
    size = f"{count} episodes" if group_size(config) else f"{si(count * config.policy.execute)} steps"
    run.report.advance(run.step, note=f"learns after each {size}")


def improve(
    run: Run,
    learner,
    feed,
    guard: StalenessGuard,
    outcomes: Outcomes,
    control: StartControl | None = None,
    planned: "PlannedGroups | None" = None,
    sharing: "ExperienceSharing | None" = None,
) -> int:
    """Learn until the steps are made, the looks say stop or a signal comes -> the exit status."""
    from robo_rl import health

    config, beside = run.config, workers(run.config) > 0
    rehearsal, recycler = (getattr(learner, name, None) for name in ("rehearsal", "lessons"))
    watch = health.Watch(
        health.ranges(config.rl, run.policy.options, run.policy.spec.action, config.reward != "dense"),
        run.folder,
    )
    watch.begin(run.step)
    tell_begin(run)

    def save(finished: bool = False) -> None:
        run.save(
            {
                "learner": learner.state_dict(),
                "feed": feed.state(),
                "guard": guard.state_dict(),
                "outcomes": outcomes.state_dict(),
            }
            | ({} if control is None else {"starts": control.state_dict()})
            | ({} if recycler is None else {"recycler": recycler.state_dict()})
            | ({} if rehearsal is None else {"rehearsal": {"crc": rehearsal.crc}})
            | ({} if planned is None else {"groups": planned.state_dict()})
            | ({} if sharing is None else {"share": sharing.state_dict()}),
            finished,
        )
        feed.commit()

    def looked() -> None:
        if go_back(run, learner):
            feed.publish()

    cadence = Cadence(run, save, SAVE_EVERY, looked)
    while run.goes_on():
        begin, clock = time.perf_counter(), time.monotonic_ns()
        if (learnt := learn(run, learner, feed, outcomes, sharing)) is None:
            break
        stats, metrics, waited, ended = learnt
        if control is not None:
            for episodes in ended:
                control.observe(episodes)
            control.renew()
            supervise(learner, control)
        if planned is not None:
            planned.observe(ended)
        if run.average:
            run.average.add(weight := newest_weight(getattr(config.rl, "average", 0.0), stats))
            metrics["average_weight"] = weight
        update = time.perf_counter() - begin - waited
        clock += 0 if config.periodic else int(waited * 1e9)
        feed.publish()
        guard.after(feed, metrics)
        run.timeline([*feed.spans(), ("learner", clock, time.monotonic_ns())] if beside else [])
        seconds = time.perf_counter() - begin
        row = {(k if "/" in k else f"train/{k}"): v for k, v in (metrics | stats).items() if k != "env_steps"}
        row |= {
            "train/noise": run.policy.noise_scale,
            "time/update": update,
            "rate/steps_per_s": stats["env_steps"] / seconds,
        } | feed.stats()
        if control is not None:
            row |= {f"starts/{k}": v for k, v in control.metrics().items()} | task_metrics(
                task_names(run.env), ended
            )
            row["time/starts"] = control.take_seconds()
        if planned is not None:
            row |= {f"groups/{k}": v for k, v in planned.metrics().items()}
        row |= ({} if sharing is None else sharing.metrics()) | (
            {} if recycler is None else recycler.metrics()
        )
        if run.returns:
            row["train/returns"] = len(run.returns)
        if beside:
            row["util/learner_wait"] = min(1.0, waited / seconds)
        run.report.log(run.step, row)
        for text in watch.look(run.step, metrics | stats | {"returns": float(len(run.returns))}):
            run.report.say(text, "warning")
        words = " · ".join(filter(None, (feed.note(), "the critic learns first" * critic_alone(metrics))))
        run.report.advance(run.step, stats.get("success"), words, shown_return(config, stats))
        cadence.after_update(feed.crowded())
    if run.stop.asked:
        save()
        return run.end_stopped()
    run.judge_final()
    save(finished=True)
    feed.close()
    feeds.discard(run.folder)
    return run.end()
