"""Readings of a feature and of the gradient over steps, as in the paper's Figure 1, and their scores."""

from typing import TYPE_CHECKING

from .dot_figures import dot_figure
from .drawing import by_method, colour, legend, panels
from .quantities import FEATURES
from .results import TRACES, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"features": "RMS behind the middle block", "gradient": "norm of the gradient"}


def trace_figures(results: Results) -> "dict[str, Figure]":
    """The first seed's readings; the scores of all seeds."""
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
    return {"traces": figure, "oscillation": dot_figure(results, FEATURES)}
