"""A learner spread over several processes: FSDP2 shards of the parameters, each rank learning from its own
rows.

Each transformer block is a unit of its own: its parameters are whole on a rank only while it computes, so a
rank's memory falls with the number of ranks. What a rank is told are JSON and safetensors over a pipe.

Every rank runs the same update on the same rollout with the same generator; of each minibatch it takes the
rows rank, rank + world, ..., and FSDP averages the gradients. With minibatches that divide evenly these are
the gradients of one process up to the order of summation. `gather` gives the weights that workers act with.
`ShardedLearner` starts the ranks itself, on this machine, over gloo (learners are on the CPU here). Each
writes its rows of the optimizer's moments into a checkpoint, and reads its rows from one, however many wrote
it: no process has all of them.
"""

import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from robo_rl.algos.update_metrics import MAXIMA
from robo_rl.checkpoint import ShardedState, ShardedTensor, pack, unpack
from robo_rl.errors import UserError
from robo_rl.files import parse_json, private_folder
from robo_rl.lora import moving
from robo_rl.options import MethodOptions, OnPolicyOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.blocks import blocks_of
from robo_rl.rollout import Rollout, one_thread
from robo_rl.runtime import snapshot
from robo_rl.stored import StoredTensor, resolved, split_rows, stored_tensors, write_tensors

FORWARD = ("encode", "score", "moments", "act", "bc_loss")  # methods that need whole parameters


def shard(policy: nn.Module, mesh=None) -> nn.Module:
    """Split the parameters of a policy over the ranks of the default process group (or `mesh`), block by
    block, in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if not dist.is_initialized():
        raise UserError("a sharded learner needs ranks: start it with torchrun --nproc-per-node N")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing writes into a context in place
    for block in blocks_of(policy).values():
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)  # what is in no block
    for name in FORWARD:
        register_fsdp_forward_method(policy, name)
    return policy


def gather(policy: nn.Module, changed: bool = False) -> dict[str, Tensor]:
    """Whole weights of a sharded policy on rank 0, {} on the others, which hold one at a time (a collective
    call). `changed`: those alone that learning changes (with adapters not the frozen ones)."""
    out = {}
    weights: dict[str, Any] = moving(policy) if changed else policy.state_dict()
    for k, v in weights.items():
        whole = v.full_tensor() if hasattr(v, "full_tensor") else v
        if dist.get_rank() == 0:
            out[k] = whole
    return out


# ---- a learner of several processes ------------------------------------------------------------------------

LIMIT = 300.0  # seconds a rank waits for the others
METHODS = ("pi_rl", "ppo", "dppo")


@dataclass(frozen=True)
class RankJob:
    """What a rank is told once; it travels by pickle to a child of our own."""

    rank: int
    world: int
    store: str
    algo: str
    policy: PolicyOptions
    spec: ObsSpec
    options: OnPolicyOptions
    seed: int


def check(algo: str, options: MethodOptions, learners: int) -> None:
    """Raise UserError for what cannot be spread over `learners` processes."""
    if algo not in METHODS:
        raise UserError(f"--learners above 1 goes with {', '.join(METHODS)}, got --algo {algo}")
    assert isinstance(options, OnPolicyOptions)
    if options.minibatch % learners:
        raise UserError(
            f"--rl.minibatch must be a multiple of --learners {learners}, got {options.minibatch}"
        )
    if options.proximal in ("snapshot", "ewma"):
        raise UserError(
            f"--learners above 1 goes with --rl.proximal recompute or interpolate, got {options.proximal} "
            "(it keeps whole copies of the weights)"
        )
    if options.bc_coef:
        raise UserError(
            "--learners above 1 goes without --rl.bc-coef: every rank would draw the same demonstrations"
        )


class Rank:
    """One process's part: a sharded policy, the same learner on top, its own rows of every minibatch.

    The critic, small beside a policy, is whole on every rank; its gradients are averaged as they come.
    """

    def __init__(self, job: RankJob):
        self.rank, self.world = job.rank, job.world
        # all ranks are here; by default gloo listens where the host's name is
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(job.store, job.world)  # pyright: ignore[reportPrivateImportUsage]  # torch documents it there
        dist.init_process_group(
            "gloo", store=store, rank=job.rank, world_size=job.world, timeout=timedelta(seconds=LIMIT)
        )
        policy = make_policy(job.policy, job.spec, 0)
        assert isinstance(policy, nn.Module)
        shard(policy, init_device_mesh("cpu", (job.world,)))
        self.learner = importlib.import_module(f"robo_rl.algos.{job.algo}").make(
            policy, job.options, job.seed
        )
        self.learner.share = slice(job.rank, None, job.world)
        self.learner.total_norm, self.learner.mean = self._total_norm, self._mean
        for p in self.learner.credit.params:
            p.register_post_accumulate_grad_hook(self._average)
        self.rollout: Rollout | None = None

    def _total_norm(self, own: Tensor) -> Tensor:
        square = own.square()
        dist.all_reduce(square)
        return square.sqrt()

    def _mean(self, x: "Tensor | float") -> float:
        x = torch.as_tensor(float(x), dtype=torch.float64)
        dist.all_reduce(x)
        return float(x) / self.world

    def _average(self, p: Tensor) -> None:
        assert p.grad is not None  # called when it has come
        dist.all_reduce(p.grad)
        p.grad /= self.world

    def update(
        self, rollout: Rollout, progress: float, version: int | None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The learner's update, together with the other ranks -> metrics and, on rank 0, the weights that
        changed, whole."""
        self.rollout = rollout
        with one_thread():  # two threads would mix up the order of what ranks say to each other
            metrics = self.learner.update(rollout, progress, version)
            names = sorted(metrics)
            both = torch.tensor([[metrics[n] for n in names]] * 2, dtype=torch.float64)
            dist.all_reduce(both[0])
            dist.all_reduce(both[1], dist.ReduceOp.MAX)
            metrics = {
                n: float(both[1, i] if n in MAXIMA else both[0, i] / self.world) for i, n in enumerate(names)
            }
            return metrics, gather(self.learner.policy, changed=True)

    def after_collect(self) -> None:
        """Observation statistics move as the learner's do."""
        self.learner.after_collect(self.rollout)

    def state(self) -> dict:
        """The learner's state; of what is split over the ranks a `ShardedTensor`, whose rows `write`
        writes."""
        files = tuple(file_of(k, self.world) for k in range(self.world))

        def told(path: str, x: Any) -> Any:
            rows = tuple(b - a for a, b in split_rows(len(x), self.world))
            return ShardedTensor(path, tuple(x.shape), rows, files)

        return each_shard(self.learner.state_dict(), told)

    def write(self, folder: str) -> dict[str, int]:
        """Write this rank's rows of the state into its file -> CRC-32 of the file of every rank (a collective
        call). OSError, on rank 0 alone: one of them could not."""
        mine: dict[str, Tensor] = {}
        each_shard(
            self.learner.state_dict(), lambda path, x: mine.update({path: x.to_local().detach().contiguous()})
        )
        codes = torch.zeros(self.world, dtype=torch.int64)
        try:
            codes[self.rank] = write_tensors(Path(folder) / file_of(self.rank, self.world), mine)
        except OSError as e:
            codes[self.rank] = -(e.errno or errno.EIO)
        dist.all_reduce(codes)
        if self.rank == 0 and (worst := int(codes.min())) < 0:
            raise OSError(-worst, os.strerror(-worst))
        return {file_of(k, self.world): int(code) for k, code in enumerate(codes)}

    @torch.no_grad()
    def load(self, weights: str, state: dict | None) -> None:
        """Take this rank's rows of the weights in the file `weights` and of a learner's state, whoever saved
        them; returns when all have (a collective call)."""
        policy, stored = self.learner.policy, stored_tensors(Path(weights))
        for name, x in [*policy.named_parameters(), *policy.named_buffers()]:
            if hasattr(x, "to_local"):
                x.to_local().copy_(self._part(stored[name]))
            elif name in stored:
                x.copy_(stored[name].whole())
        if state is not None:
            moments = dict(state["actor_opt"]["state"])
            for i, p in enumerate(self.learner.actor_params):
                if i in moments:
                    moments[i] = {
                        k: self._like(v, p) if hasattr(v, "shape") and tuple(v.shape) == tuple(p.shape) else v
                        for k, v in moments[i].items()
                    }
            self.learner.load_state_dict(
                resolved(state | {"actor_opt": state["actor_opt"] | {"state": moments}})
            )
        dist.barrier()

    def _part(self, x: "Tensor | StoredTensor") -> Tensor:
        begin, end = split_rows(x.shape[0], self.world)[self.rank]
        return x.rows(begin, end) if isinstance(x, StoredTensor) else x[begin:end]

    def _like(self, x: "Tensor | StoredTensor", p: Any) -> "Tensor | StoredTensor":
        if not hasattr(p, "to_local"):
            return x
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self._part(x).clone(),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )


def file_of(rank: int, world: int) -> str:
    """Name of a rank's file in a checkpoint."""
    return f"learner.{rank}-of-{world}.safetensors"


def each_shard(tree: Any, change: Callable[[str, Any], Any], path: str = "learner") -> Any:
    """A tree of dicts and lists with change(path, tensor) in place of the tensors that are split over the
    ranks."""
    if isinstance(tree, dict):
        return {k: each_shard(v, change, f"{path}/{k}") for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(each_shard(v, change, f"{path}/{i}") for i, v in enumerate(tree))
    return change(path, tree) if hasattr(tree, "full_tensor") else tree


class ShardedLearner:
    """A learner of `learners` processes behind the interface of one: this process is rank 0 and has the whole
    policy too.

    The same update as one process makes, up to the order of summation. Its state is that of one process,
    split by rows, so a run may be resumed with another number. Where a rank dies this process ends as if it
    had been killed: whoever guards the run goes on from its last checkpoint.
    """

    def __init__(self, algo: str, policy, options: OnPolicyOptions, seed: int, learners: int, folder: Path):
        check(algo, options, learners)
        from robo_rl.runtime.process_pool import context, start_process

        private_folder(folder)
        snapshot.evict(folder)  # ranks of a learner that died, and what it left
        for left in (*folder.glob("ranks*"), *folder.glob("weights*.safetensors")):
            left.unlink(missing_ok=True)
        store = folder / f"ranks{os.getpid()}-{time.monotonic_ns()}"
        self.policy, self.options, self.folder, self.store = policy, options, folder, store
        job = RankJob(0, learners, str(store), algo, policy.options, policy.spec, options, seed)
        self.pipes, self.processes = [], []
        for i in range(1, learners):
            mine, theirs = context().Pipe()
            process = context().Process(
                target=follow, args=(replace(job, rank=i), theirs), name=f"learner{i}"
            )
            start_process(process)
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.own = self._together(lambda: Rank(job))
        self._load(None)

    @property
    def sampler(self):
        """The policy that acts: the whole one."""
        return self.policy

    def update(self, rollout: Rollout, progress: float, version: int | None = None) -> dict[str, float]:
        """As a learner's."""
        metrics, weights = self._all("update", rollout, progress, version)
        self.policy.load_state_dict(weights, strict=False)
        return metrics

    def after_collect(self, rollout: Rollout) -> None:
        """As a learner's."""
        self._all("after_collect")
        if self.options.normalise_obs:
            self.policy.obs_norm.update(rollout.obs["state"].flatten(0, 1))

    def state_dict(self) -> dict:
        """As a learner's, for `checkpoint.save_checkpoint`: every rank writes what it has."""
        return ShardedState(self.own.state(), lambda folder: self._all("write", str(folder)))

    def load_state_dict(self, state: dict) -> None:
        """As a learner's; the policy has its weights already. What of it is in files
        (`checkpoint.load_train`), each rank reads itself."""
        self._load(state)

    def _load(self, state: dict | None) -> None:
        file = self.folder / f"weights{os.getpid()}.safetensors"
        try:
            save_file({k: v.detach().contiguous() for k, v in self.policy.state_dict().items()}, file)
            self._all("load", str(file), state)
        finally:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """End the other ranks."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        if dist.is_initialized():
            dist.destroy_process_group()
        for path in (self.store, *self.folder.glob("learner*.pid")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _all(self, what: str, *args) -> Any:
        told = to_bytes(what, args)

        def work():
            for pipe in self.pipes:
                pipe.send_bytes(told)
            return getattr(self.own, what)(*args)

        return self._together(work)

    def _together(self, work: Callable) -> Any:
        try:
            return work()
        except (RuntimeError, OSError) as e:
            time.sleep(0.5)
            gone = [p for p in self.processes if not p.is_alive()]
            if not gone:
                raise
            print(
                f"\n{gone[0].name} ended with status {gone[0].exitcode} ({str(e).splitlines()[0]})",
                file=sys.stderr,
                flush=True,
            )
            for p in self.processes:
                p.kill()
            os.kill(os.getpid(), signal.SIGKILL)


def to_bytes(what: str, args: tuple) -> bytes:
    """A call of a method of `Rank`: length and text of a JSON tree, then its tensors as safetensors."""
    tensors: dict[str, Tensor] = {}
    plain = [
        {"rollout": {f.name: getattr(x, f.name) for f in fields(x) if f.name != "ended"}}
        if isinstance(x, Rollout)
        else {"value": x}
        for x in args
    ]
    head = json.dumps(pack([what, plain], tensors)).encode()
    return len(head).to_bytes(8, "little") + head + save(tensors)


def from_bytes(message: bytes) -> tuple[str, list]:
    """The inverse of `to_bytes` -> (method, arguments)."""
    end = 8 + int.from_bytes(message[:8], "little")
    what, args = unpack(
        parse_json(message[8:end], "a message between ranks", limit=end, nan=True), load(message[end:])
    )
    return what, [Rollout(**x["rollout"]) if "rollout" in x else x["value"] for x in args]


def follow(job: RankJob, pipe) -> None:
    """A rank other than 0: does what it is told until it is told nothing more or is alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    torch.set_num_threads(1)
    snapshot.sign(Path(job.store).with_name(f"learner{job.rank}.pid"))
    try:
        rank = Rank(job)
        while True:
            while not pipe.poll(1.0):
                if os.getppid() != parent:
                    return
            if not (message := pipe.recv_bytes()):
                return
            what, args = from_bytes(message)
            getattr(rank, what)(*args)
    except (EOFError, ConnectionError):
        pass  # rank 0 is gone
