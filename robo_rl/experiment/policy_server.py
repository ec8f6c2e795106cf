"""A run's policy as a function of observations, and as a server of them over TCP (`controllers.serving` has
the protocol)."""

import ipaddress
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from robo_rl.device_names import check_device
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment.batching import by_size
from robo_rl.experiment.data_facts import check_instruction
from robo_rl.experiment.model_units import CommandUnits, units_of_run

if TYPE_CHECKING:
    from robo_rl.experiment.config import TrainConfig
    from robo_rl.policies import ObsSpec
    from robo_rl.policies.numpy_actor import NumpyActor
    from robo_rl.runtime.sessions import ExploringActor, SessionRecorder

TOKEN_FILE = "serve.token"  # in a run folder
NO_FLOW = "--chunking rtc guides flow policies alone; this one is none: use --chunking blend"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve the policy of a run, for robo_rl deploy --policy HOST:PORT. Clients prove that they know its
    token; nothing is encrypted: between machines go through ssh -L 7447:127.0.0.1:7447 MACHINE."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The policy": ("checkpoint", "task", "instruction", "seed", "device"),
        "Episodes of clients to learn from": ("share", "share_keep", "follow"),
        "The connection": (
            "wire",
            "host",
            "port",
            "token",
            "clients",
            "idle",
            "batch",
            "deadline",
            "threads",
        ),
    }

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    wire: Literal["native", "openpi", "lerobot"] = "native"
    """native: for robo_rl deploy; openpi: websocket and msgpack, for PyPI's openpi-client, which gives the
    token as its API key. Questions that wait are answered in batches. lerobot is refused: its messages are
    pickles."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine alone."""
    port: int = 7447
    """TCP port, 0 to 65535; 0: any free one."""
    task: str = ""
    """Of a run over several tasks this one: clients send the state of that task alone; "": that of all (give
    --instruction)."""
    instruction: str = ""
    """Language instruction, for a policy that takes one; "": the task's own, where it has one."""
    token: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File with the token, made if it is not there (0600); "": RUN/serve.token. ROBO_RL_TOKEN goes before
    it."""
    clients: int = 16
    """Connections at once, 1 to 256; further clients are refused."""
    idle: float = 600.0
    """Seconds without a request, from 1, after which a connection is closed."""
    seed: int = 0
    """Seed of the policy's sampling, from 0."""
    device: str = "cpu"
    """cpu, cuda or cuda:N: where the policy computes."""
    batch: int = 64
    """Most questions that are answered at once."""
    deadline: float = 5.0
    """With --wire openpi: seconds within which a question is answered or refused."""
    threads: int = 0
    """CPU threads of the policy; 0: all cores but one."""
    share: str = ""
    """Folder in which the episodes of clients become groups for robo_rl train --share: chunks are then drawn
    with exploration and kept with their log-probs, and clients tell outcomes."""
    share_keep: int = 256
    """With --share: groups that stay; older ones go."""
    follow: float = 0.0
    """With --share: seconds between looks for a newer checkpoint of the run, which is served from then on; 0:
    never."""

    def __post_init__(self) -> None:
        if self.wire == "lerobot":
            raise UserError(
                "--wire lerobot: every message of lerobot.async_inference is a pickle, and to unpickle what "
                "a client sends is to run what it says; use --wire openpi or native"
            )
        in_range("--port", self.port, 0, 65535)
        in_range("--clients", self.clients, 1, 256)
        in_range("--idle", self.idle, 1, 1e6)
        in_range("--seed", self.seed, 0, 2**31)
        in_range("--batch", self.batch, 1, 4096)
        in_range("--deadline", self.deadline, 0.001, 600)
        in_range("--threads", self.threads, 0, 4096)
        in_range("--share-keep", self.share_keep, 8, 4096)
        in_range("--follow", self.follow, 0, 1e6)
        if self.follow and not self.share:
            raise UserError(
                "--follow serves newer checkpoints to clients whose episodes are learnt from: it goes with "
                "--share FOLDER"
            )
        check_device(self.device)
        if self.share and self.task:
            raise UserError("--share keeps the observations of all of a run's tasks: it goes without --task")
        if self.share and Path(self.share).exists() and not Path(self.share).is_dir():
            raise UserError(
                f"--share {self.share} is a file; name a folder, which is made if it is not there"
            )


def serving_threads(asked: int) -> int:
    """CPU threads of a served policy: as many as asked for, or (0) all cores but one, for threads of torch
    wait for each other: one that has no core stops them all."""
    from robo_rl.files import cores

    return asked or max(1, cores() - 1)


class Actor:
    """A run's policy in this process: called with an observation it gives the rows float32[H, A] of a chunk,
    of which it means `execute` to run before the next; called with a `controllers.chunking.Prefix` too, rows
    that agree with it.

    many(list of obs): the rows of each; guided(obs, prefix), None where the policy is no flow;
    following(obs, rows, count): rows whose first `count`, up to `commit`, are the given ones.
    """

    def __init__(self, execute: int, commit: int, many, guided, following):
        self.execute, self.commit, self.many, self.guided, self.following = (
            execute,
            commit,
            many,
            guided,
            following,
        )
        self.trained = commit > 0
        self.said = False

    def choose(self, chunking: str) -> "Actor":
        """Itself, agreeing with a prefix as `--chunking` says. UserError: the policy is no flow, or was not
        taught to go on from given rows."""
        if chunking == "rtc" and self.guided is None:
            raise UserError(NO_FLOW)
        if chunking == "trained" and not self.commit:
            raise UserError(
                "--chunking trained needs a policy that was taught to go on from the rows that run while it "
                "thinks: train with --policy.commit N, or use --chunking rtc or blend"
            )
        self.trained = chunking == "trained"
        return self

    def __call__(self, obs, prefix=None):
        if prefix is None:
            return self.many([obs])[0]
        if not self.trained:
            if self.guided is None:
                raise UserError(NO_FLOW)
            return self.guided(obs, prefix)
        if prefix.delay > self.commit and not self.said:
            self.said = True
            print(
                f"warning: {prefix.delay} rows run while the policy thinks, and it was taught with at most "
                f"{self.commit} of them given (--policy.commit): chunks will not meet",
                file=sys.stderr,
            )
        return self.following(obs, prefix.rows, min(prefix.delay, self.commit))


def load_actor(
    run: str,
    checkpoint: str,
    seed: int,
    instruction: str = "",
    task: str = "",
    policy=None,
    threads: int = 1,
    told: bool = False,
    device: str = "cpu",
    most: int = 0,
    robot: bool = False,
    known: "tuple | None" = None,
):
    """(Actor, the run's config, ObsSpec) of a run: NumPy where that can run the policy on the CPU, else torch
    on `device`, with `threads` of the CPU.

    instruction: language instruction, for a policy that takes one; task: of a run over several this one,
    whose state and config they are then; policy: that of the checkpoint, where it is loaded already, on
    `device`; told: every observation says its instruction, as `task`; most: see `torch_actor`; robot: a run
    in a world model of a robot's own data acts in that robot's units, else in commands; known: what
    `run_interface` gave.
    UserError: the policy needs an instruction and the task has several; the run has no such task.
    """
    from robo_rl import checkpoint as checkpoints
    from robo_rl.policies.numpy_actor import NumpyActor

    where, folder, made, config, spec, columns = known or run_interface(run, checkpoint, task)
    if spec.language and not (instruction or told):
        instruction = default_instruction(config, where)
    if device == "cpu" and in_numpy(made, spec):
        act = numpy_actor(NumpyActor.load(folder), seed)
    else:
        import torch

        torch.set_num_threads(threads)
        policy = checkpoints.load_policy(folder, device)[0] if policy is None else policy
        act = torch_actor(policy, seed, instruction, spec, columns, most)
    if not robot:
        return act, config, spec
    spec, units = units_of_run(where, config.sim, spec)
    return in_units(act, units) if units else act, config, spec


def in_units(act: Actor, units: CommandUnits) -> Actor:
    """`act`, which gives commands, in the robot's units."""

    def guided(obs, prefix):
        return units.actions(act.guided(obs, replace(prefix, rows=units.commands(prefix.rows))))

    def following(obs, rows, count):
        return units.actions(act.following(obs, units.commands(rows), count))

    agrees = act.guided is not None
    return Actor(act.execute, act.commit, units.batches(act.many), guided if agrees else None, following)


def run_interface(run: str, checkpoint: str, task: str):
    """(run folder, checkpoint's folder, PolicyOptions as a dict, the run's config, ObsSpec, columns in the
    state of all tasks) of a run, or of one `task` of it; no weight is read. UserError: the run has no such
    task."""
    from robo_rl import checkpoint as checkpoints
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.folder import pick_checkpoint
    from robo_rl.policies import ObsSpec

    where, folder = pick_checkpoint(Path(run), checkpoint)
    meta = checkpoints.read_meta(folder)
    seen: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in meta["policy"]["spec"].items()
    }
    config, spec, columns = load_config(where), ObsSpec(**seen), None
    if task:
        config, spec, columns = one_task(config, spec, task)
    return where, folder, meta["policy"]["options"], config, spec, columns


def remote_actor(known: tuple):
    """(Actor that is not asked, the run's config, ObsSpec): what a robot knows of a policy that a server
    computes, with the server's instruction; no weight is read. known: of `run_interface`."""
    from robo_rl.options import PolicyOptions

    folder, _, made, config, spec, _ = known

    def refuse(*_):
        raise AssertionError("this policy is its server's")

    spec, _ = units_of_run(folder, config.sim, spec)
    guided = refuse if PolicyOptions(**made).is_flow else None
    return Actor(made["execute"], made["commit"], refuse, guided, refuse), config, spec


def actor_of(policy, seed: int) -> Actor:
    """The Actor that `load_actor` makes of a checkpoint of `policy`, whose every observation says its
    instruction."""
    from dataclasses import asdict

    from robo_rl.policies.numpy_actor import NumpyActor

    if in_numpy(asdict(policy.options), policy.spec):
        weights = {k: v.detach().cpu().numpy() for k, v in policy.state_dict().items()}
        return numpy_actor(NumpyActor(weights, asdict(policy.options), asdict(policy.spec)), seed)
    return torch_actor(policy, seed, "", policy.spec)


def in_numpy(options: dict, spec) -> bool:
    """Whether NumPy can run the policy of these PolicyOptions, as a dict, and ObsSpec."""
    one_pass = not options.get("advantage") or options["guidance"] == 1
    return (
        options["kind"] == "flow"
        and not spec.views
        and not spec.language
        and one_pass
        and not options.get("window")
    )


def guidance_gains(steps: int) -> list[float]:
    """Gain of guidance at each of the denoise steps."""
    from controllers.schedule import guidance_gain

    return [guidance_gain(1 - k / steps) for k in range(steps)]


def numpy_actor(net: "NumpyActor", seed: int) -> Actor:
    """The policy on NumPy."""
    import numpy as np

    rng, gains = np.random.default_rng(seed), guidance_gains(net.steps)

    def ask(obs, **agree):
        return net.act(obs["state"], rng=rng, rows=net.horizon, **agree)

    return Actor(
        net.execute,
        net.commit,
        lambda batch: [ask(obs) for obs in batch],
        lambda obs, prefix: ask(obs, prefix=(prefix.rows, prefix.weights, gains)),
        lambda obs, rows, count: ask(obs, committed=(rows, count)),
    )


def torch_actor(
    policy, seed: int, instruction: str, spec, columns: "list[int] | None" = None, most: int = 0
) -> Actor:
    """The policy on torch, where its weights are, warmed up. instruction: of observations that say none
    (`task`); spec: what it is given; columns: where that belongs in the state of all tasks; most:
    observations at once for which a model on a GPU is made quick (`policies.vla.quick`), 0: it is not."""
    import numpy as np
    import torch

    from robo_rl.policies import blank_obs, obs_tensors
    from robo_rl.policies.guided import committed_chunk, guided_chunk, plain_chunks
    from robo_rl.rollout import to_policy

    generator, gains = torch.Generator().manual_seed(seed), guidance_gains(policy.options.denoise_steps)

    def tensors(*observations):
        batch = {k: np.stack([obs[k] for obs in observations]) for k in observations[0]}
        batch.setdefault("task", np.array([instruction] * len(observations)))
        if columns is not None:
            state = np.zeros((len(observations), policy.spec.state), np.float32)
            state[:, columns] = batch["state"]
            batch["state"] = state
        return to_policy(obs_tensors(batch, policy.spec), policy)

    def many(batch):
        return by_size(lambda alike: list(chunks(tensors(*alike), generator).cpu().numpy()), batch)

    def guided(obs, prefix):
        args = prefix.rows, prefix.weights, gains
        return guided_chunk(policy, tensors(obs), generator, *args).cpu().numpy()

    def following(obs, rows, count):
        return committed_chunk(policy, tensors(obs), generator, rows, count).cpu().numpy()

    blank = blank_obs(spec)
    chunks = quick_chunks(policy, tensors(blank), most) or partial(plain_chunks, policy)
    for _ in range(2):  # the first calls take ten times as long as all others
        many([blank])
    generator.manual_seed(seed)
    options = policy.options
    return Actor(options.execute, options.commit, many, guided if options.is_flow else None, following)


def quick_chunks(policy, blank, most: int) -> "Callable | None":
    """(obs, generator) -> whole chunks [B,H,A] of a model on a GPU, for up to `most` observations at once by
    one launch; what is prepared is said on stderr. None: the policy acts plainly."""
    from robo_rl.devices import device_of

    if not most or device_of(policy).type == "cpu":
        return None
    from robo_rl.policies.vla.quick import chunks_of

    return chunks_of(policy, blank, most, lambda line: print(line, file=sys.stderr, flush=True))


def one_task(config: "TrainConfig", spec, task: str):
    """(config, ObsSpec and columns in the state of all tasks) of one `task` of a run. UserError: the run has
    no such task."""
    names = config.task.split(",") if config.sim == "mujoco" else [config.task]
    choose("task of this run", task, names)
    config = replace(config, task=task)
    if len(names) == 1:
        return config, spec, None
    from robo_rl.experiment.arm import observed_names
    from sims.mujoco.several import union_of

    layouts = [observed_names(name, spec.views) for name in names]
    union, mine = union_of(layouts), layouts[names.index(task)]
    return config, replace(spec, state=len(mine)), [union.index(name) for name in mine]


def default_instruction(config, folder: Path | None = None) -> str:
    """The instruction of a run's task, or the only one of the data set that the run in `folder` learnt from.
    UserError: the task has none or several."""
    from robo_rl.experiment.data_facts import NAME, read_facts
    from robo_rl.experiment.envs import task_count

    if folder is not None and (config.sim == "none" or (folder / NAME).is_file()):
        tasks = [t for t in read_facts(folder, config.demos).tasks if t]
        if len(tasks) == 1:
            return tasks[0]
        raise UserError(
            "the run's policy takes an instruction: give it with --instruction"
            + (f", for example {tasks[0]!r}" if tasks else "")
        )
    from sims.mujoco.own import find_task

    if task_count(config) > 1:
        raise UserError(
            f"the run has several tasks: choose one with --task, of {config.task}, or give an --instruction"
        )
    known = find_task(config.task or "pick_cube").instructions if config.sim == "mujoco" else ()
    if len(known) != 1:
        raise UserError(
            "the run's policy takes an instruction: give it with --instruction"
            + (f", for example {known[0]!r}" if known else "")
        )
    return known[0]


def make_sessions(
    options: ServeOptions, log: Callable[[str], None]
) -> "tuple[ExploringActor, SessionRecorder, TrainConfig, ObsSpec]":
    """(who decides, who records, the run's config, ObsSpec). UserError: a policy whose chunks no other run
    could learn from."""
    import numpy as np
    import torch

    from robo_rl import checkpoint
    from robo_rl.algos.foreign import actor_of, check_policy
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.envs import make_env, twin
    from robo_rl.experiment.folder import NewestCheckpoint, pick_checkpoint
    from robo_rl.experiment.share import part_of, space_of
    from robo_rl.policies import blank_obs, obs_tensors
    from robo_rl.runtime.sessions import ExploringActor, SessionRecorder
    from robo_rl.runtime.share import ShareFolder

    where, at = pick_checkpoint(Path(options.run), options.checkpoint)
    config = load_config(where)
    torch.set_num_threads(serving_threads(options.threads))
    loaded, meta = checkpoint.load_policy(at, options.device)
    policy = check_policy(loaded)
    spec, env = policy.spec, make_env(replace(config, sim=twin(config.sim)), 1)
    instruction = options.instruction or (default_instruction(config) if spec.language else "")
    seen = {
        k: v[None]
        for k, v in obs_tensors(blank_obs(spec, 1) | {"task": np.array([instruction])}, spec).items()
    }
    space = space_of(env.spec, policy, config.task, getattr(config.rl, "group", 8), seen)
    longest = -(-env.spec.max_steps // policy.options.execute)
    env.close()

    def kind(of) -> tuple:
        return of.spec, of.options.horizon, of.options.execute, actor_of(check_policy(of))

    def fits(newer) -> bool:
        return kind(newer) == kind(policy)

    newest = NewestCheckpoint(
        where, options.checkpoint, at, options.follow, device=options.device, fits=fits, say=log
    )
    act = ExploringActor(policy, options.seed, meta["step"], instruction, newest)
    folder = ShareFolder(options.share, part_of(where, "serve-"), options.share_keep)
    return act, SessionRecorder(folder, space, actor_of(policy), longest, log), config, spec


def open_listener(host: str, port: int) -> socket.socket:
    """A TCP socket that listens. UserError: the address is taken or not of this machine."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({e.strerror}); choose another --host or --port"
        ) from None
    listener.listen(128)
    return listener


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """Where a policy is served. address: HOST:PORT; loopback: only this machine reaches it; config: the
    run's."""

    address: str
    loopback: bool
    token_file: Path
    config: "TrainConfig"


def serve_policy(
    options: ServeOptions,
    on_ready: Callable[[ServedPolicy], None],
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Answer requests for ever; on_ready is called once clients can connect, log(line) when a client
    leaves."""
    from robo_rl.experiment.folder import half_taught, pick_checkpoint

    # reports a wrong name before torch is loaded
    source, folder = pick_checkpoint(Path(options.run), options.checkpoint)
    log(f"loading the policy of {options.run}")
    if said := half_taught(source, folder):
        log(said)
    from controllers.remote import read_token
    from controllers.serving import PolicyServer

    known = run_interface(options.run, options.checkpoint, options.task)
    check_instruction(source, *known[3:5], options.instruction, log)
    sessions = None
    if options.share:
        many, sessions, config, spec = make_sessions(options, log)
        act: Callable = many
    else:
        act, config, spec = load_actor(
            options.run,
            options.checkpoint,
            options.seed,
            options.instruction,
            options.task,
            threads=serving_threads(options.threads),
            device=options.device,
            most=options.batch,
            robot=True,
            known=known,
        )
        many = act.many
    told = options.instruction or (default_instruction(config, source) if spec.language else "")
    token_file = Path(options.token) if options.token else source / TOKEN_FILE
    token = read_token(token_file, make=True)
    with open_listener(options.host, options.port) as listener:
        ip, port = listener.getsockname()[:2]
        on_ready(
            ServedPolicy(
                f"{f'[{options.host}]' if ':' in options.host else options.host}:{port}",
                ipaddress.ip_address(ip).is_loopback,
                token_file,
                config,
            )
        )
        server = PolicyServer(
            listener,
            act,
            spec,
            token,
            options.clients,
            options.idle,
            log,
            many=many,
            most=options.batch,
            sessions=sessions,
            instruction=told,
        )
        try:
            while True:
                server.turn()
        finally:
            server.close()
            if sessions is not None:
                sessions.close()
