"""Where a robot's camera is, from recorded poses, written into the robot's file."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import tyro

from robo_rl.errors import UserError, in_range
from robo_rl.files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Calibrate a camera from poses of the tool and what the camera saw of a target there, and write it into
    the robot's file."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The camera": ("file", "poses", "camera", "mount"),
        "The result": ("out", "most_mm", "most_degrees"),
    }

    file: tyro.conf.Positional[str]
    """JSON file of the robot (of a preset: a copy)."""
    poses: str
    """JSON file {"poses": [{"tool": [x, y, z, qw, qx, qy, qz], "target": […]}, …]} [m]: the tool in the base,
    the target in the camera."""
    camera: str = "wrist"
    """Name of the camera in the file."""
    mount: Literal["hand", "base"] = "hand"
    """hand: the camera moves with the tool, the target stands still; base: the camera stands, the tool
    carries the target."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File that gets the result; "": the robot's own."""
    most_mm: float = 5.0
    """Largest 95 % bound of the position [mm] that is written."""
    most_degrees: float = 1.0
    """Largest 95 % bound of the rotation [degrees] that is written."""

    def __post_init__(self) -> None:
        in_range("--most-mm", self.most_mm, 0, 1000, open_low=True)
        in_range("--most-degrees", self.most_degrees, 0, 180, open_low=True)


def read_poses(path: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(tool, target) poses [n,3] and [n,4] of such a file. UserError names what is wrong."""
    rows = read_json(Path(path), limit=1 << 24, remedy="docs: Calibrate a camera shows one").get("poses")
    if not isinstance(rows, list):
        raise UserError(f"{path}: poses is a list of {{tool, target}}")
    out: dict[str, list] = {"tool": [], "target": []}
    for i, row in enumerate(rows):
        for name, into in out.items():
            x = row.get(name) if isinstance(row, dict) else None
            if (
                not isinstance(x, list)
                or len(x) != 7
                or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in x)
            ):
                raise UserError(
                    f"{path}: pose {i}: {name} is 7 finite numbers, x y z [m] and qw qx qy qz, got {x!r}"
                )
            if abs(math.hypot(*x[3:]) - 1) > 1e-2:
                raise UserError(
                    f"{path}: pose {i}: {name}: the quaternion (w first) must have length 1 within 0.01"
                )
            into.append(x)
    tool, target = (np.array(out[name], float).reshape(-1, 7) for name in ("tool", "target"))
    return tuple(
        (x[:, :3], x[:, 3:] / np.linalg.norm(x[:, 3:], axis=1, keepdims=True)) for x in (tool, target)
    )  # type: ignore[return-value]


def calibrate(options: CalibrateOptions):
    """-> the `HandEye` that was written. UserError: the poses do not tell, or not well enough."""
    from controllers.hand_eye import solve_hand_eye
    from controllers.robot import load_robot

    path = Path(options.file)
    if path.suffix != ".json":
        raise UserError(
            f"{options.file} is a preset, which belongs to the package: copy "
            f"controllers/presets/{options.file}.json first"
        )
    robot = load_robot(options.file)
    got = solve_hand_eye(*read_poses(options.poses), in_hand=options.mount == "hand")
    if 1000 * got.pos_bound > options.most_mm or math.degrees(got.angle_bound) > options.most_degrees:
        raise UserError(
            f"the camera is known to {1000 * got.pos_bound:.1f} mm and {math.degrees(got.angle_bound):.2f} "
            "degrees (95 %), which is not enough: record more poses, turned more about all axes, or allow "
            "more (--most-mm, --most-degrees)"
        )
    out = Path(options.out or options.file)
    raw: dict[str, Any] = read_json(path, limit=1 << 20, remedy="")
    if raw["model"]:
        raw["model"] = os.path.relpath((path.parent / raw["model"]).resolve(), out.parent.resolve())
    camera = raw.setdefault("cell", {}).setdefault("cameras", {}).setdefault(options.camera, {})
    camera |= {
        "frame": robot.site if options.mount == "hand" else robot.base_frame,
        "pos": got.pos.round(6).tolist(),
        "quat": got.quat.round(9).tolist(),
    }
    write_json(out, raw)
    load_robot(str(out))
    return got
