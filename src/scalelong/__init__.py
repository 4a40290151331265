"""Stable and faster training of U-shaped networks by scaling their long skip connections.

The public names stand in `__init__.pyi`, once. They are loaded at first use, so that the command line can answer
without importing torch.
"""

import ast
import pkgutil
from importlib import import_module
from typing import Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import (
        AlreadyScaledError,
        AmbiguousSkipsError,
        CancelledScalingWarning,
        ExampleInputsError,
        InvalidConfigError,
        InvalidInputError,
        MissingDependencyError,
        NoLongSkipsError,
        NotScaledError,
        ScaleLongError,
        ScalingMismatchError,
        SkipMismatchError,
        UnreachableSkipError,
        UnsupportedModelError,
        VerificationError,
    )
    from .kappa import (
        KappaChoice,
        choose_kappa,
    )
    from .models import UViT, unet
    from .scaling import (
        BalancedScaling,
        ConstantScaling,
        CustomScaling,
        FreeUScaling,
        LearnableScaling,
        MagnitudePreserving,
        NormScaling,
        NoScaling,
        Scaling,
        UniformScaling,
        as_scaling,
        register_scaling,
    )
    from .skips import (
        FoldReport,
        LongSkip,
        SkipPlan,
        SkipStart,
        UnfoldableSkipsError,
        coefficients,
        find_skips,
        fold_,
        is_scaled,
        load_scaling_,
        plan_of,
        save_scaling,
        scale_skips_,
        scaling_of,
        start_merges_,
        start_skips_,
        unscale_,
        unscaled,
    )
    from .stability import Diagnosis, RateRange, StabilityMonitor, diagnose, rate_range

_HOMES = {
    "errors": (
        "AlreadyScaledError",
        "AmbiguousSkipsError",
        "CancelledScalingWarning",
        "ExampleInputsError",
        "InvalidConfigError",
        "InvalidInputError",
        "MissingDependencyError",
        "NoLongSkipsError",
        "NotScaledError",
        "ScaleLongError",
        "ScalingMismatchError",
        "SkipMismatchError",
        "UnreachableSkipError",
        "UnsupportedModelError",
        "VerificationError",
    ),
    "kappa": (
        "KappaChoice",
        "choose_kappa",
    ),
    "models": (
        "UViT",
        "unet",
    ),
    "scaling": (
        "BalancedScaling",
        "ConstantScaling",
        "CustomScaling",
        "FreeUScaling",
        "LearnableScaling",
        "MagnitudePreserving",
        "NoScaling",
        "NormScaling",
        "Scaling",
        "UniformScaling",
        "as_scaling",
        "register_scaling",
    ),
    "skips": (
        "FoldReport",
        "LongSkip",
        "SkipPlan",
        "SkipStart",
        "UnfoldableSkipsError",
        "coefficients",
        "find_skips",
        "fold_",
        "is_scaled",
        "load_scaling_",
        "plan_of",
        "save_scaling",
        "scale_skips_",
        "start_merges_",
        "start_skips_",
        "scaling_of",
        "unscale_",
        "unscaled",
    ),
    "stability": ("Diagnosis", "RateRange", "StabilityMonitor", "diagnose", "rate_range"),
}

__all__ = [
    "AlreadyScaledError",
    "AmbiguousSkipsError",
    "BalancedScaling",
    "CancelledScalingWarning",
    "ConstantScaling",
    "CustomScaling",
    "Diagnosis",
    "ExampleInputsError",
    "FoldReport",
    "FreeUScaling",
    "InvalidConfigError",
    "InvalidInputError",
    "KappaChoice",
    "LearnableScaling",
    "LongSkip",
    "MagnitudePreserving",
    "MissingDependencyError",
    "NoLongSkipsError",
    "NoScaling",
    "NormScaling",
    "NotScaledError",
    "RateRange",
    "ScaleLongError",
    "Scaling",
    "ScalingMismatchError",
    "SkipMismatchError",
    "SkipPlan",
    "SkipStart",
    "StabilityMonitor",
    "UViT",
    "UnfoldableSkipsError",
    "UniformScaling",
    "UnreachableSkipError",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
    "as_scaling",
    "choose_kappa",
    "coefficients",
    "diagnose",
    "find_skips",
    "fold_",
    "is_scaled",
    "load_scaling_",
    "plan_of",
    "rate_range",
    "register_scaling",
    "save_scaling",
    "scale_skips_",
    "scaling_of",
    "start_merges_",
    "start_skips_",
    "unet",
    "unscale_",
    "unscaled",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
