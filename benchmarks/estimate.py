"""What contenders in lockstep cost over a baseline, from the seconds of their slices."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .spread import Spread

DRAWS = 400
CONFIDENCE = 0.95


def cost(slices: Tensor, baseline: Tensor, parts: Tensor) -> Spread:
    """Time over the baseline's in these parts, as a share of the baseline's step, with its 95 % interval.

    Both have the shape (rounds, slices). The difference is taken slice by slice in the same round, where the machine is
    as fast for both, and its median over the rounds is not moved by interruptions. The interval is a bootstrap over
    rounds.
    """
    if not parts.any():
        return Spread(0.0, 0.0, 0.0)
    step = float(baseline.median(0).values.sum())
    differences = (slices - baseline)[:, parts]
    rounds = len(differences)
    generator = torch.Generator().manual_seed(0)
    drawn = [
        _middle(differences[torch.randint(rounds, (rounds,), generator=generator)]).sum() / step for _ in range(DRAWS)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.stack(drawn).quantile(torch.tensor([tail, 1 - tail], dtype=differences.dtype)).tolist()
    return Spread(float(_middle(differences).sum() / step), low, high)


def _middle(values: Tensor) -> Tensor:
    # torch.median takes the lower of the two middle values, and a difference must not lean to a side.
    return values.quantile(0.5, dim=0)


def table_of(rounds: list[dict[str, list[float]]]) -> Mapping[str, Tensor]:
    """From the slices of each round to (rounds, slices) of each contender."""
    return {name: torch.tensor([each[name] for each in rounds], dtype=torch.float64) for name in rounds[0]}
