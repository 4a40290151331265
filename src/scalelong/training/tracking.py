"""What a run records between two lines of metrics, without waiting for the device."""

from typing import Any

import torch
from torch import Tensor

from ..console import StopWatch, TrainingProgress
from ..errors import InvalidConfigError
from ..runs.config import TrainConfig, flatten, to_dict
from ..runs.folder import RunFolder
from .state import TrainState


class Window:
    """Sums of loss and gradient norm. They are part of a checkpoint, so that a resumed run records the same numbers."""

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


# Where metrics go: metrics.jsonl, the trackers of accelerate, and the screen.


class Recorder:
    def __init__(self, config: TrainConfig, run: RunFolder, accelerator: Any, progress: TrainingProgress) -> None:
        self.config, self.run, self.accelerator, self.progress = config, run, accelerator, progress
        missing = set(config.logging.trackers) - {str(getattr(kind, "value", kind)) for kind in accelerator.log_with}
        if missing:
            raise InvalidConfigError(f"the tracker {', '.join(sorted(missing))} is unknown or not installed")

    def start(self, step: int) -> None:
        """Open the trackers; what they show after this step is cut off."""
        trackers = self.config.logging.trackers
        if not trackers:
            return
        options = {"tensorboard": {"purge_step": step + 1}} if "tensorboard" in trackers else {}
        settings = None
        if set(trackers) != {"tensorboard"}:
            settings = {name: str(value) for name, value in flatten(to_dict(self.config)).items()}
        self.accelerator.init_trackers("tensorboard", config=settings, init_kwargs=options)

    def record(self, state: TrainState, window: Window, watch: StopWatch, epoch: float) -> None:
        """Close the window and write its means."""
        seconds, steps = watch.lap(state.step)
        state.seconds += seconds
        metrics = {
            "step": state.step,
            "epoch": epoch,
            **window.close(),
            "learning_rate": state.optimizer.param_groups[0]["lr"],
            "ema_distance": float(state.ema.distance()),
            "seconds": state.seconds,
            "seconds_per_step": seconds / steps,
            "images_per_second": self.config.batch_size * steps / seconds,
        }
        if state.accelerator.scaler is not None:
            metrics["loss_scale"] = state.accelerator.scaler.get_scale()
        self.write(state.step, metrics)
        self.progress.record(metrics)

    def write(self, step: int, values: dict[str, float] | None) -> None:
        if not values:
            return
        if self.accelerator.is_main_process:
            self.run.append_metrics({"step": step, **values})
        self.accelerator.log({name: value for name, value in values.items() if name != "step"}, step=step)

    def images(self, step: int, grid: Tensor) -> None:
        """A sample grid for the trackers that show images."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard" and self.accelerator.is_main_process:
                tracker.writer.add_image("samples", grid if grid.shape[0] in (1, 3) else grid[:1], global_step=step)

    def close(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()
