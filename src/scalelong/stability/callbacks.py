"""Monitor and guard for loops that others wrote: accelerate's (and so diffusers' scripts), Lightning's, transformers'.

    loop         monitor               guard
    accelerate   AccelerateMonitor     CollapseGuard itself, with what `prepare` returns
    Lightning    lightning_callback    lightning_guard
    Trainer      trainer_callback      trainer_guard

Readings go where the loop logs, alarms to its trackers as alerts (`send_alert`, at the end of the file). The other
libraries are imported only when one of these is called.
"""

import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..models import tensors_in
from ..optional import needs
from .alarms import Alarm
from .guard import CollapseGuard
from .monitor import StabilityMonitor

logger = logging.getLogger(__name__)


class AccelerateMonitor(StabilityMonitor):
    """For loops with accelerate, such as diffusers' `train_unconditional.py`. Two lines:

        monitor = AccelerateMonitor(accelerator, model, every=10)        # after accelerator.prepare(...)
        monitor.step(loss)                                               # after optimizer.step()

    Counts optimiser steps, not micro-batches; all processes read, the main one writes and logs to the trackers, which
    get alarms as alerts.
    """

    def __init__(self, accelerator: Any, model: nn.Module, **options: Any) -> None:
        self.accelerator = accelerator
        super().__init__(model, **_options(options, accelerator.is_main_process, lambda: accelerator.trackers))

    def step(self, loss: Tensor | float | None = None, *, step: int | None = None) -> dict[str, float] | None:
        if not self.accelerator.sync_gradients:
            return None
        reading = super().step(loss, step=step)
        if reading is not None:
            self.accelerator.log(_named(reading), step=self.steps)
        return reading


# Lightning


def lightning_callback(*, network: str = "", **options: Any) -> Any:
    """A callback for Lightning's Trainer with the options of StabilityMonitor.

    `network` names the U-shaped part of the LightningModule, such as "unet"; left out, it is the module itself.
    """

    class StabilityCallback(_lightning_base()):
        monitor: StabilityMonitor

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            made = _options(options, trainer.is_global_zero, lambda: _loggers(trainer))
            self.monitor = StabilityMonitor(_part(pl_module, network), **made)
            self.monitor.begin_at(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
            if trainer.global_step == self.monitor.steps:
                return  # a micro-batch of an accumulated step
            reading = self.monitor.step(_loss_in(outputs), step=trainer.global_step)
            if reading is not None:
                for target in _loggers(trainer):
                    target.log_metrics(_named(reading), step=trainer.global_step)

        def on_train_end(self, *_: Any) -> None:
            self.monitor.close()

    return StabilityCallback()


def lightning_guard(**options: Any) -> Any:
    """A callback for Lightning's Trainer with the options of CollapseGuard. Its state is in Lightning's checkpoints."""

    class CollapseCallback(_lightning_base()):
        guard: CollapseGuard | None = None
        restored: dict[str, Any] | None = None

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            if len(trainer.optimizers) != 1:
                raise InvalidConfigError(f"the guard is for one optimiser; this module has {len(trainer.optimizers)}")
            self.guard = CollapseGuard(pl_module, trainer.optimizers[0], **options)
            if self.restored is not None:
                self.guard.load_state_dict(self.restored)

        def state_dict(self) -> dict[str, Any]:
            return self.guard.state_dict() if self.guard is not None else self.restored or {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.restored = state  # Lightning gives it back before training starts

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
            loss = _loss_in(outputs)
            if self.guard is not None and loss is not None:
                # Lightning divides the loss by the number of batches that it accumulates.
                self.guard.step(loss * getattr(trainer, "accumulate_grad_batches", 1))

        def on_train_end(self, *_: Any) -> None:
            if self.guard is not None:
                self.guard.close()

    return CollapseCallback()


def _lightning_base() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return __import__(package, fromlist=["Callback"]).Callback
        except ImportError:
            continue
    return object


# The Trainer of transformers


def trainer_callback(trainer: Any, *, network: str = "", **options: Any) -> Any:
    """A callback for the Trainer of transformers with the options of StabilityMonitor:

        trainer.add_callback(trainer_callback(trainer, every=10))

    Readings are logged as the Trainer logs, so that they reach its `report_to`. `network` names the U-shaped part of
    the model, such as "unet"; left out, it is the model itself.
    """

    def begin(model: nn.Module, state: Any, _: Any) -> StabilityMonitor:
        monitor = StabilityMonitor(_part(model, network), **_options(options, state.is_world_process_zero))
        monitor.begin_at(state.global_step)
        return monitor

    def step(monitor: StabilityMonitor, loss: Tensor | None, state: Any) -> None:
        reading = monitor.step(loss, step=state.global_step)
        if reading is not None:
            trainer.log(_named(reading))

    return _trainer_watch(begin, step)


def trainer_guard(**options: Any) -> Any:
    """A callback for the Trainer of transformers with the options of CollapseGuard."""

    def begin(model: nn.Module, _: Any, optimizer: Any) -> CollapseGuard:
        return CollapseGuard(model, optimizer, **options)

    def step(guard: CollapseGuard, loss: Tensor | None, _: Any) -> None:
        if loss is None:
            raise InvalidConfigError(
                "the guard found no loss in what the model returns: return it as `loss`, or first in a tuple; where "
                "compute_loss makes it, call CollapseGuard.step there instead"
            )
        guard.step(loss)

    return _trainer_watch(begin, step)


def _trainer_watch(begin: Callable[..., Any], step: Callable[..., None]) -> Any:
    """A TrainerCallback around a monitor or a guard, its `watcher`.

    The Trainer does not give it the loss of a step, so that is taken from what the model returns.
    """

    class Watch(needs("transformers", "text", "a TrainerCallback").TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.watcher = begin(kwargs["model"], state, kwargs.get("optimizer"))
            self.losses: list[Tensor] = []
            self.handle = kwargs["model"].register_forward_hook(self.note)

        def note(self, module: nn.Module, _: Any, output: Any) -> None:
            named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
            first = named if named is not None else next(tensors_in(output), None)
            if module.training and isinstance(first, Tensor) and first.numel() == 1:
                self.losses.append(first.detach().reshape(()))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            losses, self.losses = self.losses, []  # of the parts of this step
            step(self.watcher, torch.stack(losses).mean() if losses else None, state)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.watcher.close()
            self.handle.remove()

    return Watch()


# What they share


def _options(options: dict[str, Any], main: bool, trackers: Callable[[], Iterable[Any]] = tuple) -> dict[str, Any]:
    """Those of a monitor. All processes read; the main one writes, and reports to the trackers."""

    def alert(alarm: Alarm) -> None:
        logger.warning("%s", alarm)
        for tracker in trackers():
            send_alert(tracker, alarm.step, alarm.kind, str(alarm))

    return {"on_alarm": alert, **options} if main else {**options, "path": None, "on_alarm": lambda _: None}


def _part(model: nn.Module, network: str) -> nn.Module:
    """The part of a model that `network` names."""
    try:
        return model.get_submodule(network)
    except AttributeError as error:
        names = ", ".join(name for name, _ in model.named_children()) or "none"
        raise InvalidConfigError(
            f"{type(model).__name__} has no part {network!r} (network=); its parts are: {names}"
        ) from error


def _loss_in(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, dict) else outputs


def _named(reading: dict[str, float]) -> dict[str, float]:
    return {f"stability/{name}": value for name, value in reading.items()}


def _loggers(trainer: Any) -> list[Any]:
    known = getattr(trainer, "loggers", None) or [getattr(trainer, "logger", None)]
    return [target for target in known if target is not None]


# Trackers: what their own libraries give (a SummaryWriter, a run of wandb or trackio, the module mlflow), trackers of
# accelerate, and loggers of Lightning


def send_alert(target: Any, step: int, title: str, text: str) -> None:
    """An alarm, as what the tracker shows or sends as an alert. A tracker without any gets nothing."""
    found, run = _own(target), _mlflow_run(target)
    if hasattr(found, "add_text"):  # a SummaryWriter of torch or tensorboardX
        found.add_text("alarms", text, step)
        found.flush()  # people who are alarmed look now
    elif hasattr(found, "alert"):  # wandb and trackio
        found.alert(title=f"scalelong: {title}", text=f"step {step}: {text}")
    elif run is not None:
        # MLflow has no alerts: a tag is seen in the list of runs, and can be searched for.
        client, name = run
        client.set_tag(name, "alarm", f"step {step}: {title}")
        client.log_text(name, text, f"alarms/step-{step:08d}-{title.replace(' ', '-')}.txt")


def log_picture(target: Any, step: int, name: str, picture: Tensor) -> bool:
    """A picture, uint8 (C, H, W) with 1 or 3 channels. False if the tracker is none of those that are known."""
    found, run, array = _own(target), _mlflow_run(target), picture.permute(1, 2, 0).numpy()
    if hasattr(found, "add_image"):
        found.add_image(name, picture, global_step=step)
    elif hasattr(found, "alert"):
        coloured = array.repeat(3 // array.shape[2], axis=2)  # trackio takes no gray ones
        found.log({name: import_module(_library(found)).Image(coloured)}, step=step)
    elif run is not None:
        client, run_id = run
        client.log_image(run_id, array.squeeze(2) if array.shape[2] == 1 else array, key=name, step=step)
    else:
        return False
    return True


def _own(target: Any) -> Any:
    """What the tracker's own library gives: that of accelerate's trackers and of Lightning's loggers."""
    module = type(target).__module__
    if hasattr(target, "store_init_configuration") or module.startswith("accelerate."):
        return target.tracker
    is_logger = module.startswith(("lightning.", "pytorch_lightning.", "lightning_fabric."))
    return target.experiment if is_logger else target


def _library(found: Any) -> str:
    name = found.__name__ if isinstance(found, ModuleType) else type(found).__module__
    return name.partition(".")[0]


def _mlflow_run(target: Any) -> tuple[Any, str] | None:
    """A client and the id of a run: of Lightning's logger, a run, or (the module) the run that is active."""
    found = _own(target)
    if hasattr(target, "run_id") and hasattr(found, "log_metric"):  # Lightning's, whose experiment is a client
        return found, target.run_id
    if _library(found) != "mlflow":
        return None
    mlflow = import_module("mlflow")
    run = mlflow.active_run() if isinstance(found, ModuleType) else found
    if run is None:
        raise InvalidConfigError("no run of MLflow is active: call mlflow.start_run() before the monitor is made")
    return mlflow.MlflowClient(), run.info.run_id
