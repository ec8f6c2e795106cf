"""Frames a second that our loader and LeRobot's give of one data set, in turns: the same rows in the same
shuffled batches.

    python launch/compare_loaders.py data/aloha --lerobot-python ~/lerobot/bin/python --save results/data.json

LeRobot runs in an environment of its own (docs/tutorials/evaluate.md): `LeRobotDataset` under torch's
`DataLoader`, with as many worker processes as we have threads, by each of its decoders that works there. Both
give every camera's pictures as recorded, the state, and a chunk of `--horizon` actions; LeRobot makes float32
of the pictures, as it always does, ours stay bytes until the model takes them. Nothing is kept from one batch
to the next. A row has the median of the ratios within a turn.
"""

import argparse
import json
import os
import subprocess
import time

import numpy as np

from robo_rl.data.frames import FrameStore
from robo_rl.data.reader import chunks, load
from robo_rl.provenance import git_hash, machine_name
from robo_rl.results import ResultRow, add_rows

THEIRS = """
import json, os, sys, time, torch
if torch.version.cuda is None:  # a torchvision built for CUDA imports all the same
    lib = torch.library.Library("torchvision", "DEF")
    lib.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    lib.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import lerobot
from lerobot.datasets.lerobot_dataset import LeRobotDataset
torch.set_num_threads(1)
root, horizon, workers, batch, backend = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
fps = json.load(open(root + "/meta/info.json"))["fps"]
data = LeRobotDataset("own/data", root=root, video_backend=backend, delta_timestamps={"action": [i / fps for i in range(horizon)]})
data[0]
print(f"LeRobot {lerobot.__version__} with torch {torch.__version__}", flush=True)
for line in sys.stdin:
    rows = json.loads(line)
    began = time.perf_counter()
    count = 0
    for got in torch.utils.data.DataLoader(data, batch_size=batch, sampler=rows, num_workers=workers):
        if not count:  # worker processes begin once in an epoch
            began = time.perf_counter()
        count += 1
    print((len(rows) - batch) / (time.perf_counter() - began), flush=True)
"""  # noqa: E501


class LeRobot:
    """A process of LeRobot's that loads the rows it is told."""

    def __init__(self, args: argparse.Namespace, backend: str):
        self.process = subprocess.Popen(
            [
                args.lerobot_python,
                "-W",
                "ignore",
                "-c",
                THEIRS,
                args.dataset,
                *map(str, (args.horizon, args.threads, args.batch)),
                backend,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        self.version = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rate(self, rows: list[int]) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(rows) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def our_rate(data, rows: list[int], args: argparse.Namespace) -> float:
    """Frames a second of ours; as theirs, without the first batch."""
    store = FrameStore(data, {v: v for v in data.views}, budget=1, threads=args.threads)
    state, chunk, pad = chunks(data, args.horizon)
    batches = [np.array(rows[i : i + args.batch]) for i in range(0, len(rows), args.batch)]
    began = 0.0
    for k, (at, _) in enumerate(store.ahead(batches)):
        state[at], chunk[at], pad[at]
        began = began if k else time.perf_counter()
    return (len(rows) - args.batch) / (time.perf_counter() - began)


def main() -> None:
    p = argparse.ArgumentParser(description="Frames a second of our loader and of LeRobot's, in turns.")
    p.add_argument("dataset")
    p.add_argument(
        "--lerobot-python",
        default=os.environ.get("ROBO_RL_LEROBOT_PYTHON", ""),
        help="of an environment with LeRobot",
    )
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--batches", type=int, default=8, help="of a turn, the first of which is not counted")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--threads", type=int, default=1, help="of ours, and worker processes of theirs")
    p.add_argument("--horizon", type=int, default=50)
    p.add_argument("--save", default="", help="add rows to this file of results/")
    args = p.parse_args()
    data, rng = load(args.dataset), np.random.default_rng(0)
    theirs = {b: LeRobot(args, b) for b in ("torchcodec", "pyav")}
    for name in [b for b, x in theirs.items() if not x.version]:
        theirs.pop(name).close()
        print(f"LeRobot's decoder {name} does not work there")
    rates: dict[str, list[float]] = {"ours": [], **{b: [] for b in theirs}}
    for turn in range(args.turns):
        rows = rng.integers(0, len(data.action), args.batch * args.batches).tolist()
        for name in list(rates)[:: -1 if turn % 2 else 1]:
            rates[name].append(our_rate(data, rows, args) if name == "ours" else theirs[name].rate(rows))
        print(", ".join(f"{name} {x[-1]:.1f}" for name, x in rates.items()), "frames/s", flush=True)
    what = (
        f"{len(data.views)} cameras of {' x '.join(map(str, next(iter(data.views.values()))))}, shuffled "
        f"batches of {args.batch}, {args.threads} thread or process that decodes"
    )
    command = (
        f"python launch/compare_loaders.py {args.dataset} --lerobot-python PYTHON --batches "
        f"{args.batches} --turns {args.turns}"
    )
    made = []
    for name, x in rates.items():
        ratio = np.median(np.array(rates["ours"]) / np.array(x))
        who = "ours" if name == "ours" else f"{theirs[name].version}, {name}"
        low, high = (round(float(q), 1) for q in np.quantile(x, [0.25, 0.75]))
        made.append(
            ResultRow(
                what=f"Loading, {who}: {what}",
                value=round(float(np.median(x)), 1),
                unit="frames/s",
                n=len(x),
                interval=(low, high),
                interval_is="quartiles",
                seeds=(0,),
                commit=git_hash() or "unknown",
                date=time.strftime("%Y-%m-%d"),
                machine=machine_name(),
                command=command,
                files=("robo_rl/data/frames.py", "robo_rl/data/video.py"),
                note="" if name == "ours" else f"ours over it, median within a turn: {ratio:.2f}",
            )
        )
        print(f"{who}: {np.median(x):.1f} [{low:.1f}, {high:.1f}] frames/s, ours over it {ratio:.2f}")
    for x in theirs.values():
        x.close()
    if args.save:
        add_rows(args.save, "Data sets", made)


if __name__ == "__main__":
    main()
