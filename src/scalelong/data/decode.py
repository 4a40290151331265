"""From the bytes of one image file, or from arrays, to pixels: uint8 (C, H, W), with one rule for every kind.

Gray stays gray, everything else becomes RGB; alpha is kept if four channels are asked for and laid on white otherwise;
16 bits become 8; the orientation that a camera noted is applied; of an animation the first frame is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InvalidConfigError, ScaleLongError, UnreadableDataError
from ..files import in_words
from ..optional import needs

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


GRAY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"}
# An explicit list: Pillow's other readers include one that starts Ghostscript.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF", "HEIF")
SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".j2k", ".avif"}
)
HEIC = frozenset({".heic", ".heif"})  # read where pillow-heif is installed
ORIENTATION = 0x0112  # the EXIF tag; values 5 to 8 swap height and width


class UndecodableError(Exception):
    """This one image is broken; the message is the reason."""


@dataclass(frozen=True)
class Header:
    """What the header of an image tells."""

    height: int
    width: int
    kind: str  # "gray", "colour" or "rgba"


@cache
def suffixes() -> frozenset[str]:
    """The endings of the files that are read here."""
    return SUFFIXES | HEIC if find_spec("pillow_heif") is not None else SUFFIXES


@cache
def prepare() -> list[str]:
    """Loads what decoding needs, and returns the formats that are read.

    To be called before threads are started: they must not meet while Pillow is half imported.
    """
    for module in ("numpy", "PIL.ImageOps"):
        needs(module, "train", "decoding images")
    pillow = _pillow()
    pillow.init()
    if suffixes() >= HEIC:
        needs("pillow_heif", "heic", "reading HEIC photographs").register_heif_opener()
    return [name for name in FORMATS if name in pillow.OPEN]


def _pillow() -> Any:
    return needs("PIL.Image", "train", "reading image files")


@contextmanager
def _broken_image() -> Iterator[None]:
    """Decoders meet damaged files with almost any exception. Whichever it is, this image is broken, the set is not."""
    try:
        yield
    except (UndecodableError, ScaleLongError):
        raise
    except Exception as error:
        # The message of an UnidentifiedImageError holds a memory address.
        unknown = type(error).__name__ == "UnidentifiedImageError"
        raise UndecodableError("not an image, or not of a known format" if unknown else in_words(error)) from error


def open_image(data: bytes) -> Any:
    """An image of Pillow from the bytes of a file, of the listed formats alone; UndecodableError if it is none."""
    if not data:
        raise UndecodableError("empty file")
    with _broken_image():
        return _pillow().open(BytesIO(data), formats=prepare())


def read_header(data: bytes) -> Header:
    """Size and kind without decoding the pixels."""
    with _broken_image():
        return header_of(open_image(data))


def decode(image: bytes | Image, channels: int, height: int, width: int) -> tuple[np.ndarray, Header]:
    """Pixels as uint8 (C, height, width), and what the image was. `image`: a file's bytes, or an image of Pillow.

    The largest centred part with these proportions is taken, and resized if need be.
    """
    import numpy as np

    opened = open_image(image) if isinstance(image, bytes) else image
    with _broken_image():
        seen = header_of(opened)
        if min(opened.size) >= 4 * max(height, width):
            # JPEG can be decoded at a fraction of its size; twice what is asked for keeps the resizing sharp.
            room = 2 * max(height, width)
            opened.draft(None, (room, room))
        pixels = np.asarray(_resized(_converted(_upright(opened), channels), height, width))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), seen


def header_of(image: Image) -> Header:
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
    if image.mode == "F":
        raise UndecodableError("32-bit float pixels have no agreed range; convert them to 8 or 16 bits")
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        if channels != 4 and image.getchannel("A").getextrema() != (255, 255):
            image = _pillow().alpha_composite(_pillow().new("RGBA", image.size, "white"), image)
    wanted = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    return image if image.mode == wanted else image.convert(wanted)


def _eight_bits(image: Image) -> Image:
    import numpy as np

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise UndecodableError(f"values from {values.min()} to {values.max()} do not fit 16 bits")
    return _pillow().fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _resized(image: Image, height: int, width: int) -> Image:
    if image.size == (width, height):
        return image
    scale = min(image.width / width, image.height / height)
    left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    box = (max(left, 0), max(top, 0), min(left + width * scale, image.width), min(top + height * scale, image.height))
    return image.resize((width, height), _pillow().Resampling.BICUBIC, box=box)


# The same for tensors: arrays in memory, and items of data set objects.


def check_conversion(found: int, asked: int, name: str) -> None:
    if found != asked and not {found, asked} <= {1, 3, 4}:
        raise InvalidConfigError(
            f"{name!r} has {found} channels, which cannot become {asked}: only 1 (gray), 3 (RGB) and 4 (RGBA) convert"
        )


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Between gray, RGB and RGBA, with the rules of Pillow: ITU-R 601 luma, and alpha is laid on white."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 4:
        colour, alpha = images[:, :3].to(torch.int32), images[:, 3:].to(torch.int32)
        images = ((colour * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)
    if channels == 1 and images.shape[1] == 3:
        red, green, blue = images.to(torch.int32).unbind(1)
        return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]
    if images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    if channels == 4:
        images = torch.cat([images, torch.full_like(images[:, :1], 255)], dim=1)
    return images.contiguous()


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """The largest centred part with the asked proportions, then bicubic, antialiased."""
    found_height, found_width = images.shape[2:]
    if (found_height, found_width) == (height, width) or len(images) == 0:
        return images.reshape(len(images), images.shape[1], height, width)
    crop_height = min(found_height, max(1, round(found_width * height / width)))
    crop_width = min(found_width, max(1, round(found_height * width / height)))
    top, left = (found_height - crop_height) // 2, (found_width - crop_width) // 2
    part = images[:, :, top : top + crop_height, left : left + crop_width]
    # On bytes torch works as Pillow does, so that arrays and files come out alike.
    return F.interpolate(part, (height, width), mode="bicubic", antialias=True, align_corners=False)


def as_bytes(array: Any, where: str, signed: bool | None = None) -> Tensor:
    """A numpy array or a tensor as uint8. 16 bits and floats are scaled; other whole numbers must fit.

    Floats are in [-1, 1] if `signed`, else in [0, 1]; by default what the values say.
    """
    values = torch.as_tensor(array)
    if values.dtype == torch.uint8:
        return values.contiguous()
    if values.dtype == torch.bool:
        return values.to(torch.uint8) * 255
    if values.numel() == 0 or values.is_complex():
        raise UnreadableDataError(f"{where}: images are {values.dtype} {tuple(values.shape)}; best is uint8")
    if values.dtype == torch.uint16:
        return ((values.to(torch.int64) * 255 + 32767) // 65535).to(torch.uint8)
    least, most = values.min().item(), values.max().item()
    if values.is_floating_point():
        signed = least < 0 if signed is None else signed
        if (-1 if signed else 0) <= least and most <= 1:
            return ((values + 1) / 2 if signed else values).mul(255).round().to(torch.uint8)
    if least >= 0 and most <= 255 and (not values.is_floating_point() or bool((values == values.round()).all())):
        return values.to(torch.uint8)
    raise UnreadableDataError(
        f"{where}: images are {values.dtype} from {least} to {most}; they must be bytes, or floats in [0, 1] or [-1, 1]"
    )
