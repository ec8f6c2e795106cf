"""Learning from a data set in its own units, without an env: behaviour cloning, or RECAP of episodes that
succeeded and failed. Episodes that are held out say how well the policy predicts.

What it cannot say is whether the policy succeeds: that takes a simulator or a robot.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.open_loop import along, axis_errors, chunk_starts, in_words, observation, predict
from robo_rl.options import VLAS
from robo_rl.selection import Look, best_look

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset
    from robo_rl.experiment.run import Run

LOOKS = 10  # at the held-out episodes over a run
# frames of them that a look takes; of a vision-language-action model, which keeps pictures as recorded
ROWS, FEW = 256, 32
MOST = 512  # chunks that judge the policy in the end
SHOWN = 100  # of an episode that the page shows


def has_own_units(folder: Path) -> bool:
    """Whether there is a data set that no env of ours recorded."""
    from robo_rl import files

    path = folder / "meta" / "info.json"
    if not path.is_file():
        return False
    try:
        action = files.read_json(path)["features"]["action"]
        return not (folder / "meta" / "robo_rl.json").exists() and not (action.get("robo_rl") or {}).get(
            "spec"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # the reader says what is wrong with it


# options that say something of an env, and nothing by default
OF_AN_ENV = ("task", "reward", "control", "max_steps", "randomise", "cameras", "judge")


def check(config: TrainConfig) -> None:
    """Raise UserError for options that need an env, and for a data set that does not say enough."""
    if config.algo not in ("bc", "recap"):
        raise UserError(
            "--sim none is no env: --algo bc and recap learn from a data set alone, --algo "
            f"{config.algo} acts in an env. Learn one from the data set, robo_rl wm train DATASET, and take "
            "it: --sim wm:RUN; or name a simulator of the robot"
        )
    for name in OF_AN_ENV:
        if value := getattr(config, name):
            option = name.replace("_", "-")
            more = "; --data.cameras chooses those of the data set" if name == "cameras" else ""
            raise UserError(
                f"--{option} {value} is of a simulator, and with --sim none the data set says its own: leave "
                f"--{option} out, or name the simulator, --sim mujoco{more}"
            )
    if config.demos.isdecimal() or not (Path(config.demos) / "meta").is_dir():
        raise UserError(f"--sim none learns from a data set: --demos FOLDER, got {config.demos!r}")
    if config.bc.pear:
        raise UserError(
            "--bc.pear weighs demonstrations for the RL that follows them; with --sim none none does"
        )
    if config.bc.most:
        raise UserError(
            "--bc.most goes on while success rises, and --sim none sees none: give --bc.updates three times "
            "as many and compare the errors of the two runs on held-out episodes"
        )
    if config.bc.compare:
        raise UserError(
            "--bc.compare is of supervision in a simulator: with --sim none compare the errors of two runs "
            "on held-out episodes, of --policy.activation relu and tanh"
        )
    from robo_rl.experiment.new_policy import check_relative
    from robo_rl.experiment.sft import check_changes

    data = open_data(config)
    if config.algo == "recap":
        from robo_rl.experiment.recap_check import check_outcomes

        check_outcomes(config, data)
    spec = spec_of(config, data)
    check_changes(config, spec.views)
    if config.init:
        from robo_rl.experiment.sft import first_policy

        check_relative(first_policy(config, None, spec), data)
    if config.policy.kind in VLAS:  # a folder that does not fit is refused before there is one of the run
        from robo_rl.experiment.methods import check_model
        from robo_rl.policies import make_policy
        from robo_rl.shapes import only_shapes

        with only_shapes():
            made = make_policy(config.policy, spec, config.seed)
        check_model(config, made, data.tasks)


def open_data(config: TrainConfig) -> "Dataset":
    """The data set of --demos with its labels; UserError if it does not say what its actions are, or lacks
    what is asked for."""
    from robo_rl.data.frames import choose_views
    from robo_rl.data.labels import need_units
    from robo_rl.data.reader import load

    data = load(config.demos, label=config.data.label)
    need_units(data.meta)
    choose_views(config.data.cameras, data.views)
    if not data.features.state:
        raise UserError(
            f"data set {data.meta.root} has no observation.state, which every policy here reads; add one"
        )
    return data


def spec_of(config: TrainConfig, data: "Dataset"):
    """What a policy for the robot of a data set sees and commands."""
    from robo_rl.data.frames import choose_views
    from robo_rl.data.labels import need_units
    from robo_rl.policies import ObsSpec

    views = tuple(choose_views(config.data.cameras, data.views))
    own = need_units(data.meta).unit if data.spec is None else ()
    return ObsSpec(
        state=len(data.features.state),
        action=len(data.features.action),
        views=views,
        image_size=config.image_size if views else 0,
        text=config.policy.text,
        language=bool(views or config.policy.text) or len(data.tasks) > 1,
        action_names=data.features.action,
        fit=(config.data.fit or "pad") if views else "",
        units=own,
    )


def split(config: TrainConfig, data: "Dataset") -> tuple[np.ndarray, np.ndarray]:
    """(rows to learn from, rows held out): whole episodes of those worth imitating, --data.held-out of them
    drawn by the seed; at least one is held out unless that is 0 or there is no other. recap learns from
    failures too, and is judged by successes alone."""
    from robo_rl.experiment.supervised_frames import worth_imitating

    worth, share = worth_imitating(config, data), config.data.held_out
    judges = np.flatnonzero(worth & data.success if config.algo == "recap" else worth)
    n = len(judges)
    count = 0 if share == 0 or n == 1 else min(n - 1, max(1, round(share * n)))
    order = judges[np.random.default_rng([config.seed, 11]).permutation(n)]
    held = np.isin(data.episode_index, order[:count])
    return np.flatnonzero(worth[data.episode_index] & ~held), np.flatnonzero(held)


def learn(run: "Run") -> None:
    """Make `run.policy` from the data set; of the checkpoints that were looked at, `best` is the one whose
    actions are nearest to those of held-out episodes, and heldout.json says how near.

    Raises Stopped when a signal comes.
    """
    from robo_rl import checkpoint
    from robo_rl.demos import demo_sampler
    from robo_rl.experiment.data_facts import write_facts
    from robo_rl.experiment.folder import half_taught, pick_checkpoint
    from robo_rl.experiment.head_stage import teach_head
    from robo_rl.experiment.new_policy import fresh_policy
    from robo_rl.experiment.run import looks_of
    from robo_rl.experiment.sft import first_policy, ground_trunk, grounds, imitate, report_cameras
    from robo_rl.experiment.supervised_frames import SupervisedFrames, say_imitated

    config, data = run.config, open_data(run.config)
    spec, updates = spec_of(config, data), config.bc.updates
    write_facts(run.folder, data, config.data.cameras)
    rows, held = split(config, data)
    say_imitated(config, data, run.report.say)
    if config.init:
        if said := half_taught(*pick_checkpoint(Path(config.init), "best")):
            run.report.say(f"--init: {said}", "warning")
        run.policy = first_policy(config, None, spec).to(config.device)
        spec = run.policy.spec  # its pictures are as large as those that it learnt from
    else:
        run.policy = fresh_policy(config, spec, data, rows)
    if run.begun is not None:
        run.looks = looks_of(checkpoint.read_meta(run.begun), 1)
    if spec.views:
        run.report.say(f"cameras {', '.join(spec.views)}: --data.cameras chooses, none is the state alone")
    report_cameras(run)
    # recap is judged when it has learnt from outcomes (`experiment.recap`)
    judge = HeldOut(config, data, run.policy, held) if len(held) and config.algo == "bc" else None
    begun = False

    def decoded(frames: int) -> None:
        nonlocal begun
        if not spec.views:
            return
        if not begun:
            run.report.start("decode", len(data.action), "frames")
        begun = True
        run.report.advance(frames)

    def look(update: int) -> dict[str, float]:
        if config.algo == "bc":
            run.step = update  # its checkpoint is named by it
        due = update == updates or update % max(1, updates // LOOKS) == 0
        return judge.look(run) if judge is not None and due else {}

    frames, learnt = SupervisedFrames(data), np.zeros(len(data.action), bool)
    learnt[rows] = True
    if grounds(config, data) and run.begun is None:
        ground_trunk(run, frames, learnt)
    imitate(
        run,
        demo_sampler(data, spec, config.policy.horizon, config.data, rows=rows, decoded=decoded),
        updates,
        look=look,
        reads=len(data.tasks) > 1,
        keep={},
    )
    run.updates = updates + teach_head(run, frames, learnt, updates)
    run.step = run.updates if config.algo == "bc" else 0
    if judge is not None:
        if run.step > updates or not run.looks:  # nothing was taught: the policy as it came
            run.report.log(run.step, judge.look(run), stage="sft")
        judge.report(run)


class HeldOut:
    """Episodes that nothing is learnt from, and frames of them, the same at every look, at which a policy is
    asked for its actions."""

    def __init__(self, config: TrainConfig, data: "Dataset", policy, rows: np.ndarray):
        import torch

        from robo_rl.data.reader import chunks
        from robo_rl.demos import frame_store
        from robo_rl.devices import device_of
        from robo_rl.policies import obs_tensors
        from robo_rl.rollout import to_policy

        self.seed, self.data, self.held, spec = config.seed, data, rows, policy.spec
        few = np.random.default_rng([config.seed, 13]).permutation(rows)[: FEW if spec.text else ROWS]
        self.few = few = np.sort(few)
        store = frame_store(data, spec, replace(config.data, cache_mb=1, threads=0))
        self.obs = to_policy(obs_tensors(observation(data, few, store.get(few)), spec), policy)
        _, chunk, pad = chunks(data, config.policy.horizon)
        there = device_of(policy)
        self.chunk = torch.from_numpy(chunk[few]).to(there)
        self.mask = torch.from_numpy(~pad[few]).float().to(there)

    def measure(self, policy) -> dict[str, float]:
        """The supervised loss, and the error of the actions as a share of that of the mean action; with the
        same noise at every look."""
        import torch

        policy.eval()
        with torch.no_grad():
            noise = torch.Generator().manual_seed(self.seed)
            loss = float(policy.bc_loss(self.obs, self.chunk, self.mask, noise))
            made = policy.act(self.obs, noise, explore=False).actions.cpu().numpy()
        return {"heldout/loss": loss, "heldout/error": axis_errors(self.data, self.few, made)["error"]}

    def look(self, run: "Run") -> dict[str, float]:
        """Measure the run's policy, of whom `run.looks` then knows the error."""
        from robo_rl.files import give_back_freed

        give_back_freed()
        with run.averaged():  # as it is judged in the end
            row = self.measure(run.policy)
        give_back_freed()
        run.policy.train()
        error = row["heldout/error"]
        run.looks.append(Look(run.step, 0, 1, -(error if np.isfinite(error) else row["heldout/loss"])))
        return row

    def report(self, run: "Run") -> None:
        """Judge the best checkpoint along whole episodes, write RUN/heldout.json and heldout_episodes.json,
        and say it."""
        from robo_rl import checkpoint, files

        config, data, policy, best = run.config, self.data, run.policy, best_look(run.looks)
        if best.step != run.step:
            run.report.say(
                f"the best of {len(run.looks)} checkpoints is that of update {best.step:,}: the error of its "
                f"actions on held-out episodes is {-best.gain:.3f} of that of the mean action, that of the "
                f"last one {-run.looks[-1].gain:.3f} (--checkpoint last takes it)"
            )
            path = run.folder / "checkpoints" / checkpoint.name(best.step)
            policy, _ = checkpoint.load_policy(path, config.device)
        loss, episodes = self.measure(policy)["heldout/loss"], np.unique(data.episode_index[self.held])
        starts = [chunk_starts(data, e, config.policy.execute) for e in episodes]
        rows = np.random.default_rng([self.seed, 17]).permutation(np.concatenate(starts))[:MOST]
        rows = np.sort(rows)
        run.report.start("held out", len(rows), "chunks")
        told = axis_errors(
            data, rows, predict(policy, data, config.data, rows, self.seed, run.report.advance)
        )
        looks = [[look.step, -look.gain] for look in run.looks]
        document = {"update": best.step, "loss": loss, "looks": looks, **told}
        files.write_json(run.folder / "heldout.json", files.plain(document))
        order = np.argsort(told["error_of_episode"])
        shown = {int(order[0]): "least", int(order[len(order) // 2]): "median", int(order[-1]): "largest"}
        files.write_json(
            run.folder / "heldout_episodes.json",
            [
                along(policy, data, config.data, told["episodes"][k], self.seed, SHOWN)
                | {"error": told["error_of_episode"][k], "which": which, "of": len(order)}
                for k, which in sorted(shown.items(), key=lambda x: x[1])  # the largest first
            ],
        )
        run.report.say(
            f"held out: {len(episodes)} of {len(data)} episodes, loss {loss:.3f}; {in_words(told)}"
        )
