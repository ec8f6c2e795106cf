"""PPO on a Gaussian chunk policy (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

The chunk is one action of the semi-MDP; with H = E = 1 this is ordinary PPO. Differences from the paper: separate
critic optimizer, decoupled gradient clipping, time limits bootstrap from the state they cut.
"""

from robo_rl.algos.onpolicy import Demos, OnPolicyLearner, Rules
from robo_rl.errors import UserError
from robo_rl.options import PpoOptions
from robo_rl.plugins import is_object


def make(policy, options: PpoOptions, seed: int, demos: Demos | None = None) -> OnPolicyLearner:
    """Learner for a Gaussian policy, or one of the user's own."""
    if policy.options.kind != "gaussian" and not is_object(policy.options.kind):
        raise UserError(f"ppo needs --policy.kind gaussian, got {policy.options.kind}")
    rules = Rules(True, options.clip_low, options.clip_high)
    return OnPolicyLearner(policy, options, lambda progress: rules, seed, demos)
