"""Films of `robo_rl wm eval`: recorded episodes beside what a model predicts from their first frame and the
actions alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from robo_rl.film import Take, write_film
from robo_rl.types import Each, silently

SHOWN = 6  # windows in a film of cameras; half as many where each picture is drawn
SLOW = 2  # times slower than real time
TITLES = ("recorded", "model")
# (window, step) -> pictures, recorded and predicted
Pair = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


def side_by_side(folder: Path, arrays: dict, each: Each = silently) -> list[tuple[str, Path]]:
    """Write a film per camera, or of the drawn scene where the model predicts states -> (title, file) of
    each; [] where no state of its simulator can be drawn."""
    w, p, model = arrays["windows"], arrays["predicted"], arrays["model"]
    films = camera_pairs(w, p) or scene_pair(w, p, model.spec.control)
    pick = np.flatnonzero(w.made[:, min(15, w.made.shape[1] - 1)])[: SHOWN if w.images else SHOWN // 2]
    out = []
    for k, (title, pair) in enumerate(films.items() if len(pick) else ()):
        path = folder / f"side-by-side-{k}.mp4"
        write_film(
            path,
            [take_of(w, p, window, pair) for window in each("film", pick.tolist(), "windows")],
            1 / model.spec.control.period / SLOW,
            "window",
        )
        out.append((title, path))
    return out


def take_of(w, p, window: int, pair: Pair) -> Take:
    """One window: its first frame, then a frame after each step that was seen, with the steps of recorded and
    predicted success."""
    made = w.made[window]
    said = (np.flatnonzero(w.success[window] & made), np.flatnonzero((p.success[window] > 0.5) & made))
    take = Take(str(w.start["task"][window]), TITLES, [int(s[0]) + 1 if len(s) else None for s in said])
    for step in range(1 + int(w.seen[window].sum())):
        take.add(step, *pair(window, step))
    return take


def camera_pairs(w, p) -> dict[str, Pair]:
    """By title: the pictures of each camera."""

    def pair(view: str) -> Pair:
        first = w.start[f"image/{view}"]
        return lambda i, step: (
            (first[i], first[i]) if step == 0 else (w.images[view][i, step - 1], p.images[view][i, step - 1])
        )

    return {f"camera {view}": pair(view) for view in w.images}


def scene_pair(w, p, control) -> dict[str, Pair]:
    """By title: recorded and predicted states drawn in the embedded simulator's scene, where they are its
    states."""
    from robo_rl.plugins import is_object
    from sims.mujoco.env import state_names_of
    from sims.mujoco.gl import gl_backend
    from sims.mujoco.own import find_task
    from sims.mujoco.scene_view import SceneView
    from sims.mujoco.tasks import TASKS

    if (
        control.sim not in ("mujoco", "arm")
        or not (control.task in TASKS or is_object(control.task))
        or gl_backend() is None
    ):
        return {}
    task = find_task(control.task)
    if state_names_of(task) != control.state_names:
        return {}
    scene = SceneView(task, 2)

    def pair(i: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        first = w.start["state"][i]
        for k, state in enumerate(
            (first, first) if step == 0 else (w.state[i, step - 1], p.state[i, step - 1])
        ):
            scene.show_state(k, state)
        drawn = scene.pictures()["studio"]
        return drawn[0], drawn[1]

    return {"the scene, drawn from the states": pair}
