"""Notice a non-finite loss or gradient before it reaches the weights.

On an accelerator nobody waits for the numbers of each step: a flag on the device makes AdamW skip its update from the
first bad step on, and the flag is read every few steps. So the weights are still those before the bad step.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

READ_EVERY = 10
"""Most steps between two looks at the flag on an accelerator."""

SMALLEST_SCALE = 1.0
"""fp16: gradients that overflow are normal while the loss scale falls to its place, but not below this."""


class Guard:
    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        group = optimizer.param_groups[0]
        # Sharded parameters (FSDP2) do not go together with a flag that is not sharded.
        self._can_flag = group["fused"] and not any(isinstance(value, DTensor) for value in group["params"])
        self.reset()

    def reset(self) -> None:
        self._bad = torch.zeros((), device=self.device)
        self._first = torch.full((), -1, dtype=torch.long, device=self.device)

    def protect(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Before the optimiser's step: from the first non-finite numbers on, no update happens."""
        bad = torch.logical_not(torch.isfinite(norm) & torch.isfinite(loss))
        self._first = torch.where(bad & (self._first < 0), step, self._first)
        self._bad = torch.maximum(self._bad, bad.float())
        if self._can_flag:
            # What torch's gradient scaler sets, too; only the fused AdamW reads it.
            self.optimizer.found_inf = self._bad  # pyright: ignore[reportAttributeAccessIssue]
        elif self._bad:
            self.optimizer.zero_grad()  # without gradients a step does nothing

    def bad_step(self) -> int | None:
        """The first step with non-finite numbers, if there was one. Waits for the device."""
        first = int(self._first)
        return None if first < 0 else first


class ScaledGuard(Guard):
    """For fp16, whose gradient scaler skips steps that overflow: only a collapsed scale or a bad loss is a failure."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler) -> None:
        super().__init__(optimizer, device)
        self.scaler = scaler

    def protect(self, step: int, loss: Tensor, norm: Tensor) -> None:
        collapsed = not torch.isfinite(norm) and self.scaler.get_scale() <= SMALLEST_SCALE
        if collapsed or not torch.isfinite(loss):
            self._first = torch.where(self._first < 0, step, self._first)


def make_guard(optimizer: torch.optim.Optimizer, device: torch.device, scaler: torch.amp.GradScaler | None) -> Guard:
    return Guard(optimizer, device) if scaler is None else ScaledGuard(optimizer, device, scaler)
