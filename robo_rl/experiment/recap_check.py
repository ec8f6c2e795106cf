"""What a run of recap refuses (`experiment.recap`)."""

from pathlib import Path

from robo_rl.data.reader import Dataset, load
from robo_rl.errors import UserError, quoted
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import obs_spec
from robo_rl.options import RecapOptions


def recap_options(config: TrainConfig) -> RecapOptions:
    """Options of recap."""
    assert isinstance(config.rl, RecapOptions)
    return config.rl


def data_folders(config: TrainConfig) -> list[Path]:
    """The data sets of --rl.data."""
    return [Path(name.strip()) for name in recap_options(config).data.split(",") if name.strip()]


def check_process(config: TrainConfig) -> None:
    """Raise UserError for several processes."""
    if (config.workers or 0) > 0 or config.server or config.backend != "processes" or config.learners > 1:
        raise UserError(
            "--algo recap records and learns in one process: leave --workers, --server, --backend and "
            "--learners out"
        )


def check(config: TrainConfig, env) -> None:
    """Raise UserError for data that is absent, of another env, or without outcomes, and for options that
    recap does not take."""
    from robo_rl.demos import check_fits

    check_process(config)
    o = recap_options(config)
    if config.demos == "0" and not o.data and not o.rounds:
        raise UserError(
            "--algo recap learns from episodes: --demos N or PATH, --rl.data FOLDER, or --rl.rounds N to "
            "record its own"
        )
    for folder in data_folders(config):
        if not (folder / "meta").is_dir():
            raise UserError(
                f"--rl.data: {folder} is no data set; record one with robo_rl collect --policy expert,RUN "
                f"--out {quoted(folder)}"
            )
        data = load(folder)
        check_fits(data.meta, obs_spec(env, language=False), config.data)
        if not data.is_judged:
            raise UserError(
                f"--rl.data: {folder} says of no episode whether it succeeded; say it: robo_rl data label "
                f"{quoted(folder)} --success FILE"
            )


def check_outcomes(config: TrainConfig, data: Dataset) -> None:
    """Raise UserError for episodes from whose outcomes recap learns nothing, and for what it would do in an
    env."""
    check_process(config)
    if not config.policy.advantage:
        raise UserError("recap needs a policy that is told the advantage: --policy.advantage")
    if recap_options(config).rounds:
        raise UserError(
            "--rl.rounds records episodes in an env, and --sim none is none: record them on the robot "
            "(robo_rl deploy RUN --record FOLDER), add them with robo_rl data merge, and train again"
        )
    if recap_options(config).data:
        raise UserError(
            "with --sim none one data set is all that is learnt from: robo_rl data merge puts --demos and "
            "--rl.data into one"
        )
    won = int(data.success.sum())
    if not data.is_judged or won in (0, len(data)):
        said = (
            f"{won} of its {len(data)} episodes succeeded" if data.is_judged else "it does not say which did"
        )
        raise UserError(
            f"recap learns from episodes of which some succeeded and some failed; of data set {config.demos} "
            f"{said}. Say it with robo_rl data label {quoted(config.demos)} --success FILE, or learn with "
            "--algo bc"
        )
