"""Options of methods that learn from replay."""

from dataclasses import dataclass, field
from typing import Literal

from robo_rl.errors import choose, in_range
from robo_rl.options.method import MethodOptions
from robo_rl.options.scripted_operator import ScriptedOperatorOptions


@dataclass(frozen=True, kw_only=True)
class OffPolicyOptions(MethodOptions):
    """What every method that learns from replay shares (`robo_rl/algos/offpolicy.py`)."""

    utd: float = 1.0
    """Critic updates per chunk of E control steps that was collected."""
    actor_every: int = 2
    """Critic updates per actor update."""
    batch: int = 256
    """Chunks of an update."""
    demo_share: float = 0.5
    """Share of every batch that is demonstrations and corrections; guaranteed, for buffers of any size."""
    capacity: int = 500_000
    """Control steps that replay keeps."""
    warmup: int = 2000
    """Control steps that the supervised policy collects first; nothing of it is changed meanwhile."""
    pretrain: int = 500
    """Critic updates after that, before the actor's first; for iql, calql, wsrl and aloe the updates of their
    offline stage on the demonstrations, before anything is collected."""
    critics: int = 4
    """E: critics of the ensemble."""
    subset: int = 2
    """How many of them, drawn anew each time, the target takes the least of; iql and aloe: of all."""
    critic_hidden: int = 256
    """Width of the critics."""
    critic_layers: int = 2
    """Hidden layers of the critics."""
    layer_norm: bool = True
    """Layer normalisation in the critics."""
    lr: float = 3e-4
    """Learning rate of the actor (Adam)."""
    critic_lr: float = 3e-4
    """Learning rate of the critics (Adam)."""
    gamma: float = 0.99
    """Per control step."""
    tau: float = 0.005
    """Share by which target critics follow per update."""
    max_target: float = 0.0
    """Targets are clamped to [0, max_target], for sparse rewards whose return is known to lie there; 0:
    off."""
    floor: bool = False
    """Targets are no lower than the return that did follow, where an episode terminated: with few updates
    values reach back over an episode at once. It leans towards luck where the env is random."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    bc_coef: float = 0.0
    """Weight of the supervised loss on the demonstrations in the actor's update."""
    synthetic: float = 0.0
    """Share of every batch that a diffusion model of replay made; the other sources share the rest."""
    synthetic_kind: Literal["synther", "guided"] = "synther"
    """Of what: single transitions (SynthER), or stretches of decisions, pushed towards the policy of the day
    (policy-guided)."""
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
    operator: str = "none"
    """Who may take over while it collects; what they do goes to the demonstrations too. none; scripted: a
    simulated operator; or a person: console (the page), gamepad, spacemouse, keyboard, each with :FILE where
    it is not the first, and ,mapping=FILE.json; leader:NAMESPACE. A device helps robot 0."""
    operator_speed: float = 1.0
    """Pace of the simulation beside a person; 1: real time; 0: as fast as it goes."""
    operator_port: int = 8765
    """TCP port of the page of --rl.operator console; 0: any free one."""
    scripted_operator: ScriptedOperatorOptions = field(default_factory=ScriptedOperatorOptions)
    """How the scripted operator behaves."""
    judge: Literal["env", "classifier"] = "env"
    """Who says what a success is while it learns: the env, or a classifier trained from marked episodes
    first. A person's mark beside it decides in any case."""
    judge_marks: str = ""
    """Data sets, with commas between, whose episodes the classifier is trained from: those of robo_rl collect
    --keep all, or marks/ of a console. "": episodes of the supervised policy, which the person of
    --rl.operator marks, or without one the env."""
    judge_episodes: int = 100
    """Episodes of the supervised policy that are marked for it."""
    judge_rate: float = 0.05
    """Most failures (per episode) that the classifier may call a success, guarded on held-out ones."""
    judge_hold: int = 2
    """States in a row that must look like a success."""

    def __post_init__(self) -> None:
        if isinstance(self.scripted_operator, dict):  # from run.json
            object.__setattr__(self, "scripted_operator", ScriptedOperatorOptions(**self.scripted_operator))
        in_range("rl.operator_speed", self.operator_speed, 0, 10)
        in_range("rl.operator_port", self.operator_port, 0, 65535)
        in_range("rl.judge_episodes", self.judge_episodes, 4, 10**6)
        in_range("rl.judge_rate", self.judge_rate, 0, 1, open_low=True, open_high=True)
        in_range("rl.judge_hold", self.judge_hold, 1, 1000)
        for name, low, high in (
            ("actor_every", 1, 10**6),
            ("batch", 2, 10**6),
            ("demo_share", 0, 1),
            ("synthetic", 0, 0.95),
            ("synthetic_every", 1, 10**9),
            ("synthetic_rows", 1, 10**8),
            ("synthetic_updates", 1, 10**8),
            ("synthetic_window", 2, 256),
            ("synthetic_strength", 0, 1e6),
            ("capacity", 100, 10**9),
            ("warmup", 0, 10**9),
            ("pretrain", 0, 10**9),
            ("critics", 1, 256),
            ("critic_hidden", 8, 8192),
            ("critic_layers", 1, 32),
            ("max_target", 0, 1e9),
            ("bc_coef", 0, 1e6),
        ):
            in_range(f"rl.{name}", getattr(self, name), low, high)
        for name, high in (
            ("utd", 1000),
            ("lr", 1),
            ("critic_lr", 1),
            ("gamma", 1),
            ("tau", 1),
            ("max_grad_norm", 1e6),
        ):
            in_range(f"rl.{name}", getattr(self, name), 0, high, open_low=True)
        in_range("rl.subset (<= critics)", self.subset, 1, self.critics)


@dataclass(frozen=True, kw_only=True)
class SacOptions(OffPolicyOptions):
    """What methods that are SAC share."""

    alpha: float = 0.001
    """Temperature at the start."""
    alpha_lr: float = 3e-4
    """Learning rate of the temperature."""
    target_entropy: float = 0.5
    """The target entropy is minus this per action entry: -D/2, RLPD's and HIL-SERL's."""
    entropy_backup: bool = False
    """Whether the target counts the entropy of the next action."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.alpha", self.alpha, 0, 100)
        in_range("rl.alpha_lr", self.alpha_lr, 0, 1)
        in_range("rl.target_entropy", self.target_entropy, 0, 100)


@dataclass(frozen=True, kw_only=True)
class RlpdOptions(SacOptions):
    """RLPD: SAC with symmetric sampling of demonstrations, as in the paper (`robo_rl/algos/rlpd.py`)."""

    utd: float = 20.0
    """Critic updates per chunk of E control steps that was collected."""
    actor_every: int = 20
    """Critic updates per actor update."""
    warmup: int = 5000
    """Control steps that the fresh actor collects first."""
    pretrain: int = 0
    """Critic updates after that, before the actor's first."""
    critics: int = 10
    """E: critics of the ensemble."""
    max_grad_norm: float = 1e6
    """Gradients are scaled down to this norm."""
    alpha: float = 1.0
    """Temperature at the start."""
    entropy_backup: bool = True
    """Whether the target counts the entropy of the next action: the paper's dense tasks; not the sparse
    ones."""


@dataclass(frozen=True, kw_only=True)
class DemoSacOptions(SacOptions):
    """SAC from demonstrations, a supervised actor and what it was worth (`robo_rl/algos/demo_sac.py`)."""

    imitate: Literal["taught", "success"] = "taught"
    """What --rl.bc-coef holds the actor near: demonstrations and corrections, or also what of its own led to
    a success, that is, chunks that a return above 0 followed in an episode that terminated (for sparse
    rewards)."""
    ramp: int = 0
    """Actor updates over which its learning rate grows to --rl.lr: the slopes of young critics are no
    guide."""
    average: float = 0.0
    """The actor that is evaluated, kept and deployed follows the one that learns by this share per update of
    it (`robo_rl/algos/averaged_weights.py`); 0: the one that learns."""

    def __post_init__(self) -> None:
        SacOptions.__post_init__(self)
        in_range("rl.ramp", self.ramp, 0, 10**9)
        in_range("rl.average", self.average, 0, 1)


@dataclass(frozen=True, kw_only=True)
class HilSerlOptions(DemoSacOptions):
    """HIL-SERL: SAC with corrections in both buffers and a gripper critic (`robo_rl/algos/hil_serl.py`)."""

    grasp_penalty: float = 0.02
    """Cost of every change of the gripper's command."""

    def __post_init__(self) -> None:
        DemoSacOptions.__post_init__(self)
        in_range("rl.grasp_penalty", self.grasp_penalty, 0, 100)


@dataclass(frozen=True, kw_only=True)
class ExpoOptions(OffPolicyOptions):
    """EXPO: a flow trained by imitation of replay, small edits and the choice among them by value
    (`robo_rl/algos/expo.py`)."""

    alpha: float = 0.01
    """Temperature of the edit policy at the start."""
    alpha_lr: float = 3e-4
    """Learning rate of that temperature; 0: it stays."""
    slow: float = 0.001
    """Share by which the flow that acts follows the one that learns, per update."""
    imitate: Literal["success", "all"] = "success"
    """What of the policy's own the flow imitates: episodes that ended in success, or all of replay, as the
    paper."""

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
class DsrlOptions(SacOptions):
    """DSRL: the flow stays as it is, SAC chooses the noise that it begins with (`robo_rl/algos/dsrl.py`)."""

    target_entropy: float = 0.0
    """The target entropy is minus this per entry of the noise, in units of its reach; the most that is
    possible is log 2."""
    slope: Literal["distilled", "flow"] = "distilled"
    """Where the noise's slope comes from: a critic of the noise that is taught by the critic of actions (the
    paper's noise aliasing: the flow may be a black box), or the critic of actions through the flow."""
    distil_every: int = 2
    """Critic updates per update of the critic of the noise."""
    average: float = 0.0
    """What chooses the noise where it is evaluated, kept and deployed follows what learns by this share per
    update of it (`robo_rl/algos/averaged_weights.py`); 0: what learns."""

    def __post_init__(self) -> None:
        SacOptions.__post_init__(self)
        choose("rl.slope", self.slope, ("distilled", "flow"))
        in_range("rl.distil_every", self.distil_every, 1, 10**6)
        in_range("rl.average", self.average, 0, 1)


@dataclass(frozen=True, kw_only=True)
class DemoFlowOptions(OffPolicyOptions):
    """A flow from demonstrations that imitates, and climbs the critic through its own steps
    (`robo_rl/algos/demo_flow.py`)."""

    eta: float = 1.0
    """Weight of the critic's slope beside imitation, in units of its mean size."""
    imitate: Literal["success", "all"] = "success"
    """What of its own the flow imitates: chunks that a return above 0 followed in an episode that terminated
    (for sparse rewards), or all of replay."""
    average: float = 0.0
    """The flow that is evaluated, kept and deployed follows the one that learns by this share per update of
    it (`robo_rl/algos/averaged_weights.py`); 0: the one that learns."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.eta", self.eta, 0, 1e6)
        in_range("rl.average", self.average, 0, 1)
        choose("rl.imitate", self.imitate, ("success", "all"))


@dataclass(frozen=True, kw_only=True)
class IqlOptions(OffPolicyOptions):
    """IQL: expectile values of the data's own actions, weighted imitation (`robo_rl/algos/iql.py`)."""

    weighting: Literal["exp", "positive"] = "exp"
    """Weights of the imitation: exp(beta A), or in proportion to A where it is positive, else 0 (A-LoL; with
    expectile 0.5)."""
    expectile: float = 0.7
    """Expectile of the value regression: 0.5 is the mean, towards 1 the best action of the data."""
    beta: float = 30.0
    """Inverse temperature: weights are exp(beta A); the paper's 0.5 to 10, for returns over a range of 100
    and more, where they lie in [0, 1]."""
    max_weight: float = 100.0
    """Most that a sample may weigh in the imitation."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        choose("rl.weighting", self.weighting, ("exp", "positive"))
        in_range("rl.expectile", self.expectile, 0.5, 1, open_high=True)
        in_range("rl.beta", self.beta, 0, 1e6)
        in_range("rl.max_weight", self.max_weight, 0, 1e9, open_low=True)


@dataclass(frozen=True, kw_only=True)
class CalQlOptions(DemoSacOptions):
    """Cal-QL: SAC with a conservative critic that never falls below the data's returns
    (`robo_rl/algos/calql.py`)."""

    target_entropy: float = 1.0
    """The target entropy is minus this per action entry: -D, Cal-QL's."""
    cql_alpha: float = 0.01
    """Weight of the penalty; the paper's 5, for returns of -500 to 0, where they lie in [0, 1]."""
    cql_temperature: float = 0.01
    """T [value] of the penalty's soft maximum over actions; the paper's 1, likewise."""
    cql_actions: int = 4
    """Actions from the policy at the state, as many at its successor, and as many uniform ones."""

    def __post_init__(self) -> None:
        DemoSacOptions.__post_init__(self)
        in_range("rl.cql_alpha", self.cql_alpha, 0, 1e6)
        in_range("rl.cql_temperature", self.cql_temperature, 0, 1e6, open_low=True)
        in_range("rl.cql_actions", self.cql_actions, 1, 1000)


@dataclass(frozen=True, kw_only=True)
class WsrlOptions(CalQlOptions):
    """WSRL: offline Cal-QL, a warm-up of the frozen policy, then SAC without the offline data
    (`robo_rl/algos/wsrl.py`)."""


@dataclass(frozen=True, kw_only=True)
class AloeOptions(OffPolicyOptions):
    """ALOE: a chunk critic of the present policy over mixed data, advantage-weighted flow matching
    (`robo_rl/algos/aloe.py`)."""

    beta: float = 1.0
    """Temperature of the weights exp(A / beta); A is divided by its std over the batch."""
    max_weight: float = 10.0
    """Most that a sample may weigh in the imitation."""
    samples: int = 4
    """Chunks of the policy whose mean value is V."""

    def __post_init__(self) -> None:
        OffPolicyOptions.__post_init__(self)
        in_range("rl.beta", self.beta, 0, 1e6, open_low=True)
        in_range("rl.max_weight", self.max_weight, 0, 1e9, open_low=True)
        in_range("rl.samples", self.samples, 1, 1000)
