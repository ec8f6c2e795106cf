"""What works on this machine: probes that each use the thing, in a process of their own with a deadline, all
at once.

A driver that crashes or hangs costs one result, not `robo_rl doctor`.

This module imports nothing but the standard library, so that a process that asks one probe starts at once.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

GL_REMEDY = "apt-get install -y libegl1 libgl1-mesa-dri"
DEADLINE = 15.0  # s, of each probe
VULKAN_REMEDY = (
    "apt-get install -y libvulkan1 && "
    "apt-get install -y -t bookworm-backports mesa-vulkan-drivers && "
    "export VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.json"
)
PENDULUM = """<mujoco><worldbody><light pos="0 -1 3"/><camera name="eye" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/>
<body><joint type="hinge" axis="0 1 0"/><geom pos=".5 0 0" size=".3" rgba="1 0 0 1"/></body>
</worldbody></mujoco>"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found: name, status, the fact, and a command that improves it, "" if none does."""

    what: str
    status: Literal["ok", "limited", "missing"]
    fact: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """target: "module:function" -> list of Rows; `whats` and `remedy` speak for it if it crashes or hangs."""

    target: str
    whats: tuple[str, ...]
    remedy: str = ""
    needed: bool = False  # robo_rl does not work without it


# ---- probes; each runs in a process of its own


def python() -> list[ProbeResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    return [
        ProbeResult(
            "Python",
            "ok" if fine else "missing",
            f"{version}, {sys.executable}",
            "" if fine else "install Python 3.11 or newer and make a new venv with it",
        )
    ]


def torch() -> list[ProbeResult]:
    """torch, and whether it has a GPU that it can use."""
    import torch

    a = torch.ones(8, 8, requires_grad=True)
    (a @ a).sum().backward()
    rows = [
        ProbeResult(
            "torch",
            "ok",
            f"{torch.__version__}, {torch.get_num_threads()} threads, "
            f"{torch.backends.cpu.get_cpu_capability()}",
        )
    ]
    if torch.cuda.is_available():
        (torch.ones(8, device="cuda") * 2).sum().item()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return [*rows, ProbeResult("CUDA", "ok", f"{torch.version.cuda}, {', '.join(names)}")]
    if not Path("/proc/driver/nvidia/version").exists():
        return [
            *rows,
            ProbeResult(
                "CUDA", "missing", "no NVIDIA GPU; all but Isaac and ManiSkill's GPU backend runs without"
            ),
        ]
    if torch.version.cuda is None:
        return [
            *rows,
            ProbeResult(
                "CUDA",
                "limited",
                "a GPU is there, but this torch is built for the CPU",
                "pip install --force-reinstall torch",
            ),
        ]
    fact = f"a GPU is there, but torch's CUDA {torch.version.cuda} cannot use it; its driver may be too old"
    return [*rows, ProbeResult("CUDA", "limited", fact, "nvidia-smi")]


def mujoco() -> list[ProbeResult]:
    """MuJoCo, and whether it steps envs in batches."""
    import mujoco
    import numpy as np

    try:
        from mujoco.batch import Batch
    except ImportError:
        return [
            ProbeResult(
                "MuJoCo",
                "missing",
                f"{mujoco.__version__} has no Batch (needs >= 4.0)",
                "pip install -U 'mujoco>=4'",
            )
        ]
    batch = Batch(mujoco.MjModel.from_xml_string(PENDULUM), 64, len(os.sched_getaffinity(0)))
    batch.step(nstep=10)
    if not (np.isfinite(batch.qpos).all() and np.all(batch.qpos != 0)):
        return [
            ProbeResult("MuJoCo", "missing", f"{mujoco.__version__}: Batch errs", "pip install -U mujoco")
        ]
    return [ProbeResult("MuJoCo", "ok", f"{mujoco.__version__}, Batch steps")]


def gl() -> list[ProbeResult]:
    """Off-screen GL, which cameras of the embedded simulator need."""
    from sims.mujoco.gl import gl_backend

    name = gl_backend()
    what = "off-screen GL"
    if name is None:
        off = os.environ.get("MUJOCO_GL", "")
        return [
            ProbeResult(
                what,
                "missing",
                f"MUJOCO_GL={off} allows none that works here"
                if off
                else "neither EGL nor OSMesa makes a context; state works, --obs rgb and videos do not",
                f"unset MUJOCO_GL; {GL_REMEDY}" if off else GL_REMEDY,
            )
        ]
    import mujoco
    import numpy as np
    from mujoco.batch import Batch

    from sims.mujoco.render import Renderer

    model = mujoco.MjModel.from_xml_string(PENDULUM)
    renderer = Renderer(Batch(model, 1, 1), model, ["eye"], 64, 64, 1)
    contrast = int(np.ptp(renderer.render()["eye"]))
    renderer.close()
    if contrast < 50:
        return [ProbeResult(what, "missing", f"{name} draws empty images", GL_REMEDY)]
    return [ProbeResult(what, "ok", f"{name}, draws")]


def maniskill() -> list[ProbeResult]:
    """ManiSkill and the Vulkan that it needs."""
    names = ("Vulkan", "ManiSkill")
    install = "pip install 'robo_rl[maniskill]'"
    if importlib.util.find_spec("sapien") is None:
        return [
            ProbeResult(names[0], "missing", "not looked at: only ManiSkill needs it", ""),
            ProbeResult(names[1], "missing", "not installed", install),
        ]
    import sapien.render

    try:
        sapien.render.RenderMaterial()
        vulkan = ProbeResult(names[0], "ok", _vulkan_device(sapien))
    except RuntimeError as e:
        why = f"{str(e).splitlines()[0]} (needs Mesa >= 25 or a GPU driver)"
        vulkan = ProbeResult(names[0], "missing", why, VULKAN_REMEDY)
    if importlib.util.find_spec("mani_skill") is None:
        return [vulkan, ProbeResult(names[1], "missing", "not installed", install)]
    version = importlib.metadata.version("mani_skill")
    if vulkan.status == "ok":
        return [vulkan, ProbeResult(names[1], "ok", f"{version}, state and rgb")]
    return [
        vulkan,
        ProbeResult(
            names[1],
            "limited",
            f"{version}, state works without Vulkan; rgb and videos do not",
            VULKAN_REMEDY,
        ),
    ]


def _vulkan_device(sapien) -> str:
    lines = [x.strip() for x in str(sapien.render.get_device_summary()).splitlines() if x.strip()]
    return "; ".join(lines)[:100] if lines else "a device that SAPIEN takes"


def envpool() -> list[ProbeResult]:
    """envpool: its version, and whether its smallest binary loads."""
    found = importlib.util.find_spec("envpool")
    if found is None or found.origin is None:
        return [ProbeResult("envpool", "missing", "not installed", "pip install 'robo_rl[envpool]'")]
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    version = importlib.metadata.version("envpool")
    folder = Path(found.origin).parent  # the package itself takes a second to import
    binary = min(folder.glob("*/*_envpool*.so"), key=lambda p: p.stat().st_size)
    name = binary.name.split(".")[0]
    loader = ExtensionFileLoader(name, str(binary))
    spec = spec_from_file_location(name, binary, loader=loader)
    assert spec is not None  # there is a loader
    loader.exec_module(module_from_spec(spec))
    return [ProbeResult("envpool", "ok", f"{version}, loads")]


def files() -> list[ProbeResult]:
    """What data sets and videos need: Parquet, a video codec, room on the disk."""
    import tempfile

    import av
    import numpy as np
    import pyarrow

    from robo_rl.data import video

    frames = np.full((8, 64, 64, 3), 128, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v.mp4"
        video.write_video(path, frames, 20)
        fine = np.abs(video.decode(path, 0, 8, 20, (64, 64)).astype(int) - 128).max() < 8
    name = f"av {av.__version__}, {video.encoder()}"
    if not fine:
        row = ProbeResult(
            "video", "missing", f"{name} does not give back what it was given", "pip install -U av"
        )
    elif video.codec_name() != "h264":
        row = ProbeResult(
            "video", "limited", f"{name}: no H.264, some browsers play none", "pip install -U av"
        )
    else:
        row = ProbeResult("video", "ok", f"{name}, encodes and decodes")
    return [row, ProbeResult("data sets", "ok", f"pyarrow {pyarrow.__version__}, LeRobotDataset v3.0")]


def loggers() -> list[ProbeResult]:
    """The loggers beside files: TensorBoard and wandb."""
    rows = []
    if importlib.util.find_spec("tensorboard") is None:
        rows.append(ProbeResult("TensorBoard", "missing", "not installed", "pip install tensorboard"))
    else:
        rows.append(ProbeResult("TensorBoard", "ok", importlib.metadata.version("tensorboard")))
    if importlib.util.find_spec("wandb") is None:
        return [*rows, ProbeResult("wandb", "missing", "not installed", "pip install 'robo_rl[wandb]'")]
    version = importlib.metadata.version("wandb")
    from robo_rl.log import wandb_mode

    if wandb_mode() == "online":
        return [*rows, ProbeResult("wandb", "ok", f"{version}, online")]
    return [
        *rows,
        ProbeResult(
            "wandb",
            "limited",
            f"{version}, no key: runs are logged offline, in the run folder",
            "wandb login, or export WANDB_API_KEY=<your key>",
        ),
    ]


def machine() -> list[ProbeResult]:
    """Cores, memory and threads of this machine."""
    import psutil

    cores = len(os.sched_getaffinity(0))
    omp = os.environ.get("OMP_NUM_THREADS", "")
    over = omp.isdecimal() and int(omp) > cores
    rows = [
        ProbeResult(
            "cores",
            "limited" if over else "ok",
            f"{cores} usable of {os.cpu_count()}, OMP_NUM_THREADS {omp or 'not set'}",
            f"export OMP_NUM_THREADS={cores}" if over else "",
        )
    ]
    memory, limit = psutil.virtual_memory(), _memory_limit()
    total, free = min(memory.total, limit), min(memory.available, limit)
    rows.append(
        ProbeResult(
            "memory",
            "ok" if free > 2e9 else "limited",
            f"{_gb(free)} free of {_gb(total)}",
            "" if free > 2e9 else "robo_rl train --envs 64 --threads 1",
        )
    )
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    grow = "mount -o remount,size=2g /dev/shm  # in Docker: --shm-size=2g"
    if shm is None:
        rows.append(
            ProbeResult(
                "shared memory",
                "missing",
                "no /dev/shm; sims in worker processes need it",
                "mount -t tmpfs -o size=2g tmpfs /dev/shm",
            )
        )
    else:
        rows.append(
            ProbeResult(
                "shared memory",
                "ok" if shm.free > 5e8 else "limited",
                f"{_gb(shm.free)} free of {_gb(shm.total)} in /dev/shm",
                "" if shm.free > 5e8 else grow,
            )
        )
    disk = shutil.disk_usage(".")
    rows.append(
        ProbeResult(
            "disk",
            "ok" if disk.free > 5e9 else "limited",
            f"{_gb(disk.free)} free in {os.getcwd()}",
            "" if disk.free > 5e9 else "run in a folder on a larger disk",
        )
    )
    return rows


def _gb(n: float) -> str:
    return f"{n / 1e9:.1f} GB"


def _memory_limit() -> float:
    """Bytes that the control group of this process may use, inf if it is not limited."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return float(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return float("inf")


def browser() -> list[ProbeResult]:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return [ProbeResult("Chromium", "ok", (done.stdout.strip().splitlines() or [path])[0])]
    return [
        ProbeResult("Chromium", "missing", "only a test of the report uses it", "apt-get install -y chromium")
    ]


def isaac() -> list[ProbeResult]:
    found = [name for name in ("isaacgym", "isaacsim", "isaaclab") if importlib.util.find_spec(name)]
    if "isaacgym" in found or {"isaacsim", "isaaclab"} <= set(found):
        return [ProbeResult("Isaac", "ok", f"{', '.join(found)} found (not started)")]
    return [
        ProbeResult(
            "Isaac",
            "missing",
            "neither Isaac Gym nor Isaac Lab; both need an NVIDIA GPU",
            "see https://isaac-sim.github.io/IsaacLab",
        )
    ]


PROBES = (
    Probe("robo_rl.probes:python", ("Python",), needed=True),
    Probe("robo_rl.probes:torch", ("torch", "CUDA"), "pip install 'torch>=2.7'", needed=True),
    Probe("robo_rl.probes:mujoco", ("MuJoCo",), "pip install 'mujoco>=4'", needed=True),
    Probe("robo_rl.probes:gl", ("off-screen GL",), GL_REMEDY),
    Probe("robo_rl.probes:maniskill", ("Vulkan", "ManiSkill"), "pip install -U 'robo_rl[maniskill]'"),
    Probe("robo_rl.probes:envpool", ("envpool",), "pip install -U 'robo_rl[envpool]'"),
    Probe("robo_rl.probes:isaac", ("Isaac",)),
    Probe("robo_rl.probes:files", ("video", "data sets"), "pip install -U av pyarrow", needed=True),
    Probe("robo_rl.probes:loggers", ("TensorBoard", "wandb"), "pip install tensorboard"),
    Probe("robo_rl.probes:browser", ("Chromium",), "apt-get install -y chromium"),
    Probe("robo_rl.probes:machine", ("cores", "memory", "shared memory", "disk"), "pip install psutil"),
)


def answer(target: str) -> None:
    """Run in a child of the doctor: call the probe, give its rows as the last line of standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not reach the answer
    module, function = target.split(":")
    try:
        rows = [asdict(row) for row in getattr(importlib.import_module(module), function)()]
    except Exception as e:  # noqa: BLE001 the edge of the process: anything a probe raises becomes a line
        rows = (f"{type(e).__name__}: {e}".splitlines() or [""])[0][:160]
    print(json.dumps(rows), file=out, flush=True)
    os._exit(0)  # drivers may crash or hang in their exit handlers


# ---- asking them


def ask(probe: Probe, deadline: float) -> list[ProbeResult]:
    """The rows of `probe`, or rows that say how it failed; takes at most `deadline` seconds."""
    code = f"from robo_rl.probes import answer; answer({probe.target!r})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
        text=True,
    )
    try:
        text, _ = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return [
            ProbeResult(
                what, "limited", f"no answer in {deadline:g} s; is the machine busy?", "robo_rl doctor"
            )
            for what in probe.whats
        ]
    from robo_rl.files import parse_json

    try:
        rows = parse_json(text.strip().splitlines()[-1], "its answer", (list, str))
    except (IndexError, ValueError):
        code = child.returncode
        return _failed(probe, f"crashed ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})")
    return _failed(probe, rows) if isinstance(rows, str) else [ProbeResult(**row) for row in rows]


def _failed(probe: Probe, fact: str) -> list[ProbeResult]:
    return [ProbeResult(what, "missing", fact, probe.remedy) for what in probe.whats]


def examine(probes: tuple[Probe, ...] = PROBES, deadline: float = DEADLINE) -> list[ProbeResult]:
    """Ask all probes at once -> results in the order of the probes."""
    rows: dict[int, list[ProbeResult]] = {}

    def one(i: int) -> None:
        rows[i] = ask(probes[i], deadline)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(probes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [row for i in range(len(probes)) for row in rows[i]]


def needed_names(probes: tuple[Probe, ...] = PROBES) -> set[str]:
    """Names of the results without which robo_rl does not work."""
    return {what for p in probes if p.needed for what in p.whats} - {"CUDA"}
