"""How much: the scaling methods, one file each."""

from .balanced import BalancedScaling
from .base import Constants, Scaling, SkipScaling, SkipSite
from .constant import ConstantScaling
from .custom import CustomScaling
from .fixed import FixedScaling, FixedSkipScaling
from .learnable import LearnableScaling
from .magnitude import MagnitudePreserving
from .none import NoScaling
from .norm import NormScaling
from .registry import METHODS, as_scaling, register_scaling
from .uniform import UniformScaling

__all__ = [
    "METHODS",
    "BalancedScaling",
    "ConstantScaling",
    "Constants",
    "CustomScaling",
    "FixedScaling",
    "FixedSkipScaling",
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
