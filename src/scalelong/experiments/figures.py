"""Pictures of a comparison. Every seed is drawn; the thick line is the mean."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_bytes
from ..optional import needs
from .results import Curve, mean, read_curves
from .runs import PlannedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinguishable with the common forms of colour blindness (Okabe and Ito).
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a900")


def colour_of(position: int) -> str:
    return COLOURS[position % len(COLOURS)]


def draw_comparison(runs: Sequence[PlannedRun], path: Path) -> None:
    """Held-out loss, coefficients, and the last samples of every method."""
    plt = pyplot()
    methods = list(dict.fromkeys(run.method for run in runs))
    curves = {run.name: read_curves(run.folder) for run in runs}
    width = max(3, len(methods))
    figure = plt.figure(figsize=(3.3 * width, 7.2), layout="constrained", dpi=130)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1))
    left, right = top.subplots(1, 2, width_ratios=(1.6, 1))
    for position, method in enumerate(methods):
        mine = [curves[run.name] for run in runs if run.method == method]
        _draw_losses(left, [found["held_out_loss"] for found in mine if "held_out_loss" in found], method, position)
        _draw_coefficients(right, mine, position)
    left.set(xlabel="training step", ylabel="held-out loss", yscale="log", title="Loss on held-out images")
    left.yaxis.set_major_formatter("{x:.3g}")
    left.yaxis.set_minor_formatter("{x:.2g}")
    if left.lines:
        left.legend(frameon=False)
    right.set(
        xlabel="long skip i (1 is the outermost)", ylabel=r"$\kappa_i$", title="Coefficients at the end", ylim=(0, 1.05)
    )
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes, method in zip(bottom.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        _draw_samples(axes, next(run for run in runs if run.method == method))
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    write_bytes(path, content.getvalue())


def _draw_losses(axes: "Axes", curves: list[Curve], label: str, position: int) -> None:
    if not curves:
        return
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.steps, curve.values, color=colour_of(position), alpha=0.35, linewidth=0.8)
    steps = sorted(set.intersection(*(set(curve.steps) for curve in curves)))
    lookup = [dict(curve.points) for curve in curves]
    means = [mean([values[step] for values in lookup]) for step in steps]
    axes.plot(steps, means, color=colour_of(position), linewidth=1.8, label=label)


def _draw_coefficients(axes: "Axes", runs: list[dict[str, Curve]], position: int) -> None:
    for found in runs:
        kappas = [found[f"kappa/{i}"].values[-1] for i in range(1, len(found) + 1) if f"kappa/{i}" in found]
        axes.plot(range(1, len(kappas) + 1), kappas, marker="o", markersize=4, color=colour_of(position), alpha=0.8)


def _draw_samples(axes: "Axes", run: PlannedRun) -> None:
    axes.set_axis_off()
    grids = sorted((run.folder / "samples").glob("step-*.png"))
    axes.set_title(f"{run.method}, seed {run.seed}" if grids else f"{run.method}: no samples")
    if grids:
        axes.imshow(pyplot().imread(grids[-1]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def pyplot() -> Any:
    needs("matplotlib", "report", "drawing a comparison").use("Agg")
    return needs("matplotlib.pyplot", "report", "drawing a comparison")
