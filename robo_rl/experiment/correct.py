"""`robo_rl correct RUN`: rounds of practice with people beside the robots, refitting on what they did, and evaluation.

The result is a run folder of its own (`robo_rl eval`, `report` and another `correct` take it) that also holds
`corrections/`, the LeRobot v3 data set with source and phase of every step, and `rounds.json`, the accounts.
"""

import json
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import tyro

from robo_rl.data.episode import HELP
from robo_rl.errors import UserError, choose, in_range
from robo_rl.options import BcOptions, Person
from robo_rl.selection import CHOOSE, REPORT

PROTOCOLS = ("hg_dagger", "rac", "armada", "twin_rl")
PRACTICE_START = 1_200_000_000  # starts of practice: below those of demonstrations and evaluation


@dataclass(frozen=True, kw_only=True)
class Correct:
    """Practise with help, learn from it, evaluate; several rounds."""

    run: tyro.conf.Positional[str]
    """Run folder whose policy practises."""
    protocol: str = "hg_dagger"
    """hg_dagger: help until policy and person agree; rac: recovery, then correction until the sub-task is done, which ends the episode;
    armada: a detector calls one of few operators, who rewind and correct; twin_rl: hg_dagger from those starts alone at which the
    policy fails in a twin, which is the run's own simulator.
    """
    operator: str = "scripted"
    """scripted; console: no practice, one round of learning from what people did in robo_rl console RUN."""
    checkpoint: str = "best"
    rounds: int = 3
    episodes: int = 24
    """Episodes of practice per round."""
    human_steps: int = 0
    """A round lasts until people have helped for so many control steps, however many episodes that takes; 0: for its episodes."""
    robots: int = 8
    operators: int = 1
    """Operators for all robots (armada; elsewhere every robot has one)."""
    false_alarms: float = 0.1
    """Share of successful episodes in which the detector may call (armada)."""
    calibration: int = 200
    """Episodes without help before each round that calibrate the detector (armada)."""
    twin_starts: int = 200
    """Starts that the twin tries before each round (twin_rl)."""
    twin_trials: int = 4
    """How often each; those with less than half successes are practised, first those that succeed at times."""
    cut: bool | None = None
    """End an episode once the person has corrected and handed back (RaC's second rule); None: only with rac."""
    rewind: bool = True
    """Armada: go back to before the failure (simulators with snapshots)."""
    own: bool | None = None
    """Also learn from the policy's own successes; None: only with armada."""
    phases: tuple[str, ...] = HELP
    """Of a person's help, what to learn from; correction alone is the comparison that RaC makes."""
    demo_share: float = 0.5
    """Share of demonstrations in every batch."""
    eval_episodes: int = 200
    max_steps: int = 0
    """Episode limit of practice [control steps]; 0: three times the task's own, for help takes time."""
    seed: int = 0
    threads: int = 1
    out: str = ""
    """Folder of the result; empty: RUN-<protocol>-s<seed>. An unfinished one is gone on with."""
    json: bool = False
    bc: BcOptions = field(default_factory=lambda: BcOptions(updates=4000, lr=5e-4, noises=4))
    person: Person = field(default_factory=Person)

    def __post_init__(self) -> None:
        choose("protocol", self.protocol, PROTOCOLS)
        choose("operator", self.operator, ("scripted", "console"))
        for phase in self.phases:
            choose("phases", phase, HELP)
        for name, low, high in (
                ("rounds", 1, 1000), ("episodes", 1, 99_999), ("human_steps", 0, 10**9), ("robots", 1, 4096), ("operators", 1, 4096),
                ("false_alarms", 0, 0.5), ("demo_share", 0, 1), ("max_steps", 0, 10**7), ("eval_episodes", 1, 10**6),
                ("twin_starts", 1, 5000), ("twin_trials", 1, 1000), ("calibration", 1, 10**6), ("seed", 0, 2000), ("threads", 0, 4096)):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)


def person_of(args: Correct) -> Person:
    """The person as the protocol has them."""
    if args.protocol == "rac":
        return replace(args.person, recovery=args.person.recovery or 1.5, subtask=not args.person.finish)
    if args.protocol == "armada":
        return replace(args.person, finish=True, late=1.0)
    return args.person


def practice_starts(seed: int, round_: int, count: int) -> list[int]:
    return [PRACTICE_START + seed * 100_000 + round_ * 5_000 + i for i in range(min(count, 5_000))]


def demos_of(run: Path, config) -> Path | None:
    """The data set of demonstrations of a run."""
    folder = run / "demos" if config.demos.isdigit() else Path(config.demos)
    return folder if (folder / "meta" / "info.json").exists() else None


def run(args: Correct) -> int:
    """Run the rounds; RUN stays as it is."""
    from robo_rl import files
    from robo_rl.experiment.evaluation import pick_checkpoint
    from robo_rl.experiment.train import run_config

    source, folder = pick_checkpoint(Path(args.run), args.checkpoint)
    config = replace(run_config(source), threads=args.threads, video=False)
    if args.operator == "console" and not (source / "corrections" / "meta" / "info.json").exists():
        raise UserError(f"{source} has no corrections yet: record some with robo_rl console {source}")
    how = "console" if args.operator == "console" else args.protocol
    out = Path(args.out or f"{str(source).rstrip('/')}-{how}-s{args.seed}")
    with files.lock(out):
        return Rounds(args, config, source, folder, out).go()


class Rounds:
    """One folder of rounds being written."""

    def __init__(self, args: Correct, config, source: Path, checkpoint: Path, out: Path):
        self.args, self.config, self.source, self.checkpoint, self.out = args, config, source, checkpoint, out

    def go(self) -> int:
        import torch

        from robo_rl import checkpoint, files
        from robo_rl.experiment.train import make_env, obs_spec
        from robo_rl.log import Progress

        args = self.args
        torch.set_num_threads(1)
        self.begin()
        self.rounds = files.read_json(self.out / "rounds.json", list) if (self.out / "rounds.json").exists() else []
        last = checkpoint.checkpoints(self.out)
        self.policy, _ = checkpoint.load_policy(last[-1] if last else self.checkpoint)
        task_limit = self.config.max_steps
        probe = make_env(self.config, 1)
        limit = args.max_steps or 3 * probe.spec.max_steps
        checkpoint.check_fits(self.policy, obs_spec(probe, self.policy.spec.language), str(self.checkpoint))
        probe.close()
        self.env = make_env(replace(self.config, max_steps=limit), args.robots)
        self.eval_env = make_env(replace(self.config, max_steps=task_limit), min(args.eval_episodes, 256))
        with Progress() as self.progress:
            self.progress.say(f"run {self.out}")
            if not self.rounds:
                self.rounds.append({"round": 0, "account": {}, "eval": self.evaluate(0)})
                self.save(0)
            people = args.operator == "console"
            for r in range(len(self.rounds), (1 if people else args.rounds) + 1):
                account = self.recorded() if people else self.practise(r)
                self.refit(r)
                self.rounds.append({"round": r, "account": account, "eval": self.evaluate(r)})
                self.save(r)
            told = self.report()
            self.progress.close()
        table(self.rounds, args, told)
        return 0

    def begin(self) -> None:
        """run.json of the result: the run's own, with where it came from."""
        from robo_rl import files
        path = self.out / "run.json"
        mine = {"from": str(self.source), "checkpoint": self.checkpoint.name, "options": asdict(self.args)}
        if path.exists():
            before = files.read_json(path).get("correct")
            if not isinstance(before, dict):
                raise UserError(f"--out: {self.out} holds a run that is not of robo_rl correct; choose another folder")
            differ = [k for k, v in files.plain(mine["options"]).items() if before["options"].get(k) != v
                      and k not in ("rounds", "json", "out", "run")]
            if differ:
                raise UserError(f"--out: {self.out} was begun with another --{differ[0].replace('_', '-')}; "
                                "choose another folder or the same options")
            return
        document = files.read_json(self.source / "run.json")
        config = asdict(self.config) | {"demos": str(demos_of(self.source, self.config) or 0)}
        files.write_json(path, {**document, "name": self.out.name, "config": config, "correct": mine,
                                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")})

    # ------------------------------------------------------------ one round

    def practise(self, r: int) -> dict:
        """Episodes with help into corrections/ -> the account."""
        from robo_rl import files
        from robo_rl.data.writer import Writer
        from robo_rl.human.intervene import Intervene
        from robo_rl.human.practice import Account, Robots

        args = self.args
        kept = self.out / "account.json"
        before = files.read_json(kept) if kept.exists() else {}
        resumed = before.get("round") == r
        operator, freeze = self.people(r, before["account"]["human_steps"] if resumed else 0)
        env = Intervene(self.env, operator, freeze=freeze)
        with Writer(self.out / "corrections", spec=self.env.spec) as writer:
            done = before.get("done", []) if resumed else []
            wanted = [s for s in self.starts(r) if s not in done]
            robots: Robots | None = None

            def starts():
                for s in wanted:
                    if args.human_steps and robots is not None and robots.account.human_steps >= args.human_steps:
                        return
                    yield s

            def add(episode, i):
                writer.add(episode)
                done.append(episode.start)
                writer.flush()  # durable before it counts
                files.write_json(kept, {"round": r, "done": done, "account": asdict(robots.account)})
            robots = Robots(env, self.policy, starts(), seed=args.seed * 1000 + r, done=add, rewindable=freeze,
                            cut=args.protocol == "rac" if args.cut is None else args.cut)
            robots.account.operators = args.operators if args.protocol == "armada" else args.robots
            if resumed:
                robots.account = Account(**before["account"])
            if args.protocol == "armada":
                self.detector(robots, operator)
            self.progress.start("help", args.human_steps or len(wanted), "steps" if args.human_steps else "episodes")
            while robots.working:
                robots.step()
                a = robots.account
                self.progress.update(a.human_steps if args.human_steps else a.episodes,
                                     a.successes / a.episodes if a.episodes else None, note_of(a))
        stats = operator.stats
        robots.account.calls = int(stats["asked"].sum())
        helped = max(1.0, float(stats["helped"].sum()))
        robots.account.reaction = float(stats["reaction"].sum()) / max(1.0, float(stats["asked"].sum())) * helped
        return robots.account.summary()

    def starts(self, r: int) -> list[int]:
        """Where round r practises."""
        import numpy as np

        from robo_rl.evaluate import evaluate
        from robo_rl.human.protocols import target_starts
        args = self.args
        if args.protocol != "twin_rl":
            return practice_starts(args.seed, r, 5_000 if args.human_steps else args.episodes)
        pool, won = practice_starts(args.seed, r, args.twin_starts), 0
        self.progress.start("twin", args.twin_trials, "trials")
        for trial in range(args.twin_trials):
            won = won + np.array(evaluate(self.eval_env, self.policy, np.array(pool), trial)["success"], int)
            self.progress.update(trial + 1, won.sum() / (len(pool) * (trial + 1)))
        low = target_starts(won, np.full(len(pool), args.twin_trials))
        self.progress.say(f"round {r}: the policy fails at {len(low)} of {len(pool)} starts in the twin more often than not")
        return [pool[i] for i in (low if len(low) else range(len(pool)))[:args.episodes]]

    def people(self, r: int, given: int):
        """(who helps, whether time stands still while a robot waits); `given`: steps of this round's help that are done."""
        from robo_rl.human.operators import Scripted
        from robo_rl.human.protocols import Dispatch
        person = person_of(self.args)
        if self.args.human_steps:
            person = replace(person, leave=max(1, self.args.human_steps - given) * self.env.spec.period / 60)
        persons = Scripted(self.env, person, self.args.seed * 1000 + r)
        if self.args.protocol != "armada":
            return persons, False
        return Dispatch(persons, self.args.operators), hasattr(self.env, "get_state")

    def recorded(self) -> dict:
        """The account of what people did in the console."""
        from robo_rl.data.reader import load
        from robo_rl.human.practice import Account
        data = load(self.source / "corrections")
        human = data.phase > 1
        begins = human & ~np_shift(human) | (human & (np_shift(data.episode_index, -1) != data.episode_index))
        a = Account(1 / data.features.fps, steps=len(human), human_steps=int(human.sum()), episodes=len(data),
                    successes=int(data.success.sum()), interventions=int(begins.sum()), robots=1, operators=1)
        return a.summary()

    def detector(self, robots, dispatch) -> None:
        """FLOAT beside `robots`: calibrated on the present policy's successes without help, it calls through
        `dispatch`.
        """
        import numpy as np

        from robo_rl.data.reader import load
        from robo_rl.human import detect

        args, every = self.args, self.policy.options.execute
        demos = demos_of(self.source, self.config)
        if demos is None:
            raise UserError(f"{self.source} has no demonstrations, which armada's detector compares with; "
                            "train the run with --demos")
        data = load(demos)
        phi = detect.embed(self.policy, {"state": data.state, "task": np.array([data.tasks[k]
                                                                                for k in data.task_index])} | {
            f"image/{v}": data.images(v) for v in self.policy.spec.views})
        ref = detect.reference([phi[a:b:every] for a, b in zip(data.from_[:20], data.to[:20], strict=True)])
        tracks = detect.tracks(self.eval_env, self.policy, [PRACTICE_START - 1_000_000 + i
                                                            for i in range(args.calibration)])
        found = [[detect.float_index(x[:k], ref) for k in range(1, len(x) + 1)] for x, won in tracks if won]
        try:
            threshold = detect.calibrate([np.array([m.index for m in f]) for f in found], args.false_alarms)
        except UserError as e:
            self.progress.say(f"{e}; elapsed time alone calls for help this round")
            threshold = detect.Threshold(np.zeros(1), np.ones(1), np.inf, self.eval_env.spec.max_steps // every)
        most = max([len(f) for f in found], default=1)
        limit = np.array([np.quantile([f[min(k, len(f) - 1)].matched[min(k, len(f) - 1)] for f in found], 0.9)
                          if found else
                          np.inf for k in range(most)])
        monitor = detect.Monitor(ref, threshold, limit, args.robots)

        def seen(mask: np.ndarray) -> None:
            mask = mask & ~dispatch.called()
            if not mask.any():
                return
            point = detect.embed(self.policy, {k: v[mask] for k, v in robots.obs.items()})
            for i, x in zip(np.flatnonzero(mask), point, strict=True):
                if not robots.tapes[i].rows:
                    monitor.begin(i)
                if monitor.check(i, x) > 1:
                    dispatch.call(i)

        def back(i: int) -> None:
            if args.rewind and robots.rewindable:
                robots.rewind(i, monitor.rewind_to(i) * every)
        robots.seen, dispatch.rewind = seen, back

    def refit(self, r: int) -> None:
        """Behaviour cloning on demonstrations and corrections, from the present weights."""
        from robo_rl.algos import bc
        from robo_rl.data.reader import load
        from robo_rl.human.lessons import lessons

        args, demos = self.args, demos_of(self.source, self.config)
        taught = self.source if args.operator == "console" else self.out
        parts = ([load(demos)] if demos else []) + [load(taught / "corrections")]
        shares = [args.demo_share, 1 - args.demo_share] if demos else None
        own = args.protocol == "armada" if args.own is None else args.own
        try:
            sample = lessons(parts, self.policy.spec, self.policy.options.horizon, own, shares, args.phases)
        except UserError as e:
            self.progress.say(f"round {r}: {e}")
            return
        self.progress.start("sft", args.bc.updates, "updates")
        self.policy.train()
        bc.train(self.policy, sample, args.bc, args.seed * 1000 + r,
                 lambda update, loss: self.progress.update(update, note=f"loss {loss:.3f}"))
        self.policy.eval()

    def evaluate(self, r: int) -> dict:
        """Success without help on the starts that pick the best round; also as evals/round_<r>.json."""
        return self.measure(f"round_{r}", r, CHOOSE, f"round {r}")

    def measure(self, label: str, r: int, which: int, words: str) -> dict:
        """Success without help of the present policy, that of round `r`, on the starts of list `which`; also as evals/<label>.json."""
        from robo_rl import files
        from robo_rl.evaluate import eval_starts, evaluate
        from robo_rl.stats import wilson

        starts = eval_starts(self.args.eval_episodes, which)
        result = evaluate(self.eval_env, self.policy, starts, which)
        rate, low, high = wilson(sum(result["success"]), len(starts))
        (self.out / "evals").mkdir(exist_ok=True)
        files.write_json(self.out / "evals" / f"{label}.json", result | {
            "label": label, "step": r, "n": len(starts), "starts": starts.tolist(), "list": which, "wilson": [low, high],
            "time": 0.0})
        self.progress.say(f"{words:>14}  success {rate:.3f}  95 % interval [{low:.3f}, {high:.3f}]  n={len(starts)}  (starts of "
                          f"list {which}, {'reported' if which == REPORT else 'which choose'})")
        return {"success": rate, "low": low, "high": high, "n": len(starts), "list": which}

    def best_round(self) -> dict:
        """The round with the most success on the starts that choose; the last of equals, which learnt from most."""
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
        files.write_json(self.out / "rounds.json", self.rounds)
        best = self.best_round()
        path = self.out / "checkpoints"
        path.mkdir(exist_ok=True)
        checkpoint.save_checkpoint(path / checkpoint.name(r), self.policy, {}, {
            "step": r, "best": {"success": best["eval"]["success"], "return": 0.0, "step": best["round"]},
            "finished": True})
        (self.out / "account.json").unlink(missing_ok=True)
        for old in checkpoint.checkpoints(self.out)[:-2]:
            if old.name not in (checkpoint.name(0), checkpoint.name(best["round"])):
                shutil.rmtree(old)


def np_shift(x, fill=False):
    """`x` one place later; its first entry is `fill`."""
    import numpy as np
    return np.concatenate([np.full(1, fill, x.dtype), x[:-1]])


def note_of(account) -> str:
    """The account in the progress line."""
    s = account.summary()
    return (f"{s['operator_minutes']:.1f} operator min, {s['interventions_per_hour']:.0f} interventions/h, "
            f"human {100 * s['human_share']:.0f} %")


def table(rounds: list[dict], args: Correct, told: dict) -> None:
    """Print the rounds and `told`, what the best is worth on starts of its own, or one JSON document."""
    minutes, first = 0.0, rounds[0]["eval"]["success"]
    rows = []
    for x in rounds:
        a = x["account"]
        minutes += a.get("operator_minutes", 0.0)
        rows.append({"round": x["round"], **x["eval"], **{k: a.get(k) for k in (
            "operator_minutes", "interventions", "interventions_per_hour", "interventions_per_success", "reaction_mean",
            "human_share", "utilisation", "success_rate", "alone_rate")},
            "gain_per_operator_minute": (x["eval"]["success"] - first) / minutes if minutes else None}
            | ({"report": told} if x["round"] == told["round"] else {}))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print("round  success   95 % interval    operator min  interventions  per hour  per success  reaction s  human %  gain/min")
    for x in rows:
        line = f"{x['round']:>5}  {x['success']:7.3f}   [{x['low']:.3f}, {x['high']:.3f}]"
        if x["operator_minutes"] is not None:
            line += (f"  {x['operator_minutes']:12.2f}  {x['interventions']:13d}  {x['interventions_per_hour']:8.0f}"
                     f"  {x['interventions_per_success']:11.2f}  {x['reaction_mean']:10.2f}  {100 * x['human_share']:7.1f}"
                     f"  {x['gain_per_operator_minute'] or 0:8.3f}")
        print(line)
    print(f"best: round {told['round']}, on starts that chose nothing (list {told['list']}): {told['success']:.3f}  95 % interval "
          f"[{told['low']:.3f}, {told['high']:.3f}]  n={told['n']}")
