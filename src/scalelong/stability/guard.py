"""A guard for anyone's loop: it notices a loss that collapses, and takes the network back to before that.

    guard = CollapseGuard(model, optimizer, zero_loss=1.0)
    for batch in batches:
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
        guard.step(loss)

It keeps the weights and the optimiser's state of one good step, in the memory of the CPU or in a folder. When the loss
collapses (`CollapseDetector`) or is not finite, it puts them back, and from then on every step of the optimiser is made
with half the rate. The loop and its schedules go on counting; nothing else of them changes.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attaching import without_records
from ..errors import CheckpointError, CollapseError, InvalidConfigError
from ..files import make_folder
from .alarms import what_to_do
from .collapse import Collapse, CollapseDetector, Spike
from .features import has_bare_merges

logger = logging.getLogger(__name__)

RATE_FACTOR = "scalelong_rate_factor"
"""The attribute of an optimiser that says by how much a guard lowers the rates of its parameter groups."""

Mode = Literal["rollback", "stop", "ignore"]
READ_EVERY = 10
"""Steps between readings of the losses on an accelerator, which must be waited for."""


class CollapseGuard:
    """Watches the loss of a loop and saves it from collapses that stay finite.

    `mode`: "rollback" goes back and on with a lower rate, "stop" raises CollapseError, "ignore" only reports.
    `zero_loss`: the loss of a network that knows nothing: 1 for a network that predicts noise. Left out, it is
    what the first ten steps have.
    `every`: steps between two copies of weights and optimiser state, of which the last one is kept. With Adam it is
    three times as large as the weights, 10 GB for 860 million in float32. None is made while the loss is in trouble.
    `folder`: where the copy is kept; left out, in the memory of the CPU.
    `factor`, `max_rollbacks`: the rate is multiplied by the factor at each rollback, at most so many times; after that
    a collapse raises CollapseError.
    `extra`: other objects with `state_dict` and `load_state_dict` that go back as well: a moving average, a scaler.
    `on_event`: called with each `Collapse` and `Spike`; left out, they are logged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        mode: Mode = "rollback",
        zero_loss: float | None = None,
        every: int = 50,
        folder: str | PathLike[str] | None = None,
        factor: float = 0.5,
        max_rollbacks: int = 3,
        extra: Iterable[Any] = (),
        on_event: Callable[[Collapse | Spike], None] | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise InvalidConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        for name, value, least in (("every", every, 1), ("max_rollbacks", max_rollbacks, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidConfigError(f"{name} must be a whole number, at least {least}, got {value!r}")
        if not 0 < factor <= 1:
            raise InvalidConfigError(f"factor must be above 0 and at most 1, got {factor!r}")
        # accelerate wraps optimisers in one of its own, which has no hooks.
        while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidConfigError(f"optimizer must be a torch optimiser, got {type(optimizer).__name__}")
        self.model, self.optimizer, self.mode = model, optimizer, mode
        self.every, self.factor, self.max_rollbacks = every, factor, max_rollbacks
        self.extra = list(extra)
        self.detector = CollapseDetector(zero_loss=zero_loss)
        self.worst = CollapseDetector(zero_loss=zero_loss)
        """With several processes: the largest of their losses. A mean over many would hide what is wrong in one."""
        self.folder = None if folder is None else make_folder(Path(folder))
        self.good_step = 0
        """The step whose weights and optimiser state are kept."""
        self._good: dict[str, Any] | None = None
        self.on_event = on_event or (lambda event: logger.warning("%s", event))
        self.steps = 0
        """Steps of the optimiser."""
        self.events: list[Collapse | Spike] = []
        self.rollbacks: list[dict[str, Any]] = []
        self._sum: Tensor | None = None
        self._micro, self._stepped = 0, False
        self._waiting: list[tuple[int, Tensor]] = []
        self._planned: list[Any] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if mode == "rollback":
            self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the optimiser: from now on it makes steps with the full rate."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        vars(self.optimizer).pop(RATE_FACTOR, None)

    @property
    def rate_factor(self) -> float:
        """By how much rollbacks have lowered the rate. Parameter groups go on showing what the schedule plans."""
        return getattr(self.optimizer, RATE_FACTOR, 1.0)

    @rate_factor.setter
    def rate_factor(self, value: float) -> None:
        setattr(self.optimizer, RATE_FACTOR, value)

    @property
    def rates(self) -> list[float]:
        """The learning rates that steps are made with, one per parameter group."""
        return [group["lr"] * self.rate_factor for group in self.optimizer.param_groups if "lr" in group]

    def step(self, loss: Tensor | float) -> Collapse | None:
        """To be called after every backward pass or step of the optimiser. Gives a collapse, if one was found.

        Where gradients are accumulated, the losses of the parts of a step are averaged. All processes must call it.
        """
        value = torch.as_tensor(loss).detach().float().mean()
        self._sum = value if self._sum is None else self._sum + value
        self._micro += 1
        if not self._stepped:
            return None
        self.steps += 1
        self._waiting.append((self.steps, self._sum / self._micro))
        self._sum, self._micro, self._stepped = None, 0, False
        due = self.steps % self.every == 0
        if value.device.type != "cpu" and self.steps % READ_EVERY and not due:
            return None
        found = self._read()
        if found is not None:
            self._act(found)
        elif due and self.mode == "rollback" and self.detector.trouble_since is self.worst.trouble_since is None:
            self._save()
        return found

    # What the detector says

    def _read(self) -> Collapse | None:
        """Judge all losses since the last reading: their means over the processes, which decide together."""
        steps, losses = zip(*self._waiting, strict=True)
        self._waiting = []
        means = torch.stack([loss.to(losses[-1].device) for loss in losses])
        judged = [(self.detector, means)]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            if "nccl" in dist.get_backend():  # it has no CPU tensors, and a loss may be a float
                means = means.to(next(self.model.parameters()).device)
            largest = means.clone()
            dist.all_reduce(means)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            judged = [(self.detector, means / dist.get_world_size()), (self.worst, largest)]
        found, before = None, len(self.events)
        for detector, values in judged:
            for step, value in zip(steps, values.tolist(), strict=True):
                event = detector.add(step, value)
                # What the mean has shown, the largest loss shows as well: it is one event.
                known = self.events[before:] if detector is self.worst else []
                if event is not None and not any(type(each) is type(event) for each in known):
                    self.events.append(event)
                    self.on_event(event)
                    found = found or (event if isinstance(event, Collapse) else None)
        return found

    def _act(self, found: Collapse) -> None:
        if self.mode == "ignore":
            return
        if self.mode == "stop" or len(self.rollbacks) >= self.max_rollbacks:
            tried = f" {len(self.rollbacks)} rollbacks with lower rates did not help." if self.rollbacks else ""
            rate = max(self.rates, default=None)
            raise CollapseError(
                f"step {found.step}: {found}.{tried} The learning rate was "
                f"{'not known' if rate is None else f'{rate:g}'}. {what_to_do(has_bare_merges(self.model), rate)}"
            )
        self._restore()
        self.rate_factor *= self.factor
        entry = {"bad_step": found.step, "began": found.began, "to_step": self.good_step}
        self.rollbacks.append({**entry, "rate_factor": self.rate_factor})
        tried = f"rollback {len(self.rollbacks)} of {self.max_rollbacks}"
        now = f"back to step {self.good_step}, rate now {self.rate_factor:g} of the planned"
        logger.warning("step %d: %s (%s)", found.step, now, tried)

    # The rate: lowered around each step, so that schedules, which set it before, need not know

    def _before_step(self, *_: Any) -> None:
        self._stepped = True
        self._planned = [group.get("lr") for group in self.optimizer.param_groups]
        if self.rate_factor != 1.0:
            for group, planned in zip(self.optimizer.param_groups, self._planned, strict=True):
                if planned is not None:
                    group["lr"] = planned * self.rate_factor

    def _after_step(self, *_: Any) -> None:
        for group, planned in zip(self.optimizer.param_groups, self._planned, strict=False):
            if planned is not None:
                group["lr"] = planned

    # Weights and optimiser

    def _save(self) -> None:
        with without_records():
            model = self.model.state_dict()
        state = {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "extra": [each.state_dict() for each in self.extra],
            "detectors": [self.detector.state_dict(), self.worst.state_dict()],
        }
        self.good_step = self.steps
        if self.folder is None:
            self._good = _on_cpu(state, self._good)  # into the memory of the last one
            return
        path = self._path(self.folder)
        try:
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} could not be written: {error}; make space, or give folder=None") from error

    def _restore(self) -> None:
        saved = self._good if self.folder is None else self._loaded(self._path(self.folder))
        assert saved is not None
        with without_records():
            self.model.load_state_dict(saved["model"])
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(_on_cpu(saved["optimizer"]))  # a copy: it may take tensors as they are
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if rate is not None:  # schedules have gone on meanwhile
                group["lr"] = rate
        self.optimizer.zero_grad()
        for each, state in zip(self.extra, saved["extra"], strict=True):
            each.load_state_dict(_on_cpu(state))
        for detector, state in zip((self.detector, self.worst), saved["detectors"], strict=True):
            detector.load_state_dict(state)

    @staticmethod
    def _path(folder: Path) -> Path:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return folder / f"good-{rank}.pt"

    @staticmethod
    def _loaded(path: Path) -> dict[str, Any]:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch has many
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    # For loops that save and resume themselves

    def state_dict(self) -> dict[str, Any]:
        """The guard's own state, without the copy of the weights, which is made again."""
        return {
            "steps": self.steps,
            "rate_factor": self.rate_factor,
            "rollbacks": copy.deepcopy(self.rollbacks),
            "detector": self.detector.state_dict(),
            "worst": self.worst.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.rate_factor = state["steps"], state["rate_factor"]
        self.rollbacks = copy.deepcopy(state["rollbacks"])
        self.detector.load_state_dict(state["detector"])
        self.worst.load_state_dict(state.get("worst", {}))
        self._waiting, self._sum, self._micro, self._stepped = [], None, 0, False
        if self.mode == "rollback":
            self._save()


def _on_cpu(value: Any, old: Any = None) -> Any:
    """A copy of nested containers, with all tensors on the CPU; in the memory of `old`, as far as it has the same."""
    if isinstance(value, Tensor):
        # A sharded tensor (FSDP2) is a subclass, and is copied as a whole.
        if type(old) is Tensor and old.shape == value.shape and old.dtype == value.dtype:
            return old.copy_(value.detach())
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        return {key: _on_cpu(entry, known.get(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        known = old if isinstance(old, list | tuple) and len(old) == len(value) else [None] * len(value)
        return type(value)(_on_cpu(entry, place) for entry, place in zip(value, known, strict=True))
    return copy.deepcopy(value)
