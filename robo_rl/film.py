"""Films of episodes for people: the whole workspace, what happens written on the picture, failures first.

Whatever plays episodes in an env plays them in a `FilmedEnv` to be filmed; what has pictures already fills a
`Take` itself.
"""

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorWrapper

from robo_rl.data.video import encode
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.files import replacing
from robo_rl.plugins import said
from robo_rl.policies import Policy
from robo_rl.rollout import as_array
from robo_rl.types import has_success

HEIGHT, WIDTH = 480, 640  # pixels of a picture
PAIR_HEIGHT = 720  # pixels of a frame with pictures side by side
FPS = 15  # pictures a second at most
BEFORE, AFTER = 0.5, 1.0  # s for which the first and the last picture of an episode stay
COUNT = 4  # episodes in a film
LONGEST = 20.0  # s of an episode that are filmed: one of locomotion has 50, each some seconds of drawing
GREEN, RED, DARK, LIGHT = (34, 139, 72), (186, 52, 44), (24, 28, 34), (245, 246, 248)
HEAD, FOOT = 32, 36  # pixels of the bars above and below, in a frame of 480 lines


@dataclass(slots=True)
class Take:
    """One filmed episode.

    words: written on every frame; titles: one for each picture of a frame, which lie side by side; succeeded:
    the step at which each succeeds, None where it does not; judged: a last frame without success says so;
    pictures: (control step, JPEG).
    """

    words: str
    titles: tuple[str, ...] = ("",)
    succeeded: "list[int | None]" = field(default_factory=lambda: [None])
    judged: bool = True
    pictures: list[tuple[int, bytes]] = field(default_factory=list)

    def add(self, step: int, *pictures: np.ndarray) -> None:
        """One more frame: uint8 [h, w, 3] for each title, of any size."""
        from PIL import Image

        frame = _frame_of([Image.fromarray(p) for p in pictures])
        data = io.BytesIO()
        frame.save(data, "JPEG", quality=95)
        self.pictures.append((step, data.getvalue()))


def frame_rate(period: float) -> tuple[int, float]:
    """(control steps per frame, frames per second of real time) of a film of steps of `period` [s]."""
    rate = round(1 / period)
    every = -(-rate // FPS)
    return every, rate / every


def check_path(path: str) -> None:
    """Raise UserError if --video names another kind of file."""
    if path and Path(path).suffix != ".mp4":
        raise UserError(f"--video writes an mp4, got {path}")


def write_film(path: "Path | str", takes: list[Take], fps: float, kind: str = "episode") -> int:
    """Write takes one after the other, those without success first -> frames. The file appears whole or not
    at all.

    Frames are 640 x 480, with pictures side by side 1280 x 720, and each says which of how many of its `kind`
    it shows.
    """
    path = Path(path)
    takes = [take for take in takes if take.pictures]
    numbered = sorted(enumerate(takes, 1), key=lambda nt: nt[1].succeeded[0] is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        return encode(
            temporary,
            (
                frame[None]
                for number, take in numbered
                for frame in _frames(take, f"{kind} {number} of {len(takes)}", fps)
            ),
            fps,
            gop=48,
            quality=20,
        )


class FilmedEnv(VectorWrapper):
    """Passes everything on to `env` and films the first `count` episodes that begin in it, each for at most
    LONGEST: `takes`, `fps` for `write_film`.

    The env needs `studio(ids)`, or `render()` and render=True. What happens in it stays the same.
    `tick(step)` hears of the steps that were filmed.
    """

    env: Any  # with the optional parts of the contract

    def __init__(self, env, count: int = COUNT, tick: Callable[[int], None] = lambda step: None):
        super().__init__(env)
        self._tick = tick
        self.takes: list[Take] = []
        self._left, self._words = count, ""  # episodes still to film, words before their task
        self.every, self.fps = frame_rate(env.spec.period)
        self._take: dict[int, Take] = {}  # by env: of the episodes that go on
        self._step = np.zeros(env.num_envs, np.int64)

    def film_next(self, count: int, words: str) -> None:
        """Film, of the episodes that begin from now on, the first `count`; `words` are written before their
        task."""
        self._left, self._words = count, f"{words}   "

    def __getattr__(self, name: str):
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def images(self) -> bool:
        """Whether steps draw the pictures of the observation, where the env can leave them out."""
        return self.env.images

    @images.setter
    def images(self, on: bool) -> None:
        # render() shows those of the observation
        self.env.images = on or bool(self._take) and not hasattr(self.env, "studio")

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        begun = np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        self._step[begun] = 0
        for i in begun.tolist():
            self._take.pop(i, None)
            if self._left:
                self._take[i] = Take(f"{self._words}{obs['task'][i]}")
                self.takes.append(self._take[i])
                self._left -= 1
        self._shoot([i for i in begun.tolist() if i in self._take])
        return obs, info

    def step(self, actions):
        out = self.env.step(actions)
        if self._take:
            self._step += 1
            over, success = as_array(out[2] | out[3]), as_array(out[4]["success"])
            for i, take in self._take.items():
                if success[i] and take.succeeded[0] is None:
                    take.succeeded[0] = int(self._step[i])
            self._shoot([i for i in self._take if over[i] or self._step[i] % self.every == 0])
            self._tick(int(self._step[list(self._take)].max()))
            cut = self._step * self.env.spec.period >= LONGEST
            for i in [i for i in self._take if over[i] or cut[i]]:
                self._take.pop(i).judged = bool(over[i]) and has_success(self.env)
        return out

    def _shoot(self, ids: list[int]) -> None:
        """One more picture of the envs `ids`."""
        if not ids:
            return
        with said(f"{self.env.spec.id} cannot draw"):  # after hours of training, perhaps
            pictures = (
                self.env.studio(ids) if hasattr(self.env, "studio") else np.asarray(self.env.render())[ids]
            )
        for i, picture in zip(ids, pictures, strict=True):
            self._take[i].add(int(self._step[i]), picture)


def filmed_steps(spec) -> int:
    """Most control steps of an episode that are filmed in an env of this spec."""
    return min(spec.max_steps, math.ceil(LONGEST / spec.period))


def film(
    env,
    policy: "Policy | Callable[[dict], np.ndarray]",
    starts: np.ndarray,
    seed: int,
    path: Path,
    tick: Callable[[int], None] = lambda step: None,
) -> None:
    """Film one episode of each start, without exploration noise, and write them as a video. Needs an env made
    with render=True. tick(step) hears of filmed steps."""
    filmed = FilmedEnv(env, len(starts), tick)
    evaluate(filmed, policy, starts, seed)
    write_film(path, filmed.takes, filmed.fps)


def _frame_of(pictures: list):
    """The PIL picture of a frame: one picture of 640 x 480, or several side by side between the bars."""
    from PIL import Image

    if len(pictures) == 1:
        return pictures[0] if pictures[0].size == (WIDTH, HEIGHT) else _fitted(pictures[0], WIDTH, HEIGHT)
    head, foot = (round(bar * PAIR_HEIGHT / HEIGHT) for bar in (HEAD, FOOT))
    frame = Image.new("RGB", (WIDTH * len(pictures), PAIR_HEIGHT), DARK)
    for k, picture in enumerate(pictures):
        frame.paste(_fitted(picture, WIDTH, PAIR_HEIGHT - head - foot), (k * WIDTH, head))
    return frame


def _fitted(picture, width: int, height: int):
    """The picture as large as fits, with bars beside or above it."""
    from PIL import Image

    scale = min(width / picture.width, height / picture.height)
    large = picture.resize(
        (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS
    )
    frame = Image.new("RGB", (width, height), DARK)
    frame.paste(large, ((width - large.width) // 2, (height - large.height) // 2))
    return frame


def _frames(take: Take, number: str, fps: float) -> Iterator[np.ndarray]:
    """uint8 [h, w, 3]: the frames with their words; the first and the last stay for a while."""
    first, last = take.pictures[0][0], take.pictures[-1][0]
    for step, data in take.pictures:
        marks = [
            f"success at step {won}"
            # that of the last step may stand beyond the last picture: nobody recorded what came of it
            if won is not None and (step >= won or step == last)
            else "no success"
            if step == last and take.judged
            else ""
            for won in take.succeeded
        ]
        frame = _labelled(data, f"{number}   step {step}   {take.words}", take.titles, marks)
        for _ in range(max(1, round(fps * (AFTER if step == last else BEFORE if step == first else 0)))):
            yield frame


def _labelled(data: bytes, words: str, titles: tuple[str, ...], marks: list[str]) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.open(io.BytesIO(data)).convert("RGB")
    draw, width, unit = ImageDraw.Draw(picture), picture.width // len(titles), picture.height / HEIGHT
    head, foot = round(HEAD * unit), picture.height - round(FOOT * unit)
    large, small = ImageFont.load_default(round(19 * unit)), ImageFont.load_default(round(17 * unit))
    draw.rectangle((0, 0, picture.width, head - 1), fill=DARK)
    draw.text((10, head / 2), words, fill=LIGHT, font=small, anchor="lm")
    for k, (title, mark) in enumerate(zip(titles, marks, strict=True)):
        left = k * width
        if title:
            box = draw.textbbox((left + 18, head + 18), title, font=large)
            draw.rectangle((box[0] - 8, box[1] - 8, box[2] + 8, box[3] + 8), fill=DARK)
            draw.text((left + 18, head + 18), title, fill=LIGHT, font=large)
        if mark:
            draw.rectangle(
                (left, foot, left + width - 1, picture.height), fill=RED if mark == "no success" else GREEN
            )
            draw.text((left + 10, (foot + picture.height) / 2), mark, fill=LIGHT, font=large, anchor="lm")
    return np.asarray(picture)
