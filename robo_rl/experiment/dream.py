"""`robo_rl train --dream RATIO`: a share of every batch is played in a world model that is learnt along the
way.

    collect in the simulator  ->  refit the model on all episodes so far  ->  play in the model  ->  learn
                              from both

Of `--envs` lanes, round(RATIO * envs) live in the model and the rest in the simulator; every lane gives as
many decisions, so RATIO of each batch is dreamt, no more and no less, once a model is good enough to be used.
Control steps and episodes of a run are those of the simulator alone. Ratio 0 is the run without any of this.
"""

import copy
import functools
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robo_rl.data.episode import Episode
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.experiment import feeds
from robo_rl.experiment.config import TrainConfig, rollout_options
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.parallel import group_size, workers
from robo_rl.files import cores, private_folder
from robo_rl.options import RL_OPTIONS, RolloutOptions
from robo_rl.policies.exploration import explores
from robo_rl.recording import Recorder
from robo_rl.rollout import Collector, Rollout
from robo_rl.runtime.feed import never

LEAST = 64  # episodes before a first model
HORIZON = 32  # steps of its held-out calibration
WITHIN = 0.25  # share of held-out predictions within the threshold that a model must reach to be used


def lanes(config: TrainConfig) -> int:
    """Envs of the batch that live in the model."""
    return round(config.dream * config.envs)


def check(config: TrainConfig) -> None:
    """Raise UserError for a ratio that the envs cannot keep, and for options that nothing would follow."""
    if not config.dream:
        if config.dream_model:
            raise UserError(
                "--dream-model goes with --dream RATIO, the share of a batch that is played in it"
            )
        if config.dream_hard and not config.sim.startswith("wm:"):
            raise UserError(
                "--dream-hard goes with --dream RATIO or --sim wm:PATH: here no episode is dreamt"
            )
        return
    if config.algo == "bc" or not isinstance(config.rl, RolloutOptions):
        named = [name for name, options in RL_OPTIONS.items() if issubclass(options, RolloutOptions)]
        raise UserError(
            f"--dream goes with the on-policy methods ({', '.join(named)}), got --algo {config.algo}"
        )
    n, group = lanes(config), group_size(config) or 1
    if group > 1:
        raise UserError("--dream mixes lanes of running episodes: it goes with rl.advantage gae")
    if config.sim.startswith("wm:"):
        raise UserError(
            "--dream learns a model of a simulator; with --sim wm:PATH all of it is in a model already"
        )
    if config.obs != "state":
        raise UserError("--dream learns a model of states: it goes with --obs state")
    if not 1 <= n <= config.envs - max(1, workers(config)):
        raise UserError(
            f"--dream {config.dream:g} of --envs {config.envs} leaves {config.envs - n} for the simulator "
            f"and {n} for the model; each needs one, the simulator one per worker"
        )


def check_model(config: TrainConfig, made, env) -> None:
    """Raise UserError for a --dream-model, of spec `made`, that does not stand for the simulator of spec
    `env`."""
    mine, bad = made.control, []
    if mine.views:
        bad.append("it predicts pictures, and --dream is of states")
    elif mine.state_names and env.state_names and mine.state_names != env.state_names:
        bad.append(f"its {len(mine.state_names)} state numbers are not the {len(env.state_names)} here")
    if mine.action_names != env.action_names:
        bad.append(f"its action axes are {', '.join(mine.action_names)}, here {', '.join(env.action_names)}")
    if abs(mine.period - env.period) > 1e-6:
        bad.append(f"its control period is {mine.period:g} s, here {env.period:g} s")
    if not made.horizon:
        bad.append("it is not calibrated, or no better than a world that stands still")
    if bad:
        raise UserError(
            f"--dream-model {config.dream_model}, of {mine.id}, does not go with {env.id}: {'; '.join(bad)}. "
            "Give a model of states of the same task and control (robo_rl wm train DATASET)"
        )


# ---- episodes from where they are played to where the model is learnt --------------------------------------


def spool(folder: Path, episode: Episode) -> None:
    """Hand an episode over through a file, whole or not at all; any process may."""
    data = io.BytesIO()
    arrays: dict[str, Any] = {
        "state": episode.state,
        "action": episode.action,
        "reward": episode.reward,
        "task": np.array(episode.task),
        "flags": np.array([episode.success, episode.terminated]),
    }
    if episode.final is not None:
        arrays["final"] = episode.final
    np.savez(data, **arrays)
    spool.count = getattr(spool, "count", 0) + 1
    name = f"{os.getpid()}-{spool.count:08d}"
    temp = folder / f".{name}.tmp"
    temp.write_bytes(data.getvalue())
    temp.rename(folder / f"{name}.npz")


def spooled(folder: Path) -> list[Episode]:
    """Take the episodes that were handed over, in the order of their names."""
    out = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as f:
            out.append(
                Episode(
                    f["state"],
                    f["action"],
                    task=str(f["task"]),
                    success=bool(f["flags"][0]),
                    reward=f["reward"],
                    source="policy",
                    terminated=bool(f["flags"][1]),
                    final=f.get("final"),
                )
            )
        path.unlink()
    return out


def make_recorded(config: TrainConfig, folder: Path, num_envs: int):
    """The run's env, whose episodes are handed over through `folder`."""
    private_folder(folder)
    return Recorder(make_env(config, num_envs), functools.partial(spool, folder))


# ---- one rollout of two ------------------------------------------------------------------------------------


def joined(a: Rollout, b: Rollout) -> Rollout:
    """Two rollouts of as many decisions, lanes side by side; statistics are those of `a`."""

    def rows(x: dict, y: dict, dim: int) -> dict:
        return {k: torch.cat([x[k], y[k]], dim) for k in x}

    n = a.done.shape[1]
    (ta, la), (tb, lb) = a.done.nonzero().unbind(1), b.done.nonzero().unbind(1)
    order = torch.argsort(torch.cat([ta * (n + b.done.shape[1]) + la, tb * (n + b.done.shape[1]) + n + lb]))
    final = {k: torch.cat([v, b.final_obs[k]])[order] for k, v in a.final_obs.items()}
    plain = {
        k: torch.cat([getattr(a, k), getattr(b, k)], 1)
        for k in ("x0", "logp", "rewards", "discounts", "done", "executed", "mask", "version", "gains")
    }
    return replace(
        a,
        obs=rows(a.obs, b.obs, 1),
        trace=rows(a.trace, b.trace, 1),
        last_obs=rows(a.last_obs, b.last_obs, 0),
        final_obs=final,
        outcome=torch.cat([a.outcome, b.outcome]),
        stats=dict(a.stats),
        start=None,
        **plain,
    )


def mean_error(model, data, horizon: int) -> float:
    """Mean open-loop error on held-out episodes."""
    from world_models.calibrate import open_loop

    return float(np.nanmean(open_loop(model, data, horizon, most=100).error))


# ---- the feed ----------------------------------------------------------------------------------------------


class DreamFeed:
    """A feed of the simulator with the dreamt share added; owns the model, its data set and the lanes inside
    it."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        inner,
        learner,
        spec,
        saved: dict | None,
        say: Callable[[str], None],
    ):
        self.config, self.folder, self.inner, self.learner, self.say = (
            config,
            folder / "dream",
            inner,
            learner,
            say,
        )
        self.collector: Collector | None = None
        self.difficulty = None
        # control steps since the last fit; dreamt batches; fits thrown away
        self.since, self.played, self.kept = 0, 0, 0
        self.stats_: dict[str, float] = {}
        private_folder(self.folder / "spool")
        if saved is None:
            spooled(self.folder / "spool")
        self.writer = Writer(self.folder / "data", spec=spec)
        if saved:
            self.since, self.played = saved["since"], saved["played"]
            if saved["lanes"] is not None:
                self._enter(saved["model"], saved["lanes"])
                if saved.get("hard") is not None and self.difficulty is not None:
                    self.difficulty.wins, self.difficulty.tries = (np.array(x) for x in saved["hard"])
        elif config.dream_model:
            from world_models import model as worlds

            self.model = worlds.load(config.dream_model)
            check_model(config, self.model.spec, spec)
            self._enter(None, None)

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def ledger(self):
        return self.inner.ledger

    def next(self, stop: Callable[[], bool] = never) -> Rollout | None:
        real = self.inner.next(stop)
        if real is None:
            return None
        for episode in spooled(self.folder / "spool"):
            self.writer.add(episode)
        self.since += int(real.stats["env_steps"])
        self.stats_ = {"dream/episodes": float(len(self.writer))}
        if len(self.writer) >= LEAST and (
            self.collector is None and not self.played or self.since >= self.config.dream_refit
        ):
            self._refit()
        if self.collector is None:
            return real
        explore = explores(self.config.algo, self.config.policy)
        dream = self.collector.collect(self.learner.sampler, real.done.shape[0], self.version, explore)
        self.played += 1
        out = joined(real, dream)
        made = [int(r.mask.sum()) for r in (real, dream)]
        self.stats_ |= {"dream/share": made[1] / max(sum(made), 1)} | {
            f"dream/{k}": v for k, v in dream.stats.items() if k in ("success", "return", "length")
        }
        if "success" in real.stats and "success" in dream.stats:
            self.stats_["dream/gap"] = dream.stats["success"] - real.stats["success"]
        return out

    # ---- the model

    def _refit(self) -> None:
        """Learn on from the present weights on everything recorded; the lanes go on in the new model."""
        from world_models import recorded
        from world_models.calibrate import TOLERANCE
        from world_models.fit import FitOptions, Fitter
        from world_models.instructions import reads_text
        from world_models.latent import Latent, LatentOptions
        from world_models.learning import calibrated, world_spec
        from world_models.reading import read

        self.writer.flush()
        data, first = read([str(self.folder / "data")]), self.collector is None
        recorded.check(data, str(self.folder / "data"))
        before, held = getattr(self, "model", None), min(HORIZON, int(data.lengths.max()) - 1)
        if before is not None:
            data = data.in_terms_of(before.spec.tasks)
            if data.tasks != before.spec.tasks and reads_text(before.options):
                before = None  # an instruction that it was never taught: its inputs are too few
        if before is None:
            options = LatentOptions(members=4, hidden=128)
            model = Latent(world_spec(data, "latent", "the run"), options, self.config.seed)
        else:
            model = copy.deepcopy(before)
            # a gate would be of the dynamics before
            model.spec, model.gate = world_spec(data, "latent", "the run"), None
        fit = FitOptions(
            updates=self.config.dream_updates * (3 if before is None else 1),
            batch=128,
            unroll=6,
            lr=1e-3 if before is None else 3e-4,
        )
        fitter = Fitter(model, data, fit, self.config.seed + self.since, fresh=before is None)
        fitter.fit()
        model = fitter.result()
        if before is not None and mean_error(before, data, held) <= mean_error(model, data, held):
            model, self.kept = copy.deepcopy(before), self.kept + 1  # what was learnt last made it worse
            model.spec, model.gate = fitter.model.spec, None
        model, report = calibrated(model, data, held, TOLERANCE)
        model.frames = data.frames()
        # an episode may be longer than what was measured: the threshold cuts it
        steps = data.control.max_steps
        self.since = 0
        self.stats_["dream/within"] = report["within"]
        if not model.spec.horizon or report["within"] < WITHIN:
            self.say(
                f"the world model is not good enough yet ({100 * report['within']:.0f} % of its held-out "
                "predictions lie within its threshold): batches have no dreamt share until the next refit"
            )
            self.collector, self.model = None, model
            return
        model.spec = model.spec.calibrated(max(model.spec.horizon, steps), model.spec.threshold)
        self.model = model
        self.stats_ |= {
            "dream/error_1": report["error"][0],
            "dream/error_8": report["error"][min(7, len(report["error"]) - 1)],
            "dream/threshold": model.spec.threshold,
            "dream/kept": float(self.kept),
            "dream/horizon": float(report["horizon"]),
        }
        if first or before is None or before.spec.tasks != model.spec.tasks:
            self._enter(None, None)
        else:
            assert self.collector is not None  # it was entered
            self.collector.env.model = model
            if self.difficulty is not None:
                self.difficulty.grow(len(model.frames))

    def _enter(self, saved: dict | None, lanes_: dict | None) -> None:
        """Lanes in the model: new ones, or those of a checkpoint."""
        from world_models import model as worlds
        from world_models.env import WorldEnv
        from world_models.tasks import Difficulty

        if saved is not None:
            self.model = worlds.load(self.folder / "model")
        frames = len(self.model.frames)
        self.difficulty = Difficulty(frames, self.config.dream_hard) if self.config.dream_hard else None
        env = WorldEnv(self.model, lanes(self.config), difficulty=self.difficulty)
        self.collector = Collector(
            env, self.learner.sampler, rollout_options(self.config).gamma, self.config.seed + 1, 1_000_000
        )
        if lanes_:
            self.collector.set_state(lanes_)

    # ---- the rest of a feed

    def gathered(self) -> int:
        return self.inner.gathered()

    def publish(self) -> None:
        self.inner.publish()

    def commit(self) -> None:
        self.inner.commit()

    def crowded(self) -> bool:
        return self.inner.crowded()

    def stats(self) -> dict[str, float]:
        return self.inner.stats() | self.stats_

    def spans(self):
        return self.inner.spans()

    def note(self) -> str:
        share = self.stats_.get("dream/share", 0.0)
        return " ".join(filter(None, [self.inner.note(), f"dreamt {share:.2f}"]))

    def state(self) -> dict:
        """What a checkpoint needs: the feed's, the lanes; model and episodes are made durable beside it."""
        from world_models import model as worlds

        self.writer.flush()
        if self.collector is not None:
            worlds.save(self.model, self.folder / "model")
        return {
            "inner": self.inner.state(),
            "since": self.since,
            "played": self.played,
            "model": {},
            "lanes": None if self.collector is None else self.collector.state(),
            "hard": None
            if self.difficulty is None
            else [self.difficulty.wins.copy(), self.difficulty.tries.copy()],
        }

    def close(self) -> None:
        self.writer.close()
        self.inner.close()


def make_feed(
    config: TrainConfig,
    folder: Path,
    env,
    learner,
    saved: dict | None,
    say: Callable[[str], None],
    control=None,
):
    """As `feeds.make_feed`, with the dreamt share; `control` decides where the simulator's episodes begin,
    the model's own are its own."""
    real = replace(config, envs=config.envs - lanes(config))
    build = functools.partial(
        make_recorded,
        replace(real, threads=config.threads or max(1, cores() // max(1, workers(config)))),
        folder / "dream" / "spool",
    )
    spec = env.spec
    if workers(config) == 0:
        env.close()
        env = build(real.envs)
    inner, exact = feeds.make_feed(real, folder, env, learner, saved and saved["inner"], build, control)
    try:
        return DreamFeed(config, folder, inner, learner, spec, saved, say), exact
    except BaseException:
        inner.close()  # it may have worker processes, which would be waited for
        raise
