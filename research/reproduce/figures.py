"""Figures of the studies: curves, dots and traces, a panel per setting, one colour per method, all seeds."""

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scalelong.experiments import RunRecord
from scalelong.files import write_bytes

from .claims import FRECHET, LOSS, TRACES, Quantity, StudyResults
from .settings import CORE

# Distinguishable with the common forms of colour blindness (Okabe and Ito).
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a900")


def draw_seeds(axes: Axes, lines: Sequence[tuple[Sequence[float], Sequence[float]]], label: str, color: str) -> None:
    """A thin line for every seed, and a thick one for their mean at the abscissas that all of them have."""
    if len(lines) > 1:
        for x, y in lines:
            axes.plot(x, y, color=color, alpha=0.35, linewidth=0.8)
    lookups = [dict(zip(x, y, strict=True)) for x, y in lines]
    shared = [x for x in lines[0][0] if all(x in lookup for lookup in lookups)] if lines else []
    if shared:
        means = [fmean(lookup[x] for lookup in lookups) for x in shared]
        axes.plot(shared, means, color=color, linewidth=1.7, label=label)


def legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)


def save(figure: Figure, path: Path) -> None:
    """Write the picture whole, or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(path, content.getvalue())


def panels(count: int, height: float = 2.7, width: float = 3.4, dpi: int = 90) -> tuple[Figure, list[Axes]]:
    """Axes in rows of three, or of two where that leaves no gap."""
    columns = 2 if count == 4 else min(3, max(1, count))
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=dpi)
    found = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in found[count:]:
        unused.set_axis_off()
    return figure, found[:count]


def colour(results: StudyResults, method: str) -> str:
    """A method has one colour in all figures; those that only one item has follow."""
    core = [entry.label for entry in CORE]
    others = list(dict.fromkeys(run.method for run in results.runs if run.method not in core))
    return COLOURS[[*core, *others].index(method) % len(COLOURS)]


def by_method(results: StudyResults, setting: str) -> list[tuple[str, list[RunRecord]]]:
    return [(method, results.of(method, setting)) for method in results.methods(setting)]


# Held-out loss over steps, a panel per setting.


def curve_figure(results: StudyResults) -> Figure:
    figure, axes = panels(len(results.settings))
    for axis, setting in zip(axes, results.settings, strict=True):
        ends = []
        for method, runs in by_method(results, setting):
            curves = [run.held_out for run in runs if len(run.held_out)]
            draw_seeds(axis, [(curve.steps, curve.values) for curve in curves], method, colour(results, method))
            ends += [curve.values[len(curve) // 4] for curve in curves]
        axis.set(title=setting, xlabel="step", ylabel="held-out loss")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:.2g}")
        axis.yaxis.set_minor_formatter("{x:.2g}")
        if ends:
            # The first quarter is the same steep fall for all; the rest is what is compared.
            axis.set_ylim(top=1.1 * max(ends))
        axis.tick_params(labelsize=7, which="both")
    legend(axes[0])
    return figure


# A number of every run as a dot, methods side by side, a panel per setting.


def dot_figure(results: StudyResults, quantity: Quantity) -> Figure:
    """A dot for each seed, a bar at their mean."""
    figure, axes = panels(len(results.settings), height=3.0)
    for axis, setting in zip(axes, results.settings, strict=True):
        rows = by_method(results, setting)
        for place, (method, runs) in enumerate(rows):
            values = [value for value in map(quantity.of, runs) if value is not None]
            color = colour(results, method)
            axis.plot([place] * len(values), values, "o", color=color, markersize=4, alpha=0.7)
            if values:
                axis.plot([place - 0.3, place + 0.3], [fmean(values)] * 2, color=color, linewidth=2)
        axis.set_xticks(range(len(rows)), [method for method, _ in rows], rotation=35, ha="right", fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.set(title=setting, ylabel=quantity.name)
    return figure


QUALITY_FIGURES = {"loss": partial(dot_figure, quantity=LOSS), "frechet": partial(dot_figure, quantity=FRECHET)}


# Readings of a feature and of the gradient over steps, as in the paper's Figure 1.

NAMES = {"features": "RMS behind the middle block", "gradient": "norm of the gradient"}


def trace_figure(results: StudyResults) -> Figure:
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
    legend(axes[0])
    return figure
