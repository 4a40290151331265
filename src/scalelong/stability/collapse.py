"""A loss that collapses and stays finite, noticed within steps: `CollapseDetector`.

The failure of deep U-shaped networks at high rates is finite: the loss climbs back to that of a network that always
answers zero, and stays there. One loss says little, because it depends on the noise levels that a small batch happens
to hold. So the detector compares like with like. For each noise level b it follows what the network has reached, m_b.
A step with losses l_i at the levels b_i, where zero would have cost z_i, has

    excess E = Σ (l_i - m_{b_i})       0 in a run that goes on as it was,
    gap    G = Σ (z_i - m_{b_i})       what there is to lose: E = G is the loss of zero.

Evidence is summed as in Page's test for a change (CUSUM; Page, Biometrika 41, 1954):

    S ← max(0, S + (min(E, 2G) - G/2) / mean gap)

In a healthy run S falls by one half per step and stays near 0; after a collapse to zero it rises by one half. An
excess counts at most twice the gap, so that one wild step is no collapse. The bar for S grows with the noise of
the steps: a sum of noise of variance v that drifts down by 1/2 exceeds h with probability exp(-h / v). The last step
at which S was 0 is where the trouble began.

    detector = CollapseDetector(zero_loss=1.0)
    for step, loss in enumerate(losses, start=1):
        event = detector.add(step, loss)               # None, or a Collapse or a Spike

The state is plain numbers (`state_dict`), so that a resumed run decides as it would have.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidConfigError

LEARNED = 0.2
"""Nothing is judged before the loss is below that of zero by this share."""
LOST = 0.5
"""A run has collapsed when it has lost this share of what it had learned."""
EVIDENCE = 6.0
"""The bar for S in a quiet run: 12 steps at the loss of zero, 4 at three times that."""
SPIKE = 0.7
"""A loss that comes back after this share of that bar was a spike."""
NOISE = 12.0
"""The bar for S in units of the variance of a step: a false alarm has a chance of exp(-12) per excursion."""
MOST = 2.0
"""The largest excess that a step counts with, in gaps."""
MEMORY = 16
"""Images over which the loss of a noise level is averaged."""
RISE = 1e-3
"""By this share per step a level goes back up to what is measured, so that one lucky batch is forgotten."""
QUIET = 10
"""Steps over which the mean gap is averaged,"""
NOISE_MEMORY = 100
"""and those over which the noise is."""
FIRST = 10
"""Steps whose loss stands for that of zero, where that is not given."""
LARGEST_GAP = 8.0
"""The same case: the gap counts at most so many times the level, because a network may start far above zero's loss."""
MARGIN = 10
"""Steps before the first evidence in which something may already have been wrong."""


@dataclass(frozen=True)
class Spike:
    """A loss that left its level and came back."""

    step: int
    began: int
    loss: float
    """The largest mean loss of a step."""
    level: float
    """What the same images cost before."""
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
    """A loss that went back towards that of a network which always answers zero."""

    step: int
    began: int
    """The last step before the loss left: where the trouble began."""
    loss: float
    """Mean since then."""
    level: float
    """What the network had reached on the same noise levels."""
    zero: float
    """What an output of zero costs there."""
    noise_level: int | None = None
    """The noise level with the largest excess, where levels are known."""
    left_first: Mapping[str, Any] | None = None
    """The block or skip whose size left its level first: {"where", "step", "factor"}."""

    def __str__(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss of step {self.step} is not finite"
        return (
            f"the loss has collapsed: it is {self.loss:.3g}, was {self.level:.3g} until step {self.began}, and an "
            f"output of zero has {self.zero:.3g}"
        )


class CollapseDetector:
    """Takes the losses of all steps, one after the other, and says once when they have collapsed.

    `zero_loss`: the loss of an output of zero, 1 for a network that predicts ε. Left out, it is what the first steps
    have. `levels`: the number of noise levels, for losses that are given by level.
    """

    def __init__(self, *, zero_loss: float | None = None, levels: int = 1) -> None:
        if zero_loss is not None and not (math.isfinite(zero_loss) and zero_loss > 0):
            raise InvalidConfigError(f"zero_loss is the loss of a network that answers zero, above 0; got {zero_loss}")
        self.zero_loss, self.levels = zero_loss, levels
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.measured: list[float] = [math.nan] * self.levels
        """Mean loss of each noise level, lately."""
        self.reached: list[float] = [math.nan] * self.levels
        """The least that it was: m_b."""
        self.first: list[float] = []
        self.gap, self.zero, self.variance = 0.0, 0.0, 0.0
        self.steps = 0
        """Steps behind these means."""
        self.evidence, self.began, self.collapsed = 0.0, 0, False
        self.trouble: list[float] = []
        """Since `began`: steps, loss, level, zero, largest loss, largest evidence, then the excess of each level."""

    def state_dict(self) -> dict[str, Any]:
        known = {name: value for name, value in vars(self).items() if name not in ("zero_loss", "levels")}
        return {name: list(value) if isinstance(value, list) else value for name, value in known.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if state:
            for name, value in state.items():
                setattr(self, name, list(value) if isinstance(value, list) else value)

    @property
    def bar(self) -> float:
        """The evidence at which a run has collapsed."""
        return max(EVIDENCE, NOISE * self.variance)

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
            event = self._weigh(step, loss / images, level / images, zero / images, gap / images)
            if self.evidence > 0:
                for b in known:
                    self.trouble[6 + b] += losses[b] - counts[b] * self.reached[b]
        self._learn(counts, losses, zeros)
        return event

    def _weigh(self, step: int, loss: float, level: float, zero: float, gap: float) -> Collapse | Spike | None:
        """One step of the test. All numbers are means of an image."""
        share = 1 / min(self.steps + 1, QUIET)
        learned = self.gap > LEARNED * self.zero and self.steps >= FIRST
        excess = min(loss - level, MOST * max(gap, 0.0))
        counted = (excess - LOST * gap) / self.gap if learned else -LOST
        if learned and not self.collapsed:
            # Slowly: the first steps of a collapse must not raise the bar that they are to pass.
            noise = max(excess / self.gap, -LOST) ** 2  # a loss that falls is no noise
            self.variance += (noise - self.variance) / min(self.steps, NOISE_MEMORY)
        if self.evidence == 0.0 and counted <= 0.0:
            # The gap of a quiet run. That of a run in trouble says nothing.
            self.gap += share * (gap - self.gap)
            self.zero += share * (zero - self.zero)
            self.steps += 1
            return None
        if self.evidence == 0.0:
            self.began, self.trouble = step - 1, [0.0] * (6 + self.levels)
        self.evidence = max(0.0, self.evidence + counted)
        trouble = self.trouble
        for position, value in enumerate((1.0, loss, level, zero)):
            trouble[position] += value
        trouble[4], trouble[5] = max(trouble[4], loss), max(trouble[5], self.evidence)
        if self.evidence == 0.0:
            spiked = trouble[5] > SPIKE * self.bar and not self.collapsed
            self.collapsed = False
            return Spike(step, self.began, trouble[4], trouble[2] / trouble[0], self._worst()) if spiked else None
        if self.evidence <= self.bar:
            return None
        self.evidence = self.bar  # so that a run that comes back is soon known to
        if self.collapsed:
            return None
        self.collapsed = True
        steps = trouble[0]
        return Collapse(step, self.began, trouble[1] / steps, trouble[2] / steps, trouble[3] / steps, self._worst())

    def _learn(self, counts: Sequence[float], losses: Sequence[float], zeros: Sequence[float]) -> None:
        """Follow the loss of each level: down at once, up slowly, and not at all while something is wrong."""
        for b in range(self.levels):
            if counts[b] <= 0:
                continue
            most = MOST * zeros[b] / counts[b]
            mean, before = min(losses[b] / counts[b], most), min(self.measured[b], most)
            weight = 1.0 if math.isnan(before) else counts[b] / (counts[b] + MEMORY)
            now = self.measured[b] = mean if math.isnan(before) else before + weight * (mean - before)
            reached = self.reached[b]
            if math.isnan(reached) or now < reached:
                self.reached[b] = now
            elif self.evidence == 0.0:
                self.reached[b] += RISE * (now - reached)

    def _worst(self) -> int | None:
        excess = self.trouble[6:]
        return max(range(self.levels), key=lambda b: excess[b]) if self.levels > 1 else None

    def _not_finite(self, step: int) -> Collapse | None:
        if self.collapsed:
            return None
        began = self.began if self.evidence > 0 else step - 1
        self.collapsed, self.evidence, self.began = True, self.bar, began
        self.trouble = self.trouble or [0.0] * (6 + self.levels)
        level = self.reached[0] if self.levels == 1 else math.nan
        return Collapse(step, began, math.nan, level, self.zero)


def _usual(values: Sequence[float]) -> float:
    """The median; the lower quartile where a network starts far above the loss of zero and is there soon."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    quartile, median = ordered[len(ordered) // 4], ordered[len(ordered) // 2]
    return median if median < 3 * quartile else quartile


def last_good(steps: Iterable[int], began: int) -> int | None:
    """Of steps with a saved state: the one to go back to after a trouble that began at step `began`."""
    until = [step for step in steps if step <= began]
    return max((step for step in until if step <= began - MARGIN), default=min(until, default=None))


# What left first

LEFT = 2.0
"""A block or skip has left its level when it is larger or smaller than that by this factor."""

Readings = Sequence[tuple[int, Mapping[str, float]]]
"""(step, sizes by name), in the order of the steps."""


def first_to_leave(readings: Readings, calm: int) -> dict[str, Any] | None:
    """Against the last reading until step `calm`: the first one that changed by LEFT; of several, the one furthest."""
    before = [sizes for step, sizes in readings if step <= calm] or [sizes for _, sizes in readings[:1]]
    for step, sizes in readings:
        if step <= calm or not before:
            continue
        level = before[-1]
        changes = {name: _change(size, level.get(name, 0.0)) for name, size in sizes.items()}
        where = max(changes, key=lambda name: changes[name], default=None)
        if where is not None and changes[where] > math.log(LEFT):
            factor = sizes[where] / level[where] if level.get(where) else math.inf
            return {"where": where, "step": step, "factor": float(f"{factor:.4g}") if math.isfinite(factor) else None}
    return None


def _change(size: float, level: float) -> float:
    """|log(size / level)|; a size that is not finite has left furthest."""
    if not math.isfinite(size):
        return math.inf
    return abs(math.log(size / level)) if size > 0 and level > 0 else 0.0
