"""`robo_rl deploy`, `serve`, `sim-arm` and `eval --on arm` as a user runs them, with an untrained policy."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import Command, dds_domain, robo_rl

from controllers.bag import BagWriter, offered, recorded
from controllers.chunking import ChunkRunner
from controllers.lease import LeaseClient
from controllers.observation import camera_topic, picture
from controllers.policy_client import InProcessPolicy
from controllers.remote import RemotePolicyClient, read_token
from controllers.serving import PolicyServer
from controllers.transport import Bus, LoopbackTransport, Text
from robo_rl.checkpoint import name, save_checkpoint
from robo_rl.data.episode import Features
from robo_rl.data.labels import need_units
from robo_rl.data.layout import JOURNAL
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.arm_recording import ArmRecording, episodes_of, recover, stacked
from robo_rl.experiment.cameras import CameraOptions
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.deploy import deploy, real_time_loop
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.deploy_policy import choose_actor, instruction_of, slowness
from robo_rl.experiment.deploy_recorder import DeployRecorder
from robo_rl.experiment.policy_server import TOKEN_FILE, ServeOptions, load_actor, remote_actor, run_interface
from robo_rl.experiment.sim_arm import SimArmOptions
from robo_rl.experiment.wire import connect
from robo_rl.human.correction_journal import scan
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from sims.mujoco.env import axes_of
from sims.mujoco.gl import NO_GL, gl_backend

CHUNKS = r"\b(1 chunk|\d+ chunks), "  # what a deployed policy says at its end


def write_run(
    folder: Path,
    kind: str = "flow",
    state: int = 36,
    views: tuple[str, ...] = (),
    language: bool = False,
    **config,
) -> Path:
    """A run folder with one checkpoint of a policy that was never trained."""
    train = TrainConfig(**({"task": "pick_cube"} | config))
    names = tuple(a.name for a in axes_of(train.control or "ee_delta"))
    policy = make_policy(
        PolicyOptions(kind=kind, hidden=32, layers=2),
        ObsSpec(
            state=state,
            action=len(names),
            action_names=names,
            views=views,
            image_size=32 if views else 0,
            language=language,
        ),
        0,
    )
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": asdict(train), "name": folder.name}))
    save_checkpoint(folder / "checkpoints" / name(0), policy, {}, {"step": 0, "best": {"step": -1}})
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run")


def test_a_policy_is_deployed_in_one_process(run, tmp_path):
    done = robo_rl(tmp_path, "deploy", run, "--transport", "inprocess", "--seconds", "0.5")
    assert done.code in (0, 1), done
    assert (
        re.match(r"(1 chunk|\d+ chunks), inference median .* ms; rows \d+ executed", done.out)
        and "cube is 0.0" in done.out
    )


@pytest.mark.parametrize(
    ("pressed", "said"),
    [({"wall"}, "the e-stop says stop (wall)"), (set(), "the lease on the arm is another's now")],
)
def test_a_lease_that_an_e_stop_ended_is_told_as_the_e_stop(pressed, said):
    """The arm ends the lease of whoever commands in the tick in which it hears the button; which news comes
    first is chance."""
    governor = SimpleNamespace(state="ACTIVE", stopped_by=set(), disarm=lambda now: None)
    bridge = SimpleNamespace(
        lost="",
        governor=governor,
        measure=lambda now: governor.stopped_by.update(pressed),
        publish=lambda now: None,
    )
    lease = SimpleNamespace(renew=lambda now: None, ours=lambda: False, refusals=list)
    bridge.tick = lambda client, now: bridge.measure(now)
    real_time_loop(
        DeployOptions(run="run", seconds=1),
        0.001,
        bridge,
        SimpleNamespace(now=time.monotonic),
        None,
        SimpleNamespace(after_tick=lambda t: False),
        [],
        lease,
        print,
    )
    assert bridge.lost.startswith(said)


@pytest.mark.parametrize(
    ("says", "ends"),
    [("HOLD: no command for 0.101 s", True), ("STOPPED: e-stop", True), ("ACTIVE: refused to arm", False)],
)
def test_a_deployment_ends_where_the_arm_no_longer_follows(says, ends):
    """As after a pause of this process in which the arm held and the lease ended: the lease is taken again,
    and nothing would move."""
    governor = SimpleNamespace(state="ACTIVE", stopped_by=set(), disarm=lambda now: None, reason="")

    def hold(now, contract, reason):
        governor.state, governor.reason = "HOLD", reason

    governor.hold = hold
    bridge = SimpleNamespace(
        lost="", governor=governor, measure=lambda now: None, publish=lambda now: None, ticks=0
    )
    bridge.tick = lambda client, now: setattr(bridge, "ticks", bridge.ticks + 1)
    lease = SimpleNamespace(renew=lambda now: None, ours=lambda: True, refusals=list)
    said = [[], [], [SimpleNamespace(message=Text(says))]]
    real_time_loop(
        DeployOptions(run="run", seconds=60),
        0.001,
        bridge,
        SimpleNamespace(now=time.monotonic),
        None,
        SimpleNamespace(after_tick=lambda t: bridge.ticks == 20),
        [],
        lease,
        print,
        SimpleNamespace(take=lambda: said.pop(0) if said else []),
    )
    assert (governor.reason == f"the arm says {says}") == ends == (governor.state == "HOLD")
    assert bridge.ticks == (3 if ends else 20)


def test_a_dry_run_says_what_it_would_do(run, tmp_path):
    done = robo_rl(tmp_path, "deploy", run, "--transport", "inprocess", "--seconds", "0.5", "--dry-run")
    assert "contracts violated" in done.out and "cube is 0.020 m high" in done.out


def test_a_gaussian_policy_runs_on_torch_in_a_process_of_its_own(tmp_path):
    run = write_run(tmp_path / "run", kind="gaussian")
    done = robo_rl(
        tmp_path, "deploy", run, "--transport", "inprocess", "--seconds", "0.3", "--policy", "process"
    )
    assert done.code in (0, 1) and re.search(CHUNKS, done.out), done


@contextlib.contextmanager
def served(run: Path, act, instruction: str = ""):
    """Where `act` answers questions to the policy of a run."""
    token, over = b"0123456789abcdef", threading.Event()
    (run / TOKEN_FILE).write_bytes(token)
    (run / TOKEN_FILE).chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spec = run_interface(str(run), "best", "")[4]
        server = PolicyServer(listener, act, spec, token, instruction=instruction)

        def work():
            while not over.is_set():
                server.turn(0.02)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()
            server.close()


def test_a_simulated_arm_in_lockstep_waits_for_a_policy_that_is_elsewhere(run):
    """Its time is not the wall's: what the policy takes there is no time of the arm."""
    act = load_actor(str(run), "best", 0)[0]

    def slow(obs):
        time.sleep(0.3)
        return act(obs)

    def said(**options) -> list[str]:
        lines: list[str] = []
        deploy(
            DeployOptions(run=str(run), transport="inprocess", seconds=0.8, speed=1.5, **options),
            lines.append,
            lines.append,
        )
        return lines

    here = said()
    with served(run, slow) as where:
        there = said(policy=where)
    first, second, warning = here[0], there[0], there[1]
    assert " 0 starved" in first and second.split("; ")[1:] == first.split("; ")[1:]
    assert here[1:] == there[2:]
    assert "ms for a chunk" in warning and "8 rows last 160 ms: in real time the arm would stand" in warning
    with served(run, slow) as where:
        client = RemotePolicyClient(where, b"0123456789abcdef", patience=0.1, blocks=True)
        with pytest.raises(UserError, match=f"the policy at {where} gave no answer within 0.1 s"):
            client.ask({"state": np.zeros(36, np.float32)}, 0.0)
        client.close()


@pytest.mark.parametrize(
    ("blocks", "took", "starved", "says"),
    [
        (False, 0.1, 0, ""),
        (False, 0.1, 3, ""),
        (False, 0.3, 7, "takes 300 ms for a chunk (median; at most 300 ms), whose 8 rows last 160 ms: the "
         "arm had no action in 7 periods. Let it compute on another machine"),
        (True, 0.01, 0, ""),
        (True, 0.05, 0, "no command is sent meanwhile, where the period is 20 ms: let it decide beside the "
         "arm (--policy process)"),
    ],
)  # fmt: skip
def test_a_policy_that_is_too_slow_for_its_arm_is_said_with_the_remedy(blocks, took, starved, says):
    runner = ChunkRunner(0.02, np.ones(2, bool), np.ones(2))
    bridge: Any = SimpleNamespace(chunks=runner, task=SimpleNamespace(period=0.02))
    assert slowness(bridge, blocks) == ""  # nothing was asked
    runner.ask(0.0, 0.0)
    runner.take(np.zeros((8, 2), np.float32), 0.0, 0.0, took)
    runner.schedule.counts["starved"] = starved
    told = slowness(bridge, blocks)
    assert says in told and bool(says) == bool(told)
    planned = slowness(bridge, blocks, plans=True)
    assert bool(planned) == bool(told) and ("--plan-candidates" in planned) == bool(planned)


def test_a_policy_elsewhere_says_its_instruction_which_is_recorded_and_no_other_is_taken(tmp_path):
    run = write_run(tmp_path / "run", task="pick_by_name", language=True, state=36)
    spec = ObsSpec(state=36, action=7, language=True)

    def told(client, **options):
        return instruction_of(DeployOptions(run=str(run), **options), spec, client)

    with served(run, lambda obs: np.zeros((8, 7)), "pick up the blue cube") as where:
        assert remote_actor(run_interface(str(run), "best", ""))[2].language  # asks for none here
        client = RemotePolicyClient(where, b"0123456789abcdef", patience=1.0)
        assert told(client, policy=where) == "pick up the blue cube"
        assert told(client, policy=where, instruction="pick up the blue cube") == "pick up the blue cube"
        with pytest.raises(UserError, match="is told 'pick up the blue cube', and --instruction says 'red'"):
            told(client, policy=where, instruction="red")
        client.ask({"state": np.zeros(36, np.float32)}, 0.5)  # and goes on
        assert client.poll(0.5)[0].shape == (8, 7)
        client.close()
    assert told(InProcessPolicy(lambda obs: obs), instruction="red") == "red"


def test_a_served_policy_answers_and_its_end_is_noticed(run, tmp_path):
    server = Command(tmp_path, ["serve", run, "--port", "0"])
    server.until(lambda: server.out.exists() and "clients prove the token" in server.out.read_text())
    first, second = server.out.read_text().splitlines()
    where = first.split(" on ")[-1]
    assert where.startswith("127.0.0.1:") and f"--policy {where} with --token {run / 'serve.token'}" in second
    assert (run / "serve.token").stat().st_mode & 0o777 == 0o600
    token = read_token(run / "serve.token")
    with pytest.raises(UserError, match="no token can be written to .*name another file: --token FILE"):
        read_token(run / "none" / "serve.token", make=True)
    with pytest.raises(UserError, match="has another token; give the one that robo_rl serve named"):
        RemotePolicyClient(where, token[:-1] + b"?")
    mind = RemotePolicyClient(where, token, patience=5.0)
    mind.ask({"state": np.zeros(36, np.float32)}, 1.25)
    rows, t0 = mind.poll(0.0)
    assert rows.shape == (8, 7) and t0 == 1.25 and mind.poll(0.0) is None
    with pytest.raises(UserError, match="the run's state has 36 numbers.*of this run: robo_rl serve RUN"):
        mind.ask({"state": np.zeros(5, np.float32)}, 2.0)
    mind.close()
    again = RemotePolicyClient(where, token, patience=5.0)
    server.signal(signal.SIGTERM)
    server.wait()
    with pytest.raises(UserError, match=f"the policy at {where} is lost"):
        for _ in range(100):
            again.ask({"state": np.zeros(36, np.float32)}, 1.0)
            again.poll(0.0)
            time.sleep(0.01)


def test_eval_runs_the_policy_on_the_arm(run, tmp_path):
    done = robo_rl(tmp_path, "eval", run, "--on", "arm", "--episodes", "2", "--envs", "2", "--json")
    assert done.code == 0, done
    result = json.loads(done.out)
    assert result["sim"] == "arm:pick_cube" and result["n"] == 2 and "eval-arm-" in result["file"]


def test_a_deployment_is_kept_as_a_data_set_and_as_a_bag(run, tmp_path):
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_typestore

    command = ["deploy", run, "--transport", "inprocess", "--seconds", "0.5", "--record", "data"]
    done = robo_rl(tmp_path, *command, "--bag", "bag")
    assert re.search(r"recorded [67] frames", done.out) and "bag with" in done.out, done
    data = load(tmp_path / "data")
    assert np.isfinite(data.final).all() and all(data.final_images(view)[1].all() for view in data.views)
    rows = int(re.search(r"rows (\d+) executed", done.out)[1])
    assert (
        data.meta.lengths.tolist() == [rows]
        and data.spec.sim == "arm"
        and data.spec.axes == axes_of("ee_delta")
    )
    assert (
        np.isfinite(data.state).all()
        and np.abs(data.action).max() <= 1
        and {data.sources[k] for k in data.source} == {"policy"}
    )
    with AnyReader([tmp_path / "bag"], default_typestore=get_typestore(Stores.ROS2_JAZZY)) as bag:
        counts = {c.topic: c.msgcount for c in bag.connections}
        at = [t for c, t, raw in bag.messages() if c.topic == "/target_joint"]
        offers = {
            c.topic: [(q.reliability.name, q.durability.name, q.depth) for q in c.ext.offered_qos_profiles]
            for c in bag.connections
        }
    assert offers["/joint_states"] == offers["/target_joint"] == [("RELIABLE", "VOLATILE", 1)]
    assert offered("latched").durability.name == "TRANSIENT_LOCAL"
    assert counts["/target_joint"] >= rows and {
        "/joint_states",
        "/objects/cube",
        "/gripper/joint_states",
    } <= set(counts)
    assert np.diff(at).mean() == pytest.approx(2e7, rel=0.01) and abs(at[0] / 1e9 - time.time()) < 600
    assert not list(tmp_path.glob(".*.tmp"))
    assert "bag exists: a bag is written once" in robo_rl(tmp_path, *command, "--bag", "bag").mistake
    robo_rl(tmp_path, *command)
    assert len(load(tmp_path / "data")) == 2


def recorded_deployment(folder, pictures):
    """What is in the data set of a deployment of four steps; pictures(): the cameras' at its end."""
    task = SimpleNamespace(image_size=8, period=0.02, state_names=("a", "b", "c"), views=("front",))
    recorder = DeployRecorder("pick_cube", None, task, record=str(folder), log=lambda line: None)
    buffer = SimpleNamespace(pictures=pictures)
    recorder.bridge = SimpleNamespace(observation_buffer=buffer, observation=lambda: np.ones(3))
    for _ in range(4):
        recorder.recording.append(np.zeros(3), {"image/front": np.zeros((8, 8, 3), np.uint8)}, np.zeros(7))
    recorder.look()
    return recorder


def test_an_episode_whose_camera_is_lost_in_the_end_is_kept(tmp_path):
    def pictures():
        raise UserError("no picture on front")

    recorded_deployment(tmp_path / "data", pictures).close()
    data = load(tmp_path / "data")
    assert len(data.action) == 4 and np.isnan(data.final).all() and not (tmp_path / "data" / JOURNAL).exists()


def test_an_episode_is_written_after_the_arms_topics_are_closed_with_what_was_seen_before(tmp_path):
    there = [True]

    def pictures():
        assert there[0], "this topic is closed"
        return {"image/front": np.full((8, 8, 3), 7, np.uint8)}

    recorder = recorded_deployment(tmp_path / "data", pictures)
    there[0] = False
    recorder.close()
    data = load(tmp_path / "data")
    assert data.final.tolist() == [[1, 1, 1]] and abs(data.final_image("front", 0).mean() - 7) < 2


# ---- the journal of a recording


THREE = Features(fps=50, state=("a", "b"), action=("x", "y"), views=(("front", 8, 8),))


def recording(folder, **more) -> ArmRecording:
    return ArmRecording(folder, THREE, log=lambda line: None, **more)


def append(rec: ArmRecording, count: int) -> None:
    for k in range(count):
        picture = {"image/front": np.full((8, 8, 3), 10 * k % 256, np.uint8)}
        rec.append(np.full(2, k, np.float32), picture, np.full(2, k / 100, np.float32))


KILLED = """
import os, signal, sys
import test_deploy
rec = test_deploy.recording(sys.argv[1], units="rad*2")
rec.task = "wave"
test_deploy.append(rec, 30)
while rec.written < 30:
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_deployment_recorded_is_added_by_data_repair_or_by_the_next_one(tmp_path, run):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    killed = [sys.executable, "-c", KILLED, tmp_path / "data"]
    assert subprocess.run(killed, env=env, check=False).returncode == -signal.SIGKILL
    with pytest.raises(UserError, match="no data set"):
        load(tmp_path / "data")
    done = robo_rl(tmp_path, "data", "repair", "data")
    assert "data: added 1 episode (30 frames) that an earlier recording left" in done.out, done
    data = load(tmp_path / "data")
    assert data.meta.lengths.tolist() == [30] and data.tasks == ["wave"] and not data.success.any()
    assert (data.state[:, 0] == np.arange(30)).all() and need_units(data.meta).unit == ("rad", "rad")
    assert np.abs(data.frames("front", 0).mean((1, 2, 3)) - 10 * np.arange(30) % 256).max() < 5
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [".lock", "data", "meta", "videos"]
    assert "added" not in robo_rl(tmp_path, "data", "repair", "data").out
    command = ["deploy", run, "--transport", "inprocess", "--seconds", "0.3", "--record"]
    assert "was made otherwise" in robo_rl(tmp_path, *command, "data").mistake
    robo_rl(tmp_path, *command, "again")
    left = recording(tmp_path / "left")
    append(left, 2)
    while left.written < 2:
        pass
    (tmp_path / "left" / JOURNAL).rename(tmp_path / "again" / JOURNAL)  # of another robot
    left.close()
    assert "again/recording.journal has what" in robo_rl(tmp_path, *command, "again").mistake


@pytest.mark.parametrize("committed", [False, True])
def test_an_episode_that_ended_before_the_kill_is_there_once_with_how_it_ended(tmp_path, committed):
    root, journal = tmp_path / "data", tmp_path / "data" / JOURNAL
    rec = recording(root)
    append(rec, 5)
    final = np.ones(2), {"image/front": np.full((8, 8, 3), 200, np.uint8)}
    assert rec.end_episode(success=True, terminated=True, reward=1, final=final).result() == 5
    rec.close()
    assert not journal.exists()
    again = recording(tmp_path / "other")
    append(again, 5)
    again.writer.close()
    again.writer = BrokenWriter()
    assert again.end_episode(success=True, terminated=True, reward=1, final=final).exception()
    with pytest.raises(UserError, match="what was recorded is in .*recording.journal: the next recording"):
        again.close()
    if committed:  # killed behind the commit of the data set
        (tmp_path / "other" / JOURNAL).rename(journal)
        assert recover(root) == []
    else:
        root = tmp_path / "other"
        assert recover(root) == [5]
    data = load(root)
    assert len(data) == 1 and data.success.all() and data.final.tolist() == [[1, 1]]
    assert data.reward.tolist() == [0, 0, 0, 0, 1] and abs(data.final_image("front", 0).mean() - 200) < 5
    assert not (root / JOURNAL).exists()


class BrokenWriter:
    """A data set that cannot be written."""

    episodes = 0

    def __len__(self):
        return 0

    def add(self, episode):
        pass

    def flush(self):
        raise UserError("cannot write the data set: No space left on device")

    def close(self):
        pass


def test_a_full_disk_ends_the_recording_and_not_the_motion_and_what_came_before_is_kept(tmp_path):
    lines, soft = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    rec = recording(tmp_path / "data", tell=lines.append)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, soft[1]))  # as if the disk ended there
        while not rec.failed:
            append(rec, 1)
            while rec.written < rec.given and not rec.failed:
                pass
        taken = rec.given
        append(rec, 3)
        ended = rec.end_episode()
        with pytest.raises(UserError, match=r"File too large; what was recorded is in .*recording.journal"):
            rec.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert len(lines) == 1 and "cannot write" in lines[0] and rec.given == taken and ended.exception()
    [kept] = recover(tmp_path / "data")
    assert 0 < kept == rec.written < taken


def test_a_disk_that_is_too_slow_ends_the_recording_and_does_not_hold_the_arm(tmp_path):
    lines, go = [], threading.Event()

    def sized(image):
        assert go.wait(60), "the control loop waits for the disk"
        return image

    rec = recording(tmp_path / "data", sized=sized, tell=lines.append)
    append(rec, 1)
    rec.most = 20
    append(rec, 50)
    assert rec.failed == "the disk is too slow" and rec.given == 20
    go.set()
    assert rec.end_episode().result() == 20
    rec.close()
    assert lines == ["the recording ends after 20 frames: the disk is too slow"]


def test_a_recordings_pictures_are_not_copied_to_memory(tmp_path):
    rec = recording(tmp_path / "data")
    append(rec, 5)
    while rec.written < 5:
        pass
    [(_, episode)] = episodes_of(scan(tmp_path / "data" / JOURNAL)[0], 0)
    assert not episode.images["front"].flags.owndata and not episode.images["front"].flags.contiguous
    assert (episode.images["front"][:, 0, 0, 0] == 10 * np.arange(5)).all()
    rows = [np.full(3, k) for k in range(4)]
    assert (stacked([rows[0], rows[2], rows[1]]) == [[0] * 3, [2] * 3, [1] * 3]).all()
    rec.close()


@pytest.mark.gl
@pytest.mark.skipif(not gl_backend(), reason=NO_GL)
def test_a_policy_of_pictures_sees_them_over_the_wire_and_is_filmed(tmp_path):
    run = write_run(tmp_path / "run", state=30, views=("front", "wrist"), language=True, obs="rgb")
    done = robo_rl(
        tmp_path,
        "deploy",
        run,
        "--transport",
        "inprocess",
        "--seconds",
        "0.3",
        "--record",
        "data",
        "--video",
        "a.mp4",
    )
    assert re.search(CHUNKS, done.out) and re.search(r"film of \d+ frames in a.mp4", done.out), done
    assert "pick_cube: no success in 0.3 s" in done.out, done  # judged by what it is not shown
    data = load(tmp_path / "data")
    assert data.views == {"front": (32, 32), "wrist": (32, 32)}
    assert data.frames("front", 0).std() > 10 and (tmp_path / "a.mp4").stat().st_size > 1000


@pytest.mark.gl
@pytest.mark.skipif(not gl_backend(), reason=NO_GL)
@pytest.mark.parametrize("dry", [False, True])
def test_a_deployment_is_filmed_whole_and_a_dry_run_is_not_called_a_failure(run, tmp_path, dry):
    from test_film import colour, frames_of

    done = robo_rl(
        tmp_path,
        "deploy",
        run,
        "--transport",
        "inprocess",
        "--seconds",
        "0.5",
        "--video",
        "a.mp4",
        *["--dry-run"] * dry,
    )
    assert done.code in (0, 1), done
    frames = frames_of(tmp_path / "a.mp4")
    # half a second, a second, the steps
    assert frames.shape[1:] == (480, 640, 3) and 1.5 * 12.5 < len(frames) <= 1.5 * 12.5 + 25 // 4
    assert [colour(f) for f in frames[[0, -1]]] == ["", "" if dry else "no success"]
    assert not (frames[0, 60:420] < 5).all(-1).any()  # light everywhere, not the black of policies' pictures
    assert f"film of {len(frames)} frames in a.mp4" in done.out


@pytest.mark.gl
@pytest.mark.skipif(not gl_backend(), reason=NO_GL)
def test_episodes_on_the_governed_arm_are_filmed(run, tmp_path):
    from test_film import frames_of, results_of

    done = robo_rl(
        tmp_path, "eval", run, "--on", "arm", "--episodes", "2", "--max-steps", "8", "--video", "a.mp4"
    )
    assert done.code == 0, done
    frames = frames_of(tmp_path / "a.mp4")
    assert frames.shape[1:] == (480, 640, 3) and results_of(frames) == ["", "no success"] * 4
    assert (
        "film it with robo_rl deploy --video"
        in robo_rl(tmp_path, "eval", run, "--on", "dds", "--video", "a.mp4").mistake
    )


@pytest.mark.gl
@pytest.mark.skipif(not gl_backend(), reason=NO_GL)
def test_the_arms_cameras_see_what_the_simulators_see():
    import sims
    from controllers.transport import CompressedImage, LoopbackTransport
    from robo_rl.experiment.cameras import SceneCameras
    from robo_rl.experiment.sim_arm import make_sim_arm

    _, node = make_sim_arm(SimArmOptions(lockstep=True, seconds=1, start=7))
    wire = LoopbackTransport(node.transport.bus, "client")
    eyes = SceneCameras(wire, "pick_cube", ("front", "wrist"), 64)
    box = wire.subscription(camera_topic("wrist"), CompressedImage)
    assert not eyes.publish()
    for _ in range(11):
        node.tick()
    assert eyes.publish()
    node.tick()
    env = sims.make("mujoco", "pick_cube", obs="rgb", image_size=64)
    direct = env.reset(options={"starts": np.array([7])})[0]
    for view, pixels in eyes.render()[1].items():
        off = np.abs(pixels.astype(int) - direct[f"image/{view}"][0]).mean()
        assert off < 1.5, f"{view} differs by {off:.2f} of 255"
    assert np.array_equal(picture(box.latest().message), eyes.render()[1]["wrist"])
    eyes.close()
    env.close()


def test_a_picture_of_another_size_is_cut_to_its_middle():
    import io

    from PIL import Image

    from controllers.transport import CompressedImage

    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 200
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "png")
    got = picture(CompressedImage(0.0, "front", "png", file.getvalue()), 10)
    assert got.shape == (10, 10, 3) and got[:, 1:9].min() > 150
    with pytest.raises(UserError, match="a picture of front cannot be read"):
        picture(CompressedImage(0.0, "front", "png", b"nothing"))


@pytest.mark.parametrize(
    ("make", "argv", "says"),
    [
        ({}, ["--robot", "fr4"], "unknown robot 'fr4'; did you mean 'fr3'?"),
        ({}, ["--robot", "ur5e"], "robot ur5e ships no model: name its MJCF or URDF as `model`"),
        ({}, ["--robot", "fr3"], "robot fr3 ships no model: name its MJCF or URDF as `model`"),
        ({}, ["--transport", "ddz"], "unknown transport 'ddz'; did you mean 'dds'?"),
        ({}, ["--speed", "0"], "--speed must be in (0, 1.5]"),
        ({}, ["--seconds", "nan"], "--seconds must be in (0, 86400]"),
        ({}, ["--policy", "127.0.0.1:9"], "serve.token does not exist"),
        ({}, ["--checkpoint", "step_9"], "has no checkpoint 'step_9'"),
        ({"control": "joint_delta", "state": 36}, [], "train with --control ee_delta"),
        ({"task": "open_drawer", "state": 34}, [], "does not fit the robot's topics: drawer"),
        ({"task": "Hopper-v5"}, [], "the run's task Hopper-v5 is no arm's"),
        ({"sim": "gym:Pendulum-v1", "task": ""}, [], "the run was trained in gym:Pendulum-v1"),
        ({"state": 12}, [], "the run's policy sees 12 numbers, its task has 36"),
        ({"language": True, "task": "pick_by_name"}, [], "takes an instruction: give it with --instruction"),
        ({}, ["--video", "a.avi"], "--video writes an mp4"),
        (
            {},
            ["--transport", "dds", "--dry-run", "--start", "1"],
            "--dry-run commands nothing, and --start does",
        ),
        ({}, ["--transport", "dds", "--dry-run", "--reset"], "--dry-run commands nothing, and --reset does"),
        ({}, ["--namespace", "left"], "no network: leave --namespace out"),
        ({}, ["--lease", "5"], "no network: leave --lease out"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, make, argv, says):
    run = write_run(tmp_path / "run", **make)
    assert says in robo_rl(tmp_path, "deploy", run, "--transport", "inprocess", *argv).mistake


class FullDisk:
    """A writer of bags on a disk that is full."""

    def add_connection(self, *_, **__):
        return 1

    def write(self, *_):
        raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_bag_and_not_the_motion_and_what_was_killed_stays(tmp_path):
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    draft = tmp_path / ".bag.tmp" / "bag"
    for content in (b"", b"chunks", b"more"):  # of killed ones
        draft.mkdir(parents=True)
        (draft / "bag.mcap").write_bytes(content)
        bag = BagWriter(tmp_path / "bag")
        bag.close()
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["bag.unfinished", "bag.unfinished1"]
    bag = BagWriter(tmp_path / "bag")
    bag.writer = FullDisk()
    bus = Bus(lambda: 0.0)
    heard = LoopbackTransport(bus, "arm").subscription("target", Text, depth=4)
    sender = recorded(LoopbackTransport(bus, "bridge"), bag).publisher("target", Text)
    for word in ("a", "b"):
        sender.publish(Text(word))
    assert [got.message.data for got in heard.take()] == ["a", "b"]
    with pytest.raises(UserError, match="is not whole: No space left on device; what was written lies in"):
        bag.close()


def test_an_instruction_for_a_policy_that_takes_none_is_told_to_be_recorded_alone(run, tmp_path):
    said = []
    choose_actor(DeployOptions(run=str(run), transport="inprocess", instruction="push it"), said.append)
    assert len(said) == 1 and "takes no instruction: --instruction is recorded" in said[0]


def test_a_policy_elsewhere_needs_an_address_and_a_token_that_nobody_else_can_read(run, tmp_path):
    def said(*argv, **env):
        return robo_rl(tmp_path, "deploy", run, "--transport", "inprocess", *argv, env=env).mistake

    known = {"ROBO_RL_TOKEN": "x" * 32}
    assert "a policy's address is host:port" in said("--policy", "nowhere", **known)
    assert "no policy answers at 127.0.0.1:9" in said("--policy", "127.0.0.1:9", **known)
    assert "ROBO_RL_TOKEN must hold a token of 16 to 1024" in said(
        "--policy", "127.0.0.1:9", ROBO_RL_TOKEN="short"
    )
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o644)
    assert "others may read it; close it with: chmod 600" in said(
        "--policy", "127.0.0.1:9", "--token", "token"
    )
    (tmp_path / "token").chmod(0o600)
    assert "no policy answers at 127.0.0.1:9" in said("--policy", "127.0.0.1:9", "--token", "token")


def test_no_run_and_no_arm_are_one_line_each(run, tmp_path):
    assert "does not exist" in robo_rl(tmp_path, "deploy", "nowhere").mistake
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    kept = ("--record", "data", "--bag", "bag")
    said = robo_rl(tmp_path, "deploy", run, "--domain", 102 + os.getpid() % 100, *kept).mistake
    assert "nothing came on joint_states" in said and "robo_rl sim-arm" in said
    assert not [x.name for x in tmp_path.iterdir() if "data" in x.name or "bag" in x.name]
    assert (
        "no name of a network interface"
        in robo_rl(tmp_path, "sim-arm", "--interface", 'a"b', "--seconds", "1").mistake
    )
    assert (
        "cannot use the network interface nosuch0"
        in robo_rl(tmp_path, "deploy", run, "--interface", "nosuch0").err
    )


def test_without_the_extra_both_say_how_to_install_it(run, tmp_path):
    for argv in (["sim-arm"], ["deploy", run]):
        assert "pip install 'robo_rl[robot]'" in robo_rl(tmp_path, *argv, absent=("cyclonedds",)).mistake


def test_sim_arm_in_lockstep_says_how_the_arm_is(tmp_path):
    done = robo_rl(tmp_path, "sim-arm", "--lockstep", "--seconds", "0.5", "--scene", "none", "--push", "20")
    assert done.code == 0 and done.out.startswith("DISARMED · tool 0.4") and "0.5 s simulated" in done.out
    assert "unknown scene 'kitchen'" in robo_rl(tmp_path, "sim-arm", "--scene", "kitchen").mistake


def test_an_arm_that_lacks_what_the_policy_sees_is_not_armed(run, tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    domain = dds_domain()
    arm = Command(tmp_path, ["sim-arm", "--domain", domain, "--scene", "none", "--seconds", "120"])
    arm.until(lambda: arm.out.exists() and "on the wire" in arm.out.read_text())
    done = robo_rl(tmp_path, "deploy", run, "--domain", domain, "--seconds", "1")
    assert (
        f"nothing came on objects/cube: is the arm there (robo_rl sim-arm), in domain {domain}"
        in done.mistake
    )
    assert f"waiting up to 5 s in domain {domain}, interface lo for " in done.err
    arm.signal(signal.SIGINT)
    assert arm.wait().out.splitlines()[-1].startswith("DISARMED · tool")


def test_a_policy_that_pushes_is_judged_and_filmed_with_the_mark(tmp_path):
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    tiny = ["--algo", "bc", "--demos", 2, "--demos-most", 0, "--bc.updates", 2, "--policy.hidden", 16]
    tiny += ["--eval-episodes", 2, "--eval-envs", 2, "--no-video", "--workers", 0, "--threads", 1]
    assert robo_rl(tmp_path, "train", "--task", "push_cube", *tiny, "--out", "run").code == 0
    how = ["--transport", "inprocess", "--seconds", "0.3", "--video", "a.mp4", "--record", "data"]
    done = robo_rl(tmp_path, "deploy", "run", *how)
    assert "goal is 0.001 m high" in done.out and "push_cube: no success in 0.3 s" in done.out, done
    names = json.loads((tmp_path / "data/meta/info.json").read_text())["features"]["observation.state"][
        "names"
    ]
    assert {"goal_dx", "cube_dx"} < {*names}
    assert load(tmp_path / "data").task(0) == "push the cube onto the green mark"


def test_two_terminals(run, tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    domain = dds_domain()
    arm = Command(tmp_path, ["sim-arm", "--domain", domain, "--namespace", "left", "--seconds", "120"])
    arm.until(lambda: arm.out.exists() and "on the wire" in arm.out.read_text())
    done = robo_rl(tmp_path, "deploy", run, "--domain", domain, "--namespace", "left", "--seconds", "1")
    assert "commanding" in done.out and re.search(CHUNKS, done.out), done
    other = connect("ann", domain, namespace="left")
    ann = LeaseClient(other, "ann", 60)
    ann.claim(lambda condition, seconds: time.sleep(seconds) or condition(), 20)
    argv = ("--domain", domain, "--namespace", "left", "--lease", 0.5, "--record", "none")
    done = robo_rl(tmp_path, "deploy", run, *argv)
    assert done.code == 2 and re.search("robo_rl: claim deploy-.*: ann holds the arm$", done.err), done
    assert "Traceback" not in done.err and not (tmp_path / "none" / "meta").exists()
    ann.release()
    other.close()
    done = robo_rl(
        tmp_path,
        "eval",
        run,
        "--on",
        "dds",
        "--domain",
        domain,
        "--namespace",
        "left",
        "--episodes",
        "1",
        "--json",
    )
    assert done.code == 0, done
    live = json.loads(Path(json.loads(done.out)["file"]).read_text())["live"]
    assert live["steps"] > 0 and live["act_after_s"]["median"] >= 0
    arm.signal(signal.SIGINT)
    end = arm.wait()
    assert end.code == 0 and "ticks, period median" in end.out, end
    # a busy machine may let more than the arm's command_timeout pass: then the evaluation says that it held
    stopped = "STOPPED (held for" in end.out and live["stops"]
    assert "DISARMED (disarmed) · tool" in end.out or stopped, (end, live)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ServeOptions(run="x", port=70000), "--port"),
        (lambda: ServeOptions(run="x", seed=-1), "--seed"),
        (lambda: ServeOptions(run="x", clients=0), "--clients"),
        (lambda: ServeOptions(run="x", idle=float("nan")), "--idle"),
        (lambda: CameraOptions(size=4), "--size"),
        (lambda: CameraOptions(format="gif"), "unknown --format 'gif'"),
        (lambda: SimArmOptions(cameras=("front",), scene="none"), "--cameras need a scene"),
        (lambda: DeployOptions(run="x", domain=300), "--domain"),
        (lambda: DeployOptions(run="x", start=-2), "--start"),
    ],
)
def test_wrong_numbers_are_one_line(make, says):
    with pytest.raises(UserError, match=says):
        make()
