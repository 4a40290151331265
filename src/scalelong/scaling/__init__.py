"""How much: the scaling methods.

base        what a method is, the registry of methods, and their shorthands
constant    none, uniform, CS, custom, magnitude-preserving
dynamic     learnable scaling
norms       normalised operands
others      FreeU, residual scalings, starts of merges
"""

from .base import (
    METHODS as METHODS,
    UNSCALED as UNSCALED,
    Constants as Constants,
    Scaling as Scaling,
    SkipScaling as SkipScaling,
    SkipSite as SkipSite,
    as_scaling as as_scaling,
    register_scaling as register_scaling,
)
from .constant import (
    ConstantScaling as ConstantScaling,
    CustomScaling as CustomScaling,
    FixedScaling as FixedScaling,
    FixedSkipScaling as FixedSkipScaling,
    MagnitudePreserving as MagnitudePreserving,
    NoScaling as NoScaling,
    UniformScaling as UniformScaling,
)
from .dynamic import (
    GateLayer as GateLayer,
    LearnableScaling as LearnableScaling,
)
from .norms import (
    MergeNorm as MergeNorm,
    NormScaling as NormScaling,
)
from .others import (
    MERGE_STARTS as MERGE_STARTS,
    FreeUScaling as FreeUScaling,
    ResidualBranch as ResidualBranch,
    ResidualSpec as ResidualSpec,
    require_merge_start as require_merge_start,
    start_merge_ as start_merge_,
    validate_residual as validate_residual,
)
