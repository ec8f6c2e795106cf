"""Open the console on a run: its env, its policy, its corrections, and the device beside it."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from robo_rl.errors import MissingDependency, UserError
from robo_rl.human.console.options import ConsoleOptions


def open_session(options: ConsoleOptions):
    """(ConsoleSession of a run, its run folder). UserError: no run, no checkpoint, or the device cannot be
    opened."""
    import torch

    from robo_rl.checkpoint import load_policy
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.envs import make_env
    from robo_rl.experiment.folder import pick_checkpoint
    from robo_rl.human.console.recorder import CorrectionRecorder
    from robo_rl.human.console.session import TIME_LIMITS, ConsoleSession
    from robo_rl.human.devices import open_device

    torch.set_num_threads(1)
    source, checkpoint = pick_checkpoint(Path(options.run), options.checkpoint)
    config = replace(load_config(source), threads=options.threads)
    policy, _ = load_policy(checkpoint)
    probe = make_env(config, 1)
    limit = probe.spec.max_steps
    probe.close()
    env = make_env(replace(config, max_steps=TIME_LIMITS * limit), options.robots, render=config.obs != "rgb")
    recorder = CorrectionRecorder(
        source / "corrections", source / "console.journal", env.spec, options.robots, marks=source / "marks"
    )
    device = (
        open_device(options.device, lambda namespace: open_leader_arm(namespace, env.spec))
        if options.device
        else None
    )
    if options.policy:
        from robo_rl.experiment.foreign import console_policy

        policy = console_policy(options, policy.spec, options.execute or policy.options.execute)
    return ConsoleSession(env, policy, recorder, options, limit, device), source


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def need_websockets() -> None:
    """MissingDependency: the console cannot serve its page."""
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise MissingDependency("the console needs websockets: pip install 'robo_rl[console]'") from None


def check_port(host: str, port: int, option: str) -> None:
    """UserError where nothing can listen on this port now; option: what names it."""
    from robo_rl.human.console.server import cannot_listen

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise cannot_listen(host, port, option, e) from None


def open_page(session, options: ConsoleOptions, say: Callable[[str], None], port_option: str = "--port"):
    """The console's page on these robots, served from a thread of its own; its addresses go to `say`."""
    from robo_rl.human.console.server import ConsoleServer

    server = ConsoleServer(session, options.host, options.port, options.operators, options.url, port_option)
    server.start()
    if options.host not in LOOPBACK:
        say(
            f"robo_rl: listening on {options.host}: everybody who can reach this machine and has an address "
            "can move the robots, and nothing is encrypted (docs/howto/console.md: ssh -L, or a proxy with "
            "TLS)"
        )
    tell_addresses(server, say)
    return server


def tell_addresses(server, say: Callable[[str], None]) -> None:
    """An address per operator."""
    for name, address in server.addresses().items():
        say(f"{name}: {address}")


def renew_by_signal(server, say: Callable[[str], None]) -> None:
    """SIGUSR2 prints new addresses where no loop of the console's own asks for them; SIGUSR1 tells a worker's
    stack. Off the main thread nothing can be asked."""
    if threading.current_thread() is not threading.main_thread():
        server.renewal = "end the run, and --resume prints a new address"
        return

    def renew() -> None:
        server.renew()
        tell_addresses(server, say)

    def asked(*_) -> None:  # perhaps in the middle of a line, which this thread cannot print into
        threading.Thread(target=renew, daemon=True).start()

    server.renewal = f"kill -USR2 {os.getpid()} prints new addresses"
    signal.signal(signal.SIGUSR2, asked)
    say(f"Each address works once. New ones, old sessions end: kill -USR2 {os.getpid()}")


def serve_session(
    session, options: ConsoleOptions, goes_on: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Step a `ConsoleSession` and serve its page until it is done, its time is over or the user asks for the
    end."""
    from robo_rl.human.console.terminal import TerminalRequests

    need_websockets()
    with TerminalRequests() as requests:
        server = open_page(session, options, say)
        server.renewal = f"press Enter in its terminal, or kill -USR1 {os.getpid()}, for new addresses"

        def tell() -> None:
            say(
                "Each address works once. New ones, old sessions end: press Enter here, or "
                f"kill -USR1 {os.getpid()}"
            )

        def renew() -> None:
            server.renew()
            tell_addresses(server, say)
            tell()

        tell()
        session.run(requests, options.seconds, renew, goes_on)
        server.stop()


def open_leader_arm(namespace: str, spec):
    """A leader arm whose topics begin with `namespace` ("": with none), for robots of this ControlSpec."""
    from robo_rl.experiment.wire import connect
    from robo_rl.human.leader_arm import check_tool_state

    check_tool_state(spec.state_names)
    steps = [
        next((a.high for a in spec.axes if a.kind == "delta" and a.unit == unit), 0.0)
        for unit in ("m", "rad")
    ]
    if not all(steps):
        raise UserError("a leader arm moves the hand: it needs a run of --control ee_delta")
    return leader_on(connect("robo_rl_console", namespace=namespace), (steps[0], steps[1]))


def leader_on(wire, full: tuple[float, float]):
    """The leader arm whose topics are on this wire. full: metres and radians that a full command moves a
    tool."""
    from robo_rl.human.leader_arm import LeaderArm

    return LeaderArm(PoseReader(wire), full)


class PoseReader:
    """() -> (position [3] [m], quaternion wxyz [4], gripper -1 .. 1) that an arm published last; None: it is
    silent."""

    def __init__(self, wire):
        from controllers.arm_topics import GRIPPER_STATE
        from controllers.transport import JointState, PoseStamped

        self.wire = wire
        self.pose = wire.subscription("current_pose", PoseStamped)
        self.gripper = wire.subscription(GRIPPER_STATE, JointState)

    def __call__(self):
        from robo_rl.human.leader_arm import SILENCE

        got, grip = self.pose.latest(), self.gripper.latest()
        if got is None or self.wire.now() - got.at > SILENCE:
            return None
        opening = grip.message.position[0] if grip is not None and grip.message.position else 1.0
        return got.message.pos, got.message.quat, 1.0 if opening > 0.5 else -1.0
