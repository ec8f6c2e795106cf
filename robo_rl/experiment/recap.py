"""The stage of RECAP (`robo_rl/algos/recap.py`): label recorded episodes, learn from them, and in rounds
record more.

    rollouts/round_K/   LeRobot v3 data sets of the episodes that round K recorded, of all outcomes
    recap.json          what the labels of every round were made of

The step of a checkpoint is the number of control steps that it learnt from, demonstrations included; of a
run without an env that of supervised updates, those on labelled data included. One that is made while
labelled data are learnt from has the labels with it.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from robo_rl import files
from robo_rl.algos import bc, recap
from robo_rl.algos.onpolicy import Demos
from robo_rl.data.reader import Dataset, load
from robo_rl.data.writer import Writer
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.offline import HeldOut
from robo_rl.experiment.recap_check import data_folders, recap_options
from robo_rl.experiment.run import Run, Stopped, supervised_tick
from robo_rl.experiment.sft import demo_folder
from robo_rl.experiment.teaching import Teaching
from robo_rl.options import DataOptions
from robo_rl.policies.context import ADVANTAGE

ROUND_SEED = 3000  # of the starts of rollouts, above the seeds that `robo_rl collect` takes
LABELS = "recap.json"


def episodes_of(parts: list[Dataset], force: tuple[str, ...]) -> recap.Episodes:
    """What the labels of all episodes of several data sets depend on; tasks are told apart by their
    instructions, and an episode is cut where a person takes over."""
    lengths = np.concatenate([d.to - d.from_ for d in parts])
    to = np.cumsum(lengths)
    names = [d.task(e) for d in parts for e in range(len(d))]
    known = {name: i for i, name in enumerate(sorted(set(names)))}
    whole = recap.Episodes(
        from_=to - lengths,
        to=to,
        success=np.concatenate([d.success for d in parts]),
        task=np.array([known[name] for name in names]),
        forced=frames_of(parts, force),
        recording=np.arange(len(to)),
    )
    human = frames_of(parts, ("human",))
    return recap.cut_at(whole, human & ~np.append(False, human[:-1]))


def frames_of(parts: list[Dataset], sources: tuple[str, ...]) -> np.ndarray:
    """bool[F]: the frames of all data sets whose actions are from one of these sources."""
    codes = [[i for i, name in enumerate(d.sources) if name in sources] for d in parts]
    return np.concatenate([np.isin(d.source, found) for d, found in zip(parts, codes, strict=True)])


def by_task(parts: list[Dataset], episodes: recap.Episodes, told: np.ndarray) -> list[dict]:
    """Of every instruction the control steps, and which shares of them are of successes and positive; told:
    bool[F]."""
    length = episodes.to - episodes.from_
    task, won = np.repeat(episodes.task, length), np.repeat(episodes.success, length)
    names = sorted({name for d in parts for name in d.tasks})
    return [
        {
            "task": names[k],
            "steps": int((task == k).sum()),
            "of_successes": float(won[task == k].mean()),
            "positive": float(told[task == k].mean()),
        }
        for k in np.unique(task)
    ]


@torch.no_grad()
def pooled(
    policy,
    data: Dataset,
    options: DataOptions,
    size: int = 256,
    tick: Callable[[int], None] = lambda frames: None,
) -> torch.Tensor:
    """What the policy's trunk pools of every frame [F,C], told no advantage. tick: told of so many more
    frames."""
    from robo_rl.demos import frame_store
    from robo_rl.devices import device_of
    from robo_rl.experiment.open_loop import observation
    from robo_rl.policies import obs_tensors

    out, device = [], device_of(policy)
    rows = np.arange(len(data.action))
    pieces = [
        rows[a:b][i : i + size]
        for a, b in zip(data.from_, data.to, strict=True)
        for i in range(0, b - a, size)
    ]
    for at, pictures in frame_store(data, policy.spec, options).ahead(pieces):
        obs = obs_tensors(observation(data, at, pictures), policy.spec)
        obs[ADVANTAGE] = torch.zeros(len(at))
        out.append(policy.encode({k: x.to(device) for k, x in obs.items()}).pooled.float().cpu())
        tick(len(at))
    return torch.cat(out)


class ToldTeaching(Teaching):
    """Updates of `run.policy` on labelled data, after the `before` ones of a run without an env. labels:
    what its checkpoints say of the round."""

    def __init__(self, run: Run, updates: int, before: int, sample: Demos, labels: dict):
        super().__init__(run, updates, {"sample": sample})
        self.before, self.labels = before, labels

    def write(self, state: dict, made: int) -> None:
        if self.run.env is None:
            self.run.step = self.before + made
        self.run.save(state | self.labels, finished=False)


class RecapStage:
    """Rounds of one run; each begins with the supervised policy."""

    def __init__(self, run: Run):
        self.run, self.config, self.options = run, run.config, recap_options(run.config)
        self.own: Dataset | None = None  # of a run without an env
        self.learnt: np.ndarray | None = None  # its rows that are learnt from; the others judge
        self.judge: HeldOut | None = None
        self.told: torch.Tensor | None = None  # bool[F]: labels of the round that goes on

    def start(self, checkpoint_folder: Path | None) -> int:
        """Label and learn, then record, label and learn as often as asked -> the exit status."""
        from robo_rl import checkpoint

        run, done = self.run, 0
        if run.env is None:
            self.open_own_data()
        if checkpoint_folder is not None:
            state = checkpoint.load_train(checkpoint_folder)[0]
            done, self.told = int(state.get("rounds", 0)), state.get("told")
            run.begun = None if self.told is None else checkpoint_folder
            at = run.folder / "checkpoints" / checkpoint.name(0)
            # nothing begins with it any more, and it may be gone: all is learnt, or the last round is
            last = self.told is not None and done == self.options.rounds
            if done <= self.options.rounds and not last:
                self.base, _ = checkpoint.load_policy(at, self.config.device)
        else:
            self.base = copy.deepcopy(run.policy)
            run.save({"rounds": 0}, finished=False)
        for r in range(done, self.options.rounds + 1):
            parts = self.data(r)
            if run.stop.asked or parts and not self.learn(parts, r):
                return run.end_stopped()
            if parts:
                self.look()
                run.save({"rounds": r + 1}, finished=False)
        if run.env is not None:
            run.judge_final()
        elif self.judge is not None:
            self.judge.report(run)
        run.save({"rounds": self.options.rounds + 1}, finished=True)
        return run.end()

    def open_own_data(self) -> None:
        """Part the data set of a run without an env."""
        from robo_rl.experiment import offline

        data = offline.open_data(self.config)
        self.learnt, held = offline.split(self.config, data)
        self.own = data
        self.judge = offline.HeldOut(self.config, data, self.run.policy, held) if len(held) else None

    def look(self) -> None:
        """Measure what was learnt: in the env, or on held-out episodes."""
        run = self.run
        if run.env is not None:
            run.look()
        elif self.judge is not None:
            run.report.log(run.step, self.judge.look(run))

    def data(self, r: int) -> list[Dataset]:
        """The data sets that round r learns from: demonstrations, --rl.data and the episodes of rounds 1 ..
        r, the last of which are recorded now. [] in round 0 without any, or where a signal came."""
        if self.own is not None:
            return [self.own]
        demos, rounds = (
            demo_folder(self.run),
            [self.run.folder / "rollouts" / f"round_{k}" for k in range(1, r + 1)],
        )
        if rounds and not self.record(rounds[-1], r):
            return []
        found = [load(demos, label=self.config.data.label)] if demos else []
        return found + [load(folder) for folder in (*data_folders(self.config), *rounds)]

    def record(self, folder: Path, r: int) -> bool:
        """Record the episodes of round r, unless they are there -> False: a signal came."""
        from robo_rl.evaluation import decide
        from robo_rl.noise import mix, seed_noise
        from robo_rl.recording import Recorder, play

        run, count, generator = self.run, self.options.episodes, torch.Generator()
        if (folder / "meta" / "info.json").exists():
            with Writer(folder, spec=run.env.spec) as writer:
                if len(writer) == count:
                    return True
            shutil.rmtree(folder)  # the run was stopped while it recorded
        policy, seed = run.policy.eval(), ROUND_SEED + (50 * self.config.seed + r) % ROUND_SEED
        env = make_env(self.config, min(self.config.envs, count))

        def act(obs, decision: int) -> np.ndarray:
            seed_noise(generator, mix(seed, 17, decision))
            return decide(policy, obs, generator)

        run.report.start("rollouts", count, "episodes")
        folder.parent.mkdir(exist_ok=True)
        with Writer(folder, spec=env.spec) as writer:
            won = play(Recorder(env, writer.add, "policy"), act, count, seed, lambda n: run.report.advance(n))
        env.close()
        run.report.say(f"round {r}: {won} of {count} episodes succeeded")
        return not run.stop.asked

    def features(self, parts: list[Dataset]) -> torch.Tensor:
        """What the supervised policy's trunk pools of all frames [F,C]. Raises Stopped when a signal
        comes."""
        report, stop, done = self.run.report, self.run.stop, 0
        report.start("label", sum(len(d.action) for d in parts), "frames")

        def tick(frames: int) -> None:
            nonlocal done
            if stop.asked:
                raise Stopped
            report.advance(done := done + frames)

        self.base.eval()
        return torch.cat([pooled(self.base, d, self.config.data, tick=tick) for d in parts])

    def label(self, parts: list[Dataset], r: int) -> np.ndarray:
        """bool[F]: which frames of round r are good; what they were made of is said and kept. Raises Stopped
        when a signal comes."""
        run, o = self.run, self.options
        features = self.features(parts)
        episodes = episodes_of(parts, o.force)
        told, m = recap.label(features, episodes, o, self.config.seed + 1000 * r)
        at = len(told) if self.own is None else run.updates
        run.report.log(at, {f"recap/{k}": v for k, v in m.items()})
        which = f"round {r}: " if o.rounds else ""
        run.report.say(
            f"{which}{sum(len(d) for d in parts)} episodes, {len(told)} steps; values explain "
            f"{m['value_explained']:.2f} of the returns; positive: {m['positive']:.2f}, of successes "
            f"{m['positive_of_successes']:.2f}, of failures {m['positive_of_failures']:.2f}"
        )
        path = run.folder / LABELS
        files.write_json(
            path,
            [
                *(files.read_json(path, list)[:r] if path.exists() else []),
                {"round": r, "steps": len(told)} | m | {"tasks": by_task(parts, episodes, told)},
            ],
        )
        return told

    def learn(self, parts: list[Dataset], r: int) -> bool:
        """Label all frames and teach the supervised policy on, or go on with that -> False: a signal came."""
        from robo_rl.demos import demo_sampler
        from robo_rl.devices import device_of, sampled_on

        run, o, config = self.run, self.options, self.config
        goes_on, before = self.told, run.policy
        try:
            told = self.label(parts, r) if goes_on is None else goes_on.numpy()
        except Stopped:
            return False
        self.told = None
        updates = run.updates + r * o.updates  # made before these
        run.policy = (copy.deepcopy(self.base) if goes_on is None else before).train()
        if self.own is None:
            sample = labelled(parts, run.policy, told)
        else:
            number = {ADVANTAGE: signs(told)}
            sample = demo_sampler(
                self.own, run.policy.spec, config.policy.horizon, config.data, rows=self.learnt, more=number
            )
        labels = {"rounds": r, "told": torch.from_numpy(told)}
        teaching = ToldTeaching(run, o.updates, updates, sample, labels)
        sample = sampled_on(device_of(run.policy), recap.untold(sample, o.drop))
        said = supervised_tick(run, "recap", o.updates, updates, metric="recap/loss")
        step, run.step = run.step, len(told) if self.own is None else run.step

        def tick(update: int, loss: float) -> None:
            said(update, loss)
            teaching.after_update()

        seed, options = config.seed + 20 + r, replace(config.bc, updates=o.updates)
        try:
            bc.train(run.policy, sample, options, seed, tick, teaching.begin)
        except Stopped:
            teaching.keep()
            if teaching.kept < 0:  # before the first update
                run.step = step
            return False
        teaching.end()
        run.step = len(told) if self.own is None else updates + o.updates
        run.policy.eval()
        return True


def signs(told: np.ndarray) -> torch.Tensor:
    """The advantage of every frame: 1 where `told` bool[F] says that its action is good, else -1."""
    return torch.from_numpy(np.where(told, np.float32(1), np.float32(-1)))


def labelled(parts: list[Dataset], policy, told: np.ndarray) -> Demos:
    """Sampler of all frames, each with its advantage: 1 where `told` bool[F] says that its action is good,
    else -1."""
    from robo_rl.human.training_segments import frame_tensors

    found = [
        frame_tensors(d, policy.spec, policy.options.horizon, np.ones(len(d.action), bool)) for d in parts
    ]
    obs = {k: torch.cat([f[0][k] for f in found]) for k in found[0][0]}
    return bc.demos_sampler(
        obs | {ADVANTAGE: signs(told)}, torch.cat([f[1] for f in found]), torch.cat([f[2] for f in found])
    )
