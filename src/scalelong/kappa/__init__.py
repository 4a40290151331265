"""κ, chosen for you: from the data (A), from the network (B), or by pilot runs (C)."""

from .estimators import (
    KappaChoice,
    SilentSkipsError,
    Solution,
    Targets,
    balanced_scaling,
    kappa_for_sum,
    noise_ratio_targets,
)
from .pilot import GRID, PilotRun, choose_kappa

__all__ = [
    "GRID",
    "KappaChoice",
    "PilotRun",
    "SilentSkipsError",
    "Solution",
    "Targets",
    "balanced_scaling",
    "choose_kappa",
    "kappa_for_sum",
    "noise_ratio_targets",
]
