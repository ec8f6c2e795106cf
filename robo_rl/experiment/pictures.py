"""Pictures uint8 [h, w, 3] as they go over the wire and into data sets."""

import io

import numpy as np


def cut_square(image: np.ndarray, size: int) -> np.ndarray:
    """The middle of a picture uint8 [h, w, 3] as [size, size, 3]."""
    from PIL import Image

    h, w = image.shape[:2]
    side = min(h, w)
    top, left = (h - side) // 2, (w - side) // 2
    return np.asarray(Image.fromarray(image[top : top + side, left : left + side]).resize((size, size)))


def encode(pixels: np.ndarray, form: str) -> bytes:
    """A picture uint8 [h, w, 3] as png or jpeg."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **({"quality": 95} if form == "jpeg" else {"compress_level": 1}))
    return file.getvalue()
