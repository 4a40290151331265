"""Where: the long skips of a model, and scaling them."""

from .api import (
    coefficients,
    is_scaled,
    load_scaling_,
    plan_of,
    save_scaling,
    scale_skips_,
    scaling_of,
    unscale_,
    unscaled,
)
from .attach import without_checks
from .find import find_skips
from .fold import FoldReport, fold_
from .plan import LongSkip, SkipPlan
from .start import SkipStart, StartReport, UnfoldableSkipsError, start_merges_, start_skips_

__all__ = [
    "FoldReport",
    "LongSkip",
    "SkipPlan",
    "SkipStart",
    "StartReport",
    "UnfoldableSkipsError",
    "coefficients",
    "find_skips",
    "fold_",
    "is_scaled",
    "load_scaling_",
    "plan_of",
    "save_scaling",
    "scale_skips_",
    "scaling_of",
    "start_merges_",
    "start_skips_",
    "unscale_",
    "unscaled",
    "without_checks",
]
