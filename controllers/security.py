"""DDS Security of a node: its keys in an enclave's folder, and Cyclone's plug-ins for authentication, access
control and encryption.

A folder has the six files of a ROS 2 (SROS2) enclave, so that `ros2 security` and `robo_rl robot keys` make
folders for each other. Cyclone's plug-ins are found beside the library of Cyclone DDS that is loaded. The
wheel on PyPI has none: the page docs/howto/security.md says how a binding with them is built.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from robo_rl.errors import MissingDependency, UserError

# of the library's name, and of its functions
PLUG_INS = {"auth": "authentication", "ac": "access_control", "crypto": "crypto"}
FILES = (
    "identity_ca.cert.pem",
    "cert.pem",
    "key.pem",
    "permissions_ca.cert.pem",
    "governance.p7s",
    "permissions.p7s",
)
NO_PLUG_INS = (
    "--security needs the security plug-ins of Cyclone DDS (libdds_security_auth, _ac and _crypto), and this "
    "one ({}) has none: the wheel on PyPI comes without. docs/howto/security.md has the three lines that "
    "build a binding with them. Without them: loopback alone, or --interface with a WireGuard interface"
)


def loaded_library(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The file of Cyclone DDS in this process; None: it cannot be told."""
    if not maps.exists():
        return None
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/" in line)
    return next((Path(p) for p in paths if Path(p).name.startswith("libddsc")), None)


def find_plug_ins(library: Path | None) -> dict[str, Path]:
    """Name -> file of each plug-in beside `library`. MissingDependency: they are not there."""
    beside = (
        []
        if library is None
        else [library.parent, *sorted(library.parent.glob("libddsc*debian")), library.parent.parent]
    )
    for folder in beside:
        found = {name: folder / f"libdds_security_{name}.so" for name in PLUG_INS}
        if all(path.exists() for path in found.values()):
            return found
    raise MissingDependency(NO_PLUG_INS.format(library or "not found"))


def enclave(folder: str) -> Path:
    """The folder, absolute. UserError: it is no enclave."""
    path = Path(folder).expanduser().absolute()
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        inside = sorted(p.parent.name for p in path.glob("enclaves/*/cert.pem"))
        if inside:
            raise UserError(
                f"{folder} is a keystore: name one node's keys in it, --security "
                + " or ".join(f"{folder}/enclaves/{name}" for name in inside)
            )
        raise UserError(
            f"{folder} has no {', '.join(missing)}: --security takes the keys of one node, made by robo_rl "
            "robot keys KEYSTORE (KEYSTORE/enclaves/arm) or ros2 security create_enclave"
        )
    return path


def security_xml(folder: Path, plug_ins: Mapping[str, Path]) -> str:
    """The Security element of Cyclone's configuration."""

    def library(name: str) -> str:
        word = PLUG_INS[name]
        return (
            f'<Library path={quoteattr(str(plug_ins[name]))} initFunction="init_{word}" '
            f'finalizeFunction="finalize_{word}"/>'
        )

    def files(**of: str) -> str:
        return "".join(f"<{tag}>file:{escape(str(folder / name))}</{tag}>" for tag, name in of.items())

    return (
        f"<Security><Authentication>{library('auth')}"
        + files(IdentityCertificate="cert.pem", IdentityCA="identity_ca.cert.pem", PrivateKey="key.pem")
        + f"</Authentication><AccessControl>{library('ac')}"
        + files(
            PermissionsCA="permissions_ca.cert.pem",
            Governance="governance.p7s",
            Permissions="permissions.p7s",
        )
        + f"</AccessControl><Cryptographic>{library('crypto')}</Cryptographic></Security>"
    )


def keys_of(security: str, environment: Mapping[str, str] = os.environ) -> str:
    """The folder of a node's keys: `security`, or what ROS's own variables say; "": none. UserError: they ask
    for security without saying whose keys, which would leave a node open that its user takes for closed."""
    if security or environment.get("ROS_SECURITY_ENABLE") != "true":
        return security
    store, name = (
        environment.get("ROS_SECURITY_KEYSTORE", ""),
        environment.get("ROS_SECURITY_ENCLAVE_OVERRIDE", ""),
    )
    if not (store and name):
        raise UserError(
            "ROS_SECURITY_ENABLE is true: say whose keys this node has, with --security "
            "KEYSTORE/enclaves/NAME, or with ROS_SECURITY_KEYSTORE and ROS_SECURITY_ENCLAVE_OVERRIDE=/NAME"
        )
    return str(Path(store) / "enclaves" / name.strip("/"))
