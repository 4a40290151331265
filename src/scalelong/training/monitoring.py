"""A run watches itself: the readings of a stability monitor, and a loss that collapses.

Readings (κ, sizes of blocks and skips on a fixed probe batch, gradients, updates) go into metrics.jsonl, so that a
report of any run has them; alarms, spikes and collapses into alarms.jsonl, and onto the screen. Training does not
notice: everything is read between steps, in eval mode, and random states are left alone.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..files import append_json_line, read_json_lines, write_json_lines
from ..noise import LEVELS, level_names
from ..runs import RunFolder, read_metrics
from ..stability import (
    MARGIN,
    Alarm,
    Collapse,
    CollapseDetector,
    Spike,
    StabilityMonitor,
    apart,
    describe_left_first,
    first_to_leave,
    has_bare_merges,
    measure,
    what_to_do,
)
from .state import TrainState

logger = logging.getLogger(__name__)

PROBE = 16
"""Images in the probe batch."""
LEFT_OUT = ("block_rms", "skip_rms", "similarity")
"""Readings that are not recorded: those of the training batches, which differ from step to step."""
LOOK_EVERY = 5
"""Steps between looks at the sizes of blocks and skips while the loss is above its level."""
SIZES = {"probe_block_rms/": "block ", "probe_skip_rms/": "skip ", "probe_similarity/": "tokens of "}
"""Readings by which blocks and skips are told apart, and what they are called in words."""


class RunMonitor:
    """The stability monitor of one run, from its first step to the end of the process."""

    def __init__(
        self,
        run: RunFolder,
        state: TrainState,
        every: int,
        alert: Callable[[int, str, str], None] = lambda *_: None,
    ) -> None:
        """`alert` gets (step, kind, text) of what is written into alarms.jsonl, for the trackers."""
        self.run, self.state, self.alert = run, state, alert
        self._waiting: list[tuple[int, Tensor]] = []
        self.detector = CollapseDetector(levels=LEVELS)
        self.monitor = self._monitor(every) if every else None
        self.looks: list[tuple[int, dict[str, float]]] = []

    def _monitor(self, every: int) -> StabilityMonitor | None:
        if any(isinstance(parameter, DTensor) for parameter in self.state.bare.parameters()):
            return None  # a sharded network cannot be looked at from one process
        batch = self.state.data.probe(PROBE, self.state.accelerator.device).arguments(self.state.bare)
        try:
            return StabilityMonitor(self.state.bare, every=every, probe_batch=batch, on_alarm=self._alarm)
        except Exception as error:  # a network without long skips, or one that cannot be traced: it trains all the same
            logger.info(
                f"no stability monitor for this network: {type(error).__name__}: {str(error).partition(';')[0]}"
            )
            return None

    def begin_at(self, step: int, *, act: bool) -> None:
        """Forget what was recorded after this step, as the metrics do. The state knows of the losses before.

        `act`: a collapse is to be acted upon. One that an earlier start of the run has ignored is found again.
        """
        path = self.run.path / "alarms.jsonl"
        if path.exists():
            # Others may have written into the file.
            kept = [line for line in read_json_lines(path) if isinstance(line.get("step"), int | float)]
            write_json_lines(path, [line for line in kept if line["step"] <= step])
        self._waiting = []
        self.detector.load_state_dict(self.state.collapse)
        self.detector.collapsed = self.detector.collapsed and not act
        self.looks = []
        if self.monitor is not None:
            self.monitor.begin_at(step)

    def after_step(self) -> dict[str, float] | None:
        """The reading, where one is due."""
        reading = self.monitor.step(step=self.state.step) if self.monitor is not None else None
        return reading and {name: value for name, value in reading.items() if not name.startswith(LEFT_OUT)}

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def _alarm(self, alarm: Alarm) -> None:
        self._write(alarm.step, alarm.kind, str(alarm))
        logger.info(f"alarm at {alarm}")

    def _write(self, step: int, kind: str, message: str) -> None:
        if self.state.accelerator.is_main_process:
            append_json_line(self.run.path / "alarms.jsonl", {"step": step, "kind": kind, "message": message})
            self.alert(step, kind, message)

    # Collapses. All processes have the same losses, so that they decide together

    def add(self, step: int, sums: Tensor) -> None:
        """The sums of losses by noise level of the step that makes it `step` steps. They wait on the device."""
        self._waiting.append((step, sums))

    def _read(self) -> list[tuple[int, list[float], list[float], list[float]]]:
        """(step, counts, sums of losses, sums of zero losses) of each step since the last call."""
        steps, self._waiting = self._waiting, []
        values = torch.stack([sums for _, sums in steps]).tolist() if steps else []
        return [(step, *rows) for (step, _), rows in zip(steps, values, strict=True)]

    def collapse(self) -> Collapse | None:
        """Judge the losses since the last call, whose numbers are now waited for."""
        found = None
        for step, counts, losses, zeros in self._read():
            event = self.detector.add_levels(step, counts, losses, zeros)
            if isinstance(event, Spike):
                self._write(step, "spike", f"{event}{_at_level(event.noise_level)}")
            elif event is not None and found is None:
                found = event
        if self.detector.evidence > self.detector.bar / 4 and not self.detector.collapsed:
            self._look(LOOK_EVERY)
        return None if found is None else self._explained(found)

    def trouble_before(self, bad: int) -> int | None:
        """The step at which a trouble began that ended in `bad`, which is not finite; None if the loss was well."""
        for step, counts, losses, zeros in self._read():
            if step <= bad:
                self.detector.add_levels(step, counts, losses, zeros)
        return self.detector.trouble_since

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; also where there is a size to compare later ones with."""
        self._look(1)
        return self.detector.state_dict()

    def _look(self, every: int) -> None:
        """The sizes of blocks and skips now, if the last ones are older than `every` steps."""
        monitor, step = self.monitor, self.state.step
        if monitor is None or monitor.probe_call is None or (self.looks and step - self.looks[-1][0] < every):
            return
        self.looks.append((step, measure(monitor.host, monitor.plan, *monitor.probe_call).sizes()))

    def _explained(self, found: Collapse) -> Collapse:
        """With what left first, by the readings in the metrics and those since the loss left its level."""
        self._look(1)
        readings = [*self.looks]
        for line in read_metrics(self.run.path):
            sizes = {
                f"{word}{name.removeprefix(prefix)}": apart(float(value)) if "similarity" in prefix else float(value)
                for prefix, word in SIZES.items()
                for name, value in line.items()
                if name.startswith(prefix) and value is not None
            }
            if sizes:
                readings.append((line["step"], sizes))
        ordered = sorted(readings, key=lambda entry: entry[0])
        return replace(found, left_first=first_to_leave(ordered, found.began - MARGIN))

    def explain(self, found: Collapse, rate: float) -> str:
        """Log it, write it down, and give the diagnosis."""
        bare = has_bare_merges(self.state.bare, None if self.monitor is None else self.monitor.plan)
        unknown = "What left first is not known: nothing was read."
        left = unknown if self.monitor is None else describe_left_first(found.left_first)
        text = (
            f"{found}{_at_level(found.noise_level)}. {left} The learning rate was {rate:g}. Collapsed networks seldom "
            f"come back. {what_to_do(bare, rate)}"
        )
        self._write(found.step, "collapse", text)
        logger.info(f"\nCOLLAPSED at step {found.step}: {text}\n")
        return text


def _at_level(level: int | None) -> str:
    return "" if level is None else f", most of all at a log-SNR of {level_names()[level]}"
