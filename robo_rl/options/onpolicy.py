"""Options of methods that learn from fresh rollouts."""

from dataclasses import dataclass
from typing import Literal

from robo_rl.errors import UserError, choose, in_range
from robo_rl.options.method import RolloutOptions

CORRECTIONS = ("none", "decoupled", "tis", "vtrace", "minpro", "sequence", "m2po", "remix")
PROXIMALS = ("recompute", "snapshot", "interpolate", "ewma")


@dataclass(frozen=True, kw_only=True)
class OnPolicyOptions(RolloutOptions):
    """What every ratio method shares; each method's own file says which of these are its paper's."""

    epochs: int = 5
    """Passes over every rollout."""
    minibatch: int = 2048
    """Decisions of an optimizer step."""
    lr: float = 3e-4
    """Learning rate of the policy (Adam)."""
    critic_lr: float = 1e-3
    """Learning rate of the critic (Adam)."""
    lam: float = 0.95
    """Lambda of GAE."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low."""
    dual_clip: float = 3.0
    """Where the advantage is negative the loss grows no further than at this ratio; 0: off."""
    value_clip: float = 0.0
    """Most that a value may move from the one of the rollout within an update; 0: off."""
    huber: float = 0.0
    """Errors of the critic above this count linearly; 0: all are squared."""
    max_return: float = 0.0
    """The critic's values are clamped to [0, max_return] where advantages and returns are made of them, for
    rewards whose return is known to lie there (not with scale_reward); 0: off."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy that is rewarded."""
    target_kl: float = 0.0
    """Stop an update's epochs once the mean KL passes this (0: never)."""
    trust_kl: float = 0.0
    """KL of an update, per executed entry of a chunk and random denoise step [nats]: the policy's learning
    rate follows it from --rl.lr, and a step beyond it is taken back in part (`robo_rl/algos/trust.py`); 0:
    off."""
    explore: float = 0.0
    """A Gaussian, or a flow with a learned std: before RL the exploration noise becomes the most of 0.5,
    0.35, 0.25 and 0.15 [normalised action units] under which the policy keeps this share of its odds of
    success; 0: it stays as --policy.noise-min and -max, or -init-std, say."""
    average: float = 0.0
    """The policy that is evaluated, kept and deployed is an average over updates, in which the newest has the
    weight (4p(1-p))^2, p being the success of its rollout above one half, and at least this
    (`robo_rl/algos/averaged_weights.py`); 0: the last weights."""
    timeout: Literal["bootstrap", "failure", "anneal"] = "bootstrap"
    """What an episode's time limit is to the critic: bootstrap, the return goes on with the value of the
    state where it was cut; failure, nothing is paid after it, for success within the limit is the task;
    anneal, that value times 4p(1-p), p being the success of the rollout above one half. (bootstrap in a world
    model, which also cuts what it does not know.)"""
    anneal_gamma: bool = False
    """From decision to decision the discount of a rollout is gamma^(4p(1-p)), p being its success above one
    half: near success a few control steps saved in every episode would else count more than the few episodes
    that fail. Rewards inside a chunk keep gamma."""
    critic_warmup: int = 2
    """First iterations that train the critic alone; with critic_ready the most of them."""
    critic_ready: float = 0.0
    """The critic learns alone until it explained this share of the variance of a rollout that it had not
    seen; 0: critic_warmup iterations."""
    ramp: int = 0
    """Actor steps over which its learning rate grows to --rl.lr: Adam's first steps move every weight by the
    whole of it."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    whiten: Literal["batch", "minibatch"] = "batch"
    """Over what advantages are brought to mean 0 and std 1: the rollout, or each minibatch anew (CleanRL,
    SB3)."""
    normalise_obs: bool = False
    """Running observation statistics, moved between rollouts only."""
    scale_reward: bool = False
    """Divide rewards by the running std of the discounted return."""
    anneal_lr: bool = False
    """The learning rates fall linearly to 0 over --steps."""
    freeze_trunk: bool = False
    """Leave what encodes pictures and words as supervised learning left it: RL moves the action head alone
    (pi_RL's way), and an observation is encoded once per update, not in every minibatch."""
    correction: Literal["none", "decoupled", "tis", "vtrace", "minpro", "sequence", "m2po", "remix"] = (
        "decoupled"
    )
    """Weight of a chunk that older weights acted: its ratio, dropped (decoupled) or truncated (tis) above the
    cap; V-trace; the ratio times the episode's least before it (minpro); the episode's geometric mean
    (sequence); the ratio, truncated, where the most extreme ones are dropped until the mean square of the log
    ratios is below m2_tau (m2po); truncated as tis, where the clip leaves the ratio to who acted clip_low and
    clip_high around that of the present weights (remix)."""
    proximal: Literal["recompute", "snapshot", "interpolate", "ewma"] = "recompute"
    """What the clip is centred on for such chunks: the present weights; those that acted, scored by the
    learner, 16 kept (for an engine of other numerics); a guess from their ages, without a pass; an average
    over versions."""
    weight_cap: float = 2.0
    """Most a stale chunk may weigh (vtrace: always 1)."""
    m2_tau: float = 0.04
    """Bound of m2po."""
    ess_lr: bool = False
    """Scale the policy's learning rate by sqrt(ESS/n) of the weights while data is stale (VCPO)."""
    replay: float = 0.0
    """Share of an update's data that earlier updates played already, beside all that is fresh;
    --rl.correction weighs it; 0: none."""
    replay_age: int = 4
    """With replay: the updates whose data are kept."""
    replay_stop: int = 0
    """With replay: after so many updates nothing is replayed any more (ReMix: 50 to 100); 0: to the end."""
    istar_alpha: float = 1.0
    """With istar: weight of a decision's advantage beside its episode's."""
    istar_beta: float = 0.05
    """With istar: of the log ratio that is a decision's reward."""
    istar_lr: float = 1e-4
    """With istar: learning rate of the policy that learns which episodes are better (Adam)."""
    recycle: int = 0
    """Failed episodes of an update that are played again up to their last good state, from where a teacher
    goes on (SCOPE); what it did is taught beside RL. 0: none. Its control steps count."""
    recycle_teacher: str = "expert"
    """With recycle: expert, the simulator's scripted one; or a run folder, whose best policy goes on."""
    recycle_coef: float = 0.5
    """With recycle: weight of the supervised loss on what the teacher did."""
    rehearse: float = 0.0
    """Weight of a divergence from the policy that RL begins with, on the decisions of its own successes
    (DPH-RL: 0.01 to 0.05 of forward_kl, 0.05 to 0.2 of js); 0: none."""
    rehearse_kind: Literal["forward_kl", "js", "alpha"] = "forward_kl"
    """With rehearse: forward KL, Jensen-Shannon, or the alpha divergence of 0.2."""
    rehearse_episodes: int = 128
    """With rehearse: episodes that are played for it before RL; their control steps count."""

    def __post_init__(self) -> None:
        RolloutOptions.__post_init__(self)
        for name, low, high in (
            ("epochs", 1, 1000),
            ("minibatch", 1, 10**7),
            ("lam", 0, 1),
            ("value_clip", 0, 1e6),
            ("max_return", 0, 1e9),
            ("huber", 0, 1e6),
            ("value_coef", 0, 1e6),
            ("entropy_coef", 0, 1e6),
            ("target_kl", 0, 1e6),
            ("critic_warmup", 0, 10**6),
            ("ramp", 0, 10**9),
            ("trust_kl", 0, 1e3),
            ("explore", 0, 1),
            ("average", 0, 1),
            ("critic_ready", 0, 1),
        ):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        for name, high in (
            ("lr", 1),
            ("critic_lr", 1),
            ("clip_low", 1),
            ("clip_high", 1),
            ("max_grad_norm", 1e6),
        ):
            in_range(f"rl.{name}", getattr(self, name), 0, high, open_low=True)
        if self.dual_clip:
            in_range("rl.dual_clip (0 turns it off)", self.dual_clip, 1, 1e6, open_low=True)
        if self.whiten == "minibatch" and self.advantage != "gae":
            raise UserError(
                f"rl.whiten minibatch goes with rl.advantage gae, got {self.advantage}, which is relative to "
                "a group: set rl.whiten batch"
            )
        choose("rl.timeout", self.timeout, ("bootstrap", "failure", "anneal"))
        choose("rl.correction", self.correction, CORRECTIONS)
        choose("rl.proximal", self.proximal, PROXIMALS)
        in_range("rl.weight_cap", self.weight_cap, 1, 1e6)
        in_range("rl.m2_tau", self.m2_tau, 0, 1e6, open_low=True)
        in_range("rl.istar_alpha", self.istar_alpha, 0, 1e6)
        in_range("rl.istar_beta", self.istar_beta, 0, 1e6, open_low=True)
        in_range("rl.istar_lr", self.istar_lr, 0, 1, open_low=True)
        in_range("rl.recycle", self.recycle, 0, 1024)
        in_range("rl.recycle_coef", self.recycle_coef, 0, 1e6, open_low=True)
        if self.recycle and self.advantage in ("gae", "tree"):
            raise UserError(
                "rl.recycle plays whole episodes again: it goes with a group advantage such as rl.advantage "
                f"grpo, got {self.advantage}"
            )
        if self.max_return and self.scale_reward:
            raise UserError(
                "rl.max_return bounds values in the units of the reward, which rl.scale_reward changes: set "
                "it to 0, or leave rl.scale_reward out"
            )
        in_range("rl.rehearse", self.rehearse, 0, 1e6)
        in_range("rl.rehearse_episodes", self.rehearse_episodes, 1, 10**6)
        choose("rl.rehearse_kind", self.rehearse_kind, ("forward_kl", "js", "alpha"))
        in_range("rl.replay", self.replay, 0, 0.9)
        in_range("rl.replay_age", self.replay_age, 1, 16)
        in_range("rl.replay_stop", self.replay_stop, 0, 10**9)
        if self.replay and (
            self.advantage in ("poise", "tree")
            or self.allocate != "fixed"
            or self.proximal not in ("recompute", "snapshot")
        ):
            raise UserError(
                "rl.replay goes with rl.proximal recompute or snapshot, and without rl.allocate, "
                "rl.advantage tree and poise (its probe would have seen what comes back)"
            )
        if self.correction == "vtrace" and self.advantage != "gae":
            raise UserError(
                "rl.correction vtrace corrects a critic's targets: it needs rl.advantage gae, got "
                f"{self.advantage}; a group advantage goes with decoupled, tis, minpro, sequence, m2po or "
                "remix"
            )
        if self.proximal == "interpolate" and (
            self.ess_lr or self.advantage == "opob" or self.correction not in ("none", "decoupled", "tis")
        ):
            raise UserError(
                "rl.proximal interpolate makes no pass before the first step: it goes with rl.correction "
                "decoupled or tis and without rl.ess_lr and rl.advantage opob; use recompute, snapshot or "
                "ewma"
            )


@dataclass(frozen=True, kw_only=True)
class PpoOptions(OnPolicyOptions):
    """PPO on a Gaussian chunk policy, or on one that writes tokens (`robo_rl/algos/ppo.py`)."""

    ratio: Literal["chunk", "token"] = "chunk"
    """Of tokens: what is clipped, the ratio of a chunk's joint density, or that of each token."""

    def __post_init__(self) -> None:
        OnPolicyOptions.__post_init__(self)
        choose("rl.ratio", self.ratio, ("chunk", "token"))


@dataclass(frozen=True, kw_only=True)
class PiRlOptions(OnPolicyOptions):
    """pi_RL: Flow-SDE or Flow-Noise with GAE or a group advantage (`robo_rl/algos/pi_rl.py`)."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions(OnPolicyOptions):
    """DPPO: PPO over the denoise steps of a diffusion chain (`robo_rl/algos/dppo.py`)."""

    gamma_denoise: float = 0.99
    """Discount per denoise step: earlier, noisier steps count less."""
    clip_base: float = 0.001
    """Clip range at the first fine-tuned denoise step."""
    clip_coef: float = 0.01
    """Clip range at the last one; between them it grows exponentially."""

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
    """How far the positive and the negative velocity lie from that of the sampler."""
    adv_max: float = 3.0
    """Advantages are clipped to [-adv_max, adv_max] before they become probabilities."""
    negative_weight: float = 1.0
    """Weight of the negative branch of the loss."""
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
        if self.replay or self.rehearse or self.advantage == "istar":
            raise UserError(
                "rl.replay, rl.rehearse and rl.advantage istar weigh chunks by their likelihood, which nft "
                "has none of; use pi_rl, ppo, dppo or reinflow"
            )
        if self.recycle:
            raise UserError("rl.recycle goes with pi_rl, ppo, dppo and reinflow, not with nft")
