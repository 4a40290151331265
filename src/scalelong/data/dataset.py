"""Data sets as training sees them: images of one size by number, as bytes, with labels and captions.

`ImageData` is what every source becomes, `MemoryData` the one whose pixels are a tensor. Access is random, so that the
order of training can be a pure function of seed and step, and a run resumes without reading what it has seen.
`batches` fetches them in a given order, here or in threads.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..console import counted
from ..errors import BrokenImagesError, InvalidConfigError, require
from .decode import check_conversion, convert_channels, resize

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may be asked of any source: the options of `load_data`."""

    size: int | tuple[int, int] | None = None
    channels: int | None = None
    split: str = "train"
    memory_limit: int = 2 * 1024**3
    skip_broken: bool | int | float = 0.01
    limit: int | None = None
    progress: Progress | None = None
    image_cache: str = "none"

    def __post_init__(self) -> None:
        sides = self.size if isinstance(self.size, tuple | list) else (self.size, self.size)
        wanted = [("size", side, 1) for side in sides] + [("channels", self.channels, 1), ("limit", self.limit, 1)]
        wanted += [("memory_limit", self.memory_limit, 0)]
        for name, value, least in wanted:
            whole = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
            require(whole, f"`{name}` must be a whole number of at least {least}, got {getattr(self, name)!r}")
        known = self.image_cache in ("auto", "none")
        require(known, f"`image_cache` must be auto or none, got {self.image_cache!r}; SCALELONG_CACHE is its place")
        require(len(sides) == 2, f"`size` must be a side or (height, width), got {self.size!r}")
        most = 1 if isinstance(self.skip_broken, float) else math.inf
        fine = isinstance(self.skip_broken, int | float) and 0 <= self.skip_broken <= most
        require(fine, f"`skip_broken` must be a number, a share from 0.0 to 1.0, or True, got {self.skip_broken!r}")

    @property
    def shape(self) -> tuple[int, int] | None:
        """(height, width), or None if the images decide."""
        if self.size is None:
            return None
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        return height, width

    def allowed_broken(self, total: int) -> int:
        """A share is rounded up, so that one damaged file does not stop a small folder."""
        share = isinstance(self.skip_broken, bool | float)
        return math.ceil(self.skip_broken * total) if share else int(self.skip_broken)

    def fits(self, count: int, channels: int, height: int, width: int) -> bool:
        return count * channels * height * width <= self.memory_limit

    def chosen(self, total: int) -> Tensor:
        """`limit` rows, evenly spread: the first rows of a sorted set would all be of one class."""
        if self.limit is None or self.limit >= total:
            return torch.arange(total)
        return torch.arange(self.limit) * total // self.limit


# Broken images

SHOWN = 50
"""Names in a message: enough to repair a folder in one go."""


@dataclass(frozen=True)
class BrokenImage:
    """An image that cannot be read, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass
class BrokenImages:
    """The broken images of a data set, by name, and how many of them are allowed."""

    where: str
    total: int
    allowed: int = 0
    found: dict[str, BrokenImage] = field(default_factory=dict)

    def add(self, broken: BrokenImage) -> None:
        self.found.setdefault(broken.name, broken)

    def check(self) -> None:
        """Raise BrokenImagesError if there are more than allowed, or no others."""
        if len(self.found) > min(self.allowed, self.total - 1):
            raise BrokenImagesError(
                f"{self.where}: {len(self.found)} of {self.total} images cannot be read, {self.allowed} are allowed: "
                f"{self.names()}. Repair or remove them, or go on without them with `skip_broken`"
            )

    def in_order(self) -> tuple[BrokenImage, ...]:
        """By name: threads find them in any order."""
        return tuple(sorted(self.found.values(), key=lambda broken: broken.name))

    def names(self) -> str:
        return first_names([str(broken) for broken in self.in_order()])

    def warn(self) -> None:
        if self.found:
            count = len(self.found)
            logger.warning("%s: %d of %d images are broken, skipped: %s", self.where, count, self.total, self.names())


def first_names(names: Sequence[str]) -> str:
    """Names for an error: the first fifty, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def sizes_in_words(sizes: Collection[tuple[int, int]]) -> str:
    """Sizes (height, width) that differ."""
    least, most = (pick(sizes, key=math.prod) for pick in (min, max))
    return f"{len(sizes)} different sizes, {least[1]}×{least[0]} to {most[1]}×{most[0]}"


# Data sets


@dataclass(frozen=True)
class Batch:
    """Some images with what is known of them."""

    images: Tensor  # uint8 (B, C, H, W)
    labels: Tensor | None  # int64 (B,)
    captions: list[str] | None

    def pin_memory(self) -> Batch:
        """The same in memory from which an accelerator can copy while the program goes on."""
        labels = None if self.labels is None else self.labels.pin_memory()
        return Batch(self.images.pin_memory(), labels, self.captions)


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


def split_rows(count: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers of the images that are trained on, and of those that are held out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values


def require_both_sides(held_out: int, count: int, name: str) -> None:
    """Some images are held out, and some are left to train on."""
    if not 0 < held_out < count:
        raise InvalidConfigError(
            f"`held_out` must leave images on both sides: between 1 and {count - 1} for the {count} images of "
            f"{name!r}, not {held_out}; give `held_out` {max(1, count // 10)}, or 0 for none"
        )


class ImageData(ABC):
    """Images of one size, with labels and captions where there are any."""

    name: str  # how it was asked for
    channels: int
    height: int
    width: int
    in_memory: bool = False  # one tensor in memory: fetching is indexing, and workers would only cost time
    whereabouts: str = "streamed"
    annotations: Annotations
    broken_images: BrokenImages
    unread: tuple[str, ...] = ()  # files next to the images that are neither images nor about them
    stored_sizes: tuple[tuple[int, int], ...] = ()  # (height, width) of the stored images, where they differ
    rows: Tensor  # int64 (N,): which of the stored images these are; parts made by `split` share the store

    @abstractmethod
    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The images with these numbers, uint8 (B, C, H, W), and the numbers that they really have."""

    @abstractmethod
    def _pixel_digest(self) -> str:
        """A hash of all that decides the pixels."""

    def __len__(self) -> int:
        return len(self.rows)

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
        return self.broken_images.in_order()

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
        require_both_sides(held_out, len(self), self.name)
        training, apart = split_rows(len(self), held_out, seed)
        return self.take(training), self.take(apart)

    def take(self, rows: Tensor) -> Self:
        """The data set of these numbers alone, without copying pixels."""
        part = copy.copy(self)
        vars(part).pop("_fingerprint", None)
        part.rows, part.annotations = self.rows[rows], self.annotations.take(rows)
        return part

    def describe(self) -> str:
        """One line for logs."""
        parts = [f"{self.name}: {counted(len(self), 'image')}, {self.channels}×{self.height}×{self.width}"]
        if self.stored_sizes:
            parts.append(f"made from {sizes_in_words(self.stored_sizes)}")
        if self.classes is not None:
            parts.append(f"{len(self.classes)} classes")
        if self.has_captions:
            parts.append("captions")
        parts.append(self.whereabouts)
        if self.broken:
            parts.append(f"{counted(len(self.broken), 'broken image')} skipped")
        if self.unread:
            were = "file was" if len(self.unread) == 1 else "files were"
            heic = any(name.lower().endswith((".heic", ".heif")) for name in self.unread)
            hint = "; pip install 'scalelong[heic]' reads .heic" if heic else ""
            parts.append(f"{len(self.unread)} {were} not read: {first_names(self.unread)}{hint}")
        return ", ".join(parts)

    def _checked(self, indices: Tensor | Sequence[int]) -> Tensor:
        rows = indices if isinstance(indices, Tensor) else torch.tensor(list(indices), dtype=torch.int64)
        require(
            rows.dim() == 1 and rows.dtype == torch.int64, f"indices must be whole numbers (int64), not {rows.dtype}"
        )
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise IndexError(f"{rows.tolist()[:20]} are not all among the {len(self)} images of {self.name!r}")
        return rows.cpu()


class MemoryData(ImageData):
    """All images as one uint8 tensor (N, C, H, W)."""

    in_memory, whereabouts = True, "in memory"

    def __init__(
        self,
        name: str,
        images: Tensor,
        annotations: Annotations | None = None,
        broken_images: BrokenImages | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise InvalidConfigError(f"images must be uint8 (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
        self.name, self.images, self.rows = name, images, torch.arange(len(images))
        self.channels, self.height, self.width = images.shape[1:]
        self.annotations = annotations or Annotations()
        self.broken_images = broken_images or BrokenImages(name, len(images))

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.images.index_select(0, self.rows[rows]), rows

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256()
        for rows in self.rows.split(CHUNK):
            sha.update(self.images.index_select(0, rows).numpy().data)
        return sha.hexdigest()


CHUNK = 1024  # images converted at a time, to bound the memory


def from_array(name: str, images: Tensor, annotations: Annotations, options: Options) -> MemoryData:
    """A data set of uint8 images (N, C, H, W) in the asked size and channels."""
    rows = options.chosen(len(images))
    images, annotations = images[rows], annotations.take(rows)
    channels = options.channels or images.shape[1]
    check_conversion(images.shape[1], channels, name)
    height, width = options.shape or images.shape[2:]
    parts = [resize(convert_channels(part, channels), height, width) for part in images.split(CHUNK)]
    return MemoryData(name, torch.cat(parts), annotations)


# Batches, and from bytes to what a network takes


def to_float(images: Tensor, flip: Tensor | None = None) -> Tensor:
    """uint8 to float32 in [-1, 1]; images whose entry in the bool mask `flip` is True are mirrored left to right."""
    if flip is not None:
        images = torch.where(flip.to(images.device)[:, None, None, None], images.flip(-1), images)
    return images.to(torch.float32).div_(127.5).sub_(1)


def batches(
    data: ImageData,
    order: Iterable[Tensor | Sequence[int]],
    workers: int = 0,
    prefetch: int = 4,
    *,
    pin: bool = False,
) -> Iterator[Batch]:
    """The batches of `order`, an iterable (also an endless one) of index lists.

    Sets in memory are indexed here and now. Others, also those in a mapped file, are read by `workers` threads, each
    `prefetch` batches ahead: Pillow, numpy and torch do not hold the interpreter's lock while they decode and copy.
    `pin` puts batches into pinned memory, from which an accelerator copies them while the program goes on.
    """
    here = data.in_memory or workers == 0
    for batch in map(data.fetch, order) if here else _read_ahead(data, order, workers, prefetch):
        yield batch.pin_memory() if pin else batch


def _read_ahead(
    data: ImageData, order: Iterable[Tensor | Sequence[int]], workers: int, prefetch: int
) -> Iterator[Batch]:
    pool, waiting = ThreadPoolExecutor(workers), deque[Future[Batch]]()
    try:
        for indices in order:
            waiting.append(pool.submit(data.fetch, indices))
            if len(waiting) > workers * prefetch:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
