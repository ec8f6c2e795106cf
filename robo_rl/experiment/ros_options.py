"""The options of every command that speaks to an arm over ROS 2."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class RosOptions:
    """Where the topics are, and by which keys."""

    namespace: str = ""
    """Prefix of all topics."""
    domain: Annotated[int, tyro.conf.arg(metavar="ID")] = -1
    """ROS domain, 0 to 232; -1: ROS_DOMAIN_ID, else 0."""
    interface: str = ""
    """Network interface; "": loopback. One without multicast, as a tunnel, with the other computers'
    addresses: wg0,10.0.0.2."""
    security: str = ""
    """Folder of this node's keys, made by `robot keys`: DDS Security; "": as ROS's own variables say, else
    none."""

    def __post_init__(self) -> None:
        in_range("--domain", self.domain, -1, 232)


def check_dry_run(dry_run: bool, **orders: bool) -> None:
    """UserError: a dry run, which commands nothing, is asked to do something to the arm; orders: whether each
    option that does so was given, by its name."""
    for name, given in orders.items():
        if dry_run and given:
            raise UserError(f"--dry-run commands nothing, and --{name} does: leave one of them out")
