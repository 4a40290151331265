"""Figures of runs: one style, panels in rows, every seed drawn thin and the mean thick, files whole or not there."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..files import write_bytes
from ..optional import needs
from .records import RunRecord
from .results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with the common forms of colour blindness (Okabe and Ito).
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a900")


# The parts that all figures share


def pyplot() -> Any:
    needs("matplotlib", "report", "drawing a comparison").use("Agg")
    return needs("matplotlib.pyplot", "report", "drawing a comparison")


def colour_of(position: int) -> str:
    return COLOURS[position % len(COLOURS)]


def draw_seeds(axes: "Axes", lines: Sequence[tuple[Sequence[float], Sequence[float]]], label: str, color: str) -> None:
    """A thin line for every seed, and a thick one for their mean at the abscissas that all of them have."""
    if len(lines) > 1:
        for x, y in lines:
            axes.plot(x, y, color=color, alpha=0.35, linewidth=0.8)
    lookups = [dict(zip(x, y, strict=True)) for x, y in lines]
    shared = [x for x in lines[0][0] if all(x in lookup for lookup in lookups)] if lines else []
    if shared:
        means = [fmean(lookup[x] for lookup in lookups) for x in shared]
        axes.plot(shared, means, color=color, linewidth=1.7, label=label)


def legend(axes: "Axes", **options: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**{"frameon": False, "fontsize": 7, **options})


def log_scale(axes: "Axes") -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.2g}")
    axes.yaxis.set_minor_formatter("{x:.2g}")


def save(figure: "Figure", path: Path) -> None:
    """Write the picture whole, or not at all. The suffix of the file is its format."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png")
    pyplot().close(figure)
    write_bytes(path, content.getvalue())


# The figure of a comparison


def draw_comparison(results: Results, path: Path) -> None:
    """Held-out loss, coefficients, and the last samples of every method."""
    methods = results.methods()
    figure = pyplot().figure(figsize=(3.3 * max(3, len(methods)), 7.2), layout="constrained", dpi=130)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1))
    left, right = top.subplots(1, 2, width_ratios=(1.6, 1))
    for position, method in enumerate(methods):
        runs, color = results.of(method), colour_of(position)
        curves = [run.held_out for run in runs if len(run.held_out)]
        draw_seeds(left, [(curve.steps, curve.values) for curve in curves], method, color)
        for run in runs:
            right.plot(range(1, len(run.kappas) + 1), run.kappas, marker="o", markersize=4, color=color, alpha=0.8)
    left.set(xlabel="training step", ylabel="held-out loss", title="Loss on held-out images")
    log_scale(left)
    legend(left, fontsize="medium")
    right.set(
        xlabel="long skip i (1 is the outermost)", ylabel=r"$\kappa_i$", title="Coefficients at the end", ylim=(0, 1.05)
    )
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes, method in zip(bottom.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        _draw_samples(axes, results.of(method)[0])
    save(figure, path)


def _draw_samples(axes: "Axes", run: RunRecord) -> None:
    axes.set_axis_off()
    grids = sorted((run.folder / "samples").glob("step-*.png")) if run.folder else []
    axes.set_title(f"{run.method}, seed {run.seed}" if grids else f"{run.method}: no samples")
    if grids:
        axes.imshow(pyplot().imread(grids[-1]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
