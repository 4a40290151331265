"""From a name to a network, and one way to call it: U-ViT, diffusers' UNets, or anyone's `package.module:factory`."""

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import ImageData, load_data
from ..diffusion.conditions import (
    ClassCondition,
    Conditions,
    PretrainedTextEncoder,
    TextCondition,
    TextEncoder,
    Unconditional,
    WordEncoder,
    cache_captions,
)
from ..diffusion.latents import Autoencoder, encode_data
from ..errors import InvalidConfigError
from ..models import UViT, unet
from ..models.presets import preset_arguments
from ..randomness import seed_global
from ..scaling import NoScaling, as_scaling
from ..skips import scale_skips_, start_merges_
from .config import TextConfig, TrainConfig

LABEL_ARGUMENTS = ("y", "class_labels", "labels")
"""Names under which networks take labels."""

CONTEXT_ARGUMENTS = ("context", "encoder_hidden_states")
"""Names under which networks take the tokens of a text."""

MOST_PATCHES = 256
"""Tokens of a U-ViT whose patch size nobody chose, as in the paper's settings."""


@dataclass(frozen=True)
class DataShape:
    """What a network must know about the data."""

    channels: int
    height: int
    width: int
    classes: tuple[str, ...] | None = None

    @property
    def image(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def labels(self, config: TrainConfig) -> int | None:
        """Size of the label embedding, with a null label for guidance; None without labels."""
        if config.diffusion.condition != "class":
            return None
        if not self.classes:
            raise InvalidConfigError(
                f"condition 'class' needs labels, and {config.data!r} has none; put the images of each class in a "
                f"folder of its own, or train with condition 'none'"
            )
        return len(self.classes) + (1 if config.diffusion.condition_dropout > 0 else 0)

    def example_condition(self, config: TrainConfig, count: int) -> Tensor | None:
        """A condition of the right kind and shape."""
        if config.diffusion.condition == "text":
            return torch.zeros(count, config.text.text_length, config.text.text_dim)
        return torch.zeros(count, dtype=torch.long) if self.labels(config) else None


def build_model(config: TrainConfig, shape: DataShape) -> nn.Module:
    """The network of the configuration, with weights that depend on the seed alone, and its long skips scaled."""
    with torch.random.fork_rng():
        seed_global(config.seed, "weights")
        model = _build(config, shape)
        if not is_uvit(config):  # which scales its own skips
            _scale(model, config, shape)
    if config.hardware.gradient_checkpointing:
        _checkpoint_gradients(model)
    return model


def uses_channels_last(config: TrainConfig, model: nn.Module) -> bool:
    if config.hardware.channels_last is not None:
        return config.hardware.channels_last
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


class Network:
    """Calls a network, whatever it names its condition and however it wraps its output."""

    def __init__(self, call: Callable[..., Any], bare: nn.Module) -> None:
        self.call = call
        parameters = inspect.signature(bare.forward).parameters
        self.label_argument = next((name for name in LABEL_ARGUMENTS if name in parameters), None)
        self.context_argument = next((name for name in CONTEXT_ARGUMENTS if name in parameters), None)

    def keywords(self, condition: Tensor | None) -> dict[str, Tensor]:
        """The condition under the name that the network has for it."""
        if condition is None:
            return {}
        name = self.context_argument if condition.is_floating_point() else self.label_argument
        return {} if name is None else {name: condition}

    def __call__(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        output = self.call(x, t, **self.keywords(condition))
        output = output if isinstance(output, Tensor) else getattr(output, "sample", None)
        if not isinstance(output, Tensor) or output.shape != x.shape:
            found = tuple(output.shape) if isinstance(output, Tensor) else "no tensor and no `.sample`"
            raise InvalidConfigError(
                f"the model must return a tensor of the shape of its input, {tuple(x.shape)}, or an object with it as "
                f"`.sample`; got {found}"
            )
        return output

    def given(self, condition: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, t: self(x, t, condition)


def is_uvit(config: TrainConfig) -> bool:
    return config.model == "uvit" or (config.model.startswith("uvit/") and ":" not in config.model)


def uvit_arguments(config: TrainConfig, shape: DataShape) -> dict[str, Any]:
    """Preset, then what is known of data and condition, then the user's options."""
    text, preset = config.diffusion.condition == "text", config.model.partition("/")[2]
    known = {
        "image_size": shape.height if shape.height == shape.width else (shape.height, shape.width),
        "channels": shape.channels,
        "classes": shape.labels(config),
        "context_dim": config.text.text_dim if text else None,
        "context_length": config.text.text_length if text else None,
    }
    arguments = preset_arguments(preset) if preset else {}
    if not preset and "patch_size" not in config.model_options:
        arguments = {"patch_size": _patch_size(shape)}
    return {**arguments, **known, **config.model_options}


def _build(config: TrainConfig, shape: DataShape) -> nn.Module:
    labels, text = shape.labels(config), config.diffusion.condition == "text"
    length, dim = (config.text.text_length, config.text.text_dim) if text else (None, None)
    size = shape.height if shape.height == shape.width else (shape.height, shape.width)
    kind, _, preset = config.model.partition("/")
    options = dict(config.model_options)
    if _from_diffusers(config):
        options.pop("merge_start", None)
    try:
        if is_uvit(config):
            return UViT(**uvit_arguments(config, shape), scaling=config.scaling)
        channels: dict[str, Any] = {"in_channels": shape.channels, "out_channels": shape.channels}
        if text:
            channels["cross_attention_dim"] = dim
        if kind == "unet" and ":" not in config.model:
            return unet(preset, **({"sample_size": size, "num_class_embeds": labels, **channels} | options))
        if config.model.endswith(".json"):
            values = {"sample_size": size, **channels, "num_class_embeds": labels} | options
            return _from_diffusers_json(Path(config.model), values)
        model = _call_factory(
            _import(config.model),
            {
                "image_size": size,
                "channels": shape.channels,
                "classes": labels,
                "context_dim": dim,
                "context_length": length,
            },
            options,
        )
    except TypeError as error:
        raise InvalidConfigError(f"the model {config.model!r} does not take these options: {error}") from error
    if not isinstance(model, nn.Module):
        raise InvalidConfigError(f"{config.model} must return a torch.nn.Module, got {type(model).__name__}")
    if labels is not None and Network(model, model).label_argument is None:
        raise InvalidConfigError(
            f"condition 'class' needs a model whose forward takes labels as one of {', '.join(LABEL_ARGUMENTS)}; "
            f"{type(model).__name__} takes none of them"
        )
    if text and Network(model, model).context_argument is None:
        raise InvalidConfigError(
            f"condition 'text' needs a model whose forward takes tokens as one of {', '.join(CONTEXT_ARGUMENTS)}; "
            f"{type(model).__name__} takes none of them"
        )
    return model


def _patch_size(shape: DataShape) -> int:
    """The smallest patch, from 2 pixels on, that leaves at most MOST_PATCHES of them."""
    for size in range(2, min(shape.height, shape.width) // 2 + 1):
        fits = shape.height % size == 0 and shape.width % size == 0
        if fits and shape.height * shape.width // size**2 <= MOST_PATCHES:
            return size
    raise InvalidConfigError(
        f"no patch size divides images of {shape.height}x{shape.width} into at most {MOST_PATCHES} patches; give a "
        f"--size such as 32 or 64, or --model-options patch_size=..."
    )


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InvalidConfigError(
            f"unknown model {name!r}; use 'uvit', 'uvit/PRESET', 'unet/PRESET', a config.json of diffusers, or "
            f"'package.module:factory' for your own"
        )
    try:
        factory = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except ImportError as error:
        raise InvalidConfigError(
            f"the model {name!r} cannot be imported: {error}. Is its folder in PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise InvalidConfigError(f"the module {module_name!r} has no {attribute!r}") from error
    if not callable(factory):
        raise InvalidConfigError(f"{name} must be a function or a class, got {type(factory).__name__}")
    return factory


def _call_factory(factory: Callable[..., Any], known: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call with the user's options, and with what is known of the data where the factory asks for it by name."""
    parameters = inspect.signature(factory).parameters
    asked = {name: value for name, value in known.items() if name in parameters}
    return factory(**(asked | options))


def _from_diffusers_json(path: Path, values: dict[str, Any]) -> nn.Module:
    import diffusers

    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"{path} cannot be read as the configuration of a model: {error}") from error
    kind = getattr(diffusers, str(described.get("_class_name", "UNet2DModel")), None)
    if kind is None:
        raise InvalidConfigError(f"{path} names the class {described.get('_class_name')!r}, which diffusers has not")
    return kind.from_config({**described, **values})


def _scale(model: nn.Module, config: TrainConfig, shape: DataShape) -> None:
    example = None if isinstance(model, UViT) else example_call(model, config, shape)
    if not isinstance(as_scaling(config.scaling), NoScaling):
        scale_skips_(model, config.scaling, example)
    start = _merge_start(config)
    if start != "authors":
        start_merges_(model, start, example)


def _merge_start(config: TrainConfig) -> str:
    """An option of U-ViT that diffusers' UNets get as well. Other factories know what to do with their options."""
    return config.model_options.get("merge_start", "authors") if _from_diffusers(config) else "authors"


def _from_diffusers(config: TrainConfig) -> bool:
    return (config.model.startswith("unet/") and ":" not in config.model) or config.model.endswith(".json")


def example_call(model: nn.Module, config: TrainConfig, shape: DataShape) -> dict[str, Tensor]:
    """The keyword arguments of a small forward of any model."""
    parameters = inspect.signature(model.forward).parameters
    inputs = dict(zip(parameters, (torch.zeros(2, *shape.image), torch.full((2,), 500.0)), strict=False))
    return inputs | Network(model, model).keywords(shape.example_condition(config, 2))


def _checkpoint_gradients(model: nn.Module) -> None:
    if isinstance(model, UViT):
        model.checkpointing = True
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    else:
        raise InvalidConfigError(
            f"{type(model).__name__} has no method enable_gradient_checkpointing(); train it without "
            f"gradient_checkpointing"
        )


# From a configuration to the conditions of its network.

def make_conditions(
    config: TrainConfig,
    classes: Sequence[str] | None,
    captions: Sequence[str] | None = None,
    vocabulary: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> Conditions:
    """The captions to be trained on are encoded here, once; for sampling, the vocabulary is what they had."""
    guided = config.diffusion.condition_dropout > 0
    if config.diffusion.condition == "class":
        if not classes:
            raise InvalidConfigError(
                f"condition 'class' needs labels, and {config.data!r} has none; put the images of each class in a "
                f"folder of its own, or train with condition 'none'"
            )
        return ClassCondition(classes, guided)
    if config.diffusion.condition == "text":
        encoder = make_encoder(config.text, vocabulary)
        # Words need no cache: they are hashed faster than read from a disk.
        if captions is not None and not isinstance(encoder, WordEncoder):
            encoder = cache_captions(encoder, captions, say)
        return TextCondition(encoder, guided)
    return Unconditional()


def make_encoder(config: TextConfig, vocabulary: Sequence[str] | None = None) -> TextEncoder:
    if config.text_encoder == "words":
        return WordEncoder(config.text_length, config.text_dim, vocabulary)
    return PretrainedTextEncoder(config.text_encoder, config.text_length, config.text_dim)


# The images of a run: those to train on, and those held out.

def load_images(config: TrainConfig, say: Callable[[str], None]) -> tuple[ImageData, ImageData | None]:
    data = load_data(config.data, size=config.images.size, channels=config.images.channels)
    if config.diffusion.condition == "class" and not data.classes:
        raise InvalidConfigError(
            f"condition 'class' needs labels, and {config.data!r} has none; put the images of each class in a folder "
            f"of its own, or train with condition 'none'"
        )
    if config.diffusion.condition == "text" and not data.has_captions:
        raise InvalidConfigError(
            f"condition 'text' needs captions, and {config.data!r} has none; put them beside the images, in "
            f"metadata.jsonl or in one .txt file per image, or train with condition 'none'"
        )
    say(data.describe())
    if config.images.autoencoder is not None:
        data = encode_data(data, Autoencoder(config.images.autoencoder), say)
    if config.images.held_out == 0:
        return data, None
    return data.split(config.images.held_out, config.seed)
