"""What a training run is told: one frozen TrainConfig; a run folder keeps it in run.json."""

from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from robo_rl import old_names
from robo_rl.child import HANG
from robo_rl.errors import UserError, choose, in_range
from robo_rl.options import (
    ALGOS,
    RL_OPTIONS,
    BcOptions,
    DataOptions,
    MethodOptions,
    OffPolicyOptions,
    OnPolicyOptions,
    PiRlOptions,
    PolicyOptions,
    RolloutOptions,
)
from robo_rl.plugins import OWN, is_object, load_object, options_class

# samplers of robo_rl/rollout_control/pool.py
POOL_STARTS = ("pool", "vade", "mopps", "dps", "sfl", "prompt_gdro", "dots", "v0")
TASK_MIXES = ("uniform", "rulereasoner", "prompt_gdro")  # of robo_rl/rollout_control/tasks.py
# who decides which start comes next, beside samplers named module:function
STARTS = ("auto", "uniform", "reverse", *POOL_STARTS)
WHAT = "--algo"
# what of a policy's options is the method's affair, not that of weights learnt before
EXPLORATION = (
    "noise",
    "noise_level",
    "noise_min",
    "noise_max",
    "noise_steps",
    "finetune_steps",
    "std_floor",
    "std_scale",
    "logp_reduction",
    "teacher",
    "commit_least",
)


def method_options(algo: str) -> type[MethodOptions]:
    """The class of a method's options, ours or of the user's own `module:function`. UserError: there is no
    such method."""
    if is_object(algo):
        return options_class(load_object(algo, WHAT), algo, WHAT, (RolloutOptions, OffPolicyOptions))
    return RL_OPTIONS.get(choose("algo", algo, (*ALGOS, OWN)), PiRlOptions)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a policy: a few demonstrations, supervised flow matching, online RL, honest evaluation."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {  # how --help shows the options
        "What is learnt": (
            "sim",
            "task",
            "algo",
            "obs",
            "preset",
            "demos",
            "demos_most",
            "init",
            "seed",
            "steps",
            "envs",
        ),
        "The run": (
            "out",
            "resume",
            "seeds",
            "vary",
            "at_once",
            "config",
            "print_config",
            "plan",
            "twin",
            "video",
            "wandb",
        ),
        "Evaluation, and when to stop": ("eval_episodes", "eval_every", "eval_envs", "target", "patience"),
        "The environment": ("reward", "control", "max_steps", "randomise", "image_size", "cameras", "judge"),
        "Inference that takes time": ("latency", "latency_jitter"),
        "Processes": (
            "device",
            "workers",
            "threads",
            "torch_threads",
            "max_staleness",
            "learners",
            "server",
            "backend",
            "ray_address",
            "hang",
            "periodic",
            "over_provision",
        ),
        "Where rollouts begin": ("tasks", "starts", "start_pool", "start_rows", "start_uniform"),
        "Runs that share their episodes": ("share", "share_foreign", "share_keep"),
        "Rollouts in a learnt world model": (
            "dream",
            "dream_model",
            "dream_refit",
            "dream_updates",
            "dream_hard",
        ),
    }

    sim: str = "mujoco"
    """mujoco, mujoco_warp, maniskill, isaacgym, isaaclab, gym:<id>, envpool:<id>, wm:<folder of a world
    model>, arm or dds (the governed arm in lockstep, or over DDS in real time), module:function of your own
    (arguments follow: gym:<id>,radius=0.3), or none: --algo bc on a data set in its own units, judged by
    episodes that are held out."""
    task: str = ""
    """Task of the sim; empty takes its default (mujoco: pick_cube, maniskill: PickCube-v1); mujoco: or
    module:object of your own, or several with commas between: one policy that is told the instruction;
    maniskill: an id, or MODULE:ID of your own, arguments follow (PickCube-v1,robot_uids=panda_wristcam)."""
    algo: str = "pi_rl"
    """pi_rl, ppo, dppo, reinflow, nft; from replay: rlpd, demo_sac, demo_flow, hil_serl, expo, pa_rl, dsrl,
    iql, calql, wsrl, aloe; from data sets of whole episodes: recap; bc (supervised only); or module:function
    of your own."""
    obs: str = "state"
    """state, or rgb: two cameras and the instruction through the vision-language trunk."""
    preset: str = "full"
    """quick: minutes, to see it move; full: to the numbers of the README; paper (dppo, dsrl,
    reinflow, rlpd): the method's own numbers."""
    demos: str = "20"
    """Number of expert demonstrations to record, of each task, or the folder of a LeRobot v3 data set; 0
    starts from scratch."""
    demos_most: int = 0
    """Most demonstrations that the expert is asked for until success after supervised learning is 0.9 with
    its 95 % interval: three times as many each time, and as many more updates; with --bc.head half as many
    more, from which the head alone learns on. 0, and with --demos: no more than --demos."""
    init: str = ""
    """Run or checkpoint folder whose policy this run begins with (its best), in place of a fresh one and of
    supervised learning; --algo bc, or --bc.updates N with --demos, teaches it on."""
    seed: int = 0
    """Of everything that is random. With --workers 0 the same seed gives the same run."""
    steps: int = 3_000_000
    """Control steps of online RL, over all envs."""
    envs: int = 256
    """N: envs in parallel."""
    device: str = "cpu"
    """Where the policy acts and learns: cpu, cuda or cuda:N; simulators that compute on a GPU then give their
    tensors there."""
    threads: int = 0
    """Simulation threads of each worker; 0: the cores shared out."""
    workers: int | None = None
    """Processes that collect beside the learner; 0: all in one process, which repeats exactly for a seed.
    None: one per core (on a single core none); of methods that learn from replay none, beside a person
    one."""
    max_staleness: int | None = None
    """Most weight versions that what is trained on may lie behind; 0: synchronous; None: 1 with workers, else
    0."""
    learners: int = 1
    """Processes that learn together: shards of the policy (FSDP2), each with its rows of every minibatch."""
    periodic: int = 0
    """Synchronous, with gradients summed while data streams in: rounds of whole groups of all envs in an
    update, each learnt from as soon as it is there, under unchanged weights; one step at the end. 0: off."""
    over_provision: float = 1.0
    """With a group advantage and staleness: episodes in flight over those of a batch; those a batch does not
    wait for go on under newer weights (APRIL)."""
    server: bool = False
    """One process decides for all workers, in batches, instead of each for itself; for many sims that mostly
    wait."""
    backend: str = "processes"
    """processes: workers on this machine; ray: workers are Ray actors, on any machine of a cluster."""
    ray_address: str = ""
    """Ray cluster to join, for example auto; empty: one of this machine alone."""
    hang: float = HANG
    """Seconds without a decision after which a worker is restarted; of the learner's own simulator
    (--workers 0, evaluations) seconds of one step after which you are told, and ten times as many end the
    run."""
    torch_threads: int = 1
    """Threads of torch in the learner."""
    reward: str = ""
    """sparse, or dense where the task has it; empty: the task's own."""
    control: str = ""
    """Meaning of an action, for example ee_delta or joint_delta; of maniskill also any control mode of the
    robot, such as pd_joint_pos; empty: the simulator's default."""
    max_steps: int = 0
    """Episode limit [control steps]; 0: the task's own."""
    randomise: str = ""
    """Domain randomisation, for example mass,friction,latency:2."""
    latency: float = 0.0
    """Seconds that the policy takes to decide while its last chunk goes on: it is taught, and rollouts play,
    as if it did, and evaluations are in simulated real time with --chunking trained. It sets
    --policy.commit."""
    latency_jitter: float = 0.0
    """With --latency: up to so many seconds more, at random."""
    image_size: int = 64
    """Height and width of camera pictures [pixels]."""
    cameras: str = ""
    """Cameras of --sim mujoco that the policy looks through (front, wrist), with commas between; empty:
    all. With one, a picture policy learns and acts in less time, and a small one with fresh weights has
    less to tell apart."""
    judge: str = ""
    """Who decides on success in a world model: head (the default), http://…, openai:http://…, or the folder
    of a classifier."""
    tasks: str = "uniform"
    """Over several tasks, how they share the episodes: uniform; rulereasoner, in proportion to what each
    lacks of success; prompt_gdro, those of the bin of success that loses most; weights such as 0.5,0.3,0.2;
    modomodo:RUN,RUN,…, the weights that finished runs predict to be the best; or a sampler, module:function
    of your own."""
    starts: str = "auto"
    """Which starts rollouts begin in: uniform, every one of the task's alike; reverse, along the
    demonstrations, nearest to success first; vade, mopps, dps, sfl, prompt_gdro, dots, v0, samplers of a pool
    of starts (pool: its starts alike); or a sampler, module:function of your own. auto: reverse where
    supervision left no success, else uniform. Evaluation always begins in the task's own."""
    start_pool: int = 256
    """Starts of the pool that a sampler such as vade knows."""
    start_rows: int = 64
    """Starts of the pool that are in play between two updates."""
    start_uniform: float = 0.25
    """Share of episodes that begin in any start of the task, beside those of the pool."""
    share: str = ""
    """Folder over which runs of the same task, observations and actions give each other groups of episodes
    (SAPO); it is made."""
    share_foreign: int | None = None
    """With --share: groups of other runs in an update, at most; 0: gives alone; None: as many as the run
    plays itself."""
    share_keep: int = 256
    """Groups of this run that stay in the folder; older ones go."""
    dream: float = 0.0
    """Share of every batch that is played in a world model learnt along the way; steps count the simulator's
    alone."""
    dream_model: str = ""
    """Folder of a world model to begin with (robo_rl wm train); empty: one is learnt from the first
    episodes."""
    dream_refit: int = 50_000
    """Control steps of the simulator between refits of the model."""
    dream_updates: int = 1000
    """Updates of each refit; the first has three times as many."""
    dream_hard: float = 0.0
    """Share of dreamt episodes, and of those with --sim wm:PATH, that begin where success is most uncertain
    (DreamGym), not just anywhere; in a model of text also in tasks that it writes."""
    eval_episodes: int = 200
    """Starts of each evaluation, of each task."""
    eval_every: int = 0
    """Control steps between evaluations; 0: ten over the run."""
    eval_envs: int = 0
    """Envs of the evaluation; 0: one per episode (mujoco) or as many as workers allow."""
    target: float = 0.9
    """Stop RL once the lower bound of success, of several tasks in the worst, stays at or above this and
    success no longer rises; 0, and with --steps N: never."""
    patience: int = 2
    """Evaluations that must follow one at or above --target without a higher success than before, unless no
    episode failed in it;
    0: stop at the first."""
    out: str = ""
    """Run folder; empty: runs/<sim>-<task>-<algo>-s<seed>-<time>."""
    resume: str = ""
    """auto: the newest run below runs/, or a run folder; every other option then comes from that run."""
    video: bool = True
    """Film four episodes of the supervised and of the final policy."""
    wandb: str = ""
    """wandb project (offline without a key or wandb login); TensorBoard is always written."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    data: DataOptions = field(default_factory=DataOptions)
    bc: BcOptions = field(default_factory=BcOptions)
    rl: MethodOptions = field(default_factory=PiRlOptions)
    """Options of the chosen method; each method has its own set."""

    def __post_init__(self) -> None:
        own = method_options(self.algo)
        choose("obs", self.obs, ("state", "rgb"))
        choose("backend", self.backend, ("processes", "ray"))
        if not is_object(self.starts):
            choose("starts", self.starts, (*STARTS, OWN))
        for name, low, high in (
            ("steps", 0, 10**12),
            ("envs", 1, 10**6),
            ("threads", 0, 4096),
            ("seed", 0, 2**31 - 1),
            ("eval_episodes", 1, 10**6),
            ("torch_threads", 1, 4096),
            ("eval_every", 0, 10**12),
            ("dream", 0, 0.99),
            ("dream_hard", 0, 1),
            ("dream_refit", 1, 10**12),
            ("dream_updates", 1, 10**7),
            ("eval_envs", 0, 10**6),
            ("target", 0, 1),
            ("patience", 0, 10**6),
            ("workers", 0, 4096),
            ("learners", 1, 64),
            ("max_staleness", 0, 10**6),
            ("over_provision", 1, 1e6),
            ("periodic", 0, 10**6),
            ("hang", 1, 1e6),
            ("max_steps", 0, 10**7),
            ("image_size", 16, 1024),
            ("latency", 0, 10),
            ("latency_jitter", 0, 10),
            ("start_pool", 2, 65_536),
            ("start_rows", 1, 65_536),
            ("start_uniform", 0, 0.99),
            ("share_foreign", 0, 10**6),
            ("share_keep", 8, 4096),
            ("demos_most", 0, 9000),
        ):
            if getattr(self, name) is not None:
                in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        if self.algo != "bc" and type(self.rl) is not own:
            raise UserError(f"--algo {self.algo} needs {own.__name__}")


def rollout_options(config: TrainConfig) -> RolloutOptions:
    """Options of a method that learns from fresh rollouts."""
    assert isinstance(config.rl, RolloutOptions)
    return config.rl


def on_policy_options(config: TrainConfig) -> OnPolicyOptions:
    """Options of our own methods that learn from fresh rollouts."""
    assert isinstance(config.rl, OnPolicyOptions)
    return config.rl


def replay_options(config: TrainConfig) -> OffPolicyOptions:
    """Options of a method that learns from replay."""
    assert isinstance(config.rl, OffPolicyOptions)
    return config.rl


def by_person(config: TrainConfig) -> bool:
    """Whether a person, not a program, is beside the run."""
    return isinstance(config.rl, OffPolicyOptions) and config.rl.operator not in ("none", "scripted")


def on_the_wire(config: TrainConfig) -> bool:
    """Whether the env is an arm on the wire, which nobody but a person starts anew."""
    return config.sim.split(":")[0] == "dds"


def is_live(config: TrainConfig) -> bool:
    """Whether a step may wait for a person or for hardware."""
    return by_person(config) or on_the_wire(config)


def load_config(folder: Path) -> TrainConfig:
    """The configuration of a run folder (its run.json); UserError if it is damaged, or of a version with
    options that this one refuses."""
    from robo_rl import files

    path = folder / "run.json"
    saved = files.read_json(path)
    try:
        saved = old_names.options(saved["config"])
        nested = {
            "policy": PolicyOptions,
            "data": DataOptions,
            "bc": BcOptions,
            "rl": method_options(saved["algo"]),
        }
        known = {f.name for f in fields(TrainConfig)}
        gone = [
            f"--{part}.{name.replace('_', '-')}"
            for part, options in nested.items()
            for name in saved.get(part, {}).keys() - {f.name for f in fields(options)}
        ]
        with from_file(path):
            if gone:
                raise UserError(f"this version has no {', '.join(sorted(gone))}")
            return TrainConfig(
                **{k: nested[k](**v) if k in nested else v for k, v in saved.items() if k in known}
            )
    except (TypeError, KeyError, AttributeError) as e:
        raise UserError(
            f"{path} is damaged or of another version of robo_rl ({e!r}); restore it from a copy or start a "
            "new run"
        ) from e


@contextmanager
def from_file(path: Path, refused: type[UserError] = UserError):
    """Errors `refused` of options name the run.json that holds them, and how they are left out of it."""
    try:
        yield
    except refused as e:
        raise UserError(
            f'{path}: {e} (take it out of "config" in that file: an option that is not there has its default)'
        ) from e
