"""Readings of a feature and of the gradient over steps, as in the paper's Figure 1."""

from typing import TYPE_CHECKING

from .drawing import by_method, colour, legend, panels
from .results import TRACES, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    legend(axes[0])
    return figure
