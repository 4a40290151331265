"""What every run watches about itself: the readings of a stability monitor, and a loss that collapses.

Readings (κ, sizes of blocks and skips on a fixed probe batch, gradients, updates) go into metrics.jsonl, so that a
report of any run has them; alarms, spikes and collapses into alarms.jsonl, and onto the screen. Training does not
notice: everything is read between steps, in eval mode, and random states are left alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
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
        say: Callable[[str], None],
        alert: Callable[[int, str, str], None] = lambda *_: None,
    ) -> None:
        """`alert` gets (step, kind, text) of what is written into alarms.jsonl, for the trackers."""
        self.run, self.state, self.say, self.alert = run, state, say, alert
        self.losses = LevelLosses()
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
            self.say(f"no stability monitor for this network: {type(error).__name__}: {str(error).partition(';')[0]}")
            return None

    def begin_at(self, step: int, *, act: bool) -> None:
        """What was recorded after this step is forgotten, as the metrics are. The state knows of the losses before.

        `act`: a collapse is to be acted upon. One that an earlier start of the run has ignored is found again.
        """
        path = self.run.path / "alarms.jsonl"
        if path.exists():
            write_json_lines(path, [line for line in read_json_lines(path) if _is_up_to(line, step)])
        self.losses.clear()
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
        self.say(f"alarm at {alarm}")

    def _write(self, step: int, kind: str, message: str) -> None:
        if self.state.accelerator.is_main_process:
            append_json_line(self.run.path / "alarms.jsonl", {"step": step, "kind": kind, "message": message})
            self.alert(step, kind, message)

    # Collapses. All processes have the same losses, so that they decide together

    def collapse(self) -> Collapse | None:
        """Judge the losses since the last call, whose numbers are now waited for."""
        found = None
        for step, counts, losses, zeros in self.losses.read():
            event = self.detector.add_levels(step, counts, losses, zeros)
            if isinstance(event, Spike):
                self._write(step, "spike", f"{event}{_at_level(event.noise_level)}")
            elif event is not None and found is None:
                found = event
        if self.detector.evidence > self.detector.bar / 4 and not self.detector.collapsed:
            self._look(LOOK_EVERY)
        return None if found is None else self._explained(found)

    def trouble_before(self, bad: int) -> int | None:
        """Where a trouble began that ended in step `bad`, whose numbers are not finite; None if the loss was well."""
        for step, counts, losses, zeros in self.losses.read():
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

    def tell(self, found: Collapse, rate: float) -> str:
        """Say it, write it down, and give the diagnosis."""
        plan = None if self.monitor is None else self.monitor.plan
        text = diagnosis(found, rate, has_bare_merges(self.state.bare, plan), watched=self.monitor is not None)
        self._write(found.step, "collapse", text)
        self.say(f"\nCOLLAPSED at step {found.step}: {text}\n")
        return text


def diagnosis(found: Collapse, rate: float, bare: bool | None, *, watched: bool = True) -> str:
    """What happened, what left first, and what to do. `bare`: some merges have no norm."""
    left = describe_left_first(found.left_first) if watched else "What left first is not known: nothing was read."
    return (
        f"{found}{_at_level(found.noise_level)}. {left} The learning rate was {rate:g}. Collapsed networks seldom come "
        f"back. {what_to_do(bare, rate)}"
    )


def _at_level(level: int | None) -> str:
    return "" if level is None else f", most of all at a log-SNR of {level_names()[level]}"


def _is_up_to(line: Mapping[str, Any], step: int) -> bool:
    """Others may have written into the file."""
    return isinstance(line.get("step"), int | float) and line["step"] <= step


class LevelLosses:
    """Sums of losses by noise level, step by step. They wait on the device until somebody asks."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor]] = []

    def clear(self) -> None:
        self._waiting = []

    def add(self, step: int, sums: Tensor) -> None:
        """Of the step that makes it `step` steps."""
        self._waiting.append((step, sums))

    def read(self) -> list[tuple[int, list[float], list[float], list[float]]]:
        """(step, counts, sums of losses, sums of zero losses) of each step since the last call."""
        if not self._waiting:
            return []
        steps, sums = zip(*self._waiting, strict=True)
        self._waiting = []
        return [(step, *values) for step, values in zip(steps, torch.stack(sums).tolist(), strict=True)]


def sums_by_level(levels: Tensor, losses: Tensor, zeros: Tensor) -> Tensor:
    """(3, LEVELS): images, losses and zero losses of each noise level. A product, because it is deterministic."""
    places = F.one_hot(levels, LEVELS).to(losses.dtype)
    return torch.stack([torch.ones_like(losses), losses, zeros.to(losses.dtype)]) @ places
