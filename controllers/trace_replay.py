"""A trace of a governor held against what a fresh governor decides of the same inputs."""

from itertools import zip_longest
from typing import Any

from controllers.compliance import ComplianceCommand
from controllers.contracts import Command, State
from controllers.governor import Governor
from controllers.limits import Limits
from controllers.robot import Robot
from controllers.trace import Trace, plain
from robo_rl.errors import UserError


def replay(events: list[dict], robot: Robot) -> int | None:
    """Feed the inputs of a trace to a fresh governor. -> index of the first event where it decides otherwise,
    or None."""
    if not events or events[0]["kind"] != "config":
        raise UserError("a trace begins with its config")
    limits = Limits(**{k: _numbers(v) for k, v in events[0]["data"]["limits"].items()})
    trace = Trace()
    governor = Governor(limits, robot, trace)
    for e in events[1:]:
        d, now = e["data"], float(e["t"])
        try:
            match e["kind"]:
                case "arm":
                    governor.arm(now)
                case "disarm":
                    governor.disarm(now)
                case "stop":
                    governor.stop(now, d["reason"], d.get("source", ""))
                case "let_go":
                    governor.let_go(now, d["source"])
                case "hold":
                    governor.hold(now, d["contract"], d["reason"])
                case "reset":
                    governor.reset(now)
                case "finish":
                    governor.finish(now)
                case "rebase":
                    governor.rebase(now)
                case "moved":
                    governor.moved(now)
                case "tick":
                    governor.tick(now, d["dt"])
                case "state":
                    governor.measure(State(**{k: _numbers(v) for k, v in d.items()}), now)
                case "comply":
                    governor.comply(
                        ComplianceCommand(
                            d["source"], d["stream"], _numbers(d["values"]), d["frame"], _numbers(d["stamp"])
                        ),
                        now,
                    )
                case "command":
                    governor.command(
                        Command(
                            d["source"],
                            float(d["stamp"]),
                            d["frame"],
                            _numbers(d["pos"]),
                            _numbers(d["quat"]),
                            _numbers(d["joints"]),
                            d.get("stream", ""),
                        ),
                        now,
                    )
        except UserError:  # arming was refused then too
            pass
    pairs = zip_longest(trace.events, plain(events))
    return next(
        (
            i
            for i, (a, b) in enumerate(pairs)
            if not a or not b or any(a[k] != b[k] for k in ("kind", "data"))
        ),
        None,
    )


def _numbers(x: Any) -> Any:
    """Lists as tuples, names of numbers that are not finite as those numbers; names of frames as they are."""
    if isinstance(x, list):
        return tuple(_numbers(v) for v in x)
    return float(x) if x in ("nan", "inf", "-inf") else x
