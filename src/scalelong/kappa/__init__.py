"""κ, chosen for you: from the data (A), from the network (B), or by pilot runs (C)."""

from .choice import KappaChoice
from .choose import choose_kappa
from .moments import Solution, Targets, kappa_for_sum, noise_ratio_targets
from .network import SilentSkipsError, balanced_scaling
from .pilot import GRID
from .run import PilotRun

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
