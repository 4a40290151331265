"""Training on a CPU: each core takes its own images through the whole network, unless that is a small one.

The usual way is that all cores share every operation. They then wait for each other after each of them, thousands of
times in a step, and every tensor is that of the whole batch, too large for a cache. Here the cores meet once in a step,
and each goes through its images in chunks that stay in its cache; only one chunk's activations exist at a time.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TrainConfig, require
from ..finding import SkipHost
from ..models import Denoiser

ROWS, FEWEST_ROWS, ENTRIES = 1024, 512, 2**18
"""Tokens of a chunk at most, and at least where the entries of its features (B·L·D) are too many: more do not fit a
cache, fewer make thin matrix products and more gradients to add up (`scalelong lab bench step`)."""

SMALL = 2**16
"""Entries of one core's features (B·L·D) below which all cores share every operation: there the time is Python's, of
which only one thread runs at once (`scalelong lab bench step/demo`)."""

LossesOf = Callable[[Denoiser, slice], Tensor]
"""The losses of some images of a batch, one for each."""


class CoreParallel:
    """Adds the gradient of a batch to the parameters of a model.

    The result depends on the number of cores by rounding only, and for a given number it is the same in every bit:
    which core takes which images is fixed, and so is the order in which their gradients are added.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.count = model, count
        self.copies = [sharing_copy(model) for _ in range(count - 1)]
        self.networks = [Denoiser(each) for each in (model, *self.copies)]
        self.pool = ThreadPoolExecutor(max(1, count - 1), "core", initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, losses_of: LossesOf, images: int, weight: float) -> Tensor:
        """The mean loss of a batch of `images` images; its gradient is multiplied by `weight`."""
        slices = chunks(images, images_at_once(self.model, images, self.count), self.count)

        def work(core: int) -> list[Tensor]:
            return [
                _backward_chunk(losses_of, self.networks[core], part, weight / images)
                for part in slices[core :: self.count]
            ]

        threads = torch.get_num_threads()
        # Not only this thread's: MKL has one number for all threads.
        torch.set_num_threads(1)
        try:
            others = [self.pool.submit(work, core) for core in range(1, min(self.count, len(slices)))]
            try:
                first = work(0)
            finally:
                finished = [other.exception() for other in others]
            for error in finished:
                if error is not None:
                    raise error
        finally:
            torch.set_num_threads(threads)
        self._add_gradients()
        return torch.stack([*first, *(loss for other in others for loss in other.result())]).sum() / images

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Add the gradients of the copies to those of the model, copy after copy."""
        for each in self.copies:
            sums, gradients = [], []
            for own, other in zip(self.model.parameters(), each.parameters(), strict=True):
                gradient, other.grad = other.grad, None
                if own.grad is None:
                    own.grad = gradient
                elif gradient is not None:
                    sums.append(own.grad)
                    gradients.append(gradient)
            if sums:
                torch._foreach_add_(sums, gradients)  # pyright: ignore[reportPrivateImportUsage]

    def close(self) -> None:
        self.pool.shutdown()


def _backward_chunk(losses_of: LossesOf, network: Denoiser, part: slice, factor: float) -> Tensor:
    loss = losses_of(network, part).sum()
    (loss * factor).backward()
    return loss.detach()


def make_cores(config: TrainConfig, model: nn.Module, accelerator: Any) -> CoreParallel | None:
    """None where all cores share every operation: on accelerators, and for networks of unknown kinds."""
    on_cpu, precision = accelerator.device.type == "cpu", accelerator.mixed_precision
    if not splits(config, model, on_cpu=on_cpu, precision=precision, processes=accelerator.num_processes):
        require(
            not config.hardware.split_cores,
            "split_cores is for one process on a CPU, in float32 or bf16, without compile; leave it out here",
        )
        return None
    if config.hardware.split_cores:
        obstacles = [name for name, module in model.named_modules() if _mixes_or_draws(module)]
        require(not obstacles, f"split_cores is not for networks with batch norm or dropout, as at {obstacles[:3]}")
    return CoreParallel(model, torch.get_num_threads())


def splits(config: TrainConfig, model: nn.Module, *, on_cpu: bool, precision: str, processes: int) -> bool:
    """Not in fp16, whose gradients have to be scaled as a whole."""
    wanted = config.hardware.split_cores
    if wanted is None:  # models that merge their skips themselves are ours, and take images one by one
        wanted = isinstance(model, SkipHost) and not any(map(_mixes_or_draws, model.modules()))
        wanted = wanted and _is_enough(config, model, torch.get_num_threads())
    return wanted and on_cpu and precision in ("no", "fp32", "bf16") and processes == 1 and not config.hardware.compile


def _is_enough(config: TrainConfig, model: nn.Module, cores: int) -> bool:
    """Whether each core has enough to do that the threads seldom wait for Python's lock. The size alone decides."""
    site = model.skip_sites()[0] if isinstance(model, SkipHost) else None
    if cores == 1 or site is None or site.tokens is None:
        return True
    images = config.batch_size // config.hardware.accumulation // cores
    return images * site.tokens * site.channels >= SMALL


def _mixes_or_draws(module: nn.Module) -> bool:
    batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    # Cores would draw from one random generator, in random order. A dropout of 0 draws nothing.
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return batch_norm or dropout


def images_at_once(model: nn.Module, images: int, cores: int) -> int:
    """Images of a chunk."""
    share = -(-images // cores)
    site = model.skip_sites()[0] if isinstance(model, SkipHost) else None
    if site is None or site.tokens is None:
        return share
    rows = min(ROWS, max(FEWEST_ROWS, ENTRIES / site.channels))
    return min(share, max(1, round(rows / site.tokens)))


def chunks(images: int, at_most: int, cores: int) -> list[slice]:
    """Slices of nearly equal size, as many for each core if there are enough images."""
    count = -(-images // at_most)
    count = min(images, -(-count // cores) * cores)
    bounds = [round(i * images / count) for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy with gradients of its own, whose weights and buffers are the very memory of the model's."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
