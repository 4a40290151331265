"""What a run will do and need, before it begins: `scalelong train --dry-run`.

`describe_run` is the table of a run on this machine. `describe_needs` is that of `--for N --device-memory G`, on paper:
the network is built on the meta device, so neither its weights nor its activations need memory here. Operations and
bytes are counted; the speed of an accelerator is assumed (SUSTAINED), and so the times are estimates.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..attaching import coefficients, is_scaled
from ..config import TrainConfig, differences, with_values
from ..console import byte_size, counted, duration
from ..data import ImageData
from ..errors import ScaleLongError, require
from ..finding import find_skips, native_plan
from ..models import count_parameters
from ..runs import DataShape, build_model, example_forward, shape_of
from .hardware import choose_precision
from .optimizers import make_optimizer
from .sizing import MOST_EPOCHS

SUSTAINED = 50e12
"""Operations per second of an accelerator in training: a sixth of what an A100 does at best in bfloat16."""
CLASSES = 1000


# On this machine


def describe_run(config: TrainConfig, data: ImageData, folder: Path, seconds: float) -> str:
    """What will happen, then all values that are not the defaults. `data` are the images to train on, without those
    held out; `seconds` is how long it will take."""
    shape, saving, held = shape_of(data), config.checkpoints, config.images.held_out
    often = f"every {saving.save_every} steps" if saving.save_every < config.steps else "at the end"
    if config.hardware.precision == "auto":
        found = None if config.hardware.cpu else torch.accelerator.current_accelerator(check_available=True)
        chosen = choose_precision(config, shape, found or torch.device("cpu"))
        config = with_values(config, {"hardware.precision": chosen})
    model = build_model(config, shape)
    state, activations = memory_needed(config, model, shape)
    epochs = config.steps * config.batch_size / len(data)
    by_heart = ": the network will learn the images by heart" if epochs > MOST_EPOCHS else ""
    at_once, weights = config.batch_size / config.hardware.accumulation, 4 * count_parameters(model)
    rows = {
        "run folder": f"{folder}{' (exists: will continue)' if (folder / 'config.yaml').exists() else ''}",
        "data": f"{data.describe()}{f', {held} more held out' if held else ''}",
        "model": f"{config.model} ({type(model).__name__}), {count_parameters(model) / 1e6:.2f}M parameters",
        "long skips": _skips(config, model, shape),
        "optimiser": f"{config.optimizer.optimizer}, lr {config.optimizer.lr:g}",
        "precision": config.hardware.precision,
        "length": f"{config.steps} steps of {counted(config.batch_size, 'image')} = {epochs:.1f} epochs{by_heart}",
        "time": f"about {duration(seconds)} on this machine",
        "checkpoints": f"{often}, {byte_size(weights + state)} each; {saving.keep_last} are kept",
        "memory": f"about {byte_size(2 * weights + state + at_once * activations)}: weights and gradients "
        f"{byte_size(2 * weights)}, optimiser and averages {byte_size(state)}, "
        f"{at_once:g} images {byte_size(activations)} each",
    }
    width = max(map(len, rows))
    values = (f"  {name} = {value}" for name, (_, value) in differences(TrainConfig(), config).items())
    table = (f"{name:<{width}}  {value}" for name, value in rows.items())
    return "\n".join([*table, "values that are not the defaults:", *values])


def memory_needed(config: TrainConfig, model: nn.Module, shape: DataShape) -> tuple[int, float]:
    """Bytes of the optimiser and the averages, and bytes that an image keeps for the backward pass."""
    kept: dict[Any, int] = {parameter.untyped_storage(): 0 for parameter in model.parameters()}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()  # an object of its own, also on the meta device, where all addresses are 0
        kept.setdefault(storage, storage.nbytes())
        return value

    inputs = example_forward(model, config, shape)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        model(**inputs)
    half = 0.5 if config.hardware.precision in ("bf16", "fp16") else 1.0
    # Muon keeps a momentum, Adam and most others two numbers of each trained weight.
    groups = make_optimizer(model, config.optimizer).param_groups
    held = sum(4 * value.numel() * (1 if group.get("muon") else 2) for group in groups for value in group["params"])
    averages = 4 * count_parameters(model) * (1 + len(config.optimizer.ema_lengths))
    images = len(next(iter(inputs.values())))
    return held + averages, half * sum(kept.values()) / images


def _skips(config: TrainConfig, model: nn.Module, shape: DataShape) -> str:
    """How many, and their coefficients now: learned ones are those of a first forward."""
    inputs = example_forward(model, config, shape)
    if not is_scaled(model) and native_plan(model) is None:
        try:
            return f"{len(find_skips(model, inputs))} found, not scaled"
        except ScaleLongError as error:
            return str(error)
    with torch.no_grad():
        model.eval()(**inputs)
        values = coefficients(model)
    return f"{len(values)}; coefficients from the outermost in: {', '.join(f'{value:.3g}' for value in values)}"


# On many accelerators


def describe_needs(config: TrainConfig, processes: int, gigabytes: float | None = None) -> str:
    """The table of a configuration on `processes` accelerators with `gigabytes` of memory each. No image is read: they
    have the size and the channels of the configuration, and labels are of a thousand classes."""
    require(processes >= 1, f"`needs_for` must be at least 1 accelerator, got {processes}")
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
        f"optimiser and averages {byte_size(state)}",
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
