"""Scaling, monitor and guard for loops that others wrote: accelerate's (and so diffusers' scripts), Lightning's, and
the Trainer of transformers.

    loop         monitor                          guard
    accelerate   AccelerateMonitor                CollapseGuard itself, with what `prepare` returns
    Lightning    lightning_callback, which can    lightning_guard
                 scale the network as well
    Trainer      trainer_callback                 trainer_guard

Readings go where the loop logs, alarms to its trackers as alerts (`scalelong.stability.trackers`).
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..attaching import is_scaled, scale_skips_, start_skips_
from ..errors import InvalidConfigError
from ..finding import ExampleInputs
from ..models import tensors_in
from ..optional import needs
from ..scaling import Scaling
from .alarms import Alarm
from .guard import CollapseGuard
from .monitor import StabilityMonitor, logger
from .trackers import send_alert


def _alerts(trackers: Iterable[Any], alarm: Alarm) -> None:
    """An alarm as a line of the log and as an alert of every tracker that has some."""
    logger.warning("%s", alarm)
    for tracker in trackers:
        send_alert(tracker, alarm.step, alarm.kind, str(alarm))


class AccelerateMonitor:
    """For loops with accelerate, such as diffusers' `train_unconditional.py`. Two lines:

        monitor = AccelerateMonitor(accelerator, model, every=10)        # after accelerator.prepare(...)
        monitor.step(loss)                                               # after optimizer.step()

    Counts optimiser steps, not micro-batches; all processes read, the main one writes and logs to the trackers, which
    get alarms as alerts.
    """

    def __init__(self, accelerator: Any, model: nn.Module, **options: Any) -> None:
        options = _options(options, accelerator.is_main_process)
        options.setdefault("on_alarm", lambda alarm: _alerts(accelerator.trackers, alarm))
        self.accelerator = accelerator
        self.monitor = StabilityMonitor(model, **options)

    def step(self, loss: Tensor | float | None = None, *, step: int | None = None) -> dict[str, float] | None:
        if not self.accelerator.sync_gradients:
            return None
        reading = self.monitor.step(loss, step=step)
        if reading is not None:
            self.accelerator.log(_named(reading), step=self.monitor.steps)
        return reading

    def close(self) -> None:
        self.monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LightningMonitor:
    """The part of a Lightning callback that is ours; `lightning_callback` joins it with Lightning's base class."""

    def __init__(
        self,
        *,
        network: str = "",
        scaling: str | Scaling | None = None,
        start: str | None = None,
        example_inputs: ExampleInputs = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if scaling is not None and start is not None:
            raise InvalidConfigError("give scaling= (attached) or start= (in the weights), not both")
        self.network, self.scaling, self.start, self.inputs = network, scaling, start, example_inputs
        self.options = options
        self.monitor: StabilityMonitor | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:  # noqa: ARG002
        """Before a checkpoint is read, so that its weights meet a scaled network, and before there is an optimiser."""
        network = _part(pl_module, self.network)
        if self.scaling is not None and not is_scaled(network):
            scale_skips_(network, self.scaling, self.inputs)
        if self.start is not None and stage == "fit" and not hasattr(self, "report"):
            self.report = start_skips_(network, self.start, self.inputs)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        options = _options(self.options, trainer.is_global_zero)
        options.setdefault("on_alarm", lambda alarm: _alerts(_loggers(trainer), alarm))
        self.monitor = StabilityMonitor(_part(pl_module, self.network), **options)
        self.monitor.begin_at(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        assert self.monitor is not None
        # The same global step again: a micro-batch of an accumulated step.
        if trainer.global_step == self.monitor.steps:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        reading = self.monitor.step(loss, step=trainer.global_step)
        if reading is not None:
            for target in _loggers(trainer):
                target.log_metrics(_named(reading), step=trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()


def _part(model: nn.Module, network: str) -> nn.Module:
    """The part of a model that `network` names."""
    try:
        return model.get_submodule(network)
    except AttributeError as error:
        names = ", ".join(name for name, _ in model.named_children()) or "none"
        raise InvalidConfigError(
            f"{type(model).__name__} has no part {network!r} (network=); its parts are: {names}. What Lightning builds "
            f"in configure_model is not there yet: build it in __init__"
        ) from error


def _named(reading: dict[str, float]) -> dict[str, float]:
    return {f"stability/{name}": value for name, value in reading.items()}


def _options(options: dict[str, Any], main: bool) -> dict[str, Any]:
    """All processes read; the main one writes and reports."""
    return dict(options) if main else {**options, "path": None, "writers": (), "on_alarm": lambda _: None}


def _loggers(trainer: Any) -> list[Any]:
    known = getattr(trainer, "loggers", None)
    return list(known) if known else [target for target in [getattr(trainer, "logger", None)] if target is not None]


def lightning_callback(**options: Any) -> Any:
    """A callback for Lightning's Trainer with the options of StabilityMonitor, and these:

    `network` names the U-shaped part of the LightningModule, such as "unet"; left out, it is the module itself.
    `scaling` ("cs", "ls", ...) attaches a scaling to it, `start` ("cs", ...) puts one into its weights before the first
    step. `example_inputs` are for networks that need them (`find_skips`).
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
        self._restored: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        if len(trainer.optimizers) != 1:
            raise InvalidConfigError(f"the guard is for one optimiser; this module has {len(trainer.optimizers)}")
        self.guard = CollapseGuard(pl_module, trainer.optimizers[0], **self.options)
        if self._restored:
            self.guard.load_state_dict(self._restored)

    # Lightning keeps these in its checkpoints, and gives them back before training starts.

    def state_dict(self) -> dict[str, Any]:
        return self.guard.state_dict() if self.guard is not None else self._restored

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

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


class TrainerLosses:
    """A TrainerCallback is not told the loss of a step, so it is taken from what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[Tensor] = []
        self._handle: Any = None

    def _listen(self, model: nn.Module) -> None:
        self._handle = model.register_forward_hook(self._note)

    def _note(self, module: nn.Module, _: Any, output: Any) -> None:
        if module.training:
            named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
            first = named if named is not None else next(tensors_in(output), None)
            if isinstance(first, Tensor) and first.numel() == 1:
                self._losses.append(first.detach().reshape(()))

    def _loss(self) -> Tensor | None:
        """The mean over the parts of this step."""
        noted, self._losses = self._losses, []
        return torch.stack(noted).mean() if noted else None

    def _hang_up(self) -> None:
        if self._handle is not None:
            self._handle.remove()


class TrainerMonitor(TrainerLosses):
    """The part of a TrainerCallback that is ours; `trainer_callback` joins it with the base class of transformers."""

    def __init__(self, trainer: Any = None, *, network: str = "", **options: Any) -> None:
        super().__init__()
        self.trainer, self.network, self.options = trainer, network, options
        self.monitor: StabilityMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        model, options = kwargs["model"], _options(self.options, state.is_world_process_zero)
        self.monitor = StabilityMonitor(_part(model, self.network), **options)
        self.monitor.begin_at(state.global_step)
        self._listen(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        assert self.monitor is not None
        reading = self.monitor.step(self._loss(), step=state.global_step)
        if reading is None:
            return
        if self.trainer is not None:
            self.trainer.log(_named(reading))
        else:
            state.log_history.append({**_named(reading), "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self.monitor is not None:
            self.monitor.close()
        self._hang_up()


def trainer_callback(trainer: Any = None, **options: Any) -> Any:
    """A callback for the Trainer of transformers with the options of StabilityMonitor.

    `trainer.add_callback(trainer_callback(trainer, every=10))` logs readings as the Trainer logs, so that they reach
    its `report_to`. Without the trainer they go into `state.log_history`, and where `path` and `writers` say.
    `network` names the U-shaped part of the model, such as "unet"; left out, it is the model itself.
    """
    base = needs("transformers", "text", "a TrainerCallback").TrainerCallback
    return type("StabilityTrainerCallback", (TrainerMonitor, base), {})(trainer, **options)


class TrainerGuard(TrainerLosses):
    """The part of a TrainerCallback that is ours; `trainer_guard` joins it with the base class of transformers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.guard: CollapseGuard | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.guard = CollapseGuard(kwargs["model"], kwargs["optimizer"], **self.options)
        self._listen(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        loss = self._loss()
        if loss is None:
            raise InvalidConfigError(
                "the guard found no loss in what the model returns: return it as `loss`, or first in a tuple; where "
                "compute_loss makes it, call CollapseGuard.step there instead"
            )
        assert self.guard is not None
        self.guard.step(loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self.guard is not None:
            self.guard.close()
        self._hang_up()


def trainer_guard(**options: Any) -> Any:
    """A callback for the Trainer of transformers with the options of CollapseGuard."""
    base = needs("transformers", "text", "a TrainerCallback").TrainerCallback
    return type("CollapseTrainerCallback", (TrainerGuard, base), {})(**options)
