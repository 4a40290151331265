"""What a new U-ViT starts as, and what new runs are trained with, in one place.

The constants NEW are the switch: the evidence decides them. `EARLIER` is what a configuration, a preset or a
file means that does not name them; it never changes, because runs and checkpoints of earlier versions rely on it.
"""

from typing import Any

NEW_UVIT: dict[str, Any] = {"init_std": "unit", "residual_scaling": "none"}
"""Defaults of `sl.UViT`."""
NEW_NARROW: dict[str, Any] = {"init_std": 0.06}
"""Model options of runs that `scalelong train` sizes at widths below 256."""
NEW_RUN: dict[str, Any] = {"optimizer": "adamw"}
"""Fields of the optimiser in runs of a U-ViT that `scalelong train` sizes."""
EARLIER: dict[str, Any] = {"init_std": "unit", "residual_scaling": "none"}


def new_uvit_options() -> dict[str, Any]:
    """Model options that a new run must name, since its configuration would mean others without them."""
    return {name: value for name, value in NEW_UVIT.items() if value != EARLIER[name]}
