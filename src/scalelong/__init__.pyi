"""The public names, each written once: type checkers read this file, and `__init__.py` reads it too."""

from . import mup as mup
from ._version import __version__ as __version__
from .attaching import (
    FoldReport as FoldReport,
    ScalingSummary as ScalingSummary,
    SkipStart as SkipStart,
    TunedSkips as TunedSkips,
    UnfoldableSkipsError as UnfoldableSkipsError,
    coefficients as coefficients,
    fold_ as fold_,
    is_scaled as is_scaled,
    load_scaling_ as load_scaling_,
    merge as merge,
    plan_of as plan_of,
    save_scaling as save_scaling,
    scale_skips_ as scale_skips_,
    scaling_of as scaling_of,
    start_skips_ as start_skips_,
    summary as summary,
    tune_skips as tune_skips,
    unscale_ as unscale_,
    unscaled as unscaled,
    verify as verify,
    without_records as without_records,
)
from .errors import (
    AlreadyScaledError as AlreadyScaledError,
    AmbiguousSkipsError as AmbiguousSkipsError,
    CancelledScalingWarning as CancelledScalingWarning,
    CollapseError as CollapseError,
    ExampleInputsError as ExampleInputsError,
    ExportError as ExportError,
    FrozenGatesWarning as FrozenGatesWarning,
    InvalidConfigError as InvalidConfigError,
    InvalidInputError as InvalidInputError,
    MissingDependencyError as MissingDependencyError,
    NoLongSkipsError as NoLongSkipsError,
    NotScaledError as NotScaledError,
    ScaleLongError as ScaleLongError,
    ScalingMismatchError as ScalingMismatchError,
    SkipMismatchError as SkipMismatchError,
    UnclearParameterError as UnclearParameterError,
    UnreachableSkipError as UnreachableSkipError,
    UnscaledWeightsWarning as UnscaledWeightsWarning,
    UnsupportedModelError as UnsupportedModelError,
    VerificationError as VerificationError,
)
from .evaluation import (
    LinearProbe as LinearProbe,
    linear_probe as linear_probe,
)
from .export import (
    export_model as export_model,
)
from .finding import LongSkip as LongSkip, SkipPlan as SkipPlan, find_skips as find_skips
from .models import (
    UViT as UViT,
    from_pretrained as from_pretrained,
    keep_freed_memory as keep_freed_memory,
    unet as unet,
)
from .muon import Muon as Muon, muon_groups as muon_groups
from .runs import (
    load_trained as load_trained,
)
from .scaling import (
    ConstantScaling as ConstantScaling,
    CustomScaling as CustomScaling,
    FreeUScaling as FreeUScaling,
    LearnableScaling as LearnableScaling,
    MagnitudePreserving as MagnitudePreserving,
    MergeNorm as MergeNorm,
    NormScaling as NormScaling,
    NoScaling as NoScaling,
    Scaling as Scaling,
    UniformScaling as UniformScaling,
    as_scaling as as_scaling,
    register_scaling as register_scaling,
)
from .stability import (
    CollapseGuard as CollapseGuard,
    Diagnosis as Diagnosis,
    RateRange as RateRange,
    StabilityMonitor as StabilityMonitor,
    diagnose as diagnose,
    rate_range as rate_range,
)
