"""U-ViT's arguments and inputs, checked, and the weights that it starts with."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, InvalidInputError

if TYPE_CHECKING:
    from .uvit import UViT

InitStd = float | Literal["unit"]

FINAL_STARTS = ("authors", "identity")


def check_sizes(
    size: tuple[int, ...],
    patch_size: int,
    dim: int,
    depth: int,
    heads: int,
    classes: int | None,
    context_dim: int | None,
    context_length: int | None,
    *switches: Any,
) -> None:
    for condition, message in (
        (len(size) == 2 and all(side >= 1 for side in size), f"image_size must be one or two sizes, got {size}"),
        (patch_size >= 1, f"patch_size must be at least 1, got {patch_size}"),
        (
            patch_size < 1 or all(side % patch_size == 0 for side in size),
            f"image_size {size} must be a multiple of patch_size {patch_size}",
        ),
        (dim >= 2 and dim % 2 == 0, f"dim must be even, got {dim}"),
        (heads >= 1 and dim % heads == 0, f"dim {dim} must be a multiple of heads {heads}"),
        (depth >= 2, f"depth must be at least 2, so that there is a long skip, got {depth}"),
        (classes is None or classes >= 1, f"classes must be at least 1, or None, got {classes}"),
        (
            (context_dim is None) == (context_length is None),
            f"context_dim and context_length go together, got {context_dim} and {context_length}",
        ),
        (all(isinstance(switch, bool) for switch in switches), "qk_norm and merge_norm must be true or false"),
    ):
        if not condition:
            raise InvalidConfigError(message)


def check_starts(init_std: Any, final_start: Any, removed: Mapping[str, Any]) -> None:
    """Version 0.2 had `self_conditioning` and wrote "none" into its files, which still load."""
    number = isinstance(init_std, int | float) and not isinstance(init_std, bool) and 0 < init_std < math.inf
    if not number and init_std != "unit":
        raise InvalidConfigError(f'`init_std` must be a number above 0 or "unit", got {init_std!r}')
    if final_start not in FINAL_STARTS:
        raise InvalidConfigError(f"`final_start` must be one of {', '.join(FINAL_STARTS)}, got {final_start!r}")
    for name, value in removed.items():
        if name not in ("self_conditioning", "self_conditioning_rank"):
            raise TypeError(f"UViT got an unexpected keyword argument {name!r}")
        if value not in ("none", None):
            raise InvalidConfigError(f"`{name}`={value!r} was removed: its control did better. Version 0.2 has it")


def check_inputs(model: "UViT", x: Tensor, y: Tensor | None, context: Tensor | None) -> tuple[int, int]:
    """The number of patches in both directions; raises on inputs that do not fit."""
    size, patch = tuple(x.shape[2:]), model.patch_size
    if x.dim() != 4 or x.shape[1] != model.channels:
        raise InvalidInputError(f"x must be (B, {model.channels}, H, W), got {tuple(x.shape)}")
    if size != model.image_size and not model.interpolate_positions:
        raise InvalidInputError(
            f"this U-ViT was built for images of {model.image_size} and got {size}; set interpolate_positions=True "
            f"to interpolate its position embeddings"
        )
    for name, given, wanted in (("labels y", y, model.classes), ("context", context, model.context_dim)):
        if (given is None) != (wanted is None):
            takes, got = ("takes no", "were passed") if wanted is None else ("needs", "are missing")
            raise InvalidInputError(f"this U-ViT {takes} {name}, and they {got}")
    if context is not None and tuple(context.shape[1:]) != (model.context_length, model.context_dim):
        raise InvalidInputError(
            f"context must be (B, {model.context_length}, {model.context_dim}), got {tuple(context.shape)}"
        )
    if size[0] % patch or size[1] % patch:
        raise InvalidInputError(f"images of {size} cannot be cut into patches of {patch}x{patch}")
    return size[0] // patch, size[1] // patch


# The weights before the first step of training

# E[gelu(z)²] for a standard normal z.
GELU_MOMENT = 0.42522


def draw_weights_(layers: Iterable[Any], std: InitStd) -> None:
    """Draw the weights of linear layers and merges; convolutions and the class embedding keep torch's defaults.

    A number is the deviation of all weights, as in the authors' code. "unit" gives each layer a gain of 1.
    """
    for layer in layers:
        deviation = 1 / math.sqrt(layer.weight.shape[1]) if std == "unit" else std
        nn.init.trunc_normal_(layer.weight, std=deviation)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def unit_gain_(blocks: Sequence[Any], embedding: nn.Conv2d) -> None:
    """Unit-gain blocks (g = 1 in the theory), for pre-norm blocks: x + f(norm(x)) has the size of x.

    The branches get gain 1 and are then divided by √(their number), so that all of them together add about as much as
    the features have. The convolution before the blocks keeps the size of the image too.
    """
    for block in blocks:
        block.attention.out.weight /= math.sqrt(2 * len(blocks))
        block.mlp.reduce.weight /= math.sqrt(2 * len(blocks) * GELU_MOMENT)
    # torch's default has a variance of 1 / (3 fan_in).
    embedding.weight *= math.sqrt(3)


@torch.no_grad()
def start_as_identity_(layer: nn.Conv2d) -> None:
    """A random 3x3 kernel all but removes some frequencies of the image, which the layers before cannot put back.

    The network then learns its prediction as fast as it learns a different kernel, and that depends on the seed.
    """
    nn.init.dirac_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
