"""SynthER and policy-guided diffusion offline: IQL on few transitions, on these and made ones, on many real.

    python launch/compare_synthetic.py                                  # push_cube, three seeds
    python launch/compare_synthetic.py --task reach --few 1000 --many 4000 --seeds 1 --updates 200 --upsample
    100
    python launch/compare_synthetic.py --task HalfCheetah-v5 --policy RUN,random --updates 20000      # RUN:
                                                            of robo_rl train

Episodes are recorded once per seed (the expert and random actions, with noise on what is executed; all
outcomes), and cut into single control steps, the episodes in random order. IQL (`robo_rl/algos/iql.py`,
chunks of one step) then learns offline, with equal updates, from

* few: the first `--few` of them; many: the first `--many`;
* topped up: the few, and the rest up to `--many` made by SynthER (`world_models/synther.py`);
* guided (with `--guided`): a quarter of the updates from the few, then three times a quarter from 15 made
  rows for each of the few, out of stretches that policy-guided diffusion (`world_models/guided.py`) makes
  towards the policy of that moment;
* unguided: the same with stretches of the recorded behaviour.

Printed: success in the simulator (locomotion: the return) on the same starts, the paired differences with
95 % intervals, and how like the real ones the made ones are (marginals, correlations, dynamics; the few real
ones beside them). `--keep FILE` holds every result; what it has is not run again.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import robo_rl
from robo_rl.algos import iql
from robo_rl.demos import fit_normalisers
from robo_rl.evaluation import evaluate
from robo_rl.files import keep_row, kept_rows
from robo_rl.options import IqlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.replay import Mixture, Replay
from robo_rl.starts import eval_starts
from robo_rl.stats import bootstrap_mean, paired_difference, wilson
from sims.mujoco.names import LOCOMOTION
from world_models.guided import Guided, GuideOptions, windows_of
from world_models.synther import SynthOptions, Transitions, Upsampler, fill, quality

LANES = 500
AGES = 3  # of the policy that stretches are made towards
MADE = 15  # rows of stretches for each real one of a batch
WINDOW = 16  # steps of a stretch


def known_rows(data, seed: int) -> np.ndarray:
    """int64: rows of every control step whose next state was recorded, whole episodes in random order (those
    of one who acts are recorded after those of the other)."""
    order = np.random.default_rng([seed, 89]).permutation(len(data))
    rows = np.concatenate([np.arange(data.from_[e], data.to[e]) for e in order])
    return rows[np.isfinite(data.after[rows]).all(1)]


def transitions_of(data, rows: np.ndarray) -> Transitions:
    """The control steps of `rows`."""
    over = np.zeros(len(data.state), bool)
    over[data.to[data.terminated] - 1] = True
    return Transitions(data.state[rows], data.action[rows], data.reward[rows], data.after[rows], over[rows])


def size_of(args) -> SynthOptions:
    """Of the diffusion models. One that is too small for its data makes transitions that teach less than
    nothing: the printed `dynamics` of the made ones is then far above that of the few."""
    return SynthOptions(updates=args.upsample, hidden=args.hidden, layers=args.layers, steps=args.denoise)


def joined(a: Transitions, b: Transitions) -> Transitions:
    return Transitions(
        *(
            np.concatenate([getattr(a, k), getattr(b, k)])
            for k in ("obs", "action", "reward", "next_obs", "terminated")
        ),
        source="synthetic",
    )


def begin(t: Transitions, data, rows: np.ndarray, args, seed: int):
    """(a fresh policy, its IQL learner); the scales are those of the recorded `rows`."""
    s, a = t.obs.shape[1], t.action.shape[1]
    policy = make_policy(
        PolicyOptions(horizon=1, execute=1),
        ObsSpec(state=s, action=a, action_names=data.features.action),
        seed,
    )
    fit_normalisers(policy, data, rows=rows)
    scale = {"max_target": 0.0, "beta": 3.0} if args.task in LOCOMOTION else {"max_target": 1.0}
    policy.train()
    return policy, iql.make(policy, IqlOptions(critics=2, subset=2, **scale), seed)


def filled(t: Transitions, gamma: float) -> Replay:
    """Replay of transitions alone."""
    s, a = t.obs.shape[1], t.action.shape[1]
    replay = Replay({"state": ((s,), np.dtype(np.float32))}, a, 1, gamma, 2 * len(t) + 6 * LANES, LANES)
    fill(replay, t)
    return replay


def learn(t: Transitions, data, rows: np.ndarray, args, seed: int):
    """A policy that IQL learnt from transitions alone."""
    policy, learner = begin(t, data, rows, args, seed)
    replay, rng = filled(t, learner.options.gamma), np.random.default_rng([seed, 83])
    learner.update(lambda n: replay.sample(n, rng), args.updates)
    return policy.eval()


def stretches(data, rows: np.ndarray, args, seed: int, strength: float) -> Guided:
    """Policy-guided diffusion of the stretches within `rows`, whose last episode may be cut."""
    episodes = np.unique(data.episode_index[rows])
    first, end = data.from_[episodes], data.to[episodes]
    end = np.minimum(end, [rows[data.episode_index[rows] == e].max() + 1 for e in episodes])
    over = data.terminated[episodes] & (end == data.to[episodes])
    w = windows_of(data.state, data.action, data.reward, over, first, end, WINDOW)
    return Guided(
        w,
        data.state.shape[1],
        data.action.shape[1],
        GuideOptions(window=WINDOW, strength=strength),
        size_of(args),
        seed,
    )


def learn_guided(few: Transitions, model: Guided, data, rows: np.ndarray, args, seed: int):
    """(a policy that IQL learnt from few transitions and stretches made towards itself at three ages, the
    last of these)."""
    policy, learner = begin(few, data, rows, args, seed)
    real, rng = filled(few, learner.options.gamma), np.random.default_rng([seed, 83])
    part, still = args.updates // (AGES + 1), None
    learner.update(lambda n: real.sample(n, rng), args.updates - AGES * part)

    def mean(states: torch.Tensor) -> torch.Tensor:
        return policy.act({"state": states}, torch.Generator().manual_seed(seed), False).actions.flatten(1)

    for age in range(AGES):
        policy.eval()
        with torch.no_grad():
            made = model.sample(-(-4 * args.few // (WINDOW - 1)), seed * 1_000_003 + age, mean)
            still = model.transitions(made)
        policy.train()
        both = Mixture({"real": (real, 1.0), "made": (filled(still, learner.options.gamma), float(MADE))})
        learner.update(lambda n, both=both: both.sample(n, rng), part)
    return policy.eval(), still


def one(seed: int, args) -> dict:
    """{condition: success (locomotion: return) per start} and the figures of the made transitions."""
    with TemporaryDirectory() as folder:
        episodes, figure = (
            args.episodes or -(-args.many // (100 if args.task in LOCOMOTION else 20)),
            figure_of(args),
        )
        robo_rl.collect(
            Path(folder) / "d",
            task=args.task,
            episodes=episodes,
            policy=args.policy,
            noise=args.noise,
            seed=seed,
            envs=16,
        )
        data = robo_rl.load_dataset(Path(folder) / "d")
        known = known_rows(data, seed)
        if len(known) < args.many:
            raise SystemExit(
                f"{episodes} episodes gave {len(known)} transitions, fewer than {args.many}: give --episodes"
            )
        rows = known[: args.few]
        few, many = transitions_of(data, rows), transitions_of(data, known[: args.many])
        made = Upsampler(few, size_of(args), seed).sample(args.many - args.few, seed)
        found: dict = {"quality": {"made": quality(made, many), "few": quality(few, many)}, figure: {}}
        env = robo_rl.make_env("mujoco", args.task, num_envs=50)
        starts = eval_starts(args.starts, seed)

        def judge(name: str, policy) -> None:
            found[figure][name] = evaluate(env, policy, starts, seed)[figure]
            print(f"  seed {seed}, {name}: {np.mean(found[figure][name]):.3f}", flush=True)

        for name, t, scale in (
            ("few", few, rows),
            ("topped up", joined(few, made), rows),
            ("many", many, known[: args.many]),
        ):
            torch.manual_seed(seed)
            judge(name, learn(t, data, scale, args, seed))
        for name, strength in (("guided", args.strength), ("unguided", 0.0)) if args.guided else ():
            torch.manual_seed(seed)
            model = stretches(data, rows, args, seed, strength)
            policy, still = learn_guided(few, model, data, rows, args, seed)
            found["quality"][name] = quality(still, many)
            judge(name, policy)
        env.close()
        return found


def figure_of(args) -> str:
    """What an episode is worth."""
    return "return" if args.task in LOCOMOTION else "success"


def say(rows: list[dict], args) -> None:
    """Success or return of each condition, pooled over seeds, and the differences to the few."""
    figure = figure_of(args)
    for r in rows:
        print(
            f"seed {r['seed']}: "
            + "; ".join(
                f"{kind}: " + ", ".join(f"{k} {v:.3f}" for k, v in q.items())
                for kind, q in r["quality"].items()
            )
        )
    pooled = {name: [x for r in rows for x in r[figure][name]] for name in rows[0][figure]}
    for name, won in pooled.items():
        if figure == "success":
            i, d = wilson(sum(won), len(won)), paired_difference(won, pooled["few"])
        else:
            i, d = bootstrap_mean(np.array(won)), bootstrap_mean(np.array(won) - np.array(pooled["few"]))
        each = ", ".join(f"{np.mean(r[figure][name]):.3f}" for r in rows)
        print(
            f"{args.task}, {name:<10} {i.value:.3f} [{i.low:.3f}, {i.high:.3f}] ({each})"
            + (f"   less few {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" if name != "few" else "")
        )


def main(given: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--task", default="push_cube")
    p.add_argument("--policy", default="expert,random", help="who recorded, as in robo_rl collect")
    p.add_argument("--noise", type=float, default=0.6)
    p.add_argument("--few", type=int, default=5000)
    p.add_argument("--many", type=int, default=50_000)
    p.add_argument("--episodes", type=int, default=0, help="to record; 0: as many as surely give --many")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--updates", type=int, default=6000, help="of IQL")
    p.add_argument("--upsample", type=int, default=6000, help="updates of SynthER")
    p.add_argument("--hidden", type=int, default=256, help="width of its network (the paper: 1024)")
    p.add_argument("--layers", type=int, default=4, help="hidden layers of it (the paper: 6)")
    p.add_argument("--denoise", type=int, default=32, help="steps of its sampler (the paper: 128)")
    p.add_argument("--guided", action="store_true", help="also policy-guided diffusion")
    p.add_argument("--strength", type=float, default=1.0, help="of its guidance")
    p.add_argument("--starts", type=int, default=200)
    p.add_argument("--keep", type=Path)
    args = p.parse_args(given)
    torch.set_num_threads(1)
    kept = kept_rows(args.keep)
    want = {k: v for k, v in vars(args).items() if k not in ("seeds", "keep")}
    rows = []
    for seed in range(args.seeds):
        found = next((r for r in kept if r["with"] == want and r["seed"] == seed), None)
        if found is None:
            found = one(seed, args) | {"seed": seed, "with": want}
            keep_row(args.keep, found)
        rows.append(found)
    say(rows, args)


if __name__ == "__main__":
    main()
