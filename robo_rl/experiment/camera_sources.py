"""Pictures of real cameras and of files for the wire: a V4L2 device, a video, or a folder of pictures.

A source's `read(t)` gives the picture of time t [s] since the node began, uint8 [h, w, 3]; None where there
is no new one. A device that gives nothing for a second is lost, which is said: an old picture is never sent
as a new one.
"""

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from robo_rl.errors import UserError, in_range
from robo_rl.experiment.pictures import cut_square, encode

PICTURES = (".png", ".jpg", ".jpeg")
LOST = 1.0  # s without a picture of a device


class PictureSource(Protocol):
    def read(self, t: float) -> np.ndarray | None: ...

    def close(self) -> None: ...


class FolderSource:
    """The pictures of a folder by name, `rate` of them per second, again and again."""

    def __init__(self, folder: Path, rate: float):
        self.files = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
        if not self.files:
            raise UserError(f"--sources: {folder} has no pictures ({', '.join(PICTURES)})")
        self.rate, self.last = rate, -1

    def read(self, t: float) -> np.ndarray | None:
        from PIL import Image

        if (k := int(t * self.rate + 1e-6)) == self.last:
            return None
        self.last = k
        return np.asarray(Image.open(self.files[k % len(self.files)]).convert("RGB"))

    def close(self) -> None:
        pass


class VideoSource:
    """The frames of a video at its own pace, again and again."""

    def __init__(self, path: Path):
        self.path, self.began = path, 0.0
        self.container = open_video(path)
        self.frames = self.container.decode(video=0)
        first = next(self.frames, None)
        if first is None:
            raise UserError(f"--sources: {path} has no frames")
        self.next = first

    def read(self, t: float) -> np.ndarray | None:
        found = None
        while t - self.began >= float(self.next.time or 0) - 1e-6:
            found = self.next
            following = next(self.frames, None)
            if following is None:  # from its beginning; the last frame lasts as long as the one before it
                rate = float(self.container.streams.video[0].average_rate or 30)
                self.began += float(found.time or 0) + 1 / rate
                self.container.seek(0)
                self.frames = self.container.decode(video=0)
                following = next(self.frames)
            self.next = following
        return None if found is None else found.to_ndarray(format="rgb24")

    def close(self) -> None:
        self.container.close()


class DeviceSource:
    """The newest frame of a V4L2 device, which a thread reads: a picture that nobody took in time is
    dropped."""

    def __init__(
        self, path: Path, rate: float, form: str = "v4l2", clock: Callable[[], float] = time.monotonic
    ):
        self.path, self.clock = path, clock
        self.container = open_video(path, form, {"framerate": f"{rate:g}"} if form else {})
        self.lock, self.newest, self.fault, self.stopped = threading.Lock(), None, "", False
        self.came = clock()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        from av.error import FFmpegError

        try:
            for frame in self.container.decode(video=0):
                if self.stopped:
                    break
                with self.lock:
                    self.newest, self.came = frame.to_ndarray(format="rgb24"), self.clock()
            self.fault = "it ended"
        except (FFmpegError, OSError) as e:
            self.fault = str(e)

    def read(self, t: float) -> np.ndarray | None:
        """UserError: the camera is lost."""
        with self.lock:
            got, self.newest = self.newest, None
            silent = self.clock() - self.came
        if got is None and (self.fault or silent > LOST):
            raise UserError(
                f"the camera {self.path} is lost: {self.fault or f'no picture for {silent:.1f} s'}"
            )
        return got

    def close(self) -> None:
        self.stopped = True
        self.thread.join(LOST)
        if not self.thread.is_alive():  # else it waits inside the device
            self.container.close()


def open_video(path: Path, form: str = "", options: dict[str, str] | None = None):
    """A container of PyAV. UserError: it is none."""
    import av
    from av.error import FFmpegError

    try:
        return av.open(str(path), format=form or None, options=options or {})
    except (FFmpegError, OSError, ValueError) as e:
        raise UserError(
            f"--sources: {path} cannot be opened as {'a V4L2 device' if form else 'a video'}: {e}"
        ) from None


def open_source(text: str, rate: float) -> tuple[str, PictureSource]:
    """(view, source) of VIEW=PATH. UserError: it is none."""
    view, equals, path = text.partition("=")
    if not equals or not path or not view.replace("_", "").isalnum():
        raise UserError(f"--sources: {text!r} is not VIEW=PATH, for example front=/dev/video0")
    in_range("--rate", rate, 0, 1000, open_low=True)
    at = Path(path).expanduser()
    if not at.exists():
        raise UserError(f"--sources: there is no {at}")
    if at.is_dir():
        return view, FolderSource(at, rate)
    if stat.S_ISCHR(os.stat(at).st_mode):
        return view, DeviceSource(at, rate)
    return view, VideoSource(at)


class SourceCameras:
    """Publishes what sources see, the middle of each picture as `size` x `size` pixels."""

    def __init__(self, transport, sources: dict[str, PictureSource], size: int, *, form: str, robot: str):
        from controllers.observation import topic_of
        from controllers.robot import load_robot
        from controllers.transport import CompressedImage

        known = load_robot(robot)
        self.transport, self.sources, self.size, self.form = transport, sources, size, form
        self.senders = {v: transport.publisher(topic_of(known, v), CompressedImage) for v in sources}
        self.began: float | None = None

    def publish(self) -> bool:
        """Send what is new -> whether anything was."""
        from controllers.transport import CompressedImage

        now = self.transport.now()
        self.began = now if self.began is None else self.began
        sent = False
        for view, source in self.sources.items():
            if (pixels := source.read(now - self.began)) is not None:
                data = encode(cut_square(pixels, self.size), self.form)
                self.senders[view].publish(CompressedImage(self.transport.stamp(), view, self.form, data))
                sent = True
        return sent

    def close(self) -> None:
        for source in self.sources.values():
            source.close()
