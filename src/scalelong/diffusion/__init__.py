"""The noise process, the objective, and sampling."""

from ..noise import NoiseProcess, Predict, Prediction, Schedule, as_epsilon, epsilon_losses, losses, target
from .solvers import SAMPLERS, guided, sample

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
