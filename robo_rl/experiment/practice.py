"""One round of practice: episodes of a policy with operators beside it, as a protocol shares them, into a
data set."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from robo_rl import files, old_names
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.correct_options import CorrectOptions
from robo_rl.human import alarms, detect
from robo_rl.human.fleet import OperatorStats, RobotFleet
from robo_rl.human.intervention import InterventionEnv
from robo_rl.human.operators import ScriptedOperator
from robo_rl.human.protocols import OperatorAssignment, target_starts
from robo_rl.log import Progress
from robo_rl.options import ScriptedOperatorOptions

STATS = "operator_stats.json"  # statistics of an unfinished round
PRACTICE_START = 1_200_000_000  # starts of practice: below those of demonstrations and evaluation


def person_of(options: CorrectOptions) -> ScriptedOperatorOptions:
    """The scripted operator as the protocol has them."""
    person = options.scripted_operator
    if options.protocol == "rac":
        return replace(person, recovery_time=person.recovery_time or 1.5, until_subtask=not person.until_end)
    if options.protocol == "armada":
        return replace(person, until_end=True, late_share=1.0)
    return person


def practice_starts(seed: int, round_: int, count: int) -> list[int]:
    """Starts of a round of practice, at most 5000."""
    return [PRACTICE_START + seed * 100_000 + round_ * 5_000 + i for i in range(min(count, 5_000))]


class Practice:
    """Practises in `env` and measures in `eval_env`. out: folder of corrections/ and operator_stats.json, the
    statistics of an unfinished round; demos: data set of demonstrations, which armada's detector compares
    with, None: there is none."""

    def __init__(
        self, options: CorrectOptions, env, eval_env, out: Path, demos: Path | None, progress: Progress
    ):
        self.options, self.env, self.eval_env, self.out = options, env, eval_env, out
        self.demos, self.progress = demos, progress

    def run(self, policy, r: int) -> dict[str, float]:
        """Practise round r, or what is left of it -> its statistics."""
        o, path = self.options, self.out / STATS
        begun = path if path.exists() else self.out / old_names.STATS_FILE[STATS]
        before = old_names.round_stats(files.read_json(begun)) if begun.exists() else {}
        resumed = before.get("round") == r
        operator, freeze = self.make_operator(r, before["operator_stats"]["human_steps"] if resumed else 0)
        env = InterventionEnv(self.env, operator, freeze=freeze)
        with Writer(self.out / "corrections", spec=self.env.spec) as writer:
            recorded = set(load(writer.root).start.tolist()) if writer.episodes else set()
            whole = self.starts(policy, r)
            wanted = [s for s in whole if s not in recorded]
            robots: RobotFleet | None = None

            def starts():
                for s in wanted:
                    if o.human_steps and robots is not None and robots.stats.human_steps >= o.human_steps:
                        return
                    yield s

            def add(episode, i):
                assert robots is not None
                writer.add(episode)
                writer.flush()  # durable before it counts
                files.write_json(path, {"round": r, "operator_stats": asdict(robots.stats)})

            robots = RobotFleet(
                env,
                policy,
                starts(),
                seed=o.seed * 1000 + r,
                on_episode=add,
                rewindable=freeze,
                cut=o.protocol == "rac" if o.cut is None else o.cut,
            )
            robots.stats.operators = o.operators if o.protocol == "armada" else o.robots
            if resumed:
                robots.stats = OperatorStats(
                    **{"attended_steps": before["operator_stats"]["human_steps"]} | before["operator_stats"]
                )
            if isinstance(operator, OperatorAssignment):
                self.add_detector(policy, robots, operator)
            self.progress.start("help", o.human_steps or len(whole), "steps" if o.human_steps else "episodes")
            while robots.is_running:
                robots.step()
                a = robots.stats
                self.progress.update(
                    a.human_steps if o.human_steps else a.episodes,
                    a.successes / a.episodes if a.episodes else None,
                    progress_note(a),
                )
        stats = operator.stats
        robots.stats.help_requests = int(stats["asked"].sum())
        helped = max(1.0, float(stats["helped"].sum()))
        robots.stats.reaction = (
            float(stats["reaction"].sum()) / max(1.0, float(stats["asked"].sum())) * helped
        )
        return robots.stats.summary()

    def starts(self, policy, r: int) -> list[int]:
        """Starts of round r; twin_rl: those at which the policy fails in the twin."""
        o = self.options
        if o.protocol != "twin_rl":
            return practice_starts(o.seed, r, 5_000 if o.human_steps else o.episodes)
        pool, successes = practice_starts(o.seed, r, o.twin_starts), np.zeros((), int)
        self.progress.start("twin", o.twin_trials, "trials")
        for trial in range(o.twin_trials):
            successes = successes + np.array(
                evaluate(self.eval_env, policy, np.array(pool), trial)["success"], int
            )
            self.progress.update(trial + 1, successes.sum() / (len(pool) * (trial + 1)))
        low = target_starts(successes, np.full(len(pool), o.twin_trials))
        self.progress.say(
            f"round {r}: the policy fails at {len(low)} of {len(pool)} starts in the twin more often than not"
        )
        return [pool[i] for i in (low if len(low) else range(len(pool)))[: o.episodes]]

    def make_operator(self, r: int, given: int):
        """(the operators of round r, whether time stands still while a robot waits for one); given: control
        steps of help that the round already has."""
        person = person_of(self.options)
        if self.options.human_steps:
            person = replace(
                person, leave_after=max(1, self.options.human_steps - given) * self.env.spec.period / 60
            )
        persons = ScriptedOperator(self.env, person, self.options.seed * 1000 + r)
        if self.options.protocol != "armada":
            return persons, False
        return OperatorAssignment(persons, self.options.operators), hasattr(self.env, "get_state")

    def add_detector(self, policy, robots: RobotFleet, dispatch: OperatorAssignment) -> None:
        """The detector beside `robots`: calibrated on the policy's successes without help, it requests help
        from `dispatch`."""
        o, every = self.options, policy.options.execute
        monitor = self.calibrated_monitor(policy)

        def before_decision(mask: np.ndarray) -> None:
            mask = mask & ~dispatch.awaits_operator()
            if not mask.any():
                return
            point = detect.embed(policy, {k: v[mask] for k, v in robots.obs.items()})
            for i, x in zip(np.flatnonzero(mask).tolist(), point, strict=True):
                if not robots.episodes[i].frames:
                    monitor.begin(i)
                if monitor.check(i, x) > 1:
                    dispatch.request_help(i)

        def rewind(i: int) -> None:
            if o.rewind and robots.rewindable:
                robots.rewind(i, monitor.rewind_to(i) * every)

        robots.before_decision, dispatch.rewind = before_decision, rewind

    def calibrated_monitor(self, policy) -> "detect.FailureMonitor | alarms.LargestMonitor":
        """The monitor of the policy; where too few episodes succeed, elapsed time alone is an alarm."""
        o, every = self.options, policy.options.execute
        if self.demos is None:
            raise UserError(
                f"{o.run} has no demonstrations, which armada's detector compares with; train the run with "
                "--demos"
            )
        data = load(self.demos)
        phi = detect.embed(
            policy,
            {"state": data.state, "task": np.array([data.tasks[k] for k in data.task_index])}
            | {f"image/{v}": data.images(v) for v in policy.spec.views},
        )
        demos = [phi[a:b:every] for a, b in zip(data.from_[:20], data.to[:20], strict=True)]
        ref = detect.demo_embeddings(demos)
        rollouts = detect.embed_episodes(
            self.eval_env, policy, [PRACTICE_START - 1_000_000 + i for i in range(o.calibration)]
        )
        found = [
            [detect.float_index(x[:k], ref) for k in range(1, len(x) + 1)]
            for x, success in rollouts
            if success
        ]
        scales: list = []
        try:
            if o.detector == "largest":
                scales, threshold = alarms.largest_threshold(
                    [alarms.scores_by_check(x, ref, demos) for x, success in rollouts if success],
                    o.false_alarms,
                )
            else:
                threshold = detect.calibrate([np.array([m.index for m in f]) for f in found], o.false_alarms)
        except UserError as e:
            self.progress.say(f"{e}; elapsed time alone calls for help this round")
            threshold = detect.Threshold(
                np.zeros(1), np.ones(1), np.inf, self.eval_env.spec.max_steps // every
            )
        most = max([len(f) for f in found], default=1)
        limit = np.array(
            [
                np.quantile([f[min(k, len(f) - 1)].matched[min(k, len(f) - 1)] for f in found], 0.9)
                if found
                else np.inf
                for k in range(most)
            ]
        )
        if scales:
            return alarms.LargestMonitor(ref, demos, scales, threshold, limit, o.robots)
        return detect.FailureMonitor(ref, threshold, limit, o.robots)


def recorded_stats(corrections: Path, before: int) -> dict[str, float]:
    """Statistics of the episodes that people recorded in the console after the first `before` ones."""
    data = load(corrections)
    new = data.episode_index >= before
    human = data.phase > 1
    first = np.concatenate([[True], data.episode_index[1:] != data.episode_index[:-1]])
    begins = human & (~np.concatenate([[False], human[:-1]]) | first) & new
    human &= new
    return OperatorStats(
        1 / data.features.fps,
        steps=int(new.sum()),
        human_steps=int(human.sum()),
        attended_steps=int(human.sum()),
        episodes=len(data) - before,
        successes=int(data.success[before:].sum()),
        interventions=int(begins.sum()),
        robots=1,
        operators=1,
    ).summary()


def progress_note(account: OperatorStats) -> str:
    """The statistics in the progress line."""
    s = account.summary()
    return (
        f"{s['operator_minutes']:.1f} operator min, {s['interventions_per_hour']:.0f} interventions/h, "
        f"human {100 * s['human_share']:.0f} %"
    )
