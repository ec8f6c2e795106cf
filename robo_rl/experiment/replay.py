"""The loop of the methods that learn from replay: collect, learn from both stores; evaluate and save on the
way.

    replay/online        every control step of the run, journaled before it is learnt from
    replay/corrections   human steps with what followed; demonstrations join them in memory
    corrections/         episodes with help as a LeRobot v3 data set, with source and phase of every step

Acting is a process beside the learner (`robo_rl/runtime/actor.py`) where there is a second core. With
--workers 0 both take turns in one process: then a run that was stopped or killed goes on from its last
checkpoint bit for bit, where the env has snapshots (control steps that were journaled after that are made
again). One whose env has none, or that has an actor or a person beside it, keeps and counts every step it had
journaled, learns from those after its checkpoint and starts new episodes.
"""

import functools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig, by_person, is_live, on_the_wire, replay_options
from robo_rl.experiment.feeds import publish_control
from robo_rl.experiment.marks import marked_states, seen_frames, seen_last
from robo_rl.experiment.methods import check_learnt, find_method
from robo_rl.experiment.parallel import workers
from robo_rl.experiment.recipes import shown_return
from robo_rl.experiment.run import Cadence, Run
from robo_rl.experiment.sft import demo_folder
from robo_rl.experiment.stage import check_operator, renewed, stage
from robo_rl.experiment.starts import make_control
from robo_rl.experiment.supervised_frames import worth_imitating
from robo_rl.experiment.synthetic import Synthetic, made_anew
from robo_rl.experiment.tasks import task_metrics
from robo_rl.noise import mix
from robo_rl.options import OffPolicyOptions
from robo_rl.types import task_names

ROUND = 4  # decisions of every env between updates
SAVE_EVERY = 60.0  # s


def check(config: TrainConfig, env) -> None:
    """Raise UserError for options that methods of replay do not take."""
    o = replay_options(config)
    if (config.obs != "state" or config.policy.text) and o.synthetic:
        raise UserError(
            "--rl.synthetic makes transitions of --obs state for small policies; with pictures or "
            "instructions in text leave it out"
        )
    guided = ("synthetic_window", "synthetic_strength")
    if not o.synthetic:
        names = (*guided, *(f"synthetic_{x}" for x in ("kind", "every", "rows", "updates")))
        o.refuse(names, "without --rl.synthetic, the share of a batch (0.25), nothing is made")
    elif o.synthetic_kind != "guided":
        o.refuse(guided, f"--rl.synthetic-kind {o.synthetic_kind} makes single transitions")
    if o.judge != "env" and config.obs != "state" and config.policy.text and not config.policy.keep_prefix:
        raise UserError(
            f"--rl.judge {o.judge} looks at what the trunk makes of pictures, which replay keeps of a "
            f"{config.policy.kind} with --policy.keep-prefix alone"
        )
    if (config.workers or 0) > 1 or config.server or config.backend != "processes":
        raise UserError(
            f"--algo {config.algo} learns beside one actor with all --envs (--workers 1) or takes turns with "
            "it (--workers 0): leave --server and --backend out"
        )
    if config.max_staleness:
        raise UserError(
            f"--algo {config.algo} learns from all that it has stored, however old: leave --max-staleness out"
        )
    if config.policy.horizon != config.policy.execute:
        raise UserError(
            f"--algo {config.algo} judges the chunk that runs: --policy.horizon must equal --policy.execute, "
            f"got {config.policy.horizon} and {config.policy.execute}"
        )
    check_operator(config, env)
    least = 2 * config.envs * (config.policy.execute + 2)
    if o.capacity < least:
        raise UserError(
            f"--rl.capacity: replay capacity must be at least {least} control steps for --envs {config.envs} "
            f"and chunks of {config.policy.execute}, got {o.capacity}"
        )


def never_learns(config: TrainConfig) -> str:
    """That --steps end before the first update, "" where they do not, or where the actor learns before RL."""
    if config.algo == "bc" or not isinstance(config.rl, OffPolicyOptions) or not config.steps:
        return ""
    o, each = config.rl, ROUND * config.policy.execute * config.envs
    made = -(-config.steps // each) * each
    if made >= o.warmup or getattr(find_method(config.algo), "offline_actor", False):
        return ""
    return (
        f"RL will learn nothing: its updates begin after {o.warmup:,} steps (--rl.warmup), of --steps "
        f"{config.steps:,}; give more --steps or a smaller --rl.warmup"
    )


def tell_unsound(run: Run, metrics: dict[str, float]) -> None:
    """Say, once, which losses and norms of an update are not finite, and what helps."""
    bad = [k for k, v in metrics.items() if ("loss" in k or "norm" in k) and not math.isfinite(v)]
    if run.told_unsound or not bad:
        return
    run.told_unsound = True
    if "critic_norm" in bad and "q_target" in metrics:
        words = (
            "the loss of the critics is not finite, so they take no step (their targets: "
            f"{metrics['q_target']:.3g} on average) and RL learns nothing from rewards: let the env pay "
            "less, about 1 a step or an episode, or take success alone (--reward sparse)"
        )
    else:
        words = (
            f"{', '.join(bad)} of an update not finite: nothing is learnt from it; look at the method's loss "
            "and at the rewards, or lower its learning rates"
        )
    run.report.say(words, "warning")


def room(config: TrainConfig) -> int:
    """Rows of a store: --rl.capacity, or as many as the run can write, a step and the end of an episode after
    each."""
    e, n = config.policy.execute, config.envs
    return min(replay_options(config).capacity, 2 * (config.steps + n * (e * 2 * ROUND + e + 2)))


def check_memory(config: TrainConfig, policy) -> None:
    """Raise UserError where the online store of a run with this policy will not fit into the memory that is
    free now."""
    from robo_rl.files import free_memory
    from robo_rl.replay_collector import keeps_context, row_bytes

    each = row_bytes(policy)
    count = min(config.steps, room(config))
    if (need := each * count) > (free := free_memory()):
        less = (
            "leave --policy.keep-prefix out, "
            if policy.spec.text and keeps_context(policy)
            else "a smaller --image-size, "
            if policy.spec.views
            else ""
        )
        raise UserError(
            f"replay of {count:,} control steps takes {need / 1e9:.1f} GB ({each / 1e3:,.0f} kB each), "
            f"{free / 1e9:.1f} GB are free: {less}a smaller --rl.capacity, or fewer --steps"
        )


class ReplayStage:
    """Online RL of one run; owns both replay stores, the actor and the learner."""

    def __init__(self, run: Run):
        self.run, self.config, self.report = run, run.config, run.report

    def stores(self, state: dict) -> None:
        """Demonstrations and corrections in one store, everything in the other; what a journal holds comes
        back: all of it, or, where the run repeats, what the checkpoint's `state` had."""
        from robo_rl.demos import load_demos
        from robo_rl.journal import Journal
        from robo_rl.replay import EXPERT, HUMAN, POLICY, Replay, add_episodes
        from robo_rl.replay_collector import replay_rows

        config, o, spec = self.config, replay_options(self.config), self.run.policy.spec
        rows = replay_rows(self.run.policy)
        e, n = config.policy.execute, self.run.env.num_envs
        folder = demo_folder(self.run)
        data = load_demos(folder, self.run.env, config.data.label) if folder is not None else None
        size = 2 * (len(data.state) if data is not None else 0)
        most = room(config)
        self.demos = Replay(rows, spec.action, e, o.gamma, most + size, n)
        if data is not None:
            # without phases nobody intervened: a person's episode is a demonstration, as is one of which
            # nothing is said
            codes = {"policy": POLICY} | ({"human": HUMAN} if data.features.phases else {})
            source = np.array([codes.get(name, EXPERT) for name in data.sources], np.uint8)[data.source]
            # what is not imitated counts as a policy's
            source[~worth_imitating(config, data)[data.episode_index]] = POLICY
            add_episodes(
                self.demos,
                seen_frames(self.run.policy, data),
                data.action,
                data.reward,
                data.from_,
                data.to,
                data.success,
                source,
                data.phase,
                *seen_last(self.run.policy, data),
            )
        self.online = Replay(rows, spec.action, e, o.gamma, most, n)
        self.journals: list[Journal] = []  # of corrections, and of what was collected
        self.kept, again = [], False
        # of a run that was not saved since it began to collect: nothing
        self.marks = state.get("marks", [([0, 0], 0)] * 2)
        for store, name, (mark, steps) in zip(
            (self.demos, self.online), ("corrections", "online"), self.marks, strict=True
        ):
            journal = store.journal = Journal(
                self.run.folder / "replay" / name, o.capacity, hold=self.repeats
            )
            self.journals.append(journal)
            again |= self.repeats and journal.rewind(mark)
            self.kept.append(store.restore())
            missing = max(0, steps - journal.steps) if self.repeats else 0
            if journal.breaks or missing:
                self.repeats = False
                self.report.say(
                    f"{journal.folder} is damaged: {journal.lost + missing} control steps of "
                    f"{journal.steps + missing} are lost; the run goes on with the others and starts new "
                    "episodes"
                )
        if again and self.repeats:
            self.report.say(
                f"goes on from step {self.run.step} exactly: steps that were journaled after that checkpoint "
                "are made again"
            )

    def start(self, resume: Path | None) -> int:
        """Go on from the checkpoint folder `resume`, or begin -> the exit status."""
        from robo_rl import checkpoint
        from robo_rl.files import give_back_freed
        from robo_rl.replay import Mixture

        config, o = self.config, replay_options(self.config)
        self.run.policy.eval()
        self.run.policy.zero_grad(set_to_none=True)  # what supervision needed
        give_back_freed()
        state = checkpoint.load_train(resume)[0] if resume is not None else {}
        # what a person did cannot be made again
        self.repeats = not workers(config) and not by_person(config) and hasattr(self.run.env, "get_state")
        self.stores(state)
        self.learner = find_method(config.algo)(self.run.policy, o, config.seed)
        self.run.average = self.learner.average
        self.rng, self.owed, self.online_now = np.random.default_rng([config.seed, 11]), 0.0, False
        self.due = self.pretrained = 0  # control steps not learnt from yet; updates of the critic's stage
        self.train_judge(not state)
        if state:
            self.learner.load_state_dict(state["learner"])
            if self.run.average is not None and "learns" in state:
                self.run.average.resume(state["learns"])
            self.rng.bit_generator.state = state["rng"]
            self.owed, self.online_now = state["owed"], state["online"]
            self.due, self.pretrained = state["due"], state["pretrained"]
        if any(self.kept) and not self.repeats:
            since = max(0, self.journals[1].steps - self.marks[1][1])  # control steps after the checkpoint
            self.run.step += since
            self.due += min(since, max(0, self.run.step - o.warmup))
            self.report.say(
                f"replay keeps {self.kept[1]} steps that were journaled, {self.kept[0]} around corrections; "
                f"goes on from step {self.run.step:,}, and episodes in flight start anew"
            )
        self.control = make_control(self.run, state.get("starts"))
        self.actor = self.act(state)
        rest = 1 - o.synthetic
        sources: dict[str, tuple[Any, float]] = {
            "demonstrations": (self.demos, rest * o.demo_share),
            "online": (self.online, rest * (1 - o.demo_share)),
        }
        self.real, self.synthetic = Mixture(sources), None
        if o.synthetic:
            self.synthetic = Synthetic(
                o, config.policy.execute, self.run.policy.spec.action, config.seed, self.report.say
            )
            sources = sources | {"synthetic": (self.synthetic, o.synthetic)}
            if state.get("synthetic"):
                self.synthetic.set_state(state["synthetic"])
        self.mixture = Mixture(sources, self.report.say)
        try:
            if self.learner.offline_actor and not self.online_now:
                self.pretrain(lambda n: self.demos.sample(n, self.rng))
            return self.learn()
        finally:
            self.actor.end()
            for journal in self.journals:
                journal.close()

    def act(self, state: dict):
        """The actor, here or in a process of its own; where the run repeats it goes on where the checkpoint's
        was."""
        from robo_rl.replay_collector import ReplayCollector
        from robo_rl.runtime.actor import ActorJob, InProcessActor, SeparateProcessActor, Stage

        config, policy, e = self.config, self.learner.policy, self.config.policy.execute
        helped = int(state.get("helped", 0))
        if workers(config):
            job = ActorJob(
                functools.partial(stage, config, self.run.folder),
                policy.options,
                policy.spec,
                self.online.rows,
                config.seed + 1,
                replay_options(config).capacity,
                self.run.folder / "replay",
                self.run.folder / "flight",
                self.run.step,
                helped,
                int(time.time()) if any(self.kept) else 0,
                is_live(config),
                self.control is not None,
                config.device,
            )
            if self.control is not None:
                publish_control(self.control, job.flight)
            return SeparateProcessActor(
                job, policy, (self.online, self.demos), ROUND * e * config.envs, config.hang
            )
        here = stage(config, self.run.folder, self.run.env)

        def collector(on: Stage, seed: int) -> ReplayCollector:
            recorded = on.recorded if self.repeats else 0
            stores = policy, self.online, self.demos
            return ReplayCollector(on.env, *stores, seed, on.judge, on.record, recorded, self.control)

        first = collector(here, config.seed + 1)
        if self.repeats and state:
            first.set_state(state["gatherer"])
        elif any(self.kept):
            self.demos.cut()
            self.online.cut()
            first.steps, first.help_steps = self.run.step, helped

        def again(key: int) -> ReplayCollector:
            self.demos.cut()
            self.online.cut()
            return collector(renewed(config, self.run.folder, here), mix(config.seed + 1, key) >> 33)

        return InProcessActor(first, ROUND * e, here.close, None if on_the_wire(config) else again)

    def train_judge(self, first: bool) -> None:
        """The classifier of `--rl.judge classifier`, trained and guarded once per run; `first`: nothing was
        logged since."""
        from safetensors.torch import save

        from robo_rl import files
        from robo_rl.rewards import train

        o, path, words = (
            replay_options(self.config),
            self.run.folder / "judge.safetensors",
            self.run.folder / "judge.json",
        )
        if o.judge == "env":
            return
        if not path.exists():
            marks = marked_states(
                self.config, self.run.env, self.run.policy, self.run.folder, self.report.say
            )
            model, said = train(marks, o.judge_rate, o.judge_hold, self.config.seed)
            files.write_json(words, said)
            files.write_bytes(path, save(model.state_dict()))
        if first:
            said = files.read_json(words)
            self.report.log(self.config.bc.updates, {f"judge/{k}": v for k, v in said.items()}, stage="sft")
            self.report.say(
                f"success classifier: threshold {said['threshold']:.3f} from {said['failures']} held-out "
                f"failures, recall {said['recall']:.2f} of {said['successes']} held-out successes"
            )

    def pretrain(self, sample) -> bool:
        """The critic's first updates, while the actor waits; for a method with an offline stage, all of that
        stage. False: it was stopped before its end."""
        count, chunk = replay_options(self.config).pretrain, 50
        if self.pretrained >= count or not len(self.demos) and self.learner.offline_actor:
            return True
        self.report.start("critic", count, "updates", done=self.pretrained)
        while self.pretrained < count and not self.run.stop.asked:
            size = min(chunk, count - self.pretrained)
            row = self.learner.update(sample, size, actor=self.learner.offline_actor)
            self.pretrained += size
            tell_unsound(self.run, row)
            self.report.advance(self.pretrained, note=f"q {row['q']:.3f}" if "q" in row else None)
            self.report.log(self.run.step, {f"critic/{k}": v for k, v in row.items()})
        return self.pretrained >= count

    def go_online(self) -> bool:
        """After the warm-up: the critic learns what the frozen policy is worth, then the method may begin.
        False: stopped."""
        if not self.learner.offline_actor:
            if not self.pretrain(lambda n: self.mixture.sample(n, self.rng)):
                return False
            self.report.start("rl", self.config.steps, "steps", done=self.run.step)
        if doubt := self.learner.doubt(lambda n: self.mixture.sample(n, np.random.default_rng(0))):
            self.report.say(doubt, "warning")
        self.learner.begin_online()
        self.online_now = True
        return True

    def save_all(self, finished: bool) -> None:
        """Checkpoint with everything but the steps themselves, which the journals hold."""
        for journal in self.journals:
            journal.sync()
        self.run.save(
            {
                "learner": self.learner.state_dict(),
                "gatherer": self.actor.state(),
                "helped": self.actor.help_steps,
                "owed": self.owed,
                "due": self.due,
                "pretrained": self.pretrained,
                "online": self.online_now,
                "rng": self.rng.bit_generator.state,
                "marks": [[j.mark(), j.steps] for j in self.journals],
                "synthetic": {} if self.synthetic is None else self.synthetic.state(),
            }
            | ({} if self.control is None else {"starts": self.control.state_dict()}),
            finished,
        )
        for journal in self.journals:
            journal.release()

    def learn(self) -> int:
        """Collect, learn from both stores, evaluate and save on the way."""
        from robo_rl.replay_collector import episode_means

        config, o = self.config, replay_options(self.config)
        cadence, e = (
            Cadence(self.run, lambda: self.save_all(finished=False), SAVE_EVERY),
            config.policy.execute,
        )
        self.report.start("rl", config.steps, "steps", done=self.run.step)
        while self.run.goes_on():
            begin, before = time.perf_counter(), self.run.step
            if not self.due:
                self.actor.collect(self.learner.policy, lambda: bool(self.run.stop.asked))
                self.run.step = self.actor.steps
                self.due = self.run.step - before
            mid, metrics = time.perf_counter(), {}
            if self.run.step >= o.warmup and len(self.online):
                if not (self.online_now or self.go_online()):
                    break  # what is due is learnt from when the run goes on
                if self.synthetic is not None and not made_anew(
                    self.synthetic, self.run, self.real, self.learner.policy
                ):
                    break
                self.owed += o.utd * self.due / e
                count = int(self.owed)
                self.owed -= count
                metrics = (
                    self.learner.update(lambda n: self.mixture.sample(n, self.rng), count) if count else {}
                )
                check_learnt(self.run.config, self.learner.policy)
            tell_unsound(self.run, metrics)
            ended = None
            if self.control is not None:
                ended = self.actor.take_ended()
                self.control.observe(ended)
                self.control.renew()
            end = time.perf_counter()
            judged, helped = o.judge != "env", o.operator != "none"
            episodes = episode_means(self.actor.take(), judged, helped)
            if not (judged or helped):
                self.run.drop_unknown_success(episodes)
            row = {f"train/{k}" if "/" not in k else k: v for k, v in (metrics | episodes).items()}
            row |= {
                "train/updates": self.learner.updates,
                "replay/online": len(self.online),
                "replay/demonstrations": len(self.demos),
                "time/update": end - mid,
                "time/collect": mid - begin,
                "util/learner_wait": (mid - begin) / (end - begin),
                "health/restarts": self.actor.restarts,
                "rate/steps_per_s": self.due / (end - begin),
            }
            self.due = 0
            if self.control is not None:
                row |= {f"starts/{k}": v for k, v in self.control.metrics().items()} | task_metrics(
                    task_names(self.run.env), [ended]
                )
                row["time/starts"] = self.control.take_seconds()
            if helped:
                row["human/operator_minutes"] = self.actor.help_steps * self.run.env.spec.period / 60
            self.report.log(self.run.step, row)
            self.report.advance(
                self.run.step, episodes.get("success"), self.note(metrics), shown_return(config, episodes)
            )
            cadence.after_update()
        if not self.run.stop.asked and not self.learner.updates:
            self.report.say(
                f"nothing was learnt: updates begin after {o.warmup} steps (--rl.warmup), the run made "
                f"{self.run.step} (--steps)",
                "warning",
            )
        if self.run.stop.asked:
            self.save_all(finished=False)
            return self.run.end_stopped()
        self.run.judge_final()
        self.save_all(finished=True)
        return self.run.end()

    def note(self, metrics: dict[str, float]) -> str | None:
        """A few words for the progress line; None: those of the last update still hold."""
        if not metrics and self.learner.updates:
            return None
        words = f"q {metrics['q']:.2f} · {self.learner.updates} updates" if metrics else "filling replay"
        if replay_options(self.config).operator == "none":
            return words
        minutes = self.actor.help_steps * self.run.env.spec.period / 60
        return f"{words} · {minutes:.1f} operator min"
