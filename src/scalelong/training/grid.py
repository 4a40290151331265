"""Many images as one."""

import io
import math
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MissingDependencyError
from ..files import write_bytes

GAP = 2
SMALLEST_SIDE = 32
"""Smaller images are enlarged by a whole factor: thumbnails of 8 pixels cannot be judged."""


def image_grid(images: Tensor, columns: int | None = None) -> Tensor:
    """(B, C, H, W) in [-1, 1] to one uint8 image (C, H', W')."""
    pixels = ((images.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    enlarge = max(1, math.ceil(SMALLEST_SIDE / min(pixels.shape[2:])))
    pixels = pixels.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
    count, channels, height, width = pixels.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = torch.full((channels, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP), 255, dtype=torch.uint8)
    for i, image in enumerate(pixels):
        top, left = GAP + (i // columns) * (height + GAP), GAP + (i % columns) * (width + GAP)
        grid[:, top : top + height, left : left + width] = image
    return grid


def save_png(path: Path, image: Tensor) -> None:
    """Write a uint8 image (C, H, W) with 1, 3 or 4 channels; of others, the first is shown."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("pillow", "train", "writing sample grids") from error
    array = image.permute(1, 2, 0).contiguous().numpy()
    array = array if array.shape[2] in (3, 4) else array[:, :, 0]
    content = io.BytesIO()
    Image.fromarray(array).save(content, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.getvalue())
