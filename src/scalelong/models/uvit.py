"""U-ViT: a vision transformer whose blocks are joined by long skip connections (Bao et al., CVPR 2023).

    image ─ patches ─┐
    time, class ─────┼─ tokens ─ encoder 1 … N ─ middle ─ decoder N … 1 ─ norm ─ patches ─ image
    context ─────────┘              └────── κ_i · long skip i ──────┘

Everything is a token: time, class, context and image patches, (B, L, D). The first half of the blocks sends its outputs
over N = depth // 2 long skips to the second half, where each is merged by a linear layer on [main ⊕ κ_i skip]. Below
stand blocks and merges, and then the network. `cpu.fuse_` makes it faster on a CPU.
"""

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attaching import NativeHost
from ..config import EARLIER, NEW_UVIT
from ..errors import InvalidConfigError
from ..files import make_folder, read_bytes, read_json, write_bytes, write_text
from ..scaling import (
    UNSCALED,
    Constants,
    ResidualBranch,
    ResidualSpec,
    Scaling,
    SkipScaling,
    SkipSite,
    as_scaling,
    require_merge_start,
    start_merge_,
    validate_residual,
)
from .arguments import InitStd, check_inputs, check_sizes, check_starts, draw_weights_, start_as_identity_, unit_gain_
from .official import load_official_, official_arguments
from .presets import preset_arguments

# Images, times and positions as tokens


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """[cos(t ω_k) ⊕ sin(t ω_k)], ω_k = 10000^(-k/(dim/2)), in fp32."""
    count = dim // 2
    frequencies = torch.exp(torch.arange(count, device=t.device, dtype=torch.float32) * (-math.log(10000) / count))
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class PositionEmbedding(nn.Module):
    """One learned vector per token: the extra tokens first, then the patches row by row."""

    def __init__(self, extra_tokens: int, grid: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.extra_tokens, self.grid = extra_tokens, grid
        self.weight = nn.Parameter(torch.empty(1, extra_tokens + grid[0] * grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """For a different grid than the one that was learned, the patches' part is interpolated."""
        if grid == self.grid:
            return self.weight
        extra, patches = self.weight[:, : self.extra_tokens], self.weight[:, self.extra_tokens :]
        image = patches.transpose(1, 2).unflatten(2, self.grid).float()
        resized = F.interpolate(image, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([extra, resized.flatten(2).transpose(1, 2).to(extra.dtype)], dim=1)


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch_size: int, channels: int) -> Tensor:
    """(B, rows·columns, p·p·C) to (B, C, H, W)."""
    rows, columns = grid
    x = tokens.reshape(-1, rows, columns, patch_size, patch_size, channels)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, rows * patch_size, columns * patch_size)


# Blocks, and the merge of a long skip into the main path


class Attention(nn.Module):
    """Self-attention of all tokens, with LayerNorm on queries and keys if `norm`."""

    def __init__(self, dim: int, heads: int, qkv_bias: bool, norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)
        self.query_norm = nn.LayerNorm(dim // heads) if norm else None
        self.key_norm = nn.LayerNorm(dim // heads) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, length, dim))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden)
        self.reduce = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(F.gelu(self.expand(x)))


class SkipMerge(nn.Module):
    """W [f_main main ⊕ f_skip gate skip] + b, as two products: the concatenation is never made, and the factors are
    multiplied into the weights. It is no `nn.Linear`: tools that adapt or quantise those expect one input.

    With norms it is W [norm(main) ⊕ κ norm(skip)] + b. The caller normalises the skip (`norm_skip`) before it is
    scaled: after κ the norm would divide it out.
    """

    def __init__(self, dim: int, norm: bool = False) -> None:
        super().__init__()
        self.dim = dim
        layer = nn.Linear(2 * dim, dim)
        self.weight, self.bias = layer.weight, layer.bias
        self.main_norm = nn.LayerNorm(dim) if norm else None
        self.skip_norm = nn.LayerNorm(dim) if norm else None

    def forward(self, main: Tensor, skip: Tensor, factors: Constants, gate: Tensor | None = None) -> Tensor:
        """main and skip: (B, L, D); the gate has a κ for each token or channel and broadcasts against the skip."""
        if self.main_norm is not None:
            main = self.main_norm(main).to(main.dtype)
        if gate is not None:
            skip = skip * gate.to(skip.dtype)
        main_weight, skip_weight = self.weight.split(self.dim, dim=1)
        merged = F.linear(main, main_weight if factors.main == 1.0 else main_weight * factors.main, self.bias)
        return merged + F.linear(skip, skip_weight if factors.skip == 1.0 else skip_weight * factors.skip)

    def norm_skip(self, skip: Tensor) -> Tensor:
        """The skip as it goes to the scaling."""
        return skip if self.skip_norm is None else self.skip_norm(skip).to(skip.dtype)

    def start(self, start: str, factors: Constants) -> None:
        start_merge_(self.weight[:, : self.dim], self.weight[:, self.dim :], start, factors)

    @torch.no_grad()
    def fold(self, factors: Constants) -> None:
        self.weight[:, : self.dim] *= factors.main
        self.weight[:, self.dim :] *= factors.skip


class Block(nn.Module):
    """A pre-norm transformer block. In the decoder, a long skip is merged in first."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        residual_scaling: ResidualSpec,
        *,
        merges: bool,
        qk_norm: bool = False,
        merge_norm: bool = False,
    ) -> None:
        super().__init__()
        self.merge = SkipMerge(dim, merge_norm) if merges else None
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, qkv_bias, qk_norm)
        self.attention_residual = ResidualBranch(residual_scaling)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.mlp_residual = ResidualBranch(residual_scaling)

    def forward(
        self, x: Tensor, skip: Tensor | None = None, factors: Constants = UNSCALED, gate: Tensor | None = None
    ) -> Tensor:
        """x and skip: (B, L, D)."""
        if skip is not None:
            assert self.merge is not None
            x = self.merge(x, skip, factors, gate)
        x = self.attention_residual(x, self.attention(self.attention_norm(x)))
        return self.mlp_residual(x, self.mlp(self.mlp_norm(x)))


# The network

_STORED = (
    *("patch_size", "channels", "dim", "depth", "heads", "mlp_ratio", "qkv_bias", "time_mlp", "classes"),
    *("context_dim", "context_length", "residual_scaling", "qk_norm", "merge_norm", "interpolate_positions"),
)
"""Arguments of the network that are attributes of the same name."""


class UViT(nn.Module):
    """`model(x, t, y=None, context=None)` predicts a tensor of the shape of x.

    `t` has one entry per image, in the units of the network: 0 to 999, not necessarily whole. `classes` counts the
    labels including a null label, if there is one. `context_dim` and `context_length` describe text embeddings.
    `init_std="unit"` starts with unit-gain blocks; a number is the deviation of all weights. The authors' 0.02, as
    presets have it, is for widths of 512 and more: in narrow networks it leaves the inner skips almost without effect.
    `merge_start` is how the merges start: "authors" (random), "identity", "additive" or "normalised". The last
    convolution begins as the identity, or with the authors' random kernel, as in presets (`final_start="authors"`).
    `scaling` is any long-skip scaling (a configuration or a shorthand), `residual_scaling` one of Table 3's baselines.
    `qk_norm` puts LayerNorm on queries and keys, head by head; `merge_norm` on both inputs of every merge. Either is
    a different network: weights that were trained without it do not load.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        channels: int = 3,
        dim: int = 512,
        depth: int = 12,
        heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        time_mlp: bool = False,
        classes: int | None = None,
        context_dim: int | None = None,
        context_length: int | None = None,
        final_conv: bool = True,
        init_std: InitStd = NEW_UVIT["init_std"],
        merge_start: str = "authors",
        final_start: str = "identity",
        scaling: Scaling | str | dict[str, Any] | None = None,
        residual_scaling: ResidualSpec = NEW_UVIT["residual_scaling"],
        qk_norm: bool = False,
        merge_norm: bool = False,
        interpolate_positions: bool = False,
        checkpointing: bool = False,
        **removed: Any,
    ) -> None:
        super().__init__()
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        check_sizes(size, patch_size, dim, depth, heads, classes, context_dim, context_length, qk_norm, merge_norm)
        check_starts(init_std, final_start, removed)
        validate_residual(residual_scaling)
        require_merge_start(merge_start)
        self.image_size, self.patch_size, self.channels = size, patch_size, channels
        self.dim, self.depth, self.heads = dim, depth, heads
        self.classes, self.context_dim, self.context_length = classes, context_dim, context_length
        self.interpolate_positions, self.checkpointing = interpolate_positions, checkpointing
        self.mlp_ratio, self.qkv_bias, self.time_mlp = mlp_ratio, qkv_bias, time_mlp
        self.residual_scaling, self.init_std = residual_scaling, init_std
        self.qk_norm, self.merge_norm = qk_norm, merge_norm
        options = (dim, heads, mlp_ratio, qkv_bias, residual_scaling)
        norms = {"qk_norm": qk_norm, "merge_norm": merge_norm}

        def blocks(count: int, merges: bool) -> nn.ModuleList:
            return nn.ModuleList(Block(*options, merges=merges, **norms) for _ in range(count))

        self.patch_embedding = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.time_embedding = (
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)) if time_mlp else nn.Identity()
        )
        self.class_embedding = nn.Embedding(classes, dim) if classes else None
        self.context_embedding = nn.Linear(context_dim, dim) if context_dim else None
        self.extra_tokens = 1 + (1 if classes else 0) + (context_length or 0)
        grid = (size[0] // patch_size, size[1] // patch_size)
        self.position_embedding = PositionEmbedding(self.extra_tokens, grid, dim)
        self.encoder = blocks(depth // 2, merges=False)
        self.middle = blocks(1, merges=False)[0]
        self.decoder = blocks(depth // 2, merges=True)
        self.norm = nn.LayerNorm(dim)
        self.to_patches = nn.Linear(dim, patch_size**2 * channels)
        self.final_conv = nn.Conv2d(channels, channels, 3, padding=1) if final_conv else nn.Identity()
        draw_weights_([m for m in self.modules() if isinstance(m, nn.Linear | SkipMerge)], init_std)
        if init_std == "unit":
            unit_gain_([m for m in self.modules() if isinstance(m, Block)], self.patch_embedding)
        if final_start == "identity" and isinstance(self.final_conv, nn.Conv2d):
            start_as_identity_(self.final_conv)
        # After the initialisation of the network: a gate starts where its method says.
        self.skip_scaling: SkipScaling = as_scaling(scaling).build(self.skip_sites())
        for i in range(1, depth // 2 + 1):
            self._merge(i).start(merge_start, self.skip_scaling.constants(i) or UNSCALED)
        NativeHost(self).write_record()

    def skip_sites(self) -> tuple[SkipSite, ...]:
        """The long skips, outermost first."""
        height, width = self.position_embedding.grid
        tokens = self.extra_tokens + height * width
        shape: dict[str, Any] = {"channels": self.dim, "channel_axis": -1, "main_channels": self.dim, "tokens": tokens}
        shape["fixed_tokens"] = not self.interpolate_positions
        shape["norm"] = "LayerNorm on both operands (merge_norm=True)" if self.merge_norm else ""
        return tuple(SkipSite(index=i, **shape) for i in range(1, self.depth // 2 + 1))

    def arguments(self) -> dict[str, Any]:
        """`UViT(**model.arguments())` is built and scaled like this one, and takes its state dict."""
        height, width = self.image_size
        return {
            "image_size": height if height == width else [height, width],
            **{name: getattr(self, name) for name in _STORED},
            "final_conv": isinstance(self.final_conv, nn.Conv2d),
            "scaling": self.skip_scaling.config.to_dict(),
        }

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write config.json and model.safetensors, with the scaling. `UViT.from_pretrained(folder)` reads them."""
        from safetensors.torch import save

        place = make_folder(folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        write_bytes(place / "model.safetensors", save(tensors))
        config = {"_class_name": type(self).__name__, **self.arguments()}
        write_text(place / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> Self:
        """The network that `save_pretrained` wrote, in evaluation mode. No code of the folder is run."""
        from safetensors.torch import load

        config = read_json(Path(folder) / "config.json")
        if not isinstance(config, dict) or config.pop("_class_name", None) != cls.__name__:
            raise InvalidConfigError(f"{folder} was not written by {cls.__name__}.save_pretrained")
        try:
            model = cls(**{**EARLIER, **config})
        except TypeError as error:
            raise InvalidConfigError(f"{Path(folder) / 'config.json'} does not fit {cls.__name__}: {error}") from error
        model.load_state_dict(load(read_bytes(Path(folder) / "model.safetensors")))
        return model.eval()

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """A network of the paper or its parent by name, for example `UViT.preset("cifar10-s2", scaling="cs")`."""
        return cls(**{**preset_arguments(name), **overrides})

    @classmethod
    def from_official(
        cls,
        weights: Mapping[str, Tensor] | str | PathLike[str],
        *,
        scaling: Scaling | str | dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Self:
        """A checkpoint of U-ViT's or ScaleLong's authors, with the arguments of their constructor.

        `scaling` says how the long skips were scaled in training: learned gates are taken from the file.
        """
        model = cls(**official_arguments(arguments), scaling=scaling)
        load_official_(model, weights)
        return model

    def fold_skip(self, index: int, factors: Constants) -> None:
        """Multiply the weights of merge i by the factors, which is exactly a multiplication of its operands."""
        self._merge(index).fold(factors)

    def _merge(self, index: int) -> SkipMerge:
        block: Any = self.decoder[len(self.decoder) - index]
        return block.merge

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """x: (B, C, H, W), t: (B,), y: (B,) labels, context: (B, context_length, context_dim)."""
        grid = check_inputs(self, x, y, context)
        tokens = self._embed(x, t, y, context) + self.position_embedding(grid)  # (B, L, D)
        tokens = self._blocks(tokens)
        patches = self.to_patches(self.norm(tokens)[:, self.extra_tokens :])
        return self.final_conv(unpatchify(patches, grid, self.patch_size, self.channels))

    def _embed(self, x: Tensor, t: Tensor, y: Tensor | None, context: Tensor | None) -> Tensor:
        """Tokens in the order class, time, context, patches."""
        if not isinstance(t, Tensor) or t.shape != x.shape[:1] or t.device != x.device:
            t = torch.as_tensor(t, device=x.device).expand(x.shape[0])
        time = timestep_embedding(t, self.dim).to(self.position_embedding.weight.dtype)
        tokens = [self.time_embedding(time).unsqueeze(1)]
        if self.class_embedding is not None:
            tokens.insert(0, self.class_embedding(y).unsqueeze(1))
        if self.context_embedding is not None:
            tokens.append(self.context_embedding(context))
        patches = self.patch_embedding(x).flatten(2).transpose(1, 2)  # (B, rows · columns, D)
        return torch.cat([*tokens, patches], dim=1)

    def _blocks(self, x: Tensor) -> Tensor:
        """Encoder, middle and decoder, (B, L, D)."""
        skips = []
        for block in self.encoder:
            x = self._run(block, x)
            skips.append(x)
        x = self._run(self.middle, x)
        for position, block in enumerate(self.decoder):
            index = len(self.decoder) - position
            skip = self._merge(index).norm_skip(skips.pop())
            # Both as they enter merge i, and the constants and the gate that it multiplies by.
            x = self._run(block, *self.skip_scaling.operands(x, skip, index))
        return x

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return block(*inputs)

    def enable_gradient_checkpointing(self) -> None:
        """Keep the inputs of the blocks only, and compute the rest again in the backward pass."""
        self.checkpointing = True
