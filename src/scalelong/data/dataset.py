"""What training sees of a data set: images by number, as bytes.

Access is random, not sequential, so that the order of training can be a pure function of seed and step, and a run
resumes without going through the data that it has seen.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidConfigError
from .broken import BrokenImage, Tally


@dataclass(frozen=True)
class Batch:
    images: Tensor  # uint8 (B, C, H, W)
    labels: Tensor | None  # int64 (B,)
    captions: list[str] | None


@dataclass(frozen=True)
class Annotations:
    """What is known of every image apart from its pixels."""

    labels: Tensor | None = None  # int64 (N,)
    classes: tuple[str, ...] | None = None
    captions: list[str] | None = None

    def take(self, rows: Tensor) -> Annotations:
        labels = None if self.labels is None else self.labels[rows]
        captions = None if self.captions is None else [self.captions[row] for row in rows.tolist()]
        return Annotations(labels, self.classes, captions)

    def digest(self) -> str:
        sha = hashlib.sha256(repr(self.classes).encode())
        sha.update(b"unlabelled" if self.labels is None else self.labels.contiguous().view(torch.uint8).numpy().data)
        sha.update(repr(self.captions).encode())
        return sha.hexdigest()


class ImageData(ABC):
    """Images of one size, with labels and captions where there are any."""

    name: str  # how it was asked for
    channels: int
    height: int
    width: int
    in_memory: bool  # one uint8 tensor; fetching is indexing
    annotations: Annotations
    tally: Tally

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The images of these rows, uint8 (B, C, H, W), and the rows that they really are of."""

    @abstractmethod
    def _take(self, rows: Tensor) -> ImageData:
        """The data set of these rows alone, without copying pixels."""

    @abstractmethod
    def _pixel_digest(self) -> str:
        """A hash of all that decides the pixels."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, None where there are no labels."""
        return self.annotations.classes

    @property
    def has_captions(self) -> bool:
        return self.annotations.captions is not None

    @property
    def broken(self) -> tuple[BrokenImage, ...]:
        """The images that could not be read and were skipped, so far."""
        return tuple(self.tally.found.values())

    def fetch(self, indices: Tensor | Sequence[int]) -> Batch:
        """The images with these numbers, in this order; the same numbers always give the same batch."""
        rows = self._checked(indices)
        images, rows = self._read(rows)
        about = self.annotations.take(rows)
        return Batch(images, about.labels, about.captions)

    def fingerprint(self) -> str:
        """A sha256 that changes when images, labels or captions do.

        In memory it is taken over the decoded pixels, so that it does not depend on where or how the images are stored.
        For sets too large for that it is taken over names, stored sizes and settings.
        """
        if not hasattr(self, "_fingerprint"):
            text = f"{self.channels}x{self.height}x{self.width} {self._pixel_digest()} {self.annotations.digest()}"
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprint

    def split(self, held_out: int, seed: int = 0) -> tuple[ImageData, ImageData]:
        """(training, held-out): `held_out` images drawn without replacement; the same for the same seed."""
        if not 0 < held_out < len(self):
            raise InvalidConfigError(
                f"held_out must leave images on both sides: between 1 and {len(self) - 1} for the {len(self)} images "
                f"of {self.name!r}, not {held_out}"
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self._take(order[held_out:].sort().values), self._take(order[:held_out].sort().values)

    def describe(self) -> str:
        """One line for logs."""
        parts = [f"{self.name}: {len(self)} images, {self.channels}×{self.height}×{self.width}"]
        if self.classes is not None:
            parts.append(f"{len(self.classes)} classes")
        if self.has_captions:
            parts.append("captions")
        parts.append("in memory" if self.in_memory else "streamed")
        if self.broken:
            parts.append(f"{len(self.broken)} broken images skipped")
        return ", ".join(parts)

    def _checked(self, indices: Tensor | Sequence[int]) -> Tensor:
        rows = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices))
        if rows.numel() == 0:
            return torch.empty(0, dtype=torch.int64)
        if rows.dim() != 1 or rows.dtype == torch.bool or rows.is_floating_point():
            raise InvalidConfigError(
                f"indices must be a list of whole numbers, not {rows.dtype} of {tuple(rows.shape)}"
            )
        rows = rows.to("cpu", torch.int64)
        if int(rows.min()) < 0 or int(rows.max()) >= len(self):
            raise IndexError(
                f"indices {int(rows.min())}..{int(rows.max())} are outside the {len(self)} images of {self.name!r}"
            )
        return rows


class MemoryData(ImageData):
    """All images as one uint8 tensor (N, C, H, W); parts made by `split` share it."""

    in_memory = True

    def __init__(
        self,
        name: str,
        images: Tensor,
        annotations: Annotations | None = None,
        tally: Tally | None = None,
        rows: Tensor | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise InvalidConfigError(f"images must be uint8 (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
        self.name = name
        self.images = images
        self.channels, self.height, self.width = images.shape[1:]
        self.annotations = annotations or Annotations()
        self.tally = tally or Tally(name, len(images), 0)
        self._rows = rows

    def __len__(self) -> int:
        return len(self.images) if self._rows is None else len(self._rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.images.index_select(0, rows if self._rows is None else self._rows[rows]), rows

    def _take(self, rows: Tensor) -> MemoryData:
        inner = rows if self._rows is None else self._rows[rows]
        return MemoryData(self.name, self.images, self.annotations.take(rows), self.tally, inner)

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256()
        for rows in torch.arange(len(self)).split(4096):
            sha.update(self._read(rows)[0].numpy().data)
        return sha.hexdigest()
