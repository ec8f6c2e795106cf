"""Defaults per simulator, task, method and preset; the command line overrides any of them."""

from dataclasses import asdict, replace
from pathlib import Path

from robo_rl.errors import UserError, choose
from robo_rl.experiment.config import EXPLORATION, TrainConfig, method_options
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.options import DppoOptions, NftOptions, OffPolicyOptions, PolicyOptions, PpoOptions
from robo_rl.plugins import is_object

PRESETS = ("quick", "full", "paper")
# Manipulation from a weak supervised policy, sparse reward, chunks of 8: rollouts of one or two episodes.
CHUNKS = {"decisions": 16, "minibatch": 1024, "lr": 3e-4}
LOCOMOTION = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5")
HEADS = {"ppo": {"kind": "gaussian", "init_std": 0.3},
         "reinflow": {"noise": "learned", "noise_steps": "all", "noise_min": 0.10, "noise_max": 0.24},
         "dppo": {"kind": "diffusion", "denoise_steps": 10, "logp_reduction": "mean"}}  # what a method can train
# The ratio of a whole chain tells two policies apart by the sum of all its steps and entries: few steps along the gradient
# of a whole rollout (dppo: of half of one), grown into, and stopped by KL. As many steps on a quarter move as far in noise.
WHOLE = {"reinflow": {"lr": 2e-4, "epochs": 4, "target_kl": 0.3, "ramp": 6},
         "dppo": {"lr": 5e-4, "epochs": 5, "minibatch": 1024, "target_kl": 3e-4, "ramp": 12, "clip_base": 0.01,
                  "clip_coef": 0.1}}  # KL: of a mean
# Exploration around the chain that is evaluated. With DDPM's own noise the frozen early steps decide most of what a chunk becomes,
# which the last steps cannot mend: one supervised policy has 0.48 success so, 0.81 by the means.
AROUND = {"reinflow": {}, "dppo": {"std_scale": 0.0, "std_floor": 0.2}}
WHOLE_STEPS = {"reinflow": 600_000, "dppo": 500_000}
# Replay: chunks of 4, small networks and many updates on every step learn most in a minute of one core.
SMALL = {"horizon": 4, "execute": 4, "hidden": 128, "layers": 2}
JUDGE = {"critics": 2, "critic_hidden": 128}
SQUASHED = SMALL | {"kind": "squashed", "init_std": 0.1}
TAUGHT = SQUASHED | JUDGE | {"teacher": True}
GUIDED = SMALL | {"kind": "guided", "denoise_steps": 2, "candidates": 2} | JUDGE
REPLAY_HEADS = {"rlpd": TAUGHT, "hil_serl": TAUGHT, "calql": SQUASHED, "wsrl": SQUASHED,
                "expo": GUIDED | {"edit_scale": 0.3, "init_std": 0.3}, "pa_rl": GUIDED | {"candidates": 4, "local_steps": 3},
                "iql": SMALL, "aloe": SMALL}
# From few demonstrations young critics mislead what goes far: samples near the demonstrated mean, small edits, sharp choices
# (values lie in [0, 1]), and a flow that imitates its successes quickly; one update per chunk, for steps are cheaper.
GENTLE = {"expo": {"spread": 0.5, "edit_scale": 0.05}, "pa_rl": {"spread": 0.5, "keep": 2, "local_steps": 1, "softness": 0.02}}
BRISK = {"utd": 1.0, "batch": 128, "tau": 0.02, "actor_every": 4, "warmup": 4000, "lr": 1e-3}
IMITATES = {"expo": BRISK | {"alpha": 0.001, "slow": 0.01}, "pa_rl": BRISK}


# What the papers and their public code use, on our tasks. ReinFlow (arXiv 2505.22094): the learning rates without their
# cosine, clips for a log-prob that is a mean over entries. DPPO (arXiv 2409.00588), robomimic; its minibatch counts pairs
# of a decision and one of 10 denoise steps.
PAPERS = {
    "reinflow": {
        "policy": {"noise": "learned", "noise_steps": "all", "noise_min": 0.10, "noise_max": 0.24, "denoise_steps": 4,
                   "horizon": 4, "execute": 4, "logp_reduction": "mean"},
        "rl": {"entropy_coef": 0.03, "clip_low": 0.01, "clip_high": 0.01, "lr": 4.5e-5, "critic_lr": 6.5e-4, "gamma": 0.99, "lam": 0.95,
               "decisions": 500, "minibatch": 50_000, "epochs": 5, "target_kl": 1.0, "dual_clip": 0.0,
               "noise_hold": 0.35, "noise_end": 0.7},
        "run": {"envs": 40}},
    "dppo": {
        "policy": {"kind": "diffusion", "train_steps": 20, "denoise_steps": 20, "finetune_steps": 10,
                   "std_floor": 0.1, "horizon": 4, "execute": 4, "logp_reduction": "mean"},
        "rl": {"gamma_denoise": 0.99, "clip_base": 0.001, "clip_coef": 0.01, "lr": 1e-4, "critic_lr": 1e-3, "gamma": 0.999, "lam": 0.95,
               "decisions": 300, "minibatch": 750, "epochs": 10, "target_kl": 1.0, "dual_clip": 0.0,
               "scale_reward": True, "critic_warmup": 2},
        "run": {"envs": 50}},
}


def recipe(sim: str, task: str, algo: str, obs: str, name: str, reward: str = "", init: str = "") -> TrainConfig:
    """`preset`, or with `init`, a run or checkpoint folder, the one for a run that begins with its policy."""
    base = preset(sim, task, algo, obs, name, reward)
    return begun(base, Path(init)) if init else base


def preset(sim: str, task: str, algo: str, obs: str, name: str, reward: str = "") -> TrainConfig:
    """The defaults `robo_rl train` starts from for this combination; `reward`: "" (the task's own), sparse or dense."""
    t = simulated(sim, task, algo, obs, name, reward == "dense" or sim == "maniskill" and task.startswith("MS-"))
    kind = sim.split(":")[0]
    if kind not in ROBOTS:
        return t
    t = replace(t, envs=1 if kind == "dds" else 8, eval_episodes=100, steps=10_000, eval_every=5000)
    if isinstance(t.rl, OffPolicyOptions):  # an arm does not wait for updates
        return replace(t, workers=1, rl=replace(t.rl, warmup=2000))
    return replace(t, workers=0, rl=replace(t.rl, decisions=64, **{} if is_object(algo) else {"minibatch": 64}))


def simulated(sim: str, task: str, algo: str, obs: str, name: str, dense: bool = False) -> TrainConfig:
    """The same where time is a computer's; `dense`: returns lie in no known range."""
    choose("preset", name, PRESETS)
    quick, rl = name == "quick", method_options(algo)
    if is_object(algo) and name != "paper":  # what one of ours of its kind starts from, with options of its own
        if issubclass(rl, OffPolicyOptions):
            return replace(simulated(sim, task, "iql", obs, name, dense), algo=algo, rl=rl())
        return replace(simulated(sim, task, "pi_rl", obs, name, dense), algo=algo, rl=rl(), max_staleness=0)
    t = TrainConfig(sim=sim, task=task, algo=algo, obs=obs, preset=name, rl=rl())
    if name == "paper":
        return paper(t)
    if issubclass(rl, OffPolicyOptions):
        return replay(t, quick, dense)
    if scratch(sim, task):
        return locomotion(t)
    t = replace(t, rl=rl(**CHUNKS, anneal_lr=True), demos="20", steps=2_000_000, eval_every=100_000)
    if quick:
        t = replace(t, steps=400_000, eval_episodes=100, eval_every=100_000)
    if sim == "maniskill":  # 20 steps a second: shorter chunks; a step costs twenty of ours, an update little
        t = replace(t, envs=64, eval_envs=50, demos="100" if quick else "160", max_staleness=0,
                    steps=160_000 if quick else 700_000,
                    eval_every=40_000 if quick else 100_000, eval_episodes=100 if quick else 200,
                    bc=replace(t.bc, updates=2000 if quick else 5000), policy=PolicyOptions(horizon=4, execute=4),
                    rl=rl(**CHUNKS | {"decisions": 13, "minibatch": 208, "epochs": 10, "lr": 4e-5, "critic_warmup": 5, "gamma": 0.98},
                          anneal_lr=True))
    if obs == "rgb":  # an image costs as much as twenty control steps
        t = replace(t, envs=64, demos="100" if quick else "300", steps=80_000 if quick else 400_000,
                    eval_envs=64, eval_every=40_000 if quick else 100_000,
                    bc=replace(t.bc, updates=2500 if quick else 8000, batch=16, noises=16),
                    rl=rl(**CHUNKS | {"minibatch": 256, "epochs": 4, "lr": 4e-5, "critic_warmup": 3, "freeze_trunk": True},
                          anneal_lr=True))
    t = replace(t, policy=replace(t.policy, **HEADS.get(algo, {})))
    if algo in WHOLE and obs != "rgb" and sim != "maniskill":
        return replace(t, envs=128, max_staleness=0, steps=200_000 if quick else WHOLE_STEPS[algo], eval_every=50_000,
                       policy=replace(t.policy, **AROUND[algo]),
                       rl=rl(**CHUNKS | {"minibatch": 2048, "anneal_lr": True} | WHOLE[algo]))
    if algo == "dppo":
        clips = {"clip_base": 0.01, "clip_coef": 0.1}
        t = replace(t, rl=replace(t.rl, **clips) if obs == "rgb" else DppoOptions(**CHUNKS | clips | {"lr": 1e-3}))
    if algo == "nft" and obs != "rgb":
        t = replace(t, rl=NftOptions(**CHUNKS | {"lr": 2e-4, "epochs": 2}))
    return t


def scratch(sim: str, task: str) -> bool:
    """Whether policies learn from nothing there: locomotion, and simulators that are taken as they are."""
    return task in LOCOMOTION or sim.startswith(("gym:", "envpool:")) or is_object(sim)


def own_reward(sim: str) -> str:
    """Which reward a policy that learns from nothing learns from: the dense one, or what the user's own simulator pays."""
    return "" if is_object(sim) else "dense"


def paper(t: TrainConfig) -> TrainConfig:
    """A method's numbers as its paper has them, whatever the task."""
    if t.algo not in PAPERS:
        raise UserError(f"--preset paper is there for {' and '.join(sorted(PAPERS))}, got --algo {t.algo}; use quick or full")
    p = PAPERS[t.algo]
    return replace(t, **p["run"], steps=2_000_000, policy=PolicyOptions(**p["policy"]), rl=type(t.rl)(**p["rl"]))


def replay(t: TrainConfig, quick: bool, dense: bool = False) -> TrainConfig:
    """Methods that learn from replay: few envs, many updates per step."""
    if t.algo == "wsrl":
        t = replace(t, rl=replace(t.rl, demo_share=0.0, warmup=5000))
    head = PolicyOptions(**REPLAY_HEADS[t.algo])
    own = scratch(t.sim, t.task)
    if t.algo == "iql" and (own or dense):  # returns that are not in [0, 1]
        t = replace(t, rl=replace(t.rl, beta=3.0))
    if own:  # from scratch, on the task's dense reward
        wide = {"critics": 2, "critic_hidden": 256}
        return replace(t, demos="0", envs=8, steps=300_000, reward=own_reward(t.sim), eval_episodes=20, eval_every=50_000,
                       policy=replace(head, horizon=1, execute=1, hidden=256, teacher=False, **wide),
                       rl=replace(t.rl, pretrain=0, **wide))
    few = dict(**JUDGE, utd=4.0, gamma=0.98, warmup=5000, max_target=0.0 if dense else 1.0, floor=t.algo != "aloe")
    if t.algo in ("rlpd", "hil_serl", "expo", "pa_rl"):  # the others have an offline stage of their own
        few["pretrain"] = 1000
    if t.algo in ("rlpd", "hil_serl"):  # freer, and the actor leaves what the critics know; all that succeeded holds it
        few |= {"bc_coef": 20.0, "imitate": "success", "ramp": 1000, "tau": 0.02}
    head, few = replace(head, **GENTLE.get(t.algo, {})), few | IMITATES.get(t.algo, {})
    if t.obs == "rgb":  # the trunk is supervised alone
        t = replace(t, demos="50", bc=replace(t.bc, updates=1500 if quick else 4000, batch=16, noises=16))
    return replace(t, envs=16, steps=30_000 if quick else 80_000, eval_episodes=100 if quick else 200,
                   eval_every=5_000 if quick else 10_000, policy=head,
                   eval_envs=50 if t.sim == "maniskill" else 64 if t.obs == "rgb" else 0,
                   rl=replace(t.rl, **few))


def locomotion(t: TrainConfig) -> TrainConfig:
    """From scratch, on the task's dense reward."""
    t = replace(t, demos="0", envs=64, steps=1_000_000, reward=own_reward(t.sim), eval_episodes=20, eval_every=200_000)
    if t.algo == "ppo":
        head = PolicyOptions(kind="gaussian", activation="tanh", layers=2, horizon=1, execute=1)
        return replace(t, policy=head, torch_threads=2, workers=0, rl=PpoOptions(  # on-policy, as its peers are
            decisions=32, minibatch=512, epochs=5, lr=1e-3, critic_lr=1e-3, dual_clip=0.0, critic_warmup=0,
            whiten="minibatch", normalise_obs=True, scale_reward=True, anneal_lr=True, max_grad_norm=0.5))
    return replace(t, envs=40, policy=replace(t.policy, horizon=4, execute=4, **HEADS.get(t.algo, {})),
                   rl=replace(t.rl, decisions=32, minibatch=1280, normalise_obs=True, scale_reward=True,
                              critic_warmup=0))


def begun(base: TrainConfig, init: Path) -> TrainConfig:
    """The preset for a run that begins with the policy of `init`: its networks, the method's exploration, nothing supervised."""
    from robo_rl.experiment.folder import pick_checkpoint
    folder = pick_checkpoint(init, "best")[1]
    from robo_rl import checkpoint
    had = checkpoint.read_meta(folder)["policy"]["options"]
    base = replace(base, policy=PolicyOptions(**had | {k: v for k, v in asdict(base.policy).items() if k in EXPLORATION}))
    if base.algo == "bc":
        return base
    return replace(base, bc=replace(base.bc, updates=0), demos=base.demos if isinstance(base.rl, OffPolicyOptions) else "0")
