"""The console's pictures: every robot small, those that somebody looks at large, from every camera, with
axes.

An env that can `film` and `project` (sims/mujoco) is filmed at the size asked for; of others the pictures of
the observation are shown, or what `render()` gives.
"""

import io
from dataclasses import dataclass, field

import numpy as np

from robo_rl.types import ActionAxis

SMALL = 128  # pixels
NEAR = 0.01  # m, how far along an axis its direction in a picture is taken
WORDS = {
    "dx": ("back", "forward"),
    "dy": ("right", "left"),
    "dz": ("down", "up"),
    "rx": ("roll left", "roll right"),
    "ry": ("pitch up", "pitch down"),
    "rz": ("turn right", "turn left"),
    "gripper": ("close", "open"),
}


def words_of(axis: ActionAxis) -> tuple[str, str]:
    """What -1 and 1 on an axis are called. Base frame: x forward, y left, z up; turns by the right hand."""
    return WORDS.get(axis.name, (f"{axis.name} -", f"{axis.name} +"))


@dataclass(frozen=True, slots=True)
class Frame:
    """One drawing of all robots. at: when [s]; small: JPEG per robot; large: robot -> ((view, JPEG, axes),
    ...).

    axes: None, or the tool's place in the picture (0 .. 1 from the top left) and, for x, y and z of the base,
    where a metre along it leads in the picture: [[u, v], [du, dv], [du, dv], [du, dv]].
    """

    number: int
    at: float
    small: tuple[bytes, ...] = ()
    large: dict[int, tuple] = field(default_factory=dict)


class ConsoleCameras:
    """The cameras of `env`; size: pixels of the large pictures."""

    def __init__(self, env, size: int):
        self.env, self.size, self.films = env, size, hasattr(env, "film")
        self.views = list(getattr(env, "cameras", ())) if self.films else list(env.spec.views) or ["camera"]
        self.moves = {a.name for a in env.spec.axes} >= {"dx", "dy", "dz"}

    def frame(self, number: int, at: float, obs: dict, large: list[int]) -> Frame:
        """Pictures of now; `obs` the newest observation, `large` the robots that somebody looks at."""
        if self.films:
            n = self.env.num_envs
            rest = [i for i in range(n) if i not in large]
            some = self.env.film(self.views[:1], min(SMALL, self.size), rest)[self.views[0]] if rest else ()
            small = dict(zip(rest, map(jpeg, some), strict=True))
            big = self.env.film(self.views, self.size, large) if large else {}
            out = {
                i: tuple((v, jpeg(big[v][k]), self.axes(v, i)) for v in self.views)
                for k, i in enumerate(large)
            }
            for i in large:  # for those who look at another
                small[i] = out[i][0][1]
            return Frame(number, at, tuple(small[i] for i in range(n)), out)
        pictures = {v: obs[f"image/{v}"] for v in self.env.spec.views} or {"camera": self.env.env.render()}
        first = tuple(jpeg(x) for x in pictures[self.views[0]])
        return Frame(
            number,
            at,
            first,
            {
                i: tuple(
                    (v, first[i] if v == self.views[0] else jpeg(x[i]), None) for v, x in pictures.items()
                )
                for i in large
            },
        )

    def axes(self, view: str, i: int) -> list | None:
        """The tool and the base's axes in a picture, see `Frame`; None where not seen or not commanded."""
        if not self.moves:
            return None
        points = self.env.tool(i) + np.concatenate([np.zeros((1, 3)), NEAR * np.eye(3)])
        uv = self.env.project(view, i, points)
        if not np.isfinite(uv).all():
            return None
        return [uv[0].round(4).tolist(), *((uv[1:] - uv[0]) / NEAR).round(3).tolist()]


def jpeg(picture: np.ndarray) -> bytes:
    """uint8 [h, w, 3] -> JPEG."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", quality=80)
    return out.getvalue()
