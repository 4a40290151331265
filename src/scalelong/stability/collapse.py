"""The one rule of collapse: `CollapseDetector`. Guard, monitor, range, trainer, comparisons and reports all use it.

The failure of deep U-shaped networks at high rates is finite: the loss climbs back to that of a network that knows
nothing, and stays there. Such a network answers the same at every position (`noise.flat_losses`); where ε is predicted
that is zero, and costs 1. One loss says little, because it depends on the noise levels that a small batch happens to
hold. So the detector compares like with like. For each noise level b it follows what the network has reached, m_b: the
mean over the last quarter of its images, at most 256, so that a lucky batch does not lower it. A step with losses l_i
at the levels b_i, where a network that knows nothing would have z_i, has

    excess E = Σ (l_i - m_{b_i})       0 in a run that goes on as it was,
    gap    G = Σ (z_i - m_{b_i})       what there is to lose: at E = G nothing is left.

Evidence is summed as in Page's test for a change (CUSUM; Page, Biometrika 41, 1954):

    S ← max(0, S + (min(E, 2G) - G/2) / mean gap)            suspected when S > max(4, 14 v)

and collapsed when S' > max(2, 5 v), the same sum of the steps after that alone: time bears witness. That takes twelve
steps at E = G, and never fewer than five. Here v is the variance of E / G in the run, times
(1 + ρ) / (1 - ρ) for an autocorrelation ρ. A sum of noise of variance v that drifts down by 1/2 exceeds 14 v with a
probability of exp(-14); n steps that reach that bar have a mean of at least 1/2 + 14 v / n, which is never less than
√28 standard errors √(v/n). The last step at which S was 0 is where the trouble began. Nothing is judged before the loss
is a fifth below z; a loss that is not finite has collapsed. Features are no witness: a resumed run, and
every process of one, must decide alike.

    detector = CollapseDetector(zero_loss=1.0)
    for step, loss in enumerate(losses, start=1):
        event = detector.add(step, loss)               # None, or a Collapse or a Spike

The state is plain numbers (`state_dict`), so that a resumed run decides as it would have.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidConfigError

RULE = (
    "a run has collapsed when its mean loss since some step is above the level that it had reached by more than half "
    "of what it had learned and by more than five standard errors, and the steps that follow show the same; or when it "
    "is not finite"
)
"""The rule in a sentence, for pages and reports."""
LEARNED = 0.2
"""Nothing is judged before the loss is below that of a network that knows nothing, z, by this share."""
LOST = 0.5
"""A run has collapsed when it has lost this share of what it had learned."""
EVIDENCE, NOISE = 4.0, 14.0
"""The bar for S: in a quiet run (8 steps at z), and in units of the variance of a step (noise passes it
with a chance of exp(-14) per excursion). A loss that comes back after it has passed was a spike."""
AGAIN, AGAIN_NOISE = 2.0, 5.0
"""The same for the steps after that, which must show it again."""
NOISIEST = 0.5
"""Nothing is judged while the variance of a step, in squared gaps, is above this: what was learned is lost in noise."""
MOST = 2.0
"""The largest excess that a step counts with, in gaps: one wild step is no collapse."""
SHORT_MEMORY, LONG_MEMORY, RECENT = 8, 256, 1 / 4
"""Images over which the loss of a noise level is averaged: the most recent quarter, within these limits. A network may
learn within 20 steps and be lost after 30: with more than 8 images the level would still be on its way down."""
RISE = 2e-3
"""By this share per step a level goes back up to what is measured, so that a lucky time is forgotten."""
GAP_MEMORY = 10
"""Steps over which the mean gap is averaged,"""
NOISE_MEMORY = 300
"""and those over which the noise is."""
SETTLED = 20
"""Steps before the first judgement."""
FIRST = 10
"""Steps whose loss stands for z, where that is not given."""
LARGEST_GAP = 8.0
"""The same case: the gap counts at most so many times the level, because a network may start far above z."""
MARGIN = 10
"""Steps before the first evidence in which something may already have been wrong."""
TROUBLE = ("steps", "loss", "level", "zero", "largest", "evidence", "squares", "products")
"""Sums while the loss is above its level."""
RECORD = 20
"""Steps that a value of a recorded curve stands for."""


@dataclass(frozen=True)
class Spike:
    """A loss that left its level and came back."""

    step: int
    began: int
    loss: float
    """The largest mean loss of a step."""
    level: float
    """The loss of the same images before."""
    noise_level: int | None
    """The noise level with the largest excess, where levels are known."""

    def __str__(self) -> str:
        steps = self.step - self.began
        return (
            f"the loss left its level of {self.level:.3g} at step {self.began}, rose to {self.loss:.3g} and came back "
            f"after {steps} step{'s' if steps != 1 else ''}"
        )


@dataclass(frozen=True)
class Collapse:
    """A loss that went back towards that of a network which knows nothing."""

    step: int
    began: int
    """The last step before the loss left: where the trouble began."""
    loss: float
    """Mean since then."""
    level: float
    """The loss that the network had reached on the same noise levels."""
    zero: float
    """The loss of a network that knows nothing there."""
    noise_level: int | None = None
    """The noise level with the largest excess, where levels are known."""
    left_first: Mapping[str, Any] | None = None
    """The block or skip whose size left its level first: {"where", "step", "factor"}."""

    def __str__(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss of step {self.step} is not finite"
        return (
            f"the loss has collapsed: it is {self.loss:.3g}, was {self.level:.3g} until step {self.began}, and a "
            f"network that knows nothing has {self.zero:.3g}"
        )


class CollapseDetector:
    """Takes the losses of all steps, one after the other, and says once when they have collapsed.

    `zero_loss`: the loss of a network that knows nothing, 1 where ε is predicted. Left out, it is what the first steps
    have. `levels`: the number of noise levels, for losses that are given by level.
    """

    def __init__(self, *, zero_loss: float | None = None, levels: int = 1) -> None:
        if zero_loss is not None and not (math.isfinite(zero_loss) and zero_loss > 0):
            raise InvalidConfigError(f"zero_loss is the loss of a network that knows nothing, above 0; got {zero_loss}")
        self.zero_loss, self.levels = zero_loss, levels
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.measured: list[float] = [math.nan] * self.levels
        """Mean loss of each noise level."""
        self.reached: list[float] = [math.nan] * self.levels
        """The least that it was: m_b."""
        self.images: list[float] = [0.0] * self.levels
        """Images that these means have seen."""
        self.first: list[float] = []
        self.gap, self.zero = 0.0, 0.0
        self.variance, self.covariance, self.last = 0.0, 0.0, 0.0
        """Noise of the excess: E[e²], E[e e'] of neighbouring steps, and the last e."""
        self.steps = 0
        """Steps that went into the mean gap."""
        self.evidence, self.again, self.began, self.collapsed = 0.0, 0.0, 0, False
        self.trouble: dict[str, float] = {}
        """Sums since `began`: see `_weigh`."""
        self.excess: list[float] = [0.0] * self.levels
        """Excess of each noise level since `began`."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({name: value for name, value in vars(self).items() if name not in ("zero_loss", "levels")})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. What an older version did not save begins as in a new detector."""
        self.reset()
        for name, value in state.items():
            if name in vars(self) and isinstance(value, type(vars(self)[name]) | int | float):
                setattr(self, name, copy.deepcopy(value))
        if not self.trouble:
            self.evidence = 0.0

    @property
    def bar(self) -> float:
        """The evidence at which a run is suspected."""
        return max(EVIDENCE, NOISE * self.noise)

    @property
    def noise(self) -> float:
        """The variance of a step's excess in gaps, as it counts in sums of many steps."""
        if self.variance == 0.0 or self.gap <= 0.0:
            return 0.0
        correlation = min(max(self.covariance / self.variance, 0.0), 0.8)
        return self.variance / self.gap**2 * (1 + correlation) / (1 - correlation)

    @property
    def trouble_since(self) -> int | None:
        """The last step before the loss left its level; None while all is well."""
        return self.began if self.evidence > 0 else None

    def add(self, step: int, loss: float) -> Collapse | Spike | None:
        """The mean loss of step number `step`, counted from 1."""
        if self.zero_loss is None and len(self.first) < FIRST and math.isfinite(loss):
            self.first.append(float(loss))
        zero = self.zero_loss if self.zero_loss is not None else _usual(self.first)
        return self.add_levels(step, [1.0], [float(loss)], [zero])

    def add_levels(
        self, step: int, counts: Sequence[float], losses: Sequence[float], zeros: Sequence[float]
    ) -> Collapse | Spike | None:
        """For each noise level: how many images of the step it had, and the sums of their losses and zero losses."""
        if not all(math.isfinite(loss) for loss in losses):
            return self._not_finite(step)
        known = [b for b in range(self.levels) if counts[b] > 0 and not math.isnan(self.reached[b])]
        images = sum(counts[b] for b in known)
        event = None
        if known:
            loss, zero = sum(losses[b] for b in known), sum(zeros[b] for b in known)
            level = sum(counts[b] * self.reached[b] for b in known)
            gap = zero - level
            if self.zero_loss is None and self.levels == 1:
                gap = min(gap, LARGEST_GAP * level)
            excess = {b: losses[b] - counts[b] * self.reached[b] for b in known}
            event = self._weigh(step, loss / images, level / images, zero / images, gap / images, excess)
        self._learn(counts, losses, zeros)
        return event

    def _weigh(
        self, step: int, loss: float, level: float, zero: float, gap: float, by_level: Mapping[int, float]
    ) -> Collapse | Spike | None:
        """One step of the test. All numbers but those by level are means of an image."""
        learned = self.gap > LEARNED * self.zero and self.steps >= SETTLED and self.noise < NOISIEST
        excess = min(loss - level, MOST * max(gap, 0.0))
        # A loss that falls is no noise, so what is below the level does not raise it. Nor does one wild step.
        most = MOST * gap if learned else 2 * LEARNED * zero
        noise = min(max(loss - level, -math.sqrt(self.variance)), most)
        counted = (excess - LOST * gap) / self.gap if learned else -LOST
        if self.evidence == 0.0 and counted <= 0.0:
            # The gap of a quiet run. That of a run in trouble says nothing.
            share = 1 / min(self.steps + 1, GAP_MEMORY)
            self.gap += share * (gap - self.gap)
            self.zero += share * (zero - self.zero)
            self.steps += 1
            self._learn_noise(1, noise**2, noise * self.last)
            self.last = noise
            return None
        if self.evidence == 0.0:
            self.began, self.excess = step - 1, [0.0] * self.levels
            self.trouble = dict.fromkeys(TROUBLE, 0.0)
        before, self.evidence = self.evidence, max(0.0, self.evidence + counted)
        trouble = self.trouble
        added = {"steps": 1.0, "loss": loss, "level": level, "zero": zero}
        for name, value in {**added, "squares": noise**2, "products": noise * self.last}.items():
            trouble[name] += value
        trouble["largest"], trouble["evidence"] = max(trouble["largest"], loss), max(trouble["evidence"], self.evidence)
        for b, value in by_level.items():
            self.excess[b] += value
        self.last = noise
        if self.evidence == 0.0:
            return self._came_back(step)
        if self.evidence <= self.bar:
            self.again = 0.0
        elif self.collapsed:
            self.evidence = self.bar  # so that a run that comes back is soon known to
        elif before > self.bar:
            self.again = max(0.0, self.again + counted)
            if self.again > max(AGAIN, AGAIN_NOISE * self.noise):
                return self._collapse(step)
        return None

    def _came_back(self, step: int) -> Spike | None:
        """The loss is at its level again."""
        trouble, steps, self.again = self.trouble, self.trouble["steps"], 0.0
        spiked = trouble["evidence"] > self.bar and not self.collapsed
        if not self.collapsed:
            # It was noise. A collapse must not raise the bar that it is to pass, so noise is learned only now.
            self._learn_noise(int(steps), trouble["squares"] / steps, trouble["products"] / steps)
        self.collapsed = False
        return Spike(step, self.began, trouble["largest"], trouble["level"] / steps, self._worst()) if spiked else None

    def _collapse(self, step: int) -> Collapse:
        self.collapsed, self.evidence = True, self.bar
        means = (self.trouble[name] / self.trouble["steps"] for name in ("loss", "level", "zero"))
        return Collapse(step, self.began, *means, noise_level=self._worst())

    def _learn_noise(self, steps: int, square: float, product: float) -> None:
        share = 1 - (1 - 1 / min(self.steps, NOISE_MEMORY)) ** steps
        self.variance += share * (square - self.variance)
        self.covariance += share * (product - self.covariance)

    def _learn(self, counts: Sequence[float], losses: Sequence[float], zeros: Sequence[float]) -> None:
        """Follow the loss of each level: down at once, up slowly, and not at all while something is wrong."""
        for b in range(self.levels):
            if counts[b] <= 0:
                continue
            most = MOST * zeros[b] / counts[b]
            mean, before = min(losses[b] / counts[b], most), min(self.measured[b], most)
            memory = min(max(RECENT * self.images[b], SHORT_MEMORY), LONG_MEMORY)
            self.images[b] += counts[b]
            weight = 1.0 if math.isnan(before) else counts[b] / (counts[b] + memory)
            now = self.measured[b] = mean if math.isnan(before) else before + weight * (mean - before)
            reached = self.reached[b]
            if math.isnan(reached) or now < reached:
                self.reached[b] = now
            elif self.evidence == 0.0:
                self.reached[b] += RISE * (now - reached)

    def _worst(self) -> int | None:
        return max(range(self.levels), key=lambda b: self.excess[b]) if self.levels > 1 else None

    def _not_finite(self, step: int) -> Collapse | None:
        if self.collapsed:
            return None
        began = self.began if self.evidence > 0 else step - 1
        self.collapsed, self.evidence, self.began = True, self.bar, began
        self.trouble = self.trouble or dict.fromkeys(TROUBLE, 0.0)
        level = self.reached[0] if self.levels == 1 else math.nan
        return Collapse(step, began, math.nan, level, self.zero)


def has_collapsed(curve: Sequence[float], zero_loss: float | None = None) -> bool:
    """True if a recorded curve ends collapsed. Each of its values is a mean, and stands for many steps."""
    detector = CollapseDetector(zero_loss=zero_loss)
    for step, loss in enumerate((loss for loss in curve for _ in range(RECORD)), start=1):
        detector.add(step, loss)
    return detector.collapsed


def _usual(values: Sequence[float]) -> float:
    """The median; the lower quartile where a network starts far above z and is there soon."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    quartile, median = ordered[len(ordered) // 4], ordered[len(ordered) // 2]
    return median if median < 3 * quartile else quartile


def last_good(steps: Iterable[int], began: int) -> int | None:
    """The step with a saved state to go back to after a trouble that began at step `began`."""
    until = [step for step in steps if step <= began]
    return max((step for step in until if step <= began - MARGIN), default=min(until, default=None))
