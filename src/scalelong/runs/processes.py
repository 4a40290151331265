"""Devices and processes, through accelerate."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import InvalidConfigError, ScaleLongError
from ..optional import needs
from .config import TrainConfig

Result = TypeVar("Result")


def make_accelerator(config: TrainConfig, folder: str) -> Any:
    """An Accelerator for this run. The number of processes and the kind of parallelism come from the launcher."""
    needs("accelerate", "train", "training")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs

    # Its precision is shared by all Accelerators of a process; an earlier run may have had another.
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        return Accelerator(
            # "no" must not overrule what `accelerate config` says.
            mixed_precision=None if config.hardware.precision == "no" else config.hardware.precision,
            # Without an accelerator it joins the processes of torchrun only if told that this is a CPU's run.
            cpu=config.hardware.cpu or not torch.accelerator.is_available(),
            log_with=list(config.logging.trackers) or None,
            project_dir=folder,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error


def describe(accelerator: Any) -> dict[str, Any]:
    """What the launcher decided, for the run folder."""
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
            failure, outcome[1] = error, str(error)
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise ScaleLongError(f"the main process failed: {outcome[1]}")
    return outcome[0]


def gather_objects(accelerator: Any, value: Any) -> list[Any]:
    """The values of all processes, in order."""
    from accelerate.utils import gather_object

    return gather_object([value]) if accelerator.num_processes > 1 else [value]


def average(accelerator: Any, values: Tensor) -> Tensor:
    """The mean over processes."""
    return accelerator.reduce(values, reduction="mean") if accelerator.num_processes > 1 else values


def full_tensor(value: Tensor) -> Tensor:
    """The full tensor where each process may hold a shard of it. All processes must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_batch_size(config: TrainConfig, processes: int) -> None:
    parts = processes * config.hardware.accumulation
    if config.batch_size % parts:
        nearest = max(parts, round(config.batch_size / parts) * parts)
        raise InvalidConfigError(
            f"a batch of {config.batch_size} images cannot be divided among {processes} process(es) with "
            f"{config.hardware.accumulation} accumulated part(s) each; use a multiple of {parts}, for example {nearest}"
        )
