"""The arm's hardware as controller_manager's services show it: one system, its interfaces, and whether it is
active.

An inactive arm is not armed; it goes inactive only while nothing commands it. Names and layouts are those of
Jazzy's ros2_control.
"""

from collections.abc import Callable

from controllers.governor import ACTIVE, ARMED
from controllers.node import ArmNode
from robo_rl.errors import UserError, choose

# of lifecycle_msgs/msg/State
STATES = {"unknown": 0, "unconfigured": 1, "inactive": 2, "active": 3, "finalized": 4}
REACHABLE = ("inactive", "active")
PLUGIN = "robo_rl/SimArm"


class Hardware:
    """Serves controller_manager/list_hardware_components, list_hardware_interfaces and
    set_hardware_component_state.

    claimed(): command interfaces that the active controller holds."""

    def __init__(self, node: ArmNode, name: str, claimed: Callable[[], list[str]]):
        self.node, self.name, self.claimed = node, name, claimed
        services = {
            "list_hardware_components": self.components,
            "list_hardware_interfaces": self.interfaces,
            "set_hardware_component_state": self.set_state,
        }
        for verb, handler in services.items():
            kind = "".join(word.title() for word in verb.split("_"))
            node.transport.service(
                f"controller_manager/{verb}", f"controller_manager_msgs/srv/{kind}", handler
            )

    @property
    def state(self) -> str:
        return "active" if self.node.hardware_active else "inactive"

    def interfaces(self, _: dict) -> dict:
        """Every interface by name; command interfaces are to be had while the arm is active, states
        always."""
        joints, held = self.node.arm.robot.joints, self.claimed()

        def row(name: str, available: bool, is_claimed: bool) -> dict:
            return {"name": name, "data_type": "double", "is_available": available, "is_claimed": is_claimed}

        return {
            "command_interfaces": [
                row(f"{j}/effort", self.node.hardware_active, f"{j}/effort" in held) for j in joints
            ],
            "state_interfaces": [
                row(f"{j}/{kind}", True, False) for j in joints for kind in ("position", "velocity", "effort")
            ],
        }

    def components(self, request: dict) -> dict:
        return {
            "component": [
                {
                    "name": self.name,
                    "type": "system",
                    "rw_rate": round(1 / self.node.arm.dt),
                    "class_type": PLUGIN,
                    "plugin_name": PLUGIN,
                    "state": state(self.state),
                    **self.interfaces(request),
                }
            ]
        }

    def set_state(self, request: dict) -> dict:
        wanted, node = request["target_state"], self.node
        try:
            node.check_change()
            choose("hardware component", request["name"], (self.name,))
            label = wanted["label"] or next((n for n, id in STATES.items() if id == wanted["id"]), "")
            choose("state of this hardware", label, REACHABLE)
            if label == "inactive" and node.governor is not None and node.governor.state in (ARMED, ACTIVE):
                raise UserError(f"the arm is {node.governor.state}: disarm it first")
        except UserError as e:
            node.refuse("set_hardware_component_state", str(e))
            return {"ok": False, "state": state(self.state)}
        node.hardware_active = label == "active"
        return {"ok": True, "state": state(self.state)}


def state(label: str) -> dict:
    """A lifecycle_msgs/msg/State."""
    return {"id": STATES[label], "label": label}
