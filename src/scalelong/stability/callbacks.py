"""The monitor and the guard for loops that others wrote: accelerate's (and so diffusers' scripts), Lightning's, and the
Trainer of transformers."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..models.call import tensors_in
from ..optional import needs
from .guard import CollapseGuard
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
    return type("StabilityCallback", (LightningMonitor, _lightning_base()), {})(**options)


def _lightning_base() -> type:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return __import__(package, fromlist=["Callback"]).Callback
        except ImportError:
            continue
    return object


# The guard. Loops with accelerate need no callback: CollapseGuard(model, optimizer) takes what `prepare` returns


class LightningGuard:
    """The part of a Lightning callback that is ours; `lightning_guard` joins it with Lightning's base class."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.guard: CollapseGuard | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if len(trainer.optimizers) != 1:
            raise InvalidConfigError(f"the guard is for one optimiser; this module has {len(trainer.optimizers)}")
        self.guard = CollapseGuard(pl_module, trainer.optimizers[0], **self.options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.guard is not None and loss is not None:
            # Lightning divides the loss by the number of batches that it accumulates.
            self.guard.step(loss * getattr(trainer, "accumulate_grad_batches", 1))

    def on_train_end(self, *_: Any) -> None:
        if self.guard is not None:
            self.guard.close()


def lightning_guard(**options: Any) -> Any:
    """A callback for Lightning's Trainer with the options of CollapseGuard."""
    return type("CollapseCallback", (LightningGuard, _lightning_base()), {})(**options)


class TrainerGuard:
    """The part of a TrainerCallback that is ours; `trainer_guard` joins it with the base class of transformers.

    A TrainerCallback is not told the loss of a step, so it is taken from what the model returns.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.guard: CollapseGuard | None = None
        self._losses: list[Tensor] = []
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        model = kwargs["model"]
        self.guard = CollapseGuard(model, kwargs["optimizer"], **self.options)
        self._handle = model.register_forward_hook(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if not self._losses:
            raise InvalidConfigError(
                "the guard found no loss in what the model returns: return it as `loss`, or first in a tuple; where "
                "compute_loss makes it, call CollapseGuard.step there instead"
            )
        assert self.guard is not None
        loss, self._losses = torch.stack(self._losses).mean(), []
        self.guard.step(loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self.guard is not None:
            self.guard.close()
            self._handle.remove()

    def _note(self, module: nn.Module, _: Any, output: Any) -> None:
        if module.training:
            named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
            first = named if named is not None else next(tensors_in(output), None)
            if isinstance(first, Tensor) and first.numel() == 1:
                self._losses.append(first.detach().reshape(()))


def trainer_guard(**options: Any) -> Any:
    """A callback for the Trainer of transformers with the options of CollapseGuard."""
    base = needs("transformers", "text", "a TrainerCallback").TrainerCallback
    return type("CollapseTrainerCallback", (TrainerGuard, base), {})(**options)
