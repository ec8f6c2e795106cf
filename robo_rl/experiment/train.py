"""`robo_rl train`: demonstrations, SFT, online RL, evaluation, checkpoints, videos, in one run folder that resumes."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from robo_rl.errors import MissingDependency, UserError, choose, in_range
from robo_rl.options import (
    AloeOptions,
    BcOptions,
    CalQlOptions,
    DppoOptions,
    ExpoOptions,
    HilSerlOptions,
    IqlOptions,
    MethodOptions,
    NftOptions,
    PaRlOptions,
    PiRlOptions,
    PolicyOptions,
    PpoOptions,
    ReinFlowOptions,
    RlpdOptions,
    WsrlOptions,
)
from robo_rl.provenance import Stop, git_hash, importing, newest_run, versions
from robo_rl.selection import CHOOSE, REPORT, Look, best_look, stop_reason

OFF_POLICY = {"rlpd": RlpdOptions, "hil_serl": HilSerlOptions, "expo": ExpoOptions, "pa_rl": PaRlOptions, "iql": IqlOptions,
              "calql": CalQlOptions, "wsrl": WsrlOptions, "aloe": AloeOptions}  # these learn from replay (robo_rl/experiment/replay.py)
RL_OPTIONS = {"pi_rl": PiRlOptions, "ppo": PpoOptions, "dppo": DppoOptions, "reinflow": ReinFlowOptions,
              "nft": NftOptions, **OFF_POLICY}
ALGOS = (*RL_OPTIONS, "bc")
EXPLORATION = ("noise", "noise_level", "noise_min", "noise_max", "noise_steps", "finetune_steps", "std_floor", "std_scale",
               "logp_reduction", "teacher")  # what of a policy's options is the method's affair, not that of weights learnt before


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a policy: a few demonstrations, supervised flow matching, online RL, honest evaluation."""

    sim: str = "mujoco"
    """mujoco, maniskill, isaacgym, isaaclab, gym:<id>, envpool:<id>, or wm:<folder of a world model>."""
    task: str = ""
    """Task of the sim; empty takes its default (mujoco: pick_cube, maniskill: PickCube-v1)."""
    algo: str = "pi_rl"
    """pi_rl, ppo, dppo, reinflow, nft; from replay: rlpd, hil_serl, expo, pa_rl, iql, calql, wsrl, aloe; or bc (supervised only)."""
    obs: str = "state"
    """state, or rgb: two cameras and the instruction through the vision-language trunk."""
    preset: str = "full"
    """quick: minutes, to see it move; full: to the numbers of the README; paper (reinflow, dppo): the method's own numbers."""
    demos: str = "20"
    """Number of expert demonstrations to record, or the folder of a LeRobot v3 data set; 0 starts from scratch."""
    init: str = ""
    """Run or checkpoint folder whose policy this run begins with (its best), in place of a fresh one and of supervised learning;
    --algo bc, or --bc.updates N with --demos, teaches it on."""
    seed: int = 0
    steps: int = 3_000_000
    """Control steps of online RL, over all envs."""
    envs: int = 256
    """N: envs in parallel."""
    threads: int = 0
    """Simulation threads of each worker; 0: the cores shared out."""
    workers: int | None = None
    """Processes that collect beside the learner; None: one per core (on a single core none); 0: all in one process, which
    repeats exactly for a seed."""
    max_staleness: int | None = None
    """Most weight versions that what is trained on may lie behind; 0: synchronous; None: 1 with workers, else 0."""
    learners: int = 1
    """Processes that learn together: shards of the policy (FSDP2), each with its rows of every minibatch."""
    periodic: int = 0
    """Synchronous, with gradients summed while data streams in: rounds of whole groups of all envs in an update, each
    learnt from as soon as it is there, under unchanged weights; one step at the end. 0: off."""
    over_provision: float = 1.0
    """With a group advantage and staleness: episodes in flight over those of a batch; those a batch does not wait for go
    on under newer weights (APRIL)."""
    server: bool = False
    """One process decides for all workers, in batches, instead of each for itself; for many sims that mostly wait."""
    backend: str = "processes"
    """processes: workers on this machine; ray: workers are Ray actors, on any machine of a cluster."""
    ray_address: str = ""
    """Ray cluster to join, for example auto; empty: one of this machine alone."""
    hang: float = 60.0
    """Seconds without a decision after which a worker is restarted."""
    torch_threads: int = 1
    reward: str = ""
    control: str = ""
    max_steps: int = 0
    """Episode limit [control steps]; 0: the task's own."""
    randomise: str = ""
    """Domain randomisation, for example mass,friction,latency:2."""
    image_size: int = 64
    judge: str = ""
    """Who decides on success in a world model: head (the default), http://…, or the folder of a classifier."""
    dream: float = 0.0
    """Share of every batch that is played in a world model learnt along the way; steps count the simulator's alone."""
    dream_model: str = ""
    """Folder of a world model to begin with (robo_rl wm train); empty: one is learnt from the first episodes."""
    dream_refit: int = 50_000
    """Control steps of the simulator between refits of the model."""
    dream_updates: int = 1000
    """Updates of each refit; the first has three times as many."""
    dream_hard: float = 0.0
    """Share of dreamt episodes that begin where success is most uncertain (DreamGym), not just anywhere."""
    eval_episodes: int = 200
    eval_every: int = 0
    """Control steps between evaluations; 0: ten over the run."""
    eval_envs: int = 0
    """Envs of the evaluation; 0: one per episode (mujoco) or as many as workers allow."""
    target: float = 0.9
    """Stop RL once the lower bound of success stays at or above this and success no longer rises; 0, and with --steps N: never."""
    patience: int = 2
    """Evaluations that must follow one at or above --target without a higher success than before; 0: stop at the first."""
    out: str = ""
    """Run folder; empty: runs/<sim>-<task>-<algo>-s<seed>-<time>."""
    resume: str = ""
    """auto: the newest run below runs/, or a run folder; every other option then comes from that run."""
    video: bool = True
    wandb: str = ""
    """wandb project (offline without a key); TensorBoard is always written."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    bc: BcOptions = field(default_factory=BcOptions)
    rl: MethodOptions = field(default_factory=PiRlOptions)
    """Options of the chosen method; each method has its own set."""

    def __post_init__(self) -> None:
        choose("algo", self.algo, ALGOS)
        choose("obs", self.obs, ("state", "rgb"))
        choose("backend", self.backend, ("processes", "ray"))
        for name, low, high in (("steps", 0, 10**12), ("envs", 1, 10**6), ("threads", 0, 4096), ("seed", 0, 2**31 - 1),
                                ("eval_episodes", 1, 10**6), ("torch_threads", 1, 4096), ("eval_every", 0, 10**12),
                                ("dream", 0, 0.99), ("dream_hard", 0, 1), ("dream_refit", 1, 10**12), ("dream_updates", 1, 10**7),
                                ("eval_envs", 0, 10**6), ("target", 0, 1), ("patience", 0, 10**6), ("workers", 0, 4096), ("learners", 1, 64),
                                ("max_staleness", 0, 10**6), ("over_provision", 1, 1e6), ("periodic", 0, 10**6), ("hang", 1, 1e6),
                                ("max_steps", 0, 10**7), ("image_size", 16, 1024)):
            if getattr(self, name) is not None:
                in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        if self.algo != "bc" and type(self.rl) is not RL_OPTIONS[self.algo]:
            raise UserError(f"--algo {self.algo} needs {RL_OPTIONS[self.algo].__name__}")


def begun(base: Train, init: Path) -> Train:
    """The preset for a run that begins with the policy of `init`: its networks, the method's exploration, nothing supervised."""
    from robo_rl.experiment.evaluation import pick_checkpoint
    folder = pick_checkpoint(init, "best")[1]
    from robo_rl import checkpoint
    had = checkpoint.read_meta(folder)["policy"]["options"]
    base = replace(base, policy=PolicyOptions(**had | {k: v for k, v in asdict(base.policy).items() if k in EXPLORATION}))
    if base.algo == "bc":
        return base
    return replace(base, bc=replace(base.bc, updates=0), demos=base.demos if base.algo in OFF_POLICY else "0")


# ---- small pieces ------------------------------------------------------------------------------------------------

def run_config(folder: Path) -> Train:
    """The Train of the run folder's run.json."""
    from robo_rl import files
    saved = files.read_json(folder / "run.json")
    try:
        saved = saved["config"]
        nested = {"policy": PolicyOptions, "bc": BcOptions, "rl": RL_OPTIONS.get(saved["algo"], PiRlOptions)}
        known = {f.name for f in fields(Train)}
        return Train(**{k: nested[k](**v) if k in nested else v for k, v in saved.items() if k in known})
    except (TypeError, KeyError, AttributeError) as e:
        raise UserError(f"{folder / 'run.json'} is damaged or of another version of robo_rl ({e!r}); restore it from "
                        "a copy or start a new run") from e


def make_env(args: Train, num_envs: int, render: bool = False):
    """The env of these options."""
    from robo_rl.experiment import envs
    return envs.make(args.sim, args.task, num_envs, obs=args.obs, reward=args.reward, control=args.control,
                     image_size=args.image_size, threads=args.threads, max_steps=args.max_steps,
                     randomise=args.randomise, render=render, judge=args.judge)


def obs_spec(env, language: bool):
    """What a policy for this env sees and commands."""
    from robo_rl.policies import ObsSpec
    views = tuple(env.spec.views)
    size = env.single_observation_space[f"image/{views[0]}"].shape[0] if views else 0
    return ObsSpec(state=env.single_observation_space["state"].shape[0], action=env.single_action_space.shape[0],
                   views=views, image_size=size, language=language or bool(views),
                   action_names=env.spec.action_names)


def first_policy(args: Train, env):
    """The policy of --init, in a network of --policy's options; parts that it had none of are fresh."""
    from robo_rl import checkpoint
    from robo_rl.experiment.evaluation import pick_checkpoint
    from robo_rl.policies import make_policy

    folder = pick_checkpoint(Path(args.init), "best")[1]
    old, _ = checkpoint.load_policy(folder)
    checkpoint.check_fits(old, obs_spec(env, old.spec.language), str(folder))
    policy, had = make_policy(args.policy, old.spec, args.seed), old.state_dict()
    parts = {k.split(".")[0] for k in had}
    try:
        missing, unknown = policy.load_state_dict(had, strict=False)
    except RuntimeError as e:
        missing, unknown = [], [str(e).splitlines()[-1].strip()]
    if unknown := unknown + [k for k in missing if k.split(".")[0] in parts]:
        raise UserError(f"--init {args.init}: its weights do not fit these --policy options ({unknown[0]}); leave out what "
                        "changes the networks")
    for word in ("taught", "steered"):  # critics begin anew, so nothing is chosen by them yet
        if hasattr(policy, word):
            getattr(policy, word).fill_(False)
    if getattr(policy, "noise", None) is not None:
        policy.noise.high.fill_(args.policy.noise_max)  # where a schedule left it belongs to the run before
    return policy


# ---- the run -----------------------------------------------------------------------------------------------------

def run(args: Train, tell: Callable[[Path], None] = lambda folder: None) -> int:
    """Train from the start, or go on with a run; `tell` hears of the folder once there is something to go on with."""
    if not args.resume:
        return begin(args, tell)
    folder = newest_run(Path("runs")) if args.resume == "auto" else Path(args.resume)
    if not (folder / "run.json").exists():
        raise UserError(f"--resume: {folder} has no run.json; give a run folder or auto")
    tell(folder)
    return resume(folder)


def resume(folder: Path) -> int:
    """Go on with a run."""
    from robo_rl import files
    args = run_config(folder)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.torch_threads))
    with files.lock(folder):
        return make_run(args, folder, probe_env(args)).go()


def begin(args: Train, tell: Callable[[Path], None]) -> int:
    """Start a run in a new folder; `tell` hears of the folder once the run can be resumed."""
    from robo_rl import files
    from robo_rl.experiment import envs, feeds

    os.environ.setdefault("OMP_NUM_THREADS", str(args.torch_threads))
    taken = "{0} already holds a run; go on with it: robo_rl train --resume {0}, or choose another --out"
    if args.out and (Path(args.out) / "run.json").exists():
        raise UserError(taken.format(args.out))
    envs.check_names(args.sim, args.task, obs=args.obs, reward=args.reward, control=args.control, randomise=args.randomise)
    with importing():
        env = probe_env(args)
        check(args, env)  # a mistake leaves no folder behind
    if args.algo != "bc":  # what was chosen for this machine stays, wherever the run is resumed
        args = replace(args, workers=feeds.workers(args), max_staleness=feeds.staleness(args))
    if ":" not in args.sim or args.sim.startswith("wm:"):
        args = replace(args, task=env.spec.task)  # the run says which task it was, whatever the default becomes
    task = env.spec.task.replace(":", "-").replace("/", "-")
    name = f"{args.sim.split(':')[0]}-{task}-{args.algo}-s{args.seed}-{time.strftime('%m%d-%H%M%S')}"
    folder = Path(args.out or f"runs/{name}")
    files.require_free(folder, 200_000_000)
    with files.lock(folder):
        if (folder / "run.json").exists():
            raise UserError(taken.format(folder))
        files.write_json(folder / "run.json", {
            "name": folder.name, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "version": versions().get("robo_rl", ""),
            "git": git_hash(), "seed": args.seed, "config": asdict(args), "versions": versions(), "argv": sys.argv[1:]})
        tell(folder)
        return make_run(args, folder, env).go()


def make_run(args: Train, folder: Path, env) -> "Run":
    """The run of the chosen method."""
    if args.algo in OFF_POLICY:
        from robo_rl.experiment.replay import OffPolicyRun
        return OffPolicyRun(args, folder, env)
    return Run(args, folder, env)


def probe_env(args: Train):
    """The env this process collects in, or, beside workers, a small one that says what they will see."""
    import sims
    from robo_rl.experiment import feeds
    from robo_rl.experiment.envs import twin
    few = feeds.workers(args) > 0 and args.algo != "bc"
    if few:
        from robo_rl.runtime.processes import warm
        warm(sims.preload(twin(args.sim), args.task))
        if twin(args.sim) != args.sim:
            make_env(args, args.envs).close()  # whether there is one
        args = replace(args, sim=twin(args.sim))  # a robot has one commander
    return make_env(args, min(args.envs, 16) if few else args.envs)


def check(args: Train, env) -> None:
    """Raise UserError now for what would fail later: images, demonstrations, method and policy, wandb."""
    import importlib

    from robo_rl.demos import check_expert, check_fits
    from robo_rl.experiment import feeds
    from robo_rl.policies import make_policy

    if args.dream:
        from robo_rl.experiment import dream
        dream.check(args)
    if args.algo in OFF_POLICY:
        from robo_rl.experiment import replay as offpolicy
        offpolicy.check(args, env)
    elif args.algo != "bc":
        feeds.check(args)
    if args.obs == "rgb":
        env.reset(seed=args.seed)  # draws
    spec = obs_spec(env, language=False)
    if not args.demos.isdigit():
        from robo_rl.data.reader import load
        if not Path(args.demos).exists():
            raise UserError(f"--demos must be a number or the folder of a data set, got {args.demos!r}")
        check_fits(load(args.demos).meta, spec)
    elif int(args.demos):
        check_expert(env)
    elif args.algo == "bc":
        raise UserError("--algo bc needs demonstrations: --demos N or --demos PATH")
    elif args.init and args.bc.updates:
        raise UserError("--bc.updates needs demonstrations to teach from: --demos N or --demos PATH")
    first = first_policy(args, env) if args.init else make_policy(args.policy, spec, 0)
    if args.algo != "bc":
        importlib.import_module(f"robo_rl.algos.{args.algo}").make(first, args.rl, 0)
        if args.algo not in OFF_POLICY and args.rl.bc_coef and args.demos == "0":
            raise UserError("--rl.bc-coef holds the policy near demonstrations: --demos N or --demos PATH")
        if args.algo not in OFF_POLICY and args.rl.advantage != "gae" and args.envs % args.rl.group:
            raise UserError(f"--envs must be a multiple of the group size {args.rl.group} with advantage "
                            f"{args.rl.advantage}, got {args.envs}")
    if args.wandb:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise MissingDependency("--wandb needs wandb: pip install 'robo_rl[wandb]'") from None


def looks_of(meta: dict, episodes: int) -> list[Look]:
    """The looks of a checkpoint; of one that was made before they were kept, its best."""
    if "looks" in meta:
        return [Look(*x) for x in meta["looks"]]
    best = meta["best"]
    return [Look(best["step"], round(best["success"] * episodes), episodes, best["return"])] if best["step"] >= 0 else []


class Stopped(Exception):
    """The user asked to stop before RL began; nothing but the demonstrations needs keeping."""


class Run:
    """One run folder being written: owns the env, the policy, the learner and the counters."""

    def __init__(self, args: Train, folder: Path, env):
        import torch
        torch.set_num_threads(args.torch_threads)
        self.args, self.folder, self.env, self.stop = args, folder, env, Stop()
        self.step, self.looks = 0, []
        self.eval_env = None
        self.started = time.monotonic()

    def go(self) -> int:
        from robo_rl import checkpoint
        from robo_rl.log import Progress, RunLog

        checkpoint.recover(self.folder)
        args, saved = self.args, checkpoint.checkpoints(self.folder)
        with Progress() as self.progress, self.stop:
            self.progress.say(f"run {self.folder}")
            if saved:
                self.policy, meta = checkpoint.load_policy(saved[-1])
                checkpoint.check_fits(self.policy, obs_spec(self.env, self.policy.spec.language), str(saved[-1]))
                self.step, self.looks = meta["step"], looks_of(meta, args.eval_episodes)
                if meta["finished"]:
                    self.progress.say("this run is finished; nothing to resume")
                    return 0
                self.forget_after(self.step)
                with RunLog(self.folder, wandb_project=args.wandb, resume_step=self.step,
                            resume_lines=meta.get("lines")) as self.log:
                    return self.reinforce(saved[-1])
            self.forget_after(-1)
            with RunLog(self.folder, wandb_project=args.wandb, resume_step=-1, resume_stage="sft") as self.log:
                try:
                    self.supervise()
                except Stopped:
                    return self.farewell("stopped in the supervised stage; start it again with: robo_rl train --resume "
                                         f"{self.folder}", self.stop.code)
                if args.algo == "bc" or args.steps == 0:
                    self.save({}, finished=True)
                    return self.farewell(self.done())
                self.save({}, finished=False)
                return self.reinforce(None)

    def forget_after(self, step: int) -> None:
        """Drop evaluations that a killed process made after its last checkpoint: they are made again."""
        from robo_rl import files
        for path in (self.folder / "evals").glob("*.json"):
            if path.stem in ("final", "best") or (files.read_json(path).get("step") or 0) > step:
                path.unlink()

    # ---- SFT

    def supervise(self) -> None:
        """Demonstrations and supervised learning (skipped with --demos 0)."""
        from robo_rl.algos import bc
        from robo_rl.data.reader import load
        from robo_rl.demos import demo_sampler, fit_normalisers
        from robo_rl.policies import make_policy

        args = self.args
        demos = self.demo_folder()
        if args.init:
            self.policy = first_policy(args, self.env)
        elif demos is None:
            self.policy = make_policy(args.policy, obs_spec(self.env, len(self.instructions()) > 1), args.seed)
            self.policy.freeze_base()
            return
        if demos is None or args.init and not args.bc.updates:
            self.policy.eval()
            self.judge_supervised()
            return
        dataset = load(demos)
        if not args.init:
            self.policy = make_policy(args.policy, obs_spec(self.env, len(dataset.tasks) > 1), args.seed)
            fit_normalisers(self.policy, dataset)
        sample = demo_sampler(dataset, self.policy.spec, args.policy.horizon)
        self.progress.start("sft", args.bc.updates, "updates")

        def tick(update: int, loss: float) -> None:
            if self.stop.asked:
                raise Stopped
            self.progress.update(update, note=f"loss {loss:.3f}")
            if update % 100 == 0 or update == args.bc.updates:
                self.log.log(update, {"sft/loss": loss}, stage="sft")
        self.policy.train()
        bc.train(self.policy, sample, args.bc, args.seed + 10, tick)
        self.policy.eval()
        self.judge_supervised()

    def judge_supervised(self) -> None:
        """Report the policy that RL begins with; where RL follows it is one of those to choose among."""
        self.evaluate("sft")
        if self.args.algo != "bc" and self.args.steps:
            self.look()

    def instructions(self) -> set[str]:
        obs, _ = self.env.reset(seed=0)
        return {str(t) for t in obs["task"]}

    def demo_folder(self) -> Path | None:
        """Folder of the demonstrations, recorded first if --demos is a number."""
        from robo_rl.data.writer import Writer
        from robo_rl.demos import record

        args = self.args
        if not args.demos.isdigit():
            return Path(args.demos)
        count, folder = int(args.demos), self.folder / "demos"
        if count == 0:
            return None
        if (folder / "meta" / "info.json").exists():
            with Writer(folder, spec=self.env.spec) as w:
                whole = len(w) >= count
            if whole:
                return folder
            shutil.rmtree(folder)  # the run was stopped while it recorded; the same seed records the same again
        env = make_env(args, min(count, args.envs, 32))
        self.progress.start("demo", count, "episodes")
        with Writer(folder, spec=self.env.spec) as w:
            record(env, count, args.seed, w.add, tick=lambda kept, tried: self.progress.update(kept, kept / tried))
        env.close()
        return folder

    # ---- RL

    def learner(self):
        """The learner of the chosen method, with the demonstrations when it mixes them in."""
        import importlib
        args = self.args
        demos = None
        if args.learners > 1:
            from robo_rl.runtime.sharded import ShardedLearner
            return ShardedLearner(args.algo, self.policy, args.rl, args.seed, args.learners, self.folder / "ranks")
        if args.rl.bc_coef:
            from robo_rl.data.reader import load
            from robo_rl.demos import demo_sampler
            demos = demo_sampler(load(self.demo_folder()), self.policy.spec, args.policy.horizon)
        return importlib.import_module(f"robo_rl.algos.{args.algo}").make(self.policy, args.rl, args.seed, demos)

    def reinforce(self, resume: Path | None) -> int:
        """Online RL until --steps, from a fresh SFT policy or a checkpoint."""
        from robo_rl import checkpoint
        from robo_rl.experiment import feeds

        args = self.args
        self.policy.train()
        learner, saved = self.learner(), None
        if resume is not None:
            state, _ = checkpoint.load_train(resume)
            if state:
                learner.load_state_dict(state["learner"])
                saved = state["feed"]
        close = getattr(learner, "close", lambda: None)
        if args.dream:
            from robo_rl.experiment import dream
            feed, exact = dream.make_feed(args, self.folder, self.env, learner, saved, self.progress.say)
        else:
            feed, exact = feeds.make_feed(args, self.folder, self.env, learner, saved)
        n = feeds.workers(args)
        if n > feeds.cores():
            self.progress.say(f"{n} workers on {feeds.cores()} cores: sims that compute will share them and gain nothing; "
                              f"--workers {feeds.cores()} is enough unless they mostly wait")
        if not exact:
            self.progress.say("this sim has no snapshots: episodes in flight start anew")
        try:
            return self.improve(learner, feed)
        finally:
            feed.close()
            close()

    def learn(self, learner, feed) -> tuple[dict[str, float], dict[str, float], float]:
        """Take a batch and learn from it -> (its statistics, the update's metrics, seconds waited for it)."""
        from robo_rl.runtime.feed import together
        rollouts, waited = [], 0.0

        def arriving(take: Callable):
            nonlocal waited
            while True:
                begin = time.perf_counter()
                piece = take()
                waited += time.perf_counter() - begin
                if piece is None:
                    return
                rollouts.append(piece)
                self.step += int(piece.stats["env_steps"])
                yield piece
        if self.args.periodic:
            pieces = feed.stream()
            metrics = learner.accumulate(arriving(lambda: next(pieces, None)), min(1.0, self.step / self.args.steps))
        else:
            rollout = next(arriving(feed.next))
            metrics = learner.update(rollout, min(1.0, self.step / self.args.steps), feed.version)
        for rollout in rollouts:
            learner.after_collect(rollout)
        return together([r.stats for r in rollouts]), metrics, waited

    def improve(self, learner, feed) -> int:
        """Take a batch, learn from it, publish; evaluate and save on the way."""
        from robo_rl import health
        from robo_rl.experiment import feeds
        args = self.args
        watch = health.Watch(health.ranges(args.rl, self.policy.options, self.policy.spec.action, args.reward != "dense"),
                             self.folder)
        watch.begin(self.step)
        every = args.eval_every or max(1, args.steps // 10)
        next_eval = (self.step // every + 1) * every
        saved_at = time.monotonic()
        self.progress.start("rl", args.steps, "steps", done=self.step)

        def save(finished: bool) -> None:
            nonlocal saved_at
            self.save({"learner": learner.state_dict(), "feed": feed.state()}, finished)
            feed.commit()
            saved_at = time.monotonic()

        while self.step < args.steps and not self.stop.asked and not self.reached():
            begin, clock = time.perf_counter(), time.monotonic_ns()
            stats, metrics, waited = self.learn(learner, feed)
            update = time.perf_counter() - begin - waited
            clock += 0 if args.periodic else int(waited * 1e9)
            feed.publish()
            self.timeline([*feed.spans(), ("learner", clock, time.monotonic_ns())] if feeds.workers(args) else [])
            end = time.perf_counter()
            row = {(k if "/" in k else f"train/{k}"): v for k, v in (metrics | stats).items() if k != "env_steps"}
            row |= {"train/noise": self.policy.noise_scale, "time/update": update,
                    "rate/steps_per_s": stats["env_steps"] / (end - begin)} | feed.stats()
            if feeds.workers(args):
                row["util/learner_wait"] = min(1.0, waited / (end - begin))
            self.log.log(self.step, row)
            for text in watch.look(self.step, metrics | stats):
                self.progress.say(f"warning: {text}")
            self.progress.update(self.step, stats.get("success"), feed.note())
            if self.step >= next_eval and self.step < args.steps:
                next_eval = (self.step // every + 1) * every
                self.look()
                save(finished=False)
            elif time.monotonic() - saved_at > 20 or feed.crowded():
                save(finished=False)
        if self.stop.asked:
            save(finished=False)
            return self.farewell(f"saved at step {self.step}; go on with: robo_rl train --resume {self.folder}",
                                 self.stop.code)
        self.judge_final()
        save(finished=True)
        feed.close()
        feeds.discard(self.folder)
        return self.farewell(self.done())

    def timeline(self, spans: list[tuple[str, int, int]]) -> None:
        """Append who worked when [s since the start of the run] to timeline.jsonl, up to a few megabytes."""
        now, at = time.monotonic_ns(), self.log.elapsed
        path = self.folder / "timeline.jsonl"
        if spans and not (path.exists() and path.stat().st_size > 4_000_000):
            rows = [[who, round(at - (now - a) / 1e9, 3), round(at - (now - b) / 1e9, 3)] for who, a, b in spans]
            with open(path, "a", encoding="utf-8") as f:
                f.write(json.dumps(rows) + "\n")

    # ---- evaluation, saving, last words

    def evaluate(self, label: str, which: int = REPORT, policy=None, step: "int | None" = None) -> dict:
        """Evaluate the policy (or `policy`, of an earlier `step`) on the starts of list `which`; writes evals/<label>.json and, first
        and last, a video."""
        from robo_rl import files
        from robo_rl.evaluate import eval_starts, evaluate
        from robo_rl.stats import wilson

        args, began = self.args, time.perf_counter()
        self.policy.eval()
        if self.eval_env is None:
            from robo_rl.experiment.envs import twin
            judged = replace(args, sim=twin(args.sim))  # a robot has no time for it: robo_rl eval RUN asks it
            count = args.eval_envs or (args.eval_episodes if judged.sim.startswith(("mujoco", "wm:")) else min(args.eval_episodes, args.envs))
            self.eval_env = make_env(judged, min(count, args.eval_episodes))
        starts, clock = eval_starts(args.eval_episodes, which), time.monotonic_ns()
        result = evaluate(self.eval_env, policy or self.policy, starts, which)
        if self.step:
            self.timeline([("eval", clock, time.monotonic_ns())])
        self.policy.train()
        rate, low, high = wilson(sum(result["success"]), len(starts))
        gain = sum(result["return"]) / len(starts)
        result |= {"label": label, "step": self.step if step is None else step, "time": self.log.elapsed, "n": len(starts), "list": which,
                   "starts": starts.tolist(), "wilson": [low, high]}
        (self.folder / "evals").mkdir(exist_ok=True)
        files.write_json(self.folder / "evals" / f"{label}.json", result)
        group = "eval" if which == CHOOSE else "best" if label == "best" else "report"
        self.log.log(self.step, {f"{group}/success": rate, f"{group}/low": low, f"{group}/high": high, f"{group}/return": gain,
                                 "time/eval": time.perf_counter() - began}, stage="rl" if self.step else "sft")
        self.progress.say(f"{label:>14}  success {rate:.3f}  95 % interval [{low:.3f}, {high:.3f}]  n={len(starts)}  "
                          f"return {gain:.2f}  at {self.log.elapsed:.0f} s  (starts of list {which}, "
                          f"{'reported' if which == REPORT else 'which choose'})")
        if args.video and label in ("sft", "final"):
            self.film(label)
        return result

    def look(self) -> None:
        """Evaluate on the starts that pick the best checkpoint and say when to stop."""
        result = self.evaluate(f"step_{self.step:09d}", CHOOSE)
        self.looks.append(Look(self.step, sum(result["success"]), result["n"], sum(result["return"]) / result["n"]))

    def reached(self) -> bool:
        """Whether the looks so far end training; says why, once."""
        why = stop_reason(self.looks, self.args.target, self.args.patience)
        if why:
            self.progress.say(why)
        return bool(why)

    def judge_final(self) -> None:
        """Report the last policy and, where another was better on the starts that choose, the best one."""
        from robo_rl import checkpoint

        if not self.looks or self.looks[-1].step != self.step:
            self.look()
        self.evaluate("final")
        best = best_look(self.looks).step
        if best != self.step:
            self.evaluate("best", REPORT, checkpoint.load_policy(self.folder / "checkpoints" / checkpoint.name(best))[0], best)

    def film(self, label: str) -> None:
        """Video of four evaluation episodes side by side; says why when it cannot."""
        from robo_rl.data.video import write_video
        from robo_rl.evaluate import eval_starts, evaluate
        from robo_rl.experiment.envs import twin

        try:
            env = make_env(replace(self.args, sim=twin(self.args.sim)), 4, render=True)
            self.policy.eval()
            video = evaluate(env, self.policy, eval_starts(4, REPORT), REPORT, frames=4)["video"]
            (self.folder / "videos").mkdir(exist_ok=True)
            write_video(self.folder / "videos" / f"{label}.mp4", video, round(1 / env.spec.period))
            env.close()
        except UserError as e:
            self.progress.say(f"no video: {e}")
        self.policy.train()

    def save(self, train: dict, finished: bool) -> None:
        """Checkpoint at the present step; the last two and the best stay."""
        from robo_rl import checkpoint

        root = self.folder / "checkpoints"
        root.mkdir(exist_ok=True)
        best = best_look(self.looks) if self.looks else Look(-1, 0, 1, 0.0)
        checkpoint.save_checkpoint(root / checkpoint.name(self.step), self.policy, train, {
            "step": self.step, "best": {"success": best.rate, "return": best.gain, "step": best.step},
            "looks": [list(x) for x in self.looks], "finished": finished, "lines": self.log.lines})
        for old in checkpoint.checkpoints(self.folder)[:-2]:
            if old.name not in (checkpoint.name(0), checkpoint.name(best.step)):
                shutil.rmtree(old)

    def done(self) -> str:
        return f"done in {time.monotonic() - self.started:.0f} s. Look at it: robo_rl report {self.folder}"

    def farewell(self, words: str, code: int = 0) -> int:
        """Say what to do next, below the last progress line, and return the exit status."""
        self.progress.close()
        self.progress.say(words)
        return code
