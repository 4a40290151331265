"""What a comparison records besides the trainer's own metrics: the readings of a stability monitor."""

import inspect
from typing import Self

from torch import Tensor

from ..runs.config import TrainConfig
from ..stability import Alarm, StabilityMonitor
from ..training import TrainState
from .probing import noisy_probe

PROBE = 16
"""Images in the probe batch."""


class Recording:
    """A hook for `train`. What it returns goes into metrics.jsonl, so that resuming a run keeps it in order."""

    def __init__(self, every: int, config: TrainConfig) -> None:
        self.every, self.config = every, config
        self.monitor: StabilityMonitor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def __call__(self, state: TrainState) -> dict[str, float] | None:
        if self.monitor is None:
            # Made after the first step of this process: the state that is given here is complete and on its device.
            batch = probe_batch(self.config, state)
            self.monitor = StabilityMonitor(state.bare, every=self.every, probe_batch=batch, on_alarm=_say)
            self.monitor.steps = state.step - 1
        reading = self.monitor.step(step=state.step)
        if reading is None:
            return None
        return {name: value for name, value in reading.items() if not name.startswith(("block_rms", "skip_rms"))}


def probe_batch(config: TrainConfig, state: TrainState) -> dict[str, Tensor]:
    """The arguments of the model for the probe batch, by name."""
    x, t, labels = noisy_probe(config, PROBE)
    first, second, *_ = inspect.signature(state.bare.forward).parameters
    arguments, label = {first: x, second: t}, state.bare_network.label_argument
    if labels is not None and label is not None:
        arguments[label] = labels
    return {name: value.to(state.accelerator.device) for name, value in arguments.items()}


def _say(alarm: Alarm) -> None:
    print(f"alarm at {alarm}", flush=True)
