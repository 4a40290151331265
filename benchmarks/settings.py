"""How a measurement is made: its settings, the networks that are measured, and what can go wrong."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidConfigError, ScaleLongError

# What can go wrong while measuring.


class BenchmarkError(ScaleLongError, RuntimeError):
    """A contender failed, or a file of results cannot be used."""


class OfficialCheckoutError(ScaleLongError, ValueError):
    """The folder given as the authors' code is not a checkout of it, or lacks a package."""


# A folder with the authors' code.

FILES = ("libs/uvit.py", "libs/timm.py", "sde.py", "utils.py")


def checkout(path: str | Path) -> Path:
    root = Path(path)
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        raise OfficialCheckoutError(
            f"{root} is not a checkout of the authors' code: it has no {', '.join(missing)}. Clone "
            f"github.com/sail-sg/ScaleLong or github.com/baofff/U-ViT and give that folder to --official"
        )
    return root


# How a measurement is made.

QUICK_ROUNDS = 2


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    threads: int
    quick: bool = False
    """Tiny networks and few rounds: to see that it works. The figures mean little."""
    rounds: int | None = None
    """Instead of each case's own number."""
    official: Path | None = None
    """A checkout of the authors' code."""
    run: Path | None = None
    """A trained run, for the sampling benchmark."""
    target: float | None = None
    """The Fréchet distance that samples should reach."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise InvalidConfigError(f"--threads must be at least 1, got {self.threads}")
        if self.rounds is not None and self.rounds < 1:
            raise InvalidConfigError(f"--rounds must be at least 1, got {self.rounds}")
        if self.official is not None:
            checkout(self.official)
        if self.target is not None and not self.target > 0:
            raise InvalidConfigError(f"--target must be above 0, got {self.target}")

    def rounds_or(self, default: int) -> int:
        if self.rounds is not None:
            return self.rounds
        return QUICK_ROUNDS if self.quick else default

    @property
    def turn_seconds(self) -> float:
        """The shortest turn: long enough that waking up does not count."""
        return 0.02 if self.quick else 0.5


# The networks that are measured, and how each side calls their sizes.


@dataclass(frozen=True)
class UViTSize:
    image: int
    patch: int
    dim: int
    depth: int
    heads: int
    batch: int
    channels: int = 3

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    def ours(self) -> dict[str, Any]:
        """Arguments of `contenders.trainer.training_step`."""
        options = {"patch_size": self.patch, "dim": self.dim, "depth": self.depth, "heads": self.heads}
        shape = [self.channels, self.image, self.image]
        return {"model": "uvit", "options": options, "shape": shape, "batch": self.batch}

    def network(self) -> dict[str, Any]:
        """Arguments of `UViT`, and the batch."""
        sizes = {"image_size": self.image, "patch_size": self.patch, "channels": self.channels}
        return {**sizes, "dim": self.dim, "depth": self.depth, "heads": self.heads, "batch": self.batch}

    def official(self) -> dict[str, Any]:
        """Arguments of the authors' constructor."""
        return {
            "img_size": self.image,
            "patch_size": self.patch,
            "in_chans": self.channels,
            "embed_dim": self.dim,
            "depth": self.depth,
            "num_heads": self.heads,
        }

    def describe(self) -> str:
        return f"dim {self.dim}, depth {self.depth}, {self.tokens} tokens, batch {self.batch}"


S2_8 = UViTSize(image=32, patch=2, dim=512, depth=12, heads=8, batch=8)
"""U-ViT-S/2 on CIFAR-10's shape."""
S2_32 = replace(S2_8, batch=32)
SMALL = UViTSize(image=16, patch=2, dim=128, depth=12, heads=4, batch=64)
DEMO = UViTSize(image=16, patch=4, dim=64, depth=24, heads=4, batch=8, channels=1)
"""The network that `scalelong demo` and the range explore with."""
DIGITS = UViTSize(image=8, patch=2, dim=96, depth=6, heads=4, batch=32, channels=1)
"""The recipe digits-tiny."""
TINY = UViTSize(image=8, patch=2, dim=32, depth=4, heads=2, batch=4)
"""For --quick."""


@dataclass(frozen=True)
class UNetSize:
    """diffusers' UNet2DModel of the preset unet/cifar10, perhaps narrower."""

    batch: int
    widths: tuple[int, ...] = (128, 256, 256, 256)
    layers: int = 2
    image: int = 32

    @property
    def options(self) -> dict[str, Any]:
        return {"block_out_channels": list(self.widths), "layers_per_block": self.layers}

    def ours(self) -> dict[str, Any]:
        shape = [3, self.image, self.image]
        return {"model": "unet/cifar10", "options": self.options, "shape": shape, "batch": self.batch}

    def theirs(self) -> dict[str, Any]:
        return {"options": {**self.options, "sample_size": self.image}, "image": self.image, "batch": self.batch}

    def describe(self) -> str:
        return f"UNet2DModel of unet/cifar10, widths {', '.join(map(str, self.widths))}, batch {self.batch}"


CIFAR_UNET = UNetSize(batch=8)
SMALL_UNET = UNetSize(batch=16, widths=(32, 64, 64, 64), layers=1)
TINY_UNET = UNetSize(batch=2, widths=(32, 32, 32, 32), layers=1, image=16)
