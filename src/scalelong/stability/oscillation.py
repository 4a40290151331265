"""How much a training run oscillates, in numbers: the paper's Figure 1, quantified.

A series is the RMS of a hidden feature on a fixed probe batch, or a gradient norm, read at equal distances in steps.
Scores of series with different distances cannot be compared. Three views of y = log(series):

    r_t = y_t - (local linear fit around t)       full windows of 51 readings only
    O1 = RMS of r                                  how far readings lie from their trend
    O2 = sd of second differences / √6             the same without a window; equals O1 for white noise
    O3 = share of r above log 1.5, exp(max r)      how often, and how high, it peaks

A collapsed network looks perfectly stable. So a score counts only if the loss is below that of a predictor that always
answers zero, and the feature is above a floor; otherwise `gate` says why it does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ..errors import InvalidConfigError

WINDOW = 51
PEAK = math.log(1.5)
FLOOR = 1e-4


@dataclass(frozen=True)
class Oscillation:
    """O1, O2 and O3 with the highest peak; `gate` is empty where they count, otherwise it says why they do not."""

    o1: float
    o2: float
    o3: float
    peak: float
    """exp(max r): 1.5 means one and a half times its trend."""
    readings: int
    gate: str = ""

    @property
    def valid(self) -> bool:
        return not self.gate


def residuals(y: Sequence[float], window: int = WINDOW) -> list[float]:
    """y_t minus its local linear fit at t, for every t that has a full window around it.

    At the middle of an odd window of equal distances a linear fit equals the mean, because its slope drops out.
    """
    if window < 3 or window % 2 == 0:
        raise InvalidConfigError(f"window must be odd and at least 3, got {window}")
    half = window // 2
    return [y[t] - fmean(y[t - half : t + half + 1]) for t in range(half, len(y) - half)]


def second_difference_deviation(y: Sequence[float]) -> float:
    """The standard deviation of y_{t+1} - 2 y_t + y_{t-1}, over √6: white noise keeps its own deviation."""
    differences = [after - 2 * here + before for before, here, after in zip(y, y[1:], y[2:], strict=False)]
    return stdev(differences) / math.sqrt(6) if len(differences) > 1 else math.nan


def oscillation(
    series: Sequence[float],
    *,
    window: int = WINDOW,
    loss: float | None = None,
    zero_loss: float = 1.0,
    floor: float = FLOOR,
) -> Oscillation:
    """The scores of a series of positive readings.

    `loss` is the loss at the end of the run and `zero_loss` that of the predictor that always answers zero (1 for the
    mean squared error of ε); without a loss that gate is open. `floor` is the smallest reading that counts.
    """
    gate = _gate(series, window, loss, zero_loss, floor)
    if not series or not all(math.isfinite(value) and value > 0 for value in series):
        return Oscillation(math.nan, math.nan, math.nan, math.nan, len(series), gate)
    y = [math.log(value) for value in series]
    r = residuals(y, window)
    return Oscillation(
        o1=math.sqrt(fmean(value * value for value in r)) if r else math.nan,
        o2=second_difference_deviation(y),
        o3=fmean(value > PEAK for value in r) if r else math.nan,
        peak=math.exp(max(r)) if r else math.nan,
        readings=len(series),
        gate=gate,
    )


def _gate(series: Sequence[float], window: int, loss: float | None, zero_loss: float, floor: float) -> str:
    if not all(math.isfinite(value) for value in series):
        return "it became infinite or NaN"
    if any(value < floor for value in series):
        return f"it fell below {floor:g}: collapsed"
    if len(series) < window:
        return f"{len(series)} readings are less than a window of {window}"
    if loss is not None and not loss < zero_loss:
        return f"the loss {loss:.3g} is not below {zero_loss:.3g}, that of a predictor of zero"
    return ""
