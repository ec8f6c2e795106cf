"""Cyclone's configuration of a node: which network it is on, and its keys."""

import re

from controllers.security import enclave, find_plug_ins, loaded_library, security_xml
from robo_rl.errors import UserError


def configuration(domain: int, interface: str = "", security: str = "") -> str:
    """Cyclone's XML: one interface, loopback by default (without any it takes the first network card it
    finds); with the keys in the folder `security`. interface: its name; where multicast does not cross it, as
    in a tunnel, with the addresses of the other computers, NAME,ADDRESS,…: they are asked one by one."""
    name, *peers = (interface or "lo").split(",")
    for word, what in ((name, "a network interface"), *((p, "a computer") for p in peers)):
        if not re.fullmatch(r"[\w.:-]+", word):
            raise UserError(f"{word!r} is no name of {what}")
    multicast = ' multicast="true"' if name == "lo" and not peers else ""
    asked = "".join(f'<Peer address="{p}"/>' for p in peers)
    alone = (
        (
            f"<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex><Peers>{asked}</Peers>"
            "</Discovery>"
        )
        if peers
        else "</General>"
    )
    keys = security_xml(enclave(security), find_plug_ins(loaded_library())) if security else ""
    return (
        f'<CycloneDDS><Domain Id="{domain}"><General><Interfaces><NetworkInterface '
        f'name="{name}"{multicast}/></Interfaces>'
        f"{alone}{keys}</Domain></CycloneDDS>"
    )
