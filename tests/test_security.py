"""DDS Security: keys, and an arm whose network is closed to whoever has none."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import dds_domain

from controllers.security import (
    FILES,
    PLUG_INS,
    enclave,
    find_plug_ins,
    keys_of,
    loaded_library,
    security_xml,
)
from robo_rl.errors import MissingDependency, UserError
from robo_rl.experiment.robot_keys import KeysOptions, make_keys

ROOT = Path(__file__).parent.parent


def plug_ins_or_skip():
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("cryptography", reason="needs robo_rl[security]")
    import cyclonedds.core  # noqa: F401  (it loads the library)

    try:
        find_plug_ins(loaded_library())
    except MissingDependency as e:
        pytest.skip(f"{e} (.ci/security runs this)")


@pytest.fixture(scope="module")
def keystore(tmp_path_factory):
    pytest.importorskip("cryptography", reason="needs robo_rl[security]")
    store = tmp_path_factory.mktemp("security") / "keys"
    made = make_keys(KeysOptions(folder=str(store), watch=("screen",)))
    assert [p.name for p in made] == ["arm", "commander", "screen"]
    return store


def test_a_keystore_has_an_enclave_for_each_node_and_private_keys_that_their_owner_alone_reads(keystore):
    for name in ("arm", "commander", "screen"):
        assert enclave(str(keystore / "enclaves" / name)) == keystore / "enclaves" / name
    for key in (*keystore.glob("enclaves/*/key.pem"), keystore / "private" / "ca.key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((keystore / "private").stat().st_mode) == 0o700
    assert "<topic>ros_discovery_info</topic>" in (keystore / "enclaves/screen/permissions.xml").read_text()


def test_a_keystore_that_is_there_gets_new_nodes_and_keeps_the_old_ones(tmp_path):
    pytest.importorskip("cryptography", reason="needs robo_rl[security]")
    from cryptography import x509

    store = tmp_path / "keys"
    make_keys(KeysOptions(folder=str(store)))
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file()}
    assert make_keys(KeysOptions(folder=str(store))) == []
    (store / "enclaves" / ".laptop").mkdir()  # a run that was killed
    assert make_keys(KeysOptions(folder=str(store), names=("arm", "laptop"))) == [store / "enclaves/laptop"]
    assert all(p.read_bytes() == data for p, data in before.items())
    authority = x509.load_pem_x509_certificate((store / "public/ca.cert.pem").read_bytes())
    x509.load_pem_x509_certificate(
        (store / "enclaves/laptop/cert.pem").read_bytes()
    ).verify_directly_issued_by(authority)
    (store / "private/ca.key.pem").unlink()
    with pytest.raises(UserError, match="has lost .*ca.key.pem"):
        make_keys(KeysOptions(folder=str(store), names=("tablet",)))


def test_a_keystore_is_there_whole_or_not_at_all_and_what_a_broken_one_has_lost_is_one_line(tmp_path):
    pytest.importorskip("cryptography", reason="needs robo_rl[security]")
    (tmp_path / ".keys.new" / "private").mkdir(parents=True)  # of a call that was killed
    (tmp_path / ".keys.new" / "private" / "ca.key.pem").write_text("half a")
    (tmp_path / "keys").mkdir()
    store, options = tmp_path / "keys", KeysOptions(folder=str(tmp_path / "keys"))
    assert len(make_keys(options)) == 2 and [p.name for p in tmp_path.iterdir()] == ["keys"]
    assert (store / "public" / "identity_ca.cert.pem").read_bytes() == (
        store / "public" / "ca.cert.pem"
    ).read_bytes()
    more = KeysOptions(folder=str(store), names=("laptop",))
    for lost, says in (
        ("public/ca.cert.pem", "has lost"),
        ("private/ca.key.pem", "has lost"),
        ("enclaves/governance.p7s", "has lost"),
    ):
        kept = (store / lost).read_bytes()
        (store / lost).unlink()
        with pytest.raises(UserError, match=says):
            make_keys(more)
        (store / lost).write_bytes(kept)
    for half in ("public/ca.cert.pem", "private/ca.key.pem"):
        kept = (store / half).read_bytes()
        (store / half).write_bytes(kept[:40])
        with pytest.raises(UserError, match="is damaged: no node can be added"):
            make_keys(more)
        (store / half).write_bytes(kept)
    assert make_keys(more) == [store / "enclaves/laptop"]


def test_a_folder_with_something_else_is_no_keystore(tmp_path):
    pytest.importorskip("cryptography", reason="needs robo_rl[security]")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="name a new folder"):
        make_keys(KeysOptions(folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"names": ("../x",)}, "made of letters"),
        ({"names": ("",)}, "made of letters"),
        ({"watch": ("arm",)}, "cannot be in --names and in"),
        ({"days": 0}, "--days must be in"),
    ],
)
def test_keys_are_asked_for_by_names_that_can_be_folders(options, says):
    with pytest.raises(UserError, match=says):
        KeysOptions(folder="x", **options)


def test_a_folder_without_keys_says_what_is_missing_and_a_keystore_which_enclaves_it_has(tmp_path):
    with pytest.raises(UserError, match=r"has no identity_ca.cert.pem.*robo_rl robot keys"):
        enclave(str(tmp_path))
    folder = tmp_path / "enclaves" / "arm"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).touch()
    with pytest.raises(
        UserError, match=r"is a keystore: name one node's keys in it, --security .*/enclaves/arm"
    ):
        enclave(str(tmp_path))
    assert enclave(str(folder)) == folder


@pytest.mark.parametrize("place", [".", "libddsc0debian", ".."])
def test_plug_ins_are_found_beside_the_library_of_cyclone(tmp_path, place):
    library = tmp_path / "lib" / "libddsc.so.0.10.2"
    library.parent.mkdir()
    (library.parent / place).mkdir(exist_ok=True)
    with pytest.raises(MissingDependency, match=r"this one \(.*libddsc.so.0.10.2\) has none: the wheel"):
        find_plug_ins(library)
    for name in PLUG_INS:
        (library.parent / place / f"libdds_security_{name}.so").touch()
    found = find_plug_ins(library)
    assert set(found) == set(PLUG_INS) and all(p.exists() for p in found.values())
    xml = security_xml(Path("/k/a&b"), found)
    assert "file:/k/a&amp;b/key.pem" in xml and 'initFunction="init_access_control"' in xml


def test_the_library_of_cyclone_is_read_from_the_maps_of_this_process(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f-8f r-xp 0 08:01 1    /lib/libc.so.6\n7f-8f r-xp 0 08:01 2    /opt/my "
        "libs/libddsc.so.0.10.2\n9f-af rw-p 0 0:0 0\n"
    )
    assert loaded_library(maps) == Path("/opt/my libs/libddsc.so.0.10.2")
    maps.write_text("")
    assert loaded_library(maps) is None and loaded_library(tmp_path / "none") is None


def test_ros_variables_name_the_keys_and_security_without_keys_is_refused():
    on = {
        "ROS_SECURITY_ENABLE": "true",
        "ROS_SECURITY_KEYSTORE": "/k",
        "ROS_SECURITY_ENCLAVE_OVERRIDE": "/arm",
    }
    assert keys_of("", on) == "/k/enclaves/arm" and keys_of("/mine", on) == "/mine"
    assert keys_of("", {**on, "ROS_SECURITY_ENABLE": "false"}) == "" == keys_of("", {})
    with pytest.raises(UserError, match="say whose keys"):
        keys_of("", {"ROS_SECURITY_ENABLE": "true"})


def test_a_cyclone_without_plug_ins_opens_nothing_where_security_is_asked_for(keystore):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    import cyclonedds.core  # noqa: F401

    from robo_rl.experiment.wire import connect

    try:
        find_plug_ins(loaded_library())
    except MissingDependency:
        with pytest.raises(MissingDependency, match="docs/howto/security.md"):
            connect("arm", 100, security=str(keystore / "enclaves" / "arm"))
    else:
        pytest.skip("this Cyclone has the plug-ins")


def test_a_network_without_multicast_is_asked_by_addresses_and_the_default_is_loopback_alone():
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    from controllers.dds_config import configuration

    assert (
        '<Interfaces><NetworkInterface name="lo" multicast="true"/></Interfaces></General></Domain>'
        in configuration(3)
    )
    tunnel = configuration(3, "wg0,10.0.0.2,laptop.local")
    assert '<NetworkInterface name="wg0"/>' in tunnel and "<AllowMulticast>false</AllowMulticast>" in tunnel
    assert '<Peers><Peer address="10.0.0.2"/><Peer address="laptop.local"/></Peers>' in tunnel
    for wrong in ("wg0,", "wg0,10.0.0.2/><x", "/etc,1.2.3.4"):
        with pytest.raises(UserError, match="is no name of a"):
            configuration(3, wrong)


@pytest.mark.slow
def test_two_nodes_that_are_given_each_others_addresses_meet_without_multicast():
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    from controllers.transport import Text
    from robo_rl.experiment.wire import connect

    # not the domain of the other test: a process has one network in each
    domain, interface = 60 + os.getpid() % 40, "lo,127.0.0.1"
    code = f"""
import time
from controllers.transport import Text
from robo_rl.experiment.wire import connect
out = connect("b", {domain}, {interface!r}).publisher("x", Text, "command")
while True:
    out.publish(Text("here"))
    time.sleep(0.05)
"""
    wire = connect("a", domain, interface)
    box, end = wire.subscription("x", Text, "command"), time.monotonic() + 120
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        while not (got := box.take()):
            assert other.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        assert got[0].message == Text("here")
    finally:
        other.kill()
        other.wait()
        wire.close()


# ---- with the plug-ins -------------------------------------------------------------------------------------

PROBE = """
import json, select, sys
from controllers.transport import Flag, JointState, PoseStamped, Text
from robo_rl.errors import UserError
from robo_rl.experiment.wire import connect
domain, name, security = int(sys.argv[1]), sys.argv[2], sys.argv[3]
wire, sent, seen, refused = connect(name, domain, security=security), 0, 0, ""
joints = wire.subscription("joint_states", JointState, depth=100)
try:
    words, target = wire.publisher("safety_command", Text, "command"), wire.publisher("target_pose", PoseStamped, "command")
    stop = wire.publisher("estop", Flag, "latched") if name != "commander" else None
except UserError as e:
    refused = str(e)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    if not refused:
        for word in (f"claim {name} 5", f"arm {name}"):
            words.publish(Text(word))
        target.publish(PoseStamped(wire.now(), "base", (0.4, 0.0, 0.3), (1.0, 0.0, 0.0, 0.0)))
        if stop is not None:
            stop.publish(Flag(True))
    sent, seen = sent + 1, seen + len(joints.take())
    print(json.dumps({"sent": sent, "seen": seen, "refused": refused}), flush=True)
wire.close()
"""  # noqa: E501


class Probe:
    """A process that commands the arm again and again, and counts what it sees of it."""

    def __init__(self, domain, name, security, folder):
        self.out = folder / f"{name}.jsonl"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROBE, str(domain), name, str(security)],
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=out,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def said(self):
        lines = self.out.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1]) if whole else {"sent": 0, "seen": 0, "refused": ""}

    def end(self):
        self.process.stdin.close()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


@pytest.mark.slow
def test_a_participant_without_keys_sees_nothing_and_moves_nothing(keystore, tmp_path):
    """Beside it: keys of another keystore, keys that may read alone, and the commander's, which show that the
    arm is there."""
    plug_ins_or_skip()
    from robo_rl.experiment.sim_arm import SimArmOptions, make_sim_arm
    from robo_rl.experiment.wire import connect

    domain = dds_domain()
    make_keys(KeysOptions(folder=str(tmp_path / "others")))
    wire = connect("arm", domain, security=str(keystore / "enclaves" / "arm"))
    probes, holders, states = {}, set(), set()
    try:
        _, node = make_sim_arm(SimArmOptions(), wire)
        for name, keys in (
            ("stranger", ""),
            ("other", tmp_path / "others/enclaves/commander"),
            ("screen", keystore / "enclaves/screen"),
            ("commander", keystore / "enclaves/commander"),
        ):
            probes[name] = Probe(domain, name, keys, tmp_path)
        end = time.monotonic() + 240
        while True:
            node.tick()
            holders.add(node.lease.holder(wire.now()))
            states.add(node.governor.state)
            said = {name: p.said() for name, p in probes.items()} if node.count % 100 == 0 else {}
            if (
                said
                and all(s["sent"] >= 100 for s in said.values())
                and said["commander"]["seen"]
                and said["screen"]["seen"]
                and (states & {"ARMED", "ACTIVE"})
            ):
                break
            assert time.monotonic() < end and not any(p.process.poll() for p in probes.values()), (
                said,
                holders,
                states,
            )
        codes = {name: p.end() for name, p in probes.items()}
        said = {name: p.said() for name, p in probes.items()}
    finally:
        for p in probes.values():
            p.process.kill()
        wire.close()
    assert set(codes.values()) == {0}
    assert said["stranger"]["seen"] == said["other"]["seen"] == 0 and not said["stranger"]["refused"]
    assert said["screen"]["refused"] == "the keys of this node do not let it write rt/safety_command"
    assert holders == {"", "commander"} and "STOPPED" not in {s for s in states if node.governor.stopped_by}
    assert not node.governor.stopped_by
