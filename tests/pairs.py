"""Files of two arms for tests: two simulated arms, and two with the joints of an ALOHA's (six and a gripper
each)."""

import json
from pathlib import Path

import numpy as np

from controllers.robot import PRESETS

ALOHA = {
    "joint1": "waist",
    "joint2": "shoulder",
    "joint4": "elbow",
    "joint5": "forearm_roll",
    "joint6": "wrist_angle",
    "joint7": "wrist_rotate",
}
BASES = {"left": {"pos": [0, 0.4, 0]}, "right": {"pos": [0, -0.4, 0]}}


def pair(folder: Path, arm: str = "sim", name: str = "pair", **changed) -> str:
    """The file of two arms; a field that is None is left out."""
    raw = {"arms": {"left": arm, "right": arm}, "bases": BASES, "clearance": 0.05} | changed
    path = folder / f"{name}.json"
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return str(path)


def near(folder: Path) -> str:
    """Two arms that reach each other and no table: what presses on one is moved by it, whatever holds it."""
    raw = json.loads((PRESETS / "sim.json").read_text())
    raw["cell"]["low"][2] = 0.15
    (folder / "high.json").write_text(json.dumps(raw | {"model": str(PRESETS / raw["model"])}))
    return pair(
        folder, "high.json", "near", bases={"left": {"pos": [0, 0.35, 0]}, "right": {"pos": [0, -0.35, 0]}}
    )


def aloha_arm(folder: Path) -> str:
    """The file of one arm of six joints: the simulated one without its third joint, under an ALOHA's
    names."""
    text = (PRESETS / "panda_like.xml").read_text()
    text = "\n".join(
        line
        for line in text.splitlines()
        if 'joint="joint3"' not in line and '<joint name="joint3"' not in line
    )
    for old, new in ALOHA.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    (folder / "aloha.xml").write_text(text)
    raw = json.loads((PRESETS / "sim.json").read_text())
    keep = [raw["joints"].index(j) for j in ALOHA]
    for key in ("lower", "upper", "velocity", "torque", "home"):
        raw[key] = [raw[key][k] for k in keep]
    (folder / "aloha_arm.json").write_text(
        json.dumps(raw | {"model": "aloha.xml", "joints": list(ALOHA.values())})
    )
    return "aloha_arm.json"


def aloha(folder: Path, **changed) -> str:
    return pair(folder, aloha_arm(folder), "aloha", **changed)


def waving(home: np.ndarray, size: float = 0.05):
    """A policy for PairInterface rows: chunks [8, A] of joints that wave about `home` by `size` [rad], and
    grippers that open and close."""
    count = iter(range(10**6))

    def act(obs, prefix=None):
        t = (8 * next(count) + np.arange(8))[:, None] / 50
        return home + size * np.sin(3 * t + np.arange(len(home)))

    return act
