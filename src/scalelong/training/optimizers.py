"""Optimisers and the rate over time, by name or as package.module:name.

    --optimizer sgd --optimizer-options momentum=0.9          one of torch.optim
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
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import InvalidConfigError
from ..mup import Kind, groups_of
from ..optional import load_object, needs
from ..runs.config import OptimizerConfig

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
        if kinds is not None:
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
    if config.optimizer == "schedule-free":
        return needs("schedulefree", None, "--optimizer schedule-free").AdamWScheduleFree
    return load_object(config.optimizer, "optimizer")


class QuickAdamW:
    """`step` and `zero_grad` of torch's fused AdamW, without the work that is the same at every step.

    torch looks up the state of each parameter and sorts all tensors by device and type, every time: for a small network
    that takes longer than the update. Here the lists are made once, and the steps of all parameters, which each have a
    tensor of their own, become views of one. The kernel is the same, and so is every bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.lists: list[tuple[list[Any], ...]] = []
        self.steps: list[torch.Tensor] = []
        """For each group, the tensor that has the steps of all of its parameters."""

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """One device and type in each group, and nothing that another kernel would be called for."""
        return type(optimizer) is torch.optim.AdamW and all(
            group["fused"]
            and not (group["amsgrad"] or group["maximize"] or group["capturable"])
            and {type(parameter) for parameter in group["params"]} == {nn.Parameter}
            and len({(parameter.device, parameter.dtype) for parameter in group["params"]}) == 1
            for group in optimizer.param_groups
        )

    def step(self) -> None:
        optimizer = self.optimizer
        if not self._is_current():
            self.steps = [self._joined_steps(group) for group in optimizer.param_groups]
            self.lists = [self._lists(group) for group in optimizer.param_groups]
        gradients = [[parameter.grad for parameter in lists[0]] for lists in self.lists]
        if any(gradient is None for group in gradients for gradient in group):
            optimizer.step()  # parameters that took no part in the loss are left as they are
            return
        # The monitor reads gradients in a hook, which comes and goes.
        for before in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            before(optimizer, (optimizer,), {})
        self._update(gradients)
        for after in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            after(optimizer, (optimizer,), {})

    @torch.no_grad()
    def _update(self, gradients: list[list[Any]]) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)  # set by the guard: no update
        if found_inf is not None and found_inf.is_cpu:
            if found_inf:
                return
            found_inf = None
        for group, given, together, (parameters, means, squares, steps) in zip(
            self.optimizer.param_groups, gradients, self.steps, self.lists, strict=True
        ):
            beta1, beta2 = group["betas"]
            together += 1
            torch._fused_adamw_(
                parameters,
                given,
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            if found_inf is not None:
                together -= found_inf

    def zero_grad(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def _joined_steps(self, group: dict[str, Any]) -> torch.Tensor:
        states = [self.optimizer.state[parameter] for parameter in group["params"]]
        together = torch.stack([state["step"] for state in states])
        for state, step in zip(states, together.unbind(), strict=True):
            state["step"] = step
        return together

    def _lists(self, group: dict[str, Any]) -> tuple[list[Any], ...]:
        states = [self.optimizer.state[parameter] for parameter in group["params"]]
        return group["params"], *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))

    def _is_current(self) -> bool:
        """Not before the first step, and not when a state was loaded, which makes new tensors."""
        state = self.optimizer.state
        return bool(self.lists) and all(state[lists[0][-1]]["exp_avg"] is lists[1][-1] for lists in self.lists)


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
