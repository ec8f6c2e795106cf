"""What `import robo_rl` offers: environments, training, policies, evaluation and data as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError, in_range
from robo_rl.experiment import config_file, recipes
from robo_rl.experiment.config import TrainConfig, load_config
from robo_rl.experiment.reporting import Event
from robo_rl.selection import REPORT


def make_env(sim: str = "mujoco", task: str = "", num_envs: int = 1, **options):
    """A `gymnasium.vector.VectorEnv` of the project's contract: N envs that reset by mask and by start.

    sim, task: as in `robo_rl train`; options: obs, reward, control, image_size, threads, max_steps,
    randomise, render, judge.
    """
    from robo_rl.experiment import envs

    return envs.make(sim, task, num_envs, **options)


def register_envs() -> tuple[str, ...]:
    """Make the tasks of the embedded simulator ids of Gymnasium, for
    `gymnasium.make_vec("robo_rl/pick_cube-v0", …)` -> the ids."""
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
    """The configuration that `robo_rl train` uses for these, with `changes`: fields of TrainConfig; `policy`,
    `bc` and `rl` take a dict of the fields to change. With `steps` all of them are made, unless `target` is
    given too; with `demos` no more are recorded, unless `demos_most` is."""
    policy = changes.get("policy", {})
    base = recipes.recipe(
        sim,
        task,
        algo,
        obs,
        preset,
        changes.get("reward", ""),
        changes.get("init", ""),
        str(changes.get("demos", "")),
        recipes.model_words(policy.get("kind", ""), policy.get("folder", "")),
    )
    return config_file.merged(recipes.exact(base, config_file.flat(changes)), changes, "recipe")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """folder: of the run; finished: False where a signal stopped it; success, low, high: of the last policy
    on the starts that are reported, with its 95 % interval (None before the final evaluation)."""

    folder: Path
    finished: bool
    success: float | None = None
    low: float | None = None
    high: float | None = None


def train(
    config: TrainConfig, callback: Callable[[Event], None] | None = None, quiet: bool = False
) -> TrainResult:
    """Train in a new run folder (`config.out`, else below runs/). `callback(event)` hears of all that
    happens; `quiet`: no progress line. A script that trains with workers needs `if __name__ == "__main__":`,
    as all that uses multiprocessing."""
    from robo_rl.experiment import train as training

    return _result(*training.train(config, callback, quiet=quiet))


def resume(
    folder: "str | Path", callback: Callable[[Event], None] | None = None, quiet: bool = False
) -> TrainResult:
    """Go on with a run from its last checkpoint."""
    from robo_rl.experiment import train as training

    return _result(*training.resume(Path(folder), callback, quiet=quiet))


def _result(folder: Path, code: int) -> TrainResult:
    from robo_rl import files

    final = folder / "evals" / "final.json"
    final = final if final.exists() else folder / "evals" / "sft.json"
    if code or not final.exists():
        return TrainResult(folder, code == 0)
    document = files.read_json(final)
    return TrainResult(folder, True, sum(document["success"]) / document["n"], *document["wilson"])


class TrainedPolicy:
    """A policy of a run, ready to act. `module`: the torch module; `spec`: what it sees and commands;
    `config`: of its run."""

    def __init__(self, module, run: Path, checkpoint: Path, seed: int = 0):
        import torch

        self.module, self.spec, self.run, self.checkpoint = module.eval(), module.spec, run, checkpoint
        self.config = load_config(run)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, obs: dict, explore: bool = False) -> np.ndarray:
        """Actions float32[N, E, A] in [-1, 1] for an observation of N envs: the next E control steps of
        each. UserError: it lacks what the policy sees, has another width, or is not finite."""
        from robo_rl.evaluation import decide

        check_observation(obs, self.spec)
        return decide(self.module, obs, self._generator, explore)


def check_observation(obs: dict, spec) -> None:
    """UserError: an observation of N envs lacks what a policy of this ObsSpec sees, has another width, or is
    not finite."""
    wanted = ("state", *(f"image/{view}" for view in spec.views), *(("task",) if spec.language else ()))
    if missing := [name for name in wanted if name not in obs]:
        raise UserError(f"the policy sees {', '.join(wanted)}; the observation lacks {', '.join(missing)}")
    import torch

    state = torch.as_tensor(obs["state"])
    if state.ndim != 2 or state.shape[1] != spec.state:
        raise UserError(
            f"the policy sees a state [N, {spec.state}] of N envs, got {list(state.shape)} (of one env: "
            "state[None])"
        )
    if not torch.isfinite(state).all():
        raise UserError("the state of the observation is not finite")


def load_policy(path: "str | Path", checkpoint: str = "best", device: str = "cpu") -> TrainedPolicy:
    """The policy of a run folder (checkpoint: best, last, sft or a name below checkpoints/) or of a
    checkpoint folder. device: where it computes, cpu, cuda or cuda:N; what it sees and gives stays NumPy."""
    from robo_rl.experiment.folder import pick_checkpoint
    from robo_rl.experiment.policy_device import check_policy_device

    check_policy_device(device)
    run, folder = pick_checkpoint(Path(path), checkpoint)
    from robo_rl import checkpoint as checkpoints

    return TrainedPolicy(checkpoints.load_policy(folder, device)[0], run, folder)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Success of n episodes with its 95 % Wilson interval (in a world model, where many begin from the same
    recorded frame, that of as many episodes as frames); arrays [n] of single episodes: success bool,
    returns, lengths [control steps], starts (the same start is the same episode, so results pair), tasks
    (instructions); doubted bool: in a world model, it passed the threshold of the model's uncertainty, where
    an env of the model ends it (None elsewhere); origins: in a world model without a simulator, the recorded
    frame that the episode began from (None elsewhere); max_steps: limit of an episode [control steps]."""

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

    def minus(self, other: "EvalResult") -> tuple[float, float, float]:
        """(difference of the success rates, low, high) on the same starts, paired, 95 %."""
        from robo_rl.stats import paired_difference

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
        return paired_difference(self.success, other.success, groups=self.origins)

    def __str__(self) -> str:
        doubt = ""
        if self.doubted is not None:
            known = float((self.success & ~self.doubted).mean())
            less = f" ({known:.3f} where these count as failed)" if known < self.success_rate else ""
            share = f"{100 * self.doubted.mean():.0f} %"
            doubt = f", to {self.max_steps} steps, {share} beyond the model's doubt{less}"
        frames = "" if self.origins is None else f" from {len(set(self.origins))} recorded starts"
        return (
            f"success {self.success_rate:.3f}, 95 % interval [{self.low:.3f}, {self.high:.3f}], n = "
            f"{self.n}{frames}{doubt}"
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
    """Success of a policy on the fixed starts of list `seed`, without exploration noise.

    policy: a TrainedPolicy, or any function of an env's observation that gives actions [N, A] or chunks of
    them [N, E, A];
    env: of the project's contract; None: the env of the policy's run, `num_envs` (0: one per episode in the
    embedded simulator) side by side; or a world model (`load_world_model`), where nothing is cut for its
    doubt, which `doubted` tells of. In a model, episodes are as long as in an env of it. They begin from its
    held-out recorded frames, or from the first observations of `simulator` (an env), so that the result pairs
    with one there; `judge` decides on success as in `robo_rl train --judge`.
    """
    in_range("episodes", episodes, 1, 10**7)
    if env is not None and not hasattr(env, "num_envs"):
        return _evaluate_in_model(policy, env, episodes, seed, simulator, judge)
    if simulator is not None or judge:
        raise UserError(
            "simulator and judge are for an evaluation in a world model: evaluate(policy, "
            "robo_rl.load_world_model(…), …)"
        )
    from robo_rl.evaluation import eval_starts
    from robo_rl.evaluation import evaluate as run_episodes
    from robo_rl.stats import success_rate

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
    return EvalResult(
        *success_rate(got["success"], got.get("origin")),
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


def _evaluate_in_model(policy, model, episodes: int, seed: int, simulator, judge: str) -> EvalResult:
    from robo_rl.evaluation import eval_starts
    from robo_rl.experiment.world_model import evaluate_in_model
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
    """Record episodes as a LeRobot v3 data set, or add to one; options of
    `robo_rl.experiment.collect.CollectOptions` -> what was recorded."""
    from robo_rl.experiment.collect import CollectOptions
    from robo_rl.experiment.collect import collect as record

    return record(CollectOptions(out=str(out), sim=sim, task=task, episodes=episodes, **options))


def load_dataset(folder: "str | Path"):
    """The LeRobot v3 data set in `folder`, see `robo_rl.data.reader.Dataset`."""
    from robo_rl.data.reader import load

    return load(folder)


def load_world_model(folder: "str | Path"):
    """The world model of a run of `robo_rl wm train`; `make_env("wm:FOLDER")` is an env inside it."""
    from world_models.model import load

    return load(folder)
