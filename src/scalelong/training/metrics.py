"""What a run records between two lines of metrics, without waiting for the device."""

from typing import Any

import torch
from torch import Tensor


class Window:
    """Sums of loss and gradient norm. They are part of a checkpoint, so that a resumed run records the same numbers."""

    def __init__(self, device: torch.device) -> None:
        self.kind = torch.float32 if device.type == "mps" else torch.float64
        self.device = device
        self.load([0.0, 0.0, 0.0, 0.0])

    def load(self, values: list[float]) -> None:
        """Steps, sum of losses, sum and maximum of gradient norms."""
        self.values = torch.tensor(values, dtype=self.kind, device=self.device)

    def save(self) -> list[float]:
        return self.values.tolist()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        loss, norm = loss.to(self.kind), norm.to(self.kind)
        one = torch.ones((), dtype=self.kind, device=self.device)
        self.values[:3] += torch.stack([one, loss, norm])
        self.values[3] = torch.maximum(self.values[3], norm)

    def close(self) -> dict[str, Any]:
        """The means, and a fresh start."""
        steps, loss, norm, largest = self.save()
        self.load([0.0, 0.0, 0.0, 0.0])
        return {"loss": loss / steps, "gradient_norm": norm / steps, "gradient_norm_max": largest}
