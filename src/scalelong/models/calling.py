"""One way to call any model: what it is given, under which names, and the tensor that it answers with.

Networks differ in how they name their condition (`y`, `class_labels`, `context`, `encoder_hidden_states`, ...) and in
how they wrap their output (a tensor, diffusers' `.sample`, a tuple). Everything that runs a model goes through here.

    denoiser = Denoiser(model)
    output = denoiser(x_t, t, condition)                        # a tensor like x_t
    model(**call_arguments(model, x_t, t, condition))           # the same call, by the model's own names

A condition is a tensor with one row per image: whole numbers (B,) are labels, floating-point numbers (B, length, dim)
are the tokens of a text.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import InvalidConfigError, InvalidInputError, ScaleLongError, lacks_memory

LABEL_ARGUMENTS = ("y", "class_labels", "labels")
"""Names under which networks take labels."""

CONTEXT_ARGUMENTS = ("context", "encoder_hidden_states")
"""Names under which networks take the tokens of a text."""


class Denoiser:
    """Calls a network as (x_t, t, condition), whatever it names its condition and however it wraps its output.

    `call` is what is called if that is not the network itself: compiled, or wrapped for several processes.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any] | None = None) -> None:
        self.call = model if call is None else call
        self.name = type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        self.label_argument = next((name for name in LABEL_ARGUMENTS if name in parameters), None)
        self.context_argument = next((name for name in CONTEXT_ARGUMENTS if name in parameters), None)

    def keywords(self, condition: Tensor | None) -> dict[str, Tensor]:
        """The condition under the name that the network has for it. A network that has none raises."""
        if condition is None:
            return {}
        text = condition.is_floating_point()
        name = self.context_argument if text else self.label_argument
        if name is None:
            kind, what, known = ("text", "tokens", CONTEXT_ARGUMENTS) if text else ("class", "labels", LABEL_ARGUMENTS)
            raise InvalidConfigError(
                f"condition {kind!r} needs a model whose forward takes {what} as one of {', '.join(known)}; "
                f"{self.name} takes none of them"
            )
        return {name: condition}

    def __call__(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        keywords = self.keywords(condition)
        try:
            output = first_tensor(self.call(x, t, **keywords))
        except Exception as error:
            failure = foreign_failure(error)
            if failure is None:
                raise
            raise InvalidConfigError(
                f"{self.name} was built, and cannot run on images of {tuple(x.shape[1:])}: {failure}. Change its "
                f"options (--model-options, or its config.json), or take another --model"
            ) from error
        if output is None or output.shape != x.shape:
            found = "no tensor and no `.sample`" if output is None else tuple(output.shape)
            raise InvalidConfigError(
                f"the model must return a tensor of the shape of its input, {tuple(x.shape)}, or an object with it as "
                f"`.sample`; got {found}"
            )
        return output

    def given(self, condition: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        """The network with its condition, as a function of x_t and t."""
        return lambda x, t: self(x, t, condition)


def foreign_failure(error: Exception) -> str | None:
    """The line of another's network that failed, and what it says; None for any other failure.

    A network may be built from options that do not fit each other or the images, and fail when it runs. Our own faults,
    memory that does not suffice, and other processes that are gone have other remedies.
    """
    if isinstance(error, ScaleLongError) or lacks_memory(error) or type(error).__name__.startswith("Dist"):
        return None
    stack = list(traceback.walk_tb(error.__traceback__))
    owners = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in stack]
    ours = __name__.partition(".")[0]
    # The innermost that is neither torch's nor ours wrote the call that failed.
    place = max((i for i, owner in enumerate(owners) if owner not in ("torch", ours)), default=-1)
    if place < 0 or ours in owners[place:]:
        return None
    frame, line = stack[place]
    said = " ".join(str(error).split())[:300]
    return f"line {line} of {os.path.basename(frame.f_code.co_filename)} raises {type(error).__name__}: {said}"


def call_arguments(model: nn.Module, x: Tensor, t: Tensor, condition: Tensor | None = None) -> dict[str, Tensor]:
    """The arguments of a call, by the names that the model's forward has for them."""
    inputs = dict(zip(inspect.signature(model.forward).parameters, (x, t), strict=False))
    return inputs | Denoiser(model).keywords(condition)


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments as keywords alone."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InvalidInputError(f"{type(model).__name__} cannot be called with this batch: {error}") from error


# Outputs


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor of an output: itself, diffusers' `sample`, the first in a tuple or dictionary."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)


def output_tensor(result: Any, select: Callable[[Any], Tensor] | None = None) -> Tensor:
    """The output as a tensor. `select` picks it, where a model returns something of its own."""
    if select is not None:
        return select(result)
    tensor = first_tensor(result)
    if tensor is None:
        raise InvalidInputError(f"a model must return a tensor, got {type(result).__name__}; pass output= to pick one")
    return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries, in order; of other objects, those of their `sample`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(entry)
    elif isinstance(sample := getattr(value, "sample", None), Tensor):
        yield sample


# Looking at a model without a trace


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and a forked random state within the block; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    # By name: torch warns where it would have to fork the states of several devices.
    devices = {value.device for value in model.parameters() if value.device.type == "cuda"}
    model.eval()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Does a model use its condition?


def require_condition_used(model: nn.Module, x: Tensor, t: Tensor, condition: Tensor) -> None:
    """Raise InvalidConfigError unless the model takes the condition and computes something from it.

    A name in the signature is not enough: diffusers' UNet2DConditionModel takes labels and tokens in every
    configuration, and without an embedding or cross-attention it drops them. Such a model would be trained without its
    condition.
    """
    arguments = call_arguments(model, x, t, condition)
    kind = "text" if condition.is_floating_point() else "class"
    try:
        with evaluating(model), torch.no_grad(), _Readers(condition) as readers:
            model(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ScaleLongError):
            raise
        raise InvalidConfigError(
            f"{type(model).__name__} cannot be called with condition {kind!r} on images of {tuple(x.shape[1:])}: "
            f"{error}"
        ) from error
    if not readers.found:
        name = next(name for name, value in arguments.items() if value is condition)
        remedy = "cross-attention blocks" if kind == "text" else "an embedding of labels (num_class_embeds)"
        raise InvalidConfigError(
            f"condition {kind!r} has no effect on this {type(model).__name__}: its forward takes {name}, but nothing "
            f"is computed from it. Give the model {remedy}, or train with condition 'none'"
        )


class _Readers(TorchFunctionMode):
    """Notes whether an operation takes a tensor and gives a tensor. Asking for its shape or device does not count."""

    def __init__(self, watched: Tensor) -> None:
        super().__init__()
        self.watched, self.found = watched, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = any(tensor is self.watched for tensor in tensors_in([args, kwargs or {}]))
        if taken and any(True for _ in tensors_in(result)):
            self.found = True
        return result
