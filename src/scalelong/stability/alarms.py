"""Alarms: what in a series of readings means that a run is in trouble, in words that say what to try."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

REMEDIES = {
    "non-finite": "Stop and go back to the last good checkpoint. Try a lower learning rate, a longer warm-up, gradient "
    "clipping, bf16 instead of fp16, or scale the long skips: scale_skips_(model, 'cs').",
    "spike": "If it does not come back: lower the learning rate, clip gradients, or scale the long skips with CS, "
    "which damps the inner ones.",
    "collapse": "The network may have stopped to use its input. Go back to an earlier checkpoint and lower the "
    "learning rate or the weight decay; look for a coefficient or a gate that went to zero.",
    "overflow margin": "The next growth overflows. Use bf16, or scale the long skips (CS with a smaller kappa), or "
    "lower the learning rate.",
    "dead skip": "The decoder no longer hears this skip. Raise kappa, use LS with start='cs', or look at the gate's "
    "learning rate and weight decay.",
}


@dataclass(frozen=True)
class Alarm:
    step: int
    kind: str
    """One of REMEDIES."""
    where: str
    """The quantity, for example "probe_block_rms/decoder.0"."""
    value: float
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.message} {REMEDIES[self.kind]}"


@dataclass(frozen=True, kw_only=True)
class AlarmRules:
    """When to raise an alarm. Factors are relative to the median of the last `memory` readings."""

    loss_spike: float = 3.0
    gradient_spike: float = 10.0
    feature_spike: float = 4.0
    collapse: float = 1e-3
    """A feature that falls below this share of its median has collapsed."""
    headroom: float = 8.0
    """The largest activation must be smaller than the dtype's largest number by this factor."""
    dead_skip: float = 1e-4
    """A skip is dead if it is smaller than the largest skip by this factor, both as they enter their merges."""
    zero_loss: float | None = None
    """The loss of a predictor of zero (1 for ε); a network that returns to it has collapsed."""
    memory: int = 20
    patience: int = 5
    """Readings before the first comparison with the past."""


@dataclass(frozen=True)
class _Finding:
    kind: str
    where: str
    value: float
    message: str


class Watchman:
    """Looks at one reading after the other. A condition that stays is reported once, and again after it was gone."""

    def __init__(self, rules: AlarmRules) -> None:
        self.rules = rules
        self._past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=rules.memory))
        self._lowest_loss = math.inf
        self._standing: set[tuple[str, str]] = set()

    def look(self, step: int, reading: Mapping[str, float]) -> list[Alarm]:
        findings = list(self._findings(reading))
        standing = {(finding.kind, finding.where) for finding in findings}
        fresh = [finding for finding in findings if (finding.kind, finding.where) not in self._standing]
        self._standing = standing
        self._remember(reading)
        return [Alarm(step, found.kind, found.where, found.value, found.message) for found in fresh]

    def _remember(self, reading: Mapping[str, float]) -> None:
        for name, value in reading.items():
            if math.isfinite(value):
                self._past[name].append(value)
        loss = reading.get("loss", math.inf)
        self._lowest_loss = min(self._lowest_loss, loss) if math.isfinite(loss) else self._lowest_loss

    def _findings(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        bad = [name for name, value in reading.items() if not math.isfinite(value)]
        if bad:
            others = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
            # Where it is one thing that went wrong, it is one alarm.
            yield _Finding("non-finite", "", math.nan, f"{bad[0]}{others} became infinite or NaN.")
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
        for name in _features(reading):
            usual, value = self._median(name), reading[name]
            if usual and value < self.rules.collapse * usual:
                yield _Finding("collapse", name, value, f"{name} fell to {value:.3g}; its median was {usual:.3g}.")
        zero, loss = self.rules.zero_loss, reading.get("loss")
        if zero is not None and loss is not None and self._lowest_loss < 0.8 * zero and loss > 0.98 * zero:
            yield _Finding(
                "collapse",
                "loss",
                loss,
                f"the loss is back at {loss:.3g}, that of a predictor of zero; it was {self._lowest_loss:.3g} before.",
            )

    def _margins(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        headroom = reading.get("headroom")
        if headroom is not None and headroom < self.rules.headroom:
            largest = reading.get("activation_max", math.nan)
            yield _Finding(
                "overflow margin",
                "headroom",
                headroom,
                f"the largest activation, {largest:.3g}, is within a factor of {headroom:.2g} of the dtype's limit.",
            )

    def _dead_skips(self, reading: Mapping[str, float]) -> Iterator[_Finding]:
        prefix = "probe_skip_rms/" if any(name.startswith("probe_skip_rms/") for name in reading) else "skip_rms/"
        sizes = {
            name.removeprefix(prefix): value * reading.get(f"kappa/{name.removeprefix(prefix)}", 1.0)
            for name, value in reading.items()
            if name.startswith(prefix)
        }
        largest = max(sizes.values(), default=0.0)
        for index, size in sizes.items():
            if size <= self.rules.dead_skip * largest:
                message = (
                    f"long skip {index} enters its merge with an RMS of {size:.3g}; the largest has {largest:.3g}."
                )
                yield _Finding("dead skip", f"skip/{index}", size, message)


def _features(reading: Iterable[str]) -> list[str]:
    """The features of the fixed probe batch, or where there is none those of the live batches."""
    probed = [name for name in reading if name.startswith("probe_block_rms/")]
    return probed or [name for name in reading if name.startswith("block_rms/")]
