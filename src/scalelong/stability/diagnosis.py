"""One page before training: where the long skips are, how large, what depends on them, and how to scale them."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..console import html_lines, html_table, text_table
from ..errors import InvalidInputError
from ..finding import ExampleInputs, example_call, unwrap
from ..models import count_parameters
from ..noise import SCHEDULE
from ..optional import needs
from ..scaling import ConstantScaling, LearnableScaling, NoScaling, Scaling
from ..theory import KappaRange, jacobian_norm, kappa_range, skip_sensitivities
from .features import plan_for, probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FP16_LIMIT = torch.finfo(torch.float16).max
SAFE_HEADROOM = 8.0
POWER_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class SkipDiagnosis:
    """One long skip at the weights that the model has now."""

    index: int
    producer: str
    merged_in: str
    shape: tuple[int, ...]
    rms: float
    sensitivity: float | None
    """w_i/w_1: how much the output depends on it, relative to the outermost."""
    not_cancelled: float
    """The share of its channels for which a constant κ is not cancelled by the normalisation behind the merge."""
    norm: str
    shortcut: bool
    """Whether a shortcut sees κ even where the normalisation cancels it."""
    kappa: float
    """κ_i under the recommended scaling."""

    @property
    def survives(self) -> float:
        """Earlier name of `not_cancelled`."""
        return self.not_cancelled


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
    scaling: Scaling
    kappa_range: KappaRange | None
    """κ by Section 4.1. None for networks that are no diffusion models: the paper's κ is about their noise."""
    reasons: tuple[str, ...]
    advice: str = ""
    """What the evidence says about scaling a network of this kind."""

    @property
    def recommendation(self) -> str:
        """The shorthand of the scaling to take, if one is taken."""
        if isinstance(self.scaling, ConstantScaling):
            return f"cs:{self.scaling.kappa:g}"
        return self.scaling.name

    def rows(self) -> list[dict[str, str]]:
        return [
            {
                "i": str(skip.index),
                "producer": skip.producer or "the model",
                "merged in": skip.merged_in or "the model",
                "shape": "x".join(map(str, skip.shape)),
                "RMS": f"{skip.rms:.3g}",
                "w_i/w_1": "-" if skip.sensitivity is None else f"{skip.sensitivity:.2g}",
                "κ kept": f"{skip.not_cancelled:.0%}" + (" + shortcut" if skip.shortcut else ""),
                "κ_i": f"{skip.kappa:.3g}",
            }
            for skip in self.skips
        ]

    def facts(self) -> dict[str, str]:
        return {
            "model": f"{self.model}, {self.parameters:,} parameters, {len(self.skips)} long skips",
            "Jacobian norm": f"{self.jacobian_norm:.3g}",
            "largest activation": f"{self.activation_max:.3g}, fp16 headroom {self.fp16_headroom:.3g} times",
            "recommended": self.advice,
            "if you scale": f"{self.recommendation}: {self.scaling}",
        }

    def __str__(self) -> str:
        facts = [f"{name}: {value}" for name, value in self.facts().items()]
        return "\n".join(
            [*facts, "", text_table(self.rows()), "", "why:", *(f"  - {reason}" for reason in self.reasons)]
        )

    def to_json(self) -> str:
        page = {"rows": self.rows(), "facts": self.facts(), "reasons": list(self.reasons), "text": str(self)}
        found = None if self.kappa_range is None else self.kappa_range._asdict()
        return json.dumps({**page, "scaling": self.scaling.to_dict(), "kappa_range": found})

    def _repr_html_(self) -> str:
        facts = [f"{name}: {value}" for name, value in self.facts().items()]
        return html_lines(facts) + html_table(self.rows()) + html_lines(["why:", *self.reasons])

    def plot(self) -> Figure:
        """Size and influence of each long skip, from the outermost to the innermost, as a figure of matplotlib."""
        figure = needs("matplotlib.figure", "report", "drawing a diagnosis").Figure(
            figsize=(8, 3), layout="constrained"
        )
        left, right = figure.subplots(1, 2)
        index = [skip.index for skip in self.skips]
        left.bar(index, [skip.rms for skip in self.skips])
        left.set(xlabel="long skip, outermost first", ylabel="RMS", title="size")
        right.plot(
            index, [math.nan if s.sensitivity is None else s.sensitivity for s in self.skips], "o-", label="w_i/w_1"
        )
        right.plot(index, [skip.kappa for skip in self.skips], "s--", label=f"κ_i of {self.recommendation}")
        right.set(xlabel="long skip, outermost first", title="influence on the output")
        right.legend()
        for axes in (left, right):
            axes.set_xticks(index)
        return figure


def diagnose(
    model: nn.Module, batch: ExampleInputs = None, *, images: Tensor | None = None, schedule: Any = SCHEDULE
) -> Diagnosis:
    """Diagnose a model on a batch: its arguments as a tuple or a dictionary, as in training (noisy images, times, ...).

    `images`, clean ones as the network sees them, and `schedule` give the range of κ of these data instead of the
    paper's. Costs a few dozen forwards; the model is left as it was.
    """
    host = unwrap(model)
    args, kwargs = _positional(host, *example_call(host, batch))
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        raise InvalidInputError("the first argument of the model must be its input, a floating-point tensor")
    plan = plan_for(model, batch)
    features = probe(host, *args, plan=plan, **kwargs)
    weights = skip_sensitivities(host, *args, keywords=kwargs)
    single = tuple(_first_example(value, len(args[0])) for value in args)
    single_kwargs = {name: _first_example(value, len(args[0])) for name, value in kwargs.items()}
    largest = max(features.block_max.values(), default=math.nan)
    relative = [weight / weights[0] if weights[0] > 0 else None for weight in weights]
    denoises = images is not None or _denoises(host, args, kwargs)
    found = kappa_range(len(plan), images, schedule) if denoises else None
    cancelled = sum(skip.readers.cancelled for skip in plan) / len(plan)
    headroom = FP16_LIMIT / max(largest, 1e-30)
    scaling, reasons = _recommend(found, relative, cancelled, headroom)
    curve = _curve(scaling, len(plan))
    return Diagnosis(
        model=type(host).__name__,
        parameters=count_parameters(host),
        skips=tuple(
            SkipDiagnosis(
                index=skip.index,
                producer=skip.producer,
                merged_in=skip.consumer,
                shape=tuple(skip.shape),
                rms=features.skip_rms.get(skip.index, math.nan),
                sensitivity=relative[skip.index - 1],
                not_cancelled=1 - skip.readers.cancelled,
                norm=skip.readers.norm,
                shortcut=skip.readers.bypass,
                kappa=curve[skip.index - 1],
            )
            for skip in plan
        ),
        jacobian_norm=jacobian_norm(host, *single, steps=POWER_STEPS, keywords=single_kwargs),
        activation_max=largest,
        fp16_headroom=headroom,
        scaling=scaling,
        kappa_range=found,
        reasons=reasons,
        advice=_advice(found, len(plan), cancelled),
    )


TIME_ARGUMENTS = ("t", "time", "times", "timestep", "timesteps", "sigma", "sigmas", "noise_level", "noise_labels")


def _denoises(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model is called with times as well: by their usual names, or as one number for each image."""
    given = [*inspect.signature(host.forward).parameters][: len(args)]
    if any(name in TIME_ARGUMENTS for name in (*given, *kwargs)):
        return True
    return len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() <= 1 and args[1].numel() in (1, len(args[0]))


DEEP = 8
"""Long skips from which on CS kept runs alive at high rates; with four of them nothing was gained."""


def _advice(found: KappaRange | None, skips: int, cancelled: float) -> str:
    """What docs/evidence/survival and docs/recipe.md have found for such a network."""
    if found is None:
        return (
            "none. This network takes no time, so it is no diffusion model: the paper's reason for κ is about noise, "
            "and there is no evidence that scaling helps here. If training fails, lower the learning rate first"
        )
    if found.high >= 1:
        return "none: no κ below 1 is needed"
    find_out = "`scalelong range`, or sl.rate_range in your own loop, finds out whether your rate needs it"
    if cancelled > 0.5 or skips < DEEP:
        kind = "with normalised merges" if cancelled > 0.5 else f"with {skips} long skips"
        return (
            f"none at ordinary learning rates: on networks {kind} no scaling did as well (docs/recipe.md). {find_out}"
        )
    return (
        "sl.start_skips_(model, 'cs') before training, if the learning rate is high: nothing is "
        f"attached and it costs nothing. Over 1,000 steps it only put collapses off, where norms in the merges "
        f"(UViT(merge_norm=True)) held. At ordinary rates no scaling does as well (docs/recipe.md). {find_out}"
    )


def _recommend(
    found: KappaRange | None, sensitivities: list[float | None], cancelled: float, headroom: float
) -> tuple[Scaling, tuple[str, ...]]:
    """The method, and why, in words. κ is the default: none from the range of Section 4.1 did better."""
    reasons: list[str] = []
    scaling: Scaling = NoScaling() if found is None else ConstantScaling()
    if found is None:
        reasons.append("the model is called without a time, so κ is not derived from the noise of diffusion")
    elif cancelled > 0.5:
        scaling = LearnableScaling(gate="channel")
        reasons.append(
            f"the normalisation right behind the merges cancels a constant κ for {cancelled:.0%} of the channels; "
            f"a gate per channel (LS) is not cancelled"
        )
    elif found.high >= 1:
        scaling = NoScaling()
        reasons.append(f"with {found.skips} long skips no κ below 1 is needed")
    else:
        reasons.append("CS costs nothing, has no parameters, and can be folded into the weights after training")
    reasons += () if found is None else (str(found),)
    known = [weight for weight in sensitivities if weight is not None]
    if not known:
        reasons.append(
            "the output does not depend on the outermost skip yet (a last layer that starts at zero?), so "
            "sensitivities say nothing before some training"
        )
    elif known[-1] < 0.1 * known[0]:
        reasons.append(
            f"the output already depends on the innermost skip {known[-1]:.2g} times as much as on the outermost: "
            f"expect less from scaling at the start of training than the theory says"
        )
    if headroom < SAFE_HEADROOM:
        reasons.append(f"activations are within a factor of {headroom:.2g} of fp16's limit: train in bf16")
    return scaling, tuple(reasons)


def _curve(scaling: Scaling, count: int) -> tuple[float, ...]:
    if isinstance(scaling, LearnableScaling):
        return ConstantScaling(scaling.kappa).curve(count)
    return scaling.curve(count) if isinstance(scaling, ConstantScaling) else (1.0,) * count


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
