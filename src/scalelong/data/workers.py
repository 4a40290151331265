"""Batches in a given order, fetched here or by worker processes, and from bytes to what a network takes."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, DataWorkerError
from .dataset import Batch, BrokenImage, ImageData

WAIT_FOR_END = 1.0  # seconds


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

    Sets in memory are indexed here and now. Others, also those in a mapped file, are read by `workers` processes, each
    `prefetch` batches ahead. `pin` puts batches into pinned memory, from which an accelerator copies them while the
    program goes on. The global random state is never touched, so that the number of workers does not change a run.
    """
    here = data.in_memory or workers == 0
    for batch in (data.fetch(indices) for indices in order) if here else _from_workers(data, order, workers, prefetch):
        yield batch.pin_memory() if pin else batch


def _from_workers(
    data: ImageData, order: Iterable[Tensor | Sequence[int]], workers: int, prefetch: int
) -> Iterator[Batch]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: as asked
        loader = torch.utils.data.DataLoader(
            _Fetch(data),
            batch_size=None,
            sampler=order,
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=_unchanged,
            worker_init_fn=_outlive_signals,
            generator=torch.Generator(),  # a DataLoader without its own draws from the global one
        )
        results = _start_workers(loader)
    try:
        while True:
            try:
                batch, broken = next(results)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # by torch, or by the pipe that a dead worker left
                raise _worker_error(results, error) from error
            for image in broken:  # each worker counts its own; the limit is for all
                data.broken_images.add(image)
            data.broken_images.check()
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        # They do not listen to SIGTERM, by which Python would end them, and wait for ever.
        for worker in getattr(results, "_workers", ()):
            if worker.is_alive():
                worker.kill()


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


def _outlive_signals(_: int) -> None:
    """In a worker. Ctrl-C and SIGTERM to all processes of a group are for the main one, which saves and then ends its
    workers; they also end by themselves when it is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _start_workers(loader: torch.utils.data.DataLoader) -> Any:
    """torch notices a dead worker by a signal, and raises wherever the main process happens to be, in the middle of an
    update of the weights too. Without its handler it notices when the next batch is asked for."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    results = iter(loader)
    if before is not None:
        signal.signal(signal.SIGCHLD, before)
    return results


def _worker_error(results: Any, error: Exception) -> DataWorkerError:
    workers = getattr(results, "_workers", ())
    if workers:  # a pipe breaks a moment before the system tells how its process ended
        wait([worker.sentinel for worker in workers], timeout=WAIT_FOR_END)
    codes = [worker.exitcode for worker in workers if worker.exitcode]
    names = [signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes]
    how = f"ended by {', '.join(dict.fromkeys(names))}" if names else f"failed: {str(error).partition(chr(10))[0]}"
    memory = ": SIGKILL often means that the memory is used up" if "SIGKILL" in names else ""
    return DataWorkerError(
        f"a process that reads images {how}{memory}. Give fewer `workers` (0 reads in the main process), then run the "
        "same command to continue"
    )
