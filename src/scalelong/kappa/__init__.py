"""κ of constant scaling: from the data (A), from the network (B), or by pilot runs (C).

estimators   what an estimator answers; A and B
pilot        C, and `choose_kappa`: κ by any of the three
"""

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
