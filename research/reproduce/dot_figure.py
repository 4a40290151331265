"""A number of every run as a dot, methods side by side, a panel per setting."""

from functools import partial
from typing import TYPE_CHECKING

from scalelong.experiments.results import mean

from .drawing import by_method, colour, panels
from .quantities import FRECHET, LOSS, Quantity
from .results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def dot_figure(results: Results, quantity: Quantity) -> "Figure":
    """A dot for each seed, a bar at their mean."""
    figure, axes = panels(len(results.settings), height=3.0)
    for axis, setting in zip(axes, results.settings, strict=True):
        rows = by_method(results, setting)
        for place, (method, runs) in enumerate(rows):
            values = [value for value in map(quantity.of, runs) if value is not None]
            color = colour(results, method)
            axis.plot([place] * len(values), values, "o", color=color, markersize=4, alpha=0.7)
            if values:
                axis.plot([place - 0.3, place + 0.3], [mean(values)] * 2, color=color, linewidth=2)
        axis.set_xticks(range(len(rows)), [method for method, _ in rows], rotation=35, ha="right", fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.set(title=setting, ylabel=quantity.name)
    return figure


QUALITY_FIGURES = {"loss": partial(dot_figure, quantity=LOSS), "frechet": partial(dot_figure, quantity=FRECHET)}
