"""Run a policy on two arms: over a transport in real time, or on a simulated pair in lockstep in this
process; record what it did."""

import functools
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from controllers.model import arm_model
from controllers.pair import ArmPair, load_pair
from controllers.pair_bridge import PairBridge, PairInterface
from robo_rl.child import end
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.deploy import (
    DeployResult,
    check_gains,
    check_speed,
    limits_of,
    real_time_loop,
    wait_for_topics,
)
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.deploy_policy import choose_actor, instruction_of, open_policy, report_motion
from robo_rl.experiment.safety_client import SafetyClient
from robo_rl.signals import asked_to_stop

SETTLE = 0.1  # s of simulated time for the first messages
ENDS = ".pos"  # of LeRobot's names


def pair_interface(config: TrainConfig, spec, pair: ArmPair) -> PairInterface:
    """What a run's policy for two arms sees and commands (its config, its ObsSpec). UserError: it is not for
    these."""
    if not spec.units:
        raise UserError(
            "two arms take a policy that learnt joint angles from a data set in its own units (--sim none "
            f"--algo bc); the run was trained in {config.sim}"
        )
    if spec.state != spec.action:
        raise UserError(
            "two arms take a policy whose state is what it commands, joints and grippers; the run's state "
            f"has {spec.state} numbers, its action {spec.action}"
        )
    period = 1 / pair.rate
    # what the checkpoint does not say, its data set does
    if (Path(config.demos) / "meta" / "info.json").is_file():
        from robo_rl.data.labels import need_units
        from robo_rl.data.meta import load_meta

        meta = load_meta(Path(config.demos))
        state = tuple(n.removesuffix(ENDS) for n in meta.features.state)
        if state != tuple(n.removesuffix(ENDS) for n in meta.features.action):
            raise UserError(
                f"the state of data set {config.demos} ({', '.join(state[:4])}, …) has other names than its "
                "action"
            )
        if other := set(need_units(meta).kind) - {"absolute"}:
            raise UserError(
                f"two arms take absolute joint angles, the actions of data set {config.demos} are "
                f"{', '.join(sorted(other))}"
            )
        if abs(meta.features.fps - pair.rate) > 0.01 * pair.rate:
            raise UserError(
                f"the run's data have {meta.features.fps:g} actions a second, the file of pair {pair.name} "
                f"says a `rate` of {pair.rate:g}"
            )
    return PairInterface(
        pair=pair,
        names=spec.action_names,
        units=spec.units,
        period=period,
        views=spec.views,
        image_size=spec.image_size,
    )


class PairRecorder:
    """One deployment as an episode of a LeRobot data set in the policy's own units, and as a bag; "" for
    none."""

    def __init__(
        self,
        task: PairInterface,
        record: str,
        bag: str,
        instruction: str,
        log: Callable[[str], None],
        warn: Callable[[str], None] = print,
    ):
        self.task, self.record, self.instruction, self.log = task, record, instruction, log
        self.recording, self.bag = None, None
        if record:
            from robo_rl.data.episode import Features
            from robo_rl.experiment.arm_recording import ArmRecording

            size = task.image_size
            self.recording = ArmRecording(
                record,
                Features(
                    fps=round(1 / task.period, 6),
                    state=task.names,
                    action=task.names,
                    views=tuple((v, size, size) for v in sorted(task.views)),
                    robot=task.pair.name,
                ),
                units=",".join(task.units),
                log=log,
                tell=lambda line: warn(f"{line}; the motion goes on"),
            )
        if bag:
            from controllers.bag import BagWriter

            self.bag = BagWriter(bag)

    def wrap_transport(self, wire):
        """The transport, with its messages written to the bag where one was asked for."""
        from controllers.bag import recorded

        return recorded(wire, self.bag)

    def watch(self, bridge: PairBridge) -> None:
        """Record this bridge from now on."""
        if self.recording is not None:
            self.recording.task = self.instruction
            bridge.on_action = self.recording.append

    def after_tick(self, now: float) -> bool:
        """Nobody says when a task of two arms is done."""
        return False

    def close(self) -> None:
        """Write the files."""
        if self.recording is not None and (frames := self.recording.finish()):
            self.log(f"recorded {frames} frames in {self.record}")
        if self.bag is not None:
            self.bag.close()
            if self.bag.counts:
                self.log(self.bag.text())


class PairLease:
    """The leases on both arms as one, as `deploy` renews it."""

    def __init__(self, leases: dict):
        self.leases = leases

    def renew(self, now: float) -> None:
        for lease in self.leases.values():
            lease.renew(now)

    def ours(self) -> bool:
        return all(lease.ours() for lease in self.leases.values())

    def refusals(self) -> list[str]:
        return [f"{name}/{line}" for name, lease in self.leases.items() for line in lease.refusals()]


def deploy_pair(
    options: DeployOptions,
    log: Callable[[str], None],
    warn: Callable[[str], None],
    tell: Callable[[str], None] = print,
) -> DeployResult:
    """`deploy` for the file of two arms. UserError: the policy does not fit them, or one of them or the
    policy was lost."""
    single = {
        "--video": options.video,
        "--start": options.start >= 0,
        "--model": options.model,
        "--go-on": options.go_on,
    }
    for name, given in single.items():
        if given:
            raise UserError(
                f"{name} is for one arm: two have no film, no numbered starts, no success, and models of "
                "their own files"
            )
    pair = load_pair(options.robot)
    for robot in pair.arms.values():
        check_speed(options.speed, robot)
    tell(f"loading the policy of {options.run}")
    act, config, spec = choose_actor(options, warn)
    task = pair_interface(config, spec, pair)
    recorder = PairRecorder(task, options.record, options.bag, options.instruction, log, warn)
    with closing(recorder):
        client, server = open_policy(options, act, task.period)
        try:
            recorder.instruction = instruction_of(options, spec, client)
            run = in_process if options.transport == "inprocess" else functools.partial(on_wire, tell=tell)
            bridge, seconds = run(options, task, act, client, recorder, log, warn)
            report_motion(bridge, client, log, warn)
            if bridge.lost:
                raise UserError(f"{bridge.lost}; both arms were braked and hold")
            return DeployResult(seconds, None, bridge.governor.state, bridge.governor.reason)
        finally:
            client.close()
            if server:
                end(server)


def make_bridge(options: DeployOptions, task: PairInterface, wire, simulated: bool = False) -> PairBridge:
    """The bridge of both arms on a transport. simulated: they follow joint targets, whatever their files
    say."""
    from robo_rl.experiment.sim_pair import separation_of
    from robo_rl.experiment.wire import NamespacedTransport

    arms = task.pair.arms
    models = {name: arm_model(robot) for name, robot in arms.items()}
    commands = {
        name: options.command or ("joint" if simulated else robot.cell.command or "joint")
        for name, robot in arms.items()
    }
    separation = separation_of(task.pair, models, task.period) if task.pair.bases else None
    bridge = PairBridge(
        task,
        wire,
        {name: NamespacedTransport(wire, name) for name in arms},
        models,
        {name: limits_of(robot, options.speed) for name, robot in arms.items()},
        commands,
        separation,
        dry_run=options.dry_run,
    )
    bridge.chunking = options.chunking
    return bridge


def in_process(options: DeployOptions, task: PairInterface, act, client, recorder: PairRecorder, log, warn):
    """(bridge, simulated seconds) of simulated arms in this process, in lockstep on simulated time."""
    from controllers.lease import LONGEST, SAFETY_COMMAND
    from controllers.transport import LoopbackTransport, Text
    from robo_rl.experiment.sim_arm import SimArmOptions
    from robo_rl.experiment.sim_pair import SimPair

    if task.views:
        raise UserError(
            f"the simulated pair has no cameras, and the policy sees {', '.join(task.views)}: run it on arms "
            "that have them"
        )
    sim = SimPair(
        task.pair,
        SimArmOptions(robot=options.robot, speed=options.speed, lockstep=True, seconds=options.seconds + 1),
    )
    wire = recorder.wrap_transport(LoopbackTransport(sim.bus, "bridge"))
    bridge = make_bridge(options, task, wire, simulated=True)
    bridge.every = act.execute
    orders = [wire.publisher(f"{name}/{SAFETY_COMMAND}", Text, "command") for name in task.pair.arms]

    def run(seconds: float) -> None:
        for _ in range(round(seconds / sim.dt)):
            sim.tick()

    run(SETTLE)
    for order in orders if not options.dry_run else []:
        order.publish(Text(f"claim bridge {LONGEST:g}"))
        order.publish(Text("arm bridge"))
    run(task.period)
    began = sim.t
    bridge.begin(began, leased=True)
    recorder.watch(bridge)
    while (
        sim.t - began < options.seconds - 1e-9
        and not bridge.lost
        and bridge.governor.state in ("ARMED", "ACTIVE")
    ):
        bridge.tick(client, sim.t)
        run(task.period)
    return bridge, sim.t - began


def on_wire(
    options: DeployOptions, task: PairInterface, act, client, recorder: PairRecorder, log, warn, tell=print
):
    """(bridge, seconds) of two arms over DDS, in real time."""
    from controllers.lease import LeaseClient
    from robo_rl.experiment.wire import NamespacedTransport, connect, place_of

    opened = connect(
        "robo_rl_bridge", options.domain, options.interface, options.namespace, security=options.security
    )
    with closing(recorder.wrap_transport(opened)) as wire, asked_to_stop() as stop:
        bridge = make_bridge(options, task, wire)
        bridge.every = act.execute
        if not options.dry_run:
            task.pair.need_limits()
        recorder.watch(bridge)
        name = options.name or f"deploy-{socket.gethostname()}-{os.getpid()}"
        wires = {arm: NamespacedTransport(wire, arm) for arm in task.pair.arms}
        clients = {
            arm: SafetyClient(w, bridge.safety[arm], LeaseClient(w, name, options.lease), stop)
            for arm, w in wires.items()
        }
        first = next(iter(clients.values()))
        wait_for_topics(bridge, first, place_of(options), tell)
        governed = {arm: c for arm, c in clients.items() if c.is_governed()}
        for arm, robot in task.pair.arms.items():
            check_gains(wires[arm], robot, options.dry_run, lambda line, arm=arm: warn(f"{arm} arm: {line}"))
            if arm not in governed:
                warn(
                    f"the {arm} arm has no governor of its own: kill -9 of the bridge leaves it at the last "
                    "target"
                )
        held = governed if not options.dry_run else {}
        try:
            for c in held.values():
                c.claim(tell)
            for c in held.values():
                c.arm(options.reset, -1)
            bridge.begin(wire.now(), leased=bool(held) and len(governed) == len(clients))
            log(
                f"{options.run} on the pair {task.pair.name} at {1 / task.period:.0f} Hz, "
                f"{'dry run: nothing is commanded' if options.dry_run else 'commanding'}"
            )
            leases = PairLease({arm: c.lease for arm, c in governed.items()}) if governed else None
            seconds, timing = real_time_loop(
                options, task.period, bridge, wire, client, recorder, stop, leases, warn
            )
        finally:
            for c in held.values():
                c.give_up()
        for complaint in wire.complaints():
            warn(complaint)
        warn(timing)
        return bridge, seconds
