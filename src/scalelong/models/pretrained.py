"""Load a folder of weights with its scaling: `from_pretrained`.

    unet = sl.from_pretrained("my-unet")            # a folder of diffusers' or of UViT's save_pretrained
    pipeline = sl.from_pretrained("my-pipeline")    # a folder of a pipeline: every scaled part of it

diffusers reads the weights. The scaling is read from the tensor beside them (`attaching.record`). No code runs.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ..attaching import KEY, LOAD_WITH, load_scaling_, saved_scalings, scale_skips_, spelled
from ..errors import InvalidConfigError, ScaleLongError, ScalingMismatchError, UnsupportedModelError
from ..files import read_json
from ..optional import needs
from ..scaling import as_scaling
from .uvit import UViT

CONFIG = "config.yaml"
"""What makes a folder a run of scalelong."""
_EMA = "optimization_step"
"""An entry that diffusers' EMAModel adds to the configuration."""


def from_pretrained(path: str | PathLike[str], **options: Any) -> Any:
    """The model or pipeline of a folder, with its weights and its scaling.

    `options` go to diffusers' own `from_pretrained`: `torch_dtype`, `subfolder`, `variant` and so on.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UnsupportedModelError(
            f"{folder} is not a folder. For a model of the Hugging Face hub, call huggingface_hub.snapshot_download "
            f"first, and give its result"
        )
    if (folder / CONFIG).exists():
        raise UnsupportedModelError(f"{folder} is a run: scalelong.training.load_run({str(folder)!r}).model loads it")
    if (folder / "model_index.json").exists() and "subfolder" not in options:
        with _complaints_hushed(), _readable(folder):
            pipeline = _diffusers().DiffusionPipeline.from_pretrained(folder, **options)
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module) and (folder / name).is_dir():
                _restore(part, folder / name)
        return pipeline
    inner = folder / options.get("subfolder", "")
    if not (inner / "config.json").exists():
        raise UnsupportedModelError(
            f"{inner} has no model_index.json (a pipeline), config.json (a model) or {CONFIG} (a run). Weights alone: "
            f"build the model, scalelong.load_scaling_(model, path), then model.load_state_dict(...)"
        )
    said = read_json(inner / "config.json")
    name = said.get("_class_name") if isinstance(said, dict) else None
    if name == UViT.__name__:
        return UViT.from_pretrained(inner)
    require_buildable(said if isinstance(said, dict) else {}, str(inner / "config.json"))
    kind = getattr(_diffusers(), name, None) if isinstance(name, str) else None
    if kind is None:
        raise UnsupportedModelError(
            f"{inner / 'config.json'} names the class {name!r}, which diffusers does not have: correct it"
        )
    with _complaints_hushed(), _readable(folder):
        model = kind.from_pretrained(folder, **options)
    _restore(model, inner)
    return model


MOST_DEPTH, MOST_WIDTH = 1000, 1_000_000


def require_buildable(options: Mapping[str, Any], source: str) -> None:
    """Refuse what would be built block by block until the memory is full."""
    for name, value in options.items():
        most = MOST_DEPTH if name in ("depth", "layers_per_block", "transformer_layers_per_block") else MOST_WIDTH
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int) and abs(number) > most:
                raise InvalidConfigError(f"{source}: {name} may be at most {most}, got {str(number)[:40]}")


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """diffusers, safetensors and torch refuse a damaged folder in many ways."""
    try:
        yield
    except ScaleLongError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"diffusers cannot load {folder}: it says {said!r}. Check its files, or write or download the folder again"
        ) from error


def _diffusers() -> Any:
    return needs("diffusers", "train", "a folder of save_pretrained")


def _restore(model: Any, folder: Path) -> None:
    said = dict(getattr(model, "config", None) or {}).get(KEY)
    if isinstance(said, dict):
        said = {name: value for name, value in said.items() if name != LOAD_WITH}
    if saved_scalings(folder):
        load_scaling_(model, folder)
    elif said is not None and _EMA in model.config and as_scaling(said).looks_at_data is False:
        scale_skips_(model, said)  # EMAModel writes the averages of the parameters, and constants need none
    elif said is not None:
        raise ScalingMismatchError(
            f"{folder / 'config.json'} says that the long skips are scaled by {spelled(said)}, and the weights beside "
            f"it do not hold that scaling: whoever wrote them built a plain model. With diffusers' EMAModel, save the "
            f"averages by ema.store(model.parameters()); ema.copy_to(model.parameters()); model.save_pretrained(path); "
            f"ema.restore(model.parameters())"
        )


@contextmanager
def _complaints_hushed() -> Iterator[None]:
    """diffusers logs entries that its classes do not know; ours are read right behind it."""

    def is_other(record: logging.LogRecord) -> bool:
        return KEY not in record.getMessage()

    loggers = [logging.getLogger(f"diffusers.{name}") for name in ("models.modeling_utils", "configuration_utils")]
    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)
