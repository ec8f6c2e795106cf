"""What `import robo_rl` offers: environments, training, policies, evaluation and data as functions."""

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl import plugins
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment import config_file, recipes
from robo_rl.experiment.config import TrainConfig, load_config
from robo_rl.experiment.reporting import Event
from robo_rl.files import folder_of
from robo_rl.starts import REPORT


def make_env(sim: str = "mujoco", task: str = "", num_envs: int = 1, **options):
    """A `gymnasium.vector.VectorEnv` of the project's contract: N envs that reset by mask and by start.

    * sim, task: as in `robo_rl train --sim` and `--task`; `""` is the simulator's first task.
    * num_envs: N.
    * options: `obs` ("state" or "rgb"), `reward` ("sparse" or "dense"), `control`, `image_size` [pixels],
      `threads`, `max_steps` [control steps], `randomise`, `cameras`, `render` (readies `env.render()`),
      `device`; of a world model `judge`. As the options of `robo_rl train`; one left out is the simulator's
      own.

    Observations are a dict of `state` float32[N, S], `image/<view>` uint8[N, h, w, 3] and `task` str[N],
    actions float32[N, A] in [-1, 1]; `env.spec` says what each axis means, in which unit, and the control
    period [s]. UserError: an unknown name, or an option that the simulator does not take.
    """
    from robo_rl.experiment import envs

    check_name("sim", sim)
    for name in options:
        choose("option of make_env", name, envs.OPTIONS)
    check_text("make_env", {"task": task} | {k: v for k, v in options.items() if k in TEXT})
    options |= {k: whole(k, v) for k, v in options.items() if k in WHOLE}
    return envs.make(sim, task, whole("num_envs", num_envs), **options)


TEXT = ("obs", "reward", "control", "randomise", "cameras", "device", "judge")  # options of `make_env`
WHOLE = ("image_size", "threads", "max_steps")


def check_text(where: str, values: Mapping[str, object]) -> None:
    """UserError: one of the values {name: value} is no text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise UserError(f"{where}: {name} must be str, got {value!r}")


def check_name(what: str, name: object) -> None:
    """UserError: a simulator or a method that is no name, such as the class of an env."""
    if not isinstance(name, str):
        raise UserError(
            f'{what} is a name as on the command line, for example "module:object" of your own or '
            f'"gym:module:Class" of a Gymnasium env, got {name!r}'
        )


def check_demos_name(demos: object) -> None:
    """UserError: demonstrations that are neither a folder nor a number, such as arrays."""
    if not isinstance(demos, str | int):
        raise UserError(
            f"demos is the folder of a data set, or how many to record, got a {type(demos).__name__}; of "
            "arrays in memory robo_rl.import_data(FOLDER, arrays, fps=…) makes one, and a data set that is "
            "loaded already is read from its folder: str(data.meta.root)"
        )


def whole(name: str, value: Any) -> int:
    """A whole number, of NumPy too. UserError: it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be a whole number, got {value!r}") from None


def plain(value: Any) -> Any:
    """A value as a configuration keeps it: numbers of NumPy as Python's, paths as text, in dicts too."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def register_envs() -> tuple[str, ...]:
    """Make the tasks of the embedded simulator ids of Gymnasium, for
    `gymnasium.make_vec("robo_rl/pick_cube-v0", num_envs=8)`; returns the ids."""
    from sims import gymnasium_ids

    return gymnasium_ids.register_envs()


def recipe(
    sim: str = "mujoco",
    task: str = "",
    algo: str = "pi_rl",
    obs: str = "state",
    preset: str = "full",
    **changes,
) -> TrainConfig:
    """The configuration that `robo_rl train` uses for these options.

    * sim, task, algo, obs, preset: what the recipe is looked up by; as on the command line.
    * changes: fields of `TrainConfig`. `policy`, `bc` and `rl` take a dict of the fields to change.

    With `steps` all of them are made, unless `target` is given too. With `demos` no more demonstrations are
    recorded, unless `demos_most` is given too. UserError: an unknown name or field, or a value out of range.
    """
    check_name("sim", sim)
    check_name("algo", algo)
    changes = {k: plain(v) for k, v in changes.items()}
    check_demos_name(changes.get("demos", ""))
    policy = changes.get("policy", {})
    if not isinstance(policy, Mapping):
        raise UserError(
            f'recipe: policy is a dict, for example policy={{"kind": {policy!r}}}, got {policy!r}'
        )
    named = {"task": task, "obs": obs, "preset": preset}
    named |= {k: changes[k] for k in ("reward", "init") if k in changes}
    named |= {f"policy.{k}": policy[k] for k in ("kind", "folder") if k in policy}
    check_text("recipe", named)
    base = recipes.recipe(
        sim,
        task,
        algo,
        obs,
        preset,
        changes.get("reward", ""),
        demos=str(changes.get("demos", "")),
        init=changes.get("init", ""),
        model=recipes.model_words(policy.get("kind", ""), policy.get("folder", "")),
    )
    base = recipes.exact(base, config_file.flat(changes))
    base = recipes.of_kind(base, policy.get("kind", ""), policy.get("folder", ""))
    return config_file.merged(base, changes, "recipe")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What `train` and `resume` return.

    * folder: the run folder.
    * finished: False where a signal stopped the run; `resume` goes on with it.
    * success, low, high: success rate of the last policy on the starts that are reported, and its 95 %
      interval; None before the final evaluation, and of a task that knows no success.
    * mean_return: of the same episodes.
    """

    folder: Path
    finished: bool
    success: float | None = None
    low: float | None = None
    high: float | None = None
    mean_return: float | None = None


def train(
    config: TrainConfig, callback: Callable[[Event], None] | None = None, quiet: bool = False
) -> TrainResult:
    """Train in a new run folder.

    * config: of `recipe`, or a `TrainConfig`. The folder is `config.out`, else a new one below `runs/`.
    * callback: called with an `Event` for all that happens, in the process and thread that train. What it
      raises ends the run and comes out of this function; `resume` goes on from the last checkpoint.
    * quiet: no progress line.

    A script that trains with workers needs `if __name__ == "__main__":`, as all that uses multiprocessing.
    UserError: options that do not go together, or a folder that holds a run already.
    """
    from robo_rl.experiment import train as training

    if not isinstance(config, TrainConfig):
        raise UserError(f"train takes the configuration that robo_rl.recipe(…) makes, got {config!r}")
    check_demos_name(config.demos)
    check_callback("train", callback)
    return _result(*training.train(config, callback, quiet=quiet))


def resume(
    folder: "str | Path", callback: Callable[[Event], None] | None = None, quiet: bool = False
) -> TrainResult:
    """Go on with the run in `folder` from its last checkpoint, with the options of that run; callback and
    quiet as in `train`. UserError: it is no run folder, or another process owns it."""
    from robo_rl.experiment import train as training

    check_callback("resume", callback)
    return _result(*training.resume(folder_of(folder, "resume", "a run"), callback, quiet=quiet))


def check_callback(what: str, callback: Callable[[Event], None] | None) -> None:
    """UserError: it is no function of an event."""
    if callback is not None:
        plugins.check_call(callback, "callback", f"{what}:", ("event",))


def _result(folder: Path, code: int) -> TrainResult:
    from robo_rl import files

    final = folder / "evals" / "final.json"
    final = final if final.exists() else folder / "evals" / "sft.json"
    if code or not final.exists():
        return TrainResult(folder, code == 0)
    document = files.read_json(final)
    success, gain = (sum(document[k]) / document["n"] for k in ("success", "return"))
    rate = () if document.get("no_success") else (success, *document["wilson"])
    return TrainResult(folder, True, *rate, mean_return=gain)


class TrainedPolicy:
    """A policy of a run, ready to act: call it with an observation.

    * module: the torch module.
    * spec: what it sees and commands (`ObsSpec`: sizes, cameras, whether it takes an instruction).
    * config: the `TrainConfig` of its run.
    * run, checkpoint: their folders.
    """

    def __init__(self, module, run: Path, checkpoint: Path, seed: int = 0):
        import torch

        self.module, self.spec, self.run, self.checkpoint = module.eval(), module.spec, run, checkpoint
        self.config = load_config(run)
        self._generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        return f"TrainedPolicy({str(self.checkpoint)!r}, {self.config.sim}:{self.config.task})"

    def __call__(self, obs: dict, explore: bool = False) -> np.ndarray:
        """The next E control steps of each of N envs.

        * obs: an observation of N envs, as `reset` and `step` give it.
        * explore: with the exploration noise of training.

        Returns actions float32[N, E, A] in [-1, 1]. UserError: the observation lacks what the policy sees,
        has another width, or is not finite.
        """
        from robo_rl.evaluation import decide

        actions = decide(self.module, as_observation(obs, self.spec), self._generator, explore)
        return self.spec.cut(actions)


def as_observation(obs: dict, spec) -> dict:
    """An observation of N envs as a policy of this ObsSpec takes it, the state as float32 (Gymnasium's are
    often float64). UserError: it lacks what the policy sees, has another size, or is not finite."""
    wanted = ("state", *(f"image/{view}" for view in spec.views), *(("task",) if spec.language else ()))
    if not isinstance(obs, Mapping) or (missing := [name for name in wanted if name not in obs]):
        lacks = f"lacks {', '.join(missing)}" if isinstance(obs, Mapping) else f"is a {type(obs).__name__}"
        raise UserError(f"the policy sees {', '.join(wanted)}; the observation {lacks}")
    import torch

    state = torch.as_tensor(obs["state"]).float()
    if state.ndim != 2 or state.shape[1] != spec.state:
        raise UserError(
            f"the policy sees a state [N, {spec.state}] of N envs, got {list(state.shape)} (of one env: "
            "state[None])"
        )
    if not torch.isfinite(state).all():
        raise UserError("the state of the observation is not finite")
    shape = [len(state), *(("h", "w") if spec.fit or spec.text else (spec.image_size,) * 2), 3]
    for name in (f"image/{view}" for view in spec.views):
        image = torch.as_tensor(obs[name])
        same = image.ndim == 4 and all(
            a == b for a, b in zip(image.shape, shape, strict=True) if b not in ("h", "w")
        )
        if image.dtype != torch.uint8 or not same:
            raise UserError(
                f"the policy sees {name} as uint8 {shape}, got {str(image.dtype)[6:]} {list(image.shape)}"
            )
    if spec.language and (isinstance(obs["task"], str) or len(obs["task"]) != len(state)):
        raise UserError(f"the policy is told task, an instruction for each of the {len(state)} envs (a list)")
    return {**obs, "state": state}


def load_policy(path: "str | Path", checkpoint: str = "best", device: str = "cpu") -> TrainedPolicy:
    """The policy of a run.

    * path: a run folder, or a checkpoint folder inside one.
    * checkpoint: of a run folder, "best", "last", "sft" (the supervised policy) or a name below
      `checkpoints/`.
    * device: where it computes, "cpu", "cuda" or "cuda:N"; observations and actions stay NumPy.

    UserError: no such run or checkpoint, damage, or a device that is not there.
    """
    from robo_rl.device_names import check_device
    from robo_rl.experiment.folder import pick_checkpoint

    own = (
        "a network of your own needs no loading: evaluate takes any function of an observation, such as "
        'lambda obs: net(torch.as_tensor(obs["state"])).numpy(force=True)'
    )
    path = folder_of(path, "load_policy", "a run or of a checkpoint", own)
    check_device(device)
    run, folder = pick_checkpoint(path, checkpoint)
    from robo_rl import checkpoint as checkpoints

    return TrainedPolicy(checkpoints.load_policy(folder, device)[0], run, folder)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Success of n episodes, and each of them.

    * success_rate, low, high: share of successes and its 95 % Wilson interval. In a world model many episodes
      begin from the same recorded frame; the interval is then that of as many episodes as frames. They are
      nan where the task knows no success.
    * success bool[n], returns float[n] (undiscounted), lengths int[n] in control steps.
    * starts int[n]: the same start is the same episode, so results on equal starts pair.
    * tasks: the n instructions.
    * doubted bool[n]: in a world model, the episode passed the threshold of the model's uncertainty, where an
      env of the model ends it. None elsewhere.
    * origins int[n]: in a world model without a simulator, the recorded frame that the episode began from.
      None elsewhere.
    * max_steps: limit of an episode [control steps].
    """

    success_rate: float
    low: float
    high: float
    n: int
    success: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    tasks: tuple[str, ...]
    doubted: np.ndarray | None = None
    origins: np.ndarray | None = None
    max_steps: int = 0

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    def minus(self, other: "EvalResult") -> tuple[float, float, float]:
        """(difference of the success rates, low, high): this result less `other`, paired by their starts,
        with the 95 % interval; of the mean returns where the task knows no success. UserError: the starts,
        the recorded frames or the limits of the two differ."""
        from robo_rl.stats import bootstrap_mean, paired_difference

        if not np.array_equal(self.starts, other.starts):
            raise UserError(
                "results of other starts do not pair: evaluate both with the same episodes and seed"
            )
        mine, theirs = (x.origins if x.origins is not None else np.zeros(0) for x in (self, other))
        if not np.array_equal(mine, theirs):
            raise UserError(
                "episodes from other first observations do not pair: evaluate both in one world model, or "
                "give simulator=env in the model"
            )
        in_model = any(x.doubted is not None for x in (self, other))
        if in_model and self.max_steps != other.max_steps:
            fewest = min(self.max_steps, other.max_steps)
            raise UserError(
                f"episodes of {self.max_steps} and of {other.max_steps} steps do not pair: make the env of "
                f"the longer ones with max_steps={fewest}"
            )
        if np.isnan(self.success_rate):
            return bootstrap_mean(self.returns - other.returns)
        return paired_difference(self.success, other.success, groups=self.origins)

    def __str__(self) -> str:
        from robo_rl.stats import bootstrap_mean

        doubt = ""
        if self.doubted is not None:
            known = float((self.success & ~self.doubted).mean())
            less = f" ({known:.3f} where these count as failed)" if known < self.success_rate else ""
            share = f"{100 * self.doubted.mean():.0f} %"
            doubt = f", to {self.max_steps} steps, {share} beyond the model's doubt{less}"
        frames = "" if self.origins is None else f" from {len(set(self.origins))} recorded starts"
        if np.isnan(self.success_rate):
            value, low, high = bootstrap_mean(self.returns)
            return f"mean return {value:.4g}, 95 % interval [{low:.4g}, {high:.4g}], n = {self.n}"
        return (
            f"success {self.success_rate:.3f}, 95 % interval [{self.low:.3f}, {self.high:.3f}], n = "
            f"{self.n}{frames}, mean return {self.mean_return:.4g}{doubt}"
        )


def evaluate(
    policy,
    env=None,
    episodes: int = 200,
    seed: int = REPORT,
    num_envs: int = 0,
    simulator=None,
    judge: str = "",
) -> EvalResult:
    """Success of a policy on fixed starts, without exploration noise.

    * policy: a `TrainedPolicy`, or any function of an env's observation that gives actions [N, A] or chunks
      of them [N, E, A], in [-1, 1].
    * env: a vector env of the contract; None: the env of the policy's run; or a world model
      (`load_world_model`).
    * episodes, seed: that many starts of list `seed`. List 0 chooses checkpoints in training, list 1, the
      default, is for reports.
    * num_envs: with env None, how many envs run side by side; 0: as in the run's own evaluations.
    * simulator: with a world model, an env whose first observations the episodes begin from, so that the
      result pairs with one in that env; None: the model's held-out recorded frames.
    * judge: with a world model, who decides on success, as in `robo_rl train --judge`.

    In a world model episodes are as long as in an env of it, and none is cut for the model's doubt;
    `EvalResult.doubted` tells of it. UserError: the policy does not fit the env.
    """
    episodes, seed = whole("episodes", episodes), whole("seed", seed)
    in_range("episodes", episodes, 1, 10**7)
    in_range("num_envs", whole("num_envs", num_envs), 0, 10**6)
    check_evaluated(policy, env)
    if num_envs and env is not None:
        raise UserError("num_envs is of the env that evaluate makes itself; leave it out beside an env")
    if env is not None and not hasattr(env, "num_envs"):
        return _evaluate_in_model(policy, env, episodes, seed, simulator, judge)
    if simulator is not None or judge:
        raise UserError(
            "simulator and judge are for an evaluation in a world model: evaluate(policy, "
            "robo_rl.load_world_model(…), …)"
        )
    from robo_rl.evaluation import evaluate as run_episodes
    from robo_rl.starts import eval_starts
    from robo_rl.stats import Interval, success_rate

    made = None
    if env is None:
        if not isinstance(policy, TrainedPolicy):
            raise UserError(
                "evaluate needs an env for a policy that is a plain function: robo_rl.make_env(…)"
            )
        from robo_rl.experiment.envs import make_env as env_of
        from robo_rl.experiment.evaluation import env_count

        env = made = env_of(
            policy.config, env_count(policy.config, episodes, num_envs or policy.config.eval_envs)
        )
    starts = eval_starts(episodes, seed)
    try:
        got = run_episodes(env, policy.module if isinstance(policy, TrainedPolicy) else policy, starts, seed)
    finally:
        if made is not None:
            made.close()
    rate = success_rate(got["success"], got.get("origin"))
    rate = Interval(np.nan, np.nan, np.nan) if "no_success" in got else rate
    return EvalResult(
        *rate,
        episodes,
        np.array(got["success"], bool),
        np.array(got["return"]),
        np.array(got["length"]),
        starts,
        tuple(got["task"]),
        doubted=np.array(got["cut"], bool) if "cut" in got else None,
        origins=np.array(got["origin"]) if "origin" in got else None,
        max_steps=env.spec.max_steps,
    )


def check_evaluated(policy, env) -> None:
    """UserError: what `evaluate` is given is no policy, or no env of the contract and no world model."""
    from robo_rl.types import ControlSpec

    if isinstance(policy, str | Path):
        raise UserError(f"evaluate takes a policy: robo_rl.evaluate(robo_rl.load_policy({str(policy)!r}), …)")
    if not (hasattr(policy, "spec") if hasattr(policy, "act") else callable(policy)):
        raise UserError(
            f"evaluate takes a policy of robo_rl.load_policy, or a function of an observation, got {policy!r}"
        )
    is_env = hasattr(env, "num_envs") and isinstance(getattr(env, "spec", None), ControlSpec)
    if env is not None and not is_env and not hasattr(env, "frames"):
        raise UserError(
            'evaluate takes an env of robo_rl.make_env ("gym:ID" makes one of a Gymnasium id), or a world '
            f"model of robo_rl.load_world_model, got {env!r}"
        )


def _evaluate_in_model(policy, model, episodes: int, seed: int, simulator, judge: str) -> EvalResult:
    from robo_rl.experiment.world_model import evaluate_in_model
    from robo_rl.starts import eval_starts
    from robo_rl.stats import success_rate
    from world_models.env import frame_of

    starts = eval_starts(episodes, seed)
    module = policy.module if isinstance(policy, TrainedPolicy) else policy
    got, tasks = evaluate_in_model(model, module, starts, seed, simulator, judge)
    origins = frame_of(model.frames, starts) if simulator is None else None
    return EvalResult(
        *success_rate(got.success, origins),
        episodes,
        got.success,
        got.gain,
        got.length,
        starts,
        tuple(str(t) for t in tasks),
        got.cut,
        origins,
        model.spec.steps(simulator.spec.max_steps if simulator is not None else 0),
    )


def collect(out: "str | Path", sim: str = "mujoco", task: str = "", episodes: int = 50, **options):
    """Record episodes as a LeRobot v3 data set in the folder `out`, or add to one that is there.

    * sim, task: as in `make_env`.
    * episodes: how many to add; without `policy`, successful ones of the scripted expert.
    * options: those of `robo_rl collect`, with underscores: `policy`, `operator`, `noise`, `obs`, `seed`, …

    Returns the `Collected` episodes: folder, how many were added, successes, tries, how many it has now.
    UserError: no expert, data of another robot in the folder, damage.
    """
    from robo_rl.experiment.collect import CollectOptions
    from robo_rl.experiment.collect import collect as record

    check_name("sim", sim)
    out = folder_of(out, "collect", "a data set")
    for name in options:
        choose("option of collect", name, [f.name for f in fields(CollectOptions)])
    asked = {"sim": sim, "task": task, "episodes": episodes} | options
    changes = {k: plain(v) for k, v in asked.items()}
    return record(config_file.merged(CollectOptions(out=str(out)), changes, "collect"))


def import_data(
    out: "str | Path",
    files: "str | Path | Sequence[str | Path] | Mapping[str, Any] | Sequence[Mapping[str, Any]]",
    **said: Any,
):
    """Make the LeRobot v3 data set `out` of files of another project, or of arrays in memory: robomimic,
    LIBERO, ACT, Diffusion Policy, RLDS, Minari, D4RL, OGBench, any HDF5 file, bags.

    * files: files of one format, or folders of them; or a dict of arrays with D4RL's keys (`observations`,
      `actions`, `terminals`, `timeouts`, `rewards`), or a list with such a dict for each episode, which may
      have `task` (str) and `success` (bool) too.
    * said: what they do not say: `state` and `action` (keys), `cameras` ("front=KEY,wrist=KEY"), `fps`,
      `instruction`, `units`, `success`, `episodes`, `pictures`, `max_side`, `robot`, as in
      `robo_rl data import`.

    Returns the `Dataset`. UserError: no such file or key, or what nobody says.
    """
    from contextlib import ExitStack

    from robo_rl.data.foreign import ImportChoice, choose_keys, write
    from robo_rl.data.foreign_arrays import read_arrays
    from robo_rl.data.foreign_files import read_files

    out = folder_of(out, "import_data", "a data set")
    for name in said:
        choose("option of import_data", name, [f.name for f in fields(ImportChoice)])
    for kind in ("state", "action"):
        keys = said.pop(kind, ())
        said[kind] = (keys,) if isinstance(keys, str) else tuple(keys)
    choice = config_file.merged(ImportChoice(), {k: plain(v) for k, v in said.items()}, "import_data")
    given: list[Any] = [files] if isinstance(files, str | Path | Mapping) else []
    if not given:
        if not isinstance(files, list | tuple):
            raise UserError(
                "import_data takes files, a dict of arrays, or a list with such a dict for each episode, got "
                f"a {type(files).__name__}"
            )
        given = list(files)
    with ExitStack() as opened:
        if given and all(isinstance(x, str | Path) for x in given):
            got = read_files([Path(x) for x in given], choice, opened)
        else:
            got = choose_keys(read_arrays(files if isinstance(files, Mapping) else given), choice)
        write(got, choice, out)
    return load_dataset(out)


def load_dataset(folder: "str | Path"):
    """The LeRobot v3 data set in `folder`, as a `Dataset`: all numbers in memory, pictures decoded when asked
    for. UserError: it is no data set, or damaged; the message names the file and the remedy."""
    from robo_rl.data.reader import load

    arrays = "of arrays in memory robo_rl.import_data(FOLDER, arrays, fps=…) makes one"
    return load(folder_of(folder, "load_dataset", "a data set", arrays))


def load_world_model(folder: "str | Path"):
    """The world model in a run folder of `robo_rl wm train`, for `evaluate`; `make_env("wm:FOLDER")` is an
    env inside it. UserError: it is no world model, or damaged."""
    from world_models.model import load

    return load(folder_of(folder, "load_world_model", "a run of robo_rl wm train"))
