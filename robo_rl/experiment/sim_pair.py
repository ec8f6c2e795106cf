"""Two simulated arms as nodes of one process: one scene, one loop, a governor for each and one above both."""

from collections import Counter
from collections.abc import Callable

import mujoco
import numpy as np

from controllers.arm import DT, SimArm
from controllers.capsules import LinkCapsules, prepare
from controllers.estop import OTHER_ARM
from controllers.model import ArmModel
from controllers.node import ArmNode
from controllers.pair import ArmPair, load_pair
from controllers.pair_governor import PairGovernor, Separation
from controllers.pair_scene import pair_scene
from controllers.transport import Bus, LoopbackTransport, Transport
from robo_rl.errors import UserError, choose
from robo_rl.experiment.arm import CONTROLLERS, WIRE_NAMES, make_controllers
from robo_rl.experiment.sim_arm import SimArmOptions, disturbance_of, make_node, status_line
from robo_rl.experiment.wire import NamespacedTransport, connect

LOOK = 5  # ticks between two looks at how far the arms are apart


def separation_of(pair: ArmPair, models: dict[str, ArmModel], period: float) -> Separation | None:
    """How near the arms of a pair are, by these models; None where its file says why there is no clearance.
    period [s]: between looks."""
    if pair.clearance is None:
        return None
    prepare()
    capsules = [
        LinkCapsules(
            models[name],
            robot.model or models[name].spec,
            pair.radius,
            pair.bases[name].pos,
            pair.bases[name].quat,
        )
        for name, robot in pair.arms.items()
    ]
    return Separation(capsules, pair.clearance, period)


class SimPair:
    """Both arms; `tick` is one control period. nodes: by the arms' names; governor: above theirs; t [s],
    ticks: of the scene.

    The transport is DDS or in-process, as `make_sim_arm`'s; topics begin with the arms' names."""

    def __init__(self, pair: ArmPair, options: SimArmOptions):
        pair.need_limits()
        if options.cameras or options.payload:
            raise UserError(
                f"two arms have no {'--cameras' if options.cameras else '--payload'}: the scene is that of "
                "their models"
            )
        self.pair, self.dt, self.ticks, self.count = pair, DT, 0, 0
        self.bus = Bus(lambda: self.ticks * self.dt)  # where they are on no network
        self.transport: Transport = (
            LoopbackTransport(self.bus, "sim_arm")
            if options.lockstep and options.domain < 0
            else connect(
                "sim_arm", options.domain, options.interface, options.namespace, security=options.security
            )
        )
        shares = pair_scene(pair, DT, disturbance_of(options))
        self.mj, self.data = next((s.mj, s.data) for s in shares.values())
        controller = choose("--controller", options.controller or "joint", CONTROLLERS)
        self.nodes: dict[str, ArmNode] = {}
        for name, robot in pair.arms.items():
            controllers = make_controllers(robot, options.speed)
            active = controllers[WIRE_NAMES[controller]]
            arm = SimArm(
                active.robot,
                active.options,
                servo=active.servo,
                disturbance=disturbance_of(options),
                share=shares[name],
            )
            self.nodes[name] = make_node(
                options,
                arm,
                NamespacedTransport(self.transport, name),
                controllers,
                WIRE_NAMES[controller],
                lambda _, robot=robot: (np.array(robot.home), {}),
            )
        governors = {name: node.governor for name, node in self.nodes.items() if node.governor is not None}
        separation = separation_of(
            pair, {name: node.arm.model for name, node in self.nodes.items()}, LOOK * DT
        )
        self.governor = PairGovernor(governors, separation, LOOK)
        self.stopped = dict.fromkeys(self.nodes, False)

    @property
    def t(self) -> float:
        return self.ticks * self.dt

    @property
    def refused(self) -> Counter[str]:
        """Refused messages of both arms, with the arm's name."""
        return Counter(
            {f"{name}/{line}": n for name, node in self.nodes.items() for line, n in node.refused.items()}
        )

    @property
    def on_refusal(self) -> Callable[[str], None]:
        """Is told a line at the first refusal of each kind."""
        return next(iter(self.nodes.values())).on_refusal

    @on_refusal.setter
    def on_refusal(self, tell: Callable[[str], None]) -> None:
        for name, node in self.nodes.items():
            node.on_refusal = lambda line, name=name: tell(f"{name}/{line}")  # as topics are named

    @property
    def on_change(self) -> Callable[[str], None]:
        """Is told a line at each change of a governor's state or of a lease."""
        return next(iter(self.nodes.values())).on_change

    @on_change.setter
    def on_change(self, tell: Callable[[str], None]) -> None:
        for name, node in self.nodes.items():
            node.on_change = lambda line, name=name: tell(f"{name} {line}")

    def tick(self) -> None:
        """The governor above both, then each arm's tick, then the physics."""
        self.governor.couple(self.transport.now())
        for name, node in self.nodes.items():
            stopped = OTHER_ARM in self.governor.governors[name].stopped_by
            if stopped and not self.stopped[name]:
                node.lease.revoke()  # as its own e-stop does
            self.stopped[name] = stopped
            node.tick()
        mujoco.mj_step(self.mj, self.data)
        self.ticks += 1
        self.count += 1

    def push(self, wrench, seconds: float) -> None:
        """Push both arms' tools."""
        for node in self.nodes.values():
            node.arm.push(wrench, seconds)

    def apart(self) -> str:
        s = self.governor.separation
        return (
            "no clearance"
            if s is None
            else f"{1000 * s.distance:.0f} mm apart"
            if s.distance < np.inf
            else "not armed"
        )


def make_sim_pair(options: SimArmOptions) -> tuple[SimPair, SimPair]:
    """The simulated arms of a pair's file, for `run_sim_arm` as its arm and its node."""
    made = SimPair(load_pair(options.robot), options)
    return made, made


def pair_status_line(pair: SimPair, timing: str = "") -> str:
    """`status_line` of each arm, and how far they are apart."""
    return (
        "; ".join(f"{name} {status_line(n.arm, n)}" for name, n in pair.nodes.items())
        + f" · {pair.apart()}{timing}"
    )
