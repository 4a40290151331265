"""Optimisers and the rate over time, by name or as package.module:name.

    --optimizer sgd --optimizer-options momentum=0.9          one of torch.optim
    --optimizer muon                                          hidden matrices by Muon, the rest by AdamW
    --optimizer lion_pytorch:Lion                             any class of torch's protocol
    --decay polynomial --decay-options power=2                a schedule of diffusers.optimization

The rate is a function of the step alone, so that a resumed run has the rates of one that was never interrupted.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from ..config import OptimizerConfig
from ..errors import InvalidConfigError, require
from ..muon import Muon, groups_for_muon
from ..mup import LR_SCALE, Kind, groups_of
from ..optional import load_object, needs

# pyright: reportPrivateImportUsage=false

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "muon": Muon,
}


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, kinds: Mapping[str, Kind] | None = None
) -> torch.optim.Optimizer:
    """The optimiser of what is trained. It gets the rate, and betas and weight decay if it takes them.

    With the kinds of μP its parameters come in groups, each with its share of the rate (`lr_scale`).
    """
    name, options = config.optimizer, config.optimizer_options
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind: Any = OPTIMIZERS.get(name) or load_object(name, "optimizer")
    known: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        devices = _get_fused_kernels_supported_devices()
        known["fused"] = all(each.is_floating_point() and each.device.type in devices for each in parameters)
    accepted = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        known = {key: value for key, value in known.items() if key in accepted}
        unknown, takes = [key for key in options if key not in accepted], [key for key in accepted if key != "params"]
        has_none = f"`optimizer` {name} has no option {', '.join(unknown)}; it takes {', '.join(takes)}"
        require(not unknown, has_none)
    try:
        if name == "muon":
            parameters = groups_for_muon(model, kinds, lr=config.lr, weight_decay=config.weight_decay)
        elif kinds is not None:
            parameters = groups_of(model, kinds, lr=config.lr, weight_decay=config.weight_decay)
        made = kind(parameters, **{**known, **options})
    # A class of someone's own, or options that it was not made for, may fail in any way.
    except Exception as error:
        raise InvalidConfigError(
            f"`optimizer` {name} cannot be made with `optimizer_options` {options} ({type(error).__name__}: {error})"
        ) from error
    is_one = isinstance(made, torch.optim.Optimizer)
    require(is_one, f"`optimizer` {name} must make a torch.optim.Optimizer, got {type(made).__name__}")
    closure = inspect.signature(made.step).parameters.get("closure")
    plain = (closure is None or closure.default is not closure.empty) and not callable(getattr(made, "eval", None))
    other = "evaluates the loss several times in a step (closure), or holds an average of its own (schedule-free)"
    require(plain, f"`optimizer` {name} {other}: take one that goes by the gradient alone")
    return made


# The rate as a function of the step


def rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step: linear warm-up, then constant or a decay to zero."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "constant":
        return config.lr * warm
    done, length = max(0, step - config.warmup), max(1, (config.decay_steps or steps) - config.warmup)
    progress = min(1.0, done / length)
    if config.decay == "linear":
        share = 1.0 - progress
    elif config.decay == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        frozen = {
            key: tuple(value) if isinstance(value, list) else value for key, value in config.decay_options.items()
        }
        share = _of_diffusers(config.decay, tuple(sorted(frozen.items())), config.lr, length)(done)
    return config.lr * warm * share


@lru_cache(maxsize=8)
def _of_diffusers(name: str, options: tuple[tuple[str, Any], ...], lr: float, length: int) -> Callable[[int], float]:
    """The share of the rate by the steps since the warm-up."""
    schedules = needs("diffusers.optimization", "train", f"`decay` {name}")
    function = schedules.TYPE_TO_SCHEDULER_FUNCTION[schedules.SchedulerType(name)]
    known = {"num_warmup_steps": 0, "num_training_steps": length}
    values = {key: value for key, value in known.items() if key in inspect.signature(function).parameters}
    values |= {key: list(value) if isinstance(value, tuple) else value for key, value in options}
    try:
        return function(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr or 1.0), **values).lr_lambdas[0]
    except Exception as error:  # options may be anything
        raise InvalidConfigError(
            f"`decay` {name} cannot be made with `decay_options` {dict(options)} ({type(error).__name__}: {error})"
        ) from error


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups. A group with an entry "lr_scale" gets that many times the rate."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(LR_SCALE, 1.0)


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that `set_rate` was given."""
    group = min(optimizer.param_groups, key=lambda group: LR_SCALE in group)  # one without a factor, if there is one
    return group["lr"] / group.get(LR_SCALE, 1.0)
