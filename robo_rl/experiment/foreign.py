"""Policies that act in the place of a run's and are none of ours (`robo_rl.options.foreign`): in
evaluations, for the console's robots and on an arm."""

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from robo_rl.errors import UserError
from robo_rl.experiment.model_units import units_of_run
from robo_rl.options.foreign import LEROBOT

if TYPE_CHECKING:
    from robo_rl.policies import ObsSpec

TOKEN = "ROBO_RL_TOKEN"


def foreign_policy(
    name: str, spec, execute: int, seed: int = 0, python: str = "", cameras: str = "", key: str = ""
):
    """The policy of FOREIGN, with a method `close`: of a server at ws://HOST:PORT, or lerobot:FOLDER. spec:
    what it is shown and commands; execute: rows of its chunks that are executed; key: of a server, "": that
    of ROBO_RL_TOKEN."""
    if name.startswith(LEROBOT):
        from robo_rl.experiment.lerobot_policy import start_policy

        return start_policy(name, python, cameras, spec, execute, seed)
    from robo_rl.experiment.openpi import OpenpiPolicy

    return OpenpiPolicy(name, spec, execute, key or os.environ.get(TOKEN, ""))


def console_policy(options: Any, spec, execute: int):
    """`foreign_policy` of the console's options, warmed up, for robots that people watch."""
    policy: Any = foreign_policy(
        options.policy, spec, execute, options.seed, options.lerobot_python, options.lerobot_cameras
    )
    if options.policy.startswith(LEROBOT):
        from robo_rl.experiment.lerobot_policy import for_console

        return for_console(policy)
    from robo_rl.experiment.openpi import DEADLINE

    try:
        policy.warm_up("")
    except BaseException:
        policy.close()
        raise
    policy.timeout = DEADLINE
    return policy


def arm_client(options: Any, act: "ForeignActor", patience: float, lockstep: bool):
    """The `PolicyClient` of a foreign policy for an arm. patience [s]: an answer within it counts as
    immediate; lockstep: the arm stands still meanwhile."""
    from controllers.remote import read_token
    from robo_rl.experiment.lerobot_policy import DEADLINE, LeRobotClient
    from robo_rl.experiment.openpi import OpenpiClient

    key = read_token(options.token).decode() if options.token else ""
    policy: Any = foreign_policy(
        options.policy,
        act.spec,
        act.execute,
        options.seed,
        options.lerobot_python,
        options.lerobot_cameras,
        key,
    )
    client = LeRobotClient if options.policy.startswith(LEROBOT) else OpenpiClient
    deadline = patience - 1 if lockstep else DEADLINE
    return client(policy, act.instruction, patience, deadline, blocks=lockstep)


@dataclass(frozen=True)
class ForeignActor:
    """What `policy_server.Actor` says of a policy that acts elsewhere; spec: what it is given, instruction:
    in these words."""

    execute: int
    spec: "ObsSpec"
    instruction: str

    def choose(self, chunking: str) -> "ForeignActor":
        """Itself: `DeployOptions` has looked at --chunking."""
        return self


def foreign_actor(run: str, checkpoint: str, task: str, instruction: str, execute: int):
    """(ForeignActor, the run's config, ObsSpec) of a deployment in the place of a run's policy; arguments as
    `policy_server.load_actor`, which it raises UserError like. execute: rows, 0: as many as the run's
    policy."""
    from robo_rl.experiment.policy_server import default_instruction, run_interface

    where, _, made, config, spec, _ = run_interface(run, checkpoint, task)
    spec, _ = units_of_run(where, config.sim, spec)
    if not instruction:
        # it may read none
        with contextlib.nullcontext() if spec.language else contextlib.suppress(UserError):
            instruction = default_instruction(config, where)
    return ForeignActor(execute or made["execute"], spec, instruction), config, spec
