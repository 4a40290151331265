"""The state of a run in memory: weights, AdamW and its rate, the moving average, the guard, and the snapshot of it all.

Saving (`snapshot`) and loading (`restore`) stand at the end, one below the other.
"""

import math
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
from ..models import Denoiser, fuse_
from ..mup import LR_SCALE
from ..randomness import global_state, restore_global_state, seed_global
from ..runs import RunData, Snapshot, full_tensor, gather_objects, mup_kinds, uses_channels_last
from .optimizers import averages_itself, falling, make_optimizer

# pyright: reportPrivateImportUsage=false

# The moving average


class Ema:
    """w̄ ← w̄ + (1 - rate) (w - w̄), after every step. Frozen parameters are averaged too, which keeps them.

    `tracks` are averages of other lengths that are kept beside it (`runs/averages.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        batch_size: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.config, self.batch_size = config, batch_size
        self.lender = optimizer if optimizer is not None and averages_itself(optimizer) else None
        """An optimiser whose own average is taken."""
        self.length = None if config.ema_length is None else AverageLength.parse(config.ema_length)
        self.names = [name for name, _ in model.named_parameters()]
        self.weights: list[Tensor] = [parameter for _, parameter in model.named_parameters()]
        self.averages: list[Tensor] = [
            weight.detach().clone(memory_format=torch.preserve_format).float() for weight in self.weights
        ]
        plain = all(weight.dtype is torch.float32 and not isinstance(weight, DTensor) for weight in self.weights)
        self._same = [weight.detach() for weight in self.weights] if plain else []
        """The weights themselves, which stay where they are in memory; empty if they must be converted each time."""
        lengths = [AverageLength.parse(length) for length in config.ema_lengths]
        self.tracks = {length: [average.clone() for average in self.averages] for length in lengths}
        """The averages of other lengths."""

    def rate(self, step: int) -> float:
        if self.length is not None:
            return self.length.rate(step, self.batch_size, self.config.ema_warmup)
        if self.config.ema_warmup:
            return min(self.config.ema_rate, (1 + step) / (10 + step))
        return self.config.ema_rate

    @torch.no_grad()
    def update(self, step: int) -> None:
        weights = self._float_weights()
        if self.lender is None:
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
        self.borrow()
        weights = self._float_weights()
        difference = _norm(torch._foreach_sub(self.averages, weights))
        return difference / _norm(weights).clamp_min(torch.finfo(torch.float32).tiny)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights, within a `with` block."""
        self.borrow()
        with torch.no_grad():
            kept = [weight.detach().clone(memory_format=torch.preserve_format) for weight in self.weights]
            _copy(self.weights, self.averages)
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(self.weights, kept)

    @torch.no_grad()
    def borrow(self) -> None:
        """Take the average that a schedule-free optimiser holds. The weights are as before, to the last bit."""
        if self.lender is None:
            return
        kept = [weight.detach().clone(memory_format=torch.preserve_format) for weight in self.weights]
        self.lender.eval()  # pyright: ignore[reportAttributeAccessIssue]
        _copy(self.averages, self.weights)
        self.lender.train()  # pyright: ignore[reportAttributeAccessIssue]
        _copy(self.weights, kept)

    def _float_weights(self) -> list[Tensor]:
        return self._same or [weight.detach().float() for weight in self.weights]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # One by one: torch._foreach_copy_ does not know sharded tensors.
    for to, source in zip(targets, sources, strict=True):
        to.copy_(source)


def _norm(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return full_tensor(torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(list(tensors))))))


# Numbers that are not finite are noticed before they reach the weights.
#
# An accelerator is not made to wait for the numbers of each step: they are kept on the device and read every few steps.
# From the first bad step on no update happens, so the weights are still those from before it.

READ_EVERY = 10
"""Most steps between two readings on an accelerator."""

SMALLEST_SCALE = 1.0
"""fp16: gradients that overflow are normal while the loss scale falls to its place, but not below this."""


class BadSteps:
    """The first step whose loss or gradient was not finite, kept on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.seen = torch.zeros((), device=self.device)
        """1 from the first bad step on."""
        self._first = torch.full((), -1, dtype=torch.long, device=self.device)

    def add(self, step: int, bad: Tensor) -> None:
        self._first = torch.where(bad & (self._first < 0), step, self._first)
        self.seen = torch.maximum(self.seen, bad.float())

    def first(self) -> int | None:
        """The first bad step, if there was one. Waits for the device."""
        first = int(self._first)
        return None if first < 0 else first


def skip_if_not_finite(
    bad: BadSteps, optimizer: torch.optim.Optimizer, scaler: Any, step: int, loss: Tensor, norm: Tensor
) -> None:
    """Call it before the optimiser's step: from the first numbers that are not finite on, the step does nothing."""
    if scaler is not None:
        # fp16: the scaler itself skips gradients that overflow, and lowers its scale. Only a bad loss is a failure, or
        # an overflow at the smallest scale.
        collapsed = ~torch.isfinite(norm) & (scaler.get_scale() <= SMALLEST_SCALE)
        bad.add(step, collapsed | ~torch.isfinite(loss))
        return
    bad.add(step, ~(torch.isfinite(norm) & torch.isfinite(loss)))
    if _takes_flag(optimizer):
        # The fused AdamW skips its update by a flag on the device, the one that torch's gradient scaler sets.
        optimizer.found_inf = bad.seen  # pyright: ignore[reportAttributeAccessIssue]
    elif bad.seen:
        # Others have no such flag, and neither have sharded parameters (FSDP2): without gradients a step does nothing.
        optimizer.zero_grad()


def _takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    return all(
        group.get("fused") and not any(isinstance(value, DTensor) for value in group["params"][:1])
        for group in optimizer.param_groups
    )


# AdamW, and its rate as a function of the step


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.AdamW


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's moments before its first step, so that saving and loading see them at every step alike."""
    if not is_adamw(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step: linear warm-up, then constant or a decay to zero."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "constant":
        return config.lr * warm
    end = config.decay_steps or steps
    progress = min(1.0, max(0.0, (step - config.warmup) / max(1, end - config.warmup)))
    if config.decay in ("linear", "cosine"):
        share = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = falling(config, step - config.warmup, max(1, end - config.warmup))
    return config.lr * warm * share


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups. A group with an entry "lr_scale" gets that many times the rate."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(LR_SCALE, 1.0)


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that `set_rate` was given."""
    group = min(optimizer.param_groups, key=lambda group: LR_SCALE in group)  # one without a factor, if there is one
    return group["lr"] / group.get(LR_SCALE, 1.0)


@torch.no_grad()
def clip_gradient(parameters: list[nn.Parameter], largest: float | None) -> Tensor:
    """The norm of the gradient before clipping."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # torch's own sorts gradients by device and type first, which takes longer than the norms of small ones.
    kinds = {(gradient.device, gradient.dtype, isinstance(gradient, DTensor)) for gradient in gradients}
    quick = len(kinds) == 1 and not isinstance(gradients[0], DTensor)
    norm = _norm(gradients) if quick else torch.nn.utils.get_total_norm(gradients)
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
    """What the detector of collapses knows."""
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
    create_state(optimizer)
    if not is_adamw(optimizer) and any(isinstance(value, DTensor) for value in bare.parameters()):
        raise InvalidConfigError(f"--optimizer {config.optimizer.optimizer} cannot be sharded (FSDP2): take adamw")
    if averages_itself(optimizer):
        optimizer.train()  # pyright: ignore[reportAttributeAccessIssue]
    seed_global(config.seed, "process", accelerator.process_index)
    return TrainState(
        accelerator=accelerator,
        bare=bare,
        model=model,
        network=Denoiser(bare, model),
        bare_network=Denoiser(bare),
        optimizer=optimizer,
        prepared_optimizer=prepared_optimizer,
        ema=Ema(bare, config.optimizer, config.batch_size, optimizer),
        channels_last=channels_last,
        data=data,
    )


# Full tensors on the CPU of the main process, whether they are sharded (FSDP2) or not.
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True)


def snapshot(state: TrainState) -> Snapshot:
    """All processes take part; the result is complete on the main one."""
    state.ema.borrow()
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
        if is_adamw(state.optimizer)
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
        _restore_averages(state, saved)
        scales = [group.get(LR_SCALE) for group in state.optimizer.param_groups]
        if is_adamw(state.optimizer):
            set_optimizer_state_dict(state.bare, state.optimizer, training["optimizer"], options=_SCATTER)
        else:
            state.optimizer.load_state_dict(training["optimizer"])
        for group, scale in zip(state.optimizer.param_groups, scales, strict=True):
            if scale is not None:  # how rates relate is up to the configuration, not to the checkpoint
                group[LR_SCALE] = scale
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of step {saved.step} does not fit the model ({in_words(error)}): restore the "
            f"folder, or train anew with another --out"
        ) from error
    if state.accelerator.scaler is not None and training["scaler"]:
        state.accelerator.scaler.load_state_dict(training["scaler"])
    process, states = state.accelerator.process_index, training["random"]
    if len(states) == state.accelerator.num_processes:
        restore_global_state(states[process])
    else:  # other processes than before: dropout goes on with other numbers
        seed_global(seed, "process", process, saved.step)
    state.step, state.seconds, state.window = training["step"], training["seconds"], list(training["window"])
    # Checkpoints of earlier versions have neither.
    state.collapse, state.best = dict(training.get("collapse", {})), dict(training.get("best", {}))


@torch.no_grad()
def _restore_averages(state: TrainState, saved: Snapshot) -> None:
    places = [(average, saved.ema, name) for name, average in zip(state.ema.names, state.ema.averages, strict=True)]
    for length, averages in state.ema.tracks.items():
        names = [f"{length}/{name}" for name in state.ema.names]
        places += [(average, saved.averages, name) for name, average in zip(names, averages, strict=True)]
    for average, source, name in places:
        value = source[name].to(average.device)
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
        if not isinstance(value, Tensor):
            continue
        value = value.contiguous()
        result[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(value.untyped_storage().data_ptr())
    return result
