"""The calibration networks ζ of learnable scaling (Eq. 9, Table 2), from pooled features to logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": F.relu,
    "elu": F.elu,
    "mish": F.mish,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FullPrecisionModule(nn.Module):
    """Its parameters stay in fp32 when the model around it goes to half precision."""

    def _apply(self, fn, recurse: bool = True):
        def keep_precision(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.dtype in (torch.float16, torch.bfloat16) and tensor.dtype not in (
                torch.float16,
                torch.bfloat16,
            ):
                return tensor.to(changed.device)
            return changed

        return super()._apply(keep_precision, recurse)


class SqueezeExcite(FullPrecisionModule):
    """ζ(p) = W_2 act(W_1 p + b_1) + b_2 with a bottleneck of width/ratio, at least 1 (SE, the paper's choice)."""

    def __init__(self, width: int, ratio: int, activation: str, start_flat: bool) -> None:
        super().__init__()
        hidden = max(width // ratio, 1)
        self.reduce = nn.Linear(width, hidden)
        self.expand = nn.Linear(hidden, width)
        self.activation = activation
        if start_flat:
            nn.init.zeros_(self.expand.weight)
            nn.init.zeros_(self.expand.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        return _linear(ACTIVATIONS[self.activation](_linear(pooled, self.reduce)), self.expand)


class InstanceEnhance(FullPrecisionModule):
    """ζ(p) = w ⊙ p + b, one weight and one bias per channel (IE). Both start at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.addcmul(self.bias.float(), self.weight.float(), pooled)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    # .float() is free for fp32 weights, and undoes what FSDP's mixed precision does to them.
    return F.linear(x, layer.weight.float(), layer.bias.float())
