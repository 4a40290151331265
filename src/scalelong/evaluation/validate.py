"""Samples are looked at before they are scored: a score of broken images is a number that means nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidSamplesError

TOLERANCE = 1e-3


def validate_samples(images: Tensor, shape: tuple[int, int, int], count: int | None = None) -> Tensor:
    """uint8 images (N, C, H, W), from uint8 or from floats in [-1, 1]."""
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        raise InvalidSamplesError(f"samples must be (N, {', '.join(map(str, shape))}), got {tuple(images.shape)}")
    if count is not None and len(images) != count:
        raise InvalidSamplesError(f"{count} samples are needed and {len(images)} are there")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InvalidSamplesError(f"samples must be uint8, or floats in [-1, 1], got {images.dtype}")
    finite = torch.isfinite(images).flatten(1).all(dim=1)
    if not bool(finite.all()):
        broken = (~finite).nonzero().flatten().tolist()
        raise InvalidSamplesError(
            f"{len(broken)} of {len(images)} samples are not finite, the first is number {broken[0]}; the model or the "
            f"sampler is broken"
        )
    low, high = float(images.min()), float(images.max())
    if low < -1 - TOLERANCE or high > 1 + TOLERANCE:
        raise InvalidSamplesError(
            f"samples must lie in [-1, 1] and reach from {low:.3g} to {high:.3g}; clip or rescale them"
        )
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
