"""Imported by the process that commands are forked from (see commands.py): loads and runs once what they
need."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"

for name in (
    "torch",
    "robo_rl.checkpoint",
    "robo_rl.experiment.collect",
    "robo_rl.experiment.evaluation",
    "robo_rl.experiment.recipes",
    "robo_rl.report.page",
    "robo_rl.algos.pi_rl",
    "robo_rl.data.reader",
    "robo_rl.data.writer",
    "robo_rl.demos",
    "robo_rl.evaluation",
    "sims.mujoco.env",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.event_file_writer",
):
    importlib.import_module(name)

torch = importlib.import_module("torch")  # after the number of threads is set

torch.set_num_threads(1)
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.AdamW([parameter], fused=True).step()  # loads the compiler's modules
