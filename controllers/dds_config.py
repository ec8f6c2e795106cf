"""Cyclone's configuration of a node: which network it is on, and its keys."""

import re
import socket

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


def why_shut(domain: int, interface: str, security: str) -> str:
    """What most likely kept Cyclone from opening `domain` on `interface`, which it does not say itself."""
    port = 7400 + 250 * domain  # DDSI-RTPS 2.5, 9.6.2.3: discovery, and beside it the data of all
    try:
        for k in (port, port + 1):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", k))
    except OSError:
        return (
            f"another program has a port of DDS domain {domain} ({port} or {port + 1}). Take another domain; "
            "those up to 101 are below the ports that Linux gives to any program"
        )
    keys = (
        f", or the keys in {security}: do they belong together, are they valid still? Cyclone says above "
        "what it cannot read"
        if security
        else ""
    )
    return f"DDS cannot use the network interface {interface or 'lo'}: is it up?{keys}"
