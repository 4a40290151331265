"""Stable and faster training of U-shaped networks by scaling their long skip connections.

The public names are loaded at first use, so that the command line can answer without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import (
        AlreadyScaledError,
        InvalidConfigError,
        InvalidInputError,
        MissingDependencyError,
        NoLongSkipsError,
        NotScaledError,
        ScaleLongError,
        ScalingMismatchError,
    )
    from .models import UViT, unet
    from .scaling import (
        ConstantScaling,
        CustomScaling,
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
        coefficients,
        fold_,
        is_scaled,
        load_scaling_,
        save_scaling,
        scale_skips_,
        unscale_,
        unscaled,
    )

_HOMES = {
    "errors": (
        "AlreadyScaledError",
        "InvalidConfigError",
        "InvalidInputError",
        "MissingDependencyError",
        "NoLongSkipsError",
        "NotScaledError",
        "ScaleLongError",
        "ScalingMismatchError",
    ),
    "models": ("UViT", "unet"),
    "scaling": (
        "ConstantScaling",
        "CustomScaling",
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
        "coefficients",
        "fold_",
        "is_scaled",
        "load_scaling_",
        "save_scaling",
        "scale_skips_",
        "unscale_",
        "unscaled",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyScaledError",
    "ConstantScaling",
    "CustomScaling",
    "InvalidConfigError",
    "InvalidInputError",
    "LearnableScaling",
    "MagnitudePreserving",
    "MissingDependencyError",
    "NoLongSkipsError",
    "NoScaling",
    "NormScaling",
    "NotScaledError",
    "ScaleLongError",
    "Scaling",
    "ScalingMismatchError",
    "UViT",
    "UniformScaling",
    "__version__",
    "as_scaling",
    "coefficients",
    "fold_",
    "is_scaled",
    "load_scaling_",
    "register_scaling",
    "save_scaling",
    "scale_skips_",
    "unet",
    "unscale_",
    "unscaled",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
