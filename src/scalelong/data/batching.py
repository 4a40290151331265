"""From a data set and an order to batches, and from bytes to what a network takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import DataError
from .broken import BrokenImage
from .dataset import Batch, ImageData


def batches(
    data: ImageData, order: Iterable[Tensor | Sequence[int]], workers: int = 0, prefetch: int = 4
) -> Iterator[Batch]:
    """The batches of `order`, an iterable (also an endless one) of index lists.

    Sets in memory are indexed here and now. Others are decoded by `workers` processes, each `prefetch` batches ahead.
    The global random state is never touched, so that the number of workers does not change a training run.
    """
    if data.in_memory or workers == 0:
        for indices in order:
            yield data.fetch(indices)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: as asked
        loader = torch.utils.data.DataLoader(
            _Fetch(data),
            batch_size=None,
            sampler=order,
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # a DataLoader without its own draws from the global one
        )
        results = iter(loader)
    for batch, broken in results:
        for image in broken:  # each worker counts its own; the limit is for all
            data.tally.add(image)
        if isinstance(batch, DataError):
            raise batch
        yield batch


def to_float(images: Tensor, flip: Tensor | None = None) -> Tensor:
    """uint8 to float32 in [-1, 1]; images whose entry in the bool mask `flip` is True are mirrored left to right."""
    if flip is not None:
        images = torch.where(flip.to(images.device)[:, None, None, None], images.flip(-1), images)
    return images.to(torch.float32).div_(127.5).sub_(1)


class _Fetch(torch.utils.data.Dataset):
    """A data set whose items are whole batches. Errors travel as values: a DataLoader would bury their message."""

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __getitem__(self, indices: Tensor | Sequence[int]) -> tuple[Batch | DataError, tuple[BrokenImage, ...]]:
        try:
            return self.data.fetch(indices), self.data.broken
        except DataError as error:
            return error, ()


def _unchanged(item: object) -> object:
    return item
