"""`robo_rl console RUN`: a web page on which people watch N robots, take over, and teach.

One thread steps the robots at the control period and draws them; another serves the page and its WebSockets
(`console_server`). Between them stand the `Desk` (who wants what, under one lock) and the newest pictures.
Frames in which a person acts are journaled before they count, finished episodes go to RUN/corrections
(LeRobot v3), from which `robo_rl correct RUN --operator console` learns. What cannot be saved is told on the
page and tried again; the robots go on.
"""

import os
import secrets
import select
import signal
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from robo_rl.errors import MissingDependency, UserError, in_range

CONSOLE_START = 1_100_000_000  # starts of the console's episodes
LIMIT = 40  # episodes end after this many times the task's own limit
STUCK = 0.02  # change of the normalised state over a second (RMS) below which a robot is stuck
BLEND = 0.06  # s of wall clock
JOURNAL = 20_000_000  # bytes after which the journal is written anew
RETRY = 3.0  # s until what could not be saved is tried again
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class Console:
    """Watch N robots under a run's policy in the browser, take over, correct."""

    run: tyro.conf.Positional[str]
    """Run folder."""
    checkpoint: str = "best"
    robots: int = 4
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback lets other machines in (they still need a token)."""
    port: int = 8765
    """0: any free one."""
    url: str = ""
    """Address that people open where a reverse proxy stands in front, like https://console.lab.example."""
    operators: str = "operator"
    """Comma list of names; each gets an address that works once (Enter in the terminal: new ones)."""
    speed: float = 0.5
    """Pace of the simulation; 1: real time."""
    size: int = 480
    """Pixels of the pictures of the robot that somebody looks at, from every camera."""
    fps: float = 20.0
    """Most pictures per second and robot."""
    max_delay: float = 1.0
    """Age of the picture on an operator's page, in seconds, above which what they hold stands still."""
    patience: float = 60.0
    """Seconds that a robot waits for help before its episode is given up as a failure."""
    device: str = ""
    """gamepad:/dev/input/js0 or spacemouse:/dev/hidraw0 on this machine, or leader:NAMESPACE, an arm on the
    wire that publishes its pose (robo_rl sim-arm, a real one): drives what the first operator holds. (A
    gamepad on the browser's machine needs no option.)
    """
    seed: int = 0
    threads: int = 1
    seconds: float = 0.0
    """Stop after this time; 0: run until Ctrl-C."""

    def __post_init__(self) -> None:
        for name, low, high in (("robots", 1, 64), ("port", 0, 65535), ("size", 48, 1024), ("fps", 1, 60),
                                ("patience", 1, 1e6), ("seed", 0, 2000), ("threads", 0, 4096), ("seconds", 0, 1e9),
                                ("max_delay", 0.1, 3600)):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        in_range("--speed", self.speed, 0, 10, open_low=True)
        names = self.operators.split(",")
        if len(set(names)) < len(names) or not all(n.isidentifier() for n in names):
            raise UserError(f"--operators must be different names of letters and digits with commas between, got "
                            f"{self.operators!r}")
        parts = urllib.parse.urlsplit(self.url)
        if self.url and not (parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/")):
            raise UserError(f"--url must be a scheme and a name, like https://console.lab.example, got {self.url!r}")


def run(args: Console) -> int:
    """Serve until Ctrl-C."""
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise MissingDependency("the console needs websockets: pip install 'robo_rl[console]'") from None
    from robo_rl.experiment.evaluation import pick_checkpoint
    from robo_rl.experiment.train import run_config
    from robo_rl.human.console.server import Server

    source, folder = pick_checkpoint(Path(args.run), args.checkpoint)
    config = replace(run_config(source), threads=args.threads)
    with Signals() as signals:
        floor = Floor(args, config, source, folder)
        try:
            server = Server(floor, args.host, args.port, args.operators, args.url)
            server.start()
            if args.host not in LOOPBACK:
                print(f"robo_rl: listening on {args.host}: everybody who can reach this machine and has an address "
                      "can move the robots, and nothing is encrypted (docs/human.md: ssh -L, or a proxy with TLS)")
            announce(server)
            floor.work(signals, args.seconds, lambda: announce(server, renew=True))
            server.stop()
        finally:
            floor.close()
    print(f"stopped; corrections: {floor.data} ({floor.kept} episodes with help). Learn from them: "
          f"robo_rl correct {source} --operator console")
    return 0


def announce(server, renew: bool = False) -> None:
    """Print an address per operator; renew: new ones, and the old sessions end."""
    if renew:
        server.renew()
    for name, address in server.addresses().items():
        print(f"{name}: {address}", flush=True)
    print("Each address works once. New ones, old sessions end: press Enter here, or "
          f"kill -USR1 {os.getpid()}", flush=True)


class Signals:
    """While open: SIGINT and SIGTERM ask for the end, SIGUSR1 and Enter in the terminal for new addresses."""

    stop = renew = False

    def __enter__(self):
        flags = {signal.SIGINT: "stop", signal.SIGTERM: "stop", signal.SIGUSR1: "renew"}
        self._before = {s: signal.signal(s, lambda *_, flag=flag: setattr(self, flag, True))
                        for s, flag in flags.items()}
        return self

    def __exit__(self, *error) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def wants_new_addresses(self) -> bool:
        """Whether somebody asked since the last call."""
        asked, self.renew = self.renew, False
        return asked or enter_pressed()


def enter_pressed() -> bool:
    """Whether a line waits in the terminal (which is read); False without one, or if it is another job's."""
    try:
        here = sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
        return here and bool(select.select([0], [], [], 0)[0]) and os.read(0, 4096) != b""
    except (OSError, ValueError, AttributeError):
        return False


# ---------------------------------------------------------------------------------------------------- the robots


class Floor:
    """The robots, stepped by one thread; everything else reaches them through `desk`, `lock` and `orders`."""

    def __init__(self, args: Console, config, source: Path, checkpoint: Path):
        import numpy as np
        import torch

        from robo_rl.checkpoint import load_policy
        from robo_rl.data.writer import Writer
        from robo_rl.experiment.train import make_env
        from robo_rl.human.console.access import Reserve
        from robo_rl.human.console.cameras import Cameras, Frame
        from robo_rl.human.desk import Desk
        from robo_rl.human.devices import open_device
        from robo_rl.human.intervene import Intervene
        from robo_rl.human.journal import Journal, scan, unfinished
        from robo_rl.human.practice import Robots

        torch.set_num_threads(1)
        self.args, self.data = args, source / "corrections"
        self.reserve, self.trouble, self.retry = Reserve(), "", 0.0
        self.policy, _ = load_policy(checkpoint)
        probe = make_env(config, 1)
        self.limit = probe.spec.max_steps
        probe.close()
        inner = make_env(replace(config, max_steps=LIMIT * self.limit), args.robots, render=config.obs != "rgb")
        self.spec = inner.spec
        self.pace = self.spec.period / args.speed
        delay = max(args.max_delay, 3 * self.pace, 3 / args.fps)
        self.desk = Desk(args.robots, len(self.spec.axes), args.patience, max_delay=delay)
        self.lock = threading.Lock()
        self.env = Intervene(inner, self.desk, blend=BLEND * args.speed, freeze=hasattr(inner, "get_state"))
        self.writer, path = Writer(self.data, spec=self.spec), source / "console.journal"
        self.kept, self.recovered = 0, 0
        for episode in unfinished(scan(path)[0], self.writer.episodes):  # of a console that was killed
            self.writer.add(episode)
            self.recovered += 1
        self.writer.flush()
        self.journal = Journal(path)
        self.journal.replace()
        self.names = [""] * args.robots  # of the episodes in the journal
        self.written = [0] * args.robots  # frames of each tape that the journal has
        first = CONSOLE_START + args.seed * 100_000 + int(time.time()) % 50_000 * 1_000
        self.robots = Robots(self.env, self.policy, iter(range(first, first + 10**9)), seed=args.seed, done=self.keep,
                             rewindable=self.env.freeze)
        self.robots.account.operators = len(args.operators.split(","))
        self.device = open_device(args.device, self.leader) if args.device else None
        self.led = 0  # number of the hold that a leader arm is aligned with
        self.numbers = [0] * args.robots  # of the holds in the step before
        self.orders: list[tuple] = []  # (what, robot, ...) for the stepping thread
        self.cameras = Cameras(self.env, args.size)
        self.looks: dict[str, int] = {}  # operator -> the robot that their page shows large
        self.frame = Frame(0, time.monotonic())
        self.results = np.zeros((args.robots, 2), int)  # successes, failures
        self.still, self.due = [None] * args.robots, [self.limit] * args.robots
        self.drawn, self.cost, self.rate, self.blind = 0.0, 0.0, 0.0, ""
        self.people: set[str] = set()
        self.shown = self.robots.account.summary()
        for i in range(args.robots):
            self.name(i)

    def leader(self, namespace: str):
        """A leader arm whose topics begin with `namespace` ("": with none)."""
        from robo_rl.experiment.wire import connect
        from robo_rl.human.devices import LeaderArm, tool_of
        tool_of(self.robots.obs["state"][0], self.spec.state_names)
        steps = [next((a.high for a in self.spec.axes if a.kind == "delta" and a.unit == unit), 0.0)
                 for unit in ("m", "rad")]
        if not all(steps):
            raise UserError("a leader arm moves the hand: it needs a run of --control ee_delta")
        return LeaderArm(Heard(connect("robo_rl_console", namespace=namespace)), (steps[0], steps[1]))

    def name(self, i: int) -> None:
        """A name for robot i's episode in the journal, with nothing written yet."""
        self.names[i], self.written[i] = secrets.token_hex(6), 0

    def close(self) -> None:
        """Episodes with help that nobody finished are kept as they are."""
        from robo_rl.human.practice import episode_of
        for i, tape in enumerate(self.robots.tapes):
            if any(r[3] for r in tape.rows):
                episode = episode_of(tape, self.robots.views, False, False, self.robots.seen_by(i))
                if episode is not None:
                    self.keep(episode, i)
        self.save()
        try:
            if self.trouble:
                print(f"robo_rl: {self.trouble}; what people did is in {self.journal.path}, and the next robo_rl "
                      "console of this run puts it into the data set", file=sys.stderr, flush=True)
            else:
                self.writer.close()
                self.journal.replace()
        finally:
            self.reserve.close()
            self.journal.abandon()
            self.env.close()

    def keep(self, episode, i: int) -> None:
        """A finished episode; those with help go to the data set."""
        helped = "human" in episode.source
        self.journal.close_episode(self.names[i], len(self.writer) if helped else -1)
        self.name(i)
        if helped:
            self.save(episode)
            self.kept += 1

    def save(self, *episodes) -> None:
        """Journal and finished episodes to the disk. What fails is told on the page and tried again."""
        with self.reserve:
            try:
                for episode in episodes:
                    self.writer.add(episode)
                self.journal.commit()
                self.writer.flush()
                self.trouble = ""
            except (OSError, UserError) as e:
                why = (e.strerror or str(e)) if isinstance(e, OSError) else str(e)
                self.trouble = f"corrections are not saved yet, trying again ({why})"
                self.retry = time.monotonic() + RETRY

    def arrived(self, who: str) -> None:
        """An operator's page is open."""
        with self.lock:
            self.people.add(who)
            self.looks.setdefault(who, 0)

    def left(self, who: str) -> None:
        """And closed: what they hold stops."""
        with self.lock:
            self.people.discard(who)
            self.looks.pop(who, None)
            self.desk.lost(who)

    def work(self, signals: Signals, seconds: float = 0.0, renew=lambda: None) -> None:
        """Step at the pace until asked to stop; `renew()` runs when somebody asks for new addresses."""
        began = due = time.monotonic()
        while not signals.stop and not (seconds and time.monotonic() - began > seconds):
            due = max(due + self.pace, time.monotonic() - 5 * self.pace)
            self.tick()
            if self.trouble and time.monotonic() > self.retry:
                self.save()
            if self.journal.size > JOURNAL and not self.trouble:
                self.compact()
            if signals.wants_new_addresses():
                renew()
            time.sleep(max(0.0, due - time.monotonic()))

    def tick(self) -> None:
        """Orders, one control step, the journal, pictures."""
        with self.lock:
            orders, self.orders = self.orders, []
        for order in orders:
            self.obey(*order)
        robots, began = self.robots, time.monotonic()
        with self.lock:
            self.handheld()
            numbers = [hold.number if hold else 0 for hold in self.desk.holds]
            self.robots.helping[[n == 0 or n != m for n, m in zip(numbers, self.numbers, strict=True)]] = False
            self.numbers = numbers  # another hold is another intervention
            self.env.sources()  # what people want now, under the lock; the step itself needs none
        ended = robots.step()
        with self.lock:
            for i in ended.nonzero()[0]:
                self.ended(int(i), "it succeeded" if robots.won[i] else "its time was over", bool(robots.won[i]))
        self.finish_marked()
        with self.lock:
            self.detect()
        self.write()
        self.rate = 0.95 * self.rate + 0.05 / max(self.pace, time.monotonic() - began)
        now, gap = time.monotonic(), max(1 / self.args.fps, 2 * self.cost)
        if now - self.drawn >= gap:  # late pictures are made up for by one, so that --fps holds on average
            self.drawn = max(self.drawn + gap, now - gap)
            self.draw()

    def handheld(self) -> None:
        """The device at this machine drives what the first operator holds; unplugged, it stops that robot."""
        if self.device is None:
            return
        from robo_rl.human.devices import LeaderArm, command, tool_of
        from robo_rl.human.intervene import CORRECTION, PAUSE
        reading, first = self.device.read(), self.args.operators.split(",")[0]
        leads = isinstance(self.device, LeaderArm)
        for i, hold in enumerate(self.desk.holds):
            if hold is None or hold.operator != first:
                continue
            if leads and not (self.device.aligned and self.led == hold.number):
                self.device.align(*tool_of(self.robots.obs["state"][i], self.spec.state_names))
                self.led = hold.number
                continue
            if self.device.gone:
                self.desk.pause("the device, which is gone", i, True)
            elif reading.engaged:
                hold.action = command(reading, self.spec, 1.0 if leads else 0.5)
                hold.heard, hold.phase = self.desk.clock(), hold.phase if hold.phase > PAUSE else CORRECTION
        if self.device.gone:
            self.device = None

    def write(self) -> None:
        """New frames to the journal, on the disk at once where a person acted; only then they count."""
        helped = [self.append(i, tape) for i, tape in enumerate(self.robots.tapes)]
        if (any(helped) or len(self.journal) > 1000) and not self.trouble:
            self.save()
        if not self.trouble:
            self.shown = self.robots.account.summary()

    def compact(self) -> None:
        """The journal anew, with the episodes that are not over."""
        self.save()
        if self.trouble:
            return
        self.written = [0] * self.args.robots
        for i, tape in enumerate(self.robots.tapes):
            self.append(i, tape)
        with self.reserve:
            try:
                self.journal.replace()
            except (OSError, UserError) as e:  # the old one holds all of it
                self.trouble = f"the journal is not written anew, trying again ({e})"
                self.retry = time.monotonic() + RETRY

    def append(self, i: int, tape) -> bool:
        """Frames of a tape that the journal does not have -> whether a person acted in one."""
        helped = False
        for state, action, reward, source, phase, images in tape.rows[self.written[i]:]:
            self.journal.frame(self.names[i], tape.start, tape.task, state, action, reward, source, phase, images)
            helped |= source == 1
        self.written[i] = len(tape.rows)
        return helped

    def ended(self, i: int, how: str, success: bool) -> None:
        self.results[i, 0 if success else 1] += 1
        self.desk.ended(i, how)
        self.still[i], self.due[i] = None, self.limit

    def finish_marked(self) -> None:
        """End the episodes that people marked or that nobody came for."""
        import numpy as np
        with self.lock:
            given_up = self.desk.given_up()
            over = [(i, self.desk.marks[i]) for i in range(self.args.robots) if self.desk.marks[i] is not None
                    or i in given_up]
        done = np.zeros(self.args.robots, bool)
        for i, mark in over:
            success = mark is not None and mark.success
            self.robots.finish(i, success, success)  # writes; not under the lock
            how = f"{mark.operator} marked it a {'success' if success else 'failure'}" if mark else "nobody came"
            with self.lock:
                self.ended(i, how, success)
            done[i] = True
        if done.any():
            self.robots.renew(done)

    def obey(self, what: str, i: int, *rest) -> None:
        """An order of the page that touches the robots: go back."""
        if what == "rewind":
            seconds, = rest
            tape = self.robots.tapes[i]
            back = self.robots.rewind(i, max(0, len(tape.rows) - round(seconds / self.spec.period)))
            if back:
                self.journal.close_episode(self.names[i], -1)
                self.name(i)

    def detect(self) -> None:
        """Call for help where a robot under its policy is over its time or stands still."""
        import numpy as np
        taken = self.env.steps
        for i in range(self.args.robots):
            if self.desk.holds[i] is not None or self.desk.paused[i] or self.desk.why[i]:
                self.still[i] = None
                continue
            steps, now = int(taken[i]), self.robots.obs["state"][i]
            if steps >= self.due[i]:
                self.due[i] = steps + self.limit
                self.desk.call(i, f"not done after {steps * self.spec.period:.1f} s")
            if self.still[i] is None or steps - self.still[i][0] >= round(1 / self.spec.period):
                if self.still[i] is not None:
                    std = self.policy.obs_norm.std.numpy() if hasattr(self.policy.obs_norm, "std") else 1.0
                    if float(np.sqrt(np.mean(((now - self.still[i][1]) / np.maximum(std, 1e-3)) ** 2))) < STUCK:
                        self.desk.call(i, "it stands still")
                self.still[i] = (steps, now.copy())

    def draw(self) -> None:
        """The newest pictures: every robot small, those that somebody looks at from every camera."""
        began = time.monotonic()
        with self.lock:
            large = sorted(set(self.looks.values()))
        try:
            self.frame = self.cameras.frame(self.frame.number + 1, began, self.robots.obs, large)
            self.blind = ""
        except (OSError, RuntimeError, UserError) as e:
            if not self.frame.small:
                raise  # there never was one: no OpenGL
            self.blind = f"no new pictures ({e})"
        self.cost = time.monotonic() - began

    def apart(self, i: int) -> str:
        """How far a leader arm is from the robot it is to lead; "" where it is there, or leads none."""
        hold, away = self.desk.holds[i], getattr(self.device, "away", None)
        if away is None or hold is None or hold.operator != self.args.operators.split(",")[0] or self.device.aligned:
            return ""
        return "the leader arm is silent" if away[0] == float("inf") else (
            f"bring the leader arm to the robot's tool: {away[0] * 100:.0f} cm and {away[1] * 57.3:.0f} degrees away")

    def state(self, who: str) -> dict:
        """What operator `who` sees; call it under the lock."""
        from robo_rl.data.episode import PHASES
        from robo_rl.human.console.cameras import words_of
        desk, now, steps, out = self.desk, self.desk.clock(), self.env.steps, []
        for i in range(self.args.robots):
            hold, mine = desk.holds[i], desk.holds[i] is not None and desk.holds[i].operator == who
            out.append({"phase": PHASES[int(self.robots.phase[i])], "holder": hold.operator if hold else "",
                        "number": hold.number if mine else 0, "late": mine and hold.delay > desk.max_delay,
                        "why": desk.why[i], "paused": desk.paused[i],
                        "waiting": round(now - desk.asked[i], 1) if desk.why[i] else 0.0,
                        "episode": int(desk.episode[i]), "last": desk.last[i],
                        "time": round(int(steps[i]) * self.spec.period, 2),
                        "task": self.apart(i) or self.robots.tapes[i].task,
                        "successes": int(self.results[i, 0]), "failures": int(self.results[i, 1])})
        s = self.shown
        total = self.results.sum(0)
        return {"t": "state", "robots": out, "you": who, "limit": round(self.limit * self.spec.period, 2),
                "axes": [{"name": a.name, "kind": a.kind, "unit": a.unit, "words": words_of(a)}
                         for a in self.spec.axes],
                "views": self.cameras.views, "max_delay": desk.max_delay, "trouble": self.trouble or self.blind,
                "people": sorted(self.people), "rate": round(self.rate, 1), "pace": self.args.speed,
                "account": {"operator_minutes": round(s["operator_minutes"], 2), "interventions": s["interventions"],
                            "per_hour": round(s["interventions_per_hour"]), "human": round(100 * s["human_share"], 1),
                            "human_steps": s["human_steps"], "first_ms": [round(1000 * x, 1)
                                                                          for x in desk.latencies[-20:]],
                            "reaction": round(sum(desk.reactions) / len(desk.reactions), 1) if desk.reactions else 0,
                            "successes": int(total[0]), "episodes": int(total.sum()), "kept": self.kept,
                            "unsaved": len(self.writer) - self.writer.episodes}}


class Heard:
    """() -> (position, quaternion, gripper -1 .. 1) that an arm on the wire said last; None: it is silent."""

    def __init__(self, wire):
        from controllers.node import GRIPPER_STATE
        from controllers.transport import JointState, PoseStamped
        self.wire = wire
        self.pose = wire.subscription("current_pose", PoseStamped)
        self.gripper = wire.subscription(GRIPPER_STATE, JointState)

    def __call__(self):
        from robo_rl.human.devices import SILENCE
        got, grip = self.pose.latest(), self.gripper.latest()
        if got is None or self.wire.now() - got.at > SILENCE:
            return None
        opening = grip.message.position[0] if grip is not None and grip.message.position else 1.0
        return got.message.pos, got.message.quat, 1.0 if opening > 0.5 else -1.0
