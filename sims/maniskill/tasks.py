"""ManiSkill 3.0.1's task ids: which run as installed, which need a download first, what the robot is told;
and how a task is named, with arguments or as one of a user's own."""

import difflib
from typing import Any

from robo_rl.errors import UserError
from robo_rl.plugins import split_arguments
from robo_rl.types import ActionAxis, ControlSpec

EXPERT_TASKS = ("PickCube-v1", "PushCube-v1", "StackCube-v1", "PullCube-v1", "LiftPegUpright-v1")
EXPERT_REMEDY = "make a data set of ManiSkill's own demonstrations (robo_rl data import trajectory.h5)"

# Where the task's own limit is too short for a careful controller (ours needs 90 and at most 60 steps).
# Others: own.
MAX_STEPS = {"LiftPegUpright-v1": 150, "StackCube-v1": 100}

# Everything they need ships with the mani_skill package.
TASKS = (
    *EXPERT_TASKS,
    "DrawTriangle-v1",
    "Empty-v1",
    "FMBAssembly1Easy-v1",
    "MS-AntRun-v1",
    "MS-AntWalk-v1",
    "MS-CartpoleBalance-v1",
    "MS-CartpoleSwingUp-v1",
    "MS-HopperHop-v1",
    "MS-HopperStand-v1",
    "MS-HumanoidRun-v1",
    "MS-HumanoidStand-v1",
    "MS-HumanoidWalk-v1",
    "PegInsertionSide-v1",
    "PickCubeSO100-v1",
    "PlaceSphere-v1",
    "PlugCharger-v1",
    "PokeCube-v1",
    "PullCubeTool-v1",
    "PushT-v1",
    "RollBall-v1",
    "RotateSingleObjectInHandLevel0-v1",
    "RotateSingleObjectInHandLevel1-v1",
    "RotateValveLevel0-v1",
    "RotateValveLevel1-v1",
    "RotateValveLevel2-v1",
    "RotateValveLevel3-v1",
    "RotateValveLevel4-v1",
    "SO100GraspCube-v1",
    "StackPyramid-v1",
    "TableTopFreeDraw-v1",
    "TriFingerRotateCubeLevel0-v1",
    "TriFingerRotateCubeLevel1-v1",
    "TriFingerRotateCubeLevel2-v1",
    "TriFingerRotateCubeLevel3-v1",
    "TriFingerRotateCubeLevel4-v1",
    "TwoRobotPickCube-v1",
    "TwoRobotStackCube-v1",
    "UnitreeG1PlaceAppleInBowl-v1",
    "UnitreeG1Stand-v1",
    "UnitreeG1TransportBox-v1",
)

NEEDS_DOWNLOAD = (
    "AnymalC-Reach-v1",
    "AnymalC-Spin-v1",
    "ArchitecTHOR_SceneManipulation-v1",
    "AssemblingKits-v1",
    "DrawSVG-v1",
    "InsertFlower-v1",
    "OpenCabinetDoor-v1",
    "OpenCabinetDrawer-v1",
    "PickClutterYCB-v1",
    "PickCubeWidowXAI-v1",
    "PickSingleYCB-v1",
    "PutCarrotOnPlateInScene-v1",
    "PutEggplantInBasketScene-v1",
    "PutSpoonOnTableClothInScene-v1",
    "ReplicaCADPrepareGroceriesTrain_SceneManipulation-v1",
    "ReplicaCADPrepareGroceriesVal_SceneManipulation-v1",
    "ReplicaCADSetTableTrain_SceneManipulation-v1",
    "ReplicaCADSetTableVal_SceneManipulation-v1",
    "ReplicaCADTidyHouseTrain_SceneManipulation-v1",
    "ReplicaCADTidyHouseVal_SceneManipulation-v1",
    "ReplicaCAD_SceneManipulation-v1",
    "RoboCasaKitchen-v1",
    "RotateSingleObjectInHandLevel2-v1",
    "RotateSingleObjectInHandLevel3-v1",
    "SceneManipulation-v1",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1",
    "TurnFaucet-v1",
    "UnitreeGo2-Reach-v1",
    "UnitreeH1Stand-v1",
)

NEEDS_RENDERER = ("PushT-v1",)  # reads its own picture even for state observations

REBUILD = ("Empty-v1",)  # its reset leaves the robot where it was

_INSTRUCTIONS = {
    "PickCube-v1": "pick up the cube and hold it at the goal",
    "PickCubeSO100-v1": "pick up the cube and hold it at the goal",
    "PushCube-v1": "push the cube to the target",
    "PullCube-v1": "pull the cube to the target",
    "StackCube-v1": "stack the red cube on the green cube",
    "LiftPegUpright-v1": "stand the peg upright on the table",
    "PegInsertionSide-v1": "insert the peg into the hole in the side of the box",
    "PlaceSphere-v1": "place the sphere in the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCubeTool-v1": "pull the cube nearer with the tool",
    "PushT-v1": "push the T onto its outline",
    "RollBall-v1": "roll the ball to the goal",
    "StackPyramid-v1": "stack the cubes into a pyramid",
    "DrawTriangle-v1": "draw along the triangle",
}


# arguments of gymnasium.make that have an option of their own here
OURS = {
    "num_envs": "--envs",
    "obs_mode": "--obs",
    "reward_mode": "--reward",
    "control_mode": "--control",
    "max_episode_steps": "--max-steps",
    "render_mode": "--video",
    "sim_backend": "--device",
    "render_backend": "--device",
    "shader_dir": "sensor_configs={'shader_pack':…}",
}


def split_task(task: str) -> tuple[str, str, dict[str, Any]]:
    """(module that registers it or "", id, arguments of gymnasium.make) of "[MODULE:]ID[,argument=value…]".

    UserError: an id without a module that ManiSkill 3.0.1 has not, or an argument that is an option here.
    """
    name, arguments = split_arguments(task)
    module, _, id = name.rpartition(":")
    known = (*TASKS, *NEEDS_DOWNLOAD)  # the remedy of those is told when they are made
    if not module and id not in known:
        near = difflib.get_close_matches(id, known, n=8, cutoff=0.3)
        raise UserError(
            f"unknown maniskill task {id!r}{f'; did you mean {near[0]!r}?' if near else '.'} "
            f"Nearest: {', '.join(near) or 'none'}; a task of your own is named MODULE:ID, after the module "
            "that registers it"
        )
    for key in OURS.keys() & arguments:
        raise UserError(f"--task {task}: {key} is set by {OURS[key]}")
    return module, id, arguments


def instruction(task: str) -> str:
    """The instruction of a task; for the rest its id in words ("rotate valve level 0")."""
    task = split_arguments(task)[0].rpartition(":")[2]
    if task in _INSTRUCTIONS:
        return _INSTRUCTIONS[task]
    name = task.rpartition("-v")[0] or task
    name = name.removeprefix("MS-")
    words = "".join(
        f" {c}" if c.isupper() or (c.isdecimal() and not name[i - 1].isdecimal()) else c
        for i, c in enumerate(name)
    )
    return words.replace("_", " ").strip().lower()


def control_spec(task: str, info: dict) -> ControlSpec:
    """The spec of a task's env from what `build.describe` says of it."""
    return ControlSpec(
        "maniskill",
        task,
        tuple(ActionAxis(*row) for row in info["axes"]),
        info["period"],
        info["max_steps"],
        tuple(info["state_names"]),
        tuple(info["views"]),
    )
