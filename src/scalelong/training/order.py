"""Which images make up a step: a new permutation every epoch, computed from the step alone."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..randomness import generator


class DataOrder:
    """The global batch of step s holds positions s·B to (s+1)·B - 1 of an endless row of shuffled epochs."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=generator(self.seed, "order", epoch))

    def epoch(self, step: int) -> float:
        """How often the data have been seen before this step."""
        return step * self.batch_size / self.count

    def indices(self, step: int, positions: range) -> Tensor:
        """The images at some positions of the step's batch."""
        found: list[Tensor] = []
        position, stop = step * self.batch_size + positions.start, step * self.batch_size + positions.stop
        while position < stop:
            epoch, offset = divmod(position, self.count)
            length = min(stop - position, self.count - offset)
            found.append(self._epoch(epoch)[offset : offset + length])
            position += length
        return torch.cat(found)

    def batches(self, steps: range, parts: Sequence[range]) -> Iterator[Tensor]:
        """The parts of each step, one after the other."""
        for step in steps:
            for part in parts:
                yield self.indices(step, part)


def split_batch(batch_size: int, processes: int, accumulation: int, process: int) -> list[range]:
    """The positions of the global batch that one process works on, in parts that are accumulated."""
    share = batch_size // processes
    part = share // accumulation
    start = process * share
    return [range(start + i * part, start + (i + 1) * part) for i in range(accumulation)]
