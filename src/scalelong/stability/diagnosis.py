"""One page before training: where the long skips are, how large, what depends on them, and what to do, if anything."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..console import html_lines, html_table, listed, text_table
from ..errors import InvalidInputError
from ..finding import ExampleInputs, SkipPlan, example_call, unwrap
from ..models import count_parameters
from ..optional import needs
from ..theory import jacobian_norm, skip_sensitivities
from .advice import MERGE_NORM, bare_merges, norm_of
from .features import Features, on_device_of, plan_for, probe, scaling_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FP16_LIMIT = torch.finfo(torch.float16).max
SAFE_HEADROOM = 8.0
POWER_STEPS = 20
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
    """Whether a shortcut sees κ even where the normalisation cancels it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Print it, or read its parts."""

    model: str
    parameters: int
    skips: tuple[SkipDiagnosis, ...]
    jacobian_norm: float
    """‖∂ output / ∂ input‖ for the first example: by how much a small change of the input can grow."""
    activation_max: float
    fp16_headroom: float
    """65504 divided by the largest activation at a block."""
    recommendation: str
    """A method of `scale_skips_`: "merge_norm", or "none"."""
    advice: str
    """The same in a sentence, with the reason."""
    reasons: tuple[str, ...]
    """What else was found."""

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
            "Jacobian norm": f"{self.jacobian_norm:.3g}",
            "largest activation": f"{self.activation_max:.3g}, fp16 headroom {self.fp16_headroom:.3g} times",
            "recommended": self.advice,
        }

    def __str__(self) -> str:
        return "\n".join([*self._lines(), "", text_table(self.rows())])

    def _lines(self) -> list[str]:
        return [*(f"{name}: {value}" for name, value in self.facts().items()), *(f"- {each}" for each in self.reasons)]

    def to_json(self) -> str:
        page = {"rows": self.rows(), "facts": self.facts(), "reasons": list(self.reasons), "text": str(self)}
        return json.dumps({**page, "recommendation": self.recommendation})

    def _repr_html_(self) -> str:
        return html_lines(self._lines()) + html_table(self.rows())

    def plot(self) -> Figure:
        """Size and influence of each long skip, from the outermost to the innermost, as a figure of matplotlib."""
        figure = needs("matplotlib.figure", "report", "drawing a diagnosis").Figure(
            figsize=(8, 3), layout="constrained"
        )
        left, right = figure.subplots(1, 2)
        index = [skip.index for skip in self.skips]
        left.bar(index, [skip.rms for skip in self.skips])
        left.set(ylabel="RMS", title="size")
        for name in ("sensitivity", "similarity"):
            values = [getattr(skip, name) for skip in self.skips]
            right.plot(index, [math.nan if value is None else value for value in values], "o-", label=name)
        right.set(title="influence on the output (w_i/w_1), similarity of tokens")
        right.legend()
        for axes in (left, right):
            axes.set_xticks(index)
            axes.set_xlabel("long skip, outermost first")
        return figure


def diagnose(model: nn.Module, batch: ExampleInputs = None) -> Diagnosis:
    """Diagnose a model on a batch: its arguments as a tuple or a dictionary, as in training (noisy images, times, ...).

    Costs a few dozen forwards on the device of the model, which is left as it was.
    """
    host = unwrap(model)
    args, kwargs = _positional(host, *on_device_of(host, *example_call(host, batch)))
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        raise InvalidInputError("the first argument of the model must be its input, a floating-point tensor")
    plan = plan_for(model, batch)
    features = probe(host, *args, plan=plan, **kwargs)
    weights = skip_sensitivities(host, *args, keywords=kwargs)
    single = tuple(_first_example(value, len(args[0])) for value in args)
    single_kwargs = {name: _first_example(value, len(args[0])) for name, value in kwargs.items()}
    largest = max(features.block_max.values(), default=math.nan)
    headroom = FP16_LIMIT / max(largest, 1e-30)
    relative = [weight / weights[0] if weights[0] > 0 else None for weight in weights]
    recommendation, advice = _recommend(plan, scaling_name(host), _denoises(host, args, kwargs))
    return Diagnosis(
        model=type(host).__name__,
        parameters=count_parameters(host),
        skips=_skips(plan, features, relative),
        jacobian_norm=jacobian_norm(host, *single, steps=POWER_STEPS, keywords=single_kwargs),
        activation_max=largest,
        fp16_headroom=headroom,
        recommendation=recommendation,
        advice=advice,
        reasons=_reasons(relative, headroom),
    )


def _skips(plan: SkipPlan, features: Features, relative: list[float | None]) -> tuple[SkipDiagnosis, ...]:
    return tuple(
        SkipDiagnosis(
            index=skip.index,
            producer=skip.producer,
            merged_in=skip.consumer,
            shape=tuple(skip.shape),
            rms=features.skip_rms.get(skip.index, math.nan),
            similarity=features.similarity.get(skip.consumer),
            sensitivity=relative[skip.index - 1],
            not_cancelled=1 - skip.readers.cancelled,
            norm=norm_of(skip),
            shortcut=skip.readers.bypass,
        )
        for skip in plan
    )


def _recommend(plan: SkipPlan, scaling: str | None, denoises: bool) -> tuple[str, str]:
    """The method and a sentence: what docs/recipe.md has found for such a network."""
    find_out = "sl.rate_range (`scalelong range`) finds out whether your rate needs more"
    bare = bare_merges(plan, scaling)
    if not denoises:
        return "none", (
            "none. This network takes no time, so it is no diffusion model: there is no evidence that scaling helps "
            "here. If training fails, lower the learning rate"
        )
    if scaling == "merge_norm":
        return "none", "nothing more: merge_norm is attached"
    if not bare:
        norms = Counter(norm_of(skip) or "an addition" for skip in plan)
        named = listed([f"{norm} ({count} of {len(plan)})" for norm, count in norms.items()])
        return "none", f"none: after the merges comes {named}. {find_out}"
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
    """Whether the model is called with times as well: by their usual names, or as one number for each image."""
    given = [*inspect.signature(host.forward).parameters][: len(args)]
    if any(name in TIME_ARGUMENTS for name in (*given, *kwargs)):
        return True
    return len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() <= 1 and args[1].numel() in (1, len(args[0]))


def _positional(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keywords turned into positions as far as the signature allows."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidInputError(f"{type(model).__name__} cannot be called with this batch: {error}") from error
    return bound.args, bound.kwargs


def _first_example(value: Any, batch_size: int) -> Any:
    batched = isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch_size
    return value[:1] if batched else value
