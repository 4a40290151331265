"""What a run records: sums between two lines of metrics, and where the lines go.

Metrics go to `metrics.jsonl`, to the trackers of accelerate (TensorBoard, Weights & Biases, ...) and to the screen;
sample grids to every tracker that shows images.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from torch import Tensor

from ..config import TrainConfig, flatten, to_dict
from ..console import EVERY, Progress, duration
from ..errors import InvalidConfigError
from ..runs import RunFolder
from ..stability import log_picture, send_alert
from .state import TrainState, base_rate

PROJECT = "scalelong"
"""The project of all runs, for trackers that have projects. A run is known there by the name of its folder."""

TENSORBOARD = "tensorboard"
"""Both the tracker and its folder in the run folder, which accelerate takes for the name of the project."""

MLFLOW = "mlflow"

PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
"""By which their users choose another project."""


class Window:
    """Sums of loss and gradient norm, on the device. They are part of a checkpoint, so that a resumed run records the
    same numbers."""

    def __init__(self, device: torch.device) -> None:
        self.kind = torch.float32 if device.type == "mps" else torch.float64
        self.device = device
        self.load([0.0, 0.0, 0.0, 0.0])

    def load(self, values: list[float]) -> None:
        """Steps, sum of losses, sum and maximum of gradient norms."""
        self.values = torch.tensor(values, dtype=self.kind, device=self.device)

    def save(self) -> list[float]:
        return self.values.tolist()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        loss, norm = loss.to(self.kind), norm.to(self.kind)
        one = torch.ones((), dtype=self.kind, device=self.device)
        self.values[:3] += torch.stack([one, loss, norm])
        self.values[3] = torch.maximum(self.values[3], norm)

    def close(self) -> dict[str, Any]:
        """The means, and a fresh start."""
        steps, loss, norm, largest = self.save()
        self.load([0.0, 0.0, 0.0, 0.0])
        return {"loss": loss / steps, "gradient_norm": norm / steps, "gradient_norm_max": largest}


class Recorder:
    """Writes metrics and grids to all places at once."""

    def __init__(self, config: TrainConfig, run: RunFolder, accelerator: Any, progress: TrainingProgress) -> None:
        self.config, self.run, self.accelerator, self.progress = config, run, accelerator, progress
        missing = set(config.logging.trackers) - {_name(kind) for kind in accelerator.log_with}
        if missing:
            raise InvalidConfigError(
                f"the tracker {', '.join(sorted(missing))} is unknown or not installed: choose others with --trackers"
            )

    def start(self, step: int) -> None:
        """Open the trackers; what TensorBoard shows after this step is cut off. The others know the run by the name
        of its folder, and by an id that is kept there: a run that continues is the same run in them."""
        wanted, trackers = list(self.accelerator.log_with), []
        # One by one, because accelerate gives all trackers of a call the same project. It starts those of earlier calls
        # again, so that they are put aside.
        for kind in wanted:
            self.accelerator.log_with, self.accelerator.trackers = [kind], []
            if _name(kind) == TENSORBOARD:
                self.accelerator.init_trackers(TENSORBOARD, init_kwargs={TENSORBOARD: {"purge_step": step + 1}})
            else:
                self._open(_name(kind))
            trackers += self.accelerator.trackers
        self.accelerator.log_with, self.accelerator.trackers = wanted, trackers

    def _open(self, kind: str) -> None:
        name, main = self.run.path.resolve().name, self.accelerator.is_main_process
        settings = {key: str(value) for key, value in flatten(to_dict(self.config)).items()}
        options: dict[str, Any] = {}
        if kind == "wandb":
            options = {"name": name} | ({"id": self.run.tracker_id(), "resume": "allow"} if main else {})
        elif kind == "trackio":
            # The name is what trackio knows a run by.
            options = {"name": f"{name}-{self.run.tracker_id()[:6]}" if main else name, "resume": "allow"}
        elif kind == MLFLOW:
            known = self.run.mlflow_id() if main else None
            # The parameters of a run cannot change there, and a run that continues may have more steps.
            settings, options = ({}, {"run_id": known}) if known else (settings, {"run_name": name})
        project = os.environ.get(PROJECT_VARIABLES.get(kind, ""), "") or PROJECT
        self.accelerator.init_trackers(project, config=settings or None, init_kwargs={kind: options})
        if kind == MLFLOW and main and "run_id" not in options:
            self.run.keep_mlflow_id(self.accelerator.trackers[0].tracker.info.run_id)

    def record(self, state: TrainState, window: Window, watch: StopWatch, epoch: float) -> dict[str, Any]:
        """Close the window and write its means, which are given back for the line of progress."""
        seconds, steps = watch.lap(state.step)
        state.seconds += seconds
        metrics = {
            "step": state.step,
            "epoch": epoch,
            **window.close(),
            "learning_rate": base_rate(state.optimizer),
            "ema_distance": float(state.ema.distance()),
            "seconds": state.seconds,
            "seconds_per_step": seconds / steps,
            "images_per_second": self.config.batch_size * steps / seconds,
        }
        if state.accelerator.scaler is not None:
            metrics["loss_scale"] = state.accelerator.scaler.get_scale()
        self.write(state.step, metrics)
        return metrics

    def held_out(self, step: int, values: dict[str, float] | None) -> None:
        """The held-out loss, which the lines of progress show from then on."""
        if values:
            self.progress.held_out = values["held_out_loss"]
        self.write(step, values)

    def write(self, step: int, values: dict[str, float] | None) -> None:
        if not values:
            return
        if self.accelerator.is_main_process:
            self.run.append_metrics({"step": step, **values})
        named = {name: value for name, value in values.items() if name != "step"}
        for tracker in self.accelerator.trackers:
            # MLflow's folders cannot hold gradient_norm and gradient_norm/middle side by side.
            between = "." if tracker.name == MLFLOW else "/"
            tracker.log({name.replace("/", between): value for name, value in named.items()}, step=step)

    def images(self, step: int, grid: Tensor) -> None:
        """A sample grid, uint8 (C, H, W), for every tracker that shows images. Latents show their first channel."""
        if not self.accelerator.is_main_process:
            return
        shown = grid if grid.shape[0] in (1, 3) else grid[:1]
        array = shown.permute(1, 2, 0).numpy()
        for tracker in self.accelerator.trackers:
            if log_picture(tracker, step, "samples", shown):
                continue
            if hasattr(tracker, "log_images"):
                tracker.log_images({"samples": array if tracker.name in _ONE_IMAGE else [array]}, step=step)

    def alert(self, step: int, kind: str, text: str) -> None:
        """An alarm of the monitor, a collapse, numbers that are not finite: an alert where the tracker has alerts."""
        if self.accelerator.is_main_process:
            for tracker in self.accelerator.trackers:
                send_alert(tracker, step, kind, text)

    def close(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()


_ONE_IMAGE = ("aim", "clearml")
"""Trackers of accelerate whose `log_images` takes an image per name, where the others take a list of images."""


def _name(kind: Any) -> str:
    return str(getattr(kind, "value", kind))


# What is shown while a run trains


class TrainingProgress(Progress):
    """The progress of a training run: a bar with the loss in a terminal, a line per record elsewhere.

    The time left is that of the steps so far, with all that came between them: samples, held-out losses, checkpoints.
    """

    def __init__(
        self,
        steps: int,
        enabled: bool,
        *,
        unit: str = "ε",
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__("step", steps, enabled=enabled, stream=stream)
        self.unit = unit
        """What the network predicts, and so the unit of the training loss. Held-out losses are errors in ε."""
        self.steps, self.clock = steps, clock
        self.held_out: float | None = None
        """The newest held-out loss."""
        self.start(0)

    def start(self, step: int) -> None:
        """Begin to count at a step: a run that continues did not do those before it now."""
        self._first, self._began = step, self.clock()
        self._said = self._began

    def tick(self, step: int) -> None:
        """After every step: where steps are slow, a line between two records."""
        if self.clock() - self._said < EVERY:
            return
        self._said = self.clock()
        if self.live:
            self._draw(step, self._left(step))
        elif self.enabled:
            self._print(self.text(step, self._left(step)))

    def record(self, metrics: Mapping[str, float]) -> None:
        self._said = self.clock()
        step = int(metrics["step"])
        if self.live:
            self._draw(step, self._note(metrics))
        elif self.enabled:
            self._print(self.text(step, self._note(metrics)))

    def text(self, done: int, note: str = "") -> str:
        return f"step {done}/{self.steps}  {note}"

    def _note(self, metrics: Mapping[str, float]) -> str:
        speed = metrics["images_per_second"]
        parts = [
            f"loss ({self.unit}) {metrics['loss']:.4f}",
            *([f"held-out (ε) {self.held_out:.4f}"] if self.held_out is not None else []),
            f"gradient {metrics['gradient_norm']:.3g}",
            f"{speed:.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s",
            self._left(int(metrics["step"])),
        ]
        return "  ".join(parts)

    def _left(self, step: int) -> str:
        seconds = (self.clock() - self._began) / max(1, step - self._first)
        return f"{duration((self.steps - step) * seconds)} left"


class StopWatch:
    """Seconds of training, without what is done in between (saving, sampling)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.start(0)

    def start(self, step: int) -> None:
        self._since, self._step = self.clock(), step

    def lap(self, step: int) -> tuple[float, int]:
        """Seconds and steps since the start or the last lap."""
        seconds, steps = self.clock() - self._since, step - self._step
        self.start(step)
        return seconds, steps

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = self.clock()
        try:
            yield
        finally:
            self._since += self.clock() - before
