"""How far a world model can be trusted with policies: their success in it and in the simulator, or on a
robot."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import sims
from robo_rl import checkpoint, files
from robo_rl.data.reader import load as load_data
from robo_rl.device_names import check_device
from robo_rl.errors import UserError
from robo_rl.evaluation import decide, evaluate
from robo_rl.experiment.config import load_config
from robo_rl.experiment.envs import make, make_env
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.log import Progress, begun
from robo_rl.options.foreign import FOREIGN
from robo_rl.policies import ObsSpec
from robo_rl.starts import REPORT, eval_starts
from robo_rl.stats import wilson
from robo_rl.types import silently
from world_models import judge as judges
from world_models import probe, trust
from world_models.env import frame_of, held_frames
from world_models.evaluate import compare_models, measure, measure_bound, measure_open_loop, onward, table_of
from world_models.imagine import PlayedEpisodes, open_loop, play
from world_models.model import load
from world_models.options import WorldEvalConfig
from world_models.own_units import as_commands, translate
from world_models.plan import Planner, PlanOptions
from world_models.verdict import objections, verdict
from world_models.windows import Windows

HOLD = 8  # steps that each of random actions is held
PROBED = 8  # policies of --probe by default, of a model without cameras


# ---- the policies, the simulator, the table ----------------------------------------------------------------


def find_policies(paths: tuple[str, ...]) -> list[tuple[str, Path, Path]]:
    """(name, run folder, checkpoint folder) of every checkpoint of the runs, and of the checkpoints named."""
    out = []
    if foreign := [p for p in paths if p.startswith(FOREIGN)]:
        raise UserError(
            f"--policies takes runs and checkpoints, got {foreign[0]}: what acts elsewhere is evaluated in a "
            f"model by python launch/evaluate_world_model.py MODEL {foreign[0]}"
        )
    for path in map(Path, paths):
        run, folder = pick_checkpoint(path, "last")
        found = [folder] if (path / "meta.json").exists() else checkpoint.checkpoints(run)
        out += [(f"{run.name}/{int(at.name.removeprefix('step_'))}", run, at) for at in found]
    return out


def make_real(spec, runs: list[Path], num_envs: int, sim: str = ""):
    """The simulator that a model stands for, made as the first of the runs that did not act in a model; sim:
    its name, where the recordings do not tell how it is made."""
    configs = [load_config(r) for r in runs]
    real = None if sim else next((c for c in configs if not c.sim.startswith("wm:")), None)
    control = spec.control
    if real is not None and real.sim == "none":
        raise UserError(
            f"{runs[0]} learnt from a data set, without a simulator to compare with: give what the policies "
            "did on the robot, --real FILE; success in the model alone: python launch/evaluate_world_model.py"
        )
    if real is None and not sim and control.sim not in (*sims.SIMS, *ROBOTS):
        raise UserError(
            f"the model is of {control.id}, and the recordings do not tell how that is made: name it, --sim "
            "gym:ID or module:function; of a robot give what the policies did on it, --real FILE"
        )
    name = sim or control.sim
    task, obs = sims.own_task(name, control.task), "rgb" if control.views else "state"
    acted = real or replace(configs[0], sim=name, task=task, judge="", obs=obs)
    if spec.steps(acted.max_steps) < (acted.max_steps or control.max_steps):  # as long as those in the model
        acted = replace(acted, max_steps=spec.steps(acted.max_steps))
    env = make_env(acted, num_envs)
    check_real(spec, env)
    return env


def check_real(spec, env) -> None:
    """Raise UserError for a simulator whose actions or observations are not the model's."""
    control = spec.control
    for name, mine, theirs in (
        ("action axes are", control.action_names, env.spec.action_names),
        ("cameras are", control.views, env.spec.views),
        ("control period [s] is", control.period, env.spec.period),
        ("state size is", spec.state, (env.single_observation_space["state"].shape or (0,))[0]),
    ):
        if mine != theirs:
            raise UserError(
                f"the model's {name} {mine}, those of {env.spec.id} are {theirs}: give --policies runs of "
                "the sim, task, control and obs that the model learnt from"
            )


def simulator_of(spec, num_envs: int, sim: str = ""):
    """The simulator `sim`, or the one named in what was recorded, with episodes as long as those in the
    model; None for a robot, or where it cannot be made as it was."""
    control, name = spec.control, sim or spec.control.sim
    try:
        env = make(
            name,
            sims.own_task(name, control.task),
            num_envs,
            obs="rgb" if control.views else "state",
            **({"image_size": spec.image_size} if control.views else {}),
            max_steps=spec.steps(),
        )
        check_real(spec, env)
    except (UserError, ImportError):
        if sim:
            raise
        return None
    return env


def obs_spec_of(spec) -> ObsSpec:
    """What a policy that acts elsewhere is shown of a model, and commands: in the units of the recordings
    where they had their own."""
    control = spec.control
    return ObsSpec(
        state=spec.state,
        action=spec.action,
        views=control.views,
        image_size=spec.image_size,
        language=True,
        action_names=control.action_names,
        units=tuple(a.unit for a in control.axes) if spec.own else (),
    )


@dataclass(frozen=True, slots=True)
class RealRow:
    """What a policy did on the robot."""

    policy: str
    successes: int
    episodes: int


def read_real(path: "str | Path") -> list[RealRow]:
    """The rows of `--real`; UserError for a file that is no such table."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        rows = (
            files.parse_json(text.encode(), str(path), list)
            if text.lstrip().startswith("[")
            else list(csv.DictReader(text.splitlines()))
        )
        out = [RealRow(str(r["policy"]), int(r["successes"]), int(r["episodes"])) for r in rows]
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as e:
        raise UserError(
            f"--real {path} must be CSV or a JSON list with policy, successes and episodes in every row "
            f"({e!r})"
        ) from None
    for r in out:
        if not 0 <= r.successes <= r.episodes or not r.episodes:
            raise UserError(f"--real {path}: {r.policy} has {r.successes} successes of {r.episodes} episodes")
    if len({r.policy for r in out}) < max(len(out), 2):
        raise UserError(f"--real {path} must name at least two policies, each once")
    return out


def match_real(found: list[tuple[str, Path, Path]], table: list[RealRow]) -> list[int]:
    """Which of the policies found each row means: RUN/STEP, or RUN alone where it has one checkpoint."""
    names = [name for name, _, _ in found]
    out = []
    for row in table:
        mine = [i for i, n in enumerate(names) if row.policy in (n, n.rsplit("/", 1)[0])]
        if len(mine) != 1:
            raise UserError(
                f"the real result of {row.policy!r} fits {len(mine)} of the policies: {', '.join(names)}"
            )
        out.append(mine[0])
    return out


# ---- success in the model ----------------------------------------------------------------------------------


def play_in_model(
    model,
    policy,
    obs: Mapping[str, np.ndarray],
    max_steps: int,
    seed: int,
    batch: int = 0,
    judge=None,
    starts: np.ndarray | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> PlayedEpisodes:
    """A policy from observations, with the noise that `robo_rl.evaluation.evaluate` gives batch `batch`;
    `starts` [N] are the seeds of the model's own draws; `tick` as of `play`."""
    generator = torch.Generator().manual_seed(seed * 7919 + batch)
    observe, command = translate(policy, model.spec)
    if (begin := getattr(policy, "reset", None)) is not None:
        begin()
    draws = seed if starts is None else starts

    def act(o: dict) -> np.ndarray:
        return command(decide(policy, observe(o), generator))

    return play(model, act, obs, max_steps, draws, judge, tick)


def play_from_simulator(
    model,
    env,
    policy,
    starts: np.ndarray,
    seed: int,
    judge=None,
    tick: Callable[[int], None] = lambda done: None,
) -> tuple[PlayedEpisodes, np.ndarray]:
    """The same from the first observations of the simulator's `starts`, in batches of env.num_envs ->
    (episodes, instructions); tick as of `play`."""
    n, parts, tasks = env.num_envs, [], []
    for batch, first in enumerate(range(0, len(starts), n)):
        ids = starts[first : first + n]
        padded = np.concatenate([ids, np.repeat(ids[-1:], n - len(ids))])
        obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": padded})
        got = play_in_model(
            model,
            policy,
            {k: np.array(v) for k, v in obs.items()},
            env.spec.max_steps,
            seed,
            batch,
            judge,
            tick=lambda done, first=first: tick(min(first + done, len(starts))),
        )
        parts.append([getattr(got, k)[: len(ids)] for k in PlayedEpisodes.__slots__])
        tasks += [str(t) for t in obs["task"][: len(ids)]]
    return PlayedEpisodes(*(np.concatenate(x) for x in zip(*parts, strict=True))), np.array(tasks)


def check_calibrated(model) -> None:
    """Raise UserError for a model that nobody should act in."""
    if not model.spec.horizon:
        raise UserError(
            "this world model is not calibrated, or no better than a world that stands still: train it on "
            "more episodes: robo_rl wm train DATASET"
        )


def evaluate_in_model(
    model, policy, starts: np.ndarray, seed: int, simulator=None, judge: str = ""
) -> tuple[PlayedEpisodes, np.ndarray]:
    """Episodes of a policy in a model, one per start, and their instructions: from the first observations of
    `simulator`, which the same starts then pair with, or from the recorded frames that the model's own env
    begins with."""
    who = judges.make(judge) if judge else None
    if simulator is not None:
        check_real(model.spec, simulator)
        return play_from_simulator(model, simulator, policy, starts, seed, who)
    check_calibrated(model)
    f = model.frames
    at = frame_of(f, starts)
    tasks = np.array(model.spec.tasks)[f.task[at]]
    obs = {k: v[at] for k, v in f.obs.items()} | {"task": tasks}
    return play_in_model(model, policy, obs, 0, seed, judge=who, starts=starts), tasks


def planner(model, policy, options: PlanOptions, seed: int = 0) -> Planner:
    """A `Planner` over a policy of robo_rl: a torch module with `act`, or a `robo_rl.TrainedPolicy`. A policy
    whose choice is one action is drawn from with its noise. UserError: the model is not calibrated, or the
    policy sees or commands what the model has not."""
    check_calibrated(model)
    module = getattr(policy, "module", policy)
    observe, command = translate(module, model.spec)
    draws, fixed = torch.Generator().manual_seed(seed), torch.Generator()
    explore = module.options.acts in ("gaussian", "squashed")

    def propose(obs: Mapping[str, np.ndarray]) -> np.ndarray:
        return command(decide(module, observe(dict(obs)), draws, explore))

    def plain(obs: Mapping[str, np.ndarray]) -> np.ndarray:
        return command(decide(module, observe(dict(obs)), fixed.manual_seed(seed)))

    return Planner(model, propose, plain, options, seed)


def recorded_starts(model, count: int, seed: int) -> dict[str, np.ndarray]:
    """Observations that held-out episodes began with on which no checkpoint was chosen, all or `count` of
    them."""
    f = model.frames
    rows = held_frames(f)
    if not len(rows):
        raise UserError(
            "this world model keeps no recorded observation to begin from; train it again: robo_rl wm train "
            "DATASET"
        )
    rows = np.random.default_rng([seed, 59]).permutation(rows)[:count]
    return {k: v[rows] for k, v in f.obs.items()} | {"task": np.array(model.spec.tasks)[f.task[rows]]}


# ---- ranking and alarm -------------------------------------------------------------------------------------


def ranked(
    gaps: list[trust.Gap],
    rho,
    a: np.ndarray,
    b: np.ndarray,
    rows: list[dict],
    starts: int,
    tolerance: float,
    real: str,
) -> dict:
    """The document of policies whose mean success is a [P] in the model and b [P] in reality."""
    return {
        "policies": [asdict(g) | {"gap": g.gap._asdict()} | row for g, row in zip(gaps, rows, strict=True)],
        "ranking": {
            "policies": len(gaps),
            "spearman": rho._asdict(),
            "pearson": trust.pearson(a, b),
            "real": real,
            "worst_regret": trust.worst_regret(a, b),
            "choice_regret": trust.choice_regret(a, b),
            "mean_max_rank_violation": trust.mean_max_rank_violation(a, b),
            "starts": starts,
        },
        "alarm": {
            "tolerance": tolerance,
            "over": [g.name for g in gaps if g.side == "over"],
            "under": [g.name for g in gaps if g.side == "under"],
        },
    }


def told(got: PlayedEpisodes) -> dict:
    """What a policy's row says of the model's own doubt."""
    return {"cut": float(got.cut.mean()), "uncertainty": float(got.uncertainty.mean())}


def compare_policies(
    model, env, policies: list, config: WorldEvalConfig, progress: Progress | None = None
) -> dict:
    """Success of every (name, policy) on the same starts in the model and in the simulator `env` ->
    document."""
    starts = eval_starts(config.episodes, REPORT + config.seed)  # no checkpoint was chosen on these
    imagined, real, rows, n = [], [], [], len(starts)
    tick = begun(progress, "rank", 2 * n * len(policies), "episodes")
    for k, (_, policy) in enumerate(policies):
        played = evaluate(env, policy, starts, config.seed, onward(tick, 2 * k * n))
        real.append(played["success"])
        got, _ = play_from_simulator(
            model, env, policy, starts, config.seed, tick=onward(tick, (2 * k + 1) * n)
        )
        imagined.append(got.success)
        rows.append(told(got))
    m, r = np.array(imagined, float), np.array(real, float)
    return ranked(
        trust.gaps([n for n, _ in policies], m, r, config.tolerance),
        trust.spearman_interval(m, r),
        m.mean(1),
        r.mean(1),
        rows,
        config.episodes,
        config.tolerance,
        "simulator",
    )


def compare_to_table(
    model, policies: list, table: list[RealRow], config: WorldEvalConfig, progress: Progress | None = None
) -> dict:
    """The same against what (name, policy), in the order of `table`, did on a robot: from recorded starts,
    without any simulator."""
    obs, imagined, rows = recorded_starts(model, config.episodes, config.seed), [], []
    n = len(obs["state"])
    tick = begun(progress, "rank", n * len(policies), "episodes")
    for k, (_, policy) in enumerate(policies):
        got = play_in_model(model, policy, obs, 0, config.seed, tick=onward(tick, k * n))
        imagined.append(got.success)
        rows.append(told(got))
    m, won, n = (
        np.array(imagined, float),
        np.array([t.successes for t in table]),
        np.array([t.episodes for t in table]),
    )
    return ranked(
        trust.gaps_to_counts([n for n, _ in policies], m, won, n, config.tolerance),
        trust.spearman_to_counts(m, won, n),
        m.mean(1),
        won / n,
        rows,
        m.shape[1],
        config.tolerance,
        "robot",
    )


# ---- the probe ---------------------------------------------------------------------------------------------


def probe_model(model, env, dataset, config: WorldEvalConfig, progress: Progress | None = None) -> dict:
    """Ask about policies unlike the data and those that searches made to exploit the model -> document;
    without a simulator (`env` None) only what the model says of them."""
    each = progress.each if progress else silently
    base, count = probe.cloned_successes(dataset), PROBED if config.probe is None else config.probe
    found = probe.policies(base, count, config.seed)
    starts = eval_starts(config.episodes, REPORT + config.seed)
    if env is None:
        obs, limit = recorded_starts(model, config.episodes, config.seed), model.spec.steps()
    else:
        n = env.num_envs
        # what the search looks at is not what it is judged on
        ids = np.resize(eval_starts(n, REPORT + 1000 + config.seed), n)
        first, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": ids})
        obs, limit = {k: np.array(v) for k, v in first.items()}, env.spec.max_steps
    exploits = probe.searches(model, base, obs, limit, config.seed, each)
    out: dict = {"count": count}
    if env is None:
        played = [
            (name, play_in_model(model, p, obs, limit, config.seed))
            for name, p in each("probe", found, "policies")
        ]
        return out | {
            "searches": [{"name": name, "model": promised} for name, _, promised in exploits],
            "policies": [
                {"name": name, "model": float(got.success.mean())} | told(got) for name, got in played
            ],
        }
    kept, real = [], []
    for _, policy, _ in each("probe", exploits, "searches"):
        got, _ = play_from_simulator(model, env, policy, starts, config.seed)
        kept.append(got.success & ~got.cut)
        real.append(evaluate(env, policy, starts, config.seed)["success"])
    gaps = trust.gaps(
        [name for name, _, _ in exploits], np.array(kept, float), np.array(real, float), config.tolerance
    )
    out["searches"] = [asdict(g) | {"gap": g.gap._asdict()} for g in gaps]
    return (
        out
        | compare_policies(model, env, found, config, progress)
        | {"unlike": measure_unlike(model, env, [p for _, p in found], config)}
    )


def measure_unlike(model, env, policies: list, config: WorldEvalConfig) -> dict:
    """Open-loop error and coverage of the bound along what such policies do in the simulator, each in its
    share of the lanes."""
    n, steps = env.num_envs, min(config.horizon or model.spec.longest, env.spec.max_steps)
    obs, _ = env.reset(
        options={"reset_mask": np.ones(n, bool), "starts": eval_starts(n, REPORT + 2000 + config.seed)}
    )
    start, lane = {k: np.array(v) for k, v in obs.items()}, np.arange(n) % len(policies)
    over, states, actions, seen = np.zeros(n, bool), [], [], []
    weights = np.stack([p.weight for p in policies])[lane]
    for _ in range(steps):
        act = probe.acted(weights, policies[0].mean, policies[0].std, obs["state"])[:, 0]
        obs, _, terminated, truncated, _ = env.step(act)
        seen.append(~over)
        states.append(np.array(obs["state"]))
        actions.append(act)
        over |= terminated | truncated
    states, actions, seen = (np.stack(x, 1) for x in (states, actions, seen))
    none = np.zeros(seen.shape, bool)
    start["before"] = start["state"]
    w = Windows(start, actions, states, {}, none.astype(np.float32), none, none, seen, seen, np.arange(n))
    p = open_loop(model, start, actions, 256, config.seed)
    scale = np.array(model.spec.scale or states.reshape(-1, states.shape[2]).std(0))
    error, held = (
        trust.state_error(p.state, states, scale),
        trust.state_error(trust.hold_last(start["state"], steps), states, scale),
    )
    return {
        "model": table_of(trust.by_horizon(error, seen, w.episode)),
        "hold_last": table_of(trust.by_horizon(held, seen, w.episode)),
        "bound": measure_bound(p.uncertainty, error, w, model.spec, True),
    }


def random_actions(model, dataset, seed: int) -> dict:
    """Success in the model, as an env of it counts it, of uniform actions that are each held for HOLD steps,
    from the first frames of recorded episodes, beside that of the recordings."""
    f, rng = model.frames, np.random.default_rng([seed, 61])
    n = 16 if model.spec.control.views else 32  # pictures take long
    rows = np.resize(rng.permutation(np.flatnonzero(f.first)), n)
    obs = {k: v[rows] for k, v in f.obs.items()} | {"task": np.array(model.spec.tasks)[f.task[rows]]}

    def act(_) -> np.ndarray:
        return np.repeat(rng.uniform(-1, 1, (n, 1, model.spec.action)), HOLD, 1)

    got = play(model, act, obs, seed=seed)
    rate, low, high = wilson(float((got.success & ~got.cut).sum()), n)
    recorded = float(dataset.success.mean())
    return {"model": rate, "low": low, "high": high, "recorded": recorded, "episodes": n}


# ---- all of it ---------------------------------------------------------------------------------------------


def shortened(spec, beside: Literal["robot", "simulator", ""]) -> str:
    """What is to be said of episodes in the model that are shorter than recorded ones; "": they are not.
    beside: what success in the model is compared with, "" nothing."""
    if spec.steps() >= spec.control.max_steps:
        return ""
    there = {
        "robot": ": those of the robot may have lasted longer",
        "simulator": ": in the simulator as well",
        "": "",
    }[beside]
    return (
        f"Episodes in the model end after {spec.steps()} steps, to which it is calibrated, recorded ones "
        f"after {spec.control.max_steps}{there}."
    )


def evaluate_model(config: WorldEvalConfig) -> tuple[dict, dict]:
    """`measure`, then the comparison with another model, with the simulator or a table of real results, and
    the probe."""
    check_device(config.device)
    model, found = load(config.model, config.device), find_policies(config.policies)
    other, table = (
        load(config.against, config.device) if config.against else None,
        read_real(config.real) if config.real else None,
    )
    lanes, env = min(config.episodes, 32 if model.spec.control.views else 10**5), None
    asked = config.probe or (config.probe is None and not model.spec.control.views)
    if config.sim and not found and not asked:
        raise UserError("--sim is where --policies and --probe are played: give one of them, or leave it out")
    if table is not None:
        found = [found[i] for i in match_real(found, table)]
    elif found:
        env = make_real(model.spec, [run for _, run, _ in found], lanes, config.sim)
    elif asked:
        env = simulator_of(model.spec, lanes, config.sim)
    dataset = load_data(config.dataset)
    with Progress() as progress:
        doc, arrays = measure(model, dataset, config, progress)
        if dataset.is_judged and model.spec.horizon and model.frames.first.any():
            doc["random"] = random_actions(model, dataset, config.seed)
        if other is not None:
            _, theirs = measure_open_loop(other, arrays["windows"], arrays["scale"], config)
            doc["against"] = compare_models(
                arrays["errors"], theirs["errors"], arrays["windows"], config.against
            )
        policies = [(name, checkpoint.load_policy(folder)[0]) for name, _, folder in found]
        if table is not None:
            doc |= compare_to_table(model, policies, table, config, progress)
        elif policies:
            doc |= compare_policies(model, env, policies, config, progress)
        if asked:
            told_in = as_commands([dataset], model.spec.control.axes)[0]
            doc["probe"] = probe_model(model, env, told_in, config, progress)
    beside = "robot" if table is not None else "" if env is None else "simulator"
    if env is not None:
        env.close()
    if ("policies" in doc or asked) and (note := shortened(model.spec, beside)):
        doc["notes"].append(note)
    doc["verdict"], doc["objections"] = verdict(doc), objections(doc)[0]
    return doc, arrays
