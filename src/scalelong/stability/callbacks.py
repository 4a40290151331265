"""The monitor for loops that others wrote: accelerate's (and so diffusers' training scripts), and Lightning."""

from typing import Any, Self

from torch import Tensor, nn

from .monitor import StabilityMonitor


class AccelerateMonitor:
    """For loops with accelerate, such as diffusers' `train_unconditional.py`. Two lines:

        monitor = AccelerateMonitor(accelerator, model, every=10)        # after accelerator.prepare(...)
        monitor.step(loss)                                               # after optimizer.step()

    Counts optimiser steps, not micro-batches; all processes read, the main one writes and logs to the trackers.
    """

    def __init__(self, accelerator: Any, model: nn.Module, **options: Any) -> None:
        if not accelerator.is_main_process:
            options |= {"path": None, "writers": (), "on_alarm": lambda _: None}
        self.accelerator = accelerator
        self.monitor = StabilityMonitor(model, **options)

    def step(self, loss: Tensor | float | None = None, *, step: int | None = None) -> dict[str, float] | None:
        if not self.accelerator.sync_gradients:
            return None
        reading = self.monitor.step(loss, step=step)
        if reading is not None:
            named = {f"stability/{name}": value for name, value in reading.items()}
            self.accelerator.log(named, step=self.monitor.steps)
        return reading

    def close(self) -> None:
        self.monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LightningMonitor:
    """The part of a Lightning callback that is ours; `lightning_callback` joins it with Lightning's base class."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.monitor: StabilityMonitor | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        options = dict(self.options)
        network = pl_module.get_submodule(options.pop("network", ""))
        if not trainer.is_global_zero:
            options |= {"path": None, "writers": (), "on_alarm": lambda _: None}
        self.monitor = StabilityMonitor(network, **options)
        self.monitor.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        assert self.monitor is not None
        # The same global step again: a micro-batch of an accumulated step.
        if trainer.global_step == self.monitor.steps:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        reading = self.monitor.step(loss, step=trainer.global_step)
        if reading is not None and trainer.logger is not None:
            named = {f"stability/{name}": value for name, value in reading.items()}
            trainer.logger.log_metrics(named, step=trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()


def lightning_callback(**options: Any) -> Any:
    """A callback for Lightning's Trainer with the options of StabilityMonitor.

    `network` names the U-shaped part of the LightningModule, such as "unet"; left out, it is the module itself.
    """
    base: type = object
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = __import__(package, fromlist=["Callback"]).Callback
            break
        except ImportError:
            continue
    return type("StabilityCallback", (LightningMonitor, base), {})(**options)
