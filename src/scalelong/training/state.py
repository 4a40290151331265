"""The state of a run in memory, and its way into a snapshot and back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import CheckpointError
from ..randomness import global_state, restore_global_state, seed_global
from ..runs.checkpoint import Snapshot
from ..runs.config import TrainConfig
from ..runs.model import Network, uses_channels_last
from ..runs.processes import gather_objects, whole
from .ema import Ema
from .optimizer import create_state, make_optimizer


@dataclass
class TrainState:
    """Weights, average, optimiser, and counters. `bare` is the network itself, `model` what accelerate made of it."""

    accelerator: Any
    bare: nn.Module
    model: nn.Module
    network: Network
    bare_network: Network
    optimizer: torch.optim.AdamW
    prepared_optimizer: Any
    ema: Ema
    channels_last: bool
    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Time spent, over all restarts."""
    window: list[float] = field(default_factory=list)
    """Sums since the last line of metrics."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def create(config: TrainConfig, accelerator: Any, bare: nn.Module) -> TrainState:
    channels_last = uses_channels_last(config, bare)
    if channels_last:
        bare = bare.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    bare.to(accelerator.device)
    optimizer = make_optimizer(bare, config.optimizer)
    model = torch.compile(bare) if config.hardware.compile else bare
    model, prepared_optimizer = accelerator.prepare(model, optimizer)
    create_state(optimizer)
    seed_global(config.seed, "process", accelerator.process_index)
    return TrainState(
        accelerator=accelerator,
        bare=bare,
        model=model,
        network=Network(model, bare),
        bare_network=Network(bare, bare),
        optimizer=optimizer,
        prepared_optimizer=prepared_optimizer,
        ema=Ema(bare, config.optimizer),
        channels_last=channels_last,
    )


# Full tensors on the CPU of the main process, whether they are sharded (FSDP2) or not.
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True)


def snapshot(state: TrainState) -> Snapshot:
    """All processes take part; the result is complete on the main one."""
    weights: dict[str, Any] = get_model_state_dict(state.bare, options=_GATHER)
    averages = {name: _full(value) for name, value in zip(state.ema.names, state.ema.averages, strict=True)}
    scaler = state.accelerator.scaler
    training = {
        "step": state.step,
        "seconds": state.seconds,
        "window": list(state.window),
        "optimizer": get_optimizer_state_dict(state.bare, state.optimizer, options=_GATHER),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": gather_objects(state.accelerator, global_state()),
    }
    return Snapshot(state.step, _separate(weights), _separate({**weights, **averages}), training)


def restore(state: TrainState, saved: Snapshot, seed: int) -> None:
    """Put a snapshot back, bit for bit."""
    training = saved.training
    try:
        set_model_state_dict(state.bare, dict[str, Any](saved.model), options=_SCATTER)
        _restore_averages(state, saved)
        set_optimizer_state_dict(state.bare, state.optimizer, training["optimizer"], options=_SCATTER)
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"the checkpoint of step {saved.step} does not fit the model: {error}") from error
    if state.accelerator.scaler is not None and training["scaler"]:
        state.accelerator.scaler.load_state_dict(training["scaler"])
    process, states = state.accelerator.process_index, training["random"]
    if len(states) == state.accelerator.num_processes:
        restore_global_state(states[process])
    else:  # other processes than before: dropout goes on with other numbers
        seed_global(seed, "process", process, saved.step)
    state.step, state.seconds, state.window = training["step"], training["seconds"], list(training["window"])


@torch.no_grad()
def _restore_averages(state: TrainState, saved: Snapshot) -> None:
    for name, average in zip(state.ema.names, state.ema.averages, strict=True):
        value = saved.ema[name].to(average.device)
        if isinstance(average, DTensor):
            value = distribute_tensor(value, average.device_mesh, average.placements)
        average.copy_(value)


def _full(value: Tensor) -> Tensor:
    return whole(value).detach().cpu()


def _separate(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Contiguous copies where tensors share memory (tied weights), which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            continue
        value = value.contiguous()
        result[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(value.untyped_storage().data_ptr())
    return result
