"""The length of the moving average: against its definition."""

import pytest
import torch
from torch import nn

from scalelong.config import AverageLength, OptimizerConfig, power, relative_length
from scalelong.errors import InvalidConfigError
from scalelong.training import Ema


def test_lengths_are_read():
    read = {
        "10%": ("share", 0.1),
        "0.1": ("share", 0.1),
        "7.5 %": ("share", 0.075),
        "5000steps": ("steps", 5000),
        "200k images": ("images", 200_000),
    }
    assert {text: AverageLength.parse(text) for text in read} == {
        text: AverageLength(unit, value) for text, (unit, value) in read.items()
    }
    for wrong in ("", "10", "abc", "-5%", "0%", "40%", "0.1%", "1e400%", "0steps", "5k%", "nan", "10%%"):
        with pytest.raises(InvalidConfigError, match="`ema_length`"):
            AverageLength.parse(wrong)


def test_powers_are_those_of_the_paper():
    # Karras et al. (2024), section 3: γ = 16.97 and 6.94 for 5 % and 10 %.
    assert power(0.05) == pytest.approx(16.97, abs=0.01)
    assert power(0.10) == pytest.approx(6.94, abs=0.01)
    for length in (0.005, 0.02, 0.15, 0.28):
        assert relative_length(power(length)) == pytest.approx(length, rel=1e-9)


@pytest.mark.parametrize("length", [0.03, 0.1, 0.25])
def test_the_average_weighs_steps_by_a_power_and_has_the_length(length):
    steps, average = 400, AverageLength("share", length)
    weights = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        beta = average.rate(step, 32, warmup=True)
        weights *= beta
        weights[step] += 1 - beta
    reached = (torch.arange(steps + 1, dtype=torch.float64) / steps) ** (power(length) + 1)
    torch.testing.assert_close(weights, reached.diff(), rtol=1e-9, atol=1e-12)
    times = torch.arange(1, steps + 1, dtype=torch.float64)
    mean = (weights * times).sum()
    assert float(((weights * (times - mean) ** 2).sum()).sqrt() / steps) == pytest.approx(length, rel=0.01)


def test_steps_and_images_are_exponential_averages_of_that_deviation():
    assert AverageLength.parse("1000steps").rate(10**6, 7, warmup=True) == pytest.approx(0.999)
    assert AverageLength.parse("1000steps").rate(0, 7, warmup=True) == pytest.approx(0.1)
    ema = Ema(nn.Linear(1, 1), OptimizerConfig(ema_length="32kimages"), batch_size=32)
    assert ema.rate(10**6) == pytest.approx(0.999)
