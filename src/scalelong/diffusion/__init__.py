"""The noise process, the objective, and sampling."""

from .guidance import guided
from .objective import Predict, Prediction, as_epsilon, epsilon_losses, losses, target
from .process import NoiseProcess, Schedule
from .sample import SAMPLERS, sample

__all__ = [
    "SAMPLERS",
    "NoiseProcess",
    "Predict",
    "Prediction",
    "Schedule",
    "as_epsilon",
    "epsilon_losses",
    "guided",
    "losses",
    "sample",
    "target",
]
