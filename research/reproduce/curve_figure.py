"""Held-out loss over steps, a panel per setting."""

from typing import TYPE_CHECKING

from .drawing import by_method, colour, draw_seeds, legend, panels
from .results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    legend(axes[0])
    return figure
