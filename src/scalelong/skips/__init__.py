"""Where: the long skips of a model, and scaling them."""

from .api import coefficients, is_scaled, scale_skips_, unscale_, unscaled
from .fold import FoldReport, fold_
from .store import load_scaling_, save_scaling

__all__ = [
    "FoldReport",
    "coefficients",
    "fold_",
    "is_scaled",
    "load_scaling_",
    "save_scaling",
    "scale_skips_",
    "unscale_",
    "unscaled",
]
