"""κ_i over i, against the band of CS (Figure 7)."""

from typing import TYPE_CHECKING

from .drawing import by_method, colour, draw_seeds, legend, panels
from .results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BAND = (0.5, 0.95)


def coefficient_figure(results: Results) -> "Figure":
    figure, axes = panels(len(results.settings))
    for axis, setting in zip(axes, results.settings, strict=True):
        count = 0
        for method, runs in by_method(results, setting):
            lines = [run.measured.get("kappas") or run.kappas for run in runs]
            count = max([count, *map(len, lines)])
            color = colour(results, method)
            draw_seeds(axis, [(range(1, len(line) + 1), line) for line in lines], method, color)
        numbers = range(1, count + 1)
        low, high = ([kappa ** (i - 1) for i in numbers] for kappa in BAND)
        axis.fill_between(numbers, low, high, color="#e69f00", alpha=0.25, linewidth=0, label="CS, κ from 0.5 to 0.95")
        axis.set(title=setting, xlabel="long skip i (1 is the outermost)", ylabel=r"$\kappa_i$", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore[reportCallIssue]
        axis.tick_params(labelsize=7)
    legend(axes[0])
    return figure
