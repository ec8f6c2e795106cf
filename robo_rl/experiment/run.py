"""A run folder being written: what its stages share, its checkpoints, and the looks that choose the best of
them.

run.json  metrics.jsonl  timeline.jsonl  demos/  evals/<label>.json  videos/  checkpoints/step_…
"""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robo_rl.errors import plural, quoted
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.evaluation import Evaluator
from robo_rl.experiment.parallel import workers
from robo_rl.experiment.reporting import Reporter
from robo_rl.selection import Look, best_look, stop_reason, too_few
from robo_rl.signals import StopSignal
from robo_rl.starts import CHOOSE, REPORT
from robo_rl.stats import Interval, paired_difference
from robo_rl.types import has_success

if TYPE_CHECKING:
    import numpy as np
    import torch

    from robo_rl.algos.averaged_weights import AveragedWeights

TIMELINE = 4_000_000  # bytes of timeline.jsonl


class Stopped(Exception):
    """The user asked to stop before RL began; what needs keeping is kept."""


def looks_of(meta: dict, episodes: int) -> list[Look]:
    """The looks of a checkpoint; of one that was made before they were kept, its best."""
    if "looks" in meta:
        return [Look(*x) for x in meta["looks"]]
    best = meta["best"]
    return (
        [Look(best["step"], round(best["success"] * episodes), episodes, best["return"])]
        if best["step"] >= 0
        else []
    )


def supervised_tick(
    run: "Run",
    stage: str,
    updates: int,
    made: int,
    look: "Callable[[int], dict[str, float]] | None" = None,
    metric: str = "sft/loss",
) -> Callable[[int, float], None]:
    """Begin a stage of so many supervised updates, after the `made` ones -> what is called with the number
    and loss of each: it reports them, the loss as `metric`, with what `look` adds, and raises Stopped when a
    signal comes."""
    if updates:  # rlpd, for one, learns nothing before RL
        run.report.start(stage, updates, "updates")

    def tick(update: int, loss: float) -> None:
        run.report.advance(update, note=f"loss {loss:.3f}")
        row = look(update) if look else {}
        if row or update % 100 == 0 or update == updates:
            run.report.log(made + update, {metric: loss} | row, stage="sft")
        if run.stop.asked:
            raise Stopped

    return tick


class Run:
    """One run folder being written. `policy`, `step` [control steps of RL; without an env supervised updates]
    and `looks` are those of the newest state; where there is an `average` of its weights, that is what is
    evaluated and kept, and `policy` goes on learning."""

    def __init__(self, config: TrainConfig, folder: Path, env, report: Reporter):
        self.config, self.folder, self.env, self.report = config, folder, env, report
        self.stop = StopSignal()
        self.evaluator = Evaluator(config, folder, report)
        self.policy: Any = None  # a Policy, from the supervised stage or a checkpoint on
        self.average: AveragedWeights | None = None
        self.step, self.looks = 0, []
        self.rl_from = 0  # step of the look that RL began with, after rounds of the policy's own successes
        self.returns: list[tuple[int, int]] = []  # from which step to the weights of which
        # supervised updates: of the policy, and of all that were made before it too
        self.taught, self.updates = 0, 0
        # of how many episodes the activation was compared, and which was better
        self.compared: tuple[int, str] = (0, "")
        self.begun: Path | None = None  # the checkpoint that supervision goes on from
        self.frames: Any = None  # the `supervised_frames.SupervisedFrames` whose pictures were drawn last
        # rows of a data set that the trunk, as it is, has looked at, and what it pools of each
        self.pooled: tuple[np.ndarray, torch.Tensor] | None = None
        self.started, self.told_too_few, self.succeeded = time.monotonic(), False, False
        self.told_unsound = False
        self.asked_before = judge_requests() if config.judge else 0

    # ---- evaluation

    def evaluate(self, label: str, which: int = REPORT, policy=None, step: "int | None" = None) -> dict:
        """Evaluate the policy, or `policy` of an earlier `step`, on the starts of list `which`; see
        `Evaluator`."""
        clock = time.monotonic_ns()
        self.policy.eval()
        with self.averaged():
            result = self.evaluator.evaluate(
                label, policy or self.policy, which, self.step, self.step if step is None else step
            )
        if self.step:
            self.timeline([("eval", clock, time.monotonic_ns())])
        self.policy.train()
        return result

    def drop_unknown_success(self, stats: dict[str, float]) -> None:
        """Take success out of the statistics of newest episodes where the task knows none. Envs here that no
        one has stepped yet, as beside workers, cannot say: success is told from the first one on."""
        self.succeeded |= stats.get("success", 0.0) > 0
        unsaid = all(getattr(env, "reports_success", True) is None for env in self.envs)
        if unsaid and not self.succeeded or not self.knows_success:
            stats.pop("success", None)

    @property
    def envs(self) -> list:
        """Those that it steps in and evaluates in."""
        return [env for env in (self.env, self.evaluator.env) if env is not None]

    @property
    def knows_success(self) -> bool:
        """Whether its task knows success (`types.has_success`)."""
        return all(map(has_success, self.envs))

    def averaged(self):
        """Within it `policy` has its averaged weights, if it has any."""
        return self.average.shown() if self.average else nullcontext()

    def look(self) -> float:
        """Evaluate on the starts that pick the best checkpoint and say when to stop -> success."""
        result = self.evaluate(f"step_{self.step:09d}", CHOOSE)
        tasks = [[round(row["success"] * row["n"]), row["n"]] for row in result.get("tasks", {}).values()]
        self.looks.append(
            Look(
                self.step,
                sum(result["success"]),
                result["n"],
                sum(result["return"]) / result["n"],
                tasks,
                len(set(result.get("origin", ()))),
            )
        )
        if not self.told_too_few and (why := too_few(self.looks, self.config.target)):
            self.told_too_few = True
            self.report.say(why)
        return self.looks[-1].worst

    def goes_on(self) -> bool:
        """Whether RL has steps left to make: no signal, and the looks so far do not end it (said once)."""
        if self.step >= self.config.steps or self.stop.asked:
            return False
        why = stop_reason(self.looks, self.config.target, self.config.patience)
        if why:
            self.report.say(why)
        return not why

    def judge_final(self) -> None:
        """Report the last policy and, where another was better on the starts that choose, the best one."""
        from robo_rl import checkpoint

        if not self.looks or self.looks[-1].step != self.step:
            self.look()
        if (why := self.fallen()) is not None:
            self.take_best(why, "the run ends with")
        final = self.evaluate("final")
        if "no_success" not in final and not any(final["success"]) and not any(x.rate for x in self.looks):
            self.report.say(f"no episode of an evaluation succeeded. What helps: {what_helps(self)}")
        best = best_look(self.looks).step
        if best != self.step:
            self.evaluate(
                "best",
                REPORT,
                checkpoint.load_policy(
                    self.folder / "checkpoints" / checkpoint.name(best), self.config.device
                )[0],
                best,
            )

    def fallen(self) -> Interval | None:
        """Success at the newest look minus that of the policy that RL began with, start by start, where the
        whole interval is below 0 and nothing was done about it yet."""
        from robo_rl import files

        steps = [look.step for look in self.looks]
        if self.rl_from not in steps[:-1] or steps[-1] in {at for at, _ in self.returns}:
            return None
        paths = [self.folder / "evals" / f"step_{step:09d}.json" for step in (self.rl_from, steps[-1])]
        if not all(path.exists() for path in paths):
            return None  # somebody has cleaned up
        first, last = map(files.read_json, paths)
        difference = paired_difference(last["success"], first["success"], groups=last.get("origin"))
        return difference if difference.high < 0 else None

    def take_best(self, why: Interval, then: str) -> int:
        """Give the policy the weights of the best checkpoint and say so -> its step."""
        from robo_rl import checkpoint

        best = best_look(self.looks).step
        self.policy.load_state_dict(
            checkpoint.load_policy(self.folder / "checkpoints" / checkpoint.name(best))[0].state_dict()
        )
        if self.average:
            self.average.add(1.0)
        self.returns.append((self.step, best))
        self.report.say(
            f"success fell below that of the policy that RL began with: {why.value:+.3f}, 95 % interval "
            f"[{why.low:+.3f}, {why.high:+.3f}], on the same starts; {then} the best checkpoint, of step "
            f"{best}",
            "warning",
        )
        return best

    # ---- what is kept

    def save(self, train: dict, finished: bool, **more: int) -> None:
        """Checkpoint at the present step. more: what else its meta.json says."""
        from robo_rl import checkpoint

        root = self.folder / "checkpoints"
        root.mkdir(exist_ok=True)
        best = best_look(self.looks) if self.looks else Look(-1, 0, 1, 0.0)
        path = root / checkpoint.name(self.step)
        with self.averaged():
            learns = {"learns": self.average.state_dict()} if self.average else {}
            checkpoint.save_checkpoint(
                path,
                self.policy,
                train | learns,
                {
                    "step": self.step,
                    "best": {"success": best.rate, "return": best.gain, "step": best.step},
                    "looks": [list(x) for x in self.looks],
                    "rl_from": self.rl_from,
                    "returns": [list(x) for x in self.returns],
                    "finished": finished,
                    "taught": [self.taught, self.updates],
                    "lines": self.report.lines,
                }
                | more,
            )
        self.tidy()
        self.report.tell("checkpoint", self.step, text=str(path))

    def tidy(self) -> None:
        """Of the checkpoints the last two, the supervised one and the best stay; without an env the last and
        the best."""
        from robo_rl import checkpoint

        stay = set() if self.env is None else {checkpoint.name(0)}
        stay |= {checkpoint.name(best_look(self.looks).step)} if self.looks else set()
        for old in checkpoint.checkpoints(self.folder)[: -1 if self.env is None else -2]:
            if old.name not in stay:
                shutil.rmtree(old)

    def forget_after(self, step: int) -> None:
        """Drop evaluations that a killed process made after its last checkpoint: they are made again."""
        from robo_rl import files

        for path in (self.folder / "evals").glob("*.json"):
            if path.stem in ("final", "best") or (files.read_json(path).get("step") or 0) > step:
                path.unlink()

    def timeline(self, spans: list[tuple[str, int, int]]) -> None:
        """Append who worked when [s since the start of the run] to timeline.jsonl, up to a few megabytes."""
        now, at = time.monotonic_ns(), self.report.elapsed
        path = self.folder / "timeline.jsonl"
        if spans and not (path.exists() and path.stat().st_size > TIMELINE):
            rows = [
                [who, round(at - (now - a) / 1e9, 3), round(at - (now - b) / 1e9, 3)] for who, a, b in spans
            ]
            with open(path, "a", encoding="utf-8") as f:
                f.write(json.dumps(rows) + "\n")

    # ---- the end

    def end(self, words: str = "", code: int = 0) -> int:
        """Say what to do next, below the last progress line -> the exit status."""
        self.report.end_stage()
        steps, asked = self.step, self.config.steps
        made = f", {steps:,} control steps" if self.env is not None and steps else ""
        made += f" (--steps {asked})" if made and steps > 1.1 * asked else ""
        done = f"done in {time.monotonic() - self.started:.0f} s{made}"
        cost = ""
        if self.config.judge and (asked := judge_requests() - self.asked_before):
            others = ", without those of its workers" if workers(self.config) else ""
            cost = f"; its judge took {plural(asked, 'request')}{others}"
        done += f"{cost}. Look at it: robo_rl report {quoted(self.folder)}"
        self.report.say(words + cost if words else done)
        if not code:
            self.report.tell("finished", self.step, text=str(self.folder))
        return code

    def end_stopped(self) -> int:
        """The last words of a run that a signal stopped, after its checkpoint."""
        return self.end(
            f"saved at step {self.step}; go on with: robo_rl train --resume {quoted(self.folder)}",
            self.stop.code,
        )


def judge_requests() -> int:
    """Requests that judges of success behind HTTP were sent by this process."""
    from world_models.judge_http import Server

    return Server.of_process


def what_helps(run: Run) -> str:
    """What a user can do where no episode succeeds."""
    from robo_rl.experiment.recipes import scratch

    config, own = run.config, scratch(run.config.sim, run.config.task)
    if config.demos not in ("", "0"):
        first = "more --demos" + " or --bc.updates" * bool(config.bc.updates)  # rlpd, for one, has none
    elif hasattr(run.env, "expert_action"):
        first = "--demos 20, which learns from successes of the env's expert first"
    else:
        first = "--demos FOLDER, which learns from successes of a data set first (robo_rl collect)"
    dense = "an env that pays for coming closer" if own or config.reward == "dense" else "--reward dense"
    return f"{first}; {dense}; more --steps"


class Cadence:
    """When RL looks and when it saves: every --eval-every steps both, with `looked` between them, and
    `seconds` after the last save, or where the caller says that it cannot wait, a save alone."""

    def __init__(
        self, run: Run, save: Callable[[], None], seconds: float, looked: Callable[[], None] = lambda: None
    ):
        self.run, self.save, self.seconds, self.looked = run, save, seconds, looked
        self.every = run.config.eval_every or max(1, run.config.steps // 10)
        self.next = (run.step // self.every + 1) * self.every
        self.saved = time.monotonic()

    def after_update(self, now: bool = False) -> None:
        """Look and save if it is time; `now`: save in any case."""
        run = self.run
        if run.step >= self.next and run.step < run.config.steps:
            self.next = (run.step // self.every + 1) * self.every
            run.look()
            self.looked()
        elif not now and time.monotonic() - self.saved <= self.seconds:
            return
        self.save()
        self.saved = time.monotonic()
