"""Self-conditioning: a pooled feature of the network modulates the norms of its decoder, after DDAE++.

    z = norm(mean over patches of the middle's output)              (B, D)
    (s_1, b_1, s_2, b_2) = W_i z + c_i                              one layer for decoder block i; zero at first
    attention_norm(x)·(1 + s_1) + b_1,   mlp_norm(x)·(1 + s_2) + b_2

So at the start the network is the plain one, bit for bit. z has one vector per image, so that the arithmetic is that of
one token: 4 N / ((26 N + 12) L) more for N decoder blocks and L tokens, below 1 % from 16 tokens on. The parameters are
more: 4 D² a block. A rank r puts one shared layer D → r in front, and 4 r D a block remain.

The paper's code (Xiang et al., arXiv 2505.10999) was not public when this was written. Which layer is pooled, how, and
where it enters are choices of ours. `"time"` is the control: the same layers on the sinusoid of the time, normalised
alike, which knows nothing of the image. Patches alone are pooled: the time token would tell z the time as well.

This is not the self-conditioning of analog bits, which feeds the last estimate of x_0 back and runs a network twice.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidConfigError

SELF_CONDITIONINGS = ("none", "middle", "time")

logger = logging.getLogger(__name__)


def require_self_conditioning(kind: Any, rank: Any, dim: int) -> None:
    if kind not in SELF_CONDITIONINGS:
        raise InvalidConfigError(f"self_conditioning must be one of {', '.join(SELF_CONDITIONINGS)}, got {kind!r}")
    if rank is None:
        return
    if kind == "none":
        raise InvalidConfigError(
            f"self_conditioning_rank={rank!r} belongs to self_conditioning, which is 'none': choose 'middle' or 'time'"
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= dim:
        raise InvalidConfigError(
            f"self_conditioning_rank must be a whole number from 1 to the width {dim}, or None for no bottleneck, "
            f"got {rank!r}"
        )


class SelfConditioning(nn.Module):
    """From the middle's features, or the time's, (B, D), to one modulation (B, 4D) for each decoder block.

    The layers bear the name of what they read ("middle" or "time"): weights of one do not load as the other.
    """

    def __init__(self, kind: str, dim: int, blocks: int, rank: int | None = None) -> None:
        super().__init__()
        self.kind, self.dim = kind, dim
        self.bottleneck = None if rank is None else nn.Linear(dim, rank, bias=False)
        if self.bottleneck is not None:
            nn.init.trunc_normal_(self.bottleneck.weight, std=dim**-0.5)
        self.add_module(kind, nn.ModuleList(nn.Linear(rank or dim, 4 * dim) for _ in range(blocks)))
        for parameter in self.layers().parameters():
            nn.init.zeros_(parameter)

    def layers(self) -> nn.ModuleList:
        found = self._modules[self.kind]
        assert isinstance(found, nn.ModuleList)
        return found

    def forward(self, source: Tensor) -> list[Tensor]:
        z = F.layer_norm(source, (self.dim,))
        if self.bottleneck is not None:
            z = self.bottleneck(z)
        return [layer(z) for layer in self.layers()]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Weights of a plain network are this one's with zero layers. Those of the other kind are not."""
        saved = [name for name in state_dict if name.startswith(prefix)]
        if not saved:
            logger.warning(
                "the weights are of a network without self-conditioning: its %d layers begin at zero, and the "
                "network computes what the plain one did",
                len(self.layers()),
            )
            for name, value in self.state_dict(prefix=prefix).items():
                # A network without storage yet gets its zeros on the CPU.
                device = "cpu" if value.is_meta else value.device
                zeros = torch.zeros(value.shape, dtype=value.dtype, device=device)
                state_dict[name] = value if name == f"{prefix}bottleneck.weight" else zeros
        other = saved_kind(saved, prefix)
        if other not in (None, self.kind):
            error_msgs.append(
                f"the weights were trained with self_conditioning={other!r}, and this network has {self.kind!r}: "
                f"build it with the former"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def saved_kind(names: Any, prefix: str) -> str | None:
    """What the weights of these names were conditioned on; None if there are none of self-conditioning."""
    kinds = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return next((kind for kind in SELF_CONDITIONINGS if kind in kinds), None)


def modulated(norm: nn.Module, scale: Tensor, shift: Tensor) -> Any:
    """norm(x)·(1 + s) + b for each image: x is (B, L, D), s and b are (B, D)."""
    gain, offset = (1 + scale).unsqueeze(1), shift.unsqueeze(1)
    return lambda x: norm(x) * gain + offset
