"""What a run will do and need, before it begins: `scalelong train --dry-run`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attaching import coefficients, is_scaled
from ..config import TrainConfig, differences, with_values
from ..console import byte_size, counted, duration
from ..data import ImageData
from ..errors import ScaleLongError
from ..finding import find_skips, native_plan
from ..models import count_parameters
from ..runs import DataShape, build_model, example_forward, shape_of
from .hardware import choose_precision
from .optimizers import make_optimizer
from .sizing import MOST_EPOCHS


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
        "model": f"{config.network}, {count_parameters(model) / 1e6:.2f}M parameters",
        "long skips": _skips(config, model, shape),
        "optimiser": f"{config.optimizer.optimizer}, lr {config.optimizer.lr:g}",
        "precision": config.hardware.precision,
        "length": f"{config.steps} steps of {counted(config.batch_size, 'image')} = {epochs:.1f} epochs{by_heart}",
        "time": f"about {duration(seconds)} on this machine",
        "checkpoints": f"{often}, {byte_size(weights + state)} each; {saving.keep_last} are kept",
        "memory": f"about {byte_size(2 * weights + state + at_once * activations)}: weights and gradients "
        f"{byte_size(2 * weights)}, optimiser and average {byte_size(state)}, {at_once:g} images "
        f"{byte_size(activations)} each",
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
