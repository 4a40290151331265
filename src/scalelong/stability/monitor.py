"""How stable a training run is, from within anyone's loop: `StabilityMonitor`.

    with StabilityMonitor(model, every=10, probe_batch=(x, t), path="stability.jsonl") as monitor:
        for batch in batches:
            loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
            monitor.step(loss)

Between readings nothing but the loss is touched. At a reading, sizes of features, gradients and updates stay on their
device until all of them are read at once, so that an accelerator waits once per reading, never once per step.

`step` gives a reading where one is due, for whatever logs it; with `path` they go into a JSON Lines file as well.
"""

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..attaching import host_of
from ..errors import ExampleInputsError, InvalidConfigError, NotScaledError
from ..files import append_json_line, make_folder, read_json_lines, write_json_lines
from ..finding import ExampleInputs, SkipPlan, example_call, unwrap
from .alarms import Alarm, AlarmDetector
from .features import (
    Meter,
    attach_meter,
    block_names,
    has_bare_merges,
    measure,
    on_device_of,
    parameters_by_block,
    plan_for,
)
from .guard import RATE_FACTOR

logger = logging.getLogger(__name__)

Reading = Mapping[str, float]
WIDE = 1e30
"""Formats whose largest number is above this (all but fp16) hold any activation that trains."""


class StabilityMonitor:
    """Per long skip and per block: features, gradients, updates and coefficients, with alarms.

    `every`: steps between readings.
    `probe_batch`: arguments of the model (a tuple, or a dictionary of keywords) on which features are read as well; it
    stays the same, so that what changes is the network.
    `plan`: the long skips, if they are not to be found by `find_skips` on the probe batch.
    `path`: a JSON Lines file for readings. A run that goes on from an earlier step replaces what was written after it.
    `zero_loss`: the loss of a network that knows nothing, 1 where ε is predicted; left out, that of the first steps.
    `on_alarm`: called with each alarm; left out, alarms are logged as warnings.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        probe_batch: ExampleInputs = None,
        plan: SkipPlan | None = None,
        path: str | PathLike[str] | None = None,
        zero_loss: float | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise InvalidConfigError(f"every must be a whole number of steps, at least 1, got {every!r}")
        self.host, self.every = unwrap(model), every
        try:
            self.plan = plan or plan_for(model, probe_batch)
        except ExampleInputsError as error:
            raise ExampleInputsError(str(error).replace("example_inputs", "probe_batch")) from error
        self.probe_call = None
        if probe_batch is not None:
            self.probe_call = on_device_of(self.host, *example_call(self.host, probe_batch))
        self.path = None if path is None else Path(path)
        self.on_alarm = on_alarm or (lambda alarm: logger.warning("%s", alarm))
        self.alarms: list[Alarm] = []
        self.history: list[dict[str, float]] = []
        self.steps = 0
        self._detector = AlarmDetector(zero_loss)
        self._meter = Meter(training_only=True)
        self._remove_hooks = weakref.finalize(self, _remove, attach_meter(self.host, self.plan, self._meter))
        self._updates = UpdateWatch(parameters_by_block(self.host, block_names(self.host, self.plan)))
        self._losses: list[Tensor] = []
        self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off the model and the optimisers."""
        self._remove_hooks()
        self._updates.close()

    def step(self, loss: Tensor | float | None = None, *, step: int | None = None) -> dict[str, float] | None:
        """To be called after every optimiser step. Gives the reading where one is due, otherwise None.

        `step` is the number of steps done, where that is not the number of calls (a resumed run).
        """
        self.steps = self.steps + 1 if step is None else step
        if loss is not None:
            self._losses.append(torch.as_tensor(loss).detach().float().mean())
        reading = self._read() if self.steps % self.every == 0 else None
        self._arm()
        return reading

    def begin_at(self, step: int) -> None:
        """Go on after a step: of a run that is resumed, or that went back to a checkpoint."""
        self.steps = step
        self._losses = []
        self._arm()

    def _arm(self) -> None:
        """Read during the step before a reading, and in no other."""
        due = (self.steps + 1) % self.every == 0
        self._meter.on = self._updates.on = due
        if due:
            self._meter.clear()
            self._updates.clear()

    def _read(self) -> dict[str, float]:
        on_device = {**self._coefficients(), **_features(self._meter, ""), **self._updates.readings()}
        on_device |= _largest(self._meter)
        if self.probe_call is not None:
            on_device |= _features(measure(self.host, self.plan, *self.probe_call), "probe_")
        # All losses since the last reading go along, under their numbers.
        on_device |= {f"losses/{number}": loss for number, loss in enumerate(self._losses)}
        reading = _to_numbers(on_device)
        losses = [reading.pop(f"losses/{number}") for number in range(len(self._losses))]
        self._losses = []
        if losses:
            # Sums and maxima keep NaN, so a single bad step shows.
            largest = math.nan if any(map(math.isnan, losses)) else max(losses)
            reading |= {"loss": sum(losses) / len(losses), "loss_max": largest}
        self._publish(reading, losses)
        return reading

    def _publish(self, reading: dict[str, float], losses: list[float]) -> None:
        self.history.append({"step": self.steps, **reading})
        bare = has_bare_merges(self.host, self.plan)
        alarms = self._detector.check(self.steps, reading, losses=losses, lr=self._updates.lr, bare=bare)
        self.alarms += alarms
        if self.path is not None:
            self._write(self.path, reading, alarms)
        for alarm in alarms:
            self.on_alarm(alarm)

    def _write(self, path: Path, reading: Reading, alarms: Sequence[Alarm]) -> None:
        if len(self.history) == 1:
            make_folder(path.parent)
            known = read_json_lines(path) if path.exists() else []
            write_json_lines(path, [line for line in known if line.get("step", self.steps) < self.steps])
        # JSON knows no NaN: a number that is not finite is written as null.
        line: dict[str, Any] = {"step": self.steps}
        line |= {name: value if math.isfinite(value) else None for name, value in reading.items()}
        if alarms:
            line["alarms"] = [{"kind": alarm.kind, "where": alarm.where, "message": str(alarm)} for alarm in alarms]
        append_json_line(path, line)

    def _coefficients(self) -> dict[str, Tensor | float]:
        """κ_i of the most recent forward; 1 where the model is not scaled."""
        scaling = host_of(self.host).scaling
        found: dict[str, Tensor | float] = {}
        for skip in self.plan:
            try:
                value = 1.0 if scaling is None else scaling.coefficient(skip.index)
            except NotScaledError:  # a coefficient that depends on the data, before the first forward
                continue
            found[f"kappa/{skip.index}"] = value.mean() if isinstance(value, Tensor) else value
        return found


def _features(meter: Meter, prefix: str) -> dict[str, Tensor | float]:
    found: dict[str, Tensor | float] = {f"{prefix}skip_rms/{i}": meter.skips[i][0] for i in sorted(meter.skips)}
    found |= {f"{prefix}block_rms/{name}": size[0] for name, size in meter.blocks.items()}
    return found | {f"{prefix}similarity/{name}": value for name, value in meter.alike.items()}


def _largest(meter: Meter) -> dict[str, Tensor]:
    """The largest activation of all blocks, and the least room that the dtype of one of them leaves; NaN stays NaN."""
    if not meter.blocks:
        return {}
    device = next(iter(meter.blocks.values())).device
    peaks = {name: size[1].to(device) for name, size in meter.blocks.items()}
    narrow = [meter.limits[name] / peak.clamp(min=1e-30) for name, peak in peaks.items() if meter.limits[name] < WIDE]
    found = {"activation_max": torch.stack([*peaks.values()]).max()}
    return found | ({"headroom": torch.stack(narrow).min()} if narrow else {})


def _to_numbers(values: dict[str, Tensor | float]) -> dict[str, float]:
    """All device tensors in one transfer per device."""
    result: dict[str, float] = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append((name, value))
    for entries in by_device.values():
        numbers = torch.stack([value.float().reshape(()) for _, value in entries]).tolist()
        result |= dict(zip((name for name, _ in entries), numbers, strict=True))
    return {name: result[name] for name in values}


# Gradient norms and relative updates per block, around the steps of whatever optimiser trains the model


class UpdateWatch:
    """While `on`, keeps the norms of gradients, weights and updates of the next optimiser step, on the device."""

    def __init__(self, groups: dict[str, list[nn.Parameter]]) -> None:
        self.on = False
        self.lr: float | None = None
        """The learning rate of the last step that was read, the highest of all groups."""
        self._block_of = {id(parameter): name for name, group in groups.items() for parameter in group}
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self.clear()
        # Hooks of all optimisers: the loop need not say which one is its own. They are global, so they hold this object
        # weakly, and go when nothing else holds it: a monitor that was dropped must not keep the model.
        handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(_weakly(self._before_step)),
            register_optimizer_step_post_hook(_weakly(self._after_step)),
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        self._norms: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
        """By kind ("gradient", "weight" or "update") and block."""

    def close(self) -> None:
        self._remove_hooks()

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.on:
            return
        rate = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=None)
        # A guard that has gone back lowers the rate for the step alone.
        self.lr = None if rate is None else rate * getattr(optimizer, RATE_FACTOR, 1.0)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None and id(parameter) in self._block_of:
                gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
                self._add("gradient", parameter, gradient)
                self._add("weight", parameter, parameter.detach())
                self._before.append((parameter, parameter.detach().clone()))

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for parameter, before in self._before:
            # In place: a reading needs one copy of the weights.
            self._add("update", parameter, before.sub_(parameter.detach()))
        self._before = []

    def _add(self, kind: str, parameter: nn.Parameter, value: Tensor) -> None:
        wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else None
        norm = torch.linalg.vector_norm(value, dtype=wide)
        # A sharded tensor (FSDP2) gives the norm of all shards; its class is slow to import.
        whole = getattr(norm, "full_tensor", None)
        self._norms[kind, self._block_of[id(parameter)]].append(norm if whole is None else whole())

    def readings(self) -> dict[str, Tensor]:
        """Norms of blocks, from those of their parameters; nothing is read from the device here."""
        norms = {key: _joint(found) for key, found in self._norms.items()}
        result = {f"gradient_norm/{block}": norm for (kind, block), norm in norms.items() if kind == "gradient"}
        if result:
            result["gradient_norm/all"] = _joint(list(result.values()))
        for (kind, block), norm in norms.items():
            if kind == "update":
                weight = norms["weight", block]
                result[f"update_ratio/{block}"] = norm / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        return result


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that does nothing once the object of the method is gone."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _joint(norms: list[Tensor]) -> Tensor:
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
