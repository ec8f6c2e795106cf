"""`robo_rl cameras --sources`: pictures of real cameras and of files on the wire."""

import io
import threading

import numpy as np
import pytest
from PIL import Image

from controllers.transport import Bus, CompressedImage, LoopbackTransport
from robo_rl.errors import UserError
from robo_rl.experiment.camera_sources import (
    DeviceSource,
    FolderSource,
    SourceCameras,
    VideoSource,
    open_source,
)
from robo_rl.experiment.cameras import CameraOptions


def grey(value, h=48, w=64):
    return np.full((h, w, 3), value, np.uint8)


def film(path, values, rate=10):
    """A video whose frames are grey."""
    import av

    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for v in values:
            for packet in stream.encode(av.VideoFrame.from_ndarray(grey(v), format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return path


def level(picture):
    return None if picture is None else round(float(picture.mean()), -1)


def test_a_video_plays_at_its_own_pace_and_again_and_no_frame_comes_twice(tmp_path):
    source = VideoSource(film(tmp_path / "a.mp4", [0, 100, 200]))
    assert [level(source.read(t)) for t in (0.0, 0.05, 0.1, 0.29, 0.3, 0.31, 0.4, 0.7)] == [
        0,
        None,
        100,
        200,
        0,
        None,
        100,
        100,
    ]
    source.close()


def test_a_folder_is_shown_in_order_at_the_rate_and_again(tmp_path):
    for i, v in enumerate((10, 20, 30)):
        Image.fromarray(grey(v)).save(tmp_path / f"{i}.png")
    source = FolderSource(tmp_path, 10)
    assert [level(source.read(t)) for t in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)] == [10, None, 20, 30, 10, 30]


def test_sources_are_published_square_on_their_views_topics(tmp_path):
    at = [0.0]
    bus = Bus(lambda: at[0])
    a, b = LoopbackTransport(bus, "a"), LoopbackTransport(bus, "b")
    sides = np.concatenate([grey(250, 48, 8), grey(40, 48, 48), grey(250, 48, 8)], 1)
    (tmp_path / "p").mkdir()
    Image.fromarray(sides).save(tmp_path / "p/0.png")
    sources = dict(
        [
            open_source(f"front={tmp_path / 'p'}", 5),
            open_source(f"side={film(tmp_path / 'a.mp4', [0, 100])}", 5),
        ]
    )
    cameras = SourceCameras(a, sources, 32, form="png", robot="sim")
    boxes = {v: b.subscription(f"{v}/image_raw/compressed", CompressedImage, depth=9) for v in sources}
    assert cameras.publish() and not cameras.publish()
    at[0] = 0.1
    assert cameras.publish()
    got = {
        v: [np.asarray(Image.open(io.BytesIO(m.message.data))) for m in box.take()]
        for v, box in boxes.items()
    }
    assert [p.shape for p in got["front"]] == [(32, 32, 3)] and got["front"][0].max() <= 45
    assert [level(p) for p in got["side"]] == [0, 100]
    cameras.close()


def test_a_camera_that_ends_or_falls_silent_is_lost_and_no_old_picture_comes_for_a_new_one(tmp_path):
    # a device that is unplugged after three frames
    ended = DeviceSource(film(tmp_path / "a.mp4", [0, 100, 200]), 30, form="")
    ended.thread.join(10)
    assert level(ended.read(0)) == 200  # the newest
    with pytest.raises(UserError, match=r"camera .*a.mp4 is lost: it ended"):
        ended.read(0)
    ended.close()
    now, hold = [0.0], threading.Event()

    class Silent(DeviceSource):
        def _follow(self):
            hold.wait()

    silent = Silent(tmp_path / "a.mp4", 30, form="", clock=lambda: now[0])
    now[0] = 0.9
    assert silent.read(0) is None
    now[0] = 1.1
    with pytest.raises(UserError, match=r"lost: no picture for 1.1 s"):
        silent.read(0)
    hold.set()
    silent.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("front", "is not VIEW=PATH"),
        ("front=", "is not VIEW=PATH"),
        ("a/b=x", "is not VIEW=PATH"),
        ("front=nowhere.mp4", "there is no nowhere.mp4"),
        ("front=/dev/null", "as a V4L2 device"),
        ("front={}/bad.mp4", "as a video"),
        ("front={}", "has no pictures"),
    ],
)
def test_a_source_that_is_none_is_one_line(tmp_path, text, words):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=words) as e:
        open_source(text.format(tmp_path), 30)
    assert "\n" not in str(e.value)


def test_a_view_has_one_source():
    with pytest.raises(UserError, match="front is there twice"):
        CameraOptions(sources=("front=a", "front=b"))
