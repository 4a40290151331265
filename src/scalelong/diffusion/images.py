"""From seeds and prompts to images, in batches that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, lacks_memory
from ..models import fused
from ..noise import NoiseProcess, Prediction
from ..optional import needs
from .conditions import Conditions, Unconditional
from .solvers import Conditional, SampleSettings, guided, in_precision, sample

if TYPE_CHECKING:
    from .latents import Autoencoder


CPU_MULTIPLE = 8
"""Batches on a CPU are filled up to a multiple of this: the kernels for matrices then treat every row alike, and an
image does not change in its last bits with the number of its neighbours."""


@dataclass(frozen=True)
class Request:
    """One image: its seed, and what it is to show, a class or a text (None without conditions)."""

    seed: int
    prompt: str | None = None

    @property
    def wish(self) -> str | None:
        """The prompt, by the name that it has in `samples.json`."""
        return self.prompt


def requests(count: int, seed: int, prompts: Sequence[str] = ()) -> list[Request]:
    """Image i has the seed `seed + i`; several prompts take turns."""
    if count < 1:
        raise InvalidConfigError(f"the number of images must be at least 1, got {count}")
    if not 0 <= seed <= 2**62:
        raise InvalidConfigError(f"the seed must be from 0 to 2^62, got {seed}")
    return [Request(seed + i, prompts[i % len(prompts)] if prompts else None) for i in range(count)]


@dataclass(frozen=True)
class ImageMaker:
    """A trained network with all that it needs to make images."""

    model: nn.Module
    network: Conditional
    process: NoiseProcess
    prediction: Prediction
    shape: tuple[int, int, int]
    conditions: Conditions
    autoencoder: Autoencoder | None

    def generate(
        self,
        wanted: Sequence[Request],
        settings: SampleSettings,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Iterator[tuple[list[Request], Tensor]]:
        """Batches of requests and their images, uint8 (B, C, H, W). A batch too large for the memory is halved."""
        if batch_size < 1:
            raise InvalidConfigError(f"batch_size must be at least 1, got {batch_size}")
        self._check(wanted)
        self.model.to(device)
        start = 0
        while start < len(wanted):
            part = list(wanted[start : start + batch_size])
            try:
                with fused(self.model):
                    images = self._batch(part, settings, torch.device(device))
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
                # On a CPU, torch raises RuntimeError for it.
                if batch_size == 1 or not (isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)):
                    raise
                batch_size = (batch_size + 1) // 2
                continue
            yield part, images
            start += len(part)

    def all(
        self,
        wanted: Sequence[Request],
        settings: SampleSettings,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The same as one tensor."""
        batches = self.generate(wanted, settings, batch_size=batch_size, device=device)
        return torch.cat([images for _, images in batches])

    def _check(self, wanted: Sequence[Request]) -> None:
        """A prompt that the network cannot draw is an error now, not after an hour."""
        prompts = {request.prompt for request in wanted if request.prompt is not None}
        self.conditions.check(sorted(prompts))
        if any(request.prompt is None for request in wanted) and not isinstance(self.conditions, Unconditional):
            raise InvalidConfigError(
                "this model draws what it is asked for: give a text (--prompt) or a class (--class)"
            )

    def _batch(self, part: list[Request], settings: SampleSettings, device: torch.device) -> Tensor:
        filled = part + [part[-1]] * (-len(part) % CPU_MULTIPLE if device.type == "cpu" else 0)
        condition = self.conditions.from_prompts([request.prompt for request in filled if request.prompt is not None])
        condition = None if condition is None else condition.to(device)
        network = in_precision(self.network, settings.precision, device)
        x = sample(
            guided(network, condition, self.conditions.null(), settings.guidance),
            self.process,
            self.prediction,
            self.shape,
            [request.seed for request in filled],
            sampler=settings.sampler,
            steps=settings.steps,
            device=device,
            clip=self.autoencoder is None,
        )
        return to_bytes(x if self.autoencoder is None else self.autoencoder.decode(x))[: len(part)]


def to_bytes(images: Tensor) -> Tensor:
    """[-1, 1] to uint8, on the CPU. What is not finite is an error, not a colour."""
    if not bool(torch.isfinite(images).all()):
        raise InvalidConfigError(
            "the model gave images that are not finite: it is broken, or the sampler needs more steps"
        )
    return ((images.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# Images side by side

GAP = 2
SMALLEST_SIDE = 64
"""Smaller images are enlarged by a whole factor: thumbnails of 8 pixels cannot be judged."""


def image_grid(images: Tensor, columns: int | None = None) -> Tensor:
    """(B, C, H, W), uint8 or in [-1, 1], to one uint8 image (C, H', W')."""
    pixels = images.cpu()
    if pixels.dtype != torch.uint8:
        pixels = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
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


def as_picture(image: Tensor) -> Any:
    """A uint8 image (C, H, W) with 1, 3 or 4 channels as one of Pillow, which notebooks show; of others, the first."""
    pillow = needs("PIL.Image", "train", "sample grids")
    array = image.permute(1, 2, 0).contiguous().numpy()
    return pillow.fromarray(array if array.shape[2] in (3, 4) else array[:, :, 0])
