"""The machine under a run: signals, switches of torch, and the precision of a new run."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn

from ..config import HardwareConfig, TrainConfig
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
