"""What other projects call a command or an option of `robo_rl train`: said where such a name is typed.

Of LeRobot, HIL-SERL, openpi, CleanRL, Stable-Baselines3, rsl_rl and ManiSkill's baselines;
docs/howto/from_others.md has their commands beside ours.
"""

import re

ENV = "--task of the embedded simulator, or --sim gym:ID, envpool:ID, maniskill"
DEMOS = "--demos FOLDER, a LeRobot data set; --sim none --algo bc learns from it without a simulator"
OUT = "--out FOLDER"
ENVS = "--envs"
STEPS = "--steps, control steps of RL; --bc.updates, updates of supervised learning"
LR = "--rl.lr; --bc.lr of supervised learning"
BATCH = "--bc.batch of supervised learning; --rl.minibatch, or from replay --rl.batch"
INIT = "--init RUN, a run to begin with; --policy FOLDER, a public VLA"
POLICY = "--algo; --policy.kind flow, diffusion or gaussian; --policy pi05 and other VLAs"
LOG = "--wandb PROJECT"
EVERY = "--eval-every N: a checkpoint stands beside each evaluation"
NAMES = {  # their name, "_" for "-", lower case: ours
    "env": ENV,
    "env_id": ENV,
    "env_name": ENV,
    "env_type": ENV,
    "env_task": ENV,
    "task_name": ENV,
    "dataset": DEMOS,
    "data": DEMOS,
    "data_dir": DEMOS,
    "dataset_repo_id": DEMOS,
    "dataset_root": DEMOS,
    "repo_id": DEMOS,
    "demo_path": DEMOS,
    "output_dir": OUT,
    "logdir": OUT,
    "log_dir": OUT,
    "exp_name": OUT,
    "experiment_name": OUT,
    "job_name": OUT,
    "run_name": OUT,
    "num_envs": ENVS,
    "n_envs": ENVS,
    "n_env": ENVS,
    "total_timesteps": STEPS,
    "timesteps": STEPS,
    "max_iterations": STEPS,
    "num_train_steps": STEPS,
    "max_steps_train": STEPS,
    "epochs": STEPS,
    "num_epochs": STEPS,
    "learning_rate": LR,
    "optimizer_lr": LR,
    "batch_size": BATCH,
    "policy_path": INIT,
    "policy_dir": INIT,
    "pretrained": INIT,
    "checkpoint": INIT,
    "checkpoint_path": INIT,
    "load_run": INIT,
    "policy_type": POLICY,
    "algorithm": POLICY,
    "policy_device": "--device cuda",
    "gpu": "--device cuda",
    "cuda": "--device cuda",
    "dtype": "--policy.dtype bf16",
    "track": LOG,
    "wandb_enable": LOG,
    "wandb_project": LOG,
    "wandb_project_name": LOG,
    "logger": LOG,
    "save_freq": EVERY,
    "save_interval": EVERY,
    "eval_freq": EVERY,
    "num_eval_episodes": "--eval-episodes",
    "eval_n_episodes": "--eval-episodes",
    "n_episodes": "--eval-episodes; --demos N of the scripted expert",
    "capture_video": "--video, the default where a simulator draws",
    "headless": "nothing: no window is opened; --no-video films nothing",
    "num_workers": "--workers, processes that collect; --data.threads, threads that decode",
    "chunk_size": "--policy.horizon; --policy.execute, how much of it is executed",
    "n_action_steps": "--policy.execute, of --policy.horizon",
    "action_horizon": "--policy.horizon; --policy.execute, how much of it is executed",
    "obs_mode": "--obs state or rgb",
    "control_mode": "--control",
    "gae_lambda": "--rl.lam",
    "clip_coef": "--rl.clip-low and --rl.clip-high",
    "clip_range": "--rl.clip-low and --rl.clip-high",
    "ent_coef": "--rl.entropy-coef",
    "vf_coef": "--rl.value-coef",
    "desired_kl": "--rl.trust-kl",
    "num_steps": "--rl.decisions, of each env between updates",
    "n_steps": "--rl.decisions, of each env between updates",
    "update_epochs": "--rl.epochs",
    "n_epochs": "--rl.epochs",
    "num_minibatches": "--rl.minibatch, decisions of one minibatch",
    "config_name": "--config FILE.toml, or --algo, --task and --preset",
    "config_path": "--config FILE.toml",
    "discount": "--rl.gamma",
    "utd_ratio": "--rl.utd, critic updates for each chunk that was collected",
    "cta_ratio": "--rl.utd, critic updates for each chunk that was collected",
    "critic_actor_ratio": "--rl.utd, critic updates for each chunk that was collected",
    "temperature_init": "--rl.alpha",
    "num_critics": "--rl.critics",
    "critic_ensemble_size": "--rl.critics",
    "replay_buffer_capacity": "--rl.capacity",
    "online_buffer_capacity": "--rl.capacity",
    "training_starts": "--rl.warmup",
    "online_step_before_learning": "--rl.warmup",
    "reward_classifier": "--rl.judge classifier, from --rl.judge-marks or what a person marks",
    "teleop_type": "--rl.operator gamepad, spacemouse, keyboard, console or leader:NAMESPACE",
}
COMMANDS = {  # their command without lerobot-: ours
    "teleop": "robot teleop",
    "teleoperate": "robot teleop",
    "record": "collect --operator gamepad; of a real arm robo_rl robot teleop",
    "record_demos": "collect --operator spacemouse; of a real arm robo_rl robot teleop",
    "actor": "train --algo hil_serl: actor and learner are one command",
    "learner": "train --algo hil_serl: actor and learner are one command",
    "train_reward_classifier": "train --algo hil_serl --rl.judge classifier",
    "calibrate": "robot check --servos; of cameras robo_rl robot calibrate",
    "replay": "deploy RUN --dry-run; recorded episodes are looked at with robo_rl data view",
    "annotate": "data label",
    "export": "vla convert",
    "play": "eval RUN",
    "evaluate": "eval RUN",
    "find_port": "robot drive",
}


def our_command(typed: str) -> str:
    """What is typed here for a command of another project; "": it is not known."""
    return COMMANDS.get(typed.lower().removeprefix("lerobot-").replace("-", "_"), "")


def ours(command: str, argv: list[str], options: list[str]) -> str:
    """What of `argv` has another name here, as a sentence; "" where nothing of it is known. An option typed
    without its group (--gamma) is told with it; `options`: those of the command."""
    for typed in [word.partition("=")[0] for word in argv if word.startswith("--")]:
        name = re.sub(r"\W", "_", typed[2:].lower())
        grouped = [o for o in options if "." in o and o.rpartition(".")[2].replace("-", "_") == name]
        told = NAMES.get(name) or NAMES.get(typed.rpartition(".")[2].lower().replace("-", "_"), "")
        told = told if command == "train" else ""
        if typed not in options and (told or grouped):
            return f"there is no option {typed}; here it is {told or ' or '.join(grouped)}"
    return ""


def of_other_methods(argv: list[str], options: list[str]) -> str:
    """Which methods have an option --rl.… of `argv` that is not among `options`, as a sentence; "": none."""
    from dataclasses import fields

    from robo_rl.options import RL_OPTIONS

    for typed in [word.partition("=")[0] for word in argv if word.startswith("--rl.")]:
        name = typed.removeprefix("--rl.").replace("-", "_")
        others = [a for a, kind in RL_OPTIONS.items() if name in {f.name for f in fields(kind)}]
        if typed not in options and others:
            return f"this method has no option {typed}; --algo {', '.join(others)} have it"
    return ""
