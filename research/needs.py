"""What a run needs on many accelerators, counted on paper: docs/scale.md.

    python -m research.needs --recipe cifar10-uvit-s2 --precision bf16 --for 8 --device-memory 40

Flags are those of `scalelong train`. The network is built on the meta device, so neither its weights nor its
activations need memory here. Operations and bytes are counted; the speed of an accelerator is assumed (SUSTAINED), and
so the times are estimates.
"""

import argparse
import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from scalelong.cli.train import parse
from scalelong.config import TrainConfig, with_values
from scalelong.console import byte_size, duration
from scalelong.errors import require
from scalelong.models import count_parameters
from scalelong.runs import DataShape, build_model, example_forward
from scalelong.training.dry_run import memory_needed

SUSTAINED = 50e12
"""Operations per second of an accelerator in training: a sixth of what an A100 does at best in bfloat16."""
CLASSES = 1000


def describe_needs(config: TrainConfig, processes: int, gigabytes: float | None = None) -> str:
    """The table of a configuration on `processes` accelerators with `gigabytes` of memory each. No image is read: they
    have the size and the channels of the configuration, and labels are of a thousand classes."""
    require(processes >= 1, f"--for must be at least 1 accelerator, got {processes}")
    if config.hardware.precision == "auto":
        config = with_values(config, {"hardware.precision": "bf16"})
    shape = _shape(config)
    with torch.device("meta"):
        model = build_model(config, shape)
        with _FusedAttention():
            state, per_image = memory_needed(config, model, shape)
        operations = _operations(config, model, shape)
    parameters = count_parameters(model)
    weights = 4 * parameters
    batch, share = config.batch_size / processes, (processes - 1) / processes
    at_once = batch / config.hardware.accumulation

    def memory(fixed: float) -> str:
        used = fixed + at_once * per_image
        if gigabytes is None:
            return byte_size(used)
        most = max(0, math.floor((gigabytes * 1e9 - fixed) / per_image))
        fits = "fits into" if used <= gigabytes * 1e9 else "does NOT fit into"
        return f"{byte_size(used)}: {fits} {gigabytes:g} GB, which hold {most:,} images at once"

    fixed, speed = 2 * weights + state, processes * SUSTAINED / operations
    gathers = 2 * config.hardware.accumulation  # forward and backward of each part of the batch
    sharded = memory(fixed / processes) + ", besides one block that is whole for a moment"
    if config.optimizer.optimizer != "adamw":
        sharded = f"only with the optimiser adamw, not {config.optimizer.optimizer}"
    rows = {
        "accelerators": f"{processes}, {batch:g} images of a batch of {config.batch_size} each, {at_once:g} at once",
        "network": f"{parameters / 1e6:.1f}M parameters, {operations / 1e9:,.0f} GFLOP for an image, forward and "
        f"backward, which keeps {byte_size(per_image)} ({config.hardware.precision})",
        "state": f"weights {byte_size(weights)}, gradients {byte_size(weights)}, "
        f"optimiser and average {byte_size(state)}",
        "data parallel": memory(fixed),
        "FSDP2": sharded,
        "exchanged": f"for a step and accelerator {byte_size(2 * share * weights)} data parallel (all-reduce), "
        f"{byte_size((gathers + 1) * share * weights)} with FSDP2 ({gathers} all-gathers, one reduce-scatter)",
        "data": f"at {SUSTAINED / 1e12:g} TFLOP/s each, {speed:,.0f} images per second are asked for "
        f"({speed * math.prod(shape.image) / 1e6:,.1f} MB/s as bytes)",
        "time": f"{duration(config.steps * config.batch_size / speed)} for {config.steps:,} steps at that speed",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _shape(config: TrainConfig) -> DataShape:
    size, channels = config.images.size or 32, config.images.channels or 3
    if config.images.autoencoder is not None:  # the latents of Stable Diffusion
        size, channels = size // 8, 4
    classes = tuple(map(str, range(CLASSES))) if config.diffusion.condition == "class" else None
    return DataShape(channels, size, size, classes)


def _operations(config: TrainConfig, model: torch.nn.Module, shape: DataShape) -> float:
    """Of an image, forward and backward. A backward pass has twice the products of its forward."""
    inputs = example_forward(model, config, shape)
    # The counter knows attention as products alone.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(**inputs)
    passes = 4 if config.hardware.gradient_checkpointing else 3
    return passes * counter.get_total_flops() / len(next(iter(inputs.values())))


class _FusedAttention(TorchFunctionMode):
    """Attention that keeps its inputs and its output alone, as the kernels of accelerators do. The meta device has none
    of these, and would keep all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.needs", description=__doc__)
    parser.add_argument("--for", type=int, required=True, dest="processes", metavar="N", help="accelerators")
    parser.add_argument("--device-memory", type=float, metavar="GB", help="of each of them")
    options, flags = parser.parse_known_args(arguments)
    print(describe_needs(parse(["digits", *flags]).train, options.processes, options.device_memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
