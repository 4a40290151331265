"""The arithmetic of a step: matrix products, convolutions and attention, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# pyright: reportPrivateUsage=false


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def count_flops(step: Callable[[], object]) -> float:
    """Floating-point operations of one step, two for each multiplication and addition.

    Attention is counted as plain products, so that what a fused kernel computes twice in backward counts once.
    """
    counter = FlopCounterMode(display=False, custom_mapping={_FLASH: _forward, _FLASH_BACKWARD: _backward})
    with sdpa_kernel(SDPBackend.MATH), counter:
        step()
    return float(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """QKᵀ and its product with V, of shapes (B, H, L, D)."""
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[2] * (dim + value[3])


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ARG001
    return 2 * _forward(query, key, value)
