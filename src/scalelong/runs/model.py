"""From a configuration to what a run works with: its network, its data, and the conditions between them.

A network comes from a name: U-ViT, diffusers' UNets, or anyone's `package.module:factory`. Whatever the way, a run with
a condition gets a network that uses it, or an error that says why not.

    data = load_run_data(config)
    model = build_model(config, data.shape)
    x_t, t, condition = data.probe(16)
"""

import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attaching import is_scaled, scale_skips_, scaling_of
from ..config import EARLIER, TrainConfig
from ..data import ImageData, load_data
from ..diffusion import (
    Autoencoder,
    ClassCondition,
    Conditions,
    HashedWords,
    InputMaker,
    NoisyInputs,
    PretrainedTextEncoder,
    TextCondition,
    TextEncoder,
    Unconditional,
    cache_captions,
    encode_data,
)
from ..errors import (
    InvalidConfigError,
    ScaleLongError,
    UnclearParameterError,
    UntrustedCodeError,
    require,
)
from ..files import read_json
from ..finding import native_plan
from ..models import (
    UNET_PRESETS,
    UViT,
    call_arguments,
    preset_arguments,
    require_buildable,
    require_condition_used,
    unet,
)
from ..mup import Kinds, kinds, require_output_start, start_kinds_, unet_at, uvit_at, width_options
from ..noise import NoiseProcess
from ..optional import load_object
from ..randomness import seed_global
from ..scaling import NoScaling, as_scaling

logger = logging.getLogger(__name__)

MOST_PATCHES = 256
"""Most tokens of a U-ViT without a patch size of its own, as in the paper's settings."""


@dataclass(frozen=True)
class DataShape:
    """The sizes and classes of the data, which a network must know."""

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
        return len(_require_classes(config, self.classes)) + (1 if config.diffusion.condition_dropout > 0 else 0)

    def example_condition(self, config: TrainConfig, count: int) -> Tensor | None:
        """A condition of the right kind and shape."""
        if config.diffusion.condition == "text":
            return torch.zeros(count, config.text.text_length, config.text.text_dim)
        return torch.zeros(count, dtype=torch.long) if self.labels(config) else None


def shape_of(data: ImageData) -> DataShape:
    return DataShape(data.channels, data.height, data.width, data.classes)


def _require_classes(config: TrainConfig, classes: Sequence[str] | None) -> Sequence[str]:
    if not classes:
        raise InvalidConfigError(
            f"condition 'class' needs labels, and {config.data!r} has none; put the images of each class in a folder "
            f"of its own, or train with condition 'none'"
        )
    return classes


# The network


def build_model(config: TrainConfig, shape: DataShape, model: nn.Module | None = None) -> nn.Module:
    """The network of the configuration, with weights that depend on the seed alone, and its long skips scaled.

    A `model` that exists already is used as it is, and its long skips are scaled.
    """
    given = model is not None
    with torch.random.fork_rng():
        seed_global(config.seed, "weights")
        model = _build(config, shape) if model is None else model
        condition = shape.example_condition(config, 1)
        if condition is not None and not isinstance(model, UViT):  # U-ViT is made for it, and refuses a call without it
            require_condition_used(model, torch.zeros(1, *shape.image), torch.full((1,), 500.0), condition)
        wanted = as_scaling(config.scaling)
        # A network that has been given to an earlier call is scaled already.
        done = given and is_scaled(model) and scaling_of(model).config.to_dict() == wanted.to_dict()
        if (given or not is_uvit(config)) and not isinstance(wanted, NoScaling) and not done:
            example = None if native_plan(model) is not None else example_forward(model, config, shape)
            scale_skips_(model, config.scaling, example)  # a U-ViT of a configuration scales its own skips
        if not given:
            _start_for_mup(model, config, shape)
    if config.hardware.gradient_checkpointing:
        enable = getattr(model, "enable_gradient_checkpointing", None)
        absent = f"`gradient_checkpointing`: {type(model).__name__} has no method enable_gradient_checkpointing()"
        require(enable is not None, absent)
        enable()  # pyright: ignore[reportOptionalCall]
    return model


# Widths: the base of μP, and sweeps


def mup_kinds(model: nn.Module, config: TrainConfig, shape: DataShape) -> Kinds | None:
    """The role of each parameter in μP, by comparison with the network at the base width; None without a base width."""
    base = config.optimizer.base_width
    if base is None:
        return None

    def at(width: int) -> nn.Module:
        with torch.device("meta"):
            return _build(with_width(config, width), shape)

    try:
        return kinds(model, at(base), delta=at(2 * base))
    except (InvalidConfigError, UnclearParameterError) as error:
        raise type(error)(f"`base_width` {base}: {error}") from error


def _start_for_mup(model: nn.Module, config: TrainConfig, shape: DataShape) -> None:
    """Weights that are loaded later, of a run or of --from, take the place of this start."""
    found, base = mup_kinds(model, config, shape), None
    if found is None or config.optimizer.base_width is None:
        return
    if factory_of(config) is not None:  # how it draws its weights is seen by comparing them with those of the base
        base = _build(with_width(config, config.optimizer.base_width), shape)
    start_kinds_(model, found, require_output_start(config.optimizer.output_start), base=base)


def with_width(config: TrainConfig, width: int) -> TrainConfig:
    """The configuration with a network of another width whose attention heads have the size that they had."""
    options = dict(config.model_options)
    if is_uvit(config):
        preset = config.model.partition("/")[2]
        sizes = {name: inspect.signature(UViT).parameters[name].default for name in ("dim", "heads")}
        made = uvit_at({**sizes, **(preset_arguments(preset) if preset else {}), **options}, width)
        return replace(config, model_options=options | {name: made[name] for name in sizes})
    if _from_diffusers(config):
        kind, values = _diffusers_values(config)
        made = unet_at(kind, values | options, width)
        names = [name for name in made if made[name] != (values | options)[name] or name == "block_out_channels"]
        return replace(
            config,
            model_options=options
            | {name: list(made[name]) if isinstance(made[name], tuple) else made[name] for name in names},
        )
    return replace(config, model_options=width_options(_import(config.model), options, width))


def _diffusers_values(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    if config.model.endswith(".json"):
        kind, described = _described(Path(config.model))
        return kind.__name__, described
    name = config.model.partition("/")[2]
    require(name in UNET_PRESETS, f"unknown UNet preset {name!r}; known: {', '.join(UNET_PRESETS)}")
    return UNET_PRESETS[name].kind, dict(UNET_PRESETS[name].arguments)


def uses_channels_last(config: TrainConfig, model: nn.Module) -> bool:
    if config.hardware.channels_last is not None:
        return config.hardware.channels_last
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


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
    return {**EARLIER, **arguments, **known, **config.model_options}


def _build(config: TrainConfig, shape: DataShape) -> nn.Module:
    labels, text = shape.labels(config), config.diffusion.condition == "text"
    length, dim = (config.text.text_length, config.text.text_dim) if text else (None, None)
    size = shape.height if shape.height == shape.width else (shape.height, shape.width)
    options = dict(config.model_options)
    require_buildable(options, "`model_options`")
    try:
        if is_uvit(config):
            return UViT(**uvit_arguments(config, shape), scaling=config.scaling)
        if _from_diffusers(config):
            values = {"sample_size": size, "in_channels": shape.channels, "out_channels": shape.channels}
            values |= {"num_class_embeds": labels} | ({"cross_attention_dim": dim} if text else {}) | options
            if config.model.endswith(".json"):
                kind, described = _described(Path(config.model))
                return kind.from_config({**described, **values})
            return unet(config.model.partition("/")[2], **values)
        # With the user's options, and with what is known of the data where the factory asks for it by name.
        factory = _import(config.model)
        known = {"image_size": size, "channels": shape.channels, "classes": labels}
        known |= {"context_dim": dim, "context_length": length}
        asked = inspect.signature(factory).parameters
        model = factory(**({name: value for name, value in known.items() if name in asked} | options))
    except ScaleLongError:
        raise
    # A factory of the user's own, or a class with options that it was not made for, may fail in any way.
    except Exception as error:
        given = f" with `model_options` {options}" if options else ""
        raise InvalidConfigError(
            f"the model {config.model!r} cannot be built{given}: its code raises {type(error).__name__}: {error}; "
            f"correct the options, or take another `model`"
        ) from error
    is_module = isinstance(model, nn.Module)
    require(is_module, f"{config.model} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _described(path: Path) -> tuple[Any, dict[str, Any]]:
    """The class and the values of a config.json of diffusers. Networks alone: it has other classes, which load files or
    code when they are made, and of a file that names none it would build its default."""
    import diffusers

    described = read_json(path)
    name = str(described.get("_class_name")) if isinstance(described, dict) else "none"
    kind: Any = getattr(diffusers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise InvalidConfigError(f"{path} names the class {name!r}, which is no network of diffusers: correct it")
    require_buildable(described, str(path))
    return kind, described


def _patch_size(shape: DataShape) -> int:
    """The smallest patch, from 2 pixels on, that leaves at most MOST_PATCHES of them."""
    for size in range(2, min(shape.height, shape.width) // 2 + 1):
        fits = shape.height % size == 0 and shape.width % size == 0
        if fits and shape.height * shape.width // size**2 <= MOST_PATCHES:
            return size
    raise InvalidConfigError(
        f"no patch size divides images of {shape.height}x{shape.width} into at most {MOST_PATCHES} patches; give a "
        f"`size` such as 32 or 64, or `model_options` patch_size=..."
    )


# Code that a configuration names

TRUST = "SCALELONG_TRUST"
"""Set to 1, it trusts the code that any run folder or configuration file names."""


def factory_of(config: TrainConfig) -> str | None:
    """The code of someone's own that the configuration has imported and called; None for the models of this library."""
    known = is_uvit(config) or _from_diffusers(config)
    return None if known else config.model


def require_trust(
    config: TrainConfig,
    source: str | PathLike[str],
    trust: bool = False,
    typed: Collection[str] = (),
    training: bool = False,
) -> None:
    """Refuse to run code that a file names, unless its user has agreed: of a model and, for `training`, an optimiser.

    `typed` are the fields that the user has given: what they type needs no consent.
    """
    own = config.optimizer.optimizer
    options = f" with the options {config.model_options}" if config.model_options else ""
    foreign = {"model": f"{config.model!r}{options}"} if factory_of(config) is not None else {}
    if training and ":" in own and not re.fullmatch(r"torch\.optim:[A-Z]\w*", own):
        foreign["optimizer"] = repr(own)
    what = next((f"{name} {text}" for name, text in foreign.items() if name not in typed), None)
    if what is None or trust or os.environ.get(TRUST, "") not in ("", "0"):
        return
    raise UntrustedCodeError(
        f"{source} wants Python code to be run: {what}. The author of that file decides what is "
        f"run, with your rights. If you trust it, repeat the command with --trust (in Python trust=True, or {TRUST}=1)"
    )


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        known = "uvit, uvit/PRESET, unet/PRESET, a config.json of diffusers, package.module:factory"
        raise InvalidConfigError(f"unknown model {name!r}; known: {known}")
    factory = load_object(name, "model")
    require(callable(factory), f"{name} must be a function or a class, got {type(factory).__name__}")
    return factory


def _from_diffusers(config: TrainConfig) -> bool:
    return (config.model.startswith("unet/") and ":" not in config.model) or config.model.endswith(".json")


def example_forward(model: nn.Module, config: TrainConfig, shape: DataShape) -> dict[str, Tensor]:
    """The keyword arguments of a small forward of any model."""
    x, t = torch.zeros(2, *shape.image), torch.full((2,), 500.0)
    return call_arguments(model, x, t, shape.example_condition(config, 2))


# The data, and the conditions that come with them


@dataclass(frozen=True)
class RunData:
    """The data of a configuration, loaded once and handed on to all that need them."""

    config: TrainConfig
    images: ImageData
    """All images, held-out ones included and not encoded: what samples are compared with."""
    train: ImageData
    """The images to train on, or their latents."""
    held_out: ImageData | None = None

    @property
    def shape(self) -> DataShape:
        return shape_of(self.train)

    @cached_property
    def conditions(self) -> Conditions:
        """Captions are encoded here, once."""
        return make_conditions(self.config, self.train.classes, self.train.annotations.captions)

    def inputs(self, device: torch.device | str = "cpu") -> InputMaker:
        """The maker of (x_t, t, condition) from these data."""
        return InputMaker(
            process=NoiseProcess(self.config.diffusion.schedule),
            conditions=self.conditions,
            shape=self.shape.image,
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            flip=self.config.images.flip,
            condition_dropout=self.config.diffusion.condition_dropout,
            device=device,
        )

    def probe(self, count: int, device: torch.device | str = "cpu") -> NoisyInputs:
        """A fixed batch for looking at networks, of held-out images where there are some."""
        return self.inputs(device).probe(self.held_out or self.train, count)


def load_run_data(
    config: TrainConfig,
    progress: Callable[[int, int], None] | None = None,
    image_cache: bool = True,
    data: Any = None,
) -> RunData:
    """The images of a run. `progress` is called with (done, total) while they are decoded.

    `image_cache=False` is for a look at them: nothing is decoded before it is fetched. `data` takes the place of
    `config.data`: an ImageData, or anything that `load_data` takes.
    """
    settings = config.images
    mapped = image_cache and settings.autoencoder is None  # each image is encoded once, and its latents are kept
    reading = settings.reading() if image_cache else {**settings.reading(), "memory_limit": 0}
    images = (
        data
        if isinstance(data, ImageData)
        else load_data(
            config.data if data is None else data,
            **reading,
            progress=progress,
            image_cache=settings.image_cache if mapped else "none",
        )
    )
    if config.diffusion.condition == "class":
        _require_classes(config, images.classes)
    if config.diffusion.condition == "text" and not images.has_captions:
        raise InvalidConfigError(
            f"condition 'text' needs captions, and {config.data!r} has none; put them next to the images, in "
            f"metadata.jsonl or in one .txt file per image, or train with condition 'none'"
        )
    logger.info(images.describe())
    kept, held_out = images, None
    if config.images.autoencoder is not None:
        kept = encode_data(images, Autoencoder(config.images.autoencoder))
    if config.images.held_out > 0:
        kept, held_out = kept.split(config.images.held_out, config.seed)
    return RunData(config, images, kept, held_out)


def load_images(config: TrainConfig) -> tuple[ImageData, ImageData | None]:
    """The images to train on, and those held out."""
    data = load_run_data(config, image_cache=False)
    return data.train, data.held_out


def make_conditions(
    config: TrainConfig,
    classes: Sequence[str] | None,
    captions: Sequence[str] | None = None,
    vocabulary: Sequence[str] | None = None,
) -> Conditions:
    """The captions to be trained on are encoded here, once; for sampling, the vocabulary is what they had."""
    guided = config.diffusion.condition_dropout > 0
    if config.diffusion.condition == "class":
        return ClassCondition(_require_classes(config, classes), guided)
    if config.diffusion.condition == "text":
        text = config.text
        if text.text_encoder == "words":  # which need no cache: they are hashed faster than read from a disk
            return TextCondition(HashedWords(text.text_length, text.text_dim, vocabulary), guided)
        encoder: TextEncoder = PretrainedTextEncoder(text.text_encoder, text.text_length, text.text_dim)
        return TextCondition(encoder if captions is None else cache_captions(encoder, captions), guided)
    return Unconditional()
