"""The supervised stage: demonstrations, and a policy that learns from them before RL."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import make_env, obs_spec
from robo_rl.experiment.folder import half_taught, pick_checkpoint
from robo_rl.experiment.methods import check_method
from robo_rl.experiment.new_policy import HOLD, better_activation, held_out, loss_on, policy_of_demos
from robo_rl.experiment.run import Run, Stopped, supervised_tick
from robo_rl.experiment.supervised_frames import (
    SupervisedFrames,
    by_policy,
    demonstrated,
    load_frames,
    say_imitated,
)
from robo_rl.experiment.teaching import Teaching, keep_rounds, load_rounds, rounds_of
from robo_rl.options import AROUND_FLOWS, FLOWS, VLAS, LoraOptions
from robo_rl.plugins import is_object
from robo_rl.selection import Look
from robo_rl.stats import wilson
from robo_rl.types import task_names

ENOUGH = 0.9  # success of the supervised policy from which no more demonstrations are asked for
GROWTH = 3  # factor on demonstrations and updates where they are, and on updates where they cannot be
GROUNDED = ("pi0", "pi05", "smolvla")  # whose trunks give keys and values
MORE = 1.5  # that factor where the head alone learns on: looking at pictures costs most
LESS = 0.98  # of the loss on those before it: it falls
RISE = 0.03  # of success, from which another round, of this stage or of own successes, is worth it
READS = 1.05  # a loss with another row's instruction so many times that with the own one: the policy reads
TRIES = 100  # most starts kept for each demonstration: those that expert or policy fail from are left out
STARTS = 90_000  # of all that a seed has


def first_policy(config: TrainConfig, env, spec=None):
    """The policy of --init, in a network of --policy's options; parts that it had none of are fresh. spec:
    what it is to see and command where there is no env."""
    import torch

    from robo_rl import checkpoint
    from robo_rl.lora import attach
    from robo_rl.policies import make_policy

    folder = pick_checkpoint(Path(config.init), "best")[1]
    old, _ = checkpoint.load_policy(folder)
    check_kind(config, old.options.kind)
    there = spec or obs_spec(env, old.spec.language)
    checkpoint.check_fits(old, there, str(folder), "env" if spec is None else "data set")
    policy = make_policy(replace(config.policy, lora=LoraOptions()), old.spec, config.seed)
    had = old.options.lora.merged(old.state_dict())
    if getattr(policy, "noise", None) is None:  # how the run before explored is not what it learnt
        had = {k: v for k, v in had.items() if not k.startswith("noise.")}
    around = policy.options.kind in AROUND_FLOWS and policy.options.kind != old.options.kind
    if around or policy.options.kind in FLOWS:  # nor is what acted around the flow, or on the trunk
        own = {k.split(".")[0] for k in policy.state_dict()}
        had = {k: v for k, v in had.items() if k.split(".")[0] in own}
    given = "head.from_committed.weight"
    # nobody taught it what given rows mean
    if given in policy.state_dict() and given not in had and "head.from_x.weight" in had:
        had[given] = torch.zeros_like(policy.state_dict()[given])
    parts = {k.split(".")[0] for k in had}
    try:
        missing, unknown = policy.load_state_dict(had, strict=False)
    except RuntimeError as e:
        missing, unknown = [], [str(e).splitlines()[-1].strip()]
    if unknown := unknown + [k for k in missing if k.split(".")[0] in parts]:
        if config.algo != "bc":
            check_method(config, policy)  # what a method of another kind needs says more
        raise UserError(
            f"--init {config.init}: its weights do not fit these --policy options ({unknown[0]}); leave out "
            "what changes the networks"
        )
    if "base" not in parts:
        policy.freeze_base()  # all steps of the old chain were the head's
    for word in ("taught", "steered"):  # critics begin anew, so nothing is chosen by them yet
        if hasattr(policy, word):
            getattr(policy, word).fill_(False)
    if (noise := getattr(policy, "noise", None)) is not None:
        noise.high.fill_(config.policy.noise_max)  # where a schedule left it belongs to the run before
    return attach(policy, config.policy.lora, config.seed)


def check_kind(config: TrainConfig, had: str) -> None:
    """UserError where the policy of --init, of kind `had`, has no weights for one of --policy.kind."""
    kind = config.policy.kind
    if kind == had or {kind, had} <= set(AROUND_FLOWS):
        return
    fits = " or ".join(AROUND_FLOWS if kind in AROUND_FLOWS else (kind,))
    raise UserError(
        f"--init {config.init}: its policy is of kind {had}, whose weights do not fit --policy.kind {kind}: "
        f"begin with a run whose policy is of kind {fits}, or choose an --algo that learns kind {had}"
    )


def demo_folder(run: Run, begin: bool = False) -> Path | None:
    """Folder of the demonstrations, recorded first if --demos is a number; None without any. `begin`: those
    of --demos alone, without what a supervised stage that was stopped asked for besides."""
    from robo_rl.data.writer import Writer

    config = run.config
    if not config.demos.isdecimal():
        return Path(config.demos)
    each, folder = int(config.demos), run.folder / "demos"
    count = each * len(task_names(run.env))
    if count == 0:
        return None
    if (folder / "meta" / "info.json").exists():
        with Writer(folder, spec=run.env.spec) as w:
            whole = len(w) == count or len(w) > count and not begin
        if whole:
            return folder
        shutil.rmtree(folder)  # the run was stopped while it recorded; the same seed records the same again
    record_demos(run, folder, each)
    return folder


def record_demos(run: Run, folder: Path, count: int, known: int = 0) -> None:
    """Add `count` demonstrations of each task to the `known` ones of each in `folder`; where there are some
    they begin in states that `run.policy` comes to. Those that are there already are not added again."""
    from robo_rl.data.reader import load
    from robo_rl.data.writer import Writer
    from robo_rl.demos import Lead, record
    from robo_rl.evaluation import decide

    config, lead = run.config, None
    if known:
        data, policy, generator = load(folder), run.policy, torch_generator(config.seed + known)
        whole = (data.start >= 0) & ~by_policy(data)[data.from_]
        longest = int((data.to - data.from_)[whole].mean())
        lead = Lead(lambda obs: decide(policy, obs, generator), longest, kept=config.data.every > 1)
    env = make_env(config, min(count, config.envs, 32))
    tasks = len(task_names(run.env))
    run.report.start("demo", count * tasks, "episodes")
    with Writer(folder, spec=run.env.spec) as w:
        # of a run that was stopped while it recorded them, and records the same again
        there = len(w) - known * tasks

        def add(episode) -> None:
            nonlocal there
            if there > 0:
                there -= 1
            else:
                w.add(episode)

        record(
            env,
            count,
            config.seed,
            add,
            tick=lambda kept, tried: run.report.advance(kept, kept / tried),
            first=min(TRIES, STARTS // config.demos_most) * known * tasks if known else 0,
            lead=lead,
            pictures=config.data.every == 1,
        )
    env.close()


def torch_generator(seed: int):
    import torch

    return torch.Generator().manual_seed(seed)


def sft_stage(run: Run) -> None:
    """Make `run.policy`: from demonstrations, from --init, or fresh (--demos 0); evaluate what RL begins
    with.

    Raises Stopped when a signal comes.
    """
    from robo_rl.policies import make_policy

    config, demos = run.config, demo_folder(run, begin=not rounds_of(run.begun))
    if config.init:
        if said := half_taught(*pick_checkpoint(Path(config.init), "best")):
            run.report.say(f"--init: {said}", "warning")
        run.policy = first_policy(config, run.env).to(config.device)
    elif demos is None:
        spec = obs_spec(run.env, len(instructions(run.env)) > 1, config.policy.text)
        run.policy = make_policy(config.policy, spec, config.seed).to(config.device)
        run.policy.freeze_base()
        return
    if demos is None or config.init and not config.bc.updates:
        run.policy.eval()
        evaluate_supervised(run)
    elif config.init or not config.bc.updates:
        teach(run, demos, config.bc.updates)
        evaluate_supervised(run)
    elif asks(config):
        ask_until_enough(run, demos)
    else:
        repeat_until_enough(run, demos)


def check_changes(config: TrainConfig, views: Sequence[str]) -> None:
    """Raise UserError where supervision is to change what it sees, or its head is to learn on, and there are
    no pictures (`views`), or no policy that pools them."""
    for name in ("shift", "colour", "forget"):
        if getattr(config.bc, name) and not views:
            raise UserError(
                f"--bc.{name} changes what supervision sees beside pictures, and this run has none: "
                "give it pictures (--obs rgb), or leave it out"
            )
    if config.bc.head and not views:
        raise UserError(
            "--bc.head teaches the action head on what the trunk makes of pictures, and this run has none: "
            "give it pictures (--obs rgb), or more of --bc.updates"
        )
    kind = config.policy.kind
    if config.bc.head and (kind in VLAS or is_object(kind)):
        why = "gives keys and values of every layer" if kind in VLAS else "may give something else"
        raise UserError(
            f"--bc.head keeps the vector that a trunk pools of each frame, and that of {kind} {why}: leave "
            "it out (--bc.head 0)"
        )


def imitate(
    run: Run,
    sample,
    updates: int,
    made: int = 0,
    look=None,
    reads: bool = False,
    keep: "Mapping[str, Any] | None" = None,
) -> None:
    """Teach `run.policy` by `sample`d minibatches in so many updates, reported as those after the first
    `made` ones; `reads`: their instructions differ, say so if then it does not read them.

    look(update): what else to report, {} where nothing is due. keep: what is learnt is kept, and gone on from
    after a stop; these have a state beside the sampler. Raises Stopped when a signal comes.
    """
    from robo_rl.algos import bc
    from robo_rl.algos.augment import augmented
    from robo_rl.devices import device_of, sampled_on

    told = supervised_tick(run, "sft", updates, made, look)
    teaching = None if keep is None else Teaching(run, updates, {"sample": sample, **keep})
    options, sample = run.config.bc, sampled_on(device_of(run.policy), sample)
    changes = (options.shift, options.colour, options.forget)
    seen = augmented(sample, *changes) if run.policy.spec.views else sample
    run.policy.train()

    def tick(update: int, loss: float) -> None:
        told(update, loss)
        if teaching:
            teaching.after_update()

    begin = teaching.begin if teaching else lambda fit: None
    try:
        bc.train(run.policy, seen, replace(options, updates=updates), run.config.seed + 10, tick, begin)
    except Stopped:
        if teaching:
            teaching.keep()
        raise
    if teaching:
        teaching.end()
    run.policy.eval()
    if reads:
        run.report.start("reads", bc.EXCHANGED, "batches")
        ratio = bc.exchanged_loss(
            run.policy, sample, run.config.bc, run.config.seed + 12, tick=run.report.advance
        )
        report_reading(run, ratio, made + updates)


def grounds(config: TrainConfig, dataset) -> bool:
    """Whether the trunk of a policy of fresh weights learns first what the data set's instructions mean."""
    return bool(
        config.bc.ground
        and len(dataset.tasks) > 1
        and config.policy.kind in GROUNDED
        and not (config.init or config.policy.folder)
    )


def ground_trunk(run: Run, frames: SupervisedFrames, among: np.ndarray) -> None:
    """The stage of --bc.ground, on the first frames of the episodes that are in `among` bool[F], of which
    every tenth is held out. Raises Stopped when a signal comes."""
    import torch

    from robo_rl.algos.grounding import UNTOLD, ground, mean_actions
    from robo_rl.devices import device_of, sampled_on

    config, data, updates = run.config, frames.data, run.config.bc.ground
    with torch.no_grad():
        action = run.policy.action_norm(torch.from_numpy(data.action).to(config.device)).cpu()
    told = demonstrated(config, data)
    target = mean_actions(action, *map(torch.from_numpy, (data.episode_index, told)))[:, None]
    learnt, held = np.zeros((2, len(data.action)), bool)
    begins = data.from_[(among & told)[data.from_]]
    learnt[begins], held[begins[HOLD - 1 :: HOLD]] = True, True
    learnt &= ~held
    run.report.start("ground", updates, "updates")

    def tick(update: int, loss: float) -> None:
        if run.stop.asked:
            raise Stopped
        run.report.advance(update, note=f"loss {loss:.3f}")

    def sampler(which: np.ndarray):
        return sampled_on(
            device_of(run.policy), frames.sampler(config, run.policy.spec, which, target=target)
        )

    options = replace(config.bc, updates=updates)
    others = sampler(held) if held.any() else None
    left = ground(run.policy, sampler(learnt), options, config.seed + 13, tick, others)
    run.report.log(0, {"sft/ground": left}, stage="sft")
    if left > UNTOLD:
        run.report.say(
            f"the trunk does not tell from a scene and its instruction where an episode leads: {left:.2f} of "
            "what differs between episodes that are held out is left. Demonstrations from more starts help, "
            f"then more updates (--bc.ground, now {updates:,})",
            "warning",
        )


def report_cameras(run: Run) -> None:
    """Say which cameras stand in a model's places by their order alone."""
    places = getattr(getattr(run.policy, "processor", None), "guessed", {})
    if places:
        remedy = {
            "none": "give the cameras the model's names (--data.cameras NAME=CAMERA)",
            "mujoco": f"name them in another order (--cameras {','.join(reversed(run.policy.spec.views))})",
        }.get(run.config.sim, "give the cameras the model's names, in the env")
        run.report.say(
            f"{run.config.policy.folder} does not know "
            + ", ".join(f"{view}: it stands where {name} was learnt" for view, name in places.items())
            + f". If that is wrong, {remedy}",
            "warning",
        )


def report_reading(run: Run, ratio: float, update: int) -> None:
    """Report the loss with another row's instruction over that with the own one (nan: there is none), and
    that a policy does not read."""
    if not math.isfinite(ratio):
        return
    run.report.log(update, {"sft/reads": ratio}, stage="sft")
    if ratio < READS:
        run.report.say(
            f"told what another demonstration was, its loss is {ratio:.3f} times that with its own: it does "
            "not read what it is told. Where neither pictures nor state tell the task, more demonstrations "
            "from more starts help",
            "warning",
        )


def teach(run: Run, folder: Path, updates: int, hold_out: bool = False) -> float:
    """Make `run.policy` from the demonstrations in `folder` (with --init teach it on) in so many updates,
    after the `run.updates` of policies that were given up -> its loss on the episodes that `hold_out` leaves
    out (`new_policy.held_out`); nan without any."""
    from robo_rl.experiment.head_stage import teach_head, teach_head_if_better
    from robo_rl.experiment.pear import PearWeights
    from robo_rl.lora import attach

    config, frames, run.pooled, run.looks = run.config, load_frames(run, folder), None, []
    dataset = frames.data
    if not config.init:
        run.policy = policy_of_demos(run, dataset, better_activation(run, frames))
        if not run.updates:
            report_cameras(run)
    out = held_out(frames) & hold_out
    if not run.updates:
        say_imitated(config, dataset, run.report.say)
    weights = PearWeights(run, dataset, updates) if config.bc.pear else None
    if grounds(config, dataset) and run.begun is None:
        ground_trunk(run, frames, ~out)
    imitate(
        run,
        frames.sampler(config, run.policy.spec, ~out, weight=weights),
        updates,
        run.updates,
        weights and weights.look,
        reads=len(dataset.tasks) > 1,
        # what was kept of a later policy would need the one before it
        keep=None if run.updates else {"weights": weights},
    )
    run.taught = updates
    run.updates += updates
    # what the head does elsewhere, demonstrations that are asked for mend
    teach_more = teach_head if asks(config) else teach_head_if_better
    run.updates += teach_more(run, frames, ~out, run.updates, weights)
    if not config.init:
        attach(run.policy, config.policy.lora, config.seed).eval()
    return loss_on(run.policy, frames, config, out) if out.any() else float("nan")


class SupervisedRound(NamedTuple):
    """Demonstrations of each task (0: a data set); updates of a policy that is made anew (0: the one there is
    learns on), and then of its head alone."""

    demos: int
    updates: int
    head: int


def asks(config: TrainConfig) -> bool:
    """Whether supervision may ask the simulator's expert for more demonstrations than it begins with."""
    return config.demos.isdecimal() and config.demos_most > int(config.demos)


def rounds(config: TrainConfig) -> list[SupervisedRound]:
    """The rounds that supervision makes, all but the first only while success is not enough: with `GROWTH`
    times as many demonstrations and updates up to --demos-most (with --bc.head `MORE` times as many, from
    which the head learns on), or of those that are there with `GROWTH` times as many updates up to
    --bc.most."""
    recorded, more, bc = config.demos.isdecimal(), asks(config), config.bc
    demos = int(config.demos) if recorded else 0
    if recorded and not demos or config.init and not bc.updates:
        return []
    out = [SupervisedRound(demos, bc.updates, bc.head)]
    if config.init or not bc.updates:
        return out
    while True:
        demos, updates, _ = out[-1]
        if demos < config.demos_most and more:
            count = min(round((MORE if bc.head else GROWTH) * demos), config.demos_most)
            out.append(SupervisedRound(count, 0 if bc.head else updates * count // demos, bc.head))
        elif not more and GROWTH * updates <= bc.most:
            out.append(SupervisedRound(demos, GROWTH * updates, bc.head))
        else:
            return out


def ask_until_enough(run: Run, folder: Path) -> None:
    """`teach` and evaluate, and until success `is_enough` ask the expert for the demonstrations of another of
    the `rounds`."""
    config, planned = run.config, rounds(run.config)
    of = " of each task, in the worst," if len(task_names(run.env)) > 1 else ""
    made, _ = load_rounds(run)
    while True:
        if made:
            before, now = planned[made - 1 : made + 1]
            try:
                record_demos(run, folder, now.demos - before.demos, before.demos)
            except UserError as e:  # such as an expert that can only go on from what it did itself
                run.report.say(f"no more demonstrations: {e}", "warning")
                break
        demos, updates, _ = planned[made]
        if updates:
            teach(run, folder, updates)
        else:
            teach_on(run, folder)
        success, made = first_look(run), made + 1
        if made == len(planned) or is_enough(run.looks[-1]):
            break
        after = planned[made]
        more = f"{after.updates:,} updates" if after.updates else f"{after.head:,} updates of the head"
        run.report.say(
            f"supervised {success:.3f} with {demos} demonstrations{of}: {after.demos - demos} more asked of "
            f"the expert, from states that the policy comes to, and {more} on all {after.demos}"
        )
        keep_rounds(run, made)
    if not is_enough(run.looks[-1]):
        run.report.say(
            f"supervised {first_look(run):.3f} with {planned[made - 1].demos} demonstrations{of} of at most "
            f"{config.demos_most} (--demos-most)"
        )
    evaluate_supervised(run)


def teach_on(run: Run, folder: Path) -> None:
    """Teach the head of `run.policy` on, on all demonstrations in `folder`."""
    from robo_rl.demos import load_demos
    from robo_rl.experiment.head_stage import teach_head

    data, run.looks = load_demos(folder, run.env, run.config.data.label), []
    run.updates += teach_head(run, SupervisedFrames(data), np.ones(len(data.action), bool), run.updates)


def is_enough(look: Look) -> bool:
    """Whether success in every task is at least `ENOUGH` with its 95 % interval, or no episode failed."""
    return look.worst >= 1 or min(wilson(successes, n).low for successes, n in look.parts) >= ENOUGH


def repeat_until_enough(run: Run, folder: Path) -> None:
    """`teach` from the demonstrations that there are and evaluate, and until success `is_enough` teach anew
    by another of the `rounds`, as long as the loss on held-out episodes falls or success rises. Where
    none is held out once is enough: few are soon learnt by heart."""
    config, planned = run.config, rounds(run.config)
    if len(planned) == 1:
        teach(run, folder, planned[0].updates)
        evaluate_supervised(run)
        return
    made, state = load_rounds(run)
    best, least = state.get("best", -1.0), state.get("least", float("inf"))
    best_policy, taught = run.policy if made else None, run.taught  # of which that policy is
    while True:
        updates = planned[made].updates
        held_out, success = teach(run, folder, updates, hold_out=True), first_look(run)
        helped, made = success >= best + RISE or held_out < LESS * least, made + 1
        if success >= best:
            best, best_policy, taught = success, run.policy, updates
        least = min(held_out, least)
        said = f"supervised {success:.3f} with {updates:,} updates, loss on held-out episodes {held_out:.3f}"
        if is_enough(run.looks[-1]) or not helped or made == len(planned) or math.isnan(held_out):
            break
        run.report.say(f"{said}: {planned[made].updates:,} updates (--bc.most {config.bc.most})")
        if run.policy is not best_policy:  # the next one begins anew
            run.policy, run.taught, run.pooled, run.looks = best_policy, taught, None, []
        keep_rounds(run, made, best=best, least=least)
    if run.policy is not best_policy:
        run.report.say(f"{said}: the policy of before is kept")
        run.policy, run.taught, run.pooled, run.looks, success = best_policy, taught, None, [], best
        first_look(run)
    if success < ENOUGH:
        there = (
            f"{config.demos} (--demos; --demos-most M asks for as many as are needed)"
            if config.demos.isdecimal()
            else f"those in {folder}"
        )
        run.report.say(f"supervised {success:.3f}: what would help is more demonstrations than {there}")
    evaluate_supervised(run)


def first_look(run: Run) -> float:
    """Success of the supervised policy on the starts that choose; it is evaluated there once."""
    return run.looks[-1].worst if run.looks else run.look()


def evaluate_supervised(run: Run) -> None:
    """Report the policy that RL begins with; where RL follows it is one of those to choose among."""
    run.pooled = run.pooled if run.config.bc.own else None  # what the stage kept
    run.evaluate("sft")
    if run.config.algo == "bc" or not run.config.steps:
        run.looks = []
    else:
        first_look(run)


def instructions(env) -> set[str]:
    """The instructions that an env gives at its first reset."""
    obs, _ = env.reset(seed=0)
    return {str(t) for t in obs["task"]}
