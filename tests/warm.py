"""Imported by the process that commands are forked from (see commands.py): loads and runs once what they
need. tests/test_imports.py looks in fresh interpreters at what a command loads."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
importlib.import_module("robo_rl.child").set_openmp()  # before torch, as a command does it

for name in (
    "torch",
    "pyarrow.parquet",
    "robo_rl.algos.pi_rl",
    "robo_rl.checkpoint",
    "robo_rl.cli.collect",
    "robo_rl.cli.correct",
    "robo_rl.cli.eval",
    "robo_rl.cli.report",
    "robo_rl.cli.train",
    "robo_rl.data.reader",
    "robo_rl.data.writer",
    "robo_rl.demos",
    "robo_rl.evaluation",
    "robo_rl.experiment.collect",
    "robo_rl.experiment.evaluation",
    "robo_rl.experiment.onpolicy",
    "robo_rl.experiment.recipes",
    "robo_rl.experiment.replay",
    "robo_rl.experiment.train",
    "robo_rl.report.page",
    "robo_rl.runtime.in_process",
    "sims.mujoco.env",
    "sims.mujoco.own",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.event_file_writer",
):
    importlib.import_module(name)

torch = importlib.import_module("torch")  # after the number of threads is set

torch.set_num_threads(1)
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.AdamW([parameter], fused=True).step()  # loads the compiler's modules

for algo in ("pi_rl", "hil_serl"):  # reads the texts and types of the options
    importlib.import_module("robo_rl.cli.train").parse(["--algo", algo])
