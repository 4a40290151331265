"""Every kind of image file, judged by Pillow's own conversions of images that were made here."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from scalelong.data import load_data
from scalelong.data.decode import UndecodableError, decode, read_header as look
from scalelong.errors import MixedSizesError

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)
GRAY = RNG.integers(0, 256, (6, 8), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (6, 8), dtype=np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(data: bytes, channels: int, height: int = 6, width: int = 8) -> np.ndarray:
    return decode(data, channels, height, width)[0]


def on_white(values: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha.astype(float)[..., None] / 255
    return values * share + 255 * (1 - share)


def test_colour_and_gray_are_exact():
    assert np.array_equal(pixels(encoded(Image.fromarray(COLOUR)), 3), COLOUR.transpose(2, 0, 1))
    assert np.array_equal(pixels(encoded(Image.fromarray(GRAY)), 1), GRAY[None])
    assert np.array_equal(pixels(encoded(Image.fromarray(GRAY)), 3), np.stack([GRAY] * 3))
    assert look(encoded(Image.fromarray(GRAY))).kind == "gray"
    assert look(encoded(Image.fromarray(COLOUR))).kind == "colour"


def test_alpha_is_kept_when_asked_for_and_laid_on_white_otherwise():
    data = encoded(Image.fromarray(np.dstack([COLOUR, ALPHA])))
    assert look(data).kind == "rgba"
    assert np.array_equal(pixels(data, 4), np.dstack([COLOUR, ALPHA]).transpose(2, 0, 1))
    assert np.abs(pixels(data, 3).transpose(1, 2, 0) - on_white(COLOUR, ALPHA)).max() <= 1


def test_palettes():
    colourful = Image.fromarray(COLOUR).quantize(16)
    assert look(encoded(colourful)).kind == "colour"
    assert np.array_equal(pixels(encoded(colourful), 3), np.asarray(colourful.convert("RGB")).transpose(2, 0, 1))
    gray = Image.fromarray(GRAY).convert("P")
    gray.putpalette([value for value in range(256) for _ in range(3)])
    assert look(encoded(gray)).kind == "gray"
    assert np.array_equal(pixels(encoded(gray), 1)[0], np.asarray(gray.convert("L")))
    see_through = Image.new("P", (8, 6), 1)
    see_through.putpalette([0, 0, 0, 200, 0, 0])
    assert pixels(encoded(see_through, transparency=1), 3).min() == 255
    assert pixels(encoded(see_through, "GIF", transparency=1), 3).min() == 255


def test_sixteen_bits_become_eight():
    deep = (GRAY.astype(np.uint16) << 8) | GRAY  # 257 times the byte
    assert np.array_equal(pixels(encoded(Image.fromarray(deep)), 1)[0], GRAY)
    assert np.array_equal(pixels(encoded(Image.fromarray(deep), "TIFF"), 1)[0], GRAY)
    assert look(encoded(Image.fromarray(deep))).kind == "gray"


def test_one_bit_cmyk_and_transparent_colour():
    bits = Image.fromarray(GRAY > 128)
    assert np.array_equal(pixels(encoded(bits), 1)[0], (GRAY > 128) * np.uint8(255))
    cmyk = Image.fromarray(COLOUR).convert("CMYK")
    assert np.array_equal(pixels(encoded(cmyk, "TIFF"), 3), COLOUR.transpose(2, 0, 1))
    red = Image.new("RGB", (8, 6), (200, 0, 0))
    assert pixels(encoded(red, transparency=(200, 0, 0)), 3).min() == 255


@pytest.mark.parametrize("form", ["WEBP", "JPEG2000", "TGA", "PPM", "BMP", "GIF", "TIFF"])
def test_other_formats(form):
    data = encoded(Image.new("RGB", (8, 6), (10, 200, 30)), form)
    assert (look(data).height, look(data).width) == (6, 8)
    assert np.abs(pixels(data, 3)[:, 3, 3].astype(int) - (10, 200, 30)).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_noted_orientation_is_applied(orientation, form):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(COLOUR), form, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    seen = look(data)
    assert (seen.height, seen.width) == upright.shape[:2]
    assert np.array_equal(pixels(data, 3, *upright.shape[:2]), upright.transpose(2, 0, 1))


def test_resizing_keeps_the_middle():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255
    assert pixels(encoded(Image.fromarray(wide)), 3, 10, 10).min() == 255
    tall = encoded(Image.fromarray(wide.transpose(1, 0, 2)))
    assert pixels(tall, 3, 5, 5)[:, 1:4].min() == 255
    assert pixels(tall, 1, 3, 7).shape == (1, 3, 7)
    smooth = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (64, 1))
    small = pixels(encoded(Image.fromarray(smooth)), 1, 16, 16)[0].astype(int)
    assert np.abs(small - smooth.reshape(16, 4, 16, 4).mean((1, 3))).max() <= 3


def test_large_jpegs_are_shrunk_while_decoding_without_visible_change():
    ramp = np.linspace(0, 1, 800)
    photo = (127.5 + 127.5 * np.sin(6 * ramp[:, None] + 9 * ramp[None]))[..., None].repeat(3, 2).astype(np.uint8)
    data = encoded(Image.fromarray(photo), "JPEG", quality=95)
    expected = np.asarray(Image.open(io.BytesIO(data)).resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(pixels(data, 3, 32, 32).transpose(1, 2, 0) - expected).max() <= 4


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 6), (value, 0, 0)) for value in (10, 200)]
    data = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert set(pixels(data, 3)[0].flatten()) == {10}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"no image at all", "not an image"),
        (encoded(Image.fromarray(COLOUR))[:80], "truncated"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\nshowpage\n", "not an image"),
        (encoded(Image.fromarray(GRAY.astype(np.float32)), "TIFF"), "float"),
    ],
    ids=["empty", "text", "truncated", "postscript", "float"],
)
def test_broken_images_have_a_reason(data, reason):
    with pytest.raises(UndecodableError, match=reason):
        decode(data, 3, 6, 8)


def save_all(folder, *images):
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    return str(folder)


def test_channels_come_from_the_data(tmp_path):
    gray, colour = Image.fromarray(GRAY), Image.fromarray(COLOUR)
    rgba, faded = Image.fromarray(np.dstack([COLOUR, ALPHA])), Image.fromarray(np.dstack([GRAY, ALPHA]))
    for name, images, channels in [
        ("gray", (gray, faded), 1),
        ("colour", (colour, colour), 3),
        ("rgba", (rgba, rgba), 4),
        ("gray-colour", (gray, colour), 3),
        ("colour-rgba", (colour, rgba), 3),
        ("gray-rgba", (gray, rgba), 3),
    ]:
        (tmp_path / name).mkdir()
        where = save_all(tmp_path / name, *images)
        for options in ({}, {"size": 4}, {"memory_limit": 0}, {"size": 4, "memory_limit": 0}):
            data = load_data(where, **options)
            assert data.channels == channels, (name, options)
            assert data.fetch([0, 1]).images.shape[:2] == (2, channels)
        for asked in (1, 3, 4):
            assert load_data(where, channels=asked).fetch([1]).images.shape == (1, asked, 6, 8)


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_mixed_sizes_need_a_size(tmp_path, memory_limit):
    where = save_all(tmp_path, *[Image.new("L", (20, 10))] * 140, Image.new("L", (30, 12)))
    with pytest.raises(MixedSizesError, match=r"20×10 \(140 images\), 30×12 \(1 images\).*`size` 10"):
        load_data(where, memory_limit=memory_limit)
    assert load_data(where, size=8, memory_limit=memory_limit).fetch([0, 140]).images.shape == (2, 1, 8, 8)
