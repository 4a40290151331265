"""Figure 3: histograms of the input, and the loss after training with extra noise."""

from typing import TYPE_CHECKING

from .drawing import by_method, colour, draw_seeds, legend, panels
from .quantities import LOSS
from .results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANGES = {"norm": (0, 2, "‖x_t‖² / m"), "ratio": (0, 6, "‖ε‖² / ‖x_t‖²")}


def noise_figure(results: Results) -> "Figure":
    figure, (*histograms, losses) = panels(3)
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
    settings = list(results.settings)
    for method, _ in by_method(results, settings[0]):
        runs = [results.of(setting, method) for setting in settings]
        lines = [(range(len(settings)), [LOSS.of(run) or 1.0 for run in seed]) for seed in zip(*runs, strict=True)]
        draw_seeds(losses, lines, method, colour(results, method))
    losses.set_xticks(range(len(settings)), settings)
    losses.set(xlabel="extra noise in training", ylabel="held-out loss")
    losses.tick_params(labelsize=7)
    legend(losses)
    return figure
