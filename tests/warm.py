"""Imported by the process that commands are forked from (see commands.py): what they need is loaded and run once."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

torch.set_num_threads(1)

import robo_rl.checkpoint  # noqa: E402, F401
import robo_rl.cli.collect  # noqa: E402, F401
import robo_rl.cli.eval  # noqa: E402, F401
import robo_rl.cli.presets  # noqa: E402, F401
import robo_rl.cli.report  # noqa: E402, F401
import robo_rl.demos  # noqa: E402, F401
import robo_rl.evaluate  # noqa: E402, F401
import sims.mujoco.env  # noqa: E402, F401
from robo_rl.algos import pi_rl  # noqa: E402, F401
from robo_rl.data import reader, writer  # noqa: E402, F401
from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: E402, F401
from tensorboard.summary.writer import event_file_writer  # noqa: E402, F401

_p = torch.nn.Parameter(torch.zeros(1))
_p.grad = torch.zeros(1)
_o = torch.optim.AdamW([_p], fused=True)
_o.step()  # loads the compiler's modules
_o.zero_grad()
