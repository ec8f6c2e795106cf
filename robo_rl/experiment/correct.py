"""Rounds of correction: episodes with people beside the robots, a refit on what they did, an evaluation.

The result is a run folder of its own (`robo_rl eval`, `report` and another `correct` take it) that also holds
`corrections/`, the LeRobot v3 data set with source and phase of every step, and `rounds.json`, statistics and
success per round.
"""

import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from robo_rl import old_names
from robo_rl.errors import UserError, quoted
from robo_rl.experiment.correct_options import CorrectOptions
from robo_rl.options import BcOptions, ScriptedOperatorOptions
from robo_rl.starts import CHOOSE, REPORT

if TYPE_CHECKING:
    from robo_rl.experiment.practice import Practice


def demos_of(run: Path, config) -> Path | None:
    """Folder of a run's demonstrations; None: it has none."""
    folder = run / "demos" if config.demos.isdecimal() else Path(config.demos)
    return folder if (folder / "meta" / "info.json").exists() else None


def read_rounds(folder: Path) -> list[dict]:
    """The rounds that are done in a folder of `correct`: round, operator_stats, eval; [] for another
    folder."""
    from robo_rl import files

    path = folder / "rounds.json"
    return [old_names.round_stats(entry) for entry in files.read_json(path, list)] if path.exists() else []


@dataclass(frozen=True, slots=True)
class CorrectResult:
    """rounds: the entries of rounds.json; report: success of the best round on starts that nothing was chosen
    on."""

    folder: Path
    rounds: list[dict]
    report: dict


def correct(options: CorrectOptions) -> CorrectResult:
    """Run the rounds and write the result's folder; the run itself is not changed."""
    from robo_rl import files
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.folder import pick_checkpoint

    source, folder = pick_checkpoint(Path(options.run), options.checkpoint)
    config = replace(load_config(source), threads=options.threads, video=False)
    if options.operator == "console" and not (source / "corrections" / "meta" / "info.json").exists():
        raise UserError(f"{source} has no corrections yet: record some with robo_rl console {quoted(source)}")
    how = "console" if options.operator == "console" else options.protocol
    out = Path(options.out or f"{str(source).rstrip('/')}-{how}-s{options.seed}")
    with files.lock(out):
        return CorrectionRounds(options, config, source, folder, out).run()


class CorrectionRounds:
    """Writes one folder of rounds. config, source, checkpoint: of the run whose policy practises; out: the
    folder."""

    def __init__(self, options: CorrectOptions, config, source: Path, checkpoint: Path, out: Path):
        self.options, self.config, self.source, self.checkpoint, self.out = (
            options,
            config,
            source,
            checkpoint,
            out,
        )

    def run(self) -> CorrectResult:
        """Practise, refit and evaluate, round by round."""
        import torch

        from robo_rl import checkpoint
        from robo_rl.experiment.envs import make_env, obs_spec
        from robo_rl.experiment.practice import Practice, recorded_stats
        from robo_rl.log import Progress

        o = self.options
        torch.set_num_threads(1)
        self.begin()
        last = checkpoint.checkpoints(self.out)
        # one that was killed before its checkpoint was there is made again
        self.rounds = [
            x for x in read_rounds(self.out) if last and checkpoint.name(x["round"]) <= last[-1].name
        ]
        self.policy, _ = checkpoint.load_policy(last[-1] if last else self.checkpoint)
        task_limit = self.config.max_steps
        probe = make_env(self.config, 1)
        limit = o.max_steps or 3 * probe.spec.max_steps
        checkpoint.check_fits(self.policy, obs_spec(probe, self.policy.spec.language), str(self.checkpoint))
        probe.close()
        self.limit = limit
        self.eval_env = make_env(replace(self.config, max_steps=task_limit), min(o.eval_episodes, 256))
        with Progress() as self.progress:
            self.progress.say(f"run {self.out}")
            if not self.rounds:
                self.rounds.append({"round": 0, "operator_stats": {}, "eval": self.evaluate(0)})
                self.save(0)
            self.env = self.practice_env()
            practice = Practice(
                o, self.env, self.eval_env, self.out, demos_of(self.source, self.config), self.progress
            )
            recorded = o.operator == "console"
            learnt = sum(x["operator_stats"].get("episodes", 0) for x in self.rounds)
            for r in range(len(self.rounds), (self.recorded_rounds(learnt) if recorded else o.rounds) + 1):
                stats = (
                    recorded_stats(self.source / "corrections", learnt)
                    if recorded
                    else self.practise(practice, r)
                )
                self.refit(r)
                self.rounds.append({"round": r, "operator_stats": stats, "eval": self.evaluate(r)})
                self.save(r)
            report = self.report()
            self.progress.close()
        return CorrectResult(self.out, self.rounds, report)

    def recorded_rounds(self, learnt: int) -> int:
        """How many rounds there are to be where people recorded corrections in the console, of which `learnt`
        episodes are learnt from."""
        from robo_rl.data.reader import load

        if len(load(self.source / "corrections")) > learnt:
            return len(self.rounds)
        self.progress.say(
            f"no corrections since the last round; record more with robo_rl console {quoted(self.source)}"
        )
        return len(self.rounds) - 1

    def practice_env(self):
        """The robots that practise, filmed where that is asked for and anything draws them."""
        from robo_rl.experiment.envs import make_env
        from robo_rl.film import FilmedEnv

        config, o = replace(self.config, max_steps=self.limit), self.options
        if o.video and o.operator != "console":
            try:
                return FilmedEnv(make_env(config, o.robots, render=True), 0)
            except UserError as e:
                self.progress.say(f"no video: {e}")
        return make_env(config, o.robots)

    def practise(self, practice: "Practice", r: int) -> dict[str, float]:
        """Round r of practice -> its statistics; its film is written when it is over:
        videos/round_<r>.mp4."""
        from robo_rl.film import COUNT, FilmedEnv, write_film

        if isinstance(self.env, FilmedEnv):
            self.env.film_next(COUNT, f"round {r}, with help")
        stats = practice.run(self.policy, r)
        if isinstance(self.env, FilmedEnv) and self.env.takes:
            write_film(self.out / "videos" / f"round_{r}.mp4", self.env.takes, self.env.fps)
            self.env.takes.clear()
        return stats

    def begin(self) -> None:
        """Write run.json of the result: the run's own, with where it came from. UserError: the folder is
        another's."""
        from robo_rl import files

        path = self.out / "run.json"
        mine = {"from": str(self.source), "checkpoint": self.checkpoint.name, "options": asdict(self.options)}
        if path.exists():
            before = files.read_json(path).get("correct")
            if not isinstance(before, dict):
                raise UserError(
                    f"--out: {self.out} holds a run that is not of robo_rl correct; choose another folder"
                )
            had = {"detector": "float"} | old_names.options(before["options"], old_names.CORRECT)
            for group, options in (("bc", BcOptions()), ("scripted_operator", ScriptedOperatorOptions())):
                if isinstance(had.get(group), dict):  # an option that was not there then is at its default
                    had[group] = files.plain(asdict(options)) | had[group]
            differ = [
                k
                for k, v in files.plain(mine["options"]).items()
                if had.get(k) != v and k not in ("rounds", "json", "out", "run", "video")
            ]
            if differ:
                raise UserError(
                    f"--out: {self.out} was begun with another --{differ[0].replace('_', '-')}; "
                    "choose another folder or the same options"
                )
            return
        document = files.read_json(self.source / "run.json")
        config = asdict(self.config) | {"demos": str(demos_of(self.source, self.config) or 0)}
        files.write_json(
            path,
            {
                **document,
                "name": self.out.name,
                "config": config,
                "correct": mine,
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            },
        )

    def refit(self, r: int) -> None:
        """Train the policy on by behaviour cloning on demonstrations and corrections."""
        from robo_rl.algos import bc
        from robo_rl.data.reader import load
        from robo_rl.human.training_segments import segment_sampler

        o, demos = self.options, demos_of(self.source, self.config)
        corrections = (self.source if o.operator == "console" else self.out) / "corrections"
        parts = ([load(demos)] if demos else []) + [load(corrections)]
        shares = [o.demo_share, 1 - o.demo_share] if demos else None
        own = o.protocol == "armada" if o.learn_from_successes is None else o.learn_from_successes
        try:
            sample = segment_sampler(
                parts, self.policy.spec, self.policy.options.horizon, own, shares, o.phases
            )
        except UserError as e:
            self.progress.say(f"round {r}: {e}")
            return
        self.progress.start("sft", o.bc.updates, "updates")
        self.policy.train()
        bc.train(
            self.policy,
            sample,
            o.bc,
            o.seed * 1000 + r,
            lambda update, loss: self.progress.update(update, note=f"loss {loss:.3f}"),
        )
        self.policy.eval()

    def evaluate(self, r: int) -> dict:
        """Success without help on the starts that choose the best round; also as evals/round_<r>.json."""
        return self.measure(f"round_{r}", r, CHOOSE, f"round {r}")

    def measure(self, label: str, r: int, which: int, title: str) -> dict:
        """Success without help of the policy of round `r` on the starts of list `which`; also as
        evals/<label>.json."""
        from robo_rl import files
        from robo_rl.evaluation import evaluate
        from robo_rl.starts import eval_starts
        from robo_rl.stats import success_rate

        starts = eval_starts(self.options.eval_episodes, which)
        result = evaluate(self.eval_env, self.policy, starts, which)
        rate, low, high = success_rate(result["success"], result.get("origin"))
        (self.out / "evals").mkdir(exist_ok=True)
        files.write_json(
            self.out / "evals" / f"{label}.json",
            result
            | {
                "label": label,
                "step": r,
                "n": len(starts),
                "starts": starts.tolist(),
                "list": which,
                "wilson": [low, high],
                "time": 0.0,
            },
        )
        self.progress.say(
            f"{title:>14}  success {rate:.3f}  95 % interval [{low:.3f}, {high:.3f}]  n={len(starts)}  "
            f"(starts of list {which}, {'reported' if which == REPORT else 'which choose'})"
        )
        return {"success": rate, "low": low, "high": high, "n": len(starts), "list": which}

    def best_round(self) -> dict:
        """The round with the most success on the starts that choose; the last of equals, which learnt from
        most."""
        return max(self.rounds, key=lambda x: (x["eval"]["success"], x["round"]))

    def report(self) -> dict:
        """Success of the best round on starts that nothing was chosen on; also as evals/best.json."""
        from robo_rl import checkpoint

        r = self.best_round()["round"]
        self.policy, _ = checkpoint.load_policy(self.out / "checkpoints" / checkpoint.name(r))
        return {"round": r} | self.measure("best", r, REPORT, "best round")

    def save(self, r: int) -> None:
        """rounds.json, then the checkpoint of the round (its presence says that the round is whole)."""
        from robo_rl import checkpoint, files
        from robo_rl.experiment.practice import STATS

        files.write_json(self.out / "rounds.json", self.rounds)
        best = self.best_round()
        path = self.out / "checkpoints"
        path.mkdir(exist_ok=True)
        checkpoint.save_checkpoint(
            path / checkpoint.name(r),
            self.policy,
            {},
            {
                "step": r,
                "best": {"success": best["eval"]["success"], "return": 0.0, "step": best["round"]},
                "finished": True,
            },
        )
        for name in (STATS, old_names.STATS_FILE[STATS]):
            (self.out / name).unlink(missing_ok=True)
        for old in checkpoint.checkpoints(self.out)[:-2]:
            if old.name not in (checkpoint.name(0), checkpoint.name(best["round"])):
                shutil.rmtree(old)
