"""How much: the scaling methods, one file each."""

from .base import METHODS, Constants, Scaling, SkipScaling, SkipSite, as_scaling, register_scaling
from .constant import (
    BalancedScaling,
    ConstantScaling,
    CustomScaling,
    FixedScaling,
    FixedSkipScaling,
    MagnitudePreserving,
    NoScaling,
    UniformScaling,
)
from .dynamic import LearnableScaling, NormScaling
from .freeu import FreeUScaling

__all__ = [
    "METHODS",
    "BalancedScaling",
    "ConstantScaling",
    "Constants",
    "CustomScaling",
    "FixedScaling",
    "FixedSkipScaling",
    "FreeUScaling",
    "LearnableScaling",
    "MagnitudePreserving",
    "NoScaling",
    "NormScaling",
    "Scaling",
    "SkipScaling",
    "SkipSite",
    "UniformScaling",
    "as_scaling",
    "register_scaling",
]
