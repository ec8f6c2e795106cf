"""Who decides for an arm: a run's policy in this process, in one of its own or elsewhere, and whether it is
quick enough."""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from robo_rl.child import end, line_with
from robo_rl.errors import UserError
from robo_rl.experiment import planning
from robo_rl.experiment.data_facts import check_instruction
from robo_rl.experiment.foreign import arm_client, foreign_actor
from robo_rl.options.foreign import FOREIGN

if TYPE_CHECKING:
    from controllers.schedule import Latency
    from robo_rl.experiment.deploy_options import DeployOptions

SERVER_STARTS = 300.0  # s for a policy in a process of its own: a large one is read from disk
LOCKSTEP = 60.0  # s that a simulated arm in lockstep waits for a chunk
FASTER = (
    ". Let it compute on another machine (robo_rl serve there, --policy HOST:PORT here) or on a GPU "
    "(--device cuda), move more slowly (--speed), or train chunks that last longer (--policy.horizon)"
)
FASTER_PLAN = (
    ". Let it try fewer chunks (--plan-candidates), look less far (--plan-ahead), or plan in a smaller model "
    "(robo_rl wm train --net.members 4 --net.hidden 80)"
)


def choose_actor(options: "DeployOptions", warn: Callable[[str], None] = lambda line: None):
    """(who acts, the run's config, ObsSpec): the run's policy, or a foreign one in its place. UserError: it
    does not act so, or never learnt the instruction; warn(line) where it may know it all the same."""
    if options.policy.startswith(FOREIGN):
        return foreign_actor(
            options.run, options.checkpoint, options.task, options.instruction, options.execute
        )
    from robo_rl.experiment.policy_server import default_instruction, load_actor, remote_actor, run_interface

    known = run_interface(options.run, options.checkpoint, options.task)
    folder, _, _, config, spec, _ = known
    check_instruction(folder, config, spec, options.instruction, warn)
    if options.instruction and not spec.language:
        warn(
            f"the policy of {options.run} takes no instruction: --instruction is recorded, and not told to it"
        )
    if options.plan_in:
        return planning.load_planned_actor(options, known, options.instruction, options.seed, options.device)
    if options.policy:
        act, config, spec = remote_actor(known)
        if options.policy == "process" and spec.language and not options.instruction:
            default_instruction(config, folder)
    else:
        act, config, spec = load_actor(
            options.run,
            options.checkpoint,
            options.seed,
            options.instruction,
            options.task,
            device=options.device,
            most=1,
            robot=True,
            known=known,
        )
    return act.choose(options.chunking), config, spec


def instruction_of(options: "DeployOptions", spec, client) -> str:
    """The instruction that the policy is told, which is recorded and judged: --instruction, or that of the
    server at HOST:PORT. UserError: they differ."""
    from controllers.policy_client import TimedPolicy
    from controllers.remote import RemotePolicyClient

    client = client.policy if isinstance(client, TimedPolicy) else client
    if not spec.language or options.policy == "process" or not isinstance(client, RemotePolicyClient):
        return options.instruction
    told = client.instruction()
    if options.instruction not in ("", told):
        raise UserError(
            f"the policy at {options.policy} is told {told!r}, and --instruction says "
            f"{options.instruction!r}: start it with robo_rl serve --instruction, and leave it out here"
        )
    return told


def open_policy(options: "DeployOptions", act, period: float):
    """(policy client, the server process that it started or None); act: the policy in this process, period:
    of control [s].

    A simulated arm in lockstep stands still while a policy decides, wherever that is: its time is not the
    wall's, and how long an answer took is kept apart (`TimedPolicy`).
    """
    from controllers.chunking import PATIENCE
    from controllers.policy_client import TimedPolicy

    lockstep = options.transport == "inprocess"
    client, server = _connect(options, act, LOCKSTEP if lockstep else PATIENCE * period, lockstep)
    return TimedPolicy(client) if lockstep else client, server


def _connect(options: "DeployOptions", act, patience: float, lockstep: bool):
    """As `open_policy`; patience [s]: an answer within it counts as immediate."""
    from controllers.policy_client import InProcessPolicy
    from controllers.remote import RemotePolicyClient, read_token

    if not options.policy:
        return InProcessPolicy(act), None
    if options.policy.startswith(FOREIGN):
        return arm_client(options, act, patience, lockstep), None
    if options.policy != "process":
        from robo_rl.experiment.folder import pick_checkpoint
        from robo_rl.experiment.policy_server import TOKEN_FILE

        token_file = options.token or pick_checkpoint(Path(options.run), options.checkpoint)[0] / TOKEN_FILE
        return RemotePolicyClient(options.policy, read_token(token_file), patience, blocks=lockstep), None
    token = secrets.token_urlsafe(32)
    server = subprocess.Popen(
        [sys.executable, "-m", "robo_rl", *serve_words(options)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"ROBO_RL_TOKEN": token},
    )
    line = line_with(server, " on ", SERVER_STARTS)
    if not line:
        end(server)
        raise UserError("the policy's process did not start; try: robo_rl serve " + options.run)
    where = line.rsplit(" on ", 1)[1].strip()
    return RemotePolicyClient(where, token.encode(), patience, blocks=lockstep), server


def serve_words(options: "DeployOptions") -> list[str]:
    """The command line of the server of `--policy process`."""
    told = {
        name: str(getattr(options, name)) for name in ("seed", "checkpoint", "instruction", "task", "device")
    }
    words = [word for name, value in told.items() for word in (f"--{name}", value)]
    return ["serve", options.run, "--port", "0", *words]


def report_motion(
    bridge, client, log: Callable[[str], None], warn: Callable[[str], None], plans: bool = False
) -> None:
    """Say what ran, and whether the policy, which `plans` in a world model or not, was too slow for it."""
    from controllers.policy_client import TimedPolicy

    latency = client.latency if isinstance(client, TimedPolicy) else None
    log(bridge.report(latency))
    if bridge.chunks.asked is not None and bridge.governor.counts["command_age"]:
        waited = bridge.transport.now() - bridge.chunks.asked_at
        warn(f"no answer of the policy came in the last {waited:.1f} s: does it still run?")
    if slow := slowness(bridge, client.blocks, latency, plans):
        warn(slow)


def slowness(bridge, blocks: bool, latency: "Latency | None" = None, plans: bool = False) -> str:
    """Why a policy was too slow for its arm, with numbers and remedies; "" where it was not.

    bridge: after the motion; blocks: its loop waited for the policy; latency: of the policy, where the arm's
    clock stood still meanwhile; plans: in a world model.
    """
    runner = bridge.chunks
    seen, chunk = (latency or runner.latency).summary(), runner.schedule.chunk
    if chunk is None or not seen["count"]:
        return ""
    starved, lasts = runner.schedule.counts["starved"], len(chunk.rows) * runner.period
    takes = (
        f"the policy takes {1e3 * seen['median']:.0f} ms for a chunk (median; at most "
        f"{1e3 * seen['max']:.0f} ms), "
    )
    rows = f"whose {len(chunk.rows)} rows last {1e3 * lasts:.0f} ms"
    if latency is not None:
        slow, what = seen["median"] > lasts, f"{rows}: in real time the arm would stand between chunks"
    elif blocks:
        slow = seen["p99"] > bridge.task.period
        what = (
            f"and no command is sent meanwhile, where the period is {1e3 * bridge.task.period:.0f} ms: let "
            "it decide beside the arm (--policy process)"
        )
    else:
        slow = seen["max"] > lasts and starved > 0
        what = f"{rows}: the arm had no action in {starved} periods"
    return takes + what + (FASTER_PLAN if plans else FASTER) if slow else ""
