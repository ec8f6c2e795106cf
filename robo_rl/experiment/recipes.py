"""Defaults of a run for its simulator, method, observation and preset: rows of settings, each with its
reason.

A run has words: the kind of its simulator, the family and the name of its method, its observation, its
preset. A row holds for the runs that have all of its words; of several rows that set an option the last one
counts. All of them make one TrainConfig, over which `--config` and the command line go. `robo_rl train
--print-config` names the row of each value, and the reasons.

manipulation  starts from demonstrations: maniskill, or fast (all others, whose steps cost little)
scratch       policies learn from nothing: locomotion, gym:, envpool:, and simulators of one's own (own_sim
              too)
taken         gym:, envpool: or a simulator of one's own, and success is demonstrated (`shows_success`), or
              was to the policy of --init; manipulation as well, of a data set with episodes no longer than
              its `demo_limit`
several       a run over several tasks
data          no simulator: a data set of any robot, in its own units
robot         the arm as an env, lockstep (arm) or in real time (dds); manipulation as well
dense         the reward is dense, so returns lie in no known range
on_policy     methods that learn from fresh rollouts, and bc; replay: from replay; offline: from data sets of
              whole episodes
sac, teacher, guided: what methods share (SHARED); around: something acts with a flow; supervised: these and a
              teacher's actor begin so
ours          a method of ours; own_method: of the user's (own options; the rest as pi_rl or iql has it)
vla           the policy is a vision-language-action model that is a flow; fresh: of weights that know
              nothing
small         it is none: a network of ours, or the user's own policy
undivided     its head does not learn without its trunk: vla, models of tokens, the user's own policies
paper         the preset with a method's published numbers, whatever the simulator
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from robo_rl.errors import UserError, choose
from robo_rl.experiment.config import EXPLORATION, RL_OPTIONS, TrainConfig, method_options
from robo_rl.experiment.config_file import flat, merged
from robo_rl.experiment.methods import check_told
from robo_rl.experiment.recipe_table import TABLE
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.options import (
    AROUND_FLOWS,
    FLOWS,
    VLAS,
    OffPolicyOptions,
    OnPolicyOptions,
    PolicyOptions,
    RolloutOptions,
)
from robo_rl.plugins import is_object

PRESETS = ("quick", "full", "paper")
ADVANTAGE = ("advantage", "guidance")  # of a policy that a method tells the advantage
AROUND = (  # of what acts around a flow
    "critics",
    "critic_hidden",
    "critic_layers",
    "candidates",
    "spread",
    "softness",
    "explore_std",
    "edit_scale",
    "keep",
    "local_steps",
    "local_rate",
    "steer_reach",
    "steer_row",
    "init_std",
)
# of what acts on the trunk of a vision-language-action model
ACTING = ("actor", *AROUND, "hidden", "layers", "teacher", "gripper")
SHARED = {
    "rlpd": "sac",
    "demo_sac": "sac teacher supervised",
    "hil_serl": "sac teacher supervised",
    "calql": "sac",
    "wsrl": "sac",
    "expo": "guided around supervised",
    "pa_rl": "guided around supervised",
    "dsrl": "around supervised",
    "demo_flow": "around supervised",
}
LOCOMOTION = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5")


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """Settings, in the form of TrainConfig as a dict, of the runs that have all words of `where`; why: the
    reason for them."""

    where: str
    why: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.where.replace(" ", "/")

    def holds(self, words: set[str]) -> bool:
        return words.issuperset(self.where.split())


WITHOUT_REPLAY = {
    "rl.advantage",
    "rl.allocate",
    "rl.proximal",
    "rl.correction",
    "periodic",
    "dream",
    "learners",
    "share",
}
DECISIONS = 16  # of an episode, at least, where demonstrations say how long one is
ROWS = tuple(RecipeRow(*row) for row in TABLE)
PAPERS = tuple(sorted(row.where.removeprefix("paper ") for row in ROWS if row.where.startswith("paper ")))


@dataclass(frozen=True, slots=True)
class RecipeChoice:
    """What a recipe is chosen by: options as on the command line. demos: the folder of a data set may say
    that success is paid; model: as `model_words` has it, "": of the run --init."""

    sim: str = "mujoco"
    task: str = ""
    algo: str = "pi_rl"
    obs: str = "state"
    preset: str = "full"
    reward: str = ""
    demos: str = ""
    init: str = ""
    model: str = ""


def rows(chosen: RecipeChoice) -> list[RecipeRow]:
    """The rows of a run, in the order in which they count."""
    sim, task, algo, preset = chosen.sim, chosen.task, chosen.algo, chosen.preset
    choose("preset", preset, PRESETS)
    if preset == "paper" and algo not in PAPERS:
        raise UserError(
            f"--preset paper is there for {', '.join(PAPERS)}, got --algo {algo}; use quick or full"
        )
    options = method_options(algo)
    family = (
        "replay"
        if issubclass(options, OffPolicyOptions)
        else "on_policy"
        if issubclass(options, RolloutOptions)
        else "offline"
    )
    own, kind = is_object(algo), sim.split(":")[0]
    like, named = kin(options) if own else (algo, ())
    words = {
        preset,
        family,
        *SHARED.get(like, "").split(),
        *(("own_method", like or ("iql" if family == "replay" else "pi_rl")) if own else ("ours", algo)),
    }
    if preset != "paper":
        shown = bool(chosen.init) and scratch(sim, task) and was_shown(Path(chosen.init))
        taken = shown or shows_success(sim, task, chosen.demos)
        words |= (
            {"scratch"}
            if scratch(sim, task) and not taken
            else {"data"}
            if sim == "none"
            else {"manipulation", "maniskill" if sim == "maniskill" else "fast"}
        )
        words |= {"taken"} if taken else set()
        words |= {chosen.obs, *(["own_sim"] if is_object(sim) else [])}
        # what a simulator of one's own pays
        asked = shown or chosen.demos.isdecimal()
        unknown = taken and is_object(sim) and asked and chosen.reward != "sparse"
        dense = chosen.reward == "dense" or unknown or sim == "maniskill" and task.startswith("MS-")
        words |= {"dense"} if dense else set()
    words |= {"robot", kind} if kind in ROBOTS else set()
    words |= {"several"} if "," in task and sim == "mujoco" else set()
    words |= set((chosen.model or "small").split())
    found = [row for row in ROWS if row.holds(words)]
    if not own:
        return found
    return [
        row
        if "robot" in row.where
        else replace(
            row,
            settings=dict(row.settings)
            | {"rl": {k: v for k, v in row.settings.get("rl", {}).items() if like and k not in named}},
        )
        for row in found
    ]


def kin(options: type) -> tuple[str, set[str]]:
    """(our method whose options the class of the user's own derives from, "" where it is of none; the options
    that it names itself: their defaults are its own, the recipe sets the others)."""
    ours = [(name, cls) for name, cls in RL_OPTIONS.items() if issubclass(options, cls)]
    if not ours:
        return "", set()
    like, base = max(ours, key=lambda pair: len(pair[1].__mro__))
    return like, {
        name
        for cls in options.__mro__[: options.__mro__.index(base)]
        for name in vars(cls).get("__annotations__", {})
    }


def model_words(kind: str, folder: str = "", fresh: bool = True) -> str:
    """The words of a policy of this kind, that began with the weights of a public layout in `folder`, or
    whose weights are `fresh`."""
    if kind not in VLAS:
        return "undivided small" if is_object(kind) else "small" if kind else ""
    words = ["undivided", *(["vla"] if kind in FLOWS else [])]
    if folder:
        words += ["public", *(["pi"] if kind.startswith("pi0") else [])]
    elif fresh and kind in FLOWS:
        words.append("fresh")
    return " ".join(words)


def recipe(
    sim: str, task: str, algo: str, obs: str, preset: str, reward: str = "", **more: str
) -> TrainConfig:
    """The defaults `robo_rl train` starts from where these options are given; more: fields of
    `RecipeChoice`."""
    return steps(RecipeChoice(sim, task, algo, obs, preset, reward, **more))[-1][1]


def steps(chosen: RecipeChoice) -> list[tuple[str | dict[str, str], TrainConfig]]:
    """The configurations that lead to `recipe`, each with its origin, or {option: origin}: chosen, "recipe
    ROW", --init (else default)."""
    if chosen.init and not chosen.model:
        had = policy_of(Path(chosen.init))
        chosen = replace(chosen, model=model_words(had["kind"], had.get("folder", ""), fresh=False))
    base = TrainConfig(algo=chosen.algo, rl=method_options(chosen.algo)())
    settings: dict[str, object] = {k: getattr(chosen, k) for k in ("sim", "task", "obs", "preset")}
    origin = dict.fromkeys(settings, "chosen")
    for row in rows(chosen):
        changes = flat(row.settings)
        settings |= changes
        origin |= dict.fromkeys(changes, f"recipe {row.name}")
    if limit := demo_limit(chosen.sim, chosen.task, chosen.demos):
        settings["max_steps"], origin["max_steps"] = limit, "--demos"
    made = merged(base, nested(settings), "recipe")
    asked = {} if chosen.algo == TrainConfig.algo else {"algo": "chosen"}
    begins = [("--init", begun(made, Path(chosen.init)))] if chosen.init else []
    return [(asked, base), (origin, made), *begins]


def exact(base: TrainConfig, named: Collection[str]) -> TrainConfig:
    """`base` for a user who names these options, dotted: all of --steps are made, no more than --demos are
    recorded (and learnt from in all their frames) and --bc.updates taken, exploration
    noise is what it is said to be, nothing is played again where rollouts are made in another way, unless
    what else would end, extend or choose them is named too (it is laid over this)."""
    named = {name.replace("-", "_") for name in named}
    base = replace(base, target=0.0) if "steps" in named else base
    if isinstance(base.rl, OnPolicyOptions) and named & WITHOUT_REPLAY:
        base = replace(base, rl=replace(base.rl, replay=0.0))
    if isinstance(base.rl, OnPolicyOptions) and named & {
        "policy.noise_min",
        "policy.noise_max",
        "policy.init_std",
    }:
        base = replace(base, rl=replace(base.rl, explore=0.0))
    base = replace(base, bc=replace(base.bc, most=0)) if "bc.updates" in named else base
    base = replace(base, bc=replace(base.bc, compare=False)) if "policy.activation" in named else base
    if "demos" in named:
        data, bc = replace(base.data, every=1), replace(base.bc, head_every=0)
        base = replace(base, demos_most=0, data=data, bc=bc)
    return base


def of_kind(base: TrainConfig, kind: str, folder: str = "") -> TrainConfig:
    """`base` for a policy of this kind: a vision-language-action model predicts what it does, whatever the
    recipe has of small policies. On a data set in its own units a model of a public `folder` has the chunk,
    the executed and the denoise steps that LeRobot's config.json there says."""
    if kind not in VLAS:
        return base
    policy = replace(base.policy, predict="velocity")
    if folder and base.sim == "none" and Path(folder).exists():
        from robo_rl.policies.vla.make import settings_of

        said = settings_of(Path(folder))
        horizon = whole(said, "chunk_size") or policy.horizon
        policy = replace(
            policy,
            horizon=horizon,
            execute=min(whole(said, "n_action_steps") or policy.execute, horizon),
            denoise_steps=whole(said, "num_inference_steps", "num_steps") or policy.denoise_steps,
        )
    return replace(base, policy=policy)


def whole(settings: Mapping[str, object], *names: str) -> int:
    """The first of these settings that is a number of steps; 0: there is none."""
    return next((v for n in names if isinstance(v := settings.get(n), int) and 0 < v <= 256), 0)


def nested(settings: Mapping[str, object]) -> dict:
    """Nested tables of {dotted name: value}."""
    out: dict = {}
    for name, value in settings.items():
        table, _, key = name.rpartition(".")
        (out.setdefault(table, {}) if table else out)[key] = value
    return out


def scratch(sim: str, task: str) -> bool:
    """Whether policies learn from nothing there: locomotion, and simulators that are taken as they are."""
    return task in LOCOMOTION or sim.startswith(("mujoco_warp", "gym:", "envpool:")) or is_object(sim)


def shown_return(config: TrainConfig, stats: Mapping[str, float]) -> float | None:
    """For the progress line: the mean return of the newest episodes, where there are some and the reward is
    not success alone."""
    told = config.reward != "sparse" and (config.reward == "dense" or scratch(config.sim, config.task))
    return stats.get("return") if told else None


def shows_success(sim: str, task: str, demos: str) -> bool:
    """Whether, where policies learn from nothing, --demos shows what success is: so many successes of the
    env's own expert, or a data set as `demo_limit` reads it."""
    if demos.isdecimal() and int(demos):
        return scratch(sim, task) and (sim.startswith("gym:") or is_object(sim))
    return demo_limit(sim, task, demos) is not None


def demo_limit(sim: str, task: str, demos: str) -> int | None:
    """Episode limit [control steps] where policies learn from nothing unless `demos` is the folder of a data
    set in which some episodes succeed and every one was paid 1 for success and nothing else; else None.

    It is three times the median length of its successes, enough for nine in ten of them and for DECISIONS
    chunks of 4, and at most the limit that they were recorded under (0: not known): what takes longer has
    failed, and a long limit fills rollouts with failures.
    """
    if not demos or demos.isdecimal() or not scratch(sim, task):  # a number, whatever folders there are
        return None
    if not (Path(demos) / "meta" / "info.json").is_file():
        return None
    import numpy as np

    from robo_rl.data.reader import load

    data = load(demos)
    paid, length = np.add.reduceat(data.reward, data.from_), data.to - data.from_
    if not data.is_judged or not data.success.any() or (paid != data.success).any():
        return None
    nine, half = np.quantile(length[data.success], (0.9, 0.5))
    wanted = round(max(nine, 3 * half, 4 * DECISIONS))
    return 0 if data.spec is None else min(wanted, data.spec.max_steps)


def meta_of(init: Path) -> dict[str, Any]:
    """meta.json of the checkpoint that a run which begins with `init` takes over."""
    from robo_rl.experiment.folder import pick_checkpoint

    folder = pick_checkpoint(init, "best")[1]
    from robo_rl import checkpoint

    return checkpoint.read_meta(folder)


def policy_of(init: Path) -> dict[str, Any]:
    """The options of its policy."""
    return meta_of(init)["policy"]["options"]


def run_of(init: Path) -> TrainConfig | None:
    """The configuration of the run `init`, or of which it is a checkpoint; None: a checkpoint that was copied
    alone."""
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.folder import pick_run

    run = pick_run(init)
    return load_config(run) if (run / "run.json").is_file() else None


def was_shown(init: Path) -> bool:
    """Whether the policy of a run or checkpoint learnt from demonstrations, or from a policy that did: its
    RL goes on as theirs does."""
    from robo_rl.experiment.folder import taught_of

    before = run_of(init)
    return taught_of(meta_of(init))[1] > 0 or before is not None and before.reward == "sparse"


def begun(base: TrainConfig, init: Path) -> TrainConfig:
    """The preset for a run that begins with the policy of `init`: its networks, the method's exploration,
    nothing supervised; in the same task episodes as long as there."""
    had, before = policy_of(init), run_of(init)
    check_told(base.algo, bool(had.get("advantage")))
    had |= {
        k: v
        for k, v in asdict(base.policy).items()
        if k in EXPLORATION or base.policy.advantage and k in ADVANTAGE
    }
    # what acts around the flow, or on the trunk, is the method's
    if had["kind"] != base.policy.kind and {had["kind"], base.policy.kind} <= set(AROUND_FLOWS):
        had |= {k: getattr(base.policy, k) for k in ("kind", *AROUND)}
    if had["kind"] in FLOWS and had.get("actor", "own") != base.policy.actor:
        had |= {k: getattr(base.policy, k) for k in ACTING}
    if had["kind"] == "flow" and had.get("window") and had["noise"] == "learned":
        had["noise"] = "sde"  # whose level needs no network of an MLP's context
    if isinstance(base.rl, OffPolicyOptions):
        had["execute"] = had["horizon"]  # their critics judge whole chunks
    base = replace(base, policy=PolicyOptions(**had))
    if before is not None and (before.sim, before.task) == (base.sim, base.task):
        base = replace(base, max_steps=before.max_steps)
    if base.algo == "bc":
        return base
    return replace(
        base,
        bc=replace(base.bc, updates=0),
        demos=base.demos if isinstance(base.rl, OffPolicyOptions) else "0",
    )
