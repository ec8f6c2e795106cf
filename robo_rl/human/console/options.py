"""Options of the console."""

import urllib.parse
from dataclasses import dataclass
from typing import ClassVar

import tyro

from robo_rl.errors import UserError, in_range
from robo_rl.options.foreign import check_foreign_alone


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """Watch N robots under a run's policy in the browser, take over, correct."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The robots": (
            "checkpoint",
            "policy",
            "lerobot_python",
            "lerobot_cameras",
            "execute",
            "robots",
            "speed",
            "seed",
            "threads",
            "seconds",
        ),
        "The page": ("host", "port", "url", "size", "fps"),
        "The operators": ("operators", "device", "patience", "max_delay"),
    }

    run: tyro.conf.Positional[str]
    """Run folder."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    policy: str = ""
    """Who acts in the place of the run's policy: ws://HOST:PORT of a server on openpi's wire (ROBO_RL_TOKEN
    has its token), or lerobot:FOLDER, a policy that LeRobot saved; "": the run's."""
    lerobot_python: str = ""
    """With --policy lerobot:FOLDER: the Python of an environment that has LeRobot; "":
    ROBO_RL_LEROBOT_PYTHON."""
    lerobot_cameras: str = ""
    """With --policy lerobot:FOLDER: which of its cameras is which of ours, NAME=CAMERA with commas between,
    where names differ."""
    execute: int = 0
    """With --policy: rows of its chunks that are executed; 0: as many as the run's policy."""
    robots: int = 4
    """Simulated robots, 1 to 64."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback lets other machines in (they still need a token)."""
    port: int = 8765
    """TCP port, 0 to 65535; 0: any free one."""
    url: str = ""
    """Address that people open where a reverse proxy stands in front, like https://console.lab.example."""
    operators: str = "operator"
    """Names with commas between; each gets an address that works once (Enter in the terminal: new ones)."""
    speed: float = 0.5
    """Pace of the simulation, up to 10; 1: real time."""
    size: int = 480
    """Pixels of each side, 48 to 1024, of the pictures of the robot that an operator watches, from every
    camera."""
    fps: float = 20.0
    """Most pictures per second and robot, 1 to 60."""
    max_delay: float = 1.0
    """Age of the picture on an operator's page [s], from 0.1, above which the robot that they hold stands
    still."""
    patience: float = 60.0
    """Longest wait for help [s], from 1, before the episode ends as a failure."""
    device: str = ""
    """gamepad, spacemouse or keyboard:/dev/input/event3 on this machine (:FILE names its file,
    ,mapping=FILE.json what its inputs do), or leader:NAMESPACE, an arm on the wire that publishes its pose
    (robo_rl sim-arm, a real one): drives the robot that the first operator holds. (A gamepad on the browser's
    machine needs no option.)
    """
    seed: int = 0
    """Seed of the starts and of the policy's sampling, 0 to 2000."""
    threads: int = 1
    """Threads of the simulator; 0: one per core."""
    seconds: float = 0.0
    """Time limit [s]; 0: run until Ctrl-C."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("robots", 1, 64),
            ("port", 0, 65535),
            ("size", 48, 1024),
            ("fps", 1, 60),
            ("patience", 1, 1e6),
            ("seed", 0, 2000),
            ("threads", 0, 4096),
            ("seconds", 0, 1e9),
            ("max_delay", 0.1, 3600),
            ("execute", 0, 1024),
        ):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        in_range("--speed", self.speed, 0, 10, open_low=True)
        check_foreign_alone(self)
        names = self.operators.split(",")
        if len(set(names)) < len(names) or not all(n.isidentifier() for n in names):
            raise UserError(
                f"--operators must be different names of letters and digits with commas between, got "
                f"{self.operators!r}"
            )
        parts = urllib.parse.urlsplit(self.url)
        if self.url and not (
            parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/")
        ):
            raise UserError(
                f"--url must be a scheme and a name, like https://console.lab.example, got {self.url!r}"
            )
