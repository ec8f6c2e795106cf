"""PPO on a Gaussian chunk policy, or on one that writes tokens (Schulman et al. 2017, arXiv 1707.06347, eq.
7).

The chunk is one action of the semi-MDP; with H = E = 1 this is ordinary PPO. Of tokens (pi0_fast) the ratio
is the whole chunk's, or with rl.ratio token that of every token by itself, as language models are trained.
Differences from the paper: separate critic optimizer, decoupled gradient clipping, time limits bootstrap from
the state they cut.
"""

from robo_rl.algos.onpolicy import Demos, OnPolicyLearner, Rules
from robo_rl.errors import UserError
from robo_rl.options import TOKENS, PpoOptions
from robo_rl.plugins import is_object


def make(policy, options: PpoOptions, seed: int, demos: Demos | None = None) -> OnPolicyLearner:
    """Learner for a Gaussian policy, one that writes tokens, or one of the user's own."""
    kind = policy.options.kind
    if kind not in ("gaussian", *TOKENS) and not is_object(kind):
        raise UserError(f"ppo needs --policy.kind {', '.join(('gaussian', *TOKENS))}, got {kind}")
    if options.ratio == "token" and policy.factors == 1:
        raise UserError(
            f"--rl.ratio token is for policies that write tokens ({', '.join(TOKENS)}), got --policy.kind "
            f"{kind}"
        )
    rules = Rules(options.ratio == "chunk", options.clip_low, options.clip_high)
    return OnPolicyLearner(policy, options, lambda progress: rules, seed, demos)
