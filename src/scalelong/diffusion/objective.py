"""What the network is asked to predict, and the loss."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from ..errors import InvalidConfigError
from .process import NoiseProcess

Prediction = Literal["epsilon", "v", "x0"]

Predict = Callable[[Tensor, Tensor], Tensor]
"""A network with its conditions already given: from x_t and the network's times to a tensor like x_t."""


def require_prediction(prediction: str) -> None:
    if prediction not in get_args(Prediction):
        known = ", ".join(get_args(Prediction))
        raise InvalidConfigError(f"unknown prediction {prediction!r}; known: {known}")


def target(process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """ε, x_0, or v = √ᾱ ε - √(1-ᾱ) x_0."""
    if prediction == "epsilon":
        return noise
    if prediction == "x0":
        return x0
    signal, sigma = _columns(process, t)
    return signal * noise - sigma * x0


def as_epsilon(process: NoiseProcess, prediction: Prediction, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """The ε that an output of the network stands for."""
    if prediction == "epsilon":
        return output
    signal, sigma = _columns(process, t)
    if prediction == "x0":
        return (x_t - signal * output) / sigma
    return signal * output + sigma * x_t


def losses(
    predict: Predict, process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor
) -> Tensor:
    """The mean squared error of each image: (B,)."""
    output = predict(process.add_noise(x0, noise, t), t)
    return mean_square(target(process, prediction, x0, noise, t) - output)


def epsilon_losses(
    predict: Predict, process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor
) -> Tensor:
    """The error in ε of each image, (B,), whatever the network predicts: comparable between networks."""
    x_t = process.add_noise(x0, noise, t)
    return mean_square(noise - as_epsilon(process, prediction, predict(x_t, t), x_t, t))


def mean_square(difference: Tensor) -> Tensor:
    return difference.float().square().flatten(1).mean(dim=1)


def _columns(process: NoiseProcess, t: Tensor) -> tuple[Tensor, Tensor]:
    signal, sigma = process.signal_and_noise(t)
    return signal.view(-1, 1, 1, 1), sigma.view(-1, 1, 1, 1)
