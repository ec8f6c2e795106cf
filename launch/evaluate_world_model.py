"""Policies evaluated in a world model, as a plain script, beside the simulator where the data came from one.

    python launch/evaluate_world_model.py runs/wm runs/a runs/b my_policies:go_up ws://127.0.0.1:8000
    --episodes 100

A policy is a run folder, a checkpoint folder, `module:function` of an observation that gives actions [N, A]
or [N, E, A], the ws://HOST:PORT of a server on openpi's wire (ROBO_RL_TOKEN has its token), or
lerobot:FOLDER, a policy that LeRobot saved. In the model, episodes begin with the simulator's first
observations and last as long as there, as far as the model is calibrated, so that the difference is of the
same starts; without a simulator (or with --no-simulator) they begin from held-out recorded frames. How far
the model can be trusted at all: `robo_rl wm eval`.
"""

import argparse
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import robo_rl
from robo_rl.errors import as_script
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.experiment.foreign import foreign_policy
from robo_rl.experiment.world_model import obs_spec_of, shortened, simulator_of
from robo_rl.options.foreign import FOREIGN
from robo_rl.plugins import is_object, load_object


def main() -> None:
    p = argparse.ArgumentParser(
        description="Policies evaluated in a world model, beside the simulator where there is one."
    )
    p.add_argument("model")
    p.add_argument("policies", nargs="+")
    p.add_argument("--episodes", type=int, default=100)
    p.add_argument("--seed", type=int, default=1, help="which list of starts")
    p.add_argument(
        "--judge", default="", help="who decides on success in the model, as in robo_rl train --judge"
    )
    p.add_argument("--no-simulator", action="store_true")
    p.add_argument(
        "--execute", type=int, default=8, help="rows of a chunk of ws:// and lerobot: that are executed"
    )
    p.add_argument("--lerobot-python", default="", help="of lerobot:FOLDER, as in robo_rl eval")
    p.add_argument("--lerobot-cameras", default="", help="of lerobot:FOLDER, as in robo_rl eval")
    args = p.parse_args()
    model = robo_rl.load_world_model(args.model)
    lanes = min(args.episodes, 32) if model.spec.control.views else args.episodes
    simulator = None if args.no_simulator else simulator_of(model.spec, lanes)
    for name in args.policies:  # a wrong name is told before the episodes of the others
        if not (name.startswith(FOREIGN) or is_object(name)):
            pick_checkpoint(Path(name), "best")
    if note := shortened(model.spec, "" if simulator is None else "simulator"):
        print(note, file=sys.stderr)
    for name in args.policies:
        with find_policy(name, model.spec, args) as policy:
            inside = robo_rl.evaluate(
                policy, model, episodes=args.episodes, seed=args.seed, simulator=simulator, judge=args.judge
            )
            print(f"{name}\n  in the model      {inside}")
            if simulator is not None:
                real = robo_rl.evaluate(policy, simulator, episodes=args.episodes, seed=args.seed)
                print(
                    "  in the simulator  {}\n  difference        {:+.3f} [{:+.3f}, {:+.3f}]".format(
                        real, *inside.minus(real)
                    )
                )
    if simulator is not None:
        simulator.close()


def find_policy(name: str, spec, args: argparse.Namespace):
    """The context that gives the policy `name`."""
    if name.startswith(FOREIGN):
        return closing(
            foreign_policy(
                name, obs_spec_of(spec), args.execute, args.seed, args.lerobot_python, args.lerobot_cameras
            )
        )
    return nullcontext(load_object(name, "policy") if is_object(name) else robo_rl.load_policy(name))


if __name__ == "__main__":
    as_script(main)
