"""Behaviour cloning from a data set in its own units, without an env: episodes that are held out say how well
it predicts.

What it cannot say is whether the policy succeeds: that takes a simulator or a robot.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.options import VLAS

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset
    from robo_rl.experiment.run import Run

LOOKS = 10  # at the held-out episodes over a run
# frames of them that a look takes; of a vision-language-action model, which keeps pictures as recorded
ROWS, FEW = 256, 32


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


def check(config: TrainConfig) -> None:
    """Raise UserError for options that need an env, and for a data set that does not say enough."""
    if config.algo != "bc":
        raise UserError(
            f"--sim none has nobody to play: --algo bc learns from a data set alone, --algo {config.algo} "
            "needs a simulator"
        )
    if config.demos.isdigit() or not (Path(config.demos) / "meta").is_dir():
        raise UserError(f"--sim none learns from a data set: --demos FOLDER, got {config.demos!r}")
    if config.init:
        raise UserError("--init goes on with a policy in an env; with --sim none a policy begins anew")
    if config.bc.pear:
        raise UserError(
            "--bc.pear weighs demonstrations for the RL that follows them; with --sim none none does"
        )
    from robo_rl.experiment.sft import check_changes

    data = open_data(config)
    spec = spec_of(config, data)
    check_changes(config, spec.views)
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


def split(data: "Dataset", share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to learn from, rows held out): whole episodes, drawn by the seed; at least one is held out unless
    `share` is 0 or there is no other."""
    count = 0 if share == 0 or len(data) == 1 else min(len(data) - 1, max(1, round(share * len(data))))
    held = np.zeros(len(data), bool)
    held[np.random.default_rng([seed, 11]).permutation(len(data))[:count]] = True
    of_row = held[data.episode_index]
    return np.flatnonzero(~of_row), np.flatnonzero(of_row)


def learn(run: "Run") -> None:
    """Make `run.policy` from the data set; heldout.json says how far its actions are from those of held-out
    episodes.

    Raises Stopped when a signal comes.
    """
    from robo_rl.demos import demo_sampler
    from robo_rl.experiment.data_facts import write_facts
    from robo_rl.experiment.head_stage import teach_head
    from robo_rl.experiment.sft import fresh_policy, ground_trunk, grounds, imitate, report_cameras
    from robo_rl.experiment.supervised_frames import SupervisedFrames

    config, data = run.config, open_data(run.config)
    spec = spec_of(config, data)
    write_facts(run.folder, data)
    rows, held = split(data, config.data.held_out, config.seed)
    run.policy = fresh_policy(config, spec, data, rows)
    if spec.views:
        run.report.say(f"cameras {', '.join(spec.views)}: --data.cameras chooses, none is the state alone")
    report_cameras(run)
    judge = HeldOut(config, data, spec, held) if len(held) else None
    every = max(1, config.bc.updates // LOOKS)
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
        if judge is None or update % every or update == config.bc.updates:
            return {}
        with run.averaged():  # as it is judged in the end
            return {"heldout/loss": judge.loss(run.policy)}

    frames, learnt = SupervisedFrames(data), np.zeros(len(data.action), bool)
    learnt[rows] = True
    if grounds(config, data) and run.begun is None:
        ground_trunk(run, frames, learnt)
    imitate(
        run,
        demo_sampler(data, spec, config.policy.horizon, config.data, rows=rows, decoded=decoded),
        config.bc.updates,
        look=look,
        reads=len(data.tasks) > 1,
        keep={},
    )
    run.updates = config.bc.updates + teach_head(run, frames, learnt, config.bc.updates)
    if judge is not None:
        judge.report(run)


def measured(data: "Dataset") -> dict[int, int]:
    """{axis of the action: number of the state that it commands}, of absolute positions that share a name."""
    from robo_rl.data.labels import need_units

    state = data.features.state
    return {
        i: state.index(name)
        for i, (name, kind) in enumerate(zip(data.features.action, need_units(data.meta).kind, strict=True))
        if kind == "absolute" and name in state
    }


class HeldOut:
    """Frames of held-out episodes, the same at every look, that a policy predicts the actions of."""

    def __init__(self, config: TrainConfig, data: "Dataset", spec, rows: np.ndarray):
        import torch

        from robo_rl.demos import demo_sampler
        from robo_rl.devices import sampled_on

        self.seed, self.data, self.rows, self.execute = config.seed, data, rows, config.policy.execute
        few = np.random.default_rng([config.seed, 13]).permutation(rows)[: FEW if spec.text else ROWS]
        sample = demo_sampler(
            data, spec, config.policy.horizon, replace(config.data, cache_mb=1, threads=0), rows=np.sort(few)
        )
        sample = sampled_on(torch.device(config.device), sample)
        self.obs, self.chunk, self.mask = sample(len(few), torch.Generator().manual_seed(config.seed))

    def loss(self, policy) -> float:
        """The supervised loss, with the same noise at every look."""
        import torch

        policy.eval()
        with torch.no_grad():
            loss = float(
                policy.bc_loss(self.obs, self.chunk, self.mask, torch.Generator().manual_seed(self.seed))
            )
        policy.train()
        return loss

    def errors(self, policy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[A] each, in the units of the data: mean absolute error of the executed actions, that of always
        giving the mean action, and that of staying where it is: giving the state that was measured. This is
        nan where the action is not an absolute position that the state has too."""
        import torch

        with torch.no_grad():
            made = policy.act(self.obs, torch.Generator().manual_seed(self.seed), explore=False).actions
        e, mask = self.execute, self.mask[:, : self.execute, None]
        true = self.chunk[:, :e]

        def far(x: torch.Tensor) -> np.ndarray:
            return (((x - true).abs() * mask).sum((0, 1)) / mask.sum()).cpu().numpy()

        stays = torch.full_like(true[:, :1], torch.nan)
        for action, state in measured(self.data).items():
            stays[:, :, action] = self.obs["state"][:, None, state]
        return far(made), far(torch.from_numpy(self.data.action.mean(0)).to(true.device)), far(stays)

    def report(self, run: "Run") -> None:
        """Write RUN/heldout.json and say it."""
        from robo_rl import files
        from robo_rl.data.labels import need_units
        from robo_rl.demos import STILL

        loss, (error, still, stays), names = (
            self.loss(run.policy),
            self.errors(run.policy),
            self.data.features.action,
        )
        run.policy.eval()
        # the others have no error to compare with
        moves = still > STILL * np.maximum(np.abs(self.data.action.mean(0)), 1e-3)
        units = need_units(self.data.meta).unit
        episodes = sorted({int(e) for e in self.data.episode_index[self.rows]})
        files.write_json(
            run.folder / "heldout.json",
            {
                "episodes": episodes,
                "frames": len(self.chunk),
                "loss": loss,
                "axes": [
                    {"name": n, "unit": u, "error": float(a), "error_of_mean": float(b) if m else 0.0}
                    | {"error_of_state": float(c) if np.isfinite(c) else None}
                    for n, u, a, b, c, m in zip(names, units, error, still, stays, moves, strict=True)
                ],
            },
        )
        relative = error[moves] / still[moves] if moves.any() else np.zeros(1)
        ratio = float(relative.mean())
        run.report.log(run.updates, {"heldout/loss": loss, "heldout/error": ratio}, stage="sft")
        worst = int(np.flatnonzero(moves)[relative.argmax()]) if moves.any() else 0
        unit = "" if units[worst] == "1" else f" {units[worst]}"
        known = moves & np.isfinite(stays)
        share = (stays[known] / still[known]).mean() if known.any() else 0.0
        of_staying = f" (of staying where it is {share:.2f})" if known.any() else ""
        run.report.say(
            f"held out: {len(episodes)} of {len(self.data)} episodes, loss {loss:.3f}; mean error of an "
            f"action {ratio:.2f} of that of the mean action{of_staying}; in proportion largest at "
            f"{names[worst]}: {error[worst]:.3g}{unit}"
        )
