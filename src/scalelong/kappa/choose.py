"""One door to the three estimators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..theory.moments import image_moments
from ..theory.sensitivity import count_skips
from .choice import KappaChoice
from .moments import choose_from_moments
from .network import ModelInputs, choose_from_network, default_inputs, example_arguments
from .pilot import ModelSource, choose_by_pilot

METHODS = ("data", "network", "pilot")

# This many images are gathered from a callable that gives batches.
GATHERED = 2048

Data = Tensor | Callable[[], Tensor] | Sequence[Tensor]


def choose_kappa(
    model: ModelSource | None = None,
    data: Data | None = None,
    schedule: Any = "ddpm",
    method: str = "data",
    *,
    skips: int | None = None,
    inputs: ModelInputs = default_inputs,
    **pilot: Any,
) -> KappaChoice:
    """κ for constant scaling, κ_i = κ^(i-1) (Eq. 8), with its range and the reasons in words.

    `method`: "data" needs the number of long skips (`skips`, or a model to count them in) and is best given `data`;
    "network" needs a model and data; "pilot" trains, and needs a model (better: a function that builds one) and data.
    `data`: images (n, C, H, W) as the network sees them, usually in [-1, 1], or a function that gives such batches.
    `schedule`: "ddpm", "vp", "cosine", the values ᾱ_t, or a diffusers scheduler.
    `inputs(x_t, t)` gives the arguments of the model, for models that are not called as model(x_t, t).
    Other options (`grid`, `steps`, `seeds`, `learning_rate`, `batch_size`) go to the pilot.
    """
    if method not in METHODS:
        raise InvalidConfigError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if pilot and method != "pilot":
        raise InvalidConfigError(f"the options {', '.join(sorted(pilot))} belong to method='pilot'")
    images = None if data is None else _images(data)
    if method == "data":
        return choose_from_moments(_skips(skips, model, images, schedule, inputs), images, schedule)
    if model is None or images is None:
        raise InvalidConfigError(f"method={method!r} needs both a model and data")
    if method == "network":
        return choose_from_network(_built(model), images, schedule, inputs)
    return choose_by_pilot(model, images, schedule, inputs=inputs, **pilot)


def _images(data: Data) -> Tensor:
    if callable(data):
        batches = []
        while sum(map(len, batches)) < GATHERED:
            batches.append(data())
        images = torch.cat(batches)
    else:
        images = data if isinstance(data, Tensor) else torch.stack(list(data))
    image_moments(images[:1])  # says what is wrong with images that are not images
    if not bool(torch.isfinite(images).all()):
        raise InvalidConfigError("the data contains values that are not finite")
    return images


def _skips(
    skips: int | None, model: ModelSource | None, images: Tensor | None, schedule: Any, inputs: ModelInputs
) -> int:
    if skips is not None:
        return skips
    if model is None:
        raise InvalidConfigError("method='data' needs the number of long skips: pass skips=N, or a model")
    arguments = () if images is None else example_arguments(images, schedule, inputs)
    return count_skips(_built(model), arguments)


def _built(model: ModelSource) -> nn.Module:
    return model if isinstance(model, nn.Module) else model()
