"""What a comparison records besides the trainer's own metrics: the readings of a stability monitor."""

import inspect
from typing import Self

import torch
from torch import Tensor

from ..data import to_float
from ..diffusion import NoiseProcess
from ..stability import Alarm, StabilityMonitor
from ..training import TrainConfig, TrainState
from ..training.data_source import load_images
from ..training.randomness import generator

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
    """Held-out images with fixed noise at times spread evenly: the same for every method of one seed."""
    device = state.accelerator.device
    data, held_out = load_images(config, lambda _: None)
    source = held_out or data
    batch = source.fetch(torch.arange(min(PROBE, len(source))))
    x0, process = to_float(batch.images), NoiseProcess(config.diffusion.schedule)
    t = process.times((torch.arange(len(x0)) + 0.5) / len(x0))
    noise = torch.randn(x0.shape, generator=generator(config.seed, "probe"))
    first, second, *_ = inspect.signature(state.bare.forward).parameters
    arguments = {first: process.add_noise(x0, noise, t), second: t}
    label = state.bare_network.label_argument
    if config.diffusion.condition == "class" and batch.labels is not None and label is not None:
        arguments[label] = batch.labels
    return {name: value.to(device) for name, value in arguments.items()}


def _say(alarm: Alarm) -> None:
    print(f"alarm at {alarm}", flush=True)
