"""Data sets of other robots, in LeRobot's own columns and nothing of ours: made small, or at full size."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from robo_rl.data import layout, statistics, video
from robo_rl.data.episode import Features
from robo_rl.data.meta import load_meta
from robo_rl.data.writer import write_table

ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
ROBOTS = {  # robot_type, names of state and action, cameras with (h, w), rate [1/s], instructions
    "aloha": (
        "aloha",
        tuple(f"{side}_{name}" for side in ("left", "right") for name in ARM),
        ("cam_high", "cam_left_wrist"),
        (480, 640),
        50,
        ("transfer the cube",),
    ),
    "so100": (
        "so100",
        (
            "shoulder_pan.pos",
            "shoulder_lift.pos",
            "elbow_flex.pos",
            "wrist_flex.pos",
            "wrist_roll.pos",
            "gripper.pos",
        ),
        ("laptop", "phone"),
        (480, 640),
        30,
        ("pick the lego brick", "put it into the bin"),
    ),
    "droid": (
        "Franka",
        tuple(f"joint_{i}" for i in range(7)) + ("gripper",),
        ("exterior_1_left", "exterior_2_left", "wrist_left"),
        (180, 320),
        15,
        ("open the drawer", "close the drawer", "wipe the table"),
    ),
}
SCALE = {"aloha": 1.2, "so100": 80.0, "droid": 1.5}  # rad, degrees, rad


def numbers(robot: str, episode: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(state, action) float32 [T, A]: smooth joint angles that differ by episode; the action is the state a
    step later."""
    names, rng = ROBOTS[robot][1], np.random.default_rng(episode)
    t = np.arange(length + 1)[:, None] / 25
    phase, rate = rng.uniform(0, 6, len(names)), rng.uniform(0.5, 1.5, len(names))
    x = (SCALE[robot] * np.sin(rate * t + phase)).astype(np.float32)
    return x[:-1], x[1:]


def pictures(episode: int, view: int, length: int, size: tuple[int, int]) -> np.ndarray:
    """uint8 [T, h, w, 3]: a bright square that moves over a gradient."""
    h, w = size
    out = np.empty((length, h, w, 3), np.uint8)
    out[:] = np.linspace(0, 120, w).astype(np.uint8)[None, None, :, None]
    for t in range(length):
        y, x = (h // 4 + 3 * t * (view + 1)) % (h // 2), (w // 4 + 5 * t + 7 * episode) % (w // 2)
        out[t, y : y + h // 4, x : x + w // 4] = (250, 200 - 40 * view, 30)
    return out


def write(
    root: Path,
    robot: str = "aloha",
    episodes: int = 3,
    length: int = 20,
    size: tuple[int, int] | None = None,
    views: int | None = None,
) -> Path:
    """A data set as LeRobot v3 writes it, without a reward, a success, or a word of units. All episodes in
    one file of each kind."""
    kind, names, cameras, full, fps, tasks = ROBOTS[robot]
    cameras, (h, w) = cameras[:views], size or full
    lengths = np.array([length + i % 3 for i in range(episodes)])
    f = Features(fps=fps, state=names, action=names, views=tuple((c, h, w) for c in cameras), robot=kind)
    info = layout.new_info(f, video.codec_name())
    info["features"]["action"].pop("robo_rl")
    for key in layout.SCALARS:
        info["features"].pop(key)
    parts = [numbers(robot, e, int(n)) for e, n in enumerate(lengths)]
    inside = np.concatenate([np.arange(n) for n in lengths])
    which = np.repeat(np.arange(episodes), lengths)
    columns = {
        "observation.state": np.concatenate([p[0] for p in parts]),
        "action": np.concatenate([p[1] for p in parts]),
        "timestamp": (inside / fps).astype(np.float32),
        "frame_index": inside,
        "episode_index": which,
        "index": np.arange(len(which)),
        "task_index": which % len(tasks),
    }
    table = pa.table(
        {
            k: pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
            if x.ndim == 2
            else pa.array(x)
            for k, x in columns.items()
        }
    )
    for folder in ("data", "meta/episodes", *(f"videos/observation.images.{c}" for c in cameras)):
        (root / folder / "chunk-000").mkdir(parents=True)
    write_table(layout.data_path(root, 0, 0), table)
    for v, camera in enumerate(cameras):
        video.encode(
            layout.video_path(root, camera, 0, 0),
            (pictures(e, v, int(n), (h, w)) for e, n in enumerate(lengths)),
            fps,
        )
    stats = statistics.number_stats(columns, lengths)
    rows = layout.episode_table(
        f,
        0,
        0,
        lengths,
        [tasks[e % len(tasks)] for e in range(episodes)],
        0,
        dict.fromkeys(cameras, (0, 0)),
        stats,
        0,
    )
    write_table(layout.episodes_path(root, 0, 0), rows)
    pq.write_table(layout.task_table(list(tasks)), root / layout.TASKS)
    (root / layout.INFO).write_text(layout.info_to_json(info, episodes, int(lengths.sum()), len(tasks)))
    totals = statistics.total_stats(stats)
    meta = load_meta(root)
    totals = {k: s | statistics.column_quantiles(meta, k) for k, s in totals.items()}
    (root / layout.STATS).write_text(statistics.stats_to_json(totals))
    return root
