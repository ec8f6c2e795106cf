"""Every option of a policy or a method, as frozen dataclasses that import nothing heavy (so `--help` is instant).

Values are checked where they are made: a bad one raises UserError with the allowed range.
"""

from dataclasses import dataclass, field
from typing import Literal

from robo_rl.errors import UserError, choose, in_range


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What the policy is. A checkpoint carries these; evaluation rebuilds the policy from them."""

    kind: Literal["flow", "diffusion", "gaussian", "squashed", "guided"] = "flow"
    """squashed: tanh-Gaussian (SAC's); guided: a flow whose samples a critic chooses among (EXPO, PA-RL)."""
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
    std_scale: float = 1.0
    """Diffusion: share of DDPM's own std at every random step, before the floor; 0: exploration is the evaluated chain of means
    with noise of std_floor."""
    init_std: float = 0.6
    """Gaussian: initial std (normalised action units)."""
    activation: Literal["relu", "silu", "tanh"] = "relu"
    logp_reduction: Literal["sum", "mean"] = "sum"
    """Over the executed E x A entries. Clip ranges do not carry over between the two."""
    gripper: Literal["continuous", "toggle"] = "continuous"
    """Squashed: the gripper is one more axis, or a discrete critic picks its commands."""
    teacher: bool = False
    """Squashed: the supervised actor stays as it is beside the learning one, and critics choose which of the two acts (IBRL)."""
    critics: int = 4
    """Guided, and squashed with a teacher: critics that judge."""
    critic_hidden: int = 256
    critic_layers: int = 2
    candidates: int = 8
    """Guided: N samples of the flow per decision."""
    spread: float = 1.0
    """Guided: std of the noise that samples grow from; below 1 the first of them grows from no noise at all."""
    softness: float = 1.0
    """PA-RL: temperature [value] of the choice among optimised actions, where it is not the best one."""
    edit_scale: float = 0.0
    """Guided: reach of EXPO's edits [-1..1 units]; 0: none."""
    keep: int = 4
    """Guided: the candidates that climb the critic's slope (PA-RL)."""
    local_steps: int = 0
    local_rate: float = 3e-4
    """PA-RL's steps and their size."""

    def __post_init__(self) -> None:
        for name, low, high in (("horizon", 1, 256), ("denoise_steps", 1, 1000), ("hidden", 8, 8192),
                                ("layers", 1, 32), ("noise_level", 0, 2), ("std_scale", 0, 1), ("width", 16, 4096),
                                ("depth", 1, 48)):
            in_range(f"policy.{name}", getattr(self, name), low, high)
        in_range("policy.execute (E <= H)", self.execute, 1, self.horizon)
        for name in ("init_std", "std_floor", "noise_min", "noise_max"):
            in_range(f"policy.{name}", getattr(self, name), 0, 10, open_low=True)
        for name, low, high in (("critics", 1, 256), ("critic_hidden", 8, 8192), ("critic_layers", 1, 32),
                                ("candidates", 1, 4096), ("edit_scale", 0, 2), ("keep", 1, 4096),
                                ("local_steps", 0, 1000), ("local_rate", 0, 10), ("spread", 0, 1)):
            in_range(f"policy.{name}", getattr(self, name), low, high)
        in_range("policy.softness", self.softness, 0, 1e6, open_low=True)
        if self.kind == "flow" and self.noise == "cps":
            in_range("policy.noise_level (of noise cps)", self.noise_level, 0, 1)
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
    noises: int = 1
    """Draws of time and noise for each demonstrated chunk of a batch; the observation is encoded once for all of them."""
    lr: float = 1e-3
    weight_decay: float = 1e-6
    ema: float = 0.995

    def __post_init__(self) -> None:
        in_range("bc.updates", self.updates, 0, 10**8)
        in_range("bc.batch", self.batch, 1, 10**6)
        in_range("bc.noises", self.noises, 1, 1000)
        in_range("bc.lr", self.lr, 0, 1, open_low=True)
        in_range("bc.weight_decay", self.weight_decay, 0, 1)
        in_range("bc.ema", self.ema, 0, 1, open_high=True)


CORRECTIONS = ("none", "decoupled", "tis", "vtrace", "minpro", "sequence", "m2po")
PROXIMALS = ("recompute", "snapshot", "interpolate", "ewma")


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of an online RL method."""


@dataclass(frozen=True, kw_only=True)
class OnPolicyOptions(MethodOptions):
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
    ramp: int = 0
    """Actor steps over which its learning rate grows to --rl.lr: Adam's first steps move every weight by the whole of it."""
    max_grad_norm: float = 1.0
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "opob"] = "gae"
    """GAE on a critic, or relative to the group of a start; opob: over the baseline of least variance (VCPO), which weighs
    an episode by how likely it is now and by its decisions."""
    group: int = 8
    """G: episodes per start with a group advantage."""
    whiten: Literal["batch", "minibatch"] = "batch"
    """Over what advantages are brought to mean 0 and std 1: the rollout, or each minibatch anew (CleanRL, SB3)."""
    normalise_obs: bool = False
    """Running observation statistics, moved between rollouts only."""
    scale_reward: bool = False
    """Divide rewards by the running std of the discounted return."""
    anneal_lr: bool = False
    bc_coef: float = 0.0
    """Weight of the supervised loss on the demonstrations, added to every update."""
    freeze_trunk: bool = False
    """Leave what encodes pictures and words as supervised learning left it: RL moves the action head alone (pi_RL's way), and
    an observation is encoded once per update, not in every minibatch."""
    correction: Literal["none", "decoupled", "tis", "vtrace", "minpro", "sequence", "m2po"] = "decoupled"
    """Weight of a chunk that older weights acted: its ratio, dropped (decoupled) or truncated (tis) above the cap;
    V-trace; the ratio times the episode's least before it (minpro); the episode's geometric mean (sequence); the ratio,
    truncated, where the most extreme ones are dropped until the mean square of the log ratios is below m2_tau (m2po)."""
    proximal: Literal["recompute", "snapshot", "interpolate", "ewma"] = "recompute"
    """What the clip is centred on for such chunks: the present weights; those that acted, scored by the learner, 16
    kept (for an engine of other numerics); a guess from their ages, without a pass; an average over versions."""
    weight_cap: float = 2.0
    """Most a stale chunk may weigh (vtrace: always 1)."""
    m2_tau: float = 0.04
    """Bound of m2po."""
    ess_lr: bool = False
    """Scale the policy's learning rate by sqrt(ESS/n) of the weights while data is stale (VCPO)."""

    def __post_init__(self) -> None:
        for name, low, high in (("decisions", int(self.advantage == "gae"), 10**6), ("epochs", 1, 1000),
                                ("minibatch", 1, 10**7), ("lam", 0, 1), ("group", 2, 10**5), ("value_clip", 0, 1e6),
                                ("huber", 0, 1e6), ("value_coef", 0, 1e6), ("entropy_coef", 0, 1e6),
                                ("target_kl", 0, 1e6), ("critic_warmup", 0, 10**6), ("bc_coef", 0, 1e6),
                                ("ramp", 0, 10**9)):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        for name, high in (("lr", 1), ("critic_lr", 1), ("gamma", 1), ("clip_low", 1), ("clip_high", 1),
                           ("max_grad_norm", 1e6)):
            in_range(f"rl.{name}", getattr(self, name), 0, high, open_low=True)
        if self.dual_clip:
            in_range("rl.dual_clip (0 turns it off)", self.dual_clip, 1, 1e6, open_low=True)
        if self.whiten == "minibatch" and self.advantage != "gae":
            raise UserError(f"rl.whiten minibatch goes with rl.advantage gae, got {self.advantage}, which is relative to a group")
        choose("rl.correction", self.correction, CORRECTIONS)
        choose("rl.proximal", self.proximal, PROXIMALS)
        in_range("rl.weight_cap", self.weight_cap, 1, 1e6)
        in_range("rl.m2_tau", self.m2_tau, 0, 1e6, open_low=True)
        if self.correction == "vtrace" and self.advantage != "gae":
            raise UserError(f"rl.correction vtrace corrects a critic's targets: it needs rl.advantage gae, got "
                            f"{self.advantage}; a group advantage goes with decoupled, tis, minpro, sequence or m2po")
        if self.proximal == "interpolate" and (self.ess_lr or self.advantage == "opob" or
                                               self.correction not in ("none", "decoupled", "tis")):
            raise UserError("rl.proximal interpolate makes no pass before the first step: it goes with rl.correction "
                            "decoupled or tis and without rl.ess_lr and rl.advantage opob; use recompute, snapshot or ewma")


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


@dataclass(frozen=True, kw_only=True)
class Person:
    """How a scripted person behaves (`robo_rl/human/operators.py`); times in seconds."""

    reaction: float = 0.4
    """Median time from deciding to acting; log-normal with sigma 0.3."""
    error: float = 0.1
    """Slips per second at the controls; for 0.25 s the person then moves the wrong way."""
    fatigue: float = 0.0
    """Share by which reaction time and error grow per minute already spent at the controls in this episode and before."""
    notice: float = 0.5
    """Time the policy's commands must stay wrong before the person decides to help."""
    gate: float = 0.45
    """RMS difference to the person's own command (over axes, 0 .. 2) that counts as wrong."""
    late: float = 0.4
    """Share of the episode's limit after which the person helps, whatever the policy does, and stays; 1: never."""
    agree: float = 0.5
    """Time policy and person must agree before the person hands back."""
    least: float = 0.5
    """Shortest help."""
    recovery: float = 0.0
    """Longest time the person backs out before correcting (RaC); 0: correct at once."""
    subtask: bool = False
    """Keep the controls until one more sub-task is done than when correcting began (rac), whether they agree or not."""
    finish: bool = False
    """Keep the controls to the end of the episode."""
    attend: float = 1.0
    """Share of the episodes that the person watches; in the others nobody comes."""
    leave: float = 0.0
    """Minutes at the controls, over all robots, after which the person has gone for good (correct: until the next round); 0: never."""

    def __post_init__(self) -> None:
        for name, high in (("reaction", 60), ("error", 100), ("fatigue", 100), ("notice", 60), ("gate", 2), ("late", 1),
                           ("agree", 60), ("least", 60), ("attend", 1), ("recovery", 60), ("leave", 1e6)):
            in_range(f"person.{name}", getattr(self, name), 0, high)


@dataclass(frozen=True, kw_only=True)
class OffPolicyOptions(MethodOptions):
    """What every method that learns from replay shares (`robo_rl/algos/offpolicy.py`)."""

    utd: float = 1.0
    """Critic updates per chunk of E control steps that was collected."""
    actor_every: int = 2
    """Critic updates per actor update."""
    batch: int = 256
    demo_share: float = 0.5
    """Share of every batch that is demonstrations and corrections; guaranteed, for buffers of any size."""
    capacity: int = 500_000
    """Control steps that replay keeps."""
    warmup: int = 2000
    """Control steps that the supervised policy collects first; nothing of it is changed meanwhile."""
    pretrain: int = 500
    """Critic updates after that, before the actor's first; for iql, calql, wsrl and aloe the updates of their offline
    stage on the demonstrations, before anything is collected."""
    critics: int = 4
    """E: critics of the ensemble."""
    subset: int = 2
    """How many of them, drawn anew each time, the target takes the least of."""
    critic_hidden: int = 256
    critic_layers: int = 2
    layer_norm: bool = True
    lr: float = 3e-4
    critic_lr: float = 3e-4
    gamma: float = 0.99
    """Per control step."""
    tau: float = 0.005
    max_target: float = 0.0
    """Targets are clamped to [0, max_target], for sparse rewards whose return is known to lie there; 0: off."""
    floor: bool = False
    """Targets are no lower than the return that did follow, where an episode terminated: with few updates values reach
    back over an episode at once. It leans towards luck where the env is random."""
    max_grad_norm: float = 10.0
    bc_coef: float = 0.0
    """Weight of the supervised loss on the demonstrations in the actor's update."""
    synthetic: float = 0.0
    """Share of every batch that a diffusion model of replay made; the other sources share the rest."""
    synthetic_kind: Literal["synther", "guided"] = "synther"
    """Of what: single transitions (SynthER), or stretches of decisions, pushed towards the policy of the day (policy-guided)."""
    synthetic_window: int = 4
    """With guided: decisions of a stretch."""
    synthetic_strength: float = 1.0
    """With guided: how hard it is pushed; 0: as the data behaved."""
    synthetic_every: int = 10_000
    """Control steps after which it is learnt anew."""
    synthetic_rows: int = 50_000
    """Transitions it then makes."""
    synthetic_updates: int = 3000
    """Updates it then takes."""
    operator: Literal["none", "scripted"] = "none"
    """Who may take over while it collects; what they do goes to the demonstrations too. scripted: a simulated person."""
    person: Person = field(default_factory=Person)
    """How the scripted person behaves."""
    judge: Literal["env", "classifier"] = "env"
    """Who says what a success is while it learns: the env, or a classifier trained from marked episodes first."""
    judge_episodes: int = 100
    """Episodes of the supervised policy that are marked for it."""
    judge_rate: float = 0.05
    """Most failures (per episode) that the classifier may call a success, guarded on held-out ones."""
    judge_hold: int = 2
    """States in a row that must look like a success."""

    def __post_init__(self) -> None:
        if isinstance(self.person, dict):  # from run.json
            object.__setattr__(self, "person", Person(**self.person))
        in_range("rl.judge_episodes", self.judge_episodes, 4, 10**6)
        in_range("rl.judge_rate", self.judge_rate, 0, 1, open_low=True, open_high=True)
        in_range("rl.judge_hold", self.judge_hold, 1, 1000)
        for name, low, high in (("actor_every", 1, 10**6), ("batch", 2, 10**6), ("demo_share", 0, 1), ("synthetic", 0, 0.95),
                                ("synthetic_every", 1, 10**9), ("synthetic_rows", 1, 10**8), ("synthetic_updates", 1, 10**8),
                                ("synthetic_window", 2, 256), ("synthetic_strength", 0, 1e6),
                                ("capacity", 100, 10**9), ("warmup", 0, 10**9), ("pretrain", 0, 10**9), ("critics", 1, 256),
                                ("critic_hidden", 8, 8192), ("critic_layers", 1, 32), ("max_target", 0, 1e9),
                                ("bc_coef", 0, 1e6)):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        for name, high in (("utd", 1000), ("lr", 1), ("critic_lr", 1), ("gamma", 1), ("tau", 1), ("max_grad_norm", 1e6)):
            in_range(f"rl.{name}", getattr(self, name), 0, high, open_low=True)
        in_range("rl.subset (<= critics)", self.subset, 1, self.critics)


@dataclass(frozen=True, kw_only=True)
class RlpdOptions(OffPolicyOptions):
    """RLPD: SAC with symmetric sampling of demonstrations (`robo_rl/algos/rlpd.py`)."""

    alpha: float = 0.001
    """Temperature at the start."""
    alpha_lr: float = 3e-4
    target_entropy: float = 0.5
    """The target entropy is minus this per action entry: -D/2, RLPD's and HIL-SERL's."""
    entropy_backup: bool = False
    """Whether the target counts the entropy of the next action."""
    imitate: Literal["taught", "success"] = "taught"
    """What --rl.bc-coef holds the actor near: demonstrations and corrections, or also what of its own led to a success, that is,
    chunks that a return above 0 followed in an episode that terminated (for sparse rewards)."""
    ramp: int = 0
    """Actor updates over which its learning rate grows to --rl.lr: the slopes of young critics are no guide."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.alpha", self.alpha, 0, 100)
        in_range("rl.alpha_lr", self.alpha_lr, 0, 1)
        in_range("rl.target_entropy", self.target_entropy, 0, 100)
        in_range("rl.ramp", self.ramp, 0, 10**9)


@dataclass(frozen=True, kw_only=True)
class HilSerlOptions(RlpdOptions):
    """HIL-SERL: RLPD with corrections in both buffers and a gripper critic (`robo_rl/algos/hil_serl.py`)."""

    grasp_penalty: float = 0.02
    """Cost of every change of the gripper's command."""

    def __post_init__(self) -> None:
        RlpdOptions.__post_init__(self)
        in_range("rl.grasp_penalty", self.grasp_penalty, 0, 100)


@dataclass(frozen=True, kw_only=True)
class ExpoOptions(OffPolicyOptions):
    """EXPO: a flow trained by imitation of replay, small edits and the choice among them by value (`robo_rl/algos/expo.py`)."""

    alpha: float = 0.01
    alpha_lr: float = 3e-4
    slow: float = 0.001
    """Share by which the flow that acts follows the one that learns, per update."""
    imitate: Literal["success", "all"] = "success"
    """What of the policy's own the flow imitates: episodes that ended in success, or all of replay, as the paper."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.alpha", self.alpha, 0, 100)
        in_range("rl.alpha_lr", self.alpha_lr, 0, 1)
        in_range("rl.slow", self.slow, 0, 1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class PaRlOptions(OffPolicyOptions):
    """PA-RL: actions are optimised against the critic, the flow imitates them (`robo_rl/algos/pa_rl.py`)."""

    cql_alpha: float = 0.0
    """Weight of the Cal-QL penalty on the critic."""
    cql_temperature: float = 0.01
    """T [value] of its soft maximum over actions."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.cql_alpha", self.cql_alpha, 0, 1e6)
        in_range("rl.cql_temperature", self.cql_temperature, 0, 1e6, open_low=True)


@dataclass(frozen=True, kw_only=True)
class IqlOptions(OffPolicyOptions):
    """IQL: expectile values of the data's own actions, weighted imitation (`robo_rl/algos/iql.py`)."""

    expectile: float = 0.7
    beta: float = 30.0
    """Inverse temperature: weights are exp(beta A); the paper's 0.5 to 10, for returns over a range of 100 and more, where
    they lie in [0, 1]."""
    max_weight: float = 100.0

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.expectile", self.expectile, 0.5, 1, open_high=True)
        in_range("rl.beta", self.beta, 0, 1e6)
        in_range("rl.max_weight", self.max_weight, 0, 1e9, open_low=True)


@dataclass(frozen=True, kw_only=True)
class CalQlOptions(RlpdOptions):
    """Cal-QL: SAC with a conservative critic that never falls below the data's returns (`robo_rl/algos/calql.py`)."""

    target_entropy: float = 1.0
    """The target entropy is minus this per action entry: -D, Cal-QL's."""
    cql_alpha: float = 0.01
    """Weight of the penalty; the paper's 5, for returns of -500 to 0, where they lie in [0, 1]."""
    cql_temperature: float = 0.01
    """T [value] of the penalty's soft maximum over actions; the paper's 1, likewise."""
    cql_actions: int = 4
    """Actions from the policy at the state, as many at its successor, and as many uniform ones."""

    def __post_init__(self) -> None:
        RlpdOptions.__post_init__(self)
        in_range("rl.cql_alpha", self.cql_alpha, 0, 1e6)
        in_range("rl.cql_temperature", self.cql_temperature, 0, 1e6, open_low=True)
        in_range("rl.cql_actions", self.cql_actions, 1, 1000)


@dataclass(frozen=True, kw_only=True)
class WsrlOptions(CalQlOptions):
    """WSRL: offline Cal-QL, a warm-up of the frozen policy, then SAC without the offline data (`robo_rl/algos/wsrl.py`)."""


@dataclass(frozen=True, kw_only=True)
class AloeOptions(OffPolicyOptions):
    """ALOE: a chunk critic of the present policy over mixed data, advantage-weighted flow matching (`robo_rl/algos/aloe.py`)."""

    beta: float = 1.0
    """Temperature of the weights exp(A / beta); A is divided by its std over the batch."""
    max_weight: float = 10.0
    samples: int = 4
    """Chunks of the policy whose mean value is V."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.beta", self.beta, 0, 1e6, open_low=True)
        in_range("rl.max_weight", self.max_weight, 0, 1e9, open_low=True)
        in_range("rl.samples", self.samples, 1, 1000)
