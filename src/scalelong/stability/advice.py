"""The one thing to do about training that breaks, in one place: diagnosis, range, guard, alarms and errors say it.

It follows docs/recipe.md. A norm in each merge lasts at high rates; where the merges have norms already, the rate is
too high. What did not help there (clipping, a longer warm-up, a chosen κ) is not advised anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..finding import LongSkip

MERGE_NORM = 'sl.scale_skips_(model, "merge_norm", inputs)'
LOWER = 4
"""A rate that broke a run is divided by this."""
HIGH_RATE, USUAL_RATE = 0.1, 1e-3
"""Rates of AdamW: above the first nothing trains, with the second most do."""


def bare_merges(plan: Iterable[LongSkip], scaling: str | None = None) -> list[int]:
    """The long skips that are concatenated without a norm, where `merge_norm` helps; `scaling` is the model's."""
    if scaling == "merge_norm":
        return []
    return [skip.index for skip in plan if skip.site.main_channels is not None and not norm_of(skip)]


def norm_of(skip: LongSkip) -> str:
    """The norm that reads a merge; empty if there is none."""
    return skip.site.norm or skip.readers.norm


def what_to_do(bare: bool | None, rate: float | None = None) -> str:
    """A sentence. `bare`: some merges have no norm; None where the network is not known."""
    lower = "a lower learning rate"
    if rate is not None:
        lower = f"a learning rate of {rate / LOWER if rate <= HIGH_RATE else USUAL_RATE:.2g} instead of {rate:g}"
    if rate is not None and rate > HIGH_RATE:
        return f"Train with {lower}."
    if bare is None:
        return (
            f"Train with a norm in each merge, {MERGE_NORM} before the first step, or where the merges have norms with "
            f"{lower}."
        )
    if bare:
        return f"Train with a norm in each merge, which lasts at high rates: {MERGE_NORM} before the first step."
    return f"Train with {lower}, or with Muon, which bears higher ones."
