"""U-ViT: a vision transformer whose blocks are joined by long skip connections (Bao et al., CVPR 2023).

Everything is a token: time, class, context and image patches. The first half of the blocks sends its outputs over
N = depth // 2 long skips to the second half.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InvalidConfigError, InvalidInputError
from ..scaling.base import UNSCALED, Constants, Scaling, SkipScaling, SkipSite, as_scaling
from ..scaling.baselines import ResidualSpec, require_merge_start, validate_residual
from .embedding import PositionEmbedding, patch_grid, timestep_embedding, unpatchify
from .official import load_official_, official_arguments
from .presets import preset_arguments
from .start import InitStd, initialise_, require_final_start, require_init_std, start_as_identity_
from .transformer import Block, SkipMerge


class UViT(nn.Module):
    """`model(x, t, y=None, context=None)` predicts a tensor of the shape of x.

    `t` has one entry per image, in the units of the network: 0 to 999, not necessarily whole. `classes` counts the
    labels including a null label, if there is one. `context_dim` and `context_length` describe text embeddings.
    `init_std="unit"` starts with unit-gain blocks; a number is the deviation of all linear layers' weights. The
    authors' 0.02, as presets have it, is made for widths of 512 and more: in narrow networks it leaves the inner skips
    almost without effect.
    `merge_start` says how the merges start (see `MERGE_STARTS`): "authors" (random), "identity", "additive" or
    "normalised". The last convolution begins as the identity; `final_start="authors"` gives it the authors' random
    kernel, as presets have it, which all but removes some frequencies until it has been learned away (docs/recipe.md).
    `scaling` is any long-skip scaling (a configuration or a shorthand), `residual_scaling` one of Table 3's baselines.
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
        self.image_size, self.patch_size, self.channels = size, patch_size, channels
        self.dim, self.depth, self.heads = dim, depth, heads
        self.classes, self.context_dim, self.context_length = classes, context_dim, context_length
        self.interpolate_positions, self.checkpointing = interpolate_positions, checkpointing

        def blocks(count: int, merges: bool) -> nn.ModuleList:
            return nn.ModuleList(
                Block(dim, heads, mlp_ratio, qkv_bias, residual_scaling, merges=merges) for _ in range(count)
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
        grid = self._check(x, y, context)
        x = self._embed(x, t, y, context)
        x = x + self.position_embedding(grid)
        skips = []
        for block in self.encoder:
            x = self._run(block, x)
            skips.append(x)
        x = self._run(self.middle, x)
        for position, block in enumerate(self.decoder):
            x = self._run(block, x, *self.skip_scaling.prepare(skips.pop(), len(self.decoder) - position))
        x = self.to_patches(self.norm(x)[:, self.extra_tokens :])
        return self.final_conv(unpatchify(x, grid, self.patch_size, self.channels))

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return block(*inputs)

    def _embed(self, x: Tensor, t: Tensor, y: Tensor | None, context: Tensor | None) -> Tensor:
        """Tokens in the order class, time, context, patches."""
        patches = self.patch_embedding(x).flatten(2).transpose(1, 2)
        t = torch.as_tensor(t, device=x.device).expand(x.shape[0])
        time = timestep_embedding(t, self.dim).to(self.position_embedding.weight.dtype)
        tokens = [self.time_embedding(time).unsqueeze(1)]
        if self.class_embedding is not None:
            tokens.insert(0, self.class_embedding(y).unsqueeze(1))
        if self.context_embedding is not None:
            tokens.append(self.context_embedding(context))
        return torch.cat([*tokens, patches], dim=1)

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
