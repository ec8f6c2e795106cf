"""Videos of data sets: the same pictures make the same bytes, whatever else the machine does."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from robo_rl.data import video

WIDE = Path("/proc/cpuinfo").exists() and "avx512" in Path("/proc/cpuinfo").read_text()


def clip(frames=39, size=32):
    """Coloured boxes that move over a plain ground: uint8 [T, h, w, 3]."""
    rng = np.random.default_rng(0)
    out = np.full((frames, size, size, 3), 120, np.uint8)
    for _ in range(6):
        colour, at, by = rng.integers(0, 255, 3), rng.uniform(0, size - 8, 2), rng.uniform(-0.5, 0.5, 2)
        for t in range(frames):
            y, x = np.clip(at + t * by, 0, size - 6).astype(int)
            out[t, y : y + 6, x : x + 6] = colour
    return out


def encoded(frames):
    out = io.BytesIO()
    video.encode(out, [frames], 20.0)
    return out.getvalue()


@pytest.mark.skipif(
    not WIDE or video.encoder() != "libx264", reason="x264 on a processor with AVX-512: not here"
)
def test_x264_leaves_avx_512_out():
    assert (
        video._options("libx264", 2, 18)["x264-params"] == "asm=MMX2,SSE2Fast,SSSE3,SSE4.2,AVX,FMA3,BMI2,AVX2"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no way to put two processes on one core here"
)
def test_the_same_pictures_make_the_same_bytes_on_a_core_that_another_process_wants():
    before, frames = os.sched_getaffinity(0), clip()
    os.sched_setaffinity(0, {min(before)})  # what it starts inherits it
    work = "import numpy as np\nx = np.ones((300, 300), np.float32)\nwhile True: x = np.tanh(x @ x)"
    busy = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(2)]
    try:
        assert len({encoded(frames) for _ in range(400)}) == 1
    finally:
        for p in busy:
            p.kill()
            p.wait(10)
        os.sched_setaffinity(0, before)
