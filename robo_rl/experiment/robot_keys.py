"""Keys for DDS Security: a keystore as ROS 2 lays it out, with a folder of keys for each node of an arm's
network."""

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import tyro

from robo_rl.errors import MissingDependency, UserError, in_range, utf8

DOMAINS = "<domains><id_range><min>0</min><max>230</max></id_range></domains>"  # as far as Cyclone takes them
HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<dds xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
    'xsi:noNamespaceSchemaLocation="http://www.omg.org/spec/DDS-SECURITY/20170901/omg_shared_ca_{}.xsd">'
)
GOVERNANCE = (
    HEAD.format("governance")
    + f"""
<domain_access_rules><domain_rule>{DOMAINS}
<allow_unauthenticated_participants>false</allow_unauthenticated_participants>
<enable_join_access_control>true</enable_join_access_control>
<discovery_protection_kind>ENCRYPT</discovery_protection_kind>
<liveliness_protection_kind>ENCRYPT</liveliness_protection_kind>
<rtps_protection_kind>SIGN</rtps_protection_kind>
<topic_access_rules><topic_rule><topic_expression>*</topic_expression>
<enable_discovery_protection>true</enable_discovery_protection>
<enable_liveliness_protection>true</enable_liveliness_protection>
<enable_read_access_control>true</enable_read_access_control>
<enable_write_access_control>true</enable_write_access_control>
<metadata_protection_kind>ENCRYPT</metadata_protection_kind>
<data_protection_kind>ENCRYPT</data_protection_kind>
</topic_rule></topic_access_rules></domain_rule></domain_access_rules></dds>
"""
)
"""What SROS2 gives its keystores: whoever has no keys sees nothing and is heard by nobody; every topic is
encrypted."""
ANNOUNCED = "ros_discovery_info"  # the one topic that every ROS node writes


@dataclass(frozen=True, kw_only=True)
class KeysOptions:
    """Make keys for the nodes of an arm's network (DDS Security, as ROS 2's keystores have them). In a
    keystore that is there, names are added and nothing is changed. Its folder `private` signs new nodes: keep
    it off the robot."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The keystore": ("folder", "days"),
        "Its nodes": ("names", "watch"),
    }

    folder: tyro.conf.Positional[str]
    """Folder of the keystore; it is made where it is not there."""
    names: tuple[str, ...] = ("arm", "commander")
    """Nodes that may read and write every topic: one for the arm, one for each computer or person that
    commands it."""
    watch: tuple[str, ...] = ()
    """Nodes that may read every topic and move nothing."""
    days: int = 3650
    """How long the keys are valid, 1 to 36500."""

    def __post_init__(self) -> None:
        in_range("--days", self.days, 1, 36500)
        for name in (*self.names, *self.watch):
            if not utf8("a node's name", name).replace("_", "").isalnum() or not name.isascii():
                raise UserError(f"a node's name is made of letters, digits and _, got {name!r}")
        if twice := {n for n in self.names if n in self.watch}:
            raise UserError(f"{', '.join(sorted(twice))} cannot be in --names and in --watch")


def permissions(name: str, publish: str, begin: datetime, end: datetime) -> str:
    """The permissions of a node: it may read every topic, and write those that `publish` matches."""

    def topics(tag: str, expression: str) -> str:
        return f"<{tag}><topics><topic>{expression}</topic></topics></{tag}>"

    return (
        HEAD.format("permissions")
        + f"""
<permissions><grant name="/{name}"><subject_name>CN=/{name}</subject_name>
<validity><not_before>{begin:%Y-%m-%dT%H:%M:%S}</not_before><not_after>{end:%Y-%m-%dT%H:%M:%S}</not_after></validity>
<allow_rule>{DOMAINS}{topics("publish", publish)}{topics("subscribe", "*")}</allow_rule>
<default>DENY</default></grant></permissions></dds>
"""
    )


def make_keys(options: KeysOptions, now: datetime | None = None) -> list[Path]:
    """Make or extend the keystore -> the folders of the nodes that were added. MissingDependency: the package
    cryptography is absent."""
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise MissingDependency(
            "robo_rl robot keys needs cryptography: pip install 'robo_rl[security]'"
        ) from None
    store, pem = Path(options.folder), serialization.Encoding.PEM
    begin = (now or datetime.now(UTC)) - timedelta(days=1)  # the robot's clock may be behind
    end = begin + timedelta(days=options.days + 1)
    authority, public, private = _authority(store, begin, end)
    made = []
    for name in (*options.names, *options.watch):
        whole, folder = store / "enclaves" / name, store / "enclaves" / f".{name}"
        if whole.exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended
        folder.mkdir(mode=0o700)
        key = _new_key()
        certificate = _certificate(f"/{name}", key, begin, end, authority)
        text = permissions(name, "*" if name in options.names else ANNOUNCED, begin, end)
        for file in ("identity_ca.cert.pem", "permissions_ca.cert.pem"):
            (folder / file).write_bytes(public.read_bytes())
        (folder / "governance.p7s").write_bytes((store / "enclaves" / "governance.p7s").read_bytes())
        (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
        (folder / "permissions.xml").write_text(text, encoding="utf-8")
        (folder / "permissions.p7s").write_bytes(_signed(text, authority))
        _write_key(folder / "key.pem", key)
        folder.rename(whole)
        made.append(whole)
    return made


def _authority(store: Path, begin: datetime, end: datetime) -> tuple[tuple[Any, Any], Path, Path]:
    """((certificate, key), their files) of the one that signs; made with the governance where it is not
    there. UserError: the keystore is no whole one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    public, private, governance = (
        store / path for path in ("public/ca.cert.pem", "private/ca.key.pem", "enclaves/governance.p7s")
    )
    there = [path for path in (public, private, governance) if path.exists()]
    if not there:
        if store.exists() and any(store.iterdir()):
            raise UserError(f"{store} holds something else than a keystore: name a new folder")
        _make_store(store, begin, end)
    elif len(there) < 3:
        lost = ", ".join(str(path) for path in (public, private, governance) if path not in there)
        raise UserError(
            f"{store} has lost {lost}: no node can be added. Bring it back, or make a new keystore"
        )
    try:
        key = serialization.load_pem_private_key(private.read_bytes(), None)
        return (x509.load_pem_x509_certificate(public.read_bytes()), key), public, private
    except (ValueError, TypeError):
        raise UserError(
            f"{public} or {private} is damaged: no node can be added. Bring it back, or make a new keystore"
        ) from None


def _make_store(store: Path, begin: datetime, end: datetime) -> None:
    """A keystore without nodes; it takes its place whole, or is not there."""
    from cryptography.hazmat.primitives import serialization

    made = store.absolute().parent / f".{store.absolute().name}.new"
    shutil.rmtree(made, ignore_errors=True)  # of a run that was ended
    public, private, enclaves = (
        made / "public" / "ca.cert.pem",
        made / "private" / "ca.key.pem",
        made / "enclaves",
    )
    key = _new_key()
    certificate = _certificate("robo_rl", key, begin, end, None)
    for folder in (public.parent, private.parent, enclaves):
        folder.mkdir(mode=0o700, parents=True)
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(private, key)
    for role in ("identity", "permissions"):  # as SROS2 names them
        public.with_name(f"{role}_ca.cert.pem").symlink_to(public.name)
        private.with_name(f"{role}_ca.key.pem").symlink_to(private.name)
    (enclaves / "governance.xml").write_text(GOVERNANCE, encoding="utf-8")
    (enclaves / "governance.p7s").write_bytes(_signed(GOVERNANCE, (certificate, key)))
    made.rename(store)  # also onto an empty folder


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())  # DDS Security knows this and RSA


def _certificate(
    name: str, key: Any, begin: datetime, end: datetime, authority: "tuple[Any, Any] | None"
) -> Any:
    """A certificate of `key`, signed by the authority; None: by itself, as an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority[0].subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(
            x509.BasicConstraints(ca=authority is None, path_length=None if authority else 1), critical=True
        )
    )
    return made.sign(authority[1] if authority else key, hashes.SHA256())


def _signed(text: str, authority: tuple[Any, Any]) -> bytes:
    """The text with its signature, as S/MIME."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.serialization import pkcs7

    return (
        pkcs7.PKCS7SignatureBuilder()
        .set_data(text.encode())
        .add_signer(*authority, hashes.SHA256())
        .sign(serialization.Encoding.SMIME, [pkcs7.PKCS7Options.Text, pkcs7.PKCS7Options.DetachedSignature])
    )


def _write_key(path: Path, key: Any) -> None:
    """A private key that its owner alone may read."""
    from cryptography.hazmat.primitives import serialization

    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
