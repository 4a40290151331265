"""What a run will do, before it does it: `scalelong train --dry-run`."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ..attaching import coefficients, is_scaled
from ..config import TrainConfig, is_snapshot, with_values
from ..console import duration
from ..data import ImageData
from ..errors import ScaleLongError
from ..finding import find_skips, native_plan
from ..models import Denoiser, count_parameters
from ..noise import NoiseProcess, losses
from ..runs import OLDEST, DataShape, build_model, example_forward, shape_of, shares
from .cores import images_at_once, splits
from .optimizers import OPTIMIZERS
from .precision import choose_precision
from .sizing import MOST_EPOCHS

BYTES_PER_PARAMETER = {"weights": 4, "gradients": 4, "AdamW": 8, "moving average": 4}
PROBE = 2
"""Images in the pass that measures how much memory an image takes."""


def describe_run(
    config: TrainConfig, data: ImageData, folder: Path, processes: int = 1, seconds: float | None = None
) -> str:
    """One line for each thing that will happen. `data` are the images to train on, without those held out; `seconds`
    is how long it will take, if that was measured."""
    shape = shape_of(data)
    auto = config.hardware.precision == "auto"
    if auto:
        config = with_values(config, {"hardware.precision": choose_precision(config, shape, default_device(config))})
    model = build_model(config, shape)
    parameters = count_parameters(model)
    per_image = activation_bytes(config, model, shape)
    per_part = config.batch_size / (processes * config.hardware.accumulation)
    at_once = images_in_memory(config, model, per_part, processes)
    activations = per_image * at_once * (0.5 if config.hardware.precision in ("bf16", "fp16") else 1)
    optimizer, diffusion = config.optimizer, config.diffusion
    kept = 4 * len(optimizer.ema_lengths)  # bytes per parameter of the averages of other lengths
    fixed = (sum(BYTES_PER_PARAMETER.values()) + kept) * parameters
    saved = (4 + 4 + 8 + kept) * parameters
    epochs = config.steps * config.batch_size / len(data)
    decay = f", {optimizer.decay} decay" if optimizer.decay != "constant" else ""
    base = ""
    if optimizer.base_width is not None:
        base = f" at the base width {optimizer.base_width} (μP, output start {optimizer.output_start})"
    rows = {
        "run folder": f"{folder}{' (exists: will continue)' if (folder / 'config.yaml').exists() else ''}",
        "data": f"{data.describe()}{_decoded(config, data)}, {config.images.held_out} more held out, "
        f"flip {_on(config.images.flip)}",
        "model": f"{config.model} ({type(model).__name__}), {parameters / 1e6:.2f}M parameters",
        "long skips": _skips(config, model, shape),
        "scaling": config.scaling,
        "objective": f"predict {diffusion.prediction}, {diffusion.schedule} schedule, condition {diffusion.condition}"
        + (f", loss weighted by Min-SNR-{diffusion.min_snr_gamma:g}" if diffusion.loss_weighting != "none" else ""),
        "optimiser": f"{OPTIMIZERS.get(optimizer.optimizer, optimizer.optimizer)}, lr {optimizer.lr:g}{base}, "
        f"weight decay {optimizer.weight_decay:g}, "
        f"betas {optimizer.betas}, warm-up {optimizer.warmup} steps{decay}, clip {optimizer.clip}, "
        f"EMA {optimizer.ema_length or optimizer.ema_rate}",
        "batch": f"{config.batch_size} images = {processes} process(es) x {config.hardware.accumulation} part(s) x "
        f"{per_part:g} images",
        "precision": config.hardware.precision + (" (auto: what is faster here)" if auto else ""),
        "length": f"{config.steps} steps = {epochs:.1f} epochs"
        + (": the network will learn the images by heart" if epochs > MOST_EPOCHS else ""),
        "time": "not measured" if seconds is None else f"about {duration(seconds)} on this machine",
        "checkpoints": f"every {config.checkpoints.save_every} steps, {megabytes(saved)} each, "
        f"the last {config.checkpoints.keep_last} kept"
        + (f" and every {config.checkpoints.keep_every}th step" if config.checkpoints.keep_every else "")
        + (f", and the best by {config.checkpoints.keep_best}" if config.checkpoints.keep_best else ""),
        "samples": f"{config.logging.samples} every {config.samples_every} steps, {config.logging.sampler} with "
        f"{config.logging.sampler_steps} steps"
        if config.samples_every
        else "none",
        "collapse": f"{config.guard.on_collapse}",
        "non-finite": f"{config.guard.on_nan}",
        "memory": f"about {megabytes(fixed + activations)} per process: {megabytes(fixed)} for weights, gradients, "
        f"AdamW and moving average, {megabytes(activations)} for the activations of {at_once:g} images at once",
    }
    if optimizer.ema_lengths:
        rows["averages"] = ", ".join(optimizer.ema_lengths) + _snapshots(config, parameters)
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _decoded(config: TrainConfig, data: ImageData) -> str:
    settings = config.images
    if not data.decodes or settings.image_cache == "none" or settings.autoencoder is not None:
        return ""
    size = (len(data) + settings.held_out) * data.channels * data.height * data.width
    return f" (to be decoded once, {megabytes(size)} on the disk: --image-cache)"


def _snapshots(config: TrainConfig, parameters: int) -> str:
    tracks = shares(config.optimizer.ema_lengths)
    if not tracks:
        return " beside the main one"
    count = len([step for step in range(1, config.steps + 1) if is_snapshot(step) and step >= OLDEST * config.steps])
    size = megabytes(2 * len(tracks) * parameters * count)
    return f" beside the main one; {count} snapshots at the end, {size} in all (export --ema makes other lengths)"


def default_device(config: TrainConfig) -> torch.device:
    found = None if config.hardware.cpu else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def images_in_memory(config: TrainConfig, model: nn.Module, per_part: float, processes: int) -> float:
    """A CPU's cores go through a U-ViT's images in chunks."""
    on_cpu = default_device(config).type == "cpu"
    if not splits(config, model, on_cpu=on_cpu, precision=config.hardware.precision, processes=processes):
        return per_part
    cores = torch.get_num_threads()
    return min(per_part, cores * images_at_once(model, int(per_part), cores))


def _on(value: bool) -> str:
    return "on" if value else "off"


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


def activation_bytes(config: TrainConfig, model: nn.Module, shape: DataShape) -> float:
    """Bytes that one image keeps for the backward pass, measured on a small batch."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    x0 = torch.zeros(PROBE, *shape.image)
    predict = Denoiser(model).given(shape.example_condition(config, PROBE))
    process = NoiseProcess(config.diffusion.schedule)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        loss = losses(
            predict, process, config.diffusion.prediction, x0, torch.randn_like(x0), torch.full((PROBE,), 500.0)
        ).mean()
    del loss
    return sum(kept.values()) / PROBE


def megabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
