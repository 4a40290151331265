"""What every run watches about itself: the readings of a stability monitor, and a loss that has collapsed.

Readings (κ, sizes of blocks and skips on a fixed probe batch, gradients, updates) go into metrics.jsonl, so that a
report of any run has them; alarms and collapses into alarms.jsonl, and onto the screen. Training does not notice:
everything is read between steps, in eval mode, and random states are left alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from ..files import append_json_line, read_json_lines, write_json_lines
from ..runs.folder import RunFolder, read_metrics
from ..skips import is_scaled
from ..stability import Alarm, StabilityMonitor
from ..stability.range import CollapseRule
from .state import TrainState

PROBE = 16
"""Images in the probe batch."""
LEFT_OUT = ("block_rms", "skip_rms")
"""Readings that are not recorded: those of the training batches, which differ from step to step."""


class RunMonitor:
    """The stability monitor of one run, from its first step to the end of the process."""

    def __init__(self, run: RunFolder, state: TrainState, every: int, say: Callable[[str], None]) -> None:
        self.run, self.state, self.say = run, state, say
        self.collapse = CollapseWatch(CollapseRule())
        self.monitor = self._monitor(every) if every else None

    def _monitor(self, every: int) -> StabilityMonitor | None:
        if any(isinstance(parameter, DTensor) for parameter in self.state.bare.parameters()):
            return None  # a sharded network cannot be looked at from one process
        batch = self.state.data.probe(PROBE, self.state.accelerator.device).arguments(self.state.bare)
        try:
            return StabilityMonitor(self.state.bare, every=every, probe_batch=batch, on_alarm=self._alarm)
        except Exception as error:  # a network without long skips, or one that cannot be traced: it trains all the same
            self.say(f"no stability monitor for this network: {type(error).__name__}: {str(error).partition(';')[0]}")
            return None

    def begin_at(self, step: int) -> None:
        """What was recorded after this step is forgotten, as the metrics are; a collapse is known from those before."""
        path = self.run.path / "alarms.jsonl"
        if path.exists():
            write_json_lines(path, [line for line in read_json_lines(path) if line["step"] <= step])
        self.collapse = CollapseWatch(CollapseRule())
        for line in read_metrics(self.run.path):
            self.collapse.add(line)
        if self.monitor is not None:
            self.monitor.begin_at(step)

    def after_step(self) -> dict[str, float] | None:
        """The reading, where one is due."""
        reading = self.monitor.step(step=self.state.step) if self.monitor is not None else None
        return reading and {name: value for name, value in reading.items() if not name.startswith(LEFT_OUT)}

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Look at a line of metrics: has the loss collapsed?"""
        found = self.collapse.add(metrics)
        if found is not None:
            text = found.advice(metrics["learning_rate"], scaled=is_scaled(self.state.bare))
            self._write(int(metrics["step"]), "collapse", text)
            self.say(f"\nCOLLAPSED at step {metrics['step']}: {text}\n")

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def _alarm(self, alarm: Alarm) -> None:
        self._write(alarm.step, alarm.kind, str(alarm))
        self.say(f"alarm at {alarm}")

    def _write(self, step: int, kind: str, message: str) -> None:
        if self.state.accelerator.is_main_process:
            append_json_line(self.run.path / "alarms.jsonl", {"step": step, "kind": kind, "message": message})


# A collapse that is finite: the loss goes far back up and stays there


@dataclass(frozen=True)
class Collapse:
    loss: float
    best: float
    best_step: int

    def advice(self, rate: float, *, scaled: bool) -> str:
        """What happened, and what to try. A model that is scaled is not told to scale."""
        start = "start_skips_(model, 'cs') before training" if scaled else "--scaling cs, or start_skips_(model, 'cs')"
        return (
            f"the loss is {self.loss:.3g}, and was {self.best:.3g} at step {self.best_step}. It is finite, and seldom "
            f"comes back. The learning rate is {rate:g}: try --lr {rate / 4:.2g}, a longer --warmup or --clip 1; what "
            f"keeps a deep network alive at this rate is how its long skips start: {start}"
        )


class CollapseWatch:
    """Follows the mean losses of a run's metrics by the rule that `scalelong range` counts survivors by.

    The reference, the loss of a network that knows nothing, is that of the first line. A collapse is reported once,
    and again after the loss has come back.
    """

    def __init__(self, rule: CollapseRule) -> None:
        self.rule = rule
        self.reference: float | None = None
        self.smoothed, self.best, self.best_step, self.step = 0.0, float("inf"), 0, 0
        self.collapsed = False

    def add(self, metrics: Mapping[str, Any]) -> Collapse | None:
        """Take a line of metrics; those without a mean loss are of other things."""
        if "loss" not in metrics or "learning_rate" not in metrics:
            return None
        step, loss = int(metrics["step"]), float(metrics["loss"])
        if self.reference is None:
            self.reference = self.smoothed = loss
        # Smoothing is per step, and a line is the mean of several.
        kept = self.rule.smoothing ** (step - self.step)
        self.smoothed, self.step = kept * self.smoothed + (1 - kept) * loss, step
        if self.smoothed < self.best:
            self.best, self.best_step = self.smoothed, step
        before = self.collapsed
        high = self.smoothed > self.rule.share * self.reference
        self.collapsed = high and self.smoothed > self.rule.factor * self.best
        return Collapse(self.smoothed, self.best, self.best_step) if self.collapsed and not before else None
