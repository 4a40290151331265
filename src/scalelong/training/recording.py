"""The record of a run: metrics, and looks at the averaged model (held-out loss, sample grids, scores).

Metrics go to `metrics.jsonl`, to the trackers of accelerate (TensorBoard, Weights & Biases, ...) and to the screen;
sample grids to every tracker that shows images. Training does not notice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..config import TrainConfig, flatten, to_dict
from ..console import EVERY, Progress, duration
from ..data import ImageData
from ..diffusion import (
    Autoencoder,
    ImageMaker,
    InputMaker,
    Request,
    SampleSettings,
    by_level,
    held_out_losses,
    prompted_grid,
)
from ..errors import require
from ..evaluation import Scorer
from ..files import write_text
from ..models import evaluating
from ..noise import widest_float
from ..randomness import derived_seed, global_state, restore_global_state
from ..runs import RunData, RunFolder, save_png
from ..stability import log_picture, send_alert
from .optimizers import base_rate
from .state import TrainState

PROJECT = "scalelong"
"""The project of all runs, for trackers that have projects. A run is known there by the name of its folder."""

TENSORBOARD = "tensorboard"
"""Both the tracker and its folder in the run folder, which accelerate takes for the name of the project."""

MLFLOW = "mlflow"

PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
"""By which their users choose another project."""


class MetricsRecorder:
    """Writes metrics and grids to all places at once.

    `sums` are those since the last line of metrics, on the device: steps, losses, gradient norms, and the largest
    norm. They are part of a checkpoint, so that a resumed run records the same numbers.
    """

    def __init__(self, config: TrainConfig, run: RunFolder, accelerator: Any, progress: TrainingProgress) -> None:
        self.config, self.run, self.accelerator, self.progress = config, run, accelerator, progress
        self.sums = torch.zeros(4, dtype=widest_float(accelerator.device.type), device=accelerator.device)
        self.begin_at(0)
        known = {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
        missing = sorted(set(config.logging.trackers) - known)
        require(not missing, f"the tracker {', '.join(missing)} is unknown or not installed: choose other `trackers`")

    def open_trackers(self, step: int) -> None:
        """Cut off what TensorBoard shows after this step. The others know the run by the name of its folder, and by
        an id that is kept there: a run that continues is the same run in them."""
        accelerator, trackers = self.accelerator, []
        name, main = self.run.path.resolve().name, accelerator.is_main_process
        wanted = list(accelerator.log_with)
        # One by one, because accelerate gives all trackers of a call the same project. It starts those of earlier calls
        # again, so that they are put aside.
        for each in wanted:
            kind, options = str(getattr(each, "value", each)), {}
            settings = {key: str(value) for key, value in flatten(to_dict(self.config)).items()}
            project = os.environ.get(PROJECT_VARIABLES.get(kind, ""), "") or PROJECT
            if kind == TENSORBOARD:
                project, settings, options = TENSORBOARD, {}, {"purge_step": step + 1}
            elif kind == "wandb":
                options = {"name": name} | ({"id": self.run.tracker_id(), "resume": "allow"} if main else {})
            elif kind == "trackio":
                # The name is what trackio knows a run by.
                options = {"name": f"{name}-{self.run.tracker_id()[:6]}" if main else name, "resume": "allow"}
            elif kind == MLFLOW:
                known = self.run.mlflow_id() if main else None
                # The parameters of a run cannot change there, and a run that continues may have more steps.
                settings, options = ({}, {"run_id": known}) if known else (settings, {"run_name": name})
            accelerator.log_with, accelerator.trackers = [each], []
            accelerator.init_trackers(project, config=settings or None, init_kwargs={kind: options})
            if main and "run_name" in options:
                self.run.mlflow_id(accelerator.trackers[0].tracker.info.run_id)
            trackers += accelerator.trackers
        accelerator.log_with, accelerator.trackers = wanted, trackers

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """The numbers of a step. Nothing waits for the device."""
        self.sums[:3] += torch.stack([torch.ones_like(loss), loss, norm]).to(self.sums.dtype)
        self.sums[3] = torch.maximum(self.sums[3], norm.to(self.sums.dtype))

    def begin_at(self, step: int) -> None:
        """Count time and steps from here on."""
        self._since, self._step = time.perf_counter(), step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work that does not count as training: samples, scores, checkpoints."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - before

    def record(self, state: TrainState, epoch: float) -> dict[str, Any]:
        """Write the means since the last line, which are given back for the line of progress."""
        seconds, steps = time.perf_counter() - self._since, state.step - self._step
        self.begin_at(state.step)
        state.seconds += seconds
        count, loss, norm, largest = self.sums.tolist()
        self.sums = torch.zeros_like(self.sums)
        metrics = {
            "step": state.step,
            "epoch": epoch,
            "loss": loss / count,
            "gradient_norm": norm / count,
            "gradient_norm_max": largest,
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

    def write(self, step: int, values: dict[str, float] | None) -> None:
        if not values:
            return
        if self.accelerator.is_main_process:
            self.run.append_metrics({"step": step, **values})
        for tracker in self.accelerator.trackers:
            # MLflow's folders cannot hold gradient_norm and gradient_norm/middle side by side.
            between = "." if tracker.name == MLFLOW else "/"
            named = {name.replace("/", between): value for name, value in values.items() if name != "step"}
            tracker.log(named, step=step)

    def images(self, step: int, grid: Tensor) -> None:
        """A sample grid, uint8 (C, H, W), for every tracker that shows images. Latents show their first channel."""
        if not self.accelerator.is_main_process:
            return
        shown = grid if grid.shape[0] in (1, 3) else grid[:1]
        for tracker in self.accelerator.trackers:
            if not log_picture(tracker, step, "samples", shown) and hasattr(tracker, "log_images"):
                array = shown.permute(1, 2, 0).numpy()
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


class TrainingProgress(Progress):
    """The progress of a training run: a bar with the loss in a terminal, a line per record elsewhere.

    The time left is that of the steps so far, with all that came between them: samples, held-out losses, checkpoints.
    """

    def __init__(
        self, steps: int, enabled: bool, *, unit: str = "ε", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("step", steps, enabled=enabled)
        self.unit = unit
        """What the network predicts, and so the unit of the training loss."""
        self.steps, self.clock = steps, clock
        self.errors: Mapping[str, float] = {}
        """The newest errors of the averaged model in ε, of images that are trained on and of those held out."""
        self.begin_at(0)

    def begin_at(self, step: int) -> None:
        """Count from a step on: a run that continues did not do those before it now."""
        self._first, self._began = step, self.clock()
        self._shown = self._began

    def tick(self, step: int) -> None:
        """After every step: where steps are slow, a line between two records."""
        if self.clock() - self._shown >= EVERY:
            self._show(step)

    def record(self, metrics: Mapping[str, float]) -> None:
        speed = metrics["images_per_second"]
        parts = [f"loss ({self.unit}) {metrics['loss']:.4f}"]
        if self.errors:  # one unit for both, so that their difference means something
            seen, apart = self.errors["trained_on_loss"], self.errors["held_out_loss"]
            parts += [f"in ε: training {seen:.4f}, held-out {apart:.4f}"]
        parts += [f"gradient {metrics['gradient_norm']:.3g}"]
        parts += [f"{speed:.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s"]
        self._show(int(metrics["step"]), parts)

    def _show(self, step: int, parts: Sequence[str] = ()) -> None:
        self._shown = self.clock()
        seconds = (self._shown - self._began) / max(1, step - self._first)
        note = "  ".join([*parts, f"{duration((self.steps - step) * seconds)} left"])
        self.show(step, note)

    def text(self, done: int, note: str = "") -> str:
        return f"step {done}/{self.steps}  {note}"


# Looks at the averaged model


@dataclass
class Inspector:
    """Looks at the averaged model: held-out loss, sample grids, scores. Every process does the same, because a sharded
    model needs all of them; the main one writes."""

    config: TrainConfig
    run: RunFolder
    state: TrainState
    data: RunData
    inputs: InputMaker

    def held_out_loss(self) -> dict[str, float] | None:
        if self.data.held_out is None:
            return None
        with self._averaged():
            network, prediction = self.state.bare_network, self.config.diffusion.prediction
            losses, levels = held_out_losses(network, self.inputs, prediction, self.data.held_out)
            seen, _ = held_out_losses(network, self.inputs, prediction, self._trained_on)
        named = {f"held_out_loss/{name}": value for name, value in by_level(losses, levels).items()}
        return {"held_out_loss": float(losses.mean()), "trained_on_loss": float(seen.mean()), **named}

    @cached_property
    def _trained_on(self) -> ImageData:
        """As many images that are trained on: their loss has the same unit as that of those held out."""
        images, count = self.data.train, len(self.data.held_out or ())
        return images.split(count, self.config.seed)[1] if count < len(images) else images

    def sample_grid(self) -> Tensor:
        """Samples with the same seeds every time, so that grids of different steps can be compared."""
        options, prompts = self.config.logging, self._prompts()
        wanted = [
            Request(derived_seed(self.config.seed, "samples", i), prompts[i] if prompts else None)
            for i in range(options.samples)
        ]
        settings = SampleSettings(sampler=options.sampler, steps=options.sampler_steps)
        with self._averaged():
            images = self._maker.all(wanted, settings, device=self.state.accelerator.device)
        grid = prompted_grid(images, [request.prompt for request in wanted])
        if self.state.accelerator.is_main_process:
            save_png(self.run.samples / f"step-{self.state.step:08d}.png", grid)
        return grid

    def scores(self) -> dict[str, float]:
        """Fréchet distance, precision and recall; how they are made is written next to the metrics."""
        with self._averaged():
            scores = self._scorer.score(self._maker, self.state.step, self.state.accelerator.device)
        if self.state.accelerator.is_main_process:
            write_text(self.run.path / "scores_protocol.json", json.dumps(asdict(scores.protocol), indent=2))
        named: dict[str, float] = {}
        for name, score in scores.values.items():
            named |= {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high}
        return named

    def _prompts(self) -> list[str]:
        """The classes in turn, or captions evenly spread over the data."""
        count, classes = self.config.logging.samples, self.data.shape.classes or ()
        if self.config.diffusion.condition == "class":
            return [classes[i % len(classes)] for i in range(count)]
        captions = self.data.train.annotations.captions
        if self.config.diffusion.condition == "text" and captions:
            return [captions[i * len(captions) // count] for i in range(count)]
        return []

    @cached_property
    def _maker(self) -> ImageMaker:
        folder = self.config.images.autoencoder
        return ImageMaker(
            model=self.state.bare,
            network=self.state.bare_network,
            process=self.inputs.process,
            prediction=self.config.diffusion.prediction,
            shape=self.data.shape.image,
            conditions=self.inputs.conditions,
            autoencoder=None if folder is None else Autoencoder(folder),
        )

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.config, self.data.images)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Averaged weights in eval mode. Afterwards weights, modes and all global random numbers are as before."""
        random = global_state()
        try:
            with evaluating(self.state.bare), self.state.ema.applied():
                yield
        finally:
            restore_global_state(random)
