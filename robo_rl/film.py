"""Films of episodes for people: the whole workspace, what happens written on the picture, failures first."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from robo_rl.data.video import encode
from robo_rl.evaluation import decide
from robo_rl.files import replacing
from robo_rl.policies import Policy
from robo_rl.rollout import run_chunk

HEIGHT, WIDTH = 480, 640  # pixels
FPS = 15  # pictures a second at most
BEFORE, AFTER = 0.5, 1.0  # s for which the first and the last picture of an episode stay
GREEN, RED, DARK, LIGHT = (34, 139, 72), (186, 52, 44), (24, 28, 34), (245, 246, 248)


@dataclass(slots=True)
class _Take:
    """One filmed episode: pictures as (control step, JPEG); the step of its success."""

    number: int
    task: str
    pictures: list[tuple[int, bytes]] = field(default_factory=list)
    succeeded: int | None = None


def film(env, policy: "Policy | Callable[[dict], np.ndarray]", starts: np.ndarray, seed: int, path: Path) -> None:
    """Film one episode of each start, without exploration noise, and write them one after the other as a video of 640 x 480.

    Episodes that fail come first. Needs an env made with render=True, of at most as many envs as starts.
    """
    rate = round(1 / env.spec.period)
    every = -(-rate // FPS)
    takes = _episodes(env, policy, starts, seed, every)
    takes.sort(key=lambda take: take.succeeded is not None)
    fps = rate / every
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        encode(temporary, (frame[None] for take in takes for frame in _frames(take, fps, len(takes))), fps, gop=48, quality=20)


def _episodes(env, policy, starts: np.ndarray, seed: int, every: int) -> list[_Take]:
    """Run all of them side by side; a picture every so many control steps, and the last."""
    n = env.num_envs
    raw, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": starts[:n]})
    takes = [_Take(i + 1, str(task)) for i, task in enumerate(raw["task"])]
    _shoot(env, takes, 0)
    generator, step = torch.Generator().manual_seed(seed * 7919), 0
    over = np.zeros(n, bool)
    while not over.all():
        for action in np.split(actions := decide(policy, raw, generator), actions.shape[1], 1):
            raw, _, _, terminated, truncated, success, _ = run_chunk(env, action, 1.0)
            step += 1
            ends = (terminated | truncated) & ~over
            _shoot(env, [take for i, take in enumerate(takes) if ends[i] or not over[i] and step % every == 0], step)
            for i in np.flatnonzero(success & ~over):
                takes[i].succeeded = takes[i].succeeded or step
            over |= ends
    return takes


def _shoot(env, takes: list[_Take], step: int) -> None:
    """One more picture of each."""
    from PIL import Image
    if not takes:
        return
    on = [take.number - 1 for take in takes]
    shots = env.studio(on) if hasattr(env, "studio") else np.asarray(env.render())[on]
    for take, shot in zip(takes, shots, strict=True):
        picture = Image.fromarray(shot)
        if shot.shape[:2] != (HEIGHT, WIDTH):
            picture = _fitted(picture)
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=95)
        take.pictures.append((step, data.getvalue()))


def _fitted(picture):
    """As large as fits into the frame, with bars beside it."""
    from PIL import Image
    scale = min(WIDTH / picture.width, HEIGHT / picture.height)
    small = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
    frame = Image.new("RGB", (WIDTH, HEIGHT), DARK)
    frame.paste(small, ((WIDTH - small.width) // 2, (HEIGHT - small.height) // 2))
    return frame


def _frames(take: _Take, fps: float, count: int) -> Iterator[np.ndarray]:
    """uint8 [480, 640, 3]: the pictures with their words; the first and the last stay for a while."""
    last = take.pictures[-1][0]
    for step, data in take.pictures:
        mark = f"success at step {take.succeeded}" if take.succeeded is not None and step >= take.succeeded else \
            "no success" if step == last else ""
        frame = _labelled(data, f"episode {take.number} of {count}   step {step}   {take.task}", mark)
        for _ in range(max(1, round(fps * (BEFORE if step == 0 else AFTER if step == last else 0)))):
            yield frame


def _labelled(data: bytes, words: str, mark: str) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, WIDTH, 30), fill=DARK)
    draw.text((10, 6), words, fill=LIGHT, font=ImageFont.load_default(15))
    if mark:
        draw.rectangle((0, HEIGHT - 34, WIDTH, HEIGHT), fill=RED if mark == "no success" else GREEN)
        draw.text((10, HEIGHT - 27), mark, fill=LIGHT, font=ImageFont.load_default(18))
    return np.asarray(picture)
