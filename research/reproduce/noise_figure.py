"""Figure 3: histograms of the input, and the loss of trained networks under extra noise."""

from typing import TYPE_CHECKING

from .drawing import by_method, colour, draw_seeds, legend, panels
from .results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RANGES = {"norm": (0, 2, "‖x_t‖² / m"), "ratio": (0, 6, "‖ε‖² / ‖x_t‖²")}


def noise_figure(results: Results) -> "Figure":
    figure, axes = panels(2 + len(results.settings))
    histograms, losses = axes[:2], axes[2:]
    for axis, (name, (low, high, label)) in zip(histograms, RANGES.items(), strict=True):
        for data, values in results.survey.get("data", {}).items():
            counts = values["histograms"][name]
            width = (high - low) / len(counts)
            edges = [low + width * place for place in range(len(counts) + 1)]
            axis.stairs([count / width for count in counts], edges, label=data, fill=True, alpha=0.5)
        axis.set(xlabel=label, ylabel="density")
        axis.tick_params(labelsize=7)
    histograms[1].set_yscale("log")
    legend(histograms[0])
    for axis, setting in zip(losses, results.settings, strict=True):
        for method, runs in by_method(results, setting):
            measured = [run.measured["losses"] for run in runs if "losses" in run.measured]
            lines = [([float(sigma) for sigma in one], list(one.values())) for one in measured]
            draw_seeds(axis, lines, method, colour(results, method))
        axis.set(title=setting, xlabel="σ of extra noise", ylabel="held-out loss")
        axis.tick_params(labelsize=7)
    legend(losses[0])
    return figure
