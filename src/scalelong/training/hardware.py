"""The machine under a run: signals, switches of torch, the precision of a new run, and a CPU's cores."""

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from statistics import median
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import HardwareConfig, TrainConfig
from ..errors import require
from ..finding import SkipHost
from ..models import Denoiser, fuse_
from ..randomness import global_state, restore_global_state
from ..runs import DataShape, build_model
from ..tracing import isolated_run

# Signals wait for the end of a step, so that nothing that was computed is lost

IMPATIENT_AFTER = 1.0
"""Seconds after which a second Ctrl-C stops at once. Launchers repeat the first one."""
STOPPING = (
    "stopping after this step, and saving; Ctrl-C once more stops now, without what came after the last checkpoint"
)


class Interrupt:
    """Within a `with` block SIGTERM and Ctrl-C only set `requested`, so that the loop can save before it ends.

    So do a closed terminal (SIGHUP), the signals that schedulers of clusters send before the end (SIGUSR1, SIGUSR2),
    and a limit of processor time (SIGXCPU).
    """

    SIGNALS: ClassVar[list[signal.Signals]] = [
        getattr(signal, name)
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
        if hasattr(signal, name)  # Windows has the first two
    ]
    latest: ClassVar[str | None] = None
    """The signal that ended the latest block early; the command line makes its exit code of it."""

    def __init__(self) -> None:
        self.requested: str | None = None
        Interrupt.latest = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
            Interrupt.latest = self.requested
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"\n{self.requested}: {STOPPING}\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._since > IMPATIENT_AFTER:
            raise KeyboardInterrupt


@contextmanager
def switches(hardware: HardwareConfig) -> Iterator[None]:
    """torch's switches for speed on NVIDIA GPUs, which hold for the whole process: afterwards they are as before."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = products.allow_tf32
    flags = {"benchmark": cudnn.benchmark or hardware.cudnn_benchmark, "allow_tf32": cudnn.allow_tf32 or hardware.tf32}
    try:
        products.allow_tf32 = before or hardware.tf32
        with cudnn.flags(enabled=cudnn.enabled, deterministic=cudnn.deterministic, **flags):
            yield
    finally:
        products.allow_tf32 = before


# The precision of a new run: bfloat16 where it makes this network faster here, else float32. A run records what was
# chosen, so that it goes on in the same bits wherever it is continued.

FASTER = 1.25
"""How many times as fast as float32 bfloat16 must be on a CPU: far from 1, so that two starts choose alike."""
VARIABLE = "SCALELONG_PRECISION"
"""The precision that auto takes in this environment, without measuring: for hosts that differ, and for tests."""
FEW, TURNS, SECONDS = 4, 5, 0.1
"""Images per thread of the first pass; passes of each precision that are compared, and about how long one may take."""


def choose_precision(
    config: TrainConfig, shape: DataShape, device: torch.device, model: nn.Module | None = None
) -> str:
    """ "bf16" or "fp32"; what accelerate's launcher or SCALELONG_PRECISION say comes first."""
    given = (os.environ.get("ACCELERATE_MIXED_PRECISION") or os.environ.get(VARIABLE) or "").strip().lower()
    if given:
        return "fp32" if given == "no" else given
    if device.type != "cpu":
        from accelerate.utils import is_bf16_available

        return "bf16" if is_bf16_available() else "fp32"
    random = global_state()
    try:
        with nullcontext() if model is None else isolated_run(model):
            network = fuse_(build_model(config, shape)) if model is None else model
            return "bf16" if gain_of_bf16(network, config, shape) >= FASTER else "fp32"
    finally:
        restore_global_state(random)


def gain_of_bf16(model: nn.Module, config: TrainConfig, shape: DataShape) -> float:
    """How many times as fast forward and backward of this network are in bfloat16 as in float32, on the CPU."""

    def seconds(images: int, low: bool) -> float:
        x, t = torch.zeros(images, *shape.image), torch.full((images,), 500.0)
        predict = Denoiser(model).given(shape.example_condition(config, images))
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            output = predict(x, t)
        output.float().square().mean().backward()
        return time.perf_counter() - began

    few = min(config.batch_size, FEW * torch.get_num_threads())
    seconds(few, low=False)
    images = max(1, min(config.batch_size, int(few * SECONDS / seconds(few, low=False))))
    try:
        seconds(images, low=True)
    except RuntimeError:  # an operation that has no bfloat16
        return 0.0
    return median(seconds(images, low=False) / seconds(images, low=True) for _ in range(TURNS))


# A CPU's cores: each takes its own images through the whole network, unless that is a small one.
#
# The usual way is that all cores share every operation. They then wait for each other after each of them, thousands of
# times in a step, and every tensor is that of the whole batch, too large for a cache. Here the cores meet once in a
# step, and each goes through its images in chunks that stay in its cache; one chunk's activations exist at a time.

ROWS, FEWEST_ROWS, ENTRIES = 1024, 512, 2**18
"""Tokens of a chunk at most, and at least where the entries of its features (B·L·D) are too many: more do not fit a
cache, fewer make thin matrix products and more gradients to add up (`scalelong lab bench step`)."""
SMALL = 2**16
"""Entries of one core's features (B·L·D) below which all cores share every operation: there the time is Python's, of
which only one thread runs at once (`scalelong lab bench step/demo`)."""


class CoreParallel:
    """Adds the gradient of a batch to the parameters of a model.

    The result depends on the number of cores by rounding only, and for a given number it is the same in every bit:
    which core takes which images is fixed, and so is the order in which their gradients are added.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.count = model, count
        self.copies = [_sharing_copy(model) for _ in range(count - 1)]
        self.networks = [Denoiser(each) for each in (model, *self.copies)]
        self.pool = ThreadPoolExecutor(max(1, count - 1), "core", initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, question: Any, share: float) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, whose gradient is multiplied by `share`, and the error of each image."""
        images = len(question.target)
        errors = torch.zeros(images)
        slices = self._chunks(images)

        def work(core: int) -> list[Tensor]:
            losses = []
            for part in slices[core :: self.count]:
                weighted, errors[part] = question.errors(self.networks[core], part)
                loss = weighted.sum()
                (loss * (share / images)).backward()
                losses.append(loss.detach())
            return losses

        threads = torch.get_num_threads()
        # Not only this thread's: MKL has one number for all threads.
        torch.set_num_threads(1)
        try:
            others = [self.pool.submit(work, core) for core in range(1, min(self.count, len(slices)))]
            try:
                losses = work(0)
            finally:
                wait(others)
            losses += [loss for other in others for loss in other.result()]
        finally:
            torch.set_num_threads(threads)
        self._add_gradients()
        return torch.stack(losses).sum() / images, errors

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Add the gradients of the copies to those of the model, copy after copy."""
        for each in self.copies:
            pairs = []
            for own, other in zip(self.model.parameters(), each.parameters(), strict=True):
                gradient, other.grad = other.grad, None
                if own.grad is None:
                    own.grad = gradient
                elif gradient is not None:
                    pairs.append((own.grad, gradient))
            if pairs:
                sums, gradients = zip(*pairs, strict=True)
                torch._foreach_add_(sums, gradients)  # pyright: ignore[reportPrivateImportUsage]

    def _chunks(self, images: int) -> list[slice]:
        """Slices of nearly equal size that stay in a cache, as many for each core if there are enough images."""
        at_most = -(-images // self.count)
        site = self.model.skip_sites()[0] if isinstance(self.model, SkipHost) else None
        if site is not None and site.tokens is not None:
            rows = min(ROWS, max(FEWEST_ROWS, ENTRIES / site.channels))
            at_most = min(at_most, max(1, round(rows / site.tokens)))
        count = -(-images // at_most)
        count = min(images, -(-count // self.count) * self.count)
        bounds = [round(i * images / count) for i in range(count + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def close(self) -> None:
        self.pool.shutdown()


def _sharing_copy(model: nn.Module) -> nn.Module:
    """A copy with gradients of its own, whose weights and buffers are the very memory of the model's."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def make_cores(config: TrainConfig, model: nn.Module, accelerator: Any) -> CoreParallel | None:
    """None where all cores share every operation: on accelerators, in fp16 (whose gradients are scaled as a whole),
    for small networks, and for those of unknown kinds."""
    wanted, cores = config.hardware.split_cores, torch.get_num_threads()
    alone_on_cpu = accelerator.device.type == "cpu" and accelerator.num_processes == 1
    can = alone_on_cpu and accelerator.mixed_precision in ("no", "bf16") and not config.hardware.compile
    require(
        can or not wanted,
        "split_cores is for one process on a CPU, in float32 or bf16, without compile; leave it out here",
    )
    if not can or wanted is False:
        return None
    mixing = [name for name, module in model.named_modules() if _mixes_or_draws(module)]
    require(not (wanted and mixing), f"split_cores is not for networks with batch norm or dropout, as at {mixing[:3]}")
    if wanted is None:  # models that merge their skips themselves are ours, and take images one by one
        if not isinstance(model, SkipHost) or mixing:
            return None
        site = model.skip_sites()[0]
        images = config.batch_size // config.hardware.accumulation // cores
        # Each core must have enough to do that the threads seldom wait for Python's lock.
        if cores > 1 and site.tokens is not None and images * site.tokens * site.channels < SMALL:
            return None
    return CoreParallel(model, cores)


def _mixes_or_draws(module: nn.Module) -> bool:
    batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    # Cores would draw from one random generator, in random order. A dropout of 0 draws nothing.
    return batch_norm or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
