"""Random numbers as functions of (seed, purpose, step), never of what was drawn before.

So a resumed run sees what it would have seen, two processes see together what one would, and runs of different methods
see the same. The global generators, which a user's dropout may draw from, are saved and restored beside this.
"""

import hashlib
import random
from typing import Any

import torch
from torch import Tensor

NOISE_BLOCK = 16
"""Images per noise generator: a process draws the blocks that it needs, not the whole batch."""


def derived_seed(seed: int, *purpose: str | int) -> int:
    """A seed of its own for each purpose, such as ("noise", step, block)."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(derived_seed(seed, *purpose))


def uniform(seed: int, purpose: str, step: int, count: int) -> Tensor:
    """Numbers in [0, 1), one for each image of the step's batch."""
    return torch.rand(count, generator=generator(seed, purpose, step))


def noise(
    seed: int,
    step: int,
    positions: range,
    shape: tuple[int, ...],
    device: torch.device | str,
    purpose: str = "noise",
) -> Tensor:
    """Standard normal noise for the images at these positions of the step's batch."""
    first, last = positions.start // NOISE_BLOCK, (positions.stop - 1) // NOISE_BLOCK
    blocks = [
        torch.randn(
            (NOISE_BLOCK, *shape), generator=generator(seed, purpose, step, block, device=device), device=device
        )
        for block in range(first, last + 1)
    ]
    start = positions.start - first * NOISE_BLOCK
    return torch.cat(blocks)[start : start + len(positions)]


def seed_global(seed: int, *purpose: str | int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    value = derived_seed(seed, *purpose)
    random.seed(value)
    torch.manual_seed(value)
    _numpy().random.seed(value % 2**32)


def global_state() -> dict[str, Any]:
    """The state of all global generators, in types that torch loads without executing code."""
    name, keys, *rest = _numpy().random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(keys.astype("int64")), *rest],
        "torch": torch.get_rng_state(),
    }
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:  # by its kind: "cuda", "mps", "xpu"
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore_global_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, array, *rest = state["numpy"]
    _numpy().random.set_state((name, array.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def _numpy() -> Any:
    import numpy

    return numpy
