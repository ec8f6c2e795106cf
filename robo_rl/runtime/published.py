"""A policy's weights between processes of one host: what changes goes through the store of
`robo_rl.runtime.weights`, version by version; what adapters keep as it is goes once, into a file beside it
that every reader maps.

So with adapters on a policy of billions a version is as large as the adapters, and the frozen weights are in
memory once.
"""

from pathlib import Path

from safetensors.torch import load_file, save_file

from robo_rl.lora import frozen_names, moving
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, Policy, make_policy
from robo_rl.runtime.weights import WeightReader, WeightWriter


def create(path: Path, policy: Policy) -> WeightWriter:
    """A new store for the policy's changing weights, with nothing published yet; its frozen ones are
    written."""
    frozen = frozen_names(policy)
    beside(path).unlink(missing_ok=True)  # who mapped the file of a run before keeps its pages
    if frozen:
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in policy.state_dict().items() if k in frozen},
            beside(path),
        )
    return WeightWriter.create(path, moving(policy))


def follow(path: Path, options: PolicyOptions, spec: ObsSpec) -> tuple[WeightReader, Policy]:
    """A reader of the store and a policy that has its newest weights; later `reader.swap(policy)` brings
    newer ones."""
    reader, policy = WeightReader.open(path), make_policy(options, spec, 0).eval()
    reader.first()
    if frozen := frozen_names(policy):
        mine, tensors = policy.state_dict(keep_vars=True), load_file(beside(path))
        for name in frozen:
            mine[name].data = tensors[name]  # pages of the file, shared with whoever maps it
    reader.swap(policy)
    return reader, policy


def beside(path: Path) -> Path:
    """Where the frozen weights of a store are."""
    return path.with_suffix(".frozen")
