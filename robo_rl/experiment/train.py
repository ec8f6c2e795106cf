"""Train a policy in a run folder, from the start or from its last checkpoint: `train(config)`,
`resume(folder)`."""

import gc
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from robo_rl.child import end_if_imported, set_openmp
from robo_rl.errors import MissingDependency, UnreadOption, UserError, quoted
from robo_rl.experiment import allocation, parallel, starts
from robo_rl.experiment.config import TrainConfig, from_file, is_live, load_config, rollout_options
from robo_rl.experiment.envs import NONE, check_env_options, check_shown, obs_spec, probe_env, with_whole_path
from robo_rl.experiment.folder import check_folders, worlds_of
from robo_rl.experiment.latency import with_latency
from robo_rl.experiment.model_units import keep_box_facts, keep_facts
from robo_rl.experiment.reporting import Event, Reporter
from robo_rl.files import GO_ON
from robo_rl.options import OffPolicyOptions, RecapOptions, RolloutOptions
from robo_rl.plugins import note_own_code
from robo_rl.provenance import git_hash, machine_name, versions

if TYPE_CHECKING:
    from robo_rl.contract import ControlEnv

LEAST_DISK = 200_000_000  # bytes that must be free before a run begins


def train(
    config: TrainConfig,
    callback: Callable[[Event], None] | None = None,
    *,
    quiet: bool = False,
    began: Callable[[Path], None] = lambda folder: None,
) -> tuple[Path, int]:
    """Train in a new run folder -> (the folder, exit status: 0, or 128 + the number of the signal that
    stopped it).

    `callback(event)` hears of everything that happens, see `robo_rl.experiment.reporting`; `quiet`: no
    progress on stderr; `began(folder)` is called once the run can be resumed. UserError: options that do not
    fit; no folder is left behind.
    """
    from robo_rl import files

    end_if_imported()
    set_openmp(config.torch_threads)
    taken = "{0} already holds a run; go on with it: robo_rl train --resume {1}, or choose another --out"
    if config.out and (Path(config.out) / "run.json").exists():
        raise UserError(taken.format(config.out, quoted(config.out)))
    parallel.check_main(config)
    config, env = checked(config)  # a mistake leaves no folder behind
    if config.algo != "bc":  # what was chosen for this machine stays, wherever the run is resumed
        config = replace(config, workers=parallel.workers(config))
        if isinstance(config.rl, RolloutOptions):
            config = replace(config, max_staleness=parallel.staleness(config))
    if env is None:
        task = Path(config.demos).resolve().name
    else:
        if ":" not in config.sim or config.sim.startswith("wm:"):
            # the run says which task it was, whatever the default becomes
            config = replace(config, task=env.spec.task)
        task = env.spec.task.replace(":", "-").replace("/", "-")
    name = f"{config.sim.split(':')[0]}-{task}-{config.algo.replace(':', '-')}-s{config.seed}-{time.strftime('%m%d-%H%M%S')}"  # noqa: E501
    folder = Path(config.out) if config.out else unused(Path("runs") / name)
    files.require_free(folder, LEAST_DISK)
    with files.lock(folder):
        if (folder / "run.json").exists():
            raise UserError(taken.format(folder, quoted(folder)))
        files.write_json(
            folder / "run.json",
            {
                "name": folder.name,
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "version": versions().get("robo_rl", ""),
                "git": git_hash(),
                "machine": machine_name(),
                "seed": config.seed,
                "config": asdict(config),
                "versions": versions(),
                "argv": sys.argv[1:],
            },
        )
        if config.sim.startswith("wm:"):
            keep_facts(folder, env, config.demos)
        elif env is not None:
            keep_box_facts(folder, env, config.demos)
        began(folder)
        return folder, go(config, folder, env, Reporter(callback, quiet))


def checked(config: TrainConfig) -> "tuple[TrainConfig, ControlEnv | None]":
    """The configuration that a run keeps, and its env. UserError: options that do not fit."""
    check_env_options(config)
    config = replace(config, sim=with_whole_path(config.sim))
    if config.demos.isdecimal() and int(config.demos):
        check_shown(config.sim, config.task)
    check_folders(config)
    with importing():
        from robo_rl.device_names import check_device

        check_device(config.device)
        env = None if config.sim == NONE else probe_env(config)
        config = with_latency(config, env)
        check(config, env)
    return config, env


def unused(folder: Path) -> Path:
    """`folder`, or with a number behind its name: two runs may begin in one second."""
    tries = (folder, *(folder.with_name(f"{folder.name}-{k}") for k in range(2, 10_000)))
    return next(path for path in tries if not (path / "run.json").exists())


@contextmanager
def importing():
    """Without collections of garbage, which take an eighth of the time of importing torch; what was made then
    counts as lasting. Where torch is there already nothing does: what lasts is never freed, and garbage of an
    earlier run would be among it."""
    imports, collecting = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if imports:
            gc.freeze()
        if collecting:
            gc.enable()


def resume(
    folder: Path, callback: Callable[[Event], None] | None = None, *, quiet: bool = False
) -> tuple[Path, int]:
    """Go on with a run from its last checkpoint -> as `train`."""
    from robo_rl import files

    end_if_imported()
    folder = Path(folder)
    if not (folder / "run.json").exists():
        raise UserError(f"--resume: {folder} has no run.json; give a run folder or auto")
    config = load_config(folder)
    parallel.check_main(config)
    set_openmp(config.torch_threads)
    # what a method does not read was taken by earlier versions
    with files.lock(folder), from_file(folder / "run.json", UnreadOption):
        return folder, go(
            config, folder, None if config.sim == NONE else probe_env(config), Reporter(callback, quiet)
        )


def go(config: TrainConfig, folder: Path, env, reporter: Reporter) -> int:
    """The stages of a run in its locked folder, from wherever it is -> the exit status."""
    from robo_rl import checkpoint
    from robo_rl.device_names import check_device, slow_bf16
    from robo_rl.experiment.exploration import choose_noise
    from robo_rl.experiment.folder import taught_of
    from robo_rl.experiment.offline import learn
    from robo_rl.experiment.replay import never_learns
    from robo_rl.experiment.run import Run, Stopped, looks_of
    from robo_rl.experiment.sft import sft_stage
    from robo_rl.experiment.teaching import begun_in
    from robo_rl.rollout import torch_threads
    from world_models.verdict import advised_against, ends_early, knows_no_success

    check_device(config.device)  # of a run that goes on elsewhere
    checkpoint.recover(folder)
    saved = checkpoint.checkpoints(folder)
    with torch_threads(config.torch_threads), reporter as report:
        run = Run(config, folder, env, report)
        with run.stop, step_watch(config, folder):
            report.say(f"run {folder}")
            if not saved and shows_nothing(config, env):
                report.say("the env has an expert: --demos 20 learns from its successes first, then by RL")
            begins = config.algo != "bc" and not saved
            if begins and env is not None and (why := parallel.whole_rollouts(config, env.spec.max_steps)):
                report.say(why)
            for why in (never_learns(config), parallel.old_alone(config)):
                if begins and why:
                    report.say(why, "warning")
            for model in worlds_of(config):
                judged = config.judge not in ("", "head")
                for why in (advised_against(model), "" if judged else knows_no_success(model)):
                    if why:
                        report.say(why, "warning")
                if why := ends_early(model):
                    report.say(why)
            if config.policy.dtype == "bf16" and config.device == "cpu" and (why := slow_bf16()):
                report.say(f"--policy.dtype bf16: {why}", "warning")
            run.begun = begun_in(saved)
            if saved and run.begun is None:
                run.policy, meta = checkpoint.load_policy(saved[-1], config.device)
                if env is not None:
                    checkpoint.check_fits(run.policy, obs_spec(env, run.policy.spec.language), str(saved[-1]))
                run.step, run.looks = meta["step"], looks_of(meta, config.eval_episodes)
                run.rl_from = meta.get("rl_from", 0)
                run.returns = [tuple(x) for x in meta.get("returns", [])]
                run.taught, run.updates = taught_of(meta)
                if meta["finished"]:
                    tidy_end(run)
                    report.say(
                        "this run is finished; nothing to resume. To train its policy on, begin a new run: "
                        f"robo_rl train --init {quoted(folder)}"
                    )
                    return 0
                keep_files(run)
                run.forget_after(run.step)
                report.open_log(
                    folder, wandb_project=config.wandb, resume_step=run.step, resume_lines=meta.get("lines")
                )
                return rl_stage(run, saved[-1])
            meta = checkpoint.read_meta(run.begun) if run.begun else {}
            run.forget_after(0 if "rounds" in meta else -1)
            report.open_log(
                folder,
                wandb_project=config.wandb,
                resume_step=taught_of(meta)[1] if meta else -1,
                resume_stage="sft",
                resume_lines=meta.get("lines"),
            )
            try:
                if env is None:
                    learn(run)
                else:
                    sft_stage(run)
                choose_noise(run)
            except Stopped:
                return run.end(stopped_words(folder), run.stop.code)
            except Exception as e:
                if words := failed_outside(e):
                    raise UserError(kept(words, folder)) from e
                note_own_code(e, kept("", folder))
                raise
            keep_files(run)
            finished = config.algo == "bc" or config.steps == 0
            run.save({}, finished)
            if not finished:
                return rl_stage(run, None)
            tidy_end(run)
            return run.end()


def tidy_end(run) -> None:
    """What is deleted after a run's last save; again, and at once, for a run that was killed meanwhile."""
    from robo_rl import checkpoint
    from robo_rl.experiment import feeds

    run.tidy()
    feeds.discard(run.folder)
    if run.env is None and (best := checkpoint.best(run.folder)).name != checkpoint.name(run.step):
        checkpoint.drop_train(best)


def shows_nothing(config: TrainConfig, env) -> bool:
    """Whether a policy learns from nothing though its env has an expert that could show it."""
    from robo_rl.experiment.recipes import scratch

    nothing = config.demos in ("", "0") and not config.init and scratch(config.sim, config.task)
    return nothing and hasattr(env, "expert_action")


def stopped_words(folder: Path) -> str:
    """What a run says that a signal stopped before RL."""
    from robo_rl import checkpoint
    from robo_rl.experiment.folder import taught_of
    from robo_rl.experiment.teaching import begun_in

    kept = begun_in(checkpoint.checkpoints(folder))
    if kept is None:
        return (
            f"stopped in the supervised stage; start it again with: robo_rl train --resume {quoted(folder)}"
        )
    updates = taught_of(checkpoint.read_meta(kept))[1]
    return f"saved after {updates:,} supervised updates; go on with: robo_rl train --resume {quoted(folder)}"


def step_watch(config: TrainConfig, folder: Path) -> AbstractContextManager:
    """A watch on steps that never return; none where a step may wait for a person or for hardware."""
    if is_live(config):
        return nullcontext()
    from robo_rl.experiment.step_watch import StepWatch

    return StepWatch(config.hang, f"; go on with: robo_rl train --resume {quoted(folder)}")


def keep_files(run) -> None:
    """What a worker needs beside options and weights to make the policy, below the run's folder."""
    if hasattr(run.policy, "keep_files"):
        run.policy.keep_files(run.folder / "policy")


def rl_stage(run, checkpoint_folder: Path | None) -> int:
    """The RL stage of the chosen method. A UserError in it says how the run goes on from its checkpoint."""
    try:
        return learn_online(run, checkpoint_folder)
    except UserError as e:
        if "--resume" not in str(e) or GO_ON in str(e):
            e.args = (kept(str(e), run.folder),)
        raise
    except Exception as e:
        note_own_code(e, kept("", run.folder))
        raise


def failed_outside(e: Exception) -> str:
    """The words of an error that lies in the simulator, a data set or the disk, which can be mended; "" of
    others, such as of options, which a resumed run keeps."""
    from robo_rl.data.meta import BrokenDataset
    from robo_rl.runtime.worker_pool import WorkerFailure
    from sims.own import own_error

    known = isinstance(e, WorkerFailure | BrokenDataset) or isinstance(e.__cause__, OSError)
    return str(e) if isinstance(e, UserError) and known else own_error(e)


def kept(words: str, folder: Path) -> str:
    """What a run says that failed, and how it goes on."""
    said = words.replace(GO_ON, "")
    return f"{said}; the run is kept: robo_rl train --resume {quoted(folder)} goes on with it"


def learn_online(run, checkpoint_folder: Path | None) -> int:
    """RL by the chosen method, to its end or a signal -> the exit status."""
    if isinstance(run.config.rl, OffPolicyOptions | RecapOptions):
        run.frames = None  # these read the data set themselves
    if isinstance(run.config.rl, OffPolicyOptions):
        from robo_rl.experiment.replay import ReplayStage

        return ReplayStage(run).start(checkpoint_folder)
    if isinstance(run.config.rl, RecapOptions):
        from robo_rl.experiment.recap import RecapStage

        return RecapStage(run).start(checkpoint_folder)
    from robo_rl.experiment import onpolicy

    return onpolicy.rl_stage(run, checkpoint_folder)


def check(config: TrainConfig, env, making: Callable[[], AbstractContextManager] = nullcontext) -> None:
    """Raise UserError now for what would fail later: images, demonstrations, method and policy, wandb.
    making(): the context in which a policy is made to look at."""
    if config.share or config.share_foreign is not None:
        from robo_rl.experiment import share

        share.check(config, env)
    if env is None:
        from robo_rl.experiment import offline

        offline.check(config)
        return
    if config.dream or config.dream_model or config.dream_hard:
        from robo_rl.experiment import dream

        dream.check(config)
        if config.dream_model:
            from world_models.model import load as load_model

            dream.check_model(config, load_model(config.dream_model).spec, env.spec)
    starts.check(config)
    if isinstance(config.rl, OffPolicyOptions) and config.algo != "bc":
        from robo_rl.experiment import replay

        replay.check(config, env)
    elif isinstance(config.rl, RecapOptions) and config.algo != "bc":
        from robo_rl.experiment import recap_check

        recap_check.check(config, env)
    elif config.algo != "bc":
        parallel.check(config)
        from robo_rl.experiment import recycle, rehearsal

        rehearsal.check(config, env)
        recycle.check(config, env)
        allocation.check(config)
    if config.bc.own and config.algo != "bc" and isinstance(config.rl, (OffPolicyOptions, RecapOptions)):
        raise UserError(
            "--bc.own teaches a policy its own successes before RL on fresh rollouts: it goes with pi_rl, "
            f"ppo, dppo, reinflow and nft, got --algo {config.algo}; leave it out"
        )
    from robo_rl.experiment.sft import check_changes, instructions

    texts = instructions(env) if config.obs == "rgb" else ()  # draws
    check_demos(config, env)
    check_changes(config, env.spec.views)
    if config.bc.pear:
        from robo_rl.experiment.collect import best_policy

        best_policy(config.bc.pear, env)
    check_method(config, env, making, texts)
    if config.wandb:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise MissingDependency("--wandb needs wandb: pip install 'robo_rl[wandb]'") from None


def check_demos(config: TrainConfig, env) -> None:
    """Raise UserError for demonstrations that are missing, or that do not fit the env."""
    from robo_rl.demos import check_expert, check_fits, load_demos

    if not config.demos.isdecimal():
        data = load_demos(config.demos, env, config.data.label)
        check_fits(data.meta, obs_spec(env, language=False), config.data)
        check_units(config, data)
    elif int(config.demos):
        check_expert(env)
        check_few_frames(config, env)
    elif config.algo == "bc":
        raise UserError("--algo bc needs demonstrations: --demos N or --demos PATH")
    elif config.init and config.bc.updates:
        raise UserError("--bc.updates needs demonstrations to teach from: --demos N or --demos PATH")


def check_few_frames(config: TrainConfig, env) -> None:
    """Raise UserError where --data.every would leave pictures out of demonstrations that need them."""
    if config.data.every == 1 or not env.spec.views:
        return
    if isinstance(config.rl, (OffPolicyOptions, RecapOptions)) and config.algo != "bc":
        raise UserError(
            f"--algo {config.algo} learns from whole demonstrations, with all their pictures: leave "
            "--data.every out"
        )


def check_units(config: TrainConfig, data) -> None:
    """Raise UserError for actions that are no commands of -1 to 1, and for methods that learn from success or
    rewards where nobody said them."""
    from robo_rl.data.labels import units_of

    low, high = float(data.action.min()), float(data.action.max())
    if data.spec is None and max(-low, high) > 1.001:
        units = units_of(data.meta)
        raise UserError(
            f"data set {config.demos}: its actions reach from {low:.3g} to {high:.3g} "
            f"({units or 'in units that nobody stated'}), an env takes commands of -1 to 1; learn from them "
            "in their own units: --sim none --algo bc"
        )
    paid = isinstance(config.rl, OffPolicyOptions) and "next.reward" in data.meta.info["features"]
    learns = isinstance(config.rl, (OffPolicyOptions, RecapOptions)) and config.algo != "bc"
    if learns and not data.is_judged and not paid:
        raise UserError(
            f"data set {config.demos} says of no episode whether it succeeded, which {config.algo} learns "
            "from; say it: --data.label success=all, success=none or success=FILE"
        )


def check_method(
    config: TrainConfig, env, making: Callable[[], AbstractContextManager], texts: Iterable[str]
) -> None:
    """Raise UserError for a policy that does not take the instructions `texts`, and for a method that does
    not take the policy, the demonstrations or the number of envs."""
    from robo_rl.experiment import methods
    from robo_rl.experiment.sft import first_policy
    from robo_rl.lora import adapted
    from robo_rl.policies import make_policy

    with making():
        first = (
            first_policy(config, env)
            if config.init
            else make_policy(config.policy, obs_spec(env, False, config.policy.text), 0)
        )
    methods.check_model(config, first, texts)
    if config.policy.lora.rank and not config.init and config.demos == "0":
        raise UserError("--policy.lora.rank adapts weights that know something: --init RUN, or --demos N")
    if config.algo == "bc":
        return
    methods.check_told(config.algo, first.options.advantage)
    methods.check_method(config, first)
    if config.share:
        from robo_rl.algos import foreign

        foreign.check_policy(first)
    if getattr(config.rl, "freeze_trunk", False) and any(
        name.startswith("trunk.") for name in adapted(first)
    ):
        raise UserError(
            "--rl.freeze-trunk would freeze the trunk's adapters: --rl.no-freeze-trunk, or other "
            "--policy.lora.targets"
        )
    if isinstance(config.rl, OffPolicyOptions):
        from robo_rl.experiment import marks, replay

        if any(name.startswith("trunk.") for name in adapted(first)):
            raise UserError(
                f"--algo {config.algo} leaves the trunk as it is, so adapters there would learn nothing: "
                "--policy.lora.targets head"
            )
        replay.check_memory(config, first)
        marks.check_marks(config, first)
    if isinstance(config.rl, (OffPolicyOptions, RecapOptions)):
        return
    o = rollout_options(config)
    if o.bc_coef and config.demos == "0":
        raise UserError("--rl.bc-coef holds the policy near demonstrations: --demos N or --demos PATH")
    if o.advantage != "gae" and config.envs % o.group:
        raise UserError(
            f"--envs must be a multiple of the group size {o.group} with advantage "
            f"{o.advantage}, got {config.envs}"
        )
