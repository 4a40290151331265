"""U-ViT's arguments, checked before anything is built."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import InvalidConfigError

InitStd = float | Literal["unit"]

FINAL_STARTS = ("authors", "identity")


def refuse_removed(options: Mapping[str, Any]) -> None:
    """Version 0.2 had `self_conditioning` and wrote "none" into its files, which still load."""
    for name, value in options.items():
        if name not in ("self_conditioning", "self_conditioning_rank"):
            raise TypeError(f"UViT got an unexpected keyword argument {name!r}")
        if value not in ("none", None):
            raise InvalidConfigError(f"`{name}`={value!r} was removed: its control did better. Version 0.2 has it")


def require_sizes(
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
    need(all(isinstance(switch, bool) for switch in switches), "qk_norm and merge_norm must be true or false")


def require_init_std(std: Any) -> None:
    number = isinstance(std, int | float) and not isinstance(std, bool) and math.isfinite(std) and std > 0
    if not number and std != "unit":
        raise InvalidConfigError(f'`init_std` must be a number above 0 or "unit", got {std!r}')


def require_final_start(start: Any) -> None:
    if start not in FINAL_STARTS:
        raise InvalidConfigError(f"`final_start` must be one of {', '.join(FINAL_STARTS)}, got {start!r}")
