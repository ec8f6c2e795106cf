"""Run folders: which one is meant, and which of its checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from robo_rl.errors import UserError, quoted
from robo_rl.experiment.config import TrainConfig
from robo_rl.options.policy import VLAS
from robo_rl.plugins import is_object


def check_folders(config: TrainConfig) -> None:
    """Raise UserError for a data set, a run or a world model that does not exist; before torch is loaded,
    which takes seconds."""
    from robo_rl.log import open_run
    from world_models.options import find

    if not config.demos.isdecimal() and not Path(config.demos).exists():
        raise UserError(
            f"--demos must be a number or the folder of a data set, got {config.demos!r}: no such folder"
        )
    if config.policy.folder and config.policy.kind not in VLAS and not is_object(config.policy.kind):
        raise UserError(
            f"--policy.folder is of a vision-language-action model, --policy.kind {config.policy.kind} is "
            f"none; --policy {quoted(config.policy.folder)} finds its kind"
        )
    for run in filter(None, (config.init, config.bc.pear)):
        if not (Path(run) / "meta.json").exists():  # a checkpoint
            open_run(run)
    for model in worlds_of(config):
        find(model)


def worlds_of(config: TrainConfig) -> list[str]:
    """The world models that a run plays in: of --sim wm:RUN, and of --dream-model."""
    inside = config.sim[3:] if config.sim.startswith("wm:") else ""
    return [model for model in (inside, config.dream_model) if model]


def newest_run(root: Path) -> Path:
    """The run below `root` that was written last."""
    found = [p.parent for p in root.glob("*/run.json")]
    if not found:
        raise UserError(f"no run to resume below {root}/; start one with: robo_rl train")
    return max(found, key=lambda r: max((p.stat().st_mtime for p in r.glob("*.json*")), default=0.0))


def pick_run(path: Path) -> Path:
    """The run folder at `path`, which may be one of its checkpoint folders."""
    from robo_rl.log import open_run

    return path.parent.parent if (path / "meta.json").exists() else open_run(path)


def pick_checkpoint(path: Path, name: str) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of a run and a checkpoint name, or of a checkpoint folder."""
    run = pick_run(path)
    if (path / "meta.json").exists():
        return run, path
    from robo_rl import checkpoint  # torch comes with it: a name that is wrong is told before
    from robo_rl.log import no_checkpoint

    root = run / "checkpoints"
    found = checkpoint.checkpoints(run)
    if not found:
        raise UserError(f"{run} has no checkpoint yet")
    if name == "last":
        return run, found[-1]
    if name == "best":
        return run, checkpoint.best(run, found[-1])
    at = root / (checkpoint.name(0) if name == "sft" else name)
    named = [*found, *sorted(p.parent for p in root.glob("*/meta.json") if p.parent not in found)]
    if at not in named:
        sft = ["sft"] if root / checkpoint.name(0) in found else []
        allowed = ["best", "last", *sft, *(p.name for p in named)]
        raise no_checkpoint(run, name, allowed)
    return run, at


class NewestCheckpoint:
    """A newer checkpoint of a run each time that there is one, on `device`, looked for every `seconds`, by a
    clock [s].

    fits: whether chunks of a policy are of the kind that is recorded, for a run may have been replaced by
    another one; say(line): which checkpoint is served, and that there is none any more."""

    def __init__(
        self,
        run: Path,
        name: str,
        at: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        device: str = "cpu",
        fits: Callable[[Any], bool] = lambda policy: True,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.run, self.name, self.at = run, name, at
        self.seconds, self.clock, self.device = seconds, clock, device
        self.fits, self.say, self.told = fits, say, ""
        self.looked = clock()

    def __call__(self) -> "tuple[Any, int] | None":
        """(policy, version); None: there is none, or it is not time."""
        from robo_rl import checkpoint

        if not self.seconds or self.clock() - self.looked < self.seconds:
            return None
        self.looked = self.clock()
        try:
            _, at = pick_checkpoint(self.run, self.name)
        except UserError as e:
            return self._keep(f"nothing newer can be looked for ({e})")
        if at == self.at:
            return None
        try:
            policy, meta = checkpoint.load_policy(at, self.device)
        except UserError:  # it went while we looked; the next one comes
            return None
        if not self.fits(policy):
            return self._keep(
                f"{at} is of another run than was served, with other sizes, units or noise; start robo_rl "
                "serve again for it"
            )
        self.at, self.told = at, ""
        self.say(f"serving {at} from now on")
        return policy, meta["step"]

    def _keep(self, why: str) -> None:
        """Say once why the checkpoint that is served stays."""
        if why != self.told:
            self.told = why
            self.say(f"{self.at.name} stays served: {why}")


def taught_of(meta: dict) -> tuple[int, int]:
    """(supervised updates of a checkpoint's policy, all that were made before it too); of an older one they
    are equal."""
    taught = meta.get("taught", 0)
    return tuple(taught) if isinstance(taught, list) else (taught, taught)


def half_taught(run: Path, folder: Path) -> str:
    """That supervision of a checkpoint, as `pick_checkpoint` gives it, was not over, and what ends it; ""
    where it was."""
    from robo_rl import checkpoint

    meta = checkpoint.read_meta(folder)
    if rounds := meta.get("rounds"):
        return (
            f"{folder} was saved between two rounds of supervision, after {rounds} and {meta['taught'][0]:,} "
            f"supervised updates, and succeeded too rarely; robo_rl train --resume {quoted(run)} makes "
            "the next round"
        )
    if "teaching" not in meta:
        return ""
    return (
        f"{folder} has learnt for {meta['taught'][0]:,} of {meta['teaching']:,} supervised updates; robo_rl "
        f"train --resume {quoted(run)} makes the others"
    )
