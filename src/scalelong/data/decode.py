"""From the bytes of one image file to its pixels, with one rule for every kind of file.

Gray stays gray, everything else becomes RGB; alpha is kept if four channels are asked for and laid on white otherwise;
16 bits become 8; the orientation that a camera noted is applied; of an animation the first frame is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ..errors import ScaleLongError
from ..files import in_words
from ..optional import needs

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


GRAY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"}
# An explicit list: Pillow's other readers include one that starts Ghostscript.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".j2k", ".avif"}
)
ORIENTATION = 0x0112  # the EXIF tag; values 5 to 8 swap height and width


class UndecodableError(Exception):
    """This one image is broken; the message is the reason."""


@dataclass(frozen=True)
class Header:
    """What the header of an image tells."""

    height: int
    width: int
    kind: str  # "gray", "colour" or "rgba"


def read_header(data: bytes) -> Header:
    """Size and kind without decoding the pixels."""
    image = open_image(data)
    try:
        return _header(image)
    except Exception as error:
        raise _undecodable(error) from error


def decode(data: bytes, channels: int, height: int, width: int) -> tuple[np.ndarray, Header]:
    """Pixels as uint8 (C, height, width), and what the image was.

    The largest centred part with these proportions is taken, and resized if need be.
    """
    return decode_image(open_image(data), channels, height, width)


def decode_image(image: Image, channels: int, height: int, width: int) -> tuple[np.ndarray, Header]:
    """The same for an image of Pillow."""
    np = needs("numpy", "train", "decoding images")
    try:
        seen = _header(image)
        if min(image.size) >= 4 * max(height, width):
            # JPEG can be decoded at a fraction of its size; twice what is asked for keeps the resizing sharp.
            room = 2 * max(height, width)
            image.draft(None, (room, room))
        pixels = np.asarray(_resized(_converted(_upright(image), channels), height, width))
    # Decoders meet damaged files with almost any exception; whichever it is, this image is broken and the set is not.
    except Exception as error:
        raise _undecodable(error) from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), seen


def open_image(data: bytes) -> Any:
    """An image of Pillow from the bytes of a file, of the listed formats alone; UndecodableError if it is none."""
    if not data:
        raise UndecodableError("empty file")
    try:
        return needs("PIL.Image", "train", "reading image files").open(BytesIO(data), formats=prepare())
    except Exception as error:
        raise _undecodable(error) from error


@cache
def prepare() -> list[str]:
    """Loads what decoding needs, and returns the formats that are read.

    To be called before threads are started: they must not meet while Pillow is half imported.
    """
    for module in ("numpy", "PIL.ImageOps"):
        needs(module, "train", "decoding images")
    pillow = needs("PIL.Image", "train", "reading image files")
    pillow.init()
    return [name for name in FORMATS if name in pillow.OPEN]


def _undecodable(error: Exception) -> Exception:
    if isinstance(error, (UndecodableError, ScaleLongError)):
        return error
    if type(error).__name__ == "UnidentifiedImageError":  # its message holds a memory address
        return UndecodableError("not an image, or not of a known format")
    return UndecodableError(in_words(error))


def _header(image: Image) -> Header:
    width, height = image.size
    # Of a TIFF, Pillow tells the size after turning it.
    if image.format != "TIFF" and _may_be_turned(image) and image.getexif().get(ORIENTATION, 1) >= 5:
        width, height = height, width
    return Header(height, width, _kind(image))


def _may_be_turned(image: Image) -> bool:
    """Asking a PNG without EXIF for it would decode the whole image."""
    return "exif" in image.info or "xmp" in image.info or image.format in ("TIFF", "MPO")


def _kind(image: Image) -> str:
    if image.mode in ("RGBA", "RGBa"):
        return "rgba"
    if image.mode in GRAY_MODES:
        return "gray"
    if image.mode in ("P", "PA"):
        palette = image.getpalette("RGB") or []
        return "gray" if palette[0::3] == palette[1::3] == palette[2::3] else "colour"
    return "colour"


def _upright(image: Image) -> Image:
    image.load()  # some formats note the orientation after the pixels
    return needs("PIL.ImageOps", "train", "decoding images").exif_transpose(image) if _may_be_turned(image) else image


def _converted(image: Image, channels: int) -> Image:
    pillow = needs("PIL.Image", "train", "decoding images")

    if image.mode == "F":
        raise UndecodableError("32-bit float pixels have no agreed range; convert them to 8 or 16 bits")
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        if channels != 4 and image.getchannel("A").getextrema() != (255, 255):
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
    wanted = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    return image if image.mode == wanted else image.convert(wanted)


def _eight_bits(image: Image) -> Image:
    np = needs("numpy", "train", "decoding images")
    pillow = needs("PIL.Image", "train", "decoding images")

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise UndecodableError(f"values from {values.min()} to {values.max()} do not fit 16 bits")
    return pillow.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _resized(image: Image, height: int, width: int) -> Image:
    if image.size == (width, height):
        return image
    pillow = needs("PIL.Image", "train", "decoding images")

    scale = min(image.width / width, image.height / height)
    left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    box = (max(left, 0), max(top, 0), min(left + width * scale, image.width), min(top + height * scale, image.height))
    return image.resize((width, height), pillow.Resampling.BICUBIC, box=box)
