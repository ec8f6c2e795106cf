"""A learner spread over several processes: FSDP2 shards of the parameters, each rank learning from its own rows.

Every rank runs the same update on the same rollout with the same generator; of each minibatch it takes the rows
rank, rank + world, ..., and FSDP averages the gradients. With minibatches that divide evenly these are the gradients of one
process up to the order of summation. Start the ranks with torchrun; `gather` gives the weights that workers act with.
"""

import torch.distributed as dist
from torch import Tensor, nn

from robo_rl.errors import UserError

FORWARD = ("encode", "score", "act", "bc_loss")  # methods that need whole parameters


def shard(policy: nn.Module, mesh=None) -> nn.Module:
    """Split the parameters of a policy over the ranks of the default process group (or `mesh`), in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    if not dist.is_initialized():
        raise UserError("a sharded learner needs ranks: start it with torchrun --nproc-per-node N")
    fully_shard(policy, mesh=mesh)
    for name in FORWARD:
        register_fsdp_forward_method(policy, name)
    return policy


def own_rows(batch: Tensor) -> Tensor:
    """The rows of a minibatch [B] that this rank learns from; B must divide evenly or the mean would be another."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if len(batch) % world:
        raise UserError(f"a minibatch of {len(batch)} rows does not divide over {world} ranks; "
                        f"choose --rl.minibatch as a multiple of {world}")
    return batch[rank::world]


def gather(policy: nn.Module) -> dict[str, Tensor]:
    """Whole weights of a sharded policy, on every rank (a collective call)."""
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in policy.state_dict().items()}


def whole_gradients(policy: nn.Module) -> dict[str, Tensor]:
    """Whole gradients, on every rank (a collective call)."""
    return {k: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for k, p in policy.named_parameters() if p.grad is not None}
