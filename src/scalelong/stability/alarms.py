"""Alarms: what in a series of readings means that a run is in trouble, with one thing to do about it.

At the end, how much a run oscillates, in numbers: the paper's Figure 1, quantified.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from ..errors import InvalidConfigError
from .advice import what_to_do
from .collapse import RECORD, Collapse, CollapseDetector

KINDS = ("non-finite", "collapse", "spike", "overflow margin", "dead skip")
"""The worst first. An alarm that reports several things is of the worst kind among them."""
NAMED = 3
"""Of more things that are wrong at once, the rest is counted."""
LONG_STEP = 0.1
"""A step that changes a block by this share of its weights is too long, whatever else is wrong."""


@dataclass(frozen=True)
class Alarm:
    """All that is wrong at one step, and was not before."""

    step: int
    kind: str
    """One of KINDS."""
    where: str
    """The quantity, for example "probe_block_rms/decoder.0"."""
    value: float
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.message} {self.remedy}".rstrip()


@dataclass(frozen=True, kw_only=True)
class AlarmRules:
    """When to raise an alarm. Factors are relative to the median of the last `memory` readings."""

    loss_spike: float = 3.0
    gradient_spike: float = 10.0
    feature_spike: float = 4.0
    collapse: float = 1e-3
    """A feature that falls below this share of its median has collapsed."""
    alike: tuple[float, float] = (0.98, 0.8)
    """Tokens whose similarity is above the first and whose median was below the second have become alike."""
    headroom: float = 8.0
    """The largest activation must be smaller than the dtype's largest number by this factor."""
    dead_skip: float = 1e-4
    """A skip is dead if it is smaller than the largest skip by this factor, both as they enter their merges."""
    zero_loss: float | None = None
    """The loss of a predictor of zero (1 for ε); left out, that of the first steps. See `CollapseDetector`."""
    memory: int = 20
    patience: int = 5
    """Readings before the first comparison with the past."""


@dataclass(frozen=True)
class _Finding:
    kind: str
    where: str
    value: float
    message: str


class AlarmDetector:
    """Checks one reading after the other. A condition that stays is reported once, and again after it was gone."""

    def __init__(self, rules: AlarmRules) -> None:
        self.rules = rules
        self._past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=rules.memory))
        self._collapse = CollapseDetector(zero_loss=rules.zero_loss)
        self._collapsed: Collapse | None = None
        self._standing: set[tuple[str, str]] = set()

    def check(
        self,
        step: int,
        reading: Mapping[str, float],
        *,
        losses: Sequence[float] = (),
        lr: float | None = None,
        bare: bool | None = None,
    ) -> list[Alarm]:
        """An alarm, if something is wrong that was not before. `losses`: those of all steps since the last reading.
        `lr` is the learning rate of this step; `bare`: there are merges without a norm (`advice.bare_merges`)."""
        # A recorded mean stands for the steps that were not kept.
        each = losses or ([reading["loss"]] * RECORD if "loss" in reading else [])
        for position, loss in enumerate(each, start=step - len(each) + 1):
            event = self._collapse.add(position, loss)
            self._collapsed = event if isinstance(event, Collapse) else self._collapsed
        findings = sorted(self._findings(reading), key=lambda found: KINDS.index(found.kind))
        fresh = [found for found in findings if (found.kind, found.where) not in self._standing]
        self._standing = {(found.kind, found.where) for found in findings}
        self._remember(reading)
        if not fresh:
            return []
        worst, more = fresh[0], len(fresh) - NAMED
        message = " ".join(found.message for found in fresh[:NAMED]) + (f" And {more} more." if more > 0 else "")
        if lr is not None and KINDS.index(worst.kind) <= KINDS.index("overflow margin"):
            message += f" The learning rate is {lr:g}{self._rate_remark(reading)}."
        return [Alarm(step, worst.kind, worst.where, worst.value, message, _remedy(worst.kind, lr, bare))]

    def _rate_remark(self, reading: Mapping[str, float]) -> str:
        ratios = [value for name, value in reading.items() if name.startswith("update_ratio/") and math.isfinite(value)]
        ratios = ratios or [past[-1] for name, past in self._past.items() if name.startswith("update_ratio/") and past]
        largest = max(ratios, default=0.0)
        return f", and a step changes weights by {largest:.0%}" * (largest > LONG_STEP)

    def _first_to_leave(self, bad: Sequence[str]) -> str:
        """The block that had grown most when all was still finite; else the first in the order of the forward."""
        growth = {
            name: past[-1] / past[0]
            for name, past in self._past.items()
            if name in _features(self._past) and len(past) > 1 and past[0] > 0
        }
        if growth and max(growth.values()) > self.rules.feature_spike:
            name = max(growth, key=lambda block: growth[block])
            return f" {name} left first: it had grown {growth[name]:.3g} times before."
        first = next(iter(_features(bad)), None)
        return "" if first is None else f" In the order of the forward, {first} is the first."

    def _remember(self, reading: Mapping[str, float]) -> None:
        for name, value in reading.items():
            if math.isfinite(value):
                self._past[name].append(value)

    def _findings(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        bad = [name for name, value in reading.items() if not math.isfinite(value)]
        if bad:
            # A coefficient is only what the features before it have made of it.
            named = next((name for name in bad if not name.startswith("kappa/")), bad[0])
            others = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
            yield _Finding(
                "non-finite", "", math.nan, f"{named}{others} became infinite or NaN.{self._first_to_leave(bad)}"
            )
            return
        yield from self._spikes(reading)
        yield from self._collapses(reading)
        yield from self._margins(reading)
        yield from self._dead_skips(reading)

    def _median(self, name: str) -> float | None:
        past = self._past.get(name, ())
        return median(past) if len(past) >= self.rules.patience else None

    def _spikes(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        factors = [("loss_max", "loss", self.rules.loss_spike)]
        factors += [("gradient_norm/all", "gradient_norm/all", self.rules.gradient_spike)]
        factors += [(name, name, self.rules.feature_spike) for name in _features(reading)]
        for name, reference, factor in factors:
            usual, value = self._median(reference), reading.get(name)
            if usual and value is not None and value > factor * usual:
                yield _Finding("spike", name, value, f"{name} is {value:.3g}, {value / usual:.1f} times its median.")

    def _collapses(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        if self._collapse.collapsed and self._collapsed is not None:
            yield _Finding("collapse", "loss", self._collapsed.loss, f"{self._collapsed}.")
        for name in _features(reading):
            usual, value = self._median(name), reading[name]
            if usual and value < self.rules.collapse * usual:
                yield _Finding("collapse", name, value, f"{name} fell to {value:.3g}; its median was {usual:.3g}.")
        now, before = self.rules.alike
        for name in _features(reading, "similarity/"):
            usual, value = self._median(name), reading[name]
            if usual is not None and value > now and usual < before:
                message = f"the tokens of {name.partition('/')[2]} became alike: their similarity is {value:.2f}."
                yield _Finding("collapse", name, value, message)

    def _margins(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        headroom = reading.get("headroom")
        if headroom is not None and headroom < self.rules.headroom:
            largest = reading.get("activation_max", math.nan)
            text = f"the largest activation, {largest:.3g}, is within a factor of {headroom:.2g} of the dtype's limit."
            yield _Finding("overflow margin", "headroom", headroom, text)

    def _dead_skips(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        indices = {name: name.partition("/")[2] for name in _features(reading, "skip_rms/")}
        sizes = {index: reading[name] * reading.get(f"kappa/{index}", 1.0) for name, index in indices.items()}
        largest = max(sizes.values(), default=0.0)
        for index, size in sizes.items():
            if size <= self.rules.dead_skip * largest:
                text = f"long skip {index} enters its merge with an RMS of {size:.3g}; the largest has {largest:.3g}."
                yield _Finding("dead skip", f"skip/{index}", size, text)


def _remedy(kind: str, lr: float | None, bare: bool | None) -> str:
    if kind == "overflow margin":
        return "The next growth overflows: train in bf16."
    if kind == "dead skip":
        return "The decoder no longer depends on this skip: look at its coefficient, and at what makes it."
    first = {
        "non-finite": "Go back to the last good checkpoint. ",
        "collapse": "Go back to a checkpoint from before. ",
        "spike": "If it does not come back: ",
    }[kind]
    advice = what_to_do(bare, lr)
    return first + (advice if first.endswith(". ") else advice[0].lower() + advice[1:])


def _features(reading: Iterable[str], prefix: str = "block_rms/") -> list[str]:
    """The features of the fixed probe batch, or where there is none those of the live batches."""
    probed = [name for name in reading if name.startswith(f"probe_{prefix}")]
    return probed or [name for name in reading if name.startswith(prefix)]


# Oscillation. A series is the RMS of a hidden feature on a fixed probe batch, or a gradient norm, read at equal
# distances in steps; scores of series with different distances cannot be compared. Three views of y = log(series):
#
#     r_t = y_t - (local linear fit around t)       full windows of 51 readings only
#     O1 = RMS of r                                  how far readings lie from their trend
#     O2 = sd of second differences / √6             the same without a window; equals O1 for white noise
#     O3 = share of r above log 1.5, exp(max r)      how often, and how high, it peaks
#
# A collapsed network looks perfectly stable. So a score counts only if the loss is below that of a predictor that
# always answers zero, and the feature is above a floor; otherwise `gate` says why it does not.

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
