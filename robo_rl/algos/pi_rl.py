"""pi_RL: Flow-SDE and Flow-Noise, each with PPO + GAE or with a group advantage (arXiv 2510.25889, eq. 6-13).

Flow-SDE (policy.noise sde or cps, noise_steps one): each decision draws one denoise step that is random, the
others are the ODE; the ratio is of that step. CPS's last step, whose std is t' sin(pi a/2) = 0 at t' = 0, is
never drawn. Flow-Noise (policy.noise learned, noise_steps all): a small net gives the std
of every step and the ratio is of the joint chain. The noise net is dropped at evaluation (ODE).

Where we differ: the log-density of a step is a sum over the executed entries unless policy.logp_reduction is
"mean" (the public code mixes both); the initial noise's density is left out of the joint (it cancels in the
ratio); the critic reads the policy's context instead of averaged expert tokens.
"""

from robo_rl.algos.onpolicy import Demos, OnPolicyLearner, Rules
from robo_rl.errors import UserError
from robo_rl.options import PiRlOptions


def make(policy, options: PiRlOptions, seed: int, demos: Demos | None = None) -> OnPolicyLearner:
    """Learner for a flow policy."""
    policy.options.require_flow("pi_rl")
    if policy.options.noise != "learned" and policy.options.denoise_steps == 1:
        raise UserError(
            f"policy.noise {policy.options.noise} needs policy.denoise_steps >= 2: a one-step flow is "
            "deterministic under it; use policy.noise learned"
        )
    if policy.options.noise != "learned" and policy.options.noise_level == 0:
        raise UserError("pi_rl learns from exploration: policy.noise_level must be above 0, got 0")
    if policy.options.noise != "learned":
        options.refuse(
            ("entropy_coef",), f"policy.noise {policy.options.noise} is no network's, so its entropy is fixed"
        )
    rules = Rules(True, options.clip_low, options.clip_high)
    return OnPolicyLearner(policy, options, lambda progress: rules, seed, demos)
