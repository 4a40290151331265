"""Two diagnoses of a network.

`diagnose`, before training: where the long skips are, how large, what depends on them, and what to do, if anything.
`explain_nonfinite`, after a step that went wrong: the first module whose output is not finite, the long skip that is
merged there, and the sizes of all skips on the way.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..console import html_lines, html_table, listed, text_table
from ..errors import InvalidInputError
from ..finding import ExampleInputs, SkipPlan, example_call, unwrap
from ..models import count_parameters, tensors_in
from ..theory import skip_sensitivities
from .alarms import MERGE_NORM, bare_merges, norm_of, what_to_do
from .features import Meter, attach_meter, has_bare_merges, known_plan, measure, on_device_of, plan_for, scaling_name

FP16_LIMIT = torch.finfo(torch.float16).max
SAFE_HEADROOM = 8.0
DEEP = 8
"""Long skips from which on runs collapsed at high rates; with four of them nothing was gained by any method."""
TIME_ARGUMENTS = ("t", "time", "times", "timestep", "timesteps", "sigma", "sigmas", "noise_level", "noise_labels")


@dataclass(frozen=True, kw_only=True)
class SkipDiagnosis:
    """One long skip at the weights that the model has now."""

    index: int
    producer: str
    merged_in: str
    shape: tuple[int, ...]
    rms: float
    similarity: float | None
    """How alike the positions are where it is merged: the mean cosine between them."""
    sensitivity: float | None
    """w_i/w_1: how much the output depends on it, relative to the outermost."""
    not_cancelled: float
    """The share of its channels for which a constant κ is not cancelled by the normalisation after the merge."""
    norm: str
    """The normalisation that reads the merge; empty if there is none."""
    shortcut: bool
    """True if a shortcut sees κ even where the normalisation cancels it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Print it, or read its parts."""

    model: str
    parameters: int
    skips: tuple[SkipDiagnosis, ...]
    activation_max: float
    fp16_headroom: float
    """65504 divided by the largest activation at a block."""
    recommendation: str
    """A method of `scale_skips_`: "merge_norm", or "none"."""
    advice: str
    """The same in a sentence, with the reason."""
    reasons: tuple[str, ...]
    """Other findings."""

    def rows(self) -> list[dict[str, str]]:
        return [
            {
                "i": str(skip.index),
                "producer": skip.producer or "the model",
                "merged in": skip.merged_in or "the model",
                "shape": "x".join(map(str, skip.shape)),
                "RMS": f"{skip.rms:.3g}",
                "alike": "-" if skip.similarity is None else f"{skip.similarity:.2f}",
                "w_i/w_1": "-" if skip.sensitivity is None else f"{skip.sensitivity:.2g}",
                "norm": skip.norm or "none",
                "κ kept": f"{skip.not_cancelled:.0%}" + (" + shortcut" if skip.shortcut else ""),
            }
            for skip in self.skips
        ]

    def facts(self) -> dict[str, str]:
        return {
            "model": f"{self.model}, {self.parameters:,} parameters, {len(self.skips)} long skips",
            "largest activation": f"{self.activation_max:.3g}, fp16 headroom {self.fp16_headroom:.3g} times",
            "recommended": self.advice,
        }

    def _lines(self) -> list[str]:
        return [*(f"{name}: {value}" for name, value in self.facts().items()), *(f"- {each}" for each in self.reasons)]

    def __str__(self) -> str:
        return "\n".join([*self._lines(), "", text_table(self.rows())])

    def _repr_html_(self) -> str:
        return html_lines(self._lines()) + html_table(self.rows())

    def to_json(self) -> str:
        page = {"rows": self.rows(), "facts": self.facts(), "reasons": list(self.reasons), "text": str(self)}
        return json.dumps({**page, "recommendation": self.recommendation})


def diagnose(model: nn.Module, batch: ExampleInputs = None) -> Diagnosis:
    """Diagnose a model on a batch: its arguments as a tuple or a dictionary, as in training (noisy images, times, ...).

    Costs a few dozen forwards on the device of the model, which is left as it was.
    """
    host = unwrap(model)
    args, kwargs = on_device_of(host, *example_call(host, batch))
    try:  # keywords turned into positions as far as the signature allows
        bound = inspect.signature(host.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidInputError(f"{type(host).__name__} cannot be called with this batch: {error}") from error
    args, kwargs = bound.args, bound.kwargs
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        raise InvalidInputError("the first argument of the model must be its input, a floating-point tensor")
    plan = plan_for(model, batch)
    meter = measure(host, plan, args, kwargs)
    weights = skip_sensitivities(host, *args, keywords=kwargs)
    largest = max((float(size[1]) for size in meter.blocks.values()), default=math.nan)
    headroom = FP16_LIMIT / max(largest, 1e-30)
    relative = [weight / weights[0] if weights[0] > 0 else None for weight in weights]
    recommendation, advice = _recommend(plan, scaling_name(host), _denoises(host, args, kwargs))
    return Diagnosis(
        model=type(host).__name__,
        parameters=count_parameters(host),
        skips=tuple(
            SkipDiagnosis(
                index=skip.index,
                producer=skip.producer,
                merged_in=skip.consumer,
                shape=tuple(skip.shape),
                rms=float(meter.skips[skip.index][0]) if skip.index in meter.skips else math.nan,
                similarity=float(meter.alike[skip.consumer]) if skip.consumer in meter.alike else None,
                sensitivity=relative[skip.index - 1],
                not_cancelled=1 - skip.readers.cancelled,
                norm=norm_of(skip),
                shortcut=skip.readers.bypass,
            )
            for skip in plan
        ),
        activation_max=largest,
        fp16_headroom=headroom,
        recommendation=recommendation,
        advice=advice,
        reasons=_reasons(relative, headroom),
    )


def _recommend(plan: SkipPlan, scaling: str | None, denoises: bool) -> tuple[str, str]:
    """The method and a sentence: what docs/recipe.md has found for such a network."""
    find_out = "`scalelong range` (sl.rate_range) finds the learning rates that it survives"
    bare = bare_merges(plan, scaling)
    if not denoises:
        return "none", (
            "none. This network takes no time, so it is no diffusion model: there is no evidence that scaling helps "
            "here. If training fails, lower the learning rate"
        )
    if scaling == "merge_norm":
        return "none", "nothing more: merge_norm is attached"
    if not bare:
        norms = Counter(f"a {norm_of(skip)}" if norm_of(skip) else "an addition" for skip in plan)
        named = listed([f"{norm} ({count} of {len(plan)})" for norm, count in norms.items()])
        return "none", f"none: the merges have what lasts, {named}. {find_out}"
    if len(plan) < DEEP:
        return "none", (
            f"none at ordinary learning rates: with {len(plan)} long skips no scaling did as well (docs/recipe.md). If "
            f"training collapses: {MERGE_NORM} before the first step. {find_out}"
        )
    return "merge_norm", (
        f"{MERGE_NORM} before the first step, if the learning rate is high: a norm in each merge is what lasts, and "
        f"{len(bare)} of {len(plan)} merges have none. At ordinary rates no scaling does as well (docs/recipe.md). "
        f"{find_out}"
    )


def _reasons(sensitivities: list[float | None], headroom: float) -> tuple[str, ...]:
    reasons: list[str] = []
    known = [weight for weight in sensitivities if weight is not None]
    if not known:
        reasons.append(
            "the output does not depend on the outermost skip yet (a last layer that starts at zero?), so "
            "sensitivities say nothing before some training"
        )
    elif known[-1] < 0.1 * known[0]:
        reasons.append(
            f"the output depends on the innermost skip {known[-1]:.2g} times as much as on the outermost; the theory "
            f"expects 1"
        )
    if headroom < SAFE_HEADROOM:
        reasons.append(f"activations are within a factor of {headroom:.2g} of fp16's limit: train in bf16")
    return tuple(reasons)


def _denoises(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the model is called with times as well: by their usual names, or as one number for each image."""
    given = [*inspect.signature(host.forward).parameters][: len(args)]
    if any(name in TIME_ARGUMENTS for name in (*given, *kwargs)):
        return True
    return len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() <= 1 and args[1].numel() in (1, len(args[0]))


# A step whose numbers are not finite

NAMED = 5
"""Parameters listed by name."""
HUGE = 1e8
"""Outputs of networks that train stay far below."""


@dataclass
class NonFiniteReport:
    """The findings of a forward and a backward pass of a bad step. Print it."""

    step: int
    last_good: int | None
    layer: str | None = None
    """The first module whose output was not finite."""
    largest: tuple[str, float] = ("", 0.0)
    """The finite output with the largest magnitude before that."""
    merged: tuple[int, ...] = ()
    """The long skips that are merged in the block in which that module lies."""
    skip_rms: dict[int, float] = field(default_factory=dict)
    """Size of every long skip, as far as the pass came."""
    parameters: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    bad_input: bool = False
    rate: float | None = None
    """The learning rate of the step, where it is known."""
    bare: bool | None = None
    """Some merges have no norm (`what_to_do`)."""
    rollbacks: int = 0
    """Rollbacks that were tried before and did not help."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{index}: {rms:.3g}" for index, rms in sorted(self.skip_rms.items()))
        ran_away = self.largest[1] > HUGE
        remark = ", and the numbers have run away: that is the rate" if ran_away else ""
        merged = listed([str(index) for index in self.merged])
        where = f"First module with a non-finite output: {self.layer}"
        where += f", in the block that merges long skip {merged}." if self.merged else "."
        if self.layer is None:
            where = "A second pass over the same batch was finite"
            where += ", with huge numbers." if ran_away else ": look for hardware faults or random layers."
            if self.gradients:
                where = "All outputs of the forward pass are finite; the backward pass is not."
        lines = {
            f"the loss or the gradient of step {self.step} is not finite; its update was not applied.": True,
            "The batch itself holds non-finite numbers.": self.bad_input,
            f"Weights that are not finite: {listed(self.parameters, NAMED)}.": self.parameters,
            where: True,
            f"Largest output before: {self.largest[1]:.3g} in {self.largest[0]}.": self.largest[0],
            f"RMS of the long skips (1 is the outermost): {sizes}.": sizes,
            f"Gradients that are not finite: {listed(self.gradients, NAMED)}.": self.gradients,
            f"Last good checkpoint: {'none was saved' if self.last_good is None else f'step {self.last_good}'}.": True,
            f"Rollbacks with lower rates that did not help: {self.rollbacks} (rollbacks.json).": self.rollbacks,
            f"The learning rate was {self.rate}{remark}.": self.rate is not None,
            what_to_do(False if remark else self.bare, self.rate): True,
        }
        return "\n".join(line for line, known in lines.items() if known)


def explain_nonfinite(
    model: nn.Module,
    backward: Callable[[], Any],
    inputs: list[Tensor],
    step: int,
    last_good: int | None,
    *,
    rate: float | None = None,
) -> NonFiniteReport:
    """Run `backward` (the passes of the bad step on this model) and look at the output of every module."""
    found = NonFiniteReport(step, last_good, bad_input=not all(map(_finite, inputs)), rate=rate)
    plan, meter, host = known_plan(model), Meter(on=True), unwrap(model)
    found.bare = has_bare_merges(model)
    found.parameters = [name for name, value in model.named_parameters() if not _finite(value)]
    names = {module: name for name, module in host.named_modules()}

    def look(module: nn.Module, _: Any, output: Any) -> None:
        # Hooks of inner modules come first, so the first non-finite output is that of the innermost.
        if found.layer is not None:
            return
        name, outputs = names[module], list(tensors_in(output))
        title = f"{name or 'the whole model'} ({type(module).__name__})"
        if not all(map(_finite, outputs)):
            inside = [skip for skip in plan or () if skip.consumer and f"{name}.".startswith(f"{skip.consumer}.")]
            found.layer, found.merged = title, tuple(skip.index for skip in inside)
            return
        for value in outputs:
            peak = float(value.detach().abs().max()) if value.numel() else 0.0
            found.largest = max(found.largest, (title, peak), key=lambda entry: entry[1])

    handles = [] if plan is None else attach_meter(host, plan, meter)
    handles += [module.register_forward_hook(look) for module in names]
    model.zero_grad(set_to_none=True)
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    found.skip_rms = {index: float(size[0]) for index, size in meter.skips.items()}
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    found.gradients = [name for name, value in gradients.items() if not _finite(value)]
    model.zero_grad(set_to_none=True)
    return found


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.detach()).all()) if value.is_floating_point() else True
