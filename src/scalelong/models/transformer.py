"""The blocks of U-ViT, and the merge of a long skip into the main path."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..scaling.base import UNSCALED, Constants
from ..scaling.baselines import ResidualBranch, ResidualSpec, start_merge_
from .fused import can_fuse, gated_addition, linear, normed_linear, normed_mlp


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        batch, length, dim = x.shape
        qkv = normed_linear(x, norm, self.qkv) if can_fuse(x, norm, self.qkv) else self.qkv(norm(x))
        qkv = qkv.view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(batch, length, dim)
        return linear(x, self.out) if can_fuse(x, self.out) else self.out(x)


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden)
        self.reduce = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        if can_fuse(x, norm, self.expand, self.reduce):
            return normed_mlp(x, norm, self.expand, self.reduce)
        return self.reduce(F.gelu(self.expand(norm(x))))


class SkipMerge(nn.Linear):
    """W [main ⊕ κ skip] + b, as two products: the concatenation is never made, and a number κ goes into the weights.

    W has D x 2D entries and the features have B x L x D of them, so that costs no pass over the features. A gate
    has a κ for each token or channel.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(2 * dim, dim)
        self.dim = dim

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, main: Tensor, skip: Tensor, factors: Constants, gate: Tensor | None = None
    ) -> Tensor:
        main_weight, skip_weight = self.weight.split(self.dim, dim=1)
        if factors.main != 1.0:
            main_weight = main_weight * factors.main
        if factors.skip != 1.0:
            skip_weight = skip_weight * factors.skip
        if gate is not None and gate.dim() == 0:
            skip_weight, gate = skip_weight * gate, None
        merged = F.linear(main, main_weight, self.bias)
        if gate is not None:
            if can_fuse(skip) and type(self.weight) is nn.Parameter:
                return gated_addition(merged, skip, gate, skip_weight)
            skip = skip * gate.to(skip.dtype)
        return torch.addmm(merged.flatten(0, 1), skip.flatten(0, 1), skip_weight.t()).view_as(merged)

    def start(self, start: str, factors: Constants) -> None:
        main_weight, skip_weight = self.weight.split(self.dim, dim=1)
        start_merge_(main_weight, skip_weight, start, factors)

    @torch.no_grad()
    def fold(self, factors: Constants) -> None:
        self.weight[:, : self.dim] *= factors.main
        self.weight[:, self.dim :] *= factors.skip


class Block(nn.Module):
    """A pre-norm transformer block. In the decoder, a long skip is merged in first."""

    def __init__(
        self, dim: int, heads: int, mlp_ratio: float, qkv_bias: bool, residual_scaling: ResidualSpec, *, merges: bool
    ) -> None:
        super().__init__()
        self.merge = SkipMerge(dim) if merges else None
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, qkv_bias)
        self.attention_residual = ResidualBranch(residual_scaling)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.mlp_residual = ResidualBranch(residual_scaling)

    def forward(
        self, x: Tensor, skip: Tensor | None = None, factors: Constants = UNSCALED, gate: Tensor | None = None
    ) -> Tensor:
        if self.merge is not None and skip is not None:
            x = self.merge(x, skip, factors, gate)
        x = self.attention_residual(x, self.attention(x, self.attention_norm))
        return self.mlp_residual(x, self.mlp(x, self.mlp_norm))
