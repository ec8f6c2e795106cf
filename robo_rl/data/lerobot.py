"""Demonstrations and rollouts on disk as LeRobotDataset v3.0: LeRobot reads ours, we read LeRobot's.

with Writer("demos", spec=env.spec) as w:
    w.add(Episode(state=..., action=..., task="pick the red cube", success=True))
data = load("demos")                              # checked; BrokenDataset names the file and the repair
state, chunk, pad_mask = chunks(data, horizon=8)
"""

from robo_rl.data.episode import SOURCES, Episode, Features
from robo_rl.data.meta import BrokenDataset
from robo_rl.data.reader import Dataset, chunks, load
from robo_rl.data.repair import Repaired, accept, repair
from robo_rl.data.video import write_video
from robo_rl.data.writer import Writer

__all__ = [
    "SOURCES",
    "BrokenDataset",
    "Dataset",
    "Episode",
    "Features",
    "Repaired",
    "Writer",
    "accept",
    "chunks",
    "load",
    "repair",
    "write_video",
]
