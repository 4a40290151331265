"""Alarms: what in a series of readings means that a run is in trouble, with the one thing to do about it.

`what_to_do` is the advice of the whole library; diagnosis, range, guard and errors give it too. It follows
docs/recipe.md: a norm in each merge lasts at high rates; where the merges have norms already, the rate is too high.
Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..console import counted
from .collapse import RECORD, Collapse, CollapseDetector

if TYPE_CHECKING:
    from ..finding import LongSkip

# Advice

MERGE_NORM = 'sl.scale_skips_(model, "merge_norm", inputs)'
LOWER = 4
"""A rate that broke a run is divided by this."""
HIGH_RATE, USUAL_RATE = 0.1, 1e-3
"""Rates of AdamW: above the first nothing trains, with the second most do."""


def norm_of(skip: LongSkip) -> str:
    """The norm that reads a merge; empty if there is none."""
    return skip.site.norm or skip.readers.norm


def bare_merges(plan: Iterable[LongSkip], scaling: str | None = None) -> list[int]:
    """The long skips that are concatenated without a norm, where `merge_norm` helps; `scaling` is the model's."""
    if scaling == "merge_norm":
        return []
    return [skip.index for skip in plan if skip.site.main_channels is not None and not norm_of(skip)]


def what_to_do(bare: bool | None, rate: float | None = None) -> str:
    """A sentence. `bare`: some merges have no norm; None where the network is not known."""
    lower = "a lower learning rate"
    if rate is not None:
        lower = f"a learning rate of {rate / LOWER if rate <= HIGH_RATE else USUAL_RATE:.2g} instead of {rate:g}"
        if rate > HIGH_RATE:
            return f"Train with {lower}."
    if bare is None:
        return (
            f"Train with a norm in each merge, {MERGE_NORM} before the first step, or where the merges have norms with "
            f"{lower}."
        )
    if bare:
        return f"Train with a norm in each merge, which lasts at high rates: {MERGE_NORM} before the first step."
    return f"Train with {lower}, or with Muon, which bears higher ones."


# Alarms

REMEDIES = {
    "non-finite": "Go back to the last good checkpoint.",
    "collapse": "Go back to a checkpoint from before.",
    "spike": "If it does not come back:",
    "overflow margin": "The next growth overflows: train in bf16.",
    "dead skip": "The decoder no longer depends on this skip: look at its coefficient, and at what makes it.",
}
"""The kinds of alarm, the worst first, and what to do. An alarm that reports several things is of the worst kind."""
KINDS = tuple(REMEDIES)
NAMED = 3
"""So many things that are wrong at once are named, the rest is counted."""
LONG_STEP = 0.1
"""A step that changes a block by this share of its weights is too long, whatever else is wrong."""
MEMORY, PATIENCE = 20, 5
"""Readings whose median is what a quantity usually is, and those before the first comparison."""
LOSS_SPIKE, GRADIENT_SPIKE, FEATURE_SPIKE = 3.0, 10.0, 4.0
"""Times the usual size."""
VANISHED = 1e-3
"""A feature that falls below this share of its usual size has collapsed."""
ALIKE, APART = 0.98, 0.8
"""Tokens whose similarity is above the first and was usually below the second have become alike."""
HEADROOM = 8.0
"""The largest activation must be smaller than the dtype's largest number by this factor."""
DEAD_SKIP = 1e-4
"""A skip is dead if it is smaller than the largest skip by this factor, both as they enter their merges."""


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


Finding = tuple[str, str, float, str]
"""Kind, where, value, message."""


class AlarmDetector:
    """Checks one reading after the other. A condition that stays is reported once, and again after it was gone.

    `zero_loss`: the loss of a network that knows nothing (1 for ε); left out, that of the first steps.
    """

    def __init__(self, zero_loss: float | None = None) -> None:
        self._past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))
        self._collapse = CollapseDetector(zero_loss=zero_loss)
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
        `lr` is the learning rate of this step; `bare`: there are merges without a norm (`bare_merges`)."""
        # A recorded mean stands for the steps that were not kept.
        each = losses or ([reading["loss"]] * RECORD if "loss" in reading else [])
        for position, loss in enumerate(each, start=step - len(each) + 1):
            event = self._collapse.add(position, loss)
            self._collapsed = event if isinstance(event, Collapse) else self._collapsed
        findings = sorted(self._findings(reading), key=lambda found: KINDS.index(found[0]))
        fresh = [found for found in findings if found[:2] not in self._standing]
        self._standing = {found[:2] for found in findings}
        for name, value in reading.items():
            if math.isfinite(value):
                self._past[name].append(value)
        if not fresh:
            return []
        kind, where, value, _ = fresh[0]
        more = f" And {len(fresh) - NAMED} more." if len(fresh) > NAMED else ""
        message, remedy = " ".join(found[3] for found in fresh[:NAMED]) + more, REMEDIES[kind]
        if lr is not None and kind != "dead skip":
            ratios = [past[-1] for name, past in self._past.items() if name.startswith("update_ratio/")]
            longest = max(ratios, default=0.0)
            changes = f", and a step changes weights by {longest:.0%}" if longest > LONG_STEP else ""
            message += f" The learning rate is {lr:g}{changes}."
        if kind in ("non-finite", "collapse", "spike"):
            advice = what_to_do(bare, lr)
            remedy += f" {advice if remedy.endswith('.') else advice[0].lower() + advice[1:]}"
        return [Alarm(step, kind, where, value, message, remedy)]

    def _findings(self, reading: Mapping[str, float]) -> Iterator[Finding]:
        bad = [name for name, value in reading.items() if not math.isfinite(value)]
        if bad:
            # A coefficient is only what the features before it have made of it.
            named = next((name for name in bad if not name.startswith("kappa/")), bad[0])
            others = f" and {counted(len(bad) - 1, 'other')}" if len(bad) > 1 else ""
            yield "non-finite", "", math.nan, f"{named}{others} became infinite or NaN.{self._grown()}"
            return
        features = _features(reading)
        factors = [("loss_max", "loss", LOSS_SPIKE), ("gradient_norm/all", "gradient_norm/all", GRADIENT_SPIKE)]
        for name, reference, factor in [*factors, *((name, name, FEATURE_SPIKE) for name in features)]:
            usual, value = self._usual(reference), reading.get(name)
            if usual and value is not None and value > factor * usual:
                yield "spike", name, value, f"{name} is {value:.3g}, {value / usual:.1f} times its median."
        if self._collapse.collapsed and self._collapsed is not None:
            yield "collapse", "loss", self._collapsed.loss, f"{self._collapsed}."
        for name in features:
            usual, value = self._usual(name), reading[name]
            if usual and value < VANISHED * usual:
                yield "collapse", name, value, f"{name} fell to {value:.3g}; its median was {usual:.3g}."
        for name in _features(reading, "similarity/"):
            usual, value = self._usual(name), reading[name]
            if usual is not None and value > ALIKE and usual < APART:
                tokens = f"the tokens of {name.partition('/')[2]} became alike: their similarity is {value:.2f}."
                yield "collapse", name, value, tokens
        headroom, largest = reading.get("headroom", math.inf), reading.get("activation_max", math.nan)
        if headroom < HEADROOM:
            text = f"the largest activation, {largest:.3g}, is within a factor of {headroom:.2g} of the dtype's limit."
            yield "overflow margin", "headroom", headroom, text
        indices = {name: name.partition("/")[2] for name in _features(reading, "skip_rms/")}
        sizes = {index: reading[name] * reading.get(f"kappa/{index}", 1.0) for name, index in indices.items()}
        largest = max(sizes.values(), default=0.0)
        for index, size in sizes.items():
            if size <= DEAD_SKIP * largest:
                text = f"long skip {index} enters its merge with an RMS of {size:.3g}; the largest has {largest:.3g}."
                yield "dead skip", f"skip/{index}", size, text

    def _grown(self) -> str:
        """The block that had grown most when all was still finite."""
        known = [(past[-1] / past[0], name) for name in _features(self._past) if (past := self._past[name])[0] > 0]
        factor, name = max(known, default=(0.0, ""))
        return f" {name} left first: it had grown {factor:.3g} times before." if factor > FEATURE_SPIKE else ""

    def _usual(self, name: str) -> float | None:
        past = self._past.get(name, ())
        return median(past) if len(past) >= PATIENCE else None


def _features(reading: Iterable[str], prefix: str = "block_rms/") -> list[str]:
    """The features of the fixed probe batch, or where there is none those of the live batches."""
    probed = [name for name in reading if name.startswith(f"probe_{prefix}")]
    return probed or [name for name in reading if name.startswith(prefix)]
