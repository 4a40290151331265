"""Devices and processes, through accelerate."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..config import TrainConfig
from ..errors import InvalidConfigError, RunFailedError, ScaleLongError, require
from ..files import in_words
from ..optional import needs

Result = TypeVar("Result")


def make_accelerator(config: TrainConfig, folder: str) -> Any:
    """An Accelerator for this run. The number of processes and the kind of parallelism come from the launcher."""
    _check_accelerate(config)
    with _variables():
        accelerate = needs("accelerate", "train", "training")
        # Its precision is shared by all Accelerators of a process; an earlier run may have had a different one.
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
        made = accelerate.Accelerator(
            mixed_precision=_as_accelerate_says(config.hardware.precision),
            # The loop divides a batch itself; with the plugin, accelerate does not read a number from its variable.
            gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(num_steps=1),
            # Without an accelerator it joins the processes of torchrun only if it knows that this is a run on a CPU.
            cpu=config.hardware.cpu or not torch.accelerator.is_available(),
            log_with=list(config.logging.trackers) or None,
            project_dir=folder,
            kwargs_handlers=[accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    kind = made.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM") or (kind == "FSDP" and not made.is_fsdp2):
        raise InvalidConfigError(
            f"accelerate is configured for {kind}, whose flat shards cannot be averaged and saved here: use data "
            f"parallel processes, or FSDP2 (fsdp_version: 2 in accelerate's configuration)"
        )
    return made


def process_state() -> Any:
    """Accelerate's view of the processes that torchrun or `accelerate launch` started: often just this one."""
    with _variables():
        return needs("accelerate", "train", "sampling").PartialState(cpu=not torch.accelerator.is_available())


def require_device(device: str | None) -> None:
    """Refuse a device that is not there before any work is done."""
    try:
        if device is None or torch.empty(1, device=device).device.type != "meta":
            return
    # torch has no one error for this: it depends on the device, and on how torch was built.
    except (RuntimeError, AssertionError, ValueError, NotImplementedError):
        pass
    raise InvalidConfigError(
        f"`device` {str(device)[:40]!r} cannot be used on this machine, or by this build of torch: choose "
        f"cpu, or leave it out"
    )


@contextmanager
def _variables() -> Iterator[None]:
    """InvalidConfigError for variables that accelerate does not understand, also while it is imported."""
    try:
        yield
    except ScaleLongError:
        raise
    except (ValueError, ImportError, RuntimeError, KeyError, AttributeError) as error:
        given = [name for name in os.environ if name.startswith("ACCELERATE_")]
        raise InvalidConfigError(
            f"accelerate refuses the settings of this run: {in_words(error)}. Check `precision`, `trackers` and the "
            f"variables {', '.join(given) or 'ACCELERATE_*'}"
        ) from error


def _check_accelerate(config: TrainConfig) -> None:
    """Variables of accelerate that change the mathematics must agree with the configuration, which is recorded."""
    hardware = config.hardware
    agreeing: dict[str, tuple[str, tuple[str, ...]]] = {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("accumulation", ("", "1", str(hardware.accumulation)))
    }
    if hardware.precision != "auto":  # which is taken from the variable
        agreeing["ACCELERATE_MIXED_PRECISION"] = ("precision", ("", _as_accelerate_says(hardware.precision)))
    for variable, (name, values) in agreeing.items():
        given = os.environ.get(variable, "").strip().lower()
        if given not in values:
            own = getattr(hardware, name)
            raise InvalidConfigError(
                f"the variable {variable} is {given[:40]!r} and `{name}` is {own}: give `{name}` {given[:40]}, so "
                f"that the run records it, or unset the variable (accelerate's launcher sets it)"
            )


def _as_accelerate_says(precision: str) -> str:
    return "no" if precision in ("auto", "fp32") else precision


def describe_processes(accelerator: Any) -> dict[str, Any]:
    """The decisions of the launcher, for the run folder."""
    return {
        "processes": accelerator.num_processes,
        "parallelism": str(accelerator.distributed_type.value),
        "device": str(accelerator.device),
        "precision": accelerator.mixed_precision,
    }


def on_main(accelerator: Any, work: Callable[[], Result]) -> Result:
    """Run on the main process; every process gets the result, or raises the same error instead of waiting forever."""
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:
            failure = error
            outcome[1] = str(error) if isinstance(error, ScaleLongError) else in_words(error)
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RunFailedError(
            f"the main process failed ({outcome[1]}): its own line says what to do; then start all processes again"
        )
    return outcome[0]


def gather_objects(accelerator: Any, value: Any) -> list[Any]:
    """The values of all processes, in order."""
    from accelerate.utils import gather_object

    return gather_object([value]) if accelerator.num_processes > 1 else [value]


def average(accelerator: Any, values: Tensor) -> Tensor:
    """The mean over processes."""
    return accelerator.reduce(values, reduction="mean") if accelerator.num_processes > 1 else values


def in_any_process(accelerator: Any, flag: bool) -> bool:
    """True if the flag is set in one of the processes. All must call this."""
    if accelerator.num_processes == 1:
        return flag
    return bool(average(accelerator, torch.tensor(float(flag), device=accelerator.device)) > 0)


def full_tensor(value: Tensor) -> Tensor:
    """The full tensor where each process may hold a shard of it. All processes must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_batch_size(config: TrainConfig, processes: int) -> None:
    parts = processes * config.hardware.accumulation
    nearest = max(parts, round(config.batch_size / parts) * parts)
    what = f"a batch of {config.batch_size} images cannot be divided among {processes} process(es)"
    require(
        config.batch_size % parts == 0,
        f"{what} with {config.hardware.accumulation} accumulated part(s) each; use a multiple of {parts}, for example "
        f"{nearest}",
    )
