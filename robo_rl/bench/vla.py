"""`robo_rl bench vla`: an update of PPO with a frozen trunk, from prefixes that are stored with the
decisions.

The policies are vision-language-action models of the small size with random weights, whose action experts
learn. The peer computes the prefix of every minibatch in every epoch again, as public trainers of such models
do. The limit is the expert's own forward and backward pass on the stored prefixes, without densities, loss
and optimizer. Times are CPU times of the measuring thread.
"""

import time
from typing import TYPE_CHECKING, Any

import torch

from robo_rl.algos.credit import descend, make_adam
from robo_rl.algos.onpolicy import Rules, surrogate
from robo_rl.bench.rows import BARE, CPU, Report, at_least, in_turns, make_row
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.policy import blank_obs, obs_tensors
from robo_rl.policies.vla.policy import VlaPolicy

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

FAMILIES = ("pi05", "smolvla")
DECISIONS = 16
ALONE, AGAIN = "the expert's forward and backward pass alone", "the prefix computed again for every minibatch"
SPEC = ObsSpec(state=30, action=7, views=("front", "wrist"), image_size=64, language=True, text=64)


def measure(args: "BenchOptions", report: Report) -> None:
    """A row of each family."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for family in FAMILIES:
            frozen_trunk(args, report, family)
    finally:
        torch.set_num_threads(threads)


def frozen_trunk(args: "BenchOptions", report: Report, family: str) -> None:
    """A minibatch of an update whose trunk is frozen, per decision."""
    size: Any = "tiny" if args.quick else "small"
    n, generator = args.envs or DECISIONS, torch.Generator().manual_seed(0)
    policy = make_policy(PolicyOptions(kind=family, size=size), SPEC, 0)
    assert isinstance(policy, VlaPolicy)
    policy.trunk.requires_grad_(False)
    obs = obs_tensors(blank_obs(SPEC, n) | {"task": ["pick up the red cube"] * n}, SPEC)
    obs["state"] = 0.5 * torch.randn(obs["state"].shape, generator=generator)
    chunk, adv = policy.act(obs, generator, True), torch.randn(n, generator=generator)
    rules, params = Rules(True, 0.2, 0.2), [p for p in policy.parameters() if p.requires_grad]
    opt = make_adam(params, 1e-6)

    def encode():
        with torch.no_grad():
            return policy.encode(obs)

    def update(context) -> None:
        new, _ = policy.score(context, chunk.trace)
        descend(surrogate(new, chunk.logp, adv, rules, 3.0)[0], params, opt, 1.0)

    stored, x, t = (
        encode(),
        chunk.trace["x"].view(n, policy.options.horizon, policy.width),
        torch.full((n,), 0.5),
    )
    times = in_turns(
        {
            "ours": (lambda: update(stored), n),
            ALONE: (lambda: policy.velocity(stored, x, t).sum().backward(), n),
            AGAIN: (lambda: update(encode()), n),
        },
        args.slice,
        time.thread_time,
    )
    report.add(
        make_row(
            f"PPO update of a frozen trunk, stored prefixes, {family} {size}, minibatch {n}, per decision",
            "ms",
            times,
            {ALONE: BARE},
            [AGAIN],
            bars=lambda ours, of_limit, over_peer: (
                [] if args.quick else [at_least("over computing again", over_peer, 5)]
            ),
            clock=CPU,
            work=f"two pictures of {SPEC.image_size} x {SPEC.image_size}, a prompt, a prefix of "
            f"{policy.prefix_length} tokens; one step of a chain re-scored, backward, norm, AdamW; "
            "gradients are the same to the last bit (tests/test_vla_policy.py)",
        )
    )
