"""Optimisers and the rate over time, by name or as package.module:name.

    --optimizer sgd --optimizer-options momentum=0.9          one of torch.optim
    --optimizer muon                                          hidden matrices by Muon, the rest by AdamW
    --optimizer lion_pytorch:Lion                             any class of torch's protocol
    --optimizer schedule-free                                 AdamW of the package schedulefree (Defazio et al., 2024)
    --decay polynomial --decay-options power=2                a schedule of diffusers.optimization
    --decay torch.optim.lr_scheduler:StepLR --decay-options step_size=1000 gamma=0.5

The rate is a function of the step alone, whatever makes it, so that a resumed run has the rates of one that was never
interrupted: a scheduler of torch's is stepped beside the run, on a parameter of its own.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..config import OptimizerConfig
from ..errors import InvalidConfigError
from ..muon import Muon, groups_for_muon
from ..mup import Kind, groups_of
from ..optional import load_object, needs

# pyright: reportPrivateImportUsage=false

OPTIMIZERS = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "radam": "RAdam",
    "nadam": "NAdam",
    "adamax": "Adamax",
    "adagrad": "Adagrad",
    "adafactor": "Adafactor",
}
"""From our names to classes of torch.optim."""
MUON = "muon"


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, kinds: Mapping[str, Kind] | None = None
) -> torch.optim.Optimizer:
    """The optimiser of what is trained. It gets the rate, and betas and weight decay if it takes them.

    With the kinds of μP its parameters come in groups, each with its share of the rate (`lr_scale`).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = optimizer_class(config)
    accepted = _accepted(kind)
    known: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        known["fused"] = _can_fuse(parameters)
    values = {name: value for name, value in known.items() if accepted is None or name in accepted}
    unknown = [name for name in config.optimizer_options if accepted is not None and name not in accepted]
    if unknown:
        takes = ", ".join(name for name in accepted or () if name != "params")
        raise InvalidConfigError(f"--optimizer {config.optimizer} has no option {', '.join(unknown)}; it takes {takes}")
    try:
        given: Any = parameters
        if config.optimizer == MUON:
            given = groups_for_muon(model, kinds, lr=config.lr, weight_decay=config.weight_decay)
        elif kinds is not None:
            given = groups_of(model, kinds, lr=config.lr, weight_decay=config.weight_decay)
        made = kind(given, **{**values, **config.optimizer_options})
    # A class of someone's own, or options that it was not made for, may fail in any way.
    except Exception as error:
        raise InvalidConfigError(
            f"--optimizer {config.optimizer} cannot be made with --optimizer-options {config.optimizer_options} "
            f"({type(error).__name__}: {error})"
        ) from error
    _require_steps(made, config)
    return made


def optimizer_class(config: OptimizerConfig) -> Any:
    if config.optimizer in OPTIMIZERS:
        return getattr(torch.optim, OPTIMIZERS[config.optimizer])
    if config.optimizer == MUON:
        return Muon
    if config.optimizer == "schedule-free":
        return needs("schedulefree", None, "--optimizer schedule-free").AdamWScheduleFree
    return load_object(config.optimizer, "optimizer")


def averages_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Schedule-free optimisers hold an average of the weights, and lend it between `eval()` and `train()`."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _accepted(kind: Any) -> list[str] | None:
    """The names of its arguments; None if it takes any."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return None
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if any_name else [parameter.name for parameter in parameters]


def _require_steps(made: Any, config: OptimizerConfig) -> None:
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidConfigError(
            f"--optimizer {config.optimizer} must make a torch.optim.Optimizer, got {type(made).__name__}"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InvalidConfigError(
            f"--optimizer {config.optimizer} evaluates the loss several times in a step (closure), which training here "
            f"does not do; take one that goes by the gradient alone"
        )


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    devices = _get_fused_kernels_supported_devices()
    return all(parameter.is_floating_point() and parameter.device.type in devices for parameter in parameters)


# The rate after warm-up, as a share of --lr


def falling(config: OptimizerConfig, step: int, end: int) -> float:
    """The share of the rate at a step of `end`, both counted from the end of the warm-up on."""
    make = _of_torch if ":" in config.decay else _of_diffusers
    return make(config.decay, tuple(sorted(_frozen(config.decay_options).items())), config.lr, end)(max(0, step))


@lru_cache(maxsize=8)
def _of_diffusers(name: str, options: tuple[tuple[str, Any], ...], lr: float, end: int) -> Callable[[int], float]:
    schedules = needs("diffusers.optimization", "train", f"--decay {name}")
    function = schedules.TYPE_TO_SCHEDULER_FUNCTION[schedules.SchedulerType(name)]
    known = {"num_warmup_steps": 0, "num_training_steps": end}
    values = {key: value for key, value in known.items() if key in inspect.signature(function).parameters}
    optimizer = _dummy(lr)
    made = _made(name, options, lambda given: function(optimizer, **{**values, **given}))
    return made.lr_lambdas[0]


@lru_cache(maxsize=8)
def _of_torch(name: str, options: tuple[tuple[str, Any], ...], lr: float, end: int) -> Callable[[int], float]:  # noqa: ARG001
    kind = load_object(name, "decay")
    if kind is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise InvalidConfigError(f"--decay {name} looks at the loss: the rate must be a function of the step alone")
    optimizer = _dummy(lr)
    made = _made(name, options, lambda given: kind(optimizer, **given))
    shares = [optimizer.param_groups[0]["lr"] / lr]

    def share(step: int) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a scheduler that is stepped without its optimiser
            while len(shares) <= step:
                made.step()
                shares.append(float(optimizer.param_groups[0]["lr"]) / lr)
        return shares[step]

    return share


def _dummy(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr or 1.0)


def _made(name: str, options: tuple[tuple[str, Any], ...], make: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make({key: list(value) if isinstance(value, tuple) else value for key, value in options})
    except InvalidConfigError:
        raise
    except Exception as error:
        raise InvalidConfigError(
            f"--decay {name} cannot be made with --decay-options {dict(options)} ({type(error).__name__}: {error})"
        ) from error


def _frozen(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
