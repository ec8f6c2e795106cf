"""Every option of a policy or a method, as frozen dataclasses that import nothing heavy (so `--help` is instant).

Values are checked where they are made: a bad one raises UserError with the allowed range.
"""

from dataclasses import dataclass
from typing import Literal

from robo_rl.errors import UserError, choose, in_range


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What the policy is. A checkpoint carries these; evaluation rebuilds the policy from them."""

    kind: Literal["flow", "diffusion", "gaussian"] = "flow"
    horizon: int = 8
    """H: steps in a predicted chunk."""
    execute: int = 8
    """E <= H: steps of it that are executed before the next decision."""
    denoise_steps: int = 4
    """K: denoise steps per chunk."""
    hidden: int = 256
    layers: int = 3
    width: int = 96
    """Token width of the vision-language trunk (obs rgb)."""
    depth: int = 2
    """Transformer blocks of the vision-language trunk."""
    noise: Literal["sde", "cps", "learned"] = "sde"
    """Exploration of a flow chain: Flow-SDE, Flow-CPS, or a learned std (Flow-Noise, ReinFlow)."""
    noise_level: float = 0.5
    """a of Flow-SDE and Flow-CPS."""
    noise_min: float = 0.08
    noise_max: float = 0.16
    """Bounds of the learned std (normalised action units)."""
    noise_steps: Literal["one", "all"] = "one"
    """Which denoise steps are random: one drawn per decision (pi_RL's hybrid) or all."""
    train_steps: int = 20
    """Diffusion: steps of the noise schedule; denoise_steps must divide it."""
    finetune_steps: int = 5
    """Diffusion (DPPO): the last K' steps are fine-tuned, earlier ones run on the frozen base."""
    std_floor: float = 0.1
    """Diffusion: least std of a random denoise step, used for sampling and for log-probs alike."""
    init_std: float = 0.6
    """Gaussian: initial std (normalised action units)."""
    activation: Literal["relu", "silu", "tanh"] = "relu"
    logp_reduction: Literal["sum", "mean"] = "sum"
    """Over the executed E x A entries. Clip ranges do not carry over between the two."""

    def __post_init__(self) -> None:
        for name, low, high in (("horizon", 1, 256), ("denoise_steps", 1, 1000), ("hidden", 8, 8192),
                                ("layers", 1, 32), ("noise_level", 0, 2), ("width", 16, 4096), ("depth", 1, 48)):
            in_range(f"policy.{name}", getattr(self, name), low, high)
        in_range("policy.execute (E <= H)", self.execute, 1, self.horizon)
        for name in ("init_std", "std_floor", "noise_min", "noise_max"):
            in_range(f"policy.{name}", getattr(self, name), 0, 10, open_low=True)
        in_range("policy.noise_min (<= noise_max)", self.noise_min, 0, self.noise_max, open_low=True)
        in_range("policy.train_steps", self.train_steps, 1, 10_000)
        in_range("policy.finetune_steps", self.finetune_steps, 1, 10_000)
        if self.kind == "diffusion":
            if self.train_steps % self.denoise_steps:
                raise UserError(f"policy.denoise_steps must divide train_steps={self.train_steps}, "
                                f"got {self.denoise_steps}")
            in_range("policy.finetune_steps", self.finetune_steps, 1, self.denoise_steps)


@dataclass(frozen=True, kw_only=True)
class BcOptions:
    """Supervised flow matching on demonstrations, the SFT stage (`robo_rl/algos/bc.py`)."""

    updates: int = 600
    batch: int = 256
    lr: float = 1e-3
    weight_decay: float = 1e-6
    ema: float = 0.995

    def __post_init__(self) -> None:
        in_range("bc.updates", self.updates, 0, 10**8)
        in_range("bc.batch", self.batch, 1, 10**6)
        in_range("bc.lr", self.lr, 0, 1, open_low=True)
        in_range("bc.weight_decay", self.weight_decay, 0, 1)
        in_range("bc.ema", self.ema, 0, 1, open_high=True)


CORRECTIONS = ("none", "decoupled", "tis", "vtrace", "minpro", "sequence")
PROXIMALS = ("recompute", "snapshot", "interpolate", "ewma")


@dataclass(frozen=True, kw_only=True)
class OnPolicyOptions:
    """What every ratio method shares; each method's own file says which of these are its paper's."""

    decisions: int = 32
    """T: decisions per env and rollout (0: whole episodes, as group advantages need)."""
    epochs: int = 5
    minibatch: int = 2048
    lr: float = 3e-4
    critic_lr: float = 1e-3
    gamma: float = 0.99
    """Per decision-step discount: of one control step; a chunk is discounted by gamma^E."""
    lam: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    value_clip: float = 0.0
    huber: float = 0.0
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    target_kl: float = 0.0
    """Stop an update's epochs once the mean KL passes this (0: never)."""
    critic_warmup: int = 2
    """First iterations that train the critic alone."""
    max_grad_norm: float = 1.0
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo"] = "gae"
    group: int = 8
    """G: episodes per start with a group advantage."""
    normalise_obs: bool = False
    """Running observation statistics, moved between rollouts only."""
    scale_reward: bool = False
    """Divide rewards by the running std of the discounted return."""
    anneal_lr: bool = False
    bc_coef: float = 0.0
    """Weight of the supervised loss on the demonstrations, added to every update."""
    correction: Literal["none", "decoupled", "tis", "vtrace", "minpro", "sequence"] = "decoupled"
    """Weight of a chunk that older weights acted: its ratio, dropped (decoupled) or truncated (tis) above the cap;
    V-trace; the ratio times the episode's least before it (minpro); the episode's geometric mean (sequence)."""
    proximal: Literal["recompute", "snapshot", "interpolate", "ewma"] = "recompute"
    """What the clip is centred on for such chunks: the present weights; those that acted, scored by the learner, 16
    kept (for an engine of other numerics); a guess from their ages, without a pass; an average over versions."""
    weight_cap: float = 2.0
    """Most a stale chunk may weigh (vtrace: always 1)."""
    ess_lr: bool = False
    """Scale the policy's learning rate by sqrt(ESS/n) of the weights while data is stale (VCPO)."""

    def __post_init__(self) -> None:
        for name, low, high in (("decisions", int(self.advantage == "gae"), 10**6), ("epochs", 1, 1000),
                                ("minibatch", 1, 10**7), ("lam", 0, 1), ("group", 2, 10**5), ("value_clip", 0, 1e6),
                                ("huber", 0, 1e6), ("value_coef", 0, 1e6), ("entropy_coef", 0, 1e6),
                                ("target_kl", 0, 1e6), ("critic_warmup", 0, 10**6), ("bc_coef", 0, 1e6)):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        for name, high in (("lr", 1), ("critic_lr", 1), ("gamma", 1), ("clip_low", 1), ("clip_high", 1),
                           ("max_grad_norm", 1e6)):
            in_range(f"rl.{name}", getattr(self, name), 0, high, open_low=True)
        if self.dual_clip:
            in_range("rl.dual_clip (0 turns it off)", self.dual_clip, 1, 1e6, open_low=True)
        choose("rl.correction", self.correction, CORRECTIONS)
        choose("rl.proximal", self.proximal, PROXIMALS)
        in_range("rl.weight_cap", self.weight_cap, 1, 1e6)
        if self.correction == "vtrace" and self.advantage != "gae":
            raise UserError(f"rl.correction vtrace corrects a critic's targets: it needs rl.advantage gae, got "
                            f"{self.advantage}; a group advantage goes with decoupled, tis, minpro or sequence")
        if self.proximal == "interpolate" and (self.ess_lr or self.correction in ("vtrace", "minpro", "sequence")):
            raise UserError("rl.proximal interpolate makes no pass before the first step: it goes with rl.correction "
                            "decoupled or tis and without rl.ess_lr; use recompute, snapshot or ewma")


@dataclass(frozen=True, kw_only=True)
class PpoOptions(OnPolicyOptions):
    """PPO on a Gaussian chunk policy (`robo_rl/algos/ppo.py`)."""


@dataclass(frozen=True, kw_only=True)
class PiRlOptions(OnPolicyOptions):
    """pi_RL: Flow-SDE or Flow-Noise with GAE or a group advantage (`robo_rl/algos/pi_rl.py`)."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions(OnPolicyOptions):
    """DPPO: PPO over the denoise steps of a diffusion chain (`robo_rl/algos/dppo.py`)."""

    gamma_denoise: float = 0.99
    clip_base: float = 0.001
    clip_coef: float = 0.01

    def __post_init__(self) -> None:
        OnPolicyOptions.__post_init__(self)
        in_range("rl.gamma_denoise", self.gamma_denoise, 0, 1, open_low=True)
        in_range("rl.clip_coef", self.clip_coef, 0, 1, open_low=True)
        in_range("rl.clip_base (<= clip_coef)", self.clip_base, 0, self.clip_coef, open_low=True)


@dataclass(frozen=True, kw_only=True)
class ReinFlowOptions(OnPolicyOptions):
    """ReinFlow: learned noise at every flow step (`robo_rl/algos/reinflow.py`)."""

    noise_hold: float = 0.35
    """Share of training before the upper noise bound decays."""
    noise_end: float = 0.7
    """The bound ends at this share of its start."""
    w2_coef: float = 0.0
    """Weight of |x_theta(z) - x_old(z)|^2 with a shared z."""

    def __post_init__(self) -> None:
        OnPolicyOptions.__post_init__(self)
        in_range("rl.noise_hold", self.noise_hold, 0, 1)
        in_range("rl.noise_end", self.noise_end, 0, 1, open_low=True)
        in_range("rl.w2_coef", self.w2_coef, 0, 1e6)


@dataclass(frozen=True, kw_only=True)
class NftOptions(OnPolicyOptions):
    """DiffusionNFT for action chunks: no likelihood, any sampler (`robo_rl/algos/nft.py`)."""

    beta: float = 1.0
    adv_max: float = 3.0
    negative_weight: float = 1.0
    kl_coef: float = 1e-4
    """Weight of |v - v_ref|^2, v_ref being the supervised policy."""
    old_decay: float = 0.5
    """Most of the sampler kept at each update; it grows as min(0.001 n, old_decay)."""

    def __post_init__(self) -> None:
        OnPolicyOptions.__post_init__(self)
        in_range("rl.beta", self.beta, 0, 10, open_low=True)
        in_range("rl.adv_max", self.adv_max, 0, 1e6, open_low=True)
        in_range("rl.negative_weight", self.negative_weight, 0, 1e6)
        in_range("rl.kl_coef", self.kl_coef, 0, 1e6)
        in_range("rl.old_decay", self.old_decay, 0, 1, open_high=True)
