"""Options of a policy, and of its behaviour cloning."""

from dataclasses import dataclass, field
from typing import Literal

from robo_rl.errors import UserError, choose, in_range
from robo_rl.options.lora import LoraOptions
from robo_rl.plugins import OWN, is_object

FLOWS = ("pi0", "pi05", "smolvla", "xvla", "groot", "groot_n17")
TOKENS = ("pi0_fast", "openvla_oft")
VLAS = (*FLOWS, *TOKENS)
POLICIES = ("flow", "diffusion", "gaussian", "squashed", "guided", "steered", *VLAS)
FROM_REPLAY = ("guided", "steered", "squashed")  # what acts for methods that learn from replay: no log-probs
AROUND_FLOWS = ("flow", "guided", "steered")  # a small flow, and what acts with its samples
# kinds whose chunks may have rows that are given, and a window
ROW_KINDS = ("flow", "pi0", "pi05", "smolvla")
TEXT = 256  # bytes of an instruction that a vision-language-action model is given


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What the policy is. A checkpoint carries these; evaluation rebuilds the policy from them."""

    kind: str = "flow"
    """flow, diffusion, gaussian, squashed: tanh-Gaussian (SAC's), guided: a flow whose samples a critic
    chooses among (EXPO, PA-RL, demo_flow), steered: a flow whose noise a network chooses (DSRL), the
    vision-language-action models pi0, pi05, smolvla, xvla, groot (N1.5) and groot_n17 (flows too), pi0_fast
    and openvla_oft (tokens), or module:function of your own."""
    size: Literal["tiny", "small", "full"] = "tiny"
    """Vision-language-action models, of fresh weights. tiny: seconds, to see it move; small: trains on a CPU;
    full: the published size."""
    folder: str = ""
    """Vision-language-action models: folder of one in a public layout (LeRobot, openpi and others), with what
    its inputs mean. --policy FOLDER finds the kind."""
    words: str = ""
    """Vision-language-action models: the tokeniser, a file, a folder or words:N (hashed); empty: the
    folder's, without one hashed words."""
    prompt: int = 0
    """Vision-language-action models: most tokens of a prompt; 0: the model's own (pi0 48, pi05 200)."""
    statistics: Literal["demos", "folder"] = "demos"
    """Vision-language-action models with a folder: what state and actions are normalised by, the supervised
    stage's data (demos) or what the folder has."""
    action_words: str = ""
    """pi0_fast: what its action tokens mean, the folder of a FAST tokeniser, dct:N (the coefficients -N .. N
    are the tokens), or train:N: byte pairs of the supervised stage's chunks, N tokens in all. Empty: the
    folder's, without one dct:100."""
    action_tokens: int = 0
    """pi0_fast: most tokens of a chunk; 0: as many as a chunk has numbers, and no more than the model has."""
    action_head: Literal["tokens", "l1"] = "tokens"
    """openvla_oft with fresh weights: 256 bins for every number of an action, or the numbers themselves,
    which RL samples around (Laplace of init_std)."""
    keep_prefix: bool = False
    """Vision-language-action models: the keys and values of a decision's prefix are kept with it, so that
    learning with a frozen trunk encodes nothing; costs memory (small: half a megabyte per decision). Methods
    that learn from replay keep one per control step; without it they keep what was observed, and encode every
    batch again."""
    actor: Literal["own", "guided", "steered", "squashed"] = "own"
    """pi0, pi05, smolvla, xvla, groot, groot_n17: what acts on their trunk. own: their expert; guided: their
    expert, among whose samples a critic chooses (expo, pa_rl, demo_flow); steered: their expert, whose noise
    a network chooses (dsrl); squashed: a tanh-Gaussian on the pooled vector (hil_serl and other SAC), without
    the expert."""
    horizon: int = 8
    """H: steps in a predicted chunk."""
    execute: int = 8
    """E <= H: steps of it that are executed before the next decision."""
    denoise_steps: int = 4
    """K: denoise steps per chunk."""
    commit: int = 0
    """flow, pi0, pi05, smolvla: the first rows of a chunk, up to so many, may be given, and half of
    supervision teaches to go on from them. For --chunking trained: as many as the control periods that
    inference takes at most. --latency sets it."""
    commit_least: int = 0
    """RL: rollouts give a chunk so many rows to commit, at random, of the chunk that runs while it is decided
    on; 0: none. --latency sets it."""
    window: int = 0
    """The same kinds: each row of a chunk sees the observation and the last so many rows, itself one of them,
    behind a Λ-shaped mask, so that rows further from those given cannot copy them (Xiaomi-Robotics-0: 4). The
    network of a small flow then is a transformer over rows, of `layers` blocks of width `hidden`, for
    --policy.noise sde or cps. 0: no mask."""
    weigh_errors: bool = False
    """Flows but xvla, and diffusion: supervision weighs each entry of a chunk by its error, from 0.5 to 5
    times (Xiaomi-Robotics-0)."""
    predict: Literal["velocity", "action"] = "velocity"
    """What the network of a flow or a diffusion gives: the velocity (a diffusion: the noise), or action: the
    clean chunk, from which the velocity follows. A velocity is the noise minus the chunk, so its network must
    first learn to copy the noise."""
    hidden: int = 256
    """Width of the action head."""
    layers: int = 3
    """Hidden layers of the action head."""
    residual: bool = False
    """flow, diffusion, gaussian, squashed, guided, steered: each hidden layer of the action head but the
    first, which is linear, adds to what it reads, normalised. Few demonstrations then say more."""
    width: int = 96
    """Token width of the vision-language trunk (obs rgb)."""
    depth: int = 2
    """Transformer blocks of the vision-language trunk."""
    keypoints: Literal["plain", "standard", "white"] = "plain"
    """Key points of this trunk, by softmaxes of feature maps: 16 of maps as they are, or standard: 32 of maps
    with mean 0 and std 1 over the picture, so that fresh weights point at something; white: these, of
    pictures whose pixels are uncorrelated, so that they point at small things too."""
    noise: Literal["sde", "cps", "learned"] = "sde"
    """Exploration of a flow chain: Flow-SDE, Flow-CPS, or a learned std (Flow-Noise, ReinFlow)."""
    noise_level: float = 0.5
    """a of Flow-SDE and Flow-CPS."""
    noise_min: float = 0.08
    """Lower bound of the learned std (normalised action units)."""
    noise_max: float = 0.16
    """Bounds of the learned std (normalised action units)."""
    noise_steps: Literal["one", "last", "all"] = "one"
    """Which denoise steps are random: one drawn per decision (pi_RL's hybrid), the last that has noise, or
    all. The steps after a random one take most of its noise away again; nothing comes after the last."""
    train_steps: int = 20
    """Diffusion: steps of the noise schedule; denoise_steps must divide it."""
    finetune_steps: int = 5
    """Diffusion (DPPO): the last K' steps are fine-tuned, earlier ones run on the frozen base; K or more:
    all."""
    std_floor: float = 0.1
    """Diffusion: least std of a random denoise step, used for sampling and for log-probs alike."""
    std_scale: float = 1.0
    """Diffusion: share of DDPM's own std at every random step, before the floor; 0: exploration is the
    evaluated chain of means with noise of std_floor."""
    init_std: float = 0.6
    """Gaussian: initial std (normalised action units)."""
    activation: Literal["relu", "silu", "tanh"] = "relu"
    """Of the hidden layers of the action head, and of the critic of methods that learn on-policy."""
    logp_reduction: Literal["sum", "mean"] = "sum"
    """Over the executed E x A entries. Clip ranges do not carry over between the two."""
    gripper: Literal["continuous", "toggle"] = "continuous"
    """Squashed: the gripper is one more axis, or a discrete critic picks its commands."""
    teacher: bool = False
    """Squashed: the supervised actor stays as it is beside the learning one, and critics choose which of the
    two acts (IBRL)."""
    critics: int = 4
    """Guided, and squashed with a teacher: critics that judge."""
    critic_hidden: int = 256
    """Guided, and squashed with a teacher: width of those critics; steered: of what chooses the noise."""
    critic_layers: int = 2
    """Their hidden layers."""
    candidates: int = 8
    """Guided: N samples of the flow per decision."""
    spread: float = 1.0
    """Guided: std of the noise that samples grow from; below 1 the first of them grows from no noise at
    all."""
    softness: float = 1.0
    """PA-RL: temperature [value] of the choice among optimised actions, where it is not the best one."""
    explore_std: float = 0.0
    """Guided: std of the noise that is added to what it does while it explores [-1..1 units]."""
    edit_scale: float = 0.0
    """Guided: reach of EXPO's edits [-1..1 units]; 0: none."""
    keep: int = 4
    """Guided: the candidates that climb the critic's slope (PA-RL)."""
    local_steps: int = 0
    """Guided: PA-RL's gradient steps on each kept candidate."""
    local_rate: float = 3e-4
    """PA-RL's steps and their size."""
    steer_reach: float = 1.5
    """Steered: the noise that is chosen lies in -reach .. reach (DSRL's b_W)."""
    steer_row: bool = False
    """Steered: one row of noise is chosen, and all steps of a chunk begin with it (as DSRL steers pi0). A few
    numbers then move a long chunk."""
    advantage: bool = False
    """A flow or a diffusion that is told how good an action is, and acts as if told that it is good
    (recap)."""
    guidance: float = 1.0
    """beta of recap: how far acting goes beyond what the policy does untold, towards what it does told; 1: as
    told, larger: further. Other values than 1 cost a second pass."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the trunk's weights and products (of a vision-language-action model, its expert's too):
    bf16 is for GPUs. What learns has a copy in fp32; normalisers, the head of a small policy, traces and
    log-probs stay fp32."""
    recompute: bool = False
    """Transformer blocks keep no activations: they are computed again in the backward pass. Less memory, a
    third more time."""
    lora: LoraOptions = field(default_factory=LoraOptions)
    """Low-rank adapters."""

    @property
    def acts(self) -> str:
        """The kind of small policy that this one acts as: of a vision-language-action model that is a flow
        what `actor` says."""
        return self.kind if self.kind not in FLOWS else "flow" if self.actor == "own" else self.actor

    @property
    def is_flow(self) -> bool:
        """Whether the policy is a flow chain, a small one or a vision-language-action model's, that acts as
        it is."""
        return self.acts == "flow"

    @property
    def hint(self) -> str:
        """What a method that refuses this kind adds, for a policy of the user's own."""
        if not is_object(self.kind):
            return ""
        return (
            "; a policy of your own goes with bc, ppo and recap, other methods need the chain or the critics "
            "of the kind that they name"
        )

    def require_flow(self, method: str) -> None:
        """UserError, in the name of a method, unless the policy is one."""
        if self.kind not in ("flow", *FLOWS):
            raise UserError(
                f"{method} needs --policy.kind flow, {', '.join(FLOWS)}, got {self.kind}{self.hint}"
            )
        if not self.is_flow:
            raise UserError(f"{method} needs --policy.actor own, got {self.actor}")

    @property
    def text(self) -> int:
        """`ObsSpec.text` of its observations."""
        return TEXT if self.kind in VLAS else 0

    def __post_init__(self) -> None:
        if not is_object(self.kind):
            choose("policy.kind", self.kind, (*POLICIES, OWN))
        if isinstance(self.lora, dict):  # of a checkpoint
            object.__setattr__(self, "lora", LoraOptions(**self.lora))
        choose("policy.actor", self.actor, ("own", *FROM_REPLAY))
        what = (
            self.kind
            if self.acts == self.kind or self.acts == "flow"
            else f"{self.kind} and policy.actor {self.actor}"
        )
        if self.lora.rank and self.acts in FROM_REPLAY:
            raise UserError(
                "policy.lora goes with flow, diffusion, gaussian and policies of your own, got policy.kind "
                f"{what}"
            )
        if self.kind in VLAS and self.predict != "velocity":
            raise UserError(
                f"policy.kind {self.kind} predicts the velocity, got policy.predict {self.predict}"
            )
        self._check_rows(what)
        if self.kind in TOKENS and self.logp_reduction != "sum":
            raise UserError(
                f"policy.kind {self.kind} has the log-prob of every token, got policy.logp_reduction "
                f"{self.logp_reduction}"
            )
        choose("policy.action_head", self.action_head, ("tokens", "l1"))
        in_range("policy.action_tokens", self.action_tokens, 0, 4096)
        if self.advantage and self.acts in ("gaussian", *FROM_REPLAY, *TOKENS):
            raise UserError(
                f"policy.advantage goes with flow, diffusion, {', '.join(FLOWS)}, got policy.kind {what}"
            )
        if self.advantage and self.commit:
            raise UserError("policy.advantage goes without policy.commit")
        if self.advantage and self.noise == "learned":
            raise UserError("policy.advantage goes without a learned noise: --policy.noise sde or cps")
        in_range("policy.guidance", self.guidance, 0, 100)
        choose("policy.size", self.size, ("tiny", "small", "full"))
        choose("policy.keypoints", self.keypoints, ("plain", "standard", "white"))
        choose("policy.statistics", self.statistics, ("demos", "folder"))
        in_range("policy.prompt", self.prompt, 0, 4096)
        for name, low, high in (
            ("horizon", 1, 256),
            ("denoise_steps", 1, 1000),
            ("hidden", 8, 8192),
            ("layers", 1, 32),
            ("noise_level", 0, 2),
            ("std_scale", 0, 1),
            ("width", 16, 4096),
            ("depth", 1, 48),
        ):
            in_range(f"policy.{name}", getattr(self, name), low, high)
        in_range("policy.execute (E <= H)", self.execute, 1, self.horizon)
        in_range("policy.commit (< H)", self.commit, 0, self.horizon - 1)
        in_range("policy.window (<= H)", self.window, 0, self.horizon)
        in_range("policy.commit_least (<= commit)", self.commit_least, 0, self.commit)
        if self.commit_least and not self.commit <= min(self.execute, self.horizon - self.execute):
            raise UserError(
                f"policy.commit_least: up to {self.commit} rows of a chunk run while the next one is decided "
                f"on, so policy.execute must be at least {self.commit} and policy.horizon at least "
                f"policy.execute + {self.commit}, got {self.execute} and {self.horizon}"
            )
        for name in ("init_std", "std_floor", "noise_min", "noise_max"):
            in_range(f"policy.{name}", getattr(self, name), 0, 10, open_low=True)
        for name, low, high in (
            ("critics", 1, 256),
            ("critic_hidden", 8, 8192),
            ("critic_layers", 1, 32),
            ("candidates", 1, 4096),
            ("explore_std", 0, 2),
            ("edit_scale", 0, 2),
            ("keep", 1, 4096),
            ("local_steps", 0, 1000),
            ("local_rate", 0, 10),
            ("spread", 0, 1),
        ):
            in_range(f"policy.{name}", getattr(self, name), low, high)
        in_range("policy.steer_reach", self.steer_reach, 0, 100, open_low=True)
        in_range("policy.softness", self.softness, 0, 1e6, open_low=True)
        if self.is_flow and self.noise == "cps":
            in_range("policy.noise_level (of noise cps)", self.noise_level, 0, 1)
        in_range("policy.noise_min (<= noise_max)", self.noise_min, 0, self.noise_max, open_low=True)
        in_range("policy.train_steps", self.train_steps, 1, 10_000)
        in_range("policy.finetune_steps", self.finetune_steps, 1, 10_000)
        if self.kind == "diffusion" and self.train_steps % self.denoise_steps:
            raise UserError(
                f"policy.denoise_steps must divide train_steps={self.train_steps}, got {self.denoise_steps}"
            )

    def _check_rows(self, what: str) -> None:
        """UserError: what is asked of the rows of a chunk does not go with this kind of policy."""
        for name in ("commit", "window"):
            if getattr(self, name) and (self.acts != "flow" or self.kind not in ROW_KINDS):
                raise UserError(f"policy.{name} goes with policy.kind {', '.join(ROW_KINDS)}, got {what}")
        if self.commit_least and self.kind != "flow":
            raise UserError(f"policy.commit_least, and --latency, go with policy.kind flow, got {self.kind}")
        if (
            self.window
            and self.kind == "flow"
            and (self.hidden % 2 or self.advantage or self.noise == "learned")
        ):
            raise UserError(
                "policy.window of a small flow needs an even policy.hidden, goes without policy.advantage, "
                f"and with policy.noise sde or cps; got {self.hidden}, {self.advantage} and {self.noise}"
            )
        if self.weigh_errors and (self.acts not in ("flow", "diffusion") or self.kind == "xvla"):
            raise UserError(
                "policy.weigh_errors goes with flow, diffusion, "
                f"{', '.join(f for f in FLOWS if f != 'xvla')}, got {what}"
            )


@dataclass(frozen=True, kw_only=True)
class BcOptions:
    """Supervised flow matching on demonstrations, the SFT stage (`robo_rl/algos/bc.py`)."""

    updates: int = 600
    """Optimizer steps; 0: no supervised stage."""
    most: int = 0
    """Most of them on a data set, or on the demonstrations of --demos N, from 20 episodes on: three times as
    many each time, until success is 0.9 with its 95 % interval, and while the loss on every tenth episode,
    held out, falls or success rises. 0, and with --bc.updates: no more than --bc.updates."""
    compare: bool = False
    """From 20 demonstrations on: hidden layers of tanh or of ReLU, whichever has the lower loss on every
    tenth episode, held out, after 600 updates. Few demonstrations of a smooth motion ask for tanh, precise
    tasks for ReLU. False, and with --policy.activation: that one."""
    own: int = 0
    """Methods that learn online, while supervised success is between 0 and 0.6 (0.9 with exploration noise of
    no more than 0.25): before RL the policy plays so many episodes with exploration noise, and learns from
    its successes beside the demonstrations (with --bc.head its head alone); again while that raises success.
    0: none."""
    ground: int = 0
    """Most optimizer steps before those, where demonstrations have several instructions: the trunk of a
    vision-language-action model with fresh weights learns to tell from the first observation of an episode
    the mean of its actions, until episodes that are held out no longer gain. 0: none."""
    batch: int = 256
    """Demonstrated chunks of a step."""
    head: int = 0
    """Optimizer steps after those, from pictures: the action head alone learns on, on what the trunk, which
    stays as it is, makes of each frame once. They cost what steps without pictures cost. 0: none."""
    head_every: int = 0
    """These learn from the first frame of an episode and from one in so many of the others. 0: as
    --data.every."""
    pear: str = ""
    """A run folder whose best policy models who showed the demonstrations (--algo bc on the same data):
    chunks are weighed by how much better than it the policy that learns would go on after them (PEAR), anew
    after every tenth of the updates. Empty: all count alike."""
    noises: int = 1
    """Draws of time and noise for each demonstrated chunk of a batch; the observation is encoded once for all
    of them."""
    shift: float = 0.0
    """Pictures are moved by at most this share of their side, drawn for every one of a batch; what comes in
    repeats the border. 0: not. A few hundred scenes are learnt by heart otherwise."""
    colour: float = 0.0
    """Brightness, contrast and saturation of pictures are changed by at most this share, drawn alike; 0:
    not."""
    forget: float = 0.0
    """Share of the demonstrated frames of a batch, with pictures, that are shown without their state (the
    mean in its place), so that the pictures must tell. 0: none."""
    compile: bool = False
    """Transformer blocks go through torch.compile while they learn from demonstrations: half a minute at the
    start, then fewer passes over memory. RL runs them as they are, for ratios of exactly 1."""
    lr: float = 1e-3
    """Learning rate (AdamW)."""
    weight_decay: float = 1e-6
    """Of AdamW."""
    ema: float = 0.995
    """Decay per step of the average of the weights that becomes the policy; 0: the last weights."""

    def __post_init__(self) -> None:
        in_range("bc.updates", self.updates, 0, 10**8)
        in_range("bc.most", self.most, 0, 10**8)
        in_range("bc.own", self.own, 0, 100_000)
        in_range("bc.ground", self.ground, 0, 10**8)
        in_range("bc.head", self.head, 0, 10**8)
        in_range("bc.head_every", self.head_every, 0, 10_000)
        in_range("bc.batch", self.batch, 1, 10**6)
        in_range("bc.noises", self.noises, 1, 1000)
        in_range("bc.shift", self.shift, 0, 0.5)
        in_range("bc.colour", self.colour, 0, 1)
        in_range("bc.forget", self.forget, 0, 1)
        in_range("bc.lr", self.lr, 0, 1, open_low=True)
        in_range("bc.weight_decay", self.weight_decay, 0, 1)
        in_range("bc.ema", self.ema, 0, 1, open_high=True)
