"""The supervised stage: demonstrations, and a policy that learns from them before RL."""

import shutil
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import make_env, obs_spec
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.experiment.run import Run


class Stopped(Exception):
    """The user asked to stop before RL began; nothing but the demonstrations needs keeping."""


def first_policy(config: TrainConfig, env):
    """The policy of --init, in a network of --policy's options; parts that it had none of are fresh."""
    from robo_rl import checkpoint
    from robo_rl.policies import make_policy

    folder = pick_checkpoint(Path(config.init), "best")[1]
    old, _ = checkpoint.load_policy(folder)
    checkpoint.check_fits(old, obs_spec(env, old.spec.language), str(folder))
    policy, had = make_policy(config.policy, old.spec, config.seed), old.state_dict()
    if getattr(policy, "noise", None) is None:  # how the run before explored is not what it learnt
        had = {k: v for k, v in had.items() if not k.startswith("noise.")}
    parts = {k.split(".")[0] for k in had}
    try:
        missing, unknown = policy.load_state_dict(had, strict=False)
    except RuntimeError as e:
        missing, unknown = [], [str(e).splitlines()[-1].strip()]
    if unknown := unknown + [k for k in missing if k.split(".")[0] in parts]:
        raise UserError(f"--init {config.init}: its weights do not fit these --policy options ({unknown[0]}); leave out what "
                        "changes the networks")
    for word in ("taught", "steered"):  # critics begin anew, so nothing is chosen by them yet
        if hasattr(policy, word):
            getattr(policy, word).fill_(False)
    if (noise := getattr(policy, "noise", None)) is not None:
        noise.high.fill_(config.policy.noise_max)  # where a schedule left it belongs to the run before
    return policy


def demo_folder(run: Run) -> Path | None:
    """Folder of the demonstrations, recorded first if --demos is a number; None without any."""
    from robo_rl.data.writer import Writer
    from robo_rl.demos import record

    config = run.config
    if not config.demos.isdigit():
        return Path(config.demos)
    count, folder = int(config.demos), run.folder / "demos"
    if count == 0:
        return None
    if (folder / "meta" / "info.json").exists():
        with Writer(folder, spec=run.env.spec) as w:
            whole = len(w) >= count
        if whole:
            return folder
        shutil.rmtree(folder)  # the run was stopped while it recorded; the same seed records the same again
    env = make_env(config, min(count, config.envs, 32))
    run.report.start("demo", count, "episodes")
    with Writer(folder, spec=run.env.spec) as w:
        record(env, count, config.seed, w.add, tick=lambda kept, tried: run.report.advance(kept, kept / tried))
    env.close()
    return folder


def sft_stage(run: Run) -> None:
    """Make `run.policy`: from demonstrations, from --init, or fresh (--demos 0); evaluate what RL begins with.

    Raises Stopped when a signal comes.
    """
    from robo_rl.algos import bc
    from robo_rl.data.reader import load
    from robo_rl.demos import demo_sampler, fit_normalisers
    from robo_rl.policies import make_policy

    config, demos = run.config, demo_folder(run)
    if config.init:
        run.policy = first_policy(config, run.env)
    elif demos is None:
        run.policy = make_policy(config.policy, obs_spec(run.env, len(instructions(run.env)) > 1), config.seed)
        run.policy.freeze_base()
        return
    if demos is None or config.init and not config.bc.updates:
        run.policy.eval()
        evaluate_supervised(run)
        return
    dataset = load(demos)
    if not config.init:
        run.policy = make_policy(config.policy, obs_spec(run.env, len(dataset.tasks) > 1), config.seed)
        fit_normalisers(run.policy, dataset)
    sample = demo_sampler(dataset, run.policy.spec, config.policy.horizon)
    run.report.start("sft", config.bc.updates, "updates")

    def tick(update: int, loss: float) -> None:
        if run.stop.asked:
            raise Stopped
        run.report.advance(update, note=f"loss {loss:.3f}")
        if update % 100 == 0 or update == config.bc.updates:
            run.report.log(update, {"sft/loss": loss}, stage="sft")
    run.policy.train()
    bc.train(run.policy, sample, config.bc, config.seed + 10, tick)
    run.policy.eval()
    evaluate_supervised(run)


def evaluate_supervised(run: Run) -> None:
    """Report the policy that RL begins with; where RL follows it is one of those to choose among."""
    run.evaluate("sft")
    if run.config.algo != "bc" and run.config.steps:
        run.look()


def instructions(env) -> set[str]:
    """The instructions that an env gives at its first reset."""
    obs, _ = env.reset(seed=0)
    return {str(t) for t in obs["task"]}
