"""A graph of processes: started in order, watched, and stopped together."""

import queue
import signal
import string
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import tyro

from robo_rl.errors import UserError, in_range
from robo_rl.files import read_json
from robo_rl.signals import asked_to_stop

FIELDS = {"name": str, "command": list, "after": list, "ready": str, "ends": bool}
GRACE = (5.0, 3.0)  # s after SIGINT until SIGTERM, and after that until SIGKILL


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """Bring up the processes of a spec; Ctrl-C, or the end of the one that `ends`, takes all of them down."""

    spec: tyro.conf.Positional[str]
    """JSON file, for example launch/pick_cube.json."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An argument of the spec, as name=value; as often as needed."""
    wait: float = 30.0
    """Longest time until a process is ready [s], up to 3600."""
    show: bool = False
    """Only print the commands, start nothing."""

    def __post_init__(self) -> None:
        in_range("--wait", self.wait, 0, 3600, open_low=True)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. after: names that must be ready before; ready: text in its output that says it is ("": at
    once);
    ends: its end is the end of all, with its status. Any other that ends is a failure."""

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    ready: str = ""
    ends: bool = False


def read_spec(path: Path, settings: tuple[str, ...] = ()) -> list[ProcessSpec]:
    """Parts of a spec in the order to start them, arguments filled in. UserError says what is wrong where."""
    a_spec = 'a spec is {"about", "args": {name: default}, "processes": [...]}'
    raw = read_json(path, limit=1 << 20, remedy=a_spec)
    if set(raw) - {"about", "args", "processes"} or not isinstance(raw.get("processes"), list):
        raise UserError(f"{path}: {a_spec}")
    values = dict(raw.get("args", {}))
    for item in settings:
        name, equals, value = item.partition("=")
        if not equals or name not in values:
            raise UserError(f"--set takes name=value, got {item!r}. Allowed: {', '.join(values) or 'none'}")
        values[name] = value
    parts: list[ProcessSpec] = []
    for k, p in enumerate(raw["processes"]):
        where = f"{path}: process {p.get('name', k) if isinstance(p, dict) else k}"
        if not isinstance(p, dict) or set(p) - set(FIELDS) or not {"name", "command"} <= set(p):
            raise UserError(f"{where} needs name and command, and may have after, ready, ends")
        for field, kind in FIELDS.items():
            if field in p and not isinstance(p[field], kind):
                raise UserError(f"{where}: {field} must be {kind.__name__}, got {p[field]!r}")
        words = []
        for word in p["command"]:
            needs = [f for _, f, _, _ in string.Formatter().parse(str(word)) if f is not None]
            for name in needs:
                if values.get(name) in (None, ""):
                    raise UserError(
                        f"{where} needs {name}: add --set {name}=VALUE"
                        if name in values
                        else f"{where}: {{{name}}} is no argument of the spec. Allowed: {', '.join(values)}"
                    )
            words.append(str(word).format(**values))
        if not words:
            raise UserError(f"{where} has an empty command")
        late = [a for a in p.get("after", []) if a not in [q.name for q in parts]]
        if late or p["name"] in [q.name for q in parts]:
            why = f"after names {', '.join(map(str, late))}, which is not above it" if late else "named twice"
            raise UserError(f"{where}: {why}")
        parts.append(
            ProcessSpec(
                p["name"], tuple(words), tuple(p.get("after", ())), p.get("ready", ""), p.get("ends", False)
            )
        )
    if not parts:
        raise UserError(f"{path}: it has no processes")
    return parts


class ProcessGroup:
    """Processes that run; their output in one queue."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen] = {}
        self.lines: queue.Queue[tuple[str, str]] = queue.Queue()
        self.ready: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def start(self, part: ProcessSpec) -> None:
        """Start a process. UserError: its program cannot be run."""
        command = (
            [sys.executable, "-m", "robo_rl", *part.command[1:]]
            if part.command[0] == "robo_rl"
            else list(part.command)
        )
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        except OSError as e:
            raise UserError(f"{part.name}: cannot start {part.command[0]} ({e.strerror})") from None
        self.running[part.name] = process
        if not part.ready:
            self.ready.add(part.name)
        threading.Thread(target=self._read, args=(part, process), daemon=True).start()

    def _read(self, part: ProcessSpec, process: subprocess.Popen) -> None:
        for line in process.stdout or ():  # a pipe
            if part.ready and part.ready in line:
                self.ready.add(part.name)
            self.lines.put((part.name, line.rstrip()))

    def print_output(self) -> None:
        """Print the lines that came, each with its process's name."""
        while not self.lines.empty():
            name, line = self.lines.get()
            print(f"[{name}] {line}", flush=True)

    def stop(self) -> None:
        """SIGINT, then SIGTERM, then SIGKILL, last started first."""
        for number, grace in ((signal.SIGINT, GRACE[0]), (signal.SIGTERM, GRACE[1]), (signal.SIGKILL, 5.0)):
            left = [p for p in reversed(self.running.values()) if p.poll() is None]
            for p in left:
                p.send_signal(number)
            end = time.monotonic() + grace
            while any(p.poll() is None for p in left) and time.monotonic() < end:
                self.print_output()
                time.sleep(0.02)
        time.sleep(0.1)
        self.print_output()


def run_processes(parts: list[ProcessSpec], wait: float = 30.0) -> int:
    """Run the processes until one of them ends or the user asks for the end -> exit status: of the process
    that `ends`; 1 where another one ended well or was not ready within `wait` [s]; 130 at Ctrl-C."""
    waiting, began = list(parts), time.monotonic()
    with asked_to_stop() as stop, ProcessGroup() as group:
        while not stop:
            while waiting and set(waiting[0].after) <= group.ready:
                group.start(waiting.pop(0))
                began = time.monotonic()
            group.print_output()
            for part in parts:
                process = group.running.get(part.name)
                if process and process.poll() is not None:
                    if part.ends:
                        return process.returncode
                    print(
                        f"robo_rl: {part.name} ended with status {process.returncode}; the rest is taken "
                        "down",
                        file=sys.stderr,
                    )
                    return process.returncode or 1
            if waiting and time.monotonic() - began > wait:
                slow = ", ".join(set(waiting[0].after) - group.ready)
                print(
                    f"robo_rl: {slow} was not ready within {wait:g} s; the rest is taken down",
                    file=sys.stderr,
                )
                return 1
            time.sleep(0.02)
        return 130
