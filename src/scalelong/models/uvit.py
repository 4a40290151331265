"""U-ViT: a vision transformer whose blocks are joined by long skip connections (Bao et al., CVPR 2023).

    image ─ patches ─┐
    time, class ─────┼─ tokens ─ encoder 1 … N ─ middle ─ decoder N … 1 ─ norm ─ patches ─ image
    context ─────────┘              └────── κ_i · long skip i ──────┘

Everything is a token: time, class, context and image patches, (B, L, D). The first half of the blocks sends its outputs
over N = depth // 2 long skips to the second half, where each is merged by a linear layer on [main ⊕ κ_i skip]. Below
stand blocks and merges, and then the network. `cpu.fuse_` makes it faster on a CPU.
"""

import json
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
from ..errors import InvalidConfigError, InvalidInputError
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
from .arguments import InitStd, refuse_removed, require_final_start, require_init_std, require_sizes
from .official import load_official_, official_arguments
from .presets import preset_arguments
from .starts import draw_weights_, start_as_identity_, unit_gain_
from .tokens import PositionEmbedding, timestep_embedding, unpatchify

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
    multiplied into the weights.

    It is no `nn.Linear`: tools that adapt or quantise linear layers expect those to take one input.

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
        main_weight, skip_weight = self.weight.split(self.dim, dim=1)
        start_merge_(main_weight, skip_weight, start, factors)

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

WEIGHTS = "model.safetensors"

_STORED = (
    *("patch_size", "channels", "dim", "depth", "heads", "mlp_ratio", "qkv_bias", "time_mlp", "classes"),
    *("context_dim", "context_length", "residual_scaling", "qk_norm", "merge_norm", "interpolate_positions"),
)
"""Arguments of the network that are attributes of the same name."""


class UViT(nn.Module):
    """`model(x, t, y=None, context=None)` predicts a tensor of the shape of x.

    `t` has one entry per image, in the units of the network: 0 to 999, not necessarily whole. `classes` counts the
    labels including a null label, if there is one. `context_dim` and `context_length` describe text embeddings.
    `init_std="unit"` starts with unit-gain blocks; a number is the deviation of all linear layers' weights. The
    authors' 0.02, as presets have it, is made for widths of 512 and more: in narrow networks it leaves the inner skips
    almost without effect.
    `merge_start` says how the merges start (see `MERGE_STARTS`): "authors" (random), "identity", "additive" or
    "normalised". The last convolution begins as the identity; `final_start="authors"` gives it the authors' random
    kernel, as presets have it, which nearly removes some frequencies until it is learned away (docs/evidence/recipe).
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
        refuse_removed(removed)
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        require_sizes(size, patch_size, dim, depth, heads, classes, context_dim, context_length, qk_norm, merge_norm)
        validate_residual(residual_scaling)
        require_init_std(init_std)
        require_merge_start(merge_start)
        require_final_start(final_start)
        self.image_size, self.patch_size, self.channels = size, patch_size, channels
        self.dim, self.depth, self.heads = dim, depth, heads
        self.classes, self.context_dim, self.context_length = classes, context_dim, context_length
        self.interpolate_positions, self.checkpointing = interpolate_positions, checkpointing
        self.mlp_ratio, self.qkv_bias, self.time_mlp = mlp_ratio, qkv_bias, time_mlp
        self.residual_scaling, self.qk_norm, self.merge_norm = residual_scaling, qk_norm, merge_norm
        self.init_std = init_std
        norms = {"qk_norm": qk_norm, "merge_norm": merge_norm}

        def blocks(count: int, merges: bool) -> nn.ModuleList:
            return nn.ModuleList(
                Block(dim, heads, mlp_ratio, qkv_bias, residual_scaling, merges=merges, **norms) for _ in range(count)
            )

        self.patch_embedding = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.time_embedding = (
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)) if time_mlp else nn.Identity()
        )
        self.class_embedding = nn.Embedding(classes, dim) if classes else None
        self.context_embedding = nn.Linear(context_dim, dim) if context_dim else None
        grid = (size[0] // patch_size, size[1] // patch_size)
        self.extra_tokens = 1 + (1 if classes else 0) + (context_length or 0)
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

        place, tensors = make_folder(folder), self.state_dict()
        write_bytes(place / WEIGHTS, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))
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
        model.load_state_dict(load(read_bytes(Path(folder) / WEIGHTS)))
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
        block = self.decoder[len(self.decoder) - index]
        assert isinstance(block, Block)
        assert block.merge is not None
        return block.merge

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """x: (B, C, H, W), t: (B,), y: (B,) labels, context: (B, context_length, context_dim)."""
        grid = self._check(x, y, context)
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
        return torch.cat([*tokens, self._patches(x)], dim=1)

    def _patches(self, x: Tensor) -> Tensor:
        """(B, rows · columns, D)."""
        return self.patch_embedding(x).flatten(2).transpose(1, 2)

    def _blocks(self, x: Tensor) -> Tensor:
        """Encoder, middle and decoder, (B, L, D)."""
        skips = []
        for block in self.encoder:
            x = self._run(block, x)
            skips.append(x)
        x = self._run(self.middle, x)
        for position, block in enumerate(self.decoder):
            x = self._run(block, *self._operands(x, skips.pop(), len(self.decoder) - position))
        return x

    def _operands(self, main: Tensor, skip: Tensor, index: int) -> tuple[Tensor, Tensor, Constants, Tensor | None]:
        """Main path and skip as they enter merge i, and the constants and the gate that it multiplies by."""
        return self.skip_scaling.operands(main, self._merge(index).norm_skip(skip), index)

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return block(*inputs)

    def enable_gradient_checkpointing(self) -> None:
        """Keep the inputs of the blocks only, and compute the rest again in the backward pass."""
        self.checkpointing = True

    def disable_gradient_checkpointing(self) -> None:
        self.checkpointing = False

    def _check(self, x: Tensor, y: Tensor | None, context: Tensor | None) -> tuple[int, int]:
        """The number of patches in both directions; raises on inputs that do not fit."""
        size, patch = tuple(x.shape[2:]), self.patch_size
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise InvalidInputError(f"x must be (B, {self.channels}, H, W), got {tuple(x.shape)}")
        if size != self.image_size and not self.interpolate_positions:
            raise InvalidInputError(
                f"this U-ViT was built for images of {self.image_size} and got {size}; set interpolate_positions=True "
                f"to interpolate its position embeddings"
            )
        for name, given, wanted in (("labels y", y, self.classes), ("context", context, self.context_dim)):
            if (given is None) != (wanted is None):
                takes, got = ("takes no", "were passed") if wanted is None else ("needs", "are missing")
                raise InvalidInputError(f"this U-ViT {takes} {name}, and they {got}")
        if context is not None and tuple(context.shape[1:]) != (self.context_length, self.context_dim):
            raise InvalidInputError(
                f"context must be (B, {self.context_length}, {self.context_dim}), got {tuple(context.shape)}"
            )
        if size[0] % patch or size[1] % patch:
            raise InvalidInputError(f"images of {size} cannot be cut into patches of {patch}x{patch}")
        return size[0] // patch, size[1] // patch
