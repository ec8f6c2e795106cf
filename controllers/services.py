"""ROS 2 service types as plain data, without ROS: what a request and a reply hold, and nothing else.

A value is a dict of Python values, a nested message a dict, a sequence a list. `filled` checks names and puts
ROS's zeros where nothing is said, so that every handler and every caller sees whole messages. The fields are
those of ROS 2 Jazzy's interface packages; SwitchController's reply has no `message` in Humble, and a type
whose hash differs at the other end is refused by the transport that sees it.
"""

from collections.abc import Callable
from typing import Any

from controllers import action_types
from robo_rl.errors import UserError, choose

MESSAGES = action_types.MESSAGES | {
    "builtin_interfaces/msg/Duration": "int32 sec\nuint32 nanosec",
    "rcl_interfaces/msg/ParameterValue": (
        "uint8 type\nbool bool_value\nint64 integer_value\nfloat64 double_value\nstring string_value\n"
        "byte[] byte_array_value\nbool[] bool_array_value\nint64[] integer_array_value\n"
        "float64[] double_array_value\nstring[] string_array_value"
    ),
    "rcl_interfaces/msg/Parameter": "string name\nrcl_interfaces/ParameterValue value",
    "rcl_interfaces/msg/SetParametersResult": "bool successful\nstring reason",
    "rcl_interfaces/msg/ListParametersResult": "string[] names\nstring[] prefixes",
    "rcl_interfaces/msg/FloatingPointRange": "float64 from_value\nfloat64 to_value\nfloat64 step",
    "rcl_interfaces/msg/IntegerRange": "int64 from_value\nint64 to_value\nuint64 step",
    "rcl_interfaces/msg/ParameterDescriptor": (
        "string name\nuint8 type\nstring description\nstring additional_constraints\nbool read_only\n"
        "bool dynamic_typing\nrcl_interfaces/FloatingPointRange[<=1] floating_point_range\n"
        "rcl_interfaces/IntegerRange[<=1] integer_range"
    ),
    "controller_manager_msgs/msg/ChainConnection": "string name\nstring[] reference_interfaces",
    "controller_manager_msgs/msg/ControllerState": (
        "string name\nstring state\nstring type\nbool is_async\nuint16 update_rate\nstring[] "
        "claimed_interfaces\nstring[] required_command_interfaces\nstring[] required_state_interfaces\nbool "
        "is_chainable\nbool is_chained\nstring[] exported_state_interfaces\nstring[] "
        "reference_interfaces\ncontroller_manager_msgs/ChainConnection[] chain_connections"
    ),
    "lifecycle_msgs/msg/State": "uint8 id\nstring label",
    "controller_manager_msgs/msg/HardwareInterface": "string name\nstring data_type\nbool is_available\nbool "
    "is_claimed",
    "controller_manager_msgs/msg/HardwareComponentState": (
        "string name\nstring type\nbool is_async\nuint16 rw_rate\nstring class_type\nstring "
        "plugin_name\nlifecycle_msgs/State state\ncontroller_manager_msgs/HardwareInterface[] "
        "command_interfaces\ncontroller_manager_msgs/HardwareInterface[] state_interfaces"
    ),
}
HUMBLE = {  # where its messages are others
    "controller_manager_msgs/msg/ControllerState": (
        "string name\nstring state\nstring type\nstring[] claimed_interfaces\n"
        "string[] required_command_interfaces\nstring[] required_state_interfaces\nbool is_chainable\n"
        "bool is_chained\nstring[] reference_interfaces\n"
        "controller_manager_msgs/ChainConnection[] chain_connections"
    )
}
SERVICES = action_types.SERVICES | {  # type -> request, reply
    "std_srvs/srv/SetBool": ("bool data", "bool success\nstring message"),
    "std_srvs/srv/Trigger": ("", "bool success\nstring message"),
    "rcl_interfaces/srv/GetParameters": ("string[] names", "rcl_interfaces/ParameterValue[] values"),
    "rcl_interfaces/srv/GetParameterTypes": ("string[] names", "uint8[] types"),
    "rcl_interfaces/srv/SetParameters": (
        "rcl_interfaces/Parameter[] parameters",
        "rcl_interfaces/SetParametersResult[] results",
    ),
    "rcl_interfaces/srv/SetParametersAtomically": (
        "rcl_interfaces/Parameter[] parameters",
        "rcl_interfaces/SetParametersResult result",
    ),
    "rcl_interfaces/srv/ListParameters": (
        "string[] prefixes\nuint64 depth",
        "rcl_interfaces/ListParametersResult result",
    ),
    "rcl_interfaces/srv/DescribeParameters": (
        "string[] names",
        "rcl_interfaces/ParameterDescriptor[] descriptors",
    ),
    "controller_manager_msgs/srv/ListControllers": (
        "",
        "controller_manager_msgs/ControllerState[] controller",
    ),
    **{
        f"controller_manager_msgs/srv/{verb}Controller": ("string name", "bool ok")
        for verb in ("Load", "Configure", "Cleanup", "Unload")
    },
    "controller_manager_msgs/srv/SwitchController": (
        (
            "string[] activate_controllers\nstring[] deactivate_controllers\nint32 strictness\nbool "
            "activate_asap\nbuiltin_interfaces/Duration timeout"
        ),
        "bool ok\nstring message",
    ),
    "controller_manager_msgs/srv/ListHardwareComponents": (
        "",
        "controller_manager_msgs/HardwareComponentState[] component",
    ),
    "controller_manager_msgs/srv/ListHardwareInterfaces": (
        "",
        "\n".join(
            f"controller_manager_msgs/HardwareInterface[] {kind}_interfaces" for kind in ("command", "state")
        ),
    ),
    "controller_manager_msgs/srv/SetHardwareComponentState": (
        "string name\nlifecycle_msgs/State target_state",
        "bool ok\nlifecycle_msgs/State state",
    ),
}
REQUEST, REPLY = "Request", "Response"
ZERO = {"string": "", "bool": False, "float32": 0.0, "float64": 0.0}
STRICT = 2
LONGEST_REPLY = 900.0  # s


class PendingReply:
    """What a handler returns whose reply comes later: whoever knows it sets `reply` then. One that never
    comes is given up after `LONGEST_REPLY` [s]."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] | None = None


def text_of(name: str, part: str = "") -> str:
    """Field lines of a message pkg/msg/Name, or of a part of a service pkg/srv/Name."""
    if part:
        return SERVICES[choose("service type", name, SERVICES)][part == REPLY]
    return MESSAGES[name]


def fields(text: str) -> list[tuple[str, str, int]]:
    """(name, base type or pkg/msg/Name, how many) of each field: 0 one value, -1 a sequence, n an array of
    n."""
    out = []
    for line in text.splitlines():
        kind, name = line.split()
        base, _, count = kind.partition("[")
        count = count.rstrip("]")
        out.append(
            (
                name,
                base.replace("/", "/msg/") if base.count("/") == 1 else base,
                int(count) if count.isdecimal() else -1 if "[" in kind else 0,
            )
        )
    return out


def filled(text: str, values: dict[str, Any]) -> dict[str, Any]:
    """values with every field of `text`, ROS's zeros where they say nothing. UserError names a field that is
    none."""
    known = fields(text)
    if unknown := set(values) - {name for name, _, _ in known}:
        raise UserError(
            f"no field {', '.join(sorted(unknown))} in this message; it has "
            f"{', '.join(name for name, _, _ in known) or 'none'}"
        )
    out = {}
    for name, kind, many in known:
        zero = {} if "/" in kind else ZERO.get(kind, 0)
        value = values.get(name, [zero] * max(many, 0) if many else zero)
        if many > 0 and len(value) != many:
            raise UserError(f"{name} has {many} values, got {len(value)}")
        if "/" in kind:
            value = [filled(MESSAGES[kind], v) for v in value] if many else filled(MESSAGES[kind], value)
        out[name] = list(value) if many else value
    return out


# ---- parameters --------------------------------------------------------------------------------------------

KINDS = {
    bool: (1, "bool_value"),
    int: (2, "integer_value"),
    float: (3, "double_value"),
    str: (4, "string_value"),
    tuple: (8, "double_array_value"),
}
PARAMETER_SERVICES = {
    "get_parameters": "GetParameters",
    "get_parameter_types": "GetParameterTypes",
    "set_parameters": "SetParameters",
    "set_parameters_atomically": "SetParametersAtomically",
    "list_parameters": "ListParameters",
    "describe_parameters": "DescribeParameters",
}


def parameter(value: bool | float | str | tuple[float, ...]) -> dict:
    """A ParameterValue."""
    number, field = KINDS[type(value)]
    return {"type": number, field: list(value) if isinstance(value, tuple) else value}


def value_of(parameter_value: dict) -> bool | float | str | list | None:
    """The Python value of a ParameterValue; None: not set, or a sequence of something else than numbers."""
    return next(
        (parameter_value[field] for number, field in KINDS.values() if number == parameter_value["type"]),
        None,
    )


class Parameters:
    """The parameters of one node, served as ROS's six services.

    get() -> {name: value}, all of them, each always of one type; set(name, value) changes one, UserError says
    why not.
    """

    def __init__(
        self, get: Callable[[], dict[str, Any]], set: Callable[[str, Any], None], writable: tuple[str, ...]
    ):
        self.get, self.put, self.writable = get, set, writable

    def serve(self, transport: Any, node: str) -> None:
        """Offer them as `node`/get_parameters and so on."""
        for name, kind in PARAMETER_SERVICES.items():
            transport.service(f"{node}/{name}", f"rcl_interfaces/srv/{kind}", getattr(self, name))

    def get_parameters(self, request: dict) -> dict:
        there = self.get()
        return {"values": [parameter(there[n]) if n in there else {} for n in request["names"]]}

    def get_parameter_types(self, request: dict) -> dict:
        return {"types": [v.get("type", 0) for v in self.get_parameters(request)["values"]]}

    def list_parameters(self, request: dict) -> dict:
        wanted = request["prefixes"]
        return {
            "result": {
                "names": sorted(
                    n
                    for n in self.get()
                    if not wanted or any(n == p or n.startswith(p + ".") for p in wanted)
                ),
                "prefixes": wanted,
            }
        }

    def describe_parameters(self, request: dict) -> dict:
        there = self.get()
        return {
            "descriptors": [
                {
                    "name": n,
                    "type": parameter(there[n])["type"] if n in there else 0,
                    "read_only": n not in self.writable,
                }
                for n in request["names"]
            ]
        }

    def set_parameters(self, request: dict) -> dict:
        return {"results": [self._set(p["name"], p["value"]) for p in request["parameters"]]}

    def set_parameters_atomically(self, request: dict) -> dict:
        """All or none: what was set before one is refused is put back."""
        before = self.get()
        done: list[str] = []
        for p in request["parameters"]:
            result = self._set(p["name"], p["value"])
            if not result["successful"]:
                for name in done:
                    self.put(name, before[name])
                return {"result": result}
            done.append(p["name"])
        return {"result": {"successful": True}}

    def _set(self, name: str, value: dict) -> dict:
        there, new = self.get(), value_of(value)
        try:
            choose("parameter", name, there)
            if name not in self.writable:
                raise UserError(f"{name} is read only")
            if isinstance(there[name], float) and type(new) is int:
                new = float(new)
            new = tuple(new) if isinstance(new, list) else new
            if type(new) is not type(there[name]):
                raise UserError(f"{name} is a {type(there[name]).__name__}, got {new!r}")
            self.put(name, new)
        except UserError as e:
            return {"successful": False, "reason": str(e)}
        return {"successful": True}
