"""How the work of a run is shared out: worker processes, their envs, the bound on staleness, the samples of
an update."""

import os
import sys

from robo_rl.child import check_script
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig, by_person, rollout_options
from robo_rl.files import cores
from robo_rl.options import OnPolicyOptions, RolloutOptions
from robo_rl.plugins import split_arguments


def group_size(config: TrainConfig) -> int:
    """Episodes per start, 0 without a group advantage."""
    o = rollout_options(config)
    return o.group if o.advantage != "gae" else 0


def allocates(config: TrainConfig) -> bool:
    """Whether the episodes of a round are shared out among its starts, other than alike."""
    return isinstance(config.rl, RolloutOptions) and config.rl.allocate != "fixed"


def chooses(config: TrainConfig) -> bool:
    """Whether the episodes of a group are chosen among candidates that a cheaper policy plays."""
    return isinstance(config.rl, RolloutOptions) and config.rl.candidates > 0


def workers(config: TrainConfig) -> int:
    """Worker processes of this run; 0: everything in one process."""
    if config.workers is not None:
        return config.workers
    if not isinstance(config.rl, RolloutOptions):
        # simulators take a twentieth of the time: with --workers 1 acting goes on beside, as an arm must, and
        # a person does not wait for updates
        return int(by_person(config) and cores() > 1)
    units = config.envs // (group_size(config) or 1)
    tensors = config.sim in ("mujoco_warp", "isaacgym", "isaaclab")
    tensors |= config.sim == "maniskill" and config.device != "cpu"
    return 0 if cores() < 2 or tensors else min(cores(), units)


def check_main(config: TrainConfig) -> None:
    """UserError where worker processes would train as well, for the script that trains does so as it is
    imported, or would not find what is defined in a notebook alone."""
    if config.algo == "bc" or config.backend != "processes" or not (workers(config) or config.learners > 1):
        return
    check_script()
    if os.path.exists(getattr(sys.modules["__main__"], "__file__", None) or ""):
        return
    id, made_by = split_arguments(config.sim.removeprefix("gym:"))[0], None
    if config.sim.startswith("gym:"):
        import gymnasium

        made_by = getattr(gymnasium.registry.get(id), "entry_point", None)
    names = {"sim": id, "task": config.task, "policy.kind": config.policy.kind}
    own = [option for option, name in names.items() if name.startswith("__main__:")]
    if own or getattr(made_by, "__module__", "") == "__main__":
        raise UserError(
            f"what {(own or ['sim'])[0]} names is defined in this notebook alone, and worker processes do "
            "not find it: write it to a file, and name it after its module, or train with workers=0"
        )


def staleness(config: TrainConfig) -> int:
    """Bound on the age [versions] of what is trained on."""
    return int(workers(config) > 0) if config.max_staleness is None else config.max_staleness


def episode_slots(config: TrainConfig) -> bool:
    """Whether episodes of groups wait for no other: trees, groups whose sizes are decided or that are chosen
    among candidates, and with staleness, on this machine, each worker deciding for itself."""
    free = staleness(config) > 0 and not config.server and config.backend == "processes"
    return bool(group_size(config)) and (
        free or rollout_options(config).advantage == "tree" or allocates(config) or chooses(config)
    )


def batch(config: TrainConfig) -> int:
    """Samples of an update: episodes of whole groups, or decisions of all envs."""
    group = group_size(config)
    rounds = max(1, config.periodic)
    if not group:
        return config.envs * rollout_options(config).decisions
    return max(1, int(config.envs * rounds / config.over_provision) // group) * group


def whole_rollouts(config: TrainConfig, longest: int) -> str:
    """That whole rollouts make over a tenth more than --steps, and why; "" where they do not. longest: steps
    of an episode."""
    if not isinstance(config.rl, OnPolicyOptions) or config.dream or not config.steps:
        return ""
    count, group, e = batch(config), group_size(config), config.policy.execute
    size = count * (longest if group else e)
    made = -(-config.steps // size) * size
    if made <= 1.1 * config.steps:
        return ""
    of, smaller = (
        (f"{count} episodes of up to {longest} steps", "--envs")
        if group
        else (
            f"{config.envs} envs x {rollout_options(config).decisions} decisions x {e} steps",
            "--envs or --rl.decisions",
        )
    )
    return (
        f"--steps {config.steps}: RL makes {'up to' if group else 'about'} {made:,} control steps, for it "
        f"stops after a whole rollout, of {size:,} ({of}); fewer {smaller} make a rollout smaller"
    )


def old_alone(config: TrainConfig) -> str:
    """That data is made old though nothing collects beside the learner; "" elsewhere, and where episodes then
    wait for no other."""
    if workers(config) or not config.max_staleness or episode_slots(config):
        return ""
    return (
        f"--max-staleness {config.max_staleness} with --workers 0: data is made up to so many updates old, "
        "and no process collects beside the learner; add --workers 2, or leave --max-staleness out"
    )


def check(config: TrainConfig) -> None:
    """Raise UserError for workers that do not fit the envs."""
    n, group = workers(config), group_size(config) or 1
    if group > 1 and rollout_options(config).advantage == "tree":
        if config.server or config.backend == "ray" or config.periodic or config.dream or config.learners > 1:
            raise UserError(
                "--rl.advantage tree goes without --server, --backend ray, --periodic, --dream and --learners"
            )
        if config.algo == "nft":
            raise UserError(
                "--rl.advantage tree weighs decisions, which the loss of nft does not; use pi_rl, ppo, dppo "
                "or reinflow"
            )
    if config.periodic and (
        staleness(config)
        or not group_size(config)
        or not isinstance(config.rl, OnPolicyOptions)
        or config.rl.epochs != 1
        or config.algo == "nft"
    ):
        raise UserError(
            "--periodic takes one step per batch of fresh groups: it needs --max-staleness 0, a group "
            "advantage (--rl.advantage grpo), --rl.epochs 1, and pi_rl, ppo, dppo or reinflow"
        )
    rl = rollout_options(config)
    if rl.advantage == "gdpo" and config.periodic or (rl.advantage == "gdpo" or rl.flawed) and config.share:
        raise UserError(
            "--rl.advantage gdpo goes without --periodic, for it compares all groups of an update; neither "
            "it nor --rl.flawed goes with --share, for nothing but the return is known of other runs' "
            "episodes"
        )
    if rl.advantage == "istar" and (config.periodic or config.learners > 1 or config.share):
        raise UserError(
            "--rl.advantage istar learns a second policy from the episodes of an update: it goes without "
            "--periodic, --learners and --share"
        )
    replays = isinstance(config.rl, OnPolicyOptions) and config.rl.replay
    if replays and (config.periodic or config.dream or config.learners > 1 or config.share):
        raise UserError("--rl.replay goes without --periodic, --dream, --learners and --share")
    if config.over_provision > 1 and not episode_slots(config):
        raise UserError(
            "--over-provision above 1 needs a group advantage (--rl.advantage grpo), --max-staleness of at "
            "least 1, and neither --server nor --backend ray"
        )
    if config.over_provision > staleness(config) + 1:
        raise UserError(
            f"--over-provision must be at most --max-staleness + 1 = {staleness(config) + 1}, got "
            f"{config.over_provision:g}: more would never be admitted"
        )
    if config.learners > 1:
        from robo_rl.runtime.sharded import check

        if config.periodic:
            raise UserError("--periodic adds up gradients in one process: it goes without --learners")
        if config.device != "cpu" or config.policy.dtype != "fp32":
            raise UserError(
                "--learners above 1 spreads the learner over processes of the CPU, in fp32: it goes without "
                "--device and --policy.dtype bf16"
            )
        check(config.algo, config.rl, config.learners)
    if config.server and n == 0:
        raise UserError(
            "--server runs the policy for worker processes, and this run has none: add --workers 2, or leave "
            "--server out"
        )
    if config.ray_address and config.backend != "ray":
        raise UserError(f"--ray-address {config.ray_address} is of a Ray cluster: add --backend ray")
    if config.backend == "ray" and (n == 0 or config.server):
        raise UserError("--backend ray needs --workers of at least 1 and no --server")
    if n * group > config.envs:
        raise UserError(
            f"--workers {n} need at least {n * group} --envs"
            + (f" (groups of {group} stay together)" if group > 1 else "")
            + f", got {config.envs}"
        )
    if config.backend == "ray":
        from robo_rl.runtime import ray_pool

        ray_pool.check(config.ray_address)  # now, not after the supervised stage


def shares(envs: int, workers: int, group: int) -> list[int]:
    """Envs of each worker, as even as groups allow."""
    units = envs // (group or 1)
    return [(units // workers + (i < units % workers)) * (group or 1) for i in range(workers)]
