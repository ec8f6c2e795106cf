"""Errors of predicted states in the task's own units, where the layout of the state is known.

The layout is told by the names of the state (`sims.mujoco.env.state_names_of`): `ee_x` [m], `<object>_dx` [m]
from the hand, `goal_dx` [m], `joint1` [rad], `<object>_cos4yaw`, `drawer` [m]. A position's error is a
distance, an angle's the mean over its joints.

Axes: `B` windows, `T` control steps, `S` state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SIMS = ("mujoco", "arm", "dds")  # whose states are laid out so
MM, DEG = 1000.0, 180 / np.pi


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something a person can measure: what it is, its unit, the state's columns it is made of, and its error
    [B,T] from predicted and true columns [B,T,n]."""

    name: str
    unit: str
    columns: tuple[int, ...]
    error: Callable[[np.ndarray, np.ndarray], np.ndarray]


def distance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return MM * np.linalg.norm(p - q, axis=-1)


def angle(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return DEG * np.abs(p - q).mean(-1)


def quarter_turn(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Of (cos 4a, sin 4a): a square looks the same after a quarter turn."""
    d = np.arctan2(p[..., 1], p[..., 0]) - np.arctan2(q[..., 1], q[..., 0])
    return DEG * np.abs((d + np.pi) % (2 * np.pi) - np.pi) / 4


def quantities(sim: str, names: Sequence[str]) -> list[Quantity]:
    """What of a state with these names has a unit; [] where the layout is not known."""
    at = {n: i for i, n in enumerate(names)}
    if sim.removeprefix("wm:") not in SIMS or not names:
        return []

    def columns(*wanted: str) -> tuple[int, ...]:
        return tuple(at[n] for n in wanted) if all(n in at for n in wanted) else ()

    found = [Quantity("hand", "mm", columns("ee_x", "ee_y", "ee_z"), distance)]
    for n in (n.removesuffix("_dx") for n in names if n.endswith("_dx")):
        what = "goal from what is to reach it" if n == "goal" else f"{n} from the hand"
        found += [
            Quantity(what, "mm", columns(f"{n}_dx", f"{n}_dy", f"{n}_dz"), distance),
            Quantity(f"{n}, yaw", "degrees", columns(f"{n}_cos4yaw", f"{n}_sin4yaw"), quarter_turn),
        ]
    joints = [n for n in names if n.startswith("joint") and n[5:].isdecimal()]
    found += [
        Quantity("joints, mean of all", "degrees", columns(*joints), angle),
        Quantity("drawer", "mm", columns("drawer"), distance),
    ]
    return [q for q in found if q.columns]


def errors_in_units(
    sim: str, names: Sequence[str], predicted: np.ndarray, true: np.ndarray
) -> dict[str, tuple[str, np.ndarray]]:
    """{quantity: (unit, error [B,T])} of states [B,T,S]."""
    return {
        q.name: (q.unit, q.error(predicted[..., list(q.columns)], true[..., list(q.columns)]))
        for q in quantities(sim, names)
    }
