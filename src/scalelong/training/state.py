"""The state of a run in memory: weights, optimiser, the moving average, bad steps, and the snapshot of it all.

Saving (`snapshot`) and loading (`restore`) stand at the end, one below the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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

from ..attaching import without_records
from ..config import AverageLength, OptimizerConfig, TrainConfig
from ..errors import CheckpointError, InvalidConfigError
from ..files import in_words
from ..models import Denoiser, fuse_, unfuse_
from ..mup import LR_SCALE
from ..randomness import global_state, restore_global_state, seed_global
from ..runs import RunData, Snapshot, full_tensor, gather_objects, mup_kinds, uses_channels_last
from .optimizers import make_optimizer

# pyright: reportPrivateImportUsage=false

# The moving average


class Ema:
    """w̄ ← w̄ + (1 - rate) (w - w̄), after every step, in float32. Frozen parameters are averaged too, which keeps them.

    `tracks` are averages of other lengths that are kept next to it (`runs/averages.py`).
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, batch_size: int = 1) -> None:
        self.config, self.batch_size = config, batch_size
        self.length = None if config.ema_length is None else AverageLength.parse(config.ema_length)
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = list(model.parameters())  # not detached: FSDP2 exchanges the memory of a shard
        self.averages: list[Tensor] = [weight.detach().clone().float() for weight in self.weights]
        lengths = [AverageLength.parse(length) for length in config.ema_lengths]
        self.tracks = {length: [average.clone() for average in self.averages] for length in lengths}

    def rate(self, step: int) -> float:
        if self.length is not None:
            return self.length.rate(step, self.batch_size, self.config.ema_warmup)
        if self.config.ema_warmup:
            return min(self.config.ema_rate, (1 + step) / (10 + step))
        return self.config.ema_rate

    @torch.no_grad()
    def update(self, step: int) -> None:
        weights = [weight.detach().float() for weight in self.weights]
        torch._foreach_lerp_(self.averages, weights, 1.0 - self.rate(step))
        for length, averages in self.tracks.items():
            beta = length.rate(step, self.batch_size, self.config.ema_warmup)
            torch._foreach_lerp_(averages, weights, 1.0 - beta)

    def full_tracks(self) -> dict[str, dict[str, Tensor]]:
        """The averages of other lengths on the CPU, whole. All processes take part."""
        return {
            str(length): {name: _full(value) for name, value in zip(self.names, averages, strict=True)}
            for length, averages in self.tracks.items()
        }

    @torch.no_grad()
    def distance(self) -> Tensor:
        """‖w̄ - w‖ / ‖w‖. It stays 0 if the average is not updated, and grows if the weights run away."""
        weights = [weight.detach().float() for weight in self.weights]
        difference = torch.nn.utils.get_total_norm(torch._foreach_sub(self.averages, weights))
        norm = torch.nn.utils.get_total_norm(weights)
        return full_tensor(difference) / full_tensor(norm).clamp_min(torch.finfo(torch.float32).tiny)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights, within a `with` block."""
        kept = [weight.detach().clone() for weight in self.weights]
        try:
            self._set_weights(self.averages)
            yield
        finally:
            self._set_weights(kept)

    @torch.no_grad()
    def _set_weights(self, values: list[Tensor]) -> None:
        # One by one: torch._foreach_copy_ does not know sharded tensors.
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)


# Numbers that are not finite are noticed before they reach the weights.
#
# An accelerator is not made to wait for the numbers of each step: they are kept on the device and read every few steps.
# From the first bad step on no update happens, so the weights are still those from before it.

SMALLEST_SCALE = 1.0
"""fp16: gradients that overflow are normal while the loss scale falls to its place, but not below this."""


class BadSteps:
    """The first step whose loss or gradient was not finite, kept on the device."""

    def __init__(self, device: torch.device) -> None:
        self.seen = torch.zeros((), device=device)
        """1 from the first bad step on."""
        self._first = torch.full((), -1, dtype=torch.long, device=device)

    def skip_if_bad(self, optimizer: torch.optim.Optimizer, scaler: Any, step: int, loss: Tensor, norm: Tensor) -> None:
        """Call it before the optimiser's step: from the first numbers that are not finite on, that does nothing."""
        bad = ~torch.isfinite(norm)
        if scaler is not None:
            # fp16: the scaler itself skips gradients that overflow, and lowers its scale. Only a bad loss is a failure,
            # or an overflow at the smallest scale.
            bad = bad & (scaler.get_scale() <= SMALLEST_SCALE)
        bad = bad | ~torch.isfinite(loss)
        self._first = torch.where(bad & (self._first < 0), step, self._first)
        self.seen = torch.maximum(self.seen, bad.float())
        groups = optimizer.param_groups
        if scaler is not None:
            return
        if all(group.get("fused") and not isinstance(group["params"][0], DTensor) for group in groups):
            # The fused AdamW skips its update by a flag on the device, the one that torch's gradient scaler sets.
            optimizer.found_inf = self.seen  # pyright: ignore[reportAttributeAccessIssue]
        elif self.seen:
            # Others have no such flag, and neither have sharded parameters (FSDP2). Without gradients they do nothing.
            optimizer.zero_grad()

    def first(self) -> int | None:
        """The first bad step, if there was one. Waits for the device."""
        first = int(self._first)
        return None if first < 0 else first


@torch.no_grad()
def clip_gradient(parameters: list[nn.Parameter], largest: float | None) -> Tensor:
    """The norm of the gradient before clipping."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return full_tensor(norm)


# The state, and its way into a snapshot and back


@dataclass
class TrainState:
    """Weights, average, optimiser, and counters. `bare` is the network itself, `model` what accelerate made of it."""

    accelerator: Any
    bare: nn.Module
    model: nn.Module
    network: Denoiser
    bare_network: Denoiser
    optimizer: torch.optim.Optimizer
    prepared_optimizer: Any
    ema: Ema
    channels_last: bool
    data: RunData
    """What is trained on, for hooks that look at the network with it."""
    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Time spent, over all restarts."""
    window: list[float] = field(default_factory=list)
    """Sums since the last line of metrics."""
    collapse: dict[str, Any] = field(default_factory=dict)
    """State of the detector of collapses."""
    best: dict[str, Any] = field(default_factory=dict)
    """The best measurement so far: its value and step, and the number of measurements since."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def create(config: TrainConfig, accelerator: Any, bare: nn.Module, data: RunData) -> TrainState:
    channels_last = uses_channels_last(config, bare)
    if channels_last:
        bare = bare.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    bare.to(accelerator.device)
    optimizer = make_optimizer(bare, config.optimizer, mup_kinds(bare, config, data.shape))
    model = torch.compile(bare) if config.hardware.compile else fuse_(bare)
    model, prepared_optimizer = accelerator.prepare(model, optimizer)
    if accelerator.scaler is None and accelerator.distributed_type.value == "NO":
        # accelerate's has nothing to do then, and looks for packages on the disk at every step.
        prepared_optimizer = optimizer
    create_moments(optimizer)
    if not _is_adamw(optimizer) and any(isinstance(value, DTensor) for value in bare.parameters()):
        raise InvalidConfigError(f"`optimizer` {config.optimizer.optimizer} cannot be sharded (FSDP2): take adamw")
    seed_global(config.seed, "process", accelerator.process_index)
    return TrainState(
        accelerator=accelerator,
        bare=bare,
        model=model,
        network=Denoiser(bare, model),
        bare_network=Denoiser(bare),
        optimizer=optimizer,
        prepared_optimizer=prepared_optimizer,
        ema=Ema(bare, config.optimizer, config.batch_size),
        channels_last=channels_last,
        data=data,
    )


def release(state: TrainState) -> None:
    """Leave an ordinary network: without fused blocks, and without the autocast that accelerate puts around it."""
    unfuse_(state.bare)
    own = vars(state.bare)
    original = own.pop("_original_forward", None)
    if original is not None:
        del own["forward"]
        if getattr(original, "__func__", None) is not type(state.bare).forward:
            own["forward"] = original


def _is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.AdamW


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's moments before its first step, so that saving and loading see them at every step alike."""
    for group in optimizer.param_groups if _is_adamw(optimizer) else ():
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


# Full tensors on the CPU of the main process, whether they are sharded (FSDP2) or not.
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True)


def snapshot(state: TrainState) -> Snapshot:
    """All processes take part; the result is complete on the main one."""
    with without_records():  # the configuration of the run says how it is scaled
        weights: dict[str, Any] = get_model_state_dict(state.bare, options=_GATHER)
    averages = {name: _full(value) for name, value in zip(state.ema.names, state.ema.averages, strict=True)}
    scaler = state.accelerator.scaler
    training = {
        "step": state.step,
        "seconds": state.seconds,
        "window": list(state.window),
        "collapse": dict(state.collapse),
        "best": dict(state.best),
        # torch's own way takes a step with zero gradients if an optimiser has no state yet, which counts.
        "optimizer": get_optimizer_state_dict(state.bare, state.optimizer, options=_GATHER)
        if _is_adamw(state.optimizer)
        else state.optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": gather_objects(state.accelerator, global_state()),
    }
    tracks = {f"{length}/{name}": v for length, track in state.ema.full_tracks().items() for name, v in track.items()}
    return Snapshot(state.step, _untied(weights), _untied({**weights, **averages}), training, averages=_untied(tracks))


def restore(state: TrainState, saved: Snapshot, seed: int) -> None:
    """Put a snapshot back, bit for bit."""
    training = saved.training
    if training.get("packed"):
        raise CheckpointError(
            "this folder holds the weights of a network that comes with the package, without the state of its "
            "optimiser: begin a run of your own with them, scalelong train ... --from FOLDER --out ANOTHER"
        )
    try:
        with without_records():
            set_model_state_dict(state.bare, dict[str, Any](saved.model), options=_SCATTER)
        _restore_averages(state.ema, saved)
        scales = [group.get(LR_SCALE) for group in state.optimizer.param_groups]
        if _is_adamw(state.optimizer):
            set_optimizer_state_dict(state.bare, state.optimizer, training["optimizer"], options=_SCATTER)
        else:
            state.optimizer.load_state_dict(training["optimizer"])
        for group, scale in zip(state.optimizer.param_groups, scales, strict=True):
            if scale is not None:  # how rates relate is up to the configuration, not to the checkpoint
                group[LR_SCALE] = scale
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of step {saved.step} does not fit the model ({in_words(error)}): restore the "
            f"folder, or train again with another `out`"
        ) from error
    if state.accelerator.scaler is not None and training["scaler"]:
        state.accelerator.scaler.load_state_dict(training["scaler"])
    process, states = state.accelerator.process_index, training["random"]
    if len(states) == state.accelerator.num_processes:
        restore_global_state(states[process])
    else:  # a different number of processes than before: dropout goes on with other numbers
        seed_global(seed, "process", process, saved.step)
    state.step, state.seconds, state.window = training["step"], training["seconds"], list(training["window"])
    state.collapse, state.best = dict(training["collapse"]), dict(training["best"])


@torch.no_grad()
def _restore_averages(ema: Ema, saved: Snapshot) -> None:
    places = [(average, saved.ema[name]) for name, average in zip(ema.names, ema.averages, strict=True)]
    for length, averages in ema.tracks.items():
        places += [(each, saved.averages[f"{length}/{name}"]) for name, each in zip(ema.names, averages, strict=True)]
    for average, value in places:
        value = value.to(average.device)
        if isinstance(average, DTensor):
            value = distribute_tensor(value, average.device_mesh, average.placements)
        average.copy_(value)


def _full(value: Tensor) -> Tensor:
    return full_tensor(value).detach().cpu()


def _untied(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Contiguous copies where tensors share memory (tied weights), which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            value = value.contiguous()
            result[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
            seen.add(value.untyped_storage().data_ptr())
    return result
