"""Claims: a number per seed, where the paper says that it lies, and the rule by which that is judged."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from scalelong.errors import InvalidConfigError
from scalelong.experiments import Curve, PlannedRun, Results, RunRecord, interval, steps_ratio
from scalelong.files import write_text

from .settings import CS, LS, NONE, UNIFORM, Arm, Method, Scale

# The rule by which a claim is judged. It looks at the spread over seeds alone.
#
# Each claim is about a number per seed, such as the log of the ratio of two losses under equal seeds. From these
# numbers follows the interval that holds their mean with 90 % confidence (Student's t). The paper's claim says in which
# region the mean lies, which region would be the opposite, and how large the paper's own effect is:
#
# - reproduced: the whole interval lies in the claimed region
# - contradicted: the whole interval lies in the opposite region
# - no effect larger than x: neither, and the interval leaves out an effect of the paper's size, on either side of none
# - cannot be judged at this scale: anything else


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    CONTRADICTED = "contradicted"
    NO_EFFECT = "no effect of the paper's size"
    CANNOT_BE_JUDGED = "cannot be judged at this scale"
    MIXED = "mixed"
    """Of items alone: their claims say different things."""


@dataclass(frozen=True)
class Region:
    """low < value < high."""

    low: float = -math.inf
    high: float = math.inf

    def holds(self, interval: "Region") -> bool:
        return self.low < interval.low and interval.high < self.high


BELOW_ZERO, ABOVE_ZERO = Region(high=0.0), Region(low=0.0)


def region_of(values: Sequence[float]) -> Region:
    """Where the mean lies with 90 % confidence; everywhere, for fewer than two values."""
    return Region(*interval(values))


def judge(
    values: Sequence[float],
    claimed: Region,
    opposite: Sequence[Region],
    effect: float | None = None,
) -> Verdict:
    """`effect` is the size of the paper's, as a distance from zero; None where zero does not stand for no effect."""
    if len(values) < 2:
        return Verdict.CANNOT_BE_JUDGED
    found = region_of(values)
    if claimed.holds(found):
        return Verdict.REPRODUCED
    if any(region.holds(found) for region in opposite):
        return Verdict.CONTRADICTED
    if effect is not None and Region(-abs(effect), abs(effect)).holds(found):
        return Verdict.NO_EFFECT
    return Verdict.CANNOT_BE_JUDGED


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Of an item: reproduced if all of its claims are, otherwise what at least half of them say, or else mixed."""
    if all(verdict is Verdict.REPRODUCED for verdict in verdicts):
        return Verdict.REPRODUCED if verdicts else Verdict.CANNOT_BE_JUDGED
    for verdict in (Verdict.CONTRADICTED, Verdict.NO_EFFECT, Verdict.CANNOT_BE_JUDGED):
        if 2 * verdicts.count(verdict) >= len(verdicts):
            return verdict
    return Verdict.MIXED


# The raw results of a study: small JSON that pages and figures are made of, without the runs.

RESULTS = "results.json"
TRACES = {
    "features": ("probe_block_rms/middle", "probe_block_rms/mid_block"),
    "gradient": ("gradient_norm/all",),
}
"""What is drawn of single runs, with the names that U-ViT and diffusers' UNets give it."""


def rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else rounded(value)


def to_dict(run: RunRecord) -> dict[str, Any]:
    """A run in four digits, which say all there is to say. What is published is computed from what is stored."""
    return {
        "setting": run.setting,
        "method": run.method,
        "seed": run.seed,
        "run": run.run,
        "held_out": [[step, rounded(value)] for step, value in run.held_out.points],
        "kappas": [rounded(value) for value in run.kappas],
        **{name: _short(run.measured.get(name)) for name in ("o1_features", "o1_gradient")},
        "frechet": _short(run.frechet),
        "diverged": run.diverged is not None,
        "seconds": _short(run.seconds),
        "traces": {name: [rounded(value) for value in values] for name, values in run.traces.items()},
        "measured": {name: value for name, value in run.measured.items() if name not in SCORES},
    }


def from_dict(values: dict[str, Any]) -> RunRecord:
    held_out = values["held_out"]
    kept = ("setting", "method", "seed", "run", "frechet", "seconds", "traces")
    counted = {name: None if values.get("gate") else values[name] for name in SCORES}
    return RunRecord(
        **{name: values[name] for name in kept},
        held_out=Curve(*(tuple(column) for column in zip(*held_out, strict=True))) if held_out else Curve(),
        kappas=tuple(values["kappas"]),
        measured={**values["measured"], **counted},
        diverged="it diverged" if values["diverged"] else None,
    )


@dataclass(frozen=True, kw_only=True)
class StudyResults(Results):
    """Records of the runs of a study, and what they were made with."""

    item: str
    scale: Scale
    seeds: int
    settings: dict[str, dict[str, Any]]
    """By name: what defines the setting, as far as it differs from the defaults of a configuration."""
    versions: dict[str, str] = field(default_factory=dict)
    """The packages that made them."""
    survey: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = ("item", "scale", "seeds", "settings", "versions", "survey")
        head = json.dumps({name: getattr(self, name) for name in names}, ensure_ascii=False, indent=1)[:-2]
        records = ",\n".join(f"  {json.dumps(to_dict(run), ensure_ascii=False)}" for run in self.runs)
        write_text(folder / RESULTS, f'{head},\n "runs": [\n{records}\n ]\n}}\n')

    @classmethod
    def read(cls, folder: Path) -> "StudyResults":
        path = folder / RESULTS
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls([from_dict(run) for run in values.pop("runs")], **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidConfigError(f"{path} cannot be read as results of `lab reproduce`: {error}") from error


def record(arm: Arm, run: PlannedRun, *, traces: bool, measured: dict[str, Any]) -> RunRecord:
    """A finished run, rounded: four digits say all there is to say."""
    found = run.read(arm.setting.name)
    read = ((name, found.curves[key]) for name, keys in TRACES.items() for key in keys if key in found.curves)
    kept = {name: list(curve.values) for name, curve in read} if traces else {}
    return from_dict(to_dict(replace(found, traces=kept, measured={**measured, **oscillations(found.curves)})))


# How much features and gradients oscillate (Figure 1), as numbers.

SCORES = ("o1_features", "o1_gradient")
WINDOW = 51
FLOOR = 1e-4
"""The smallest reading that counts: a collapsed network looks perfectly stable."""


def oscillations(curves: Mapping[str, Curve]) -> dict[str, float | None]:
    """O1 of the blocks on the probe batch, their mean, and of the gradient; None where the run has learned nothing."""
    features = [_o1(curve.values) for name, curve in curves.items() if name.startswith("probe_block_rms/")]
    gradient = _o1(curves["gradient_norm/all"].values) if "gradient_norm/all" in curves else None
    held_out = curves.get("held_out_loss")
    if not features or None in features or (held_out is not None and not held_out.values[-1] < 1.0):
        return dict.fromkeys(SCORES)
    return {"o1_features": fmean(score for score in features if score is not None), "o1_gradient": gradient}


def _o1(series: Sequence[float]) -> float | None:
    """The RMS of the distances of log(series) from a local linear fit over a window of 51 readings, at equal distances
    in steps; None where the series is too short, not finite, or has collapsed."""
    if len(series) < WINDOW or not all(math.isfinite(value) and value >= FLOOR for value in series):
        return None
    y, half = [math.log(value) for value in series], WINDOW // 2
    # At the middle of an odd window of equal distances a linear fit equals the mean, because its slope drops out.
    away = (y[t] - fmean(y[t - half : t + half + 1]) for t in range(half, len(y) - half))
    return math.sqrt(fmean(value * value for value in away))


# What is compared: numbers of one run.


@dataclass(frozen=True)
class Quantity:
    name: str
    of: Callable[[RunRecord], float | None]
    """None where a run has no such number."""
    form: str = "{:.4f}"

    def text(self, value: float | None) -> str:
        return "-" if value is None else self.form.format(value)


def final_loss(record: RunRecord) -> float:
    """At the end of training. A run that diverged counts as a predictor of zero, whose loss is 1."""
    return 1.0 if record.diverged is not None or not len(record.held_out) else record.held_out.values[-1]


def loss_at(step: int) -> Quantity:
    def value(record: RunRecord) -> float | None:
        return 1.0 if record.diverged is not None else dict(record.held_out.points).get(step)

    return Quantity(f"held-out loss at step {step}", value)


LOSS = Quantity("held-out loss", final_loss)
FRECHET = Quantity("Fréchet distance", lambda record: record.frechet, "{:.2f}")
FEATURES = Quantity("O1 of the features", lambda record: record.measured.get("o1_features"))
GRADIENTS = Quantity("O1 of the gradient", lambda record: record.measured.get("o1_gradient"), "{:.3f}")


def qualities(results: StudyResults) -> tuple[Quantity, ...]:
    """What a trained network is judged by: the held-out loss, and the Fréchet distance where it was measured.

    The paper speaks of FID alone. Of few images it is noisy; differences of the loss are seen much sooner. Neither is
    chosen after the fact: both count.
    """
    return (LOSS, FRECHET) if any(run.frechet is not None for run in results.runs) else (LOSS,)


# Claims: a number per seed, and where the paper says that it lies.

SPEED_UP = 1.5
"""The paper's promise: this many times fewer steps."""

CLEARLY = math.log(0.9)
"""The size of an effect that the paper shows in a figure without numbers: 10 %, which a reader would see."""

FIDS: dict[str, dict[str, float]] = {
    "U-ViT": {
        "none": 3.11,
        "1/√2": 3.11,
        "CS(0.7)": 2.98,
        "LS": 3.01,
        "LS, ratio 4": 3.06,
        "LS, ratio 8": 3.10,
        "LS, ELU": 3.08,
        "LS, Mish": 3.08,
        "LS, IE": 3.09,
        "LS, scalars": 3.46,
        "stable τ = 0.1": 3.77,
        "stable τ = 0.3": 3.75,
        "ReZero": 3.46,
    },
    "UNet": {"none": 3.17, "1/√2": 3.14, "CS(0.7)": 3.05, "LS": 3.07},
}
"""The paper's own, on CIFAR-10 (Tables 1 to 3)."""


def published_effect(setting: str, method: str, other: str) -> float:
    """The log of the ratio of the paper's FIDs; of data and depths for which it prints none, that on CIFAR-10."""
    fids = FIDS["UNet" if setting.startswith("UNet") else "U-ViT"]
    return math.log(fids[method] / fids[other])


def percent(value: float) -> str:
    """The log of a ratio as a change in percent."""
    return f"{100 * math.expm1(value):+.1f} %"


def factor(value: float) -> str:
    return f"× {math.exp(value):.2f}"


@dataclass(frozen=True)
class Claim:
    text: str
    setting: str
    values: Sequence[float | None]
    """One per seed; None where a seed has no such number."""
    claimed: Region
    opposite: tuple[Region, ...]
    show: Callable[[float], str] = percent
    effect: float | None = None
    """The size of the paper's effect, as a distance from zero, which is no effect; None where there is no such size."""

    @property
    def verdict(self) -> Verdict:
        return judge(self.known, self.claimed, self.opposite, self.effect)

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def region(self) -> Region:
        return region_of(self.known)

    def text_of(self, value: float | None) -> str:
        return "-" if value is None else self.show(value)

    def verdict_text(self) -> str:
        """The verdict with its size."""
        if self.verdict is Verdict.NO_EFFECT:
            farther = max(self.region.low, self.region.high, key=abs)
            return f"no effect larger than {self.show(farther).lstrip('+-')}"
        return str(self.verdict) if self.verdict is Verdict.CANNOT_BE_JUDGED else f"**{self.verdict}**"

    def effect_text(self) -> str:
        return "-" if self.effect is None else self.show(self.effect)

    def interval_text(self) -> str:
        """The mean, and where it lies with 90 % confidence."""
        found = self.region
        if math.isinf(found.low):
            return "-"
        return f"{self.show(fmean(self.known))} ({self.show(found.low)} to {self.show(found.high)})"


def below(
    results: Results,
    setting: str,
    method: Method,
    other: Method,
    quantity: Quantity,
    effect: float | None = None,
) -> Claim:
    """The method's number is smaller than the other's, under equal seeds. `effect`: that of the FIDs, by default."""
    return Claim(
        f"{quantity.name}: {method.label} below {other.label}",
        setting,
        log_ratios(results, setting, method, other, quantity),
        BELOW_ZERO,
        (ABOVE_ZERO,),
        effect=published_effect(setting, method.label, other.label) if effect is None else effect,
    )


def scaling_below(
    results: Results, settings: Iterable[str], quantities: Iterable[Quantity], effect: float | None = None
) -> list[Claim]:
    """CS and LS each below no scaling and below 1/√2."""
    return [
        below(results, setting, method, other, quantity, effect)
        for quantity in quantities
        for setting in settings
        for other in (NONE, UNIFORM)
        for method in (CS, LS)
    ]


def alike(results: Results, setting: str, method: Method, other: Method, quantity: Quantity, margin: float) -> Claim:
    """The two numbers differ by less than the margin, as a share."""
    low, high = -math.log1p(margin), math.log1p(margin)
    return Claim(
        f"{quantity.name}: {method.label} within {100 * margin:.0f} % of {other.label}",
        setting,
        log_ratios(results, setting, method, other, quantity),
        Region(low, high),
        (Region(high=low), Region(low=high)),
        effect=high,
    )


def faster(results: Results, setting: str, method: Method, other: Method) -> Claim:
    """The method reaches the loss where the other ends in 1.5 times fewer steps."""
    return Claim(
        f"steps to the loss of {other.label}: {method.label} needs 1/{SPEED_UP} or less",
        setting,
        [log_steps(mine, theirs) for mine, theirs in results.pairs(method.label, other.label, setting)],
        Region(high=-math.log(SPEED_UP)),
        (ABOVE_ZERO,),
        factor,
        effect=-math.log(SPEED_UP),
    )


def log_steps(mine: RunRecord, theirs: RunRecord) -> float | None:
    """Log of the steps to equal quality, relative to the other's.

    A run that ends above the other never gets there. How much slower it is follows from the other, which has passed the
    loss where this one ends.
    """
    if mine.diverged is not None or theirs.diverged is not None:
        return None
    ratio = steps_ratio(mine.held_out, theirs.held_out)
    if ratio is not None:
        return math.log(ratio)
    reverse = steps_ratio(theirs.held_out, mine.held_out)
    return None if reverse is None else -math.log(reverse)


def log_ratios(results: Results, setting: str, method: Method, other: Method, quantity: Quantity) -> list[float | None]:
    values = [
        (quantity.of(mine), quantity.of(theirs)) for mine, theirs in results.pairs(method.label, other.label, setting)
    ]
    return [math.log(mine / theirs) if mine and theirs else None for mine, theirs in values]


# A figure or a table of the paper: what it claims, what to run, what to measure, and when a claim holds.


@dataclass(frozen=True)
class Study:
    """A figure or a table of the paper: arms, quantities, claims and figures under one name."""

    name: str
    """As on the command line: fig1, table2, ..."""
    title: str
    paper: str
    """What the paper says, in our words."""
    here: str
    """What is done instead, and where it differs."""
    arms: Callable[[Scale], list[Arm]]
    quantities: tuple[Quantity, ...]
    """What the tables of the page show of every run."""
    claims: Callable[[StudyResults], list[Claim]]
    figures: dict[str, Callable[[StudyResults], Figure]]
    """By name of the file."""
    published: dict[str, str] = field(default_factory=dict)
    """The paper's own numbers by method, where it prints them."""
    measure: Callable[[PlannedRun], dict[str, Any]] | None = None
    """Further measurements on a finished run."""
    survey: Callable[[Scale, int], dict[str, Any]] | None = None
    """Measurements that need no run, such as those on the data alone; they are given the number of seeds."""
    traces: bool = False
    """Whether the page draws single readings, so that the raw results must hold those of the first seed."""
