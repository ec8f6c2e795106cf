"""The rows of the recipes: where each holds, why, and its settings. How they are read: `recipes`."""

# success within the time limit is the task, not the speed of each success
LIMIT = {"timeout": "anneal", "anneal_gamma": True}
# as much noise as the policy bears; the critic first
EXPLORED = {"explore": 0.3, "average": 0.05, **LIMIT, "critic_ready": 0.3, "critic_warmup": 6}
BOUNDED = {**EXPLORED, "trust_kl": 0.004, "lr": 1e-4}  # and updates that follow their KL
# of which no later denoise step takes any away
LAST_NOISE = {"noise": "learned", "noise_steps": "last", "noise_min": 0.2, "noise_max": 0.3}
# batches and steps of PPO's own programs, larger and faster
STEPS = {"minibatch": 512, "lr": 1e-3, "anneal_lr": True, "max_grad_norm": 0.5}
FROM_NOTHING = {
    "envs": 64,
    "torch_threads": 2,
    "workers": 0,
    "policy": {"activation": "tanh", "layers": 2, "horizon": 1, "execute": 1},
    "rl": {**STEPS, "dual_clip": 0.0, "whiten": "minibatch"},
}
# a chain from nothing: what explores is scored, and a small network says how much it is
WIDE = {"predict": "action", "noise_min": 0.1, "noise_max": 0.8}
TABLE: tuple[tuple[str, str, dict[str, object]], ...] = (  # where, why, settings
    # ---- methods, wherever they learn
    (
        "reinflow",
        "the paper's noise; it explores with learned noise at every flow step",
        {"policy": {"noise": "learned", "noise_steps": "all", "noise_min": 0.10, "noise_max": 0.24}},
    ),
    (
        "dppo",
        "half of the paper's 20 denoise steps, for speed; its mean log-prob",
        {"policy": {"kind": "diffusion", "denoise_steps": 10, "logp_reduction": "mean"}},
    ),
    # ---- on-policy from a weak supervised policy, sparse reward, chunks of 8
    (
        "manipulation on_policy",
        "a rollout of 16 decisions holds one or two episodes",
        {
            "demos": "20",
            "eval_every": 100_000,
            "rl": {"decisions": 16, "minibatch": 1024, "lr": 3e-4, "anneal_lr": True},
        },
    ),
    ("manipulation on_policy full", "to the numbers of the README", {"steps": 2_000_000}),
    ("manipulation on_policy quick", "minutes", {"steps": 400_000, "eval_episodes": 100}),
    (
        "fast on_policy state",
        "an expert that is a function costs nothing beside RL: as many demonstrations as supervision needs; "
        "of those that are given as many updates; while that is not enough, the policy's own successes; "
        "residual layers learn more from few demonstrations, of tanh or of ReLU as held-out ones tell",
        {
            "demos_most": 540,
            "bc": {"most": 16_200, "compare": True, "own": 256},
            "policy": {"residual": True, "activation": "tanh"},
        },
    ),
    (
        "fast bc state",
        "a network that predicts the chunk need not learn to copy noise; half of a chunk is executed, then "
        "the policy looks again",
        {"policy": {"execute": 4, "predict": "action"}},
    ),
    (
        "data",
        "a picture costs as much as many updates of the head; long chunks, as a person's demonstrations "
        "pause",
        {
            "bc": {"updates": 4000, "batch": 32, "noises": 8},
            "policy": {"horizon": 16, "execute": 8, "predict": "action", "keypoints": "white"},
            "image_size": 96,
        },
    ),
    (
        "manipulation ppo",
        "narrow exploration: the supervised policy must still succeed at times",
        {"policy": {"kind": "gaussian", "init_std": 0.3}},
    ),
    (
        "manipulation dppo",
        "ten times the paper's clips: fewer, larger steps",
        {"rl": {"clip_base": 0.01, "clip_coef": 0.1}},
    ),
    (
        "maniskill on_policy",
        "20 control steps a second: shorter chunks",
        {"envs": 64, "eval_envs": 50, "max_staleness": 0, "policy": {"horizon": 4, "execute": 4}},
    ),
    (
        "maniskill on_policy full",
        "a step costs twenty of the embedded simulator's",
        {
            "demos": "160",
            "steps": 700_000,
            "eval_every": 100_000,
            "eval_episodes": 200,
            "bc": {"updates": 5000},
        },
    ),
    (
        "maniskill on_policy quick",
        "a step costs twenty of the embedded simulator's",
        {
            "demos": "100",
            "steps": 160_000,
            "eval_every": 40_000,
            "eval_episodes": 100,
            "bc": {"updates": 2000},
        },
    ),
    (
        "maniskill on_policy state",
        "an update costs little beside the steps: many small ones, after the critic alone",
        {
            "rl": {
                "decisions": 13,
                "minibatch": 208,
                "epochs": 10,
                "lr": 4e-5,
                "critic_warmup": 5,
                "gamma": 0.98,
            }
        },
    ),
    (
        "maniskill dppo state",
        "the larger clips of the row above carry a larger rate; not tuned for ManiSkill",
        {
            "rl": {
                "decisions": 16,
                "minibatch": 1024,
                "epochs": 5,
                "lr": 1e-3,
                "critic_warmup": 2,
                "gamma": 0.99,
                "anneal_lr": False,
            }
        },
    ),
    ("manipulation nft", "no ratio says how far a step went: a constant rate", {"rl": {"anneal_lr": False}}),
    (
        "manipulation nft state",
        "fewer passes at a lower rate; the same on ManiSkill",
        {
            "rl": {
                "decisions": 16,
                "minibatch": 1024,
                "epochs": 2,
                "lr": 2e-4,
                "critic_warmup": 2,
                "gamma": 0.99,
            }
        },
    ),
    (
        "manipulation on_policy rgb",
        "an image costs as much as twenty control steps; RL moves the action head alone (pi_RL); a network "
        "that predicts the chunk need not learn to copy noise; key points that point at something from the "
        "start",
        {
            "envs": 64,
            "eval_envs": 64,
            "policy": {"predict": "action", "keypoints": "white"},
            "bc": {"batch": 16, "noises": 16},
            "rl": {
                "decisions": 16,
                "minibatch": 256,
                "epochs": 4,
                "lr": 4e-5,
                "critic_warmup": 3,
                "gamma": 0.99,
                "freeze_trunk": True,
            },
        },
    ),
    (
        "manipulation on_policy rgb full",
        "an image costs as much as twenty control steps",
        {"demos": "300", "steps": 400_000, "eval_every": 100_000, "bc": {"updates": 8000}},
    ),
    (
        "manipulation on_policy rgb quick",
        "an image costs as much as twenty control steps",
        {"demos": "100", "steps": 80_000, "eval_every": 40_000, "bc": {"updates": 2500}},
    ),
    (
        "fast on_policy rgb",
        "what tells one scene from another is in its first picture: few frames of many demonstrations, which "
        "are played again and drawn where supervision begins; how precisely to act takes the head many more "
        "frames than it takes the trunk to see, and what it then fits to a hair it knows only where the "
        "expert goes, so the expert shows how to go on from where it leads; while that is not enough, the "
        "policy's own successes",
        {"data": {"every": 16, "cache_mb": 1024}, "bc": {"head": 8000, "head_every": 4, "own": 256}},
    ),
    (
        "fast on_policy rgb full",
        "a third of the time is supervision's",
        {"demos": "3000", "demos_most": 6000, "bc": {"updates": 6000}},
    ),
    (
        "fast on_policy rgb quick",
        "minutes",
        {"demos": "1000", "demos_most": 2250, "steps": 200_000, "eval_every": 50_000},
    ),
    (
        "fast on_policy rgb undivided",
        "its head learns from observations alone, or its trunk gives too much to keep of every frame",
        {"demos_most": 0, "bc": {"head": 0, "head_every": 0, "own": 0}},
    ),
    ("fast on_policy rgb vla quick", "a step costs more", {"steps": 80_000, "eval_every": 40_000}),
    (
        "fast on_policy rgb fresh",
        "weights that know nothing and are few bear larger steps; draws of noise cost as much as the trunk "
        "here; they learn to see from scenes that differ, not from many pictures of one, and what "
        "instructions mean before anything else",
        {"bc": {"lr": 3e-3, "batch": 32, "noises": 4, "ground": 4000}},
    ),
    (
        "fast on_policy rgb fresh full",
        "a third of the time is supervision's",
        {"demos": "8000", "bc": {"updates": 3000}},
    ),
    ("fast on_policy rgb fresh quick", "minutes", {"bc": {"ground": 1000}}),
    (
        "public",
        "what a model has learnt from millions of pictures is soon lost at larger learning rates: that of "
        "LeRobot for SmolVLA and X-VLA",
        {"bc": {"lr": 1e-4}},
    ),
    ("public pi", "the rate of openpi and LeRobot for pi0 and pi0.5", {"bc": {"lr": 2.5e-5}}),
    (
        "fast pi_rl",
        "as much noise as the policy bears, of which no later denoise step takes any away; the update "
        "follows the KL that it makes, not a learning rate that fits one task; the critic first",
        {"policy": {**LAST_NOISE}, "rl": {**BOUNDED}},
    ),
    (
        "fast pi_rl rgb vla",
        "a prefix is encoded once, when it is acted on",
        {"policy": {"keep_prefix": True}},
    ),
    # One learning rate fits one task: on push_cube 3e-4 left KL 3 and half of the success after an update, on
    # pick_cube it learnt. Eight steps without a look push the cube past its mark: 0.82 to 0.87 after a
    # million steps, with four 0.93 after a third of one. What an early denoise step adds the later ones take
    # away: pick_cube has 0.93 after 94 k steps with one of four drawn, 0.97 so.
    (
        "fast pi_rl state",
        "a network that predicts the chunk need not first learn to copy noise, and denoises away what is "
        "added before its last step; half of a chunk is executed, then the policy looks again; small "
        "rollouts, for what an update may move is bounded",
        {"envs": 128, "policy": {"execute": 4, "predict": "action"}, "rl": {"replay": 0.5}},
    ),
    (
        "maniskill pi_rl state",
        "as in the embedded simulator: a network that predicts the chunk, as much noise as it bears, updates "
        "that follow their KL; more demonstrations, and its own successes, while supervision is weak",
        {
            "demos_most": 480,
            "bc": {"own": 256},
            "policy": {"predict": "action", **LAST_NOISE},
            "rl": {"decisions": 16, "minibatch": 1024, "epochs": 5, **BOUNDED},
        },
    ),
    (
        "several fast on_policy state",
        "one network learns what several did: as many demonstrations of each as tell their starts apart, and "
        "the updates that they take",
        {"demos": "100", "demos_most": 300, "bc": {"updates": 6000}},
    ),
    (
        "fast ppo state",
        "as pi_rl: noise that the policy bears, steps that follow their KL, the critic first, half of a "
        "chunk",
        {"envs": 128, "policy": {"execute": 4}, "rl": {**BOUNDED, "replay": 0.5}},
    ),
    (
        "fast reinflow state",
        "as pi_rl: chunks predicted, half of one executed, noise that the policy bears, steps that follow "
        "their KL, the critic first",
        {
            "envs": 128,
            "max_staleness": 0,
            "eval_every": 50_000,
            "policy": {"execute": 4, "predict": "action"},
            "rl": {**BOUNDED, "replay": 0.5},
        },
    ),
    # A flow that imitates one expert does one thing: without noise push_cube comes from 0.69 to 0.73, with it
    # to 0.83 (one seed). Where both weights are 1, what pushes away from bad chunks outgrows what holds, and
    # drift runs off after a hundred rollouts (PointReach of the tests); at half of it noise is imitated.
    (
        "fast nft state",
        "as pi_rl: chunks predicted, half of one executed, noise that the policy bears, the critic first; "
        "larger steps, and bad chunks weigh a little less than good ones",
        {
            "envs": 128,
            "policy": {"execute": 4, "predict": "action", **LAST_NOISE},
            "rl": {**EXPLORED, "epochs": 4, "lr": 4e-4, "adv_max": 2.0, "negative_weight": 0.9},
        },
    ),
    ("fast reinflow state full", "an upper bound: --target ends a run earlier", {"steps": 600_000}),
    ("fast reinflow state quick", "minutes", {"steps": 200_000}),
    # Where chunks are predicted, noise of the early steps is denoised away, and blurs the ratio: with ten
    # steps that learn push_cube stays where supervision left it, with the last alone it is learnt.
    (
        "fast dppo state",
        "as pi_rl; the last step alone learns, for it predicts the whole chunk, and its noise is all that is "
        "explored with",
        {
            "envs": 128,
            "max_staleness": 0,
            "eval_every": 50_000,
            "policy": {
                "execute": 4,
                "predict": "action",
                "finetune_steps": 1,
                "std_scale": 0.0,
                "std_floor": 0.35,
                "logp_reduction": "sum",
            },
            "rl": {**BOUNDED, "replay": 0.5},
        },
    ),
    ("fast dppo state full", "an upper bound: --target ends a run earlier", {"steps": 500_000}),
    ("fast dppo state quick", "minutes", {"steps": 200_000}),
    (
        "manipulation on_policy dense",
        "what a dense reward pays goes on beyond the time limit",
        {"rl": {"timeout": "bootstrap", "anneal_gamma": False}},
    ),
    (
        "taken",
        "an env that is taken as it is pays success alone, as its data set does, and ends with it",
        {"reward": "sparse"},
    ),
    (
        "taken on_policy",
        "each env holds a model of its own, which takes a tenth of a second and up to 20 MB: few, in "
        "evaluations too",
        {"envs": 64, "eval_envs": 50, "eval_episodes": 100},
    ),
    (
        "taken on_policy ours",
        "the return of a sparse reward lies in [0, 1]: a critic that is asked beyond what it learnt, where "
        "short episodes are cut, must not promise more than success",
        {"rl": {"max_return": 1.0}},
    ),
    ("taken on_policy ours dense", "returns lie in no known range", {"rl": {"max_return": 0.0}}),
    ("taken own_sim", "what the simulator itself pays", {"reward": ""}),
    # ---- on-policy from scratch
    (
        "scratch on_policy",
        "dense reward, running statistics of observations and rewards; no critic to warm up",
        {
            "demos": "0",
            "envs": 40,
            "steps": 1_000_000,
            "reward": "dense",
            "eval_episodes": 20,
            "eval_every": 200_000,
            "policy": {"horizon": 4, "execute": 4},
            "rl": {
                "decisions": 32,
                "minibatch": 1280,
                "normalise_obs": True,
                "scale_reward": True,
                "critic_warmup": 0,
            },
        },
    ),
    (
        "scratch on_policy rgb",
        "key points that point at something from the start",
        {"policy": {"keypoints": "white"}},
    ),
    (
        "scratch ppo",
        "advantages and gradients scaled as CleanRL and Stable-Baselines3 do, in one process as they are; "
        "larger batches, a larger rate",
        {**FROM_NOTHING, "policy": {"kind": "gaussian", **FROM_NOTHING["policy"]}},
    ),
    (
        "scratch pi_rl small",
        "as ppo: a network that predicts the action has no noise to take away, and all that explores is "
        "scored; of a chunk from velocities most is noise that the likelihood does not know",
        {**FROM_NOTHING, "policy": {**FROM_NOTHING["policy"], **LAST_NOISE, **WIDE}},
    ),
    (
        "scratch reinflow small",
        "as pi_rl, with noise at every step",
        {**FROM_NOTHING, "policy": {**FROM_NOTHING["policy"], **WIDE}},
    ),
    (
        "scratch dppo small",
        "as pi_rl: the network predicts the action, and the noise of the last step is all that explores and "
        "all that learns",
        {
            **FROM_NOTHING,
            "policy": {
                **FROM_NOTHING["policy"],
                "predict": "action",
                "finetune_steps": 1,
                "std_scale": 0.0,
                "std_floor": 0.35,
                "logp_reduction": "sum",
            },
            "rl": {**FROM_NOTHING["rl"], "clip_base": 0.2, "clip_coef": 0.2},
        },
    ),
    (
        "scratch nft small",
        "as pi_rl, with noise of 0.35, for no likelihood teaches how much; its advantages have a std of 1 as "
        "they are",
        {
            **FROM_NOTHING,
            "policy": {**FROM_NOTHING["policy"], **LAST_NOISE, **WIDE, "noise_min": 0.3, "noise_max": 0.4},
            "rl": STEPS,
        },
    ),
    # ---- replay: policies
    (
        "replay",
        "small networks and many updates on every step learn most in a minute of one core; chunks of 4",
        {"policy": {"horizon": 4, "execute": 4, "hidden": 128, "layers": 2}},
    ),
    (
        "sac",
        "SAC's actor, narrow at first",
        {"policy": {"kind": "squashed", "actor": "squashed", "init_std": 0.1}},
    ),
    (
        "teacher",
        "the supervised actor stays beside the learning one, and two small critics choose (IBRL)",
        {"policy": {"teacher": True, "critics": 2, "critic_hidden": 128}},
    ),
    (
        "guided",
        "a flow in two steps, judged by two small critics: cheap decisions",
        {
            "policy": {
                "kind": "guided",
                "actor": "guided",
                "denoise_steps": 2,
                "critics": 2,
                "critic_hidden": 128,
            }
        },
    ),
    (
        "expo",
        "two candidates, not eight: cheap decisions; edits reach far",
        {"policy": {"candidates": 2, "edit_scale": 0.3, "init_std": 0.3}},
    ),
    (
        "pa_rl",
        "four candidates, all of which climb three steps: cheap decisions",
        {"policy": {"candidates": 4, "local_steps": 3}},
    ),
    (
        "dsrl",
        "the flow as pi_rl has it; noise as wide as it was taught with at first, chosen by a small network",
        {"policy": {"kind": "steered", "actor": "steered", "init_std": 1.0, "critic_hidden": 128}},
    ),
    (
        "demo_flow",
        "the flow as pi_rl has it, whose one sample acts; two small critics",
        {
            "policy": {
                "kind": "guided",
                "actor": "guided",
                "candidates": 1,
                "critics": 2,
                "critic_hidden": 128,
            }
        },
    ),
    ("dsrl vla", "one row of noise for a chunk, as DSRL steers pi0", {"policy": {"steer_row": True}}),
    (
        "wsrl",
        "the paper: no offline data after the offline stage, and a warm-up of 5,000 steps",
        {"rl": {"demo_share": 0.0, "warmup": 5000}},
    ),
    ("iql dense", "the paper's range, for returns that are not in [0, 1]", {"rl": {"beta": 3.0}}),
    # ---- replay from demonstrations, sparse reward
    (
        "manipulation replay",
        "few envs, many updates per step; two small critics; targets clamped to the returns of a sparse "
        "reward, and no lower than what did follow",
        {
            "envs": 16,
            "rl": {
                "critics": 2,
                "critic_hidden": 128,
                "utd": 4.0,
                "gamma": 0.98,
                "warmup": 5000,
                "max_target": 1.0,
                "floor": True,
            },
        },
    ),
    (
        "manipulation replay full",
        "to the numbers of the README",
        {"steps": 80_000, "eval_episodes": 200, "eval_every": 10_000},
    ),
    ("manipulation replay quick", "minutes", {"steps": 30_000, "eval_episodes": 100, "eval_every": 5_000}),
    ("manipulation replay dense", "returns lie in no known range", {"rl": {"max_target": 0.0}}),
    (
        "manipulation aloe",
        "its critic evaluates the present policy: what did follow is no floor of that",
        {"rl": {"floor": False}},
    ),
    # The critics of teacher and guided learn before the actor moves; the others have an offline stage of
    # their own.
    (
        "manipulation teacher",
        "critics first, then the actor, slowly; freer than its demonstrations, and all that succeeded holds "
        "it",
        {"rl": {"pretrain": 1000, "bc_coef": 20.0, "imitate": "success", "ramp": 1000, "tau": 0.02}},
    ),
    (
        "manipulation guided",
        "critics first; a flow that imitates its successes quickly; one update per chunk, for steps are "
        "cheaper",
        {
            "rl": {
                "pretrain": 1000,
                "utd": 1.0,
                "batch": 128,
                "tau": 0.02,
                "actor_every": 4,
                "warmup": 4000,
                "lr": 1e-3,
            }
        },
    ),
    (
        "manipulation dsrl",
        "critics first; the slope of the critic through the flow, which teaches sooner than a second critic; "
        "the average of what chooses the noise",
        {"rl": {"pretrain": 1000, "tau": 0.02, "slope": "flow", "average": 0.005}},
    ),
    (
        "manipulation demo_flow",
        "critics of more updates before they are heard; mostly imitation, for sparse rewards tell little",
        {
            "policy": {"explore_std": 0.02},
            "rl": {"pretrain": 4000, "tau": 0.02, "eta": 0.02, "average": 0.005},
        },
    ),
    (
        "manipulation expo",
        "from few demonstrations young critics mislead what goes far: samples near the demonstrated mean, "
        "small edits",
        {"policy": {"spread": 0.5, "edit_scale": 0.05}, "rl": {"alpha": 0.001, "slow": 0.01}},
    ),
    (
        "manipulation pa_rl",
        "from few demonstrations young critics mislead what goes far: samples near the demonstrated mean, "
        "one step; sharp choices, for values lie in [0, 1]",
        {"policy": {"spread": 0.5, "keep": 2, "local_steps": 1, "softness": 0.02}},
    ),
    (
        "fast supervised state",
        "as on-policy: residual layers of its size, and as many updates on the demonstrations as teach it",
        {
            "bc": {"most": 16_200, "compare": True},
            "policy": {"residual": True, "activation": "tanh", "hidden": 256, "layers": 3},
        },
    ),
    (
        "fast around state",
        "as on-policy: a network that predicts the chunk",
        {"policy": {"predict": "action"}},
    ),
    (
        "fast teacher state",
        "held by what succeeded, so that young critics do not undo a precise actor, and little noise, which "
        "would cost it its successes; critics of more updates before they are heard; the average of the "
        "actor, which follows every turn of their slopes",
        {"rl": {"bc_coef": 200.0, "target_entropy": 3.0, "pretrain": 4000, "average": 0.005}},
    ),
    (
        "manipulation replay rgb",
        "the trunk is supervised alone",
        {"demos": "50", "eval_envs": 64, "policy": {"keypoints": "white"}, "bc": {"batch": 16, "noises": 16}},
    ),
    ("manipulation replay rgb full", "the trunk is supervised alone", {"bc": {"updates": 4000}}),
    ("manipulation replay rgb quick", "the trunk is supervised alone", {"bc": {"updates": 1500}}),
    ("maniskill replay", "one process per env: as many as the evaluation on-policy has", {"eval_envs": 50}),
    # ---- replay from scratch
    (
        "scratch replay",
        "dense reward, one action per decision, wider networks, no teacher",
        {
            "demos": "0",
            "envs": 8,
            "steps": 300_000,
            "reward": "dense",
            "eval_episodes": 20,
            "eval_every": 50_000,
            "policy": {
                "horizon": 1,
                "execute": 1,
                "hidden": 256,
                "teacher": False,
                "critics": 2,
                "critic_hidden": 256,
            },
            "rl": {"pretrain": 0, "critics": 2, "critic_hidden": 256},
        },
    ),
    ("scratch iql", "the paper's range, for returns that are not in [0, 1]", {"rl": {"beta": 3.0}}),
    # ---- from data sets of whole episodes
    (
        "recap",
        "the policy is told the advantage, and acts beyond it; few updates, or values know the returns of "
        "what they learnt from",
        {"policy": {"advantage": True, "guidance": 2.0}, "rl": {"value_updates": 300}},
    ),
    ("recap small", "a small network learns slowly what it is told", {"rl": {"updates": 4000}}),
    (
        "manipulation recap",
        "as many demonstrations as leave a policy something to learn from its failures",
        {"demos": "20", "steps": 1_000_000, "policy": {"predict": "action"}},
    ),
    ("manipulation recap full", "to numbers that tell policies apart", {"eval_episodes": 200}),
    ("manipulation recap quick", "minutes", {"eval_episodes": 100}),
    (
        "manipulation recap rgb",
        "an image costs as much as twenty control steps",
        {
            "demos": "50",
            "envs": 32,
            "eval_envs": 64,
            "bc": {"batch": 16, "noises": 16, "updates": 2500},
            "policy": {"predict": "velocity"},
        },
    ),
    # ---- RLPD as it is in its paper, but for chunks
    (
        "rlpd",
        "ten critics, of which two make a target, twenty updates of them per decision and one of the actor; "
        "a fresh actor, which every start teaches alike; nothing is imitated, no return is assumed",
        {
            "starts": "uniform",
            "bc": {"updates": 0},
            "policy": {"init_std": 1.0, "hidden": 256},
            "rl": {
                "critics": 10,
                "subset": 2,
                "critic_hidden": 256,
                "utd": 20.0,
                "actor_every": 20,
                "warmup": 5000,
                "pretrain": 0,
                "gamma": 0.99,
                "max_target": 0.0,
                "floor": False,
            },
        },
    ),
    ("manipulation rlpd", "as in the paper's sparse tasks", {"rl": {"entropy_backup": False}}),
    ("manipulation rlpd dense", "as in the paper's dense tasks", {"rl": {"entropy_backup": True}}),
    # ---- the user's own
    ("scratch own_sim", "what the simulator itself pays", {"reward": ""}),
    ("own_method on_policy", "a method need not correct for older weights", {"max_staleness": 0}),
    # ---- papers and their public code, on our tasks
    (
        "paper reinflow",
        "ReinFlow (arXiv 2505.22094): learning rates without their cosine, clips for a log-prob that is a "
        "mean; its gamma 0.99 is per decision of 4 control steps",
        {
            "envs": 40,
            "steps": 2_000_000,
            "policy": {
                "noise": "learned",
                "noise_steps": "all",
                "noise_min": 0.10,
                "noise_max": 0.24,
                "denoise_steps": 4,
                "horizon": 4,
                "execute": 4,
                "logp_reduction": "mean",
            },
            "rl": {
                "entropy_coef": 0.03,
                "clip_low": 0.01,
                "clip_high": 0.01,
                "lr": 4.5e-5,
                "critic_lr": 6.5e-4,
                "gamma": 0.9975,
                "lam": 0.95,
                "decisions": 500,
                "minibatch": 50_000,
                "epochs": 5,
                "target_kl": 1.0,
                "dual_clip": 0.0,
                "noise_hold": 0.35,
                "noise_end": 0.7,
            },
        },
    ),
    (
        "paper dppo",
        "DPPO (arXiv 2409.00588), robomimic; its minibatch counts pairs of a decision and one of 10 denoise "
        "steps, its gamma 0.999 is per decision of 4 control steps",
        {
            "envs": 50,
            "steps": 2_000_000,
            "policy": {
                "kind": "diffusion",
                "train_steps": 20,
                "denoise_steps": 20,
                "finetune_steps": 10,
                "std_floor": 0.1,
                "horizon": 4,
                "execute": 4,
                "logp_reduction": "mean",
            },
            "rl": {
                "gamma_denoise": 0.99,
                "clip_base": 0.001,
                "clip_coef": 0.01,
                "lr": 1e-4,
                "critic_lr": 1e-3,
                "gamma": 0.99975,
                "lam": 0.95,
                "decisions": 300,
                "minibatch": 750,
                "epochs": 10,
                "target_kl": 1.0,
                "dual_clip": 0.0,
                "scale_reward": True,
                "critic_warmup": 2,
            },
        },
    ),
    (
        "paper rlpd",
        "RLPD (arXiv 2302.02948), the authors' command for sparse Adroit: one env, one action per decision",
        {
            "envs": 1,
            "steps": 1_000_000,
            "eval_every": 20_000,
            "policy": {"horizon": 1, "execute": 1, "hidden": 256, "layers": 3},
            "rl": {"critic_layers": 3, "entropy_backup": False},
        },
    ),
    (
        "paper dsrl",
        "DSRL (arXiv 2506.15799), the authors' Robomimic runs; 1,501 decisions of 4 envs first, then 20 "
        "updates after each of all 4; its gamma 0.99 is per decision of 4 control steps",
        {
            "envs": 4,
            "steps": 1_000_000,
            "eval_every": 20_000,
            "policy": {
                "horizon": 4,
                "execute": 4,
                "hidden": 512,
                "layers": 3,
                "residual": True,
                "denoise_steps": 8,
                "critic_hidden": 2048,
                "critic_layers": 3,
            },
            "rl": {
                "critics": 2,
                "critic_hidden": 2048,
                "critic_layers": 3,
                "utd": 5.0,
                "actor_every": 1,
                "distil_every": 2,
                "warmup": 24_016,
                "pretrain": 0,
                "gamma": 0.9975,
                "alpha": 1.0,
                "entropy_backup": True,
                "demo_share": 0.0,
            },
        },
    ),
    # ---- the arm, whose time is a robot's
    (
        "robot",
        "an arm's time is dear, and every round of supervision ends with an evaluation",
        {"envs": 8, "eval_episodes": 100, "steps": 10_000, "eval_every": 5000, "bc": {"most": 0}},
    ),
    ("robot replay", "an arm does not wait for updates", {"workers": 1, "rl": {"warmup": 2000}}),
    (
        "robot on_policy",
        "on-policy the arm waits for updates: rollouts of several episodes; its expert's time is that of an "
        "arm",
        {"workers": 0, "demos_most": 0, "rl": {"decisions": 64}},
    ),
    (
        "robot on_policy rgb",
        "an arm's time is dear, and it does not play an episode again",
        {"demos": "300", "data": {"every": 1}, "bc": {"ground": 0, "head": 0, "head_every": 0, "own": 0}},
    ),
    ("robot on_policy ours", "small rollouts", {"rl": {"minibatch": 64}}),
    ("dds", "one arm in real time", {"envs": 1}),
)
