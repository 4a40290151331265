"""Scores of series whose answer is known, and the slow reference of the local fit."""

import math
import random

import pytest

from scalelong.errors import InvalidConfigError
from scalelong.stability import oscillation
from scalelong.stability.alarms import residuals, second_difference_deviation


def reference_residuals(y: list[float], window: int) -> list[float]:
    """The local linear fit written out as least squares."""
    numpy = pytest.importorskip("numpy")
    half, found = window // 2, []
    for t in range(half, len(y) - half):
        x = numpy.arange(t - half, t + half + 1)
        slope, offset = numpy.polyfit(x, y[t - half : t + half + 1], 1)
        found.append(y[t] - (slope * t + offset))
    return found


def noise(count: int, deviation: float, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(0, deviation) for _ in range(count)]


@pytest.mark.parametrize("window", [3, 11, 51])
def test_residuals_are_those_of_a_local_linear_fit(window):
    y = [0.01 * t + value for t, value in enumerate(noise(120, 0.3))]
    assert residuals(y, window) == pytest.approx(reference_residuals(y, window), abs=1e-9)


def test_exponential_growth_does_not_oscillate():
    score = oscillation([math.exp(0.02 * t) for t in range(200)])
    assert score.valid
    assert score.o1 == pytest.approx(0, abs=1e-9)
    assert score.o2 == pytest.approx(0, abs=1e-9)
    assert score.o3 == 0
    assert score.peak == pytest.approx(1)


def test_white_noise_has_its_own_deviation():
    series = [math.exp(value) for value in noise(4000, 0.2)]
    score = oscillation(series)
    # A mean over 51 readings contains the reading itself: √(1 - 1/51) of the deviation is left.
    assert score.o1 == pytest.approx(0.2 * math.sqrt(1 - 1 / 51), rel=0.03)
    assert score.o2 == pytest.approx(0.2, rel=0.03)


def test_a_single_peak_is_counted_and_measured():
    series = [1.0] * 101
    series[50] = 4.0
    score = oscillation(series)
    assert score.o3 == pytest.approx(1 / 51)
    assert score.peak == pytest.approx(math.exp(math.log(4) * 50 / 51))


def test_scores_do_not_depend_on_the_unit():
    series = [math.exp(value) for value in noise(150, 0.4)]
    assert oscillation(series).o1 == pytest.approx(oscillation([1000 * value for value in series]).o1)


def test_a_constant_series_scores_zero_the_control_without_learning():
    score = oscillation([0.7] * 60)
    assert (score.o1, score.o2, score.o3) == pytest.approx((0, 0, 0), abs=1e-12)


@pytest.mark.parametrize(
    ("series", "options", "reason"),
    [
        ([1e-9] * 60, {}, "collapsed"),
        ([1.0] * 60, {"loss": 1.2}, "predictor of zero"),
        ([1.0] * 60, {"loss": math.nan}, "predictor of zero"),
        ([1.0] * 50, {}, "less than a window"),
        ([1.0] * 59 + [math.nan], {}, "NaN"),
        ([1.0] * 59 + [math.inf], {}, "infinite"),
        ([], {}, "less than a window"),
    ],
)
def test_gates(series, options, reason):
    score = oscillation(series, **options)
    assert not score.valid
    assert reason in score.gate


def test_an_open_gate_with_a_learned_loss():
    assert oscillation([1.0] * 60, loss=0.3).valid


def test_zero_readings_give_no_number_and_no_crash():
    score = oscillation([0.0] * 60)
    assert math.isnan(score.o1)
    assert not score.valid


@pytest.mark.parametrize("window", [0, 2, 50])
def test_a_window_without_a_middle_is_refused(window):
    with pytest.raises(InvalidConfigError, match="odd"):
        residuals([1.0] * 100, window)


def test_second_differences_need_three_readings():
    assert math.isnan(second_difference_deviation([1.0, 2.0]))
