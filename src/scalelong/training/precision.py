"""The precision of a new run: bfloat16 where it makes this network faster here, else float32.

A run records what was chosen, so that it goes on in the same bits wherever it is continued.
"""

import os
import time
from contextlib import nullcontext
from statistics import median

import torch
from torch import nn

from ..config import TrainConfig
from ..models import Denoiser, fuse_
from ..randomness import global_state, restore_global_state
from ..runs import DataShape, build_model
from ..tracing import isolated_run

FASTER = 1.25
"""How many times as fast as float32 bfloat16 must be on a CPU: far from 1, so that two starts choose alike."""
VARIABLE = "SCALELONG_PRECISION"
"""What auto takes in this environment, without measuring: for hosts that differ, and for tests."""
FEW, TURNS, SECONDS = 4, 5, 0.1
"""Images per thread of the first pass; passes of each precision that are compared, and about how long one may take."""


def choose_precision(
    config: TrainConfig, shape: DataShape, device: torch.device, model: nn.Module | None = None
) -> str:
    """ "bf16" or "fp32"; what accelerate's launcher or SCALELONG_PRECISION say comes first."""
    told = (os.environ.get("ACCELERATE_MIXED_PRECISION") or os.environ.get(VARIABLE) or "").strip().lower()
    if told:
        return "fp32" if told == "no" else told
    if device.type != "cpu":
        return "bf16" if _accelerator_has_it(device) else "fp32"
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


def _accelerator_has_it(device: torch.device) -> bool:
    from accelerate.utils import is_bf16_available

    if not is_bf16_available():
        return False
    try:
        ones = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
        return bool((ones @ ones == 8).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False
