"""Camera streams as mp4: encode, join without re-encoding, decode one episode, find damage.

Every video starts at time 0, has a constant frame rate and no B-frames: frame k is shown at k / fps.
Colours are 4:2:0 and lossy; odd sizes are padded by one repeated row or column, which decoding cuts off.
PyAV loads on use.
"""

import io
import os
import struct
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from robo_rl.errors import UserError
from robo_rl.files import replacing

# as x264 names them; each implies those before
UP_TO_AVX2 = ("MMX2", "SSE2Fast", "SSSE3", "SSE4.2", "AVX", "FMA3", "BMI2", "AVX2")
ENCODERS = ("libx264", "libopenh264", "libsvtav1", "mpeg4")  # best first


class BrokenVideo(Exception):
    """The file is not a whole, decodable video; the text says what is wrong. have: frames of it that are
    sound, from the first."""

    def __init__(self, what: str, have: int = 0):
        super().__init__(what)
        self.have = have


@cache
def encoder() -> str:
    """The best video encoder that this PyAV build carries."""
    import av
    from av.codec.codec import UnknownCodecError

    for name in ENCODERS:
        try:
            av.Codec(name, "w")
            return name
        except UnknownCodecError:
            continue
    raise UserError(f"this PyAV has none of {', '.join(ENCODERS)}. Install one that has: pip install -U av")


def _converter():
    """(frame, format) -> frame, RGB <-> YUV. One per stream: making one costs more than using it.

    Without exact rounding colours come back a level too dark, at 38 dB instead of 50.
    """
    from av.video.reformatter import Interpolation as flag
    from av.video.reformatter import VideoReformatter

    names = ("BICUBIC", "ACCURATE_RND", "FULL_CHR_H_INT", "FULL_CHR_H_INP")
    scaling = sum(int(getattr(flag, name, 0)) for name in names)  # an old PyAV knows the first only
    converter = VideoReformatter()
    return lambda frame, format: converter.reformat(frame, format=format, interpolation=scaling)


def rate_of(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(65535)


@cache
def _instructions() -> dict[str, str]:
    """x264's option that leaves AVX-512 out, where the processor has it: on a busy machine x264's AVX-512
    code (core 165) made other bytes of the same pictures in one of 20 encodings. Its AVX2 code makes the same
    bytes always, those of the other when idle."""
    try:
        wide = "avx512" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        wide = False
    return {"x264-params": f"asm={','.join(UP_TO_AVX2)}"} if wide else {}


def _options(codec: str, gop: int, quality: int) -> dict[str, str]:
    if codec == "libx264":
        return {
            "crf": str(quality),
            "preset": "veryfast",
            "bf": "0",
            "g": str(gop),
            "threads": "1",
        } | _instructions()
    if codec == "libsvtav1":
        os.environ.setdefault("SVT_LOG", "1")  # it reports to stderr by itself; 1: errors only
        return {"crf": str(quality + 8), "preset": "10", "g": str(gop), "svtav1-params": "lp=1:pred-struct=1"}
    if codec == "mpeg4":
        return {"qscale": "2", "flags": "+qscale", "global_quality": str(2 * 118), "bf": "0", "g": str(gop)}
    return {"g": str(gop), "b": "4000000"}


def _even(image: np.ndarray) -> np.ndarray:
    h, w = image.shape[:2]
    return np.pad(image, ((0, h % 2), (0, w % 2), (0, 0)), mode="edge") if h % 2 or w % 2 else image


def check_frames(frames: np.ndarray) -> None:
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or 0 in frames.shape:
        raise UserError(f"frames must be uint8 [T, h, w, 3], none 0, got {frames.dtype} {list(frames.shape)}")


def encode(
    path: "Path | io.BytesIO",
    clips: Iterable[np.ndarray],
    fps: float,
    *,
    gop: int = 2,
    quality: int = 18,
    codec: str = "",
) -> int:
    """Write `clips` (each uint8[T, h, w, 3]) one after the other -> frames."""
    import av

    codec = codec or encoder()
    rate, convert, count = rate_of(fps), _converter(), 0
    target, how = (str(path), {"movflags": "faststart"}) if isinstance(path, Path) else (path, {})
    with av.open(target, "w", format="mp4", options=how) as out:
        stream: Any = None  # PyAV tells a video stream by the literal name of its codec
        for clip in clips:
            if stream is None:
                stream = out.add_stream(codec, rate, options=_options(codec, gop, quality))
                stream.height, stream.width = (n + n % 2 for n in clip.shape[1:3])
                stream.pix_fmt = "yuv420p"
                stream.codec_context.time_base = 1 / rate
            for image in clip:  # one at a time: a clip may be larger than the memory
                image = np.ascontiguousarray(_even(image))
                frame = convert(av.VideoFrame.from_ndarray(image, format="rgb24"), "yuv420p")
                frame.pts, frame.time_base = count, 1 / rate
                out.mux(stream.encode(frame))
                count += 1
        out.mux(stream.encode())
    return count


def codec_name() -> str:
    """Name of the format that `encoder()` makes: h264, av1, mpeg4."""
    import av

    return av.Codec(encoder(), "w").canonical_name


def encode_final(clip: np.ndarray, final: np.ndarray, fps: float) -> bytes:
    """The picture uint8[h, w, 3] after the last of `clip` uint8[T, h, w, 3], compressed as if the clip went
    on."""
    out = io.BytesIO()
    encode(out, [clip[-1:], final[None]] if len(clip) % 2 else [final[None]], fps)
    return out.getvalue()


def decode_final(data: bytes, length: int, fps: float, size: tuple[int, int]) -> np.ndarray:
    """Inverse of `encode_final`, of a clip of `length` frames; `size` = (h, w). Raises BrokenVideo."""
    return decode(io.BytesIO(data), length % 2, 1, fps, size)[0]


def append(path: Path, clips: list[np.ndarray], fps: float, held: int, out: Path) -> int:
    """Write to `out` the video at `path`, of `held` frames (0: none), followed by `clips`; -> frames in
    `out`.

    -1, nothing written: the file is not one that can go on with today's encoder.
    """
    if not held:
        return encode(out, clips, fps)
    part = out.with_name(f".part{out.name}")
    try:
        more = encode(part, clips, fps)
        if not joinable(path, part):
            return -1
        join(path, part, out)
        return held + more
    finally:
        part.unlink(missing_ok=True)


def joinable(first: Path, second: Path) -> bool:
    """Whether both videos have the same size, rate and codec settings, so that packets can be copied."""
    import av

    with av.open(str(first)) as a, av.open(str(second)) as b:
        one, two = (
            (s.codec_context.extradata, s.codec.name, s.width, s.height, s.time_base, s.average_rate)
            for s in (a.streams.video[0], b.streams.video[0])
        )
        return one == two


def join(first: Path, second: Path, path: Path) -> None:
    """Write `first` followed by `second`, packets untouched."""
    import av

    with av.open(str(first)) as a, av.open(str(second)) as b:
        source = a.streams.video[0]
        assert source.average_rate is not None and source.time_base is not None  # an mp4 has both
        step = round(1 / (source.average_rate * source.time_base))  # ticks per frame
        with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as out:
            stream = out.add_stream_from_template(source, opaque=True)
            stream.time_base = source.time_base
            for container, shift in ((a, 0), (b, source.frames * step)):
                for packet in container.demux(video=0):
                    if packet.dts is None or packet.pts is None:
                        continue
                    packet.pts, packet.dts, packet.duration = packet.pts + shift, packet.dts + shift, step
                    packet.stream = stream
                    out.mux(packet)


def check_whole(path: Path, frames: int, size: tuple[int, int] | None = None) -> None:
    """Raise BrokenVideo if the file is cut short, holds fewer than `frames` frames or others than of `size`
    (h, w), each made even. Decodes nothing."""
    import av
    from av.error import FFmpegError

    if not path.is_file():
        raise BrokenVideo("the file is missing")
    with open(path, "rb") as f:  # walk the top-level mp4 boxes: the last must end where the file ends
        at, end = 0, os.fstat(f.fileno()).st_size
        while at < end:
            head = f.read(16)
            if len(head) < 8:
                raise BrokenVideo("the file is cut short")
            length, kind = struct.unpack(">I4s", head[:8])
            if length == 1 and len(head) == 16:
                length = struct.unpack(">Q", head[8:])[0]
            if length == 0:
                length = end - at
            if length < 8 or not kind.isascii():
                raise BrokenVideo("it is not an mp4 file")
            at += length
            f.seek(at)
    if at != end or end == 0:
        raise BrokenVideo(f"the file is cut short at {end} of {at} bytes")
    try:
        with av.open(str(path)) as c:
            stream = c.streams.video[0] if c.streams.video else None
            if stream is None or stream.codec_context is None:
                raise BrokenVideo("it holds no video that can be decoded")
            have, shape = stream.frames, (stream.height, stream.width)
    except (FFmpegError, OSError) as e:
        raise BrokenVideo(f"it does not open ({e.strerror})") from None
    if have < frames:
        raise BrokenVideo(f"it holds {have} frames, {frames} are needed", have)
    if size is not None and any(x not in (n, n + n % 2) for x, n in zip(shape, size, strict=True)):
        raise BrokenVideo(f"its frames are {shape[0]}x{shape[1]}, meta/info.json says {size[0]}x{size[1]}")


def decode(
    path: "Path | io.BytesIO", first: int, count: int, fps: float, size: tuple[int, int]
) -> np.ndarray:
    """Frames `first` .. `first + count - 1` as uint8[count, h, w, 3]; `size` = (h, w). Raises BrokenVideo."""
    out = np.empty((count, *size, 3), np.uint8)
    for k, block in decode_blocks(path, first, count, fps, size):
        out[k : k + len(block)] = block
    return out


def decode_blocks(
    path: "Path | io.BytesIO", first: int, count: int, fps: float, size: tuple[int, int], block: int = 64
) -> Iterator[tuple[int, np.ndarray]]:
    """As `decode`, in pieces: (number of the first of them, counted from `first`; uint8[up to `block`, h, w,
    3])."""
    with VideoReader(path, fps, size) as reader:
        for k in range(0, count, block):
            yield k, reader.read(np.arange(first + k, first + min(count, k + block)))


class VideoReader:
    """An open video of which frames are asked for by number, in any order; near ones ahead are decoded on to,
    others sought.

    Raises BrokenVideo. Not for several threads at once.
    """

    AHEAD = 8  # frames that are decoded and dropped rather than sought

    def __init__(self, path: "Path | io.BytesIO", fps: float, size: tuple[int, int]):
        import av
        from av.error import FFmpegError

        if isinstance(path, Path) and not path.is_file():
            raise BrokenVideo("the file is missing")
        self._size, self._convert = size, _converter()
        try:
            self._file = av.open(str(path) if isinstance(path, Path) else path, "r")
            stream = self._stream = self._file.streams.video[0]
        except (FFmpegError, OSError, IndexError) as e:
            raise BrokenVideo(f"it does not decode ({e})") from None
        if stream.codec_context is None or stream.time_base is None:
            self._file.close()
            raise BrokenVideo("it holds no video that can be decoded")
        stream.codec_context.thread_count = 1
        self._ticks = float(stream.time_base) * fps  # frames per tick
        self._next: int | None = None  # number of the frame that decoding gives next, where it is known
        self._frames: Any = None

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The frames of these numbers, rising, int64[n] -> uint8[n, h, w, 3]."""
        from av.error import FFmpegError

        out = np.empty((len(numbers), *self._size, 3), np.uint8)
        try:
            for i, number in enumerate(numbers.tolist()):
                out[i] = self._image(number)
        except (FFmpegError, OSError) as e:
            self._next = None
            raise BrokenVideo(f"it does not decode ({e})") from None
        return out

    def _image(self, number: int) -> np.ndarray:
        h, w = self._size
        if self._next is None or not self._next <= number <= self._next + self.AHEAD:
            if number or self._next is not None:
                self._file.seek(round(number / self._ticks), stream=self._stream, backward=True)
            self._frames = self._file.decode(self._stream)
        for frame in self._frames:
            if frame.pts is None:
                raise BrokenVideo("a frame has no time")
            k = round(frame.pts * self._ticks)
            self._next = k + 1
            if k == number:
                image = self._convert(frame, "rgb24").to_ndarray()
                if image.shape[0] < h or image.shape[1] < w:
                    raise BrokenVideo(f"frames are {image.shape[0]}x{image.shape[1]}, expected {h}x{w}")
                return image[:h, :w]
            if k > number:
                break
        self._next = None
        raise BrokenVideo(f"frame {number} is missing")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def write_video(path: "Path | str", frames: np.ndarray, fps: float) -> None:
    """Save uint8[T, h, w, 3] as a video that browsers play; appears whole or not at all."""
    frames = np.asarray(frames)
    check_frames(frames)
    if not 0 < fps <= 1000:
        raise UserError(f"fps must be in (0, 1000], got {fps!r}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as tmp:
        encode(tmp, [frames], fps, gop=48, quality=20)
