"""U-ViT: a vision transformer whose blocks are joined by long skip connections (Bao et al., CVPR 2023).

    image ─ patches ─┐
    time, class ─────┼─ tokens ─ encoder 1 … N ─ middle ─ decoder N … 1 ─ norm ─ patches ─ image
    context ─────────┘              └────── κ_i · long skip i ──────┘

Everything is a token: time, class, context and image patches, (B, L, D). The first half of the blocks sends its outputs
over N = depth // 2 long skips to the second half, where each is merged by a linear layer on [main ⊕ κ_i skip]. Below
stand, in this order: tokens, blocks and merges, starts, and the network.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InvalidConfigError, InvalidInputError
from ..files import make_folder, read_bytes, read_json, write_bytes, write_text
from ..scaling.base import UNSCALED, Constants, Scaling, SkipScaling, SkipSite, as_scaling
from ..scaling.baselines import ResidualBranch, ResidualSpec, require_merge_start, start_merge_, validate_residual
from ..skips.host import NativeHost
from .cpu import (
    FusedBlock,
    Numbers,
    fused_block,
    fused_blocks,
    gated_addition,
    is_fusible,
    is_ordinary,
    is_small,
    is_untouched,
    merge_features,
)
from .official import load_official_, official_arguments
from .presets import preset_arguments
from .self_conditioning import SelfConditioning, modulated, require_self_conditioning, saved_kind

# Tokens


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """[cos(t ω_k) ⊕ sin(t ω_k)], ω_k = 10000^(-k/(dim/2)), in fp32."""
    t = t.float()
    frequencies = _kept_frequencies(dim // 2) if is_ordinary(t) else _frequencies(dim // 2, t.device)
    angles = t[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _frequencies(count: int, device: torch.device) -> Tensor:
    return torch.exp(torch.arange(count, device=device, dtype=torch.float32) * (-math.log(10000) / count))


@cache
def _kept_frequencies(count: int) -> Tensor:
    with torch.inference_mode(False):
        return _frequencies(count, torch.device("cpu"))


class PositionEmbedding(nn.Module):
    """One learned vector per token: the extra tokens first, then the patches row by row."""

    def __init__(self, extra_tokens: int, grid: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.extra_tokens, self.grid = extra_tokens, grid
        self.weight = nn.Parameter(torch.empty(1, extra_tokens + grid[0] * grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """For another grid than the one that was learned, the patches' part is interpolated."""
        if grid == self.grid:
            return self.weight
        extra, patches = self.weight[:, : self.extra_tokens], self.weight[:, self.extra_tokens :]
        image = patches.transpose(1, 2).unflatten(2, self.grid).float()
        resized = F.interpolate(image, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([extra, resized.flatten(2).transpose(1, 2).to(extra.dtype)], dim=1)


def patch_grid(x: Tensor, patch_size: int) -> tuple[int, int]:
    height, width = x.shape[2:]
    if height % patch_size or width % patch_size:
        raise InvalidInputError(
            f"images of {height}x{width} cannot be cut into patches of {patch_size}x{patch_size}: "
            f"choose a patch_size that divides both"
        )
    return height // patch_size, width // patch_size


def cut_patches(x: Tensor, patch_size: int) -> Tensor:
    """(..., C, H, W) to (..., rows·columns, C·p·p): a row of a convolution's weights for each patch."""
    *lead, channels, height, width = x.shape
    rows, columns, n = height // patch_size, width // patch_size, len(lead)
    cut = x.reshape(*lead, channels, rows, patch_size, columns, patch_size)
    return cut.permute(*range(n), n + 1, n + 3, n, n + 2, n + 4).reshape(*lead, rows * columns, -1)


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch_size: int, channels: int) -> Tensor:
    """(B, rows·columns, p·p·C) to (B, C, H, W)."""
    rows, columns = grid
    x = tokens.reshape(-1, rows, columns, patch_size, patch_size, channels)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, rows * patch_size, columns * patch_size)


# Blocks, and the merge of a long skip into the main path


Norm = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, qkv_bias: bool, norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)
        self.query_norm = nn.LayerNorm(dim // heads) if norm else None
        self.key_norm = nn.LayerNorm(dim // heads) if norm else None

    def forward(self, x: Tensor, norm: Norm) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(norm(x)).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, length, dim))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden)
        self.reduce = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, norm: Norm) -> Tensor:
        return self.reduce(F.gelu(self.expand(norm(x))))


class SkipMerge(nn.Module):
    """W [main ⊕ κ skip] + b. Large features are not concatenated: there are two products, which take κ along.

    A gate has a κ for each token or channel. It is no `nn.Linear`: tools that adapt or quantise linear layers expect
    those to take one input.

    With norms it is W [norm(main) ⊕ κ norm(skip)] + b. The caller normalises the skip (`norm_skip`) before it is
    scaled: behind κ the norm would divide it out.
    """

    def __init__(self, dim: int, norm: bool = False) -> None:
        super().__init__()
        self.dim = dim
        layer = nn.Linear(2 * dim, dim)
        self.weight, self.bias = layer.weight, layer.bias
        self.main_norm = nn.LayerNorm(dim) if norm else None
        self.skip_norm = nn.LayerNorm(dim) if norm else None

    def forward(self, main: Tensor, skip: Tensor, factors: Constants, gate: Tensor | None = None) -> Tensor:
        """main and skip: (B, L, D); the gate broadcasts against the skip."""
        weight = self.weight
        if self.main_norm is not None:
            main = self.main_norm(main).to(main.dtype)
        if gate is not None and is_small(skip):
            skip, gate = skip * gate.to(skip.dtype), None
        if gate is not None and gate.dim() == 0:
            main_weight, skip_weight = weight.split(self.dim, dim=1)
            weight, gate = torch.cat([main_weight, skip_weight * gate], dim=1), None
        if gate is not None and torch.is_grad_enabled() and is_ordinary(skip) and type(weight) is nn.Parameter:
            main_weight, skip_weight = weight.split(self.dim, dim=1)
            merged = F.linear(main * factors.main if factors.main != 1.0 else main, main_weight, self.bias)
            return gated_addition(merged, skip, gate * factors.skip if factors.skip != 1.0 else gate, skip_weight)
        if gate is not None:
            skip = skip * gate.to(skip.dtype)
        operands = main.flatten(0, 1), skip.flatten(0, 1)
        merged = merge_features(*operands, factors, weight, self.bias, concatenate=is_small(main))
        return merged.view_as(main)

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
        self,
        x: Tensor,
        skip: Tensor | None = None,
        factors: Constants = UNSCALED,
        gate: Tensor | None = None,
        modulation: Tensor | None = None,
    ) -> Tensor:
        """x and skip: (B, L, D); modulation: (B, 4D), scale and shift of both norms (`SelfConditioning`)."""
        # Another class than this (FSDP2 makes one of its own) may look at what goes in and comes out. Fused blocks have
        # one gain for all images, so a modulated one calls its layers.
        may_fuse = modulation is None and type(self) is Block and is_fusible(x)
        if skip is not None:
            fused = self.fused(merges=True) if may_fuse and gate is None else None
            if fused is not None:
                return fused_block(fused, x, skip, factors)
            assert self.merge is not None
            x = self.merge(x, skip, factors, gate)
        fused = self.fused() if may_fuse else None
        if fused is not None:
            return fused_block(fused, x)
        first: Norm = self.attention_norm
        second: Norm = self.mlp_norm
        if modulation is not None:
            scale, shift, mlp_scale, mlp_shift = modulation.chunk(4, dim=-1)
            first, second = modulated(first, scale, shift), modulated(second, mlp_scale, mlp_shift)
        x = self.attention_residual(x, self.attention(x, first))
        return self.mlp_residual(x, self.mlp(x, second))

    def fused(self, merges: bool = False) -> FusedBlock | None:
        """The block as one call, with its merge or without; None if anybody looks at a part of it, or exchanged one.

        This is asked at every call. So parts are taken from their dictionaries: `nn.Module.__getattr__` is slow.
        """
        parts: dict[str, Any] = self._modules
        attention, mlp = parts["attention"], parts["mlp"]
        norms, residuals = (
            (parts["attention_norm"], parts["mlp_norm"]),
            (parts["attention_residual"], parts["mlp_residual"]),
        )
        layers = (*norms, *attention._modules.values(), *mlp._modules.values())
        if not is_untouched((attention, mlp, *residuals, *layers), PARTS) or any(
            each._parameters for each in residuals
        ):
            return None
        if merges:
            merge = parts.get("merge")
            if merge is None or not is_untouched((merge,), MERGE) or merge._modules:
                return None
            layers = (merge, *layers)
        numbers = Numbers(attention.heads, norms[0].eps, norms[1].eps, residuals[0].tau, residuals[1].tau)
        weights = [layer._parameters[name] for layer in layers for name in ("weight", "bias")]
        # Autocast goes with weights of any type, fused blocks with those that it is made for.
        if torch.is_autocast_enabled("cpu") and any(v is not None and v.dtype is not torch.float32 for v in weights):
            return None
        return FusedBlock(numbers, weights)


PARTS: tuple[type[nn.Module], ...] = (Attention, MLP, *2 * (ResidualBranch,), *2 * (nn.LayerNorm,), *4 * (nn.Linear,))
"""All parts of a block that one call replaces, in the order in which it asks for them."""
MERGE: tuple[type[nn.Module], ...] = (SkipMerge,)
BLOCK: tuple[type[nn.Module], ...] = (Block,)
CONVOLUTION: tuple[type[nn.Module], ...] = (nn.Conv2d,)


# The weights before the first step of training

InitStd = float | Literal["unit"]

FINAL_STARTS = ("authors", "identity")

# E[gelu(z)²] for a standard normal z.
GELU_MOMENT = 0.42522


def require_init_std(std: Any) -> None:
    number = isinstance(std, int | float) and not isinstance(std, bool) and math.isfinite(std) and std > 0
    if not number and std != "unit":
        raise InvalidConfigError(f'init_std must be a number above 0 or "unit", got {std!r}')


def require_final_start(start: Any) -> None:
    if start not in FINAL_STARTS:
        raise InvalidConfigError(f"final_start must be one of {', '.join(FINAL_STARTS)}, got {start!r}")


def initialise_(model: nn.Module, std: InitStd) -> None:
    """Draw the weights of all linear layers; convolutions and the class embedding keep torch's defaults.

    A number is the deviation of all weights, as in the authors' code. "unit" gives each layer a gain of 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | SkipMerge):
            deviation = 1 / math.sqrt(module.weight.shape[1]) if std == "unit" else std
            nn.init.trunc_normal_(module.weight, std=deviation)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if std == "unit":
        _unit_gain_(model)


@torch.no_grad()
def _unit_gain_(model: nn.Module) -> None:
    """Unit-gain blocks (g = 1 in the theory), for pre-norm blocks: x + f(norm(x)) has the size of x.

    The branches get gain 1 and are then divided by √(their number), so that all of them together add about as much as
    the features have. The convolution before the blocks keeps the size of the image too.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.attention.out.weight /= math.sqrt(2 * len(blocks))
        block.mlp.reduce.weight /= math.sqrt(2 * len(blocks) * GELU_MOMENT)
    embedding = model.get_submodule("patch_embedding")
    assert isinstance(embedding, nn.Conv2d)
    # torch's default has a variance of 1 / (3 fan_in).
    embedding.weight *= math.sqrt(3)


@torch.no_grad()
def start_as_identity_(layer: nn.Conv2d) -> None:
    """A random 3x3 kernel all but removes some frequencies of the image, which the layers before cannot put back.

    The network then learns its prediction as fast as it learns another kernel, and that depends on the seed.
    """
    nn.init.dirac_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


# The network

WEIGHTS = "model.safetensors"


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
    another network: weights that were trained without it do not load.
    `self_conditioning="middle"` lets the middle's features modulate the decoder's norms, "time" is its control, which
    sees the time alone (`SelfConditioning`). Either begins as the plain network and loads its weights.
    `self_conditioning_rank` is the width of a bottleneck in front, for fewer parameters.
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
        init_std: InitStd = "unit",
        merge_start: str = "authors",
        final_start: str = "identity",
        scaling: Scaling | str | dict[str, Any] | None = None,
        residual_scaling: ResidualSpec = "none",
        qk_norm: bool = False,
        merge_norm: bool = False,
        self_conditioning: str = "none",
        self_conditioning_rank: int | None = None,
        interpolate_positions: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        _validate(size, patch_size, dim, depth, heads, classes, context_dim, context_length)
        validate_residual(residual_scaling)
        require_init_std(init_std)
        require_merge_start(merge_start)
        require_final_start(final_start)
        _require_switches(qk_norm=qk_norm, merge_norm=merge_norm)
        require_self_conditioning(self_conditioning, self_conditioning_rank, dim)
        self.image_size, self.patch_size, self.channels = size, patch_size, channels
        self.dim, self.depth, self.heads = dim, depth, heads
        self.classes, self.context_dim, self.context_length = classes, context_dim, context_length
        self.interpolate_positions, self.checkpointing = interpolate_positions, checkpointing
        self.mlp_ratio, self.qkv_bias, self.time_mlp = mlp_ratio, qkv_bias, time_mlp
        self.residual_scaling, self.qk_norm, self.merge_norm = residual_scaling, qk_norm, merge_norm
        self.init_std = init_std
        self.self_conditioning, self.self_conditioning_rank = self_conditioning, self_conditioning_rank
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
        initialise_(self, init_std)
        if final_start == "identity" and isinstance(self.final_conv, nn.Conv2d):
            start_as_identity_(self.final_conv)
        # After the initialisation of the network: a gate starts where its method says.
        self.skip_scaling: SkipScaling = as_scaling(scaling).build(self.skip_sites())
        for i in range(1, depth // 2 + 1):
            self._merge(i).start(merge_start, self.skip_scaling.constants(i) or UNSCALED)
        # Last of all: what it draws changes no other weight.
        self.modulation = (
            SelfConditioning(self_conditioning, dim, depth // 2, self_conditioning_rank)
            if self_conditioning != "none"
            else None
        )
        NativeHost(self).write_record()

    def skip_sites(self) -> tuple[SkipSite, ...]:
        """The long skips, outermost first."""
        height, width = self.position_embedding.grid
        tokens = self.extra_tokens + height * width
        return tuple(
            SkipSite(
                index=i,
                channels=self.dim,
                channel_axis=-1,
                main_channels=self.dim,
                tokens=tokens,
                fixed_tokens=not self.interpolate_positions,
            )
            for i in range(1, self.depth // 2 + 1)
        )

    def arguments(self) -> dict[str, Any]:
        """`UViT(**model.arguments())` is built and scaled like this one, and takes its state dict."""
        height, width = self.image_size
        return {
            "image_size": height if height == width else [height, width],
            "patch_size": self.patch_size,
            "channels": self.channels,
            "dim": self.dim,
            "depth": self.depth,
            "heads": self.heads,
            "mlp_ratio": self.mlp_ratio,
            "qkv_bias": self.qkv_bias,
            "time_mlp": self.time_mlp,
            "classes": self.classes,
            "context_dim": self.context_dim,
            "context_length": self.context_length,
            "final_conv": isinstance(self.final_conv, nn.Conv2d),
            "scaling": self.skip_scaling.config.to_dict(),
            "residual_scaling": self.residual_scaling,
            "qk_norm": self.qk_norm,
            "merge_norm": self.merge_norm,
            "self_conditioning": self.self_conditioning,
            "self_conditioning_rank": self.self_conditioning_rank,
            "interpolate_positions": self.interpolate_positions,
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
            model = cls(**config)
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
        x = self._embed(x, t, y, context)
        x = x + self.position_embedding(grid)  # (B, L, D)
        *skips, x = self._encode(x)
        x = self._decode(x, skips, self._modulations(x, t))
        x = self.to_patches(self.norm(x)[:, self.extra_tokens :])
        return self.final_conv(unpatchify(x, grid, self.patch_size, self.channels))

    def enable_gradient_checkpointing(self) -> None:
        """Keep the inputs of the blocks only, and compute the rest again in the backward pass."""
        self.checkpointing = True

    def disable_gradient_checkpointing(self) -> None:
        self.checkpointing = False

    def _encode(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs of the encoder's blocks, and of the middle."""
        row = self._row([*self.encoder, self.middle]) if self._takes_rows(x) else None
        if row is not None:
            return fused_blocks(row, x)
        outputs = []
        for block in self.encoder:
            x = self._run(block, x)
            outputs.append(x)
        outputs.append(self._run(self.middle, x))
        return outputs

    def _decode(self, x: Tensor, skips: list[Tensor], modulations: Sequence[Tensor]) -> Tensor:
        row = self._row(self.decoder, merges=True) if not modulations and self._takes_rows(x) else None
        if row is not None:
            prepared = [self._prepared(skips.pop(), index) for index in range(len(skips), 0, -1)]
            scaled = [(skip if gate is None else skip * gate, factors) for skip, factors, gate in prepared]
            return fused_blocks(row, x, *zip(*scaled, strict=True))[-1]
        for position, block in enumerate(self.decoder):
            prepared = self._prepared(skips.pop(), len(self.decoder) - position)
            x = self._run(block, x, *prepared, *modulations[position : position + 1])
        return x

    def _prepared(self, skip: Tensor, index: int) -> tuple[Tensor, Constants, Tensor | None]:
        """A skip, and the constants and the gate that its merge multiplies by."""
        return self.skip_scaling.prepare(self._merge(index).norm_skip(skip) if self.merge_norm else skip, index)

    def _takes_rows(self, x: Tensor) -> bool:
        """Small blocks are called in rows."""
        return is_small(x) and is_fusible(x) and not (self.checkpointing and torch.is_grad_enabled())

    def _row(self, blocks: Iterable[nn.Module], merges: bool = False) -> list[FusedBlock] | None:
        """Blocks as one call; None if anybody looks at any of them."""
        row, trained = [], torch.is_grad_enabled()
        for block in blocks:
            fused = block.fused(merges) if is_untouched((block,), BLOCK) and isinstance(block, Block) else None
            # Where weights are frozen, autograd may stop early, which a row does not.
            if fused is None or (trained and not all(v is None or v.requires_grad for v in fused.weights)):
                return None
            row.append(fused)
        return row

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return block(*inputs)

    def _modulations(self, middle: Tensor, t: Tensor) -> list[Tensor]:
        """One for each decoder block; empty without self-conditioning."""
        if self.modulation is None:
            return []
        if self.self_conditioning == "time":
            return self.modulation(self._sinusoid(middle, t))
        return self.modulation(middle[:, self.extra_tokens :].mean(dim=1))

    def _sinusoid(self, x: Tensor, t: Tensor) -> Tensor:
        """(B, D), in the type of the weights."""
        if not isinstance(t, Tensor) or t.shape != x.shape[:1] or t.device != x.device:
            t = torch.as_tensor(t, device=x.device).expand(x.shape[0])
        return timestep_embedding(t, self.dim).to(self.position_embedding.weight.dtype)

    def _embed(self, x: Tensor, t: Tensor, y: Tensor | None, context: Tensor | None) -> Tensor:
        """Tokens in the order class, time, context, patches."""
        patches = self._patches(x)
        tokens = [self.time_embedding(self._sinusoid(x, t)).unsqueeze(1)]
        if self.class_embedding is not None:
            tokens.insert(0, self.class_embedding(y).unsqueeze(1))
        if self.context_embedding is not None:
            tokens.append(self.context_embedding(context))
        return torch.cat([*tokens, patches], dim=1)

    def _patches(self, x: Tensor) -> Tensor:
        """(B, rows · columns, D)."""
        layer, size = self.patch_embedding, (self.patch_size, self.patch_size)
        # If the kernel is as large as its step, the convolution is a product. The gradient of that takes less time.
        if not (
            torch.is_grad_enabled()
            and is_ordinary(x)
            and is_untouched((layer,), CONVOLUTION)
            and layer.kernel_size == layer.stride == size
            and (layer.padding, layer.dilation, layer.groups) == ((0, 0), (1, 1), 1)
        ):
            return layer(x).flatten(2).transpose(1, 2)
        return F.linear(cut_patches(x, self.patch_size), layer.weight.flatten(1), layer.bias)

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
        kind = saved_kind(state_dict, f"{prefix}modulation.")
        if kind is not None and self.modulation is None:
            error_msgs.append(
                f"the weights were trained with self_conditioning={kind!r}, and this network has none: build it with "
                f"UViT(..., self_conditioning={kind!r})"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _check(self, x: Tensor, y: Tensor | None, context: Tensor | None) -> tuple[int, int]:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise InvalidInputError(f"x must be (B, {self.channels}, H, W), got {tuple(x.shape)}")
        if tuple(x.shape[2:]) != self.image_size and not self.interpolate_positions:
            raise InvalidInputError(
                f"this U-ViT was built for images of {self.image_size[0]}x{self.image_size[1]} and got "
                f"{x.shape[2]}x{x.shape[3]}; set interpolate_positions=True to interpolate its position embeddings"
            )
        if (y is None) != (self.classes is None):
            raise InvalidInputError(
                "this U-ViT is class-conditional: pass labels y"
                if y is None
                else "this U-ViT has no classes (classes=None), but labels y were passed"
            )
        if (context is None) != (self.context_dim is None):
            raise InvalidInputError(
                "this U-ViT is conditioned on a context: pass context"
                if context is None
                else "this U-ViT takes no context (context_dim=None), but a context was passed"
            )
        if context is not None and tuple(context.shape[1:]) != (self.context_length, self.context_dim):
            raise InvalidInputError(
                f"context must be (B, {self.context_length}, {self.context_dim}), got {tuple(context.shape)}"
            )
        return patch_grid(x, self.patch_size)


def _require_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidConfigError(f"{name} must be true or false, got {value!r}")


def _validate(
    size: tuple[int, ...],
    patch_size: int,
    dim: int,
    depth: int,
    heads: int,
    classes: int | None,
    context_dim: int | None,
    context_length: int | None,
) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise InvalidConfigError(message)

    need(len(size) == 2 and all(side >= 1 for side in size), f"image_size must be one or two sizes, got {size}")
    need(patch_size >= 1, f"patch_size must be at least 1, got {patch_size}")
    need(
        all(side % patch_size == 0 for side in size), f"image_size {size} must be a multiple of patch_size {patch_size}"
    )
    need(dim >= 2 and dim % 2 == 0, f"dim must be even, got {dim}")
    need(heads >= 1 and dim % heads == 0, f"dim {dim} must be a multiple of heads {heads}")
    need(depth >= 2, f"depth must be at least 2, so that there is a long skip, got {depth}")
    need(classes is None or classes >= 1, f"classes must be at least 1, or None, got {classes}")
    need(
        (context_dim is None) == (context_length is None),
        f"context_dim and context_length go together, got {context_dim} and {context_length}",
    )
