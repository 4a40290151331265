"""Figures of the studies: curves, dots, traces."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from scalelong.experiments.figures import colour_of, pyplot
from scalelong.experiments.results import mean

from .claims import FRECHET, LOSS, TRACES, Quantity, Results, RunRecord
from .settings import CORE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Parts that the figures of all items share: axes in rows, one colour per method, every seed drawn.

COLUMNS = 3


def panels(count: int, height: float = 2.7) -> "tuple[Figure, list[Axes]]":
    """Axes in rows of three, or of two where that leaves no gap."""
    columns = 2 if count == 4 else min(COLUMNS, max(1, count))
    rows = -(-count // columns)
    figure = pyplot().figure(figsize=(3.4 * columns, height * rows), layout="constrained", dpi=90)
    found = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in found[count:]:
        unused.set_axis_off()
    return figure, found[:count]


def colour(results: Results, method: str) -> str:
    """A method has one colour in all figures; those that only one item has follow."""
    core = [entry.label for entry in CORE]
    others = list(dict.fromkeys(run.method for run in results.runs if run.method not in core))
    return colour_of([*core, *others].index(method))


def draw_seeds(axes: "Axes", lines: Sequence[tuple[Sequence[float], Sequence[float]]], label: str, color: str) -> None:
    """A thin line for every seed, and a thick one for their mean where they share their abscissas."""
    for x, y in lines:
        axes.plot(x, y, color=color, alpha=0.35, linewidth=0.8)
    shared = min((len(x) for x, _ in lines), default=0)
    if shared:
        means = [mean([y[place] for _, y in lines]) for place in range(shared)]
        axes.plot(lines[0][0][:shared], means, color=color, linewidth=1.7, label=label)


def legend_of(axes: "Axes", **options: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7, **options)


def by_method(results: Results, setting: str) -> list[tuple[str, list[RunRecord]]]:
    return [(method, results.of(setting, method)) for method in results.methods(setting)]


# Held-out loss over steps, a panel per setting.


def curve_figure(results: Results) -> "Figure":
    figure, axes = panels(len(results.settings))
    for axis, setting in zip(axes, results.settings, strict=True):
        ends = []
        for method, runs in by_method(results, setting):
            curves = [run.curve for run in runs if run.held_out]
            draw_seeds(axis, [(curve.steps, curve.values) for curve in curves], method, colour(results, method))
            ends += [curve.values[len(curve) // 4] for curve in curves]
        axis.set(title=setting, xlabel="step", ylabel="held-out loss", yscale="log")
        if ends:
            # The first quarter is the same steep fall for all; the rest is what is compared.
            axis.set_ylim(top=1.1 * max(ends))
        axis.yaxis.set_major_formatter("{x:.2g}")
        axis.yaxis.set_minor_formatter("{x:.2g}")
        axis.tick_params(labelsize=7, which="both")
    legend_of(axes[0])
    return figure


# A number of every run as a dot, methods side by side, a panel per setting.


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


# Readings of a feature and of the gradient over steps, as in the paper's Figure 1.

NAMES = {"features": "RMS behind the middle block", "gradient": "norm of the gradient"}


def trace_figure(results: Results) -> "Figure":
    """The readings of the first seed."""
    figure, axes = panels(len(TRACES) * len(results.settings))
    places = [(name, setting) for name in TRACES for setting in results.settings]
    for axis, (name, setting) in zip(axes, places, strict=True):
        for method, runs in by_method(results, setting):
            if runs and name in runs[0].traces:
                values = runs[0].traces[name]
                axis.plot(values, color=colour(results, method), linewidth=0.8, label=method)
        axis.set(title=setting, xlabel="reading", ylabel=NAMES[name], yscale="log")
        axis.tick_params(labelsize=7, which="both")
    legend_of(axes[0])
    return figure
