"""Parts that figures share: every seed drawn thin and the mean thick, files whole or not there."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from scalelong.files import write_bytes
from scalelong.optional import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with the common forms of colour blindness (Okabe and Ito).
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a900")


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
