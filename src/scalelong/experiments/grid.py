"""Rates × widths: which learning rate is best at each width, and what the small network's rate costs the wide one.

    scalelong compare --methods none --variants 'μP: base_width=64' --widths 64,128,256 --rates 2e-3,4e-3,8e-3,16e-3

Every rate is trained at every width with every method and seed. The *regret* of a width is what is lost there by the
rate that was best at the smallest width: with it the price of not searching again is known.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config import TrainConfig
from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_text
from .comparison import Comparison, Hold, all_well, at, compare_cells, mean_loss, named_rate, require_free_axis
from .figures import colour_of, legend, log_scale, panels, save
from .plan import Variant
from .results import spread


@dataclass(frozen=True)
class RateGrid:
    """The comparisons of all widths and rates. Print it."""

    found: dict[tuple[int, float], Comparison]
    hold: Hold

    @property
    def widths(self) -> list[int]:
        return sorted({width for width, _ in self.found})

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate in self.found})

    @property
    def methods(self) -> list[str]:
        return [entry.method for entry in next(iter(self.found.values())).summaries]

    def loss(self, method: str, width: int, rate: float) -> float:
        """The mean over seeds at the end; infinite where a seed diverged."""
        return mean_loss(self.found[width, rate], method)

    def losses(self, method: str, width: int, rate: float) -> dict[int, float]:
        """By seed."""
        runs = self.found[width, rate].results.of(method)
        return {run.seed: run.held_out.values[-1] for run in runs if len(run.held_out) and run.diverged is None}

    def best(self, method: str, width: int) -> float | None:
        """The rate with the lowest mean loss; None if no rate has one."""
        rate = min(self.rates, key=lambda rate: self.loss(method, width, rate))
        return rate if math.isfinite(self.loss(method, width, rate)) else None

    def regret(self, method: str, width: int) -> float | None:
        """What the best rate of the smallest width costs here, relative to the loss at the best rate."""
        taken, best = self.best(method, self.widths[0]), self.best(method, width)
        if taken is None or best is None:
            return None
        return self.loss(method, width, taken) / self.loss(method, width, best) - 1

    def rows(self) -> list[dict[str, str]]:
        rows = []
        for method in self.methods:
            for width in self.widths:
                best, regret = self.best(method, width), self.regret(method, width)
                values = [] if best is None else list(self.losses(method, width, best).values())
                learned = [rate for rate in self.rates if all_well(self.found[width, rate], method)]
                rows.append(
                    {
                        "method": method,
                        "width": str(width),
                        "best rate": "none" if best is None else named_rate(best, self.rates),
                        "held-out loss there": spread(values, "{:.4f}") if values else "-",
                        f"regret of width {self.widths[0]}'s best": "-" if regret is None else f"{regret:.1%}",
                        "rates at which all seeds learned": " ".join(f"{rate:g}" for rate in learned) or "none",
                    }
                )
        return rows

    def __str__(self) -> str:
        held = "the size of an attention head" if self.hold == "head-size" else "the number of heads"
        return f"{text_table(self.rows())}\nheld over the widths: {held}"

    def to_json(self) -> str:
        cells = [
            {"method": method, "width": width, "rate": rate, "losses": self.losses(method, width, rate)}
            for method in self.methods
            for width in self.widths
            for rate in self.rates
        ]
        rows = [
            {
                "method": method,
                "width": width,
                "best_rate": self.best(method, width),
                "regret": self.regret(method, width),
            }
            for method in self.methods
            for width in self.widths
        ]
        return json.dumps({"hold": self.hold, "rows": rows, "cells": cells}, indent=1)

    def plot(self, path: Path) -> None:
        """A panel per method: loss over rate, a line per width, every seed as a dot, the best rate marked."""
        figure, axes = panels(len(self.methods), height=3.0)
        for place, method in zip(axes, self.methods, strict=True):
            for position, width in enumerate(self.widths):
                color = colour_of(position)
                seen = [(rate, self.losses(method, width, rate)) for rate in self.rates]
                for rate, values in seen:
                    place.plot([rate] * len(values), list(values.values()), ".", color=color, alpha=0.4, markersize=4)
                means = [(rate, fmean(values.values())) for rate, values in seen if values]
                place.plot(
                    [rate for rate, _ in means], [mean for _, mean in means], color=color, label=f"width {width}"
                )
                best = self.best(method, width)
                if best is not None:
                    place.plot([best], [self.loss(method, width, best)], "o", color=color, markersize=7)
            place.set(xscale="log", xlabel="learning rate", title=method)
            log_scale(place)
            place.set_xticks(self.rates, [f"{rate:g}" for rate in self.rates], rotation=45)
            place.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            legend(place)
        axes[0].set_ylabel("held-out loss")
        save(figure, path)

    def save(self, out: Path) -> None:
        """grid.json, grid.txt and grid.png."""
        write_text(out / "grid.json", self.to_json() + "\n")
        write_text(out / "grid.txt", f"{self}\n")
        self.plot(out / "grid.png")


def rate_grid(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: Path,
    widths: Sequence[int],
    rates: Sequence[float],
    *,
    hold: Hold = "head-size",
    **pace: Any,
) -> RateGrid | None:
    """One comparison per width and rate, each in a folder of its own. None if not all are finished now."""
    for name, values in (("--widths", widths), ("--rates", rates)):
        if len(set(values)) != len(values) or not values:
            raise InvalidConfigError(f"{name} must name different values, got {', '.join(f'{v:g}' for v in values)}")
    for axis in ("width", "rate"):
        require_free_axis(methods, axis)
    cells = {
        (width, rate): (
            at(at(config, "width", width, hold), "rate", rate),
            out / f"width-{width:g}" / f"rate-{rate:g}",
        )
        for width in widths
        for rate in rates
    }
    found = compare_cells(cells, methods, seeds, out, **pace)
    if found is None:
        return None
    grid = RateGrid(found, hold)
    grid.save(out)
    return grid
